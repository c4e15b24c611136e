"""`grow` trains a copy of the model as a plain loop would, and grows it where that pays."""

from __future__ import annotations

import copy
import io
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth import Diverged, Grown, GrowthError, Planned, grow
from esper.growth.batches import PairLoss
from esper.growth.config import GovernorConfig, RentConfig
from esper.growth.controllers.heuristic import judge
from esper.growth.events import EpochEnded
from esper.growth.lifecycle.stages import Contribution, Decision, Germinate, GrowthState, Prune
from esper.growth.report.html import write_report
from esper.growth.report.story import read_story
from esper.growth.seeds.shadow import Shadow
from esper.growth.training import default_optimizer, training_config
from esper.growth.training_loop import Training, move, step_loss_of
from esper.runs import EventLog, read
from esper.runs.folder import EVENTS, RunError
from esper.statistics import Interval
from tests.commands import Terminal, shown_in_tensorboard
from tests.conftest import Clock
from tests.growth.builders import QUICK, QUICK_SHADOW, SLOTS, Batch, Data, Script, assert_same, config, make_data, make_host, plain_training

NAMED = {"slots": SLOTS}
STEPWISE = {"step_schedule": "step"}


def dataset(seed: int = 1, samples: int = 40) -> TensorDataset:
    ((x, y),) = make_data(1, seed=seed, size=samples)
    return TensorDataset(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, lambda optimizer: CosineAnnealingLR(optimizer, 4)], ids=["constant", "cosine"])
def test_never_growing_equals_the_plain_loop_with_a_loader_shuffled_by_the_global_generator(schedule) -> None:
    loader, validation = DataLoader(dataset(), batch_size=8, shuffle=True), DataLoader(dataset(2), batch_size=8, shuffle=True)
    host = make_host()
    torch.manual_seed(11)
    expected = plain_training(host, loader, epochs=4, schedule=schedule)
    after = torch.rand(2)
    torch.manual_seed(11)
    options = {"scheduler": schedule, "controller": "never", "keep": "last", "config": config(**NAMED)}
    grown = grow(host, loader, validation, cross_entropy, epochs=4, **options)
    assert_same(dict(grown.model.state_dict()), dict(expected.state_dict()))
    assert torch.equal(torch.rand(2), after)
    assert grown.report().startswith("nothing was grown · validation loss ")
    assert "AdamW, learning rate 0.001" in grown.report()


def test_grow_does_not_change_the_given_model() -> None:
    host = make_host()
    host.second.eval()
    host.first.weight.grad = torch.ones_like(host.first.weight)
    before = copy.deepcopy(host.state_dict())
    modes = [module.training for module in host.modules()]
    grown = grow(host, make_data(), make_data(2, seed=3), cross_entropy, epochs=4, controller=plan(), config=config(**NAMED))
    assert_same(dict(host.state_dict()), dict(before))
    assert [module.training for module in host.modules()] == modes
    assert torch.equal(host.first.weight.grad, torch.ones_like(host.first.weight))
    assert not any(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in host.modules())
    assert grown.model is not host


def plan() -> Planned:
    return Planned([(1, "first", "mlp")])


@pytest.mark.slow
def test_kept_seeds_are_in_the_model_the_ledger_and_the_report() -> None:
    data = make_data(6)
    grown = grow(make_host(), data, data, cross_entropy, epochs=14, controller=plan(), config=config(**NAMED))
    (entry,) = grown.ledger.seeds
    assert entry.outcome == "kept"
    assert grown.report().startswith("kept 1 of 1 seed · validation loss ")
    real = sum(parameter.numel() for parameter in grown.model.parameters())
    assert grown.added.parameters == entry.parameters == real - grown.host.parameters
    assert grown.val_loss == pytest.approx(min(grown.val_losses))
    assert grown.gflops > 0
    assert set(make_host().state_dict()) < set(grown.model.state_dict())


@pytest.mark.slow
def test_a_run_that_keeps_no_seed_returns_a_result() -> None:
    """The validation data are noise, so no seed does them any good, and everything is taken out in the end."""
    script = Script({1: [Germinate(slot="first", reason="test", blueprint="mlp")]})
    grown = grow(make_host(), make_data(), make_data(2, seed=5), cross_entropy, epochs=5, controller=script, config=config(**NAMED))
    assert grown.status == "finished"
    assert grown.report().startswith("nothing was worth keeping (1 seed tried) · ")
    assert [entry.outcome for entry in grown.ledger.seeds] == ["pruned"]
    assert "has not earned its place" in grown.ledger.seeds[0].stages[-1].reason
    assert grown.added.parameters == 0
    assert list(grown.model.state_dict()) == list(make_host().state_dict())
    alone = make_host()
    alone.load_state_dict(grown.model.state_dict())
    x = make_data(1, seed=6)[0][0]
    assert torch.equal(alone.eval()(x), grown.model.eval()(x))


def test_training_stops_early_when_nothing_gets_better() -> None:
    frozen = lambda parameters: torch.optim.SGD(parameters, lr=1e-12)  # noqa: E731
    host = make_host(norm=False)
    grown = grow(
        host, make_data(), make_data(2), cross_entropy, epochs=50, optimizer=frozen, controller="never", config=config(patience=3, **NAMED)
    )
    assert grown.status == "stopped early"
    assert grown.epochs < 12


@pytest.mark.slow
def test_a_seed_on_trial_delays_the_early_stop() -> None:
    frozen = lambda parameters: torch.optim.SGD(parameters, lr=1e-12)  # noqa: E731
    settings = config(patience=1, **NAMED)
    grown = grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=6, optimizer=frozen, controller=plan_at(0), config=settings)
    assert grown.epochs == 6


def plan_at(epoch: int) -> Script:
    return Script({epoch: [Germinate(slot="first", reason="test", blueprint="mlp")]})


class Answers(nn.Module):
    """Returns a dict, and takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.host = make_host()

    def forward(self, *, inputs: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.host(inputs) * scale}


def test_step_loss_takes_any_batch_and_output_and_slots_are_still_found() -> None:
    batches = [{"image": x, "label": y, "name": ["a"] * len(x)} for x, y in make_data()]
    grown = grow(
        Answers(),
        batches,
        batches,
        step_loss=lambda model, batch: cross_entropy(model(inputs=batch["image"], scale=0.5)["logits"], batch["label"]),
        epochs=2,
        controller=Script({0: [Germinate(slot="host.first", reason="test", blueprint="mlp")]}),
        config=config(slots=("host.first",)),
    )
    assert len(grown.ledger.seeds) == 1


class Caching(nn.Module):
    """Multiplies the host's inputs by weights that it keeps for as many samples as it saw last, as rotary embeddings do."""

    def __init__(self, note: Callable[[tuple[bool, bool]], None]) -> None:
        super().__init__()
        self.host, self.note = make_host(), note
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.note((self.training, torch.is_inference_mode_enabled()))
        if len(self.kept.get("weights", ())) != len(x):
            self.kept["weights"] = torch.ones(len(x), 1)
        return self.host.head(self.kept["weights"] * self.host.second(self.host.first(x)))


def test_validation_runs_in_inference_mode_and_caches_of_the_model_serve_gradients_afterwards() -> None:
    modes: list[tuple[bool, bool]] = []
    train, val = make_data(2), [*make_data(1, size=5), *make_data(1, size=8)]
    grow(
        Caching(lambda mode: modes.append(mode)),
        train,
        val,
        loss_fn=cross_entropy,
        epochs=2,
        controller="never",
        config=config(slots=("host.first",)),
    )
    looks = modes.index((True, False))  # the passes before the first step of the training, which look at the model
    assert {in_inference for training, in_inference in modes[looks:] if not training} == {True}
    assert {in_inference for training, in_inference in modes if training} == {False}


def test_a_schedule_on_plateau_gets_the_validation_loss() -> None:
    rates = []

    def schedule(optimizer):
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.1, eps=0.0)
        rates.append(optimizer)
        return scheduler

    frozen = lambda parameters: torch.optim.SGD(parameters, lr=1e-12)  # noqa: E731
    grow(
        make_host(norm=False),
        make_data(),
        make_data(2),
        cross_entropy,
        epochs=6,
        optimizer=frozen,
        scheduler=schedule,
        controller="never",
        config=config(**NAMED),
    )
    assert rates[0].param_groups[0]["lr"] < 1e-12


@pytest.mark.slow
def test_a_diverging_seed_causes_a_rollback_and_the_run_finishes() -> None:
    settings = config(QUICK, governor=GovernorConfig(uninformed_loss=math.log(3)), rent=RentConfig(), **NAMED)
    explosive = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = cross_entropy(outputs, targets)
        explosive.append(1)
        return value * math.nan if len(explosive) == 30 and torch.is_grad_enabled() else value

    grown = grow(make_host(), make_data(), make_data(2), loss, epochs=8, controller=plan_at(1), config=settings)
    assert grown.rollbacks == 1
    assert grown.epochs == 8
    assert math.isfinite(grown.val_loss)
    assert all(torch.isfinite(parameter).all() for parameter in grown.model.parameters())
    assert grown.ledger.seeds[0].outcome == "rolled back"


def test_a_rollback_within_an_epoch_keeps_the_schedule_of_that_epoch() -> None:
    rates, calls = [], []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = cross_entropy(outputs, targets)
        if torch.is_grad_enabled():
            rates.append(optimizers[0].param_groups[0]["lr"])
            calls.append(1)
        return value * math.nan if len(calls) == 10 and torch.is_grad_enabled() else value

    optimizers = []

    def schedule(optimizer):
        optimizers.append(optimizer)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    grown = grow(make_host(), make_data(), make_data(2), loss, epochs=5, scheduler=schedule, controller="never", config=config(**NAMED))
    assert grown.rollbacks == 1
    assert rates == [1e-3 * 0.5**epoch for epoch in range(5) for _ in range(4)]


@pytest.mark.slow
def test_the_flops_of_a_run_are_three_forward_passes_for_a_training_step_and_one_for_an_evaluation() -> None:
    data, val = make_data(4, size=8), make_data(2, size=8)
    never = grow(make_host(), data, val, cross_entropy, epochs=3, controller="never", config=config(**NAMED))
    samples = 3 * (3 * 32 + 16)
    assert never.gflops * 1e9 == pytest.approx(samples * never.host.flops)
    script = Script({0: [Germinate(slot="first", reason="test", blueprint="mlp")]})
    grown = grow(make_host(), data, val, cross_entropy, epochs=3, controller=script, config=config(**NAMED))
    seed = grown.ledger.seeds[0].flops
    # Three evaluations with everything on, three with the seed off, and one that checks the replay.
    assert grown.gflops * 1e9 == pytest.approx((3 * 3 * 32 + 7 * 16) * (grown.host.flops + seed))


@pytest.mark.parametrize("controller", ["heuristic", "random", "schedule"])
@pytest.mark.parametrize("poisoned", [None, 9, 14])
@pytest.mark.slow
def test_every_controller_finishes_a_run_with_and_without_a_rollback(controller: str, poisoned: int | None) -> None:
    calls = []  # whether each was of training

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        value = cross_entropy(outputs, targets)
        # In the third step of an epoch, and in the validation after the one before it.
        is_bad = poisoned is not None and (sum(calls), calls[-2:]) in ((poisoned * 4 + 3, [True, True]), (poisoned * 4, [True, False]))
        return value * math.nan if is_bad else value

    grown = grow(make_host(), make_data(), make_data(2), loss, epochs=20, controller=controller, config=config(**NAMED))
    assert (grown.status, grown.epochs) == ("finished", 20)
    assert grown.rollbacks >= (0 if poisoned is None else 1)
    assert math.isfinite(grown.val_loss)


def test_the_validation_loss_is_the_mean_over_samples_whatever_the_batches() -> None:
    (x, y), *_ = make_data(1, seed=2, size=17)
    whole, ragged = ([(x, y)], [(x[:16], y[:16]), (x[16:], y[16:])])
    results = [
        grow(make_host(), make_data(), val, cross_entropy, epochs=2, controller="never", config=config(**NAMED)) for val in (whole, ragged)
    ]
    one, other = results
    assert other.val_loss_before == pytest.approx(one.val_loss_before)
    assert other.val_losses == pytest.approx(one.val_losses)
    assert other.val_loss == pytest.approx(one.val_loss)
    with torch.no_grad():
        assert other.val_loss == pytest.approx(float(cross_entropy(other.model.eval()(x), y)))


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["batches", "samples"])
def test_one_validation_batch_gives_an_interval_only_by_samples_and_otherwise_says_so(unit: str, tmp_path: Path) -> None:
    """In events, in the checkpoint that the run goes on from, and in the ledger."""
    data = make_data(6)
    val = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
    losses = (
        {"step_loss": lambda model, batch: cross_entropy(model(batch[0]), batch[1])} if unit == "batches" else {"loss_fn": cross_entropy}
    )

    def run(epochs: int, *, resume: bool = False) -> Grown:
        controller = Script({1: [Germinate(slot="first", reason="test", blueprint="mlp")]})
        options = {"controller": controller, "config": config(**NAMED), "run": tmp_path / "run", "resume": resume}
        return grow(make_host(), data, val, epochs=epochs, **losses, **options)

    run(4)
    (entry,) = run(5, resume=True).ledger.seeds
    assert math.isfinite(entry.gain)
    assert (entry.gain_low == -math.inf and entry.gain_high == math.inf) == (unit == "batches")
    events = [record.event for record in read(tmp_path / "run" / EVENTS)]
    notes = [event.note for event in events if event.kind == "growth_started"]
    assert all(
        ("a single batch decides nothing: no seed can be kept; return the loss of every" in note) == (unit == "batches") for note in notes
    )
    measured = [(event.unit, event.count) for event in events if event.kind == "measured"]
    assert set(measured) == {("batches", 1) if unit == "batches" else ("samples", 48)}


@pytest.mark.parametrize(
    ("loss_fn", "unit"),
    [
        (cross_entropy, "samples"),
        (nn.CrossEntropyLoss(), "samples"),
        (lambda out, y: cross_entropy(out, y), "samples"),
        (lambda out, y: cross_entropy(out[y >= 0], y[y >= 0]), "samples"),  # vmap cannot run it
        (lambda out, y: cross_entropy(out, y, reduction="none"), "samples"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), "batches"),
        (nn.CrossEntropyLoss(reduction="sum"), "batches"),
        (lambda out, y: cross_entropy(out - out.mean(0), y), "batches"),
    ],
)
def test_samples_are_scored_one_by_one_where_their_mean_is_the_loss_of_the_batch(loss_fn: Any, unit: str) -> None:
    val = [(torch.cat([x, x[:3]]), torch.cat([y, y[:3]])) if number == 1 else (x, y) for number, (x, y) in enumerate(make_data(3))]
    training = Training(
        make_host(), make_data(1), val, step_loss_of(loss_fn, None), epochs=1,
        make_optimizer=default_optimizer, make_scheduler=None, config=training_config(),
    )  # fmt: skip
    found, _, _ = training._first_look()
    assert found.unit == unit
    model = training.model.eval()
    with torch.no_grad():
        losses = torch.cat([cross_entropy(model(x), y, reduction="none") for x, y in val])
    if unit == "samples":
        assert found.values == pytest.approx(losses.tolist(), rel=1e-5)
        assert found.batches == [8, 11, 8]
    else:
        assert found.samples == [8, 11, 8]


def test_the_positions_of_a_sequence_are_one_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(4, 5, 6, generator=generator), torch.randint(0, 3, (4, 5), generator=generator)
    losses = PairLoss(lambda out, y: cross_entropy(out.flatten(0, 1), y.flatten()))
    loss, by_sample = losses.with_samples(nn.Linear(6, 3), batch)
    assert by_sample is not None
    assert by_sample.shape == (4,)
    torch.testing.assert_close(by_sample.mean(), loss)


def test_a_seed_is_not_kept_on_an_estimate() -> None:
    measured = Contribution(Interval(0.5, -math.inf, math.inf), epoch=3)
    assert judge("first", measured, 0.1, may_prune=True, is_last=False) == []
    assert judge("first", measured, 0.9, may_prune=True, is_last=False) == []
    (action,) = judge("first", measured, 0.1, may_prune=True, is_last=True, undecided="its interval is too wide")
    assert isinstance(action, Prune)
    assert action.reason.endswith("its rent is 0.1000; its interval is too wide")


class Interrupted:
    """Ctrl-C in the middle of an epoch."""

    def __init__(self, data: Data, *, epoch: int, batch: int) -> None:
        self.data, self.left, self.batch = data, epoch, batch

    def __iter__(self) -> Iterator[Batch]:
        self.left -= 1
        for number, batch in enumerate(self.data, start=1):
            if self.left == 0 and number == self.batch:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_ctrl_c_returns_a_model_with_the_fossilized_seeds(batch: int) -> None:
    data = make_data(6)
    loader = Interrupted(data, epoch=12, batch=batch)
    grown = grow(make_host(), loader, data, cross_entropy, epochs=14, controller=plan(), config=config(**NAMED))
    assert (grown.status, grown.epochs) == ("stopped", 11)
    assert [entry.outcome for entry in grown.ledger.seeds] == ["kept"]
    assert set(make_host().state_dict()) < set(grown.model.state_dict())
    assert math.isfinite(grown.val_loss)


def test_ctrl_c_removes_a_seed_on_trial_and_all_hooks() -> None:
    data = make_data()
    loader = Interrupted(data, epoch=3, batch=2)
    grown = grow(make_host(), loader, data, cross_entropy, epochs=9, controller=plan_at(1), config=config(**NAMED))
    assert (grown.status, grown.epochs) == ("stopped", 2)
    assert grown.added.parameters == grown.added.flops == 0
    assert grown.report().startswith("nothing is kept yet (1 seed tried) · ")
    assert list(grown.model.state_dict()) == list(make_host().state_dict())
    assert not any(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in grown.model.modules())


@pytest.mark.slow
def test_a_run_resumed_after_ctrl_c_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def run(folder: str, loader, **options):
        torch.manual_seed(5)
        settings = {"controller": plan_at(1), "config": config(**NAMED), "run": tmp_path / folder, **options}
        return grow(make_host(), loader, make_data(2), cross_entropy, epochs=5, **settings)

    data = make_data()
    for epoch in (1, 4):
        whole = run(f"whole {epoch}", data)
        assert run(f"run {epoch}", Interrupted(data, epoch=epoch, batch=3)).status == "stopped"
        resumed = run(f"run {epoch}", data, resume=True)
        assert resumed.status == "finished"
        assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))


@pytest.mark.slow
def test_a_training_too_short_to_grow_anything_warns_and_its_report_says_why(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nothing can grow in 5 epochs.* train for at least 6 epochs"):
        grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=5, run=tmp_path / "run")
    story = read_story(tmp_path / "run")
    assert story.started is not None
    assert "nothing can grow in 5 epochs" in story.started.note, "before anything was trained"
    assert [(remark.first, remark.last) for remark in story.remarks if "nothing can grow in 5 epochs" in remark.text] == [(0, 5)]
    assert "train for at least 6 epochs" in write_report(tmp_path / "run").read_text()


def test_the_result_says_why_nothing_could_grow() -> None:
    with pytest.warns(UserWarning, match="nothing can grow in 5 epochs"):
        grown = grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=5)
    assert grown.report().startswith("nothing was grown · nothing can grow in 5 epochs: ")
    assert "train for at least 6 epochs" in grown.report()


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("controller", "epochs"), [("heuristic", 6), ("never", 2)])
def test_a_training_that_could_grow_or_never_would_does_not_warn(controller: str, epochs: int) -> None:
    grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=epochs, controller=controller)


# Schedules


def rates_seen(schedule, *, epochs: int = 3, batches: int = 4, **options) -> list[float]:
    """The learning rate of every step."""
    rates, optimizers = [], []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            rates.append(optimizers[0].param_groups[0]["lr"])
        return cross_entropy(outputs, targets)

    def make(optimizer):
        optimizers.append(optimizer)
        return schedule(optimizer)

    settings = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0), "controller": "never", "config": config(**NAMED)}
    grow(make_host(), make_data(batches), make_data(2), loss, epochs=epochs, scheduler=make, **settings, **options)
    return rates


def halving(optimizer):
    return LambdaLR(optimizer, lambda time: 0.5**time)


@pytest.mark.slow
def test_a_schedule_that_counts_steps_is_stepped_after_every_step() -> None:
    assert rates_seen(halving, step_schedule="step") == [0.5**step for step in range(12)]
    assert rates_seen(halving, step_schedule="epoch") == [0.5**epoch for epoch in range(3) for _ in range(4)]


@pytest.mark.slow
def test_a_schedule_that_counts_steps_equals_the_plain_loop_to_the_last_bit() -> None:
    def schedule(optimizer):
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * max(0.0, 1 - step / 16))

    options = {"scheduler": schedule, "step_schedule": "step", "controller": "never", "keep": "last", "config": config(**NAMED)}
    torch.manual_seed(11)
    grown = grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=4, **options)
    torch.manual_seed(11)
    expected = plain_training(make_host(), make_data(), epochs=4, schedule=schedule, per_step=True)
    assert_same(dict(grown.model.state_dict()), dict(expected.state_dict()))


def test_one_cycle_is_stepped_after_every_step_also_inside_another_schedule() -> None:
    def one_cycle(optimizer, total=12):
        return OneCycleLR(optimizer, 1.0, total_steps=total)

    def in_sequence(optimizer):
        return SequentialLR(optimizer, [ConstantLR(optimizer, 0.5, total_iters=100), one_cycle(optimizer, 9)], milestones=[4])

    assert len(set(rates_seen(one_cycle))) > 8
    assert len(set(rates_seen(in_sequence))) > 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (halving, "LambdaLR is stepped once an epoch, 3 times in all, and esper cannot know whether its function counts"),
        (lambda optimizer: CosineAnnealingLR(optimizer, T_max=12), "CosineAnnealingLR is stepped once an epoch, .* its T_max is 12"),
        (lambda optimizer: LinearLR(optimizer, total_iters=12), "LinearLR .* its total_iters is 12"),
        (lambda optimizer: ChainedScheduler([LinearLR(optimizer, total_iters=12)]), "LinearLR .* its total_iters is 12"),
    ],
    ids=["lambda", "cosine", "linear", "chained"],
)
def test_an_ambiguous_schedule_warns_unless_its_unit_is_given(schedule, words: str) -> None:
    with pytest.warns(UserWarning, match=f'{words}.*pass step_schedule="step" .* or step_schedule="epoch"'):
        rates_seen(schedule)
    rates_seen(schedule, step_schedule="epoch")  # where a warning would be an error
    rates_seen(schedule, step_schedule="step")


def test_a_cosine_schedule_over_the_epochs_does_not_warn() -> None:
    rates_seen(lambda optimizer: CosineAnnealingLR(optimizer, T_max=3))
    rates_seen(lambda optimizer: CosineAnnealingLR(optimizer, T_max=6))  # half of it, on purpose


# Precision, clipping and accumulation


@pytest.mark.slow
def test_the_gradient_of_the_host_is_clipped_as_in_the_plain_loop() -> None:
    options = {"max_grad_norm": 0.1, "controller": "never", "keep": "last", "config": config(**NAMED)}
    torch.manual_seed(11)
    grown = grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=3, **options)
    torch.manual_seed(11)
    expected = plain_training(make_host(), make_data(), epochs=3, max_grad_norm=0.1)
    assert_same(dict(grown.model.state_dict()), dict(expected.state_dict()))
    torch.manual_seed(11)
    unclipped = plain_training(make_host(), make_data(), epochs=3)
    assert not torch.equal(grown.model.head.weight, unclipped.head.weight)


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_equals_the_plain_loop_with_autocast_and_a_scaler(precision: str, max_grad_norm: float | None) -> None:
    options = {"precision": precision, "max_grad_norm": max_grad_norm, "controller": "never", "keep": "last", "config": config(**NAMED)}
    torch.manual_seed(11)
    grown = grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=3, **options)
    torch.manual_seed(11)
    expected = plain_training(make_host(), make_data(), epochs=3, precision=getattr(torch, precision), max_grad_norm=max_grad_norm)
    assert_same(dict(grown.model.state_dict()), dict(expected.state_dict()))
    assert grown.model.head.weight.dtype is torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_seeds_grow_and_validation_runs_in_half_precision(precision: str) -> None:
    seen = {True: set(), False: set()}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen[torch.is_grad_enabled()].add(outputs.dtype)
        return cross_entropy(outputs, targets)

    data = make_data(6)
    grown = grow(make_host(), data, data, loss, epochs=10, controller=plan(), config=config(**NAMED), precision=precision)
    assert seen == {True: {getattr(torch, precision)}, False: {getattr(torch, precision)}}
    assert [entry.outcome for entry in grown.ledger.seeds] == ["kept"]
    assert grown.val_losses[-1] < grown.val_losses[0]
    assert {parameter.dtype for parameter in grown.model.parameters()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_an_epoch_in_which_every_step_overflows_is_counted_without_a_warning(tmp_path: Path) -> None:
    """The first scale of a GradScaler is often too high, and the seed has missed nothing that the host has not."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        is_first_epoch = len(script.states) < 2
        return cross_entropy(outputs, targets) * (1e35 if torch.is_grad_enabled() and is_first_epoch else 1.0)

    script = Script({0: [Germinate(slot="first", reason="test", blueprint="mlp")]})
    options = {"controller": script, "config": config(**NAMED), "precision": "float16", "run": tmp_path / "run"}
    grown = grow(make_host(), make_data(2), make_data(2), loss, epochs=2, **options)
    assert grown.epochs == 2
    assert [event.skipped for event in epochs_told(tmp_path / "run")] == [2, 0]  # steps of the host's optimiser


def epochs_told(folder: Path) -> list[EpochEnded]:
    return [record.event for record in read(folder / EVENTS) if isinstance(record.event, EpochEnded)]


class SlowLoader:
    """Takes its time for every batch."""

    def __init__(self, data: Data, clock: Clock) -> None:
        self.data, self.clock = data, clock

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.data:
            self.clock.sleep(0.01)
            yield batch


@pytest.mark.slow
def test_events_have_the_time_of_a_step_and_the_wait_for_data(tmp_path: Path, clock: Clock) -> None:
    def ended(loader: object, folder: Path) -> list[EpochEnded]:
        grow(make_host(), loader, make_data(2), cross_entropy, epochs=2, controller="never", config=config(**NAMED), run=folder)
        return epochs_told(folder)

    for event in ended(SlowLoader(make_data(4), clock), tmp_path / "slow"):
        assert event.data_wait_seconds is not None
        assert event.step_seconds is not None
        assert 4 * 0.01 <= event.data_wait_seconds <= 4 * event.step_seconds <= event.seconds
    assert all(0 < (event.data_wait_seconds or 0.0) < 0.04 for event in ended(make_data(4), tmp_path / "fast"))


def in_halves(data: Data) -> Data:
    return [part for x, y in data for part in zip(x.split(len(x) // 2), y.split(len(y) // 2), strict=True)]


def exact(raise_mode: str, batches: Data, **options):
    """A run in float64 of a host without anything random in it, with a seed that is kept."""
    host = make_host(dtype=torch.float64, dropout=0.0, norm=False)
    lifecycle = QUICK if raise_mode == "joint" else QUICK_SHADOW
    val = make_data(6, dtype=torch.float64)
    settings = {"controller": plan(), "config": config(lifecycle, **NAMED), "max_grad_norm": 0.5, **options}
    return grow(host, batches, val, cross_entropy, epochs=8, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("raise_mode", ["joint", "shadow"])
def test_two_half_batches_per_step_equal_whole_batches(raise_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal up to rounding; a seed grows, learns, is measured and kept on the way."""
    monkeypatch.setattr(Shadow, "recording", lambda shadow: nullcontext())  # one forward pass is recorded, several are computed again
    data = make_data(6, dtype=torch.float64)
    whole, halves = exact(raise_mode, data), exact(raise_mode, in_halves(data), accumulate=2)
    assert [entry.outcome for entry in whole.ledger.seeds] == [entry.outcome for entry in halves.ledger.seeds] == ["kept"]
    assert halves.train_losses == pytest.approx(whole.train_losses, rel=1e-6)  # told in float32
    assert halves.val_losses == pytest.approx(whole.val_losses, rel=1e-10)
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(halves.model.state_dict()[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_the_last_batches_of_an_epoch_make_a_step_with_their_own_mean_and_every_sample_counts_alike() -> None:
    (x, y), *_ = make_data(1, size=22, dtype=torch.float64)
    parts = [(x[a:b], y[a:b]) for a, b in ((0, 6), (6, 12), (12, 18), (18, 19))]  # three to a step: 18 samples, then 1
    groups = [(x[a:b], y[a:b]) for a, b in ((0, 18), (18, 19))]
    whole, some = exact("joint", groups), exact("joint", parts, accumulate=3)
    assert some.gflops == whole.gflops
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(some.model.state_dict()[name], tensor, rtol=1e-9, atol=1e-11)


def test_a_schedule_by_steps_counts_steps_of_the_optimiser_where_gradients_are_accumulated() -> None:
    assert rates_seen(halving, epochs=1, batches=5, accumulate=2, step_schedule="step") == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started", "resumed"),
    [({}, {"precision": "bfloat16"}), ({"accumulate": 2}, {}), ({"max_grad_norm": 1.0}, {"max_grad_norm": 2.0}), ({}, STEPWISE)],
    ids=["precision", "accumulate", "max_grad_norm", "step_schedule"],
)
@pytest.mark.filterwarnings("ignore:LambdaLR is stepped")
def test_a_run_goes_on_with_the_settings_it_was_started_with(started, resumed, tmp_path: Path) -> None:
    def run(epochs: int, **options):
        options = {"scheduler": halving, "controller": "never", "config": config(**NAMED), "run": tmp_path / "run", **options}
        return grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=epochs, **options)

    run(1, **started)
    name = next(iter(resumed | started))
    with pytest.raises(GrowthError, match=f"was started with {name} = .* and cannot go on with .*"):
        run(2, **resumed, resume=True)
    assert run(2, **started, resume=True).epochs == 2


@pytest.mark.slow
def test_a_run_in_float16_with_accumulation_and_clipping_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def run(folder: str, loader, **options):
        torch.manual_seed(5)
        settings = {"precision": "float16", "accumulate": 2, "max_grad_norm": 0.5, "controller": plan_at(1), "config": config(**NAMED)}
        return grow(make_host(), loader, make_data(2), cross_entropy, epochs=5, run=tmp_path / folder, **settings, **options)

    data = make_data(5)
    whole = run("whole", data)
    assert run("cut", Interrupted(data, epoch=4, batch=3)).status == "stopped"
    resumed = run("cut", data, resume=True)
    assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))


# Progress


def shown_run(**options):
    options = {"controller": plan(), "config": config(**NAMED), **options}
    return grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=3, **options)


def test_progress_is_a_line_an_epoch_with_what_was_decided_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    grown = shown_run(progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    first, *epochs, last = captured.err.splitlines()
    assert first.startswith("Host: 171 parameters, 2 slots on cpu, AdamW, learning rate 0.001, 3 epochs, controller schedule, joint")
    assert [line.partition("  ")[0] for line in epochs] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert epochs[0].endswith("  germinate first: planned for epoch 1; schedule")
    assert f"val {grown.val_losses[1]:.4f}" in epochs[1]
    assert last == grown.report().partition(" · AdamW")[0]


@pytest.mark.slow
def test_progress_is_silent_unless_asked_for_or_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown_run()
    shown_run(progress=False)
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    shown_run(progress=False)
    assert terminal.getvalue() == ""
    shown_run()
    assert terminal.getvalue().count("\nepoch ") == 3


def test_a_reason_that_stays_the_same_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown_run(progress=True, controller="never")
    assert capsys.readouterr().err.count("never grows") == 1


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.slow
def test_a_terminal_that_is_gone_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    assert shown_run(progress=True).epochs == 3
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    assert shown_run(progress=True).epochs == 3
    assert shown_run().epochs == 3


# Files of a run


def kept_run(folder: Path, loader=None, *, epochs: int = 6, **options):
    data = make_data(6)
    settings = {"controller": plan(), "config": config(**NAMED), "run": folder, **options}
    return grow(make_host(), data if loader is None else loader, data, cross_entropy, epochs=epochs, **settings)


def loaded(folder: Path) -> dict[str, Tensor]:
    return dict(esper.load(folder, model=make_host(seed=9)).state_dict())


@pytest.mark.slow
def test_a_run_writes_the_model_and_the_report_and_its_folder_can_be_loaded(tmp_path: Path) -> None:
    grown = kept_run(tmp_path / "run")
    assert [entry.outcome for entry in grown.ledger.seeds] == ["kept"]
    assert_same(loaded(tmp_path / "run"), dict(grown.model.state_dict()))
    assert_same(loaded(str(tmp_path / "run")), loaded(tmp_path / "run" / "model.safetensors"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "kept 1 of 1 seed" in page
    assert page == write_report(tmp_path / "run").read_text(), "it was written when everything had happened"


@pytest.mark.slow
def test_a_stopped_run_writes_its_model_and_a_finished_one_replaces_it(tmp_path: Path) -> None:
    stopped = kept_run(tmp_path / "run", Interrupted(make_data(6), epoch=2, batch=4))
    assert stopped.status == "stopped"
    assert_same(loaded(tmp_path / "run"), dict(stopped.model.state_dict()))
    assert "stopped after epoch 1" in (tmp_path / "run" / "report.html").read_text()
    assert stopped.report().endswith(f"go on with run='{tmp_path / 'run'}', resume=True")
    finished = kept_run(tmp_path / "run", resume=True)
    assert_same(loaded(tmp_path / "run"), dict(finished.model.state_dict()))
    assert finished.model.state_dict().keys() > stopped.model.state_dict().keys()


def test_a_diverged_run_writes_the_model_of_its_last_rollback(tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) * (math.nan if torch.is_grad_enabled() else 1.0)

    with pytest.raises(Diverged) as caught:
        grow(make_host(), make_data(12), make_data(2), loss, epochs=2, controller="never", config=config(**NAMED), run=tmp_path / "run")
    assert caught.value.model is not None
    assert_same(loaded(tmp_path / "run"), dict(caught.value.model.state_dict()))
    assert "went back" in (tmp_path / "run" / "report.html").read_text()


class Failing(Interrupted):
    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from super().__iter__()
        except KeyboardInterrupt:
            raise OSError("the disk is gone") from None


@pytest.mark.slow
def test_loading_the_folder_of_a_failed_run_explains_how_to_get_the_model(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        kept_run(tmp_path / "run", Failing(make_data(6), epoch=3, batch=4))
    with pytest.raises(GrowthError, match=r"the run in .*run has no model yet, .* esper.grow\(..., run='.*run', resume=True\)"):
        loaded(tmp_path / "run")
    finished = kept_run(tmp_path / "run", resume=True)
    assert_same(loaded(tmp_path / "run"), dict(finished.model.state_dict()))


def test_loading_a_folder_without_a_growth_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GrowthError, match=r"holds no model: there is no model.safetensors in it"):
        loaded(tmp_path)
    EventLog(tmp_path / EVENTS, run="cue").close()
    with pytest.raises(GrowthError, match=r"holds no model: it is the folder of a run, but not of a growth run"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "report.html"])
def test_a_file_of_the_user_is_not_overwritten_by_a_new_run(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(RunError, match=f"holds a {name}, which the run would replace; choose another folder"):
        kept_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.slow
def test_a_model_that_cannot_be_written_is_still_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: nn.Module, folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr("esper.growth.training.save_in_run", full)
    with pytest.warns(RuntimeWarning, match=r"No space left .*; save the model by grown.save\(path\)"):
        grown = kept_run(tmp_path / "run")
    assert grown.status == "finished"
    monkeypatch.undo()
    assert_same(dict(kept_run(tmp_path / "run", resume=True).model.state_dict()), dict(grown.model.state_dict()))
    assert_same(loaded(tmp_path / "run"), dict(grown.model.state_dict()))


class Graph:
    """A batch of a library with its own kind of batches."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


def test_a_batch_with_a_to_method_is_moved_to_the_device_of_the_model() -> None:
    moved = move([Graph(torch.zeros(3)), {"x": torch.zeros(2)}], torch.device("meta"))
    assert moved[0].nodes.is_meta
    assert moved[1]["x"].is_meta


class TakesAnyNames(nn.Module):
    """Takes its inputs by any name, as wrappers around models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, scale: float = 1.0, **inputs: Tensor) -> Tensor:
        result: Tensor = self.body(inputs["x"]) * scale
        return result


@pytest.mark.parametrize("arguments", [(), (2.0,)], ids=["named", "both"])
def test_a_model_that_takes_any_keywords_grows(arguments: tuple[float, ...]) -> None:
    batches = [{"x": x, "y": y} for x, y in make_data()]
    grown = esper.grow(
        TakesAnyNames(),
        batches,
        batches,
        step_loss=lambda model, batch: cross_entropy(model(*arguments, x=batch["x"]), batch["y"]),
        epochs=2,
        controller="never",
    )
    assert grown.status == "finished"


@pytest.mark.slow
def test_the_workers_of_a_users_loader_live_through_all_epochs_and_the_loader_is_never_made_again() -> None:
    made = []

    class Watched(DataLoader):
        def _get_iterator(self):
            made.append(super()._get_iterator())
            return made[-1]

    loader = Watched(dataset(), batch_size=10, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    pids: list[int] = []

    class Watching(Script):
        def decide(self, state: GrowthState) -> Decision:
            pids.extend(worker.pid for iterator in made for worker in iterator._workers)
            return super().decide(state)

    grow(make_host(), loader, make_data(2), cross_entropy, epochs=3, controller=Watching(), config=config(**NAMED))
    assert len(made) == 1  # for all epochs
    assert len(pids) == 3
    assert len(set(pids)) == 1


@pytest.mark.slow
def test_a_run_in_python_writes_for_tensorboard_where_it_has_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options = {"epochs": 2, "controller": "never", "config": config(**NAMED), "tensorboard": True}
    with pytest.raises(GrowthError, match="pass the folder as run="):
        grow(make_host(), make_data(2), make_data(2), cross_entropy, **options)
    grown = grow(make_host(), make_data(2), make_data(2), cross_entropy, run=tmp_path / "run", **options)
    shown = shown_in_tensorboard(tmp_path / "run")
    assert shown["epoch_ended/val_loss"] == [(1, pytest.approx(grown.val_losses[0])), (2, pytest.approx(grown.val_losses[1]))]
    assert shown["growth_finished/val_loss"] == [(2, pytest.approx(grown.val_loss))]
