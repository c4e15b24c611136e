"""The capture zone, and the end of battles.

Shapes: B = battles, U = units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.specs import PHYSICS
from esper.arena.state import BattleStatus, Units, World
from esper.arena.tables import Tables


def is_in_zone(units: Units, world: World) -> Tensor:
    """Return the living units [B, U] bool inside the disc around the centre, on the ground or above it."""
    distance: Tensor = torch.linalg.vector_norm(units.position[..., :2], dim=-1)
    return (distance <= world.zone_radius.unsqueeze(1)) & units.is_alive


def hold(status: BattleStatus, units: Units, world: World, tables: Tables) -> BattleStatus:
    """Update the holder and the score: the team with more tons in the zone holds it for this tick; with equal tons, no team does."""
    tons = tables.units.tons * is_in_zone(units, world)
    half = tons.shape[1] // 2
    lead = tons[:, :half].sum(1) - tons[:, half:].sum(1)
    gained = torch.stack((lead > 0, lead < 0), 1)
    held = (status.score / PHYSICS.tick_s).round() + gained  # add in whole ticks, so that rounding errors do not accumulate
    return status._replace(score=held * PHYSICS.tick_s, holder=torch.where(lead > 0, 0, torch.where(lead < 0, 1, -1)))


class Ending(NamedTuple):
    """Battles that ended in a decision, and their winners."""

    ended: Tensor  # [B] bool
    winner: Tensor  # [B] int64: 0 or 1, -1 for a draw; meaningful where the battle ended
    by_time: Tensor  # [B] bool: it ended only because its time was up


def find_ended(status: BattleStatus, units: Units, config: ArenaConfig) -> Ending:
    """Decide which battles ended, and who won.

    A team wins by holding the zone for half of the battle's time, or by being the only one with living units; when the time is up, by the
    higher score. If both teams meet a condition at once, or the scores are equal, the battle is a draw.
    """
    half = units.heat.shape[1] // 2
    alive = torch.stack((units.is_alive[:, :half].any(1), units.is_alive[:, half:].any(1)), 1)
    has_won = (status.score >= config.seconds * PHYSICS.win_share - 1e-4) | (alive & ~alive.flip(1))
    decided = has_won.any(1) | ~alive.any(1)
    is_over = status.decision >= config.decisions
    ahead = status.score > status.score.flip(1) + 1e-4
    claim = torch.where(decided.unsqueeze(1), has_won, ahead)  # [B, 2]
    winner = torch.where(claim[:, 0] & ~claim[:, 1], 0, torch.where(claim[:, 1] & ~claim[:, 0], 1, -1))
    return Ending(ended=decided | is_over, winner=winner, by_time=is_over & ~decided)
