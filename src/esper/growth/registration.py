"""Seeds in the host's module tree and state dict: where they are registered, what a state dict tells of them, and what is refused.

A seed is registered in the module whose output it changes. A container, or any module that runs or counts its children, stays as it is:
the seed is registered in the first layer inside it, and its spec says how many levels up the module is that it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.errors import GrowthError
from esper.growth.isolation import isolated
from esper.growth.place import Place
from esper.growth.seed import SPEC_KEYS, Seed, SeedSpec
from esper.growth.slot import Home, Slot, on_load
from esper.growth.survey import call, tensors_in

SMALL_WIDTH = 4096  # up to which a seed is built without a look at its weights: a user's blueprint may have none of its width
BAKED = "esper_seed"  # the name of a seed in the state dict, below the module that it is registered in


def attach(module: nn.Module, seed: Seed, home: Home) -> RemovableHandle:
    """Make a seed part of the host: registered in its home, applied by a forward hook of `module`."""
    # Before the hooks that the user may have on the module, as a slot is, but behind seeds that were kept earlier.
    is_first = not any(isinstance(getattr(hook, "__self__", None), Seed) for hook in module._forward_hooks.values())
    seed.baked_as = home.baked_as
    home.module.add_module(home.name, seed.train(module.training))
    return module.register_forward_hook(seed.after, prepend=is_first)


def find_homes(host: nn.Module, names: Sequence[str], example_input: Any) -> dict[str, Home]:
    """Return where the seed of each of these submodules is registered: in the submodule, unless that runs or counts its children."""
    counting = {name for name in names if _counts_children(host.get_submodule(name))}
    suspects = [name for name in names if name not in counting and _children_of(host.get_submodule(name))]
    if suspects and not _tolerates_children(host, suspects, example_input):
        counting |= {name for name in suspects if not _tolerates_children(host, [name], example_input)}
    homes: dict[str, Home] = {}
    taken: set[tuple[int, str]] = set()
    for name in names:
        module = host.get_submodule(name)
        path = _first_layer(module) if name in counting else ""
        home = module.get_submodule(path)
        count, own_name = 1, BAKED
        while hasattr(home, own_name) or (id(home), own_name) in taken:
            count += 1
            own_name = f"{BAKED}_{count}"
        taken.add((id(home), own_name))
        homes[name] = Home(home, path, own_name)
    return homes


def _children_of(module: nn.Module) -> list[nn.Module]:
    return [child for name, child in module.named_children() if name != "parametrizations" and not isinstance(child, Seed)]


def _counts_children(module: nn.Module) -> bool:
    """Containers by type, and classes that can be iterated or indexed."""
    is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return bool(_children_of(module)) and (
        is_container or any(hasattr(type(module), name) for name in ("__len__", "__iter__", "__getitem__"))
    )


def _first_layer(module: nn.Module) -> str:
    """Return the name of the first submodule without children of its own."""
    for name, part in module.named_modules():
        if name and "parametrizations" not in name.split(".") and not _children_of(part) and not isinstance(part, Seed):
            return str(name)
    raise AssertionError("a module with children has a last one")


class _Passenger(nn.Module):
    """Stands where a seed would be registered, and notes whether it is run."""

    was_run = False

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self.was_run = True
        return arguments[0] if arguments else None


def _tolerates_children(host: nn.Module, names: Sequence[str], example_input: Any) -> bool:
    """Whether the host computes the same with one more child in each of these submodules, and does not run it."""
    passenger = _Passenger()
    modules = [host.get_submodule(name) for name in names]
    with isolated(host), torch.no_grad():
        host.eval()
        before = [tensor.clone() for tensor in tensors_in(call(host, example_input))]
    try:
        for module in modules:
            module._modules["esper_passenger"] = passenger
        with isolated(host), torch.no_grad():
            host.eval()
            after = list(tensors_in(call(host, example_input)))
    except Exception:  # whatever the host makes of a child that it does not know
        return False
    finally:
        for module in modules:
            module._modules.pop("esper_passenger", None)
    return not passenger.was_run and agree(before, after)


def agree(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether outputs are equal up to the noise of another order of operations."""
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.is_floating_point():
            noise = 2e-2 if one.element_size() < 4 else 1e-4
            largest = one.abs().nan_to_num(0.0, 0.0, 0.0).max() if one.numel() else 0.0
            if not torch.allclose(one, other, rtol=0.0, atol=float(largest) * noise, equal_nan=True):
                return False
        elif not torch.equal(one, other):
            return False
    return True


def as_model_takes_it(value: Any, device: torch.device, to_device: torch.device, dtype: torch.dtype, to_dtype: torch.dtype) -> Any:
    """Return an example input as the model takes it now: where it was on the weights' device or in their precision, it still is."""
    if isinstance(value, Tensor):
        value = value.to(to_device) if value.device == device else value
        return value.to(to_dtype) if value.dtype == dtype else value
    if isinstance(value, Mapping):
        return {key: as_model_takes_it(item, device, to_device, dtype, to_dtype) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(as_model_takes_it(item, device, to_device, dtype, to_dtype) for item in value)
    return value


def specs_in(state: Mapping[str, Any]) -> dict[str, SeedSpec]:
    """Return the name of every seed in a state dict -> how to build it, in the order in which they grew after their submodules."""
    found = {}
    for key, tensor in state.items():
        name, _, last = key.rpartition(".")
        if last in SPEC_KEYS and name.rpartition(".")[2].startswith(BAKED):
            try:
                found[name] = SeedSpec.from_tensor(tensor)
                _check_shape(found[name], [value for key, value in state.items() if key.startswith(f"{name}.") and value is not tensor])
            except (msgspec.MsgspecError, AttributeError, TypeError, ValueError) as error:
                raise GrowthError(f"{key!r} does not tell what grew there ({error}); the file is damaged, or of another version") from error
    return {name: found[name] for name in sorted(found, key=lambda name: (len(name), name))}


def _check_shape(spec: SeedSpec, weights: Sequence[Any]) -> None:
    """Raise ValueError where no seed could have been saved with this shape: memory for all of it is taken when the seed is built."""
    if len(spec.shape) not in {"dense": (1,), "token": (2, 3), "conv": (2, 3)}[spec.kind] or min(spec.shape) < 1 or spec.levels_up < 0:
        raise ValueError(f"a {spec.kind} seed of the shape {list(spec.shape)}")
    width = spec.shape[0] if spec.kind == "conv" else spec.shape[-1]
    widest = max((size for weight in weights for size in getattr(weight, "shape", ())), default=0)
    if width > max(widest, SMALL_WIDTH):
        raise ValueError(f"a seed for {width:,} features, whose weights have at most {widest:,}")


def build_seed(place: Place, spec: SeedSpec) -> Seed:
    """Build the seed of a saved model, with weights to be loaded."""
    place = replace(place, kind=spec.kind, shape=spec.shape, is_causal=spec.is_causal, batch_axis=spec.batch_axis, alone="")
    try:
        seed = Seed(place, spec.blueprint, random_seed=0, blending=spec.blending)
        seed.spec = spec
        return seed
    except ValueError as error:
        raise GrowthError(
            f"the seed after {place.name!r} cannot be built: {error}. "
            f"If {spec.blueprint!r} is a blueprint of your own, register it as it was, before loading"
        ) from error


class CheckStructure:
    """The hook before a state dict is loaded into the host: refuses another structure before anything is changed."""

    def __init__(self, host: nn.Module, slots: Mapping[str, Slot]) -> None:
        self.host, self.slots = host, slots

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *others: Any) -> None:
        if any(slot.ignores_loads for slot in self.slots.values()):
            return
        saved = specs_in({key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)})
        living = {
            f"{name}.{slot.home.baked_as}" if name else slot.home.baked_as: slot.seed.spec
            for name, slot in self.slots.items()
            if slot.seed is not None
        }
        living |= {name: seed.spec for name, seed in self.host.named_modules() if isinstance(seed, Seed)}
        surplus, lacking = sorted(saved.keys() - living.keys()), sorted(living.keys() - saved.keys())
        other = sorted(name for name in saved.keys() & living.keys() if not saved[name].builds_same(living[name]))
        if not surplus and not lacking and not other:
            return
        if surplus:
            what = f"the state dict has the seed {surplus[0]!r}, and the model has nothing there"
        elif lacking:
            what = f"the model has the seed {lacking[0]!r}, and the state dict does not: it is older than the seed, or of a copy without it"
        else:
            what = (
                f"the seed {other[0]!r} is a {saved[other[0]].blueprint} in the state dict and a {living[other[0]].blueprint} in the model"
            )
        raise GrowthError(
            f"{what}; nothing was loaded. To go back to an earlier state of a growing model, use grower.save and grower.load; "
            "to use the saved model, load it into a fresh one: esper.load(state_dict, model=Net())"
        )


class SeedsIgnored:
    """Until `stop`, a state dict that is loaded into `module` leaves its seeds as they are, and those in the state dict out.

    For callbacks, which restore seeds with their stages and optimisers from a state of their own.
    """

    def __init__(self, module: nn.Module, slots: Iterable[Slot]) -> None:
        self._slots = list(slots)
        self._handle = on_load(module, _DropUnknownSeeds())
        self._set(True)

    def stop(self) -> None:
        self._handle.remove()
        self._set(False)

    def _set(self, is_ignored: bool) -> None:
        for slot in self._slots:
            slot.ignores_loads = is_ignored


class _DropUnknownSeeds:
    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *others: Any) -> None:
        own = module.state_dict(prefix=prefix)
        for name in specs_in(state_dict):
            for key in [key for key in state_dict if key.startswith(f"{name}.") and key not in own]:
                del state_dict[key]
