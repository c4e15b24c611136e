"""Results of an arena run against its opponents: recent win rates with intervals, and ratings of the league. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from esper.intervals import wilson_interval
from esper.runs.index import EventIndex

RECENT = 20  # rounds whose battles are counted; the learner of earlier ones was another player


class OpponentRow(NamedTuple):
    """One opponent. A draw is half a win; the interval is Wilson's at 95 %, over battles."""

    name: str
    won: int
    drawn: int
    lost: int
    rate: float | None  # None without recent battles
    low: float | None
    high: float | None
    rating: float | None  # mean of the rating's distribution; None in a league without ratings, and for bots outside of it
    spread: float | None  # standard deviation of that distribution
    is_anchor: bool  # a bot, which does not change during the run


def opponent_rows(index: EventIndex) -> list[OpponentRow]:
    """Return all opponents of the last rounds and all players of the league: anchors first, then by rating and name."""
    counts: dict[str, list[int]] = {}
    for event in index.events("round_fought")[-RECENT:]:
        for name, results in event["results"].items():
            counts[name] = [old + new for old, new in zip(counts.get(name, [0, 0, 0]), results, strict=True)]
    changes = index.events("league_changed")[-1:]
    ratings: dict[str, list[float]] = changes[0].get("ratings", {}) if changes else {}
    anchors = set(changes[0].get("anchors", ())) if changes else set()
    rows = [_row(name, counts.get(name, [0, 0, 0]), ratings.get(name), name in anchors) for name in dict.fromkeys((*counts, *ratings))]
    return sorted(rows, key=lambda row: (not row.is_anchor, -(row.rating or 0.0), row.name))


def _row(name: str, results: list[int], rating: list[float] | None, is_anchor: bool) -> OpponentRow:
    won, drawn, lost = results
    interval = wilson_interval(won + drawn / 2, sum(results)) if sum(results) else None
    rate, low, high = (None, None, None) if interval is None else (interval.estimate, interval.low, interval.high)
    mean, spread = (None, None) if rating is None else rating
    return OpponentRow(name, won, drawn, lost, rate, low, high, mean, spread, is_anchor)
