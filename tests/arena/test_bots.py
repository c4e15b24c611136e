"""The scripted players: legal actions, no hidden knowledge, and the order of their strengths."""

from __future__ import annotations

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.bots import Bot
from esper.arena.config import BOTS, ArenaConfig
from esper.arena.native import layout as at
from esper.arena.orders import wrong_values
from esper.league.matches import MatchArena
from tests.arena.worlds import make_duel, small_config


@pytest.mark.parametrize("name", [name for name in BOTS if name != "random"])
def test_motion_is_at_most_1_where_rounding_made_a_heading_longer(name):
    arena = make_duel(metres=5.0)
    arena.simulation.unit[at.COS, 0, 0] = 1.0 + 2**-20  # looks along the x axis at an enemy
    arena.simulation.unit[at.COS, 0, 1] = -1.0 - 2**-20
    arena.look()
    for decision in range(200):  # each period of decisions draws whether and where to a unit roams
        arena.simulation.status[at.DECISION] = decision
        assert not wrong_values(Bot(name, arena).act(), arena.config).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTS)
def test_a_bot_gives_actions_that_are_allowed(name):
    arena = Arena(small_config(team_size=2, battles=4, seconds=20.0))
    result, bot = arena.reset(), Bot(name, arena)
    for _ in range(24):
        actions = bot.act()
        assert not wrong_values(actions, arena.config).any()
        rows = torch.arange(len(actions["fire"]))
        alive = arena.is_alive.flatten()
        assert (result.masks["vent"][rows, actions["vent"]] | ~alive).all()
        assert (result.masks["fire"][rows, actions["fire"]] | ~alive).all()
        assert (result.masks["target"][rows, actions["fire"], actions["target"]] | ~alive | (actions["fire"] == 0)).all()
        result = arena.step(actions)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weak", "middle", "strong"])
def test_a_bot_ignores_units_that_it_does_not_sense(name):
    arena = Arena(small_config(team_size=2, battles=4, size=48, seconds=30.0))
    arena.reset()
    bot = Bot(name, arena)
    for _ in range(6):
        unit, kept = arena.simulation.unit, arena.simulation.unit.clone()
        before = {head: value.clone() for head, value in bot.act().items()}
        sensed = arena.simulation.number[at.SENSED, :, :2]  # by both of the first team, as bits
        hidden = torch.stack([(sensed >> enemy & 1 == 0).all(1) for enemy in range(2)], 1)  # [B, 2] of the second team
        assert hidden.any()
        for field, value in ((at.X, kept[at.X].flip(0) + 3.0), (at.Y, kept[at.Y].flip(0) + 3.0), (at.HIT_POINTS, torch.ones(4, 4))):
            unit[field, :, 2:] = torch.where(hidden, value[:, 2:], kept[field, :, 2:])
        after = bot.act()
        first = (torch.arange(16) % 4) < 2
        for head, choice in before.items():
            assert torch.equal(choice[first], after[head][first]), head
        unit.copy_(kept)
        arena.step(before)


def test_an_unknown_bot_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no bot is named 'stronk'; there are random, weak, middle, strong"):
        Bot("stronk", Arena(small_config()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rivals"), [("middle", ("strong", "weak")), ("weak", ("random",))])
def test_every_strength_beats_the_one_below_it(name, rivals):
    ground = MatchArena(ArenaConfig(battles=10, team_size=5, size=32, seconds=30.0), seed=3, device="cpu", rivals=len(rivals))
    for rival, result in zip(rivals, ground.play_all(name, rivals), strict=True):
        score = result.record.score
        assert (score if BOTS.index(rival) < BOTS.index(name) else 1 - score) >= 0.6, rival
