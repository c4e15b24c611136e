"""Players: scripted bots and policies that choose the actions of some units of the arena.

Shapes: B = battles, U = units in a battle, T = units in a team, R = rows (units) of one player.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from esper.arena.arena import StepResult
from esper.arena.bots import Bot
from esper.arena.env import unit_rows
from esper.arena.orders import as_motion
from esper.rl.collector import Staging
from esper.rl.policy import Policy
from esper.vecenv import Actions


class Player(Protocol):
    """A bot or a policy that drives some units."""

    rows: Tensor  # [R] int64, indices of its units among the B·U units

    def act(self, result: StepResult) -> Actions:
        """Return the actions of its rows, on the device of the arena."""
        ...


class BotPlayer:
    """A scripted bot. What it draws depends on its seed and on the battle only, so it has no state to save."""

    def __init__(self, bot: Bot, rows: Tensor) -> None:
        self.bot, self.rows = bot, rows

    def act(self, result: StepResult) -> Actions:
        return {name: value[self.rows] for name, value in self.bot.act().items()}


class PolicyPlayer:
    """A policy with one recurrent state per row. It samples actions with `generator`; without one it takes the likeliest.

    The policy may be on another device than the arena: observations and actions are then moved in one transfer each.
    """

    def __init__(self, policy: Policy, rows: Tensor, *, units: int, generator: torch.Generator | None = None) -> None:
        self.policy, self.rows, self.generator = policy, rows, generator
        self.battle = rows // units  # [R] battle of each row
        self.state = policy.initial_state(len(rows))
        self.is_elsewhere = rows.device != policy.device
        self._there, self._back = Staging(policy.device), Staging(rows.device)

    def act(self, result: StepResult) -> Actions:
        seen = {f"obs/{name}": value[self.rows] for name, value in unit_rows(result).items()}
        seen |= {f"masks/{name}": value[self.rows] for name, value in result.masks.items()}
        # The memory of a row is reset where a new battle has begun; after a reset of the arena, that is everywhere.
        seen["starts"] = result.ended[self.battle]
        if result.is_first:
            seen["starts"] = torch.ones_like(seen["starts"])
        if self.is_elsewhere:
            seen = self._there.move(seen)
        actions = self._choose(seen)
        if not self.is_elsewhere:
            return actions
        moved = self._back.move(actions)
        # Wait for the transfers, because the next ones reuse their buffers.
        for device in (self.policy.device, self.rows.device):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return moved

    @torch.inference_mode()
    def _choose(self, seen: dict[str, Tensor]) -> Actions:
        policy, distribution = self.policy, self.policy.distribution
        obs = {name.removeprefix("obs/"): value for name, value in seen.items() if name.startswith("obs/")}
        masks = {name.removeprefix("masks/"): value for name, value in seen.items() if name.startswith("masks/")}
        state = self.state.masked_fill(seen["starts"].unsqueeze(1), 0.0)
        features, self.state = policy.step(policy.normalize(obs), state)
        noise = None if self.generator is None else distribution.noise((len(self.rows),), self.generator)
        return as_motion(distribution.actions(distribution.choose(policy.decide(features), masks, noise)))

    def reset_memory(self) -> None:
        """Reset the recurrent state of all rows, because the policy has changed."""
        self.state = self.policy.initial_state(len(self.rows))

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state = saved["state"].to(self.state.device)


def side_rows(battles: Tensor, sides: Tensor, *, team_size: int) -> Tensor:
    """Return the rows [n·T] of one side of each battle, given battle indices [n] and sides (0 or 1) [n]."""
    first = battles * (2 * team_size) + sides * team_size
    return (first.unsqueeze(1) + torch.arange(team_size, device=battles.device)).flatten()


def join_actions(actions: list[tuple[Tensor, Actions]], rows: int) -> Actions:
    """Return the actions of all `rows` units, given the (rows, actions) of every player."""
    joined: Actions = {}
    for name, value in actions[0][1].items():
        whole = torch.zeros(rows, *value.shape[1:], dtype=value.dtype, device=value.device)
        for player_rows, player_actions in actions:
            whole[player_rows] = player_actions[name]
        joined[name] = whole
    return joined
