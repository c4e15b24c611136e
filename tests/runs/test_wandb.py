"""Weights & Biases as a sink: offline by default, silent, and required only on request."""

from __future__ import annotations

import importlib.machinery
import math
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from esper.cli.main import main
from esper.growth.events import EpochEnded
from esper.runs import Event, EventLog, WandbSink, read
from esper.runs.events import scalars, scalars_of
from esper.runs.sinks import WANDB_ID

# A process of its own: W&B starts a service, and keeps it for as long as the process lives. Named addresses are the network here, since
# it talks to its service through a socket of the machine.
OFFLINE = """
import atexit, os, socket, sys
from esper.runs import Event, EventLog, SinkFailed, WandbSink, read

def refuse(host, *more, **options):
    asked.append(host)
    raise OSError(f"the network was asked for {host}")

def check():
    if asked:
        print("the network was asked for", asked, flush=True)
        os._exit(3)

asked = []
socket.getaddrinfo = refuse
atexit.register(check)  # the first to register is the last to be called: W&B says its last words at the end of the process

class Trained(Event, tag="trained"):
    step: int
    loss: float
    entropy: dict[str, float]

before = sys.stdout, sys.stderr
sink = WandbSink("run", run="maze-7", config={"ppo": {"seed": 3}})
with EventLog("run/events.jsonl", "maze-7", sinks=[sink]) as log:
    log.emit(Trained(step=10, loss=0.5, entropy={"op": 0.8125}))
    log.emit(Trained(step=20, loss=float("nan"), entropy={"op": 0.6875}))
    log.emit(Trained(step=5, loss=0.21875, entropy={}))
assert (sys.stdout, sys.stderr) == before
assert not any(isinstance(record.event, SinkFailed) for record in read("run/events.jsonl"))
import wandb
assert wandb.run is None
"""


class Measured(Event, tag="test_measured"):
    step: int
    loss: float
    is_done: bool = True
    name: str = "text"
    norms: dict[str, float] = msgspec.field(default_factory=dict)
    nested: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)


def test_the_scalars_of_an_event_are_its_finite_numbers_including_nested_ones() -> None:
    event = Measured(step=3, env=1, loss=0.5, norms={"core": 2.0, "actor": math.inf}, nested={"a": {"b": 7}})
    assert scalars(event) == {"test_measured/loss": 0.5, "test_measured/norms/core": 2.0, "test_measured/nested/a/b": 7}


class StandIn(types.ModuleType):
    """The part of W&B's module that the sink uses. It keeps what it was told."""

    Error = type("Error", (Exception,), {})

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.begun: dict[str, Any] = {}
        self.sessions: list[str] = []  # id of the W&B run of every session
        self.dir = ""  # for the files of the latest session
        self.resumed = False  # what W&B says about the run: it has it already
        self.logged: list[dict[str, float]] = []
        self.metrics: list[tuple[str, str]] = []
        self.is_finished = False

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **options: Any) -> StandIn:
        self.begun = options
        self.sessions.append(options["id"])
        self.resumed = options["resume"] == "allow" and options["id"] in self.sessions[:-1]
        self.dir = str(Path(options["dir"]) / "wandb" / f"offline-run-{len(self.sessions)}-{options['id']}" / "files")
        Path(self.dir).mkdir(parents=True)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # so that what the sink sets does not outlive the test
    return module


class Ended(Event, tag="test_ended"):
    utility: float


def test_wandb_gets_the_finite_numbers_of_every_event_at_its_step(tmp_path: Path, stand_in: StandIn) -> None:
    sink = WandbSink(tmp_path, run="maze-7", config={"seed": 3})
    with EventLog(tmp_path / "events.jsonl", "maze-7", sinks=[sink]) as log:
        log.emit(Measured(step=10, loss=0.5, norms={"core": 2.0, "actor": math.inf}))
        log.emit(Ended(utility=-0.25))
        log.emit(Measured(step=5, loss=math.nan))
        log.emit(Ended(utility=0.75, env=4), rank=1, step=20)
    assert stand_in.logged == [
        {"step": 10, "test_measured/loss": 0.5, "test_measured/norms/core": 2.0},
        {"step": 10, "test_ended/utility": -0.25},
        {"step": 20, "rank1/env4/test_ended/utility": 0.75},
    ]
    assert stand_in.metrics == [("*", "step")]
    assert (stand_in.begun["name"], stand_in.begun["mode"], stand_in.begun["config"]) == ("maze-7", "offline", {"seed": 3})
    assert stand_in.is_finished


def record_of(folder: Path) -> list[dict[str, float]]:
    """Return what W&B should hold about a run: the numbers of every line of its log, with their step."""
    return [{"step": record.step, **values} for record in read(folder / "events.jsonl") if (values := scalars_of(record))]


def killed_after_a_checkpoint(folder: Path, stand_in: StandIn, mode: Literal["offline", "online"]) -> Iterator[EventLog]:
    """Yield the log of a run that is killed some events after its checkpoint, and then that of the resumed run."""
    with EventLog(folder / "events.jsonl", "maze", sinks=[WandbSink(folder, run="maze", mode=mode)]) as log:
        log.emit(Measured(step=10, loss=0.5))
        offset = log.offset()
        log.emit(Measured(step=20, loss=0.25))
        log.emit(Ended(utility=1.0))
        yield log
    log = EventLog.resume(folder / "events.jsonl", offset, step=10, sinks=[WandbSink(folder, run="maze", mode=mode)])
    with log:
        yield log


def test_a_run_that_is_resumed_offline_is_one_wandb_run_with_all_events_once(tmp_path: Path, stand_in: StandIn) -> None:
    for session, log in enumerate(killed_after_a_checkpoint(tmp_path, stand_in, "offline")):
        if session == 1:
            stand_in.logged = stand_in.logged[3:]  # the first session's: W&B keeps them in a file of their own
            log.emit(Measured(step=20, loss=0.25))
            log.emit(Measured(step=30, loss=0.125))
    assert len(set(stand_in.sessions)) == 1
    assert [path.name for path in (tmp_path / "wandb").glob("offline-run-*")] == [f"offline-run-2-{stand_in.sessions[0]}"]
    assert stand_in.logged == record_of(tmp_path)
    assert [values["test_measured/loss"] for values in stand_in.logged if "test_measured/loss" in values] == [0.5, 0.25, 0.125]


def test_a_run_that_is_resumed_online_goes_on_and_repeats_nothing(tmp_path: Path, stand_in: StandIn) -> None:
    for session, log in enumerate(killed_after_a_checkpoint(tmp_path, stand_in, "online")):
        if session == 1:
            log.emit(Measured(step=20, loss=0.25))
            log.emit(Ended(utility=1.0))
            log.emit(Ended(utility=2.0))
            log.emit(Measured(step=30, loss=0.125))
    assert len(set(stand_in.sessions)) == 1
    assert stand_in.begun["resume"] == "allow"
    shown = [(values["step"], values["test_measured/loss"]) for values in stand_in.logged if "test_measured/loss" in values]
    assert shown == [(10, 0.5), (20, 0.25), (30, 0.125)]
    assert [values["test_ended/utility"] for values in stand_in.logged if "test_ended/utility" in values] == [1.0, 2.0]


def test_a_run_that_begins_anew_in_its_folder_keeps_its_wandb_run_without_the_events_of_before(tmp_path: Path, stand_in: StandIn) -> None:
    for _ in range(2):
        with EventLog(tmp_path / "events.jsonl", "maze", sinks=[WandbSink(tmp_path, run="maze")]) as log:
            log.emit(Measured(step=10, loss=0.5))
        (tmp_path / "events.jsonl").unlink()
    assert [path.name for path in (tmp_path / "wandb").glob("offline-run-*")] == [f"offline-run-2-{stand_in.sessions[0]}"]
    assert len(set(stand_in.sessions)) == 1


def test_an_id_that_is_damaged_is_replaced(tmp_path: Path, stand_in: StandIn) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / WANDB_ID).write_text("../../elsewhere")
    WandbSink(tmp_path, run="maze").close()
    assert stand_in.sessions[0].isalnum()
    assert (tmp_path / "wandb" / WANDB_ID).read_text().strip() == stand_in.sessions[0]


HOST = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def make_loaders():
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    return torch.utils.data.DataLoader(data, batch_size=16), torch.utils.data.DataLoader(data, batch_size=16)
"""


@pytest.mark.slow
def test_a_growing_host_and_its_twin_are_two_runs_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "hostcode.py").write_text(HOST)
    words = "grow --model hostcode:make_model --data hostcode:make_loaders --controller never --epochs 2 --wandb offline --twin --run run"
    assert main(words.split()) == 0
    losses = [record.event.val_loss for record in read("run/events.jsonl") if isinstance(record.event, EpochEnded)]
    told = [(values["step"], values["epoch_ended/val_loss"]) for values in stand_in.logged if "epoch_ended/val_loss" in values]
    assert told == 2 * [(1, losses[0]), (2, losses[1])]  # a twin of a host that never grows is the same
    assert stand_in.begun["name"] == "run-twin"
    assert stand_in.begun["dir"] == "run/twin"
    sys.modules.pop("hostcode")


@pytest.fixture
def without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # so that what the sink sets does not outlive the test


@pytest.mark.usefixtures("without_wandb")
def test_a_missing_wandb_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"pip install 'esper-grow\[wandb\]'"):
        WandbSink(tmp_path / "run", run="run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without_wandb")
def test_a_missing_wandb_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ppo", "train", "cue", "--wandb", "offline", "--run", "run"]) == 2
    assert "pip install 'esper-grow[wandb]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_wandb_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'offline', 'online'.*not 'onlin'"):
        WandbSink(tmp_path, run="run", mode="onlin")  # type: ignore[arg-type]


def isolated(folder: Path) -> dict[str, str]:
    """Variables under which no account, setting or cache of the user is touched."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**kept, "HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "settings")}


@pytest.mark.extra("wandb")
def test_offline_mode_writes_into_the_run_folder_without_network_access(tmp_path: Path) -> None:
    finished = subprocess.run([sys.executable, "-c", OFFLINE], cwd=tmp_path, env=isolated(tmp_path), capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    (kept,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    content = kept.read_bytes()
    for expected in (b"trained/loss", b"0.5", b"0.21875", b"trained/entropy/op", b"0.8125", b"0.6875", b"maze-7", b"seed"):
        assert expected in content, expected


@pytest.mark.extra("wandb")
def test_a_run_on_the_command_line_is_kept_offline_and_goes_on_as_the_same_run(tmp_path: Path) -> None:
    words = "ppo train cue --wandb offline --run run --num-envs 4 --num-steps 16 --num-minibatches 2 --total-steps 1 --eval-episodes 0"
    for more in (words, "ppo train --resume --run run --total-steps 128"):
        command = [sys.executable, "-m", "esper.cli.main", *more.split()]
        finished = subprocess.run(command, cwd=tmp_path, env=isolated(tmp_path), capture_output=True, text=True)
        assert (finished.returncode, finished.stderr) == (0, "")
        assert "wandb:" not in finished.stdout
        time.sleep(1.1)  # W&B names the folders of sessions by the second
    (kept,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    assert kept.name == f"run-{(tmp_path / 'run/wandb' / WANDB_ID).read_text().strip()}.wandb"
    # W&B writes a number twice, into its history and its summary; there were two updates.
    assert kept.read_bytes().count(b"update/entropy/action") == 2 * 2
