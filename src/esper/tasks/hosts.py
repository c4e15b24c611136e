"""Hosts for images, series and vectors, and `make_host`, which makes hosts of any family, width and depth.

    ConvHost
      blocks   nn.Sequential of ConvBlock     each called once per forward, so a slot can follow any of them ("blocks.0", ...)
                 conv    3 wide, padding 1, no bias (the norm has one)
                 norm    batch norm
                 relu
                 pool    max-pool by 2, or identity
      (mean over all positions)
      head     nn.Linear

    ResidualHost
      blocks   nn.Sequential of ConvBlock and ResidualBlock: the first changes the number of channels, the second adds to them
      (mean over all positions)
      head     nn.Linear

    MLPHost
      blocks   nn.Sequential of linear layers, each with a ReLU
      head     nn.Linear

There is no other computation and no data-dependent control flow, so N hosts can run as one model with stacked parameters. Transformers are
in `esper.tasks.gpt_host`.

Shapes: B = samples, C = channels, S... = one spatial dimension (series) or two (images), F = features, K = classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from esper.tasks.gpt_host import GPTHost

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


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms, added to their input, and a ReLU: [B, C, S...] to [B, C, S...]."""

    def __init__(self, channels: int, *, spatial: int = 2) -> None:
        super().__init__()
        self.inner = ConvBlock(channels, channels, spatial=spatial, pool=False)
        self.conv = _CONV[spatial](channels, channels, kernel_size=3, padding=1, bias=False)
        self.norm = _NORM[spatial](channels)
        self.relu = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.relu(inputs + self.norm(self.conv(self.inner(inputs)))))


class ResidualHost(nn.Module):
    """Residual blocks, the mean over all positions, and a linear head: [B, in, S...] to logits [B, K].

    `channels` has an entry for each residual block. Where it changes, and before the first, is a `ConvBlock`; but for that first one, it
    halves the size.
    """

    def __init__(self, in_channels: int, num_classes: int, channels: Sequence[int] = (8, 16), *, spatial: int = 2) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        before = in_channels
        for number, after in enumerate(channels):
            if number == 0 or after != before:
                blocks.append(ConvBlock(before, after, spatial=spatial, pool=number > 0))
            blocks.append(ResidualBlock(after, spatial=spatial))
            before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.blocks(inputs)  # [B, C, S...]
        return cast(Tensor, self.head(features.flatten(2).mean(dim=2)))


class MLPHost(nn.Module):
    """Linear layers with ReLUs and a linear head: inputs [B, ...] of F values each to logits [B, K]."""

    def __init__(self, features: int, num_classes: int, widths: Sequence[int] = (16, 16)) -> None:
        super().__init__()
        sizes = [features, *widths]
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(sizes)))
        self.head = nn.Linear(sizes[-1], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.blocks(inputs.flatten(1))))


# Families

FAMILIES = ("conv", "residual", "mlp", "gpt")
_NAME = re.compile(rf"({'|'.join(FAMILIES)})-([1-9]\d*)x([1-9]\d*)")
_GPT_HEAD = 16  # features of an attention head, at least


def is_family_name(name: str) -> bool:
    """Return whether a name is that of a family with a width and a number of blocks.

    >>> is_family_name("residual-8x3"), is_family_name("8-16-32")
    (True, False)
    """
    return _NAME.fullmatch(name) is not None


def make_host(name: str, example_input: Tensor, num_classes: int) -> nn.Module:
    """Make a host of a family for inputs like the example: tokens [B, T] for a gpt, [B, C, S...] for convolutions, any for an mlp.

    A name has the family, the width and the number of blocks: "residual-8x3". The width is that of the first block; convolutional hosts are
    twice as wide after each halving of the size.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f'a host of a family has a name such as "residual-8x3"; the families are {", ".join(FAMILIES)}')
    family, width, blocks = found[1], int(found[2]), int(found[3])
    shape, has_tokens = list(example_input.shape[1:]), not example_input.is_floating_point()
    if has_tokens != (family == "gpt") or (family in ("conv", "residual") and len(shape) not in (2, 3)):
        raise ValueError(f"a host of the family {family} cannot read {'tokens' if has_tokens else 'values'} of shape {shape}")
    if family == "gpt":
        return GPTHost(num_classes, sequence_length=shape[0], width=width, layers=blocks, heads=_heads(width))
    if family == "mlp":
        return MLPHost(math.prod(shape), num_classes, [width] * blocks)
    spatial, most = len(shape) - 1, int(math.log2(min(shape[1:]) / 2))  # halvings that leave two positions
    if family == "conv":
        pool = _halvings(blocks, min(blocks, most))
        return ConvHost(shape[0], num_classes, _channels(width, pool), pool=pool, spatial=spatial)
    halved = _halvings(blocks - 1, min(blocks - 1, most))
    return ResidualHost(shape[0], num_classes, _channels(width, [*halved, False]), spatial=spatial)


def _heads(width: int) -> int:
    """Return the largest number of attention heads that divides the width and leaves each `_GPT_HEAD` features; 1 for a narrow host.

    >>> _heads(8), _heads(48), _heads(50)
    (1, 3, 2)
    """
    return max(heads for heads in range(1, max(width // _GPT_HEAD, 1) + 1) if width % heads == 0)


def _halvings(blocks: int, count: int) -> list[bool]:
    """Return after which blocks the size is halved, as early and as evenly as possible.

    >>> _halvings(5, 2)
    [True, False, True, False, False]
    """
    return [math.ceil((block + 1) * count / blocks) > math.ceil(block * count / blocks) for block in range(blocks)]


def _channels(width: int, halved: Sequence[bool]) -> list[int]:
    """Return the channels of each block: the width, doubled after each halving of the size.

    >>> _channels(8, [True, False, True])
    [8, 16, 16]
    """
    return [width * 2 ** sum(halved[:block]) for block in range(len(halved))]
