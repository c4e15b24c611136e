"""Measure the memory of self-play over many updates of a small learner.

    python benchmarks/arena/memory.py --device cuda --updates 2000

Battles are tiny and short, so everything happens many times: battles begin anew, past selves enter, are promoted and retire, slots are
filled, the player is evaluated. A line gives the resident size of the process, which is read from /proc and hence on Linux only, and on a
GPU what torch has allocated and reserved. The last line gives the growth after the first quarter, when all buffers exist and the league is
full.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import gc
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.arena.config import ArenaConfig, ArenaRewardConfig
from esper.league.config import ArenaTrainConfig, LeagueConfig, SelfPlayConfig, UnitNetworkConfig
from esper.league.selfplay import SelfPlay
from esper.league.training import BotEvaluator, prepare_arena
from esper.rl.config import NetworkConfig, PPOConfig

EVERY = 250  # updates between two lines
JUDGED = 50  # updates between two evaluations, at most


def config_for(device: str, battles: int) -> ArenaTrainConfig:
    """Every candidate is promoted, so the league is full after four of them; the learner enters it every 50 updates."""
    return ArenaTrainConfig(
        arena=ArenaConfig(battles=battles, team_size=2, size=16, maps=4, seconds=4.0, contacts=2, allies=1),
        selfplay=SelfPlayConfig(bot_share=0.5, past_share=0.25, enter_every=50, entry_battles=4),
        league=LeagueConfig(size=4, promote_at=0.0),
        unit=UnitNetworkConfig(entity_width=8, terrain_width=16, width=32, head_width=16),
        ppo=PPOConfig(
            num_steps=8,
            num_epochs=1,
            num_minibatches=2,
            bptt_length=8,
            gamma=ArenaRewardConfig().gamma,
            normalize_observations=False,
            network=NetworkConfig(hidden_size=32),
        ),
        device="cuda" if device == "cuda" else "cpu",
        eval_battles=4,
    )


def memory(device: torch.device) -> dict[str, int]:
    gc.collect()
    held = {"resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held |= {"allocated_bytes": torch.cuda.memory_allocated(device), "reserved_bytes": torch.cuda.memory_reserved(device)}
    return held


def slope(at: dict[int, int]) -> float:
    """Bytes per update, without the first quarter."""
    settled = [number for number in at if number >= max(at) / 4]
    return float(np.polyfit(settled, [at[number] for number in settled], 1)[0]) if len(settled) > 1 else 0.0


def measure(device: str, updates: int, battles: int, every: int) -> dict[str, Any]:
    told: dict[str, dict[int, int]] = {}
    began = time.perf_counter()
    config = config_for(device, battles)
    with prepare_arena(config) as (ppo, relay), contextlib.closing(BotEvaluator(config)) as evaluator:  # kept, as a run keeps it
        relay.connect(lambda event: None)  # it would keep all events for a log that never comes
        assert isinstance(ppo.env, SelfPlay)
        for update in ppo.train(updates * ppo.steps_per_update):
            if update.update % min(every, JUDGED) == 0:
                evaluator.score(ppo.policy, 0)
            if update.update % every and update.update != updates:
                continue
            held = memory(ppo.device)
            for name, size in held.items():
                told.setdefault(name, {})[update.update] = size
            line = {"update": update.update, **held, "league_members": len(ppo.env.league.members)}
            print(json.dumps({**line, "seconds": round(time.perf_counter() - began, 1)}), flush=True)
    growth = {name.replace("_bytes", "_bytes_per_update"): slope(at) for name, at in told.items()}
    return {"device": device, "updates": updates, "battles": battles, **growth}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--updates", type=int, default=2_000)
    parser.add_argument("--battles", type=int, default=16)
    parser.add_argument("--every", type=int, default=EVERY, help="updates between two lines")
    options = parser.parse_args(arguments)
    print(json.dumps(measure(options.device, options.updates, options.battles, options.every)))


if __name__ == "__main__":
    main()
