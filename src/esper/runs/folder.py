"""The folder of a training run: its file names, its kind, and a lock so that only one process trains in it.

runs/cue-20260131-235959/
  config.toml       the settings
  events.jsonl      the events, one per line
  checkpoints/      the states that a resumed run continues from
  .lock             held by the process that trains
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from esper.files import (
    MAX_CONFIG_BYTES,
    TEMPORARY,
    FileError,
    make_folder,
    open_in_run,
    parse_toml,
    read_in_run,
    remove,
    remove_temporaries,
)
from esper.runs.foreign import clean

CONFIG, EVENTS, CHECKPOINTS, LOCK = "config.toml", "events.jsonl", "checkpoints", ".lock"
TWIN = "twin"  # the folder of a growth run's twin, inside its own
GROW = "grow.toml"  # all settings of an `esper grow` run; its config.toml holds only those about growing

State = Literal["running", "finished", "stopped", "dead", "empty"]
UNKNOWN = "unknown"  # kind of a run that does not say its kind
# Key of the settings -> kind of a run whose log does not declare it.
_KEYS = {"env": "ppo", "lifecycle": "growth", "domain": "controller", "selfplay": "arena"}
_DECLARED = re.compile(rb'^\{"kind":"run_declared",.*?"run_kind":"([^"\\]+)"', re.MULTILINE)
_HEAD = 64 * 1024  # bytes of a log in which its declaration is looked for


class RunError(ValueError):
    """A run cannot start or continue as asked. The message says why and what to do."""


def default_folder(env: str, *, root: Path | str = "runs") -> Path:
    """Return a path for a new run that does not exist yet, named after the environment and the current time."""
    title = env.replace("/", "-").replace(":", "-").encode()[:200].decode(errors="ignore")  # file names have at most 255 bytes
    name = f"{title}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, count = Path(root) / name, 1
    while folder.exists():
        count += 1
        folder = Path(root) / f"{name}-{count}"
    return folder


@contextlib.contextmanager
def chosen_folder(wanted: Path | None, title: str) -> Iterator[Path]:
    """Yield the folder to train in: the wanted one, or a new one named after the training and the time.

    A new one is made at once, so that no other process can choose it, and removed if an error leaves it empty.
    """
    if wanted is not None:
        yield wanted  # made later, by the run that holds its lock
        return
    folder, made = default_folder(title), list[Path]()
    while folder not in (made := [*make_folder(folder), *made]):  # another process was faster
        folder = default_folder(title)
    try:
        yield folder
    except BaseException:
        remove_empty(made)
        raise


def check_is_free(folder: Path, *, results: Sequence[str] = ()) -> None:
    """Raise RunError if the folder already holds a run, or one of the files `results`, which the run would overwrite."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; choose another folder for the run")
    found = [name for name in (CONFIG, EVENTS, CHECKPOINTS) if (folder / name).exists()]
    if found:
        raise RunError(
            f"{folder} already holds a run ({', '.join(found)}); continue it with resume=True (--resume on the command line), "
            "or choose another folder"
        )
    taken = [name for name in results if os.path.lexists(folder / name)]
    if taken:
        raise RunError(f"{folder} holds a {taken[0]}, which the run would replace; choose another folder")


def has_twin(folder: Path) -> bool:
    """Return whether a growth run has a twin that has written events. A link is none: it may lead out of the run."""
    return (folder / TWIN / EVENTS).is_file() and not (folder / TWIN).is_symlink()


def kind_of(folder: Path) -> str | None:
    """Return the kind of the run in a folder: the one that its log declares, or else that of its settings. None if there is no run."""
    if not (folder / CONFIG).is_file():
        return None
    head = b""
    with contextlib.suppress(OSError, FileError), open_in_run(folder / EVENTS) as file:
        head = file.read(_HEAD)
    if (declared := _DECLARED.search(head)) is not None:
        return clean(declared[1].decode(errors="replace"))
    try:
        config = parse_toml(read_in_run(folder / CONFIG, max_bytes=MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return None
    return next((kind for key, kind in _KEYS.items() if key in config), UNKNOWN if head.startswith(b'{"kind":"header"') else None)


def check_holds_a_run(folder: Path, kind: str) -> None:
    """Raise RunError if the folder holds no run, or one of another kind; the message lists the commands for that kind."""
    if folder.is_file():
        raise RunError(f"{folder} is a file; give the folder of a run")
    if not (folder / CONFIG).is_file():
        newest = max(folder.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime_ns, default=None)
        hint = "" if newest is None else f"; it holds runs, such as {newest.parent}"
        raise RunError(f"there is no run in {folder}: it has no {CONFIG}{hint}")
    found = kind_of(folder)
    if found not in (None, kind):
        raise RunError(f"{folder} is {name_of(found)} and not {name_of(kind)}; use it with: {_commands_for(folder, found)}")


def name_of(kind: str) -> str:
    """Return the name of a kind of run with its article, such as "a ppo run"."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} run"


def _commands_for(folder: Path, kind: str) -> str:
    """Return the commands that accept a run of this kind, for an error message."""
    run = shlex.quote(str(folder))
    match kind:
        case "growth" if (folder / GROW).is_file():
            return f"esper grow --resume --run {run}, esper report {run}"
        case "growth":
            return f"esper report {run}, and in Python esper.grow(..., run={str(folder)!r}, resume=True)"
        case "ppo":
            return f"esper ppo train --resume --run {run}, esper ppo eval {run}"
        case "controller":
            return f"esper controller train --resume --run {run}"
        case "arena":
            others = ", ".join(f"esper arena {command} {run}" for command in ("eval", "league"))
            return f"esper arena train --resume --run {run}, {others}, esper arena match {run} strong"
        case _:
            return f"esper runs show {run}, esper report {run}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run. The system releases it when the process ends, also by a crash."""
    with _lock(folder):
        yield


def _lock(folder: Path) -> contextlib.AbstractContextManager[object]:
    """Take the lock and return its open file, which releases the lock when closed. Raise RunError if another process has it."""
    while True:
        try:
            file = open_in_run(folder / LOCK, "ab")
        except FileError as error:
            raise RunError(f"{folder} cannot be locked: {error}; remove {folder / LOCK}, which holds nothing") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file, and another process may have created a new one. This lock would then protect
            # nothing, so try again.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK)):
                _remove_leftovers(folder)
                return file
        except BlockingIOError as error:
            file.close()
            raise RunError(f"another process is training in {folder}; wait for it or stop it first") from error
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that a killed process left in a run. A twin has a lock of its own."""
    for place, inside, _ in os.walk(folder):
        remove_temporaries(Path(place))
        inside[:] = [name for name in inside if name != TWIN and not name.startswith(TEMPORARY)]


class NewFolder:
    """The folder of a new run. This process holds its lock.

    `discard` removes the run while the lock is held: the files of every run, the files named in `others`, and the folders that this
    process made, if they are then empty.
    """

    def __init__(self, path: Path, made: Sequence[Path]) -> None:
        self.path, self.others = path, set[str]()
        self._made = made

    def discard(self) -> None:
        for name in (*self.others, CHECKPOINTS, EVENTS, CONFIG):
            remove(self.path / name)
        remove_temporaries(self.path)
        remove(self.path / LOCK)
        remove_empty(self._made)


@contextlib.contextmanager
def new_folder(folder: Path, *, results: Sequence[str] = ()) -> Iterator[NewFolder]:
    """Make the folder of a new run and hold its lock. See `check_is_free` for `results`."""
    check_is_free(folder, results=results)
    made: list[Path] = []
    while True:
        made = [*make_folder(folder), *made]
        try:
            lock = _lock(folder)
            break
        except FileNotFoundError:  # another process removed the folder in between: make it again
            continue
        except BaseException:
            remove_empty(made)
            raise
    with lock:
        new = NewFolder(folder, made)
        check_is_free(folder, results=results)  # check again, because another process may have trained in it until now
        yield new


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, given innermost first, up to the first one that is not empty."""
    for folder in folders:
        try:
            os.rmdir(folder)
        except OSError:
            return
