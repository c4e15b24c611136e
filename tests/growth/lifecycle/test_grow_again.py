"""A slot opens again after its seed is kept: seeds at one place, one behind another, in depth and in width."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import esper
from esper.growth import add_slots
from esper.growth.config import BudgetConfig, GovernorConfig, GrowthConfig, GrowthError, LifecycleConfig, SeedOptimizerConfig
from esper.growth.lifecycle.stages import Action, Advance, Fossilize, Germinate, Stage
from esper.growth.seeds.width import WidthSeed
from tests.growth.builders import QUICK, Loop, MakeOptimizer, Script, adamw, assert_same, make_host, make_loop, plain_losses, sgd

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
PLANS = {
    "depth on depth": ("low_rank", "mlp"),
    "width on width": ("widen_50", "widen_50"),
    "depth on width": ("widen_50", "low_rank"),
    "width on depth": ("low_rank", "widen_50_chain"),
}
KEPT, AGAIN, KEPT_TOO = 4, 5, 9  # epochs
every_plan = pytest.mark.parametrize("blueprints", PLANS.values(), ids=PLANS)


def settings(limit: int = 2, **others: object) -> GrowthConfig:
    budget = BudgetConfig(max_parameters=None, max_flops=None, max_seeds_per_place=limit)
    return GrowthConfig(lifecycle=QUICK, budget=budget, **others)  # type: ignore[arg-type]


def script(blueprints: tuple[str, ...]) -> Script:
    """Grow and keep the first seed, then grow the second behind it."""
    actions: dict[int, list[Action]] = {
        0: [Germinate(slot="first", reason="now", blueprint=blueprints[0])],
        KEPT: [Fossilize(slot="first", reason="it pays")],
        AGAIN: [Germinate(slot="first#2", reason="again", blueprint=blueprints[1])],
        KEPT_TOO: [Fossilize(slot="first#2", reason="it pays too")],
    }
    return Script(actions)


def loop_of(blueprints: tuple[str, ...], *, limit: int = 2) -> Loop:
    loop = make_loop(script(blueprints), settings(limit), host=make_host(dropout=0.0), make_optimizer=adamw)
    loop.val = loop.data  # so that every seed pays
    loop.grower.begin()
    return loop


def outputs(model: object) -> Tensor:
    with torch.no_grad():
        return model(X)  # type: ignore[operator,no-any-return]


@every_plan
def test_a_second_seed_grows_behind_a_kept_one_and_both_are_baked(blueprints: tuple[str, str]) -> None:
    loop = loop_of(blueprints)
    loop.epoch(epochs=AGAIN)
    assert list(loop.slotted.slots) == ["first", "first#2", "second"]
    loop.host.eval()
    before = outputs(loop.slotted)
    loop.epoch(epochs=KEPT_TOO - AGAIN)
    assert [(entry.slot, entry.outcome, entry.after) for entry in loop.grower.ledger.seeds] == [
        ("first", "kept", None),
        ("first#2", "kept", 1),
    ]
    loop.host.eval()
    grown = outputs(loop.slotted)
    assert not torch.equal(grown, before)
    parameters = loop.grower.lifecycles.added().parameters + sum(parameter.numel() for parameter in make_host().parameters())
    baked = loop.grower.bake().eval()
    assert torch.allclose(outputs(baked), grown, atol=1e-6)
    assert not any(isinstance(module, WidthSeed) for module in baked.modules())
    assert sum(parameter.numel() for parameter in baked.parameters()) == parameters


def test_a_new_second_seed_changes_no_output() -> None:
    loop = loop_of(("widen_50", "widen_50"))
    loop.epoch(epochs=KEPT)
    loop.host.eval()
    before = outputs(loop.slotted)
    loop.slotted.slot("first#2").plant(loop.slotted.new_seed("first#2", "widen_50", random_seed=1), connected=True)
    loop.slotted.slot("first#2").alpha = 1.0
    assert torch.equal(outputs(loop.slotted), before)


def test_a_seed_is_joined_to_its_layers_when_it_is_kept_and_no_older_one_is_on_trial() -> None:
    loop = loop_of(("widen_50", "widen_50"))
    loop.epoch(epochs=KEPT - 1)
    old, young = loop.slotted.slot("first"), loop.slotted.slot("second")
    young.plant(loop.slotted.new_seed("second", "widen_50", random_seed=1), connected=True)
    for slot, joined in ((young, [False, False]), (old, [True, True])):
        slot.is_kept = True
        loop.slotted.join_kept()
        assert [seed.spec.is_joined for seed in loop.slotted.wide_seeds()] == joined


@pytest.mark.parametrize("blueprint", ["low_rank", "widen_50"])
def test_a_rollback_to_a_time_before_a_seed_left_the_shadow_brings_it_back_there(blueprint: str) -> None:
    rules = LifecycleConfig(raise_mode="shadow", training_epochs=1, minimum_health=0.0, blend_epochs=4)
    plan = Script({1: [Germinate(slot="first", reason="now", blueprint=blueprint)], 3: [Advance(slot="first", reason="it has learned")]})
    loop = make_loop(plan, GrowthConfig(lifecycle=rules), host=make_host(dropout=0.0), make_optimizer=adamw)
    loop.grower.begin()
    loop.epoch(epochs=3)
    with torch.no_grad():
        for parameter in loop.host.parameters():
            parameter.mul_(float("nan"))
    loop.epoch(epochs=1)
    assert loop.grower.lifecycles.slots["first"].stage is Stage.EMBARGOED
    assert loop.grower.state().rollbacks == 1
    assert outputs(loop.slotted).isfinite().all()


def test_a_place_holds_no_more_seeds_than_the_budget_allows() -> None:
    loop = loop_of(("low_rank", "mlp"), limit=1)
    loop.epoch(epochs=KEPT)
    assert list(loop.slotted.slots) == ["first", "second"]
    third = loop_of(("low_rank", "mlp"), limit=3)
    third.epoch(epochs=KEPT_TOO)
    assert list(third.slotted.slots) == ["first", "first#2", "first#3", "second"]
    assert third.grower.state().slots[2].candidates


@every_plan
@pytest.mark.parametrize("epochs", [KEPT, AGAIN, AGAIN + 1])
def test_a_run_is_resumed_with_all_slots_of_a_place_bit_for_bit(blueprints: tuple[str, str], epochs: int, tmp_path: Path) -> None:
    whole = loop_of(blueprints)
    whole.epoch(epochs=KEPT_TOO + 1)
    first = loop_of(blueprints)
    first.epoch(epochs=epochs)
    first.grower.save(tmp_path)
    second = loop_of(blueprints)
    second.grower.load(tmp_path)
    second.epoch(epochs=KEPT_TOO + 1 - epochs)
    assert second.losses == whole.losses[len(first.losses) :]
    assert_same(second.slotted.state_dict(), whole.slotted.state_dict())
    assert second.grower.ledger == whole.grower.ledger


def test_a_rollback_closes_the_slots_that_were_opened_since() -> None:
    loop = loop_of(("widen_50", "widen_50"))
    loop.epoch(epochs=KEPT - 1)
    state = copy.deepcopy(loop.grower.lifecycles.slots_state())
    outside = {name: tensor.clone() for name, tensor in loop.slotted.state_dict().items()}
    loop.epoch(epochs=3)
    later = copy.deepcopy(loop.grower.lifecycles.slots_state())
    assert "first#2" in later
    loop.grower.lifecycles.load_slots(state)
    assert list(loop.slotted.slots) == ["first", "second"]
    assert loop.slotted.state_dict().keys() == outside.keys()
    assert not loop.slotted.wide["first"].seeds[1:]
    loop.grower.lifecycles.load_slots(later)
    assert list(loop.slotted.slots) == ["first", "first#2", "second"]
    assert loop.grower.lifecycles.slots["first#2"].stage is Stage.HOLDING


@every_plan
def test_a_state_dict_in_mid_growth_builds_the_model_again(blueprints: tuple[str, str]) -> None:
    loop = loop_of(blueprints)
    loop.epoch(epochs=AGAIN + 2)
    loop.host.eval()
    expected, state = outputs(loop.slotted), loop.slotted.state_dict()
    assert torch.allclose(outputs(esper.load(state, model=make_host(9, dropout=0.0)).eval()), expected, atol=1e-6)
    fresh = add_slots(make_host(9, dropout=0.0), X, slots=["first", "second"])
    fresh.load_state_dict(state)
    assert list(fresh.slots) == ["first", "first#2", "second"]
    assert torch.equal(outputs(fresh.eval()), expected)


def test_copies_and_averages_have_the_same_slots() -> None:
    loop = loop_of(("widen_50", "low_rank"))
    average = loop.slotted.averaged(decay=0.0)
    loop.epoch(epochs=AGAIN + 2)
    loop.host.eval()
    twin = copy.deepcopy(loop.slotted)
    average.update()
    for model in (twin, average.slotted.eval()):
        assert list(model.slots) == ["first", "first#2", "second"]
        assert torch.equal(outputs(model), outputs(loop.slotted))
    twin.close("first#2")
    assert list(loop.slotted.slots) == ["first", "first#2", "second"]
    assert loop.slotted.remove()(X).shape == (5, 3)


def test_a_second_width_seed_makes_all_blocks_of_the_wider_layers() -> None:
    """Its units read those of the first, and are read by them: the folded layers have no block that was never trained."""
    loop = loop_of(("widen_50_chain", "widen_100_chain"))
    loop.epoch(epochs=KEPT_TOO)
    assert loop.grower.ledger.count("kept") == 2
    units = {name: slot.seed.spec.wide[0].outputs for name, slot in loop.slotted.slots.items() if slot.seed is not None}
    assert units == {"first": 4, "first#2": 12}, "100 % of the eight units of the host and the four that were added"
    added = loop.grower.lifecycles.added().parameters
    folded = loop.grower.bake()
    assert sum(parameter.numel() for parameter in folded.parameters()) == added + sum(one.numel() for one in make_host().parameters())
    second = folded.get_submodule("second.0").weight
    assert second.shape == (24, 24)
    for rows in (slice(0, 8), slice(8, 12), slice(12, 24)):
        for columns in (slice(0, 8), slice(8, 12), slice(12, 24)):
            assert second[rows, columns].abs().min() > 0


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_the_hosts_optimiser_goes_on_with_the_folded_layers(make_optimizer: MakeOptimizer) -> None:
    """Its parameters are the same objects, with the moments of the seed for the new rows and columns: the next losses hardly differ."""
    losses = {}
    for is_folded in (False, True):
        plan = Script(
            {0: [Germinate(slot="first", reason="now", blueprint="widen_100_chain")], KEPT: [Fossilize(slot="first", reason="it pays")]}
        )
        unclipped = SeedOptimizerConfig(max_grad_norm=None)
        loop = make_loop(plan, settings(1, seed_optimizer=unclipped), host=make_host(dropout=0.0), make_optimizer=make_optimizer)
        loop.val = loop.data
        loop.grower.begin()
        loop.epoch(epochs=KEPT)
        before, is_training = dict(loop.host.named_parameters()), loop.host.training
        if is_folded:
            model = loop.grower.bake()
            after = dict(model.named_parameters())
            assert after.keys() == before.keys()
            assert all(after[name] is before[name] for name in before)
            assert model.get_submodule("first").weight.shape == (16, 6)
            for parameter in model.parameters():
                moments = [value for value in loop.optimizer.state[parameter].values() if isinstance(value, Tensor) and value.ndim]
                assert moments
                assert all(value.shape == parameter.shape for value in moments)
            losses[is_folded] = plain_losses(model.train(is_training), loop.optimizer, loop.data, epochs=13)[:50]
        else:
            loop.losses.clear()
            loop.epoch(epochs=13)
            losses[is_folded] = loop.losses[:50]
    assert losses[True][0] == pytest.approx(losses[False][0], rel=1e-5), "the fold changes no loss"
    drift = max(abs(one - other) for one, other in zip(losses[True], losses[False], strict=True))
    assert drift < 0.05 * losses[False][0]


def test_a_width_seed_is_baked_as_a_module_if_it_is_not_to_be_folded(tmp_path: Path) -> None:
    loop = loop_of(("widen_50", "low_rank"))
    loop.epoch(epochs=KEPT_TOO)
    loop.host.eval()
    expected, names = outputs(loop.slotted), list(loop.slotted.state_dict())
    baked = loop.grower.bake(fold=False).eval()
    assert sum(isinstance(module, WidthSeed) for module in baked.modules()) == 1
    assert list(baked.state_dict()) == names
    assert baked.get_submodule("first").weight.shape == (8, 6)
    assert torch.equal(outputs(baked), expected)
    assert torch.equal(outputs(copy.deepcopy(baked)), expected)
    esper.save(baked, tmp_path / "model.safetensors")
    assert torch.allclose(outputs(esper.load(tmp_path / "model.safetensors", model=make_host(9, dropout=0.0)).eval()), expected, atol=1e-6)
    assert sum(parameter.grad is not None for parameter in baked.parameters()) == 0
    baked(X).sum().backward()
    assert all(parameter.grad is not None for parameter in baked.parameters())


def test_a_fold_that_would_change_the_outputs_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(("widen_50", "low_rank"))
    loop.epoch(epochs=KEPT_TOO)
    state, moments = copy.deepcopy(loop.slotted.state_dict()), copy.deepcopy(loop.optimizer.state_dict())
    monkeypatch.setattr("esper.growth.host.slotted.agree", lambda before, after: False)
    with pytest.raises(GrowthError, match="nothing was baked"):
        loop.grower.bake()
    assert_same(loop.slotted.state_dict(), state)
    assert_same(loop.optimizer.state_dict(), moments)
    loop.epoch()


def test_a_seed_in_the_shadow_does_not_come_between_units_that_others_read() -> None:
    """It germinates before the second seed behind the first, which is kept later, and blends in after it."""
    actions: dict[int, list[Action]] = {
        0: [Germinate(slot="first", reason="now", blueprint="widen_50"), Germinate(slot="second", reason="now", blueprint="widen_50")],
        2: [Advance(slot="first", reason="it has learned")],
        5: [Fossilize(slot="first", reason="it pays")],
        6: [Germinate(slot="first#2", reason="again", blueprint="widen_50")],
        8: [Advance(slot="first#2", reason="it has learned")],
        9: [Advance(slot="second", reason="it has learned")],
    }
    rules = LifecycleConfig(raise_mode="shadow", training_epochs=1, minimum_health=0.0, blend_epochs=1, holding_epochs=1, embargo_epochs=1)
    config = GrowthConfig(lifecycle=rules, budget=BudgetConfig(max_parameters=None, max_flops=None))
    loop = make_loop(Script(actions), config, host=make_host(dropout=0.0), make_optimizer=adamw)
    loop.val = loop.data
    loop.grower.begin()
    loop.epoch(epochs=12)
    assert not loop.grower.ledger.refused
    orders = {name: slot.seed.spec.order for name, slot in loop.slotted.slots.items() if slot.seed is not None}
    assert sorted(orders, key=orders.__getitem__) == ["first", "first#2", "second"]
    assert loop.slotted.slot("first#2").seed.spec.wide[0].seen_outputs == 4  # type: ignore[union-attr]
    for slot in loop.slotted.slots.values():
        slot.is_kept = slot.seed is not None
    loop.host.eval()
    before = outputs(loop.slotted)
    assert torch.allclose(outputs(loop.grower.bake()), before, atol=1e-6)


def test_a_rollback_over_the_opening_of_a_slot_closes_it_and_the_training_goes_on() -> None:
    """The suspect is the seed in the slot that the rollback closes, so that no slot can be put under embargo."""
    config = settings(governor=GovernorConfig(snapshot_every=3))
    loop = make_loop(script(PLANS["depth on depth"]), config, host=make_host(dropout=0.0), make_optimizer=adamw)
    loop.val = loop.data
    loop.grower.begin()
    loop.epoch(epochs=AGAIN)
    assert "first#2" in loop.slotted.slots
    with torch.no_grad():
        next(loop.host.parameters()).fill_(math.nan)
    loop.step(*loop.data[0])
    assert loop.grower.rollbacks == 1
    assert list(loop.slotted.slots) == list(loop.grower.lifecycles.slots) == ["first", "second"]
    assert [(entry.slot, entry.outcome) for entry in loop.grower.ledger.seeds] == [("first", "living"), ("first#2", "rolled back")]
    loop.epoch()
    assert math.isfinite(loop.grower.history.val_losses[-1])
