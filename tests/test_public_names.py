"""The public names of all package roots are those of `tests/public_names.txt`, so that nobody renames or removes one without noticing.

After a change that is meant, say so in CHANGELOG.md and write the file again:
    .venv/bin/python -m tests.test_public_names > tests/public_names.txt
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from pathlib import Path

import esper

SNAPSHOT = Path(__file__).with_name("public_names.txt")


def public_names() -> list[str]:
    """Return package.name for everything that the roots export; cli and dashboard export nothing."""
    roots = ["esper", *sorted(f"esper.{module.name}" for module in pkgutil.iter_modules(esper.__path__) if module.ispkg)]
    found = []
    for root in roots:
        values = vars(importlib.import_module(root))
        # A lazy root lists names that need extras in its __dir__ alone; that of any other root would name imported modules too.
        names = values["__dir__"]() if "__dir__" in values else values.get("__all__", [])
        found += [f"{root}.{name}" for name in sorted(names) if not name.startswith("_")]
    return found


def test_the_public_names_are_those_of_the_snapshot() -> None:
    changes = list(difflib.unified_diff(SNAPSHOT.read_text().splitlines(), public_names(), "snapshot", "now", lineterm="", n=0))
    assert not changes, "\n".join(
        ["public names were renamed, added or removed; " + " ".join((__doc__ or "").split("\n\n", 1)[1].split()), *changes]
    )


if __name__ == "__main__":
    print("\n".join(public_names()))
