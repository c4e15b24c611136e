"""Flat arenas with units and terrain placed by the test."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import msgspec
import torch
from torch import Tensor

from esper.arena.arena import Arena, StepResult, no_actions
from esper.arena.config import ArenaConfig
from esper.arena.native import layout as at
from esper.arena.native.simulation import DECIDE_ONLY, LOOK, Saved, state_hash
from esper.arena.orders import FIRE, MOTION
from esper.arena.routes import find_ways
from esper.arena.scenarios import Scenario, find_scenario
from esper.arena.specs import WEAPONS, Material
from esper.arena.start import Grids
from esper.vecenv import Actions

WEAPON = {name: index for index, name in enumerate(WEAPONS)}
ZONE_M = 4.0  # radius of the zone of flat arenas
# Fields of a unit by name: rows of `Battles.unit`, and of `Battles.number`.
FIGURES = {
    "hit_points": at.HIT_POINTS, "legs": at.LEGS, "heat": at.HEAT, "stability": at.STABILITY, "fuel": at.FUEL,
}  # fmt: skip
NUMBERS = {
    "fallen": at.FALLEN, "suppressed": at.SUPPRESSED, "painted": at.PAINTED, "is_shut_down": at.IS_SHUT_DOWN,
    "is_venting": at.IS_VENTING, "is_grounded": at.IS_GROUNDED, "present": at.IS_PRESENT,
}  # fmt: skip
VECTORS = {"position": at.X, "velocity": at.VELOCITY_X}  # first of three rows


def small_config(**settings: Any) -> ArenaConfig:
    return ArenaConfig(**{"battles": 1, "team_size": 1, "size": 24, "maps": 1, "pack": ("medium",), "contacts": 2, "allies": 1, **settings})


def scenario_with_few_maps(name: str) -> Scenario:
    """Return a scenario with 2 training maps instead of 1,024, which take seconds to make."""
    scenario = find_scenario(name)
    return dataclasses.replace(scenario, arena=msgspec.structs.replace(scenario.arena, maps=2))


def flat_arena(*pack: str, seed: int = 0, **settings: Any) -> Arena:
    """Open ground without a step. Each team has the units of `pack`, and they stand in their corners."""
    pack = pack or ("medium",)
    config = small_config(**{"pack": pack, "team_size": len(pack), **settings})
    return Arena(config, seed=seed, grids=Grids(*(grid.expand(config.maps, *grid.shape[1:]).clone() for grid in _flat(config.size))))


@functools.cache
def _flat(size: int) -> Grids:
    height, material, radius = torch.zeros(1, size, size), torch.zeros(1, size, size, dtype=torch.int8), torch.tensor([ZONE_M])
    return Grids(height, material, radius, *find_ways(height, material, radius))


def build(arena: Arena, x: tuple[int, int], y: tuple[int, int], material: Material, *, height: float = 0.0) -> None:
    """Columns from the first to the second coordinate, on all maps. The routes stay as they are."""
    half = arena.config.size // 2
    here = (slice(None), slice(x[0] + half, x[1] + half), slice(y[0] + half, y[1] + half))
    arena.grids.height[here], arena.grids.material[here] = height, int(material)
    arena.simulation.set_maps(arena.grids)


def floor_at(arena: Arena, x: float, y: float) -> float:
    """Return the height of the floor on the first map."""
    size = arena.config.size
    return float(floors_of_maps(arena)[0, (math.floor(x) + size // 2) * size + math.floor(y) + size // 2])


def floors_of_maps(arena: Arena) -> Tensor:
    """Return the heights that carry units [M, S·S], with nothing destroyed."""
    floors: Tensor = arena.simulation.maps.column[..., at.C_FLOOR] * at.HEIGHT_STEP
    return floors


def place(arena: Arena, unit: int, x: float, y: float, z: float = 0.0, *, heading: float = 0.0) -> None:
    """In all battles, and at rest. It stands where there is a floor at `z`, else it hangs in the air."""
    put(arena, unit, position=[x, y, z], velocity=[0.0, 0.0, 0.0], heading=heading, is_grounded=floor_at(arena, x, y) >= z)


def put(arena: Arena, unit: int, **values: Any) -> None:
    """Fields of one unit, in all battles: put(arena, 0, heat=50.0, position=[1.0, 2.0, 0.0], cooldown={"laser": 3})."""
    simulation = arena.simulation
    for name, value in values.items():
        if name in VECTORS:
            for axis in range(3):
                simulation.unit[VECTORS[name] + axis, :, unit] = value[axis]
        elif name == "heading":
            simulation.unit[at.COS, :, unit], simulation.unit[at.SIN, :, unit] = math.cos(value), math.sin(value)
        elif name == "cooldown":
            for weapon, ticks in value.items():
                simulation.state["cooldown"][WEAPON[weapon], :, unit] = ticks
        elif name in FIGURES:
            simulation.unit[FIGURES[name], :, unit] = value
        else:
            simulation.number[NUMBERS[name], :, unit] = int(value)


def put_shell(
    arena: Arena, unit: int, weapon: str, position: list[float], velocity: list[float], *, target: int = -1, life: int = 40, slot: int = 0
) -> None:  # fmt: skip
    """A projectile of a unit in the air, in all battles."""
    shell, count = arena.simulation.state["shell"], arena.simulation.state["shell_count"]
    for axis in range(3):
        shell[at.SHELL_X + axis, :, unit, slot], shell[at.SHELL_VX + axis, :, unit, slot] = position[axis], velocity[axis]
    for field, value in ((at.SHELL_WEAPON, WEAPON[weapon]), (at.SHELL_TARGET, target), (at.SHELL_LIFE, life)):
        count[field, :, unit, slot] = value


def put_cloud(arena: Arena, unit: int, position: list[float], *, left: int = 40, slot: int = 0) -> None:
    """A cloud of smoke, in all battles."""
    for axis in range(3):
        arena.simulation.state["cloud"][axis, :, unit, slot] = position[axis]
    arena.simulation.state["cloud_left"][:, unit, slot] = left


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


def unit_field(arena: Arena, name: str, unit: int, battle: int = 0) -> Any:
    """Return a field of a unit: a number, a list of them, or the heading as an angle."""
    simulation = arena.simulation
    if name in VECTORS:
        return simulation.unit[VECTORS[name] : VECTORS[name] + 3, battle, unit].tolist()
    if name == "heading":
        return math.atan2(float(simulation.unit[at.SIN, battle, unit]), float(simulation.unit[at.COS, battle, unit]))
    if name == "cooldown":
        return dict(zip(WEAPONS, simulation.state["cooldown"][:, battle, unit].tolist(), strict=True))
    if name in FIGURES:
        return float(simulation.unit[FIGURES[name], battle, unit])
    return int(simulation.number[NUMBERS[name], battle, unit])


def score(arena: Arena, battle: int = 0) -> list[int]:
    """Return the ticks that each team has held the zone."""
    found: list[int] = arena.simulation.status[at.HELD : at.HELD_2 + 1, battle].tolist()
    return found


def contacts(arena: Arena, unit: int, battle: int = 0) -> list[int]:
    """Return the contacts of a unit, nearest first, as it senses them now."""
    arena.simulation.run(LOOK)
    return [other for other in arena.simulation.state["contact"][:, battle, unit].tolist() if other >= 0]


def make_actions(arena: Arena, orders: dict[int, dict[str, Any]] | None = None) -> Actions:
    """Return actions by unit: {0: {"forward": 1.0, "fire": "laser", "target": 1, "vent": True}}. All other units stand still.

    Targets are units. They are looked up among the contacts of the first battle, as it is now.
    """
    actions = no_actions(arena.config)
    battles, units = arena.config.battles, arena.config.units
    for unit, order in (orders or {}).items():
        assert set(order) <= {*MOTION, "fire", "target", "vent"}, order
        rows = torch.arange(battles) * units + unit
        for index, name in enumerate(MOTION):
            actions["motion"][rows, index] = order.get(name, 0.0)
        actions["vent"][rows] = int(order.get("vent", False))
        if "fire" in order:
            actions["fire"][rows] = FIRE.index(order["fire"])
            actions["target"][rows] = contacts(arena, unit).index(order["target"])
    return actions


def decide(arena: Arena, orders: dict[int, dict[str, Any]] | None = None) -> StepResult:
    """Run one decision."""
    return arena.step(make_actions(arena, orders))


def tick(arena: Arena, orders: dict[int, dict[str, Any]] | None = None, times: int = 1) -> StepResult:
    """Run a decision of so many ticks. A battle that ends is kept as it is."""
    whole = arena.simulation.rules["ticks"].copy()
    arena._order(make_actions(arena, orders))
    arena.simulation.rules["ticks"] = times
    arena.simulation.run(DECIDE_ONLY)
    arena.simulation.rules["ticks"] = whole
    return arena._result()


def random_actions(arena: Arena, generator: torch.Generator) -> Actions:
    """Draw any actions of the action spec."""
    rows = arena.config.battles * arena.config.units
    motion = torch.rand(rows, len(MOTION), generator=generator) * 2 - 1
    choices = {head.name: torch.randint(head.size, (rows,), generator=generator) for head in arena.action_spec.discrete}
    return {**choices, "motion": motion}


def saved(arena: Arena) -> Saved:
    """Return copies of the states of all battles [B, ...]."""
    return arena.simulation.saved(range(arena.config.battles))


def assert_identical(state: Saved, expected: Saved) -> None:
    """Compare all tensors bit for bit."""
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), f"{name} differs"


def select_battles(state: Saved, rows: Tensor) -> Saved:
    """Select battles of a state, in this order."""
    return {name: tensor[rows] for name, tensor in state.items()}


def hash_of(arena: Arena, battle: int = 0) -> str:
    """Return the hash of the state of a battle."""
    return state_hash(arena.simulation.saved([battle]), 0)


def has_fired(arena: Arena, unit: int, battle: int = 0) -> bool:
    """Return whether a unit fired in the last decision."""
    return bool(arena.simulation.number[at.FIRED_ONCE, battle, unit])


def damage_by(arena: Arena, attacker: int, battle: int = 0) -> list[float]:
    """Return the damage that a unit did to every unit in the last decision, as shares of their full hit points."""
    found: list[float] = arena.simulation.state["taken"][attacker, battle].tolist()
    return found
