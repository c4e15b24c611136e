"""The command line: help, mistakes, exit codes, JSON. Runs of training are in test_ppo.py."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import esper
from esper.cli.doctor import EXTRAS, REQUIRED
from esper.cli.main import COMMANDS, function_of, main
from tests.commands import last_line

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

HELP_AT_EVERY_LEVEL = """
import sys, time
began = time.process_time()
from esper.cli.main import COMMANDS, main
for words in ([], ["ppo"], *(name.split() for name in COMMANDS)):
    assert main([*words, "--help"]) == 0
assert "torch" not in sys.modules and "numpy" not in sys.modules
print(time.process_time() - began)
"""


@pytest.mark.slow
def test_help_at_every_level_imports_neither_torch_nor_numpy() -> None:
    finished = subprocess.run([sys.executable, "-c", HELP_AT_EVERY_LEVEL], capture_output=True, text=True, check=True)
    assert float(finished.stdout.splitlines()[-1]) < 5, "together they take well under a second of CPU time"


def test_help_texts_are_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert main(["arena", "train", "--help"]) == 0
    printed = capsys.readouterr().out
    text, options = printed.split("options  ", maxsplit=1)
    paragraphs = [line for line in text.splitlines() if not line.startswith("  ")]
    assert max(map(len, paragraphs)) > 60
    assert max(map(len, (*paragraphs, *options.splitlines()))) <= 72
    assert "\n\n\n" not in text


def test_completions_for_shells_are_not_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripts = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["arena", "match", "--tyro-print-completion", "bash"]) == 0
        scripts.append(capsys.readouterr().out)
    assert scripts[0] == scripts[1]
    assert max(map(len, scripts[0].splitlines())) > 100


def test_the_installed_program_knows_its_version() -> None:
    program = Path(sys.executable).with_name("esper")
    finished = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert finished.stdout == f"esper {esper.__version__}\n"


def test_every_command_of_the_table_can_be_run() -> None:
    for command in COMMANDS.values():
        assert callable(function_of(command))


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed and command.help in listed for name, command in COMMANDS.items())


@pytest.mark.parametrize(
    ("asked", "usage"), [("help", "esper COMMAND"), ("ppo help", "esper ppo COMMAND"), ("doctor help", "esper doctor")]
)
def test_help_may_be_asked_for_as_a_word(asked: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked.split()) == 0
    assert f"usage: {usage}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command 'trian'"),
        (["ppo", "trian"], "did you mean 'esper ppo train'"),
        (["--verbose"], "needs a command before it"),
        (["ppo", "train"], "name an environment"),
        (["ppo", "train", "cue", "--num-evns", "3"], "--num-envs"),
        (["ppo", "train", "cue", "--num-envs", "0"], "--num-envs: expected an int > 0 and <= 1048576, got 0"),
        (["ppo", "train", "cue", "--num-envs", "1000000000000"], "--num-envs: expected an int > 0 and <= 1048576, got 1000000000000"),
        (["ppo", "train", "cue", "--hidden-size", "1000000000000"], "--ppo.network.hidden-size: expected an int > 0 and <= 65536"),
        (["ppo", "train", "cue", "--threads", "100000000"], "--threads: expected an int > 0 and <= 1024 or None"),
        (["ppo", "train", "cue", "--num-envs", "100000", "--num-steps", "100000"], "--num-envs: expected at most 21474 for 100000 steps"),
        (["ppo", "train", "cue", "--gamma", "1.5"], "--ppo.gamma: expected a float >= 0 and <= 1, got 1.5"),
        (["ppo", "train", "cue", "--encoder-sizes", "8", "0"], "--ppo.network.encoder-sizes: expected"),
        (["ppo", "train", "cue", "--bptt-length", "1000000"], "--ppo.bptt-length: expected a divisor of num_steps (128), got 1000000"),
        (["ppo", "train", "cue", "--run", "/dev/null/run"], "no run can be made in /dev/null/run"),
        (["ppo", "train", "cue", "--wandb", "onlin"], "online"),
        (["ppo", "train", "cue", "--env-args", "delay"], "'delay' is not of the form KEY=VALUE"),
        (["ppo", "train", "cue", "--env-args", "dealy=3"], "dealy"),
        (["ppo", "train", "cue", "--env-args", "delay=0"], "delay at least 1"),
        (["ppo", "train", "cuee"], "did you mean 'cue'"),
        (["ppo", "train", "--preset", "pendelum"], "there is no preset 'pendelum'; there are cartpole"),
        (["ppo", "train", "--preset", "pendulum", "--config", "a.toml"], "--preset sets what --config and --resume read"),
        (["ppo", "train", "--preset", "pendulum", "--resume", "--run", "nowhere"], "--preset sets what --config and --resume read"),
        (["ppo", "train", "cue", "--config", "none.toml"], "no such config file: none.toml"),
        (["ppo", "train", "cue", "--config"], "--config needs a value"),
        (["ppo", "train", "--resume"], "--resume needs the folder of the run"),
        (["ppo", "train", "--resume", "--run", "nowhere"], "there is no run in nowhere"),
        (["ppo", "train", "--resume", "--run", "nowhere", "--config", "a.toml"], "leave --config out"),
        (["ppo", "eval", "nowhere"], "there is no run in nowhere"),
        (["ppo", "eval"], "RUN"),
        (["ppo", "eval", "nowhere", "--checkpoint", "first"], "best"),
    ],
)
def test_a_mistake_is_explained_and_ends_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*argv, "--json"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert message in str(last_line(captured.out)["error"])
    assert not list(tmp_path.iterdir()), "a mistake leaves nothing behind"


def test_a_mistake_is_shown_with_its_traceback_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "ppo", "train", "cuee"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_and_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(argv: list[str], prog: str) -> None:
        raise RuntimeError("the disk\nis on fire")

    monkeypatch.setattr("esper.cli.doctor.run", broken)
    assert main(["doctor"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: RuntimeError: the disk is on fire")
    assert "--debug" in error
    assert error.count("\n") == 1


def test_a_lack_of_memory_is_named_with_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np
    import torch

    greedy: list[Callable[[], object]] = [lambda: torch.empty(2**56), lambda: np.empty(2**60, np.int8), lambda: bytearray(2**62)]
    for ask in greedy:
        monkeypatch.setattr("esper.cli.doctor.run", lambda argv, prog, ask=ask: ask())
        assert main(["doctor"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: there is not enough memory for this; ask for smaller sizes"), error
        assert "unexpected" not in error


def test_ctrl_c_before_any_work_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: list[str], prog: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("esper.cli.doctor.run", interrupted)
    assert main(["doctor", "--json"]) == 130
    assert last_line(capsys.readouterr().out) == {"error": "interrupted"}


def test_the_doctor_reports_the_version_of_torch_and_a_writable_folder(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main(["doctor", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    assert result["versions"]["torch"] == torch.__version__
    assert result["folder_is_writable"] is True


def test_the_doctor_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("esper.cli.doctor.EXTRAS", {"gym": ("no-such-package",)})
    assert main(["doctor"]) == 0
    assert "pip install 'esper-grow[gym]'" in capsys.readouterr().out


def test_the_doctor_lists_every_package_that_esper_needs_or_can_use() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = {extra: _names_of(needed) for extra, needed in project["optional-dependencies"].items() if extra not in FOR_DEVELOPERS}
    assert names == EXTRAS
    assert _names_of(project["dependencies"]) == REQUIRED


FOR_DEVELOPERS = ("dev", "bench", "interop", "docs")  # extras that no command of esper uses


def _names_of(requirements: list[str]) -> tuple[str, ...]:
    """Return the names of packages without extras, versions and markers."""
    return tuple(re.match(r"[\w.-]+", text)[0] for text in requirements)


def test_the_built_in_environments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ppo", "envs"]) == 0
    assert "cue " in capsys.readouterr().out


# Where values come from


def plan_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["ppo", "train", *argv, "--dry-run", "--json"]) == 0
    return last_line(capsys.readouterr().out)


def test_a_dry_run_prints_the_plan_and_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["cue", "--num-envs", "8", "--num-steps", "32", "--total-steps", "1000", "--device", "cpu", "--bptt-length", "16"]
    plan = plan_of(argv, capsys)["plan"]
    assert plan["steps_per_update"] == 8 * 32
    assert plan["updates"] == 4
    assert plan["minibatch"] == "2 sequences of 16 steps"
    assert plan["device"] == "cpu"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_preset_names_the_environment_and_its_settings_and_the_command_line_changes_them(capsys: pytest.CaptureFixture[str]) -> None:
    config = plan_of(["--preset", "cartpole", "--num-steps", "32"], capsys)["config"]
    assert (config["env"], config["total_steps"], config["ppo.num_steps"]) == ("CartPole-v1", 50_000, 32)
    assert config["ppo.network.core"] == "none"
    assert plan_of(["cue", "--preset", "cartpole"], capsys)["config"]["env"] == "cue"


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('env = "cue"\nnum_envs = 8\n[env_args]\ndelay = 7\n[ppo]\ngamma = 0.9\nseed = 5\n[ppo.network]\nhidden_size = 16\n')
    config = plan_of(["--config", str(path), "--seed", "6"], capsys)["config"]
    assert (config["num_envs"], config["ppo.gamma"], config["ppo.network.hidden_size"]) == (8, 0.9, 16)
    assert config["ppo.seed"] == 6
    assert config["env_args"] == {"delay": 7}
    assert config["total_steps"] == 200_000


def test_a_wrong_key_in_the_file_names_the_right_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[ppo]\nlerning_rate = 1.0\n")
    assert main(["ppo", "train", "cue", "--config", "mine.toml"]) == 2
    error = capsys.readouterr().err
    assert "mine.toml: ppo.lerning_rate: unknown key; did you mean 'learning_rate'?" in error


def test_the_path_of_a_nested_option_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["cue", "--learning-rate=0.5", "--hidden_size", "16", "--no-normalize-rewards"]
    config = plan_of(argv, capsys)["config"]
    assert (config["ppo.learning_rate"], config["ppo.network.hidden_size"], config["ppo.normalize_rewards"]) == (0.5, 16, False)


def test_environment_arguments_are_json_or_text() -> None:
    from esper.cli.ppo_train import parse_env_args

    words = ["a=3", "b=0.5", "c=true", "d=False", "e=None", "f=fast", "g=[1,2]", "h=x=y"]
    parsed = parse_env_args(words)
    assert parsed == {"a": 3, "b": 0.5, "c": True, "d": False, "e": None, "f": "fast", "g": [1, 2], "h": "x=y"}
