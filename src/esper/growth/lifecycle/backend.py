"""Backend of a slot: the state of the slot, and the operations on its seed, behind one interface for models and fleets.

`Lifecycles` moves seeds from stage to stage without knowing how they are stored. In a single model, the seed is a module behind a submodule
of the host, with an optimiser of its own (`ModuleBackend`); in a fleet, it is a row of stacked tensors. Both follow the same rules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from esper.gradients import GradientStats
from esper.growth.config import Curve, SeedOptimizerConfig
from esper.growth.host.layout import Place
from esper.growth.host.slots import Slot
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.ledger import Ledger, SeedRecord
from esper.growth.lifecycle.stages import Stage
from esper.growth.seeds.blueprints import check_branch, get_blueprint, is_built_in
from esper.growth.seeds.learner import MakeOptimizer, SeedLearner, routes_of
from esper.growth.seeds.seed import SPEC_KEY, Blending, SeedSpec, WidePlan
from esper.growth.seeds.width import IN_SHADOW


class Ramp(msgspec.Struct):
    """A movement of alpha from `start` to `target` over a number of training steps."""

    start: float
    target: float
    steps: int
    curve: Curve
    done: int = 0

    @property
    def alpha(self) -> float:
        """Alpha after the steps done so far."""
        return self.start + (self.target - self.start) * on_curve(self.curve, min(self.done / self.steps, 1.0))


def on_curve(curve: Curve, part: float) -> float:
    """Return how much of a movement along a curve is done after a part of the time; all curves are symmetric about (½, ½).

    >>> [round(on_curve(curve, 0.25), 3) for curve in ("linear", "cosine", "sigmoid_6", "sigmoid_12", "sigmoid_24")]
    [0.25, 0.146, 0.149, 0.045, 0.002]
    """
    if curve == "linear":
        return part
    if curve == "cosine":
        return (1 - math.cos(math.pi * part)) / 2
    # A logistic curve from -steepness/2 to steepness/2, stretched so that it begins at 0 and ends at 1.
    steepness = float(curve.removeprefix("sigmoid_"))
    return (math.tanh(steepness / 2 * (part - 0.5)) / math.tanh(steepness / 4) + 1) / 2


class SlotRecord(msgspec.Struct):
    """State of a slot that snapshots hold, except for the weights of its seed. All else about the seed is in its record in the ledger."""

    stage: Stage = Stage.DORMANT
    number: int | None = None  # of the seed; None: no seed
    age: int = 0  # epochs since the seed germinated
    epochs_in_stage: int = 0
    ramp: Ramp | None = None
    is_withdrawing: bool = False
    why_withdrawn: str = ""
    embargo_left: int = 0  # epochs until the slot is dormant again
    prune_embargo: int = 0  # epochs until the seed may be pruned, see Lifecycles.go_back
    gradients: GradientStats | None = None
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
    """A slot of a host: its place, its record, the record of its seed, and the operations on that seed.

    `ledger` holds the record of the seed; the owner of the backend sets it. `is_connected` is true if the host's output goes through the
    seed.
    """

    ledger: Ledger

    def __init__(self, place: Place) -> None:
        self.place = place
        self.record = SlotRecord()
        self.loss_unit = 1.0  # see LossRange

    @property
    def stage(self) -> Stage:
        return self.record.stage

    @property
    def seed(self) -> SeedRecord | None:
        """The record of the seed; None without a seed."""
        return None if self.record.number is None else self.ledger.seed(self.record.number)

    @property
    def blueprint(self) -> str | None:
        """Blueprint of the seed; None without a seed."""
        return None if self.seed is None else self.seed.blueprint

    def set_loss_unit(self, unit: float) -> None:
        self.loss_unit = unit

    def place_now(self) -> Place:
        """Return the place as it is now: with the units that width seeds have added to the host, if they are kept."""
        return self.place

    @property
    @abstractmethod
    def wide(self) -> tuple[WidePlan, ...]:
        """The parts of the seed if it is a width seed; () if not."""

    def advance_alpha(self) -> None:
        """Move alpha by one training step along its ramp, if there is one that has not reached its end."""
        ramp = self.record.ramp
        if ramp is not None and ramp.done < ramp.steps:
            ramp.done += 1
            self.alpha = ramp.alpha

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
        """Return the weights, optimiser state and alpha of the seed; the record is saved separately."""

    @abstractmethod
    def state_if_kept(self) -> dict[str, Any]:
        """Return the state of the seed as if it were kept, without its optimiser; that of an empty slot if it is not connected."""

    @abstractmethod
    def load_seed_state(self, state: dict[str, Any], record: SlotRecord) -> None:
        """Restore the seed. `record` belongs to `state`; `self.record` is still the previous one, and the caller replaces it afterwards."""


AnyBackend = TypeVar("AnyBackend", bound=SlotBackend)


class ModuleBackend(SlotBackend):
    """A slot of a model, whose seed is an `nn.Module`. `learner` trains the seed; it is None without a seed.

    The constructor builds a learner for a trial, so that an optimiser that cannot train seeds fails now rather than at germination.
    """

    def __init__(
        self, slot: Slot, slotted: Slotted, optimizers: Sequence[Optimizer], config: SeedOptimizerConfig, make: MakeOptimizer | None
    ) -> None:
        super().__init__(slot.place)
        self.slot = slot
        self.learner: SeedLearner | None = None
        self._slotted, self._optimizers, self._config, self._make = slotted, optimizers, config, make
        self._make_learner(nn.ParameterList([torch.zeros(2, 2), torch.zeros(2)]))

    @property
    def is_connected(self) -> bool:
        return self.slot.is_connected

    @property
    def alpha(self) -> float:
        return self.slot.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.slot.alpha = value

    def plant(self, plan: SeedPlan) -> None:
        # Check and build everything that may fail before the slot changes.
        if not is_built_in(get_blueprint(plan.blueprint)):
            check_branch(get_blueprint(plan.blueprint), self.place)
        seed = self._slotted.new_seed(self.place.name, plan.blueprint, random_seed=plan.random_seed, blending=plan.blending)
        if seed.spec.wide and not plan.is_connected:
            seed.spec = msgspec.structs.replace(seed.spec, order=seed.spec.order + IN_SHADOW)
        learner = self._make_learner(seed, warmup=plan.warmup)
        self.slot.plant(seed, connected=plan.is_connected)
        self.slot.alpha = plan.alpha
        self.learner = learner

    def uproot(self) -> None:
        self.slot.plant(None)
        self.learner = None

    def connect(self) -> None:
        seed = self.slot.seed
        if seed is not None and seed.spec.order >= IN_SHADOW:
            seed.spec = msgspec.structs.replace(seed.spec, order=self._slotted.next_order())
        self.slot.connect(True)

    def keep(self) -> None:
        self.slot.is_kept = True
        self._slotted.join_kept()

    @property
    def wide(self) -> tuple[WidePlan, ...]:
        return () if self.slot.seed is None else self.slot.seed.spec.wide

    def place_now(self) -> Place:
        return self._slotted.place(self.place.name)

    def why_not_removed(self) -> str:
        return self._slotted.why_not_removed(self.place.name)

    def open_again(self) -> ModuleBackend:
        return ModuleBackend(self._slotted.open_again(self.place.name), self._slotted, self._optimizers, self._config, self._make)

    def close(self) -> None:
        self._slotted.close(self.place.name)

    def set_loss_unit(self, unit: float) -> None:
        super().set_loss_unit(unit)
        if self.learner is not None:
            self.learner.loss_unit = unit

    def gradients(self) -> GradientStats | None:
        return None if self.learner is None else self.learner.report()

    def seed_state(self) -> dict[str, Any]:
        return {
            "seed": None if self.slot.seed is None else dict(self.slot.seed.state_dict()),
            "learner": None if self.learner is None else self.learner.state_dict(),
            "alpha": self.slot.alpha,
            "is_connected": self.slot.is_connected,
        }

    def state_if_kept(self) -> dict[str, Any]:
        seed = dict(self.slot.seed.state_dict()) if self.slot.seed is not None and self.slot.is_connected else None
        return {"seed": seed, "learner": None, "alpha": self.slot.alpha, "is_connected": self.slot.is_connected}

    def load_seed_state(self, state: dict[str, Any], record: SlotRecord) -> None:
        if state["seed"] is None:
            self.uproot()
            return
        # Build a new seed unless the slot still holds the same one; the weights are loaded below. The number alone does not tell: copies of
        # a training that go on from one state give the same number to different seeds.
        held, saved = self.slot.seed, SeedSpec.from_tensor(state["seed"][SPEC_KEY])
        if self.record.number != record.number or held is None or not saved.builds_same(held.spec):
            seed = self._slotted.rebuilt_seed(self.place.name, state["seed"])
            self.slot.plant(seed)
            self.learner = self._make_learner(seed)
        assert self.slot.seed is not None
        assert self.learner is not None
        self.slot.seed.load_state_dict(state["seed"])
        if state["learner"] is not None:
            self.learner.load_state_dict(state["learner"])
        self.slot.alpha = state["alpha"]
        self.slot.is_kept = record.stage is Stage.FOSSILIZED
        self.slot.connect(state["is_connected"])

    def _make_learner(self, seed: nn.Module, *, warmup: int = 0) -> SeedLearner:
        routes = routes_of(seed, self._optimizers, self.place.module, self._slotted.host)
        learner = SeedLearner(seed, routes, self._config, self._make, warmup=warmup)
        learner.loss_unit = self.loss_unit
        return learner


def make_backends(
    slotted: Slotted, optimizers: Sequence[Optimizer], config: SeedOptimizerConfig, make: MakeOptimizer | None
) -> dict[str, ModuleBackend]:
    """Return a backend for every slot of a model, by name."""
    return {name: ModuleBackend(slot, slotted, optimizers, config, make) for name, slot in slotted.slots.items()}
