"""Ours and sb3-contrib's RecurrentPPO behind one small interface, with hyper-parameters that mean the same on both sides.

The same on both sides: environments, rollout size, epochs, minibatches, Adam (eps 1e-5 is sb3's default), discount, GAE, clipping,
gradient norm, no normalisation of observations, rewards or values; observations go straight into one LSTM layer, then 64-64 tanh for
actor and critic each, orthogonal with gains √2, 0.01 for the action layer, 1 for the value layer, biases zero; gradients flow back to
the start of the rollout (sb3: of the episode or the minibatch, whichever is later).

Written differently, and converted here: sb3's entropy is in nats, ours in units of the most there can be; sb3's value loss is the mean
square, ours half of it.

Different, and part of what is compared:
- sb3's default has a second LSTM for the critic; "shared" has one, which learns from the actor alone. Ours is one that learns from both.
- sb3's LSTM starts from torch's uniform ±1/√width with random biases, ours orthogonal with a forget bias of 1 and input weights scaled by
  √(units / inputs).
- sb3 normalises advantages per minibatch, ours per rollout.
- sb3 shuffles by rotating the rollout, environment after environment, and cutting it in order; ours deals out sequences.
- sb3 values a cut episode in the step in which it is cut, ours once per rollout.
- continuous actions: sb3 clips a Gaussian to the bounds, ours is squashed by tanh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.events import Update
from esper.rl.ppo import PPO
from esper.rng import Streams
from esper.vecenv import Discrete, VecEnv

HEAD_SIZES = (64, 64)  # sb3's default


@dataclass(frozen=True, slots=True)
class Hyper:
    """In sb3's units."""

    num_steps: int
    hidden_size: int
    num_epochs: int = 4
    num_minibatches: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01  # per nat
    value: float = 0.5  # of the mean squared error
    max_grad_norm: float = 0.5
    log_std: float = 0.0  # initial, of continuous actions


class Side(Protocol):
    """A learner in training. Means are over the last 100 finished episodes, nan before the first."""

    steps_per_update: int

    def train_until(self, step: int) -> None:
        """Whole updates until at least this many steps of all environments together."""

    @property
    def mean_return(self) -> float: ...

    @property
    def mean_length(self) -> float: ...


class Ours:
    """One LSTM for actor and critic; with `has_critic_memory` one for each, as in sb3's default."""

    def __init__(self, env: VecEnv, hyper: Hyper, *, seed: int, bptt_length: int | None = None, has_critic_memory: bool = False) -> None:
        self.ppo = PPO(env, our_config(env, hyper, seed=seed, bptt_length=bptt_length, has_critic_memory=has_critic_memory))
        self.steps_per_update = self.ppo.steps_per_update
        self.last: Update | None = None

    def train_until(self, step: int) -> None:
        for update in self.ppo.train(step):
            self.last = update

    @property
    def mean_return(self) -> float:
        return math.nan if self.last is None else self.last.mean_return

    @property
    def mean_length(self) -> float:
        return math.nan if self.last is None else self.last.mean_length


def our_config(env: VecEnv, hyper: Hyper, *, seed: int, bptt_length: int | None = None, has_critic_memory: bool = False) -> PPOConfig:
    return PPOConfig(
        seed=seed,
        num_steps=hyper.num_steps,
        num_epochs=hyper.num_epochs,
        num_minibatches=hyper.num_minibatches,
        bptt_length=bptt_length,
        learning_rate=hyper.learning_rate,
        adam_eps=1e-5,
        max_grad_norm=hyper.max_grad_norm,
        gamma=hyper.gamma,
        gae_lambda=hyper.gae_lambda,
        clip_coef=hyper.clip,
        value_coef=2 * hyper.value,  # our value loss is half the mean square
        entropy_coef=hyper.entropy,
        # Our entropies are in units of log(choices), or of log 2 per number; times these, they are in nats.
        entropy_weights={
            head.name: math.log(head.size) if isinstance(head, Discrete) else head.size * math.log(2.0) for head in env.action_spec.heads
        },
        normalize_observations=False,
        normalize_rewards=False,
        normalize_values=False,
        network=NetworkConfig(
            hidden_size=hyper.hidden_size,
            encoder_sizes=(),
            head_sizes=HEAD_SIZES,
            log_std=hyper.log_std,
            critic_memory="own" if has_critic_memory else "shared",
        ),
    )


class Sb3:
    """`shared` has one LSTM for actor and critic instead of sb3's default of two."""

    def __init__(self, env: VecEnv, hyper: Hyper, *, seed: int, shared: bool = False) -> None:
        from sb3_contrib import RecurrentPPO  # here, so that ours can be measured where it is not installed

        from benchmarks.rl.sb3_env import Sb3VecEnv

        self.steps_per_update = hyper.num_steps * env.num_envs
        policy = {"lstm_hidden_size": hyper.hidden_size, "log_std_init": hyper.log_std}
        if shared:
            policy |= {"shared_lstm": True, "enable_critic_lstm": False}
        adapted = Sb3VecEnv(env)
        self.model = RecurrentPPO(
            "MlpLstmPolicy",
            adapted,
            learning_rate=hyper.learning_rate,
            n_steps=hyper.num_steps,
            batch_size=self.steps_per_update // hyper.num_minibatches,
            n_epochs=hyper.num_epochs,
            gamma=hyper.gamma,
            gae_lambda=hyper.gae_lambda,
            clip_range=hyper.clip,
            normalize_advantage=True,
            ent_coef=hyper.entropy,
            vf_coef=hyper.value,
            max_grad_norm=hyper.max_grad_norm,
            policy_kwargs=policy,
            seed=seed,
            device="cpu",
        )
        adapted.seed(Streams(seed).integer("environment"))  # what our learner seeds its environments with

    def train_until(self, step: int) -> None:
        # It logs what it is asked to every so many updates; that it is never asked spares it the time.
        self.model.learn(step - self.model.num_timesteps, reset_num_timesteps=False, log_interval=10**9)

    @property
    def mean_return(self) -> float:
        return self._mean("r")

    @property
    def mean_length(self) -> float:
        return self._mean("l")

    def _mean(self, name: str) -> float:
        episodes = self.model.ep_info_buffer
        return sum(float(episode[name]) for episode in episodes) / len(episodes) if episodes else math.nan
