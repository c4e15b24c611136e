"""Runs declare their kind and figures: a new figure, a run of an unknown kind, and logs without a declaration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from esper.cli.main import main
from esper.controller.events import DECLARED as CONTROLLER
from esper.growth.events import DECLARED as GROWTH
from esper.league.events import DECLARED as ARENA
from esper.rl.events import DECLARED as PPO
from esper.runs import Event, EventLog, Figure, RunDeclared, RunEnded, compare_runs, events_table, find_runs, numbers_table, open_run
from esper.runs.catalog import list_runs
from esper.runs.events import scalars
from esper.runs.folder import CONFIG, EVENTS, UNKNOWN, kind_of
from esper.runs.report import write_run_report
from esper.runs.tables import opened, runs_table
from tests.commands import last_line
from tests.runs.made import made_growth, made_ppo


class RoundDone(Event, tag="test_round_done"):
    """An event of a user's own loop."""

    step: int
    inversions: float
    swapped: float
    by_size: dict[str, float] = {}


FIGURES = [
    Figure("inversions", "test_round_done/inversions", better="down"),
    Figure("swapped pairs", "test_round_done/swapped", unit="share"),
]
SORTING = RunDeclared(run_kind="sorting", figures=FIGURES, total=4, unit="rounds")


def own_run(
    folder: Path, inversions: list[float], *, declared: RunDeclared | None = SORTING, seed: int = 0, has_ended: bool = True
) -> Path:
    """Write a run as a user's own loop writes it."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(f"seed = {seed}\nmethod = {json.dumps(folder.parent.name)}\n")
    with EventLog(folder / EVENTS, run=folder.name) as log:
        if declared is not None:
            log.emit(declared)
        for step, value in enumerate(inversions, start=1):
            log.emit(RoundDone(step=step, inversions=value, swapped=0.25, by_size={"small": value, "large": 2 * value}))
        if has_ended:
            log.emit(RunEnded(step=len(inversions), status="finished", seconds=2.0))
    return folder


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "160")
        assert main([*words]) == 0
    return capsys.readouterr().out


def test_the_way_of_one_new_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    declared = msgspec.structs.replace(PPO, figures=[*PPO.figures, FIGURES[0]], total=200)
    for name, values in (("a", [9.0, 5.0]), ("b", [9.0, 4.0])):
        folder = made_ppo(tmp_path / name, [0.5, 1.0], status=None)
        (folder / EVENTS).unlink()
        with EventLog(folder / EVENTS, run=name) as log:
            log.emit(declared)
            for step, value in enumerate(values, start=1):
                log.emit(RoundDone(step=100 * step, inversions=value, swapped=0.5))
    run = open_run(tmp_path / "a", cache=tmp_path / "cache")
    assert (run.kind, run.step(), run.progress()) == ("ppo", 200, 1.0)
    assert (run.summary().figure, run.summary().last, run.summary().best) == ("inversions", 5.0, 5.0), "the only one with values"
    comparison = compare_runs([tmp_path / "a", tmp_path / "b"], figure="inversions", cache=tmp_path / "cache")
    assert [compared.figures for compared in comparison.runs] == [{"inversions": 5.0}, {"inversions": 4.0}]
    assert comparison.figure.better == "down"
    assert "inversions" in shown(capsys, "runs", "show", str(tmp_path / "a"))
    assert last_line(shown(capsys, "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"))["figure"] == "inversions"


def test_a_run_of_an_unknown_kind_is_listed_shown_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method, better in (("bubble", 0.0), ("merge", 1.0)):
        for seed in range(2):
            own_run(tmp_path / "runs" / method / f"seed-{seed}", [9.0, 5.0, 3.0 + seed, 2.0 + seed - better], seed=seed)
    running = own_run(tmp_path / "runs" / "slow" / "seed-0", [9.0], has_ended=False)
    assert kind_of(running) == "sorting"
    summaries = {summary.folder: summary for summary in list_runs(tmp_path / "runs", cache=tmp_path / "cache")}
    assert len(summaries) == 5
    assert (summaries[str(running)].state, summaries[str(running)].progress) == ("running", 0.25)
    ended = summaries[str(tmp_path / "runs" / "merge" / "seed-1")]
    assert (ended.kind, ended.state, ended.progress, ended.step) == ("sorting", "finished", 1.0, 4)
    assert (ended.figure, ended.last, ended.best) == ("inversions", 2.0, 2.0)
    assert "sorting" in shown(capsys, "runs", "ls", str(tmp_path / "runs"), "--kind", "sorting")
    text = " ".join(shown(capsys, "runs", "show", ended.folder).split())
    assert "100% 4 rounds" in text
    assert f"esper report {ended.folder}" in text
    comparison = compare_runs([tmp_path / "runs" / "bubble", tmp_path / "runs" / "merge"], cache=tmp_path / "cache")
    (pair,) = comparison.paired
    assert (pair.differences, pair.verdict(better=comparison.figure.better)) == ([-1.0, -1.0], "better")
    assert pair.verdict(better="") == "lower"
    columns, rows = runs_table(opened([ended.folder]))
    assert [row[list(columns).index("kind")] for row in rows] == ["sorting"]
    assert len(events_table([ended.folder], "test_round_done").rows) == 4
    assert {row[1] for row in numbers_table([ended.folder]).rows} >= {"test_round_done/inversions", "test_round_done/by_size/small"}


def test_a_run_of_an_unknown_kind_has_a_page_with_headline_curves_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own_run(tmp_path / "runs" / "merge" / "seed-1", [9.0, 5.0, 4.0, 2.0])
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "The run has finished after 4 rounds · best inversions 2" in page
    for part in ("inversions", "swapped pairs, share", "test_round_done/by_size", "Settings", "method"):
        assert part in page or part.capitalize() in page, part
    assert "Health" not in page, "it has no learner"
    from esper.dashboard.data import Watcher, name_in_address

    watched = Watcher(tmp_path / "runs", cache=tmp_path / "cache")
    data = watched.page(name_in_address(folder))
    assert data is not None
    assert [chart["title"] for chart in data["charts"]] == ["inversions", "swapped pairs, share", "test_round_done/by_size"]
    capsys.readouterr()
    text = shown(capsys, "watch", "--terminal", str(folder))
    for part in ("sorting", "inversions", "by_size: small", "large", "method"):
        assert part in text, text


def test_every_number_of_a_run_that_declares_nothing_is_a_figure(tmp_path: Path) -> None:
    folder = own_run(tmp_path / "runs" / "merge" / "seed-1", [9.0, 5.0], declared=None, has_ended=False)
    summary = open_run(folder, cache=tmp_path / "cache").summary()
    assert (summary.kind, summary.state, summary.progress, summary.step) == (UNKNOWN, "running", None, 2)
    assert (summary.figure, summary.last, summary.best) == ("test_round_done/inversions", 5.0, None)
    assert compare_runs([folder], figure="test_round_done/by_size/large", cache=tmp_path / "cache").runs[0].value == 10.0
    assert "Test_round_done/inversions" in write_run_report(folder).read_text()


def test_a_run_that_was_seen_before_it_declared_its_kind_has_it_afterwards(tmp_path: Path) -> None:
    folder = own_run(tmp_path / "run", [], declared=None, has_ended=False)
    (run,) = find_runs(tmp_path)
    run.refresh()
    assert (run.kind, run.summary().figure) == (UNKNOWN, "")
    with EventLog.resume(folder / EVENTS, 0) as log:
        log.emit(SORTING)
    run.refresh()
    assert (run.kind, run.summary().figure) == ("sorting", "inversions")


def test_a_folder_with_some_config_and_no_log_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / CONFIG).write_text("colour = 3\n")
    assert find_runs(tmp_path) == []
    (tmp_path / "other" / EVENTS).write_text("not a log\n")
    assert find_runs(tmp_path) == []


@pytest.mark.parametrize("make", [lambda folder: made_ppo(folder, [0.5, 1.0]), lambda folder: made_growth(folder, [1.0, 0.5])])
def test_a_log_without_a_declaration_is_shown_as_one_with_that_of_its_library(make: Any, tmp_path: Path) -> None:
    old = open_run(make(tmp_path / "run"), cache=tmp_path / "cache")
    declared = msgspec.structs.replace(PPO if old.kind == "ppo" else GROWTH, total=200 if old.kind == "ppo" else 2)
    assert old.declared() == declared
    before = old.summary()
    lines = (old.folder / EVENTS).read_text().splitlines()
    stamp = {"kind": "run_declared", "time": 1.0, "run": "run", "rank": 0, "step": 0}
    lines.insert(1, json.dumps({**stamp, **msgspec.to_builtins(declared)}, separators=(",", ":")))
    (old.folder / EVENTS).write_text("\n".join(lines) + "\n")
    new = open_run(old.folder, cache=tmp_path / "cache")
    assert new.declared() == declared
    assert msgspec.structs.replace(new.summary(), touched=before.touched) == before


@pytest.mark.parametrize("declared", [GROWTH, PPO, ARENA, CONTROLLER])
def test_figures_of_the_libraries_are_numbers_of_their_events(declared: RunDeclared) -> None:
    from esper.runs.events import event_type_of, fields_of

    fields_of(b"{}")  # imports all events
    for figure in declared.figures:
        for series in filter(None, (figure.series, figure.final)):
            kind, _, field = series.partition("/")
            event_type = event_type_of(kind)
            assert event_type is not None, series
            assert field in event_type.__struct_fields__, series
    assert event_type_of(declared.end) is not None
    assert scalars(declared) == {}
