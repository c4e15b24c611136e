"""`esper controller` and trained controllers in `esper grow`: mistakes, files of a run, stopping, resuming, progress and cards."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import esper
from esper.cli.controller_progress import ControllerProgress, read_progress
from esper.cli.grow_progress import GrowProgress
from esper.cli.main import main
from esper.cli.progress import PlainLines
from esper.config import load
from esper.controller.config import ControllerConfig
from esper.controller.events import RoundEnded
from esper.controller.features import VERSION
from esper.controller.learned import Learned, load_controller
from esper.controller.trained import file_of, text_of_learned
from esper.experiment import grow_task
from esper.experiment.config import GrowTaskConfig
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.growth.report.story import read_story
from esper.rl.checkpoints import open_store
from esper.rl.events import Update
from esper.runs import Sink, open_run, read, read_tensors, write_tensors
from esper.runs.folder import CHECKPOINTS
from esper.tasks import load_task
from tests.commands import (
    assert_explains,
    assert_refuses_to_overwrite,
    assert_same_state,
    events_of,
    last_line,
    last_view,
    render,
    show,
    shown_in_tensorboard,
    signal_at_checkpoint,
    wait_for,
)
from tests.controller.test_trained import eager_file
from tests.processes import start, torchrun

SMALL = [
    "--holding-epochs", "1", "--validation-samples", "64", "--threads", "1", "--device", "cpu", "--growth.blueprints", "norm", "widen_100",
]  # fmt: skip
OPTIONS = [
    *SMALL, "--source", "digits", "--families", "conv", "--domain.width", "2", "3", "--blocks", "1", "1", "--domain.batch-size", "16", "16",
    "--samples-of-a-life", "96", "128", "--fleets", "2", "--hosts", "4", "--hosts-per-twin", "2", "--horizon", "3", "4",
    "--num-minibatches", "2", "--num-epochs", "1", "--hidden-size", "8", "--network.width", "8", "--trust", "1", "--checkpoint-every", "1",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds that were never interrupted. Tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert train(folder, 2) == 0
    return folder


def train(folder: str | Path, rounds: int, *more: str) -> int:
    return main(["controller", "train", *OPTIONS, "--rounds", str(rounds), "--run", str(folder), *more])


# Mistakes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--hosts", "0"], "--hosts: expected an int > 0 and <= "),
        (["train", "--rounds", "0"], "--rounds: expected an int > 0, got 0"),
        (["train", "--source", "digts"], "no task named 'digts'; did you mean 'digits'?"),
        (["train", "--optimizers", "sgd", "sgd"], "--domain.optimizers: expected names, at least one and each once"),
        (["train", "--source", "digits", "--domain.sources", "text"], "--source is short for --domain.sources; leave one of them out"),
        (["train", "--source", "cifar10"], "pass it with --data-dir"),
        (["train", "--source", "cifar10", "--data-dir", "nowhere"], "no folder nowhere"),
        (["train", "--source", "text", "--families", "conv"], "--domain.families: expected one that can read text"),
        (["train", "--start", "nowhere.safetensors"], "there is no file nowhere.safetensors"),
        (["train", "--horizon", "2", "9"], "expected at least 3 decisions: a seed needs as many to be raised, blended and kept"),
        (["train", "--raise-mode", "shadow", "--horizon", "7", "9"], "expected at least 8 decisions"),
        (["train", "--horizon", "9", "8"], "--domain.horizon: expected a range, the smaller number first"),
        (["train", "--price", "0.1", "0.01"], "--domain.price: expected a range, the smaller number first"),
        (["train", "--normalize-values"], "--ppo.normalize-values: expected false"),
        (["train", "--num-steps", "6"], "--ppo.num-steps: expected 1, and no bptt_length, because a rollout is made of whole lives"),
        (["train", "--start", "learned", "--trust", "-1"], "--network.trust: expected a float >= 0"),
        (["train", "--run", "/dev/null/run"], "no run can be made in /dev/null/run"),
        (["train", "--config", "none.toml"], "no such config file: none.toml"),
        (["train", "--resume"], "--resume needs the folder of the run"),
        (["train", "--resume", "--run", "nowhere"], "there is no run in nowhere"),
        (["train", "--resume", "--run", "nowhere", "--config", "a.toml"], "leave --config out"),
    ],
)
def test_a_mistake_is_explained_and_leaves_nothing_behind(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert_explains(["controller", *argv], message, capsys)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_another_kind_of_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text('env = "cue"\n')
    assert main(["controller", "train", "--resume", "--run", "run"]) == 2
    error = capsys.readouterr().err
    assert "run is a ppo run and not a controller run; use it with: esper ppo train --resume --run run" in error


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_overwritten_by_a_new_training(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refuses_to_overwrite(finished, lambda: train(finished, 2), capsys)


# Files of a run


@pytest.mark.slow
def test_a_run_writes_a_controller_and_prints_how_to_use_it(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["controller", "train", "--resume", "--run", str(finished), "--json"]) == 0
    shown = capsys.readouterr().out
    path = finished / "controller.safetensors"
    assert f"esper grow --task digits --controller {path}" in shown
    assert f"esper controller train --resume --run {finished} --rounds 4" in shown
    result = last_line(shown)
    assert (result["status"], result["rounds"], result["lives"], result["controller"]) == ("had finished", 2, 2 * 4, str(path))
    assert isinstance(load_controller(path), Learned)
    ends = [record.event for record in read(finished / "events.jsonl") if isinstance(record.event, RoundEnded)]
    assert result["hosts"] == sum(end.hosts for end in ends) == 8
    assert result["alike"] == pytest.approx(sum(end.alike * end.hosts for end in ends) / 8)
    assert result["utility"] == pytest.approx(result["gain"] - result["rent"])
    assert result["grown"] == sum(end.grown for end in ends) > 0
    assert load(ControllerConfig, finished / "config.toml").domain.sources == ("digits",)


@pytest.mark.slow
def test_a_lost_controller_file_is_written_again(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / "controller.safetensors").unlink()
    assert main(["controller", "train", "--resume", "--run", "copy"]) == 0
    one, other = (load_file(folder / "controller.safetensors") for folder in (copy, finished))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.slow
def test_tensorboard_gets_utility_rent_and_the_parts_of_the_reward(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert train("run", 2, "--tensorboard") == 0
    shown = shown_in_tensorboard(tmp_path / "run")
    ended = [record for record in read(tmp_path / "run/events.jsonl") if isinstance(record.event, RoundEnded)]
    assert ended
    for name in ("utility", "rent"):
        assert shown[f"round_ended/{name}"] == [(record.step, pytest.approx(getattr(record.event, name))) for record in ended]
    for record in ended:
        assert list(record.event.reward) == ["gain", "rent", "leaving"]
        assert sum(record.event.reward.values()) == pytest.approx(record.event.worth)  # no host is near the bound
    assert [value for _, value in shown["round_ended/reward/gain"]] == pytest.approx([record.event.reward["gain"] for record in ended])
    updates = [record.step for record in read(tmp_path / "run/events.jsonl") if isinstance(record.event, Update)]
    assert updates == [4, 8]
    assert [record.step for record in ended] == [0, 0, 4, 4], "lives of the rounds before"


@pytest.mark.slow
def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["controller", "train", *OPTIONS, "--seed", "7", "--rounds", "3", "--dry-run", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    plan = result["plan"]
    assert (plan["rounds"], plan["lives_per_round"], plan["fleets"]) == (3, 4, 2)
    assert result["config"]["ppo.seed"] == 7
    assert result["config"]["domain.sources"] == ["digits"]
    assert not list(tmp_path.iterdir())


# Stopping and going on


@pytest.mark.slow
def test_a_resumed_run_may_get_more_rounds_but_no_other_setting(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    assert main(["controller", "train", "--resume", "--run", "copy", "--hosts", "8"]) == 2
    assert "hosts is 4 in the saved run and cannot become 8 now" in capsys.readouterr().err
    assert main(["controller", "train", "--resume", "--run", "copy", "--rounds", "3", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    assert (result["status"], result["rounds"]) == ("finished", 3)
    assert load(ControllerConfig, copy / "config.toml").rounds == 3
    assert events_of(copy)[: len(events_of(finished))] == events_of(finished)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_round_with_a_checkpoint_and_a_controller(
    number: signal.Signals, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with signal_at_checkpoint(number, tmp_path / "run"):
        assert train("run", 10_000, "--json") == code
    captured = capsys.readouterr()
    assert "stopping after this round of lives, which may take minutes" in captured.err
    assert "esper controller train --resume --run run" in captured.out
    result = last_line(captured.out)
    assert result["status"] == "stopped"
    assert open_store(tmp_path / "run").load("latest").step == result["lives"]
    assert Path(result["controller"]).exists()


@pytest.mark.slow
def test_a_second_signal_stops_within_a_round_after_the_last_checkpoint_and_the_run_is_called_stopped(tmp_path: Path) -> None:
    process = start("controller", "train", *OPTIONS, "--samples-of-a-life", "5000", "6000", "--rounds", "99", "--run", "run")
    wait_for(tmp_path / "run" / CHECKPOINTS / "latest")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "round 1/99" in shown
    assert "stopped at once; go on with: esper controller train --resume --run run" in errors
    run = open_run(tmp_path / "run")
    run.refresh()
    assert run.state() == "stopped"
    assert open_store(tmp_path / "run").load("latest").step == 4
    assert isinstance(load_controller(tmp_path / "run" / "controller.safetensors"), Learned)


@pytest.mark.slow
def test_a_training_killed_and_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    rounds = 12
    assert train("whole", rounds) == 0
    process = start("controller", "train", *OPTIONS, "--rounds", str(rounds), "--run", "killed")
    wait_for(tmp_path / "killed" / CHECKPOINTS / "latest")
    process.kill()
    assert process.wait(timeout=90) == -signal.SIGKILL, "it finished before it could be killed"
    assert open_store(tmp_path / "killed").load("latest").step < 4 * rounds
    assert main(["controller", "train", "--resume", "--run", "killed"]) == 0
    assert events_of(tmp_path / "killed") == events_of(tmp_path / "whole")
    assert_same_state(*(open_store(tmp_path / name).load("latest").state["ppo"] for name in ("killed", "whole")))
    one, other = (load_file(tmp_path / name / "controller.safetensors") for name in ("killed", "whole"))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.slow
def test_two_ranks_train_one_controller_and_stop_together(tmp_path: Path) -> None:
    command = ["controller", "train", "--run", "run"]
    first = torchrun(2, *command, *OPTIONS, "--rounds", "2", "--json")
    shown, errors = first.communicate(timeout=100)
    assert first.returncode == 0, errors
    result = last_line(shown)
    assert shown.count("2 rounds of 8 lives") == 1, "only rank 0 writes"
    assert (result["status"], result["lives"]) == ("finished", 8 * result["rounds"])
    controller, store = tmp_path / "run/controller.safetensors", open_store(tmp_path / "run")
    controller.unlink()

    newest = store.list()[-1]
    process = torchrun(2, *command, "--resume", "--rounds", "100000")
    end = time.monotonic() + 60
    while store.list()[-1] == newest:
        assert time.monotonic() < end, "it did not go on"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert controller.exists(), "it is written when all has come to its end"


# Progress


@pytest.mark.slow
def test_plain_progress_has_a_start_a_line_per_round_and_an_end(finished: Path) -> None:
    stream = io.StringIO()
    show(finished, PlainLines(ControllerProgress(), stream, every_s=1e9))
    first, last = stream.getvalue().splitlines()
    assert "whose hosts train on cpu: 2 rounds of 4 lives" in first
    recent = read_progress(finished).recent
    assert f"round 2/2  utility {recent.utility:+.4f} (gain {recent.gain:+.4f}, rent {recent.rent:+.4f})" in last
    assert f"{recent.grown} seeds grown, {recent.kept} kept  in 8 hosts, {recent.alike:.0%} decided as advised" in last
    for words in ("entropy ", "explained variance", "clipped", "lives/s", "samples/s", "done"):
        assert words in last

    often = io.StringIO()
    lines = PlainLines(ControllerProgress(), often, every_s=0.0)
    for record in read(finished / "events.jsonl"):
        lines.write(record)
    assert len(often.getvalue().splitlines()) == 1 + 2 * (2 + 1), "the start, and for both rounds each fleet and the end"
    assert "  25.0%  round 1/2, life 2/4  utility " in often.getvalue()
    assert "  75.0%  round 2/2, life 2/4  utility " in often.getvalue()
    assert " left" in often.getvalue()


@pytest.mark.slow
def test_samples_per_second_count_all_hosts_and_twins(finished: Path) -> None:
    progress = read_progress(finished)
    ends = [record.event for record in read(finished / "events.jsonl") if isinstance(record.event, RoundEnded)]
    # Two lives and their twin are one row at first and up to three at last, each trained on at most 128 samples, in batches of 16.
    assert all(end.samples % 16 == 0 and 16 * end.horizon <= end.samples <= 3 * 128 for end in ends)
    per_life = sum(end.samples for end in ends) / sum(end.hosts for end in ends)
    assert progress.samples_per_second == pytest.approx(progress.rate.value * per_life)


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_the_live_view_fits_the_terminal(finished: Path, width: int) -> None:
    shown = render(read_progress(finished), width)
    assert "round 2/2" in shown
    assert "samples/s" in shown
    assert "…" not in shown


@pytest.mark.slow
def test_the_live_view_ends_with_the_last_state(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert "done" in last_view(finished, ControllerProgress()).rpartition("round 2/2")[2]


# Growing with a trained controller


@pytest.fixture
def eager(tmp_path: Path) -> Path:
    """A controller that grows whenever it can."""
    (tmp_path / "mine").mkdir()
    return eager_file(tmp_path / "mine", "controller.safetensors")


GROW = ["--task", "digits", "--threads", "1", "--device", "cpu", "--holding-epochs", "1", "--blueprints", "norm", "widen_100"]


@pytest.mark.slow
def test_a_trained_controller_grows_a_task(eager: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*GROW, "--controller", "mine/controller.safetensors", "--epochs", "2", "--run", "run", "--json"]
    assert main(["grow", *options]) == 0
    assert last_line(capsys.readouterr().out)["tried"] > 0
    story = read_story(tmp_path / "run")
    assert story.started is not None
    assert story.started.controller == "learned"


@pytest.mark.slow
def test_a_trained_controller_grows_a_model_in_python(eager: Path) -> None:
    task, rules = load_task("digits"), LifecycleConfig(holding_epochs=1)
    grown = esper.grow(
        task.make_host("starved"),
        task.train_loader(),
        task.val_loader(),
        task.loss_fn,
        epochs=2,
        controller=load_controller(eager),
        config=GrowthConfig(lifecycle=rules),
    )
    assert grown.ledger.seeds


@pytest.mark.slow
def test_a_run_resumes_with_the_controller_it_was_started_with(eager: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = LifecycleConfig(holding_epochs=1)
    settings: dict[str, Any] = {"epochs": 3, "threads": 1, "device": "cpu", "lifecycle": rules, "blueprints": ("norm",)}
    config = GrowTaskConfig(task="digits", controller=str(eager), **settings)

    def silent(title: str) -> Sink:
        return PlainLines(GrowProgress(title), io.StringIO())

    def grow(folder: Path, should_stop: Callable[[], bool]) -> str:
        return grow_task(config, folder, make_sink=silent, should_stop=should_stop).status

    stops = iter([False] * 30)
    assert grow(tmp_path / "whole", lambda: False) == "finished"
    assert grow(tmp_path / "stopped", lambda: next(stops, True)) == "stopped"
    story = read_story(tmp_path / "stopped")
    assert 0 < len(story.epochs) < 3
    assert story.seeds, "something has grown by then"
    eager.unlink()  # nor does the run need it again
    assert main(["grow", "--resume", "--run", "stopped", "--controller", "other/controller.safetensors"]) == 2
    assert "cannot become 'other/controller.safetensors'" in capsys.readouterr().err
    assert main(["grow", "--resume", "--run", "stopped"]) == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert one.keys() == other.keys()
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def as_of_another_layout(path: Path) -> None:
    tensors, metadata = read_tensors(path)
    write_tensors(path, tensors, {name: text.replace(VERSION, "0-00000000") for name, text in metadata.items()})


@pytest.mark.slow
@pytest.mark.parametrize("command", ["grow --controller", "grow --dry-run --controller", "controller train --start"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "there is no file mine/controller.safetensors"),
        (lambda path: os.truncate(path, 200), "mine/controller.safetensors cannot be read as a safetensors file"),
        (lambda path: save_file({"weight": torch.zeros(3)}, path), "holds tensors, but no controller"),
        (lambda path: as_of_another_layout(path), "has layout 0-00000000"),
    ],
)
def test_a_controller_file_that_cannot_be_used_is_explained(
    damage: Callable[[Path], None], message: str, command: str, eager: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(eager)
    assert main([*command.split(), "mine/controller.safetensors", *(["--task", "digits"] if command.startswith("grow") else [])]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# The controller that comes with esper, and cards


def settings_of_plan(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Return the settings that `esper grow` would train digits with."""
    assert main(["grow", "--task", "digits", "--device", "cpu", "--threads", "1", "--dry-run", "--json", *options]) == 0
    return last_line(capsys.readouterr().out)["config"]


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["learned", "mine/controller.safetensors"])
def test_settings_of_growth_are_those_of_the_user_with_a_trained_controller_too(
    controller: str, eager: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = settings_of_plan(capsys)
    assert settings_of_plan(capsys, "--controller", controller) == {**usual, "controller": controller}
    found = settings_of_plan(capsys, f"--controller={controller}", "--max-parameters", "7", "--seed", "3")
    assert (found["budget.max_parameters"], found["seed"]) == (7.0, 3)
    (tmp_path / "mine.toml").write_text(f'controller = "{controller}"\nblueprints = ["norm"]\n')
    found = settings_of_plan(capsys, "--config", "mine.toml")
    assert (found["blueprints"], found["budget.max_parameters"]) == (["norm"], usual["budget.max_parameters"])


@pytest.mark.slow
def test_a_run_with_the_shipped_controller_goes_on_with_it_after_another_one_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--task", "digits", "--threads", "1", "--device", "cpu", "--controller", "learned", "--epochs", "2", "--run", "run"]
    assert main(["grow", *options]) == 0
    assert (tmp_path / "run/controller.safetensors").read_bytes() == file_of("learned").read_bytes()
    story = read_story(tmp_path / "run")
    assert story.started is not None
    assert story.started.controller == "learned"
    assert all(epoch.decision for epoch in story.epochs)
    (tmp_path / "newer").mkdir()
    eager_file(tmp_path / "newer", "learned.safetensors")
    monkeypatch.setattr("esper.controller.trained.files", lambda package: tmp_path / "newer")
    assert main(["grow", "--resume", "--run", "run", "--epochs", "3"]) == 0
    assert load(GrowTaskConfig, tmp_path / "run/grow.toml").budget == GrowthConfig().budget
    assert len(read_story(tmp_path / "run").epochs) == 3


def test_the_card_of_the_shipped_controller_has_its_figures_and_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["controller", "card", "--json"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith('controller "learned", which comes with esper\n\nwhat ')
    assert VERSION in shown
    assert text_of_learned().strip() in shown
    result = last_line(shown)
    assert result["layout"] == VERSION
    assert result["bytes"] == Path(result["file"]).stat().st_size
    assert result["info"] == load_controller(file_of("learned")).description.info


def test_the_card_of_a_file_has_no_text_of_the_shipped_one(eager: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["controller", "card", "mine/controller.safetensors"]) == 0
    shown = capsys.readouterr().out
    assert "policy with LSTM memory of width 12" in shown
    assert "# The learned controller" not in shown


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "there is no file mine/controller.safetensors; give the path of a controller file"),
        (lambda path: os.truncate(path, 200), "mine/controller.safetensors cannot be read as a safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "is damaged: its sha256 is not that of its content"),
        (lambda path: save_file({"weight": torch.zeros(3)}, path), "holds tensors, but no controller"),
    ],
)
def test_a_file_without_a_card_is_explained(
    damage: Callable[[Path], None], message: str, eager: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(eager)
    assert_explains(["controller", "card", "mine/controller.safetensors"], message, capsys)


def test_a_folder_is_not_taken_for_a_controller_file(eager: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_explains(["controller", "card", "mine"], "mine is a folder and no file; give the file RUN/controller.safetensors", capsys)
    assert_explains(["grow", "--task", "digits", "--controller", "lerned"], "expected one of heuristic, lookahead, learned, random", capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["controller card", "controller train --start learned --run new", "grow --task digits --controller learned"]
)
def test_a_shipped_controller_that_is_lost_is_explained(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("esper.controller.trained.files", lambda package: tmp_path)
    assert_explains(command.split(), f"there is no file {tmp_path}/learned.safetensors", capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_card_is_shown_without_torch() -> None:
    program = "import sys; from esper.cli.main import main; assert main(['controller', 'card']) == 0; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
