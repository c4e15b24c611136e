"""States of hosts, written by hand or drawn, for the tests of the controller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from esper.gradients import GradientStats
from esper.growth.config import LifecycleConfig, RentConfig
from esper.growth.host.layout import Place
from esper.growth.lifecycle.governor import LossRange
from esper.growth.lifecycle.stages import OCCUPIED, Candidate, Contribution, Cost, GrowthState, SlotState, Stage
from esper.statistics import Interval
from tests.growth.builders import seed_record

WIDENINGS = ("widen_100", "widen_300", "widen_700")
BLUEPRINTS = (*WIDENINGS, "double_conv3x3", "mlp", "norm")
RULES = LifecycleConfig(holding_epochs=2)
HOST = Cost(parameters=2_000, flops=100_000)
SMALL = Candidate("conv1x1", Cost(72, 4_000), rent=0.0004, load=1.1)
LARGE = Candidate("double_conv3x3", Cost(1_200, 70_000), rent=0.012, promise=0.002, load=18.0)
HEALTHY = GradientStats(steps=16, mean_norm=0.3, max_norm=0.8, health=0.9, skipped=0)


def slot(name: str = "first", *, blueprint: str | None = None, **fields: Any) -> SlotState:
    place = Place(name, "conv", (8, 8, 8), depth=0.4, flops_behind=50_000)
    seed = None if blueprint is None else seed_record(blueprint)
    return replace(SlotState(place, seed=seed, candidates=(LARGE, SMALL)), **fields)


def seed_on_trial(name: str = "second", *, epoch: int = 4, gain: float = 0.05, **fields: Any) -> SlotState:
    """A seed that has been on probation for long enough and was measured."""
    trial: dict[str, Any] = dict(
        stage=Stage.HOLDING, blueprint="conv1x1", cost=SMALL.cost, rent=0.0004, alpha=1.0, age=3, epochs_in_stage=3, candidates=(),
        gradients=HEALTHY, contribution=Contribution(Interval(gain, gain - 0.02, gain + 0.02), epoch),
    )  # fmt: skip
    return slot(name, **(trial | fields))


def state(*slots: SlotState, **fields: Any) -> GrowthState:
    base = GrowthState(
        epoch=4, epochs=16, steps_per_epoch=16, train_losses=(2.0, 1.5, 1.2, 1.0), val_losses=(2.1, 1.6, 1.4, 1.3), slots=slots,
        host_cost=HOST, added=Cost(0, 0), parameters_left=16_000, flops_left=None, seeds_left=len(slots), scale=LossRange.of(2.3),
        lifecycle=RULES,
        learning_rate=0.01, samples_per_epoch=1_000, host_load=400.0, rent=RentConfig(parameters=0.1, flops=0.03),
    )  # fmt: skip
    return replace(base, **fields)


def drawn_state(rng: np.random.Generator, *, slots: int = 3) -> GrowthState:
    """Anything that could be: seeds in all stages, with and without measurements."""
    epoch = int(rng.choice([1, 4])) if rng.uniform() < 0.6 else int(rng.integers(0, 16))
    losses = tuple(float(loss) for loss in np.exp(rng.normal(0, 0.3, epoch)))
    return state(
        *(_drawn_slot(rng, f"slot{index}", epoch) for index in range(slots)),
        epoch=epoch,
        train_losses=losses,
        val_losses=losses,
        rent=RentConfig(parameters=float(np.exp(rng.uniform(np.log(0.003), np.log(0.3)))), flops=float(rng.uniform(0, 0.1))),
    )


def _drawn_slot(rng: np.random.Generator, name: str, epoch: int) -> SlotState:
    stage = Stage(int(rng.choice([Stage.DORMANT, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.EMBARGOED])))
    width, side = int(rng.choice([4, 8, 16])), int(rng.choice([2, 4, 8]))
    place = Place(name, "conv", (width, side, side), depth=float(rng.uniform()), flops_behind=int(rng.integers(100_000)))
    names = [blueprint for blueprint in (*BLUEPRINTS, "conv1x1") if rng.uniform() < 0.8]
    candidates = tuple(_drawn_candidate(rng, one, name) for one in names)
    if stage not in OCCUPIED:
        return SlotState(place, stage, candidates=candidates if stage is Stage.DORMANT else (), tried=tuple(names[:1]))
    low, middle, high = sorted(float(value) for value in rng.normal(0, 0.1, 3))
    return SlotState(
        place,
        stage,
        seed=seed_record(BLUEPRINTS[0]),
        cost=Cost(int(rng.integers(1, 5_000)), int(rng.integers(1, 100_000))),
        rent=float(rng.uniform(0, 0.3)),
        alpha=float(rng.uniform()),
        age=int(rng.integers(0, 10)),
        epochs_in_stage=int(rng.integers(0, 10)),
        is_withdrawing=bool(rng.uniform() < 0.2),
        gradients=HEALTHY if rng.uniform() < 0.7 else None,
        contribution=Contribution(Interval(middle, low, high), epoch) if rng.uniform() < 0.7 else None,
    )


def _drawn_candidate(rng: np.random.Generator, name: str, slot_name: str) -> Candidate:
    cost = Cost(int(rng.integers(1, 5_000)), int(rng.integers(1, 100_000)))
    promise = float(rng.uniform(0, 0.01)) if rng.uniform() < 0.5 else None
    widened = (f"layer of {slot_name}",) if name in WIDENINGS else ()
    return Candidate(name, cost, rent=float(rng.uniform(0, 0.3)), promise=promise, load=float(rng.uniform(0, 100)), widened=widened)
