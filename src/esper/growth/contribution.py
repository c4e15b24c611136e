"""Contribution: what the validation loss gains by a seed, measured on the same batches with the seed on and off.

With k seeds there are k + 1 distinct settings: all on, and each one off. What ran before a slot is the same with its seed on and off, so it
is recorded while everything is on, and replayed; that this changes no bit is checked once for every slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.growth.errors import GrowthError
from esper.growth.replay import Replay
from esper.growth.shapley import shapley_values, subsets
from esper.growth.slotted import Slotted
from esper.growth.state import Contribution
from esper.parallel import ALONE, Group
from esper.statistics import Interval, student_interval

Evaluate = Callable[[], Sequence[float] | Sequence[Tensor] | Tensor]  # the loss of every batch, always in the same order


class Measured(NamedTuple):
    losses: list[float]  # per batch, with everything on
    contributions: dict[str, Contribution]


class Measurement:
    """Measures again and again, and remembers for which slots a replay can be trusted."""

    def __init__(self, slotted: Slotted, *, group: Group = ALONE) -> None:
        self.slotted = slotted
        self._group = group  # all ranks evaluate equally often, because their forward passes may talk to each other
        self._replays: dict[str, Replay] = {}
        self._trusted: set[str] = set()
        self._distrusted: set[str] = set()

    def measure(self, evaluate: Evaluate, names: Sequence[str], *, epoch: int) -> Measured:
        """The losses of this moment, and the contribution of the seed in each of these slots. Losses that are not finite end it."""
        with self._all_on(evaluate, names) as with_all:
            if self._group.any(not all(map(math.isfinite, with_all))):
                return Measured(with_all, {})
            without = {name: self._without(evaluate, [name], with_all) for name in names}
        return Measured(with_all, {name: Contribution(gain_of(losses, with_all), epoch) for name, losses in without.items()})

    def shapley(self, evaluate: Evaluate, names: Sequence[str]) -> dict[str, Interval]:
        """The Shapley value of the seed in each of these slots, exactly: every subset of them is evaluated once."""
        with self._all_on(evaluate, names) as with_all:
            losses = {off: self._without(evaluate, off, with_all) if off else with_all for off in subsets(names)}
        return {name: _interval(values) for name, values in shapley_values(losses, names).items()}

    @contextmanager
    def _all_on(self, evaluate: Evaluate, names: Sequence[str]) -> Iterator[list[float]]:
        """The losses with everything on; inside, what was recorded with them can be replayed."""
        replays = [self._replay(name) for name in names if name not in self._distrusted]
        try:
            with modes_kept(self.slotted):
                with ExitStack() as stack:
                    for replay in replays:
                        stack.enter_context(replay.recording())
                    losses = losses_of(evaluate)
                yield losses
        finally:
            for replay in replays:
                replay.clear()

    def _replay(self, name: str) -> Replay:
        if name not in self._replays:
            self._replays[name] = Replay(self.slotted.model, self.slotted.survey.calls, name)
        return self._replays[name]

    def _without(self, evaluate: Evaluate, off: Collection[str], with_all: list[float]) -> list[float]:
        """The losses with these seeds off. What runs before the first of them is replayed."""
        first = next(name for name in self.slotted.slots if name in off)
        with ExitStack() as stack:
            if self._can_trust(evaluate, first, with_all):
                stack.enter_context(self._replays[first].replaying())
            stack.enter_context(self.slotted.without(list(off)))
            losses = losses_of(evaluate)
        if len(losses) != len(with_all):
            raise GrowthError(
                f"evaluate() gave {len(with_all)} losses and then {len(losses)}; it must go through the same batches in the same order"
            )
        return losses

    def _can_trust(self, evaluate: Evaluate, name: str, with_all: list[float]) -> bool:
        replay = self._replays.get(name)
        if self._group.any(name in self._distrusted or replay is None or not replay.is_usable or not replay.nbytes):
            return False
        assert replay is not None
        if name not in self._trusted:
            with replay.replaying():
                is_different = self._group.any(losses_of(evaluate) != with_all)
            (self._distrusted if is_different else self._trusted).add(name)
        return name in self._trusted

    def state_dict(self) -> dict[str, Any]:
        return {"trusted": sorted(self._trusted), "distrusted": sorted(self._distrusted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trusted, self._distrusted = set(state["trusted"]), set(state["distrusted"])


@contextmanager
def modes_kept(slotted: Slotted) -> Iterator[None]:
    """Which modules are in training mode is afterwards as it was, whatever happens."""
    seeds = [slot.seed for slot in slotted.slots.values() if slot.seed is not None]
    modes = [(module, module.training) for root in (slotted.model, *seeds) for module in root.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


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
    """The paired difference, batch by batch."""
    return _interval([off - on for off, on in zip(without, with_all, strict=True)])


def _interval(differences: Sequence[float]) -> Interval:
    """One batch has no spread to tell: its interval is the difference itself."""
    if len(differences) == 1 or not all(map(math.isfinite, differences)):
        mean = sum(differences) / len(differences)
        return Interval(mean, mean, mean)
    return student_interval(differences)


class AlphaSearch(NamedTuple):
    alpha: float  # the best of those that were tried
    losses: dict[float, float]  # mean validation loss of each


def search_alpha(slotted: Slotted, name: str, evaluate: Evaluate, alphas: Sequence[float]) -> AlphaSearch:
    """Which alpha of one seed gives the lowest validation loss. Alpha is afterwards what it was."""
    found: dict[float, float] = {}
    for alpha in alphas:
        with modes_kept(slotted), slotted.slot(name).held_at(alpha):
            losses = losses_of(evaluate)
        found[alpha] = sum(losses) / len(losses)
    return AlphaSearch(min(found, key=lambda alpha: (not math.isfinite(found[alpha]), found[alpha])), found)
