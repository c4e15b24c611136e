"""What idle slots cost: microseconds per slot and forward pass, graph breaks, and compilations while nothing grows.

    python benchmarks/growth_idle.py

A model of 32 small modules runs with and without a slot after each, in turns and in one process, on one thread. A pair of turns gives one
difference; the median over pairs is reported, with its 95 % interval by order statistics. As a measure of the method, the same model is
also compared with itself. Compilations are counted over 200 passes in training and evaluation mode, after the first of each.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import gc
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from esper.growth import add_slots
from records import RESULTS, Output, Record

MODULES = 32
WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(MODULES))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def seconds(model: nn.Module, batch: Tensor, passes: int) -> float:
    """Of one forward pass."""
    start = time.perf_counter()
    for _ in range(passes):
        model(batch)
    return (time.perf_counter() - start) / passes


def differences(model: nn.Module, other: nn.Module, *, pairs: int, passes: int) -> list[float]:
    """Seconds that a pass of `model` takes more than one of `other`, sorted."""
    batch, found = torch.zeros(4, WIDTH), []
    for one in (model, other):
        seconds(one, batch, passes)
    gc.disable()
    for number in range(pairs):
        if number % 2:
            second, first = seconds(other, batch, passes), seconds(model, batch, passes)
        else:
            first, second = seconds(model, batch, passes), seconds(other, batch, passes)
        found.append(first - second)
    gc.enable()
    return sorted(found)


def summary(found: list[float], slots: int) -> Record:
    """Median and its interval, in microseconds per slot."""
    middle, reach = len(found) / 2, 0.98 * math.sqrt(len(found))  # ±1.96 standard deviations of a binomial with p = 1/2
    low, high = found[max(0, math.floor(middle - reach))], found[min(len(found) - 1, math.ceil(middle + reach))]
    return {"microseconds_per_slot": found[len(found) // 2] / slots * 1e6, "low": low / slots * 1e6, "high": high / slots * 1e6}


def model_with_slots() -> tuple[nn.Module, int]:
    model = Model()
    return model, len(add_slots(model, torch.zeros(2, WIDTH), slots=["blocks.*[0-9]"]).slots)


def measure_eager(*, pairs: int, passes: int, has_gradient: bool) -> Record:
    slotted, slots = model_with_slots()
    assert slots == MODULES
    plain, twin = Model(), Model()
    with torch.set_grad_enabled(has_gradient):
        idle = summary(differences(slotted, plain, pairs=pairs, passes=passes), slots)
        none = summary(differences(twin, plain, pairs=pairs, passes=passes), slots)
    return {"what": "idle slots, eager", "slots": slots, "has_gradient": has_gradient, **idle, "same_model": none}


def measure_compiled(passes: int) -> Record:
    model, slots = model_with_slots()
    batch = torch.zeros(4, WIDTH)
    explained = torch._dynamo.explain(model)(batch)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for is_training in (True, False):
        compiled.train(is_training)(batch)
    first = counter.frame_count
    for number in range(passes):
        compiled.train(number % 2 == 0)(batch)
    return {
        "what": "idle slots, compiled",
        "slots": slots,
        "passes": passes,
        "graphs": explained.graph_count,
        "graph_breaks": explained.graph_break_count,
        "compilations": first,
        "recompilations_while_idle": counter.frame_count - first,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--passes", type=int, default=20, help="forward passes in a turn")
    parser.add_argument("--out", type=Path, default=RESULTS / "growth_idle.jsonl")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    output = Output(options.out)
    for has_gradient in (False, True):
        output.write(measure_eager(pairs=options.pairs, passes=options.passes, has_gradient=has_gradient))
    output.write(measure_compiled(200))


if __name__ == "__main__":
    main()
