"""Battles against an opponent as a Gymnasium vector environment, with the learner's team as one agent."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")
import gymnasium
from gymnasium.utils.env_checker import check_reset_options, check_reset_seed_determinism, data_equivalence
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

from esper.arena.arena import Arena
from esper.arena.config import ArenaConfig
from esper.arena.gymnasium_vector import ArenaVectorEnv, Observations
from esper.arena.native import layout as at
from esper.arena.observe import observation_width, state_width
from esper.arena.scenarios import FIRST_TEST_SEED, SCENARIOS, Scenario
from esper.league.matches import MatchArena
from esper.league.network import make_policy
from esper.rl.config import NetworkConfig
from tests.arena.worlds import doom, hash_of, put, scenario_with_few_maps
from tests.league.arenas import UNIT

TINY = ArenaConfig(team_size=2, size=16, maps=2, seconds=1.0, contacts=2, allies=1)  # four decisions
SMALL = Scenario(
    "small-v1", "", ArenaConfig(team_size=2, size=16, maps=2, seconds=20.0, contacts=2, allies=1), test_seed=FIRST_TEST_SEED + 7
)
STILL = [0, 0, 0, 1, 1, 2, 0]  # fires nothing, vents not, does not move


@pytest.fixture
def env() -> ArenaVectorEnv:
    env = ArenaVectorEnv(TINY, "strong-v1", num_envs=4)
    env.reset(seed=0)
    return env


def still(env: ArenaVectorEnv) -> np.ndarray[Any, Any]:
    return np.tile(STILL, (env.num_envs, env.config.team_size, 1))


def draw_allowed(env: ArenaVectorEnv, observations: Observations, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw actions that the flat masks allow."""
    masks = np.split(observations["action_mask"], np.cumsum(list(env.heads.values()))[:-1], axis=2)
    return np.stack([(mask * rng.uniform(0.1, 1.0, mask.shape)).argmax(2) for mask in masks], axis=2)


# The interface of Gymnasium


@pytest.mark.slow
def test_the_checks_of_gymnasium_pass(env: ArenaVectorEnv) -> None:
    check_reset_seed_determinism(env)
    check_reset_options(env)
    with pytest.raises(ValueError, match="takes no reset options; got"):
        env.reset(options={"reset_mask": np.ones(4, np.bool_)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"opponent": "storng"}, "there is no bot 'storng'; did you mean 'strong'"),
        ({"opponent": None}, "opponent must be the name of a bot, or a function from observations to actions; got None"),
        ({"scenario": None}, "scenario must be the name of a scenario, a Scenario or an ArenaConfig; got None"),
        ({"scenario": "2v2"}, "there is no scenario '2v2'"),
        ({"num_envs": 0}, "num_envs must be at least 1; got 0"),
        ({"split": "exam"}, "split must be 'train' or 'test'"),
        ({"device": "gpu"}, "an arena runs on 'cpu' or 'cuda'; got 'gpu'"),
    ],
)
def test_impossible_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArenaVectorEnv(**{"scenario": TINY, "num_envs": 2, **arguments})


@pytest.mark.slow
def test_the_same_seed_and_actions_give_the_same_steps() -> None:
    envs = [ArenaVectorEnv(TINY, "middle", num_envs=4) for _ in range(2)]
    results = []
    for env in envs:
        env.action_space.seed(1)
        results.append([env.reset(seed=5), *(env.step(env.action_space.sample()) for _ in range(6))])
    assert data_equivalence(results[0], results[1], exact=True)
    assert not data_equivalence(results[0][0], envs[0].reset(seed=6))


def test_every_result_is_in_its_space_and_belongs_to_the_caller(env: ArenaVectorEnv) -> None:
    kept = []
    observations, infos = env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(6):
        assert env.observation_space.contains(observations)
        kept.append(((observations, infos), copy.deepcopy((observations, infos))))
        actions = draw_allowed(env, observations, rng)
        assert env.action_space.contains(actions)
        observations, rewards, terminations, truncations, infos = env.step(actions)
        assert rewards.shape == terminations.shape == truncations.shape == (4,)
        assert (rewards.dtype, terminations.dtype, truncations.dtype) == (np.float32, np.bool_, np.bool_)
        assert not truncations.any()
    assert all(data_equivalence(now, then, exact=True) for now, then in kept), "later steps change nothing that was returned"


def test_spaces_are_those_of_a_team(env: ArenaVectorEnv) -> None:
    assert env.single_observation_space["observation"].shape == (2, observation_width(TINY))
    assert env.single_observation_space["state"].shape == (state_width(TINY),)
    assert env.single_observation_space["target_mask"].shape == (2, 8, 2)
    assert env.heads == {"fire": 8, "target": 2, "vent": 2, "forward": 3, "strafe": 3, "yaw": 5, "jets": 2}
    assert env.single_action_space.nvec.tolist() == [[8, 2, 2, 3, 3, 5, 2]] * 2
    assert env.single_observation_space["action_mask"].shape == (2, 25)
    assert env.action_space.shape == (4, 2, 7)


@pytest.mark.slow
def test_scenarios_are_made_by_name_and_wrappers_of_gymnasium_understand_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCENARIOS, "2v2-open-v1", scenario_with_few_maps("2v2-open-v1"))
    assert all(f"esper/{name}" in gymnasium.registry for name in SCENARIOS)
    made = gymnasium.make_vec("esper/2v2-open-v1", num_envs=2, vectorization_mode="vector_entry_point", opponent="weak")
    assert made.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert (made.unwrapped.opponent, made.unwrapped.config.team_size, made.num_envs) == ("weak", 2, 2)
    made.close()
    recorded = DictInfoToList(RecordEpisodeStatistics(ArenaVectorEnv(TINY, "weak", num_envs=2)))
    recorded.reset(seed=0)
    for _ in range(4):
        *_, infos = recorded.step(still(recorded.unwrapped))
    assert [info["episode"]["l"] for info in infos] == [4, 4]
    assert infos[0]["final_info"]["decisions"] == 4


# Battles


def test_a_battle_that_ends_is_replaced_in_the_same_step_and_the_others_go_on(env: ArenaVectorEnv) -> None:
    arena = env._battles
    arena.simulation.status[at.DECISION, 1] = 3  # the second battle ends by time in the next decision
    before = env.step(still(env))
    observations, _, terminations, _, infos = before
    assert terminations.tolist() == infos["_final_obs"].tolist() == infos["_final_info"].tolist() == [False, True, False, False]
    last = infos["final_obs"][1]
    assert env.single_observation_space.contains(last)
    clock = -1  # last number of the state: share of the time that is left
    assert last["state"][clock] == 0.0
    assert observations["state"][:, clock].tolist() == [0.75, 1.0, 0.75, 0.75]
    assert infos["final_info"]["decisions"].tolist() == [0, 4, 0, 0]
    assert infos["final_info"]["by_time"].tolist() == [False, True, False, False]
    assert infos["final_info"]["score"][1] == 0.5
    *_, infos = env.step(still(env))
    assert "final_obs" not in infos


@pytest.mark.slow
def test_battles_are_those_of_an_arena() -> None:
    """The arena that replaces battles itself goes through the same states with the same actions."""
    config = ArenaConfig(battles=4, team_size=2, size=16, maps=2, seconds=3.0, contacts=2, allies=1, state_view=True)
    env, arena = ArenaVectorEnv(config, "random", num_envs=4), Arena(config, seed=3)
    env.reset(seed=3)
    arena.reset()
    ends = 0
    for _ in range(30):
        doom(env._battles, unit=0), doom(arena, unit=0)
        _, _, terminations, _, _ = env.step(env.action_space.sample())
        result = arena.step(env._battles.simulation.actions)
        assert terminations.tolist() == result.ended.tolist()
        assert [hash_of(env._battles, battle) for battle in range(4)] == [hash_of(arena, battle) for battle in range(4)]
        assert torch.equal(env._battles.simulation.views["observation"], arena.simulation.views["observation"])
        ends += int(terminations.sum())
    assert 4 < ends < 120


def test_the_learner_drives_its_team_on_alternating_sides_and_the_opponent_the_other(env: ArenaVectorEnv) -> None:
    actions = still(env)
    actions[:, :, list(env.heads).index("forward")] = 2
    joined = env._joined(actions, env._now)
    motion = joined["motion"].view(4, 2, 2, 4)
    sides = torch.arange(4) % 2
    assert (motion[torch.arange(4), sides] == torch.tensor([1.0, 0.0, 0.0, -1.0])).all()
    others = motion[torch.arange(4), 1 - sides]
    assert (others != 0).any(-1).all(), "the strong bot walks to the zone"
    observations, _ = env.reset(seed=0)
    seen = env._battles.simulation.views["observation"].numpy()
    for battle, side in enumerate(sides.tolist()):
        assert np.array_equal(observations["observation"][battle], seen[battle, 2 * side : 2 * side + 2])


@pytest.mark.slow
def test_a_function_can_be_the_opponent() -> None:
    asked: list[Observations] = []

    def opponent(observations: Observations) -> np.ndarray[Any, Any]:
        asked.append(observations)
        return np.tile([0, 0, 0, 2, 1, 2, 0], (4, 2, 1))  # forward

    env = ArenaVectorEnv(TINY, opponent, num_envs=4)
    env.reset(seed=0)
    joined = env._joined(still(env), env._now)
    assert joined["motion"].view(4, 2, 2, 4)[0, :, :, 0].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert joined["motion"].view(4, 2, 2, 4)[1, :, :, 0].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    env.step(still(env))
    assert env.observation_space.contains(asked[-1])
    env.opponent = lambda observations: np.zeros((4, 2), np.int64)
    with pytest.raises(ValueError, match=r"whole numbers of shape \(4, 2, 7\)"):
        env.step(still(env))


@pytest.mark.slow
def test_rewards_are_those_of_the_team_and_the_score_tells_who_won() -> None:
    env = ArenaVectorEnv(TINY, "weak", num_envs=2)
    env.reset(seed=0)
    doom(env._battles, unit=2)
    put(env._battles, 3, hit_points=1e-4)  # the blue team dies in both battles; the learner is red in the first, blue in the second
    _, rewards, terminations, _, infos = env.step(still(env))
    assert terminations.all()
    assert infos["final_info"]["score"].tolist() == [1.0, 0.0]
    assert rewards[0] > 0 > rewards[1]
    assert np.allclose(rewards, infos["unit_reward"].mean(1))
    assert infos["is_alive"].all(), "of the next battles"


@pytest.mark.slow
def test_flat_masks_allow_a_target_where_a_weapon_may_aim_at_it() -> None:
    env = ArenaVectorEnv(ArenaConfig(team_size=3, size=16, maps=2, seconds=30.0, contacts=3, allies=2), "weak", num_envs=4)
    observations, _ = env.reset(seed=0)
    rng, narrow = np.random.default_rng(0), 0
    for _ in range(40):
        fire, aimed = observations["action_mask"][..., :8], observations["action_mask"][..., 8:11]
        target = observations["target_mask"]
        for battle in range(4):
            for unit in range(3):
                weapons = np.flatnonzero(fire[battle, unit, 1:]) + 1
                allowed = target[battle, unit, weapons].any(0) if len(weapons) else [1, 0, 0]
                assert aimed[battle, unit].tolist() == [int(one) for one in allowed]
                narrow += 0 < sum(allowed) < 3 and len(weapons) > 0
        observations, *_ = env.step(draw_allowed(env, observations, rng))
    assert narrow > 0


# Scenarios


@pytest.mark.slow
def test_a_test_fights_the_battles_of_the_leaderboard() -> None:
    """A policy that acts through the environment gets the same results as in a match on the test maps."""
    config = SMALL.test_arena(8)
    policy = make_policy(
        UNIT, NetworkConfig(hidden_size=8), config, generator=torch.Generator().manual_seed(1), device=torch.device("cpu")
    ).eval()
    match = MatchArena(config, seed=SMALL.test_seed, device="cpu").play(policy, "random")
    env = ArenaVectorEnv(SMALL, "random", num_envs=8, split="test")
    observations, _ = env.reset()
    points, lengths, state = np.full(8, np.nan), np.zeros(8), None
    while np.isnan(points).any():
        flat = np.split(observations["action_mask"].reshape(16, -1), np.cumsum(list(env.heads.values()))[:-1], axis=1)
        masks = {name: torch.from_numpy(mask).bool() for name, mask in zip(env.heads, flat, strict=True)}
        masks["target"] = torch.from_numpy(observations["target_mask"].reshape(16, 8, 2)).bool()
        seen = torch.from_numpy(observations["observation"].reshape(16, -1))
        actions, state = policy.act(seen, state, masks=masks)
        observations, _, terminations, _, infos = env.step(np.stack([actions[name].numpy() for name in env.heads], 1).reshape(8, 2, 7))
        state[terminations.repeat(2)] = 0.0
        for battle in np.flatnonzero(terminations & np.isnan(points)):
            points[battle], lengths[battle] = (infos["final_info"][name][battle] for name in ("score", "decisions"))
    assert tuple(points) == match.points
    assert lengths.mean() == match.decisions
    assert len(set(points)) > 1


@pytest.mark.slow
def test_nobody_trains_on_the_test_maps_of_a_scenario() -> None:
    with pytest.raises(ValueError, match="makes the test maps of small-v1"):
        ArenaVectorEnv(SMALL, num_envs=2, seed=SMALL.test_seed)
    with pytest.raises(ValueError, match="makes the test maps of small-v1"):
        ArenaVectorEnv(SMALL, num_envs=2).reset(seed=SMALL.test_seed)
    test = ArenaVectorEnv(SMALL, num_envs=2, split="test")
    first, _ = test.reset()
    again, _ = test.reset(seed=3)
    assert data_equivalence(first, again, exact=True), "a test has its own seed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scenario": "2v2"}, "there is no scenario '2v2'"),
        ({"opponent": "storng-v1"}, "there is no bot 'storng-v1'; did you mean 'strong-v1'"),
        ({"scenario": TINY, "split": "test"}, "only a scenario has test maps"),
        ({"split": "tset"}, "split must be 'train' or 'test'; got 'tset'"),
        ({"split": "test", "num_envs": 3}, "an even number of battles from 2 to 1024"),
    ],
)
def test_a_wrong_argument_is_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArenaVectorEnv(**arguments)


def test_wrong_actions_are_refused_and_change_nothing(env: ArenaVectorEnv) -> None:
    before = hash_of(env._battles)
    with pytest.raises(ValueError, match=r"whole numbers of shape \(4, 2, 7\) \(battle, unit, head\); got float64 of shape \(4, 2, 7\)"):
        env.step(still(env).astype(np.float64))
    wrong = still(env)
    wrong[2, 1, 5] = 5
    with pytest.raises(ValueError, match="battle 2, unit 1: yaw is 5, but must be from 0 to 4"):
        env.step(wrong)
    assert hash_of(env._battles) == before
    with pytest.raises(ValueError, match=r"begin with reset\(\)"):
        ArenaVectorEnv(TINY, num_envs=2).step(still(env)[:2])
