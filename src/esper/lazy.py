"""Packages whose public names are imported on first use, so that the command line starts quickly.

Such a package lists its names only once, in the `if TYPE_CHECKING:` block of its `__init__.py`, which type checkers read too:

    if TYPE_CHECKING:
        from esper.rl.ppo import PPO as PPO

    __getattr__, __dir__, __all__ = lazy_names(__name__)
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any


def lazy_names(package: str, *, need_extras: Collection[str] = ()) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package, from the imports under its `if TYPE_CHECKING:`.

    Names in `need_extras` are left out of `__all__`, so that a star import works without the extras.

    >>> import esper.rl
    >>> "PPO" in dir(esper.rl), esper.rl.PPO.__module__
    (True, 'esper.rl.ppo')
    """
    module = sys.modules[package]
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [statement for block in blocks for statement in block.body if isinstance(statement, ast.ImportFrom)]
    sources = {alias.name: statement.module for statement in imports for alias in statement.names}

    def get(name: str) -> Any:
        source = sources.get(name)
        if source is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # A name is either defined in a module, or is itself a submodule of this package.
        value = importlib.import_module(f"{package}.{name}") if source == package else getattr(importlib.import_module(source), name)
        setattr(module, name, value)
        return value

    special = [name for name in vars(module) if name.startswith("__")]
    return get, lambda: sorted({*sources, *special}), sorted(sources.keys() - set(need_extras))
