"""The arena as a `vecenv`: every unit of every battle is a row, and the caller drives both sides.

A unit's episode ends with its battle. A dead unit cannot act, but gets what its team gets, so its row teaches values only. If the dead are
not paid (`ArenaRewardConfig.pays_dead`), an episode ends with the unit's death, and its row is not valid until the next battle begins.
Units observe the clock and both scores, so a battle that ends by time terminates; nothing is truncated.

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
        self._rows = torch.arange(self.num_envs, device=self.device)

    def reset(self, seed: int | None = None) -> Timestep:
        return self._timestep(self.arena.reset(seed))

    def step(self, actions: Actions) -> Timestep:
        return self._timestep(self.arena.step(actions))

    def _timestep(self, result: StepResult) -> Timestep:
        self.result = result
        return timestep_of(result, self.config, self._rows)

    def close(self) -> None:
        """Raise if an action had a wrong value, which a GPU does not report at once."""
        self.arena.check()

    def state_dict(self) -> dict[str, Any]:
        return self.arena.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.arena.load_state_dict(state)


def timestep_of(result: StepResult, config: ArenaConfig, rows: Tensor) -> Timestep:
    """Return copies of some rows of a result, given their indices among the B·U units."""
    was_alive, ended = result.was_alive, result.ended.unsqueeze(1)
    if config.reward.pays_dead:
        valid, terminated = result.was_present, result.was_present & ended
    else:
        valid, terminated = was_alive, was_alive & (result.died | ended)
    terminated = terminated.flatten()[rows]
    return Timestep(
        obs={name: value[rows] for name, value in unit_rows(result).items()},
        reward=result.reward.flatten()[rows],
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
        masks={name: mask[rows] for name, mask in result.masks.items()},
        valid=None if result.is_first else valid.flatten()[rows],
        acts=None if result.is_first else was_alive.flatten()[rows],
    )


def unit_rows(result: StepResult) -> Obs:
    """Return observations with one row for every unit [B·U, ...]."""
    rows = {"obs": result.observation.flatten(0, 1)}
    return rows if result.whole is None else {**rows, "state": result.whole.flatten(0, 1)}
