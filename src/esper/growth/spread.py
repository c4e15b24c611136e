"""How a change of the input spreads through a host: whether samples stay apart, and whether positions of a sequence see what comes later.

One entry of the example input is changed at a time, and the outputs of the host's submodules are compared with those of before.

Shapes: B = batch, T = positions in a sequence, L = positions along a line; outputs are [B, T, D] or [B, C, L].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from esper.growth.place import Place

Outputs = Mapping[str, Tensor]
Run = Callable[[Any], Outputs]  # the outputs of some submodules for an example input


@dataclass(frozen=True, slots=True)
class Spread:
    mixes: bool  # somewhere in a sequence, a change of the first sample changes other rows too: the batch is not the first dimension
    causal: frozenset[str]  # places where a change of the last position changes none before it
    looks_back: bool  # somewhere, a change of the first position changes later ones


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for part in fields(value):
            yield from tensors_in(getattr(value, part.name))


def spread(places: Mapping[str, Place], example_input: Any, before: Outputs, run: Run) -> Spread:
    """Of places that are sequences. The host runs a few times more, unless there are none."""
    lines = {name: _position_axis(place) for name, place in places.items() if _position_axis(place) and place.positions > 1}
    if not lines:
        return Spread(mixes=False, causal=frozenset(), looks_back=False)
    samples = run(_changed(example_input, 0, axis=0, index=0)) if len(next(tensors_in(example_input))) > 1 else before
    mixes = any(not _same(before[name][1:], samples[name][1:]) for name in lines)
    causal, looks_back = set[str](), False
    for number, tensor in enumerate(tensors_in(example_input)):
        for axis in _sequence_axes(tensor):
            after = run(_changed(example_input, number, axis=axis, index=-1))
            tails = {name for name, line in lines.items() if _only_the_tail(before[name], after[name], line, tensor.shape[axis])}
            causal |= tails
            if tails and not looks_back:
                after = run(_changed(example_input, number, axis=axis, index=0))
                looks_back = any(_beyond_the_head(before[name], after[name], lines[name]) for name in tails)
    return Spread(mixes, frozenset(causal), looks_back)


def _position_axis(place: Place) -> int:
    """Of the output; 0 where it has none, or two."""
    if place.kind == "token":
        return 1
    return 2 if place.spatial == 1 else 0


def _sequence_axes(tensor: Tensor) -> tuple[int, ...]:
    """Of an input that may hold the positions: [B, T, ...], and [B, C, L] as well."""
    axes = (1, 2) if tensor.ndim == 3 else (1,)
    return tuple(axis for axis in axes if tensor.ndim > axis and tensor.shape[axis] > 1)


def _only_the_tail(before: Tensor, after: Tensor, line: int, length: int) -> bool:
    """A change at the end has come through, and went nowhere else."""
    is_strided = line == 2 and before.shape[line] != length  # a strided convolution, of which nothing can be told
    earlier = before.shape[line] - 1
    return not is_strided and not _same(before, after) and _same(before.narrow(line, 0, earlier), after.narrow(line, 0, earlier))


def _beyond_the_head(before: Tensor, after: Tensor, line: int) -> bool:
    rest = before.shape[line] - 1
    return not _same(before.narrow(line, 1, rest), after.narrow(line, 1, rest))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.allclose(other, rtol=0.0, atol=0.0, equal_nan=True)


def _changed(value: Any, number: int, *, axis: int, index: int) -> Any:
    """The same with one entry of its tensor of this number changed."""
    tensor = list(tensors_in(value))[number]
    changed = tensor.clone()
    changed.select(axis, index).copy_(_something_else(tensor, axis, index))
    return _replaced(value, tensor, changed)


def _something_else(tensor: Tensor, axis: int, index: int) -> Tensor:
    """An entry that differs from the present one, and that the host can take: the one at the other end, so a token that it knows."""
    present, other = tensor.select(axis, index), tensor.select(axis, -1 - index)
    return other if not other.equal(present) else (present == 0).to(tensor.dtype)


def _replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    if value is old:
        return new
    if isinstance(value, Mapping):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_replaced(item, old, new) for item in value]
    return value
