"""OpponentSlots in which past selves fight the learner: who sits there, since when, and when another is drawn.

Whoever sits down stays for so many rollouts that a battle can be over, unless it leaves the league before. Those who sit down in the
middle of a battle have none of the memories of who began it, and such a battle says nothing of how hard either is: it is credited to
nobody.

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
    player: PolicyPlayer
    battles: Tensor  # [n] that are fought there
    name: str | None = None  # who sits there; None: the learner's own copy of today
    since: int = 0  # decision at which it sat down
    drawn: int = 0  # update at which it was drawn, perhaps not for the first time


class OpponentSlots:
    """All seats of a training. Past selves stay for `rollouts` rollouts."""

    def __init__(self, opponent_slots: dict[str, OpponentSlot], *, rollouts: int, battles: int, device: torch.device) -> None:
        self._seats, self.rollouts = opponent_slots, rollouts
        self.since = torch.zeros(battles, dtype=torch.int64, device=device)  # decision at which the opponent of each battle sat down

    @property
    def names(self) -> list[str | None]:
        return [opponent_slot.name for opponent_slot in self._seats.values()]

    def name(self, opponent_slot: str) -> str | None:
        return self._seats[opponent_slot].name

    def is_credited(self, age: Tensor, decision: int) -> Tensor:
        """Of battles that are so many decisions old [B] at a decision: whether who sits there fought all of it [B]. Without a seat it is
        always so."""
        return age <= decision - self.since

    def draw(self, league: League, learner: Policy, *, decision: int, update: int, rng: Generator) -> None:
        """Others are drawn, by how hard they are, where the time is up or who sat there has left the league. While there are no past
        selves, the learner of today sits there."""
        chances = league.opponents()
        for opponent_slot in self._seats.values():
            if opponent_slot.name in chances and update - opponent_slot.drawn < self.rollouts:
                continue
            name = str(rng.choice(list(chances), p=list(chances.values()))) if chances else None
            opponent_slot.player.policy.load_state_dict(learner.state_dict() if name is None else league.weights[name])
            opponent_slot.drawn = update
            if name != opponent_slot.name:
                opponent_slot.player.forget()
                opponent_slot.name, opponent_slot.since = name, decision
                self.since[opponent_slot.battles] = decision

    def state_dict(self) -> list[dict[str, Any]]:
        """Who sits where; what the players know and remember is saved by their owner."""
        return [
            {"name": opponent_slot.name or "", "since": opponent_slot.since, "drawn": opponent_slot.drawn}
            for opponent_slot in self._seats.values()
        ]

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        for opponent_slot, told in zip(self._seats.values(), saved, strict=True):
            opponent_slot.name, opponent_slot.since, opponent_slot.drawn = told["name"] or None, told["since"], told["drawn"]
            self.since[opponent_slot.battles] = opponent_slot.since
