"""Save and load grown models.

A state dict describes the seeds as well as the weights, so `load` can turn a new instance of the host into the grown model. A model may
also be saved in the middle of training: its living seeds are loaded with the alpha they had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from esper.display import Card
from esper.files import FileError, NotTensorsError, reason_of
from esper.growth.config import GrowthError
from esper.growth.host.averages import AveragedModel
from esper.growth.host.isolation import is_compiled, unwrap
from esper.growth.host.layout import Place
from esper.growth.host.slots import SeedHome, Slot, around
from esper.growth.host.slotted import FACTS_OF_BAKED, Slotted, check_has_no_slots
from esper.growth.host.state_dict import attach, build_seed, specs_in
from esper.growth.seeds.folding import fold, widen_to
from esper.growth.seeds.seed import Seed, SeedSpec
from esper.growth.seeds.width import WidthSeed
from esper.runs.cards import write_model_card
from esper.runs.checkpoints import plain_names
from esper.runs.events import name_of_run, why_foreign
from esper.runs.folder import kind_of
from esper.runs.tensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from esper.growth.grower import Grower


MODEL = "model.safetensors"  # name of the model's file in the folder of a run
_RUN = "run"  # key of the metadata of such a file: the name of the run


def save(model: nn.Module | Slotted | AveragedModel | Grower, path: Path | str, *, card: bool = True) -> None:
    """Write the weights and seeds of a model to a safetensors file.

    `model` is a module, a `Slotted`, an `AveragedModel` or a `Grower`. The file does not hold the stages and optimisers of a growing model;
    `grower.save(folder)` writes them.

    A baked model gets a model card beside its file, with the suffix .md, unless `card` is False. The card has the figures of the training
    if the model was baked in this process, else the seeds in the model. A file of this name that is not a card is left alone.
    """
    host = _host_of(model)
    _write(host, path, {})
    if card:
        _write_card(host, plain_names(host.state_dict()), path)


def save_in_run(model: nn.Module, folder: Path) -> None:
    """Write the model of a run into its folder, with the name of the run and without a card."""
    run = name_of_run(folder)
    _write(_host_of(model), folder / MODEL, {} if run is None else {_RUN: run})


def _write(host: nn.Module, path: Path | str, metadata: Mapping[str, str]) -> None:
    second_names = _second_names(host)
    write_tensors(path, {name: tensor for name, tensor in plain_names(host.state_dict()).items() if name not in second_names}, metadata)


def why_foreign_model(folder: Path) -> str | None:
    """Return why the model in the folder of a growth run was not written by that run; None if it was, or if it cannot be read at all."""
    with contextlib.suppress(OSError, FileError):
        return _why_foreign(folder, read_tensors(folder / MODEL)[1])
    return None


def _why_foreign(folder: Path, metadata: Mapping[str, str]) -> str | None:
    # Other programs may keep their models beside a log, but only the folder of a growth run has the config of one.
    return why_foreign(metadata.get(_RUN), folder) if kind_of(folder) == "growth" else None


def _write_card(host: nn.Module, state: Mapping[str, Tensor], path: Path | str) -> None:
    """Write the model card of a baked model. A model that still has slots, and one that neither grew nor was baked, has none."""
    if any(isinstance(around(module), Slot) for module in host.modules()):
        return
    facts, seeds = FACTS_OF_BAKED.get(host), specs_in(state)
    if facts is not None:
        write_model_card(path, facts, made_by="`esper.Grower` or `esper.grow` in a Python program")
    elif seeds or host in FACTS_OF_BAKED:
        modules = plain_names(dict(host.named_modules()))
        sizes = {name: sum(parameter.numel() for parameter in modules[name].parameters()) for name in ("", *seeds)}
        rows = [(_changed_module(name, spec), spec.blueprint, f"{sizes[name]:,}") for name, spec in seeds.items()]
        figures = [("parameters", f"{sizes['']:,}"), ("seeds", str(len(seeds)))]
        write_model_card(path, Card(type(host).__name__, figures, ("slot", "blueprint", "parameters"), rows))


def load(source: Path | str | Mapping[str, Tensor], *, model: nn.Module) -> nn.Module:
    """Build the seeds of a saved model into a new instance of the host, load all weights, and return the instance.

    `source` is one of: a safetensors file of `esper.save` or `Grown.save`; a file or folder of Hugging Face's `save_pretrained`; the folder
    of a run; a state dict, as in `esper.load(torch.load("model.pt", weights_only=True), model=Net())`.
    """
    _check_is_module(model)
    state = plain_names(source if isinstance(source, Mapping) else _read(Path(source)))
    host = unwrap(model)
    check_has_no_slots(host)
    modules = plain_names(dict(host.named_modules()))
    widen_to(modules, {name: tensor.shape for name, tensor in state.items()})
    own = plain_names(host.state_dict())
    # A file holds tied weights once: add their other names.
    state |= {second: state[first] for second, first in _second_names(host).items() if first in state and second not in state}
    _check_fresh(own)
    # Build all seeds and compare all names and shapes before anything in the host is changed.
    seeds = {name: _build(name, spec, state, own, modules) for name, spec in specs_in(state).items()}
    expected = {**own, **{f"{name}.{key}": tensor for name, (_, seed) in seeds.items() for key, tensor in seed.state_dict().items()}}
    _check_fit(expected, state)
    # The units of width seeds become a part of the host's own layers.
    wide = {name: seed for name, (_, seed) in seeds.items() if isinstance(seed, WidthSeed)}
    for name, wide_seed in wide.items():
        wide_seed.load_state_dict({key.removeprefix(f"{name}."): state.pop(key) for key in list(state) if key.startswith(f"{name}.")})
        del seeds[name]
    for name, (after, seed) in seeds.items():
        home, _, own_name = name.rpartition(".")
        attach(modules[after], seed, SeedHome(modules[home], home.removeprefix(after).removeprefix("."), own_name))
    actual = plain_names({name: name for name in host.state_dict()})
    host.load_state_dict({name: state[plain] for plain, name in actual.items()})
    fold(modules, sorted(wide.values(), key=lambda seed: seed.spec.order))
    if is_compiled(model):
        torch.compiler.reset()  # compiled code would not notice the new hooks
    return model


def _check_is_module(model: object) -> None:
    if isinstance(model, type):
        raise GrowthError(f"model is the class {model.__name__}; pass an instance: model={model.__name__}()")
    if not isinstance(model, nn.Module):
        raise GrowthError(f"model must be an nn.Module, a new instance of the host, and is a {type(model).__name__}")


def _host_of(model: object) -> nn.Module:
    """Return the module to save."""
    inner = getattr(model, "slotted", model)  # a Grower or an AveragedModel has a Slotted
    module = inner.host if isinstance(inner, Slotted) else inner
    if not isinstance(module, nn.Module):
        raise GrowthError(f"a {type(model).__name__} is not a model; pass an nn.Module, or the result of add_slots")
    return unwrap(module)


def _read(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or model.safetensors in a folder, or all files model*.safetensors where a large model has several."""
    try:
        if (path / MODEL).exists():
            tensors, metadata = read_tensors(path / MODEL)
            if foreign := _why_foreign(path, metadata):
                again = "resume the run, which writes its own again, or give the path of the file to load it all the same"
                raise GrowthError(f"{path / MODEL} {foreign}; {again}")
            return tensors
        files = sorted(path.glob("model*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise GrowthError(_why_no_model(path))
        return {name: tensor for file in files for name, tensor in read_tensors(file)[0].items()}
    except FileNotFoundError as error:
        raise GrowthError(f"there is no file {path}") from error
    except NotTensorsError as error:
        raise GrowthError(
            f"{path} is not a safetensors file ({error}). If torch.save wrote it, pass its state dict: "
            f"esper.load(torch.load({str(path)!r}, weights_only=True), model=...)"
        ) from error
    except FileError as error:
        raise GrowthError(str(error)) from error
    except OSError as error:
        raise GrowthError(f"the model cannot be read: {reason_of(error)}") from error


def _why_no_model(folder: Path) -> str:
    """Return the message for a folder without a model file."""
    from esper.growth.report.story import read_story
    from esper.runs.folder import EVENTS

    if not (folder / EVENTS).is_file():
        return f"the folder {folder} holds no model: there is no model.safetensors in it"
    if read_story(folder).began is None:
        return f"the folder {folder} holds no model: it is the folder of a run, but not of a growth run"
    return (
        f"the run in {folder} has no model yet, because it has not finished; continue it by esper.grow(..., run={str(folder)!r}, "
        f"resume=True), or by esper grow --resume --run {folder} if it was started from the command line"
    )


def _build(
    name: str, spec: SeedSpec, state: dict[str, Tensor], own: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> tuple[str, Seed]:
    """Build the seed of this name. Return the name of the module whose output it changes, and the seed."""
    home, after = name.rpartition(".")[0], _changed_module(name, spec)
    if home not in modules or spec.levels_up > name.count("."):
        raise GrowthError(f"the saved model has a seed after {after!r}, which this model does not have; pass an instance of the same host")
    # The seed gets the device of the changed module. It keeps its saved precision if the host does not convert its own weights either.
    like = _parameter_like(modules[after], modules[""])
    is_same_precision = all(own[key].dtype == state[key].dtype for key in own if key in state)
    dtype = state[f"{name}.alpha"].dtype if is_same_precision and f"{name}.alpha" in state else like.dtype
    return after, build_seed(Place(after, spec.kind, spec.shape, dtype=dtype, device=like.device), spec, modules)


def _changed_module(name: str, spec: SeedSpec) -> str:
    """Return the name of the module whose output the seed of this name changes."""
    parts = name.split(".")[:-1]
    return ".".join(parts[: len(parts) - spec.levels_up])


def _check_fresh(own: Mapping[str, Tensor]) -> None:
    """Raise a GrowthError if the model already has seeds."""
    grown = sorted(specs_in(own))
    if grown:
        raise GrowthError(
            f"this model already has the seed {grown[0]!r}; pass a new instance, or use load_state_dict if it has the same seeds"
        )


def _check_fit(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise a GrowthError if names or shapes of the state dict differ from the model's."""
    problems = {
        "not in the file": [key for key in own if key not in state],
        "only in the file": [key for key in state if key not in own],
        "of another shape": [key for key in own if key in state and own[key].shape != state[key].shape],
    }
    parts = [f"{what}: {', '.join(keys[:5])}{' …' if len(keys) > 5 else ''}" for what, keys in problems.items() if keys]
    if parts:
        raise GrowthError(f"the saved model does not fit this instance of the host, so nothing was loaded; {'; '.join(parts)}")


def _second_names(host: nn.Module) -> dict[str, str]:
    """Return other name -> first name of all tied weights; a file holds each tensor once, under its first name."""
    first: dict[int, str] = {}
    state = plain_names(host.state_dict(keep_vars=True))
    names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items() if isinstance(tensor, Tensor)}
    return {name: known for name, known in names.items() if known != name}


def _parameter_like(module: nn.Module, host: nn.Module) -> Tensor:
    """Return a parameter with the precision and device that a seed after this module should have."""
    parameters = (parameter for part in (module, host) for parameter in part.parameters() if parameter.is_floating_point())
    return next(parameters, torch.empty(0))
