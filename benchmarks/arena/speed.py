"""How fast the arena is: battles alone, and training in them from end to end.

    python benchmarks/arena/speed.py --device cpu --battles 256 --threads 2
    python benchmarks/arena/speed.py --device cuda --battles 4096,16384 --training-battles 8192 --precision bfloat16

A step is one decision, five ticks of the physics, of one unit, with all rules, observations and masks, whether the unit lives or not; an
agent-step is a step of a living unit. In the phase `simulation` both sides are driven by the strong bot on 64×64 maps. The time is taken in
the middle of battles, which last about a hundred decisions: from the `--warm-up`-th on, when the teams meet, in five windows, of which the
median counts. In the phase `training` the learner of player-5v5 collects and learns; its steps are those of the units that learn,
without the opponents'. There, the time is taken when battles are of all ages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from esper.arena.config import ArenaConfig
from esper.arena.speed import WARM_UP, measure_speed
from esper.devices import find_device, threads
from esper.league.config import ArenaTrainConfig
from esper.league.training import prepare_arena

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.arena.learning import LARGE, with_values
from benchmarks.clock import now
from benchmarks.fleet.speed import CudaMemory, ResidentMemory
from benchmarks.records import Output, Record

TRAINING_WARM_UP = 200  # decisions after which battles are of all ages


def simulation(battles: int, options: argparse.Namespace, device: torch.device) -> Record:
    config = ArenaConfig(battles=battles, team_size=options.team_size)
    memory = _memory(device)
    memory.begin()
    speed = measure_speed(config, device=device, seed=options.seed, warm_up=options.warm_up, decisions=options.decisions)
    record = {"phase": "simulation", "battles": battles, "units": config.units}
    return {**record, **speed._asdict(), "peak_memory": memory.peak()}


def training(battles: int, options: argparse.Namespace, device: torch.device) -> Record:
    changes = {
        "arena.battles": battles, "arena.team_size": options.team_size, "selfplay.enter_every": 10**9,
        "ppo.num_minibatches": options.minibatches, "ppo.precision": options.precision, "device": device.type,
    }  # fmt: skip
    config = with_values(ArenaTrainConfig(), {**LARGE, **changes})
    memory = _memory(device)
    memory.begin()
    with prepare_arena(config) as (ppo, _):
        for _ in ppo.train(-(-TRAINING_WARM_UP // config.ppo.num_steps) * ppo.steps_per_update):
            pass
        lived, collected = 0, 0.0
        began = now(device)
        for _ in range(options.updates):
            start = now(device)
            rollout = ppo.collect()
            collected += now(device) - start
            lived += int((rollout.valid & rollout.acts).sum())
            ppo.update(rollout)
        seconds = now(device) - began
    return {
        "phase": "training",
        "battles": battles,
        "units": config.arena.units,
        "steps_per_s": round(options.updates * ppo.steps_per_update / seconds),
        "agent_steps_per_s": round(lived / seconds),
        "collecting_share": round(collected / seconds, 3),
        "learning_units": ppo.env.num_envs,
        "num_steps": config.ppo.num_steps,
        "num_epochs": config.ppo.num_epochs,
        "precision": options.precision,
        "peak_memory": memory.peak(),
    }


def _memory(device: torch.device) -> CudaMemory | ResidentMemory:
    return CudaMemory(device) if device.type == "cuda" else ResidentMemory()


def _printed(record: Record) -> None:
    print(json.dumps(record), flush=True)


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--battles", type=_counts, default=[256], help="numbers of battles at once, each measured")
    parser.add_argument("--training-battles", type=_counts, default=[], help="likewise, for training; none by default")
    parser.add_argument("--team-size", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="decisions before the clock starts")
    parser.add_argument("--decisions", type=int, default=30, help="decisions in each of five windows that are timed")
    parser.add_argument("--updates", type=int, default=5, help="updates that are timed")
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="a file for the records besides the terminal")
    options = parser.parse_args()
    device = find_device(options.device)
    phases: list[tuple[Callable[[int, argparse.Namespace, torch.device], Record], list[int]]] = [
        (simulation, options.battles),
        (training, options.training_battles),
    ]
    write = Output(options.output).write if options.output else _printed
    with threads(options.threads):
        for measure, counts in phases:
            for battles in counts:
                write({**measure(battles, options, device), "device": device.type})


if __name__ == "__main__":
    main()
