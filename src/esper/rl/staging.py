"""Many small tensors over the bus in one transfer.

Environments on the CPU and a learner on a GPU exchange a dozen tensors per step, and each transfer costs more than what it carries.
A `Staging` lays them side by side in one buffer, pinned on the CPU's side, and moves that.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; every dtype may start there


class Staging:
    """Moves dictionaries of tensors to `device`. The layout is made for the first one and again whenever shapes or types change.

    What `move` returns are views of a buffer that the next call overwrites, and a transfer from pinned memory may still be under way when
    `move` returns: whoever calls it again must have synchronised since. Acting does, by reading the actions.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._layout: dict[str, tuple[torch.Size, torch.dtype, int, int]] = {}
        self._source = self._target = torch.empty(0, dtype=torch.uint8)

    def move(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        layout = _lay_out(tensors)
        if layout != self._layout:
            self._allocate(layout, next(iter(tensors.values())).device)
        for name, tensor in tensors.items():
            _view(self._source, self._layout[name]).copy_(tensor)
        self._target.copy_(self._source, non_blocking=self.device.type != "cpu")
        return {name: _view(self._target, place) for name, place in self._layout.items()}

    def _allocate(self, layout: dict[str, tuple[torch.Size, torch.dtype, int, int]], source: torch.device) -> None:
        size = max((start + length for _, _, start, length in layout.values()), default=0)
        pin = torch.cuda.is_available() and source != self.device
        self._layout = layout
        self._source = torch.empty(size, dtype=torch.uint8, device=source, pin_memory=pin and source.type == "cpu")
        self._target = torch.empty(size, dtype=torch.uint8, device=self.device, pin_memory=pin and self.device.type == "cpu")


def _lay_out(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype, int, int]]:
    """Shape, type, first byte and length of each."""
    layout, start = {}, 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        layout[name] = (tensor.shape, tensor.dtype, start, length)
        start += -(-length // _ALIGNMENT) * _ALIGNMENT
    return layout


def _view(buffer: Tensor, place: tuple[torch.Size, torch.dtype, int, int]) -> Tensor:
    shape, dtype, start, length = place
    return buffer[start : start + length].view(dtype).view(shape)
