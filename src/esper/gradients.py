"""Gradients: a measure of their health, statistics over training steps, and the removal of a loss scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """Return the gradient of the loss, given the gradient of loss · `scale`.

    Half-precision gradients become float32 first, because half precision cannot hold a large scale.
    """
    if scale is None:
        return gradient
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    return wide / scale.to(gradient.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Statistics of a seed's gradients since the last epoch. Norms are global L2 norms, without loss scaling, before clipping."""

    steps: int
    mean_norm: float
    max_norm: float
    health: float  # in [0, 1], see esper.gradients.gradient_health
    skipped: int  # steps not taken because a gradient of the seed or of its host was not finite

    @classmethod
    def of(cls, norms: Sequence[float], *, skipped: int = 0, unit: float = 1.0) -> GradientStats:
        """Build the statistics from the norms of all steps. A norm that is not finite counts as a skipped step.

        `skipped` counts the further steps that were skipped although the seed's own gradient was finite. `unit` is the unit of the loss,
        see LossRange.

        >>> GradientStats.of([0.5, 1.5]).mean_norm
        1.0
        """
        finite = [norm for norm in norms if math.isfinite(norm)]
        mean = sum(finite) / len(finite) if finite else 0.0
        health = sum(gradient_health(norm / unit) for norm in finite) / len(norms) if norms else 0.0
        return cls(len(norms), mean, max(finite, default=0.0), health, skipped + len(norms) - len(finite))
