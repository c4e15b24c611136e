"""Sensing of enemies by sight, radar, heat and paint."""

from __future__ import annotations

import pytest

from esper.arena.arena import Arena
from esper.arena.specs import CLASSES, PHYSICS, Material
from tests.arena.views import sees, senses
from tests.arena.worlds import build, contacts, flat_arena, place, put, put_cloud


def place_apart(metres: float, *pack: str) -> Arena:
    """Return an arena with unit 0 and the first enemy so far apart along x. All others are dead."""
    arena = flat_arena(*pack, size=64)
    for unit in range(arena.config.units):
        put(arena, unit, hit_points=0.0)
    for unit, x in ((0, -metres / 2), (arena.config.team_size, metres / 2)):
        place(arena, unit, x, 0.5)
        put(arena, unit, hit_points=50.0)
    return arena


def wall(arena: Arena, material: Material = Material.REINFORCED, height: float = 6.0) -> None:
    build(arena, (0, 1), (-32, 32), material, height=height)


# Sight


def test_a_unit_in_the_open_sees_as_far_as_its_sight_reaches() -> None:
    assert sees(place_apart(29.9))
    assert not sees(place_apart(30.1))
    assert not senses(place_apart(30.1))


def test_sight_is_mutual() -> None:
    arena = place_apart(20)
    assert sees(arena, 0, 1)
    assert sees(arena, 1, 0)
    wall(arena)
    assert not sees(arena, 0, 1)
    assert not sees(arena, 1, 0)


@pytest.mark.parametrize(
    ("material", "height", "is_seen"),
    [
        (Material.REINFORCED, 1.5, True),  # below the eyes
        (Material.REINFORCED, 1.6875, False),
        (Material.SOLID, 6.0, False),
        (Material.OPEN, 6.0, False),
        (Material.FOLIAGE, 3.0, False),
        (Material.GLASS, 6.0, True),
    ],
)
def test_terrain_between_two_units_hides_them_unless_it_is_low_or_glass(material: Material, height: float, is_seen: bool) -> None:
    arena = place_apart(20)
    wall(arena, material, height)
    assert sees(arena) == is_seen


def test_a_unit_in_foliage_neither_sees_nor_is_seen() -> None:
    arena = place_apart(20)
    build(arena, (-11, -9), (-2, 2), Material.FOLIAGE, height=3.0)
    assert not sees(arena, 0, 1)
    assert not sees(arena, 1, 0)


def test_each_pair_of_enemies_has_a_line_of_its_own() -> None:
    arena = flat_arena("medium", "medium", "medium", size=64)
    for unit in range(6):
        place(arena, unit, -20.0 if unit < 3 else 5.0, 6.0 * (unit % 3) + 0.5)
    build(arena, (-7, -6), (0, 1), Material.REINFORCED, height=6.0)  # between 0 and 3 only
    build(arena, (-8, -7), (6, 7), Material.REINFORCED, height=6.0)  # 1 and 4, and the crossing of 0 and 5 with 2 and 3
    seen = [[sees(arena, unit, other) for other in (3, 4, 5)] for unit in range(3)]
    assert seen == [[False, True, False], [True, False, True], [False, True, True]]
    assert [[sees(arena, other, unit) for other in (3, 4, 5)] for unit in range(3)] == seen


# Radar, heat and paint


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("beyond_m", "is_sensed"), [(-0.1, True), (0.1, False)])
def test_radar_senses_through_walls_up_to_its_range(name: str, beyond_m: float, is_sensed: bool) -> None:
    arena = place_apart(PHYSICS.radar_m * CLASSES[name].radar_quality + beyond_m, name)
    wall(arena)
    assert senses(arena) == is_sensed
    assert not sees(arena)


def test_a_unit_with_better_radar_senses_units_that_do_not_sense_it() -> None:
    arena = place_apart(18, "scout", "heavy")
    wall(arena)
    place(arena, 3, 9, 0.5)
    put(arena, 3, hit_points=50.0)
    put(arena, 2, hit_points=0.0)
    assert senses(arena, 0, 3)  # the radar of a scout reaches 21 m
    assert not senses(arena, 3, 0)  # that of a heavy 11.2 m


def test_hot_or_venting_units_are_sensed_through_walls() -> None:
    arena = place_apart(24)
    wall(arena)
    put(arena, 1, heat=79.0)
    assert not senses(arena)
    put(arena, 1, heat=81.0)
    assert senses(arena)
    assert not sees(arena)
    assert not senses(arena, 1, 0)  # it does not make the other hot
    put(arena, 1, heat=0.0, is_venting=True)
    assert senses(arena)
    place(arena, 1, 12.9, 0.5)  # 24.9 m
    assert senses(arena)
    place(arena, 1, 13.1, 0.5)  # 25.1 m
    assert not senses(arena)


def test_a_painted_unit_is_sensed_by_the_whole_team_anywhere() -> None:
    arena = place_apart(60, "scout", "medium")
    put(arena, 1, hit_points=50.0)
    assert not senses(arena, 0, 2)
    put(arena, 2, painted=1)
    assert senses(arena, 0, 2)
    assert senses(arena, 1, 2)
    assert not sees(arena, 0, 2)
    assert not senses(arena, 2, 0)


# Smoke


@pytest.mark.parametrize(
    ("x", "y", "left", "is_seen"),
    [
        (0.0, 0.5, 200, False),
        (0.0, 0.5, 1, False),
        (0.0, 0.5, 0, True),
        (0.0, 0.5 + PHYSICS.cloud_m - 0.1, 200, False),
        (0.0, 0.5 + PHYSICS.cloud_m + 0.1, 200, True),
        (10 + PHYSICS.cloud_m - 0.1, 0.5, 200, False),  # around the unit
        (10 + PHYSICS.cloud_m + 0.1, 0.5, 200, True),  # behind it
        (-10 - PHYSICS.cloud_m + 0.1, 0.5, 200, False),
        (-10 - PHYSICS.cloud_m - 0.1, 0.5, 200, True),
    ],
)
@pytest.mark.parametrize(("owner", "slot"), [(0, 0), (1, 1)])
def test_smoke_blocks_sight_through_it_while_it_lasts(x: float, y: float, left: int, is_seen: bool, owner: int, slot: int) -> None:
    arena = place_apart(20)
    put_cloud(arena, owner, [x, y, PHYSICS.eye_m], left=left, slot=slot)
    assert sees(arena, 0, 1) == is_seen
    assert sees(arena, 1, 0) == is_seen


def test_smoke_high_above_a_line_does_not_block_it() -> None:
    arena = place_apart(20)
    put_cloud(arena, 0, [0.0, 0.5, PHYSICS.eye_m + PHYSICS.cloud_m - 0.1])
    assert not sees(arena)
    put_cloud(arena, 0, [0.0, 0.5, PHYSICS.eye_m + PHYSICS.cloud_m + 0.1])
    assert sees(arena)


def test_smoke_does_not_blind_radar() -> None:
    arena = place_apart(10)
    put_cloud(arena, 0, [0.0, 0.5, 1.2])
    assert senses(arena)
    assert not sees(arena)


# Contacts


def test_units_sense_only_living_enemies_and_dead_units_sense_nothing() -> None:
    arena = flat_arena("medium", "medium")
    for unit in range(4):
        place(arena, unit, 3.0 * unit - 4, 0)
    put(arena, 3, hit_points=0.0)
    assert [[senses(arena, unit, other) for other in (2, 3)] for unit in (0, 1)] == [[True, False], [True, False]]
    assert [[senses(arena, unit, other) for other in (0, 1)] for unit in (2, 3)] == [[True, True], [False, False]]
    assert not sees(arena, 0, 3)
    assert not sees(arena, 3, 0)


def test_contacts_are_the_nearest_that_are_sensed_from_near_to_far() -> None:
    arena = flat_arena("medium", "medium", "medium", size=64, contacts=2)
    place(arena, 0, 0, 0)
    for unit, metres in ((3, 9.0), (4, 3.0), (5, 6.0)):
        place(arena, unit, metres, 0)
    assert contacts(arena, 0) == [4, 5]
    put(arena, 4, hit_points=0.0)
    assert contacts(arena, 0) == [5, 3]
    put(arena, 5, hit_points=0.0)
    assert contacts(arena, 0) == [3]
    put(arena, 0, hit_points=0.0)
    assert contacts(arena, 0) == []


def test_the_distance_of_contacts_counts_height() -> None:
    arena = flat_arena("medium", "medium")
    place(arena, 0, 0, 0)
    place(arena, 2, 4.0, 0, 4.0)
    place(arena, 3, 0, 5.0)
    assert contacts(arena, 0) == [3, 2]


def test_contacts_at_the_same_distance_are_in_the_order_of_units() -> None:
    arena = flat_arena("medium", "medium", "medium", contacts=3)
    place(arena, 0, 0, 0)
    for unit, (x, y) in {3: (0, 5), 4: (5, 0), 5: (0, -5)}.items():
        place(arena, unit, x, y)
    assert contacts(arena, 0) == [3, 4, 5]


def test_the_second_team_has_contacts_too() -> None:
    arena = flat_arena("medium", "medium")
    for unit, x in enumerate((-6.0, -3.0, 3.0, 8.0)):
        place(arena, unit, x, 0.5)
    assert contacts(arena, 2) == [1, 0]


def test_there_may_be_more_contacts_than_units() -> None:
    arena = flat_arena(contacts=5)
    place(arena, 0, 0, 0)
    place(arena, 1, 3, 0)
    assert contacts(arena, 0) == [1]
    assert arena.simulation.state["contact"][:, 0, 0].tolist() == [1, -1, -1, -1, -1]
