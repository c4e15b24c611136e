"""Settings of the training of controllers.

Imports no torch, so that the command line shows the settings quickly.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

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
from esper.growth.config import GrowthConfig
from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.run_config import ShownConfig

HELD_OUT_SEEDS = 10_000  # host seeds below this are reserved for comparisons, all others are for training

Family = Literal["conv", "residual", "mlp", "gpt"]
Optimizer = Literal["adamw", "sgd"]
Schedule = Literal["none", "cosine"]
SOURCES_OF_TOKENS = ("text",)


RENT_LEVELS = {"low": 0.01, "middle": 0.03, "high": math.inf}  # highest price of each, for tables and charts


def rent_level(price: float) -> str:
    """Return the name of the level that a price belongs to."""
    return next(name for name, highest in RENT_LEVELS.items() if price <= highest)


class ControllerRewardConfig(Config):
    """Reward of a life, in units of the loss (nats for ten classes); see `esper.controller.lives`."""

    leaving: NonNegativeFloat = 0.005  # cost of a step that the heuristic would not have taken; falls to 0 in the course of the training
    most: PositiveFloat = 1.0  # the reward of a life is limited to ± this


class DomainConfig(Config):
    """Ranges that cells and rents are drawn from, [least, most], log-uniform unless noted. Names and numbers outside them are held out."""

    shapes: PositiveInt = 16  # architectures with their data and optimiser that a training takes turns with; fleets of one are used again
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
    price: tuple[PositiveFloat, PositiveFloat] = (0.001, 0.1)  # of e times the parameters, and of e times the FLOPs, in units of the loss

    def check(self) -> None:
        for name in ("sources", "families", "optimizers", "schedules"):
            given = getattr(self, name)
            if not given or (len(set(given)) < len(given) and name != "sources"):
                raise ConfigError(name, expected="names, at least one and each once", got=given)
        for name in ("width", "blocks", "samples", "classes", "label_noise", "batch_size", "horizon", "samples_of_a_life", "price"):
            least, most = getattr(self, name)
            if least > most:
                raise ConfigError(name, expected="a range, the smaller number first", got=(least, most))
        if self.shapes < len(self.sources):
            raise ConfigError("shapes", expected=f"at least {len(self.sources)}, one for each of the sources", got=self.shapes)
        for source in self.sources:
            if not self.families_for(source):
                raise ConfigError("families", expected=f"one that can read {source}", got=self.families)

    def families_for(self, source: str) -> list[Family]:
        """Return the families that can read the inputs of a source: a gpt reads tokens, all others values."""
        return [family for family in self.families if (family == "gpt") == (source in SOURCES_OF_TOKENS)]


class GainsConfig(Config):
    """What improves on the heuristic: an ensemble that predicts what another step would change, see `esper.controller.branches`."""

    members: PositiveInt = 16  # of the ensemble
    width: Width = 32  # of its layers
    caution: NonNegativeFloat = 1.0  # standard deviations of the members by which another step must be better
    most: PositiveInt = 1  # other steps in a turn
    tries: bool = False  # look ahead: copies of the training try what the ensemble prefers beside the plans of the controller "lookahead"


class StepNetworkConfig(Config):
    """Policy over steps, see `esper.controller.policy`."""

    width: Width = 48  # of the vectors of options, targets and the host
    trust: NonNegativeFloat = 3.0  # logits by which the advised choice of a head is ahead of others at first


class ControllerConfig(ShownConfig):
    """Training of a controller."""

    hosts: Count = 160  # lives in a round, over all fleets; per rank under torchrun
    rounds: PositiveInt = 100  # updates of the policy
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available
    threads: Threads | None = None  # CPU threads of torch; None: torch's default
    deterministic: bool = False  # bit-identical runs on a GPU too, with slower kernels; otherwise cuDNN chooses the fastest
    checkpoint_every: PositiveInt = 5  # rounds between checkpoints
    keep: PositiveInt = 3  # number of checkpoints to keep, besides the best
    data_dir: str | None = None  # folder with the files of tasks that need some
    host_events: bool = True  # write every life, with its losses and seeds, to the events of the run
    start: str | None = None  # controller file whose policy the training starts from; None: one that decides as the heuristic
    fleets: Count = 16  # cells in one round, each a fleet
    resident: NonNegativeInt = 16  # fleets that stay on the device for the next hosts of their shape; see domain.shapes
    hosts_per_twin: PositiveInt = 4  # lives of the same host, which are compared with one life under the heuristic
    longest_life: PositiveInt = 96  # steps of a life that are learned from; what follows is left to the heuristic
    reward: ControllerRewardConfig = ControllerRewardConfig()
    domain: DomainConfig = DomainConfig()
    fleet: FleetConfig = FleetConfig(validation_samples=1_000)  # batch, steps, optimiser and schedule are those of the cells
    growth: GrowthConfig = GrowthConfig()
    network: StepNetworkConfig = StepNetworkConfig()
    # Nothing is discounted, because only the end of a life counts. Observations are scaled by fixed tables, and returns are in units of the
    # loss, so that neither needs running statistics.
    ppo: PPOConfig = PPOConfig(
        num_steps=1,
        num_epochs=4,
        num_minibatches=4,
        learning_rate=3e-3,
        learning_rate_schedule="linear",
        learning_rate_end=3e-4,
        gamma=1.0,
        gae_lambda=0.97,
        time_limit_is_end=True,
        entropy_coef=0.002,
        entropy_coef_end=0.0,
        target_kl=0.03,
        normalize_observations=False,
        normalize_values=False,
        normalize_rewards=False,
        network=NetworkConfig(hidden_size=64),
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
        if self.ppo.num_steps != 1 or self.ppo.bptt_length is not None:
            raise ConfigError(
                "ppo.num_steps",
                expected="1, and no bptt_length, because a rollout is made of whole lives; set hosts for more of them",
                got=(self.ppo.num_steps, self.ppo.bptt_length),
            )

    @property
    def total_steps(self) -> int:
        """Lives of all rounds of one rank."""
        return self.rounds * self.hosts


# A training of minutes on two cores, whose curve rises: short trainings of small hosts.
QUICK = ControllerConfig(
    hosts=32,
    fleets=4,
    rounds=16,
    domain=DomainConfig(
        shapes=4,
        sources=("digits",),
        families=("mlp",),
        width=(2, 8),
        blocks=(1, 2),
        horizon=(8, 8),
        samples_of_a_life=(6_000, 6_000),
    ),
    ppo=msgspec.structs.replace(ControllerConfig().ppo, learning_rate=4e-3),
)
