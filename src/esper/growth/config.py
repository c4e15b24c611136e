"""The settings of growth, and the error for mistakes of the user.

The comment behind a field is its help text on the command line. This module does not import torch, so that help is shown at once.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from typing import Literal

from esper.config import Config, ConfigError, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from esper.runs.telemetry import Level


class GrowthError(ValueError):
    """A mistake that the user can correct. The message says what is wrong and what to do."""


class RentConfig(Config):
    """The cost of a seed, which its gain must exceed: `parameters`·log(1 + added/host) + `flops`·log(1 + added/host).

    Both logarithms mean a price per doubling, of the parameters and of the FLOPs of a forward pass.

    The unit is nats for a loss whose constant predictor has ln 10 = 2.30, as with ten classes. Other losses are scaled accordingly.
    """

    parameters: NonNegativeFloat = 0.003  # factor of log(1 + added parameters / host parameters)
    flops: NonNegativeFloat = 0.003  # factor of log(1 + added FLOPs / host FLOPs)


class BudgetConfig(Config):
    """Limits on growth."""

    max_seeds: PositiveInt | None = None  # seeds in the host at the same time, including fossilized ones; None: one per slot
    max_seeds_per_place: PositiveInt = 4  # seeds at one place: after a seed is kept there, the next may grow behind it
    max_parameters: PositiveFloat | None = 32.0  # added parameters / host parameters; None: no limit
    max_flops: PositiveFloat | None = 32.0  # added FLOPs / host FLOPs of a forward pass; None: no limit


Curve = Literal["linear", "cosine", "sigmoid_6", "sigmoid_12", "sigmoid_24"]  # of alpha over time


class LifecycleConfig(Config):
    """How a seed is raised, and the length of its stages in epochs."""

    raise_mode: Literal["joint", "shadow"] = "joint"  # joint: seeds learn with the host; shadow: the host is unchanged until blending
    training_epochs: PositiveInt = 3  # shadow: minimum epochs of learning before blending
    minimum_health: Fraction = 0.7  # shadow: minimum gradient health before blending
    blend_epochs: NonNegativeInt = 2  # epochs over which alpha rises after the shadow, or moves to another target
    blending: Literal["add", "multiply", "gate"] = "add"  # how a seed's branch changes the output of its slot; each starts as the identity
    alpha_curve: Curve = "linear"  # shape of the rise or fall of alpha; a sigmoid is the steeper, the higher its number
    alpha_target: PositiveFloat = 1.0  # shadow: final alpha, at most 1; joint seeds have alpha 1 from birth
    holding_epochs: PositiveInt = 3  # minimum epochs of probation before a seed may be fossilized
    withdraw_epochs: NonNegativeInt = 2  # epochs over which alpha falls before a seed is pruned
    embargo_epochs: NonNegativeInt = 5  # epochs that a slot stays empty after a pruned seed

    def check(self) -> None:
        if self.alpha_target > 1:
            raise ConfigError("alpha_target", expected="a float > 0 and <= 1", got=self.alpha_target)


class GovernorConfig(Config):
    """When the governor takes snapshots, and when it restores one."""

    window: PositiveInt = 20  # number of recent losses that define the normal spread of the loss
    spike_sigmas: PositiveFloat = 6.0  # a loss this many standard deviations above the recent losses is a spike
    spike_checks: PositiveInt = 3  # this many spikes in a row are a disaster
    checks_per_epoch: PositiveInt = 8  # number of parts of an epoch whose mean training losses are checked
    uninformed_loss: float | None = None  # loss of a constant predictor, such as log(classes); None: `grow` measures it
    snapshot_every: PositiveInt = 1  # epochs between snapshots of a healthy state
    keep: PositiveInt = 2  # number of snapshots kept
    max_rollbacks: NonNegativeInt = 5  # rollbacks in a row, without a healthy epoch between them, before the run is given up


class HeuristicConfig(Config):
    """When the heuristic controller grows a seed, and which one. Losses are fractions of the uninformed loss."""

    grow_at: Fraction = 0.05  # fraction of the training after which it checks whether the host lacks capacity
    first_look_until: Fraction = 0.3  # that check is repeated every epoch up to this fraction of the training, until it finds a lack
    grow_until: Fraction = 0.5  # fraction of the training after which nothing new is grown, because it could not pay any more
    high_loss: Fraction = 0.05  # with a training loss below this, nothing is grown
    low_loss: Fraction = 0.02  # with a training loss below this, a host that has grown does not grow further
    projected_loss: Fraction = 0.04  # the host lacks capacity if its training loss is projected to end above this
    overfit_gap: Fraction = 0.15  # with a validation loss this far above the training loss, data are lacking rather than capacity
    lost_share: Fraction = 0.02
    """A host that has grown does not grow further if more than this fraction of what its training loss has fallen is missing in its
    validation loss. Small gaps count, because they become wide while the learning rate falls."""
    longer_training: PositiveFloat = 25.0
    """Seeds are grown if they are estimated to lower the loss at least this many times as fast as longer training of the host would, for
    the same FLOPs. Otherwise longer training is better."""
    evidence: PositiveFloat = 1.5  # minimum positions in the training data per parameter of a new seed
    evidence_of_host: PositiveFloat = 2.4
    """Minimum positions in the training data per parameter of the whole host, times the loss that the host is projected to end with: a host
    that will end near 0 has little to overfit to. Below this the host lacks data rather than capacity."""
    overshoot: PositiveFloat = 10.0  # with new seeds, the host may need this many times the data by the rule above
    evidence_at_the_end: PositiveFloat = 30.0  # the same for a place with little behind it, where a seed is part of the classifier
    few_steps: NonNegativeInt = 480
    """In a training of fewer steps, `longer_training` and `evidence_of_host` are smaller in proportion: its loss ends high for want of
    steps, which says nothing about the data, and a wide host learns more in each step."""
    least_share: Fraction = 0.1  # minimum parameters of a seed, relative to those of the host per slot: a small seed would waste its slot
    plateau_epochs: PositiveInt = 4  # the fall of the training loss is measured over this many epochs
    plateau_fall: Fraction = 0.05  # a smaller relative fall than this is a plateau
    data_change: PositiveFloat = 1.3  # a training loss this many times higher than before is taken as a change in the data


class LookaheadConfig(Config):
    """What the controller `lookahead` tries, and for how long."""

    plans: PositiveInt = 2  # plans that are tried beside that of the heuristic and growing nothing, at most
    epochs: PositiveInt = 4  # length of a trial; a seed needs some until its warm-up is over


class SeedOptimizerConfig(Config):
    """How seeds learn. Their optimisers are like the host's, with the settings of the group that holds the slot's module."""

    learning_rate_factor: PositiveFloat = 1.0  # learning rate of a seed / learning rate of that group
    max_grad_norm: PositiveFloat | None = 1.0  # limit of each seed's gradient norm, in the unit of RentConfig; None: not clipped
    warmup_epochs: NonNegativeFloat = 2.0  # epochs over which a joint seed's learning rate rises; none if it grows before the training


class BaselineConfig(Config):
    """Settings of the baseline controllers `random` and `schedule`."""

    random_seeds: NonNegativeInt | None = None  # number of seeds that random grows, at most one per slot; None: a random number
    random_until: Fraction = 0.5  # random grows its seeds within this first fraction of the training
    schedule_at: Fraction = 0.1  # fraction of the training after which schedule grows a seed in every slot


def problem_of_slots(slots: object, submodules: Sequence[str] | None = None) -> str:
    """Return what is wrong with the names and patterns of slots that were given, "" if nothing is. All rules about them are here.

    `submodules` are the names of the model's submodules, where the model is known.
    """
    if isinstance(slots, str) or not isinstance(slots, Sequence) or not all(isinstance(slot, str) for slot in slots):
        return f"slots are given as a list of names or patterns, such as ['layer1', 'blocks.*'], not as {slots!r}"
    if not slots:
        return "no slot is named; name at least one, or leave slots out to have them chosen"
    if twice := [slot for number, slot in enumerate(slots) if slot in slots[:number]]:
        return f"{twice[0]!r} is named twice in slots"
    if submodules is None:
        return ""
    for slot in slots:
        if slot not in submodules and not fnmatch.filter(submodules, slot):
            near = difflib.get_close_matches(slot, submodules, n=3, cutoff=0.4) or submodules[:5]
            return f"no submodule is named {slot!r}; near to it: {', '.join(near)}. add_slots(...).describe() lists all places"
    return ""


class ThresholdsConfig(Config):
    """Limits of healthy growth, looked at after every epoch. An event of kind `anomaly` tells when one is crossed, and when it is over."""

    plateau_epochs: PositiveInt = 5  # anomaly if the training loss falls by less than `plateau_fall` over this many epochs
    plateau_fall: Fraction = 0.005  # of the loss
    high_loss: NonNegativeFloat = 0.3  # of the uninformed loss; a training loss below it is no plateau
    degradation: Fraction = 0.25  # anomaly if this share of the best fall of a loss is lost again
    noise: NonNegativeFloat = 0.1  # of a loss; a smaller rise is no degradation
    gradient_health: Fraction = 0.3  # anomaly below this health of a seed's gradients: 1 healthy, 0.5 vanished, 0 exploded
    memory_growth: PositiveFloat = 8.0  # anomaly if every epoch adds memory, and this many MiB on average
    input_drift: PositiveFloat = 4.0  # anomaly above this size of the inputs, over that in the first epochs
    small_rate: Fraction = 0.05  # of the largest learning rate so far; below it the loss need not fall


class GrowthConfig(Config):
    """All settings of growth."""

    seed: NonNegativeInt = 0  # random seed for the weights of new seeds and for random plans
    probe_steps: PositiveInt = 8  # training steps in which a probe measures each candidate, if an epoch has enough steps
    slots: tuple[str, ...] | None = None  # names or patterns of the submodules that get a slot; None: the host's blocks
    blueprints: tuple[str, ...] | None = None  # names of the blueprints that may grow; None: all that fit
    rent: RentConfig = RentConfig()
    budget: BudgetConfig = BudgetConfig()
    lifecycle: LifecycleConfig = LifecycleConfig()
    governor: GovernorConfig = GovernorConfig()
    heuristic: HeuristicConfig = HeuristicConfig()
    lookahead: LookaheadConfig = LookaheadConfig()
    baseline: BaselineConfig = BaselineConfig()
    seed_optimizer: SeedOptimizerConfig = SeedOptimizerConfig()
    thresholds: ThresholdsConfig = ThresholdsConfig()
    patience: PositiveInt | None = None  # stop after this many epochs without a better validation loss; None: never stop early
    loss_range: PositiveFloat | None = None
    """How far the loss can fall below the uninformed loss; rents and thresholds are fractions of this range. None: down to 0. Set it for a
    loss that can be negative, such as a Gaussian log-likelihood."""

    def check(self) -> None:
        uninformed = self.governor.uninformed_loss
        if uninformed is not None and uninformed <= 0 and self.loss_range is None:
            raise ConfigError("loss_range", expected="a float > 0, because governor.uninformed_loss is not above 0", got=None)
        if self.blueprints is not None and (not self.blueprints or len(set(self.blueprints)) < len(self.blueprints)):
            raise ConfigError("blueprints", expected="at least one name, and no name twice", got=self.blueprints)
        if self.slots is not None and (problem := problem_of_slots(self.slots)):
            raise ConfigError("slots", expected="names or patterns", got=self.slots, problem=problem)


class TrainingConfig(GrowthConfig):
    """All settings of growth, and of the training by `grow`."""

    precision: Literal["float32", "bfloat16", "float16"] = "float32"  # autocast precision of forward passes; float16 adds a loss scale
    accumulate: PositiveInt = 1  # batches per step of the optimiser; each is weighted by its number of samples
    max_grad_norm: PositiveFloat | None = None  # limit of the host's gradient norm; None: not clipped. For seeds, see seed_optimizer
    step_schedule: Literal["auto", "epoch", "step"] = "auto"  # auto: OneCycleLR and CyclicLR per step, others per epoch
    keep: Literal["best", "last"] = "best"  # the state that is returned: after the best epoch, or the last one
    best_by: str | None = None  # metric with the highest value in the best epoch, such as accuracy; None: the lowest validation loss
    telemetry: Level = "normal"  # off: only start, end and test; minimal: no details of slots; debug: also gradients per layer, memory
    telemetry_escalation: NonNegativeInt = 5  # epochs for which an anomaly raises the telemetry to debug; 0: never

    def check(self) -> None:
        super().check()
        if self.best_by is not None and self.keep != "best":
            raise ConfigError("best_by", expected='None with keep="last", which returns the last state', got=self.best_by)
