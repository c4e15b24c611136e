"""Acting in a rollout: the fused step equals the step of the policy."""

import pytest
import torch
from torch import nn

from esper.rl import PPO, PPOConfig, recurrent as packed_lstm
from esper.rl.acting import fused_step, plain_step
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy
from esper.vecenv import ActionSpec, Continuous, Discrete, TensorSpec, make

ENVS = 5
SPEC = {"near": TensorSpec((3,)), "far": TensorSpec((2, 2)), "bytes": TensorSpec((4,), "uint8")}
ACTIONS = ActionSpec((Discrete("go", 3), Continuous("turn", 2)))


def policy(**network) -> Policy:
    built = Policy(SPEC, ACTIONS, NetworkConfig(hidden_size=6, **network), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for weight in built.parameters():  # also the biases and the normaliser's, which begin as zeros and ones
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    return built


def random_step(built: Policy) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    obs = {name: torch.randn(ENVS, *part.shape, generator=generator) for name, part in SPEC.items()}
    obs["bytes"] = (100 * obs["bytes"].abs()).to(torch.uint8)
    return obs, torch.randn(ENVS, built.core.state_size, generator=generator)


@pytest.mark.parametrize("way", ["numba", "numpy"])
@pytest.mark.parametrize(
    "network",
    [
        {},
        {"critic_memory": "own", "head_sizes": (4,)},
        {"encoder_sizes": (), "head_sizes": (5, 4), "activation": "relu"},
        {"core": "none", "encoder_sizes": (7, 5), "activation": "silu"},
    ],
)
def test_a_fused_step_equals_the_step_of_the_policy(network, way, monkeypatch):
    if way == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(packed_lstm, "has_numba", lambda: way == "numba")
    built = policy(**network)
    obs, state = random_step(built)
    with torch.inference_mode():
        fused = fused_step(built)
        assert fused is not None
        for _ in range(3):
            expected, answers = plain_step(built)(obs, state), fused(obs, state)
            for one, other in zip(expected, answers, strict=True):
                assert torch.allclose(one, other, atol=2e-6)
            state = answers[2]


def test_a_policy_with_parts_of_another_kind_is_stepped_by_its_own_modules():
    class Doubled(nn.Module):
        output_size = 3

        def forward(self, obs):
            return 2 * obs["near"]

    own_encoder = Policy(SPEC, ACTIONS, NetworkConfig(hidden_size=6), generator=torch.Generator(), encoder=Doubled())
    hooked = policy()
    hooked.actor.register_forward_hook(lambda *_: None)
    for built in (own_encoder, hooked, policy(core="gru"), policy(norm_after=True), policy().double()):
        assert fused_step(built) is None
    assert fused_step(policy()) is not None


@pytest.mark.slow
def test_a_rollout_is_collected_with_the_weights_of_the_last_update():
    ppo = PPO(make("cue", num_envs=4, delay=3), PPOConfig(num_steps=8, learning_rate=0.05))
    updates = ppo.train(total_steps=10**6)
    for _ in range(3):
        next(updates)
    rollout = ppo.collect()
    with torch.no_grad():
        expected, _ = ppo.policy.heads(rollout.features.flatten(0, 1))
    assert torch.allclose(rollout.parameters.flatten(0, 1), expected, atol=1e-5)
