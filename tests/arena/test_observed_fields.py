"""Every field of an observation has the numbers that its name and meaning say, computed here a second time, one unit at a time.

The state is drawn at random, so that no two fields have the same numbers: the formulas of two fields, or two numbers of one field, cannot
be swapped without a failure here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch

from esper.arena import observe
from esper.arena.arena import Arena
from esper.arena.native import layout as at
from esper.arena.observe import CELL_M, MATERIAL_SIGNALS, VIEW, slices
from esper.arena.routes import STEPS
from esper.arena.specs import CLASSES, PHYSICS, ROLES, WEAPONS, Material
from tests.arena.views import piece, set_status
from tests.arena.worlds import contacts, small_config, unit_field

Fields = dict[str, list[float]]
Expected = list[tuple[str, tuple[int, ...], Fields]]  # table, place in that part of the observation, and fields
BATTLE = 1  # the battle that is looked at
BY_CLASS = {"class", "role", "has_weapon"}  # known from the class alone; two weapons may belong to the same classes
SAME = {"class", "role"}  # every class has a role of its own, in the same order
PARTS = {"OWN": "own", "CONTACT": "contacts", "ALLY": "allies", "TERRAIN": "terrain", "STATE_UNIT": "whole", "STATE_BATTLE": "battle"}
FIELDS = (
    "position", "velocity", "hit_points", "legs", "heat", "stability", "fuel", "fallen", "suppressed", "painted",
    "is_shut_down", "is_venting", "is_grounded", "cooldown",
)  # fmt: skip


@pytest.fixture(scope="module")
def arena() -> Arena:
    """Return battles in which every number and flag of every unit and column is drawn at random. Zone and routes are those of real maps."""
    config = small_config(
        team_size=4, pack=("scout", "light", "medium", "heavy"), size=32, state_view=True, maps=2, battles=2, contacts=3, allies=4
    )
    arena = Arena(config, seed=1)
    simulation = arena.simulation
    generator = torch.Generator().manual_seed(4)

    def draw(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, 2, 8, generator=generator)

    def of_class(name: str) -> torch.Tensor:
        return torch.tensor([getattr(CLASSES[unit], name) for unit in config.unit_classes])

    heading = draw(-3, 3)
    for field, values in {
        at.X: draw(-8, 8),
        at.Y: draw(-8, 8),
        at.Z: draw(0, 3),
        at.VELOCITY_X: draw(-5, 5),
        at.VELOCITY_Y: draw(-5, 5),
        at.VELOCITY_Z: draw(-5, 5),
        at.COS: torch.cos(heading),
        at.SIN: torch.sin(heading),
        at.HIT_POINTS: draw(0.1, 1) * of_class("hit_points") * (draw(0, 1) > 0.1),
        at.LEGS: draw(0.1, 1) * of_class("leg_points"),
        at.HEAT: draw(0.1, 1.2) * of_class("heat_cap"),
        at.STABILITY: draw(10, 90),
        at.FUEL: draw(0.1, 1) * PHYSICS.fuel_s,
    }.items():
        simulation.unit[field] = values
    for field, values in {
        at.FALLEN: draw(-60, 60).clamp_min(0),
        at.SUPPRESSED: draw(0, 24),
        at.PAINTED: draw(-50, 100).clamp_min(0),
        at.IS_SHUT_DOWN: draw(0, 1) > 0.7,
        at.IS_VENTING: draw(0, 1) > 0.5,
        at.IS_GROUNDED: draw(0, 1) > 0.4,
    }.items():
        simulation.number[field] = values.int()
    simulation.state["cooldown"].copy_(draw(0, 40, len(WEAPONS)).int())
    for field, ticks in ((at.HELD, [60, 20]), (at.HELD_2, [160, 50]), (at.HOLDER, [0, 1]), (at.DECISION, [7, 31])):
        set_status(arena, field, ticks)
    set_status(arena, at.MAP, [0, 1])
    worn = torch.rand(2, 32 * 32, generator=generator)
    for field, kinds in ((at.C_FLOOR, 32), (at.C_TOP, 64), (at.C_MATERIAL, len(Material))):
        simulation.maps.column[..., field] = torch.randint(kinds, (2, 32 * 32), generator=generator)
    simulation.state["worn"].copy_(torch.where(worn < 0.2, at.DESTROYED, torch.where(worn < 0.5, 9, 0)))
    return arena


def turned(x: float, y: float, heading: float) -> list[float]:
    """A vector as a unit of this heading sees it: ahead, left."""
    return [x * math.cos(heading) + y * math.sin(heading), -x * math.sin(heading) + y * math.cos(heading)]


@cache
def unit_of(arena: Arena, unit: int) -> dict[str, Any]:
    """Return the state of one unit as plain numbers."""
    return {name: unit_field(arena, name, unit, BATTLE) for name in (*FIELDS, "heading")}


def class_of(arena: Arena, unit: int) -> str:
    return arena.config.unit_classes[unit]


def status(arena: Arena, field: int) -> int:
    return int(arena.simulation.status[field, BATTLE])


def column(arena: Arena, x: float, y: float) -> tuple[int, int]:
    """Return the map of the battle, and the index of the column at a place."""
    size = arena.config.size
    i, j = (min(max(math.floor(value + size / 2), 0), size - 1) for value in (x, y))
    return status(arena, at.MAP), i * size + j


def is_destroyed(arena: Arena, here: tuple[int, int]) -> bool:
    return int(arena.simulation.state["worn"][BATTLE, here[1]]) == at.DESTROYED


def own_fields(arena: Arena, unit: int) -> Fields:
    me, spec, maps = unit_of(arena, unit), CLASSES[class_of(arena, unit)], arena.simulation.maps
    (x, y, z), (velocity_x, velocity_y, velocity_z) = me["position"], me["velocity"]
    half, side, team = arena.config.size / 2, 1 if unit < 4 else -1, unit // 4
    here = column(arena, x, y)
    edge = math.hypot(x, y) - float(maps.zone_radius[here[0]])
    step = [*STEPS, (0, 0)][int(maps.way[here])]
    length = math.hypot(*step) or 1.0
    alive = [[unit_of(arena, 4 * own + each)["hit_points"] > 0 for each in range(4)] for own in (team, 1 - team)]
    score, holder = [status(arena, field) / 20 for field in (at.HELD, at.HELD_2)], status(arena, at.HOLDER)
    floor = 0.0 if is_destroyed(arena, here) else float(maps.column[*here, at.C_FLOOR]) * at.HEIGHT_STEP
    return {
        "class": [float(name == class_of(arena, unit)) for name in CLASSES],
        "role": [float(role == spec.role) for role in ROLES],
        "hit_points": [me["hit_points"] / spec.hit_points],
        "legs": [me["legs"] / spec.leg_points],
        "heat": [me["heat"] / spec.heat_cap],
        "stability": [me["stability"] / PHYSICS.stability],
        "fuel": [me["fuel"] / PHYSICS.fuel_s if spec.jets_mps2 else 0.0],
        "heading": [side * math.cos(me["heading"]), side * math.sin(me["heading"])],
        "position": [side * x / half, side * y / half],
        "height": [z / 10, (z - floor) / 10],
        "velocity": [*(part / 10 for part in turned(velocity_x, velocity_y, me["heading"])), velocity_z / 10],
        "is_grounded": [float(me["is_grounded"])],
        "is_shut_down": [float(me["is_shut_down"])],
        "is_venting": [float(me["is_venting"])],
        "fallen": [me["fallen"] / 60],  # ticks of 1/20 s
        "suppressed": [me["suppressed"] / 24],
        "painted": [me["painted"] / 100],
        "has_weapon": [float(name in spec.weapons) for name in WEAPONS],
        "loading": [ticks / (20 * weapon.cooldown_s) for ticks, weapon in zip(me["cooldown"].values(), WEAPONS.values(), strict=True)],
        "zone": [*(part / half for part in turned(-x, -y, me["heading"])), edge / half, float(edge <= 0)],
        "route": [
            *turned(step[0] / length, step[1] / length, me["heading"]),
            min(float(maps.route_m[here]), 4 * arena.config.size) / arena.config.size,
        ],
        "zone_radius": [float(maps.zone_radius[here[0]]) / 10],
        "zone_holder": [float(holder == team), float(holder == 1 - team)],
        "score": [score[own] / (arena.config.seconds * PHYSICS.win_share) for own in (team, 1 - team)],
        "clock": [1 - status(arena, at.DECISION) / arena.config.decisions],
        "living": [sum(flags) / 4 for flags in alive],
    }


def ally_fields(arena: Arena, unit: int, other: int) -> Fields:
    me, it, spec = unit_of(arena, unit), unit_of(arena, other), CLASSES[class_of(arena, other)]
    line = [theirs - mine for theirs, mine in zip(it["position"], me["position"], strict=True)]
    apart = it["heading"] - me["heading"]
    return {
        "is_there": [1.0],
        "place": [*(part / 20 for part in turned(line[0], line[1], me["heading"])), line[2] / 20],
        "nearness": [1 / (1 + math.hypot(*line) / 5)],
        "class": [float(name == class_of(arena, other)) for name in CLASSES],
        "hit_points": [it["hit_points"] / spec.hit_points],
        "heat": [it["heat"] / spec.heat_cap],
        "heading": [math.cos(apart), math.sin(apart)],
    }


def contact_fields(arena: Arena, unit: int, other: int) -> Fields:
    me, it = unit_of(arena, unit), unit_of(arena, other)
    line_x, line_y = (theirs - mine for theirs, mine in zip(it["position"][:2], me["position"][:2], strict=True))
    ahead, left = turned(line_x, line_y, me["heading"])
    return ally_fields(arena, unit, other) | {
        "is_seen": [float(arena.simulation.number[at.SEEN, BATTLE, unit] >> other % 4 & 1)],
        "bearing": [part / math.hypot(ahead, left) for part in (ahead, left)],
        "velocity": [part / 10 for part in turned(it["velocity"][0], it["velocity"][1], me["heading"])],
        "is_helpless": [float(it["fallen"] > 0 or it["is_shut_down"])],
        "is_painted": [float(it["painted"] > 0)],
    }


def terrain_fields(arena: Arena, unit: int, cell: int) -> Fields:
    me, maps = unit_of(arena, unit), arena.simulation.maps
    ahead, left = ((place - VIEW // 2) * CELL_M for place in divmod(cell, VIEW))
    x, y, z = me["position"]
    cos, sin = math.cos(me["heading"]), math.sin(me["heading"])
    there = column(arena, x + ahead * cos - left * sin, y + ahead * sin + left * cos)
    floor, top = (float(maps.column[*there, field]) * at.HEIGHT_STEP for field in (at.C_FLOOR, at.C_TOP))
    material = Material(int(maps.column[*there, at.C_MATERIAL]))
    if is_destroyed(arena, there):
        floor, top, material = 0.0, 0.0, Material.OPEN
    return {
        "rise": [min(max((floor - z) / 4, -1.0), 1.0)],
        "cover": [min(max((top - z) / 4, 0.0), 1.0)],
        "material": [MATERIAL_SIGNALS[material]],
    }


def state_fields(arena: Arena, unit: int, other: int) -> Fields:
    it, spec, half, side = unit_of(arena, other), CLASSES[class_of(arena, other)], arena.config.size / 2, 1 if unit < 4 else -1
    x, y, z = it["position"]
    return {
        "is_alive": [float(it["hit_points"] > 0)],
        "position": [side * x / half, side * y / half, z / 10],
        "hit_points": [it["hit_points"] / spec.hit_points],
        "heat": [it["heat"] / spec.heat_cap],
        "is_helpless": [float(it["fallen"] > 0 or it["is_shut_down"])],
    }


def allies_of(arena: Arena, unit: int) -> list[int]:
    """The living allies of a unit, nearest first."""
    team = range(unit // 4 * 4, unit // 4 * 4 + 4)
    others = [other for other in team if other != unit and unit_of(arena, other)["hit_points"] > 0]
    return sorted(others, key=lambda other: math.dist(unit_of(arena, other)["position"], unit_of(arena, unit)["position"]))


def living(arena: Arena) -> list[int]:
    return [unit for unit in range(8) if unit_of(arena, unit)["hit_points"] > 0]


def expected(arena: Arena) -> Iterator[tuple[str, tuple[int, ...], Fields]]:
    """Yield table, place in that part of the observation and fields of everything that the units observe."""
    for unit in living(arena):
        yield "OWN", (unit, 0), own_fields(arena, unit)
        for slot, other in enumerate(contacts(arena, unit, BATTLE)):
            yield "CONTACT", (unit, slot), contact_fields(arena, unit, other)
        for slot, other in enumerate(allies_of(arena, unit)):
            yield "ALLY", (unit, slot), ally_fields(arena, unit, other)
        for cell in range(unit, VIEW * VIEW, 13):
            yield "TERRAIN", (unit, cell), terrain_fields(arena, unit, cell)
    for unit in range(8):
        for slot in range(8):  # own team first
            yield "STATE_UNIT", (unit, slot), state_fields(arena, unit, (slot + unit // 4 * 4) % 8)
        own = own_fields(arena, unit)
        yield "STATE_BATTLE", (unit, 0), {name: own[name] for name in ("zone_radius", "zone_holder", "score", "clock")}


@pytest.fixture(scope="module")
def wanted(arena: Arena) -> Expected:
    return list(expected(arena))


@pytest.mark.parametrize("table", PARTS)
def test_every_field_has_the_numbers_that_it_is_named_for(arena: Arena, wanted: Expected, table: str) -> None:
    layout, numbers = getattr(observe, table), piece(arena, PARTS[table])[BATTLE]
    for place, fields in ((place, fields) for own, place, fields in wanted if own == table):
        assert fields.keys() == {field.name for field in layout}
        for name, values in fields.items():
            assert numbers[place][slices(layout)[name]].tolist() == pytest.approx(values, abs=1e-5), (place, name)


@pytest.mark.parametrize("table", ["CONTACT", "ALLY"])
def test_slots_without_a_unit_are_zeros(arena: Arena, wanted: Expected, table: str) -> None:
    is_filled = piece(arena, PARTS[table])[BATTLE].any(-1)
    assert {tuple(place) for place in torch.nonzero(is_filled).tolist()} == {place for own, place, _ in wanted if own == table}
    assert not is_filled.all()


@pytest.mark.parametrize("table", PARTS)
def test_no_two_numbers_are_the_same_everywhere_so_that_a_swapped_pair_is_noticed(wanted: Expected, table: str) -> None:
    """Otherwise the test above would pass although two formulas, or two numbers of one, are swapped."""
    found = [fields for own, _, fields in wanted if own == table]
    for first, second in combinations(found[0], 2):
        assert [fields[first] for fields in found] != [fields[second] for fields in found] or {first, second} == SAME, (first, second)
    for name in found[0].keys() - BY_CLASS:
        numbers = list(zip(*(fields[name] for fields in found), strict=True))
        assert len(set(numbers)) == len(numbers), name


def test_the_drawn_state_has_dead_units_destroyed_columns_and_enemies_in_and_out_of_sight(arena: Arena, wanted: Expected) -> None:
    assert 0 < len(living(arena)) < 8
    open_cells = [fields for own, _, fields in wanted if own == "TERRAIN" and fields["material"] == [0.0]]
    assert {fields["cover"] == [0.0] for fields in open_cells} == {True, False}
    assert {fields["is_seen"][0] for own, _, fields in wanted if own == "CONTACT"} == {0.0, 1.0}
