"""The tables of `esper.arena.specs` as tensors: one number per unit, weapon or material.

Shapes: U = units of a battle, W = kinds of weapons, M = materials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig, life_ticks, ticks
from esper.arena.specs import CLASSES, MATERIALS, ROLES, WEAPONS, Material


@dataclass(frozen=True)
class UnitTable:
    """Properties of the units, [U] each unless stated. Every battle has the same units."""

    kind: Tensor  # int64, index into CLASSES
    role: Tensor  # int64, index into ROLES
    team: Tensor  # int64, 0 or 1
    max_speed: Tensor
    yaw: Tensor
    jets: Tensor
    hit_points: Tensor
    legs: Tensor
    heat_cap: Tensor
    cooling: Tensor
    tons: Tensor
    radar: Tensor  # quality
    has_weapon: Tensor  # [U, W] bool
    is_enemy: Tensor  # [U, U] bool
    is_ally: Tensor  # [U, U] bool; a unit is not its own ally


@dataclass(frozen=True)
class WeaponTable:
    """Properties of the weapons, [W] each."""

    damage: Tensor
    range_m: Tensor
    painted_range_m: Tensor  # equal to range_m if paint changes nothing
    heat: Tensor
    cooldown: Tensor  # int32 ticks
    arc_cos: Tensor  # cosine of half the arc
    stability: Tensor
    speed: Tensor  # 0: instant
    is_instant: Tensor  # bool
    is_homing: Tensor  # bool
    is_ballistic: Tensor  # bool
    splash_m: Tensor
    target_heat: Tensor
    leg_share: Tensor
    suppresses: Tensor  # int32 ticks
    paints: Tensor  # int32 ticks
    smokes: Tensor  # int32 ticks
    life: Tensor  # int32 ticks of its projectile


@dataclass(frozen=True)
class MaterialTable:
    """Properties of the materials, [M] each."""

    hit_points: Tensor  # int32
    is_seen_through: Tensor  # bool
    is_walked_through: Tensor  # bool
    heat: Tensor  # per second
    damage: Tensor  # per second
    speed_factor: Tensor


@dataclass(frozen=True)
class Tables:
    """Properties of all units, weapons and materials."""

    units: UnitTable
    weapons: WeaponTable
    materials: MaterialTable


def make_tables(config: ArenaConfig, device: torch.device) -> Tables:
    """Return the tables of the units of this config, and of all weapons and materials."""

    def numbers(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def whole(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def flags(values: list[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.bool, device=device)

    names = list(CLASSES)
    units = [CLASSES[name] for name in config.unit_classes]
    team = whole([0] * config.team_size + [1] * config.team_size, torch.int64)
    is_same = team.unsqueeze(1) == team.unsqueeze(0)
    unit_table = UnitTable(
        kind=whole([names.index(name) for name in config.unit_classes], torch.int64),
        role=whole([ROLES.index(unit.role) for unit in units], torch.int64),
        team=team,
        max_speed=numbers([unit.max_speed_mps for unit in units]),
        yaw=numbers([unit.yaw_radps for unit in units]),
        jets=numbers([unit.jets_mps2 for unit in units]),
        hit_points=numbers([unit.hit_points for unit in units]),
        legs=numbers([unit.leg_points for unit in units]),
        heat_cap=numbers([unit.heat_cap for unit in units]),
        cooling=numbers([unit.cooling_per_s for unit in units]),
        tons=numbers([unit.tons for unit in units]),
        radar=numbers([unit.radar_quality for unit in units]),
        has_weapon=torch.stack([flags([name in unit.weapons for name in WEAPONS]) for unit in units]),
        is_enemy=~is_same,
        is_ally=is_same & ~torch.eye(config.units, dtype=torch.bool, device=device),
    )
    weapons = list(WEAPONS.values())
    weapon_table = WeaponTable(
        damage=numbers([weapon.damage for weapon in weapons]),
        range_m=numbers([weapon.range_m for weapon in weapons]),
        painted_range_m=numbers([weapon.painted_range_m or weapon.range_m for weapon in weapons]),
        heat=numbers([weapon.heat for weapon in weapons]),
        cooldown=whole([ticks(weapon.cooldown_s) for weapon in weapons]),
        arc_cos=numbers([math.cos(math.radians(weapon.arc_deg / 2)) for weapon in weapons]),
        stability=numbers([weapon.stability_damage for weapon in weapons]),
        speed=numbers([weapon.flight_mps for weapon in weapons]),
        is_instant=flags([weapon.flight_mps == 0 for weapon in weapons]),
        is_homing=flags([weapon.is_homing for weapon in weapons]),
        is_ballistic=flags([weapon.is_ballistic for weapon in weapons]),
        splash_m=numbers([weapon.splash_m for weapon in weapons]),
        target_heat=numbers([weapon.target_heat for weapon in weapons]),
        leg_share=numbers([weapon.leg_share for weapon in weapons]),
        suppresses=whole([ticks(weapon.suppresses_s) for weapon in weapons]),
        paints=whole([ticks(weapon.paints_s) for weapon in weapons]),
        smokes=whole([ticks(weapon.smoke_s) for weapon in weapons]),
        life=whole([life_ticks(weapon) for weapon in weapons]),
    )
    materials = [MATERIALS[material] for material in Material]
    material_table = MaterialTable(
        hit_points=whole([material.hit_points for material in materials]),
        is_seen_through=flags([material.is_seen_through for material in materials]),
        is_walked_through=flags([material.is_walked_through for material in materials]),
        heat=numbers([material.heat_per_s for material in materials]),
        damage=numbers([material.damage_per_s for material in materials]),
        speed_factor=numbers([material.speed_factor for material in materials]),
    )
    return Tables(unit_table, weapon_table, material_table)
