"""Finds and calls the user's own code by name, package.module:function, with the current folder importable.

Errors name the setting that they come from as the command line spells it.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from esper.text_table import did_you_mean


class UserCodeError(Exception):
    """The user's code cannot be used. `was_raised`: the code was found, and raised an error itself."""

    def __init__(self, message: str, *, was_raised: bool = False) -> None:
        super().__init__(message)
        self.was_raised = was_raised


def find_function(name: str, option: str) -> Callable[..., Any]:
    """Return the function of this name, package.module:function. `option` is the option it was given with, for errors."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise UserCodeError(f"{option} {name}: expected package.module:function, such as mycode.nets:make_model")
    module = _import(module_name, option)
    if not hasattr(module, function_name):
        names = [known for known in vars(module) if not known.startswith("_")]
        hint = did_you_mean(function_name, names, otherwise=f"it is {getattr(module, '__file__', 'built in')}")
        raise UserCodeError(f"{option} {name}: the module {module_name} has no {function_name!r}; {hint}")
    function = getattr(module, function_name)
    if not callable(function):
        raise UserCodeError(f"{option} {name}: {function_name} is of type {type(function).__name__} and cannot be called; name a function")
    found: Callable[..., Any] = function
    return found


def _import(name: str, option: str) -> Any:
    """Import a module from the current folder or from the installed packages."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            where = f"neither in {here} nor among the installed packages"
            raise UserCodeError(f"{option}: there is no module {error.name!r}, {where}; run esper in the folder of your code") from error
        raise _raised(f"{option}: importing {name}", error) from error
    except Exception as error:
        raise _raised(f"{option}: importing {name}", error) from error


def make_model(name: str) -> nn.Module:
    """Call the user's function of this name and return its model."""
    model = _call(name, "--model")
    if not isinstance(model, nn.Module):
        raise UserCodeError(f"--model {name}: it returned something of type {type(model).__name__}; expected an nn.Module")
    return model


def make_loaders(name: str) -> tuple[Iterable[Any], Iterable[Any], Iterable[Any] | None]:
    """Call the user's function of this name. Return its loaders for training, validation and, if there is one, test."""
    loaders = _call(name, "--data")
    rule = "expected loaders: (train, validation) or (train, validation, test)"
    if not isinstance(loaders, tuple | list) or len(loaders) not in (2, 3):
        what = f"{len(loaders)} values" if isinstance(loaders, tuple | list) else f"something of type {type(loaders).__name__}"
        raise UserCodeError(f"--data {name}: it returned {what}; {rule}")
    for part, loader in zip(("train", "validation", "test"), loaders, strict=False):
        if not hasattr(loader, "__iter__"):
            raise UserCodeError(f"--data {name}: the {part} loader is of type {type(loader).__name__}, which cannot be iterated; {rule}")
        if iter(loader) is loader:
            raise UserCodeError(f"--data {name}: the {part} loader is an iterator, used up after one epoch; return a loader or a list")
    return loaders[0], loaders[1], loaders[2] if len(loaders) == 3 else None


def _call(name: str, option: str) -> Any:
    function = find_function(name, option)
    try:
        return function()
    except Exception as error:
        raise _raised(f"{option}: {name}", error) from error


def _raised(what: str, error: Exception) -> UserCodeError:
    """Return the error for an exception of the user's code, with the place where it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return UserCodeError(f"{what} raised {text}{where}; --debug shows the traceback", was_raised=True)
