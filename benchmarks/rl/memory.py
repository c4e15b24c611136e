"""Memory of the learner: the peak of one update against the size of the rollout, and whether it grows over many updates.

    python benchmarks/rl/memory.py

Peak: each size in a process of its own; what one update adds to the largest resident size after building the learner and collecting one
rollout. A line is fitted over sizes: its slope is the bytes that a step of the rollout costs, its intercept what any update costs.

Growth: resident size over 2,000 updates of a small learner, and its slope after the first quarter, by when all buffers exist.

Linux only: resident sizes are read from /proc.

Shapes: T = steps in the rollout, N = parallel environments.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.ppo import PPO
from esper.vecenv.builtin import CartPoleHidden

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import RESULTS, Output, Record

SIZES = ((64, 32), (64, 64), (128, 64), (128, 128), (256, 128), (256, 256))  # (T, N)


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def learner(num_steps: int, num_envs: int, hidden_size: int) -> PPO:
    torch.set_num_threads(1)
    config = PPOConfig(num_steps=num_steps, network=NetworkConfig(hidden_size=hidden_size))
    return PPO(CartPoleHidden(num_envs), config)


def measure_update(num_steps: int, num_envs: int) -> Record:
    """What one update adds to the peak, in this process."""
    ppo = learner(num_steps, num_envs, hidden_size=128)
    rollout = ppo.collect()
    before = peak_bytes()
    ppo.update(rollout)
    return {"num_steps": num_steps, "num_envs": num_envs, "steps": num_steps * num_envs, "bytes": peak_bytes() - before}


def measure_in_a_process_of_its_own(num_steps: int, num_envs: int) -> Record:
    command = [sys.executable, __file__, "--one", f"{num_steps}x{num_envs}"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    record: Record = json.loads(answer)
    return record


class Line(NamedTuple):
    slope: float
    intercept: float
    r_squared: float


def fit(x: list[int], y: list[int]) -> Line:
    slope, intercept = np.polyfit(x, y, 1)
    missed = np.asarray(y) - (slope * np.asarray(x) + intercept)
    spread = np.asarray(y, dtype=np.float64) - np.mean(y)
    return Line(float(slope), float(intercept), float(1 - (missed**2).sum() / (spread**2).sum()) if spread.any() else 1.0)


def measure_growth(updates: int) -> Record:
    """Resident size over many small updates, the first quarter of which is left out of the slope."""
    ppo = learner(num_steps=16, num_envs=4, hidden_size=16)
    every = max(1, updates // 40)
    at: dict[int, int] = {0: resident_bytes()}
    for update in ppo.train(updates * ppo.steps_per_update):
        if update.update % every == 0:
            at[update.update] = resident_bytes()
    settled = {number: size for number, size in at.items() if number >= updates // 4}
    return {
        "updates": updates,
        "resident_bytes_at": {number: at[number] for number in (updates * quarter // 4 for quarter in range(5)) if number in at},
        "slope_bytes_per_update": fit(list(settled), list(settled.values())).slope,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2_000, help="of the small learner")
    parser.add_argument("--one", help="measure one size, such as 64x32, in this process and print it")
    parser.add_argument("--out", type=Path, default=RESULTS / "ppo_memory.jsonl")
    options = parser.parse_args(arguments)
    if options.one:
        num_steps, num_envs = options.one.split("x")
        print(json.dumps(measure_update(int(num_steps), int(num_envs))))
        return
    output = Output(options.out)
    records = []
    for num_steps, num_envs in SIZES:
        records.append(measure_in_a_process_of_its_own(num_steps, num_envs))
        output.write(records[-1])
    line = fit([record["steps"] for record in records], [record["bytes"] for record in records])
    output.write({"bytes_per_step": line.slope, "intercept_bytes": line.intercept, "r_squared": line.r_squared})
    output.write(measure_growth(options.updates))


if __name__ == "__main__":
    main()
