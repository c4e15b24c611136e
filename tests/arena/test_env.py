"""The arena as a vecenv: rows are units. Rows of dead units go on without acting, or wait for the next battle if the dead are not paid."""

from __future__ import annotations

import msgspec
import pytest
import torch

from esper.arena.arena import no_actions
from esper.arena.config import ArenaRewardConfig
from esper.arena.env import ArenaEnv, observation_spec
from esper.arena.native import layout as at
from esper.arena.observe import observation_width, state_width
from esper.vecenv import Saveable, VecEnv, check_env, check_timestep
from tests.arena.worlds import doom, hash_of, random_actions, small_config

TINY = small_config(battles=2, team_size=2, pack=("medium", "light"), size=16, maps=2, seconds=1.0)  # four decisions


def play(env, decisions):
    return [env.step(no_actions(env.config)) for _ in range(decisions)]


@pytest.mark.slow
def test_the_arena_environment_keeps_the_contract():
    settings = {"pack": ("medium", "light"), "size": 16, "maps": 2, "seconds": 1.5, "state_view": True}
    env = ArenaEnv(small_config(battles=2, team_size=2, smallest_team=1, **settings))
    assert isinstance(env, VecEnv)
    assert isinstance(env, Saveable)
    check_env(env, steps=4)  # and ten more from a saved state, twice, over the end of battles


def test_every_unit_of_every_battle_is_a_row():
    config = small_config(battles=3, team_size=2, pack=("medium", "light"), size=16, state_view=True)
    env = ArenaEnv(config)
    timestep = env.reset(seed=0)
    check_timestep(env, timestep)
    assert env.num_envs == 12
    assert observation_spec(config)["obs"].shape == (observation_width(config),)
    assert timestep.obs["state"].shape == (12, state_width(config))
    unit_of_battle = timestep.obs["obs"].unflatten(0, (3, 4))
    assert torch.equal(unit_of_battle[1, 2], env.result.observation[1, 2])


def play_with_a_death(config):
    """Return (ends, valid, acts) of five decisions, each by name of a row, and the steps. Battles have four decisions."""
    env = ArenaEnv(config)
    env.reset(seed=0)
    doom(env.arena, unit=1)
    steps = play(env, 5)
    flags = [
        {name: [bool(getattr(step, flag)[row]) for step in steps] for name, row in {"dead": 1, "alive": 0}.items()}
        for flag in ("terminated", "valid", "acts")
    ]
    assert not any(step.truncated.any() for step in steps)
    return *flags, steps


@pytest.mark.slow
def test_a_dead_unit_is_paid_until_its_battle_ends_but_does_not_act():
    ends, valid, acts, steps = play_with_a_death(msgspec.structs.replace(TINY, reward=ArenaRewardConfig(approach=0.0)))
    assert ends == {"dead": [False, False, False, True, False], "alive": [False, False, False, True, False]}
    assert valid == {"dead": [True] * 5, "alive": [True] * 5}
    assert acts == {"dead": [True, False, False, False, True], "alive": [True] * 5}
    assert all(step.reward[1] == step.reward[0] for step in steps[1:])  # what the team gets


@pytest.mark.slow
def test_a_death_ends_the_unit_once_and_its_row_waits_for_the_next_battle_if_the_dead_are_not_paid():
    ends, valid, acts, steps = play_with_a_death(msgspec.structs.replace(TINY, reward=ArenaRewardConfig(pays_dead=False)))
    assert ends == {"dead": [True, False, False, False, False], "alive": [False, False, False, True, False]}
    assert valid == acts == {"dead": [True, False, False, False, True], "alive": [True] * 5}
    assert all(step.reward[1] == 0 for step in steps[1:4])


@pytest.mark.slow
def test_the_end_of_time_terminates_every_unit():
    env = ArenaEnv(TINY)
    env.reset(seed=0)
    *before, last = play(env, 4)
    assert not any(step.terminated.any() for step in before)
    assert last.terminated.all()
    assert env.result.by_time.all()
    assert not last.truncated.any()


@pytest.mark.slow
def test_a_battle_that_ended_begins_anew_in_the_same_step():
    env = ArenaEnv(TINY)
    env.reset(seed=0)
    last = play(env, 4)[-1]
    assert env.arena.simulation.status[at.DECISION].tolist() == [0, 0]
    assert env.arena.simulation.status[at.EPISODE].tolist() == [1, 1]
    assert torch.equal(last.obs["obs"], env.arena.look().observation.flatten(0, 1))


def test_absent_units_are_never_valid():
    env = ArenaEnv(small_config(battles=4, team_size=2, smallest_team=1, pack=("medium", "light"), size=16, maps=2))
    env.reset(seed=0)
    present = env.arena.simulation.number[at.IS_PRESENT] != 0
    assert not present.all()  # some battles are smaller
    assert torch.equal(present[:, :2], present[:, 2:])  # for both sides
    timestep = play(env, 1)[0]
    assert torch.equal(timestep.valid.view(4, 4), present)
    assert torch.equal(timestep.acts.view(4, 4), present)
    assert not timestep.reward[~timestep.valid].any()
    assert not timestep.terminated.any()


def test_after_a_reset_every_row_begins():
    env = ArenaEnv(TINY)
    env.reset(seed=0)
    doom(env.arena, unit=1)
    play(env, 1)
    timestep = env.reset()
    assert timestep.valid is None
    assert timestep.acts is None
    assert not timestep.reward.any()
    assert env.arena.is_alive.all()


@pytest.mark.slow
def test_a_seed_says_which_battles_are_fought():
    env, other = ArenaEnv(TINY, seed=3), ArenaEnv(TINY, seed=4)
    assert torch.equal(env.reset().obs["obs"], other.reset(seed=3).obs["obs"])
    assert not torch.equal(env.reset(seed=3).obs["obs"], env.reset(seed=5).obs["obs"])


@pytest.mark.slow
def test_a_saved_battle_goes_on_in_another_arena():
    env, other = ArenaEnv(TINY, seed=3), ArenaEnv(TINY, seed=8)
    generator = torch.Generator().manual_seed(0)
    env.reset()
    env.step(random_actions(env.arena, generator))
    saved = env.state_dict()
    actions = [random_actions(env.arena, generator) for _ in range(4)]
    expected = [env.step(action) for action in actions]
    other.load_state_dict(saved)
    for action, step in zip(actions, expected, strict=True):
        again = other.step(action)
        assert torch.equal(again.obs["obs"], step.obs["obs"])
        assert torch.equal(again.reward, step.reward)
    assert [hash_of(other.arena, battle) for battle in range(2)] == [hash_of(env.arena, battle) for battle in range(2)]


def test_a_saved_state_does_not_change_afterwards():
    env = ArenaEnv(TINY)
    env.reset(seed=0)
    saved = env.state_dict()
    env.arena.set_largest_team(1)
    env.load_state_dict(saved)
    assert int(env.arena.largest_team) == TINY.team_size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: saved["state"].pop("cooldown"), "missing: .*cooldown"),
        (lambda saved: saved["state"].update(status=torch.zeros(2)), r"status should be .*; got .* \(2,\)"),
    ],
)
def test_a_damaged_state_of_another_seed_is_refused_and_leaves_the_arena_as_it_was(damage, message):
    env, other = ArenaEnv(TINY, seed=3), ArenaEnv(TINY, seed=8)
    saved = other.state_dict()
    damage(saved)
    arena = env.arena
    before = arena.seed, [hash_of(arena, battle) for battle in range(2)], [grid.clone() for grid in arena.grids]
    with pytest.raises(ValueError, match=message):
        env.load_state_dict(saved)
    assert (arena.seed, [hash_of(arena, battle) for battle in range(2)]) == before[:2]
    assert all(torch.equal(one, two) for one, two in zip(arena.grids, before[2], strict=True))


def test_a_state_of_another_arena_is_refused_by_name():
    env, smaller = ArenaEnv(TINY), ArenaEnv(small_config(size=16))
    with pytest.raises(ValueError, match=r"should be torch.\w+ \(\d+, 2, .*; got torch.\w+ \(\d+, 1, "):
        env.load_state_dict(smaller.state_dict())
