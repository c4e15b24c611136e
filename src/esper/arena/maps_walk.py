"""Check whether units can walk from the corners of a map to its middle.

Shapes: M = maps, S = side of the map in columns; grids are [M, S, S].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.arena.specs import CLIMB_M, MATERIALS, Material


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
    """Return [M, N, N] bool: columns that are joined to the column (0, 0) by any number of steps.

    Sweeps run over all maps at once, along x and y in turn. A pair of sweeps follows a way past two of its bends.
    """
    count, side = joined_y.shape[:2]
    along_x = joined_x.movedim(1, 0).contiguous()  # [N - 1, M, N]: one wave front is contiguous
    along_y = joined_y.movedim(2, 0).contiguous()
    reached = torch.zeros(side, count, side, dtype=torch.bool, device=joined_x.device)  # [i, M, j]
    reached[0, :, 0] = True
    for _ in range(side * side):  # no way has more bends than that
        before = reached.clone()
        _run_wave(reached, along_x)
        turned = reached.movedim(2, 0).movedim(2, 1).contiguous()  # [j, M, i]
        _run_wave(turned, along_y)
        reached = turned.movedim(2, 0).movedim(2, 1).contiguous()
        if torch.equal(before, reached):
            break
    return reached.movedim(0, 1)


def _run_wave(reached: Tensor, joined: Tensor) -> None:
    """Spread `reached` [N, M, N] forward and back along its first dimension, over joined neighbours [N - 1, M, N], in place."""
    for line in range(len(joined)):
        reached[line + 1] |= reached[line] & joined[line]
    for line in reversed(range(len(joined))):
        reached[line] |= reached[line + 1] & joined[line]
