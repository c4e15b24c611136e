"""Weapons: decide which units fire in a tick, apply instant hits, and launch projectiles.

Shapes: B = battles, U = units, W = kinds of weapons, K = projectile slots of one unit. Everything is [B, U], by the unit that fires,
unless stated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.damage import Hits, one_hot
from esper.arena.map_columns import unit_at
from esper.arena.motion import can_act
from esper.arena.orders import Orders
from esper.arena.specs import PHYSICS
from esper.arena.state import Shells, Units
from esper.arena.tables import Tables

REAR_COS = math.cos(math.radians(PHYSICS.rear_deg))


class Aim(NamedTuple):
    """Properties of the weapon and target that each unit chose, looked up once per decision."""

    orders: Orders
    at_weapon: Tensor  # [B, U, W] bool, true at the chosen weapon
    at_target: Tensor  # [B, U, U] bool, true at the target
    range_m: Tensor
    arc_cos: Tensor
    heat: Tensor
    speed: Tensor
    is_instant: Tensor
    is_ballistic: Tensor
    cooldown: Tensor  # int32
    life: Tensor  # int32
    damage: Tensor
    target_heat: Tensor
    leg_share: Tensor
    paints: Tensor  # int32


def take_aim(orders: Orders, units: Units, tables: Tables) -> Aim:
    """Look up the weapons and targets of the orders."""
    weapons, weapon = tables.weapons, orders.weapon
    is_painted = unit_at(units.painted, orders.target) > 0
    is_instant = weapons.is_instant[weapon]
    return Aim(
        orders=orders,
        at_weapon=one_hot(weapon, len(weapons.damage)),
        at_target=one_hot(orders.target, units.heat.shape[1]),
        range_m=torch.where(is_painted, weapons.painted_range_m[weapon], weapons.range_m[weapon]),
        arc_cos=weapons.arc_cos[weapon],
        heat=weapons.heat[weapon],
        speed=weapons.speed[weapon],
        is_instant=is_instant,
        is_ballistic=weapons.is_ballistic[weapon],
        cooldown=weapons.cooldown[weapon],
        life=weapons.life[weapon],
        damage=weapons.damage[weapon],
        target_heat=weapons.target_heat[weapon],
        leg_share=weapons.leg_share[weapon],
        paints=weapons.paints[weapon],
    )


class Shots(NamedTuple):
    """Shots of one tick."""

    fired: Tensor  # bool
    line: Tensor  # [B, U, 3] from the feet of the unit that fires to those of the target
    distance: Tensor


def pull_triggers(units: Units, aim: Aim) -> tuple[Units, Shots]:
    """Fire the ordered weapons that are loaded and have a living target in range and in their arc, if the unit can act and is not venting.

    Firing adds heat and starts the cooldown. Also return the shots.
    """
    line = unit_at(units.position, aim.orders.target) - units.position
    distance = torch.linalg.vector_norm(line, dim=-1)
    ahead = line[..., 0] * units.heading.cos() + line[..., 1] * units.heading.sin()
    flat = torch.linalg.vector_norm(line[..., :2], dim=-1)
    is_ready = ((units.cooldown == 0) & aim.at_weapon).any(-1)
    is_in_arc = ahead >= aim.arc_cos * flat - 1e-6
    fired = aim.orders.is_firing & is_ready & is_in_arc & (distance <= aim.range_m)
    fired = fired & can_act(units) & ~units.is_venting & unit_at(units.is_alive, aim.orders.target)
    loading = torch.where(fired.unsqueeze(-1) & aim.at_weapon, aim.cooldown.unsqueeze(-1), units.cooldown)
    return units._replace(heat=units.heat + fired * aim.heat, cooldown=loading), Shots(fired, line, distance)


def hit_at_once(units: Units, aim: Aim, shots: Shots) -> Hits:
    """Return the hits of lasers, flamers and painters, which strike in the tick in which they fire. Hits from behind do more damage."""
    struck = shots.fired & aim.is_instant
    heading = unit_at(units.heading, aim.orders.target)
    # Cosine of the angle between the victim's nose and the direction to the unit that fires.
    flat = torch.linalg.vector_norm(shots.line[..., :2], dim=-1).clamp_min(1e-6)
    facing = -(shots.line[..., 0] * heading.cos() + shots.line[..., 1] * heading.sin()) / flat
    damage = aim.damage * torch.where(facing < REAR_COS, PHYSICS.rear_factor, 1.0) * struck
    to_whom = aim.at_target & struck.unsqueeze(-1)  # [B, U, U]
    by_target = damage.unsqueeze(-1) * to_whom
    none = torch.zeros_like(units.painted)
    return Hits(
        damage=by_target,
        legs=(by_target * aim.leg_share.unsqueeze(-1)).sum(1),
        stability=torch.zeros_like(units.heat),
        heat=(aim.target_heat.unsqueeze(-1) * to_whom).sum(1),
        suppressed=none,
        painted=torch.where(to_whom, aim.paints.unsqueeze(-1), 0).amax(1),
    )


def launch(units: Units, shells: Shells, aim: Aim, shots: Shots) -> tuple[Shells, Tensor]:
    """Launch projectiles from the muzzle towards their targets. Ballistic ones lead the target and fly in an arc.

    Also return [B, U] bool: shots that found no free slot.
    """
    is_launched = shots.fired & ~aim.is_instant
    speed = aim.speed.clamp_min(1.0)
    seconds = shots.distance / speed
    lead = unit_at(units.velocity, aim.orders.target)[..., :2] * (seconds * aim.is_ballistic).unsqueeze(-1)
    line = torch.cat((shots.line[..., :2] + lead, shots.line[..., 2:]), -1)
    flight_s = torch.linalg.vector_norm(line, dim=-1).clamp_min(1e-3) / speed
    velocity = line / flight_s.unsqueeze(-1)
    # Upward speed that lets a ballistic projectile come down at the height of its target.
    lob = 0.5 * PHYSICS.gravity_mps2 * flight_s * aim.is_ballistic
    velocity = torch.cat((velocity[..., :2], (velocity[..., 2] + lob).unsqueeze(-1)), -1)
    muzzle = torch.cat((units.position[..., :2], (units.position[..., 2] + PHYSICS.muzzle_m).unsqueeze(-1)), -1)

    # Each launched projectile takes the first free slot of its unit.
    is_free = shells.life == 0  # [B, U, K]
    slot = is_free.int().argmax(-1)
    takes = one_hot(slot, is_free.shape[-1]) & is_free & is_launched.unsqueeze(-1)
    overflow = is_launched & ~is_free.any(-1)
    takes_3 = takes.unsqueeze(-1)
    return Shells(
        position=torch.where(takes_3, muzzle.unsqueeze(2), shells.position),
        velocity=torch.where(takes_3, velocity.unsqueeze(2), shells.velocity),
        weapon=torch.where(takes, aim.orders.weapon.unsqueeze(-1), shells.weapon),
        target=torch.where(takes, aim.orders.target.unsqueeze(-1), shells.target),
        life=torch.where(takes, aim.life.unsqueeze(-1), shells.life),
    ), overflow
