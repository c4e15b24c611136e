"""Read observations by the names of the layout."""

from __future__ import annotations

from torch import Tensor

from esper.arena.arena import Arena, StepResult
from esper.arena.config import ArenaConfig
from esper.arena.observe import VIEW, Part, parts, slices, width


def look(arena: Arena) -> StepResult:
    """Sense and observe the state after a test has changed it."""
    arena.state = arena._sensed(arena.state)
    return arena.look()


def piece(result: StepResult, config: ArenaConfig, name: str) -> Tensor:
    """Return one part of all observations [B, U, times, width]."""
    start = 0
    for part in parts(config):
        if part.name == name:
            return result.observation[..., start : start + part.width].unflatten(-1, (part.times, width(part.fields)))
        start += part.width
    raise ValueError(name)


def observed(arena: Arena, part: str, unit: int, name: str, *, index: int = 0) -> list[float]:
    """Return one field of the observation of a unit of the first battle."""
    fields = _part(arena.config, part).fields
    values: list[float] = piece(look(arena), arena.config, part)[0, unit, index, slices(fields)[name]].tolist()
    return values


def terrain(arena: Arena, unit: int, name: str) -> Tensor:
    """Return the terrain view of a unit of the first battle [VIEW, VIEW]: rows from behind to ahead, in each from right to left."""
    fields = _part(arena.config, "terrain").fields
    cells = piece(look(arena), arena.config, "terrain")[0, unit, :, slices(fields)[name]]
    return cells.view(VIEW, VIEW)


def _part(config: ArenaConfig, name: str) -> Part:
    return next(part for part in parts(config) if part.name == name)
