"""The contract between batched environments and whoever acts in them.

Everything is a tensor with the environment as its first dimension. Autoreset happens in the same step: where an episode ended,
`obs` already is the first observation of the next one, and what the old one ended with is in `final_obs`.

Shapes: N = parallel environments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor

from esper.vecenv.actions import ActionSpec

Obs = dict[str, Tensor]  # name -> [N, ...]
Masks = dict[str, Tensor]  # discrete head -> [N, size] or [N, parent size, size] bool; a head that is missing is free
Actions = dict[str, Tensor]  # head -> [N] int64 or [N, size] float in [-1, 1]


class TensorSpec(msgspec.Struct, frozen=True):
    """One named part of an observation, without the environment dimension."""

    shape: tuple[int, ...]
    dtype: str = "float32"  # a torch dtype's name

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.dtype!r} is no torch dtype")
        return dtype


ObservationSpec = dict[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class Timestep:
    """What `reset` and `step` answer. After `reset` the reward is 0 and nothing has ended.

    `reward`, `terminated` and `truncated` belong to the action just taken, `obs` and `masks` to the one to take next. `final_obs` holds
    what the ended episodes ended with; only rows where something ended are meaningful, and it may be None when nothing was truncated.
    `valid` is false where the action was ignored because the environment only reset itself (None: every step was real); the next
    `obs` of such a row starts an episode.
    """

    obs: Obs
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool: the episode ended for real, nothing follows
    truncated: Tensor  # [N] bool: the episode was cut, its value goes on
    masks: Masks = field(default_factory=dict)
    final_obs: Obs | None = None
    valid: Tensor | None = None  # [N] bool

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated  # [N] bool


@runtime_checkable
class VecEnv(Protocol):
    """N environments stepped as one."""

    num_envs: int
    device: torch.device
    observation_spec: ObservationSpec
    action_spec: ActionSpec

    def reset(self, seed: int | None = None) -> Timestep: ...

    def step(self, actions: Actions) -> Timestep: ...

    def close(self) -> None: ...


@runtime_checkable
class Saveable(Protocol):
    """A VecEnv that can be saved in the middle of its episodes; `state_dict` is a tree of tensors, numbers and strings.

    `load_state_dict` followed by the same actions gives the same steps, bit for bit.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
