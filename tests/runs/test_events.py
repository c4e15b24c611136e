"""The event log: emitted events are read back after any crash, and no sink can stop the run."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import esper
from esper.runs import SCHEMA, Event, EventError, EventLog, EventRecord, Header, Queued, Reader, Resumed, SinkDropped, SinkFailed, read
from esper.runs.foreign import clean
from tests.commands import shown_in_tensorboard


class UpdateDone(Event, tag="test_update"):
    step: int
    loss: float
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    label: str | None = None


class StepTaken(Event, tag="test_step"):
    reward: float = 0.0


class Collected:
    """A sink that keeps what it gets; it waits at the gate before each record, and breaks on demand."""

    def __init__(self, *, breaks_at: int | None = None) -> None:
        self.records: list[EventRecord] = []
        self.gate = threading.Event()
        self.gate.set()
        self.breaks_at = breaks_at
        self.is_closed = False

    def write(self, record: EventRecord) -> None:
        self.gate.wait(10)
        if len(self.records) == self.breaks_at:
            raise RuntimeError("the cable is loose")
        self.records.append(record)

    def close(self) -> None:
        self.is_closed = True


class Leaky(Collected):
    def close(self) -> None:
        super().close()
        raise OSError("cannot close")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events.jsonl"


def events_in(path: Path) -> list[Event]:
    return [record.event for record in read(path)]


def test_emitted_events_are_read_back_with_their_stamp(path: Path) -> None:
    with EventLog(path, "maze-7", rank=2) as log:
        log.emit(UpdateDone(step=3, loss=0.1, parts={"value": 1e-300}, env=5))
    header, record = read(path)
    assert header.event == Header(schema=SCHEMA, esper=esper.__version__)
    assert record.event == UpdateDone(step=3, loss=0.1, parts={"value": 1e-300}, env=5)
    assert (record.run, record.rank, record.env, record.kind) == ("maze-7", 2, 5, "test_update")
    assert record.time >= header.time > 1.6e9


def test_every_line_names_kind_time_run_rank_env_and_step_first(path: Path) -> None:
    with EventLog(path, "maze-7") as log:
        log.emit(StepTaken(reward=1.0))
    for line in path.read_text().splitlines():
        assert list(json.loads(line))[:6] == ["kind", "time", "run", "rank", "env", "step"]


TEXTS = st.text().map(clean)  # what steers a terminal is read as an escape


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(loss=st.floats(), parts=st.dictionaries(TEXTS, st.floats()), label=st.none() | TEXTS | st.sampled_from(["nan", "inf", "null"]))
def test_any_float_and_any_text_survive_the_file(
    tmp_path_factory: pytest.TempPathFactory, loss: float, parts: dict[str, float], label: str | None
) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    event = UpdateDone(step=1, loss=loss, parts=parts, label=label)
    with EventLog(path, "run") as log:
        log.emit(event)
    assert repr(events_in(path)[1]) == repr(event)  # repr, because nan is not equal to itself


def test_lines_with_nan_are_strict_json(path: Path) -> None:
    with EventLog(path, "run") as log:
        log.emit(UpdateDone(step=1, loss=math.nan, parts={"a": -math.inf}))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = json.loads(path.read_text().splitlines()[1], parse_constant=refuse)
    assert (line["loss"], line["parts"]) == ("nan", {"a": "-inf"})


def test_two_classes_cannot_share_a_tag() -> None:
    with pytest.raises(EventError, match=r"test_two.*Impostor and .*UpdateDone both have the tag 'test_update'"):

        class Impostor(Event, tag="test_update"):
            pass


def test_a_field_cannot_hide_the_stamp() -> None:
    with pytest.raises(EventError, match="'rank', 'time'"):

        class Clock(Event, tag="test_clock"):
            time: float
            rank: int


def test_events_are_frozen() -> None:
    with pytest.raises(AttributeError):
        UpdateDone(step=1, loss=0.0).step = 2


@pytest.mark.parametrize("wrong", [UpdateDone(step=1.5, loss=0.0), UpdateDone(step=1, loss=object()), UpdateDone(step=None, loss=0.0)])  # type: ignore[arg-type]
def test_an_event_that_cannot_be_read_back_raises_when_emitted(path: Path, wrong: Event) -> None:
    with EventLog(path, "run") as log:
        with pytest.raises(EventError, match="cannot be written"):
            log.emit(wrong)
        log.emit(StepTaken())
    assert events_in(path)[1:] == [StepTaken()]


def test_a_huge_event_is_refused(path: Path) -> None:
    with EventLog(path, "run") as log, pytest.raises(EventError, match="a line at most 65536"):
        log.emit(UpdateDone(step=1, loss=0.0, label="x" * 70_000))
    assert len(events_in(path)) == 1


def test_lines_of_many_threads_stay_whole_and_complete(path: Path) -> None:
    with EventLog(path, "run") as log:

        def work(worker: int) -> None:
            for step in range(200):
                log.emit(UpdateDone(step=step, loss=0.0, env=worker))
                if step % 50 == 0:
                    log.flush(sync=False)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [(event.env, event.step) for event in events_in(path) if isinstance(event, UpdateDone)]
    assert sorted(found) == [(worker, step) for worker in range(4) for step in range(200)]
    for worker in range(4):
        assert [step for env, step in found if env == worker] == list(range(200))


@pytest.mark.slow
def test_events_reach_the_file_within_seconds_without_a_flush(path: Path) -> None:
    with EventLog(path, "run") as log:
        log.emit(StepTaken())
        assert len(events_in(path)) == 1
        for _ in range(100):
            if len(events_in(path)) == 2:
                break
            threading.Event().wait(0.1)
        assert len(events_in(path)) == 2


def test_an_exit_without_close_loses_nothing(path: Path) -> None:
    program = "import sys; from esper.runs import *; log = EventLog(sys.argv[1], 'run'); log.emit(Resumed(offset=1, esper='x'))"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert events_in(path)[1:] == [Resumed(offset=1, esper="x")]


def test_a_full_disk_raises_at_the_flush_and_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with EventLog(path, "run") as log:
        log.emit(StepTaken(reward=1.0))

        def full(descriptor: int, data: bytearray) -> int:
            if len(data) <= 10:
                raise OSError(28, "No space left on device")
            return real(descriptor, data[:10])

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space"):
                log.flush()
        log.emit(StepTaken(reward=2.0))
    assert events_in(path)[1:] == [StepTaken(reward=1.0), StepTaken(reward=2.0)]


def test_a_write_that_fails_after_a_half_leaves_no_broken_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with EventLog(path, "run") as log:
        log.emit(StepTaken(reward=1.0))

        def half(descriptor: int, data: bytearray) -> int:
            real(descriptor, data[: len(data) // 2])
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            with pytest.raises(OSError, match="Input/output"):
                log.flush()
        log.emit(StepTaken(reward=2.0))
        assert log.offset() == path.stat().st_size
    assert events_in(path)[1:] == [StepTaken(reward=1.0), StepTaken(reward=2.0)]


def test_an_existing_log_is_never_overwritten(path: Path) -> None:
    EventLog(path, "run").close()
    with pytest.raises(FileExistsError, match=r"EventLog\.resume"):
        EventLog(path, "run")


def test_emitting_after_close_is_an_error_and_closing_twice_is_not(path: Path) -> None:
    log = EventLog(path, "run")
    log.close()
    log.close()
    with pytest.raises(EventError, match="closed"):
        log.emit(StepTaken())


def test_resuming_cuts_what_followed_the_offset(path: Path) -> None:
    with EventLog(path, "maze-7", rank=1) as log:
        log.emit(UpdateDone(step=1, loss=0.0))
        offset = log.offset()
        assert offset == path.stat().st_size
        log.emit(UpdateDone(step=2, loss=0.0))
    with EventLog.resume(path, offset) as log:
        assert (log.run, log.rank) == ("maze-7", 1)
        log.emit(UpdateDone(step=2, loss=9.0))
        second = log.offset()
    assert events_in(path)[1:] == [
        UpdateDone(step=1, loss=0.0),
        Resumed(offset=offset, esper=esper.__version__),
        UpdateDone(step=2, loss=9.0),
    ]
    assert second == path.stat().st_size


def test_resuming_at_zero_keeps_the_header_alone(path: Path) -> None:
    with EventLog(path, "run") as log:
        log.emit(StepTaken())
    EventLog.resume(path, 0).close()
    assert [type(event) for event in events_in(path)] == [Header, Resumed]


@pytest.mark.parametrize(("offset", "message"), [(10**6, "it has only"), (7, "no line ends there"), (-3, "no line ends there")])
def test_resuming_at_an_impossible_offset_changes_nothing(path: Path, offset: int, message: str) -> None:
    with EventLog(path, "run") as log:
        log.emit(StepTaken())
    before = path.read_bytes()
    with pytest.raises(EventError, match=message):
        EventLog.resume(path, offset)
    assert path.read_bytes() == before


def test_a_torn_last_line_is_survived_by_reading_and_by_resuming(path: Path) -> None:
    with EventLog(path, "run") as log:
        log.emit(StepTaken())
        offset = log.offset()
        log.emit(UpdateDone(step=1, loss=0.0))
    whole = path.read_bytes()
    for length in range(offset, len(whole)):
        path.write_bytes(whole[:length])
        assert len(events_in(path)) == 2
    EventLog.resume(path, offset).close()
    assert [type(event) for event in events_in(path)] == [Header, StepTaken, Resumed]


def test_garbage_at_the_end_of_the_file_counts_as_a_torn_line(path: Path) -> None:
    EventLog(path, "run").close()
    with open(path, "ab") as file:
        file.write(b"\0\0\xff\0\n")
    assert len(events_in(path)) == 1


def test_a_broken_line_in_the_middle_is_named(path: Path) -> None:
    with EventLog(path, "run") as log:
        log.emit(StepTaken())
        log.emit(StepTaken())
    header, first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + first[:20] + b"\n" + second)
    with pytest.raises(EventError, match=r"line 2 of .* is broken"):
        events_in(path)


def test_a_line_that_does_not_fit_its_kind_is_dropped_and_counted(path: Path) -> None:
    EventLog(path, "run").close()
    append(path, kind="test_update", step=1)
    append(path, kind="test_update", step=2, loss=0.5)
    reader = Reader(path)
    assert [record.event for record in reader][1:] == [UpdateDone(step=2, loss=0.5)]
    assert reader.skipped == {"test_update": 1}


def append(path: Path, **fields: object) -> None:
    with open(path, "a") as file:
        file.write(json.dumps({"time": 1.0, "run": "run", "rank": 0, "env": None} | fields) + "\n")


def test_unknown_kinds_are_skipped_and_counted_and_unknown_fields_ignored(path: Path) -> None:
    EventLog(path, "run").close()
    append(path, kind="from_the_future", magic=3)
    append(path, kind="test_update", step=1, loss=0.5, colour="red")
    append(path, kind="test_step")
    append(path, kind="from_the_future")
    reader = Reader(path)
    for _ in range(2):
        assert [record.event for record in reader][1:] == [UpdateDone(step=1, loss=0.5), StepTaken(reward=0.0)]
        assert reader.skipped == {"from_the_future": 2}


def test_a_log_of_a_newer_schema_is_refused(path: Path) -> None:
    EventLog(path, "run").close()
    path.write_text(path.read_text().replace(f'"schema":{SCHEMA}', f'"schema":{SCHEMA + 1}'))
    for attempt in (lambda: events_in(path), lambda: EventLog.resume(path, 0)):
        with pytest.raises(EventError, match="newer esper"):
            attempt()


@pytest.mark.parametrize("content", [b"", b'{"kind":"head', b"step,loss\n1,2\n", b'{"kind":"test_step","time":1,"run":"a","rank":0}\n'])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    with pytest.raises(EventError, match="header"):
        events_in(path)


def test_sinks_get_every_record_and_are_closed(path: Path) -> None:
    sinks = [Collected(), Collected()]
    with EventLog(path, "run", sinks=[sinks[0], Queued(sinks[1], 100)]) as log:
        for step in range(50):
            log.emit(UpdateDone(step=step, loss=0.0))
    for sink in sinks:
        assert sink.records == list(read(path))
        assert sink.is_closed


def test_a_slow_sink_drops_and_counts_events_while_the_file_keeps_all(path: Path) -> None:
    slow = Collected()
    slow.gate.clear()
    queued = Queued(slow, 5)
    log = EventLog(path, "run", sinks=[queued])
    for step in range(100):
        log.emit(UpdateDone(step=step, loss=0.0))
    assert queued.dropped in (95, 96)  # 101 records; one may have left the queue for the sink
    slow.gate.set()
    log.close()
    events = events_in(path)
    assert len([event for event in events if isinstance(event, UpdateDone)]) == 100
    assert events[-1] == SinkDropped(sink="Collected", dropped=queued.dropped)
    assert len(slow.records) + queued.dropped == 101


def test_a_hanging_sink_does_not_keep_the_run_from_ending() -> None:
    hanging = Collected()
    hanging.gate.clear()
    queued = Queued(hanging, 5)
    for _ in range(3):
        queued.write(EventRecord(time=0.0, run="run", rank=0, event=StepTaken()))
    queued.close(timeout_s=0.05)
    assert queued.dropped in (2, 3)
    hanging.gate.set()


def test_a_sink_that_raises_is_reported_once_and_switched_off(path: Path) -> None:
    broken, healthy = Leaky(breaks_at=2), Collected()
    with EventLog(path, "run", sinks=[broken, healthy]) as log:
        for step in range(20):
            log.emit(UpdateDone(step=step, loss=0.0))
    events = events_in(path)
    assert [event for event in events if isinstance(event, SinkFailed)] == [
        SinkFailed(sink="Leaky", error="RuntimeError: the cable is loose")
    ]
    assert len(broken.records) == 2
    assert broken.is_closed
    assert len([record for record in healthy.records if isinstance(record.event, UpdateDone)]) == 20


def test_a_sink_that_fails_on_closing_is_reported(path: Path) -> None:
    with EventLog(path, "run", sinks=[Leaky()]):
        pass
    assert events_in(path)[1:] == [SinkFailed(sink="Leaky", error="OSError: cannot close")]


def test_events_import_without_torch_or_numpy() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, numpy=None, safetensors=None, tensorboard=None, wandb=None); import esper.runs.events"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from esper.runs import TensorBoardSink

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"esper-grow\[tensorboard\]"):
        TensorBoardSink(tmp_path)


class HostTrained(Event, tag="test_host_trained"):
    epoch: int
    loss: float


def test_an_event_without_a_step_of_its_own_gets_the_latest_one(path: Path) -> None:
    with EventLog(path, "run") as log:
        log.emit(StepTaken(reward=1.0))
        log.emit(UpdateDone(step=10, loss=0.5))
        log.emit(StepTaken(reward=2.0))
        log.emit(HostTrained(epoch=12, loss=0.25))
        log.emit(StepTaken(reward=3.0))
    assert [record.step for record in read(path)] == [0, 0, 10, 10, 12, 12]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 0, 10, 10, 12, 12]


def test_the_clock_of_a_log_gives_the_step_of_events_that_have_none(path: Path) -> None:
    with EventLog(path, "run") as log:
        log.clock = lambda: 700
        log.emit(HostTrained(epoch=3, loss=0.25, env=5))  # the epoch is that of one host among many
        log.emit(UpdateDone(step=650, loss=0.5))
    assert [(record.step, record.env) for record in read(path)][1:] == [(700, 5), (650, None)]


def test_a_resumed_log_goes_on_counting_steps_where_the_checkpoint_was(path: Path) -> None:
    with EventLog(path, "run") as log:
        log.emit(UpdateDone(step=10, loss=0.5))
        offset = log.offset()
    with EventLog.resume(path, offset, step=10) as log:
        log.emit(StepTaken(reward=1.0))
    assert [record.step for record in read(path)] == [0, 10, 10, 10]


def test_a_line_of_the_format_without_steps_is_read(path: Path) -> None:
    with EventLog(path, "run"):
        pass
    with open(path, "a") as file:
        file.write(json.dumps({"kind": "test_step", "time": 1.0, "run": "run", "rank": 0, "env": None, "reward": 2.0}) + "\n")
    *_, last = read(path)
    assert (last.step, last.event) == (None, StepTaken(reward=2.0))


def test_events_of_other_ranks_keep_their_rank_time_and_step(path: Path) -> None:
    with EventLog(path, "run") as log:
        log.emit(StepTaken(reward=2.0), rank=3, time=5.0, step=64)
    *_, record = read(path)
    assert (record.run, record.rank, record.time, record.step) == ("run", 3, 5.0, 64)


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own imports
def test_tensorboard_gets_the_finite_numbers_of_every_event_by_rank_and_environment(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from esper.runs import TensorBoardSink

    with EventLog(tmp_path / "events.jsonl", "run", sinks=[TensorBoardSink(tmp_path / "board")]) as log:
        log.emit(UpdateDone(step=10, loss=0.5, label="text", parts={"value": 2.0, "policy": math.inf}))
        log.emit(StepTaken(reward=3.0))
        log.emit(UpdateDone(step=20, loss=math.nan))
        log.emit(UpdateDone(step=30, loss=0.25))
        log.emit(StepTaken(reward=4.0, env=7), rank=1)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    shown = {name: [(scalar.step, scalar.value) for scalar in board.Scalars(name)] for name in board.Tags()["scalars"]}
    assert shown == {
        "test_update/loss": [(10, 0.5), (30, 0.25)],
        "test_update/parts/value": [(10, 2.0)],
        "test_step/reward": [(10, 3.0)],
        "rank1/env7/test_step/reward": [(30, 4.0)],
    }
    assert not any(isinstance(event, SinkFailed) for event in events_in(tmp_path / "events.jsonl"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TensorBoard's own imports
def test_the_file_of_a_later_session_is_read_last_by_tensorboard_even_within_a_second(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from esper.runs import TensorBoardSink

    earlier = tmp_path / f"events.out.tfevents.{int(time.time())}.zzz.1.9"
    earlier.touch()
    TensorBoardSink(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir())[0] == earlier.name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TensorBoard's own imports
def test_tensorboard_hides_what_a_resumed_run_has_cut(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from esper.runs import TensorBoardSink

    path, board = tmp_path / "events.jsonl", tmp_path / "tensorboard"
    with EventLog(path, "run", sinks=[TensorBoardSink(board)]) as log:
        log.emit(UpdateDone(step=10, loss=1.0))
        offset = log.offset()
        log.emit(UpdateDone(step=20, loss=2.0))
    with EventLog.resume(path, offset, step=10, sinks=[TensorBoardSink(board)]) as log:
        log.emit(UpdateDone(step=20, loss=3.0))
    assert shown_in_tensorboard(tmp_path)["test_update/loss"] == [(10, 1.0), (20, 3.0)]
    path.unlink()
    with EventLog(path, "run", sinks=[TensorBoardSink(board)]) as log:  # from the start
        log.emit(UpdateDone(step=10, loss=4.0))
    assert shown_in_tensorboard(tmp_path)["test_update/loss"] == [(10, 4.0)]


def test_a_disk_still_full_at_exit_gives_a_warning_without_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, content: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    at_exit: list[Callable[[], None]] = []
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr("esper.runs.log.atexit.register", at_exit.append)
    with monkeypatch.context() as patch:
        patch.setattr("esper.runs.log.os.write", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*events\.jsonl'"):
            EventLog(path, run="a")
        at_exit[0]()
    assert [record.message for record in caplog.records][-1:] == [f"the last events of {path} are lost: the disk is full ({path})"]


def test_a_log_that_was_removed_or_replaced_during_the_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, run="a") as log:
        log.offset()
        path.rename(tmp_path / "renamed")
        with pytest.raises(FileNotFoundError):
            log.offset()
        path.write_bytes((tmp_path / "renamed").read_bytes())
        with pytest.raises(FileNotFoundError, match="it was replaced during the run"):
            log.offset()
