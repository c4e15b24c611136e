"""Read what units see, sense and observe, by names."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.arena.arena import Arena
from esper.arena.native import layout as at
from esper.arena.observe import STATE_BATTLE, STATE_UNIT, VIEW, Part, parts, slices, width


def has_bit(arena: Arena, field: int, unit: int, other: int, battle: int) -> bool:
    """Return whether a field of `Battles.number`, SEEN or SENSED, has the bit of a unit of the other team, as it is now."""
    arena.look()
    team = arena.config.team_size
    assert (unit < team) != (other < team)
    return bool(arena.simulation.number[field, battle, unit] >> other % team & 1)


def sees(arena: Arena, unit: int = 0, other: int = 1, *, battle: int = 0) -> bool:
    """Return whether a unit sees an enemy."""
    return has_bit(arena, at.SEEN, unit, other, battle)


def senses(arena: Arena, unit: int = 0, other: int = 1, *, battle: int = 0) -> bool:
    """Return whether a unit senses an enemy."""
    return has_bit(arena, at.SENSED, unit, other, battle)


def piece(arena: Arena, name: str) -> Tensor:
    """Return a copy of one part of all observations [B, U, times, width], as they are now.

    "whole" and "battle" are the two parts of the view of a critic: all units, and the battle.
    """
    result = arena.look()
    if name in ("whole", "battle"):
        assert result.whole is not None
        units, battle = torch.split(result.whole, [arena.config.units * width(STATE_UNIT), width(STATE_BATTLE)], dim=2)
        return battle.unsqueeze(2).clone() if name == "battle" else units.unflatten(2, (arena.config.units, -1)).clone()
    start = 0
    for part in parts(arena.config):
        if part.name == name:
            numbers = result.observation[..., start : start + part.width]
            return numbers.reshape(*numbers.shape[:2], part.times, width(part.fields)).clone()
        start += part.width
    raise ValueError(name)


def observed(arena: Arena, part: str, unit: int, name: str, *, index: int = 0) -> list[float]:
    """Return one field of the observation of a unit of the first battle."""
    fields = _part(arena, part).fields
    values: list[float] = piece(arena, part)[0, unit, index, slices(fields)[name]].tolist()
    return values


def terrain(arena: Arena, unit: int, name: str) -> Tensor:
    """Return the terrain view of a unit of the first battle [VIEW, VIEW]: rows from behind to ahead, in each from right to left."""
    fields = _part(arena, "terrain").fields
    return piece(arena, "terrain")[0, unit, :, slices(fields)[name]].reshape(VIEW, VIEW)


def masks(arena: Arena) -> dict[str, Tensor]:
    """Return copies of the allowed choices, as they are now."""
    return {name: mask.clone() for name, mask in arena.look().masks.items()}


def set_status(arena: Arena, field: int, value: int | list[int]) -> None:
    """Set a field of `Battles.status`, in all battles."""
    arena.simulation.status[field] = torch.tensor(value, dtype=torch.int32)


def _part(arena: Arena, name: str) -> Part:
    return next(part for part in parts(arena.config) if part.name == name)
