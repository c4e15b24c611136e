"""Measure the speed of the arena, with strong bots on both sides in the middle of battles."""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

import torch

from esper.arena.arena import Arena
from esper.arena.bots import Bot
from esper.arena.config import ArenaConfig

WARM_UP = 50  # decisions after which the teams meet; battles last about a hundred
WINDOWS = 5


class Speed(NamedTuple):
    """Speed of an arena. A step is one decision (five ticks) of one unit, alive or not; an agent-step is a step of a living unit."""

    steps_per_s: int
    agent_steps_per_s: int
    ms_per_decision: float  # for all battles together
    living_share: float  # mean share of living units during the measurement
    overflow: int  # shots that were lost because no projectile slot was free
    bytes_per_battle: int  # of state, actions, observations and masks


def measure_speed(
    config: ArenaConfig,
    *,
    device: torch.device,
    seed: int = 0,
    warm_up: int = WARM_UP,
    decisions: int = 30,
    windows: int = WINDOWS,
) -> Speed:
    """Measure the speed of whole decisions: rules, rewards, observations, masks, and the choices of the bots.

    Speeds are medians over windows of `decisions` decisions.
    """
    arena = Arena(config, seed=seed, device=device)
    arena.reset()
    bot = Bot("strong", arena, seed=seed)
    for _ in range(warm_up):
        arena.step(bot.act())
    seconds, lived = list[float](), list[int]()
    for _ in range(windows):
        living = torch.zeros((), dtype=torch.int64, device=device)
        began = _now(device)
        for _ in range(decisions):
            living += arena.step(bot.act()).was_alive.sum()
        seconds.append(_now(device) - began)
        lived.append(int(living))
    arena.check()
    steps, simulation = decisions * config.battles * config.units, arena.simulation
    memory = (*simulation.state.values(), *simulation.actions.values(), *simulation.views.values())
    return Speed(
        steps_per_s=round(median(steps / second for second in seconds)),
        agent_steps_per_s=round(median(count / second for count, second in zip(lived, seconds, strict=True))),
        ms_per_decision=round(1e3 * median(seconds) / decisions, 3),
        living_share=round(sum(lived) / (windows * steps), 3),
        overflow=int(arena.overflow.sum()),
        bytes_per_battle=sum(tensor.nbytes for tensor in memory) // config.battles,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
