"""Baseline controllers: never, a random plan, a schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from esper.growth import GrowthConfig, GrowthError, grow
from esper.growth.config import BaselineConfig, BudgetConfig, LifecycleConfig
from esper.growth.controllers.baselines import CONTROLLERS, Never, Planned, Random, Schedule, as_controller, make_controller
from esper.growth.lifecycle.stages import Decision, Germinate, GrowthState
from esper.growth.run import Grown


def learn(controller: object, *, epochs: int = 12, **options: Any) -> Grown:
    """A small classifier of points in three classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(192, 6, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    train, val = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    loaders = DataLoader(train, batch_size=32), DataLoader(val, batch_size=16)
    return grow(model, *loaders, nn.functional.cross_entropy, epochs=epochs, controller=controller, **options)  # type: ignore[arg-type]


def births(grown: Grown) -> list[tuple[int, str, str]]:
    return [(entry.born, entry.slot, entry.blueprint) for entry in grown.ledger.seeds]


def test_the_never_controller_grows_nothing() -> None:
    grown = learn("never", epochs=3)
    assert births(grown) == []
    assert grown.added.parameters == 0
    assert "nothing was grown" in grown.report()


@pytest.mark.slow
def test_a_plan_is_followed_from_before_the_first_epoch_to_the_last() -> None:
    plan = [(0, "1", "mlp"), (3, "3", "low_rank")]
    grown = learn(Planned(plan), epochs=9)
    assert births(grown) == plan
    assert {entry.outcome for entry in grown.ledger.seeds} <= {"kept", "pruned"}
    assert grown.ledger.count("kept") >= 1


@pytest.mark.slow
def test_a_random_plan_is_drawn_once_and_depends_on_the_seed_alone() -> None:
    def plan(seed: int, seeds: int | None = None) -> list[tuple[int, str, str]]:
        return births(learn(Random(seed=seed, seeds=seeds), epochs=8))

    assert plan(3) == plan(3)
    assert len({tuple(plan(seed)) for seed in range(6)}) > 2
    for seed in range(3):
        drawn = plan(seed, seeds=2)
        assert len(drawn) == 2
        assert all(born < 4 for born, _, _ in drawn)  # the first half of the training
        assert len({slot for _, slot, _ in drawn}) == 2


@pytest.mark.slow
def test_the_schedule_grows_everywhere_after_a_tenth_of_the_training() -> None:
    assert births(learn(Schedule(), epochs=20)) == [(2, "1", "mlp"), (2, "3", "mlp")]


def test_a_plan_beyond_the_budget_is_refused_with_the_reason() -> None:
    grown = learn(Planned([(0, "1", "mlp"), (0, "3", "mlp")]), epochs=3, config=GrowthConfig(budget=BudgetConfig(max_seeds=1)))
    assert len(births(grown)) == 1
    assert [refused.action for refused in grown.ledger.refused] == ["germinate"]
    assert "as many seeds as the budget allows" in grown.ledger.refused[0].reason


@pytest.mark.slow
def test_a_plan_in_the_shadow_goes_through_all_stages() -> None:
    rules = LifecycleConfig(raise_mode="shadow", training_epochs=2, blend_epochs=1, holding_epochs=1, minimum_health=0.0)
    grown = learn(Planned([(1, "1", "mlp")]), epochs=12, config=GrowthConfig(lifecycle=rules))
    (entry,) = grown.ledger.seeds
    assert [step.stage.name for step in entry.stages][:4] == ["GERMINATED", "TRAINING", "BLENDING", "HOLDING"]
    assert entry.outcome in ("kept", "pruned")


@pytest.mark.parametrize("make", [Never, lambda: Random(seed=1), Schedule, lambda: Planned([(1, "1", "mlp")])])
def test_a_controller_resumes_from_its_saved_state(make: Callable[[], Planned]) -> None:
    first, second = make(), make()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_controllers_are_made_by_name() -> None:
    assert {make_controller(name, GrowthConfig()).name for name in CONTROLLERS} == {"heuristic", "lookahead", "never", "random", "schedule"}
    with pytest.raises(
        GrowthError, match=r"no controller is named 'wise'; there are heuristic, lookahead, never, random, schedule, learned$"
    ):
        make_controller("wise", GrowthConfig())
    with pytest.raises(GrowthError, match=r"pass controller=esper\.controller\.load_controller\(path\)"):
        make_controller("mine.safetensors", GrowthConfig())


def test_a_plan_for_a_negative_epoch_is_refused() -> None:
    with pytest.raises(GrowthError, match="from 0 on"):
        Planned([(-1, "1", "mlp")])


class Eager:
    """One method, as a user would write it."""

    def decide(self, state: GrowthState) -> Decision:
        return Decision((Germinate(slot="1", reason="why not", blueprint="mlp"),) if state.epoch == 1 else ())


class Remembering(Eager):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def decide(self, state: GrowthState) -> Decision:
        self.seen.append(state.epoch)
        return super().decide(state)

    def state_dict(self) -> dict[str, object]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.seen = list(state["seen"])  # type: ignore[call-overload]


class Forgetful(Eager):
    def state_dict(self) -> dict[str, object]:
        return {}


@pytest.mark.slow
def test_any_object_with_a_decide_method_is_a_controller() -> None:
    grown = learn(Eager(), epochs=4)
    assert births(grown) == [(1, "1", "mlp")]
    assert grown.controller == "Eager"


@pytest.mark.slow
def test_a_custom_controller_is_saved_and_resumed(tmp_path: Path) -> None:
    for make in (Eager, Remembering):
        whole = learn(make(), epochs=4)
        folder = tmp_path / make.__name__
        learn(make(), epochs=2, run=folder)
        controller = make()
        assert births(learn(controller, epochs=4, run=folder, resume=True)) == births(whole)
    assert isinstance(controller, Remembering)
    assert controller.seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("controller", "words"),
    [
        (Eager, r"is the class Eager itself; pass an object of it: controller=Eager\("),
        (object(), r"the controller object has no method decide\(state\); add one that returns a Decision"),
        (None, "the controller NoneType has no method decide"),
        (Forgetful(), "Forgetful has only state_dict of state_dict and load_state_dict"),
    ],
)
def test_an_object_that_is_no_controller_is_refused(controller: object, words: str) -> None:
    with pytest.raises(GrowthError, match=words):
        as_controller(controller, GrowthConfig())  # type: ignore[arg-type]
    with pytest.raises(GrowthError, match=words):
        learn(controller, epochs=1)


@pytest.mark.slow
def test_the_options_of_baselines_are_part_of_the_config() -> None:
    settings = GrowthConfig(seed=3, baseline=BaselineConfig(random_seeds=1, random_until=0.25, schedule_at=0.5))
    assert births(learn(make_controller("schedule", settings), epochs=8)) == [(4, "1", "mlp"), (4, "3", "mlp")]
    ((epoch, _, _),) = births(learn(make_controller("random", settings), epochs=8))
    assert epoch < 2
