"""Moves, which grow a host as a whole, and plans made of them: the same for every host, to compare with, or random, to learn from.

A move is a set of seeds that germinate together. It names no slots, so that it means the same in any host:

    widen_300            every row of layers gets four times the units
    deep                 a branch in every slot that takes one
    norm                 a norm in every slot that takes one
    widen_300 and deep   the widening, and a branch in every slot that is left

Seeds are raised in one way: advanced and kept as early as the gates allow (see `see_through`). Moves are made after the first training
segment and after a quarter of the training (see `looks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from esper.controller.config import BRANCHES, LOOKS, MOVES, WIDENINGS
from esper.growth.controllers.baselines import see_through
from esper.growth.controllers.moves import NOTHING, Choice, Move, affordable, allowance_of, longest_rows, possible_choices
from esper.growth.lifecycle.stages import Decision, GrowthState
from esper.growth.measure.contribution import Allowance
from esper.rng import Streams


def looks(epochs: int | None) -> tuple[int, ...]:
    """Return the numbers of finished training segments after which moves are made. A training of unknown length counts as one of 16.

    >>> looks(20), looks(4)
    ((1, 5), (1,))
    """
    return tuple(sorted({_look(share, epochs) for share in LOOKS}))


def _look(share: float, epochs: int | None) -> int:
    return max(round(share * (16 if epochs is None else epochs)), 1)


def moves(state: GrowthState) -> list[Move]:
    """Return the moves that are possible now. Of those that would grow the same, only the first is returned."""
    possible, found = possible_choices(state), list[Move]()
    for name in MOVES:
        move = _named(name, possible, allowance_of(state))
        if move.choices and all(move.choices != other.choices for other in found):
            found.append(move)
    return found


def move_named(name: str, state: GrowthState) -> Move:
    """Return a move by its name, as far as the slots and the budget allow it now."""
    return NOTHING if name == NOTHING.name else _named(name, possible_choices(state), allowance_of(state))


def make_move(state: GrowthState, move: Move, reason: str, *, about: str = "", probe: bool = False) -> Decision:
    """Return the decision to make a move, and to raise and keep all seeds as early as the gates allow.

    `reason` is that of the new seeds, `about` that of the whole decision.
    """
    grown = move.germinate(reason)
    return Decision((*grown, *see_through(state, {action.slot for action in grown})), about, probe=probe)


def _named(name: str, possible: Mapping[str, list[Choice]], allowed: Allowance) -> Move:
    wanted: list[Choice] = []
    for part in name.split(" and "):
        some = [choice for blueprint in (BRANCHES if part == "deep" else (part,)) for choice in possible.get(blueprint, [])]
        wanted += longest_rows(some) if part in WIDENINGS else some
    return Move(name, affordable(wanted, allowed))


OnMove = Callable[[GrowthState, Move], Any]


def _record_nothing(state: GrowthState, move: Move) -> None:
    pass


@dataclass(frozen=True)
class ConstantPlan:
    """Makes one move in every host, after a share `at` of the training, and tells `record` the state and the move.

    At 0, it moves as early as possible: after the first training segment.
    """

    move: str | None = None
    at: float = 0.0
    record: OnMove = _record_nothing

    @property
    def name(self) -> str:
        return "never" if self.move is None else f"{self.move} at {self.at:g}"

    def decide(self, state: GrowthState) -> Decision:
        move, when = NOTHING, _look(self.at, state.epochs)
        if state.epoch == when:
            move = move_named(self.move or NOTHING.name, state)
            self.record(state, move)
        must_probe = self.move is not None and state.epoch + 1 == when and self.record is not _record_nothing
        return make_move(state, move, f"planned: {self.name}", about=self.name, probe=must_probe)


CONSTANT_PLANS = (
    ConstantPlan(),
    *(ConstantPlan(move) for move in MOVES),
    *(ConstantPlan(move, at=share) for share in LOOKS[1:] for move in MOVES if " and " not in move),
)


_SHARE_OF_LOOKS = 0.7  # at which a random plan makes a move


@dataclass
class RandomPlan:
    """Makes a random move at some looks, at least at one. Tells `record` each with the state before it, and where it makes no more."""

    seed: int
    record: OnMove = _record_nothing
    name: str = "random"
    _times: frozenset[int] = frozenset()  # of the moves

    def decide(self, state: GrowthState) -> Decision:
        rng = Streams(self.seed).numpy(f"decision {state.epoch}")
        at = looks(state.epochs)
        if not self._times:
            some = [look for look in at if rng.random() < _SHARE_OF_LOOKS]
            self._times = frozenset(some or [at[rng.integers(len(at))]])
        move = NOTHING
        if state.epoch in self._times and (options := moves(state)):
            move = options[rng.integers(len(options))]
            self.record(state, move)
        elif state.epoch in at and state.epoch > max(self._times):
            self.record(state, NOTHING)
        must_probe = state.epoch + 1 in at and any(slot.candidates for slot in state.slots)
        return make_move(state, move, "drawn at random", about=self.name, probe=must_probe)


@dataclass
class RandomMoves:
    """Makes a random move after each of the given decisions, or as soon afterwards as something can grow."""

    seed: int
    times: tuple[int, ...]  # numbers of finished training segments, each once
    name: str = "random"
    _due: int = 0  # moves whose time has come

    def decide(self, state: GrowthState) -> Decision:
        move = NOTHING
        self._due += state.epoch in self.times
        if self._due and (options := moves(state)):
            move = options[Streams(self.seed).numpy(f"decision {state.epoch}").integers(len(options))]
            self._due -= 1
        return make_move(state, move, "drawn at random", about=self.name)
