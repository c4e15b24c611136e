"""Levels of telemetry and the profiler, in small runs of the learner and of growth."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import esper
import esper.controller.events
import esper.growth.events
import esper.league.events
import esper.rl.run_setup
from esper.cli.main import main
from esper.growth.telemetry import GrowthMonitor
from esper.profiling import FORWARD, PARTS, TRACE, Profiler
from esper.rl import TrainConfig, train_run
from esper.rl.config import NetworkConfig, PPOConfig, ThresholdsConfig
from esper.rl.events import Update
from esper.runs import Event, read
from esper.runs.anomalies import Anomaly
from esper.runs.events import event_type_of
from esper.runs.folder import EVENTS
from esper.runs.telemetry import DETAIL, LEVEL_OF, Internals, ResourceMeter, Telemetry

CONFIG = TrainConfig(
    env="cue",
    env_args={"delay": 2},
    num_envs=4,
    total_steps=8 * 4 * 8,
    device="cpu",
    threads=1,
    eval_episodes=2,
    ppo=PPOConfig(num_steps=8, num_epochs=1, num_minibatches=2, network=NetworkConfig(hidden_size=4, encoder_sizes=(4,), head_sizes=(4,))),
)


def learner_events(folder: Path, **changes: Any) -> list[Event]:
    train_run(msgspec.structs.replace(CONFIG, **changes), folder)
    return [record.event for record in read(folder / EVENTS)]


def kinds(events: list[Event]) -> set[str]:
    return {event.kind for event in events}


def test_every_kind_with_a_level_is_an_event_and_every_detail_a_field() -> None:
    assert all(event_type_of(kind) is not None for kind in LEVEL_OF)
    for kind, fields in DETAIL.items():
        event_type = event_type_of(kind)
        assert event_type is not None
        assert set(fields) <= set(event_type.__struct_fields__)


@pytest.mark.slow
def test_a_learner_writes_more_at_each_level(tmp_path: Path) -> None:
    off, minimal, normal, debug = (
        learner_events(tmp_path / level, telemetry=level, ppo=msgspec.structs.replace(CONFIG.ppo, thresholds=ThresholdsConfig()))
        for level in ("off", "minimal", "normal", "debug")
    )
    assert kinds(off) == {"header", "run_declared", "run_started", "checkpoint_evaluated", "evaluated", "run_ended"}
    assert kinds(minimal) - kinds(off) == {"update"}
    assert kinds(normal) - kinds(minimal) == {"calibration", "gradient_norms"}
    assert kinds(debug) - kinds(normal) == {"internals"}
    updates = {level: [event for event in events if isinstance(event, Update)] for level, events in (("m", minimal), ("n", normal))}
    assert [update.entropy for update in updates["m"]] == [{}] * 8
    assert all(update.entropy["action"] > 0 for update in updates["n"])
    assert [update.policy_loss for update in updates["m"]] == [update.policy_loss for update in updates["n"]]  # nothing else changes
    internals = [event for event in debug if isinstance(event, Internals)]
    assert len(internals) == 8
    assert all(event.hidden_state is not None and 0 < event.hidden_state < 10 for event in internals)
    assert all(event.memory_bytes > 10 * 2**20 and set(event.inputs["obs"]) == {"size", "spread"} for event in internals)


@pytest.mark.slow
def test_an_anomaly_raises_the_level_for_the_next_updates(tmp_path: Path) -> None:
    ppo = msgspec.structs.replace(CONFIG.ppo, thresholds=ThresholdsConfig(entropy_collapse=2.0))  # every entropy is below it
    events = learner_events(tmp_path / "run", telemetry="minimal", telemetry_escalation=3, ppo=ppo)
    (anomaly,) = (event for event in events if isinstance(event, Anomaly))
    assert (anomaly.what, anomaly.subject, anomaly.step) == ("entropy_collapse", "action", 32)
    assert [event.step // 32 for event in events if isinstance(event, Internals)] == [2, 3, 4]
    assert [event.update for event in events if isinstance(event, Update) and event.entropy] == [2, 3, 4]
    none = learner_events(tmp_path / "none", telemetry="minimal", telemetry_escalation=0, ppo=ppo)
    assert "internals" not in kinds(none)


def test_the_level_ends_after_as_many_updates_as_the_escalation_says() -> None:
    begun = Anomaly(step=1, what="kl", subject="", value=1.0, limit=0.5, advice="")
    telemetry = Telemetry("normal", escalation=2)
    levels = []
    for anomalies in ([], [begun], [], [], [msgspec.structs.replace(begun, has_ended=True)], []):
        levels.append(telemetry.level)
        telemetry.end_update(anomalies)
    assert levels == ["normal", "normal", "debug", "debug", "normal", "normal"]


# Growth


def grown_events(folder: Path, *, epochs: int = 4, learning_rate: float = 0.01, **options: Any) -> list[Event]:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    targets = inputs[:, :3].argmax(dim=1)
    batches = [(inputs[start : start + 16], targets[start : start + 16]) for start in range(0, 64, 16)]
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    esper.grow(
        model,
        batches,
        batches,
        nn.functional.cross_entropy,
        epochs=epochs,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=learning_rate),
        controller="never",
        run=folder,
        progress=False,
        **options,
    )
    return [record.event for record in read(folder / EVENTS)]


@pytest.mark.slow
def test_a_growing_run_writes_more_at_each_level(tmp_path: Path) -> None:
    off, minimal, normal, debug = (grown_events(tmp_path / level, telemetry=level) for level in ("off", "minimal", "normal", "debug"))
    assert kinds(off) == {"header", "run_declared", "growth_started", "growth_finished"}
    assert kinds(minimal) - kinds(off) == {"epoch_ended"}
    assert all(not event.slots for event in minimal if isinstance(event, esper.growth.events.EpochEnded))
    assert all(event.slots for event in normal if isinstance(event, esper.growth.events.EpochEnded))
    internals = [event for event in debug if isinstance(event, Internals)]
    assert len(internals) == 4
    assert all({"0", "2"} <= set(event.gradient_norms) and event.inputs["tensor 0"]["spread"] > 0.5 for event in internals)


@pytest.mark.slow
def test_a_growing_run_whose_loss_stands_still_is_a_plateau(tmp_path: Path) -> None:
    events = grown_events(tmp_path / "run", epochs=10, learning_rate=1e-9)
    anomalies = [event for event in events if isinstance(event, Anomaly)]
    assert [(anomaly.what, anomaly.subject) for anomaly in anomalies] == [("plateau", "train_loss")]
    assert kinds(grown_events(tmp_path / "healthy", epochs=10)) & {"anomaly"} == set()


def epoch(number: int, **changes: Any) -> esper.growth.events.EpochEnded:
    values = {"train_loss": 1.0, "val_loss": 1.0, "learning_rate": 0.1, "decision": "", "slots": [], "parameters": 1, "flops": 1}
    return esper.growth.events.EpochEnded(epoch=number, **(values | changes))


def test_a_validation_loss_that_rises_again_is_a_degradation() -> None:
    monitor, losses = GrowthMonitor(), [2.0, 1.5, 1.0, 0.8, 0.9, 1.4, 1.5, 1.6]
    found = [
        monitor.see(epoch(number, train_loss=1 / number, val_loss=loss), uninformed=2.3, memory={})
        for number, loss in enumerate(losses, start=1)
    ]
    assert [[(one.what, one.subject) for one in each] for each in found] == [[]] * 7 + [[("degradation", "val_loss")]]


def test_seeds_with_exploding_gradients_are_an_anomaly_of_their_slot() -> None:
    view = esper.growth.events.SlotView("conv1", 1, "TRAINING", "norm", 0.0, 1, 0.1, None, None, None, 1, 0.0)
    (anomaly,) = GrowthMonitor().see(epoch(1, slots=[view]), uninformed=2.3, memory={})
    assert (anomaly.what, anomaly.subject, anomaly.value) == ("gradient_health", "conv1", 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [100.0, 0.0], ids=["larger", "constant"])
def test_inputs_of_a_growing_run_that_leave_their_range_are_a_drift(factor: float, tmp_path: Path) -> None:
    class Drifting:
        """A loader whose inputs change after six epochs."""

        epochs = 0

        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            self.epochs += 1
            generator = torch.Generator().manual_seed(self.epochs)
            for _ in range(3):
                inputs = torch.randn(32, 4, generator=generator)
                yield inputs * (factor if self.epochs > 6 else 1.0), inputs[:, :3].argmax(dim=1)

    steady = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    val = [(steady[:16], steady[:16, :3].argmax(dim=1)), (steady[16:], steady[16:, :3].argmax(dim=1))]
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    esper.grow(model, Drifting(), val, nn.functional.cross_entropy, epochs=16, controller="never", run=tmp_path / "run", progress=False)
    drifts = [
        record.event
        for record in read(tmp_path / "run" / EVENTS)
        if isinstance(record.event, Anomaly) and record.event.what == "input_drift"
    ]
    assert drifts[0].step > 6
    assert drifts[0].subject == "tensor 0"


@pytest.mark.slow
def test_memory_that_a_growing_run_takes_in_every_epoch_is_an_anomaly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [2**30]
    monkeypatch.setattr("esper.growth.telemetry.resident_bytes", lambda: sum(held))

    class Leaking:
        def on_epoch_ended(self, event: esper.growth.events.EpochEnded) -> None:
            held.append(16 * 2**20)

    events = grown_events(tmp_path / "run", epochs=16, callbacks=[Leaking()])
    (anomaly,) = (event for event in events if isinstance(event, Anomaly))
    assert (anomaly.what, anomaly.value) == ("memory_growth", 16 * 2**20)
    assert "anomaly" not in kinds(grown_events(tmp_path / "healthy", epochs=16))


# The profiler


def test_time_belongs_to_the_innermost_part_and_to_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    profiler = Profiler(2, tmp_path, torch.device("cpu"), warmup=1)
    for _ in range(6):
        with FORWARD:
            torch.ones(300, 300) @ torch.ones(300, 300)
        profiler.step()
    assert profiler.profiled == 2
    assert profiler.seconds["forward"] > 0
    assert profiler.seconds["backward"] == 0
    trace = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("forward") >= 2
    assert "2 steps profiled" in profiler.table()


def test_a_profiler_that_never_began_says_so(tmp_path: Path) -> None:
    profiler = Profiler(2, tmp_path, torch.device("cpu"))
    profiler.step()
    profiler.close()
    assert "no step was profiled" in profiler.table()
    assert not (tmp_path / TRACE).exists()


@pytest.mark.slow
def test_a_profiled_learner_prints_the_shares_of_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"num-envs": 4, "num-steps": 8, "total-steps": 192, "num-epochs": 1, "hidden-size": 4, "eval-episodes": 0}
    small = [f"--{name}={value}" for name, value in options.items()]
    assert main(["ppo", "train", "cue", *small, "--run", str(tmp_path / "run"), "--profile", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in PARTS)
    assert "2 updates profiled" in printed
    assert (tmp_path / "run" / TRACE).exists()


@pytest.mark.slow
def test_a_profiled_growth_waits_for_data_and_steps_its_optimiser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grown_events(tmp_path / "run", profile=4)
    printed = capsys.readouterr().err
    assert "4 steps profiled" in printed
    shares = {line.split("  ")[0]: line for line in printed.splitlines() if "%" in line}
    assert set(shares) == set(PARTS)
    assert "0.0%" in shares["environment"]
    assert "0.0%" not in shares["optimiser"]


def test_resources_are_read_at_most_once_a_second_and_a_gpu_that_tells_no_use_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cpu, asked = [100.0], [5.0], list[str]()

    def refuse(device: torch.device) -> int:
        asked.append(str(device))
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr("esper.runs.telemetry.time", SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: cpu[0]))
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    meter = ResourceMeter()
    now[0], cpu[0] = 102.0, 8.0
    first = meter.read(torch.device("cuda"))
    assert first["cpu_cores"] == 1.5
    assert first["memory_bytes"] > 2**20
    assert (first["device_memory_bytes"], first["device_peak_bytes"], first["device_total_bytes"]) == (7, 9, 80)
    now[0], cpu[0] = 102.5, 9.0
    assert meter.read(torch.device("cuda")) is first
    now[0] = 103.5
    assert "device_use" not in meter.read(torch.device("cuda"))
    assert asked == ["cuda"]
    assert set(ResourceMeter().read(torch.device("cpu"))) == {"memory_bytes", "cpu_cores"}
