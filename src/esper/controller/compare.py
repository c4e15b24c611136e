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
from collections.abc import Callable, Sequence
from functools import partial
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
from esper.controller.lives import Contestant, EvalRun, EvalSetting, live
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
from esper.tasks import Task

Progress = Callable[[str, int], Any]  # (present part of the comparison, number of decisions just made)
Plan = tuple[tuple[int, str, str], ...]  # (epoch, slot, blueprint) of every seed

SCHEDULE_TIMES = (0.0, 0.2)  # parts of the training after which fixed schedules grow


def compare(config: CompareConfig, load: Callable[[str], Task], *, on_progress: Progress = lambda what, decisions: None) -> Comparison:
    """Run all controllers on all tasks and hosts of the config. `load` returns a task by name."""
    runs: list[EvalRun] = []
    schedules: dict[str, str] = {}
    notes = _not_held_out(config)
    device = find_device(config.device)
    dtype = torch.float64 if config.fleet.precision == "float64" else torch.float32
    with threads(config.threads):
        for name in config.tasks:
            task = load(name)
            tensors = TaskTensors.of(task, device=device, dtype=dtype)
            for host in config.hosts:
                eval_setting = EvalSetting(task, host, tensors, config.fleet, config.growth, device, config.rows)
                contest = _Contest(config, eval_setting, on_progress)
                runs += contest.run() + (contest.sweep() if host == config.hosts[0] else [])
                schedules |= {f"{name} {host} {level}": plan for level, plan in contest.chosen.items()}
                notes += contest.notes
    return Comparison(config, runs, schedules, notes=notes)


def _not_held_out(config: CompareConfig) -> list[str]:
    """Return a note for every host that a compared controller was trained on."""
    trained = {name: load_controller(Path(name)).description.info.get("domain", {}).get("hosts", ()) for name in config.files}
    return [
        f"{name} was trained on hosts {host}, so their results are not held-out results for it"
        for name, hosts in trained.items()
        for host in config.hosts
        if host in hosts
    ]


class _Contest:
    """Runs all controllers on one task and one architecture."""

    def __init__(self, config: CompareConfig, eval_setting: EvalSetting, on_progress: Progress) -> None:
        self.config, self.eval_setting, self._on_progress = config, eval_setting, on_progress
        self.files, self.compared = config.files, config.compared
        self.chosen: dict[str, str] = {}  # rent level -> description of the chosen fixed schedule
        self.notes: list[str] = []

    def run(self) -> list[EvalRun]:
        """Return the runs of all controllers and controls."""
        runs = self._live("never", [Contestant("never", self._setting(seed), Never(), is_measured=False) for seed in self._seeds()])
        for name in (*self.files, *(["heuristic"] if "heuristic" in self.config.controllers else [])):
            runs += self._live(name, self._for_all_levels(name, self._maker(name)))
        if "schedule" in self.config.controllers:
            runs += self._scheduled()
        if "random" in self.config.controllers:
            runs += self._live("random", self._random(runs))
        if self.config.controls and self.compared != "never":
            runs += self._live("controls", self._controls(runs))
        return runs

    # Contestants

    def _seeds(self) -> range:
        return range(self.config.seeds)

    def _setting(self, seed: int, level: str | None = None, *, horizon: int | None = None) -> HostConfig:
        rent = RentConfig() if level is None else RENT_LEVELS[level]
        return HostConfig(
            seed=seed, growth_seed=seed, horizon=horizon or self.config.horizon, learning_rate=self.config.learning_rate, rent=rent
        )

    def _maker(self, name: str) -> Callable[[HostConfig], Controller]:
        growth = self.config.growth
        if name == "heuristic":
            return lambda setting: Heuristic(msgspec.structs.replace(growth, rent=setting.rent, seed=setting.growth_seed))
        fresh = load_controller(Path(name))
        return lambda setting: fresh.anew()

    def _for_all_levels(self, name: str, make: Callable[[HostConfig], Controller]) -> list[Contestant]:
        settings = [(level, self._setting(seed, level)) for level in self.config.levels for seed in self._seeds()]
        return [Contestant(name, setting, make(setting), level) for level, setting in settings]

    def _random(self, runs: Sequence[EvalRun]) -> list[Contestant]:
        """Return the random plans, with as many seeds in total as the compared controller has grown at that level.

        The seeds are distributed evenly over the hosts. If the compared controller did not run at that level, each plan draws its number.
        """
        contestants = []
        where = f"{self.eval_setting.task.name} {self.eval_setting.host}"
        for level in self.config.levels:
            used = [run.grown for run in runs if run.controller == self.compared and run.level in (level, None)]
            streams = Streams(self.config.seed).spawn(f"random plans {where} {level}")
            counts = _shared_out(sum(used), len(self._seeds()), streams) if used else [None] * len(self._seeds())
            for seed, count in zip(self._seeds(), counts, strict=True):
                plan = Random(seed=streams.integer(f"plan {seed}"), seeds=count)
                contestants.append(Contestant("random", self._setting(seed, level), plan, level))
        return contestants

    def _controls(self, runs: Sequence[EvalRun]) -> list[Contestant]:
        """Return the controls `longer` and `final size` for every run of the compared controller.

        Both spend the FLOPs of that run, including its measurements, on training alone, because they need no measurements.
        """
        contestants = []
        for run in [run for run in runs if run.controller == self.compared]:
            # Convert the FLOPs into a number of training segments; a larger network gets fewer of them.
            decisions = run.total_flops / self._training_flops(run.flops_per_sample)
            setting = self._setting(run.seed, run.level, horizon=math.ceil(decisions))
            contestants.append(Contestant("longer", setting, Never(), run.level, is_measured=False))
            share = 1 + run.added_flops / run.flops_per_sample
            setting = self._setting(run.seed, run.level, horizon=math.ceil(decisions / share))
            plan = Planned([(0, slot, blueprint) for slot, blueprint in run.kept])
            contestants.append(Contestant("final size", setting, plan, run.level, is_static=True, is_measured=False))
        return contestants

    def _training_flops(self, flops_per_sample: int) -> int:
        """Return the FLOPs of training a host between two decisions."""
        fleet = self.config.fleet
        return 3 * flops_per_sample * fleet.steps_for(len(self.eval_setting.task.train)) * fleet.batch_size

    # The best fixed schedule

    def _scheduled(self) -> list[EvalRun]:
        """Choose the best fixed plan for each rent level on training seeds, and run it on the held-out seeds."""
        plans = self._plans()
        seeds = training_seeds(self.config.tuning_seeds, seed=self.config.seed)
        tuning = [Contestant(str(number), self._setting(seed), Planned(plan)) for number, plan in enumerate(plans) for seed in seeds]
        found = self._live("tuning the schedule", tuning)
        never = {run.seed: run.val_loss for run in found[: len(seeds)]}  # the first plan grows nothing
        # Note the cost of the choice.
        times = sum(run.total_flops for run in found) / fmean(run.total_flops for run in found[: len(seeds)])
        where = f"{self.eval_setting.task.name} {self.eval_setting.host}"
        self.notes.append(f"{where}: the schedules were chosen by {len(found)} runs that took {times:.0f} times the FLOPs of never")
        # For each level, take the plan with the highest mean utility by validation loss.
        contestants = []
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
            contestants += [Contestant("schedule", self._setting(seed, level), Planned(best), level) for seed in self._seeds()]
        return self._live("schedule", contestants)

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
            contestants = [Contestant(f"static {host}", self._setting(seed), Never(), is_measured=False) for seed in self._seeds()]
            found += live(eval_setting, contestants, partial(self._on_progress, f"{self.eval_setting.task.name}: sweep"))
        return found

    def _live(self, what: str, contestants: Sequence[Contestant]) -> list[EvalRun]:
        where = f"{self.eval_setting.task.name} {self.eval_setting.host}: {what}"
        return live(self.eval_setting, contestants, partial(self._on_progress, where))


def _shared_out(total: int, hosts: int, streams: Streams) -> list[int]:
    """Distribute `total` as evenly as possible over the hosts; draw the ones that get one more."""
    each, rest = divmod(total, hosts)
    lucky = set(streams.numpy("who gets more").permutation(hosts)[:rest].tolist())
    return [each + (place in lucky) for place in range(hosts)]


def rent_at(run: EvalRun, rent: RentConfig) -> float:
    """Return the rent of the network of a run, in nats for ten classes."""
    return rent_of(Cost(run.added_parameters, run.added_flops), Cost(run.parameters, run.flops_per_sample), rent)
