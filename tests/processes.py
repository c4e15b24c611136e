"""Start processes quickly: fork them from one that has imported torch and esper, which takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.run
import torch.multiprocessing

import esper.cli.main

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload([PRELOADED := "tests.preloaded"])


def _ensure_forkserver() -> None:
    """Start the process to fork from. It imports PRELOADED from its working directory, and ignores a module that it does not find."""
    with contextlib.chdir(Path(__file__).parents[1]):
        forkserver.ensure_running()


def spawn(function: Callable[..., None], arguments: tuple[Any, ...], nprocs: int) -> None:
    """Run `function(rank, *arguments)` in `nprocs` processes, as torch.multiprocessing.spawn does."""
    _ensure_forkserver()
    torch.multiprocessing.start_processes(function, arguments, nprocs, start_method="forkserver")  # type: ignore[attr-defined,no-untyped-call]


def results_of_ranks(function: Callable[..., None], folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Run `function(rank, folder)` in a process per rank and return what each has saved as `results RANK`."""
    spawn(function, (folder,), ranks)
    return [torch.load(folder / f"results {rank}", weights_only=False) for rank in range(ranks)]


class Process:
    """Runs a function in its own process and captures the output. Has the methods of subprocess.Popen that tests need."""

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        _ensure_forkserver()
        pipes = [os.pipe() for _ in range(2)]
        self.stdout, self.stderr = (os.fdopen(reading, encoding="utf-8") for reading, _ in pipes)
        place = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
        streams = [DupFd(writing) for _, writing in pipes]
        self._process = _FORKSERVER.Process(target=_run, args=(streams, *place, function, arguments), daemon=True)
        self._process.start()
        for _, writing in pipes:
            os.close(writing)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self.wait(timeout=60)

    def wait(self, timeout: float) -> int:
        """Wait for the process to end, discard its output and return its exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        for stream in (self.stdout, self.stderr):
            stream.close()
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the process to end; return the output and the errors that were not read yet."""
        read: dict[str, str] = {}
        threads = [threading.Thread(target=_read_all, args=(read, name, getattr(self, name)), daemon=True) for name in ("stdout", "stderr")]
        for thread in threads:
            thread.start()
        end = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        self.wait(max(0.1, end - time.monotonic()))
        return read["stdout"], read["stderr"]


def _read_all(read: dict[str, str], name: str, stream: IO[str]) -> None:
    read[name] = stream.read()


def _run(
    streams: Sequence[Any], cwd: str, environment: Mapping[str, str], function: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    assert PRELOADED in sys.modules
    for number, stream in zip((1, 2), streams, strict=True):
        descriptor = stream.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115 (until the process ends)
    sys.stderr = open(2, "w", buffering=1, encoding=encoding, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(function(*arguments))  # type: ignore[arg-type]


def start(*argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Process:
    """Run the command line of esper with these arguments."""
    return Process(_main, argv, cwd=cwd, env=env)


def _main(argv: Sequence[str]) -> int:
    sys.path.insert(0, "")  # as `python -m` has it
    return esper.cli.main.main(argv)


def torchrun(ranks: int, *argv: str, cwd: Path | None = None) -> Process:
    """Run the command line of esper under torchrun, which forks the ranks from its launcher; where there is a GPU, CUDA forbids that."""
    how = "spawn" if torch.cuda.is_available() else "fork"
    launch = ["--standalone", "--nproc-per-node", str(ranks), "--start-method", how, "--run-path", "--"]
    return Process(_launch, [*launch, esper.cli.main.__file__, *argv], cwd=cwd)  # without --, it would take --run for its own


def _launch(argv: Sequence[str]) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    torch.distributed.run.main(argv)
