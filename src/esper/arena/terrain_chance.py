"""Chance for landscapes: random numbers that are a pure function of seed, label and place, so that a map never depends on its neighbours
in the batch.

Only integer arithmetic and the float operations that IEEE 754 rounds in one way are used (no sine, no power, no fused product): the same
seed gives the same map, bit for bit, on every processor and in every batch.

Shapes: M = maps, S = side of the map in columns. Grids are [M, S, S], indexed [map, i(x), j(y)]. x and y are centred: -S/2 .. S/2.
The half turn about the centre takes column k of the S·S flattened ones to S·S - 1 - k.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

STEP = -7046029254386353131  # the golden ratio in 64 bits: far apart for neighbouring places
FIRST, SECOND = -4658895280553007687, -7723592293110705685  # odd multipliers that spread every bit upwards


class Chance:
    """Random numbers for M seeds [M] int64 at once. Asking twice gives the same numbers; other labels give independent ones."""

    def __init__(self, seeds: Tensor, *, size: int) -> None:
        self.keys = mixed(seeds + STEP)
        self.size = size
        middle = (size - 1) / 2
        along = torch.arange(size, dtype=torch.float32) - middle  # column centres, ±0.5 .. ±(S - 1)/2
        self.x, self.y = along[:, None], along[None, :]  # [S, 1], [1, S]

    def bits(self, label: str, place: Tensor | int = 0) -> Tensor:
        """24 random bits for each seed and place. Places [M, S, S] are each map's own; those of fewer dimensions are for all maps."""
        places = torch.as_tensor(place, dtype=torch.int64)
        keys = mixed(self.keys ^ zlib.crc32(label.encode()))
        keys = keys.reshape(-1, *[1] * min(places.dim(), 2))
        return (mixed(keys + places * STEP) >> 40) & 0xFFFFFF

    def uniform(self, label: str, place: Tensor | int = 0, *, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Uniform in [low, high)."""
        return self.bits(label, place).float() * 2.0**-24 * (high - low) + low

    def whole(self, label: str, place: Tensor | int = 0, *, low: int, high: int) -> Tensor:
        """A whole number from low to high, both included, as float32."""
        return (self.bits(label, place) % (high - low + 1) + low).float()

    def per_column(self, label: str) -> Tensor:
        """[M, S, S] uniform in [0, 1), the same for a column and its mirror image."""
        return self.uniform(label, mirrored_places(self.size))

    def per_cell(self, label: str, *, pitch: int) -> Tensor:
        """Like `per_column`, but one number for each square of pitch × pitch columns; the squares meet in the centre."""
        cells = 2 * -(-self.size // (2 * pitch))
        which = torch.div(torch.arange(self.size) - self.size // 2, pitch, rounding_mode="floor") + cells // 2
        return self.uniform(label, mirrored_places(cells))[:, which][:, :, which]

    def smooth(self, label: str, *, pitch: int) -> Tensor:
        """[M, S, S] in [0, 1): hills and valleys about `pitch` columns wide, mirrored."""
        reach = self.size // (2 * pitch) + 1
        nodes = self.uniform(label, mirrored_places(2 * reach + 1))
        at = self.x[:, 0] / pitch + reach
        before = at.floor().long()
        share = at - at.floor()
        share = share * share * (3 - 2 * share)
        rows = nodes[:, before] * (1 - share)[:, None] + nodes[:, before + 1] * share[:, None]
        return rows[:, :, before] * (1 - share) + rows[:, :, before + 1] * share


def mirrored_places(side: int) -> Tensor:
    """[side, side] numbers of the squares of a board; those that the half turn exchanges have the same."""
    places = torch.arange(side * side).reshape(side, side)
    return torch.minimum(places, places.flip(0, 1))


def mirrored(grid: Tensor) -> Tensor:
    """[M, S, S] with the second half replaced by the first, turned."""
    half = grid.shape[1] // 2
    return torch.cat([grid[:, :half], grid[:, :half].flip(1, 2)], dim=1)


def wave(x: Tensor) -> Tensor:
    """Looks like a sine of period 2 and height 1, made of parabolas; odd."""
    within = x - 2 * torch.floor((x + 1) / 2)
    return 4 * within * (1 - within.abs())


def mixed(words: Tensor) -> Tensor:
    """A one-to-one scrambling of 64-bit words in which every bit depends on every other. Products wrap around."""
    words = (words ^ _shifted(words, 30)) * FIRST
    words = (words ^ _shifted(words, 27)) * SECOND
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, filled with zeros; the sign bit is a bit like any other."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
