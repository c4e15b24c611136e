"""Settings of the training and of the comparison of controllers, and the names of moves.

Imports no torch, so that the command line shows the settings quickly.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from esper.config import (
    Config,
    ConfigError,
    Count,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Threads,
    Width,
)
from esper.fleet.config import FleetConfig
from esper.growth.config import BudgetConfig, GrowthConfig, RentConfig
from esper.rl.config import PPOConfig
from esper.rl.run_config import ShownConfig

HELD_OUT_SEEDS = 10_000  # host seeds below this are reserved for comparisons, all others are for training
# Shares of the training after which moves are made; 0 is after the first training segment. Later moves gained nothing (see docs/log.md),
# and every look at a host costs a probe.
LOOKS = (0.0, 0.25)

# Names of the moves, see `esper.controller.plans`, and the blueprints that they need.
WIDENINGS = ("widen_100", "widen_300", "widen_700")
BRANCHES = ("double_conv3x3", "mlp")  # in order of preference
NORM = "norm"
BLUEPRINTS = (*WIDENINGS, *BRANCHES, NORM)
MOVES = (*WIDENINGS, "deep", "widen_100 and deep", "widen_300 and deep", NORM)

Family = Literal["conv", "residual", "mlp", "gpt"]
Optimizer = Literal["adamw", "sgd"]
Schedule = Literal["none", "cosine"]
SOURCES_OF_TOKENS = ("text",)


RENT_LEVELS = {"low": 0.01, "middle": 0.03, "high": math.inf}  # highest price of each, for tables and charts


def rent_level(price: float) -> str:
    """Return the name of the level that a price belongs to."""
    return next(name for name, highest in RENT_LEVELS.items() if price <= highest)


def rent_at(price: float) -> RentConfig:
    """Return the rent of a price: that of the parameters, and for FLOPs in a fixed relation to it."""
    return RentConfig(parameters=price, flops=0.3 * price)


class ControllerRewardConfig(Config):
    """Reward of a controller, in nats of validation loss for ten classes; see `esper.controller.reward`."""

    family: Literal["loss", "contribution"] = "loss"  # loss: difference to the twin's validation loss; contribution: sum over the seeds
    is_sparse: bool = True  # pay everything at the last decision, instead of the change by each decision
    gain: NonNegativeFloat = 1.0  # weight of the gain in nats
    rent: NonNegativeFloat = 1.0  # weight of the rent of all seeds in the host
    spent: NonNegativeFloat = 0.05  # nats per FLOPs of the host's whole training, for FLOPs that went into pruned seeds
    rollback: NonNegativeFloat = 0.02  # nats per rollback
    most: PositiveFloat = 1.0  # the total of a host is clipped to ± this, in nats


class DomainConfig(Config):
    """Ranges that cells and rents are drawn from, [least, most], log-uniform unless noted. Names and numbers outside them are held out."""

    sources: tuple[str, ...] = ("digits", "digits-1d", "text", "teacher")  # take turns; one that is named twice is drawn twice as often
    families: tuple[Family, ...] = ("conv", "residual", "mlp", "gpt")
    width: tuple[PositiveInt, PositiveInt] = (2, 32)  # of the first block
    blocks: tuple[PositiveInt, PositiveInt] = (1, 8)
    samples: tuple[Count, Count] = (256, 4_096)
    classes: tuple[Count, Count] = (2, 10)  # uniform
    label_noise: tuple[Fraction, Fraction] = (0.0, 0.5)  # uniform
    clean_share: Fraction = 0.5  # of the cells without wrong labels
    optimizers: tuple[Optimizer, ...] = ("adamw", "sgd")
    schedules: tuple[Schedule, ...] = ("cosine", "none")
    batch_size: tuple[Count, Count] = (32, 128)
    horizon: tuple[PositiveInt, PositiveInt] = (8, 32)  # decisions
    samples_of_a_life: tuple[PositiveInt, PositiveInt] = (40_000, 300_000)  # of a whole training; the steps between decisions follow
    most_steps: PositiveInt = 3_200  # training steps of a host of one block; the most for one of b blocks is 1 / b of it
    most_decisions: PositiveInt = 64  # likewise of its decisions, but no fewer than the least of `horizon`
    price: tuple[PositiveFloat, PositiveFloat] = (0.003, 0.1)  # of the rent, for e times the parameters, in units of the loss scale

    def check(self) -> None:
        for name in ("sources", "families", "optimizers", "schedules"):
            given = getattr(self, name)
            if not given or (len(set(given)) < len(given) and name != "sources"):
                raise ConfigError(name, expected="names, at least one and each once", got=given)
        for name in ("width", "blocks", "samples", "classes", "label_noise", "batch_size", "horizon", "samples_of_a_life", "price"):
            least, most = getattr(self, name)
            if least > most:
                raise ConfigError(name, expected="a range, the smaller number first", got=(least, most))
        for source in self.sources:
            if not self.families_for(source):
                raise ConfigError("families", expected=f"one that can read {source}", got=self.families)

    def families_for(self, source: str) -> list[Family]:
        """Return the families that can read the inputs of a source: a gpt reads tokens, all others values."""
        return [family for family in self.families if (family == "gpt") == (source in SOURCES_OF_TOKENS)]


class MoveNetworkConfig(Config):
    """Policy over moves: a value model, and a recurrent core that corrects its values."""

    members: PositiveInt = 16  # of the ensemble of the value model
    width: Width = 64  # of its layers
    summary_width: Width = 64  # width of the input of the core, a summary of the host and the values of the moves
    caution: NonNegativeFloat = 0.15  # standard errors that are subtracted from the lead of a move over growing nothing more
    temperature: PositiveFloat = 0.02  # a move that is worth this much more, in units, is e times as likely at the start


class GainsConfig(Config):
    """What improves on the heuristic: an ensemble that predicts what another step would change, see `esper.controller.branches`."""

    members: PositiveInt = 16  # of the ensemble
    width: Width = 32  # of its layers
    caution: NonNegativeFloat = 0.5  # standard deviations of the members by which another step must be better
    most: PositiveInt = 1  # other steps in a turn
    tries: bool = False  # let copies of the training try both what the heuristic would grow and what the ensemble prefers


class StepNetworkConfig(Config):
    """Policy over steps, see `esper.controller.policy`."""

    width: Width = 48  # of the vectors of options, targets and the host


class ControllerConfig(ShownConfig):
    """Training of a controller."""

    hosts: Count = 64  # hosts trained at once, over all fleets; per rank under torchrun
    rounds: PositiveInt = 100  # updates of the policy, each after num_steps decisions for every host
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available
    threads: Threads | None = None  # CPU threads of torch; None: torch's default
    deterministic: bool = False  # bit-identical runs on a GPU too, with slower kernels; otherwise cuDNN chooses the fastest
    checkpoint_every: PositiveInt = 5  # rounds between checkpoints
    keep: PositiveInt = 3  # number of checkpoints to keep, besides the best
    data_dir: str | None = None  # folder with the files of tasks that need some
    host_events: bool = True  # write the stages, measurements, refusals and rollbacks of every host to the events of the run
    start: str | None = None  # controller file whose value model the policy starts from; None: random weights
    fleets: Count = 4  # cells in one round, each a fleet
    hosts_per_twin: PositiveInt = 4  # hosts that share one twin: only their rents and growth seeds differ
    reward: ControllerRewardConfig = ControllerRewardConfig()
    domain: DomainConfig = DomainConfig()
    fleet: FleetConfig = FleetConfig(validation_samples=1_000)  # batch, steps, optimiser and schedule are those of the cells
    growth: GrowthConfig = GrowthConfig(
        blueprints=BLUEPRINTS, budget=BudgetConfig(max_parameters=64.0, max_flops=64.0, max_seeds_per_place=2)
    )
    network: MoveNetworkConfig = MoveNetworkConfig()
    # Nothing is discounted, because an episode terminates at an observed horizon and only its end counts. Observations are scaled by fixed
    # tables, and returns are in units of the loss, so that neither needs running statistics.
    ppo: PPOConfig = PPOConfig(
        num_steps=32,
        num_epochs=4,
        num_minibatches=4,
        gamma=1.0,
        gae_lambda=0.97,
        time_limit_is_end=True,
        entropy_coef=0.02,
        entropy_coef_end=0.0,
        normalize_observations=False,
        normalize_values=False,
    )

    def check(self) -> None:
        lifecycle, least = self.growth.lifecycle, self.domain.horizon[0]
        needed = lifecycle.holding_epochs + (lifecycle.training_epochs + lifecycle.blend_epochs if lifecycle.raise_mode == "shadow" else 0)
        if least < needed:
            raise ConfigError(
                "domain.horizon",
                expected=f"at least {needed} decisions: a seed needs as many to be raised, blended and kept (see growth.lifecycle)",
                got=self.domain.horizon,
            )
        for name in ("normalize_observations", "normalize_values"):
            if getattr(self.ppo, name):
                raise ConfigError(f"ppo.{name}", expected="false, because observations and values have fixed scales already", got=True)

    @property
    def total_steps(self) -> int:
        """Steps of all hosts of one rank."""
        return self.rounds * self.hosts * self.ppo.num_steps


class CompareConfig(Config):
    """Comparison of controllers in the same cells and on the same hosts, at several prices of rent."""

    controllers: tuple[str, ...] = ()  # files or "learned"; the first is compared with all others, or else the heuristic
    cells: PositiveInt = 12
    hosts: Annotated[int, Meta(ge=2, le=HELD_OUT_SEEDS)] = 3  # in each cell; their seeds 0, 1, ... are never trained on
    prices: tuple[PositiveFloat, ...] = (0.003, 0.01, 0.03, 0.1)  # of a network that is e times as large, in units of the loss scale
    training_cells: PositiveInt = 12  # other cells, on which the blind plans and the rules are chosen, unless a controller file has plans
    controls: bool = True  # train controls too, with the FLOPs of the compared controller
    rows: Count = 256  # hosts trained at once
    seed: NonNegativeInt = 0  # of the cells and the random moves
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available
    threads: Threads | None = None  # CPU threads of torch; None: torch's default
    data_dir: str | None = None  # folder with the files of tasks that need some
    domain: DomainConfig = DomainConfig()  # its prices are not used

    def check(self) -> None:
        for name in ("controllers", "prices"):
            given = getattr(self, name)
            if len(set(given)) < len(given):
                raise ConfigError(name, expected="each once", got=given)
        if not self.prices:
            raise ConfigError("prices", expected="at least one", got=self.prices)
        least = GrowthConfig().lifecycle.holding_epochs + 1
        if self.domain.horizon[0] < least:
            raise ConfigError(
                "domain.horizon",
                expected=f"at least {least} decisions: seeds grow after the first one, and need the others to be kept",
                got=self.domain.horizon,
            )
