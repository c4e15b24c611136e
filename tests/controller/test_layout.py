"""Observations, masks and decisions of a controller, from states written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.controller.features import HOST, MOVE
from esper.controller.layout import LAYOUT_VERSION, MOVE_NAMES, decision, observe, options, size_of, spec
from esper.controller.plans import move_named
from esper.controller.table import Scale
from esper.growth.config import RentConfig
from esper.growth.controllers.moves import NOTHING
from esper.growth.lifecycle.governor import LossRange
from esper.growth.lifecycle.stages import Candidate, Contribution, Cost, Fossilize, Germinate, GrowthState
from esper.statistics import Interval
from tests.controller.hosts import LARGE, drawn_state, seed_on_trial, slot, state
from tests.growth.builders import in_other_units

DEEP, NORMS = MOVE_NAMES.index("deep"), MOVE_NAMES.index("norm")
NORM = Candidate("norm", Cost(16, 2_000), rent=0.0001)


def host_field(now: GrowthState, name: str) -> float:
    return float(observe([now])[0]["host"][0, HOST.column(name)])


def move_field(now: GrowthState, name: str, move: int = DEEP) -> float:
    return float(observe([now])[0]["moves"][0, move, MOVE.column(name)])


def allowed(now: GrowthState) -> list[str]:
    return [name for name, is_allowed in zip(MOVE_NAMES, observe([now])[1]["move"][0].tolist(), strict=True) if is_allowed]


def test_observations_and_masks_are_what_the_spec_says() -> None:
    rng = np.random.default_rng(0)
    obs, masks = observe([drawn_state(rng, slots=count) for count in (3, 1, 2)])
    observation_spec, action_spec = spec()
    assert {name: tuple(value.shape[1:]) for name, value in obs.items()} == {name: part.shape for name, part in observation_spec.items()}
    assert all(value.dtype == torch.float32 and len(value) == 3 for value in obs.values())
    assert masks["move"].shape == (3, *action_spec.mask_shape(action_spec.discrete[0]))
    assert masks["move"].dtype == torch.bool


def test_features_lie_between_minus_one_and_one_and_a_half_for_any_state() -> None:
    rng = np.random.default_rng(1)
    obs, _ = observe([drawn_state(rng) for _ in range(100)])
    for name in ("host", "moves"):
        assert obs[name].isfinite().all()
        assert obs[name].abs().max() <= 1.5


def test_extreme_values_give_finite_observations() -> None:
    endless = Contribution(Interval(math.inf, -math.inf, math.inf), 4)
    now = state(seed_on_trial(contribution=endless), slot(), train_losses=(1.0, math.nan), val_losses=(2.0, math.inf))
    empty = state(train_losses=(), val_losses=(), epoch=0, epochs=None, host_cost=Cost(0, 0), host_load=0.0)
    for one in (
        now,
        empty,
        replace(now, val_losses=(-1.0, -2.0)),
        replace(now, train_losses=(1.0, math.inf)),
        replace(now, val_losses=(0.0,)),
        replace(now, scale=None),
        replace(now, epochs=None),
    ):
        obs, masks = observe([one])
        assert all(value.isfinite().all() for value in obs.values())
        assert masks["move"][0, 0]
    assert host_field(now, "train_loss") == 1.5


@pytest.mark.parametrize("table", [HOST, MOVE], ids=["host", "move"])
def test_a_row_of_a_table_is_scaled_as_it_says(table: object) -> None:
    assert isinstance(table, type(HOST))
    values = table.nothing(3)
    values[0] = [feature.low for feature in table.features]
    values[1] = [feature.high for feature in table.features]
    low, high, unknown = table.scaled(values)
    for column, feature in enumerate(table.features):
        assert high[column] == pytest.approx(feature.high if feature.scale is Scale.AS_IS else 1.0)
        assert unknown[column] == 0.0
        if feature.scale is Scale.LOG:
            assert low[column] == pytest.approx(-1.0)


def test_losses_are_observed_relative_to_the_uninformed_loss() -> None:
    now = state(slot())
    assert host_field(now, "val_loss") == pytest.approx(1.3 / 2.3)
    assert host_field(replace(now, scale=LossRange.of(-0.7, loss_range=3.0)), "val_loss") == 1.5, "far above the uninformed loss"
    assert host_field(replace(now, scale=None), "val_loss") == 0, "not known yet"
    assert host_field(now, "train_slope") < 0
    assert host_field(now, "gap") > 0
    assert host_field(now, "above_best") == host_field(now, "since_best") == 0
    worse = replace(now, val_losses=(2.1, 1.2, 1.4, 1.3))
    assert host_field(worse, "above_best") > 0
    assert host_field(worse, "since_best") == pytest.approx(2 / 16)
    assert host_field(worse, "best_loss") == pytest.approx(1.2 / 2.3)


def test_the_loss_of_a_readout_is_observed_where_it_is_known() -> None:
    now = state(slot())
    assert host_field(now, "has_readout") == host_field(now, "readout") == 0
    known = replace(now, scale=LossRange.of(2.3, readout=0.4))
    assert (host_field(known, "has_readout"), host_field(known, "readout")) == (1, pytest.approx(0.4))


def test_data_and_load_are_observed() -> None:
    now = state(slot(), training_samples=4_000)
    assert host_field(now, "samples_per_load") > host_field(replace(now, training_samples=400), "samples_per_load")
    assert move_field(now, "samples_per_load_after") < host_field(now, "samples_per_load")
    assert host_field(now, "passes") == pytest.approx(2 * math.log(1.0 / 0.1) / math.log(1e4) - 1), "4 epochs of 1,000 of 4,000 samples"


@pytest.mark.parametrize("factor", [1 / 1024, 1_000.0])
def test_an_observation_does_not_depend_on_the_unit_of_the_loss(factor: float) -> None:
    rng = np.random.default_rng(2)
    states = [drawn_state(rng) for _ in range(50)]
    here, there = (observe(some) for some in (states, [in_other_units(now, factor) for now in states]))
    for part, other in zip(here, there, strict=True):
        for name in part:
            torch.testing.assert_close(part[name], other[name], rtol=0, atol=1e-6, msg=name)


def test_features_do_not_depend_on_the_price_which_is_observed_by_itself() -> None:
    rng = np.random.default_rng(3)
    now = drawn_state(rng)
    cheap, dear = (observe([replace(now, rent=RentConfig(parameters=price, flops=9 * price))])[0] for price in (0.01, 4.0))
    assert all(torch.equal(cheap[name], dear[name]) for name in ("host", "moves", "sizes"))
    assert [obs["price"].item() for obs in (cheap, dear)] == pytest.approx([0.01, 4.0])


def test_the_estimates_of_the_probe_are_observed_for_all_seeds_of_a_move() -> None:
    one, two = state(slot("a")), state(slot("a"), slot("b", candidates=(replace(LARGE, promise=0.004),)))
    assert 0 < move_field(one, "promise") < move_field(two, "promise")
    assert move_field(one, "largest_promise") < move_field(two, "largest_promise") < move_field(two, "promise")
    assert move_field(state(slot("a", candidates=(replace(LARGE, promise=None),))), "promise") == 0


def test_sizes_are_those_of_the_host_after_each_move() -> None:
    now = state(slot(), added=Cost(500, 10_000))
    sizes = observe([now])[0]["sizes"][0]
    assert sizes[0] == pytest.approx(size_of(now.added, now.host_cost))
    assert sizes[DEEP] == pytest.approx(size_of(Cost(1_700, 80_000), now.host_cost))
    assert not sizes[[index for index in range(len(MOVE_NAMES)) if index not in (0, DEEP)]].any()


@pytest.mark.parametrize(("epochs", "at"), [(20, [1, 5]), (4, [1]), (None, [1, 4])])
def test_moves_are_allowed_after_the_first_losses_and_after_a_quarter_of_the_training(epochs: int | None, at: list[int]) -> None:
    now = state(slot(candidates=(LARGE, NORM)), epochs=epochs)
    found = {epoch: allowed(replace(now, epoch=epoch)) for epoch in range(20)}
    assert [epoch for epoch, names in found.items() if names == ["nothing", "deep", "norm"]] == at
    assert [epoch for epoch, names in found.items() if names != ["nothing"]] == at


def test_a_host_without_a_free_slot_or_without_a_budget_cannot_grow() -> None:
    now = state(slot(candidates=(LARGE, NORM)))
    assert allowed(now) == ["nothing", "deep", "norm"]
    assert allowed(state()) == ["nothing"]
    assert allowed(replace(now, seeds_left=0)) == ["nothing"]


def test_what_is_not_possible_is_all_zero() -> None:
    rng = np.random.default_rng(4)
    obs, masks = observe([drawn_state(rng) for _ in range(200)])
    assert not obs["moves"][~masks["move"]].any()
    assert obs["moves"][..., MOVE.column("grows")].bool().equal(masks["move"] & (torch.arange(len(MOVE_NAMES)) > 0))
    assert masks["move"].any(0).all(), "every move is possible somewhere"


def test_a_move_becomes_the_decision_it_stands_for_and_kept_seeds_are_seen_through() -> None:
    now = state(slot("free"), seed_on_trial("ripe"))
    decided = decision(now, options(now)["deep"], "why it grows")
    assert decided.actions[0] == Germinate(slot="free", reason="why it grows", blueprint="double_conv3x3")
    assert isinstance(decided.actions[1], Fossilize)
    assert decided.reason == "why it grows"
    assert not decision(state(slot("free")), NOTHING, "").actions


def test_candidates_are_probed_before_every_look() -> None:
    now = state(slot(), epochs=20)
    probed = [epoch for epoch in range(20) if decision(replace(now, epoch=epoch), NOTHING, "").probe]
    assert probed == [0, 4]
    assert not decision(state(slot(candidates=())), NOTHING, "").probe


def test_a_move_by_its_name_is_the_one_that_is_offered() -> None:
    rng = np.random.default_rng(5)
    for now in (drawn_state(rng) for _ in range(20)):
        for name, move in options(now).items():
            assert name == NOTHING.name or move_named(name, now) == move


def test_the_version_names_the_layout() -> None:
    # A row that comes, goes or is scaled otherwise gives another version by itself. Where a value changes its meaning under the same row,
    # raise the number before the dash; then state the new version here.
    assert LAYOUT_VERSION == "6-62a0b725"
