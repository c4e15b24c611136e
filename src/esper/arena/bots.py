"""Scripted players in four strengths, and a random one.

A bot knows what a policy observes: its own condition, the zone and the route to it, and the contacts that its unit senses, nearest first.
It returns the same kind of actions. The code is in `esper.arena.native.bots`, the settings of each in `esper.arena.skills`.

    weak    walks to the zone, stands still to shoot, with the first weapon that reaches a contact, at the nearest that it reaches
    middle  keeps moving while it shoots, picks the weapon with the most damage per time, vents when it is hot
    strong  prefers targets that are nearly dead, never overheats by firing, vents when no enemy is near, keeps the best distance for its
            class, and a longer one when it is damaged or hot
    expert  vents whenever it has no shot, weighs damage against heat, holds uncertain shots, shoots at what allies are near to, circles
            enemies at full speed, goes to its allies when it is outnumbered, hides behind smoke, flies over walls and to dodge

Weak and middle also flip coins, so that a match of one of them against itself is decided. `middle-v1`, `strong-v1` and `expert-v1` are
these bots as they are now: a bot with a version in its name never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from esper.arena.config import BOTS
from esper.vecenv import Actions

if TYPE_CHECKING:
    from esper.arena.arena import Arena


class Bot:
    """A scripted player of one arena. `act` returns actions for all units of all battles; callers take the rows they need."""

    def __init__(self, name: str, arena: Arena, *, seed: int = 0) -> None:
        self.arena = arena
        self._actions = {head: torch.zeros_like(value) for head, value in arena.simulation.actions.items()}
        self._bots = torch.empty(2, arena.config.battles, dtype=torch.int32, device=arena.device)
        self.become(name, seed=seed)

    def become(self, name: str, *, seed: int) -> None:
        """Play as another bot from now on.

        This reuses memory and CUDA graph. The driver keeps host memory of every graph that is deleted, so matches should not make new ones.
        """
        if name not in BOTS:
            raise ValueError(f"no bot is named {name!r}; there are {', '.join(BOTS)}")
        self.name, self.seed = name, seed
        self._bots.fill_(BOTS.index(name))

    def act(self) -> Actions:
        """Return actions of all units in the present state of the arena. The next call overwrites them."""
        self.arena.simulation.act(self._bots, salt=self.seed, into=self._actions)
        return self._actions
