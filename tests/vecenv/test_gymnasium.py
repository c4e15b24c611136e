"""Adapters from and to Gymnasium: final observations, masks, spaces and round trips."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from esper.vecenv import ActionSpec, Continuous, Discrete, Saveable, VecEnv, check_env, make, sample_actions
from esper.vecenv.gymnasium import ToGymnasium, from_gymnasium

MODES = list(AutoresetMode)


class Counter(gymnasium.Env):
    """Observation: 1000 · row + 100 · episode + step. Reward: that of the observation reached. Every other episode is truncated."""

    def __init__(self, row: int, observation_space: spaces.Space | None = None) -> None:
        self.row, self.episode, self.count = row, -1, 0
        self.observation_space = observation_space or spaces.Box(0, 1e6, (1,), np.float64)
        self.action_space = spaces.Discrete(3)

    @property
    def number(self) -> int:
        return 1000 * self.row + 100 * self.episode + self.count

    def look(self):
        return np.array([self.number], dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self.look(), self.info()

    def step(self, action):
        self.count += 1
        ended = self.count == 3 + self.row  # rows end at different times
        cut = self.episode % 2 == 1
        return self.look(), float(self.number), ended and not cut, ended and cut, self.info()

    def info(self):
        return {}


def sync(env_class, num_envs: int = 3, mode: AutoresetMode = AutoresetMode.SAME_STEP, copy: bool = True) -> SyncVectorEnv:
    return SyncVectorEnv([lambda row=row: env_class(row) for row in range(num_envs)], autoreset_mode=mode, copy=copy)


def transitions(env: VecEnv, steps: int):
    """The real transitions of each row: (obs, reward, next obs, terminated, truncated)."""
    rows = [[] for _ in range(env.num_envs)]
    timestep = env.reset()
    before = timestep.obs["obs"]
    for _ in range(steps):
        timestep = env.step({"action": torch.zeros(env.num_envs, dtype=torch.int64)})
        after = (
            timestep.obs["obs"]
            if timestep.final_obs is None
            else torch.where(timestep.ended[:, None], timestep.final_obs["obs"], timestep.obs["obs"])
        )
        for row in range(env.num_envs):
            if timestep.valid is None or timestep.valid[row]:
                rows[row].append(
                    (
                        before[row].item(),
                        timestep.reward[row].item(),
                        after[row].item(),
                        *(x[row].item() for x in (timestep.terminated, timestep.truncated)),
                    )
                )
            else:
                assert timestep.reward[row] == 0
                assert not timestep.ended[row]
        before = timestep.obs["obs"]
    return rows


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copy", [True, False])
def test_every_way_of_resetting_gives_the_same_real_transitions(mode, copy):
    for row, found in enumerate(transitions(from_gymnasium(sync(Counter, mode=mode, copy=copy)), 40)):
        length = 3 + row
        for index, transition in enumerate(found):
            episode, step = divmod(index, length)
            number = 1000 * row + 100 * episode + step
            last = step == length - 1
            assert transition == (number, number + 1, number + 1, last and episode % 2 == 0, last and episode % 2 == 1)
        assert len(found) >= 30


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_step_is_marked_invalid_and_starts_an_episode(mode):
    env = from_gymnasium(sync(Counter, mode=mode))
    env.reset()
    steps = [env.step({"action": torch.zeros(3, dtype=torch.int64)}) for _ in range(4)]
    assert steps[2].terminated.tolist() == [True, False, False]
    assert steps[2].final_obs["obs"][0] == 3
    if mode is AutoresetMode.NEXT_STEP:
        assert steps[3].valid.tolist() == [False, True, True]
        assert steps[3].obs["obs"][0] == 100
    else:
        assert steps[3].valid is None
        assert steps[2].obs["obs"][0] == 100
        assert steps[3].obs["obs"][0] == 101


@pytest.mark.parametrize("mode", MODES)
def test_adapted_environments_keep_the_contract_even_where_buffers_are_reused(mode):
    check_env(from_gymnasium(sync(Counter, mode=mode, copy=False)), steps=30)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # how Gymnasium starts its workers on Linux
@pytest.mark.parametrize("mode", MODES)
def test_environments_in_subprocesses_equal_those_in_this_process(mode):
    env = from_gymnasium(AsyncVectorEnv([lambda row=row: Counter(row) for row in range(2)], autoreset_mode=mode))
    try:
        assert transitions(env, 20) == transitions(from_gymnasium(sync(Counter, 2, mode)), 20)
        check_env(env, steps=10)
    finally:
        env.close()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1"])
def test_gymnasiums_own_environments_keep_the_contract(name):
    check_env(make(name, 3), steps=60)


def test_an_environment_without_an_autoreset_mode_is_refused():
    vector_env = sync(Counter)
    del vector_env.metadata["autoreset_mode"]
    with pytest.raises(ValueError, match="autoreset_mode"):
        from_gymnasium(vector_env)


def test_a_same_step_environment_without_final_observations_is_refused_where_it_matters():
    class Forgetful(SyncVectorEnv):
        def step(self, actions):
            *rest, infos = super().step(actions)
            return *rest, {name: value for name, value in infos.items() if "final_obs" not in name}

    env = from_gymnasium(Forgetful([lambda: Counter(0)], autoreset_mode=AutoresetMode.SAME_STEP))
    env.reset()
    zero = {"action": torch.zeros(1, dtype=torch.int64)}
    assert [env.step(zero).terminated.item() for _ in range(3)][-1]  # a true end needs none
    with pytest.raises(ValueError, match=r"no final_obs for the environments \[0\]"):
        [env.step(zero) for _ in range(3)]


class Everything(Counter):
    """One part of every kind of space."""

    def __init__(self, row: int) -> None:
        super().__init__(
            row,
            spaces.Dict(
                {
                    "vector": spaces.Box(-np.inf, np.inf, (2,), np.float64),
                    "whole": spaces.Box(-1000, 1000, (2,), np.int16),
                    "image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
                    "choice": spaces.Discrete(4, start=-1),
                    "nested": spaces.Dict({"choices": spaces.MultiDiscrete([2, 3]), "bits": spaces.MultiBinary(3)}),
                }
            ),
        )

    def look(self):
        return {
            "vector": np.array([self.number, -self.number], dtype=np.float64),
            "whole": np.array([self.count, -self.count], dtype=np.int16),
            "image": np.full((4, 5, 3), self.count, dtype=np.uint8),
            "choice": np.int64(self.count % 4 - 1),
            "nested": {"choices": np.array([self.count % 2, self.count % 3]), "bits": np.array([1, 0, self.count % 2], dtype=np.int8)},
        }


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_observation_arrives_as_a_tensor(mode):
    env = from_gymnasium(sync(Everything, 2, mode))
    assert {name: (spec.shape, spec.dtype) for name, spec in env.observation_spec.items()} == {
        "vector": ((2,), "float32"),
        "whole": ((2,), "float32"),
        "image": ((4, 5, 3), "uint8"),
        "choice": ((4,), "float32"),
        "nested/choices": ((5,), "float32"),
        "nested/bits": ((3,), "float32"),
    }
    env.reset()
    for _ in range(3):
        timestep = env.step({"action": torch.zeros(2, dtype=torch.int64)})
    final, running = ({name: value[row] for name, value in timestep.final_obs.items()} for row in (0, 1))
    assert final["vector"].tolist() == [3.0, -3.0]
    assert final["whole"].tolist() == [3.0, -3.0]
    assert final["image"].unique().tolist() == [3]
    assert final["choice"].tolist() == [0, 0, 0, 1]
    assert final["nested/choices"].tolist() == [0, 1, 1, 0, 0]
    assert final["nested/bits"].tolist() == [1, 0, 1]
    assert timestep.obs["vector"][1].tolist() == [1003.0, -1003.0]
    assert running["image"].unique().tolist() == [3]
    check_env(env, steps=20)


def test_a_batched_final_observation_is_understood():
    class Batched(SyncVectorEnv):
        def step(self, actions):
            *rest, infos = super().step(actions)
            if "final_obs" in infos:
                infos["final_obs"] = np.stack([np.zeros(1) if row is None else row for row in infos["final_obs"]])
            return *rest, infos

    env = from_gymnasium(Batched([lambda row=row: Counter(row) for row in range(3)], autoreset_mode=AutoresetMode.SAME_STEP))
    assert transitions(env, 12) == transitions(from_gymnasium(sync(Counter)), 12)


@pytest.mark.parametrize("mode", MODES)
def test_tuples_and_single_numbers_arrive_as_tensors(mode):
    class Pair(Counter):
        def __init__(self, row):
            inner = spaces.Tuple((spaces.Box(0, 1e6, (), np.float64), spaces.Discrete(2)))
            super().__init__(row, spaces.Tuple((inner, spaces.Box(0, 255, (), np.uint8))))

        def look(self):
            return (np.float64(self.number), self.count % 2), np.uint8(self.count)

    env = from_gymnasium(sync(Pair, 2, mode))
    assert {name: (spec.shape, spec.dtype) for name, spec in env.observation_spec.items()} == {
        "0/0": ((1,), "float32"),
        "0/1": ((2,), "float32"),
        "1": ((1,), "uint8"),
    }
    env.reset()
    for _ in range(3):
        timestep = env.step({"action": torch.zeros(2, dtype=torch.int64)})
    assert {name: value[0].tolist() for name, value in timestep.final_obs.items()} == {"0/0": [3.0], "0/1": [0.0, 1.0], "1": [3]}
    assert timestep.obs["0/0"][1].tolist() == [1003.0]
    check_env(env, steps=20)


def test_a_space_without_a_fixed_shape_is_refused_with_the_supported_ones():
    class Many(Counter):
        def __init__(self, row):
            super().__init__(row, spaces.Dict({"seen": spaces.Sequence(spaces.Discrete(2))}))

    with pytest.raises(ValueError, match=r"observation 'seen' is a Sequence.*Dict and Tuple of those are understood"):
        from_gymnasium(sync(Many))


class Masked(Counter):
    """Allows what the step counter names, and nothing once the episode is over."""

    sizes = (3,)
    how = "array"

    def mask(self):
        flat = np.zeros(sum(self.sizes), dtype=np.int8)
        if self.count < 3 + self.row:
            starts = np.cumsum((0, *self.sizes[:-1]))
            flat[[start + self.count % size for start, size in zip(starts, self.sizes, strict=True)]] = 1
        return flat

    def info(self):
        if self.how == "array":
            return {"action_mask": self.mask()}
        if self.how == "tuple":
            return {"action_mask": tuple(np.split(self.mask(), np.cumsum(self.sizes)[:-1]))}
        return {"action_mask": self.mask()} if self.row == 0 else {}


@pytest.mark.parametrize("mode", MODES)
def test_masks_in_the_infos_belong_to_the_next_action(mode):
    env = from_gymnasium(sync(Masked, 2, mode))
    assert env.reset().masks["action"].tolist() == [[True, False, False]] * 2
    zero = {"action": torch.zeros(2, dtype=torch.int64)}
    assert env.step(zero).masks["action"].tolist() == [[False, True, False]] * 2
    env.step(zero)
    after_the_end = env.step(zero).masks["action"]
    # A finished row waits for its reset in one mode, and any action will do; in the others it is at its start again.
    assert after_the_end[0].tolist() == ([True] * 3 if mode is AutoresetMode.NEXT_STEP else [True, False, False])
    assert after_the_end[1].tolist() == [True, False, False]
    check_env(env, steps=30)


def test_an_environment_without_a_mask_allows_everything():
    class OnlyTheFirst(Masked):
        how = "sometimes"

    assert from_gymnasium(sync(OnlyTheFirst, 2)).reset().masks["action"].tolist() == [[True, False, False], [True] * 3]


@pytest.mark.parametrize("how", ["array", "tuple"])
def test_masks_of_several_heads_follow_one_another(how):
    class Several(Masked):
        sizes = (2, 4)

        def __init__(self, row):
            super().__init__(row)
            self.action_space = spaces.MultiDiscrete([2, 4])

    Several.how = how
    env = from_gymnasium(sync(Several, 2))
    env.reset()
    masks = env.step({"action_0": torch.zeros(2, dtype=torch.int64), "action_1": torch.zeros(2, dtype=torch.int64)}).masks
    assert masks["action_0"].tolist() == [[False, True]] * 2
    assert masks["action_1"].tolist() == [[False, True, False, False]] * 2


def test_a_mask_in_the_observation_is_taken_out_of_it():
    class InObservation(Masked):
        def __init__(self, row):
            super().__init__(row, spaces.Dict({"seen": spaces.Box(0, 1e6, (1,)), "action_mask": spaces.MultiBinary(3)}))

        def look(self):
            return {"seen": np.array([self.number], dtype=np.float32), "action_mask": self.mask()}

        def info(self):
            return {}

    env = from_gymnasium(sync(InObservation, 2))
    assert list(env.observation_spec) == ["seen"]
    timestep = env.reset()
    assert list(timestep.obs) == ["seen"]
    assert timestep.masks["action"].dtype == torch.bool
    assert timestep.masks["action"].tolist() == [[True, False, False]] * 2
    check_env(env, steps=20)


def test_a_mask_of_the_wrong_size_is_named_with_both_shapes():
    class Wrong(Masked):
        sizes = (5,)

    with pytest.raises(ValueError, match=r"'action_mask' has shape \(2, 5\), expected \(2, 3\)"):
        from_gymnasium(sync(Wrong, 2)).reset()


class Records(Counter):
    """Remembers the action it was given."""

    given = None

    def step(self, action):
        assert self.action_space.contains(action), action
        self.given = action
        return super().step(action)


def recording(action_space: spaces.Space) -> tuple[VecEnv, SyncVectorEnv]:
    class Spaced(Records):
        def __init__(self, row):
            super().__init__(row)
            self.action_space = action_space

    vector_env = sync(Spaced, 2)
    env = from_gymnasium(vector_env)
    env.reset()
    return env, vector_env


def test_a_nested_action_space_of_any_name_has_heads_of_its_own():
    env, _ = recording(spaces.Dict({"action": spaces.Dict({"a": spaces.Discrete(2)}), "a": spaces.Discrete(3)}))
    assert set(env.action_spec.heads) == {Discrete("action/a", 2), Discrete("a", 3)}


def test_every_kind_of_action_space_gets_the_choices_of_its_heads():
    low, high = np.array([0.0, -2.0], dtype=np.float32), np.array([10.0, 2.0], dtype=np.float32)
    env, inner = recording(
        spaces.Dict(
            {
                "arm": spaces.Dict({"grip": spaces.MultiBinary(2), "reach": spaces.Box(low, high)}),
                "gear": spaces.Discrete(3, start=-1),
                "pair": spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([3, 4]))),
            }
        )
    )
    assert env.action_spec.heads == (
        Discrete("arm/grip_0", 2),
        Discrete("arm/grip_1", 2),
        Continuous("arm/reach", 2),
        Discrete("gear", 3),
        Discrete("pair/0", 2),
        Discrete("pair/1_0", 3),
        Discrete("pair/1_1", 4),
    )
    both = torch.tensor
    env.step(
        {
            "arm/grip_0": both([0, 1]),
            "arm/grip_1": both([1, 1]),
            "arm/reach": both([[-1.0, 1.0], [0.0, -0.5]]),
            "gear": both([0, 2]),
            "pair/0": both([1, 0]),
            "pair/1_0": both([2, 0]),
            "pair/1_1": both([0, 3]),
        }
    )
    first, second = (env.given for env in inner.envs)
    assert first["arm"]["grip"].tolist() == [0, 1]
    assert first["arm"]["reach"].tolist() == [0.0, 2.0]
    assert second["arm"]["reach"].tolist() == [5.0, -1.0]
    assert (first["gear"], second["gear"]) == (-1, 1)
    assert second["pair"][0] == 0
    assert second["pair"][1].tolist() == [0, 3]


def test_scaled_actions_never_leave_their_bounds():
    low, high = np.float32(-0.1), np.float32(0.3)
    env, inner = recording(spaces.Box(low, high, (2, 1), np.float32))
    env.step({"action": torch.tensor([[-1.0, 1.0], [1.0, -1.0]])})  # `Records` asserts that the space contains them
    np.testing.assert_allclose(inner.envs[0].given[:, 0], [low, high])


def test_a_box_with_an_open_side_takes_numbers_in_its_own_units():
    low, high = np.array([-np.inf, 0.0], dtype=np.float32), np.array([np.inf, np.inf], dtype=np.float32)
    env, inner = recording(spaces.Box(low, high))
    assert env.action_spec.heads == (Continuous("action", 2, is_bounded=False),)
    env.step({"action": torch.tensor([[30.0, 40.0], [-30.0, -40.0]])})
    assert [each.given.tolist() for each in inner.envs] == [[30.0, 40.0], [-30.0, 0.0]]  # cut at the bound that there is
    check_env(env, steps=10)
    largest = np.finfo(np.float32).max
    assert not recording(spaces.Box(-largest, largest, (2,)))[0].action_spec.heads[0].is_bounded


def test_every_number_of_an_action_box_is_scaled_by_its_own_bounds():
    low, high = np.array([[0.0, -np.inf], [-1.0, 0.0]], dtype=np.float32), np.array([[1000.0, np.inf], [3.0, np.inf]], dtype=np.float32)
    env, inner = recording(spaces.Box(low, high))
    assert env.action_spec.heads == (Continuous("action_bounded", 2), Continuous("action_unbounded", 2, is_bounded=False))
    bounded, unbounded = torch.tensor([[-1.0, 1.0], [0.0, 0.5]]), torch.tensor([[30.0, 40.0], [-30.0, -40.0]])
    env.step({"action_bounded": bounded, "action_unbounded": unbounded})
    assert [each.given.tolist() for each in inner.envs] == [[[0.0, 30.0], [3.0, 40.0]], [[500.0, -30.0], [2.0, 0.0]]]
    check_env(env, steps=10)


@pytest.mark.parametrize(
    ("observed", "acted", "message"),
    [
        (spaces.Box(0, 1, (0,)), spaces.Discrete(2), r"Records: observation 'obs' has no numbers: its shape is \(0,\)"),
        (spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Box(0, 1, (3, 0))), spaces.Discrete(2), "Records: observation 'b' has no numbers"),
        (spaces.Dict(), spaces.Discrete(2), "Records: the observation space has no parts"),
        (spaces.Discrete(2), spaces.Box(0, 1, (0,)), "Records: action 'action' has no numbers"),
        (spaces.Discrete(2), spaces.Tuple((spaces.Dict(),)), "Records: the action space has no parts"),
        (spaces.Dict(text=spaces.Text(3)), spaces.Discrete(2), "Records: observation 'text' is a Text, .* leaves this one out"),
    ],
)
def test_a_space_without_numbers_is_refused_with_its_name_and_that_of_the_environment(observed, acted, message):
    class Records(gymnasium.Env):
        observation_space, action_space = observed, acted

    with pytest.raises(ValueError, match=message):
        make(Records, 2)


def test_an_adapted_environment_can_be_saved_only_if_the_inner_one_can():
    assert not isinstance(from_gymnasium(sync(Counter)), Saveable)
    inner = make("cartpole-hidden", 3)
    env = from_gymnasium(ToGymnasium(inner))
    assert isinstance(env, Saveable)
    check_env(env, steps=40)  # which repeats steps from a saved state


ROUND_TRIPS = {"cue": {"delay": 4}, "conditional": {}, "cartpole-hidden": {"max_steps": 15}, "pendulum-hidden": {"max_steps": 15}}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_converting_to_gymnasium_and_back_changes_nothing(name):
    direct, around = make(name, 4, **ROUND_TRIPS[name]), from_gymnasium(ToGymnasium(make(name, 4, **ROUND_TRIPS[name])))
    assert around.action_spec == direct.action_spec
    assert around.observation_spec == direct.observation_spec
    generator = torch.Generator().manual_seed(0)
    one, other = direct.reset(seed=7), around.reset(seed=7)
    for _ in range(40):
        torch.testing.assert_close(one.obs, other.obs, rtol=0, atol=0)
        torch.testing.assert_close(one.masks, other.masks, rtol=0, atol=0)
        for field in ("reward", "terminated", "truncated"):
            assert torch.equal(getattr(one, field), getattr(other, field))
        if one.ended.any():
            assert torch.equal(one.final_obs["obs"][one.ended], other.final_obs["obs"][one.ended])
        actions = sample_actions(direct.action_spec, one.masks, 4, generator)
        one, other = direct.step(actions), around.step(actions)


def test_the_gymnasium_view_declares_the_spaces_of_its_results():
    env = ToGymnasium(make("conditional", 4))
    obs, infos = env.reset(seed=0)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.observation_space.contains(obs)
    assert infos["action_mask/item"].shape == (4, 3, 5)
    for _ in range(10):
        obs, reward, terminated, truncated, infos = env.step(env.action_space.sample())
        assert env.observation_space.contains(obs)
        assert reward.shape == terminated.shape == truncated.shape == (4,)
    assert terminated.all()
    assert infos["_final_obs"].all()
    assert infos["final_obs"][0] in env.single_observation_space


def test_a_declared_action_spec_must_fit_the_action_space():
    vector_env = sync(Counter)
    vector_env.metadata["action_spec"] = ActionSpec((Discrete("go", 4),))
    with pytest.raises(ValueError, match="action space gives"):
        from_gymnasium(vector_env)
    vector_env.metadata["action_spec"] = ActionSpec((Discrete("go", 3),))
    assert from_gymnasium(vector_env).action_spec.heads[0].name == "go"


def test_the_seed_given_to_make_is_the_first_one_used():
    assert torch.equal(make("CartPole-v1", 2, seed=4).reset().obs["obs"], make("CartPole-v1", 2).reset(seed=4).obs["obs"])
    env = make("CartPole-v1", 2, seed=4)
    assert not torch.equal(env.reset().obs["obs"], env.reset().obs["obs"])


@pytest.mark.parametrize(
    ("wanted", "near"), [("CartPol-v1", "'CartPole-v1'"), ("cartpole-hiden", "'cartpole-hidden'"), ("Qu", "the built-in ones are")]
)
def test_an_unknown_name_is_answered_with_the_nearest_known_ones(wanted, near):
    with pytest.raises(ValueError, match=f"no environment named '{wanted}'.*{near}"):
        make(wanted, 2)


@pytest.mark.slow
def test_built_in_environments_work_without_gymnasium_and_others_name_the_extra():
    script = """
import sys
sys.modules["gymnasium"] = None
from esper.vecenv import make
make("cue", 2).reset(0)
for ask in (lambda: make("CartPole-v1", 2), lambda: __import__("esper.vecenv.gymnasium")):
    try:
        ask()
    except ImportError as error:
        assert "pip install 'esper-grow[gym]'" in str(error), error
    else:
        raise AssertionError("worked without gymnasium")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
