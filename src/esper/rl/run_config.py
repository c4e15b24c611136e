"""What a training run is made of. Imports no torch, so that a command line can show it at once."""

from __future__ import annotations

from typing import Any, Literal

from esper.config import Config, ConfigError, Count, Fraction, NonNegativeInt, PositiveInt, Threads
from esper.rl.config import NetworkConfig, PPOConfig

EnvValue = bool | int | float | str | None | list[bool | int | float | str]


MAX_ROLLOUT = 2**31  # steps of all environments in one update; a step takes hundreds of bytes


class ShownConfig(Config):
    """What a run writes for other programs to show. It is part of the saved run, so a run that goes on writes it too."""

    tensorboard: bool = False  # also write scalars for TensorBoard into the run folder
    wandb: Literal["offline", "online"] | None = None
    """also write scalars for Weights & Biases into the run folder; online: and send them to your account"""


class TrainConfig(ShownConfig):
    """A training run: an environment, how long to train in it, and the learner."""

    env: str  # a built-in environment, a Gymnasium id, or package.module:function that makes one environment
    env_args: dict[str, EnvValue] = {}  # keywords for the environment
    wrappers: tuple[str, ...] = ()  # package.module:name of wrappers around each Gymnasium environment, the first one innermost
    num_envs: Count = 16  # environments stepped as one; per rank under torchrun
    total_steps: PositiveInt = 200_000  # steps of all environments together
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    threads: Threads | None = None  # CPU threads of torch; None: its own choice
    deterministic: bool = False  # the same bits in every run on a GPU too, by slower kernels; else cuDNN chooses the fastest ones
    checkpoint_every: PositiveInt = 20  # updates between checkpoints
    keep: PositiveInt = 3  # checkpoints that stay, beside the best
    eval_episodes: NonNegativeInt = 16  # fresh episodes that tell the best checkpoint, and others it plays at the end; 0: none
    eval_max_steps: PositiveInt = 10_000  # an evaluation cuts an episode after so many steps
    eval_share: Fraction = 0.1  # of the environments' steps that evaluations may take; a checkpoint beyond it is saved without a score
    ppo: PPOConfig = PPOConfig()

    def check(self) -> None:
        most = MAX_ROLLOUT // self.ppo.num_steps
        if self.num_envs > most:
            raise ConfigError("num_envs", expected=f"at most {most} for {self.ppo.num_steps} steps of each", got=self.num_envs)


def _classic(env: str, total_steps: int, **ppo: Any) -> TrainConfig:
    """Everything that matters is observed in these tasks, so no memory is needed."""
    return TrainConfig(env=env, total_steps=total_steps, ppo=PPOConfig(network=NetworkConfig(core="none"), **ppo))


PRESETS = {
    "cartpole": _classic("CartPole-v1", 50_000),
    "acrobot": _classic("Acrobot-v1", 50_000),
    "mountain-car-continuous": _classic("MountainCarContinuous-v0", 50_000),
    "pendulum": _classic("Pendulum-v1", 100_000),
    "lunar-lander": _classic("LunarLander-v3", 300_000),
}
"""Settings under which a classic task is learned, by the name that `--preset` takes."""
