"""Find out how a change of the input spreads through a host: which dimension is the batch, and which places are causal.

One entry of the example input is changed at a time, and the outputs of the host's submodules are compared with those before. Entries in the
middle say most, because a host may drop, shift or mask the first and the last ones.

A place in a sequence counts as causal unless there is proof of the opposite: in a causal host, a seed that looks ahead would see the
targets. For token places the proof is that every change, at any position of any input, reaches the first position. Convolutions along a
line spread a change only over a few positions. There it is enough that a change reaches positions before its own, if the positions of the
place correspond to those of the input.

Shapes: B = batch, T = positions in a sequence, L = positions along a line; outputs are [B, T, D], [T, B, D], [B, C, L], [B, C, H, W] or
[B, H, W, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.growth.host.layout import Place
from esper.growth.host.slots import tensors_in

Outputs = Mapping[str, Tensor]  # submodule -> its output

# Runs the host on an example input. Returns the outputs of all submodules that ran once; None if the host cannot run the example.
RunExample = Callable[[Any], Outputs | None]

Nudge = tuple[str, int, int]  # (place, dimension, index): the part of the place's output that is changed during the forward pass
RunNudged = Callable[[Any, Nudge | None], Outputs | None]

NEGLIGIBLE = 1e-6  # relative to the largest change: a mask of large finite numbers lets such small changes through


class Effect(NamedTuple):
    """A change at position `at` of an input has changed positions `first` to `last` of a place."""

    at: int
    first: int
    last: int


# The batch


def doubled(example_input: Any, batch: int) -> Any:
    """Return the example twice in one batch; `batch` is its batch size."""
    return _with_tensors(example_input, (torch.cat([t, t]) if t.ndim and len(t) == batch else t for t in tensors_in(example_input)))


def without_samples(before: Outputs, twice: Outputs | None) -> frozenset[str]:
    """Return the submodules whose output is the same for a doubled batch: they see no sample, as an embedding of positions does."""
    return frozenset() if twice is None else frozenset(name for name, output in before.items() if _same(output, twice.get(name)))


def batch_axes(example_input: Any, before: Outputs, twice: Outputs | None, batch: int, run: RunExample) -> dict[str, int | str]:
    """Return the batch dimension of every output, or a text that says why it is uncertain.

    `twice` has the outputs for the doubled batch; the dimension that becomes twice as large is the batch. If the host cannot run that,
    one sample is changed: the dimension in which only one entry changes is the batch.
    """
    changed = run(_changed(example_input, 0, axis=0, index=0)) if batch > 1 else None
    found: dict[str, int | None] = {}
    for name, output in before.items():
        if twice is not None:
            axes = _grown_axes(output, twice.get(name))
        elif changed is not None:
            axes = [axis for axis in range(output.ndim) if output.shape[axis] == batch and _stays_in_first(output, changed.get(name), axis)]
            axes = axes if not _same(output, changed.get(name)) else []
        else:
            axes = [axis for axis in range(output.ndim) if output.shape[axis] == batch]
        found[name] = axes[0] if len(axes) == 1 and output.shape[axes[0]] == batch else None
    if changed is not None and _is_batch_second(found, before, changed, example_input, run):
        reason = "has no batch as its first dimension, because one sample changes others; if time is first, use batch_first=True"
        return dict.fromkeys(before, reason)
    return {
        name: f"gives {list(before[name].shape)}, and it is uncertain which dimension is the batch of {batch}" if axis is None else axis
        for name, axis in found.items()
    }


def _grown_axes(before: Tensor, after: Tensor | None) -> list[int]:
    """Return the dimensions whose size has changed."""
    if after is None or after.ndim != before.ndim:
        return []
    return [axis for axis, (one, two) in enumerate(zip(before.shape, after.shape, strict=True)) if one != two]


def _is_batch_second(axes: Mapping[str, int | None], before: Outputs, changed: Outputs, example_input: Any, run: RunExample) -> bool:
    """Return whether the second dimension of the input, not the first, is the batch.

    That is so if a change of the first sample changes other samples somewhere, and a change along the second dimension stays in its own
    entry at all these places. The first condition alone is no proof: samples also mix in batch statistics, for example.
    """
    first = next(tensors_in(example_input))
    known = {name: axis for name, axis in axes.items() if axis is not None}
    mixed = [name for name, axis in known.items() if not _stays_in_first(before[name], changed.get(name), axis)]
    across = run(_changed(example_input, 0, axis=1, index=0)) if mixed and first.ndim > 1 and first.shape[1] > 1 else None
    if across is None:
        return False
    return all(
        any(
            axis != known[name] and size == first.shape[1] and _stays_in_first(before[name], across.get(name), axis)
            for axis, size in enumerate(before[name].shape[:-1])
        )
        for name in mixed
    )


def _stays_in_first(before: Tensor, after: Tensor | None, axis: int) -> bool:
    """Return whether a change of the first entry along this dimension has left all other entries as they were."""
    rest = before.shape[axis] - 1
    return after is not None and before.shape == after.shape and _same(before.narrow(axis, 1, rest), after.narrow(axis, 1, rest))


# Causality


def causal_places(places: Mapping[str, Place], example_input: Any, before: Outputs, run: RunExample) -> frozenset[str]:
    """Return the names of places where a seed must not look ahead. If there are places with positions, the host runs several times."""
    with_positions = {name: place for name, place in places.items() if place.kind != "dense"}
    if not with_positions:
        return frozenset()
    again = run(example_input) or {}
    # A changed output proves nothing at places whose output differs between two runs on the same input.
    repeatable = {name: place for name, place in with_positions.items() if _same(before[name], again.get(name))}
    looks_ahead, causal = _find_order(repeatable, example_input, before, run)
    unknown = {name for name, place in with_positions.items() if not place.is_plane and name not in looks_ahead}
    return frozenset(causal | unknown)


def _find_order(repeatable: Mapping[str, Place], example_input: Any, before: Outputs, run: RunExample) -> tuple[set[str], set[str]]:
    """Return the places that look ahead, and the places that are causal. A place in both counts as causal."""
    causal = set[str]()
    looks_ahead = set[str]()
    for number, tensor in enumerate(tensors_in(example_input)):
        undecided = {name: place for name, place in repeatable.items() if name not in causal}
        # Place -> the dimensions of this input along which a change reaches it.
        reached_along: dict[str, set[int]] = {name: set() for name in undecided}
        axes = [axis for axis in range(1, tensor.ndim) if tensor.shape[axis] > 1]
        for axis in axes:
            undecided = {name: place for name, place in undecided.items() if name not in causal}
            for name, effects in _effects(undecided, example_input, number, axis, before, run).items():
                if effects:
                    reached_along[name].add(axis)
                if _counts_as_causal(effects, tensor.shape[axis], undecided[name]):
                    causal.add(name)
        for name, along in reached_along.items():
            if along and len(along) < len(axes) and not repeatable[name].is_plane:
                causal.add(name)  # its positions may belong to a dimension whose changes do not reach it
            elif along:
                looks_ahead.add(name)
    return looks_ahead, causal


def _effects(
    places: Mapping[str, Place], example_input: Any, number: int, axis: int, before: Outputs, run: RunExample
) -> dict[str, list[Effect]]:
    """Change positions along one dimension of one input, one at a time, and return the effects at each place."""
    length = list(tensors_in(example_input))[number].shape[axis]
    # A plane is tested only along its rows and with few changes: only a host that generates images pixel by pixel is causal there.
    found: dict[str, list[Effect]] = {name: [] for name, place in places.items() if not place.is_plane or _rows(place) == length}
    is_undecided = dict.fromkeys(found, True)
    for count, index in enumerate(_indices(length, [places[name] for name in found])):
        # Stop when the answer is known for all places, or when the first three changes reach none of them.
        has_effect = any(found.values())
        if not any(is_undecided.values()) or (count == 3 and not has_effect):
            break
        after = run(_changed(example_input, number, axis=axis, index=index))
        if after is None:
            continue
        for name in found:
            effect = _effect(before[name], after.get(name), places[name], index)
            if effect is not None:
                found[name].append(effect)
                if places[name].is_plane:
                    is_undecided[name] = is_undecided[name] and effect.first >= index and count < 3
                elif places[name].kind == "token":
                    is_undecided[name] = is_undecided[name] and effect.first == 0
    return found


def _indices(length: int, places: Sequence[Place]) -> list[int]:
    """Return the positions to change, most informative first: around the middle, then those aligned with a place's middle position."""
    aligned = [_stride(length, place) * (place.positions // 2) for place in places if place.spatial == 1]
    candidates = [length // 2, length // 4, 3 * length // 4, *aligned, 1, length - 1, length - 2, 0]
    return [index for index in dict.fromkeys(candidates) if 0 <= index < length]


def _stride(length: int, place: Place) -> int:
    """Return how many positions of the input correspond to one of the place."""
    return max(round(length / place.positions), 1)


def _rows(place: Place) -> int:
    return place.shape[1] if place.kind == "conv" else place.shape[0]


def _effect(before: Tensor, after: Tensor | None, place: Place, index: int) -> Effect | None:
    """Return the positions of a place that a change at `index` of an input has changed; None if it has changed none."""
    if after is None or before.shape != after.shape:
        return Effect(index, 1, 1)  # positions cannot be compared; this effect is no proof of a look ahead
    change = torch.where(before == after, 0.0, (after.double() - before.double()).abs()).nan_to_num(posinf=torch.inf, nan=torch.inf)
    # Reduce [B, T, D] and [T, B, D] to [T], [B, C, L] to [L], and [B, C, H, W] and [B, H, W, D] to the rows [H].
    line = 2 if place.kind == "conv" else 1 - place.batch_axis
    profile = change.movedim(line, 0).flatten(1).amax(1)
    reached = (profile > NEGLIGIBLE * profile.amax().clamp(max=torch.finfo(torch.float64).max)).nonzero().flatten()
    return Effect(index, int(reached[0]), int(reached[-1])) if len(reached) else None


def _counts_as_causal(effects: Sequence[Effect], length: int, place: Place) -> bool:
    """Return whether a place must be treated as causal: a line or sequence without proof of a look ahead, a plane with proof of none."""
    if place.is_plane:
        reaches_on = any(effect.last > effect.at for effect in effects)
        return reaches_on and all(effect.first >= effect.at for effect in effects)
    if not effects:
        return False
    if len(effects) > 1 and all(effect.first == 0 for effect in effects):
        return False
    if place.kind == "token":
        return True
    stride = _stride(length, place)
    # Positions of place and input correspond if none were cut off or added, and none were shifted.
    has_all = place.positions == -(-length // stride)
    begins_with_first = any(effect.at == effect.first == 0 for effect in effects)
    return not (has_all and begins_with_first and any(effect.first < effect.at // stride for effect in effects))


# Padding


def hides(places: Mapping[str, Place], example_input: Any, run: RunNudged) -> bool:
    """Return whether the host hides positions of a sequence depending on the values of an input, as it does with padding.

    The output of the first fitting place is changed at one position, with the example as it is and with values that may mean padding from
    that position on. The host hides positions if other positions notice the change in some of these cases only.
    """
    tokens = [name for name, place in places.items() if place.kind == "token" and not place.is_plane and place.positions > 2]
    for number, tensor in enumerate(tensors_in(example_input)):
        first = next((name for name in tokens if tensor.ndim > 1 and places[name].shape[0] == tensor.shape[1]), None)
        if first is None:
            continue
        nudge = first, 1 - places[first].batch_axis, tensor.shape[1] // 2
        noticed = _noticed(places, tokens, example_input, nudge, run)
        if noticed is None:
            continue
        if noticed.any() and not noticed.all():
            return True
        for filler in (0.0, 1.0, -1e9) if tensor.is_floating_point() and tensor.ndim == 2 else (0, 1):
            padded = tensor.clone()
            padded[:, nudge[2] :] = filler
            noticed_padded = _noticed(places, tokens, _with_tensor(example_input, number, padded), nudge, run)
            if noticed_padded is not None and bool((noticed & ~noticed_padded).any()):
                return True
    return False


def _noticed(places: Mapping[str, Place], tokens: Sequence[str], example_input: Any, nudge: Nudge, run: RunNudged) -> Tensor | None:
    """Return for each sample [B] whether a nudge changes more than one position of some place; None if that cannot be found out."""
    before, after = run(example_input, None), run(example_input, nudge)
    if before is None or after is None or nudge[0] not in before:
        return None
    noticed = torch.zeros(before[nudge[0]].shape[places[nudge[0]].batch_axis], dtype=torch.bool)
    for name in tokens:
        if name in before and name in after and before[name].shape == after[name].shape:
            is_changed = (before[name] != after[name]).movedim(places[name].batch_axis, 0).any(2).cpu()  # [B, T]
            noticed |= is_changed.sum(1) > 1
    return noticed


# Changes


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and one.allclose(other, rtol=0.0, atol=0.0, equal_nan=True)


def _changed(value: Any, number: int, *, axis: int, index: int) -> Any:
    """Return the example with one entry of one of its tensors changed; `number` is its index in `tensors_in`."""
    tensor = list(tensors_in(value))[number]
    changed = tensor.clone()
    changed.select(axis, index).copy_(_other_value(tensor, axis, index))
    return _with_tensor(value, number, changed)


def _with_tensor(value: Any, number: int, tensor: Tensor) -> Any:
    """Return the example with the tensor of this number replaced."""
    tensors = list(tensors_in(value))
    tensors[number] = tensor
    return _with_tensors(value, iter(tensors))


def _other_value(tensor: Tensor, axis: int, index: int) -> Tensor:
    """Return another value for an entry, if possible that of another entry: so a token index stays within the host's vocabulary."""
    present = tensor.select(axis, index)
    others = (tensor.select(axis, other) for other in (-1 - index, *range(min(tensor.shape[axis], 16))))
    found = next((other for other in others if not other.equal(present)), None)
    if found is not None:
        return found
    if present.is_floating_point() or present.is_complex() or present.dtype == torch.bool:
        return (present == 0).to(tensor.dtype)
    return torch.where(present > 0, present - 1, 1)  # never negative: losses ignore labels such as -100


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same tree with these tensors, in the order of `tensors_in`. A tensor that occurs twice may become two tensors."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_with_tensors(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{part.name: _with_tensors(getattr(value, part.name), tensors) for part in fields(value)})
    return value
