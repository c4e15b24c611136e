"""Spaces of environments: convert observations to named arrays, and named actions to the form that an environment takes.

`Space` describes a Gymnasium space as plain data. A policy is saved with it, and then needs neither the environment nor Gymnasium to read
an observation or to return an action in the environment's units. Only `spaces_of` needs Gymnasium.

Shapes: N = parallel environments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from esper.vecenv.actions import ActionSpec, Continuous, Discrete, Head
from esper.vecenv.contract import Actions, ObservationSpec, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]
ROOT = "action"  # name of the head if the action space has no names


class ArraySpace(msgspec.Struct, frozen=True, tag="array"):
    """An array of numbers. `low` and `high` are flattened, and given only for actions."""

    shape: tuple[int, ...]
    dtype: str
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


class DiscreteSpace(msgspec.Struct, frozen=True, tag="discrete"):
    """One integer from `start` to `start + size - 1`."""

    size: int
    start: int = 0
    dtype: str = "int64"


class MultiDiscreteSpace(msgspec.Struct, frozen=True, tag="multi_discrete"):
    """An array of integers. `sizes` and `starts` are flattened."""

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


class DictSpace(msgspec.Struct, frozen=True, tag="dict"):
    """A dictionary of spaces."""

    spaces: dict[str, Space]


class TupleSpace(msgspec.Struct, frozen=True, tag="tuple"):
    """A tuple of spaces."""

    spaces: tuple[Space, ...]


Space = ArraySpace | DiscreteSpace | MultiDiscreteSpace | DictSpace | TupleSpace


class Spaces(msgspec.Struct, frozen=True):
    """Observation space and action space of one environment."""

    observation: Space
    action: Space


@runtime_checkable
class HasSpaces(Protocol):
    """A VecEnv that wraps environments with their own spaces."""

    spaces: Spaces


def spaces_of(observation_space: Any, action_space: Any) -> Spaces:
    """Return the description of two Gymnasium spaces. Raise ValueError for an unsupported kind of space."""
    found = Spaces(_observation_space(observation_space, "obs"), _action_space(action_space, ROOT))
    if not observation_parts(found.observation):
        raise ValueError(f"the observation space has no parts: {observation_space}")
    if not action_part(found.action).heads:
        raise ValueError(f"the action space has no parts: {action_space}")
    return found


def spaces_of_specs(observation_spec: ObservationSpec, action_spec: ActionSpec) -> Spaces:
    """Return spaces for a VecEnv that wraps nothing: an array if the only part is "obs" or there is one head, else a dictionary by name."""
    parts: dict[str, Space] = {name: ArraySpace(spec.shape, spec.dtype) for name, spec in observation_spec.items()}
    heads: dict[str, Space] = {head.name: _space_of_head(head) for head in action_spec.heads}
    return Spaces(
        parts["obs"] if set(parts) == {"obs"} else DictSpace(parts),
        next(iter(heads.values())) if len(heads) == 1 else DictSpace(heads),
    )


def _space_of_head(head: Head) -> Space:
    if isinstance(head, Discrete):
        return DiscreteSpace(head.size)
    bound = 1.0 if head.is_bounded else math.inf
    return ArraySpace((head.size,), "float32", low=(-bound,) * head.size, high=(bound,) * head.size)


def _observation_space(space: Any, name: str) -> Space:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return DictSpace({str(key): _observation_space(inner, _joined(name, key)) for key, inner in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return TupleSpace(tuple(_observation_space(inner, _joined(name, index)) for index, inner in enumerate(space.spaces)))
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        if 0 in space.shape:
            raise ValueError(f"observation {name!r} has no numbers: its shape is {space.shape}; leave it out, or give it a size")
        return ArraySpace(_plain(space.shape), space.dtype.name)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return _discrete_space(space)
    raise ValueError(
        f"observation {name!r} is a {type(space).__name__}, which cannot become a tensor of fixed shape; Box, Discrete, MultiDiscrete, "
        "MultiBinary, and Dict and Tuple of those are understood: wrap the environment so that it leaves this one out or converts it"
    )


def _action_space(space: Any, name: str) -> Space:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return DictSpace({str(key): _action_space(inner, _joined(name, key)) for key, inner in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return TupleSpace(tuple(_action_space(inner, _joined(name, index)) for index, inner in enumerate(space.spaces)))
    if isinstance(space, spaces.MultiBinary):
        count = int(np.prod(space.shape))
        return MultiDiscreteSpace((2,) * count, (0,) * count, _plain(space.shape), space.dtype.name)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return _discrete_space(space)
    if isinstance(space, spaces.Box):
        if not np.issubdtype(space.dtype, np.floating):
            raise ValueError(f"action {name!r} is a Box of {space.dtype}; use a MultiDiscrete space for integers")
        if 0 in space.shape:
            raise ValueError(f"action {name!r} has no numbers: its shape is {space.shape}; leave it out, or give it a size")
        low, high = (tuple(float(bound) for bound in bounds.ravel()) for bounds in (space.low, space.high))
        return ArraySpace(_plain(space.shape), space.dtype.name, low=low, high=high)
    raise ValueError(
        f"action {name!r} is a {type(space).__name__}; only Discrete, MultiDiscrete, MultiBinary, Box, Dict and Tuple are understood"
    )


def _discrete_space(space: Any) -> Space:
    """Return the description of a Discrete or MultiDiscrete space."""
    if not hasattr(space, "nvec"):
        return DiscreteSpace(int(space.n), int(space.start), space.dtype.name)
    return MultiDiscreteSpace(_plain(space.nvec.ravel()), _plain(space.start.ravel()), _plain(space.shape), space.dtype.name)


def _plain(numbers: Sequence[int] | Array) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers)


def _joined(name: str, key: object) -> str:
    """Return the name of a nested space, for error messages. The names of the outermost spaces are left out."""
    return str(key) if name in ("obs", ROOT) else f"{name}/{key}"


# Observations: from the environment's form to named arrays


class Part(NamedTuple):
    """One named part of an observation: its place in the environment's observation, and how it is converted."""

    name: str
    path: tuple[str | int, ...]  # keys and indices that lead to it
    shape: tuple[int, ...]  # shape in one observation of the environment
    spec: TensorSpec  # after conversion
    convert: Callable[[Array], Array]  # [N, *shape] -> [N, *spec.shape]; copies the memory unless `share_memory`

    def find(self, batch: Any) -> Any:
        """Return this part of an observation."""
        for key in self.path:
            batch = batch[key]
        return batch


def observation_parts(space: Space, *, share_memory: bool = False, path: tuple[str | int, ...] = ()) -> list[Part]:
    """Return the parts of an observation; names of nested parts are joined by "/". `share_memory` avoids copies where possible."""
    name = "/".join(map(str, path)) or "obs"
    if isinstance(space, DictSpace | TupleSpace):
        named: list[tuple[str | int, Space]] = list(space.spaces.items() if isinstance(space, DictSpace) else enumerate(space.spaces))
        return [part for key, inner in named for part in observation_parts(inner, share_memory=share_memory, path=(*path, key))]
    if isinstance(space, DiscreteSpace):
        return [Part(name, path, (), TensorSpec((space.size,)), _one_hot(np.array([space.size]), np.array([space.start])))]
    if isinstance(space, MultiDiscreteSpace):
        spec = TensorSpec((sum(space.sizes),))
        return [Part(name, path, space.shape, spec, _one_hot(np.array(space.sizes), np.array(space.starts)))]
    dtype = np.uint8 if space.dtype == "uint8" else np.float32
    shape = space.shape or (1,)  # a single number becomes a vector of length 1
    spec = TensorSpec(shape, np.dtype(dtype).name)
    return [Part(name, path, space.shape, spec, _as_type(dtype, shape, share_memory=share_memory))]


def read_observation(parts: Sequence[Part], observation: Any) -> tuple[dict[str, Array], bool]:
    """Convert one observation of an environment, or a batch of N, to arrays [N, ...] by name. Also return whether it was a single one.

    The observation may consist of arrays, tensors, lists and numbers.
    """
    found = {part.name: _array_of(part, observation) for part in parts}
    single = {part.name: found[part.name].ndim == len(part.shape) for part in parts}
    for part in parts:
        value = found[part.name]
        is_fitting = value.shape == part.shape or (value.ndim > 0 and value.shape[1:] == part.shape)
        if not is_fitting or single[part.name] != single[parts[0].name]:
            raise ValueError(
                f"observation {part.name!r} has shape {value.shape}; expected {part.shape} for one observation "
                f"or {('N', *part.shape)} for N of them, the same for all parts"
            )
        if part.spec.dtype == "uint8" and np.issubdtype(value.dtype, np.floating):
            raise ValueError(f"observation {part.name!r} must have bytes from 0 to 255; got {value.dtype}")
    is_single = single[parts[0].name]
    return {part.name: part.convert(found[part.name][None] if is_single else found[part.name]) for part in parts}, is_single


def _array_of(part: Part, observation: Any) -> Array:
    try:
        value = part.find(observation)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the observation has no part {part.name!r}; got a {type(observation).__name__}") from error
    array: Array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype == object:
        raise ValueError(f"observation {part.name!r} is a {type(value).__name__}; expected an array of shape {part.shape}")
    return array


def _as_type(dtype: Any, shape: tuple[int, ...], *, share_memory: bool) -> Callable[[Array], Array]:
    """Return a function that converts values to arrays [N, *shape] of this type."""

    def convert(values: Array) -> Array:
        array: Array = np.asarray(values, dtype=dtype) if share_memory else np.array(values, dtype=dtype)
        return array.reshape(len(array), *shape)

    return convert


def _one_hot(sizes: Array, start: Array) -> Callable[[Array], Array]:
    """Return a function from values [N, k], or [N] if k = 1, to k one-hot vectors side by side [N, sum of sizes]."""
    shift = np.concatenate(([0], np.cumsum(sizes)[:-1])) - start  # value + shift = column
    width = int(sizes.sum())

    def convert(values: Array) -> Array:
        columns = np.asarray(values, dtype=np.int64).reshape(len(values), -1) + shift
        hot = np.zeros((len(columns), width), dtype=np.float32)
        np.put_along_axis(hot, columns, 1.0, axis=1)
        return hot

    return convert


# Actions: from named heads to the environment's form


class ActionPart(NamedTuple):
    """The heads of an action space, and the function that turns their actions (on the CPU) into a batch of the environment's actions."""

    heads: tuple[Head, ...]
    build: Callable[[Actions], Any]


def action_part(space: Space, name: str = ROOT, *, is_nested: bool = False) -> ActionPart:
    """Return the heads of an action space. In a dictionary or tuple they are named by their keys, joined by "/"."""
    if isinstance(space, DiscreteSpace):
        return ActionPart((Discrete(name, space.size),), _discrete(name, space.start, np.dtype(space.dtype)))
    if isinstance(space, MultiDiscreteSpace):
        return _multi_discrete(name, space)
    if isinstance(space, ArraySpace):
        return _continuous(name, space)
    if isinstance(space, DictSpace):
        return _group(name, dict(space.spaces), as_tuple=False, is_nested=is_nested)
    return _group(name, dict(enumerate(space.spaces)), as_tuple=True, is_nested=is_nested)


def action_part_for(space: Space, spec: ActionSpec) -> ActionPart:
    """Return the action part whose heads are those of `spec`. If the space has one head, `spec` may give it any name."""
    for name in (ROOT, spec.heads[0].name):
        part = action_part(space, name)
        if set(map(_form, part.heads)) == set(map(_form, spec.heads)):
            return part
    raise ValueError(f"the action spec has the heads {spec.heads}, but the action space gives {action_part(space).heads}")


def _form(head: Head) -> tuple[str, int, bool | None]:
    """Return the properties of a head that an action space determines. Dependencies on other heads are not among them."""
    return head.name, head.size, head.is_bounded if isinstance(head, Continuous) else None


def first_of(batch: Any) -> Any:
    """Return the action in a batch of one."""
    if isinstance(batch, tuple):
        return tuple(first_of(part) for part in batch)
    if isinstance(batch, dict):
        return {key: first_of(part) for key, part in batch.items()}
    return batch[0]


def _discrete(name: str, start: int, dtype: Any) -> Callable[[Actions], Any]:
    """Return a function from the actions to the integers of one head, counted from `start`."""
    if start == 0 and dtype == np.int64:
        return lambda actions: actions[name].numpy()
    return lambda actions: (actions[name].numpy() + start).astype(dtype)


def _multi_discrete(name: str, space: MultiDiscreteSpace) -> ActionPart:
    """Return one head per integer, named by its index."""
    names = [f"{name}_{index}" for index in range(len(space.sizes))]
    start = np.array(space.starts)

    def build(actions: Actions) -> Array:
        chosen = torch.stack([actions[each] for each in names], 1).numpy() + start  # [N, heads]
        result: Array = chosen.astype(space.dtype).reshape(len(chosen), *space.shape)
        return result

    return ActionPart(tuple(Discrete(each, size) for each, size in zip(names, space.sizes, strict=True)), build)


def _continuous(name: str, space: ArraySpace) -> ActionPart:
    """Return one head, or one for the bounded numbers and one for the others if there are both."""
    low, high = np.array(space.low, dtype=space.dtype), np.array(space.high, dtype=space.dtype)
    largest = np.finfo(low.dtype).max  # some environments use it for "unbounded"
    bounded = (np.abs(low) < largest) & (np.abs(high) < largest)  # [size]
    groups = {(f"{name}_bounded", True): np.flatnonzero(bounded), (f"{name}_unbounded", False): np.flatnonzero(~bounded)}
    if bounded.all() or not bounded.any():
        groups = {(name, bool(bounded.all())): np.arange(low.size)}
    order = np.argsort(np.concatenate(list(groups.values())))  # [size] place of each number in the heads side by side
    # Bounded: scale [-1, 1] to [low, high]; halve before adding, so that wide bounds do not overflow. Otherwise pass the numbers on as they
    # are, clipped at those bounds that exist.
    centre, half = np.zeros_like(low), np.ones_like(low)
    centre[bounded], half[bounded] = low[bounded] / 2 + high[bounded] / 2, high[bounded] / 2 - low[bounded] / 2

    def build(actions: Actions) -> Array:
        parts = [actions[head].numpy() for head, _ in groups]
        chosen = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)[:, order]  # [N, size]
        scaled = (chosen * half + centre).astype(space.dtype, copy=False)
        # Clip, because rounding may exceed a bound by the last digit, which some environments refuse.
        result: Array = np.minimum(np.maximum(scaled, low), high).reshape(len(scaled), *space.shape)
        return result

    heads = tuple(Continuous(head, len(columns), is_bounded) for (head, is_bounded), columns in groups.items())
    return ActionPart(heads, build)


def _group(name: str, inner: dict[Any, Space], *, as_tuple: bool, is_nested: bool) -> ActionPart:
    """Return the heads of a dictionary or tuple of spaces, in order."""
    prefix = f"{name}/" if is_nested else ""
    parts = {key: action_part(space, f"{prefix}{key}", is_nested=True) for key, space in inner.items()}
    heads = tuple(head for part in parts.values() for head in part.heads)
    if as_tuple:
        return ActionPart(heads, lambda actions: tuple(part.build(actions) for part in parts.values()))
    return ActionPart(heads, lambda actions: {key: part.build(actions) for key, part in parts.items()})
