"""Commands as real processes where something is against them: signals, full disks, lost folders, odd names, outputs that take nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from esper.cli.failures import failures
from esper.cli.outcome import CommandError
from esper.cli.stop_signals import StopSignals
from tests.cli import arena_runs
from tests.test_cli_controller import OPTIONS as CONTROLLER
from tests.test_cli_train import OPTIONS as PPO

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
    "controller train": [*CONTROLLER, "--num-steps", "600", "--rounds", "100"],
    "arena train": [*arena_runs.OPTIONS, "--num-steps", "2000", "--total-steps", "10000000"],
}


def start(*argv: str, **options: object) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-m", "esper.cli.main", *argv], text=True, **streams)  # type: ignore[call-overload,no-any-return]


def read_until(stream: IO[str], text: str) -> str:
    lines: list[str] = []
    while text not in "".join(lines[-1:]):
        line = stream.readline()
        assert line, f"{text!r} did not come: {''.join(lines)}"
        lines.append(line)
    return "".join(lines)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_with_the_code_of_its_own(number: signal.Signals, code: int) -> None:
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
    assert process.stdout is not None
    assert process.stderr is not None
    read_until(process.stdout, " on cpu")  # it has begun
    process.send_signal(signal.SIGTERM)
    read_until(process.stderr, "once more to stop at once")
    process.send_signal(signal.SIGTERM)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.startswith("error: stopped at once; go on with: esper")
    assert errors.count("\n") == 1, errors
    assert "stopped at once" in shown.splitlines()[-1]
