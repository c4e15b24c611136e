"""The memory of a host, and errors where a fleet does not fit."""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from esper.fleet import Fleet, FleetConfig, FleetError, HostConfig, Memory, memory as fleet_memory
from esper.fleet.data import FleetData
from esper.fleet.memory import check_fits, explained, free_bytes, in_words, rooms_of_groups, step_bytes
from esper.growth.config import GovernorConfig, GrowthConfig, LifecycleConfig
from esper.growth.lifecycle.stages import Decision, Germinate
from tests.fleet.builders import BATCH, SLOTS, make_host, small_task

CPU = torch.device("cpu")
CONFIG = FleetConfig(batch_size=BATCH, precision="float64")


def make_untrained_fleet(hosts: int, growth: GrowthConfig | None = None, config: FleetConfig = CONFIG) -> Fleet:
    return Fleet(small_task(), make_host, hosts=hosts, growth=growth, config=config)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("blending", ["add", "gate"])
def test_the_estimated_state_equals_the_tensors_of_a_fleet(optimizer: str, blending: str) -> None:
    growth = GrowthConfig(lifecycle=LifecycleConfig(blending=blending), governor=GovernorConfig(keep=3))
    fleet = make_untrained_fleet(5, growth, msgspec.structs.replace(CONFIG, optimizer=optimizer))
    held = sum(tensor.nbytes for tensor in fleet.tensors().values())
    assert held % 5 == 0
    assert fleet.memory_per_host().state == held // 5 * (1 + 1 + 3)  # as they are, as they train, and the snapshots


class _Peak:
    """Measure the peak memory saved by autograd, over all graphs, by storages."""

    def __enter__(self) -> _Peak:
        self.saved: dict[int, int] = {}

        def see(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            self.saved[storage.data_ptr()] = max(self.saved.get(storage.data_ptr(), 0), storage.nbytes())
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def total(self) -> int:
        return sum(self.saved.values())


@pytest.mark.slow
@pytest.mark.parametrize("largest", [None, "wide_conv3x3", "widen_100"])
def test_the_estimate_of_kept_memory_is_close_to_the_measured_use(largest: str | None) -> None:
    """One step of many hosts, with and without the largest seed in every slot."""
    growth = GrowthConfig(blueprints=("conv3x3", largest or "wide_conv3x3"))
    fleet = make_untrained_fleet(16, growth, msgspec.structs.replace(CONFIG, steps_per_decision=1))
    fleet.reset({row: HostConfig(seed=row) for row in range(16)})
    if largest:
        grown = Decision(tuple(Germinate(slot=slot, reason="", blueprint=largest) for slot in SLOTS))
        fleet.decide({row: grown for row in range(16)})
    with _Peak() as peak:
        fleet.advance()
    memory = fleet.memory_per_host()
    said = memory.step + (memory.seeds if largest else 0)
    assert 0.5 * said < peak.total / 16 < 1.2 * said


@pytest.mark.slow
def test_memory_grows_with_the_batch_and_not_with_the_hosts() -> None:
    growth = GrowthConfig(blueprints=("conv3x3", "wide_conv3x3", "norm"))  # those of width seeds include weights, whatever the batch
    small, large, many = (
        make_untrained_fleet(hosts, growth, msgspec.structs.replace(CONFIG, batch_size=batch)).memory_per_host()
        for hosts, batch in ((1, 10), (1, 40), (8, 10))
    )
    assert small == many
    assert large.state == small.state
    assert 3.5 * small.step < large.step < 4.1 * small.step
    assert large.seeds > 3 * small.seeds


def test_measuring_draws_no_random_numbers_and_changes_nothing() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
            self.head = nn.Linear(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    hosts = [Dropping().double() for _ in range(2)]
    before = torch.get_rng_state()
    fleet = Fleet(small_task(), lambda seed: hosts[seed], hosts=1, growth=GrowthConfig(slots=("body",)), config=CONFIG)
    fleet.memory_per_host()
    assert torch.equal(torch.get_rng_state(), before)
    assert hosts[0].body[2].num_batches_tracked == 0


def test_measuring_leaves_no_graph_behind() -> None:
    def tensors_with_a_graph() -> int:
        gc.collect()
        return sum(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in gc.get_objects())

    host, before = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Sigmoid(), nn.Linear(8, 10)), tensors_with_a_graph()
    for _ in range(3):
        step_bytes(host, torch.zeros(5, 64), torch.zeros(5, dtype=torch.int64), None, slots=[], recomputes=False)
    assert tensors_with_a_graph() == before


@pytest.mark.slow
def test_a_fleet_too_large_for_memory_is_refused_before_allocation_with_the_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    each = make_untrained_fleet(1).memory_per_host().least
    monkeypatch.setattr("esper.fleet.fleet.free_bytes", lambda device: 7 * each + 1)
    make_untrained_fleet(7)

    def too_late(*arguments: object, **named: object) -> None:
        raise AssertionError("allocated before it was checked")

    monkeypatch.setattr("esper.fleet.fleet.HostStorage", too_late)
    with pytest.raises(FleetError, match=r"9 hosts do not fit: one takes about .* 7 would fit. Take fewer hosts, a smaller batch_size"):
        make_untrained_fleet(9)


def test_a_device_without_room_for_one_host_is_refused() -> None:
    with pytest.raises(FleetError, match="not even one would fit"):
        check_fits(1, 10, room=9, device=CPU)
    check_fits(1, 10, room=10, device=CPU)
    check_fits(10**9, 10, room=None, device=CPU)


def test_an_absurd_number_of_hosts_is_refused_at_once() -> None:
    with pytest.raises(FleetError, match="1000000000 hosts do not fit"):
        make_untrained_fleet(10**9)


@pytest.mark.slow
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_running_out_of_memory_in_training_says_how_many_hosts_fit(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_untrained_fleet(1).memory_per_host()
    monkeypatch.setattr("esper.fleet.fleet.free_bytes", lambda device: 3 * memory.most)
    fleet = make_untrained_fleet(4)
    fleet.reset({row: HostConfig() for row in range(4)})

    def full(self: FleetData, *arguments: object) -> None:
        raise error

    monkeypatch.setattr(FleetData, "batch", full)
    with pytest.raises(FleetError, match=r"4 hosts do not fit.* 3 would fit"):
        fleet.advance()


def test_a_lower_bound_is_reported_where_the_memory_of_a_host_cannot_be_measured() -> None:
    def no_room() -> Memory:
        raise torch.OutOfMemoryError

    with pytest.raises(FleetError, match=r"one takes about 100 B.* 3 would fit"), explained(4, no_room, 100, room=350, device=CPU):
        raise torch.OutOfMemoryError


def test_unknown_room_is_called_unknown_when_memory_runs_out() -> None:
    with pytest.raises(FleetError) as caught, explained(4, lambda: Memory(100, 20, 3), 100, room=None, device=CPU):
        raise torch.OutOfMemoryError
    assert str(caught.value) == (
        "4 hosts do not fit: one takes about 123 B, and the free memory of cpu is unknown. Take fewer hosts, a smaller batch_size, "
        "a larger accumulate, checkpoint = true, or governor.keep = 1"
    )


def test_the_free_memory_of_this_machine_is_known() -> None:
    free = free_bytes(CPU)
    assert free is None or free > 10**7
    assert fleet_memory.free_bytes(torch.device("meta")) is None


def write_group(folder: Path, **values: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{value}\n")


def test_the_limits_of_all_control_groups_around_a_process_count(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/jobs/mine\n")
    write_group(root / "jobs/mine", memory_max="max", memory_current=5)
    write_group(root / "jobs", memory_max=1000, memory_current=700, memory_stat="anon 500\ninactive_file 150\nfile 200")
    write_group(root / "others", memory_max=1, memory_current=1, memory_stat="")
    assert list(rooms_of_groups(root, membership)) == [1000 - 700 + 150]


def test_a_container_sees_its_own_group_as_the_topmost(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("12:memory:/docker/0123abcd\n3:cpu,cpuacct:/docker/0123abcd\n0::/docker/0123abcd\n")
    full = {"memory_limit_in_bytes": 100, "memory_usage_in_bytes": 130, "memory_stat": "total_inactive_file 10"}
    write_group(root / "memory", **full)
    assert list(rooms_of_groups(root, membership)) == [0]


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert not list(rooms_of_groups(tmp_path / "cgroup", tmp_path / "membership"))


def test_memory_is_formatted_with_units() -> None:
    assert str(Memory(state=1_500_000, step=20_000, seeds=0)) == "1.5 MB of state, 20 kB for a step and up to 0 B for its seeds"
    assert in_words(12_345_678_901) == "12.3 GB"
