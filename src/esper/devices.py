"""What is computed on: the device that was asked for, whether reading from it waits, the number of threads, and whether a run repeats
itself bit for bit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import torch

from esper.runs.folder import RunError


def find_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RunError("device 'cuda' was asked for, and torch finds none here; use device 'cpu' or 'auto'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def reading_waits(tensor: torch.Tensor) -> bool:
    """Whether a look at its values waits for a device to be done with all that it was asked to compute."""
    return tensor.device.type != "cpu"


class Stopwatch:
    """Seconds between marks.

    On CUDA a mark is an event in the device's current stream: it waits for nothing, and work that was asked for before it counts before it.
    On other devices the marks are those of this process's clock, which is the same where calls return when their work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the time from each mark to the next. Waits for the device to reach the last one."""
        if self._device.type != "cuda":
            return [after - before for before, after in pairwise(self._marks)]
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._marks)]


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """For a while, torch computes on so many threads; None: on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def determinism(is_on: bool) -> Iterator[None]:
    """For a while, the same run gives the same bits on a GPU too; where it is off, cuDNN tries its kernels and takes the fastest.

    On the CPU runs repeat themselves in any case. An operation that has no deterministic kernel raises an error where this is on.
    """
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_before = cudnn.benchmark, cudnn.deterministic
    if is_on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
        cudnn.benchmark, cudnn.deterministic = False, True
    else:
        cudnn.benchmark = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark, cudnn.deterministic = cudnn_before
