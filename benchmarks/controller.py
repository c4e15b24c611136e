"""Does it pay to look at the host? Random growth in many cells, controllers that learn from it, and their comparison in other cells.

    python benchmarks/controller.py lives --cells 900 --seed 2 --variants 4 --hosts 1 --folder DIR --device cuda --jobs 16
    python benchmarks/controller.py fit --folder DIR --trainings 5
    python benchmarks/controller.py train --folder DIR --trainings 5 --minutes 4 --device cuda --jobs 5
    python benchmarks/controller.py train --folder DIR --trainings 5 --minutes 4 --device cuda --jobs 5 --core none
    python benchmarks/controller.py compare --cells 48 --hosts 16 --memory 10 --seed 6 --folder DIR --device cuda --jobs 8
    python benchmarks/controller.py tables

`lives` draws cells of data, host and training (see `esper.controller.cells`), without residual hosts and without digits-1d. In each cell it
trains hosts that never grow, hosts that grow at random, and one for each constant plan, and writes a file for the cell into the folder.
Cells that are there already are kept. results/controller_lives.tar.xz has 540 cells, made in 22 minutes of an H200: 405 without variants,
251 of them by an earlier version, in which random plans moved at any time, and 135 with four variants each; and 40 of `lives --everything
--seed 3`, which are of all kinds.

`fit` fits value models to these files, with different seeds: value_1.safetensors and so on, in the folder. The shipped controller is the
first one of `fit --folder DIR --more OTHER`, where OTHER has cells of all kinds. `train` trains a policy from each by PPO, on cells of the
same kinds: training_1/controller.safetensors and so on. Those of `--core none` have no memory: without_memory_1/controller.safetensors.

`compare` compares the controllers in the folder with one another and with all other contestants and controls of `esper.controller.compare`,
at three prices of rent, in other cells. These are in turn on digits-1d, of residual hosts, of longer trainings, and of the kinds that were
trained on. Blind plans and rules are chosen on the cells in the folder. Cells that are in the output already are kept, so a comparison that
was stopped goes on; the cheapest cells come first. Trainings of one kind, such as learned 1 to learned 5, are joined, with intervals over
cells and trainings; random moves and controls at equal FLOPs follow the first of them. `tables` prints the tables of the cells that are
there.

These commands are the study: five trainings, and 48 cells, 12 of every group, with 16 hosts each, or with 4 where the training of a host
takes more than MOST_FLOPS. Settings are chosen by cross-validation in the cells that are learned from, and in compared cells of other seeds
(--seed 50). A first comparison had 30 cells of --seed 1, a second one 25 of --seed 4 (results/controller.jsonl.xz,
results/controller_tables.txt). So a controller that is trained anew is compared in those of --seed 6, which are for its results only.
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

from esper.controller.cells import Cell, draw_cell, draw_variant
from esper.controller.compare import (
    CompareSetting,
    Rule,
    choose_rules,
    compare_cell,
    eval_setting,
    gains,
    make_case,
    new_copy,
    plan_results,
    recorded_plans,
    size,
)
from esper.controller.compare_results import Comparison, blind_plans, of_whole_cells
from esper.controller.compare_tables import tables
from esper.controller.config import CompareConfig, ControllerConfig, DomainConfig
from esper.controller.evaluation import EvalCase, run_cases
from esper.controller.learned import load_controller, save_controller
from esper.controller.plans import CONSTANT_PLANS, ConstantPlan, RandomPlan
from esper.controller.training import train_controller
from esper.controller.value import Recorder, Records, fit
from esper.growth.controllers.baselines import Never
from esper.growth.host.discover import discover
from esper.rng import Streams
from esper.tasks import Task, load_task
from growth_runs import run_all
from records import RESULTS, Output, Record

PRICES = (0.01, 0.03, 0.1)  # one for each level of rent, see RENT_LEVELS
TRAINED = DomainConfig(sources=("digits", "teacher", "digits", "teacher", "text"), families=("conv", "mlp", "gpt"), horizon=(8, 24))
COMPARED = {
    "another source": DomainConfig(sources=("digits-1d",), families=("conv", "mlp"), horizon=(8, 24)),
    "another family": DomainConfig(sources=("digits", "teacher"), families=("residual",), horizon=(8, 24)),
    "longer": msgspec.structs.replace(TRAINED, horizon=(32, 48), samples_of_a_life=(150_000, 600_000), most_steps=6_400),
    "as trained on": TRAINED,
}
EVERYTHING = DomainConfig(sources=("digits", "teacher", "digits-1d", "teacher", "text"), horizon=(8, 32))  # for the shipped controller
MOST_FLOPS, FEW_HOSTS = 1e11, 4  # cells with dearer hosts, which may grow to 64 times that, are compared with only so many of them
TRAINING_NAMES = {"lstm": "training", "none": "without_memory"}  # of folders, by the core of the policy
FIRST_SEED = {"lives": 20_000, "compare": 5_000}  # of the hosts; those of comparisons are below HELD_OUT_SEEDS
load = cache(load_task)


# Training data: random growth in many cells


def live(number: int, *, domain: DomainConfig, folder: Path, device: str, variants: int, seeds: int, plans: int, seed: int) -> list[Record]:
    """Train the hosts of one cell and of its variants, write what came of every move to a file, and return a record of each variant."""
    began, cell = time.perf_counter(), draw_cell(domain, number=number, seed=seed)
    task, rng = cell.task(load), Streams(seed).numpy(f"variants of cell {number}")
    cells = [cell, *(draw_variant(cell, domain, rng) for _ in range(variants - 1))]
    first = FIRST_SEED["lives"] + 1_000 * number
    planned = [
        lives_of(variant, task, range(first + 100 * place, first + 100 * place + seeds), plans) for place, variant in enumerate(cells)
    ]
    cases = [case for lives in planned for case, _ in lives]
    runs = run_cases(eval_setting(cell, task, device=torch.device(device), rows=len(cases)), cases)
    records, about, at = Records(), list[Record](), 0
    for variant, lives in zip(cells, planned, strict=True):
        some, at = runs[at : at + len(lives)], at + len(lives)
        found = gains(some, "val")  # nothing that is learned may depend on the test part
        for run, gain, (_, recorder) in zip(some, found, lives, strict=True):
            if run.controller != "never":
                records.add(recorder, cell=number, gain=gain, end_size=size(run))
        of_plans = [case.controller for case, _ in lives[: len(CONSTANT_PLANS)]]
        results = plan_results(some[: len(CONSTANT_PLANS)], [plan for plan in of_plans if isinstance(plan, ConstantPlan)])
        shown = {"what": "lives", "cell": number, "seed": seed, **msgspec.to_builtins(variant)}
        about.append({**shown, "hosts": len(some), "mean_gain": fmean(found), **results})
    columns: dict[str, Any] = {name: np.array(values) for name, values in vars(records).items()}
    np.savez(folder / f"cell_{number}.npz", **columns)
    if device == "cuda":
        torch.cuda.empty_cache()  # for the processes beside this one
    return [{**one, "seconds": (time.perf_counter() - began) / len(about)} for one in about]


def lives_of(cell: Cell, task: Task, host_seeds: Sequence[int], plans: int) -> list[tuple[EvalCase, Recorder]]:
    """Return the hosts of a cell to learn from, each with the recorder of its moves: the first under every constant plan, all at random."""
    case, found = partial(make_case, cell, task), list[tuple[EvalCase, Recorder]]()
    for plan in recorded_plans():
        assert isinstance(plan.record, Recorder)
        found.append((case(plan.name, host_seeds[0], None, plan), plan.record))
    for seed in host_seeds:
        if seed != host_seeds[0]:
            found.append((case("never", seed, None, Never()), Recorder()))
        for number in range(plans):
            recorder = Recorder()
            found.append((case("random", seed, None, RandomPlan(100 * seed + number, recorder)), recorder))
    return found


def read_records(*folders: Path) -> Records:
    """Return the moves of all cells in these folders."""
    records, cells = Records(), list[int]()
    for folder in folders:
        paths = sorted(folder.glob("cell_*.npz"))
        if not paths:
            raise SystemExit(f"there are no cells in {folder}; make some with the command lives")
        for path in paths:
            with np.load(path) as found:
                for name, values in vars(records).items():
                    values += list(found[name]) if name == "features" else found[name].tolist()
            first = len(cells)
            cells += [first] * (len(records) - first)  # one number for each file; those in the files are used again in other folders
    records.cells = cells
    return records


def read_lives(folder: Path) -> list[Record]:
    """Return the records of the cells in a folder, with the results of constant plans."""
    return [record for record in Output(folder / "lives.jsonl", resume=True).earlier if record.get("what") == "lives"]


# Controllers that learn from them


def value_file(folder: Path, training: int) -> Path:
    return folder / f"value_{training}.safetensors"


def fit_values(folder: Path, more: Sequence[Path], trainings: int, device: str) -> None:
    """Fit value models with different seeds to the cells in all folders, and write them into the first one.

    The cells in further folders must be those of `lives --everything`.
    """
    moves, lives = read_records(folder, *more), [record for one in (folder, *more) for record in read_lives(one)]
    # The plans are kept in the file for the prices of `esper controller compare`, which cannot choose them without training cells.
    blind = {f"{price:g}": name for price, name in blind_plans(lives, CompareConfig().prices).items()}
    about = {
        "cells": len(set(moves.cells)),
        "moves": len(moves),
        "domain": msgspec.to_builtins(EVERYTHING if more else TRAINED),
        "blind": blind,
    }
    for training in range(1, trainings + 1):
        found = fit(moves, seed=training, device=device)
        figures = {"r2_in_unseen_cells": found.r2, "calibration": float(found.model.calibration)}
        print(f"value {training}: {about['cells']} cells, {len(moves)} moves; in cells that members have not seen, R² {found.r2:.2f}")
        save_controller(value_file(folder, training), found.model, {**about, **figures, "seed": training})


def train_policy(training: int, *, folder: Path, core: str, rounds: int, hosts: int, minutes: float, device: str) -> list[Record]:
    """Train a policy by PPO, starting from a value model. Return a record of the training."""
    began, start = time.perf_counter(), value_file(folder, training)
    ppo = ControllerConfig().ppo
    network = msgspec.structs.replace(ppo.network, core=core)
    # Short rollouts for more updates. The reward comes at the end, so nothing is gained by trusting the critic in between.
    ppo = msgspec.structs.replace(ppo, seed=training, num_steps=16, gae_lambda=1.0, learning_rate=3e-4, network=network)
    settings = {"device": device, "threads": 1, "host_events": False, "start": str(start), "domain": TRAINED, "ppo": ppo}
    config = ControllerConfig(hosts=hosts, rounds=rounds, fleets=1, hosts_per_twin=16, checkpoint_every=1, **settings)  # type: ignore[arg-type]
    target = folder / f"{TRAINING_NAMES[core]}_{training}"
    result = train_controller(config, target, should_stop=lambda: time.perf_counter() - began > 60 * minutes)
    about = {"what": "training", "training": training, "core": core, "hosts": hosts, "decisions": result.step}
    return [{**about, "mean_return": result.mean_return, "seconds": time.perf_counter() - began}]


# The comparison


def controller_files(folder: Path) -> dict[str, Path]:
    """Return the controllers in a folder by their names in the tables: value 1, ..., learned 1, ..., without memory 1, ..."""
    found = {f"value {path.stem.split('_')[1]}": path for path in sorted(folder.glob("value_*.safetensors"))}
    for name, folders in (("learned", "training_*"), ("without memory", "without_memory_*")):
        paths = sorted(folder.glob(f"{folders}/controller.safetensors"))
        found |= {f"{name} {path.parent.name.rpartition('_')[2]}": path for path in paths}
    return found


def compared_cell(number: int, seed: int) -> tuple[str, Cell]:
    """Return the group of a compared cell, and the cell."""
    group = list(COMPARED)[number % len(COMPARED)]
    # Every group has its own seed. With one for all, the cells of different groups would have the same widths, batches and rates.
    return group, draw_cell(COMPARED[group], number=number // len(COMPARED), seed=1_000 * (number % len(COMPARED)) + seed)


def flops_of_a_life(cell: Cell) -> int:
    """Return the FLOPs of training a host of a cell that does not grow."""
    task = cell.task(load)
    return 3 * cell.samples_of_a_life * discover(task.make_host(cell.host, seed=0), task.example_input).host.flops


def compare(
    number: int, *, files: dict[str, Path], rules: dict[float, Rule], device: str, hosts: int, memory: int | None, seed: int, controls: int
) -> list[Record]:
    """Train the hosts of all contestants in one cell, and return a record of each."""
    group, cell = compared_cell(number, seed)
    first = FIRST_SEED["compare"]
    hosts = min(hosts, FEW_HOSTS) if flops_of_a_life(cell) > MOST_FLOPS else hosts
    loaded = {name: load_controller(path) for name, path in files.items()}
    setting = CompareSetting(
        PRICES, range(first, first + hosts), next(iter(files)), rules, controls, rows=1_024, memory=memory, device=device, seed=seed
    )
    controllers = {name: partial(new_copy, controller) for name, controller in loaded.items()}
    try:
        return compare_cell(setting, cell, load, controllers, number=number, group=group)
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()  # for the processes beside this one


def show(records: Sequence[Record], chosen: Record) -> Record:
    """Print the tables of a comparison, and return the statistics as a record."""
    blind = {float(price): name for price, name in chosen["blind"].items()}
    comparison = Comparison(of_whole_cells(records), PRICES, blind, chosen["compared"])
    print(tables(comparison))
    statistics = comparison.to_builtins()
    del statistics["records"]
    return {"what": "summary", **statistics}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["lives", "fit", "train", "compare", "tables"])
    parser.add_argument("--folder", type=Path, help="folder for the files of the cells that are learned from, and for the controllers")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="further folders, with cells of lives --everything (fit)")
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--variants", type=int, default=1, help="of each cell, with other samples and learning rates (lives)")
    parser.add_argument("--hosts", type=int, default=2, help="hosts with other seeds in each cell or variant")
    parser.add_argument("--plans", type=int, default=2, help="random plans for each of these hosts (lives)")
    parser.add_argument("--most-flops", type=float, help="leave out cells in which the training of a host takes more (lives)")
    parser.add_argument("--everything", action="store_true", help="draw cells of all families and sources (lives)")
    parser.add_argument("--trainings", type=int, default=1, help="controllers, each with another seed (fit, train)")
    parser.add_argument("--rounds", type=int, default=40, help="of a training, at most (train)")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which a training ends with the round (train)")
    parser.add_argument("--core", choices=list(TRAINING_NAMES), default="lstm", help="memory of the policy (train)")
    parser.add_argument("--hosts-at-once", type=int, default=64, help="of a training (train)")
    parser.add_argument("--memory", type=float, help="GB for the hosts that a process trains at once (compare)")
    parser.add_argument("--controls", type=int, default=4, help="hosts of a cell that have controls at equal FLOPs (compare)")
    parser.add_argument("--seed", type=int, default=1, help="of the cells")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS / "controller.jsonl")
    options = parser.parse_args(arguments)
    if options.command == "tables":
        records = Output(options.out, resume=True).earlier
        chosen = [record for record in records if record.get("what") == "chosen"]
        if not chosen:
            parser.error(f"--out: there is no comparison in {options.out}; make one with the command compare")
        show(records, chosen[-1])
        return
    if options.folder is None:
        parser.error("--folder: name the folder for the files of the cells that are learned from")
    if options.command == "compare" and options.hosts < 2:
        parser.error("--hosts: at least 2 are needed, because plans are tuned on the other hosts of a cell")
    options.folder.mkdir(parents=True, exist_ok=True)
    {"lives": run_lives, "fit": run_fit, "train": run_train, "compare": run_compare}[options.command](options)


def run_lives(options: argparse.Namespace) -> None:
    output = Output(options.folder / "lives.jsonl", resume=True)
    have = {record["cell"] for record in output.earlier if record.get("what") == "lives"}
    shared: dict[str, Any] = {"device": options.device, "seed": options.seed, "folder": options.folder}
    shared |= {"seeds": options.hosts, "plans": options.plans}
    shared |= {"domain": EVERYTHING if options.everything else TRAINED, "variants": options.variants}
    cells = {number: draw_cell(shared["domain"], number=number, seed=options.seed) for number in range(options.cells) if number not in have}
    if options.most_flops is not None:
        cells = {number: cell for number, cell in cells.items() if flops_of_a_life(cell) <= options.most_flops}
    run_all([partial(live, number, **shared) for number in cells], processes=options.jobs, output=output)


def run_fit(options: argparse.Namespace) -> None:
    fit_values(options.folder, options.more, options.trainings, options.device)


def run_train(options: argparse.Namespace) -> None:
    numbers = range(1, options.trainings + 1)
    if missing := [number for number in numbers if not value_file(options.folder, number).exists()]:
        raise SystemExit(f"there is no {value_file(options.folder, missing[0])} to start from; make it with the command fit")
    shared = {"folder": options.folder, "rounds": options.rounds, "hosts": options.hosts_at_once, "device": options.device}
    shared |= {"core": options.core, "minutes": options.minutes}
    output = Output(options.folder / "trainings.jsonl", resume=True)
    run_all([partial(train_policy, number, **shared) for number in numbers], processes=options.jobs, output=output)


def run_compare(options: argparse.Namespace) -> None:
    lives, files = read_lives(options.folder), controller_files(options.folder)
    if not files:
        raise SystemExit(f"there is no controller in {options.folder}; make one with the command fit")
    rules = choose_rules(lives, PRICES)
    output = Output(options.out, resume=True)
    chosen: Record = {
        "what": "chosen",
        "blind": {str(price): name for price, name in blind_plans(lives, PRICES).items()},
        "rules": {str(price): msgspec.to_builtins(rule) for price, rule in rules.items()},
        "compared": next(iter(files)),
        "trained_cells": len(lives),
    }
    output.write(chosen)
    shared: dict[str, Any] = {"files": files, "rules": rules, "hosts": options.hosts, "device": options.device}
    shared |= {"seed": 10_000 + options.seed, "controls": options.controls}
    shared["memory"] = None if options.memory is None else int(options.memory * 1e9)
    have = {record["cell"] for record in output.earlier if record.get("what") == "cell"}
    numbers = [number for number in range(options.cells) if number not in have]
    numbers.sort(key=lambda number: flops_of_a_life(compared_cell(number, shared["seed"])[1]))
    jobs = [partial(compare, number, **shared) for number in numbers]
    found = run_all(jobs, processes=options.jobs, output=output)
    output.append(show([*output.earlier, *found], chosen))


if __name__ == "__main__":
    main()
