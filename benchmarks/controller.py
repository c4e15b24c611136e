"""Whether a controller can be learned: one is trained, and compared on hosts that it has never seen.

    python benchmarks/controller.py                       # about 28 minutes on two cores
    python benchmarks/controller.py --controller runs/controller/controller.safetensors

It is trained on many widths of both tasks, with two processes that share one policy, and compared on held-out widths and seeds against
never, random, the best fixed schedule, the heuristic, the small host trained longer and its own final size from the start, all counted in
FLOPs (`esper.controller.compare`). The settings below were chosen on training widths and training seeds; the rent levels before any
controller was trained, by what single seeds gave to hosts of one held-out width. The file has every run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from esper.config import save
from esper.controller.compare_config import NAMES, CompareConfig
from esper.controller.config import ControllerConfig, DomainConfig
from esper.fleet.config import FleetConfig
from esper.growth.config import GrowthConfig, Lifecycle
from esper.rl.config import NetworkConfig, PPOConfig
from records import RESULTS, Output

# Short lives of small hosts: what two cores can train by the thousand.
FLEET = FleetConfig(batch_size=32, steps_per_decision=10, validation_batch=100, validation_samples=400)
GROWTH = GrowthConfig(
    blueprints=("norm", "conv3x3", "wide_conv3x3", "bottleneck"), lifecycle=Lifecycle(holding_epochs=2, embargo_epochs=2, withdraw_epochs=1)
)
TRAINING = ControllerConfig(
    hosts=64,  # of all ranks together
    rounds=75,
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
        gae_lambda=0.99,
        time_limit_is_end=True,
        entropy_coef=0.02,
        entropy_coef_end=0.0,
        normalize_observations=False,
        network=NetworkConfig(hidden_size=64),
    ),
)
COMPARISON = CompareConfig(
    hosts=DomainConfig().held_out_hosts,
    seeds=20,
    horizon=12,
    tuning_seeds=4,
    sweep=("2-4-8", "8-16-32", "16-32-64"),
    device="cpu",
    threads=1,
    fleet=FLEET,
    growth=GROWTH,
)
TASKS = ("digits", "digits-1d")
MARGIN = 0.02  # nats: a controller that is behind by certainly less than this is not inferior


def train(folder: Path, rounds: int, ranks: int) -> float:
    """Trains a controller into a folder; gives the seconds. Ranks are processes of one thread each."""
    config = msgspec.structs.replace(TRAINING, rounds=rounds, hosts=TRAINING.hosts // ranks)
    settings = folder.with_suffix(".toml")
    save(config, settings)
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "--"]
    began = time.perf_counter()
    subprocess.run([*launcher, "esper.cli.main", "controller", "train", "--config", str(settings), "--run", str(folder)], check=True)
    return time.perf_counter() - began


def compare_on(task: str, host: str, controller: str, seeds: int) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    from esper.controller.compare import compare
    from esper.tasks import load_task

    sweep = COMPARISON.sweep if host == COMPARISON.hosts[0] else ()  # static sizes do not depend on the host that grows
    config = msgspec.structs.replace(COMPARISON, controllers=(*NAMES, controller), tasks=(task,), hosts=(host,), seeds=seeds, sweep=sweep)
    found = compare(config, load_task)
    return {"runs": msgspec.to_builtins(found.runs), "schedules": found.schedules}


def health(folder: Path) -> dict[str, Any]:
    """What the learner was like in the last tenth of the training."""
    updates = [event for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines()) if event["kind"] == "update"]
    last = updates[-max(len(updates) // 10, 1) :]
    means = {name: fmean(update[name] for update in last) for name in ("explained_variance", "clip_fraction", "total_kl", "mean_return")}
    return {**means, "entropy": {head: fmean(update["entropy"][head] for update in last) for head in last[0]["entropy"]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--controller", type=Path, help="compare this file instead of training one")
    parser.add_argument("--run", type=Path, help="folder of the training; a temporary one unless given")
    parser.add_argument("--rounds", type=int, default=TRAINING.rounds, help="of the training")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train and compare")
    parser.add_argument("--seeds", type=int, default=COMPARISON.seeds)
    parser.add_argument("--output", type=Path, default=RESULTS / "controller.jsonl")
    options = parser.parse_args()
    output = Output(options.output)
    with tempfile.TemporaryDirectory() as scratch:
        controller = options.controller
        if controller is None:
            folder = options.run or Path(scratch) / "controller"
            seconds = train(folder, options.rounds, options.ranks)
            controller = folder / "controller.safetensors"
            output.write({"kind": "training", "seconds": round(seconds, 1), "rounds": options.rounds, **health(folder)})
        jobs = [(task, host) for host in COMPARISON.hosts for task in TASKS]
        began = time.perf_counter()
        with ProcessPoolExecutor(options.ranks) as pool:
            results = list(pool.map(compare_on, *zip(*jobs, strict=True), [str(controller)] * len(jobs), [options.seeds] * len(jobs)))
        report(results, str(controller), options.seeds, output)
        output.write({"kind": "comparison", "seconds": round(time.perf_counter() - began, 1)})


def report(results: list[dict[str, Any]], controller: str, seeds: int, output: Output) -> None:
    from esper.controller.comparison import Comparison
    from esper.controller.lives import Run

    runs = [msgspec.convert(run, Run) for some in results for run in some["runs"]]
    config = msgspec.structs.replace(COMPARISON, controllers=(*NAMES, controller), tasks=TASKS, seeds=seeds)
    comparison = Comparison(config, runs, {name: plan for some in results for name, plan in some["schedules"].items()})
    told = comparison.to_builtins()
    for run in told["runs"]:
        output.append({"kind": "run", **run, "controller": run["controller"].replace(controller, "learned")})
    output.append({"kind": "schedules", **comparison.schedules})
    for standing in told["standings"]:
        output.append({"kind": "standing", **standing, "controller": standing["controller"].replace(controller, "learned")})
    output.append({"kind": "pooled", **told["pooled"]})
    print(comparison.tables().replace(controller, "learned"))
    for claim, holds in verdicts(comparison).items():
        output.write({"kind": "verdict", "claim": claim, "holds": holds})


def verdicts(comparison: Any) -> dict[str, bool]:
    ahead = {level: {one.controller: one.ahead for one in comparison.standings(level)} for level in comparison.config.levels}
    return {
        "beats random over all levels": comparison.pooled("random").low > 0,
        "beats never where the rent is low": ahead["low"]["never"].low > 0,
        "is not worse than never where the rent is high": ahead["high"]["never"].low > -MARGIN,
        "is not inferior to the best fixed schedule over all levels": comparison.pooled("schedule").low > -MARGIN,
    }


if __name__ == "__main__":
    main()
