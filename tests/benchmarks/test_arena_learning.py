"""Trainings that measure the parts of the learner: which of them are skipped, and how their records are read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arena import learning
from benchmarks.records import RESULTS


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The records of trainings, each of which takes no time and one step more than it was asked for."""
    made = []

    def trained(change: str, seed: int, options: Any) -> dict[str, Any]:
        scores = {"middle": 0.5, "strong-v1": 0.25 + 0.125 * seed}
        made.append({**learning.key(change, seed, options), "steps": options.steps + 1, "seconds": 0.0, "scores": scores})
        return made[-1]

    monkeypatch.setattr(learning, "trained", trained)
    return made


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["learning.py", *words])
    learning.main()


def test_only_trainings_that_a_file_holds_are_skipped(
    trainings: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--output", str(tmp_path / "out.jsonl"), "--seeds", "2", "--changes", "all parts", "no memory", "--steps", "100"]
    run(monkeypatch, *words)
    assert len(trainings) == 4
    run(monkeypatch, *words)
    assert len(trainings) == 4, "the file holds all of them"
    for more in (["--scenario", "2v2-open-v1"], ["--scenario", "5v5-city-v1"], ["--battles", "64"], ["--steps", "200"], ["--seeds", "4"]):
        before = len(trainings)
        run(monkeypatch, *words, *more)
        assert len(trainings) == before + 4, more


def test_trainings_of_other_lengths_have_a_table_of_their_own(
    trainings: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", str(tmp_path / "out.jsonl"), "--seeds", "2", "--changes", "all parts"]
    for steps in ("100", "200"):
        run(monkeypatch, *words, "--steps", steps)
    capsys.readouterr()
    run(monkeypatch, "--table", str(tmp_path / "out.jsonl"))
    shown = capsys.readouterr().out
    assert "\n2 against 2, 256 battles, 101 steps\n" in shown
    assert "\n2 against 2, 256 battles, 201 steps\n" in shown
    assert shown.count("| all parts | 50 50 | 50.0 % |  | 25 38 | 31.2 % |  |") == 2


@pytest.mark.parametrize(
    ("name", "trainings"),
    [
        ("arena_learning", {"": 55}),
        ("arena_baselines_h200", {"2v2-open-v1": 15, "5v5-city-v1": 9}),
        ("arena_baselines_cpu", {"2v2-open-v1": 15, "5v5-city-v1": 9}),
    ],
)
def test_recorded_trainings_are_read_by_scenario(name: str, trainings: dict[str, int]) -> None:
    found = learning.read_scores([RESULTS / f"{name}.jsonl"])
    assert {title: len(scored) for title, scored in found.items()} == trainings
