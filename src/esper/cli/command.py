"""Parts that commands share: results, errors and exit codes, failures of a training, dry runs, and groups of processes."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from esper.config import Config, describe
from esper.files import reason_of
from esper.runs.folder import CHECKPOINTS, CONFIG, RunError, check_holds_a_run
from esper.runs.foreign import quoted
from esper.runs.signals import INTERRUPTED

if TYPE_CHECKING:
    from esper.parallel import Group


OK, FAILED, USAGE = 0, 1, 2  # exit codes; a signal ends with INTERRUPTED or TERMINATED

# File errors that are mistakes of the user: the name or folder cannot be used.
_MISTAKES = frozenset({errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS, errno.ELOOP})

# Advice after a file error: what the user has to do before the run can go on.
_REMEDIES = {
    errno.ENOSPC: "free some space, then ",
    errno.EDQUOT: "free some space, then ",
    errno.EACCES: "change its permissions, then ",
    errno.EPERM: "change its permissions, then ",
}

GLOBAL_HELP = """On every command:
  --json      the last line is a JSON object: the result, or {"error": ...}
  --debug     show the traceback of an error"""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command: `result` is printed by `--json`."""

    result: dict[str, Any]
    exit_code: int = OK


class CommandError(Exception):
    """Ends the program with one line on stderr. `is_printed` says that the text was printed before."""

    def __init__(self, message: str, *, exit_code: int = USAGE, is_printed: bool = False) -> None:
        super().__init__(message)
        self.exit_code, self.is_printed = exit_code, is_printed


def print_profile(table: str | None) -> None:
    """Print the shares of time of a run, if it was profiled."""
    if table is not None:
        print(f"\n{table}")


def code_of(error: OSError) -> int:
    """Return the exit code of a file error: FAILED for a full or broken disk, USAGE for a name or folder that cannot be used."""
    return USAGE if error.errno in _MISTAKES or error.errno is None else FAILED


def how_to_resume(command: str, folder: Path) -> str:
    """Return the advice with the command that continues a run."""
    return f"go on with: esper {command} --resume --run {quoted(folder)}"


def check_run(folder: Path, kind: str) -> None:
    """Raise CommandError if a folder that a user named holds no run of this kind."""
    try:
        check_holds_a_run(folder, kind)
    except RunError as error:
        raise CommandError(str(error)) from error


@contextlib.contextmanager
def failures(
    folder: Path,
    command: str,
    *errors: type[Exception],
    saved: str = CONFIG,
    has_begun: Callable[[Path], bool] | None = None,
) -> Iterator[None]:
    """Turn the errors of a training into a CommandError that says what is left and how to go on.

    `errors` are those that may end a training of this command; they pass through if the training has not begun. The folder holds a run if
    it has the file `saved`, and the run has begun then, unless `has_begun` decides. After a file error, a run has failed; where there is no
    run yet, the user has to choose another folder.
    """
    from esper.parallel import RankLost
    from esper.rl.ppo import TrainingStopped
    from esper.runs import CheckpointError, EventError

    def holds_a_run(folder: Path) -> bool:
        return (folder / saved).exists()

    has_begun = has_begun or holds_a_run
    try:
        yield
    except CheckpointError as error:
        raise CommandError(str(error), exit_code=FAILED) from error
    except RankLost as error:
        what_next = how_to_resume(command, folder) if has_begun(folder) else "nothing was trained yet"
        raise CommandError(f"{error}; {what_next}", exit_code=FAILED) from error
    except TrainingStopped as error:
        raise CommandError(f"training failed: {error}; a checkpoint is in {folder / CHECKPOINTS}", exit_code=FAILED) from error
    except errors as error:
        if not has_begun(folder):
            raise
        raise CommandError(f"training failed: {error}; the run is in {folder}", exit_code=FAILED) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise  # a name that long cannot be looked up either
        if error.errno == errno.ENOENT and not folder.exists():
            lost = f"the folder {folder} was removed or renamed during the training, so the run cannot go on; start a new one"
            raise CommandError(lost, exit_code=FAILED) from error
        if holds_a_run(folder):
            what_next = f"{_REMEDIES.get(error.errno or 0, '')}{how_to_resume(command, folder)}"
            raise CommandError(f"the run in {folder} cannot go on: {reason_of(error)}; {what_next}", exit_code=FAILED) from error
        what_next = "choose another folder with --run"
        raise CommandError(f"no run can be made in {folder}: {reason_of(error)}; {what_next}", exit_code=code_of(error)) from error
    except EventError as error:
        raise CommandError(f"the run in {folder} cannot go on: {error}", exit_code=FAILED) from error
    except KeyboardInterrupt as error:
        what_next = how_to_resume(command, folder) if has_begun(folder) else "nothing was trained yet"
        raise CommandError(f"stopped at once; {what_next}", exit_code=getattr(error, "exit_code", INTERRUPTED)) from None


@contextlib.contextmanager
def in_group(device: Literal["auto", "cpu", "cuda"]) -> Iterator[Group]:
    """Join the group of processes that torchrun started, if it did. Only rank 0 writes to the standard output and reports errors."""
    from esper.devices import find_device
    from esper.parallel import FirstRankFailed, RankLost, joined

    try:
        with joined(find_device(device)) as group:
            if group.rank:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            yield group
    except RunError as error:
        raise CommandError(str(error)) from error
    except RankLost as error:
        raise CommandError(f"{error}; start the command again with all of its processes", exit_code=FAILED) from error
    except FirstRankFailed as error:
        raise CommandError(str(error), exit_code=FAILED, is_printed=True) from error


def show_plan(config: Config, figures: dict[str, Any], more: str = "") -> CommandResult:
    """Print what `--dry-run` shows: every setting, the figures of the run, and the text `more`."""
    rows = describe(config)
    width = max(len(name) for name, _, _ in rows)
    for name, value, _ in rows:
        print(f"{name:<{width}}  {value}")
    print()
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):<{width}}  {_in_words(value)}")
    if more:
        print(f"\n{more}")
    return CommandResult({"plan": figures, "config": {name: value for name, value, _ in rows}})


def _in_words(value: object) -> str:
    """Return a figure as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return "unknown" if value is None else str(value)
