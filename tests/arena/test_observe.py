"""Observations follow the layout, in the frame of the unit, alike for both sides, without hidden knowledge."""

from __future__ import annotations

import math

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.observe import CELL_M, MATERIAL_SIGNALS, STATE_UNIT, VIEW, slices, width
from esper.arena.specs import CLASSES, PHYSICS, ROLES, WEAPONS, Material
from tests.arena.views import look, observed, piece, terrain
from tests.arena.worlds import WEAPON, build, flat_arena, half_turned, make_duel, place, put, small_config

CENTRE = VIEW // 2


@pytest.fixture
def duel() -> Arena:
    """A medium unit of each team on open ground, 8 m apart; the first looks along the x axis."""
    return make_duel(metres=8.0, y=0.5, heading=math.pi / 2)


def close(values, expected):
    assert values == pytest.approx(expected, abs=1e-5)


# Oneself


@pytest.mark.slow
def test_class_and_role_are_observed():
    arena = flat_arena("scout", "light", "medium", "heavy", size=32)
    for unit, name in enumerate(CLASSES):
        assert observed(arena, "own", unit, "class") == [float(other == name) for other in CLASSES]
        assert observed(arena, "own", unit, "role") == [float(role == CLASSES[name].role) for role in ROLES]
        assert observed(arena, "own", unit, "has_weapon") == [float(weapon in CLASSES[name].weapons) for weapon in WEAPONS]


def test_the_own_condition_is_observed_in_fractions():
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


def test_a_unit_without_jets_observes_no_fuel(duel):
    assert observed(duel, "own", 0, "fuel") == [0.0]


def test_loading_is_the_remaining_fraction_of_the_cooldown(duel):
    cooldown = torch.zeros(len(WEAPONS))
    cooldown[WEAPON["missile"]] = 45  # of 60 ticks
    put(duel, 0, cooldown=cooldown)
    expected = [0.75 if name == "missile" else 0.0 for name in WEAPONS]
    close(observed(duel, "own", 0, "loading"), expected)


def test_heading_and_position_are_in_the_frame_of_the_team(duel):
    close(observed(duel, "own", 0, "heading"), [1.0, 0.0])
    close(observed(duel, "own", 0, "position"), [-4.0 / 12, 0.5 / 12])
    close(observed(duel, "own", 1, "heading"), [0.0, -1.0])
    close(observed(duel, "own", 1, "position"), [-4.0 / 12, -0.5 / 12])


def test_height_is_observed_above_the_lowest_ground_and_above_the_ground_below(duel):
    build(duel, (-5, -3), (0, 1), Material.OPEN, height=2.0)
    place(duel, 0, -4.0, 0.5, 5.0)
    close(observed(duel, "own", 0, "height"), [0.5, 0.3])


def test_velocity_is_ahead_left_and_up(duel):
    put(duel, 1, velocity=[2.0, 3.0, -1.0])  # it looks along the y axis
    close(observed(duel, "own", 1, "velocity"), [0.3, -0.2, -0.1])


def test_the_zone_is_observed_relative_to_the_unit(duel):
    radius = float(duel.state.world.zone_radius[0])
    ahead, left, edge, is_inside = observed(duel, "own", 0, "zone")
    close([ahead, left], [4.0 / 12, -0.5 / 12])
    close([edge], [(math.hypot(4.0, 0.5) - radius) / 12])
    assert is_inside == float(edge <= 0)
    place(duel, 0, 0.5, 1.0, heading=math.pi / 2)
    ahead, left, _, is_inside = observed(duel, "own", 0, "zone")
    close([ahead, left, is_inside], [-1.0 / 12, 0.5 / 12, 1.0])
    close(observed(duel, "own", 0, "zone_radius"), [radius / 10])


def test_the_next_step_of_the_way_to_the_zone_turns_with_the_unit():
    arena = flat_arena("medium")
    place(arena, 0, -10.5, 0.5)
    ahead, left, length = observed(arena, "own", 0, "route")
    close([ahead, left], [1.0, 0.0])
    assert 0.0 < length < 0.5
    place(arena, 0, -10.5, 0.5, heading=math.pi / 2)
    close(observed(arena, "own", 0, "route")[:2], [0.0, -1.0])
    place(arena, 0, 0.5, 0.5)
    assert observed(arena, "own", 0, "route") == [0.0, 0.0, 0.0]


def test_the_score_is_observed_from_the_own_side():
    arena = flat_arena("medium", "light", seconds=100.0)
    status = arena.state.status
    arena.state = arena.state._replace(
        status=status._replace(score=torch.tensor([[10.0, 20.0]]), holder=torch.tensor([1]), decision=torch.tensor([100]))
    )
    put(arena, 1, hit_points=0.0)
    for unit, score, holder, living in ((0, [0.2, 0.4], [0.0, 1.0], [0.5, 1.0]), (2, [0.4, 0.2], [1.0, 0.0], [1.0, 0.5])):
        close(observed(arena, "own", unit, "score"), score)
        close(observed(arena, "own", unit, "zone_holder"), holder)
        close(observed(arena, "own", unit, "living"), living)
        close(observed(arena, "own", unit, "clock"), [0.75])


# Others


def test_an_enemy_straight_ahead_has_its_distance_as_its_place(duel):
    close(observed(duel, "contacts", 0, "place"), [8.0 / 20, 0.0, 0.0])
    close(observed(duel, "contacts", 0, "bearing"), [1.0, 0.0])
    close(observed(duel, "contacts", 0, "nearness"), [1.0 / (1.0 + 8.0 / 5.0)])
    close(observed(duel, "contacts", 0, "heading"), [0.0, 1.0])  # it looks to the left


def test_turning_a_unit_turns_what_it_sees(duel):
    put(duel, 0, heading=math.pi / 2)
    close(observed(duel, "contacts", 0, "place"), [0.0, -8.0 / 20, 0.0])
    close(observed(duel, "contacts", 0, "bearing"), [0.0, -1.0])
    close(observed(duel, "contacts", 0, "heading"), [1.0, 0.0])


def test_a_contact_is_observed_with_its_condition(duel):
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


def test_contacts_are_sorted_from_near_to_far_and_zero_behind_the_last():
    arena = flat_arena("medium", "light", "scout", contacts=4)
    for unit, x in ((0, -10.0), (3, 6.0), (4, -2.0), (5, 2.0)):
        place(arena, unit, x, 0.5)
    put(arena, 3, hit_points=0.0)
    contacts = piece(look(arena), arena.config, "contacts")[0, 0]
    assert contacts[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0]
    close([observed(arena, "contacts", 0, "place", index=slot)[0] for slot in (0, 1)], [8.0 / 20, 12.0 / 20])
    assert not contacts[2:].any()


def test_allies_are_sorted_from_near_to_far_without_oneself_and_the_dead():
    arena = flat_arena("medium", "light", "scout", "heavy", allies=3)
    for unit, x in enumerate((-6.0, 2.0, -3.0, 0.0)):
        place(arena, unit, x, 0.5)
    put(arena, 3, hit_points=0.0)
    assert [observed(arena, "allies", 0, "is_there", index=slot) for slot in range(3)] == [[1.0], [1.0], [0.0]]
    close(observed(arena, "allies", 0, "place", index=0), [3.0 / 20, 0.0, 0.0])
    close(observed(arena, "allies", 0, "place", index=1), [8.0 / 20, 0.0, 0.0])
    assert observed(arena, "allies", 0, "class", index=0) == [float(name == "scout") for name in CLASSES]
    assert not piece(look(arena), arena.config, "allies")[0, 0, 2].any()


def test_missing_team_members_are_observed_as_zeros():
    arena = flat_arena("medium", allies=4, contacts=5)
    assert not piece(look(arena), arena.config, "allies").any()
    assert not piece(look(arena), arena.config, "contacts")[:, :, 1:].any()


@pytest.fixture
def hidden():
    """An enemy behind a wall, further away than radar reaches, and one in the open."""
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
        {"cooldown": [5] * len(WEAPONS)},
    ],
)
def test_an_enemy_that_is_not_sensed_changes_nothing(hidden, change):
    before = look(hidden)
    assert hidden.state.senses.sensed[0, 0].tolist() == [False, False, False, True]
    put(hidden, 2, **change)
    after = look(hidden)
    assert torch.equal(before.observation[0, :2], after.observation[0, :2])
    assert all(torch.equal(before.masks[name][:2], after.masks[name][:2]) for name in before.masks)


def test_a_contact_that_is_sensed_but_not_seen_is_marked(hidden):
    put(hidden, 2, is_venting=True)  # known by its heat, behind the wall
    assert [observed(hidden, "contacts", 0, "is_seen", index=slot) for slot in range(2)] == [[1.0], [0.0]]
    assert observed(hidden, "contacts", 0, "is_there", index=1) == [1.0]


# Terrain


@pytest.mark.parametrize("material", [Material.LAVA, Material.WATER, Material.FOLIAGE, Material.REINFORCED])
def test_the_cell_in_the_middle_is_the_one_that_a_unit_stands_on(duel, material):
    build(duel, (-5, -3), (0, 1), material)
    assert terrain(duel, 0, "material")[CENTRE, CENTRE] == MATERIAL_SIGNALS[material]


def test_every_material_looks_different():
    assert len(set(MATERIAL_SIGNALS.values())) == len(Material)


@pytest.mark.parametrize("quarters", range(4))
def test_terrain_ahead_and_to_the_left_lies_there_in_the_view(duel, quarters):
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


def test_glass_gives_no_cover_and_foliage_carries_no_unit(duel):
    place(duel, 0, 0.5, 0.5)
    build(duel, (2, 3), (0, 1), Material.GLASS, height=2.0)
    build(duel, (-1, 0), (0, 1), Material.FOLIAGE, height=3.0)
    rise, cover = terrain(duel, 0, "rise"), terrain(duel, 0, "cover")
    assert (rise[CENTRE + 1, CENTRE], cover[CENTRE + 1, CENTRE]) == (0.5, 0.0)
    assert (rise[CENTRE - 1, CENTRE], cover[CENTRE - 1, CENTRE]) == (0.0, 0.75)


def test_terrain_heights_are_observed_relative_to_the_feet(duel):
    place(duel, 0, 0.5, 0.5, 3.0)
    assert (terrain(duel, 0, "rise") == -0.75).all()
    assert (terrain(duel, 0, "cover") == 0.0).all()
    build(duel, (2, 3), (0, 1), Material.SOLID, height=40.0)
    assert terrain(duel, 0, "rise")[CENTRE + 1, CENTRE] == 1.0


# Both sides


@pytest.fixture(scope="module")
def melee():
    """A battle in the middle of things, on real ground, with units that see one another."""
    arena = Arena(small_config(team_size=3, pack=("scout", "medium", "heavy"), size=32, state_view=True, maps=2, battles=2), seed=1)
    generator = torch.Generator().manual_seed(0)
    units = arena.state.units
    draw = torch.rand(2, 6, 8, generator=generator)
    arena.state = arena.state._replace(
        units=units._replace(
            position=torch.cat(((draw[..., :2] - 0.5) * 24, draw[..., 2:3]), -1),
            velocity=(draw[..., 3:6] - 0.5) * 10,
            heading=(draw[..., 6] - 0.5) * 6.0,
            heat=draw[..., 7] * 60,
        ),
        status=arena.state.status._replace(score=torch.tensor([[3.0, 8.0], [1.0, 0.0]]), holder=torch.tensor([1, -1])),
    )
    return arena


def test_both_sides_see_the_same_of_a_battle_that_is_turned_around(melee):
    before = look(melee)
    assert melee.state.senses.is_contact.any()
    other = half_turned(melee.state)
    other = melee._sensed(other)
    seen = melee.observer.observe(other).roll(3, 1)
    torch.testing.assert_close(seen, before.observation, atol=1e-4, rtol=0)
    torch.testing.assert_close(melee.observer.whole_battle(other).roll(3, 1), before.whole)


def test_the_view_of_the_whole_battle_has_the_own_team_first(melee):
    whole = look(melee).whole.unflatten(-1, (6, width(STATE_UNIT)))
    place_of = slices(STATE_UNIT)
    position = melee.state.units.position[0] / torch.tensor([16.0, 16.0, 10.0])
    torch.testing.assert_close(whole[0, 0, :, place_of["position"]], position)
    turned_around = position.roll(3, 0) * torch.tensor([-1.0, -1.0, 1.0])
    torch.testing.assert_close(whole[0, 4, :, place_of["position"]], turned_around)
    heat = melee.state.units.heat[0] / melee.tables.units.heat_cap
    torch.testing.assert_close(whole[0, 0, :, place_of["heat"]].squeeze(-1), heat)


def test_all_observations_stay_in_a_small_range(melee):
    assert look(melee).observation.abs().max() < 5.0
    assert look(melee).whole.abs().max() < 5.0


def test_a_unit_above_the_ceiling_observes_finite_numbers(duel):
    put(duel, 0, position=[11.4, 11.4, PHYSICS.ceiling_m])
    assert look(duel).observation.isfinite().all()
