"""Generalised advantage estimation."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from esper.rl.batch import BINS, calibration
from esper.rl.gae import discounted_sums, gae


def loop(rewards, values, next_values, ended, gamma, lam):
    advantage, result = torch.zeros_like(values[0]), []
    for step in reversed(range(len(rewards))):
        surprise = rewards[step] + gamma * next_values[step] - values[step]
        advantage = surprise + gamma * lam * torch.where(ended[step], 0.0, advantage)
        result.append(advantage)
    return torch.stack(result[::-1])


@pytest.mark.slow
@given(st.integers(1, 70), st.integers(1, 4), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31))
def test_advantages_equal_the_textbook_recursion(steps, envs, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn(3, steps, envs, generator=generator, dtype=torch.float64)
    ended = torch.rand(steps, envs, generator=generator) < 0.2
    expected = loop(rewards, values, next_values, ended, gamma, lam)
    assert torch.allclose(gae(rewards, values, next_values, ended, gamma=gamma, lam=lam), expected, atol=1e-9)


@pytest.mark.slow
def test_advantages_stay_correct_over_a_very_long_rollout():
    generator = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn(3, 10_000, 2, generator=generator)
    ended = torch.rand(10_000, 2, generator=generator) < 0.001
    expected = loop(rewards.double(), values.double(), next_values.double(), ended, 0.999, 0.99)
    assert torch.allclose(gae(rewards, values, next_values, ended, gamma=0.999, lam=0.99).double(), expected, atol=1e-3)


def test_a_terminated_step_ignores_the_next_value_and_a_truncated_one_uses_it():
    ended = torch.tensor([[True], [False]])
    advantage = gae(torch.ones(2, 1), torch.zeros(2, 1), torch.tensor([[10.0], [0.0]]), ended, gamma=0.5, lam=1.0)
    assert advantage[:, 0].tolist() == [6.0, 1.0]
    advantage = gae(torch.ones(2, 1), torch.zeros(2, 1), torch.zeros(2, 1), ended, gamma=0.5, lam=1.0)
    assert advantage[:, 0].tolist() == [1.0, 1.0]


def test_discounted_sums_go_on_from_the_rollout_before_and_start_anew_after_an_end():
    rewards, ended = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[False], [True], [False]])
    sums = discounted_sums(rewards, ended, torch.tensor([4.0]), gamma=0.5)
    assert sums[:, 0].tolist() == [3.0, 2.5, 1.0]


def test_calibration_compares_values_with_the_returns_of_ended_episodes_alone():
    steps, envs, gamma = 40, 6, 0.9
    generator = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn(3, steps, envs, generator=generator)
    terminated, truncated = (torch.rand(steps, envs, generator=generator) < 0.1 for _ in range(2))
    valid = torch.rand(steps, envs, generator=generator) < 0.95
    ended = terminated | truncated
    rollout = SimpleNamespace(
        values=values, next_values=next_values, truncated=truncated, ended=ended, valid=valid, bad_rewards=torch.zeros_like(valid)
    )
    bins = calibration(rollout, rewards, gamma=gamma)
    # The same by plain loops.
    rows = []
    for env in range(envs):
        total, is_known = 0.0, False
        for step in reversed(range(steps)):
            if ended[step, env]:
                total, is_known = (next_values[step, env].item() if truncated[step, env] else 0.0), True
            total = rewards[step, env].item() + gamma * total
            if is_known and valid[step, env]:
                rows.append((values[step, env].item(), total, env))
    rows.sort()
    for place, (predicted, achieved, error, count) in enumerate(bins.tolist()):
        own = [row for number, row in enumerate(rows) if number * BINS // len(rows) == place]
        mean = sum(row[1] for row in own) / len(own)
        by_env = [sum(row[1] - mean for row in own if row[2] == env) for env in range(envs)]
        assert count == len(own)
        assert predicted == pytest.approx(sum(row[0] for row in own) / len(own), abs=1e-5)
        assert achieved == pytest.approx(mean, abs=1e-4)
        assert error == pytest.approx(sum(value**2 for value in by_env) ** 0.5 / len(own), abs=1e-4)


def test_calibration_has_no_steps_if_no_episode_has_ended():
    zeros = torch.zeros(4, 2)
    rollout = SimpleNamespace(
        values=zeros, next_values=zeros, truncated=zeros.bool(), ended=zeros.bool(), valid=~zeros.bool(), bad_rewards=zeros.bool()
    )
    assert calibration(rollout, zeros, gamma=1.0)[:, 3].sum() == 0
