"""How the growth benchmarks train, record and compare: one seed is one host, one data order and one stream for what grows.

A run is `train` (the library's own loop) or a `Loop`, which does the same step by step for those who look inside. The test part is used
once, for the record of a finished run. Comparisons are paired over seeds, with Student's 95 % interval of the mean difference.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from benchmarks.records import Output, Record
from esper.growth import Controller, Grower, GrowthConfig, add_slots, grow
from esper.growth.config import GovernorConfig, LifecycleConfig
from esper.growth.lifecycle.ledger import Ledger
from esper.statistics import student_interval
from esper.tasks import Task, load_task
from esper.text_table import aligned

RECIPES = {"tuned": (0.01, "cosine"), "default": (1e-3, "none")}  # learning rate of AdamW and its schedule


@dataclass(frozen=True)
class Setting:
    """What all runs of a comparison share."""

    task: str = "digits"
    data_dir: Path | None = None
    device: str = "cpu"
    epochs: int = 40
    learning_rate: float = 0.01
    schedule: str = "cosine"  # to 0 over the epochs of the run, or none
    augment: bool = False  # disturb the training images as the task does it

    def load(self) -> Task:
        return _loaded(self.task, self.data_dir)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return AdamW(parameters, lr=self.learning_rate)

    def scheduler(self, epochs: int) -> Callable[[Optimizer], LRScheduler] | None:
        return partial(CosineAnnealingLR, T_max=epochs) if self.schedule == "cosine" else None

    def config(self, seed: int, *, lifecycle: LifecycleConfig | None = None, slots: tuple[str, ...] | None = None) -> GrowthConfig:
        governor = GovernorConfig(uninformed_loss=self.load().uninformed_loss)
        return GrowthConfig(seed=seed, governor=governor, lifecycle=lifecycle or LifecycleConfig(), slots=slots)

    @property
    def about(self) -> Record:
        """In every record: runs of another setting in the same file are none of this one's."""
        recipe = {"learning_rate": self.learning_rate, "schedule": self.schedule}
        return {"task": self.task, "device": self.device, "planned_epochs": self.epochs, **recipe}


@cache
def _loaded(name: str, data_dir: Path | None) -> Task:
    return load_task(name, data_dir=data_dir)


# Options


def add_options(
    parser: argparse.ArgumentParser, *, out: Path, seeds: int | None = 20, epochs: int | None = 40, recipe: bool = True
) -> None:
    """Add the options of all growth benchmarks. Without `recipe`, the benchmark itself sets task, learning rate and schedule."""
    if recipe:
        parser.add_argument("--task", default="digits")
        parser.add_argument("--recipe", choices=list(RECIPES), default="tuned", help="tuned: what suits the host that never grows best")
        parser.add_argument("--learning-rate", type=float, help="of AdamW, instead of the recipe's")
        parser.add_argument("--schedule", choices=["cosine", "none"], help="instead of the recipe's")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=seeds, help="how many, from 0 on")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are in the file already, instead of adding to them")
    parser.add_argument("--out", type=Path, default=out)


def setting_of(options: argparse.Namespace) -> Setting:
    rate, schedule = RECIPES[options.recipe]
    return Setting(
        task=options.task,
        data_dir=options.data_dir,
        device=options.device,
        epochs=options.epochs,
        learning_rate=options.learning_rate or rate,
        schedule=options.schedule or schedule,
    )


# Runs

Job = Callable[[], list[Record]]


def run_all(jobs: Sequence[Job], *, processes: int, output: Output) -> list[Record]:
    """Runs them in worker processes, or here for one process, and writes the records of each as it ends.

    A job that fails does not stop the others: its error is printed, and at the end the first one is raised.
    """
    return [record for records in _answers(jobs, processes) for record in _written(records, output)]


def _answers(jobs: Sequence[Job], processes: int) -> Iterator[list[Record]]:
    if processes == 1:
        torch.set_num_threads(1)
        yield from (job() for job in jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        failed: list[BaseException] = []
        for future in as_completed([pool.submit(job) for job in jobs]):
            if error := future.exception():
                traceback.print_exception(error)
                failed.append(error)
            else:
                yield future.result()
    if failed:
        raise failed[0]


def _written(records: list[Record], output: Output) -> list[Record]:
    for record in records:
        output.write(record)
    return records


def earlier_runs(output: Output, setting: Setting, **about: Any) -> list[Record]:
    """Runs of this setting that are in the file already."""
    wanted = {**setting.about, **about}
    return [record for record in output.earlier if "seed" in record and all(record.get(name) == value for name, value in wanted.items())]


def train(
    setting: Setting,
    host: nn.Module,
    controller: Controller | str,
    *,
    seed: int,
    epochs: int | None = None,
    config: GrowthConfig | None = None,
) -> Record:
    """One run of `grow`, and what came of it. `config` is that of the setting unless given."""
    task, epochs, began = setting.load(), epochs or setting.epochs, _now(setting)
    grown = grow(
        host.to(setting.device),
        task.train_loader(seed=seed, device=setting.device, augment=setting.augment),
        task.val_loader(device=setting.device),
        loss_fn=task.loss_fn,
        epochs=epochs,
        optimizer=setting.optimizer,
        scheduler=setting.scheduler(epochs),
        controller=controller,
        config=config or setting.config(seed),
    )
    return {
        **setting.about,
        "seed": seed,
        "epochs": grown.epochs,
        **_scores(setting, grown.model),
        "val_loss": grown.val_loss,
        "parameters": grown.host.parameters + grown.added.parameters,
        "parameters_added": grown.added.parameters,
        "flops_ratio": 1 + grown.added.flops / grown.host.flops,
        "train_gflops": grown.gflops,
        "seconds": _now(setting) - began,
        "rollbacks": grown.rollbacks,
        "seeds": seeds_of(grown.ledger),
    }


def _now(setting: Setting) -> float:
    """Seconds of the processor, which others that use it do not change; on another device, those of the clock."""
    return time.process_time() if setting.device == "cpu" else time.perf_counter()


def _scores(setting: Setting, model: nn.Module) -> Record:
    task = setting.load()
    found = task.evaluate(model, task.test_loader(device=setting.device))
    return {"test_accuracy": found.accuracy, "test_loss": found.loss}


def seeds_of(ledger: Ledger) -> list[Record]:
    names = ("slot", "blueprint", "born", "outcome", "gain", "parameters")
    return [{name: getattr(entry, name) for name in names} for entry in ledger.seeds]


class Loop:
    """A training loop around a grower that can be looked into after every step and every epoch."""

    def __init__(self, setting: Setting, host: nn.Module, controller: Controller | str, config: GrowthConfig, *, seed: int) -> None:
        self.setting, self.task, self.seed = setting, setting.load(), seed
        self.slotted = add_slots(host.to(setting.device), self.task.example_input.to(setting.device), slots=config.slots)
        self.optimizer = setting.optimizer(host.parameters())
        make_scheduler = setting.scheduler(setting.epochs)
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self.grower = Grower(
            self.slotted, self.optimizer, scheduler=self.scheduler, controller=controller, config=config, epochs=setting.epochs
        )
        self.batches = self.task.train_loader(seed=seed, device=setting.device)
        self._validation = self.task.val_loader(device=setting.device)

    def run_epoch(self, before_step: Callable[[int], None] = lambda step: None, after_step: Callable[[], None] = lambda: None) -> None:
        """`before_step` is told how many steps of the epoch are over."""
        self.grower.begin()
        self.slotted.train()
        for step, (inputs, targets) in enumerate(self.batches):
            before_step(step)
            self._step(inputs, targets)
            after_step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.grower.after_epoch(self._losses)

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        def loss_of_batch() -> Tensor:
            return self.task.loss_fn(self.slotted(inputs), targets)

        loss = loss_of_batch()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.grower.after_step(loss, closure=loss_of_batch, samples=len(inputs))

    def _losses(self) -> list[Tensor]:
        self.slotted.eval()
        with torch.no_grad():
            losses = [self.task.loss_fn(self.slotted(inputs), targets) for inputs, targets in self._validation]
        self.grower.count_evaluation(self._validation.num_samples)
        return losses

    def finish(self) -> Record:
        """Takes out what has not earned its place, as `grow` does, and tests what is left."""
        for name in self.grower.lifecycles.living():
            self.grower.lifecycles.prune(name, "the training is over and it has not earned its place")
        history, added = self.grower.history, self.grower.lifecycles.added()
        model = self.grower.bake()
        return {
            **self.setting.about,
            "seed": self.seed,
            "epochs": self.grower.epoch,
            **_scores(self.setting, model),
            "val_loss": history.val_losses[-1],
            "parameters": self.slotted.discovery.host.parameters + added.parameters,
            "train_gflops": history.flops / 1e9,
            "rollbacks": self.grower.rollbacks,
            "seeds": seeds_of(self.grower.ledger),
        }


# Comparing


def mean(runs: Sequence[Record], name: str) -> float:
    return fmean(run[name] for run in runs)


def difference(ours: Sequence[Record], theirs: Sequence[Record], name: str, *, scale: float = 1.0) -> Record | None:
    """Of `ours` less `theirs` over the seeds that both have; None where one seed leaves no interval."""
    by_seed = {run["seed"]: run[name] for run in theirs}
    pairs = [(run[name] - by_seed[run["seed"]]) * scale for run in ours if run["seed"] in by_seed]
    return {**asdict(student_interval(pairs)), "pairs": len(pairs)} if len(pairs) > 1 else None


def compared(ours: Sequence[Record], theirs: Sequence[Record]) -> Record:
    """Means of some runs, and their difference to those of others; accuracies in points."""
    return {
        "runs": len(ours),
        "test_accuracy": 100 * mean(ours, "test_accuracy"),
        **{name: mean(ours, name) for name in ("test_loss", "val_loss", "parameters", "train_gflops", "epochs")},
        "accuracy_difference": difference(ours, theirs, "test_accuracy", scale=100),
        "loss_difference": difference(ours, theirs, "test_loss"),
    }


def best_rate(runs: list[Record]) -> list[Record]:
    """Return the runs of one arm at the learning rate with the lowest mean validation loss."""
    rates = sorted({run["learning_rate"] for run in runs})
    by_rate = [[run for run in runs if run["learning_rate"] == rate] for rate in rates]
    return min(by_rate, key=lambda of_rate: mean(of_rate, "val_loss"))


def shown(interval: Record | None, digits: int = 2) -> str:
    if interval is None:
        return "–"
    return f"{interval['estimate']:+.{digits}f} [{interval['low']:+.{digits}f}, {interval['high']:+.{digits}f}]"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    print(aligned(rows))
