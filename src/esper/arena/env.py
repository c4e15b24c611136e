"""The arena as a `vecenv`: every unit of every battle is a row, and the caller drives both sides.

A unit's episode ends when it dies or its battle ends. Rows of dead units are not valid until the next battle begins. Units observe the
clock and both scores, so a battle that ends by time terminates; nothing is truncated.

Shapes: B = battles, U = units, N = B·U rows, all units of the first battle first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper.arena.arena import Arena, StepResult
from esper.arena.config import ArenaConfig
from esper.arena.observe import observation_width, state_width
from esper.vecenv import Actions, Obs, ObservationSpec, TensorSpec, Timestep


def observation_spec(config: ArenaConfig) -> ObservationSpec:
    spec = {"obs": TensorSpec((observation_width(config),))}
    return {**spec, "state": TensorSpec((state_width(config),))} if config.state_view else spec


class ArenaEnv:
    """An `Arena` with the interface of `esper.vecenv`. `result` is the result of the last step, by battle."""

    def __init__(self, config: ArenaConfig | None = None, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.arena = Arena(config, seed=seed, device=device)
        self.config = self.arena.config
        self.device = self.arena.device
        self.num_envs = self.config.battles * self.config.units
        self.observation_spec = observation_spec(self.config)
        self.action_spec = self.arena.action_spec
        self.result: StepResult | None = None

    def reset(self, seed: int | None = None) -> Timestep:
        return self._timestep(self.arena.reset(seed))

    def step(self, actions: Actions) -> Timestep:
        return self._timestep(self.arena.step(actions))

    def _timestep(self, result: StepResult) -> Timestep:
        self.result = result
        terminated = ends(result).flatten()

        def own(tensor: Tensor) -> Tensor:
            """Copy the result of a captured step, because the next step overwrites it."""
            return tensor.clone() if self.arena.is_recorded else tensor

        return Timestep(
            obs={name: own(value) for name, value in unit_rows(result).items()},
            reward=own(result.reward.flatten()),
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            masks={name: own(mask) for name, mask in result.masks.items()},
            valid=own(result.was_alive.flatten()) if not result.is_first else None,
        )

    def close(self) -> None:
        """Raise if an action had a wrong value, which a GPU does not report at once."""
        self.arena.check()

    def state_dict(self) -> dict[str, Any]:
        return self.arena.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.arena.load_state_dict(state)


def ends(result: StepResult) -> Tensor:
    """Return the units [B, U] bool whose episode ended: they were alive, and died in this decision or their battle ended."""
    return result.was_alive & (result.died | result.ended.unsqueeze(1))


def unit_rows(result: StepResult) -> Obs:
    """Return observations with one row for every unit [B·U, ...]."""
    rows = {"obs": result.observation.flatten(0, 1)}
    return rows if result.whole is None else {**rows, "state": result.whole.flatten(0, 1)}
