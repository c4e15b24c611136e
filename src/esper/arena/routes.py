"""The walkable route to the zone from every column, computed once per map.

A step goes to one of eight neighbours. It climbs no more than units can, and does not cut corners diagonally; dropping down is allowed. The
cost of a step is its length, more through water, much more through lava, and a little more beside a wall. Shorter routes that open when
columns are destroyed are not taken into account.

Shapes: M = maps, S = side of the map.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.arena.specs import CLIMB_M, MATERIALS, Material
from esper.jit import compiler

STEPS = ((1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1))  # in columns, by direction; k is k·45° from the x axis
ARRIVED = len(STEPS)  # direction of columns in the zone: no step

_LAVA_COST = 20.0  # times the length
_BESIDE_WALL_COST = 0.7  # added
_DROP_COST = 5.0  # added for a drop of more than _HIGH_DROP_M
_HIGH_DROP_M = 2.0


def find_ways(floor: Tensor, material: Tensor, zone_radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next step from every column [M, S, S] int8, and the cost of the whole route as a length [M, S, S]."""
    size = floor.shape[1]
    costs = _step_costs(floor, material)
    along = torch.arange(size) - (size - 1) / 2
    is_goal = along.square()[:, None] + along.square()[None, :] <= (zone_radius.view(-1, 1, 1) - 1.0).square()
    distance = torch.where(is_goal, 0.0, torch.inf)
    way = torch.where(is_goal, ARRIVED, 0).to(torch.int8)
    _compiled_search()(torch.stack(costs, dim=-1).numpy(), distance.numpy(), way.numpy())
    return _mirrored_way(way), distance


@functools.cache
def _compiled_search() -> Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]:
    return compiler((__file__,))(_search)


def _search(costs: NDArray[Any], distance: NDArray[Any], way: NDArray[Any]) -> None:
    """Shorten distances [M, S, S], 0 in the zone and infinite elsewhere, until no step shortens them; then find the best steps.

    `costs` [M, S, S, directions] are those of the steps from each column. `way` [M, S, S] is changed outside of the zone.
    """
    maps, size = distance.shape[:2]
    columns = size * size
    queue, is_queued = np.zeros(columns, np.int32), np.zeros(columns, np.bool_)  # columns whose distance has become shorter
    for m in range(maps):
        first = count = 0
        for column in range(columns):
            if distance[m, column // size, column % size] == 0:
                queue[count], is_queued[column] = column, True
                count += 1
        while count:
            column = queue[first]
            first, count = (first + 1) % columns, count - 1
            is_queued[column] = False
            i, j = column // size, column % size
            for k in range(len(STEPS)):  # columns from which step k leads here
                x, y = i - STEPS[k][0], j - STEPS[k][1]
                if not (0 <= x < size and 0 <= y < size):
                    continue
                through = distance[m, i, j] + costs[m, x, y, k]
                if through < distance[m, x, y]:
                    distance[m, x, y] = through
                    if not is_queued[x * size + y]:
                        is_queued[x * size + y] = True
                        queue[(first + count) % columns] = x * size + y
                        count += 1
        for i in range(size):
            for j in range(size):
                shortest = np.float32(np.inf)
                for k in range(len(STEPS)):
                    x, y = i + STEPS[k][0], j + STEPS[k][1]
                    if way[m, i, j] != ARRIVED and 0 <= x < size and 0 <= y < size:
                        through = distance[m, x, y] + costs[m, i, j, k]
                        if through < shortest:
                            shortest, way[m, i, j] = through, k


def _step_costs(floor: Tensor, material: Tensor) -> list[Tensor]:
    """Return the cost of a step from each column in each direction; infinite if it is impossible."""
    slowness = torch.tensor([1.0 / MATERIALS[kind].speed_factor for kind in Material])
    slowness[Material.LAVA] = _LAVA_COST
    ground = slowness[material.long()]
    can_enter = [_neighbour(floor, step, outside=torch.inf) - floor <= CLIMB_M for step in STEPS]
    is_beside_wall = ~torch.stack(can_enter[::2]).all(0)
    costs = []
    for direction, step in enumerate(STEPS):
        is_diagonal = direction % 2 == 1
        allowed = can_enter[direction]
        if is_diagonal:
            allowed = allowed & can_enter[direction - 1] & can_enter[(direction + 1) % len(STEPS)]
        length = 2**0.5 if is_diagonal else 1.0
        cost = length * _neighbour(ground, step, outside=1.0) + _BESIDE_WALL_COST * _neighbour(is_beside_wall.float(), step, outside=0.0)
        drop = floor - _neighbour(floor, step, outside=0.0)
        costs.append(torch.where(allowed, cost + _DROP_COST * (drop > _HIGH_DROP_M), torch.inf))
    return costs


def _neighbour(grid: Tensor, step: tuple[int, int], outside: float = torch.inf) -> Tensor:
    """Return the value of the column one step away [M, S, S]."""
    size = grid.shape[1]
    padded = torch.nn.functional.pad(grid, (1, 1, 1, 1), value=outside)
    return padded[:, 1 + step[0] : 1 + step[0] + size, 1 + step[1] : 1 + step[1] + size]


def _mirrored_way(way: Tensor) -> Tensor:
    """Copy the steps of the first half of a map to the second, turned by half a turn, so that ties are decided alike for both teams."""
    half = way.shape[1] // 2
    turned = way[:, :half].flip(1, 2)
    turned = torch.where(turned == ARRIVED, ARRIVED, (turned + len(STEPS) // 2) % len(STEPS))
    return torch.cat((way[:, :half], turned), 1)
