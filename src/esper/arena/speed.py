"""Measure the speed of the arena, with strong bots on both sides in the middle of battles."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from esper.arena.arena import Arena
from esper.arena.bots import Bot
from esper.arena.config import ArenaConfig

WARM_UP = 50  # decisions after which the teams meet; battles last about a hundred


class Speed(NamedTuple):
    """Speed of an arena. A step is one decision (five ticks) of one unit, alive or not; an agent-step is a step of a living unit."""

    steps_per_s: int
    agent_steps_per_s: int
    ms_per_decision: float  # for all battles together
    living_share: float  # mean share of living units during the measurement
    overflow: int  # shots that were lost because no projectile slot was free


def measure_speed(
    config: ArenaConfig, *, device: torch.device, seed: int = 0, warm_up: int = WARM_UP, decisions: int = 60, compile: bool = False
) -> Speed:
    """Measure the speed of whole decisions: rules, observations, masks, and the choices of the bots."""
    arena = Arena(config, seed=seed, device=device, compile=compile)
    arena.reset()
    bot = Bot("strong", arena, seed=seed)
    for _ in range(warm_up):
        arena.step(bot.act())
    lived = torch.zeros((), dtype=torch.int64, device=device)
    began = _now(device)
    for _ in range(decisions):
        lived += arena.step(bot.act()).was_alive.sum()
    seconds = _now(device) - began
    arena.check()
    steps = int(lived)
    return Speed(
        steps_per_s=round(decisions * config.battles * config.units / seconds),
        agent_steps_per_s=round(steps / seconds),
        ms_per_decision=round(1e3 * seconds / decisions, 3),
        living_share=round(steps / (decisions * config.battles * config.units), 3),
        overflow=int(arena.state.status.overflow.sum()),
    )


def _now(device: torch.device) -> float:
    """Return the time after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
