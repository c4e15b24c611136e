"""Does it pay to look at the host? Random growth in many cells, a value model fitted to it, and its controller in cells it has not seen.

    python benchmarks/controller_value.py lives --cells 300 --folder DIR --device cuda --jobs 15
    python benchmarks/controller_value.py compare --cells 36 --folder DIR --device cuda --jobs 15

`lives` draws cells of data, host and training (see `esper.controller.cells`), without residual hosts and without digits-1d. In each cell it
trains hosts that never grow, hosts that grow at random, and one for each constant plan, and writes a file for the cell into the folder.
Cells that are there already are kept.

`compare` fits a value model to these files and trains hosts in other cells: a third of them on digits-1d, a third of them residual hosts,
and a third of the kinds that were trained on. Contestants, each at four prices of a doubling of the network (e-fold, to be exact):

    never       nothing grows
    blind       the constant plan that is best on the cells in the folder, at that price
    tuned       the constant plan that is best on the other hosts of the same cell: what looking could gain, about
    heuristic   the default controller
    value       the greedy controller of the value model

Every host keeps its best validation state. Its result is the gain in test loss over the host that never grows, in units of the loss scale,
minus the price times its size. Intervals are over cells.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import torch

from esper.controller.cells import Cell, CellDomain, draw_cell
from esper.controller.evaluation import EvalCase, EvalRun, EvalSetting, run_cases
from esper.controller.plans import BLUEPRINTS, CONSTANT_PLANS, RandomPlan
from esper.controller.value import Recorder, Records, ValueController, ValueModel, fit, rent_at, size_of
from esper.fleet.config import FleetConfig
from esper.fleet.data import TaskTensors
from esper.growth.config import BudgetConfig, GrowthConfig
from esper.growth.controllers.baselines import Never
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.lifecycle.stages import Controller, Cost
from esper.intervals import student_interval
from esper.tasks import load_task
from growth_runs import print_table, run_all
from records import RESULTS, Output, Record

PRICES = (0.003, 0.01, 0.03, 0.1)
TRAINED = CellDomain(sources=("digits", "teacher", "text"), families=("conv", "mlp", "gpt"), horizon=(8, 24))
UNSEEN = {
    "another source": CellDomain(sources=("digits-1d",), families=("conv", "mlp"), horizon=(8, 24)),
    "another family": CellDomain(sources=("digits", "teacher"), families=("residual",), horizon=(8, 24)),
    "as trained on": TRAINED,
}
GROWTH = GrowthConfig(blueprints=BLUEPRINTS, budget=BudgetConfig(max_parameters=64.0, max_flops=64.0, max_seeds_per_place=2))
FIRST_SEED = {"lives": 20_000, "compare": 5_000}  # of the hosts; those of comparisons are below HELD_OUT_SEEDS
load = cache(load_task)


def train(cell: Cell, contestants: list[tuple[str, int, float, Controller]], device: str) -> list[EvalRun]:
    """Train a host of the cell for every (name, seed, price, controller), all in one fleet."""
    task, place = cell.task(load), torch.device(device)
    tensors = TaskTensors.of(task, device=place, dtype=torch.float32)
    setting = EvalSetting(
        task, cell.host, tensors, cell.fleet(FleetConfig(validation_samples=1_000)), GROWTH, place, rows=max(len(contestants), 1)
    )
    cases = [EvalCase(name, cell.host_config(seed, task, rent=rent_at(price)), one) for name, seed, price, one in contestants]
    return run_cases(setting, cases)


def results(runs: list[EvalRun], part: str) -> list[float]:
    """Return the gain of every host over the one of its seed that never grows, in units, by its loss on a part of the data."""
    losses = [getattr(run, f"{part}_loss") for run in runs]
    never = {run.seed: loss for run, loss in zip(runs, losses, strict=True) if run.controller == "never"}
    return [(never[run.seed] - loss) / run.unit for run, loss in zip(runs, losses, strict=True)]


def size(run: EvalRun) -> float:
    return size_of(Cost(run.added_parameters, run.added_flops), Cost(run.parameters, run.flops_per_sample))


# Lives that are learned from


def live(number: int, *, folder: Path, device: str, seeds: int, plans: int, seed: int) -> list[Record]:
    """Train the hosts of one cell, write what came of every move to a file, and return a record of the cell."""
    began, cell = time.perf_counter(), draw_cell(TRAINED, number=number, seed=seed)
    contestants: list[tuple[str, int, float, Controller]] = []
    recorders: dict[int, Recorder] = {}
    first = FIRST_SEED["lives"] + 1_000 * number
    for host_seed in range(first, first + seeds):
        contestants.append(("never", host_seed, 0.0, Never()))
        for plan in range(plans):
            recorders[len(contestants)] = Recorder()
            contestants.append(("random", host_seed, 0.0, RandomPlan(100 * host_seed + plan, recorders[len(contestants)])))
    for constant_plan in CONSTANT_PLANS[1:]:
        recorders[len(contestants)] = Recorder()
        contestants.append((constant_plan.name, first, 0.0, replace(constant_plan, record=recorders[len(contestants)])))
    runs = train(cell, contestants, device)
    gains = results(runs, "val")  # nothing that is learned may depend on the test part
    records = Records()
    for place, recorder in recorders.items():
        records.add(recorder, cell=number, gain=gains[place], end_size=size(runs[place]))
    columns: dict[str, Any] = {name: np.array(values) for name, values in vars(records).items()}
    np.savez(folder / f"cell_{number}.npz", **columns)
    constant = {run.controller: [gain, size(run)] for run, gain in zip(runs, gains, strict=True) if run.controller != "random"}
    about = {"what": "lives", "cell": number, "seed": seed, **msgspec.to_builtins(cell)}
    return [{**about, "hosts": len(runs), "seconds": time.perf_counter() - began, "mean_gain": fmean(gains), "constant": constant}]


def read_records(folder: Path) -> Records:
    """Return the moves of all cells in a folder."""
    records = Records()
    for path in sorted(folder.glob("cell_*.npz")):
        with np.load(path) as found:
            for name, values in vars(records).items():
                values += list(found[name]) if name == "features" else found[name].tolist()
    if not len(records):
        raise SystemExit(f"there are no cells in {folder}; make some with the command lives")
    return records


# The comparison


def compare(number: int, *, model: dict[str, torch.Tensor], device: str, hosts: int, seed: int) -> list[Record]:
    """Train the hosts of all contestants in one cell, and return a record of each."""
    kind = list(UNSEEN)[number % len(UNSEEN)]
    cell, value = draw_cell(UNSEEN[kind], number=number // len(UNSEEN), seed=seed), ValueModel()
    value.load_state_dict(model)
    contestants: list[tuple[str, int, float, Controller]] = []
    for host_seed in range(FIRST_SEED["compare"], FIRST_SEED["compare"] + hosts):
        contestants += [(plan.name, host_seed, 0.0, plan) for plan in CONSTANT_PLANS]
        for price in PRICES:
            contestants += [(f"value at {price:g}", host_seed, price, ValueController(value.eval()))]
            contestants += [(f"heuristic at {price:g}", host_seed, price, Heuristic(GROWTH))]
    runs = train(cell, contestants, device)
    about = {"what": "host", "cell": number, "kind": kind, **msgspec.to_builtins(cell)}
    return [
        {**about, "contestant": run.controller, "host_seed": run.seed, "gain": gain, "size": size(run), "plan": run.trace}
        for run, gain in zip(runs, results(runs, "test"), strict=True)
    ]


def blind_plans(lives: list[Record]) -> dict[float, str]:
    """Return for every price the constant plan with the best mean over the cells."""
    names = [plan.name for plan in CONSTANT_PLANS]

    def worth(name: str, price: float) -> float:
        return fmean(gain - price * added for record in lives for gain, added in [record["constant"][name]])

    return {price: max(names, key=lambda name: worth(name, price)) for price in PRICES}


def worth_in_cell(records: list[Record], name: str, price: float) -> dict[int, float]:
    """Return seed of a host -> its gain minus the price of its size, in one cell."""
    return {one["host_seed"]: one["gain"] - price * one["size"] for one in records if one["contestant"] == name}


def tuned_worth(records: list[Record], price: float) -> float:
    """Return the mean over hosts of the plan that is best on the other hosts of the cell."""
    by_plan = {plan.name: worth_in_cell(records, plan.name, price) for plan in CONSTANT_PLANS}

    def best_without(left_out: int) -> str:
        return max(by_plan, key=lambda name: fmean(value for seed, value in by_plan[name].items() if seed != left_out))

    return fmean(by_plan[best_without(seed)][seed] for seed in by_plan["never"])


def summary(hosts: list[Record], blind: dict[float, str]) -> Record:
    cells = sorted({record["cell"] for record in hosts})
    by_cell = [[record for record in hosts if record["cell"] == cell] for cell in cells]
    rows: list[Record] = []
    for price in PRICES:
        worths: dict[str, list[float]] = {
            "blind": [fmean(worth_in_cell(one, blind[price], price).values()) for one in by_cell],
            "tuned": [tuned_worth(one, price) for one in by_cell],
            "heuristic": [fmean(worth_in_cell(one, f"heuristic at {price:g}", price).values()) for one in by_cell],
            "value": [fmean(worth_in_cell(one, f"value at {price:g}", price).values()) for one in by_cell],
        }
        for name, values in worths.items():
            ahead = student_interval(np.subtract(values, worths["blind"])) if name != "blind" and len(cells) > 1 else None
            rows.append(
                {
                    "price": price,
                    "contestant": name,
                    "plan": blind[price] if name == "blind" else None,
                    "mean": fmean(values),
                    "worst_cell": min(values),
                    "ahead_of_blind": None if ahead is None else [ahead.estimate, ahead.low, ahead.high],
                }
            )
    return {"what": "summary", "cells": len(cells), "rows": rows}


def show(record: Record) -> None:
    table = [("price", "contestant", "ahead of never", "worst cell", "ahead of blind")]
    for row in record["rows"]:
        name = f"{row['contestant']} ({row['plan']})" if row["plan"] else row["contestant"]
        ahead = row["ahead_of_blind"]
        words = "" if ahead is None else f"{ahead[0]:+.3f} [{ahead[1]:+.3f}, {ahead[2]:+.3f}]"
        table.append((f"{row['price']:g}", name, f"{row['mean']:+.3f}", f"{row['worst_cell']:+.3f}", words))
    print_table(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["lives", "compare"])
    parser.add_argument("--folder", type=Path, required=True, help="folder for the files of the cells that are learned from")
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--hosts", type=int, default=2, help="hosts with other seeds in each cell")
    parser.add_argument("--plans", type=int, default=4, help="random plans for each of these hosts (lives)")
    parser.add_argument("--seed", type=int, default=1, help="of the cells and of the model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS / "controller_value.jsonl")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    lives_file = options.folder / "lives.jsonl"
    shared: dict[str, Any] = {"device": options.device, "seed": options.seed}
    if options.command == "lives":
        output = Output(lives_file, resume=True)
        have = {record["cell"] for record in output.earlier if record.get("what") == "lives"}
        shared |= {"folder": options.folder, "seeds": options.hosts, "plans": options.plans}
        run_all(
            [partial(live, number, **shared) for number in range(options.cells) if number not in have],
            processes=options.jobs,
            output=output,
        )
        return
    if options.hosts < 2:
        parser.error("--hosts: at least 2 are needed, because plans are tuned on the other hosts of a cell")
    records = read_records(options.folder)
    lives = [record for record in Output(lives_file, resume=True).earlier if record.get("what") == "lives"]
    model = fit(records, seed=options.seed, weight_decay=1.0, device=options.device)
    output = Output(options.out)
    jobs = [
        partial(compare, number, model=dict(model.state_dict()), hosts=options.hosts, device=options.device, seed=10_000 + options.seed)
        for number in range(options.cells)
    ]
    found = run_all(jobs, processes=options.jobs, output=output)
    record = {**summary(found, blind_plans(lives)), "trained_cells": len(lives), "moves": len(records)}
    output.write(record)
    show(record)


if __name__ == "__main__":
    main()
