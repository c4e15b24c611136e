"""Profile some steps of a training: a Chrome trace, and a table of the shares of time by part.

    profiler = Profiler(steps=10, folder=run, device=device)
    for batch in loader:
        with FORWARD:
            loss = ...
        profiler.step()          # after every step; begins after a warm-up and ends after `steps` more
    profiler.close()
    print(profiler.table())

The parts are marked in the code of all trainers. A mark costs about 0.1 µs while nothing is profiled. Parts may be nested: time belongs to
the innermost one. On CUDA, the profiler waits for the device whenever the part changes, so profiled steps are slower than others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from esper.files import check_in_run
from esper.text_table import aligned

WARMUP = 3  # steps before the first one that is profiled, in which caches fill and kernels are compiled
TRACE = Path("profile") / "trace.json.gz"  # in the run folder; chrome://tracing and Perfetto open it
_active: Profiler | None = None  # the one that is recording


class Part:
    """A mark around a part of a step: `with FORWARD: ...`. It does nothing unless a profiler is recording."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        if _active is not None:
            _active.enter(self.name)

    def __exit__(self, *_: object) -> None:
        if _active is not None:
            _active.leave()


FORWARD = Part("forward")
BACKWARD = Part("backward")
OPTIMIZER = Part("optimiser")
ENVIRONMENT = Part("environment")
TELEMETRY = Part("telemetry")
DATA_WAIT = Part("data wait")
OTHER = "other"
PARTS = (*(part.name for part in (FORWARD, BACKWARD, OPTIMIZER, ENVIRONMENT, TELEMETRY, DATA_WAIT)), OTHER)


class Profiler:
    """Profiles `steps` steps after a warm-up, and writes the trace into the run folder. `unit` is the name of a step in the table."""

    def __init__(self, steps: int, folder: Path, device: torch.device, *, unit: str = "step", warmup: int = WARMUP) -> None:
        assert steps > 0
        self.steps, self.folder, self.device, self.unit, self.warmup = steps, folder, device, unit, warmup
        self.profiled = 0  # steps
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._done = 0  # steps, with those of the warm-up
        self._profile: Any = None
        self._stack: list[tuple[str, Any]] = []  # open parts: name, record_function
        self._mark = 0.0

    def step(self) -> None:
        """Count a step; call it after every one, outside all parts."""
        self._done += 1
        if self._profile is not None:
            self.profiled += 1
        if self._done == self.warmup:
            self._start()
        elif self.profiled == self.steps:
            self.close()

    def _start(self) -> None:
        global _active
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        self._stack, self._mark, _active = [(OTHER, None)], self._now(), self

    def close(self) -> None:
        """Stop profiling and write the trace. Later calls do nothing."""
        global _active
        if self._profile is None:
            return
        self._turn()
        running, self._profile, _active = self._profile, None, None
        running.stop()
        path = self.folder / TRACE
        check_in_run(path, run=self.folder)
        path.parent.mkdir(exist_ok=True)
        running.export_chrome_trace(str(path))

    def enter(self, name: str) -> None:
        self._turn()
        label: Any = record_function(name)
        label.__enter__()
        self._stack.append((name, label))

    def leave(self) -> None:
        self._turn()
        _, label = self._stack.pop()
        label.__exit__(None, None, None)

    def _turn(self) -> None:
        """Add the time since the last change to the part that was running."""
        now = self._now()
        self.seconds[self._stack[-1][0]] += now - self._mark
        self._mark = now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def table(self) -> str:
        """Return the shares of time as a table, largest first."""
        if not self.profiled:
            return f"no {self.unit} was profiled: the first {self.warmup} are left out, and there were no more than that"
        total = sum(self.seconds.values())
        ordered = sorted(PARTS, key=lambda name: -self.seconds[name])
        rows = [(name, f"{self.seconds[name] / total:.1%}", f"{self.seconds[name] / self.profiled * 1e3:.2f}") for name in ordered]
        steps = f"{self.profiled} {self.unit}{'s' if self.profiled > 1 else ''}"
        shares = aligned([("part", "share", f"ms per {self.unit}"), *rows], numbers=True)
        return f"{shares}\n{steps} profiled; the trace is {self.folder / TRACE}"


@contextlib.contextmanager
def profiling(steps: int, folder: Path, device: torch.device) -> Iterator[Profiler | None]:
    """Yield a profiler, or None for 0 steps, and close it at the end of the block."""
    profiler = Profiler(steps, folder, device) if steps else None
    try:
        yield profiler
    finally:
        if profiler is not None:
            profiler.close()
