"""A model with slots: `add_slots` puts slots after submodules of a model and returns a `Slotted`.

    slotted = add_slots(model, example_input=x[:2])   # changes nothing else in `model`
    print(slotted.describe())                         # every place where a seed could grow, and why none can grow elsewhere
    slotted(x)                                        # the same as model(x)
    slotted.remove()                                  # removes the slots; `model` is as before

Weights and seeds are saved and loaded together:

    torch.save(slotted.state_dict(), "model.pt")      # or model.state_dict(), or esper.save(slotted, "model.safetensors")
    slotted = add_slots(Net(), example_input=x[:2])
    slotted.load_state_dict(torch.load("model.pt"))   # builds the seeds, then loads all weights

At the end of the file, `eager_calls` runs a compiled model without its compiled code.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from esper.display import Card, Displayed
from esper.growth.config import GrowthError
from esper.growth.host.averages import AveragedModel
from esper.growth.host.default_slots import choose, with_last_blocks
from esper.growth.host.discover import Announcer, Discovery, call, discover, weights_of
from esper.growth.host.find_units import find_units
from esper.growth.host.isolation import eager, is_compiled, isolated, unwrap, without_tf32
from esper.growth.host.layout import Place
from esper.growth.host.slots import (
    BakedPatch,
    ModelPatch,
    SeedHome,
    Slot,
    WidePatch,
    around,
    drop_copied_zero_grad,
    forward_replaced,
    is_hook_of_seed,
    on_load,
    own_forward,
    tensors_in,
)
from esper.growth.host.state_dict import CheckStructure, agree, as_model_takes_it, attach, build_seed, find_homes, free_home, specs_in
from esper.growth.host.units import around_all, modules_of, with_units
from esper.growth.seeds.blueprints import KINDS, blueprints_for, blueprints_of, cost_of, get_blueprint, reason_against, widened_by
from esper.growth.seeds.folding import check_trained, fold as fold_seeds
from esper.growth.seeds.seed import SPEC_KEY, Blending, Seed, SeedSpec
from esper.growth.seeds.width import WidthSeed, kept_units, make_seed, next_order, why_not_removed
from esper.runs.checkpoints import plain_name, plain_names
from esper.text_table import aligned, compact
from esper.torch_internals import COMPILED_CALL, COMPILED_MODULE

# Models that were baked in this process -> the facts for their model cards, from the grower; None where there was no grower.
FACTS_OF_BAKED: WeakKeyDictionary[nn.Module, Card | None] = WeakKeyDictionary()


def add_slots(model: nn.Module, example_input: Any, *, slots: Sequence[str] | None = None) -> Slotted:
    """Put slots into a model, in place, and return it as a `Slotted`. Its outputs, parameters, state dict and optimiser do not change.

    `example_input` is a batch as the model gets it: a tensor, a tuple of arguments or a dict of keyword arguments. `slots` names
    submodules, also by patterns such as "layer?" or "blocks.*"; by default there is a slot after every block of the model. The model may be
    compiled or wrapped in DistributedDataParallel, and stays so. The search takes some 20 to 40 forward passes, however many equal blocks
    there are, and says every 5 seconds on stderr how far it is.
    """
    _check_model(model)
    host = unwrap(model)
    check_has_no_slots(host)
    say = Announcer()
    found = with_units(discover(host, example_input, say), *find_units(host, example_input, say))
    names = choose(host, found, slots)
    return Slotted(model, host, with_last_blocks(found, names) if slots is None else found, names, example_input)


def _check_model(model: object) -> None:
    if isinstance(model, nn.DataParallel):
        raise GrowthError(
            "nn.DataParallel copies the model in every step, and the copies lack the seeds; use DistributedDataParallel, or model.module"
        )
    if not isinstance(model, nn.Module):
        raise GrowthError(f"add_slots needs an nn.Module, and got a {type(model).__name__}")


def check_has_no_slots(host: nn.Module) -> None:
    """Raise a GrowthError if the host already has slots."""
    for name, module in host.named_modules():
        if isinstance(around(module), Slot):
            raise GrowthError(
                f"the model already has slots (after {name!r}); remove them first: call remove() or bake() of the Slotted that add_slots "
                "returned. To copy a model with slots, copy the Slotted: copy.deepcopy(slotted)"
            )


class Slotted(Displayed):
    """A host and its slots. `model` is the module that the user passed, `host` the same module without wrappers.

    `calls` is the patch of the model's forward, so that it makes no difference whether the user calls `model` or this object.
    """

    def __init__(self, model: nn.Module, host: nn.Module, discovery: Discovery, names: Sequence[str], example_input: Any) -> None:
        self.model, self.host, self.discovery, self.example_input = model, host, discovery, example_input
        touched = {part for name in names for units in discovery.places[name].chain for part in modules_of(units)}
        fused = {name for name in touched if name in discovery.places and discovery.places[name].is_fused}
        drawn_in = {units.name: around_all(modules_of(units)) for name in names for units in discovery.places[name].chain}
        within = {name: host.get_submodule(drawn_in[name]) for name in drawn_in}
        # Patches of the modules that new units pass through.
        self.wide = {name: WidePatch(is_fused=name in fused, drawn_in=within.get(name)) for name in touched}
        self.slots = {name: Slot(discovery.places[name], self.wide) for name in names}
        modules = {name: host.get_submodule(name) for name in names}
        # Patches of the modules with slots that hold seeds of an earlier training.
        self.baked = {name: BakedPatch() for name, one in modules.items() if any(map(is_hook_of_seed, one._forward_hooks.values()))}
        self.calls = ModelPatch()
        self.is_attached = True
        self._weights = {name: weights_of(host, host.get_submodule(name)) for name in names}  # dtype and device at the discovery
        self.on_bake: Callable[[], Card] | None = None  # of the latest grower: closes its ledger, and returns the card of the training
        self._eager: ExitStack | None = None  # open while a compiled model runs eagerly
        self._homes = find_homes(host, names, example_input)
        self._check_handle = self._attach_slots()
        # Code that is already compiled was traced without the slots, so discard it.
        if is_compiled(model):
            torch.compiler.reset()

    @property
    def has_grower(self) -> bool:
        return self.calls.follower is not None

    def _attach_slots(self) -> RemovableHandle:
        """Patch the model's forward, attach all slots, and return the handle of the state dict check."""
        # Patch the model first, because a slot may be after the whole model.
        self.calls.attach(self.model if is_compiled(self.model) else self.host)
        # New units pass through a layer before a slot after it sees its output.
        for name, patch in self.wide.items():
            patch.attach(self.host.get_submodule(name))
        for name, baked in self.baked.items():
            baked.attach(self.host.get_submodule(name))
        for name, slot in self.slots.items():
            slot.attach_to(self.host.get_submodule(slot.place.module), self._homes[name])
        return on_load(self.host, CheckStructure(self.host, self.slots))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.calls.run(self.model, arguments, keywords)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_eager": None, "on_bake": None}  # a copy has no grower

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for slot in self.slots.values():
            slot.wide = self.wide
        # torch gives a copy of a compiled model its own forward, so patch it again.
        if self.is_attached and is_compiled(self.model) and around(self.model) is None:
            self.calls.attach(self.model)
        for module in (self.model, self.host):
            drop_copied_zero_grad(module)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of host and seeds."""
        self.model.train(mode)
        for module in self._seeds():
            module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def to(self, *arguments: Any, **keywords: Any) -> Self:
        """Move host and seeds. `model.to` does not reach the seeds, because they are not registered in the model."""
        self.model.to(*arguments, **keywords)
        for module in self._seeds():
            module.to(*arguments, **keywords)
        return self

    def _seeds(self) -> Iterator[nn.Module]:
        return (slot.seed for slot in self.slots.values() if slot.seed is not None)

    def slot(self, name: str) -> Slot:
        """Return the slot of this name. Raise a GrowthError that lists the slots if there is none."""
        if name not in self.slots:
            raise GrowthError(f"no slot is named {name!r}; the slots of this model are {', '.join(self.slots)}")
        return self.slots[name]

    def place(self, name: str) -> Place:
        """Return the place of a slot with its current dtype and device: the host may have been moved or cast since the discovery."""
        place, before = self.slot(name).place, self._weights[name]
        now = weights_of(self.host, self.host.get_submodule(place.module))
        # Take over only the changes of the weights: the dtype and device of an output may differ from those of the weights.
        dtype = place.dtype if now.dtype == before.dtype else now.dtype
        device = place.device if now.device == before.device else now.device
        kept = self._kept_units()
        return replace(place, dtype=dtype, device=device, chain=tuple(units.beside(kept) for units in place.chain))

    def new_seed(self, name: str, blueprint: str, *, random_seed: int, blending: Blending = "add") -> Seed:
        """Build a seed of a blueprint for a slot, and do not plant it."""
        modules, kept, order = dict(self.host.named_modules()), self._kept_units(), self.next_order()
        return make_seed(self.place(name), blueprint, modules, kept, random_seed=random_seed, blending=blending, order=order)

    def next_order(self) -> int:
        """Return the order of a new width seed, whose units come behind those of all that are connected."""
        return next_order(slot.seed.spec.order for slot in self.slots.values() if slot.seed is not None)

    def rebuilt_seed(self, name: str, state: Mapping[str, Tensor]) -> Seed:
        """Build the seed of a slot for a state dict of it. The caller loads the weights."""
        spec = SeedSpec.from_tensor(state[SPEC_KEY])
        return build_seed(self.place(name), spec, dict(self.host.named_modules()))

    def why_not_removed(self, name: str) -> str:
        """Return why the seed in a slot cannot be removed yet: another seed reads its units. Return "" if none does."""
        seeds = {other: slot.seed.spec for other, slot in self.slots.items() if slot.seed is not None}
        return why_not_removed(name, {other: (spec.order, spec.wide) for other, spec in seeds.items()}) if name in seeds else ""

    def _kept_units(self) -> dict[str, tuple[int, int]]:
        """Return the inputs and outputs that kept width seeds have added to modules: of those before the first that is not kept."""
        kept = {slot.seed for slot in self.slots.values() if slot.is_kept}
        return kept_units((seed.spec.wide, seed in kept) for seed in self.wide_seeds())

    def open_again(self, name: str) -> Slot:
        """Open another slot at the place of a slot, and return it. It is applied after those that are there."""
        last = self.last_at(self.slot(name).place.module)
        place = self.slots[last].place.again()
        slot = Slot(place, self.wide)
        self._homes[place.name] = self._next_home(last)
        self._weights[place.name] = self._weights[last]
        # Keep the order in which the slots run.
        behind = {key: self.slots.pop(key) for key in list(self.slots)[list(self.slots).index(last) + 1 :]}
        self.slots |= {place.name: slot, **behind}
        slot.attach_to(self.host.get_submodule(place.module), self._homes[place.name])
        return slot

    def close(self, name: str) -> None:
        """Remove the last slot at a place, which is not the only one there, with its seed."""
        slot = self.slots.pop(name)
        assert slot.place.earlier, "the first slot at a place stays"
        slot.plant(None)
        slot.detach()
        del self._homes[name], self._weights[name]

    def last_at(self, module: str) -> str:
        """Return the name of the last slot at the place behind a submodule."""
        return next(name for name, slot in reversed(self.slots.items()) if slot.place.module == module)

    def _next_home(self, last: str) -> SeedHome:
        """Return the home of the seed in the next slot at the place of the last one there."""
        return free_home(self._homes[last].module, self._homes[last].path, self._homes.values())

    def _paths(self) -> dict[str, str]:
        """Return the slots by the names of their seeds in a state dict."""
        return {plain_name(f"{slot.place.module}.{self._homes[name].baked_as}"): name for name, slot in self.slots.items()}

    def _next_paths(self) -> dict[str, str]:
        """Return the last slot at each place by the name that the seed of the next slot there would have in a state dict."""
        last = {slot.place.module: name for name, slot in self.slots.items()}
        return {plain_name(f"{module}.{self._next_home(name).baked_as}"): name for module, name in last.items()}

    def wide_seeds(self) -> list[WidthSeed]:
        """Return the connected width seeds, also candidates of a probe, in the order of their units."""
        found = dict.fromkeys(seed for patch in self.wide.values() for seed, _, _ in patch.seeds)
        return sorted(found, key=lambda seed: seed.spec.order)

    def join_kept(self) -> None:
        """Compute kept width seeds as parts of wide layers from now on, which is faster for convolutions and rounds differently.

        Seeds behind one that is still on trial stay as they are: pruning that one must change no other bit of the outputs.
        """
        kept = {slot.seed for slot in self.slots.values() if slot.is_kept}
        for seed in itertools.takewhile(lambda seed: seed in kept, self.wide_seeds()):
            seed.spec = msgspec.structs.replace(seed.spec, is_joined=True)

    def run_eagerly(self, is_eager: bool) -> None:
        """Run a compiled model eagerly until this is called with False or the slots are removed."""
        if self._eager is not None:
            self._eager.close()
            self._eager = None
        if is_eager and is_compiled(self.model):
            self._eager = ExitStack()
            self._eager.enter_context(eager_calls(self.model))

    @contextmanager
    def without(self, names: Sequence[str]) -> Iterator[None]:
        """Switch off the seeds in these slots inside the `with` block."""
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(self.slot(name).held_at(0.0))
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the model without wrappers, seeds included."""
        return dict(self.host.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Build the seeds of the state dict in these slots, and load all weights. An error leaves the model's structure as it was.

        For a model that is used or trained without a `Grower`. The stages and optimisers of a grower's seeds are not in a state dict of the
        model; use `grower.save` and `grower.load` for them.
        """
        if self.has_grower:
            raise GrowthError("a Grower owns these seeds, their stages and optimisers; use grower.save(folder) and grower.load(folder)")
        # Build all seeds first. Names are compared without the prefixes that wrappers add.
        state = plain_names(state)
        wanted = specs_in(state)
        baked = {plain_name(name) for name, module in self.host.named_modules() if isinstance(module, Seed)}
        paths = self._paths()
        while behind := next((name for path, name in self._next_paths().items() if path in wanted.keys() - baked), None):
            self.open_again(behind)
            paths = self._paths()
        unknown = sorted(wanted.keys() - paths.keys() - baked)
        if unknown:
            raise GrowthError(
                f"the state dict has the seed {unknown[0]!r}, and this model has no slot there; pass the same slots to add_slots"
            )
        modules = dict(self.host.named_modules())
        seeds = {slot: build_seed(self.place(slot), wanted[path], modules) for path, slot in paths.items() if path in wanted}
        # Put them into the slots and load the weights; if that fails, put the former seeds back.
        before = {name: (slot.seed, slot.is_connected, slot.alpha, slot.is_kept) for name, slot in self.slots.items()}
        for name, slot in self.slots.items():
            slot.plant(seeds.get(name), connected=True)
            slot.is_kept = slot.seed is not None  # no grower decides about these seeds, so they are part of the model
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
        """Return a copy that holds a moving average of the weights and grows with this model. Call its `update()` after every step."""
        return AveragedModel(self, decay)

    def remove(self) -> nn.Module:
        """Remove all slots with the seeds in them, and return the model."""
        if self.is_attached:
            self._detach_slots()
            self._release()
        return self.model

    def _detach_slots(self) -> None:
        self.run_eagerly(False)
        for slot in reversed(self.slots.values()):
            slot.detach()
        for patch in (*self.baked.values(), *self.wide.values()):
            patch.detach()
        self.calls.detach()
        self._check_handle.remove()
        self.is_attached = False
        if is_compiled(self.model):
            torch.compiler.reset()

    def _release(self) -> None:
        """Stop the grower's follower, and forget the grower."""
        self.calls.recording = None
        if self.calls.follower is not None:
            self.calls.follower.stop()
            self.calls.follower = None

    def bake(
        self,
        *,
        fold: bool = True,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        of_seeds: Mapping[Seed, Iterable[Optimizer]] | None = None,
    ) -> nn.Module:
        """Make the fossilized seeds part of the model, remove all slots and other seeds, and return the model without wrappers.

        A depth seed becomes a submodule. With `fold`, the units of a width seed become rows and columns of the host's own layers, and
        nothing else is left of it; otherwise it becomes a submodule too. The parameters of the host stay the same objects. Those that are
        wider keep their state in `optimizer`, that of the host or several of them, and get the state that `of_seeds` holds for the weights
        of each seed (the rule is in `esper.growth.seeds.optimizer_state`). The parameters of submodules are in no optimiser: to train them
        further, make a new one.

        The names in the state dict do not change. The outputs for the example input are compared before and after; if they differ, an error
        is raised and everything is left as it was.
        """
        if not self.is_attached:
            return self.host
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        kept = {name: slot.seed for name, slot in self.slots.items() if slot.is_kept and slot.seed is not None}
        if fold and optimizers:
            grown = [plan.module for seed in kept.values() for plan in seed.spec.wide]
            check_trained(dict(self.host.named_modules()), grown, optimizers)
        with ExitStack() as stack:
            # Disconnect the other seeds. The stack connects them again if baking fails.
            for name, slot in self.slots.items():
                if name not in kept and slot.is_connected:
                    slot.connect(False)
                    stack.callback(slot.connect, True)
            before = self._example_outputs() if kept else None
            wide = self.wide_seeds()
            self._detach_slots()
            undo: list[Callable[[], None]] = []
            stack.callback(self._attach_again, undo)
            if wide and fold:
                undo.append(fold_seeds(dict(self.host.named_modules()), wide, of_seeds, optimizers))
            elif wide:
                undo += [self._attach_alone(name, patch) for name, patch in self.wide.items() if patch.seeds]
            for name, seed in kept.items():
                if not (fold and seed.spec.wide):
                    undo.append(self._attach_for_good(name, seed))
            after = self._example_outputs() if kept else None
            if before is None or after is None or agree(before, after):
                stack.pop_all()  # do not attach the slots and connect the other seeds again
                self._release()
                FACTS_OF_BAKED[self.host] = None if self.on_bake is None else self.on_bake()
                return self.host
        raise GrowthError(
            f"baking would change the model's outputs for the example input, so nothing was baked. The fossilized seeds are after "
            f"{', '.join(kept)}; a module there may run or count its submodules, which add_slots did not detect"
        )

    def _attach_again(self, undo: Sequence[Callable[[], None]]) -> None:
        """Take back the steps of a bake, and attach the slots again."""
        for step in undo:
            step()
        self._check_handle = self._attach_slots()
        self.is_attached = True

    def _attach_for_good(self, name: str, seed: Seed) -> Callable[[], None]:
        """Register a seed as a submodule, which a hook applies, and return a function that undoes it. Patches apply a width seed."""
        module, home = self.host.get_submodule(self.slots[name].place.module), self._homes[name]
        handle = attach(module, seed, home)
        if seed.spec.wide:
            handle.remove()

        def undo() -> None:
            handle.remove()
            del home.module._modules[home.name]
            seed.baked_as = ""

        return undo

    def _attach_alone(self, name: str, patch: WidePatch) -> Callable[[], None]:
        """Attach the patch of a module without slots, and return a function that undoes it."""
        patch.attach(self.host.get_submodule(name))
        return patch.detach

    def _example_outputs(self) -> list[Tensor] | None:
        """Return the host's outputs for the example input in eval mode, with no side effects; warn and return None if it cannot run."""
        # The host may have been moved or cast since the discovery. Convert the example as the weights were converted.
        was, now = next(iter(self._weights.values())), weights_of(self.host, self.host)
        example = as_model_takes_it(self.example_input, was.device, now.device, was.dtype, now.dtype)
        try:
            with isolated(self.host), without_tf32(), torch.no_grad():
                self.host.eval()
                return [tensor.detach().clone() for tensor in tensors_in(call(self.host, example))]
        except Exception as error:
            warnings.warn(
                f"the model can no longer run its example input ({type(error).__name__}: {error}), so its outputs before and after baking "
                "are not compared",
                RuntimeWarning,
                stacklevel=3,
            )
            return None

    def card(self) -> Card:
        """Return the slots for notebooks."""
        host, seeds = self.discovery.host, sum(slot.seed is not None for slot in self.slots.values())
        figures = [("parameters of the host", f"{host.parameters:,}"), ("FLOPs per sample", f"{host.flops:,}"), ("seeds", str(seeds))]
        rows = [(name, _output(slot.place), _content(slot)) for name, slot in self.slots.items()]
        state = "" if self.is_attached else ", removed"
        return Card(f"{type(self.host).__name__} with {len(rows):,} slots{state}", figures, ("slot", "output", "content"), rows)

    def describe(self) -> str:
        """Return tables to print: every place with its slot, or the reason why nothing can grow there, and the cost of each blueprint."""
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
        return "\n\n".join([*tables, *_widths(found.places)])


def _output(place: Place) -> str:
    about = (" causal" if place.is_causal else "") + (" of the host" if place.only_wider else "")
    return f"{place.kind} {'×'.join(map(str, place.shape))}{about}"


def _content(slot: Slot | None) -> str:
    if slot is None:
        return "–"
    if slot.seed is None:
        return "empty"
    blueprint = slot.seed.spec.blueprint
    return f"{blueprint}, kept" if slot.is_kept else f"{blueprint}, alpha {slot.alpha:g}"


def _costs(places: Mapping[str, Place]) -> list[tuple[str, ...]]:
    """Return a table with a row for each place, a column for each blueprint, and parameters and FLOPs in the cells."""
    fitting = dict.fromkeys(blueprint for place in places.values() for blueprint in blueprints_for(place))
    blueprints = [blueprint for blueprint in fitting if blueprint.share is None]
    rows = [("output", *(blueprint.name for blueprint in blueprints))]
    for output, place in places.items():
        costs = [cost_of(blueprint, place) if blueprint in blueprints_for(place) else None for blueprint in blueprints]
        rows.append((output, *(f"{compact(cost.parameters)} · {compact(cost.flops)}" if cost else "–" for cost in costs)))
    return rows


def _widths(places: Mapping[str, Place]) -> list[str]:
    """Return a table of the units that can be widened, with the cost of doubling them, and the reasons where none can be."""
    rows: list[tuple[str, ...]] = [("units of", "number", "read by", "slots at", "cost of widen_100", "of widen_100_chain")]
    doubled, chain = get_blueprint("widen_100"), get_blueprint("widen_100_chain")
    seen: dict[str, list[str]] = {}  # producer -> places at which a slot can widen its units
    for name, place in places.items():
        if place.chain:
            seen.setdefault(widened_by(doubled, place)[0].name, []).append(name)
    for names in seen.values():
        place = places[names[0]]
        (units,) = widened_by(doubled, place)
        costs = [cost_of(doubled, place), cost_of(chain, place) if reason_against(chain, place) is None else None]
        shown = [f"{compact(cost.parameters)} · {compact(cost.flops)}" if cost else "–" for cost in costs]
        number = f"{units.width} of {units.features_of(units.name)} features" if units.made else str(units.width)
        rows.append((" and ".join(units.producers), number, _few([reader.name for reader in units.readers]), _few(names), *shown))
    reasons: dict[str, list[str]] = {}
    for name, place in places.items():
        if place.why_not_wider.startswith("its units"):
            reasons.setdefault(place.why_not_wider, []).append(name)
    lines = [(f"{_few(names)}:", reason.removeprefix("its units ")) for reason, names in reasons.items()]
    tables = ["units that can be widened\n" + aligned(rows)] if seen else []
    return [*tables, *(["units that cannot be widened\n" + aligned(lines)] if lines else [])]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _refused(places: Mapping[str, Place]) -> list[str]:
    """Return lines that say which blueprints cannot grow in which of these places, and why."""
    refused: dict[tuple[str, str], list[str]] = {}  # (names of blueprints, reason) -> outputs
    for output, place in places.items():
        deep = [blueprint for blueprint in blueprints_of(place.kind) if blueprint.share is None]
        reasons = {blueprint.name: reason_against(blueprint, place) for blueprint in deep}
        for reason in dict.fromkeys(filter(None, reasons.values())):
            refused.setdefault((", ".join(name for name in reasons if reasons[name] == reason), reason), []).append(output)
    lines = [f"{names} cannot grow in {', '.join(outputs)}: {reason}" for (names, reason), outputs in refused.items()]
    return ["\n".join(lines)] if lines else []


@contextmanager
def eager_calls(model: nn.Module) -> Iterator[None]:
    """Run the compiled parts of a model eagerly inside the `with` block. Copies made inside the block still compile.

    `torch.compiler.set_stance` is not enough: it is global, so it would affect other models and stay on if a training loop is abandoned.
    """
    with ExitStack() as stack:
        for module in list(model.modules()):
            if COMPILED_MODULE in module._modules:  # compiled by torch.compile(module)
                stack.enter_context(forward_replaced(module, _eagerly(own_forward(module))))
            compiled = vars(module).get(COMPILED_CALL)  # compiled by module.compile()
            if compiled is not None:
                vars(module)[COMPILED_CALL] = _eagerly(compiled)
                stack.callback(vars(module).__setitem__, COMPILED_CALL, compiled)
        yield


def _eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with torch's compiler switched off while it runs."""

    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # the user's own code around the model is being compiled; the stance cannot be changed in it
            return function(*arguments, **named)
        with eager():
            return function(*arguments, **named)

    return call
