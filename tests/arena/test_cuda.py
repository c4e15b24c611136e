"""The arena on a GPU, where a decision is recorded once and replayed."""

from __future__ import annotations

import pytest
import torch

from esper.arena.arena import Arena, no_actions
from esper.arena.bots import Bot
from esper.arena.env import ArenaEnv
from esper.arena.state import cloned, named_tensors
from esper.vecenv import check_env
from tests.arena.worlds import small_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def assert_equal(one: Arena, other: Arena) -> None:
    for (name, first), (_, second) in zip(named_tensors(one.state), named_tensors(other.state), strict=True):
        assert torch.equal(first, second), name


def test_a_recorded_step_equals_a_plain_step():
    config = small_config(team_size=3, battles=4, seconds=10.0)
    recorded, plain = Arena(config, device="cuda"), Arena(config, device="cuda", record=False)
    bot = Bot("strong", plain)
    for _ in range(60):  # beyond the end of battles
        actions = {name: value.clone() for name, value in bot.act().items()}
        first, second = recorded.step(actions), plain.step(actions)
        assert torch.equal(first.observation, second.observation)
        assert torch.equal(first.reward, second.reward)
        assert_equal(recorded, plain)


def test_a_recorded_arena_goes_on_from_a_state_that_is_loaded_or_set():
    config = small_config(team_size=2, battles=2)
    arena, other = Arena(config, device="cuda"), Arena(config, device="cuda")
    bot = Bot("strong", arena)
    for _ in range(5):
        arena.step(bot.act())
    saved, state = arena.state_dict(), cloned(arena.state)
    other.step(no_actions(config, "cuda"))
    other.load_state_dict(saved)
    assert_equal(arena, other)
    actions = {name: value.clone() for name, value in bot.act().items()}
    arena.step(actions)
    other.step(actions)
    assert_equal(arena, other)
    arena.state = state
    arena.step(actions)
    assert_equal(arena, other)


def test_a_recorded_arena_that_is_opened_with_another_seed_equals_a_new_one_of_it():
    config = small_config(team_size=2, battles=4, maps=2, seconds=4.0)
    arena, new = Arena(config, seed=1, device="cuda"), Arena(config, seed=2, device="cuda")
    bot = Bot("strong", new)
    arena.step(no_actions(config, "cuda"))  # recorded with the maps of the first seed
    arena.reset(2)
    new.reset()
    for _ in range(40):  # beyond the end of battles, whose maps follow from the seed
        actions = {name: value.clone() for name, value in bot.act().items()}
        arena.step(actions)
        new.step(actions)
        assert_equal(arena, new)


def test_recorded_steps_on_a_lagging_gpu_equal_synchronised_steps():
    """Actions are made on another stream, and scenes are read there, while the GPU has other work."""
    config = small_config(team_size=3, battles=4, seconds=10.0)
    recorded, plain = Arena(config, device="cuda"), Arena(config, device="cuda", record=False)
    bot, other = Bot("strong", plain), torch.cuda.Stream()
    main = torch.cuda.current_stream()
    seen, expected = [], []
    for _ in range(60):
        actions = {name: value.clone() for name, value in bot.act().items()}
        torch.cuda.synchronize()
        expected.append(plain.step(actions).observation.clone())
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(1_000_000)
            late = {name: value.clone() for name, value in actions.items()}
        main.wait_stream(other)
        torch.cuda._sleep(1_000_000)
        result = recorded.step(late)
        other.wait_stream(main)
        with torch.cuda.stream(other):
            seen.append(result.observation.clone())
        main.wait_stream(other)  # the next step writes over the scene
    torch.cuda.synchronize()
    assert all(torch.equal(one, two) for one, two in zip(seen, expected, strict=True))
    assert_equal(recorded, plain)


def test_a_wrong_action_is_named_at_the_next_check():
    config = small_config(team_size=2, battles=3)
    arena = Arena(config, device="cuda")
    actions = no_actions(config, "cuda")
    arena.step(actions)
    arena.check()
    actions["motion"][6, 1] = float("nan")
    arena.step(actions)
    with pytest.raises(ValueError, match=r"battle 1, unit 2 .*NaN"):
        arena.check()
    arena.reset()
    arena.check()


def test_the_environment_keeps_its_contract_on_a_gpu():
    check_env(ArenaEnv(small_config(team_size=1, battles=2, seconds=4.0), device="cuda"))
