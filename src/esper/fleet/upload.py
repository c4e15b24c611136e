"""Numbers on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Numbers = Tensor | Sequence[int] | Sequence[float] | Sequence[Sequence[float]]


def upload(values: Numbers, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Does not wait for the device: a copy from ordinary memory would wait for all that is still to be computed there."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    needs_pinning = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if needs_pinning else tensor).to(device, non_blocking=True)
