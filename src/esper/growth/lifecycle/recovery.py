"""Snapshots of the healthy states of a run in CPU memory, rollback to one of them, and the checkpoint of the whole state.

`Snapshots` stores states. A state is a tree: dicts, lists and tuples of tensors and plain values, as `state_dict` of modules, optimisers
and schedulers returns. Memory is bounded: a new snapshot overwrites the oldest one tensor by tensor, and only tensors that are new or have
another shape are allocated. A tensor with two names, such as tied weights, is stored twice.

`Recovery` takes and restores snapshots of one growing model. A snapshot holds everything that can change: trained parameters, all buffers,
the optimisers of host and seeds, loss scale, schedule and the seeds. Frozen parameters are left out as long as nothing changes them:

- A parameter that is new or no longer frozen is added to the snapshots just before its first step, so a rollback restores that value.
- A frozen parameter that the training loop changes by hand (a momentum encoder) is added once the change is noticed. This is checked after
  the very first step and at every snapshot; a rollback before that leaves the parameter as it is.

A rollback also handles things that have appeared since the snapshot. It removes a buffer that a forward pass created, gives a resized or
replaced buffer its former size, and keeps a group that was added to the optimiser, with its settings and without optimiser state.
Everything is checked first. If something does not fit, or an object of the user refuses its state, nothing changes.

`BestStates` holds the states of the best epochs, so that a training can end with the best one. They hold
the same parameters and buffers as snapshots and the connected seeds, and no optimiser.

Checkpoints (`Recovery.state_dict`) hold everything, frozen parameters included.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.growth.config import GrowthError
from esper.growth.host.isolation import is_expanded
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.governor import Governor
from esper.growth.lifecycle.ledger import Ledger
from esper.growth.lifecycle.slots import AnyBackend, ModuleBackend, SlotLifecycles, first_slots
from esper.growth.lifecycle.stages import Stage
from esper.growth.seeds.seed import nested
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
        """Return why a kept seed is not in the best state, which was restored."""
        if self.by is None:
            was_best = f"the validation loss was lowest, {figure(best.val_loss)},"
        else:
            was_best = f"the validation {self.by} was highest, {figure(best.metrics[self.by])},"
        return f"taken out: {was_best} after epoch {best.epoch}, when it was not connected"

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for one in self._states for tensor in _tensors(one.state))

    def candidate(self, lifecycles: SlotLifecycles[AnyBackend], val_loss: float, metrics: dict[str, float]) -> BestState | None:
        """Return the present state if it may turn out to be the best one, still without its `state`; None if it cannot.

        It cannot while alpha of a connected seed is still moving.
        """
        connected = [backend.life for backend in lifecycles.backends.values() if backend.is_connected]
        is_finite = all(map(math.isfinite, self.rank(val_loss, metrics)))
        if not is_finite or any(life.stage is Stage.BLENDING for life in connected):
            return None
        seeds = tuple(life.number for life in connected if life.number is not None)
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
        outcomes = {entry.number: entry.outcome for entry in self._ledger.entries}

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
        kept = {entry.number for entry in self._ledger.entries if entry.outcome == "kept"}
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


class Recovery:
    """Takes and restores snapshots of a growing model: host, optimisers of host and seeds, loss scale, schedule and seeds.

    `keep` is the number of snapshots for the governor. `best_states` has the states that may turn out to be the best one, by the metric
    `best_by` or by the loss.
    """

    def __init__(
        self,
        slotted: Slotted,
        optimizer: Optimizer,
        lifecycles: SlotLifecycles[ModuleBackend],
        governor: Governor,
        *,
        keep: int,
        scaler: GradScaler | None,
        scheduler: Any,
        best_by: str | None = None,
    ) -> None:
        self.host, self.optimizer, self.lifecycles, self.governor = slotted.host, optimizer, lifecycles, governor
        self.scaler, self.scheduler = scaler, scheduler
        self._optimizers = nested(optimizer)  # the user's optimiser and those that it wraps
        self._snapshots = Snapshots(keep)
        self.best_states = BestStates(lifecycles.ledger, by=best_by)
        self._held: set[int] = set()  # ids of parameters that are in the snapshots, or that the optimiser holds and the host does not
        self._moving: set[str] = set()  # names of frozen parameters that the training loop changes by hand
        self._checksums = self._frozen_checksums()  # checksums of the other frozen parameters at the last check

    # Snapshots

    def take_snapshot(self) -> None:
        """Take a snapshot, unless a weight is not finite. Healthy losses do not rule that out, and such a snapshot would be useless."""
        self.hold_moving()
        if not self.has_finite_weights():
            return
        changing = {name: parameter for name, parameter in self.host.named_parameters() if self._changes(name, parameter)}
        state = {**self._state(changing), "garden": self.lifecycles.state_dict()}  # the key that earlier versions gave the lifecycles
        self._snapshots.take({"now": state, "governor": self.governor.loss_state()}, epoch=self.lifecycles.epoch)
        self._held = {id(parameter) for parameter in changing.values()}

    def note_best(self, val_loss: float, metrics: dict[str, float]) -> None:
        """Hold the present state if it may turn out to be the best one and its weights are finite.

        Call it at the end of an epoch, before anything is decided.
        """
        new = self.best_states.candidate(self.lifecycles, val_loss, metrics)
        if new is not None and self.has_finite_weights():
            self.hold_moving()
            changing = {name: parameter for name, parameter in self.host.named_parameters() if self._changes(name, parameter)}
            state = {**self._parameters_and_buffers(changing), "garden": self.lifecycles.state_if_kept()}
            self.best_states.take(replace(new, state=state))

    def hold_new(self) -> None:
        """Add parameters that are about to be trained for the first time to the snapshots. Call it before a step of the optimiser."""
        new = [one for group in self.optimizer.param_groups for one in group["params"] if one.requires_grad and id(one) not in self._held]
        if new:
            names = {id(parameter): name for name, parameter in self.host.named_parameters()}
            self._hold({names[id(one)]: one for one in new if id(one) in names})
            self._held |= {id(one) for one in new}

    def hold_moving(self) -> None:
        """Add frozen parameters that have changed since the last check to the snapshots. Reads the device."""
        # A changed checksum means that the training loop writes to the parameter. From now on it belongs to every snapshot.
        checksums = self._frozen_checksums()
        found = {name for name, now in checksums.items() if name in self._checksums and now != self._checksums[name]}
        self._moving |= found
        self._checksums = {name: now for name, now in checksums.items() if name not in found}
        parameters = {name: parameter for name, parameter in self.host.named_parameters() if name in found}
        if _are_finite(parameters.values()):  # a snapshot must not get values that are not finite
            self._hold(parameters)

    def _hold(self, parameters: Mapping[str, Tensor]) -> None:
        """Add parameters with their present values to all snapshots."""
        self._snapshots.add(("now", "parameters"), parameters)
        self.best_states.add(parameters)
        self._held |= {id(parameter) for parameter in parameters.values()}

    def _changes(self, name: str, parameter: Tensor) -> bool:
        """Return whether a parameter of the host is expected to change, so that snapshots hold it."""
        return parameter.requires_grad or name in self._moving

    def _frozen_checksums(self) -> dict[str, int]:
        """Return a checksum of every parameter that is not expected to change."""
        frozen = {name: parameter for name, parameter in self.host.named_parameters() if not self._changes(name, parameter)}
        sums = [_checksum(parameter.detach()) for parameter in frozen.values()]
        read = torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []  # one read of the device
        return dict(zip(frozen, read, strict=True))

    def has_finite_weights(self) -> bool:
        """Return whether all changing parameters of the host and of its connected seeds are finite."""
        seeds = [
            backend.slot.seed
            for backend in self.lifecycles.backends.values()
            if backend.slot.is_connected and backend.slot.seed is not None
        ]
        own = [parameter for name, parameter in self.host.named_parameters() if self._changes(name, parameter)]
        return _are_finite([*own, *(parameter for seed in seeds for parameter in seed.parameters() if parameter.requires_grad)])

    def go_back(self, *, is_repeated: bool) -> int:
        """Restore the latest snapshot and return its epoch.

        `is_repeated` means that the latest snapshot has already led to another disaster. It is dropped then, if there is an earlier one.
        """
        snapshot = self._snapshots.to_restore(is_repeated=is_repeated)
        # Restore a copy: `load_state_dict` of an optimiser keeps the tensors it is given where device and dtype fit. Its next step would
        # write into the stored snapshot.
        state = copy_of(snapshot.state)
        self._check_others_are_finite(state["now"])
        self.restore(state["now"])
        self.governor.load_loss_state(state["governor"])
        self._snapshots.drop_after(snapshot)
        return snapshot.epoch

    def _check_others_are_finite(self, state: State) -> None:
        """Raise GrowthError if a parameter is not finite and is not in the state, so that it would not be restored."""
        held = {id(parameter) for name, parameter in self.host.named_parameters(remove_duplicate=False) if name in state["parameters"]}
        for name, parameter in self.host.named_parameters():
            if id(parameter) not in held and parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
                raise GrowthError(
                    f"there is no way back from a disaster: the frozen parameter {name} is not finite, and no snapshot holds it, because "
                    "it was changed by hand after the last one. Nothing was restored; keep the values that you write into it finite"
                )

    # Present state

    def now(self) -> State:
        """Return the whole present state. Its tensors are the live ones, not copies."""
        return {**self._state(dict(self.host.named_parameters(remove_duplicate=False))), "garden": self.lifecycles.state_dict()}

    def _state(self, parameters: dict[str, nn.Parameter]) -> State:
        """Return the present state without the seeds, with these parameters of the host."""
        outer, *inner = self._optimizers
        return {
            **self._parameters_and_buffers(parameters),
            "optimizer": outer.state_dict(),
            "inner_optimizers": [one.state_dict() for one in inner],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def _parameters_and_buffers(self, parameters: dict[str, nn.Parameter]) -> State:
        buffers = list(_buffers(self.host))
        return {
            "parameters": {name: parameter.detach() for name, parameter in parameters.items()},
            "buffers": {one.name: one.tensor for one in buffers if one.tensor is not None},
            "empty_buffers": [one.name for one in buffers if one.tensor is None],
            "transient_buffers": [one.name for one in buffers if one.own_name in one.module._non_persistent_buffers_set],
        }

    def restore(self, state: State, *, may_lack_buffers: bool = True) -> None:
        """Restore a state completely, or raise an error and change nothing.

        Buffers that are missing in the state are removed; with `may_lack_buffers=False` they are an error. Optimisers, loss scale and
        schedule stay as they are if the state has none, as that of a `BestState`.
        """
        # Check everything that can be checked, and prepare the rest.
        parameters = dict(self.host.named_parameters(remove_duplicate=False))
        for name, saved in state["parameters"].items():
            here = list(parameters[name].shape) if name in parameters else "missing"
            if here != list(saved.shape):
                raise GrowthError(
                    f"there is no way back to an earlier state: the parameter {name} is {here} now and was {list(saved.shape)}"
                )
        buffers = _BufferPlan(self.host, state, may_lack=may_lack_buffers)
        optimizers = self._optimizers
        is_whole = "optimizer" in state
        saved_states = [state["optimizer"], *state.get("inner_optimizers", [])] if is_whole else []
        merged = [_merged(one, saved) for one, saved in zip(optimizers, saved_states, strict=False)]

        # Load the parts that may still fail, such as a scheduler of the user. On an error, `undo` restores the parts already loaded.
        with ExitStack() as undo:

            def load(part: Any, saved: Any, before: Any) -> None:
                undo.callback(part.load_state_dict, before)  # first, because loading may fail half way
                part.load_state_dict(saved)

            # Schedule and loss scale come first, then the optimisers, outermost first, and the seeds last. Optimisers need no copy of
            # their state: loading replaces its tensors.
            share_groups = _groups_shared(optimizers)
            undo.callback(share_groups)
            if is_whole and self.scheduler is not None:
                load(self.scheduler, state["scheduler"], copy_of(self.scheduler.state_dict()))
            if is_whole and self.scaler is not None:
                load(self.scaler, state["scaler"], copy_of(self.scaler.state_dict()))
            for optimizer, saved in zip(optimizers, merged, strict=False):
                load(optimizer, saved, optimizer.state_dict())
            share_groups()
            load(self.lifecycles, state["garden"], copy_of(self.lifecycles.state_dict()))
            undo.pop_all()

        # Nothing below can fail.
        with torch.no_grad():
            for name, saved in state["parameters"].items():
                parameters[name].copy_(saved)
        for parameter in parameters.values():
            parameter.grad = None
        buffers.carry_out()

    # Checkpoints

    def state_dict(self) -> State:
        return {
            "optimizer": type(self.optimizer).__name__,
            "now": self.now(),
            "judge": self.governor.state_dict(),  # the key that earlier versions gave the governor
            "snapshots": self._snapshots.state_dict(),
            "best_states": self.best_states.state_dict(),
            "moving": sorted(self._moving),
        }

    def load_state_dict(self, state: State) -> None:
        """Load the state of a run with the same model, optimiser and schedule. If it does not fit, raise GrowthError and change nothing."""
        self._check_fits(state["optimizer"], state["now"])
        self.restore(state["now"], may_lack_buffers=False)
        self.governor.load_state_dict(state["judge"])
        self._snapshots.load_state_dict(state["snapshots"])
        self.best_states.load_state_dict(state.get("best_states", []))  # missing in files of earlier versions
        self._moving = set(state.get("moving", []))
        self._checksums = self._frozen_checksums()
        names = self._snapshots.latest_keys(("now", "parameters"))
        self._held = {id(parameter) for name, parameter in self.host.named_parameters(remove_duplicate=False) if name in names}

    def _check_fits(self, optimizer: str, state: State) -> None:
        """Raise GrowthError unless a saved state fits this model, optimiser, schedule and slots."""
        own = {name: list(parameter.shape) for name, parameter in self.host.named_parameters(remove_duplicate=False)}
        saved = {name: list(tensor.shape) for name, tensor in state["parameters"].items()}
        for name in sorted(own.keys() | saved.keys()):
            if own.get(name) != saved.get(name):
                there, here = (shapes.get(name, "missing") for shapes in (saved, own))
                raise GrowthError(f"the saved run is of another model: {name} is {there} in it and {here} here")
        kind = type(self.optimizer).__name__
        if optimizer != kind:
            raise GrowthError(f"the saved run was trained by {optimizer}, and this one has {kind}; use the same optimiser")
        sizes = [_sizes(groups) for groups in (state["optimizer"]["param_groups"], self.optimizer.param_groups)]
        if sizes[0] != sizes[1]:
            raise GrowthError(
                f"the saved run's optimiser had groups of {sizes[0]} parameters, this one has {sizes[1]}; give it the same groups before "
                "loading, including those added by add_param_group"
            )
        for part, mine in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            if (state[part] is None) != (mine is None):
                had, has = ("no", "one") if state[part] is None else ("a", "none")
                raise GrowthError(f"the saved run had {had} {part}, and this one has {has}; resume it as it was started")
        if first_slots(state["garden"]) != first_slots(self.lifecycles.backends):
            raise GrowthError(
                f"the saved run had the slots {', '.join(state['garden'])}, this one has {', '.join(self.lifecycles.backends)}; "
                "resume it with the same slots"
            )


def _checksum(tensor: Tensor) -> Tensor:
    """Return a checksum: the sum of the tensor's elements, read as integers. Different values almost always have different sums."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout != torch.strided:
        return torch.tensor(0 if tensor.is_inference() else tensor._version)  # the bits cannot be read; count writes instead
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(sizes[tensor.real.element_size()]).sum(dtype=torch.int64)


def _are_finite(weights: Iterable[Tensor]) -> bool:
    """Return whether all weights are finite, with one read of the device."""
    with torch.no_grad():
        answers = [torch.isfinite(weight).all() for weight in weights]
    return not answers or bool(torch.stack([answer.to(answers[0].device) for answer in answers]).all())


def _groups_shared(optimizers: list[Optimizer]) -> Callable[[], None]:
    """Return a function that restores the sharing of groups among nested optimisers, as it is now.

    Loading a state gives every optimiser groups of its own.
    """
    pairs = [(outer, inner) for outer, inner in pairwise(optimizers) if outer.param_groups is inner.param_groups]

    def share() -> None:
        for outer, inner in reversed(pairs):
            outer.param_groups = inner.param_groups

    return share


def _merged(optimizer: Optimizer, saved: State) -> State:
    """Fit a saved state to an optimiser that may have got parameters or groups since.

    New parameters get no state, and new groups keep their settings.
    """
    there, here = _sizes(saved["param_groups"]), _sizes(optimizer.param_groups)
    if there == here:
        return saved
    if len(there) > len(here) or any(mine < theirs for mine, theirs in zip(here, there, strict=False)):
        raise GrowthError(
            f"there is no way back to an earlier state: the optimiser had groups of {there} parameters and has {here} now; groups and "
            "parameters may be added during training, but not removed"
        )
    # Start from the present groups and copy the saved settings into those that existed then.
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    numbers: dict[int, int] = {}  # index of a parameter in the saved state -> index now
    for group, before in zip(groups, saved["param_groups"], strict=False):
        numbers.update(zip(before["params"], group["params"], strict=False))
        group.update({name: value for name, value in before.items() if name != "params"})
    return {**saved, "state": {numbers[number]: state for number, state in saved["state"].items()}, "param_groups": groups}


def _sizes(groups: list[dict[str, Any]]) -> list[int]:
    """Return the number of parameters in each group of an optimiser."""
    return [len(group["params"]) for group in groups]


class _Buffer(NamedTuple):
    """A registered buffer; `tensor` is None for an empty one."""

    name: str  # in the host
    module: nn.Module
    own_name: str  # in its module
    tensor: Tensor | None


def _buffers(host: nn.Module) -> Iterator[_Buffer]:
    """Yield all registered buffers, including empty ones. A buffer with two names is yielded twice."""
    for path, module in host.named_modules(remove_duplicate=False):
        for own_name, tensor in module._buffers.items():
            yield _Buffer(f"{path}.{own_name}" if path else own_name, module, own_name, tensor)


class _BufferPlan:
    """Steps that turn the buffers of a host into those of a state. Everything that can fail is done in the constructor."""

    def __init__(self, host: nn.Module, state: State, *, may_lack: bool) -> None:
        self._steps: list[Callable[[], Any]] = []
        now = {one.name: one for one in _buffers(host)}
        transient = set(state.get("transient_buffers", []))  # names of buffers that are not persistent
        new = dict[int, Tensor]()  # id of a present buffer -> the tensor that replaces it

        # Buffers of the state: copy into the present tensor where that is possible, else register a new one.
        for name, saved in state["buffers"].items():
            path, _, own_name = name.rpartition(".")
            module = now[name].module if name in now else _submodule(host, path)
            current = now[name].tensor if name in now else None
            if module is None:
                raise GrowthError(f"there is no way back to an earlier state: the module of the buffer {name} has been removed")
            if current is not None and current.shape == saved.shape and not current.is_inference() and not is_expanded(current):
                self._steps.append(partial(current.copy_, saved))
            else:
                # Both names of a shared buffer get the same new tensor.
                tensor = saved.to(_device(module, current), copy=True) if current is None or id(current) not in new else new[id(current)]
                if current is not None:
                    new[id(current)] = tensor
                self._steps.append(_registered(module, own_name, tensor, is_persistent=name not in transient))

        # Buffers that are not in the state: empty the ones that were empty, remove the new ones.
        for name, one in now.items():
            if one.tensor is None or name in state["buffers"]:
                continue
            if name in state.get("empty_buffers", []):
                self._steps.append(_registered(one.module, one.own_name, None, is_persistent=name not in transient))
            elif may_lack:
                self._steps.append(_unregistered(one.module, one.own_name))
            else:
                raise GrowthError(f"the saved run is of another model: {name} is missing in it and {list(one.tensor.shape)} here")

    def carry_out(self) -> None:
        with torch.no_grad():
            for step in self._steps:
                step()


def _registered(module: nn.Module, name: str, tensor: Tensor | None, *, is_persistent: bool) -> Callable[[], Any]:
    """Return a function that registers a buffer, or replaces the one of this name."""

    def register() -> None:
        module._buffers[name] = tensor
        (module._non_persistent_buffers_set.discard if is_persistent else module._non_persistent_buffers_set.add)(name)

    return register


def _unregistered(module: nn.Module, name: str) -> Callable[[], Any]:
    """Return a function that removes a buffer."""

    def unregister() -> None:
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)

    return unregister


def _submodule(host: nn.Module, path: str) -> nn.Module | None:
    try:
        return host.get_submodule(path)
    except AttributeError:
        return None


def _device(module: nn.Module, current: Tensor | None) -> torch.device:
    """Return the device for a new buffer: that of the present one, else that of the module's tensors, else the CPU."""
    tensors = [*([] if current is None else [current]), *module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")
