"""Mistakes of users: what other libraries call things, and environments that return something else than they should."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

from esper.config import ConfigError
from esper.rl import PPO, NetworkConfig, PPOConfig
from esper.vecenv import make

SMALL = PPOConfig(num_steps=16, num_epochs=1, network=NetworkConfig(hidden_size=8, encoder_sizes=(8,)))


class Broken(gymnasium.Env):
    """Observes two parts, and from the fourth step of an episode on gives `reward` and `part`. Episodes are cut after 6 steps."""

    observation_space = spaces.Dict(left=spaces.Box(-1, 1, (2,)), right=spaces.Box(-1, 1, (2,)))
    action_space = spaces.Discrete(2)

    def __init__(self, reward=1.0, part=0.0, at=range(4, 7)):
        self.reward, self.part, self.at = reward, part, at

    def look(self):
        value = self.part if self.count in self.at else 0.0
        return {"left": np.zeros(2, np.float32), "right": np.full(2, value, np.float32)}

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.look(), {}

    def step(self, action):
        self.count += 1
        return self.look(), self.reward if self.count in self.at else 1.0, False, self.count == 6, {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"part": np.nan}, r"Broken: the observation 'right' is not finite \(NaN or infinity\) in the environments \[1\]"),
        ({"part": np.nan, "at": [6]}, "Broken: a final observation of a truncated episode is not finite"),
    ],
)
@pytest.mark.parametrize("core", ["lstm", "none"])
def test_an_observation_that_is_not_finite_is_told_with_its_part_and_environment(settings, message, core):
    envs = iter([Broken(), Broken(**settings), Broken()])
    ppo = PPO(lambda: next(envs), PPOConfig(num_steps=16, num_epochs=1, network=NetworkConfig(core=core, hidden_size=8)), num_envs=3)
    with pytest.raises(FloatingPointError, match=message):
        ppo.learn(100)


def test_a_reward_that_is_an_array_is_told():
    with pytest.raises(ValueError, match="Broken: the environment's step returned a reward, terminated or truncated that is an array"):
        PPO(lambda: Broken(reward=np.ones(1)), SMALL).learn(100)

    class Column(VectorWrapper):
        def step(self, actions):
            obs, reward, *rest = self.env.step(actions)
            return obs, reward[:, None], *rest

    batch = Column(SyncVectorEnv([Broken] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    with pytest.raises(ValueError, match=r"Broken: rewards have the shape \(2, 1\), expected one number per environment, \(2,\)"):
        PPO(batch, SMALL).learn(100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PPOConfig(n_steps=64), "n_steps: unknown key; here it is num_steps"),
        (lambda: PPOConfig(ent_coef=0.1), "ent_coef: unknown key; here it is entropy_coef"),
        (lambda: PPOConfig(gama=0.1), "gama: unknown key; did you mean 'gamma'"),
        (lambda: NetworkConfig(net_arch=[64]), "here it is encoder_sizes, before the memory"),
        (
            lambda: PPO("MlpPolicy", Broken()),
            r'instead of \'MlpPolicy\', write PPO\(env, PPOConfig\(network=NetworkConfig\(core="none"\)\)\)',
        ),
        (lambda: PPO("MlpLstmPolicy", Broken(), verbose=1), r"write PPO\(env\)$"),
        (lambda: PPO(Broken(), n_steps=64), r"write PPO\(env, PPOConfig\(...\)\), where it is num_steps"),
        (lambda: PPO(Broken(), num_steps=64), r"write PPO\(env, PPOConfig\(...\)\), where it is num_steps"),
        (lambda: PPO(Broken(), verbose=1), "PPO takes no 'verbose'; it takes env, config"),
        (lambda: PPO(Broken(), learning_rate=3e-4), r"write PPOConfig\(learning_rate=0.0003\)"),
        (lambda: PPO(Broken(), {"gamma": 0.9}), "config must be a PPOConfig; got {'gamma': 0.9}"),
    ],
)
def test_a_call_in_the_form_of_another_library_names_what_to_write_instead(call, message):
    with pytest.raises((ConfigError, TypeError), match=message):
        call()


def library(name: str) -> type:
    """Return a class of environments that comes from a library of this name."""
    return type("Foreign", (), {"__module__": f"{name}.common", "num_envs": 2, "step": None})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stable_baselines3", "give the function that makes one environment, and num_envs"),
        ("pettingzoo", "write a VecEnv with one row for each"),
    ],
)
def test_an_environment_of_another_library_is_refused_with_advice(name, message):
    for source in (library(name)(), library(name), lambda num_envs: library(name)()):
        with pytest.raises(ValueError, match=f"a Foreign of {name}: .*{message}"):
            make(source, 2)


def test_learning_goes_on_for_as_many_steps_as_are_asked_for():
    ppo = PPO(Broken, SMALL, num_envs=2)
    shares = []
    ppo.learner.schedule = lambda left: shares.append(left) or 1e-3
    assert [ppo.learn(64).step, ppo.learn(64).step, ppo.learn(1).step] == [64, 128, 160]
    assert shares == [1.0, 0.5, 0.5, 0.25, pytest.approx(1 / 129)]
    with pytest.raises(ValueError, match="steps must be at least 1; got 0"):
        ppo.learn(0)
