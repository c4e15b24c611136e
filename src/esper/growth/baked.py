"""Grown models in files: the state dict tells the structure, so a fresh instance of the host becomes the grown model again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from esper.growth.blueprints import get_blueprint
from esper.growth.errors import GrowthError
from esper.growth.place import Place
from esper.growth.seed import Seed, SeedSpec
from esper.growth.slotted import BAKED, attach, unwrap


def save(model: nn.Module, path: Path | str) -> None:
    """The state dict of a baked model as a safetensors file."""
    from safetensors.torch import save_file

    host = unwrap(model)
    second_names = _second_names(host)
    save_file({name: tensor.contiguous() for name, tensor in host.state_dict().items() if name not in second_names}, path)


def load(source: Path | str | Mapping[str, Tensor], *, model: nn.Module) -> nn.Module:
    """Grows a fresh instance of the host to the structure of a saved model and loads its weights, in place. Gives the model.

    `source` is a safetensors file (`Grown.save`), or a state dict: `esper.load(torch.load("model.pt", weights_only=True), model=Net())`.
    """
    state = source if isinstance(source, Mapping) else _read(Path(source))
    specs = _specs(state)
    _check_host(model, state, specs)
    for name in sorted(specs, key=lambda name: (name.rpartition(".")[0], len(name), name)):
        module_name, _, _ = name.rpartition(".")
        module = model.get_submodule(module_name)
        attach(module, _build(specs[name], module))
    model.load_state_dict({**state, **{second: state[first] for second, first in _second_names(model).items() if second not in state}})
    return model


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise GrowthError(f"there is no file {path}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise GrowthError(
            f"{path} is not a safetensors file ({error}). A file of torch.save is read by you, and its state dict passed on: "
            f"esper.load(torch.load({str(path)!r}, weights_only=True), model=...)"
        ) from error


def _specs(state: Mapping[str, Tensor]) -> dict[str, SeedSpec]:
    """Name of every baked seed -> what it is."""
    found = {}
    for key, tensor in state.items():
        name, _, last = key.rpartition(".")
        if last == "spec" and name.rpartition(".")[2].startswith(BAKED):
            found[name] = SeedSpec.from_tensor(tensor)
    return found


def _check_host(model: nn.Module, state: Mapping[str, Tensor], specs: Mapping[str, SeedSpec]) -> None:
    """Everything is checked before anything is changed."""
    modules = dict(model.named_modules())
    strange = [name for name in specs if name.rpartition(".")[0] not in modules]
    if strange:
        raise GrowthError(f"the saved model has a seed after {strange[0].rpartition('.')[0]!r}, which this model does not have")
    own = model.state_dict()
    expected = {key for key in state if not any(key.startswith(f"{name}.") for name in specs)}
    missing, unexpected = sorted(set(own) - expected - set(_second_names(model))), sorted(expected - set(own))
    wrong = [key for key in own if key in state and own[key].shape != state[key].shape]
    if missing or unexpected or wrong:
        parts = [
            f"{what}: {', '.join(keys[:5])}{' …' if len(keys) > 5 else ''}"
            for what, keys in (("not in the file", missing), ("only in the file", unexpected), ("of another shape", wrong))
            if keys
        ]
        raise GrowthError(f"the saved model does not fit this instance of the host; {'; '.join(parts)}")
    for spec in specs.values():
        get_blueprint(spec.blueprint)


def _second_names(model: nn.Module) -> dict[str, str]:
    """Second names of tied weights, with the first: a file holds each tensor once."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}
    return {name: known for name, known in names.items() if known != name}


def _build(spec: SeedSpec, module: nn.Module) -> Seed:
    parameter = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    place = Place(
        name="",
        kind=spec.kind,
        shape=spec.shape,
        dtype=torch.float32 if parameter is None else parameter.dtype,
        device=torch.device("cpu") if parameter is None else parameter.device,
        is_causal=spec.is_causal,
    )
    return Seed(place, spec.blueprint, random_seed=0, blending=spec.blending)
