"""The start of battles: maps, starting positions and team sizes.

The start of a battle depends only on the seed, on its index in the batch and on the number of battles fought there before. No generator is
used, so a reset is a few lookups that can be captured with the step, and a battle can be repeated without those before it.

Shapes: B = battles, U = units, S = side of the map, M = maps.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.map_columns import floors, sight_tops
from esper.arena.maps import generate_maps, spawn_points
from esper.arena.routes import find_ways
from esper.arena.specs import PHYSICS
from esper.arena.state import CLOUDS, BattleStatus, Clouds, Senses, Shells, State, Units, World
from esper.arena.tables import Tables
from esper.arena.terrain_chance import mixed

_PLACE, _EPISODE = 1_000_003, 7_919  # factors that keep seeds, indices and episodes apart in the hash of a battle
_MAP, _TEAM = 1, 2  # added to that hash for the draw of the map and of the team size
_Seed = TypeVar("_Seed", int, Tensor, int | Tensor)


class Atlas(NamedTuple):
    """All maps, and the starting positions of the units."""

    worlds: World  # its first dimension is the map [M] instead of the battle
    spawns: Tensor  # [U, 2]


def make_atlas(config: ArenaConfig, tables: Tables, *, seed: int, device: torch.device, only: int | None = None) -> Atlas:
    """Make the maps, always on the CPU, so that they are the same on every device. With `only`, make only the map of that index."""
    spawns = spawn_points(config.team_size, size=config.size).flatten(0, 1)
    indices = range(config.maps) if only is None else [only]
    maps = generate_maps([_spread(seed) + index for index in indices], size=config.size, landscapes=config.landscapes)
    height, material, radius = (part.to(device) for part in maps[:3])
    floor = floors(height, material, tables.materials)
    way, route = find_ways(floor.cpu(), maps.material, maps.zone_radius)
    worlds = World(
        height=height,
        material=material,
        hit_points=tables.materials.hit_points[material.long()],
        floor=floor,
        tops=sight_tops(height, material, tables.materials),
        way=way.to(device),
        route_m=route.to(device),
        zone_radius=radius,
    )
    return Atlas(worlds, spawns.to(device))


def fresh(
    place: Tensor, episode: Tensor, config: ArenaConfig, tables: Tables, atlas: Atlas, *, seed: int | Tensor, largest_team: Tensor
) -> State:
    """Return new battles at the indices `place` [B], after `episode` [B] others there. Senses are empty.

    `largest_team` [] is a tensor, and `seed` [] may be one, so that a captured step follows their changes.
    """
    device = place.device
    battles, count, slots = len(place), config.units, config.projectiles
    key = mixed(mixed(place + _spread(seed)) + episode * _EPISODE)
    which = _below(mixed(key + _MAP), config.maps)  # [B] index of the map
    if config.battles_per_map is not None:
        groups = -(-config.battles // config.battles_per_map)  # groups of battles that share a map; later battles take the next maps
        which = (place // config.battles_per_map + episode * groups) % config.maps
    world = World(*(part[which] for part in atlas.worlds))
    least = torch.clamp_max(largest_team, config.smallest_team or config.team_size)
    size = least + _below(mixed(key + _TEAM), largest_team - least + 1)  # [B] units of a team that take part

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(battles, *shape, dtype=dtype, device=device)

    ticks, flag = torch.int32, torch.bool
    present = (torch.arange(count, device=device) % config.team_size) < size.unsqueeze(1)
    facing = torch.where(tables.units.team == 0, math.pi / 4, -3 * math.pi / 4)
    units = Units(
        position=torch.cat((atlas.spawns, torch.zeros_like(atlas.spawns[:, :1])), 1).expand(battles, -1, -1).clone(),
        velocity=zeros(count, 3),
        heading=facing.expand(battles, -1).clone(),
        hit_points=tables.units.hit_points * present,
        legs=tables.units.legs * present,
        heat=zeros(count),
        stability=zeros(count) + PHYSICS.stability,
        fuel=zeros(count) + PHYSICS.fuel_s,
        fallen=zeros(count, dtype=ticks),
        suppressed=zeros(count, dtype=ticks),
        painted=zeros(count, dtype=ticks),
        cooldown=zeros(count, len(tables.weapons.damage), dtype=ticks),
        is_shut_down=zeros(count, dtype=flag),
        is_venting=zeros(count, dtype=flag),
        is_grounded=~zeros(count, dtype=flag),
        harm=zeros(count, count, dtype=ticks),
        present=present,
    )
    whole = torch.int64
    return State(
        world=world,
        units=units,
        shells=Shells(
            position=zeros(count, slots, 3),
            velocity=zeros(count, slots, 3),
            weapon=zeros(count, slots, dtype=whole),
            target=zeros(count, slots, dtype=whole),
            life=zeros(count, slots, dtype=ticks),
        ),
        clouds=Clouds(position=zeros(count, CLOUDS, 3), left=zeros(count, CLOUDS, dtype=ticks)),
        status=BattleStatus(
            score=zeros(2),
            holder=zeros(dtype=whole) - 1,
            decision=zeros(dtype=whole),
            episode=episode,
            map=which,
            overflow=zeros(dtype=whole),
        ),
        senses=Senses(
            sensed=zeros(count, count, dtype=flag),
            seen=zeros(count, count, dtype=flag),
            contacts=zeros(count, config.contacts, dtype=whole),
            is_contact=zeros(count, config.contacts, dtype=flag),
        ),
    )


def within_bits(seed: int) -> int:
    """Return the seed that gives the same battles and fits into an int64 tensor, also after `_spread`."""
    return seed % 2**42


def _spread(seed: _Seed) -> _Seed:
    """Return a number within 64 bits. Neighbouring seeds give numbers that are far apart."""
    return seed % 2**42 * _PLACE


def _below(words: Tensor, limit: Tensor | int) -> Tensor:
    """Return random integers from 0 to limit - 1, int64, from the upper bits of random words."""
    return ((words >> 33) & 0x3FFFFFFF) % limit
