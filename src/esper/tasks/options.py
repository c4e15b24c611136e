"""Options of `load_task`, the checks that all tasks share, and the error for mistakes that a user can correct."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TaskError(ValueError):
    """A task cannot be loaded or used as asked. The message says what is wrong and what to do."""


@dataclass(frozen=True)
class TaskOptions:
    """The arguments of `load_task`, after the checks that do not depend on the task."""

    data_dir: Path | None
    seed: int
    batch_size: int | None
    sequence_length: int | None

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise TaskError(f"a seed is an int >= 0; got {self.seed!r}")
        for name, value in {"batch_size": self.batch_size, "sequence_length": self.sequence_length}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise TaskError(f"{name} is an int >= 1; got {value!r}")

    def refuse_data_dir(self, task: str) -> None:
        """Raise TaskError if there is a data folder, for a task that has its own data."""
        if self.data_dir is not None:
            raise TaskError(f"{task} brings its own data and reads nothing from {self.data_dir}; leave out --data-dir")

    def refuse_sequence_length(self, task: str) -> None:
        """Raise TaskError if there is a sequence length, for a task without sequences."""
        if self.sequence_length is not None:
            raise TaskError(f"{task} has no sequences; leave out the sequence length")

    def need_data_dir(self, task: str, what: str) -> Path:
        """Return the user's data folder. Raise TaskError if there is none; `what` names the files that belong there."""
        if self.data_dir is None:
            raise TaskError(f"{task} needs a folder with its data: put {what} there, and pass it with --data-dir")
        if not self.data_dir.is_dir():
            raise TaskError(f"no folder {self.data_dir}; put {what} into a folder, and pass it with --data-dir")
        return self.data_dir


def import_for_data(module: str, purpose: str) -> Any:
    """Import a module that only some tasks need. Raise TaskError with `purpose` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = f"{module.split('.')[0]} is not installed"
        raise TaskError(f"{purpose}, and {missing}: pip install 'esper-grow[data]' (pyarrow and pillow)") from error
