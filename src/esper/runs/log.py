"""The event log of a run: an append-only file that loses no event, and sinks such as TensorBoard that may drop some.

A run that is killed and resumed leaves one continuous file:

    with EventLog(folder / "events.jsonl", run="maze-7") as log:
        log.emit(UpdateDone(step=1, loss=0.3))
        offset = log.offset()                                       # saved in the checkpoint
    log = EventLog.resume(folder / "events.jsonl", offset)          # cuts the events after the checkpoint
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import esper
from esper.files import FileError, RunMode, make_folder, open_in_run, printable, reason_of, sync
from esper.runs.events import (
    MAX_LINE_BYTES,
    SCHEMA,
    Event,
    EventError,
    EventRecord,
    Header,
    Resumed,
    SinkDropped,
    SinkFailed,
    check_header,
    encode,
    read,
)
from esper.runs.sinks import Queued, Restartable, Sink

FLUSH_EVERY_S = 0.25  # a page that watches the run shows an event within a second
HEARTBEAT_EVERY_S = 5.0  # the file is touched even if nothing happens, so that others see that the run is alive
MAX_ERROR_CHARACTERS = 2000


class EventLog:
    """Writes the events of one process (one rank) of a run. All methods are thread-safe.

    `emit` only puts the line into memory; a background thread writes the lines to the file four times a second. `flush(sync=True)` and
    `offset` return when all lines are on disk. An event without a `step` of its own gets the step of `clock`; without a clock, it gets the
    step or epoch of the latest event that had one. Sinks get every record through a bounded queue (`Queued`).
    """

    def __init__(self, path: Path | str, run: str, rank: int = 0, sinks: Iterable[Sink] = ()) -> None:
        path, run = Path(path), printable(run)
        if path.is_file() and path.stat().st_size > 0:
            raise FileExistsError(f"{path} already holds events; continue it with EventLog.resume, or choose another folder")
        make_folder(path.parent)
        self._open(path, run, rank, sinks)
        self.emit(Header(schema=SCHEMA, esper=esper.__version__))
        self.flush(sync=True)
        sync(path.parent)

    @classmethod
    def resume(cls, path: Path | str, offset: int, *, step: int = 0, sinks: Iterable[Sink] = ()) -> Self:
        """Cut everything after `offset` and continue from there, with the run and rank that the header names.

        `offset` is the value of `offset()` when the checkpoint was saved, `step` is the step of the checkpoint. An offset of 0 keeps only
        the header, for a run that was killed before its first checkpoint.
        """
        path = Path(path)
        sinks = tuple(sinks)
        restarted = [sink for sink in sinks if isinstance(sink, Restartable)]
        cut = _after(path, offset) if restarted else []
        header = _cut(path, offset)
        for sink in restarted:
            sink.restart(read(path), cut=cut)
        log = cls.__new__(cls)
        log._open(path, header.run, header.rank, sinks, step=step)
        log.emit(Resumed(offset=offset, esper=esper.__version__))
        log.flush(sync=True)
        return log

    def _open(self, path: Path, run: str, rank: int, sinks: Iterable[Sink], *, step: int = 0) -> None:
        self.path = path
        self.run = run
        self.rank = rank
        self.clock: Callable[[], int] | None = None
        self._step = step  # step of the latest event that had one
        self._file = _opened(path, "ab")
        self._size = os.fstat(self._file.fileno()).st_size  # of the lines and parts of lines that are known to be written
        self._is_torn = False  # whether a write failed, which may have left a part of its lines behind that size
        self._file_lock = threading.Lock()
        self._pending = bytearray()
        self._pending_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._is_closed = False
        self._stop = threading.Event()
        self._sinks = [sink if isinstance(sink, Queued) else Queued(sink) for sink in sinks]
        for sink in self._sinks:
            sink.on_failure = lambda error, name=sink.name: self._report_failure(name, error)
        self._flusher = threading.Thread(target=self._flush_regularly, name="esper-events", daemon=True)
        self._flusher.start()
        atexit.register(self._close_at_exit)

    def emit(self, event: Event, *, rank: int | None = None, time: float | None = None, step: int | None = None) -> None:
        """Record that `event` happened now. Raise EventError for an event that could not be read back.

        Give `rank`, `time` and `step` when this process writes an event of another one.
        """
        record = self._append(event, rank=rank, at=time, step=step)
        for sink in self._sinks:
            sink.write(record)

    def flush(self, sync: bool = True) -> None:
        """Write all lines to the file; with `sync`, return when they are on disk. Raises OSError, for example if the disk is full."""
        with self._file_lock:
            self._write_pending(sync)

    def offset(self) -> int:
        """Write all lines to disk and return the size of the file. All events emitted before this call are before that offset.

        Raises FileNotFoundError if the file was removed, renamed or replaced since it was opened, because its events would be lost.
        """
        with self._file_lock:
            self._write_pending(sync=True)
            ours, there = os.fstat(self._file.fileno()), os.lstat(self.path)
            if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
                raise FileNotFoundError(errno.ENOENT, "it was replaced during the run", str(self.path))
            return ours.st_size

    def close(self) -> None:
        """Close the sinks, record how many events they dropped, and write all lines to disk. A second call does nothing."""
        with self._close_lock:
            if self._is_closed:
                return
            for sink in self._sinks:
                sink.close()
                if sink.dropped:
                    self._append(SinkDropped(sink=sink.name, dropped=sink.dropped))
            self._sinks = []  # so that a second call after a full disk does not report them again
            self._stop.set()
            self._flusher.join()
            with self._file_lock:
                self._close_file()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except OSError as error:  # the program ends, so nothing can handle it
            logging.getLogger(__name__).warning("the last events of %s are lost: %s", self.path, reason_of(error))
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _append(self, event: Event, *, rank: int | None = None, at: float | None = None, step: int | None = None) -> EventRecord:
        record = EventRecord(
            time=time.time() if at is None else at,
            run=self.run,
            rank=self.rank if rank is None else rank,
            event=event,
            step=self._step_of(event) if step is None else step,
        )
        line = encode(record)
        with self._pending_lock:
            if self._is_closed:
                raise EventError(f"{event!r} was emitted after the event log {self.path} was closed")
            self._pending += line
        return record

    def _step_of(self, event: Event) -> int:
        """Return the step of an event: its own, else that of the clock; without a clock its epoch, else the latest known step or epoch."""
        own = getattr(event, "step", None)
        if not isinstance(own, int) and self.clock is not None:
            return self.clock()
        own = own if isinstance(own, int) else getattr(event, "epoch", None)
        self._step = own if isinstance(own, int) else self._step
        return self._step

    def _write_pending(self, sync: bool) -> None:
        if self._is_closed:
            return
        # Hold the lock of the lines only to take them, so that `emit` does not wait for a slow disk. Lines that could not be written are
        # put back in front of newer ones.
        lines = bytearray()
        try:
            if self._is_torn:
                os.ftruncate(self._file.fileno(), self._size)
                self._is_torn = False
            with self._pending_lock:
                lines, self._pending = self._pending, lines
            while lines:
                count = os.write(self._file.fileno(), lines)
                del lines[:count]
                self._size += count
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._is_torn = True
            raise OSError(error.errno, error.strerror, str(self.path)) from error  # errors of write and fsync name no file
        finally:
            if lines:
                with self._pending_lock:
                    self._pending = lines + self._pending

    def _close_file(self) -> None:
        while not self._is_closed:
            self._write_pending(sync=True)
            with self._pending_lock:
                self._is_closed = not self._pending  # another thread may have emitted during the write
        self._file.close()

    def _flush_regularly(self) -> None:
        has_warned, touched = False, time.monotonic()
        while not self._stop.wait(FLUSH_EVERY_S):
            try:
                self.flush(sync=False)
                if time.monotonic() - touched >= HEARTBEAT_EVERY_S:
                    touched = time.monotonic()
                    os.utime(self._file.fileno())
            except OSError as error:
                # Nothing is lost: the lines stay in memory, and the flush before the next checkpoint raises the error in the main thread.
                if not has_warned:
                    logging.getLogger(__name__).warning("cannot write events to %s, keeping them in memory: %s", self.path, error)
                has_warned = True

    def _report_failure(self, sink: str, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        try:
            self.emit(SinkFailed(sink=sink, error=message))
        except EventError:  # the log is closed already
            logging.getLogger(__name__).warning("the sink %s failed after the end of the run: %s", sink, message)


def _after(path: Path, offset: int) -> list[EventRecord]:
    """Return the records after `offset` but the header, as far as they can be read."""
    found: list[EventRecord] = []
    with contextlib.suppress(EventError, OSError):
        found.extend(itertools.islice(read(path, start=offset), 1, None))
    return found


def _cut(path: Path, offset: int) -> EventRecord:
    """Truncate the log at `offset`, after checking that a line ends there, and return its header."""
    with _opened(path, "r+b") as file:
        first = file.readline(MAX_LINE_BYTES)
        header = check_header(first, path)
        size = os.fstat(file.fileno()).st_size
        if offset > size:
            raise EventError(f"cannot resume {path} at byte {offset}: it has only {size} bytes; the checkpoint belongs to another log")
        offset = offset or len(first)
        file.seek(max(offset - 1, 0))
        if offset < len(first) or file.read(1) != b"\n":
            raise EventError(f"cannot resume {path} at byte {offset}: no line ends there; the checkpoint belongs to another log")
        try:
            file.truncate(offset)
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # errors of these calls name no file
    return header


def _opened(path: Path, mode: RunMode) -> BinaryIO:
    try:
        return open_in_run(path, mode)
    except FileError as error:
        raise EventError(str(error)) from error
