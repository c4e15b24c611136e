"""Devices: choose one, upload to it, measure time, record CUDA graphs, set threads and deterministic kernels for a block of code."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from esper.runs.folder import RunError

Result = TypeVar("Result")
Numbers = Tensor | Sequence[int] | Sequence[float] | Sequence[Sequence[float]]


def find_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device; "auto" is CUDA if it is available. Raise RunError for "cuda" if it is not available."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RunError("device 'cuda' was asked for, but torch finds no CUDA device; use device 'cpu' or 'auto'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def upload(values: Numbers, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values as a tensor on the device, without waiting for it.

    They go through pinned memory: a copy from pageable memory would wait for all kernels that are still queued.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    needs_pinning = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if needs_pinning else tensor).to(device, non_blocking=True)


class Stopwatch:
    """Measures the seconds between marks.

    On CUDA, a mark is an event in the device's current stream, which does not wait for the device. On other devices, a mark reads the clock
    of this process: on a CPU calls return when their work is done, and on others the caller has to wait for the device before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.has_events = device.type == "cuda"

    def mark(self) -> None:
        if self.has_events:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the time from each mark to the next. Waits until the device has reached the last mark."""
        if not self.has_events:
            return [after - before for before, after in pairwise(self._marks)]
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._marks)]


class GraphRecorder:
    """Records the kernels that a function launches as a CUDA graph, which launches them again without Python.

        recorder = GraphRecorder(device)
        with recorder.stream():
            step()                                # not recorded: it loads kernels, chooses algorithms and makes workspaces
            graph, result = recorder.record(step)
            graph.replay()                        # also possible after the block, on any stream

    The function must read and write only memory that stays where it is; a replay reads the values that are there by then and overwrites
    `result`. With `reuse_memory`, a recording takes over the memory of the one before it, which must not be replayed any more, nor its
    result be read. Without it, every recording has memory of its own for as long as its graph exists.
    """

    def __init__(self, device: torch.device, *, reuse_memory: bool = False) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reuse_memory = reuse_memory
        self._last: torch.cuda.CUDAGraph | None = None  # kept alive until the next recording has taken over its memory

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Launch kernels on the stream of the recorder: after those of the current stream, and before those that follow there."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, function: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Call the function, and return the graph of its kernels and its result. Call this inside `stream()`.

        The kernels have not run yet: the result is computed when the graph is replayed. `torch.cuda.graph` is not used because it first
        waits for the device and frees all cached memory.
        """
        assert torch.cuda.current_stream(self._stream.device) == self._stream
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=None if self._last is None else self._last.pool(), capture_error_mode="thread_local")
        try:
            result = function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # ending a failed recording may fail too; the first error is the one to report
                graph.capture_end()
            raise
        graph.capture_end()
        if self._reuse_memory:
            self._last = graph
        return graph, result


class GraphedCall(Generic[Result]):
    """A call that is made many times, such as a step of a simulation. On CUDA, it becomes the replay of a graph.

        step = GraphedCall(device)
        result = step(function)                   # calls the function
        result = step(function)                   # calls and records it, and replays the graph
        result = step(function)                   # replays the graph

    The first call is not recorded, because it may load kernels. All calls pass the same function, which obeys the rules of `GraphRecorder`:
    a replay overwrites `result`. On other devices, and while the caller records a graph of its own, the function is simply called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_ready = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result

    def __call__(self, function: Callable[[], Result]) -> Result:
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return function()
        if not self._is_ready:
            self._is_ready = True
            return function()
        if self._graph is None:
            recorder = GraphRecorder(self._device)
            with recorder.stream():
                self._graph, self._result = recorder.record(function)
        self._graph.replay()
        return self._result


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set the number of torch's threads inside the context. None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def determinism(is_on: bool) -> Iterator[None]:
    """Use deterministic kernels inside the context, so that the same run gives the same bits on a GPU; or let cuDNN search the fastest.

    With `is_on`, an operation without a deterministic kernel raises an error. Runs on the CPU are deterministic in any case.
    """
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_before = cudnn.benchmark, cudnn.deterministic
    if is_on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it on first use
        torch.use_deterministic_algorithms(True)
        cudnn.benchmark, cudnn.deterministic = False, True
    else:
        cudnn.benchmark = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark, cudnn.deterministic = cudnn_before
