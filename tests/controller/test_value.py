"""Constant and random plans, and the value model that is fitted to hosts with random ones."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from esper.controller.cells import Cell
from esper.controller.config import BLUEPRINTS, rent_at
from esper.controller.evaluation import EvalCase, EvalRun, EvalSetting, run_cases
from esper.controller.features import HOST, MOVE
from esper.controller.layout import size_of, sizes_after
from esper.controller.plans import CONSTANT_PLANS, ConstantPlan, RandomPlan, move_named, moves
from esper.controller.value import Fit, Recorder, Records, ValueController, ValueModel, describe, fit
from esper.fleet.config import FleetConfig, HostConfig
from esper.fleet.data import TaskTensors
from esper.growth.config import BudgetConfig, GrowthConfig, LifecycleConfig, RentConfig
from esper.growth.controllers.baselines import Never
from esper.growth.controllers.moves import NOTHING, Move
from esper.growth.lifecycle.stages import Candidate, Controller, Cost, Decision, Germinate, GrowthState
from esper.tasks import load_task
from tests.controller.hosts import SMALL, slot, state
from tests.fleet.builders import BATCH, small_task, train_alone, train_in_fleet

load = cache(load_task)
CELL = Cell(source="digits", host="conv-4x2", samples=300, classes=3, batch_size=16, steps_per_decision=16, horizon=8)
FREE = RentConfig(parameters=0.0, flops=0.0)


def wide(*layers: str, name: str = "widen_100", **fields: object) -> Candidate:
    return replace(Candidate(name, Cost(2_000, 100_000), rent=0.07, promise=0.002, load=20.0, widened=layers), **fields)  # type: ignore[arg-type]


def train(*controllers: Controller) -> list[EvalRun]:
    """Train a host of the cell under each of the controllers, in one fleet."""
    task = CELL.task(load)
    growth = GrowthConfig(blueprints=BLUEPRINTS, budget=BudgetConfig(max_seeds_per_place=2))
    tensors = TaskTensors.of(task, device=torch.device("cpu"), dtype=torch.float32)
    setting = EvalSetting(task, CELL.host, tensors, CELL.fleet(FleetConfig()), growth, torch.device("cpu"), rows=len(controllers))
    cases = [EvalCase(str(number), CELL.host_config(3, len(task.train), rent=FREE), one) for number, one in enumerate(controllers)]
    return run_cases(setting, cases)


# Plans


def grown(move: Move) -> list[tuple[str, str]]:
    return [(one.place.name, candidate.blueprint) for one, candidate in move.choices]


def test_every_row_of_layers_is_widened_once_and_the_longest_first() -> None:
    now = state(slot("a", candidates=(wide("x"),)), slot("b", candidates=(wide("x", "y"),)), slot("c", candidates=(wide("z"), SMALL)))
    assert grown(move_named("widen_100", now)) == [("b", "widen_100"), ("c", "widen_100")]
    assert not move_named("widen_300", now).choices


def test_branches_are_of_the_preferred_kind_and_take_the_slots_that_a_widening_leaves() -> None:
    branches = (Candidate("mlp", SMALL.cost, 0.0), Candidate("double_conv3x3", SMALL.cost, 0.0))
    now = state(slot("a", candidates=branches), slot("b", candidates=(wide("x"), branches[0])), slot("c", candidates=(SMALL,)))
    assert sorted(grown(move_named("deep", now))) == [("a", "double_conv3x3"), ("b", "mlp")]
    assert grown(move_named("widen_100 and deep", now)) == [("b", "widen_100"), ("a", "double_conv3x3")]


def test_moves_that_grow_the_same_are_one() -> None:
    now = state(slot("a", candidates=(wide("x"), Candidate("mlp", SMALL.cost, 0.0))))
    assert [move.name for move in moves(now)] == ["widen_100", "deep"]  # no slot is left for a branch beside the widening


@pytest.mark.parametrize(("left", "fits"), [({"seeds_left": 1}, 1), ({"parameters_left": 4_500}, 2), ({"flops_left": 99_999}, 0)])
def test_a_move_keeps_to_the_budget_as_a_whole(left: dict[str, int], fits: int) -> None:
    now = state(*(slot(name, candidates=(wide(name),)) for name in "abc"), **{"seeds_left": 3, **left})
    assert len(move_named("widen_100", now).choices) == fits


def test_constant_plans_grow_what_their_names_say_at_their_time_and_differ() -> None:
    assert len({plan.name for plan in CONSTANT_PLANS}) == len(CONSTANT_PLANS)
    plan = ConstantPlan("widen_100", at=0.25)
    now = state(slot("a", candidates=(wide("x"), SMALL)), epochs=20)
    done = {epoch: plan.decide(replace(now, epoch=epoch)).actions for epoch in range(8)}
    assert [epoch for epoch, actions in done.items() if actions] == [5]
    assert done[5] == (Germinate(slot="a", reason="planned: widen_100 at 0.25", blueprint="widen_100"),)


def test_a_recorded_plan_probes_before_its_move_and_no_other_does() -> None:
    now = state(slot("a", candidates=(wide("x"),)), epochs=20)
    recorder = Recorder()
    for plan, expected in ((ConstantPlan("widen_100", 0.25, recorder), [4]), (ConstantPlan("widen_100", 0.25), []), (ConstantPlan(), [])):
        assert [epoch for epoch in range(8) if plan.decide(replace(now, epoch=epoch)).probe] == expected
    assert len(recorder.sizes) == 1


def test_a_random_plan_repeats_itself_and_records_every_move() -> None:
    def follow(seed: int) -> tuple[list[list[str]], list[str]]:
        recorded: list[str] = []
        plan = RandomPlan(seed, lambda now, move: recorded.append(move.name))
        now = state(slot("a", candidates=(wide("x"), wide("x", name="widen_300"), SMALL)), epochs=20)
        decisions = [plan.decide(replace(now, epoch=epoch)) for epoch in range(20)]
        return [[action.blueprint for action in one.actions if isinstance(action, Germinate)] for one in decisions], recorded

    plans = {seed: follow(seed) for seed in range(60)}
    assert all(follow(seed) == plans[seed] for seed in range(5))
    made = [[name for names in decisions for name in names] for decisions, _ in plans.values()]
    assert {len(names) for names in made} == {1, 2}
    assert {epoch for decisions, _ in plans.values() for epoch, names in enumerate(decisions) if names} == {1, 5}
    assert 0.3 < np.mean([name == "widen_100" for names in made for name in names]) < 0.7
    assert all(recorded[: len(names)] == names for names, (_, recorded) in zip(made, plans.values(), strict=True))
    assert all(recorded[len(names) :] in ([], [NOTHING.name]) for names, (_, recorded) in zip(made, plans.values(), strict=True))


@pytest.mark.slow
def test_candidates_are_probed_before_a_random_move() -> None:
    seen: list[bool] = []

    def record(now: GrowthState, move: Move) -> None:
        seen.extend(candidate.promise is not None for _, candidate in move.choices)

    train(*(RandomPlan(seed, record) for seed in range(2)))
    assert len(seen) > 1
    assert all(seen)


# Records


def test_features_of_a_move_do_not_depend_on_the_rent() -> None:
    now = state(slot("a", candidates=(wide("x"), Candidate("norm", Cost(20, 100), 0.0))))
    options = [NOTHING, *moves(now)]
    dear = replace(now, rent=RentConfig(parameters=9.0, flops=9.0))
    found = describe(now, options)
    assert np.array_equal(found, describe(dear, options))
    assert found[:, HOST.width + MOVE.column("grows")].tolist() == [0, 1, 1]
    assert len(np.unique(found, axis=0)) == 3
    assert np.all(np.abs(found) <= 1.5)


def test_the_size_after_a_move_counts_everything_that_is_added() -> None:
    now = state(slot("a", candidates=(wide("x"),)), added=Cost(500, 10_000))
    nothing, widened = sizes_after(now, [NOTHING, *moves(now)])
    assert nothing == size_of(now.added, now.host_cost) > 0
    assert widened == size_of(Cost(2_500, 110_000), now.host_cost)
    assert size_of(now.host_cost, now.host_cost) == pytest.approx(1.3 * np.log(2))


@pytest.mark.slow
def test_a_host_that_never_grows_equals_its_twin_and_random_plans_are_recorded() -> None:
    recorders = [Recorder() for _ in range(3)]
    runs = train(Never(), Never(), *(RandomPlan(seed, recorder) for seed, recorder in enumerate(recorders)))
    assert runs[0].val_loss == runs[1].val_loss
    assert all(len(recorder.features) == len(recorder.sizes) >= 1 for recorder in recorders)
    assert all(run.grown for run in runs[2:])
    records = Records()
    for recorder, run in zip(recorders, runs[2:], strict=True):
        records.add(recorder, cell=0, gain=runs[0].val_loss - run.val_loss, end_size=1.0)
    assert len(records) == sum(len(recorder.sizes) for recorder in recorders) == len(records.features) == len(records.gains)


# Model


def with_data(samples: int, *, price: float = 0.0) -> GrowthState:
    """Return a state of a host with this many training samples, in which a widening or a norm may grow."""
    return state(
        slot("a", candidates=(wide("x"), Candidate("norm", Cost(20, 100), 0.0))),
        training_samples=samples,
        rent=rent_at(price),
        seeds_left=3,
    )


@cache
def taught() -> Fit:
    """Return a model of cells in which a widening gains 0.3 where data are plenty, and loses 0.3 where they are few; norms lose 0.1."""
    records, rng = Records(), np.random.default_rng(0)
    for cell in range(40):
        now = with_data(int(rng.choice([200, 20_000]) * rng.uniform(0.7, 1.4)))
        gains = (0.0, 0.3 if now.training_samples > 2_000 else -0.3, -0.1)  # type: ignore[operator]
        for move, gain in zip([NOTHING, *moves(now)], gains, strict=True):
            recorder = Recorder()
            recorder(now, move)
            end = recorder.sizes[0] + 0.1
            records.add(recorder, cell=cell, gain=gain + rng.normal(0, 0.05), end_size=end)
    return fit(records, seed=0, steps=150)


def grown_by(controller: ValueController, now: GrowthState) -> list[str]:
    return [action.blueprint for action in controller.decide(now).actions if isinstance(action, Germinate)]


def test_a_fitted_model_grows_where_growing_gained_and_nowhere_else() -> None:
    controller = ValueController(taught().model)
    assert grown_by(controller, with_data(20_000)) == ["widen_100"]
    assert grown_by(controller, with_data(200)) == []


def test_a_rent_above_the_gain_stops_growth() -> None:
    # The widening gains 0.3 at a size of 1.3 · log 2 = 0.9, so it pays up to a price of 0.33.
    assert grown_by(ValueController(taught().model), with_data(20_000, price=0.1)) == ["widen_100"]
    assert grown_by(ValueController(taught().model), with_data(20_000, price=0.6)) == []


def test_nothing_grows_before_the_first_losses_or_between_the_looks() -> None:
    controller, now = ValueController(taught().model), with_data(20_000)
    assert grown_by(controller, replace(now, epoch=0, train_losses=(), val_losses=())) == []
    assert controller.decide(replace(now, epoch=0, train_losses=(), val_losses=())).probe
    late = controller.decide(replace(now, epoch=5))
    assert not late.actions
    assert late.reason == "makes moves only after 1 and 4 training segments"
    assert controller.decide(replace(now, epoch=0, train_losses=(), val_losses=())).reason == "waits for the first losses"
    assert controller.decide(replace(now, seeds_left=0)).reason == "no move is possible: no slot is free, or the budget is used up"
    assert "ahead of growing nothing more" in controller.decide(now).reason
    assert not late.probe


def test_predictions_are_near_the_truth_with_an_uncertainty_that_covers_it() -> None:
    now = with_data(20_000)
    options = [NOTHING, move_named("widen_100", now)]
    found = taught().model(torch.from_numpy(describe(now, options)), torch.tensor(sizes_after(now, options)))
    assert found.gain.mean(0).tolist() == pytest.approx([0.0, 0.3], abs=0.06)
    assert found.size.mean(0)[1].item() == pytest.approx(sizes_after(now, options)[1] + 0.1, abs=0.1)


def test_a_host_that_has_not_grown_and_grows_nothing_is_its_twin() -> None:
    now = with_data(20_000)
    grown = replace(now, added=Cost(500, 10_000))
    gains, sizes = [], []
    for one in (now, grown):
        found = taught().model(torch.from_numpy(describe(one, [NOTHING])), torch.tensor(sizes_after(one, [NOTHING])))
        gains.append(found.gain.abs().max().item())
        sizes.append(found.size.abs().max().item())
    assert gains[0] == sizes[0] == 0
    assert min(gains[1], sizes[1]) > 0


def test_a_fit_is_judged_in_cells_that_its_members_have_not_seen() -> None:
    """Where gains do not depend on what is seen, nothing is predicted, and the errors exceed the spread of the members."""
    assert taught().r2 > 0.9
    records, rng = Records(), np.random.default_rng(1)
    for cell in range(40):
        now, luck = with_data(int(rng.uniform(500, 2_000))), rng.normal(0, 0.3)
        for move in moves(now):
            recorder = Recorder()
            recorder(now, move)
            records.add(recorder, cell=cell, gain=luck, end_size=recorder.sizes[0])
    random = fit(records, seed=0, steps=60)
    assert random.r2 < 0.2
    assert random.model.calibration > 1


def test_caution_is_in_standard_errors() -> None:
    model = ValueModel(members=2)
    value = torch.tensor([[0.0, 0.1], [0.0, 0.3]])  # two members, nothing and a move
    spread = math.sqrt(0.02)
    assert model.scores(value, 0.0).tolist() == pytest.approx([0.0, 0.2])
    assert model.scores(value, 0.5)[1].item() == pytest.approx(0.2 - 0.5 * spread)
    model.calibration.fill_(2.0)
    assert model.scores(value, 0.5)[1].item() == pytest.approx(0.2 - 0.5 * 2 * spread)


@pytest.mark.slow
def test_a_value_controller_decides_for_a_real_host() -> None:
    never, run = train(Never(), ValueController(taught().model))
    assert np.isfinite(run.test_loss)
    assert run.parameters == never.parameters


class Watching:
    """A random plan, and the features of every move that it could have made."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self.plan, self.seen = RandomPlan(seed), list[np.ndarray]()

    def decide(self, now: GrowthState) -> Decision:
        self.seen.append(describe(now, [NOTHING, *moves(now)]))
        return self.plan.decide(now)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 22])
def test_moves_in_width_and_depth_are_described_alike_in_a_fleet_and_in_grow(seed: int) -> None:
    """Before and after seeds were kept, and slots opened again behind them."""
    task = small_task()
    rules = LifecycleConfig(holding_epochs=1, embargo_epochs=1)
    names = ("norm", "double_conv3x3", "widen_100", "widen_300")
    growth = GrowthConfig(lifecycle=rules, blueprints=names, budget=BudgetConfig(max_seeds_per_place=2))
    config = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64")
    setting = HostConfig(seed=3, growth_seed=5, horizon=10, learning_rate=0.01, rent=FREE)
    alone, in_fleet = Watching(seed), Watching(seed)
    grown = train_alone(task, setting, growth, config, alone)
    train_in_fleet(task, setting, growth, config, in_fleet)
    assert len(alone.seen) == len(in_fleet.seen) == setting.horizon + 1
    for expected, found in zip(alone.seen, in_fleet.seen, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert [entry.outcome for entry in grown.ledger.seeds].count("kept") > 1
    assert any(entry.blueprint.startswith("widen") for entry in grown.ledger.seeds)
