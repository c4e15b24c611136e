"""Evaluations: many cases in one fleet are as if each were trained alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
import torch

import esper.growth.trials
from esper.controller.cells import Cell
from esper.controller.evaluation import EvalCase, EvalRun, EvalSetting, Rows, run_cases, with_finite_losses
from esper.fleet.config import FleetConfig, HostConfig
from esper.fleet.data import TaskTensors
from esper.fleet.fleet import Fleet
from esper.fleet.memory import Memory
from esper.growth.config import GrowthConfig, LookaheadConfig, RentConfig
from esper.growth.controllers.baselines import see_through
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.controllers.lookahead import Lookahead
from esper.growth.lifecycle.governor import LossRange
from esper.growth.lifecycle.stages import Controller, Decision, Germinate, GrowthState
from esper.tasks import load_task
from tests.controller.hosts import BLUEPRINTS, slot, state

load = cache(load_task)
CELL = Cell(host="mlp-4x1", samples=300, classes=4, batch_size=16, steps_per_decision=6, horizon=6)
GROWTH = GrowthConfig(blueprints=BLUEPRINTS)


class Grows:
    """Grows one blueprint wherever it can after some epoch, and keeps what contributes more than its rent; None grows nothing."""

    def __init__(self, blueprint: str | None = None, *, at: int = 0) -> None:
        self.blueprint, self.at = blueprint, at

    def decide(self, now: GrowthState) -> Decision:
        slots = [one for one in now.slots if now.epoch == self.at and any(seed.blueprint == self.blueprint for seed in one.candidates)]
        grown = [Germinate(slot=one.place.name, reason="a test", blueprint=str(self.blueprint)) for one in slots]
        return Decision((*grown, *see_through(now, {action.slot for action in grown})))


def setting_of(cell: Cell, growth: GrowthConfig = GROWTH, **fields: Any) -> EvalSetting:
    task = cell.task(load)
    tensors = TaskTensors.of(task, device=torch.device("cpu"), dtype=torch.float32)
    fleet = cell.fleet(FleetConfig(validation_samples=200))
    return replace(EvalSetting(task, cell.host, tensors, fleet, growth, torch.device("cpu"), rows=256), **fields)


def case_of(name: str, seed: int, controller: Controller, *, price: float = 0.03, cell: Cell = CELL) -> EvalCase:
    rent = RentConfig(parameters=price, flops=price)
    return EvalCase(name, cell.host_config(seed, len(cell.task(load).train), rent=rent), controller)


def assert_same_runs(some: Sequence[EvalRun], others: Sequence[EvalRun], *names: str) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.val_loss == pytest.approx(other.val_loss, rel=1e-3)
        assert one.test_loss == pytest.approx(other.test_loss, rel=1e-3)
        for name in ("controller", "seed", "kept", "total_flops", "trace", *names):
            assert getattr(one, name) == getattr(other, name), name


@pytest.mark.slow
def test_hosts_that_do_not_fit_into_the_memory_are_trained_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    controllers = {"wider": Grows("widen_100"), "never": Grows(), "deeper": Grows("mlp")}
    cases = [case_of(name, 0, controller) for name, controller in controllers.items()]
    made: list[Fleet] = []
    make = Fleet.__init__
    monkeypatch.setattr(Fleet, "__init__", lambda self, *args, **options: (made.append(self), make(self, *args, **options))[1])
    together = setting_of(CELL)
    at_once = run_cases(together, cases)
    assert [fleet.hosts for fleet in made] == [3]
    made.clear()
    monkeypatch.setattr(Fleet, "memory_per_host", lambda self: Memory(state=10, step=20, seeds=70))  # 100 bytes
    in_turn = run_cases(replace(together, memory=299), cases)
    assert [fleet.hosts for fleet in made] == [1, 2, 1], "the first one is asked for the memory of a host"
    assert_same_runs(in_turn, at_once)
    made.clear()
    run_cases(replace(together, memory=1), cases[:1])
    assert [fleet.hosts for fleet in made] == [1, 1]


@pytest.mark.slow
def test_cases_are_one_host_until_their_controllers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are those of cases that train apart, in fewer rows."""

    def cases() -> list[EvalCase]:
        made = {"never": Grows, "deep": lambda: Grows("mlp"), "later": lambda: Grows("mlp", at=2), "wide": lambda: Grows("widen_100")}
        found = [case_of(name, seed, make()) for seed in range(2) for name, make in made.items()]
        twice = [case_of("mine", 0, Grows("norm", at=1), price=price) for price in (0.01, 0.2)]
        return [*found, *twice, case_of("heuristic", 1, Heuristic(GROWTH))]

    copies: list[Mapping[int, int]] = []
    copy = Fleet.copy
    monkeypatch.setattr(Fleet, "copy", lambda self, rows: (copies.append(dict(rows)), copy(self, rows))[1])
    together = run_cases(setting_of(CELL), cases())
    assert 0 < sum(map(len, copies)) <= len(cases()) - 3, "two hosts at first, and two cases that never differ"
    copies.clear()
    apart = [run_cases(setting_of(CELL), [case])[0] for case in cases()]
    assert not any(copies)
    assert_same_runs(together, apart)


@pytest.mark.slow
def test_a_case_that_looks_ahead_is_the_same_beside_others_and_goes_on_as_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(esper.growth.trials, "MARGIN", 0.0)
    cell = msgspec.structs.replace(CELL, horizon=9)
    growth = GrowthConfig(blueprints=BLUEPRINTS, lookahead=LookaheadConfig(epochs=2))
    setting = setting_of(cell, growth)

    def cases() -> list[EvalCase]:
        some = [case_of("heuristic", 0, Heuristic(growth), cell=cell), case_of("never", 0, Grows(), cell=cell)]
        return [*some, *(case_of("lookahead", seed, Lookahead(growth), cell=cell) for seed in (0, 0, 1))]

    together = run_cases(setting, cases())
    apart = [run_cases(setting, [one])[0] for one in cases()]
    assert_same_runs(together, apart, "chosen")
    assert [len(run.chosen) for run in together] == [0, 0, 1, 1, 1]
    assert together[2].total_flops > together[1].total_flops, "all trials are counted"


@pytest.mark.slow
def test_every_fleet_is_handed_over_at_its_end_with_the_cases_of_its_rows() -> None:
    longer = msgspec.structs.replace(CELL, horizon=8)
    cases = [
        case_of("never", 0, Grows(), cell=longer),
        case_of("wide", 0, Grows("widen_100", at=1)),
        case_of("never", 0, Grows()),
        case_of("also never", 0, Grows()),
    ]
    ended: list[tuple[list[int], list[list[str]]]] = []

    def keep(fleet: Fleet, rows: Rows) -> None:
        assert not fleet.training()
        epochs = [len(fleet.rows[row].lifecycles.history.val_losses) for row in rows]
        ended.append((epochs, [sorted(case.name for case in some) for some in rows.values()]))

    runs = run_cases(setting_of(CELL, rows=3), cases, on_end=keep)
    assert [run.horizon for run in runs] == [8, 6, 6, 6]
    assert [sorted(map(len, names)) for _, names in ended] == [[1, 2], [1]], "cases of one horizon share a fleet"
    assert [epochs for epochs, _ in ended] == [[6, 6], [8]]
    assert ["also never", "never"] in ended[0][1]
    assert runs[2].val_loss == runs[3].val_loss


@pytest.mark.slow
def test_a_host_that_diverges_leaves_the_others_as_they_are() -> None:
    wild = HostConfig(seed=0, horizon=CELL.horizon, learning_rate=1e12)
    calm = case_of("calm", 0, Grows())
    beside = run_cases(setting_of(CELL), [EvalCase("wild", wild, Grows()), calm])
    assert beside[0].rollbacks > 0
    assert_same_runs(beside[1:], run_cases(setting_of(CELL), [calm]))


def test_losses_that_are_not_finite_are_observed_as_the_last_finite_ones() -> None:
    now = state(
        slot(),
        train_losses=(1.0, math.nan, 0.5),
        val_losses=(math.inf, 2.0, math.nan),
        scale=LossRange.of(2.3),
    )
    assert with_finite_losses(now).train_losses == (1.0, 1.0, 0.5)
    assert with_finite_losses(now).val_losses == (2.3, 2.0, 2.0)
    assert with_finite_losses(state(slot())) == state(slot())
