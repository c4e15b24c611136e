"""The right size without a sweep: a host that grows, beside the best of several sizes that were each trained, with the whole cost of both.

    python benchmarks/growth_sizes.py --task digits
    python benchmarks/growth_sizes.py --task digits-1d
    python benchmarks/growth_sizes.py --task cifar10 --data-dir DIR --device cuda --jobs 1

The sweep trains a host of every width c (blocks of c, 2c and 4c channels) once for each seed and takes, seed by seed, the one of the lowest
validation loss; it costs all of its runs. The other side is the starved host that grows by the heuristic, in one run of as many epochs.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import fmean

from torch import nn

from esper.tasks import Task
from growth_runs import Setting, add_options, compared, difference, earlier_runs, mean, print_table, run_all, setting_of, shown, train
from records import RESULTS, Output, Record

WIDTHS = {"digits": (4, 8, 16, 32, 48), "digits-1d": (2, 4, 8, 16, 32), "cifar10": (8, 16, 32, 64)}
EPOCHS = {"digits": 40, "digits-1d": 40, "cifar10": 10}
SEEDS = {"digits": 20, "digits-1d": 20, "cifar10": 4}
GROWN = 0  # in place of a width: the starved host that grows


def make_host(task: Task, width: int, *, seed: int) -> nn.Module:
    """A host of the task's own architecture with other channels; one that the task has itself begins with the very same weights."""
    channels = (width, 2 * width, 4 * width)
    own = [size for size, make in task.hosts.items() if isinstance(make, partial) and make.args == (channels,)]
    return task.make_host(own[0] if own else "-".join(map(str, channels)), seed=seed)


def run_one(setting: Setting, width: int, seed: int) -> list[Record]:
    task = setting.load()
    host = task.make_host("starved", seed=seed) if width == GROWN else make_host(task, width, seed=seed)
    return [{"width": width, **train(setting, host, "heuristic" if width == GROWN else "never", seed=seed)}]


def best_of_sweep(runs: list[Record]) -> Record:
    """Of one seed: the run with the lowest validation loss, at the cost of all."""
    best = min(runs, key=lambda run: run["val_loss"])
    return {**best, "train_gflops": sum(run["train_gflops"] for run in runs), "seconds": sum(run["seconds"] for run in runs)}


def summary(setting: Setting, runs: list[Record]) -> Record:
    of_width = {width: [run for run in runs if run["width"] == width] for width in sorted({run["width"] for run in runs})}
    grown = of_width.pop(GROWN)
    static = [run for of_one in of_width.values() for run in of_one]
    sweep = [best_of_sweep([run for run in static if run["seed"] == seed]) for seed in sorted({run["seed"] for run in static})]
    ratios = [one["train_gflops"] / other["train_gflops"] for one, other in zip(sweep, sorted(grown, key=_seed), strict=True)]
    return {
        "what": "summary",
        **setting.about,
        "rows": {
            **{f"width {width}": _row(some, grown) for width, some in of_width.items()},
            "sweep": {**_row(sweep, grown), "chosen": {width: sum(run["width"] == width for run in sweep) for width in of_width}},
            "grown": _row(grown, grown),
        },
        "sweep_flops_to_grown": fmean(ratios),
    }


def _seed(run: Record) -> int:
    return int(run["seed"])


def _row(runs: list[Record], grown: list[Record]) -> Record:
    """Differences are those of the grown to these."""
    ahead = {"grown_accuracy_ahead": ("test_accuracy", 100.0), "grown_loss_ahead": ("test_loss", 1.0)}
    means = {name: value for name, value in compared(runs, []).items() if not name.endswith("difference")}
    return {
        **means,
        "seconds": mean(runs, "seconds"),
        **{name: difference(grown, runs, what, scale=scale) for name, (what, scale) in ahead.items()},
    }


def show(record: Record) -> None:
    rows = [("", "test accuracy", "test loss", "parameters", "GFLOPs", "seconds", "grown − this, points", "grown − this, loss")]
    for name, about in record["rows"].items():
        rows.append(
            (
                name,
                f"{about['test_accuracy']:.2f} %",
                f"{about['test_loss']:.4f}",
                f"{about['parameters']:,.0f}",
                f"{about['train_gflops']:,.2f}",
                f"{about['seconds']:.1f}",
                "" if name == "grown" else shown(about["grown_accuracy_ahead"]),
                "" if name == "grown" else shown(about["grown_loss_ahead"], 4),
            )
        )
    print_table(rows)
    print(f"the sweep costs {record['sweep_flops_to_grown']:.1f} times the FLOPs of the run that grows")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out=RESULTS / "growth_sizes.jsonl", seeds=None, epochs=None)
    parser.add_argument("--widths", help="of the sweep, separated by commas; default: some for the task")
    options = parser.parse_args(arguments)
    if options.task not in WIDTHS:
        parser.error(f"there are sweeps for {', '.join(WIDTHS)}, not for {options.task}")
    options.epochs, seeds = options.epochs or EPOCHS[options.task], options.seeds or SEEDS[options.task]
    widths = tuple(map(int, options.widths.split(","))) if options.widths else WIDTHS[options.task]
    setting = setting_of(options)
    output = Output(options.out, resume=not options.fresh)
    wanted = [(width, seed) for seed in range(seeds) for width in (GROWN, *widths)]
    runs = [run for run in earlier_runs(output, setting) if (run["width"], run["seed"]) in wanted]
    have = {(run["width"], run["seed"]) for run in runs}
    jobs = [partial(run_one, setting, width, seed) for width, seed in wanted if (width, seed) not in have]
    runs += run_all(jobs, processes=options.jobs, output=output)
    record = summary(setting, runs)
    output.write(record)
    show(record)


if __name__ == "__main__":
    main()
