"""Reading the map at places, and destroying it."""

from __future__ import annotations

import pytest
import torch

from esper.arena.decision import decide
from esper.arena.map_columns import columns, destroy, floors, read, sight_tops, unit_at
from esper.arena.specs import Material
from esper.arena.state import World
from tests.arena.worlds import build, flat_arena, make_orders, place, put, unit_field

AT = (2 + 12) * 24 + (0 + 12)  # the column from (2, 0) to (3, 1) of a map of 24


def make_walled_arena(material: Material) -> World:
    arena = flat_arena()
    build(arena, (2, 3), (0, 1), material, height=4.0)
    return arena.state.world


def damage_column(world: World, *damage: int) -> World:
    """The column at (2, 0) takes all of this at once."""
    return destroy(world, torch.full((1, len(damage)), AT), torch.tensor([damage], dtype=torch.int32))


def test_columns_are_found_from_the_centre_and_places_outside_belong_to_the_outermost() -> None:
    x, y = torch.tensor([[-12.0, -0.1, 0.1, 11.9, 2.5, -99.0, 99.0]]), torch.tensor([[-12.0, 0.1, -0.1, 11.9, 0.5, 99.0, -99.0]])
    found = columns(x, y, 24)[0].tolist()
    assert found == [0, 11 * 24 + 12, 12 * 24 + 11, 23 * 24 + 23, AT, 23, 23 * 24]


def test_terrain_is_read_at_places_of_any_shape() -> None:
    grid = torch.arange(2 * 16).view(2, 4, 4)
    assert read(grid, torch.tensor([[[0, 5], [15, 1]], [[0, 5], [15, 1]]])).tolist() == [[[0, 5], [15, 1]], [[16, 21], [31, 17]]]


def test_units_are_looked_up_in_their_own_battle() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert unit_at(values, torch.tensor([[1, 1], [0, 1]])).tolist() == [[2, 2], [3, 4]]
    places = torch.arange(12.0).view(2, 2, 3)
    assert unit_at(places, torch.tensor([[[1]], [[0]]])).tolist() == [[[[3, 4, 5]]], [[[6, 7, 8]]]]


@pytest.mark.parametrize(
    ("material", "carries", "hides"),
    [(Material.OPEN, 3, 3), (Material.SOLID, 3, 3), (Material.REINFORCED, 3, 3), (Material.GLASS, 3, 0), (Material.FOLIAGE, 0, 3)],
)
def test_glass_blocks_no_sight_and_foliage_carries_no_unit(material: Material, carries: float, hides: float) -> None:
    table = flat_arena().tables.materials
    height, kind = torch.full((1, 1, 1), 3.0), torch.full((1, 1, 1), int(material), dtype=torch.int8)
    assert float(floors(height, kind, table)) == carries
    assert float(sight_tops(height, kind, table)) == hides


@pytest.mark.parametrize(("material", "bears"), [(Material.SOLID, 99), (Material.GLASS, 9), (Material.FOLIAGE, 19)])
def test_a_column_bears_less_than_its_hit_points_and_is_then_open_ground(material: Material, bears: int) -> None:
    world = damage_column(make_walled_arena(material), bears)
    assert int(world.hit_points[0, 14, 12]) == 1
    assert int(world.material[0, 14, 12]) == int(material)
    assert float(world.height[0, 14, 12]) == 4
    world = damage_column(world, 1)
    assert [float(part[0, 14, 12]) for part in world[:5]] == [0, int(Material.OPEN), 0, 0, 0]


def test_hits_of_one_decision_add_up() -> None:
    assert int(damage_column(make_walled_arena(Material.SOLID), 50, 8, 40).hit_points[0, 14, 12]) == 2
    assert int(damage_column(make_walled_arena(Material.SOLID), 50, 10, 40).material[0, 14, 12]) == int(Material.OPEN)


@pytest.mark.parametrize("material", [Material.REINFORCED, Material.OPEN, Material.WATER, Material.LAVA])
def test_indestructible_columns_stay_unchanged(material: Material) -> None:
    before = make_walled_arena(material)
    after = damage_column(before, 1_000_000)
    assert all(torch.equal(part, was) for part, was in zip(after, before, strict=True))


def test_nothing_but_the_column_that_was_hit_changes() -> None:
    arena = flat_arena()
    build(arena, (-6, 6), (-6, 6), Material.SOLID, height=3.0)
    before = arena.state.world
    after = damage_column(before, 100)
    assert [int((part != was).sum()) for part, was in zip(after[:5], before[:5], strict=True)] == [1] * 5


@pytest.mark.slow
def test_a_unit_on_a_destroyed_wall_falls() -> None:
    arena = flat_arena()
    build(arena, (2, 3), (0, 1), Material.SOLID, height=4.0)
    place(arena, 0, 2.5, 0.5, 4.0)
    arena.state = arena.state._replace(world=damage_column(arena.state.world, 100))
    for _ in range(4):
        arena.state, _ = decide(arena.state, make_orders(arena), arena.tables)
    assert unit_field(arena, "position", 0)[2] == 0
    assert unit_field(arena, "legs", 0) < 75


@pytest.mark.slow
@pytest.mark.parametrize(("material", "shots"), [(Material.SOLID, 2), (Material.GLASS, 1), (Material.REINFORCED, None)])
def test_two_gauss_shots_open_a_wall_one_opens_glass_and_none_what_is_reinforced(material: Material, shots: int | None) -> None:
    arena = flat_arena("heavy")
    build(arena, (2, 3), (-3, 3), material, height=3.0)
    place(arena, 0, -6, 0.5)
    place(arena, 1, 8, 0.5)
    state = arena.state
    opened = None
    for number in range(1, 4):
        put(arena, 0, cooldown=0, heat=0.0)
        state, step_events = decide(
            state._replace(units=arena.state.units), make_orders(arena, {0: {"fire": "gauss", "target": 1}}), arena.tables
        )
        assert step_events.fired[0, 0]
        state, _ = decide(state, make_orders(arena), arena.tables)  # until it has arrived
        if opened is None and (state.world.material[0, 14] != int(material))[9:15].any():
            opened = number
    assert opened == shots
