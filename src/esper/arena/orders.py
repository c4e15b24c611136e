"""Actions of units: their heads, checks and masks, and the orders that the phases execute.

Shapes: B = battles, U = units, C = contacts, W = kinds of weapons, N = B·U.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.map_columns import unit_at
from esper.arena.specs import WEAPONS
from esper.arena.state import Senses, Units
from esper.arena.tables import Tables
from esper.vecenv import Actions, ActionSpec, Continuous, Discrete, Relevance

MOTION = ("forward", "strafe", "yaw", "jets")  # strafe is to the right, yaw to the left; jets below 0 are off
FIRE = ("none", *WEAPONS)
FIRST_WRONG = (*MOTION, "fire", "target", "vent")  # names of the values that `first_wrong` returns for the error message


def action_spec(config: ArenaConfig) -> ActionSpec:
    """Return the action spec. The head `target` is relevant only where a weapon is fired, and its mask depends on the weapon."""
    return ActionSpec(
        heads=(
            Discrete("fire", len(FIRE)),
            Discrete("target", config.contacts, parent="fire"),
            Discrete("vent", 2),
            Continuous("motion", len(MOTION)),
        ),
        relevance=(Relevance("target", given="fire", choices=tuple(range(1, len(FIRE)))),),
    )


class Orders(NamedTuple):
    """Orders of all units, which hold for all ticks of a decision."""

    motion: Tensor  # [B, U, 4] in [-1, 1]
    weapon: Tensor  # [B, U] int64, index into WEAPONS; meaningful where `is_firing`
    is_firing: Tensor  # [B, U] bool
    target: Tensor  # [B, U] int64, index of a unit; meaningful where `is_firing`
    is_venting: Tensor  # [B, U] bool


def check_actions(actions: Actions, config: ArenaConfig) -> None:
    """Raise ValueError if actions do not have the heads, shapes and types of the spec. Does not read values, so it never waits."""
    rows = config.battles * config.units
    spec = action_spec(config)
    expected = {head.name: ((rows,), torch.int64) for head in spec.discrete}
    given = set(actions)
    names = {head.name for head in spec.heads}
    if given != names:
        raise ValueError(f"an action has the heads {sorted(names)}; got {sorted(given)}")
    for name, value in actions.items():
        shape, dtype = expected.get(name, ((rows, len(MOTION)), torch.float32))
        if tuple(value.shape) != shape:
            raise ValueError(
                f"action {name!r} should have shape {shape}, one row for each of {config.units} units in {config.battles} battles; "
                f"got {tuple(value.shape)}"
            )
        if value.dtype != dtype:
            raise ValueError(f"action {name!r} should be of type {dtype}; got {value.dtype}: convert it with .to({dtype})")


def wrong_values(actions: Actions, config: ArenaConfig) -> Tensor:
    """Return the rows [N] bool with a choice that does not exist, or a motion that is NaN or outside of [-1, 1]."""
    wrong = ~(actions["motion"].abs() <= 1.0).all(-1)
    for head in action_spec(config).discrete:
        wrong = wrong | (actions[head.name] < 0) | (actions[head.name] >= head.size)
    return wrong


def first_wrong(actions: Actions, config: ArenaConfig) -> Tensor:
    """Return the index of the first wrong row, or -1, and its values in the order of `FIRST_WRONG`, [1 + 7]. Never waits for the device."""
    wrong = wrong_values(actions, config)
    row = wrong.int().argmax().unsqueeze(0)
    choices = [actions[head.name].index_select(0, row) for head in action_spec(config).discrete]
    held = [actions["motion"].index_select(0, row).squeeze(0), *choices]
    return torch.cat([part.to(torch.float64) for part in (torch.where(wrong.any(), row, -1), *held)])


def raise_on_wrong_values(row: int, held: dict[str, float], config: ArenaConfig) -> None:
    """Raise ValueError that names the battle, the unit and the wrong value of the action in `row`. `held` are its values by name."""
    battle, unit = divmod(row, config.units)
    place = f"battle {battle}, unit {unit} ({config.unit_classes[unit]} of team {unit // config.team_size})"
    motion = [held[name] for name in MOTION]
    if not all(abs(number) <= 1.0 for number in motion):
        raise ValueError(f"{place}: motion is {motion}, but must be numbers from -1 to 1; clamp it, and find the cause of a NaN")
    for head in action_spec(config).discrete:
        if not 0 <= held[head.name] < head.size:
            raise ValueError(f"{place}: {head.name} is {int(held[head.name])}, but must be from 0 to {head.size - 1}")


def read_orders(actions: Actions, senses: Senses, units: Units, tables: Tables, *, battles: int) -> Orders:
    """Return the orders of actions [N, ...]. Impossible ones are dropped: firing a weapon that the unit lacks, or at an empty contact."""
    fire = actions["fire"].view(battles, -1)
    slot = actions["target"].view(battles, -1, 1)
    weapon = (fire - 1).clamp_min(0)
    target = senses.contacts.gather(2, slot).squeeze(2)
    is_contact = senses.is_contact.gather(2, slot).squeeze(2)
    owned = tables.units.has_weapon.expand(battles, -1, -1).gather(2, weapon.unsqueeze(2)).squeeze(2)
    is_seen = senses.seen.gather(2, target.unsqueeze(2)).squeeze(2)
    is_firing = (fire > 0) & owned & is_contact & (is_seen | ~tables.weapons.is_instant[weapon])
    return Orders(
        motion=actions["motion"].view(battles, -1, len(MOTION)),
        weapon=weapon,
        is_firing=is_firing,
        target=target,
        is_venting=(actions["vent"].view(battles, -1) == 1) & units.is_alive,
    )


def action_masks(senses: Senses, units: Units, tables: Tables) -> dict[str, Tensor]:
    """Return the masks of all discrete heads, bool, true where allowed: fire [N, 1 + W], target [N, 1 + W, C] by weapon, vent [N, 2].

    Not firing and not venting are always allowed.
    """
    battles, count = units.heat.shape
    ready = units.is_alive & (units.fallen == 0) & ~units.is_shut_down
    reach = in_reach(senses, units, tables)  # [B, U, W, C]
    can_fire = tables.units.has_weapon & ready.unsqueeze(2) & reach.any(3)  # [B, U, W]
    yes = torch.ones_like(ready).unsqueeze(2)
    fire = torch.cat((yes, can_fire), 2)  # [B, U, 1 + W]
    nobody = torch.zeros_like(reach[:, :, :1])
    target = torch.cat((nobody, reach), 2)  # [B, U, 1 + W, C]
    # Even an irrelevant head must have an allowed choice.
    target = target | (~target.any(3, keepdim=True) & (torch.arange(target.shape[3], device=target.device) == 0))
    vent = torch.cat((yes, (units.is_alive & ~units.is_shut_down & (units.heat > 0)).unsqueeze(2)), 2)
    return {name: mask.reshape(battles * count, *mask.shape[2:]) for name, mask in (("fire", fire), ("target", target), ("vent", vent))}


def in_reach(senses: Senses, units: Units, tables: Tables) -> Tensor:
    """Return the contacts that each kind of weapon reaches [B, U, W, C]: in range, and seen if the weapon hits at once."""
    weapons = tables.weapons
    there = unit_at(units.position, senses.contacts)  # [B, U, C, 3]
    distance: Tensor = torch.linalg.vector_norm(there - units.position.unsqueeze(2), dim=3)
    is_painted = unit_at(units.painted, senses.contacts) > 0
    is_seen = senses.seen.gather(2, senses.contacts)
    reach = torch.where(is_painted.unsqueeze(2), weapons.painted_range_m[:, None], weapons.range_m[:, None])  # [B, U, W, C]
    return (distance.unsqueeze(2) <= reach) & senses.is_contact.unsqueeze(2) & (is_seen.unsqueeze(2) | ~weapons.is_instant[:, None])
