"""The benchmark of controllers trains one and compares it. Nothing here measures anything."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

with pytest.MonkeyPatch.context() as patch:  # scripts: they find one another by path
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import controller as controller_benchmark

from esper.controller.config import CellDomain, CompareConfig, DomainConfig
from esper.fleet.config import FleetConfig
from esper.growth.config import GrowthConfig, LifecycleConfig

pytestmark = [pytest.mark.slow, pytest.mark.extra()]  # benchmarks are checked by `make test-all`

TINY_FLEET = FleetConfig(batch_size=8, steps_per_decision=2, validation_batch=20, validation_samples=40)
TINY_GROWTH = GrowthConfig(blueprints=("norm", "conv3x3"), lifecycle=LifecycleConfig(holding_epochs=1, embargo_epochs=1, withdraw_epochs=1))


@pytest.fixture
def tiny_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = controller_benchmark.SETTINGS["digits"]
    domain = DomainConfig(tasks=("digits",), hosts=("2-3-4",), held_out_hosts=("3-4-4",), fleets=1, horizon=(2, 2))
    ppo = msgspec.structs.replace(whole.training.ppo, num_steps=9, num_epochs=1, num_minibatches=2)
    training = msgspec.structs.replace(whole.training, hosts=4, rounds=2, domain=domain, fleet=TINY_FLEET, growth=TINY_GROWTH, ppo=ppo)
    cells = CellDomain(sources=("digits",), families=("mlp",), width=(2, 3), blocks=(1, 1), samples_of_a_life=(600, 600), horizon=(6, 6))
    comparison = CompareConfig(cells=2, hosts=2, training_cells=1, prices=(0.1,), device="cpu", threads=1, domain=cells)
    monkeypatch.setitem(controller_benchmark.SETTINGS, "digits", controller_benchmark.Setting(training, comparison, ranks=1))


@pytest.mark.usefixtures("tiny_setting")
def test_a_controller_is_trained_and_compared_with_all_others(tmp_path: Path) -> None:
    path, folder = tmp_path / "controller.jsonl", tmp_path / "run"
    controller_benchmark.main(["--run", str(folder), "--output", str(path), "--minutes", "0"])
    records = [json.loads(line) for line in path.read_text().splitlines()][1:]
    first, last = records[0], records[-1]
    assert (first["kind"], first["status"], first["rounds"]) == ("training", "stopped", 1)  # the time was over after one of two rounds
    assert first["samples_per_s"] > 0
    assert last["kind"] == "comparison"
    names = {record["contestant"] for record in records if record["kind"] == "row"}
    assert names >= {"learned", "never", "early", "random", "blind", "tuned", "rule", "heuristic", "longer", "grid"}
    learned = [record for record in records if record["kind"] == "record" and record.get("contestant") == "learned"]
    assert {(record["cell"], record["host_seed"]) for record in learned} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert (folder / "controller.safetensors").exists()


def test_a_time_limit_is_refused_where_several_processes_train(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        controller_benchmark.main(["--minutes", "1"])
    assert "add --ranks 1" in capsys.readouterr().err


def test_a_round_is_a_whole_life_of_every_host() -> None:
    for setting in controller_benchmark.SETTINGS.values():
        life = (setting.training.domain.horizon[1] + 1) * setting.training.actions
        assert setting.training.ppo.num_steps == life
