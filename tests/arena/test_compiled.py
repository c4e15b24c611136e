"""The phases fused by torch's compiler, and the fallback where it fails."""

from __future__ import annotations

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.bots import Bot
from tests.arena.worlds import small_config


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("scalar_inductor")
def test_a_compiled_arena_fights_the_same_battles_up_to_rounding():
    config = small_config(team_size=2, battles=2, seconds=30.0)
    plain, compiled = Arena(config), Arena(config, compile=True)
    bot = Bot("strong", plain)
    for _ in range(12):
        actions = bot.act()
        expected, got = plain.step(actions), compiled.step(actions)
        assert torch.allclose(expected.observation, got.observation, atol=1e-3)
        assert torch.allclose(expected.reward, got.reward, atol=1e-4)
    assert torch.equal(plain.state.status.decision, compiled.state.status.decision)


def play(arena: Arena) -> Arena:
    arena.step(Bot("weak", arena).act())
    return arena


def test_battles_continue_without_the_compiler_where_it_fails(monkeypatch):
    def fails(part, **keywords):
        def broken(*arguments, **more):
            raise RuntimeError("no compiler here")

        return broken

    monkeypatch.setattr(torch, "compile", fails)
    config = small_config(team_size=1, battles=1)
    with pytest.warns(RuntimeWarning, match="no compiler here.*runs uncompiled"):
        arena = play(Arena(config, compile=True))
    assert int(arena.state.status.decision[0]) == 1
