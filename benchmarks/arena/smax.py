"""How fast SMAX is, the batched team battle of JaxMARL, measured as `speed.py` measures ours.

    python -m venv /tmp/jaxmarl && /tmp/jaxmarl/bin/pip install jaxmarl
    /tmp/jaxmarl/bin/python benchmarks/arena/smax.py --battles 256,1024 --output benchmarks/results/arena_smax_cpu.jsonl

An agent-step is one decision of a living unit: 5 against 5 marines on open ground, both teams driven by SMAX's own heuristic, with
observations, allowed actions, rewards and resets, in one compiled function for all battles and decisions. A decision is eight ticks there.
It is another game, with much simpler rules: no terrain, projectiles, heat or lines of sight. Median of five windows after a warm-up.
Needs no torch, so it runs in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxmarl.environments.smax import SMAX
from jaxmarl.environments.smax.heuristic_enemy import create_heuristic_policy, get_heuristic_policy_initial_state
from jaxmarl.environments.smax.smax_env import Scenario

TEAM = 5
WINDOWS = 5


def make_window(battles: int, decisions: int) -> tuple[Any, Any]:
    """Return the first state of the battles, and a function that takes some decisions and counts the living units."""
    env = SMAX(scenario=Scenario(jnp.zeros((2 * TEAM,), dtype=jnp.uint8), TEAM, TEAM, False, False))
    act = [create_heuristic_policy(env, team=team) for team in (0, 1)]
    names = (env.agents[:TEAM], env.agents[TEAM:])

    def decide(carry: Any, _: Any) -> tuple[Any, Any]:
        key, obs, state, memory = carry
        key, own, step_key = jax.random.split(key, 3)
        actions, kept = {}, []
        for team, agents in enumerate(names):
            seen = jnp.stack([obs[agent] for agent in agents])  # [TEAM, width]
            chosen, after = jax.vmap(act[team])(jax.random.split(jax.random.fold_in(own, team), TEAM), memory[team], seen)
            actions |= {agent: chosen[index] for index, agent in enumerate(agents)}
            kept.append(after)
        living = state.unit_alive.sum()
        obs, state, _, _, _ = env.step(step_key, state, actions)  # a battle that ends begins anew
        return (key, obs, state, tuple(kept)), (living, sum(mask.sum() for mask in env.get_avail_actions(state).values()))

    def begin(key: Any) -> Any:
        obs, state = env.reset(key)
        fresh = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (TEAM, *jnp.shape(leaf))), get_heuristic_policy_initial_state())
        return key, obs, state, (fresh, fresh)

    first = jax.jit(jax.vmap(begin))(jax.random.split(jax.random.key(0), battles))
    return first, jax.jit(jax.vmap(lambda carry: jax.lax.scan(decide, carry, None, length=decisions)))


def measure(battles: int, options: argparse.Namespace) -> dict[str, Any]:
    carry, window = make_window(battles, options.decisions)
    for _ in range(-(-options.warm_up // options.decisions)):
        carry, _ = jax.block_until_ready(window(carry))
    speeds, shares = [], []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        carry, (living, _) = jax.block_until_ready(window(carry))
        count = int(living.sum())
        speeds.append(count / (time.perf_counter() - began))
        shares.append(count / (battles * 2 * TEAM * options.decisions))
    return {
        "battles": battles,
        "units": 2 * TEAM,
        "agent_steps_per_s": round(statistics.median(speeds)),
        "living_share": statistics.mean(shares),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--battles", type=lambda text: [int(part) for part in text.split(",")], default=[256])
    parser.add_argument("--warm-up", type=int, default=60, help="decisions before the clock starts")
    parser.add_argument("--decisions", type=int, default=30, help="decisions in each of five windows that are timed")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    about = {
        "command": f"python benchmarks/arena/smax.py --battles {','.join(map(str, options.battles))}",
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **{name: version(name) for name in ("jaxmarl", "jax")},
    }
    records = [about]
    for battles in options.battles:
        records.append(measure(battles, options))
        print(json.dumps(records[-1]), flush=True)
    if options.output is not None:
        options.output.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
