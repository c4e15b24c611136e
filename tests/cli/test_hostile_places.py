"""Commands as real processes under faults: signals, full disks, lost folders, odd names, closed outputs."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

import esper.files
from esper.cli.command import CommandError, failures
from esper.cli.main import main
from esper.controller.learned import save_controller
from esper.runs.signals import StopSignals
from tests.cli import arena_runs
from tests.cli.test_controller import OPTIONS as CONTROLLER
from tests.cli.test_ppo import OPTIONS as PPO
from tests.commands import last_line
from tests.controller.policies import trained_policy
from tests.processes import start

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

SLOW_CODE = """
import time, torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

class Slow(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.2)
        return super().__getitem__(index)

def make_loaders():
    inputs = torch.randn(64, 6)
    data = inputs, inputs[:, :3].argmax(dim=1)
    return torch.utils.data.DataLoader(Slow(*data), batch_size=64), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), 64)
"""
# Each takes seconds for one update, so that a second signal comes before the first has had its effect.
LONG = {
    "grow": ["--model", "slowcode:make_model", "--data", "slowcode:make_loaders", "--epochs", "50", "--device", "cpu"],
    "ppo train": ["cue", *PPO, "--num-steps", "65536", "--bptt-length", "16", "--total-steps", "10000000"],
    "controller train": [*CONTROLLER, "--samples-of-a-life", "400000", "800000", "--rounds", "100"],
    "arena train": [*arena_runs.OPTIONS, "--num-steps", "2000", "--total-steps", "10000000"],
}


def read_until(stream: IO[str], text: str) -> str:
    lines: list[str] = []
    while text not in "".join(lines[-1:]):
        line = stream.readline()
        assert line, f"{text!r} did not come: {''.join(lines)}"
        lines.append(line)
    return "".join(lines)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_with_its_own_code(number: signal.Signals, code: int) -> None:
    def train() -> None:
        with failures(Path("run"), "ppo train"), StopSignals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), number)
            time.sleep(1)

    with pytest.raises(CommandError, match="stopped at once; nothing was trained yet") as caught:
        train()
    assert caught.value.exit_code == code


@pytest.mark.slow
@pytest.mark.parametrize("command", LONG)
def test_sigterm_twice_ends_a_training_at_once_with_143(command: str, tmp_path: Path) -> None:
    (tmp_path / "slowcode.py").write_text(SLOW_CODE)
    process = start(*command.split(), *LONG[command], "--run", "run", "--json")
    read_until(process.stdout, " on cpu")
    while command == "grow" and not Path("run/checkpoints/latest").exists():  # it has begun; the others write one at their end
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    read_until(process.stderr, "once more to stop at once")
    process.send_signal(signal.SIGTERM)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.startswith("error: stopped at once; go on with: esper")
    assert errors.count("\n") == 1, errors
    assert "stopped at once" in shown.splitlines()[-1]


# Outputs that take nothing


def run(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120, **options}
    return subprocess.run([sys.executable, "-m", "esper.cli.main", *argv], text=True, **settings)  # type: ignore[call-overload,no-any-return]


ALL_THAT_PRINT = [["--version"], ["--version", "--json"], ["--help"], ["ppo", "train", "--help"], ["ppo", "nonsense", "--json"]]


@pytest.mark.slow
@pytest.mark.parametrize("argv", ALL_THAT_PRINT, ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_the_output_is_named_in_one_line(argv: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        finished = run(*argv, stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert finished.returncode == 1
    *before, last = finished.stderr.splitlines()
    assert last == "error: the output cannot be written: the disk is full; send it elsewhere, or free some space"
    assert before == (["error: unknown command 'ppo nonsense'; did you mean 'esper ppo envs'?"] if "nonsense" in argv else [])


@pytest.mark.slow
@pytest.mark.parametrize("argv", ALL_THAT_PRINT, ids=" ".join)
def test_a_closed_output_pipe_is_not_an_error(argv: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    finished = run(*argv, stdout=writing)
    os.close(writing)
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert "BrokenPipe" not in finished.stderr
    assert finished.stderr.count("\n") == ("nonsense" in argv)


@pytest.mark.slow
def test_a_closed_error_pipe_does_not_change_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        assert run("ppo", "nonsense", stderr=full).returncode == 2
    closed = {stream: subprocess.run(f"{sys.executable} -m esper.cli.main --version {stream}", shell=True) for stream in (">&-", "2>&-")}
    assert [finished.returncode for finished in closed.values()] == [0, 0]


@pytest.mark.slow
def test_a_terminal_that_knows_only_ascii_gets_everything_that_it_can_show() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "NO_COLOR": "1", "COLUMNS": "40"}
    for argv in (["grow"], ["grow", "--help"], ["ppo", "nonsense", "–"], ["doctor"]):
        process = start(*argv, env=environment)
        _, errors = process.communicate(timeout=60)
        assert "Unicode" not in errors
        assert process.returncode == {"grow": 2 if len(argv) == 1 else 0, "ppo": 2, "doctor": 0}[argv[0]], errors


# Names of run folders


LONG_NAME = "x" * 256
TAKE_A_RUN = {
    "ppo train": ["ppo", "train", "cue", *PPO, "--total-steps", "64", "--run"],
    "ppo train --resume": ["ppo", "train", "--resume", "--run"],
    "ppo eval": ["ppo", "eval"],
    "grow": ["grow", "--task", "digits", "--epochs", "1", "--run"],
    "grow --resume": ["grow", "--resume", "--run"],
    "grow report": ["grow", "report"],
    "grow --controller": ["grow", "--task", "digits", "--epochs", "1", "--controller", f"./{LONG_NAME}", "--run"],
    "grow --config": ["grow", "--task", "digits", "--config"],
    "controller train": ["controller", "train", *CONTROLLER, "--rounds", "1", "--run"],
    "arena train": ["arena", "train", *arena_runs.OPTIONS, "--total-steps", "40", "--run"],
    "arena eval": ["arena", "eval"],
    "arena eval --replay": ["arena", "match", "weak", "weak", "--battles", "2", "--replay"],
    "arena league": ["arena", "league"],
    "arena match": ["arena", "match", "strong"],
    "arena replay": ["arena", "replay"],
    "arena watch": ["arena", "watch"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", TAKE_A_RUN)
def test_a_name_that_is_too_long_is_the_users_mistake(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TAKE_A_RUN[command], LONG_NAME, "--json"]) == 2
    captured = capsys.readouterr()
    assert "is too long: file systems take 255 bytes at most; choose a shorter one" in captured.err
    assert captured.err.count("\n") == 1
    assert LONG_NAME not in captured.err, "it is shortened"
    assert "too long" in last_line(captured.out)["error"]
    assert list(tmp_path.iterdir()) == []


NOT_UTF8 = os.fsdecode(b"run-\xff")


@pytest.mark.slow
def test_a_run_in_a_folder_whose_name_is_not_utf8_is_trained_resumed_and_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ppo", "train", "cue", *PPO, "--total-steps", "64", "--run", NOT_UTF8, "--json"]) == 0
    assert last_line(capsys.readouterr().out)["run"] == "run-\\udcff"
    assert main(["ppo", "train", "--resume", "--run", NOT_UTF8, "--total-steps", "128", "--json"]) == 0
    assert main(["ppo", "eval", NOT_UTF8, "--episodes", "2", "--json"]) == 0
    assert main(["grow", "--resume", "--run", NOT_UTF8, "--json"]) == 2
    captured = capsys.readouterr()
    assert "run-\\udcff" in captured.err
    assert "run-\\udcff" in last_line(captured.out)["error"]
    assert main(["ppo", "train", "cue", *PPO, "--total-steps", "64", "--run", f"{NOT_UTF8}-2", "--tensorboard"]) == 2
    assert "TensorBoard cannot write to run-\\udcff-2/tensorboard: the name is not UTF-8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_grows_in_a_folder_whose_name_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / NOT_UTF8
    for epochs in ("1", "2"):
        more = ["--resume"] if epochs == "2" else []
        assert main(["grow", "--task", "digits", "--device", "cpu", "--epochs", epochs, "--run", str(place), "--json", *more]) == 0
    assert main(["grow", "report", str(place), "--json"]) == 0
    assert last_line(capsys.readouterr().out)["report"].endswith("run-\\udcff/report.html")
    assert "run-\\udcff" in (place / "report.html").read_text()


@pytest.mark.slow
def test_a_setting_that_is_not_utf8_cannot_be_saved_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_controller(tmp_path / f"{NOT_UTF8}.safetensors", trained_policy())
    argv = ["grow", "--task", "digits", "--epochs", "1", "--device", "cpu", "--run", "run"]
    assert main([*argv, "--controller", f"./{NOT_UTF8}.safetensors"]) == 2
    error = capsys.readouterr().err
    assert "controller: ./run-\\udcff.safetensors is not UTF-8 and cannot be saved with the run; rename it" in error
    assert not (tmp_path / "run").exists()


# Disks


@pytest.fixture(params=["ppo train", "grow", "controller train", "arena train"])
def short_training(request: pytest.FixtureRequest) -> list[str]:
    """A training of a few checkpoints, without the folder of its run."""
    return {
        "ppo train": ["ppo", "train", "cue", *PPO, "--total-steps", "640", "--checkpoint-every", "1"],
        "grow": ["grow", "--task", "digits", "--device", "cpu", "--epochs", "4"],
        "controller train": ["controller", "train", *CONTROLLER, "--rounds", "4"],
        "arena train": ["arena", "train", *arena_runs.OPTIONS, "--total-steps", "160"],
    }[request.param]


class SmallDisk:
    """`os`, as `esper.files` sees it, on a disk that is full after some writes, or from which something is taken away."""

    def __init__(self, writes: int, then: Callable[[], None]) -> None:
        self.writes, self.then = writes, then

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, content: Any) -> int:
        self.writes -= 1
        if self.writes < 0:
            self.then()
        return os.write(descriptor, content)


@pytest.mark.slow
def test_a_training_on_a_full_disk_says_what_to_free_and_how_to_go_on(
    short_training: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(esper.files, "os", SmallDisk(18, full))
        assert main([*short_training, "--run", "run", "--json"]) == 1
    captured = capsys.readouterr()
    error = captured.err.splitlines()[-1]
    command = " ".join(short_training[: 1 + (short_training[0] != "grow")])
    assert error.startswith("error: the run in run cannot go on: the disk is full (run/")
    assert error.endswith(f"; free some space, then go on with: esper {command} --resume --run run")
    assert "Traceback" not in captured.err
    assert f"error: {last_line(captured.out)['error']}" == error
    assert main([*short_training[: 1 + (short_training[0] != "grow")], "--resume", "--run", "run"]) == 0, "as it says"


@pytest.mark.slow
def test_a_folder_removed_during_its_training_is_reported_as_lost(
    short_training: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()

    def removed() -> None:
        shutil.rmtree("run", ignore_errors=True)

    with monkeypatch.context() as patch:
        patch.setattr(esper.files, "os", SmallDisk(18, removed))
        assert main([*short_training, "--run", "run", "--json"]) == 1
    captured = capsys.readouterr()
    error = captured.err.splitlines()[-1]
    assert error == "error: the folder run was removed or renamed during the training, so the run cannot go on; start a new one"
    assert last_line(captured.out) == {"error": error.removeprefix("error: ")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere"], "and it is not made again"


@pytest.mark.slow
def test_a_disk_full_from_the_start_is_not_reported_as_a_wrong_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(esper.files, "os", SmallDisk(0, full))
    assert main(["ppo", "train", "cue", *PPO, "--total-steps", "64", "--run", "run"]) == 1
    assert capsys.readouterr().err.startswith("error: no run can be made in run: the disk is full")


@pytest.mark.parametrize(
    ("number", "reason", "code"),
    [
        (errno.EACCES, "there is no permission for run", 2),
        (errno.EROFS, "run is on a file system that cannot be written to", 2),
        (errno.EIO, "Input/output error (run)", 1),
    ],
)
def test_a_folder_that_cannot_be_made_is_named_with_the_reason(
    number: int, reason: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "mkdir", refused)
    monkeypatch.setattr(Path, "mkdir", refused)
    assert main(["ppo", "train", "cue", *PPO, "--total-steps", "64", "--run", "run"]) == code
    assert capsys.readouterr().err == f"error: no run can be made in run: {reason}; choose another folder with --run\n"
