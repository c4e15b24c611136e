"""What a user sees while a run trains: a live line on a terminal, a plain line every few seconds elsewhere.

Both are sinks of the event log, and so run in a thread of their own: a terminal that has gone away does not stop the training.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from esper.events import Record, Resumed, Sink, SinkFailed
from esper.rl.events import CompileFailed, EpisodesRestarted, Skipped, Update
from esper.rl.run_events import CheckpointRefused, RunStarted
from esper.statistics import Ema

PLAIN_EVERY_S = 5.0
_RATE_MOMENTUM = 0.8  # of the mean over the speed of recent updates
_BAR_WIDTH = 12


def progress_sink(stream: TextIO | None = None) -> Sink:
    """The display that fits the stream; standard output unless told."""
    stream = stream or sys.stdout
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)


class Progress:
    """Where the run stands, folded from its events."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.update: Update | None = None
        self.rate = Ema(_RATE_MOMENTUM)  # steps per second
        self.is_over = False

    def take(self, record: Record) -> None:
        if isinstance(record.event, RunStarted):
            self.started = record.event
        elif isinstance(record.event, Update):
            self.update = record.event
            self.rate.update(record.event.steps_per_second)

    @property
    def phase(self) -> str:
        """What is going on: after the last update the best policy is evaluated."""
        if self.is_over:
            return "done" if self.share == 1.0 else "stopped"
        return "training" if self.share < 1.0 else "evaluating"

    @property
    def share(self) -> float:
        if self.started is None or self.update is None:
            return 0.0
        return min(1.0, self.update.step / self.started.total_steps)

    @property
    def seconds_left(self) -> float:
        if self.started is None or self.update is None:
            return float("nan")
        return max(0, self.started.total_steps - self.update.step) / self.rate.value


def notice(record: Record) -> str | None:
    """What is worth a line of its own."""
    match record.event:
        case RunStarted() as started:
            what = f"{started.env_id}: {started.num_envs} environments on {started.device}, {started.parameters:,} parameters"
            return f"{what}, {started.total_steps:,} steps in updates of {started.steps_per_update:,}"
        case Resumed():
            return "resumed"
        case CheckpointRefused() as refused:
            return f"passed over {refused.checkpoint}: {refused.reason}"
        case EpisodesRestarted():
            return "this environment cannot be saved in the middle of an episode: new episodes begin"
        case Skipped() as skipped:
            return f"step {skipped.step:,}: {skipped.count} gradient steps were not finite and were skipped"
        case SinkFailed() as failed:
            return f"{failed.sink} failed and was switched off, training goes on: {failed.error}"
        case CompileFailed() as failed:
            return f"torch.compile did not work, going on without it: {failed.reason}"
    return None


class PlainProgress:
    """Lines for a log file: at the start, every few seconds, and at the end."""

    def __init__(self, stream: TextIO, *, every_s: float = PLAIN_EVERY_S) -> None:
        self._stream, self._every_s = stream, every_s
        self._progress = Progress()
        self._printed_at = time.monotonic()
        self._has_news = False

    def write(self, record: Record) -> None:
        self._progress.take(record)
        line = notice(record)
        if line is not None:
            self._print(line)
        self._has_news |= isinstance(record.event, Update)
        if self._has_news and time.monotonic() - self._printed_at >= self._every_s:
            self._print_state()

    def close(self) -> None:
        self._progress.is_over = True
        if self._has_news:
            self._print_state()

    def _print_state(self) -> None:
        self._has_news, self._printed_at = False, time.monotonic()
        self._print(_plain_line(self._progress))

    def _print(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {line}", file=self._stream, flush=True)


def _plain_line(progress: Progress) -> str:
    update = progress.update
    assert update is not None
    return "  ".join(
        (
            f"{progress.phase:10}",
            f"{progress.share:4.0%}",
            f"step {update.step:,}",
            f"return {update.mean_return:.3f}",
            f"entropy {_entropy(update)}",
            f"{progress.rate.value:,.0f} steps/s",
            f"{duration(progress.seconds_left)} left",
        )
    )


class LiveProgress:
    """A line with its heading, drawn again with every update."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._progress = Progress()
        self._live = Live(console=self._console, auto_refresh=False)

    def write(self, record: Record) -> None:
        self._progress.take(record)
        line = notice(record)
        if line is not None:
            self._console.print(line, highlight=False)
        if isinstance(record.event, Update):
            self._live.start()  # not earlier: it hides the cursor, and a run that never starts would not show it again
            self._live.update(_live_table(self._progress), refresh=True)

    def close(self) -> None:
        self._progress.is_over = True
        if self._progress.update is not None:
            self._live.update(_live_table(self._progress), refresh=True)
        self._live.stop()


def _live_table(progress: Progress) -> Table:
    update = progress.update
    assert update is not None
    columns: dict[str, RenderableType] = {
        "": ProgressBar(total=1.0, completed=progress.share, width=_BAR_WIDTH),
        "phase": progress.phase,
        "step": f"{update.step:,}",
        "left": duration(progress.seconds_left),
        "return": f"[bold]{update.mean_return:.3f}",
        "entropy": _entropy(update),
        "steps/s": f"{progress.rate.value:,.0f}",
        "collect": f"{update.collect_seconds:.2f} s",
        "update": f"{update.update_seconds:.2f} s",
    }
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, no_wrap=True)
    table.add_row(*columns.values())
    return table


def _entropy(update: Update) -> str:
    """Per head; the name only where there are several."""
    if len(update.entropy) == 1:
        return f"{next(iter(update.entropy.values())):.2f}"
    return " ".join(f"{head} {value:.2f}" for head, value in update.entropy.items())


def duration(seconds: float) -> str:
    """
    >>> duration(59.4), duration(75), duration(3725), duration(float("nan"))
    ('59 s', '1:15', '1:02:05', '?')
    """
    if seconds != seconds or seconds == float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"
