"""Motion: turning, driving, jumping, falling, and obstacles."""

from __future__ import annotations

import math
from typing import Any

import pytest

from esper.arena.arena import Arena
from esper.arena.specs import CLASSES, PHYSICS, Material
from tests.arena.worlds import build, flat_arena, place, put, tick, unit_field

TICK = PHYSICS.tick_s


def speed(arena: Arena, unit: int = 0) -> float:
    x, y, _ = unit_field(arena, "velocity", unit)
    return math.hypot(x, y)


def distance(arena: Arena) -> float:
    """Return the distance between the first two units."""
    return math.dist(unit_field(arena, "position", 0), unit_field(arena, "position", 1))


# Driving and turning


@pytest.mark.parametrize("name", CLASSES)
def test_a_unit_reaches_its_full_speed_in_half_a_second_and_no_more(name: str) -> None:
    arena = flat_arena(name)
    place(arena, 0, -8, 0)
    tick(arena, {0: {"forward": 1.0}}, times=9)
    assert speed(arena) == pytest.approx(0.9 * CLASSES[name].max_speed_mps, rel=1e-4)
    tick(arena, {0: {"forward": 1.0}}, times=6)
    assert speed(arena) == pytest.approx(CLASSES[name].max_speed_mps, rel=1e-4)
    # The speed of a tick applies to its whole length: 0.1, 0.2, ... 1.0, and then 5 ticks at full speed.
    x, y, z = unit_field(arena, "position", 0)
    assert x == pytest.approx(-8 + (5.5 + 5) * TICK * CLASSES[name].max_speed_mps, abs=1e-4)
    assert (y, z) == (0, 0)


def test_a_unit_brakes_as_fast_as_it_accelerates() -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0)
    put(arena, 0, velocity=[5.5, 0.0, 0.0])
    tick(arena, times=9)
    assert speed(arena) == pytest.approx(0.55, rel=1e-3)
    tick(arena)
    assert speed(arena) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("order", "factor", "direction"),
    [
        ({"forward": 1.0}, 1.0, (1, 0)),
        ({"forward": 0.5}, 0.5, (1, 0)),
        ({"forward": -1.0}, 0.6, (-1, 0)),
        ({"strafe": 1.0}, 0.6, (0, -1)),  # to the right of a unit that looks along x
        ({"strafe": -1.0}, 0.6, (0, 1)),
        # Both at once are shortened to the full speed.
        ({"forward": 1.0, "strafe": 1.0}, 1.0, (1 / math.hypot(1, 0.6), -0.6 / math.hypot(1, 0.6))),
    ],
)
def test_the_ordered_speed_is_lower_sideways_and_backwards(order: dict[str, float], factor: float, direction: tuple[float, float]) -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0)
    tick(arena, {0: order}, times=20)
    x, y, _ = unit_field(arena, "velocity", 0)
    assert (x, y) == pytest.approx((5.5 * factor * direction[0], 5.5 * factor * direction[1]), abs=1e-4)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("yaw", [1.0, -0.5])
def test_a_unit_turns_at_the_rate_of_its_class_and_to_the_left(name: str, yaw: float) -> None:
    arena = flat_arena(name)
    place(arena, 0, 0, 0, heading=0.1)
    tick(arena, {0: {"yaw": yaw}}, times=4)
    assert unit_field(arena, "heading", 0) == pytest.approx(0.1 + 4 * yaw * TICK * CLASSES[name].yaw_radps, abs=1e-5)


@pytest.mark.slow
def test_a_unit_that_turns_for_long_keeps_an_exact_heading() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0, heading=3.1)
    tick(arena, {0: {"yaw": 1.0}}, times=2000)
    turned = unit_field(arena, "heading", 0) - 3.1 - 2000 * 0.09
    assert math.remainder(turned, 2 * math.pi) == pytest.approx(0.0, abs=1e-3)
    tick(arena, {0: {"forward": 1.0}}, times=12)
    assert speed(arena) == pytest.approx(7.0, rel=1e-5)


def test_a_unit_drives_where_it_looks() -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0, heading=2.0)
    tick(arena, {0: {"forward": 1.0}}, times=10)
    x, y, _ = unit_field(arena, "position", 0)
    assert math.atan2(y, x) == pytest.approx(2.0, abs=1e-5)


@pytest.mark.parametrize(
    ("values", "vents", "factor"),
    [
        ({}, False, 1.0),
        ({"legs": 0.0}, False, 0.4),
        ({"legs": 0.1}, False, 1.0),
        ({"suppressed": 13}, False, 0.7),
        ({"suppressed": 3}, False, 1.0),  # it is over before the unit is at full speed
        ({}, True, 0.5),
        ({"legs": 0.0, "suppressed": 13}, True, 0.4 * 0.7 * 0.5),
    ],
)
def test_damage_suppression_and_venting_reduce_the_top_speed(values: dict[str, Any], vents: bool, factor: float) -> None:
    arena = flat_arena()
    place(arena, 0, -4, 0)
    put(arena, 0, **values)
    tick(arena, {0: {"forward": 1.0, "vent": vents}}, times=12)
    assert speed(arena) == pytest.approx(5.5 * factor, rel=1e-4)


@pytest.mark.parametrize(("material", "legs"), [(Material.WATER, 30.0), (Material.OPEN, 0.0)])
def test_water_and_broken_legs_slow_units_on_the_ground_and_not_above_it(material: Material, legs: float) -> None:
    arena = flat_arena("scout")
    build(arena, (-2, 2), (-2, 2), material)
    for z, slowed in ((0.0, 7.0 * 0.1), (3.0, 0.0)):
        place(arena, 0, 0.5, 0.5, z)
        put(arena, 0, legs=legs, velocity=[7.0, 0.0, 0.0])
        tick(arena, {0: {"forward": 1.0}})
        assert speed(arena) == pytest.approx(7.0 - slowed, rel=1e-5)


def test_water_reduces_the_top_speed() -> None:
    arena = flat_arena("scout")
    build(arena, (-8, 8), (-8, 8), Material.WATER)
    place(arena, 0, -4, 0)
    tick(arena, {0: {"forward": 1.0}}, times=12)
    assert speed(arena) == pytest.approx(0.6 * 7.0, rel=1e-5)


@pytest.mark.parametrize("values", [{"fallen": 7}, {"is_shut_down": True, "heat": 60.0}, {"hit_points": 0.0}])  # wrecks do not refuel
def test_a_unit_that_cannot_act_neither_turns_nor_drives_nor_flies(values: dict[str, Any]) -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0, heading=1.0)
    put(arena, 0, fuel=1.0, **values)
    tick(arena, {0: {"forward": 1.0, "strafe": 1.0, "yaw": 1.0, "jets": 1.0}}, times=6)
    assert unit_field(arena, "position", 0) == [0, 0, 0]
    assert unit_field(arena, "heading", 0) == pytest.approx(1.0, abs=1e-6)
    assert (unit_field(arena, "fuel", 0) > 1.0) == ("hit_points" not in values)


def test_a_unit_that_falls_or_dies_while_it_drives_slows_down_to_a_stop() -> None:
    for values in ({"fallen": 60}, {"hit_points": 0.0}):
        arena = flat_arena()
        place(arena, 0, 0, 0)
        put(arena, 0, velocity=[5.5, 0.0, 0.0], **values)
        tick(arena, {0: {"forward": 1.0}})
        assert speed(arena) == pytest.approx(0.9 * 5.5)
        tick(arena, {0: {"forward": 1.0}}, times=10)
        assert speed(arena) == pytest.approx(0.0, abs=1e-5)


# Jets and falls


def test_jets_lift_by_their_thrust_less_gravity_and_use_fuel_and_add_heat() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0)
    tick(arena, {0: {"jets": 1.0}}, times=10)
    rise = (18 - PHYSICS.gravity_mps2) * TICK
    assert unit_field(arena, "velocity", 0)[2] == pytest.approx(10 * rise, rel=1e-4)
    assert unit_field(arena, "position", 0)[2] == pytest.approx(sum(range(1, 11)) * rise * TICK, rel=1e-4)
    assert unit_field(arena, "fuel", 0) == pytest.approx(PHYSICS.fuel_s - 0.5, rel=1e-4)
    assert unit_field(arena, "heat", 0) == pytest.approx(0.5 * (PHYSICS.jets_heat_per_s - CLASSES["scout"].cooling_per_s), rel=1e-4)


def test_half_jets_use_half_the_fuel_and_lift_no_unit() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0)
    tick(arena, {0: {"jets": 0.5}}, times=10)
    assert unit_field(arena, "position", 0)[2] == 0
    assert unit_field(arena, "fuel", 0) == pytest.approx(PHYSICS.fuel_s - 0.25, rel=1e-4)


@pytest.mark.parametrize(("name", "jets"), [("medium", 1.0), ("heavy", 1.0), ("scout", -1.0)])
def test_units_without_jets_or_with_jets_off_stay_on_the_ground(name: str, jets: float) -> None:
    arena = flat_arena(name)
    place(arena, 0, 0, 0)
    put(arena, 0, heat=50.0, fuel=1.0)
    tick(arena, {0: {"jets": jets}}, times=10)
    assert unit_field(arena, "position", 0)[2] == 0
    assert unit_field(arena, "heat", 0) == pytest.approx(50 - 0.5 * CLASSES[name].cooling_per_s, rel=1e-4)
    assert unit_field(arena, "fuel", 0) == pytest.approx(1 + 0.5 * PHYSICS.refuel_per_s, rel=1e-4)


def test_jets_without_fuel_do_nothing_and_a_unit_in_the_air_falls() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0, 5.0)
    put(arena, 0, fuel=0.0)
    tick(arena, {0: {"jets": 1.0}}, times=2)
    assert unit_field(arena, "velocity", 0)[2] == pytest.approx(-2 * PHYSICS.gravity_mps2 * TICK, rel=1e-4)
    assert unit_field(arena, "fuel", 0) == 0


def test_fuel_runs_out_and_is_regained_on_the_ground() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0)
    put(arena, 0, fuel=0.1)
    tick(arena, {0: {"jets": 1.0}}, times=4)  # the fuel lasts for two of them
    assert unit_field(arena, "fuel", 0) == pytest.approx(0.0, abs=1e-5)
    assert unit_field(arena, "position", 0)[2] > 0
    place(arena, 0, 0, 0)
    put(arena, 0, fuel=0.0)
    tick(arena, times=20)
    assert unit_field(arena, "fuel", 0) == pytest.approx(PHYSICS.refuel_per_s, rel=1e-4)
    put(arena, 0, fuel=PHYSICS.fuel_s - 0.001)
    tick(arena, times=2)
    assert unit_field(arena, "fuel", 0) == PHYSICS.fuel_s


def test_a_unit_in_the_air_regains_no_fuel() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0, 5.0)
    put(arena, 0, fuel=1.0)
    tick(arena, times=3)
    assert unit_field(arena, "fuel", 0) == 1.0


def test_no_unit_rises_above_the_ceiling() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0, 11.0)
    put(arena, 0, velocity=[0.0, 0.0, 9.0])
    for _ in range(12):
        tick(arena, {0: {"jets": 1.0}})
        assert unit_field(arena, "position", 0)[2] <= PHYSICS.ceiling_m
    assert unit_field(arena, "position", 0)[2] == PHYSICS.ceiling_m
    assert unit_field(arena, "velocity", 0)[2] == 0


def test_steering_in_the_air_is_slower_than_on_the_ground() -> None:
    arena = flat_arena("scout", "scout")
    place(arena, 0, 0, 0, 8.0)
    place(arena, 1, 0, 4)
    tick(arena, {0: {"forward": 1.0}, 1: {"forward": 1.0}}, times=2)
    assert speed(arena, 0) == pytest.approx(0.3 * speed(arena, 1), rel=1e-4)


@pytest.mark.parametrize("height", [1.5, 4.0, 8.0])
def test_a_landing_damages_legs_by_the_speed_above_the_harmless_one(height: float) -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0, height)
    down = z = 0.0
    while height + z > 0:
        down += PHYSICS.gravity_mps2 * TICK
        z -= down * TICK
    tick(arena, times=30)
    damage = PHYSICS.landing_damage * max(down - PHYSICS.landing_mps, 0.0)
    assert (damage > 0) == (height > 2)
    assert unit_field(arena, "legs", 0) == pytest.approx(75 - damage, abs=1e-3)
    assert unit_field(arena, "hit_points", 0) == 150
    assert unit_field(arena, "velocity", 0)[2] == 0
    assert unit_field(arena, "is_grounded", 0)


def test_a_very_hard_landing_leaves_no_legs_and_all_hit_points() -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0, 1.0)
    put(arena, 0, velocity=[0.0, 0.0, -40.0])
    tick(arena)
    assert (unit_field(arena, "legs", 0), unit_field(arena, "hit_points", 0)) == (0, 150)


# Terrain


@pytest.mark.parametrize("material", [Material.OPEN, Material.SOLID, Material.REINFORCED, Material.GLASS, Material.WATER])
def test_a_step_up_of_one_metre_is_walked(material: Material) -> None:
    arena = flat_arena()
    build(arena, (2, 6), (-4, 4), material, height=1.0)
    place(arena, 0, 0, 0.5)
    tick(arena, {0: {"forward": 1.0}}, times=20)
    x, _, z = unit_field(arena, "position", 0)
    assert x > 2.5
    assert z == 1.0


@pytest.mark.parametrize("material", [Material.OPEN, Material.SOLID, Material.REINFORCED, Material.GLASS])
@pytest.mark.parametrize("height", [1.125, 2.0])
def test_a_higher_step_up_stops_a_unit_at_its_radius(material: Material, height: float) -> None:
    arena = flat_arena()
    build(arena, (2, 6), (-4, 4), material, height=height)
    place(arena, 0, 0, 0.5)
    tick(arena, {0: {"forward": 1.0}}, times=30)
    x, _, z = unit_field(arena, "position", 0)
    assert 2 - PHYSICS.radius_m - 5.5 * TICK <= x <= 2 - PHYSICS.radius_m
    assert z == 0
    assert unit_field(arena, "velocity", 0)[0] == 0


@pytest.mark.parametrize(("heading", "stopped"), [(math.pi / 4, 0), (-math.pi / 4, 0), (math.pi * 3 / 4, 1), (math.pi / 3, 1)])
def test_a_unit_stopped_along_one_axis_slides_along_the_other(heading: float, stopped: int) -> None:
    arena = flat_arena()
    walls = [(2, 6), (-12, 12)]
    build(arena, walls[stopped], walls[1 - stopped], Material.REINFORCED, height=3.0)
    start = [0.5, 0.5]
    start[stopped] = 1.2
    place(arena, 0, *start, heading=heading)
    tick(arena, {0: {"forward": 1.0}}, times=20)
    position = unit_field(arena, "position", 0)
    assert position[stopped] <= 1.4
    assert abs(position[1 - stopped] - 0.5) > 1.5


def test_jets_carry_a_unit_over_walls_that_stop_it_on_foot() -> None:
    arena = flat_arena("scout")
    build(arena, (2, 4), (-12, 12), Material.REINFORCED, height=2.0)
    place(arena, 0, 0, 0.5, 3.0)
    tick(arena, {0: {"forward": 1.0, "jets": 0.6}}, times=25)
    assert unit_field(arena, "position", 0)[0] > 3


def test_foliage_is_walked_through() -> None:
    arena = flat_arena()
    build(arena, (2, 6), (-4, 4), Material.FOLIAGE, height=3.0)
    place(arena, 0, 0, 0.5)
    tick(arena, {0: {"forward": 1.0}}, times=20)
    x, _, z = unit_field(arena, "position", 0)
    assert x > 3
    assert z == 0


def test_a_step_down_of_one_metre_is_walked_and_a_higher_one_is_a_fall() -> None:
    arena = flat_arena("medium", "medium")
    build(arena, (-4, 0), (-4, 0), Material.OPEN, height=1.0)
    build(arena, (-4, 0), (0, 4), Material.OPEN, height=3.0)
    for unit, y, z in ((0, -2, 1.0), (1, 2, 3.0)):
        place(arena, unit, -0.1, y, z)
        put(arena, unit, velocity=[5.5, 0.0, 0.0])
    tick(arena, {0: {"forward": 1.0}, 1: {"forward": 1.0}})
    assert unit_field(arena, "position", 0)[2] == 0
    assert unit_field(arena, "is_grounded", 0)
    assert unit_field(arena, "position", 1)[2] == 3.0
    assert not unit_field(arena, "is_grounded", 1)
    tick(arena, times=20)
    assert unit_field(arena, "position", 1)[2] == 0
    assert unit_field(arena, "is_grounded", 1)


@pytest.mark.parametrize(("heading", "axis", "sign"), [(0.0, 0, 1), (math.pi, 0, -1), (math.pi / 2, 1, 1), (-math.pi / 2, 1, -1)])
def test_no_unit_leaves_the_map(heading: float, axis: int, sign: int) -> None:
    arena = flat_arena()
    start = [0.0, 0.0]
    start[axis] = sign * 10.5
    place(arena, 0, *start, heading=heading)
    tick(arena, {0: {"forward": 1.0}}, times=20)
    assert unit_field(arena, "position", 0)[axis] == pytest.approx(sign * (12 - PHYSICS.radius_m))
    assert unit_field(arena, "velocity", 0)[axis] == 0
    tick(arena, {0: {"forward": -1.0}}, times=10)
    assert abs(unit_field(arena, "position", 0)[axis]) < 11


# Other units


@pytest.mark.parametrize("angle", [0.0, 0.7, math.pi / 2])
def test_units_that_overlap_push_each_other_apart_equally_until_they_touch(angle: float) -> None:
    arena = flat_arena()
    x, y = 0.2 * math.cos(angle), 0.2 * math.sin(angle)
    place(arena, 0, -x, -y)
    place(arena, 1, x, y)
    tick(arena)
    first, second = unit_field(arena, "position", 0), unit_field(arena, "position", 1)
    assert distance(arena) == pytest.approx(2 * PHYSICS.radius_m, abs=1e-5)
    assert first == pytest.approx([-value for value in second], abs=1e-6)
    assert math.atan2(second[1], second[0]) == pytest.approx(angle, abs=1e-5)


def test_units_that_run_into_each_other_never_share_a_place() -> None:
    arena = flat_arena("scout")
    place(arena, 0, -2, 0)
    place(arena, 1, 2, 0, heading=math.pi)
    for _ in range(20):
        tick(arena, {0: {"forward": 1.0}, 1: {"forward": 1.0}})
        # Both come 0.35 m nearer in a tick, and are pushed apart in the next.
        assert distance(arena) >= 2 * PHYSICS.radius_m - 2 * 0.35 - 1e-4
    assert distance(arena) < 2 * PHYSICS.radius_m


@pytest.mark.parametrize(
    ("values", "is_pushed"),
    [
        ({}, True),
        ({"hit_points": 0.0}, False),
        ({"position": [0.2, 0.0, 2.0], "is_grounded": False}, False),
        ({"position": [0.2, 0.0, 1.9], "is_grounded": False}, True),
    ],
)
def test_dead_units_and_units_high_above_are_no_obstacles(values: dict[str, Any], is_pushed: bool) -> None:
    arena = flat_arena()
    place(arena, 0, -0.2, 0)
    place(arena, 1, 0.2, 0)
    put(arena, 1, **values)
    tick(arena)
    assert unit_field(arena, "position", 0)[0] == pytest.approx(-0.6 if is_pushed else -0.2)


def test_units_are_not_pushed_into_walls() -> None:
    arena = flat_arena()
    build(arena, (2, 6), (-4, 4), Material.REINFORCED, height=3.0)
    place(arena, 0, 1.35, 0)
    place(arena, 1, 1.0, 0)
    tick(arena, times=5)
    assert unit_field(arena, "position", 0)[0] <= 1.4
    assert distance(arena) >= 2 * PHYSICS.radius_m - 1e-2
