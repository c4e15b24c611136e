"""How the battles of a training are dealt to opponents."""

from __future__ import annotations

import itertools
import math

from esper.league.training_config import SelfPlayConfig

SELF = "self"  # both sides are the learner
_SEAT = "seat "


def is_seat(name: str) -> bool:
    return name.startswith(_SEAT)


def deal(config: SelfPlayConfig, battles: int) -> dict[str, int]:
    """Battles by opponent: bots by their names, seats for past selves, and last what is left, where the learner fights itself.

    >>> deal(SelfPlayConfig(bots=("weak", "strong"), bot_share=0.5, past_share=0.25, past_seats=2), 16)
    {'weak': 4, 'strong': 4, 'seat 0': 2, 'seat 1': 2, 'self': 4}
    """
    shares = _shares(config)
    dealt = _dealt(shares, battles)
    if not _is_fair(dealt):
        from_here = itertools.count(max(battles, math.floor(0.5 / min(shares.values()))))
        enough = next(number for number in from_here if _is_fair(_dealt(shares, number)))
        raise ValueError(f"{battles} battles cannot be dealt to {dealt}, at least one to each opponent; use at least {enough} battles")
    return {name: count for name, count in dealt.items() if count}


def _shares(config: SelfPlayConfig) -> dict[str, float]:
    """Of all battles, those that the learner fights against itself left out."""
    bots = {str(name): config.bot_share * config.bots.count(name) / len(config.bots) for name in config.bots} if config.bot_share else {}
    opponent_slots = (
        {f"{_SEAT}{index}": config.past_share / config.past_seats for index in range(config.past_seats)} if config.past_share else {}
    )
    return {**bots, **opponent_slots}


def _dealt(shares: dict[str, float], battles: int) -> dict[str, int]:
    counts = {name: round(battles * share) for name, share in shares.items()}
    return {**counts, SELF: battles - sum(counts.values())}


def _is_fair(dealt: dict[str, int]) -> bool:
    return dealt[SELF] >= 0 and all(count > 0 for name, count in dealt.items() if name != SELF)
