"""Other libraries that grow networks, on the same data with the same FLOPs: gromo, growingnn and esper on the digits.

    pip install gromo==0.1.0 growingnn==0.4.1 numba==0.68.1    (growingnn needs numba, but does not ask for it)
    python benchmarks/growth/peers.py --jobs 16

All start with the same small network, which each of them can express: 64 pixels, 8 hidden units with an activation, 10 classes. All have
the same split of the data and, seed by seed, the FLOPs that esper's run of `--epochs` epochs took. All keep their best validation
checkpoint.

    esper       `esper.grow` with the heuristic
    gromo       GrowingMLP as in its tutorial: epochs of training, then statistics over the training data, the optimal new units, a line
                search for their scale, and a new optimiser; four times in the first half of the FLOPs. Same first weights and activation
                as esper
    growingnn   its `train` with its defaults: sigmoid, SGD in batches of 128, generations of ten epochs, and a tree search for the next
                change of the structure where the accuracy stops rising. Each search tries every change once; by default it lasts 60 seconds
                of the clock, which would take more than all FLOPs. Its own first weights
    small       the small network itself, for the same FLOPs
    as_esper    a network with one hidden layer and as many parameters as esper's run ended with, from the start, for the same FLOPs
    as_gromo    the same for gromo's run

A library that is not installed is left out. FLOPs are those of matrix products: three forward passes for a training sample, one for the
validation data in every epoch, gromo's statistics as torch counts them, and growingnn's searches, which may exceed the budget once. The
decompositions in gromo are not counted. Every arm runs at three learning rates (AdamW along a cosine; growingnn at three times the rate, so
that its default 0.03 is the middle one). The table shows each arm at the rate of its best mean validation loss. Seconds are those of the
processor, with growingnn's drawings and compilation.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.flop_counter import FlopCounterMode

from esper.rng import Streams
from esper.tasks import Split, Task

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import (
    Setting,
    add_options,
    best_rate,
    compared,
    difference,
    earlier_runs,
    mean,
    print_table,
    run_all,
    shown,
    train,
)
from benchmarks.records import RESULTS, Output, Record

PIXELS, HIDDEN, CLASSES = 64, 8, 10
RATES = (3e-3, 1e-2, 3e-2)
ARMS = ("esper", "gromo", "growingnn", "small", "as_esper", "as_gromo")
NEEDS = {"gromo": "gromo", "growingnn": "growingnn", "as_gromo": "gromo"}  # arm -> package
GROWTH_STEPS, GROW_UNTIL = 4, 0.5  # of gromo; the second is a share of the FLOPs
SCALES = (0.0, 0.1, 0.5, 1.0)  # of gromo's line search
GENERATION = 10  # epochs between two looks at the structure in growingnn
RATE_OF_GROWINGNN = 3.0  # relative to that of the others


def make_host(hidden: int, *, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(seed).integer(f"network with {hidden} hidden units"))
        return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def forward_flops(hidden: int) -> int:
    """FLOPs of a forward pass of one sample through a network with one hidden layer."""
    return 2 * hidden * (PIXELS + CLASSES)


def hidden_for(parameters: int) -> int:
    """Return the hidden units of the network that has about this many parameters."""
    return max(round((parameters - CLASSES) / (PIXELS + 1 + CLASSES)), 1)


def epoch_flops(task: Task, hidden: int) -> int:
    return forward_flops(hidden) * (3 * len(task.train) + len(task.validation))


@dataclass
class Best:
    """The best validation checkpoint so far."""

    loss: float = math.inf
    model: Any = None

    def note(self, loss: float, model: Any) -> None:
        """Copy the model if it is the best so far."""
        if loss < self.loss:
            self.loss, self.model = loss, copy.deepcopy(model)


# gromo


def run_gromo(setting: Setting, seed: int, budget: float) -> Record:
    """Train and grow gromo's MLP until the FLOPs are spent."""
    from gromo.containers.growing_mlp import GrowingMLP
    from gromo.utils.training_utils import gradient_descent

    task, began = setting.load(), time.process_time()
    host = make_host(HIDDEN, seed=seed)
    model = GrowingMLP(PIXELS, CLASSES, HIDDEN, number_hidden_layers=1, activation=nn.ReLU(), device=torch.device("cpu"))
    for layer, like in zip(model.layers, (host[1], host[3]), strict=True):
        layer.weight.data.copy_(like.weight.data)
        layer.bias.data.copy_(like.bias.data)
    batches, best = task.train_loader(seed=seed), Best()
    spent, epochs, steps, optimizer = 0.0, 0, 0, AdamW(model.parameters())
    while spent + epoch_flops(task, hidden_of(model)) <= budget:
        for group in optimizer.param_groups:  # a cosine over the FLOPs instead of the epochs, whose number is not known
            group["lr"] = setting.learning_rate * (1 + math.cos(math.pi * spent / budget)) / 2
        gradient_descent(model, batches, optimizer, None, nn.CrossEntropyLoss())
        spent, epochs = spent + epoch_flops(task, hidden_of(model)), epochs + 1
        best.note(task.evaluate(model, task.val_loader()).loss, model)
        if steps < GROWTH_STEPS and spent >= budget * GROW_UNTIL * (steps + 1) / GROWTH_STEPS:
            spent, steps = spent + grow_gromo(model, task, batches), steps + 1
            optimizer = AdamW(model.parameters())
    found = task.evaluate(best.model, task.test_loader())
    return {
        "epochs": epochs,
        "test_accuracy": found.accuracy,
        "test_loss": found.loss,
        "val_loss": best.loss,
        "parameters": best.model.number_of_parameters(),
        "train_gflops": spent / 1e9,
        "seconds": time.process_time() - began,
    }


def hidden_of(model: Any) -> int:
    return int(model.layers[0].weight.shape[0])


def grow_gromo(model: Any, task: Task, batches: Any) -> float:
    """Add the units that gromo finds best, and return the FLOPs of finding them."""
    from gromo.utils.training_utils import compute_statistics, evaluate_model

    model.set_growing_layers(index=0)
    with FlopCounterMode(display=False) as statistics:
        compute_statistics(model, batches, nn.CrossEntropyLoss(reduction="sum"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using the pseudo-inverse")
        model.compute_optimal_updates()
    model.reset_computation()
    model.dummy_select_update()
    losses = {}
    for scale in SCALES:
        model.set_scaling_factor(scale)
        losses[scale], _ = evaluate_model(model, batches, nn.CrossEntropyLoss(), use_extended_model=True)
    model.set_scaling_factor(min(losses, key=losses.__getitem__))
    model.apply_change()
    return statistics.get_total_flops() + len(SCALES) * len(task.train) * forward_flops(hidden_of(model))


# growingnn


class FlopsOfGrowingnn:
    """Counts the FLOPs of all passes through growingnn's models, copies in its search included, while it is active."""

    def __init__(self) -> None:
        self.spent = 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        from growingnn.structure import Model

        forward, backward = Model.forward_prop, Model.back_prop

        def counted_forward(model: Any, inputs: Any) -> Any:
            self.spent += _pass_flops(model, inputs.shape[1])
            return forward(model, inputs)

        def counted_backward(model: Any, error: Any, *others: Any) -> Any:
            self.spent += 2 * _pass_flops(model, error.shape[1])
            return backward(model, error, *others)

        Model.forward_prop, Model.back_prop = counted_forward, counted_backward
        try:
            yield
        finally:
            Model.forward_prop, Model.back_prop = forward, backward


def _pass_flops(model: Any, samples: int) -> int:
    return 2 * samples * sum(layer.W.size for layer in model.layers)


def run_growingnn(setting: Setting, seed: int, budget: float) -> Record:
    """Train and grow by growingnn until the FLOPs are spent. It asks the stopper after every epoch and after every generation."""
    import growingnn
    from growingnn.structure import SimulationScheduler
    from growingnn.utils import LearningRateScheduler
    from growingnn.utils.stoppers import BaseStopper

    task, began, flops, best = setting.load(), time.process_time(), FlopsOfGrowingnn(), Best()
    (inputs, targets), (val_inputs, val_targets) = (_columns(split) for split in (task.train, task.validation))
    epochs = 0

    class Stopper(BaseStopper):
        def check(self, model: Any, x_train: Any, y_train: Any, epoch: int | None = None, params: Any = None) -> bool:
            nonlocal epochs
            if params is not None:  # after an epoch, not after a generation
                epochs += 1
                best.note(_scores(model, val_inputs, val_targets)[0], model)
            return flops.spent >= budget

    growingnn.config.update(PROGRESS_PRINT_FREQUENCY=1, SAVE_PLOTS=False)  # epochs between two questions to the stopper
    growingnn.set_seed(seed)
    rate = setting.learning_rate * RATE_OF_GROWINGNN
    with flops.counting(), tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        growingnn.trainer.train(
            inputs,
            val_inputs,
            targets,
            val_targets,
            labels=list(range(CLASSES)),
            path=f"{folder}/",
            model_name="model",
            epochs=GENERATION,
            generations=10**6,
            input_size=PIXELS,
            hidden_size=HIDDEN,
            output_size=CLASSES,
            input_shape=None,
            kernel_size=None,
            deepth=None,
            simulation_scheduler=SimulationScheduler(SimulationScheduler.PROGRESS_CHECK, simulation_time=0, simulation_epochs=20),
            lr_scheduler=LearningRateScheduler(LearningRateScheduler.PROGRESIVE, rate, 0.8),
            stopper=Stopper(),
        )
    loss, accuracy = _scores(best.model, *_columns(task.test))
    return {
        "epochs": epochs,
        "test_accuracy": accuracy,
        "test_loss": loss,
        "val_loss": best.loss,
        "parameters": sum(layer.W.size + layer.B.size for layer in best.model.layers),
        "train_gflops": flops.spent / 1e9,
        "seconds": time.process_time() - began,
    }


def _columns(split: Split) -> tuple[Any, Any]:
    """Return the inputs with a column for each sample, as growingnn has them, and the targets."""
    return np.ascontiguousarray(split.inputs.flatten(1).double().numpy().T), split.targets.numpy()


def _scores(model: Any, inputs: Any, targets: Any) -> tuple[float, float]:
    """Return loss and accuracy."""
    chances = model.forward_prop(inputs)  # [classes, samples]
    chosen = np.clip(chances[targets, np.arange(len(targets))], 1e-12, 1.0)
    return float(-np.log(chosen).mean()), float((chances.argmax(axis=0) == targets).mean())


# Runs


def run_seed(setting: Setting, seed: int, arms: list[str]) -> list[Record]:
    """Run all arms of one seed; the first one sets the FLOPs for all others."""
    runs: dict[str, Record] = {}
    for arm in arms:
        runs[arm] = {"arm": arm, **setting.about, "seed": seed, **run_arm(setting, arm, seed, runs)}
    return list(runs.values())


def run_arm(setting: Setting, arm: str, seed: int, runs: dict[str, Record]) -> Record:
    if arm == "esper":
        return train(setting, make_host(HIDDEN, seed=seed), "heuristic", seed=seed)
    budget = runs["esper"]["train_gflops"] * 1e9
    if arm in ("gromo", "growingnn"):
        return (run_gromo if arm == "gromo" else run_growingnn)(setting, seed, budget)
    hidden = HIDDEN if arm == "small" else hidden_for(runs[arm.removeprefix("as_")]["parameters"])
    epochs = max(int(budget / epoch_flops(setting.load(), hidden)), 1)
    return train(setting, make_host(hidden, seed=seed), "never", seed=seed, epochs=epochs)


def summary(setting: Setting, arms: list[str], runs: list[Record]) -> Record:
    by_arm = {arm: best_rate([run for run in runs if run["arm"] == arm]) for arm in arms}
    return {
        "what": "summary",
        **{name: value for name, value in setting.about.items() if name != "learning_rate"},
        "arms": {
            arm: {
                **compared(of_arm, by_arm["small"]),
                "learning_rate": of_arm[0]["learning_rate"] * (RATE_OF_GROWINGNN if arm == "growingnn" else 1),
                "seconds": mean(of_arm, "seconds"),
                "esper_accuracy_ahead": difference(by_arm["esper"], of_arm, "test_accuracy", scale=100),
                "esper_loss_ahead": difference(by_arm["esper"], of_arm, "test_loss"),
            }
            for arm, of_arm in by_arm.items()
        },
    }


def show(record: Record) -> None:
    rows = [
        (
            "arm",
            "test accuracy",
            "test loss",
            "parameters",
            "epochs",
            "GFLOPs",
            "seconds",
            "rate",
            "esper − this, points",
            "esper − this, loss",
        )
    ]
    for arm, about in record["arms"].items():
        rows.append(
            (
                arm,
                f"{about['test_accuracy']:.2f} %",
                f"{about['test_loss']:.4f}",
                f"{about['parameters']:,.0f}",
                f"{about['epochs']:.1f}",
                f"{about['train_gflops']:.3f}",
                f"{about['seconds']:.1f}",
                f"{about['learning_rate']:g}",
                "" if arm == "esper" else shown(about["esper_accuracy_ahead"]),
                "" if arm == "esper" else shown(about["esper_loss_ahead"], 4),
            )
        )
    print_table(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out=RESULTS / "growth_peers.jsonl", seeds=12, epochs=60, recipe=False)
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES), help="learning rates of AdamW, separated by commas")
    options = parser.parse_args(arguments)
    if options.device != "cpu" or options.data_dir is not None:
        parser.error("growingnn computes on the CPU, and the digits come with esper; leave out --device and --data-dir")
    missing = sorted({package for package in NEEDS.values() if find_spec(package) is None})
    arms = [arm for arm in ARMS if NEEDS.get(arm) not in missing]
    if missing:
        print(f"without {' and '.join(missing)}, which are not installed: pip install {' '.join(missing)}")
    shared = Setting(epochs=options.epochs)
    output = Output(options.out, resume=not options.fresh)
    runs, jobs = [], []
    for rate in map(float, options.rates.split(",")):
        setting = replace(shared, learning_rate=rate)
        for seed in range(options.seeds):
            have = [run for run in earlier_runs(output, setting) if run["seed"] == seed and run["arm"] in arms]
            if {run["arm"] for run in have} == set(arms):
                runs += have
            else:  # the arms depend on one another, so a seed whose records are not complete is run again
                jobs.append(partial(run_seed, setting, seed, arms))
    runs += run_all(jobs, processes=options.jobs, output=output)
    record = summary(shared, arms, runs)
    output.write(record)
    show(record)


if __name__ == "__main__":
    main()
