"""Layout of the observations and actions of a learned controller, for one host at one decision.

Observations depend only on `GrowthState`, which also holds the rules of the run, so a fleet and a single run give the same ones. All slots
are described in the same way, and so are all candidates, without names. Blueprints are columns in alphabetical order for readability; a
policy must not depend on the order. The features are listed in the tables of `esper.controller.features`.

Heads of an action: `op`; `slot`, given the op; `blueprint` and `alpha`, given the slot. The masks allow the candidates in the state and the
actions that pass growth's gates. Waiting is always allowed.

Shapes: N = hosts, S = slots, K = blueprints. S and K are padded; padding is all zero, including the feature `exists`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from enum import IntEnum

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from esper.controller.features import CANDIDATE, HOST, SLOT, ObservedCandidate, ObservedHost, ObservedSlot
from esper.growth.config import GrowthConfig
from esper.growth.lifecycle.stages import (
    Action,
    Advance,
    Candidate,
    Decision,
    Fossilize,
    Germinate,
    GrowthState,
    Prune,
    Retarget,
    SlotState,
    may_blend,
    may_fossilize,
    may_germinate,
    may_prune,
    may_retarget,
)
from esper.growth.measure.contribution import Allowance, total
from esper.growth.seeds.blueprints import REGISTRY, get_blueprint
from esper.text_table import figure
from esper.vecenv import ActionSpec, Discrete, Masks, Obs, ObservationSpec, Relevance, TensorSpec

ALPHA_TARGETS = (0.5, 0.7, 1.0)
Choices = Sequence[Mapping[str, int]]  # one mapping (head -> choice) per action of a decision


class Op(IntEnum):
    """Kinds of action. The numbers are the choices of the head `op`."""

    WAIT = 0
    GERMINATE = 1
    ADVANCE = 2
    RETARGET = 3
    FOSSILIZE = 4
    PRUNE = 5


OPS = tuple(op.name.lower() for op in Op)


def _version() -> str:
    """Return the version of the layout, with a hash of all tables."""
    tables = "\n".join(table.description() for table in (HOST, SLOT, CANDIDATE))
    return "5-" + hashlib.sha256(f"{tables}\n{list(Op)}\n{ALPHA_TARGETS}".encode()).hexdigest()[:8]


# Raise the number before the dash when a feature changes its meaning but not its description. Other changes alter the hash behind it.
LAYOUT_VERSION = _version()


def spec(slots: int, blueprints: int) -> tuple[ObservationSpec, ActionSpec]:
    """Return the specifications of observations and actions, for hosts with at most `slots` slots and `blueprints` blueprints."""
    observation = {
        "host": TensorSpec((HOST.width,)),
        "slots": TensorSpec((slots, SLOT.width)),
        "candidates": TensorSpec((slots, blueprints, CANDIDATE.width)),
    }
    heads = (
        Discrete("op", len(Op)),
        Discrete("slot", slots, parent="op", has_own_logits=True),
        Discrete("blueprint", blueprints, parent="slot", has_own_logits=True),
        Discrete("alpha", len(ALPHA_TARGETS), parent="slot", has_own_logits=True),
    )
    relevance = (
        Relevance("slot", given="op", choices=tuple(op for op in Op if op is not Op.WAIT)),
        Relevance("blueprint", given="op", choices=(Op.GERMINATE,)),
        Relevance("alpha", given="op", choices=(Op.RETARGET,)),
    )
    return observation, ActionSpec(heads, relevance)


def blueprint_names(state: GrowthState) -> tuple[str, ...]:
    """Return the blueprints of the columns: all that may grow, are growing or have grown anywhere in the host."""
    names = {candidate.blueprint for slot in state.slots for candidate in slot.candidates}
    names |= {name for slot in state.slots for name in (*slot.tried, *([slot.blueprint] if slot.blueprint else ()))}
    return tuple(sorted(names))


def observe(
    states: Sequence[GrowthState],
    *,
    slots: int,
    blueprints: int,
    ops: Sequence[str] = OPS,
    chosen: Sequence[Choices] | None = None,
) -> tuple[Obs, Masks]:
    """Return observations and masks of these hosts, padded to `slots` and `blueprints`. Only `ops` and waiting are allowed.

    `chosen` holds the earlier actions of the present decision of each host, if a decision has several actions; see `decision`.
    """
    count = len(states)
    host_values, slot_values = HOST.nothing(count), SLOT.nothing(count, slots)  # [N, features], [N, S, features]
    candidate_values = CANDIDATE.nothing(count, slots, blueprints)  # [N, S, K, features]
    may_op = np.zeros((count, len(Op), slots), dtype=bool)
    may_grow = np.zeros((count, slots, blueprints), dtype=bool)
    may_move = np.zeros((count, slots, len(ALPHA_TARGETS)), dtype=bool)
    # Fill the arrays host by host, slot by slot and candidate by candidate; they are scaled all at once below.
    for row, before in enumerate(states):
        names = blueprint_names(before)
        busy, state = _so_far(before, chosen[row] if chosen else ())
        _check_room(state, names, slots=slots, blueprints=blueprints)
        host_values[row] = HOST.values(ObservedHost(state))
        for place, slot in enumerate(state.slots):
            allowed = _Allowed(state, slot, names, is_busy=slot.place.name in busy)
            may_op[row, :, place] = list(allowed.ops.values())
            may_grow[row, place, : len(names)] = allowed.blueprints
            may_move[row, place] = allowed.alphas
            slot_values[row, place] = SLOT.values(ObservedSlot(state, slot, dict(zip(OPS, allowed.ops.values(), strict=True))))
            for column, name in enumerate(names):
                view = ObservedCandidate(state, slot, name, allowed.candidates.get(name), allowed.blueprints[column])
                candidate_values[row, place, column] = CANDIDATE.values(view)

    # Mask the ops that are switched off.
    for op in Op:
        may_op[:, op] &= op is Op.WAIT or op.name.lower() in ops
    # An op is allowed if at least one slot allows it; waiting always, even in a host without slots.
    some_slot: NDArray[np.bool_] = np.any(may_op, axis=2)
    some_slot[:, Op.WAIT] = True
    obs = {"host": HOST.scaled(host_values), "slots": SLOT.scaled(slot_values), "candidates": CANDIDATE.scaled(candidate_values)}
    masks = {"op": some_slot, "slot": may_op, "blueprint": may_grow, "alpha": may_move}
    return {name: torch.from_numpy(part) for name, part in obs.items()}, {name: torch.from_numpy(mask) for name, mask in masks.items()}


def decision(state: GrowthState, chosen: Choices, *, probe: bool = False) -> Decision:
    """Convert the choices of a policy into a decision of growth. Choices after the first wait are ignored.

    The actions are sorted by slot. Seeds get their random numbers in the order of germination, so otherwise the order of the choices would
    change the initial weights.
    """
    acting = sorted(_acting(chosen), key=lambda choice: choice["slot"])
    actions = [_action(state, state.slots[choice["slot"]], Op(choice["op"]), choice) for choice in acting]
    words = " and ".join(Op(choice["op"]).name.lower() for choice in acting)
    return Decision(tuple(actions), f"the policy chose to {words}" if actions else "the policy waits", probe=probe)


def in_depth(state: GrowthState) -> GrowthState:
    """Return the state as a controller sees it that was trained on fleets: seeds in depth, one at each place."""
    opened = [slot for slot in state.slots if slot.place.earlier]
    slots = [
        dataclasses.replace(
            slot,
            place=dataclasses.replace(slot.place, chain=(), why_not_wider=""),
            candidates=tuple(candidate for candidate in slot.candidates if not candidate.widened),
        )
        for slot in state.slots
        if not slot.place.earlier
    ]
    return dataclasses.replace(state, slots=tuple(slots), seeds_left=max(state.seeds_left - len(opened), 0))


def growth_in_depth(growth: GrowthConfig) -> GrowthConfig:
    """Return the settings for the fleets that a controller is trained and compared on: seeds in depth, one at each place."""
    names = REGISTRY if growth.blueprints is None else growth.blueprints
    deep = tuple(name for name in names if get_blueprint(name).share is None)
    return msgspec.structs.replace(growth, blueprints=deep, budget=msgspec.structs.replace(growth.budget, max_seeds_per_place=1))


def _acting(chosen: Choices) -> list[Mapping[str, int]]:
    """Return the choices before the first wait."""
    return list(itertools.takewhile(lambda choice: choice["op"] != Op.WAIT, chosen))


def _so_far(state: GrowthState, chosen: Choices) -> tuple[set[str], GrowthState]:
    """Return the slots that allow no further action in this decision, and the state after the choices so far.

    In that state, the seeds that will germinate are already in their slots, in the added cost, and off the budget.
    """
    acting = _acting(chosen)
    slots = list(state.slots)
    has_waited = len(acting) < len(chosen)  # then no slot allows a further action
    busy = {slot.place.name for slot in (slots if has_waited else [slots[choice["slot"]] for choice in acting])}
    growing = [choice for choice in acting if choice["op"] == Op.GERMINATE]
    if not growing:
        return busy, state
    names, added = blueprint_names(state), state.added
    allowed = Allowance(state.seeds_left, state.parameters_left, state.flops_left)
    for choice in growing:
        slot = slots[choice["slot"]]
        grown = next(candidate for candidate in slot.candidates if candidate.blueprint == names[choice["blueprint"]])
        slots[choice["slot"]] = dataclasses.replace(slot, blueprint=grown.blueprint, cost=grown.cost, rent=grown.rent)
        added, allowed = total((added, grown.cost)), allowed.after(grown.cost)
    return busy, dataclasses.replace(
        state,
        slots=tuple(slots),
        added=added,
        seeds_left=allowed.seeds,
        parameters_left=allowed.parameters,
        flops_left=allowed.flops,
    )


class _Allowed:
    """Actions that pass the gates in one slot. A busy slot only allows waiting."""

    def __init__(self, state: GrowthState, slot: SlotState, names: Sequence[str], *, is_busy: bool) -> None:
        rules = state.lifecycle
        allowance = Allowance(state.seeds_left, state.parameters_left, state.flops_left)
        self.candidates: dict[str, Candidate] = {candidate.blueprint: candidate for candidate in slot.candidates}
        growing = {name for name, candidate in self.candidates.items() if may_germinate(slot, allowance.refusal(candidate.cost)).passed}
        self.blueprints = [name in growing for name in names]
        self.alphas = [may_retarget(slot, alpha).passed for alpha in ALPHA_TARGETS]
        self.ops = {  # in the order of `Op`
            Op.WAIT: True,
            Op.GERMINATE: any(self.blueprints),
            Op.ADVANCE: may_blend(slot, rules).passed,
            Op.RETARGET: any(self.alphas),
            Op.FOSSILIZE: may_fossilize(slot, rules, epoch=state.epoch).passed,
            Op.PRUNE: may_prune(slot).passed,
        }
        if is_busy:
            self.blueprints, self.alphas = [False] * len(names), [False] * len(ALPHA_TARGETS)
            self.ops = {op: op is Op.WAIT for op in Op}


def _check_room(state: GrowthState, names: Sequence[str], *, slots: int, blueprints: int) -> None:
    """Raise ValueError if a host has more slots or blueprints than the observation has room for."""
    for what, found, room in (("slots", len(state.slots), slots), ("blueprints", len(names), blueprints)):
        if found > room:
            raise ValueError(f"a host has {found} {what} and there is room for {room}; observe it with {what}={found} or more")


def _action(state: GrowthState, slot: SlotState, op: Op, choice: Mapping[str, int]) -> Action:
    """Convert one choice into an action of growth, with a reason for the ledger."""
    name = slot.place.name
    match op:
        case Op.GERMINATE:
            blueprint = blueprint_names(state)[int(choice["blueprint"])]
            candidate = next(candidate for candidate in slot.candidates if candidate.blueprint == blueprint)
            return Germinate(name, _why_grow(candidate), blueprint)
        case Op.ADVANCE:
            return Advance(name, f"the policy lets it blend after {slot.epochs_in_stage} epochs of learning")
        case Op.RETARGET:
            target = ALPHA_TARGETS[int(choice["alpha"])]
            return Retarget(name, f"the policy moves alpha from {slot.alpha:.2f} to {target:g}", target)
        case Op.FOSSILIZE:
            return Fossilize(name, f"the policy keeps it: {_worth(slot)}")
        case Op.PRUNE:
            return Prune(name, f"the policy takes it out: {_worth(slot)}")
        case Op.WAIT:
            raise AssertionError("waiting is not an action")


def _why_grow(candidate: Candidate) -> str:
    estimate = "" if candidate.promise is None else f" and an estimated fall of the loss by {candidate.promise:.2g} per step"
    return f"the policy grows it here: it adds {candidate.cost.parameters:,} parameters for a rent of {figure(candidate.rent)}{estimate}"


def _worth(slot: SlotState) -> str:
    if slot.contribution is None:
        return f"the cost of removing it has not been measured, and its rent is {figure(slot.rent)}"
    return f"{slot.contribution.in_words()}, and its rent is {figure(slot.rent)}"
