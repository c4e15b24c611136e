"""The learner on a GPU; skipped where there is none."""

import pytest
import torch

from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.ppo import PPO
from esper.vecenv import make
from esper.vecenv.check import check_env

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def config(**changes) -> PPOConfig:
    return PPOConfig(**{"num_steps": 32, "num_minibatches": 2, "network": NetworkConfig(hidden_size=32, encoder_sizes=(16,)), **changes})


@pytest.mark.parametrize("env_id", ["cue", "conditional", "cartpole-hidden", "pendulum-hidden"])
def test_built_in_environments_keep_the_contract_on_the_gpu(env_id):
    check_env(make(env_id, 16, device="cuda"), generator=torch.Generator("cuda").manual_seed(0))


@pytest.mark.parametrize("env_device", ["cpu", "cuda"])
@pytest.mark.parametrize("core", ["lstm", "gru", "none"])
@pytest.mark.parametrize("env_id", ["conditional", "cartpole-hidden", "pendulum-hidden"])
def test_training_on_the_gpu_works_wherever_the_environments_are(env_device, core, env_id):
    network = NetworkConfig(core=core, hidden_size=32, encoder_sizes=(16,))
    ppo = PPO(make(env_id, 16, device=env_device), config(network=network), device="cuda")
    updates = list(ppo.train(total_steps=4 * ppo.steps_per_update))
    assert updates[-1].gradient_steps == ppo.config.num_epochs * ppo.config.num_minibatches
    assert updates[-1].ratio_max < 3


def test_one_update_on_the_gpu_equals_the_same_update_on_the_cpu():
    on_cpu = PPO(make("cartpole-hidden", 16), config())
    on_gpu = PPO(make("cartpole-hidden", 16), config(), device="cuda")
    rollout = on_cpu.collect()
    on_gpu.collect()
    moved = on_gpu.collector._rollout
    for name in ("parameters", "features", "states", "starts", "rewards", "terminated", "truncated", "valid", "values", "next_values"):
        getattr(moved, name).copy_(getattr(rollout, name))
    moved.obs["obs"].copy_(rollout.obs["obs"])
    moved.choice.picked.copy_(rollout.choice.picked)
    one, other = on_cpu.update(rollout), on_gpu.update(moved)
    assert one.policy_loss == pytest.approx(other.policy_loss, abs=1e-4)
    for (name, left), right in zip(on_cpu.policy.state_dict().items(), on_gpu.policy.state_dict().values(), strict=True):
        assert torch.allclose(left, right.cpu(), atol=2e-3), name


def test_a_lagging_gpu_collects_the_same_as_a_synchronised_one():
    """Transfers between environments on the CPU and a learner on the GPU overlap with whatever the GPU still has to do."""

    def rollouts(*, waits: bool) -> list[dict[str, torch.Tensor]]:
        ppo = PPO(make("cartpole-hidden", 16), config(), device="cuda")
        step = ppo.env.step

        def at_leisure(actions):
            if waits:
                torch.cuda.synchronize()
            else:
                torch.cuda._sleep(1_000_000)  # about a millisecond, before anything that the next step asks for
            return step(actions)

        ppo.env.step = at_leisure
        found = []
        for _ in range(4):
            rollout = ppo.collect()
            if not waits:
                torch.cuda._sleep(10_000_000)
            seen = {"obs": rollout.obs["obs"], "rewards": rollout.rewards, "picked": rollout.choice.picked, "values": rollout.values}
            found.append({name: value.clone() for name, value in seen.items()})
        return found

    for one, other in zip(rollouts(waits=True), rollouts(waits=False), strict=True):
        for name, value in one.items():
            assert torch.allclose(value, other[name], atol=1e-4), name


@pytest.mark.usefixtures("alone_with_device_memory")
def test_memory_stays_flat_over_many_updates():
    ppo = PPO(make("cartpole-hidden", 64, device="cuda"), config())
    sizes = [(torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) for _ in ppo.train(total_steps=200 * ppo.steps_per_update)]
    assert sizes[100:] == [sizes[100]] * 100
