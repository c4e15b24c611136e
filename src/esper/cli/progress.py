"""The display of a run while it trains: a live view on a terminal, a plain line every few seconds elsewhere.

Both are sinks of the event log, and so run in a thread of their own: a terminal that has gone away does not stop the training.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live

from esper.runs import CheckpointRefused, EventRecord, Resumed, Sink, SinkFailed
from esper.runs.anomalies import Anomaly

PLAIN_EVERY_S = 5.0


class Progress(ABC):
    """Progress of a run, collected from its events, and how it is shown."""

    is_over = False  # nothing more will change

    @abstractmethod
    def take(self, record: EventRecord) -> bool:
        """Take in an event; return whether the line and the view have changed. Both exist from the first change on."""

    @abstractmethod
    def line(self) -> str:
        """Return the progress as one line, for plain displays."""

    @abstractmethod
    def view(self, width: int) -> RenderableType:
        """Return the progress for a live view on a terminal of this width."""

    def notice(self, record: EventRecord) -> str | None:
        """Return a line that is shown by every display, or None."""
        match record.event:
            case Resumed():
                return "resumed"
            case CheckpointRefused() as refused:
                return f"passed over {refused.checkpoint}: {refused.reason}"
            case SinkFailed() as failed:
                return f"{failed.sink} failed and was switched off, training goes on: {failed.error}"
            case Anomaly() as anomaly:
                return f"step {anomaly.step:,}: {anomaly.in_words()}"
        return None

    def plain_notice(self, record: EventRecord) -> str | None:
        """Return a line that only plain displays show, or None."""
        return None


def progress_sink(progress: Progress, stream: TextIO | None = None) -> Sink:
    """Return a live view on a terminal, else plain lines. The default stream is the standard output."""
    stream = stream or sys.stdout
    return LiveView(progress, stream) if stream.isatty() else PlainLines(progress, stream)


class PlainLines:
    """Prints lines for a log file: notices, the progress every few seconds, and the end."""

    def __init__(self, progress: Progress, stream: TextIO, *, every_s: float = PLAIN_EVERY_S) -> None:
        self._progress, self._stream, self._every_s = progress, stream, every_s
        self._printed_at = time.monotonic()
        self._has_changed = False

    def write(self, record: EventRecord) -> None:
        self._has_changed |= self._progress.take(record)
        line = self._progress.notice(record) or self._progress.plain_notice(record)
        if line is not None:
            self._print(line)
        self._print_progress()

    def close(self) -> None:
        self._progress.is_over = True
        self._print_progress()

    def _print_progress(self) -> None:
        if self._has_changed and (self._progress.is_over or time.monotonic() - self._printed_at >= self._every_s):
            self._has_changed, self._printed_at = False, time.monotonic()
            self._print(self._progress.line())

    def _print(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {line}", file=self._stream, flush=True)


class LiveView:
    """Draws a live view again whenever something changes."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False)

    def write(self, record: EventRecord) -> None:
        has_changed = self._progress.take(record)
        line = self._progress.notice(record)
        if line is not None:
            self._console.print(line, highlight=False, markup=False)
        if has_changed:
            self._live.start()  # not earlier: it hides the cursor, which would stay hidden if the run never started
        if has_changed or self._progress.is_over:
            self._draw()

    def close(self) -> None:
        self._progress.is_over = True
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        if self._live.is_started:
            self._live.update(self._progress.view(self._console.width), refresh=True)
