"""A bed of the garden: a slot, what is known about the life in it, and how its seed learns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from esper.growth.lifecycle import Stage
from esper.growth.seed_learner import SeedLearner
from esper.growth.slot import Slot
from esper.growth.state import Contribution, GradientStats


class Ramp(msgspec.Struct):
    """Alpha on its way, one tick a step."""

    start: float
    target: float
    steps: int
    done: int = 0

    def alpha(self, curve: str) -> float:
        progress = min(self.done / self.steps, 1.0)
        if curve == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.target - self.start) * progress


class Life(msgspec.Struct):
    """What is known about a slot beside its seed's weights."""

    stage: Stage = Stage.DORMANT
    blueprint: str | None = None
    number: int | None = None  # of the seed, in the ledger
    age: int = 0
    epochs_in_stage: int = 0
    ramp: Ramp | None = None
    is_withdrawing: bool = False
    why_withdrawn: str = ""
    embargo_left: int = 0
    gradients: GradientStats | None = None
    contribution: Contribution | None = None
    tried: list[str] = []


@dataclass
class Bed:
    """A slot, the life in it, and how its seed learns."""

    slot: Slot
    life: Life = field(default_factory=Life)
    learner: SeedLearner | None = None
