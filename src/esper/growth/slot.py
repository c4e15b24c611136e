"""A slot: stands after a submodule of the host. While it is idle it does nothing at all.

Slots are not part of the host's module tree: parameters and state dict of the host stay what they were, so that the user's optimiser,
gradient clipping and checkpoints do not notice them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.growth.around import Around
from esper.growth.place import Place
from esper.growth.seed import Seed


class Observer(Protocol):
    """Looks at what flows through a slot, and may pass on something that equals it."""

    def __call__(self, slot: Slot, output: Tensor) -> Tensor: ...


class Slot(Around):
    def __init__(self, place: Place) -> None:
        self.place = place
        self.seed: Seed | None = None
        self.is_connected = False  # the host's output goes through the seed
        self.is_kept = False  # the seed is fossilized
        self.observer: Observer | None = None
        self.is_idle = True
        self._alpha = 0.0  # what the seed's buffer holds, readable without waiting for the device

    def forward(self, *arguments: Any, **named: Any) -> Any:
        output = self.inner(*arguments, **named)
        return output if self.is_idle else self._act(output)

    def _act(self, output: Tensor) -> Tensor:
        if self.observer is not None:
            output = self.observer(self, output)
        if self.is_connected and self.seed is not None:
            # A user's own blueprint may have dropout. Compiled code must not change modules; there `Slotted.train` reaches the seed.
            if not torch.compiler.is_compiling() and self.seed.training != self.module.training:
                self.seed.train(self.module.training)
            output = self.seed(output)
        return output

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the slot has no observer: whoever looks here would never look there."""
        return {**self.__dict__, "observer": None, "is_idle": not self.is_connected}

    def plant(self, seed: Seed | None, *, connected: bool = False) -> None:
        """Puts a seed in, outside the host unless `connected`; None empties the slot."""
        self.seed = seed
        self.is_kept = False
        self._alpha = 0.0
        self.connect(connected and seed is not None)

    def connect(self, connected: bool) -> None:
        self.is_connected = connected
        self._settle()

    def observe(self, observer: Observer | None) -> None:
        self.observer = observer
        self._settle()

    def _settle(self) -> None:
        self.is_idle = not self.is_connected and self.observer is None

    @property
    def alpha(self) -> float:
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        assert self.seed is not None
        self._alpha = value
        self.seed.alpha.fill_(value)

    @contextlib.contextmanager
    def held_at(self, alpha: float) -> Iterator[None]:
        """For a while the seed is connected with this alpha."""
        was_connected, before = self.is_connected, self.alpha
        self.alpha = alpha
        self.connect(True)
        try:
            yield
        finally:
            self.alpha = before
            self.connect(was_connected)
