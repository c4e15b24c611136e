"""Our PPO with its defaults against Stable-Baselines3's PPO with its defaults, on tasks that everybody knows.

    python benchmarks/rl/classic_tasks.py --seeds 5 --jobs 2

Neither side is given a hyper-parameter: ours takes `PPOConfig()` and the number of environments that `esper ppo train` takes, without
memory (`core = "none"`), because the other side has none; Stable-Baselines3 takes `PPO("MlpPolicy", env)`. Both train for the same number
of steps. The score of a training is the mean return of 100 episodes of its last policy in fresh environments, deterministic, with the same
seeds on both sides. Intervals are over trainings: per task Student's interval of the difference of means over seeds (Welch, the trainings
are independent), and over tasks that of differences in units of the task's range.

Each training is appended to the file at once and skipped when the command is given again; delete its lines after a change of a learner.
Needs stable-baselines3; LunarLander needs Box2D, the inverted pendulums MuJoCo.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from esper.statistics import student_interval, student_quantile

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import RESULTS, Output, Record

EPISODES = 100
FIRST_SEED = 1_000_000  # of evaluation episodes


@dataclass(frozen=True, slots=True)
class Task:
    steps: int
    low: float  # about what a random policy gets
    high: float  # about the best there is


TASKS = {
    "CartPole-v1": Task(50_000, low=20, high=500),
    "Acrobot-v1": Task(50_000, low=-500, high=-75),
    "MountainCarContinuous-v0": Task(50_000, low=-35, high=94),
    "Pendulum-v1": Task(100_000, low=-1250, high=-150),
    "LunarLander-v3": Task(150_000, low=-200, high=270),
    "InvertedPendulum-v5": Task(50_000, low=5, high=1000),
    "InvertedDoublePendulum-v5": Task(100_000, low=60, high=9360),
}


def train_sb3(task: str, seed: int) -> Record:
    from stable_baselines3 import PPO

    began = time.process_time()
    model = PPO("MlpPolicy", task, seed=seed, device="cpu")
    model.learn(TASKS[task].steps)
    seconds = time.process_time() - began
    return {"score": _score(task, lambda obs: model.predict(obs, deterministic=True)[0]), "cpu_seconds": seconds}


def train_ours(task: str, seed: int) -> Record:
    from esper.rl import PPO, NetworkConfig, PPOConfig
    from esper.rl.run_config import TrainConfig
    from esper.vecenv import make

    began = time.process_time()
    env = make(task, TrainConfig(env=task).num_envs)
    ppo = PPO(env, PPOConfig(seed=seed, network=NetworkConfig(core="none")))
    for _ in ppo.train(TASKS[task].steps):
        pass
    seconds = time.process_time() - began
    env.close()
    return {"score": _score(task, lambda obs: ppo.policy.predict(obs, deterministic=True)[0]), "cpu_seconds": seconds}


SIDES = {"ours": train_ours, "sb3": train_sb3}


def _score(task: str, act: Any) -> float:
    env = gym.make(task)
    returns = []
    for episode in range(EPISODES):
        obs, _ = env.reset(seed=FIRST_SEED + episode)
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            total += float(reward)
            ended = terminated or truncated
        returns.append(total)
    env.close()
    return float(np.mean(returns))


def train_once(side: str, task: str, seed: int) -> Record:
    torch.set_num_threads(1)
    return {"task": task, "side": side, "seed": seed, **SIDES[side](task, seed)}


def summary(runs: list[Record]) -> Record:
    """Means per task and side with the interval of their difference, and the interval over tasks of the differences in units of a range."""
    tasks: Record = {}
    for task, about in TASKS.items():
        ours, theirs = ([run["score"] for run in runs if run["task"] == task and run["side"] == side] for side in ("ours", "sb3"))
        if min(len(ours), len(theirs)) < 2:
            continue
        seconds = [np.mean([run["cpu_seconds"] for run in runs if run["task"] == task and run["side"] == side]) for side in SIDES]
        difference, low, high = _welch(ours, theirs)
        tasks[task] = {
            "steps": about.steps,
            "ours": float(np.mean(ours)),
            "sb3": float(np.mean(theirs)),
            "difference": difference,
            "interval": [low, high],
            "share_of_range": difference / (about.high - about.low),
            "seeds": [len(ours), len(theirs)],
            "cpu_seconds": [float(value) for value in seconds],
        }
    shares = [task["share_of_range"] for task in tasks.values()]
    over = student_interval(shares) if len(shares) > 1 else None
    return {"tasks": tasks, "over_tasks": None if over is None else [float(np.mean(shares)), over.low, over.high]}


def _welch(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """The difference of two means with its 95 % interval, where the two samples may spread differently."""
    difference = float(np.mean(ours) - np.mean(theirs))
    first, second = (float(np.var(side, ddof=1)) / len(side) for side in (ours, theirs))
    error = first + second
    if error == 0:
        return difference, difference, difference
    freedom = error**2 / (first**2 / (len(ours) - 1) + second**2 / (len(theirs) - 1))
    half = student_quantile(0.975, freedom) * error**0.5
    return difference, difference - half, difference + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "classic_tasks.jsonl")
    arguments = parser.parse_args()
    output = Output(arguments.out, resume=True)
    runs = [run for run in output.earlier if "side" in run]
    done = {(run["side"], run["task"], run["seed"]) for run in runs}
    sides, tasks = arguments.sides.split(","), arguments.tasks.split(",")
    wanted = [(side, task, seed) for seed in range(arguments.seeds) for task in tasks for side in sides]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(train_once, *key) for key in wanted if key not in done]):
            run = future.result()
            runs.append(run)
            output.write(run)
    output.write(summary(runs))


if __name__ == "__main__":
    main()
