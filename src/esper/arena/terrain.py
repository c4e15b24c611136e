"""Landscapes: the terrain of a map, before `esper.arena.maps` clears corners and zone and opens ways.

Each landscape is a function of `Chance` that fills a whole batch of maps. Heights are multiples of half a metre, so that steps of exactly
the height that units climb are the same on every device. All are symmetric under the half turn, up to rounding.

Shapes: M = maps, S = side of the map in columns; grids are [M, S, S], indexed [map, i(x), j(y)].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.arena.config import Landscape
from esper.arena.specs import Material
from esper.arena.terrain_chance import Chance, wave

LANDSCAPES: tuple[str, ...] = get_args(Landscape)
TREE_M = 3.0  # height of foliage
# Unit vectors, 22.5° apart over half a circle. They are constants because sines may differ in the last bit between processors.
DIRECTIONS = torch.tensor(
    [[1, 0], [0.92388, 0.38268], [0.70711, 0.70711], [0.38268, 0.92388],
     [0, 1], [-0.38268, 0.92388], [-0.70711, 0.70711], [-0.92388, 0.38268]],
    dtype=torch.float32, device="cpu",
)  # fmt: skip
BLOCK_PITCH = 4  # columns from one rock to the next


class HeightMap(NamedTuple):
    """Height and material of every column."""

    height: Tensor  # [M, S, S] float32, ≥ 0
    material: Tensor  # [M, S, S] int8

    def with_columns(self, where: Tensor, height: Tensor | float, material: Tensor | Material) -> HeightMap:
        """Return this height map with the columns `where` replaced."""
        heights = torch.as_tensor(height, dtype=torch.float32)
        materials = torch.as_tensor(material, dtype=torch.int8)
        return HeightMap(torch.where(where, heights, self.height), torch.where(where, materials, self.material))

    def is_flat(self) -> Tensor:
        """Return where the terrain is still flat and open."""
        return (self.height == 0) & (self.material == Material.OPEN)


def flat_map(chance: Chance) -> HeightMap:
    """Return flat, open terrain."""
    shape = (len(chance.keys), chance.size, chance.size)
    return HeightMap(torch.zeros(shape, dtype=torch.float32), torch.zeros(shape, dtype=torch.int8))


def blocks(size: int) -> Tensor:
    """Return [S, S] bool: the two by two columns in the middle of every square of `Chance.per_cell(pitch=BLOCK_PITCH)`.

    Two free columns are between them.
    """
    inside = (torch.arange(size) - size // 2) % BLOCK_PITCH
    is_middle = (inside == 1) | (inside == 2)
    return is_middle[:, None] & is_middle


def city(chance: Chance) -> HeightMap:
    """Make rows of houses along streets at least three columns wide. Rows are shifted, so that cross streets end at the next row.

    A house is numbered by its row, in half rows from the centre, and by its place in the row. The half turn negates both.
    """
    half_x, half_y = (chance.whole(f"half a block {axis}", low=3, high=5)[:, None, None] for axis in "xy")
    street_x, street_y = (chance.whole(f"street {axis}", low=3, high=4)[:, None, None] for axis in "xy")
    pitch_x, pitch_y = 2 * half_x + street_x, 2 * half_y + street_y

    is_between = chance.whole("a street runs through the centre", low=0, high=1)[:, None, None]  # instead of a row of houses
    row = 2 * torch.floor(chance.y / pitch_y + (1 - is_between) / 2) + is_between
    y = chance.y - row * pitch_y / 2  # from the row's middle
    shift = torch.floor(chance.uniform("shift of the row", row.abs().long()) * pitch_x) * row.sign()
    house = torch.floor((chance.x - shift) / pitch_x + 0.5)  # place in the row
    x = chance.x - shift - house * pitch_x  # from the house's middle

    number = (row * 1024 + house).abs().long()  # the same for a house and its mirror image
    trim_x, trim_y = (chance.whole(f"trim {axis}", number, low=0, high=1) for axis in "xy")
    inner_x, inner_y = x.abs() - (half_x - trim_x), y.abs() - (half_y - trim_y)  # < 0 inside the house, ≥ -1 in its walls
    is_plot = (inner_x < 0) & (inner_y < 0)
    is_park = chance.uniform("park", number) < 0.12
    is_shop = chance.uniform("shop", number) < 0.3  # hollow behind glass fronts
    is_front = torch.where(chance.uniform("front", number) < 0.5, inner_x, inner_y) >= -1
    is_inside = (inner_x < -1) & (inner_y < -1)

    height = chance.whole("storeys", number, low=2, high=8)
    walls = torch.where(chance.uniform("walls", number) < 0.3, Material.REINFORCED, Material.SOLID)
    walls = torch.where(is_shop & is_front, Material.GLASS, walls).to(torch.int8)
    height_map = flat_map(chance).with_columns(is_plot & ~is_park & ~(is_shop & is_inside), height, walls)
    # Trees block sight but not movement: they stand in parks, and here and there in streets to break long lines of sight.
    trees = chance.per_column("trees")
    return height_map.with_columns(torch.where(is_plot & is_park, trees < 0.5, ~is_plot & (trees < 0.04)), TREE_M, Material.FOLIAGE)


def forest(chance: Chance) -> HeightMap:
    """Make thickets between clearings, single trees, bare hills and boulders."""
    height_map = _with_hills(flat_map(chance), chance, pitch=11, above=0.66, steepness=11.0, highest_m=3.0)
    height_map = _with_boulders(height_map, chance, share=0.10)
    thickness = 0.65 * chance.smooth("thickets", pitch=7) + 0.35 * chance.smooth("thicket edges", pitch=3)
    trees = chance.per_column("trees")
    is_tree = (thickness > 0.54) & (trees < 0.85) | (thickness > 0.40) & (trees < 0.10)
    return height_map.with_columns(is_tree & height_map.is_flat(), TREE_M, Material.FOLIAGE)


def river(chance: Chance) -> HeightMap:
    """Make a river that winds through the centre between the two sides, on some maps with two side arms, and bridges over it.

    The banks have trees and rocks; the river itself is open, so units that cross it can be seen.
    """
    slope = chance.uniform("slope", low=-0.45, high=0.45)[:, None, None]
    across = 0.7 * (chance.x + chance.y) + slope * (chance.x - chance.y)  # about the distance from the middle of the river
    along = 0.7 * (chance.x - chance.y)
    bends = chance.uniform("bends", low=10.0, high=22.0)[:, None, None]
    depth = chance.uniform("how far it bends", low=0.05, high=0.22)[:, None, None] * bends
    across = across - depth * wave(along / bends)
    half_width = chance.uniform("width", low=1.6, high=3.4)[:, None, None] * min(1.0, chance.size / 48)

    arms = chance.uniform("arms", low=0.22, high=0.34)[:, None, None] * chance.size
    has_arms = (chance.uniform("has arms") < 0.35)[:, None, None]
    arm = across.abs() - arms
    from_water = torch.where(has_arms, torch.minimum(across.abs() - half_width, arm.abs() - 0.7 * half_width), across.abs() - half_width)

    # Bridges cross it at regular distances, one of them in the centre, because the zone covers both banks.
    spacing = chance.uniform("between bridges", low=13.0, high=19.0)[:, None, None]
    from_bridge = (along - spacing * torch.floor(along / spacing + 0.5)).abs()
    is_bridge = from_bridge < 1.6
    is_tower = (from_bridge >= 1.6) & (from_bridge < 3.2) & (from_water >= 0) & (from_water < 1.6)  # on the four sides of a bridge

    height_map = _with_hills(flat_map(chance), chance, pitch=12, above=0.68, steepness=9.0, highest_m=2.0)
    height_map = _with_boulders(height_map, chance, share=0.22)
    trees = 0.6 * chance.smooth("groves", pitch=6) + 0.4 * chance.per_column("trees")
    height_map = height_map.with_columns((trees > 0.57) & height_map.is_flat(), TREE_M, Material.FOLIAGE)
    height_map = height_map.with_columns(is_bridge & (from_water < 3.0), 0.0, Material.OPEN)
    height_map = height_map.with_columns(is_tower & (chance.per_cell("towers", pitch=2) < 0.6), 3.0, Material.SOLID)
    return height_map.with_columns((from_water < 0) & ~is_bridge, 0.0, Material.WATER)


def ridges(chance: Chance) -> HeightMap:
    """Make long ridges with steep sides and ramps at their ends; between them boulders and pools of lava."""
    height_map = flat_map(chance)
    for number, x, y in _places(chance, "ridge", pitch=12):
        direction = chance.whole(f"direction of ridge {number}", low=0, high=len(DIRECTIONS) - 1).long()
        to_x, to_y = DIRECTIONS[direction].unbind(-1)
        to_x, to_y = to_x[:, None, None], to_y[:, None, None]
        along = ((chance.x - x) * to_x + (chance.y - y) * to_y).abs()
        aside = ((chance.x - x) * to_y - (chance.y - y) * to_x).abs()
        half_length = chance.uniform(f"length of ridge {number}", low=5.5, high=11.5)[:, None, None]
        half_width = chance.uniform(f"width of ridge {number}", low=1.1, high=2.2)[:, None, None]
        top = chance.whole(f"height of ridge {number}", low=3, high=6)[:, None, None]
        ramp = torch.floor((half_length - along) * 1.4) / 2  # 0.7 m up for every metre: no step is higher than a metre
        height = torch.where(aside < half_width, torch.minimum(ramp.clamp(min=0), top), 0.0)
        material = torch.where(height == top, Material.REINFORCED, Material.OPEN)
        height_map = height_map.with_columns(height > height_map.height, height, material)
    height_map = height_map.with_columns(
        height_map.height.flip(1, 2) > height_map.height, height_map.height.flip(1, 2), height_map.material.flip(1, 2)
    )
    height_map = _with_boulders(height_map, chance, share=0.10, material=Material.REINFORCED)
    is_lava = torch.zeros_like(height_map.height, dtype=torch.bool)
    shore = 1.6 * chance.smooth("shores", pitch=3) - 0.8
    for number, x, y in _places(chance, "pool", pitch=16):
        radius = chance.uniform(f"radius of pool {number}", low=0.5, high=3.4)[:, None, None]
        reach = (radius + shore).clamp(min=0)
        is_lava |= (chance.x - x) * (chance.x - x) + (chance.y - y) * (chance.y - y) < reach * reach
    is_lava |= is_lava.flip(1, 2)
    return height_map.with_columns(is_lava & height_map.is_flat(), 0.0, Material.LAVA)


def ruins(chance: Chance) -> HeightMap:
    """Make ruined houses: walls with gaps, rubble beside them that units can walk over, and bushes."""
    is_wall = torch.zeros(len(chance.keys), chance.size, chance.size, dtype=torch.bool)
    for number, x, y in _places(chance, "house", pitch=11):
        half_x, half_y = (chance.whole(f"half of house {number} {axis}", low=3, high=7)[:, None, None] for axis in "xy")
        outside = torch.maximum((chance.x - torch.floor(x)).abs() - half_x, (chance.y - torch.floor(y)).abs() - half_y)
        is_wall |= (outside < 0) & (outside >= -1)
    is_wall |= is_wall.flip(1, 2)
    decay = 0.8 * chance.smooth("decay", pitch=4) + 0.2 * chance.per_column("cracks")
    is_standing = is_wall & (decay < 0.56)
    height = torch.floor((0.56 - decay) * 10).clamp(0, 3) + 2
    near_wall = F.max_pool2d(is_standing.float(), 3, stride=1, padding=1) > 0
    rubble = chance.per_column("rubble")
    is_rubble = (is_wall | near_wall & (rubble < 0.3)) & ~is_standing & (rubble < 0.75)
    rubble_height = torch.where(rubble < 0.15, 0.5, 1.0)
    height_map = flat_map(chance).with_columns(is_rubble, rubble_height, Material.SOLID)
    height_map = height_map.with_columns(is_standing, height, Material.SOLID)
    bushes = 0.7 * chance.smooth("bushes", pitch=5) + 0.3 * chance.per_column("leaves")
    return height_map.with_columns((bushes > 0.63) & height_map.is_flat(), TREE_M, Material.FOLIAGE)


BUILDERS: dict[str, Callable[[Chance], HeightMap]] = {"city": city, "forest": forest, "river": river, "ridges": ridges, "ruins": ruins}


def _places(chance: Chance, label: str, *, pitch: int) -> list[tuple[int, Tensor, Tensor]]:
    """Return (number, x, y) of features in half of the map: one at a random place in each square of a grid. x and y are [M, 1, 1]."""
    side = max(2, round(chance.size / pitch))
    width = chance.size / side
    places = []
    for number in range((side * side + 1) // 2):
        middle_x, middle_y = ((cell + 0.5) * width - chance.size / 2 for cell in divmod(number, side))
        x, y = (chance.uniform(f"{axis} of {label} {number}", low=-width / 2, high=width / 2)[:, None, None] for axis in "xy")
        places.append((number, x + middle_x, y + middle_y))
    return places


def _with_hills(height_map: HeightMap, chance: Chance, *, pitch: int, above: float, steepness: float, highest_m: float) -> HeightMap:
    """Add bare hills where smooth noise is above a level. Units can walk up their sides nearly everywhere."""
    rise = (chance.smooth("hills", pitch=pitch) - above) * steepness
    height = torch.floor(rise.clamp(0, highest_m) * 2) / 2
    return height_map.with_columns(height > height_map.height, height, Material.OPEN)


def _with_boulders(height_map: HeightMap, chance: Chance, *, share: float, material: Material = Material.SOLID) -> HeightMap:
    """Add rocks of two by two columns, in a `share` of the squares of four by four columns."""
    is_rock = blocks(chance.size) & (chance.per_cell("boulders", pitch=BLOCK_PITCH) < share)
    height = torch.floor(chance.per_cell("height of boulders", pitch=BLOCK_PITCH) * 3) + 2
    return height_map.with_columns(is_rock & height_map.is_flat(), height, material)
