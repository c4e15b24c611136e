"""The statistics and tables of a comparison over cells, from records made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from esper.controller.compare_results import (
    PLANS,
    Comparison,
    Hosts,
    Lead,
    Record,
    best_size,
    blind_plans,
    cell_means,
    in_common,
    join_trainings,
    lower_bounds,
    mutual_information,
    of_whole_cells,
    results,
    share_of_tuning,
    sizes_by_data,
    tuned,
)
from esper.controller.compare_tables import tables
from esper.intervals import Interval, crossed_interval, crossed_p_value, holm, student_interval, student_p_value


def record(contestant: str, cell: int, seed: int, gain: float, *, price: float | None = None, **fields: Any) -> Record:
    about = {"what": "host", "group": "first", "val_gain": gain, "size": 0.0, "flops": 100, "plan": [], "training_samples": 500}
    return {**about, "label_noise": 0.0, "cell": cell, "contestant": contestant, "price": price, "host_seed": seed, "gain": gain, **fields}


def hosts(gains: Sequence[Sequence[float]], **fields: Any) -> Hosts:
    """Return records with these gains: a list per cell."""
    return {(cell, seed): record("x", cell, seed, gain, **fields) for cell, row in enumerate(gains) for seed, gain in enumerate(row)}


# Statistics


def test_means_are_over_the_hosts_of_a_cell_after_the_price_of_their_size() -> None:
    assert cell_means(hosts([[0.2, 0.4], [1.0]], size=2.0), 0.1) == pytest.approx({0: 0.1, 1: 0.8})


def test_results_are_compared_in_the_hosts_that_all_have() -> None:
    ours, theirs = [hosts([[0.3, 9.0], [0.5]]), hosts([[0.5, 9.0], [0.6], [1.0]])], [hosts([[0.1], [0.7], [5.0]])]
    first, second = in_common(ours, theirs)
    np.testing.assert_allclose(results(first, 0.0), [[0.3, 0.5], [0.5, 0.6]])  # [cells, trainings]
    np.testing.assert_allclose(results(second, 0.0), [[0.1], [0.7]])
    assert [list(one) for one in in_common(ours, theirs, only={(1, 0), (2, 0)})[0]] == [[(1, 0)]] * 2


def test_lower_bounds_are_corrected_for_the_number_of_cells() -> None:
    values = [0.1, 0.3, 0.2]
    alone = lower_bounds([hosts([values])], 0.0)
    both = lower_bounds([hosts([values, [1.0, 1.0, 1.0]])], 0.0)
    assert alone[0] == pytest.approx(student_interval(values, confidence=0.9).low)
    assert both == pytest.approx({0: student_interval(values, confidence=0.95).low, 1: 1.0})


def test_lower_bounds_of_several_trainings_are_those_of_their_mean() -> None:
    found = lower_bounds([hosts([[0.1, 0.3]]), hosts([[0.3, 0.9]])], 0.0)
    assert found[0] == pytest.approx(student_interval([0.2, 0.6], confidence=0.9).low)


def test_trainings_of_one_kind_are_joined_unless_their_name_is_taken() -> None:
    names = ["never", "learned 1", "learned 10", "value 1", "random 1", "random 2", "plan", "plan 1", "plan 2"]
    joined = {"learned": ("learned 1", "learned 10")}
    assert {name: of for name, of in join_trainings(names).items() if of != (name,)} == joined
    files = ["runs/training_1/controller.safetensors", "runs/training_2/controller.safetensors", "runs/first/controller.safetensors"]
    assert join_trainings(files) == {"runs/training": (files[0], files[1]), files[2]: (files[2],)}


def test_a_plan_is_tuned_on_the_other_hosts_of_a_cell_by_validation_and_price() -> None:
    val_gains = {name: (0.0, 0.0, 0.0) for name in PLANS}
    val_gains |= {"widen_100 at 0": (0.5, 0.1, 0.1), "deep at 0": (0.0, 0.2, 0.2)}
    plans = {
        name: {
            (0, seed): record(name, 0, seed, 7.0 * seed, val_gain=gain, size=2.0 if name == "deep at 0" else 0.0)
            for seed, gain in enumerate(three)
        }
        for name, three in val_gains.items()
    }

    def chosen(price: float) -> list[str]:
        return [one["contestant"] for one in tuned(plans, price).values()]

    # Without the first host, the branches are best by validation loss; without another one, the widening is. Branches are too dear at 1.
    assert chosen(0.0) == ["deep at 0", "widen_100 at 0", "widen_100 at 0"]
    assert chosen(1.0) == ["widen_100 at 0"] * 3


def test_a_grid_chooses_by_validation_and_price_and_pays_for_all_sizes() -> None:
    sizes = [
        record("grid 1", 0, 0, 0.1, val_gain=0.1, flops=10),
        record("grid 2", 0, 0, 0.9, val_gain=0.2, size=1.0, flops=20),
        record("grid 4", 0, 0, 0.0, val_gain=0.3, size=3.0, flops=30),
    ]
    found = [best_size(sizes, price) for price in (0.0, 0.06, 0.2)]
    assert [(one["contestant"], one["flops"]) for one in found] == [("grid 4", 60), ("grid 2", 60), ("grid 1", 60)]


def test_the_blind_plan_is_the_best_one_on_the_training_cells_at_every_price() -> None:
    nothing = {name: [0.0, 0.0] for name in PLANS}
    training = [{"constant": nothing | {"widen_700 at 0": [0.2, 4.0], "widen_100 at 0": [0.1, 0.5]}}, {"constant": nothing}]
    assert blind_plans(training, [0.01, 0.03, 0.3]) == {0.01: "widen_700 at 0", 0.03: "widen_100 at 0", 0.3: "never"}


def test_the_share_of_tuning_is_that_of_the_way_from_blind_if_it_is_long_enough() -> None:
    assert share_of_tuning(0.25, blind=0.2, tuned=0.4) == pytest.approx(0.25)
    assert share_of_tuning(0.25, blind=0.2, tuned=0.229) is None


def test_mutual_information_is_that_of_the_shares_and_corrected_by_miller_and_madow() -> None:
    same = [("a", 0), ("a", 0), ("b", 1), ("b", 1)]
    # All three entropies are 1 bit; two of them of two values each are added, and one is subtracted.
    assert mutual_information(same) == pytest.approx((1.0, 1.0 + 1 / (8 * math.log(2))))
    independent = [(plan, cell) for plan in "ab" for cell in range(2)]
    assert mutual_information(independent) == pytest.approx((0.0, (1 + 1 - 3) / (8 * math.log(2))))
    assert mutual_information([("a", 0), ("a", 1)]) == pytest.approx((0.0, 0.0))


def test_sizes_are_averaged_by_samples_and_label_noise() -> None:
    found = [(100, 0.0, 1.0), (100, 0.0, 3.0), (399, 0.25, 5.0), (400, 0.26, 7.0), (1_600, 0.5, 9.0)]
    some = {
        (0, seed): record("x", 0, seed, 0.0, training_samples=samples, label_noise=noise, size=size)
        for seed, (samples, noise, size) in enumerate(found)
    }
    assert sizes_by_data(some.values(), [100, 200, 400, 800, 1_600]) == [
        [2.0, None, None],
        [None, 5.0, None],
        [None, None, 7.0],
        [None, None, 9.0],
    ]


def test_a_part_of_a_cell_in_a_file_is_left_out_and_replaced_when_the_cell_is_trained_again() -> None:
    whole = [*(record("x", 1, seed, 0.0) for seed in range(3)), {"what": "cell", "cell": 1, "records": 3}]
    lines = [{"command": "python"}, whole[0], record("x", 0, 0, 0.0), *whole]
    assert of_whole_cells(lines) == whole


def comparison(**changes: Any) -> Comparison:
    """Return four cells of two hosts and two groups. The contestant "mine" is 0.2 to 0.5 ahead of never, and blind 0.1."""
    records = []
    for cell in range(4):
        group = {"group": "even" if cell % 2 == 0 else "odd"}
        for seed in range(2):
            for name in PLANS:
                gain = {"deep at 0": 0.1, "norm at 0": 0.6}.get(name, 0.0)
                records.append(record(name, cell, seed, gain, size=float(name != "never"), **group))
            gain = 0.2 + 0.1 * cell + 0.02 * seed
            records.append(record("mine", cell, seed, gain, price=0.0, flops=150, plan=[[cell // 2, "norm"]], **group))
            records.append(record("heuristic", cell, seed, 0.3, price=0.0, **group))
            records.append(record("grid 1", cell, seed, 0.0, price=0.0, **group))
            if cell:
                records.append(record("final", cell, seed, 0.1, price=0.0, **group))
    left_out = [{"what": "left out", "group": "even", "contestant": "final", "cell": 0, "host_seed": seed} for seed in range(2)]
    return replace(Comparison([*records, *left_out], [0.0], {0.0: "deep at 0"}, "mine"), **changes)


def leads(of: Comparison) -> dict[tuple[str, str, str], Lead]:
    """Return (group, contestant, over) -> lead."""
    return {(lead.group, lead.contestant, lead.over): lead for lead in of.leads()}


def test_rows_have_the_results_of_every_group() -> None:
    rows = {(row.group, row.contestant): row for row in comparison().rows()}
    assert {group for group, _ in rows} == {"all cells", "even", "odd"}
    mine = rows["all cells", "mine"]
    assert (mine.mean, mine.worst_cell, mine.flops, mine.plans) == (pytest.approx(0.36), pytest.approx(0.21), 1.5, 2)
    assert mine.share == pytest.approx(0.26 / 0.5)
    assert mine.information[0] == pytest.approx(1.0)
    assert rows["odd", "mine"].mean == pytest.approx(0.41)
    assert rows["all cells", "tuned"].mean == pytest.approx(0.6)
    assert (rows["all cells", "final"].cells, rows["even", "final"].cells) == (3, 1)


def test_leads_of_one_training_have_paired_intervals_over_cells() -> None:
    found = leads(comparison())
    assert {name for _, name, _ in found} == {"mine"}
    never = found["all cells", "mine", "never"]
    assert (never.cells, never.hosts) == (4, 8)
    assert vars_of(never.ahead) == pytest.approx(vars_of(student_interval([0.21, 0.31, 0.41, 0.51])))
    assert ("even", "mine", "final") not in found, "one cell has no interval"


def vars_of(interval: Interval) -> tuple[float, float, float]:
    return interval.estimate, interval.low, interval.high


def test_p_values_are_corrected_for_the_tests_of_all_groups_and_prices() -> None:
    found = [lead for lead in comparison().leads() if lead.p_value is not None]
    assert {lead.over for lead in found} == {"never", "blind", "heuristic"}
    assert len(found) == 9
    raw = student_p_value([0.21, 0.31, 0.41, 0.51])
    assert next(lead.p_value for lead in found if lead.over == "never") == pytest.approx(9 * raw)
    assert all(lead.p_value is not None and lead.p_value <= 1 for lead in found)


def test_a_compared_contestant_without_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="no host of the compared contestant 'yours'; there are hosts of: mine, heuristic"):
        comparison(compared="yours").rows()


def test_tables_show_every_group_the_bounds_the_sizes_and_the_hosts_that_are_left_out() -> None:
    text = tables(comparison(notes=["a note"]))
    for part in (
        "all cells (4), price 0:",
        "mine − this [95 %]",
        "cells of the group 'odd'",
        "blind (deep at 0)",
        "final, 3 cells",
        "tuned is at least 0.03 ahead of blind at a price of 0",
        "95 % lower bounds of mine against never",
        "mean size at price 0 by training samples and label noise",
        "final: left out for 2 hosts",
        "a note",
    ):
        assert part in text
    for part in ("trainings", "lead over longer"):
        assert part not in text


def test_a_comparison_is_made_again_from_its_json() -> None:
    for first in (comparison(), study()):
        again = replace(first, records=json.loads(json.dumps(first.to_builtins()))["records"])
        assert again.rows() == first.rows()
        assert again.leads() == first.leads()


# Several trainings

LEARNED = np.array([[0.3, 0.5, 0.4], [0.1, 0.2, 0.3], [0.6, 0.6, 0.9], [0.0, 0.2, 0.1]])  # gains [cells, trainings]
VALUE = np.array([[0.2, 0.3], [0.1, 0.2], [0.5, 0.7], [0.1, 0.0]])


def study() -> Comparison:
    """Return four cells of two hosts. Three trainings of "learned" and two of "value" differ; hosts of a cell are 0.02 apart.

    Tuned gains 0.3 everywhere, blind 0.1. Longer gains 0.2 in the first two cells; in the others 0.4, or 0.1 by validation loss.
    """
    records = []
    for cell in range(4):
        for seed in range(2):
            records += [record(name, cell, seed, {"deep at 0": 0.1, "norm at 0": 0.3}.get(name, 0.0)) for name in PLANS]
            for name, gains in (("learned", LEARNED), ("value", VALUE)):
                for training, gain in enumerate(gains[cell].tolist(), start=1):
                    records.append(record(f"{name} {training}", cell, seed, gain + 0.02 * seed - 0.01, price=0.0))
            longer = {"gain": 0.2 if cell < 2 else 0.4, "val_gain": 0.2 if cell < 2 else 0.1}
            records.append(record("longer", cell, seed, longer.pop("gain"), price=0.0, **longer))
    return Comparison(records, [0.0], {0.0: "deep at 0"}, "learned 1")


def test_trainings_are_joined_to_one_contestant_that_is_compared_with_all_others() -> None:
    rows = {row.contestant: row for row in study().rows()}
    assert list(rows) == ["learned", "never", "blind", "tuned", "longer", "value"]
    learned = rows["learned"]
    assert (learned.trainings, learned.cells, learned.mean) == (3, 4, pytest.approx(LEARNED.mean()))
    assert (learned.worst_cell, learned.worst_of_a_training) == (pytest.approx(0.1), pytest.approx(0.0))
    assert learned.share == pytest.approx((LEARNED.mean() - 0.1) / 0.2)


def test_leads_of_joined_trainings_are_over_cells_and_trainings() -> None:
    found = leads(study())
    assert {name for _, name, _ in found} == {"learned", "value"}
    blind, value = found["all cells", "learned", "blind"], found["all cells", "learned", "value"]
    assert vars_of(blind.ahead) == pytest.approx(vars_of(crossed_interval(LEARNED - 0.1)))
    assert vars_of(value.ahead) == pytest.approx(vars_of(crossed_interval(LEARNED, VALUE)))


def test_tests_of_all_joined_trainings_are_corrected_together() -> None:
    tested = {(lead.contestant, lead.over): lead.p_value for lead in study().leads() if lead.p_value is not None}
    assert tested.keys() == {(name, other) for name in ("learned", "value") for other in ("never", "blind", "longer")}
    raw = [crossed_p_value(gains, other) for gains in (LEARNED, VALUE) for other in (0.0, 0.1, [[0.2], [0.2], [0.4], [0.4]])]
    assert list(tested.values()) == pytest.approx(holm(raw).tolist())


def test_every_training_alone_is_compared_with_blind_over_cells() -> None:
    found = {lead.contestant: lead.ahead for lead in study().leads_of_trainings()}
    assert list(found) == ["learned 1", "learned 2", "learned 3", "value 1", "value 2"]
    assert vars_of(found["learned 2"]) == pytest.approx(vars_of(student_interval(LEARNED[:, 1] - 0.1)))


def test_longer_is_compared_in_lives_where_tuned_is_ahead_of_it() -> None:
    found = {lead.group: lead for lead in study().leads_over_longer() if lead.contestant == "learned"}
    by_test, by_validation = found["tuned ahead by test loss"], found["tuned ahead by validation loss"]
    assert (by_test.cells, by_test.hosts) == (2, 4)
    assert vars_of(by_test.ahead) == pytest.approx(vars_of(crossed_interval(LEARNED[:2] - 0.2)))
    assert (by_validation.cells, by_validation.hosts) == (4, 8)
    assert vars_of(by_validation.ahead) == pytest.approx(vars_of(crossed_interval(LEARNED, [[0.2], [0.2], [0.4], [0.4]])))


def test_bounds_of_single_trainings_hold_for_all_of_them_at_once() -> None:
    of_trainings = study().bounds_of_trainings("learned", 0.0)
    gains = LEARNED[2, 0] + np.array([-0.01, 0.01])
    assert of_trainings["learned 1"][2] == pytest.approx(student_interval(gains, confidence=1 - 2 * 0.05 / 12).low)
    bounds = study().bounds("learned", 0.0)
    assert bounds[0] == pytest.approx(student_interval([0.39, 0.41], confidence=1 - 2 * 0.05 / 4).low)


def test_trainings_that_were_compared_on_other_hosts_are_not_joined() -> None:
    records = [one for one in study().records if one["contestant"] != "value 2" or one["cell"] != 0]
    assert {row.contestant: row.cells for row in replace(study(), records=records).rows()}["value"] == 3
    records = [one for one in records if one["contestant"] != "value 1" or one["cell"] == 0]
    apart = replace(study(), records=records)
    assert list(apart.joined) == ["learned"]
    assert [row.contestant for row in apart.rows()][-2:] == ["value 1", "value 2"]


def test_tables_of_several_trainings_show_them_joined_and_alone() -> None:
    text = tables(study())
    for part in (
        "joined trainings, with intervals over cells and trainings: learned: learned 1, learned 2, learned 3; value: value 1, value 2",
        "random, longer, final and grid have the moves and FLOPs of learned 1 alone",
        "learned (3 trainings)",
        "tuned is at least 0.03 ahead of blind at a price of 0",
        "lead over longer, which has the FLOPs of learned 1, in lives where tuned is ahead of longer",
        "every training of value alone − blind",
        "95 % lower bounds of learned against never, for all cells at once; those of the mean over trainings, and of every training",
    ):
        assert part in text
    lines = text.splitlines()
    counts = [line.split()[-3:] for line in lines if line.startswith(("ahead of blind", "with an interval above 0"))]
    assert counts == [["3", "of", "3"], ["0", "of", "3"], ["2", "of", "2"], ["0", "of", "2"]]
