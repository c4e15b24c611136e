"""When the probe looks: at the last steps of the epoch after it was asked for, or at the first where the length of an epoch is unknown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.garden import Garden
from esper.growth.lifecycle import Stage
from esper.growth.model_bed import ModelBed
from esper.growth.promise import Probe, Promises
from esper.growth.seed_learner import MakeOptimizer, SeedLearner, group_of
from esper.growth.slotted import Slotted


class Prober:
    """`make` gives the optimisers of seeds, where the user has a factory for them."""

    def __init__(self, slotted: Slotted, garden: Garden[ModelBed], optimizer: Optimizer, make: MakeOptimizer | None = None) -> None:
        self.slotted, self.garden, self.optimizer, self.make = slotted, garden, optimizer, make
        self._probe: Probe | None = None
        self._steps = 0  # of the host's optimiser in this epoch, so far
        self._length: int | None = None  # the same in the last epoch

    def request(self) -> None:
        """For all that may grow now, in all slots that are free."""
        allowed = self.garden.allowance()
        wanted = [
            (name, option.name)
            for name, options in self.garden.options.items()
            if self.garden.beds[name].life.stage is Stage.DORMANT
            for option in options
            if allowed.refusal(self.garden.price(name, option.name)) is None
        ]
        config = self.garden.config
        self._probe = (
            Probe(self.slotted, wanted, self.garden.host, self._learner, random_seed=config.seed, probe_steps=config.probe_steps)
            if wanted
            else None
        )

    @property
    def is_watching(self) -> bool:
        return self._probe is not None and self._probe.is_watching

    def take_flops(self) -> int:
        """Those that were spent since the last call."""
        if self._probe is None:
            return 0
        flops, self._probe.flops = self._probe.flops, 0
        return flops

    @property
    def has_caught(self) -> bool:
        """Whether it holds gradients of backward passes that no step has used yet."""
        return self._probe is not None and self._probe.has_caught

    def drop(self) -> None:
        """Forgets the gradients of backward passes that no step has used."""
        if self._probe is not None:
            self._probe.drop()

    def ask(self, *, scale: Tensor | None) -> None:
        """The host's optimiser has stepped by the gradients that were caught, which were multiplied by `scale`."""
        self._steps += 1
        if self._probe is not None and self._probe.is_watching:
            self._probe.ask(scale=scale)

    def get_ready(self) -> None:
        """Before a forward pass."""
        probe = self._probe
        if probe is None:
            return
        if not probe.is_planned:
            probe.plan(length=self._length)
        is_due = self._length is None or self._steps >= self._length - probe.steps
        if probe.is_over:
            self.rest()
        elif is_due and not probe.is_watching:
            probe.watch()
            # What is watched runs in Python. Compiled code would be compiled anew for it, and back again.
            self.slotted.run_eagerly(True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is none of the user's training, and is not looked at."""
        probe = self._probe
        if probe is None:
            yield
            return
        probe.is_paused = True
        try:
            yield
        finally:
            probe.is_paused = False

    def rest(self) -> None:
        """Looks no more; what was found so far stays."""
        if self._probe is not None and self._probe.is_watching:
            self._probe.stop()
            self.slotted.run_eagerly(False)

    def discard(self) -> None:
        """Forgets what was asked for and what was found."""
        self.rest()
        self._probe = None

    def end_epoch(self, *, steps: int) -> Promises | None:
        """What was found; None where nothing was asked. The epoch was told to have so many `steps`; the host's optimiser may make fewer."""
        self._length, self._steps = self._steps, 0
        self.rest()
        probe, self._probe = self._probe, None
        if probe is None:
            return None
        groups = self.optimizer.param_groups
        factor = self.garden.config.seed_optimizer.learning_rate_factor * self._length / max(steps, 1)
        return probe.promises({name: factor * float(groups[self._group(name)]["lr"]) for name in self.garden.beds})

    def _group(self, slot: str) -> int:
        return group_of(self.optimizer, self.slotted.host.get_submodule(slot), self.slotted.host)

    def _learner(self, slot: str, weights: nn.Module) -> SeedLearner:
        return SeedLearner(weights, self.optimizer, self._group(slot), self.garden.config.seed_optimizer, self.make)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "length": self._length, "probe": None if self._probe is None else self._probe.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.discard()
        self._steps, self._length = state["steps"], state["length"]
        if state["probe"] is not None:
            self.request()
            if self._probe is not None:
                self._probe.load_state_dict(state["probe"])
