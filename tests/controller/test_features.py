"""Features: what the numbers of hosts, targets and options say, and how they are scaled."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from esper.controller.features import BLUEPRINTS, HOST, HOST_WIDTH, OPTION, TARGET, TURN, Observation, observe
from esper.controller.table import FeatureTable, Scale
from esper.controller.turn import Step, Turn
from esper.growth.lifecycle.governor import LossRange
from esper.growth.lifecycle.stages import Candidate, Contribution, Cost, GrowthState
from esper.intervals import Interval
from tests.controller.hosts import LARGE, drawn_state, seed_on_trial, slot, state

LARGE_AT_A = Step("germinate", "a", "double_conv3x3")


def of_host(now: GrowthState, name: str) -> float:
    return float(observe(Turn(now)).host[HOST.column(name)])


def of_option(now: GrowthState, name: str, step: Step = LARGE_AT_A) -> float:
    seen = observe(Turn(now))
    _, target, blueprint = seen.numbers_of(step)
    return float(seen.options[target, blueprint, OPTION.column(name)])


def parts_of(seen: Observation) -> list[np.ndarray]:
    return [seen.host, seen.targets, seen.options]


@pytest.mark.parametrize("table", [HOST, TURN, TARGET, OPTION], ids=["host", "turn", "target", "option"])
def test_a_row_of_a_table_is_scaled_as_it_says(table: FeatureTable[object]) -> None:
    values = table.nothing(3)
    values[0] = [feature.low for feature in table.features]
    values[1] = [feature.high for feature in table.features]
    low, high, unknown = table.scaled(values)
    for column, feature in enumerate(table.features):
        assert high[column] == pytest.approx(feature.high if feature.scale is Scale.AS_IS else 1.0)
        assert unknown[column] == 0.0
        if feature.scale is Scale.LOG:
            assert low[column] == pytest.approx(-1.0)


def test_features_lie_between_minus_one_and_one_and_a_half_for_any_state() -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        seen = observe(Turn(drawn_state(rng)))
        assert all(np.isfinite(part).all() and np.abs(part).max(initial=0) <= 1.5 for part in parts_of(seen))


def test_extreme_values_give_finite_observations() -> None:
    endless = Contribution(Interval(math.inf, -math.inf, math.inf), 4)
    now = state(seed_on_trial(contribution=endless), slot(), train_losses=(1.0, math.nan), val_losses=(2.0, math.inf))
    empty = state(train_losses=(), val_losses=(), epoch=0, epochs=None, host_cost=Cost(0, 0), host_load=0.0)
    for one in (
        now,
        empty,
        replace(now, val_losses=(-1.0, -2.0)),
        replace(now, train_losses=(1.0, math.inf)),
        replace(now, train_losses=(2.0, math.inf, 1.0, 0.9, 0.8, 0.7)),
        replace(now, train_losses=(math.inf, 1.0, 0.9, 0.8, 0.7)),
        replace(now, val_losses=(0.0,)),
        replace(now, scale=None),
        replace(now, epochs=None),
    ):
        assert all(np.isfinite(part).all() for part in parts_of(observe(Turn(one))))
    assert of_host(now, "train_loss") == 1.5


def test_losses_are_observed_relative_to_the_uninformed_loss() -> None:
    now = state(slot())
    assert of_host(now, "val_loss") == pytest.approx(1.3 / 2.3)
    assert of_host(replace(now, scale=LossRange.of(-0.7, loss_range=3.0)), "val_loss") == 1.5, "far above the uninformed loss"
    assert of_host(replace(now, scale=None), "val_loss") == 0, "not known yet"
    assert of_host(now, "train_slope") < 0
    assert of_host(now, "gap") > 0
    assert of_host(now, "above_best") == of_host(now, "since_best") == 0
    worse = replace(now, val_losses=(2.1, 1.2, 1.4, 1.3))
    assert of_host(worse, "above_best") > 0
    assert of_host(worse, "since_best") == pytest.approx(2 / 16)
    assert of_host(worse, "best_loss") == pytest.approx(1.2 / 2.3)


def test_the_loss_of_a_readout_is_observed_where_it_is_known() -> None:
    now = state(slot())
    assert of_host(now, "has_readout") == of_host(now, "readout") == 0
    known = replace(now, scale=LossRange.of(2.3, readout=0.4))
    assert (of_host(known, "has_readout"), of_host(known, "readout")) == (1, pytest.approx(0.4))


def test_data_and_load_are_observed() -> None:
    now = state(slot("a"), training_samples=4_000)
    assert of_host(now, "samples_per_load") > of_host(replace(now, training_samples=400), "samples_per_load")
    assert of_option(now, "samples_per_load_after") < of_host(now, "samples_per_load")
    assert of_host(now, "passes") == pytest.approx(2 * math.log(1.0 / 0.1) / math.log(1e4) - 1), "4 epochs of 1,000 of 4,000 samples"


def test_the_estimates_of_the_probe_are_observed_for_all_seeds_of_an_option() -> None:
    one = state(slot("a"), slot("b", candidates=(replace(LARGE, promise=0.004),)))
    everywhere = Step("germinate", "all slots", "double_conv3x3")
    assert 0 < of_option(one, "promise") < of_option(one, "promise", everywhere)
    assert of_option(one, "largest_promise") < of_option(one, "largest_promise", everywhere) < of_option(one, "promise", everywhere)
    unprobed = state(slot("a", candidates=(replace(LARGE, promise=None),)))
    assert of_option(unprobed, "promise") == of_option(unprobed, "probed") == 0
    assert of_option(one, "probed") == 1


def test_a_policy_knows_blueprints_by_name_and_others_by_their_numbers() -> None:
    own = Candidate("widen_100", Cost(900, 40_000), rent=0.002, load=9.0)
    now = state(slot("a", candidates=(LARGE, own)))
    assert of_option(now, "is_double_conv3x3") == of_option(now, "is_option") == 1
    unnamed = Step("germinate", "a", "widen_100")
    assert [of_option(now, f"is_{name}", unnamed) for name in BLUEPRINTS] == [0.0] * len(BLUEPRINTS)
    assert of_option(now, "parameters", unnamed) < of_option(now, "parameters")


def test_the_widths_are_those_of_the_tables() -> None:
    seen = observe(Turn(state(slot("a"), slot("b"))))
    assert seen.host.shape == (HOST_WIDTH,) == (HOST.width + TURN.width,)
    assert seen.targets.shape == (3, TARGET.width)
    assert seen.options.shape == (3, 2, OPTION.width)
