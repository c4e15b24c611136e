"""Compute which enemies units sense: by sight, radar, heat and paint.

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
    """Return which units sense which enemies.

    By sight: within 30 m, with a clear line from eye to eye that no smoke crosses. By radar: within 14 m times its quality, through
    everything. By heat: hot or venting units within 25 m. By paint: painted units at any distance, for the whole team.
    """
    enemies = tables.units.is_enemy & units.is_alive.unsqueeze(1) & units.is_alive.unsqueeze(2)
    apart = units.position.unsqueeze(2) - units.position.unsqueeze(1)  # [B, U, U, 3]
    distance = torch.linalg.vector_norm(apart, dim=-1)
    seen = _sees(units, world, clouds) & enemies
    on_radar = distance <= PHYSICS.radar_m * tables.units.radar.unsqueeze(1)
    is_hot = (units.heat > PHYSICS.hot_share * tables.units.heat_cap) | units.is_venting
    by_heat = is_hot.unsqueeze(1) & (distance <= PHYSICS.hot_m)
    sensed = (seen | on_radar | by_heat | (units.painted > 0).unsqueeze(1)) & enemies
    known, is_contact = nearest_first(torch.where(sensed, distance, torch.inf), slots=contacts, of_others=True)
    return Senses(sensed=sensed, seen=seen, contacts=known, is_contact=is_contact)


def nearest_first(distance: Tensor, *, slots: int, of_others: bool) -> tuple[Tensor, Tensor]:
    """Return the units of the other team, or of the own team, ordered by `distance` [B, U, U]: indices and whether the slot is filled.

    Both are [B, U, slots]; the index of an empty slot is 0. A unit at infinite distance is left out. The rank of a unit is the number of
    nearer units, because for such short rows counting is several times as fast as sorting.
    """
    count = distance.shape[1]
    half = count // 2
    first, second = distance[:, :half], distance[:, half:]
    # Distances of each unit to the units of one team [B, T, T]: to the first team, and to the second team.
    to_teams = (second[..., :half], first[..., half:]) if of_others else (first[..., :half], second[..., half:])
    near = torch.cat(to_teams if not of_others else to_teams[::-1], 1)  # [B, U, T], rows in the order of the units
    member = torch.arange(half, device=distance.device)
    one, other = near.unsqueeze(-1), near.unsqueeze(-2)
    rank = ((other < one) | ((other == one) & (member < member.unsqueeze(1)))).sum(-1)  # [B, U, T]
    is_second = torch.arange(count, device=distance.device) >= half
    begins = torch.where(~is_second if of_others else is_second, half, 0).unsqueeze(1)  # [U, 1] index of that team's first unit
    order = torch.empty_like(rank).scatter_(2, rank, (member + begins).expand_as(rank))
    is_there = torch.empty_like(near, dtype=torch.bool).scatter_(2, rank, near < torch.inf)
    order = order.masked_fill(~is_there, 0)
    if slots <= half:
        return order[..., :slots], is_there[..., :slots]
    pad = (0, slots - half)
    return torch.nn.functional.pad(order, pad), torch.nn.functional.pad(is_there, pad)


def _sees(units: Units, world: World, clouds: Clouds) -> Tensor:
    """Return clear lines between the eyes of enemies [B, U, U]. Each line is computed once for both directions."""
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
    """Return the lines [B, P] that pass through a cloud."""
    centres = clouds.position.flatten(1, 2).unsqueeze(1).unbind(-1)  # [B, 1, clouds] each
    is_there = (clouds.left.flatten(1, 2) > 0).unsqueeze(1)
    starts = eyes.unsqueeze(2).unbind(-1)  # [B, P, 1] each
    line = (aims - eyes).unsqueeze(2).unbind(-1)
    off = [centre - start for centre, start in zip(centres, starts, strict=True)]  # [B, P, clouds] each
    length_squared = line[0].square() + line[1].square() + line[2].square()
    along = torch.addcmul(torch.addcmul(off[0] * line[0], off[1], line[1]), off[2], line[2])
    share = (along / length_squared.clamp_min(1e-9)).clamp(0.0, 1.0)  # of the line, at its point nearest to the centre
    miss = [torch.addcmul(apart, share, step, value=-1.0) for apart, step in zip(off, line, strict=True)]
    distance_squared = torch.addcmul(torch.addcmul(miss[0].square(), miss[1], miss[1]), miss[2], miss[2])
    return ((distance_squared < PHYSICS.cloud_m**2) & is_there).any(-1)
