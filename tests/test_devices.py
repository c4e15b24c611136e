"""Recording of CUDA graphs: the order of calls with a stand-in for torch.cuda, and the values on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from esper.devices import GraphedCall, GraphRecorder
from esper.fleet.device import Repeater

CUDA = torch.device("cuda", 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class FakeCuda:
    """Stands in for the streams and graphs of torch.cuda, and notes every call in `calls`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake, self.calls = self, list[str]()

        class Stream:
            def __init__(self, device: torch.device, name: str = "recorder") -> None:
                self.device, self.name = device, name

            def wait_stream(self, other: Stream) -> None:
                fake.calls.append(f"{self.name} waits for {other.name}")

        class CUDAGraph:
            made = 0

            def __init__(self) -> None:
                CUDAGraph.made += 1
                self.number = CUDAGraph.made

            def capture_begin(self, pool: str | None, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                self.memory = pool or f"memory {self.number}"
                fake.calls.append(f"begin in {self.memory}")

            def capture_end(self) -> None:
                fake.calls.append("end")

            def pool(self) -> str:
                return self.memory

            def replay(self) -> None:
                fake.calls.append("replay")

        self.current, self.is_capturing = Stream(CUDA, "current"), False
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_the_stream_of_a_recorder_runs_after_the_current_one_which_waits_for_it(fake: FakeCuda) -> None:
    def fail() -> None:
        fake.calls.append(f"on {fake.current.name}")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), GraphRecorder(CUDA).stream():
        fail()
    assert fake.calls == ["recorder waits for current", "on recorder", "current waits for recorder"]


def test_a_recording_outside_of_the_stream_is_refused(fake: FakeCuda) -> None:
    with pytest.raises(AssertionError):
        GraphRecorder(CUDA).record(lambda: None)
    assert not fake.calls


@pytest.mark.parametrize(("reuse_memory", "second"), [(False, "memory 2"), (True, "memory 1")])
def test_a_recording_takes_over_the_memory_of_the_last_one_only_where_asked(fake: FakeCuda, reuse_memory: bool, second: str) -> None:
    recorder = GraphRecorder(CUDA, reuse_memory=reuse_memory)
    with recorder.stream():
        results = [recorder.record(lambda number=number: number)[1] for number in range(2)]
    assert results == [0, 1]
    assert fake.calls[1:-1] == ["begin in memory 1", "end", f"begin in {second}", "end"]


def test_a_failed_recording_is_ended_and_its_own_error_reported(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: object) -> None:
        fake.calls.append("end")
        raise RuntimeError("ending failed too")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", fail)
    recorder = GraphRecorder(CUDA)
    with pytest.raises(ZeroDivisionError), recorder.stream():
        recorder.record(lambda: 1 / 0)
    assert fake.calls[1:-1] == ["begin in memory 1", "end"]


def test_a_graphed_call_calls_at_first_then_records_and_then_replays_only(fake: FakeCuda) -> None:
    def step() -> int:
        fake.calls.append("step")
        return len(fake.calls)

    call = GraphedCall[int](CUDA)
    results = [call(step) for _ in range(4)]
    recorded = ["recorder waits for current", "begin in memory 1", "step", "end", "current waits for recorder"]
    assert fake.calls == ["step", *recorded, "replay", "replay", "replay"]
    assert results == [1, 4, 4, 4]


def test_a_graphed_call_is_part_of_the_graph_that_its_caller_records(fake: FakeCuda) -> None:
    call = GraphedCall[None](CUDA)
    for fake.is_capturing in (True, False, True, False, True):
        call(lambda: fake.calls.append("step"))
    assert [entry for entry in fake.calls if entry in ("step", "replay")] == ["step", "step", "step", "step", "replay", "step"]


def test_a_graphed_call_is_a_call_on_the_cpu() -> None:
    call, numbers = GraphedCall[int](torch.device("cpu")), iter(range(3))
    assert [call(lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]


def test_a_repeater_runs_the_first_step_records_the_second_and_replays_the_rest(fake: FakeCuda) -> None:
    repeat = Repeater(torch.device("cuda", 7))  # a device that no other test uses: its recorder is kept
    repeat(lambda: fake.calls.append("step"), 4)
    assert fake.calls[1:-1] == ["step", "begin in memory 1", "step", "end", "replay", "replay", "replay"]
    repeat(lambda: fake.calls.append("step"), 5)
    assert fake.calls[10:13] == ["step", "begin in memory 1", "step"]  # in the memory of the first recording
    assert repeat.recordings == 2


@pytest.mark.parametrize(("device", "count"), [("cpu", 5), ("cuda:6", 3)])
def test_a_repeater_calls_every_step_on_the_cpu_and_where_there_are_few(fake: FakeCuda, device: str, count: int) -> None:
    steps = []
    repeat = Repeater(torch.device(device))
    repeat(lambda: steps.append(1), count)
    assert (len(steps), fake.calls, repeat.recordings) == (count, [], 0)


@needs_cuda
def test_a_replay_reads_the_present_values_and_overwrites_the_result() -> None:
    recorder = GraphRecorder(CUDA)
    number = torch.ones(3, device=CUDA)
    with recorder.stream():
        number * 2
        graph, result = recorder.record(lambda: number * 2)
    for value in (5.0, 7.0):
        number.fill_(value)
        graph.replay()
        assert result.tolist() == [2 * value] * 3


@needs_cuda
def test_after_a_failed_recording_the_next_one_works() -> None:
    recorder = GraphRecorder(CUDA, reuse_memory=True)
    number = torch.ones((), device=CUDA)
    with pytest.raises(RuntimeError), recorder.stream():
        recorder.record(number.item)  # waits for the device, which a recording does not allow
    with recorder.stream():
        graph, _ = recorder.record(lambda: number.add_(1))
        graph.replay()
    assert number.item() == 2
