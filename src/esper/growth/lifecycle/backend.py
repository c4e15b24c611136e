"""Backend of a slot: the life of its seed, and the operations on the seed, behind one interface for models and fleets.

`SlotLifecycles` moves seeds from stage to stage without knowing how they are stored. In a model, a seed is a module behind a slot
(`ModuleBackend`); in a fleet, it is a row of stacked tensors. Both follow the same rules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Self

import msgspec

from esper.gradients import GradientStats
from esper.growth.host.layout import Place
from esper.growth.lifecycle.stages import Contribution, Stage
from esper.growth.seeds.seed import Blending


class Ramp(msgspec.Struct):
    """A movement of alpha from `start` to `target` over a number of training steps."""

    start: float
    target: float
    steps: int
    done: int = 0

    def alpha(self, curve: str) -> float:
        """Return alpha after the steps done so far, along a "linear" or "cosine" curve."""
        progress = min(self.done / self.steps, 1.0)
        if curve == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.target - self.start) * progress


class Life(msgspec.Struct):
    """State of a slot except for the weights of its seed."""

    stage: Stage = Stage.DORMANT
    blueprint: str | None = None
    number: int | None = None  # number of the seed in the ledger, from 1; None: no seed
    age: int = 0  # epochs since the seed germinated
    epochs_in_stage: int = 0
    ramp: Ramp | None = None
    is_withdrawing: bool = False
    why_withdrawn: str = ""
    embargo_left: int = 0  # epochs until the slot is dormant again
    prune_embargo: int = 0  # epochs until the seed may be pruned, see SlotLifecycles.bring_back
    gradients: GradientStats | None = None
    contribution: Contribution | None = None
    looks: int = 0  # number of times that the contribution of this seed was measured
    tried: list[str] = []  # blueprints that grew in this slot and were pruned


class SeedPlan(msgspec.Struct, frozen=True):
    """Settings of a new seed."""

    blueprint: str
    random_seed: int  # for its initial weights
    blending: Blending
    is_connected: bool  # the host's output goes through it from birth
    alpha: float
    warmup: int  # steps over which its learning rate rises


class SlotBackend(ABC):
    """A slot of a host: its place, the life of its seed, and the operations on that seed.

    `is_connected` is true if the host's output goes through the seed.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.life = Life()
        self.loss_unit = 1.0  # see LossRange

    def set_loss_unit(self, unit: float) -> None:
        self.loss_unit = unit

    def place_now(self) -> Place:
        """Return the place as it is now: with the units that width seeds have added to the host, if they are kept."""
        return self.place

    def advance_alpha(self, curve: str) -> None:
        """Move alpha by one training step along its ramp, if there is one that has not reached its end."""
        ramp = self.life.ramp
        if ramp is not None and ramp.done < ramp.steps:
            ramp.done += 1
            self.alpha = ramp.alpha(curve)

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
        """Create a seed in the slot. Errors are raised before anything changes."""

    @abstractmethod
    def uproot(self) -> None:
        """Remove the seed and its weights."""

    @abstractmethod
    def connect(self) -> None:
        """Let the host's output go through the seed."""

    @abstractmethod
    def keep(self) -> None:
        """Make the seed a permanent part of the host."""

    def open_again(self) -> Self | None:
        """Open another slot at the same place, for a seed behind the kept one, and return it; None if a place has only one slot."""
        return None

    def why_not_removed(self) -> str:
        """Return why the kept seed cannot be removed, although it does not pay; "" if it can be."""
        return ""

    def close(self) -> None:
        """Remove the slot, which `open_again` has opened, with its seed."""
        raise NotImplementedError

    @abstractmethod
    def gradients(self) -> GradientStats | None:
        """Return statistics of the seed's gradients since the last call; None without a seed."""

    @abstractmethod
    def seed_state(self) -> dict[str, Any]:
        """Return the weights, optimiser state and alpha of the seed; `life` is saved separately."""

    @abstractmethod
    def state_if_kept(self) -> dict[str, Any]:
        """Return the state of the seed as if it were kept, without its optimiser; that of an empty slot if it is not connected."""

    @abstractmethod
    def load_seed_state(self, state: dict[str, Any], life: Life) -> None:
        """Restore the seed. `life` belongs to `state`; `self.life` is still the previous one, and the caller replaces it afterwards."""
