"""Whether seeds or longer training lower the test loss more for the same FLOPs, and which of the two the heuristic takes.

    python benchmarks/growth/longer.py --text path/to/input.txt

A cell is a host, some data and a length of training. Arms, paired over seeds (same first weights, same data order):

    grown     a heuristic that takes every host for a starved one: after a tenth of the training it grows whatever the probe likes best
    longer    the same host, which never grows, trained for so many epochs that it costs the FLOPs of the grown run

`speed` is what the heuristic goes by when it looks: how many times as much the seeds promise to lower the loss as the host by itself at the
end of its training, for the same FLOPs. It grows where that is at least `longer_training`. So cells with a low speed should have a positive
difference, and those with a high one a negative difference.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from esper.growth import Decision, GrowthConfig, GrowthState, Heuristic
from esper.growth.config import HeuristicConfig
from esper.growth.controllers.heuristic import choose, speed_over_longer_training
from esper.growth.lifecycle.stages import Germinate
from esper.tasks import Split, Task

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import Setting, difference, print_table, run_all, shown, train
from benchmarks.records import RESULTS, Output, Record

LEAVE_NOTHING_ALONE = HeuristicConfig(high_loss=0.0, projected_loss=0.0, overfit_gap=1.0, evidence_of_host=1e-3, longer_training=1e-9)
LIMIT = HeuristicConfig().longer_training


@dataclass(frozen=True)
class Cell(Setting):
    host: str = "starved"
    samples: int | None = None  # of the training part, drawn once; None: all of them

    def load(self) -> Task:
        task = super().load()
        if self.samples is None:
            return task
        drawn = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(0))[: self.samples]
        return replace(task, train=Split(task.train.inputs[drawn], task.train.targets[drawn]))

    @property
    def about(self) -> Record:
        return {**super().about, "host": self.host, "samples": self.samples}

    @property
    def steps(self) -> int:
        task = self.load()
        return self.epochs * math.ceil(len(task.train) / task.batch_size)


def cells(text: Path | None) -> list[Cell]:
    texts = [Cell("text", text, epochs=12, learning_rate=0.003, samples=samples) for samples in (4_096, 2_048, 1_024, 512)]
    digits = [Cell("digits", epochs=epochs) for epochs in (40, 20, 12, 8)]
    series = [Cell("digits-1d", epochs=epochs) for epochs in (20, 12, 8, 6)]
    return [*texts, *digits, *series]


class Watched:
    """Grows as it is told to, and notes the speed of what it grew first."""

    name = "grown"

    def __init__(self, heuristic: Heuristic) -> None:
        self.heuristic = heuristic
        self.speed: float | None = None

    def decide(self, state: GrowthState) -> Decision:
        decision = self.heuristic.decide(state)
        if self.speed is None and any(isinstance(action, Germinate) for action in decision.actions):
            chosen = [candidate for _, candidate in choose(state, self.heuristic.rules)]
            self.speed = min((speed_over_longer_training(state, candidate) for candidate in chosen), default=0.0)
        return decision


def run_seed(cell: Cell, seed: int) -> list[Record]:
    def run(arm: str, controller: Watched | str, epochs: int | None = None) -> Record:
        return {"arm": arm, **train(cell, cell.load().make_host(cell.host, seed=seed), controller, seed=seed, epochs=epochs)}

    watched = Watched(Heuristic(GrowthConfig(seed=seed, heuristic=LEAVE_NOTHING_ALONE)))
    grown = {**run("grown", watched), "speed": watched.speed}
    an_epoch = run("never", "never", epochs=1)["train_gflops"]
    return [grown, run("longer", "never", epochs=max(round(grown["train_gflops"] / an_epoch), cell.epochs))]


def summary(cell: Cell, runs: list[Record]) -> Record:
    own = [run for run in runs if all(run[name] == value for name, value in cell.about.items())]
    grown, longer = ([run for run in own if run["arm"] == arm] for arm in ("grown", "longer"))
    speeds = [run["speed"] for run in grown if run["speed"] is not None]
    return {
        "what": "summary",
        **cell.about,
        "steps": cell.steps,
        "runs": len(grown),
        "speeds": sorted(speeds),
        "grows": sum(speed >= LIMIT for speed in speeds),
        "loss_difference": difference(grown, longer, "test_loss"),
        "epochs_longer": sum(run["epochs"] for run in longer) / max(len(longer), 1),
    }


def show(records: list[Record]) -> None:
    rows = [("task", "host", "steps", "epochs", "longer", "speed", "the heuristic grows", "test loss, grown − longer")]
    for record in records:
        speeds = record["speeds"] or [math.nan]
        rows.append(
            (
                record["task"],
                record["host"],
                str(record["steps"]),
                str(record["planned_epochs"]),
                f"{record['epochs_longer']:.1f}",
                f"{speeds[0]:.0f} to {speeds[-1]:.0f}",
                f"{record['grows']} of {record['runs']}",
                shown(record["loss_difference"], 3),
            )
        )
    print_table(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="text file for the language models; default: sources of Python")
    parser.add_argument("--tasks", default="text,digits,digits-1d", help="separated by commas")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS / "growth_longer.jsonl")
    options = parser.parse_args(arguments)
    chosen = [cell for cell in cells(options.text) if cell.task in options.tasks.split(",")]
    output = Output(options.out)
    jobs = [partial(run_seed, cell, seed) for cell in chosen for seed in range(options.seeds)]
    runs = run_all(jobs, processes=options.jobs, output=output)
    records = [summary(cell, runs) for cell in chosen]
    for record in records:
        output.append(record)
    show(records)


if __name__ == "__main__":
    main()
