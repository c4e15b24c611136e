"""Settings of a league, and of a training run by self-play in the arena. Imports no torch, so that the command line starts quickly."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from esper.arena.config import ArenaConfig, BotName, TeamSize
from esper.config import Config, ConfigError, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Threads, Width
from esper.rl.config import NetworkConfig, PPOConfig, ThresholdsConfig
from esper.rl.run_config import ShownConfig

PairedBattles = Annotated[int, Meta(ge=2, le=2**20, multiple_of=2)]  # battles of a match: two on every map, one from each side
EvenCount = Annotated[int, Meta(ge=0, le=2**20, multiple_of=2)]  # the same, or 0 for no match
RATED: tuple[str, ...] = ("random", "weak", "middle", "strong-v1")  # bots that are part of every league


class LeagueConfig(Config):
    """Rules of a league: promotion and retirement of past selves, and the draw of opponents."""

    size: PositiveInt = 8  # largest number of members
    promote_at: Fraction = 0.5  # promote if the lower end of the 95 % interval of the score against the best member reaches this; 0: always
    beaten_at: Fraction = 0.9  # members against whom the learner scores at least this retire first
    hardness_power: NonNegativeFloat = 2.0  # draw opponents with weight (1 - score) ** hardness_power; 0: all equally often
    hardness_floor: Fraction = 0.05  # smallest weight of an opponent, so that none is forgotten; an even opponent has 0.5 ** hardness_power
    memory: PositiveInt = 256  # recent battles that the learner's score against an opponent is made of; older ones fade


class UnitNetworkConfig(Config):
    """Widths of a unit's network before and after the recurrent core."""

    entity_width: Width = 16  # encoding of one contact or ally
    terrain_width: Width = 32  # encoding of the terrain around the unit
    width: Width = 64  # encoding of the whole observation, input of the core
    head_width: Width = 64  # hidden layer of the actor and of the critic
    state_width: Width = 32  # encoding of the whole battle, for a centralised critic
    motion: Literal["categorical", "gaussian"] = "categorical"  # heads of motion: a few choices each, or numbers from -1 to 1
    points: bool = True  # compute the logit of a target from its encoding; false: from the unit's hidden layer alone


class SelfPlayConfig(Config):
    """Opponents of the learner. In the battles that remain, the learner plays and learns on both sides."""

    bots: tuple[BotName, ...] = ("weak", "middle", "strong-v1")  # scripted opponents
    bot_draw: Literal["difficulty", "even"] = "difficulty"  # draw the bot of a battle by the league's hardness, or all equally often
    bot_share: Fraction = 0.75  # share of battles against bots
    past_share: Fraction = 0.125  # share of battles against past selves
    opponent_slots: PositiveInt = 1  # past selves that play at the same time
    slot_rollouts: PositiveInt | None = None  # rollouts that a past self stays in its slot; None: long enough to finish a battle
    first_team: TeamSize | None = None  # curriculum: largest team size at the start; None: no curriculum
    team_grows: PositiveInt = 20  # curriculum: updates until the teams grow by one
    enter_every: PositiveInt = 100  # updates between two candidates for the league
    entry_battles: PairedBattles = 64  # battles of a candidate's trial against each anchor and the best member, two on every map
    opponent_device: str | None = None  # device of the past selves; None: the learner's

    def check(self) -> None:
        if self.bot_share + self.past_share > 1:
            raise ConfigError("past_share", expected=f"at most 1 - bot_share ({1 - self.bot_share:g})", got=self.past_share)
        if self.bot_share and not self.bots:
            raise ConfigError("bots", expected="at least one bot, or bot_share 0", got=self.bots)


class ArenaTrainConfig(ShownConfig):
    """A training run by self-play: the arena, the opponents, the league and the learner.

    The defaults are for a first training of minutes on a few CPU cores. docs/arena.md has settings for a GPU and larger teams.
    """

    arena: ArenaConfig = ArenaConfig(battles=256, state_view=True)
    selfplay: SelfPlayConfig = SelfPlayConfig()
    league: LeagueConfig = LeagueConfig()
    unit: UnitNetworkConfig = UnitNetworkConfig()
    start_from: str | None = None  # file with the first weights, from a league: RUN/league/members/NAME.safetensors; None: random weights
    total_steps: PositiveInt = 20_000_000  # steps of all ranks; a step is one decision of one learning unit, alive or not
    minutes: PositiveFloat | None = None  # training ends after this time, and schedules follow it; None: by total_steps alone
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available
    threads: Threads | None = None  # CPU threads of torch; None: torch's default
    deterministic: bool = False  # bitwise equal runs on a GPU too, with slower kernels; otherwise cuDNN chooses the fastest kernels
    checkpoint_every: PositiveInt = 25  # updates between checkpoints
    keep: PositiveInt = 2  # checkpoints to keep, besides the best
    eval_battles: EvenCount = 128  # battles against `eval_against` at every checkpoint, to find the best one, two on every map; 0: none
    eval_against: BotName = "strong"  # bot that checkpoints are evaluated against
    eval_replays: NonNegativeInt = 4  # newest evaluation battles to keep in replays/, one of each evaluation; 0: record none
    ppo: PPOConfig = PPOConfig(
        num_steps=32,
        num_epochs=2,
        num_minibatches=8,
        learning_rate=1e-3,
        learning_rate_schedule="linear",
        learning_rate_end=1e-4,
        gamma=0.997,
        gae_lambda=0.97,
        entropy_coef=0.01,
        entropy_coef_end=0.001,
        normalize_observations=False,
        network=NetworkConfig(core="none", hidden_size=64, log_std=-1.0),
        # The heads of fire matter in few decisions, and at first with one choice in most of these: low entropy says nothing about them.
        thresholds=ThresholdsConfig(entropy_collapse=0.0),
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
