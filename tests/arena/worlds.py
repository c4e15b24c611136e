"""Flat arenas with units and terrain placed by the test, and orders without the way through actions."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor

from esper.arena.arena import Arena, no_actions
from esper.arena.config import ArenaConfig
from esper.arena.map_columns import floors, sight_tops
from esper.arena.orders import FIRE, MOTION, Orders
from esper.arena.routes import find_ways
from esper.arena.specs import WEAPONS, Material
from esper.arena.start import Atlas
from esper.arena.state import State, World, cloned, named_tensors
from esper.arena.tables import Tables
from esper.vecenv import Actions

WEAPON = {name: index for index, name in enumerate(WEAPONS)}
TURNED_WAY = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3, 8], dtype=torch.int8)  # the direction that a way has after half a turn


def small_config(**settings: Any) -> ArenaConfig:
    return ArenaConfig(**{"battles": 1, "team_size": 1, "size": 24, "maps": 1, "pack": ("medium",), "contacts": 2, "allies": 1, **settings})


def flat_arena(*pack: str, seed: int = 0, **settings: Any) -> Arena:
    """Open ground without a step. Each team has the units of `pack`, and they stand in their corners."""
    pack = pack or ("medium",)
    arena = copy.copy(_made(small_config(**{"pack": pack, "team_size": len(pack), **settings}), seed))
    # Copy the tensors that are written in place.
    arena.state, arena.largest_team = cloned(arena.state), arena.largest_team.clone()
    return arena


@functools.cache
def _made(config: ArenaConfig, seed: int) -> Arena:
    arena = Arena(config, seed=seed)
    arena.atlas = Atlas(_flat(arena.atlas.worlds, arena.tables), arena.atlas.spawns)
    arena.reset()
    return arena


def _flat(worlds: World, tables: Tables) -> World:
    nothing, open_ground = torch.zeros_like(worlds.height), torch.zeros_like(worlds.material)
    way, route = _flat_way(worlds.height.shape[1], float(worlds.zone_radius[0]))
    return worlds._replace(
        height=nothing,
        material=open_ground,
        hit_points=torch.zeros_like(worlds.hit_points),
        floor=nothing,
        tops=nothing,
        way=way.expand_as(worlds.way),
        route_m=route.expand_as(worlds.route_m),
    )


@functools.cache
def _flat_way(size: int, radius: float) -> tuple[Tensor, Tensor]:
    return find_ways(torch.zeros(1, size, size), torch.zeros(1, size, size, dtype=torch.int8), torch.tensor([radius]))


def build(arena: Arena, x: tuple[int, int], y: tuple[int, int], material: Material, *, height: float = 0.0) -> None:
    """Columns from the first to the second coordinate, in all battles."""
    world, half = arena.state.world, arena.config.size // 2
    here = (slice(None), slice(x[0] + half, x[1] + half), slice(y[0] + half, y[1] + half))
    heights, materials, points = world.height.clone(), world.material.clone(), world.hit_points.clone()
    heights[here], materials[here] = height, int(material)
    points[here] = arena.tables.materials.hit_points[int(material)]
    floor, tops = (make(heights, materials, arena.tables.materials) for make in (floors, sight_tops))
    arena.state = arena.state._replace(world=world._replace(height=heights, material=materials, hit_points=points, floor=floor, tops=tops))


def place(arena: Arena, unit: int, x: float, y: float, z: float = 0.0, *, heading: float = 0.0) -> None:
    """In all battles, and at rest. It stands where there is a floor at `z`, else it hangs in the air."""
    half = arena.config.size // 2
    is_grounded = bool(arena.state.world.floor[0, math.floor(x) + half, math.floor(y) + half] >= z)
    put(arena, unit, position=[x, y, z], velocity=[0.0, 0.0, 0.0], heading=heading, is_grounded=is_grounded)


def put(arena: Arena, unit: int, **values: Any) -> None:
    """Fields of one unit, in all battles: put(arena, 0, heat=50.0)."""
    units = arena.state.units
    changed = {}
    for name, value in values.items():
        tensor = getattr(units, name).clone()
        tensor[:, unit] = torch.as_tensor(value, dtype=tensor.dtype)
        changed[name] = tensor
    arena.state = arena.state._replace(units=units._replace(**changed))


def doom(arena: Arena, unit: int) -> None:
    """Let a unit die in the next decision, in all battles: lava burns under it, and it has almost no hit points left."""
    build(arena, (-8, 8), (-8, 8), Material.LAVA)
    put(arena, unit, hit_points=1e-4)


def make_duel(name: str = "medium", *, metres: float = 5.0, y: float = 0.0, heading: float = math.pi, **settings: Any) -> Arena:
    """Two units on open ground, so many metres apart; the first looks along the x axis at the second, the second towards `heading`."""
    arena = flat_arena(name, **settings)
    place(arena, 0, -metres / 2, y)
    place(arena, 1, metres / 2, y, heading=heading)
    return arena


def unit_field(arena: Arena, name: str, unit: int) -> Any:
    """Return a field of a unit of the first battle: a number, or a list of them."""
    return getattr(arena.state.units, name)[0, unit].tolist()


def make_orders(arena: Arena, orders: dict[int, dict[str, Any]] | None = None) -> Orders:
    """Orders to units by index: {0: {"forward": 1.0, "fire": "laser", "target": 1, "vent": True}}. All other units stand still."""
    shape = arena.state.units.heat.shape
    motion = torch.zeros(*shape, len(MOTION))
    weapon, target = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    is_firing, is_venting = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for unit, order in (orders or {}).items():
        assert set(order) <= {*MOTION, "fire", "target", "vent"}, order
        for index, name in enumerate(MOTION):
            motion[:, unit, index] = order.get(name, 0.0)
        if "fire" in order:
            weapon[:, unit], target[:, unit], is_firing[:, unit] = WEAPON[order["fire"]], order["target"], True
        is_venting[:, unit] = order.get("vent", False)
    return Orders(motion, weapon, is_firing, target, is_venting)


def make_actions(arena: Arena, orders: dict[int, dict[str, Any]] | None = None) -> Actions:
    """Return the actions that lead to such orders: targets are looked up among the contacts of the first battle."""
    actions = no_actions(arena.config)
    battles, units = arena.config.battles, arena.config.units
    for unit, order in (orders or {}).items():
        rows = torch.arange(battles) * units + unit
        for index, name in enumerate(MOTION):
            actions["motion"][rows, index] = order.get(name, 0.0)
        actions["vent"][rows] = int(order.get("vent", False))
        if "fire" in order:
            actions["fire"][rows] = FIRE.index(order["fire"])
            actions["target"][rows] = arena.state.senses.contacts[0, unit].tolist().index(order["target"])
    return actions


def random_actions(arena: Arena, generator: torch.Generator) -> Actions:
    """Draw any actions of the action spec."""
    rows = arena.config.battles * arena.config.units
    motion = torch.rand(rows, len(MOTION), generator=generator) * 2 - 1
    choices = {head.name: torch.randint(head.size, (rows,), generator=generator) for head in arena.action_spec.discrete}
    return {**choices, "motion": motion}


def half_turned(state: State) -> State:
    """The state after half a turn of the world, with the teams in one another's place."""
    world, units, shells, clouds, status, senses = state
    half = units.heat.shape[1] // 2

    def swapped(tensor: Tensor) -> Tensor:
        return tensor.roll(half, 1)

    def flipped(vector: Tensor) -> Tensor:
        return swapped(vector) * vector.new_tensor([-1.0, -1.0, 1.0])

    def other(unit: Tensor) -> Tensor:
        return swapped((unit + half) % (2 * half))

    grids = World(*(part if part.dim() == 1 else part.flip(1, 2) for part in world))
    heading = torch.remainder(units.heading + 2 * math.pi, 2 * math.pi) - math.pi
    moved = type(units)(*(swapped(part) for part in units))._replace(
        position=flipped(units.position),
        velocity=flipped(units.velocity),
        heading=swapped(heading),
        harm=units.harm.roll((half, half), (1, 2)),
    )
    flown = type(shells)(*(swapped(part) for part in shells))._replace(
        position=flipped(shells.position), velocity=flipped(shells.velocity), target=other(shells.target)
    )
    return State(
        world=grids._replace(way=TURNED_WAY[grids.way.long()]),
        units=moved,
        shells=flown,
        clouds=type(clouds)(position=flipped(clouds.position), left=swapped(clouds.left)),
        status=status._replace(score=status.score.flip(1), holder=torch.where(status.holder < 0, status.holder, 1 - status.holder)),
        senses=type(senses)(
            sensed=senses.sensed.roll((half, half), (1, 2)),
            seen=senses.seen.roll((half, half), (1, 2)),
            contacts=other(senses.contacts),
            is_contact=swapped(senses.is_contact),
        ),
    )


def to_double(state: State) -> State:
    """Convert a state to float64, so that rounding does not hide a mistake."""
    return State(*(type(group)(*(_doubled(tensor) for tensor in group)) for group in state))


def tables_in_double(tables: Tables) -> Tables:
    def doubled(table: Any) -> Any:
        columns = {entry.name: _doubled(getattr(table, entry.name)) for entry in dataclasses.fields(table)}
        return dataclasses.replace(table, **columns)

    return Tables(doubled(tables.units), doubled(tables.weapons), doubled(tables.materials))


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def select_battles(state: State, rows: Tensor) -> State:
    """Select battles of a state, in this order."""
    return State(*(type(group)(*(tensor[rows] for tensor in group)) for group in state))


def assert_identical(state: State, expected: State) -> None:
    """Compare all tensors bit for bit."""
    wanted = dict(named_tensors(expected))
    for name, tensor in named_tensors(state):
        assert torch.equal(tensor, wanted[name]), f"{name} differs"
