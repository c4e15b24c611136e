"""Snapshots of the states of a run in CPU memory: healthy ones, to go back to, and those that may turn out to be the best.

`Snapshots` stores states. A state is a tree: dicts, lists and tuples of tensors and plain values, as `state_dict` of modules, optimisers
and schedulers returns. Memory is bounded: a new snapshot overwrites the oldest one tensor by tensor, and only tensors that are new or have
another shape are allocated. A tensor with two names, such as tied weights, is stored twice.

`BestStates` holds the states of the best epochs, so that a training can end with the best one. They hold the same parameters and buffers as
snapshots and the connected seeds, and no optimiser.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from esper.growth.lifecycle.backend import AnyBackend
from esper.growth.lifecycle.ledger import Ledger
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.stages import Stage
from esper.runs.tensors import Tree
from esper.text_table import figure

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of a run, with the number of epochs that were finished when it was taken."""

    epoch: int
    state: Tree


class SnapshotHistory:
    """The latest snapshots of one host: at most `keep`, one per epoch. Models and fleets share these rules, and differ in the storage.

    `_store(state, over)` returns the form in which a state is kept. `over` is the stored state of the snapshot that the new one replaces;
    None if it replaces none.
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
        """Epochs of the snapshots, oldest first."""
        return tuple(entry.epoch for entry in self._entries)

    def take(self, state: Tree, *, epoch: int) -> None:
        """Store `state`. It replaces a snapshot of the same epoch, or else the oldest one if there are `keep`.

        If storing fails, the snapshot that was being replaced is lost and the others are intact.
        """
        replaced = None
        if self.epochs[-1:] == (epoch,):
            replaced = self._entries.pop().state
        elif len(self._entries) == self.keep:
            replaced = self._entries.pop(0).state
        self._entries.append(Snapshot(epoch, self._store(state, replaced)))

    def _store(self, state: Tree, over: Tree) -> Tree:
        raise NotImplementedError

    def to_restore(self, *, is_repeated: bool) -> Snapshot:
        """Return the snapshot to go back to: the latest, or the one before it if the latest has led to another disaster (`is_repeated`)."""
        return self._entries[-2 if is_repeated and len(self._entries) > 1 else -1]

    def drop_after(self, snapshot: Snapshot) -> None:
        """Remove the snapshots that are newer than this one. Call it when this one has been restored."""
        self._entries = [entry for entry in self._entries if entry.epoch <= snapshot.epoch]


class Snapshots(SnapshotHistory):
    """Snapshots in CPU memory.

    >>> weight = torch.ones(2)
    >>> snapshots = Snapshots(keep=2)
    >>> snapshots.take({"weight": weight}, epoch=1)
    >>> weight.mul_(float("nan"))
    tensor([nan, nan])
    >>> snapshots.latest()
    Snapshot(epoch=1, state={'weight': tensor([1., 1.])})
    """

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for entry in self._entries for tensor in _tensors(entry.state))

    def _store(self, state: Tree, over: Tree) -> Tree:
        return copy_of(state, over=over)

    def add(self, place: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the dict at path `place` of every snapshot, except under names that it already has."""
        for entry in self._entries:
            for name, tensor in copy_of(dict(tensors)).items():
                self._dict_at(entry, place).setdefault(name, tensor)

    def latest_keys(self, place: Sequence[str]) -> set[str]:
        """Return the keys of the dict at path `place` of the latest snapshot; empty without one."""
        return set(self._dict_at(self._entries[-1], place)) if self._entries else set()

    @staticmethod
    def _dict_at(entry: Snapshot, place: Sequence[str]) -> dict[str, Tree]:
        found: dict[str, Tree] = entry.state
        for key in place:
            found = found[key]
        return found

    def latest(self) -> Snapshot | None:
        """Return a copy of the latest snapshot; None if there is none."""
        return replace(self._entries[-1], state=copy_of(self._entries[-1].state)) if self._entries else None

    def state_dict(self) -> dict[str, Tree]:
        """Return the stored snapshots without copying them. Write them to disk before the next one is taken."""
        return {"entries": [{"epoch": entry.epoch, "state": entry.state} for entry in self._entries]}

    def load_state_dict(self, state: dict[str, Tree]) -> None:
        """Copy saved snapshots; only the latest `keep` of them."""
        self._entries = [Snapshot(entry["epoch"], copy_of(entry["state"])) for entry in state["entries"][-self.keep :]]


def copy_of(state: Tree, *, over: Tree = None) -> Tree:
    """Copy a tree to CPU memory. Reuse the memory of `over` where it has a tensor of the same shape and dtype at the same place."""
    devices: set[torch.device] = set()
    with torch.no_grad():
        result = _copy_tree(state, over, devices)
    for device in devices:
        torch.cuda.synchronize(device)  # wait once for all asynchronous copies
    return result


def _copy_tree(value: Tree, over: Tree, devices: set[torch.device]) -> Tree:
    """Copy a tree recursively; add the devices of asynchronous copies to `devices`."""
    if isinstance(value, Tensor):
        return _copy_tensor(value, over, devices)
    if isinstance(value, dict):
        below = over if isinstance(over, dict) else {}
        result = copy.copy(value)  # keep the type, and `_metadata` of a module's state dict
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
        fits = fits and over.is_pinned()  # tensors loaded from a checkpoint are not pinned
    target: Tensor = over if fits else torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)
    return target.copy_(value, non_blocking=value.is_cuda)


def _tensors(tree: Tree) -> Iterator[Tensor]:
    """Yield all tensors in a tree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
    elif type(tree) in (list, tuple):
        for item in tree:
            yield from _tensors(item)


@dataclass(frozen=True, slots=True, eq=False)
class BestState:
    """The trained state after an epoch: parameters and buffers of the host, and the connected seeds, all as if they were kept."""

    epoch: int
    val_loss: float
    metrics: dict[str, float]
    seeds: tuple[int, ...]  # numbers of the connected seeds in the ledger
    state: State


class BestStates:
    """The states that may turn out to be the best one of a run, among those whose seeds are all kept in the end.

    The best one has the lowest validation loss, or the highest value of the metric `by`; the loss decides between equal values.

    An epoch is measured with the seeds that are connected in it, and a seed on trial may be pruned later. So a state with seeds on trial is
    held beside a worse one without them, and dropped when one of its seeds is pruned or rolled back. Of two states, the worse one is
    dropped if it depends on all verdicts that the better one depends on. So there is at most one state more than there are seeds on
    trial. They are in CPU memory, and a new state reuses the memory of one that it replaces.

    `_store(state, over)` returns the form in which a state is kept, as in `SnapshotHistory`.
    """

    def __init__(self, ledger: Ledger, *, by: str | None = None) -> None:
        self._ledger, self.by = ledger, by
        self._states: list[BestState] = []

    def rank(self, val_loss: float, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return a rank of a state with these figures, the lower the better."""
        return (val_loss,) if self.by is None else (-metrics[self.by], val_loss)

    def why_left_out(self, best: BestState) -> str:
        """Return why a seed is not in the best state, which was restored."""
        if self.by is None:
            was_best = f"the validation loss was lowest, {figure(best.val_loss)},"
        else:
            was_best = f"the validation {self.by} was highest, {figure(best.metrics[self.by])},"
        return f"taken out: {was_best} after epoch {best.epoch}, when it was not connected"

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for one in self._states for tensor in _tensors(one.state))

    def candidate(self, lifecycles: Lifecycles[AnyBackend], val_loss: float, metrics: dict[str, float]) -> BestState | None:
        """Return the present state if it may turn out to be the best one, still without its `state`; None if it cannot.

        It cannot while alpha of a connected seed is still moving.
        """
        connected = [slot.record for slot in lifecycles.slots.values() if slot.is_connected]
        is_finite = all(map(math.isfinite, self.rank(val_loss, metrics)))
        if not is_finite or any(record.stage is Stage.BLENDING for record in connected):
            return None
        seeds = tuple(record.number for record in connected if record.number is not None)
        new = BestState(lifecycles.epoch, val_loss, metrics, seeds, {})
        return new if new in self._chosen(new) else None

    def take(self, new: BestState) -> None:
        """Copy a state that may turn out to be the best, and drop those that it makes superfluous."""
        chosen = self._chosen(new)
        gone = [one for one in self._states if one not in chosen]
        self._states = [one for one in chosen if one is not new]
        self._states.append(replace(new, state=self._store(new.state, gone[-1].state if gone else None)))

    def _store(self, state: State, over: State | None) -> State:
        stored: State = copy_of(state, over=over)
        return stored

    def _chosen(self, new: BestState) -> list[BestState]:
        """Return the states that may turn out to be the best, among those that are held and a new one."""
        outcomes = {seed.number: seed.outcome for seed in self._ledger.seeds}

        def on_trial(one: BestState) -> set[int]:
            return {number for number in one.seeds if outcomes[number] == "living"}

        # From the best state to the worst: a state is of no use if a better one is left whenever this one is left.
        chosen: list[BestState] = []
        for one in sorted([*self._states, new], key=self._order):
            is_lost = any(outcomes[number] not in ("living", "kept") for number in one.seeds)
            if not is_lost and not any(on_trial(better) <= on_trial(one) for better in chosen):
                chosen.append(one)
        return chosen

    def add(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy parameters of the host into every state, except under names that it already has."""
        for one in self._states:
            for name, tensor in copy_of(dict(parameters)).items():
                one.state["parameters"].setdefault(name, tensor)

    def best(self) -> BestState | None:
        """Return the best state among those whose seeds are all kept; None if there is none."""
        kept = {seed.number for seed in self._ledger.seeds if seed.outcome == "kept"}
        return min((one for one in self._states if kept.issuperset(one.seeds)), key=self._order, default=None)

    def _order(self, one: BestState) -> tuple[float, ...]:
        return *self.rank(one.val_loss, one.metrics), one.epoch

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the stored states without copying them. Write them to disk before the next one is taken."""
        names = [one.name for one in fields(BestState)]
        return [{name: getattr(one, name) for name in names} | {"seeds": list(one.seeds)} for one in self._states]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Copy saved states."""
        self._states = [BestState(**one | {"seeds": tuple(one["seeds"]), "state": copy_of(one["state"])}) for one in states]
