"""Metrics beside the loss: their values, and that they cost no forward pass and change nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from esper.growth import Grower, GrowthError, add_slots, grow
from esper.growth.events import EpochEnded
from esper.growth.lifecycle.stages import Fossilize, Germinate
from esper.growth.metrics import accuracy
from esper.growth.report.story import read_story
from esper.growth.report.summary import comparison
from esper.runs import Event
from tests.commands import Terminal, shown_in_tensorboard
from tests.growth.builders import QUICK, SLOTS, Batch, Data, Script, assert_same, config, grow_small, make_data, make_host, make_loop

NAMED = {"slots": SLOTS}
UNEVEN = [*make_data(2, seed=5), *make_data(1, seed=6, size=3)]  # 8, 8 and 3 samples


def share_right(model: nn.Module, data: Data) -> float:
    model.eval()
    with torch.no_grad():
        hits = torch.cat([model(x).argmax(1) == y for x, y in data])
    return float(hits.double().mean())


class Counted(nn.Module):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.calls = make_host(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.host(x)
        return output


def accuracy_by_model(model: nn.Module, batch: Batch) -> Tensor:
    return accuracy(model(batch[0]), batch[1])


def step_loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def test_the_accuracy_of_an_epoch_is_the_share_of_validation_samples_that_the_model_gets_right() -> None:
    grown = grow_small(UNEVEN, epochs=2, controller="never")
    assert grown.metrics == {"accuracy": pytest.approx(share_right(grown.model, UNEVEN))}
    assert f"accuracy {grown.metrics['accuracy']:.2%}" in grown.report()


@pytest.mark.slow
@pytest.mark.parametrize("by_step_loss", [False, True])
def test_metrics_need_no_forward_pass_of_their_own_and_leave_weights_and_decisions_as_they_are(by_step_loss: bool) -> None:
    results = []
    for metrics in (None, {"accuracy": accuracy_by_model if by_step_loss else accuracy}):
        torch.manual_seed(3)
        model = Counted()
        given = {"step_loss": step_loss} if by_step_loss else {"loss_fn": cross_entropy}
        options = {"slots": ("host.first", "host.second"), "lifecycle": QUICK}
        script = Script(
            {0: [Germinate(slot="host.first", reason="test", blueprint="mlp")], 4: [Fossilize(slot="host.first", reason="test")]}
        )
        grown = grow(model, make_data(), UNEVEN, epochs=5, controller=script, config=config(**options), metrics=metrics, **given)
        results.append((grown.model.calls, dict(grown.model.state_dict()), grown.ledger.table()))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert "kept" in results[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 5])
def test_forward_passes_of_a_metric_change_no_contribution_of_a_seed_on_trial(size: int) -> None:
    def shifted(model: nn.Module, batch: Batch) -> Tensor:
        return accuracy(model(batch[0][:size] + 1), batch[1][:size])

    measured: list[list[float | None]] = []
    for metrics in (None, {"shifted": shifted}):
        gains: list[float | None] = []

        def note(event: Event, gains: list[float | None] = gains) -> None:
            if isinstance(event, EpochEnded):
                gains.extend(slot.gain for slot in event.slots)

        script = Script({0: [Germinate(slot="second", reason="test", blueprint="mlp")]})
        grow_small(make_data(3), step_loss=step_loss, epochs=5, controller=script, metrics=metrics, callbacks=[note])
        measured.append(gains)
    assert measured[0] == measured[1]
    assert any(measured[0])


def test_a_metric_of_the_model_sees_outputs_computed_anew_for_other_inputs() -> None:
    def shifted(model: nn.Module, batch: Batch) -> Tensor:
        assert not model.training
        return accuracy(model(batch[0] + 1), batch[1])

    grown = grow_small(UNEVEN, step_loss=step_loss, epochs=1, controller="never", metrics={"shifted": shifted})
    assert grown.metrics["shifted"] == pytest.approx(share_right(grown.model, [(x + 1, y) for x, y in UNEVEN]))


@pytest.mark.slow
def test_a_metric_is_in_events_report_progress_and_tensorboard_under_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    grown = grow_small(UNEVEN, epochs=2, controller="never", run=tmp_path / "run", tensorboard=True, progress=True)
    story = read_story(tmp_path / "run")
    values = [epoch.metrics["accuracy"] for epoch in story.epochs]
    assert shown_in_tensorboard(tmp_path / "run")["epoch_ended/metrics/accuracy"] == [
        (1, pytest.approx(values[0])),
        (2, pytest.approx(values[1])),
    ]
    assert f"accuracy {values[1]:.2%}" in terminal.getvalue()
    assert story.began is not None
    before = story.began.metrics["accuracy"]
    assert before == pytest.approx(share_right(make_host(), UNEVEN))
    row = next(row for row in comparison(story)[1] if row[0] == "validation accuracy")
    assert row[1:3] == (f"{before:.2%}", f"{grown.metrics['accuracy']:.2%}")
    assert "validation accuracy" in (tmp_path / "run/report.html").read_text()


def test_a_grower_asks_for_metrics_once_after_the_evaluation_with_all_seeds_on() -> None:
    host = make_host()
    optimizer = torch.optim.SGD(host.parameters(), lr=0.01)
    slotted = add_slots(host, make_data()[0][0][:2], slots=list(SLOTS))
    events: list[EpochEnded] = []
    grower = Grower(
        slotted, optimizer, controller="never", on_event=lambda event: events.append(event) if isinstance(event, EpochEnded) else None
    )
    order: list[str] = []

    def evaluate() -> list[float]:
        order.append("evaluate")
        return [1.0, 2.0]

    def metric() -> float:
        order.append("metric")
        return 0.75

    for x, y in make_data():
        loss = cross_entropy(slotted(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        grower.after_step(loss)
    ended = grower.after_epoch(evaluate, metrics={"accuracy": metric, "temperature": 3})
    assert order == ["evaluate", "metric"]
    assert events[-1].metrics == ended.metrics == {"accuracy": 0.75, "temperature": 3.0}


def test_an_epoch_of_a_file_without_metrics_has_none() -> None:
    loop = make_loop(Script({}))
    loop.epoch(epochs=1)
    assert [event.metrics for event in loop.events if isinstance(event, EpochEnded)] == [{}]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (accuracy, "metrics must be a dict from names to functions, and is a function"),
        ({"accuracy": 3}, "the metric 'accuracy' is an int, and must be a function of a batch"),
        ({"accuracy": nn.Linear}, "is the class Linear"),
        ({"outputs": lambda outputs, targets: outputs}, r"gave a tensor of shape \[8, 3\]; return one number"),
        ({"none": lambda outputs, targets: None}, "'none' gave None"),
        ({"one": lambda outputs: 1}, "the metric 'one' failed on batch 1 of the validation loader: TypeError"),
        ({"": accuracy}, "'' cannot be the name of a metric"),
        ({"a\nb": accuracy}, "cannot be the name of a metric"),
    ],
)
def test_a_wrong_metric_is_named_before_anything_is_trained_or_written(metrics: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(GrowthError, match=message):
        grow_small(UNEVEN, epochs=1, controller="heuristic", metrics=metrics, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
