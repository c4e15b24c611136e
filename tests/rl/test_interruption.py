"""Statistics stay exact where a rollout was broken off, and where the training environments were used for something else in between."""

from __future__ import annotations

import os
import signal

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper.rl import PPO, NetworkConfig, PPOConfig
from esper.vecenv import make

LENGTH = 50


class Fifty(gymnasium.Env):
    """Episodes of exactly 50 steps that pay 1 each. Raises `error` once, at step `fails_at` of all its steps."""

    observation_space, action_space = spaces.Box(0, LENGTH, (1,)), spaces.Discrete(2)

    def __init__(self, fails_at: int = -1, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.fails_at, self.error, self.steps = fails_at, error, 0

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fails_at:
            raise self.error("stop")
        self.count += 1
        return np.full(1, self.count, np.float32), 1.0, self.count == LENGTH, False, {}


def learner(env, **settings) -> PPO:
    network = NetworkConfig(hidden_size=8, encoder_sizes=(8,))
    return PPO(env, PPOConfig(num_steps=32, num_epochs=1, network=network, **settings), num_envs=3)


def all_are_whole(ppo: PPO) -> bool:
    """Train on, and return whether all episodes so far have 50 steps and a return of 50."""
    episodes = ppo.collector.episodes
    ppo.learn(3 * 32 * 4)
    assert ppo.collector.episodes > episodes
    return set(ppo.collector.recent_lengths) == set(ppo.collector.recent_returns) == {float(LENGTH)}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("fails_at", [5, 61, 90])
def test_training_goes_on_with_whole_episodes_after_a_rollout_was_broken_off(error, fails_at):
    envs = iter([Fifty(), Fifty(fails_at, error), Fifty()])
    ppo = learner(lambda: next(envs))
    with pytest.raises(error):
        ppo.learn(10_000)
    assert ppo.step == fails_at // 32 * 32 * 3, "a thrown away rollout does not count"
    before = ppo.learner.reward_normalizer.running.clone()
    rollout = ppo.collect()
    assert bool(rollout.starts[0].all()), "new episodes begin, with an empty memory"
    assert not rollout.states[0].any()
    ppo.update(rollout)
    # The running return of the reward normaliser begins anew too: 32 discounted rewards of 1.
    expected = sum(0.99**step for step in range(32))
    assert ppo.learner.reward_normalizer.running.tolist() == pytest.approx([expected] * 3), before
    assert all_are_whole(ppo)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # how Gymnasium starts its workers on Linux
def test_ctrl_c_in_a_terminal_leaves_environments_in_other_processes_alive(monkeypatch):
    env = make(Fifty, 3, vectorization_mode="async")
    try:
        ppo = learner(env)
        waits = iter([*[False] * 40, True])
        inner = env.vector_env
        original = inner.step_wait

        def step_wait(*args, **kwargs):
            if next(waits, False):
                for process in inner.processes:  # as a terminal does it
                    os.kill(process.pid, signal.SIGINT)
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        monkeypatch.setattr(inner, "step_wait", step_wait)
        with pytest.raises(KeyboardInterrupt):
            ppo.learn(10_000)
        assert all_are_whole(ppo)
    finally:
        env.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium tells of the error in the other process
def test_an_error_in_another_process_is_followed_by_the_advice_to_make_the_environments_again():
    ppo = learner(make(lambda: Fifty(40, ValueError), 3, vectorization_mode="async"))
    with pytest.raises(ValueError, match="stop"):
        ppo.learn(10_000)
    with pytest.raises(ValueError, match="processes of its environments have ended after an error; make the environments again"):
        ppo.learn(10_000)
    ppo.env.vector_env.close(terminate=True)


def test_training_goes_on_with_whole_episodes_after_an_update_was_broken_off():
    ppo = learner(Fifty)
    ppo.learn(3 * 32)
    rollout, step = ppo.collect(), ppo.learner._step
    ppo.learner._step = lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        ppo.update(rollout)
    ppo.learner._step = step
    rollout = ppo.collect()
    assert bool(rollout.starts[0].all()), "whether the normalisers have seen the rollout is unknown, so new episodes begin"
    ppo.update(rollout)
    assert all_are_whole(ppo)


def test_a_learner_that_was_saved_after_an_interruption_goes_on_with_its_statistics(tmp_path):
    envs = iter([Fifty(), Fifty(), Fifty(150)])
    ppo = learner(lambda: next(envs))
    with pytest.raises(KeyboardInterrupt):
        ppo.learn(10_000)
    assert ppo.collector.episodes == 6
    ppo.save(tmp_path / "ppo.safetensors")
    loaded = PPO.load(tmp_path / "ppo.safetensors", Fifty, num_envs=3)
    assert (loaded.collector.episodes, list(loaded.collector.recent_lengths)) == (6, [50.0] * 6)
    assert all_are_whole(loaded)


@pytest.mark.parametrize("form", ["batch", "vector", "single", "wrapped", "nothing"])
def test_an_evaluation_in_the_training_environments_leaves_whole_episodes(form):
    single = Fifty()
    vector = SyncVectorEnv([lambda: single] * 1, autoreset_mode=AutoresetMode.SAME_STEP)
    ppo = PPO(single if form in ("single", "wrapped") else vector, PPOConfig(num_steps=32, num_epochs=1))
    given = {"batch": ppo.env, "vector": vector, "single": single, "wrapped": gymnasium.wrappers.TimeLimit(single, 30), "nothing": None}
    ppo.learn(32)
    assert ppo.evaluate(given[form], episodes=1).lengths == [30 if form == "wrapped" else 50]
    ppo.learn(32 * 4)
    assert set(ppo.collector.recent_lengths) == {float(LENGTH)}


def test_an_evaluation_in_environments_of_its_own_leaves_the_episodes_of_training_alone():
    ppo = learner(Fifty)
    ppo.learn(3 * 32)
    ppo.evaluate(make(Fifty, 2), episodes=2)
    ppo.evaluate(Fifty, episodes=2)
    assert not bool(ppo.collect().starts[0].any())


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_steps_that_only_reset_an_environment_are_not_counted(mode):
    env = SyncVectorEnv([Fifty] * 3, autoreset_mode=mode)
    ppo = PPO(env, PPOConfig(num_steps=120, num_epochs=1))
    update = next(ppo.train(10_000))
    resets = 3 * 2 if mode is AutoresetMode.NEXT_STEP else 0
    assert ppo.step == update.step == 3 * 120 - resets
    assert update.steps_per_second == pytest.approx(ppo.step / (update.collect_seconds + update.update_seconds + update.other_seconds))
    steps = torch.tensor([each.steps for each in env.envs]).sum()
    assert ppo.step == steps
    assert all_are_whole(ppo)
