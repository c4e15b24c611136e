"""Contributions of seeds and promises of candidates."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from esper.growth import GrowthError, add_slots
from esper.growth.config import BudgetConfig, GrowthConfig, SeedOptimizerConfig
from esper.growth.controllers.heuristic import judge
from esper.growth.host.layout import Place
from esper.growth.lifecycle.stages import Advance, Contribution, Cost, Germinate
from esper.growth.measure import probe as promise
from esper.growth.measure.contribution import Losses, Measurement, averaged, confidence_of_look, gain_of, losses_of
from esper.growth.measure.probe import Probe, portions
from esper.growth.seeds.blueprints import blueprints_for, cost_of
from esper.growth.seeds.learner import SeedLearner, routes_of
from esper.growth.seeds.seed import Seed
from esper.statistics import Interval, student_interval, weighted_interval
from tests.growth.builders import (
    QUICK,
    QUICK_SHADOW,
    SLOTS,
    Host,
    LifecycleConfig,
    Loop,
    Script,
    assert_same,
    config,
    make_data,
    make_host,
    make_loop,
    sgd,
    snapshot,
)

BOTH = {0: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="second", reason="test", blueprint="low_rank")]}


def grown(lifecycle: LifecycleConfig = QUICK, **options) -> Loop:
    loop = make_loop(Script(BOTH), config(lifecycle), dtype=torch.float64, **options)
    loop.epoch(epochs=3)
    loop.host.eval()
    return loop


class Counted:
    """How often the validation set was gone through."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.calls = loop, 0

    def __call__(self) -> list[Tensor]:
        self.calls += 1
        return self.loop.evaluate()


def bounds(interval: Interval) -> tuple[float, float, float]:
    return interval.estimate, interval.low, interval.high


def by_hand(loop: Loop, off: str) -> list[float]:
    slot = loop.slotted.slots[off]
    slot.connect(False)
    losses = [float(loss) for loss in loop.evaluate()]
    slot.connect(True)
    return losses


def test_the_contribution_is_the_paired_difference_of_losses_with_and_without_the_seed() -> None:
    loop = grown()
    (losses, samples, unit, *_), contributions = Measurement(loop.slotted).measure(loop.evaluate, SLOTS, epoch=4)
    assert losses == [float(loss) for loss in loop.evaluate()]
    assert (samples, unit) == ([1.0] * len(losses), "batches")
    for name in SLOTS:
        expected = student_interval([off - on for off, on in zip(by_hand(loop, name), losses, strict=True)])
        assert contributions[name].epoch == 4
        assert bounds(contributions[name].gain) == pytest.approx(bounds(expected), abs=1e-12)
        assert expected.estimate != 0


def test_a_contribution_by_samples_does_not_depend_on_the_batches() -> None:
    """One interval for all data in one batch, in ragged batches and in batches of one; three batches of the same data say much less."""
    loop = grown()
    x, y = (torch.cat(parts) for parts in zip(*loop.val, strict=True))

    def evaluate(size: int) -> list[Tensor]:
        with torch.no_grad():
            return [cross_entropy(loop.slotted(a), b, reduction="none") for a, b in zip(x.split(size), y.split(size), strict=True)]

    found = [Measurement(loop.slotted).measure(lambda size=size: evaluate(size), SLOTS, epoch=1) for size in (len(x), 7, 1)]
    by_batch = Measurement(loop.slotted).measure(lambda: [losses.mean() for losses in evaluate(8)], SLOTS, epoch=1)
    for name in SLOTS:
        one = found[0].contributions[name]
        assert (one.unit, one.count) == ("samples", len(x)) if len(x) > 1 else True
        for other in found[1:]:
            assert bounds(other.contributions[name].gain) == pytest.approx(bounds(one.gain), abs=1e-9)
        coarse = by_batch.contributions[name]
        assert (coarse.unit, coarse.count) == ("batches", 3)
        assert coarse.gain.estimate == pytest.approx(one.gain.estimate)


def test_samples_of_one_group_are_one_unit_wherever_they_come() -> None:
    """Copies of a sample in a group of its own change nothing; as samples they would make the interval narrower."""
    loop = grown()
    x, y = (torch.cat(parts) for parts in zip(*loop.val, strict=True))

    def evaluate(copies: int) -> list[Tensor]:
        with torch.no_grad():
            return [cross_entropy(loop.slotted(x), y, reduction="none")] * copies

    keys = [f"patient {number}" for number in range(len(x))]
    once = Measurement(loop.slotted).measure(lambda: evaluate(1), SLOTS, epoch=1)
    grouped = Measurement(loop.slotted).measure(lambda: [(losses, keys) for losses in evaluate(3)], SLOTS, epoch=1)
    copied = Measurement(loop.slotted).measure(lambda: evaluate(3), SLOTS, epoch=1)
    for name in SLOTS:
        assert (grouped.contributions[name].unit, grouped.contributions[name].count) == ("groups", len(x))
        assert bounds(grouped.contributions[name].gain) == pytest.approx(bounds(once.contributions[name].gain))
        assert copied.contributions[name].gain.high < once.contributions[name].gain.high


def test_samples_are_read_by_batch_where_another_pass_or_rank_knows_batches_only() -> None:
    fine = Losses([1.0, 2.0, 6.0], [1, 1, 1], "samples", batches=[2, 1])
    coarse = Losses([1.0, 5.0], [2, 1])
    assert gain_of(fine, coarse).estimate == pytest.approx((2 * 0.5 + 1) / 3)
    assert averaged([fine, coarse]) == Losses([1.25, 5.5], [4, 2])
    with pytest.raises(GrowthError, match="losses of batches and of groups; it must return the same kind"):
        gain_of(Losses([1.0, 1.0], [1, 1], "groups", ["a", "b"]), coarse)


def test_replayed_and_computed_contributions_are_bit_identical() -> None:
    loop = grown()
    replayed, computed = Measurement(loop.slotted), Measurement(loop.slotted)
    computed._distrusted.update(SLOTS)
    assert replayed.measure(loop.evaluate, SLOTS, epoch=1) == computed.measure(loop.evaluate, SLOTS, epoch=1)
    assert replayed._trusted == set(SLOTS)


def test_k_seeds_take_k_plus_1_evaluations_and_one_more_for_each_slot_the_first_time() -> None:
    loop = grown()
    measurement, counted = Measurement(loop.slotted), Counted(loop)
    measurement.measure(counted, SLOTS, epoch=1)
    assert counted.calls == 3 + 2
    counted.calls = 0
    measurement.measure(counted, SLOTS, epoch=2)
    assert counted.calls == 3
    counted.calls = 0
    measurement.measure(counted, [], epoch=3)
    assert counted.calls == 1


class ChangesBetweenPasses(Host):
    """Does something else in every pass, which no recording of its modules can know."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) * (1 + 0.1 * self.passes)


def test_a_replay_with_other_losses_is_discarded_and_not_tried_again() -> None:
    torch.manual_seed(0)
    loop = grown(host=ChangesBetweenPasses().double())
    measurement, counted = Measurement(loop.slotted), Counted(loop)
    measurement.measure(counted, ["second"], epoch=1)
    assert measurement._distrusted == {"second"}
    counted.calls = 0
    assert measurement.measure(counted, ["second"], epoch=2).contributions.keys() == {"second"}
    assert counted.calls == 2


def test_a_gain_measured_on_one_batch_has_an_infinite_interval() -> None:
    assert gain_of(Losses([3.0], [1.0]), Losses([1.0], [1.0])) == Interval(2.0, -math.inf, math.inf)


def verdicts_over_all_looks(rng: np.random.Generator, *, looks: int, batches: int) -> bool:
    """Whether any look at a seed that gives exactly its rent finds a certain verdict."""
    rent, nothing = 0.02, Losses([0.0] * batches, [1.0] * batches)
    for look in range(1, looks + 1):
        losses = Losses(rng.normal(rent, 0.05, batches).tolist(), [1.0] * batches)
        gain = gain_of(losses, nothing, confidence=confidence_of_look(look, looks))
        if judge("a", Contribution(gain, look), rent, may_prune=True, is_last=False):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("looks", "batches"), [(1, 6), (12, 6), (20, 15)])
def test_the_chance_of_a_wrong_decision_over_all_looks_stays_below_5_percent(looks: int, batches: int) -> None:
    assert sum(1 - confidence_of_look(look, looks) for look in range(1, looks + 1)) == pytest.approx(0.05)
    rng = np.random.default_rng(0)
    wrong = sum(verdicts_over_all_looks(rng, looks=looks, batches=batches) for _ in range(300))
    assert wrong / 300 < 0.05 + 2 * math.sqrt(0.05 * 0.95 / 300)


def test_an_open_number_of_looks_never_exceeds_an_error_of_5_percent() -> None:
    assert 0.0499 < sum(1 - confidence_of_look(look, None) for look in range(1, 1_000)) < 0.05


def test_a_seed_on_trial_is_measured_at_the_confidence_of_its_planned_looks() -> None:
    loop = make_loop(Script({0: [Germinate(slot="first", reason="test", blueprint="mlp")]}), config(QUICK), epochs=4)
    seen = []
    for look in range(1, 4):
        loop.epoch()
        interval = loop.grower.state().slots[0].contribution.gain
        on = [float(loss) for loss in loop.evaluate()]
        differences = [off - now for off, now in zip(by_hand(loop, "first"), on, strict=True)]
        expected = student_interval(differences, confidence=confidence_of_look(look, 4))
        seen.append((bounds(interval), bounds(expected)))
    assert [pytest.approx(expected, abs=1e-6) for _, expected in seen] == [found for found, _ in seen]


def test_every_sample_counts_alike_where_batch_sizes_are_given() -> None:
    with_all, without = Losses([1.0, 1.0], [160, 1]), Losses([1.5, 82.0], [160, 1])
    assert without.mean == pytest.approx((160 * 1.5 + 82.0) / 161)
    gain = gain_of(without, with_all)
    assert gain.estimate == pytest.approx((160 * 0.5 + 81.0) / 161)
    assert (gain.low, gain.high) == (-math.inf, math.inf)  # one batch, as good as


@pytest.mark.slow
def test_a_split_of_the_validation_data_with_a_rest_gives_the_same_contribution_as_whole_batches() -> None:
    loop = grown()
    x, y = (torch.cat(parts) for parts in zip(*loop.val, strict=True))

    def evaluate(size: int) -> list[tuple[Tensor, int]]:
        with torch.no_grad():
            return [(cross_entropy(loop.slotted(a), b), len(a)) for a, b in zip(x.split(size), y.split(size), strict=True)]

    whole, ragged = (Measurement(loop.slotted).measure(lambda size=size: evaluate(size), SLOTS, epoch=1) for size in (8, 7))
    assert ragged.losses.samples == [7, 7, 7, 3]
    assert ragged.losses.mean == pytest.approx(whole.losses.mean)
    for name in SLOTS:
        one, other = ragged.contributions[name].gain, whole.contributions[name].gain
        assert one.estimate == pytest.approx(other.estimate)
        assert one.low < one.estimate < one.high


@pytest.mark.slow
def test_the_epochs_loss_and_the_best_alpha_are_by_samples() -> None:
    loop = grown()
    for x, y in loop.data:
        loop.step(x, y)
    assert loop.grower.after_epoch(lambda: [(1.0, 3), (5.0, 1)]).val_loss == 2.0
    assert set(loop.grower.search_alpha("first", lambda: [(1.0, 3), (5.0, 1)]).losses.values()) == {2.0}


def test_a_weighted_interval_is_students_for_equal_weights_and_wider_for_unequal_ones() -> None:
    values = [0.1, 0.4, -0.2, 0.3]
    assert bounds(weighted_interval(values, [0.1] * 4)) == pytest.approx(bounds(student_interval(values)))
    wide = weighted_interval([0.1, -0.1], [2, 1])
    assert wide.estimate == pytest.approx(0.1 / 3)
    assert math.inf > wide.high - wide.low > 2 * (student_interval([0.1, -0.1]).high)
    with pytest.raises(ValueError, match="a weight above 0 for each"):
        weighted_interval([1.0, 2.0], [1, 0])


def test_a_weighted_interval_covers_the_mean_of_batches_with_a_rest() -> None:
    rng = np.random.default_rng(0)
    sizes = [32, 32, 32, 32, 5]
    covered = 0
    for _ in range(400):
        means = [rng.normal(size=size).mean() for size in sizes]
        interval = weighted_interval(means, sizes)
        covered += interval.low <= 0 <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def test_impossible_batch_sizes_are_refused() -> None:
    with pytest.raises(GrowthError, match="a validation batch with 0 samples"):
        losses_of(lambda: [(1.0, 2), (1.0, 0)])
    loop = grown()
    answers = iter([[(1.0, 2), (1.0, 1)], [(1.0, 1), (1.0, 2)]])
    measurement = Measurement(loop.slotted)
    measurement._distrusted.update(SLOTS)
    with pytest.raises(GrowthError, match="2 losses and then batches of other sizes; it must go through the same batches"):
        measurement.measure(lambda: next(answers), ["first"], epoch=1)


def test_differing_numbers_of_losses_are_refused() -> None:
    loop = grown()
    lengths = iter([3, 3, 2])
    with pytest.raises(GrowthError, match="gave 3 losses and then 2; it must go through the same batches"):
        Measurement(loop.slotted).measure(lambda: loop.evaluate()[: next(lengths)], ["first"], epoch=1)
    with pytest.raises(GrowthError, match="gave no losses"):
        Measurement(loop.slotted).measure(lambda: [], [], epoch=1)
    assert loop.slotted.slots["first"].alpha == 1.0
    loop.slotted.remove()
    assert not any("forward" in vars(module) for module in loop.host.modules())


def test_losses_that_are_not_finite_end_the_measurement() -> None:
    loop = grown()
    (losses, *_), contributions = Measurement(loop.slotted).measure(lambda: [1.0, math.inf], SLOTS, epoch=1)
    assert losses == [1.0, math.inf]
    assert not contributions


@pytest.mark.slow
def test_shapley_values_share_out_the_whole_gain_in_2_to_the_k_evaluations() -> None:
    loop = grown()
    loop.grower.shapley(loop.evaluate)  # the replays are checked once
    counted = Counted(loop)
    values = loop.grower.shapley(counted)
    assert counted.calls == 4
    with_all = sum(float(loss) for loss in loop.evaluate()) / len(loop.val)
    with loop.slotted.without(SLOTS):
        without = sum(float(loss) for loss in loop.evaluate()) / len(loop.val)
    assert sum(value.estimate for value in values.values()) == pytest.approx(without - with_all, abs=1e-12)
    alone = {name: by_hand(loop, name) for name in SLOTS}
    with loop.slotted.without(SLOTS):
        neither = [float(loss) for loss in loop.evaluate()]
    both = [float(loss) for loss in loop.evaluate()]
    first = [(a - b + c - d) / 2 for a, b, c, d in zip(alone["first"], both, neither, alone["second"], strict=True)]
    assert bounds(values["first"]) == pytest.approx(bounds(student_interval(first)), abs=1e-12)
    assert list(loop.grower.shapley(loop.evaluate, ["second"])) == ["second"]
    with pytest.raises(GrowthError, match="'third' has no living, connected seed"):
        loop.grower.shapley(loop.evaluate, ["third"])


def test_shapley_values_of_a_host_without_seeds_are_refused() -> None:
    loop = make_loop()
    with pytest.raises(GrowthError, match="at least one living, connected seed"):
        loop.grower.shapley(loop.evaluate)


@pytest.mark.slow
def test_the_search_for_alpha_finds_the_lowest_loss_and_leaves_alpha_alone() -> None:
    loop = grown(QUICK_SHADOW)
    before = snapshot(loop.host)
    found = loop.grower.search_alpha("first", loop.evaluate, alphas=(0.0, 0.5, 1.0))
    assert found.losses[0.0] == pytest.approx(sum(float(loss) for loss in loop.evaluate()) / len(loop.val))
    assert found.losses[found.alpha] == min(found.losses.values())
    assert len(set(found.losses.values())) == 3
    assert loop.slotted.slots["first"].alpha == 0.0
    assert not loop.slotted.slots["first"].is_connected
    assert_same(snapshot(loop.host), before)
    with pytest.raises(GrowthError, match="no seed in 'second'"):
        make_loop().grower.search_alpha("second", loop.evaluate)
    with pytest.raises(GrowthError, match="numbers from 0 to 1"):
        loop.grower.search_alpha("first", loop.evaluate, alphas=(2.0,))


def test_alpha_of_a_blending_seed_does_not_change_by_a_measurement() -> None:
    rules = LifecycleConfig(raise_mode="shadow", training_epochs=1, blend_epochs=4)
    loop = make_loop(Script({**BOTH, 1: [Advance(slot="first", reason="test")]}), config(rules))
    loop.epoch(epochs=2)
    assert 0 < loop.slotted.slots["first"].alpha < 1
    alpha = loop.slotted.slots["first"].alpha
    Measurement(loop.slotted).measure(loop.evaluate, ["first"], epoch=1)
    assert loop.slotted.slots["first"].alpha == alpha


# Promises


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 16, 3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x).relu_().mean(dim=1))
        return output


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output


def no_learner(slot: str, weights: nn.Module) -> SeedLearner:
    raise AssertionError("nothing is promised yet")


CASES = {"conv": (Convolutional, (1, 4, 4)), "token": (Sequence, (5, 4)), "dense": (Dense, (4,))}


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained host", "frozen prefix"])
@pytest.mark.parametrize("kind", CASES)
def test_the_probe_finds_the_gradient_of_a_planted_seed_for_every_blueprint(kind: str, is_frozen: bool) -> None:
    make, shape = CASES[kind]
    torch.manual_seed(0)
    host = make().double()
    host.body.requires_grad_(not is_frozen)
    x, y = torch.randn(6, *shape, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    slotted = add_slots(host, x[:2], slots=["body"])
    slot = slotted.slots["body"]
    options = blueprints_for(slot.place)
    assert len(options) >= 3
    cross_entropy(slotted(x), y).backward()
    expected_host = [None if parameter.grad is None else parameter.grad.clone() for parameter in host.parameters()]
    host.zero_grad()

    keys = [("body", option.name) for option in options]
    probe = Probe(slotted, keys, Cost(10**9, 10**12), no_learner, random_seed=7, probe_steps=2)
    probe.plan(length=None)
    probe.watch()
    scale = torch.tensor(16.0)
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):  # accumulated, and scaled
        (cross_entropy(slotted(part_x), part_y) / 2 * scale).backward()
    probe.ask(scale=scale)
    probe.stop()
    for parameter, expected in zip(host.parameters(), expected_host, strict=True):
        assert (parameter.grad is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(parameter.grad / scale, expected, rtol=1e-12, atol=1e-14)
    for option in options:
        if option.share is not None:
            grown = copy.deepcopy(slotted)
            seed = grown.new_seed("body", option.name, random_seed=7)
            grown.slot("body").plant(seed, connected=True)
            grown.slot("body").alpha = 1.0
            cross_entropy(grown(x), y).backward()
            backs = [parameter.grad for name, parameter in seed.named_parameters() if ".back." in name]
            for found_sum, gradient in zip(probe._trials["body", option.name].sums, backs, strict=True):
                torch.testing.assert_close(found_sum, gradient, rtol=1e-9, atol=1e-13)
                assert gradient.any()
            continue
        twin = copy.deepcopy(host)
        planted = Seed(slot.place, option.name, random_seed=7)
        planted.alpha.fill_(1.0)
        twin.body.register_forward_hook(lambda module, arguments, output, planted=planted: planted(output))
        cross_entropy(twin(x), y).backward()
        trial = probe._trials["body", option.name]
        names = {id(parameter): name for name, parameter in trial.branch.named_parameters()}
        found = dict(zip((names[id(parameter)] for parameter in trial.live), trial.sums, strict=True))
        for name, parameter in planted.branch.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found.get(name, torch.zeros_like(gradient)), gradient, rtol=1e-9, atol=1e-13)
        assert all(part.abs().sum() > 0 for part in trial.sums)


@pytest.mark.slow
def test_a_probe_leaves_the_host_bit_identical_and_finds_promises_for_free_slots() -> None:
    torch.manual_seed(3)
    plain = make_loop(Script())
    torch.manual_seed(3)
    plain.epoch(epochs=3)
    few = ("norm", "low_rank", "mlp", "widen_100", "widen_100_chain")  # an epoch is too short for all
    probed = make_loop(Script(probes=[0, 1]), config(probe_steps=3, blueprints=few))
    torch.manual_seed(3)
    probed.epoch(epochs=3)
    assert probed.losses == plain.losses
    assert_same(snapshot(probed.host, probed.optimizer), snapshot(plain.host, plain.optimizer))
    events = [event for event in probed.events if event.kind == "probed"]
    assert [event.epoch for event in events] == [1, 2]
    names = {name: {option.name for option in options} for name, options in probed.grower.lifecycles.options.items()}
    for event in events:
        assert {slot: set(found) for slot, found in event.promises.items()} == names
        assert all(0 <= promise < math.inf for found in event.promises.values() for promise in found.values())
    state = probed.grower.controller.states[1]
    assert all(candidate.promise is not None for slot in state.slots for candidate in slot.candidates)
    assert all(candidate.promise is None for slot in probed.grower.controller.states[3].slots for candidate in slot.candidates)


@pytest.mark.slow
def test_a_second_pass_in_the_shadow_does_not_count_as_a_training_step() -> None:
    def promises(closure_again: int) -> dict:
        loop = make_loop(
            Script({0: [Germinate(slot="first", reason="test", blueprint="mlp")]}, probes=[0]), config(QUICK_SHADOW), dtype=torch.float64
        )
        loop.grower.begin()
        for x, y in loop.data:
            loss = cross_entropy(loop.host(x), y)
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()

            def closure(x=x, y=y) -> Tensor:
                return sum(cross_entropy(loop.host(x), y) for _ in range(closure_again)) / closure_again

            loop.grower.after_step(loss, closure=closure)
        loop.grower.after_epoch(loop.evaluate)
        return next(event.promises for event in loop.events if event.kind == "probed")

    torch.manual_seed(0)
    once = promises(1)
    torch.manual_seed(0)
    assert promises(2) == once
    assert once.keys() == {"second"}


@pytest.mark.slow
def test_candidates_with_a_higher_promise_lower_the_loss_faster() -> None:
    """A branch after a layer that everything depends on promises more than one whose output hardly matters."""
    host = make_host(dtype=torch.float64)
    with torch.no_grad():
        host.head.weight.mul_(1e-3)
    quiet = make_loop(Script(probes=[0]), config(probe_steps=3), host=host, dtype=torch.float64)
    loud = make_loop(Script(probes=[0]), config(probe_steps=3), dtype=torch.float64)
    for loop in (quiet, loud):
        loop.epoch()
    promise = [next(event for event in loop.events if event.kind == "probed").promises["second"]["mlp"] for loop in (quiet, loud)]
    assert promise[0] < promise[1]


def test_a_step_whose_gradient_overflowed_does_not_count_for_a_promise() -> None:
    def promises(spoiled: bool) -> dict[tuple[str, str], float]:
        host = make_host(dtype=torch.float64, dropout=0.0, norm=False)
        slotted = add_slots(host, torch.zeros(2, 6, dtype=torch.float64), slots=["first"])
        keys = [("first", blueprint.name) for blueprint in blueprints_for(slotted.slots["first"].place)]

        def learner(slot: str, weights: nn.Module) -> SeedLearner:
            return SeedLearner(weights, routes_of(weights, [sgd(host)], "", host), SeedOptimizerConfig(), None)

        probe = Probe(slotted, keys, Cost(10**9, 10**12), learner, random_seed=0, probe_steps=5)
        probe.plan(length=None)
        probe.watch()
        for number, (x, y) in enumerate(make_data(5, dtype=torch.float64)):
            if number == 2 and not spoiled:
                continue
            (cross_entropy(slotted(x), y) * (math.inf if number == 2 else 1.0)).backward()
            probe.ask()
        return probe.promises({"first": 0.1})

    expected = promises(False)
    assert all(promise > 0 for promise in expected.values())
    assert promises(True) == expected


class SignSteps(torch.optim.Optimizer):
    """An optimiser that nobody knows: steps of the size of the learning rate along the sign of a running mean."""

    def __init__(self, parameters, lr: float, memory: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "memory": memory})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(group["memory"]).add_(parameter.grad)
                    parameter.sub_(group["lr"] * mean.sign())


OPTIMIZERS = {
    "sgd": lambda host: torch.optim.SGD(host.parameters(), lr=1e-6),
    "sgd with momentum": lambda host: torch.optim.SGD(host.parameters(), lr=1e-6, momentum=0.9),
    "nesterov": lambda host: torch.optim.SGD(host.parameters(), lr=1e-6, momentum=0.8, nesterov=True, weight_decay=0.1),
    "dampened": lambda host: torch.optim.SGD(host.parameters(), lr=1e-6, momentum=0.9, dampening=0.9),
    "adamw": lambda host: torch.optim.AdamW(host.parameters(), lr=1e-6, weight_decay=0.1),
    "adamax": lambda host: torch.optim.Adamax(host.parameters(), lr=1e-6),
    "nadam": lambda host: torch.optim.NAdam(host.parameters(), lr=1e-6),
    "radam": lambda host: torch.optim.RAdam(host.parameters(), lr=1e-6),
    "rmsprop": lambda host: torch.optim.RMSprop(host.parameters(), lr=1e-6),
    "adagrad": lambda host: torch.optim.Adagrad(host.parameters(), lr=1e-6),
    "unknown": lambda host: SignSteps(host.parameters(), lr=1e-6),
}


def promised_and_true(make_optimizer, settings: GrowthConfig, make_seed_optimizer=None) -> tuple[float, float]:
    """Return the promise of a seed after the second layer, and the fall of the loss in one of its steps, on one batch."""
    blueprint = "low_rank"
    host = make_host(dtype=torch.float64, dropout=0.0, norm=False)
    x, y = make_data(1, dtype=torch.float64)[0]
    loop = make_loop(
        Script(probes=[0]),
        msgspec.structs.replace(settings, blueprints=(blueprint,)),
        host=host,
        make_optimizer=make_optimizer,
        dtype=torch.float64,
        slots=["second"],
        seed_optimizer=make_seed_optimizer,
    )
    loop.data = [(x, y)] * 4
    loop.epoch()
    promise = next(event for event in loop.events if event.kind == "probed").promises["second"][blueprint]
    seed = Seed(loop.slotted.slots["second"].place, blueprint, random_seed=settings.seed)
    seed.alpha.fill_(1.0)
    learner = SeedLearner(seed, routes_of(seed, [loop.optimizer], "", loop.host), settings.seed_optimizer, make_seed_optimizer)
    host.second.register_forward_hook(lambda module, arguments, output: seed(output))
    losses = []
    for _ in range(33):
        loss = cross_entropy(host(x), y)
        losses.append(loss.item())
        loss.backward()
        learner.step()
        learner.zero_grad()
    return promise, losses[31] - losses[32]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_promise_is_the_fall_of_the_loss_in_a_step_of_the_optimiser_in_use(kind: str) -> None:
    promise, fall = promised_and_true(OPTIMIZERS[kind], config(probe_steps=3))
    assert fall > 0
    assert promise == pytest.approx(fall, rel=1e-2)


def test_counting_parts_of_batches_as_steps_does_not_raise_promises() -> None:
    found = []
    for parts in (1, 4):
        host = make_host(dtype=torch.float64, dropout=0.0, norm=False)
        settings = config(probe_steps=2, blueprints=("low_rank",))
        loop = make_loop(Script(probes=[1]), settings, host=host, make_optimizer=OPTIMIZERS["sgd"], dtype=torch.float64, slots=["second"])
        x, y = make_data(1, dtype=torch.float64)[0]
        for _ in range(2):
            for _ in range(4):
                for number, (part_x, part_y) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True), 1):
                    loss = cross_entropy(loop.slotted(part_x), part_y) / parts
                    loss.backward()
                    if number == parts:
                        loop.optimizer.step()
                        loop.optimizer.zero_grad()
                    loop.grower.after_step(loss * parts)
            loop.grower.after_epoch(loop.evaluate)
        state = loop.grower.controller.states[2]
        assert state.steps_per_epoch == 4 * parts
        found.append(state.slots[0].candidates[0].promise * state.steps_per_epoch)
    assert found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.slow
def test_a_promise_accounts_for_clipping_and_the_learning_rate_factor_of_seeds() -> None:
    settings = config(probe_steps=3, seed_optimizer=SeedOptimizerConfig(max_grad_norm=1e-3, learning_rate_factor=3.0))
    free = config(probe_steps=3, seed_optimizer=SeedOptimizerConfig(max_grad_norm=None, learning_rate_factor=3.0))
    promise, fall = promised_and_true(OPTIMIZERS["sgd"], settings)
    assert promise == pytest.approx(fall, rel=1e-2)
    assert promise < 0.1 * promised_and_true(OPTIMIZERS["sgd"], free)[0]


def test_a_promise_uses_the_optimiser_given_for_seeds() -> None:
    promise, fall = promised_and_true(OPTIMIZERS["sgd"], config(probe_steps=3), lambda parameters, rate: SignSteps(parameters, lr=rate))
    assert promise == pytest.approx(fall, rel=1e-2)


@pytest.mark.slow
def test_a_promise_over_an_epoch_never_exceeds_the_loss_and_keeps_the_order() -> None:
    """The rate is so high that the first-order fall is many times the loss."""
    found = []
    for rate in (1e-5, 20.0):
        loop = make_loop(
            Script(probes=[0]), config(probe_steps=3), make_optimizer=lambda host, rate=rate: torch.optim.SGD(host.parameters(), lr=1e-5)
        )
        loop.grower.begin()
        for x, y in loop.data:
            loop.step(x, y)
        loop.optimizer.param_groups[0]["lr"] = rate
        loop.grower.after_epoch(loop.evaluate)
        event = next(event for event in loop.events if event.kind == "probed")
        found.append({(slot, name): promise for slot, some in event.promises.items() for name, promise in some.items()})
    slow, fast = found
    loss, steps = loop.grower.history.train_losses[-1], len(loop.data)
    assert max(slow.values()) * 20.0 / 1e-5 * steps > 2 * loss
    assert all(promise * steps <= loss for promise in fast.values())
    assert sorted(slow, key=slow.__getitem__) == sorted(fast, key=fast.__getitem__)


# Portions


RESNET_50 = Cost(25_600_000, 8_200_000_000)
RESNET_50_PLACES = [
    (Place(f"{number}", "conv", shape), count)
    for number, (shape, count) in enumerate([((256, 56, 56), 3), ((512, 28, 28), 4), ((1024, 14, 14), 6), ((2048, 7, 7), 3)])
]


class Built:
    """Counts the parameters of the probe's branches that are alive, and those of all that were ever built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: list[weakref.ref[nn.Module]] = []
        self.names: list[tuple[str, str]] = []
        build = promise.Probe._build_trial

        def counted(probe, key):
            trial = build(probe, key)
            self.alive.append(weakref.ref(trial.branch))
            self.names.append(key)
            return trial

        monkeypatch.setattr(promise.Probe, "_build_trial", counted)

    def parameters(self) -> int:
        gc.collect()
        return sum(parameter.numel() for one in self.alive if (branch := one()) is not None for parameter in branch.parameters())


@pytest.mark.slow
def test_the_probe_never_holds_more_weights_than_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise, "LEAST_PARAMETERS", 0, raising=False)
    built = Built(monkeypatch)
    loop = make_loop(Script(probes=[1]), config(probe_steps=3), dtype=torch.float64)
    loop.data = make_data(60, dtype=torch.float64)
    loop.epoch()
    host = loop.slotted.discovery.host.parameters
    most = 0
    for number, (x, y) in enumerate(loop.data):
        loop.step(x, y)
        if number % 2:
            most = max(most, built.parameters())
    loop.grower.after_epoch(loop.evaluate)
    candidates = [candidate for slot in loop.grower.controller.states[2].slots for candidate in slot.candidates]
    evaluated = [candidate.cost.parameters for candidate in candidates if candidate.promise is not None]
    assert 0 < most <= max(host, *evaluated)
    assert sum(evaluated) > 2 * host
    assert built.parameters() == 0
    # Only candidates that are many times as large as the host are left out.
    assert evaluated == [size for candidate in candidates if (size := candidate.cost.parameters) <= 4 * host]
    assert len(evaluated) < len(candidates)


def all_candidates(places: list[tuple[Place, int]]) -> dict[tuple[str, str], Cost]:
    return {
        (f"{place.name}.{number}", blueprint.name): cost_of(blueprint, place)
        for place, count in places
        for number in range(count)
        for blueprint in blueprints_for(place)
    }


@pytest.mark.parametrize("length", [None, 100_000, 408, 120])
def test_a_portion_of_a_large_host_never_exceeds_its_weights_and_flops(length: int | None) -> None:
    costs = all_candidates(RESNET_50_PLACES)
    assert sum(cost.parameters for cost in costs.values()) > 50 * RESNET_50.parameters
    plan = portions(costs, RESNET_50, probe_steps=8, length=length)
    assert [key for portion in plan for key in portion.candidates] == list(costs)
    for portion in plan:
        own = [costs[key] for key in portion.candidates]
        assert len(own) == 1 or sum(cost.parameters for cost in own) <= RESNET_50.parameters
        assert length is None or len(own) == 1 or 2 * sum(cost.flops for cost in own) <= 3 * RESNET_50.flops
        assert portion.steps == {None: 2, 100_000: 8, 408: 8, 120: 2}[length]
    assert length is None or sum(portion.steps for portion in plan) <= length


def test_a_short_epoch_takes_more_flops_in_a_step_and_then_leaves_out_the_largest_candidates() -> None:
    costs = {("a", f"{size}"): Cost(size * 1_000_000, size * 1_000) for size in (3, 9, 1, 8, 2)}

    def candidates(length: int | None, flops: int) -> list[list[str]]:
        plan = portions(costs, Cost(10_000_000, flops), probe_steps=4, length=length)
        assert all(2 <= portion.steps <= 4 for portion in plan)
        assert length is None or sum(portion.steps for portion in plan) <= max(length, 2)
        return [[name for _, name in portion.candidates] for portion in plan]

    by_weights = [["3"], ["9", "1"], ["8", "2"]]
    assert candidates(100, 10_000) == by_weights
    assert candidates(100, 6_000) == [["3"], ["9"], ["1", "8"], ["2"]]
    assert candidates(10, 6_000) == [["3"], ["9"], ["1", "8"], ["2"]]
    assert candidates(7, 6_000) == by_weights  # twice the FLOPs
    assert candidates(None, 6_000) == by_weights
    assert candidates(5, 6_000) == [["3", "1"], ["8", "2"]]
    assert candidates(3, 6_000) == [["3", "1", "2"]]
    assert candidates(1, 0) == [["1"]]


def test_random_plans_keep_their_limits_and_answer_every_candidate_twice() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        host = Cost(int(generator.integers(1, 10**7)), int(generator.integers(0, 10**9)))
        costs = {
            (f"{slot}", f"{number}"): Cost(int(generator.integers(1, 5 * host.parameters)), int(generator.integers(0, 10**9)))
            for slot in range(generator.integers(1, 6))
            for number in range(generator.integers(1, 9))
        }
        length = None if generator.random() < 0.2 else int(generator.integers(2, 300))
        wanted = int(generator.integers(1, 12))
        plan = portions(costs, host, probe_steps=wanted, length=length)
        asked = [key for portion in plan for key in portion.candidates]
        assert asked == [key for key in costs if key in set(asked)]
        left_out = [costs[key].parameters for key in costs if key not in set(asked)]
        assert all(parameters >= max(costs[key].parameters for key in asked) for parameters in left_out)
        assert not left_out or (length is not None and length < 2 * len(costs))
        for portion in plan:
            own = [costs[key] for key in portion.candidates]
            assert sum(cost.parameters for cost in own) <= max(host.parameters, promise.LEAST_PARAMETERS) or len(own) == 1
            assert 2 <= portion.steps <= max(wanted, 2)
        assert length is None or sum(portion.steps for portion in plan) <= length


# Blueprints whose seeds are never left out of a probe because they are many times as large as the host.
SMALL_ENOUGH = ("norm", "low_rank", "mlp", *(f"widen_{percent}{suffix}" for percent in (25, 50, 100) for suffix in ("", "_chain")))


@pytest.mark.slow
def test_the_promise_of_a_candidate_does_not_depend_on_its_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step sees the same batch, and the host hardly moves."""
    found = []
    for least in (2**20, 0):
        monkeypatch.setattr(promise, "LEAST_PARAMETERS", least)
        host = make_host(dtype=torch.float64, dropout=0.0, norm=False)
        loop = make_loop(
            Script(probes=[1]),
            config(probe_steps=3, blueprints=SMALL_ENOUGH),
            host=host,
            make_optimizer=OPTIMIZERS["sgd"],
            dtype=torch.float64,
        )
        loop.data = make_data(1, dtype=torch.float64) * 60
        loop.epoch()
        built = Built(monkeypatch)
        loop.epoch()
        assert len(built.names) == len(set(built.names)) == 15
        event = next(event for event in loop.events if event.kind == "probed")
        found.append({(slot, name): value for slot, some in event.promises.items() for name, value in some.items()})
    assert len(found[0]) == 15
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.slow
def test_only_the_slots_of_the_portion_at_hand_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise, "LEAST_PARAMETERS", 0)
    loop = make_loop(Script(probes=[1]), config(probe_steps=3))
    loop.data = make_data(60)
    loop.epoch()
    observed = set()
    for x, y in loop.data:
        observed.add(tuple(name for name, slot in loop.slotted.slots.items() if slot.observer is not None))
        loop.step(x, y)
    assert {(), ("first",), ("second",)} <= observed
    assert not any(slot.observer for slot in loop.slotted.slots.values())


def test_candidates_over_the_budget_are_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built(monkeypatch)
    loop = make_loop(Script(probes=[0]), config(probe_steps=3, budget=BudgetConfig(max_parameters=1.0)))
    loop.epoch()
    fitting = {
        (name, option.name)
        for name, options in loop.grower.lifecycles.options.items()
        for option in options
        if loop.grower.lifecycles.price(name, option.name).parameters <= loop.slotted.discovery.host.parameters
    }
    assert set(built.names) == fitting
    assert ("first", "mlp") not in fitting


def test_candidates_that_a_decision_leaves_out_are_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, built = [], Built(monkeypatch)
    for not_probed in (frozenset(), frozenset({("first", "mlp"), ("second", "norm")})):
        built.names.clear()
        make_loop(Script(probes=[0], not_probed=not_probed), config(probe_steps=3)).epoch()
        everything.append(set(built.names))
    assert {("first", "mlp"), ("second", "norm"), ("second", "mlp")} <= everything[0]
    assert everything[1] == everything[0] - not_probed


@pytest.mark.slow
def test_a_probe_is_resumed_between_any_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(promise, "STEPS_ALONG", 4)  # which take most of the time

    def run(stop: int | None) -> dict:
        loop = make_loop(Script(probes=[1]), config(probe_steps=2), dtype=torch.float64)
        loop.data = make_data(40, dtype=torch.float64)
        loop.epoch()
        for number, (x, y) in enumerate(loop.data):
            if number == stop:
                state = copy.deepcopy(loop.grower.state_dict())
                loop.grower.stop()
                loop = make_loop(Script(probes=[1]), config(probe_steps=2), dtype=torch.float64)
                loop.data = make_data(40, dtype=torch.float64)
                loop.grower.load_state_dict(state)
            torch.manual_seed(number)
            loop.step(x, y)
        loop.grower.after_epoch(loop.evaluate)
        return next(event for event in loop.events if event.kind == "probed").promises

    expected = run(None)
    assert {slot: len(found) for slot, found in expected.items()} == {"first": 10, "second": 8}
    for stop in (0, 7, 8, 9, 13, 19, 25, 39):
        assert run(stop) == expected


def test_a_promise_does_not_depend_on_the_number_of_candidates_in_a_short_epoch() -> None:
    """Behind a batch norm, a part of the samples would not do: what they leave out cancels most of what they say."""
    found = []
    for blueprints in (("low_rank",), None):
        host = make_host(dtype=torch.float64, dropout=0.0)
        settings = config(probe_steps=3, blueprints=blueprints)
        loop = make_loop(Script(probes=[1]), settings, host=host, make_optimizer=OPTIMIZERS["sgd"], dtype=torch.float64)
        loop.data = make_data(1, size=32, dtype=torch.float64) * 4
        loop.epoch(epochs=2)
        event = next(event for event in loop.events if event.kind == "probed")
        found.append([event.promises[slot]["low_rank"] for slot in SLOTS])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
