"""The progress of self-play in the arena, as the terminal shows it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.arena.config import BOTS
from esper.cli import ppo_progress
from esper.cli.ppo_progress import BAR_WIDTH
from esper.intervals import wilson_interval
from esper.league.events import LeagueChanged, RoundFought
from esper.rl.events import Update
from esper.rl.run_setup import CheckpointEvaluated, RunStarted
from esper.runs import EventRecord, read
from esper.runs.folder import EVENTS
from esper.text_table import duration

_RECENT_ROUNDS = 10  # rounds whose battles are shown
_FEW_BATTLES = 100  # a score of fewer battles of the training is shown with its interval
_RECENT_SCORES = 5  # evaluations whose scores the live view shows
_NOT_SHOWN = ("self", "learner")  # opponents whose score says nothing: a player scores one half against itself
_PAST = "past selves"


class ArenaProgress(ppo_progress.PPOProgress):
    """Progress of self-play. `members` are the members of the league at the start; `bot` is the one that evaluations are against."""

    def __init__(self, members: Iterable[str] = (), *, bot: str = "the bot") -> None:
        super().__init__()
        self.members, self.bot = list(members), bot
        self.evaluations: deque[CheckpointEvaluated] = deque(maxlen=_RECENT_SCORES)
        self.round: RoundFought | None = None
        self._rounds: deque[RoundFought] = deque(maxlen=_RECENT_ROUNDS)
        self._seconds_per_step = math.nan

    def take(self, record: EventRecord) -> bool:
        match record.event:
            case Update() as update if self.started is not None:
                self._seconds_per_step = (record.time - self._began) / max(1, update.step - self.started.step)
            case RoundFought() as fought:
                self.round = fought
                self._rounds.append(fought)
            case CheckpointEvaluated() as evaluated:
                self.evaluations.append(evaluated)
            case LeagueChanged() as changed if changed.is_promoted:
                gone = {*changed.retired, changed.name}
                self.members = [*(name for name in self.members if name not in gone), changed.name]
        return super().take(record)

    @property
    def updates(self) -> str:
        assert self.started is not None
        if self.update is None:  # no update is over, or the telemetry is off
            return "some updates"
        number = f"update {self.update.update:,}"
        if self.started.seconds is not None:  # the number of updates is not known
            return number
        return f"{number}/{-(-self.started.total_steps // self.started.steps_per_update):,}"

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the last step, estimated by the wall clock, because evaluations may take longer than updates."""
        if self.started is None or self.update is None:
            return math.nan
        return max(0, self.started.total_steps - self.update.step) * self._seconds_per_step

    @property
    def time_left(self) -> float:
        """Return the seconds left until the last step, or until the time limit if that is earlier."""
        if self.started is None or self.started.seconds is None:
            return self.seconds_left
        return min(self.seconds_left, max(0.0, self.started.seconds - self.seconds_taken))

    @property
    def left(self) -> str:
        if self.is_over or self.share == 1.0:
            return self.phase
        return f"{duration(self.time_left)} left"

    @property
    def scores(self) -> dict[str, tuple[float, int]]:
        """Return, by opponent, the score of the recent battles (a draw counts half) and their number."""
        points: dict[str, float] = {}
        battles: dict[str, int] = {}
        for fought in self._rounds:
            for opponent, (won, drawn, lost) in fought.results.items():
                name = opponent if opponent in (*BOTS, *_NOT_SHOWN) else _PAST
                points[name] = points.get(name, 0.0) + won + drawn / 2
                battles[name] = battles.get(name, 0) + won + drawn + lost
        return {name: (points[name] / count, count) for name, count in battles.items() if count and name not in _NOT_SHOWN}

    @property
    def against(self) -> str:
        """Return the recent scores in training. The first battles to end are the shortest ones, so few battles say little."""
        shown = (
            f"{name} {_with_interval(score, battles) if battles < _FEW_BATTLES else f'{100 * score:.0f} %'}"
            for name, (score, battles) in self.scores.items()
        )
        return "  ".join(shown) or "no battle has ended yet"

    @property
    def evaluated(self) -> str:
        """Return the scores of the newest evaluations against the bot, the newest with its interval; empty before the first one."""
        if not self.evaluations:
            return ""
        *before, newest = self.evaluations
        earlier = "".join(f"{100 * one.mean_return:.0f} → " for one in before)
        return f"against {self.bot} {earlier}{_with_interval(newest.mean_return, newest.episodes)} of {newest.episodes} battles"

    @property
    def league(self) -> str:
        count = len(self.members)
        return f"{count} past {'self' if count == 1 else 'selves'}" + (f", the best is {self.members[-1]}" if count else "")

    @property
    def speed(self) -> str:
        return f"{self.rate.value:,.0f} steps/s"

    @property
    def entropy(self) -> str:
        assert self.update is not None
        return " ".join(f"{head} {value:.2f}" for head, value in self.update.entropy.items()) or "–"

    @property
    def variance(self) -> str:
        assert self.update is not None
        return f"explained variance {self.update.explained_variance:.2f}"

    def figures(self) -> dict[str, Any]:
        """Return the figures for `--json`; none before the first update, or if the telemetry is off."""
        if self.update is None:
            return {}
        learner = {name: getattr(self.update, name) for name in ("entropy", "explained_variance", "clip_fraction", "learning_rate")}
        scores = {name: {"score": score, "battles": count} for name, (score, count) in self.scores.items()}
        return {"updates": self.update.update, "steps_per_second": self.rate.value, "recently": scores, "members": self.members, **learner}

    def notice(self, record: EventRecord) -> str | None:
        match record.event:
            case RunStarted() as started:
                what = f"{started.env_id} on {started.device}: {started.num_envs:,} units learn, {started.parameters:,} parameters"
                limit = "" if started.seconds is None else f"{duration(started.seconds)}, or "
                steps = f"{limit}{started.total_steps:,} steps, a decision of a unit each, alive or dead"
                return f"{what}; {steps}, in updates of {started.steps_per_update:,}; Ctrl-C stops after the update"
            case LeagueChanged() as changed:
                what = "joins the league" if changed.is_promoted else "does not join the league"
                gone = f"; {', '.join(changed.retired)} left it" if changed.retired else ""
                return f"{changed.name} {what}: {changed.reason}{gone}"
        return super().notice(record)

    def plain_notice(self, record: EventRecord) -> str | None:
        match record.event:
            case CheckpointEvaluated() as evaluated:  # the live view has a row for it
                score = _with_interval(evaluated.mean_return, evaluated.episodes)
                return f"evaluation at step {evaluated.step:,}: {score} of {evaluated.episodes} battles against {self.bot}, draws half"
        return super().plain_notice(record)

    def line(self) -> str:
        assert self.update is not None
        parts = (
            self.updates,
            f"step {self.update.step:,}",
            f"in training: {self.against}" if self.scores else self.against,
            f"league {len(self.members)}",
            f"entropy {self.entropy}",
            self.variance,
            self.speed,
            self.left,
        )
        return "  ".join(parts)

    def view(self, width: int) -> RenderableType:
        assert self.update is not None
        heading = Table.grid(padding=(0, 2, 0, 0))
        heading.add_row(
            ProgressBar(total=1.0, completed=self.share, width=BAR_WIDTH),
            Text(self.updates, style="bold", no_wrap=True),
            Text(self.left, no_wrap=True),
            Text(self.speed, style="dim", no_wrap=True),
        )
        seconds = f"{duration(self.update.collect_seconds)} of battles, {duration(self.update.update_seconds)} of learning"
        team = "" if self.round is None else f"; teams of up to {self.round.team} in new battles"
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(no_wrap=True, style="dim")
        rows.add_column(overflow="fold")
        rows.add_row("evaluation", Text(self.evaluated or "none yet", style="bold"))
        rows.add_row("in training", Text(self.against))
        rows.add_row("league", Text(self.league))
        rows.add_row("entropy", Text(self.entropy))
        rows.add_row("learner", Text(f"{self.variance}  clipped {self.update.clip_fraction:.3f}"))
        rows.add_row("steps", Text(f"{self.update.step:,}{team}"))
        rows.add_row("update", Text(seconds))
        return Group(heading, rows)


def _with_interval(score: float, battles: int) -> str:
    """Return a score, draws half, in percent with its 95 % interval over battles."""
    interval = wilson_interval(score * battles, battles)
    return f"{100 * score:.0f} % [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"


def read_progress(folder: Path) -> ArenaProgress:
    """Return the progress of the training in this folder."""
    progress = ArenaProgress()
    for record in read(folder / EVENTS):
        progress.take(record)
    return progress
