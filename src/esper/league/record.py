"""Results of battles: the record between two players, and a table of the records between all players."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from esper.statistics import Interval, clustered_interval, wilson_interval

_PER_MAP = 2  # battles of a match per map, one from each side


class WinRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Wins, draws and losses of one player against another.

    The two battles on one map depend on each other, so the interval of a match is over its maps. A record without `maps` treats its
    battles as independent.

    >>> print(WinRecord(wins=410, draws=12, losses=90))
    81.2 % [77.6, 84.4]
    >>> print(WinRecord.of_pairs([1.0, 1.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.0]).in_words())
    56.2 % of 8 battles on 4 maps, draws half (95 % sure: 11.9 to 92.4 %): 4 won, 1 drawn, 3 lost
    """

    wins: int = 0
    draws: int = 0
    losses: int = 0
    maps: tuple[int, ...] = ()  # number of maps that gave 0, 1/2, 1, 3/2 and 2 points; empty if battles were not fought in pairs

    def __post_init__(self) -> None:
        wrong = [
            count for count in (self.wins, self.draws, self.losses) if isinstance(count, bool) or not isinstance(count, int) or count < 0
        ]
        if wrong:
            raise ValueError(f"wins, draws and losses are whole numbers from 0; got {wrong[0]!r} in {self!r}")
        # The counts of maps must agree with the number of battles and with the points.
        if self.maps and (
            len(self.maps) != 2 * _PER_MAP + 1
            or min(self.maps) < 0
            or _PER_MAP * sum(self.maps) != self.battles
            or sum(halves * count for halves, count in enumerate(self.maps)) != 2 * self.points
        ):
            raise ValueError(
                f"maps are counted by their points from 0 to 2, two battles each, and must add up to the battles; got {self!r}"
            )

    @classmethod
    def of_pairs(cls, points: Sequence[float]) -> WinRecord:
        """Return the record of battles from their points (1, 1/2 or 0). Battles 2i and 2i + 1 share a map."""
        if len(points) % _PER_MAP:
            raise ValueError(f"battles of a match come in pairs; got {len(points)}, give an even number")
        maps = [0] * (2 * _PER_MAP + 1)
        for first in range(0, len(points), _PER_MAP):
            maps[round(2 * sum(points[first : first + _PER_MAP]))] += 1
        wins, draws, losses = (points.count(value) for value in (1.0, 0.5, 0.0))
        return cls(wins, draws, losses, tuple(maps) if points else ())

    def __add__(self, other: WinRecord) -> WinRecord:
        if not self.battles or not other.battles:
            return self if self.battles else other
        # The sum has maps only if both parts have them.
        maps = tuple(map(operator.add, self.maps, other.maps)) if self.maps and other.maps else ()
        return WinRecord(self.wins + other.wins, self.draws + other.draws, self.losses + other.losses, maps)

    def __str__(self) -> str:
        if not self.battles:
            return "-"
        interval = self.interval()
        return f"{100 * interval.estimate:.1f} % [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"

    @property
    def battles(self) -> int:
        return self.wins + self.draws + self.losses

    @property
    def points(self) -> float:
        """1 for a win plus 1/2 for a draw."""
        return self.wins + self.draws / 2

    @property
    def score(self) -> float:
        """Points per battle, from 0 to 1."""
        if not self.battles:
            raise ValueError("no battles, no score; play some first")
        return self.points / self.battles

    def interval(self, *, confidence: float = 0.95) -> Interval:
        """Return the score with its confidence interval: over maps if they are known, else Wilson's interval over battles."""
        if not self.battles:
            raise ValueError("no battles, no score; play some first")
        if self.maps:
            rates = np.repeat(np.linspace(0, 1, len(self.maps)), self.maps)
            return clustered_interval(rates, size=_PER_MAP, confidence=confidence)
        return wilson_interval(self.points, self.battles, confidence=confidence)

    def reversed(self) -> WinRecord:
        """Return the same battles from the other side."""
        return WinRecord(self.losses, self.draws, self.wins, self.maps[::-1])

    def in_words(self) -> str:
        if not self.battles:
            return "no battles"
        interval = self.interval()
        where = f" on {sum(self.maps)} {'map' if sum(self.maps) == 1 else 'maps'}" if self.maps else ""
        return (
            f"{100 * interval.estimate:.1f} % of {self.battles} battles{where}, draws half "
            f"(95 % sure: {100 * interval.low:.1f} to {100 * interval.high:.1f} %): "
            f"{self.wins} won, {self.draws} drawn, {self.losses} lost"
        )


class TableRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pair of players of a table, as it is saved: `first` comes before `second` in the alphabet."""

    first: str
    second: str
    record: WinRecord


class WinTable:
    """Records of all pairs of players. The order in which a pair is named does not matter.

    >>> table = WinTable()
    >>> table.add("new", "old", WinRecord(wins=3, losses=1))
    >>> table.add("old", "new", WinRecord(draws=1))
    >>> table.between("new", "old")
    WinRecord(wins=3, draws=1, losses=1)
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], WinRecord] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WinTable) and self._records == other._records

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __iter__(self) -> Iterator[tuple[str, str, WinRecord]]:
        """Yield every pair that has met once, in alphabetical order."""
        for first, second in sorted(self._records):
            yield first, second, self._records[first, second]

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(sorted({name for pair in self._records for name in pair}))

    def add(self, player: str, opponent: str, record: WinRecord) -> None:
        check_pair(player, opponent)
        if record.battles:
            first, second, own = in_order(player, opponent, record)
            self._records[first, second] = self._records.get((first, second), WinRecord()) + own

    def between(self, player: str, opponent: str) -> WinRecord:
        """Return the record from the side of `player`; empty if the two have not met."""
        if player <= opponent:
            return self._records.get((player, opponent), WinRecord())
        return self._records.get((opponent, player), WinRecord()).reversed()

    def total(self, player: str) -> WinRecord:
        """Return the sum of all records of a player."""
        return sum((self.between(player, other) for other in self.players if other != player), WinRecord())

    def remove(self, player: str) -> None:
        """Remove all records of a player."""
        self._records = {pair: record for pair, record in self._records.items() if player not in pair}

    @classmethod
    def from_rows(cls, rows: Sequence[TableRow]) -> WinTable:
        table = cls()
        for row in rows:
            table.add(row.first, row.second, row.record)
        return table


def check_pair(player: str, opponent: str) -> None:
    if player == opponent:
        raise ValueError(f"{player!r} cannot be its own opponent; give two different players")


def in_order(player: str, opponent: str, record: WinRecord) -> tuple[str, str, WinRecord]:
    """Return the names in alphabetical order, with the record from the side of the first."""
    return (player, opponent, record) if player < opponent else (opponent, player, record.reversed())
