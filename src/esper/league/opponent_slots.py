"""Opponent slots: which past selves fight the learner, since when, and when they are replaced.

A past self fills a slot for a fixed number of rollouts, or until it leaves the league. When the player of a slot changes in the middle of
a battle, the new player lacks the memories of the old one, so the result says little about either. Such a battle is not counted.

Shapes: B = battles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor

from esper.league.league import League
from esper.league.players import PolicyPlayer
from esper.rl.policy import Policy


@dataclass
class OpponentSlot:
    """One opponent of the learner that changes over time, and the battles it fights."""

    player: PolicyPlayer
    battles: Tensor  # [n] indices of its battles
    name: str | None = None  # member of the league; None: a copy of the current learner
    since: int = 0  # decision at which this player took the slot
    drawn: int = 0  # update of the last draw, which may have chosen the same player again


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
        """Return whether the opponent fought the whole battle [B], given the age of each battle [B] in decisions.

        True for all battles without a slot.
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
                slot.player.forget()
                slot.name, slot.since = name, decision
                self.since[slot.battles] = decision

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the player of each slot. The owner of the players saves their weights and memories."""
        return [{"name": slot.name or "", "since": slot.since, "drawn": slot.drawn} for slot in self._slots.values()]

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        for slot, state in zip(self._slots.values(), saved, strict=True):
            slot.name, slot.since, slot.drawn = state["name"] or None, state["since"], state["drawn"]
            self.since[slot.battles] = slot.since
