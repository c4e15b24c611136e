"""Motion: turning, driving, jumping, falling, and obstacles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.decision import decide
from esper.arena.motion import can_act, drive, fly, move, top_speed, turn
from esper.arena.specs import CLASSES, PHYSICS, Material
from tests.arena.worlds import build, flat_arena, make_orders, place, put, unit_field

TICK = PHYSICS.tick_s


def moved(arena: Arena, orders: dict[int, dict[str, Any]], ticks: int = 1) -> float:
    """All phases of motion for some ticks; gives how hard unit 0 landed at its hardest."""
    units, world, tables = arena.state.units, arena.state.world, arena.tables
    hardest = 0.0
    for _ in range(ticks):
        units = turn(units, make_orders(arena, orders), tables)
        units = drive(units, make_orders(arena, orders), top_speed(units, world, tables), tables)
        units, hard = move(fly(units, make_orders(arena, orders), tables), world)
        hardest = max(hardest, float(hard[0, 0]))
    arena.state = arena.state._replace(units=units)
    return hardest


def speed(arena: Arena, unit: int = 0) -> float:
    x, y, _ = unit_field(arena, "velocity", unit)
    return math.hypot(x, y)


def fastest(arena: Arena, unit: int = 0) -> float:
    return float(top_speed(arena.state.units, arena.state.world, arena.tables)[0, unit])


@pytest.mark.parametrize("name", CLASSES)
def test_a_unit_reaches_its_full_speed_in_half_a_second_and_no_more(name: str) -> None:
    arena = flat_arena(name)
    place(arena, 0, -8, 0)
    moved(arena, {0: {"forward": 1.0}}, ticks=9)
    assert speed(arena) == pytest.approx(0.9 * CLASSES[name].max_speed_mps, rel=1e-4)
    moved(arena, {0: {"forward": 1.0}}, ticks=6)
    assert speed(arena) == pytest.approx(CLASSES[name].max_speed_mps, rel=1e-4)
    x, y, z = unit_field(arena, "position", 0)
    assert x > -8
    assert (y, z) == (0, 0)


def test_a_unit_brakes_as_fast_as_it_accelerates() -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0)
    put(arena, 0, velocity=[5.5, 0.0, 0.0])
    moved(arena, {}, ticks=9)
    assert speed(arena) == pytest.approx(0.55, rel=1e-3)
    moved(arena, {}, ticks=1)
    assert speed(arena) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("order", "factor", "direction"),
    [
        ({"forward": 1.0}, 1.0, (1, 0)),
        ({"forward": -1.0}, 0.6, (-1, 0)),
        ({"strafe": 1.0}, 0.6, (0, -1)),  # to the right of who looks along x
        ({"strafe": -1.0}, 0.6, (0, 1)),
        ({"forward": 0.5}, 0.5, (1, 0)),
    ],
)
def test_sideways_and_backwards_are_slower_than_ahead(order: dict[str, float], factor: float, direction: tuple[int, int]) -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0)
    moved(arena, {0: order}, ticks=12)
    x, y, _ = unit_field(arena, "velocity", 0)
    assert (x, y) == pytest.approx((5.5 * factor * direction[0], 5.5 * factor * direction[1]), abs=1e-4)


def test_ahead_and_sideways_at_once_is_no_faster_than_ahead() -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0)
    moved(arena, {0: {"forward": 1.0, "strafe": 1.0}}, ticks=20)
    assert speed(arena) == pytest.approx(5.5, rel=1e-4)


@pytest.mark.parametrize("name", CLASSES)
def test_a_unit_turns_at_the_rate_of_its_class_to_the_left(name: str) -> None:
    arena = flat_arena(name)
    place(arena, 0, 0, 0, heading=0.1)
    moved(arena, {0: {"yaw": 1.0}}, ticks=4)
    assert unit_field(arena, "heading", 0) == pytest.approx(0.1 + 4 * TICK * CLASSES[name].yaw_radps, abs=1e-5)


def test_the_heading_goes_round_and_stays_within_half_a_turn_of_zero() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0, heading=3.1)
    moved(arena, {0: {"yaw": 1.0}}, ticks=1)
    assert unit_field(arena, "heading", 0) == pytest.approx(3.1 + 0.09 - 2 * math.pi, abs=1e-5)
    moved(arena, {0: {"yaw": -1.0}}, ticks=1)
    assert unit_field(arena, "heading", 0) == pytest.approx(3.1, abs=1e-5)


@pytest.mark.parametrize(
    ("values", "factor"),
    [
        ({}, 1.0),
        ({"legs": 0.0}, 0.4),
        ({"legs": 0.1}, 1.0),
        ({"suppressed": 1}, 0.7),
        ({"is_venting": True}, 0.5),
        ({"legs": 0.0, "suppressed": 1, "is_venting": True}, 0.4 * 0.7 * 0.5),
        ({"fallen": 1}, 0.0),
        ({"is_shut_down": True}, 0.0),
        ({"hit_points": 0.0}, 0.0),
    ],
)
def test_damage_suppression_and_venting_reduce_the_top_speed(values: dict[str, Any], factor: float) -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0)
    put(arena, 0, **values)
    assert fastest(arena) == pytest.approx(5.5 * factor)


def test_water_slows_units_in_it_and_not_units_above_it() -> None:
    arena = flat_arena("scout")
    build(arena, (-2, 2), (-2, 2), Material.WATER)
    place(arena, 0, 0.5, 0.5)
    assert fastest(arena) == pytest.approx(0.6 * 7.0)
    place(arena, 0, 0.5, 0.5, 3.0)
    assert fastest(arena) == pytest.approx(7.0)


def test_broken_legs_do_not_matter_in_the_air() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0, 3.0)
    put(arena, 0, legs=0.0)
    assert fastest(arena) == pytest.approx(7.0)


@pytest.mark.parametrize("values", [{"fallen": 1}, {"is_shut_down": True}, {"hit_points": 0.0}])
def test_a_unit_that_cannot_act_neither_turns_nor_drives_nor_flies(values: dict[str, Any]) -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0, heading=1.0)
    put(arena, 0, **values)
    assert not can_act(arena.state.units)[0, 0]
    moved(arena, {0: {"forward": 1.0, "yaw": 1.0, "jets": 1.0}}, ticks=5)
    assert unit_field(arena, "position", 0) == [0, 0, 0]
    assert unit_field(arena, "heading", 0) == pytest.approx(1.0, abs=1e-6)
    assert unit_field(arena, "fuel", 0) == PHYSICS.fuel_s


def test_jets_lift_by_what_they_have_over_gravity_and_burn_fuel_and_heat() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0)
    moved(arena, {0: {"jets": 1.0}}, ticks=10)
    rise = (18 - PHYSICS.gravity_mps2) * TICK
    assert unit_field(arena, "velocity", 0)[2] == pytest.approx(10 * rise, rel=1e-4)
    assert unit_field(arena, "position", 0)[2] == pytest.approx(sum(range(1, 11)) * rise * TICK, rel=1e-4)
    assert unit_field(arena, "fuel", 0) == pytest.approx(PHYSICS.fuel_s - 0.5, rel=1e-4)
    assert unit_field(arena, "heat", 0) == pytest.approx(0.5 * PHYSICS.jets_heat_per_s, rel=1e-4)


def test_half_jets_burn_half_the_fuel_and_lift_no_unit() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0)
    moved(arena, {0: {"jets": 0.5}}, ticks=10)
    assert unit_field(arena, "position", 0)[2] == 0
    assert unit_field(arena, "fuel", 0) == pytest.approx(PHYSICS.fuel_s - 0.25, rel=1e-4)


@pytest.mark.parametrize("name", ["medium", "heavy"])
def test_a_unit_without_jets_stays_on_the_ground_and_cool(name: str) -> None:
    arena = flat_arena(name)
    place(arena, 0, 0, 0)
    moved(arena, {0: {"jets": 1.0}}, ticks=10)
    assert unit_field(arena, "position", 0)[2] == 0
    assert unit_field(arena, "heat", 0) == 0


def test_jets_without_fuel_do_nothing_and_a_flying_unit_falls() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0, 5.0)
    put(arena, 0, fuel=0.0)
    moved(arena, {0: {"jets": 1.0}}, ticks=2)
    assert unit_field(arena, "velocity", 0)[2] == pytest.approx(-2 * PHYSICS.gravity_mps2 * TICK, rel=1e-4)
    assert unit_field(arena, "fuel", 0) == 0


def test_fuel_lasts_two_seconds_and_comes_back_on_the_ground_alone() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0)
    put(arena, 0, fuel=0.1)
    moved(arena, {0: {"jets": 1.0}}, ticks=4)  # a tenth of a second of it
    assert unit_field(arena, "fuel", 0) == pytest.approx(0.0, abs=1e-5)
    assert unit_field(arena, "position", 0)[2] > 0
    place(arena, 0, 0, 0)
    put(arena, 0, fuel=0.0)
    moved(arena, {}, ticks=20)
    assert unit_field(arena, "fuel", 0) == pytest.approx(PHYSICS.refuel_per_s, rel=1e-4)
    put(arena, 0, fuel=PHYSICS.fuel_s)
    moved(arena, {}, ticks=2)
    assert unit_field(arena, "fuel", 0) == PHYSICS.fuel_s


def test_no_unit_rises_above_the_ceiling() -> None:
    arena = flat_arena("scout")
    place(arena, 0, 0, 0, 11.0)
    put(arena, 0, velocity=[0.0, 0.0, 9.0])
    for _ in range(12):
        moved(arena, {0: {"jets": 1.0}})
        assert unit_field(arena, "position", 0)[2] <= PHYSICS.ceiling_m
    assert unit_field(arena, "position", 0)[2] == PHYSICS.ceiling_m
    assert unit_field(arena, "velocity", 0)[2] == 0


def test_steering_in_the_air_is_slower_than_on_the_ground() -> None:
    arena = flat_arena("scout", "scout")
    place(arena, 0, 0, 0, 8.0)
    place(arena, 1, 0, 4)
    moved(arena, {0: {"forward": 1.0}, 1: {"forward": 1.0}}, ticks=2)
    assert speed(arena, 0) == pytest.approx(0.3 * speed(arena, 1), rel=1e-4)


def test_a_step_up_of_one_metre_is_walked() -> None:
    arena = flat_arena()
    build(arena, (2, 6), (-4, 4), Material.OPEN, height=1.0)
    place(arena, 0, 0, 0.5)
    moved(arena, {0: {"forward": 1.0}}, ticks=16)
    x, _, z = unit_field(arena, "position", 0)
    assert x > 2.5
    assert z == 1.0


@pytest.mark.parametrize("material", [Material.SOLID, Material.REINFORCED, Material.GLASS, Material.OPEN])
def test_a_step_up_of_two_metres_stops_a_unit_at_its_radius(material: Material) -> None:
    arena = flat_arena()
    build(arena, (2, 6), (-4, 4), material, height=2.0)
    place(arena, 0, 0, 0.5)
    moved(arena, {0: {"forward": 1.0}}, ticks=30)
    x, _, z = unit_field(arena, "position", 0)
    assert 2 - PHYSICS.radius_m - 5.5 * TICK <= x <= 2 - PHYSICS.radius_m
    assert z == 0
    assert unit_field(arena, "velocity", 0)[0] == 0


def test_a_unit_stopped_along_one_axis_slides_along_the_other() -> None:
    arena = flat_arena()
    build(arena, (2, 6), (-12, 12), Material.REINFORCED, height=3.0)
    place(arena, 0, 1.2, 0.5, heading=math.pi / 4)
    moved(arena, {0: {"forward": 1.0}}, ticks=20)
    x, y, _ = unit_field(arena, "position", 0)
    assert x <= 1.4
    assert y > 2


def test_jets_carry_a_unit_over_walls_that_stop_it_on_foot() -> None:
    arena = flat_arena("scout")
    build(arena, (2, 4), (-12, 12), Material.REINFORCED, height=2.0)
    place(arena, 0, 0, 0.5, 3.0)
    moved(arena, {0: {"forward": 1.0, "jets": 0.6}}, ticks=25)
    assert unit_field(arena, "position", 0)[0] > 3


def test_foliage_is_walked_through() -> None:
    arena = flat_arena()
    build(arena, (2, 6), (-4, 4), Material.FOLIAGE, height=3.0)
    place(arena, 0, 0, 0.5)
    moved(arena, {0: {"forward": 1.0}}, ticks=20)
    x, _, z = unit_field(arena, "position", 0)
    assert x > 3
    assert z == 0


def test_a_step_down_of_one_metre_is_walked_and_a_higher_one_is_a_fall() -> None:
    arena = flat_arena("medium", "medium")
    build(arena, (-4, 0), (-4, 0), Material.OPEN, height=1.0)
    build(arena, (-4, 0), (0, 4), Material.OPEN, height=3.0)
    place(arena, 0, -0.1, -2, 1.0)
    place(arena, 1, -0.1, 2, 3.0)
    put(arena, 0, velocity=[5.5, 0.0, 0.0])
    put(arena, 1, velocity=[5.5, 0.0, 0.0])
    moved(arena, {0: {"forward": 1.0}, 1: {"forward": 1.0}})
    assert unit_field(arena, "position", 0)[2] == 0
    assert unit_field(arena, "is_grounded", 0)
    assert unit_field(arena, "position", 1)[2] == 3.0
    assert not unit_field(arena, "is_grounded", 1)
    moved(arena, {}, ticks=20)
    assert unit_field(arena, "position", 1)[2] == 0
    assert unit_field(arena, "is_grounded", 1)


@pytest.mark.parametrize(("height", "is_hard"), [(1.5, False), (4.0, True)])
def test_a_landing_is_hard_above_the_speed_that_legs_bear(height: float, is_hard: bool) -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0, height)
    hardest = moved(arena, {}, ticks=30)
    arrived = math.sqrt(2 * PHYSICS.gravity_mps2 * height)
    assert (hardest > 0) == is_hard
    assert hardest == pytest.approx(max(arrived - PHYSICS.landing_mps, 0.0), abs=0.6)
    assert unit_field(arena, "velocity", 0)[2] == 0


@pytest.mark.slow
def test_a_hard_landing_costs_legs_and_no_hit_points() -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0, 4.0)
    state = arena.state
    for _ in range(4):
        state, _ = decide(state, make_orders(arena), arena.tables)
    assert float(state.units.legs[0, 0]) == pytest.approx(75 - 5 * (math.sqrt(2 * 9.81 * 4) - 6), abs=2)
    assert float(state.units.hit_points[0, 0]) == 150


@pytest.mark.parametrize(("heading", "axis", "sign"), [(0.0, 0, 1), (math.pi, 0, -1), (math.pi / 2, 1, 1), (-math.pi / 2, 1, -1)])
def test_no_unit_leaves_the_map(heading: float, axis: int, sign: int) -> None:
    arena = flat_arena()
    start = [0.0, 0.0]
    start[axis] = sign * 10.5
    place(arena, 0, start[0], start[1], heading=heading)
    moved(arena, {0: {"forward": 1.0}}, ticks=20)
    assert unit_field(arena, "position", 0)[axis] == pytest.approx(sign * (12 - PHYSICS.radius_m))
    assert unit_field(arena, "velocity", 0)[axis] == 0
    moved(arena, {0: {"forward": -1.0}}, ticks=10)
    assert abs(unit_field(arena, "position", 0)[axis]) < 11


def test_units_that_overlap_push_one_another_apart_alike_until_they_only_touch() -> None:
    arena = flat_arena()
    place(arena, 0, -0.2, 0)
    place(arena, 1, 0.2, 0)
    moved(arena, {})
    first, second = unit_field(arena, "position", 0)[0], unit_field(arena, "position", 1)[0]
    assert second - first == pytest.approx(2 * PHYSICS.radius_m, abs=1e-5)
    assert first == pytest.approx(-second, abs=1e-6)


def test_units_that_run_into_one_another_never_share_a_place() -> None:
    arena = flat_arena("scout")
    place(arena, 0, -2, 0)
    place(arena, 1, 2, 0, heading=math.pi)
    for _ in range(20):
        moved(arena, {0: {"forward": 1.0}, 1: {"forward": 1.0}})
        apart = arena.state.units.position[0, 0] - arena.state.units.position[0, 1]
        # Both come 0.35 m nearer in a tick, and are pushed apart in the next.
        assert torch.linalg.vector_norm(apart) >= 2 * PHYSICS.radius_m - 2 * 0.35 - 1e-4


def test_dead_units_and_units_high_above_are_no_obstacles() -> None:
    for values in ({"hit_points": 0.0}, {"position": [0.2, 0.0, 2.0], "is_grounded": False}):
        arena = flat_arena()
        place(arena, 0, -0.2, 0)
        place(arena, 1, 0.2, 0)
        put(arena, 1, **values)
        moved(arena, {})
        assert unit_field(arena, "position", 0)[0] == pytest.approx(-0.2)


def test_units_are_not_pushed_into_walls() -> None:
    arena = flat_arena()
    build(arena, (2, 6), (-4, 4), Material.REINFORCED, height=3.0)
    place(arena, 0, 1.35, 0)
    place(arena, 1, 1.0, 0)
    moved(arena, {}, ticks=5)
    assert unit_field(arena, "position", 0)[0] <= 1.4
    assert torch.linalg.vector_norm(arena.state.units.position[0, 0] - arena.state.units.position[0, 1]) >= 2 * PHYSICS.radius_m - 1e-2
