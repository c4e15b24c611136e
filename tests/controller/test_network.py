"""A controller's network: any number of slots and blueprints, in any order."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
import torch

from esper.controller.config import SlotNetworkConfig
from esper.controller.layout import Op, observe, spec
from esper.controller.network import make_parts, make_policy
from esper.rl import PPO, PPOConfig
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy
from esper.runs import load_module
from esper.vecenv import Masks, Obs, Timestep
from tests.controller.hosts import drawn_state, state
from tests.controller.policies import perturbed_policy

MEMORY = NetworkConfig(hidden_size=24)
SLOTS, BLUEPRINTS = 3, 4
MEMORIES = [MEMORY, NetworkConfig(core="none"), NetworkConfig(core="gru", critic_memory="own", hidden_size=16)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def policy_for(memory: NetworkConfig = MEMORY, *, slots: int = SLOTS, blueprints: int = BLUEPRINTS) -> Policy:
    return perturbed_policy(make_policy(SlotNetworkConfig(), memory, slots=slots, blueprints=blueprints, generator=generator()))


def same_weights(policy: Policy, *, slots: int, blueprints: int) -> Policy:
    other = make_policy(SlotNetworkConfig(), policy.network, slots=slots, blueprints=blueprints, generator=generator(9))
    load_module(other, policy.state_dict())
    return other


def observe_states(count: int = 16, *, seed: int = 0, slots: int = SLOTS, blueprints: int = BLUEPRINTS) -> tuple[Obs, Masks]:
    rng = np.random.default_rng(seed)
    states = [drawn_state(rng, slots=SLOTS, blueprints=BLUEPRINTS) for _ in range(count)]
    return observe(states, slots=slots, blueprints=blueprints)


def evaluate_policy(policy: Policy, obs: Obs, masks: Masks) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Probabilities of each head as the specification shapes its logits, value, and state of the core."""
    with torch.no_grad():
        features, memory = policy.step(obs, policy.initial_state(len(obs["host"])))
        parameters = policy.decide(features)
        probabilities = {}
        for head in policy.action_spec.discrete:
            logits = parameters[:, policy.distribution.output_slices[head.name]].reshape(-1, *policy.action_spec.logits_shape(head))
            probabilities[head.name] = logits.masked_fill(~masks[head.name], -1e9).softmax(-1) * masks[head.name]
        return probabilities, policy.value(features), memory


@pytest.mark.parametrize("memory", MEMORIES)
def test_permuting_slots_permutes_the_decision_and_changes_neither_value_nor_memory(memory: NetworkConfig) -> None:
    policy, (obs, masks) = policy_for(memory), observe_states()
    order = torch.tensor([2, 0, 1])
    turned = {"host": obs["host"], "slots": obs["slots"][:, order], "candidates": obs["candidates"][:, order]}
    turned_masks = {
        "op": masks["op"], "slot": masks["slot"][:, :, order], "blueprint": masks["blueprint"][:, order], "alpha": masks["alpha"][:, order],
    }  # fmt: skip
    before, value, memory_before = evaluate_policy(policy, obs, masks)
    after, value_after, memory_after = evaluate_policy(policy, turned, turned_masks)
    assert torch.allclose(after["op"], before["op"], atol=1e-5)
    assert torch.allclose(after["slot"], before["slot"][:, :, order], atol=1e-5)
    assert torch.allclose(after["blueprint"], before["blueprint"][:, order], atol=1e-5)
    assert torch.allclose(after["alpha"], before["alpha"][:, order], atol=1e-5)
    assert torch.allclose(value_after, value, atol=1e-5)
    assert torch.allclose(memory_after, memory_before, atol=1e-5)
    assert not torch.allclose(after["slot"], before["slot"], atol=1e-2)  # it does tell slots apart


@pytest.mark.parametrize("memory", MEMORIES)
def test_permuting_blueprints_permutes_their_probabilities_and_nothing_else(memory: NetworkConfig) -> None:
    policy, (obs, masks) = policy_for(memory), observe_states()
    order = torch.tensor([3, 1, 0, 2])
    before, value, memory_before = evaluate_policy(policy, obs, masks)
    turned = {**obs, "candidates": obs["candidates"][:, :, order]}
    after, value_after, memory_after = evaluate_policy(policy, turned, {**masks, "blueprint": masks["blueprint"][:, :, order]})
    assert torch.allclose(after["blueprint"], before["blueprint"][:, :, order], atol=1e-5)
    for head in ("op", "slot", "alpha"):
        assert torch.allclose(after[head], before[head], atol=1e-5)
    assert torch.allclose(value_after, value, atol=1e-5)
    assert torch.allclose(memory_after, memory_before, atol=1e-5)
    assert not torch.allclose(after["blueprint"], before["blueprint"], atol=1e-2)


def test_padding_changes_nothing() -> None:
    policy = policy_for()
    tight, value, memory = evaluate_policy(policy, *observe_states())
    wide, wide_value, wide_memory = evaluate_policy(same_weights(policy, slots=7, blueprints=9), *observe_states(slots=7, blueprints=9))
    assert torch.allclose(wide["op"], tight["op"], atol=1e-5)
    assert torch.allclose(wide["slot"][:, :, :SLOTS], tight["slot"], atol=1e-5)
    assert torch.allclose(wide["blueprint"][:, :SLOTS, :BLUEPRINTS], tight["blueprint"], atol=1e-5)
    assert torch.allclose(wide["alpha"][:, :SLOTS], tight["alpha"], atol=1e-5)
    assert torch.allclose(wide_value, value, atol=1e-5)
    assert torch.allclose(wide_memory, memory, atol=1e-5)


def test_the_same_weights_work_on_a_host_with_more_slots_and_blueprints() -> None:
    policy = same_weights(policy_for(), slots=12, blueprints=15)
    rng = np.random.default_rng(2)
    obs, masks = observe([drawn_state(rng, slots=12, blueprints=15) for _ in range(8)], slots=12, blueprints=15)
    actions, memory = policy.act(obs, masks=masks, generator=generator())
    assert memory.isfinite().all()
    assert {name: len(choice) for name, choice in actions.items()} == dict.fromkeys(("op", "slot", "blueprint", "alpha"), 8)


def test_a_host_without_slots_can_wait_and_nothing_else() -> None:
    obs, masks = observe([state()], slots=2, blueprints=2)
    policy = policy_for(slots=2, blueprints=2)
    for seed in range(20):
        actions, memory = policy.act(obs, masks=masks, generator=generator(seed))
        assert actions["op"].item() == Op.WAIT
        assert memory.isfinite().all()


@pytest.mark.slow
def test_no_masked_choice_is_ever_drawn() -> None:
    policy = policy_for(slots=4, blueprints=6)
    obs, masks = observe_states(500, slots=4, blueprints=6)
    actions, _ = policy.act(obs, masks=masks, generator=generator())
    rows, op, slot = torch.arange(500), actions["op"], actions["slot"]
    assert masks["op"][rows, op].all()
    acted = op != Op.WAIT
    assert masks["slot"][rows, op, slot][acted].all()
    assert masks["blueprint"][rows, slot, actions["blueprint"]][op == Op.GERMINATE].all()
    assert masks["alpha"][rows, slot, actions["alpha"]][op == Op.RETARGET].all()
    assert len(op.unique()) >= 5


def test_a_new_policy_is_nearly_uniform() -> None:
    policy = make_policy(SlotNetworkConfig(prune_bias=0.0), MEMORY, slots=SLOTS, blueprints=BLUEPRINTS, generator=generator())
    obs, masks = observe_states()
    with torch.no_grad():
        features, _ = policy.step(obs, policy.initial_state(16))
        choice = policy.distribution.choose(policy.decide(features), masks, None)
        entropy = policy.distribution.evaluate(policy.decide(features), choice, masks).entropy
    several = masks["op"].sum(-1) > 1
    assert (entropy[several, 0] > 0.98).all()


@pytest.mark.parametrize(("name", "op"), [("fossilize_bias", Op.FOSSILIZE), ("prune_bias", Op.PRUNE)])
def test_a_new_policy_follows_its_configured_biases(name: str, op: Op) -> None:
    config = msgspec.structs.replace(SlotNetworkConfig(wait_bias=1.0), **{name: -2.0})
    policy = make_policy(config, MEMORY, slots=SLOTS, blueprints=BLUEPRINTS, generator=generator())
    obs, masks = observe_states()
    probability = evaluate_policy(policy, obs, masks)[0]["op"]
    is_legal = masks["op"][:, op]
    assert is_legal.any()
    odds = probability[is_legal, op] / probability[is_legal, Op.WAIT]
    assert torch.allclose(odds.log(), torch.tensor(-3.0), atol=0.2)


def test_building_a_network_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    make_policy(SlotNetworkConfig(), MEMORY, slots=2, blueprints=2, generator=generator())
    assert torch.equal(torch.random.get_rng_state(), before)


class RecordedStates:
    """States of hosts as they were drawn, whatever is decided; 1 is paid for every germination."""

    def __init__(self, num_envs: int, *, length: int = 10) -> None:
        self.num_envs, self.length, self.device = num_envs, length, torch.device("cpu")
        self.observation_spec, self.action_spec = spec(SLOTS, BLUEPRINTS)
        self.pictures = [observe_states(num_envs, seed=index) for index in range(length)]
        self.step_number = 0

    def reset(self, seed: int | None = None) -> Timestep:
        self.step_number = 0
        return self._timestep(torch.zeros(self.num_envs))

    def step(self, actions: dict[str, torch.Tensor]) -> Timestep:
        self.step_number += 1
        return self._timestep((actions["op"] == Op.GERMINATE).float())

    def _timestep(self, reward: torch.Tensor) -> Timestep:
        obs, masks = self.pictures[self.step_number % self.length]
        ended = torch.full((self.num_envs,), self.step_number > 0 and self.step_number % self.length == 0)
        return Timestep(obs, reward, ended, torch.zeros_like(ended), masks)

    def close(self) -> None:
        pass


def recorded_states_ppo(env: RecordedStates, **settings: object) -> PPO:
    config = PPOConfig(**{"num_steps": 10, "normalize_observations": False, "network": MEMORY, **settings})  # type: ignore[arg-type]
    parts = make_parts(SlotNetworkConfig(), MEMORY, slots=SLOTS, blueprints=BLUEPRINTS, generator=generator())
    return PPO(env, config, parts.encoder, actor=parts.actor, critic=parts.critic)


@pytest.mark.slow
def test_learning_recomputes_the_outputs_of_acting() -> None:
    ppo = recorded_states_ppo(RecordedStates(8), learning_rate=1e-12, num_epochs=1)
    perturbed_policy(ppo.policy)
    for _ in range(2):
        outcome = ppo.update(ppo.collect())
    assert outcome.ratio_max == pytest.approx(1.0, abs=1e-3)
    assert all(outcome.mattered)


@pytest.mark.slow
def test_the_network_learns_a_rewarded_choice() -> None:
    ppo = recorded_states_ppo(RecordedStates(16), learning_rate=1e-2, gamma=0.5, num_epochs=4, num_minibatches=4)
    for _ in ppo.train(total_steps=8 * ppo.steps_per_update):
        pass
    possible = sum(float(masks["op"][:, Op.GERMINATE].float().sum()) for _, masks in ppo.env.pictures) / 16
    assert ppo.evaluate(episodes=16).mean_return >= 0.95 * possible


@pytest.mark.slow
def test_an_update_on_64_hosts_takes_well_under_two_seconds_of_one_core() -> None:
    warm_up = recorded_states_ppo(RecordedStates(4), num_epochs=1)  # compiles kernels
    warm_up.update(warm_up.collect())
    ppo = recorded_states_ppo(RecordedStates(64), num_steps=40)
    rollout = ppo.collect()
    began = time.process_time()
    ppo.update(rollout)
    assert time.process_time() - began < 3.0  # 1 on a quiet machine, and other work on the same cores makes it more


def test_widths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_heads: expected a divisor of width \(30\), got 4"):
        SlotNetworkConfig(width=30)
