"""Players act for units, and keep their memories."""

from __future__ import annotations

import pytest
import torch

from esper.arena.arena import Arena, StepResult
from esper.arena.bots import Bot
from esper.arena.env import unit_rows
from esper.league.players import BotPlayer, PolicyPlayer, join_actions, side_rows
from esper.rl.policy import Policy
from tests.league.arenas import small_policy, small_training

CONFIG = small_training(arena={"battles": 3, "seconds": 30.0})
UNITS = CONFIG.arena.units
ROWS = side_rows(torch.arange(3), torch.tensor([0, 1, 0]), team_size=2)


@pytest.fixture
def arena() -> Arena:
    return Arena(CONFIG.arena, seed=0)


def test_the_rows_of_a_side_are_its_units() -> None:
    assert ROWS.tolist() == [0, 1, 6, 7, 8, 9]
    assert side_rows(torch.tensor([2]), torch.tensor([1]), team_size=5).tolist() == [25, 26, 27, 28, 29]


def test_joined_actions_hold_the_actions_of_every_player_in_its_rows() -> None:
    one = (torch.tensor([3, 0]), {"fire": torch.tensor([1, 2]), "motion": torch.ones(2, 4)})
    other = (torch.tensor([1, 2]), {"fire": torch.tensor([5, 6]), "motion": torch.zeros(2, 4)})
    joined = join_actions([one, other], 4)
    assert joined["fire"].tolist() == [2, 5, 6, 1]
    assert joined["motion"][:, 0].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_bot_acts_for_its_rows_and_another_of_its_seed_goes_on_where_it_was(arena: Arena) -> None:
    result = arena.reset()
    player, again = (BotPlayer(Bot("random", arena, seed=3), ROWS) for _ in range(2))
    player.act(result)
    one, other = player.act(result), again.act(result)
    assert all(len(value) == len(ROWS) for value in one.values())
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_policy_chooses_in_inference_mode(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    player, modes = PolicyPlayer(small_policy(CONFIG), ROWS, units=UNITS), []
    decide = player.policy.decide
    monkeypatch.setattr(player.policy, "decide", lambda *parts: (modes.append(torch.is_inference_mode_enabled()), decide(*parts))[1])
    result = arena.reset()
    for _ in range(2):
        result = arena.step(join_actions([(ROWS, player.act(result)), (ROWS.new_tensor([2, 3, 4, 5, 10, 11]), player.act(result))], 12))
    assert modes == [True] * 4


def test_a_policy_on_another_device_waits_for_that_device(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    player = PolicyPlayer(small_policy(CONFIG), ROWS, units=UNITS)
    player.act(arena.reset())
    assert not waited
    player.is_elsewhere = True
    monkeypatch.setattr(Policy, "device", torch.device("cuda", 1))
    player.act(arena.reset())
    assert waited == [torch.device("cuda", 1)]


def with_ends(result: StepResult, *battles: int) -> StepResult:
    ended = torch.zeros_like(result.ended)
    ended[list(battles)] = True
    return result._replace(ended=ended, is_first=False)


def remembered(player: PolicyPlayer, result: StepResult, rows: slice) -> torch.Tensor:
    """The memories of some rows after a decision in which they began with nothing."""
    obs = {name: value[player.rows][rows] for name, value in unit_rows(result).items()}
    with torch.no_grad():
        return player.policy.step(obs, player.policy.initial_state(len(obs["obs"])))[1]


def test_memories_are_reset_only_where_a_battle_ended(arena: Arena) -> None:
    result = arena.reset()
    player = PolicyPlayer(small_policy(CONFIG), ROWS, units=UNITS)
    player.act(result)
    player.act(with_ends(result))
    before = player.state.clone()
    player.act(with_ends(result, 1))
    torch.testing.assert_close(player.state[2:4], remembered(player, result, slice(2, 4)))
    for others in (slice(0, 2), slice(4, 6)):
        assert not torch.allclose(player.state[others], remembered(player, result, others))
        assert not torch.equal(player.state[others], before[others])


def test_a_reset_clears_all_memories(arena: Arena) -> None:
    result = arena.reset()
    player = PolicyPlayer(small_policy(CONFIG), ROWS, units=UNITS)
    player.act(result)
    player.act(with_ends(result))
    player.act(result)
    torch.testing.assert_close(player.state, remembered(player, result, slice(0, 6)))


def test_without_a_generator_actions_are_the_likeliest_and_with_one_they_are_drawn_within_the_masks(arena: Arena) -> None:
    result = arena.reset()
    policy = small_policy(CONFIG)
    sure = [PolicyPlayer(policy, ROWS, units=UNITS).act(result) for _ in range(2)]
    assert all(torch.equal(value, sure[1][name]) for name, value in sure[0].items())
    drawing = PolicyPlayer(policy, ROWS, units=UNITS, generator=torch.Generator().manual_seed(0))
    drawn = [drawing.act(result) for _ in range(2)]
    assert not torch.equal(drawn[0]["motion"], drawn[1]["motion"])
    for actions in (*sure, *drawn):
        assert result.masks["fire"][ROWS].gather(1, actions["fire"].unsqueeze(1)).all()
        assert (actions["motion"].abs() <= 1).all()


def test_a_player_resumes_with_saved_memories_and_can_be_reset(arena: Arena) -> None:
    result = arena.reset()
    policy = small_policy(CONFIG)
    player, again = (PolicyPlayer(policy, ROWS, units=UNITS) for _ in range(2))
    player.act(result)
    again.load_state_dict(player.state_dict())
    going_on = with_ends(result)
    one, other = player.act(going_on), again.act(going_on)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    player.reset_memory()
    assert not player.state.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_policy_on_the_gpu_acts_in_an_arena_on_the_cpu(arena: Arena) -> None:
    result = arena.reset()
    near = PolicyPlayer(small_policy(CONFIG), ROWS, units=UNITS)
    far = PolicyPlayer(small_policy(CONFIG).to("cuda"), ROWS, units=UNITS)
    for _ in range(3):
        one, other = near.act(result), far.act(result)
        assert other["motion"].device.type == "cpu"
        torch.testing.assert_close(one["motion"], other["motion"], atol=1e-5, rtol=1e-4)
        result = with_ends(result)
