"""Effects of hits on hit points, legs, stability, heat, suppression and paint.

Shapes: B = battles, U = units; in [B, U, U] the attacker comes before the victim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.config import ticks
from esper.arena.specs import PHYSICS
from esper.arena.state import Units
from esper.arena.tables import Tables


class Hits(NamedTuple):
    """Sum of all hits of one tick."""

    damage: Tensor  # [B, U, U] by attacker and victim
    legs: Tensor  # [B, U]
    stability: Tensor  # [B, U]
    heat: Tensor  # [B, U]
    suppressed: Tensor  # [B, U] int32 ticks
    painted: Tensor  # [B, U] int32 ticks


def together(first: Hits, second: Hits) -> Hits:
    """Return all hits of both. Suppression and paint last for the longer of the two times."""
    return Hits(
        damage=first.damage + second.damage,
        legs=first.legs + second.legs,
        stability=first.stability + second.stability,
        heat=first.heat + second.heat,
        suppressed=torch.maximum(first.suppressed, second.suppressed),
        painted=torch.maximum(first.painted, second.painted),
    )


def strike(units: Units, hits: Hits, tables: Tables) -> tuple[Units, Tensor]:
    """Apply hits to units. Also return the damage by attacker and victim [B, U, U].

    The damage is a share of the victim's full hit points. Its sum over the attackers is at most the share that the victim had left.
    """
    total = hits.damage.sum(1)  # [B, U] by victim
    taken = torch.minimum(total, units.hit_points)
    share = taken / total.clamp_min(1e-6) / tables.units.hit_points
    by_whom = hits.damage * share.unsqueeze(1)
    alive = units.is_alive
    struck = units._replace(
        hit_points=units.hit_points - taken,
        legs=(units.legs - hits.legs).clamp_min(0.0),
        stability=(units.stability - hits.stability * alive).clamp_min(0.0),
        heat=units.heat + hits.heat * alive,
        suppressed=torch.maximum(units.suppressed, hits.suppressed),
        painted=torch.maximum(units.painted, hits.painted),
        harm=torch.where(by_whom > 0, ticks(PHYSICS.assist_s), units.harm),
    )
    return struck, by_whom


def one_hot(index: Tensor, size: int) -> Tensor:
    """Return [..., size] bool, true at the index."""
    return index.unsqueeze(-1) == torch.arange(size, device=index.device)
