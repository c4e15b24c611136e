"""Results of a comparison of controllers: all runs, and a table per rent level with paired intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

from esper.controller.compare_config import CompareConfig
from esper.controller.config import RENT_LEVELS
from esper.controller.lives import EvalRun
from esper.growth.lifecycle.stages import Cost
from esper.growth.measure.contribution import rent_of
from esper.rng import Streams
from esper.statistics import Interval, bootstrap_interval, holm, paired_interval, paired_p_value
from esper.text_table import aligned

SWEEP = "sweep"  # name of the best static size in the tables
HEADING = ("controller", "test loss", "gain", "rent", "utility [95 %]", "parameters", "FLOPs", "compared − this [95 %]", "Holm p")


@dataclass(frozen=True)
class Score:
    """Score of one run at one rent level."""

    run: EvalRun
    gain: float  # test loss of never with the same seed, minus that of the run
    rent: float

    @property
    def utility(self) -> float:
        return self.gain - self.rent


@dataclass(frozen=True)
class ControllerStanding:
    """Result of a controller at one rent level: its mean utility, and the paired difference to the compared controller."""

    controller: str
    level: str
    utility: Interval
    ahead: Interval | None  # utility of the compared controller minus that of this one; None for the compared controller itself
    p_value: float | None  # corrected by Holm's method over all controllers of the level


class Comparison:
    """Runs of all controllers, with their scores and statistics.

    `schedules` holds the fixed plans that were chosen, `notes` remarks for the reader.
    """

    def __init__(self, config: CompareConfig, runs: Sequence[EvalRun], schedules: Mapping[str, str], notes: Sequence[str] = ()) -> None:
        self.config, self.runs, self.schedules, self.notes = config, list(runs), dict(schedules), list(notes)
        self._never = {(run.task, run.host, run.seed): run for run in runs if run.controller == "never"}
        self.compared = config.compared

    def scores(self, controller: str, level: str) -> list[Score]:
        """Return the scores of a controller, sorted by task, host and seed, so that those of two controllers are paired."""
        own = [run for run in self.runs if run.controller == controller and run.level in (level, None)]
        if controller == SWEEP:
            own = [self._swept(never, level) for never in self._never.values()]
        return [self._score(run, level) for run in sorted(own, key=lambda run: (run.task, run.host, run.seed))]

    def _swept(self, never: EvalRun, level: str) -> EvalRun:
        """Return the run that a sweep over static sizes would choose instead of growing this host.

        The sizes include the host itself. The best one by validation loss plus rent wins, and it is charged the FLOPs of all sizes.
        """
        static = [f"static {size}" for size in self.config.sweep]
        sizes = [never, *(run for run in self.runs if (run.task, run.seed) == (never.task, never.seed) and run.controller in static)]
        as_host = [msgspec.structs.replace(run, controller=SWEEP, host=never.host) for run in sizes]
        best = min(as_host, key=lambda run: run.val_loss + self._score(run, level).rent)
        return msgspec.structs.replace(best, total_flops=sum(run.total_flops for run in sizes))

    def _score(self, run: EvalRun, level: str) -> Score:
        """Return gain and rent of a run, both relative to the host that never grew."""
        never = self._never_of(run)
        host = Cost(never.parameters, never.flops_per_sample)
        whole = Cost(run.parameters + run.added_parameters, run.flops_per_sample + run.added_flops)
        added = Cost(
            max(whole.parameters - host.parameters, 0), max(whole.flops - host.flops, 0)
        )  # no negative rent for a smaller static size
        return Score(run, never.test_loss - run.test_loss, run.unit * rent_of(added, host, RENT_LEVELS[level]))

    def _never_of(self, run: EvalRun) -> EvalRun:
        """Return the run of the same host that never grew."""
        return self._never[run.task, run.host, run.seed]

    def controllers(self) -> list[str]:
        """Return the names of all controllers, with the sweep in place of the single static sizes."""
        names = dict.fromkeys(run.controller for run in self.runs if not run.controller.startswith("static "))
        return [*names, *([SWEEP] if self.config.sweep else [])]

    def standings(self, level: str) -> list[ControllerStanding]:
        """Return the results of all controllers at one rent level, the compared one first."""
        ours = [score.utility for score in self.scores(self.compared, level)]
        others = [name for name in self.controllers() if name != self.compared]
        rng = Streams(self.config.seed).numpy(f"bootstrap {level}")
        pairs = {name: [score.utility for score in self.scores(name, level)] for name in others}
        # Hosts are the pairs: permutation p-values, corrected for the number of controllers, and bootstrap intervals.
        raw = [paired_p_value(ours, theirs, rng=rng) for theirs in pairs.values()]
        adjusted = dict(zip(others, holm(raw), strict=True)) if others else {}
        found = [ControllerStanding(self.compared, level, bootstrap_interval(ours, rng=rng), None, None)]
        for name, theirs in pairs.items():
            ahead = paired_interval(ours, theirs, rng=rng)
            found.append(ControllerStanding(name, level, bootstrap_interval(theirs, rng=rng), ahead, float(adjusted[name])))
        return found

    def pooled(self, other: str) -> Interval:
        """Return the mean difference in utility to another controller over all rent levels, with an interval over the hosts."""
        rng = Streams(self.config.seed).numpy(f"pooled {other}")
        return paired_interval(self._over_levels(self.compared), self._over_levels(other), rng=rng)

    def _over_levels(self, controller: str) -> list[float]:
        """Return the mean utility of each host over all rent levels."""
        columns = [[score.utility for score in self.scores(controller, level)] for level in self.config.levels]
        return [fmean(values) for values in zip(*columns, strict=True)]

    def tables(self) -> str:
        """Return all tables and notes as text."""
        parts = [self._table(level) for level in self.config.levels]
        others = [name for name in self.controllers() if name != self.compared]
        pooled = [f"{self.compared} − {name}, all levels: {shown(self.pooled(name))} nats" for name in others]
        return "\n\n".join([*parts, "\n".join(pooled), *self.notes]).strip()

    def _table(self, level: str) -> str:
        """Return the table of one rent level, with one line per controller."""
        rent = RENT_LEVELS[level]
        rows = [HEADING]
        for standing in self.standings(level):
            scores = self.scores(standing.controller, level)
            flops = fmean(score.run.total_flops / self._never_of(score.run).total_flops for score in scores)
            rows.append(
                (
                    standing.controller,
                    f"{fmean(score.run.test_loss for score in scores):.4f}",
                    f"{fmean(score.gain for score in scores):+.4f}",
                    f"{fmean(score.rent for score in scores):.4f}",
                    shown(standing.utility),
                    f"{fmean(score.run.parameters + score.run.added_parameters for score in scores):,.0f}",
                    f"{flops:.2f}×",
                    "" if standing.ahead is None else shown(standing.ahead),
                    "" if standing.p_value is None else f"{standing.p_value:.3f}",
                )
            )
        title = (
            f"rent {level}: {rent.parameters:g}·log(1 + added/host parameters) + {rent.flops:g}·added/host FLOPs, in nats for ten classes"
        )
        return f"{title}\n{aligned(rows, numbers=True)}"

    def to_builtins(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        return {
            "compared": self.compared,
            "config": msgspec.to_builtins(self.config),
            "schedules": self.schedules,
            "notes": self.notes,
            "runs": msgspec.to_builtins(self.runs),
            "standings": [msgspec.to_builtins(standing) for level in self.config.levels for standing in self.standings(level)],
            "pooled": {name: msgspec.to_builtins(self.pooled(name)) for name in self.controllers() if name != self.compared},
        }


def shown(interval: Interval) -> str:
    return f"{interval.estimate:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"
