"""The settings of a training run, and presets. Imports no torch, so that the command line starts quickly."""

from __future__ import annotations

from typing import Any, Literal

from esper.config import Config, ConfigError, Count, Fraction, NonNegativeInt, PositiveInt, Threads
from esper.rl.config import NetworkConfig, PPOConfig
from esper.runs.telemetry import Level

EnvValue = bool | int | float | str | None | list[bool | int | float | str]
MAX_ROLLOUT = 2**31  # most steps of all environments in one update; a step takes hundreds of bytes


class ShownConfig(Config):
    """Output of a run for other programs. It is part of the saved settings, so a resumed run writes it too."""

    tensorboard: bool = False  # also write scalars for TensorBoard into the run folder
    wandb: Literal["offline", "online"] | None = None
    """also write scalars for Weights & Biases into the run folder; online: also send them to your account"""
    telemetry: Level = "normal"  # off: only start, end and checkpoints; minimal: no details of heads; debug: also memory, inputs and so on
    telemetry_escalation: NonNegativeInt = 5  # updates for which an anomaly raises the telemetry to debug; 0: never


class TrainConfig(ShownConfig):
    """A training run: an environment, how long to train in it, and the learner."""

    env: str  # a built-in environment, a Gymnasium id, package.module:id, or package.module:function that makes one environment
    env_args: dict[str, EnvValue] = {}  # keywords for the environment
    wrappers: tuple[str, ...] = ()  # package.module:name of wrappers around each Gymnasium environment, the first one innermost
    num_envs: Count = 16  # environments stepped together; per rank under torchrun
    total_steps: PositiveInt = 200_000  # steps of all environments together
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is one
    threads: Threads | None = None  # CPU threads of torch; None: torch decides
    deterministic: bool = False  # the same bits in every run on a GPU too, with slower kernels; otherwise cuDNN chooses the fastest ones
    checkpoint_every: PositiveInt = 20  # updates between checkpoints
    keep: PositiveInt = 3  # number of checkpoints that are kept, besides the best
    eval_episodes: NonNegativeInt = 16  # episodes that choose the best checkpoint, and as many others that it plays at the end; 0: none
    eval_max_steps: PositiveInt = 10_000  # steps after which an evaluation cuts an episode
    eval_share: Fraction = 0.1  # share of the environment steps that evaluations may take; a checkpoint beyond it is saved without a score
    ppo: PPOConfig = PPOConfig()

    def check(self) -> None:
        most = MAX_ROLLOUT // self.ppo.num_steps
        if self.num_envs > most:
            raise ConfigError("num_envs", expected=f"at most {most} for {self.ppo.num_steps} steps of each", got=self.num_envs)


class TrainSeedsConfig(TrainConfig):
    """Several training runs, whose seeds are `ppo.seed`, `ppo.seed` + 1 and so on."""

    seeds: PositiveInt = 5  # number of runs


def _classic(env: str, total_steps: int, **ppo: Any) -> TrainConfig:
    """Return the settings for a classic task. It needs no memory, because an observation is the whole state."""
    return TrainConfig(env=env, total_steps=total_steps, ppo=PPOConfig(network=NetworkConfig(core="none"), **ppo))


PRESETS = {
    "cartpole": _classic("CartPole-v1", 50_000),
    "acrobot": _classic("Acrobot-v1", 50_000),
    "mountain-car-continuous": _classic("MountainCarContinuous-v0", 50_000),
    "pendulum": _classic("Pendulum-v1", 100_000),
    "lunar-lander": _classic("LunarLander-v3", 300_000),
}
"""Settings that learn classic tasks, by the name that `--preset` takes."""
