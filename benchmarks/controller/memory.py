"""Memory of a controller's training over many rounds of tiny hosts: whether it grows, and how many of its fleets are used again.

    python benchmarks/controller/memory.py --rounds 500 --device cuda

Every 10 rounds: the resident size of the process, and on CUDA the bytes of tensors and those that are held for them. The slope is that of a
line through the second half of the training, by when all shapes of fleets were seen.

Linux only: resident sizes are read from /proc.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec
import torch

from esper.controller.config import ControllerConfig, DomainConfig
from esper.controller.lives import Lives
from esper.controller.training import prepare_controller

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import RESULTS, Output, Record
from benchmarks.rl.memory import fit, resident_bytes

EVERY = 10  # rounds between two looks


def config(options: argparse.Namespace) -> ControllerConfig:
    domain = DomainConfig(
        shapes=options.shapes,
        sources=("digits", "teacher"),
        families=("mlp", "conv"),
        width=(2, 4),
        blocks=(1, 2),
        horizon=(8, 12),
        samples_of_a_life=(2_000, 4_000),
    )
    rounds, ppo = options.rounds, msgspec.structs.replace(ControllerConfig().ppo, num_minibatches=2)
    return ControllerConfig(
        hosts=8, fleets=2, rounds=rounds, resident=options.resident, device=options.device, threads=1, domain=domain, ppo=ppo
    )


def memory(device: str) -> Record:
    held: Record = {"resident_bytes": resident_bytes()}
    if device == "cuda":
        held |= {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
    return held


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--shapes", type=int, default=16, help="shapes of fleets that the rounds take turns with")
    parser.add_argument("--resident", type=int, default=16, help="fleets that are kept; 0: build every fleet anew")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "controller_memory.jsonl")
    options = parser.parse_args(arguments)
    output, settings = Output(options.out), config(options)
    looks: list[Record] = []
    began = time.perf_counter()
    with prepare_controller(settings) as (ppo, relay):
        relay.connect(lambda event: None)  # without a log, it would keep all events
        lives = ppo.collector
        assert isinstance(lives, Lives)
        for number, _ in enumerate(ppo.train(settings.total_steps), start=1):
            if number % EVERY == 0 or number == 1:
                fleets = {"built": lives.pool.built, "reused": lives.pool.reused}
                looks.append({"round": number, "seconds": time.perf_counter() - began, **fleets, **memory(options.device)})
                output.write(looks[-1])
    settled = [look for look in looks if look["round"] >= options.rounds / 2]
    rounds = [look["round"] for look in settled]
    slopes = {f"slope_{name}_per_round": fit(rounds, [look[name] for look in settled]).slope for name in memory(options.device)}
    output.write({"rounds": options.rounds, "share_reused": lives.pool.reused / (lives.pool.built + lives.pool.reused), **slopes})


if __name__ == "__main__":
    main()
