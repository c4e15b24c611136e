"""Check whether units can walk from the corners of a map to its middle.

Shapes: M = maps, S = side of the map in columns; grids are [M, S, S].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from esper.arena.specs import CLIMB_M, MATERIALS, Material
from esper.jit import compiler


def floor_height(height: Tensor, material: Tensor) -> Tensor:
    """Return the height that units stand on: the top of the column, or the ground below material that is walked through."""
    is_walked_through = torch.zeros_like(material, dtype=torch.bool)
    for kind, spec in MATERIALS.items():
        if spec.is_walked_through:
            is_walked_through |= material == kind
    return height.masked_fill(is_walked_through, 0.0)


def has_a_way(height: Tensor, material: Tensor) -> Tensor:
    """Return [M] bool: whether steps between neighbours, without lava, join both corner columns and one of the four middle columns."""
    floor = floor_height(height, material)
    is_safe = material != Material.LAVA
    joined_x = (floor.diff(dim=1).abs() <= CLIMB_M) & is_safe[:, 1:] & is_safe[:, :-1]
    joined_y = (floor.diff(dim=2).abs() <= CLIMB_M) & is_safe[:, :, 1:] & is_safe[:, :, :-1]
    reached = _reached_from_first_corner(joined_x, joined_y)
    middle = height.shape[1] // 2
    return reached[:, -1, -1] & reached[:, middle - 1 : middle + 1, middle - 1 : middle + 1].flatten(1).any(1)


def has_a_wide_way(height: Tensor, material: Tensor) -> Tensor:
    """Return [M] bool: whether a way two columns wide, without lava, joins the first corner and the middle. For mirrored maps.

    A square of two by two columns is passable if its floors differ by no more than a step. Neighbouring squares overlap by half.
    """
    floor = floor_height(height, material)
    highest, lowest = F.max_pool2d(floor, 2, stride=1), -F.max_pool2d(-floor, 2, stride=1)  # [M, S - 1, S - 1]
    has_lava = F.max_pool2d((material == Material.LAVA).float(), 2, stride=1) > 0
    is_passable = (highest - lowest <= CLIMB_M) & ~has_lava
    joined_x, joined_y = is_passable[:, 1:] & is_passable[:, :-1], is_passable[:, :, 1:] & is_passable[:, :, :-1]
    middle = is_passable.shape[1] // 2
    return _reached_from_first_corner(joined_x, joined_y)[:, middle, middle]


def _reached_from_first_corner(joined_x: Tensor, joined_y: Tensor) -> Tensor:
    """Return [M, N, N] bool: columns that are joined to the column (0, 0) by any number of steps."""
    maps, side = joined_y.shape[:2]
    reached = joined_x.new_zeros(maps, side, side)
    _compiled_spread()(joined_x.numpy(), joined_y.numpy(), reached.numpy())
    return reached


@functools.cache
def _compiled_spread() -> Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]:
    return compiler((__file__,))(_spread)


def _spread(joined_x: NDArray[Any], joined_y: NDArray[Any], reached: NDArray[Any]) -> None:
    """Mark the columns that are reached from (0, 0), given which neighbours are joined along x [M, N - 1, N] and y [M, N, N - 1]."""
    maps, side = reached.shape[:2]
    stack = np.zeros(side * side, np.int32)  # columns whose neighbours are not marked yet
    for m in range(maps):
        reached[m, 0, 0] = True
        stack[0], count = 0, 1
        while count:
            count -= 1
            i, j = stack[count] // side, stack[count] % side
            for x, y in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if not (0 <= x < side and 0 <= y < side) or reached[m, x, y]:
                    continue
                if joined_x[m, min(i, x), j] if x != i else joined_y[m, i, min(j, y)]:
                    reached[m, x, y] = True
                    stack[count] = x * side + y
                    count += 1
