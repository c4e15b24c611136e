"""One decision of five ticks: effects of several phases together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.decision import PHASES, StepEvents, decide
from esper.arena.sensing import sense
from esper.arena.specs import CLASSES, WEAPONS, Material
from esper.arena.state import cloned
from tests.arena.worlds import WEAPON, assert_identical, build, flat_arena, make_duel, make_orders, place, put, unit_field

Order = dict[int, dict[str, Any]]


def run_decisions(arena: Arena, orders: Order | None = None, times: int = 1) -> StepEvents:
    for _ in range(times):
        arena.state, step_events = decide(arena.state, make_orders(arena, orders), arena.tables)
    return step_events


def test_a_decision_is_a_quarter_of_a_second() -> None:
    arena = flat_arena()
    place(arena, 0, -4, 0)
    put(arena, 0, velocity=[5.5, 0.0, 0.0])
    run_decisions(arena, {0: {"forward": 1.0}})
    assert unit_field(arena, "position", 0)[0] == pytest.approx(-4 + 5.5 * 0.25, abs=1e-4)
    assert int(arena.state.status.decision[0]) == 1


def test_a_decision_leaves_the_state_before_it_as_it_was() -> None:
    arena = make_duel()
    before, copy = arena.state, cloned(arena.state)
    run_decisions(arena, {0: {"fire": "autocannon", "target": 1, "forward": 1.0}})
    assert_identical(before, copy)


@pytest.mark.slow
def test_a_laser_held_down_for_a_second_and_a_quarter_strikes_three_times() -> None:
    arena = make_duel()
    for _ in range(5):
        put(arena, 0, heat=0.0)
        run_decisions(arena, {0: {"fire": "laser", "target": 1}})
    assert unit_field(arena, "hit_points", 1) == 150 - 3 * 14


def test_an_autocannon_fires_in_the_first_and_the_fifth_tick() -> None:
    arena = make_duel(metres=9.0)
    run_decisions(arena, {0: {"fire": "autocannon", "target": 1}})
    assert unit_field(arena, "heat", 0) == pytest.approx(2 * 6 - 11 * 0.25, abs=1e-3)


def test_a_shot_heats_the_unit_that_fires_and_cooling_follows_in_the_same_tick() -> None:
    arena = make_duel()
    step_events = run_decisions(arena, {0: {"fire": "laser", "target": 1}})
    assert step_events.fired[0].tolist() == [True, False]
    assert step_events.taken[0, 0, 1] == pytest.approx(14 / 150)
    assert unit_field(arena, "heat", 0) == pytest.approx(22 - 11 * 0.25, abs=1e-3)
    assert unit_field(arena, "heat", 1) == pytest.approx(6 - 11 * 0.25, abs=1e-3)


def test_two_units_can_kill_each_other_in_one_tick() -> None:
    arena = make_duel()
    for unit in (0, 1):
        put(arena, unit, hit_points=10.0)
    run_decisions(arena, {0: {"fire": "laser", "target": 1}, 1: {"fire": "laser", "target": 0}})
    assert not arena.state.units.is_alive.any()


@pytest.mark.slow
def test_a_unit_that_dies_in_a_tick_does_nothing_in_the_next() -> None:
    arena = make_duel(metres=9.0)
    put(arena, 1, hit_points=10.0)
    place(arena, 1, 2.5, 0, heading=math.pi)
    run_decisions(arena, {0: {"fire": "laser", "target": 1}, 1: {"fire": "autocannon", "target": 0, "forward": 1.0}})
    assert unit_field(arena, "hit_points", 1) == 0
    run_decisions(arena, {1: {"fire": "missile", "target": 0, "forward": 1.0}}, times=4)
    assert unit_field(arena, "cooldown", 1)[WEAPON["missile"]] == 0
    assert unit_field(arena, "velocity", 1) == [0, 0, 0]


def test_venting_locks_weapons_in_the_tick_in_which_it_begins() -> None:
    arena = make_duel()
    step_events = run_decisions(arena, {0: {"fire": "laser", "target": 1, "vent": True}})
    assert not step_events.fired.any()
    assert run_decisions(arena, {0: {"fire": "laser", "target": 1}}).fired[0, 0]


@pytest.mark.slow
def test_too_much_fire_shuts_a_unit_down_until_it_has_cooled_to_half() -> None:
    arena = make_duel("heavy", metres=6.0)
    put(arena, 0, heat=120.0)
    run_decisions(arena, {0: {"fire": "missile", "target": 1, "forward": 1.0}})
    assert unit_field(arena, "is_shut_down", 0)
    put(arena, 0, heat=65.0 + 6.0, velocity=[0.0, 0.0, 0.0])
    x = unit_field(arena, "position", 0)[0]
    for _ in range(2):  # 10 heat leave in a second, venting or not
        step_events = run_decisions(arena, {0: {"fire": "laser", "target": 1, "forward": 1.0, "vent": True}})
        assert unit_field(arena, "is_shut_down", 0)
        assert not step_events.fired.any()
    assert unit_field(arena, "position", 0)[0] == x
    run_decisions(arena)
    assert not unit_field(arena, "is_shut_down", 0)
    assert run_decisions(arena, {0: {"fire": "laser", "target": 1}}).fired[0, 0]


@pytest.mark.slow
def test_a_gauss_hit_makes_a_shaken_unit_fall_and_it_lies_until_it_gets_up() -> None:
    arena = make_duel("heavy", metres=8.0)
    put(arena, 1, stability=55.0)
    run_decisions(arena, {0: {"fire": "gauss", "target": 1}}, times=2)
    assert 60 - 10 <= unit_field(arena, "fallen", 1) <= 60
    x = unit_field(arena, "position", 1)[0]
    put(arena, 1, fallen=11)
    for is_lying in (True, True, False):
        run_decisions(arena, {1: {"forward": -1.0}})
        assert (unit_field(arena, "fallen", 1) > 0) == is_lying
        assert (unit_field(arena, "position", 1)[0] == x) == is_lying


def test_autocannon_fire_suppresses_the_unit_it_hits() -> None:
    arena = make_duel(metres=6.0)
    run_decisions(arena, {0: {"fire": "autocannon", "target": 1}}, times=2)
    assert 20 <= unit_field(arena, "suppressed", 1) <= 24


@pytest.mark.slow
def test_a_painted_target_far_away_is_hit_by_a_missile() -> None:
    arena = flat_arena("medium", size=64)
    place(arena, 0, -15, 0)
    place(arena, 1, 15, 0, heading=math.pi)
    put(arena, 1, painted=100)
    assert run_decisions(arena, {0: {"fire": "missile", "target": 1}}).fired[0, 0]
    run_decisions(arena, times=10)
    assert unit_field(arena, "hit_points", 1) == 150 - 40


def test_a_gauss_shot_leads_a_target_that_runs_across() -> None:
    arena = make_duel("heavy", metres=16.0)
    place(arena, 1, 8, -2, heading=math.pi / 2)
    put(arena, 1, velocity=[0.0, 2.5, 0.0])
    run_decisions(arena, {0: {"fire": "gauss", "target": 1}, 1: {"forward": 1.0}})
    run_decisions(arena, {1: {"forward": 1.0}}, times=2)
    assert unit_field(arena, "hit_points", 1) == 200 - 50


def test_a_friend_in_the_line_of_fire_is_hurt() -> None:
    arena = flat_arena("medium", "medium")
    place(arena, 0, -4, 0)
    place(arena, 1, 0, 0, heading=math.pi)
    place(arena, 2, 4, 0)
    place(arena, 3, 10, 10)
    step_events = run_decisions(arena, {0: {"fire": "autocannon", "target": 2}})
    assert step_events.taken[0, 0, 1] > 0
    assert step_events.taken[0, 0, 2] == 0


@pytest.mark.slow
def test_smoke_that_is_shot_hides_and_thins_out_after_ten_seconds() -> None:
    arena = make_duel("scout", metres=16.0, size=32)
    run_decisions(arena, {0: {"fire": "smoke", "target": 1}})
    run_decisions(arena, times=5)
    left = int(arena.state.clouds.left.max())
    assert 150 < left <= 200

    def is_seen() -> bool:
        state = arena.state
        return bool(sense(state.units, state.world, state.clouds, arena.tables, contacts=1).seen[0, 0, 1])

    assert not is_seen()
    clouds = arena.state.clouds
    arena.state = arena.state._replace(clouds=clouds._replace(left=(clouds.left - (left - 6)).clamp_min(0)))
    run_decisions(arena)
    assert not is_seen()
    run_decisions(arena)
    assert is_seen()


def test_shots_wear_down_a_wall_after_the_ticks_of_a_decision() -> None:
    arena = make_duel(metres=8.0)
    build(arena, (0, 1), (-12, 12), Material.SOLID, height=3.0)
    run_decisions(arena, {0: {"fire": "autocannon", "target": 1}}, times=2)
    assert int(arena.state.world.hit_points[0, 12].min()) <= 100 - 2 * 8
    assert unit_field(arena, "hit_points", 1) == 150


def test_holding_the_zone_for_a_decision_scores_a_quarter_of_a_second() -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0)
    run_decisions(arena)
    assert arena.state.status.score[0].tolist() == pytest.approx([0.25, 0.0])
    assert int(arena.state.status.holder[0]) == 0


def test_every_phase_of_a_tick_is_listed_once() -> None:
    names = [name for name, _ in PHASES]
    assert len(set(names)) == len(names)


def test_a_unit_that_is_absent_takes_no_part() -> None:
    arena = flat_arena("medium", "medium")
    for unit in (1, 3):
        put(arena, unit, hit_points=0.0, present=False)
    place(arena, 0, -2, 0)
    place(arena, 1, 0, 0)
    place(arena, 2, 2, 0, heading=math.pi)
    place(arena, 3, 0, 0.2)
    before = unit_field(arena, "position", 3)
    step_events = run_decisions(arena, {0: {"fire": "laser", "target": 2}, 1: {"fire": "laser", "target": 2}, 3: {"forward": 1.0}})
    assert step_events.fired[0].tolist() == [True, False, False, False]
    assert unit_field(arena, "position", 3) == before
    assert arena.state.status.holder.tolist() == [-1]
    assert not step_events.taken[0, :, 1].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", WEAPONS)
def test_every_weapon_can_be_fired_by_a_class_that_owns_it_and_takes_what_it_should(name: str) -> None:
    owner = next(unit for unit, spec in CLASSES.items() if name in spec.weapons)
    arena = make_duel(owner, metres=4.0)
    assert run_decisions(arena, {0: {"fire": name, "target": 1}}).fired[0, 0]
    run_decisions(arena, times=2)
    assert (unit_field(arena, "hit_points", 1) < CLASSES[owner].hit_points) == (WEAPONS[name].damage > 0)
    assert (unit_field(arena, "painted", 1) > 0) == (name == "painter")
    assert bool(arena.state.clouds.left.any()) == (name == "smoke")
    assert torch.equal(arena.state.status.overflow, torch.zeros(1, dtype=torch.int64))
