"""The benchmarks run, compare equal settings, and keep written results. Nothing here measures anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.vecenv.builtin import CartPoleHidden

needs_sb3 = pytest.mark.extra("sb3_contrib")

with pytest.MonkeyPatch.context() as patch:  # scripts ask for one thread as they are imported
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        patch.setenv(name, "1")
    from benchmarks import records
    from benchmarks.rl import memory as ppo_memory, memory_tasks, recurrent_ppo, sides

    if find_spec("sb3_contrib") is not None:
        from benchmarks.rl import sb3_env

TINY = sides.Hyper(num_steps=8, hidden_size=4, num_epochs=1, num_minibatches=2)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@needs_sb3
def test_the_adapter_passes_on_the_steps_of_the_environment() -> None:
    env, twin = (CartPoleHidden(4, max_steps=9, reward_scale=0.5) for _ in range(2))
    adapter = sb3_env.Sb3VecEnv(env)
    adapter.seed(3)
    np.testing.assert_array_equal(adapter.reset(), twin.reset(3).obs["obs"].numpy())
    ends = set()
    for step in range(60):
        actions = np.array([1, 1, step % 2, (step // 2) % 2])
        obs, rewards, dones, infos = adapter.step(actions)
        expected = twin.step({"action": torch.from_numpy(actions)})
        np.testing.assert_array_equal(obs, expected.obs["obs"].numpy())
        np.testing.assert_array_equal(rewards, expected.reward.numpy())
        np.testing.assert_array_equal(dones, expected.ended.numpy())
        for index, info in enumerate(infos):
            assert info["TimeLimit.truncated"] == bool(expected.truncated[index])
            assert ("terminal_observation" in info) == bool(dones[index])
            if dones[index]:
                assert expected.final_obs is not None
                np.testing.assert_array_equal(info["terminal_observation"], expected.final_obs["obs"][index].numpy())
                assert info["episode"]["r"] == pytest.approx(0.5 * info["episode"]["l"])
                assert info["episode"]["l"] <= 9
                ends.add(info["TimeLimit.truncated"])
    assert ends == {True, False}


@needs_sb3
def test_the_adapter_answers_in_the_form_of_a_dummy_vec_env() -> None:
    import gymnasium
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    dummy = DummyVecEnv([lambda: Monitor(gymnasium.make("CartPole-v1", max_episode_steps=3))])
    adapter = sb3_env.Sb3VecEnv(CartPoleHidden(1, max_steps=3))
    for env in (dummy, adapter):
        env.seed(0)
        env.reset()
    for step in range(4):
        theirs, ours = dummy.step(np.array([0])), adapter.step(np.array([0]))
        assert ours[3][0].keys() == theirs[3][0].keys()
        assert (ours[2] == theirs[2]).all()
        assert ours[3][0]["TimeLimit.truncated"] == theirs[3][0]["TimeLimit.truncated"] == (step == 2)
        for mine, their in zip(ours[:3], theirs[:3], strict=True):
            assert (mine.dtype, mine.ndim, mine.flags.c_contiguous) == (their.dtype, their.ndim, their.flags.c_contiguous)


@needs_sb3
def test_both_sides_have_the_same_layers_and_the_same_optimiser() -> None:
    hyper = sides.Hyper(num_steps=8, hidden_size=16)
    ours = sides.Ours(CartPoleHidden(4), hyper, seed=0).ppo
    theirs = sides.Sb3(CartPoleHidden(4), hyper, seed=0, shared=True).model
    one_bias_less = 4 * hyper.hidden_size  # torch's LSTM has two that are added
    assert sum(weight.numel() for weight in ours.policy.parameters()) == sum(p.numel() for p in theirs.policy.parameters()) - one_bias_less
    assert theirs.policy.activation_fn is torch.nn.Tanh
    for name in ("eps", "lr", "betas", "weight_decay"):
        assert ours.learner.optimizer.param_groups[0][name] == theirs.policy.optimizer.param_groups[0][name]
    assert ours.steps_per_update // ours.config.num_minibatches == theirs.batch_size


def test_entropy_and_value_weights_have_the_same_effect_on_both_sides() -> None:
    env = CartPoleHidden(4)
    config = sides.our_config(env, TINY, seed=0)
    uniform_entropy_in_our_units = 1.0
    assert config.entropy_coef * config.entropy_weights["action"] * uniform_entropy_in_our_units == pytest.approx(0.01 * np.log(2))
    assert config.value_coef * 0.5 == TINY.value


@pytest.mark.slow
@needs_sb3
def test_speed_is_measured_on_all_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(recurrent_ppo.SETTINGS, "A", recurrent_ppo.Setting(4, sides.Hyper(num_steps=16, hidden_size=4)))
    recurrent_ppo.main(["--settings", "A", "--repeats", "1", "--updates", "2", "--out", str(tmp_path / "speed.jsonl")])
    about, record = lines(tmp_path / "speed.jsonl")
    assert {"command", "date", "processor", "cores", "torch"} <= about.keys()
    assert all(record[side] > 0 for side in ("ours", "ours_bptt16", "sb3", "sb3_shared"))
    assert record["ratio"] == pytest.approx(record["ours"] / record["sb3"], rel=1e-4)
    assert 5 < record["mean_episode_length"] < 200


@pytest.mark.slow
def test_returns_are_recorded_at_the_given_steps_in_order() -> None:
    run = recurrent_ppo.learn_once("ours", 0, [2048, 1024])
    assert list(run["mean_return_at"]) == ["1024", "2048"]
    assert all(8 < value < 200 for value in run["mean_return_at"].values())


def test_runs_that_are_in_the_file_are_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "learn.jsonl"
    output = records.Output(path)
    for seed in range(3):
        for side, value in (("ours", 100.0 + seed), ("sb3", 90.0)):
            output.write({"side": side, "seed": seed, "mean_return_at": {"100": value}})
    with path.open("a") as file:
        file.write('{"side": "ours", "se')  # killed while writing
    before = path.read_text().splitlines()[:-1]
    recurrent_ppo.main(["--learn", "--seeds", "3", "--checkpoints", "100", "--out", str(path)])
    assert path.read_text().splitlines()[:-1] == before
    summary = lines(path)[-1]
    assert summary["mean_return_at"] == {"100": 101.0}
    assert summary["sb3_mean_return_at"] == {"100": 90.0}
    difference = summary["difference_at"]["100"]
    assert difference["low"] < difference["estimate"] == 11.0 < difference["high"]


def test_a_torn_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "learn.jsonl"
    path.write_text('{"a": 1}\n{"b"\n{"c": 3}\n')
    with pytest.raises(json.JSONDecodeError):
        records.Output(path, resume=True)


def test_nan_is_written_as_null(tmp_path: Path) -> None:
    records.Output(tmp_path / "out.jsonl").write({"nested": [{"mean": float("nan")}, 0.123456789]})
    assert lines(tmp_path / "out.jsonl")[1] == {"nested": [{"mean": None}, 0.123457]}


@pytest.mark.slow
@pytest.mark.parametrize("core", ["lstm", "none"])
def test_the_cue_benchmark_counts_successes(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_tasks, "CUE_DELAY", 3)
    monkeypatch.setattr(memory_tasks, "EVALUATION_EPISODES", 100)
    run = memory_tasks.run_cue(core, 0, 1)
    assert run["episodes"] == 100
    assert 0 <= run["successes"] <= 100


def test_no_masked_choice_is_drawn() -> None:
    assert memory_tasks.run_draws(20_000) == {"task": "draws", "draws": 20_000, "masked": 0}


@pytest.mark.slow
def test_pendulum_returns_are_in_the_units_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_tasks, "PENDULUM", sides.Hyper(num_steps=256, hidden_size=4, num_epochs=1, entropy=0.0))
    assert -2000 < memory_tasks.run_pendulum("ours", 0, 1)["mean_return"] < -600


def test_a_straight_line_is_fitted_exactly() -> None:
    line = ppo_memory.fit([1, 2, 4], [12, 14, 18])
    assert line == pytest.approx((2.0, 10.0, 1.0))


@pytest.mark.slow
def test_memory_over_updates_is_reported() -> None:
    record = ppo_memory.measure_growth(8)
    assert list(record["resident_bytes_at"]) == [0, 2, 4, 6, 8]
    assert all(size > 2**20 for size in record["resident_bytes_at"].values())
