"""Gymnasium's spaces as our specs, with the functions that carry observations and actions across. Needs Gymnasium.

Shapes: N = parallel environments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from esper.vecenv.actions import Continuous, Discrete, Head
from esper.vecenv.contract import Actions, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]
ROOT = "action"  # the head of an action space that has no names in it


class Part(NamedTuple):
    """One named part of an observation: where it is found in a batch of Gymnasium's, and what becomes of it."""

    name: str
    path: tuple[str, ...]
    spec: TensorSpec
    convert: Callable[[Array], Array]  # [N, ...] as Gymnasium has it -> [N, *spec.shape]; never the same memory unless told so

    def find(self, batch: Any) -> Any:
        for key in self.path:
            batch = batch[key]
        return batch


def observation_parts(space: spaces.Space[Any], *, share_memory: bool, path: tuple[str, ...] = ()) -> list[Part]:
    """The parts of an observation space, a nested Dict flattened with "/". `share_memory` spares the copy where none is needed."""
    name = "/".join(path) or "obs"
    if isinstance(space, spaces.Dict):
        inner = [observation_parts(space[key], share_memory=share_memory, path=(*path, str(key))) for key in space.spaces]
        return [part for parts in inner for part in parts]
    if isinstance(space, spaces.Discrete):
        return [Part(name, path, TensorSpec((int(space.n),)), _one_hot(np.array([space.n]), np.array([space.start])))]
    if isinstance(space, spaces.MultiDiscrete):
        sizes = space.nvec.ravel()
        return [Part(name, path, TensorSpec((int(sizes.sum()),)), _one_hot(sizes, space.start.ravel()))]
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        dtype = np.uint8 if space.dtype == np.uint8 else np.float32
        return [Part(name, path, TensorSpec(tuple(space.shape), np.dtype(dtype).name), _as_type(dtype, share_memory=share_memory))]
    raise ValueError(
        f"observation {name!r} is a {type(space).__name__}, which has no tensor of fixed shape; "
        "Box, Discrete, MultiDiscrete, MultiBinary and Dict of those are understood: wrap the environment to give one of them"
    )


class ActionPart(NamedTuple):
    """Heads, and the function that makes of their actions what Gymnasium's batched space expects."""

    heads: tuple[Head, ...]
    build: Callable[[Actions], Any]


def action_part(space: spaces.Space[Any], name: str = ROOT) -> ActionPart:
    """The heads of an action space. Those of a Dict or Tuple are named by their keys, joined by "/"."""
    if isinstance(space, spaces.Discrete):
        return ActionPart((Discrete(name, int(space.n)),), _discrete(name, int(space.start), space.dtype))
    if isinstance(space, spaces.MultiDiscrete):
        return _several(name, space.nvec.ravel(), space.start.ravel(), tuple(space.shape), space.dtype)
    if isinstance(space, spaces.MultiBinary):
        sizes = np.full(int(np.prod(space.shape)), 2)
        return _several(name, sizes, np.zeros_like(sizes), tuple(space.shape), space.dtype)
    if isinstance(space, spaces.Box):
        return _continuous(name, space)
    if isinstance(space, spaces.Dict):
        return _group(name, dict(space.spaces), as_tuple=False)
    if isinstance(space, spaces.Tuple):
        return _group(name, dict(enumerate(space.spaces)), as_tuple=True)
    raise ValueError(
        f"action {name!r} is a {type(space).__name__}; Discrete, MultiDiscrete, MultiBinary, Box, Dict and Tuple are understood"
    )


def _as_type(dtype: Any, *, share_memory: bool) -> Callable[[Array], Array]:
    if share_memory:
        return lambda values: np.asarray(values, dtype=dtype)
    return lambda values: np.array(values, dtype=dtype)


def _one_hot(sizes: Array, start: Array) -> Callable[[Array], Array]:
    """Values [N, k], or [N] where k = 1 -> k one-hots side by side [N, sum of sizes]."""
    shift = np.concatenate(([0], np.cumsum(sizes)[:-1])) - start  # from a value to its column
    width = int(sizes.sum())

    def convert(values: Array) -> Array:
        columns = np.asarray(values, dtype=np.int64).reshape(len(values), -1) + shift
        hot = np.zeros((len(columns), width), dtype=np.float32)
        np.put_along_axis(hot, columns, 1.0, axis=1)
        return hot

    return convert


def _discrete(name: str, start: int, dtype: Any) -> Callable[[Actions], Any]:
    if start == 0 and dtype == np.int64:
        return lambda actions: actions[name].numpy()
    return lambda actions: (actions[name].numpy() + start).astype(dtype)


def _several(name: str, sizes: Array, start: Array, shape: tuple[int, ...], dtype: Any) -> ActionPart:
    names = [f"{name}_{index}" for index in range(len(sizes))]

    def build(actions: Actions) -> Array:
        chosen = torch.stack([actions[each] for each in names], 1).numpy() + start  # [N, heads]
        result: Array = chosen.astype(dtype).reshape(len(chosen), *shape)
        return result

    return ActionPart(tuple(Discrete(each, int(size)) for each, size in zip(names, sizes, strict=True)), build)


def _continuous(name: str, space: spaces.Box) -> ActionPart:
    if not space.is_bounded():
        raise ValueError(
            f"action {name!r} is an unbounded Box (low {space.low.min()}, high {space.high.max()}), so [-1, 1] cannot be scaled to it; "
            "give it bounds, for example with gymnasium.wrappers.RescaleAction or a Box of your own"
        )
    if not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"action {name!r} is a Box of {space.dtype}; whole numbers are MultiDiscrete actions")
    low, high = space.low.ravel(), space.high.ravel()
    centre, half = low / 2 + high / 2, high / 2 - low / 2  # halves first, or wide bounds overflow

    def build(actions: Actions) -> Array:
        scaled = (actions[name].numpy() * half + centre).astype(space.dtype, copy=False)
        # Rounding may step over a bound by one unit, which some environments refuse.
        result: Array = np.minimum(np.maximum(scaled, low), high).reshape(len(scaled), *space.shape)
        return result

    return ActionPart((Continuous(name, low.size),), build)


def _group(name: str, inner: dict[Any, spaces.Space[Any]], *, as_tuple: bool) -> ActionPart:
    prefix = "" if name == ROOT else f"{name}/"
    parts = {key: action_part(space, f"{prefix}{key}") for key, space in inner.items()}
    heads = tuple(head for part in parts.values() for head in part.heads)
    if as_tuple:
        return ActionPart(heads, lambda actions: tuple(part.build(actions) for part in parts.values()))
    return ActionPart(heads, lambda actions: {key: part.build(actions) for key, part in parts.items()})
