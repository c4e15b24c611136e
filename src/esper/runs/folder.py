"""Where a training run lies: the names in its folder, and that only one process at a time trains in it.

runs/cue-20260131-235959/
  config.toml       what was asked for
  events.jsonl      what happened
  checkpoints/      what to go on from
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from esper.files import MAX_CONFIG_BYTES, make_folder, parse_toml, read_file, remove, remove_temporaries

CONFIG, EVENTS, CHECKPOINTS, LOCK = "config.toml", "events.jsonl", "checkpoints", ".lock"
GROW = "grow.toml"  # of a run of `esper grow`, beside config.toml, which holds the part about growing alone

Kind = Literal["ppo", "growth", "controller", "arena"]
# What a run is called, and the key that only configs of its kind have.
_KINDS: dict[Kind, tuple[str, str]] = {
    "ppo": ("a ppo run", "env"),
    "growth": ("a growth run", "lifecycle"),
    "controller": ("a controller run", "domain"),
    "arena": ("an arena run", "selfplay"),
}


class RunError(ValueError):
    """A run that cannot start or go on as asked, with the reason and what to do."""


def default_folder(env: str, *, root: Path | str = "runs") -> Path:
    """A folder for a new run that does not exist yet: the environment and the time."""
    title = env.replace("/", "-").replace(":", "-").encode()[:200].decode(errors="ignore")  # a name has 255 bytes at most
    name = f"{title}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, count = Path(root) / name, 1
    while folder.exists():
        count += 1
        folder = Path(root) / f"{name}-{count}"
    return folder


def check_is_free(folder: Path, *, results: Sequence[str] = ()) -> None:
    """Raise RunError where the folder holds a run, or a file of somebody else that the run would replace: one of `results`."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; choose another folder for the run")
    found = [name for name in (CONFIG, EVENTS, CHECKPOINTS) if (folder / name).exists()]
    if found:
        raise RunError(
            f"{folder} already holds a run ({', '.join(found)}); go on with it by resume=True (--resume on the command line), "
            "or choose another folder"
        )
    taken = [name for name in results if os.path.lexists(folder / name)]
    if taken:
        raise RunError(f"{folder} holds a {taken[0]}, which the run would replace; choose another folder")


def kind_of(folder: Path) -> Kind | None:
    """Return the kind of the run in a folder, None where it holds none, or none that is known."""
    try:
        config = parse_toml(read_file(folder / CONFIG, max_bytes=MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return None
    return next((kind for kind, (_, key) in _KINDS.items() if key in config), None)


def check_holds_a_run(folder: Path, kind: Kind) -> None:
    """Raise RunError where there is no run, or one of another kind, and say what can be done with it."""
    if folder.is_file():
        raise RunError(f"{folder} is a file; give the folder of a run")
    if not (folder / CONFIG).is_file():
        newest = max(folder.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime_ns, default=None)
        hint = "" if newest is None else f"; it holds runs, such as {newest.parent}"
        raise RunError(f"there is no run in {folder}: it has no {CONFIG}{hint}")
    found = kind_of(folder)
    if found not in (None, kind):
        raise RunError(f"{folder} is {name_of(found)} and not {name_of(kind)}; what can be done with it: {_what_takes(folder, found)}")


def name_of(kind: Kind) -> str:
    return _KINDS[kind][0]


def _what_takes(folder: Path, kind: Kind) -> str:
    run = shlex.quote(str(folder))
    match kind:
        case "growth" if (folder / GROW).is_file():
            return f"esper grow --resume --run {run}, esper grow report {run}"
        case "growth":
            return f"esper grow report {run}, and in Python esper.grow(..., run={str(folder)!r}, resume=True)"
        case "ppo":
            return f"esper ppo train --resume --run {run}, esper ppo eval {run}"
        case "controller":
            return f"esper controller train --resume --run {run}"
        case "arena":
            others = ", ".join(f"esper arena {command} {run}" for command in ("eval", "league"))
            return f"esper arena train --resume --run {run}, {others}, esper arena match {run} strong"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run for this process; the lock ends with the process, however that ends."""
    with _lock(folder):
        yield


def _lock(folder: Path) -> contextlib.AbstractContextManager[object]:
    """Return the open file that is the lock. Raise RunError where another process has it."""
    while True:
        file = open(folder / LOCK, "a")  # noqa: SIM115 — the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held it before may have removed the file, and a third one made it again: then it locks nothing.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK)):
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


class NewFolder:
    """The folder of a new run, which this process made or found free, and holds the lock of.

    `discard` removes the run again, while the lock is held: what every run has, the files in `others`, and the folders that this process
    made where nothing else is in them.
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
    """Make the folder of a new run and hold its lock; see `check_is_free` for `results`."""
    check_is_free(folder, results=results)
    made: list[Path] = []
    while True:
        made = [*make_folder(folder), *made]
        try:
            lock = _lock(folder)
            break
        except FileNotFoundError:  # another process made the folder and removed it again
            continue
        except BaseException:
            remove_empty(made)
            raise
    with lock:
        new = NewFolder(folder, made)
        check_is_free(folder, results=results)  # again: another process may have trained in it until now
        yield new


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that this process made, innermost first, as far as nothing is in them."""
    for folder in folders:
        try:
            os.rmdir(folder)
        except OSError:
            return
