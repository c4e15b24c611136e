"""The honest comparison: every controller on the same hosts, seed by seed, against what anybody would do instead.

    never              the host as it is; what all gains are measured from
    random             a drawn plan, kept to the end, with as many seeds as the controller that is compared uses on average
    schedule           the best fixed plan, chosen for each rent level on training seeds, "grow nothing" among them
    heuristic          growth's own rules
    longer             the small host, trained for as many FLOPs as the compared controller spent
    final size         what the compared controller ended with, there from the start with the same zero initialisation, at the same FLOPs
    sweep              static sizes; what counts is the best by validation loss, and the FLOPs of all of them

Utility is the nats of test loss gained over never, minus rent. Nobody decides or is chosen by the test part.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch

from esper.controller.compare_config import CompareConfig
from esper.controller.comparison import Comparison
from esper.controller.config import RENT_LEVELS
from esper.controller.domain import training_seeds
from esper.controller.learned import load_controller
from esper.controller.lives import Contestant, Course, Run, live
from esper.devices import find_device, threads
from esper.fleet.config import HostSetting
from esper.fleet.data import TaskTensors
from esper.growth.config import Rent
from esper.growth.controllers import Never, Planned, Random
from esper.growth.decisions import Controller
from esper.growth.garden import options_for
from esper.growth.heuristic import Heuristic
from esper.growth.rent import rent_of
from esper.growth.slotted import add_slots
from esper.growth.state import Cost
from esper.rng import Streams
from esper.tasks import Task

Progress = Callable[[str, int], Any]  # what is at work, and how many decisions were made just now
Plan = tuple[tuple[int, str, str], ...]

SCHEDULE_TIMES = (0.0, 0.2)  # parts of the training after which a fixed schedule grows


def compare(config: CompareConfig, load: Callable[[str], Task], *, on_progress: Progress = lambda what, decisions: None) -> Comparison:
    runs: list[Run] = []
    schedules: dict[str, str] = {}
    device = find_device(config.device)
    dtype = torch.float64 if config.fleet.precision == "float64" else torch.float32
    with threads(config.threads):
        for name in config.tasks:
            task = load(name)
            tensors = TaskTensors.of(task, device=device, dtype=dtype)
            for host in config.hosts:
                course = Course(task, host, tensors, config.fleet, config.growth, device, config.rows)
                contest = _Contest(config, course, on_progress)
                runs += contest.run()
                schedules |= {f"{name} {host} {level}": plan for level, plan in contest.chosen.items()}
    return Comparison(config, runs, schedules)


class _Contest:
    """All controllers on one task and one architecture."""

    def __init__(self, config: CompareConfig, course: Course, on_progress: Progress) -> None:
        self.config, self.course, self._on_progress = config, course, on_progress
        self.files = [name for name in config.controllers if name not in ("never", "random", "schedule", "heuristic")]
        self.compared = (
            self.files[0] if self.files else next((name for name in ("heuristic", "schedule") if name in config.controllers), None)
        )
        self.chosen: dict[str, str] = {}  # level -> the fixed schedule that was chosen, in words

    def run(self) -> list[Run]:
        runs = self._live("never", [Contestant("never", self._setting(seed), Never()) for seed in self._seeds()])
        for name in (*self.files, *(["heuristic"] if "heuristic" in self.config.controllers else [])):
            runs += self._live(name, self._for_all_levels(name, self._maker(name)))
        if "schedule" in self.config.controllers:
            runs += self._scheduled()
        if "random" in self.config.controllers:
            runs += self._live("random", self._random(runs))
        if self.config.controls and self.compared != "never":
            runs += self._live("controls", self._controls(runs))
        return runs + self._sweep()

    # Who takes part

    def _seeds(self) -> range:
        return range(self.config.seeds)

    def _setting(self, seed: int, level: str | None = None, *, horizon: int | None = None) -> HostSetting:
        rent = Rent() if level is None else RENT_LEVELS[level]
        return HostSetting(
            seed=seed, growth_seed=seed, horizon=horizon or self.config.horizon, learning_rate=self.config.learning_rate, rent=rent
        )

    def _maker(self, name: str) -> Callable[[HostSetting], Controller]:
        growth = self.config.growth
        if name == "heuristic":
            return lambda setting: Heuristic(msgspec.structs.replace(growth, rent=setting.rent, seed=setting.growth_seed))
        fresh = load_controller(Path(name), rules=growth.lifecycle)
        return lambda setting: fresh.anew()

    def _for_all_levels(self, name: str, make: Callable[[HostSetting], Controller]) -> list[Contestant]:
        settings = [(level, self._setting(seed, level)) for level in self.config.levels for seed in self._seeds()]
        return [Contestant(name, setting, make(setting), level) for level, setting in settings]

    def _random(self, runs: Sequence[Run]) -> list[Contestant]:
        """With as many seeds as the compared controller used on average: a share of the hosts gets one more than the others."""
        contestants = []
        for level in self.config.levels:
            used = [run.grown for run in runs if run.controller == self.compared and run.level in (level, None)]
            mean = fmean(used) if used else 1.0
            chances = Streams(self.config.seed).numpy(f"random plans {level}").random(self.config.seeds)
            for seed in self._seeds():
                count = int(mean) + int(chances[seed] < mean - int(mean))
                plan_seed = Streams(self.config.seed).integer(f"random plan {level} {seed}")
                contestants.append(Contestant("random", self._setting(seed, level), Random(seed=plan_seed, seeds=count), level))
        return contestants

    def _controls(self, runs: Sequence[Run]) -> list[Contestant]:
        never = {run.seed: run for run in runs if run.controller == "never"}
        contestants = []
        for run in [run for run in runs if run.controller == self.compared]:
            ratio = run.total_flops / never[run.seed].total_flops
            longer = max(round(self.config.horizon * ratio), 1)
            contestants.append(Contestant("longer", self._setting(run.seed, run.level, horizon=longer), Never(), run.level))
            share = 1 + run.added_flops / run.flops_per_sample
            horizon = max(round(longer / share), 1)
            plan = Planned([(0, slot, blueprint) for slot, blueprint in run.kept])
            setting = self._setting(run.seed, run.level, horizon=horizon)
            contestants.append(Contestant("final size", setting, plan, run.level, is_static=True))
        return contestants

    # The best fixed schedule

    def _scheduled(self) -> list[Run]:
        plans = self._plans()
        seeds = training_seeds(self.config.tuning_seeds, seed=self.config.seed)
        tuning = [Contestant(str(number), self._setting(seed), Planned(plan)) for number, plan in enumerate(plans) for seed in seeds]
        found = self._live("tuning the schedule", tuning)
        never = {run.seed: run.val_loss for run in found[: len(seeds)]}  # the first plan grows nothing
        contestants = []
        for level in self.config.levels:
            worth = [
                fmean(never[run.seed] - run.val_loss - rent_at(run, RENT_LEVELS[level]) for run in found if run.controller == str(number))
                for number in range(len(plans))
            ]
            best = plans[max(range(len(plans)), key=worth.__getitem__)]
            self.chosen[level] = ", ".join(f"{blueprint} after {slot} at {epoch}" for epoch, slot, blueprint in best) or "grow nothing"
            contestants += [Contestant("schedule", self._setting(seed, level), Planned(best), level) for seed in self._seeds()]
        return self._live("schedule", contestants)

    def _plans(self) -> list[Plan]:
        """Grow nothing; then every blueprint in each slot alone and in all of them, early and later."""
        slotted = add_slots(
            self.course.task.make_host(self.course.host, seed=0), self.course.task.example_input, slots=self.config.growth.slots
        )
        options = {name: {option.name for option in options_for(slotted.place(name), self.config.growth)} for name in slotted.slots}
        names = sorted(set().union(*options.values()))
        where = [*((slot,) for slot in options), tuple(options)]
        plans: list[Plan] = [()]
        for part, blueprint, slots in itertools.product(SCHEDULE_TIMES, names, where):
            if all(blueprint in options[slot] for slot in slots):
                plans.append(tuple((round(part * self.config.horizon), slot, blueprint) for slot in slots))
        return plans

    # Static sizes

    def _sweep(self) -> list[Run]:
        found: list[Run] = []
        for host in self.config.sweep:
            course = dataclasses.replace(self.course, host=host)
            contestants = [Contestant(f"static {host}", self._setting(seed), Never()) for seed in self._seeds()]
            found += live(course, contestants, lambda decisions: self._on_progress("sweep", decisions))
        return found

    def _live(self, what: str, contestants: Sequence[Contestant]) -> list[Run]:
        where = f"{self.course.task.name} {self.course.host}: {what}"
        return live(self.course, contestants, lambda decisions: self._on_progress(where, decisions))


def rent_at(run: Run, rent: Rent) -> float:
    """What a run's network costs at a price level."""
    return rent_of(Cost(run.added_parameters, run.added_flops), Cost(run.parameters, run.flops_per_sample), rent)
