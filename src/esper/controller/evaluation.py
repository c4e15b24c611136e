"""Trains hosts under any controller, in fleets, from start to end, and returns the results.

All controllers go through the same code: the same initialisation and data order for the same seed, and a decision before every training
segment and one after the last. All FLOPs are counted, including those of pruned seeds and of measurements.

Cases that start alike, such as those of one seed under several controllers, are one host of the fleet as long as their controllers decide
the same. Where they differ, the host is copied. The rent of a case is only shown to its controller, so it makes no difference by itself.
Further rows make the trials of controllers that look ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from esper.fleet.config import FleetConfig, HostConfig
from esper.fleet.data import TaskTensors
from esper.fleet.fleet import Fleet
from esper.fleet.pool import FleetPool
from esper.fleet.trials import RowTrials
from esper.growth.config import GrowthConfig, RentConfig
from esper.growth.controllers.baselines import as_controller
from esper.growth.events import TrialsCompared
from esper.growth.lifecycle.stages import Controller, Decision, GrowthState, Shrink, Stage
from esper.tasks import Task


@dataclass(frozen=True)
class EvalCase:
    """A host to train, and the controller that decides for it."""

    name: str  # of the controller in the tables
    setting: HostConfig
    controller: Controller
    price: float | None = None  # of the rent that the controller sees; None if it makes no difference
    is_static: bool = False  # fossilize all seeds at once, without a measurement
    is_measured: bool = True  # count the FLOPs of validation, because decisions depend on it


class EvalRun(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one host."""

    task: str
    host: str  # channels of its blocks
    controller: str
    price: float | None  # of the rent that the controller saw; None if it makes no difference
    seed: int
    horizon: int
    steps: int  # of training
    test_loss: float  # nats
    val_loss: float
    parameters: int  # of the host alone
    added_parameters: int
    flops_per_sample: int  # of a forward pass of the host alone
    added_flops: int
    total_flops: int  # of all training, and of validation if decisions depend on it; without those of the policy
    grown: int  # number of seeds
    kept: list[tuple[str, str]]  # (slot, blueprint)
    rollbacks: int
    unit: float = 1.0  # unit of the loss for rents, see LossRange
    trace: list[str] = []  # one text per seed: epoch, slot, blueprint, outcome
    chosen: list[str] = []  # names of the trials that went on


@dataclass(frozen=True)
class EvalSetting:
    """Task, architecture and resources of an evaluation."""

    task: Task
    host: str
    tensors: TaskTensors
    fleet: FleetConfig
    growth: GrowthConfig
    device: torch.device
    rows: int  # cases that train at once, at most
    memory: int | None = None  # bytes for as many hosts with the largest seeds; fewer train at once if they would take more; None: no limit


Rows = dict[int, list[EvalCase]]  # row of a fleet -> the cases that it stands for


def run_cases(
    eval_setting: EvalSetting,
    cases: Sequence[EvalCase],
    on_progress: Callable[[int], Any] = lambda decisions: None,
    on_end: Callable[[Fleet, Rows], Any] = lambda fleet, rows: None,
    *,
    pool: FleetPool | None = None,
) -> list[EvalRun]:
    """Train the hosts of all cases and return their results, in the same order.

    Cases of similar horizons share a fleet, and cases that start alike if they can, because rows of two fleets are rounded differently.
    `on_progress` gets the number of decisions just made, and `on_end` every fleet whose hosts have ended. A fleet of the `pool` may have
    more rows than there are cases, and is valid until the next one is taken from the pool. Without a pool, every fleet is built anew.
    """
    most, room, fleets = _rows_that_fit(eval_setting, pool), 0, list[list[EvalCase]]()
    for group in sorted(_alike(cases), key=lambda group: group[0].setting.horizon):
        fits = sum(1 + _rows_to_try(case) for case in group) <= most
        for part in [group] if fits else [[case] for case in group]:
            needed = sum(1 + _rows_to_try(case) for case in part)
            if needed > room:
                fleets.append([])
                room = most
            fleets[-1] += part
            room -= needed
    runs: dict[int, EvalRun] = {}
    for chosen in fleets:
        runs |= dict(zip(map(id, chosen), _run_in_one_fleet(eval_setting, chosen, pool, on_progress, on_end), strict=True))
    return [runs[id(case)] for case in cases]


def _fleet(eval_setting: EvalSetting, rows: int, pool: FleetPool | None) -> Fleet:
    return (pool or FleetPool(0)).fleet(
        eval_setting.task,
        eval_setting.host,
        rows=rows,
        growth=eval_setting.growth,
        config=eval_setting.fleet,
        device=eval_setting.device,
        tensors=eval_setting.tensors,
    )


def _rows_to_try(case: EvalCase) -> int:
    """Return how many rows the trials of a case take beside its own."""
    most: int = getattr(case.controller, "most_trials", 0)
    return max(most - 1, 0)


def _rows_that_fit(eval_setting: EvalSetting, pool: FleetPool | None) -> int:
    """Return how many cases can train at once. Each is counted as a host of its own with the largest seed in every slot.

    A few hosts may grow twice as much, but many cases share a host.
    """
    if eval_setting.memory is None:
        return eval_setting.rows
    return min(max(eval_setting.memory // _fleet(eval_setting, 1, pool).memory_per_host().most, 1), eval_setting.rows)


def _run_in_one_fleet(
    eval_setting: EvalSetting,
    cases: Sequence[EvalCase],
    pool: FleetPool | None,
    on_progress: Callable[[int], Any],
    on_end: Callable[[Fleet, Rows], Any],
) -> list[EvalRun]:
    """Train cases in one fleet. Cases that have been decided alike so far are one row; there are enough rows for all to differ."""
    hosts = len(cases) + sum(_rows_to_try(case) for case in cases)
    fleet = _fleet(eval_setting, hosts, pool)
    trials = RowTrials(fleet, free=range(len(cases), hosts))
    groups = dict(enumerate(_alike(cases)))  # row -> its cases
    fleet.reset({row: group[0].setting for row, group in groups.items()})
    rows = list(groups)
    while True:
        decisions = _decide(fleet, groups, [row for row in rows if not fleet.rows[row].is_given_up])
        controllers = {row: _SharedRow([case.controller for case in group]) for row, group in groups.items()}
        trials.decide(decisions, controllers)
        rows = list(dict.fromkeys((*rows, *decisions)))
        for row in rows:
            if groups[row][0].is_static:  # fossilize its seeds at once, without the gate that needs a measurement
                lifecycles = fleet.rows[row].lifecycles
                for name in [name for name in lifecycles.living() if lifecycles.slots[name].stage is Stage.HOLDING]:
                    lifecycles.fossilize(name, "a part of the network from the start")
        on_progress(sum(len(groups[row]) for row in rows))
        rows = trials.settle(fleet.advance(), controllers)
        if not rows:
            break
    # Prune the seeds that were not kept, and measure the hosts on test and validation data.
    fleet.finish(groups)
    on_end(fleet, groups)
    test, validation = fleet.losses(eval_setting.task.test).tolist(), fleet.losses(eval_setting.task.validation).tolist()
    results = {
        id(case): _result(eval_setting, fleet, row, case, test[row], validation[row], trials.compared.get(row, []))
        for row, group in groups.items()
        for case in group
    }
    return [results[id(case)] for case in cases]


class _SharedRow:
    """The controllers of the cases that share a row, which have decided the same so far."""

    def __init__(self, controllers: Sequence[Controller]) -> None:
        self.controllers = controllers

    def decide(self, state: GrowthState) -> Decision:
        return self.controllers[0].decide(state)

    def state_dict(self) -> dict[str, object]:
        return as_controller(self.controllers[0], GrowthConfig()).state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        for controller in self.controllers:
            as_controller(controller, GrowthConfig()).load_state_dict(state)


def _alike(cases: Sequence[EvalCase]) -> list[list[EvalCase]]:
    """Group the cases that start as the same host."""
    groups: dict[object, list[EvalCase]] = {}
    for case in cases:
        without_rent = msgspec.structs.replace(case.setting, rent=RentConfig())
        groups.setdefault((without_rent, case.is_static), []).append(case)
    return list(groups.values())


def _decide(fleet: Fleet, groups: dict[int, list[EvalCase]], rows: Sequence[int]) -> dict[int, Decision]:
    """Return the decision for every host. Where the controllers of a row differ, divide its cases, and copy the host to free rows."""
    decisions: dict[int, Decision] = {}
    copies: dict[int, int] = {}
    for row in rows:
        states: dict[RentConfig, GrowthState] = {}
        parts: dict[object, tuple[Decision, list[EvalCase]]] = {}
        for case in groups[row]:
            rent = case.setting.rent
            if rent not in states:
                fleet.set_rent(row, rent)
                states[rent] = with_finite_losses(fleet.state(row))
            decision = case.controller.decide(states[rent])
            parts.setdefault(_effect(decision, rent), (decision, []))[1].append(case)
        for number, (decision, cases) in enumerate(parts.values()):
            place = len(groups) if number else row
            groups[place], decisions[place] = cases, decision
            if number:
                copies[place] = row
    fleet.copy(copies)
    for row in decisions:
        fleet.set_rent(row, groups[row][0].setting.rent)
    return decisions


def _effect(decision: Decision, rent: RentConfig) -> object:
    """Return all of a decision that makes a difference to a host: everything but the reasons."""
    actions = tuple((type(action), replace(action, reason="")) for action in decision.actions)
    tried = tuple((trial.name, *((type(action), replace(action, reason="")) for action in trial.actions)) for trial in decision.trials)
    # Whether a kept seed may be removed, and which trial goes on, depends on the rent.
    its_rent = rent if tried or any(isinstance(action, Shrink) for action in decision.actions) else None
    return actions, tried, its_rent, decision.probe, decision.not_probed, decision.measure_kept


def _result(
    eval_setting: EvalSetting,
    fleet: Fleet,
    row: int,
    case: EvalCase,
    test_loss: float,
    val_loss: float,
    compared: Sequence[TrialsCompared],
) -> EvalRun:
    """Return the result of one host of a finished fleet."""
    lifecycles = fleet.rows[row].lifecycles
    added, seeds = lifecycles.added(), lifecycles.ledger.seeds
    return EvalRun(
        task=eval_setting.task.name,
        host=eval_setting.host,
        controller=case.name,
        price=case.price,
        seed=case.setting.seed,
        horizon=case.setting.horizon,
        steps=case.setting.horizon * fleet.steps_per_decision,
        test_loss=test_loss,
        val_loss=val_loss,
        parameters=lifecycles.host.parameters,
        added_parameters=added.parameters,
        flops_per_sample=lifecycles.host.flops,
        added_flops=added.flops,
        total_flops=lifecycles.history.flops - (0 if case.is_measured else fleet.rows[row].validation_flops),
        grown=len(seeds),
        kept=[(name, str(backend.blueprint)) for name, backend in lifecycles.occupied()],
        rollbacks=lifecycles.governor.rollbacks,
        unit=lifecycles.unit,
        trace=[f"{seed.born} {seed.slot} {seed.blueprint} {seed.outcome}" for seed in seeds],
        chosen=[one.chosen for one in compared],
    )


def with_finite_losses(state: GrowthState) -> GrowthState:
    """Replace losses that are not finite by the loss before them, since the host was rolled back to that state."""
    if all(map(math.isfinite, (*state.train_losses, *state.val_losses))):
        return state
    start = state.uninformed_loss or 0.0
    return replace(
        state, train_losses=_without_nonfinite(state.train_losses, start), val_losses=_without_nonfinite(state.val_losses, start)
    )


def _without_nonfinite(losses: Sequence[float], start: float) -> tuple[float, ...]:
    """Replace every loss that is not finite by the one before it; the first by `start`."""
    losses_so_far: list[float] = []
    for loss in losses:
        losses_so_far.append(loss if math.isfinite(loss) else (losses_so_far or [start])[-1])
    return tuple(losses_so_far)
