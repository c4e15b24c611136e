"""The benchmark of the value model: lives that are learned from, and the comparison in other cells."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from esper.controller.cells import CellDomain
from esper.controller.plans import CONSTANT_PLANS

with pytest.MonkeyPatch.context() as patch:  # scripts: they find one another by path
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import controller_value

pytestmark = pytest.mark.extra()  # benchmarks are checked by `make test-all`

QUICK = CellDomain(
    sources=("digits",),
    families=("mlp",),
    width=(2, 4),
    blocks=(1, 1),
    samples_of_a_life=(4_000, 4_000),
    horizon=(8, 8),
    batch_size=(32, 32),
)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_model_is_fitted_to_lives_and_compared_in_other_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(controller_value, "TRAINED", QUICK)
    monkeypatch.setattr(controller_value, "UNSEEN", {"as trained on": QUICK})
    monkeypatch.setattr(controller_value, "PRICES", (0.003, 0.1))
    folder, out = tmp_path / "lives", tmp_path / "out.jsonl"
    of_lives = ["lives", "--folder", str(folder), "--hosts", "1", "--plans", "2", "--jobs", "1"]
    controller_value.main([*of_lives, "--cells", "1"])
    first = (folder / "cell_0.npz").stat().st_mtime_ns
    controller_value.main([*of_lives, "--cells", "2"])
    assert (folder / "cell_0.npz").stat().st_mtime_ns == first, "cells that are there are kept"
    records = controller_value.read_records(folder)
    assert set(records.cells) == {0, 1}
    assert np.stack(records.features).shape == (len(records), controller_value.ValueModel().mean.numel())
    lives = [line for line in lines(folder / "lives.jsonl") if line.get("what") == "lives"]
    assert [set(line["constant"]) for line in lives] == [{plan.name for plan in CONSTANT_PLANS}] * 2  # type: ignore[call-overload]
    controller_value.main(["compare", "--folder", str(folder), "--cells", "1", "--hosts", "2", "--jobs", "1", "--out", str(out)])
    hosts, summary = [line for line in lines(out) if line.get("what") == "host"], lines(out)[-1]
    assert len(hosts) == 2 * (len(CONSTANT_PLANS) + 2 * 2)
    assert all(line["gain"] == 0 for line in hosts if line["contestant"] == "never")
    assert [(row["price"], row["contestant"]) for row in summary["rows"]] == [  # type: ignore[attr-defined]
        (price, name) for price in (0.003, 0.1) for name in ("blind", "tuned", "heuristic", "value")
    ]
    assert "ahead of never" in capsys.readouterr().out


def test_without_lives_there_is_nothing_to_fit(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there are no cells in .*; make some with the command lives"):
        controller_value.main(["compare", "--folder", str(tmp_path), "--out", str(tmp_path / "out.jsonl")])


def host(contestant: str, seed: int, gain: float, *, size: float = 0.0) -> dict[str, object]:
    return {"cell": 0, "contestant": contestant, "host_seed": seed, "gain": gain, "size": size}


def test_a_plan_is_tuned_on_the_other_hosts_of_a_cell_after_rent() -> None:
    gains = {plan.name: (0.0, 0.0, 0.0) for plan in CONSTANT_PLANS}
    gains |= {"widen_100 at 0": (0.5, 0.1, 0.1), "deep at 0": (0.0, 0.2, 0.2)}
    records = [
        host(name, seed, gain, size=2.0 if name == "deep at 0" else 0.0) for name, three in gains.items() for seed, gain in enumerate(three)
    ]
    # Without the first host, the branches are best; without another one, the widening is.
    assert controller_value.tuned_worth(records, 0.0) == pytest.approx((0.0 + 0.1 + 0.1) / 3)
    assert controller_value.tuned_worth(records, 1.0) == pytest.approx((0.5 + 0.1 + 0.1) / 3)


def test_the_blind_plan_is_the_best_one_on_the_cells_that_were_learned_from_at_every_price() -> None:
    nothing = {plan.name: [0.0, 0.0] for plan in CONSTANT_PLANS}
    lives = [{"constant": nothing | {"widen_700 at 0": [0.2, 4.0], "widen_100 at 0": [0.1, 0.5]}}, {"constant": nothing}]
    assert controller_value.blind_plans(lives) == {
        0.003: "widen_700 at 0",
        0.01: "widen_700 at 0",
        0.03: "widen_100 at 0",
        0.1: "widen_100 at 0",
    }
