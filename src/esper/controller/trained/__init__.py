"""The trained controller that comes with the package, and the names of trained controllers. Imports no torch.

    learned.safetensors   the controller that `esper.grow(..., controller="learned")` uses
    learned.md            what a reader of its card has to know beyond its figures

The figures of the card come from the file itself, see `esper.controller.description`. A new controller replaces the file; nothing else has
to change, but the text where it is about the old one.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from esper.controller.learned import Learned
    from esper.growth.config import GrowthConfig

NAME = "learned"  # names the shipped controller where the path of a controller file is expected


def file_of(controller: Path | str) -> Path:
    """Return the file of a trained controller: the shipped one for "learned"; anything else is a path."""
    return Path(str(files(__name__) / "learned.safetensors")) if str(controller) == NAME else Path(controller)


def text_of_learned() -> str:
    """Return the text of the shipped controller's card, in Markdown."""
    return (files(__name__) / "learned.md").read_text(encoding="utf-8")


def load_learned(config: GrowthConfig) -> Learned:
    """Return the controller that comes with the package, for a run with these settings."""
    from esper.controller.learned import load_controller

    return load_controller(file_of(NAME), config=config)
