"""Whether the heuristic grows where growing pays, and leaves other hosts alone: cells of data and hosts.

    python benchmarks/growth_cells.py
    python benchmarks/growth_cells.py --jobs 15 --large-on cuda

A cell is a number of training samples, a share of wrong labels, and a starting width (starved, right, over-sized). The data are those of
the task digits-1d, which can be drawn in any number: every net of a cell has its own training and validation part, of which it uses no
other net's samples, and all are tested on the same part. Wrong labels are in all parts. Arms, paired over nets:

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from esper.growth import Controller, GrowthConfig, Planned, grow
from esper.growth.config import GovernorConfig
from esper.rng import Streams
from esper.statistics import student_interval
from esper.tasks import BatchLoader, Split, Task, load_task
from esper.tasks.digits_1d import make_series
from growth_runs import mean, print_table, run_all, seeds_of
from records import RESULTS, Output, Record

SAMPLES = (250, 2_000)
NOISE = (0.0, 0.3)
WIDTHS = {"starved": 2, "right": 10, "over-sized": 20}
EPOCHS, LEARNING_RATE = 24, 0.01
GROWN_AT = 2  # epochs after which the plans grow: the first look of the heuristic
VALIDATION, TEST = 500, 2_000  # samples
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

    def load(self, seed: int) -> Task:
        """Return the task of a net."""
        task = load_task("digits-1d")
        streams = Streams(seed)

        def part(name: str, count: int, streams: Streams) -> Split:
            drawn = make_series(count, streams.numpy(name))
            wrong = torch.from_numpy(streams.numpy(f"wrong labels of {name}").random(count) < self.noise)
            other = torch.from_numpy(streams.numpy(f"other labels of {name}").integers(0, 10, count))
            return Split(drawn.inputs, torch.where(wrong, other, drawn.targets))

        batch = max(self.samples // 40, 25)
        train, validation = part("train", self.samples, streams), part("validation", VALIDATION, streams)
        return replace(task, train=train, validation=validation, test=part("test", TEST, Streams(10**6)), batch_size=batch)


CELLS = [Cell(*values) for values in itertools.product(SAMPLES, NOISE, WIDTHS)]


def controller(arm: str) -> Controller | str:
    deep = [(GROWN_AT, f"blocks.{number}", "double_conv3x3") for number in (1, 2)]
    plans = {
        "wide": [(GROWN_AT, "blocks.0", "widen_100_chain")],
        "wider": [(GROWN_AT, "blocks.0", "widen_300_chain")],
        "both": [(GROWN_AT, "blocks.0", "widen_300_chain"), *deep],
    }
    return Planned(plans[arm]) if arm in plans else arm


def run_one(cell: Cell, arm: str, seed: int, epochs: int, large_on: str) -> list[Record]:
    task, width = cell.load(seed), WIDTHS[cell.host]
    device = large_on if cell.host == "over-sized" else "cpu"
    result = grow(
        task.make_host(f"{width}-{2 * width}-{4 * width}", seed=seed).to(device),
        task.train_loader(seed=seed, device=device),
        BatchLoader(task.validation.inputs.to(device), task.validation.targets.to(device), batch_size=VALIDATION // 10),
        loss_fn=task.loss_fn,
        epochs=epochs,
        optimizer=partial(AdamW, lr=LEARNING_RATE),
        scheduler=partial(CosineAnnealingLR, T_max=epochs),
        controller=controller(arm),
        config=GrowthConfig(seed=seed, governor=GovernorConfig(uninformed_loss=task.uninformed_loss)),
    )
    found = task.evaluate(result.model, task.test_loader(device=device))
    return [
        {
            **cell.about,
            "arm": arm,
            "seed": seed,
            "epochs": epochs,
            "test_loss": found.loss,
            "test_accuracy": 100 * found.accuracy,
            "val_loss": result.val_loss,
            "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
            "gflops": result.gflops,
            "seeds": seeds_of(result.ledger),
        }
    ]


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
    parser.add_argument("--large-on", default="cpu", help="device for the over-sized hosts")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are in the file already, instead of adding to them")
    parser.add_argument("--out", type=Path, default=RESULTS / "growth_cells.jsonl")
    options = parser.parse_args(arguments)
    cells, seeds = CELLS[: options.cells], range(options.first_seed, options.first_seed + options.nets)
    output = Output(options.out, resume=not options.fresh)
    runs = [run for run in output.earlier if "arm" in run and run["epochs"] == options.epochs and run["seed"] in seeds]
    have = {(run["samples"], run["noise"], run["host"], run["arm"], run["seed"]) for run in runs}
    wanted = [(cell, arm, seed) for cell in reversed(cells) for seed in seeds for arm in ARMS]
    jobs = [
        partial(run_one, cell, arm, seed, options.epochs, options.large_on)
        for cell, arm, seed in wanted
        if (cell.samples, cell.noise, cell.host, arm, seed) not in have
    ]
    runs += run_all(jobs, processes=options.jobs, output=output)
    record = summary(runs, cells, options.epochs)
    output.write(record)
    show(record)


if __name__ == "__main__":
    main()
