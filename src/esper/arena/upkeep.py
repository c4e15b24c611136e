"""Effects on units in a tick that no action causes: timers, terrain, heat and balance.

Shapes: B = battles, U = units. Everything is [B, U] unless stated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.arena.config import ticks
from esper.arena.map_columns import columns, read
from esper.arena.orders import Orders
from esper.arena.specs import PHYSICS
from esper.arena.state import Clouds, Units, World
from esper.arena.tables import Tables


def count_down(units: Units, orders: Orders) -> Units:
    """Reduce every timer by a tick, and set venting as ordered for units that are alive and not shut down."""
    return units._replace(
        fallen=(units.fallen - 1).clamp_min(0),
        suppressed=(units.suppressed - 1).clamp_min(0),
        painted=(units.painted - 1).clamp_min(0),
        cooldown=(units.cooldown - 1).clamp_min(0),
        harm=(units.harm - 1).clamp_min(0),
        is_venting=orders.is_venting & units.is_alive & ~units.is_shut_down,
    )


def clear_smoke(clouds: Clouds) -> Clouds:
    """Reduce the time left of every cloud by a tick."""
    return clouds._replace(left=(clouds.left - 1).clamp_min(0))


def endure(units: Units, world: World, hard: Tensor, tables: Tables) -> Units:
    """Apply the terrain: it heats or cools units that stand on it, lava damages body and legs, and hard landings (`move`) damage legs.

    No unit gets a reward for damage by terrain.
    """
    column = columns(units.position[..., 0], units.position[..., 1], world.floor.shape[1])
    material = read(world.material, column).long()
    on_ground = units.is_grounded & units.is_alive
    burn = tables.materials.damage[material] * (on_ground * PHYSICS.tick_s)
    return units._replace(
        hit_points=(units.hit_points - burn).clamp_min(0.0),
        legs=(units.legs - burn - hard * PHYSICS.landing_damage).clamp_min(0.0),
        heat=units.heat + tables.materials.heat[material] * (on_ground * PHYSICS.tick_s),
    )


def cool(units: Units, tables: Tables) -> Units:
    """Cool units at the rate of their class, three times as fast while venting. Above its cap a unit shuts down until it is at half."""
    rate = tables.units.cooling * torch.where(units.is_venting, PHYSICS.vent_cooling, 1.0)
    cap = tables.units.heat_cap
    heat = torch.minimum((units.heat - rate * PHYSICS.tick_s).clamp_min(0.0), cap * PHYSICS.heat_limit_share)
    stays_down = units.is_shut_down & (heat > cap * PHYSICS.restart_share)
    return units._replace(heat=heat, is_shut_down=((heat > cap) | stays_down) & units.is_alive)


def balance(units: Units) -> Units:
    """Let units without stability fall; they get up with full stability. All others regain stability."""
    falls = (units.stability <= 0) & (units.fallen == 0) & units.is_alive
    steadied = (units.stability + PHYSICS.steadying_per_s * PHYSICS.tick_s).clamp_max(PHYSICS.stability)
    lies = falls | (units.fallen > 0)
    return units._replace(
        fallen=torch.where(falls, ticks(PHYSICS.fallen_s), units.fallen), stability=torch.where(lies, PHYSICS.stability, steadied)
    )
