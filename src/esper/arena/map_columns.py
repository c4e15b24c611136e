"""Read maps at positions, and destroy columns.

Shapes: B = battles, N = any positions of a battle ([N], [U], [U, K], …), S = columns on a side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.arena.state import World
from esper.arena.tables import MaterialTable


def columns(x: Tensor, y: Tensor, size: int) -> Tensor:
    """Return the indices in a flattened map of the columns at positions [B, ...]. Positions outside belong to the outermost columns."""
    i = (x + size / 2).floor().clamp(0, size - 1)
    j = (y + size / 2).floor().clamp(0, size - 1)
    return torch.add(j, i, alpha=size).long()


def read(grid: Tensor, column: Tensor) -> Tensor:
    """Return the values of a grid [B, S, S] at columns [B, ...]."""
    battles = grid.shape[0]
    return grid.reshape(battles, -1).gather(1, column.reshape(battles, -1)).view(column.shape)


def unit_at(values: Tensor, index: Tensor) -> Tensor:
    """Return the values [B, U] or [B, U, D] of the units `index` [B, ...]."""
    battles = values.shape[0]
    flat = index.reshape(battles, -1)
    if values.dim() == 2:
        return values.gather(1, flat).view(index.shape)
    return values.gather(1, flat.unsqueeze(-1).expand(-1, -1, values.shape[2])).view(*index.shape, values.shape[2])


def floors(height: Tensor, material: Tensor, table: MaterialTable) -> Tensor:
    """Return the heights that carry units and stop shots."""
    return height.masked_fill(table.is_walked_through[material.long()], 0.0)


def sight_tops(height: Tensor, material: Tensor, table: MaterialTable) -> Tensor:
    """Return the heights that block sight."""
    return height.masked_fill(table.is_seen_through[material.long()], 0.0)


def destroy(world: World, column: Tensor, damage: Tensor) -> World:
    """Apply damage [B, N] int32 to columns [B, N]. Columns without hit points left become open ground.

    Damage is summed as integers, so the sum does not depend on the order in which a GPU adds. Only columns that were hit are written;
    several hits on one column write the same value.
    """
    before = read(world.hit_points, column)
    dealt = torch.where(before > 0, damage, 0)
    hit_points = world.hit_points.flatten(1).scatter_add(1, column, -dealt).clamp_min_(0)
    is_destroyed = (before > 0) & (hit_points.gather(1, column) <= 0)

    def cleared(grid: Tensor) -> Tensor:  # 0 is also the material of open ground
        return grid.flatten(1).scatter(1, column, read(grid, column).masked_fill(is_destroyed, 0)).view_as(grid)

    return world._replace(
        hit_points=hit_points.view_as(world.hit_points),
        height=cleared(world.height),
        floor=cleared(world.floor),
        tops=cleared(world.tops),
        material=cleared(world.material),
    )
