"""A controller's network: a value model, and a recurrent core that corrects it."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from esper.controller.layout import MOVE_NAMES, observe, spec
from esper.controller.network import MoveEncoder, make_parts, make_policy
from esper.controller.value import ValueController, ValueModel
from esper.rl import PPO, PPOConfig
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy
from esper.vecenv import Masks, Obs, Timestep
from tests.controller.hosts import drawn_state, state
from tests.controller.policies import NETWORK, perturbed_policy, trained_policy

MEMORY = NetworkConfig(hidden_size=24)
MEMORIES = [MEMORY, NetworkConfig(core="none"), NetworkConfig(core="gru", critic_memory="own", hidden_size=16)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def value_model() -> ValueModel:
    """Return a model whose moves differ by more than their uncertainty, for some states."""
    model = ValueModel(width=NETWORK.width, members=NETWORK.members, generator=generator(0))
    with torch.no_grad():
        model.weights[-1].mul_(10)
        for weights in model.weights[:-1]:  # similar members
            weights.copy_(weights[:1] + 0.1 * (weights - weights[:1]))
        model.weights[-1].copy_(model.weights[-1][:1] + 0.1 * (model.weights[-1] - model.weights[-1][:1]))
    return model


def observe_states(count: int = 16, *, seed: int = 0) -> tuple[Obs, Masks]:
    rng = np.random.default_rng(seed)
    return observe([drawn_state(rng) for _ in range(count)])


def logits_and_value(policy: Policy, obs: Obs) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        features, _ = policy.step(obs, policy.initial_state(len(obs["host"])))
        return policy.decide(features), policy.value(features)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_new_policy_decides_and_values_as_its_value_model_does(memory: NetworkConfig) -> None:
    rng = np.random.default_rng(0)
    states = [drawn_state(rng) for _ in range(200)]
    model = value_model()
    policy = make_policy(NETWORK, memory, generator=generator(), value=model)
    obs, masks = observe(states)
    logits, value = logits_and_value(policy, obs)
    likeliest = logits.masked_fill(~masks["move"], -torch.inf).argmax(1)
    controller = ValueController(model, caution=NETWORK.caution)
    grown = [{action.blueprint for action in controller.decide(now).actions if hasattr(action, "blueprint")} for now in states]
    assert [bool(blueprints) for blueprints in grown] == (likeliest > 0).tolist()
    assert 10 < sum(map(bool, grown)) < 150
    encoder = policy.encoder
    assert isinstance(encoder, MoveEncoder)
    scores, worth = encoder.scores(obs)
    assert torch.allclose(logits, scores / NETWORK.temperature, atol=1e-4)
    assert torch.allclose(value, worth.squeeze(1), atol=1e-5)


def test_the_worth_of_a_state_is_that_of_its_best_move() -> None:
    policy = make_policy(NETWORK, MEMORY, generator=generator(), value=value_model())
    obs, masks = observe_states(50)
    encoder = policy.encoder
    assert isinstance(encoder, MoveEncoder)
    with torch.no_grad():
        scores, worth = encoder.scores(obs)
        impossible = {**obs, "moves": obs["moves"].clone()}
        impossible["moves"][:, 1:] = 0
        nothing, least = encoder.scores(impossible)
    assert (scores[:, 0] == 0).all()
    assert not scores[~masks["move"]].any()
    assert not nothing.any()
    assert (worth >= least - 1e-6).all()
    assert torch.allclose(worth - least, scores.amax(1, keepdim=True), atol=1e-6)


def test_a_higher_price_makes_growing_less_likely() -> None:
    policy = make_policy(NETWORK, MEMORY, generator=generator(), value=value_model())
    obs, masks = observe_states(50)
    chances = []
    for price in (0.01, 0.1, 1.0):
        logits, _ = logits_and_value(policy, {**obs, "price": torch.full_like(obs["price"], price)})
        chances.append(1 - logits.masked_fill(~masks["move"], -torch.inf).softmax(1)[:, 0])
    can_grow = masks["move"][:, 1:].any(1)
    assert (chances[0] >= chances[1] - 1e-6)[can_grow].float().mean() > 0.9  # not all: a move may promise to grow less in the end
    assert chances[0][can_grow].mean() > chances[1][can_grow].mean() > chances[2][can_grow].mean()


def test_a_host_without_slots_can_only_wait() -> None:
    obs, masks = observe([state()])
    policy = trained_policy()
    for seed in range(20):
        actions, memory = policy.act(obs, masks=masks, generator=generator(seed))
        assert actions["move"].item() == 0
        assert memory.isfinite().all()


def test_no_masked_move_is_ever_drawn() -> None:
    policy, (obs, masks) = trained_policy(), observe_states(1_000)
    cheap = {**obs, "price": torch.full_like(obs["price"], 0.003)}
    actions, _ = policy.act(cheap, masks=masks, generator=generator())
    assert masks["move"][torch.arange(1_000), actions["move"]].all()
    assert len(actions["move"].unique()) >= len(MOVE_NAMES) - 1


def test_building_a_network_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    make_policy(NETWORK, MEMORY, generator=generator())
    assert torch.equal(torch.random.get_rng_state(), before)


class RecordedStates:
    """States of hosts as they were drawn, whatever is decided; 1 is paid for every move that grows something."""

    def __init__(self, num_envs: int, *, length: int = 10) -> None:
        self.num_envs, self.length, self.device = num_envs, length, torch.device("cpu")
        self.observation_spec, self.action_spec = spec()
        self.pictures = [observe_states(num_envs, seed=index) for index in range(length)]
        self.step_number = 0

    def reset(self, seed: int | None = None) -> Timestep:
        self.step_number = 0
        return self._timestep(torch.zeros(self.num_envs))

    def step(self, actions: dict[str, torch.Tensor]) -> Timestep:
        self.step_number += 1
        return self._timestep((actions["move"] > 0).float())

    def _timestep(self, reward: torch.Tensor) -> Timestep:
        obs, masks = self.pictures[self.step_number % self.length]
        ended = torch.full((self.num_envs,), self.step_number > 0 and self.step_number % self.length == 0)
        return Timestep(obs, reward, ended, torch.zeros_like(ended), masks)

    def close(self) -> None:
        pass


def recorded_states_ppo(env: RecordedStates, **settings: object) -> PPO:
    config = PPOConfig(**{  # type: ignore[arg-type]
        "num_steps": 10, "num_minibatches": 2, "normalize_observations": False, "normalize_values": False, "network": MEMORY, **settings,
    })  # fmt: skip
    parts = make_parts(NETWORK, MEMORY, generator=generator())
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
def test_the_network_learns_a_rewarded_move() -> None:
    ppo = recorded_states_ppo(RecordedStates(16), learning_rate=1e-2, gamma=0.5, num_epochs=4, num_minibatches=4)
    for _ in ppo.train(total_steps=10 * ppo.steps_per_update):
        pass
    possible = sum(float(masks["move"][:, 1:].any(1).float().sum()) for _, masks in ppo.env.pictures) / 16
    assert ppo.evaluate(episodes=16).mean_return >= 0.95 * possible


@pytest.mark.slow
def test_an_update_on_64_hosts_takes_well_under_two_seconds_of_one_core() -> None:
    warm_up = recorded_states_ppo(RecordedStates(4), num_epochs=1)  # compiles kernels
    warm_up.update(warm_up.collect())
    ppo = recorded_states_ppo(RecordedStates(64), num_steps=40)
    rollout = ppo.collect()
    began = time.process_time()
    ppo.update(rollout)
    assert time.process_time() - began < 3.0
