"""Maps: a landscape for every seed, with two spawn corners, a capture zone in the centre, and a walkable way from each corner to the zone.

All maps of a batch are made at once, always on the CPU, and the map of a seed does not depend on the rest of the batch. Maps are symmetric
under a half turn about the centre, so that they favour neither side: column (i, j) equals column (S - 1 - i, S - 1 - j).

Shapes: M = maps, S = side of the map in columns; grids are [M, S, S], indexed [map, i(x), j(y)]. Column (i, j) covers x from i - S/2 to
i + 1 - S/2, and y likewise. Team 0 starts in the corner of low x and y, team 1 in the opposite one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.config import APART_M, LARGEST, SMALLEST, corner_side, no_room, room_for_team, units_per_row
from esper.arena.maps_walk import has_a_way, has_a_wide_way
from esper.arena.specs import Material
from esper.arena.terrain import BLOCK_PITCH, BUILDERS, LANDSCAPES, HeightMap, blocks
from esper.arena.terrain_chance import Chance, mirrored
from esper.text_table import did_you_mean

FROM_EDGE_M = 1.25  # distance from the edge of the map to the nearest starting unit
SMALLEST_ZONE_M, LARGEST_ZONE_M = 4.0, 11.0
COVER_M = 2.0  # height of the cover in the zone: as high as a unit


class MapBatch(NamedTuple):
    """M maps, all of one size."""

    height: Tensor  # [M, S, S] float32, top of the column
    material: Tensor  # [M, S, S] int8, a Material
    zone_radius: Tensor  # [M] float32, 4 .. 11 and at most S / 6; the zone's middle is the map's
    landscape: Tensor  # [M] int64, index into LANDSCAPES


def generate_maps(seeds: Tensor | Sequence[int], *, size: int = 64, landscapes: tuple[str, ...] = LANDSCAPES) -> MapBatch:
    """Make one map for every seed. The seed draws its landscape from `landscapes`. In every map both teams can walk to the zone.

    >>> maps = generate_maps([7, 8, 9], size=32)
    >>> maps.height.shape, are_connected(maps).all().item()
    (torch.Size([3, 32, 32]), True)
    """
    words = _checked_seeds(seeds)
    _check_size(size)
    choices = _checked_landscapes(landscapes)
    with torch.device("cpu"):
        maps = _made(words, size, choices)
    assert bool(are_connected(maps).all()), "a way that was opened does not lead to the zone"
    return maps


def are_connected(maps: MapBatch) -> Tensor:
    """Return [M] bool: whether both teams can walk from their corner to the middle of the zone, without high steps and lava."""
    return has_a_way(maps.height, maps.material)


def spawn_points(team_size: int, *, size: int) -> Tensor:
    """Return x and y [2, team_size, 2] at which the units of both teams start, at least 2 m apart. The second team mirrors the first.

    The first unit starts nearest to the zone, the others beside and behind it.

    >>> spawn_points(2, size=32)
    tensor([[[-6.7500, -6.7500],
             [-8.7500, -6.7500]],
    <BLANKLINE>
            [[ 6.7500,  6.7500],
             [ 8.7500,  6.7500]]])
    """
    if team_size < 1:
        raise ValueError(f"a team has at least one unit; got team_size={team_size}")
    if team_size > room_for_team(size):
        raise ValueError(no_room(team_size, size))
    _check_size(size)
    per_row = units_per_row(size)
    points = [(row, column) for row in range(per_row) for column in range(per_row)]
    points.sort(key=lambda point: (-sum(point), abs(point[0] - point[1]), point))  # front rows first, in each from the middle outwards
    first = torch.tensor(points[:team_size], dtype=torch.float32) * APART_M + FROM_EDGE_M - size / 2
    return torch.stack([first, -first])


def _made(seeds: Tensor, size: int, choices: Tensor) -> MapBatch:
    """Make maps from checked arguments. `choices` [L] are indices into LANDSCAPES."""
    chance = Chance(seeds, size=size)
    radius = chance.uniform("zone", low=min(SMALLEST_ZONE_M, size / 6), high=min(LARGEST_ZONE_M, size / 6))
    landscape = choices[chance.bits("landscape") % len(choices)]

    height = torch.zeros(len(seeds), size, size, dtype=torch.float32)
    material = torch.zeros(len(seeds), size, size, dtype=torch.int8)
    for which, name in enumerate(LANDSCAPES):
        members = (landscape == which).nonzero()[:, 0]
        if len(members):
            height_map = BUILDERS[name](Chance(seeds[members], size=size))
            height[members], material[members] = height_map.height, height_map.material
    height_map = _with_zone(HeightMap(height, material), chance, radius)
    height_map = _with_corners(height_map, chance)
    height_map = HeightMap(mirrored(height_map.height), mirrored(height_map.material))
    height_map = _with_ways(height_map, chance)
    return MapBatch(height_map.height, height_map.material, radius, landscape)


def _with_zone(height_map: HeightMap, chance: Chance, radius: Tensor) -> HeightMap:
    """Flatten the zone, except for water, and add some cover that leaves the middle free and two columns between its pieces."""
    distance = (chance.x * chance.x + chance.y * chance.y).sqrt()  # [S, S]
    reach = radius[:, None, None]
    is_zone = distance <= reach + 1
    is_water = height_map.material == Material.WATER
    height_map = _eased(height_map, distance - reach)
    height_map = height_map.with_columns(is_zone & ~is_water, 0.0, Material.OPEN)
    is_block = blocks(chance.size) & (chance.per_cell("cover", pitch=BLOCK_PITCH) < 0.4)
    is_hedge = chance.per_cell("hedges", pitch=BLOCK_PITCH) < 0.3
    is_cover = is_block & is_zone & ~is_water & (distance > 2)
    return height_map.with_columns(is_cover, COVER_M, torch.where(is_hedge, Material.FOLIAGE, Material.SOLID).to(torch.int8))


def _with_corners(height_map: HeightMap, chance: Chance) -> HeightMap:
    """Make the squares in which teams start flat and open."""
    edge = corner_side(chance.size) - chance.size / 2
    from_first = torch.maximum(chance.x - edge, chance.y - edge)  # in metres; < 0 inside the corner
    from_corner = torch.minimum(from_first, from_first.flip(0, 1))
    height_map = _eased(height_map, from_corner)
    return height_map.with_columns((from_corner < 0).expand_as(height_map.height), 0.0, Material.OPEN)


def _eased(height_map: HeightMap, from_flat: Tensor) -> HeightMap:
    """Turn cliffs at the border of flat ground into slopes. `from_flat` is the distance to the flat ground in metres."""
    most = torch.floor(from_flat.clamp(min=0) * 2) / 2
    return height_map.with_columns((height_map.material == Material.OPEN) & (height_map.height > most), most, Material.OPEN)


def _with_ways(height_map: HeightMap, chance: Chance) -> HeightMap:
    """Clear a way about three columns wide on maps without one of two columns to the zone. Its bend limits the line of sight."""
    is_cut_off = ~has_a_wide_way(height_map.height, height_map.material)
    size = chance.size
    start = (corner_side(size) - size) / 2  # x and y of the middle of the corner
    aside = chance.uniform("bend", low=-size / 5, high=size / 5)[:, None, None]
    bend_x, bend_y = start * 0.6 + aside, start * 0.6 - aside
    is_way = _is_near_line(chance, start, start, bend_x, bend_y) | _is_near_line(chance, bend_x, bend_y, 0.0, 0.0)
    is_way = (is_way | is_way.flip(1, 2)) & is_cut_off[:, None, None] & (height_map.material != Material.WATER)
    return height_map.with_columns(is_way, 0.0, Material.OPEN)


def _is_near_line(chance: Chance, from_x: Tensor | float, from_y: Tensor | float, to_x: Tensor | float, to_y: Tensor | float) -> Tensor:
    """Return [M, S, S] bool: columns less than 1.6 m from the line. They are at least two side by side everywhere."""
    ahead_x, ahead_y = to_x - from_x, to_y - from_y
    x, y = chance.x - from_x, chance.y - from_y
    share = ((x * ahead_x + y * ahead_y) / (ahead_x * ahead_x + ahead_y * ahead_y)).clamp(0, 1)
    off_x, off_y = x - share * ahead_x, y - share * ahead_y
    return off_x * off_x + off_y * off_y < 1.6 * 1.6


def _checked_seeds(seeds: Tensor | Sequence[int]) -> Tensor:
    """Return the seeds on the CPU, [M] int64."""
    if not isinstance(seeds, Tensor):
        numbers = [operator.index(seed) for seed in seeds]
        if too_large := [number for number in numbers if not -(2**63) <= number < 2**63]:
            raise ValueError(f"a seed must fit into 64 bits with its sign; got {too_large[0]}")
        seeds = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if seeds.dim() != 1 or not len(seeds) or seeds.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"maps need a list of at least one seed, as integers; got {seeds.dtype} of shape {list(seeds.shape)}")
    return seeds.to("cpu", torch.int64)


def _check_size(size: int) -> None:
    if not SMALLEST <= size <= LARGEST or size % 2:
        raise ValueError(f"a map's size is an even number of columns from {SMALLEST} to {LARGEST}, so that it has two halves; got {size}")


def _checked_landscapes(landscapes: tuple[str, ...]) -> Tensor:
    """Return the landscapes as indices into LANDSCAPES, [L] int64."""
    if not landscapes:
        raise ValueError(f"maps need at least one landscape; there are {', '.join(LANDSCAPES)}")
    for name in landscapes:
        if name not in LANDSCAPES:
            hint = did_you_mean(name, LANDSCAPES)
            raise ValueError(f"no landscape is named {name!r}; there are {', '.join(LANDSCAPES)}{hint and f'; {hint}'}")
    return torch.tensor([LANDSCAPES.index(name) for name in landscapes], device="cpu")
