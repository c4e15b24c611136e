"""The stages of a seed: legal moves, reasons of gates, budgets, ramps and embargoes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper.growth.config import BudgetConfig, LifecycleConfig
from esper.growth.lifecycle.stages import (
    LIVING,
    MOVES,
    OCCUPIED,
    Action,
    Advance,
    Decision,
    Fossilize,
    Germinate,
    GrowthState,
    Prune,
    Retarget,
    Stage,
    may_move,
)
from esper.growth.report.story import Story
from tests.growth.builders import QUICK, QUICK_SHADOW, SLOTS, Loop, Script, config, make_data, make_host, make_loop

GROW = {0: [Germinate(slot="first", reason="test", blueprint="mlp")]}


def stages(loop: Loop, number: int = 1) -> list[str]:
    return [step.stage.name for step in loop.grower.ledger.seeds[number - 1].stages]


def refusals(loop: Loop) -> list[str]:
    return [refused.reason for refused in loop.grower.ledger.refused]


def test_gates_allow_exactly_the_moves_of_the_table() -> None:
    for stage in Stage:
        for to in Stage:
            answer = may_move(stage, to)
            assert answer.passed == (to in MOVES[stage])
            assert answer.reason
    assert MOVES[Stage.FOSSILIZED] == {Stage.PRUNED}, "by evidence alone, see may_shrink"


@pytest.mark.slow
def test_a_seed_raised_jointly_germinates_holds_and_is_kept() -> None:
    loop = make_loop(Script({**GROW, 8: [Fossilize(slot="first", reason="test")]}))
    loop.val = loop.data
    loop.epoch(epochs=8)
    assert stages(loop) == ["GERMINATED", "HOLDING", "FOSSILIZED"]
    assert loop.grower.ledger.seeds[0].gain > 0


def test_a_seed_raised_in_the_shadow_trains_blends_and_holds() -> None:
    loop = make_loop(Script({**GROW, 1: [Advance(slot="first", reason="test")]}), config(QUICK_SHADOW))
    loop.epoch()
    slot = loop.slotted.slots["first"]
    assert slot.is_connected
    assert slot.alpha == 0.0
    loop.epoch()
    assert stages(loop) == ["GERMINATED", "TRAINING", "BLENDING", "HOLDING"]
    assert slot.alpha == 1.0


def sigmoid(steepness: float, part: float) -> float:
    low, high = (1 / (1 + math.exp(sign * steepness / 2)) for sign in (1, -1))
    return (1 / (1 + math.exp(-steepness * (part - 0.5))) - low) / (high - low)


CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda part: part,
    "cosine": lambda part: (1 - math.cos(math.pi * part)) / 2,
    "sigmoid_6": partial(sigmoid, 6.0),
    "sigmoid_12": partial(sigmoid, 12.0),
    "sigmoid_24": partial(sigmoid, 24.0),
}


@pytest.mark.parametrize("curve", list(CURVES))
@pytest.mark.parametrize("target", [1.0, 0.5])
def test_alpha_rises_step_by_step_and_reaches_its_target(curve: str, target: float) -> None:
    rules = LifecycleConfig(raise_mode="shadow", training_epochs=1, blend_epochs=2, alpha_curve=curve, alpha_target=target)
    loop = make_loop(Script({**GROW, 1: [Advance(slot="first", reason="test")]}), config(rules))
    loop.epoch()
    alphas = []
    steps = 2 * len(loop.data)
    for _ in range(2):
        for x, y in loop.data:
            loop.step(x, y)
            alphas.append(loop.slotted.slots["first"].alpha)
            assert float(loop.slotted.slots["first"].seed.alpha) == pytest.approx(alphas[-1])
        loop.grower.after_epoch(loop.evaluate)
    assert alphas == pytest.approx([target * CURVES[curve]((step + 1) / steps) for step in range(steps)])
    assert alphas[-1] == target


def test_an_action_may_set_the_target_the_time_and_the_curve_of_alpha() -> None:
    rules = LifecycleConfig(raise_mode="shadow", training_epochs=1, blend_epochs=5, withdraw_epochs=5, holding_epochs=1)
    script = {
        **GROW,
        1: [Advance(slot="first", reason="test", alpha=0.8, epochs=1, curve="sigmoid_6")],
        2: [Retarget(slot="first", reason="test", alpha=0.4, epochs=0)],
        3: [Prune(slot="first", reason="test", epochs=1, curve="cosine")],
    }
    loop = make_loop(Script(script), config(rules))
    loop.epoch()
    alphas = []
    for _ in range(3):
        for x, y in loop.data:
            loop.step(x, y)
            alphas.append(loop.slotted.slots["first"].alpha)
        loop.grower.after_epoch(loop.evaluate)
    parts = [step / 4 for step in range(1, 5)]
    rising, falling = ([CURVES[curve](part) for part in parts] for curve in ("sigmoid_6", "cosine"))
    assert alphas == pytest.approx([*(0.8 * part for part in rising), *[0.4] * 4, *(0.4 * (1 - part) for part in falling)])
    assert stages(loop)[-1] == "PRUNED"


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Advance(slot="first", reason="test", alpha=1.5), "alpha must be above 0 and at most 1, not 1.5; to get rid of a seed, prune it"),
        (Advance(slot="first", reason="test", epochs=-1), "alpha moves over a whole number of epochs from 0 on, not -1"),
        (Prune(slot="first", reason="test", epochs=0.5), "alpha moves over a whole number of epochs from 0 on, not 0.5"),  # type: ignore[arg-type]
        (
            Prune(slot="first", reason="test", curve="steep"),  # type: ignore[arg-type]
            "alpha moves along one of linear, cosine, sigmoid_6, sigmoid_12, sigmoid_24, not 'steep'",
        ),
    ],
)
def test_a_wrong_movement_of_alpha_is_refused(action: Action, reason: str) -> None:
    loop = make_loop(Script({**GROW, 1: [action]}), config(QUICK_SHADOW))
    loop.epoch(epochs=2)
    assert refusals(loop) == [reason]


def test_a_seed_that_is_withdrawn_fades_and_the_slot_waits_out_its_embargo() -> None:
    rules = LifecycleConfig(holding_epochs=1, withdraw_epochs=1, embargo_epochs=2)
    again = [Germinate(slot="first", reason="again", blueprint="norm")]
    loop = make_loop(Script({**GROW, 1: [Prune(slot="first", reason="test")], 2: again, 3: again, 4: again}), config(rules))
    loop.epoch()
    alphas = []
    for x, y in loop.data:
        loop.step(x, y)
        alphas.append(loop.slotted.slots["first"].alpha)
    assert alphas == pytest.approx([0.75, 0.5, 0.25, 0.0])
    loop.grower.after_epoch(loop.evaluate)
    assert loop.slotted.slots["first"].seed is None
    assert loop.slotted.slots["first"].is_idle
    loop.epoch(epochs=2)
    assert refusals(loop) == ["the slot is under embargo after a pruned seed"] * 2
    assert [entry.blueprint for entry in loop.grower.ledger.seeds] == ["mlp", "norm"]
    assert loop.grower.lifecycles.slots["first"].record.tried == ["mlp"]


@pytest.mark.parametrize("withdraw_epochs", [0, 2])
def test_the_ledger_gives_the_reason_of_the_prune_not_that_of_a_retarget_before_it(withdraw_epochs: int) -> None:
    rules = LifecycleConfig(holding_epochs=1, blend_epochs=2, withdraw_epochs=withdraw_epochs)
    loop = make_loop(
        Script(
            {**GROW, 1: [Retarget(slot="first", reason="less is enough", alpha=0.5)], 2: [Prune(slot="first", reason="it does not pay")]}
        ),
        config(rules),
    )
    loop.epoch(epochs=2 + withdraw_epochs)
    assert stages(loop)[:4] == ["GERMINATED", "HOLDING", "BLENDING", "PRUNED"]
    assert loop.grower.ledger.seeds[0].why == "it does not pay"
    story = Story()
    for event in loop.events:
        story.take(event)
    assert story.seeds[0].why == "it does not pay"


@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_pruning_gives_the_outputs_of_the_host_alone_bit_for_bit(lifecycle: LifecycleConfig) -> None:
    loop = make_loop(Script({**GROW, 2: [Prune(slot="first", reason="test")]}), config(lifecycle))
    loop.epoch(epochs=3)
    assert loop.slotted.slots["first"].seed is None
    alone = make_host()
    alone.load_state_dict(loop.host.state_dict())
    x = make_data(1, seed=8)[0][0]
    assert torch.equal(loop.slotted.eval()(x), alone.eval()(x))


def test_gates_give_the_reason_of_a_refusal() -> None:
    script = Script(
        {
            0: [Germinate(slot="first", reason="test", blueprint="conv3x3"), Advance(slot="second", reason="test")],
            1: [Germinate(slot="first", reason="test", blueprint="mlp"), Prune(slot="second", reason="test")],
            2: [Germinate(slot="first", reason="test", blueprint="mlp")],
            3: [Fossilize(slot="first", reason="test")],
            4: [Advance(slot="first", reason="test"), Retarget(slot="second", reason="test", alpha=0.5)],
            5: [Retarget(slot="first", reason="test", alpha=1.5)],
        }
    )
    loop = make_loop(script, config(LifecycleConfig(holding_epochs=6)))
    loop.epoch(epochs=5)
    first, *rest = refusals(loop)
    assert first.startswith("'conv3x3' cannot grow there; blueprints that can: ")
    assert rest == [
        "only a seed that is TRAINING can begin to blend, and this slot is DORMANT",
        "there is nothing to prune: the slot is DORMANT",
        "the slot holds a seed that is HOLDING",
        "it has been on probation for 2 of 6 epochs",
        "only a seed that is TRAINING can begin to blend, and this slot is HOLDING",
        "alpha moves only in BLENDING and HOLDING, and the seed is DORMANT",
        "alpha must be above 0 and at most 1, not 1.5; to get rid of a seed, prune it",
    ]
    assert [event.reason for event in loop.events if event.kind == "action_refused"] == [first, *rest]


def test_a_seed_in_the_shadow_must_have_learned_with_healthy_gradients_before_it_blends() -> None:
    rules = LifecycleConfig(raise_mode="shadow", training_epochs=2)
    loop = make_loop(Script({**GROW, 1: [Advance(slot="first", reason="test")], 2: [Advance(slot="first", reason="test")]}), config(rules))
    loop.epoch()
    for _ in loop.data:
        loop.step_host()
        loop.grower.after_step(torch.tensor(1.0), closure=lambda: next(loop.host.parameters()).sum() * 0 + _poisoned(loop))
    loop.grower.after_epoch(loop.evaluate)
    assert refusals(loop) == ["it has learned for 1 of 2 epochs", "the health of its gradients is 0.00, below 0.7"]
    assert loop.grower.lifecycles.slots["first"].record.gradients.skipped == len(loop.data)


def _poisoned(loop: Loop) -> torch.Tensor:
    return loop.slotted(loop.data[0][0]).sum() * math.nan


def test_the_target_of_alpha_can_be_changed_during_blending() -> None:
    rules = LifecycleConfig(raise_mode="shadow", training_epochs=1, blend_epochs=2)
    script = Script(
        {
            **GROW,
            1: [Advance(slot="first", reason="test")],
            2: [Retarget(slot="first", reason="test", alpha=0.25)],
            4: [Retarget(slot="first", reason="test", alpha=0.75)],
        }
    )
    loop = make_loop(script, config(rules))
    loop.epoch(epochs=2)
    assert loop.slotted.slots["first"].alpha == 0.5
    loop.epoch(epochs=2)
    assert loop.slotted.slots["first"].alpha == 0.25
    loop.epoch(epochs=2)
    assert loop.slotted.slots["first"].alpha == 0.75
    assert stages(loop)[-2:] == ["BLENDING", "HOLDING"]
    assert not refusals(loop)


def test_budgets_of_seeds_parameters_and_flops_refuse_with_the_numbers() -> None:
    both = {
        0: [Germinate(slot="first", reason="test", blueprint="low_rank"), Germinate(slot="second", reason="test", blueprint="low_rank")]
    }
    cost = make_loop().grower.lifecycles.price("first", "low_rank")
    host = make_loop().slotted.discovery.host
    parameters = BudgetConfig(max_parameters=1.5 * cost.parameters / host.parameters)
    flops = BudgetConfig(max_parameters=None, max_flops=1.5 * cost.flops / host.flops)
    for budget, words in (
        (BudgetConfig(max_seeds=1), "there are as many seeds as the budget allows"),
        (parameters, f"it needs {cost.parameters} parameters and the budget has "),
        (flops, f"it needs {cost.flops} FLOPs per sample and the budget has "),
    ):
        loop = make_loop(Script(both), config(budget=budget))
        loop.grower.begin()
        (reason,) = refusals(loop)
        assert reason.startswith(words)
        assert loop.grower.state().seeds_left == (0 if budget.max_seeds == 1 else 1)
        assert loop.slotted.slots["second"].seed is None


def test_the_parameters_of_a_gate_are_counted() -> None:
    loop = make_loop(Script(GROW), config(LifecycleConfig(blending="gate")))
    loop.grower.begin()
    seed = loop.slotted.slots["first"].seed
    assert loop.grower.lifecycles.added().parameters == sum(parameter.numel() for parameter in seed.parameters())


WILD_BLUEPRINTS = ("mlp", "norm", "low_rank", "conv1x1")  # the last one never fits


class Wild:
    """Decides anything at all, sensible or not."""

    name = "wild"

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def decide(self, state: GrowthState) -> Decision:
        actions = [self._action(name) for name in SLOTS if self.random.random() < 0.8]
        return Decision(tuple(actions), probe=self.random.random() < 0.3)

    def _action(self, slot: str) -> Action:
        kinds = [
            lambda: Germinate(slot=slot, reason="wild", blueprint=self.random.choice(WILD_BLUEPRINTS)),
            lambda: Advance(slot=slot, reason="wild"),
            lambda: Retarget(slot=slot, reason="wild", alpha=self.random.choice([0.0, 0.3, 1.0, 2.0])),
            lambda: Fossilize(slot=slot, reason="wild"),
            lambda: Prune(slot=slot, reason="wild"),
        ]
        return self.random.choices(kinds, weights=[4, 3, 1, 0.3, 1])[0]()

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def check_consistent(loop: Loop) -> None:
    lifecycles, ledger = loop.grower.lifecycles, loop.grower.ledger
    for backend in lifecycles.slots.values():
        stage, slot = backend.stage, backend.slot
        assert (slot.seed is not None) == (stage in OCCUPIED) == (backend.learner is not None) == (backend.record.number is not None)
        assert stage not in (Stage.GERMINATED, Stage.PRUNED)  # only passed through
        assert slot.is_kept == (stage is Stage.FOSSILIZED)
        assert slot.is_connected == (stage in OCCUPIED and stage is not Stage.TRAINING)
        assert backend.record.is_withdrawing <= (stage is Stage.BLENDING)
        if slot.seed is not None:
            assert float(slot.seed.alpha) == pytest.approx(slot.alpha)
            assert set(backend.learner.parameters) == set(slot.seed.parameters())
            entry = ledger.seeds[backend.record.number - 1]
            assert entry.outcome == ("living" if stage in LIVING else "kept")
            assert entry.stages[-1].stage is stage
    here = {backend.record.number for backend in lifecycles.slots.values()}
    for index, entry in enumerate(ledger.seeds, start=1):
        assert entry.number == index
        assert (entry.outcome in ("living", "kept")) == (entry.number in here)
        assert (entry.ended is None) == (entry.outcome == "living")
        if not loop.grower.ledger.rollbacks:
            moves = [step.stage for step in entry.stages]
            assert moves[0] is Stage.GERMINATED
            assert all(may_move(one, other).passed for one, other in pairwise(moves))
    real = sum(parameter.numel() for slot in loop.slotted.slots.values() if slot.seed for parameter in slot.seed.parameters())
    assert lifecycles.added().parameters == real
    planted = sum(backend.slot.seed is not None for backend in lifecycles.slots.values())
    assert loop.grower.state().seeds_left == len(lifecycles.slots) - planted


@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), is_shadow=st.booleans(), poison=st.sampled_from([None, 3, 7]))
@pytest.mark.slow
def test_stage_slot_seed_learner_and_ledger_agree_under_any_controller(seed: int, is_shadow: bool, poison: int | None) -> None:
    loop = make_loop(Wild(seed), config(QUICK_SHADOW if is_shadow else QUICK, seed=seed, probe_steps=2, blueprints=WILD_BLUEPRINTS))
    loop.data = loop.data[:2]
    for epoch in range(14):
        if epoch == poison:
            with torch.no_grad():
                loop.host.first.weight.fill_(math.nan)
        loop.epoch()
        check_consistent(loop)
    assert loop.grower.rollbacks == (poison is not None)
    assert all(torch.isfinite(parameter).all() for parameter in loop.host.parameters())
