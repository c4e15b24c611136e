"""`--seeds N` of `esper grow` and `esper ppo train`: folders, intervals over seeds, stopping, resuming, failures and mistakes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from esper.cli.command import FAILED, CommandError
from esper.cli.main import main
from esper.cli.seeds import train_seeds
from esper.config import load_saved
from esper.experiment.config import GrowTaskConfig
from esper.growth.report.story import read_story
from esper.intervals import student_interval
from esper.rl.run_config import TrainConfig
from esper.runs.folder import CONFIG, GROW
from esper.runs.seeds import SEEDS
from esper.runs.signals import INTERRUPTED, StopSignals
from tests.commands import assert_explains, events_of, last_line, signal_at_checkpoint
from tests.runs.made import made_ppo

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
GROW_WORDS = ["grow", "--task", "digits", "--controller", "schedule", "--holding-epochs", "1", "--threads", "1", "--device", "cpu"]
PPO_WORDS = ["ppo", "train", "cue", "--num-envs", "4", "--num-steps", "16", "--eval-episodes", "2", "--checkpoint-every", "1"]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds that were never interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "grown"
    assert main([*GROW_WORDS, "--epochs", "3", "--seeds", "2", "--run", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_each_seed_is_the_run_with_that_seed_beside_its_twin(grown: Path) -> None:
    assert sorted(path.name for path in grown.iterdir()) == ["seed-0", "seed-1", SEEDS]
    assert main([*GROW_WORDS, "--epochs", "3", "--seed", "1", "--twin", "--run", "alone"]) == 0
    for part in ("", "twin"):
        assert events_of(grown / "seed-1" / part) == events_of(Path("alone") / part)
    assert events_of(grown / "seed-0") != events_of(grown / "seed-1")


@pytest.mark.slow
def test_the_end_shows_the_difference_to_the_twin_with_its_interval_over_seeds(grown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["grow", "--resume", "--run", str(grown), "--json"]) == 0
    out = capsys.readouterr().out
    result = last_line(out)
    assert [seed["status"] for seed in result["seeds"]] == ["had finished", "had finished"]
    differences = []
    for seed in range(2):
        ours, theirs = (read_story(grown / f"seed-{seed}" / part).finished for part in ("", "twin"))
        assert ours is not None
        assert theirs is not None
        differences.append(ours.val_loss - theirs.val_loss)
    interval = student_interval(differences)
    of_loss = result["comparisons"][0]
    assert of_loss["figure"] == "validation loss"
    assert of_loss["twins"][0]["differences"] == pytest.approx(differences)
    assert of_loss["twins"][0]["interval"] == pytest.approx({"estimate": interval.estimate, "low": interval.low, "high": interval.high})
    assert {comparison["figure"] for comparison in result["comparisons"][1:]} == {"test loss", "test accuracy"}
    assert "grown − its twins" in out


@pytest.mark.slow
def test_a_stopped_growth_goes_on_with_the_missing_seeds_as_if_it_had_not_stopped(
    grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with signal_at_checkpoint(signal.SIGINT, tmp_path / "run/seed-0"):
        assert main([*GROW_WORDS, "--epochs", "3", "--seeds", "2", "--run", "run"]) == INTERRUPTED
    assert "0 of 2 seeds are trained; go on with: esper grow --resume --run run" in capsys.readouterr().out
    assert not (tmp_path / "run/seed-1").exists()
    assert main(["grow", "--resume", "--run", "run"]) == 0
    for seed in range(2):
        for part in ("", "twin"):
            assert events_of(tmp_path / f"run/seed-{seed}" / part) == events_of(grown / f"seed-{seed}" / part)


@pytest.mark.slow
def test_policies_of_several_seeds_are_trained_stopped_resumed_and_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*PPO_WORDS, "--total-steps", "256", "--seed", "3"]
    with signal_at_checkpoint(signal.SIGTERM, tmp_path / "run/seed-3"):
        assert main([*words, "--seeds", "2", "--run", "run"]) == 143
    assert "go on with: esper ppo train --resume --run run" in capsys.readouterr().out
    assert main(["ppo", "train", "--resume", "--run", "run", "--seeds", "3", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    folders = [tmp_path / f"run/seed-{seed}" for seed in (3, 4, 5)]
    assert [load_saved(TrainConfig, folder / CONFIG).ppo.seed for folder in folders] == [3, 4, 5]
    (ends,) = zip(
        *([event["mean_return"] for event in events_of(folder) if event["kind"] == "evaluated"] for folder in folders), strict=True
    )
    interval = student_interval(ends)
    assert result["comparisons"][0]["figure"] == "evaluated return"
    assert result["comparisons"][0]["groups"][0]["mean"] == pytest.approx(
        {"estimate": interval.estimate, "low": interval.low, "high": interval.high}
    )


@pytest.mark.slow
def test_mistakes_are_explained_before_anything_is_trained(grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = [*GROW_WORDS, "--epochs", "3", "--seeds", "2", "--run", str(grown)]
    assert_explains(again, "already holds runs of several seeds", capsys)
    resume = ["grow", "--resume", "--run", str(grown)]
    assert_explains([*resume, "--seeds", "1"], "have 2 seeds, and none is taken away", capsys)
    assert_explains([*resume, "--learning-rate", "0.5"], "learning_rate is 0.001", capsys)
    assert_explains(["grow", "--resume", "--run", str(grown / "seed-0"), "--seeds", "2"], "is one run and not several seeds", capsys)
    assert_explains(["grow", "--task", "digts", "--seeds", "2", "--run", "new"], "no task named 'digts'", capsys)
    assert_explains(["ppo", "train", "nothing-v0", "--seeds", "2", "--run", "new"], "nothing-v0", capsys)
    assert not list(tmp_path.iterdir())
    assert load_saved(GrowTaskConfig, grown / "seed-0" / GROW).learning_rate == 0.001


# Without training


def test_a_seed_that_fails_does_not_keep_the_others_from_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train_one(seed: int, folder: Path) -> str:
        if seed == 1:
            raise CommandError("training failed: it diverged", exit_code=FAILED)
        made_ppo(folder, [0.0, 1.0 + seed], seed=seed)
        return "finished"

    done = train_seeds(tmp_path, range(3), train_one, command="ppo train", stop=StopSignals(), figures=())
    captured = capsys.readouterr()
    assert done.exit_code == FAILED
    assert [seed["status"] for seed in done.result["seeds"]] == ["finished", "failed", "finished"]
    assert done.result["comparisons"][0]["groups"][0]["mean"]["estimate"] == 2.0
    assert "seed 1: training failed: it diverged" in captured.err
    assert "2 of 3 seeds are trained" in captured.out


def test_a_mistake_of_the_user_ends_the_training_of_all_seeds(tmp_path: Path) -> None:
    def train_one(seed: int, folder: Path) -> str:
        raise CommandError("there is no such environment")

    with pytest.raises(CommandError, match="no such environment"):
        train_seeds(tmp_path, range(3), train_one, command="ppo train", stop=StopSignals(), figures=())
