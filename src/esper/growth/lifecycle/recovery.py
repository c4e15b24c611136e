"""Take and restore snapshots of a growing model, and hold the whole state in a checkpoint.

A snapshot holds everything that can change: trained parameters, all buffers, the optimisers of host and seeds, loss scale, schedule and the
seeds. Frozen parameters are left out as long as nothing changes them:

- A parameter that is new or no longer frozen is added to the snapshots just before its first step, so a rollback restores that value.
- A frozen parameter that the training loop changes by hand (a momentum encoder) is added once the change is noticed. This is checked after
  the very first step and at every snapshot; a rollback before that leaves the parameter as it is.

A rollback also handles things that have appeared since the snapshot. It removes a buffer that a forward pass created, gives a resized or
replaced buffer its former size, and keeps a group that was added to the optimiser, with its settings and without optimiser state.
Everything is checked first. If something does not fit, or an object of the user refuses its state, nothing changes.

Checkpoints (`Recovery.state_dict`) hold everything, frozen parameters included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.growth.config import GrowthError
from esper.growth.host.isolation import is_expanded
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.backend import ModuleBackend
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.snapshots import BestStates, Snapshots, copy_of
from esper.growth.seeds.learner import nested
from esper.torch_internals import version_of

State = dict[str, Any]


class Recovery:
    """Takes and restores snapshots of a growing model: host, optimisers of host and seeds, loss scale, schedule and seeds.

    `best_states` has the states that may turn out to be the best one, by the metric
    `best_by` or by the loss.
    """

    def __init__(
        self,
        slotted: Slotted,
        optimizers: Sequence[Optimizer],
        lifecycles: Lifecycles[ModuleBackend],
        *,
        scaler: GradScaler | None,
        scheduler: Any,
        best_by: str | None = None,
    ) -> None:
        self.host, self.optimizers, self.lifecycles = slotted.host, optimizers, lifecycles
        self.scaler, self.scheduler = scaler, scheduler
        self._optimizers = [one for optimizer in optimizers for one in nested(optimizer)]  # the user's, each before those that it wraps
        self._snapshots = Snapshots(lifecycles.config.governor.keep)
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
        changing = self._changing_parameters()
        state = {**self._state(changing), "slots": self.lifecycles.slots_state()}
        self._snapshots.take({"now": state, "governor": self.lifecycles.governor.loss_state()}, epoch=self.lifecycles.epoch)
        self._held = {id(parameter) for parameter in changing.values()}

    def note_best(self, val_loss: float, metrics: dict[str, float]) -> None:
        """Hold the present state if it may turn out to be the best one and its weights are finite.

        Call it at the end of an epoch, before anything is decided.
        """
        new = self.best_states.candidate(self.lifecycles, val_loss, metrics)
        if new is not None and self.has_finite_weights():
            self.hold_moving()
            state = {**self._parameters_and_buffers(self._changing_parameters()), "slots": self.lifecycles.slots_if_kept()}
            self.best_states.take(replace(new, state=state))

    def hold_new(self) -> None:
        """Add parameters that are about to be trained for the first time to the snapshots. Call it before a step of the optimiser."""
        new = [
            one
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for one in group["params"]
            if one.requires_grad and id(one) not in self._held
        ]
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

    def _changing_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.host.named_parameters() if self._changes(name, parameter)}

    def _frozen_checksums(self) -> dict[str, int]:
        """Return a checksum of every parameter that is not expected to change."""
        frozen = {name: parameter for name, parameter in self.host.named_parameters() if not self._changes(name, parameter)}
        sums = [_checksum(parameter.detach()) for parameter in frozen.values()]
        read = torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []  # one read of the device
        return dict(zip(frozen, read, strict=True))

    def has_finite_weights(self) -> bool:
        """Return whether all changing parameters of the host and of its connected seeds are finite."""
        seeds = [
            backend.slot.seed for backend in self.lifecycles.slots.values() if backend.slot.is_connected and backend.slot.seed is not None
        ]
        own = self._changing_parameters().values()
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
        self.lifecycles.governor.load_loss_state(state["governor"])
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
        return {**self._state(dict(self.host.named_parameters(remove_duplicate=False))), "slots": self.lifecycles.slots_state()}

    def _state(self, parameters: dict[str, nn.Parameter]) -> State:
        """Return the present state without the seeds, with these parameters of the host."""
        return {
            **self._parameters_and_buffers(parameters),
            "optimizers": [one.state_dict() for one in self._optimizers],
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
        is_whole = "optimizers" in state
        merged = [_merged(one, saved) for one, saved in zip(optimizers, state["optimizers"], strict=True)] if is_whole else []

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
            undo.callback(self.lifecycles.load_slots, copy_of(self.lifecycles.slots_state()))
            self.lifecycles.load_slots(state["slots"])
            undo.pop_all()

        # Nothing below can fail.
        with torch.no_grad():
            for name, saved in state["parameters"].items():
                parameters[name].copy_(saved)
        for parameter in parameters.values():
            parameter.grad = None
        buffers.carry_out()

    # Checkpoints

    def forget(self) -> None:
        """Free the memory of all snapshots and best states."""
        self._snapshots = Snapshots(self.lifecycles.config.governor.keep)
        self.best_states = BestStates(self.lifecycles.ledger, by=self.best_states.by)

    def state_dict(self) -> State:
        return {
            "optimizer": self._optimizers_in_words(),
            "now": self.now(),
            "governor": self.lifecycles.governor.state_dict(),
            "snapshots": self._snapshots.state_dict(),
            "best_states": self.best_states.state_dict(),
            "moving": sorted(self._moving),
        }

    def load_state_dict(self, state: State) -> None:
        """Load the state of a run with the same model, optimiser and schedule. If it does not fit, raise GrowthError and change nothing."""
        self._check_fits(state["optimizer"], state["now"])
        self.restore(state["now"], may_lack_buffers=False)
        self.lifecycles.governor.load_state_dict(state["governor"])
        self._snapshots.load_state_dict(state["snapshots"])
        self.best_states.load_state_dict(state["best_states"])
        self._moving = set(state["moving"])
        self._checksums = self._frozen_checksums()
        names = self._snapshots.latest_keys(("now", "parameters"))
        self._held = {id(parameter) for name, parameter in self.host.named_parameters(remove_duplicate=False) if name in names}

    def _optimizers_in_words(self) -> str:
        return " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    def _check_fits(self, optimizer: str, state: State) -> None:
        """Raise GrowthError unless a saved state fits this model, optimiser, schedule and slots."""
        own = {name: list(parameter.shape) for name, parameter in self.host.named_parameters(remove_duplicate=False)}
        saved = {name: list(tensor.shape) for name, tensor in state["parameters"].items()}
        for name in sorted(own.keys() | saved.keys()):
            if own.get(name) != saved.get(name):
                there, here = (shapes.get(name, "missing") for shapes in (saved, own))
                raise GrowthError(f"the saved run is of another model: {name} is {there} in it and {here} here")
        kind = self._optimizers_in_words()
        if optimizer != kind:
            raise GrowthError(f"the saved run was trained by {optimizer}, and this one has {kind}; use the same optimiser")
        there = [_sizes(saved["param_groups"]) for saved in state["optimizers"]]
        here = [_sizes(one.param_groups) for one in self._optimizers]
        sizes = next(((one, other) for one, other in zip(there, here, strict=False) if one != other), None)
        if sizes is not None or len(there) != len(here):
            sizes = sizes or (there, here)
            raise GrowthError(
                f"the saved run's optimiser had groups of {sizes[0]} parameters, this one has {sizes[1]}; give it the same groups before "
                "loading, including those added by add_param_group"
            )
        for part, mine in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            if (state[part] is None) != (mine is None):
                had, has = ("no", "one") if state[part] is None else ("a", "none")
                raise GrowthError(f"the saved run had {had} {part}, and this one has {has}; resume it as it was started")
        if first_slots(state["slots"]) != first_slots(self.lifecycles.slots):
            raise GrowthError(
                f"the saved run had the slots {', '.join(state['slots'])}, this one has {', '.join(self.lifecycles.slots)}; "
                "resume it with the same slots"
            )


def first_slots(names: Collection[str]) -> list[str]:
    """Return the names of the slots without those that were opened again behind a kept seed.

    >>> first_slots(["layer1", "layer1#2", "a#2"])
    ['layer1', 'a#2']
    """
    return [name for name in names if name.rpartition("#")[0] not in names]


def _checksum(tensor: Tensor) -> Tensor:
    """Return a checksum: the sum of the tensor's elements, read as integers. Different values almost always have different sums."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout != torch.strided:
        return torch.tensor(version_of(tensor) or 0)  # the bits cannot be read; count writes instead
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
        transient = set(state["transient_buffers"])  # names of buffers that are not persistent
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
            if name in state["empty_buffers"]:
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
