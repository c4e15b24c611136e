"""Results between two players, and between all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from esper.league.record import WinRecord, WinTable
from esper.statistics import wilson_interval

COUNTS = st.integers(0, 1000)
RECORDS = st.builds(WinRecord, COUNTS, COUNTS, COUNTS)
PAIRS = st.lists(st.sampled_from("abcd"), min_size=2, max_size=2, unique=True)


def test_a_draw_is_half_a_win() -> None:
    record = WinRecord(wins=3, draws=2, losses=5)
    assert (record.battles, record.points, record.score) == (10, 4.0, 0.4)


def test_the_interval_is_wilsons_of_the_points() -> None:
    assert WinRecord(wins=5, losses=5).interval() == wilson_interval(5, 10)
    assert WinRecord(wins=4, draws=3, losses=3).interval() == wilson_interval(5.5, 10)
    assert WinRecord(wins=10).interval().low == pytest.approx(1 - 0.277533, abs=1e-6)


def test_the_interval_of_battles_on_shared_maps_is_over_the_maps() -> None:
    same = WinRecord.of_pairs([1.0, 1.0, 0.0, 0.0] * 16)  # whoever wins a battle wins the other one on its map
    assert (same.wins, same.losses, same.maps) == (32, 32, (16, 0, 0, 0, 16))
    over_maps, over_battles = same.interval(), wilson_interval(32, 64)
    assert over_maps.estimate == over_battles.estimate == 0.5
    assert over_maps.high - over_maps.low > 1.3 * (over_battles.high - over_battles.low)
    split = WinRecord.of_pairs([1.0, 0.0] * 32)  # the side decides; the maps say that neither player is better
    assert split.maps == (0, 0, 32, 0, 0)
    assert split.interval().high - split.interval().low < over_maps.high - over_maps.low
    assert (WinRecord.of_pairs([1.0, 1.0]).interval().low, WinRecord.of_pairs([1.0, 0.5]).interval().high) == (
        0.0,
        1.0,
    )  # one map: anything


def test_maps_add_up_and_turn_round_with_their_battles() -> None:
    one, other = WinRecord.of_pairs([1.0, 0.5, 0.0, 0.0]), WinRecord.of_pairs([1.0, 1.0])
    assert (one + other).maps == (1, 0, 0, 1, 1)
    assert (one + other).reversed() == WinRecord(wins=2, draws=1, losses=3, maps=(1, 1, 0, 0, 1))
    assert (one + WinRecord(wins=1)).maps == ()  # of one battle nothing is known of maps
    assert (one + WinRecord()).maps == one.maps
    with pytest.raises(ValueError, match="maps"):
        WinRecord(wins=2, maps=(1, 0, 0, 0, 0))
    with pytest.raises(ValueError, match="pairs"):
        WinRecord.of_pairs([1.0])


@given(RECORDS)
def test_both_sides_have_mirrored_records_of_a_match(record: WinRecord) -> None:
    other = record.reversed()
    assert other.reversed() == record
    if record.battles:
        assert other.score == pytest.approx(1 - record.score)
        assert other.interval().low == pytest.approx(1 - record.interval().high)


def test_a_record_is_formatted_in_words() -> None:
    words = WinRecord(wins=410, draws=12, losses=90).in_words()
    assert words == "81.2 % of 512 battles, draws half (95 % sure: 77.6 to 84.4 %): 410 won, 12 drawn, 90 lost"
    assert WinRecord().in_words() == "no battles"


def test_a_record_without_battles_has_no_score() -> None:
    with pytest.raises(ValueError, match="no battles, no score"):
        _ = WinRecord().score


@pytest.mark.parametrize("wrong", [-1, 0.5, True])
def test_impossible_counts_are_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"whole numbers from 0; got {wrong}"):
        WinRecord(wins=wrong)


@pytest.mark.slow
@given(st.lists(st.tuples(PAIRS, RECORDS)))
def test_results_add_up_whichever_side_reports_them(results: list[tuple[list[str], WinRecord]]) -> None:
    told, retold = WinTable(), WinTable()
    for (player, opponent), record in results:
        told.add(player, opponent, record)
        retold.add(opponent, player, record.reversed())
    assert told == retold
    for player in "abcd":
        assert told.total(player).battles == sum(record.battles for pair, record in results if player in pair)
        for opponent in set("abcd") - {player}:
            assert told.between(player, opponent) == told.between(opponent, player).reversed()


def test_a_removed_player_leaves_the_results_of_others() -> None:
    table = WinTable()
    table.add("a", "b", WinRecord(wins=1))
    table.add("b", "c", WinRecord(losses=1))
    table.remove("a")
    assert list(table) == [("b", "c", WinRecord(losses=1))]


def test_a_player_cannot_be_its_own_opponent() -> None:
    with pytest.raises(ValueError, match="'a' cannot be its own opponent"):
        WinTable().add("a", "a", WinRecord(wins=1))
