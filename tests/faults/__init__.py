"""Faults for tests of files: a process that dies at a chosen call, and damaged bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import esper.files


class Crash(BaseException):
    """The end of the process: no `except Exception` sees it."""


NEVER = 10**9


class _Disk:
    """`os`, as `esper.files` sees it, until the process dies. After that nothing reaches the disk any more.

    A sync is counted and not carried out: it takes long, and nothing that a test can see depends on it.
    """

    CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir")

    def __init__(self, dies_at: int) -> None:
        self.calls, self.dies_at = 0, dies_at

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(name, real) if name in self.CALLS else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.dies_at and name == "write":
                descriptor, content = arguments
                real(descriptor, content[: len(content) // 2])  # torn
            if self.calls >= self.dies_at:
                raise Crash
            return None if name == "fsync" else real(*arguments, **options)

        return call


@contextlib.contextmanager
def crash_at(call: int = NEVER) -> Iterator[_Disk]:
    """The program dies just before its `call`-th call that touches the disk, or half way through where that is a write."""
    with pytest.MonkeyPatch.context() as patch:
        disk = _Disk(call)
        patch.setattr(esper.files, "os", disk)
        yield disk


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    """One random kind of damage, at a random place: bits flipped, a part cut, zeroed, lost, repeated, moved or replaced by noise."""
    size = len(content)
    start = int(random.integers(0, size))
    end = min(size, start + int(2 ** random.uniform(0, 10)))
    part, changed = content[start:end], bytearray(content)
    match random.integers(0, 10):
        case 0 | 8 | 9:
            changed[random.integers(0, size)] ^= 1 << random.integers(0, 8)
        case 1:
            for place in random.integers(0, size, 8):
                changed[place] ^= 1 << random.integers(0, 8)
        case 2:
            del changed[start:]
        case 3:
            changed[start:end] = bytes(len(part))
        case 4:
            del changed[start:end]
        case 5:
            changed[start:end] = part + part
        case 6:
            middle = (start + end) // 2
            changed[start:end] = content[middle:end] + content[start:middle]
        case _:
            changed[start:end] = random.bytes(len(part))
    return bytes(changed)


@pytest.fixture
def _without_syncs() -> Iterator[None]:
    """For tests that save hundreds of times."""
    with crash_at(NEVER):
        yield
