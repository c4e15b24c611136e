"""Image data: normalisation, division into parts, and random crops and flips for training.

The division of samples into train and validation never changes. It comes from a hash and not from a random generator, because the draws of
a generator may change with the version of its library. A network must not be tested on samples that it was trained on with another version.

Shapes: M = images, B = images of a batch, C = channels, H, W = height and width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from esper.tasks.options import TaskError
from esper.tasks.task import Split

Images = NDArray[np.uint8]  # [M, C, H, W]
Labels = NDArray[np.integer]  # [M]
Indices = NDArray[np.int64]

PADDING = 4  # pixels on every side


def normalised(images: Images, labels: Labels, *, mean: Sequence[float], spread: Sequence[float]) -> Split:
    """Return images of bytes as float32 with a mean of about 0 and a standard deviation of about 1.

    `mean` and `spread` are the mean and standard deviation of each channel, for pixels of 0 .. 1.
    """
    inputs = torch.from_numpy(images.astype(np.float32))
    for channel, (middle, scale) in enumerate(zip(mean, spread, strict=True)):
        inputs[:, channel].sub_(255 * middle).div_(255 * scale)
    return Split(inputs, torch.from_numpy(np.ascontiguousarray(labels)))


def train_and_validation(labels: Labels, *, seed: int) -> tuple[Indices, Indices]:
    """Return the indices of the training part and of the validation part: a stratified tenth that is always the same."""
    held_out = len(labels) // 10
    if not held_out:
        raise TaskError(
            f"{len(labels)} training images are too few, because a tenth of them becomes the validation part; use the complete file"
        )
    train, validation = stratified_parts(labels, (len(labels) - held_out, held_out), seed=seed)
    return train, validation


def stratified_parts(labels: Labels, sizes: Sequence[int], *, seed: int) -> list[Indices]:
    """Return the indices of disjoint parts of exactly these sizes, each sorted. Every part has about the same share of each class."""
    assert sum(sizes) == len(labels)
    order = _stratified_order(labels, seed)
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def _stratified_order(labels: Labels, seed: int) -> Indices:
    """Return all samples in an order that spreads each class evenly, so that every contiguous part of it is stratified."""
    keys = np.array([_hash(seed, index) for index in range(len(labels))], dtype=np.uint64)
    # Give the shuffled samples of each class equally spaced places in (0, 1), then sort all samples by place.
    place = np.empty(len(labels))
    for label in np.unique(labels):
        samples = np.flatnonzero(labels == label)
        shuffled = samples[np.argsort(keys[samples])]
        place[shuffled] = (np.arange(len(samples)) + 0.5) / len(samples)
    return np.lexsort((keys, place)).astype(np.int64)


def _hash(seed: int, index: int) -> int:
    """Return 64 bits that depend only on the seed and the index."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little")


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
    image = torch.arange(count, device=images.device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()
