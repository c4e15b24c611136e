"""The comparison over cells: rules, random moves and settings, and one small real comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import esper.growth.trials
from esper.config import ConfigError
from esper.controller.cells import Cell
from esper.controller.compare import (
    GROWTH,
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
    eval_setting,
    make_case,
    make_random,
    plan_results,
    recorded_plans,
    spread,
    training_cells_of,
)
from esper.controller.compare_results import (
    PLANS,
    Comparison,
    Record,
    by_contestant,
    of_whole_cells,
)
from esper.controller.compare_tables import tables
from esper.controller.config import BLUEPRINTS, CompareConfig
from esper.controller.evaluation import EvalCase, EvalRun, run_cases
from esper.controller.layout import FEATURES
from esper.controller.plans import ConstantPlan, RandomMoves, move_named
from esper.fleet.fleet import Fleet
from esper.fleet.memory import Memory
from esper.growth.config import GrowthConfig, LookaheadConfig
from esper.growth.controllers.baselines import see_through
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.controllers.lookahead import Lookahead
from esper.growth.lifecycle.stages import Candidate, Controller, Cost, Decision, Germinate, GrowthState
from esper.rng import Streams
from esper.tasks import load_task
from tests.controller.hosts import slot, state

load = cache(load_task)


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


def test_moves_are_spread_evenly_and_random_ones_are_made_at_the_looks() -> None:
    parts = spread(7, [3, 4, 5], np.random.default_rng(0))
    assert parts.keys() == {3, 4, 5}
    assert sorted(parts.values()) == [2, 2, 3]
    known = Known(Cell(horizon=12), Streams(0), moves={(seed, 0.1): 1 for seed in range(20)} | {(3, 0.2): 2, (3, 0.3): 4, (3, 0.4): 99})
    once = [make_random(seed, 0.1, known) for seed in range(20)]
    assert {one.times for one in once if isinstance(one, RandomMoves)} == {(1,), (3,)}
    twice = make_random(3, 0.2, known)
    assert isinstance(twice, RandomMoves)
    assert sorted(twice.times) == [1, 3]
    many = [make_random(3, price, known) for price in (0.3, 0.4)]
    assert [len(set(one.times)) for one in many if isinstance(one, RandomMoves)] == [4, 7]
    assert all({1, 3} <= set(one.times) <= set(range(1, 8)) for one in many if isinstance(one, RandomMoves))


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


def test_blind_plans_of_a_file_are_used_if_all_prices_have_one() -> None:
    info = {"blind": {"0.003": "deep at 0", "0.1": "never"}}
    assert blind_in_file(info, [0.003, 0.1]) == {0.003: "deep at 0", 0.1: "never"}
    assert blind_in_file(info, [0.003, 0.01]) is None
    assert blind_in_file({"blind": {"0.1": "no such plan"}}, [0.1]) is None
    assert blind_in_file({}, [0.1]) is None


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
    text = tables(Comparison(found(), PRICES, dict.fromkeys(PRICES, "norm at 0"), "mine"))
    assert "all cells (1), price 0.01" in text
    assert by_contestant(found(), prices=PRICES, blind=dict.fromkeys(PRICES, "never"))["blind", 1.0].keys() == {(5, 0), (5, 1)}


def test_hosts_that_do_not_fit_into_the_memory_are_trained_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    task, plans = CELL.task(load), [ConstantPlan("widen_100"), ConstantPlan(), ConstantPlan("deep")]
    cases = [make_case(CELL, task, plan.name, 0, None, plan) for plan in plans]
    made: list[Fleet] = []
    make = Fleet.__init__
    monkeypatch.setattr(Fleet, "__init__", lambda self, *args, **options: (made.append(self), make(self, *args, **options))[1])
    together = eval_setting(CELL, task, device=torch.device("cpu"), rows=256)
    at_once = run_cases(together, cases)
    assert [fleet.hosts for fleet in made] == [3]
    made.clear()
    monkeypatch.setattr(Fleet, "memory_per_host", lambda self: Memory(state=10, step=20, seeds=70))  # 100 bytes
    in_turn = run_cases(replace(together, memory=299), cases)
    assert [fleet.hosts for fleet in made] == [1, 2, 1], "the first one is asked for the memory of a host"
    assert [one.val_loss for one in in_turn] == pytest.approx([one.val_loss for one in at_once], rel=1e-4)
    made.clear()
    run_cases(replace(together, memory=1), cases[:1])
    assert [fleet.hosts for fleet in made] == [1, 1]


@pytest.mark.slow
def test_cases_are_one_host_until_their_controllers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are those of cases that train apart, in fewer rows."""
    task = CELL.task(load)

    def cases() -> list[EvalCase]:
        plans = [ConstantPlan(), ConstantPlan("deep"), ConstantPlan("deep", 0.25), ConstantPlan("widen_100")]
        found = [make_case(CELL, task, plan.name, seed, None, plan) for seed in range(2) for plan in plans]
        twice = [make_case(CELL, task, "mine", 0, price, RandomMoves(4, (1,))) for price in PRICES]
        return [*found, *twice, make_case(CELL, task, "heuristic", 1, 0.1, Heuristic(GROWTH))]

    copies: list[Mapping[int, int]] = []
    copy = Fleet.copy
    monkeypatch.setattr(Fleet, "copy", lambda self, rows: (copies.append(dict(rows)), copy(self, rows))[1])
    setting = eval_setting(CELL, task, device=torch.device("cpu"), rows=256)
    together = run_cases(setting, cases())
    assert sum(map(len, copies)) <= len(cases()) - 3, "two hosts at first, and two cases that never differ"
    copies.clear()
    apart = [run_cases(setting, [case])[0] for case in cases()]
    assert not any(copies)
    for one, alone in zip(together, apart, strict=True):
        assert one.val_loss == pytest.approx(alone.val_loss, rel=1e-3)
        for name in ("controller", "price", "seed", "kept", "total_flops", "trace"):
            assert getattr(one, name) == getattr(alone, name), name


@pytest.mark.slow
def test_a_case_that_looks_ahead_is_the_same_beside_others_and_goes_on_as_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(esper.growth.trials, "MARGIN", 0.0)
    cell = msgspec.structs.replace(CELL, horizon=9)
    task, growth = cell.task(load), GrowthConfig(blueprints=BLUEPRINTS, lookahead=LookaheadConfig(epochs=2))
    setting = replace(eval_setting(cell, task, device=torch.device("cpu"), rows=256), growth=growth)

    def case(name: str, controller: Controller, seed: int) -> EvalCase:
        return make_case(cell, task, name, seed, 0.01, controller)

    def cases() -> list[EvalCase]:
        some = [case("heuristic", Heuristic(growth), 0), case("never", ConstantPlan(), 0)]
        return [*some, *(case("lookahead", Lookahead(growth), seed) for seed in (0, 0, 1))]

    together = run_cases(setting, cases())
    apart = [run_cases(setting, [one])[0] for one in cases()]
    for one, alone in zip(together, apart, strict=True):
        assert one.val_loss == pytest.approx(alone.val_loss, rel=1e-3)
        for name in ("kept", "total_flops", "trace", "chosen"):
            assert getattr(one, name) == getattr(alone, name), name
    assert [len(run.chosen) for run in together] == [0, 0, 1, 1, 1]
    assert together[2].total_flops > together[1].total_flops, "all trials are counted"


def test_results_of_constant_plans_have_the_features_of_moves_after_the_first_segment() -> None:
    def run(name: str, loss: float, added: int) -> EvalRun:
        return EvalRun(
            task="digits", host="", controller=name, price=None, seed=0, horizon=8, steps=80, test_loss=9.0, val_loss=loss, parameters=100,
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
