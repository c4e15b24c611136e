"""`esper arena bench` measures how fast battles are fought on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from esper.arena.config import ArenaConfig, TeamSize
from esper.cli.arena_battles import memory_errors, user_errors
from esper.cli.command import CommandResult
from esper.cli.parse import parse
from esper.config import Config, Count, NonNegativeInt, PositiveInt, Threads

if TYPE_CHECKING:
    import torch

DESCRIPTION = """Measures how fast battles are fought here: strong bots on both sides, all rules, observations and masks. Takes seconds to a
minute.

A step is one decision, five ticks of the physics, of one unit, whether it lives or not, as in training; an agent-step is a step of a living
unit. The time is taken in the middle of battles, after --warm-up decisions."""


class BenchArguments(Config):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""
    battles: Count = 256
    """battles that are fought at once"""
    team_size: TeamSize = 5
    """units on each side"""
    decisions: PositiveInt = 30
    """decisions in each of five windows that are timed; the median counts"""
    warm_up: NonNegativeInt = 50
    """decisions before the clock starts"""
    threads: Threads | None = None
    """CPU threads of torch; None: its own choice"""


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(BenchArguments, argv, prog, description=DESCRIPTION)
    from esper.devices import find_device, threads

    config = ArenaConfig(battles=arguments.battles, team_size=arguments.team_size)
    with user_errors(), memory_errors(config), threads(arguments.threads):
        device = find_device(arguments.device)
        result = _measured(config, arguments, device)
    print(f"{config.battles} battles of {config.team_size} against {config.team_size} on {result['name']}, strong bots on both sides")
    speed = f"{result['steps_per_s']:,} steps/s, {result['agent_steps_per_s']:,} agent-steps/s"
    print(f"{speed}, {result['ms_per_decision']:.2f} ms for a decision of all battles")
    print(f"{100 * result['living_share']:.0f} % of the units were alive; peak memory {result['peak_memory'] / 2**30:.2f} GiB")
    return CommandResult(result)


def _measured(config: ArenaConfig, arguments: BenchArguments, device: torch.device) -> dict[str, Any]:
    from esper.arena.speed import measure_speed

    speed = measure_speed(config, device=device, warm_up=arguments.warm_up, decisions=arguments.decisions)
    place = {"device": device.type, "name": _name(device), "battles": config.battles, "units": config.units}
    return {**place, **speed._asdict(), "peak_memory": _peak_memory(device)}


def _name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"the CPU, {count} {'thread' if count == 1 else 'threads'}"


def _peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the GPU as torch saw it, or of this process."""
    import resource
    import sys

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
