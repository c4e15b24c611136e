"""Whether two equal trainings give the same bits under `deterministic`, on the CPU and on a GPU.

    python benchmarks/deterministic.py --device cuda --out benchmarks/results/deterministic_h200.jsonl

Each training runs twice in a new folder, and everything that it writes is compared: all tensors and values of its checkpoints and models,
and all events but for what depends on the clock.

    growth       `esper.grow` of a convolutional host with seeds in depth and in width, raised jointly or in the shadow
    fleet        five hosts in one program, with seeds in depth and in width
    learner      `esper ppo train` in a task that needs memory

With `--control` each is also trained twice without the switch, which shows what it is for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from esper.devices import determinism, threads
from esper.fleet import Fleet, FleetConfig, HostConfig
from esper.growth import BudgetConfig, GrowthConfig, LifecycleConfig, Planned, grow
from esper.growth.lifecycle.stages import Advance, Decision, Germinate
from esper.rl import PPOConfig, TrainConfig, train_run
from esper.runs.tensors import split
from esper.tasks import BatchLoader, ConvHost, Split, Task, load_task

sys.path.insert(0, str(Path(__file__).parents[1]))  # the root of the repository

from benchmarks.records import RESULTS, Output, Record
from benchmarks.same_results import Values, is_same, values_of

CLOCKS = {"time", "run", "esper", "memory_bytes", "device_memory_bytes", "resources", "sha256", "events_offset", "folder", "cpu_cores"}
Training = Callable[[Path, str, bool], Values]  # (an empty folder, device, whether `deterministic` is on) -> all results


def is_of_clock(path: str) -> bool:
    return any(part in CLOCKS or "second" in part for part in path.split("/"))


def small_task() -> Task:
    """Return a part of the digits."""
    task = load_task("digits")
    train, validation = (Split(part.inputs[:count], part.targets[:count]) for part, count in ((task.train, 128), (task.validation, 64)))
    return replace(task, train=train, validation=validation)


def grown(folder: Path, device: str, is_on: bool, *, epochs: int, precision: Any, raise_mode: Any) -> Values:
    lifecycle = LifecycleConfig(raise_mode=raise_mode, training_epochs=1, blend_epochs=1, holding_epochs=1)
    task = small_task()
    parts = [(part.inputs.to(device), part.targets.to(device), seed) for part, seed in ((task.train, 0), (task.validation, None))]
    loaders = [BatchLoader(inputs, targets, batch_size=32, seed=seed) for inputs, targets, seed in parts]
    plan = Planned([(0, "blocks.0", "conv3x3"), (0, "blocks.1", "widen_50"), (2, "blocks.2", "norm")])
    with determinism(is_on):
        config = GrowthConfig(lifecycle=lifecycle, slots=("blocks.*",))
        run: dict[str, Any] = {"epochs": epochs, "controller": plan, "config": config, "precision": precision, "run": folder / "run"}
        grow(make_host(0).to(device), *loaders, cross_entropy, telemetry="debug", **run)
    return values_of(folder / "run")


def fleet(folder: Path, device: str, is_on: bool, *, epochs: int, precision: Any) -> Values:
    names, budget = ("conv3x3", "norm", "widen_100"), BudgetConfig(max_parameters=None, max_flops=None)
    growth = GrowthConfig(lifecycle=LifecycleConfig(holding_epochs=1), budget=budget, blueprints=names)
    with determinism(is_on):
        config = FleetConfig(precision=precision, batch_size=32, validation_batch=64)
        hosts = Fleet(small_task(), make_host, hosts=5, growth=growth, config=config, device=device)
        hosts.reset({row: HostConfig(seed=row, horizon=epochs) for row in range(5)})
        slots = list(hosts.places)
        found: Values = {}
        for epoch in range(epochs):
            if epoch == 1:
                deep = Germinate(slot=slots[0], blueprint="conv3x3", reason="test")
                wide = Germinate(slot=slots[1], blueprint="widen_100", reason="test")
                hosts.decide({row: Decision((deep,), probe=row % 2 == 0) for row in (0, 1, 2)} | {row: Decision((wide,)) for row in (3, 4)})
            if epoch == 2:
                hosts.decide({row: Decision((Advance(slot=slots[0], reason="test"),)) for row in (0, 1)})
            hosts.advance()
            found |= {f"{epoch}/{row}": host.lifecycles.history.val_losses[-1] for row, host in enumerate(hosts.rows)}
        structure, tensors = split(hosts.state_dict())
        return found | {name: tensor.numpy() for name, tensor in tensors.items()} | {"structure": str(structure)}


def make_host(seed: int) -> ConvHost:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConvHost(1, 10, (8, 16, 16))


def learned(folder: Path, device: str, is_on: bool, *, updates: int) -> Values:
    ppo = PPOConfig(num_steps=32, num_epochs=2, num_minibatches=2)
    config = TrainConfig(
        env="cue", num_envs=8, total_steps=updates * 256, checkpoint_every=2, eval_episodes=0, device=device, deterministic=is_on, ppo=ppo
    )
    train_run(config, folder / "run")
    return values_of(folder / "run")


def trainings(size: int) -> dict[str, Training]:
    """Return all trainings by name; `size` is 1 for the shortest."""
    growth = {
        f"growth {raise_mode} {precision}": partial(grown, epochs=3 + size, precision=precision, raise_mode=raise_mode)
        for raise_mode, precision in (("joint", "float32"), ("shadow", "bfloat16"))
    }
    fleets = {f"fleet {precision}": partial(fleet, epochs=3 + size, precision=precision) for precision in ("float32", "bfloat16")}
    return {**growth, **fleets, "learner": partial(learned, updates=3 * size)}


def compared(train: Training, device: str, *, is_on: bool = True) -> Record:
    """Train twice, and count what differs."""
    began = time.perf_counter()
    runs: list[Values] = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            with threads(1):
                values = train(Path(folder), device, is_on)
        runs.append({path: value for path, value in values.items() if not is_of_clock(path)})
    one, other = runs
    differ = sorted(
        path for path in one.keys() | other.keys() if path not in one or path not in other or not is_same(one[path], other[path])
    )
    return {
        "device": device,
        "deterministic": is_on,
        "values": len(one),
        "tensors": sum(hasattr(value, "tobytes") for value in one.values()),
        "differ": len(differ),
        "first": differ[:3],
        "seconds": time.perf_counter() - began,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=4, help="length of the trainings; 1 for the shortest")
    parser.add_argument("--only", nargs="*", help="names of trainings, by default all")
    parser.add_argument("--control", action="store_true", help="also without the switch")
    parser.add_argument("--out", type=Path, default=RESULTS / "deterministic.jsonl")
    options = parser.parse_args(arguments)
    output = Output(options.out)
    for name, train in trainings(options.size).items():
        if options.only is None or name in options.only:
            for is_on in (True, False) if options.control else (True,):
                output.write({"training": name, **compared(train, options.device, is_on=is_on)})


if __name__ == "__main__":
    main()
