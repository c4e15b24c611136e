"""Small leagues for the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.league import League, LeagueConfig, WinRecord

WIN = WinRecord(wins=9, losses=1)


def weights_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"layer.weight": torch.randn(3, 2, generator=generator), "layer.bias": torch.randn(3, generator=generator)}


def small_league(*, size: int = 3, memory: int = 256, is_rated: bool | None = None) -> League:
    return League(["weak", "strong"], LeagueConfig(size=size, memory=memory), is_rated=is_rated)


def promoted(league: League, name: str) -> League:
    """A past self enters, beats the best and becomes a member."""
    step = len(league.entries)
    league.enter(name, step, weights_of(step))
    if league.best:
        league.record(name, league.best, WIN)
    assert league.settle(name).is_promoted
    return league
