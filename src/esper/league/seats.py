"""Seats in which past selves fight the learner: who sits there, since when, and when another is drawn.

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
class Seat:
    player: PolicyPlayer
    battles: Tensor  # [n] that are fought there
    name: str | None = None  # who sits there; None: the learner's own copy of today
    since: int = 0  # decision at which it sat down
    drawn: int = 0  # update at which it was drawn, perhaps not for the first time


class Seats:
    """All seats of a training. Past selves stay for `rollouts` rollouts."""

    def __init__(self, seats: dict[str, Seat], *, rollouts: int, battles: int, device: torch.device) -> None:
        self._seats, self.rollouts = seats, rollouts
        self.since = torch.zeros(battles, dtype=torch.int64, device=device)  # decision at which the opponent of each battle sat down

    @property
    def names(self) -> list[str | None]:
        return [seat.name for seat in self._seats.values()]

    def name(self, seat: str) -> str | None:
        return self._seats[seat].name

    def is_credited(self, age: Tensor, decision: int) -> Tensor:
        """Of battles that are so many decisions old [B] at a decision: whether who sits there fought all of it [B]. Without a seat it is
        always so."""
        return age <= decision - self.since

    def draw(self, league: League, learner: Policy, *, decision: int, update: int, rng: Generator) -> None:
        """Others are drawn, by how hard they are, where the time is up or who sat there has left the league. While there are no past
        selves, the learner of today sits there."""
        chances = league.opponents()
        for seat in self._seats.values():
            if seat.name in chances and update - seat.drawn < self.rollouts:
                continue
            name = str(rng.choice(list(chances), p=list(chances.values()))) if chances else None
            seat.player.policy.load_state_dict(learner.state_dict() if name is None else league.weights[name])
            seat.drawn = update
            if name != seat.name:
                seat.player.forget()
                seat.name, seat.since = name, decision
                self.since[seat.battles] = decision

    def state_dict(self) -> list[dict[str, Any]]:
        """Who sits where; what the players know and remember is saved by their owner."""
        return [{"name": seat.name or "", "since": seat.since, "drawn": seat.drawn} for seat in self._seats.values()]

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        for seat, told in zip(self._seats.values(), saved, strict=True):
            seat.name, seat.since, seat.drawn = told["name"] or None, told["since"], told["drawn"]
            self.since[seat.battles] = seat.since
