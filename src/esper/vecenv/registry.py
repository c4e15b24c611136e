"""Environments by name: the built-in ones first, then whatever Gymnasium knows."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import torch

from esper.vecenv.builtin import BUILTIN
from esper.vecenv.contract import VecEnv


def make(env_id: str, num_envs: int, *, seed: int | None = None, device: str | torch.device = "cpu", **kwargs: Any) -> VecEnv:
    """`num_envs` environments called `env_id`: a built-in name such as "cue", or a Gymnasium id such as "CartPole-v1".

    `seed` is what the first `reset()` uses unless it is given one. `kwargs` go to the built-in environment, or to
    `gymnasium.make_vec`. Gymnasium's environments live on the CPU.

    >>> make("cue", 2, delay=5).observation_spec
    {'obs': TensorSpec(shape=(5,), dtype='float32')}
    """
    if env_id in BUILTIN:
        return BUILTIN[env_id].factory(num_envs, device=device, seed=0 if seed is None else seed, **kwargs)
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(
            f"{env_id!r} is none of the built-in environments {sorted(BUILTIN)}, and Gymnasium is not installed: pip install 'esper[gym]'"
        ) from error
    from esper.vecenv.gymnasium import from_gymnasium

    if torch.device(device).type != "cpu":
        raise ValueError(f"{env_id!r} is a Gymnasium environment and lives on the CPU; got device={str(device)!r}")
    try:
        vector_env = gymnasium.make_vec(env_id, num_envs=num_envs, **kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise ValueError(f"no environment named {env_id!r}; {_nearest(env_id, [*BUILTIN, *gymnasium.registry])}") from error
    return from_gymnasium(vector_env, seed=seed)


def _nearest(wanted: str, known: list[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    near = [by_lower[name] for name in get_close_matches(wanted.lower(), by_lower, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"the built-in ones are {sorted(BUILTIN)}"
