"""Mistakes that a user can mend.

What can be set about growing. Imports no torch, so that a command line can show it at once.
"""

from __future__ import annotations

from typing import Literal

from esper.config import Config, ConfigError, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class GrowthError(ValueError):
    """What was asked for cannot be done; the message says why and what to do. Nothing has been changed."""


class Rent(Config):
    """What a seed costs: `parameters`·log(1 + added/host) + `flops`·(added/host).

    In nats where the loss of a constant predictor is that of ten classes, ln 10 = 2.30; with any other loss, the same share of that loss.
    """

    parameters: NonNegativeFloat = 0.01  # for log(1 + added parameters / host parameters)
    flops: NonNegativeFloat = 0.01  # for added FLOPs / host FLOPs


class Budget(Config):
    """How much may grow at most."""

    max_seeds: PositiveInt | None = None  # seeds in the host at one time, fossilized ones included; None: one per slot
    max_parameters: PositiveFloat | None = 8.0  # added, relative to the host's; None: no limit
    max_flops: PositiveFloat | None = 8.0  # added per forward pass, relative to the host's; None: no limit


class Lifecycle(Config):
    """How long stages last, in epochs."""

    raise_mode: Literal["joint", "shadow"] = "joint"  # joint: with the host, from birth; shadow: the host stays untouched until blending
    training_epochs: PositiveInt = 3  # shadow: least epochs of learning before blending
    minimum_health: Fraction = 0.7  # shadow: least gradient health before blending
    blend_epochs: NonNegativeInt = 2  # shadow: epochs over which alpha rises
    blending: Literal["add", "multiply", "gate"] = "add"  # how a seed's branch changes what flows by; each starts as the identity
    alpha_curve: Literal["linear", "cosine"] = "linear"  # how alpha moves
    alpha_target: PositiveFloat = 1.0  # shadow: where it rises to, at most 1; joint seeds are at 1 from birth
    holding_epochs: PositiveInt = 3  # least epochs of probation before a seed may be kept
    withdraw_epochs: NonNegativeInt = 2  # epochs over which alpha falls before a seed is taken out
    embargo_epochs: NonNegativeInt = 5  # wait after a pruned seed

    def check(self) -> None:
        if self.alpha_target > 1:
            raise ConfigError("alpha_target", expected="a float > 0 and <= 1", got=self.alpha_target)


class GovernorConfig(Config):
    """When to go back to a healthy snapshot."""

    window: PositiveInt = 20  # losses that make the run's own spread
    spike_sigmas: PositiveFloat = 6.0  # a loss this far above the window's mean is a spike
    spike_checks: PositiveInt = 3  # spikes in a row that are a disaster
    checks_per_epoch: PositiveInt = 8  # means of the training loss that an epoch is watched by
    uninformed_loss: float | None = None  # loss of a model that knows nothing, such as log(classes); None: `grow` measures it
    snapshot_every: PositiveInt = 1  # epochs between snapshots of a healthy state
    keep: PositiveInt = 2  # snapshots
    max_rollbacks: NonNegativeInt = 5  # in a row, without a healthy epoch between them, before the run is given up


class HeuristicConfig(Config):
    """When the heuristic controller grows, and what it asks of a seed. Losses are shares of the uninformed loss."""

    grow_at: Fraction = 0.1  # part of the training after which it looks whether the host is starved
    grow_until: Fraction = 0.5  # part of the training after which nothing new is grown: it could not pay any more
    high_loss: Fraction = 0.05  # a training loss below this is low enough
    projected_loss: Fraction = 0.04  # a host whose training loss is going to end above this is starved
    overfit_gap: PositiveFloat = 2.0  # validation loss / training loss above which more capacity would not help
    longer_training: PositiveFloat = 25.0
    """How many times as much as the host by itself at the end of its training seeds must promise to lower the loss, for the same FLOPs.
    Where they do not, longer training is better."""
    evidence: PositiveFloat = 1.5  # positions in the training data for every weight of a new seed
    evidence_at_the_end: PositiveFloat = 30.0  # the same at a place with little behind it, where a seed is part of the classifier
    least_share: Fraction = 0.1  # of the host's weights for each slot: a slot holds one seed for good, too much for a trifle
    plateau_epochs: PositiveInt = 4  # over which the training loss must have fallen
    plateau_fall: Fraction = 0.05  # by at least this part of it, or it is a plateau
    data_change: PositiveFloat = 1.3  # a training loss so many times higher than it was is a change in the data


class SeedOptimizer(Config):
    """How seeds learn: by an optimiser of the host's kind with the settings of the group that owns the slot's module."""

    learning_rate_factor: PositiveFloat = 1.0  # times the learning rate of that group
    max_grad_norm: PositiveFloat | None = 1.0  # per seed, for a loss in nats of ten classes, see Rent; None: not clipped
    warmup_epochs: NonNegativeFloat = 2.0  # in which the rate of a joint seed rises; one that is there from the start has none


class BaselineConfig(Config):
    """What the controllers `random` and `schedule` do; they are what another one has to beat."""

    random_seeds: NonNegativeInt | None = None  # that random grows, one for a slot at most; None: any number, drawn
    random_until: Fraction = 0.5  # part of the training in which random grows them
    schedule_at: Fraction = 0.1  # part of the training after which schedule grows something in every slot


class GrowthConfig(Config):
    """Everything about growing a model."""

    seed: NonNegativeInt = 0  # of the random streams that initialise seeds and draw plans
    probe_steps: PositiveInt = 8  # training steps at which a probe looks at each candidate, where an epoch has enough of them
    slots: tuple[str, ...] | None = None  # where something may grow: names or patterns of submodules; None: after the host's blocks
    blueprints: tuple[str, ...] | None = None  # names of what may grow; None: everything that fits
    rent: Rent = Rent()
    budget: Budget = Budget()
    lifecycle: Lifecycle = Lifecycle()
    governor: GovernorConfig = GovernorConfig()
    heuristic: HeuristicConfig = HeuristicConfig()
    baseline: BaselineConfig = BaselineConfig()
    seed_optimizer: SeedOptimizer = SeedOptimizer()
    patience: PositiveInt | None = None  # epochs without a better validation loss after which a host stops; None: never early
    loss_range: PositiveFloat | None = None
    """How far the loss can fall below the uninformed loss, which is what rents and thresholds are shares of. None: to 0. A loss that can be
    negative, such as a Gaussian log-likelihood, needs it."""

    def check(self) -> None:
        uninformed = self.governor.uninformed_loss
        if uninformed is not None and uninformed <= 0 and self.loss_range is None:
            raise ConfigError("loss_range", expected="a float > 0, where governor.uninformed_loss is not above 0", got=None)
        for name in ("slots", "blueprints"):
            given = getattr(self, name)
            if given is not None and (not given or len(set(given)) < len(given)):
                raise ConfigError(name, expected="names, at least one and each once", got=given)


class TrainingConfig(GrowthConfig):
    """Everything about growing a model, and how `grow` trains the host meanwhile."""

    precision: Literal["float32", "bfloat16", "float16"] = "float32"  # of forward passes, by autocast; float16: with a loss scale
    accumulate: PositiveInt = 1  # batches for one step of the optimizer; each counts by its samples
    max_grad_norm: PositiveFloat | None = None  # of the host's gradient; None: not clipped. Seeds are clipped by seed_optimizer
    step_schedule: Literal["auto", "epoch", "step"] = "auto"  # when the schedule is stepped; auto: after epochs, OneCycleLR after steps
