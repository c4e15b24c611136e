"""What candidates promise, and what they then do: the first-order probe against the truth, for several optimisers.

    python benchmarks/growth/probe.py
    python benchmarks/growth/probe.py --task digits-1d
    python benchmarks/growth/probe.py --task text --host starved --batch-size 16

One host learns for some steps and is probed in the last of them. Then every candidate germinates in a copy of it, at its full learning rate
from the first step, and all copies learn on from the same batches, beside a copy in which nothing grows. So the fall of the loss by a
candidate is the loss of that copy minus the loss with the candidate, on training samples that all of them share. A fleet trains the
copies; a row of it equals the same host alone.

    ratio    fall per step / promise, the median over the candidates that promise most (the upper half); 1 is exact
    rank     Spearman's correlation of fall and promise over all candidates
    factor   both again, for promises times all weights / weights of the zeroed layer: the share of the layers before it, if they learned
             as fast as that layer does from the start
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import numpy as np
import torch

from esper.fleet.config import FleetConfig, HostConfig
from esper.fleet.fleet import Fleet
from esper.fleet.measure import mean_losses
from esper.growth import GrowthConfig
from esper.growth.config import BudgetConfig, GovernorConfig, SeedOptimizerConfig
from esper.growth.host.layout import Place
from esper.growth.lifecycle.stages import Decision, Germinate
from esper.growth.seeds.blueprints import REGISTRY, build_branch, get_blueprint, live_parameters
from esper.tasks import Split, load_task
from esper.text_table import aligned

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import RESULTS, Output, Record

STEPS = 10  # between two decisions
AFTER = (1, 4, 16)  # decisions after which falls are measured
Kind = tuple[Literal["sgd", "adamw"], float, float]  # optimiser, momentum, learning rate
KINDS: tuple[Kind, ...] = (("sgd", 0.0, 0.1), ("sgd", 0.9, 0.01), ("adamw", 0.0, 0.001), ("adamw", 0.0, 0.01))


def weight_factor(place: Place, blueprint: str) -> float:
    """All weights / weights of the zeroed layer."""
    chosen = get_blueprint(blueprint)
    branch = build_branch(chosen, place, seed=0)
    live = sum(branch.get_parameter(name).numel() for name in live_parameters(chosen, place, branch))
    return sum(parameter.numel() for parameter in branch.parameters()) / live


def run_one(options: argparse.Namespace, kind: Kind, seed: int) -> list[Record]:
    """One host, all of its candidates."""
    optimizer, momentum, rate = kind
    task = load_task(options.task, data_dir=options.data_dir, batch_size=options.batch_size)
    growth = GrowthConfig(
        blueprints=tuple(name for name, blueprint in REGISTRY.items() if blueprint.share is None),  # those with a branch
        seed_optimizer=SeedOptimizerConfig(warmup_epochs=0),
        governor=GovernorConfig(spike_sigmas=1e6),
        budget=BudgetConfig(max_parameters=None, max_flops=None),
    )
    config = FleetConfig(
        batch_size=task.batch_size, steps_per_decision=STEPS, validation_samples=64, optimizer=optimizer, momentum=momentum, schedule="none"
    )
    fleets = [Fleet(task, task.maker(options.host), hosts=1, growth=growth, config=config)]
    names = [(slot, option.name) for slot, some in fleets[0].rows[0].lifecycles.options.items() for option in some]
    fleets.append(Fleet(task, task.maker(options.host), hosts=len(names) + 1, growth=growth, config=config))
    horizon = options.before + max(AFTER) + 1
    for fleet in fleets:
        fleet.reset({row: HostConfig(seed=seed, horizon=horizon, learning_rate=rate) for row in range(fleet.hosts)})
    alone, copies = fleets
    for decision in range(options.before):
        alone.decide({0: Decision(probe=decision == options.before - 1)})
        for fleet in fleets:
            fleet.advance()
    promises = alone.rows[0].lifecycles.promises
    copies.decide({row: Decision((Germinate(slot=slot, reason="measured", blueprint=name),)) for row, (slot, name) in enumerate(names)})
    chosen = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(seed))[: options.samples]
    samples = copies._samples(Split(task.train.inputs[chosen], task.train.targets[chosen]))
    falls: dict[int, list[float]] = {}
    for after in range(max(AFTER) + 1):
        if after in (0, *AFTER):
            losses = mean_losses(copies.stacked_model(range(copies.hosts)), samples)
            falls[after] = (losses[-1] - losses).tolist()
        copies.advance()
    about = {"task": options.task, "host": options.host, "optimizer": optimizer, "momentum": momentum, "learning_rate": rate, "seed": seed}
    return [
        {
            "what": "candidate",
            **about,
            "slot": slot,
            "blueprint": name,
            "loss": alone.rows[0].lifecycles.history.train_losses[-1],
            "promise": promises[slot, name],
            "weight_factor": weight_factor(copies.places[slot], name),
            "falls": {after * STEPS: falls[after][row] for after in AFTER},
        }
        for row, (slot, name) in enumerate(names)
    ]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def summary(runs: Sequence[Record], kind: Kind) -> Record:
    """The mean over host seeds of what is found in each."""
    rows: Record = {}
    seeds = sorted({run["seed"] for run in runs})
    for steps in (after * STEPS for after in AFTER):
        for name in ("plain", "factor"):
            ratios, ranks = [], []
            for seed in seeds:
                own = [run for run in runs if run["seed"] == seed]
                promised = [run["promise"] * (run["weight_factor"] if name == "factor" else 1.0) for run in own]
                fell = [run["falls"][steps] for run in own]
                upper = [pair for pair in zip(promised, fell, strict=True) if pair[0] >= median(promised)]
                ratios.append(median(fall / steps / promise for promise, fall in upper))
                ranks.append(rank_correlation(promised, fell))
            rows[f"{name}_ratio_{steps}"], rows[f"{name}_rank_{steps}"] = fmean(ratios), fmean(ranks)
    return {"what": "summary", "task": runs[0]["task"], "host": runs[0]["host"], "kind": list(kind), "seeds": len(seeds), **rows}


def show(records: Sequence[Record]) -> None:
    steps = [after * STEPS for after in AFTER]
    head = ["optimiser", *(f"{what} {number}" for number in steps for what in ("ratio", "with factor", "rank", "with factor"))]
    rows = [head]
    for record in records:
        optimizer, momentum, rate = record["kind"]
        words = f"{optimizer} {rate:g}" + (f" momentum {momentum:g}" if momentum else "")
        found = [record[f"{name}_{what}_{number}"] for number in steps for what in ("ratio", "rank") for name in ("plain", "factor")]
        rows.append([words, *(f"{value:.2f}" for value in found)])
    print(aligned([tuple(row) for row in rows], numbers=True))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--host", default="starved")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--before", type=int, default=4, help=f"decisions, of {STEPS} steps each, before the candidates germinate")
    parser.add_argument("--samples", type=int, default=512, help="training samples that falls are measured on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "growth_promise.jsonl")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    output, records = Output(options.out, resume=True), []
    for kind in KINDS:
        runs = [record for seed in range(options.seeds) for record in run_one(options, kind, seed)]
        for run in runs:
            output.append(run)
        records.append(summary(runs, kind))
        output.write(records[-1])
    show(records)


if __name__ == "__main__":
    main()
