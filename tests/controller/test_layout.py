"""Observations, masks and decisions of a controller, from states written by hand."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from esper.controller.features import CANDIDATE, HOST, SLOT
from esper.controller.layout import ALPHA_TARGETS, LAYOUT_VERSION, Op, blueprint_names, decision, observe, spec
from esper.controller.table import Scale
from esper.growth.config import LifecycleConfig
from esper.growth.lifecycle.governor import LossRange
from esper.growth.lifecycle.stages import Advance, Contribution, Cost, Fossilize, Germinate, GrowthState, Prune, Retarget, Stage
from esper.statistics import Interval
from tests.controller.hosts import HEALTHY, LARGE, RULES, SMALL, drawn_state, seed_on_trial, slot, state
from tests.growth.builders import in_other_units

SHADOW = LifecycleConfig(raise_mode="shadow", training_epochs=2, holding_epochs=2)


def observed_field(now: GrowthState, part: str, name: str, *index: int) -> float:
    obs, _ = observe([now], slots=3, blueprints=4)
    table = {"host": HOST, "slots": SLOT, "candidates": CANDIDATE}[part]
    return float(obs[part][(0, *index, table.column(name))])


def allowed(now: GrowthState, rules: LifecycleConfig = RULES) -> dict[str, set[str]]:
    """Which ops, and for each of them which slots."""
    _, masks = observe([replace(now, lifecycle=rules)], slots=3, blueprints=4)
    places = [one.place.name for one in now.slots]
    table = {op.name: {name for place, name in enumerate(places) if masks["slot"][0, op, place]} for op in Op if masks["op"][0, op]}
    assert not masks["slot"][0, :, len(places) :].any()
    return table


def test_observations_and_masks_are_what_the_spec_says():
    rng = np.random.default_rng(0)
    states = [drawn_state(rng, slots=count) for count in (3, 1, 2)]
    obs, masks = observe(states, slots=3, blueprints=5)
    observation_spec, action_spec = spec(3, 5)
    assert {name: tuple(value.shape[1:]) for name, value in obs.items()} == {name: part.shape for name, part in observation_spec.items()}
    assert all(value.dtype == torch.float32 and len(value) == 3 for value in obs.values())
    for head in action_spec.discrete:
        assert masks[head.name].shape == (3, *action_spec.mask_shape(head))
        assert masks[head.name].dtype == torch.bool


def test_observations_lie_between_minus_one_and_one_and_a_half_for_any_state():
    rng = np.random.default_rng(1)
    obs, _ = observe([drawn_state(rng) for _ in range(100)], slots=3, blueprints=5)
    for value in obs.values():
        assert value.isfinite().all()
        assert value.abs().max() <= 1.5


def test_extreme_values_give_finite_observations():
    broken = (1.0, math.nan)
    endless = Contribution(Interval(0.1, -math.inf, math.inf), 4)
    now = state(seed_on_trial(contribution=endless), slot(), train_losses=broken, val_losses=(2.0, math.inf))
    empty = state(train_losses=(), val_losses=(), epoch=0, epochs=None, host_cost=Cost(0, 0), host_load=0.0)
    for one in (
        now,
        empty,
        replace(now, val_losses=(-1.0, -2.0)),
        replace(now, train_losses=(1.0, math.inf)),
        replace(now, val_losses=(0.0,)),
        replace(now, scale=None),
    ):
        obs, masks = observe([one], slots=2, blueprints=2)
        assert all(value.isfinite().all() for value in obs.values())
        assert masks["op"][0, Op.WAIT]
    assert observed_field(now, "host", "train_loss") == 1.5


def test_a_row_of_a_table_is_scaled_as_it_says():
    values = HOST.nothing(3)
    values[0] = [feature.low for feature in HOST.features]
    values[1] = [feature.high for feature in HOST.features]
    low, high, unknown = HOST.scaled(values)
    for column, feature in enumerate(HOST.features):
        assert high[column] == pytest.approx(feature.high if feature.scale is Scale.AS_IS else 1.0)
        assert unknown[column] == 0.0
        if feature.scale is Scale.LOG:
            assert low[column] == pytest.approx(-1.0)


def test_rent_contribution_and_budget_are_observed():
    now = state(slot(), seed_on_trial(gain=0.05))
    assert observed_field(now, "host", "rent_of_parameters") < observed_field(
        replace(now, rent=replace_rent(4.0)), "host", "rent_of_parameters"
    )
    assert observed_field(now, "candidates", "rent", 0, 1) > observed_field(now, "candidates", "rent", 0, 0) > 0  # double_conv3x3, conv1x1
    assert observed_field(now, "slots", "contribution", 1) > observed_field(now, "slots", "contribution_after_rent", 1) > 0
    assert observed_field(state(slot(), seed_on_trial(gain=0.05, rent=0.2)), "slots", "contribution_after_rent", 1) < 0
    assert observed_field(now, "host", "parameters_left") > 0
    assert observed_field(replace(now, parameters_left=None), "host", "has_parameter_budget") == 0


def replace_rent(parameters: float):
    return type(state().rent)(parameters=parameters, flops=0.03)


def test_losses_are_observed_relative_to_the_uninformed_loss():
    now = state(slot())
    assert observed_field(now, "host", "val_loss") == pytest.approx(1.3 / 2.3)
    assert observed_field(replace(now, scale=LossRange.of(-0.7, loss_range=3.0)), "host", "val_loss") == 1.5, (
        "far above the uninformed loss"
    )
    assert observed_field(replace(now, scale=None), "host", "val_loss") == 0, "not known yet"
    assert observed_field(now, "host", "train_slope") < 0
    assert observed_field(now, "host", "gap") > 0
    assert observed_field(now, "host", "above_best") == 0


@pytest.mark.parametrize("factor", [1 / 1024, 1_000.0])
def test_an_observation_does_not_depend_on_the_unit_of_the_loss(factor: float):
    rng = np.random.default_rng(2)
    states = [drawn_state(rng) for _ in range(50)]
    here, there = (observe(some, slots=3, blueprints=5) for some in (states, [in_other_units(now, factor) for now in states]))
    for part, other in zip(here, there, strict=True):
        for name in part:
            torch.testing.assert_close(part[name], other[name], rtol=0, atol=1e-6, msg=name)


def test_the_rules_of_the_run_are_observed_and_decide_what_is_allowed():
    learning = slot("learning", stage=Stage.TRAINING, blueprint="conv1x1", epochs_in_stage=2, gradients=HEALTHY, candidates=())
    now = replace(state(learning), lifecycle=SHADOW)
    slower = replace(now, lifecycle=LifecycleConfig(raise_mode="shadow", training_epochs=6, holding_epochs=2))
    assert "ADVANCE" in allowed(now, now.lifecycle)
    assert "ADVANCE" not in allowed(slower, slower.lifecycle)
    for name in ("training_epochs", "blend_epochs", "holding_epochs", "withdraw_epochs", "embargo_epochs"):
        longer = replace(now, lifecycle=msgspec.structs.replace(SHADOW, **{name: 9}))
        assert observed_field(longer, "host", name) > observed_field(now, "host", name)


def test_a_blueprint_without_a_probe_is_marked_and_has_no_promise():
    now = state(slot())
    small, large = 0, 1
    assert blueprint_names(now) == ("conv1x1", "double_conv3x3")
    assert (observed_field(now, "candidates", "is_probed", 0, small), observed_field(now, "candidates", "promise", 0, small)) == (0, 0)
    assert observed_field(now, "candidates", "is_probed", 0, large) == 1
    assert observed_field(now, "candidates", "promise", 0, large) > 0


def test_padding_is_all_zero_and_nothing_is_allowed_in_it():
    now = state(slot(), seed_on_trial())
    obs, masks = observe([now], slots=4, blueprints=6)
    tight_obs, tight_masks = observe([now], slots=2, blueprints=2)
    assert not obs["slots"][0, 2:].any()
    assert not obs["candidates"][0, 2:].any()
    assert not obs["candidates"][0, :, 2:].any()
    assert torch.equal(obs["slots"][:, :2], tight_obs["slots"])
    assert torch.equal(obs["candidates"][:, :2, :2], tight_obs["candidates"])
    assert not masks["blueprint"][0, 2:].any()
    assert not masks["blueprint"][0, :, 2:].any()
    assert torch.equal(masks["slot"][:, :, :2], tight_masks["slot"])


def test_the_masks_allow_exactly_what_the_gates_allow():
    young = seed_on_trial("young", epochs_in_stage=1)
    now = state(slot("free"), young, seed_on_trial("ripe"))
    assert allowed(now) == {
        "WAIT": {"free", "young", "ripe"},
        "GERMINATE": {"free"},
        "RETARGET": {"young", "ripe"},
        "FOSSILIZE": {"ripe"},
        "PRUNE": {"young", "ripe"},
    }
    learned = slot("learned", stage=Stage.TRAINING, blueprint="conv1x1", epochs_in_stage=2, candidates=(), gradients=HEALTHY)
    assert allowed(state(learned), SHADOW) == {"WAIT": {"learned"}, "ADVANCE": {"learned"}, "PRUNE": {"learned"}}
    gone = slot("gone", stage=Stage.EMBARGOED, candidates=(), tried=("conv1x1",))
    assert allowed(state(gone)) == {"WAIT": {"gone"}}
    assert allowed(state()) == {"WAIT": set()}


def test_candidates_over_the_budget_are_masked():
    now = state(slot(), parameters_left=100)
    _, masks = observe([now], slots=1, blueprints=2)
    assert masks["blueprint"][0, 0].tolist() == [True, False]  # conv1x1 needs 72 parameters, double_conv3x3 1,200
    assert "GERMINATE" not in allowed(replace(now, seeds_left=0))


@pytest.mark.parametrize(
    ("op", "place", "expected"),
    [
        (Op.GERMINATE, 0, Germinate),
        (Op.RETARGET, 1, Retarget),
        (Op.FOSSILIZE, 1, Fossilize),
        (Op.PRUNE, 1, Prune),
        (Op.ADVANCE, 1, Advance),
    ],
)
def test_a_choice_becomes_the_decision_it_stands_for_with_a_reason(op, place, expected):
    now = state(slot("free"), seed_on_trial("ripe"))
    decided = decision(now, [{"op": op, "slot": place, "blueprint": 1, "alpha": 0}])
    (action,) = decided.actions
    assert type(action) is expected
    assert action.slot == ("free", "ripe")[place]
    assert len(action.reason.split()) > 4
    if isinstance(action, Germinate):
        assert action.blueprint == LARGE.blueprint
        assert "1,200 parameters" in action.reason
    if isinstance(action, Retarget):
        assert action.alpha == ALPHA_TARGETS[0]
    if isinstance(action, Fossilize):
        assert "0.0500" in action.reason


def test_waiting_gives_an_empty_decision_that_may_request_a_probe():
    now = state(slot())
    waited = decision(now, [{"op": 0, "slot": 0, "blueprint": 0, "alpha": 0}], probe=True)
    assert not waited.actions
    assert waited.probe
    assert not decision(now, [{"op": 0, "slot": 0, "blueprint": 0, "alpha": 0}]).probe


def test_a_host_that_exceeds_the_layout_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"2 slots and there is room for 1; observe it with slots=2 or more"):
        observe([state(slot("a"), slot("b"))], slots=1, blueprints=4)
    with pytest.raises(ValueError, match=r"2 blueprints and there is room for 1"):
        observe([state(slot())], slots=1, blueprints=1)


def test_growing_and_tried_blueprints_keep_their_column():
    now = state(slot("gone", stage=Stage.EMBARGOED, candidates=(), tried=(SMALL.blueprint,)), seed_on_trial(blueprint=LARGE.blueprint))
    assert blueprint_names(now) == ("conv1x1", "double_conv3x3")
    assert observed_field(now, "candidates", "was_tried", 0, 0) == 1
    assert observed_field(now, "candidates", "grows_here", 1, 1) == 1


def test_the_version_names_the_layout():
    # A row that comes, goes or is scaled otherwise gives another version by itself. Where a value changes its meaning under the same row,
    # raise the number before the dash; then state the new version here.
    assert LAYOUT_VERSION == "5-b9d973f7"


def test_several_actions_of_one_decision_are_about_different_slots_and_within_the_budget() -> None:
    """A chosen action closes its slot and takes its share of the budget; after waiting, nothing more can be chosen."""
    now = state(slot("a"), slot("b"), seeds_left=1)
    germinate = {"op": int(Op.GERMINATE), "slot": 0, "blueprint": 0, "alpha": 0}
    wait = {"op": int(Op.WAIT), "slot": 1, "blueprint": 0, "alpha": 0}

    def allowed(now: GrowthState, *chosen: dict[str, int]) -> list[list[bool]]:
        masks = observe([now], slots=2, blueprints=len(blueprint_names(now)), chosen=[list(chosen)])[1]
        return masks["slot"][0, Op.GERMINATE].tolist()

    assert allowed(now) == [True, True]
    assert allowed(now, germinate) == [False, False], "the budget allows one seed"
    assert allowed(dataclasses.replace(now, seeds_left=2), germinate) == [False, True]
    assert allowed(dataclasses.replace(now, seeds_left=2), wait) == [False, False]
    both = decision(dataclasses.replace(now, seeds_left=2), [germinate, {**germinate, "slot": 1}, wait])
    assert [action.slot for action in both.actions] == ["a", "b"]
    assert decision(now, [wait, germinate]).actions == (), "who waits is done"


def test_a_decision_does_not_depend_on_the_order_of_its_actions() -> None:
    now = state(slot("a"), slot("b"), seeds_left=2)
    first = {"op": int(Op.GERMINATE), "slot": 0, "blueprint": 1, "alpha": 0}
    second = {"op": int(Op.GERMINATE), "slot": 1, "blueprint": 0, "alpha": 0}
    assert decision(now, [second, first]) == decision(now, [first, second])


def test_actions_already_chosen_in_a_decision_are_observed() -> None:
    """A second seed is chosen, and valued, knowing the first."""
    now = state(slot("a"), slot("b"), seeds_left=2)
    germinate = {"op": int(Op.GERMINATE), "slot": 0, "blueprint": 1, "alpha": 0}
    wait = {"op": int(Op.WAIT), "slot": 0, "blueprint": 0, "alpha": 0}

    def observed(*chosen: dict[str, int]) -> dict[str, torch.Tensor]:
        return observe([now], slots=2, blueprints=len(blueprint_names(now)), chosen=[list(chosen)])[0]

    for chosen in ([germinate], [germinate, wait]):
        before, after = observed(), observed(*chosen)
        assert after["host"][0, HOST.column("rent")] > before["host"][0, HOST.column("rent")]
        assert after["slots"][0, 0, SLOT.column("parameters")] > 0
        assert after["candidates"][0, :, :, CANDIDATE.column("grows_here")].nonzero().tolist() == [[0, 1]]
        assert torch.equal(after["slots"][0, 0, SLOT.column("is_dormant")], torch.tensor(1.0)), "nothing has germinated yet"
