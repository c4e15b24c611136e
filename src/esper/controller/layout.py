"""Layout of the observations and actions of a learned controller, for one host at one decision.

An observation has the features of the host, those of every move, the size of the host after each move, and the price of the rent. An action
is the number of a move in `MOVE_NAMES`, where 0 grows nothing. Moves that are not possible now are masked, and all their numbers are 0.

Observations depend only on `GrowthState`, which also holds the rules of the run, so a fleet and a single run give the same ones.

Shapes: N = hosts, K = moves, nothing included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from esper.controller.config import MOVES, rent_at
from esper.controller.features import HOST, MOVE, ObservedMove
from esper.controller.plans import looks, make_move, move_named, moves
from esper.growth.controllers.moves import NOTHING, Move
from esper.growth.lifecycle.stages import Cost, Decision, GrowthState
from esper.growth.measure.contribution import rent_of, total
from esper.vecenv import ActionSpec, Discrete, Masks, Obs, ObservationSpec, TensorSpec

MOVE_NAMES = (NOTHING.name, *MOVES)
FEATURES = tuple(feature.name for table in (HOST, MOVE) for feature in table.features)  # of a move in a host
Vector = NDArray[np.float32]


def _version() -> str:
    """Return the version of the layout, with a hash of all tables."""
    tables = "\n".join(table.description() for table in (HOST, MOVE))
    return "6-" + hashlib.sha256(f"{tables}\n{MOVE_NAMES}".encode()).hexdigest()[:8]


# Raise the number before the dash when a feature changes its meaning but not its description. Other changes alter the hash behind it.
LAYOUT_VERSION = _version()


def spec() -> tuple[ObservationSpec, ActionSpec]:
    """Return the specifications of observations and actions."""
    count = len(MOVE_NAMES)
    observation = {
        "host": TensorSpec((HOST.width,)),
        "moves": TensorSpec((count, MOVE.width)),
        "sizes": TensorSpec((count,)),
        "price": TensorSpec((1,)),
    }
    return observation, ActionSpec((Discrete("move", count),))


def size_of(added: Cost, host: Cost) -> float:
    """Return the size of what was added, the rent at a price of 1."""
    return rent_of(added, host, rent_at(1.0))


def options(state: GrowthState) -> dict[str, Move]:
    """Return the moves that a controller may make now, by name. There are none but when it looks at the host, see `looks`."""
    return {move.name: move for move in [NOTHING, *(moves(state) if state.epoch in looks(state.epochs) else [])]}


def why_no_move(state: GrowthState) -> str:
    """Return the reason why `options` holds no move but to grow nothing."""
    if not state.epoch:
        return "waits for the first losses"
    if state.epoch not in looks(state.epochs):
        return f"makes moves only after {' and '.join(map(str, looks(state.epochs)))} training segments"
    return "no move is possible: no slot is free, or the budget is used up"


def host_features(state: GrowthState) -> Vector:
    """Return the features of a host, scaled."""
    return HOST.scaled(np.array(HOST.values(state), dtype=float))


def move_features(state: GrowthState, some: Sequence[Move]) -> Vector:
    """Return the features of moves [moves, features], scaled."""
    return MOVE.scaled(np.array([MOVE.values(ObservedMove(state, move)) for move in some], dtype=float))


def sizes_after(state: GrowthState, some: Sequence[Move]) -> list[float]:
    """Return the size of all that is added to the host, after each of the moves."""
    return [size_of(total([state.added, move.cost]), state.host_cost) for move in some]


def observe(states: Sequence[GrowthState]) -> tuple[Obs, Masks]:
    """Return observations and masks of these hosts."""
    shape = len(states), len(MOVE_NAMES)
    hosts = np.stack([host_features(state) for state in states])
    features, sizes = np.zeros((*shape, MOVE.width), np.float32), np.zeros(shape, np.float32)
    allowed = np.zeros(shape, bool)
    for row, state in enumerate(states):
        possible = options(state)
        columns = [MOVE_NAMES.index(name) for name in possible]
        features[row, columns] = move_features(state, list(possible.values()))
        sizes[row, columns] = sizes_after(state, list(possible.values()))
        allowed[row, columns] = True
    prices = np.array([[state.rent.parameters] for state in states], np.float32)
    parts = {"host": hosts, "moves": features, "sizes": sizes, "price": prices}
    return {name: torch.from_numpy(part) for name, part in parts.items()}, {"move": torch.from_numpy(allowed)}


def decision(state: GrowthState, move: Move, why: str) -> Decision:
    """Return the decision to make a move. Seeds are raised and kept as early as possible, and candidates are probed before every look."""
    must_probe = state.epoch + 1 in looks(state.epochs) and any(slot.candidates for slot in state.slots)
    return make_move(state, move, why, about=why, probe=must_probe)


def policy_decision(state: GrowthState, choice: int) -> Decision:
    """Return the decision for an action of a policy: the number of a possible move."""
    name = MOVE_NAMES[choice]
    return decision(state, move_named(name, state), f"the policy makes the move {name}")
