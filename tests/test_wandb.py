"""Weights & Biases as a sink: offline unless told, silent, and missed only by those who ask for it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from esper.cli.main import main
from esper.events import Event, WandbSink
from esper.events.scalars import scalars

# A process of its own: W&B starts a service, and keeps it for as long as the process lives. Named addresses are the network here, since
# it talks to its service through a socket of the machine.
OFFLINE = """
import atexit, os, socket, sys
from esper.events import Event, EventLog, SinkFailed, WandbSink, read

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


def test_the_scalars_of_an_event_are_its_finite_numbers_also_those_in_dictionaries() -> None:
    event = Measured(step=3, env=1, loss=0.5, norms={"core": 2.0, "actor": math.inf}, nested={"a": {"b": 7}})
    assert scalars(event) == {"test_measured/loss": 0.5, "test_measured/norms/core": 2.0, "test_measured/nested/a/b": 7}


@pytest.fixture
def without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # so that what the sink sets does not outlive the test


@pytest.mark.usefixtures("without_wandb")
def test_a_missing_wandb_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"pip install 'esper\[wandb\]'"):
        WandbSink(tmp_path / "run", run="run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without_wandb")
def test_a_missing_wandb_is_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ppo", "train", "cue", "--wandb", "offline", "--run", "run"]) == 2
    assert "pip install 'esper[wandb]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_another_mode_than_offline_and_online_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'offline', 'online'.*not 'onlin'"):
        WandbSink(tmp_path, run="run", mode="onlin")  # type: ignore[arg-type]


def isolated(folder: Path) -> dict[str, str]:
    """Variables under which no account, setting or cache of the user is touched."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**kept, "HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "settings")}


def test_offline_the_numbers_lie_in_the_run_folder_and_no_network_is_asked(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed; get it with: pip install 'esper[wandb]'")
    finished = subprocess.run([sys.executable, "-c", OFFLINE], cwd=tmp_path, env=isolated(tmp_path), capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    (kept,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    content = kept.read_bytes()
    for expected in (b"trained/loss", b"0.5", b"0.21875", b"trained/entropy/op", b"0.8125", b"0.6875", b"maze-7", b"seed"):
        assert expected in content, expected


def test_a_run_on_the_command_line_is_kept_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed; get it with: pip install 'esper[wandb]'")
    words = "ppo train cue --wandb offline --run run --num-envs 4 --num-steps 16 --num-minibatches 2 --total-steps 1 --eval-episodes 0"
    command = [sys.executable, "-m", "esper.cli.main", *words.split()]
    finished = subprocess.run(command, cwd=tmp_path, env=isolated(tmp_path), capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "wandb:" not in finished.stdout
    (kept,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    assert b"update/entropy/action" in kept.read_bytes()
