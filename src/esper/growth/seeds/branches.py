"""The built-in branches of seeds: small networks that add zero at birth and learn from the first step.

A branch maps the output h of a submodule to the delta that is added to it. Rules that all branches here follow:

- The last layer, or the gain of a norm, starts at zero, so a new seed is the identity. Nothing follows that layer: a ReLU there would keep
  its gradient at zero for ever. The layer has a bias, whose gradient is not zero for any input.
- No batch norm, dropout or buffers: a branch computes the same in training and evaluation, with a batch of one and on many ranks.
- Convolutional branches have no norm: their hosts normalise already, and a norm over few channels cost accuracy (docs/log.md).

Shapes: B = batch, C = channels, H, W (or L) = positions in space, T = positions in a sequence, D = features.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.growth.host.layout import Place

Layer = TypeVar("Layer", bound=nn.Module)


def norm(place: Place) -> nn.Module:
    """Normalised copy of the signal, with a gain and a bias per channel or feature."""
    layer = _group_norm(place.width, place.positions) if place.kind == "conv" else _layer_norm(place.width)
    assert layer is not None, f"there is nothing to normalise at {place}"
    return _zeroed(layer)


def can_normalise(place: Place) -> bool:
    """Return whether a norm would see several values, since it turns a single value into zero, and no forbidden positions."""
    if place.kind == "conv":
        return can_pool(place) and (place.width > 1 or place.positions > 1)
    return place.width > 1


def can_pool(place: Place) -> bool:
    """Return whether a branch may use all positions."""
    return not place.is_causal and not place.alone


def can_convolve(place: Place) -> bool:
    """Return whether a convolution may use neighbours. In a causal plane it would see later pixels; along a line it can look back only."""
    return not place.alone and (not place.is_causal or place.spatial == 1)


def can_attend(place: Place) -> bool:
    """Return whether attention may use other positions: only in a sequence, because a plane has too many."""
    return not place.alone and len(place.shape) == 2


def squeeze_excite(place: Place) -> nn.Module:
    """Squeeze-and-excitation: scales the channels by their means over all positions."""
    return SqueezeExcite(place.width, spatial=place.spatial)


def conv1x1(place: Place) -> nn.Module:
    """1x1 convolution, which mixes channels at each position."""
    return _chain(act=_leaky(), conv=_zeroed(_conv(place, place.width, place.width, kernel=1)))


def conv3x3(place: Place) -> nn.Module:
    """3x3 convolution, which mixes neighbours and channels."""
    return _chain(act=_leaky(), conv=_zeroed(_conv(place, place.width, place.width)))


def double_conv3x3(place: Place) -> nn.Module:
    """Two 3x3 convolutions, as in a residual block."""
    return _two_convs(place, between=place.width)


def wide_conv3x3(place: Place) -> nn.Module:
    """Two 3x3 convolutions with twice as many channels between them."""
    return _two_convs(place, between=2 * place.width)


def _two_convs(place: Place, *, between: int) -> nn.Module:
    return _chain(
        act1=_leaky(),
        conv1=_conv(place, place.width, between),
        act2=_leaky(),
        conv2=_zeroed(_conv(place, between, place.width)),
    )


def bottleneck(place: Place) -> nn.Module:
    """3x3 convolution in a quarter of the channels, between two 1x1 convolutions."""
    narrow = max(place.width // 4, 4)
    return _chain(
        act1=_leaky(),
        down=_conv(place, place.width, narrow, kernel=1),
        act2=_leaky(),
        conv=_conv(place, narrow, narrow),
        act3=_leaky(),
        up=_zeroed(_conv(place, narrow, place.width, kernel=1)),
    )


def depthwise(place: Place) -> nn.Module:
    """Depthwise separable convolution: mixes neighbours within each channel, then channels at each position."""
    width = place.width
    return _chain(
        act=_leaky(),
        depthwise=_conv(place, width, width, groups=width),
        pointwise=_zeroed(_conv(place, width, width, kernel=1)),
    )


def low_rank(place: Place) -> nn.Module:
    """Two linear layers with at most eight features between them."""
    rank = min(8, place.width)
    return _chain(down=nn.Linear(place.width, rank), gelu=nn.GELU(), up=_zeroed(nn.Linear(rank, place.width)))


def mlp(place: Place) -> nn.Module:
    """Two linear layers with twice as many features between them, after a norm."""
    width = place.width
    return _chain(
        norm=_layer_norm(width),
        up=nn.Linear(width, 2 * width),
        gelu=nn.GELU(),
        down=_zeroed(nn.Linear(2 * width, width)),
    )


def attention(place: Place) -> nn.Module:
    """Self-attention over the positions of a sequence."""
    return Attention(place.width, is_causal=place.is_causal)


class SqueezeExcite(nn.Module):
    """h · tanh(gate(mean of h over space)), for h [B, C, L] or [B, C, H, W]."""

    def __init__(self, width: int, *, spatial: int) -> None:
        super().__init__()
        narrow = max(width // 4, 4)
        self.space = tuple(range(-spatial, 0))
        self.squeeze = nn.Linear(width, narrow)
        self.excite = _zeroed(nn.Linear(narrow, width))

    def forward(self, h: Tensor) -> Tensor:
        # SiLU instead of ReLU: the means of the samples in a batch are similar, so a ReLU unit that is off is often off for all samples.
        gate = torch.tanh(self.excite(F.silu(self.squeeze(h.mean(self.space)))))  # [B, C], within ±1
        return h * gate.reshape(*gate.shape, *(1 for _ in self.space))


class Attention(nn.Module):
    """Self-attention over [..., T, D] with a norm before it."""

    def __init__(self, width: int, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.heads = heads_for(width)
        self.norm = _layer_norm(width) or nn.Identity()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = _zeroed(nn.Linear(width, width))

    def forward(self, h: Tensor) -> Tensor:
        queries_keys_values = self.qkv(self.norm(h)).unflatten(-1, (3, self.heads, -1))  # [..., T, 3, heads, D / heads]
        query, key, value = (part.transpose(-3, -2) for part in queries_keys_values.unbind(-3))  # each [..., heads, T, D / heads]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        result: Tensor = self.out(seen.transpose(-3, -2).flatten(-2))
        return result


class BatchSecond(nn.Module):
    """Adapter that applies a branch for [B, T, D] to [T, B, D]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = self.inner(h.transpose(0, 1)).transpose(0, 1)
        return result


def heads_for(width: int) -> int:
    """Return the largest number of heads that divides the features into equal parts of at least 16.

    >>> [heads_for(width) for width in (8, 32, 48, 100)]
    [1, 2, 3, 5]
    """
    return max((heads for heads in range(1, width // 16 + 1) if width % heads == 0), default=1)


def groups_for(channels: int) -> int:
    """Return the number of groups of about 16 channels for a group norm; 1 if they do not divide evenly.

    >>> [groups_for(channels) for channels in (8, 31, 32, 40, 100)]
    [1, 1, 2, 2, 1]
    """
    groups = max(channels // 16, 1)
    return groups if channels % groups == 0 else 1


def _group_norm(channels: int, positions: int) -> nn.GroupNorm | None:
    """Return a group norm; None for a single value, which a norm would turn into zero."""
    return nn.GroupNorm(groups_for(channels), channels) if channels > 1 or positions > 1 else None


def _layer_norm(features: int) -> nn.LayerNorm | None:
    """Return a layer norm; None for a single value, which a norm would turn into zero."""
    return nn.LayerNorm(features) if features > 1 else None


class LookBack(nn.Conv1d):
    """Causal convolution along a line: a position depends on itself and those before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


def _conv(place: Place, inputs: int, outputs: int, *, kernel: int = 3, groups: int = 1) -> nn.Module:
    assert place.spatial in (1, 2), place
    layer: nn.Conv1d | nn.Conv2d
    if place.is_causal and kernel > 1:
        assert can_convolve(place), place
        layer = LookBack(inputs, outputs, kernel, groups=groups)
    else:
        conv = nn.Conv1d if place.spatial == 1 else nn.Conv2d
        layer = conv(inputs, outputs, kernel, padding=kernel // 2, groups=groups)
    # Keep the scale of the signal. With torch's default the output would be a fraction of it, and the next layer would learn more slowly.
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def _leaky() -> nn.Module:
    """Return a leaky ReLU. With plain ReLUs all units of a narrow layer can be off, and stay off."""
    return nn.LeakyReLU(0.1)


def _zeroed(layer: Layer) -> Layer:
    """Set all parameters of a layer to zero and return it."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def _chain(**layers: nn.Module | None) -> nn.Sequential:
    """Chain the layers in this order and leave out those that are None; the names of the others do not depend on it."""
    return nn.Sequential(OrderedDict((name, layer) for name, layer in layers.items() if layer is not None))
