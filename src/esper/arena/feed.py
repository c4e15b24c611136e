"""The feed of a battle: lines of text about kills, falls, shutdowns, the zone, and the end.

The feed follows from the battle, so the feed of a replay can be made again and compared. States are `Saved` battles of
`esper.arena.native.simulation`; only the first battle in each is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.native import layout as at
from esper.arena.native.simulation import Saved
from esper.replay_file import FeedItem


class FeedWriter:
    """Writes the feed of battles between two teams with these names."""

    def __init__(self, config: ArenaConfig, teams: tuple[str, str]) -> None:
        self.teams = teams
        sides = [teams[index // config.team_size] for index in range(config.units)]
        self.names = [f"{name} {index % config.team_size + 1} of {sides[index]}" for index, name in enumerate(config.unit_classes)]

    def decision(self, frame: int, was: Saved, now: Saved, taken: Tensor) -> list[FeedItem]:
        """Return the feed items of the decision before a frame: kills, falls and shutdowns. `taken` [U, U] is damage by attacker."""
        alive, lives = (saved["unit"][0, at.HIT_POINTS] > 0 for saved in (was, now))
        before, after = was["number"][0], now["number"][0]
        falls = (after[at.FALLEN] > 0) & (before[at.FALLEN] == 0) & lives
        stops = (after[at.IS_SHUT_DOWN] != 0) & (before[at.IS_SHUT_DOWN] == 0)
        items = []
        for unit in _which(alive & ~lives):
            by = _killer(taken[:, unit], unit)
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
    return [int(unit) for unit in units.nonzero().flatten()]


def _killer(taken: Tensor, unit: int) -> int | None:
    """Return the unit that killed another, by the damage of all units to it [U].

    It is the enemy that did the most, else the friend or the unit itself; None if it was the terrain.
    """
    team = len(taken) // 2
    enemies = slice(team, None) if unit < team else slice(0, team)
    by_enemies = taken[enemies]
    if bool(by_enemies.any()):
        return int(by_enemies.argmax()) + (team if unit < team else 0)
    return int(taken.argmax()) if bool(taken.any()) else None
