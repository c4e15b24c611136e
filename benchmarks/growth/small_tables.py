"""Growing on tables of some hundred rows: does it keep up with the best of three static widths that is chosen by validation?

    pip install scikit-learn
    python benchmarks/growth/small_tables.py

An MLP with two hidden layers of 4 units, AdamW, 30 epochs, batches of 32; 60 % of the rows train, 20 % validate, 20 % test. Every split
draws the rows, the first weights and the order of the data anew. Arms, each with its best validation state:

    heuristic   grows as the heuristic controller decides
    x1 x4 x16   static nets of 4, 16 and 64 hidden units
    chosen      of these three, that with the lowest validation loss

The tables of the aim are the four of values: diabetes, and three of 400 rows that scikit-learn generates. wine and digits are reported
beside them; the log losses of separable classes are decided by single rows, and static nets of one size differ by up to 30 % in them.
Losses are squared errors in units of the variance of the training targets, or in nats. Rules were chosen by splits 100:120, and no rule
was chosen by splits 0:10.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth import grow

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import print_table
from benchmarks.records import RESULTS, Output, Record

EPOCHS, BATCH, RATE, START = 30, 32, 0.01, 4
WIDTHS = {"x1": START, "x4": 4 * START, "x16": 16 * START}
NOISE = {"friedman1": 1.0, "friedman2": 125.0, "friedman3": 0.1}  # of the targets: 4 to 9 % of their variance
Part = tuple[Tensor, Tensor]  # inputs [M, I], targets [M] of classes or [M, 1] of values


@dataclass(frozen=True)
class Table:
    """One split of a table."""

    train: Part
    validation: Part
    test: Part
    outputs: int
    is_classes: bool

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) if self.is_classes else F.mse_loss(outputs, targets)


class Shuffled:
    """The batches of the training part in another order in every epoch."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def __len__(self) -> int:
        return -(-len(self.part[0]) // BATCH)

    def __iter__(self) -> Iterator[Part]:
        return iter([(self.part[0][rows], self.part[1][rows]) for rows in torch.randperm(len(self.part[0])).split(BATCH)])


def rows_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and targets of a table of scikit-learn, or of one that it generates."""
    from sklearn import datasets

    if name in NOISE:
        return getattr(datasets, f"make_{name}")(n_samples=400, noise=NOISE[name], random_state=0)
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return (x[:600], y[:600]) if name == "digits" else (x, y)


def load(name: str, split: int) -> Table:
    """Return a split, standardised by its training part."""
    x, y = rows_of(name)
    is_classes = np.issubdtype(y.dtype, np.integer)
    order = np.random.default_rng(1000 + split).permutation(len(x))
    parts = np.split(order, [int(0.6 * len(x)), int(0.8 * len(x))])
    spread = x[parts[0]].std(0)
    inputs = torch.tensor((x - x[parts[0]].mean(0)) / np.where(spread < 1e-6, 1, spread), dtype=torch.float32)
    values = torch.tensor((y - y[parts[0]].mean()) / y[parts[0]].std(), dtype=torch.float32).unsqueeze(1)
    targets = torch.tensor(y).long() if is_classes else values
    train, validation, test = ((inputs[rows], targets[rows]) for rows in parts)
    return Table(train, validation, test, int(y.max()) + 1 if is_classes else 1, is_classes)


def run(name: str, split: int, arm: str) -> Record:
    """Train one arm on one split."""
    table, width, began = load(name, split), WIDTHS.get(arm, START), time.process_time()
    torch.manual_seed(split)
    inputs = table.train[0].shape[1]
    net = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, table.outputs))
    validation = list(zip(*(tensor.split(BATCH) for tensor in table.validation), strict=True))
    grown = grow(
        net,
        Shuffled(table.train),
        validation,
        table.loss,
        epochs=EPOCHS,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE),
        controller="heuristic" if arm == "heuristic" else "never",
    )
    with torch.no_grad():
        test_loss = float(table.loss(grown.model.eval()(table.test[0]), table.test[1]))
    return {
        "table": name,
        "split": split,
        "arm": arm,
        "val_loss": grown.val_loss,
        "test_loss": test_loss,
        "parameters": grown.host.parameters + grown.added.parameters,
        "best_epoch": grown.best_epoch or EPOCHS,
        "seconds": time.process_time() - began,
    }


def summary(name: str, runs: list[Record]) -> Record:
    """Return the mean test losses of a table, and how far growing is from the widths that validation chooses."""
    by_arm = {arm: sorted((one for one in runs if one["arm"] == arm), key=lambda one: one["split"]) for arm in ("heuristic", *WIDTHS)}
    chosen = [min(statics, key=lambda one: one["val_loss"])["test_loss"] for statics in zip(*(by_arm[arm] for arm in WIDTHS), strict=True)]
    means = {arm: fmean(one["test_loss"] for one in some) for arm, some in by_arm.items()}
    start, ended = by_arm["x1"], by_arm["heuristic"]
    return {
        "what": "summary",
        "table": name,
        "splits": len(start),
        "test_loss": {**means, "chosen": fmean(chosen)},
        "over_chosen_percent": {arm: 100 * (mean / fmean(chosen) - 1) for arm, mean in means.items()},
        "times_the_parameters": fmean(one["parameters"] / two["parameters"] for one, two in zip(ended, start, strict=True)),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="diabetes,friedman1,friedman2,friedman3,wine,digits")
    parser.add_argument("--splits", default="0:10", help="first:end")
    parser.add_argument("--out", type=Path, default=RESULTS / "small_tables.jsonl")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    output, first, end = Output(options.out), *map(int, options.splits.split(":"))
    rows = [("table", "heuristic", *WIDTHS, "chosen", "heuristic − chosen", "x1 − chosen", "x16 − chosen", "parameters")]
    for name in options.tables.split(","):
        runs = [run(name, split, arm) for arm in ("heuristic", *WIDTHS) for split in range(first, end)]
        for one in runs:
            output.append(one)
        found = summary(name, runs)
        output.write(found)
        over = found["over_chosen_percent"]
        losses = [f"{found['test_loss'][arm]:.4f}" for arm in ("heuristic", *WIDTHS, "chosen")]
        rows.append(
            (name, *losses, *(f"{over[arm]:+.1f} %" for arm in ("heuristic", "x1", "x16")), f"{found['times_the_parameters']:.1f}×")
        )
    print_table(rows)


if __name__ == "__main__":
    main()
