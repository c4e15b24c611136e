"""Where a training run lies: the names in its folder, and that only one process at a time trains in it.

runs/cue-20260131-235959/
  config.toml       what was asked for
  events.jsonl      what happened
  checkpoints/      what to go on from
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

CONFIG, EVENTS, CHECKPOINTS, LOCK = "config.toml", "events.jsonl", "checkpoints", ".lock"


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


def check_is_free(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; choose another folder for the run")
    found = [name for name in (CONFIG, EVENTS, CHECKPOINTS) if (folder / name).exists()]
    if found:
        raise RunError(
            f"{folder} already holds a run ({', '.join(found)}); go on with it by resume=True (--resume on the command line), "
            "or choose another folder"
        )


def check_holds_a_run(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise RunError(f"there is no run in {folder}: it has no {CONFIG}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run for this process; the lock ends with the process, however that ends."""
    with open(folder / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another process is training in {folder}; wait for it or stop it first") from error
        yield
