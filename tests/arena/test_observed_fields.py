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
from esper.arena.observe import CELL_M, MATERIAL_SIGNALS, VIEW, parts, slices, width
from esper.arena.routes import STEPS
from esper.arena.specs import CLASSES, PHYSICS, ROLES, WEAPONS, Material
from tests.arena.views import look
from tests.arena.worlds import small_config

Fields = dict[str, list[float]]
BATTLE = 1  # the battle that is looked at
BY_CLASS = {"class", "role", "has_weapon"}  # known from the class alone; two weapons may belong to the same classes
SAME = {"class", "role"}  # every class has a role of its own, in the same order
TABLES = ("OWN", "CONTACT", "ALLY", "TERRAIN", "STATE_UNIT")


@pytest.fixture(scope="module")
def arena() -> Arena:
    """A battle on real ground in which every number and flag of every unit is drawn at random."""
    config = small_config(
        team_size=4, pack=("scout", "light", "medium", "heavy"), size=32, state_view=True, maps=2, battles=2, contacts=3, allies=4
    )
    arena = Arena(config, seed=1)
    generator = torch.Generator().manual_seed(4)

    def draw(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(2, 8, *shape, generator=generator)

    table, units = arena.tables.units, arena.state.units
    units = units._replace(
        position=torch.cat((draw(-8, 8, 2), draw(0, 3, 1)), -1),
        velocity=draw(-5, 5, 3),
        heading=draw(-3, 3),
        hit_points=draw(0.1, 1) * table.hit_points * (draw(0, 1) > 0.1),
        legs=draw(0.1, 1) * table.legs,
        heat=draw(0.1, 1.2) * table.heat_cap,
        stability=draw(10, 90),
        fuel=draw(0.1, 1) * PHYSICS.fuel_s,
        fallen=(draw(-20, 60).clamp_min(0)).int(),
        suppressed=(draw(0, 24)).int(),
        painted=(draw(-50, 100).clamp_min(0)).int(),
        cooldown=draw(0, 40, len(WEAPONS)).int(),
        is_shut_down=draw(0, 1) > 0.7,
        is_venting=draw(0, 1) > 0.5,
        is_grounded=draw(0, 1) > 0.4,
    )
    status = arena.state.status._replace(
        score=torch.tensor([[3.0, 8.0], [1.0, 2.5]]), holder=torch.tensor([0, 1]), decision=torch.tensor([7, 31])
    )
    floor = 2 * torch.rand(arena.state.world.floor.shape, generator=generator)
    arena.state = arena.state._replace(units=units, status=status, world=arena.state.world._replace(floor=floor))
    look(arena)
    return arena


def turned(x: float, y: float, heading: float) -> list[float]:
    """A vector as a unit of this heading sees it: ahead, left."""
    return [x * math.cos(heading) + y * math.sin(heading), -x * math.sin(heading) + y * math.cos(heading)]


@cache
def unit_of(arena: Arena, unit: int) -> dict[str, Any]:
    """The state of one unit as plain numbers."""
    return {name: tensor[BATTLE, unit].tolist() for name, tensor in zip(arena.state.units._fields, arena.state.units, strict=True)}


def class_of(arena: Arena, unit: int) -> str:
    return arena.config.unit_classes[unit]


def column(arena: Arena, x: float, y: float) -> tuple[int, int, int]:
    size = arena.config.size
    return BATTLE, *(min(max(math.floor(value + size / 2), 0), size - 1) for value in (x, y))


def own_fields(arena: Arena, unit: int) -> Fields:
    me, spec, world, status = unit_of(arena, unit), CLASSES[class_of(arena, unit)], arena.state.world, arena.state.status
    (x, y, z), (velocity_x, velocity_y, velocity_z) = me["position"], me["velocity"]
    half, side, team = arena.config.size / 2, 1 if unit < 4 else -1, unit // 4
    here = column(arena, x, y)
    edge = math.hypot(x, y) - float(world.zone_radius[BATTLE])
    step = [*STEPS, (0, 0)][int(world.way[here])]
    length = math.hypot(*step) or 1.0
    alive = [[unit_of(arena, 4 * own + each)["hit_points"] > 0 for each in range(4)] for own in (team, 1 - team)]
    score, holder = status.score[BATTLE].tolist(), int(status.holder[BATTLE])
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
        "height": [z / 10, (z - float(world.floor[here])) / 10],
        "velocity": [*(part / 10 for part in turned(velocity_x, velocity_y, me["heading"])), velocity_z / 10],
        "is_grounded": [float(me["is_grounded"])],
        "is_shut_down": [float(me["is_shut_down"])],
        "is_venting": [float(me["is_venting"])],
        "fallen": [me["fallen"] / 60],  # ticks of 1/20 s
        "suppressed": [me["suppressed"] / 24],
        "painted": [me["painted"] / 100],
        "has_weapon": [float(name in spec.weapons) for name in WEAPONS],
        "loading": [ticks / (20 * weapon.cooldown_s) for ticks, weapon in zip(me["cooldown"], WEAPONS.values(), strict=True)],
        "zone": [*(part / half for part in turned(-x, -y, me["heading"])), edge / half, float(edge <= 0)],
        "route": [
            *turned(step[0] / length, step[1] / length, me["heading"]),
            min(float(world.route_m[here]), 4 * arena.config.size) / arena.config.size,
        ],
        "zone_radius": [float(world.zone_radius[BATTLE]) / 10],
        "zone_holder": [float(holder == team), float(holder == 1 - team)],
        "score": [score[own] / (arena.config.seconds * PHYSICS.win_share) for own in (team, 1 - team)],
        "clock": [1 - int(status.decision[BATTLE]) / arena.config.decisions],
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
    ahead, left = turned(*(theirs - mine for theirs, mine in zip(it["position"][:2], me["position"][:2], strict=True)), me["heading"])
    return ally_fields(arena, unit, other) | {
        "is_seen": [float(arena.state.senses.seen[BATTLE, unit, other])],
        "bearing": [part / math.hypot(ahead, left) for part in (ahead, left)],
        "velocity": [part / 10 for part in turned(*it["velocity"][:2], me["heading"])],
        "is_helpless": [float(it["fallen"] > 0 or it["is_shut_down"])],
        "is_painted": [float(it["painted"] > 0)],
    }


def terrain_fields(arena: Arena, unit: int, cell: int) -> Fields:
    me, world = unit_of(arena, unit), arena.state.world
    ahead, left = ((place - VIEW // 2) * CELL_M for place in divmod(cell, VIEW))
    x, y, z = me["position"]
    cos, sin = math.cos(me["heading"]), math.sin(me["heading"])
    there = column(arena, x + ahead * cos - left * sin, y + ahead * sin + left * cos)
    return {
        "rise": [min(max((float(world.floor[there]) - z) / 4, -1.0), 1.0)],
        "cover": [min(max((float(world.tops[there]) - z) / 4, 0.0), 1.0)],
        "material": [MATERIAL_SIGNALS[Material(int(world.material[there]))]],
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


def expected(arena: Arena) -> Iterator[tuple[str, tuple[int, ...], Fields]]:
    """Yield table, place in that part of the observation and fields of everything that the units observe."""
    senses = arena.state.senses
    for unit in range(8):
        yield "OWN", (unit, 0), own_fields(arena, unit)
        for slot, other in enumerate(senses.contacts[BATTLE, unit, senses.is_contact[BATTLE, unit]].tolist()):
            yield "CONTACT", (unit, slot), contact_fields(arena, unit, other)
        for slot, other in enumerate(allies_of(arena, unit)):
            yield "ALLY", (unit, slot), ally_fields(arena, unit, other)
        for cell in range(unit, VIEW * VIEW, 13):
            yield "TERRAIN", (unit, cell), terrain_fields(arena, unit, cell)
        for slot in range(8):  # own team first
            yield "STATE_UNIT", (unit, slot), state_fields(arena, unit, (slot + unit // 4 * 4) % 8)


def differences(arena: Arena, wanted: list[tuple[str, tuple[int, ...], Fields]]) -> set[tuple[str, str]]:
    """Return table and name of all fields whose numbers are not those that they should be."""
    result, found = look(arena), {}
    pieces = result.observation[BATTLE].split([part.width for part in parts(arena.config)], -1)
    for part, piece in zip(parts(arena.config), pieces, strict=True):
        found[part.fields] = piece.unflatten(-1, (part.times, width(part.fields)))
    assert result.whole is not None
    found[observe.STATE_UNIT] = result.whole[BATTLE].unflatten(-1, (8, width(observe.STATE_UNIT)))
    differing = set()
    for table, place, fields in wanted:
        layout = getattr(observe, table)
        assert fields.keys() == {field.name for field in layout}
        numbers = found[layout][place]
        for name, values in fields.items():
            if any(abs(one - other) > 1e-5 for one, other in zip(numbers[slices(layout)[name]].tolist(), values, strict=True)):
                differing.add((table, name))
    return differing


@pytest.fixture(scope="module")
def wanted(arena: Arena) -> list[tuple[str, tuple[int, ...], Fields]]:
    return list(expected(arena))


def test_every_field_has_the_numbers_that_it_is_named_for(arena: Arena, wanted: list[Any]) -> None:
    assert {table for table, _, _ in wanted} == set(TABLES)
    assert differences(arena, wanted) == set()


@pytest.mark.parametrize("table", TABLES)
def test_no_two_numbers_are_the_same_everywhere_so_that_a_swapped_pair_is_noticed(wanted: list[Any], table: str) -> None:
    """Otherwise the test above would pass although two formulas, or two numbers of one, are swapped."""
    found = [fields for own, _, fields in wanted if own == table]
    for first, second in combinations(found[0], 2):
        assert [fields[first] for fields in found] != [fields[second] for fields in found] or {first, second} == SAME, (first, second)
    for name in found[0].keys() - BY_CLASS:
        numbers = list(zip(*(fields[name] for fields in found), strict=True))
        assert len(set(numbers)) == len(numbers), name


def test_a_field_of_another_width_than_its_numbers_is_refused(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "OWN", (observe.OWN[0]._replace(width=3), *observe.OWN[1:]))
    with pytest.raises(AssertionError, match="class has 4 numbers; its width is 3"):
        look(arena)
