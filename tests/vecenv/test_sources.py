"""Environments from functions, names of functions, environments and wrappers, and masks given as a method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from esper.cli.main import main
from esper.config import load, save
from esper.rl import PPO, NetworkConfig, Policy, PPOConfig, TrainConfig, record_video, train_run
from esper.vecenv import check_env, make
from esper.vecenv.builtin import Cue
from esper.vecenv.gymnasium import from_gymnasium

CODE = '''
import gymnasium
import numpy as np
from gymnasium import spaces

class Walk(gymnasium.Env):
    """One step right pays 1. Episodes of `length` steps."""

    action_space = spaces.Discrete(2)

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, length=4, render_mode=None):
        self.length, self.render_mode = length, render_mode
        self.observation_space = spaces.Box(0, length, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full(1, self.count, np.float32), float(action), self.count == self.length, False, {}

    def render(self):
        picture = np.zeros((8, 10, 3), np.uint8)
        picture[:, : 2 * self.count] = 255
        return picture

class Doubled(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 2 * reward

def make_env(length=4, render_mode=None):
    return Walk(length, render_mode)

def make_blind():
    return Walk()

def make_batch(num_envs):
    from esper.vecenv.builtin import Cue
    return Cue(num_envs, delay=3)

def make_nothing():
    return None
'''
SMALL = PPOConfig(num_steps=8, num_epochs=1, network=NetworkConfig(core="none", encoder_sizes=(8,)))


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The module `walking` in the current folder, imported as a user would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    (tmp_path / "walking.py").write_text(CODE)
    __import__("sys").modules.pop("walking", None)
    return __import__("walking")


def total_reward(env, steps: int = 4) -> float:
    env.reset(seed=0)
    return sum(float(env.step({"action": torch.ones(env.num_envs, dtype=torch.int64)}).reward.sum()) for _ in range(steps))


def test_functions_names_environments_and_batches_make_the_same_environments(walk):
    batch = SyncVectorEnv([walk.Walk] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    for source in (walk.make_env, walk.Walk, "walking:make_env", "walking:Walk", walk.Walk(), batch):
        env = make(source, 2)
        assert total_reward(env) == 8.0
        check_env(env, steps=10)
    assert make("walking:make_env", 2, length=7).reset().obs["obs"].shape == (2, 1)
    assert make(walk.make_batch, 3).num_envs == 3


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # how Gymnasium starts its workers on Linux
def test_a_function_makes_environments_in_subprocesses(walk):
    env = make(walk.make_env, 2, vectorization_mode="async", wrappers=[walk.Doubled])
    try:
        assert isinstance(env.vector_env, AsyncVectorEnv)
        assert total_reward(env) == 16.0
    finally:
        env.close()


def test_a_given_environment_is_used_directly(walk):
    env = walk.Walk()
    ppo = PPO(env, SMALL)
    assert ppo.env.num_envs == 1
    assert ppo.env.vector_env.envs[0] is env
    assert PPO(walk.Walk(), SMALL, num_envs=3).env.num_envs == 3
    assert PPO(walk.make_env, SMALL).env.num_envs == 16
    assert PPO("cue", SMALL, num_envs=4).env.num_envs == 4


def test_wrappers_go_around_every_single_environment(walk):
    assert total_reward(make(walk.make_env, 2, wrappers=[walk.Doubled, walk.Doubled])) == 32.0
    assert total_reward(make("walking:make_env", 2, wrappers=["walking:Doubled"])) == 16.0
    assert total_reward(make("CartPole-v1", 2, wrappers=[walk.Doubled])) == 16.0


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("walkin:make_env", {}, "there is no module 'walkin'"),
        ("walking:make_nothing", {}, "make_nothing must make a gymnasium.Env; got a NoneType"),
        ("walking:make_env", {"wrappers": ["walking:Halved"]}, "the module walking has no 'Halved'"),
        (3, {}, "got a int"),
        (Cue(3, delay=3), {}, "a batch of 3, but 2 were asked for"),
        ("cue", {"wrappers": [lambda env: env]}, "a built-in environment, and wrappers"),
        ("walking:make_env", {"vectorization_mode": "threads"}, "'sync' or 'async'"),
    ],
)
def test_an_invalid_environment_source_is_refused_by_name(walk, source, options, message):
    with pytest.raises(ValueError, match=message):
        make(source, 2, **options)


def test_an_environment_that_cannot_be_copied_is_refused_with_the_advice_to_give_a_function(walk):
    class Stuck(walk.Walk):
        def __deepcopy__(self, memory):
            raise TypeError("cannot pickle a window")

    with pytest.raises(ValueError, match="give a function that makes the environment"):
        make(Stuck(), 2)


class Asked(gymnasium.Env):
    """Only the action named by the step counter is allowed; the first one when an episode begins."""

    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert action.tolist() == [self.count % 2, self.count % 3]
        self.count += 1
        return np.full(1, self.count, np.float32), 1.0, self.count == 5, False, {}

    def action_masks(self):
        return [np.arange(2) == self.count % 2, np.arange(3) == self.count % 3]


class AskedThroughAWrapper(gymnasium.Wrapper):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("factory", [Asked, lambda: AskedThroughAWrapper(Asked())], ids=["env", "wrapped"])
def test_masks_of_the_method_action_masks_are_obeyed(mode, factory):
    env = from_gymnasium(SyncVectorEnv([factory] * 2, autoreset_mode=mode))
    assert env.reset().masks["action_1"].tolist() == [[True, False, False]] * 2
    ppo = PPO(env, SMALL)  # the environment asserts that nothing else is chosen
    assert ppo.learn(48).collector.episodes > 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # how Gymnasium starts its workers on Linux
def test_masks_of_the_method_action_masks_come_from_other_processes_too():
    env = from_gymnasium(AsyncVectorEnv([Asked] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    try:
        assert env.reset().masks["action_0"].tolist() == [[True, False]] * 2
    finally:
        env.close()


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_policy_trains_in_a_single_environment(core):
    network = NetworkConfig(core=core, hidden_size=8, encoder_sizes=(8,))
    ppo = PPO("cue", PPOConfig(num_steps=8, num_epochs=1, network=network), num_envs=1)
    updates = list(ppo.train(16))
    assert [update.gradient_steps for update in updates] == [8 if core == "none" else 1] * 2


@pytest.mark.slow
def test_a_callback_sees_every_update_and_ends_training(walk):
    seen = []
    ppo = PPO(walk.make_env, SMALL, num_envs=2)
    assert ppo.learn(64, callback=lambda learner, update: seen.append((learner is ppo, update.step))) is ppo
    assert seen == [(True, 16), (True, 32), (True, 48), (True, 64)]
    assert ppo.learn(640, callback=lambda learner, update: update.step < 96).step == 96


@pytest.mark.slow
def test_a_run_trains_in_a_given_environment_and_calls_the_callback(walk, tmp_path: Path):
    config = TrainConfig(env="walk", num_envs=1, total_steps=32, eval_episodes=2, checkpoint_every=2, device="cpu", ppo=SMALL)
    env, seen = walk.Walk(), []
    result = train_run(config, tmp_path / "run", env=env, callback=lambda ppo, update: seen.append(ppo.env.vector_env.envs[0] is env))
    assert result.status == "finished"
    assert seen == [True] * 4
    assert len(result.evaluation.returns) == 2
    stopped = train_run(config, tmp_path / "stopped", env=walk.make_env, callback=lambda ppo, update: update.step < 16)
    assert (stopped.status, stopped.step) == ("stopped", 16)
    assert train_run(None, tmp_path / "stopped", resume=True, env=walk.make_env).status == "finished"
    with pytest.raises(ValueError, match=r"make_env\(num_envs\)"):
        train_run(config, tmp_path / "batch", env=make(walk.make_env, 1))
    assert not (tmp_path / "batch").exists()


@pytest.mark.slow
def test_the_command_line_trains_in_a_function_of_the_users(walk, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--num-envs", "2", "--num-steps", "8", "--total-steps", "16", "--eval-episodes", "2", "--device", "cpu", "--core", "none"]
    words = ["ppo", "train", "walking:make_env", "--env-args", "length=3", "--wrappers", "walking:Doubled", "--run", "run", *options]
    assert main(words) == 0
    saved = load(TrainConfig, tmp_path / "run" / "config.toml")
    assert (saved.env, saved.wrappers, saved.env_args) == ("walking:make_env", ("walking:Doubled",), {"length": 3})
    assert main(["ppo", "eval", "run", "--episodes", "2", "--json"]) == 0
    assert '"mean_length":3.0' in capsys.readouterr().out
    assert Policy.load(tmp_path / "run").predict(np.zeros(1))[0] in (0, 1)
    assert main(["ppo", "train", "walkin:make_env", *options]) == 2
    assert "there is no module 'walkin'" in capsys.readouterr().err


def test_a_video_shows_every_step_of_an_episode(walk, tmp_path: Path):
    from PIL import Image

    ppo = PPO(walk.make_env, SMALL, num_envs=2)
    (earned,) = record_video(ppo.policy, "walking:make_env", tmp_path / "walk.gif", length=3)
    assert 0.0 <= earned <= 3.0
    with Image.open(tmp_path / "walk.gif") as video:
        widths = []
        for index in range(video.n_frames):
            video.seek(index)
            widths.append(int((np.array(video.convert("L"))[0] > 128).sum()))
        assert widths == [0, 2, 4, 6]
        assert video.info["duration"] == 50
    assert len(record_video(ppo.policy, walk.Walk(render_mode="rgb_array"), tmp_path / "two.webp", episodes=2, max_steps=2)) == 2
    for env, path, message in (
        (walk.make_blind, "walk.gif", "its render_mode is None"),
        (walk.make_env, "walk.mp4", "must end in .gif, .webp, .png"),
        ("cue", "walk.gif", "a built-in environment"),
    ):
        with pytest.raises(ValueError, match=message):
            record_video(ppo.policy, env, tmp_path / path)


def test_an_evaluation_on_another_device_leaves_a_video(walk, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = TrainConfig(env="walking:make_env", num_envs=2, total_steps=16, eval_episodes=0, device="cpu", ppo=SMALL)
    train_run(config, tmp_path / "run")
    # As if it had been trained on a machine with a GPU.
    save(msgspec.structs.replace(config, device="cuda"), tmp_path / "run" / "config.toml")
    command = ["ppo", "eval", "run", "--episodes", "2", "--json"]
    if not torch.cuda.is_available():
        assert main(command) != 0
        assert "cuda" in capsys.readouterr().err
    assert main([*command, "--device", "cpu", "--video", "walk.gif"]) == 0
    assert '"video":"walk.gif"' in capsys.readouterr().out
    assert (tmp_path / "walk.gif").read_bytes()[:4] == b"GIF8"
    assert main([*command, "--device", "cpu", "--video", "walk.mp4"]) == 2
    assert "must end in .gif" in capsys.readouterr().err


def test_evaluation_accepts_the_same_environments_as_training(walk):
    ppo = PPO(walk.make_env, SMALL, num_envs=2)
    assert ppo.evaluate(walk.Walk(), episodes=2).lengths == [4, 4]
    assert ppo.evaluate("walking:make_env", episodes=3).lengths == [4, 4, 4]


class Wrong(gymnasium.Env[np.ndarray, int]):
    """An environment with one mistake: in what `reset` or `step` returns, or in the shape of its observations."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs = np.zeros(3 if self.mistake == "shape" else 2, np.float32)
        return obs if self.mistake == "reset" else (obs, {})

    def step(self, action: int) -> Any:
        result = (np.zeros(2, np.float32), 0.0, False, False, {})
        return result[:4] if self.mistake == "step" else result


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("reset", r"the environment's reset returned something else than \(observation, info\)"),
        ("shape", r"the environment's reset returned something else than .* observation of its observation_space"),
        ("step", r"the environment's step returned something else than \(observation, reward, terminated, truncated, info\)"),
    ],
)
def test_a_wrong_result_of_an_environment_is_explained(mistake: str, message: str) -> None:
    env = make(lambda: Wrong(mistake), 2)
    if mistake == "step":
        env.reset(0)
    with pytest.raises(ValueError, match=message):
        env.step({"action": torch.zeros(2, dtype=torch.int64)}) if mistake == "step" else env.reset(0)
