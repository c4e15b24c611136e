"""Shapley values of the seeds of real models, against evaluations by hand."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import esper
from esper.growth import GrowthError, Slotted, add_slots
from esper.growth.analysis import seeds_in
from esper.growth.controllers.baselines import Planned
from esper.growth.measure.shapley import plan_orders
from esper.growth.metrics import accuracy
from esper.growth.seeds.seed import Seed
from esper.intervals import student_interval
from esper.runs.analysis import Analysis, how_measured, read_analysis
from tests.growth.builders import Batch, Data, Host, assert_same, make_data, make_host, snapshot
from tests.growth.host.helpers import plant_kept_seeds

NAMES = ("first", "after", "second")


class Deep(nn.Module):
    """Ten places for seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(10))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


def slotted_host(*names: str) -> Slotted:
    slotted = add_slots(make_host(dtype=torch.float64), make_data(dtype=torch.float64)[0][0], slots=list(NAMES))
    plant_kept_seeds(slotted, *(names or NAMES))
    return slotted


def batches() -> Data:
    return make_data(5, dtype=torch.float64)


def losses_with(model: nn.Module, on: frozenset[str], data: Data) -> np.ndarray:
    """Return the loss of every sample with only these baked seeds on, by setting the alphas of a copy."""
    copied = copy.deepcopy(model).eval()
    for name, module in copied.named_modules():
        if isinstance(module, Seed) and name.rpartition(".")[0] not in on:
            module.alpha.fill_(0.0)
    with torch.no_grad():
        return np.concatenate([cross_entropy(copied(x), y, reduction="none").numpy() for x, y in data])


@pytest.mark.slow
def test_values_of_a_baked_model_equal_the_mean_over_all_orders() -> None:
    model, data = slotted_host().bake(), batches()
    found = esper.analyse(model, data, cross_entropy).measures[0]
    homes = {seed.name: name.rpartition(".")[0] for seed in seeds_in(model) for name, m in model.named_modules() if m is seed.seed}
    gains: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    for order in itertools.permutations(NAMES):
        for place, name in enumerate(order):
            before, now = (frozenset(homes[one] for one in order[:count]) for count in (place, place + 1))
            gains[name].append(losses_with(model, before, data) - losses_with(model, now, data))
    for name in NAMES:
        wanted = student_interval(np.mean(gains[name], axis=0))
        value = found.shapley[name]
        assert (value.estimate, value.low, value.high) == pytest.approx((wanted.estimate, wanted.low, wanted.high), abs=1e-12)
    with_all, without = (losses_with(model, frozenset(on), data).mean() for on in (homes.values(), []))
    assert (found.without, found.with_all) == pytest.approx((without, with_all), abs=1e-12)
    assert sum(value.estimate or 0.0 for value in found.shapley.values()) == pytest.approx(without - with_all, abs=1e-12)
    assert found.removal["first"].estimate == pytest.approx(
        losses_with(model, frozenset(homes[name] for name in NAMES[1:]), data).mean() - with_all, abs=1e-12
    )


def test_intervals_rest_on_samples_however_they_are_batched_and_otherwise_on_batches() -> None:
    model, (x, y) = slotted_host("first").bake(), (torch.cat(parts) for parts in zip(*batches(), strict=True))
    cut = [esper.analyse(model, list(zip(x.split(size), y.split(size), strict=True)), cross_entropy) for size in (1, 8, 24)]
    ends = [(found.measures[0].shapley["first"].low, found.measures[0].shapley["first"].high) for found in cut]
    assert ends[0] == pytest.approx(ends[1], abs=1e-12)
    assert ends[0] == pytest.approx(ends[2], abs=1e-12)
    assert "Intervals of loss on samples." in how_measured(cut[0])

    def summed(outputs: Tensor, targets: Tensor) -> Tensor:  # its samples are not the parts of a mean
        return cross_entropy(outputs, targets, reduction="sum")

    found = esper.analyse(model, batches(), summed, metrics={"accuracy": accuracy})
    assert [measure.unit for measure in found.measures] == ["batches", "batches"]
    assert "Intervals of loss on batches and of accuracy on batches." in how_measured(found)


@pytest.mark.slow
def test_slots_and_baked_seeds_give_the_same_values_and_living_seeds_count() -> None:
    slotted = slotted_host()
    in_slots = esper.analyse(slotted, batches(), cross_entropy)
    assert in_slots == esper.analyse(slotted.model, batches(), cross_entropy)
    baked = esper.analyse(slotted.bake(), batches(), cross_entropy)
    assert baked.seeds == in_slots.seeds
    for name in NAMES:
        assert baked.measures[0].shapley[name].estimate == pytest.approx(in_slots.measures[0].shapley[name].estimate, abs=1e-12)
    living = slotted_host()
    living.slots["first"].is_kept = False
    living.slots["second"].connect(False)  # learns in the shadow: it does not change the outputs, so it is no player
    assert [(seed.name, seed.outcome) for seed in esper.analyse(living, batches(), cross_entropy).seeds] == [
        ("first", "living"), ("after", "kept")
    ]  # fmt: skip


def test_seeds_are_described_by_blueprint_alpha_and_cost() -> None:
    slotted = slotted_host("first")
    slotted.slots["first"].alpha = 0.5
    (seed,) = esper.analyse(slotted, batches(), cross_entropy).seeds
    planted = slotted.slots["first"].seed
    assert planted is not None
    assert (seed.blueprint, seed.alpha) == (planted.spec.blueprint, 0.5)
    assert seed.parameters == sum(parameter.numel() for parameter in planted.parameters())
    assert seed.flops


@pytest.mark.slow
def test_more_than_eight_seeds_are_sampled_and_their_values_still_sum_to_the_whole_gain() -> None:
    torch.manual_seed(0)
    slotted = add_slots(Deep().double(), make_data(dtype=torch.float64)[0][0], slots=["blocks.?"])
    plant_kept_seeds(slotted, *slotted.slots)
    found = esper.analyse(slotted, batches(), cross_entropy, groups=2)
    assert (found.orders, found.coalitions) == (20, len(plan_orders(list(slotted.slots), groups=2).coalitions))
    loss = found.measures[0]
    assert sum(value.estimate or 0.0 for value in loss.shapley.values()) == pytest.approx(loss.gain, abs=1e-12)
    exact = esper.analyse(slotted, batches()[:1], cross_entropy, exact_up_to=10)
    assert (exact.orders, exact.coalitions) == (0, 1024)


@pytest.mark.slow
def test_the_model_is_left_as_it_was_even_after_an_error() -> None:
    slotted = slotted_host()
    slotted.train()
    before = snapshot(slotted.model)
    alphas = [slot.alpha for slot in slotted.slots.values()]
    esper.analyse(slotted, batches(), cross_entropy)

    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(GrowthError, match="the metric 'broken' failed on batch 1 of the validation loader: ZeroDivisionError"):
        esper.analyse(slotted, batches(), cross_entropy, metrics={"broken": fails})
    assert_same(snapshot(slotted.model), before)
    assert [slot.alpha for slot in slotted.slots.values()] == alphas
    assert slotted.model.training


@pytest.mark.slow
def test_differences_are_paired_even_if_the_loader_shuffles() -> None:
    class Shuffled:
        def __iter__(self) -> Iterator[Batch]:
            order = torch.randperm(5).tolist()
            return iter([batches()[number] for number in order])

    slotted = slotted_host()
    one, other = (esper.analyse(slotted, loader, cross_entropy).measures[0] for loader in (batches(), Shuffled()))
    for name in NAMES:
        assert one.shapley[name].high == pytest.approx(other.shapley[name].high, abs=1e-12)


@pytest.mark.slow
def test_metrics_have_values_of_their_own_which_sum_to_the_increase() -> None:
    model = slotted_host().bake()
    found = esper.analyse(model, batches(), cross_entropy, metrics={"accuracy": accuracy}, max_batches=3)
    assert ([measure.name for measure in found.measures], found.batches, found.samples) == (["loss", "accuracy"], 3, 24)
    hits = [float(accuracy(model.eval()(x), y)) for x, y in batches()[:3]]
    assert found.measures[1].with_all == pytest.approx(sum(hits) / 3)
    assert sum(value.estimate or 0.0 for value in found.measures[1].shapley.values()) == pytest.approx(found.measures[1].gain, abs=1e-12)
    own = esper.analyse(
        model, batches(), step_loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"), max_batches=3
    )
    assert own.measures[0] == found.measures[0]


@pytest.mark.slow
def test_the_result_of_grow_is_analysed_and_kept_in_its_run(tmp_path: Path) -> None:
    plan = Planned([(1, "after.0", "mlp"), (1, "second.1", "norm")])
    host, data = make_host(), make_data(6)
    grown = esper.grow(host, data, data[:3], cross_entropy, epochs=8, controller=plan, run=tmp_path / "run", progress=False)
    kept = [entry.slot for entry in grown.ledger.seeds if entry.outcome == "kept"]
    assert kept
    found = esper.analyse(grown, data[:3], cross_entropy, run=tmp_path / "run", epoch=8)
    assert {seed.name for seed in found.seeds} == set(kept)
    assert read_analysis(tmp_path / "run") == found
    loaded = esper.load(tmp_path / "run", model=Host())
    assert esper.analyse(loaded, data[:3], cross_entropy, epoch=8) == found
    assert found.measures[0].with_all == pytest.approx(grown.val_loss, rel=1e-5)


def test_wrong_arguments_are_explained() -> None:
    model: object
    for model, message in [(Host(), "the model has no seeds"), ("model", "a str is not a model")]:
        with pytest.raises(GrowthError, match=message):
            esper.analyse(model, batches(), cross_entropy)  # type: ignore[arg-type]
    slotted = slotted_host()
    with pytest.raises(GrowthError, match="yields nothing"):
        esper.analyse(slotted, [], cross_entropy)
    with pytest.raises(GrowthError, match="max_batches must be at least 1, and is 0"):
        esper.analyse(slotted, batches(), cross_entropy, max_batches=0)
    with pytest.raises(GrowthError, match="at least 2 of them, not 1"):
        esper.analyse(slotted, batches(), cross_entropy, groups=1)
    with pytest.raises(GrowthError, match="pass either loss_fn"):
        esper.analyse(slotted, batches())
    with pytest.raises(GrowthError, match="'loss' cannot be the name of a metric"):
        esper.analyse(slotted, batches(), cross_entropy, metrics={"loss": accuracy})


def test_progress_is_told_and_the_result_shows_itself() -> None:
    told: list[tuple[int, int | None]] = []
    found: Analysis = esper.analyse(slotted_host("first"), batches(), cross_entropy, on_progress=lambda *done: told.append(done))
    assert told == [(number, 10) for number in range(1, 11)]
    assert "1 seed, analysed on 5 validation batches" in found._repr_html_()
