"""Packages whose names are imported when they are first used, so that a command line can show its help at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_of(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package; `modules` says in which of its modules each name lies.

    >>> get, names = names_of("esper", {"Streams": "rng"})
    >>> names(), get("Streams").__name__
    (['Streams'], 'Streams')
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(modules)
