"""Numbers on their way to the device.

What is read from the device: everything of one decision at once.

The same step many times, without a word to the device in between.

On a GPU the second step is recorded as a CUDA graph and the others replay it: a step of many small kernels takes as long as they compute,
not as long as Python takes to launch them. A recording holds for one formation of seeds and costs about as much as a step does without it,
so it is made anew for every stretch of steps, and nothing has to be compiled or kept.

What holds while a fleet computes on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

import torch
from torch import Tensor

Numbers = Tensor | Sequence[int] | Sequence[float] | Sequence[Sequence[float]]


def upload(values: Numbers, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Does not wait for the device: a copy from ordinary memory would wait for all that is still to be computed there."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    needs_pinning = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if needs_pinning else tensor).to(device, non_blocking=True)


class Reading:
    """Tensors are gathered by name and read in one transfer, as float64: losses and norms lose nothing.

    >>> reading = Reading()
    >>> reading.add("losses", torch.tensor([[1.0], [2.0]]))
    >>> reading.add("finite", torch.tensor([True]))
    >>> reading.read()["losses"].tolist()
    [[1.0], [2.0]]
    """

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        assert name not in self._parts
        self._parts[name] = values.detach()

    def read(self) -> dict[str, Tensor]:
        flat = torch.cat([part.reshape(-1).double() for part in self._parts.values()]).cpu()
        sizes = [part.numel() for part in self._parts.values()]
        return {
            name: values.view(part.shape) for (name, part), values in zip(self._parts.items(), flat.split_with_sizes(sizes), strict=True)
        }


_WORTH_RECORDING = 4  # steps

Step = Callable[[], None]  # takes all it needs from tensors that stay where they are, and leaves all it does in such


class Repeater:
    def __init__(self, device: torch.device, *, records: bool = True) -> None:
        self._recorder = _recorder(device) if records and device.type == "cuda" else None
        self.recordings = 0  # so far

    def records(self, count: int) -> bool:
        """Whether so many steps are recorded."""
        return self._recorder is not None and count >= _WORTH_RECORDING

    def __call__(self, step: Step, count: int) -> None:
        if self._recorder is None or not self.records(count):
            for _ in range(count):
                step()
        else:
            self._recorder.run(step, count)
            self.recordings += 1


class _Recorder:
    """All recordings on one device share one stream, and so the memory of their steps: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.CUDAGraph | None = None  # alive until the next one has its memory

    def run(self, step: Step, count: int) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                step()  # what is loaded or chosen at its first use must be so before it is recorded
                graph = self._record(step)
                for _ in range(count - 1):
                    graph.replay()
        finally:
            current.wait_stream(self._stream)

    def _record(self, step: Step) -> torch.cuda.CUDAGraph:
        """Not by `torch.cuda.graph`, which waits for the device and collects garbage first."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=None if self._last is None else self._last.pool(), capture_error_mode="thread_local")
        try:
            step()
        except BaseException:
            with suppress(RuntimeError):  # a recording that has failed may not be ended, and why it failed is the news
                graph.capture_end()
            raise
        graph.capture_end()
        self._last = graph
        return graph


@cache
def _recorder(device: torch.device) -> _Recorder:
    return _Recorder(device)


@contextmanager
def on_gpu(device: torch.device) -> Iterator[None]:
    """Kernels of our own are launched on this device, and convolutions in float32 keep all its digits.

    By default cuDNN rounds their inputs to TF32, with three digits; who wants that speed has more of it in bfloat16.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
