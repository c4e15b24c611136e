"""Win rates and ratings of an arena run, from its events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.league.events import LeagueChanged, RoundFought
from esper.runs import EventLog
from esper.runs.index import EventIndex
from esper.runs.opponents import RECENT, opponent_rows


def fought(update: int, **results: tuple[int, int, int]) -> RoundFought:
    return RoundFought(update=update, results=results, opponents=[], team=1, overflow=0)


def changed(**fields: object) -> LeagueChanged:
    return LeagueChanged(update=1, name="update-1", is_promoted=True, reason="", retired=[], against={}, **fields)  # type: ignore[arg-type]


def index_of(folder: Path, *events: RoundFought | LeagueChanged) -> EventIndex:
    with EventLog(folder / "events.jsonl", run="arena") as log:
        for event in events:
            log.emit(event)
    index = EventIndex(folder / "events.jsonl")
    index.refresh()
    return index


def test_the_battles_of_the_last_rounds_are_counted_with_their_interval(tmp_path: Path) -> None:
    rounds = [fought(number, strong=(0, 0, 4) if number < 5 else (3, 1, 0), weak=(1, 0, 0)) for number in range(RECENT + 5)]
    strong, weak = opponent_rows(index_of(tmp_path, *rounds))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines() if "round_fought" in line][-RECENT:]
    assert (strong.won, strong.drawn, strong.lost) == tuple(sum(line["results"]["strong"][place] for line in lines) for place in range(3))
    assert strong.rate == pytest.approx(3.5 / 4)
    assert (strong.low or 1) < 0.875 < (strong.high or 0)
    assert weak.high == pytest.approx(1.0)


def test_anchors_come_first_then_players_by_rating(tmp_path: Path) -> None:
    ratings = {"old": (20.0, 2.0), "new": (30.0, 1.0), "strong": (28.0, 1.5)}
    rows = opponent_rows(index_of(tmp_path, fought(1, self=(2, 0, 2)), changed(ratings=ratings, anchors=["strong"])))
    assert [(row.name, row.rating, row.is_anchor) for row in rows] == [
        ("strong", 28.0, True),
        ("new", 30.0, False),
        ("old", 20.0, False),
        ("self", None, False),
    ]
    assert rows[0].rate is None


def test_a_league_of_an_earlier_version_has_no_ratings(tmp_path: Path) -> None:
    index_of(tmp_path, fought(1, weak=(1, 0, 0)), changed())
    path = tmp_path / "events.jsonl"
    path.write_text(path.read_text().replace(',"ratings":{},"anchors":[]', ""))
    assert "ratings" not in path.read_text()
    index = EventIndex(path)
    index.refresh()
    assert [(row.name, row.rating) for row in opponent_rows(index)] == [("weak", None)]
