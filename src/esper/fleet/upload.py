"""Numbers on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Does not wait for the device: a copy from ordinary memory would wait for all that is still to be computed there."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
