"""Branches of the heuristic, from which the shipped controller is learned.

    python benchmarks/controller/branches.py collect --draw 101 --cells 900 --device cuda --jobs 15
    python benchmarks/controller/branches.py test          # in cells that the ensemble has not seen
    python benchmarks/controller/branches.py fit --to learned.safetensors

A cell is drawn from the whole domain of controllers. Its hosts have data and learning rates of their own (`draw_variant`), and rents, one
in four the default. All begin as the heuristic would train them. In copies of each, one step is another at one turn, and the heuristic goes
on from there. The branches of a host grow nothing, or take one of two steps that are drawn for all hosts of the cell (the fewer kinds of
seeds a fleet has, the faster it is), or a third behind the first of these. The turn is that of the heuristic's first look, in one of four
cells a later one. With `--controller` that one decides before and behind it, and its own choice is a branch too. A record holds what a
controller sees (`esper.controller.branches.described`), and what the branch changes at the end. Losses are those of the best state on the
validation data; records made before this change, `controller_branches.jsonl.xz` among them, have the losses on the test data.

`test` chooses at every turn among the steps that were tried there, by ensembles that have not seen the cell.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import torch

from esper.controller.branches import Branches, Change, described, fit
from esper.controller.cells import draw_cell, draw_variant
from esper.controller.config import DomainConfig, GainsConfig
from esper.controller.evaluation import EvalCase, EvalRun, EvalSetting, run_cases
from esper.controller.features import HOST_WIDTH, observe
from esper.controller.learned import load_controller, save_controller
from esper.controller.turn import WAIT, Step, Turn, steps_of
from esper.fleet import Fleet, FleetConfig
from esper.fleet.data import TaskTensors
from esper.growth import GrowthConfig
from esper.growth.config import RentConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.lifecycle.stages import Controller, Decision, GrowthState
from esper.rng import Streams
from esper.statistics import student_interval
from esper.tasks import load_task

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import run_all
from benchmarks.records import RESULTS, Output, Record

HOSTS, LEAST_HOSTS = 13, 2  # per cell, fewer if they would not fit into the memory
KEYS: dict[str, tuple[str, ...]] = {"wait": ("wait",), "one": ("one",), "other": ("other",), "two": ("one", "more")}  # branches of a host
CHOSEN = "chosen"  # by the controller that decides
PARENTS = {"two": "one"}  # the branch that another is compared with; otherwise the host itself
SHARE_LATER = 0.25  # of the cells
LATEST = 0.6  # of the training
PRICES = 0.001, 0.1
VALIDATION = 1_000  # samples


# Collecting


class Steps:
    """The steps that the branches of all hosts of a cell take, each drawn when it is needed first."""

    def __init__(self, rng: np.random.Generator, *, is_late: bool) -> None:
        self.rng, self.is_late = rng, is_late
        self._at: int | None = None
        self._drawn: dict[str, Step] = {"wait": WAIT}

    def at(self, first: int, epochs: int) -> int:
        """Return the epoch after which the hosts branch. `first` is that of the heuristic's first look."""
        if self._at is None:
            later = 1 + int(self.rng.integers(max(int(LATEST * epochs) - first, 1))) if self.is_late else 0
            self._at = first + later
        return self._at

    def draw(self, key: str, turn: Turn) -> Step | None:
        """Return a step, the same for all hosts. All kinds of steps are drawn equally often."""
        if key not in self._drawn:
            kinds: dict[tuple[str, str, bool], list[Step]] = {}
            for step in turn.legal():
                if step.op not in ("look", "wait") and step not in self._drawn.values():
                    kind = next((target.kind for target in turn.targets if target.name == step.target), "")
                    kinds.setdefault((step.op, kind, step.blueprint.startswith("widen")), []).append(step)
            if not kinds:
                return None
            some = kinds[sorted(kinds)[self.rng.integers(len(kinds))]]
            self._drawn[key] = some[self.rng.integers(len(some))]
        return self._drawn[key]


class Branch:
    """A controller, but where the host branches: there, the steps with these keys, then what the heuristic advises.

    `taken` tells about the last of these steps. Without a controller the heuristic decides.
    """

    def __init__(self, config: GrowthConfig, steps: Steps, keys: Sequence[str], controller: Controller | None = None) -> None:
        self.heuristic, self.steps, self.keys, self.controller = Heuristic(config), steps, keys, controller
        self.looked_at: int | None = None
        self.taken: tuple[Turn, Step] | None = None

    def decide(self, state: GrowthState) -> Decision:
        advice = self.heuristic.decide(state)
        chosen = advice if self.controller is None else self.controller.decide(state)
        first = self.heuristic.first_look(state.epochs)
        at = self.steps.at(first, state.epochs or 0)
        decision = self._branch(advice, chosen, state) if state.epoch == at else replace(chosen, passed_over={})
        if decision.probe or state.epoch in (first - 1, at - 1):  # whatever branches, has seen all candidates
            decision = replace(decision, probe=True, not_probed=frozenset())
            self.looked_at = state.epoch
        return decision

    def _branch(self, advice: Decision, chosen: Decision, state: GrowthState) -> Decision:
        turn = Turn(state, steps_of(advice, state), self.looked_at)
        other = next((step for step in steps_of(chosen, state) if step not in turn.advice), WAIT)
        for key in self.keys:
            step = other if key == CHOSEN else self.steps.draw(key, turn)
            if step is None or step not in turn.legal():
                self.taken = None
                break
            self.taken = None if step == turn.advised else (turn, step)
            turn = turn.after(step)
        while not turn.is_over:
            turn = turn.after(turn.advised)
        return turn.decision(advice.reason)


Cases = dict[tuple[int, str], EvalCase]


def _hosts_of(
    number: int, draw: int, device: str, *, room: float, keys: Mapping[str, Sequence[str]], file: Path | None = None
) -> tuple[Cases, EvalSetting]:
    """Return the cases of a cell, by host and name of the branch, and how they are trained.

    `file` is that of the controller; None: the heuristic.
    """
    cell, growth, place = draw_cell(DomainConfig(), number=number, seed=draw), GrowthConfig(), torch.device(device)
    task, streams = cell.task(load_task), Streams(draw).spawn(f"branches {number}")
    rng, tensors = streams.numpy("hosts"), TaskTensors.of(task, device=place, dtype=torch.float32)
    fleet = cell.fleet(FleetConfig(validation_samples=VALIDATION))
    each = Fleet(task, task.maker(cell.host), hosts=1, growth=growth, config=fleet, device=place, tensors=tensors).memory_per_host().most
    hosts = int(min(max(room // (each * len(keys)), LEAST_HOSTS), HOSTS))
    steps = Steps(streams.numpy("steps"), is_late=rng.random() < SHARE_LATER)

    cases: Cases = {}
    for host in range(hosts):
        variant = draw_variant(cell, DomainConfig(), rng) if host else cell
        parameters, flops = np.exp(rng.uniform(*np.log(PRICES), size=2)).tolist()
        rent = RentConfig(parameters=parameters, flops=flops) if host % 4 else RentConfig()
        setting = variant.host_config(host, len(task.train), rent=rent, growth_seed=host)
        for name, own in keys.items():
            decides = None if file is None else load_controller(file, config=growth)
            cases[host, name] = EvalCase(name, setting, Branch(growth, steps, own, decides))
    return cases, EvalSetting(task, cell.host, tensors, fleet, growth, place, rows=len(cases))


def collect_cell(number: int, draw: int, room: float, device: str, file: Path | None) -> list[Record]:
    """Train the hosts of a cell with their branches, in one fleet."""
    keys = {"": (), **KEYS, **({} if file is None else {CHOSEN: (CHOSEN,)})}
    cases, setting = _hosts_of(number, draw, device, room=room, keys=keys, file=file)
    runs = dict(zip(cases, run_cases(setting, list(cases.values())), strict=True))
    records: list[Record] = []
    for (host, name), case in cases.items():
        assert isinstance(case.controller, Branch)
        if case.controller.taken is not None:
            turn, step = case.controller.taken
            change = change_of(runs[host, name], runs[host, PARENTS.get(name, "")])
            records.append({"draw": draw, "number": number, "host": host, **about(turn, step), "change": change})
    return records or [{"draw": draw, "number": number}]


def about(turn: Turn, step: Step) -> Record:
    """Return what a record says of a step at a turn."""
    features = described(observe(turn), step, turn.advised)
    rent = turn.state.rent
    return {
        "epoch": turn.state.epoch,
        "epochs": turn.state.epochs,
        "step": list(step),
        "advised": list(turn.advised),
        "rent": [rent.parameters, rent.flops],
        "features": [float(f"{value:.4g}") for value in features.tolist()],
    }


def change_of(run: EvalRun, other: EvalRun) -> Change:
    """Return what a run changes in comparison with another, by the validation data: test data must not be learned from."""

    def size(one: EvalRun) -> tuple[float, float]:
        return math.log1p(one.added_parameters / one.parameters), math.log1p(one.added_flops / one.flops_per_sample)

    (parameters, flops), before = size(run), size(other)
    return Change((run.val_loss - other.val_loss) / run.unit, parameters - before[0], flops - before[1])


# Learning


def read(paths: Sequence[Path]) -> list[Record]:
    """Return the branches in these files."""
    return [record for path in paths for record in _records(path) if "features" in record]


def _records(path: Path) -> Iterator[Record]:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        yield from map(json.loads, lines)


def branches_of(records: Sequence[Record]) -> Branches:
    numbers = {cell: number for number, cell in enumerate(dict.fromkeys((one["draw"], one["number"]) for one in records))}
    return Branches(
        [np.array(one["features"], np.float32) for one in records],
        [Change(*one["change"]) for one in records],
        [numbers[one["draw"], one["number"]] for one in records],
    )


def tested(records: Sequence[Record], *, folds: int, caution: float) -> Record:
    """Choose among the steps that were tried at every turn, by ensembles that have not seen the cell. The interval is over cells."""
    cells = branches_of(records).cells
    fold_of = np.random.default_rng(0).permutation(max(cells) + 1) % folds
    turns: dict[tuple[object, ...], list[tuple[float, float]]] = {}  # of a cell -> (score, cost) of the steps
    for fold in range(folds):
        held_out = [index for index, cell in enumerate(cells) if fold_of[cell] == fold]
        gains = fit(branches_of([one for one, cell in zip(records, cells, strict=True) if fold_of[cell] != fold]), seed=fold)
        for index in held_out:
            one = records[index]
            rent = RentConfig(parameters=one["rent"][0], flops=one["rent"][1])
            mean, deviation, is_far = gains.costs(np.array([one["features"]], np.float32), rent)
            score = math.inf if is_far[0] else float(mean[0] + caution * deviation[0])
            turn = (cells[index], one["host"], one["epoch"], *one["features"][:HOST_WIDTH])
            turns.setdefault(turn, []).append((score, Change(*one["change"]).cost(rent)))
    chosen = {turn: min(steps) for turn, steps in turns.items()}
    costs: dict[object, list[float]] = {}
    for (cell, *_), (score, cost) in chosen.items():
        costs.setdefault(cell, []).append(cost if score < 0 else 0.0)
    interval = student_interval([fmean(some) for some in costs.values()])
    return {
        "what": "test",
        "branches": len(records),
        "cells": len(costs),
        "turns": len(turns),
        "others": fmean(score < 0 for score, _ in chosen.values()),
        "caution": caution,
        "difference": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "worst_tenth": fmean(sorted(map(fmean, costs.values()))[-max(len(costs) // 10, 1) :]),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["collect", "test", "fit"])
    parser.add_argument("--draw", type=int, default=101, help="seed of the cells")
    parser.add_argument("--cells", type=int, default=40)
    parser.add_argument("--room", type=float, default=7e9, help="bytes of the device for each process")
    parser.add_argument("--controller", type=Path, help="file of the controller that decides before and behind a branch; the heuristic")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--branches", type=Path, nargs="+", default=[RESULTS / "controller_branches.jsonl.xz"], help="files to learn from")
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--caution", type=float, default=GainsConfig().caution)
    parser.add_argument("--to", type=Path, default=Path("learned.safetensors"), help="file of the controller")
    parser.add_argument("--out", type=Path, default=Path("branches.jsonl"), help="file of what is collected or tested")
    options = parser.parse_args(arguments)
    if options.what == "fit":
        records = read(options.branches)
        some = branches_of(records)
        info = {"branches": len(some), "cells": len(set(some.cells)), "seed": 0, "domain": msgspec.to_builtins(DomainConfig())}
        save_controller(options.to, None, info, ensemble=fit(some, seed=0), gains=GainsConfig(caution=options.caution))
        return
    output = Output(options.out, resume=True)
    if options.what == "test":
        output.write(tested(read(options.branches), folds=options.folds, caution=options.caution))
        return
    have = {record["number"] for record in output.earlier if record.get("draw") == options.draw}
    about_all = (options.draw, options.room, options.device, options.controller)
    jobs = [partial(collect_cell, number, *about_all) for number in range(options.cells) if number not in have]
    run_all(jobs, processes=options.jobs, output=output)


if __name__ == "__main__":
    main()
