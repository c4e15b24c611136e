"""Who drives units: a scripted bot or a policy, each for some rows of the arena.

Shapes: B = battles, U = units, R = rows of one player.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from esper.arena.arena import StepResult
from esper.arena.bots import Bot
from esper.arena.env import unit_rows
from esper.rl.collector import Staging
from esper.rl.policy import Policy
from esper.vecenv import Actions


class Player(Protocol):
    rows: Tensor  # [R] int64, which of the B·U units it drives

    def act(self, result: StepResult) -> Actions:
        """Actions of its rows, on the scene's device."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on exactly, but for weights."""
        ...

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


class BotPlayer:
    """A scripted bot."""

    def __init__(self, bot: Bot, rows: Tensor) -> None:
        self.bot, self.rows = bot, rows

    def act(self, result: StepResult) -> Actions:
        return {name: value[self.rows] for name, value in self.bot.act().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.bot.generator.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.bot.generator.set_state(saved["generator"].cpu())


class PolicyPlayer:
    """A policy with a memory for each of its rows. With a generator it draws its actions, without one they are the likeliest.

    It may live on another device than the arena: what it sees goes there, and what it does comes back, in one transfer each.
    """

    def __init__(self, policy: Policy, rows: Tensor, *, units: int, generator: torch.Generator | None = None) -> None:
        self.policy, self.rows, self.generator = policy, rows, generator
        self.battle = rows // units
        self.state = policy.initial_state(len(rows))
        self.is_elsewhere = rows.device != policy.device
        self._there, self._back = Staging(policy.device), Staging(rows.device)

    def act(self, result: StepResult) -> Actions:
        seen = {f"obs/{name}": value[self.rows] for name, value in unit_rows(result).items()}
        seen |= {f"masks/{name}": value[self.rows] for name, value in result.masks.items()}
        seen["starts"] = result.ended[self.battle]
        if result.is_first:
            seen["starts"] = torch.ones_like(seen["starts"])
        if self.is_elsewhere:
            seen = self._there.move(seen)
        actions = self._choose(seen)
        if not self.is_elsewhere:
            return actions
        moved = self._back.move(actions)
        torch.cuda.synchronize()  # the next transfer writes over this one
        return moved

    @torch.no_grad()
    def _choose(self, seen: dict[str, Tensor]) -> Actions:
        policy, distribution = self.policy, self.policy.distribution
        obs = {name.removeprefix("obs/"): value for name, value in seen.items() if name.startswith("obs/")}
        masks = {name.removeprefix("masks/"): value for name, value in seen.items() if name.startswith("masks/")}
        state = self.state.masked_fill(seen["starts"].unsqueeze(1), 0.0)
        features, self.state = policy.step(policy.normalize(obs), state)
        noise = None if self.generator is None else distribution.noise((len(self.rows),), self.generator)
        return distribution.actions(distribution.choose(policy.decide(features), masks, noise))

    def forget(self) -> None:
        """Its memories: they mean nothing to another policy."""
        self.state = self.policy.initial_state(len(self.rows))

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state = saved["state"].to(self.state.device)


def side_rows(battles: Tensor, sides: Tensor, *, team_size: int) -> Tensor:
    """The rows [len·T] of one side of some battles: `sides` says which, 0 or 1, for each of `battles`."""
    first = battles * (2 * team_size) + sides * team_size
    return (first.unsqueeze(1) + torch.arange(team_size, device=battles.device)).flatten()


def join(actions: list[tuple[Tensor, Actions]], rows: int) -> Actions:
    """The actions of all units from those of all players, given with their rows."""
    together: Actions = {}
    for name, value in actions[0][1].items():
        whole = torch.zeros(rows, *value.shape[1:], dtype=value.dtype, device=value.device)
        for where, theirs in actions:
            whole[where] = theirs[name]
        together[name] = whole
    return together
