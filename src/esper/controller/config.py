"""What can be set about training a controller. Imports no torch, so that a command line can show it at once.

Rent levels are fixed here, in nats for ten classes, before any controller is trained. They were chosen by what one seed gained in test
loss over the never-grow twin when it grew at a tenth of the training (AdamW, cosine schedule, one or two hosts each: a first look), per
log(1 + added / host parameters):

    digits, 4-8-16      20 epochs   0.02 to 0.3; double_conv3x3: 0.12 to 0.20 after the first block, 0.03 after the second
    digits-1d, 2-4-8    20 epochs   0.2 to 0.6 for most, and up to 1.6 for double_conv3x3 after the first block
    both                20 epochs   1.1 to 1.6 for a norm before the head, which costs no FLOPs: nothing useful is cheaper
    digits, 4-8-16      12 epochs   at a learning rate far too low, where whatever speeds learning up helps: 7.7 for that norm
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from esper.config import Config, ConfigError, Count, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Threads
from esper.controller.network_config import SlotNetworkConfig
from esper.fleet.config import FleetConfig, Share
from esper.growth.config import GrowthConfig, Rent
from esper.rl.config import PPOConfig
from esper.rl.run_config import ShownConfig

RENT_LEVELS = {
    "low": Rent(parameters=0.004, flops=0.001),  # growing pays wherever the host is starved
    "middle": Rent(parameters=0.1, flops=0.03),  # the best places and blueprints pay, the others do not
    "high": Rent(parameters=10.0, flops=2.5),  # nothing pays: even the cheapest useful seed costs more than it can give
}

HELD_OUT_SEEDS = 10_000  # host seeds below this are for comparisons, all others for training

Channels = Annotated[str, Meta(pattern=r"^[1-9]\d*(-[1-9]\d*)*$")]  # of the blocks of a host, first to last: "4-8-16"


class RewardConfig(Config):
    """What a controller is paid for, in nats of validation loss for ten classes; see `esper.controller.reward`."""

    family: Literal["loss", "contribution"] = "loss"  # loss: validation loss against the twin's; contribution: what seeds were measured at
    is_sparse: bool = False  # everything is paid at the last decision, instead of what each decision changed
    gain: NonNegativeFloat = 1.0  # weight of the nats gained
    rent: NonNegativeFloat = 1.0  # weight of the rent of everything that is in the host
    spent: NonNegativeFloat = 0.05  # nats for as many FLOPs as the host's whole training, when they went into seeds that were pruned
    rollback: NonNegativeFloat = 0.02  # nats for each rollback
    most: PositiveFloat = 1.0  # nats that a host can be worth, or owe, at most: beyond that, worse is not told from worst


class DomainConfig(Config):
    """What differs between the hosts that a controller is trained on. Ranges are [least, most]."""

    tasks: tuple[str, ...] = ("digits", "digits-1d")  # of the hosts
    hosts: tuple[Channels, ...] = ("2-4-8", "3-6-12", "4-4-8", "6-12-24", "8-8-16", "8-16-32")  # channels of their blocks
    held_out_hosts: tuple[Channels, ...] = ("4-8-16", "5-10-20")  # never trained on: what a controller is compared on
    fleets: Count = 2  # architectures, which are a task and channels each, in one round
    hosts_per_twin: PositiveInt = 4  # hosts that share all but the rent, and so one never-grow twin
    horizon: tuple[PositiveInt, PositiveInt] = (12, 40)  # decisions in the life of a host, the same for a fleet
    learning_rate: tuple[PositiveFloat, PositiveFloat] = (0.003, 0.02)  # log-uniform
    plain_share: Fraction = 0.5  # of the hosts that train on the task as it is: all data, all classes, true labels
    label_noise: tuple[Fraction, Fraction] = (0.0, 0.2)  # share of the training labels that are wrong
    data_share: tuple[Share, Share] = (0.3, 1.0)  # of the training data
    # Of the task's classes. Validation has all of them, so less than 1 rewards a host for being unsure of what it has never seen.
    classes_share: tuple[Share, Share] = (1.0, 1.0)
    rent_level_share: Fraction = 0.5  # of the hosts whose rent is one of the three levels; others: log-uniform between low and high

    def check(self) -> None:
        for name in ("tasks", "hosts"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ConfigError(name, expected="names, at least one and each once", got=given)
        both = [channels for channels in self.held_out_hosts if channels in self.hosts]
        if both:
            raise ConfigError("held_out_hosts", expected="channels that are not among hosts, which are trained on", got=both[0])
        for name in ("horizon", "learning_rate", "label_noise", "data_share", "classes_share"):
            least, most = getattr(self, name)
            if least > most:
                raise ConfigError(name, expected="a range, the smaller number first", got=(least, most))


class ControllerConfig(ShownConfig):
    """Training a controller."""

    hosts: Count = 64  # that are decided for at once, over all fleets; per rank under torchrun
    rounds: PositiveInt = 100  # of num_steps decisions for every host, after each of which the policy learns
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    threads: Threads | None = None  # CPU threads of torch; None: its own choice
    deterministic: bool = False  # the same bits in every run on a GPU too, by slower kernels; else cuDNN chooses the fastest ones
    checkpoint_every: PositiveInt = 5  # rounds between checkpoints
    keep: PositiveInt = 3  # checkpoints that stay, beside the best
    data_dir: str | None = None  # where tasks that need files find them
    host_events: bool = True  # write the stages, measurements, refusals and rollbacks of every host to the events of the run
    actions: PositiveInt = 1  # of one decision at most, each about another slot; the policy takes a step for each
    ops: tuple[Literal["germinate", "advance", "retarget", "fossilize", "prune"], ...] = ("germinate", "advance", "fossilize", "prune")
    reward: RewardConfig = RewardConfig()
    domain: DomainConfig = DomainConfig()
    fleet: FleetConfig = FleetConfig()
    growth: GrowthConfig = GrowthConfig()
    network: SlotNetworkConfig = SlotNetworkConfig()
    # A life ends for real, at a horizon that is observed, and only its end is worth something: nothing is discounted. Observations are
    # scaled where they are made, because running statistics of a slot's index would tell slots apart.
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
                "ppo.gamma", expected="1 where a decision has several actions: time passes after the last of them", got=self.ppo.gamma
            )
        if self.ppo.normalize_observations:
            raise ConfigError("ppo.normalize_observations", expected="false: they are scaled already, alike for all slots", got=True)

    @property
    def total_steps(self) -> int:
        """Decisions for all hosts of one rank."""
        return self.rounds * self.hosts * self.ppo.num_steps
