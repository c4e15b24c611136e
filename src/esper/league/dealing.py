"""Divide the battles of a run among the opponents of the learner."""

from __future__ import annotations

import itertools
import math

from esper.league.training_config import SelfPlayConfig

SELF = "self"  # name of the group in which the learner plays both sides
_SEAT = "seat "  # opponent slots are named "seat 0", "seat 1", ...


def is_seat(name: str) -> bool:
    """Return whether a group of battles belongs to an opponent slot."""
    return name.startswith(_SEAT)


def deal(config: SelfPlayConfig, battles: int) -> dict[str, int]:
    """Return the number of battles per opponent: bots by name, opponent slots ("seat 0"), and the rest as "self".

    Raises ValueError if the shares would leave an opponent without a battle.

    >>> deal(SelfPlayConfig(bots=("weak", "strong"), bot_share=0.5, past_share=0.25, past_seats=2), 16)
    {'weak': 4, 'strong': 4, 'seat 0': 2, 'seat 1': 2, 'self': 4}
    """
    shares = _shares(config)
    dealt = _dealt(shares, battles)
    if not _is_fair(dealt):
        # Find the smallest number of battles that works. Below 0.5 / share, the count of an opponent is rounded to 0.
        candidates = itertools.count(max(battles, math.floor(0.5 / min(shares.values()))))
        enough = next(number for number in candidates if _is_fair(_dealt(shares, number)))
        raise ValueError(f"{battles} battles cannot be dealt to {dealt}, at least one to each opponent; use at least {enough} battles")
    return {name: count for name, count in dealt.items() if count}


def _shares(config: SelfPlayConfig) -> dict[str, float]:
    """Return the share of all battles per opponent, without the learner itself."""
    bots = {str(name): config.bot_share * config.bots.count(name) / len(config.bots) for name in config.bots} if config.bot_share else {}
    slots = {f"{_SEAT}{index}": config.past_share / config.past_seats for index in range(config.past_seats)} if config.past_share else {}
    return {**bots, **slots}


def _dealt(shares: dict[str, float], battles: int) -> dict[str, int]:
    """Round the shares to whole battles; the rest goes to SELF and may be negative."""
    counts = {name: round(battles * share) for name, share in shares.items()}
    return {**counts, SELF: battles - sum(counts.values())}


def _is_fair(dealt: dict[str, int]) -> bool:
    """Return whether every opponent has a battle and no battle is dealt twice."""
    return dealt[SELF] >= 0 and all(count > 0 for name, count in dealt.items() if name != SELF)
