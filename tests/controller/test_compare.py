"""The comparison: the same hosts for every controller, all costs counted, and statistics of the runs."""

from __future__ import annotations

import json
from functools import cache
from statistics import fmean

import msgspec
import pytest

from esper.config import ConfigError
from esper.controller.compare import Comparison, compare, rent_at
from esper.controller.config import RENT_LEVELS, CompareConfig
from esper.controller.evaluation import EvalRun
from esper.fleet.config import FleetConfig
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.tasks import load_task

pytestmark = pytest.mark.slow

CONFIG = CompareConfig(
    controllers=("never", "random", "schedule"),
    hosts=("3-4-6",),
    seeds=3,
    horizon=4,
    tuning_seeds=2,
    levels=("low", "high"),
    sweep=("2-3-4", "4-6-8"),
    rows=40,
    device="cpu",
    fleet=FleetConfig(steps_per_decision=3, batch_size=16, validation_batch=100, validation_samples=200),
    growth=GrowthConfig(blueprints=("norm", "conv3x3"), lifecycle=LifecycleConfig(holding_epochs=1)),
)


@cache
def found() -> Comparison:
    return compare(CONFIG, load_task)


def runs_of(controller: str, level: str | None = None) -> list[EvalRun]:
    return [run for run in found().runs if run.controller == controller and level in (None, run.level)]


def test_every_controller_has_a_run_for_every_seed_and_rent_level() -> None:
    assert {run.seed for run in runs_of("never")} == {0, 1, 2}
    for name in ("random", "schedule", "longer", "final size"):
        assert sorted((run.level, run.seed) for run in runs_of(name)) == [(level, seed) for level in ("high", "low") for seed in range(3)]
    for host in CONFIG.sweep:
        assert len(runs_of(f"static {host}")) == 3


def test_a_sweep_picks_the_best_width_by_validation_and_rent_and_pays_for_all() -> None:
    sizes = ["never", *(f"static {size}" for size in CONFIG.sweep)]
    for level in CONFIG.levels:
        for score in found().scores("sweep", level):
            tried = [run for name in sizes for run in runs_of(name) if run.seed == score.run.seed]
            assert score.run.total_flops == sum(run.total_flops for run in tried)
            assert score.run.test_loss in {run.test_loss for run in tried}
    assert [score.rent for score in found().scores("sweep", "high")] == [0.0] * 3  # there nothing larger than the host pays


def test_the_same_seed_gives_the_same_host_under_every_controller() -> None:
    """A controller that grows nothing ends exactly as `never` does."""
    never = {run.seed: run.test_loss for run in runs_of("never")}
    idle = [run for run in found().runs if not run.grown and run.horizon == CONFIG.horizon and run.host == "3-4-6"]
    assert len(idle) > len(never)
    for run in idle:
        assert run.test_loss == pytest.approx(never[run.seed], abs=1e-5), run.controller


def test_random_uses_as_many_seeds_as_the_compared_controller() -> None:
    for level in CONFIG.levels:
        wanted = sum(run.grown for run in runs_of("schedule", level))
        assert sum(run.grown for run in runs_of("random", level)) == wanted


def test_controls_train_for_the_flops_of_the_compared_run_without_validation() -> None:
    for name in ("longer", "final size"):
        for run in runs_of(name):
            other = next(one for one in runs_of("schedule", run.level) if one.seed == run.seed)
            decision = run.total_flops / run.horizon
            assert 0 <= run.total_flops - other.total_flops < 1.01 * decision, name
            per_sample = run.flops_per_sample + run.added_flops
            assert decision == 3 * 16 * 3 * per_sample


def test_the_final_size_is_what_the_compared_controller_kept() -> None:
    for run in runs_of("final size"):
        other = next(one for one in runs_of("schedule", run.level) if one.seed == run.seed)
        assert sorted(run.kept) == sorted(other.kept)
        assert run.added_parameters == other.added_parameters


def test_pruned_seeds_cost_flops() -> None:
    never = next(iter(runs_of("never"))).total_flops
    pruned = [run for run in found().runs if run.grown > len(run.kept) and run.horizon == CONFIG.horizon and run.host == "3-4-6"]
    assert all(run.total_flops > never for run in pruned)


def test_utility_is_the_gain_over_never_on_the_same_seed_minus_rent() -> None:
    comparison = found()
    never = {run.seed: run.test_loss for run in runs_of("never")}
    for score in comparison.scores("schedule", "low"):
        expected = never[score.run.seed] - score.run.test_loss - score.run.unit * rent_at(score.run, RENT_LEVELS["low"])
        assert score.utility == pytest.approx(expected)
    assert all(score.utility == 0 for score in comparison.scores("never", "high"))


def test_the_schedule_is_the_best_on_training_seeds_for_each_level() -> None:
    assert found().schedules.keys() == {"digits 3-4-6 low", "digits 3-4-6 high"}
    assert found().schedules["digits 3-4-6 high"] == "grow nothing"


def test_intervals_are_paired_and_p_values_corrected() -> None:
    standings = {standing.controller: standing for standing in found().standings("low")}
    assert standings["schedule"].ahead is None
    ahead = standings["never"].ahead
    assert ahead is not None
    assert ahead.low <= ahead.estimate <= ahead.high
    assert ahead.estimate == pytest.approx(fmean(score.utility for score in found().scores("schedule", "low")))
    assert all(0 < standing.p_value <= 1 for standing in standings.values() if standing.p_value is not None)


def test_tables_and_json_contain_all_results() -> None:
    text = found().tables()
    for part in ("rent low", "rent high", "schedule − never, all levels", "schedule − sweep, all levels"):
        assert part in text
    told = json.loads(msgspec.json.encode(found().to_builtins()))
    assert len(told["runs"]) == len(found().runs)
    assert told["compared"] == "schedule"


@pytest.mark.parametrize(("change", "message"), [({"controllers": ()}, "controllers"), ({"tasks": ("digits", "digits")}, "tasks")])
def test_a_comparison_without_controllers_or_with_duplicates_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompareConfig(**change)
