"""Averages of other libraries that were made before the model got slots.

`GrowingAverage` gives slots to an average of torch (`torch.optim.swa_utils.AveragedModel`) or timm: a module that holds a copy of the model
as `.module` and has a method `update_parameters` or `update`. That method averages the seeds too, by the average's own rule. A plain copy
of the model has no such method; there, seeds are copied and not averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from esper.growth.config import GrowthError
from esper.growth.host.averages import SlotsInStep
from esper.growth.host.isolation import unwrap
from esper.growth.host.slotted import Slotted, check_has_no_slots

_UPDATES = ("update_parameters", "update")  # names of methods that move an average towards a model


class GrowingAverage:
    """An average of another library, which gets the slots and seeds of the model."""

    def __init__(self, average: nn.Module, slotted: Slotted) -> None:
        self.average, self._source = average, slotted
        host = _copy_in(average, slotted.host)
        first = [name for name, slot in slotted.slots.items() if not slot.place.earlier]
        self.slotted = Slotted(host, host, slotted.discovery, first, slotted.example_input)
        self._slots = SlotsInStep(self.slotted, slotted, is_copy=False)
        self._name = next((name for name in _UPDATES if callable(getattr(average, name, None))), None)
        if self._name is not None:
            vars(average)[self._name] = self._update

    def _update(self, *arguments: Any, **named: Any) -> Any:
        """Update the host's weights in the average, and then those of the seeds by the same method."""
        method: Callable[..., Any] = getattr(type(self.average), self._name or "")
        pairs = self._slots.follow()
        # The method reads `.module`; give it the seeds in place of the host, with the same counts of updates.
        seeds = copy.copy(self.average)
        vars(seeds)["_buffers"] = {name: None if one is None else one.clone() for name, one in self.average._buffers.items()}
        vars(seeds)["_modules"] = {**self.average._modules, "module": nn.ModuleList(target for target, _ in pairs)}
        with self._hidden():
            result = method(self.average, *arguments, **named)
        if pairs:
            method(seeds, nn.ModuleList(source for _, source in pairs))
        return result

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Leave the seeds out of the state dicts, which some averages are computed by."""
        slots = [*self.slotted.slots.values(), *self._source.slots.values()]
        for slot in slots:
            slot.ignores_saves = True
        try:
            yield
        finally:
            for slot in slots:
                slot.ignores_saves = False

    @torch.no_grad()
    def follow(self) -> None:
        """Take over what has changed in the slots. In a plain copy, seeds get the weights of the original."""
        pairs = self._slots.follow()
        if self._name is None:
            for target, source in pairs:
                _copy_tensors(target, source)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the present weights, after an earlier state was restored."""
        for target, source in [(self.slotted.host, self._source.host), *self._slots.follow()]:
            _copy_tensors(target, source)

    def bake(self, *, fold: bool) -> None:
        """Make the fossilized seeds part of the average, as in the model."""
        self.slotted.bake(fold=fold)
        self.stop()

    def stop(self) -> None:
        if self._name is not None and vars(self.average).get(self._name) == self._update:
            del vars(self.average)[self._name]


def _copy_tensors(target: nn.Module, source: nn.Module) -> None:
    for mine, theirs in zip([*target.parameters(), *target.buffers()], [*source.parameters(), *source.buffers()], strict=True):
        mine.copy_(theirs)


def _copy_in(average: object, host: nn.Module) -> nn.Module:
    """Return the copy of the host in an average: the average itself, or its `.module`. Raise a GrowthError if there is none."""
    wanted = {name: parameter.shape for name, parameter in host.named_parameters()}
    held = getattr(average, "module", None)
    for found in (average, held):
        if isinstance(found, nn.Module):
            inner = unwrap(found)
            if type(inner) is type(host) and {name: one.shape for name, one in inner.named_parameters()} == wanted:
                if inner is host:
                    raise GrowthError("averages holds the model itself; pass averages of it, which are copies")
                check_has_no_slots(inner)
                return inner
    raise GrowthError(
        f"averages holds a {type(average).__name__}, which neither is a copy of the model nor has one as .module; pass averages such as "
        "torch.optim.swa_utils.AveragedModel(model)"
    )


def load_averages(averages: Sequence[GrowingAverage], states: Sequence[dict[str, Any]]) -> None:
    """Restore the weights and counts of averages, after the slots of the model were restored. Raise a GrowthError if they are others."""
    if len(averages) != len(states):
        raise GrowthError(f"the saved state has {len(states)} averages, and this grower {len(averages)}; pass the same averages=[...]")
    for average, state in zip(averages, states, strict=True):
        average.follow()
        average.average.load_state_dict(state)


def growing_averages(averages: Sequence[nn.Module], slotted: Slotted) -> list[GrowingAverage]:
    """Give slots to all averages, after all are checked."""
    for average in averages:
        _copy_in(average, slotted.host)
    return [GrowingAverage(average, slotted) for average in averages]
