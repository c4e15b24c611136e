"""Gradients: their norm, and how healthy a norm is. Norms are global L2 norms of unscaled gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

VANISHING = 1e-7  # gradient norms
EXPLODING = 100.0
_DECADES = 2.0  # over which health falls off beyond each of them


def gradient_health(norm: float) -> float:
    """1 for a healthy gradient norm, falling without a jump to ½ where it vanishes and to 0 where it explodes.

    Between VANISHING·100 and EXPLODING it is 1. Below, it falls linearly in the logarithm and reaches ½ at VANISHING; above, it reaches 0
    two decades beyond EXPLODING: a gradient that explodes destroys what was learned, one that vanishes only learns nothing.

    >>> [gradient_health(norm) for norm in (0.0, 1e-6, 0.5, 1e3, math.inf)]
    [0.5, 0.75, 1.0, 0.5, 0.0]
    """
    if not math.isfinite(norm):
        return 0.0
    decade = math.log10(norm) if norm > 0 else -math.inf
    alive = min(max((decade - math.log10(VANISHING)) / _DECADES, 0.0), 1.0)
    calm = min(max((math.log10(EXPLODING) + _DECADES - decade) / _DECADES, 0.0), 1.0)
    return calm * (0.5 + 0.5 * alive)


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The norm of the gradients that are there, as a tensor on their device; 0 where there is none. An iterator is fine."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return get_total_norm(gradients) if gradients else torch.zeros(())


def unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """The gradient of a loss, from that of the loss times `scale`, at least in single precision: half cannot hold a large scale."""
    if scale is None:
        return gradient
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    return wide / scale.to(gradient.device, non_blocking=True)
