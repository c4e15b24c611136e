"""A policy and a learner for users of Stable-Baselines3: predict in the environment's own units, save, load."""

from __future__ import annotations

import itertools
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper.rl import PPO, NetworkConfig, Policy, PPOConfig, TrainConfig, load_policy, train_run
from esper.runs import CheckpointError, Versions, write_state, write_tensors
from esper.vecenv import make
from esper.vecenv.gymnasium import from_gymnasium
from esper.vecenv.spaces import spaces_of
from tests.commands import assert_same_state

SMALL = PPOConfig(
    num_steps=8, num_minibatches=1, num_epochs=1, network=NetworkConfig(core="none", hidden_size=8, encoder_sizes=(8,), log_std=-5.0)
)
RECURRENT = PPOConfig(num_steps=8, num_minibatches=1, num_epochs=1, network=NetworkConfig(hidden_size=8, encoder_sizes=(8,)))


class Spaced(gymnasium.Env):
    """Any observation and action space; asserts that what it is given is of the space. Episodes of 5 steps."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space, self.count = observation_space, action_space, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.count += 1
        return self.observation_space.sample(), 1.0, False, self.count == 5, {}


def learner(observation_space: spaces.Space, action_space: spaces.Space, config: PPOConfig = SMALL) -> PPO:
    env = SyncVectorEnv([lambda: Spaced(observation_space, action_space)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    return PPO(from_gymnasium(env), config)


BOX = spaces.Box(-1, 1, (3,), np.float64)
KINDS = {
    "float64": BOX,
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "discrete": spaces.Discrete(4, start=2),
    "several": spaces.MultiDiscrete([2, 3]),
    "bytes": spaces.Box(0, 255, (3,), np.uint8),
    "tuple": spaces.Tuple((BOX, spaces.Discrete(3))),
    "nested": spaces.Dict({"a": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(0, 1, ()))), "b": BOX}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_observation_of_an_environment_is_predicted_on_alone_and_in_a_batch(kind):
    ppo = learner(KINDS[kind], spaces.Discrete(3))
    next(ppo.train(1))
    env = ppo.env.vector_env.envs[0]
    batch, _ = ppo.env.vector_env.reset(seed=1)
    together, _ = ppo.policy.predict(batch, deterministic=True)
    assert together.shape == (2,)
    for row in range(2):
        action, state = ppo.policy.predict(next(iterate(batch, row)), deterministic=True)
        assert state is None
        assert env.action_space.contains(action)
        assert action == together[row]


def iterate(batch, row):
    """The observation of one row, as the environment gave it."""
    if isinstance(batch, tuple):
        yield tuple(next(iterate(part, row)) for part in batch)
    elif isinstance(batch, dict):
        yield {key: next(iterate(part, row)) for key, part in batch.items()}
    else:
        yield batch[row]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(2),
        spaces.Box(-2.0, 5.0, (2, 1), np.float64),
        spaces.Dict({"only": spaces.Box(0, 9, (1,))}),
        spaces.Tuple((spaces.Discrete(2), spaces.Box(-3, 3, (2,)))),
    ],
    ids=str,
)
def test_predicted_actions_are_of_the_environments_space_and_in_its_units(space):
    ppo = learner(BOX, space)
    for _ in range(5):
        action, _ = ppo.predict(BOX.sample())
        assert space.contains(action), action


def test_a_predicted_action_uses_the_bounds_of_the_box():
    ppo = PPO(make("Pendulum-v1", 2), SMALL)
    with torch.no_grad():
        ppo.policy.actor[-1].bias.fill_(3.0)
    action, _ = ppo.policy.predict(np.zeros(3), deterministic=True)
    assert action.shape == (1,)
    assert 1.98 < action[0] <= 2.0


def test_tensors_lists_and_numbers_are_observations_too():
    ppo = learner(BOX, spaces.Discrete(3))
    expected, _ = ppo.predict(np.full(3, 0.5), deterministic=True)
    for given in (torch.full((3,), 0.5), [0.5, 0.5, 0.5], np.full(3, 0.5, np.float16)):
        assert ppo.predict(given, deterministic=True)[0] == expected
    assert 2 <= learner(spaces.Discrete(4), spaces.Discrete(2, start=2)).predict(3)[0] <= 3


def test_observations_of_another_shape_are_refused_with_both_shapes():
    ppo = learner(KINDS["tuple"], spaces.Discrete(3))
    with pytest.raises(ValueError, match=r"observation '0' has shape \(2,\); expected \(3,\) for one observation"):
        ppo.predict((np.zeros(2), 1))
    with pytest.raises(ValueError, match="the same for all parts"):
        ppo.predict((np.zeros(3), np.zeros(2, np.int64)))
    with pytest.raises(ValueError, match="no part '1'"):
        ppo.predict((np.zeros(3),))
    with pytest.raises(ValueError, match="must have bytes from 0 to 255; got float64"):
        learner(KINDS["bytes"], spaces.Discrete(3)).predict(np.zeros(3))
    with pytest.raises(ValueError, match="Use predict"):
        ppo.policy.act(np.zeros(3))


def test_a_policy_with_spaces_of_its_own_refuses_those_of_another_environment():
    policy = learner(spaces.Box(-1, 1, (3,)), spaces.Discrete(2, start=1)).policy
    own = policy.spaces
    policy.fit_spaces(own)
    with pytest.raises(ValueError, match=r"the environment observes .*5.*, but this policy needs .*3"):
        policy.fit_spaces(spaces_of(spaces.Box(-1, 1, (5,)), spaces.Discrete(2, start=1)))
    with pytest.raises(ValueError, match=r"the action spec has the heads .*, but the action space gives"):
        policy.fit_spaces(spaces_of(spaces.Box(-1, 1, (3,)), spaces.Discrete(4)))
    assert policy.spaces == own


def test_a_policy_without_spaces_of_its_own_keeps_none_of_an_environment_that_it_refuses():
    policy = PPO(make("cue", 2), SMALL).policy
    own = policy.spaces
    with pytest.raises(ValueError, match="the environment observes"):
        policy.fit_spaces(spaces_of(spaces.Box(-1, 1, (99,)), spaces.Discrete(policy.action_spec.discrete[0].size)))
    assert policy.spaces == own


def test_the_memory_of_a_recurrent_policy_is_passed_on_and_emptied_at_the_start_of_an_episode():
    ppo = learner(BOX, spaces.Box(-1, 1, (1,)), RECURRENT)
    first, second = np.ones(3), -np.ones(3)
    alone, fresh = ppo.predict(second, deterministic=True)
    assert fresh.shape == (1, 16)
    _, state = ppo.predict(first, deterministic=True)
    after, _ = ppo.predict(second, state, deterministic=True)
    again, _ = ppo.predict(second, state, episode_start=True, deterministic=True)
    assert after != alone
    assert again == alone
    both, _ = ppo.predict(np.stack([second] * 2), np.concatenate([state] * 2), np.array([False, True]), deterministic=True)
    np.testing.assert_allclose(both[:, 0], [after[0], alone[0]], rtol=1e-6)


def test_an_action_mask_is_obeyed_whether_given_or_observed():
    ppo = learner(BOX, spaces.MultiDiscrete([2, 3]))
    for _ in range(10):
        assert ppo.predict(BOX.sample(), action_masks=[False, True, True, False, False])[0].tolist() == [1, 0]
    masked = learner(spaces.Dict({"seen": BOX, "action_mask": spaces.MultiBinary(3)}), spaces.Discrete(3))
    for _ in range(10):
        assert masked.predict({"seen": BOX.sample(), "action_mask": np.array([0, 0, 1], np.int8)})[0] == 2


def test_drawn_actions_follow_the_seed_and_leave_the_mode_of_the_policy_alone():
    ppo = learner(BOX, spaces.Discrete(3))
    ppo.policy.train()
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append([int(ppo.predict(np.zeros(3))[0]) for _ in range(20)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 1
    assert ppo.policy.training


def test_predicted_actions_are_writable():
    actions, state = learner(BOX, spaces.Box(-2, 2, (1,))).policy.act(torch.zeros(1, 3))
    actions["action"].mul_(2.0)
    state.zero_()


def test_a_saved_policy_predicts_the_same_without_an_environment(tmp_path: Path):
    ppo = learner(KINDS["nested"], spaces.Box(-2.0, 5.0, (2, 1), np.float64), RECURRENT)
    next(ppo.train(1))
    seen = KINDS["nested"].sample()
    ppo.policy.save(tmp_path / "policy.safetensors")
    ppo.save(tmp_path / "ppo.safetensors")
    expected, state = ppo.policy.predict(seen, deterministic=True)
    for name in ("policy", "ppo"):
        policy = Policy.load(tmp_path / f"{name}.safetensors")
        action, memory = policy.predict(seen, deterministic=True)
        np.testing.assert_array_equal(action, expected)
        np.testing.assert_array_equal(memory, state)
        assert not policy.training
    action, _ = PPO.load(tmp_path / "ppo.safetensors").predict(seen, deterministic=True)
    np.testing.assert_array_equal(action, expected)


def test_a_policy_of_a_run_folder_predicts_in_the_environments_units(tmp_path: Path):
    config = TrainConfig(env="Pendulum-v1", num_envs=2, total_steps=16, eval_episodes=0, device="cpu", ppo=SMALL)
    train_run(config, tmp_path / "run")
    policy = Policy.load(tmp_path / "run")
    with torch.no_grad():
        policy.actor[-1].bias.fill_(3.0)
    assert policy.predict(np.zeros(3), deterministic=True)[0][0] > 1.98
    assert load_policy(tmp_path / "run", "latest").predict([0.0, 0.0, 0.0])[0].shape == (1,)


@pytest.mark.slow
def test_a_learner_that_was_saved_and_loaded_goes_on_as_if_it_never_stopped(tmp_path: Path):
    def fresh() -> PPO:
        return PPO(make("cue", 4, delay=3), RECURRENT)

    straight = fresh()
    list(straight.train(6 * 32))
    first = fresh()
    list(itertools.islice(first.train(6 * 32), 3))  # schedules go by the steps in all
    first.save(tmp_path / "cue.safetensors")
    second = PPO.load(tmp_path / "cue.safetensors", make("cue", 4, delay=3))
    assert second.config == RECURRENT
    list(second.train(6 * 32))
    assert_same_state(second.state_dict(), straight.state_dict())


def test_a_loaded_learner_accepts_another_number_of_environments_but_no_other_kind(tmp_path: Path):
    ppo = PPO(make("cue", 4, delay=3), RECURRENT)
    next(ppo.train(1))
    ppo.save(tmp_path / "cue.safetensors")
    more = PPO.load(tmp_path / "cue.safetensors", make("cue", 6, delay=3))
    assert [update.step for update in more.train(80)] == [80]
    with pytest.raises(ValueError, match="the environment observes"):
        PPO.load(tmp_path / "cue.safetensors", make("cartpole-hidden", 4))
    alone = PPO.load(tmp_path / "cue.safetensors")
    with pytest.raises(ValueError, match=r"PPO\.load\(path, env\)"):
        alone.collect()


class Doubled(torch.nn.Module):
    output_size = 3

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, obs):
        return self.factor * obs


def test_loading_a_policy_with_a_custom_encoder_needs_a_new_instance_of_it(tmp_path: Path):
    env = make("Pendulum-v1", 2)
    ppo = PPO(env, SMALL, Doubled())
    with torch.no_grad():
        ppo.policy.encoder.factor.fill_(5.0)
    ppo.save(tmp_path / "ppo.safetensors")
    ppo.policy.save(tmp_path / "policy.safetensors")
    for loaded in (
        Policy.load(tmp_path / "policy.safetensors", encoder=Doubled()),
        Policy.load(tmp_path / "ppo.safetensors", encoder=Doubled()),
        PPO.load(tmp_path / "ppo.safetensors", env, encoder=Doubled()).policy,
    ):
        assert loaded.encoder.factor == 5.0
    with pytest.raises(ValueError, match=r"encoder\.factor is unexpected"):
        Policy.load(tmp_path / "policy.safetensors")


def test_a_file_of_a_newer_version_or_of_something_else_is_refused(tmp_path: Path):
    path = tmp_path / "file.safetensors"
    write_state(path, {}, Versions("weather"))
    with pytest.raises(CheckpointError, match="of the kind 'weather', not ppo or policy"):
        PPO.load(path)
    write_tensors(path, {"a": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="holds no state of esper"):
        Policy.load(path)


def test_a_damaged_or_foreign_file_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "policy.safetensors"
    learner(BOX, spaces.Discrete(3)).policy.save(path)
    with pytest.raises(CheckpointError, match="only a policy, which cannot continue to learn"):
        PPO.load(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"policy.safetensors is damaged"):
        Policy.load(path)
    path.write_bytes(b"PK\x03\x04 a zip file of something else")
    with pytest.raises(CheckpointError, match="cannot be read as a safetensors file"):
        Policy.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_an_exported_step_acts_like_the_policy_for_any_number_of_rows(core):
    action = spaces.Tuple((spaces.Discrete(3), spaces.Box(-2, 2, (2,))))
    policy = learner(BOX, action, PPOConfig(num_steps=8, network=NetworkConfig(core=core, hidden_size=8, encoder_sizes=(8,)))).policy
    rows = torch.export.Dim("rows", min=2)
    example = (torch.zeros(3, 3), policy.initial_state(3))
    program = torch.export.export(policy.exportable(), example, dynamic_shapes=({0: rows}, {0: rows}))
    obs, state = torch.randn(5, 3), torch.randn(policy.initial_state(5).shape)
    expected, after = policy.act(obs, state)
    actions, memory = program.module()(obs, state)
    assert torch.equal(actions["0"], expected["0"])
    assert torch.allclose(actions["1"], expected["1"], atol=1e-6)
    assert torch.allclose(memory, after, atol=1e-6)


class Aim(gymnasium.Env):
    """One step: the nearer the action is to 8, the better."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Box(-np.inf, np.inf, (1,))

    def reset(self, *, seed=None, options=None):
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), -float((action[0] - 8.0) ** 2), True, False, {}


@pytest.mark.slow
def test_an_action_without_bounds_is_learned_in_the_environments_units():
    network = NetworkConfig(core="none", encoder_sizes=(8,), head_sizes=(), log_std=0.0)
    ppo = PPO(Aim, PPOConfig(num_steps=8, num_epochs=4, num_minibatches=2, learning_rate=0.03, network=network), num_envs=16)
    before, _ = ppo.predict(np.ones(1), deterministic=True)
    ppo.learn(16 * 8 * 10)
    after, _ = ppo.predict(np.ones(1), deterministic=True)
    assert abs(before[0]) < 0.5
    assert after[0] > 1.5  # no action of a squashed head lies beyond 1


@pytest.mark.slow
def test_the_documented_example_for_users_of_stable_baselines_learns_saves_and_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "learner.md").read_text(encoding="utf-8")
    section = page.split("## Coming from Stable-Baselines3")[1]
    code = section.split("```python\n")[1].split("```")[0]
    assert "learn(100_000" in code
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code.replace("100_000", "1_024"), names)
    assert "1024 " in capsys.readouterr().out
    assert names["is_over"]
    assert isinstance(names["policy"], Policy)
    # The names in the table exist.
    fields = {*PPOConfig.__struct_fields__, *NetworkConfig.__struct_fields__}
    for name in ("num_steps", "num_epochs", "num_minibatches", "clip_coef", "entropy_coef", "value_coef", "learning_rate_schedule"):
        assert f"`{name}`" in section or f"`{name}=" in section
        assert name in fields
