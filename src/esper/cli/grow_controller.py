"""Who decides in a run of `esper grow`. A trained controller comes from a file, of which the run keeps a copy.

The file may be gone, or hold another controller, when the run goes on: training a controller replaces its file. The copy is what the run
began with.
"""

from __future__ import annotations

from pathlib import Path

from esper.cli.grow_config import GrowTaskConfig
from esper.growth.lifecycle.stages import Controller
from esper.runs.folder import RunError

COPY = "controller.safetensors"  # in the run folder


def make_controller(config: GrowTaskConfig, copy: Path | None) -> Controller | str:
    """Return a name, or the controller of a file: of the copy that the run has, where there is one."""
    if config.controller_file is None:
        return config.controller
    from esper.controller.learned import ControllerError, load_controller

    try:
        return load_controller(copy or config.controller_file)
    except ControllerError as error:
        raise RunError(str(error)) from error


def controller_copy(config: GrowTaskConfig, folder: Path, copy: Path | None) -> dict[str, bytes]:
    """Return the copy that a new run gets of its controller's file, by its name; nothing where it has one, or needs none."""
    if config.controller_file is None or copy is not None:
        return {}
    try:
        content = Path(config.controller_file).read_bytes()
        if (folder / COPY).exists() and (folder / COPY).read_bytes() != content:
            raise RunError(f"{folder} holds a {COPY}, which the run would replace; choose another folder")
    except OSError as error:
        raise RunError(f"the controller's file cannot be read: {error}") from error
    return {COPY: content}
