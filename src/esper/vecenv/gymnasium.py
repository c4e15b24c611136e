"""Adapter from a Gymnasium vector environment to a VecEnv; `ToGymnasium` is the adapter in the other direction. Needs Gymnasium.

Gymnasium has three modes of automatic reset. All are supported, with correct final observations:
    SAME_STEP  as in `esper.vecenv.contract`; the final observation is in the infos
    NEXT_STEP  the step after an end only resets, so `valid` is false for it; the final observation is that of the step before
    DISABLED   the adapter resets ended environments in the same step

Action masks are read from, in this order:
    `action_mask` in a Dict observation or in the infos: `[n]` for one discrete action, the masks of all heads concatenated, or a dictionary
    by head
    `action_mask/<head>` in the infos
    a method `action_masks()` of the environment or of a wrapper, as in sb3-contrib
Without any of these, all actions are allowed. If heads depend on each other, declare an ActionSpec in `metadata["action_spec"]`. Then the
infos may also hold `valid` and `acts` as `Timestep` defines them, as those of `ToGymnasium` do.

Shapes: N = parallel environments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode
except ImportError as error:
    raise ImportError("esper.vecenv.gymnasium needs Gymnasium: pip install 'esper-grow[gym]'") from error

from esper.vecenv.actions import ActionSpec
from esper.vecenv.contract import Actions, Masks, Obs, Timestep, VecEnv
from esper.vecenv.info_masks import MaskReader
from esper.vecenv.spaces import Array, DictSpace, Spaces, action_part, action_part_for, observation_parts, spaces_of
from esper.vecenv.to_gymnasium import ToGymnasium

__all__ = ["GymnasiumEnv", "SaveableGymnasiumEnv", "ToGymnasium", "from_gymnasium"]


def from_gymnasium(vector_env: gymnasium.vector.VectorEnv[Any, Any, Any], *, seed: int | None = None) -> VecEnv:
    """Return a VecEnv on the CPU that wraps `vector_env`. `seed` is used by the first `reset()` that is called without one.

    The result is `Saveable` if `vector_env` has `state_dict` and `load_state_dict`.
    """
    if hasattr(vector_env, "state_dict") and hasattr(vector_env, "load_state_dict"):
        return SaveableGymnasiumEnv(vector_env, seed=seed)
    return GymnasiumEnv(vector_env, seed=seed)


class GymnasiumEnv:
    """A VecEnv that wraps a Gymnasium vector environment."""

    def __init__(self, vector_env: gymnasium.vector.VectorEnv[Any, Any, Any], *, seed: int | None = None) -> None:
        self.vector_env: Any = vector_env
        self.num_envs: int = vector_env.num_envs
        self.device = torch.device("cpu")
        self._mode = _autoreset_mode(vector_env)
        self._next_seed = seed
        self._resetting: Array | None = None  # [N] bool: rows whose next step only resets them (NEXT_STEP)

        space = vector_env.single_observation_space
        # These two classes return copies of their buffers, which tensors can share. Other vector environments may overwrite theirs.
        copies = type(vector_env) in (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv) and getattr(
            vector_env, "copy", False
        )
        self.name = _name_of(vector_env)
        try:
            self.spaces = spaces_of(space, vector_env.single_action_space)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        masked_in_obs = isinstance(self.spaces.observation, DictSpace) and "action_mask" in self.spaces.observation.spaces
        if masked_in_obs:
            self.spaces = _without_mask(self.spaces)
        self._parts = observation_parts(self.spaces.observation, share_memory=copies)
        if not self._parts:
            raise ValueError(f"the observation space has no parts besides the action mask: {space}")
        self.observation_spec = {part.name: part.spec for part in self._parts}

        self.action_spec, self._build_action = _actions(vector_env, self.spaces)
        self._has_flags = "action_spec" in (vector_env.metadata or {})  # elsewhere these names may mean something else
        self._masks = MaskReader(self.action_spec, self.num_envs, in_obs=masked_in_obs, ask=_mask_method(vector_env))

    def reset(self, seed: int | None = None) -> Timestep:
        seed, self._next_seed = self._next_seed if seed is None else seed, None
        with _explained(self.name, "reset", "(observation, info)"):
            raw, infos = self._reset_all(seed)
        self._resetting = None
        nothing = torch.zeros(self.num_envs, dtype=torch.bool)
        return Timestep(self._observe(raw), torch.zeros(self.num_envs), nothing, nothing.clone(), self._masks.read(raw, infos))

    def step(self, actions: Actions) -> Timestep:
        chosen = self._build_action(actions)
        with _explained(self.name, "step", "(observation, reward, terminated, truncated, info)"):
            raw, rewards, terminations, truncations, infos = self.vector_env.step(chosen)
        reward = np.array(rewards, dtype=np.float32)
        if reward.shape != (self.num_envs,):
            raise ValueError(f"{self.name}: rewards have the shape {reward.shape}, expected one number per environment, {(self.num_envs,)}")
        terminated = np.array(terminations, dtype=np.bool_)
        truncated = np.array(truncations, dtype=np.bool_)
        obs = self._observe(raw)
        masks = self._masks.read(raw, infos)
        final_obs = None
        valid, acts = (_flags(infos.get(name)) if self._has_flags else None for name in ("valid", "acts"))
        if self._resetting is not None:  # this step only reset these rows: their action was ignored
            reward[self._resetting] = 0.0
            terminated[self._resetting] = truncated[self._resetting] = False
            valid = torch.from_numpy(~self._resetting)
            self._resetting = None
        ended = terminated | truncated
        if np.count_nonzero(ended):
            truncated &= ~terminated
            obs, masks, final_obs = self._end(ended, truncated, raw, infos, obs, masks)
        return Timestep(
            obs,
            torch.from_numpy(reward),
            torch.from_numpy(terminated),
            torch.from_numpy(truncated),
            masks,
            final_obs=final_obs,
            valid=valid,
            acts=acts,
        )

    def close(self) -> None:
        self.vector_env.close()

    def _reset_all(self, seed: int | None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, also after a step in other processes that an error or Ctrl-C has broken off."""
        if None in getattr(self.vector_env.unwrapped, "parent_pipes", ()):
            raise ValueError(f"{self.name}: processes of its environments have ended after an error; make the environments again")
        try:
            result: tuple[Any, dict[str, Any]] = self.vector_env.reset(seed=seed)
        except gymnasium.error.AlreadyPendingCallError:  # take the answer of the step that nobody waited for
            self.vector_env.unwrapped.step_wait()
            result = self.vector_env.reset(seed=seed)
        return result

    def _observe(self, raw: Any) -> Obs:
        return {part.name: torch.from_numpy(part.convert(part.find(raw))) for part in self._parts}

    def _end(
        self, ended: Array, truncated: Array, raw: Any, infos: dict[str, Any], obs: Obs, masks: Masks
    ) -> tuple[Obs, Masks, Obs | None]:
        """Return the next observations, their masks, and the final observations after a step in which episodes `ended` [N]."""
        if self._mode is AutoresetMode.SAME_STEP:
            return obs, masks, self._final_obs(raw, infos, truncated)
        rows = torch.from_numpy(ended)
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resetting = ended
            # The next action of these rows is ignored. Allow everything there, because a finished game may allow nothing.
            return obs, {name: mask | _like(rows, mask) for name, mask in masks.items()}, obs
        next_raw, next_infos = self.vector_env.reset(options={"reset_mask": ended.copy()})
        fresh = self._masks.read(next_raw, next_infos)
        return self._observe(next_raw), _merged(rows, fresh, masks), obs

    def _final_obs(self, raw: Any, infos: dict[str, Any], truncated: Array) -> Obs | None:
        """Return the final observations in the infos, which are an object array with one observation per row, or a batch."""
        final = infos.get("final_obs")
        present = infos.get("_final_obs", np.full(self.num_envs, final is not None))
        if (truncated & ~present).any():
            raise ValueError(
                f"{self.vector_env} resets in the same step, but its infos hold no final_obs for the environments "
                f"{np.flatnonzero(truncated & ~present).tolist()}, which were truncated; put their last observations there"
            )
        if final is None:
            return None
        if not (isinstance(final, np.ndarray) and final.dtype == object):
            return self._observe(final)
        found = {}
        for part in self._parts:
            batch = np.array(part.find(raw))
            for row in np.flatnonzero(present):
                batch[row] = part.find(final[row])
            found[part.name] = torch.from_numpy(part.convert(batch))
        return found


class SaveableGymnasiumEnv(GymnasiumEnv):
    """A GymnasiumEnv whose vector environment can be saved."""

    def state_dict(self) -> dict[str, Any]:
        resetting = np.zeros(self.num_envs, dtype=np.bool_) if self._resetting is None else self._resetting
        return {"vector_env": self.vector_env.state_dict(), "resetting": torch.from_numpy(resetting.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.vector_env.load_state_dict(state["vector_env"])
        resetting = state["resetting"].cpu().numpy().copy()
        self._resetting = resetting if resetting.any() else None


def _flags(array: Any) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(np.array(array, dtype=np.bool_))


@contextlib.contextmanager
def _explained(name: str, method: str, result: str) -> Iterator[None]:
    """Say what a method of the user's environment must return, if Gymnasium fails to take its result apart."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        if not any(sign in str(error) for sign in _WRONG_RESULT):
            raise
        if any(sign in str(error) for sign in _NO_NUMBER):
            what = "a reward, terminated or truncated that is an array instead of one number"
        else:
            what = f"something else than {result}, with an observation of its observation_space"
        raise ValueError(f"{name}: the environment's {method} returned {what}: {error}") from error


# Parts of the messages of Gymnasium and NumPy about a result of another form.
_WRONG_RESULT = (
    "to unpack",
    "has no attribute 'items'",
    "is the wrong shape",
    "could not broadcast",
    "setting an array element",
    "only length-1",
    "only 0-dim",
)
_NO_NUMBER = _WRONG_RESULT[-3:]


def _name_of(vector_env: Any) -> str:
    """Return the id of the environments, or the name of their class, for messages."""
    single = next(iter(getattr(vector_env.unwrapped, "envs", ())), vector_env)
    return single.spec.id if getattr(single, "spec", None) is not None else type(single.unwrapped).__name__


def _autoreset_mode(vector_env: gymnasium.vector.VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = (vector_env.metadata or {}).get("autoreset_mode")
    if mode is None:
        raise ValueError(
            f"{vector_env} does not say how it resets itself: set metadata['autoreset_mode'] to a gymnasium.vector.AutoresetMode"
        )
    return AutoresetMode(mode)


def _mask_method(vector_env: Any) -> Any:
    """Return a function that returns the masks of all environments; None if they have no method `action_masks`."""
    if callable(getattr(vector_env, "action_masks", None)):
        return vector_env.action_masks
    inner = vector_env.unwrapped
    if isinstance(inner, gymnasium.vector.SyncVectorEnv):
        has_masks = all(env.has_wrapper_attr("action_masks") for env in inner.envs)
    elif isinstance(inner, gymnasium.vector.AsyncVectorEnv):
        probe = inner.env_fns[0]()  # environments in other processes cannot be inspected, so make one here
        has_masks = probe.has_wrapper_attr("action_masks")
        probe.close()
    else:
        return None
    return (lambda: inner.call("action_masks")) if has_masks else None


def _without_mask(spaces: Spaces) -> Spaces:
    assert isinstance(spaces.observation, DictSpace)
    return Spaces(DictSpace({name: space for name, space in spaces.observation.spaces.items() if name != "action_mask"}), spaces.action)


def _actions(vector_env: gymnasium.vector.VectorEnv[Any, Any, Any], spaces: Spaces) -> tuple[ActionSpec, Any]:
    """Return the action spec, from the metadata or else from the space, and the function that builds Gymnasium's actions."""
    declared = vector_env.metadata.get("action_spec")
    if declared is None:
        part = action_part(spaces.action)
        return ActionSpec(part.heads), part.build
    try:
        return declared, action_part_for(spaces.action, declared).build
    except ValueError as error:
        raise ValueError(f"metadata['action_spec'] does not fit the action space: {error}") from error


def _like(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `rows` [N] with as many dimensions as `mask`."""
    return rows.view(-1, *[1] * (mask.dim() - 1))


def _merged(rows: torch.Tensor, new: Masks, old: Masks) -> Masks:
    """Return the masks of `new` in `rows` and of `old` elsewhere. A head without a mask in one of them may choose anything there."""
    free = torch.ones((), dtype=torch.bool)
    names = new.keys() | old.keys()
    return {name: torch.where(_like(rows, new.get(name, old.get(name, free))), new.get(name, free), old.get(name, free)) for name in names}
