"""The arena as a Gymnasium vector environment: every unit is a row, and rows of dead units are marked."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")
from gymnasium.vector import AutoresetMode

from esper.arena.config import ArenaConfig, ArenaRewardConfig
from esper.arena.env import ArenaEnv
from esper.vecenv.gymnasium import ToGymnasium, from_gymnasium
from tests.arena.worlds import doom

TINY = ArenaConfig(battles=2, team_size=2, size=16, maps=2, seconds=1.0, contacts=2, allies=1)


@pytest.fixture
def view():
    return ToGymnasium(ArenaEnv(TINY))


def test_rows_are_the_units_of_all_battles(view):
    obs, infos = view.reset(seed=0)
    assert view.num_envs == 8
    assert view.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert view.observation_space.contains(obs)
    assert infos["action_mask/fire"].shape == (8, 8)
    assert infos["action_mask/target"].shape == (8, 8, 2)
    assert infos["action_mask/vent"].shape == (8, 2)


def test_sampled_actions_are_taken(view):
    view.reset(seed=0)
    obs, reward, terminated, truncated, infos = view.step(view.action_space.sample())
    assert view.observation_space.contains(obs)
    assert reward.shape == terminated.shape == truncated.shape == (8,)
    assert infos["valid"].all()
    assert infos["_valid"].all()
    assert infos["acts"].all()
    assert infos["_acts"].all()


@pytest.mark.slow
@pytest.mark.parametrize("pays_dead", [True, False])
def test_the_dead_are_marked_until_their_next_battle(pays_dead):
    """If they are paid, their steps are valid but they do not act; otherwise their steps are not valid."""
    arena = msgspec.structs.replace(TINY, reward=ArenaRewardConfig(pays_dead=pays_dead))
    view = ToGymnasium(ArenaEnv(arena))
    around = from_gymnasium(ToGymnasium(inner := ArenaEnv(arena)))
    view.reset(seed=0)
    around.reset(seed=0)
    for battles in (view.vec_env.arena, inner.arena):
        doom(battles, unit=1)  # in both battles
    actions = {name: np.zeros_like(value) for name, value in view.action_space.sample().items()}  # nobody moves out of it
    ends, valid, acts = [], [], []
    for _ in range(5):  # a battle has four decisions
        _, _, terminated, truncated, infos = view.step(actions)
        step = around.step({name: torch.from_numpy(value) for name, value in actions.items()})
        assert (step.valid.tolist(), step.acts.tolist()) == (infos["valid"].tolist(), infos["acts"].tolist()), (
            "and so are they on the way back"
        )
        ends.append(terminated[1])
        valid.append(infos["valid"][1])
        acts.append(infos["acts"][1])
        assert not truncated.any()
        assert np.delete(infos["valid"], [1, 5]).all()
        assert np.delete(infos["acts"], [1, 5]).all()
    assert ends == ([False, False, False, True, False] if pays_dead else [True, False, False, False, False])
    assert valid == ([True] * 5 if pays_dead else acts)
    assert acts == [True, False, False, False, True]


@pytest.mark.slow
def test_the_arena_can_be_saved_through_the_view(view):
    view.reset(seed=0)
    saved, actions = view.state_dict(), view.action_space.sample()
    first = view.step(actions)
    view.load_state_dict(saved)
    second = view.step(actions)
    assert all(np.array_equal(one, other) for one, other in zip(first[:4], second[:4], strict=True))
