"""Fleets that are used again: hosts train in them as in a new fleet, to the last bit, and a pool gives them out by shape."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from esper.fleet import pool as pool_module
from esper.fleet.config import FleetConfig, FleetError, HostConfig
from esper.fleet.fleet import Fleet
from esper.fleet.pool import FleetPool
from esper.growth.config import BudgetConfig, GrowthConfig, LifecycleConfig, RentConfig
from esper.growth.lifecycle.stages import LIVING, Action, Advance, Decision, Fossilize, Germinate, GrowthState, Prune, Stage
from esper.runs import Event
from esper.tasks import Task
from tests.fleet.builders import assert_identical, enlarge_head, small_task, text_task

CONFIG = FleetConfig(batch_size=25, validation_batch=20, steps_per_decision=4, keep="best")
GROWTH = GrowthConfig(
    lifecycle=LifecycleConfig(
        raise_mode="shadow", training_epochs=1, minimum_health=0.0, blend_epochs=1, holding_epochs=1, embargo_epochs=1
    ),
    budget=BudgetConfig(max_parameters=64.0, max_flops=64.0, max_seeds_per_place=3),
    probe_steps=2,
)
CPU = torch.device("cpu")
NOTHING = torch.zeros(0)
LATER = msgspec.structs.replace(CONFIG, schedule="none", steps_per_decision=3)


@dataclass
class Chance:
    """A controller that grows any candidate, keeps most seeds, and asks for probes; the same for equal states."""

    seed: int

    def decide(self, state: GrowthState) -> Decision:
        chance, actions = random.Random(f"{self.seed} {state.epoch}"), list[Action]()
        for slot in state.slots:
            name, draw = slot.place.name, chance.random()
            if slot.stage is Stage.DORMANT and slot.candidates and draw < 0.6:
                actions.append(Germinate(slot=name, reason="", blueprint=chance.choice(slot.candidates).blueprint))
            elif slot.stage is Stage.TRAINING:
                actions.append(Advance(slot=name, reason=""))
            elif slot.stage in LIVING:
                actions.append(Fossilize(slot=name, reason="") if draw < 0.8 else Prune(slot=name, reason=""))
        return Decision(tuple(actions), probe=chance.random() < 0.5, measure_kept=chance.random() < 0.5)


def earlier_settings(task: Task) -> list[HostConfig]:
    noise = 0.0 if task.train.targets.ndim > 1 else 0.6  # validation losses rise again, so that best states are restored
    return [HostConfig(seed=row, growth_seed=row, horizon=10, learning_rate=0.03 * (1 + row), label_noise=noise) for row in range(4)]


def later_settings(task: Task) -> list[HostConfig]:
    noise = 0.0 if task.train.targets.ndim > 1 else 0.2
    common = HostConfig(growth_seed=9, data_share=0.7, rent=RentConfig(parameters=0.05))
    return [
        msgspec.structs.replace(common, seed=7 + row, horizon=6 + row, learning_rate=0.01 * (1 + row), label_noise=0.0 if row else noise)
        for row in range(3)
    ]


def train(fleet: Fleet, settings: list[HostConfig], *, seed: int, spoiled: int = 3) -> dict[str, Any]:
    """Train hosts to their ends, one of them rolled back and one copied in between. Return all that is known of them."""
    events = list[Event]()
    fleet.on_event = events.append
    fleet.reset(dict(enumerate(settings)))
    rows, segment = list(range(len(settings))), 0
    while rows:
        deciding = [row for row in rows if not fleet.rows[row].is_given_up]
        fleet.decide({row: Chance(seed + row).decide(fleet.state(row)) for row in deciding})
        if segment == spoiled:
            with torch.no_grad():
                next(iter(fleet.host.rows.tensors().values()))[0] = math.nan
        if segment == 2:
            fleet.copy({1: 2})
        rows, segment = fleet.advance(), segment + 1
    fleet.finish(range(len(settings)))

    known: dict[str, Any] = {"events": [without_clocks(msgspec.to_builtins(event)) for event in events], "memory": fleet.memory_per_host()}
    known |= {"test": fleet.losses(fleet.task.test)[: len(settings)], "validation": fleet.validation_losses()[: len(settings)]}
    known |= {"samples": fleet.samples_trained, "steps": fleet.times.steps, "skipped": fleet.skipped_steps.sum().item()}
    known |= {f"host {name}": tensor[: len(settings)].clone() for name, tensor in fleet.host.tensors.items()}
    for row in range(len(settings)):
        lifecycles = fleet.rows[row].lifecycles
        known[f"{row} ledger"] = [seed.as_dict() for seed in lifecycles.ledger.seeds]
        known[f"{row} rollbacks"] = lifecycles.governor.rollbacks
        known[f"{row} state"] = without_clocks(fleet.rows[row].state_dict())
        for slot, backend in lifecycles.occupied():
            kind = fleet.seed_storages[slot].kind(str(backend.blueprint), backend.wide)
            for name, tensor in fleet.seed_storages[slot].tensors.items():
                width = kind.buffers.width if name == "buffers" else kind.layout.width
                known[f"{row} {slot} {name}"] = (tensor[row] if tensor.ndim == 1 else tensor[row, :width]).clone()
    return known


def without_clocks(state: Any) -> Any:
    """Return a state without the seconds in it."""
    if not isinstance(state, dict):
        return state
    return {name: without_clocks(value) for name, value in state.items() if "seconds" not in name}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in sorted({*found, *expected}):
        mine, theirs = found.get(name, NOTHING), expected.get(name, NOTHING)  # a storage may have no buffers
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else repr(mine) == repr(theirs), name


@pytest.mark.parametrize(
    ("make_task", "host", "optimizer", "seed"),
    [
        (small_task, "mlp-6x2", "sgd", 30),
        pytest.param(small_task, "conv-4x2", "adamw", 20, marks=pytest.mark.slow),
        pytest.param(small_task, "residual-4x2", "sgd", 20, marks=pytest.mark.slow),
        pytest.param(text_task, "gpt-8x2", "adamw", 10, marks=pytest.mark.slow),
    ],
)
def test_hosts_in_a_used_fleet_equal_hosts_in_a_new_one_bit_for_bit(
    make_task: Callable[..., Task], host: str, optimizer: str, seed: int
) -> None:
    """The used fleet has a row more, and other data, another schedule, other steps and other horizons were before."""
    earlier, later = make_task(others=80), make_task(train=90, others=70)
    earlier_config, later_config = (msgspec.structs.replace(config, optimizer=optimizer) for config in (CONFIG, LATER))
    pool = FleetPool()
    used = pool.fleet(earlier, host, rows=4, growth=GROWTH, config=earlier_config, device=CPU)
    before = train(used, earlier_settings(earlier), seed=seed)
    seeds = [seed for row in range(4) for seed in before[f"{row} ledger"]]
    assert any("#2" in seed["slot"] for seed in seeds), "a slot has opened behind a kept seed"
    assert len({seed["blueprint"].startswith("widen") for seed in seeds if seed["outcome"] == "kept"}) == 2, "in depth and in width"
    assert before["0 rollbacks"] == 1
    assert any(event["kind"] == "best_restored" for event in before["events"])

    assert pool.fleet(later, host, rows=3, growth=GROWTH, config=later_config, device=CPU) is used
    new = Fleet(later, later.maker(host), hosts=3, growth=GROWTH, config=later_config)
    expected = train(new, later_settings(later), seed=1)
    assert any(expected[f"{row} ledger"] for row in range(3))
    assert_same(train(used, later_settings(later), seed=1), expected)
    assert used.losses(later.test)[3].isnan(), "the fourth row was not reset"


def test_no_row_of_a_fleet_that_begins_again_trains_until_it_is_reset() -> None:
    task = small_task()
    fleet = Fleet(task, task.maker("mlp-4x1"), hosts=2, growth=GROWTH, config=CONFIG)
    fleet.reset({0: HostConfig(horizon=3), 1: HostConfig(horizon=3)})
    fleet.advance()
    fleet.begin(task, task.maker("mlp-4x1"))
    assert fleet.training() == fleet.advance() == []
    fleet.reset({1: HostConfig(horizon=3)})
    assert fleet.advance() == [1]
    assert (fleet.samples_trained, fleet.times.steps) == (100, 4)


def test_a_fleet_that_begins_again_has_fresh_loss_scales() -> None:
    task, config = small_task(), msgspec.structs.replace(CONFIG, precision="float16")
    fleet = Fleet(task, task.maker("mlp-4x1"), hosts=2, growth=GROWTH, config=config)
    fleet.reset({0: HostConfig(horizon=3), 1: HostConfig(horizon=3)})
    enlarge_head(fleet, 1)
    fleet.advance()
    assert fleet.skipped_steps.tolist() == [0, 4]
    fresh = Fleet(task, task.maker("mlp-4x1"), hosts=2, growth=GROWTH, config=config).host.scales.tensors
    fleet.begin(task, task.maker("mlp-4x1"), config=config)
    assert_identical(fleet.host.scales.tensors, fresh)


@pytest.mark.parametrize(("changes", "classes"), [({"optimizer": "sgd"}, 10), ({"batch_size": 20}, 10), ({}, 3)])
def test_a_fleet_of_another_shape_is_refused(changes: dict[str, Any], classes: int) -> None:
    task = small_task()
    fleet = Fleet(task, task.maker("mlp-4x1"), hosts=1, growth=GROWTH, config=CONFIG)
    fleet.reset({0: HostConfig()})
    other = task.with_classes(classes, seed=0)
    with pytest.raises(FleetError, match="can begin again only with the shape that it has"):
        fleet.begin(other, other.maker("mlp-4x1"), config=msgspec.structs.replace(CONFIG, **changes))
    assert fleet.training() == [0], "nothing has changed"


def take(pool: FleetPool, host: str, *, rows: int = 1) -> Fleet:
    return pool.fleet(small_task(), host, rows=rows, growth=GROWTH, config=CONFIG, device=CPU)


def test_a_pool_keeps_the_fleets_that_were_used_last() -> None:
    pool = FleetPool(size=2)
    first, second = take(pool, "mlp-4x1"), take(pool, "mlp-5x1")
    assert take(pool, "mlp-4x1") is first
    take(pool, "mlp-6x1")
    assert (pool.built, pool.reused) == (3, 1)
    assert take(pool, "mlp-4x1") is first
    assert take(pool, "mlp-5x1") is not second


def test_a_fleet_with_too_few_rows_is_replaced_by_a_larger_one() -> None:
    pool = FleetPool()
    small = take(pool, "mlp-4x1", rows=2)
    large = take(pool, "mlp-4x1", rows=3)
    assert large is not small
    assert take(pool, "mlp-4x1", rows=2) is large
    assert large.hosts == 3


def test_a_pool_of_size_zero_keeps_nothing() -> None:
    pool = FleetPool(size=0)
    assert take(pool, "mlp-4x1") is not take(pool, "mlp-4x1")
    assert (pool.built, pool.reused) == (2, 0)


def test_other_fleets_make_room_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FleetPool()
    first = take(pool, "mlp-4x1")
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: 0)
    take(pool, "mlp-5x1")
    monkeypatch.undo()
    assert take(pool, "mlp-4x1") is not first
