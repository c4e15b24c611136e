"""The progress of training a policy, as the terminal shows it."""

from __future__ import annotations

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from esper.cli import progress
from esper.rl.events import CompileFailed, EpisodesRestarted, RewardsNotFinite, Skipped, Update
from esper.rl.run_setup import CheckpointEvaluated, RunStarted
from esper.runs import EventRecord
from esper.statistics import Ema
from esper.text_table import duration

_RATE_MOMENTUM = 0.8  # of the running mean of the speed
BAR_WIDTH = 12


class PPOProgress(progress.Progress):
    """Progress of a training by PPO."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.update: Update | None = None
        self.rate = Ema(_RATE_MOMENTUM)  # steps per second
        self.has_reported_cuts = False
        self._began = self._latest = 0.0  # times of the start of this session and of the latest update

    def take(self, record: EventRecord) -> bool:
        if isinstance(record.event, RunStarted):
            self.started = record.event
            self._began = self._latest = record.time
        elif isinstance(record.event, Update):
            self.update = record.event
            self._latest = record.time
            self.rate.update(record.event.steps_per_second)
        return isinstance(record.event, Update)

    @property
    def phase(self) -> str:
        """Return the phase of the run; after the last update, the best policy is evaluated."""
        if self.is_over:
            return "done" if self.share == 1.0 else "stopped"
        return "training" if self.share < 1.0 else "evaluating"

    @property
    def share(self) -> float:
        """Return the share of training that is done, by steps or by time, whichever is ahead."""
        if self.started is None or self.update is None:
            return 0.0
        by_time = 0.0 if self.started.seconds is None else self.seconds_taken / self.started.seconds
        return min(1.0, max(self.update.step / self.started.total_steps, by_time))

    @property
    def seconds_taken(self) -> float:
        """Return the seconds of training up to the latest update, in all sessions."""
        assert self.started is not None
        return self.started.seconds_taken + self._latest - self._began

    @property
    def seconds_left(self) -> float:
        if self.started is None or self.update is None:
            return float("nan")
        return max(0, self.started.total_steps - self.update.step) / self.rate.value

    def notice(self, record: EventRecord) -> str | None:
        match record.event:
            case RunStarted() as started:
                what = f"{started.env_id}: {started.num_envs} environments on {started.device}, {started.parameters:,} parameters"
                return f"{what}, {started.total_steps:,} steps in updates of {started.steps_per_update:,}"
            case EpisodesRestarted():
                return "this environment cannot be saved in the middle of an episode: new episodes begin"
            case RewardsNotFinite() as bad:
                return f"step {bad.step:,}: {bad.count} rewards were not finite; those steps teach nothing"
            case Skipped() as skipped:
                return f"step {skipped.step:,}: {skipped.count} gradient steps were not finite and were skipped"
            case CheckpointEvaluated(cut=cut) as evaluated if cut and not self.has_reported_cuts:
                self.has_reported_cuts = True
                which = f"{cut} of {evaluated.episodes} episodes of the evaluation at step {evaluated.step:,}"
                return f"{which} had not ended and were cut; --eval-max-steps sets the limit"
            case CompileFailed() as failed:
                return f"torch.compile did not work, going on without it: {failed.reason}"
        return super().notice(record)

    def line(self) -> str:
        assert self.update is not None
        return "  ".join(
            (
                f"{self.phase:10}",
                f"{self.share:4.0%}",
                f"step {self.update.step:,}",
                f"return {self.update.mean_return:.3f}",
                f"entropy {_entropy(self.update)}",
                f"{self.rate.value:,.0f} steps/s",
                f"{duration(self.seconds_left)} left",
            )
        )

    def view(self, width: int) -> RenderableType:
        """Return a table of one line with its heading."""
        assert self.update is not None
        columns: dict[str, RenderableType] = {
            "": ProgressBar(total=1.0, completed=self.share, width=BAR_WIDTH),
            "phase": self.phase,
            "step": f"{self.update.step:,}",
            "left": duration(self.seconds_left),
            "return": f"[bold]{self.update.mean_return:.3f}",
            "entropy": _entropy(self.update),
            "steps/s": f"{self.rate.value:,.0f}",
            "collect": f"{self.update.collect_seconds:.2f} s",
            "update": f"{self.update.update_seconds:.2f} s",
        }
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for name in columns:
            table.add_column(name, no_wrap=True)
        table.add_row(*columns.values())
        return table


def _entropy(update: Update) -> str:
    """Return the entropy of each head, with its name if there are several; a dash if the telemetry is minimal."""
    if len(update.entropy) == 1:
        return f"{next(iter(update.entropy.values())):.2f}"
    return " ".join(f"{head} {value:.2f}" for head, value in update.entropy.items()) or "–"
