"""Callbacks and sinks of the user get every event of `grow` and of a `Grower`, and cannot end the training."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch.nn.functional import cross_entropy

from esper.growth import Grower, GrowthError, add_slots, grow
from esper.growth.events import EpochEnded, GrowthFinished
from esper.growth.metrics import accuracy
from esper.runs import Event, EventRecord, read
from esper.runs.folder import EVENTS
from tests.commands import shown_in_tensorboard
from tests.growth.builders import SLOTS, config, grow_small, make_data, make_host, make_loop, sgd

NAMED = {"slots": SLOTS}


class Kept:
    """A sink that keeps everything."""

    def __init__(self, fails_at: str = "") -> None:
        self.records: list[EventRecord] = []
        self.fails_at, self.is_closed, self.thread = fails_at, False, ""

    def write(self, record: EventRecord) -> None:
        if record.kind == self.fails_at:
            raise OSError("the disk is full")
        self.records.append(record)
        self.thread = threading.current_thread().name

    def close(self) -> None:
        self.is_closed = True


class EpochCounter:
    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.kept: int | None = None

    def on_epoch_ended(self, event: EpochEnded) -> None:
        self.epochs.append(event.epoch)

    def on_growth_finished(self, event: GrowthFinished) -> None:
        self.kept = event.kept


def trained(**options: object) -> object:
    return grow_small(epochs=2, controller="never", metrics=None, **options)


def test_functions_get_every_event_and_objects_those_they_have_methods_for() -> None:
    kinds: list[str] = []
    counter = EpochCounter()
    trained(callbacks=[lambda event: kinds.append(event.kind), counter])
    assert kinds == ["growth_started", "epoch_ended", "epoch_ended", "growth_finished"]
    assert (counter.epochs, counter.kept) == ([1, 2], 0)


def test_a_callback_that_fails_is_switched_off_with_one_warning_and_the_others_go_on() -> None:
    calls: list[str] = []

    def broken(event: Event) -> None:
        calls.append(event.kind)
        raise KeyError("no such metric")

    counter = EpochCounter()
    with pytest.warns(RuntimeWarning, match="the callback broken failed at growth_started and is not called any more: KeyError") as caught:
        trained(callbacks=[broken, counter])
    assert (calls, counter.epochs, len(caught)) == (["growth_started"], [1, 2], 1)


@pytest.mark.parametrize("has_folder", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sink_gets_every_event_with_its_epoch_in_another_thread_and_is_closed(has_folder: bool, tmp_path: Path) -> None:
    sink = Kept()
    trained(sinks=[sink], run=tmp_path / "run" if has_folder else None)
    ends = [(record.step, record.event.epoch) for record in sink.records if isinstance(record.event, EpochEnded)]
    assert ends == [(1, 1), (2, 2)]
    assert sink.records[-1].kind == "growth_finished"
    assert sink.is_closed
    assert sink.thread.startswith("esper-sink-")
    if has_folder:
        assert [record.kind for record in read(tmp_path / "run" / EVENTS)] == [record.kind for record in sink.records]


def test_a_sink_that_fails_is_switched_off_with_a_warning() -> None:
    sink = Kept(fails_at="epoch_ended")
    with pytest.warns(RuntimeWarning, match="the sink Kept failed: OSError: the disk is full; it gets no more events"):
        trained(sinks=[sink])
    assert [record.kind for record in sink.records] == ["growth_started"]


def test_a_grower_tells_callbacks_and_sinks_until_it_is_baked(capsys: pytest.CaptureFixture[str]) -> None:
    loop = make_loop()
    host = make_host()
    optimizer, sink, counter = sgd(host), Kept(), EpochCounter()
    slotted = add_slots(host, make_data()[0][0][:2], slots=list(SLOTS))
    loop.grower = Grower(slotted, optimizer, controller="never", callbacks=[counter], sinks=[sink], progress=True)
    loop.host, loop.optimizer, loop.slotted = host, optimizer, slotted
    loop.epoch(epochs=2)
    loop.grower.bake()
    assert counter.epochs == [1, 2]
    assert [record.step for record in sink.records if record.kind == "epoch_ended"] == [1, 2]
    assert {record.run for record in sink.records} == {"Host"}
    assert sink.is_closed
    shown = capsys.readouterr().err.splitlines()
    assert [line for line in shown if "epoch" in line] == shown
    assert len(shown) == 2


@pytest.mark.slow
def test_a_resumed_grow_goes_on_with_tensorboard_and_own_sinks_under_the_same_names(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options = {
        "controller": "never",
        "config": config(**NAMED),
        "metrics": {"accuracy": accuracy},
        "run": tmp_path / "run",
        "tensorboard": True,
    }
    grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=2, **options)
    sink = Kept()
    grow(make_host(), make_data(), make_data(2), cross_entropy, epochs=4, resume=True, sinks=[sink], **options)
    shown = shown_in_tensorboard(tmp_path / "run")
    assert [step for step, _ in shown["epoch_ended/val_loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in shown["epoch_ended/metrics/accuracy"]] == [1, 2, 3, 4]
    assert [record.event.epoch for record in sink.records if isinstance(record.event, EpochEnded)] == [3, 4]


class Misspelt:
    def on_epoch_end(self, event: Event) -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": print}, r"callbacks must be a list, and is a builtin_function_or_method: callbacks=\[...\]"),
        ({"callbacks": [3]}, "a callback is an int; pass functions of an event"),
        ({"callbacks": [EpochCounter]}, r"is a class; pass an instance: EpochCounter\(\)"),
        ({"callbacks": [Misspelt()]}, "Misspelt.on_epoch_end would never be called: there is no such event; did you mean 'on_epoch_ended'"),
        ({"sinks": [print]}, "a function belongs into callbacks"),
        ({"sinks": Kept()}, "sinks must be a list, and is a Kept"),
    ],
)
def test_a_wrong_callback_or_sink_is_refused_before_the_training(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(GrowthError, match=message):
        trained(run=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
