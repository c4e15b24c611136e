"""Timers, the ground underfoot, heat and balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.specs import CLASSES, PHYSICS, Material
from esper.arena.upkeep import balance, clear_smoke, cool, count_down, endure
from tests.arena.worlds import WEAPON, build, flat_arena, make_orders, place, put, unit_field

TICK = PHYSICS.tick_s


def run_upkeep(arena: Arena, orders: dict[int, dict[str, Any]] | None = None, ticks: int = 1) -> None:
    """Everything that happens to units of itself."""
    for _ in range(ticks):
        units = count_down(arena.state.units, make_orders(arena, orders))
        units = endure(units, arena.state.world, torch.zeros_like(units.heat), arena.tables)
        arena.state = arena.state._replace(units=balance(cool(units, arena.tables)))


def test_every_timer_loses_a_tick_and_stops_at_zero() -> None:
    arena = flat_arena()
    put(arena, 0, fallen=1, suppressed=2, painted=3, cooldown=1)
    put(arena, 1, cooldown=5)
    run_upkeep(arena)
    assert [unit_field(arena, name, 0) for name in ("fallen", "suppressed", "painted")] == [0, 1, 2]
    run_upkeep(arena)
    assert [unit_field(arena, name, 0) for name in ("fallen", "suppressed", "painted")] == [0, 0, 1]
    assert unit_field(arena, "cooldown", 0)[WEAPON["laser"]] == 0
    assert unit_field(arena, "cooldown", 1)[WEAPON["laser"]] == 3


@pytest.mark.slow
def test_damage_between_units_is_remembered_for_ten_seconds() -> None:
    arena = flat_arena()
    put(arena, 0, harm=[0, 200])
    run_upkeep(arena, ticks=199)
    assert unit_field(arena, "harm", 0) == [0, 1]
    run_upkeep(arena, ticks=2)
    assert unit_field(arena, "harm", 0) == [0, 0]


def test_smoke_lasts_ten_seconds() -> None:
    clouds = flat_arena("scout").state.clouds
    clouds = clouds._replace(left=torch.full_like(clouds.left, 200))
    for _ in range(199):
        clouds = clear_smoke(clouds)
    assert (clouds.left == 1).all()
    clouds = clear_smoke(clear_smoke(clouds))
    assert not clouds.left.any()


@pytest.mark.parametrize("name", CLASSES)
def test_heat_leaves_at_the_rate_of_the_class_and_three_times_as_fast_while_venting(name: str) -> None:
    arena = flat_arena(name)
    put(arena, 0, heat=60.0)
    put(arena, 1, heat=60.0)
    run_upkeep(arena, {0: {"vent": True}}, ticks=10)
    assert unit_field(arena, "heat", 0) == pytest.approx(60 - 3 * CLASSES[name].cooling_per_s * 0.5, rel=1e-4)
    assert unit_field(arena, "heat", 1) == pytest.approx(60 - CLASSES[name].cooling_per_s * 0.5, rel=1e-4)


def test_heat_is_never_below_zero() -> None:
    arena = flat_arena()
    build(arena, (-2, 2), (-2, 2), Material.WATER)
    place(arena, 0, 0.5, 0.5)
    run_upkeep(arena, {0: {"vent": True}}, ticks=2)
    assert unit_field(arena, "heat", 0) == 0


def test_venting_lasts_as_long_as_it_is_ordered() -> None:
    arena = flat_arena()
    run_upkeep(arena, {0: {"vent": True}})
    assert [unit_field(arena, "is_venting", unit) for unit in (0, 1)] == [True, False]
    run_upkeep(arena)
    assert not unit_field(arena, "is_venting", 0)


@pytest.mark.parametrize("values", [{"is_shut_down": True, "heat": 90.0}, {"hit_points": 0.0}])
def test_dead_units_and_units_shut_down_do_not_vent(values: dict[str, Any]) -> None:
    arena = flat_arena()
    put(arena, 0, **values)
    run_upkeep(arena, {0: {"vent": True}})
    assert not unit_field(arena, "is_venting", 0)


@pytest.mark.parametrize("name", CLASSES)
def test_above_its_cap_a_unit_shuts_down_until_it_has_cooled_to_half(name: str) -> None:
    arena = flat_arena(name)
    cap, cooling = CLASSES[name].heat_cap, CLASSES[name].cooling_per_s
    put(arena, 0, heat=cap + 0.4 * cooling * TICK)
    run_upkeep(arena)
    assert not unit_field(arena, "is_shut_down", 0)  # it cooled below its cap in the same tick
    put(arena, 0, heat=cap + 1.5 * cooling * TICK)
    run_upkeep(arena)
    assert unit_field(arena, "is_shut_down", 0)
    put(arena, 0, heat=0.5 * cap + 1.5 * cooling * TICK)
    run_upkeep(arena)
    assert unit_field(arena, "is_shut_down", 0)
    run_upkeep(arena)
    assert not unit_field(arena, "is_shut_down", 0)
    assert unit_field(arena, "heat", 0) <= 0.5 * cap


def test_heat_does_not_rise_above_its_limit() -> None:
    arena = flat_arena()
    put(arena, 0, heat=10_000.0)
    run_upkeep(arena)
    assert unit_field(arena, "heat", 0) == PHYSICS.heat_limit_share * 100


def test_the_dead_are_not_shut_down() -> None:
    arena = flat_arena()
    put(arena, 0, heat=140.0, hit_points=0.0)
    run_upkeep(arena)
    assert not unit_field(arena, "is_shut_down", 0)


def test_lava_heats_and_hurts_body_and_legs_of_units_in_it() -> None:
    arena = flat_arena()
    build(arena, (-2, 2), (-2, 2), Material.LAVA)
    place(arena, 0, 0.5, 0.5)
    place(arena, 1, 0.5, -0.5, 3.0)  # above it
    run_upkeep(arena, ticks=20)
    assert unit_field(arena, "heat", 0) == pytest.approx(40 - 11, abs=1e-2)
    assert unit_field(arena, "hit_points", 0) == pytest.approx(150 - 5, abs=1e-3)
    assert unit_field(arena, "legs", 0) == pytest.approx(75 - 5, abs=1e-3)
    assert (unit_field(arena, "heat", 1), unit_field(arena, "hit_points", 1), unit_field(arena, "legs", 1)) == (0, 150, 75)


def test_lava_kills_without_an_attacker() -> None:
    arena = flat_arena()
    build(arena, (-2, 2), (-2, 2), Material.LAVA)
    place(arena, 0, 0.5, 0.5)
    put(arena, 0, hit_points=0.3)
    run_upkeep(arena, ticks=3)
    assert unit_field(arena, "hit_points", 0) == 0
    assert not arena.state.units.harm.any()


def test_water_cools_units_in_it() -> None:
    arena = flat_arena()
    build(arena, (-2, 2), (-2, 2), Material.WATER)
    place(arena, 0, 0.5, 0.5)
    put(arena, 0, heat=90.0)
    run_upkeep(arena, ticks=20)
    assert unit_field(arena, "heat", 0) == pytest.approx(90 - 30 - 11, abs=1e-2)


def test_a_hard_landing_costs_legs_by_how_hard_it_was() -> None:
    arena = flat_arena()
    hard = torch.tensor([[2.0, 100.0]])
    units = endure(arena.state.units, arena.state.world, hard, arena.tables)
    assert units.legs[0].tolist() == [75 - 2 * PHYSICS.landing_damage, 0]
    assert units.hit_points[0].tolist() == [150, 150]


def test_a_unit_without_stability_lies_for_three_seconds_and_gets_up_with_all_of_it() -> None:
    arena = flat_arena()
    put(arena, 0, stability=0.0)
    run_upkeep(arena)
    assert unit_field(arena, "fallen", 0) == 60
    assert unit_field(arena, "stability", 0) == PHYSICS.stability
    run_upkeep(arena, ticks=59)
    assert unit_field(arena, "fallen", 0) == 1
    run_upkeep(arena)
    assert unit_field(arena, "fallen", 0) == 0
    run_upkeep(arena)
    assert unit_field(arena, "fallen", 0) == 0
    assert unit_field(arena, "stability", 0) == PHYSICS.stability


def test_a_lying_unit_does_not_lie_longer_after_another_hit() -> None:
    arena = flat_arena()
    put(arena, 0, stability=0.0, fallen=10)
    run_upkeep(arena)
    assert unit_field(arena, "fallen", 0) == 9
    assert unit_field(arena, "stability", 0) == PHYSICS.stability


def test_standing_units_recover_stability_up_to_the_maximum() -> None:
    arena = flat_arena()
    put(arena, 0, stability=40.0)
    put(arena, 1, stability=99.5)
    run_upkeep(arena, ticks=20)
    assert unit_field(arena, "stability", 0) == pytest.approx(60, abs=1e-3)
    assert unit_field(arena, "stability", 1) == 100


def test_the_dead_do_not_fall() -> None:
    arena = flat_arena()
    put(arena, 0, stability=0.0, hit_points=0.0)
    run_upkeep(arena)
    assert unit_field(arena, "fallen", 0) == 0
