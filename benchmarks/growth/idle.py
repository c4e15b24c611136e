"""What idle slots cost: microseconds per slot and forward pass, graph breaks, and compilations while nothing grows.

    python benchmarks/growth/idle.py

A model of 32 small modules runs with and without a slot after each, in turns and in one process, on one thread. A pair of turns gives one
difference; the median over pairs is the result, with its 95 % interval by order statistics. `fastest` is the difference of the fastest
turns, which other work on the machine disturbs least. Beside the slots stand a forward hook that does nothing, which is what torch itself
takes, and the same model without anything, which is the error of the method. Compilations are counted over 200 passes in training and
evaluation mode, after the first of each.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import gc
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from esper.growth import add_slots

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import RESULTS, Output, Record

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


def compare(model: nn.Module, plain: nn.Module, *, pairs: int, passes: int) -> Record:
    """Microseconds per module that a pass of `model` takes longer than one of `plain`."""
    batch, turns = torch.zeros(4, WIDTH), list[tuple[float, float]]()
    for one in (model, plain):
        seconds(one, batch, passes)
    gc.disable()
    for number in range(pairs):
        if number % 2:
            second, first = seconds(plain, batch, passes), seconds(model, batch, passes)
        else:
            first, second = seconds(model, batch, passes), seconds(plain, batch, passes)
        turns.append((first, second))
    gc.enable()
    found = sorted(first - second for first, second in turns)
    middle, reach = pairs / 2, 0.98 * math.sqrt(pairs)  # ±1.96 standard deviations of a binomial with p = 1/2
    low, high = max(0, math.floor(middle - reach)), min(pairs - 1, math.ceil(middle + reach))
    fastest = min(first for first, _ in turns) - min(second for _, second in turns)
    values = {"median": found[pairs // 2], "low": found[low], "high": found[high], "fastest": fastest}
    return {name: value / MODULES * 1e6 for name, value in values.items()}


def model_with_slots() -> nn.Module:
    model = Model()
    slots = add_slots(model, torch.zeros(2, WIDTH), slots=["blocks.*[0-9]"]).slots
    assert len(slots) == MODULES
    return model


def model_with_hooks() -> nn.Module:
    model = Model()
    for block in model.blocks:
        block.register_forward_hook(nothing)
    return model


def nothing(module: nn.Module, arguments: Any, output: Any) -> None:
    """What torch's own part of a hook costs."""


def measure_eager(*, pairs: int, passes: int, has_gradient: bool) -> Iterator[Record]:
    plain = Model()
    models = {"idle slots": model_with_slots(), "empty hooks": model_with_hooks(), "nothing": Model()}
    with torch.set_grad_enabled(has_gradient):
        for name, model in models.items():
            measured = compare(model, plain, pairs=pairs, passes=passes)
            yield {"what": name, "modules": MODULES, "has_gradient": has_gradient, "microseconds_per_module": measured}


def measure_compiled(passes: int) -> Record:
    model, batch = model_with_slots(), torch.zeros(4, WIDTH)
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
        "modules": MODULES,
        "passes": passes,
        "graphs": explained.graph_count,
        "graph_breaks": explained.graph_break_count,
        "compilations": first,
        "recompilations_while_idle": counter.frame_count - first,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--passes", type=int, default=20, help="forward passes in a turn")
    parser.add_argument("--out", type=Path, default=RESULTS / "growth_idle.jsonl")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    output = Output(options.out)
    for has_gradient in (False, True):
        for record in measure_eager(pairs=options.pairs, passes=options.passes, has_gradient=has_gradient):
            output.write(record)
    output.write(measure_compiled(200))


if __name__ == "__main__":
    main()
