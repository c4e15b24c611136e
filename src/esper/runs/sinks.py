"""Sinks: TensorBoard, Weights & Biases and others that get a copy of every event. They are optional and may be slow.

Each sink has a bounded queue and a thread (`Queued`), so a slow or failing sink neither delays nor ends the run.

By default W&B writes into the run folder and sends nothing. Send it later with W&B's program: `wandb sync runs/maze-7/wandb/offline-run-*`.

A resumed run goes on in the same TensorBoard folder and in the same W&B run, whose id is kept in the run folder. Events that were cut from
the log because they were after the checkpoint happen again, and are shown once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from esper.files import MAX_CONFIG_BYTES, FileError, check_in_run, printable, read_in_run, write_in_run
from esper.runs.events import EventRecord, Header, scalars_of
from esper.runs.folder import RunError

SINK_FOLDERS = ("tensorboard", "wandb")  # folders that the sinks make in a run folder
WandbMode = Literal["offline", "online"]
STEP = "step"  # metric of W&B's x-axis
WANDB_ID = "esper-run-id"  # file with the id of the W&B run, in its folder


class Sink(Protocol):
    """Something that records are written to besides the log."""

    def write(self, record: EventRecord) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Restartable(Protocol):
    """A sink that shows all sessions of a run as one. When a run is resumed, it must not show those twice that were cut from the log."""

    def restart(self, records: Iterable[EventRecord], *, cut: Iterable[EventRecord]) -> None:
        """Show these records, which are left in the log, and nothing else of earlier sessions. `cut` are those that were cut from it."""


class Queued:
    """A sink behind a bounded queue. A separate thread makes all calls to the sink.

    `write` never waits: if `capacity` records are in the queue, the new one is dropped and counted. If the sink raises an error, it is
    switched off: `on_failure` is called once, in that thread, and nothing more is written.
    """

    def __init__(self, sink: Sink, capacity: int = 4096, *, on_failure: Callable[[Exception], None] | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a queue must be at least 1, not {capacity}")
        self.name = type(sink).__name__
        self.on_failure = on_failure
        self._sink = sink
        self._capacity = capacity
        self._waiting: deque[EventRecord] = deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._is_closing = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=f"esper-sink-{self.name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of records that were dropped because the queue was full, or that were still in it when `close` timed out."""
        return self._dropped

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def write(self, record: EventRecord) -> None:
        with self._changed:
            if self._has_failed or self._is_closing:
                return
            if len(self._waiting) >= self._capacity:
                self._dropped += 1
                return
            self._waiting.append(record)
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait at most `timeout_s` until the queue is written and the sink is closed."""
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

    def _next(self) -> EventRecord | None:
        """Wait for a record and return it; None when the sink is closing and the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.popleft() if self._waiting else None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            is_first, self._has_failed = not self._has_failed, True
            self._waiting.clear()
        if is_first and self.on_failure is not None:
            self.on_failure(error)


class TensorBoardSink:
    """Writes the numbers of every event (`scalars_of`) to TensorBoard at the step of the record."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoard cannot be imported ({error}); install it with: pip install 'esper-grow[tensorboard]'"
            ) from error
        if printable(folder) != str(folder):
            raise RuntimeError(
                f"TensorBoard cannot write to {folder}: the name is not UTF-8; choose another folder, or run without TensorBoard"
            )
        _wait_for_a_later_name(Path(folder))
        self._writer: Any = SummaryWriter(str(folder))

    def restart(self, records: Iterable[EventRecord], *, cut: Iterable[EventRecord] = ()) -> None:
        """Hide everything that earlier sessions wrote, and write the records that are left in the log."""
        self._hide()
        for record in records:
            self._write_scalars(record)

    def write(self, record: EventRecord) -> None:
        if isinstance(record.event, Header):
            self._hide()
        self._write_scalars(record)

    def _write_scalars(self, record: EventRecord) -> None:
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time)

    def _hide(self) -> None:
        """Write a session start at step 0, which makes TensorBoard hide everything written before."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), 0)

    def close(self) -> None:
        self._writer.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait for the next second if a file was made in this one.

    TensorBoard reads files in the order of their names, which contain the second. Within one second the order may be wrong.
    """
    seconds = {path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")}
    if str(int(time.time())) in seconds:
        time.sleep(1 - time.time() % 1)


class WandbSink:
    """Writes the numbers of every event (`scalars_of`) at the step of the record into `folder`/wandb.

    In mode "offline" nothing leaves this machine. The id of the W&B run is kept in `folder`/wandb. When a run is resumed offline, its
    records are written again as one W&B run of the same id, and the folder of the earlier session is removed. Online, W&B goes on with the
    run, and records that it has already, because they were cut from the log, are left out.
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
            # W&B sends its error reports even in offline mode. It reads this variable when it is imported, so set it before.
            os.environ["WANDB_ERROR_REPORTING"] = "false"
        try:
            from wandb import Error, Settings, init
        except ImportError as error:
            raise ImportError(f"Weights & Biases cannot be imported ({error}); install it with: pip install 'esper-grow[wandb]'") from error
        # Keep W&B silent and leave standard output alone. Offline, also keep it from inspecting the machine, which may use the network.
        settings = {"silent": True, "console": "off", "disable_git": True, "disable_code": True}
        settings |= dict.fromkeys(("x_disable_machine_info", "x_disable_meta", "x_disable_stats"), mode == "offline")
        self._folder = Path(folder) / SINK_FOLDERS[1]
        self._known: Counter[tuple[str, int | None]] = Counter()  # name and step of cut numbers that W&B has -> how often
        try:
            self._id = _wandb_id(self._folder)
            self._run: Any = init(
                dir=str(folder),
                project=project,
                id=self._id,
                resume="allow" if mode == "online" else None,
                name=run,
                mode=mode,
                config=dict(config or {}),
                reinit="create_new",  # leave other W&B runs of this process alone
                settings=Settings(**settings),
            )
        except Error as error:
            raise RuntimeError(f"Weights & Biases does not start in mode {mode!r}: {error}") from error
        # Plot over our own step: W&B's step must never decrease, but an evaluation has the step of an earlier checkpoint.
        self._run.define_metric("*", step_metric=STEP)

    def restart(self, records: Iterable[EventRecord], *, cut: Iterable[EventRecord] = ()) -> None:
        """Go on with the W&B run of earlier sessions if W&B has it; otherwise write the records that are left in the log."""
        if self._run.resumed:
            self._known.update((name, record.step) for record in cut for name in scalars_of(record))
            return
        for record in records:
            self._write_scalars(record)
        self._remove_earlier()

    def write(self, record: EventRecord) -> None:
        if isinstance(record.event, Header):
            self._remove_earlier()  # the log begins anew
        self._write_scalars(record)

    def _write_scalars(self, record: EventRecord) -> None:
        values = scalars_of(record)
        for name in [name for name in values if self._known[name, record.step] > 0]:
            self._known[name, record.step] -= 1
            del values[name]
        if values:
            self._run.log({STEP: record.step, **values})

    def _remove_earlier(self) -> None:
        """Remove what earlier sessions kept offline; this one has written it again."""
        own = Path(self._run.dir).parent.name
        for earlier in self._folder.glob(f"offline-run-*-{self._id}"):
            if earlier.name != own and not earlier.is_symlink():
                shutil.rmtree(earlier, ignore_errors=True)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(folder: Path) -> str:
    """Return the id of the W&B run that is kept in its folder; a new one if there is none."""
    path = folder / WANDB_ID
    with contextlib.suppress(FileNotFoundError):
        kept = read_in_run(path, max_bytes=MAX_CONFIG_BYTES, run=folder.parent).decode(errors="replace").strip()
        if re.fullmatch(r"[0-9a-z]{1,64}", kept):
            return kept
    made = secrets.token_hex(8)
    write_in_run(path, f"{made}\n".encode(), run=folder.parent)
    return made


def check_installed(*, tensorboard: bool, wandb: WandbMode | None) -> None:
    """Raise RunError if the package of a wanted sink is missing. Extras have the same names as the packages."""
    for name, is_wanted, without in (("tensorboard", tensorboard, "--no-tensorboard"), ("wandb", wandb, "--wandb None")):
        if is_wanted and importlib.util.find_spec(name) is None:
            how = f"install it with: pip install 'esper-grow[{name}]', or run without it: {without} on the command line"
            raise RunError(f"{name} is not installed; {how}")


def sinks_in(folder: Path, *, tensorboard: bool, wandb: WandbMode | None, config: Mapping[str, Any], run: str | None = None) -> list[Sink]:
    """Open the sinks of a run, which write into its folder. `run` is the name shown by W&B, by default the name of the folder."""
    sinks: list[Sink] = []
    try:
        # The packages open their files themselves, so their folders are checked before.
        if tensorboard:
            check_in_run(folder / SINK_FOLDERS[0])
            sinks.append(TensorBoardSink(folder / SINK_FOLDERS[0]))
        if wandb is not None:
            sinks.append(WandbSink(folder, run=printable(run or folder.name), mode=wandb, config=config))
    except (RuntimeError, FileError) as error:
        for sink in sinks:
            sink.close()
        raise RunError(str(error)) from error
    return sinks
