"""The benchmark of looking ahead pairs its runs correctly, and its summary is over cells. Nothing here measures anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.controller import study
from esper.controller.cells import Cell

pytestmark = [pytest.mark.slow, pytest.mark.extra()]  # benchmarks are checked by `make test-all`


def test_all_arms_of_a_cell_are_trained_and_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Cell(host="conv-2x1", samples=64, batch_size=16, steps_per_decision=2, horizon=8)
    monkeypatch.setattr(study, "draw_cell", lambda domain, *, number, seed: small)
    out = tmp_path / "lookahead.jsonl"
    options = ["--cells", "2", "--hosts", "2", "--jobs", "1", "--draw", "7", "--out", str(out)]
    study.main([*options, "--arms", "never", "heuristic", "lookahead", "first branches"])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    runs = [record for record in records if "arm" in record and "number" in record]
    assert len(runs) == 2 * 2 * 4
    assert {run["arm"] for run in runs if run["seeds"] and run["seeds"][0].startswith("2 blocks.0 ")} >= {"first branches"}
    same = [run for run in runs if run["arm"] != "lookahead" and not run["seeds"]]
    assert all(run["test_loss"] == other["test_loss"] for run in same for other in same if run["seed"] == other["seed"])
    assert all(len(run["chosen"]) == (run["arm"] == "lookahead") for run in runs)
    summary = [record for record in records if record.get("what") == "compared"]
    assert [(one["arm"], one["other"], one["cells"]) for one in summary] == [
        ("first branches", "heuristic", 2),
        ("heuristic", "never", 2),
        ("lookahead", "heuristic", 2),
    ]
    monkeypatch.setattr(study, "run_cell", None)  # what is in the file is not trained again
    study.main(options)
    assert "first branches  heuristic  2" in capsys.readouterr().out


def test_rules_of_growth_are_a_part_of_the_name_and_compared_with_the_arm_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Cell(host="conv-2x1", samples=64, batch_size=16, steps_per_decision=2, horizon=5)
    monkeypatch.setattr(study, "draw_cell", lambda domain, *, number, seed: small)
    options = ["--cells", "2", "--hosts", "1", "--jobs", "1", "--out", str(tmp_path / "rules.jsonl"), "--arms", "first branches"]
    study.main(options)
    study.main([*options, "--lifecycle", "blending=gate", "holding_epochs=2"])
    assert "first branches blending=gate holding_epochs=2  first branches  2" in capsys.readouterr().out


def test_differences_are_means_of_cells_and_the_costs_those_of_all() -> None:
    def run(number: int, seed: int, arm: str, loss: float, gflops: float) -> dict[str, object]:
        return {"draw": 0, "number": number, "seed": seed, "arm": arm, "test_loss": loss, "rent_paid": 0.1, "gflops": gflops, "seeds": []}

    runs = [run(0, 0, "a", 1.0, 2.0), run(0, 0, "b", 1.5, 1.0), run(0, 1, "a", 1.0, 2.0), run(0, 1, "b", 1.1, 1.0)]
    runs += [run(1, 0, "a", 1.0, 4.0), run(1, 0, "b", 1.0, 1.0), run(2, 0, "a", 9.0, 1.0)]
    found = study.compared(runs, "a", "b")
    assert (found["cells"], found["difference"], found["worst"]) == (2, pytest.approx(-0.15), 0.0)
    assert (found["times_flops"], found["times_flops_of_all"]) == (pytest.approx(3.0), pytest.approx(8 / 3))
