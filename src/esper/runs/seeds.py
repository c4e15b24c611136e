"""Runs of one setting with several seeds, in one folder. Imports neither torch nor numpy.

runs/first/
    seeds.toml        the settings, and how many seeds
    seed-0/           a run of its own
    seed-1/
    ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from esper.config import Config, save
from esper.files import make_folder, remove
from esper.runs.folder import RunError, check_is_free, remove_empty

SEEDS = "seeds.toml"
SEED_FOLDER = "seed-"  # begins the names of the folders of the runs


ConfigT = TypeVar("ConfigT", bound=Config)


def holds_seeds(folder: Path) -> bool:
    """Return whether a folder was made for runs of several seeds."""
    return (folder / SEEDS).is_file()


def seed_folder(folder: Path, seed: int) -> Path:
    """Return the folder of the run with this seed."""
    return folder / f"{SEED_FOLDER}{seed}"


def discard_without_runs(folder: Path) -> None:
    """Remove a folder for runs of several seeds after its last run was deleted. Other folders stay."""
    if holds_seeds(folder) and not any(folder.glob(f"{SEED_FOLDER}*")):
        remove(folder / SEEDS)
        remove_empty([folder])


@contextlib.contextmanager
def seeds_begun(folder: Path, config: ConfigT, saved: ConfigT | None, *, count: Callable[[ConfigT], int]) -> Iterator[None]:
    """Make the folder for runs of several seeds, or take it up again with the `saved` settings. Raise RunError if that cannot be.

    `count` returns the number of seeds in a config. A folder that is taken up again may get more seeds, not fewer. If no run begins in a
    new folder because something is wrong, the folder is removed.
    """
    if saved is None:
        if holds_seeds(folder):
            raise RunError(f"{folder} already holds runs of several seeds; go on with them by --resume, or choose another folder")
        check_is_free(folder)
    elif count(config) < count(saved):
        raise RunError(f"the runs in {folder} have {count(saved)} seeds, and none is taken away; ask for at least as many")
    made = make_folder(folder)
    save(config, folder / SEEDS)
    try:
        yield
    except BaseException:
        if saved is None and not any(folder.glob(f"{SEED_FOLDER}*")):
            remove(folder / SEEDS)
            remove_empty(made)
        raise
