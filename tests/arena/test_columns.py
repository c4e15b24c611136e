"""Columns of the map: how shots wear and destroy them, and how destroyed ones behave as open ground."""

from __future__ import annotations

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.native import layout as at
from esper.arena.observe import VIEW
from esper.arena.specs import MATERIALS, WEAPONS, Material
from tests.arena.views import sees, terrain
from tests.arena.worlds import build, decide, doom, flat_arena, floors_of_maps, make_duel, place, put, put_shell, tick, unit_field

HERE = (2 + 12) * 24 + (0 + 12)  # the column from (2, 0) to (3, 1) of a map of 24
DESTRUCTIBLE = [(material, spec.hit_points) for material, spec in MATERIALS.items() if spec.hit_points]


def make_walled_arena(material: Material, *, battles: int = 1) -> Arena:
    """Return an arena with one column at (2, 0), and units far away from it."""
    arena = flat_arena(battles=battles)
    build(arena, (2, 3), (0, 1), material, height=4.0)
    place(arena, 0, -10.0, -10.0)
    place(arena, 1, 10.0, 10.0)
    return arena


def shoot_at(arena: Arena, *weapons: str, unit: int = 0) -> None:
    """Let projectiles hit the column at (2, 0) from above, all in the first tick of the next decision.

    From above, because foliage stops shots only where they hit the ground under it.
    """
    for slot, weapon in enumerate(weapons):
        height = float(floors_of_maps(arena)[0, HERE])
        put_shell(arena, unit, weapon, [2.5, 0.5, height + 0.1], [0.0, 0.0, -8.0], slot=slot)


def worn(arena: Arena, battle: int = 0) -> int:
    return int(arena.simulation.state["worn"][battle, HERE])


def wear(arena: Arena, damage: int) -> None:
    """Set the damage that the column at (2, 0) has taken."""
    arena.simulation.state["worn"][:, HERE] = damage


# Wear


@pytest.mark.parametrize(("material", "hit_points"), DESTRUCTIBLE)
@pytest.mark.parametrize("left", [9, 8])
def test_a_column_is_destroyed_when_it_has_taken_all_of_its_hit_points(material: Material, hit_points: int, left: int) -> None:
    arena = make_walled_arena(material)
    wear(arena, hit_points - left)
    shoot_at(arena, "autocannon")
    assert WEAPONS["autocannon"].damage == 8
    decide(arena)
    assert worn(arena) == (at.DESTROYED if left == 8 else hit_points - 1)


@pytest.mark.parametrize(
    ("weapons", "damage"),
    [(["gauss"], 50), (["missile"], 40), (["smoke"], 0), (["gauss", "autocannon", "missile"], 98), (["gauss", "gauss"], at.DESTROYED)],
)
def test_hits_of_one_decision_add_up(weapons: list[str], damage: int) -> None:
    arena = make_walled_arena(Material.SOLID)
    shoot_at(arena, *weapons)
    decide(arena)
    assert worn(arena) == damage


def test_hits_of_several_units_and_decisions_add_up() -> None:
    arena = make_walled_arena(Material.SOLID)
    shoot_at(arena, "missile")
    shoot_at(arena, "autocannon", unit=1)
    decide(arena)
    assert worn(arena) == 48
    shoot_at(arena, "missile", unit=1)
    decide(arena)
    assert worn(arena) == 88
    shoot_at(arena, "missile")
    decide(arena)
    assert worn(arena) == at.DESTROYED


@pytest.mark.parametrize("material", [material for material, spec in MATERIALS.items() if not spec.hit_points])
def test_indestructible_columns_stay_unchanged(material: Material) -> None:
    arena = make_walled_arena(material)
    for _ in range(3):
        shoot_at(arena, *["gauss"] * 8)
        decide(arena)
    assert not arena.simulation.state["worn"].any()


def test_only_the_column_that_was_hit_is_worn() -> None:
    arena = flat_arena()
    build(arena, (-6, 6), (-6, 6), Material.SOLID, height=4.0)
    shoot_at(arena, "missile")  # its splash reaches other columns
    decide(arena)
    assert torch.nonzero(arena.simulation.state["worn"]).tolist() == [[0, HERE]]


@pytest.mark.parametrize(("x", "column"), [(1.9, HERE), (2.9, HERE + 24)])
def test_a_shot_from_the_side_wears_the_column_that_stops_it(x: float, column: int) -> None:
    arena = flat_arena()
    build(arena, (int(x) + 1, int(x) + 2), (0, 1), Material.SOLID, height=4.0)
    put_shell(arena, 0, "missile", [x, 0.5, 1.0], [8.0, 0.0, 0.0], target=1)
    put(arena, 1, hit_points=0.0)  # so that the missile flies straight
    tick(arena)
    assert torch.nonzero(arena.simulation.state["worn"]).tolist() == [[0, column]]


def test_a_shot_over_the_edge_of_the_map_wears_no_column() -> None:
    arena = flat_arena()
    build(arena, (-12, 12), (-12, 12), Material.SOLID)
    put_shell(arena, 0, "autocannon", [11.9, 0.5, 1.0], [8.0, 0.0, 0.0])
    tick(arena)
    assert int(arena.simulation.state["shell_count"][at.SHELL_LIFE, 0, 0, 0]) == 0
    assert not arena.simulation.state["worn"].any()


def test_columns_are_worn_in_one_battle_only_and_whole_again_in_the_next() -> None:
    arena = make_walled_arena(Material.SOLID, battles=2)
    shoot_at(arena, "gauss", "gauss")
    arena.simulation.state["shell_count"][at.SHELL_LIFE, 1] = 0
    decide(arena)
    assert [worn(arena, battle) for battle in (0, 1)] == [at.DESTROYED, 0]
    place(arena, 0, 0.5, 0.5)
    doom(arena, 0)
    assert decide(arena).ended.all()
    assert not arena.simulation.state["worn"].any()


@pytest.mark.parametrize(("material", "shots"), [(Material.SOLID, 2), (Material.GLASS, 1), (Material.REINFORCED, None)])
def test_two_gauss_shots_open_a_wall_one_opens_glass_and_none_what_is_reinforced(material: Material, shots: int | None) -> None:
    arena = flat_arena("heavy")
    build(arena, (2, 3), (-3, 3), material, height=3.0)
    opened = None
    for number in range(1, 4):
        place(arena, 0, -6, 0.5)
        place(arena, 1, 8, 0.5)
        put(arena, 0, cooldown={"gauss": 0}, heat=0.0)
        put(arena, 1, painted=50)  # sensed behind the wall
        decide(arena, {0: {"fire": "gauss", "target": 1}})
        assert arena.simulation.number[at.FIRED_ONCE, 0, 0]
        decide(arena)  # until it has arrived
        if opened is None and (arena.simulation.state["worn"] == at.DESTROYED).any():
            opened = number
    assert opened == shots


# Destroyed columns are open ground


def test_destroyed_walls_block_no_sight() -> None:
    arena = make_duel(metres=8.0, y=0.5)
    build(arena, (2, 3), (0, 1), Material.SOLID, height=4.0)
    wear(arena, 99)
    assert not sees(arena)
    wear(arena, at.DESTROYED)
    assert sees(arena)


@pytest.mark.parametrize("damage", [50, at.DESTROYED])
def test_destroyed_walls_stop_neither_units_nor_shots(damage: int) -> None:
    arena = flat_arena()
    build(arena, (2, 3), (-1, 2), Material.SOLID, height=4.0)
    place(arena, 0, 1.0, 0.5)
    place(arena, 1, 10.0, 10.0)
    wear(arena, damage)
    put_shell(arena, 1, "autocannon", [1.9, 0.5, 3.0], [8.0, 0.0, 0.0])
    tick(arena)
    flies = int(arena.simulation.state["shell_count"][at.SHELL_LIFE, 0, 1, 0]) > 0
    assert flies == (damage == at.DESTROYED)
    for _ in range(4):
        decide(arena, {0: {"forward": 1.0}})
    assert (unit_field(arena, "position", 0)[0] > 2.0) == (damage == at.DESTROYED)


def test_a_unit_on_a_destroyed_wall_falls() -> None:
    arena = make_walled_arena(Material.SOLID)
    place(arena, 0, 2.5, 0.5, 4.0)
    decide(arena)
    assert unit_field(arena, "position", 0)[2] == 4.0
    shoot_at(arena, "gauss", "gauss", unit=1)
    put(arena, 0, position=[-10.0, -10.0, 0.0])  # out of the way of the shots
    decide(arena)
    place(arena, 0, 2.5, 0.5, 4.0)
    for _ in range(5):
        decide(arena)
    assert unit_field(arena, "position", 0)[2] == 0.0
    assert unit_field(arena, "legs", 0) < 75


def test_a_destroyed_column_is_observed_as_open_ground() -> None:
    arena = make_walled_arena(Material.FOLIAGE)
    place(arena, 0, 2.5, 0.5)
    middle = VIEW // 2
    fields = ("rise", "cover", "material")
    assert [float(terrain(arena, 0, name)[middle, middle]) for name in fields] == [0.0, 1.0, -0.25]
    wear(arena, at.DESTROYED)
    assert [float(terrain(arena, 0, name)[middle, middle]) for name in fields] == [0.0, 0.0, 0.0]
