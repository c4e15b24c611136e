"""Events of the learner, and the thresholds that turn diagnostics of an update into warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from esper.rl.config import ThresholdsConfig
from esper.runs import Event


class Update(Event, tag="update"):
    """One rollout was collected and learned from. Means are over the gradient steps taken; a head's, over the steps where it mattered."""

    step: int  # environment steps so far
    update: int
    episodes: int  # finished so far
    mean_return: float  # raw return of the last 100 finished episodes (of each rank); nan before the first
    mean_length: float
    policy_loss: float
    value_loss: float
    entropy: dict[str, float]  # per head, normalised
    kl: dict[str, float]  # per head
    total_kl: float
    clip_fraction: float
    ratio_max: float
    explained_variance: float
    grad_norm: float
    learning_rate: float
    gradient_steps: int  # taken; fewer than planned after a KL stop or a skip
    skipped: int  # non-finite gradient steps so far
    steps_per_second: float
    collect_seconds: float
    update_seconds: float
    other_seconds: float = 0.0  # time the caller spent between the update before and this one: checkpoints, evaluations and so on
    env_seconds: float = 0.0  # part of collect_seconds spent in the environments, measured in this process: data wait
    bad_rewards: int = 0  # steps so far whose reward was not finite; they are not learned from
    overflows: int = 0  # gradient steps of this update not taken because float16 overflowed; each halves the loss scale


class GradientNorms(Event, tag="gradient_norms"):
    """L2 norms of the gradients of the last minibatch, before clipping, by part of the policy."""

    step: int
    norms: dict[str, float]
    health: dict[str, float]  # 1 healthy, 0.5 vanished, 0 exploded


class RewardsNotFinite(Event, tag="rewards_not_finite"):
    """Rewards of one rollout were not finite. These steps are not learned from, and their episodes have no return."""

    step: int
    count: int


class Skipped(Event, tag="skipped"):
    """Gradient steps of one update were not taken because loss or gradient was not finite. The losses are those of the first one."""

    step: int
    count: int
    in_a_row: int
    policy_loss: float
    value_loss: float
    entropy: float
    grad_norm: float


class Warned(Event, tag="warned"):
    """A diagnostic crossed its threshold."""

    step: int
    diagnostic: str  # a field of `esper.rl.config.ThresholdsConfig`
    subject: str  # head or part of the policy; "" for the whole policy
    value: float
    threshold: float

    def shown(self) -> Mapping[str, Any]:
        """Show the value under the names of diagnostic and subject: gradient_health/actor."""
        return {self.diagnostic: {self.subject: self.value} if self.subject else self.value}


class CompileFailed(Event, tag="compile_failed"):
    """torch.compile failed; training continues without it."""

    reason: str


class EpisodesRestarted(Event, tag="episodes_restarted"):
    """New episodes were begun on resuming, because the environment cannot be saved."""

    step: int


OF_ALL_RANKS = (Update, GradientNorms, RewardsNotFinite, Skipped, Warned)  # computed over all ranks, so they are the same on each


def warnings(
    update: Update,
    gradients: GradientNorms,
    *,
    value_spread: float,
    return_spread: float,
    mattered: dict[str, bool],
    thresholds: ThresholdsConfig,
) -> Iterator[Warned]:
    """Yield a warning for every diagnostic of an update that crosses its threshold.

    `mattered` tells for each discrete head whether it mattered. Only the entropy of discrete heads has a lower bound and is checked.
    """

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
