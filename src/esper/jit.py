"""Compile kernels with Numba, if it is installed, and keep the compiled code on disk.

Numba is an extra (`pip install 'esper-grow[numba]'`). Kernels of the learner also have a plain implementation, which runs if Numba is
missing or switched off (`ESPER_NUMBA=0`, or Numba's own `NUMBA_DISABLE_JIT=1`); the arena needs Numba. Numba is imported when the first
kernel is needed, because the import takes a third of a second.

Numba's own cache checks only the file of the compiled function, so it misses changes in other files that the function calls. Here the
cache is a folder whose name contains a hash of all the sources, so changed sources get a new folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from esper.files import user_cache

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# Allow reordered sums and fused multiply-add, so that loops vectorise. Do not let the compiler assume that numbers are finite.
_FAST_MATH = {"contract", "reassoc"}


@functools.cache
def has_numba() -> bool:
    """Return whether this process uses compiled kernels. It is decided once, so that the arithmetic does not change during a run."""
    is_wanted = os.environ.get("ESPER_NUMBA", "1") != "0" and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")
    if not is_wanted or importlib.util.find_spec("numba") is None:
        return False
    try:
        import numba  # noqa: F401
    except (ImportError, AttributeError) as error:  # raised if Numba does not support the installed NumPy
        warnings.warn(f"Numba is installed but cannot be imported, so the slower NumPy code runs: {error}", RuntimeWarning, stacklevel=2)
        return False
    return True


def compiler(sources: Iterable[str | Path]) -> Callable[[Kernel], Kernel]:
    """Return the decorator for kernels made of these source files. A kernel is compiled at its first call and cached on disk."""
    import numba

    folder = cache_folder(tuple(Path(source) for source in sources))

    def compile_kernel(function: Kernel) -> Kernel:
        with cached_in(folder, numba.config):
            kernel: Kernel = numba.njit(cache=True, fastmath=_FAST_MATH, error_model="numpy", nogil=True)(function)
        return kernel

    return compile_kernel


@contextlib.contextmanager
def cached_in(folder: Path, config: Any) -> Iterator[None]:
    """Keep the code of kernels that are decorated inside the context in a folder. `config` is `numba.config`, or that of numba-cuda."""
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)  # Numba reads this global setting when a function is decorated
    try:
        yield
    finally:
        config.CACHE_DIR = before


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch garbage collection off for work that makes millions of small objects that live on, such as compiling or reading a long file.

    Looking through them takes a tenth of the time of compiling the arena, and half of the time of reading the events of a run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def one_process_at_a_time(lock: Path, *, message: str) -> Iterator[None]:
    """Hold the lock on a file inside the context. If another process holds it, print a message and wait.

    The system releases the lock when the process ends, also by a crash.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(message, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_folder(sources: tuple[Path, ...], *, versions: str = "") -> Path:
    """Return the cache folder for these sources: next to the first source if that place is writable, else in the user's cache.

    Cache folders of earlier sources are removed, but not those of other `versions`: packages that the code depends on, with their versions.
    So two environments that share the sources keep their code.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    stem = f"{sources[0].stem}-numba-" + (f"{versions}-" if versions else "")
    name = f"{stem}{digest.hexdigest()[:16]}"
    for parent in (sources[0].parent / "__pycache__", user_cache()):
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=parent / name):
                pass
        except OSError:
            continue
        for other in parent.glob(f"{stem}*"):
            if other.name != name:
                shutil.rmtree(other, ignore_errors=True)
        return parent / name
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))  # nothing else is writable; this folder serves only this process
