"""`esper arena train`: mistakes, files of a run, stopping, resuming and progress."""

from __future__ import annotations

import io
import re
import shutil
import signal
from pathlib import Path

import msgspec
import pytest

from esper.cli.arena_progress import ArenaProgress, read_progress
from esper.cli.main import main
from esper.cli.progress import PlainLines
from esper.config import load
from esper.league.config import ArenaTrainConfig
from esper.league.events import LeagueChanged, RoundFought
from esper.rl.checkpoints import open_store
from esper.rl.events import Update
from esper.rl.run_setup import CheckpointEvaluated
from esper.runs import Event, EventRecord, read
from tests.cli.arena_runs import LEARNING_UNITS, OPTIONS, UPDATE_STEPS, train
from tests.commands import assert_explains, assert_refuses_to_overwrite, events_of, last_line, last_view, render, show, signal_at_checkpoint
from tests.processes import torchrun

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def recorded(event: Event) -> EventRecord:
    return EventRecord(time=0.0, run="run", rank=0, event=event)


# Mistakes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batles", "8"], "there is no option --batles; did you mean '--battles'?"),
        (["--sise", "32"], "there is no option --sise; did you mean '--size'?"),
        (["--ppo.learning_rte=1"], "there is no option --ppo.learning-rte; did you mean '--ppo.learning-rate'?"),
        (["--frobnicate"], "there is no option --frobnicate; see: esper arena train --help"),
        (["--battles", "0"], "--arena.battles: expected an int > 0 and <= 1048576, got 0"),
        (["--team-size", "17"], "--arena.team-size: expected an int >= 1 and <= 16, got 17"),
        (["--size", "15"], "--arena.size: expected"),
        (["--pack", "meduim"], "no unit class is named 'meduim'"),
        (["--minutes", "0"], "--minutes: expected a float > 0 or None, got 0"),
        (["--bot-share", "0.9"], "--selfplay.past-share: expected at most 1 - bot_share (0.1), got 0.125"),
        (["--first-team", "6"], "expected at most arena.team_size (5), got 6"),
        (["--arena.reward.gamma", "0.5"], "expected that of the learner, ppo.gamma (0.997), got 0.5"),
        (["--eval-against", "storng"], "strong"),
        ([*OPTIONS, "--battles", "1"], "1 battles cannot be divided into"),
        ([*OPTIONS, "--run", "/dev/null/run"], "no run can be made in /dev/null/run"),
        (["--config", "none.toml"], "no such config file: none.toml"),
        (["--resume"], "--resume needs the folder of the run"),
        (["--resume", "--run", "nowhere"], "there is no run in nowhere"),
        (["--resume", "--run", "nowhere", "--config", "a.toml"], "leave --config out"),
    ],
)
def test_a_mistake_is_explained_and_leaves_nothing_behind(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert_explains(["arena", "train", *argv], message, capsys)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_another_kind_of_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text('env = "cue"\n')
    assert main(["arena", "train", "--resume", "--run", "run"]) == 2
    assert "run is a ppo run and not an arena run; use it with: esper ppo train" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_overwritten_by_a_new_training(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refuses_to_overwrite(arena_run, lambda: train(arena_run, 2), capsys)


# Where values come from


@pytest.mark.slow
def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "train", *OPTIONS, "--seed", "7", "--total-steps", "100", "--dry-run", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    plan = result["plan"]
    assert (plan["units_that_learn"], plan["steps_per_update"], plan["updates"]) == (LEARNING_UNITS, UPDATE_STEPS, 3)
    assert plan["battles_against"] == {"bots": 4, "past selves": 2, "self": 2}
    assert (result["config"]["ppo.seed"], result["config"]["arena.size"]) == (7, 16)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_line_wins_over_the_file_and_gamma_is_that_of_learner_and_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text("total_steps = 300\n[arena]\nteam_size = 3\nbattles = 32\n[selfplay]\nbots = ['weak']\n")
    argv = ["arena", "train", *OPTIONS[4:], "--config", "mine.toml", "--battles", "8", "--gamma=0.9", "--dry-run", "--json"]
    assert main(argv) == 0
    config = last_line(capsys.readouterr().out)["config"]
    assert (config["arena.team_size"], config["arena.battles"], config["total_steps"], config["selfplay.bots"]) == (3, 8, 300, ["weak"])
    assert config["ppo.gamma"] == config["arena.reward.gamma"] == 0.9


# Files of a run


@pytest.mark.slow
def test_a_finished_run_prints_its_scores_and_the_next_command(arena_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(arena_run, tmp_path / "copy")
    assert main(["arena", "train", "--resume", "--run", "copy", "--total-steps", str(3 * UPDATE_STEPS), "--json"]) == 0
    shown = capsys.readouterr().out
    result = last_line(shown)
    assert (result["status"], result["updates"], result["step"]) == ("finished", 3, 3 * UPDATE_STEPS)
    evaluation = result["evaluation"]
    assert (evaluation["against"], evaluation["battles"]) == ("strong", 2)
    assert evaluation["wins"] + evaluation["draws"] + evaluation["losses"] == 2
    assert evaluation["interval"][0] <= evaluation["score"] <= evaluation["interval"][1]
    assert "95 % sure" in shown
    assert "esper arena eval copy --against strong" in shown
    assert "esper arena watch copy" in shown
    assert load(ArenaTrainConfig, copy / "config.toml").total_steps == 3 * UPDATE_STEPS
    assert events_of(copy)[: len(events_of(arena_run)) - 1] == events_of(arena_run)[:-1], "but for the evaluation at its end"
    assert (copy / "league/league.json").is_file()


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_its_settings(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "train", "--resume", "--run", str(arena_run), "--team-size", "2"]) == 2
    assert "arena.team_size is 1 in the saved run and cannot become 2 now" in capsys.readouterr().err
    assert main(["arena", "train", "--resume", "--run", str(arena_run), "--json"]) == 0
    shown = capsys.readouterr().out
    assert "has done its 80 steps; ask for more with --total-steps" in shown
    assert last_line(shown)["status"] == "had finished"


@pytest.mark.slow
def test_a_run_is_evaluated_against_the_same_bot_to_its_end(arena_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(arena_run, tmp_path / "copy")
    more = ["arena", "train", "--resume", "--run", "copy", "--total-steps", str(3 * UPDATE_STEPS)]
    assert main([*more, "--eval-against", "weak"]) == 2
    error = capsys.readouterr().err
    assert "eval_against is 'strong' in the saved run and cannot become 'weak' now; a resumed run may change total_steps" in error
    assert load(ArenaTrainConfig, copy / "config.toml").eval_against == "strong"
    assert main([*more, "--eval-against", "strong"]) == 0


@pytest.mark.slow
def test_a_dry_run_refuses_what_the_training_would_refuse(arena_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "train", "--resume", "--run", str(arena_run), "--team-size", "2", "--dry-run"]) == 2
    assert "arena.team_size is 1 in the saved run and cannot become 2 now" in capsys.readouterr().err
    assert main(["arena", "train", *OPTIONS, "--run", str(arena_run), "--dry-run"]) == 2
    assert str(arena_run) in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_resumes_without_a_lost_file_of_the_league(arena_run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(arena_run, tmp_path / "copy")
    (copy / "league/league.json").write_text("{")
    assert main(["arena", "train", "--resume", "--run", "copy", "--total-steps", str(3 * UPDATE_STEPS)]) == 0
    assert main(["arena", "league", "copy"]) == 0, "it was written again"


# Stopping


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_update_with_a_checkpoint(
    number: signal.Signals, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with signal_at_checkpoint(number, tmp_path / "run"):
        assert train("run", 10_000, "--json") == code
    captured = capsys.readouterr()
    assert "stopping after this update" in captured.err
    assert "a checkpoint is saved; go on with: esper arena train --resume --run run" in captured.out
    result = last_line(captured.out)
    assert (result["status"], result["evaluation"]) == ("stopped", None)
    assert open_store(tmp_path / "run").load("latest").step == result["step"]


@pytest.mark.slow
def test_a_time_limit_ends_a_run_with_an_evaluation_and_more_time_continues_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", 10_000, "--minutes", "0.000001", "--json") == 0
    shown = capsys.readouterr().out
    result = last_line(shown)
    assert (result["status"], result["step"], result["evaluation"]["battles"]) == ("finished", UPDATE_STEPS, 2)
    assert "finished after update 1, " in shown
    assert "esper arena eval run --against strong" in shown
    resumed = ["arena", "train", "--resume", "--run", "run", "--json"]
    assert main(resumed) == 0
    shown = capsys.readouterr().out
    assert last_line(shown)["status"] == "had finished"
    assert f"has used its 1e-06 minutes, in {UPDATE_STEPS} steps; ask for more with --minutes, which counts the whole training" in shown
    taken = seconds_taken()
    assert taken > 0
    assert main([*resumed, "--minutes", str((taken + 0.01) / 60)]) == 0
    result = last_line(capsys.readouterr().out)
    assert result["status"] == "finished"
    assert UPDATE_STEPS < result["step"] < 10_000 * UPDATE_STEPS
    assert seconds_taken() >= taken + 0.01
    progress = read_progress(Path("run"))
    assert progress.started is not None
    assert progress.started.seconds_taken == pytest.approx(taken)
    assert (progress.share, progress.time_left) == (1.0, 0.0)


def seconds_taken() -> float:
    """Return the seconds of training in the latest checkpoint of the run."""
    seconds: float = open_store(Path("run")).load("latest").state["ppo"]["counters"]["seconds"]
    return seconds


@pytest.mark.slow
def test_two_ranks_train_one_player() -> None:
    process = torchrun(2, "arena", "train", *OPTIONS, "--run", "run", "--json", "--total-steps", str(4 * UPDATE_STEPS))
    shown, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert shown.count(f"{2 * LEARNING_UNITS} units learn") == 1, "only rank 0 writes"
    result = last_line(shown)
    assert (result["status"], result["updates"], result["evaluation"]["battles"]) == ("finished", 2, 2)


# Progress


@pytest.mark.slow
def test_plain_progress_has_lines_of_the_start_the_league_and_the_state(arena_run: Path) -> None:
    stream = io.StringIO()
    show(arena_run, PlainLines(ArenaProgress(bot="strong"), stream, every_s=1e9))
    first, evaluated, joined, *_, last = stream.getvalue().splitlines()
    assert f"arena-1v1 on cpu: {LEARNING_UNITS} units learn" in first
    assert "update-1 joins the league: it is the first" in joined
    assert re.search(rf"evaluation at step {UPDATE_STEPS}: \d+ % \[\d+, \d+\] of 2 battles against strong, draws half", evaluated)
    for words in ("update 2/2", f"step {2 * UPDATE_STEPS}", "league 1", "entropy fire ", "explained variance", "steps/s", "done"):
        assert words in last


def test_scores_are_those_of_recent_battles_and_past_selves_are_one_opponent() -> None:
    progress = ArenaProgress()
    for number in range(30):
        against_past = {"update-1": (0, 1, 0), "update-2": (1, 0, 0)}
        against_itself = {"self": (9, 0, 0), "learner": (1, 0, 0)}
        results = {"strong": (number % 2, 0, 1 - number % 2), **against_past, **against_itself}
        progress.take(recorded(RoundFought(update=number, results=results, opponents=[], team=1, overflow=0)))
    assert progress.scores == {"strong": (0.5, 10), "past selves": (0.75, 20)}
    assert progress.against == "strong 50 % [24, 76]  past selves 75 % [53, 89]", "few battles are shown with their interval"


def test_many_battles_need_no_interval_and_evaluations_are_shown_one_after_the_other() -> None:
    progress = ArenaProgress(bot="middle")
    progress.take(recorded(RoundFought(update=1, results={"weak": (150, 0, 50)}, opponents=[], team=1, overflow=0)))
    assert (progress.against, progress.evaluated) == ("weak 75 %", "")
    for number, score in enumerate((0.0, 0.25, 0.5), 1):
        evaluation = recorded(CheckpointEvaluated(step=1000 * number, episodes=128, mean_return=score, mean_length=90.0))
        progress.take(evaluation)
    assert progress.evaluated == "against middle 0 → 25 → 50 % [41, 59] of 128 battles"
    assert progress.plain_notice(evaluation) == "evaluation at step 3,000: 50 % [41, 59] of 128 battles against middle, draws half"


def test_progress_of_a_resumed_run_counts_the_league_from_its_saved_state() -> None:
    progress = ArenaProgress(["update-1", "update-2"])
    for name, is_promoted, retired in (("update-3", True, ["update-1"]), ("update-4", False, [])):
        progress.take(recorded(LeagueChanged(update=1, name=name, is_promoted=is_promoted, reason="", retired=retired, against={})))
    assert progress.members == ["update-2", "update-3"]
    assert progress.league == "2 past selves, the best is update-3"


@pytest.mark.slow
def test_the_time_left_is_the_shorter_of_steps_and_clock(arena_run: Path) -> None:
    timed, free = ArenaProgress(), ArenaProgress()
    for record in read(arena_run / "events.jsonl"):
        for progress in (timed, free):
            progress.take(record)
    for progress in (timed, free):
        assert progress.started is not None
        limit = progress.seconds_taken + 5 if progress is timed else None
        progress.started = msgspec.structs.replace(progress.started, total_steps=10**9, seconds=limit)
    assert timed.time_left == pytest.approx(5)
    assert free.time_left > 5
    assert free.share < 0.01 < timed.share < 1


@pytest.mark.slow
def test_the_time_left_includes_the_battles_at_checkpoints(arena_run: Path) -> None:
    progress = ArenaProgress()
    for record in read(arena_run / "events.jsonl"):
        number = record.event.update if isinstance(record.event, Update) else 0
        progress.take(msgspec.structs.replace(record, time=100.0 * number))
    assert progress.started is not None
    progress.started = msgspec.structs.replace(progress.started, total_steps=5 * UPDATE_STEPS)
    assert progress.seconds_left == pytest.approx(300.0), "three more updates of a hundred seconds each, whatever their own clocks say"


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_the_live_view_fits_the_terminal(arena_run: Path, width: int) -> None:
    shown = render(read_progress(arena_run), width)
    assert "update 2/2" in shown
    assert "1 past self, the best is update-1" in shown
    assert "…" not in shown


@pytest.mark.slow
def test_the_live_view_ends_with_the_last_state(arena_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert "done" in last_view(arena_run, ArenaProgress()).rpartition("update 2/2")[2]
