"""Adapter from a VecEnv to a Gymnasium vector environment. Needs Gymnasium."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from esper.vecenv.actions import Discrete, Head
from esper.vecenv.contract import Actions, Masks, Obs, Saveable, TensorSpec, Timestep, VecEnv


class ToGymnasium(VectorEnv[Any, Any, Any]):
    """A Gymnasium vector environment that wraps `vec_env`. It resets in the same step, with `final_obs` in the infos.

    Masks are in the infos as int8: `action_mask` if the action has one head, else `action_mask/<head>`. An observation whose only part is
    "obs" is an array, others are dictionaries; likewise an action of one head is an array. `metadata["action_spec"]` holds the action spec.
    `from_gymnasium` reads from it the dependencies between heads, which spaces cannot express.

    `valid` in the infos is false for rows whose action was ignored because they only waited for their next episode. Do not learn from
    those steps. Without `valid`, no action was ignored. `acts` is false for rows whose step was real but whose action had no effect: learn
    only values from those steps. Without `acts`, all actions had an effect. `from_gymnasium` reads both.
    """

    def __init__(self, vec_env: VecEnv) -> None:
        self.vec_env = vec_env
        self.num_envs = vec_env.num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "action_spec": vec_env.action_spec}
        self._plain_obs = list(vec_env.observation_spec) == ["obs"]
        parts: dict[str, spaces.Space[Any]] = {name: _observation_space(spec) for name, spec in vec_env.observation_spec.items()}
        self.single_observation_space = parts["obs"] if self._plain_obs else spaces.Dict(parts)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        heads = {head.name: _action_space(head) for head in vec_env.action_spec.heads}
        self._only_head = next(iter(heads)) if len(heads) == 1 else None
        self.single_action_space = heads[self._only_head] if self._only_head else spaces.Dict(heads)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        if isinstance(vec_env, Saveable):
            self.state_dict = vec_env.state_dict
            self.load_state_dict = vec_env.load_state_dict

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options:
            raise ValueError(f"this environment takes no reset options; got {options}")
        timestep = self.vec_env.reset(seed)
        return self._obs(timestep.obs), self._mask_infos(timestep.masks)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        timestep = self.vec_env.step(self._actions(actions))
        infos = self._mask_infos(timestep.masks)
        for name, flags in (("valid", timestep.valid), ("acts", timestep.acts)):
            if flags is not None:
                infos |= {name: _array(flags), f"_{name}": np.ones(self.num_envs, dtype=np.bool_)}
        if timestep.final_obs is not None:
            infos |= self._final_infos(timestep, timestep.final_obs)
        return self._obs(timestep.obs), _array(timestep.reward), _array(timestep.terminated), _array(timestep.truncated), infos

    def close_extras(self, **kwargs: Any) -> None:
        self.vec_env.close()

    def _actions(self, actions: Any) -> Actions:
        by_head: Mapping[str, Any] = {self._only_head: actions} if self._only_head else actions
        device = self.vec_env.device
        return {
            head.name: torch.as_tensor(
                by_head[head.name], dtype=torch.int64 if isinstance(head, Discrete) else torch.float32, device=device
            )
            for head in self.vec_env.action_spec.heads
        }

    def _obs(self, obs: Obs) -> Any:
        return _array(obs["obs"]) if self._plain_obs else {name: _array(value) for name, value in obs.items()}

    def _mask_infos(self, masks: Masks) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for name, mask in masks.items():
            key = "action_mask" if name == self._only_head else f"action_mask/{name}"
            infos[key] = _array(mask).astype(np.int8)
            infos[f"_{key}"] = np.ones(self.num_envs, dtype=np.bool_)
        return infos

    def _final_infos(self, timestep: Timestep, final_obs: Obs) -> dict[str, Any]:
        """Return final observations as Gymnasium does: an object array with one observation for each row that ended."""
        ended = _array(timestep.ended)
        if not ended.any():
            return {}
        arrays = {name: _array(value) for name, value in final_obs.items()}
        rows = np.full(self.num_envs, None, dtype=object)
        for row in np.flatnonzero(ended):
            rows[row] = arrays["obs"][row] if self._plain_obs else {name: array[row] for name, array in arrays.items()}
        return {"final_obs": rows, "_final_obs": ended}


def _array(tensor: torch.Tensor) -> Any:
    return tensor.cpu().numpy()


def _observation_space(spec: TensorSpec) -> spaces.Space[Any]:
    dtype: Any = torch.empty(0, dtype=spec.torch_dtype).numpy().dtype
    if dtype == np.bool_:
        return spaces.Box(0, 1, spec.shape, dtype)
    if np.issubdtype(dtype, np.integer):
        return spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, spec.shape, dtype)
    return spaces.Box(-np.inf, np.inf, spec.shape, dtype)


def _action_space(head: Head) -> spaces.Space[Any]:
    if isinstance(head, Discrete):
        return spaces.Discrete(head.size)
    bound = 1.0 if head.is_bounded else np.inf
    return spaces.Box(-bound, bound, (head.size,), np.float32)
