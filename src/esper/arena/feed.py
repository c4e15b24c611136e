"""What is told to who watches a battle: kills, falls, shutdowns, who takes the zone, and the end.

Everything follows from the battle, so a replay's feed can be made again and compared. Units and deeds are those of one battle, [1, U, ...],
on the CPU.
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
    """Of battles between two teams, which have these names."""

    def __init__(self, config: ArenaConfig, teams: tuple[str, str]) -> None:
        self.teams = teams
        self.tables = make_tables(config, torch.device("cpu"))
        sides = [teams[index // config.team_size] for index in range(config.units)]
        self.names = [f"{name} {index % config.team_size + 1} of {sides[index]}" for index, name in enumerate(config.unit_classes)]

    def decision(self, frame: int, was: Units, now: Units, step_events: StepEvents) -> list[FeedItem]:
        """What the decision before a frame did to units."""
        died = has_died(was, now)
        falls, stops = (now.fallen > 0) & (was.fallen == 0) & now.is_alive, now.is_shut_down & ~was.is_shut_down
        told = []
        killers = kill_table(died, step_events, self.tables)[0]
        for unit in _which(died):
            by = _killer(killers, step_events, unit)
            text = f"{self.names[unit]} is destroyed" if by is None else f"{self.names[by]} destroys {self.names[unit]}"
            told.append(FeedItem(frame=frame, kind="kill", by=by, unit=unit, text=text))
        told += [FeedItem(frame=frame, kind="fall", unit=unit, text=f"{self.names[unit]} falls") for unit in _which(falls)]
        for unit in _which(stops):
            told.append(FeedItem(frame=frame, kind="shutdown", unit=unit, text=f"{self.names[unit]} overheats and shuts down"))
        return told

    def whole(self, decisions: Mapping[int, Sequence[FeedItem]], holders: Sequence[int], end: FeedItem) -> list[FeedItem]:
        """The feed of a battle: what `decision` told of its frames, and who held the zone at each of them [F]."""
        told, last = list[FeedItem](), -1
        for frame, holder in enumerate(holders):
            told += decisions.get(frame, ())
            if holder not in (-1, last):
                last = holder
                told.append(FeedItem(frame=frame, kind="zone", text=f"{self.teams[holder]} takes the zone"))
        return [*told, end]

    def end(self, frame: int, alive: Tensor, winner: int | None, *, is_by_time: bool) -> FeedItem:
        """`alive` [U] after the last decision."""
        text = "a draw" if winner is None else f"{self.teams[winner]} wins"
        how = "by time" if is_by_time else "by holding the zone" if bool(alive.view(2, -1).any(1).all()) else "by elimination"
        return FeedItem(frame=frame, kind="end", text=f"{text} {how}")


def _which(units: Tensor) -> list[int]:
    return [int(unit) for unit in units[0].nonzero().flatten()]


def _killer(killers: Tensor, step_events: StepEvents, unit: int) -> int | None:
    """The enemy who is paid for it; else the friend who did it, or the victim itself; None: the ground."""
    if bool(killers[:, unit].any()):
        return int(killers[:, unit].int().argmax())
    taken = step_events.taken[0, :, unit]
    return int(taken.argmax()) if bool(taken.any()) else None
