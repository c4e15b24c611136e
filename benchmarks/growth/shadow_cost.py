"""What raising a seed in the shadow costs, beside the least that it could cost.

    python benchmarks/growth/shadow_cost.py

A residual convnet trains with one seed in the shadow, in slots at several depths. Measured is all of `after_step`: the second pass, the
gradients of the seed and its optimiser's step. Beside it stands the same arithmetic in a bare loop, from the same batch:

    replayed     forward from the recorded output of the slot's module through seed, the rest of the host and the loss; backward from there
                 to the seed's parameters
    not          the same after one forward pass through everything before the slot

`extra` is the difference of whole training steps with and without the seed, in which recording counts too. All take turns, in one
process and on one thread; reported are medians over the rounds of the time and of its ratio to the bare loop's in the same round, with the
ratio's 95 % interval by order statistics.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth import Grower, GrowthConfig, Planned, add_slots
from esper.growth.config import LifecycleConfig

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import print_table
from benchmarks.records import RESULTS, Output, Record

Result = TypeVar("Result")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


class Residual(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.before(x, len(self.blocks)), len(self.blocks))

    def before(self, x: Tensor, stop: int) -> Tensor:
        """Up to the output of block `stop` - 1."""
        x = self.stem(x)
        for block in list(self.blocks)[:stop]:
            x = block(x)
        return x

    def behind(self, x: Tensor, start: int) -> Tensor:
        for block in list(self.blocks)[start:]:
            x = block(x)
        result: Tensor = self.head(x.mean(dim=(2, 3)))
        return result


class Side:
    """A host in training, with a seed in the shadow of block `at`, or without."""

    def __init__(self, options: argparse.Namespace, at: int | None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = Residual(options.blocks, options.width).to(options.device)
            self.inputs = torch.randn(options.batch, 3, options.size, options.size).to(options.device)
            self.targets = torch.randint(10, (options.batch,)).to(options.device)
        self.at = at or 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        slot = f"blocks.{self.at}"
        self.slotted = add_slots(self.model, self.inputs[:2], slots=[slot])
        # An epoch never ends, so neither does the shadow.
        config = GrowthConfig(lifecycle=LifecycleConfig(raise_mode="shadow"))
        controller = Planned([] if at is None else [(0, slot, options.blueprint)])
        self.grower = Grower(self.slotted, self.optimizer, controller=controller, config=config)
        self.grower.begin()
        self.slot = self.slotted.slot(slot)

    def step(self, *, is_recorded: bool = True) -> Tensor:
        """As a user would do it. Where nothing is recorded, the second pass computes everything again."""
        if not is_recorded:
            self.grower._steps.shadow.rest()
        loss = F.cross_entropy(self.slotted(self.inputs), self.targets)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def after_step(self, loss: Tensor) -> None:
        self.grower.after_step(loss, closure=lambda: F.cross_entropy(self.slotted(self.inputs), self.targets))

    def bare(self, recorded: Tensor | None) -> None:
        """What a second pass cannot do without."""
        assert self.slot.seed is not None
        h = self.model.before(self.inputs, self.at + 1) if recorded is None else recorded
        grown = h + self.slot.seed.delta(h)
        loss = F.cross_entropy(self.model.behind(grown, self.at + 1), self.targets)
        torch.autograd.grad(loss, list(self.slot.seed.parameters()))


def measure(options: argparse.Namespace, at: int, *, is_replayed: bool) -> Record:
    plain, shadow, bare = Side(options, None), Side(options, at), Side(options, at)
    recorded = bare.model.before(bare.inputs, at + 1).detach() if is_replayed else None
    times: dict[str, list[float]] = {name: [] for name in ("shadow", "bare", "extra")}
    clock = Clock(options.device)

    def plain_round() -> float:
        first, loss = clock.of(plain.step)
        return first + clock.of(lambda: plain.after_step(loss))[0]

    def shadow_round() -> tuple[float, float]:
        first, loss = clock.of(lambda: shadow.step(is_recorded=is_replayed))
        return first, clock.of(lambda: shadow.after_step(loss))[0]

    gc.disable()
    for number in range(options.warmup + options.rounds):
        without = plain_round()
        first, second = shadow_round()
        least = clock.of(lambda: bare.bare(recorded))[0]
        if number >= options.warmup:
            for name, value in (("shadow", second), ("bare", least), ("extra", first + second - without)):
                times[name].append(value)
    gc.enable()
    return {
        "slot": f"blocks.{at}",
        "is_replayed": is_replayed,
        "behind": options.blocks - at - 1,
        "device": options.device,
        "rounds": options.rounds,
        **{f"{name}_milliseconds": 1e3 * median(values) for name, values in times.items()},
        "ratio": middle([one / other for one, other in zip(times["shadow"], times["bare"], strict=True)]),
        "extra_ratio": middle([one / other for one, other in zip(times["extra"], times["bare"], strict=True)]),
    }


class Clock:
    def __init__(self, device: str) -> None:
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)

    def of(self, work: Callable[[], Result]) -> tuple[float, Result]:
        self._wait()
        start = time.perf_counter()
        result = work()
        self._wait()
        return time.perf_counter() - start, result


def middle(values: list[float]) -> Record:
    """The median and its 95 % interval by order statistics."""
    ordered, half, reach = sorted(values), len(values) / 2, 0.98 * math.sqrt(len(values))  # ±1.96 deviations of a binomial, p = 1/2
    low, high = max(0, math.floor(half - reach)), min(len(values) - 1, math.ceil(half + reach))
    return {"estimate": median(ordered), "low": ordered[low], "high": ordered[high]}


def show(records: list[Record]) -> None:
    rows = [("slot", "blocks behind", "replayed", "shadow step, ms", "bare loop, ms", "ratio", "whole step's extra / bare loop")]
    for record in records:
        ratios = [f"{one['estimate']:.2f} [{one['low']:.2f}, {one['high']:.2f}]" for one in (record["ratio"], record["extra_ratio"])]
        milliseconds = [f"{record[f'{name}_milliseconds']:.2f}" for name in ("shadow", "bare")]
        rows.append((record["slot"], str(record["behind"]), "yes" if record["is_replayed"] else "no", *milliseconds, *ratios))
    print_table(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--size", type=int, default=16, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--at", default="0,2,4,6", help="blocks after which the seed grows, separated by commas")
    parser.add_argument("--blueprint", default="conv3x3")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=5, help="rounds before those")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "growth_shadow_cost.jsonl")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    output, records = Output(options.out), []
    for is_replayed in (True, False):
        for at in map(int, options.at.split(",")):
            records.append(measure(options, at, is_replayed=is_replayed))
            output.write(records[-1])
    show(records)


if __name__ == "__main__":
    main()
