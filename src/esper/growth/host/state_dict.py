"""Seeds in the host's module tree and in its state dict.

- Module tree. Baking registers a seed in the module whose output it changes: `block.esper_seed`. A container, or any module that runs or
  counts its children, must not get a new child. There the seed is registered in the first layer inside the module, and its spec says how
  many levels up the changed module is. `find_homes` finds the module for every slot.
- State dict. A seed is in the host's state dict from the beginning, under the name it has when it is baked: `block.esper_seed.alpha`. So a
  model that is saved in the middle of training keeps its seeds. A state dict with other seeds than the model's is refused.

`agree` and `as_model_takes_it` serve the comparison of a model's outputs before and after such a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.config import GrowthError
from esper.growth.host.discover import call
from esper.growth.host.isolation import isolated
from esper.growth.host.layout import Place
from esper.growth.host.slots import SeedHome, Slot, on_load, put_seeds_first, tensors_in
from esper.growth.seeds.seed import SPEC_KEY, Seed, SeedSpec
from esper.growth.seeds.width import WidthSeed

# The width of a saved seed must not exceed the sizes of its weights, unless it is at most this: the weights of a user's blueprint may be
# smaller.
SMALL_WIDTH = 4096

BAKED = "esper_seed"  # name of a seed in the module it is registered in, and so in the state dict


def attach(module: nn.Module, seed: Seed, home: SeedHome) -> RemovableHandle:
    """Make a seed part of the host: register it in its home, and apply it by a forward hook of `module`."""
    seed.baked_as = home.baked_as
    home.module.add_module(home.name, seed.train(module.training))
    handle = module.register_forward_hook(seed.after)
    put_seeds_first(module)
    return handle


def find_homes(host: nn.Module, names: Sequence[str], example_input: Any) -> dict[str, SeedHome]:
    """Return the home of the seed of each of these submodules: the submodule itself, unless it runs or counts its children."""
    # Containers are known by their type. Other modules with children are tried out, all at once. Those that run their children are found
    # by that. If the trial fails for another reason, try the modules one by one.
    counting = {name for name in names if _counts_children(host.get_submodule(name))}
    untested = [name for name in names if name not in counting and _children_of(host.get_submodule(name))]
    while untested and (found := _counting_by_trial(host, untested, example_input)) is not None:
        counting |= found or {name for name in untested if _counting_by_trial(host, [name], example_input) is not None}
        untested = [name for name in untested if name not in counting] if found else []
    homes: dict[str, SeedHome] = {}
    for name in names:
        module = host.get_submodule(name)
        path = _first_layer(module) if name in counting else ""
        homes[name] = free_home(module.get_submodule(path), path, homes.values())
    return homes


def free_home(module: nn.Module, path: str, taken: Iterable[SeedHome]) -> SeedHome:
    """Return a home in a module under a name that is free: esper_seed, esper_seed_2, ..."""
    names = {home.name for home in taken if home.module is module}
    count, name = 1, BAKED
    while hasattr(module, name) or name in names:
        count += 1
        name = f"{BAKED}_{count}"
    return SeedHome(module, path, name)


def _children_of(module: nn.Module) -> list[nn.Module]:
    """Return the children of a module, without baked seeds and parametrizations of weights."""
    return [child for name, child in module.named_children() if name != "parametrizations" and not isinstance(child, Seed)]


def _counts_children(module: nn.Module) -> bool:
    """Return whether a module with children is a container, or of a class that can be iterated or indexed."""
    is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return bool(_children_of(module)) and (
        is_container or any(hasattr(type(module), name) for name in ("__len__", "__iter__", "__getitem__"))
    )


def _first_layer(module: nn.Module) -> str:
    """Return the name of the first submodule without children; there must be one."""
    for name, part in module.named_modules():
        if name and "parametrizations" not in name.split(".") and not _children_of(part) and not isinstance(part, Seed):
            return str(name)
    raise AssertionError("a module with children has one without children inside")


class _TrialChild(nn.Module):
    """Stand-in for a registered seed, which records whether the host runs it."""

    was_run = False

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self.was_run = True
        return arguments[0] if arguments else None


def _counting_by_trial(host: nn.Module, names: Sequence[str], example_input: Any) -> set[str] | None:
    """Run the host with one more child in each of these submodules, and return those that run that child.

    Return None if the host computes the same and runs none of them.
    """
    children = {name: _TrialChild() for name in names}
    modules = [host.get_submodule(name) for name in names]
    with isolated(host), torch.no_grad():
        host.eval()
        before = [tensor.clone() for tensor in tensors_in(call(host, example_input))]
    try:
        for module, child in zip(modules, children.values(), strict=True):
            module._modules["esper_trial_child"] = child
        with isolated(host), torch.no_grad():
            host.eval()
            is_same = agree(before, list(tensors_in(call(host, example_input))))
    except Exception:  # the host may raise anything if it finds a child that it does not know
        is_same = False
    finally:
        for module in modules:
            module._modules.pop("esper_trial_child", None)
    ran = {name for name, child in children.items() if child.was_run}
    return ran if ran or not is_same else None


def agree(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether outputs are equal up to rounding errors, as another order of operations makes them."""
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
    """Return an example input converted as the model was: tensors on `device` move to `to_device`, those of `dtype` become `to_dtype`."""
    if isinstance(value, Tensor):
        value = value.to(to_device) if value.device == device else value
        return value.to(to_dtype) if value.dtype == dtype else value
    if isinstance(value, Mapping):
        return {key: as_model_takes_it(item, device, to_device, dtype, to_dtype) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(as_model_takes_it(item, device, to_device, dtype, to_dtype) for item in value)
    return value


def specs_in(state: Mapping[str, Any]) -> dict[str, SeedSpec]:
    """Return the spec of every seed in a state dict, by name. Seeds of the same module are in the order in which they were baked."""
    found = {}
    for key, tensor in state.items():
        name, _, last = key.rpartition(".")
        if last == SPEC_KEY and name.rpartition(".")[2].startswith(BAKED):
            try:
                found[name] = SeedSpec.from_tensor(tensor)
                _check_shape(found[name], [value for key, value in state.items() if key.startswith(f"{name}.") and value is not tensor])
            except (msgspec.MsgspecError, AttributeError, TypeError, ValueError) as error:
                raise GrowthError(
                    f"{key!r} does not describe a seed ({error}); the file is damaged, or was written by another version"
                ) from error
    # Shorter names first: esper_seed_2 before esper_seed_10.
    return {name: found[name] for name in sorted(found, key=lambda name: (len(name), name))}


def _check_shape(spec: SeedSpec, weights: Sequence[Any]) -> None:
    """Raise ValueError if the spec cannot belong to these weights. Building a seed from a damaged spec could exhaust the memory."""
    if len(spec.shape) not in {"dense": (1,), "token": (2, 3), "conv": (2, 3)}[spec.kind] or min(spec.shape) < 1 or spec.levels_up < 0:
        raise ValueError(f"a {spec.kind} seed of the shape {list(spec.shape)}")
    width = spec.shape[0] if spec.kind == "conv" else spec.shape[-1]
    if spec.wide:  # its weights are as large as its parts, not as the place
        width = max(max(plan.inputs, plan.outputs) for plan in spec.wide)
    widest = max((size for weight in weights for size in getattr(weight, "shape", ())), default=0)
    if width > max(widest, SMALL_WIDTH):
        raise ValueError(f"a seed for {width:,} features, whose weights have at most {widest:,}")


def build_seed(place: Place, spec: SeedSpec, modules: Mapping[str, nn.Module]) -> Seed:
    """Build a seed of a saved model. `modules` are those of the host, by name. The caller loads the weights of the seed."""
    place = replace(place, kind=spec.kind, shape=spec.shape, is_causal=spec.is_causal, batch_axis=spec.batch_axis, alone="")
    try:
        seed = (
            WidthSeed(place, spec.blueprint, modules, spec.wide, random_seed=0, blending=spec.blending, order=spec.order)
            if spec.wide
            else Seed(place, spec.blueprint, random_seed=0, blending=spec.blending)
        )
        seed.spec = spec
        return seed
    except ValueError as error:
        raise GrowthError(
            f"the seed after {place.name!r} cannot be built: {error}. "
            f"If {spec.blueprint!r} is your own blueprint, register the same one before loading"
        ) from error


class CheckStructure:
    """Hook before a state dict is loaded into the host: raises an error if its seeds are not those of the model."""

    def __init__(self, host: nn.Module, slots: Mapping[str, Slot]) -> None:
        self.host, self.slots = host, slots

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *others: Any) -> None:
        if any(slot.ignores_loads for slot in self.slots.values()):
            return
        # Compare the seeds in the state dict with those of the model: in slots, or baked.
        saved = specs_in({key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)})
        present = {
            f"{slot.place.module}.{slot.home.baked_as}" if slot.place.module else slot.home.baked_as: slot.seed.spec
            for slot in self.slots.values()
            if slot.seed is not None
        }
        present |= {name: seed.spec for name, seed in self.host.named_modules() if isinstance(seed, Seed)}
        surplus, lacking = sorted(saved.keys() - present.keys()), sorted(present.keys() - saved.keys())
        other = sorted(name for name in saved.keys() & present.keys() if not saved[name].builds_same(present[name]))
        if not surplus and not lacking and not other:
            return
        if surplus:
            what = f"the state dict has the seed {surplus[0]!r}, and the model has nothing there"
        elif lacking:
            what = f"the model has the seed {lacking[0]!r}, and the state dict does not: it was saved before the seed grew, or from a copy"
        else:
            what = (
                f"the seed {other[0]!r} is a {saved[other[0]].blueprint} in the state dict and a {present[other[0]].blueprint} in the model"
            )
        raise GrowthError(
            f"{what}; nothing was loaded. To restore an earlier state of a growing model, use grower.save and grower.load; "
            "to use the saved model, load it into a new one: esper.load(state_dict, model=Net())"
        )


class SeedsIgnored:
    """Until `stop`, loading a state dict into `module` neither changes its seeds nor uses those of the state dict.

    Callbacks use it, because they restore the seeds with their stages and optimisers from their own state.
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
    """Hook before a state dict is loaded: removes the seeds that the module does not have."""

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *others: Any) -> None:
        own = module.state_dict(prefix=prefix)
        for name in specs_in(state_dict):
            for key in [key for key in state_dict if key.startswith(f"{name}.") and key not in own]:
                del state_dict[key]
