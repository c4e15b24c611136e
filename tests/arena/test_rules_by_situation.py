"""Situations on open ground whose outcome the rule book states. The expected numbers are copied from the book, not from its tables."""

from __future__ import annotations

import math
from typing import Any

import pytest

from esper.arena.arena import Arena
from esper.arena.native import layout as at
from esper.arena.native.simulation import LOOK
from esper.arena.specs import Material
from tests.arena.worlds import (
    build,
    contacts,
    decide,
    flat_arena,
    has_fired,
    make_actions,
    make_duel,
    place,
    put,
    put_shell,
    score,
    tick,
    unit_field,
)

SIZE = 64
pytestmark = pytest.mark.slow


def pair(name: str, metres: float, *, bearing: float = 0.0, facing: float = 180.0, z: float = 0.0, **settings: Any) -> Arena:
    """Unit 0 looks along x from the west; unit 1 is so far away at a bearing in degrees, and looks so many degrees off the line of fire."""
    arena = flat_arena(name, size=SIZE, **settings)
    aim(arena, metres, bearing=bearing, facing=facing, z=z)
    return arena


def aim(arena: Arena, metres: float, *, bearing: float = 0.0, facing: float = 180.0, z: float = 0.0) -> None:
    angle = math.radians(bearing)
    place(arena, 0, -31.0, 0.5)
    place(arena, 1, -31.0 + metres * math.cos(angle), 0.5 + metres * math.sin(angle), z, heading=angle + math.radians(facing))


def fires(arena: Arena, name: str) -> bool:
    """Run a tick in which unit 0, cool and with a loaded weapon, should fire at unit 1."""
    put(arena, 0, heat=0.0, cooldown={name: 0})
    tick(arena, {0: {"fire": name, "target": 1}})
    return has_fired(arena, 0)


def lost(arena: Arena, unit: int, name: str, full: float) -> float:
    return full - float(unit_field(arena, name, unit))


def sees(arena: Arena, unit: int) -> bool:
    """Return whether a unit of the first team sees an enemy."""
    arena.simulation.run(LOOK)
    return bool(arena.simulation.number[at.SEEN, 0, unit])


# Weapons


@pytest.mark.parametrize(
    ("name", "owner", "metres", "arc", "cooldown_s", "heat", "cooling"),
    [
        ("laser", "medium", 8, 120, 0.6, 22, 11),
        ("flamer", "light", 4.5, 90, 0.15, 10, 12),
        ("missile", "medium", 12, 180, 3, 45, 11),
        ("gauss", "heavy", 20, 60, 4, 15, 10),
        ("autocannon", "medium", 12, 90, 0.2, 6, 11),
        ("painter", "scout", 10, 60, 1, 5, 13),
        ("smoke", "scout", 20, 180, 5, 10, 13),
    ],
)
def test_range_arc_cooldown_and_heat(
    name: str, owner: str, metres: float, arc: float, cooldown_s: float, heat: float, cooling: float
) -> None:  # fmt: skip
    arena = pair(owner, metres - 0.05)
    assert fires(arena, name)
    assert unit_field(arena, "heat", 0) == pytest.approx(heat - cooling * 0.05, abs=1e-3)
    assert unit_field(arena, "cooldown", 0)[name] == round(cooldown_s / 0.05)
    aim(arena, metres + 0.05)
    assert not fires(arena, name)
    for side in (1, -1):
        for beyond, expected in ((-1, True), (1, False)):
            put(arena, 1, hit_points=60.0)
            aim(arena, metres * 0.8, bearing=side * (arc / 2 + beyond))
            assert fires(arena, name) == expected, f"{beyond:+}° of the arc's edge"


def test_an_arc_is_horizontal_and_a_range_is_not() -> None:
    assert fires(pair("medium", 1.0, z=6.0), "laser"), "6 m above it, and 1 m ahead"
    assert fires(pair("heavy", 1.0, z=12.0), "gauss")
    assert not fires(pair("heavy", 1.0, bearing=31, z=12.0), "gauss")
    assert not fires(pair("medium", 1.0, z=8.1), "laser")


@pytest.mark.parametrize(
    ("name", "owner", "damage", "legs", "heat", "points"),
    [
        ("laser", "medium", 14, 0, 6, (150, 75)),
        ("flamer", "light", 4, 2, 15, (80, 40)),
        ("missile", "medium", 40, 0, 0, (150, 75)),
        ("gauss", "heavy", 50, 12.5, 0, (200, 100)),
        ("autocannon", "medium", 8, 2, 0, (150, 75)),
    ],
)
@pytest.mark.parametrize(("off_the_nose", "factor"), [(119, 1), (121, 1.5), (180, 1.5)])
def test_direct_hits(
    name: str, owner: str, damage: float, legs: float, heat: float, points: tuple[float, float], off_the_nose: float, factor: float
) -> None:
    arena = pair(owner, 4.0, facing=180.0 - off_the_nose)
    assert fires(arena, name)
    warmth = unit_field(arena, "heat", 1)
    tick(arena, times=10)
    assert lost(arena, 1, "hit_points", points[0]) == pytest.approx(factor * damage, abs=1e-3)
    assert lost(arena, 1, "legs", points[1]) == pytest.approx(factor * legs, abs=1e-3)
    assert warmth == pytest.approx(max(heat - 12 * 0.05, 0), abs=0.06)


def test_a_weapon_that_hits_at_once_strikes_through_a_wall_that_has_come_between_since_the_decision() -> None:
    arena = pair("medium", 6.0)
    actions = make_actions(arena, {0: {"fire": "laser", "target": 1}})
    build(arena, (-29, -28), (-4, 4), Material.REINFORCED, height=6.0)
    arena.step(actions)
    assert lost(arena, 1, "hit_points", 150.0) == 14
    decide(arena, {0: {"fire": "laser", "target": 1}})
    assert not has_fired(arena, 0), "it is sensed by radar, and no longer seen"


@pytest.mark.parametrize(
    ("name", "owner", "metres"),
    [("missile", "medium", 62.4), ("gauss", "heavy", 24), ("autocannon", "medium", 15), ("smoke", "scout", 24.75)],
)
def test_how_far_a_projectile_flies_that_hits_nothing(name: str, owner: str, metres: float) -> None:
    arena = pair(owner, 11.5)
    tick(arena, {0: {"fire": name, "target": 1}})
    put(arena, 1, hit_points=0.0)  # the dead stop no projectile, and a homing one flies straight on
    shell, count = arena.simulation.state["shell"], arena.simulation.state["shell_count"]
    while int(count[at.SHELL_LIFE, 0, 0, 0]) > 0:
        tick(arena)
    assert float(shell[at.SHELL_X, 0, 0, 0]) + 31.0 == pytest.approx(metres, abs=0.05)
    assert int(arena.simulation.number[at.BURSTS, 0, 0]) == 0


def test_the_projectiles_of_a_dead_unit_fly_on() -> None:
    arena = pair("medium", 8.0)
    tick(arena, {0: {"fire": "missile", "target": 1}})
    put(arena, 0, hit_points=0.0)
    tick(arena, times=20)
    assert lost(arena, 1, "hit_points", 150.0) == 40


@pytest.mark.parametrize("wall", [False, True])
def test_splash_takes_hit_points_legs_and_stability_alike_and_passes_walls_without_wear(wall: bool) -> None:
    arena = flat_arena("medium", "medium", size=SIZE)
    for unit, x, y in ((0, -20.0, 0.5), (1, -28.0, -28.0), (2, -12.7, 0.5), (3, -10.5, 0.5)):
        place(arena, unit, x, y, heading=math.pi if unit > 1 else 0.0)
    if wall:
        build(arena, (-12, -11), (-10, 10), Material.SOLID, height=6.0)
    tick(arena, {0: {"fire": "missile", "target": 2}})
    shaken = 100.0
    for _ in range(14):
        tick(arena)
        shaken = min(shaken, unit_field(arena, "stability", 3))
    assert lost(arena, 2, "hit_points", 150.0) == 40, "a direct hit alone"
    share = lost(arena, 3, "hit_points", 150.0) / 40
    assert 0 < share < 0.5
    assert lost(arena, 3, "legs", 75.0) == pytest.approx(40 * share, abs=1e-3)
    assert 100 - shaken == pytest.approx(max(15 * share - 1, 0), abs=1e-3), "1 is regained in the same tick"
    assert not arena.simulation.state["worn"].any()


# Ground and sight


@pytest.mark.parametrize(("height", "legs"), [(1.7, 0.0), (5.0, 19.0)])
def test_a_drop_damages_legs(height: float, legs: float) -> None:
    arena = make_duel("medium", metres=20.0)
    put(arena, 0, position=[-10.0, 0.0, height], is_grounded=False)
    tick(arena, times=40)
    assert lost(arena, 0, "legs", 75.0) == pytest.approx(legs, abs=0.5)
    assert unit_field(arena, "hit_points", 0) == 150


def test_only_a_projectile_that_hits_the_ground_under_foliage_wears_it() -> None:
    arena = make_duel("medium", metres=8.0, y=0.5)
    build(arena, (-1, 1), (-4, 4), Material.FOLIAGE, height=3.0)
    decide(arena, {0: {"fire": "autocannon", "target": 1}})
    for _ in range(3):
        decide(arena)
    assert lost(arena, 1, "hit_points", 150.0) > 0
    assert not arena.simulation.state["worn"].any()
    put_shell(arena, 0, "autocannon", [0.3, 0.5, 0.5], [0.0, 0.0, -25.0])
    decide(arena)
    assert sorted(arena.simulation.state["worn"].unique().tolist()) == [0, 8]


@pytest.mark.parametrize(("height", "is_seen"), [(3.0, False), (1.5, True)])
def test_foliage_higher_than_the_eyes_blinds_from_within_at_one_metre(height: float, is_seen: bool) -> None:
    arena = make_duel("medium", metres=1.0, y=0.5)
    build(arena, (-1, 0), (0, 1), Material.FOLIAGE, height=height)
    assert sees(arena, 0) == is_seen


@pytest.mark.parametrize(("material", "height", "is_seen"), [("SOLID", 3.0, False), ("SOLID", 1.5, True), ("GLASS", 3.0, True)])
def test_walls_hide_up_to_their_top_and_glass_hides_nothing(material: str, height: float, is_seen: bool) -> None:
    arena = make_duel("medium", metres=6.0, y=0.5)
    build(arena, (-1, 1), (-6, 6), Material[material], height=height)
    assert sees(arena, 0) == is_seen
    assert contacts(arena, 0) == [1], "radar passes everything"


@pytest.mark.parametrize(("material", "heat", "points"), [("LAVA", 40.0, 5.0), ("WATER", -30.0, 0.0)])
def test_lava_and_water(material: str, heat: float, points: float) -> None:
    arena = make_duel("medium", metres=6.0)
    build(arena, (-12, 12), (-12, 12), Material[material])
    put(arena, 0, heat=50.0)
    decide(arena)
    assert unit_field(arena, "heat", 0) == pytest.approx(50 + (heat - 11) / 4, abs=1e-3)
    assert lost(arena, 0, "hit_points", 150.0) == pytest.approx(points / 4, abs=1e-3)
    assert lost(arena, 0, "legs", 75.0) == pytest.approx(points / 4, abs=1e-3)


# Units


@pytest.mark.parametrize(
    ("order", "values", "speed"),
    [
        ({"forward": 1.0}, {}, 5.5),
        ({"forward": -1.0}, {}, 3.3),
        ({"strafe": 1.0}, {}, 3.3),
        ({"forward": 1.0, "strafe": 1.0}, {}, 5.5),
        ({"forward": 1.0}, {"legs": 0.0}, 2.2),
        ({"forward": 1.0}, {"suppressed": 24}, 3.85),
        ({"forward": 1.0, "vent": True}, {"heat": 90.0}, 2.75),
    ],
)
def test_top_speeds_of_a_medium_unit(order: dict[str, Any], values: dict[str, Any], speed: float) -> None:
    arena = make_duel("medium", metres=20.0, size=SIZE)
    for _ in range(6):
        put(arena, 0, **values)
        decide(arena, {0: order})
    assert math.hypot(*unit_field(arena, "velocity", 0)) == pytest.approx(speed, abs=0.02)


def test_a_unit_lies_for_three_seconds_with_full_stability() -> None:
    arena = pair("heavy", 6.0)
    put(arena, 1, stability=55.0)
    tick(arena, {0: {"fire": "gauss", "target": 1}})
    while not unit_field(arena, "fallen", 1):
        tick(arena)
    assert (unit_field(arena, "fallen", 1), unit_field(arena, "stability", 1)) == (60, 100.0)
    put(arena, 0, cooldown={"gauss": 0})
    tick(arena, {0: {"fire": "gauss", "target": 1}})
    tick(arena, times=6)
    assert lost(arena, 1, "hit_points", 200.0) == 100, "hit again"
    assert (unit_field(arena, "fallen", 1), unit_field(arena, "stability", 1)) == (60 - 7, 100.0)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({0: (0.0, 0.0)}, [20, 0]),
        ({0: (-2.0, 0.0), 2: (2.0, 0.0)}, [0, 0]),
        ({0: (-2.0, 0.0), 3: (2.0, 0.0)}, [20, 0]),
        ({0: (-2.0, 0.0), 2: (2.0, 0.0), 3: (2.0, 2.0)}, [0, 20]),
        ({0: (4.2, 0.0)}, [0, 0]),
    ],
)
def test_the_heavier_team_in_the_zone_scores(places: dict[int, tuple[float, float]], expected: list[int]) -> None:
    arena = flat_arena("heavy", "scout", size=SIZE)
    for unit, (x, y) in places.items():
        place(arena, unit, x, y)
    tick(arena, times=20)
    assert score(arena) == expected


def test_two_units_can_kill_each_other_and_nobody_wins() -> None:
    arena = pair("medium", 6.0)
    for unit in (0, 1):
        put(arena, unit, hit_points=5.0)
    result = decide(arena, {0: {"fire": "laser", "target": 1}, 1: {"fire": "laser", "target": 0}})
    assert (bool(result.ended[0]), int(result.winner[0])) == (True, -1)


@pytest.mark.parametrize(("painted", "metres", "does_fire"), [(100, 49.9, True), (100, 50.1, False), (0, 12.1, False)])
def test_a_painted_target_is_in_the_range_of_a_missile_through_walls(painted: int, metres: float, does_fire: bool) -> None:
    arena = pair("medium", metres)
    build(arena, (-28, -27), (-10, 10), Material.REINFORCED, height=8.0)
    put(arena, 1, painted=painted)
    put(arena, 0, cooldown={"missile": 0})
    actions = make_actions(arena)
    if 1 in contacts(arena, 0):
        actions = make_actions(arena, {0: {"fire": "missile", "target": 1}})
    arena.step(actions)
    assert (unit_field(arena, "cooldown", 0)["missile"] > 0) == does_fire
