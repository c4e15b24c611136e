"""The controller that tries before it grows: copies of the training go on with a few plans for an epoch, and the best copy goes on.

It follows the heuristic, which says when seeds are kept and when to look for a further step. In addition it looks at the host where the
heuristic would not, early and twice as late each time. At a look, after a probe, these plans are tried, each once, and no more than
`config.lookahead.trials` of them:

    nothing     the host goes on as it is
    heuristic   what the heuristic would grow
    ...         all layers wider by the same factor, and the best branch in every slot, from the most promising plan on

The validation loss after the trial, plus the rent, decides. See `esper.growth.trials` for how plans are tried and what it costs.
"""

from __future__ import annotations

from typing import Any

from esper.growth.config import GrowthConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.controllers.moves import Move, affordable, allowance_of, longest_rows, possible_choices
from esper.growth.lifecycle.stages import LIVING, Decision, Germinate, GrowthState, Trial

NEXT_LOOK = 2.0  # the next look of its own is at this many times the epoch of the last one


class Lookahead:
    """Controller that lets copies of the training try what it may grow; see the module's docstring."""

    name = "lookahead"

    def __init__(self, config: GrowthConfig) -> None:
        self.rules = config.lookahead
        self.heuristic = Heuristic(config)
        self._looks_at: int | None = None  # epoch of the last look, or of the next one, whose probe is under way

    def decide(self, state: GrowthState) -> Decision:
        decision = self.heuristic.decide(state)
        grown = tuple(action for action in decision.actions if isinstance(action, Germinate))
        others = tuple(action for action in decision.actions if not isinstance(action, Germinate))
        if grown or self._looks_at == state.epoch:
            self._looks_at = state.epoch
            trials = self._trials(state, grown)
            if len(trials) > 1:
                why = f"tries {', '.join(trial.name for trial in trials)}"
                return Decision(others, why, passed_over=decision.passed_over, trials=trials)
        if not decision.probe and self._must_look(state):
            self._looks_at = state.epoch + 1
            return Decision(decision.actions, "looks for what to try", probe=True)
        return decision

    def _must_look(self, state: GrowthState) -> bool:
        """Return whether to probe the candidates for a look of its own after the next epoch."""
        at, first = state.epoch + 1, self.heuristic.first_look(state.epochs)
        is_due = at == first or (self._looks_at is not None and at >= NEXT_LOOK * self._looks_at)
        is_waiting = any(slot.stage in LIVING for slot in state.slots)  # for the verdict on the present seeds
        return is_due and not is_waiting and any(slot.candidates for slot in state.slots) and self.heuristic.is_in_time(state.epochs, at=at)

    def _trials(self, state: GrowthState, grown: tuple[Germinate, ...]) -> tuple[Trial, ...]:
        """Return what to try now. The first is what is done where nothing can be tried: the plan of the heuristic."""
        trials = [Trial("heuristic", grown)] if grown else []
        trials.append(Trial("nothing"))
        for move in sorted(host_wide(state), key=lambda move: promise_of(move), reverse=True):
            actions = tuple(move.germinate(f"tried: {move.name}"))
            is_new = all(_what(actions) != _what(trial.actions) for trial in trials)
            if is_new and len(trials) < self.rules.trials:
                trials.append(Trial(move.name, actions))
        return tuple(trials)

    def state_dict(self) -> dict[str, Any]:
        return {"heuristic": self.heuristic.state_dict(), "looks_at": self._looks_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heuristic.load_state_dict(state["heuristic"])
        self._looks_at = state["looks_at"]


def host_wide(state: GrowthState) -> list[Move]:
    """Return the moves that treat all slots alike: one for each factor of width, and the branches that promise most."""
    possible, found = possible_choices(state), list[Move]()
    for blueprint, choices in possible.items():
        if any(candidate.widened for _, candidate in choices):
            found.append(Move(blueprint, affordable(longest_rows(choices), allowance_of(state))))
    branches = [choice for choices in possible.values() for choice in choices if not choice[1].widened]
    branches.sort(key=lambda choice: choice[1].promise or 0.0, reverse=True)
    found.append(Move("branches", affordable(branches, allowance_of(state))))
    return [move for move in found if move.choices]


def promise_of(move: Move) -> float:
    """Return the sum of the probe's estimates for the seeds of a move."""
    return sum(candidate.promise or 0.0 for _, candidate in move.choices)


def _what(actions: tuple[Any, ...]) -> set[tuple[str, str]]:
    return {(action.slot, action.blueprint) for action in actions}
