"""What the learner reports. Small records, emitted where the fact is known; who listens is not the learner's business.

What is worrying about an update, by the thresholds of the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from esper.rl.config import Thresholds
from esper.runs import Event


class Update(Event, tag="update"):
    """One rollout was collected and learned from. Means are over the gradient steps taken; per-head values only where a head mattered."""

    step: int  # environment steps so far
    update: int
    episodes: int  # finished so far
    mean_return: float  # of the last 100 finished episodes (of each rank), in raw reward; nan before the first
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
    other_seconds: float = 0.0  # between the update before and this one: checkpoints, evaluations, and what else the caller did
    env_seconds: float = 0.0  # of collecting, in the steps of the environments, by the clock of this process: data wait
    bad_rewards: int = 0  # steps so far whose reward was not finite; they teach nothing
    overflows: int = 0  # gradient steps of this update that were not taken because float16 overflowed; the loss scale is halved for each


class GradientNorms(Event, tag="gradient_norms"):
    """Global L2 norms of the last minibatch's gradients, before clipping, by part of the policy."""

    step: int
    norms: dict[str, float]
    health: dict[str, float]  # 1 healthy … 0 vanished or exploded


class RewardsNotFinite(Event, tag="rewards_not_finite"):
    """Rewards of one rollout were not finite. Those steps teach nothing, and their episodes have no return."""

    step: int
    count: int


class Skipped(Event, tag="skipped"):
    """Gradient steps of one update that were not taken because loss or gradient were not finite, with the parts of the first."""

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
    diagnostic: str  # a field of `esper.rl.config.Thresholds`
    subject: str  # head or part of the policy; "" where it is the whole
    value: float
    threshold: float

    def shown(self) -> Mapping[str, Any]:
        """Show the value under the names of diagnostic and subject: gradient_health/actor."""
        return {self.diagnostic: {self.subject: self.value} if self.subject else self.value}


OF_ALL_RANKS = (Update, GradientNorms, RewardsNotFinite, Skipped, Warned)  # computed over all ranks, and so the same on each


class CompileFailed(Event, tag="compile_failed"):
    """torch.compile did not work; training goes on without it."""

    reason: str


class EpisodesRestarted(Event, tag="episodes_restarted"):
    """The environment cannot save itself, so resuming began new episodes."""

    step: int


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
