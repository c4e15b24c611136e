"""What units know of their enemies: by sight, radar, heat and paint.

Shapes: B = battles, U = units, T = units of one team, C = contacts, P = T·T pairs of enemies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.arena.sight import lines_are_clear
from esper.arena.specs import PHYSICS
from esper.arena.state import Clouds, Senses, Units, World
from esper.arena.tables import Tables


def sense(units: Units, world: World, clouds: Clouds, tables: Tables, *, contacts: int) -> Senses:
    """Who knows where which enemy is.

    By sight: within 30 m, with a clear line from eye to eye that no smoke crosses. By radar: within 14 m times its quality, through
    everything. By heat: within 25 m, of who is hot or vents. By paint: the whole team, wherever the painted one is.
    """
    enemies = tables.units.is_enemy & units.is_alive.unsqueeze(1) & units.is_alive.unsqueeze(2)
    apart = units.position.unsqueeze(2) - units.position.unsqueeze(1)  # [B, U, U, 3]
    distance = torch.linalg.vector_norm(apart, dim=-1)
    seen = _sees(units, world, clouds) & enemies
    on_radar = distance <= PHYSICS.radar_m * tables.units.radar.unsqueeze(1)
    is_hot = (units.heat > PHYSICS.hot_share * tables.units.heat_cap) | units.is_venting
    by_heat = is_hot.unsqueeze(1) & (distance <= PHYSICS.hot_m)
    sensed = (seen | on_radar | by_heat | (units.painted > 0).unsqueeze(1)) & enemies
    nearest, order = torch.where(sensed, distance, torch.inf).sort(dim=2, stable=True)
    slots = min(contacts, order.shape[2])
    is_contact = nearest[..., :slots] < torch.inf
    known = order[..., :slots].masked_fill(~is_contact, 0)
    if slots < contacts:
        missing = contacts - slots
        known, is_contact = torch.nn.functional.pad(known, (0, missing)), torch.nn.functional.pad(is_contact, (0, missing))
    return Senses(sensed=sensed, seen=seen, contacts=known, is_contact=is_contact)


def _sees(units: Units, world: World, clouds: Clouds) -> Tensor:
    """Clear lines between the eyes of enemies [B, U, U]; one line serves both ends."""
    battles, count = units.heat.shape
    half = count // 2
    eyes = torch.cat((units.position[..., :2], (units.position[..., 2] + PHYSICS.eye_m).unsqueeze(-1)), -1)
    from_eyes = eyes[:, :half].unsqueeze(2).expand(-1, -1, half, -1).reshape(battles, half * half, 3)
    to_eyes = eyes[:, half:].unsqueeze(1).expand(-1, half, -1, -1).reshape(battles, half * half, 3)
    clear = lines_are_clear(world.tops, from_eyes, to_eyes, reach_m=PHYSICS.sight_m) & ~_is_smoked(from_eyes, to_eyes, clouds)
    between = clear.view(battles, half, half)
    nothing = torch.zeros_like(between)
    return torch.cat((torch.cat((nothing, between), 2), torch.cat((between.transpose(1, 2), nothing), 2)), 1)


def _is_smoked(eyes: Tensor, aims: Tensor, clouds: Clouds) -> Tensor:
    """Lines [B, P] that pass through a cloud."""
    centre = clouds.position.flatten(1, 2).unsqueeze(1)  # [B, 1, clouds, 3]
    stands = (clouds.left.flatten(1, 2) > 0).unsqueeze(1)
    line = (aims - eyes).unsqueeze(2)  # [B, P, 1, 3]
    to_centre = centre - eyes.unsqueeze(2)  # [B, P, clouds, 3]
    share = ((to_centre * line).sum(-1) / line.square().sum(-1).clamp_min(1e-9)).clamp(0.0, 1.0)
    off = (to_centre - line * share.unsqueeze(-1)).square().sum(-1)
    return ((off < PHYSICS.cloud_m**2) & stands).any(-1)
