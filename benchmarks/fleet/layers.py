"""How fast N hosts are as one program, and how best to convolve them: milliseconds of one training step, the fastest of many.

    python benchmarks/fleet/layers.py                      # two threads
    python benchmarks/fleet/layers.py --device cuda

First single 3-wide convolutions, forward and backward, in five ways: the two of esper.fleet.stacked.convolutions, `grouped` and `unfolded`,
and three that it does not have because they are slower at most sizes: `channels_last` (grouped), `rows` (torch's unfold, samples outermost,
and a batched product) and `dense` (the convolution written out as one matrix for each host, and a batched product). Then whole hosts of
the tasks: a step of all of them, by AdamW with clipping, as a fleet by either way, and one host after another. `times_alone` is how many
times as fast the chosen way is. Ways are measured in turns, so that other work on the machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.fleet.optimizers import AdamW, clip_rows_
from esper.fleet.stacked.layers import Convolution
from esper.fleet.stacked.lowering import lower
from esper.fleet.stacked.rows import ModuleRows
from esper.tasks.hosts import ConvHost

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import RESULTS, Output, Record

Step = Callable[[], None]


class Layer(NamedTuple):
    """A convolution of a host, in and out channels, and the size of what it sees."""

    inputs: int
    outputs: int
    size: tuple[int, ...]
    samples: int


class Hosts(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int


LAYERS = [
    Layer(1, 4, (8, 8), 64),
    Layer(4, 8, (4, 4), 64),
    Layer(8, 16, (2, 2), 64),
    Layer(1, 2, (40,), 100),
    Layer(2, 4, (20,), 100),
    Layer(4, 8, (10,), 100),
    Layer(16, 32, (4, 4), 64),
]
HOSTS = {
    "digits 4-8-16": Hosts(partial(ConvHost, 1, 10, (4, 8, 16)), (1, 8, 8), 64),
    "digits-1d 2-4-8": Hosts(partial(ConvHost, 1, 10, (2, 4, 8), pool=(True, True, True), spatial=1), (1, 40), 100),
    "digits 16-32-64": Hosts(partial(ConvHost, 1, 10, (16, 32, 64)), (1, 8, 8), 64),
    "digits-1d 16-32-64": Hosts(partial(ConvHost, 1, 10, (16, 32, 64), pool=(True, True, True), spatial=1), (1, 40), 100),
}


def convolve(x: Tensor, weight: Tensor, *, groups: int = 1) -> Tensor:
    return (F.conv1d if x.ndim == 3 else F.conv2d)(x, weight, padding=1, groups=groups)


def layer_steps(layer: Layer, hosts: int, device: str) -> dict[str, Step]:
    """One pass forward and backward in every way. The first layer of a host needs no gradient of its input."""
    spatial = len(layer.size)
    module = (nn.Conv1d if spatial == 1 else nn.Conv2d)(layer.inputs, layer.outputs, 3, padding=1, bias=False)
    weight = torch.randn(hosts, *module.weight.shape, device=device, requires_grad=True)
    x = torch.randn(layer.samples, hosts, layer.inputs, *layer.size, device=device)
    innermost = x.movedim(0, -1).contiguous().movedim(-1, 0)
    last = x.flatten(1, 2).contiguous(memory_format=torch.channels_last) if spatial == 2 else x.flatten(1, 2)
    given = [tensor.requires_grad_(layer.inputs > 1) for tensor in (x, innermost, last)]
    grouped, unfolded = (lower(module, convolution=way) for way in ("grouped", "unfolded"))
    taps = _taps(layer.size).to(device)
    ways: dict[str, Callable[[], Tensor]] = {
        "grouped": lambda: grouped({"weight": weight}, given[0], training=True),
        "unfolded": lambda: unfolded({"weight": weight}, given[1], training=True),
        "channels_last": lambda: convolve(given[2], weight.flatten(0, 1), groups=hosts),
        "rows": lambda: _rows(given[0], weight),
        "dense": lambda: _dense(given[1], weight, taps),
    }
    if spatial == 1:
        del ways["channels_last"]

    def step(way: Callable[[], Tensor]) -> None:
        outputs = way()
        outputs.backward(torch.ones_like(outputs))

    return {name: partial(step, way) for name, way in ways.items()}


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    images = x.flatten(0, 1) if x.ndim == 5 else x.flatten(0, 1).unsqueeze(-2)
    kernel, padding = ((3, 3), (1, 1)) if x.ndim == 5 else ((1, 3), (0, 1))
    columns = F.unfold(images, kernel, padding=padding).unflatten(0, x.shape[:2])  # [B, N, C·K, S]
    return weight.flatten(2) @ columns


def _taps(size: tuple[int, ...]) -> Tensor:
    """0 or 1: whether an output is reached from an input by a position of the kernel. [K, outputs · inputs]"""
    positions, kernel = torch.Size(size).numel(), 3 ** len(size)
    images = torch.eye(positions).reshape(positions, 1, *size)
    each = torch.eye(kernel).reshape(kernel, 1, *[3] * len(size))
    return convolve(images, each).reshape(positions, kernel, positions).permute(1, 2, 0).flatten(1)


def _dense(x: Tensor, weight: Tensor, taps: Tensor) -> Tensor:
    hosts, outputs, inputs = weight.shape[:3]
    positions = x[0, 0, 0].numel()
    matrix = (weight.reshape(hosts * outputs * inputs, -1) @ taps).view(hosts, outputs, inputs, positions, positions)
    return matrix.transpose(2, 3).reshape(hosts, outputs * positions, -1) @ x.movedim(0, -1).flatten(1, -2)


def host_steps(kind: Hosts, count: int, device: str) -> dict[str, Step]:
    hosts = [kind.make().to(device) for _ in range(count)]
    x = torch.randn(kind.samples, count, *kind.shape, device=device)
    labels = torch.randint(10, (kind.samples, count), device=device)
    fleets: dict[str, Step] = {way: _fleet_step(hosts, x, labels, way) for way in ("grouped", "unfolded")}
    return {**fleets, "alone": _alone_step(hosts, x, labels)}


def _fleet_step(hosts: list[nn.Module], x: Tensor, labels: Tensor, way: Convolution) -> Step:
    rows, stacked = ModuleRows.of(hosts, device=x.device), lower(hosts[0], convolution=way)
    flat = rows.parameters.flat
    optimizer = AdamW(flat, lr=1e-3)

    def step() -> None:
        flat.grad = None
        logits = stacked(rows.tensors(), x, training=True)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        losses.mean(dim=0).sum().backward()
        assert flat.grad is not None
        norms = clip_rows_(flat.grad, 1.0)
        optimizer.step(flat.grad, active=norms.isfinite())

    return step


def _alone_step(hosts: list[nn.Module], x: Tensor, labels: Tensor) -> Step:
    optimizers = [torch.optim.AdamW(host.parameters(), lr=1e-3) for host in hosts]

    def step() -> None:
        for index, (host, optimizer) in enumerate(zip(hosts, optimizers, strict=True)):
            optimizer.zero_grad()
            F.cross_entropy(host(x[:, index]), labels[:, index]).backward()
            nn.utils.clip_grad_norm_(host.parameters(), 1.0)
            optimizer.step()

    return step


def fastest(steps: Mapping[str, Step], *, repeats: int, device: str) -> dict[str, float]:
    """Milliseconds of each, of all its turns the fastest; the first two turns are not counted."""
    found = dict.fromkeys(steps, float("inf"))
    for turn in range(repeats + 2):
        for name, step in steps.items():
            start = _now(device)
            step()
            taken = (_now(device) - start) * 1e3
            found[name] = min(found[name], taken) if turn > 1 else found[name]
    return found


def _now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(counts: list[int], *, repeats: int, device: str) -> Iterator[Record]:
    chosen = "unfolded" if device == "cpu" else "grouped"
    for hosts in counts:
        for layer in LAYERS:
            found = fastest(layer_steps(layer, hosts, device), repeats=repeats, device=device)
            yield {"what": "convolution", **layer._asdict(), "hosts": hosts, "milliseconds": found}
        for name, kind in HOSTS.items():
            found = fastest(host_steps(kind, hosts, device), repeats=repeats, device=device)
            times = found["alone"] / found[chosen]
            yield {"what": name, "samples": kind.samples, "hosts": hosts, "milliseconds": found, "times_alone": times}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet_layers.jsonl")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    output = Output(options.out)
    for record in measure(options.hosts, repeats=options.repeats, device=options.device):
        output.write({**record, "device": options.device, "threads": options.threads})


if __name__ == "__main__":
    main()
