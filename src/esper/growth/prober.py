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

    def request(self) -> None:
        """For all that may grow now, in all slots that are free."""
        allowed = self.garden.allowance()
        candidates = {
            name: [option for option in options if allowed.refusal(self.garden.price(name, option.name)) is None]
            for name, options in self.garden.options.items()
            if self.garden.beds[name].life.stage is Stage.DORMANT
        }
        wanted = {name: some for name, some in candidates.items() if some}
        self._probe = Probe(self.slotted, wanted, random_seed=self.garden.config.seed) if wanted else None

    @property
    def is_watching(self) -> bool:
        return self._probe is not None and self._probe.is_watching

    @property
    def flops(self) -> int:
        """Per sample of a step that is watched."""
        return self._probe.flops if self._probe is not None and self._probe.is_watching else 0

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
        if self._probe is not None and self._probe.is_watching:
            self._probe.ask(scale=scale)

    def after_step(self, steps: int, *, length: int | None) -> None:
        """`steps` of this epoch are over, of `length` if that is known; 0 when one begins."""
        if self._probe is None:
            return
        is_due = length is None or steps >= length - self.garden.config.probe_steps
        if self._probe.steps >= self.garden.config.probe_steps:
            self.rest()
        elif is_due and not self._probe.is_watching:
            self._probe.watch()
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

    def finish(self) -> Promises | None:
        """What was found; None where nothing was asked."""
        self.rest()
        probe, self._probe = self._probe, None
        if probe is None:
            return None
        return probe.promises(self._learner)

    def _learner(self, slot: str, weights: nn.Module) -> SeedLearner:
        host = self.slotted.host
        group = group_of(self.optimizer, host.get_submodule(slot), host)
        return SeedLearner(weights, self.optimizer, group, self.garden.config.seed_optimizer, self.make)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._probe is None else self._probe.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self.finish()
        if state is not None:
            self.request()
            if self._probe is not None:
                self._probe.load_state_dict(state)
