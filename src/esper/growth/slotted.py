"""A model with slots: what `add_slots` gives.

slotted = add_slots(model, example_input=x[:2])       # hooks after some submodules of `model`, nothing else
print(slotted.describe())                             # every place, and why nothing can grow at the others
slotted(x)                                            # as model(x)
slotted.remove()                                      # as it was before
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from esper.growth.blueprints import blueprints_for, cost_of
from esper.growth.choice import choose
from esper.growth.errors import GrowthError
from esper.growth.isolation import is_compiled
from esper.growth.seed import Seed
from esper.growth.slot import Slot
from esper.growth.survey import Survey, survey

BAKED = "esper_seed"  # the name of a kept seed in the submodule that it grew after


def add_slots(model: nn.Module, example_input: Any, *, slots: Sequence[str] | None = None) -> Slotted:
    """Puts slots into a model, in place. Its outputs, parameters and state dict stay what they are, and so does its optimiser.

    `example_input` is a batch as the model gets it: a tensor, a tuple of arguments or a dict of keyword arguments. `slots` names
    submodules, by patterns such as "layer?" or "blocks.*"; without it, slots are put after the blocks of the model. A compiled model and
    one under DistributedDataParallel stay what they are.
    """
    host = unwrap(model)
    check_has_no_slots(host)
    found = survey(host, example_input)
    return Slotted(model, host, found, choose(host, found, slots))


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without torch.compile and DistributedDataParallel around it."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_has_no_slots(host: nn.Module) -> None:
    for name, module in host.named_modules():
        if any(isinstance(getattr(hook, "__self__", None), Slot) for hook in module._forward_hooks.values()):
            raise GrowthError(f"the model already has slots (after {name!r}); remove them first, with remove() or bake()")


class Slotted:
    """A host and its slots. `model` is what the user passed, `host` the same without wrappers."""

    def __init__(self, model: nn.Module, host: nn.Module, survey: Survey, names: Sequence[str]) -> None:
        self.model, self.host, self.survey = model, host, survey
        self.slots = {name: Slot(survey.places[name]) for name in names}
        self._handles: list[RemovableHandle] = [
            host.get_submodule(name).register_forward_hook(slot.hook) for name, slot in self.slots.items()
        ]
        # Compiled code does not look at hooks again; it has to be traced anew, now that they are there.
        if is_compiled(model):
            torch.compiler.reset()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.model(*arguments, **keywords)

    def train(self, mode: bool = True) -> Self:
        self.model.train(mode)
        for module in self._seeds():
            module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def to(self, *arguments: Any, **keywords: Any) -> Self:
        """Moves host and seeds alike. `model.to` would not reach the seeds, which are no part of the model yet."""
        self.model.to(*arguments, **keywords)
        for module in self._seeds():
            module.to(*arguments, **keywords)
        return self

    def _seeds(self) -> Iterator[nn.Module]:
        return (slot.seed for slot in self.slots.values() if slot.seed is not None)

    def slot(self, name: str) -> Slot:
        if name not in self.slots:
            raise GrowthError(f"no slot is named {name!r}; this model has {', '.join(self.slots)}")
        return self.slots[name]

    @contextlib.contextmanager
    def without(self, names: Sequence[str]) -> Iterator[None]:
        """For a while, the seeds in these slots do not reach the output."""
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(self.slot(name).held_at(0.0))
            yield

    def remove(self) -> nn.Module:
        """Takes all slots out, with whatever is in them, and gives the model back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if is_compiled(self.model):
            torch.compiler.reset()
        return self.model

    def bake(self) -> nn.Module:
        """Makes the fossilized seeds part of the model, takes everything else out, and gives the model without wrappers.

        All names in its state dict stay; those of the seeds are added.
        """
        kept = {name: slot.seed for name, slot in self.slots.items() if slot.is_kept and slot.seed is not None}
        self.remove()
        for name, seed in kept.items():
            attach(self.host.get_submodule(name), seed)
        return self.host

    def describe(self) -> str:
        """A table for a person: every place, what is or could be there and what that costs, and why nothing can grow elsewhere."""
        rows = [("place", "shape", "slot", "could grow (parameters)")]
        for name, place in self.survey.places.items():
            options = ", ".join(f"{blueprint.name} {cost_of(blueprint, place).parameters:,}" for blueprint in blueprints_for(place))
            shape = f"{place.kind} {'×'.join(map(str, place.shape))}"
            rows.append((name, shape, _content(self.slots.get(name)), options))
        rows += [(refusal.name, "", "refused", refusal.reason) for refusal in self.survey.refusals]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip() for row in rows
        )


def _content(slot: Slot | None) -> str:
    if slot is None:
        return "–"
    if slot.seed is None:
        return "empty"
    return "kept" if slot.is_kept else f"alpha {slot.alpha:g}"


def attach(module: nn.Module, seed: Seed) -> None:
    """Makes a seed part of a submodule, under a name that is free."""
    name, count = BAKED, 1
    while hasattr(module, name):
        count += 1
        name = f"{BAKED}_{count}"
    module.add_module(name, seed)
    module.register_forward_hook(seed.after)
