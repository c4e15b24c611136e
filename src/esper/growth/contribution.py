"""Contribution: what the validation loss gains by a seed, measured on the same batches with the seed on and off.

With k seeds there are k + 1 distinct settings: all on, and each one off. What ran before a slot is the same with its seed on and off, so it
is recorded while everything is on, and replayed; that this changes no bit is checked once for every slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from esper.growth.errors import GrowthError
from esper.growth.replay import Replay
from esper.growth.slotted import Slotted
from esper.growth.state import Contribution
from esper.statistics import Interval, student_interval

Evaluate = Callable[[], Sequence[float] | Sequence[Tensor] | Tensor]  # the loss of every batch, always in the same order


class Measured(NamedTuple):
    losses: list[float]  # per batch, with everything on
    contributions: dict[str, Contribution]


class Measurement:
    """Measures again and again, and remembers for which slots a replay can be trusted."""

    def __init__(self, slotted: Slotted) -> None:
        self.slotted = slotted
        self._replays: dict[str, Replay] = {}
        self._trusted: set[str] = set()
        self._distrusted: set[str] = set()

    def measure(self, evaluate: Evaluate, names: Sequence[str], *, epoch: int) -> Measured:
        """The losses of this moment, and the contribution of the seed in each of these slots. Losses that are not finite end it."""
        replays = {name: self._replay(name) for name in names if name not in self._distrusted}
        try:
            with ExitStack() as stack:
                for replay in replays.values():
                    stack.enter_context(replay.recording())
                with_all = losses_of(evaluate)
            if not all(map(math.isfinite, with_all)):
                return Measured(with_all, {})
            return Measured(with_all, {name: self._contribution(evaluate, name, replays.get(name), with_all, epoch) for name in names})
        finally:
            for replay in replays.values():
                replay.clear()

    def _replay(self, name: str) -> Replay:
        if name not in self._replays:
            self._replays[name] = Replay(self.slotted.model, self.slotted.survey.calls, name)
        return self._replays[name]

    def _contribution(self, evaluate: Evaluate, name: str, replay: Replay | None, with_all: list[float], epoch: int) -> Contribution:
        with ExitStack() as stack:
            if replay is not None and self._can_trust(evaluate, name, replay, with_all):
                stack.enter_context(replay.replaying())
            stack.enter_context(self.slotted.without([name]))
            without = losses_of(evaluate)
        if len(without) != len(with_all):
            raise GrowthError(
                f"evaluate() gave {len(with_all)} losses and then {len(without)}; it must go through the same batches in the same order"
            )
        return Contribution(gain_of(without, with_all), epoch)

    def _can_trust(self, evaluate: Evaluate, name: str, replay: Replay, with_all: list[float]) -> bool:
        if not replay.is_usable or not replay.nbytes:
            return False
        if name not in self._trusted:
            with replay.replaying():
                is_same = losses_of(evaluate) == with_all
            (self._trusted if is_same else self._distrusted).add(name)
        return name in self._trusted


def losses_of(evaluate: Evaluate) -> list[float]:
    """The losses per batch that the user's function gives, checked."""
    answer = evaluate()
    if not isinstance(answer, Tensor):
        parts = [torch.as_tensor(loss).detach().reshape(()).double() for loss in answer]
        answer = torch.stack(parts) if parts else torch.empty(0)  # read from the device in one go
    losses: list[float] = answer.detach().reshape(-1).tolist()
    if not losses:
        raise GrowthError("evaluate() gave no losses: the validation loader yields nothing; give it at least one batch")
    return losses


def gain_of(without: Sequence[float], with_all: Sequence[float]) -> Interval:
    """The paired difference, batch by batch. One batch has no spread to tell: its interval is the difference itself."""
    differences = [off - on for off, on in zip(without, with_all, strict=True)]
    if len(differences) == 1 or not all(map(math.isfinite, differences)):
        mean = sum(differences) / len(differences)
        return Interval(mean, mean, mean)
    return student_interval(differences)
