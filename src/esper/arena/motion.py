"""Motion of units in one tick: turning, driving, flying and collisions.

Shapes: B = battles, U = units. Everything is [B, U] unless stated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from esper.arena.map_columns import columns, read
from esper.arena.orders import Orders
from esper.arena.specs import CLIMB_M, PHYSICS
from esper.arena.state import Units, World
from esper.arena.tables import Tables


def can_act(units: Units) -> Tensor:
    """Return the units that are alive, on their feet and not shut down."""
    return units.is_alive & (units.fallen == 0) & ~units.is_shut_down


def turn(units: Units, orders: Orders, tables: Tables) -> Units:
    """Turn the heading as ordered, at the rate of the class."""
    change = orders.motion[..., 2] * tables.units.yaw * can_act(units) * PHYSICS.tick_s
    heading = torch.remainder(units.heading + change + math.pi, 2 * math.pi) - math.pi
    return units._replace(heading=heading)


def top_speed(units: Units, world: World, tables: Tables) -> Tensor:
    """Return the present top speed. Broken legs, water, suppression and venting reduce it; it is 0 for units that cannot act."""
    column = columns(units.position[..., 0], units.position[..., 1], world.floor.shape[1])
    surface = tables.materials.speed_factor[read(world.material, column).long()]
    factor = torch.where(units.is_grounded, surface, 1.0)
    factor = factor * torch.where((units.legs <= 0) & units.is_grounded, PHYSICS.broken_legs_factor, 1.0)
    factor = factor * torch.where(units.suppressed > 0, PHYSICS.suppressed_factor, 1.0)
    factor = factor * torch.where(units.is_venting, PHYSICS.venting_factor, 1.0)
    return tables.units.max_speed * factor * can_act(units)


def drive(units: Units, orders: Orders, speed: Tensor, tables: Tables) -> Units:
    """Change the horizontal velocity towards the ordered one, limited by the acceleration of the class; less in the air."""
    forward, strafe = orders.motion[..., 0], orders.motion[..., 1]
    forward = torch.where(forward < 0, forward * PHYSICS.sideways_factor, forward)
    strafe = strafe * PHYSICS.sideways_factor
    # Orders longer than 1 are shortened, so that a unit is not faster diagonally.
    length = (forward.square() + strafe.square()).sqrt().clamp_min(1.0)
    cos, sin = units.heading.cos(), units.heading.sin()
    wanted_x = (forward * cos + strafe * sin) * speed / length
    wanted_y = (forward * sin - strafe * cos) * speed / length
    change_x, change_y = wanted_x - units.velocity[..., 0], wanted_y - units.velocity[..., 1]
    # The largest change of the velocity in one tick.
    most = tables.units.max_speed * torch.where(units.is_grounded, 1.0, PHYSICS.air_control) * (PHYSICS.tick_s / PHYSICS.acceleration_s)
    share = (most / (change_x.square() + change_y.square()).sqrt().clamp_min(1e-6)).clamp_max(1.0)
    velocity = torch.stack(
        (units.velocity[..., 0] + change_x * share, units.velocity[..., 1] + change_y * share, units.velocity[..., 2]), dim=-1
    )
    return units._replace(velocity=velocity)


def fly(units: Units, orders: Orders, tables: Tables) -> Units:
    """Apply jets and gravity to the vertical velocity. Jets use fuel and add heat; fuel is regained on the ground."""
    tick = PHYSICS.tick_s
    throttle = orders.motion[..., 3].clamp_min(0.0) * (can_act(units) & (units.fuel > 0) & (tables.units.jets > 0))
    lift = throttle * tables.units.jets - PHYSICS.gravity_mps2
    is_airborne = ~units.is_grounded | (lift > 0)
    speed_z = torch.where(is_airborne, units.velocity[..., 2] + lift * tick, 0.0)
    refuelled = torch.where(units.is_grounded & (throttle <= 0), PHYSICS.refuel_per_s, 0.0)
    return units._replace(
        velocity=torch.cat((units.velocity[..., :2], speed_z.unsqueeze(-1)), -1),
        fuel=(units.fuel + (refuelled - throttle) * tick).clamp(0.0, PHYSICS.fuel_s),
        heat=units.heat + throttle * (PHYSICS.jets_heat_per_s * tick),
    )


def move(units: Units, world: World) -> tuple[Units, Tensor]:
    """Move units by their velocity, not through terrain or each other. Also return how hard they landed, in m/s above the harmless speed.

    Along x and then along y, a unit stops before a column that is more than a step above its feet, at the distance of its radius. Units
    that overlap push each other apart by half the overlap each. A unit on the ground follows it over steps up and down; after a higher
    drop it falls.
    """
    size, tick = world.floor.shape[1], PHYSICS.tick_s
    limit = size / 2 - PHYSICS.radius_m
    x, y, z = units.position.unbind(-1)
    push_x, push_y = _push_apart(x, y, z, units.is_alive)
    step_x, step_y = units.velocity[..., 0] * tick + push_x, units.velocity[..., 1] * tick + push_y

    highest = z + CLIMB_M  # ground that the unit can step onto
    is_free_x = read(world.floor, columns(x + step_x + step_x.sign() * PHYSICS.radius_m, y, size)) <= highest
    new_x = torch.where(is_free_x, (x + step_x).clamp(-limit, limit), x)
    is_free_y = read(world.floor, columns(new_x, y + step_y + step_y.sign() * PHYSICS.radius_m, size)) <= highest
    new_y = torch.where(is_free_y, (y + step_y).clamp(-limit, limit), y)

    ground = read(world.floor, columns(new_x, new_y, size))
    speed_z = units.velocity[..., 2]
    follows_ground = units.is_grounded & (speed_z <= 0) & (z - ground <= CLIMB_M)
    new_z = torch.where(follows_ground, ground, z + speed_z * tick).clamp_max(PHYSICS.ceiling_m)
    is_grounded = new_z <= ground
    hard = torch.where(is_grounded & ~units.is_grounded, (-speed_z - PHYSICS.landing_mps).clamp_min(0.0), 0.0)
    is_stopped = is_grounded | ((new_z >= PHYSICS.ceiling_m) & (speed_z > 0))
    velocity = torch.stack(
        (
            torch.where(is_free_x & (new_x.abs() < limit), units.velocity[..., 0], 0.0),
            torch.where(is_free_y & (new_y.abs() < limit), units.velocity[..., 1], 0.0),
            torch.where(is_stopped, 0.0, speed_z),
        ),
        dim=-1,
    )
    position = torch.stack((new_x, new_y, torch.maximum(new_z, ground)), -1)
    return units._replace(position=position, velocity=velocity, is_grounded=is_grounded), hard


def _push_apart(x: Tensor, y: Tensor, z: Tensor, is_alive: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far overlapping units are pushed apart in x and y."""
    apart_x, apart_y, apart_z = (value.unsqueeze(2) - value.unsqueeze(1) for value in (x, y, z))  # [B, U, U]
    distance = (apart_x.square() + apart_y.square()).sqrt()
    touches = is_alive.unsqueeze(2) & is_alive.unsqueeze(1) & (apart_z.abs() < PHYSICS.tall_m)
    share = ((2 * PHYSICS.radius_m - distance).clamp_min(0.0) * touches) * (0.5 / distance.clamp_min(1e-3))
    return (apart_x * share).sum(2), (apart_y * share).sum(2)
