"""Projectiles: flight, collisions and bursts."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.damage import Hits
from esper.arena.motion import move
from esper.arena.shells import Impact, advance, explode, smoke, splash_share, steer, terrain_hits
from esper.arena.specs import PHYSICS, WEAPONS, Material
from esper.arena.state import CLOUDS, Shells
from tests.arena.worlds import WEAPON, build, flat_arena, place, put

TICK = PHYSICS.tick_s


class Flight(NamedTuple):
    """How a projectile of unit 0 ended."""

    ticks: int
    impact: Impact
    hits: Hits

    @property
    def point(self) -> list[float]:
        return self.impact.point[0, 0, 0].tolist()

    @property
    def damage(self) -> list[float]:
        """Damage to every unit."""
        return self.hits.damage[0, 0].tolist()


def launch_shell(arena: Arena, name: str, position: list[float], velocity: list[float], *, target: int = 1) -> Shells:
    """One projectile, of unit 0."""
    shells = Shells(*(part.clone() for part in arena.state.shells))
    shells.position[:, 0, 0], shells.velocity[:, 0, 0] = torch.tensor(position), torch.tensor(velocity)
    shells.weapon[:, 0, 0], shells.target[:, 0, 0] = WEAPON[name], target
    shells.life[:, 0, 0] = arena.tables.weapons.life[WEAPON[name]]
    return shells


def fly(arena: Arena, shells: Shells, *, moves: bool = False) -> Flight:
    """Fly until the end. Targets stand still, or move at their velocity."""
    units = arena.state.units
    for tick in range(1, 200):
        if moves:
            units, _ = move(units, arena.state.world)
        shells, impact = advance(steer(shells, units, arena.tables), units, arena.state.world)
        if bool(impact.ended[0, 0, 0]):
            return Flight(tick, impact, explode(impact, units, arena.tables))
    raise AssertionError("it never ended")


def shoot_along_x(arena: Arena, name: str, *, moves: bool = False) -> Flight:
    """Shoot straight along x from the muzzle of unit 0."""
    x, y, z = arena.state.units.position[0, 0].tolist()
    return fly(arena, launch_shell(arena, name, [x, y, z + PHYSICS.muzzle_m], [WEAPONS[name].flight_mps, 0.0, 0.0]), moves=moves)


@pytest.mark.parametrize("name", ["autocannon", "missile", "gauss"])
def test_a_flight_takes_as_long_as_its_speed_says(name: str) -> None:
    arena = flat_arena(size=64)
    place(arena, 0, -6, 0)
    place(arena, 1, 3, 0, heading=math.pi)
    flight = shoot_along_x(arena, name)
    near, far = 9 - PHYSICS.radius_m, 9 + PHYSICS.radius_m
    speed = WEAPONS[name].flight_mps
    assert near / speed <= flight.ticks * TICK <= far / speed + TICK
    assert flight.impact.is_direct[0, 0, 0]
    assert int(flight.impact.victim[0, 0, 0]) == 1
    assert flight.damage[1] == WEAPONS[name].damage


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seconds"), [("autocannon", 0.6), ("missile", 5.2), ("smoke", 1.65)])
def test_a_projectile_that_meets_nothing_expires_without_damage(name: str, seconds: float) -> None:
    arena = flat_arena(size=128)
    place(arena, 0, -60, 0)
    put(arena, 1, hit_points=0.0)
    flight = shoot_along_x(arena, name)
    assert flight.ticks == round(seconds / TICK)
    assert not flight.impact.burst.any()
    assert not any(part.any() for part in flight.hits)


def test_a_homing_projectile_hits_a_target_that_runs_across() -> None:
    arena = flat_arena(size=64)
    place(arena, 0, -6, 0)
    place(arena, 1, 4, 0)
    put(arena, 1, velocity=[0.0, 5.5, 0.0])
    assert shoot_along_x(arena, "missile", moves=True).damage[1] == 40
    assert shoot_along_x(arena, "autocannon", moves=True).damage[1] == 0


def test_a_homing_projectile_keeps_its_speed_and_flies_straight_when_its_target_is_dead() -> None:
    arena = flat_arena(size=64)
    place(arena, 1, 4, 8)
    shells = launch_shell(arena, "missile", [0.0, 0.0, 5.0], [12.0, 0.0, 0.0])
    after = steer(shells, arena.state.units, arena.tables).velocity[0, 0, 0]
    assert float(after[1]) > 0
    assert float(torch.linalg.vector_norm(after)) == pytest.approx(12.0, rel=1e-5)
    put(arena, 1, hit_points=0.0)
    assert steer(shells, arena.state.units, arena.tables).velocity[0, 0, 0].tolist() == [12, 0, 0]


def test_only_ballistic_projectiles_fall() -> None:
    arena = flat_arena(size=64)
    for name, drop in (("gauss", PHYSICS.gravity_mps2 * TICK), ("autocannon", 0.0), ("smoke", 0.0)):
        shells = launch_shell(arena, name, [0.0, 0.0, 5.0], [10.0, 0.0, 0.0])
        after = steer(shells, arena.state.units, arena.tables).velocity[0, 0, 0].tolist()
        assert after == pytest.approx([10, 0, -drop], rel=1e-5)


def test_a_wall_stops_a_straight_projectile_and_is_hit() -> None:
    arena = flat_arena()
    build(arena, (2, 3), (-12, 12), Material.SOLID, height=4.0)
    place(arena, 0, -3, 0.5)
    place(arena, 1, 5, 0.5)
    flight = shoot_along_x(arena, "autocannon")
    assert flight.damage == [0, 0]
    assert not flight.impact.is_direct.any()
    assert 2 <= flight.point[0] <= 3
    column, damage = terrain_hits(flight.impact, arena.tables, 24)
    assert damage.sum() == 8
    assert int(column[0, damage[0].argmax()]) == (2 + 12) * 24 + 12


def test_a_lob_clears_a_wall_that_stops_a_straight_shot() -> None:
    arena = flat_arena()
    build(arena, (0, 1), (-12, 12), Material.SOLID, height=1.3)
    place(arena, 0, -9, 0.5)
    place(arena, 1, 9, 0.5, heading=math.pi)
    straight = launch_shell(arena, "autocannon", [-9.0, 0.5, 1.2], [25.0, 0.0, 0.0])
    assert fly(arena, straight).damage[1] == 0
    lob = 0.5 * PHYSICS.gravity_mps2 * 18 / 40
    lobbed = launch_shell(arena, "gauss", [-9.0, 0.5, 1.2], [40.0, 0.0, lob])
    assert fly(arena, lobbed).damage[1] == 50


@pytest.mark.parametrize("material", [Material.GLASS, Material.SOLID, Material.REINFORCED, Material.OPEN])
def test_every_solid_material_stops_a_shot(material: Material) -> None:
    arena = flat_arena()
    build(arena, (2, 3), (-12, 12), material, height=4.0)
    place(arena, 0, -3, 0.5)
    place(arena, 1, 5, 0.5)
    assert shoot_along_x(arena, "autocannon").damage[1] == 0


def test_foliage_stops_no_shot() -> None:
    arena = flat_arena()
    build(arena, (2, 3), (-12, 12), Material.FOLIAGE, height=4.0)
    place(arena, 0, -3, 0.5)
    place(arena, 1, 5, 0.5, heading=math.pi)
    assert shoot_along_x(arena, "autocannon").damage[1] == 8


def test_the_edge_of_the_map_and_the_ground_end_a_flight() -> None:
    arena = flat_arena()
    place(arena, 0, 8, 0)
    place(arena, 1, -8, 0)
    edge = shoot_along_x(arena, "autocannon")
    assert edge.impact.burst.any()
    assert 12 <= edge.point[0] <= 12 + 25 * TICK
    ground = fly(arena, launch_shell(arena, "autocannon", [0.0, 0.0, 1.0], [20.0, 0.0, -15.0]))
    assert ground.impact.burst.any()
    assert ground.point[2] <= 0


def test_a_projectile_that_leaves_the_map_above_a_wall_does_not_damage_it() -> None:
    arena = flat_arena()
    build(arena, (10, 12), (-12, 12), Material.SOLID, height=1.0)
    place(arena, 0, 4, 0.5)
    place(arena, 1, -8, 0)
    flight = fly(arena, launch_shell(arena, "autocannon", [4.0, 0.5, 5.0], [25.0, 0.0, 0.0]))
    assert flight.point[0] >= 12
    assert not terrain_hits(flight.impact, arena.tables, 24)[1].any()


def test_a_friend_in_the_way_is_hit_and_the_shooter_is_not() -> None:
    arena = flat_arena("medium", "medium")
    place(arena, 0, -3, 0)
    place(arena, 1, 0, 0, heading=math.pi)
    place(arena, 2, 4, 0)
    place(arena, 3, 4, 8)
    flight = fly(arena, launch_shell(arena, "autocannon", [-3.0, 0.0, 1.2], [25.0, 0.0, 0.0], target=2))
    assert flight.damage == [0, 8, 0, 0]


def test_the_first_of_two_units_in_the_way_is_hit() -> None:
    arena = flat_arena("medium", "medium")
    place(arena, 0, -9, 0)
    place(arena, 1, -9, 9)
    place(arena, 2, 3, 0)
    place(arena, 3, 1.5, 0, heading=math.pi)  # both are passed in the same tick
    flight = fly(arena, launch_shell(arena, "autocannon", [1.0, 0.0, 1.2], [60.0, 0.0, 0.0], target=2))
    assert int(flight.impact.victim[0, 0, 0]) == 3


def test_a_projectile_above_or_below_a_unit_does_not_hit_it() -> None:
    arena = flat_arena()
    place(arena, 0, -3, 0)
    place(arena, 1, 2, 0)
    assert fly(arena, launch_shell(arena, "autocannon", [-3.0, 0.0, 2.1], [25.0, 0.0, 0.0])).damage[1] == 0
    place(arena, 1, 2, 0, 3.0)
    assert fly(arena, launch_shell(arena, "autocannon", [-3.0, 0.0, 1.2], [25.0, 0.0, 0.0])).damage[1] == 0


@pytest.mark.parametrize(("heading", "factor"), [(math.pi, 1.0), (math.pi / 2, 1.0), (0.0, 1.5)])
def test_a_projectile_from_behind_hurts_half_as_much_again(heading: float, factor: float) -> None:
    arena = flat_arena()
    place(arena, 0, -3, 0)
    place(arena, 1, 2, 0, heading=heading)
    assert shoot_along_x(arena, "autocannon").damage[1] == 8 * factor


@pytest.mark.parametrize(
    ("name", "legs", "stability", "suppressed"), [("autocannon", 2.0, 5.0, 24), ("gauss", 12.5, 60.0, 0), ("missile", 0.0, 15.0, 0)]
)
def test_a_direct_hit_takes_legs_and_stability_and_suppresses(name: str, legs: float, stability: float, suppressed: int) -> None:
    arena = flat_arena()
    place(arena, 0, -5, 0)
    place(arena, 1, 4, 0, heading=math.pi)
    hits = shoot_along_x(arena, name).hits
    assert float(hits.legs[0, 1]) == pytest.approx(legs)
    assert float(hits.stability[0, 1]) == pytest.approx(stability)
    assert int(hits.suppressed[0, 1]) == suppressed
    assert not hits.suppressed[0, 0]


def burst_at(arena: Arena, name: str, point: list[float], *, victim: int | None = None) -> Impact:
    """Let a shell of unit 0 burst at a point."""
    none = torch.zeros_like(arena.state.shells.life, dtype=torch.bool)
    here = none.clone()
    here[:, 0, 0] = True
    at = arena.state.shells.position + torch.tensor(point)
    which = torch.full_like(arena.state.shells.target, victim or 0)
    return Impact(here, here, which, none if victim is None else here, at, at * 0 + 1.0, torch.full_like(which, WEAPON[name]))


def test_splash_falls_off_to_zero_at_its_edge_and_hurts_the_shooter_too() -> None:
    arena = flat_arena()
    place(arena, 0, 1.0, 0)
    place(arena, 1, -2.0, 0)
    middle = PHYSICS.tall_m / 2
    hits = explode(burst_at(arena, "missile", [0.0, 0.0, middle]), arena.state.units, arena.tables)
    assert hits.damage[0, 0].tolist() == pytest.approx([20 * (1 - 1 / 2.5), 20 * (1 - 2 / 2.5)])
    assert hits.legs[0].tolist() == pytest.approx(hits.damage[0, 0].tolist())
    assert hits.stability[0].tolist() == pytest.approx([7.5 * 0.6, 7.5 * 0.2])
    place(arena, 1, -2.5, 0)
    assert explode(burst_at(arena, "missile", [0.0, 0.0, middle]), arena.state.units, arena.tables).damage[0, 0, 1] == 0


def test_a_unit_that_is_hit_directly_takes_no_splash() -> None:
    arena = flat_arena()
    place(arena, 0, -8, 0)
    place(arena, 1, 0, 0, heading=-3 * math.pi / 4)
    hits = explode(burst_at(arena, "missile", [0.0, 0.0, 1.0], victim=1), arena.state.units, arena.tables)
    assert hits.damage[0, 0].tolist() == [0, 40]


@pytest.mark.parametrize("name", ["autocannon", "smoke"])
def test_a_projectile_without_splash_hurts_only_its_target(name: str) -> None:
    arena = flat_arena()
    place(arena, 1, 0, 0)
    assert not splash_share(burst_at(arena, name, [0.1, 0.0, 1.0]), arena.state.units, arena.tables.weapons).any()


def test_a_missile_at_close_range_hurts_the_shooter() -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0)
    place(arena, 1, 1.3, 0, heading=math.pi)
    own, other = shoot_along_x(arena, "missile").damage
    assert other == 40
    assert 0 < own < 20


def test_smoke_stands_where_its_shell_ends_and_the_newest_takes_the_place_of_the_oldest() -> None:
    arena = flat_arena("scout")
    clouds = arena.state.clouds
    clouds = smoke(clouds, burst_at(arena, "smoke", [1.0, 2.0, 3.0]), arena.tables)
    assert clouds.left[0, 0].tolist() == [200] + [0] * (CLOUDS - 1)
    assert clouds.position[0, 0, 0].tolist() == [1, 2, 3]
    assert not clouds.left[0, 1].any()
    clouds = smoke(clouds._replace(left=(clouds.left - 100).clamp_min(0)), burst_at(arena, "smoke", [4.0, 5.0, 6.0]), arena.tables)
    clouds = smoke(clouds._replace(left=(clouds.left - 50).clamp_min(0)), burst_at(arena, "smoke", [7.0, 8.0, 9.0]), arena.tables)
    assert clouds.left[0, 0].tolist() == [200, 150]
    assert clouds.position[0, 0].tolist() == [[7, 8, 9], [4, 5, 6]]


def test_nothing_but_smoke_leaves_clouds() -> None:
    arena = flat_arena("scout")
    assert not smoke(arena.state.clouds, burst_at(arena, "missile", [1.0, 2.0, 3.0]), arena.tables).left.any()


def test_smoke_damages_neither_units_nor_terrain() -> None:
    arena = flat_arena()
    place(arena, 0, -5, 0)
    place(arena, 1, 4, 0)
    flight = shoot_along_x(arena, "smoke")
    assert flight.impact.is_direct.any()
    assert not any(part.any() for part in flight.hits)
    assert not terrain_hits(flight.impact, arena.tables, 24)[1].any()
