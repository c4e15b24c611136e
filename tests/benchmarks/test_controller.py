"""The benchmark of controllers trains one and compares it. Nothing here measures anything."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

with pytest.MonkeyPatch.context() as patch:  # scripts: they find one another by path
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import controller as controller_benchmark

from esper.controller.config import DomainConfig
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
    comparison = msgspec.structs.replace(
        whole.comparison,
        tasks=("digits",),
        hosts=("3-4-4",),
        seeds=2,
        horizon=2,
        tuning_seeds=1,
        sweep=("4-4-4",),
        fleet=TINY_FLEET,
        growth=TINY_GROWTH,
    )
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
    names = {record["controller"] for record in records if record["kind"] == "run"}
    assert names == {"never", "learned", "heuristic", "schedule", "random", "longer", "final size", "static 4-4-4"}
    assert len([record for record in records if record["kind"] == "verdict"]) == 4
    assert (folder / "controller.safetensors").exists()


def test_a_time_limit_is_refused_where_several_processes_train(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        controller_benchmark.main(["--minutes", "1"])
    assert "add --ranks 1" in capsys.readouterr().err


def test_no_setting_trains_on_the_hosts_that_it_compares() -> None:
    for setting in controller_benchmark.SETTINGS.values():
        assert set(setting.comparison.hosts) <= set(setting.training.domain.held_out_hosts)
        assert setting.comparison.tasks == setting.training.domain.tasks
        assert setting.comparison.seeds >= 10
        life = (setting.comparison.horizon + 1) * setting.training.actions
        assert setting.training.ppo.num_steps == life
