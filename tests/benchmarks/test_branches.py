"""The benchmark of branches pairs every branch with its host, and learns from what it wrote. Nothing here measures anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.controller import branches
from esper.controller.branches import Change
from esper.controller.cells import Cell
from esper.controller.evaluation import EvalRun
from esper.controller.learned import load_controller, save_controller
from esper.growth.config import RentConfig
from tests.controller.test_branches import gains_of

pytestmark = [pytest.mark.slow, pytest.mark.extra()]  # benchmarks are checked by `make test-all`

SMALL = Cell(host="conv-2x2", samples=200, batch_size=16, steps_per_decision=4, horizon=8)


def test_what_is_collected_can_be_tested_and_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(branches, "draw_cell", lambda domain, *, number, seed: SMALL)
    monkeypatch.setattr(branches, "HOSTS", 3)
    monkeypatch.chdir(tmp_path)
    branches.main(["collect", "--cells", "3", "--jobs", "1", "--draw", "7"])
    records = [json.loads(line) for line in Path("branches.jsonl").read_text().splitlines()]
    found = [record for record in records if "features" in record]
    assert {record["number"] for record in found} == {0, 1, 2}
    assert all(record["step"] != record["advised"] for record in found)
    for number in range(3):
        of_cell = [record for record in found if record["number"] == number]
        assert len({(*record["step"],) for record in of_cell if record["step"][0] != "wait"}) <= 3, "the same steps for all hosts"
    steps = {(record["number"], record["host"], *record["step"], record["features"][0]): record["change"] for record in found}
    assert any(change != [0.0, 0.0, 0.0] for change in steps.values())

    monkeypatch.setattr(branches, "collect_cell", None)  # what is in the file is not collected again
    branches.main(["collect", "--cells", "3", "--jobs", "1", "--draw", "7"])
    branches.main(["test", "--branches", "branches.jsonl", "--folds", "3", "--out", "tested.jsonl"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells"] == 3
    branches.main(["fit", "--branches", "branches.jsonl", "--to", "mine.safetensors", "--caution", "0.25"])
    description = load_controller("mine.safetensors").description
    assert description.gains is not None
    assert description.gains.caution == 0.25
    assert (description.info["branches"], description.info["cells"]) == (len(found), 3)


def test_a_controller_can_decide_before_and_behind_the_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "draw_cell", lambda domain, *, number, seed: SMALL)
    monkeypatch.setattr(branches, "HOSTS", 4)
    save_controller(tmp_path / "eager.safetensors", ensemble=gains_of(-0.5))
    cases, _ = branches._hosts_of(0, 7, "cpu", room=1e18, keys={"": (), "chosen": ("chosen",)}, file=tmp_path / "eager.safetensors")
    assert len(cases) == 8
    records = branches.collect_cell(0, 7, 1e18, "cpu", tmp_path / "eager.safetensors")
    of_host = {host: [record["step"] for record in records if record["host"] == host] for host in range(4)}
    assert any(len(steps) > 3 for steps in of_host.values()), "the controller's own choice beside the drawn ones"


def test_the_shipped_controller_is_learned_from_the_kept_branches() -> None:
    records = branches.read([branches.RESULTS / "controller_branches.jsonl.xz"])
    some = branches.branches_of(records)
    info = load_controller(Path(branches.__file__).parents[2] / "src/esper/controller/trained/learned.safetensors").description.info
    assert (len(some), len(set(some.cells))) == (info["branches"], info["cells"])


def test_a_change_is_told_by_the_validation_loss_and_never_by_the_test_data() -> None:
    counts: dict[str, int] = {"parameters": 9, "added_parameters": 0, "flops_per_sample": 9, "added_flops": 0, "total_flops": 0, "grown": 0}
    setting: dict[str, Any] = {"task": "digits", "host": "conv-2x2", "controller": "", "price": None, "seed": 0, "horizon": 8, "steps": 8}
    run = EvalRun(**setting, **counts, test_loss=5.0, val_loss=1.0, kept=[], rollbacks=0, unit=2.0)
    other = msgspec.structs.replace(run, test_loss=0.0, val_loss=1.5, added_parameters=9)
    assert branches.change_of(run, other) == (pytest.approx(-0.25), pytest.approx(-math.log(2)), 0.0)


def test_the_cost_of_a_change_is_that_of_the_loss_and_of_both_rents() -> None:
    assert Change(0.1, 2.0, 3.0).cost(RentConfig(parameters=0.01, flops=0.02)) == pytest.approx(0.1 + 0.02 + 0.06)
