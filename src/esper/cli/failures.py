"""Explain what ends the training of a run, with what is left of it and how to go on."""

from __future__ import annotations

import contextlib
import errno
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from esper.cli.outcome import FAILED, CommandError, code_of
from esper.files import reason_of
from esper.runs.folder import CHECKPOINTS, CONFIG, Kind, RunError, check_holds_a_run
from esper.runs.signals import INTERRUPTED

# What the user has to do before the run can go on.
_FIRST = {
    errno.ENOSPC: "free some space, then ",
    errno.EDQUOT: "free some space, then ",
    errno.EACCES: "change its permissions, then ",
    errno.EPERM: "change its permissions, then ",
}


def how_to_resume(command: str, folder: Path) -> str:
    return f"go on with: esper {command} --resume --run {shlex.quote(str(folder))}"


def check_run(folder: Path, kind: Kind) -> None:
    """Raise CommandError where a folder that a user named holds no run of this kind."""
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
    """`errors` are what may end a training of this command; one that comes before the training has begun is left to the caller.

    A folder without `saved` holds no run: that none can be made in it is the user's mistake. A run whose files fail has failed.
    """
    from esper.rl.ppo import TrainingStopped
    from esper.runs import CheckpointError, EventError

    def is_there(folder: Path) -> bool:
        return (folder / saved).exists()

    has_begun = has_begun or is_there
    try:
        yield
    except CheckpointError as error:
        raise CommandError(str(error), exit_code=FAILED) from error
    except TrainingStopped as error:
        raise CommandError(f"training failed: {error}; a checkpoint is in {folder / CHECKPOINTS}", exit_code=FAILED) from error
    except errors as error:
        if not has_begun(folder):
            raise
        raise CommandError(f"training failed: {error}; the run is in {folder}", exit_code=FAILED) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise  # nothing can be looked for under such a name either
        if error.errno == errno.ENOENT and not folder.exists():
            lost = f"the folder {folder} was removed or renamed during the training, so the run cannot go on; start a new one"
            raise CommandError(lost, exit_code=FAILED) from error
        if is_there(folder):
            what_next = f"{_FIRST.get(error.errno or 0, '')}{how_to_resume(command, folder)}"
            raise CommandError(f"the run in {folder} cannot go on: {reason_of(error)}; {what_next}", exit_code=FAILED) from error
        what_next = "choose another folder with --run"
        raise CommandError(f"no run can be made in {folder}: {reason_of(error)}; {what_next}", exit_code=code_of(error)) from error
    except EventError as error:
        raise CommandError(f"the run in {folder} cannot go on: {error}", exit_code=FAILED) from error
    except KeyboardInterrupt as error:
        what_next = how_to_resume(command, folder) if has_begun(folder) else "nothing was trained yet"
        raise CommandError(f"stopped at once; {what_next}", exit_code=getattr(error, "exit_code", INTERRUPTED)) from None
