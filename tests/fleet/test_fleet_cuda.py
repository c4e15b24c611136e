"""Fleets on a GPU; skipped where there is none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from esper.fleet import Fleet, FleetConfig, FleetError, HostConfig
from esper.growth.config import BudgetConfig, GrowthConfig, LifecycleConfig
from esper.growth.lifecycle.stages import Decision
from esper.tasks import ConvHost
from tests.fleet.builders import (
    CONFIG,
    LIFECYCLES,
    advance_and_fossilize,
    assert_waits_once,
    germinate,
    germinate_in_every_slot,
    host_settings,
    make_fleet,
    make_host,
    small_task,
    step_in_two_precisions,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_gpu_fleet(lifecycle: LifecycleConfig, config: FleetConfig = CONFIG, device: str = "cuda") -> Fleet:
    growth = GrowthConfig(lifecycle=lifecycle, probe_steps=2, budget=BudgetConfig(max_parameters=None, max_flops=None))
    return make_fleet(host_settings(3, horizon=20), growth, config, device=device)


def train_through_lifecycle(fleet: Fleet) -> None:
    """Train some epochs with seeds in depth and width that germinate, blend and are kept."""
    germinate_in_every_slot(fleet, 0)
    fleet.decide({2: Decision(probe=True)})
    fleet.advance()
    fleet.decide({1: Decision((germinate("blocks.1", "wide_conv3x3"), germinate("blocks.0", "widen_50_chain")))})
    fleet.advance()
    advance_and_fossilize(fleet, 0, "blocks.0", epochs=3)


@LIFECYCLES
def test_a_fleet_on_a_gpu_equals_the_same_on_a_cpu(lifecycle: LifecycleConfig) -> None:
    """In float64, by another lowering."""
    fleets = [make_gpu_fleet(lifecycle, device=device) for device in ("cpu", "cuda")]
    for fleet in fleets:
        train_through_lifecycle(fleet)
    for name, tensor in fleets[0].tensors().items():
        torch.testing.assert_close(fleets[1].tensors()[name].cpu(), tensor, atol=1e-8, rtol=1e-8)
    for host, there in zip(fleets[0].rows, fleets[1].rows, strict=True):
        assert [entry.outcome for entry in host.lifecycles.ledger.seeds] == [entry.outcome for entry in there.lifecycles.ledger.seeds]
        assert there.lifecycles.promises == pytest.approx(host.lifecycles.promises, rel=1e-7)


@LIFECYCLES
def test_hosts_in_a_used_fleet_equal_hosts_in_a_new_one(lifecycle: LifecycleConfig) -> None:
    """In float64, with recorded steps."""
    task, config = small_task(train=90), msgspec.structs.replace(CONFIG, steps_per_decision=6, schedule="none")
    used = make_gpu_fleet(lifecycle, msgspec.structs.replace(CONFIG, steps_per_decision=8))
    train_through_lifecycle(used)
    used.begin(task, make_host, config=config)
    new = Fleet(task, make_host, hosts=3, growth=used.growth, config=config, device="cuda")
    for fleet in (used, new):
        fleet.reset(dict(enumerate(host_settings(3, horizon=20, seed=5))))
        train_through_lifecycle(fleet)
    assert used.recordings == new.recordings > 0
    assert used.memory_per_host() == new.memory_per_host()
    torch.testing.assert_close(used.losses(task.test), new.losses(task.test), atol=1e-9, rtol=0)
    for name, tensor in new.host.tensors.items():
        torch.testing.assert_close(used.host.tensors[name], tensor, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-9), ("float32", 1e-5), ("bfloat16", 2e-2)])
@LIFECYCLES
def test_recorded_and_replayed_steps_equal_plain_steps(lifecycle: LifecycleConfig, precision: str, tolerance: float) -> None:
    config = msgspec.structs.replace(CONFIG, steps_per_decision=8, precision=precision)
    fleets = [make_gpu_fleet(lifecycle, msgspec.structs.replace(config, graphs=graphs)) for graphs in (False, True)]
    for fleet in fleets:
        germinate_in_every_slot(fleet, 0)
        fleet.decide({2: Decision(probe=True)})
        fleet.advance()
        if precision == "float64":
            train_through_lifecycle(fleet)
    assert [fleet.recordings > 0 for fleet in fleets] == [False, True]
    for name, tensor in fleets[0].tensors().items():
        torch.testing.assert_close(fleets[1].tensors()[name], tensor, atol=tolerance, rtol=tolerance)


@LIFECYCLES
def test_recorded_training_on_a_lagging_gpu_equals_synchronised_training(lifecycle: LifecycleConfig) -> None:
    """Sleeps on the current stream before and after every segment: a step that did not wait for its data would read the old ones."""
    config = msgspec.structs.replace(CONFIG, steps_per_decision=8)
    waited, lagging = (make_gpu_fleet(lifecycle, msgspec.structs.replace(config, graphs=graphs)) for graphs in (False, True))
    for fleet in (waited, lagging):
        advance = fleet.advance

        def at_leisure(*arguments: object, fleet: Fleet = fleet, advance: Any = advance) -> Any:
            before_and_after = torch.cuda.synchronize if fleet is waited else lambda: torch.cuda._sleep(20_000_000)
            before_and_after()
            result = advance(*arguments)
            before_and_after()
            return result

        fleet.advance = at_leisure  # type: ignore[method-assign]
        train_through_lifecycle(fleet)
        fleet.advance()
    assert lagging.recordings > 0
    for name, tensor in waited.tensors().items():
        torch.testing.assert_close(lagging.tensors()[name], tensor, atol=1e-9, rtol=1e-9)


@LIFECYCLES
def test_the_device_is_synchronised_once_per_decision(lifecycle: LifecycleConfig) -> None:
    fleet = make_gpu_fleet(lifecycle)
    train_through_lifecycle(fleet)
    germinate_in_every_slot(fleet, 2)
    fleet.decide({1: Decision(probe=True)})
    fleet.advance()  # what is loaded at its first use
    fleet.decide({1: Decision(probe=True)})
    assert_waits_once(fleet)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@LIFECYCLES
def test_one_step_in_lower_precision_agrees_with_float64(precision: str, tolerance: float, lifecycle: LifecycleConfig) -> None:
    step_in_two_precisions(lifecycle, precision, epochs=8, tolerance=tolerance, device="cuda")


@pytest.mark.usefixtures("alone_with_device_memory")
def test_the_estimate_of_memory_per_step_is_close_to_the_measured_use() -> None:
    config = FleetConfig(batch_size=100, steps_per_decision=1, validation_samples=10)

    def host(seed: int) -> torch.nn.Module:
        return ConvHost(1, 10, (32, 64, 64))

    fleet = Fleet(small_task(), host, hosts=32, config=config, device="cuda")
    fleet.reset({row: HostConfig(seed=row) for row in range(32)})
    fleet.advance()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fleet.advance()
    taken = torch.cuda.max_memory_allocated() - before
    memory = fleet.memory_per_host()
    said = 32 * (memory.step + memory.state // 4)  # the snapshots and the hosts themselves were there before
    assert 0.4 * said < taken < 2.5 * said


@pytest.mark.usefixtures("alone_with_device_memory")
def test_a_fleet_too_large_for_the_gpu_is_refused_with_the_number_that_fits() -> None:
    with pytest.raises(FleetError, match=r"1000000000 hosts do not fit.*cuda:0 had .* would fit"):
        Fleet(small_task(), make_host, hosts=10**9, config=CONFIG, device="cuda")


@pytest.mark.usefixtures("alone_with_device_memory")
def test_running_out_of_gpu_memory_in_training_says_how_many_hosts_fit() -> None:
    config = FleetConfig(batch_size=100, steps_per_decision=1)
    fleet = Fleet(small_task(), lambda seed: ConvHost(1, 10, (32, 64, 64)), hosts=16, config=config, device="cuda")
    fleet.reset({row: HostConfig(seed=row) for row in range(16)})
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        with pytest.raises(FleetError, match="16 hosts do not fit"):
            fleet.advance()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
