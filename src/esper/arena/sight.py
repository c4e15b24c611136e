"""Line of sight over columns, computed exactly and without stepping along the line.

A line is divided into slabs: a slab is the strip of columns between two neighbouring grid planes across the line's longer axis. The
columns of a slab are numbered by row. Within a slab, the line changes by at most one row, so it meets at most two columns. All slabs of all
lines are computed at once, in a frame in which the line never falls. There, the line is lowest in a column where it enters it, so two
comparisons per slab decide. The number of tensor operations does not depend on the data.

Shapes: B = battles, P = lines per battle, S = side of the map, N = B·P lines, K = slabs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# A line must enter a column this deep, sideways or down, to be blocked by it. This is more than the rounding of float32 on maps of up to
# 256 columns, so a line through a corner or along a roof is clear however its ends were rounded.
TOLERANCE_M = 2.0**-14


class _Lines(NamedTuple):
    """Lines in their own frames, each field [N]. One axis is along the line and one across it; grid planes are at integers on both.

    `along` is the axis on which the line is longer, oriented so that height never falls as it grows; `across` is oriented to grow with it.
    """

    low: Tensor  # the ends on the axis along: low ≤ high
    high: Tensor
    low_across: Tensor
    low_z: Tensor  # raised by the tolerance
    middle: Tensor
    middle_across: Tensor
    lean: Tensor  # across per along, in [0, 1]
    rise: Tensor  # height per along, ≥ 0
    climb: Tensor  # height per across, ≥ 0
    first_slab: Tensor
    last_slab: Tensor
    column: Tensor  # index of slab 0 and row 0 in a flattened map; the next two are the steps per slab and per row
    column_per_slab: Tensor
    column_per_row: Tensor
    is_vertical: Tensor


def lines_are_clear(tops: Tensor, eyes: Tensor, aims: Tensor, *, reach_m: float) -> Tensor:
    """Return [B, P] bool: lines from `eyes` to `aims` [B, P, 3] that are at most `reach_m` long and above all columns, `tops` [B, S, S].

    Coordinates are centred: column i covers [i - S/2, i + 1 - S/2]. The columns of both ends count like all others. Ends outside the map
    are moved to its border.

    Ties: a line is blocked if it passes through the inside of the union of all columns. Touching a top, a face or a corner does not block.
    A line exactly along the edge between two columns is blocked by the lower one, a vertical line in a corner by the lowest of four, and a
    line along the map's border by the column inside. "Exactly" means within `TOLERANCE_M`. The result is the same, bit for bit, from either
    end and, if S is even, after a half turn of the map.
    """
    shape, side = eyes.shape[:2], tops.shape[1]
    eyes, aims = (_onto_the_map(ends, side).view(-1, 3) for ends in (eyes, aims))
    is_near = (aims - eyes).square().sum(-1) <= reach_m**2
    is_blocked = _are_blocked(tops, _in_their_own_frame(eyes, aims, side), slabs=_most_slabs(reach_m, side))
    return (is_near & ~is_blocked).view(shape)


def _onto_the_map(ends: Tensor, side: int) -> Tensor:
    return torch.cat((ends[..., :2].clamp(-side / 2, side / 2), ends[..., 2:]), -1)


def _most_slabs(reach_m: float, side: int) -> int:
    """Return the largest number of slabs of a line. A line of length 2.2 can touch four slabs; a vertical line on a plane has two."""
    return max(2, min(math.ceil(min(reach_m, side)) + 1, side))


def _in_their_own_frame(eyes: Tensor, aims: Tensor, side: int) -> _Lines:
    """Compute everything that is the same for all slabs of a line.

    Rows are computed from the line's middle, not from its start. The middle is the same from both ends, and a half turn changes only its
    sign, so neither changes the rounding.
    """
    steps = (aims - eyes).abs()
    is_along_x = steps[:, 0] >= steps[:, 1]
    eye_along, eye_across = _ordered(eyes, is_along_x)
    aim_along, aim_across = _ordered(aims, is_along_x)
    step_along, step_across = _ordered(steps, is_along_x)
    toward = aim_along - eye_along
    falls = toward * (aims[:, 2] - eyes[:, 2]) < 0
    is_mirrored = falls != (toward * (aim_across - eye_across) < 0)
    along_sign, across_sign = (1.0 - 2.0 * mirrored for mirrored in (falls, is_mirrored))

    half = side // 2
    shift = side / 2 - half  # on a map with an odd side, it moves the grid planes to integers
    one, other = along_sign * eye_along, along_sign * aim_along
    low, high = torch.minimum(one, other) + shift, torch.maximum(one, other) + shift
    begin, end = low.floor(), high.ceil() - 1
    stride_along = 1.0 + (side - 1.0) * is_along_x
    stride_across = side + 1.0 - stride_along
    # Slab 0 begins at the middle plane; mirrored, it is the column on the other side of it.
    zero_along, zero_across = (half + (side - 1.0 - 2 * half) * mirrored for mirrored in (falls, is_mirrored))
    shortest = 1e-30  # avoids division by zero
    span = step_along.clamp_min(shortest)
    return _Lines(
        low=low,
        high=high,
        low_across=torch.minimum(across_sign * eye_across, across_sign * aim_across) + shift,
        low_z=torch.minimum(eyes[:, 2], aims[:, 2]) + TOLERANCE_M,
        middle=(low + high) / 2,
        middle_across=across_sign * (eye_across + aim_across) / 2 + shift,
        lean=step_across / span,
        rise=steps[:, 2] / span,
        climb=steps[:, 2] / step_across.clamp_min(shortest),
        # A vertical line on the plane between two slabs begins in the upper and ends in the lower one; both are checked.
        first_slab=torch.minimum(begin, end).clamp_min(-half),
        last_slab=torch.maximum(begin, end).clamp_max(side - 1 - half),
        column=zero_along * stride_along + zero_across * stride_across,
        column_per_slab=along_sign * stride_along,
        column_per_row=across_sign * stride_across,
        is_vertical=step_along == 0,
    )


def _ordered(vectors: Tensor, is_along_x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the components of `vectors` [N, 3] along and across."""
    x, y = vectors[:, 0], vectors[:, 1]
    return torch.where(is_along_x, x, y), torch.where(is_along_x, y, x)


def _are_blocked(tops: Tensor, lines: _Lines, *, slabs: int) -> Tensor:
    """Return the lines [N] bool that a column blocks. All other tensors here are [K, N]."""
    lowest, highest = -(tops.shape[1] // 2), tops.shape[1] - 1 - tops.shape[1] // 2
    steps = torch.arange(slabs, dtype=lines.low.dtype, device=tops.device)[:, None]
    slab = torch.minimum(lines.first_slab + steps, lines.last_slab)  # beyond the last slab, the last again
    enters, leaves = torch.maximum(slab, lines.low), torch.minimum(slab + 1, lines.high)
    # The rows in which the line enters and leaves the slab. Exactly on a plane, it leaves the row below and enters the row above.
    row_in = torch.addcmul(lines.middle_across + TOLERANCE_M, enters - lines.middle, lines.lean).floor_().clamp_(lowest, highest)
    row_out = torch.addcmul(lines.middle_across - TOLERANCE_M, leaves - lines.middle, lines.lean).ceil_().sub_(1).clamp_(lowest, highest)
    # The height of the line where it enters these two columns. If they are the same column, the second comparison adds nothing.
    z_in = torch.addcmul(lines.low_z, enters.sub_(lines.low), lines.rise)
    z_out = torch.addcmul(lines.low_z, row_out - lines.low_across, lines.climb)
    z_out = torch.maximum(z_out, z_in, out=z_out)

    column = torch.addcmul(lines.column, slab, lines.column_per_slab)
    above_in = _read(tops, torch.addcmul(column, row_in, lines.column_per_row)).sub_(z_in)
    above_out = _read(tops, torch.addcmul(column, row_out, lines.column_per_row)).sub_(z_out)
    either, both = torch.maximum(above_in, above_out), torch.minimum(above_in, above_out)
    # A line on the plane between two rows enters in the upper and leaves in the lower one; both must be above it to block it. The same
    # holds for both slabs of a vertical line, which has a second slab only on the plane between two.
    between = torch.where(lines.is_vertical, torch.minimum(both[0], both[-1]), both.amax(0))
    return torch.where(lines.lean < 2 * TOLERANCE_M, between, either.amax(0)) > 0


def _read(tops: Tensor, columns: Tensor) -> Tensor:
    """Return the tops at columns [K, N] of each line's map. Indices are int32, which takes half the time of int64 on a CPU."""
    battles, per_map = len(tops), tops[0].numel()
    maps = torch.arange(0, tops.numel(), per_map, dtype=torch.int32, device=tops.device)
    maps = maps[:, None].expand(-1, columns.shape[1] // battles).reshape(-1)
    return tops.reshape(-1).index_select(0, columns.int().add_(maps).view(-1)).view_as(columns)
