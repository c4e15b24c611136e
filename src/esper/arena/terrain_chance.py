"""Random numbers for landscapes. They depend only on seed, label and place, so a map does not depend on the other maps of its batch.

They use only integer arithmetic and float operations whose rounding IEEE 754 defines (no sine, power or fused product). So a seed gives
the same map, bit for bit, on every processor and in every batch.

Shapes: M = maps, S = side of the map in columns. Grids are [M, S, S], indexed [map, i(x), j(y)]. x and y are centred: -S/2 .. S/2.
The half turn about the centre takes column k of the S·S flattened ones to S·S - 1 - k.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

STEP = -7046029254386353131  # the golden ratio in 64 bits, which spreads neighbouring places far apart
FIRST, SECOND = -4658895280553007687, -7723592293110705685  # odd multipliers that carry every bit upwards


class Chance:
    """Random numbers for M seeds [M] int64. The same label always gives the same numbers; different labels are independent."""

    def __init__(self, seeds: Tensor, *, size: int) -> None:
        self.keys = mixed(seeds + STEP)
        self.size = size
        middle = (size - 1) / 2
        along = torch.arange(size, dtype=torch.float32) - middle  # column centres, ±0.5 .. ±(S - 1)/2
        self.x, self.y = along[:, None], along[None, :]  # [S, 1], [1, S]

    def bits(self, label: str, place: Tensor | int = 0) -> Tensor:
        """Return 24 random bits for each seed and place. Places [M, S, S] differ by map; places of fewer dimensions apply to all maps."""
        places = torch.as_tensor(place, dtype=torch.int64)
        keys = mixed(self.keys ^ zlib.crc32(label.encode()))
        keys = keys.reshape(-1, *[1] * min(places.dim(), 2))
        return (mixed(keys + places * STEP) >> 40) & 0xFFFFFF

    def uniform(self, label: str, place: Tensor | int = 0, *, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return numbers that are uniform in [low, high)."""
        return self.bits(label, place).float() * 2.0**-24 * (high - low) + low

    def whole(self, label: str, place: Tensor | int = 0, *, low: int, high: int) -> Tensor:
        """Return random integers from low to high, both included, as float32."""
        return (self.bits(label, place) % (high - low + 1) + low).float()

    def per_column(self, label: str) -> Tensor:
        """Return [M, S, S], uniform in [0, 1), the same for a column and its mirror image."""
        return self.uniform(label, mirrored_places(self.size))

    def per_cell(self, label: str, *, pitch: int) -> Tensor:
        """Return the same as `per_column`, but one number per square of pitch × pitch columns. The squares meet in the centre."""
        cells = 2 * -(-self.size // (2 * pitch))
        which = torch.div(torch.arange(self.size) - self.size // 2, pitch, rounding_mode="floor") + cells // 2
        return self.uniform(label, mirrored_places(cells))[:, which][:, :, which]

    def smooth(self, label: str, *, pitch: int) -> Tensor:
        """Return smooth noise [M, S, S] in [0, 1) with hills and valleys about `pitch` columns wide, mirrored."""
        reach = self.size // (2 * pitch) + 1
        nodes = self.uniform(label, mirrored_places(2 * reach + 1))
        at = self.x[:, 0] / pitch + reach
        before = at.floor().long()
        share = at - at.floor()
        share = share * share * (3 - 2 * share)
        rows = nodes[:, before] * (1 - share)[:, None] + nodes[:, before + 1] * share[:, None]
        return rows[:, :, before] * (1 - share) + rows[:, :, before + 1] * share


def mirrored_places(side: int) -> Tensor:
    """Return numbers [side, side] of the squares of a grid. Squares that the half turn exchanges have the same number."""
    places = torch.arange(side * side).reshape(side, side)
    return torch.minimum(places, places.flip(0, 1))


def mirrored(grid: Tensor) -> Tensor:
    """Return the grid [M, S, S] with its second half replaced by the first half, turned by half a turn."""
    half = grid.shape[1] // 2
    return torch.cat([grid[:, :half], grid[:, :half].flip(1, 2)], dim=1)


def wave(x: Tensor) -> Tensor:
    """Return an odd function that resembles a sine of period 2 and height 1, made of parabolas."""
    within = x - 2 * torch.floor((x + 1) / 2)
    return 4 * within * (1 - within.abs())


def mixed(words: Tensor) -> Tensor:
    """Scramble 64-bit words one-to-one, as SplitMix64 does, so that every bit depends on every other. Products wrap around."""
    words = (words ^ _shifted(words, 30)) * FIRST
    words = (words ^ _shifted(words, 27)) * SECOND
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, treating the sign bit like any other bit."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
