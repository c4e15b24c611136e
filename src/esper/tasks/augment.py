"""Augment a batch of training images by random crops and flips.

Shapes: B = images, C = channels, H, W = height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING = 4  # pixels on every side


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift every image [B, C, H, W] by up to four pixels and mirror half of them. New pixels at the border are 0, the normalised mean."""
    count, _, height, width = images.shape
    # Draw on the CPU, so that all devices give the same images.
    down, right = torch.randint(0, 2 * PADDING + 1, (2, count, 1), generator=generator, device="cpu").to(images.device)
    is_mirrored = torch.randint(0, 2, (count, 1), generator=generator, device="cpu").to(images.device).bool()
    across = torch.arange(width, device=images.device)
    rows = down + torch.arange(height, device=images.device)  # [B, H], 0 .. H + 2·PADDING - 1
    columns = right + torch.where(is_mirrored, across.flip(0), across)  # [B, W]
    padded = F.pad(images, (PADDING, PADDING, PADDING, PADDING)).movedim(1, -1)  # [B, H + 8, W + 8, C]
    which = torch.arange(count, device=images.device)[:, None, None]
    return padded[which, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()
