"""Runs given to a command of another kind: the error names the kind and the commands that take it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import esper
from esper.cli.main import main
from esper.config import Config, save
from esper.controller.config import ControllerConfig
from esper.controller.training import train_controller
from esper.experiment.config import GrowTaskConfig
from esper.growth.config import GrowthConfig
from esper.league.config import ArenaTrainConfig
from esper.league.training import load_player, train_arena
from esper.rl import TrainConfig, train_run
from esper.runs.folder import RunError, kind_of
from tests.commands import last_line

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

CONFIGS: dict[str, Config] = {
    "ppo": TrainConfig(env="cue"),
    "growth": GrowthConfig(),
    "controller": ControllerConfig(),
    "arena": ArenaTrainConfig(),
}
NAMED = {"ppo": "a ppo run", "growth": "a growth run", "controller": "a controller run", "arena": "an arena run"}
COMMANDS = {
    "ppo": "esper ppo train --resume --run x, esper ppo eval x",
    "growth": "esper grow --resume --run x, esper report x",
    "controller": "esper controller train --resume --run x",
    "arena": "esper arena train --resume --run x, esper arena eval x, esper arena league x, esper arena match x strong",
}
TAKES: dict[str, tuple[str, list[str]]] = {
    "ppo train": ("ppo", ["ppo", "train", "--resume", "--run", "x"]),
    "ppo eval": ("ppo", ["ppo", "eval", "x"]),
    "grow": ("growth", ["grow", "--resume", "--run", "x"]),
    "grow report": ("growth", ["grow", "report", "x"]),
    "controller train": ("controller", ["controller", "train", "--resume", "--run", "x"]),
    "arena train": ("arena", ["arena", "train", "--resume", "--run", "x"]),
    "arena eval": ("arena", ["arena", "eval", "x"]),
    "arena league": ("arena", ["arena", "league", "x"]),
    "arena match": ("arena", ["arena", "match", "x", "strong"]),
    "arena match, a member": ("arena", ["arena", "match", "x:update-1", "strong"]),
    "arena replay": ("arena", ["arena", "replay", "x"]),
    "arena watch": ("arena", ["arena", "watch", "x", "--no-show"]),
}


FOREIGN = [(kind, command) for command, (wanted, _) in TAKES.items() for kind in CONFIGS if kind != wanted]


@pytest.fixture(params=CONFIGS)
def given(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The kind of the run in the folder x."""
    (tmp_path / "x").mkdir()
    kind: str = request.param
    save(CONFIGS[kind], tmp_path / "x/config.toml")
    if kind == "growth":
        save(GrowTaskConfig(task="digits"), tmp_path / "x/grow.toml")
    return kind


def test_the_kind_of_a_run_is_known_from_its_config(given: str) -> None:
    assert kind_of(Path("x")) == given


@pytest.mark.parametrize(("given", "command"), FOREIGN, indirect=["given"])
def test_a_command_names_the_kind_of_a_run_that_it_does_not_take(given: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted, argv = TAKES[command]
    before = sorted(Path("x").iterdir())
    assert main([*argv, "--json"]) == 2
    captured = capsys.readouterr()
    expected = f"x is {NAMED[given]} and not {NAMED[wanted]}; use it with: {COMMANDS[given]}"
    assert captured.err == f"error: {expected}\n"
    assert last_line(captured.out) == {"error": expected}
    assert sorted(Path("x").iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["grow", "--task", "digits", "--controller", "./x"], ["controller", "card", "./x"]])
def test_a_folder_in_place_of_a_controller_file_is_refused_with_the_file_inside(
    given: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    if given == "controller":
        assert "x is a folder; give the controller of that run, x/controller.safetensors" in error
    else:
        assert f"x is {NAMED[given]} and not a controller; give the file RUN/controller.safetensors of a controller run" in error


def test_a_growth_run_started_in_python_is_refused_with_the_python_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").mkdir()
    save(GrowthConfig(), tmp_path / "x/config.toml")
    for argv in (["ppo", "eval", "x"], ["grow", "--resume", "--run", "x"]):
        assert main(argv) == 2
        assert "esper report x, and in Python esper.grow(..., run='x', resume=True)" in capsys.readouterr().err


CALLS: list[tuple[str, Callable[[str], object]]] = [
    ("ppo", lambda folder: train_run(None, folder, resume=True)),
    ("arena", lambda folder: train_arena(None, folder, resume=True)),
    ("arena", load_player),
    ("controller", lambda folder: train_controller(None, folder, resume=True)),
]


@pytest.mark.parametrize(
    ("given", "wanted", "call"), [(kind, wanted, call) for wanted, call in CALLS for kind in CONFIGS if kind != wanted], indirect=["given"]
)
def test_the_python_functions_name_the_kind_of_a_run(given: str, wanted: str, call: Callable[[str], object]) -> None:
    with pytest.raises(RunError, match=f"x is {NAMED[given]} and not {NAMED[wanted]}; use it with: "):
        call("x")


@pytest.mark.parametrize("given", [kind for kind in CONFIGS if kind != "growth"], indirect=True)
def test_grow_does_not_resume_a_run_of_another_kind(given: str) -> None:
    model, data = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), [(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))]
    with pytest.raises(RunError, match=f"x is {NAMED[given]} and not a growth run"):
        esper.grow(model, data, data, loss_fn=nn.functional.cross_entropy, epochs=6, run="x", resume=True)


@pytest.mark.parametrize("argv", [["ppo", "eval"], ["ppo", "train", "--resume", "--run"], ["arena", "eval"], ["grow", "--resume", "--run"]])
def test_a_folder_of_several_runs_is_refused_with_the_newest_one(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("old", "new"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        save(CONFIGS["ppo"], tmp_path / "runs" / name / "config.toml")
    assert main([*argv, "runs"]) == 2
    assert "there is no run in runs: it has no config.toml; it holds runs, such as runs/new" in capsys.readouterr().err
    assert main([*argv, "runs/new/config.toml"]) == 2
    assert "runs/new/config.toml is a file; give the folder of a run" in capsys.readouterr().err


def test_a_config_that_belongs_to_no_run_is_refused_with_its_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/config.toml").write_text("colour = 3\n")
    assert kind_of(tmp_path / "x") is None
    assert main(["ppo", "eval", "x"]) == 2
    assert "x/config.toml: it was changed since the run wrote it" in capsys.readouterr().err
