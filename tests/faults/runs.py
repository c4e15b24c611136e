"""The smallest training of every trainer, in forked processes that may die, and what has to be true of its folder afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from esper.cli.main import main
from esper.runs import CheckpointStore, Versions
from esper.runs.folder import CONFIG, GROW
from esper.runs.tensors import read_tensors, split
from tests.commands import _timeless, events_of
from tests.faults.disk import Disk

HANGS_AFTER_S = 120.0
TO_NOTICE_S = 15.0  # for the other ranks, after one has died
HUNG = -1000  # exit code of a process that had to be killed
MODULE = "faults_user_code"
USER_CODE = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))

def make_loaders():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :3].argmax(dim=1)
    batches = list(zip(inputs.split(8), targets.split(8)))
    return batches[:3], batches[3:]
"""
ALONE = ["--threads", "1", "--device", "cpu"]


@dataclass(frozen=True)
class Trainer:
    """A command that trains, its smallest settings, and the store of its checkpoints."""

    command: tuple[str, ...]
    options: str
    kind: str  # of its checkpoints
    part: str  # key of the state that has to be equal
    ranks: int = 1

    def begin(self) -> list[str]:
        return [*self.command, *self.options.split(), *ALONE, "--run", "run"]

    def resume(self) -> list[str]:
        return [*self.command, "--resume", "--run", "run"]


TRAINERS = {
    "ppo train": Trainer(
        ("ppo", "train"),
        "cue --env-args delay=1 --num-envs 2 --num-steps 4 --total-steps 32 --eval-episodes 2 --hidden-size 4 --encoder-sizes 4"
        " --num-epochs 1 --num-minibatches 1 --checkpoint-every 2 --keep 1",
        "ppo",
        "ppo",
    ),
    "grow": Trainer(
        ("grow",),
        f"--model {MODULE}:make_model --data {MODULE}:make_loaders --controller schedule --epochs 2 --blueprints norm",
        "growth",
        "grower",
    ),
    "controller train": Trainer(
        ("controller", "train"),
        "--rounds 2 --source digits --families conv --domain.width 2 3 --blocks 1 1 --domain.batch-size 16 16 --samples-of-a-life 96 128"
        " --fleets 1 --hosts 4 --horizon 3 4 --num-minibatches 2 --num-epochs 1 --hidden-size 8 --network.width 8"
        " --checkpoint-every 1 --holding-epochs 1 --validation-samples 64 --growth.blueprints norm widen_100",
        "ppo",
        "ppo",
    ),
    "arena train": Trainer(
        ("arena", "train"),
        "--team-size 1 --battles 8 --size 16 --maps 2 --seconds 1 --num-steps 4 --bptt-length 4 --num-epochs 1 --num-minibatches 2"
        " --hidden-size 8 --width 8 --terrain-width 8 --entity-width 4 --head-width 8 --eval-battles 2 --entry-battles 2 --enter-every 1"
        " --checkpoint-every 1 --bot-share 0.5 --past-share 0.25 --core lstm --total-steps 80",
        "ppo",
        "ppo",
    ),
}
TWO_RANKS = {
    "ppo train, two ranks": Trainer(("ppo", "train"), TRAINERS["ppo train"].options.replace("steps 32", "steps 64"), "ppo", "ppo", 2),
    "controller train, two ranks": Trainer(("controller", "train"), TRAINERS["controller train"].options, "ppo", "ppo", 2),
    "arena train, two ranks": Trainer(
        ("arena", "train"), TRAINERS["arena train"].options.replace("steps 80", "steps 160"), "ppo", "ppo", 2
    ),
}


# Processes


@dataclass
class Ended:
    """How a forked process ended: its exit code (that of a signal is negative), what it printed and what its function returned."""

    code: int
    printed: str
    value: Any = None

    @property
    def is_raw(self) -> bool:
        return is_raw(self.printed)


def is_raw(text: str) -> bool:
    """Return whether a text has a traceback, an exception that nobody put into words, or terms of the libraries below."""
    return "Traceback (most recent" in text or "(unexpected" in text or bool(re.search(r"^[\w.]*(Error|Exception)\b:", text, re.MULTILINE))


class Fork:
    """A function in a forked process, with its output in a file."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._printed, self._returned = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (closed in `wait`)
        self._child = os.fork()
        if not self._child:
            _in_child(function, self._printed.fileno(), self._returned.fileno())

    def wait(self, *, seconds: float = HANGS_AFTER_S, kill_after: float | None = None, ask_after: float | None = None) -> Ended:
        """Wait for the end. A process that takes too long is killed and has the code HUNG.

        After `kill_after` seconds it is killed anyway; after `ask_after` it is asked to end, as torchrun does when another rank has ended.
        """
        handle = os.pidfd_open(self._child)
        if ask_after is not None and not select.select([handle], [], [], ask_after)[0]:
            os.kill(self._child, signal.SIGTERM)
        ready, _, _ = select.select([handle], [], [], seconds if kill_after is None else kill_after)
        os.close(handle)
        if not ready:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
        _, status = os.waitpid(self._child, 0)
        with self._printed as printed, self._returned as returned:
            printed.seek(0)
            returned.seek(0)
            content = returned.read()
            code = HUNG if not ready and kill_after is None else os.waitstatus_to_exitcode(status)
            return Ended(code, printed.read().decode(errors="replace"), pickle.loads(content) if content else None)


def forked(function: Callable[[], Any], *, seconds: float = HANGS_AFTER_S) -> Ended:
    """Call a function in a forked process and wait for its end."""
    return Fork(function).wait(seconds=seconds)


def _in_child(function: Callable[[], Any], printed: int, returned: int) -> None:
    """Call the function with its output in a file, and end the process as Python does: without `finally` blocks of the parent."""
    for number in (1, 2):
        os.dup2(printed, number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (until the process ends)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    code = 1
    try:
        value = function()
        code = value if isinstance(value, int) else 0
        os.write(returned, pickle.dumps(value))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


def command(argv: list[str], folder: Path, disk: Disk | None = None) -> int:
    """Run a command of esper in this folder, in this process."""
    os.chdir(folder)
    if sys.path[0] != "":
        sys.path.insert(0, "")
    if disk is not None:
        disk.install()
    return main(argv)


def ranks(
    argv: list[str], folder: Path, count: int, disk: Disk | None = None, *, kill_after: float | None = None, victim: int = 0
) -> list[Ended]:
    """Run a command in one process, or as torchrun does in several. Rank 0 has the disk; `kill_after` seconds, `victim` is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def one(rank: int) -> int:
        if count > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        return command(argv, folder, disk if rank == 0 else None)

    processes = [Fork(partial(one, rank)) for rank in range(count)]
    ended = {victim: processes[victim].wait(kill_after=kill_after)}
    has_died = ended[victim].code not in (0, 1, 2)
    return [ended.get(rank) or process.wait(ask_after=TO_NOTICE_S if has_died else None) for rank, process in enumerate(processes)]


# What a folder holds


def digest(trainer: Trainer, folder: Path) -> dict[str, str]:
    """Return digests of all that two equal runs have in common: events, the state of the latest checkpoint, the best one, other files."""

    def of(value: Any) -> str:
        return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()[:16]

    store = CheckpointStore.of_run(folder, kind=_versions(trainer))
    latest = store.load("latest")
    plain, tensors = split(_timeless(latest.state[trainer.part]))
    found = {
        "events": of([line for line in events_of(folder) if line["kind"] != "loader_restarted"]),
        "step": str(latest.step),
        "state": of(plain),
        "tensors": of([(name, tensor.numpy().tobytes()) for name, tensor in sorted(tensors.items())]),
        "best": str(store.load("best").step),
    }
    files = [*folder.glob("model.safetensors"), *folder.glob("league/members/*")]
    # The metadata name the run and with it the time of its start, so only the tensors are equal.
    contents = {path: sorted(read_tensors(path)[0].items()) for path in sorted(files)}
    return found | {
        str(path.relative_to(folder)): of([(name, tensor.numpy().tobytes()) for name, tensor in tensors])
        for path, tensors in contents.items()
    }


def _versions(trainer: Trainer) -> Versions:
    from esper.growth.run import KIND
    from esper.rl.checkpoints import LEARNER

    return LEARNER if trainer.kind == LEARNER.kind else KIND


def prepare(folder: Path) -> Path:
    """Make an empty folder with the user code that `grow` needs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / f"{MODULE}.py").write_text(USER_CODE)
    return folder


# Verdicts


@dataclass
class Tally:
    """What came of some trials. Each that is not good is described."""

    trials: int = 0
    right: int = 0  # the content was that of the undamaged file
    part: int = 0  # lines were dropped and counted
    refused: int = 0
    unnoticed: int = 0  # a file without a digest was read, and its values are others
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)

    def __iadd__(self, other: Tally) -> Tally:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


@dataclass
class Verdict:
    """What went wrong in one trial; empty lists if nothing did."""

    what: str
    lost: list[str] = field(default_factory=list)  # the run cannot go on, or is not what it would have been
    wrong: list[str] = field(default_factory=list)  # another content than was written, without a word
    hung: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.wrong or self.hung or self.raw)

    def look(self, ended: Ended, step: str) -> None:
        """Note a process that hung, or printed something raw."""
        text = " ".join(ended.printed.split())[-300:]
        if ended.code == HUNG:
            self.hung.append(f"{step}: {text}")
        elif ended.is_raw:
            self.raw.append(f"{step}: {text}")


def is_begun(trainer: Trainer, folder: Path) -> bool:
    return (folder / "run" / (GROW if trainer.command == ("grow",) else CONFIG)).exists()


def afterwards(trainer: Trainer, folder: Path, expected: dict[str, str], verdict: Verdict, *, reads: bool) -> None:
    """Read what a fault has left, train on, and compare with a run that nothing happened to."""
    if reads and (folder / "run").exists():
        for argv in (["runs", "ls", "."], ["report", "run"]) if is_begun(trainer, folder) else (["runs", "ls", "."],):
            ended = forked(lambda argv=argv: command(argv, folder))
            verdict.look(ended, " ".join(argv))
            if ended.code not in (0, 1, 2):
                verdict.wrong.append(f"{argv[0]} ended with {ended.code}: {ended.printed[-200:]}")
    again = trainer.resume() if is_begun(trainer, folder) else trainer.begin()
    for rank, ended in enumerate(ranks(again, folder, trainer.ranks)):
        verdict.look(ended, f"resume, rank {rank}")
        if ended.code:
            verdict.lost.append(f"{' '.join(again[:4])} ended with {ended.code}: {' '.join(ended.printed.split())[-300:]}")
    if verdict.lost or verdict.hung:
        return
    try:
        found = digest(trainer, folder / "run")
    except (OSError, ValueError, KeyError) as error:
        verdict.lost.append(f"{type(error).__name__}: {error}")
        return
    different = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    if different:
        verdict.lost.append(f"not as uninterrupted: {', '.join(sorted(different))}")
    kinds = [json.loads(line)["kind"] for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    if not {"run_ended", "growth_finished"} & set(kinds):
        verdict.lost.append("the resumed run has no end")


def uninterrupted(trainer: Trainer, folder: Path) -> tuple[dict[str, str], list[str], float]:
    """Train once without a fault. Return the digests, the calls that touch the disk, and the seconds it took."""
    prepare(folder)
    calls, disk = folder / "calls", Disk(folder / "run")

    def train() -> int:
        code = command(trainer.begin(), folder, disk)
        calls.write_text(" ".join(disk.calls))
        return code

    begin = time.monotonic()
    ended = [forked(train)] if trainer.ranks == 1 else ranks(trainer.begin(), folder, trainer.ranks)
    seconds = time.monotonic() - begin
    assert not any(one.code for one in ended), [one.printed[-2000:] for one in ended]
    return digest(trainer, folder / "run"), calls.read_text().split() if calls.exists() else [], seconds
