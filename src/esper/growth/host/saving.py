"""Grown models in files: the state dict tells the structure, so a fresh instance of the host becomes the grown model again.

A model may be saved at any time, in the middle of training too: its living seeds are loaded as they were, with the alpha they had.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from esper.files import FileError, reason_of
from esper.growth.config import GrowthError
from esper.growth.host.isolation import is_compiled, unwrap
from esper.growth.host.layout import Place
from esper.growth.host.slots import SeedHome, attach, build_seed, specs_in
from esper.growth.host.slotted import AveragedModel, Slotted, check_has_no_slots
from esper.growth.seeds.seed import Seed, SeedSpec
from esper.runs.checkpoints import plain_names
from esper.runs.tensors import NotTensorsError, read_tensors, write_tensors

if TYPE_CHECKING:
    from esper.growth.grower import Grower


def save(model: nn.Module | Slotted | AveragedModel | Grower, path: Path | str) -> None:
    """Write weights and structure of a model, seeds included, as a safetensors file.

    `model` is a module, what `add_slots` or `averaged` gave, or a grower. Stages and optimisers of a growing model are not in the file:
    `grower.save(folder)` keeps those too.
    """
    host = _host_of(model)
    state = plain_names(host.state_dict())
    second_names = _second_names(host)
    write_tensors(path, {name: tensor for name, tensor in state.items() if name not in second_names})


def load(source: Path | str | Mapping[str, Tensor], *, model: nn.Module) -> nn.Module:
    """Grow a fresh instance of the host to the structure of a saved model and load its weights, in place. Return the model.

    `source` is a safetensors file (`esper.save`, `Grown.save`, or `save_pretrained` of Hugging Face, whose folder may be given too), the
    folder of a run, or a state dict: `esper.load(torch.load("model.pt", weights_only=True), model=Net())`.
    """
    state = plain_names(source if isinstance(source, Mapping) else _read(Path(source)))
    host = unwrap(model)
    check_has_no_slots(host)
    modules = plain_names(dict(host.named_modules()))
    own = plain_names(host.state_dict())
    state |= {second: state[first] for second, first in _second_names(host).items() if first in state and second not in state}
    _check_fresh(own)
    seeds = {name: _build(name, spec, state, own, modules) for name, spec in specs_in(state).items()}
    expected = {**own, **{f"{name}.{key}": tensor for name, (_, seed) in seeds.items() for key, tensor in seed.state_dict().items()}}
    _check_fit(expected, state)
    for name, (after, seed) in seeds.items():
        home, _, own_name = name.rpartition(".")
        attach(modules[after], seed, SeedHome(modules[home], home.removeprefix(after).removeprefix("."), own_name))
    actual = plain_names({name: name for name in host.state_dict()})
    host.load_state_dict({name: state[plain] for plain, name in actual.items()})
    if is_compiled(model):
        torch.compiler.reset()  # compiled code does not look at hooks again
    return model


def _host_of(model: object) -> nn.Module:
    inner = getattr(model, "slotted", model)  # of a grower or an average
    module = inner.host if isinstance(inner, Slotted) else inner
    if not isinstance(module, nn.Module):
        raise GrowthError(f"a model is saved, and this is a {type(model).__name__}; pass the model, or what add_slots gave")
    return unwrap(module)


def _read(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or all of those in the folder of a Hugging Face model."""
    try:
        files = sorted(path.glob("model*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise GrowthError(_why_no_model(path))
        return {name: tensor for file in files for name, tensor in read_tensors(file)[0].items()}
    except FileNotFoundError as error:
        raise GrowthError(f"there is no file {path}") from error
    except NotTensorsError as error:
        raise GrowthError(
            f"{path} is not a safetensors file ({error}). A file of torch.save is read by you, and its state dict passed on: "
            f"esper.load(torch.load({str(path)!r}, weights_only=True), model=...)"
        ) from error
    except FileError as error:
        raise GrowthError(str(error)) from error
    except OSError as error:
        raise GrowthError(f"no model can be read: {reason_of(error)}") from error


def _why_no_model(folder: Path) -> str:
    from esper.growth.report.story import read_story
    from esper.runs.folder import EVENTS

    if not (folder / EVENTS).is_file():
        return f"the folder {folder} holds no model: there is no model.safetensors in it"
    if read_story(folder).began is None:
        return f"the folder {folder} holds no model: it is a run, but none of growth"
    return (
        f"the run in {folder} has no model yet, for it has not come to its end; go on with it by esper.grow(..., run={str(folder)!r}, "
        f"resume=True), or by esper grow --resume --run {folder} where the command line began it"
    )


def _build(
    name: str, spec: SeedSpec, state: dict[str, Tensor], own: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> tuple[str, Seed]:
    """Build the seed of this name; return the name of the module whose output it changes, and the seed. Renames an old spec in `state`."""
    parts = name.split(".")[:-1]
    home, after = ".".join(parts), ".".join(parts[: len(parts) - spec.levels_up])
    if home not in modules or spec.levels_up > len(parts):
        raise GrowthError(f"the saved model has a seed after {after!r}, which this model does not have; pass an instance of the same host")
    like = _parameter_like(modules[after], modules[""])
    is_same_precision = all(own[key].dtype == state[key].dtype for key in own if key in state)
    dtype = state[f"{name}.alpha"].dtype if is_same_precision and f"{name}.alpha" in state else like.dtype
    seed = build_seed(Place(after, spec.kind, spec.shape, dtype=dtype, device=like.device), spec)
    if f"{name}.spec" in state:
        state[f"{name}.use_esper_load"] = state.pop(f"{name}.spec")
    return after, seed


def _check_fresh(own: Mapping[str, Tensor]) -> None:
    grown = sorted(specs_in(own))
    if grown:
        raise GrowthError(
            f"this instance has grown already, {grown[0]!r}; pass a fresh one, or use load_state_dict where the structure is the same"
        )


def _check_fit(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Check everything before anything is changed."""
    problems = {
        "not in the file": [key for key in own if key not in state],
        "only in the file": [key for key in state if key not in own],
        "of another shape": [key for key in own if key in state and own[key].shape != state[key].shape],
    }
    parts = [f"{what}: {', '.join(keys[:5])}{' …' if len(keys) > 5 else ''}" for what, keys in problems.items() if keys]
    if parts:
        raise GrowthError(f"the saved model does not fit this instance of the host, so nothing was loaded; {'; '.join(parts)}")


def _second_names(host: nn.Module) -> dict[str, str]:
    """Return the second names of tied weights, with the first: a file holds each tensor once."""
    first: dict[int, str] = {}
    state = plain_names(host.state_dict(keep_vars=True))
    names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items() if isinstance(tensor, Tensor)}
    return {name: known for name, known in names.items() if known != name}


def _parameter_like(module: nn.Module, host: nn.Module) -> Tensor:
    """Return a parameter whose precision and device the seed's shall have."""
    parameters = (parameter for part in (module, host) for parameter in part.parameters() if parameter.is_floating_point())
    return next(parameters, torch.empty(0))
