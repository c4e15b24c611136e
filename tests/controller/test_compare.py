"""The comparison over cells: the statistics of hand-made records, and one small real comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from esper.config import ConfigError
from esper.controller.cells import Cell
from esper.controller.compare import (
    MOVES,
    CompareSetting,
    Known,
    Rule,
    RuleController,
    blind_in_file,
    cells_of,
    choose_rule,
    choose_rules,
    compare_cell,
    make_random,
    plan_results,
    recorded_plans,
    spread,
    training_cells_of,
)
from esper.controller.compare_results import (
    PLANS,
    Comparison,
    Hosts,
    Record,
    best_size,
    blind_plans,
    by_contestant,
    cell_means,
    differences,
    lower_bounds,
    mutual_information,
    of_whole_cells,
    share_of_tuning,
    sizes_by_data,
    tuned,
)
from esper.controller.config import CompareConfig
from esper.controller.evaluation import EvalRun
from esper.controller.layout import FEATURES
from esper.controller.plans import ConstantPlan, RandomMoves, move_named
from esper.growth.controllers.baselines import see_through
from esper.growth.lifecycle.stages import Candidate, Cost, Decision, Germinate, GrowthState
from esper.intervals import student_interval, student_p_value
from esper.rng import Streams
from esper.tasks import load_task
from tests.controller.hosts import slot, state

load = cache(load_task)


def record(contestant: str, cell: int, seed: int, gain: float, *, price: float | None = None, **fields: Any) -> Record:
    about = {"what": "host", "group": "first", "val_gain": gain, "size": 0.0, "flops": 100, "plan": [], "training_samples": 500}
    return {**about, "label_noise": 0.0, "cell": cell, "contestant": contestant, "price": price, "host_seed": seed, "gain": gain, **fields}


def hosts(results: Sequence[Sequence[float]], **fields: Any) -> Hosts:
    """Return records with these gains: a list per cell."""
    return {(cell, seed): record("x", cell, seed, gain, **fields) for cell, row in enumerate(results) for seed, gain in enumerate(row)}


# Statistics


def test_means_are_over_the_hosts_of_a_cell_after_the_price_of_their_size() -> None:
    assert cell_means(hosts([[0.2, 0.4], [1.0]], size=2.0), 0.1) == pytest.approx({0: 0.1, 1: 0.8})


def test_differences_are_between_hosts_that_both_have() -> None:
    ours, theirs = hosts([[0.3, 9.0], [0.5]]), hosts([[0.1], [0.7], [5.0]])
    assert differences(ours, theirs, 0.0) == pytest.approx({0: 0.2, 1: -0.2})


def test_lower_bounds_are_corrected_for_the_number_of_cells() -> None:
    values = [0.1, 0.3, 0.2]
    alone = lower_bounds(hosts([values]), 0.0)
    both = lower_bounds(hosts([values, [1.0, 1.0, 1.0]]), 0.0)
    assert alone[0] == pytest.approx(student_interval(values, confidence=0.9).low)
    assert both == pytest.approx({0: student_interval(values, confidence=0.95).low, 1: 1.0})


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


def test_blind_plans_of_a_file_are_used_if_all_prices_have_one() -> None:
    info = {"blind": {"0.003": "deep at 0", "0.1": "never"}}
    assert blind_in_file(info, [0.003, 0.1]) == {0.003: "deep at 0", 0.1: "never"}
    assert blind_in_file(info, [0.003, 0.01]) is None
    assert blind_in_file({"blind": {"0.1": "no such plan"}}, [0.1]) is None
    assert blind_in_file({}, [0.1]) is None


def test_the_share_of_tuning_is_that_of_the_way_from_blind_if_it_is_long_enough() -> None:
    found = {("x", 0.0): hosts([[0.25]]), ("blind", 0.0): hosts([[0.2]]), ("tuned", 0.0): hosts([[0.4]])}
    assert share_of_tuning(found, "x", 0.0) == pytest.approx(0.25)
    assert share_of_tuning(found | {("tuned", 0.0): hosts([[0.229]])}, "x", 0.0) is None


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
    assert sizes_by_data(some, [100, 200, 400, 800, 1_600]) == [[2.0, None, None], [None, 5.0, None], [None, None, 7.0], [None, None, 9.0]]


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


def test_rows_have_paired_intervals_over_cells_in_every_group() -> None:
    rows = {(row.group, row.contestant): row for row in comparison().rows()}
    assert {group for group, _ in rows} == {"all cells", "even", "odd"}
    mine, never = rows["all cells", "mine"], rows["all cells", "never"]
    assert (mine.mean, mine.worst_cell, mine.flops, mine.plans) == (pytest.approx(0.36), pytest.approx(0.21), 1.5, 2)
    assert mine.ahead is None
    lead = [0.21, 0.31, 0.41, 0.51]
    assert never.ahead is not None
    assert (never.ahead.estimate, never.ahead.low) == (pytest.approx(0.36), pytest.approx(student_interval(lead).low))
    assert mine.share == pytest.approx(0.26 / 0.5)
    assert mine.information[0] == pytest.approx(1.0)
    assert rows["odd", "mine"].mean == pytest.approx(0.41)
    assert rows["all cells", "tuned"].mean == pytest.approx(0.6)
    assert (rows["all cells", "final"].cells, rows["even", "final"].cells) == (3, 1)
    assert rows["even", "final"].ahead is None


def test_p_values_are_corrected_for_the_tests_of_all_groups_and_prices() -> None:
    rows = [row for row in comparison().rows() if row.p_value is not None]
    assert {row.contestant for row in rows} == {"never", "blind", "heuristic"}
    assert len(rows) == 9
    raw = student_p_value([0.21, 0.31, 0.41, 0.51])
    assert next(row.p_value for row in rows if row.contestant == "never") == pytest.approx(9 * raw)
    assert all(row.p_value is not None and row.p_value <= 1 for row in rows)


def test_tables_show_every_group_the_bounds_the_sizes_and_the_hosts_that_are_left_out() -> None:
    text = comparison(notes=["a note"]).tables()
    for part in (
        "all cells (4), price 0:",
        "odd (2), price 0:",
        "blind (deep at 0)",
        "final, 3 cells",
        "95 % lower bounds of mine against never",
        "mean size at price 0 by training samples and label noise",
        "final: left out for 2 hosts",
        "a note",
    ):
        assert part in text


def test_a_comparison_is_made_again_from_its_json() -> None:
    first = comparison()
    again = replace(first, records=json.loads(json.dumps(first.to_builtins()))["records"])
    assert again.rows() == first.rows()


# Rules and random moves


def test_a_rule_is_the_feature_and_threshold_that_separate_good_from_bad_hosts() -> None:
    rng, column = np.random.default_rng(0), FEATURES.index("gap")
    features = {move: rng.normal(size=(40, len(FEATURES))) for move in ("widen_100", "norm")}
    worths = {"widen_100": np.where(features["widen_100"][:, column] < 0.3, 0.2, -0.4), "norm": np.full(40, -0.1)}
    rule = choose_rule(features, worths)
    assert (rule.move, rule.feature, rule.is_above) == ("widen_100", "gap", False)
    below, above = (features["widen_100"][:, column][is_good] for is_good in (worths["widen_100"] > 0, worths["widen_100"] < 0))
    assert below.max() < rule.threshold < above.min()
    assert [rule.applies(row) for row in features["widen_100"]] == (worths["widen_100"] > 0).tolist()


def test_a_rule_grows_nothing_where_nothing_pays_and_always_where_everything_does() -> None:
    features = {"norm": np.random.default_rng(0).normal(size=(9, len(FEATURES)))}
    assert choose_rule(features, {"norm": np.full(9, -0.1)}) == Rule()
    always = choose_rule(features, {"norm": np.full(9, 0.1)})
    assert all(always.applies(row) for row in features["norm"])


def test_rules_are_chosen_for_every_price() -> None:
    first = {move: [0.0] * len(FEATURES) for move in MOVES}
    training = [{"constant": {name: [0.2, 1.0] if name == "deep at 0" else [0.0, 0.0] for name in PLANS}, "first": first}]
    assert {price: rule.move for price, rule in choose_rules(training, [0.1, 0.3]).items()} == {0.1: "deep", 0.3: None}
    assert choose_rules([{"constant": training[0]["constant"], "first": {}}], [0.1]) == {0.1: Rule()}


def growing(**fields: Any) -> GrowthState:
    return state(slot("a", candidates=(Candidate("norm", Cost(20, 100), 0.0), Candidate("mlp", Cost(30, 100), 0.0))), epochs=10, **fields)


def test_a_rule_decides_once_after_the_first_segment_and_probes_before() -> None:
    for threshold, expected in ((-2.0, [1]), (2.0, [])):
        controller = RuleController(Rule("norm", "progress", True, threshold))
        decisions = {epoch: controller.decide(growing(epoch=epoch)) for epoch in range(4)}
        assert [epoch for epoch, one in decisions.items() if one.actions] == expected
        assert [epoch for epoch, one in decisions.items() if one.probe] == [0]


def test_moves_are_spread_evenly_and_random_times_are_early() -> None:
    parts = spread(7, [3, 4, 5], np.random.default_rng(0))
    assert parts.keys() == {3, 4, 5}
    assert sorted(parts.values()) == [2, 2, 3]
    known = Known(Cell(horizon=10), Streams(0), moves={(3, 0.1): 4, (3, 0.2): 99})
    controller = make_random(3, 0.1, known)
    assert isinstance(controller, RandomMoves)
    assert len(set(controller.times)) == 4
    assert set(controller.times) <= set(range(1, 7))
    many = make_random(3, 0.2, known)
    assert isinstance(many, RandomMoves)
    assert sorted(many.times) == [1, 2, 3, 4, 5, 6]


def test_a_random_move_that_is_not_possible_yet_is_made_later() -> None:
    controller, free = RandomMoves(0, (1, 2)), growing()
    full = state(slot("a", candidates=()), epochs=10)
    states = [full, full, full, free, free, free]
    decisions = [controller.decide(replace(one, epoch=epoch)) for epoch, one in enumerate(states)]
    assert [epoch for epoch, one in enumerate(decisions) if any(isinstance(action, Germinate) for action in one.actions)] == [3, 4]


# Settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"controllers": ("a", "a")}, "controllers: expected each once"),
        ({"prices": ()}, "prices: expected at least one"),
        ({"hosts": 1}, "hosts: expected an int >= 2"),
        ({"domain": {"horizon": (2, 8)}}, "domain.horizon: expected at least 4 decisions"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompareConfig(**change)


def test_training_cells_are_other_cells() -> None:
    config = CompareConfig(cells=20, training_cells=20)
    assert not set(cells_of(config)) & set(training_cells_of(config))


# A real comparison

CELL = Cell(host="mlp-4x1", samples=300, classes=4, batch_size=16, steps_per_decision=6, horizon=6)
PRICES = (0.01, 1.0)


@cache
def found() -> tuple[Record, ...]:
    """Return the records of a comparison in one cell, where a given controller widens or deepens the hosts, by the price."""
    rules = {price: Rule("norm", "progress", True, -2.0) for price in PRICES}
    setting = CompareSetting(PRICES, range(2), "mine", rules)
    controllers = {"mine": lambda price: ConstantPlan("widen_100" if price < 0.1 else "deep")}
    return tuple(compare_cell(setting, CELL, load, controllers, number=5, group="real"))


def of(contestant: str, price: float | None = None) -> list[Record]:
    return [one for one in found() if one["what"] == "host" and one["contestant"] == contestant and one["price"] == price]


@pytest.mark.slow
def test_every_contestant_has_a_record_for_every_host_and_price() -> None:
    for name in (*PLANS, "early"):
        assert [one["host_seed"] for one in of(name)] == [0, 1], name
    for name in ("mine", "heuristic", "rule", "random", "longer", "final", "grid 1", "grid 2", "grid 4"):
        for price in PRICES:
            assert [one["host_seed"] for one in of(name, price)] == [0, 1], name
    assert found()[-1]["what"] == "cell"
    assert of_whole_cells(found()) == list(found())
    assert json.loads(json.dumps(found())) == list(found())
    assert {(one["cell"], one["group"], one["training_samples"]) for one in found()} == {(5, "real", 300)}


@pytest.mark.slow
def test_a_given_controller_equals_the_constant_plan_that_it_is() -> None:
    for price, name in ((0.01, "widen_100 at 0"), (1.0, "deep at 0")):
        for ours, theirs in zip(of("mine", price), of(name), strict=True):
            assert ours["gain"] == pytest.approx(theirs["gain"], abs=1e-5)
            assert (ours["size"], ours["plan"]) == (theirs["size"], theirs["plan"])
    assert {one["contestant"]: one["gain"] for one in of("never")} == {"never": 0.0}


@pytest.mark.slow
def test_random_makes_as_many_moves_as_the_compared_contestant() -> None:
    for price in PRICES:
        assert sum(len(one["plan"]) for one in of("random", price)) == sum(len(one["plan"]) for one in of("mine", price)) == 2
    assert all(decision == 1 for one in (*of("early"), *of("rule", 1.0)) for decision, _ in one["plan"])


@pytest.mark.slow
def test_controls_have_the_flops_of_the_compared_run() -> None:
    for price in PRICES:
        for number, ours in enumerate(of("mine", price)):
            for name in ("longer", "final"):
                control = of(name, price)[number]
                assert abs(control["flops"] - ours["flops"]) < control["flops"] / control["decisions"], name
            assert of("longer", price)[number]["decisions"] > CELL.horizon
            assert of("final", price)[number]["size"] == ours["size"] > 0
            grid = [of(f"grid {factor}", price)[number] for factor in (1, 2, 4)]
            assert 0.4 * ours["flops"] < sum(one["flops"] for one in grid) <= ours["flops"]
            assert grid[0]["size"] == 0 < grid[1]["size"] < grid[2]["size"]


class Twice:
    """Widens the hosts, and again when these seeds are kept."""

    def decide(self, now: GrowthState) -> Decision:
        grown = move_named("widen_100", now).germinate("again") if now.epoch in (1, 5) else []
        return Decision((*grown, *see_through(now, {action.slot for action in grown})))


@pytest.mark.slow
def test_a_final_network_with_slots_that_opened_again_is_left_out() -> None:
    setting = CompareSetting([0.01], range(2), "twice")
    cell = msgspec.structs.replace(CELL, horizon=10)
    records = compare_cell(setting, cell, load, {"twice": lambda price: Twice()}, number=0)
    left_out = [(one["contestant"], one["host_seed"]) for one in records if one["what"] == "left out"]
    final = [("final", one["host_seed"]) for one in records if one["what"] == "host" and one["contestant"] == "final"]
    assert left_out
    assert sorted(left_out + final) == [("final", 0), ("final", 1)]
    assert Comparison(records, [0.01], {0.01: "never"}, "twice").left_out()["final"] == len(left_out)


@pytest.mark.parametrize(
    ("compared", "name", "message"),
    [
        ("mine", "tuned", "'tuned' is the name of a contestant that takes part anyway"),
        ("mine", "deep at 0", "'deep at 0' is the name of a contestant"),
        ("yours", "mine", "no contestant is named 'yours'; one of these can be compared: mine, heuristic"),
    ],
)
def test_names_that_are_taken_or_unknown_are_refused(compared: str, name: str, message: str) -> None:
    setting = CompareSetting([0.01], range(2), compared)
    with pytest.raises(ValueError, match=message):
        compare_cell(setting, CELL, load, {name: lambda price: ConstantPlan()}, number=0)


@pytest.mark.slow
def test_the_tables_of_real_records_are_printed() -> None:
    text = Comparison(found(), PRICES, dict.fromkeys(PRICES, "norm at 0"), "mine").tables()
    assert "all cells (1), price 0.01" in text
    assert by_contestant(found(), prices=PRICES, blind=dict.fromkeys(PRICES, "never"))["blind", 1.0].keys() == {(5, 0), (5, 1)}


def test_results_of_constant_plans_have_the_features_of_moves_after_the_first_segment() -> None:
    def run(name: str, loss: float, added: int) -> EvalRun:
        return EvalRun(
            task="digits", host="", controller=name, price=None, seed=0, horizon=8, test_loss=9.0, val_loss=loss, parameters=100,
            added_parameters=added, flops_per_sample=100, added_flops=0, total_flops=1, grown=0, kept=[], rollbacks=0, unit=0.5,
        )  # fmt: skip

    plans = recorded_plans()
    for plan in plans:
        plan.decide(growing(epoch=1))
    results = plan_results([run(plan.name, 1.0 if plan.move is None else 0.8, 0 if plan.move is None else 100) for plan in plans], plans)
    assert results["constant"]["never"] == [0.0, 0.0]
    assert results["constant"]["norm at 0"] == pytest.approx([0.4, math.log(2)])
    assert results["first"].keys() == set(MOVES)
    assert results["first"]["norm"][FEATURES.index("grows")] == 1.0
    assert results["first"]["widen_100"][FEATURES.index("grows")] == 0.0
