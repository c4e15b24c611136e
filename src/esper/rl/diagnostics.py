"""When the learner should worry: every threshold has its name here."""

from __future__ import annotations

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
