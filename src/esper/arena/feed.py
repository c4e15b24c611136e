"""The feed of a battle: lines of text about kills, falls, shutdowns, the zone, and the end.

The feed follows from the battle, so the feed of a replay can be made again and compared. Units and events are those of one battle,
[1, U, ...], on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.decision import StepEvents
from esper.arena.rewards import has_died, kill_table
from esper.arena.state import Units
from esper.arena.tables import make_tables
from esper.replay_file import FeedItem


class FeedWriter:
    """Writes the feed of battles between two teams with these names."""

    def __init__(self, config: ArenaConfig, teams: tuple[str, str]) -> None:
        self.teams = teams
        self.tables = make_tables(config, torch.device("cpu"))
        sides = [teams[index // config.team_size] for index in range(config.units)]
        self.names = [f"{name} {index % config.team_size + 1} of {sides[index]}" for index, name in enumerate(config.unit_classes)]

    def decision(self, frame: int, was: Units, now: Units, step_events: StepEvents) -> list[FeedItem]:
        """Return the feed items of the decision before a frame: kills, falls and shutdowns."""
        died = has_died(was, now)
        falls, stops = (now.fallen > 0) & (was.fallen == 0) & now.is_alive, now.is_shut_down & ~was.is_shut_down
        items = []
        killers = kill_table(died, step_events, self.tables)[0]
        for unit in _which(died):
            by = _killer(killers, step_events, unit)
            text = f"{self.names[unit]} is destroyed" if by is None else f"{self.names[by]} destroys {self.names[unit]}"
            items.append(FeedItem(frame=frame, kind="kill", by=by, unit=unit, text=text))
        items += [FeedItem(frame=frame, kind="fall", unit=unit, text=f"{self.names[unit]} falls") for unit in _which(falls)]
        for unit in _which(stops):
            items.append(FeedItem(frame=frame, kind="shutdown", unit=unit, text=f"{self.names[unit]} overheats and shuts down"))
        return items

    def whole(self, decisions: Mapping[int, Sequence[FeedItem]], holders: Sequence[int], end: FeedItem) -> list[FeedItem]:
        """Return the whole feed of a battle, given the items of `decision` by frame, and the holder of the zone at each frame [F]."""
        items, last = list[FeedItem](), -1
        for frame, holder in enumerate(holders):
            items += decisions.get(frame, ())
            if holder not in (-1, last):
                last = holder
                items.append(FeedItem(frame=frame, kind="zone", text=f"{self.teams[holder]} takes the zone"))
        return [*items, end]

    def end(self, frame: int, alive: Tensor, winner: int | None, *, is_by_time: bool) -> FeedItem:
        """Return the last feed item. `alive` [U] are the living units after the last decision."""
        text = "a draw" if winner is None else f"{self.teams[winner]} wins"
        how = "by time" if is_by_time else "by holding the zone" if bool(alive.view(2, -1).any(1).all()) else "by elimination"
        return FeedItem(frame=frame, kind="end", text=f"{text} {how}")


def _which(units: Tensor) -> list[int]:
    return [int(unit) for unit in units[0].nonzero().flatten()]


def _killer(killers: Tensor, step_events: StepEvents, unit: int) -> int | None:
    """Return the unit that killed another: the enemy with the credit, else the friend or the victim itself; None if it was the terrain."""
    if bool(killers[:, unit].any()):
        return int(killers[:, unit].int().argmax())
    taken = step_events.taken[0, :, unit]
    return int(taken.argmax()) if bool(taken.any()) else None
