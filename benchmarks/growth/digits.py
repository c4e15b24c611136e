"""Whether growing a host that is too small pays, at what cost, and whether one that is large enough is left alone.

    python benchmarks/growth/digits.py
    python benchmarks/growth/digits.py --host oversized

Arms, paired over seeds (same first weights, same data order):

    heuristic   grows as the heuristic controller decides
    never       the same host, which never grows
    longer      the same host, trained for so many epochs that it costs at least the FLOPs of the heuristic's run
    final       what the heuristic has kept is there from the start, born as the identity too; it costs at most those FLOPs. Left out for
                a seed whose host grew again behind a kept seed: such seeds cannot be there from the start
    schedule    the largest usual seed in every slot after a tenth of the training
    random      seeds, slots and times drawn from a hat

FLOPs are those of training and validation, with probes, pruned seeds and measurements. Learning rate schedules stretch with the epochs.
Seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from esper.growth import Planned

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.growth_runs import (
    Setting,
    add_options,
    compared,
    difference,
    earlier_runs,
    mean,
    print_table,
    run_all,
    setting_of,
    shown,
    train,
)
from benchmarks.records import RESULTS, Output, Record

ARMS = {"starved": "heuristic,never,longer,final,schedule,random", "right": "heuristic,never", "oversized": "heuristic,never"}
NEEDS = {"longer": ("heuristic", "never"), "final": ("heuristic", "never")}  # their cost is that of the heuristic's run

Arms = dict[str, Record]  # arm -> its run, of one seed


def run_seed(setting: Setting, host: str, seed: int, arms: list[str], have: Arms) -> list[Record]:
    """The arms of one seed that are not there yet."""
    runs, made = dict(have), []
    for arm in arms:
        if arm not in runs and not (arm == "final" and _grew_again(runs["heuristic"])):
            runs[arm] = {"arm": arm, "host": host, **run_arm(setting, host, arm, seed, runs)}
            made.append(runs[arm])
    return made


def run_arm(setting: Setting, host: str, arm: str, seed: int, runs: Arms) -> Record:
    def run(controller: Planned | str, epochs: int | None = None) -> Record:
        return train(setting, setting.load().make_host(host, seed=seed), controller, seed=seed, epochs=epochs)

    if arm == "longer":
        return run("never", epochs_for_equal_flops(runs))
    return final(setting, runs, run) if arm == "final" else run(arm)


def epochs_for_equal_flops(runs: Arms) -> int:
    never = runs["never"]
    exactly: float = runs["heuristic"]["train_gflops"] / never["train_gflops"] * never["epochs"]
    return math.ceil(exactly - 1e-3)


def final(setting: Setting, runs: Arms, run: Callable[[Planned, int], Record]) -> Record:
    """For as many epochs as the FLOPs of the heuristic's run allow."""
    heuristic, never, task = runs["heuristic"], runs["never"], setting.load()
    plan = [(0, seed["slot"], seed["blueprint"]) for seed in heuristic["seeds"] if _is_kept(seed)]
    an_epoch = heuristic["flops_ratio"] * never["train_gflops"] / never["epochs"]
    an_evaluation = an_epoch * len(task.validation) / (3 * len(task.train) + len(task.validation))
    budget = heuristic["train_gflops"] * (1 + 1e-5)
    epochs = max(int((budget - 2 * len(plan) * an_evaluation) / an_epoch), 1)  # a measurement each, and one that checks its replay
    record = run(Planned(plan), epochs)
    while record["train_gflops"] > budget and epochs > 1:  # a seed that is slow to prove itself is measured more often than that
        epochs -= 1
        record = run(Planned(plan), epochs)
    return record


def _grew_again(run: Record) -> bool:
    return any("#" in seed["slot"] for seed in run["seeds"] if _is_kept(seed))


def _is_kept(seed: Record) -> bool:
    return bool(seed["outcome"] == "kept")


def summary(setting: Setting, host: str, arms: list[str], runs: list[Record]) -> Record:
    by_arm = {arm: [run for run in runs if run["arm"] == arm] for arm in arms}
    return {
        "what": "summary",
        **setting.about,
        "host": host,
        "arms": {
            arm: {
                **compared(of_arm, by_arm.get("never", [])),
                "heuristic_accuracy_ahead": difference(by_arm.get("heuristic", []), of_arm, "test_accuracy", scale=100),
                "heuristic_loss_ahead": difference(by_arm.get("heuristic", []), of_arm, "test_loss"),
                "seconds": mean(of_arm, "seconds"),
                "parameters_added_percent": 100 * mean([_added_share(run) for run in of_arm], "share"),
                "kept": sum(_is_kept(seed) for run in of_arm for seed in run["seeds"]) / len(of_arm),
                "rollbacks": mean(of_arm, "rollbacks"),
            }
            for arm, of_arm in by_arm.items()
            if of_arm
        },
    }


def _added_share(run: Record) -> Record:
    return {"share": run["parameters_added"] / (run["parameters"] - run["parameters_added"])}


def show(record: Record) -> None:
    rows = [
        ("arm", "test accuracy", "test loss", "parameters", "added", "epochs", "GFLOPs", "seconds", "points − never", "heuristic − this")
    ]
    for arm, about in record["arms"].items():
        rows.append(
            (
                arm,
                f"{about['test_accuracy']:.2f} %",
                f"{about['test_loss']:.4f}",
                f"{about['parameters']:,.0f}",
                f"{about['parameters_added_percent']:+.1f} %",
                f"{about['epochs']:.1f}",
                f"{about['train_gflops']:.2f}",
                f"{about['seconds']:.1f}",
                "" if arm == "never" else shown(about["accuracy_difference"]),
                "" if arm == "heuristic" else shown(about["heuristic_accuracy_ahead"]),
            )
        )
    print_table(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, out=RESULTS / "growth_digits.jsonl")
    parser.add_argument("--host", default="starved", choices=list(ARMS))
    parser.add_argument("--arms", help="separated by commas; default: all that make sense for the host")
    options = parser.parse_args(arguments)
    setting, host = setting_of(options), options.host
    wanted = (options.arms or ARMS[host]).split(",")
    arms = list(dict.fromkeys([*(need for arm in wanted for need in NEEDS.get(arm, ())), *wanted]))
    output = Output(options.out, resume=not options.fresh)
    runs = [run for run in earlier_runs(output, setting, host=host) if run["seed"] < options.seeds]
    jobs = []
    for seed in range(options.seeds):
        have = {run["arm"]: run for run in runs if run["seed"] == seed}
        if not set(arms) <= have.keys():
            jobs.append(partial(run_seed, setting, host, seed, arms, have))
    runs += run_all(jobs, processes=options.jobs, output=output)
    record = summary(setting, host, arms, runs)
    output.write(record)
    show(record)


if __name__ == "__main__":
    main()
