"""Gradients: their norm, and a measure of its health. Norms are global L2 norms of unscaled gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

VANISHING = 1e-7  # gradient norm
EXPLODING = 100.0  # gradient norm
_DECADES = 2.0  # width of the range over which health falls, in powers of ten


def gradient_health(norm: float) -> float:
    """Return the health of a gradient norm: 1 if it is healthy, ½ if it vanishes, 0 if it explodes.

    It is 1 from 100·VANISHING to EXPLODING. Below, it falls linearly in log(norm) to ½ at VANISHING; above, it falls to 0 at 100·EXPLODING.
    Vanishing counts as less harmful: it only stops learning, while an exploding gradient destroys the weights.

    >>> [gradient_health(norm) for norm in (0.0, 1e-6, 0.5, 1e3, math.inf)]
    [0.5, 0.75, 1.0, 0.5, 0.0]
    """
    if not math.isfinite(norm):
        return 0.0
    decade = math.log10(norm) if norm > 0 else -math.inf
    above_vanishing = min(max((decade - math.log10(VANISHING)) / _DECADES, 0.0), 1.0)
    below_exploding = min(max((math.log10(EXPLODING) + _DECADES - decade) / _DECADES, 0.0), 1.0)
    return below_exploding * (0.5 + 0.5 * above_vanishing)


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients as a tensor on their device; 0 if no parameter has one."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return get_total_norm(gradients) if gradients else torch.zeros(())


def unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """Return the gradient of the loss, given the gradient of loss · `scale`.

    Half-precision gradients become float32 first, because half precision cannot hold a large scale.
    """
    if scale is None:
        return gradient
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    return wide / scale.to(gradient.device, non_blocking=True)
