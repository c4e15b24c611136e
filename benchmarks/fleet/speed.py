"""How fast many hosts train: one after another, one CUDA stream for each, and as a fleet.

    python benchmarks/fleet/speed.py --device cpu --output benchmarks/results/fleet_cpu.jsonl
    python benchmarks/fleet/speed.py --hosts 1 4 16 64 --seeds none --steps 5 --repeats 5 --threads 1
    python benchmarks/fleet/speed.py --device cuda --shape 3x32x32 --channels 8-16-32 --batch 512 --hosts 64 --precision bfloat16
    python benchmarks/fleet/speed.py --device cpu --seeds "one per host" "one per slot" --blueprints widen_50

All ways train the same hosts on the same batches by AdamW, the first two through a `Grower` for each host, and all of them with the same
seeds: none, one living seed in every host, or one in every slot, of mixed blueprints, in depth or in width. What is timed is training
alone: no validation, no decision. A turn is some steps of all hosts; the ways take turns, so that other work on the machine disturbs all of
them alike, and what is reported is the median turn. Data are on the device. On a CPU every way computes on one thread or on `--threads`, as
suits it best.

A record for each way and each kind of seeds: `samples_per_s` of all hosts together, `ratio_to_sequential` and `ratio_to_streams` of the
medians, `peak_memory` in bytes (the hosts' state and what a turn takes beyond it; on a CPU by the resident set, about), `compiles` of torch
so far. Without `--shape` the hosts are those of a task; with it the data are noise of that shape. The record of a fleet without seeds also
has the `bandwidth` of the device's memory, the `floor_samples_per_s` that it would allow and the `distance_from_floor` (see `floor.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from esper.devices import find_device, threads
from esper.fleet import Fleet, FleetConfig, HostConfig, TaskTensors
from esper.fleet.kernels import compiled_kernels
from esper.growth import Grower, GrowthConfig, Planned, add_slots
from esper.growth.config import BudgetConfig
from esper.growth.seeds.blueprints import blueprints_for
from esper.tasks import ConvHost, Split, Task, load_task, shuffled_order

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.clock import now
from benchmarks.fleet.floor import floor
from benchmarks.records import Output, Record, metadata

BLUEPRINTS = ("norm", "conv3x3", "bottleneck", "depthwise")
SEEDS = ("none", "one per host", "one per slot")
HORIZON = 10**6  # decisions: nobody's training ends here
Plan = list[tuple[int, str, str]]  # as `Planned` takes it


@dataclass(frozen=True)
class Setup:
    """What all ways have in common."""

    task: Task
    tensors: TaskTensors
    device: torch.device
    hosts: int
    batch: int
    steps: int  # of a turn of the fleet
    steps_alone: int  # of a turn of hosts that train alone
    channels: str
    precision: str
    plans: list[Plan]  # what grows in every host
    learning_rate: float = 0.001

    @property
    def growth(self) -> GrowthConfig:
        return GrowthConfig(budget=BudgetConfig(max_parameters=None, max_flops=None))

    def make_host(self, seed: int) -> nn.Module:
        return self.task.make_host(self.channels, seed=seed)


class Way(Protocol):
    steps: int  # of a turn

    def turn(self) -> None:
        """Some steps of all hosts."""


class Alone:
    """One host in a training loop of its own."""

    def __init__(self, setup: Setup, row: int) -> None:
        self.setup = setup
        self.model = setup.make_host(row).to(setup.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setup.learning_rate, weight_decay=0.01)
        self.slotted = add_slots(self.model, setup.tensors.inputs[:2])
        self.grower = Grower(self.slotted, self.optimizer, controller=Planned(setup.plans[row]), config=setup.growth, epochs=HORIZON)
        self.grower.begin()
        assert len(list(self.grower.lifecycles.occupied())) == len(setup.plans[row])
        order = shuffled_order(len(setup.tensors), seed=row, epoch=0)
        count = setup.steps_alone * setup.batch
        self.index = order.repeat(-(-count // len(order)))[:count].view(-1, setup.batch).to(setup.device)

    def step(self, number: int) -> None:
        index = self.index[number]
        is_half = self.setup.precision == "bfloat16"
        with torch.autocast(self.setup.device.type, dtype=torch.bfloat16) if is_half else nullcontext():
            outputs = self.slotted(self.setup.tensors.inputs[index])
            loss = self.setup.task.loss_fn(outputs, self.setup.tensors.targets[index])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.grower.after_step(loss)


class Sequential:
    def __init__(self, setup: Setup) -> None:
        self.hosts, self.steps = [Alone(setup, row) for row in range(setup.hosts)], setup.steps_alone

    def turn(self) -> None:
        for host in self.hosts:
            for number in range(self.steps):
                host.step(number)


class Streams(Sequential):
    """A step of every host, each in its own stream, so that the device may run them side by side."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.streams = [torch.cuda.Stream(setup.device) for _ in self.hosts]
        torch.cuda.synchronize(setup.device)

    def turn(self) -> None:
        for number in range(self.steps):
            for host, stream in zip(self.hosts, self.streams, strict=True):
                with torch.cuda.stream(stream):
                    host.step(number)


class Together:
    def __init__(self, setup: Setup) -> None:
        self.steps = setup.steps
        config = FleetConfig(
            batch_size=setup.batch,
            steps_per_decision=setup.steps,
            validation_samples=setup.batch,
            precision=setup.precision,
            schedule="none",
        )
        self.fleet = Fleet(
            setup.task, setup.make_host, hosts=setup.hosts, growth=setup.growth, config=config, device=setup.device, tensors=setup.tensors
        )
        setting = partial(HostConfig, horizon=HORIZON, learning_rate=setup.learning_rate)
        self.fleet.reset({row: setting(seed=row) for row in range(setup.hosts)})
        self.fleet.decide({row: Planned(plan).decide(self.fleet.state(row)) for row, plan in enumerate(setup.plans)})
        assert [len(list(host.lifecycles.occupied())) for host in self.fleet.rows] == list(map(len, setup.plans))

    def turn(self) -> None:
        fleet = self.fleet
        plan = fleet.plan(fleet.training())
        batches = fleet.data.batches(fleet.steps_per_decision, fleet.config.batch_size, rows=plan.rows)
        fleet.segment(plan).run(batches)


# What is measured


@dataclass
class Measured:
    way: Way
    state: int | None  # bytes
    threads: int
    seconds: list[float] = field(default_factory=list)
    beyond: int | None = None  # bytes at the peak of a turn beyond what was there before it


def measure(ways: dict[str, Callable[[], Way]], *, repeats: int, num_threads: int, device: torch.device) -> dict[str, Measured]:
    """The ways take turns; the first turns of each, by which the number of threads is chosen, are not counted."""
    memory = CudaMemory(device) if device.type == "cuda" else ResidentMemory()
    found: dict[str, Measured] = {}
    for name, make in ways.items():
        before = memory.now()
        way = make()
        after = memory.now()
        state = None if before is None or after is None else max(after - before, 0)
        counts = [num_threads] if device.type == "cuda" else sorted({1, num_threads})
        found[name] = Measured(way, state, min(counts, key=lambda count: _seconds(way, count, device)))
    for _ in range(repeats):
        for one in found.values():
            before = memory.begin()
            one.seconds.append(_seconds(one.way, one.threads, device))
            peak = memory.peak()
            if before is not None and peak is not None:
                one.beyond = max(peak - before, one.beyond or 0)
    return found


def _seconds(way: Way, num_threads: int, device: torch.device) -> float:
    with threads(num_threads):
        start = now(device)
        way.turn()
        return now(device) - start


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> int | None:
        return torch.cuda.memory_allocated(self.device)

    def begin(self) -> int | None:
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.now()

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device)


class ResidentMemory:
    """Of this process, where the system is Linux; else nobody knows."""

    def __init__(self) -> None:
        self._status, self._reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def now(self) -> int | None:
        return self._read("VmRSS")

    def begin(self) -> int | None:
        if self._reset.exists():
            self._reset.write_text("5")  # the peak begins anew
        return self.now()

    def peak(self) -> int | None:
        return self._read("VmHWM")

    def _read(self, name: str) -> int | None:
        found = re.search(rf"{name}:\s+(\d+) kB", self._status.read_text()) if self._status.exists() else None
        return None if found is None else int(found[1]) * 1024


def compiles() -> int:
    """Graphs that torch has compiled so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def records(setup: Setup, seeds: str, *, repeats: int, num_threads: int) -> list[Record]:
    ways: dict[str, Callable[[], Way]] = {"sequential": partial(Sequential, setup)}
    if setup.device.type == "cuda":
        ways["streams"] = partial(Streams, setup)
    ways["fleet"] = partial(Together, setup)
    before = compiles()
    found = measure(ways, repeats=repeats, num_threads=num_threads, device=setup.device)
    samples = setup.hosts * setup.batch
    speeds = {name: samples * one.way.steps / statistics.median(one.seconds) for name, one in found.items()}
    return [
        {
            "seeds": seeds,
            "way": name,
            "samples_per_s": speed,
            "ratio_to_sequential": speed / speeds["sequential"],
            "ratio_to_streams": speed / speeds["streams"] if "streams" in speeds else None,
            "peak_memory": _sum(found[name].state, found[name].beyond),
            "compiles": compiles() - before,
            "kernels": compiled_kernels(),
            "threads": found[name].threads,
            "seconds": found[name].seconds,
        }
        for name, speed in speeds.items()
    ]


def _sum(state: int | None, beyond: int | None) -> int | None:
    return None if state is None or beyond is None else state + beyond


# What is asked for


def plans(seeds: str, hosts: int, options: Mapping[str, Sequence[str]]) -> list[Plan]:
    """What grows in every host: slots and the blueprints that fit them in turn, so that every slot has all of them."""
    slots = list(options)

    def seed(host: int, number: int) -> tuple[int, str, str]:
        blueprints = options[slots[number]]
        return 0, slots[number], blueprints[(host // len(slots) + number) % len(blueprints)]

    if seeds == "none":
        return [[] for _ in range(hosts)]
    if seeds == "one per host":
        return [[seed(host, host % len(slots))] for host in range(hosts)]
    return [[seed(host, number) for number in range(len(slots))] for host in range(hosts)]


def synthetic_task(
    shape: tuple[int, ...], batch: int, num_classes: int = 10, *, train: int | None = None, validation: int | None = None
) -> Task:
    """Noise, with so many samples, or as many as it needs for a few batches that differ."""

    def split(count: int, seed: int) -> Split:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, *shape, generator=generator)
        return Split(inputs, torch.randint(num_classes, (count,), generator=generator))

    def host_of(channels: tuple[int, ...]) -> nn.Module:
        return ConvHost(shape[0], num_classes, channels, pool=[True] * len(channels), spatial=len(shape) - 1)

    name = f"noise of {'x'.join(map(str, shape))}"
    parts = split(train or 8 * batch, 0), split(validation or batch, 1), split(batch, 2)
    return Task(name, name, "drawn", num_classes, *parts, hosts={}, batch_size=batch, host_of=host_of)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--hosts", type=int, nargs="+", default=[32], help="how many, each measured")
    parser.add_argument("--batch", type=int, default=64, help="samples of each host in a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--shape", help="of one sample, such as 3x32x32, for noise instead of a task")
    parser.add_argument("--channels", default="4-8-16", help="of the hosts' blocks")
    parser.add_argument("--precision", choices=["float32", "bfloat16", "float64"], default="float32")
    parser.add_argument("--blueprints", nargs="+", default=list(BLUEPRINTS), help="such as conv3x3 or widen_50, each where it fits")
    parser.add_argument("--seeds", nargs="+", choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=20, help="of every host in a turn")
    parser.add_argument("--steps-alone", type=int, help="the same for hosts that train alone, where their turns would be long")
    parser.add_argument("--samples", type=int, help="of noise; 8 batches unless given")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--output", type=Path, help="also written to this file")
    options = parser.parse_args(arguments)
    write = Output(options.output).write if options.output else _printed(metadata())
    for hosts in options.hosts:
        measure_all(argparse.Namespace(**{**vars(options), "hosts": hosts}), find_device(options.device), write)


def measure_all(options: argparse.Namespace, device: torch.device, write: Callable[[Record], None]) -> None:
    if options.shape:
        task = synthetic_task(tuple(map(int, options.shape.split("x"))), options.batch, train=options.samples)
    else:
        task = load_task(options.task, data_dir=options.data_dir)
    dtype = torch.float64 if options.precision == "float64" else torch.float32
    tensors = TaskTensors.of(task, device=device, dtype=dtype)
    model = task.make_host(options.channels, seed=0)
    slotted = add_slots(model, task.train.inputs[:2])
    fitting = {name: [blueprint.name for blueprint in blueprints_for(slotted.place(name), options.blueprints)] for name in slotted.slots}
    about = {
        "hosts": options.hosts,
        "batch": options.batch,
        "host": options.channels,
        "task": task.name,
        "precision": options.precision,
        "steps": options.steps,
        "steps_alone": options.steps_alone or options.steps,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else metadata()["processor"],
        "torch": torch.__version__,
    }
    for seeds in options.seeds:
        grown = plans(seeds, options.hosts, {name: blueprints for name, blueprints in fitting.items() if blueprints})
        setup = Setup(
            task=task,
            tensors=tensors,
            device=device,
            hosts=options.hosts,
            batch=options.batch,
            steps=options.steps,
            steps_alone=options.steps_alone or options.steps,
            channels=options.channels,
            precision=options.precision,
            plans=grown,
        )
        for record in records(setup, seeds, repeats=options.repeats, num_threads=options.threads):
            if (seeds, record["way"]) == ("none", "fleet") and isinstance(model, ConvHost):
                speed = record["samples_per_s"]
                shape = task.train.inputs.shape[1:]
                record |= floor(model, shape, precision=options.precision, samples_per_s=speed, device=device)
            write({**record, **about})


def _printed(first: Record) -> Callable[[Record], None]:
    def write(record: Record) -> None:
        print(json.dumps(record), flush=True)

    write(first)
    return write


if __name__ == "__main__":
    main()
