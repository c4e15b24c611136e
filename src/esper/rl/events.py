"""Events of the learner, and the monitor that finds anomalies in its updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from esper.rl.config import ThresholdsConfig
from esper.runs import Event
from esper.runs.anomalies import Anomaly, Degradation, InputDrift, MemoryGrowth, Monitor, Standstill, Threshold, Vanished
from esper.runs.events import Figure, RunDeclared, RunEnded as RunEnded
from esper.runs.telemetry import Internals

TRAINING_RETURN = Figure("return in training", "update/mean_return", better="up")
DECLARED = RunDeclared(
    run_kind="ppo",
    figures=[
        Figure("evaluated return", "checkpoint_evaluated/mean_return", "evaluated/mean_return", better="up"),
        TRAINING_RETURN,
        Figure("episode length", "update/mean_length", unit="steps"),
    ],
)


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
    resources: dict[str, float] = {}  # of this process (rank 0), see `esper.runs.telemetry.ResourceMeter`
    overflows: int = 0  # gradient steps of this update not taken because float16 overflowed; each halves the loss scale


class Collected(Event, tag="collected"):
    """A part of a rollout was collected. Only trainers whose rollouts take minutes emit it."""

    step: int  # environment steps so far, with those of this rollout
    done: int  # parts of this rollout
    of: int

    def shown(self) -> Mapping[str, Any]:
        return {}


class Calibration(Event, tag="calibration"):
    """The critic's predictions of one rollout against the returns that followed, in bins of equal size by the predicted value.

    Steps of episodes that ended within the rollout count; bins without steps are left out. Values are in the units of the critic's rewards.
    """

    step: int
    predicted: list[float]  # mean value of each bin
    achieved: list[float]  # mean discounted return of its steps
    low: list[float]  # 95 % interval of that mean; environments count as independent, their steps do not
    high: list[float]
    steps: list[int]

    def __post_init__(self) -> None:
        if {len(self.achieved), len(self.low), len(self.high), len(self.steps)} != {len(self.predicted)} or min(self.steps, default=1) < 1:
            raise ValueError("every bin has a prediction, a return, an interval and at least one step")


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


class CompileFailed(Event, tag="compile_failed"):
    """torch.compile failed; training continues without it."""

    reason: str


class EpisodesRestarted(Event, tag="episodes_restarted"):
    """New episodes were begun on resuming, because the environment cannot be saved."""

    step: int


OF_ALL_RANKS = (Update, Calibration, GradientNorms, RewardsNotFinite, Skipped, Anomaly, Internals)  # rank 0 emits them for all ranks

MIB = 2**20
FEW_EPISODES = 50  # a mean return over fewer episodes is not looked at
LEARNED_VARIANCE = 0.1  # a critic that explains more of the returns' variance learns
SMALL_RATE = 0.05  # of the largest learning rate so far: below it, the policy need not change


class LearnerMonitor(Monitor):
    """Finds anomalies in the updates of a learner. Every rank has one; that of rank 0 reports."""

    def __init__(self, thresholds: ThresholdsConfig, *, has_normalizer: bool) -> None:
        super().__init__()
        self.thresholds, self.has_normalizer = thresholds, has_normalizer  # a normaliser of observations
        self.compares_returns = True  # False: opponents learn too, so a return that stands still or falls says nothing

    def see(
        self,
        update: Update,
        gradients: GradientNorms,
        *,
        value_spread: float,
        return_spread: float,
        mattered: Mapping[str, bool],
        return_error: float,
        hidden_state: float,
        inputs: Mapping[str, tuple[float, float]],
        memory: Mapping[str, int],
    ) -> list[Anomaly]:
        """Return the anomalies that begin or end with this update.

        `mattered` tells for each discrete head, and for each layer that serves some heads only, whether it mattered; only the entropy of
        discrete heads has a lower bound and is checked. `return_error` is the standard error of the mean return, nan if it is over too few
        episodes. `inputs` are size and spread of each observation as the policy gets it, `memory` the bytes in use by place. Normalised
        observations have had the size 1 in training so far; others are compared with their size in the first updates.
        """
        limits, step = self.thresholds, update.step
        self.largest_rate = max(self.largest_rate, update.learning_rate)
        seen: list[Anomaly | None] = []

        def threshold(what: str, subject: str, value: float | None, **options: Any) -> None:
            seen.append(self.detector(Threshold, subject, what=what, **options).see(value, step=step))

        threshold("ratio_explosion", "", update.ratio_max, above=limits.ratio_explosion)
        # The first gradient step always has the ratio 1, and one with a small learning rate hardly changes it.
        may_learn = update.gradient_steps > 1 and update.learning_rate >= SMALL_RATE * self.largest_rate
        threshold("ratio_collapse", "", update.ratio_max - 1 if may_learn else None, below=limits.ratio_collapse, begins_after=3)
        threshold("kl", "", update.total_kl, above=limits.kl)
        for head, entropy in update.entropy.items():
            if mattered.get(head, False) and entropy != 0.0:  # exactly 0: its masks left nothing to choose
                threshold("entropy_collapse", head, entropy, below=limits.entropy_collapse)
        share = value_spread / return_spread if return_spread > 0 else None
        threshold("value_collapse", "", share, below=limits.value_collapse, begins_after=3)
        threshold("low_explained_variance", "", update.explained_variance, below=limits.low_explained_variance, begins_after=5)
        for part, health in gradients.health.items():
            threshold("gradient_health", part, health, below=limits.gradient_health)
            # A head that did not matter has no gradient, nor have the layers that serve it alone.
            if mattered.get(part.removeprefix("head "), True):
                vanished = self.detector(Vanished, part, what="gradient_health", begins_after=limits.vanished_updates)
                seen.append(vanished.see(gradients.norms[part], step=step))
        threshold("hidden_state", "", hidden_state, above=limits.hidden_state)
        for name, (size, spread) in inputs.items():
            drift = self.detector(InputDrift, name, largest=limits.input_drift, is_relative=not self.has_normalizer)
            seen.append(drift.see(size, spread, step=step))
        # Detectors look for a loss that does not fall, so they get the return with the opposite sign.
        loss = None if math.isnan(return_error) or not self.compares_returns else -update.mean_return
        # A critic that learns is progress too: the return of a hard task may stand still for long.
        still = self.detector(Standstill, "return", window=limits.plateau_updates)
        is_learning = update.explained_variance > LEARNED_VARIANCE
        seen.append(still.see(loss, error=return_error, is_learning=is_learning, step=step))
        seen.append(self.detector(Degradation, "return", share=limits.degradation).see(loss, least=4 * return_error, step=step))
        for place, used in memory.items():
            seen.append(self.detector(MemoryGrowth, place, limit=limits.memory_growth * MIB).see(used, step=step))
        return [anomaly for anomaly in seen if anomaly is not None]


# Events of a run and its evaluations, which every trainer of the learner emits


class RunStarted(Event, tag="run_started"):
    """Training begins, or is resumed, at `step`."""

    step: int
    total_steps: int
    steps_per_update: int
    env_id: str
    num_envs: int
    device: str
    parameters: int
    seconds: float | None = None  # of training, after which it ends if they are over before the steps
    seconds_taken: float = 0.0  # of training before this session


class CheckpointEvaluated(Event, tag="checkpoint_evaluated"):
    """The policy of a checkpoint played the episodes that choose the best checkpoint."""

    step: int
    episodes: int
    mean_return: float
    mean_length: float
    cut: int = 0  # episodes that had not ended at the step limit
    steps: int = 0  # calls of `env.step`, each of which steps all environments


class Evaluated(Event, tag="evaluated"):
    """The best policy played episodes that did not choose it."""

    step: int  # of the checkpoint that was played
    episodes: int
    mean_return: float
    mean_length: float
    cut: int = 0  # episodes that had not ended at the step limit
