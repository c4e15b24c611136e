"""A place in a host: where a seed could grow, what flows there, and why nothing can grow elsewhere.

Shapes: B = batch, C = channels, H, W (or L) = positions in space, T = positions in a sequence, D = features. Features come second in a
conv place and last in a token place, whose positions may be those of a sequence or of a plane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

CPU = torch.device("cpu")
Kind = Literal["conv", "token", "dense"]


@dataclass(frozen=True, slots=True)
class Place:
    """The output of one submodule. `shape` is that of one sample: (C, H, W) or (C, L), (T, D) or (H, W, D), (D,)."""

    name: str  # of the submodule in the host
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32  # of the parameters that a seed gets
    device: torch.device = CPU
    batch_axis: int = 0  # 1 where a sequence is [T, B, D]; a branch gets it as [B, T, D]
    is_causal: bool = False  # positions of a sequence see only those before them, so a seed must not look ahead either
    alone: str = ""  # why a seed must treat every position of a sequence alone, if it must: masks and caches of the host do not reach it
    is_fused: bool = False  # in evaluation, a module around it computes it by a kernel of its own, unless the submodule has a hook
    depth: float = 0.0  # 0 at the host's input, 1 at its output, by FLOPs
    flops_behind: int = 0  # of the host's forward pass for one sample, after this place

    @property
    def width(self) -> int:
        """Channels or features: what a seed is built for."""
        return self.shape[0] if self.kind == "conv" else self.shape[-1]

    @property
    def positions(self) -> int:
        """Places in space or time that share a seed's weights."""
        sizes = self.shape[1:] if self.kind == "conv" else self.shape[:-1]
        return math.prod(sizes)

    @property
    def is_plane(self) -> bool:
        """Positions lie in two dimensions: [B, C, H, W] or [B, H, W, D]."""
        return len(self.shape) == 3

    @property
    def spatial(self) -> int:
        """Dimensions of space: 1 or 2 for a conv place, else 0."""
        return len(self.shape) - 1 if self.kind == "conv" else 0


@dataclass(frozen=True, slots=True)
class Call:
    """A submodule ran once, from tick `start` to tick `end` of the probe's clock; what ran inside it lies between."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A submodule after which nothing can grow."""

    name: str
    reason: str
