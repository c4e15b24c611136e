"""A league: past selves enter, play, are settled and retire; its state is restored exactly."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.league import LEARNER, League, LeagueConfig, LeagueError, WinRecord
from esper.league.ratings import Rating, is_available
from esper.runs import CheckpointStore
from tests.league.leagues import WIN, promoted, small_league, weights_of

needs_openskill = pytest.mark.skipif(not is_available(), reason="openskill is missing: esper-grow[league]")


def test_a_candidate_that_beats_the_best_becomes_the_best() -> None:
    league = small_league()
    assert league.best is None
    promoted(league, "one")
    assert (league.best, league.members) == ("one", ("one",))
    promoted(league, "two")
    assert (league.best, league.members) == ("two", ("one", "two"))


def test_a_candidate_that_does_not_beat_the_best_is_refused() -> None:
    league = promoted(small_league(), "one")
    league.enter("two", 2, weights_of(2))
    league.record("two", "one", WinRecord(wins=50, losses=50))
    league.record("two", "strong", WinRecord(wins=1))
    result = league.settle("two")
    assert not result.is_promoted
    assert result.reason.startswith("50.0 % [40.4, 59.6] against one, needed from 50.0 % on")
    assert league.members == ("one",)
    assert "two" not in league.weights
    assert league.table.total("strong").battles == 0
    league.enter("two", 3, weights_of(3))  # the name is free again
    assert league.rating("two") in (None, Rating())


@needs_openskill
def test_only_a_promoted_candidate_changes_the_ratings_of_its_opponents() -> None:
    league = promoted(small_league(), "one")
    league.record("weak", "strong", WinRecord(losses=10))
    before = league.to_state()
    league.enter("two", 2, weights_of(2))
    league.record("two", "strong", WIN)
    assert league.rating("two").ordinal > Rating().ordinal  # type: ignore[union-attr]
    league.record("two", "one", WinRecord(losses=10))
    assert not league.settle("two").is_promoted
    assert league.to_state() == before
    league.enter("three", 3, weights_of(3))
    for opponent in ("strong", "one"):
        league.record("three", opponent, WIN)
    assert league.settle("three").is_promoted
    after = league.to_state()["ratings"]
    assert after["strong"]["mu"] < before["ratings"]["strong"]["mu"]
    assert after["weak"] == before["ratings"]["weak"]
    assert league.rating("one").mu < Rating().mu < league.rating("three").mu  # type: ignore[union-attr]


def test_a_candidate_that_has_not_met_the_best_cannot_be_settled() -> None:
    league = promoted(small_league(), "one")
    league.enter("two", 2, weights_of(2))
    with pytest.raises(LeagueError, match="'two' has not met the best member, 'one'"):
        league.settle("two")


def test_a_full_league_retires_the_least_useful_player_and_keeps_its_results() -> None:
    league = small_league(size=2)
    promoted(promoted(league, "one"), "two")
    league.record(LEARNER, "two", WinRecord(wins=10))
    league.record(LEARNER, "one", WinRecord(losses=10))
    league.enter("three", 3, weights_of(3))
    league.record("three", "two", WIN)
    result = league.settle("three")
    assert result.retired == ("two",)
    assert league.members == ("one", "three")
    assert league.entry("two").kind == "retired"
    assert set(league.weights) == {"one", "three"}
    assert league.table.between("three", "two") == WIN
    with pytest.raises(LeagueError, match="'two' has left the league"):
        league.record("two", "one", WIN)


def test_anchors_never_retire() -> None:
    league = small_league(size=1)
    league.record(LEARNER, "weak", WinRecord(wins=1000))
    for name in ("one", "two", "three", "four"):
        promoted(league, name)
    assert league.anchors == ("weak", "strong")
    assert league.members == ("four",)
    with pytest.raises(LeagueError, match="'weak' is an anchor; only candidates are settled"):
        league.settle("weak")


def test_the_weights_are_copied_and_independent_of_the_learner() -> None:
    league, weights = small_league(), weights_of(1)
    before = weights["layer.weight"].clone()
    league.enter("one", 1, weights)
    weights["layer.weight"].add_(1)
    assert torch.equal(league.weights["one"]["layer.weight"], before)


def test_harder_opponents_are_drawn_more_often() -> None:
    league = promoted(promoted(small_league(), "one"), "two")
    assert league.opponents() == {"one": 0.5, "two": 0.5}
    league.record(LEARNER, "one", WinRecord(wins=9, losses=1))
    opponents = league.opponents()
    assert opponents["two"] > opponents["one"] > 0
    assert set(league.opponents(["one", "strong"])) == {"one", "strong"}


def test_old_battles_of_the_learner_lose_weight() -> None:
    league = promoted(small_league(memory=100), "one")
    league.record("one", LEARNER, WinRecord(wins=100))
    assert league.learner_score("one") == 0
    league.record(LEARNER, "one", WinRecord(wins=100))
    assert league.learner_score("one") == pytest.approx(1 / 2)
    league.record(LEARNER, "one", WinRecord(wins=100))
    assert league.learner_score("one") == pytest.approx(3 / 4)


def test_battles_of_the_learner_change_neither_table_nor_ratings() -> None:
    league = promoted(small_league(), "one")
    before = league.to_state()
    league.record(LEARNER, "one", WinRecord(wins=9, losses=1))
    after = league.to_state()
    assert after.pop("recent") != before.pop("recent")
    assert after == before


@needs_openskill
def test_ratings_do_not_depend_on_which_side_reports_a_match() -> None:
    told, retold = small_league(), small_league()
    record = WinRecord(wins=20, draws=3, losses=7)
    told.record("weak", "strong", record)
    retold.record("strong", "weak", record.reversed())
    assert told.to_state() == retold.to_state()
    assert told.rating("weak").ordinal > told.rating("strong").ordinal  # type: ignore[union-attr]


@pytest.mark.parametrize("is_rated", [False, pytest.param(True, marks=needs_openskill)])
def test_a_resumed_league_equals_an_uninterrupted_one(is_rated: bool) -> None:
    def begin(league: League) -> None:
        league.record(LEARNER, "strong", WinRecord(wins=1, draws=1, losses=1))
        for name in ("one", "two"):
            promoted(league, name)
            league.record(name, "strong", WinRecord(wins=7, draws=2, losses=3))
        league.enter("three", 3, weights_of(3))

    def go_on(league: League) -> None:
        league.record("three", "two", WinRecord(wins=300, draws=7, losses=100))
        league.record(LEARNER, "one", WinRecord(wins=333, losses=1))
        league.settle("three")
        league.record(LEARNER, "three", WinRecord(wins=1, losses=2))

    whole = small_league(size=2, is_rated=is_rated)
    begin(whole)
    through_json = json.loads(json.dumps(whole.to_state(), allow_nan=False))
    resumed = League.from_state(through_json, whole.weights)
    assert resumed.to_state() == whole.to_state() == through_json
    go_on(whole)
    go_on(resumed)
    assert json.dumps(resumed.to_state()) == json.dumps(whole.to_state())
    assert resumed.opponents() == whole.opponents()
    assert resumed.weights.keys() == whole.weights.keys() == {"two", "three"}


def test_a_checkpoint_holds_a_league(tmp_path: Path) -> None:
    league = promoted(promoted(small_league(), "one"), "two")
    league.record(LEARNER, "one", WinRecord(wins=1, losses=2))
    store = CheckpointStore(tmp_path, kind="test")
    store.save(1, {"league": league.to_state(), "weights": league.weights})
    state = store.load().state
    assert League.from_state(state["league"], state["weights"]).to_state() == league.to_state()


def test_a_smaller_capacity_takes_effect_with_the_next_player() -> None:
    league = promoted(promoted(promoted(small_league(size=3), "one"), "two"), "three")
    smaller = League.from_state(league.to_state(), league.weights, config=LeagueConfig(size=2))
    assert len(smaller.members) == 3
    assert promoted(smaller, "four").members == ("three", "four")


def test_a_match_is_saved_and_loaded_with_its_maps() -> None:
    league = small_league()
    league.record("weak", "strong", WinRecord.of_pairs([1.0, 0.0, 0.0, 0.5]))
    again = League.from_state(json.loads(json.dumps(league.to_state())))
    assert again.table.between("strong", "weak").maps == (0, 0, 1, 1, 0)


def test_a_state_is_a_copy() -> None:
    league = promoted(small_league(), "one")
    state = league.to_state()
    before = copy.deepcopy(state)
    promoted(league, "two")
    assert state == before


def test_a_state_without_the_weights_of_a_player_is_refused() -> None:
    league = promoted(small_league(), "one")
    with pytest.raises(LeagueError, match="the weights of 'one' are missing"):
        League.from_state(league.to_state(), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "was written by a newer esper: the version of its state is 2, this one reads up to 1"),
        ({"version": 0}, "is damaged: the version of its state is 0"),
        ({"table": [{"first": "a", "second": "a", "record": {"wins": 1}}]}, "not the state of a league: 'a' cannot be its own opponent"),
        ({"entries": [{"name": "a", "kind": "boss"}]}, r"not the state of a league: Invalid enum value 'boss' - at `\$.entries"),
        ({"surprise": 1}, "unknown field `surprise`"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LeagueError, match=message):
        League.from_state(small_league().to_state() | change)


@pytest.mark.parametrize("name", ["", "../one", "a b", ".one", "-", "x" * 101, "one\n"])
def test_names_that_cannot_be_files_are_refused(name: str) -> None:
    with pytest.raises(LeagueError, match="cannot be a player's name"):
        small_league().enter(name, 1, weights_of(1))


@pytest.mark.parametrize(("name", "owner"), [("weak", "an anchor"), (LEARNER, "the learner"), ("one", "a member")])
def test_a_name_is_given_once(name: str, owner: str) -> None:
    with pytest.raises(LeagueError, match=f"'{name}' is taken by {owner}"):
        promoted(small_league(), "one").enter(name, 1, weights_of(1))


def test_battles_of_unknown_players_are_refused_and_change_nothing() -> None:
    league = small_league()
    before = league.to_state()
    with pytest.raises(LeagueError, match=r"no player 'nobody' in the league; it has \['strong', 'weak'\]"):
        league.record("weak", "nobody", WinRecord(wins=1))
    with pytest.raises(ValueError, match="'weak' cannot be its own opponent"):
        league.record("weak", "weak", WinRecord(wins=1))
    assert league.to_state() == before


def test_without_openskill_all_but_ratings_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openskill", None)
    league = League(["weak", "strong"], LeagueConfig(size=1))
    assert not league.is_rated
    promoted(promoted(league, "one"), "two")
    assert league.members == ("two",)
    assert league.rating("two") is None
    with pytest.raises(ImportError, match=r"needs openskill; install openskill with: pip install 'esper-grow\[league\]'"):
        League(is_rated=True)


@needs_openskill
def test_a_rated_league_can_be_read_without_openskill_but_not_played_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from esper.league import ratings

    league = promoted(promoted(small_league(), "one"), "two")
    monkeypatch.setitem(sys.modules, "openskill", None)
    monkeypatch.setitem(sys.modules, "openskill.models", None)
    ratings._model.cache_clear()
    read = League.from_state(league.to_state(), league.weights)
    assert read.rating("two") == league.rating("two") != Rating()
    with pytest.raises(ImportError, match=r"pip install 'esper-grow\[league\]'"):
        read.record("one", "two", WIN)
    assert read.to_state() == league.to_state()
