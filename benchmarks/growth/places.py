"""Whether a slot behind a pool is as good as one before it, where a seed costs four times as much.

    python benchmarks/growth/places.py --jobs 1

The host is a plain nn.Sequential of (conv, norm, ReLU, pool), starved: 4, 8 and 16 channels. A seed of the same blueprint grows in two
slots, behind both ReLUs or behind both pools, from the first epoch on. Paired over seeds: same first weights, same data order.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from esper.growth import Planned, grow

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import Setting, add_options, difference, earlier_runs, mean, print_table, run_all, setting_of, shown
from benchmarks.records import RESULTS, Output, Record

SLOTS = {"before": ("2", "6"), "behind": ("3", "7")}  # the pools
BLUEPRINTS = ("conv3x3", "double_conv3x3", "wide_conv3x3")


def make_host(seed: int, classes: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, width in ((1, 4), (4, 8), (8, 16)):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


def run_seed(setting: Setting, seed: int, have: set[tuple[str, str]]) -> list[Record]:
    arms = [("never", "none"), *((where, blueprint) for where in SLOTS for blueprint in BLUEPRINTS)]
    return [run_arm(setting, where, blueprint, seed) for where, blueprint in arms if (where, blueprint) not in have]


def run_arm(setting: Setting, where: str, blueprint: str, seed: int) -> Record:
    task, slots = setting.load(), SLOTS.get(where, SLOTS["behind"])
    grown = grow(
        make_host(seed, task.num_classes),
        task.train_loader(seed=seed),
        task.val_loader(),
        loss_fn=task.loss_fn,
        epochs=setting.epochs,
        optimizer=setting.optimizer,
        scheduler=setting.scheduler(setting.epochs),
        controller="never" if where == "never" else Planned([(0, slot, blueprint) for slot in slots]),
        config=setting.config(seed, slots=slots),
    )
    found = task.evaluate(grown.model, task.test_loader())
    return {
        **setting.about,
        "seed": seed,
        "where": where,
        "blueprint": blueprint,
        "test_accuracy": found.accuracy,
        "test_loss": found.loss,
        "parameters_added": grown.added.parameters,
        "flops_ratio": 1 + grown.added.flops / grown.host.flops,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out=RESULTS / "growth_places.jsonl", seeds=10, epochs=20)
    options = parser.parse_args()
    setting = setting_of(options)
    output = Output(options.out, resume=not options.fresh)
    earlier = earlier_runs(output, setting)
    have = {seed: {(run["where"], run["blueprint"]) for run in earlier if run["seed"] == seed} for seed in range(options.seeds)}
    jobs = [partial(run_seed, setting, seed, have[seed]) for seed in range(options.seeds)]
    show([*earlier, *run_all(jobs, processes=options.jobs, output=output)])


def show(runs: list[Record]) -> None:
    rows = [("blueprint", "FLOPs before", "behind", "accuracy before", "behind", "behind − before, points", "behind − before, loss")]
    for blueprint in BLUEPRINTS:
        before, behind = ([run for run in runs if (run["where"], run["blueprint"]) == (where, blueprint)] for where in SLOTS)
        of_both = [f"{mean(some, 'flops_ratio'):.2f} ×" for some in (before, behind)]
        of_both += [f"{100 * mean(some, 'test_accuracy'):.2f} %" for some in (before, behind)]
        points, loss = difference(behind, before, "test_accuracy", scale=100), difference(behind, before, "test_loss")
        rows.append((blueprint, *of_both, shown(points), shown(loss, 4)))
    never = [run for run in runs if run["where"] == "never"]
    rows.append(("never", "1.00 ×", "", f"{100 * mean(never, 'test_accuracy'):.2f} %", "", "", ""))
    print_table(rows)


if __name__ == "__main__":
    main()
