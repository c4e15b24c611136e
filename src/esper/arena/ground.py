"""Reading the map at places, and what destroys it.

Shapes: B = battles, N = any places of a battle ([N], [U], [U, K], …), S = columns on a side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.arena.state import World
from esper.arena.tables import MaterialTable


def columns(x: Tensor, y: Tensor, size: int) -> Tensor:
    """Where the columns at these places [B, ...] lie in a flattened map; places outside belong to the outermost columns."""
    i = (x + size / 2).floor().clamp(0, size - 1)
    j = (y + size / 2).floor().clamp(0, size - 1)
    return torch.add(j, i, alpha=size).long()


def read(grid: Tensor, column: Tensor) -> Tensor:
    """The grid [B, S, S] at columns [B, ...]."""
    battles = grid.shape[0]
    return grid.reshape(battles, -1).gather(1, column.reshape(battles, -1)).view(column.shape)


def unit_at(values: Tensor, index: Tensor) -> Tensor:
    """`values` [B, U] or [B, U, D] of the units that `index` [B, ...] names."""
    battles = values.shape[0]
    flat = index.reshape(battles, -1)
    if values.dim() == 2:
        return values.gather(1, flat).view(index.shape)
    return values.gather(1, flat.unsqueeze(-1).expand(-1, -1, values.shape[2])).view(*index.shape, values.shape[2])


def floors(height: Tensor, material: Tensor, table: MaterialTable) -> Tensor:
    """What carries units and stops shots."""
    return height.masked_fill(table.is_walked_through[material.long()], 0.0)


def sight_tops(height: Tensor, material: Tensor, table: MaterialTable) -> Tensor:
    """What stops sight."""
    return height.masked_fill(table.is_seen_through[material.long()], 0.0)


def destroy(world: World, column: Tensor, damage: Tensor) -> World:
    """Columns [B, N] take whole damage [B, N] int32; those that have no hit points left become open ground.

    The sums are of whole numbers, so that they do not depend on the order in which a GPU adds them up. Only the columns that were hit are
    looked at: several hits on one write the same there.
    """
    before = read(world.hit_points, column)
    dealt = torch.where(before > 0, damage, 0)
    hit_points = world.hit_points.flatten(1).scatter_add(1, column, -dealt).clamp_min_(0)
    is_destroyed = (before > 0) & (hit_points.gather(1, column) <= 0)

    def cleared(grid: Tensor) -> Tensor:  # to 0, which is open ground as well
        return grid.flatten(1).scatter(1, column, read(grid, column).masked_fill(is_destroyed, 0)).view_as(grid)

    return world._replace(
        hit_points=hit_points.view_as(world.hit_points),
        height=cleared(world.height),
        floor=cleared(world.floor),
        tops=cleared(world.tops),
        material=cleared(world.material),
    )
