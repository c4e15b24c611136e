"""The calls of a process that change files in a folder: counted, and one of them dies, fails or writes only a part.

For processes that were forked for one trial: nothing that `Disk.install` replaces is put back.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEVER = 10**9
DIED = 137  # exit code of a process that a `Disk` ended
BY_PATH = ("mkdir", "unlink", "remove", "rmdir", "truncate", "replace", "rename")
BY_DESCRIPTOR = ("write", "fsync", "fdatasync", "ftruncate")
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Disk:
    """Everything below `root`. At the call with the number `at`, `fault` happens:

    "die"     the process ends at once, without clean-up; a write writes its first half before that
    "short"   a write writes its first half and says so; nothing happens at other calls
    an errno  the call fails with it, and so do all later ones if `lasts`; a write writes its first half before that

    A sync is counted and not carried out: it takes long, and nothing that a trial can see depends on it.
    """

    def __init__(self, root: Path, *, at: int = NEVER, fault: str | int = "die", lasts: bool = False) -> None:
        self.root, self.at, self.fault, self.lasts = os.path.realpath(root) + os.sep, at, fault, lasts
        self.calls: list[str] = []
        self._paths: dict[int, str] = {}  # of open descriptors below root
        self._lock = threading.RLock()

    def install(self) -> None:
        """Replace the functions of `os` and `open` in this process."""
        for name in BY_PATH:
            setattr(os, name, self._by_path(name, getattr(os, name)))
        for name in BY_DESCRIPTOR:
            setattr(os, name, self._by_descriptor(name, getattr(os, name)))
        self._open, self._close, self._write = os.open, os.close, os.write.__wrapped__  # type: ignore[attr-defined]
        os.open, os.close = self._opened, self._closed  # type: ignore[assignment]
        opened = builtins.open

        def open_file(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            """Count files that are opened for writing by Python's own `open`; their writes are not seen one by one."""
            if set(mode) & set("wax+") and not isinstance(file, int) and self._is_below(file):
                self._count("open")
            return opened(file, mode, *arguments, **options)

        builtins.open = io.open = open_file

    def _is_below(self, path: Any, dir_fd: int | None = None) -> bool:
        if isinstance(path, int):
            return path in self._paths
        text = os.fsdecode(path)
        base = self._paths.get(dir_fd, "") if dir_fd is not None else ""
        return (os.path.abspath(os.path.join(base, text)) + os.sep).startswith(self.root)

    def _count(self, name: str, half: Callable[[], Any] | None = None) -> bool:
        """Count a call, and let the fault happen if it is its turn. Return whether the caller should write only a half."""
        with self._lock:
            self.calls.append(name)
            number = len(self.calls)
            if number != self.at and not (self.lasts and number > self.at):
                return False
            if self.fault == "short":
                return half is not None
            if half is not None and number == self.at:
                half()
            if self.fault == "die":
                os._exit(DIED)
            assert isinstance(self.fault, int)
            raise OSError(self.fault, os.strerror(self.fault))

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if self._is_below(path, options.get("dir_fd", options.get("src_dir_fd"))):
                try:
                    self._count(name)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, os.fsdecode(path)) from None
            return real(path, *arguments, **options)

        return call

    def _by_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any) -> Any:
            if descriptor not in self._paths:
                return real(descriptor, *arguments)
            if name != "write":
                self._count(name)
                return None if "sync" in name else real(descriptor, *arguments)
            content = memoryview(arguments[0])
            part = content[: len(content) // 2]
            return real(descriptor, part if self._count(name, lambda: real(descriptor, part)) else content)

        call.__wrapped__ = real  # type: ignore[attr-defined]
        return call

    def _opened(self, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        is_below = self._is_below(path, options.get("dir_fd"))
        if is_below and flags & CHANGES:
            try:
                self._count("open")
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.fsdecode(path)) from None
        descriptor = self._open(path, flags, *arguments, **options)
        if is_below:
            base = self._paths.get(options.get("dir_fd") or -1, "")
            self._paths[descriptor] = os.path.abspath(os.path.join(base, os.fsdecode(path)))
        return descriptor

    def _closed(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        self._close(descriptor)


FULL, BROKEN, QUOTA = errno.ENOSPC, errno.EIO, errno.EDQUOT
