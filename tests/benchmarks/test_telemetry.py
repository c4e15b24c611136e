"""The benchmark of telemetry runs for every kind of training. Nothing here measures anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.runs import telemetry

pytestmark = [pytest.mark.slow, pytest.mark.extra()]  # benchmarks are checked by `make test-all`


def test_every_kind_of_training_has_a_share_of_telemetry_with_its_interval(tmp_path: Path) -> None:
    tiny = ["--hosts", "2", "--batch", "4", "--horizon", "6", "--samples", "32", "--validation", "8"]
    out = tmp_path / "telemetry.jsonl"
    telemetry.main(["--what", "grow", "ppo", "fleet", "--repeats", "3", "--steps", "4", *tiny, "--out", str(out)])
    _, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["what"] for record in records] == ["grow", "ppo", "fleet"]
    for record in records:
        assert 0 < record["share"]["estimate"] < 1
        assert record["share"]["low"] <= record["share"]["estimate"] <= record["share"]["high"]
        assert record["step_ms"] > 0
        assert record["is_within"] == (record["share"]["high"] <= 0.02)
