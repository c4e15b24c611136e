"""How battles ended: between two players, and in a table between all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from esper.statistics import Interval, wilson_interval


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Battles of one player against another, from the side of the first.

    >>> print(Record(wins=410, draws=12, losses=90))
    81.2 % [77.6, 84.4]
    >>> print(Record(wins=410, draws=12, losses=90).in_words())
    81.2 % of 512 battles, draws half (95 % sure: 77.6 to 84.4 %): 410 won, 12 drawn, 90 lost
    """

    wins: int = 0
    draws: int = 0
    losses: int = 0

    def __post_init__(self) -> None:
        wrong = [
            count for count in (self.wins, self.draws, self.losses) if isinstance(count, bool) or not isinstance(count, int) or count < 0
        ]
        if wrong:
            raise ValueError(f"wins, draws and losses are whole numbers from 0; got {wrong[0]!r} in {self!r}")

    def __add__(self, other: Record) -> Record:
        return Record(self.wins + other.wins, self.draws + other.draws, self.losses + other.losses)

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
        """What was won: 1 for a win, 1/2 for a draw."""
        return self.wins + self.draws / 2

    @property
    def score(self) -> float:
        """Points per battle, from 0 to 1."""
        return self.interval().estimate

    def interval(self, *, confidence: float = 0.95) -> Interval:
        """The score with Wilson's interval."""
        if not self.battles:
            raise ValueError("no battles, no score; play some first")
        return wilson_interval(self.points, self.battles, confidence=confidence)

    def reversed(self) -> Record:
        """The same battles from the other side."""
        return Record(self.losses, self.draws, self.wins)

    def in_words(self) -> str:
        if not self.battles:
            return "no battles"
        interval = self.interval()
        return (
            f"{100 * interval.estimate:.1f} % of {self.battles} battles, draws half "
            f"(95 % sure: {100 * interval.low:.1f} to {100 * interval.high:.1f} %): "
            f"{self.wins} won, {self.draws} drawn, {self.losses} lost"
        )


class TableRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pair of a table, as it is stored: `first` comes before `second` in the alphabet."""

    first: str
    second: str
    record: Record


class WinTable:
    """All battles between named players, whoever is named first.

    >>> table = WinTable()
    >>> table.add("new", "old", Record(wins=3, losses=1))
    >>> table.add("old", "new", Record(draws=1))
    >>> table.between("new", "old")
    Record(wins=3, draws=1, losses=1)
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], Record] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WinTable) and self._records == other._records

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __iter__(self) -> Iterator[tuple[str, str, Record]]:
        """Every pair that has met, once, in the order of the alphabet."""
        for first, second in sorted(self._records):
            yield first, second, self._records[first, second]

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(sorted({name for pair in self._records for name in pair}))

    def add(self, player: str, opponent: str, record: Record) -> None:
        check_pair(player, opponent)
        if record.battles:
            first, second, own = in_order(player, opponent, record)
            self._records[first, second] = self._records.get((first, second), Record()) + own

    def between(self, player: str, opponent: str) -> Record:
        """From the side of `player`; without battles where the two have not met."""
        if player <= opponent:
            return self._records.get((player, opponent), Record())
        return self._records.get((opponent, player), Record()).reversed()

    def total(self, player: str) -> Record:
        """All battles of a player."""
        return sum((self.between(player, other) for other in self.players if other != player), Record())

    def remove(self, player: str) -> None:
        """Forgets all battles of a player."""
        self._records = {pair: record for pair, record in self._records.items() if player not in pair}

    @classmethod
    def from_rows(cls, rows: Sequence[TableRow]) -> WinTable:
        table = cls()
        for row in rows:
            table.add(row.first, row.second, row.record)
        return table


def check_pair(player: str, opponent: str) -> None:
    if player == opponent:
        raise ValueError(f"{player!r} cannot be its own opponent; battles against oneself say nothing")


def in_order(player: str, opponent: str, record: Record) -> tuple[str, str, Record]:
    """The same battles told from the side whose name comes first, so that it does not matter who tells them."""
    return (player, opponent, record) if player < opponent else (opponent, player, record.reversed())
