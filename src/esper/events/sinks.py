"""Places other than the file that records go to: slow, optional, and never a reason for the run to wait or to end."""

from __future__ import annotations

import importlib.util
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from esper.events.event import Record
from esper.events.tensorboard import TensorBoardSink
from esper.events.wandb import WandbMode, WandbSink
from esper.files import printable
from esper.run_folder import RunError

SINK_FOLDERS = ("tensorboard", "wandb")  # that they make in a run folder


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Restartable(Protocol):
    """A sink that shows one run from several sessions, and has to forget what was cut from its log when the run goes on."""

    def restart(self, records: Iterable[Record]) -> None:
        """Show these records, and nothing else of earlier sessions."""


class Queued:
    """A sink behind a bounded queue and a thread of its own, which alone calls the sink.

    `write` never waits: when `capacity` records are waiting, the new one is dropped and counted. A sink that raises is switched off:
    `on_failure` is called once, from the thread, and nothing more is written.
    """

    def __init__(self, sink: Sink, capacity: int = 4096, *, on_failure: Callable[[Exception], None] | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a queue must be at least 1, not {capacity}")
        self.name = type(sink).__name__
        self.on_failure = on_failure
        self._sink = sink
        self._capacity = capacity
        self._waiting: deque[Record] = deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._is_closing = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=f"esper-sink-{self.name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records that found the queue full, or were still in it when `close` lost patience."""
        return self._dropped

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def write(self, record: Record) -> None:
        with self._changed:
            if self._has_failed or self._is_closing:
                return
            if len(self._waiting) >= self._capacity:
                self._dropped += 1
                return
            self._waiting.append(record)
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """Lets the sink finish what waits, for at most `timeout_s`, and closes it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            self._dropped += len(self._waiting)
            self._waiting.clear()

    def _run(self) -> None:
        try:
            while (record := self._next()) is not None:
                self._sink.write(record)
        except Exception as error:
            self._fail(error)
        try:
            self._sink.close()
        except Exception as error:
            self._fail(error)

    def _next(self) -> Record | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.popleft() if self._waiting else None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            is_first, self._has_failed = not self._has_failed, True
            self._waiting.clear()
        if is_first and self.on_failure is not None:
            self.on_failure(error)


def check_installed(*, tensorboard: bool, wandb: WandbMode | None) -> None:
    """Raise RunError where a package is missing. Each name is that of a package and of the extra that brings it."""
    for name, is_wanted, without in (("tensorboard", tensorboard, "--no-tensorboard"), ("wandb", wandb, "--wandb None")):
        if is_wanted and importlib.util.find_spec(name) is None:
            how = f"install it with: pip install 'esper[{name}]', or do without it: {without} on the command line"
            raise RunError(f"{name} was asked for and is not installed; {how}")


def sinks_in(folder: Path, *, tensorboard: bool, wandb: WandbMode | None, config: Mapping[str, Any], run: str | None = None) -> list[Sink]:
    """Open the sinks of a run, which write into its folder. `run` is the name that W&B shows, by default that of the folder."""
    sinks: list[Sink] = []
    try:
        if tensorboard:
            sinks.append(TensorBoardSink(folder / SINK_FOLDERS[0]))
        if wandb is not None:
            sinks.append(WandbSink(folder, run=printable(run or folder.name), mode=wandb, config=config))
    except RuntimeError as error:
        for sink in sinks:
            sink.close()
        raise RunError(str(error)) from error
    return sinks
