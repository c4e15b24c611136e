"""A bed of the garden: a place in a host, what is known about the life there, and what can be done with the seed in it.

What a seed is made of is not the garden's business. In one model it is a module behind a slot (`ModuleBackend`); in a fleet it is a row of
stacked tensors. Both live by the same rules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from esper.growth.host.layout import Place
from esper.growth.lifecycle.stages import Contribution, GradientStats, Stage
from esper.growth.seeds.seed import Blending


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
    looks: int = 0  # times that the contribution of this seed was measured
    tried: list[str] = []


class SeedPlan(msgspec.Struct, frozen=True):
    """How a seed is to be born."""

    blueprint: str
    random_seed: int  # of its first weights
    blending: Blending
    is_connected: bool  # the host sees it from birth
    alpha: float
    warmup: int  # steps in which its learning rate rises


class SlotBackend(ABC):
    """`is_connected`: the host's output goes through the seed. `is_kept`: the seed is part of the host for good."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.life = Life()
        self.loss_unit = 1.0  # see LossScale

    def set_loss_unit(self, unit: float) -> None:
        self.loss_unit = unit

    @property
    @abstractmethod
    def is_connected(self) -> bool: ...

    @property
    @abstractmethod
    def alpha(self) -> float: ...

    @alpha.setter
    @abstractmethod
    def alpha(self, value: float) -> None: ...

    @abstractmethod
    def plant(self, plan: SeedPlan) -> None:
        """Puts a new seed in. What is wrong with it is raised before anything changes."""

    @abstractmethod
    def uproot(self) -> None:
        """Takes the seed out, with everything that it has learned."""

    @abstractmethod
    def connect(self) -> None: ...

    @abstractmethod
    def keep(self) -> None: ...

    @abstractmethod
    def gradients(self) -> GradientStats | None:
        """What the seed's gradients were like since the last report; None without a seed."""

    @abstractmethod
    def seed_state(self) -> dict[str, Any]:
        """Everything about the seed beside its life."""

    @abstractmethod
    def load_seed_state(self, state: dict[str, Any], life: Life, blending: Blending) -> None:
        """`life` is the one that the state belongs to; `self.life` still is the one before it."""
