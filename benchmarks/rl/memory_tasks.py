"""What memory, masks and squashed actions are for, shown on small tasks.

    python benchmarks/rl/memory_tasks.py --tasks cue,masks,pendulum --seeds 3 --jobs 2

cue: one of four cues is shown once and asked for 100 steps later. Success rates of evaluation episodes after training, with memory and
without, with Wilson intervals. Guessing gives 0.25.

masks: the "conditional" task, where the second head's mask depends on the first one's choice and is not observed (best return 10, uniform
over what is allowed 1.97), and a million draws from random logits under random masks, among which no masked choice may be.

pendulum: Pendulum-v1 without velocity, ours and sb3-contrib's RecurrentPPO with the same hyper-parameters (see `sides.py`; no gSDE), mean
return of the last 100 training episodes. Random torques get about -1200, a scripted swing-up about -160.

norms: cartpole-hidden and a cue that is asked for 10 steps later, with layer norm before the LSTM and after it, against none, with
the same seeds: mean return of the last 100 training episodes, and the paired difference with Student's interval over seeds.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.distributions import ActionDistribution
from esper.rl.ppo import PPO
from esper.statistics import student_interval, wilson_interval
from esper.vecenv import Actions, ActionSpec, Discrete
from esper.vecenv.builtin import CartPoleHidden, Conditional, Cue, Outcome, PendulumHidden, State

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import RESULTS, Output, Record
from benchmarks.rl.sides import Hyper, Ours, Sb3, Side

CUE_DELAY = 100
EVALUATION_EPISODES = 400
PENDULUM_ENVS = 8
PENDULUM_REWARD_SCALE = 0.1  # per-step rewards down to -1.6, which critics without normalisation can follow
PENDULUM = Hyper(num_steps=256, hidden_size=64, num_epochs=10, gamma=0.9, entropy=0.0)

Run = Callable[[], Record]


def cue_config(core: Literal["lstm", "none"], *, seed: int) -> PPOConfig:
    """Rollouts of two and a half episodes, so that most cues are asked for in the rollout that shows them, and gradients reach back.

    The forget bias decides: at 5 a cell keeps half of what it holds over 100 steps, at 1 nothing at all. Only the last action matters, so
    a small GAE lambda keeps its reward from being credited to the ones before, and without discount the wait costs nothing.
    """
    network = NetworkConfig(core=core, hidden_size=64, encoder_sizes=() if core == "lstm" else (64,), forget_bias=5.0)
    return PPOConfig(seed=seed, num_steps=256, gamma=1.0, gae_lambda=0.8, learning_rate_schedule="linear", network=network)


def run_cue(core: Literal["lstm", "none"], seed: int, steps: int) -> Record:
    torch.set_num_threads(1)
    ppo = PPO(Cue(16, delay=CUE_DELAY), cue_config(core, seed=seed))
    for _ in ppo.train(steps):
        pass
    evaluation = ppo.evaluate(Cue(100, delay=CUE_DELAY), episodes=EVALUATION_EPISODES, seed=1_000 + seed)
    successes = sum(value == 1.0 for value in evaluation.returns)
    return {"task": "cue", "core": core, "seed": seed, "steps": ppo.step, "successes": successes, "episodes": len(evaluation.returns)}


def summarise_cue(runs: list[Record]) -> Record:
    record: Record = {"task": "cue", "delay": CUE_DELAY, "chance": 0.25}
    for core in ("lstm", "none"):
        of_core = [run for run in runs if run["core"] == core]
        record[core] = asdict(wilson_interval(sum(run["successes"] for run in of_core), sum(run["episodes"] for run in of_core)))
    return record


def run_conditional(seed: int, steps: int) -> Record:
    torch.set_num_threads(1)
    network = NetworkConfig(core="none", encoder_sizes=(64, 64))
    ppo = PPO(Conditional(32), PPOConfig(seed=seed, num_steps=64, gamma=0.0, network=network))
    for _ in ppo.train(steps):
        pass
    evaluation = ppo.evaluate(Conditional(50), episodes=EVALUATION_EPISODES, seed=1_000 + seed)
    return {"task": "conditional", "seed": seed, "steps": ppo.step, "mean_return": evaluation.mean_return, "best": 10}


DRAWN = ActionSpec((Discrete("kind", 3), Discrete("item", 5, parent="kind"), Discrete("tool", 7)))


def run_draws(draws: int, seed: int = 0) -> Record:
    """Draws under random logits and masks. In every second row what is masked has by far the largest logits."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    distribution = ActionDistribution(DRAWN)
    masked = 0
    for first in range(0, draws, 100_000):
        rows = min(100_000, draws - first)
        masks = {"kind": _mask(rows, 3, generator), "item": _mask(rows, 3, 5, generator), "tool": _mask(rows, 7, generator)}
        logits = torch.randn(rows, distribution.num_parameters, generator=generator) * 10
        every_row = torch.cat((masks["kind"], masks["item"].any(1), masks["tool"]), 1)
        logits[::2] += 1e4 * ~every_row[::2]
        choice = distribution.choose(logits, masks, distribution.noise((rows,), generator))
        actions = distribution.actions(choice)
        each = torch.arange(rows)
        allowed = (
            masks["kind"][each, actions["kind"]]
            & masks["item"][each, actions["kind"], actions["item"]]
            & masks["tool"][each, actions["tool"]]
        )
        masked += int((~allowed).sum())
    return {"task": "draws", "draws": draws, "masked": masked}


def _mask(*shape_and_generator: Any) -> Tensor:
    """Random masks [..., K] with at least one choice allowed."""
    *shape, generator = shape_and_generator
    priority = torch.rand(*shape, generator=generator)
    return (priority == priority.amax(-1, keepdim=True)) | (torch.rand(*shape, generator=generator) < 0.4)


class ScaledPendulum(PendulumHidden):
    """With rewards in smaller units, the same for both sides."""

    def advance(self, state: State, actions: Actions) -> tuple[State, Outcome]:
        state, outcome = super().advance(state, actions)
        return state, outcome._replace(reward=outcome.reward * PENDULUM_REWARD_SCALE)


def run_pendulum(side: Literal["ours", "sb3"], seed: int, steps: int) -> Record:
    torch.set_num_threads(1)
    env = ScaledPendulum(PENDULUM_ENVS)
    learner: Side = Ours(env, PENDULUM, seed=seed) if side == "ours" else Sb3(env, PENDULUM, seed=seed)
    began = time.process_time()
    learner.train_until(steps)
    seconds = time.process_time() - began
    mean_return = learner.mean_return / PENDULUM_REWARD_SCALE
    return {"task": "pendulum", "side": side, "seed": seed, "steps": steps, "mean_return": mean_return, "cpu_seconds": seconds}


def summarise_pendulum(runs: list[Record]) -> Record:
    record: Record = {"task": "pendulum"}
    for side in sorted({run["side"] for run in runs}):
        record[side] = statistics.fmean(run["mean_return"] for run in runs if run["side"] == side)
    return record


NORMS = {"none": {}, "before": {"norm_before": True}, "after": {"norm_after": True}}


def run_norms(task: Literal["cartpole-hidden", "cue"], norm: str, seed: int, steps: int) -> Record:
    torch.set_num_threads(1)
    env = Cue(16, delay=10) if task == "cue" else CartPoleHidden(16)
    ppo = PPO(env, PPOConfig(seed=seed, num_epochs=4, num_minibatches=4, network=NetworkConfig(hidden_size=64, **NORMS[norm])))
    *_, last = ppo.train(steps)
    return {"task": "norms", "env": task, "norm": norm, "seed": seed, "steps": ppo.step, "mean_return": last.mean_return}


def summarise_norms(runs: list[Record]) -> Iterator[Record]:
    """One line for each task and place of the norm."""
    for env in sorted({run["env"] for run in runs}):
        by_norm = {
            norm: [run["mean_return"] for run in sorted(runs, key=lambda run: run["seed"]) if (run["env"], run["norm"]) == (env, norm)]
            for norm in NORMS
        }
        for norm, returns in by_norm.items():
            line: Record = {"task": "norms", "env": env, "norm": norm, "mean_return": statistics.fmean(returns)}
            if norm != "none" and len(returns) > 1:
                differences = [ours - plain for ours, plain in zip(returns, by_norm["none"], strict=True)]
                line["difference"] = asdict(student_interval(differences))
            yield line


def in_parallel(runs: list[Run], *, jobs: int, output: Output) -> Iterator[Record]:
    """Runs them in worker processes and writes each as it ends."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run) for run in runs]):
            record = future.result()
            output.write(record)
            yield record


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="cue,masks,pendulum")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--cue-steps", type=int, default=200_000)
    parser.add_argument("--conditional-steps", type=int, default=200_000)
    parser.add_argument("--pendulum-steps", type=int, default=200_000)
    parser.add_argument("--norm-steps", type=int, default=16_000)
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "memory_tasks.jsonl")
    options = parser.parse_args(arguments)
    output, seeds, tasks = Output(options.out), range(options.seeds), options.tasks.split(",")
    if "cue" in tasks:
        runs: list[Run] = [partial(run_cue, core, seed, options.cue_steps) for seed in seeds for core in ("lstm", "none")]
        output.write(summarise_cue(list(in_parallel(runs, jobs=options.jobs, output=output))))
    if "norms" in tasks:
        envs: tuple[Literal["cartpole-hidden", "cue"], ...] = ("cartpole-hidden", "cue")
        runs = [partial(run_norms, env, norm, seed, options.norm_steps) for env in envs for seed in seeds for norm in NORMS]
        for line in summarise_norms(list(in_parallel(runs, jobs=options.jobs, output=output))):
            output.write(line)
    if "masks" in tasks:
        runs = [partial(run_conditional, seed, options.conditional_steps) for seed in seeds]
        list(in_parallel([*runs, partial(run_draws, options.draws)], jobs=options.jobs, output=output))
    if "pendulum" in tasks:
        sides: list[Literal["ours", "sb3"]] = ["ours", "sb3"] if find_spec("sb3_contrib") else ["ours"]
        runs = [partial(run_pendulum, side, seed, options.pendulum_steps) for seed in seeds for side in sides]
        output.write(summarise_pendulum(list(in_parallel(runs, jobs=options.jobs, output=output))))


if __name__ == "__main__":
    main()
