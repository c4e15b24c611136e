"""A turn: one decision about one host, made in small steps that see one another.

    turn = Turn(state, advice=steps_of(heuristic.decide(state), state))
    while not turn.is_over:
        turn = turn.after(step)              # one of turn.legal()
    decision = turn.decision()

A step is an operation, a target and, where something germinates, a blueprint. Targets are sets of slots: each slot, each row of layers that
can be widened together, all rows at once, and all slots at once, so that a step means the same in hosts of any size. What a step does is
seen by those behind it: the state of a turn is what the host will be like when the steps so far are carried out. `wait` ends the turn.

Every step is legal where the gates of growth let it pass, and where a seed that germinates now can still be kept before the training ends.
No two steps mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from esper.growth.controllers.heuristic import least_epochs
from esper.growth.controllers.moves import Choice, Move, affordable, allowance_of, longest_rows, possible_choices
from esper.growth.lifecycle.stages import (
    Action,
    Advance,
    Decision,
    Fossilize,
    Germinate,
    GrowthState,
    Prune,
    SlotState,
    Stage,
    may_blend,
    may_fossilize,
    may_germinate,
    may_prune,
)
from esper.growth.measure.contribution import Allowance, marginal_rent, total

Op = Literal["wait", "look", "germinate", "advance", "fossilize", "prune"]
OPS: tuple[Op, ...] = ("wait", "look", "germinate", "advance", "fossilize", "prune")
Kind = Literal["slot", "row", "rows", "slots"]
KINDS: tuple[Kind, ...] = ("slot", "row", "rows", "slots")
CHAIN = "_chain"  # behind the name of a blueprint that widens several layers in a row by the factor of the name


class Step(NamedTuple):
    """One step of a turn."""

    op: Op
    target: str = ""  # name of the target; "" for wait and look
    blueprint: str = ""  # of the seeds; "" unless they germinate

    def in_words(self) -> str:
        return " ".join(filter(None, self))


WAIT, LOOK = Step("wait"), Step("look")


@dataclass(frozen=True)
class Target:
    """Slots that one step is about."""

    name: str  # of the slot, or of the row, its first layer
    kind: Kind
    slots: tuple[SlotState, ...]
    moves: Mapping[str, Move] = field(default_factory=dict)  # what may germinate, by blueprint


@dataclass(frozen=True)
class Turn:
    """A decision in the making; see the module's docstring."""

    state: GrowthState  # as the steps so far make it
    advice: tuple[Step, ...] = ()  # what another controller would do, in its order
    looked_at: int | None = None  # number of finished epochs after which the last probe was asked for
    actions: tuple[Action, ...] = ()  # of the steps so far
    looks: bool = False  # a probe is asked for
    is_over: bool = False

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        return tuple(targets_of(self.state))

    def legal(self) -> list[Step]:
        """Return all steps that are possible now."""
        steps = [WAIT, *([LOOK] if self.may_look() else [])]
        for target in self.targets:
            steps += [Step("germinate", target.name, blueprint) for blueprint in self.may_germinate(target)]
            steps += [Step(op, target.name) for op in OPS[3:] if self.may(op, target)]
        return steps

    def may_look(self) -> bool:
        """Return whether a probe can be asked for: something could germinate after it, and be kept."""
        return not self.looks and is_in_time(self.state, self.state.epoch + 1) and any(slot.candidates for slot in self.state.slots)

    def may_germinate(self, target: Target) -> Collection[str]:
        """Return the blueprints that may germinate at a target."""
        return target.moves if is_in_time(self.state, self.state.epoch) else ()

    def may(self, op: Op, target: Target) -> bool:
        """Return whether an operation on seeds is possible at a target. One for all slots is, where two seeds can pass its gate."""
        if target.kind not in ("slot", "slots") or op not in _GATES:
            return False
        return sum(_GATES[op](slot, self.state) for slot in target.slots) > (target.kind == "slots")

    @cached_property
    def advised(self) -> Step:
        """What the other controller would do now: its first step that is still possible."""
        legal = set(self.legal())
        return next((step for step in self.advice if step in legal), WAIT)

    def after(self, step: Step, reason: str = "") -> Turn:
        """Return the turn after a legal step. `reason` is that of the actions, for the ledger."""
        rest = tuple(other for other in self.advice if other != step)
        if step.op == "wait":
            return replace(self, is_over=True)
        if step.op == "look":
            return replace(self, looks=True, advice=rest)
        target = next(target for target in self.targets if target.name == step.target)
        if step.op == "germinate":
            move = target.moves[step.blueprint]
            actions = move.germinate(reason or f"grows {step.blueprint} in {target.name}")
            return replace(self, state=grown(self.state, move), actions=(*self.actions, *actions), advice=rest)
        slots = [slot for slot in target.slots if _GATES[step.op](slot, self.state)]
        actions = [_ACTIONS[step.op](slot=slot.place.name, reason=reason or _measured(slot)) for slot in slots]
        state = moved(self.state, step.op, {slot.place.name for slot in slots})
        return replace(self, state=state, actions=(*self.actions, *actions), advice=rest)

    def decision(self, reason: str = "") -> Decision:
        return Decision(self.actions, reason, probe=self.looks)


# Targets


def targets_of(state: GrowthState) -> Iterator[Target]:
    """Yield the targets of a host: its slots, the rows of its layers, and all rows and all slots where there are several."""
    possible, allowed = possible_choices(state), allowance_of(state)
    rows = list(_rows(state, possible, allowed))
    made_by_rows = {move.seeds for row in rows for move in row.moves.values()}
    for slot in state.slots:
        own = [Move(one.blueprint, ((slot, one),)) for choices in possible.values() for other, one in choices if other is slot]
        yield Target(slot.place.name, "slot", (slot,), {move.name: move for move in own if move.seeds not in made_by_rows})
    yield from rows
    if len(rows) > 1:
        wider = [Move(name, affordable(longest_rows(choices), allowed)) for name, choices in _wider(possible).items()]
        slots = tuple(slot for row in rows for slot in row.slots)
        yield Target("all rows", "rows", slots, {move.name: move for move in wider if move.seeds not in made_by_rows})
    if len(state.slots) > 1:
        branches = [Move(name, affordable(choices, allowed)) for name, choices in possible.items() if not choices[0][1].widened]
        yield Target("all slots", "slots", state.slots, {move.name: move for move in branches if len(move.choices) > 1})


def _wider(possible: Mapping[str, Sequence[Choice]]) -> dict[str, list[Choice]]:
    """Return the choices that widen layers, one or several in a row, by the name of the blueprint for one."""
    found: dict[str, list[Choice]] = {}
    for name, choices in possible.items():
        if choices[0][1].widened:
            found.setdefault(name.removesuffix(CHAIN), []).extend(choices)
    return found


def _rows(state: GrowthState, possible: Mapping[str, Sequence[Choice]], allowed: Allowance) -> Iterator[Target]:
    """Yield the rows of layers that can be widened now. Each is a set of units that some candidates widen together."""
    rows: list[set[str]] = []
    for widened in (set(one.widened) for slot in state.slots for one in slot.candidates if one.widened):
        linked = [row for row in rows if row & widened]
        rows = [row for row in rows if row not in linked] + [widened.union(*linked)]
    for units in sorted(rows, key=min):
        within = {name: [one for one in choices if units.issuperset(one[1].widened)] for name, choices in _wider(possible).items()}
        moves = {name: Move(name, affordable(longest_rows(choices), allowed)) for name, choices in within.items()}
        slots = tuple(slot for slot in state.slots if any(one.widened and units.issuperset(one.widened) for one in slot.candidates))
        yield Target(f"row {min(units)}", "row", slots, {name: move for name, move in moves.items() if move.choices})


# Gates, and what steps do


def is_in_time(state: GrowthState, epoch: int) -> bool:
    """Return whether a seed that germinates after this epoch can be kept before the training ends."""
    return state.epochs is None or state.epochs - epoch >= least_epochs(state.lifecycle)


_GATES: dict[Op, Callable[[SlotState, GrowthState], bool]] = {
    "advance": lambda slot, state: may_blend(slot, state.lifecycle).passed,
    "fossilize": lambda slot, state: may_fossilize(slot, state.lifecycle, epoch=state.epoch).passed,
    "prune": lambda slot, state: may_prune(slot).passed and slot.stage is Stage.HOLDING,
}
_ACTIONS: dict[Op, type[Advance | Fossilize | Prune]] = {"advance": Advance, "fossilize": Fossilize, "prune": Prune}


def _measured(slot: SlotState) -> str:
    return "not measured" if slot.contribution is None else slot.contribution.in_words()


def grown(state: GrowthState, move: Move) -> GrowthState:
    """Return the state in which the seeds of a move have germinated: slots, budget and rents."""
    chosen = {slot.place.name: candidate for slot, candidate in move.choices}
    added, allowed = total([state.added, move.cost]), allowance_of(state)
    for candidate in chosen.values():
        allowed = allowed.after(candidate.cost)
    unit = 1.0 if state.scale is None else state.scale.unit
    slots = []
    for slot in state.slots:
        if (seed := chosen.get(slot.place.name)) is not None:
            slots.append(replace(slot, stage=Stage.GERMINATED, cost=seed.cost, rent=seed.rent, candidates=()))
            continue
        left = (one for one in slot.candidates if may_germinate(slot, allowed.refusal(one.cost)).passed)
        rents = (replace(one, rent=unit * marginal_rent(one.cost, added, state.host_cost, state.rent)) for one in left)
        slots.append(replace(slot, candidates=tuple(rents)))
    return replace(
        state,
        slots=tuple(slots),
        added=added,
        seeds_left=allowed.seeds,
        parameters_left=allowed.parameters,
        flops_left=allowed.flops,
    )


def moved(state: GrowthState, op: Op, names: Collection[str]) -> GrowthState:
    """Return the state in which an operation on the seeds of these slots is carried out."""
    stage = Stage.FOSSILIZED if op == "fossilize" else Stage.BLENDING
    slots = (
        replace(slot, stage=stage, epochs_in_stage=0, is_withdrawing=op == "prune") if slot.place.name in names else slot
        for slot in state.slots
    )
    return replace(state, slots=tuple(slots))


# Decisions of other controllers, as steps


def steps_of(decision: Decision, state: GrowthState) -> tuple[Step, ...]:
    """Return the steps that make a decision of another controller. Actions that are no step of a turn are left out."""
    ops: dict[type[Action], Op] = {action: op for op, action in _ACTIONS.items()}
    targets, steps = list(targets_of(state)), list[Step]()
    for action in decision.actions:
        if isinstance(action, Germinate):
            steps += _step_of(action, targets)
        elif (op := ops.get(type(action))) is not None:
            steps.append(Step(op, action.slot))
    return (*steps, *([LOOK] if decision.probe else []))


def _step_of(action: Germinate, targets: Iterable[Target]) -> Iterator[Step]:
    """Yield the step that lets this seed alone germinate, if there is one."""
    for target in targets:
        for blueprint, move in target.moves.items():
            if move.seeds == ((action.slot, action.blueprint),):
                yield Step("germinate", target.name, blueprint)
                return
