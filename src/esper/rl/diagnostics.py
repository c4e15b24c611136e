"""What is worrying about an update, by the thresholds of the config."""

from __future__ import annotations

from collections.abc import Iterator

from esper.rl.config import Thresholds
from esper.rl.events import GradientNorms, Update, Warned


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
            yield warned("gradient_health", part, health)
