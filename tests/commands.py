"""What tests of commands share: their output as JSON, signals, and whether two runs are the same."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from esper.runs import Sink, Tree, read
from esper.runs.folder import CHECKPOINTS, EVENTS
from esper.runs.tensors import split

_CLOCKS = {"time", "seconds", "samples_per_second", "steps_per_second", "collect_seconds", "update_seconds", "other_seconds", "env_seconds"}
_CLOCKS |= {"step_seconds", "data_wait_seconds"}
_OF_SESSIONS = {"header", "resumed", "run_started", "growth_started", "checkpoint_refused"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def last_line(text: str) -> dict[str, Any]:
    """What --json printed."""
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    return result


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Everything that happened, without clocks and without what tells a resumed run from another."""
    lines = [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]
    kept = [line for line in lines if line["kind"] not in _OF_SESSIONS]
    return [{key: value for key, value in line.items() if key not in _CLOCKS | {"run"}} for line in kept]


def show(folder: Path, sink: Sink) -> None:
    """The whole run, from its first event to its end."""
    for record in read(folder / EVENTS):
        sink.write(record)
    sink.close()


def assert_same_state(one: Tree, other: Tree) -> None:
    assert split(one)[0] == split(other)[0], "apart from tensors"
    assert_same_tensors(one, other)


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
    """This process gets the signal as soon as the run in this folder has its first checkpoint."""

    def interrupt() -> None:
        wait_for(folder / CHECKPOINTS / "latest")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()


def shown_in_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader finds in the run folder, of all sessions: name -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {name: [(scalar.step, scalar.value) for scalar in board.Scalars(name)] for name in board.Tags()["scalars"]}
