"""The rules on a CUDA device: the functions of the CPU, compiled by numba-cuda. `esper.arena.native.simulation` launches them.

Every phase of `esper.arena.native.battle` is a kernel with a thread for each unit, or for each battle where a phase belongs to it. This is
the fastest of three layouts that were measured on an NVIDIA H200, with strong bots on both sides, 5v5, as whole decisions in a CUDA graph:

    battles     a kernel for a phase            a thread for a battle           a warp for a battle
    4,096       1.03 ms, 26.8 M agent-steps/s   2.89 ms, 9.5 M agent-steps/s    2.26 ms, 12.1 M agent-steps/s
    16,384      2.83 ms, 38.2 M                 4.56 ms, 24.0 M                 9.82 ms, 11.1 M

Kernels run on torch's current stream, read the memory of tensors, and are compiled before they are needed, so that they can be recorded in
a CUDA graph. Launched one by one they take 16 to 22 ms a decision, because a launch passes some 3 kB of array descriptions through Python.

Equal results are promised per kind of device only: NVIDIA's compiler fuses multiplications with additions, and numba-cuda has no option
against it.

Shapes: B = battles, U = units.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch

from esper.arena.native.battle import (
    BEGIN_PHASES,
    DECIDE,
    DECIDE_ONLY,
    ORDER_PHASES,
    RESULT_PHASES,
    TICK_PHASES,
    VIEW_PHASES,
    Phase,
)
from esper.arena.native.bots import act_unit
from esper.arena.native.compiling import CACHE, IS_INTERPRETED
from esper.arena.native.layout import Battles, Choices, Ints, Longs, Maps, RuleBook, Tables, Views
from esper.arena.specs import PHYSICS
from esper.jit import cached_in, no_garbage_collection
from esper.runs.folder import RunError

if not hasattr(np, "row_stack"):  # NumPy 2.5 has removed it, and numba-cuda 0.30 imports it
    np.row_stack = np.vstack  # noqa: NPY201

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # NumPy 2.5 warns of what numba-cuda 0.30 does when it is imported
    from numba import cuda

IS_SIMULATED = bool(numba.config.ENABLE_CUDASIM)
THREADS = 128  # of a block
COMPILE_S = 40  # on the machine of an NVIDIA H200


def require_cuda() -> None:
    """Raise an error if numba-cuda or a CUDA device is missing. Numba's simulator needs neither."""
    if IS_SIMULATED:
        return
    if importlib.util.find_spec("numba_cuda") is None:
        how = "pip install 'esper-grow[cuda]', or 'numba-cuda[cu12]' for CUDA 12; or use device cpu"
        raise ImportError(f"the arena on CUDA needs numba-cuda, which is not installed: {how}")
    if not torch.cuda.is_available() or not cuda.is_available():
        how = "see https://pytorch.org/get-started, or use device cpu"
        raise RunError(f"the arena on CUDA needs an NVIDIA GPU, its driver and a torch with CUDA: {how}")
    if IS_INTERPRETED:
        raise RunError("the arena on CUDA needs compiled rules: unset ESPER_ARENA_NUMBA and NUMBA_DISABLE_JIT, or use device cpu")


# Kernels. Numba finds a stored kernel by its file, line and name, and by the contents of its closure, which two processes never pickle to
# the same bytes. So the kernel of a phase is a copy of `run_phase` that has a name and globals of its own: these two.

run, is_of_battle = ORDER_PHASES[0]


def run_phase(
    s: Battles, maps: Maps, tables: Tables, rule_book: RuleBook, actions: Choices, views: Views, task: int, battles: int
) -> None:  # fmt: skip
    """Run a phase, with one thread for each unit, or for each battle where the phase belongs to it."""
    units = 1 if is_of_battle else s.unit.shape[2]
    index = cuda.grid(1)
    if index < battles * units:
        run(s, maps, tables, rule_book[0], actions, views, task, index // units, index % units)


def run_bots(
    s: Battles, maps: Maps, tables: Tables, rule_book: RuleBook, views: Views, actions: Choices, bots: Ints, salts: Longs, battles: int
) -> None:  # fmt: skip
    """Write the actions of bots, with one thread for each unit."""
    index, units = cuda.grid(1), s.unit.shape[2]
    if index < battles * units:
        act_unit(s, maps, tables, rule_book, views, actions, bots, salts, index // units, index % units)


@cache
def phase_kernel(phase: Phase) -> Any:
    """Return the kernel of a phase."""
    function = FunctionType(run_phase.__code__, {**globals(), **phase._asdict()})
    function.__name__ = function.__qualname__ = f"run_{phase.run.__name__}"
    return kernel(function)


@cache
def kernel(function: Callable[..., None]) -> Any:
    """Return a kernel that is compiled at its first launch and stored on disk: per version of numba-cuda and kind of device."""
    if IS_SIMULATED:
        return cuda.jit(function)
    from numba.cuda.core import config  # numba-cuda does not read the settings of Numba

    with cached_in(CACHE, config):
        return cuda.jit(function, cache=True)


@contextmanager
def announced() -> Iterator[None]:
    """Print a message if something is compiled inside the context. Numba sends no event if it loads kernels from the disk."""
    if IS_SIMULATED:
        yield
        return
    from numba.cuda.core import event

    class Announcer(event.Listener):  # type: ignore[misc]
        is_done = False

        def on_start(self, event: Any) -> None:
            if not self.is_done:
                self.is_done = True
                print(f"compiling the arena for CUDA, about {COMPILE_S} s; it is cached in {CACHE}", file=sys.stderr, flush=True)

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba-cuda:run_pass", Announcer()):
        yield


# Launches

KernelArguments = tuple[Any, ...]  # state, maps, tables, rules, actions and views on the device


class CudaKernels:
    """Kernels for simulations of so many battles and units."""

    def __init__(self, *, battles: int, units: int) -> None:
        require_cuda()
        self.battles, self.units = battles, units

    def compile(self, arguments: KernelArguments, bots: Any, salts: Any) -> None:
        """Compile and load the kernels by launching them for no battle, because neither can be done while a graph is recorded."""
        with announced(), no_garbage_collection():
            self._launch_phases(arguments, DECIDE, battles=0)
            self._launch_bots(arguments, arguments[4], bots, salts, battles=0)

    def run(self, arguments: KernelArguments, task: int) -> None:
        """Do a task of `esper.arena.native.battle` with all battles."""
        self._launch_phases(arguments, task, battles=self.battles)

    def _launch_phases(self, arguments: KernelArguments, task: int, *, battles: int) -> None:
        phases = (*ORDER_PHASES, *(TICK_PHASES * PHYSICS.ticks_per_decision), *RESULT_PHASES) if task in (DECIDE, DECIDE_ONLY) else ()
        for phase in (*phases, *BEGIN_PHASES, *VIEW_PHASES):
            launch(phase_kernel(phase), battles if phase.is_of_battle else battles * self.units, *arguments, task, battles)

    def act(self, arguments: KernelArguments, actions: Any, bots: Any, salts: Any) -> None:
        """Write the actions of bots. `bots` [2, B] are their indices by team and battle, `salts` [1] is added to their seeds."""
        self._launch_bots(arguments, actions, bots, salts, battles=self.battles)

    def _launch_bots(self, arguments: KernelArguments, actions: Any, bots: Any, salts: Any, *, battles: int) -> None:
        s, maps, tables, rules, _, views = arguments
        launch(kernel(run_bots), battles * self.units, s, maps, tables, rules, views, actions, bots, salts, battles)


def launch(kernel: Any, threads: int, *arguments: Any) -> None:
    """Launch a kernel with at least this many threads on the current stream."""
    stream = 0 if IS_SIMULATED else cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    with warnings.catch_warnings():
        # Few battles are allowed, and `CudaKernels` compiles by launching none. The message begins with a code for bold type.
        warnings.filterwarnings("ignore", ".*Grid size")
        kernel[max(-(-threads // THREADS), 1), THREADS, stream](*arguments)


def on_device(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return arrays of the memory of tensors for kernels."""
    return [tensor.numpy() if IS_SIMULATED else cuda.as_cuda_array(tensor) for tensor in tensors]


def rules_on_device(rules: RuleBook, device: torch.device) -> Any:
    """Copy the constants of the rules to a device."""
    if IS_SIMULATED:
        return rules
    cuda.select_device(device.index)
    return cuda.to_device(np.asarray(rules))
