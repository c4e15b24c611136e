"""Keep a GPU busy: read from it once per decision, and replay training steps as CUDA graphs.

`Repeater` runs a training step many times. On a GPU it records the second step as a CUDA graph and replays it for the rest, so that a step
of many small kernels takes as long as they compute, not as long as Python takes to launch them. A recording is valid for one set of seeds
and takes about as long as an ordinary step. It is therefore made anew for every training segment, and nothing is compiled or kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from esper.devices import GraphRecorder


class Reading:
    """Named tensors that are read from the device in one transfer, as float64, so that losses and norms lose no digits.

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
        """Return all added tensors on the CPU. Waits for the device."""
        flat = torch.cat([part.reshape(-1).double() for part in self._parts.values()]).cpu()
        sizes = [part.numel() for part in self._parts.values()]
        return {
            name: values.view(part.shape) for (name, part), values in zip(self._parts.items(), flat.split_with_sizes(sizes), strict=True)
        }


_WORTH_RECORDING = 4  # least number of steps for which a recording pays

Step = Callable[[], None]  # reads and writes only tensors that stay at the same address


class Repeater:
    """Runs a step many times; on a GPU, with `records`, as a CUDA graph."""

    def __init__(self, device: torch.device, *, records: bool = True) -> None:
        self._recorder = _recorder(device) if records and device.type == "cuda" else None
        self.recordings = 0  # number of CUDA graphs recorded so far

    def records(self, count: int) -> bool:
        """Return whether `count` steps would be recorded."""
        return self._recorder is not None and count >= _WORTH_RECORDING

    def __call__(self, step: Step, count: int) -> None:
        """Run the step `count` times."""
        if self._recorder is None or not self.records(count):
            for _ in range(count):
                step()
            return
        with self._recorder.stream():
            step()  # the first step is not recorded: kernels are loaded and algorithms chosen at their first use
            graph, _ = self._recorder.record(step)
            for _ in range(count - 1):
                graph.replay()
        self.recordings += 1


@cache
def _recorder(device: torch.device) -> GraphRecorder:
    """Return the recorder of all fleets on a device. Its recordings share one memory pool, since no two are replayed in turns."""
    return GraphRecorder(device, reuse_memory=True)


@contextmanager
def on_gpu(device: torch.device) -> Iterator[None]:
    """Launch Triton kernels on this device, and compute float32 convolutions without TF32.

    By default cuDNN rounds the inputs of convolutions to TF32, which has three decimal digits. Where that is enough, bfloat16 is faster.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
