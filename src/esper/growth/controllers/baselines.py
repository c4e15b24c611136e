"""Baseline controllers (never grow, a fixed plan, a random plan, a schedule), and the functions that make a controller from a name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.controllers.lookahead import Lookahead
from esper.growth.lifecycle.stages import (
    Action,
    Advance,
    CompleteController,
    Controller,
    Decision,
    Fossilize,
    Germinate,
    GrowthState,
    Prune,
    Stage,
    may_blend,
)
from esper.rng import Streams

DEFAULT_EPOCHS = 40  # assumed length of the training if it is unknown


class Never:
    """Never grows anything."""

    name = "never"

    def decide(self, state: GrowthState) -> Decision:
        return Decision(reason="never grows")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Planned:
    """Germinates according to a plan, and keeps every seed whose contribution is above 0.

    The plan is a list of (epoch, slot, blueprint), where `epoch` is the number of finished epochs; 0 is before the first.
    """

    name = "schedule"

    def __init__(self, plan: Sequence[tuple[int, str, str]]) -> None:
        self.plan = tuple((int(epoch), slot, blueprint) for epoch, slot, blueprint in plan)
        negative = [item for item in self.plan if item[0] < 0]
        if negative:
            raise GrowthError(f"the plan holds {negative[0]}, whose epoch is below 0; use epochs from 0 on")

    def decide(self, state: GrowthState) -> Decision:
        actions: list[Action] = [
            Germinate(slot=slot, reason=f"planned for epoch {epoch}", blueprint=blueprint)
            for epoch, slot, blueprint in self.plan
            if epoch == state.epoch
        ]
        return Decision((*actions, *see_through(state, {action.slot for action in actions})), self.name)

    def state_dict(self) -> dict[str, Any]:
        return {"plan": [list(item) for item in self.plan]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.plan = tuple((epoch, slot, blueprint) for epoch, slot, blueprint in state["plan"])


def see_through(state: GrowthState, busy: set[str]) -> list[Action]:
    """Advance and fossilize every seed as early as possible. At the end of the run, prune the seeds without a positive contribution.

    Slots in `busy` already have an action and are left out.
    """
    actions: list[Action] = []
    is_over = state.epochs is not None and state.epoch >= state.epochs
    for slot in state.slots:
        name = slot.place.name
        if name in busy or slot.is_withdrawing:
            continue
        if slot.stage is Stage.TRAINING and may_blend(slot, state.lifecycle).passed:
            actions.append(Advance(slot=name, reason="as planned"))
        elif slot.stage is Stage.HOLDING and slot.contribution is not None and slot.contribution.epoch == state.epoch:
            words = slot.contribution.in_words()
            if slot.contribution.gain.estimate > 0:
                actions.append(Fossilize(slot=name, reason=f"as planned; {words}"))
            elif is_over:
                actions.append(Prune(slot=name, reason=words))
    return actions


class Random(Planned):
    """Draws a plan of random slots, blueprints and epochs once, and follows it.

    `seed` is the random seed, `seeds` the number of seeds to grow (None: random), and `until` the part of the training in which they
    germinate.
    """

    name = "random"

    def __init__(self, *, seed: int, seeds: int | None = None, until: float = 0.5) -> None:
        super().__init__(())
        self.seed, self.seeds, self.until = seed, seeds, until
        self._is_drawn = False

    def decide(self, state: GrowthState) -> Decision:
        if not self._is_drawn:
            self.plan, self._is_drawn = self._draw(state), True
        return super().decide(state)

    def _draw(self, state: GrowthState) -> tuple[tuple[int, str, str], ...]:
        """Draw the plan, with at most one seed per slot."""
        rng = Streams(self.seed).numpy("random plan")
        slots = [slot for slot in state.slots if slot.candidates]
        count = min(self.seeds if self.seeds is not None else int(rng.integers(0, len(slots) + 1)), len(slots))
        last = max(int(self.until * (state.epochs or DEFAULT_EPOCHS)), 1)
        chosen = [slots[index] for index in sorted(rng.choice(len(slots), size=count, replace=False))] if count else []
        return tuple(
            (int(rng.integers(0, last)), slot.place.name, slot.candidates[int(rng.integers(len(slot.candidates)))].blueprint)
            for slot in chosen
        )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "is_drawn": self._is_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_drawn = state["is_drawn"]


class Schedule(Planned):
    """Grows a seed in every slot after part `at` of the training. Takes a preferred blueprint, else the one with most parameters."""

    preferred = ("double_conv3x3", "mlp")

    def __init__(self, *, at: float = 0.1) -> None:
        super().__init__(())
        self.at = at

    def decide(self, state: GrowthState) -> Decision:
        # Candidates are only known once there is a state, so the plan is made at the first decision.
        if not self.plan and state.epoch == 0:
            epoch = max(round(self.at * (state.epochs or DEFAULT_EPOCHS)), 1)
            self.plan = tuple((epoch, slot.place.name, self._largest(slot.candidates)) for slot in state.slots if slot.candidates)
        return super().decide(state)

    def _largest(self, candidates: Sequence[Any]) -> str:
        names = [candidate.blueprint for candidate in candidates]
        usual = [name for name in self.preferred if name in names]
        return usual[0] if usual else max(candidates, key=lambda candidate: candidate.cost.parameters).blueprint


class Completed:
    """Adds the missing optional members to a controller: the name of its class, and an empty state."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.name = str(getattr(controller, "name", type(controller).__name__))

    def decide(self, state: GrowthState) -> Decision:
        return self.controller.decide(state)

    def state_dict(self) -> dict[str, Any]:
        save = getattr(self.controller, "state_dict", dict)
        state: dict[str, Any] = save()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load = getattr(self.controller, "load_state_dict", None)
        if load is not None:
            load(state)


CONTROLLERS: dict[str, Callable[[GrowthConfig], CompleteController]] = {
    "heuristic": lambda config: Heuristic(config),
    "lookahead": lambda config: Lookahead(config),
    "never": lambda config: Never(),
    "random": lambda config: Random(seed=config.seed, seeds=config.baseline.random_seeds, until=config.baseline.random_until),
    "schedule": lambda config: Schedule(at=config.baseline.schedule_at),
}
# Controllers of packages that build on this one: module and function. They are imported when a user names them; growth needs none of them.
FROM_OTHER_PACKAGES = {"learned": ("esper.controller.trained", "load_learned")}
NAMES = (*CONTROLLERS, *FROM_OTHER_PACKAGES)


def as_controller(controller: Controller | str, config: GrowthConfig) -> CompleteController:
    """Return a complete controller for a name, or for an object that has at least `decide`."""
    if isinstance(controller, str):
        return make_controller(controller, config)
    kind = controller.__name__ if isinstance(controller, type) else type(controller).__name__
    if isinstance(controller, type):
        raise GrowthError(f"the controller is the class {kind} itself; pass an object of it: controller={kind}(...)")
    if not callable(getattr(controller, "decide", None)):
        raise GrowthError(f"the controller {kind} has no method decide(state); add one that returns a Decision")
    has = [name for name in ("state_dict", "load_state_dict") if callable(getattr(controller, name, None))]
    if len(has) == 1:
        raise GrowthError(f"the controller {kind} has only {has[0]} of state_dict and load_state_dict; it needs both, or neither")
    return controller if isinstance(controller, CompleteController) else Completed(controller)


def make_controller(name: str, config: GrowthConfig) -> CompleteController:
    """Return the controller of this name; see NAMES."""
    if name in FROM_OTHER_PACKAGES:
        module, function = FROM_OTHER_PACKAGES[name]
        made: CompleteController = getattr(importlib.import_module(module), function)(config)
        return made
    if name not in CONTROLLERS:
        file = "; for the file of a trained one, pass controller=esper.controller.load_controller(path)"
        raise GrowthError(f"no controller is named {name!r}; there are {', '.join(NAMES)}{file if name.endswith('.safetensors') else ''}")
    return CONTROLLERS[name](config)
