"""Memory and time of snapshots: whether the resident size grows over many of them, and what taking and restoring one costs.

    python benchmarks/growth_memory.py

A small network trains with Adam, and every step is followed by a snapshot of weights, optimiser and schedule; at every sample it goes back
to the latest one. Growth is the resident size at the end less that at the first sample, by when all memory exists.

The last line also has the best states, which hold the weights without the optimiser: the size of one, the time to take one if every epoch
is better than all before, and the time for an epoch that is not.

Linux only: resident sizes are read from /proc.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from esper.growth.lifecycle.ledger import Ledger
from esper.growth.lifecycle.snapshots import BestState, BestStates, Snapshots
from records import RESULTS, Output, Record

MB = 10**6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Training:
    """A network whose weights, with Adam's two moments of each, take about 5 MB."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


@dataclass
class Timed:
    """Seconds of each snapshot and of each way back."""

    take: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)


def take(training: Training, snapshots: Snapshots, *, epoch: int) -> float:
    start = time.perf_counter()
    snapshots.take(training.state_dict(), epoch=epoch)
    return time.perf_counter() - start


def restore(training: Training, snapshots: Snapshots) -> float:
    start = time.perf_counter()
    latest = snapshots.latest()
    assert latest is not None
    training.load_state_dict(latest.state)
    return time.perf_counter() - start


def samples(snapshots: Snapshots, timed: Timed, *, count: int, every: int) -> Iterator[Record]:
    training = Training()
    for number in range(1, count + 1):
        training.step()
        timed.take.append(take(training, snapshots, epoch=number))
        if number % every == 0:
            timed.restore.append(restore(training, snapshots))
            yield {"snapshots": number, "resident_mb": resident_bytes() / MB, "held_mb": snapshots.nbytes / MB}


def best_states(*, count: int, every: int) -> Record:
    """Train a network whose every epoch is the best so far, and offer each one again with a higher loss."""
    training, states = Training(), BestStates(Ledger())
    taken, passed, resident = list[float](), list[float](), list[int]()
    for number in range(1, count + 1):
        training.step()
        better = BestState(number, float(-number), {}, (), {"parameters": dict(training.model.state_dict())})
        worse = BestState(number, float(count), {}, (), {})
        start = time.perf_counter()
        assert states.may_be_best(better)
        states.take(better)
        middle = time.perf_counter()
        assert not states.may_be_best(worse)
        taken.append(middle - start)
        passed.append(time.perf_counter() - middle)
        if number % every == 0:
            resident.append(resident_bytes())
    return {
        "best_state_mb": states.nbytes / MB,
        "largest_best_growth_mb": (max(resident) - resident[0]) / MB,
        "take_best_seconds": median(taken),
        "not_best_seconds": median(passed),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=1_000)
    parser.add_argument("--every", type=int, default=50, help="snapshots between samples")
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "growth_memory.jsonl")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    output, snapshots, timed, resident = Output(options.out), Snapshots(options.keep), Timed(), []
    for sample in samples(snapshots, timed, count=options.snapshots, every=options.every):
        output.write(sample)
        resident.append(sample["resident_mb"])
    output.write(
        {
            "snapshots": options.snapshots,
            "keep": options.keep,
            "state_mb": snapshots.nbytes / len(snapshots) / MB,
            "growth_mb": resident[-1] - resident[0],
            "largest_growth_mb": max(resident) - resident[0],
            "take_seconds": median(timed.take),
            "restore_seconds": median(timed.restore),
            **best_states(count=options.snapshots, every=options.every),
        }
    )


if __name__ == "__main__":
    main()
