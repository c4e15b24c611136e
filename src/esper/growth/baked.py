"""Grown models in files: the state dict tells the structure, so a fresh instance of the host becomes the grown model again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from esper.checkpoint import read_tensors
from esper.checkpoint.modules import plain_names
from esper.files import FileError
from esper.growth.errors import GrowthError
from esper.growth.isolation import is_compiled, unwrap
from esper.growth.place import Place
from esper.growth.seed import Seed, SeedSpec
from esper.growth.slotted import BAKED, attach


def save(model: nn.Module, path: Path | str) -> None:
    """The state dict of a baked model as a safetensors file."""
    from safetensors.torch import save_file

    host = unwrap(model)
    state = plain_names(host.state_dict())
    second_names = _second_names(host)
    save_file({name: tensor.contiguous() for name, tensor in state.items() if name not in second_names}, path)


def load(source: Path | str | Mapping[str, Tensor], *, model: nn.Module) -> nn.Module:
    """Grows a fresh instance of the host to the structure of a saved model and loads its weights, in place. Gives the model.

    `source` is a safetensors file (`Grown.save`), or a state dict: `esper.load(torch.load("model.pt", weights_only=True), model=Net())`.
    """
    state = plain_names(source if isinstance(source, Mapping) else _read(Path(source)))
    host = unwrap(model)
    modules = plain_names(dict(host.named_modules()))
    own = plain_names(host.state_dict())
    state |= {second: state[first] for second, first in _second_names(host).items() if first in state and second not in state}
    _check_fresh(own, state)
    seeds = _build_seeds(state, own, modules)
    _check_fit({**own, **{f"{name}.{key}": tensor for name, seed in seeds.items() for key, tensor in seed.state_dict().items()}}, state)
    for name, seed in seeds.items():
        module_name, _, own_name = name.rpartition(".")
        attach(modules[module_name], seed, own_name)
    actual = plain_names({name: name for name in host.state_dict()})
    host.load_state_dict({name: state[plain] for plain, name in actual.items()})
    if is_compiled(model):
        torch.compiler.reset()  # compiled code does not look at hooks again
    return model


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise GrowthError(f"there is no file {path}")
    try:
        return read_tensors(path)[0]
    except FileError as error:
        raise GrowthError(
            f"{error}. A file of torch.save is read by you, and its state dict passed on: "
            f"esper.load(torch.load({str(path)!r}, weights_only=True), model=...)"
        ) from error


def _specs(state: Mapping[str, Tensor]) -> dict[str, SeedSpec]:
    """Name of every baked seed -> what it is, in the order in which they grew after their submodules."""
    found = {}
    for key, tensor in state.items():
        name, _, last = key.rpartition(".")
        if last == "spec" and name.rpartition(".")[2].startswith(BAKED):
            try:
                found[name] = SeedSpec.from_tensor(tensor)
            except (msgspec.MsgspecError, TypeError, ValueError) as error:
                raise GrowthError(f"{key!r} does not tell what grew there ({error}); the file is damaged, or of another version") from error
    return {name: found[name] for name in sorted(found, key=lambda name: (len(name), name))}


def _build_seeds(state: Mapping[str, Tensor], own: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> dict[str, Seed]:
    is_same_precision = all(own[key].dtype == state[key].dtype for key in own if key in state)
    seeds = {}
    for name, spec in _specs(state).items():
        after = name.rpartition(".")[0]
        if after not in modules:
            raise GrowthError(
                f"the saved model has a seed after {after!r}, which this model does not have; pass an instance of the same host"
            )
        like = _parameter_like(modules[after], modules[""])
        dtype = state[f"{name}.alpha"].dtype if is_same_precision and f"{name}.alpha" in state else like.dtype
        place = Place(after, spec.kind, spec.shape, dtype=dtype, device=like.device, is_causal=spec.is_causal)
        try:
            seeds[name] = Seed(place, spec.blueprint, random_seed=0, blending=spec.blending)
        except ValueError as error:
            raise GrowthError(
                f"the seed after {after!r} cannot be built: {error}. "
                f"If {spec.blueprint!r} is a blueprint of your own, register it as it was, before loading"
            ) from error
    return seeds


def _check_fresh(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    grown = sorted(_specs(own))
    if grown:
        raise GrowthError(
            f"this instance has grown already, {grown[0]!r}; pass a fresh one, or use load_state_dict where the structure is the same"
        )


def _check_fit(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Everything is checked before anything is changed."""
    problems = {
        "not in the file": [key for key in own if key not in state],
        "only in the file": [key for key in state if key not in own],
        "of another shape": [key for key in own if key in state and own[key].shape != state[key].shape],
    }
    parts = [f"{what}: {', '.join(keys[:5])}{' …' if len(keys) > 5 else ''}" for what, keys in problems.items() if keys]
    if parts:
        raise GrowthError(f"the saved model does not fit this instance of the host, so nothing was loaded; {'; '.join(parts)}")


def _second_names(host: nn.Module) -> dict[str, str]:
    """Second names of tied weights, with the first: a file holds each tensor once."""
    first: dict[int, str] = {}
    state = plain_names(host.state_dict(keep_vars=True))
    names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items() if isinstance(tensor, Tensor)}
    return {name: known for name, known in names.items() if known != name}


def _parameter_like(module: nn.Module, host: nn.Module) -> Tensor:
    """What the seed's own shall be like, in precision and device."""
    parameters = (parameter for part in (module, host) for parameter in part.parameters() if parameter.is_floating_point())
    return next(parameters, torch.empty(0))
