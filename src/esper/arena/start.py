"""Make the maps of an arena from its seed.

Shapes: M = maps, S = side of a map.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.maps import generate_maps
from esper.arena.maps_walk import floor_height
from esper.arena.routes import find_ways

_APART = 1_000_003  # between the numbers of neighbouring seeds


class Grids(NamedTuple):
    """All maps of an arena, with the routes to their zones."""

    height: Tensor  # [M, S, S] float32, top of the column
    material: Tensor  # [M, S, S] int8, a Material
    zone_radius: Tensor  # [M] float32
    way: Tensor  # [M, S, S] int8, which of eight neighbours is next on the route to the zone; 8 in the zone (`esper.arena.routes`)
    route_m: Tensor  # [M, S, S] float32, length of the route to the zone


def make_grids(config: ArenaConfig, *, seed: int, only: int | None = None) -> Grids:
    """Make the maps of a seed. With `only`, make only the map of that index; the others are zeros."""
    indices = list(range(config.maps)) if only is None else [only]
    maps = generate_maps([first_of(seed) + index for index in indices], size=config.size, landscapes=config.landscapes)
    floor = floor_height(maps.height, maps.material)
    grids = Grids(maps.height, maps.material, maps.zone_radius, *find_ways(floor, maps.material, maps.zone_radius))
    if only is None:
        return grids
    return Grids(
        *(torch.zeros(config.maps, *grid.shape[1:], dtype=grid.dtype).index_copy_(0, torch.tensor([only]), grid) for grid in grids)
    )


def first_of(seed: int) -> int:
    """Return the number of a seed's first map and first battle, within 64 bits. The numbers of other seeds are far away."""
    return seed % 2**42 * _APART
