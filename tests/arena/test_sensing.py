"""Sensing of enemies by sight, radar, heat and paint."""

from __future__ import annotations

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.sensing import sense
from esper.arena.specs import CLASSES, PHYSICS, Material
from esper.arena.state import Senses
from tests.arena.worlds import build, flat_arena, place, put


def sensed(arena: Arena) -> Senses:
    state = arena.state
    return sense(state.units, state.world, state.clouds, arena.tables, contacts=arena.config.contacts)


def is_sensed(arena: Arena, who: int = 0, whom: int = 1) -> bool:
    return bool(sensed(arena).sensed[0, who, whom])


def sees(arena: Arena, who: int = 0, whom: int = 1) -> bool:
    return bool(sensed(arena).seen[0, who, whom])


def place_apart(metres: float, *pack: str) -> Arena:
    """Unit 0 and the first enemy, so far apart along x; everybody else is dead."""
    arena = flat_arena(*(pack or ("medium",)), size=64)
    for unit in range(arena.config.units):
        put(arena, unit, hit_points=0.0)
    for unit, x in ((0, -metres / 2), (arena.config.team_size, metres / 2)):
        place(arena, unit, x, 0.5)
        put(arena, unit, hit_points=50.0)
    return arena


def wall(arena: Arena, material: Material = Material.REINFORCED, height: float = 6.0) -> None:
    build(arena, (0, 1), (-32, 32), material, height=height)


def smoke(arena: Arena, x: float, y: float, ticks: int = 200) -> None:
    clouds = arena.state.clouds
    position, left = clouds.position.clone(), clouds.left.clone()
    position[:, 0, 0], left[:, 0, 0] = torch.tensor([x, y, 1.2]), ticks
    arena.state = arena.state._replace(clouds=clouds._replace(position=position, left=left))


def test_a_unit_in_the_open_sees_as_far_as_its_sight_reaches() -> None:
    assert sees(place_apart(29.9))
    assert not sees(place_apart(30.1))
    assert not is_sensed(place_apart(30.1))


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
        (Material.REINFORCED, 1.7, False),
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


@pytest.mark.parametrize("name", CLASSES)
def test_radar_senses_through_walls_up_to_its_range(name: str) -> None:
    reach = PHYSICS.radar_m * CLASSES[name].radar_quality
    for metres, is_known in ((reach - 0.1, True), (reach + 0.1, False)):
        arena = place_apart(metres, name)
        wall(arena)
        assert is_sensed(arena) == is_known
        assert not sees(arena)


def test_a_unit_with_better_radar_senses_units_that_do_not_sense_it() -> None:
    arena = place_apart(18, "scout", "heavy")
    wall(arena)
    place(arena, 3, 9, 0.5)
    put(arena, 3, hit_points=50.0)
    put(arena, 2, hit_points=0.0)
    assert is_sensed(arena, 0, 3)  # a scout's radar reaches 21 m
    assert not is_sensed(arena, 3, 0)  # a heavy's 11.2 m


def test_hot_or_venting_units_are_sensed_through_walls() -> None:
    arena = place_apart(24)
    wall(arena)
    put(arena, 1, heat=79.0)
    assert not is_sensed(arena)
    put(arena, 1, heat=81.0)
    assert is_sensed(arena)
    assert not sees(arena)
    assert not is_sensed(arena, 1, 0)  # it does not make the other hot
    put(arena, 1, heat=0.0, is_venting=True)
    assert is_sensed(arena)
    place(arena, 1, 13.1, 0.5)  # 25.1 m
    assert not is_sensed(arena)


def test_a_painted_unit_is_sensed_by_the_whole_team_anywhere() -> None:
    arena = place_apart(60, "scout", "medium")
    put(arena, 1, hit_points=50.0)
    assert not is_sensed(arena, 0, 2)
    put(arena, 2, painted=1)
    assert is_sensed(arena, 0, 2)
    assert is_sensed(arena, 1, 2)
    assert not sees(arena, 0, 2)
    assert not is_sensed(arena, 2, 0)


def test_smoke_blocks_sight_through_it_and_while_it_lasts() -> None:
    arena = place_apart(20)
    smoke(arena, 0.0, 0.5)
    assert not sees(arena, 0, 1)
    assert not sees(arena, 1, 0)
    smoke(arena, 0.0, 0.5 + PHYSICS.cloud_m + 0.1)
    assert sees(arena)
    smoke(arena, 0.0, 0.5 + PHYSICS.cloud_m - 0.1)
    assert not sees(arena)
    smoke(arena, 0.0, 0.5, ticks=0)
    assert sees(arena)


def test_smoke_around_a_unit_hides_it_and_smoke_behind_it_does_not() -> None:
    arena = place_apart(20)
    smoke(arena, 10 + PHYSICS.cloud_m + 0.1, 0.5)
    assert sees(arena)
    smoke(arena, 10 + PHYSICS.cloud_m - 0.1, 0.5)
    assert not sees(arena)


def test_smoke_does_not_blind_radar() -> None:
    arena = place_apart(10)
    smoke(arena, 0.0, 0.5)
    assert is_sensed(arena)
    assert not sees(arena)


def test_units_sense_only_living_enemies_and_dead_units_sense_nothing() -> None:
    arena = flat_arena("medium", "medium")
    for unit in range(4):
        place(arena, unit, 3.0 * unit - 4, 0)
    put(arena, 3, hit_points=0.0)
    assert sensed(arena).sensed[0].int().tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_contacts_are_the_nearest_that_are_sensed_from_near_to_far() -> None:
    arena = flat_arena("medium", "medium", "medium", size=64, contacts=2)
    place(arena, 0, 0, 0)
    for unit, metres in ((3, 9.0), (4, 3.0), (5, 6.0)):
        place(arena, unit, metres, 0)
    known = sensed(arena)
    assert known.contacts[0, 0].tolist() == [4, 5]
    put(arena, 4, hit_points=0.0)
    assert sensed(arena).contacts[0, 0].tolist() == [5, 3]
    put(arena, 5, hit_points=0.0)
    known = sensed(arena)
    assert known.is_contact[0, 0].tolist() == [True, False]
    assert int(known.contacts[0, 0, 0]) == 3


def test_there_may_be_more_contacts_than_units() -> None:
    arena = flat_arena(contacts=5)
    place(arena, 0, 0, 0)
    place(arena, 1, 3, 0)
    known = sensed(arena)
    assert known.contacts.shape == (1, 2, 5)
    assert known.is_contact[0, 0].tolist() == [True, False, False, False, False]
    assert int(known.contacts[0, 0, 0]) == 1
