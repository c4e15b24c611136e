"""The arena as a PettingZoo parallel environment."""

from __future__ import annotations

import copy

import numpy as np
import pytest

pytest.importorskip("pettingzoo")
from pettingzoo.test import parallel_api_test, parallel_seed_test

from esper.arena.config import ArenaConfig
from esper.arena.observe import observation_width, state_width
from esper.arena.pettingzoo import ArenaParallelEnv, parallel_env
from esper.arena.state import state_hash
from esper.config import ConfigError
from tests.arena.worlds import doom, place, put

SETTINGS = {"team_size": 2, "size": 16, "maps": 2, "seconds": 1.0, "contacts": 2, "allies": 1}  # four decisions


@pytest.fixture
def env():
    env = parallel_env(**SETTINGS)
    env.reset(seed=0)
    return env


def draw_actions(env, observations=None):
    masks = {agent: None if observations is None else observations[agent]["action_mask"] for agent in env.agents}
    return {agent: env.action_space(agent).sample(mask) for agent, mask in masks.items()}


def no_actions_of(env):
    action = {"fire": 0, "target": 0, "vent": 0, "motion": np.zeros(4, dtype=np.float32)}
    return {agent: dict(action) for agent in env.agents}


@pytest.mark.slow
def test_the_arena_passes_the_tests_of_pettingzoo():
    parallel_api_test(parallel_env(**SETTINGS), num_cycles=10)
    parallel_seed_test(lambda: parallel_env(**SETTINGS), num_cycles=3)


@pytest.mark.slow
def test_battles_to_the_death_pass_the_tests_of_pettingzoo():
    settings = {**SETTINGS, "team_size": 3, "seconds": 30.0}
    parallel_api_test(parallel_env(**settings), num_cycles=200)
    parallel_seed_test(lambda: parallel_env(**settings), num_cycles=20)


def test_agents_are_named_by_team_number_and_class(env):
    assert env.agents == ["red_0_medium", "red_1_light", "blue_0_medium", "blue_1_light"]
    assert env.possible_agents == env.agents
    assert env.num_agents == env.max_num_agents == 4


def test_observations_are_in_their_space(env):
    observations, infos = env.reset(seed=0)
    assert all(env.observation_space(agent).contains(observations[agent]) for agent in env.agents)
    assert observations["red_0_medium"]["observation"].shape == (observation_width(env.config),)
    assert {name: mask.shape for name, mask in observations["red_0_medium"]["action_mask"].items()} == {
        "fire": (8,),
        "target": (8, 2),
        "vent": (2,),
    }
    assert infos["blue_1_light"] == {"team": "blue"}


def test_masked_samples_are_allowed(env):
    place(env._battle, 0, -2.0, 0.5)
    place(env._battle, 2, 2.0, 0.5)
    env._battle.state = env._battle._sensed(env._battle.state)
    mask = env._observed(env._battle.look())["red_0_medium"]["action_mask"]
    space = env.action_space("red_0_medium")
    space.seed(0)
    samples = [space.sample(mask) for _ in range(50)]
    assert len({int(sample["fire"]) for sample in samples}) > 1
    for sample in samples:
        assert space.contains(sample)
        assert mask["fire"][sample["fire"]]
        assert mask["target"][sample["fire"], sample["target"]]
        assert mask["vent"][sample["vent"]]


def test_a_space_can_be_copied(env):
    space = env.action_space("red_0_medium")
    other = copy.deepcopy(space)
    assert other == space
    space.seed(1), other.seed(1)
    assert other.sample()["motion"].tolist() == space.sample()["motion"].tolist()


@pytest.mark.slow
def test_a_dead_agent_leaves_and_the_others_continue(env):
    doom(env._battle, unit=1)
    observations, rewards, terminations, truncations, infos = env.step(no_actions_of(env))
    assert terminations == {"red_0_medium": False, "red_1_light": True, "blue_0_medium": False, "blue_1_light": False}
    assert not any(truncations.values())
    assert rewards["red_1_light"] < rewards["red_0_medium"]
    assert set(observations) == set(infos) == set(terminations)
    assert env.agents == ["red_0_medium", "blue_0_medium", "blue_1_light"]
    observations, *_ = env.step(no_actions_of(env))
    assert set(observations) == set(env.agents)


def test_all_agents_leave_at_the_end_with_the_result_of_the_battle(env):
    doom(env._battle, unit=2)
    put(env._battle, 3, hit_points=1e-4)
    _, rewards, terminations, _, infos = env.step(no_actions_of(env))
    assert all(terminations.values())
    assert {info["winner"] for info in infos.values()} == {"red"}
    assert rewards["red_0_medium"] > 0 > rewards["blue_0_medium"]
    assert env.agents == []
    with pytest.raises(ValueError, match="no battle is going on"):
        env.step({})


@pytest.mark.slow
def test_the_last_observation_is_of_the_battle_that_ended(env):
    for _ in range(4):
        observations, _, terminations, _, infos = env.step(no_actions_of(env))
    assert all(terminations.values())
    assert infos["red_0_medium"]["winner"] == "draw"
    assert int(env._battle.state.status.decision[0]) == 4
    last = observations["red_0_medium"]["observation"]
    observations, _ = env.reset()
    assert not np.array_equal(last, observations["red_0_medium"]["observation"])


def test_a_reset_without_a_seed_begins_the_next_battle_and_one_with_it_the_first(env):
    hashes = [state_hash(env._battle.state, 0)]
    env.step(no_actions_of(env))
    env.reset()
    hashes.append(state_hash(env._battle.state, 0))
    assert len(env.agents) == 4
    assert hashes[0] != hashes[1]
    env.reset(seed=0)
    assert state_hash(env._battle.state, 0) == hashes[0]


@pytest.mark.slow
def test_the_seed_of_the_first_reset_is_that_of_the_environment():
    env, other = parallel_env(**SETTINGS, seed=5), parallel_env(**SETTINGS)
    first, _ = env.reset()
    again, _ = other.reset(seed=5)
    assert all(np.array_equal(first[agent]["observation"], again[agent]["observation"]) for agent in env.agents)


@pytest.mark.slow
def test_only_present_units_are_agents():
    env = parallel_env(**{**SETTINGS, "smallest_team": 1})
    sizes = set()
    for _ in range(6):
        env.reset()
        sizes.add(len(env.agents))
        env.step(no_actions_of(env))
    assert sizes == {2, 4}


def test_the_state_is_the_whole_battle(env):
    state = env.state()
    assert env.state_space.contains(state)
    assert state.shape == (state_width(env.config),)
    env.step(draw_actions(env))
    assert not np.array_equal(state, env.state())


def test_one_battle_is_fought_whatever_the_config_says():
    env = ArenaParallelEnv(ArenaConfig(battles=64, team_size=1, size=16, maps=1))
    env.reset()
    assert env.config.battles == 1
    assert env.state().shape == (state_width(env.config),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fire": 8}, "red_1_light: fire must be a whole number from 0 to 7; got 8"),
        ({"fire": 1.0}, "red_1_light: fire must be a whole number"),
        ({"target": -1}, "red_1_light: target must be a whole number from 0 to 1; got -1"),
        ({"motion": [0.0, 0.0, 0.0]}, "red_1_light: motion must be 4 numbers from -1 to 1"),
        ({"motion": [0.0, np.nan, 0.0, 0.0]}, "red_1_light: motion must be 4 numbers from -1 to 1"),
        ({"motion": [0.0, 2.0, 0.0, 0.0]}, "red_1_light: motion must be 4 numbers from -1 to 1"),
        ({"jump": 1}, r"red_1_light: an action is a dictionary with the heads \['fire', .*got .*'jump'"),
    ],
)
def test_a_wrong_action_names_its_agent_and_changes_nothing(env, change, message):
    before = state_hash(env._battle.state, 0)
    actions = no_actions_of(env)
    actions["red_1_light"] |= change
    with pytest.raises(ValueError, match=message):
        env.step(actions)
    assert state_hash(env._battle.state, 0) == before


def test_actions_are_needed_for_exactly_the_agents(env):
    actions = no_actions_of(env)
    del actions["blue_0_medium"]
    with pytest.raises(ValueError, match="no action for 'blue_0_medium'"):
        env.step(actions)
    with pytest.raises(ValueError, match=r"'green_0' takes no part.*'red_0_medium'"):
        env.step({**no_actions_of(env), "green_0": {}})
    with pytest.raises(ValueError, match=r"red_0_medium: an action is a dictionary .*; got int"):
        env.step({**no_actions_of(env), "red_0_medium": 3})


def test_settings_that_do_not_exist_are_named():
    with pytest.raises(ConfigError, match="did you mean 'team_size'"):
        parallel_env(team=2)
    with pytest.raises(ValueError, match="not both"):
        parallel_env(ArenaConfig(), team_size=2)
    with pytest.raises(ValueError, match="render_mode must be None; got 'human'"):
        parallel_env(**SETTINGS, render_mode="human")


def test_a_battle_needs_a_reset_first():
    with pytest.raises(ValueError, match=r"begin one with reset\(\)"):
        parallel_env(**SETTINGS).step({})
