"""Gradient accumulation in a fleet: the same step with fewer activations in memory."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.fleet import Fleet, FleetConfig, HostConfig
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.growth.grower import Grower
from esper.growth.host.slotted import add_slots
from esper.growth.lifecycle.stages import Decision, Fossilize
from esper.tasks import BatchLoader
from tests.fleet.builders import (
    BATCH,
    JOINT,
    LIFECYCLES,
    Scripted,
    advance_and_fossilize,
    assert_fields_close,
    build_seeded,
    germinate,
    germinate_in_every_slot,
    host_settings,
    make_fleet,
    make_host,
    small_task,
)

WHOLE = FleetConfig(batch_size=BATCH, validation_batch=20, precision="float64")
IN_PARTS = msgspec.structs.replace(WHOLE, accumulate=5)
SLOTS = ("body.0", "body.1")


class NormFree(nn.Module):
    """A host without batch norms, in which no sample depends on another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.Tanh()), nn.Linear(12, 8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def make_norm_free(seed: int) -> nn.Module:
    return build_seeded(seed, NormFree)


def train_through_lifecycle(config: FleetConfig, lifecycle: LifecycleConfig) -> Fleet:
    """Train some epochs with seeds that germinate, blend and are kept."""
    growth = GrowthConfig(lifecycle=lifecycle, slots=SLOTS)
    fleet = make_fleet(host_settings(3, horizon=20), growth, config, make_host=make_norm_free)
    fleet.decide({0: Decision((germinate("body.0", "mlp"), germinate("body.1", "low_rank"))), 2: Decision((germinate("body.0", "mlp"),))})
    for _ in range(3):
        fleet.advance()
    advance_and_fossilize(fleet, 0, "body.0", epochs=3)
    return fleet


@pytest.mark.slow
@LIFECYCLES
def test_accumulated_parts_equal_the_whole_batch_for_hosts_without_batch_norm(lifecycle: LifecycleConfig) -> None:
    whole, in_parts = train_through_lifecycle(WHOLE, lifecycle), train_through_lifecycle(IN_PARTS, lifecycle)
    assert any(entry.outcome == "kept" for entry in whole.rows[0].lifecycles.ledger.seeds)
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(in_parts.tensors()[name], tensor, atol=1e-9, rtol=1e-9)
    for own, there in zip(whole.rows, in_parts.rows, strict=True):
        assert there.lifecycles.history.train_losses == pytest.approx(own.lifecycles.history.train_losses, abs=1e-9)
        assert there.lifecycles.history.flops == own.lifecycles.history.flops
        assert [entry.outcome for entry in there.lifecycles.ledger.seeds] == [entry.outcome for entry in own.lifecycles.ledger.seeds]
    assert in_parts.samples_trained == whole.samples_trained


@pytest.mark.slow
def test_a_row_equals_the_same_host_alone_with_accumulated_gradients() -> None:
    """Hosts have batch norms, which see the parts."""
    task, growth = small_task(), GrowthConfig(lifecycle=JOINT)
    setting = HostConfig(seed=3, growth_seed=5, horizon=5, learning_rate=0.01)
    script = {1: [germinate("blocks.1", "conv3x3"), germinate("blocks.2", "bottleneck")], 3: [Fossilize(slot="blocks.1", reason="")]}
    fleet = Fleet(task, make_host, hosts=2, growth=growth, config=msgspec.structs.replace(IN_PARTS, schedule="none"))
    fleet.reset({0: HostConfig(seed=1, horizon=5), 1: setting})
    controller, rows = Scripted(script), [0, 1]
    while rows:
        fleet.decide({1: controller.decide(fleet.state(1))})
        rows = fleet.advance()

    host = make_host(setting.seed)
    slotted = add_slots(host, task.train.inputs[:2], slots=growth.slots)
    optimizer = torch.optim.AdamW(host.parameters(), lr=setting.learning_rate, weight_decay=WHOLE.weight_decay)
    config = msgspec.structs.replace(growth, seed=setting.growth_seed)
    grower = Grower(slotted, optimizer, controller=Scripted(script), config=config, epochs=setting.horizon)
    grower.begin()
    loader = BatchLoader(task.train.inputs, task.train.targets, batch_size=BATCH, seed=setting.seed)
    for _ in range(setting.horizon):
        for x, y in loader:
            losses = []
            for part_x, part_y in zip(x.chunk(5), y.chunk(5), strict=True):
                loss = nn.functional.cross_entropy(slotted(part_x), part_y)
                (loss / 5).backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            grower.after_step(torch.stack(losses).mean())
        grower.after_epoch(lambda: validation_losses(slotted, task.validation.inputs, task.validation.targets))

    lifecycles = fleet.rows[1].lifecycles
    assert [entry.outcome for entry in lifecycles.ledger.seeds] == [entry.outcome for entry in grower.ledger.seeds]
    assert_fields_close(lifecycles.history.train_losses, list(grower.history.train_losses))
    state = host.state_dict()
    for name, tensor in fleet.host.rows.state_dict_of(1).items():
        torch.testing.assert_close(tensor, state[name], atol=1e-9, rtol=0)
    for slot, backend in lifecycles.occupied():
        seed_kind, seed = (
            fleet.seed_storages[slot].seed_kinds[str(backend.seed.blueprint)],
            dict(slotted.slots[slot].seed.named_parameters()),
        )
        flat = fleet.seed_storages[slot].tensors["weights"][1:2, : seed_kind.layout.width]
        for name, weight in seed_kind.layout.unflatten(flat).items():
            torch.testing.assert_close(weight[0], seed[name], atol=1e-9, rtol=0)


@torch.no_grad()
def validation_losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    model.eval()
    losses = [nn.functional.cross_entropy(model(x), y) for x, y in zip(inputs.split(20), targets.split(20), strict=True)]
    model.train()
    return losses


@pytest.mark.slow
def test_a_probe_counts_every_accumulated_part_as_a_step() -> None:
    """The mean over parts is that of the whole batches, and there are as many answers as parts."""
    growth = GrowthConfig(slots=SLOTS, probe_steps=1)
    sums = []
    for config in (WHOLE, IN_PARTS):
        fleet = make_fleet(host_settings(2), growth, config, make_host=make_norm_free)
        fleet.decide({1: Decision(probe=True)})
        plan = fleet.plan([0, 1])
        fleet.segment(plan).run(fleet.data.batches(1, BATCH, rows=[0, 1]))
        sums.append([(trial._sums, trial._steps) for trial in plan.probes[0]._trials])
    assert sums[0]
    for (whole, once), (parts, often) in zip(*sums, strict=True):
        assert (once.tolist(), often.tolist()) == ([1], [5])
        torch.testing.assert_close(parts / 5, whole, atol=1e-12, rtol=1e-9)


@pytest.mark.slow
def test_accumulation_reduces_the_memory_of_a_step() -> None:
    # Seeds in depth: width seeds also make wide weights, whatever the batch.
    growth = GrowthConfig(blueprints=("conv3x3", "wide_conv3x3", "norm"))
    fleets = [Fleet(small_task(), make_host, hosts=1, growth=growth, config=config) for config in (WHOLE, IN_PARTS)]
    whole, in_parts = (fleet.memory_per_host() for fleet in fleets)
    assert in_parts.state == whole.state
    assert 4.5 * in_parts.step < whole.step < 5.5 * in_parts.step
    assert 4 * in_parts.seeds < whole.seeds < 5.5 * in_parts.seeds


@pytest.mark.slow
def test_accumulation_keeps_the_activations_of_one_part_at_a_time() -> None:
    largest = []
    for config in (WHOLE, IN_PARTS):
        fleet = Fleet(small_task(), make_host, hosts=2, config=msgspec.structs.replace(config, steps_per_decision=1))
        fleet.reset(dict(enumerate(host_settings(2))))
        germinate_in_every_slot(fleet, 0)
        seen: list[int] = []

        def note(tensor: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            fleet.advance()
        largest.append(max(seen))
    assert largest[0] == 5 * largest[1]


def test_parts_of_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="accumulate: expected a divisor of batch_size, which is 25, got 4"):
        FleetConfig(batch_size=25, accumulate=4)
    with pytest.raises(ConfigError, match="accumulate"):
        FleetConfig(accumulate=0)
