"""A model with slots: what `add_slots` gives.

slotted = add_slots(model, example_input=x[:2])       # after some submodules of `model`, nothing else
print(slotted.describe())                             # every place, and why nothing can grow at the others
slotted(x)                                            # as model(x)
slotted.remove()                                      # as it was before
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from esper.growth.around import around
from esper.growth.blueprints import KINDS, blueprints_for, cost_of
from esper.growth.choice import choose
from esper.growth.eager_calls import eager_calls
from esper.growth.errors import GrowthError
from esper.growth.isolation import is_compiled, unwrap
from esper.growth.place import Place
from esper.growth.seed import Seed, SeedSpec
from esper.growth.slot import Slot
from esper.growth.survey import Survey, samples_in, survey, weights_of
from esper.text_table import aligned

BAKED = "esper_seed"  # the name of a kept seed in the submodule that it grew after


def add_slots(model: nn.Module, example_input: Any, *, slots: Sequence[str] | None = None) -> Slotted:
    """Puts slots into a model, in place. Its outputs, parameters and state dict stay what they are, and so does its optimiser.

    `example_input` is a batch as the model gets it: a tensor, a tuple of arguments or a dict of keyword arguments. `slots` names
    submodules, by patterns such as "layer?" or "blocks.*"; without it, slots are put after the blocks of the model. A compiled model and
    one under DistributedDataParallel stay what they are.
    """
    _check_model(model)
    host = unwrap(model)
    check_has_no_slots(host)
    found = survey(host, example_input)
    return Slotted(model, host, found, choose(host, found, slots))


def _check_model(model: object) -> None:
    if isinstance(model, nn.DataParallel):
        raise GrowthError(
            "nn.DataParallel copies the model in every step, without what grows; use DistributedDataParallel, or model.module"
        )
    if not isinstance(model, nn.Module):
        raise GrowthError(f"slots are put into an nn.Module, and this is a {type(model).__name__}")


def check_has_no_slots(host: nn.Module) -> None:
    for name, module in host.named_modules():
        if isinstance(around(module), Slot):
            raise GrowthError(
                f"the model already has slots (after {name!r}); remove them first, by remove() or bake() of what add_slots gave. "
                "To have a copy whose slots can be removed, copy that: copy.deepcopy(slotted)"
            )


class Slotted:
    """A host and its slots. `model` is what the user passed, `host` the same without wrappers.

    `samples` counts those of all calls with gradients; whoever takes them sets it back to 0.
    """

    def __init__(self, model: nn.Module, host: nn.Module, survey: Survey, names: Sequence[str]) -> None:
        self.model, self.host, self.survey = model, host, survey
        self.slots = {name: Slot(survey.places[name]) for name in names}
        self.recording: Callable[[], contextlib.AbstractContextManager[None]] | None = None  # around every call of this object
        self.samples = 0
        self.is_attached = True
        self._weights = {name: weights_of(host, host.get_submodule(name)) for name in names}  # as they were when the host was looked at
        self._eager: contextlib.ExitStack | None = None
        for name, slot in self.slots.items():
            slot.attach(host.get_submodule(name))
        # Compiled code has been traced without the slots.
        if is_compiled(model):
            torch.compiler.reset()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        # Compiled code would be compiled anew for every number.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.samples += samples_in((arguments, keywords))
        if self.recording is None:
            return self.model(*arguments, **keywords)
        with self.recording():
            return self.model(*arguments, **keywords)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is called without whatever goes on around calls of the original."""
        return {**self.__dict__, "recording": None, "samples": 0, "_eager": None}

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

    def place(self, name: str) -> Place:
        """What a seed is built for now: the host may have been moved or cast since it was looked at."""
        place, before = self.slot(name).place, self._weights[name]
        now = weights_of(self.host, self.host.get_submodule(name))
        # Only what has changed, for an output need not have the precision of the weights, nor be where they are.
        dtype = place.dtype if now.dtype == before.dtype else now.dtype
        device = place.device if now.device == before.device else now.device
        return replace(place, dtype=dtype, device=device)

    def run_eagerly(self, is_eager: bool) -> None:
        """A compiled model runs as it was written until this is taken back, or the slots are taken out."""
        if self._eager is not None:
            self._eager.close()
            self._eager = None
        if is_eager and is_compiled(self.model):
            self._eager = contextlib.ExitStack()
            self._eager.enter_context(eager_calls(self.model))

    @contextlib.contextmanager
    def without(self, names: Sequence[str]) -> Iterator[None]:
        """For a while, the seeds in these slots do not reach the output."""
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(self.slot(name).held_at(0.0))
            yield

    def remove(self) -> nn.Module:
        """Takes all slots out, with whatever is in them, and gives the model back."""
        if not self.is_attached:
            return self.model
        self.run_eagerly(False)
        self.recording = None
        for slot in self.slots.values():
            slot.detach()
        self.is_attached = False
        if is_compiled(self.model):
            torch.compiler.reset()
        return self.model

    def bake(self) -> nn.Module:
        """Makes the fossilized seeds part of the model, takes everything else out, and gives the model without wrappers.

        All names in its state dict stay; those of the seeds are added. The host's optimiser does not hold the parameters of these seeds:
        make a new one to train on.
        """
        kept = {name: slot.seed for name, slot in self.slots.items() if self.is_attached and slot.is_kept and slot.seed is not None}
        self.remove()
        for name, seed in kept.items():
            attach(self.host.get_submodule(name), seed)
        return self.host

    def describe(self) -> str:
        """Tables for a person: every place and what is there, why nothing can grow elsewhere, and what could grow at what cost."""
        found = self.survey
        rows = [("place", "output", "slot")]
        rows += [(name, _output(place), _content(self.slots.get(name))) for name, place in found.places.items()]
        rows += [(refusal.name, "–", f"none: it {refusal.reason}") for refusal in found.refusals]
        tables = [aligned(rows)]
        for kind in KINDS:
            alike = {_output(place): place for place in found.places.values() if place.kind == kind}
            if alike:
                tables.append("parameters and FLOPs per sample of what could grow\n" + aligned(_costs(alike)))
        return "\n\n".join(tables)


def _output(place: Place) -> str:
    return f"{place.kind} {'×'.join(map(str, place.shape))}" + (" causal" if place.is_causal else "")


def _content(slot: Slot | None) -> str:
    if slot is None:
        return "–"
    if slot.seed is None:
        return "empty"
    blueprint = SeedSpec.from_tensor(slot.seed.spec).blueprint
    return f"{blueprint}, kept" if slot.is_kept else f"{blueprint}, alpha {slot.alpha:g}"


def _costs(places: Mapping[str, Place]) -> list[tuple[str, ...]]:
    """A row for each of these places, a column for each blueprint."""
    blueprints = list(dict.fromkeys(blueprint for place in places.values() for blueprint in blueprints_for(place)))
    rows = [("output", *(blueprint.name for blueprint in blueprints))]
    for output, place in places.items():
        costs = [cost_of(blueprint, place) if blueprint in blueprints_for(place) else None for blueprint in blueprints]
        rows.append((output, *(f"{_short(cost.parameters)} · {_short(cost.flops)}" if cost else "–" for cost in costs)))
    return rows


def _short(number: int) -> str:
    """Three digits.

    >>> [_short(number) for number in (0, 999, 1192, 76_288, 2_500_000)]
    ['0', '999', '1.19k', '76.3k', '2.5M']
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def attach(module: nn.Module, seed: Seed, name: str | None = None) -> None:
    """Makes a seed part of a submodule, under this name or one that is free."""
    # Before the hooks that the user may have on the module, as a slot is, but behind seeds that were kept earlier.
    is_first = not any(isinstance(child, Seed) for child in module.children())
    count = 1
    while name is None or hasattr(module, name):
        name, count = BAKED if count == 1 else f"{BAKED}_{count}", count + 1
    seed.is_baked = True
    module.add_module(name, seed.train(module.training))
    module.register_forward_hook(seed.after, prepend=is_first)
