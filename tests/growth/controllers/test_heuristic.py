"""Decisions of the heuristic, from states written by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from esper.growth.config import GrowthConfig, GrowthError, HeuristicConfig, LifecycleConfig
from esper.growth.controllers.heuristic import (
    Heuristic,
    choose,
    for_length,
    gain_of_longer_training,
    has_jumped,
    has_stopped_falling,
    never_grown,
    next_step,
    passed_over,
    projected_loss,
    samples_for_host,
    speed_over_longer_training,
    starvation,
)
from esper.growth.host.layout import Place
from esper.growth.lifecycle.governor import LossRange
from esper.growth.lifecycle.stages import (
    Candidate,
    Contribution,
    Cost,
    Decision,
    Fossilize,
    Germinate,
    GrowthState,
    Prune,
    SlotState,
    Stage,
)
from esper.statistics import Interval
from tests.growth.builders import in_other_units, seed_record

RULES = HeuristicConfig()
HOST = Cost(parameters=2_000, flops=100_000)
BIG = Candidate("big", Cost(1_000, 50_000), rent=0.01, promise=0.01, load=100.0)
SMALL = Candidate("small", Cost(300, 5_000), rent=0.001, promise=0.002, load=30.0)
TRIFLE = Candidate("trifle", Cost(8, 100), rent=0.0001, promise=0.05, load=1.0)


def slot(name: str = "a", *, behind: int = 50_000, blueprint: str | None = None, **fields: object) -> SlotState:
    place = Place(name, "conv", (4, 8, 8), flops_behind=behind)
    seed = None if blueprint is None else seed_record(blueprint)
    return replace(SlotState(place, seed=seed, candidates=(BIG, SMALL)), **fields)  # type: ignore[arg-type]


def state(
    epoch: int = 4, *, train: tuple[float, ...] = (2.2, 2.0, 1.9, 1.8), slots: tuple[SlotState, ...] = (slot(),), **fields: object
) -> GrowthState:
    base = GrowthState(
        epoch=epoch,
        epochs=80,
        steps_per_epoch=16,
        train_losses=train,
        val_losses=train,
        slots=slots,
        host_cost=HOST,
        added=Cost(0, 0),
        parameters_left=None,
        flops_left=None,
        seeds_left=len(slots),
        scale=LossRange.of(2.3),
        samples_per_epoch=1_000,
        host_load=400.0,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def decisions_of(heuristic: Heuristic, now: GrowthState) -> list[tuple[str, str]]:
    return [(type(action).__name__, action.slot) for action in heuristic.decide(now).actions]


def test_a_starved_host_is_probed_before_a_twentieth_of_the_training_and_grows_after_it() -> None:
    heuristic = Heuristic(GrowthConfig())
    assert not heuristic.decide(state(0, train=())).probe
    assert not heuristic.decide(state(2, train=(2.2, 2.0))).probe
    asked = heuristic.decide(state(3, train=(2.2, 2.0, 1.9)))
    assert asked.probe
    assert not asked.actions
    (action,) = heuristic.decide(state(4)).actions
    assert isinstance(action, Germinate)
    assert (action.slot, action.blueprint) == ("a", "big")


@pytest.mark.parametrize(
    ("train", "val", "reason"),
    [
        ((1.2, 0.3, 0.12, 0.06), 0.1, "below 5% of"),  # large enough: it has learned it all
        ((2.2, 2.0, 1.5, 0.9), 2.5, "overfits"),
    ],
)
def test_a_host_that_is_large_enough_does_not_grow(train: tuple[float, ...], val: float, reason: str) -> None:
    now = state(4, train=train, val_losses=(*train[:-1], val))
    verdict = starvation(now, RULES)
    assert not verdict.is_starved
    assert reason in verdict.reason
    heuristic = Heuristic(GrowthConfig())
    assert not heuristic.decide(replace(now, epoch=3, train_losses=train[:3], val_losses=(train[0], train[1] + 1, train[2] + 1))).probe
    assert not heuristic.decide(now).actions


def test_a_large_host_whose_loss_is_projected_to_end_low_is_not_starved() -> None:
    falling = (2.0, 1.0, 0.5, 0.25)
    assert starvation(state(4, train=falling, host_load=400.0), RULES).is_starved  # few weights for so many samples
    verdict = starvation(state(4, train=falling, host_load=40_000.0), RULES)
    assert not verdict.is_starved
    assert "is projected to end" in verdict.reason


def test_harder_validation_data_are_no_overfitting() -> None:
    """A validation part whose targets are spread wider has a higher loss from the first epoch on, in which every sample is new."""
    losses = (2.2, 2.0, 1.5, 1.1)
    harder = state(4, train=losses, val_losses=tuple(1.6 * loss for loss in losses))
    assert starvation(harder, RULES).is_starved
    assert "overfits" in starvation(replace(harder, val_losses=(2.2, 2.0, 1.8, 1.8)), RULES).reason
    known_before = replace(harder, train_losses=(0.9, 0.8, 0.6, 0.5), val_losses=(1.4, 1.3, 1.1, 1.0))
    assert "overfits" in starvation(known_before, RULES).reason


def test_an_early_check_that_grew_nothing_is_repeated_a_quarter_later() -> None:
    heuristic, looks = Heuristic(GrowthConfig()), list[int]()
    for epoch in range(30):
        train = tuple(2.2 * 0.99**number for number in range(epoch))  # never on a plateau of 5 %
        now = state(epoch, train=train, slots=(slot(candidates=(replace(BIG, promise=0.0),)),), epochs=80)
        decision = heuristic.decide(now)
        assert not decision.actions
        looks += [epoch] if decision.probe and epoch < 24 else []
    assert looks[:5] == [3, 5, 7, 9, 12], "1.25 times the epoch of the last, and the epoch before it for the probe"


def test_nothing_new_grows_after_half_of_the_training() -> None:
    flat = (1.8,) * 60
    heuristic = Heuristic(GrowthConfig())
    assert not heuristic.decide(state(50, train=flat[:50])).probe
    assert heuristic.decide(state(15, train=flat[:15])).probe  # a plateau, with time left


def test_a_plateau_and_a_jump_of_the_loss_are_detected() -> None:
    assert has_stopped_falling(state(train=(2.0, 1.5, 1.5, 1.49, 1.49, 1.48)), RULES)
    assert not has_stopped_falling(state(train=(2.0, 1.5, 1.4, 1.3, 1.2, 1.1)), RULES)
    assert has_jumped(state(train=(1.0, 0.9, 0.8, 0.8, 1.6, 1.5)), RULES)
    assert not has_jumped(state(train=(1.0, 0.9, 0.8, 0.8, 1.6, 0.8)), RULES)  # one bad epoch is none


def test_a_seed_on_trial_delays_further_growth() -> None:
    flat = (1.8,) * 15
    trial = slot("b", stage=Stage.HOLDING, blueprint="big", candidates=())
    assert not Heuristic(GrowthConfig()).decide(state(15, train=flat, slots=(slot(), trial))).probe
    kept = replace(trial, stage=Stage.FOSSILIZED)
    assert Heuristic(GrowthConfig()).decide(state(15, train=flat, slots=(slot(), kept))).probe


@pytest.mark.parametrize(
    ("low", "high", "held", "epoch", "expected"),
    [
        (0.02, 0.04, 3, 10, [("Fossilize", "a")]),
        (0.005, 0.04, 3, 10, []),  # open
        (0.005, 0.04, 9, 10, [("Prune", "a")]),  # still open
        (-0.02, 0.005, 3, 10, []),  # useless so far, but young
        (-0.02, 0.005, 9, 10, [("Prune", "a")]),
        (0.005, 0.04, 9, 80, [("Prune", "a")]),  # the end leaves it open
        (-0.01, 0.015, 3, 80, [("Prune", "a")]),
    ],
)
def test_seeds_are_kept_by_contribution_against_rent(
    low: float, high: float, held: int, epoch: int, expected: list[tuple[str, str]]
) -> None:
    gain = Contribution(Interval((low + high) / 2, low, high), epoch)
    seed = slot(stage=Stage.HOLDING, blueprint="big", rent=0.01, epochs_in_stage=held, contribution=gain, candidates=())
    assert decisions_of(Heuristic(GrowthConfig()), state(epoch, train=(0.01,) * epoch, slots=(seed,))) == expected


@pytest.mark.parametrize(("reach", "may_grow"), [(10.5, True), (math.inf, False)])
def test_an_interval_that_cannot_decide_is_said_once_and_keeps_no_seed(reach: float, may_grow: bool) -> None:
    gain = Contribution(Interval(0.7, 0.7 - reach, 0.7 + reach), 8, count=3)
    trial = slot("b", stage=Stage.HOLDING, blueprint="big", rent=0.01, epochs_in_stage=3, contribution=gain, candidates=())
    now = state(8, train=(1.8,) * 8, slots=(slot(), trial))
    heuristic = Heuristic(GrowthConfig())
    with pytest.warns(
        RuntimeWarning, match="'b' cannot be judged: its interval over 3 batches of validation data is .* return the loss of"
    ):
        (prune,) = heuristic.decide(now).actions
    assert prune.reason.count("use smaller and more validation batches") == 1
    decided = heuristic.decide(now)  # without a second warning
    assert [type(action) for action in decided.actions] == [Prune]
    assert ("no seed could be kept" in decided.reason) != may_grow


def test_an_outdated_measurement_leads_to_no_decision() -> None:
    gain = Contribution(Interval(0.5, 0.4, 0.6), 9)
    seed = slot(stage=Stage.HOLDING, blueprint="big", rent=0.01, epochs_in_stage=5, contribution=gain, candidates=())
    assert decisions_of(Heuristic(GrowthConfig()), state(10, train=(0.01,) * 10, slots=(seed,))) == []


def test_a_seed_in_the_shadow_is_blended_when_it_has_learned_long_enough() -> None:
    seed = slot(stage=Stage.TRAINING, blueprint="big", epochs_in_stage=2, candidates=())
    heuristic = Heuristic(GrowthConfig())
    assert decisions_of(heuristic, state(10, train=(0.01,) * 10, slots=(seed,))) == []
    assert decisions_of(heuristic, state(11, train=(0.01,) * 11, slots=(replace(seed, epochs_in_stage=3),))) == [("Advance", "a")]


def chosen(now: GrowthState) -> list[tuple[str, str]]:
    return [(name, candidate.blueprint) for name, candidate in choose(now, RULES)]


# Two hosts as they were measured. A GPT of 31,744 weights that has seen 64 of 384 steps: an mlp at 12 % of its FLOPs ended 0.03 nats behind
# longer training for the same FLOPs. Digits, 64 of 640 steps: two convolutions for 158 % ended 0.01 ahead.
GPT = {"epochs": 12, "steps_per_epoch": 32, "train": (3.347, 2.711), "scale": LossRange.of(3.3)}
DIGITS = {"epochs": 40, "steps_per_epoch": 16, "train": (1.9197, 1.1349, 0.5637, 0.3154), "scale": LossRange.of(2.3)}


def measured(host: dict[str, Any], *, promise: float, flops: float, epochs: int | None = None) -> GrowthState:
    candidate = Candidate("mlp", Cost(4_000, round(flops * HOST.flops)), rent=0.004, promise=promise, load=60.0)
    settings = {**host, "slots": (slot(candidates=(candidate,)),), "epochs": epochs or host["epochs"]}
    return state(len(host["train"]), **settings)


def with_looks(now: GrowthState) -> Decision:
    heuristic = Heuristic(GrowthConfig())
    heuristic.load_state_dict({"looks_at": now.epoch, "is_next_step": False, "cannot_judge": ""})
    return heuristic.decide(now)


def test_an_undertrained_host_does_not_grow_and_a_starved_one_does() -> None:
    gpt, digits = measured(GPT, promise=0.00181, flops=0.117), measured(DIGITS, promise=0.01935, flops=1.58)
    assert starvation(gpt, RULES).is_starved, "by its losses alone it could be either"
    assert not with_looks(gpt).actions
    assert "undertrained" in with_looks(gpt).reason
    assert "train longer" in with_looks(gpt).reason
    assert len(with_looks(digits).actions) == 1
    assert speed_over_longer_training(gpt, only(gpt)) == pytest.approx(18, abs=1)
    assert speed_over_longer_training(digits, only(digits)) == pytest.approx(3270, abs=50)


def only(now: GrowthState) -> Candidate:
    ((candidate,),) = (slot.candidates for slot in now.slots)
    return candidate


def test_the_longer_the_training_the_less_is_left_to_learn_at_its_end() -> None:
    speeds = [speed_over_longer_training(now, only(now)) for epochs in (6, 12, 24, 96) if (now := with_horizon(epochs))]
    assert speeds == sorted(speeds)
    assert not with_looks(with_horizon(12)).actions
    assert with_looks(with_horizon(96)).actions


def with_horizon(epochs: int) -> GrowthState:
    return measured(GPT, promise=0.00181, flops=0.117, epochs=epochs)


def test_in_a_training_of_few_steps_a_high_loss_is_no_lack_of_data_nor_a_reason_to_train_longer() -> None:
    gpt = measured(GPT, promise=0.00181, flops=0.117)
    few, many = (replace(gpt, steps_per_epoch=steps) for steps in (8, 64))
    needs = [samples_for_host(now, HOST, for_length(RULES, now)) for now in (few, many)]
    assert needs[0] == pytest.approx(needs[1] * 96 / RULES.few_steps)
    assert for_length(RULES, few).longer_training == pytest.approx(RULES.longer_training * 96 / RULES.few_steps)
    assert for_length(RULES, many) == for_length(RULES, replace(gpt, epochs=None)) == RULES


def test_a_host_that_has_stopped_learning_is_not_undertrained() -> None:
    flat = measured({**GPT, "train": (2.5, 2.5)}, promise=0.00181, flops=0.117)
    assert gain_of_longer_training(flat.train_losses, 12, 2.0) == 0
    assert with_looks(flat).actions


def test_the_best_candidate_of_every_slot_is_chosen_within_the_budget() -> None:
    better = replace(BIG, promise=0.02)
    slots = (slot("a"), slot("b", candidates=(better, SMALL)), slot("c", candidates=(replace(BIG, promise=0.0),)))
    now = state(slots=slots, seeds_left=3)
    assert chosen(now) == [("b", "big"), ("a", "big")]
    assert chosen(replace(now, parameters_left=1_500)) == [("b", "big"), ("a", "small")]
    assert chosen(replace(now, parameters_left=1_000)) == [("b", "big")]
    assert chosen(replace(now, flops_left=60_000)) == [("b", "big"), ("a", "small")]
    assert chosen(replace(now, seeds_left=1)) == [("b", "big")]


def test_tiny_tried_and_useless_candidates_are_not_chosen() -> None:
    assert chosen(state(slots=(slot(candidates=(TRIFLE, SMALL)),))) == [("a", "small")]
    assert chosen(state(slots=(slot(tried=("big",)),))) == [("a", "small")]
    assert chosen(state(samples_per_epoch=100)) == [("a", "small")]
    at_the_end = slot(behind=1_000)
    assert chosen(state(slots=(at_the_end,))) == [("a", "small")]
    assert chosen(state(slots=(at_the_end,), samples_per_epoch=None)) == [("a", "big")]


def test_every_probed_candidate_that_does_not_grow_has_the_rule_that_rejected_it() -> None:
    dear, poor = replace(BIG, blueprint="dear", rent=0.2), replace(BIG, blueprint="poor", load=1e6)
    slots = (
        slot("a", candidates=(BIG, SMALL, TRIFLE, dear, poor)),
        slot("b", tried=("big",)),
        slot("c", candidates=(replace(BIG, promise=None),)),
    )
    now = state(slots=slots, seeds_left=1)
    grown = [Germinate(slot="a", reason="test", blueprint="big")]
    reasons = passed_over(now, RULES, grown)
    assert set(reasons["a"]) == {"small", "trifle", "dear", "poor"}, "all but the one that grows"
    assert reasons["a"]["small"] == "big is worth more at the end of the training: 0.1500 after rent, this one 0.0310"
    assert "too few to matter" in reasons["a"]["trifle"]
    assert "lower the loss by about 0.1600, its rent is 0.2000" in reasons["a"]["dear"]
    assert "too few data" in reasons["a"]["poor"]
    assert reasons["b"] == {"big": "it was tried in this slot before", "small": "there are as many seeds as the budget allows"}
    assert "c" not in reasons, "it was not probed"
    decided = with_looks(now)
    assert decided.passed_over == reasons
    assert [action.slot for action in decided.actions] == ["a"]


def test_rent_decides_between_candidates_and_against_all() -> None:
    dear = replace(BIG, rent=0.14)  # an epoch would give 0.16
    assert chosen(state(slots=(slot(candidates=(dear, SMALL)),))) == [("a", "small")]
    assert chosen(state(slots=(slot(candidates=(replace(BIG, rent=0.2),)),))) == []


@pytest.mark.parametrize("factor", [1e-4, 1 / 3, 1_000.0])
def test_no_decision_depends_on_the_unit_of_the_loss(factor: float) -> None:
    """The host is looked at, probed, grown and its seed kept or pruned, by the same numbers in another unit."""
    gain = Contribution(Interval(0.02, 0.012, 0.03), 8)
    trial = slot("b", stage=Stage.HOLDING, blueprint="big", rent=0.01, epochs_in_stage=9, contribution=gain, candidates=())
    useless = replace(trial, contribution=replace(gain, gain=Interval(0.004, -0.001, 0.009)))
    falling, flat = (2.2, 2.0, 1.9, 1.8), (1.8,) * 8
    lives = [
        [state(0, train=()), state(3, train=falling[:3]), state(4)],
        [state(8, train=flat, slots=(slot(), trial)), state(8, train=flat, slots=(slot(), useless))],
        [state(8, train=flat), state(8, train=(*flat[:6], 2.9, 2.9))],
        [state(4, train=(0.5, 0.2, 0.12, 0.11)), state(4, train=(2.2, 2.0, 1.5, 0.9), val_losses=(2.0, 2.0, 2.0, 2.0))],
    ]
    decided_anything = set()
    for states in lives:
        one, other = Heuristic(GrowthConfig()), Heuristic(GrowthConfig())
        for now in states:
            here, there = one.decide(now), other.decide(in_other_units(now, factor))
            assert here.probe == there.probe
            assert [(type(action), action.slot) for action in here.actions] == [(type(action), action.slot) for action in there.actions]
            assert verdict(now) == verdict(in_other_units(now, factor))
            decided_anything |= {type(action).__name__ for action in here.actions} | ({"probe"} if here.probe else set())
    assert decided_anything == {"Germinate", "Fossilize", "Prune", "probe"}


def verdict(now: GrowthState) -> tuple[bool, ...]:
    if len(now.train_losses) < 2:
        return ()
    return starvation(now, RULES).is_starved, bool(has_jumped(now, RULES)), bool(has_stopped_falling(now, RULES))


def test_a_loss_that_can_be_negative_is_measured_from_its_lower_bound() -> None:
    """A log-likelihood, 3.0 below a constant predictor at best: the same losses as those of any other host, 5.0 lower."""
    losses = (2.9, 2.5, 2.4, 2.35)
    above = state(train=losses, scale=LossRange.of(3.0))
    below = replace(above, scale=LossRange.of(-2.0, loss_range=3.0), train_losses=tuple(loss - 5.0 for loss in losses))
    below = replace(below, val_losses=below.train_losses)
    assert verdict(above) == verdict(below) == (True, False, False)
    assert chosen(above) == chosen(below) == [("a", "big")]
    with pytest.raises(GrowthError, match=r"a loss of -2\. .*loss_range"):
        LossRange.of(-2.0)


def test_a_power_law_is_projected_exactly_and_a_rising_loss_is_projected_as_constant() -> None:
    assert projected_loss([2 / t**0.5 for t in (1, 2, 3, 4)], 100) == pytest.approx(0.2)
    assert projected_loss([1.0, 1.2], 100) == 1.2
    assert projected_loss([1.0], 100) == 1.0


def test_the_state_of_the_heuristic_survives_a_resume() -> None:
    first, second = Heuristic(GrowthConfig()), Heuristic(GrowthConfig())
    assert first.decide(state(3, train=(2.2, 2.0, 1.9))).probe
    second.load_state_dict(first.state_dict())
    assert decisions_of(second, state(4)) == decisions_of(first, state(4)) == [("Germinate", "a")]


@pytest.mark.parametrize(
    ("lifecycle", "least"), [(LifecycleConfig(), 6), (LifecycleConfig(holding_epochs=1), 4), (LifecycleConfig(raise_mode="shadow"), 11)]
)
def test_a_training_too_short_to_grow_anything_says_so_from_the_first_decision(lifecycle: LifecycleConfig, least: int) -> None:
    heuristic = Heuristic(GrowthConfig(lifecycle=lifecycle))
    for epoch in range(least):
        decision = heuristic.decide(state(epoch, train=(2.2,) * epoch, epochs=least - 1, lifecycle=lifecycle))
        assert not decision.probe
        assert f"nothing can grow in {least - 1} epochs" in decision.reason
        assert f"train for at least {least} epochs" in decision.reason
    assert heuristic.why_nothing_can_grow(least) == ""
    assert heuristic.why_nothing_can_grow(None) == ""
    assert heuristic.decide(state(1, train=(2.2,), epochs=least, lifecycle=lifecycle)).probe


def test_no_seed_germinates_too_late_to_be_kept() -> None:
    early = {"train": (2.2,), "epochs": 5}
    assert not Heuristic(GrowthConfig()).decide(state(1, **early)).probe
    assert Heuristic(GrowthConfig()).decide(state(1, train=(2.2,), epochs=6)).probe
    assert not Heuristic(GrowthConfig()).decide(state(1, train=(2.2,), epochs=6, lifecycle=LifecycleConfig(raise_mode="shadow"))).probe


def test_a_first_step_takes_the_largest_chain_that_the_data_can_teach() -> None:
    chains = [
        Candidate(f"x{times}", Cost(2_000 * times**2, 100_000 * times**2), 0.001 * times, 0.01 * times, widened=("a",))
        for times in (1, 2, 4)
    ]
    starved = state(slots=(slot(candidates=tuple(chains)),), samples_per_epoch=5_000)
    assert chosen(starved) == [("a", "x4")]
    assert chosen(replace(starved, samples_per_epoch=500)) == [("a", "x2")]
    assert chosen(replace(starved, samples_per_epoch=200)) == [("a", "x1")]
    # A host that will end near 0 needs fewer data.
    assert chosen(replace(starved, samples_per_epoch=200, train_losses=(2.2, 1.0, 0.5, 0.3))) == [("a", "x4")]


def test_the_size_of_a_step_is_what_is_worth_most_after_rent() -> None:
    """The loss that is going to remain falls with the square root of the parameters, from 1.0 to 0.25 at 16 times as many."""
    sizes = [Candidate(f"x{times}", Cost(2_000 * (times - 1), 100_000 * (times - 1)), 0.0, 1.0, widened=("a",)) for times in (4, 16, 64)]

    def chosen_at(price: float) -> list[tuple[str, str]]:
        dear = tuple(replace(one, rent=price * (2 * number + 2)) for number, one in enumerate(sizes))  # per doubling
        return chosen(state(slots=(slot(candidates=dear),), samples_per_epoch=10**6))

    assert [chosen_at(price) for price in (0.01, 0.1, 0.2)] == [[("a", "x64")], [("a", "x16")], [("a", "x4")]]


def test_candidates_that_the_data_can_never_teach_are_not_probed_and_have_that_reason() -> None:
    huge = Candidate("huge", Cost(800_000, 40_000_000), rent=0.02, promise=None, load=100.0)
    now = state(3, train=(2.2, 2.0, 1.9), slots=(slot(candidates=(BIG, huge)),))
    asked = Heuristic(GrowthConfig()).decide(now)
    assert asked.probe
    assert asked.not_probed == never_grown(now, RULES) == {("a", "huge")}
    assert not never_grown(replace(now, samples_per_epoch=10_000), RULES)
    assert not never_grown(replace(now, samples_per_epoch=None), RULES)
    assert "too few data" in passed_over(now, RULES, [])["a"]["huge"]


def test_a_host_that_may_not_grow_further_is_not_probed_again() -> None:
    kept = Contribution(Interval(0.5, 0.4, 0.6), 9)
    on_trial = slot(stage=Stage.HOLDING, contribution=kept, rent=0.01, epochs_in_stage=5, candidates=())
    for val, expected in ((1.4, True), (1.9, False)):
        losses = (*(2.0,) * 8, 1.4)
        now = state(9, train=losses, val_losses=(*(2.0,) * 6, val, val, val), slots=(on_trial, slot("b")), added=Cost(500, 10_000))
        heuristic = Heuristic(GrowthConfig())
        heuristic._looks_at = 4
        assert heuristic.decide(now).probe == expected


def test_a_further_step_needs_a_contribution_that_tells_how_much_was_gained() -> None:
    for low, expected in ((0.3, True), (0.2, False)):
        sure = Contribution(Interval(0.5, low, 1 - low), 9)
        on_trial = slot(stage=Stage.HOLDING, contribution=sure, rent=0.01, epochs_in_stage=5, candidates=())
        heuristic = Heuristic(GrowthConfig())
        heuristic._looks_at = 8
        decision = heuristic.decide(state(9, train=(2.0,) * 8 + (1.4,), slots=(on_trial, slot("b")), added=Cost(500, 10_000)))
        assert [type(action) for action in decision.actions] == [Fossilize]
        assert decision.probe == expected


def test_longer_training_is_the_alternative_to_a_row_of_layers_and_not_to_one_of_its_sizes() -> None:
    """A row has two sizes. Only the smaller one beats longer training 25 times, and the larger one ends lower."""
    sizes = [
        Candidate("small", Cost(4_000, round(0.1 * HOST.flops)), rent=0.004, promise=0.0035, load=60.0, widened=("a",)),
        Candidate("large", Cost(40_000, round(0.8 * HOST.flops)), rent=0.004, promise=0.009, load=60.0, widened=("a", "b")),
    ]
    now = state(2, **{**GPT, "slots": (slot(candidates=tuple(sizes)),), "samples_per_epoch": 10**6})
    small, large = (speed_over_longer_training(now, one) for one in sizes)
    assert small > RULES.longer_training > large
    assert chosen(now) == [("a", "large")]
    assert chosen(replace(now, slots=(slot(candidates=(sizes[1],)),))) == []


def test_a_host_that_lacks_data_is_checked_again_until_three_tenths_of_the_training() -> None:
    lacking, heuristic = state(3, train=(2.2, 2.0, 1.9), host_load=2_000.0), Heuristic(GrowthConfig())
    first = heuristic.decide(lacking)
    assert not first.probe
    assert "it needs" in first.reason
    # It learns faster than it had seemed to, so it will end lower and needs fewer data.
    faster = (2.2, 2.0, 1.9, 1.6, 1.3, 1.1)
    assert heuristic.decide(replace(lacking, epoch=6, train_losses=faster, val_losses=faster)).probe
    late = Heuristic(GrowthConfig())
    assert not late.decide(lacking).probe
    falling = tuple(2.2 * 0.95**epoch for epoch in range(30))
    assert starvation(replace(lacking, epoch=30, train_losses=falling, val_losses=falling), RULES).is_starved
    assert not late.decide(replace(lacking, epoch=30, train_losses=falling, val_losses=falling)).probe


def test_a_further_step_at_most_doubles_the_flops() -> None:
    chains = [
        Candidate(f"x{times}", Cost(2_000 * times**2, 100_000 * times**2), 0.001 * times, 0.01 * times, widened=("a",))
        for times in (1, 2, 4)
    ]
    grown = state(slots=(slot(candidates=tuple(chains)),), samples_per_epoch=10**6, added=Cost(6_000, 300_000))
    assert chosen(grown) == [("a", "x2")]
    beside = replace(grown, slots=(*grown.slots, slot("b")), seeds_left=2)
    assert chosen(beside) == [("a", "x2")], "the seeds of one step together"


def test_what_one_seed_leaves_of_the_loss_must_pay_for_the_next() -> None:
    all_of_it = replace(BIG, promise=1.0, rent=0.7)
    both = state(slots=(slot("a", candidates=(all_of_it,)), slot("b", candidates=(all_of_it,))))
    assert chosen(both) == [("a", "big")], "each is credited with half of the remaining loss at most"


def test_a_row_of_layers_gets_one_seed() -> None:
    pair = Candidate("pair", Cost(200, 10_000), 0.001, 0.02, widened=("a",))
    row = Candidate("row", Cost(300, 15_000), 0.001, 0.01, widened=("a", "b"))
    behind = Candidate("pair", Cost(200, 10_000), 0.001, 0.02, widened=("b",))
    slots = (slot("a", candidates=(pair, row)), slot("b", candidates=(behind, SMALL)), slot("c", candidates=(SMALL,)))
    now = state(slots=slots, seeds_left=3)
    assert chosen(now) == [("a", "row"), ("c", "small")], "a seed behind would not see the new units, or lack the weights between them"
    left = passed_over(now, RULES, [Germinate(slot="a", reason="", blueprint="row"), Germinate(slot="c", reason="", blueprint="small")])
    assert left["b"] == dict.fromkeys(("pair", "small"), "another seed is chosen in this row of layers")


def test_a_host_that_has_grown_stops_when_what_it_learns_does_not_carry_over() -> None:
    learned = state(8, train=(2.2, 0.9, 0.8), val_losses=(2.2, 1.0, 0.81))
    assert next_step(learned, RULES).is_starved
    lost = next_step(replace(learned, val_losses=(2.2, 1.0, 0.9)), RULES)
    assert not lost.is_starved
    assert "does not carry over" in lost.reason
    # A single high validation loss says nothing, as long as one of the last three is low.
    assert next_step(replace(learned, val_losses=(0.81, 1.4, 1.2)), RULES).is_starved
