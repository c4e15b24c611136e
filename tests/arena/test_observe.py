"""Observations follow the layout, in the frame of the unit, alike for both sides, without hidden knowledge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.native import layout as at
from esper.arena.observe import CELL_M, MATERIAL_SIGNALS, STATE_UNIT, VIEW, slices
from esper.arena.routes import ARRIVED
from esper.arena.specs import CLASSES, PHYSICS, ROLES, WEAPONS, Material
from esper.arena.start import Grids
from tests.arena.views import masks, observed, piece, senses, set_status, terrain
from tests.arena.worlds import ZONE_M, build, flat_arena, make_duel, place, put, small_config

CENTRE = VIEW // 2


@pytest.fixture
def duel() -> Arena:
    """Return a medium unit of each team on open ground, 8 m apart; the first looks along the x axis."""
    return make_duel(metres=8.0, y=0.5, heading=math.pi / 2)


def close(values: list[float], expected: list[float]) -> None:
    assert values == pytest.approx(expected, abs=1e-5)


# Oneself


def test_class_and_role_are_observed() -> None:
    arena = flat_arena("scout", "light", "medium", "heavy", size=32)
    for unit, name in enumerate(CLASSES):
        assert observed(arena, "own", unit, "class") == [float(other == name) for other in CLASSES]
        assert observed(arena, "own", unit, "role") == [float(role == CLASSES[name].role) for role in ROLES]
        assert observed(arena, "own", unit, "has_weapon") == [float(weapon in CLASSES[name].weapons) for weapon in WEAPONS]


def test_the_own_condition_is_observed_in_fractions() -> None:
    arena = flat_arena("light")
    light = CLASSES["light"]
    put(arena, 0, hit_points=light.hit_points / 4, legs=light.leg_points / 2, heat=1.25 * light.heat_cap, stability=30.0, fuel=1.5)
    put(arena, 0, fallen=15, suppressed=6, painted=50, is_shut_down=True, is_venting=True, is_grounded=False)
    expected = {
        "hit_points": 0.25, "legs": 0.5, "heat": 1.25, "stability": 0.3, "fuel": 0.75, "fallen": 0.25, "suppressed": 0.25, "painted": 0.5,
        "is_shut_down": 1.0, "is_venting": 1.0, "is_grounded": 0.0,
    }  # fmt: skip
    for name, value in expected.items():
        close(observed(arena, "own", 0, name), [value])
    assert observed(arena, "own", 1, "is_grounded") == [1.0]


def test_a_unit_without_jets_observes_no_fuel(duel: Arena) -> None:
    assert observed(duel, "own", 0, "fuel") == [0.0]


def test_loading_is_the_remaining_fraction_of_the_cooldown(duel: Arena) -> None:
    put(duel, 0, cooldown={"missile": 45})  # of 60 ticks
    expected = [0.75 if name == "missile" else 0.0 for name in WEAPONS]
    close(observed(duel, "own", 0, "loading"), expected)


def test_heading_and_position_are_in_the_frame_of_the_team(duel: Arena) -> None:
    close(observed(duel, "own", 0, "heading"), [1.0, 0.0])
    close(observed(duel, "own", 0, "position"), [-4.0 / 12, 0.5 / 12])
    close(observed(duel, "own", 1, "heading"), [0.0, -1.0])
    close(observed(duel, "own", 1, "position"), [-4.0 / 12, -0.5 / 12])


def test_height_is_observed_above_the_lowest_ground_and_above_the_ground_below(duel: Arena) -> None:
    build(duel, (-5, -3), (0, 1), Material.OPEN, height=2.0)
    place(duel, 0, -4.0, 0.5, 5.0)
    close(observed(duel, "own", 0, "height"), [0.5, 0.3])


def test_velocity_is_ahead_left_and_up(duel: Arena) -> None:
    put(duel, 1, velocity=[2.0, 3.0, -1.0])  # it looks along the y axis
    close(observed(duel, "own", 1, "velocity"), [0.3, -0.2, -0.1])


def test_the_zone_is_observed_relative_to_the_unit(duel: Arena) -> None:
    ahead, left, edge, is_inside = observed(duel, "own", 0, "zone")
    close([ahead, left], [4.0 / 12, -0.5 / 12])
    close([edge], [(math.hypot(4.0, 0.5) - ZONE_M) / 12])
    assert is_inside == float(edge <= 0)
    place(duel, 0, 0.5, 1.0, heading=math.pi / 2)
    ahead, left, _, is_inside = observed(duel, "own", 0, "zone")
    close([ahead, left, is_inside], [-1.0 / 12, 0.5 / 12, 1.0])
    close(observed(duel, "own", 0, "zone_radius"), [ZONE_M / 10])


def test_the_next_step_of_the_way_to_the_zone_turns_with_the_unit() -> None:
    arena = flat_arena("medium")
    place(arena, 0, -10.5, 0.5)
    close(observed(arena, "own", 0, "route"), [1.0, 0.0, 8.0 / 24])
    place(arena, 0, -10.5, 0.5, heading=math.pi / 2)
    close(observed(arena, "own", 0, "route")[:2], [0.0, -1.0])
    place(arena, 0, 0.5, 0.5)
    assert observed(arena, "own", 0, "route") == [0.0, 0.0, 0.0]


def test_the_score_is_observed_from_the_own_side() -> None:
    arena = flat_arena("medium", "light", seconds=100.0)
    for field, value in ((at.HELD, 200), (at.HELD_2, 400), (at.HOLDER, 1), (at.DECISION, 100)):  # ticks of 0.05 s
        set_status(arena, field, value)
    put(arena, 1, hit_points=0.0)
    for unit, score, holder, living in ((0, [0.2, 0.4], [0.0, 1.0], [0.5, 1.0]), (2, [0.4, 0.2], [1.0, 0.0], [1.0, 0.5])):
        close(observed(arena, "own", unit, "score"), score)
        close(observed(arena, "own", unit, "zone_holder"), holder)
        close(observed(arena, "own", unit, "living"), living)
        close(observed(arena, "own", unit, "clock"), [0.75])


# Others


def test_an_enemy_straight_ahead_has_its_distance_as_its_place(duel: Arena) -> None:
    close(observed(duel, "contacts", 0, "place"), [8.0 / 20, 0.0, 0.0])
    close(observed(duel, "contacts", 0, "bearing"), [1.0, 0.0])
    close(observed(duel, "contacts", 0, "nearness"), [1.0 / (1.0 + 8.0 / 5.0)])
    close(observed(duel, "contacts", 0, "heading"), [0.0, 1.0])  # it looks to the left


def test_turning_a_unit_turns_what_it_sees(duel: Arena) -> None:
    put(duel, 0, heading=math.pi / 2)
    close(observed(duel, "contacts", 0, "place"), [0.0, -8.0 / 20, 0.0])
    close(observed(duel, "contacts", 0, "bearing"), [0.0, -1.0])
    close(observed(duel, "contacts", 0, "heading"), [1.0, 0.0])


def test_a_contact_is_observed_with_its_condition(duel: Arena) -> None:
    medium = CLASSES["medium"]
    put(duel, 1, hit_points=medium.hit_points / 2, heat=medium.heat_cap / 4, velocity=[1.0, -2.0, 0.0], fallen=10, painted=5)
    put(duel, 1, position=[4.0, 0.5, 3.0])
    expected = {
        "is_there": [1.0], "is_seen": [1.0], "place": [0.4, 0.0, 0.15], "velocity": [0.1, -0.2], "hit_points": [0.5], "heat": [0.25],
        "class": [float(name == "medium") for name in CLASSES], "is_helpless": [1.0], "is_painted": [1.0],
    }  # fmt: skip
    for name, values in expected.items():
        close(observed(duel, "contacts", 0, name), values)
    put(duel, 1, fallen=0, painted=0)
    assert observed(duel, "contacts", 0, "is_helpless") == observed(duel, "contacts", 0, "is_painted") == [0.0]
    put(duel, 1, is_shut_down=True)
    assert observed(duel, "contacts", 0, "is_helpless") == [1.0]


def test_contacts_are_sorted_from_near_to_far_and_zero_behind_the_last() -> None:
    arena = flat_arena("medium", "light", "scout", contacts=4)
    for unit, x in ((0, -10.0), (3, 6.0), (4, -2.0), (5, 2.0)):
        place(arena, unit, x, 0.5)
    put(arena, 3, hit_points=0.0)
    contacts = piece(arena, "contacts")[0, 0]
    assert contacts[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0]
    close([observed(arena, "contacts", 0, "place", index=slot)[0] for slot in (0, 1)], [8.0 / 20, 12.0 / 20])
    assert not contacts[2:].any()


def test_allies_are_sorted_from_near_to_far_without_oneself_and_the_dead() -> None:
    arena = flat_arena("medium", "light", "scout", "heavy", allies=3)
    for unit, x in enumerate((-6.0, 2.0, -3.0, 0.0)):
        place(arena, unit, x, 0.5)
    put(arena, 3, hit_points=0.0)
    assert [observed(arena, "allies", 0, "is_there", index=slot) for slot in range(3)] == [[1.0], [1.0], [0.0]]
    close(observed(arena, "allies", 0, "place", index=0), [3.0 / 20, 0.0, 0.0])
    close(observed(arena, "allies", 0, "place", index=1), [8.0 / 20, 0.0, 0.0])
    assert observed(arena, "allies", 0, "class", index=0) == [float(name == "scout") for name in CLASSES]
    assert not piece(arena, "allies")[0, 0, 2].any()


def test_missing_team_members_are_observed_as_zeros() -> None:
    arena = flat_arena("medium", allies=4, contacts=5)
    assert not piece(arena, "allies").any()
    assert not piece(arena, "contacts")[:, :, 1:].any()


@pytest.fixture
def hidden() -> Arena:
    """Return an arena with an enemy behind a wall, further away than radar reaches, and one in the open."""
    arena = flat_arena("medium", "light", size=48)
    place(arena, 0, -10.0, 0.5)
    place(arena, 1, -20.0, -20.0)
    place(arena, 2, 10.0, 0.5)
    place(arena, 3, -4.0, 8.0)
    build(arena, (0, 1), (-10, 10), Material.REINFORCED, height=8.0)
    return arena


@pytest.mark.parametrize(
    "change",
    [
        {"position": [16.0, 3.0, 0.0]},
        {"hit_points": 1.0},
        {"heat": 10.0},
        {"velocity": [3.0, 1.0, 0.0]},
        {"heading": 2.0},
        {"fallen": 20},
        {"cooldown": dict.fromkeys(WEAPONS, 5)},
    ],
)
def test_an_enemy_that_is_not_sensed_changes_nothing(hidden: Arena, change: dict[str, Any]) -> None:
    assert [senses(hidden, 0, other) for other in (2, 3)] == [False, True]
    before, allowed = hidden.look().observation[0, :2].clone(), masks(hidden)
    put(hidden, 2, **change)
    assert torch.equal(hidden.look().observation[0, :2], before)
    assert all(torch.equal(mask[:2], allowed[name][:2]) for name, mask in masks(hidden).items())


def test_a_contact_that_is_sensed_but_not_seen_is_marked(hidden: Arena) -> None:
    put(hidden, 2, is_venting=True)  # known by its heat, behind the wall
    assert [observed(hidden, "contacts", 0, "is_seen", index=slot) for slot in range(2)] == [[1.0], [0.0]]
    assert observed(hidden, "contacts", 0, "is_there", index=1) == [1.0]


# Terrain


@pytest.mark.parametrize("material", [Material.LAVA, Material.WATER, Material.FOLIAGE, Material.REINFORCED])
def test_the_cell_in_the_middle_is_the_one_that_a_unit_stands_on(duel: Arena, material: Material) -> None:
    build(duel, (-5, -3), (0, 1), material)
    assert terrain(duel, 0, "material")[CENTRE, CENTRE] == MATERIAL_SIGNALS[material]


def test_every_material_looks_different() -> None:
    assert len(set(MATERIAL_SIGNALS.values())) == len(Material)


@pytest.mark.parametrize("quarters", range(4))
def test_terrain_ahead_and_to_the_left_lies_there_in_the_view(duel: Arena, quarters: int) -> None:
    heading = quarters * math.pi / 2
    place(duel, 0, 0.25, 0.25, heading=heading)
    ahead, left = 2 * CELL_M, CELL_M
    x = math.floor(0.25 + ahead * round(math.cos(heading)) - left * round(math.sin(heading)))
    y = math.floor(0.25 + ahead * round(math.sin(heading)) + left * round(math.cos(heading)))
    build(duel, (x, x + 1), (y, y + 1), Material.SOLID, height=2.0)
    expected = torch.zeros(VIEW, VIEW)
    expected[CENTRE + 2, CENTRE + 1] = 0.5
    torch.testing.assert_close(terrain(duel, 0, "rise"), expected)
    torch.testing.assert_close(terrain(duel, 0, "cover"), expected)


def test_glass_gives_no_cover_and_foliage_carries_no_unit(duel: Arena) -> None:
    place(duel, 0, 0.5, 0.5)
    build(duel, (2, 3), (0, 1), Material.GLASS, height=2.0)
    build(duel, (-1, 0), (0, 1), Material.FOLIAGE, height=3.0)
    rise, cover = terrain(duel, 0, "rise"), terrain(duel, 0, "cover")
    assert [float(view[CENTRE + 1, CENTRE]) for view in (rise, cover)] == [0.5, 0.0]
    assert [float(view[CENTRE - 1, CENTRE]) for view in (rise, cover)] == [0.0, 0.75]


def test_terrain_heights_are_observed_relative_to_the_feet(duel: Arena) -> None:
    place(duel, 0, 0.5, 0.5, 3.0)
    assert (terrain(duel, 0, "rise") == -0.75).all()
    assert (terrain(duel, 0, "cover") == 0.0).all()
    build(duel, (2, 3), (0, 1), Material.SOLID, height=15.0)
    assert terrain(duel, 0, "rise")[CENTRE + 1, CENTRE] == 1.0


# Dead units


def test_dead_and_absent_units_observe_zeros() -> None:
    arena = flat_arena("medium", "light", "scout", battles=2, smallest_team=1, state_view=True)
    arena.simulation.unit[at.HIT_POINTS, 1] = torch.tensor([50.0, 0.0, 20.0, 30.0, 10.0, 0.0])
    result = arena.look()
    assert result.whole is not None
    is_zero = ~result.observation.any(-1)
    assert torch.equal(is_zero, ~arena.is_alive)
    assert is_zero[1].tolist() == [False, True, False, False, False, True]
    assert result.whole.any(-1).all()  # the critic gets the whole battle


# Both sides


@pytest.fixture(scope="module")
def melee() -> Arena:
    """Return battles in the middle of things, on real ground that is partly destroyed, with units that see one another."""
    arena = Arena(small_config(team_size=3, pack=("scout", "medium", "heavy"), size=32, state_view=True, maps=2, battles=2), seed=1)
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(9, 2, 6, generator=generator)
    unit = arena.simulation.unit
    unit[at.X : at.Z] = (draw[:2] - 0.5) * 24
    unit[at.Z] = draw[2]
    unit[at.VELOCITY_X : at.VELOCITY_Z + 1] = (draw[3:6] - 0.5) * 10
    unit[at.COS], unit[at.SIN] = torch.cos(6 * draw[6]), torch.sin(6 * draw[6])
    unit[at.HEAT] = draw[7] * 60
    arena.simulation.number[at.FALLEN] = (draw[8] < 0.3).int() * 20
    worn = arena.simulation.state["worn"]
    worn.copy_(torch.where(torch.rand(worn.shape, generator=generator) < 0.5, at.DESTROYED, 0))
    for field, values in ((at.HELD, [60, 20]), (at.HELD_2, [160, 0]), (at.HOLDER, [1, -1]), (at.DECISION, [31, 4])):
        set_status(arena, field, values)
    return arena


def turned_around(arena: Arena) -> Arena:
    """Return the battles after half a turn of the world, with the teams in one another's place."""
    grids, team, size = arena.grids, arena.config.team_size, arena.config.size
    way = torch.where(grids.way < ARRIVED, (grids.way + 4) % 8, grids.way)
    height, material, way, route_m = (grid.flip(1, 2).contiguous() for grid in (grids.height, grids.material, way, grids.route_m))
    other = Arena(arena.config, seed=arena.seed, grids=Grids(height, material, grids.zone_radius, way, route_m))
    own, state = arena.simulation.state, other.simulation.state
    for name in ("unit", "number", "cooldown"):
        state[name].copy_(own[name].roll(team, 2))
    state["unit"][[at.X, at.Y, at.VELOCITY_X, at.VELOCITY_Y, at.COS, at.SIN]] *= -1
    state["worn"].copy_(own["worn"].view(-1, size, size).flip(1, 2).reshape(own["worn"].shape))
    state["status"].copy_(own["status"])
    state["status"][[at.HELD, at.HELD_2]] = own["status"][[at.HELD_2, at.HELD]]
    holder = own["status"][at.HOLDER]
    state["status"][at.HOLDER] = torch.where(holder < 0, holder, 1 - holder)
    return other


def test_both_teams_observe_the_same_of_a_battle_that_is_turned_around(melee: Arena) -> None:
    before, other = melee.look(), turned_around(melee).look()
    assert (melee.simulation.state["contact"] >= 0).any()
    assert not torch.equal(before.observation, other.observation)
    torch.testing.assert_close(other.observation.roll(3, 1), before.observation, atol=1e-4, rtol=0)
    assert before.whole is not None
    assert other.whole is not None
    torch.testing.assert_close(other.whole.roll(3, 1), before.whole)
    for name, mask in before.masks.items():
        assert torch.equal(other.masks[name].view(2, 6, *mask.shape[1:]).roll(3, 1).flatten(0, 1), mask), name


def test_the_view_of_the_whole_battle_has_the_own_team_first(melee: Arena) -> None:
    whole, place_of = piece(melee, "whole")[0], slices(STATE_UNIT)
    unit = melee.simulation.unit[:, 0]
    position = unit[at.X : at.Z + 1].T / torch.tensor([16.0, 16.0, 10.0])
    torch.testing.assert_close(whole[0, :, place_of["position"]], position)
    torch.testing.assert_close(whole[4, :, place_of["position"]], position.roll(3, 0) * torch.tensor([-1.0, -1.0, 1.0]))
    heat = unit[at.HEAT] / torch.tensor([CLASSES[name].heat_cap for name in melee.config.unit_classes])
    torch.testing.assert_close(whole[0, :, place_of["heat"]].squeeze(-1), heat)
    torch.testing.assert_close(whole[4, :, place_of["heat"]].squeeze(-1), heat.roll(3, 0))


def test_all_observations_stay_in_a_small_range(melee: Arena) -> None:
    result = melee.look()
    assert result.whole is not None
    assert result.observation.abs().max() < 5.0
    assert result.whole.abs().max() < 5.0


def test_a_unit_at_the_ceiling_in_a_corner_observes_finite_numbers(duel: Arena) -> None:
    put(duel, 0, position=[11.4, 11.4, PHYSICS.ceiling_m])
    assert duel.look().observation.isfinite().all()


def test_a_unit_in_the_place_of_an_enemy_observes_finite_numbers(duel: Arena) -> None:
    place(duel, 1, -4.0, 0.5)
    assert duel.look().observation.isfinite().all()
    assert observed(duel, "contacts", 0, "nearness") == [1.0]
    assert observed(duel, "contacts", 0, "bearing") == [0.0, 0.0]
