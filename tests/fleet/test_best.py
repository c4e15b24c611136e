"""The best state as the result of a host in a fleet."""

from __future__ import annotations

import copy
from dataclasses import replace

import msgspec
import pytest
import torch

from esper.fleet import HostConfig
from esper.growth.config import BudgetConfig, GrowthConfig
from esper.growth.events import BestRestored
from esper.growth.lifecycle.stages import Fossilize
from esper.runs import Event
from esper.tasks import Split, Task
from tests.fleet.builders import (
    CONFIG,
    JOINT,
    Script,
    Scripted,
    assert_identical,
    assert_row_equals,
    copy_rows,
    decide,
    germinate,
    make_fleet,
    small_task,
    train_alone,
    train_fleet,
)

BEST = msgspec.structs.replace(CONFIG, keep="best")
HORIZON = 12
SCRIPTS: list[Script] = [
    {},
    {1: [germinate("blocks.1", "conv3x3")], 5: [Fossilize(slot="blocks.1", reason="")]},
    {6: [germinate("blocks.1", "widen_100")], 10: [Fossilize(slot="blocks.1", reason="")]},
    {1: [germinate("blocks.1", "conv3x3")]},  # never kept
    {
        1: [germinate("blocks.0", "widen_100_chain")],
        5: [Fossilize(slot="blocks.0", reason="")],
        8: [germinate("blocks.0#2", "norm")],
        11: [Fossilize(slot="blocks.0#2", reason="")],
    },
]
GROWTH = GrowthConfig(lifecycle=JOINT, budget=BudgetConfig(max_parameters=None, max_flops=None))


def settings() -> list[HostConfig]:
    return [HostConfig(seed=row, growth_seed=row, horizon=HORIZON, learning_rate=0.03) for row in range(len(SCRIPTS))]


def noisy_task() -> Task:
    """Most training labels are wrong, so that the validation loss rises as the hosts learn them."""
    task, generator = small_task(), torch.Generator().manual_seed(0)
    is_wrong = torch.rand(len(task.train), generator=generator) < 0.7
    others = torch.randint(0, task.num_classes, (len(task.train),), generator=generator)
    return replace(task, train=Split(task.train.inputs, torch.where(is_wrong, others, task.train.targets)))


@pytest.mark.slow
def test_the_best_state_of_a_row_is_that_of_the_host_alone() -> None:
    task = noisy_task()
    fleet = train_fleet(task, settings(), SCRIPTS, GROWTH, BEST)
    losses, restored, left_out = fleet.validation_losses(), 0, 0
    for row, (setting, script) in enumerate(zip(settings(), SCRIPTS, strict=True)):
        alone = train_alone(task, setting, GROWTH, BEST, Scripted(script))
        assert_row_equals(fleet, row, alone, atol=1e-9)
        assert losses[row].item() == pytest.approx(alone.val_loss, abs=1e-9)
        restored += alone.val_loss < alone.val_losses[-1]
        left_out += any("taken out" in step.reason for entry in alone.ledger.seeds for step in entry.stages)
    assert restored >= 3
    assert left_out
    assert not fleet.rows[0].lifecycles.living()


@pytest.mark.slow
def test_a_saved_fleet_has_its_best_states() -> None:
    events: list[Event] = []
    fleet, resumed = (make_fleet(settings()[:2], GROWTH, BEST, task=noisy_task()) for _ in range(2))
    resumed.on_event = events.append
    for epoch in range(HORIZON - 1):
        decide(fleet, 1, *SCRIPTS[1].get(epoch, []))
        fleet.advance()
    resumed.load_state_dict(copy.deepcopy(fleet.state_dict()))
    for each in (fleet, resumed):
        each.advance()
        each.finish([0, 1])
    assert any(isinstance(event, BestRestored) for event in events)
    assert_identical(copy_rows(fleet, [0, 1]), copy_rows(resumed, [0, 1]))
    torch.testing.assert_close(fleet.validation_losses(), resumed.validation_losses(), atol=0, rtol=0)
    for host, loss in zip(fleet.rows, fleet.validation_losses().tolist(), strict=True):
        assert loss <= host.lifecycles.history.val_losses[-1]
