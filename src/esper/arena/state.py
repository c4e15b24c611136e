"""The state of a batch of battles: named tuples of tensors whose first dimension is the battle.

Shapes: B = battles, U = units, S = columns on a side of the map, K = projectile slots of one unit, C = contacts, W = kinds of weapons.
The origin of world coordinates is the centre of the map, so the half turn that maps one side to the other only changes signs. Column
(i, j) covers x from i - S/2 to i + 1 - S/2, and y likewise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

CLOUDS = 2  # smoke clouds that one unit can have at the same time


class World(NamedTuple):
    """The map as it is now. A destroyed column is open ground."""

    height: Tensor  # [B, S, S] float32, top of the column
    material: Tensor  # [B, S, S] int8
    hit_points: Tensor  # [B, S, S] int32; 0 where nothing can be destroyed
    floor: Tensor  # [B, S, S] float32, height that carries units and stops shots; follows from height and material
    tops: Tensor  # [B, S, S] float32, height that blocks sight; likewise
    way: Tensor  # [B, S, S] int8, which of eight neighbours is next on the route to the zone; 8 in the zone (`esper.arena.routes`)
    route_m: Tensor  # [B, S, S] float32, length of the route to the zone
    zone_radius: Tensor  # [B] float32


class Units(NamedTuple):
    """The units of each battle. Timers are remaining ticks, int32."""

    position: Tensor  # [B, U, 3] of the feet
    velocity: Tensor  # [B, U, 3]
    heading: Tensor  # [B, U] radians from the x axis, counter-clockwise, in [-pi, pi)
    hit_points: Tensor  # [B, U]; 0: dead, or not part of this battle
    legs: Tensor  # [B, U]
    heat: Tensor  # [B, U]
    stability: Tensor  # [B, U]
    fuel: Tensor  # [B, U] seconds of full jets
    fallen: Tensor  # [B, U] timer
    suppressed: Tensor  # [B, U] timer
    painted: Tensor  # [B, U] timer
    cooldown: Tensor  # [B, U, W] timers
    is_shut_down: Tensor  # [B, U] bool
    is_venting: Tensor  # [B, U] bool
    is_grounded: Tensor  # [B, U] bool
    harm: Tensor  # [B, U, U] timer: the first unit damaged the second one recently
    present: Tensor  # [B, U] bool: takes part in this battle

    @property
    def is_alive(self) -> Tensor:
        return self.hit_points > 0


class Shells(NamedTuple):
    """Projectiles in flight. Every unit has its own slots, so the slot says who fired."""

    position: Tensor  # [B, U, K, 3]
    velocity: Tensor  # [B, U, K, 3]
    weapon: Tensor  # [B, U, K] int64
    target: Tensor  # [B, U, K] int64
    life: Tensor  # [B, U, K] timer, int32; 0: the slot is free


class Clouds(NamedTuple):
    """Smoke clouds. A new cloud of a unit replaces its oldest one."""

    position: Tensor  # [B, U, CLOUDS, 3]
    left: Tensor  # [B, U, CLOUDS] timer, int32


class BattleStatus(NamedTuple):
    """Score, holder of the zone and counters of each battle."""

    score: Tensor  # [B, 2] float32, seconds that each team has held the zone
    holder: Tensor  # [B] int64, team that holds the zone; -1: none
    decision: Tensor  # [B] int64, decisions taken
    episode: Tensor  # [B] int64, battles fought at this index before
    map: Tensor  # [B] int64, index of the map
    overflow: Tensor  # [B] int64, shots that found no free projectile slot; kept when the next battle begins


class Senses(NamedTuple):
    """Enemies that units sense and see. Computed once per decision, at its end."""

    sensed: Tensor  # [B, U, U] bool: the first unit knows where the second one is
    seen: Tensor  # [B, U, U] bool: the first unit has a clear line of sight to the second one
    contacts: Tensor  # [B, U, C] int64, sensed enemies, nearest first; meaningful where `is_contact`
    is_contact: Tensor  # [B, U, C] bool


class State(NamedTuple):
    """Everything about the battles."""

    world: World
    units: Units
    shells: Shells
    clouds: Clouds
    status: BattleStatus
    senses: Senses


SAVED_GROUPS = ("world", "units", "shells", "clouds", "contest", "senses")  # names of the groups in files; "contest" is the status


def named_tensors(state: State) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its name in files, such as "units/heat"."""
    groups: tuple[Any, ...] = state
    for group_name, group in zip(SAVED_GROUPS, groups, strict=True):
        for name, tensor in zip(group._fields, group, strict=True):
            yield f"{group_name}/{name}", tensor


def from_named(tensors: dict[str, Tensor], like: State) -> State:
    """Return a state from its named tensors, on the device of `like`. Names, shapes and types must be those of `like`."""
    expected = dict(named_tensors(like))
    if set(tensors) != set(expected):
        missing, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
        raise ValueError(f"a state has the tensors {sorted(expected)}; missing: {missing}, unknown: {unknown}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            wanted, given = expected[name], tensor
            raise ValueError(f"{name} should be {wanted.dtype} {tuple(wanted.shape)}; got {given.dtype} {tuple(given.shape)}")
    known: tuple[Any, ...] = like
    groups: list[Any] = [
        type(group)(*(tensors[f"{group_name}/{name}"].to(expected[f"{group_name}/{name}"].device) for name in group._fields))
        for group_name, group in zip(SAVED_GROUPS, known, strict=True)
    ]
    return State(*groups)


def select(condition: Tensor, new: State, old: State) -> State:
    """Return the new state where `condition` [B] holds, and the old state elsewhere."""
    return _pairwise(lambda after, before: torch.where(condition.view(-1, *(1,) * (before.dim() - 1)), after, before), new, old)


def replace_rows(state: State, rows: Tensor, new: State) -> State:
    """Replace the battles `rows` [N] by the new ones, in place, and return the state."""
    return _pairwise(lambda after, before: before.index_copy_(0, rows, after), new, state)


def copy_into(target: State, source: State) -> None:
    """Copy all tensors of `source` into those of `target`."""
    _pairwise(lambda after, before: before.copy_(after), source, target)


def cloned(state: State) -> State:
    """Return a copy of the state."""
    return _pairwise(lambda tensor, _: tensor.clone(), state, state)


def _pairwise(change: Callable[[Tensor, Tensor], Tensor], new: State, old: State) -> State:
    """Return the state of `change(tensor of new, tensor of old)` for every pair of tensors."""
    groups: list[Any] = [
        type(before)(*(change(after, was) for after, was in zip(group, before, strict=True)))
        for group, before in zip(new, old, strict=True)
    ]
    return State(*groups)


def state_hash(state: State, battle: int) -> str:
    """Return the SHA-256 of everything about one battle."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors(state):
        digest.update(name.encode())
        digest.update(tensor[battle].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
