"""That the benchmark of fleets runs and trains the same seeds in every way. Nothing here measures anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

with pytest.MonkeyPatch.context() as patch:  # scripts: they find one another by path
    patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import fleet as fleet_benchmark

from esper.fleet import TaskTensors

TINY = ["--hosts", "3", "--batch", "4", "--steps", "2", "--repeats", "2", "--threads", "1", "--channels", "2-3"]


def test_every_way_is_measured_with_every_kind_of_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.jsonl"
    fleet_benchmark.main([*TINY, "--shape", "1x8x8", "--output", str(path)])
    first, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["torch"] == torch.__version__
    assert [(record["seeds"], record["way"]) for record in records] == [
        (seeds, way) for seeds in ("none", "one per host", "one per slot") for way in ("sequential", "fleet")
    ]
    for record in records:
        assert record["samples_per_s"] > 0
        assert (record["hosts"], record["batch"], record["host"], record["compiles"]) == (3, 4, "2-3", 0)
        assert len(record["seconds"]) == 2
        assert record["ratio_to_streams"] is None
    assert records[0]["ratio_to_sequential"] == 1
    assert len(capsys.readouterr().out.splitlines()) == len(records)


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    fleet_benchmark.main([*TINY[:-2], "--channels", "2-2-2", "--seeds", "none"])
    assert not list(tmp_path.iterdir())
    assert [json.loads(line).get("way") for line in capsys.readouterr().out.splitlines()] == [None, "sequential", "fleet"]


def test_the_ways_train_the_same_hosts_on_the_same_batches_with_the_same_seeds() -> None:
    task = fleet_benchmark.synthetic_task((1, 8, 8), batch=4)
    tensors = TaskTensors.of(task, device=torch.device("cpu"), dtype=torch.float32)
    plans = fleet_benchmark.plans("one per slot", 3, ["blocks.0", "blocks.1"], ["norm", "conv3x3"])
    setup = fleet_benchmark.Setup(task, tensors, torch.device("cpu"), 3, 4, 5, "2-3", "float32", plans)
    alone, together = fleet_benchmark.Sequential(setup), fleet_benchmark.Together(setup)
    for way in (alone, together):
        way.turn()
    for row, host in enumerate(alone.hosts):
        for name, tensor in together.fleet.host.rows.state_dict_of(row).items():
            torch.testing.assert_close(tensor, host.model.state_dict()[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("seeds", "count"), [("none", 0), ("one per host", 1), ("one per slot", 3)])
def test_plans_mix_slots_and_blueprints(seeds: str, count: int) -> None:
    plans = fleet_benchmark.plans(seeds, 24, ["a", "b", "c"], ["x", "y", "z", "w"])
    assert {len(plan) for plan in plans} == {count}
    planted = {(slot, blueprint) for plan in plans for _, slot, blueprint in plan}
    assert len(planted) == (12 if count else 0)
