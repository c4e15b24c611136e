"""Base class of the built-in environments: one random generator, automatic reset in the same step, and saving.

A subclass defines three functions of its state: `start` draws a first state for every environment, `advance` computes the next state,
`observe` computes the observation. A state is a dictionary of tensors whose *last* dimension is the environment, so that each quantity is
contiguous in memory. States are replaced and never changed in place, so returned tensors do not change either.

With `numpy_on_cpu`, states on the CPU are NumPy arrays, because small operations are much cheaper than in torch. The three functions then
call `self.xp`, which is numpy or torch, and use only names that both have.

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
    """Reward and ends of one step. `truncated` is false where `terminated` is true."""

    reward: Array  # [N] float32
    terminated: Array  # [N] bool
    truncated: Array  # [N] bool


class BuiltinEnv(ABC):
    """A saveable VecEnv on any device. `seed` seeds its generator; `reset(seed)` seeds it again."""

    observation_spec: ObservationSpec
    action_spec: ActionSpec
    numpy_on_cpu: bool = False

    def __init__(self, num_envs: int, *, device: str | torch.device = "cpu", seed: int = 0) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1; got {num_envs}")
        self.num_envs = num_envs
        self.device = torch.empty(0, device=device).device  # with its index: "cuda" becomes "cuda:0"
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(seed)
        self.in_numpy = self.numpy_on_cpu and self.device.type == "cpu"
        self.xp: Any = np if self.in_numpy else torch
        self.state: State = {}

    @abstractmethod
    def start(self) -> State:
        """Return a first state for every environment, drawn from `self.generator`."""

    @abstractmethod
    def advance(self, state: State, actions: Actions) -> tuple[State, Outcome]:
        """Return the state after one step, without any reset, and the outcome of the step."""

    @abstractmethod
    def observe(self, state: State) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the observation and the masks of a state, in new memory."""

    def array(self, tensor: Tensor) -> Array:
        """Return a tensor in the form that states use: as a NumPy array if `in_numpy`."""
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
        # On the CPU, skip the reset if no episode ended. On other devices that question would wait for the device, so draw new states for
        # all environments and use them where an episode ended.
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
