"""The rules of promotion, retirement and the choice of opponents."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from esper.league.league import is_promoted, least_useful, opponent_weights, retirements
from esper.league.record import WinRecord

SCORES = st.dictionaries(st.text(min_size=1), st.none() | st.floats(0, 1), min_size=1)


def test_the_first_candidate_is_promoted() -> None:
    assert is_promoted(None, promote_at=1.0)


@pytest.mark.parametrize(("wins", "expected"), [(10, False), (13, False), (14, False), (15, True), (20, True)])
def test_a_candidate_is_promoted_where_the_lower_end_of_its_interval_reaches_the_bar(wins: int, expected: bool) -> None:
    record = WinRecord.of_pairs([1.0, 1.0] * wins + [0.0, 0.0] * (20 - wins))  # 14 of 20 maps are 70 %, and may be luck
    assert is_promoted(record, promote_at=0.5) is expected
    assert is_promoted(record, promote_at=0.5) == (record.interval().low >= 0.5)


def test_the_lowest_rated_of_the_nearly_always_beaten_players_retires() -> None:
    scores = {"old": 0.95, "middle": 0.92, "hard": 0.4, "best": 1.0}
    ordinals = {"old": 12.0, "middle": 8.0, "hard": 1.0, "best": 0.0}
    assert least_useful(["old", "middle", "hard", "best"], learner_scores=scores, ordinals=ordinals, beaten_at=0.9) == "middle"


def test_the_oldest_of_equal_players_retires() -> None:
    scores = {"old": 1.0, "young": 1.0}
    for ordinals in ({}, {"old": 3.0, "young": 3.0}):
        assert least_useful(["old", "young", "best"], learner_scores=scores, ordinals=ordinals, beaten_at=0.9) == "old"


def test_the_oldest_player_retires_where_none_is_nearly_always_beaten() -> None:
    ordinals = {"old": 12.0, "young": 8.0}
    assert least_useful(["old", "young", "best"], learner_scores={"young": 0.8}, ordinals=ordinals, beaten_at=0.9) == "old"


def test_the_best_player_never_retires() -> None:
    assert least_useful(["old", "best"], learner_scores={"best": 1.0}, ordinals={"old": 30.0}, beaten_at=0.9) == "old"
    with pytest.raises(ValueError, match=r"never leaves, and there are only \['best'\]"):
        least_useful(["best"], learner_scores={}, ordinals={}, beaten_at=0.9)


@pytest.mark.slow
@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_exactly_as_many_players_retire_as_exceed_the_capacity(count: int, size: int, data: st.DataObject) -> None:
    members = [f"m{index}" for index in range(count)]
    scores = data.draw(st.dictionaries(st.sampled_from(members), st.floats(0, 1)))
    leaving = retirements(members, size=size, learner_scores=scores, ordinals={}, beaten_at=0.9)
    assert len(leaving) == len(set(leaving)) == max(count - size, 0)
    assert members[-1] not in leaving


@pytest.mark.slow
@given(SCORES, st.floats(0, 4), st.floats(0, 1))
def test_weights_are_a_distribution_that_falls_with_the_score(scores: dict[str, float | None], power: float, floor: float) -> None:
    weights = opponent_weights(scores, power=power, floor=floor)
    assert weights.keys() == scores.keys()
    assert sum(weights.values()) == pytest.approx(1)
    by_score = sorted(scores, key=lambda name: 0.5 if scores[name] is None else scores[name])  # type: ignore[arg-type,return-value]
    assert all(weights[harder] >= weights[easier] for harder, easier in itertools.pairwise(by_score))


def test_the_sampling_weight_is_a_power_of_the_chance_to_lose() -> None:
    weights = opponent_weights({"hard": 0.2, "easy": 0.6}, power=2.0, floor=0.0)
    assert weights["hard"] / weights["easy"] == pytest.approx(0.64 / 0.16)


def test_an_unknown_opponent_is_drawn_as_an_even_one() -> None:
    weights = opponent_weights({"even": 0.5, "new": None, "easy": 0.9}, power=2.0, floor=0.01)
    assert weights["new"] == weights["even"] > weights["easy"]


def test_the_floor_keeps_beaten_players_among_the_opponents() -> None:
    weights = opponent_weights({"even": 0.5, "beaten": 1.0}, power=2.0, floor=0.05)
    assert weights["beaten"] / weights["even"] == pytest.approx(0.05 / 0.25)


def test_always_beaten_opponents_are_drawn_evenly_without_a_floor() -> None:
    assert opponent_weights({"a": 1.0, "b": 1.0}, power=2.0, floor=0.0) == {"a": 0.5, "b": 0.5}
    assert opponent_weights({}, power=2.0, floor=0.0) == {}
