"""Normalisers of observations and rewards: what updates them, and when."""

import pytest
import torch

from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.normalize import CLIP, ObservationNormalizer, RewardNormalizer
from esper.rl.ppo import PPO
from esper.vecenv import TensorSpec
from tests.rl.counting import Counting

SMALL = NetworkConfig(hidden_size=8, encoder_sizes=(6,))


@pytest.mark.slow
def test_the_observation_normalizer_changes_only_between_rollouts():
    ppo = PPO(Counting(), PPOConfig(num_steps=16, num_minibatches=2, network=SMALL))
    for _ in range(2):
        before = {name: value.clone() for name, value in ppo.policy.normalizer.state_dict().items()}
        rollout = ppo.collect()
        assert all(torch.equal(value, before[name]) for name, value in ppo.policy.normalizer.state_dict().items())
        with torch.no_grad():
            # Acting and learning see the same features: the same steps from the same states.
            state = rollout.states[0]
            seen, _ = ppo.policy.step(ppo.policy.normalize({"obs": rollout.obs["obs"][0]}), state)
        assert torch.allclose(seen, rollout.features[0], atol=1e-6)
        ppo.update(rollout)
        assert any(not torch.equal(value, before[name]) for name, value in ppo.policy.normalizer.state_dict().items())


def normalizer(momentum: float | None) -> ObservationNormalizer:
    return ObservationNormalizer({"obs": TensorSpec((1,))}, momentum=momentum, device=torch.device("cpu"))


def test_every_observation_has_equal_weight_without_a_momentum():
    running = normalizer(None)
    for batch in (torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([[[10.0]], [[12.0]], [[14.0]], [[16.0]]])):
        running.update({"obs": batch}, None)
    values = torch.tensor([0.0, 2.0, 10.0, 12.0, 14.0, 16.0])
    normalized = running({"obs": values.unsqueeze(1)})["obs"].flatten()
    assert torch.allclose(normalized, (values - values.mean()) / values.std(correction=0), atol=1e-5)


@pytest.mark.slow
def test_old_rollouts_lose_weight_with_a_momentum():
    fading = normalizer(0.99)
    for number in range(400):
        fading.update(
            {"obs": torch.full((2 + number % 3, 1, 1), -5.0) + torch.tensor([-1.0, 1.0]).repeat(9)[: 2 + number % 3].view(-1, 1, 1)}, None
        )
    before = fading.moments["obs"].mean.item()
    assert before == pytest.approx(-5, abs=0.2)
    fading.update({"obs": torch.full((1000, 1, 1), 95.0)}, None)
    share = 0.01 / (1 - 0.99**401)
    assert fading.moments["obs"].mean.item() == pytest.approx(before + share * (95 - before), rel=1e-6)


def test_rewards_are_divided_by_the_spread_of_returns_and_keep_their_mean():
    divides = RewardNormalizer(2, gamma=0.9, device=torch.device("cpu"))
    rewards = torch.tensor([[5.0, 6.0], [5.0, 4.0], [5.0, 5.0], [6.0, 5.0]])
    ended = torch.zeros(4, 2, dtype=torch.bool)
    normalized = divides(rewards, ended, None)
    assert (normalized > 0).all()  # a mean that were subtracted would make half of them punishments
    spread = divides.moments.std.item()
    returns = torch.zeros(4, 2)
    running = torch.zeros(2)
    for step in range(4):
        returns[step] = running = rewards[step] + 0.9 * running
    assert spread == pytest.approx(returns.std(correction=0).item(), rel=1e-6)
    assert torch.allclose(normalized, (rewards / spread).clamp(-CLIP, CLIP))
