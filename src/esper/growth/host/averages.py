"""Averages of a growing model's weights, which grow with the model."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from esper.growth.config import GrowthError
from esper.growth.host.slots import Slot


class HasSlots(Protocol):
    """The part of `esper.growth.Slotted` that averages use."""

    host: nn.Module

    @property
    def slots(self) -> dict[str, Slot]: ...

    def open_again(self, name: str) -> Slot: ...

    def close(self, name: str) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def bake(self, *, fold: bool = True) -> nn.Module: ...


class SlotsInStep:
    """Lets the slots of a copy hold what those of the original hold."""

    def __init__(self, target: HasSlots, source: HasSlots, *, is_copy: bool) -> None:
        self.target, self.source = target, source
        self._plantings = {name: slot.plantings for name, slot in source.slots.items()} if is_copy else {}

    def follow(self) -> list[tuple[nn.Module, nn.Module]]:
        """Open and close slots, and copy new seeds with their weights. Return the pairs (copy, original) of the other seeds."""
        for name in [name for name in reversed(self.target.slots) if name not in self.source.slots]:
            self.target.close(name)
        for name, slot in self.source.slots.items():
            if name not in self.target.slots:
                self.target.open_again(slot.place.module)
        pairs: list[tuple[nn.Module, nn.Module]] = []
        for name, source in self.source.slots.items():
            target = self.target.slots[name]
            if source.plantings != self._plantings.get(name, 0):  # the original has a new seed here, or none any more
                target.plant(copy.deepcopy(source.seed))
                self._plantings[name] = source.plantings
            elif source.seed is not None and target.seed is not None:
                pairs.append((target.seed, source.seed))
            if source.seed is not None and target.seed is not None:
                target.alpha = source.alpha
                target.seed.spec = source.seed.spec
            target.is_kept = source.is_kept
            target.connect(source.is_connected)
        return pairs


class AveragedModel:
    """A copy of a growing model whose weights are an exponential moving average (EMA) of the original's, and which grows with it.

        average = slotted.averaged(decay=0.999)
        ...
        average.update()           # after every step of the optimiser
        average(x)                 # evaluate it; average.bake() and average.state_dict() work as those of the slotted model

    A new seed enters the average with its current weights; from then on they are averaged like the host's. Buffers and alphas are copied.
    """

    def __init__(self, slotted: HasSlots, decay: float) -> None:
        if not 0 <= decay < 1:
            raise GrowthError(f"decay must be at least 0 and below 1, not {decay}")
        self.decay = decay
        self._source = slotted
        self.slotted = copy.deepcopy(slotted)
        self._slots = SlotsInStep(self.slotted, slotted, is_copy=True)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.slotted.host(*arguments, **keywords)

    def state_dict(self) -> dict[str, Tensor]:
        return self.slotted.state_dict()

    def bake(self, *, fold: bool = True) -> nn.Module:
        """Return the averaged model with the fossilized seeds in it, without slots."""
        return self.slotted.bake(fold=fold)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the original by a fraction of 1 - decay."""
        for target, source in [(self.slotted.host, self._source.host), *self._slots.follow()]:
            self._average(target, source)

    def _average(self, target: nn.Module, source: nn.Module) -> None:
        averaged, current = list(target.parameters()), list(source.parameters())
        for mine, theirs in zip(averaged, current, strict=True):
            if mine.is_floating_point():
                mine.lerp_(theirs.to(mine), 1 - self.decay)
            else:
                mine.copy_(theirs)
        for held, given in zip(target.buffers(), source.buffers(), strict=True):
            held.copy_(given)
