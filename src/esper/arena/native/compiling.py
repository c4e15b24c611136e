"""Compile functions of battles by Numba, store the machine code on disk, and run it on several threads.

Numba turns the product of a float32 and a literal such as 0.5 into a double, so literals are written as `const(0.5)` at the top of a
module, and whole numbers are converted by `f32`.

`ESPER_ARENA_NUMBA=0` lets Python interpret the functions, which is slower but needs no compilation: for tests of short battles, and for
debuggers. Numba's own `NUMBA_DISABLE_JIT=1` does the same, and also switches the learner's kernels off.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import numpy as np
import torch

try:
    import numba
    from numba.core import event
except ImportError as error:
    raise ImportError(f"the arena is compiled by Numba, which cannot be imported ({error}): pip install 'esper-grow[league]'") from error

from esper.jit import cache_folder, cached_in, no_garbage_collection, one_process_at_a_time

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")

# The flags of compiled functions: no exceptions for a division by zero; always inlined by LLVM, because a call passes some 300 numbers that
# describe arrays; no reference counts, because nothing is allocated; no entry points for Python and C, which would take longer to compile
# than the functions.
_FLAGS = {"error_model": "numpy", "forceinline": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
COMPILE_S = 30  # on two cores of 2.5 GHz
RANGES_PER_THREAD = 4  # so that a thread that was interrupted does not let the others wait for long
IS_INTERPRETED = bool(numba.config.DISABLE_JIT) or os.environ.get("ESPER_ARENA_NUMBA", "1") == "0"


def scalar(function: Function) -> Function:
    """Compile a function of one battle or one unit. It may be called from other compiled functions only."""
    return function if IS_INTERPRETED else cast(Function, numba.njit(function, **_FLAGS))


def inlined(function: Function) -> Function:
    """Compile a function as part of its callers. Use it for those that mainly call others: LLVM then optimises them once."""
    return function if IS_INTERPRETED else cast(Function, numba.njit(function, inline="always", **_FLAGS))


def const(value: float) -> float:
    """Return a float32 constant. To type checkers it is a float, as all numbers with a fraction are in compiled functions."""
    return cast(float, np.float32(value))


@scalar
def f32(value: float) -> float:
    """Return a number as float32."""
    return np.float32(value)  # type: ignore[return-value]


@scalar
def i32(value: float) -> int:
    """Return a number without its fraction as int32, which vectors of the CPU convert faster than int64."""
    return np.int32(value)  # type: ignore[return-value]


@scalar
def floor(value: float) -> int:
    """Return the largest whole number that is not above a value. `math.floor` returns a float on CUDA devices."""
    return int(math.floor(value))  # noqa: RUF046


@scalar
def ceiling(value: float) -> int:
    """Return the smallest whole number that is not below a value."""
    return int(math.ceil(value))  # noqa: RUF046


# The cache on disk


def arena_cache(package: Path) -> Path:
    """Return the folder of compiled kernels for the arena's sources in `package`. Any of them may be part of a kernel."""
    own = package / "native" / "compiling.py"  # names the folder, and the place for it
    others = (path for path in sorted(package.rglob("*.py")) if path != own)
    return cache_folder((own, *others), versions=f"{numba.__version__}-numpy-{np.__version__}")


CACHE = arena_cache(Path(__file__).parent.parent)


class _Announcer(event.Listener):  # type: ignore[misc]
    """Says once in a process that a kernel is being compiled. Numba sends no event if it loads the kernel from the cache."""

    def __init__(self) -> None:
        self.kernels: list[Any] = []
        self.is_done = False

    def on_start(self, event: Any) -> None:
        if not self.is_done and any(kernel is event.data["dispatcher"] for kernel in self.kernels):
            self.is_done = True
            print(f"compiling the arena, about {COMPILE_S} s; it is cached in {CACHE}", file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        pass


_announcer = _Announcer()
event.register("numba:compile", _announcer)


# Loops over battles


def for_battles(function: Callable[Concatenate[int, int, Arguments], None]) -> BattleLoop[Arguments]:
    """Compile a loop over the battles `first`, ..., `last` - 1. Calls leave out these two arguments and run all battles.

    The first of the other arguments is the state of the battles.
    """
    return BattleLoop(function)


def interpreted(function: Callable[..., None]) -> Callable[..., None]:
    """Return a loop for Python. It replaces the record of the rules by a plain object, because reading it took half of the time."""

    def run(*arguments: Any) -> None:
        function(*([_plain(one[0])] if isinstance(one, np.recarray) else one for one in arguments))

    return run


def _plain(record: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: record[name] for name in record.dtype.names})


class BattleLoop(Generic[Arguments]):
    """A loop over battles that is compiled without the interpreter lock and runs on as many Python threads as torch uses."""

    def __init__(self, function: Callable[Concatenate[int, int, Arguments], None]) -> None:
        with cached_in(CACHE, numba.config):
            jit = interpreted if IS_INTERPRETED else numba.njit(nogil=True, error_model="numpy", cache=True)
            self.kernel: Any = jit(function)
        _announcer.kernels.append(self.kernel)
        self._is_compiled = IS_INTERPRETED  # then nothing is left to compile
        self._compiler: subprocess.Popen[bytes] | None = None

    @property
    def is_on_disk(self) -> bool:
        """Whether this or another process has stored the compiled kernel."""
        return any(Path(self.kernel.stats.cache_path).glob(f"*.{self.kernel.__name__}-*.nbi"))

    def compile_beside(self, compile_it: Callable[[], None]) -> None:
        """Let another process compile the kernel by a function, unless the kernel is on disk. The first call waits for that process.

        If the process fails, the first call compiles the kernel.
        """
        if self._is_compiled or self._compiler or not sys.executable or os.cpu_count() == 1:
            return
        if self.is_on_disk:
            return
        code = f"from {compile_it.__module__} import {compile_it.__name__} as compile_it; compile_it()"
        command = [sys.executable, "-P", "-c", code]
        self._compiler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def compile(self, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> None:
        """Compile the kernel, or load it from the disk, by calling it for no battle.

        If several processes need it at the same time, one compiles it and the others wait. Its loops are not vectorised: they are short,
        and vectors made them slower.
        """
        assert not keywords
        if self._is_compiled:
            return
        if self._compiler is not None:
            self._compiler.wait()
        if self.is_on_disk:
            self._call_for_no_battle(arguments)
        else:
            message = "waiting for another process, which compiles the arena"
            with one_process_at_a_time(CACHE / f"{self.kernel.__name__}.lock", message=message):
                self._call_for_no_battle(arguments)
        self._is_compiled = True

    def _call_for_no_battle(self, arguments: tuple[Any, ...]) -> None:
        before, numba.config.LOOP_VECTORIZE = numba.config.LOOP_VECTORIZE, 0
        try:
            with no_garbage_collection():
                self.kernel(0, 0, *arguments)
        finally:
            numba.config.LOOP_VECTORIZE = before

    def __call__(self, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> None:
        state: Any = arguments[0]
        battles = state.status.shape[1]
        self.compile(*arguments, **keywords)
        workers = min(torch.get_num_threads(), battles)
        if workers == 1 or IS_INTERPRETED:
            self.kernel(0, battles, *arguments)
            return
        size = -(-battles // (workers * RANGES_PER_THREAD))
        starts = iter(range(0, battles, size))  # each thread takes the next range when it is done with one

        def run() -> None:
            for first in starts:
                self.kernel(first, min(first + size, battles), *arguments)

        others = [_pool(workers - 1).submit(run) for _ in range(workers - 1)]
        try:
            run()
        finally:  # also after Ctrl-C, no thread changes battles when this call has ended
            for _ in starts:
                pass
            for other in others:
                other.result()


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="arena")


os.register_at_fork(after_in_child=_pool.cache_clear)  # the threads of a pool do not exist in a forked process
