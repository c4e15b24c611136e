"""Rewards of units for a decision: one function for each part, and their sum.

Shapes: B = battles, U = units. Every function returns [B, U] unless stated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig, ArenaRewardConfig
from esper.arena.decision import StepEvents
from esper.arena.map_columns import columns, read
from esper.arena.state import BattleStatus, State, Units, World
from esper.arena.tables import Tables
from esper.arena.zone import Ending


class Rewards(NamedTuple):
    """Weighted parts of the reward, before sharing within the team."""

    zone: Tensor
    damage: Tensor
    hurt: Tensor
    kill: Tensor
    assist: Tensor
    death: Tensor
    outcome: Tensor
    approach: Tensor


def zone_gain(before: BattleStatus, after: BattleStatus, tables: Tables, config: ArenaRewardConfig) -> Tensor:
    """Return the seconds that the own team held the zone minus those of the other team, each with its weight."""
    gained = after.score - before.score  # [B, 2]
    own, other = gained[:, tables.units.team], gained[:, 1 - tables.units.team]
    return own * config.zone - other * config.zone_lost


def damage_dealt(step_events: StepEvents, tables: Tables, config: ArenaRewardConfig) -> Tensor:
    """Return the damage to enemies minus the damage to the own team and oneself, weighted. Damage is in full hit points of the victim."""
    weight = torch.where(tables.units.is_enemy, config.damage, -config.friendly_fire)
    return (step_events.taken * weight).sum(2)


def damage_suffered(step_events: StepEvents) -> Tensor:
    """Return the damage by weapons, the own ones included, in full hit points."""
    return step_events.taken.sum(1)


def has_died(before: Units, after: Units) -> Tensor:
    """Return the units that died in a decision, bool."""
    return before.is_alive & ~after.is_alive


def kill_table(died: Tensor, step_events: StepEvents, tables: Tables) -> Tensor:
    """Return the kills by killer and victim, [B, U, U] bool.

    The killer is the enemy that did the most damage to the victim in the decision in which it died, if any enemy did.
    """
    by_enemies = step_events.taken * tables.units.is_enemy
    most, killer = by_enemies.max(1)
    credited = died & (most > 0)
    return (torch.arange(died.shape[1], device=died.device)[:, None] == killer.unsqueeze(1)) & credited.unsqueeze(1)


def assists(died: Tensor, killed_by: Tensor, after: Units, tables: Tables) -> Tensor:
    """Return the number of enemies that died soon after this unit damaged them, except for its kills, `killed_by` [B, U, U]."""
    helped = (after.harm > 0) & tables.units.is_enemy & died.unsqueeze(1) & ~killed_by
    return helped.float().sum(2)


def outcomes(ending: Ending, after: Units, tables: Tables) -> Tensor:
    """Return 1 for living units of the winning team, 0.5 for those of a draw, else 0.

    Losing has no additional cost, because a cost that only living units can incur would reward dying.
    """
    won = (ending.winner.unsqueeze(1) == tables.units.team).float()
    share = torch.where((ending.winner == -1).unsqueeze(1), 0.5, won)
    return share * (ending.ended.unsqueeze(1) & after.is_alive)


def nearness(units: Units, world: World) -> Tensor:
    """Return the potential of a position: 0 in the zone, -1 at a route of one map side away from it; 0 for dead units."""
    size = world.floor.shape[1]
    column = columns(units.position[..., 0], units.position[..., 1], size)
    return -(read(world.route_m, column) / size).clamp_max(2.0) * units.is_alive


def approach(before: State, after: State, ending: Ending, *, gamma: float) -> Tensor:
    """Return gamma times the new potential minus the old one.

    The potential is 0 for dead units and after the end of a battle, so the discounted sum over a unit's life does not depend on actions.
    """
    new = nearness(after.units, after.world) * ~ending.ended.unsqueeze(1)
    return (gamma * new - nearness(before.units, before.world)) * before.units.is_alive


def pay(before: State, after: State, step_events: StepEvents, ending: Ending, tables: Tables, config: ArenaConfig) -> Rewards:
    """Return all parts, weighted. Units that were dead before the decision get nothing."""
    weights = config.reward
    died = has_died(before.units, after.units)
    killed_by = kill_table(died, step_events, tables)
    alive = before.units.is_alive
    return Rewards(
        zone=zone_gain(before.status, after.status, tables, weights) * alive,
        damage=damage_dealt(step_events, tables, weights) * alive,
        hurt=-weights.hurt * damage_suffered(step_events) * alive,
        kill=weights.kill * killed_by.float().sum(2) * alive,
        assist=weights.assist * assists(died, killed_by, after.units, tables) * alive,
        death=-weights.death * died.float(),
        outcome=weights.outcome * outcomes(ending, after.units, tables),
        approach=weights.approach * approach(before, after, ending, gamma=weights.gamma),
    )


def shared(rewards: Rewards, before: Units, config: ArenaConfig) -> Tensor:
    """Return the sum of all parts. A share of the rewards for damage, kills and assists is divided equally among the living of the team."""
    own = rewards.damage + rewards.kill + rewards.assist
    alive = before.is_alive
    battles, count = alive.shape
    living = alive.view(battles, 2, -1).sum(2, keepdim=True).clamp_min(1)
    mean = (own.view(battles, 2, -1).sum(2, keepdim=True) / living).expand(-1, -1, count // 2).reshape(battles, count) * alive
    share = config.reward.team_share
    return own * (1 - share) + mean * share + rewards.zone + rewards.hurt + rewards.death + rewards.outcome + rewards.approach
