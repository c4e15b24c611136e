"""The benchmark of controllers: lives that are learned from, value models and policies, and their comparison in other cells."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from esper.controller.config import MOVES, DomainConfig
from esper.controller.layout import FEATURES
from esper.controller.plans import CONSTANT_PLANS

with pytest.MonkeyPatch.context() as patch:  # scripts: they find one another by path
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import controller as controller_benchmark

pytestmark = pytest.mark.extra()  # benchmarks are checked by `make test-all`

QUICK = DomainConfig(
    sources=("digits",),
    families=("mlp",),
    width=(2, 4),
    blocks=(1, 1),
    samples_of_a_life=(1_600, 1_600),
    horizon=(8, 8),
    batch_size=(32, 32),
)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_model_is_fitted_to_lives_and_compared_in_other_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(controller_benchmark, "TRAINED", QUICK)
    monkeypatch.setattr(controller_benchmark, "COMPARED", {"as trained on": QUICK})
    monkeypatch.setattr(controller_benchmark, "PRICES", (0.1,))
    folder, out = tmp_path / "lives", tmp_path / "out.jsonl"
    of_lives = ["lives", "--folder", str(folder), "--variants", "2", "--hosts", "1", "--plans", "2", "--jobs", "1"]
    controller_benchmark.main([*of_lives, "--cells", "1"])
    first = (folder / "cell_0.npz").stat().st_mtime_ns
    controller_benchmark.main([*of_lives, "--cells", "2", "--most-flops", "1"])
    assert not (folder / "cell_1.npz").exists(), "its hosts are too dear"
    controller_benchmark.main([*of_lives, "--cells", "2"])
    assert (folder / "cell_0.npz").stat().st_mtime_ns == first, "cells that are there are kept"
    records = controller_benchmark.read_records(folder)
    assert len(set(records.cells)) == 2
    assert np.stack(records.features).shape == (len(records), len(FEATURES))
    lives = [line for line in lines(folder / "lives.jsonl") if line.get("what") == "lives"]
    assert [set(line["constant"]) for line in lives] == [{plan.name for plan in CONSTANT_PLANS}] * 4  # type: ignore[call-overload]
    assert [line["cell"] for line in lives] == [0, 0, 1, 1]
    assert len({line["learning_rate"] for line in lives}) == 4
    assert all(len(line["first"]) == len(MOVES) for line in lives)  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match=r"there is no .*value_1.* to start from; make it with the command fit"):
        controller_benchmark.main(["train", "--folder", str(folder)])
    with pytest.raises(SystemExit, match="there is no controller in"):
        controller_benchmark.main(["compare", "--folder", str(folder), "--out", str(out)])
    controller_benchmark.main(["fit", "--folder", str(folder), "--trainings", "2"])
    controller_benchmark.main(["train", "--folder", str(folder), "--rounds", "1", "--hosts-at-once", "4", "--jobs", "1", "--core", "none"])
    of_compare = ["compare", "--folder", str(folder), "--hosts", "2", "--jobs", "1", "--out", str(out), "--controls", "0"]
    controller_benchmark.main([*of_compare, "--cells", "1"])
    controller_benchmark.main([*of_compare, "--cells", "2"])
    hosts, summary = [line for line in lines(out) if line.get("what") == "host"], lines(out)[-1]
    assert len(hosts) == 2 * 2 * (len(CONSTANT_PLANS) + 1 + 6), "the first cell is not trained again"
    assert all(line["gain"] == 0 for line in hosts if line["contestant"] == "never")
    names = ("value", "never", "early", "random", "blind", "tuned", "rule", "heuristic", "without memory 1")
    assert [(row["price"], row["contestant"]) for row in summary["rows"]] == [(0.1, name) for name in names]  # type: ignore[attr-defined]
    capsys.readouterr()
    controller_benchmark.main(["tables", "--out", str(out)])
    text = capsys.readouterr().out
    for part in (
        "all cells (2), price 0.1",
        "value (2 trainings)",
        "have the moves and FLOPs of value 1 alone",
        "every training of value alone",
    ):
        assert part in text


def test_without_lives_there_is_nothing_to_fit(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there are no cells in .*; make some with the command lives"):
        controller_benchmark.main(["fit", "--folder", str(tmp_path)])


def test_tables_need_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        controller_benchmark.main(["tables", "--out", str(tmp_path / "out.jsonl")])
    assert "make one with the command compare" in capsys.readouterr().err
