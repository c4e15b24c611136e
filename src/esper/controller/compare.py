"""Comparison of controllers on the same hosts, seed by seed, with baselines and with alternatives to growing.

    never              the host without growth; the reference for all gains
    random             a random plan, one seed per slot at most, with as many seeds in total as the compared controller has grown
    schedule           the best fixed plan for each rent level, chosen on training seeds; the plans include "grow nothing"
    heuristic          the heuristic controller of growth
    longer             the host without growth, trained for as many FLOPs as the compared controller used
    final size         the final network of the compared controller, present from the start with the same zero initialisation, at the same
                       FLOPs
    sweep              the best of several static sizes and the host itself, by validation loss and rent, charged the FLOPs of all of them

Utility is the gain in test loss over never, in nats, minus the rent. The test data are used for no decision and no choice. On a CPU, a
controller that grows nothing gives exactly the result of never; on a GPU, fleets of different sizes round differently.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch

from esper.controller.config import RENT_LEVELS, CompareConfig
from esper.controller.domain import training_seeds
from esper.controller.evaluation import EvalCase, EvalRun, EvalSetting, run_cases
from esper.controller.layout import growth_in_depth
from esper.controller.learned import load_controller
from esper.devices import find_device, threads
from esper.fleet.config import HostConfig
from esper.fleet.data import TaskTensors
from esper.growth.config import RentConfig
from esper.growth.controllers.baselines import Never, Planned, Random
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.host.slotted import add_slots
from esper.growth.lifecycle.slots import options_for
from esper.growth.lifecycle.stages import Controller, Cost
from esper.growth.measure.contribution import rent_of
from esper.rng import Streams
from esper.statistics import Interval, bootstrap_interval, holm, paired_interval, paired_p_value
from esper.tasks import Task
from esper.text_table import aligned

OnProgress = Callable[[str, int], Any]  # (present part of the comparison, number of decisions just made)
Plan = tuple[tuple[int, str, str], ...]  # (epoch, slot, blueprint) of every seed

SCHEDULE_TIMES = (0.0, 0.2)  # shares of the training after which fixed schedules grow
SWEEP = "sweep"  # name of the best static size in the tables
HEADING = ("controller", "test loss", "gain", "rent", "utility [95 %]", "parameters", "FLOPs", "compared − this [95 %]", "Holm p")


def compare(config: CompareConfig, load: Callable[[str], Task], *, on_progress: OnProgress = lambda what, decisions: None) -> Comparison:
    """Run all controllers on all tasks and hosts of the config. `load` returns a task by name."""
    runs: list[EvalRun] = []
    schedules: dict[str, str] = {}
    notes = _notes_on_training_hosts(config)
    device = find_device(config.device)
    dtype = torch.float64 if config.fleet.precision == "float64" else torch.float32
    with threads(config.threads):
        for name in config.tasks:
            task = load(name)
            tensors = TaskTensors.of(task, device=device, dtype=dtype)
            for host in config.hosts:
                eval_setting = EvalSetting(task, host, tensors, config.fleet, growth_in_depth(config.growth), device, config.rows)
                setting_runs = _SettingRuns(config, eval_setting, on_progress)
                runs += setting_runs.run() + (setting_runs.sweep() if host == config.hosts[0] else [])
                schedules |= {f"{name} {host} {level}": plan for level, plan in setting_runs.chosen.items()}
                notes += setting_runs.notes
    return Comparison(config, runs, schedules, notes=notes)


def _notes_on_training_hosts(config: CompareConfig) -> list[str]:
    """Return a note for every host that a compared controller was trained on."""
    trained = {name: load_controller(Path(name)).description.info.get("domain", {}).get("hosts", ()) for name in config.files}
    return [
        f"{name} was trained on hosts {host}, so their results are not held-out results for it"
        for name, hosts in trained.items()
        for host in config.hosts
        if host in hosts
    ]


class _SettingRuns:
    """Runs all controllers on one task and one architecture."""

    def __init__(self, config: CompareConfig, eval_setting: EvalSetting, on_progress: OnProgress) -> None:
        self.config, self.eval_setting, self._on_progress = config, eval_setting, on_progress
        self.files, self.compared, self.seeds = config.files, config.compared, range(config.seeds)
        self.chosen: dict[str, str] = {}  # rent level -> description of the chosen fixed schedule
        self.notes: list[str] = []

    def run(self) -> list[EvalRun]:
        """Return the runs of all controllers and controls."""
        runs = self._run_cases("never", [EvalCase("never", self._setting(seed), Never(), is_measured=False) for seed in self.seeds])
        for name in (*self.files, *(["heuristic"] if "heuristic" in self.config.controllers else [])):
            make = self._maker(name)
            settings = [(level, self._setting(seed, level)) for level in self.config.levels for seed in self.seeds]
            runs += self._run_cases(name, [EvalCase(name, setting, make(setting), level) for level, setting in settings])
        if "schedule" in self.config.controllers:
            runs += self._run_schedule()
        if "random" in self.config.controllers:
            runs += self._run_cases("random", self._random_cases(runs))
        if self.config.controls and self.compared != "never":
            runs += self._run_cases("controls", self._control_cases(runs))
        return runs

    def _run_cases(self, what: str, cases: Sequence[EvalCase]) -> list[EvalRun]:
        """Run cases; `what` names this part of the comparison to `on_progress`."""
        where = f"{self.eval_setting.task.name} {self.eval_setting.host}: {what}"
        return run_cases(self.eval_setting, cases, partial(self._on_progress, where))

    # Cases

    def _setting(self, seed: int, level: str | None = None, *, horizon: int | None = None) -> HostConfig:
        """Return the setting of the host of a seed, with the rent of a level; None: the default rent."""
        rent = RentConfig() if level is None else RENT_LEVELS[level]
        return HostConfig(
            seed=seed, growth_seed=seed, horizon=horizon or self.config.horizon, learning_rate=self.config.learning_rate, rent=rent
        )

    def _maker(self, name: str) -> Callable[[HostConfig], Controller]:
        """Return a function that makes a new controller for a host: the heuristic, or one from a file."""
        growth = self.config.growth
        if name == "heuristic":
            return lambda setting: Heuristic(msgspec.structs.replace(growth, rent=setting.rent, seed=setting.growth_seed))
        fresh = load_controller(Path(name))
        return lambda setting: fresh.new_copy()

    def _random_cases(self, runs: Sequence[EvalRun]) -> list[EvalCase]:
        """Return the cases with random plans: at each level, as many seeds in total as the compared controller has grown there.

        The seeds are distributed evenly over the hosts. If the compared controller did not run at a level, each plan draws its number.
        """
        cases = []
        where = f"{self.eval_setting.task.name} {self.eval_setting.host}"
        for level in self.config.levels:
            used = [run.grown for run in runs if run.controller == self.compared and run.level in (level, None)]
            streams = Streams(self.config.seed).spawn(f"random plans {where} {level}")
            counts = _distribute(sum(used), self.config.seeds, streams) if used else [None] * self.config.seeds
            for seed, count in zip(self.seeds, counts, strict=True):
                plan = Random(seed=streams.integer(f"plan {seed}"), seeds=count)
                cases.append(EvalCase("random", self._setting(seed, level), plan, level))
        return cases

    def _control_cases(self, runs: Sequence[EvalRun]) -> list[EvalCase]:
        """Return the controls `longer` and `final size` for every run of the compared controller.

        Both spend the FLOPs of that run, including its measurements, on training alone, because they need no measurements.
        """
        cases, fleet = [], self.config.fleet
        samples_per_segment = fleet.steps_for(len(self.eval_setting.task.train)) * fleet.batch_size
        for run in [run for run in runs if run.controller == self.compared]:
            # Convert the FLOPs into a number of training segments; a larger network gets fewer of them.
            decisions = run.total_flops / (3 * run.flops_per_sample * samples_per_segment)
            setting = self._setting(run.seed, run.level, horizon=math.ceil(decisions))
            cases.append(EvalCase("longer", setting, Never(), run.level, is_measured=False))
            share = 1 + run.added_flops / run.flops_per_sample
            setting = self._setting(run.seed, run.level, horizon=math.ceil(decisions / share))
            plan = Planned([(0, slot, blueprint) for slot, blueprint in run.kept])
            cases.append(EvalCase("final size", setting, plan, run.level, is_static=True, is_measured=False))
        return cases

    # The best fixed schedule

    def _run_schedule(self) -> list[EvalRun]:
        """Choose the best fixed plan for each rent level on training seeds, and run it on the held-out seeds."""
        plans = self._plans()
        seeds = training_seeds(self.config.tuning_seeds, seed=self.config.seed)
        tuning = [EvalCase(str(number), self._setting(seed), Planned(plan)) for number, plan in enumerate(plans) for seed in seeds]
        found = self._run_cases("tuning the schedule", tuning)
        never = {run.seed: run.val_loss for run in found[: len(seeds)]}  # the first plan grows nothing
        # Note the cost of the choice.
        times = sum(run.total_flops for run in found) / fmean(run.total_flops for run in found[: len(seeds)])
        where = f"{self.eval_setting.task.name} {self.eval_setting.host}"
        self.notes.append(f"{where}: the schedules were chosen by {len(found)} runs that took {times:.0f} times the FLOPs of never")
        # For each level, take the plan with the highest mean utility by validation loss.
        cases = []
        for level in self.config.levels:
            worth = [
                fmean(
                    never[run.seed] - run.val_loss - run.unit * rent_at(run, RENT_LEVELS[level])
                    for run in found
                    if run.controller == str(number)
                )
                for number in range(len(plans))
            ]
            best = plans[max(range(len(plans)), key=worth.__getitem__)]
            self.chosen[level] = ", ".join(f"{blueprint} after {slot} at {epoch}" for epoch, slot, blueprint in best) or "grow nothing"
            cases += [EvalCase("schedule", self._setting(seed, level), Planned(best), level) for seed in self.seeds]
        return self._run_cases("schedule", cases)

    def _plans(self) -> list[Plan]:
        """Return the fixed plans: grow nothing; every blueprint in each slot alone and in all slots, at each of SCHEDULE_TIMES."""
        task = self.eval_setting.task
        slotted = add_slots(task.make_host(self.eval_setting.host, seed=0), task.example_input, slots=self.config.growth.slots)
        options = {name: {option.name for option in options_for(slotted.place(name), self.config.growth)} for name in slotted.slots}
        names = sorted(set().union(*options.values()))
        where = [*((slot,) for slot in options), tuple(options)]
        plans: list[Plan] = [()]
        for part, blueprint, slots in itertools.product(SCHEDULE_TIMES, names, where):
            if all(blueprint in options[slot] for slot in slots):
                plans.append(tuple((round(part * self.config.horizon), slot, blueprint) for slot in slots))
        return plans

    # Static sizes

    def sweep(self) -> list[EvalRun]:
        """Return the runs of all static sizes. They do not depend on the host that grows."""
        found: list[EvalRun] = []
        for host in self.config.sweep:
            eval_setting = dataclasses.replace(self.eval_setting, host=host)
            cases = [EvalCase(f"static {host}", self._setting(seed), Never(), is_measured=False) for seed in self.seeds]
            found += run_cases(eval_setting, cases, partial(self._on_progress, f"{self.eval_setting.task.name}: sweep"))
        return found


def _distribute(total: int, hosts: int, streams: Streams) -> list[int]:
    """Return the share of each host of `total`, as even as possible. The hosts that get one more are drawn."""
    each, rest = divmod(total, hosts)
    with_one_more = set(streams.numpy("who gets more").permutation(hosts)[:rest].tolist())
    return [each + (place in with_one_more) for place in range(hosts)]


def rent_at(run: EvalRun, rent: RentConfig) -> float:
    """Return the rent of the network of a run, in nats for ten classes."""
    return rent_of(Cost(run.added_parameters, run.added_flops), Cost(run.parameters, run.flops_per_sample), rent)


# Results: all runs, and a table per rent level with paired intervals


@dataclass(frozen=True)
class RunScore:
    """Gain and rent of one run at one rent level, in nats."""

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

    def scores(self, controller: str, level: str) -> list[RunScore]:
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

    def _score(self, run: EvalRun, level: str) -> RunScore:
        """Return gain and rent of a run, both relative to the host that never grew."""
        never = self._never_of(run)
        host = Cost(never.parameters, never.flops_per_sample)
        whole = Cost(run.parameters + run.added_parameters, run.flops_per_sample + run.added_flops)
        # A static size that is smaller than the host has no negative rent.
        added = Cost(max(whole.parameters - host.parameters, 0), max(whole.flops - host.flops, 0))
        return RunScore(run, never.test_loss - run.test_loss, run.unit * rent_of(added, host, RENT_LEVELS[level]))

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
        """Return the mean utility of the compared controller minus another's, over all rent levels, with an interval over the hosts."""
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
        pooled = [f"{self.compared} − {name}, all levels: {interval_text(self.pooled(name))} nats" for name in others]
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
                    interval_text(standing.utility),
                    f"{fmean(score.run.parameters + score.run.added_parameters for score in scores):,.0f}",
                    f"{flops:.2f}×",
                    "" if standing.ahead is None else interval_text(standing.ahead),
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


def interval_text(interval: Interval) -> str:
    return f"{interval.estimate:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"
