"""What can be set about self-play in the arena. Imports no torch, so that a command line can show it at once."""

from __future__ import annotations

from typing import Literal, get_args

from esper.arena.config import ArenaConfig, TeamSize
from esper.config import Config, ConfigError, Fraction, PositiveInt, Threads, Width
from esper.league.config import EvenCount, LeagueConfig, PairedBattles
from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.run_config import ShownConfig

Anchor = Literal["random", "weak", "middle", "strong"]  # `esper.arena.bots.BOTS`, which is not imported: it brings torch
ANCHORS: tuple[str, ...] = get_args(Anchor)


class UnitNetworkConfig(Config):
    """Widths of the network of a unit around its memory."""

    entity_width: Width = 32  # of a contact or comrade
    terrain_width: Width = 64
    width: Width = 128  # of everything that a unit observes, in front of the memory
    head_width: Width = 64  # in front of choices and values
    state_width: Width = 64  # of the whole battle, for a centralised critic


class SelfPlayConfig(Config):
    """Whom the learner fights. In the battles that are left over, both sides are the learner and both learn."""

    bots: tuple[Anchor, ...] = ("middle", "strong")  # scripted opponents, each with as many battles; one named twice has twice as many
    bot_share: Fraction = 0.5  # of the battles
    past_share: Fraction = 0.25  # of the battles, against past selves
    past_seats: PositiveInt = 1  # past selves at a time
    seat_rollouts: PositiveInt | None = None  # for which a past self stays in its seat; None: so many that a battle can be over
    first_team: TeamSize | None = None  # curriculum: team size at first; None: as large as it gets
    team_grows: PositiveInt = 20  # updates between two sizes
    enter_every: PositiveInt = 25  # updates after which the learner sends itself to the league
    entry_battles: PairedBattles = 64  # that it fights there against the best member, and against each anchor, two on every map
    opponent_device: str | None = None  # of past selves; None: the learner's

    def check(self) -> None:
        if self.bot_share + self.past_share > 1:
            raise ConfigError("past_share", expected=f"at most 1 - bot_share ({1 - self.bot_share:g})", got=self.past_share)
        if self.bot_share and not self.bots:
            raise ConfigError("bots", expected="at least one bot, or bot_share 0", got=self.bots)


class ArenaTrainConfig(ShownConfig):
    """A training by self-play: the battles, the opponents, and the learner."""

    arena: ArenaConfig = ArenaConfig()
    selfplay: SelfPlayConfig = SelfPlayConfig()
    league: LeagueConfig = LeagueConfig()
    unit: UnitNetworkConfig = UnitNetworkConfig()
    start_from: str | None = None  # weights to begin with, as a league keeps them: RUN/league/members/NAME.safetensors; None: fresh ones
    total_steps: PositiveInt = 20_000_000  # of all ranks; a step is one decision of one unit that learns, whether it lives or not
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    threads: Threads | None = None  # CPU threads of torch; None: its own choice
    deterministic: bool = False  # the same bits in every run on a GPU too, by slower kernels; else cuDNN chooses the fastest ones
    compile: bool = False  # fuse the phases of the battles by torch's compiler: a minute or two at first, then twice as fast on a CPU
    checkpoint_every: PositiveInt = 25  # updates between checkpoints
    keep: PositiveInt = 2  # checkpoints that stay, beside the best
    eval_battles: EvenCount = 128  # against `eval_against` at every checkpoint, which tell the best one; two on every map; 0: none
    eval_against: Anchor = "strong"  # whom checkpoints are judged against
    ppo: PPOConfig = PPOConfig(
        num_steps=32,
        num_epochs=3,
        num_minibatches=16,
        learning_rate=2e-3,
        learning_rate_schedule="linear",
        entropy_coef=0.01,
        entropy_coef_end=0.001,
        normalize_observations=False,
        network=NetworkConfig(hidden_size=128, log_std=-1.0),
    )

    def check(self) -> None:
        if self.arena.reward.gamma != self.ppo.gamma:
            raise ConfigError(
                "arena.reward.gamma", expected=f"that of the learner, ppo.gamma ({self.ppo.gamma:g})", got=self.arena.reward.gamma
            )
        if self.ppo.normalize_observations:
            raise ConfigError("ppo.normalize_observations", expected="false: observations of the arena are scaled already", got=True)
        first = self.selfplay.first_team
        if first is not None and first > self.arena.team_size:
            raise ConfigError("selfplay.first_team", expected=f"at most arena.team_size ({self.arena.team_size})", got=first)
