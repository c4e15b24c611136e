"""Ids of Gymnasium: they mean what `gymnasium.make` makes, in Python and on the command line, also those of packages and of own modules."""

from __future__ import annotations

import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from esper.cli.main import main
from esper.rl import PPO, NetworkConfig, PPOConfig, record_video
from esper.vecenv import make, registry
from esper.vecenv.images import ResizeImage, StackFrames

# A package that registers an id whose native vector form is another game: smaller pictures and a tenth of the reward, as ale-py's is.
PACKAGE = """
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

class Walk(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

    def __init__(self, pay=10.0, render_mode=None):
        self.pay, self.render_mode = pay, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full(1, self.count, np.float32), self.pay * float(action), self.count == 4, False, {}

    def render(self):
        return np.full((8, 8, 3), 40 * self.count, np.uint8)

class Clipped(VectorEnv):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    single_observation_space, single_action_space = spaces.Box(0, 9, (3,)), spaces.Discrete(2)

    def __init__(self, num_envs, pay=10.0, **options):
        self.num_envs = num_envs

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 3), np.float32), {}

    def step(self, action):
        nothing = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 3), np.float32), action.astype(float), nothing, nothing, {}

class Halved(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward / 2

gymnasium.register("Toy/Batch-v0", vector_entry_point=Clipped)
for version in (0, 1):
    gymnasium.register(f"Toy/Walk-v{version}", entry_point=Walk, vector_entry_point=Clipped, kwargs={"pay": 10.0 + version})
"""
SMALL = PPOConfig(num_steps=8, num_epochs=1, network=NetworkConfig(core="none", encoder_sizes=(8,)))
OPTIONS = ["--num-envs", "2", "--num-steps", "8", "--total-steps", "16", "--eval-episodes", "2", "--device", "cpu", "--core", "none"]


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package in the current folder that nobody has imported. Its beginning of ids is known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    (tmp_path / "toy_games.py").write_text(PACKAGE)
    monkeypatch.setitem(registry._PACKAGES, "Toy/", ("toy_games", "toy-games"))
    yield
    sys.modules.pop("toy_games", None)
    for name in ("Walk-v0", "Walk-v1", "Batch-v0"):
        gymnasium.registry.pop(f"Toy/{name}", None)


def rewards(env, steps: int = 4) -> list[float]:
    """Rewards of all environments for action 1."""
    env.reset(seed=0)
    (head,) = env.action_spec.heads
    return [float(env.step({head.name: torch.ones(env.num_envs, dtype=torch.int64)}).reward.sum()) for _ in range(steps)]


@pytest.mark.parametrize("name", ["Toy/Walk-v1", "toy_games:Toy/Walk-v1", "toy_games:Toy/Walk"])
def test_an_id_of_a_package_is_the_game_that_gymnasium_makes_and_not_its_native_vector_form(toys, name):
    env = make(name, 2)
    assert env.observation_spec["obs"].shape == gymnasium.make("Toy/Walk-v1").observation_space.shape
    assert rewards(env) == [22.0] * 4
    assert rewards(make(name, 2, wrappers=["toy_games:Halved"])) == [11.0] * 4
    assert rewards(make(name, 2, pay=3)) == [6.0] * 4
    assert rewards(make(gymnasium.spec("Toy/Walk-v0"), 2)) == [20.0] * 4


def test_a_policy_of_an_id_predicts_and_is_evaluated_in_the_environment_of_gymnasium(toys):
    ppo = PPO("Toy/Walk-v1", SMALL, num_envs=2)
    assert ppo.predict(gymnasium.make("Toy/Walk-v1").reset()[0])[0] in (0, 1)
    assert ppo.evaluate("Toy/Walk-v1", episodes=2).lengths == [4, 4]


def test_a_native_vector_form_is_used_where_it_is_asked_for_by_name(toys):
    mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
    for asked in (mode, mode.value):
        env = make("Toy/Walk-v1", 2, vectorization_mode=asked)
        assert env.observation_spec["obs"].shape == (3,)
        assert rewards(env) == [2.0] * 4
    assert rewards(make("Toy/Walk-v1", 2, vectorization_mode=gymnasium.VectorizeMode.SYNC, vector_kwargs={"copy": False})) == [22.0] * 4
    with pytest.raises(ValueError, match="Toy/Walk-v1 is made as a batch; leave out the wrappers"):
        make("Toy/Walk-v1", 2, vectorization_mode=mode, wrappers=["toy_games:Halved"])


def test_an_id_without_a_single_form_is_made_in_its_native_form(toys):
    assert rewards(make("Toy/Batch-v0", 2)) == [2.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.SAME_GAME)
def test_a_native_vector_form_that_is_used_for_an_id_is_the_same_game_over_10_000_steps(name):
    """Equal observations, rewards and ends. The episodes of the vector form begin where those of the single ones do."""
    num_envs = 8
    native, singles = make(name, num_envs).vector_env, [gymnasium.make(gymnasium.spec(name)) for _ in range(num_envs)]
    assert not isinstance(native, SyncVectorEnv)
    assert (native.single_observation_space, native.single_action_space) == (singles[0].observation_space, singles[0].action_space)
    starts = native.reset(seed=0)[0]
    native.state[:] = np.stack([single.reset(seed=seed) and single.unwrapped.state for seed, single in enumerate(singles)], axis=1)
    rng, steps, ends, begins = np.random.default_rng(0), 0, {"terminated": 0, "truncated": 0}, [np.zeros(num_envs, bool)]
    obs = native.state.T
    while steps < 10_000:
        # Half of the environments balance the pole until the time limit, the others move at random.
        actions = (obs @ [0.05, 0.1, 1.0, 0.5] > 0).astype(np.int64)
        actions[::2] = rng.integers(0, 2, num_envs // 2)
        obs, reward, terminated, truncated, _ = native.step(actions)
        for row, single in enumerate(singles):
            if begins[-1][row]:  # this step of the vector form only began an episode
                assert np.abs(obs[row]).max() <= 0.05
                starts = np.vstack((starts, obs[row]))
                single.reset()
                native.state[:, row] = single.unwrapped.state
                continue
            expected = single.step(actions[row])
            np.testing.assert_array_equal(obs[row], expected[0])
            # Both may be true at the time limit, where Gymnasium's wrapper and the vector form agree too.
            assert (reward[row], terminated[row], truncated[row]) == expected[1:4]
            steps += 1
            ends["terminated"] += int(terminated[row])
            ends["truncated"] += int(truncated[row])
        obs = native.state.T.astype(np.float32)
        begins.append(terminated | truncated)
    assert min(ends.values()) > 2, ends
    own = np.stack([singles[0].reset()[0] for _ in range(200)])
    assert abs(starts.std() - own.std()) < 0.004, "first states are drawn from the same range"
    assert np.abs(own).max() <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Toy/Walk-v1", "toy_games:Toy/Walk-v1"])
def test_the_command_line_trains_resumes_evaluates_and_shows_a_run_of_an_id_of_a_package(toys, tmp_path, capsys, name):
    run = str(tmp_path / "run")
    assert main(["ppo", "train", name, "--wrappers", "toy_games:Halved", "--env-args", "pay=4", "--run", run, *OPTIONS]) == 0
    assert main(["ppo", "train", "--run", run, "--resume", "--total-steps", "32"]) == 0
    assert main(["ppo", "eval", run, "--episodes", "2", "--video", "walk.gif", "--json"]) == 0
    assert (tmp_path / "walk.gif").stat().st_size > 0
    assert '"mean_length":4.0' in capsys.readouterr().out
    assert main(["watch", run, "--terminal"]) == 0
    assert name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("toy_games:Toy/Wolk-v1", "did you mean 'Toy/Walk-v1'"),
        ("toy_games:Halve", "toy_games has no Halve and registers no such id; did you mean 'Halved'"),
        ("Toy/Wolk-v1", "did you mean 'Toy/Walk-v1'"),
        ("CartPol-v1", "did you mean 'CartPole-v1'"),
        ("Nothing/Like-it-v0", r"the built-in ones are .*cue.* package:Nothing/Like-it-v0"),
        ("Absent/Game-v0", "comes with a package that is not installed: pip install absent-games"),
        ("absent_games:Absent/Game-v0", "there is no module 'absent_games'"),
    ],
)
def test_an_unknown_id_is_refused_with_the_nearest_ones(toys, monkeypatch, capsys, name, message):
    monkeypatch.setitem(registry._PACKAGES, "Absent/", ("absent_games", "absent-games"))
    with pytest.raises(ValueError, match=message):
        make(name, 2)
    with pytest.raises(ValueError, match=message):
        registry.make_single(name)
    assert main(["ppo", "train", name, *OPTIONS]) == 2


@pytest.mark.extra("ale_py")
def test_an_atari_game_is_that_of_gymnasium_and_trains_from_its_id(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = make("ALE/SpaceInvaders-v5", 1)
    single = gymnasium.make("ALE/SpaceInvaders-v5")
    assert env.observation_spec["obs"].shape == single.observation_space.shape == (210, 160, 3)
    seen, _ = single.reset(seed=0)
    np.testing.assert_array_equal(env.reset(seed=0).obs["obs"][0].numpy(), seen)
    rng, paid = np.random.default_rng(0), set()
    for _ in range(300):
        action = int(rng.integers(6))
        expected = single.step(action)
        answer = env.step({"action": torch.tensor([action])})
        assert (float(answer.reward), bool(answer.terminated), bool(answer.truncated)) == expected[1:4]
        if expected[2] or expected[3]:
            break
        np.testing.assert_array_equal(answer.obs["obs"][0].numpy(), expected[0])
        paid.add(expected[1])
    assert max(paid) > 1.0, "rewards are not clipped"
    ppo = PPO(env, SMALL)
    assert ppo.predict(seen)[0] in range(6)
    assert len(record_video(ppo.policy, "ALE/SpaceInvaders-v5", tmp_path / "game.gif", max_steps=2)) == 1
    assert make("ALE/Pong-v5", 1, wrappers=[ResizeImage, StackFrames]).observation_spec["obs"].shape == (84, 84, 4)
    images = "esper.vecenv.images:"
    words = ["ALE/Pong-v5", "--wrappers", f"{images}ResizeImage", f"{images}StackFrames", "--eval-max-steps", "4", "--run", "run"]
    assert main(["ppo", "train", *words, *OPTIONS]) == 0
    assert main(["ppo", "eval", "run", "--episodes", "1", "--max-steps", "4"]) == 0
    assert main(["ppo", "train", "ALE/Pog-v5", *OPTIONS]) == 2
    assert "did you mean 'ALE/Pong-v5'" in capsys.readouterr().err


@pytest.mark.extra("minigrid")
def test_a_minigrid_world_trains_from_its_id_and_its_text_is_refused_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["MiniGrid-Empty-5x5-v0", "--wrappers", "minigrid.wrappers:ImgObsWrapper", "--run", "run"]
    assert main(["ppo", "train", *words, *OPTIONS]) == 0
    assert main(["ppo", "eval", "run", "--episodes", "1", "--max-steps", "4"]) == 0
    assert main(["ppo", "train", "MiniGrid-Empty-5x5-v0", *OPTIONS]) == 2
    assert "observation 'mission' is a MissionSpace" in capsys.readouterr().err
