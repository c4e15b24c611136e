"""Holding the zone, and the end of a battle."""

from __future__ import annotations

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.specs import PHYSICS
from esper.arena.zone import Ending, find_ended, hold, is_in_zone
from tests.arena.worlds import flat_arena, place, put

AWAY = 9.0  # of a zone of at most a sixth of the map's 24


def hold_zone(arena: Arena) -> tuple[int, list[float]]:
    status = hold(arena.state.status, arena.state.units, arena.state.world, arena.tables)
    return int(status.holder[0]), status.score[0].tolist()


def ended_by(arena: Arena, *, score: tuple[float, float] = (0.0, 0.0), decision: int = 1) -> tuple[bool, int, bool]:
    status = arena.state.status._replace(score=torch.tensor([score]), decision=torch.tensor([decision]))
    ending: Ending = find_ended(status, arena.state.units, arena.config)
    return bool(ending.ended[0]), int(ending.winner[0]), bool(ending.by_time[0])


def test_the_zone_is_a_disc_around_the_centre_at_any_height_and_the_dead_are_not_in_it() -> None:
    arena = flat_arena("scout", "scout")
    radius = float(arena.state.world.zone_radius[0])
    place(arena, 0, radius - 0.01, 0)
    place(arena, 1, 0, -radius - 0.01)
    place(arena, 2, 0, -radius + 0.01, 8.0)
    place(arena, 3, 0, 0)
    put(arena, 3, hit_points=0.0)
    assert is_in_zone(arena.state.units, arena.state.world)[0].tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("inside", "holder"),
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
def test_more_tons_hold_the_zone_and_equal_tons_hold_nothing(inside: tuple[int, ...], holder: int) -> None:
    arena = flat_arena("heavy", "light")
    for unit in range(4):
        place(arena, unit, 0.5 * unit if unit in inside else AWAY, 0)
    score = [0.0, 0.0]
    if holder >= 0:
        score[holder] = PHYSICS.tick_s
    assert hold_zone(arena) == (holder, pytest.approx(score))


def test_the_score_counts_seconds() -> None:
    arena = flat_arena()
    place(arena, 0, 0, 0)
    place(arena, 1, AWAY, 0)
    status = arena.state.status
    for _ in range(40):
        status = hold(status, arena.state.units, arena.state.world, arena.tables)
    assert status.score[0].tolist() == pytest.approx([2.0, 0.0])


def test_half_of_the_battles_seconds_in_the_zone_win_it() -> None:
    arena = flat_arena(seconds=40.0)
    assert ended_by(arena, score=(19.95, 0.0)) == (False, 0, False)
    assert ended_by(arena, score=(20.0, 19.95)) == (True, 0, False)
    assert ended_by(arena, score=(0.0, 20.0)) == (True, 1, False)


@pytest.mark.slow
def test_the_score_that_wins_is_reached_in_exactly_as_many_ticks() -> None:
    arena = flat_arena(seconds=125.0)
    place(arena, 0, 0, 0)
    place(arena, 1, AWAY, 0)
    status = arena.state.status
    for _ in range(1249):
        status = hold(status, arena.state.units, arena.state.world, arena.tables)
    assert not find_ended(status, arena.state.units, arena.config).ended.any()
    status = hold(status, arena.state.units, arena.state.world, arena.tables)
    assert find_ended(status, arena.state.units, arena.config).ended.all()


def test_both_at_the_winning_score_is_a_draw() -> None:
    assert ended_by(flat_arena(seconds=40.0), score=(20.0, 20.0)) == (True, -1, False)


@pytest.mark.parametrize(("dead", "outcome"), [((0, 1), (True, 1)), ((2, 3), (True, 0)), ((0, 1, 2, 3), (True, -1))])
def test_the_last_team_alive_wins_and_no_team_alive_is_a_draw(dead: tuple[int, ...], outcome: tuple[bool, int]) -> None:
    arena = flat_arena("medium", "medium")
    for unit in dead:
        put(arena, unit, hit_points=0.0)
    assert ended_by(arena) == (*outcome, False)


def test_one_death_ends_no_battle_of_two() -> None:
    arena = flat_arena("medium", "medium")
    put(arena, 0, hit_points=0.0)
    put(arena, 3, hit_points=0.0)
    assert not ended_by(arena)[0]


def test_winning_the_zone_while_the_other_team_is_the_last_alive_is_a_draw() -> None:
    arena = flat_arena(seconds=40.0)
    put(arena, 0, hit_points=0.0)
    assert ended_by(arena, score=(20.0, 0.0)) == (True, -1, False)
    assert ended_by(arena, score=(0.0, 20.0)) == (True, 1, False)


@pytest.mark.parametrize(("score", "winner"), [((3.0, 2.0), 0), ((2.0, 3.0), 1), ((2.0, 2.0), -1), ((0.0, 0.0), -1)])
def test_at_the_last_second_the_higher_score_wins(score: tuple[float, float], winner: int) -> None:
    arena = flat_arena(seconds=40.0)
    assert not ended_by(arena, score=score, decision=159)[0]
    assert ended_by(arena, score=score, decision=160) == (True, winner, True)


def test_a_win_in_the_last_second_is_not_decided_by_time() -> None:
    arena = flat_arena(seconds=40.0)
    put(arena, 0, hit_points=0.0)
    assert ended_by(arena, score=(3.0, 2.0), decision=160) == (True, 1, False)
