"""Opponents of the learner: their shares of the battles, the bots, and the past selves that fill the opponent slots.

The battles of a run are divided once, at the start, into groups: one for all bots, one for each opponent slot, and the rest, in which the
learner plays both sides. Every battle against a bot draws its bot when it begins. A past self fills a slot for a fixed number of rollouts,
or until it leaves the league. When the player of a slot changes in the middle of a battle, the new player lacks the memories of the old
one, so the result says little about either. Such a battle is not counted.

Shapes: B = battles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from esper.arena.arena import Arena, StepResult
from esper.arena.config import BOTS
from esper.league.config import SelfPlayConfig
from esper.league.league import League
from esper.league.players import PolicyPlayer
from esper.rl.policy import Policy
from esper.vecenv import Actions

SELF = "self"  # name of the group in which the learner plays both sides
SCRIPTED = "bots"  # name of the group of the bots
_SLOT = "slot "  # groups of opponent slots are named "slot 0", "slot 1", ...


def is_slot(name: str) -> bool:
    """Return whether a group of battles belongs to an opponent slot."""
    return name.startswith(_SLOT)


def divide_battles(config: SelfPlayConfig, battles: int) -> dict[str, int]:
    """Return the number of battles per group: "bots", opponent slots ("slot 0"), and the rest as "self".

    Raises ValueError if the shares would leave a group without a battle.

    >>> divide_battles(SelfPlayConfig(bot_share=0.5, past_share=0.25, opponent_slots=2), 16)
    {'bots': 8, 'slot 0': 2, 'slot 1': 2, 'self': 4}
    """
    # Share of all battles per group, without the learner itself.
    shares: dict[str, float] = {}
    if config.bot_share:
        shares[SCRIPTED] = config.bot_share
    if config.past_share:
        shares |= {f"{_SLOT}{index}": config.past_share / config.opponent_slots for index in range(config.opponent_slots)}
    counts = _rounded(shares, battles)
    if not _is_fair(counts):
        # Find the smallest number of battles that works. Below 0.5 / share, the count of an opponent is rounded to 0.
        candidates = itertools.count(max(battles, math.floor(0.5 / min(shares.values()))))
        enough = next(number for number in candidates if _is_fair(_rounded(shares, number)))
        raise ValueError(
            f"{battles} battles cannot be divided into {counts}, at least one for each opponent; use at least {enough} battles"
        )
    return {name: count for name, count in counts.items() if count}


def _rounded(shares: dict[str, float], battles: int) -> dict[str, int]:
    """Round the shares to whole battles; the rest goes to SELF and may be negative."""
    counts = {name: round(battles * share) for name, share in shares.items()}
    return {**counts, SELF: battles - sum(counts.values())}


def _is_fair(counts: dict[str, int]) -> bool:
    """Return whether every opponent has a battle and no battle is counted twice."""
    return counts[SELF] >= 0 and all(count > 0 for name, count in counts.items() if name != SELF)


class BotOpponents:
    """The bots of some battles, [n] indices, on the given sides [n]. A battle keeps its bot until it ends."""

    def __init__(self, arena: Arena, battles: Tensor, sides: Tensor, *, seed: int) -> None:
        self.arena, self.seed = arena, seed
        self.is_bot = torch.zeros(2, arena.config.battles, dtype=torch.bool, device=arena.device)
        self.is_bot[sides, battles] = True
        self.bots = torch.full((2, arena.config.battles), -1, dtype=torch.int32, device=arena.device)  # index in BOTS; -1: no bot
        self.next = torch.zeros(arena.config.battles, dtype=torch.int32, device=arena.device)

    def draw(self, chances: Mapping[str, float], rng: Generator) -> None:
        """Draw the bots of the battles that begin from now on."""
        numbers = [BOTS.index(name) for name in chances]
        drawn = rng.choice(numbers, size=len(self.next), p=list(chances.values()))
        self.next.copy_(torch.from_numpy(drawn.astype(np.int32)))

    def begin(self) -> None:
        """Give every battle its next bot."""
        self.bots.copy_(torch.where(self.is_bot, self.next, -1))

    def follow(self, result: StepResult) -> None:
        """Give battles that have ended their next bots."""
        self.bots.copy_(torch.where(self.is_bot & result.ended, self.next, self.bots))

    def act(self, actions: Actions) -> None:
        """Write the actions of the bots' units."""
        self.arena.simulation.act(self.bots, salt=self.seed, into=actions)

    def state_dict(self) -> dict[str, Any]:
        return {"bots": self.bots.clone(), "next": self.next.clone()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.bots.copy_(saved["bots"])
        self.next.copy_(saved["next"])


@dataclass
class OpponentSlot:
    """One opponent of the learner that changes over time, and the battles it fights."""

    player: PolicyPlayer
    battles: Tensor  # [n] indices of its battles
    name: str | None = None  # member of the league; None: a copy of the current learner
    since: int = 0  # decision at which this player took the slot
    drawn: int = 0  # update at which this player was last drawn; it may be drawn several times in a row


class OpponentSlots:
    """All opponent slots of a run, by name. A past self stays in its slot for `rollouts` rollouts."""

    def __init__(self, opponent_slots: dict[str, OpponentSlot], *, rollouts: int, battles: int, device: torch.device) -> None:
        self._slots, self.rollouts = opponent_slots, rollouts
        self.since = torch.zeros(battles, dtype=torch.int64, device=device)  # [B] decision at which the opponent of each battle joined it

    @property
    def names(self) -> list[str | None]:
        """Players of all slots; None stands for a copy of the current learner."""
        return [slot.name for slot in self._slots.values()]

    def name(self, opponent_slot: str) -> str | None:
        """Return the player of one slot, given the name of the slot."""
        return self._slots[opponent_slot].name

    def is_credited(self, age: Tensor, decision: int) -> Tensor:
        """Return whether each opponent fought its whole battle [B], given the age of each battle [B] in decisions.

        It is true for all battles without a slot.
        """
        return age <= decision - self.since

    def draw(self, league: League, learner: Policy, *, decision: int, update: int, rng: Generator) -> None:
        """Draw a new player, by hardness, for each slot whose time is up or whose player has left the league.

        While the league has no members, every slot holds a copy of the current learner.
        """
        chances = league.opponents()
        for slot in self._slots.values():
            if slot.name in chances and update - slot.drawn < self.rollouts:
                continue
            name = str(rng.choice(list(chances), p=list(chances.values()))) if chances else None
            slot.player.policy.load_state_dict(learner.state_dict() if name is None else league.weights[name])
            slot.drawn = update
            if name != slot.name:
                slot.player.reset_memory()
                slot.name, slot.since = name, decision
                self.since[slot.battles] = decision

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the player of each slot. The owner of the players saves their weights and memories."""
        return [{"name": slot.name or "", "since": slot.since, "drawn": slot.drawn} for slot in self._slots.values()]

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        for slot, state in zip(self._slots.values(), saved, strict=True):
            slot.name, slot.since, slot.drawn = state["name"] or None, state["since"], state["drawn"]
            self.since[slot.battles] = slot.since
