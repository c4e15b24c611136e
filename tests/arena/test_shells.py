"""Projectiles: flight, collisions, bursts and smoke."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

from esper.arena.arena import Arena
from esper.arena.config import life_ticks
from esper.arena.native import layout as at
from esper.arena.specs import CLOUDS, PHYSICS, WEAPONS, Material
from tests.arena.worlds import build, damage_by, flat_arena, make_duel, place, put, put_shell, tick, unit_field

TICK = PHYSICS.tick_s
MUZZLE = PHYSICS.muzzle_m
STRUCK = ("hit_points", "legs", "heat", "stability", "painted", "suppressed")  # fields that hits change


class Flight(NamedTuple):
    """How the projectile of unit 0 ended."""

    ticks: int
    point: list[float]
    impact: int  # the unit that was hit, TERRAIN_IMPACT or NO_IMPACT
    damage: list[float]  # to every unit in the last tick


def launch(arena: Arena, name: str, position: list[float], velocity: list[float], *, target: int = 1) -> None:
    """Put a projectile of unit 0 in the air, for as long as its weapon lets it fly."""
    put_shell(arena, 0, name, position, velocity, target=target, life=life_ticks(WEAPONS[name]))


def velocity_of(arena: Arena) -> list[float]:
    found: list[float] = arena.simulation.state["shell"][at.SHELL_VX : at.SHELL_VZ + 1, 0, 0, 0].tolist()
    return found


def fly(arena: Arena, orders: dict[int, dict[str, Any]] | None = None) -> Flight:
    """Run ticks until the projectile of unit 0 has ended."""
    state = arena.simulation.state
    for number in range(1, 200):
        tick(arena, orders)
        _, _, life, impact = state["shell_count"][:, 0, 0, 0].tolist()
        if not life:
            full = arena.simulation.tables.unit[at.FULL_HIT_POINTS].tolist()
            damage = [share * points for share, points in zip(damage_by(arena, 0), full, strict=True)]
            return Flight(number, state["shell"][: at.SHELL_VX, 0, 0, 0].tolist(), impact, damage)
    raise AssertionError("it never ended")


def shoot(arena: Arena, name: str, orders: dict[int, dict[str, Any]] | None = None) -> Flight:
    """Shoot along x from the muzzle of unit 0."""
    x, y, z = unit_field(arena, "position", 0)
    launch(arena, name, [x, y, z + MUZZLE], [WEAPONS[name].flight_mps, 0.0, 0.0])
    return fly(arena, orders)


# Flight


@pytest.mark.parametrize("name", ["autocannon", "missile", "gauss"])
def test_a_flight_takes_as_long_as_its_speed_says(name: str) -> None:
    flight = shoot(make_duel(metres=9.0), name)
    near, far = 9 - PHYSICS.radius_m, 9 + PHYSICS.radius_m
    speed = WEAPONS[name].flight_mps
    assert near / speed <= flight.ticks * TICK <= far / speed + TICK
    assert flight.impact == 1
    assert flight.damage == pytest.approx([0, WEAPONS[name].damage])


@pytest.mark.parametrize(("name", "seconds"), [("autocannon", 0.6), ("missile", 5.2), ("smoke", 1.65)])
def test_a_projectile_that_hits_nothing_ends_without_damage(name: str, seconds: float) -> None:
    arena = flat_arena(size=128)
    place(arena, 0, -60, 0)
    put(arena, 1, hit_points=0.0)
    flight = shoot(arena, name)
    assert flight.ticks == round(seconds / TICK)
    assert flight.point == pytest.approx([-60 + WEAPONS[name].flight_mps * seconds, 0, MUZZLE], abs=1e-3)
    assert flight.impact == at.NO_IMPACT
    assert flight.damage == [0, 0]


@pytest.mark.parametrize(("name", "is_hit"), [("missile", True), ("autocannon", False)])
def test_only_a_homing_projectile_hits_a_target_that_runs_across(name: str, is_hit: bool) -> None:
    arena = make_duel(metres=10.0, heading=math.pi / 2, size=64)
    put(arena, 1, velocity=[0.0, 5.5, 0.0])
    flight = shoot(arena, name, {1: {"forward": 1.0}})
    assert (flight.impact == 1) == is_hit
    assert (flight.damage[1] > 0) == is_hit


def test_a_homing_projectile_turns_towards_its_target_and_keeps_its_speed() -> None:
    arena = flat_arena(size=64)
    place(arena, 1, 4, 8)
    launch(arena, "missile", [0.0, 0.0, 5.0], [12.0, 0.0, 0.0])
    angle = 0.0
    for _ in range(5):
        tick(arena)
        x, y, _ = velocity_of(arena)
        assert math.hypot(*velocity_of(arena)) == pytest.approx(12.0, rel=1e-5)
        assert math.atan2(y, x) > angle
        angle = math.atan2(y, x)


def test_a_homing_projectile_whose_target_is_dead_flies_straight() -> None:
    arena = flat_arena(size=64)
    place(arena, 1, 4, 8)
    put(arena, 1, hit_points=0.0)
    launch(arena, "missile", [0.0, 0.0, 5.0], [12.0, 0.0, 0.0])
    tick(arena, times=5)
    assert velocity_of(arena) == [12, 0, 0]


@pytest.mark.parametrize(("name", "drop"), [("gauss", PHYSICS.gravity_mps2 * TICK), ("autocannon", 0.0), ("smoke", 0.0)])
def test_only_ballistic_projectiles_fall(name: str, drop: float) -> None:
    arena = flat_arena(size=64)
    launch(arena, name, [0.0, 0.0, 5.0], [10.0, 0.0, 0.0])
    tick(arena, times=2)
    assert velocity_of(arena) == pytest.approx([10, 0, -2 * drop], rel=1e-5)


# Terrain


def make_walled_duel(material: Material, *, height: float = 4.0) -> Arena:
    """Two units at x = -3 and x = 5 with a wall from x = 2 to x = 3 between them."""
    arena = flat_arena()
    build(arena, (2, 3), (-12, 12), material, height=height)
    place(arena, 0, -3, 0.5)
    place(arena, 1, 5, 0.5, heading=math.pi)
    return arena


@pytest.mark.parametrize(
    ("material", "is_stopped"),
    [(Material.OPEN, True), (Material.SOLID, True), (Material.REINFORCED, True), (Material.GLASS, True), (Material.FOLIAGE, False)],
)
def test_every_material_but_foliage_stops_a_shot(material: Material, is_stopped: bool) -> None:
    arena = make_walled_duel(material)
    flight = shoot(arena, "autocannon")
    assert flight.damage == pytest.approx([0, 0 if is_stopped else 8])
    assert flight.impact == (at.TERRAIN_IMPACT if is_stopped else 1)
    assert (2 <= flight.point[0] <= 3) == is_stopped


def test_the_column_that_was_hit_is_worn_by_the_damage() -> None:
    arena = make_walled_duel(Material.SOLID)
    shoot(arena, "autocannon")
    worn = arena.simulation.state["worn"][0]
    assert worn.nonzero().flatten().tolist() == [(2 + 12) * 24 + 12]
    assert int(worn.max()) == 8


def test_a_column_without_hit_points_left_lets_shots_through() -> None:
    arena = make_walled_duel(Material.GLASS)
    assert [shoot(arena, "autocannon").damage[1] for _ in range(3)] == pytest.approx([0, 0, 8])


def test_a_lob_clears_a_wall_that_stops_a_straight_shot() -> None:
    lob = 0.5 * PHYSICS.gravity_mps2 * 18 / 40
    for name, velocity, damage in (("autocannon", [25.0, 0.0, 0.0], 0), ("gauss", [40.0, 0.0, lob], 50)):
        arena = make_duel(metres=18.0, y=0.5)
        build(arena, (0, 1), (-12, 12), Material.SOLID, height=1.25)
        launch(arena, name, [-9.0, 0.5, MUZZLE], velocity)
        assert fly(arena).damage[1] == pytest.approx(damage)


def test_the_edge_of_the_map_and_the_ground_end_a_flight() -> None:
    arena = flat_arena()
    place(arena, 0, 8, 0)
    edge = shoot(arena, "autocannon")
    assert edge.impact == at.TERRAIN_IMPACT
    assert 12 <= edge.point[0] <= 12 + 25 * TICK
    launch(arena, "autocannon", [0.0, 0.0, 1.0], [20.0, 0.0, -15.0])
    ground = fly(arena)
    assert ground.impact == at.TERRAIN_IMPACT
    assert -15 * TICK <= ground.point[2] <= 0


def test_a_projectile_that_leaves_the_map_above_a_wall_does_not_damage_it() -> None:
    arena = flat_arena()
    build(arena, (10, 12), (-12, 12), Material.SOLID, height=1.0)
    place(arena, 0, 4, 0.5)
    launch(arena, "autocannon", [4.0, 0.5, 5.0], [25.0, 0.0, 0.0])
    assert fly(arena).point[0] >= 12
    assert not arena.simulation.state["worn"].any()


# Units


def test_a_friend_in_the_way_is_hit_and_the_unit_that_fired_is_not() -> None:
    arena = flat_arena("medium", "medium")
    place(arena, 0, -3, 0)
    place(arena, 1, 0, 0, heading=math.pi)
    place(arena, 2, 4, 0)
    launch(arena, "autocannon", [-3.0, 0.0, MUZZLE], [25.0, 0.0, 0.0], target=2)
    assert fly(arena).damage == pytest.approx([0, 8, 0, 0])


@pytest.mark.parametrize(("near", "far"), [(2, 3), (3, 2)])
def test_the_first_of_two_units_in_the_way_is_hit(near: int, far: int) -> None:
    arena = flat_arena("medium", "medium")
    place(arena, near, 1.5, 0)
    place(arena, far, 3, 0)
    launch(arena, "autocannon", [1.0, 0.0, MUZZLE], [60.0, 0.0, 0.0], target=2)  # it passes both in one tick
    flight = fly(arena)
    assert (flight.ticks, flight.impact) == (1, near)
    assert [bool(damage) for damage in flight.damage] == [unit == near for unit in range(4)]


def test_dead_units_are_not_hit() -> None:
    arena = flat_arena("medium", "medium")
    place(arena, 2, 1.5, 0)
    place(arena, 3, 3, 0)
    put(arena, 2, hit_points=0.0)
    launch(arena, "autocannon", [1.0, 0.0, MUZZLE], [60.0, 0.0, 0.0], target=2)
    assert fly(arena).impact == 3


@pytest.mark.parametrize(
    ("z", "shell_z", "is_hit"), [(0.0, 1.9, True), (0.0, 2.1, False), (0.0, 0.1, True), (3.0, 3.2, True), (3.0, 2.5, False)]
)
def test_a_projectile_above_or_below_a_unit_does_not_hit_it(z: float, shell_z: float, is_hit: bool) -> None:
    arena = flat_arena()
    if z:
        build(arena, (2, 3), (-12, 12), Material.OPEN, height=z)
    place(arena, 1, 2.1, 0, z, heading=math.pi)
    launch(arena, "autocannon", [1.0, 0.0, shell_z], [25.0, 0.0, 0.0])
    assert fly(arena).damage[1] == pytest.approx(8 if is_hit else 0)


@pytest.mark.parametrize(("y", "is_hit"), [(0.59, True), (-0.59, True), (0.61, False), (-0.61, False)])
def test_a_projectile_hits_within_the_radius_of_a_unit(y: float, is_hit: bool) -> None:
    arena = make_duel(metres=4.0)
    launch(arena, "autocannon", [0.0, y, MUZZLE], [25.0, 0.0, 0.0])
    assert (fly(arena).impact == 1) == is_hit


@pytest.mark.parametrize(("heading", "factor"), [(math.pi, 1.0), (math.pi / 2, 1.0), (1.0, 1.5), (0.0, 1.5)])
def test_a_projectile_from_behind_does_half_as_much_damage_again(heading: float, factor: float) -> None:
    assert shoot(make_duel(heading=heading), "autocannon").damage == pytest.approx([0, 8 * factor])


@pytest.mark.parametrize(
    ("name", "legs", "stability", "suppressed"), [("autocannon", 2.0, 5.0, 24), ("gauss", 12.5, 60.0, 0), ("missile", 0.0, 15.0, 0)]
)
def test_a_direct_hit_takes_legs_and_stability_and_suppresses(name: str, legs: float, stability: float, suppressed: int) -> None:
    arena = make_duel(metres=9.0)
    put(arena, 1, stability=70.0)
    before = shoot(arena, name).ticks - 1  # ticks in which it regains 1
    assert unit_field(arena, "legs", 1) == pytest.approx(75 - legs)
    assert unit_field(arena, "stability", 1) == pytest.approx(70 + before - stability + 1)
    assert [unit_field(arena, "suppressed", unit) for unit in (0, 1)] == [0, suppressed]


# Splash


def test_splash_falls_to_zero_at_its_edge_and_damages_friends_and_the_unit_that_fired() -> None:
    arena = flat_arena("medium", "medium", "medium")
    place(arena, 0, 1.0, 0)
    place(arena, 1, 0, -1.6)
    place(arena, 3, -2.1, 0)
    place(arena, 4, 0, 2.3)  # its middle is too far away
    for unit in range(6):
        put(arena, unit, stability=50.0)
    put(arena, 5, hit_points=0.0)  # the target, so that the missile flies straight
    launch(arena, "missile", [0.0, 0.0, 0.1], [0.0, 0.0, -12.0], target=5)
    flight = fly(arena)
    assert flight.impact == at.TERRAIN_IMPACT
    middles = [(1.0, 0, 1.0), (0, -1.6, 1.0), (99, 99, 1.0), (-2.1, 0, 1.0), (0, 2.3, 1.0)]
    nearness = [max(1 - math.dist(flight.point, middle) / 2.5, 0.0) for middle in middles]
    assert [share > 0 for share in nearness] == [True, True, False, True, False]
    assert flight.damage == pytest.approx([*(20 * share for share in nearness), 0], rel=1e-4)
    assert [unit_field(arena, "legs", unit) for unit in range(5)] == pytest.approx([75 - 20 * share for share in nearness])
    assert [unit_field(arena, "stability", unit) for unit in range(5)] == pytest.approx([51 - 7.5 * share for share in nearness])
    assert [unit_field(arena, "suppressed", unit) for unit in range(5)] == [0] * 5


def test_the_damage_of_splash_does_not_depend_on_the_side() -> None:
    arena = make_duel("heavy", metres=2.0, heading=0.0)
    launch(arena, "gauss", [0.0, 0.0, 0.0], [0.0, 0.0, -1.0], target=1)
    flight = fly(arena)
    assert flight.damage == pytest.approx([25 * (1 - math.dist(flight.point, (1, 0, 1)) / 1.5)] * 2, rel=1e-4)
    assert flight.damage[0] > 0


@pytest.mark.parametrize("name", ["autocannon", "smoke"])
def test_a_projectile_without_splash_damages_nothing_around_it(name: str) -> None:
    arena = make_duel(metres=1.4)
    launch(arena, name, [0.0, 0.0, 0.1], [0.0, 0.0, -12.0])
    flight = fly(arena)
    assert flight.impact == at.TERRAIN_IMPACT
    assert flight.damage == [0, 0]
    assert [unit_field(arena, "suppressed", unit) for unit in (0, 1)] == [0, 0]


def test_a_missile_at_close_range_damages_the_unit_that_fired() -> None:
    own, other = shoot(make_duel(metres=1.3), "missile").damage
    assert other == pytest.approx(40)  # a direct hit, without splash
    assert 0 < own < 20


# Smoke


def test_smoke_stands_where_its_shell_ends_and_replaces_the_oldest_cloud() -> None:
    arena = flat_arena("scout")
    cloud, left = arena.simulation.state["cloud"], arena.simulation.state["cloud_left"]

    def end_at(point: list[float]) -> None:
        put_shell(arena, 0, "smoke", point, [0.0, 0.0, 0.0], life=1)
        tick(arena)

    end_at([1.0, 2.0, 3.0])
    assert left[0].tolist() == [[200] + [0] * (CLOUDS - 1), [0] * CLOUDS]
    assert cloud[:, 0, 0, 0].tolist() == [1, 2, 3]
    tick(arena, times=99)
    end_at([4.0, 5.0, 6.0])
    tick(arena, times=49)
    assert left[0, 0].tolist() == [51, 151]
    end_at([7.0, 8.0, 9.0])
    assert left[0, 0].tolist() == [200, 150]
    assert cloud[:, 0, 0].T.tolist() == [[7, 8, 9], [4, 5, 6]]


@pytest.mark.parametrize("name", ["missile", "autocannon", "gauss"])
def test_only_smoke_leaves_clouds(name: str) -> None:
    arena = make_duel("scout")
    assert shoot(arena, name).impact == 1
    assert not arena.simulation.state["cloud_left"].any()


def test_smoke_affects_neither_units_nor_terrain() -> None:
    arena = make_duel()
    before = [unit_field(arena, field, 1) for field in STRUCK]
    flight = shoot(arena, "smoke")
    assert flight.impact == 1
    assert flight.damage == [0, 0]
    assert [unit_field(arena, field, 1) for field in STRUCK] == before
    arena = make_walled_duel(Material.GLASS)
    assert shoot(arena, "smoke").impact == at.TERRAIN_IMPACT
    assert not arena.simulation.state["worn"].any()
