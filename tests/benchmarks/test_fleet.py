"""The benchmark of fleets runs and trains the same seeds with every method. Nothing here measures anything."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks.clock import Parts
from benchmarks.fleet import loop as fleet_loop, speed as fleet_speed
from benchmarks.fleet.floor import least_bytes
from esper.fleet import TaskTensors
from esper.tasks import ConvHost

TINY = ["--hosts", "3", "--batch", "4", "--steps", "2", "--repeats", "2", "--threads", "1", "--channels", "2-3"]

pytestmark = [pytest.mark.slow, pytest.mark.extra()]  # benchmarks are checked by `make test-all`


def test_every_method_is_measured_with_every_kind_of_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.jsonl"
    fleet_speed.main([*TINY, "--shape", "1x8x8", "--output", str(path)])
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
    assert [record["way"] for record in records if "floor_samples_per_s" in record] == ["fleet"]
    assert records[1]["distance_from_floor"] == pytest.approx(records[1]["floor_samples_per_s"] / records[1]["samples_per_s"], rel=1e-4)
    assert len(capsys.readouterr().out.splitlines()) == len(records)


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    fleet_speed.main([*TINY[2:-2], "--channels", "2-2-2", "--seeds", "none", "--hosts", "1", "3"])
    assert not list(tmp_path.iterdir())
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ways = [(record["way"], record["hosts"]) for record in lines[1:]]
    assert ways == [("sequential", 1), ("fleet", 1), ("sequential", 3), ("fleet", 3)]


def test_all_methods_train_the_same_hosts_on_the_same_batches_with_the_same_seeds() -> None:
    task = fleet_speed.synthetic_task((1, 8, 8), batch=4)
    tensors = TaskTensors.of(task, device=torch.device("cpu"), dtype=torch.float32)
    plans = fleet_speed.plans("one per slot", 3, {"blocks.0": ["norm", "conv3x3"], "blocks.1": ["widen_50", "conv3x3"]})
    setup = fleet_speed.Setup(
        task=task,
        tensors=tensors,
        device=torch.device("cpu"),
        hosts=3,
        batch=4,
        steps=5,
        steps_alone=5,
        channels="2-3",
        precision="float32",
        plans=plans,
    )
    alone, together = fleet_speed.Sequential(setup), fleet_speed.Together(setup)
    for way in (alone, together):
        way.turn()
    for row, host in enumerate(alone.hosts):
        for name, tensor in together.fleet.host.rows.state_dict_of(row).items():
            torch.testing.assert_close(tensor, host.model.state_dict()[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("seeds", "count"), [("none", 0), ("one per host", 1), ("one per slot", 3)])
def test_plans_mix_slots_and_blueprints(seeds: str, count: int) -> None:
    plans = fleet_speed.plans(seeds, 24, {slot: ["x", "y", "z", "w"] for slot in "abc"})
    assert {len(plan) for plan in plans} == {count}
    planted = {(slot, blueprint) for plan in plans for _, slot, blueprint in plan}
    assert len(planted) == (12 if count else 0)


def test_the_floor_counts_every_convolution_at_the_size_that_it_works_on() -> None:
    pooled = ConvHost(3, 10, (8, 16), pool=(True, False))
    put_out = 8 * 32 * 32 + 16 * 16 * 16
    assert least_bytes(pooled, (3, 32, 32), "float32") == 4 * (6 * put_out + 2 * 3 * 32 * 32)
    assert least_bytes(ConvHost(1, 2, (4,), pool=(True,), spatial=1), (1, 64), "bfloat16") == 2 * (6 * 4 * 64 + 2 * 64)


def test_the_whole_loop_is_measured_by_whole_lives(tmp_path: Path) -> None:
    path = tmp_path / "loop.jsonl"
    tiny = ["--shape", "1x8x8", "--width", "2", "--blocks", "2", "--hosts", "4", "--batch", "4", "--steps", "2", "--horizon", "6"]
    fleet_loop.main([*tiny, "--samples", "16", "--validation", "8", "--rounds", "1", "--threads", "1", "--output", str(path)])
    first, found = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["torch"] == torch.__version__
    assert found["decided_samples_per_s"] * found["seconds"] == pytest.approx(4 * 4 * 2 * 6, rel=1e-4)
    assert found["samples_per_s"] == pytest.approx(found["rows_per_life"] * found["decided_samples_per_s"], rel=1e-4)
    assert 1 / 4 < found["rows_per_life"] <= 5 / 4, "four hosts that may differ, and one twin"
    assert found["seeds_per_life"] > 0
    assert set(found["seconds_by_part"]) == {"else", *(part for part, _, _ in fleet_loop.TIMED)}
    assert all(seconds > 0 for seconds in found["seconds_by_part"].values())


def test_the_time_of_a_nested_part_is_not_counted_twice() -> None:
    class Work:
        def outer(self) -> None:
            self.inner()
            time.sleep(0.02)

        def inner(self) -> None:
            time.sleep(0.05)

    parts = Parts(torch.device("cpu"))
    began = time.perf_counter()
    with parts.watching([("outside", Work, "outer"), ("inside", Work, "inner")]):
        Work().outer()
    assert parts.seconds["inside"] >= 0.05
    assert parts.seconds["outside"] >= 0.02
    assert sum(parts.seconds.values()) <= time.perf_counter() - began
    before = dict(parts.seconds)
    Work().outer()  # nobody watches any more
    assert parts.seconds == before
