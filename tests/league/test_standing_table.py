"""The standings as a table and as JSON."""

from __future__ import annotations

import json

import msgspec
import pytest

from esper.league import LEARNER, League, WinRecord, standing_rows, standings
from esper.league.ratings import is_available
from tests.league.leagues import promoted, small_league, weights_of

needs_openskill = pytest.mark.skipif(not is_available(), reason="openskill is missing: esper-grow[league]")


def played(*, is_rated: bool) -> League:
    league = small_league(size=2, is_rated=is_rated)
    league.record("strong", "weak", WinRecord(wins=90, draws=2, losses=8))
    for name in ("one", "two", "three"):
        promoted(league, name)
    league.record("three", "strong", WinRecord(wins=410, draws=12, losses=90))
    league.record(LEARNER, "three", WinRecord(wins=1, draws=1, losses=2))
    league.enter("four", 12_345, weights_of(4))
    return league


def test_without_ratings_the_standings_are_scores_with_intervals() -> None:
    assert standings(played(is_rated=False)).splitlines() == [
        "name         kind    step  rating  games  opponents              vs weak            vs strong  learner scores",
        "weak       anchor       -       -    100          1                    -    9.0 % [4.8, 16.2]               -",
        "strong     anchor       -       -    612          2  91.0 % [83.8, 95.2]                    -               -",
        "four    candidate  12,345       -      0          0                    -                    -               -",
        "three        best       4       -    522          2                    -  81.2 % [77.6, 84.4]          37.5 %",
        "two        member       3       -     20          2                    -                    -               -",
        "and 1 that has left the league",
        "this league began without ratings; for the next one, install openskill with: pip install 'esper-grow[league]'",
        "vs: score against a bot, draws half, with its 95 % interval; learner scores: those of the player in training against it",
    ]


def test_retired_players_are_shown_on_request() -> None:
    lines = standings(played(is_rated=False), with_retired=True).splitlines()
    assert [line.split()[:5] for line in lines if "retired" in line] == [["one", "retired", "2", "-", "10"]]
    assert not any("left the league" in line for line in lines)


def test_an_empty_league_has_standings_too() -> None:
    assert standings(League(is_rated=False)).splitlines()[0].split()[:5] == ["name", "kind", "step", "rating", "games"]
    assert standing_rows(League(is_rated=False)) == []


@needs_openskill
def test_a_rating_is_shown_with_its_uncertainty() -> None:
    league = played(is_rated=True)
    line = next(line for line in standings(league).splitlines() if line.startswith("three"))
    rating = league.rating("three")
    assert rating is not None
    assert f"{rating.mu:.1f} ± {rating.sigma:.1f} " in line


@needs_openskill
def test_a_rating_that_rests_on_one_opponent_says_so() -> None:
    lines = standings(played(is_rated=True)).splitlines()
    assert [line.split()[0] for line in lines if "*  " in line] == ["weak"]
    assert any(line.startswith("*: this rating rests on games against one opponent") for line in lines)
    league = small_league(is_rated=True)
    assert "*" not in standings(league), "nobody has met anybody"


@needs_openskill
def test_the_strongest_players_come_first() -> None:
    rows = standing_rows(played(is_rated=True))
    ordinals = [row.rating.ordinal for row in rows if row.rating]
    assert len(ordinals) == len(rows) == 5
    assert ordinals == sorted(ordinals, reverse=True)
    assert rows[0].name == "three"


def test_rows_are_json_for_programs() -> None:
    rows = json.loads(msgspec.json.encode(standing_rows(played(is_rated=False))))
    three = next(row for row in rows if row["name"] == "three")
    assert three["against"] == {"strong": {"wins": 410, "draws": 12, "losses": 90, "maps": []}}
    assert (three["kind"], three["games"], three["learner_score"]) == ("member", 522, 0.375)
