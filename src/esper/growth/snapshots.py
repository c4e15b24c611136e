"""The last healthy states of a run, on the CPU: what to go back to after a disaster.

A state is a tree: dicts, lists and tuples of tensors and plain values, as modules, optimisers and schedulers give by `state_dict`. Memory
is bounded and flat: a new snapshot is written over the oldest one, tensor by tensor, and only what is new or has changed its shape is
allocated. Two names for one tensor, such as tied weights, are stored twice and restore the same values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from esper.checkpoint.tree import Tree


@dataclass(frozen=True, slots=True)
class Snapshot:
    epoch: int  # finished when it was taken
    state: Tree


class Snapshots:
    """At most `keep` snapshots, of which the oldest gives way.

    >>> weight = torch.ones(2)
    >>> snapshots = Snapshots(keep=2)
    >>> snapshots.take({"weight": weight}, epoch=1)
    >>> weight.mul_(float("nan"))
    tensor([nan, nan])
    >>> snapshots.latest()
    Snapshot(epoch=1, state={'weight': tensor([1., 1.])})
    """

    def __init__(self, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, the number of snapshots; got {keep}")
        self.keep = keep
        self._entries: list[Snapshot] = []  # oldest first

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def epochs(self) -> tuple[int, ...]:
        """When each was taken, oldest first."""
        return tuple(entry.epoch for entry in self._entries)

    @property
    def nbytes(self) -> int:
        """Of all tensors that are held."""
        return sum(tensor.nbytes for entry in self._entries for tensor in _tensors(entry.state))

    def take(self, state: Tree, *, epoch: int) -> None:
        """Copies `state`. Where that fails half-way, the snapshot that was being written over is gone and the others are whole."""
        oldest = self._entries.pop(0).state if len(self._entries) == self.keep else None
        self._entries.append(Snapshot(epoch, _copy(state, over=oldest)))

    def add(self, place: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors into the dict at this place of every snapshot, as if they had been there when it was taken."""
        for entry in self._entries:
            for name, tensor in _copy(dict(tensors)).items():
                self._dict_at(entry, place).setdefault(name, tensor)

    def latest_keys(self, place: Sequence[str]) -> set[str]:
        """The keys of the dict at this place of the latest snapshot."""
        return set(self._dict_at(self._entries[-1], place)) if self._entries else set()

    @staticmethod
    def _dict_at(entry: Snapshot, place: Sequence[str]) -> dict[str, Tree]:
        found: dict[str, Tree] = entry.state
        for key in place:
            found = found[key]
        return found

    def latest(self, *, skip: int = 0) -> Snapshot | None:
        """A copy, for the caller to keep; with `skip`, of an earlier one.

        Not the tensors that are held: `load_state_dict` of an optimiser takes tensors over as they are where device and dtype fit, and its
        next step would write into the snapshot.
        """
        if len(self._entries) <= skip:
            return None
        entry = self._entries[-1 - skip]
        return Snapshot(entry.epoch, _copy(entry.state))

    def drop_latest(self) -> None:
        """Forgets the latest, for when going back to it has led to disaster again: the one before it is now the latest."""
        if not self._entries:
            raise IndexError("there is no snapshot to drop; look at len() first")
        self._entries.pop()

    def clear(self) -> None:
        self._entries.clear()

    def state_dict(self) -> dict[str, Tree]:
        """The snapshots themselves, not copies: to be written before the next is taken."""
        return {"entries": [{"epoch": entry.epoch, "state": entry.state} for entry in self._entries]}

    def load_state_dict(self, state: dict[str, Tree]) -> None:
        """Copies the snapshots of another run, the latest ones where it kept more."""
        self._entries = [Snapshot(entry["epoch"], _copy(entry["state"])) for entry in state["entries"][-self.keep :]]


def copy_of(state: Tree) -> Tree:
    """A copy in CPU memory, for the caller to keep."""
    return _copy(state)


def _copy(state: Tree, *, over: Tree = None) -> Tree:
    """`state` in CPU memory of its own, which is that of `over` where a tensor there has the same place, shape and dtype."""
    devices: set[torch.device] = set()
    with torch.no_grad():
        result = _copy_tree(state, over, devices)
    for device in devices:
        torch.cuda.synchronize(device)  # once for all copies, none of which was waited for
    return result


def _copy_tree(value: Tree, over: Tree, devices: set[torch.device]) -> Tree:
    if isinstance(value, Tensor):
        return _copy_tensor(value, over, devices)
    if isinstance(value, dict):
        below = over if isinstance(over, dict) else {}
        result = copy.copy(value)  # keeps the type, and the `_metadata` of a module's state
        for key, item in value.items():
            result[key] = _copy_tree(item, below.get(key), devices)
        return result
    if type(value) in (list, tuple):
        items = over[: len(value)] if type(over) in (list, tuple) else ()
        return type(value)(_copy_tree(item, old, devices) for item, old in zip_longest(value, items))
    return copy.deepcopy(value)


def _copy_tensor(value: Tensor, over: Tree, devices: set[torch.device]) -> Tensor:
    fits = isinstance(over, Tensor) and over.shape == value.shape and over.dtype == value.dtype
    if value.is_cuda:
        devices.add(value.device)
        fits = fits and over.is_pinned()  # what a checkpoint brought is not
    target: Tensor = over if fits else torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)
    return target.copy_(value, non_blocking=value.is_cuda)


def _tensors(tree: Tree) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
    elif type(tree) in (list, tuple):
        for item in tree:
            yield from _tensors(item)
