"""Results of an arena run: win rates with intervals, ratings of the league, and the replays in its folder. Imports no torch."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from esper.files import printable
from esper.intervals import wilson_interval
from esper.replay_file import SUFFIX, ReplayError, find_replays, read_head
from esper.runs.index import EventIndex

RECENT = 20  # rounds whose battles are counted; the learner of earlier ones was another player
LEAST_BATTLES = 20  # of a point in a curve of win rates; with fewer its interval would tell nothing
REPLAYS = 50  # in a list, at most


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
    mean, spread = (None, None) if rating is None or not all(map(math.isfinite, rating)) else rating
    return OpponentRow(name, won, drawn, lost, rate, low, high, mean, spread, is_anchor)


# Win rates over time


class WinRates(NamedTuple):
    """Win rates against one opponent over the training, with Wilson's 95 % intervals over battles. A draw is half a win."""

    name: str
    steps: list[int]
    rates: list[float]
    low: list[float]
    high: list[float]


def win_rates(index: EventIndex, *, most_players: int, most_points: int) -> list[WinRates]:
    """Return the win rates against the opponents that the learner fought most often.

    Rounds that follow each other are joined until a point has `LEAST_BATTLES` battles and a line has at most `most_points` points.
    """
    fought: dict[str, list[tuple[int, list[int]]]] = {}  # opponent -> step and results of every round
    for event in index.events("round_fought"):
        for name, results in event["results"].items():
            if sum(results):
                fought.setdefault(name, []).append((int(event.get("step") or 0), results))
    battles = {name: sum(sum(results) for _, results in rounds) for name, rounds in fought.items()}
    lines = []
    for name in sorted(battles, key=lambda name: -battles[name])[:most_players]:
        line, joined = WinRates(name, [], [], [], []), [0, 0, 0]
        enough, left = max(LEAST_BATTLES, battles[name] / most_points), battles[name]
        for step, results in fought[name]:
            joined = [old + new for old, new in zip(joined, results, strict=True)]
            left -= sum(results)
            # The last point takes all battles that would be too few for one of their own.
            if left and (sum(joined) < enough or left < LEAST_BATTLES):
                continue
            interval = wilson_interval(joined[0] + joined[1] / 2, sum(joined))
            line.steps.append(step)
            line.rates.append(interval.estimate)
            line.low.append(interval.low)
            line.high.append(interval.high)
            joined = [0, 0, 0]
        lines.append(line)
    return lines


# Replays


def replays_of(folder: Path) -> list[Path]:
    """Return the replays in the folder of a run, newest first. Links are left out, since they may lead out of the folder."""
    return find_replays(folder)


def replay_rows(replays: Iterable[Path], base: str) -> list[dict[str, Any]]:
    """Return the rows of a list of replays: name, address, players, winner, length, time, and why a file cannot be read."""
    rows = []
    for path in itertools.islice(replays, REPLAYS):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            status = path.stat() if path.exists() else path.lstat()  # of a link to nothing, its own
            about = _about_replay(path, status.st_mtime_ns, status.st_size)
            name = printable(path.name)
            rows.append({"name": name.removesuffix(SUFFIX), "url": f"{base}/{quote(name, safe='')}", "time": status.st_mtime, **about})
    return rows


@lru_cache(maxsize=1024)
def _about_replay(path: Path, changed_ns: int, size: int) -> dict[str, Any]:
    """Return the facts of one replay. Read again only if the file has changed."""
    try:
        head = read_head(path)
    except ReplayError as error:
        return {"players": [], "winner": None, "seconds": None, "problem": printable(str(error))}
    return {"players": list(map(printable, head.teams)), "winner": head.winner, "seconds": head.seconds, "problem": None}


def result_of(row: Mapping[str, Any]) -> str:
    """Return who won the battle of a row of `replay_rows`, in words; nothing for a file that cannot be read."""
    if row["problem"]:
        return ""
    return "a draw" if row["winner"] is None else f"{row['players'][row['winner']]} wins"


def clock(seconds: float | None) -> str:
    """Return the length of a battle.

    >>> clock(75.4), clock(None)
    ('1:15', '–')
    """
    return "–" if seconds is None or not math.isfinite(seconds) else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
