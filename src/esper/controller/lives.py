"""Whole lives of hosts under any controller, in fleets, and what became of them.

All controllers go through the same code: the same initialisation and data order for the same seed, a decision before every stretch of
training and one after the last, and every FLOP counted, those of pruned seeds and of measurements included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from esper.controller.fleet_with_twins import finite
from esper.fleet.config import FleetConfig, HostSetting
from esper.fleet.data import TaskTensors
from esper.fleet.fleet import Fleet
from esper.fleet.hosts import RowBackend
from esper.growth.config import GrowthConfig
from esper.growth.lifecycle.slots import SlotLifecycles
from esper.growth.lifecycle.stages import Controller, Stage
from esper.tasks import Task


@dataclass(frozen=True)
class Contestant:
    """A host to be, and who decides for it."""

    name: str
    setting: HostSetting
    controller: Controller
    level: str | None = None  # of rent, where the controller sees it
    is_static: bool = False  # whatever is in it stays, kept or not
    is_measured: bool = True  # its validation is part of its cost: somebody decides by it


class EvalRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one host."""

    task: str
    host: str  # channels of its blocks
    controller: str
    level: str | None  # of rent that the controller saw; None where it makes no difference
    seed: int
    horizon: int
    test_loss: float  # nats
    val_loss: float
    parameters: int  # of the host alone
    added_parameters: int
    flops_per_sample: int  # of a forward pass of the host alone
    added_flops: int
    total_flops: int  # of all training, and of all measurements where somebody decides by them; the policy's own are not counted
    grown: int  # seeds
    kept: list[tuple[str, str]]  # slot and blueprint
    rollbacks: int
    unit: float = 1.0  # of the loss, for rents: nats that count as one of ten classes
    trace: list[str] = []  # what was grown when


@dataclass(frozen=True)
class EvalSetting:
    """Where lives are lived: a task and an architecture."""

    task: Task
    host: str
    tensors: TaskTensors
    fleet: FleetConfig
    growth: GrowthConfig
    device: torch.device
    rows: int  # hosts that train at once


def live(
    eval_setting: EvalSetting, contestants: Sequence[Contestant], on_progress: Callable[[int], Any] = lambda decisions: None
) -> list[EvalRun]:
    """One run for each contestant, in their order."""
    order = sorted(range(len(contestants)), key=lambda index: contestants[index].setting.horizon)
    runs: dict[int, EvalRun] = {}
    for start in range(0, len(order), eval_setting.rows):
        some = order[start : start + eval_setting.rows]
        runs |= dict(zip(some, _live_together(eval_setting, [contestants[index] for index in some], on_progress), strict=True))
    return [runs[index] for index in range(len(contestants))]


def _live_together(eval_setting: EvalSetting, contestants: Sequence[Contestant], on_progress: Callable[[int], Any]) -> list[EvalRun]:
    fleet = Fleet(
        eval_setting.task,
        eval_setting.task.maker(eval_setting.host),
        hosts=len(contestants),
        growth=eval_setting.growth,
        config=eval_setting.fleet,
        device=eval_setting.device,
        tensors=eval_setting.tensors,
    )
    fleet.reset({row: contestant.setting for row, contestant in enumerate(contestants)})
    rows = list(range(len(contestants)))
    while True:
        fleet.decide({row: contestants[row].controller.decide(finite(fleet.state(row))) for row in rows if not fleet.rows[row].is_given_up})
        for row in rows:
            if contestants[row].is_static:
                _settle(fleet.rows[row].host_growth.lifecycles)
        on_progress(len(rows))
        rows = fleet.advance()
        if not rows:
            break
    return _runs(eval_setting, fleet, contestants)


def _settle(lifecycles: SlotLifecycles[RowBackend]) -> None:
    """What is in a static network is part of it from the start; nobody measures whether it should be."""
    for name in [name for name in lifecycles.living() if lifecycles.backends[name].life.stage is Stage.HOLDING]:
        lifecycles.fossilize(name, "a part of the network from the start")


def _runs(eval_setting: EvalSetting, fleet: Fleet, contestants: Sequence[Contestant]) -> list[EvalRun]:
    fleet.finish(range(len(contestants)))
    test, validation = fleet.losses(eval_setting.task.test).tolist(), fleet.losses(eval_setting.task.validation).tolist()
    return [_run(eval_setting, fleet, row, contestant, test[row], validation[row]) for row, contestant in enumerate(contestants)]


def _run(eval_setting: EvalSetting, fleet: Fleet, row: int, contestant: Contestant, test_loss: float, val_loss: float) -> EvalRun:
    host_growth = fleet.rows[row].host_growth
    added, entries = host_growth.lifecycles.added(), host_growth.ledger.entries
    return EvalRun(
        task=eval_setting.task.name,
        host=eval_setting.host,
        controller=contestant.name,
        level=contestant.level,
        seed=contestant.setting.seed,
        horizon=contestant.setting.horizon,
        test_loss=test_loss,
        val_loss=val_loss,
        parameters=host_growth.lifecycles.host.parameters,
        added_parameters=added.parameters,
        flops_per_sample=host_growth.lifecycles.host.flops,
        added_flops=added.flops,
        total_flops=host_growth.history.flops - (0 if contestant.is_measured else fleet.rows[row].validation_flops),
        grown=len(entries),
        kept=[(name, str(backend.life.blueprint)) for name, backend in host_growth.lifecycles.occupied()],
        rollbacks=host_growth.governor.rollbacks,
        unit=host_growth.lifecycles.unit,
        trace=[f"{entry.born} {entry.slot} {entry.blueprint} {entry.outcome}" for entry in entries],
    )
