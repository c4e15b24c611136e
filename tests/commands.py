"""Helpers for tests of commands: read their output, send signals, compare runs, check views and refusals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from esper.cli.main import main
from esper.cli.progress import LiveView, Progress
from esper.runs import Sink, Tree, read
from esper.runs.folder import CHECKPOINTS, EVENTS
from esper.runs.tensors import split

_CLOCKS = {"time", "seconds", "samples_per_second", "steps_per_second", "collect_seconds", "update_seconds", "other_seconds", "env_seconds"}
_CLOCKS |= {"step_seconds", "measure_seconds", "data_wait_seconds", "memory_bytes", "device_memory_bytes", "seconds_lost", "resources"}
_CLOCKS |= {"reused"}  # a session begins without fleets
_OF_SESSIONS = {"header", "resumed", "run_declared", "run_started", "run_ended", "growth_started", "checkpoint_refused"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def last_line(text: str) -> dict[str, Any]:
    """Return the result printed by --json."""
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    return result


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Return all events of a run, without clocks and without events of sessions."""
    lines = [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]
    kept = [line for line in lines if line["kind"] not in _OF_SESSIONS]
    return [{key: value for key, value in line.items() if key not in _CLOCKS | {"run"}} for line in kept]


def show(folder: Path, sink: Sink) -> None:
    """Write all events of a run to a sink, and close it."""
    for record in read(folder / EVENTS):
        sink.write(record)
    sink.close()


def last_view(folder: Path, progress: Progress) -> str:
    """Return all that a live view of the run writes to a terminal."""
    stream = Terminal()
    show(folder, LiveView(progress, stream))
    return stream.getvalue()


def render(progress: Progress, width: int) -> str:
    """Return the live view of a state at this width, after checking that no line is wider."""
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(progress.view(width))
    shown = console.export_text()
    assert all(len(line) <= width for line in shown.splitlines())
    return shown


def assert_explains(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a command ends with the code of a user's mistake, and explains it in words and as JSON, without a traceback."""
    assert main([*argv, "--json"]) == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err
    assert message in last_line(captured.out)["error"]


def assert_refuses_to_overwrite(folder: Path, train: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> None:
    """Check that training into the folder of a finished run is refused and leaves its events alone."""
    before = (folder / EVENTS).read_bytes()
    assert train() == 2
    assert "--resume" in capsys.readouterr().err
    assert (folder / EVENTS).read_bytes() == before


def assert_same_state(one: Tree, other: Tree) -> None:
    """Compare everything but the time that training took."""
    assert split(_timeless(one))[0] == split(_timeless(other))[0], "apart from tensors"
    assert_same_tensors(one, other)


def _timeless(state: Tree) -> Tree:
    """Return a state without the seconds among its counters."""
    if not isinstance(state, dict) or "counters" not in state:
        return state
    return {**state, "counters": {name: count for name, count in state["counters"].items() if name != "seconds"}}


def assert_same_tensors(one: Tree, other: Tree) -> None:
    (_, ours), (_, theirs) = split(one), split(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def wait_for(path: Path, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.002)


@contextlib.contextmanager
def signal_at_checkpoint(number: signal.Signals, folder: Path) -> Iterator[None]:
    """Send this process a signal as soon as the run in this folder has its first checkpoint."""

    def interrupt() -> None:
        wait_for(folder / CHECKPOINTS / "latest")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()


def shown_in_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard reads from the run folder, over all sessions: name -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {name: [(scalar.step, scalar.value) for scalar in board.Scalars(name)] for name in board.Tags()["scalars"]}
