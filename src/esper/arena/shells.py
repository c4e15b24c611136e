"""Projectiles: their flight, their impacts, and the effects of impacts.

Shapes: B = battles, U = units, K = projectile slots of one unit. Everything is [B, U, K] unless stated. In [B, U, K, U], the first U fired
and the last U may be hit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.damage import Hits, one_hot
from esper.arena.fire import REAR_COS
from esper.arena.map_columns import columns, read, unit_at
from esper.arena.specs import PHYSICS
from esper.arena.state import Clouds, Shells, Units, World
from esper.arena.tables import Tables, WeaponTable

_FAR_M = 1e4  # a place far outside of every map


class Impact(NamedTuple):
    """Ends of flights in one tick."""

    ended: Tensor  # bool: hit something or reached the end of its life
    burst: Tensor  # bool: hit something
    victim: Tensor  # int64; meaningful where `is_direct`
    is_direct: Tensor  # bool: a unit was hit
    point: Tensor  # [B, U, K, 3]
    velocity: Tensor  # [B, U, K, 3]
    weapon: Tensor  # int64


def steer(shells: Shells, units: Units, tables: Tables) -> Shells:
    """Turn homing projectiles towards their living targets at the same speed, and let ballistic ones fall."""
    weapons = tables.weapons
    feet = unit_at(units.position, shells.target)
    line = torch.cat((feet[..., :2], (feet[..., 2] + PHYSICS.muzzle_m).unsqueeze(-1)), -1) - shells.position
    speed = weapons.speed[shells.weapon].unsqueeze(-1)
    wanted = line * (speed / torch.linalg.vector_norm(line, dim=-1, keepdim=True).clamp_min(1e-6))
    turned = shells.velocity + (wanted - shells.velocity) * (PHYSICS.steering_per_s * PHYSICS.tick_s)
    turned = turned * (speed / torch.linalg.vector_norm(turned, dim=-1, keepdim=True).clamp_min(1e-6))
    homes = weapons.is_homing[shells.weapon] & unit_at(units.is_alive, shells.target)
    drop = weapons.is_ballistic[shells.weapon] * (PHYSICS.gravity_mps2 * PHYSICS.tick_s)
    fallen = torch.cat((shells.velocity[..., :2], (shells.velocity[..., 2] - drop).unsqueeze(-1)), -1)
    return shells._replace(velocity=torch.where(homes.unsqueeze(-1), turned, fallen))


def advance(shells: Shells, units: Units, world: World) -> tuple[Shells, Impact]:
    """Move all projectiles for one tick, or until they hit a unit other than the one that fired, the terrain, or the edge of the map."""
    flies = shells.life > 0
    when, victim = _first_unit(shells, units, flies)
    wall = _first_terrain(shells, world)
    is_direct = flies & (when <= wall) & (when <= 1.0)
    burst = flies & (is_direct | (wall <= 1.0))
    share = torch.where(burst, torch.minimum(when, wall), 1.0)  # of the tick
    point = shells.position + shells.velocity * (share * PHYSICS.tick_s).unsqueeze(-1)
    life = (shells.life - 1).clamp_min(0)
    ended = flies & (burst | (life == 0))
    after = shells._replace(position=point, life=torch.where(ended, 0, life))
    return after, Impact(ended, burst, victim, is_direct, point, shells.velocity, shells.weapon)


def _first_unit(shells: Shells, units: Units, flies: Tensor) -> tuple[Tensor, Tensor]:
    """Return when each projectile hits a unit's body, as a share of the tick (2: never), and which unit."""
    count = units.heat.shape[1]
    # Move dead units and free slots far away instead of masking: these tensors are small, those below are large.
    body_x = torch.where(units.is_alive, units.position[..., 0], _FAR_M)[:, None, None]  # [B, 1, 1, U]
    body_y, body_z = units.position[:, None, None, :, 1], units.position[:, None, None, :, 2] + 0.5 * PHYSICS.tall_m
    x = torch.where(flies, shells.position[..., 0], -_FAR_M).unsqueeze(-1)  # [B, U, K, 1]
    y, z = shells.position[..., 1:2], shells.position[..., 2:3]
    step_x, step_y, step_z = (shells.velocity * PHYSICS.tick_s).unsqueeze(-2).unbind(-1)
    # The point of the flight nearest to each body, seen from above, as a share of the tick. From here on, operations are in place.
    apart_x, apart_y = body_x - x, body_y - y  # [B, U, K, U]
    along = torch.addcmul(apart_x * step_x, apart_y, step_y)
    nearest = along.div_((step_x.square() + step_y.square()).clamp_min(1e-9)).clamp_(0.0, 1.0)
    # A projectile hits if it is then within the body's radius and height.
    off_x, off_y = apart_x.addcmul_(nearest, step_x, value=-1), apart_y.addcmul_(nearest, step_y, value=-1)
    distance_squared = off_x.square_().addcmul_(off_y, off_y)
    above = (z - body_z).addcmul_(nearest, step_z).abs_()
    others = ~torch.eye(count, dtype=torch.bool, device=flies.device)[:, None, :]  # [U, 1, U]
    meets = (distance_squared <= PHYSICS.radius_m**2) & (above <= 0.5 * PHYSICS.tall_m) & others
    when, victim = torch.where(meets, nearest, 2.0).min(-1)
    return when, victim


def _first_terrain(shells: Shells, world: World) -> Tensor:
    """Return when each projectile is under the terrain or outside of the map, checked at half the tick (0.5) and its end (1); 2: never."""
    size, edge = world.floor.shape[1], world.floor.shape[1] / 2
    first = torch.full_like(shells.position[..., 0], 2.0)
    for share in (1.0, 0.5):
        place = shells.position + shells.velocity * (share * PHYSICS.tick_s)
        top = read(world.floor, columns(place[..., 0], place[..., 1], size))
        is_out = (place[..., :2].abs() > edge).any(-1)
        first = torch.where((place[..., 2] < top) | is_out, share, first)
    return first


def explode(impact: Impact, units: Units, tables: Tables) -> Hits:
    """Return the hits of bursts: on the unit that was hit, with more damage from behind, and on all others within the splash.

    The splash does less damage at a larger distance, and damages bodies and legs alike.
    """
    weapons, weapon = tables.weapons, impact.weapon
    count = units.heat.shape[1]
    hit = one_hot(impact.victim, count) & impact.is_direct.unsqueeze(-1)  # [B, U, K, U]
    heading = unit_at(units.heading, impact.victim)
    flat = torch.linalg.vector_norm(impact.velocity[..., :2], dim=-1).clamp_min(1e-6)
    facing = -(impact.velocity[..., 0] * heading.cos() + impact.velocity[..., 1] * heading.sin()) / flat
    full = weapons.damage[weapon] * impact.burst
    direct = full * torch.where(facing < REAR_COS, PHYSICS.rear_factor, 1.0)

    nearness = splash_share(impact, units, weapons).masked_fill_(hit, 0.0)  # [B, U, K, U]
    splash = full * PHYSICS.splash_share  # damage in the middle of the splash
    shaken = weapons.stability[weapon] * impact.burst
    stuns = weapons.suppresses[weapon].to(full.dtype) * impact.is_direct
    # Sum over projectiles by matrix products: effect of each projectile times the units that it struck.
    struck, near = hit.flatten(1, 2).to(nearness.dtype), nearness.flatten(1, 2)  # [B, U·K, U]
    straight = torch.stack((direct * weapons.leg_share[weapon], shaken, stuns), 1).flatten(2) @ struck  # [B, 3, U]
    around = torch.stack((splash, shaken * PHYSICS.splash_share), 1).flatten(2) @ near  # [B, 2, U]
    longest = weapons.suppresses.max()
    return Hits(
        damage=torch.where(hit, direct.unsqueeze(-1), nearness.mul_(splash.unsqueeze(-1))).sum(2),
        legs=straight[:, 0] + around[:, 0],
        stability=straight[:, 1] + around[:, 1],
        heat=torch.zeros_like(units.heat),
        suppressed=torch.minimum(straight[:, 2].round().int(), longest),  # several hits suppress no longer than one hit
        painted=torch.zeros_like(units.painted),
    )


def splash_share(impact: Impact, units: Units, weapons: WeaponTable) -> Tensor:
    """Return [B, U, K, U]: 1 in the middle of a burst, falling to 0 at the edge of its splash. Measured to the middle of the body."""
    position = units.position[:, None, None]
    apart_x = position[..., 0] - impact.point[..., 0:1]
    apart_y = position[..., 1] - impact.point[..., 1:2]
    apart_z = position[..., 2] + 0.5 * PHYSICS.tall_m - impact.point[..., 2:3]
    distance = apart_x.square_().addcmul_(apart_y, apart_y).addcmul_(apart_z, apart_z).sqrt_()
    radius = weapons.splash_m[impact.weapon] * impact.burst  # 0 without a burst
    share: Tensor = distance.div_(-radius.clamp_min(1e-6).unsqueeze(-1)).add_(1.0).clamp_min_(0.0)
    return share


def terrain_hits(impact: Impact, tables: Tables, size: int) -> tuple[Tensor, Tensor]:
    """Return the columns that bursts hit [B, U·K], and the damage to them, int32."""
    step = impact.velocity * (0.1 * PHYSICS.tick_s)  # a little further, into the column that was hit
    column = columns(impact.point[..., 0] + step[..., 0], impact.point[..., 1] + step[..., 1], size)
    is_inside = (impact.point[..., :2].abs() < size / 2).all(-1)  # projectiles that leave the map hit no column
    damage = tables.weapons.damage[impact.weapon] * (impact.burst & ~impact.is_direct & is_inside)
    return column.flatten(1), damage.to(torch.int32).flatten(1)


def smoke(clouds: Clouds, impact: Impact, tables: Tables) -> Clouds:
    """Place a cloud where a smoke shell ends. It replaces the unit's cloud with the least time left."""
    lasts = tables.weapons.smokes[impact.weapon] * impact.ended  # [B, U, K] int32
    newest, slot = lasts.max(-1)  # at most one smoke shell of a unit ends in a tick, because reloading takes longer than its flight
    point = impact.point.gather(2, slot[..., None, None].expand(-1, -1, 1, 3))  # [B, U, 1, 3]
    takes = one_hot(clouds.left.argmin(-1), clouds.left.shape[-1]) & (newest > 0).unsqueeze(-1)  # [B, U, CLOUDS]
    return Clouds(
        position=torch.where(takes.unsqueeze(-1), point, clouds.position), left=torch.where(takes, newest.unsqueeze(-1), clouds.left)
    )
