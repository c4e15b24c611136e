"""The way to the zone: following it leads to the zone."""

from __future__ import annotations

import itertools

import pytest
import torch

from esper.arena.maps import LANDSCAPES, generate_maps
from esper.arena.routes import ARRIVED, STEPS, find_ways
from esper.arena.specs import CLIMB_M, MATERIALS, Material

SIZE = 24
MAPS = generate_maps(range(10), size=SIZE)
FLOOR = MAPS.height.masked_fill(torch.tensor([MATERIALS[kind].is_walked_through for kind in Material])[MAPS.material.long()], 0.0)
WAY, ROUTE = find_ways(FLOOR, MAPS.material, MAPS.zone_radius)


def follow_way(way: torch.Tensor, i: int, j: int) -> list[tuple[int, int]]:
    """All columns on the way from one to the zone."""
    path = [(i, j)]
    while int(way[i, j]) != ARRIVED:
        step = STEPS[int(way[i, j])]
        i, j = i + step[0], j + step[1]
        path.append((i, j))
        assert len(path) <= way.numel(), "the way goes round in circles"
    return path


@pytest.mark.parametrize("which", range(10))
def test_from_both_corners_the_way_leads_to_the_zone_in_steps_that_can_be_walked(which: int) -> None:
    for corner in (2, SIZE - 3):
        path = follow_way(WAY[which], corner, corner)
        levels = [float(FLOOR[which, i, j]) for i, j in path]
        assert all(after - before <= CLIMB_M for before, after in itertools.pairwise(levels))
        i, j = path[-1]
        assert (i + 0.5 - SIZE / 2) ** 2 + (j + 0.5 - SIZE / 2) ** 2 <= float(MAPS.zone_radius[which]) ** 2


def test_the_tested_maps_have_several_landscapes() -> None:
    assert len(set(MAPS.landscape.tolist())) >= len(LANDSCAPES) - 1


def test_every_step_comes_nearer() -> None:
    for which in range(10):
        path = follow_way(WAY[which], 2, 2)
        lengths = [float(ROUTE[which, i, j]) for i, j in path]
        assert all(after < before for before, after in itertools.pairwise(lengths))
        assert lengths[-1] == 0


def test_the_way_turns_with_the_map() -> None:
    turned = WAY.flip(1, 2)
    opposite = torch.where(turned == ARRIVED, ARRIVED, (turned + 4) % 8)
    assert torch.equal(WAY, opposite)
    assert torch.allclose(ROUTE, ROUTE.flip(1, 2))


def on_flat_ground(material: torch.Tensor, floor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    way, route = find_ways(floor.unsqueeze(0), material.unsqueeze(0), torch.tensor([2.0]))
    return way[0], route[0]


def nothing() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(16, 16, dtype=torch.int8), torch.zeros(16, 16)


def test_the_way_on_open_ground_is_straight_and_has_its_length() -> None:
    way, route = on_flat_ground(*nothing())
    assert int(way[2, 7]) == 0  # along x
    assert int(way[13, 7]) == 4
    # Seven columns to the goal along x; five of them in the corner's case are diagonal, which is longer.
    assert float(route[3, 7]) == pytest.approx(7 - 3)
    assert float(route[3, 3]) == pytest.approx(2**0.5 * 4)


def test_the_way_leads_round_a_wall_and_over_a_step() -> None:
    for height, is_round in ((2.0, True), (1.0, False)):
        material, floor = nothing()
        floor[4, 2:14] = height
        way, _ = on_flat_ground(material, floor)
        rows = [j for i, j in follow_way(way, 2, 7) if i == 4]
        assert all(j < 2 or j > 13 for j in rows) == is_round


@pytest.mark.slow
def test_the_way_passes_no_corner_diagonally() -> None:
    seen = 0
    for which, i, j in itertools.product(range(10), range(SIZE), range(SIZE)):
        direction = int(WAY[which, i, j])
        if direction == ARRIVED or direction % 2 == 0 or torch.isinf(ROUTE[which, i, j]):
            continue
        step, floor = STEPS[direction], FLOOR[which]
        assert max(float(floor[i + step[0], j]), float(floor[i, j + step[1]])) - float(floor[i, j]) <= CLIMB_M
        seen += 1
    assert seen > 100


def test_lava_is_avoided_and_water_costs_more_than_open_ground() -> None:
    material, floor = nothing()
    _, plain = on_flat_ground(material, floor)
    material[4, 1:15] = int(Material.LAVA)
    way, _ = on_flat_ground(material, floor)
    assert all(int(material[i, j]) != int(Material.LAVA) for i, j in follow_way(way, 2, 3))
    material[4, :] = int(Material.WATER)
    _, wet = on_flat_ground(material, floor)
    assert float(wet[2, 7]) == pytest.approx(float(plain[2, 7]) + 1 / 0.6 - 1, rel=1e-5)


def test_the_route_length_is_infinite_where_no_way_leads_to_the_zone() -> None:
    material, floor = nothing()
    floor[:3, 2] = 9.0
    floor[2, :3] = 9.0
    _, route = on_flat_ground(material, floor)
    assert torch.isinf(route[0, 0])
