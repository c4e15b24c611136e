"""Maps of a seed, and the start of battles on them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.arena.arena import Arena
from esper.arena.config import ArenaConfig
from esper.arena.native import layout as at
from esper.arena.native.simulation import Saved, Simulation
from esper.arena.specs import CLASSES
from esper.arena.start import Grids, make_grids
from tests.arena.worlds import assert_identical, decide, saved, select_battles, small_config

CONFIG = small_config(battles=4, team_size=3, maps=4, pack=("heavy", "scout"), smallest_team=1)
GRIDS = make_grids(CONFIG, seed=3)


def start_battles(
    places: list[int], *, episode: int = 0, seed: int = 3, largest_team: int = 3, config: ArenaConfig = CONFIG, grids: Grids = GRIDS
) -> Saved:  # fmt: skip
    """Return the states of battles that have just begun, [B, ...]."""
    simulation = Simulation(config, grids, battles=len(places), device=torch.device("cpu"))
    simulation.begin(seed=seed, largest_team=largest_team, places=places, episode=episode)
    return simulation.saved(range(len(places)))


def maps_of(state: Saved) -> Tensor:
    return state["status"][:, at.MAP]


def team_sizes(state: Saved) -> list[list[int]]:
    """Return the number of units that take part, by battle and team."""
    present = state["number"][:, at.IS_PRESENT]
    assert present[:, [0, 3]].all(), "the first units of a team take part"
    sizes: list[list[int]] = present.view(-1, 2, 3).sum(2).tolist()
    return sizes


# Maps


def test_a_seed_makes_the_same_maps_again_and_another_seed_others() -> None:
    assert_identical(make_grids(CONFIG, seed=3)._asdict(), GRIDS._asdict())
    assert not torch.equal(make_grids(CONFIG, seed=4).height, GRIDS.height)
    assert not torch.equal(GRIDS.height[0], GRIDS.height[1])


@pytest.mark.parametrize("only", [0, 2])
def test_one_map_alone_is_the_same_as_among_all_and_the_others_are_zeros(only: int) -> None:
    alone = make_grids(CONFIG, seed=3, only=only)
    others = torch.arange(CONFIG.maps) != only
    for name, grid in alone._asdict().items():
        whole = getattr(GRIDS, name)
        assert (grid.dtype, grid.shape) == (whole.dtype, whole.shape)
        assert torch.equal(grid[only], whole[only]), name
        assert not grid[others].any(), name


def test_the_first_maps_do_not_depend_on_how_many_there_are() -> None:
    fewer = make_grids(small_config(maps=2), seed=3)
    for name, grid in fewer._asdict().items():
        assert torch.equal(grid, getattr(GRIDS, name)[:2]), name


def test_an_arena_has_the_maps_of_its_seed_or_those_that_it_is_given() -> None:
    own, other = Arena(CONFIG, seed=3), Arena(CONFIG, seed=5, grids=GRIDS)
    assert_identical(own.grids._asdict(), GRIDS._asdict())
    other.reset(seed=6)
    assert other.grids is GRIDS


def test_foliage_has_no_floor_and_other_columns_have_the_floor_of_their_height() -> None:
    simulation = Simulation(CONFIG, GRIDS, battles=1, device=torch.device("cpu"))
    floor = (simulation.maps.column[..., at.C_FLOOR] * at.HEIGHT_STEP).view_as(GRIDS.height)
    is_foliage = GRIDS.material == 6
    assert torch.equal(floor, GRIDS.height.masked_fill(is_foliage, 0.0))
    assert is_foliage.any()


# Draws


def test_a_battle_depends_on_its_seed_place_and_episode_only() -> None:
    alone = start_battles([2], episode=5)
    assert_identical(alone, select_battles(start_battles([0, 2, 9], episode=5), torch.tensor([1])))
    fewer = small_config(battles=2, team_size=3, maps=4, pack=("heavy", "scout"), smallest_team=1)
    assert_identical(alone, start_battles([2], episode=5, config=fewer))
    places = list(range(16))
    draws = [start_battles(places), start_battles(places, episode=1), start_battles(places, seed=4)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(maps_of(draws[one]), maps_of(draws[other]))
        assert team_sizes(draws[one]) != team_sizes(draws[other])


def test_all_maps_are_fought_on() -> None:
    by_place = maps_of(start_battles(list(range(24))))
    by_episode = torch.cat([maps_of(start_battles([1], episode=episode)) for episode in range(24)])
    for maps in (by_place, by_episode):
        assert (torch.bincount(maps, minlength=4) >= 2).all()


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({"battles": 6, "battles_per_map": 2, "maps": 4}, [0, 0, 1, 1, 2, 2], [3, 3, 0, 0, 1, 1]),
        ({"battles": 5, "battles_per_map": 2, "maps": 8}, [0, 0, 1, 1, 2], [3, 3, 4, 4, 5]),
        ({"battles": 3, "battles_per_map": 1, "maps": 2}, [0, 1, 0], [1, 0, 1]),
        ({"battles": 4, "battles_per_map": 4, "maps": 3}, [0] * 4, [1] * 4),
    ],
)
def test_neighbouring_battles_share_a_map_and_go_on_to_the_next(settings: dict[str, Any], first: list[int], second: list[int]) -> None:
    config = small_config(**settings)
    empty = Grids(*(torch.zeros(config.maps, *grid.shape[1:], dtype=grid.dtype) for grid in GRIDS))
    for episode, maps in enumerate((first, second)):
        start = start_battles(list(range(config.battles)), episode=episode, largest_team=1, config=config, grids=empty)
        assert maps_of(start).tolist() == maps


@pytest.mark.parametrize(("largest", "sizes"), [(1, {1}), (2, {1, 2}), (3, {1, 2, 3})])
def test_teams_are_equal_and_of_all_sizes_that_are_allowed_now(largest: int, sizes: set[int]) -> None:
    drawn = team_sizes(start_battles(list(range(16)), largest_team=largest))
    assert all(one == other for one, other in drawn)
    assert {one for one, _ in drawn} == sizes


def test_without_a_smallest_team_all_units_take_part() -> None:
    config = small_config(team_size=3, maps=4)
    assert team_sizes(start_battles(list(range(8)), config=config)) == [[3, 3]] * 8
    assert team_sizes(start_battles(list(range(8)), config=config, largest_team=2)) == [[2, 2]] * 8


def test_the_largest_team_limits_battles_that_begin_later() -> None:
    arena = Arena(small_config(team_size=3, battles=2, maps=4, seconds=0.5), grids=GRIDS)
    arena.set_largest_team(2)
    assert team_sizes(saved(arena)) == [[3, 3]] * 2
    for _ in range(2):
        result = decide(arena)
    assert result.ended.all()
    assert team_sizes(saved(arena)) == [[2, 2]] * 2
    arena.reset()
    assert team_sizes(saved(arena)) == [[2, 2]] * 2


@pytest.mark.parametrize("size", [0, 4])
def test_an_impossible_largest_team_is_refused(size: int) -> None:
    arena = Arena(CONFIG, grids=GRIDS)
    with pytest.raises(ValueError, match=f"1 to 3 units; got {size}"):
        arena.set_largest_team(size)


def without_orders(state: Saved) -> Saved:
    """Leave out what a decision stores of its orders."""
    return {**state, "unit": state["unit"][:, : at.FORWARD]}


def test_an_ended_battle_is_replaced_by_that_of_the_next_episode() -> None:
    arena = Arena(CONFIG, seed=3, grids=GRIDS)
    before = without_orders(saved(arena))
    arena.simulation.unit[at.HIT_POINTS, [1, 3], :3] = 0.0
    assert decide(arena).ended.tolist() == [False, True, False, True]
    arena.simulation.unit[at.HIT_POINTS, 3, 3:] = 0.0
    assert decide(arena).ended.tolist() == [False, False, False, True]
    # A decision without orders changes nothing but the clock.
    assert arena.simulation.status[at.DECISION].tolist() == [2, 1, 2, 0]
    arena.simulation.status[at.DECISION] = 0
    after = without_orders(saved(arena))
    rows = torch.tensor([0, 2])
    assert_identical(select_battles(after, rows), select_battles(before, rows))
    for place, episode in ((1, 1), (3, 2)):
        begun = without_orders(start_battles([place], episode=episode))
        assert_identical(select_battles(after, torch.tensor([place])), begun)


def test_a_battle_keeps_nothing_of_the_one_before_it() -> None:
    arena = Arena(CONFIG, seed=3, grids=GRIDS)
    for name, tensor in arena.simulation.state.items():
        if name not in ("seed", "status"):
            tensor.fill_(1)
    arena.simulation.status[[at.HELD, at.HELD_2, at.HOLDER, at.DECISION]] = 1
    arena.simulation.unit[at.HIT_POINTS] = 0.0
    assert decide(arena).ended.all()
    assert_identical(saved(arena), start_battles([0, 1, 2, 3], episode=1))


# Units


def test_absent_units_have_no_hit_points_and_present_ones_have_all() -> None:
    start = start_battles(list(range(16)))
    present = start["number"][:, at.IS_PRESENT]
    classes = [CLASSES[name] for name in CONFIG.unit_classes]
    assert 0 < int(present.sum()) < present.numel()
    for field, full in ((at.HIT_POINTS, [one.hit_points for one in classes]), (at.LEGS, [one.leg_points for one in classes])):
        assert torch.equal(start["unit"][:, field], torch.tensor(full) * present)


def test_all_units_start_at_rest_on_flat_open_ground_facing_the_zone() -> None:
    start = start_battles([0, 1, 2, 3])
    unit, number = start["unit"], start["number"]
    zeros = [at.VELOCITY_X, at.VELOCITY_Y, at.VELOCITY_Z, at.HEAT, at.Z]
    assert not unit[:, zeros].any()
    assert not number[:, [at.FALLEN, at.SUPPRESSED, at.PAINTED, at.IS_SHUT_DOWN, at.IS_VENTING]].any()
    assert not start["cooldown"].any()
    assert not start["harm"].any()
    assert number[:, at.IS_GROUNDED].all()
    assert (unit[:, at.STABILITY] == 100).all()
    assert (unit[:, at.FUEL] == 2).all()
    x, y = unit[:, at.X], unit[:, at.Y]
    assert (-(x * unit[:, at.COS] + y * unit[:, at.SIN]) / torch.hypot(x, y) > math.cos(0.5)).all()
    maps = maps_of(start).unsqueeze(1)
    i, j = (x + 12).long(), (y + 12).long()
    assert not GRIDS.height[maps, i, j].any()
    assert not GRIDS.material[maps, i, j].any()


def test_nothing_is_in_the_air_and_no_score_is_kept() -> None:
    start = start_battles([0, 1], episode=7)
    assert not start["shell_count"][:, at.SHELL_LIFE].any()
    assert not start["cloud_left"].any()
    assert not start["worn"].any()
    assert not start["status"][:, [at.HELD, at.HELD_2, at.DECISION]].any()
    assert start["status"][:, at.HOLDER].tolist() == [-1, -1]
    assert start["status"][:, at.EPISODE].tolist() == [7, 7]
    assert start["status"][:, at.PLACE].tolist() == [0, 1]


def test_the_start_of_a_battle_is_symmetric_under_half_a_turn() -> None:
    unit = start_battles([0, 1, 2, 3])["unit"]
    turned = [at.X, at.Y, at.COS, at.SIN]
    assert torch.equal(unit[:, turned, 3:], -unit[:, turned, :3])
    assert torch.equal(unit[:, at.HIT_POINTS, 3:], unit[:, at.HIT_POINTS, :3])
    for name in ("height", "material", "route_m"):
        grid = getattr(GRIDS, name)
        assert torch.equal(grid.flip(1, 2), grid), name


@pytest.mark.parametrize("size", [16, 18])
def test_a_map_without_room_for_the_teams_is_refused_with_a_size_that_has_it(size: int) -> None:
    with pytest.raises(ValueError, match=rf"size {size} .*not for a team of 16; use a size of at least \d+"):
        Arena(small_config(team_size=16, size=size))
