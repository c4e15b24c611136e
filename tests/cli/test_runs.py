"""`esper runs`, `esper compare` and `esper query`: their output, their mistakes, and that they start without torch."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from esper.cli.main import main
from esper.cli.runs import seeds_of
from esper.growth.events import Measured, RolledBack, StageEntered
from esper.runs import EventLog, open_run
from esper.runs.folder import EVENTS, locked
from tests.commands import Terminal, assert_explains, last_line
from tests.runs.made import made_growth, made_ppo

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A growth run, a PPO run that trains, and one that was killed. Each is older than the one before."""
    monkeypatch.setenv("COLUMNS", "140")
    made_ppo(tmp_path / "runs/dead", [0.1], status=None)
    os.utime(tmp_path / "runs/dead" / EVENTS, (1.0, 1.0))
    made_ppo(tmp_path / "runs/live", [0.1, 0.3], status=None)
    made_growth(tmp_path / "runs/group/grown", [1.0, 0.5, 0.75], twin=[1.0, 0.9, 0.8])
    return tmp_path / "runs"


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of a command that succeeds, with single blanks."""
    assert main(words) == 0
    return " ".join(capsys.readouterr().out.split())


# runs ls


def test_live_runs_are_listed_first_then_the_newest(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "ls", "--json"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == ["live", "group/grown", "dead"]
    assert [run["state"] for run in last_line(out)["runs"]] == ["running", "finished", "dead"]
    growth = next(" ".join(line.split()) for line in out.splitlines() if line.startswith("group/grown"))
    assert growth.startswith("group/grown growth finished ████████ 100% validation loss 0.75 0.5 █▁▅")


def test_filters_choose_runs_by_kind_state_and_tag(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*words: str) -> list[str]:
        assert main(["runs", "ls", *words, "--json"]) == 0
        return [run["name"] for run in last_line(capsys.readouterr().out)["runs"]]

    assert main(["runs", "tag", "runs/live", "good", "fast"]) == 0
    assert listed("--kind", "growth") == ["grown"]
    assert listed("--state", "dead", "finished") == ["grown", "dead"]
    assert listed("--tag", "good", "fast") == ["live"]
    assert listed("--tag", "good", "bad") == []


def test_a_narrow_terminal_shows_every_run_on_one_line(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["runs", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(len(line) <= 80 for line in lines)


def test_empty_and_missing_folders_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_explains(["runs", "ls"], "there is no folder runs", capsys)
    (tmp_path / "runs").mkdir()
    assert "esper grow --task digits" in shown(["runs", "ls"], capsys)
    made_ppo(tmp_path / "runs/a", [1.0])
    assert "none of the 1 runs" in shown(["runs", "ls", "--kind", "arena"], capsys)


# runs show and runs diff


def test_show_tells_state_figures_beside_the_twin_and_what_to_do_next(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(["runs", "show", "runs/group/grown"], capsys)
    assert "validation loss 0.75 0.8" in text
    assert "test accuracy 0.9 0.8" in text
    assert "esper report runs/group/grown" in text
    text = shown(["runs", "show", "runs/dead", "--settings"], capsys)
    assert "state dead" in text
    assert "esper ppo train --resume --run runs/dead" in text
    assert "ppo.gamma 0.99" in text


def test_show_tells_the_outcome_of_every_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_growth(tmp_path / "run", [1.0, 0.5], has_ended=False)

    def entered(epoch: int, number: int, stage: str, reason: str) -> StageEntered:
        return StageEntered(epoch=epoch, slot="abcb"[number - 1], number=number, blueprint="conv3x3", stage=stage, reason=reason)

    log = EventLog.resume(folder / EVENTS, (folder / EVENTS).stat().st_size)
    events = [
        entered(1, 1, "GERMINATED", "promising"),
        entered(1, 2, "GERMINATED", "promising too"),
        entered(1, 3, "GERMINATED", "why not"),
        Measured(epoch=2, slot="a", number=1, gain=0.25, gain_low=0.2, gain_high=0.3, rent=0.05),
        entered(3, 1, "FOSSILIZED", "it pays"),
        entered(3, 2, "HOLDING", "it learns"),
        entered(4, 2, "BLENDING", "does not pay"),
        entered(5, 2, "PRUNED", "does not pay"),
        RolledBack(epoch=6, to_epoch=5, reason="loss exploded", embargoed=["c"], gone=[3]),
        entered(7, 4, "GERMINATED", "again"),
    ]
    for time, event in enumerate(events):
        log.emit(event, time=float(time))
    log.close()
    seeds = [(seed.slot, seed.outcome, seed.ended, seed.why) for seed in seeds_of(open_run(folder))]
    assert seeds == [
        ("a", "kept", 3, "it pays"),
        ("b", "pruned", 5, "does not pay"),
        ("c", "rolled back", 6, "the governor went back: loss exploded"),
        ("b", "living", None, "again"),
    ]
    assert "1 a conv3x3 1–3 kept 0.2500 0.0500" in shown(["runs", "show", "run"], capsys)


def test_diff_shows_only_differing_settings_and_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_ppo(tmp_path / "a", [1.0, 2.0])
    made_ppo(tmp_path / "b", [1.0, 2.5], seed=3, keep=4)
    assert main(["runs", "diff", "a", "b", "--json"]) == 0
    out = capsys.readouterr().out
    assert last_line(out)["settings"] == {"keep": {"a": 3, "b": 4}, "ppo.seed": {"a": 0, "b": 3}}
    assert "evaluated return 2 2.5 +0.5" in " ".join(out.split())
    assert_explains(["runs", "diff", "a", "nothing"], "there is no run in nothing", capsys)


# runs tag and runs rm


def test_tags_and_notes_are_added_shown_and_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        shown(["runs", "tag", "runs/live", "good", "base", "--note", "first that learns"], capsys)
        == "tags good, base note first that learns"
    )
    assert shown(["runs", "tag", "runs/live", "--remove", "base"], capsys) == "tags good note first that learns"
    assert shown(["runs", "tag", "runs/live"], capsys) == "tags good note first that learns"
    assert_explains(["runs", "tag", "runs/live", "--remove", "bad"], "has no tag 'bad'; it has good", capsys)
    assert_explains(["runs", "tag", "runs/live", "a,b"], "cannot be a tag", capsys)


def test_rm_asks_before_it_deletes(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert_explains(["runs", "rm", "runs/dead"], "give --yes", capsys)
    for answer, is_left in (("n\n", True), ("\n", True), ("y\n", False)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert main(["runs", "rm", "runs/dead"]) == 0
        assert (runs / "dead").exists() == is_left
    assert main(["runs", "rm", "runs/group/grown", "--yes"]) == 0
    assert not (runs / "group/grown").exists()


def test_rm_deletes_nothing_if_one_of_the_runs_is_training(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_explains(["runs", "rm", "runs/dead", "runs/live", "--yes"], "runs/live is still training", capsys)
    assert_explains(["runs", "rm", "runs/dead", "runs", "--yes"], "runs is no run but holds 3", capsys)
    assert_explains(["runs", "rm", "nothing", "--yes"], "there is no run in nothing", capsys)
    assert (runs / "dead").exists()
    with locked(runs / "group/grown/twin"):
        assert_explains(["runs", "rm", "runs/group/grown", "--yes"], "another process is training", capsys)
    (tmp_path / "link").symlink_to(runs / "dead")
    assert_explains(["runs", "rm", "link", "--yes"], "link is a link", capsys)
    assert (runs / "group/grown" / EVENTS).exists()


def test_the_last_seed_is_deleted_with_the_folder_of_all_seeds(tmp_path: Path) -> None:
    for seed in range(2):
        made_ppo(tmp_path / f"many/seed-{seed}", [1.0], seed=seed)
    (tmp_path / "many/seeds.toml").write_text("seeds = 2\n")
    assert main(["runs", "rm", "many/seed-0", "--yes"]) == 0
    assert (tmp_path / "many/seeds.toml").exists()
    assert main(["runs", "rm", "many/seed-1", "--yes"]) == 0
    assert not (tmp_path / "many").exists()


def test_damaged_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_growth(tmp_path / "run", [1.0])
    (folder / "grow.toml").write_text("task = ")
    for words in (["runs", "show", "run"], ["runs", "diff", "run", "run"], ["compare", "run"]):
        assert_explains(words, "the settings of run cannot be read", capsys)


# runs export, compare and query


def test_export_writes_the_numbers_of_all_runs_in_a_folder(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "export", "runs", "--to", "all.csv"]) == 0
    with open(tmp_path / "all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"grown", "live", "dead"}
    assert f"{len(rows):,} rows" in capsys.readouterr().out
    assert_explains(["runs", "export", "runs", "--to", "all.txt"], "neither a .csv nor a .parquet file", capsys)


@pytest.mark.slow
def test_compare_prints_tables_and_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(2):
        made_ppo(tmp_path / "a" / f"seed-{seed}", [0.0, 1.0 + seed], seed=seed)
        made_ppo(tmp_path / "b" / f"seed-{seed}", [0.0, 1.5 + seed], seed=seed, num_envs=2)
    assert main(["compare", "a", "b", "--plot", "c.png", "--json"]) == 0
    out = capsys.readouterr().out
    assert last_line(out)["paired"][0]["differences"] == [0.5, 0.5]
    assert last_line(out)["settings"] == {"num_envs": {"a": 16, "b": 2}}
    assert (tmp_path / "c.png").exists()
    assert_explains(["compare", "a", "--figure", "retrun in training"], "did you mean 'return in training'?", capsys)
    assert_explains(["compare"], "name the runs to compare", capsys)


@pytest.mark.extra("duckdb")
def test_query_prints_rows_and_explains_mistakes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(["query", "select run, state from runs order by run"], capsys) == "run state dead dead grown finished live running"
    assert shown(["query", "select min(val_loss) as best from epoch_ended", "runs/group/grown"], capsys) == "best 0.5"
    assert shown(["query", "select * from runs where false"], capsys) == "no row"
    assert_explains(["query", "select * from nothing"], "The tables are runs, seeds, events,", capsys)
    assert_explains(["query", "select 1", "nowhere"], "there is no such folder", capsys)


@pytest.mark.slow
def test_commands_that_read_runs_start_without_torch(runs: Path) -> None:
    made_ppo(runs / "other", [1.0])
    program = """
import sys
from esper.cli.main import main
grown, other = "runs/group/grown", "runs/other"
for words in (["runs", "ls"], ["runs", "show", grown], ["runs", "diff", "runs/live", other], ["runs", "tag", other, "good"],
              ["runs", "export", "runs", "--to", "a.csv"], ["compare", "runs/live", other, "--plot", "a.svg"],
              ["runs", "rm", other, "--yes"]):
    assert main(words) == 0, words
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
