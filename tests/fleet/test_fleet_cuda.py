"""What only a GPU can show of a fleet; skipped where there is none."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import msgspec
import pytest
import torch

from esper.fleet import Fleet, FleetConfig, FleetError, HostConfig
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.growth.lifecycle.stages import Advance, Decision, Fossilize
from esper.tasks import ConvHost
from tests.conftest import sync_debug_mode
from tests.fleet.test_fleet import in_every_slot, named_as
from tests.fleet.test_fleet_equals_grower import BATCH, germinate, make_host, small_task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64")
JOINT = LifecycleConfig(holding_epochs=1, embargo_epochs=1)
SHADOW = LifecycleConfig(raise_mode="shadow", training_epochs=2, minimum_health=0.0, blend_epochs=1, holding_epochs=1)


def make_fleet(hosts: int, lifecycle: LifecycleConfig, config: FleetConfig = CONFIG, device: str = "cuda") -> Fleet:
    growth = GrowthConfig(lifecycle=lifecycle, probe_steps=2)
    fleet = Fleet(small_task(), make_host, hosts=hosts, growth=growth, config=config, device=device)
    fleet.reset({row: HostConfig(seed=row, growth_seed=row, horizon=20, learning_rate=0.01) for row in range(hosts)})
    return fleet


def live(fleet: Fleet) -> None:
    """Some epochs with seeds that come, are kept, and are taken out."""
    in_every_slot(fleet, 0)
    fleet.decide({2: Decision(probe=True)})
    fleet.advance()
    fleet.decide({1: Decision((germinate("blocks.1", "wide_conv3x3"),))})
    fleet.advance()
    fleet.decide({0: Decision((Advance("blocks.0", ""),))})
    for _ in range(3):
        fleet.advance()
    fleet.decide({0: Decision((Fossilize("blocks.0", ""),))})
    fleet.advance()


@pytest.mark.parametrize("lifecycle", [JOINT, SHADOW], ids=["joint", "shadow"])
def test_a_fleet_on_a_gpu_equals_the_same_on_a_cpu(lifecycle: LifecycleConfig) -> None:
    """In float64, by another lowering."""
    fleets = [make_fleet(3, lifecycle, device=device) for device in ("cpu", "cuda")]
    for fleet in fleets:
        live(fleet)
    for name, tensor in fleets[0].tensors().items():
        torch.testing.assert_close(fleets[1].tensors()[name].cpu(), tensor, atol=1e-8, rtol=1e-8)
    for host, there in zip(fleets[0].rows, fleets[1].rows, strict=True):
        assert [entry.outcome for entry in host.host_growth.ledger.entries] == [entry.outcome for entry in there.host_growth.ledger.entries]
        assert there.host_growth.promises == pytest.approx(host.host_growth.promises, rel=1e-7)


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-9), ("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("lifecycle", [JOINT, SHADOW], ids=["joint", "shadow"])
def test_steps_that_are_recorded_and_replayed_equal_steps_that_are_not(
    lifecycle: LifecycleConfig, precision: str, tolerance: float
) -> None:
    config = msgspec.structs.replace(CONFIG, steps_per_decision=8, precision=precision)
    fleets = [make_fleet(3, lifecycle, msgspec.structs.replace(config, graphs=graphs)) for graphs in (False, True)]
    for fleet in fleets:
        in_every_slot(fleet, 0)
        fleet.decide({2: Decision(probe=True)})
        fleet.advance()
        if precision == "float64":
            live(fleet)
    assert [fleet.recordings > 0 for fleet in fleets] == [False, True]
    for name, tensor in fleets[0].tensors().items():
        torch.testing.assert_close(fleets[1].tensors()[name], tensor, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("lifecycle", [JOINT, SHADOW], ids=["joint", "shadow"])
def test_recorded_training_on_a_lagging_gpu_equals_training_that_is_waited_for(lifecycle: LifecycleConfig) -> None:
    """Sleeps on the current stream before and after every training segment: a step that did not wait would read old data."""
    config = msgspec.structs.replace(CONFIG, steps_per_decision=8)
    waited, lagging = (make_fleet(3, lifecycle, msgspec.structs.replace(config, graphs=graphs)) for graphs in (False, True))
    for fleet in (waited, lagging):
        advance = fleet.advance

        def at_leisure(*arguments: object, fleet: Fleet = fleet, advance: Any = advance) -> Any:
            before_and_after = torch.cuda.synchronize if fleet is waited else lambda: torch.cuda._sleep(20_000_000)
            before_and_after()
            result = advance(*arguments)
            before_and_after()
            return result

        fleet.advance = at_leisure  # type: ignore[method-assign]
        live(fleet)
        fleet.advance()
    assert lagging.recordings > 0
    for name, tensor in waited.tensors().items():
        torch.testing.assert_close(lagging.tensors()[name], tensor, atol=1e-9, rtol=1e-9)


def assert_waits_once(fleet: Fleet) -> None:
    """For the device, in the training up to the next decision."""
    torch.cuda.synchronize()
    with sync_debug_mode("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fleet.advance()
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    assert len(waits) == 1, [f"{warning.filename}:{warning.lineno}" for warning in waits]


@pytest.mark.parametrize("lifecycle", [JOINT, SHADOW], ids=["joint", "shadow"])
def test_the_device_is_waited_for_once_in_a_decision(lifecycle: LifecycleConfig) -> None:
    fleet = make_fleet(3, lifecycle)
    live(fleet)
    in_every_slot(fleet, 2)
    fleet.decide({1: Decision(probe=True)})
    fleet.advance()  # what is loaded at its first use
    fleet.decide({1: Decision(probe=True)})
    assert_waits_once(fleet)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("lifecycle", [JOINT, SHADOW], ids=["joint", "shadow"])
def test_one_step_in_lower_precision_agrees_with_float64(precision: str, tolerance: float, lifecycle: LifecycleConfig) -> None:
    config = msgspec.structs.replace(CONFIG, steps_per_decision=1)
    fleet = make_fleet(3, lifecycle, config)
    in_every_slot(fleet, 0)
    in_every_slot(fleet, 1, ("squeeze_excite", "depthwise", "wide_conv3x3"))
    for _ in range(8):
        fleet.advance()
    other = make_fleet(3, lifecycle, msgspec.structs.replace(config, precision=precision))
    other.load_state_dict(named_as(copy.deepcopy(fleet.state_dict()), torch.float32))
    for each in (fleet, other):
        each.advance()
    for name, tensor in fleet.host.rows.tensors().items():
        torch.testing.assert_close(other.host.rows.tensors()[name].to(tensor.dtype), tensor, atol=tolerance, rtol=tolerance)
    for slot, storage in fleet.seed_storages.items():
        torch.testing.assert_close(
            other.seed_storages[slot].tensors["weights"].double(), storage.tensors["weights"], atol=tolerance, rtol=tolerance
        )


@pytest.mark.usefixtures("alone_with_device_memory")
def test_a_step_takes_about_as_much_memory_as_is_said() -> None:
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
def test_a_fleet_that_does_not_fit_says_how_many_would() -> None:
    with pytest.raises(FleetError, match=r"1000000000 hosts do not fit.*cuda:0 had .* would fit"):
        Fleet(small_task(), make_host, hosts=10**9, config=CONFIG, device="cuda")


@pytest.mark.usefixtures("alone_with_device_memory")
def test_running_out_of_memory_in_training_says_how_many_would_fit() -> None:
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
