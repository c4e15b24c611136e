"""Settings of the training and of the comparison of controllers. Imports no torch, so that the command line shows them quickly.

Rent levels are fixed here, in nats for ten classes, before any controller is trained. They were chosen from the gain of a single seed in
test loss over the twin, when it grew after a tenth of the training (AdamW, cosine schedule, one or two hosts each, so only a rough
estimate). The gains, per log(1 + added / host parameters):

    digits, 4-8-16      20 epochs   0.02 to 0.3; double_conv3x3: 0.12 to 0.20 after the first block, 0.03 after the second
    digits-1d, 2-4-8    20 epochs   0.2 to 0.6 for most, and up to 1.6 for double_conv3x3 after the first block
    both                20 epochs   1.1 to 1.6 for a norm before the head, which costs no FLOPs and is the cheapest useful seed
    digits, 4-8-16      12 epochs   7.7 for that norm at a learning rate far too low, where everything that speeds up learning helps
"""

from __future__ import annotations

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
from esper.fleet.config import FleetConfig, Share
from esper.growth.config import GrowthConfig, RentConfig
from esper.rl.config import PPOConfig
from esper.rl.run_config import ShownConfig

RENT_LEVELS = {
    "low": RentConfig(parameters=0.004, flops=0.001),  # growing pays whenever the host is starved
    "middle": RentConfig(parameters=0.1, flops=0.03),  # only the best slots and blueprints pay
    "high": RentConfig(parameters=10.0, flops=2.5),  # nothing pays: even the cheapest useful seed costs more than it gains
}

HELD_OUT_SEEDS = 10_000  # host seeds below this are reserved for comparisons, all others are for training

Channels = Annotated[str, Meta(pattern=r"^[1-9]\d*(-[1-9]\d*)*$")]  # channels of the blocks of a host, first to last: "4-8-16"
BUILTIN_CONTROLLERS = ("never", "random", "schedule", "heuristic")  # in comparisons; other names are paths of controller files
RentLevel = Literal["low", "middle", "high"]
Family = Literal["conv", "residual", "mlp", "gpt"]
Optimizer = Literal["adamw", "sgd"]
Schedule = Literal["none", "cosine"]
SOURCES_OF_TOKENS = ("text",)


class ControllerRewardConfig(Config):
    """Reward of a controller, in nats of validation loss for ten classes; see `esper.controller.reward`."""

    family: Literal["loss", "contribution"] = "loss"  # loss: difference to the twin's validation loss; contribution: sum over the seeds
    is_sparse: bool = False  # pay everything at the last decision, instead of the change by each decision
    gain: NonNegativeFloat = 1.0  # weight of the gain in nats
    rent: NonNegativeFloat = 1.0  # weight of the rent of all seeds in the host
    spent: NonNegativeFloat = 0.05  # nats per FLOPs of the host's whole training, for FLOPs that went into pruned seeds
    rollback: NonNegativeFloat = 0.02  # nats per rollback
    most: PositiveFloat = 1.0  # the total of a host is clipped to ± this, in nats


class DomainConfig(Config):
    """Hosts that a controller is trained on. Ranges are [least, most]."""

    tasks: tuple[str, ...] = ("digits", "digits-1d")  # names of the tasks
    hosts: tuple[Channels, ...] = ("2-4-8", "3-6-12", "4-4-8", "6-12-24", "8-8-16", "8-16-32")  # channels of the blocks of the hosts
    held_out_hosts: tuple[Channels, ...] = ("4-8-16", "5-10-20")  # never trained on; for comparisons
    fleets: Count = 2  # architectures (task and channels) in one round
    hosts_per_twin: PositiveInt = 4  # hosts that share one twin: only their rents and growth seeds differ
    horizon: tuple[PositiveInt, PositiveInt] = (12, 40)  # training segments of a host, the same for all hosts of a fleet
    learning_rate: tuple[PositiveFloat, PositiveFloat] = (0.003, 0.02)  # log-uniform
    plain_share: Fraction = 0.5  # share of the hosts that train on the unchanged task: all data, all classes, true labels
    label_noise: tuple[Fraction, Fraction] = (0.0, 0.2)  # share of the training labels that are wrong
    data_share: tuple[Share, Share] = (0.3, 1.0)  # share of the training data that is used
    # Share of the task's classes in the training data. Validation has all classes, so a share below 1 rewards a host for being unsure about
    # classes that it has never seen.
    classes_share: tuple[Share, Share] = (1.0, 1.0)
    rent_level_share: Fraction = 0.5  # share of the hosts with one of the three rent levels; others: log-uniform between low and high

    def check(self) -> None:
        for name in ("tasks", "hosts"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ConfigError(name, expected="names, at least one and each once", got=given)
        both = [channels for channels in self.held_out_hosts if channels in self.hosts]
        if both:
            raise ConfigError("held_out_hosts", expected="channels that are not among hosts, which are for training", got=both[0])
        for name in ("horizon", "learning_rate", "label_noise", "data_share", "classes_share"):
            least, most = getattr(self, name)
            if least > most:
                raise ConfigError(name, expected="a range, the smaller number first", got=(least, most))


class SlotNetworkConfig(Config):
    """Encoder and actor of the policy: the encoder of slots and candidates, and the pointers back to them."""

    width: Width = 32  # width of an encoded slot
    candidate_width: Width = 16  # width of an encoded candidate
    blocks: NonNegativeInt = 1  # number of attention blocks over the slots
    attention_heads: PositiveInt = 4  # in each block; must divide width
    summary_width: Width = 64  # width of the input of the core, a summary of the host and all its slots
    # Initial logits of these ops in a new policy; other ops have 0. At a high rent, pruning pays at once but keeping pays late. A policy
    # without a bias may therefore learn to prune before it has seen the gain of kept seeds, and then grow and prune in turn at any rent. It
    # also fills all slots within a few decisions, so that it hardly sees hosts that grow late or never.
    wait_bias: float = 0.0
    fossilize_bias: float = 0.0
    prune_bias: float = -3.0

    def check(self) -> None:
        if self.width % self.attention_heads:
            raise ConfigError("attention_heads", expected=f"a divisor of width ({self.width})", got=self.attention_heads)


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
    actions: PositiveInt = 1  # most actions in one decision, each about another slot; the policy takes one step per action
    ops: tuple[Literal["germinate", "advance", "retarget", "fossilize", "prune"], ...] = ("germinate", "advance", "fossilize", "prune")
    reward: ControllerRewardConfig = ControllerRewardConfig()
    domain: DomainConfig = DomainConfig()
    fleet: FleetConfig = FleetConfig()
    growth: GrowthConfig = GrowthConfig()
    network: SlotNetworkConfig = SlotNetworkConfig()
    # Nothing is discounted, because an episode terminates at an observed horizon and only its end counts. Observations are scaled by fixed
    # tables, not by running statistics, which would differ between slots and so depend on their order.
    ppo: PPOConfig = PPOConfig(
        num_steps=40,
        num_epochs=4,
        num_minibatches=4,
        gamma=1.0,
        gae_lambda=0.97,
        time_limit_is_end=True,
        entropy_coef=0.02,
        entropy_coef_end=0.0,
        normalize_observations=False,
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
        if self.actions > 1 and self.ppo.gamma < 1:
            raise ConfigError(
                "ppo.gamma", expected="1 with several actions per decision, because time only passes after the last one", got=self.ppo.gamma
            )
        if self.ppo.normalize_observations:
            raise ConfigError(
                "ppo.normalize_observations", expected="false, because they are already scaled, in the same way for all slots", got=True
            )

    @property
    def total_steps(self) -> int:
        """Steps of all hosts of one rank."""
        return self.rounds * self.hosts * self.ppo.num_steps


class CellDomain(Config):
    """Ranges that cells are drawn from, [least, most], log-uniform unless noted. Names and numbers outside them are held out."""

    sources: tuple[str, ...] = ("digits", "digits-1d", "text", "teacher")
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

    def check(self) -> None:
        for name in ("sources", "families", "optimizers", "schedules"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ConfigError(name, expected="names, at least one and each once", got=given)
        for name in ("width", "blocks", "samples", "classes", "label_noise", "batch_size", "horizon", "samples_of_a_life"):
            least, most = getattr(self, name)
            if least > most:
                raise ConfigError(name, expected="a range, the smaller number first", got=(least, most))
        for source in self.sources:
            if not self.families_for(source):
                raise ConfigError("families", expected=f"one that can read {source}", got=self.families)

    def families_for(self, source: str) -> list[Family]:
        """Return the families that can read the inputs of a source: a gpt reads tokens, all others values."""
        return [family for family in self.families if (family == "gpt") == (source in SOURCES_OF_TOKENS)]


class CompareConfig(Config):
    """Comparison of controllers in the same cells and on the same hosts, at several prices of rent."""

    controllers: tuple[str, ...] = ()  # paths of controller files; the first is compared with all others, or else the heuristic
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
    domain: CellDomain = CellDomain()

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
