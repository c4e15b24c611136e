"""Whether a controller can be learned: one is trained, and compared in cells of data, host and training that it has never seen.

    python benchmarks/controller.py
    python benchmarks/controller.py --controller runs/controller/controller.safetensors
    python benchmarks/controller.py --setting cifar10 --data-dir DIR --minutes 10

It is trained on many widths of convolutional hosts, and compared with all contestants and controls of `esper.controller.compare`, at four
prices of rent. The file has a record of every host.

Setting `digits`: both digit tasks, two processes that share one policy. Setting `cifar10`: one process and one GPU, with the same way of
learning. `--minutes` ends a training that is slower than expected after the round in which they are over.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from esper.config import save
from esper.controller.config import CellDomain, CompareConfig, ControllerConfig, DomainConfig
from esper.fleet.config import FleetConfig
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.rl.config import NetworkConfig, PPOConfig
from records import RESULTS, Output

# Short lives of small hosts: what two cores can train by the thousand.
FLEET = FleetConfig(batch_size=32, steps_per_decision=10, validation_batch=100, validation_samples=400)
GROWTH = GrowthConfig(
    blueprints=("norm", "conv3x3", "wide_conv3x3", "bottleneck"),
    lifecycle=LifecycleConfig(holding_epochs=2, embargo_epochs=2, withdraw_epochs=1),
)
TRAINING = ControllerConfig(
    hosts=64,  # of all ranks together
    rounds=84,  # each of 12 architectures seven times on each rank
    device="cpu",
    threads=1,
    checkpoint_every=10,
    actions=3,
    domain=DomainConfig(fleets=1, horizon=(12, 12), learning_rate=(0.01, 0.01), plain_share=1.0),
    fleet=FLEET,
    growth=GROWTH,
    ppo=PPOConfig(
        num_steps=39,  # 13 decisions of 3 actions: a whole life
        num_minibatches=4,
        num_epochs=6,
        learning_rate=2e-3,
        learning_rate_schedule="linear",
        gamma=1.0,
        gae_lambda=0.95,  # seeds differ by the luck of their first weights, which the critic averages out
        time_limit_is_end=True,
        entropy_coef=0.02,
        entropy_coef_end=0.0,
        normalize_observations=False,
        network=NetworkConfig(hidden_size=64),
    ),
)
COMPARISON = CompareConfig(device="cpu", threads=1, domain=CellDomain(sources=("digits", "digits-1d"), families=("conv",)))
# Lives as short, of hosts as starved, on photographs: what one GPU can train by the thousand.
CIFAR10_FLEET = FleetConfig(batch_size=128, steps_per_decision=30, validation_batch=250, validation_samples=2000, precision="bfloat16")
CIFAR10_TRAINING = msgspec.structs.replace(
    TRAINING,
    hosts=128,
    rounds=40,
    device="cuda",
    threads=None,
    domain=DomainConfig(
        tasks=("cifar10",),
        hosts=("4-8-16", "6-6-12", "8-8-16", "12-12-24"),
        held_out_hosts=("6-12-24", "8-16-32"),
        fleets=1,
        horizon=(12, 12),
        learning_rate=(0.01, 0.01),
        plain_share=1.0,
    ),
    fleet=CIFAR10_FLEET,
)
CIFAR10_COMPARISON = CompareConfig(device="cuda", domain=CellDomain(sources=("cifar10",), families=("conv",)))


@dataclass(frozen=True)
class Setting:
    training: ControllerConfig  # hosts: of all ranks together
    comparison: CompareConfig
    ranks: int  # processes that train one policy


SETTINGS = {
    "digits": Setting(TRAINING, COMPARISON, ranks=2),
    "cifar10": Setting(CIFAR10_TRAINING, CIFAR10_COMPARISON, ranks=1),
}


# Training


def train(config: ControllerConfig, folder: Path, *, ranks: int, minutes: float | None) -> str:
    """Trains a controller into a folder; gives how it ended."""
    if ranks == 1:
        return train_here(config, folder, minutes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings = folder.with_suffix(".toml")
    save(msgspec.structs.replace(config, hosts=config.hosts // ranks), settings)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "--"]
    subprocess.run([*launcher, "esper.cli.main", "controller", "train", "--config", str(settings), "--run", str(folder)], check=True)
    return "finished"


def train_here(config: ControllerConfig, folder: Path, minutes: float | None) -> str:
    """In this process, which sees when the time is over."""
    from esper.controller.training import train_controller

    began = time.perf_counter()
    return train_controller(config, folder, should_stop=lambda: minutes is not None and time.perf_counter() - began > 60 * minutes).status


def health(folder: Path, ranks: int) -> dict[str, Any]:
    """What the learner was like in the last tenth of the training, and how fast all hosts trained, twins included."""
    events = list(map(json.loads, (folder / "events.jsonl").read_text().splitlines()))
    updates = [event for event in events if event["kind"] == "update"]
    last = updates[-max(len(updates) // 10, 1) :]
    means = {name: fmean(update[name] for update in last) for name in ("explained_variance", "clip_fraction", "total_kl", "mean_return")}
    seconds = sum(update["collect_seconds"] + update["update_seconds"] for update in updates)
    return {
        **means,
        "entropy": {head: fmean(update["entropy"][head] for update in last) for head in last[0]["entropy"]},
        "rounds": len(updates),
        "samples_per_s": ranks * sum(event["samples"] for event in events if event["kind"] == "round_ended") / seconds,  # only one tells
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="digits")
    parser.add_argument("--data-dir", help="of a task that needs files")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the setting's own unless given")
    parser.add_argument("--controller", type=Path, help="compare this file instead of training one")
    parser.add_argument("--run", type=Path, help="folder of the training; a temporary one unless given")
    parser.add_argument("--rounds", type=int, help="of the training; the setting's own unless given")
    parser.add_argument("--minutes", type=float, help="after which the training ends, rounds or not; needs one rank")
    parser.add_argument("--ranks", type=int, help="processes that train; the setting's own unless given")
    parser.add_argument("--cells", type=int, help="in which controllers are compared; the setting's own unless given")
    parser.add_argument(
        "--output", type=Path, help="benchmarks/results/controller.jsonl unless given, with the setting in it if it is not digits"
    )
    options = parser.parse_args(arguments)
    setting = chosen(SETTINGS[options.setting], options)
    if options.minutes is not None and setting.ranks > 1:
        parser.error(f"--minutes ends a training in one process, and there are {setting.ranks}; add --ranks 1")
    name = "controller" if options.setting == "digits" else f"controller_{options.setting}"
    run(setting, Output(options.output or RESULTS / f"{name}.jsonl"), options)


def chosen(setting: Setting, options: argparse.Namespace) -> Setting:
    """The setting, with what the command line says instead."""
    both = {name: value for name in ("device", "data_dir") if (value := getattr(options, name)) is not None}
    rounds, cells = options.rounds or setting.training.rounds, options.cells or setting.comparison.cells
    return Setting(
        msgspec.structs.replace(setting.training, rounds=rounds, **both),
        msgspec.structs.replace(setting.comparison, cells=cells, **both),
        options.ranks or setting.ranks,
    )


def run(setting: Setting, output: Output, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        controller = options.controller
        if controller is None:
            folder = options.run or Path(scratch) / "controller"
            began = time.perf_counter()
            status = train(setting.training, folder, ranks=setting.ranks, minutes=options.minutes)
            seconds = time.perf_counter() - began
            output.write({"kind": "training", "seconds": round(seconds, 1), "status": status, **health(folder, setting.ranks)})
            controller = folder / "controller.safetensors"
        began = time.perf_counter()
        compare_with(controller, setting.comparison, output)
        output.write({"kind": "comparison", "seconds": round(time.perf_counter() - began, 1)})


def compare_with(controller: Path, config: CompareConfig, output: Output) -> None:
    """Compare a controller, print the tables, and write a record of every host and every result."""
    from esper.controller.compare import compare
    from esper.controller.training import load_task_from

    load = cache(partial(load_task_from, config.data_dir))  # decoding photographs takes a while
    comparison = compare(msgspec.structs.replace(config, controllers=(str(controller),)), load)
    print(comparison.tables().replace(str(controller), "learned"))
    found = comparison.to_builtins()
    for kind in ("records", "rows"):
        for record in found.pop(kind):
            named = {"contestant": record["contestant"].replace(str(controller), "learned")} if "contestant" in record else {}
            output.append({"kind": kind.removesuffix("s"), **record, **named})
    output.append({"kind": "statistics", **found, "compared": "learned"})


if __name__ == "__main__":
    main()
