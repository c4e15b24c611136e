"""Weights that load into a module whether it, or the one that saved them, is compiled, wrapped for data parallelism, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

Value = TypeVar("Value")

_COMPILED = "_orig_mod"  # torch.compile puts it wherever a compiled module stands
_PARALLEL = "module."  # DistributedDataParallel puts it before every name


def plain_names(state_dict: Mapping[str, Value]) -> dict[str, Value]:
    """The same entries under the names of the unwrapped module.

    `module.` is taken for a wrapper's only where all names begin with it; a child that happens to be called `module` keeps its name.

    >>> plain_names({"module._orig_mod.encoder._orig_mod.weight": 1})
    {'encoder.weight': 1}
    """
    names = {name: plain_name(name) for name in state_dict}
    if all(plain.startswith(_PARALLEL) for plain in names.values()):
        names = {name: plain.removeprefix(_PARALLEL) for name, plain in names.items()}
    result: dict[str, Value] = {}
    origin: dict[str, str] = {}
    for name, plain in names.items():
        if plain in origin:
            raise ValueError(f"{origin[plain]!r} and {name!r} are both called {plain!r} without their wrappers; remove one of them")
        origin[plain] = name
        result[plain] = state_dict[name]
    return result


def plain_name(name: str) -> str:
    """Return the name that a parameter or module has where nothing is compiled.

    >>> plain_name("encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def load_module(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Copies weights into `module`, strictly: all that is missing, unexpected or wrongly shaped is named before anything is changed."""
    own = module.state_dict()
    own_names = plain_names({name: name for name in own})
    given = plain_names(state_dict)
    problems = [f"{name} is missing" for name in own_names if name not in given]
    problems += [f"{name} is unexpected" for name in given if name not in own_names]
    for plain, name in own_names.items():
        if plain in given and isinstance(own[name], Tensor):
            problems += _misfit(plain, expected=own[name], value=given[plain])
    if problems:
        raise ValueError(f"the weights do not fit this {type(module).__name__}, nothing was loaded: " + "; ".join(problems))
    module.load_state_dict({name: given[plain] for plain, name in own_names.items()}, strict=True)


def _misfit(name: str, *, expected: Tensor, value: object) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"{name} is a {type(value).__name__} where a tensor belongs"]
    if value.shape != expected.shape:
        return [f"{name} has the shape {tuple(value.shape)} where {tuple(expected.shape)} belongs"]
    return []
