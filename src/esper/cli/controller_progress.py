"""The progress of training a controller, as the terminal shows it."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.cli import ppo_progress
from esper.cli.ppo_progress import BAR_WIDTH
from esper.controller.events import RoundEnded
from esper.rl.events import Collected, Update
from esper.rl.run_setup import RunStarted
from esper.runs import EventRecord, read
from esper.runs.folder import EVENTS
from esper.text_table import duration, figure

_RECENT_FLEETS = 10  # fleets whose results are shown


class RecentHosts(NamedTuple):
    """Results of the last hosts: means in nats of validation loss, in comparison with their twins, and counts of their seeds."""

    hosts: int
    utility: float  # gain minus rent
    gain: float  # over the twin, which is decided for as the policy is advised
    rent: float  # more than that of the twin
    grown: int
    kept: int
    alike: float  # share that was decided as advised

    def in_words(self) -> str:
        if not self.hosts:
            return "no host has come to its end yet"
        nats = f"utility {self.utility:+.4f} (gain {self.gain:+.4f}, rent {self.rent:+.4f})"
        return f"{nats}  {self.grown} seeds grown, {self.kept} kept  in {self.hosts} hosts, {self.alike:.0%} decided as advised"


class ControllerProgress(ppo_progress.PPOProgress):
    """Progress of training a controller. A round of lives, in one or several fleets, ends in an update of the learner."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: deque[RoundEnded] = deque(maxlen=_RECENT_FLEETS)
        self._collected: Collected | None = None  # the latest fleet whose lives have ended, if its round has not
        self._first: tuple[float, int] | None = None  # time and step of the first one of this session

    def take(self, record: EventRecord) -> bool:
        match record.event:
            case RunStarted():
                self._first = self._collected = None
            case RoundEnded() as ended:
                self._ended.append(ended)
            case Update():
                self._collected = None
            case Collected() as collected:
                self._first, self._collected = self._first or (record.time, collected.step), collected
                self._latest = record.time
        return super().take(record) or isinstance(record.event, Collected)

    @property
    def share(self) -> float:
        """Return the share of training that is done, by lives."""
        by_lives = 0.0 if self.started is None or self._collected is None else self._collected.step / self.started.total_steps
        return max(super().share, by_lives)

    @property
    def seconds_left(self) -> float:
        """Return the time that is left, by the speed of the rounds or, in the first one of a session, of its fleets."""
        if self.started is None or self._collected is None or self._first is None:
            return super().seconds_left
        began, step = self._first
        taken = (self._latest - began) / (self._collected.step - step) if self._collected.step > step else math.nan  # seconds for a step
        return (self.started.total_steps - self._collected.step) * (taken if self.update is None else 1 / self.rate.value)

    @property
    def left(self) -> str:
        if self.share == 1.0:
            return "done"
        return "stopped" if self.is_over else f"{duration(self.seconds_left)} left"

    @property
    def rounds(self) -> str:
        assert self.started is not None
        if self.update is None and self._collected is None:  # no life has ended, or the telemetry is off
            return "some rounds"
        done = 0 if self.update is None else self.update.update
        count = -(-self.started.total_steps // self.started.steps_per_update)
        if self._collected is None:
            return f"round {done}/{count}"
        return f"round {done + 1}/{count}, life {self._collected.done}/{self._collected.of}"

    @property
    def recent(self) -> RecentHosts:
        hosts = sum(end.hosts for end in self._ended)
        utility, gain, rent, alike = (
            sum(getattr(end, name) * end.hosts for end in self._ended) / hosts if hosts else math.nan
            for name in ("utility", "gain", "rent", "alike")
        )
        grown, kept = sum(end.grown for end in self._ended), sum(end.kept for end in self._ended)
        return RecentHosts(hosts, utility, gain, rent, grown, kept, alike)

    @property
    def memory_per_host(self) -> int:
        """Return the bytes that the largest of the last hosts took; 0 before any has ended."""
        return max((end.memory_per_host for end in self._ended), default=0)

    @property
    def kernels(self) -> int:
        """Return the number of Triton kernels compiled for a GPU."""
        return max((end.kernels for end in self._ended), default=0)

    @property
    def samples_per_second(self) -> float:
        """Return the samples that hosts and twins train on per second: lives per second, times the samples of a life."""
        lives = sum(end.hosts for end in self._ended)
        return self.rate.value * sum(end.samples for end in self._ended) / lives if lives else math.nan

    @property
    def speed(self) -> str:
        samples = self.samples_per_second
        return f"{figure(self.rate.value)} lives/s  {f'{samples:,.0f}' if samples == samples else '?'} samples/s"

    @property
    def health(self) -> str:
        if self.update is None:
            return "–"
        return f"explained variance {self.update.explained_variance:.2f}  clipped {self.update.clip_fraction:.3f}"

    @property
    def entropy(self) -> str:
        """Return the entropy of each head; a dash if there was nothing to choose, or no round is over."""
        if self.update is None:
            return "–"
        return " ".join(f"{head} {value:.2f}" if value else f"{head} –" for head, value in self.update.entropy.items()) or "–"

    def figures(self) -> dict[str, Any]:
        """Return the figures for `--json`; none before the first round, or if the telemetry is off."""
        if self.update is None:
            return {}
        learner = {name: getattr(self.update, name) for name in ("entropy", "explained_variance", "clip_fraction")}
        speed = {"lives_per_second": self.rate.value, "samples_per_second": self.samples_per_second}
        recordings = sum(end.recordings for end in self._ended)
        device = {"memory_per_host": self.memory_per_host, "kernels": self.kernels, "recordings": recordings}
        return {"rounds": self.update.update, **self.recent._asdict(), **learner, **speed, **device}

    def notice(self, record: EventRecord) -> str | None:
        if not isinstance(record.event, RunStarted):
            return super().notice(record)
        started = record.event
        rounds = -(-started.total_steps // started.steps_per_update)
        what = f"a controller of {started.parameters:,} parameters, whose hosts train on {started.device}"
        return f"{what}: {rounds} rounds of {started.steps_per_update:,} lives; Ctrl-C stops after the round"

    def line(self) -> str:
        learned = "" if self.update is None else f"entropy {self.entropy}  {self.health}  {self.speed}  "
        return f"{self.share:.1%}  {self.rounds}  {self.recent.in_words()}  {learned}{self.left}"

    def view(self, width: int) -> RenderableType:
        heading = Table.grid(padding=(0, 2, 0, 0))
        heading.add_row(
            ProgressBar(total=1.0, completed=self.share, width=BAR_WIDTH),
            Text(self.rounds, style="bold", no_wrap=True),
            Text(self.left, no_wrap=True),
            Text("" if self.update is None else self.speed, style="dim", no_wrap=True),
        )
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(no_wrap=True, style="dim")
        rows.add_column(overflow="fold")
        rows.add_row("hosts", Text(self.recent.in_words()))
        if self.update is not None:
            seconds = f"{duration(self.update.collect_seconds)} of training hosts, {duration(self.update.update_seconds)} of learning"
            rows.add_row("entropy", Text(self.entropy))
            rows.add_row("learner", Text(self.health))
            rows.add_row("a round", Text(seconds))
        return Group(heading, rows)


def read_progress(folder: Path) -> ControllerProgress:
    """Return the progress of the training in this folder."""
    progress = ControllerProgress()
    for record in read(folder / EVENTS):
        progress.take(record)
    return progress
