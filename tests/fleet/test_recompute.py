"""Activations recomputed in the backward pass: equal results with less memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from esper.fleet import Fleet, FleetConfig, FleetError
from esper.fleet.stacked.lowering import blocks_of, lower, recomputed
from esper.fleet.stacked.rows import ModuleRows
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.growth.lifecycle.stages import Decision
from esper.tasks import ConvHost, Task
from esper.tasks.gpt_host import GPTHost
from tests.fleet.builders import (
    BATCH,
    LIFECYCLES,
    advance_and_fossilize,
    assert_identical,
    build_seeded,
    copy_rows,
    germinate,
    germinate_in_every_slot,
    host_settings,
    make_fleet,
    make_gpt_host,
    make_host,
    small_task,
    text_task,
)

KEEPS = FleetConfig(batch_size=BATCH, validation_batch=30, precision="float64", steps_per_decision=2)
RECOMPUTES = msgspec.structs.replace(KEEPS, checkpoint=True)


class Dropping(nn.Module):
    """One block that draws random numbers, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(inplace=True))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def make_chain() -> nn.Module:
    parts = Dropping()
    return nn.Sequential(parts.first, parts.second, parts.head)


@cache
def kinds() -> dict[str, tuple[Task, Callable[[int], nn.Module], tuple[str, str], tuple[str, str]]]:
    """Task, host, slots, blueprints."""
    return {
        "conv": (small_task(), make_host, ("blocks.0", "blocks.2"), ("conv3x3", "bottleneck")),
        "conv, slots inside": (small_task(), make_host, ("blocks.0.norm", "blocks.1"), ("conv3x3", "norm")),
        "text": (text_task(), make_gpt_host, ("blocks.0", "blocks.1"), ("mlp", "low_rank")),
        "dropout": (small_task(), lambda seed: build_seeded(seed, make_chain), ("0", "1"), ("mlp", "low_rank")),
    }


def train_through_lifecycle(kind: str, lifecycle: LifecycleConfig, config: FleetConfig) -> Fleet:
    """Train some epochs with a probe and with seeds that germinate, blend and are kept."""
    task, make, slots, blueprints = kinds()[kind]
    growth = GrowthConfig(lifecycle=lifecycle, slots=slots, probe_steps=2)
    fleet = make_fleet(host_settings(3, horizon=20), growth, config, task=task, make_host=make)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)  # of dropout
        fleet.decide({0: Decision(tuple(germinate(*pair) for pair in zip(slots, blueprints, strict=True))), 2: Decision(probe=True)})
        fleet.advance()
        assert fleet.rows[2].lifecycles.promises
        fleet.decide({2: Decision((germinate(slots[1], blueprints[1]),))})
        fleet.advance()
        advance_and_fossilize(fleet, 0, slots[0], epochs=3)
    return fleet


@pytest.mark.slow
@LIFECYCLES
@pytest.mark.parametrize("kind", kinds())
def test_a_fleet_that_recomputes_activations_equals_one_that_keeps_them(kind: str, lifecycle: LifecycleConfig) -> None:
    """Weights, moments, running statistics and what probes found."""
    keeps, recomputes = train_through_lifecycle(kind, lifecycle, KEEPS), train_through_lifecycle(kind, lifecycle, RECOMPUTES)
    assert recomputes.host.stacked.blocks
    for name, tensor in keeps.tensors().items():
        torch.testing.assert_close(recomputes.tensors()[name], tensor, atol=1e-12, rtol=0)
    for own, there in zip(keeps.rows, recomputes.rows, strict=True):
        assert there.lifecycles.history.val_losses == pytest.approx(own.lifecycles.history.val_losses, abs=1e-12)
        assert there.lifecycles.promises == pytest.approx(own.lifecycles.promises, rel=1e-9)


@pytest.mark.slow
def test_recomputed_activations_in_half_precision_and_in_parts_equal_kept_ones() -> None:
    config = FleetConfig(batch_size=BATCH, validation_batch=60, precision="float16", accumulate=5, steps_per_decision=1)
    fleets = []
    for each in (config, msgspec.structs.replace(config, checkpoint=True)):
        fleet = make_fleet(host_settings(2), config=each)
        germinate_in_every_slot(fleet, 0)
        fleet.advance()
        fleets.append(copy_rows(fleet, [0, 1]))
    assert_identical(*fleets)


# Recomputed blocks


def test_the_blocks_of_a_host_are_its_largest_parts_without_slots_inside() -> None:
    host = ConvHost(1, 10, (4, 6, 8))
    assert blocks_of(host, ("blocks.0", "blocks.1")) == {"blocks.0", "blocks.1", "blocks.2"}
    assert blocks_of(host, ("blocks.0.norm",)) == {"blocks.1", "blocks.2"}
    text = GPTHost(10, sequence_length=8, width=8, layers=2, heads=2)
    assert blocks_of(text, ()) == {"blocks.0", "blocks.1"}
    assert blocks_of(text, ("blocks.0.mlp",)) == {"blocks.0.attention", "blocks.0.mlp", "blocks.1"}
    assert blocks_of(Dropping(), ()) == {"second"}
    assert blocks_of(nn.Linear(2, 2), ()) == set()


def test_evaluation_recomputes_nothing_and_moves_no_statistics() -> None:
    host = make_host(0)
    rows, stacked = ModuleRows.of([host, make_host(1)]), lower(host)
    x = small_task().train.inputs[:6].unsqueeze(1).expand(-1, 2, -1, -1, -1)

    def fails(*arguments: Any) -> Tensor:
        raise AssertionError("nothing is kept here")

    with torch.no_grad():
        expected = stacked(rows.tensors(), x, training=False)
        assert torch.equal(stacked(rows.tensors(), x, training=False, recompute=fails), expected)
        stacked(rows.tensors(), x, training=True, recompute=fails)


def test_a_block_that_works_in_place_on_its_input_is_refused() -> None:
    host = nn.Sequential(nn.Linear(64, 8), nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(8, 10))).double()
    rows, x = ModuleRows.of([host]), small_task().train.inputs[:6].reshape(6, 1, 64)
    with pytest.raises(FleetError, match="first layer with inplace=False, or leave `checkpoint` off"):
        lower(host)(rows.tensors(), x, training=True, recompute=recomputed)


# Memory


class _Live(TorchDispatchMode):
    """How many bytes of storages are alive at most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outcome = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outcome):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._seen = {key: (reference, size) for key, (reference, size) in self._seen.items() if not reference.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._seen.values()))
        return outcome


def make_deep_host(seed: int) -> nn.Module:
    return build_seeded(seed, lambda: ConvHost(1, 10, (8,) * 6, pool=(False,) * 6))


def make_deep_fleet(config: FleetConfig) -> Fleet:
    fleet = Fleet(small_task(), make_deep_host, hosts=4, growth=GrowthConfig(slots=("blocks.2",)), config=config)
    fleet.reset(dict(enumerate(host_settings(4))))
    return fleet


@pytest.mark.slow
def test_a_host_that_recomputes_takes_less_memory_and_says_so() -> None:
    peaks, said = [], []
    for config in (KEEPS, RECOMPUTES):
        fleet = make_deep_fleet(config)
        run, batches = fleet.segment(fleet.plan([0, 1, 2, 3])), fleet.data.batches(1, BATCH, rows=[0, 1, 2, 3])
        with _Live() as live:
            run.run(batches)
        peaks.append(live.peak / 4)
        said.append(fleet.memory_per_host().step)
    assert peaks[1] < 0.5 * peaks[0]
    assert said[1] < 0.5 * said[0]
    for peak, step in zip(peaks, said, strict=True):
        assert 0.5 * step < peak < 2 * step


@pytest.mark.slow
def test_activations_are_freed_without_garbage_collection() -> None:
    host = make_deep_host(0)
    rows, stacked = ModuleRows.of([host]), lower(host)
    x = small_task().train.inputs[:6].unsqueeze(1)
    gc.collect()
    gc.disable()
    try:
        tensors = rows.tensors()
        reference = weakref.ref(tensors["blocks.0.conv.weight"])
        outputs = stacked(tensors, x, training=True, recompute=recomputed)
        torch.autograd.grad(outputs.sum(), [rows.parameters.flat])
        del tensors, outputs
        assert reference() is None
    finally:
        gc.enable()
