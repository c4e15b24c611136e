"""Our recurrent PPO against sb3-contrib's RecurrentPPO: how fast, and how well.

    python benchmarks/rl/recurrent_ppo.py --settings A,B,B-long --repeats 5 --updates 10
    python benchmarks/rl/recurrent_ppo.py --learn --seeds 10 --jobs 2 --out benchmarks/results/recurrent_ppo_learn.jsonl

Both step the same batched environment, CartPole without velocities, with the hyper-parameters of `sides.py`, which also lists what
differs. One thread.

Speed: environment steps per second of CPU time, collection and update together. Every repeat trains fresh learners from scratch, ours
and sb3's in turn in the same process, and measures updates 2 … K + 1, so that both meet episodes of the same (short) length; the median
over repeats counts. Episode lengths are those of the last 100 episodes at the end of the repeat, averaged over repeats. In "B-long"
episodes last 200 steps and rollouts 64, so with K = 10 three of the ten rollouts hold an episode's start, as in the long run.

Learning: setting A, mean return (in steps balanced) of the last 100 finished episodes at 100,000 and 200,000 steps. Each finished run is
appended to the file at once and skipped when the command is given again; delete the file after a change of either learner.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from esper.statistics import paired_interval, student_interval
from esper.vecenv.builtin import CartPoleHidden

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import RESULTS, Output, Record
from benchmarks.rl.sides import Hyper, Ours, Sb3, Side

REWARD_SCALE = 0.05  # returns of at most 25, which critics without normalisation can follow


@dataclass(frozen=True, slots=True)
class Setting:
    num_envs: int
    hyper: Hyper
    long_episodes: bool = False

    def env(self) -> CartPoleHidden:
        if self.long_episodes:
            return CartPoleHidden(self.num_envs, reward_scale=REWARD_SCALE, never_terminate=True, max_steps=200)
        return CartPoleHidden(self.num_envs, reward_scale=REWARD_SCALE)


SETTINGS = {
    "A": Setting(8, Hyper(num_steps=128, hidden_size=64)),
    "B": Setting(64, Hyper(num_steps=64, hidden_size=128)),
    "B-long": Setting(64, Hyper(num_steps=64, hidden_size=128), long_episodes=True),
}

SIDES: dict[str, Callable[..., Side]] = {
    "ours": Ours,
    "ours_bptt16": partial(Ours, bptt_length=16),
    "ours_two_lstms": partial(Ours, has_critic_memory=True),
    "sb3": Sb3,
    "sb3_shared": partial(Sb3, shared=True),
}


class Repeat(NamedTuple):
    steps_per_second: float
    mean_length: float


def measure(side: Side, updates: int) -> Repeat:
    """Speed over `updates` updates, after one to warm up."""
    side.train_until(side.steps_per_update)
    gc.collect()
    began = time.process_time()
    side.train_until((1 + updates) * side.steps_per_update)
    seconds = time.process_time() - began
    return Repeat(updates * side.steps_per_update / seconds, side.mean_length)


def measure_speed(name: str, sides: list[str], *, repeats: int, updates: int) -> Record:
    setting = SETTINGS[name]
    measured: dict[str, list[Repeat]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in sides:
            measured[side].append(measure(SIDES[side](setting.env(), setting.hyper, seed=repeat), updates))
    speed = {side: statistics.median(repeat.steps_per_second for repeat in of_side) for side, of_side in measured.items()}

    def length(side: str) -> float:
        return statistics.fmean(repeat.mean_length for repeat in measured[side])

    return {
        "setting": name,
        **speed,
        "ratio": speed["ours"] / speed["sb3"],
        "mean_episode_length": length("ours"),
        "sb3_mean_episode_length": length("sb3"),
        "updates": updates,
        "repeats": {side: [repeat.steps_per_second for repeat in of_side] for side, of_side in measured.items()},
    }


def learn_once(side: str, seed: int, checkpoints: list[int]) -> Record:
    """One training run; its mean return at each checkpoint, in steps balanced."""
    torch.set_num_threads(1)
    setting = SETTINGS["A"]
    learner = SIDES[side](setting.env(), setting.hyper, seed=seed)
    began = time.process_time()
    returns = {}
    for checkpoint in sorted(checkpoints):
        learner.train_until(checkpoint)
        returns[str(checkpoint)] = learner.mean_return / REWARD_SCALE
    return {"side": side, "seed": seed, "mean_return_at": returns, "cpu_seconds": time.process_time() - began}


Runs = dict[tuple[str, int], Record]  # (side, seed) -> what `learn_once` answered


def learn(sides: list[str], seeds: int, checkpoints: list[int], *, jobs: int, output: Output) -> None:
    wanted = {str(checkpoint) for checkpoint in checkpoints}
    runs: Runs = {(run["side"], run["seed"]): run for run in output.earlier if "side" in run and wanted <= set(run["mean_return_at"])}
    missing = [(side, seed) for seed in range(seeds) for side in sides if (side, seed) not in runs]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(learn_once, side, seed, checkpoints) for side, seed in missing]):
            run = future.result()
            runs[run["side"], run["seed"]] = run
            output.write(run)
    output.write(summary(runs, seeds, checkpoints))


def summary(runs: Runs, seeds: int, checkpoints: list[int]) -> Record:
    """Means of each side over the seeds it has, and intervals of the difference over the seeds that both have."""

    def returns(side: str, checkpoint: int, of_seeds: list[int]) -> list[float]:
        return [runs[side, seed]["mean_return_at"][str(checkpoint)] for seed in of_seeds]

    def mean_at(side: str) -> dict[int, float]:
        return {checkpoint: statistics.fmean(returns(side, checkpoint, have[side])) for checkpoint in checkpoints}

    have = {side: [seed for seed in range(seeds) if (side, seed) in runs] for side in SIDES}
    have = {side: of_side for side, of_side in have.items() if of_side}
    record: Record = {"seeds": {side: len(of_side) for side, of_side in have.items()}}
    for side in have:
        prefix = "" if side == "ours" else f"{side}_"
        record[f"{prefix}mean_return_at"] = mean_at(side)
        both = [seed for seed in have[side] if seed in have.get("sb3", [])]
        if side == "sb3" or len(both) < 2:
            continue
        rng = np.random.default_rng(0)
        pairs = {checkpoint: (returns(side, checkpoint, both), returns("sb3", checkpoint, both)) for checkpoint in checkpoints}
        record[f"{prefix}difference_at"] = {
            checkpoint: asdict(student_interval(np.subtract(ours, sb3))) for checkpoint, (ours, sb3) in pairs.items()
        }
        record[f"{prefix}difference_at_bootstrap"] = {
            checkpoint: asdict(paired_interval(ours, sb3, rng=rng)) for checkpoint, (ours, sb3) in pairs.items()
        }
    return record


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="A,B,B-long", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--updates", type=int, default=10, help="measured updates per repeat")
    parser.add_argument("--learn", action="store_true", help="compare returns instead of speed")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--sides", help=f"of {', '.join(SIDES)}; default: all of them for speed, ours and sb3 with --learn")
    parser.add_argument("--checkpoints", default="100000,200000", help="with --learn: steps at which returns are compared")
    parser.add_argument("--jobs", type=int, default=2, help="with --learn: worker processes")
    parser.add_argument("--out", type=Path, help="default: a file in benchmarks/results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.learn:
        output = Output(options.out or RESULTS / "recurrent_ppo_learn.jsonl", resume=True)
        checkpoints = [int(step) for step in options.checkpoints.split(",")]
        learn((options.sides or "ours,sb3").split(","), options.seeds, checkpoints, jobs=options.jobs, output=output)
        return
    output = Output(options.out or RESULTS / "recurrent_ppo_speed.jsonl")
    sides = (options.sides or ",".join(SIDES)).split(",")
    if not {"ours", "sb3"} <= set(sides):
        parser.error("speed is a ratio: --sides needs ours and sb3")
    for name in options.settings.split(","):
        output.write(measure_speed(name, sides, repeats=options.repeats, updates=options.updates))


if __name__ == "__main__":
    main()
