"""Compare controllers with the heuristic, in cells that no setting was chosen by.

    python benchmarks/controller/study.py --draw 4 --cells 200 --rents 0.003 0.01 0.03 0.1 --hosts 3 1 1 1 --device cuda --jobs 15 \
        --arms never heuristic lookahead learned.safetensors policy.safetensors
    python benchmarks/controller/study.py --arms heuristic --lifecycle blending=gate   # the same with other rules of growth
    python benchmarks/controller/study.py --summary --draw 4 --rents 0.003 0.01 0.03 0.1

A cell is drawn from the whole domain of controllers (sources, families, sizes, optimisers, schedules, label noise, horizons), or from that
of a file (`--domain-of`), by its number and the draw. Its hosts have seeds that no training uses. All runs of a cell are trained in one
fleet, with the default settings of growth, and keep the state with the lowest validation loss. Arms, paired over hosts:

    never, heuristic, lookahead
    FILE            the controller of a file, named by the file
    first NAME      at the first look of the heuristic the move NAME, whatever the heuristic thinks of it, and the heuristic from then on

An arm may end with rules of the heuristic that it decides or is advised by, as in "lookahead longer_training=5", or with `horizon=1.2` for
a training that is as much longer. It is compared with the same arm without them, or with the arm `--against`. `--lifecycle` gives all arms
rules of growth, which become a part of their names.

The rules of lookahead were chosen on draw 0. Utility is the test loss plus the rent of what was kept, in nats for ten classes; the lower,
the better. Intervals are Student's over cells, each the mean of its hosts. Files whose names differ in a number at the end are trainings of
one kind; a table has each of them. GFLOPs are all that a run has used, trials, probes and measurements included. `alike` is the share of
hosts in which the same seeds grew as under the other arm.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import torch

from esper.controller import Learned, load_controller
from esper.controller.branches import Improved
from esper.controller.cells import draw_cell
from esper.controller.config import DomainConfig
from esper.controller.description import read_description
from esper.controller.evaluation import EvalCase, EvalSetting, run_cases
from esper.controller.policy import StepController
from esper.fleet import FleetConfig, HostConfig
from esper.fleet.data import TaskTensors
from esper.growth import Controller, GrowthConfig
from esper.growth.config import HeuristicConfig, LifecycleConfig, RentConfig
from esper.growth.controllers.baselines import make_controller
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.controllers.lookahead import host_wide
from esper.growth.lifecycle.stages import Cost, Decision, Germinate, GrowthState
from esper.growth.measure.contribution import rent_of
from esper.statistics import student_interval
from esper.tasks import load_task

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import print_table, run_all
from benchmarks.records import RESULTS, Output, Record

ARMS = ("never", "heuristic", "lookahead")
FIRST = "first "
FILE = ".safetensors"
LONGER = "horizon="
VALIDATION = 1_000  # samples
MOST_ROWS = 64  # of a fleet


class FirstMove:
    """Makes a move at the first look of the heuristic, and follows the heuristic in all else."""

    def __init__(self, config: GrowthConfig, move: str) -> None:
        self.heuristic, self.move = Heuristic(config), move

    def decide(self, state: GrowthState) -> Decision:
        decision, first = self.heuristic.decide(state), self.heuristic.first_look(state.epochs)
        others = tuple(action for action in decision.actions if not isinstance(action, Germinate))
        if state.epoch == first - 1:
            return Decision(others, probe=True)
        if state.epoch == first:
            moves = {move.name: move for move in host_wide(state)}
            return Decision((*others, *(moves[self.move].germinate("the first move") if self.move in moves else ())))
        return decision


def controller(arm: str, growth: GrowthConfig) -> Controller:
    """Return the controller of an arm, with the rules at the end of its name."""
    name, rules = parts_of(arm)
    heuristic = msgspec.convert({**msgspec.to_builtins(growth.heuristic), **rules}, HeuristicConfig, strict=False)
    growth = msgspec.structs.replace(growth, heuristic=heuristic)
    if name.endswith(FILE):
        return load_controller(name, config=growth)
    return FirstMove(growth, name.removeprefix(FIRST)) if name.startswith(FIRST) else make_controller(name, growth)


def host_config(arm: str, config: HostConfig) -> HostConfig:
    """Return the setting of a host under an arm, whose training may be longer than that of others."""
    words = [word.removeprefix(LONGER) for word in arm.split() if word.startswith(LONGER)]
    return msgspec.structs.replace(config, horizon=round(config.horizon * math.prod(map(float, words))))


def parts_of(arm: str) -> tuple[str, dict[str, str]]:
    """Return the name of an arm without rules, and the rules of the heuristic."""
    words = arm.split()
    rules = dict(word.split("=") for word in words if "=" in word and not word.startswith(LONGER))
    return " ".join(word for word in words if "=" not in word), rules


def run_cell(
    number: int,
    draw: int,
    domain: DomainConfig,
    arms: Sequence[str],
    rents: Sequence[tuple[float, int]],
    rules: Sequence[str],
    device: str,
    room: int | None,
) -> list[Record]:
    """Train these arms in a cell in one fleet, by these rules, with as many hosts at each rent as the pairs say.

    Hosts of one seed are one row as long as their arms decide the same.
    """
    began, cell = time.perf_counter(), draw_cell(domain, number=number, seed=draw)
    task, prices = cell.task(load_task), [RentConfig(parameters=rent, flops=rent) for rent, hosts in rents for _ in range(hosts)]
    growth = GrowthConfig(lifecycle=msgspec.convert(dict(rule.split("=") for rule in rules), LifecycleConfig, strict=False))
    place = torch.device(device)
    setting = EvalSetting(
        task,
        cell.host,
        TaskTensors.of(task, device=place, dtype=torch.float32),
        cell.fleet(FleetConfig(validation_samples=VALIDATION)),
        growth,
        place,
        rows=MOST_ROWS,
        memory=room,
    )
    wanted = [(arm, seed) for seed in range(len(prices)) for arm in arms]
    settings = [host_config(arm, cell.host_config(seed, len(task.train), rent=prices[seed], growth_seed=seed)) for arm, seed in wanted]
    cases = [EvalCase(arm, one, controller(arm, growth)) for (arm, _), one in zip(wanted, settings, strict=True)]
    runs = run_cases(setting, cases)
    seconds = (time.perf_counter() - began) / len(wanted)
    return [
        {
            **{"draw": draw, "number": number, "arm": named(arm, rules), "seed": seed, "rent": prices[seed].parameters},
            **{"source": cell.source, "host": cell.host, "samples": cell.samples, "noise": cell.label_noise},
            **{"optimizer": cell.optimizer, "learning_rate": cell.learning_rate, "horizon": cell.horizon},
            "test_loss": run.test_loss / run.unit,
            "rent_paid": rent_of(Cost(run.added_parameters, run.added_flops), Cost(run.parameters, run.flops_per_sample), prices[seed]),
            "parameters": run.parameters + run.added_parameters,
            "gflops": run.total_flops / 1e9,
            "seeds": run.trace,
            "chosen": run.chosen,
            **counts_of(case.controller),
            "seconds": seconds,
        }
        for (arm, seed), run, case in zip(wanted, runs, cases, strict=True)
    ]


def counts_of(decides: Controller) -> Record:
    """Return how often a controller of a file looked, decided otherwise than the heuristic, and did not because the host was far."""
    if not isinstance(decides, Learned):
        return {}
    inner = decides.inner
    advisor = inner.advisor if isinstance(inner, StepController) else inner
    of_ensemble = {"turns": advisor.turns, "improved": advisor.improved, "far": advisor.far} if isinstance(advisor, Improved) else {}
    return {**of_ensemble, **({"others": len(inner.others)} if isinstance(inner, StepController) else {})}


def named(arm: str, rules: Sequence[str]) -> str:
    return " ".join((*(Path(word).stem if word.endswith(FILE) else word for word in arm.split()), *rules))


# Comparing


def utility(run: Record) -> float:
    """Return the loss with the rent; the lower, the better."""
    return float(run["test_loss"] + run["rent_paid"])


def compared(runs: Sequence[Record], arm: str, other: str) -> Record:
    """Compare two arms, paired over hosts, with an interval over cells."""
    pairs: dict[Any, dict[str, Record]] = {}
    for run in runs:
        pairs.setdefault((run["draw"], run["number"], run["seed"]), {})[run["arm"]] = run
    cells: dict[Any, list[dict[str, Record]]] = {}
    for (draw, number, _), pair in pairs.items():
        if arm in pair and other in pair:
            cells.setdefault((draw, number), []).append(pair)
    differences = {cell: fmean(utility(pair[arm]) - utility(pair[other]) for pair in some) for cell, some in cells.items()}
    times = [fmean(pair[arm]["gflops"] / pair[other]["gflops"] for pair in some) for some in cells.values()]
    interval = student_interval(list(differences.values()))
    alike = fmean(pair[arm]["seeds"] == pair[other]["seeds"] for some in cells.values() for pair in some)
    worst = sorted(differences.values(), reverse=True)[: max(len(cells) // 10, 1)]
    return {
        "what": "compared",
        "arm": arm,
        "other": other,
        "cells": len(cells),
        "difference": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "worst_tenth": fmean(worst),
        "worst": worst[0],
        "alike": alike,
        "times_flops": fmean(times),
        "times_flops_median": median(times),
        "times_flops_of_all": sum(pair[arm]["gflops"] for some in cells.values() for pair in some)
        / sum(pair[other]["gflops"] for some in cells.values() for pair in some),
    }


def base_of(arm: str) -> str:
    """Return what an arm is compared with: itself without rules of its own, or the heuristic, and that with never growing."""
    without, _ = parts_of(arm)
    return without if without != arm else "never" if arm == "heuristic" else "heuristic"


def show(records: Sequence[Record], runs: Sequence[Record]) -> None:
    rows = [("arm", "minus", "cells", "utility", "95 %", "worst tenth", "worst", "alike", "× FLOPs, median", "of all")]
    for one in records:
        interval = f"[{one['low']:+.4f}, {one['high']:+.4f}]"
        losses = (f"{one['difference']:+.4f}", interval, f"{one['worst_tenth']:+.3f}", f"{one['worst']:+.3f}", f"{one['alike']:.0%}")
        rows.append(
            (one["arm"], one["other"], str(one["cells"]), *losses, f"{one['times_flops_median']:.2f}", f"{one['times_flops_of_all']:.2f}")
        )
    print_table(rows)
    print("chosen:", dict(Counter(name for run in runs for name in run["chosen"]).most_common()))
    for arm in dict.fromkeys(run["arm"] for run in runs if "turns" in run):
        turns, improved, far = (sum(run[name] for run in runs if run["arm"] == arm) for name in ("turns", "improved", "far"))
        shares = f"{improved / max(turns, 1):.1%} otherwise than the heuristic, {far / max(turns, 1):.1%} as it does for being far"
        print(f"{arm}: {turns} turns after a probe, {shares}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain-of", type=Path, help="draw cells as for the training of this controller file, not from the whole domain")
    parser.add_argument("--draw", type=int, default=1, help="seed of the cells; the rules were chosen on 0")
    parser.add_argument("--cells", type=int, default=40)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2], help="per cell and arm, at each rent, or one number for all of them")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--lifecycle", nargs="*", default=[], metavar="NAME=VALUE", help="rules of growth, such as raise_mode=shadow")
    parser.add_argument("--against", help="arm to compare all others with, such as 'heuristic raise_mode=shadow'")
    parser.add_argument("--rents", type=float, nargs="+", default=[RentConfig().parameters], help="prices of parameters and of FLOPs")
    parser.add_argument("--room", type=float, help="bytes of the device for each process; None: no limit")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--summary", action="store_true", help="compare what the file holds, and train nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "controller_study.jsonl")
    options = parser.parse_args(arguments)
    output = Output(options.out, resume=True)
    runs = [run for run in output.earlier if "arm" in run and "number" in run]
    domain = DomainConfig()
    if options.domain_of is not None:
        domain = msgspec.convert(read_description(options.domain_of).info["domain"], DomainConfig)
    hosts = options.hosts * len(options.rents) if len(options.hosts) == 1 else options.hosts
    rents, room = list(zip(options.rents, hosts, strict=True)), None if options.room is None else int(options.room)
    if not options.summary:
        have = {(run["number"], run["arm"], run["rent"]) for run in runs if run["draw"] == options.draw}
        jobs = []
        for number in range(options.cells):
            wanted = {arm: [(number, named(arm, options.lifecycle), rent) for rent in options.rents] for arm in options.arms}
            if arms := [arm for arm, some in wanted.items() if not have.issuperset(some)]:
                about = (options.draw, domain, arms, rents, options.lifecycle, options.device, room)
                jobs.append(partial(run_cell, number, *about))
        runs += run_all(jobs, processes=options.jobs, output=output)
    for rent in options.rents:
        found = [run for run in runs if run["draw"] == options.draw and run["rent"] == rent]
        present = {run["arm"] for run in found}
        pairs = [(arm, options.against or base_of(arm)) for arm in sorted(present) if arm != "never"]
        records = [compared(found, arm, other) for arm, other in pairs if other in present and arm != other]
        for record in records:
            output.append({**record, "draw": options.draw, "rent": rent})
        if len(options.rents) > 1:
            print(f"rent {rent:g}")
        show(records, found)


if __name__ == "__main__":
    main()
