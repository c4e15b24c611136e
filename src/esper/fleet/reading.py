"""What is read from the device: everything of one decision at once."""

from __future__ import annotations

import torch
from torch import Tensor


class Reading:
    """Tensors are gathered by name and read in one transfer, as float64: losses and norms lose nothing.

    >>> reading = Reading()
    >>> reading.add("losses", torch.tensor([[1.0], [2.0]]))
    >>> reading.add("finite", torch.tensor([True]))
    >>> reading.read()["losses"].tolist()
    [[1.0], [2.0]]
    """

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        assert name not in self._parts
        self._parts[name] = values.detach()

    def read(self) -> dict[str, Tensor]:
        flat = torch.cat([part.reshape(-1).double() for part in self._parts.values()]).cpu()
        sizes = [part.numel() for part in self._parts.values()]
        return {
            name: values.view(part.shape) for (name, part), values in zip(self._parts.items(), flat.split_with_sizes(sizes), strict=True)
        }
