"""A compiled model that runs as it was written for a while, wherever it is called from.

Torch's own way, `torch.compiler.set_stance`, is global: it would reach other models, and outlive a training loop that is abandoned.

A model with slots: what `add_slots` gives.

slotted = add_slots(model, example_input=x[:2])       # after some submodules of `model`, nothing else
print(slotted.describe())                             # every place, and why nothing can grow at the others
slotted(x)                                            # as model(x)
slotted.remove()                                      # as it was before

Weights and seeds are saved and loaded together:

torch.save(slotted.state_dict(), "model.pt")          # or model.state_dict(), or esper.save(slotted, "model.safetensors")
slotted = add_slots(Net(), example_input=x[:2])
slotted.load_state_dict(torch.load("model.pt"))       # grows the seeds again, then loads all weights
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.config import GrowthError
from esper.growth.host.causality import tensors_in
from esper.growth.host.default_slots import choose
from esper.growth.host.discover import Discovery, call, discover, samples_in, weights_of
from esper.growth.host.forward_patch import Forward, ModelPatch, around, drop_copied_zero_grad, forward_replaced, own_forward
from esper.growth.host.isolation import eager, is_compiled, isolated, unwrap
from esper.growth.host.layout import Place
from esper.growth.host.slots import CheckStructure, Slot, agree, as_model_takes_it, attach, build_seed, find_homes, on_load, specs_in
from esper.growth.seeds.blueprints import KINDS, blueprints_for, blueprints_of, cost_of, reason_against
from esper.growth.seeds.seed import Seed
from esper.runs.checkpoints import plain_name, plain_names
from esper.text_table import aligned


@contextmanager
def eager_calls(model: nn.Module) -> Iterator[None]:
    """Calls of the compiled parts of a model compile nothing. A copy that is made meanwhile does not know of this."""
    with ExitStack() as stack:
        for module in list(model.modules()):
            if "_orig_mod" in module._modules:  # by torch.compile(module)
                stack.enter_context(forward_replaced(module, _eagerly(own_forward(module))))
            compiled = vars(module).get("_compiled_call_impl")  # by module.compile()
            if compiled is not None:
                vars(module)["_compiled_call_impl"] = _eagerly(compiled)
                stack.callback(vars(module).update, _compiled_call_impl=compiled)
        yield


def _eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # code of the user's around the model, in which the stance cannot be changed
            return function(*arguments, **named)
        with eager():
            return function(*arguments, **named)

    return call


class Follower(Protocol):
    """Follows the user's optimiser for the seeds; see `OptimizerFollower`."""

    def watch_backward(self, output: Any) -> None: ...

    def stop(self) -> None: ...


def add_slots(model: nn.Module, example_input: Any, *, slots: Sequence[str] | None = None) -> Slotted:
    """Puts slots into a model, in place. Its outputs, parameters and state dict stay what they are, and so does its optimiser.

    `example_input` is a batch as the model gets it: a tensor, a tuple of arguments or a dict of keyword arguments. `slots` names
    submodules, by patterns such as "layer?" or "blocks.*"; without it, slots are put after the blocks of the model. A compiled model and
    one under DistributedDataParallel stay what they are.
    """
    _check_model(model)
    host = unwrap(model)
    check_has_no_slots(host)
    found = discover(host, example_input)
    return Slotted(model, host, found, choose(host, found, slots), example_input)


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

    Calls of the model are seen as calls of this object are. `samples` counts those of all calls with gradients; whoever takes them sets it
    back to 0.
    """

    def __init__(self, model: nn.Module, host: nn.Module, discovery: Discovery, names: Sequence[str], example_input: Any) -> None:
        self.model, self.host, self.discovery, self.example_input = model, host, discovery, example_input
        self.slots = {name: Slot(discovery.places[name]) for name in names}
        self.recording: Callable[[], contextlib.AbstractContextManager[None]] | None = None  # around every call
        self.follower: Follower | None = None  # of the grower that is at work
        self.samples = 0
        self._is_running = False  # inside a call
        self.is_attached = True
        self._weights = {name: weights_of(host, host.get_submodule(name)) for name in names}  # as they were when the host was looked at
        self._eager: contextlib.ExitStack | None = None
        self._homes = find_homes(host, names, example_input)
        self._check_handle = self._attach_slots()
        # Compiled code has been traced without the slots.
        if is_compiled(model):
            torch.compiler.reset()

    @property
    def has_grower(self) -> bool:
        return self.follower is not None

    def _attach_slots(self) -> RemovableHandle:
        self._around = ModelPatch()  # before the slots, for one of them may be that of the whole model
        self._around.attach(self.model if is_compiled(self.model) else self.host)
        self._around.run = self._run
        for name, slot in self.slots.items():
            slot.attach_to(self.host.get_submodule(name), self._homes[name])
        return on_load(self.host, CheckStructure(self.host, self.slots))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._run(self.model, arguments, keywords)

    def _run(self, forward: Forward, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        # Compiled code would be compiled anew for every number.
        if self._is_running or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*arguments, **keywords)
        self.samples += samples_in((arguments, keywords))
        self._is_running = True
        try:
            with contextlib.nullcontext() if self.recording is None else self.recording():
                output = forward(*arguments, **keywords)
        finally:
            self._is_running = False
        if self.follower is not None:
            self.follower.watch_backward(output)
        return output

    def __getstate__(self) -> dict[str, Any]:
        """A copy is called without whatever goes on around calls of the original."""
        return {**self.__dict__, "recording": None, "follower": None, "samples": 0, "_is_running": False, "_eager": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_attached and is_compiled(self.model) and around(self.model) is None:  # a copy of it has a forward of its own
            self._around = ModelPatch()
            self._around.attach(self.model)
        self._around.run = self._run
        for module in (self.model, self.host):
            drop_copied_zero_grad(module)

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

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the model without wrappers, seeds included."""
        return dict(self.host.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Grow the seeds that the state dict tells of in these slots, and load all weights.

        For a model that is used or trained without a `Grower`. A grower also knows the stages and optimisers of its seeds, which are not in
        a state dict of the model: `grower.save` and `grower.load` keep them.
        """
        if self.has_grower:
            raise GrowthError("a Grower owns these seeds, their stages and optimisers; use grower.save(folder) and grower.load(folder)")
        state = plain_names(state)
        wanted = specs_in(state)
        paths = {plain_name(f"{name}.{self._homes[name].baked_as}"): name for name in self.slots}
        baked = {plain_name(name) for name, module in self.host.named_modules() if isinstance(module, Seed)}
        strange = sorted(wanted.keys() - paths.keys() - baked)
        if strange:
            raise GrowthError(f"the state dict has the seed {strange[0]!r}, and this model has no slot there; add the same slots")
        seeds = {slot: build_seed(self.place(slot), wanted[path]) for path, slot in paths.items() if path in wanted}
        before = {name: (slot.seed, slot.is_connected, slot.alpha, slot.is_kept) for name, slot in self.slots.items()}
        for name, slot in self.slots.items():
            slot.plant(seeds.get(name), connected=True)
        actual = {plain_name(name): name for name in self.host.state_dict()}
        try:
            self.host.load_state_dict({actual.get(name, name): tensor for name, tensor in state.items()})
        except Exception:
            for name, (seed, is_connected, alpha, is_kept) in before.items():
                self.slots[name].plant(seed, connected=is_connected)
                if seed is not None:
                    self.slots[name].alpha, self.slots[name].is_kept = alpha, is_kept
            raise

    def averaged(self, decay: float = 0.999) -> AveragedModel:
        """Return a copy whose weights are a running average of these, and which grows with them. Call its `update()` after every step."""
        return AveragedModel(self, decay)

    def remove(self) -> nn.Module:
        """Take all slots out, with the seeds in them, and return the model."""
        if self.is_attached:
            self._detach_slots()
            self._release()
        return self.model

    def _detach_slots(self) -> None:
        self.run_eagerly(False)
        for slot in self.slots.values():
            slot.detach()
        self._around.detach()
        self._check_handle.remove()
        self.is_attached = False
        if is_compiled(self.model):
            torch.compiler.reset()

    def _release(self) -> None:
        """The grower has no slots any more."""
        self.recording = None
        if self.follower is not None:
            self.follower.stop()
            self.follower = None

    def bake(self) -> nn.Module:
        """Make the fossilized seeds part of the model, take everything else out, and return the model without wrappers.

        All names in its state dict stay; those of the seeds are as they were in the state dict before. The model's outputs for the example
        input are compared before and after: where they differ, an error is raised and everything is left as it was. The host's optimiser
        does not hold the parameters of these seeds: make a new one to train on.
        """
        if not self.is_attached:
            return self.host
        kept = {name: slot.seed for name, slot in self.slots.items() if slot.is_kept and slot.seed is not None}
        with contextlib.ExitStack() as stack:
            for name, slot in self.slots.items():
                if name not in kept and slot.is_connected:
                    slot.connect(False)
                    stack.callback(slot.connect, True)
            before = self._example_outputs() if kept else None
            self._detach_slots()
            handles = {name: attach(self.host.get_submodule(name), seed, self._homes[name]) for name, seed in kept.items()}
            after = self._example_outputs() if kept else None
            if before is None or after is None or agree(before, after):
                stack.pop_all()  # the seeds that were not kept are gone
                self._release()
                return self.host
            for name, handle in handles.items():
                handle.remove()
                del self._homes[name].module._modules[self._homes[name].name]
                kept[name].baked_as = ""
            self._check_handle = self._attach_slots()
            self.is_attached = True
        raise GrowthError(
            f"baking would change what the model computes: its outputs for the example input differ. Seeds are after {', '.join(kept)}; "
            "a module there may run or count its submodules in a way that was not seen before. Everything is as it was"
        )

    def _example_outputs(self) -> list[Tensor] | None:
        """Run the host on the example input, in evaluation mode and without a trace; None, with a warning, where it cannot run it."""
        was, now = next(iter(self._weights.values())), weights_of(self.host, self.host)
        example = as_model_takes_it(self.example_input, was.device, now.device, was.dtype, now.dtype)
        try:
            with isolated(self.host), torch.no_grad():
                self.host.eval()
                return [tensor.detach().clone() for tensor in tensors_in(call(self.host, example))]
        except Exception as error:
            warnings.warn(
                f"the model cannot run its example input any more ({type(error).__name__}: {error}), so outputs before and after baking "
                "are not compared",
                RuntimeWarning,
                stacklevel=3,
            )
            return None

    def describe(self) -> str:
        """Tables for a person: every place and what is there, why nothing can grow elsewhere, and what could grow at what cost."""
        found = self.discovery
        rows = [("place", "output", "slot")]
        rows += [(name, _output(place), _content(self.slots.get(name))) for name, place in found.places.items()]
        rows += [(refusal.name, "–", f"none: it {refusal.reason}") for refusal in found.refusals]
        tables = [aligned(rows)]
        for kind in KINDS:
            alike = {_output(place): place for place in found.places.values() if place.kind == kind}
            if alike:
                tables.append("parameters and FLOPs per sample of what could grow\n" + aligned(_costs(alike)))
                tables += _refused(alike)
        return "\n\n".join(tables)


def _output(place: Place) -> str:
    return f"{place.kind} {'×'.join(map(str, place.shape))}" + (" causal" if place.is_causal else "")


def _content(slot: Slot | None) -> str:
    if slot is None:
        return "–"
    if slot.seed is None:
        return "empty"
    blueprint = slot.seed.spec.blueprint
    return f"{blueprint}, kept" if slot.is_kept else f"{blueprint}, alpha {slot.alpha:g}"


def _costs(places: Mapping[str, Place]) -> list[tuple[str, ...]]:
    """A row for each of these places, a column for each blueprint."""
    blueprints = list(dict.fromkeys(blueprint for place in places.values() for blueprint in blueprints_for(place)))
    rows = [("output", *(blueprint.name for blueprint in blueprints))]
    for output, place in places.items():
        costs = [cost_of(blueprint, place) if blueprint in blueprints_for(place) else None for blueprint in blueprints]
        rows.append((output, *(f"{_short(cost.parameters)} · {_short(cost.flops)}" if cost else "–" for cost in costs)))
    return rows


def _refused(places: Mapping[str, Place]) -> list[str]:
    """Say which blueprints of its kind cannot grow in a place, and why."""
    refused: dict[tuple[str, str], list[str]] = {}  # names and reason -> outputs
    for output, place in places.items():
        reasons = {blueprint.name: reason_against(blueprint, place) for blueprint in blueprints_of(place.kind)}
        for reason in dict.fromkeys(filter(None, reasons.values())):
            refused.setdefault((", ".join(name for name in reasons if reasons[name] == reason), reason), []).append(output)
    lines = [f"{names} cannot grow in {', '.join(outputs)}: {reason}" for (names, reason), outputs in refused.items()]
    return ["\n".join(lines)] if lines else []


def _short(number: int) -> str:
    """Three digits.

    >>> [_short(number) for number in (0, 999, 1192, 76_288, 2_500_000)]
    ['0', '999', '1.19k', '76.3k', '2.5M']
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


class AveragedModel:
    """A copy of a growing model whose weights are a running average (EMA) of the original's, and which grows with it.

        average = slotted.averaged(decay=0.999)
        ...
        average.update()           # after every step of the optimiser
        average(x)                 # evaluate it; average.bake() and average.state_dict() as those of the slotted model

    A seed enters the average as it is; from then on its weights are averaged like the host's. Buffers and alphas are copied.
    """

    def __init__(self, slotted: Slotted, decay: float) -> None:
        if not 0 <= decay < 1:
            raise GrowthError(f"decay must be at least 0 and below 1, and is {decay}")
        self.decay = decay
        self._source = slotted
        self.slotted = copy.deepcopy(slotted)
        self._plantings = {name: slot.plantings for name, slot in slotted.slots.items()}

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.slotted.host(*arguments, **keywords)

    def state_dict(self) -> dict[str, Tensor]:
        return self.slotted.state_dict()

    def bake(self) -> nn.Module:
        """Return the averaged model with the fossilized seeds in it, without slots."""
        return self.slotted.bake()

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the original by 1 - decay."""
        self._average(self.slotted.host, self._source.host)
        for name, source in self._source.slots.items():
            target = self.slotted.slots[name]
            if source.plantings != self._plantings[name]:
                target.plant(copy.deepcopy(source.seed))
                self._plantings[name] = source.plantings
            elif source.seed is not None and target.seed is not None:
                self._average(target.seed, source.seed)
            if source.seed is not None:
                target.alpha = source.alpha
            target.is_kept = source.is_kept
            target.connect(source.is_connected)

    def _average(self, target: nn.Module, source: nn.Module) -> None:
        averaged, current = list(target.parameters()), list(source.parameters())
        for mine, theirs in zip(averaged, current, strict=True):
            if mine.is_floating_point():
                mine.lerp_(theirs.to(mine), 1 - self.decay)
            else:
                mine.copy_(theirs)
        for held, given in zip(target.buffers(), source.buffers(), strict=True):
            held.copy_(given)
