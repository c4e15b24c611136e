"""Plans that grow every host in the same way, to compare with, or at random, to learn from.

Seeds are raised as in all comparisons: advanced and kept as early as the gates allow (see `see_through`). A plan names no slots, so that it
can be followed in any host:

    never                      nothing grows
    widen_100 at 0             every row of layers gets twice the units, as early as possible: after the first training segment
    deep at 0.25               a branch in every slot, after a quarter of the training
    widen_300 and deep at 0    four times the units, and a branch in every slot that is left
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from esper.growth.controllers.baselines import see_through
from esper.growth.lifecycle.stages import Action, Candidate, Decision, Germinate, GrowthState, SlotState, may_germinate
from esper.growth.measure.contribution import Allowance
from esper.rng import Streams

WIDENINGS = ("widen_100", "widen_300", "widen_700")
BRANCHES = ("double_conv3x3", "conv3x3", "mlp")  # in order of preference
BLUEPRINTS = (*WIDENINGS, "conv3x3", "double_conv3x3", "norm", "squeeze_excite", "low_rank", "mlp", "attention")  # of the study

Choice = tuple[SlotState, Candidate]


def choices(state: GrowthState) -> list[Choice]:
    """Return everything that may germinate now."""
    allowed = Allowance(state.seeds_left, state.parameters_left, state.flops_left)
    return [
        (slot, candidate)
        for slot in state.slots
        for candidate in slot.candidates
        if may_germinate(slot, allowed.refusal(candidate.cost)).passed
    ]


def wide_choices(state: GrowthState, blueprint: str) -> list[Choice]:
    """Return the places where a blueprint widens the longest rows of layers, each row once."""
    fitting = [(slot, candidate) for slot, candidate in choices(state) if candidate.blueprint == blueprint]
    chosen: list[Choice] = []
    widened = set[str]()
    for slot, candidate in sorted(fitting, key=lambda choice: len(choice[1].widened), reverse=True):
        if not widened & set(candidate.widened):
            chosen.append((slot, candidate))
            widened |= set(candidate.widened)
    return chosen


def deep_choices(state: GrowthState) -> list[Choice]:
    """Return a branch for every slot that takes one of the preferred kinds."""
    found: dict[str, Choice] = {}
    for blueprint in reversed(BRANCHES):
        found |= {slot.place.name: (slot, candidate) for slot, candidate in choices(state) if candidate.blueprint == blueprint}
    return list(found.values())


@dataclass(frozen=True)
class ConstantPlan:
    """Grows the same in every host, at one time: `widen` names a widening, `is_deep` adds branches, `at` is a share of the training."""

    widen: str | None = None
    is_deep: bool = False
    at: float = 0.0

    @property
    def name(self) -> str:
        what = " and ".join(filter(None, [self.widen or "", "deep" if self.is_deep else ""]))
        return f"{what} at {self.at:g}" if what else "never"

    def decide(self, state: GrowthState) -> Decision:
        grown: dict[str, Action] = {}
        if state.epoch == max(round(self.at * (state.epochs or 0)), 1):
            wide = wide_choices(state, self.widen) if self.widen else []
            for slot, candidate in [*wide, *(deep_choices(state) if self.is_deep else [])]:
                grown.setdefault(slot.place.name, Germinate(slot.place.name, f"planned: {self.name}", candidate.blueprint))
        return Decision((*grown.values(), *see_through(state, set(grown))), self.name)


CONSTANT_PLANS = (
    ConstantPlan(),
    *(ConstantPlan(widen, at=at) for widen in WIDENINGS for at in (0.0, 0.25)),
    ConstantPlan(is_deep=True),
    ConstantPlan(is_deep=True, at=0.25),
    *(ConstantPlan(widen, is_deep=True) for widen in WIDENINGS),
)


@dataclass
class RandomPlan:
    """Grows at random times, and tells `record` the state and the choice whenever it grows something, or grows nothing more.

    It germinates 0 to 3 times, rather early. Half of the choices are in width, most of these in the longest rows of layers.
    """

    seed: int
    record: Callable[[GrowthState, Choice | None], Any] = field(default=lambda state, choice: None)
    until: float = 0.6  # share of the training after which nothing grows
    name: str = "random"
    _times: list[int] | None = None  # epochs at which something grows, then the one at which it is recorded that nothing more does

    def decide(self, state: GrowthState) -> Decision:
        rng = Streams(self.seed).numpy(f"decision {state.epoch}")
        if self._times is None:
            self._times = self._draw_times(state.epochs or 0, rng)
        grown: list[Action] = []
        if state.epoch in self._times[:-1] and (options := choices(state)):
            slot, candidate = draw_choice(options, rng)
            self.record(state, (slot, candidate))
            grown = [Germinate(slot.place.name, "drawn at random", candidate.blueprint)]
        elif state.epoch == self._times[-1]:
            self.record(state, None)
        must_probe = state.epoch + 1 in self._times and any(slot.candidates for slot in state.slots)
        return Decision((*grown, *see_through(state, {action.slot for action in grown})), self.name, probe=must_probe)

    def _draw_times(self, epochs: int, rng: np.random.Generator) -> list[int]:
        count = int(rng.choice(4, p=[0.05, 0.5, 0.3, 0.15]))
        last = max(int(self.until * epochs), 1)
        times = sorted({1 + int(last * rng.random() ** 2) for _ in range(count)})
        end = int(rng.integers(times[-1] + 1 if times else 1, epochs)) if not times or times[-1] + 1 < epochs else epochs
        return [*times, end]


def draw_choice(options: Sequence[Choice], rng: np.random.Generator) -> Choice:
    """Draw width or depth, then the size of a widening, then the place; a long row of layers is drawn more often than a short one."""
    wide = [choice for choice in options if choice[1].widened]
    deep = [choice for choice in options if not choice[1].widened]
    if not deep or (wide and rng.random() < 0.5):
        names = sorted({candidate.blueprint for _, candidate in wide})
        name = names[rng.integers(len(names))]
        wide = [choice for choice in wide if choice[1].blueprint == name]
        weights = np.array([len(candidate.widened) ** 2 for _, candidate in wide], dtype=float)
        return wide[rng.choice(len(wide), p=weights / weights.sum())]
    return deep[rng.integers(len(deep))]
