"""The right size without a sweep: a small host that grows, beside static nets of many sizes, with the whole cost of each.

    python benchmarks/growth/right_size.py --task digits
    python benchmarks/growth/right_size.py --task digits-1d
    python benchmarks/growth/right_size.py --task text
    python benchmarks/growth/right_size.py --task cifar10 --data-dir DIR --device cuda --jobs 12 --without longer

On a GPU, processes share it well only under NVIDIA's multi-process service (nvidia-cuda-mps-control -d).

Arms, paired over seeds (same data, same order of batches):

    grown       the smallest host, which grows in width and depth as the heuristic decides
    never       the same host, which never grows
    longer      the same host, trained for so many epochs that it costs at least the FLOPs of the grown run
    final       the architecture that the grown run ended with, from scratch, for as many epochs as the FLOPs of the grown run allow
    x1, x2 ...  static nets with this many times the parameters of the smallest host
    grid        of these, the best one by validation, at the cost of all
    halving     successive halving over these sizes, with the FLOPs of the grown run for all of its runs together

Every arm keeps the state with the lowest validation loss, or with `--best-by accuracy` that with the highest validation accuracy. Sizes are
chosen by the same figure. The test part is used once, for that state. FLOPs are those of training and
validation, with probes, measurements and pruned seeds. Static nets are trained by a plain loop, without any code of growth; the learning
rate follows a cosine to 0 over the epochs of the run. `digits` has a new split into training, validation and test part for every seed.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from esper.growth import GrowthConfig, add_slots, grow
from esper.growth.config import BudgetConfig, GovernorConfig
from esper.growth.seeds.seed import Seed
from esper.tasks import GPTHost, Split, Task, load_task
from esper.tasks.images import stratified_parts

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import difference, mean, print_table, run_all, seeds_of, shown
from benchmarks.records import RESULTS, Output, Record

Size = tuple[int, ...]  # channels of the blocks of a conv net; width, layers and heads of a GPT


@dataclass(frozen=True)
class Work:
    """One task: its sizes, and how its nets are trained."""

    sizes: dict[int, Size]  # times the parameters of the smallest, about -> size
    epochs: int
    seeds: int
    learning_rate: float
    samples: int | None = None  # of the training part that are used; None: all


def _conv_sizes(widths: dict[int, int]) -> dict[int, Size]:
    """Return the sizes of nets with these widths of the first block; the second is twice as wide, the third four times."""
    return {times: (width, 2 * width, 4 * width) for times, width in widths.items()}


WORKS = {
    "digits": Work(_conv_sizes({1: 4, 2: 6, 4: 8, 8: 12, 16: 16, 32: 24, 64: 32, 128: 48}), 40, 40, 0.01),
    "digits-1d": Work(_conv_sizes({1: 2, 2: 3, 4: 4, 8: 7, 16: 10, 32: 14, 64: 20, 128: 28, 256: 40, 512: 56}), 40, 12, 0.01),
    "cifar10": Work(_conv_sizes({1: 8, 2: 12, 4: 16, 8: 24, 16: 32, 32: 48, 64: 64, 128: 90, 256: 128, 512: 184, 1024: 256}), 20, 12, 0.01),
    "text": Work(
        {1: (32, 2, 2), 2: (48, 2, 3), 4: (64, 3, 4), 8: (96, 3, 6), 16: (128, 4, 8), 32: (192, 4, 12)}, 20, 8, 0.003, samples=4_000
    ),
}


OF_FIRST_RUNS: Record = {"best_by": "loss", "precision": "float32"}  # settings that the records of the first runs do not name


@dataclass(frozen=True)
class Setting:
    """The settings that all runs of a comparison share."""

    task: str
    work: Work
    data_dir: Path | None = None
    device: str = "cpu"
    best_by: str = "loss"  # or accuracy
    precision: Literal["float32", "bfloat16"] = "float32"  # of forward passes; the weights are always float32

    def rank(self, val_loss: float, val_accuracy: float) -> tuple[float, ...]:
        """Return a rank of a state by its validation figures, the lower the better."""
        return (-val_accuracy, val_loss) if self.best_by == "accuracy" else (val_loss,)

    def load(self, seed: int) -> Task:
        """Return the task of a seed."""
        task = _loaded(self.task, self.data_dir)
        if self.work.samples is not None:
            part = slice(self.work.samples)
            task = replace(task, train=Split(task.train.inputs[part], task.train.targets[part]))
        return _split_again(task, seed) if self.task == "digits" else task

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(torch.device(self.device).type, getattr(torch, self.precision), enabled=self.precision != "float32")

    def placed(self, net: nn.Module) -> nn.Module:
        """Put a net on the device, in the memory format in which it computes convolutions fastest."""
        return net.to(self.device) if self.device == "cpu" else net.to(self.device, memory_format=torch.channels_last)

    def make(self, task: Task, size: Size, seed: int) -> nn.Module:
        if self.task != "text":
            return task.make_host("-".join(map(str, size)), seed=seed)
        width, layers, heads = size
        length = task.train.inputs.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return GPTHost(task.num_classes, sequence_length=length, width=width, layers=layers, heads=heads)

    @property
    def about(self) -> Record:
        work = {"epochs_planned": self.work.epochs, "learning_rate": self.work.learning_rate, "samples": self.work.samples}
        return {"task": self.task, "device": self.device, **work, "best_by": self.best_by, "precision": self.precision}


@cache
def _loaded(name: str, data_dir: Path | None) -> Task:
    return load_task(name, data_dir=data_dir)


def _split_again(task: Task, seed: int) -> Task:
    """Return the task with its samples divided anew, into parts of the same sizes."""
    parts = [task.train, task.validation, task.test]
    inputs, targets = (torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "targets"))
    indices = [torch.from_numpy(part) for part in stratified_parts(targets.numpy(), [len(part) for part in parts], seed=seed)]
    train, validation, test = (Split(inputs[index], targets[index]) for index in indices)
    return replace(task, train=train, validation=validation, test=test)


# Static nets


class StaticRun:
    """The training of a net whose size does not change. It can be continued, and keeps its best validation state."""

    def __init__(self, setting: Setting, task: Task, net: nn.Module, *, seed: int, epochs: int) -> None:
        self.setting, self.task = setting, task
        self.flops = add_slots(copy.deepcopy(net).cpu(), task.example_input).discovery.host.flops  # of a forward pass of one sample
        self.net = setting.placed(net)
        self.optimizer = AdamW(self.net.parameters(), lr=setting.work.learning_rate)
        self.scheduler: LRScheduler = CosineAnnealingLR(self.optimizer, T_max=epochs)
        self.batches = task.train_loader(seed=seed, device=setting.device)
        self.epochs, self.best_epoch = 0, 0
        self.val_loss, self.val_accuracy = math.inf, 0.0  # of the best state
        self.best_state: dict[str, torch.Tensor] = {}

    @property
    def rank(self) -> tuple[float, ...]:
        return self.setting.rank(self.val_loss, self.val_accuracy)

    @property
    def flops_per_epoch(self) -> int:
        return self.flops * (3 * len(self.task.train) + len(self.task.validation))

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            self.net.train()
            for inputs, targets in self.batches:
                self.optimizer.zero_grad()
                with self.setting.autocast():
                    loss = self.task.loss_fn(self.net(inputs), targets)
                loss.backward()
                self.optimizer.step()
            self.scheduler.step()
            self.epochs += 1
            with self.setting.autocast():
                found = self.task.evaluate(self.net, self.task.val_loader(device=self.setting.device))
            if math.isfinite(found.loss) and self.setting.rank(found.loss, found.accuracy) < self.rank:
                self.val_loss, self.val_accuracy, self.best_epoch = found.loss, found.accuracy, self.epochs
                self.best_state = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

    def result(self) -> Record:
        """Test the best state. Call it once, at the end."""
        self.net.load_state_dict(self.best_state)
        return {
            **_scores(self.setting, self.task, self.net),
            "val_loss": self.val_loss,
            "val_accuracy": 100 * self.val_accuracy,
            "best_epoch": self.best_epoch,
            "epochs": self.epochs,
            "parameters": _size(self.net),
            "gflops": self.epochs * self.flops_per_epoch / 1e9,
        }


def _scores(setting: Setting, task: Task, net: nn.Module) -> Record:
    with setting.autocast():
        found = task.evaluate(net, task.test_loader(device=setting.device))
    return {"test_accuracy": 100 * found.accuracy, "test_loss": found.loss}


def _size(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def static(setting: Setting, task: Task, net: nn.Module, *, seed: int, epochs: int) -> Record:
    run = StaticRun(setting, task, net, seed=seed, epochs=epochs)
    run.train(epochs)
    return run.result()


def halving(setting: Setting, task: Task, seed: int, budget: float) -> Record:
    """Train all sizes, go on with the better half by validation, and so on until one is left. All runs together cost `budget` GFLOPs.

    A rung ends after half as many epochs as the next one. Whenever nets are dropped, the rungs that follow are planned anew with the FLOPs
    that are left, for the case that the largest nets survive. The learning rate follows a cosine over the epochs of the present plan.
    """
    nets = {times: setting.make(task, size, seed) for times, size in setting.work.sizes.items()}
    runs = {times: StaticRun(setting, task, net, seed=seed, epochs=1) for times, net in nets.items()}
    counts = [len(runs)]  # nets in every rung
    while counts[-1] > 1:
        counts.append(math.ceil(counts[-1] / 2))
    ends = [0.5**rung for rung in reversed(range(len(counts)))]  # of the rungs, relative to the last: 1/8, 1/4, 1/2, 1 for eight sizes
    longest, alive = 1, dict(runs)  # epochs at the end of the last rung, and the nets that are left

    def rate(epoch: int) -> float:
        return (1 + math.cos(math.pi * min(epoch / longest, 1.0))) / 2

    for run in runs.values():
        run.scheduler = LambdaLR(run.optimizer, rate)
    for rung, count in enumerate(counts):
        alive = dict(sorted(alive.items(), key=lambda item: item[1].rank)[:count])
        done = next(iter(alive.values())).epochs
        costs = sorted((run.flops_per_epoch / 1e9 for run in alive.values()), reverse=True)
        left = budget - sum(run.epochs * run.flops_per_epoch / 1e9 for run in runs.values())
        # The cost of this rung and those after it, per epoch of `longest`, if the nets had to begin again.
        shares = [end - start for start, end in pairwise([0.0, *ends[rung:]])]
        cost = sum(share * sum(costs[:count]) for share, count in zip(shares, counts[rung:], strict=True))
        longest = max(int((left + done * sum(costs)) / cost), 1)
        for run in alive.values():
            run.optimizer.param_groups[0]["lr"] = setting.work.learning_rate * rate(done)
            run.train(max(round(ends[rung] * longest) - done, 1))
    (times, winner), spent = next(iter(alive.items())), sum(run.epochs * run.flops_per_epoch for run in runs.values())
    return {**winner.result(), "gflops": spent / 1e9, "times": times, "sizes": list(setting.work.sizes)}


# The grown net


def grown(setting: Setting, task: Task, net: nn.Module, *, seed: int) -> tuple[nn.Module, Record]:
    """Return the grown net, folded, and the record of its run."""
    work = setting.work
    governor = GovernorConfig(uninformed_loss=task.uninformed_loss)
    result = grow(
        setting.placed(net),
        task.train_loader(seed=seed, device=setting.device),
        task.val_loader(device=setting.device),
        loss_fn=task.loss_fn,
        epochs=work.epochs,
        optimizer=partial(AdamW, lr=work.learning_rate),
        scheduler=partial(CosineAnnealingLR, T_max=work.epochs),
        config=GrowthConfig(seed=seed, governor=governor, budget=BudgetConfig(max_parameters=None, max_flops=None)),
        precision=setting.precision,
        metrics={"accuracy": task.accuracy},
        best_by="accuracy" if setting.best_by == "accuracy" else None,
    )
    record = {
        **_scores(setting, task, result.model),
        "val_loss": result.val_loss,
        "val_accuracy": 100 * result.metrics["accuracy"],
        "best_epoch": result.best_epoch or result.epochs,
        "epochs": result.epochs,
        "parameters": _size(result.model),
        "gflops": result.gflops,
        "seeds": seeds_of(result.ledger),
    }
    return result.model, record


def from_scratch(grown: nn.Module, start: nn.Module, task: Task, *, seed: int) -> nn.Module:
    """Return a net of the grown architecture with the weights of a new one: layers as their classes draw them, seeds as the identity."""
    net = copy.deepcopy(grown).cpu()
    places = add_slots(copy.deepcopy(start).cpu(), task.example_input).discovery.places
    by_shape = {(place.kind, place.shape): place for place in places.values()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in net.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        if isinstance(net, GPTHost):
            net._initialise()
    for number, module in enumerate(net.modules()):
        if isinstance(module, Seed):
            spec = module.spec
            fresh = Seed(by_shape[spec.kind, spec.shape], spec.blueprint, random_seed=seed + number, blending=spec.blending)
            module.branch.load_state_dict(fresh.branch.state_dict())
    return net


# Runs


def run_growing(setting: Setting, *, seed: int, without: tuple[str, ...]) -> list[Record]:
    """The arms whose cost follows from the grown run, but for those in `without`."""
    _prepare(setting)
    task, work = setting.load(seed), setting.work
    make = partial(setting.make, task, work.sizes[1], seed)
    began = _now(setting)
    net, of_grown = grown(setting, task, make(), seed=seed)
    of_grown["seconds"] = _now(setting) - began
    budget = of_grown["gflops"]

    def epochs_for(net: nn.Module, rounded: Callable[[float], int]) -> int:
        an_epoch = StaticRun(setting, task, net, seed=seed, epochs=1).flops_per_epoch / 1e9
        return max(rounded(budget / an_epoch), 1)

    arms = {"grown": of_grown}
    if "longer" not in without:
        arms["longer"] = static(setting, task, make(), seed=seed, epochs=epochs_for(make(), math.ceil))
    if "final" not in without:
        final = from_scratch(net, make(), task, seed=seed)
        arms["final"] = static(setting, task, final, seed=seed, epochs=epochs_for(final, math.floor))
    if "halving" not in without:
        arms["halving"] = halving(setting, task, seed, budget)
    return [{"arm": arm, "seed": seed, **setting.about, **record} for arm, record in arms.items()]


def run_halving(setting: Setting, *, seed: int, budget: float) -> list[Record]:
    """Successive halving alone, for a grown run of `budget` GFLOPs that was made with another grid."""
    _prepare(setting)
    return [{"arm": "halving", "seed": seed, **setting.about, **halving(setting, setting.load(seed), seed, budget)}]


def run_static(setting: Setting, times: int, *, seed: int) -> list[Record]:
    _prepare(setting)
    task, began = setting.load(seed), _now(setting)
    record = static(setting, task, setting.make(task, setting.work.sizes[times], seed), seed=seed, epochs=setting.work.epochs)
    return [{"arm": f"x{times}", "seed": seed, **setting.about, **record, "seconds": _now(setting) - began}]


def _prepare(setting: Setting) -> None:
    """Let a GPU choose the fastest way to compute each convolution."""
    torch.backends.cudnn.benchmark = setting.device != "cpu"


def _now(setting: Setting) -> float:
    """Return seconds of the processor, which other processes do not change; on another device, those of the clock."""
    return time.process_time() if setting.device == "cpu" else time.perf_counter()


# Comparing


def best_of_grid(setting: Setting, runs: list[Record]) -> Record:
    """Return the run of one seed that is best by validation, at the cost of all."""
    # Older runs that were chosen by loss have no accuracy in their records.
    best = min(runs, key=lambda run: setting.rank(run["val_loss"], run["val_accuracy"] if setting.best_by == "accuracy" else 0.0))
    return {**best, "gflops": sum(run["gflops"] for run in runs)}


def summary(setting: Setting, runs: list[Record]) -> Record:
    by_arm: dict[str, list[Record]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        by_arm.setdefault(run["arm"], []).append(run)
    sizes = [f"x{times}" for times in setting.work.sizes]
    by_arm["grid"] = [best_of_grid(setting, list(of_seed)) for of_seed in zip(*(by_arm[size] for size in sizes), strict=True)]
    by_arm["never"] = by_arm["x1"]
    ours = by_arm["grown"]
    rows: dict[str, Record] = {}
    for arm in [arm for arm in ("grown", "never", "longer", "final", "halving", "grid", *sizes) if arm in by_arm]:
        of_arm = by_arm[arm]
        rows[arm] = {
            "runs": len(of_arm),
            **{name: mean(of_arm, name) for name in ("test_accuracy", "test_loss", "val_loss", "parameters", "gflops", "epochs")},
            "grown_points_ahead": difference(ours, of_arm, "test_accuracy"),
            "grown_nats_ahead": difference(of_arm, ours, "test_loss"),
            "grown_flops_share": fmean(one["gflops"] / other["gflops"] for one, other in zip(ours, of_arm, strict=True)),
        }
    rows["grid"]["chosen"] = {size: sum(run["arm"] == size for run in by_arm["grid"]) for size in sizes}
    return {"what": "summary", **setting.about, "rows": rows}


def show(record: Record) -> None:
    rows = [("", "test accuracy", "test loss", "parameters", "GFLOPs", "grown ahead, points", "grown ahead, nats", "FLOPs of grown / this")]
    for name, about in record["rows"].items():
        rows.append(
            (
                name,
                f"{about['test_accuracy']:.2f} %",
                f"{about['test_loss']:.4f}",
                f"{about['parameters']:,.0f}",
                f"{about['gflops']:,.1f}",
                "" if name == "grown" else shown(about["grown_points_ahead"]),
                "" if name == "grown" else shown(about["grown_nats_ahead"], 4),
                f"{about['grown_flops_share']:.2f}",
            )
        )
    print_table(rows)
    print("the grid's best by validation:", ", ".join(f"{size}: {count}" for size, count in record["rows"]["grid"]["chosen"].items()))


def draw(record: Record, path: Path) -> None:
    """Draw test accuracy over parameters: the static sizes as a curve, the other arms as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    rows = record["rows"]
    sizes = [row for name, row in rows.items() if name.startswith("x")]
    axes.plot([row["parameters"] for row in sizes], [row["test_accuracy"] for row in sizes], "o-", color="0.5", label="static sizes")
    for name, marker in (("grown", "*"), ("longer", "s"), ("final", "D"), ("halving", "^"), ("grid", "P")):
        if name in rows:
            row = rows[name]
            label = f"{name}, {row['gflops']:,.0f} GFLOPs"
            axes.plot(row["parameters"], row["test_accuracy"], marker, markersize=13 if name == "grown" else 8, label=label)
    axes.set(
        xscale="log", xlabel="parameters", ylabel="test accuracy, %", title=f"{record['task']}, means of {rows['grown']['runs']} seeds"
    )
    axes.legend(frameon=False)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(WORKS), default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, help="how many, from 0 on; default: a number for the task")
    parser.add_argument("--epochs", type=int, help="default: a number for the task")
    parser.add_argument("--sizes", help="of the grid, as multiples of the smallest host's parameters, separated by commas; default: all")
    parser.add_argument(
        "--best-by", choices=["loss", "accuracy"], default="loss", help="validation figure by which states and sizes are chosen"
    )
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="of forward passes, by autocast")
    parser.add_argument("--without", nargs="*", choices=["longer", "final", "halving"], default=[], help="arms that are left out")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are in the file already, instead of adding to them")
    parser.add_argument("--out", type=Path, default=RESULTS / "right_size.jsonl")
    parser.add_argument("--picture", type=Path, help="file for a picture of accuracy over parameters, such as sizes.svg")
    options = parser.parse_args(arguments)
    work = WORKS[options.task]
    sizes = work.sizes if options.sizes is None else {int(times): work.sizes[int(times)] for times in options.sizes.split(",")}
    work = replace(work, sizes=sizes, epochs=options.epochs or work.epochs, seeds=options.seeds or work.seeds)
    setting = Setting(options.task, work, options.data_dir, options.device, options.best_by, options.precision)
    output = Output(options.out, resume=not options.fresh)
    about = setting.about.items()
    arms = {"grown", *(f"x{times}" for times in sizes)}
    earlier = [{**OF_FIRST_RUNS, **run} for run in output.earlier if "seed" in run and run["seed"] < work.seeds]
    earlier = [run for run in earlier if about <= run.items()]
    runs = [run for run in earlier if run["arm"] in arms | {"longer", "final"} or run.get("sizes") == list(sizes)]
    have = {(run["arm"], run["seed"]) for run in runs}
    # The longest runs first, so that no worker ends long after the others.
    by_arm = {"grown": partial(run_growing, setting, without=tuple(options.without))}
    by_arm |= {f"x{times}": partial(run_static, setting, times) for times in reversed(sizes)}
    budgets = {run["seed"]: run["gflops"] for run in runs if run["arm"] == "grown" and ("halving", run["seed"]) not in have}
    jobs = [partial(run_halving, setting, seed=seed, budget=budget) for seed, budget in budgets.items() if "halving" not in options.without]
    jobs += [partial(job, seed=seed) for arm, job in by_arm.items() for seed in range(work.seeds) if (arm, seed) not in have]
    runs += run_all(jobs, processes=options.jobs, output=output)
    record = summary(setting, runs)
    output.write(record)
    show(record)
    if options.picture is not None:
        draw(record, options.picture)


if __name__ == "__main__":
    main()
