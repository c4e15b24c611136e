"""Convolutional hosts for images and series.

    ConvHost
      blocks   nn.Sequential of ConvBlock     each called once per forward, so a slot can follow any of them ("blocks.0", ...)
                 conv    3 wide, padding 1, no bias (the norm has one)
                 norm    batch norm
                 relu
                 pool    max-pool by 2, or identity
      (mean over all positions)
      head     nn.Linear

There is no other computation and no data-dependent control flow, so N hosts can run as one model with stacked parameters.

Shapes: B = samples, C = channels, S... = one spatial dimension (series) or two (images), K = classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

_CONV = {1: nn.Conv1d, 2: nn.Conv2d}
_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}
_POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d}


class ConvBlock(nn.Module):
    """Convolution, batch norm, ReLU and, with `pool`, max-pool: [B, in, S...] to [B, out, S...] or [B, out, S/2...]."""

    def __init__(self, in_channels: int, out_channels: int, *, spatial: int = 2, pool: bool = True) -> None:
        super().__init__()
        self.conv = _CONV[spatial](in_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.norm = _NORM[spatial](out_channels)
        self.relu = nn.ReLU()
        self.pool = _POOL[spatial](2) if pool else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.pool(self.relu(self.norm(self.conv(inputs)))))


class ConvHost(nn.Module):
    """Blocks in sequence, the mean over all positions, and a linear head: [B, in, S...] to logits [B, K].

    `pool` says for every block whether it halves the size. `spatial` is 2 for images and 1 for series.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        channels: Sequence[int] = (4, 8, 16),
        *,
        pool: Sequence[bool] = (True, True, False),
        spatial: int = 2,
    ) -> None:
        super().__init__()
        if spatial not in _CONV:
            raise ValueError(f"spatial is 1 (series) or 2 (images); got {spatial!r}")
        if len(pool) != len(channels) or not channels:
            raise ValueError(
                f"this host has {len(pool)} blocks, one for each entry of pool, but channels has {len(channels)} entries: {channels}"
            )
        self.blocks = nn.Sequential(
            *(
                ConvBlock(before, after, spatial=spatial, pool=is_pooled)
                for before, after, is_pooled in zip([in_channels, *channels[:-1]], channels, pool, strict=True)
            )
        )
        self.head = nn.Linear(channels[-1], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.blocks(inputs)  # [B, C, S...]
        return cast(Tensor, self.head(features.flatten(2).mean(dim=2)))
