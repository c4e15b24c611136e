"""Who can walk where: whether a map's corners and its middle are joined by ground that units can walk on.

Shapes: M = maps, S = side of the map in columns; grids are [M, S, S].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.arena.specs import CLIMB_M, MATERIALS, Material


def floor_height(height: Tensor, material: Tensor) -> Tensor:
    """What one stands on: the top of the column, and the ground under what is walked through."""
    is_walked_through = torch.zeros_like(material, dtype=torch.bool)
    for kind, spec in MATERIALS.items():
        if spec.is_walked_through:
            is_walked_through |= material == kind
    return height.masked_fill(is_walked_through, 0.0)


def has_a_way(height: Tensor, material: Tensor) -> Tensor:
    """[M] bool: the two corner columns and one of the four in the middle are joined by steps between neighbours, none of them into lava."""
    floor = floor_height(height, material)
    is_safe = material != Material.LAVA
    joined_x = (floor.diff(dim=1).abs() <= CLIMB_M) & is_safe[:, 1:] & is_safe[:, :-1]
    joined_y = (floor.diff(dim=2).abs() <= CLIMB_M) & is_safe[:, :, 1:] & is_safe[:, :, :-1]
    reached = _reached_from_first_corner(joined_x, joined_y)
    middle = height.shape[1] // 2
    return reached[:, -1, -1] & reached[:, middle - 1 : middle + 1, middle - 1 : middle + 1].flatten(1).any(1)


def has_a_wide_way(height: Tensor, material: Tensor) -> Tensor:
    """[M] bool: the same for who needs two columns side by side, for maps that are mirrored.

    A square of two by two columns is passable where its floors differ by no more than a step; neighbouring squares overlap by half.
    """
    floor = floor_height(height, material)
    highest, lowest = F.max_pool2d(floor, 2, stride=1), -F.max_pool2d(-floor, 2, stride=1)  # [M, S - 1, S - 1]
    has_lava = F.max_pool2d((material == Material.LAVA).float(), 2, stride=1) > 0
    is_passable = (highest - lowest <= CLIMB_M) & ~has_lava
    joined_x, joined_y = is_passable[:, 1:] & is_passable[:, :-1], is_passable[:, :, 1:] & is_passable[:, :, :-1]
    middle = is_passable.shape[1] // 2
    return _reached_from_first_corner(joined_x, joined_y)[:, middle, middle]


def _reached_from_first_corner(joined_x: Tensor, joined_y: Tensor) -> Tensor:
    """[M, N, N] bool: what is joined to the column (0, 0) by any number of steps.

    Waves run over all maps at once, along x and along y in turn, each over the whole map; a way takes a turn for every two of its bends.
    """
    count, side = joined_y.shape[:2]
    along_x = joined_x.movedim(1, 0).contiguous()  # [N - 1, M, N]: one wave front is contiguous
    along_y = joined_y.movedim(2, 0).contiguous()
    reached = torch.zeros(side, count, side, dtype=torch.bool, device=joined_x.device)  # [i, M, j]
    reached[0, :, 0] = True
    for _ in range(side * side):  # a way that bends more often than that cannot be
        before = reached.clone()
        _run_wave(reached, along_x)
        turned = reached.movedim(2, 0).movedim(2, 1).contiguous()  # [j, M, i]
        _run_wave(turned, along_y)
        reached = turned.movedim(2, 0).movedim(2, 1).contiguous()
        if torch.equal(before, reached):
            break
    return reached.movedim(0, 1)


def _run_wave(reached: Tensor, joined: Tensor) -> None:
    """Carries `reached` [N, M, N] forth and back along its first dimension, over what is joined [N - 1, M, N]. In place."""
    for line in range(len(joined)):
        reached[line + 1] |= reached[line] & joined[line]
    for line in reversed(range(len(joined))):
        reached[line] |= reached[line + 1] & joined[line]
