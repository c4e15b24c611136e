"""The controller that tries before it grows: copies of the training go on with a few plans for some epochs, and the best copy goes on.

It follows the heuristic, but for one look, where the heuristic looks at the host first. There, after a probe, these plans are tried, each
once, and of the last two kinds no more than `config.lookahead.plans`:

    heuristic   what the heuristic would grow
    nothing     the host goes on as it is
    branches    the branch that promises most in every slot
    widen_...   all layers wider by the same factor, from the smallest on that doubles the units at least

See `esper.growth.trials` for how plans are tried and compared. What each is worth was measured (docs/log.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from esper.growth.config import GrowthConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.controllers.moves import Move, affordable, allowance_of, longest_rows, possible_choices
from esper.growth.lifecycle.stages import LIVING, Decision, Germinate, GrowthState, Trial
from esper.growth.seeds.blueprints import get_blueprint
from esper.growth.trials import MARGIN

LEAST_SHARE = 1.0  # a widening of all layers makes this many times as many new units at least


class Lookahead:
    """Controller that lets copies of the training try what it may grow; see the module's docstring."""

    name = "lookahead"

    def __init__(self, config: GrowthConfig) -> None:
        self.rules = config.lookahead
        self.most_trials = 2 + self.rules.plans  # that it asks for at once
        self.heuristic = Heuristic(config)

    def decide(self, state: GrowthState) -> Decision:
        decision, first = self.heuristic.decide(state), self.heuristic.first_look(state.epochs)
        if not self._may_look(state, first):
            return decision
        if state.epoch == first - 1:
            return replace(decision, reason="looks for what to try", probe=True, not_probed=frozenset())
        grown = tuple(action for action in decision.actions if isinstance(action, Germinate))
        trials = self._trials(state, grown)
        if len(trials) < 2:
            return decision
        others = tuple(action for action in decision.actions if not isinstance(action, Germinate))
        return replace(decision, actions=others, reason=f"tries {', '.join(one.name for one in trials)}", probe=False, trials=trials)

    def _may_look(self, state: GrowthState, first: int) -> bool:
        """Return whether this is the decision about the first look, or the one before, which asks for its probe."""
        if state.epoch not in (first - 1, first) or not self.heuristic.is_in_time(state.epochs, at=first):
            return False
        is_empty = not any(slot.stage in LIVING for slot in state.slots)
        return is_empty and any(slot.candidates for slot in state.slots) and may_gain(state)

    def _trials(self, state: GrowthState, grown: tuple[Germinate, ...]) -> tuple[Trial, ...]:
        """Return what to try now. The first is what the heuristic would do."""
        trials = [Trial("heuristic", grown)] if grown else []
        trials.append(Trial("nothing"))
        for move in host_wide(state):
            actions = tuple(move.germinate(f"tried as {move.name}"))
            if all(seeds_of(actions) != seeds_of(trial.actions) for trial in trials):
                trials.append(Trial(move.name, actions))
        return tuple(trials[: 1 + bool(grown) + self.rules.plans])

    def state_dict(self) -> dict[str, Any]:
        return self.heuristic.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heuristic.load_state_dict(state)


def may_gain(state: GrowthState) -> bool:
    """Return whether the host's loss is high enough for a trial to be ahead by more than the margin."""
    return state.scale is not None and min(state.val_losses) - state.scale.floor > MARGIN * state.scale.unit


def host_wide(state: GrowthState) -> list[Move]:
    """Return the moves that treat all slots alike: the branches that promise most, then one for each factor of width, smallest first."""
    possible, allowed = possible_choices(state), allowance_of(state)
    branches = [choice for choices in possible.values() for choice in choices if not choice[1].widened]
    branches.sort(key=lambda choice: choice[1].promise or 0.0, reverse=True)
    found = [Move("branches", affordable(branches, allowed))]
    shares = {blueprint: get_blueprint(blueprint).share or 0.0 for blueprint in possible}
    wider = sorted((name for name in possible if shares[name] >= LEAST_SHARE), key=lambda name: shares[name])
    found += [Move(name, affordable(longest_rows(possible[name]), allowed)) for name in wider]
    return [move for move in found if move.choices]


def seeds_of(actions: tuple[Any, ...]) -> set[tuple[str, str]]:
    """Return slot and blueprint of the seeds that these actions let germinate."""
    return {(action.slot, action.blueprint) for action in actions}
