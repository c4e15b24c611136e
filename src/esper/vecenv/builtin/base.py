"""What the built-in environments share: one generator, same-step autoreset, and saving.

A built-in environment is three functions of its state: `start` draws one for every environment, `advance` moves it by one step,
`observe` shows it. State is a dictionary of tensors whose *last* dimension is the environment, so that each part of it lies
together in memory. It is replaced, never written to, so what was handed out stays as it was.

With `numpy_on_cpu` these tensors are NumPy arrays on the CPU, where small operations cost a fraction of torch's. The three functions
are then written against `self.xp`, which is numpy or torch, with the names that both know.

Shapes: N = parallel environments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.vecenv.actions import ActionSpec
from esper.vecenv.contract import Actions, Obs, ObservationSpec, Timestep

Array = Any  # a tensor, or with `numpy_on_cpu` a numpy array
State = dict[str, Array]  # name -> [..., N]


class Outcome(NamedTuple):
    """What one step brought; `truncated` is false where `terminated` is true."""

    reward: Array  # [N] float32
    terminated: Array  # [N] bool
    truncated: Array  # [N] bool


class BuiltinEnv(ABC):
    """A VecEnv and Saveable on any device. `seed` is where its generator starts; `reset(seed)` moves it."""

    observation_spec: ObservationSpec
    action_spec: ActionSpec
    numpy_on_cpu: bool = False

    def __init__(self, num_envs: int, *, device: str | torch.device = "cpu", seed: int = 0) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1; got {num_envs}")
        self.num_envs = num_envs
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as its tensors will say
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(seed)
        self.in_numpy = self.numpy_on_cpu and self.device.type == "cpu"
        self.xp: Any = np if self.in_numpy else torch
        self.state: State = {}

    @abstractmethod
    def start(self) -> State:
        """A first state for every environment, drawn from `self.generator`."""

    @abstractmethod
    def advance(self, state: State, actions: Actions) -> tuple[State, Outcome]:
        """The state after one step, as if no episode ended, and what the step brought."""

    @abstractmethod
    def observe(self, state: State) -> tuple[dict[str, Array], dict[str, Array]]:
        """Observation and masks of a state, in memory of their own."""

    def array(self, tensor: Tensor) -> Array:
        """A tensor as state holds it."""
        return tensor.numpy() if self.in_numpy else tensor

    def reset(self, seed: int | None = None) -> Timestep:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state = self.start()
        nothing = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        reward = torch.zeros(self.num_envs, device=self.device)
        obs, masks = map(self._tensors, self.observe(self.state))
        return Timestep(obs, reward, nothing, nothing.clone(), masks)

    def step(self, actions: Actions) -> Timestep:
        if not self.state:
            raise RuntimeError("call reset() before step()")
        state, outcome = self.advance(self.state, actions)
        seen = self.observe(state)
        ended = outcome.terminated | outcome.truncated
        # Asking whether anything ended is free on CPU; elsewhere it would wait for the device, so all are drawn and few kept.
        if self.device.type == "cpu" and not ended.any():
            self.state = state
            return self._timestep(outcome, seen)
        fresh = self.start()
        self.state = {name: self.xp.where(ended, fresh[name], old) for name, old in state.items()}
        return self._timestep(outcome, self.observe(self.state), final_obs=self._tensors(seen[0]))

    def close(self) -> None:
        self.state = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self.generator.get_state(),
            "state": {name: torch.as_tensor(value).clone() for name, value in self.state.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["state"].items():
            if value.shape[-1] != self.num_envs:
                raise ValueError(f"saved state {name!r} has shape {tuple(value.shape)}, but this is {self.num_envs} environments")
        self.generator.set_state(state["generator"].cpu())
        self.state = {name: self.array(value.to(self.device, copy=True)) for name, value in state["state"].items()}

    def _timestep(self, outcome: Outcome, seen: tuple[dict[str, Array], dict[str, Array]], final_obs: Obs | None = None) -> Timestep:
        obs, masks = seen
        if not self.in_numpy:
            return Timestep(obs, *outcome, masks, final_obs)
        reward, terminated, truncated = map(torch.from_numpy, outcome)
        return Timestep(self._tensors(obs), reward, terminated, truncated, self._tensors(masks), final_obs)

    def _tensors(self, arrays: dict[str, Array]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in arrays.items()} if self.in_numpy else arrays
