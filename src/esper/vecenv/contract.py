"""The interface of batched environments.

Everything is a tensor whose first dimension is the environment. Environments reset themselves in the same step: where an episode ended,
`obs` is the first observation of the next episode, and `final_obs` holds the last observation of the old one.

Shapes: N = parallel environments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import msgspec
import torch
from torch import Tensor

from esper.vecenv.actions import ActionSpec

Obs = dict[str, Tensor]  # name -> [N, ...]
Masks = dict[str, Tensor]  # discrete head -> [N, size] or [N, parent size, size] bool; a head without a mask may choose anything
Actions = dict[str, Tensor]  # head -> [N] int64, or [N, size] float, in [-1, 1] if the head is bounded


class TensorSpec(msgspec.Struct, frozen=True):
    """One named part of an observation, without the environment dimension."""

    shape: tuple[int, ...]
    dtype: str = "float32"  # name of a torch dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.dtype!r} is not a torch dtype; use a name such as 'float32'")
        return dtype


ObservationSpec = dict[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class Timestep:
    """The result of `reset` and `step`. After `reset`, the reward is 0 and nothing has ended.

    `reward`, `terminated` and `truncated` belong to the action just taken, `obs` and `masks` to the next one. `final_obs` has the last
    observations of ended episodes; its other rows are meaningless, and it may be None if no episode was truncated. `valid` is false where
    the action was ignored because the environment only reset itself; the next `obs` of such a row starts an episode. `valid=None` means
    that no action was ignored. `acts` is false where the step was real but the action had no effect, as that of a dead unit whose team
    goes on: such a step teaches values only. `acts=None` means that all actions had one.
    """

    obs: Obs
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool: the episode ended, no further reward is possible
    truncated: Tensor  # [N] bool: the episode was cut off, so the value of its last state still counts
    masks: Masks = field(default_factory=dict)
    final_obs: Obs | None = None
    valid: Tensor | None = None  # [N] bool
    acts: Tensor | None = None  # [N] bool

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated  # [N] bool


@runtime_checkable
class VecEnv(Protocol):
    """A batch of N environments that are stepped together."""

    num_envs: int
    device: torch.device
    observation_spec: ObservationSpec
    action_spec: ActionSpec

    def reset(self, seed: int | None = None) -> Timestep: ...

    def step(self, actions: Actions) -> Timestep: ...

    def close(self) -> None: ...


def is_vec_env(value: object) -> TypeGuard[VecEnv]:
    """Return whether an object has the members of a `VecEnv`, also if it passes requests for them on to another object.

    From Python 3.12 on, `isinstance` does not see such members.
    """
    names = ("num_envs", "device", "observation_spec", "action_spec", "reset", "step", "close")
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


@runtime_checkable
class Saveable(Protocol):
    """A VecEnv that can be saved in the middle of its episodes. `state_dict` returns a tree of tensors, numbers and strings.

    After `load_state_dict`, the same actions give the same steps, bit for bit.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
