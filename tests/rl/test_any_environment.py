"""The learner on irregular environments: broken rewards, changing masks, layers with modes, bytes that are no images."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from esper.rl import TrainingStopped
from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.events import RewardsNotFinite
from esper.rl.loss import Coefficients, Counts, Samples, ppo_loss
from esper.rl.networks import Dense
from esper.rl.ppo import PPO
from esper.vecenv import ActionSpec, Discrete, TensorSpec, Timestep, make
from tests.rl.counting import Counting

NETWORK = NetworkConfig(hidden_size=8, encoder_sizes=(6,))


def config(**changes) -> PPOConfig:
    return PPOConfig(**{"num_steps": 16, "num_minibatches": 2, "num_epochs": 2, "network": NETWORK, **changes})


# Rewards that are not finite


class InvalidUpdate(Counting):
    """Gives a reward that is not finite to some environments at some steps, and a known one elsewhere."""

    def __init__(self, *places: tuple[int, int], value: float = float("nan"), **settings) -> None:
        super().__init__(**settings)
        self.places, self.value, self.steps = set(places), value, 0

    def step(self, actions):
        timestep = super().step(actions)
        for env in range(self.num_envs):
            if (self.steps, env) in self.places:
                timestep.reward[env] = self.value
        self.steps += 1
        return timestep


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("core", ["lstm", "none"])
def test_a_reward_that_is_not_finite_spoils_neither_returns_nor_updates_and_is_counted(value, core):
    events = []
    network = NetworkConfig(core=core, hidden_size=8, encoder_sizes=(6,))
    ppo = PPO(InvalidUpdate((3, 1), (15, 2), value=value), config(network=network), on_event=events.append)
    updates = list(ppo.train(3 * 16 * 3))
    assert [update.skipped for update in updates] == [0, 0, 0]
    assert [update.gradient_steps for update in updates] == [4, 4, 4]
    assert [update.bad_rewards for update in updates] == [2, 2, 2]
    assert all(np.isfinite(update.mean_return) for update in updates)
    assert [event for event in events if isinstance(event, RewardsNotFinite)] == [RewardsNotFinite(step=48, count=2)]
    assert set(ppo.collector.recent_returns) <= {15.0, 14.0, 12.0}, "whole episodes of 1 + 2 + 3 + 4 + 5, or from where they began"


def all_places(steps: range) -> list[tuple[int, int]]:
    return [(step, env) for step in steps for env in range(3)]


@pytest.mark.slow
def test_training_stops_after_too_many_updates_without_a_finite_reward():
    env = InvalidUpdate(*all_places(range(16, 16 * 100)))
    updates = []
    with pytest.raises(TrainingStopped, match="no reward was finite in the last 3 updates"):
        updates.extend(PPO(env, config(max_skips=3)).train(16 * 3 * 100))
    assert env.steps == 16 * 4, "the first update had rewards"


@pytest.mark.slow
def test_a_short_training_without_any_finite_reward_ends_with_an_error_and_one_with_some_does_not():
    with pytest.raises(TrainingStopped, match="no reward was finite in the last 2 updates"):
        PPO(InvalidUpdate(*all_places(range(16 * 100))), config()).learn(16 * 3 * 2)
    PPO(InvalidUpdate(*all_places(range(16, 16 * 100))), config()).learn(16 * 3 * 3)


def test_the_step_before_a_broken_reward_learns_from_the_value_that_follows_and_nothing_beyond():
    from esper.rl.batch import prepare

    tidy, broken = (
        PPO(InvalidUpdate(*places, length=100), config(normalize_rewards=False, normalize_values=False)) for places in ((), ((5, 0),))
    )
    batches = []
    for ppo in (tidy, broken):
        rollout = ppo.collect()
        gamma, values = ppo.config.gamma, rollout.values
        batches.append((rollout, prepare(rollout, ppo.policy, ppo.config, None)))
    rollout, batch = batches[1]
    targets = batch.samples[:, sum(batch.widths[:4])].view(16, 3)
    valid = batch.samples[:, sum(batch.widths[:3])].view(16, 3).bool()
    assert valid.sum() == 16 * 3 - 1
    assert not valid[5, 0]
    torch.testing.assert_close(targets[4, 0], rollout.rewards[4, 0] + gamma * values[5, 0])
    before = batches[0][1].samples[:, sum(batch.widths[:4])].view(16, 3)
    torch.testing.assert_close(targets[6:, 0], before[6:, 0])
    torch.testing.assert_close(targets[:, 1:], before[:, 1:])


# Masks that are sometimes absent


class SometimesMasked(Counting):
    """Masks its head at the steps that `is_masked` names, and is free otherwise. Can be saved."""

    def __init__(self, is_masked=lambda step: step % 3 == 0, **settings) -> None:
        super().__init__(num_envs=4, spec=ActionSpec((Discrete("action", 3),)), **settings)
        self.is_masked, self.steps = is_masked, 0

    def _masked(self, timestep: Timestep) -> Timestep:
        if self.is_masked(self.steps):
            timestep.masks["action"] = torch.tensor([[True, True, False]]).repeat(4, 1)
        return timestep

    def reset(self, seed=None):
        self.steps = 0
        return self._masked(super().reset(seed))

    def step(self, actions):
        if self.is_masked(self.steps):
            assert (actions["action"] < 2).all()
        self.steps += 1
        return self._masked(super().step(actions))

    def state_dict(self):
        return {"steps": self.steps, "count": self.count}

    def load_state_dict(self, state):
        self.steps, self.count = state["steps"], state["count"]


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [lambda step: step % 3 == 0, lambda step: step >= 20, lambda step: step in (1, 40)])
def test_a_run_with_changing_masks_resumes_exactly(is_masked):
    first = PPO(SometimesMasked(is_masked), config())
    for _ in range(2):
        first.update(first.collect())
    second = PPO(SometimesMasked(is_masked), config())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for ppo in (first, second):
        ppo.update(ppo.collect())
    for one, other in zip(first.policy.state_dict().values(), second.policy.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_mask_of_the_wrong_shape_in_the_middle_of_a_run_is_named_with_both_shapes():
    class Wrong(SometimesMasked):
        def _masked(self, timestep):
            if self.steps == 4:
                timestep.masks["action"] = torch.ones(4, 2, dtype=torch.bool)
            return timestep

    with pytest.raises(ValueError, match=r"'action'.*\(4, 2\).*\(4, 3\)"):
        PPO(Wrong(lambda step: False), config()).collect()


# Layers that behave otherwise while training


class WithLayer(nn.Module):
    output_size = 32

    def __init__(self, extra: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), extra)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs)


def with_layer(extra: nn.Module, **changes) -> PPO:
    ppo = PPO(make("cartpole-hidden", 8), config(num_epochs=1, num_minibatches=1, **changes), WithLayer(extra))
    with torch.no_grad():
        ppo.policy.actor[-1].weight.mul_(100)  # as after training
    return ppo


def test_with_batch_norm_the_ratio_is_one_before_the_first_gradient_step_and_its_statistics_follow_the_rollouts():
    ppo = with_layer(nn.BatchNorm1d(32))
    norm = ppo.policy.encoder.net[2]
    for _ in range(3):
        rollout = ppo.collect()
        before = norm.running_mean.clone()
        outcome = ppo.update(rollout)
        assert outcome.ratio_max == pytest.approx(1.0, abs=1e-4)
        assert not torch.equal(norm.running_mean, before)
    assert not norm.training


def test_dropout_drops_while_learning_and_not_while_acting():
    ppo = with_layer(nn.Dropout(0.5))
    dropout, seen = ppo.policy.encoder.net[2], []
    dropout.register_forward_hook(lambda module, inputs, output: seen.append((module.training, torch.equal(inputs[0], output))))
    rollout = ppo.collect()
    assert seen
    assert all(not training and same for training, same in seen)
    seen.clear()
    ppo.update(rollout)
    assert seen
    assert all(training and not same for training, same in seen)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_dense_layer_keeps_its_tanh_when_it_is_traced():
    layer, rows = Dense(3, 4, has_tanh=True), torch.randn(5, 3)
    with torch.no_grad():
        expected = layer(rows)
        traced = torch.jit.trace(layer, torch.zeros(2, 3))
        torch.testing.assert_close(traced(rows), expected)


# Entropy of heads that seldom matter


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_entropy_bonus_of_a_step_does_not_depend_on_how_often_its_head_matters(share):
    from esper.rl.distributions import ActionEvaluation

    rows = 40
    matters = (torch.arange(rows) < share * rows).float().unsqueeze(1)
    entropy = torch.full((rows, 1), 0.5, requires_grad=True)
    new = ActionEvaluation(log_prob=torch.zeros(rows, 1), entropy=entropy)
    nothing = torch.zeros(rows)
    samples = Samples(torch.zeros(rows, 1), torch.zeros(rows, 1), matters, torch.ones(rows), nothing, nothing)
    counts = Counts(valid=torch.tensor(float(rows)), weight=matters.sum(0))
    coefficients = Coefficients(clip=0.2, value=0.5, value_clip=None, entropy=torch.tensor([0.01]), joint_ratio=False)
    terms = ppo_loss(new, nothing, samples, counts, coefficients)
    terms.loss.backward()
    torch.testing.assert_close(entropy.grad, -0.01 / rows * matters)
    torch.testing.assert_close(terms.entropy, torch.tensor([0.5]), msg="what is reported is the mean where the head mattered")


# Gymnasium's ways


class Bandit(gymnasium.Env):
    """Episodes of one step."""

    observation_space = gymnasium.spaces.Box(0, 255, (7, 7, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown = self.np_random.integers(0, 11, (7, 7, 3)).astype(np.uint8)
        return self.shown.copy(), {}

    def step(self, action):
        return self.shown.copy(), float(action == self.shown[0, 0, 0] % 2), True, False, {}


@pytest.fixture
def bandit():
    gymnasium.register("esper-tests/Bandit-v0", lambda: Bandit())
    yield "esper-tests/Bandit-v0"
    del gymnasium.registry["esper-tests/Bandit-v0"]


def test_no_step_of_a_gymnasium_environment_by_name_is_spent_on_a_reset(bandit):
    ppo = PPO(make(bandit, 4), config())
    rollout = ppo.collect()
    assert rollout.valid.all()
    assert rollout.terminated.all()


@pytest.mark.slow
def test_bytes_that_are_no_image_are_normalised_by_their_own_spread_and_images_are_not(bandit):
    ppo = PPO(make(bandit, 4), config())
    for _ in range(3):
        rollout = ppo.collect()
        ppo.update(rollout)
    seen = ppo.policy.normalize(rollout.obs)["obs"]
    assert seen.is_floating_point()
    assert float(seen.std()) == pytest.approx(1.0, abs=0.1)
    inputs = []
    ppo.policy.encoder.layers[0].register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    ppo.policy.act({"obs": rollout.obs["obs"][0]})
    assert float(inputs[0].std()) == pytest.approx(1.0, abs=0.1)

    image = {"obs": TensorSpec((12, 12, 3), "uint8")}
    from esper.rl.policy import Policy

    policy = Policy(image, ActionSpec((Discrete("a", 2),)), NETWORK, generator=torch.Generator().manual_seed(0))
    shown = {"obs": torch.randint(0, 255, (2, 12, 12, 3), dtype=torch.uint8)}
    assert policy.normalize(shown)["obs"] is shown["obs"]


def test_a_custom_encoder_gets_unscaled_bytes(bandit):
    class Seen(nn.Module):
        output_size = 147

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            assert obs.dtype == torch.uint8
            return obs.flatten(1).float()

    PPO(make(bandit, 4), config(), Seen()).collect()


def test_parts_of_an_observation_may_have_any_name(tmp_path):
    class Named(gymnasium.Env):
        observation_space = spaces.Dict(
            {
                "observation.state": spaces.Box(-1, 1, (2,)),
                "observation.image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
                "keys": spaces.Box(0, 255, (12, 12, 1), np.uint8),
                "train": spaces.Box(0, 1, (2,)),
            }
        )
        action_space = spaces.Dict({"arm.left": spaces.Discrete(2), "forward": spaces.Box(-1, 1, (1,))})

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 1.0, False, False, {}

    ppo = PPO(Named, config(num_minibatches=2), num_envs=2)
    ppo.learn(2 * 16)
    assert {len(ppo.policy.encoder.images), len(ppo.policy.normalizer.means)} == {2}
    ppo.save(tmp_path / "ppo.safetensors")
    observation = Named().observation_space.sample()
    action, _ = PPO.load(tmp_path / "ppo.safetensors", Named, num_envs=2).predict(observation, deterministic=True)
    assert action["arm.left"] == ppo.predict(observation, deterministic=True)[0]["arm.left"]
