"""Whether the heuristic grows where growing pays, and leaves other hosts alone: cells of data and hosts.

    python benchmarks/growth/cells.py
    python benchmarks/growth/cells.py --device cuda --jobs 6

A cell is a number of training samples, a share of wrong labels, and a starting width (starved, right, over-sized). The data are those of
the task digits-1d, which can be drawn in any number. Every net of a cell has its own training samples, drawn from a large pool; all share
a validation and a test part. Wrong labels are in all parts. All runs of a cell are the rows of one fleet. Arms, paired over nets:

    heuristic   as the heuristic decides
    never       the host never grows
    wide, wider, both
                plans: after a twentieth of the training, twice the channels; four times the channels; these and two convolutions after
                every block but the first
    tuned       of never and the plans, the one with the lowest mean test loss over the other nets of the cell

Every arm keeps the state with the lowest validation loss. The possible gain of a cell is that of `tuned` over `never`. Bounds of the
heuristic's loss against never are Student's 95 % bounds, simultaneous over all cells (Bonferroni).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from esper.fleet import Fleet, FleetConfig, HostConfig
from esper.growth import Controller, GrowthConfig, Planned
from esper.growth.config import GovernorConfig
from esper.growth.controllers.baselines import make_controller
from esper.rng import Streams
from esper.statistics import student_interval
from esper.tasks import Split, Task, load_task
from esper.tasks.digits_1d import make_series

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import mean, print_table, run_all, seeds_of
from benchmarks.records import RESULTS, Output, Record

SAMPLES = (250, 1_000)
NOISE = (0.0, 0.3)
WIDTHS = {"starved": 2, "right": 6, "over-sized": 12}
STEPS, EPOCHS, LEARNING_RATE = 40, 24, 0.01  # STEPS: of an epoch, but batches have 25 samples at least
GROWN_AT = 2  # epochs after which the plans grow: the first look of the heuristic
POOL = 16  # times the samples of a net
VALIDATION, TEST = 1_000, 4_000  # samples
ARMS = ("heuristic", "never", "wide", "wider", "both")


@dataclass(frozen=True)
class Cell:
    samples: int
    noise: float
    host: str

    @property
    def name(self) -> str:
        return f"{self.samples:,} samples, noise {self.noise:g}, {self.host}"

    @property
    def about(self) -> Record:
        return {"samples": self.samples, "noise": self.noise, "host": self.host}

    @property
    def batch(self) -> int:
        return max(self.samples // STEPS, 25)

    def load(self) -> Task:
        """Return the task, with the pool of samples as its training part."""
        streams = Streams(0)

        def part(name: str, count: int) -> Split:
            drawn = make_series(count, streams.numpy(name))
            wrong = torch.from_numpy(streams.numpy(f"wrong labels of {name}").random(count) < self.noise)
            other = torch.from_numpy(streams.numpy(f"other labels of {name}").integers(0, 10, count))
            return Split(drawn.inputs, torch.where(wrong, other, drawn.targets))

        train, validation, test = part("train", POOL * self.samples), part("validation", VALIDATION), part("test", TEST)
        return replace(load_task("digits-1d"), train=train, validation=validation, test=test, batch_size=self.batch)


CELLS = [Cell(*values) for values in itertools.product(SAMPLES, NOISE, WIDTHS)]


def make(arm: str, growth: GrowthConfig) -> Controller:
    deep = [(GROWN_AT, f"blocks.{number}", "double_conv3x3") for number in (1, 2)]
    plans = {
        "wide": [(GROWN_AT, "blocks.0", "widen_100_chain")],
        "wider": [(GROWN_AT, "blocks.0", "widen_300_chain")],
        "both": [(GROWN_AT, "blocks.0", "widen_300_chain"), *deep],
    }
    return Planned(plans[arm]) if arm in plans else make_controller(arm, growth)


def run_cell(cell: Cell, wanted: Sequence[tuple[str, int]], epochs: int, device: str) -> list[Record]:
    """Train these (arm, seed of the net) as the rows of one fleet."""
    began, task, width = time.perf_counter(), cell.load(), WIDTHS[cell.host]
    growth = GrowthConfig(governor=GovernorConfig(uninformed_loss=task.uninformed_loss))
    config = FleetConfig(
        batch_size=cell.batch, steps_per_decision=cell.samples // cell.batch, validation_batch=VALIDATION // 10, keep="best"
    )
    make_host = partial(_make_host, task, width)
    fleet = Fleet(task, make_host, hosts=len(wanted), growth=growth, config=config, device=device)
    hosts = {"horizon": epochs, "learning_rate": LEARNING_RATE, "data_share": 1 / POOL}
    fleet.reset({row: HostConfig(seed=seed, growth_seed=seed, **hosts) for row, (_, seed) in enumerate(wanted)})
    controllers = [make(arm, growth) for arm, _ in wanted]
    rows = fleet.training()
    while rows:
        fleet.decide({row: controllers[row].decide(fleet.state(row)) for row in rows})
        rows = fleet.advance()
    fleet.finish(range(len(wanted)))
    losses, val_losses = fleet.losses(task.test).tolist(), fleet.validation_losses().tolist()
    seconds = (time.perf_counter() - began) / len(wanted)
    return [
        {
            **cell.about,
            "arm": arm,
            "seed": seed,
            "epochs": epochs,
            "test_loss": losses[row],
            "val_loss": val_losses[row],
            "parameters": (host := fleet.rows[row].lifecycles).host.parameters + host.added().parameters,
            "gflops": host.history.flops / 1e9,
            "seconds": seconds,
            "seeds": seeds_of(host.ledger),
        }
        for row, (arm, seed) in enumerate(wanted)
    ]


def _make_host(task: Task, width: int, seed: int) -> torch.nn.Module:
    return task.make_host(f"{width}-{2 * width}-{4 * width}", seed=seed)


# Comparing


def summary(runs: list[Record], cells: list[Cell], epochs: int) -> Record:
    rows = []
    for cell in cells:
        of_cell = [run for run in runs if all(run[name] == value for name, value in cell.about.items())]
        losses = {arm: {run["seed"]: run["test_loss"] for run in of_cell if run["arm"] == arm} for arm in ARMS}
        seeds = sorted(losses["never"])
        tuned, choices = _tuned(losses, seeds)
        differences = [losses["heuristic"][seed] - losses["never"][seed] for seed in seeds]
        # The upper end of this interval is a one-sided 95 % bound that holds for all cells at once.
        interval = student_interval(differences, confidence=1 - 2 * 0.05 / len(cells))
        of_heuristic = [run for run in of_cell if run["arm"] == "heuristic"]
        rows.append(
            {
                **cell.about,
                "nets": len(seeds),
                **{arm: fmean(by_seed.values()) for arm, by_seed in losses.items()},
                "tuned": fmean(tuned),
                "chosen": {arm: choices.count(arm) for arm in ARMS[1:]},
                "heuristic_minus_never": interval.estimate,
                "upper_bound": interval.high,
                "grew": fmean(any(seed["outcome"] == "kept" for seed in run["seeds"]) for run in of_heuristic),
                "parameters": mean(of_heuristic, "parameters"),
            }
        )
    gained = sum(row["never"] - row["heuristic"] for row in rows)
    possible = sum(row["never"] - row["tuned"] for row in rows)
    return {"what": "summary", "epochs": epochs, "cells": rows, "gain": gained / len(rows), "possible": possible / len(rows)}


def _tuned(losses: dict[str, dict[int, float]], seeds: list[int]) -> tuple[list[float], list[str]]:
    """Return the loss of every net with the plan that is best on the other nets, and these plans."""
    found, choices = [], []
    for seed in seeds:
        others = {arm: fmean(losses[arm][other] for other in seeds if other != seed) for arm in ARMS[1:]}
        choices.append(min(others, key=lambda arm: others[arm]))
        found.append(losses[choices[-1]][seed])
    return found, choices


def show(record: Record) -> None:
    rows = [("samples", "noise", "host", "never", "wide", "wider", "both", "tuned", "heuristic", "− never", "bound", "grew", "parameters")]
    for row in record["cells"]:
        losses = [f"{row[arm]:.3f}" for arm in ("never", "wide", "wider", "both", "tuned", "heuristic")]
        hurt = (f"{row['heuristic_minus_never']:+.3f}", f"{row['upper_bound']:+.3f}")
        rows.append(
            (f"{row['samples']:,}", f"{row['noise']:g}", row["host"], *losses, *hurt, f"{row['grew']:.0%}", f"{row['parameters']:,.0f}")
        )
    print_table(rows)
    share = record["gain"] / record["possible"]
    print(f"mean gain {record['gain']:.4f} nats of {record['possible']:.4f} that are possible: {share:.0%}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=int, default=16, help="per cell")
    parser.add_argument("--first-seed", type=int, default=0, help="of the nets, to choose rules on other nets than they are judged by")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--cells", type=int, help="only the first so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are in the file already, instead of adding to them")
    parser.add_argument("--out", type=Path, default=RESULTS / "growth_cells.jsonl")
    options = parser.parse_args(arguments)
    cells, seeds = CELLS[: options.cells], range(options.first_seed, options.first_seed + options.nets)
    output = Output(options.out, resume=not options.fresh)
    runs = [run for run in output.earlier if "arm" in run and run["epochs"] == options.epochs and run["seed"] in seeds]
    have = {(run["samples"], run["noise"], run["host"], run["arm"], run["seed"]) for run in runs}
    jobs = []
    for cell in reversed(cells):  # the long ones first
        missing = [(arm, seed) for seed in seeds for arm in ARMS if (cell.samples, cell.noise, cell.host, arm, seed) not in have]
        if missing:
            jobs.append(partial(run_cell, cell, missing, options.epochs, options.device))
    runs += run_all(jobs, processes=options.jobs, output=output)
    record = summary(runs, cells, options.epochs)
    output.write(record)
    show(record)


if __name__ == "__main__":
    main()
