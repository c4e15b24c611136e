"""Does it pay to look at the host? Random growth in many cells, a value model fitted to it, and its controller in cells it has not seen.

    python benchmarks/controller_value.py lives --cells 300 --folder DIR --device cuda --jobs 15
    python benchmarks/controller_value.py compare --cells 36 --folder DIR --device cuda --jobs 15
    python benchmarks/controller_value.py tables

`lives` draws cells of data, host and training (see `esper.controller.cells`), without residual hosts and without digits-1d. In each cell it
trains hosts that never grow, hosts that grow at random, and one for each constant plan, and writes a file for the cell into the folder.
Cells that are there already are kept.

`compare` fits a value model to these files and compares its controller, "value", with all other contestants and controls of
`esper.controller.compare`, at four prices of rent, in other cells. These are in turn on digits-1d, of residual hosts, of longer trainings,
and of the kinds that were trained on. Blind plans and rules are chosen on the cells in the folder. Cells that are in the output already are
kept, so a comparison that was stopped goes on. `tables` prints the tables of the cells that are there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import torch

from esper.controller.cells import CellDomain, draw_cell
from esper.controller.compare import (
    CompareSetting,
    Rule,
    choose_rules,
    compare_cell,
    eval_setting,
    gains,
    make_case,
    plan_results,
    recorded_plans,
    size,
)
from esper.controller.compare_results import Comparison, blind_plans, of_whole_cells
from esper.controller.evaluation import EvalCase, run_cases
from esper.controller.plans import RandomPlan
from esper.controller.value import Recorder, Records, ValueController, ValueModel, fit
from esper.growth.controllers.baselines import Never
from esper.tasks import load_task
from growth_runs import run_all
from records import RESULTS, Output, Record

PRICES = (0.003, 0.01, 0.03, 0.1)
TRAINED = CellDomain(sources=("digits", "teacher", "text"), families=("conv", "mlp", "gpt"), horizon=(8, 24))
COMPARED = {
    "another source": CellDomain(sources=("digits-1d",), families=("conv", "mlp"), horizon=(8, 24)),
    "another family": CellDomain(sources=("digits", "teacher"), families=("residual",), horizon=(8, 24)),
    "longer": msgspec.structs.replace(TRAINED, horizon=(32, 48), samples_of_a_life=(300_000, 600_000)),
    "as trained on": TRAINED,
}
FIRST_SEED = {"lives": 20_000, "compare": 5_000}  # of the hosts; those of comparisons are below HELD_OUT_SEEDS
load = cache(load_task)


# Lives that are learned from


def live(number: int, *, folder: Path, device: str, seeds: int, plans: int, seed: int) -> list[Record]:
    """Train the hosts of one cell, write what came of every move to a file, and return a record of the cell."""
    began, cell = time.perf_counter(), draw_cell(TRAINED, number=number, seed=seed)
    task, first = cell.task(load), FIRST_SEED["lives"] + 1_000 * number
    constant_plans = recorded_plans()
    case = partial(make_case, cell, task)
    cases: list[EvalCase] = [case(plan.name, first, None, plan) for plan in constant_plans]
    recorders = [plan.record for plan in constant_plans]
    for host_seed in range(first, first + seeds):
        if host_seed != first:
            cases.append(case("never", host_seed, None, Never()))
            recorders.append(Recorder())
        for plan in range(plans):
            recorders.append(Recorder())
            cases.append(case("random", host_seed, None, RandomPlan(100 * host_seed + plan, recorders[-1])))
    runs = run_cases(eval_setting(cell, task, device=torch.device(device), rows=len(cases)), cases)
    records = Records()
    found = gains(runs, "val")  # nothing that is learned may depend on the test part
    for run, gain, recorder in zip(runs, found, recorders, strict=True):
        if run.controller != "never":
            assert isinstance(recorder, Recorder)
            records.add(recorder, cell=number, gain=gain, end_size=size(run))
    columns: dict[str, Any] = {name: np.array(values) for name, values in vars(records).items()}
    np.savez(folder / f"cell_{number}.npz", **columns)
    about = {"what": "lives", "cell": number, "seed": seed, **msgspec.to_builtins(cell)}
    results = plan_results(runs[: len(constant_plans)], constant_plans)
    return [{**about, "hosts": len(runs), "seconds": time.perf_counter() - began, "mean_gain": fmean(found), **results}]


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


def compare(
    number: int, *, model: dict[str, torch.Tensor], rules: dict[float, Rule], device: str, hosts: int, seed: int, controls: bool
) -> list[Record]:
    """Train the hosts of all contestants in one cell, and return a record of each."""
    group = list(COMPARED)[number % len(COMPARED)]
    cell, value = draw_cell(COMPARED[group], number=number // len(COMPARED), seed=seed), ValueModel()
    value.load_state_dict(model)
    first = FIRST_SEED["compare"]
    setting = CompareSetting(PRICES, range(first, first + hosts), "value", rules, controls, device=device, seed=seed)
    controllers = {"value": lambda price: ValueController(value.eval())}
    return compare_cell(setting, cell, load, controllers, number=number, group=group)


def show(records: Sequence[Record], blind: dict[str, str]) -> Record:
    """Print the tables of a comparison, and return the statistics as a record."""
    comparison = Comparison(of_whole_cells(records), PRICES, {float(price): name for price, name in blind.items()}, "value")
    print(comparison.tables())
    statistics = comparison.to_builtins()
    del statistics["records"]
    return {"what": "summary", **statistics}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["lives", "compare", "tables"])
    parser.add_argument("--folder", type=Path, help="folder for the files of the cells that are learned from")
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--hosts", type=int, default=2, help="hosts with other seeds in each cell")
    parser.add_argument("--plans", type=int, default=4, help="random plans for each of these hosts (lives)")
    parser.add_argument("--no-controls", action="store_true", help="leave out the controls at equal FLOPs (compare)")
    parser.add_argument("--seed", type=int, default=1, help="of the cells and of the model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS / "controller_value.jsonl")
    options = parser.parse_args(arguments)
    if options.command == "tables":
        records = Output(options.out, resume=True).earlier
        blind_of = [record["blind"] for record in records if record.get("what") == "chosen"]
        if not blind_of:
            parser.error(f"--out: there is no comparison in {options.out}; make one with the command compare")
        show(records, blind_of[-1])
        return
    if options.folder is None:
        parser.error("--folder: name the folder for the files of the cells that are learned from")
    options.folder.mkdir(parents=True, exist_ok=True)
    lives_file = options.folder / "lives.jsonl"
    if options.command == "lives":
        output = Output(lives_file, resume=True)
        have = {record["cell"] for record in output.earlier if record.get("what") == "lives"}
        shared = {"device": options.device, "seed": options.seed, "folder": options.folder, "seeds": options.hosts, "plans": options.plans}
        run_all(
            [partial(live, number, **shared) for number in range(options.cells) if number not in have],
            processes=options.jobs,
            output=output,
        )
        return
    if options.hosts < 2:
        parser.error("--hosts: at least 2 are needed, because plans are tuned on the other hosts of a cell")
    moves = read_records(options.folder)
    lives = [record for record in Output(lives_file, resume=True).earlier if record.get("what") == "lives"]
    model = fit(moves, seed=options.seed, weight_decay=1.0, device=options.device)
    rules = choose_rules(lives, PRICES)
    blind = {str(price): name for price, name in blind_plans(lives, PRICES).items()}
    output = Output(options.out, resume=True)
    chosen = {str(price): msgspec.to_builtins(rule) for price, rule in rules.items()}
    output.write({"what": "chosen", "blind": blind, "rules": chosen, "trained_cells": len(lives), "moves": len(moves)})
    shared = {"model": dict(model.state_dict()), "rules": rules, "hosts": options.hosts, "device": options.device}
    shared |= {"seed": 10_000 + options.seed, "controls": not options.no_controls}
    have = {record["cell"] for record in output.earlier if record.get("what") == "cell"}
    jobs = [partial(compare, number, **shared) for number in range(options.cells) if number not in have]
    found = run_all(jobs, processes=options.jobs, output=output)
    output.append(show([*output.earlier, *found], blind))


if __name__ == "__main__":
    main()
