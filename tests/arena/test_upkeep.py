"""Effects without orders: timers, the ground underfoot, heat, balance, and the zone with the end of a battle."""

from __future__ import annotations

from typing import Any

import pytest

from esper.arena.arena import Arena
from esper.arena.config import ticks
from esper.arena.native import layout as at
from esper.arena.specs import CLASSES, PHYSICS, Material
from tests.arena.worlds import ZONE_M, build, flat_arena, place, put, put_cloud, score, tick, unit_field

TICK = PHYSICS.tick_s
AWAY = 9.0  # outside of the zone

# Timers


def test_every_timer_loses_a_tick_and_stops_at_zero() -> None:
    arena = flat_arena()
    put(arena, 0, fallen=1, suppressed=2, painted=3, cooldown={"laser": 1, "missile": 4})
    put(arena, 1, cooldown={"laser": 5})
    for expected in ([0, 1, 2], [0, 0, 1]):
        tick(arena)
        assert [unit_field(arena, name, 0) for name in ("fallen", "suppressed", "painted")] == expected
    cooldowns = [unit_field(arena, "cooldown", unit) for unit in (0, 1)]
    assert [(cooldown["laser"], cooldown["missile"]) for cooldown in cooldowns] == [(0, 2), (3, 0)]


def test_smoke_lasts_ten_seconds() -> None:
    arena = flat_arena("scout")
    put_cloud(arena, 0, [0.0, 0.0, 0.0], left=200, slot=1)
    tick(arena, times=199)
    assert arena.simulation.state["cloud_left"][0].tolist() == [[0, 1], [0, 0]]
    tick(arena, times=2)
    assert not arena.simulation.state["cloud_left"].any()


# Heat


@pytest.mark.parametrize("name", CLASSES)
def test_heat_falls_at_the_rate_of_the_class_and_three_times_as_fast_while_venting(name: str) -> None:
    arena = flat_arena(name)
    put(arena, 0, heat=60.0)
    put(arena, 1, heat=60.0)
    tick(arena, {0: {"vent": True}}, times=10)
    assert unit_field(arena, "heat", 0) == pytest.approx(60 - 3 * CLASSES[name].cooling_per_s * 0.5, rel=1e-4)
    assert unit_field(arena, "heat", 1) == pytest.approx(60 - CLASSES[name].cooling_per_s * 0.5, rel=1e-4)


def test_heat_is_never_below_zero() -> None:
    arena = flat_arena()
    build(arena, (-2, 2), (-2, 2), Material.WATER)
    place(arena, 0, 0.5, 0.5)
    put(arena, 0, heat=1.0)
    tick(arena, {0: {"vent": True}}, times=2)
    assert unit_field(arena, "heat", 0) == 0


def test_venting_lasts_as_long_as_it_is_ordered() -> None:
    arena = flat_arena()
    tick(arena, {0: {"vent": True}})
    assert [unit_field(arena, "is_venting", unit) for unit in (0, 1)] == [1, 0]
    tick(arena)
    assert not unit_field(arena, "is_venting", 0)


@pytest.mark.parametrize("values", [{"is_shut_down": True, "heat": 90.0}, {"hit_points": 0.0, "heat": 90.0}])
def test_units_that_are_dead_or_shut_down_do_not_vent(values: dict[str, Any]) -> None:
    arena = flat_arena()
    put(arena, 0, **values)
    tick(arena, {0: {"vent": True}})
    assert not unit_field(arena, "is_venting", 0)
    assert unit_field(arena, "heat", 0) == pytest.approx(90 if "hit_points" in values else 90 - 11 * TICK)  # wrecks do not cool


@pytest.mark.parametrize("name", CLASSES)
def test_above_its_cap_a_unit_shuts_down_until_it_has_cooled_to_half(name: str) -> None:
    arena = flat_arena(name)
    cap, cooling = CLASSES[name].heat_cap, CLASSES[name].cooling_per_s * TICK
    put(arena, 0, heat=cap + 0.4 * cooling)
    tick(arena)
    assert not unit_field(arena, "is_shut_down", 0)  # it cooled below its cap in the same tick
    put(arena, 0, heat=cap + 1.5 * cooling)
    tick(arena)
    assert unit_field(arena, "is_shut_down", 0)
    put(arena, 0, heat=0.5 * cap + 1.5 * cooling)
    tick(arena)
    assert unit_field(arena, "is_shut_down", 0)
    tick(arena)
    assert not unit_field(arena, "is_shut_down", 0)
    assert unit_field(arena, "heat", 0) == pytest.approx(0.5 * (cap - cooling))


def test_heat_does_not_rise_above_its_limit() -> None:
    arena = flat_arena()
    put(arena, 0, heat=10_000.0)
    tick(arena)
    assert unit_field(arena, "heat", 0) == PHYSICS.heat_limit_share * 100


def test_dead_units_are_not_shut_down_and_do_not_fall() -> None:
    arena = flat_arena()
    put(arena, 0, heat=140.0, stability=0.0, hit_points=0.0)
    tick(arena)
    assert (unit_field(arena, "is_shut_down", 0), unit_field(arena, "fallen", 0)) == (0, 0)


# The ground underfoot


def test_lava_heats_and_damages_body_and_legs_of_units_in_it() -> None:
    arena = flat_arena()
    build(arena, (-2, 2), (-2, 2), Material.LAVA)
    place(arena, 0, 0.5, 0.5)
    place(arena, 1, 0.5, -0.5, 10.0)  # in the air above it
    tick(arena, times=20)
    fields = ("heat", "hit_points", "legs")
    assert [unit_field(arena, field, 0) for field in fields] == pytest.approx([40 - 11, 150 - 5, 75 - 5], abs=1e-3)
    assert [unit_field(arena, field, 1) for field in fields] == [0, 150, 75]


def test_lava_kills_without_an_attacker() -> None:
    arena = flat_arena()
    build(arena, (-2, 2), (-2, 2), Material.LAVA)
    place(arena, 0, 0.5, 0.5)
    put(arena, 0, hit_points=0.3, legs=0.1)
    result = tick(arena, times=3)
    assert (unit_field(arena, "hit_points", 0), unit_field(arena, "legs", 0)) == (0, 0)
    assert result.died.tolist() == [[True, False]]
    assert arena.simulation.number[at.KILLER, 0].tolist() == [-1, -1]
    assert not arena.simulation.state["taken"].any()
    assert not arena.simulation.state["harm"].any()


def test_water_cools_units_in_it() -> None:
    arena = flat_arena()
    build(arena, (-2, 2), (-2, 2), Material.WATER)
    place(arena, 0, 0.5, 0.5)
    put(arena, 0, heat=90.0)
    tick(arena, times=20)
    assert unit_field(arena, "heat", 0) == pytest.approx(90 - 30 - 11, abs=1e-2)


def test_a_destroyed_column_is_open_ground() -> None:
    arena = flat_arena()
    build(arena, (0, 1), (0, 1), Material.SOLID, height=3.0)
    place(arena, 0, 0.5, 0.5, 3.0)
    tick(arena)
    assert unit_field(arena, "position", 0) == [0.5, 0.5, 3.0]
    arena.simulation.state["worn"][0, 12 * 24 + 12] = at.DESTROYED
    tick(arena, times=20)
    assert unit_field(arena, "position", 0) == [0.5, 0.5, 0.0]


# Balance


def test_a_unit_without_stability_lies_for_three_seconds_and_gets_up_with_all_of_it() -> None:
    arena = flat_arena()
    put(arena, 0, stability=0.0)
    for times, fallen in ((1, 60), (59, 1), (1, 0), (1, 0)):
        tick(arena, times=times)
        assert unit_field(arena, "fallen", 0) == fallen
        assert unit_field(arena, "stability", 0) == PHYSICS.stability


def test_a_lying_unit_does_not_lie_longer_after_another_hit() -> None:
    arena = flat_arena()
    put(arena, 0, stability=0.0, fallen=10)
    tick(arena)
    assert (unit_field(arena, "fallen", 0), unit_field(arena, "stability", 0)) == (9, PHYSICS.stability)


def test_standing_units_regain_stability_up_to_the_maximum() -> None:
    arena = flat_arena()
    put(arena, 0, stability=40.0)
    put(arena, 1, stability=99.5)
    tick(arena, times=20)
    assert unit_field(arena, "stability", 0) == pytest.approx(60, abs=1e-3)
    assert unit_field(arena, "stability", 1) == 100


# The zone


def holder(arena: Arena) -> int:
    """Return the team that holds the zone, or -1."""
    return int(arena.simulation.status[at.HOLDER, 0])


@pytest.mark.parametrize(
    ("x", "y", "z", "hit_points", "is_inside"),
    [
        (ZONE_M - 0.01, 0, 0, 60, True),
        (ZONE_M + 0.01, 0, 0, 60, False),
        (0, -ZONE_M + 0.01, 0, 60, True),
        (0, -ZONE_M - 0.01, 0, 60, False),
        (0.8 * ZONE_M, 0.8 * ZONE_M, 0, 60, False),
        (0, 0, 8, 60, True),
        (0, 0, 0, 0, False),
    ],
)
def test_the_zone_is_a_disc_around_the_centre_at_any_height_for_living_units(
    x: float, y: float, z: float, hit_points: float, is_inside: bool
) -> None:
    arena = flat_arena("scout", "scout")
    place(arena, 0, x, y, z)
    put(arena, 0, hit_points=hit_points)
    tick(arena)
    assert holder(arena) == (0 if is_inside else -1)


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ((), -1),
        ((0,), 0),  # a heavy
        ((3,), 1),  # the other team's light
        ((0, 3), 0),  # 85 tons against 35
        ((1, 2), 1),  # 35 against 85
        ((0, 2), -1),  # as many tons on both sides
        ((0, 1, 2, 3), -1),
        ((0, 1, 2), 0),
    ],
)
def test_more_tons_hold_the_zone_and_equal_tons_hold_nothing(inside: tuple[int, ...], expected: int) -> None:
    arena = flat_arena("heavy", "light")
    for unit in range(4):
        place(arena, unit, 0.5 if unit in inside else AWAY, 1.5 * unit - 2)
    tick(arena, times=3)
    assert holder(arena) == expected
    assert score(arena) == [3 if team == expected else 0 for team in (0, 1)]


# The end of a battle


def end(arena: Arena, *, seconds: tuple[float, float] = (0.0, 0.0), decision: int = 1) -> tuple[bool, int, bool]:
    """Return whether a battle with this score ends after so many decisions, its winner, and whether it ended by time."""
    status = arena.simulation.status
    status[at.HELD], status[at.HELD_2] = ticks(seconds[0]), ticks(seconds[1])
    status[at.DECISION] = decision - 1
    result = tick(arena, times=0)
    assert result.last[0, :3].tolist() == pytest.approx([decision, *seconds])
    return bool(result.ended[0]), int(result.winner[0]), bool(result.by_time[0])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((19.95, 0.0), (False, 0, False)),
        ((20.0, 19.95), (True, 0, False)),
        ((0.0, 20.0), (True, 1, False)),
        ((20.0, 20.0), (True, -1, False)),
    ],
)
def test_half_of_the_battles_seconds_in_the_zone_win_it(seconds: tuple[float, float], expected: tuple[bool, int, bool]) -> None:
    assert end(flat_arena(seconds=40.0), seconds=seconds) == expected


def test_the_score_that_wins_is_reached_in_exactly_as_many_ticks() -> None:
    arena = flat_arena(seconds=125.0)
    place(arena, 0, 0, 0)
    place(arena, 1, AWAY, 0)
    arena.simulation.status[at.HELD] = 1240
    assert not tick(arena, times=9).ended.any()
    result = tick(arena)
    assert score(arena) == [1250, 0]
    assert (result.ended.tolist(), result.winner.tolist(), result.by_time.tolist()) == ([True], [0], [False])


@pytest.mark.parametrize(
    ("dead", "expected"), [((0, 1), (True, 1)), ((2, 3), (True, 0)), ((0, 1, 2, 3), (True, -1)), ((0, 3), (False, -1)), ((1,), (False, -1))]
)
def test_the_last_team_alive_wins_and_no_team_alive_is_a_draw(dead: tuple[int, ...], expected: tuple[bool, int]) -> None:
    arena = flat_arena("medium", "medium")
    for unit in dead:
        put(arena, unit, hit_points=0.0)
    assert end(arena) == (*expected, False)


@pytest.mark.parametrize(("seconds", "winner"), [((20.0, 0.0), -1), ((0.0, 20.0), 1)])
def test_winning_the_zone_while_the_other_team_is_the_last_alive_is_a_draw(seconds: tuple[float, float], winner: int) -> None:
    arena = flat_arena(seconds=40.0)
    put(arena, 0, hit_points=0.0)
    assert end(arena, seconds=seconds) == (True, winner, False)


@pytest.mark.parametrize(("seconds", "winner"), [((3.0, 2.0), 0), ((2.0, 2.05), 1), ((2.0, 2.0), -1), ((0.0, 0.0), -1)])
def test_when_the_time_is_up_the_higher_score_wins(seconds: tuple[float, float], winner: int) -> None:
    arena = flat_arena(seconds=40.0)
    assert not end(arena, seconds=seconds, decision=159)[0]
    assert end(arena, seconds=seconds, decision=160) == (True, winner, True)


def test_a_win_by_elimination_in_the_last_decision_is_not_by_time() -> None:
    arena = flat_arena(seconds=40.0)
    put(arena, 0, hit_points=0.0)
    assert end(arena, seconds=(3.0, 2.0), decision=160) == (True, 1, False)
