"""When the learner should worry: every threshold has its name here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from esper.rl.events import GradientNorms, Update, Warned


@dataclass(frozen=True, slots=True)
class Thresholds:
    ratio_explosion: float = 10.0  # largest probability ratio of an update
    entropy_collapse: float = 0.02  # normalised entropy of a head
    value_collapse: float = 0.01  # spread of the values relative to that of the returns
    low_explained_variance: float = -0.5
    gradient_health: float = 0.3


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


def warnings(
    update: Update,
    gradients: GradientNorms,
    *,
    value_spread: float,
    return_spread: float,
    mattered: dict[str, bool],
    thresholds: Thresholds,
) -> Iterator[Warned]:
    """What is worrying about an update. `mattered` says of the discrete heads which mattered in it: only their entropy has a bottom."""

    def warned(diagnostic: str, subject: str, value: float) -> Warned:
        return Warned(step=update.step, diagnostic=diagnostic, subject=subject, value=value, threshold=getattr(thresholds, diagnostic))

    if update.ratio_max > thresholds.ratio_explosion:
        yield warned("ratio_explosion", "", update.ratio_max)
    for head, entropy in update.entropy.items():
        if mattered.get(head, False) and entropy < thresholds.entropy_collapse:
            yield warned("entropy_collapse", head, entropy)
    if return_spread > 0 and value_spread / return_spread < thresholds.value_collapse:
        yield warned("value_collapse", "", value_spread / return_spread)
    if update.explained_variance < thresholds.low_explained_variance:
        yield warned("low_explained_variance", "", update.explained_variance)
    for part, health in gradients.health.items():
        if health < thresholds.gradient_health:
            yield warned("gradient_health", part, gradients.norms[part])
