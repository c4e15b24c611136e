"""Numba, where it is installed: whether its kernels are used, and where their compiled form is kept.

Numba is an extra (`pip install 'esper-grow[numba]'`). Every kernel has a plain implementation beside it, which runs if Numba is missing
or switched off (`ESPER_NUMBA=0`, or Numba's own `NUMBA_DISABLE_JIT=1`). Numba is imported when the first kernel is needed: the import
takes a third of a second.

Compiled kernels are kept on disk. Numba's own cache looks only at the file of the compiled function, so an edit in a file that it calls
into would go unnoticed. Here the cache is a folder named by a hash of all the sources: another source, another folder.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# Sums may be reordered and products fused into them, so that loops vectorise. Nothing may assume that numbers are finite.
_FAST_MATH = {"contract", "reassoc"}


@functools.cache
def has_numba() -> bool:
    """Whether kernels are compiled in this process. Decided once, so that one run has one arithmetic."""
    is_wanted = os.environ.get("ESPER_NUMBA", "1") != "0" and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")
    if not is_wanted or importlib.util.find_spec("numba") is None:
        return False
    try:
        import numba  # noqa: F401
    except (ImportError, AttributeError) as error:  # both happen where Numba does not know the installed NumPy
        warnings.warn(f"Numba is installed but cannot be imported, so the slower NumPy code runs: {error}", RuntimeWarning, stacklevel=2)
        return False
    return True


def compiler(sources: Iterable[str | Path]) -> Callable[[Kernel], Kernel]:
    """Return the decorator for kernels that are made of these source files: it compiles at the first call and keeps the result on disk."""
    import numba

    folder = str(cache_folder(tuple(Path(source) for source in sources)))

    def compile_kernel(function: Kernel) -> Kernel:
        # Numba chooses a function's cache when it is decorated, by this setting of the whole process.
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, folder
        try:
            kernel: Kernel = numba.njit(cache=True, fastmath=_FAST_MATH, error_model="numpy", nogil=True)(function)
        finally:
            numba.config.CACHE_DIR = before
        return kernel

    return compile_kernel


def cache_folder(sources: tuple[Path, ...]) -> Path:
    """Return the folder for the compiled form of these sources, beside the first of them if that place can be written to.

    Folders of earlier versions are removed.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    name, stem = f"{sources[0].stem}-numba-{digest.hexdigest()[:16]}", f"{sources[0].stem}-numba-"
    for parent in (sources[0].parent / "__pycache__", _user_cache() / "esper"):
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
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))  # lost with the machine's temporary files


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
