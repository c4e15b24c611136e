"""Ratings find the order of players, keep their uncertainty, and do not depend on which side reports a match."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import sys

import pytest
from hypothesis import given, strategies as st

from esper.league import ratings
from esper.league.ratings import LEAST_SIGMA, MATCH_BATTLES, Rating, rate_match, shrink_record, spread_outcomes
from esper.league.record import WinRecord

COUNTS = st.integers(0, 600)
RECORDS = st.builds(WinRecord, COUNTS, COUNTS, COUNTS)

needs_openskill = pytest.mark.skipif(importlib.util.find_spec("openskill") is None, reason="openskill is missing: esper-grow[league]")


@given(RECORDS)
def test_a_shrunk_match_keeps_its_proportions(record: WinRecord) -> None:
    small = shrink_record(record, MATCH_BATTLES)
    assert small.battles == min(record.battles, MATCH_BATTLES)
    for few, many in ((small.wins, record.wins), (small.draws, record.draws), (small.losses, record.losses)):
        assert abs(few - many * small.battles / max(record.battles, 1)) < 1


@given(RECORDS)
def test_outcomes_are_spread_evenly_over_a_match(record: WinRecord) -> None:
    outcomes = spread_outcomes(record)
    assert [outcomes.count(name) for name in ("win", "draw", "loss")] == [record.wins, record.draws, record.losses]
    half = outcomes[: len(outcomes) // 2]
    assert abs(half.count("win") - record.wins / 2) <= 1.5


@needs_openskill
def test_a_win_raises_the_winner_lowers_the_loser_and_reduces_both_uncertainties() -> None:
    winner, loser = rate_match(Rating(), Rating(), WinRecord(wins=1))
    assert winner.mu > 25 > loser.mu
    assert winner.sigma < Rating().sigma > loser.sigma
    assert winner.ordinal == winner.mu - 3 * winner.sigma


@needs_openskill
def test_a_draw_moves_both_towards_each_other() -> None:
    strong, weak = rate_match(Rating(30.0, 2.0), Rating(20.0, 2.0), WinRecord(draws=1))
    assert 20 < weak.mu < strong.mu < 30


@needs_openskill
def test_a_match_without_battles_changes_nothing() -> None:
    assert rate_match(Rating(), Rating(28.0, 3.0), WinRecord()) == (Rating(), Rating(28.0, 3.0))


@needs_openskill
def test_a_long_match_weighs_no_more_than_its_bound() -> None:
    bound = rate_match(Rating(), Rating(), WinRecord(wins=MATCH_BATTLES * 3 // 4, losses=MATCH_BATTLES // 4))
    assert rate_match(Rating(), Rating(), WinRecord(wins=30_000, losses=10_000)) == bound


@pytest.mark.slow
@needs_openskill
def test_the_uncertainty_of_a_rating_has_a_floor() -> None:
    player, opponent = Rating(), Rating()
    for _ in range(200):
        player, opponent = rate_match(player, opponent, WinRecord(wins=32, losses=32))
    assert player.sigma == opponent.sigma == LEAST_SIGMA
    after, _ = rate_match(player, opponent, WinRecord(wins=64))
    assert after.mu - player.mu > 1  # and still moves


@pytest.mark.slow
@needs_openskill
def test_ratings_recover_the_order_and_the_chances_of_known_players() -> None:
    strengths = {"a": 20.0, "b": 24.0, "c": 27.0, "d": 33.0}
    field = dict.fromkeys(strengths, Rating())
    means = dict.fromkeys(strengths, 0.0)  # over the later rounds: a single rating is known to about its sigma only
    rng = random.Random(0)
    for turn in range(60):
        for first, second in itertools.combinations(strengths, 2):
            chance = 1 / (1 + math.exp((strengths[second] - strengths[first]) / 6))
            wins = sum(rng.random() < chance for _ in range(32))
            field[first], field[second] = rate_match(field[first], field[second], WinRecord(wins=wins, losses=32 - wins))
        if turn >= 20:
            means = {name: mean + field[name].mu / 40 for name, mean in means.items()}
    assert sorted(field, key=lambda name: field[name].ordinal) == ["a", "b", "c", "d"]
    for first, second in itertools.combinations(strengths, 2):
        assert means[second] - means[first] == pytest.approx(strengths[second] - strengths[first], abs=1.0)


def test_without_openskill_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openskill", None)
    monkeypatch.setitem(sys.modules, "openskill.models", None)
    ratings._model.cache_clear()
    assert not ratings.is_available()
    with pytest.raises(ImportError, match=r"pip install 'esper-grow\[league\]'"):
        rate_match(Rating(), Rating(), WinRecord(wins=1))
