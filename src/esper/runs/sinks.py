"""Places other than the file that records go to: slow, optional, and never a reason for the run to wait or to end.

Scalars for TensorBoard.

Scalars for Weights & Biases: kept in the run folder, and sent only where that is asked for.

What was kept is sent later by W&B's own program: `wandb sync runs/maze-7/wandb/offline-run-*`.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from esper.files import printable
from esper.runs.events import Header, Record, scalars_of
from esper.runs.folder import RunError

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
            how = f"install it with: pip install 'esper-grow[{name}]', or do without it: {without} on the command line"
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


class TensorBoardSink:
    """Writes each finite number of each event at the record's step, named as `scalars_of` names it."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoard cannot be imported ({error}); install it with: pip install 'esper-grow[tensorboard]'"
            ) from error
        if printable(folder) != str(folder):
            raise RuntimeError(
                f"TensorBoard cannot write to {folder}: the name is not UTF-8; choose another folder, or do without TensorBoard"
            )
        _wait_for_a_later_name(Path(folder))
        self._writer: Any = SummaryWriter(str(folder))

    def restart(self, records: Iterable[Record]) -> None:
        """Hide what earlier sessions wrote, and write what is left of the run: some of theirs, at any step, was cut from its log."""
        self._hide()
        for record in records:
            self._write_scalars(record)

    def write(self, record: Record) -> None:
        if isinstance(record.event, Header):
            self._hide()
        self._write_scalars(record)

    def _write_scalars(self, record: Record) -> None:
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time)

    def _hide(self) -> None:
        """Hide all that earlier sessions wrote into the folder."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), 0)

    def close(self) -> None:
        self._writer.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait until the second of the newest file is over: TensorBoard reads files by name, and within a second a later one may come first."""
    seconds = {path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")}
    if str(int(time.time())) in seconds:
        time.sleep(1 - time.time() % 1)


WandbMode = Literal["offline", "online"]
STEP = "step"  # the metric that all others are plotted over


class WandbSink:
    """Writes each finite number of each event at the record's step, named as `scalars_of` names it, into `folder`/wandb.

    Offline nothing leaves this machine. A run that is resumed becomes another one of W&B's, in the group of the same name.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        run: str,
        mode: WandbMode = "offline",
        project: str = "esper",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in get_args(WandbMode):
            raise ValueError(f"the mode of Weights & Biases must be one of {get_args(WandbMode)}, not {mode!r}")
        if mode == "offline":
            # Its error reports go out by a way of their own, which the mode of a run does not close. Read when it is imported and started.
            os.environ["WANDB_ERROR_REPORTING"] = "false"
        try:
            from wandb import Error, Settings, init
        except ImportError as error:
            raise ImportError(f"Weights & Biases cannot be imported ({error}); install it with: pip install 'esper-grow[wandb]'") from error
        try:
            self._run: Any = init(
                dir=str(folder),
                project=project,
                name=run,
                group=run,
                mode=mode,
                config=dict(config or {}),
                reinit="create_new",  # leaves alone whatever else this process has going at W&B
                settings=Settings(**_settings(mode)),
            )
        except Error as error:
            raise RuntimeError(f"Weights & Biases does not start in mode {mode!r}: {error}") from error
        # Not W&B's own step, which must never fall: an evaluation belongs to the step of an earlier checkpoint.
        self._run.define_metric("*", step_metric=STEP)

    def write(self, record: Record) -> None:
        values = scalars_of(record)
        if values:
            self._run.log({STEP: record.step, **values})

    def close(self) -> None:
        self._run.finish()


def _settings(mode: WandbMode) -> dict[str, Any]:
    """Silent, and standard output stays as it is. Offline it does not look at the machine either: that may ask the network."""
    about_the_machine = ("x_disable_machine_info", "x_disable_meta", "x_disable_stats")
    quiet = {"silent": True, "console": "off", "disable_git": True, "disable_code": True}
    return quiet | {name: mode == "offline" for name in about_the_machine}
