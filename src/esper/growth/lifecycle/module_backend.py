"""Backend of a slot in a single model: the seed is a module behind a submodule of the host, with an optimiser of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from esper.growth.config import SeedOptimizerConfig
from esper.growth.host.slots import Slot
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.backend import Life, SeedPlan, SlotBackend
from esper.growth.lifecycle.stages import GradientStats, Stage
from esper.growth.seeds.blueprints import check_branch, get_blueprint, is_built_in
from esper.growth.seeds.optimizer import MakeOptimizer, SeedLearner, group_of
from esper.growth.seeds.seed import Blending, Seed


class ModuleBackend(SlotBackend):
    """A slot of a model, whose seed is an `nn.Module`. `learner` trains the seed; it is None without a seed.

    The constructor builds a learner for a trial, so that an optimiser that cannot train seeds fails now rather than at germination.
    """

    def __init__(self, slot: Slot, slotted: Slotted, optimizer: Optimizer, config: SeedOptimizerConfig, make: MakeOptimizer | None) -> None:
        super().__init__(slot.place)
        self.slot = slot
        self.learner: SeedLearner | None = None
        self._slotted, self._optimizer, self._config, self._make = slotted, optimizer, config, make
        self._learner(nn.ParameterList([torch.zeros(2, 2), torch.zeros(2)]))

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
        seed = Seed(self._slotted.place(self.place.name), plan.blueprint, random_seed=plan.random_seed, blending=plan.blending)
        learner = self._learner(seed, warmup=plan.warmup)
        self.slot.plant(seed, connected=plan.is_connected)
        self.slot.alpha = plan.alpha
        self.learner = learner

    def uproot(self) -> None:
        self.slot.plant(None)
        self.learner = None

    def connect(self) -> None:
        self.slot.connect(True)

    def keep(self) -> None:
        self.slot.is_kept = True

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

    def load_seed_state(self, state: dict[str, Any], life: Life, blending: Blending) -> None:
        if state["seed"] is None:
            self.uproot()
            return
        # Build a new seed unless the slot still holds the same one. The weights are loaded below.
        if self.life.number != life.number or self.slot.seed is None:
            assert life.blueprint is not None
            seed = Seed(self._slotted.place(self.place.name), life.blueprint, random_seed=0, blending=blending)
            self.slot.plant(seed)
            self.learner = self._learner(seed)
        assert self.slot.seed is not None
        assert self.learner is not None
        self.slot.seed.load_state_dict(state["seed"])
        self.learner.load_state_dict(state["learner"])
        self.slot.alpha = state["alpha"]
        self.slot.is_kept = life.stage is Stage.FOSSILIZED
        self.slot.connect(state["is_connected"])

    def _learner(self, seed: nn.Module, *, warmup: int = 0) -> SeedLearner:
        """Build a learner with the settings of the optimiser's group that owns the module before the slot."""
        group = group_of(self._optimizer, self._slotted.host.get_submodule(self.place.name), self._slotted.host)
        learner = SeedLearner(seed, self._optimizer, group, self._config, self._make, warmup=warmup)
        learner.loss_unit = self.loss_unit
        return learner


def make_backends(
    slotted: Slotted, optimizer: Optimizer, config: SeedOptimizerConfig, make: MakeOptimizer | None
) -> dict[str, ModuleBackend]:
    """Return a backend for every slot of a model, by name."""
    return {name: ModuleBackend(slot, slotted, optimizer, config, make) for name, slot in slotted.slots.items()}


def in_shadow(backends: Sequence[ModuleBackend]) -> list[ModuleBackend]:
    """Return the backends whose seed is trained in the shadow of the host."""
    return [backend for backend in backends if backend.life.stage is Stage.TRAINING]
