"""The start of battles."""

from __future__ import annotations

import math

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.start import fresh
from esper.arena.state import State, cloned, replace_rows, select
from tests.arena.worlds import assert_identical, half_turned, select_battles, small_config

ARENA = Arena(small_config(battles=4, team_size=3, maps=4, pack=("heavy", "scout"), smallest_team=1), seed=3)


def start_battles(places: list[int], episodes: list[int], *, seed: int = 3, largest_team: int = 3) -> State:
    return fresh(
        torch.tensor(places),
        torch.tensor(episodes),
        ARENA.config,
        ARENA.tables,
        ARENA.atlas,
        seed=seed,
        largest_team=torch.tensor(largest_team),
    )


def test_a_battle_depends_on_its_place_and_number_only() -> None:
    alone = start_battles([2], [5])
    among = start_battles([0, 2, 2, 9], [0, 5, 4, 5])
    assert_identical(alone, select_battles(among, torch.tensor([1])))


def test_places_and_numbers_lead_to_different_maps_and_all_maps_are_fought_on() -> None:
    for status in (start_battles(list(range(64)), [0] * 64).status, start_battles([1] * 64, list(range(64))).status):
        counts = torch.bincount(status.map, minlength=4)
        assert (counts >= 4).all()
    assert not torch.equal(start_battles(list(range(64)), [0] * 64).status.map, start_battles(list(range(64)), [0] * 64, seed=4).status.map)


def test_a_world_has_the_terrain_of_its_map() -> None:
    state = start_battles(list(range(8)), [1] * 8)
    for part, maps in zip(state.world, ARENA.atlas.worlds, strict=True):
        assert torch.equal(part, maps[state.status.map])


def test_teams_are_as_large_as_one_another_and_of_all_allowed_sizes() -> None:
    present = start_battles(list(range(64)), [0] * 64).units.present
    first, second = present[:, :3].sum(1), present[:, 3:].sum(1)
    assert torch.equal(first, second)
    assert set(first.tolist()) == {1, 2, 3}
    assert present[:, 0].all()


@pytest.mark.parametrize(("largest", "sizes"), [(1, {1}), (2, {1, 2})])
def test_no_team_is_larger_than_is_allowed_now(largest: int, sizes: set[int]) -> None:
    present = start_battles(list(range(64)), [0] * 64, largest_team=largest).units.present
    assert set(present[:, :3].sum(1).tolist()) == sizes


def test_absent_units_have_no_hit_points_and_present_ones_have_all() -> None:
    units = start_battles(list(range(16)), [0] * 16).units
    assert torch.equal(units.is_alive, units.present)
    assert torch.equal(units.hit_points, ARENA.tables.units.hit_points * units.present)
    assert torch.equal(units.legs, ARENA.tables.units.legs * units.present)


def test_all_units_start_at_rest_on_flat_open_ground_facing_the_zone() -> None:
    state = start_battles([0, 1, 2, 3], [0] * 4)
    units = state.units
    for name in ("velocity", "heat", "fallen", "suppressed", "painted", "cooldown", "is_shut_down", "is_venting", "harm"):
        assert not getattr(units, name).any(), name
    assert units.is_grounded.all()
    assert (units.stability == 100).all()
    assert (units.fuel == 2).all()
    to_centre = torch.atan2(-units.position[..., 1], -units.position[..., 0])
    assert (torch.cos(units.heading - to_centre) > math.cos(0.5)).all()
    i, j = ((units.position[..., axis] + 12).long() for axis in (0, 1))
    rows = torch.arange(4).unsqueeze(1)
    assert not state.world.floor[rows, i, j].any()
    assert not state.world.material[rows, i, j].any()


def test_nothing_is_in_the_air_and_no_score_is_kept() -> None:
    state = start_battles([0, 1], [7, 8])
    assert not state.shells.life.any()
    assert not state.clouds.left.any()
    assert not state.status.score.any()
    assert state.status.holder.tolist() == [-1, -1]
    assert state.status.episode.tolist() == [7, 8]
    assert not state.status.decision.any()


def test_the_start_of_a_battle_is_symmetric_under_half_a_turn() -> None:
    state = start_battles([0, 1, 2, 3], [0] * 4)
    other = half_turned(state)
    assert torch.allclose(other.units.position, state.units.position)
    assert torch.allclose(other.units.heading, state.units.heading, atol=1e-6)
    for name in ("height", "material", "hit_points", "floor", "tops", "way"):
        assert torch.equal(getattr(other.world, name), getattr(state.world, name)), name


def test_battles_are_replaced_alike_by_choosing_and_by_writing_over_them() -> None:
    """A recorded step does the one, a step on the CPU the other."""
    old, new = start_battles([0, 1, 2, 3], [0] * 4), start_battles([0, 1, 2, 3], [1] * 4)
    chosen = select(torch.tensor([False, True, False, True]), new, old)
    rows = torch.tensor([1, 3])
    written = replace_rows(cloned(old), rows, select_battles(new, rows))
    assert_identical(written, chosen)
    assert_identical(select_battles(chosen, torch.tensor([0, 2])), start_battles([0, 2], [0, 0]))
    assert_identical(select_battles(chosen, rows), start_battles([1, 3], [1, 1]))


def test_a_map_without_room_for_the_teams_is_refused_with_a_size_that_has_it() -> None:
    with pytest.raises(ValueError, match=r"size 16 .*not for a team of 16; use a size of at least \d+"):
        Arena(small_config(team_size=16, size=16))
