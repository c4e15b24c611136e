"""The arena as a PettingZoo parallel environment."""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest

pytest.importorskip("pettingzoo")
from pettingzoo.test import parallel_api_test, parallel_seed_test, state_test
from pettingzoo.utils.conversions import parallel_to_aec

from esper.arena.bots import Bot
from esper.arena.config import ArenaConfig, ArenaRewardConfig
from esper.arena.native import layout as at
from esper.arena.observe import observation_width, state_width
from esper.arena.pettingzoo import ArenaParallelEnv, agent_names, parallel_env
from esper.arena.scenarios import SCENARIOS
from esper.config import ConfigError
from tests.arena.worlds import doom, hash_of, place, put, scenario_with_few_maps

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


@pytest.mark.slow
def test_the_state_passes_the_test_of_pettingzoo():
    settings = {**SETTINGS, "team_size": 3, "seconds": 30.0}
    state_test(parallel_to_aec(parallel_env(**settings)), parallel_env(**settings), num_cycles=120)


@pytest.mark.slow
def test_the_state_stays_in_its_space_in_battles_to_the_death():
    env = parallel_env(team_size=5, size=32, maps=2, seconds=60.0)
    bot = Bot("expert", env._battle)
    env.reset(seed=0)
    heads = env._battle.action_spec.heads
    largest = 0.0
    while env.agents:
        chosen = {head.name: value.numpy() for head, value in zip(heads, bot.act().values(), strict=True)}
        env.step({agent: {name: value[env._units[agent]].copy() for name, value in chosen.items()} for agent in env.agents})
        assert env.state_space.contains(env.state())
        largest = max(largest, float(np.abs(env.state()).max()))
    assert largest > 1.0, "units were hot, or flew high"


def test_agents_are_named_by_team_class_and_number(env):
    assert env.agents == ["red_medium_0", "red_light_0", "blue_medium_0", "blue_light_0"]
    assert env.possible_agents == env.agents
    assert env.num_agents == env.max_num_agents == 4


def test_observations_are_in_their_space(env):
    observations, infos = env.reset(seed=0)
    assert all(env.observation_space(agent).contains(observations[agent]) for agent in env.agents)
    assert observations["red_medium_0"]["observation"].shape == (observation_width(env.config),)
    assert {name: mask.shape for name, mask in observations["red_medium_0"]["action_mask"].items()} == {
        "fire": (8,),
        "target": (8, 2),
        "vent": (2,),
    }
    assert infos["blue_light_0"] == {"team": "blue", "is_alive": True}


def test_masked_samples_are_allowed(env):
    place(env._battle, 0, -2.0, 0.5)
    place(env._battle, 2, 2.0, 0.5)
    mask = env._observed(env._battle.look())["red_medium_0"]["action_mask"]
    space = env.action_space("red_medium_0")
    space.seed(0)
    samples = [space.sample(mask) for _ in range(50)]
    assert len({int(sample["fire"]) for sample in samples}) > 1
    for sample in samples:
        assert space.contains(sample)
        assert mask["fire"][sample["fire"]]
        assert mask["target"][sample["fire"], sample["target"]]
        assert mask["vent"][sample["vent"]]


def test_a_space_can_be_copied(env):
    space = env.action_space("red_medium_0")
    other = copy.deepcopy(space)
    assert other == space
    space.seed(1), other.seed(1)
    assert other.sample()["motion"].tolist() == space.sample()["motion"].tolist()


@pytest.mark.slow
def test_a_dead_agent_stays_until_the_battle_ends_and_is_paid_what_its_team_gets(env):
    doom(env._battle, unit=1)
    _, _, terminations, _, infos = env.step(no_actions_of(env))
    assert not any(terminations.values())
    assert [info["is_alive"] for info in infos.values()] == [True, False, True, True]
    observations, *_ = env.step(no_actions_of(env))
    assert not observations["red_light_0"]["observation"].any()
    for unit in (2, 3):
        put(env._battle, unit, hit_points=1e-4)
    _, rewards, terminations, _, infos = env.step(no_actions_of(env))
    assert infos["red_light_0"]["winner"] == "red"
    assert terminations["red_light_0"]
    assert rewards["red_light_0"] > ArenaRewardConfig().outcome


@pytest.mark.slow
def test_a_dead_agent_leaves_and_the_others_continue_if_the_dead_are_not_paid():
    env = parallel_env(**SETTINGS, reward={"pays_dead": False})
    env.reset(seed=0)
    doom(env._battle, unit=1)
    observations, rewards, terminations, truncations, infos = env.step(no_actions_of(env))
    assert terminations == {"red_medium_0": False, "red_light_0": True, "blue_medium_0": False, "blue_light_0": False}
    assert not any(truncations.values())
    assert rewards["red_light_0"] < rewards["red_medium_0"]
    assert set(observations) == set(infos) == set(terminations)
    assert env.agents == ["red_medium_0", "blue_medium_0", "blue_light_0"]
    observations, *_ = env.step(no_actions_of(env))
    assert set(observations) == set(env.agents)


def test_all_agents_leave_at_the_end_with_the_result_of_the_battle(env):
    doom(env._battle, unit=2)
    put(env._battle, 3, hit_points=1e-4)
    _, rewards, terminations, _, infos = env.step(no_actions_of(env))
    assert all(terminations.values())
    assert {info["winner"] for info in infos.values()} == {"red"}
    assert rewards["red_medium_0"] > 0 > rewards["blue_medium_0"]
    assert env.agents == []
    with pytest.raises(ValueError, match="no battle is going on"):
        env.step({})


@pytest.mark.slow
def test_the_last_observation_is_of_the_battle_that_ended(env):
    for _ in range(4):
        observations, _, terminations, _, infos = env.step(no_actions_of(env))
    assert all(terminations.values())
    assert infos["red_medium_0"]["winner"] == "draw"
    assert int(env._battle.simulation.status[at.DECISION, 0]) == 4
    last = observations["red_medium_0"]["observation"]
    observations, _ = env.reset()
    assert not np.array_equal(last, observations["red_medium_0"]["observation"])


def test_a_reset_without_a_seed_begins_the_next_battle_and_one_with_it_the_first(env):
    hashes = [hash_of(env._battle)]
    env.step(no_actions_of(env))
    env.reset()
    hashes.append(hash_of(env._battle))
    assert len(env.agents) == 4
    assert hashes[0] != hashes[1]
    env.reset(seed=0)
    assert hash_of(env._battle) == hashes[0]


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


def test_agents_of_one_class_are_counted():
    assert agent_names(ArenaConfig(team_size=5))[5:] == [
        "blue_medium_0", "blue_light_0", "blue_heavy_0", "blue_scout_0", "blue_medium_1",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_scenario_is_given_by_its_name_but_not_with_its_test_maps(monkeypatch):
    scenario = scenario_with_few_maps("2v2-open-v1")
    monkeypatch.setitem(SCENARIOS, scenario.name, scenario)
    env = parallel_env("2v2-open-v1")
    assert env.config == msgspec.structs.replace(scenario.arena, battles=1)
    with pytest.raises(ValueError, match="makes the test maps of 2v2-open-v1"):
        parallel_env("2v2-open-v1", seed=scenario.test_seed)
    with pytest.raises(ValueError, match="makes the test maps of 2v2-open-v1"):
        env.reset(seed=scenario.test_seed)
    with pytest.raises(ValueError, match="there is no scenario '2v2'"):
        parallel_env("2v2")


def test_one_battle_is_fought_whatever_the_config_says():
    env = ArenaParallelEnv(ArenaConfig(battles=64, team_size=1, size=16, maps=1))
    env.reset()
    assert env.config.battles == 1
    assert env.state().shape == (state_width(env.config),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fire": 8}, "red_light_0: fire must be a whole number from 0 to 7; got 8"),
        ({"fire": 1.0}, "red_light_0: fire must be a whole number"),
        ({"target": -1}, "red_light_0: target must be a whole number from 0 to 1; got -1"),
        ({"motion": [0.0, 0.0, 0.0]}, "red_light_0: motion must be 4 numbers from -1 to 1"),
        ({"motion": [0.0, np.nan, 0.0, 0.0]}, "red_light_0: motion must be 4 numbers from -1 to 1"),
        ({"motion": [0.0, 2.0, 0.0, 0.0]}, "red_light_0: motion must be 4 numbers from -1 to 1"),
        ({"jump": 1}, r"red_light_0: an action is a dictionary with the heads \['fire', .*got .*'jump'"),
    ],
)
def test_a_wrong_action_names_its_agent_and_changes_nothing(env, change, message):
    before = hash_of(env._battle)
    actions = no_actions_of(env)
    actions["red_light_0"] |= change
    with pytest.raises(ValueError, match=message):
        env.step(actions)
    assert hash_of(env._battle) == before


def test_actions_are_needed_for_exactly_the_agents(env):
    actions = no_actions_of(env)
    del actions["blue_medium_0"]
    with pytest.raises(ValueError, match="no action for 'blue_medium_0'"):
        env.step(actions)
    with pytest.raises(ValueError, match=r"'green_scout_0' takes no part.*'red_medium_0'"):
        env.step({**no_actions_of(env), "green_scout_0": {}})
    with pytest.raises(ValueError, match=r"red_medium_0: an action is a dictionary .*; got int"):
        env.step({**no_actions_of(env), "red_medium_0": 3})


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
