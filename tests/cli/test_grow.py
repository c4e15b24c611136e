"""`esper grow`: help, mistakes, files of a run, stopping, resuming, the user's own code, and progress."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import esper
from esper.cli.grow_progress import GrowProgress
from esper.cli.main import main
from esper.cli.progress import PlainLines
from esper.config import load
from esper.experiment import training as grow_run
from esper.experiment.config import GrowTaskConfig
from esper.experiment.training import run_folder
from esper.experiment.work import make_work
from esper.growth.events import EpochEnded, FinalTest, GrowthStarted, Probed, SlotView
from esper.growth.report.html import REPORT
from esper.growth.report.story import read_story
from esper.growth.run import KIND
from esper.runs import CheckpointStore, EventRecord, Tree, read
from esper.runs.folder import CHECKPOINTS
from esper.statistics import student_interval
from esper.tasks import load_task
from tests.commands import (
    assert_explains,
    assert_refuses_to_overwrite,
    assert_same_tensors,
    events_of,
    last_line,
    last_view,
    render,
    show,
    shown_in_tensorboard,
    signal_at_checkpoint,
)
from tests.processes import start

OPTIONS = ["--task", "digits", "--controller", "schedule", "--threads", "1", "--device", "cpu"]
EPOCHS = 4  # of a run that was never interrupted
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

USER_CODE = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

def make_loaders():
    inputs = torch.randn(240, 6)
    targets = inputs[:, :3].argmax(dim=1)
    parts = [torch.utils.data.TensorDataset(inputs[a:b], targets[a:b]) for a, b in ((0, 160), (160, 200), (200, 240))]
    return [torch.utils.data.DataLoader(part, batch_size=32, shuffle=index == 0) for index, part in enumerate(parts)]

def two_loaders():
    return make_loaders()[:2]

def squared(outputs, targets):
    return ((outputs - nn.functional.one_hot(targets, 3)) ** 2).mean()

def step_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def one_loader():
    return make_loaders()[0]

def iterators():
    return tuple(iter(loader) for loader in make_loaders())

class Endless:
    def __iter__(self):
        return iter(make_loaders()[0])

def endless():
    return Endless(), make_loaders()[1]

def no_loaders():
    return 3, 4

def broken():
    return {}["missing"]

number = 3
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mycode.py").write_text(USER_CODE)
    (tmp_path / "badcode.py").write_text("import not_there_at_all\n")
    yield
    sys.modules.pop("mycode", None)


def grow(folder: str | Path, epochs: int, *more: str) -> int:
    return main(["grow", *OPTIONS, "--epochs", str(epochs), "--run", str(folder), *more])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its twin that was never interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert grow(folder, EPOCHS, "--twin", "--holding-epochs", "1") == 0
    return folder


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose learning rate falls towards its end."""
    folder = tmp_path_factory.mktemp("runs") / "scheduled"
    assert grow(folder, 1, "--schedule", "cosine") == 0
    return folder


# Sinks


@pytest.mark.slow
@pytest.mark.usefixtures("user_code")
def test_tensorboard_gets_losses_and_slots_of_a_growing_host_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    words = ["grow", "--model", "mycode:make_model", "--data", "mycode:make_loaders", "--controller", "schedule", "--threads", "1"]
    assert main([*words, "--epochs", "2", "--tensorboard", "--run", "run"]) == 0
    assert main(["grow", "--resume", "--run", "run", "--epochs", "3"]) == 0
    assert load(GrowTaskConfig, tmp_path / "run/grow.toml").tensorboard
    shown = shown_in_tensorboard(tmp_path / "run")
    events = [record.event for record in read(tmp_path / "run/events.jsonl")]
    ended = [event for event in events if isinstance(event, EpochEnded)]
    assert shown["epoch_ended/val_loss"] == [(event.epoch, pytest.approx(event.val_loss)) for event in ended]
    assert len(ended) == 3
    slot = ended[0].slots[0].slot
    assert shown[f"epoch_ended/slots/{slot}/alpha"] == [(event.epoch, pytest.approx(event.slots[0].alpha)) for event in ended]
    (tested,) = (event for event in events if isinstance(event, FinalTest))
    assert shown["final_test/loss"] == [(3, pytest.approx(tested.loss))]  # that of the end after two epochs was cut


@pytest.mark.slow
def test_a_missing_tensorboard_is_refused_before_a_host_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert grow("run", 1, "--tensorboard") == 2
    assert "pip install 'esper-grow[tensorboard]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Help and mistakes


@pytest.mark.slow
def test_the_help_shows_every_option_about_growing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grow", "--help"]) == 0
    shown = capsys.readouterr().out
    options = ("--task", "--model", "--rent.parameters", "--budget.max-seeds", "--lifecycle.raise-mode", "--governor.window")
    for option in (
        *options,
        "--precision",
        "--accumulate",
        "--max-grad-norm",
        "--step-schedule",
        "--baseline.schedule-at",
        "--deterministic",
    ):
        assert option in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Tasks: digits (handwritten digits, 8×8 pixels); digits-1d"),
        (["--task", "digts"], "no task named 'digts'; did you mean 'digits'?"),
        (["--task", "digits", "--host", "huge"], "oversized"),
        (["--task", "digits", "--controller", "heuristc"], "heuristic"),
        (["--task", "digits", "--raise", "joined"], "joint"),
        (["--task", "digits", "--epohcs", "3"], "--epochs"),
        (["--task", "digits", "--epochs", "0"], "--epochs: expected an int > 0, got 0"),
        (["--task", "digits", "--rent.parameters", "-1"], "--rent.parameters: expected a float >= 0, got -1.0"),
        (["--task", "digits", "--data-dir", "here"], "leave out --data-dir"),
        (["--task", "digits", "--sequence-length", "32"], "digits has no sequences"),
        (["--task", "digits", "--augment"], "digits has no augmentation"),
        (["--model", "a:b", "--data", "c:d", "--augment"], "--augment: expected nothing, because make_loaders decides"),
        (["--task", "cifar10"], "--data-dir"),
        (["--task", "cifar10", "--data-dir", "nowhere"], "no folder nowhere"),
        (["--task", "digits", "--slots", "blcks.0"], "no submodule is named 'blcks.0'"),
        (["--task", "digits", "--slots", "blocks.0", "blocks.0"], "slots: 'blocks.0' is named twice in slots"),
        (["--task", "digits", "--thresholds.plateau-epochs", "0"], "--thresholds.plateau-epochs: expected an int > 0, got 0"),
        (["--task", "digits", "--max-parameters", "0.000001"], "Raise the budget"),
        (["--task", "digits", "--model", "a:b", "--data", "c:d"], "--model: expected no model together with a task"),
        (["--model", "a:b"], "--data: expected package.module:make_loaders, which the model needs"),
        (["--task", "digits", "--loss", "a:b"], "--loss: expected a model of your own with it"),
        (["--task", "digits", "--precision", "bf16"], "bfloat16"),
        (["--task", "digits", "--accumulate", "0"], "--accumulate: expected an int > 0, got 0"),
        (["--task", "digits", "--step-schedule", "step"], "--step-schedule: expected a schedule with it (--schedule cosine)"),
        (["--task", "digits", "--config", "none.toml"], "no such config file: none.toml"),
        (["--task", "digits", "--run", "/dev/null/run"], "no run can be made in /dev/null/run"),
        (["--resume"], "--resume needs the folder of the run"),
        (["--resume", "--run", "nowhere"], "there is no run in nowhere"),
        (["--resume", "--run", "nowhere", "--config", "a.toml"], "leave --config out"),
        (["report", "nowhere"], "there is no run in nowhere"),
    ],
)
def test_a_mistake_is_explained_and_leaves_nothing_behind(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert_explains(["grow", *argv], message, capsys)
    assert not list(tmp_path.iterdir())


def test_the_json_output_contains_an_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grow", "--task", "digits", "--device", "foo", "--json"]) == 2
    assert last_line(capsys.readouterr().out)["error"].startswith("invalid choice 'foo' for argument '--device'. Expected one of")


def test_a_wrong_key_in_the_file_names_the_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text('task = "digits"\n[rent]\nparamters = 1.0\n')
    assert main(["grow", "--config", "mine.toml"]) == 2
    assert "mine.toml: rent.paramters: unknown key; did you mean 'parameters'?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grow", *OPTIONS, "--host", "right", "--epochs", "1", "--raise", "shadow", "--max-seeds", "2", "--dry-run", "--json"]) == 0
    shown = capsys.readouterr().out
    result = last_line(shown)
    assert result["plan"]["slots"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert result["plan"]["parameters"] == load_task("digits").num_parameters("right")
    assert result["config"]["lifecycle.raise_mode"] == "shadow"
    assert result["config"]["budget.max_seeds"] == 2
    assert "epochs                               1\n" in shown
    assert "double_conv3x3" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text('task = "digits"\nhost = "right"\nepochs = 7\nseed = 5\n[rent]\nflops = 0.5\n')
    assert main(["grow", "--config", "mine.toml", "--seed", "6", "--dry-run", "--json"]) == 0
    config = last_line(capsys.readouterr().out)["config"]
    assert (config["host"], config["epochs"], config["seed"], config["rent.flops"]) == ("right", 7, 6, 0.5)
    assert config["rent.parameters"] == GrowTaskConfig().rent.parameters


def test_precision_accumulation_clipping_and_schedule_reach_the_training() -> None:
    options = {"precision": "bfloat16", "accumulate": 3, "max_grad_norm": 0.5, "schedule": "cosine", "epochs": 4, "keep": "last"}
    for when, periods in (("auto", 4), ("epoch", 4), ("step", 4 * 7)):  # 20 batches, three to a step and two in the last
        config = GrowTaskConfig(task="digits", step_schedule=when, batch_size=50, **options)
        work = make_work(config, torch.device("cpu"))
        assert len(work.train_loader) == 20
        training = work.training(config)
        assert training.scheduler.T_max == periods
        assert (training.config.precision, training.config.accumulate, training.config.max_grad_norm) == ("bfloat16", 3, 0.5)
        assert (training.config.step_schedule, training.config.keep) == (when, "last")


@pytest.mark.usefixtures("user_code")
def test_a_schedule_by_steps_needs_a_loader_with_a_length(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "mycode:make_model", "--data", "mycode:endless", "--epochs", "1", "--schedule", "cosine", "--step-schedule", "step"]
    assert main(["grow", *words]) == 2
    assert "the training loader does not tell how many batches it has; leave --step-schedule out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("option", [("precision", "bfloat16"), ("accumulate", "2"), ("max-grad-norm", "1.0"), ("keep", "last")])
def test_a_run_does_not_resume_with_other_settings(option: tuple[str, str], finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, value = option
    assert main(["grow", "--resume", "--run", str(finished), f"--{name}", value]) == 2
    assert f"{name.replace('-', '_')} is " in capsys.readouterr().err


# Files of a run


@pytest.mark.slow
def test_a_run_ends_with_a_table_a_ledger_a_report_and_a_model_that_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert grow("run", 6, "--json") == 0
    shown = capsys.readouterr().out
    result = last_line(shown)
    needed = {"test_accuracy", "test_loss", "val_loss", "params", "params_added", "train_gflops", "seeds", "tried", "rollbacks", "seconds"}
    assert needed | {"run", "status", "report", "model"} <= result.keys()
    assert (result["status"], result["seeds"], result["tried"], result["rollbacks"]) == ("finished", 3, 3, 0)
    for words in ("validation loss", "test accuracy", "training GFLOPs", "double_conv3x3", "rent.parameters", "run/report.html"):
        assert words in shown
    task = load_task("digits")
    model = esper.load(result["model"], model=task.make_host("starved"))
    assert sum(parameter.numel() for parameter in model.parameters()) == result["params"]
    assert task.evaluate(model, task.test_loader()).loss == pytest.approx(result["test_loss"], abs=1e-6)
    assert result["params"] - result["params_added"] == task.num_parameters("starved")


@pytest.mark.slow
def test_the_twin_is_the_same_training_without_growth(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin, alone = read_story(finished / "twin"), Path("alone")
    assert main(["grow", *OPTIONS[:2], "--controller", "never", *OPTIONS[4:], "--epochs", str(EPOCHS), "--run", str(alone), "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    assert twin.tested is not None
    assert result["test_loss"] == twin.tested.loss
    grown = read_story(finished)
    assert grown.finished is not None
    assert twin.finished is not None
    assert grown.finished.val_loss_before == twin.finished.val_loss_before, "they start from the same weights"
    assert grown.epochs[0].train_loss == twin.epochs[0].train_loss, "and see the same batches"


@pytest.mark.usefixtures("user_code")
def test_a_run_and_its_twin_keep_their_best_states_or_the_last_ones(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", "mycode:make_model", "--data", "mycode:make_loaders", "--controller", "never", "--twin"]
    training = ["--epochs", "8", "--learning-rate", "0.5", "--threads", "1", "--device", "cpu"]
    for keep in ("best", "last"):
        assert main(["grow", *own, *training, "--keep", keep, "--run", keep, "--json"]) == 0
        result = last_line(capsys.readouterr().out)
        for folder, figures in ((Path(keep), result), (Path(keep) / "twin", result["twin"])):
            losses = [epoch.val_loss for epoch in read_story(folder).epochs]
            assert losses[-1] > min(losses), "the last epoch must not be the best one"
            assert figures["val_loss"] == pytest.approx(min(losses) if keep == "best" else losses[-1], abs=1e-6)
            assert figures["best_epoch"] == (1 + losses.index(min(losses)) if keep == "best" else None)


@pytest.mark.slow
def test_the_twin_is_compared_sample_by_sample(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = load_task("digits")
    rights = []
    for folder in (finished, finished / "twin"):
        model = esper.load(folder / "model.safetensors", model=task.make_host("starved")).eval()
        with torch.no_grad():
            rights.append((model(task.test.inputs).argmax(dim=1) == task.test.targets).double())
    expected = student_interval((rights[0] - rights[1]).numpy())

    assert main(["grow", "--resume", "--run", str(finished), "--json"]) == 0
    shown = capsys.readouterr().out
    found = last_line(shown)["accuracy_difference"]
    assert found["samples"] == len(task.test)
    assert [found[name] for name in ("estimate", "low", "high")] == pytest.approx([expected.estimate, expected.low, expected.high])
    twin = read_story(finished / "twin").finished
    assert twin is not None
    assert f" against {twin.val_loss:.4f} · kept " in shown.replace("\n", " ")
    points = f"{100 * expected.estimate:+.2f} ±{50 * (expected.high - expected.low):.2f} points"
    assert points in next(line for line in shown.splitlines() if line.startswith("test accuracy"))
    assert f"One run on {len(task.test)} test samples" in shown
    assert points in (finished / "report.html").read_text()


@pytest.mark.slow
def test_a_run_that_keeps_no_seed_ends_normally(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grow", "--task", "digits", "--controller", "never", "--epochs", "1", "--threads", "1", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "nothing was grown" in shown
    assert last_line(shown)["seeds"] == 0


def test_runs_started_in_the_same_second_get_different_folders() -> None:
    folders = set()
    for _ in range(3):
        with run_folder(GrowTaskConfig(task="digits"), None) as folder:
            folders.add(folder)
    assert len(folders) == 3


@pytest.mark.slow
def test_a_run_that_cannot_start_removes_only_folders_it_made(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    assert grow("mine", 1, "--slots", "nosuch") == 2
    assert (tmp_path / "mine" / "notes.txt").exists()


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_overwritten_by_a_new_training(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refuses_to_overwrite(finished, lambda: grow(finished, EPOCHS), capsys)


# Two processes and one folder

TWO_PROCESSES = """
import os, time
from pathlib import Path
from mycode import make_loaders, make_model as model

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)

def make_model():
    if os.environ["ROLE"] == "second":  # it has found the folder missing, and now the first one makes it
        Path("second-waits").touch()
        wait_for("new/run/events.jsonl")
    else:
        wait_for("second-waits")
    return model()

class Held(list):
    def __iter__(self):  # the first look at the data, in the run's folder
        if os.environ["ROLE"] == "first":
            wait_for("second-is-over")
        yield from super().__iter__()

def loaders():
    train, validation, test = make_loaders()
    return train, Held(validation), test
"""


@pytest.mark.slow
@pytest.mark.usefixtures("user_code")
def test_a_second_run_in_the_same_new_folder_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    options = ["--model", "two:make_model", "--data", "two:loaders", "--controller", "never", "--epochs", "1", "--run", "new/run", "--json"]
    first, second = (start("grow", *options, env={**os.environ, "ROLE": role}) for role in ("first", "second"))
    try:
        shown = second.communicate(timeout=100)
        assert second.returncode == 2, shown
        assert "new/run already holds a run" in last_line(shown[0])["error"]
        assert (tmp_path / "new/run/config.toml").exists(), "the first one's folder is still there"
        (tmp_path / "second-is-over").touch()
        shown = first.communicate(timeout=100)
        assert first.returncode == 0, shown
    finally:
        for process in (first, second):
            process.kill()
    assert read_story("new/run").is_over
    assert main(["grow", "--resume", "--run", "new/run"]) == 0


# Stopping and going on


def state_of(folder: Path) -> Tree:
    state: Tree = CheckpointStore(folder / CHECKPOINTS, kind=KIND).load("latest").state["grower"]
    return state


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_with_a_checkpoint_and_says_how_to_go_on(
    number: signal.Signals, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with signal_at_checkpoint(number, tmp_path / "run"):
        assert grow("run", 10_000, "--twin", "--json") == code
    shown = capsys.readouterr().out
    assert "esper grow --resume --run run" in shown
    result = last_line(shown)
    assert result["status"] == "stopped"
    assert result["test_accuracy"] is None, "the test part is for the end"
    assert Path(result["report"]).exists()
    assert not (tmp_path / "run/twin").exists()


@pytest.mark.slow
def test_a_run_that_is_interrupted_and_resumed_equals_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grow_run, "write_report", lambda folder: folder / REPORT)  # which takes longer than all the rest
    assert grow(tmp_path / "whole", 5, "--twin") == 0
    with signal_at_checkpoint(signal.SIGINT, tmp_path / "stopped"):
        assert grow(tmp_path / "stopped", 5, "--twin") == 130, "it finished before it could be stopped"
    assert not read_story(tmp_path / "stopped").is_over

    assert main(["grow", "--resume", "--run", str(tmp_path / "stopped")]) == 0
    for part in ("", "twin"):
        assert events_of(tmp_path / "stopped" / part) == events_of(tmp_path / "whole" / part)
        assert_same_tensors(state_of(tmp_path / "stopped" / part), state_of(tmp_path / "whole" / part))


@pytest.mark.slow
def test_a_finished_run_can_be_resumed_with_more_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    assert grow("run", 2) == 0
    before = Path("run/events.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["grow", "--resume", "--run", "run", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "had already finished its 2 epochs" in shown
    assert last_line(shown)["status"] == "had finished"
    assert Path("run/events.jsonl").read_bytes() == before
    assert main(["grow", "--resume", "--run", "run", "--epochs", "3", "--json"]) == 0
    assert last_line(capsys.readouterr().out)["epochs"] == 3
    assert [epoch.epoch for epoch in read_story("run").epochs] == [1, 2, 3]
    assert load(GrowTaskConfig, "run/grow.toml").epochs == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "4"], "seed is 0 in the run in "),
        (["--host", "right"], "host is 'starved'"),
        (["--epochs", "4"], "is made for 1 epochs"),
    ],
)
def test_the_settings_that_define_a_run_cannot_change(
    more: list[str], message: str, scheduled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grow", "--resume", "--run", str(scheduled), *more]) == 2
    assert message in capsys.readouterr().err


# The user's own code


@pytest.mark.slow
@pytest.mark.usefixtures("user_code")
def test_a_users_model_grows_on_the_users_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", "mycode:make_model", "--data", "mycode:make_loaders", "--controller", "schedule", "--epochs", "6", "--run", "run"]
    assert main(["grow", *own, "--learning-rate", "0.01", "--twin", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    assert result["tried"] > 0
    assert 0.5 < result["test_accuracy"] <= 1
    story, twin = read_story("run"), read_story("run/twin")
    assert story.epochs[0].train_loss == twin.epochs[0].train_loss, "same weights, same batches"
    model = esper.load(tmp_path / "run/model.safetensors", model=sys.modules["mycode"].make_model())
    assert sum(parameter.numel() for parameter in model.parameters()) == result["params"]


@pytest.mark.slow
@pytest.mark.usefixtures("user_code")
def test_a_twin_without_an_accuracy_has_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", "mycode:make_model", "--data", "mycode:make_loaders", "--loss", "mycode:squared", "--epochs", "1", "--run", "run"]
    assert main(["grow", *own, "--controller", "never", "--twin", "--json"]) == 0
    shown = capsys.readouterr().out
    assert last_line(shown)["accuracy_difference"] is None
    assert "This is one run" in shown


def test_the_option_for_the_sequence_length_reaches_the_task(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    config = GrowTaskConfig(task="text", data_dir=tmp_path, sequence_length=16)
    inputs, _ = next(iter(make_work(config, torch.device("cpu")).train_loader))
    assert inputs.shape[1] == 16


@pytest.mark.slow
@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize("more", [["--loss", "mycode:squared"], ["--step-loss", "mycode:step_loss"]])
def test_a_custom_loss_has_no_accuracy(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", "mycode:make_model", "--data", "mycode:make_loaders", "--controller", "never", "--epochs", "1", "--run", "run"]
    assert main(["grow", *own, *more, "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    assert result["test_loss"] > 0
    assert result["test_accuracy"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("user_code")
def test_a_task_without_a_test_split_has_no_test_result(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", "mycode:make_model", "--data", "mycode:two_loaders", "--controller", "never", "--epochs", "1", "--run", "run"]
    assert main(["grow", *own, "--json"]) == 0
    shown = capsys.readouterr().out
    assert last_line(shown)["test_loss"] is None
    assert "test accuracy" not in shown


@pytest.mark.slow
@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize(
    ("model", "data", "code", "message"),
    [
        ("nowhere.nets:make_model", "mycode:make_loaders", 2, "there is no module 'nowhere'"),
        ("mycode.nets:make_model", "mycode:make_loaders", 2, "there is no module 'mycode.nets'"),
        ("mycode", "mycode:make_loaders", 2, "expected package.module:function"),
        ("mycode:make_modle", "mycode:make_loaders", 2, "has no 'make_modle'; did you mean 'make_model'?"),
        ("mycode:number", "mycode:make_loaders", 2, "is of type int and cannot be called"),
        ("mycode:make_loaders", "mycode:make_loaders", 2, "it returned something of type list; expected an nn.Module"),
        ("mycode:broken", "mycode:make_loaders", 1, "mycode:broken raised KeyError: 'missing' (mycode.py, line"),
        (
            "badcode:make_model",
            "mycode:make_loaders",
            1,
            "importing badcode raised ModuleNotFoundError: No module named 'not_there_at_all'",
        ),
        ("mycode:make_model", "mycode:one_loader", 2, "it returned something of type DataLoader; expected loaders"),
        ("mycode:make_model", "mycode:no_loaders", 2, "the train loader is of type int, which cannot be iterated"),
        ("mycode:make_model", "mycode:iterators", 2, "is an iterator, used up after one epoch"),
    ],
)
def test_an_error_in_the_users_code_is_reported_in_one_line(
    model: str, data: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grow", "--model", model, "--data", data]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.usefixtures("user_code")
def test_the_traceback_of_the_users_code_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grow", "--model", "mycode:broken", "--data", "mycode:make_loaders", "--debug"]) == 1
    assert 'return {}["missing"]' in capsys.readouterr().err


# Progress


def view_of(folder: Path, width: int) -> str:
    progress = GrowProgress("digits")
    for record in read(folder / "events.jsonl"):
        progress.take(record)
    return render(progress, width)


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_the_live_view_fits_the_terminal(finished: Path, width: int) -> None:
    shown = view_of(finished, width)
    assert f"epoch {EPOCHS}/{EPOCHS}" in shown
    assert "…" not in next(line for line in shown.splitlines() if " kept " in line)
    assert "double_conv3x3" in shown
    assert ("±" in shown) == (width == 80), "the interval is written out where there is room"
    assert "as planned" in shown


def test_the_live_view_fits_with_long_names_and_many_slots() -> None:
    progress = GrowProgress("large")
    slots = [f"encoder.layers.{index}.attention.output.projection" for index in range(40)]
    started = GrowthStarted(epoch=0, epochs=9, controller="never", raise_mode="joint", slots=slots, parameters=10, flops=10)
    progress.take(EventRecord(time=0.0, run="run", rank=0, event=started))
    views = [
        SlotView(
            slot,
            1 if index == 39 else None,
            "HOLDING" if index == 39 else "DORMANT",
            "a_very_long_blueprint_of_ones_own",
            1.0,
            3,
            1.0,
            0.1,
            0.05,
            0.2,
            5,
            0.01,
        )
        for index, slot in enumerate(slots)
    ]
    ended = EpochEnded(epoch=1, train_loss=1.0, val_loss=1.0, learning_rate=0.1, decision="x " * 100, slots=views, parameters=15, flops=12)
    progress.take(EventRecord(time=0.0, run="run", rank=0, event=ended))
    shown = render(progress, 80)
    assert "on probation" in shown, "a slot with a seed is never left out"
    assert "and 28 more slots" in shown


@pytest.mark.slow
def test_plain_progress_reports_every_change_with_its_reason(finished: Path) -> None:
    stream = io.StringIO()
    show(finished, PlainLines(GrowProgress("digits"), stream, every_s=1e9))
    shown = stream.getvalue()
    assert "digits: 1,702 parameters, 3 slots on cpu" in shown
    assert "epoch 1: double_conv3x3 after blocks.0 germinated: planned for epoch 1" in shown
    assert " kept: as planned; its cost of removal is" in shown
    assert shown.count(f"epoch {EPOCHS}/{EPOCHS}") == 1


def test_plain_progress_has_a_line_for_a_probe() -> None:
    stream = io.StringIO()
    promises = {"a": {"norm": 0.001, "conv3x3": 0.02}, "b": {"norm": 0.03}}
    PlainLines(GrowProgress("digits"), stream).write(EventRecord(time=0.0, run="run", rank=0, event=Probed(epoch=4, promises=promises)))
    assert (
        "epoch 4: the probe estimates a fall of the loss per step of 0.0300 with norm after b, 0.0200 with conv3x3 after a"
        in stream.getvalue()
    )


@pytest.mark.slow
def test_the_live_view_ends_with_the_last_state(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = last_view(finished, GrowProgress("digits [bold]"))
    assert "digits [bold]" in shown, "a title is no markup"
    assert f"epoch {EPOCHS}/{EPOCHS}" in shown.rpartition("train")[0].splitlines()[-1]


@pytest.mark.slow
def test_the_report_of_a_run_is_written_again(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "report.html").read_bytes()
    (finished / "report.html").unlink()
    assert main(["grow", "report", str(finished)]) == 0
    assert (finished / "report.html").read_bytes() == before
