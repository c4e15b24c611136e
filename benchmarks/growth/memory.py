"""Memory and time of snapshots: whether the resident size grows over many of them, and what taking and restoring one costs.

    python benchmarks/growth/memory.py

A small network trains with Adam, and every step is followed by a snapshot of weights, optimiser and schedule; at every sample it goes back
to the latest one. Growth is the resident size at the end less that at the first sample, by when all memory exists.

The line after them also has the best states, which hold the weights without the optimiser: the size of one, the time to take one if every
epoch is better than all before, and the time for an epoch that is not.

Then small hosts come and go, one after the other: each gets slots and a grower, trains three epochs with a seed in depth or in width and a
rollback, goes back to its best state and is baked. The last line has the growth of the resident size over them, after the first tenth, and
the growers that were alive at the same time at most.

Linux only: resident sizes are read from /proc.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import math
import resource
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from esper.growth import Grower, GrowthConfig, LifecycleConfig, Planned, add_slots
from esper.growth.lifecycle.ledger import Ledger
from esper.growth.lifecycle.snapshots import BestStates, Snapshots

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import RESULTS, Output, Record

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
        lifecycles: Any = SimpleNamespace(slots={}, epoch=number)  # without seeds
        start = time.perf_counter()
        better = states.candidate(lifecycles, float(-number), {})
        assert better is not None
        states.take(replace(better, state={"parameters": dict(training.model.state_dict())}))
        middle = time.perf_counter()
        assert states.candidate(lifecycles, float(count), {}) is None
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


def grow_one(number: int) -> weakref.ref[Grower]:
    """Grow a small host in a loop of its own, with a rollback on the way, and return a reference to its grower."""
    torch.manual_seed(number)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    slotted = add_slots(model, example_input=x[:2], slots=["1"])
    optimizer = torch.optim.Adam(model.parameters())
    plan = Planned([(0, "1", ("mlp", "widen_50")[number % 2])])
    lifecycle = LifecycleConfig(training_epochs=1, blend_epochs=1, holding_epochs=1)
    grower = Grower(slotted, optimizer, controller=plan, config=GrowthConfig(lifecycle=lifecycle), epochs=3)

    def evaluate() -> list[torch.Tensor]:
        return [cross_entropy(slotted(part), targets).detach() for part, targets in zip(x.chunk(2), y.chunk(2), strict=True)]

    for epoch in range(3):
        for step in range(2):
            loss = cross_entropy(slotted(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            grower.after_step(loss * math.nan if (epoch, step) == (1, 0) else loss)
        grower.after_epoch(evaluate)
    assert grower.rollbacks == 1
    grower.restore_best(evaluate)
    slotted.bake()
    return weakref.ref(grower)


def hosts(*, count: int, every: int) -> Iterator[Record]:
    growers: list[weakref.ref[Grower]] = []
    for number in range(1, count + 1):
        growers = [grower for grower in growers if grower() is not None] + [grow_one(number)]
        if number % every == 0:
            yield {"hosts": number, "resident_mb": resident_bytes() / MB, "live_growers": len(growers)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=1_000)
    parser.add_argument("--every", type=int, default=50, help="snapshots between samples")
    parser.add_argument("--hosts", type=int, default=2_000, help="hosts that come and go")
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
    found = []
    for sample in hosts(count=options.hosts, every=max(options.hosts // 40, 1)):
        output.write(sample)
        found.append(sample)
    settled = [sample["resident_mb"] for sample in found[len(found) // 10 :]]
    output.write(
        {
            "hosts": options.hosts,
            "growth_mb": settled[-1] - settled[0],
            "largest_growth_mb": max(settled) - settled[0],
            "most_live_growers": max(sample["live_growers"] for sample in found),
        }
    )


if __name__ == "__main__":
    main()
