"""Who decides in a run of `esper grow`. A trained controller comes from a file, of which the run keeps a copy.

The file may be gone, or hold another controller, when the run goes on: training a controller replaces its file. The copy is what the run
began with.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from esper.cli.grow_config import GrowTaskConfig
from esper.growth.decisions import Controller
from esper.run_folder import RunError

COPY = "controller.safetensors"  # in the run folder


def make_controller(config: GrowTaskConfig, folder: Path | None) -> Controller | str:
    """A name, or the controller of a file: in a run that goes on, of the copy in its folder."""
    if config.controller_file is None:
        return config.controller
    from esper.controller.learned import ControllerError, load_controller

    try:
        return load_controller(config.controller_file if folder is None else folder / COPY)
    except ControllerError as error:
        raise RunError(str(error)) from error


def keep_controller(config: GrowTaskConfig, folder: Path) -> Controller | str:
    """The controller for a new run, whose folder gets the copy that it is taken from."""
    if config.controller_file is not None:
        shutil.copyfile(config.controller_file, folder / COPY)
    return make_controller(config, folder)
