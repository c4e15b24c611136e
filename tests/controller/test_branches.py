"""What branches teach, and the controller that improves on the heuristic with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.controller.branches import UNITS, WIDTH, Branches, Change, Gains, Improved, described, fit
from esper.controller.config import GainsConfig
from esper.controller.description import card, read_description
from esper.controller.evaluation import EvalCase, EvalSetting, run_cases
from esper.controller.features import HOST_WIDTH, observe
from esper.controller.learned import Learned, load_controller, save_controller
from esper.controller.turn import WAIT, Step, Turn
from esper.fleet import Fleet, FleetConfig, HostConfig
from esper.fleet.data import TaskTensors
from esper.growth.config import GrowthConfig, HeuristicConfig, LifecycleConfig, RentConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.controllers.lookahead import Lookahead
from esper.growth.lifecycle.stages import Controller, Decision, Fossilize, Germinate, GrowthState
from esper.tasks import load_task
from tests.controller.hosts import seed_on_trial, slot, state

CONFIG = GrowthConfig()


def gains_of(value: float, *, spread: float = 0.0) -> Gains:
    """Return an ensemble that expects this change of the loss of every step; members differ by about `spread`."""
    gains = Gains(width=4, members=8)
    with torch.no_grad():
        for weight, bias in zip(gains.weights, gains.biases, strict=True):
            weight.zero_()
            bias.zero_()
        gains.biases[-1][:, 0, 0] = (value + spread * torch.linspace(-1, 1, 8)) / UNITS[0]
    return gains.eval()


def lives(make: Callable[[], Controller], *, epochs: int = 12) -> list[tuple[GrowthState, Decision]]:
    """Return what a controller sees and decides in the life of a small host."""
    task = load_task("digits")
    fleet = Fleet(task, task.maker("conv-2x2"), hosts=1, config=FleetConfig(batch_size=16, steps_per_decision=4, validation_samples=64))
    fleet.reset({0: HostConfig(horizon=epochs)})
    controller, found = make(), []
    while fleet.training():
        now = fleet.state(0)
        found.append((now, controller.decide(now)))
        fleet.decide({0: found[-1][1]})
        fleet.advance()
    return found


def germinated(decision: Decision) -> list[tuple[str, str]]:
    return [(action.slot, action.blueprint) for action in decision.actions if isinstance(action, Germinate)]


# Learning


def test_an_ensemble_learns_what_steps_change_in_cells_that_it_has_not_seen() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(2_000, WIDTH)).astype(np.float32)
    losses = 0.1 * features[:, 0] - 0.05 * features[:, 70]
    changes = [Change(float(loss), float(one[1]), 0.0) for loss, one in zip(losses, features, strict=True)]
    cells = [number // 10 for number in range(2_000)]
    gains = fit(Branches(list(features[:1_800]), changes[:1_800], cells[:1_800]), seed=0, steps=100, members=4)
    costs, deviations, *_ = gains.costs(features[1_800:], RentConfig(parameters=0.0, flops=0.0))
    assert np.corrcoef(costs, losses[1_800:])[0, 1] > 0.8
    assert (deviations > 0).all()
    dear, *_ = gains.costs(features[1_800:], RentConfig(parameters=1.0, flops=0.0))
    assert np.corrcoef(dear - costs, features[1_800:, 1])[0, 1] > 0.7, "the rent is that of the size"


def test_the_same_seed_gives_the_same_ensemble() -> None:
    rng = np.random.default_rng(1)
    some = Branches(list(rng.normal(size=(20, WIDTH)).astype(np.float32)), [Change(0.1, 0.0, 0.0)] * 20, list(range(20)))
    first, again, other = (fit(some, seed=seed, steps=2, members=2).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["weights.0"], other["weights.0"])


def test_a_step_is_described_beside_the_advised_one() -> None:
    seen = observe(Turn(state(slot("a"), slot("b"))))
    one, other = Step("germinate", "a", "conv1x1"), Step("germinate", "b", "double_conv3x3")
    here, there = described(seen, one, other), described(seen, other, one)
    assert here.shape == (WIDTH,)
    half = (WIDTH - HOST_WIDTH) // 2
    np.testing.assert_array_equal(here[HOST_WIDTH:][:half], there[HOST_WIDTH:][half:])
    assert described(seen, WAIT, WAIT)[HOST_WIDTH:].sum() == 2


# Deciding


@pytest.mark.parametrize("gains", [gains_of(0.01), gains_of(-0.01, spread=0.2)], ids=["worse", "unsure"])
def test_where_no_step_is_surely_better_all_decisions_are_those_of_the_heuristic(gains: Gains) -> None:
    plain, improved = (lives(make) for make in (lambda: Heuristic(CONFIG), lambda: Improved(gains, CONFIG, caution=1.0, most=1)))
    assert [decision.actions for _, decision in improved] == [decision.actions for _, decision in plain]
    assert sum(len(germinated(decision)) for _, decision in plain) > 0


def test_a_better_step_is_taken_once_in_a_turn_after_a_probe_and_says_why() -> None:
    once, often = (lives(lambda most=most: Improved(gains_of(-0.01), CONFIG, caution=1.0, most=most)) for most in (1, 3))
    first = Heuristic(CONFIG).first_look(12)
    assert next(now.epoch for now, decision in once if decision.probe) == first - 1
    assert next(now.epoch for now, decision in once if "instead of" in decision.reason) == first
    said = once[first][1].reason
    assert said.endswith(": -0.010")
    assert said.count("instead of") == 1
    assert often[first][1].reason.count("instead of") > 1 or germinated(often[first][1]) == []


def test_what_it_prefers_is_tried_beside_the_plans_of_lookahead() -> None:
    first = Heuristic(CONFIG).first_look(12)
    ahead, improved, unsure = (lives(make)[first][1] for make in (lambda: Lookahead(CONFIG), lambda: trying(-0.01), lambda: trying(0.01)))
    assert [trial.name for trial in improved.trials] == [*(trial.name for trial in ahead.trials), "learned"]
    seeds = [{(one.slot, one.blueprint) for one in trial.actions if isinstance(one, Germinate)} for trial in improved.trials]
    assert len(set(map(frozenset, seeds))) == len(seeds)
    assert not germinated(improved)
    assert improved.reason.startswith("tries ")
    assert unsure.trials == ahead.trials


def test_later_what_it_prefers_is_tried_beside_the_plan_of_the_heuristic() -> None:
    now = state(seed_on_trial("ripe"), slot("free"), rent=RentConfig(parameters=0.001, flops=0.001), epoch=4)
    improved = trying(-0.01)
    improved.load_state_dict({"heuristic": Lookahead(CONFIG).state_dict(), "looked_at": 3})
    decided = improved.decide(now)
    assert [type(action) for action in decided.actions] == [Fossilize], "what it decides about seeds that have grown is carried out at once"
    assert [trial.name for trial in decided.trials] == ["heuristic", "learned"]


def test_seeds_that_have_grown_are_judged_as_the_heuristic_judges_them() -> None:
    ripe = state(seed_on_trial("ripe"), slot("free"), rent=RentConfig(parameters=0.001, flops=0.001), epoch=4)
    improved = Improved(gains_of(-0.01), CONFIG, caution=1.0, most=1)
    improved.load_state_dict({"heuristic": Heuristic(CONFIG).state_dict(), "looked_at": 3})
    decided = improved.decide(ripe)
    assert isinstance(decided.actions[0], Fossilize)
    assert "instead of wait" in decided.reason


def trying(value: float) -> Improved:
    return Improved(gains_of(value), CONFIG, caution=1.0, most=1, tries=True)


def test_trials_are_made_in_rows_of_their_own() -> None:
    task = load_task("digits")
    fleet = FleetConfig(batch_size=16, steps_per_decision=4, validation_samples=64)
    device = torch.device("cpu")
    tensors = TaskTensors.of(task, device=device, dtype=torch.float32)
    setting = EvalSetting(task, "conv-2x2", tensors, fleet, CONFIG, device, rows=4)
    (run,) = run_cases(setting, [EvalCase("tries", HostConfig(horizon=12), trying(-0.01))])
    assert run.chosen


def test_the_rules_of_the_run_are_kept() -> None:
    config = GrowthConfig(heuristic=HeuristicConfig(grow_at=0.5))
    improved = Improved(gains_of(0.01), config, caution=1.0, most=1)
    found = lives(lambda: improved, epochs=16)
    assert next(now.epoch for now, decision in found if decision.probe) == 7
    now = replace(found[0][0], lifecycle=LifecycleConfig(holding_epochs=5))
    improved.decide(now)
    assert improved.heuristic.lifecycle == now.lifecycle


def test_a_look_that_was_asked_for_is_remembered() -> None:
    first = Improved(gains_of(-0.01), CONFIG, caution=1.0, most=1)
    found = lives(lambda: first)
    (probed,) = [now for now, decision in found if now.epoch == Heuristic(CONFIG).first_look(12) - 1]
    one, two = (Improved(gains_of(-0.01), CONFIG, caution=1.0, most=1) for _ in range(2))
    assert one.decide(probed).probe
    two.load_state_dict(one.state_dict())
    (then,) = [now for now, _ in found if now.epoch == probed.epoch + 1]
    assert two.decide(then) == one.decide(then)
    assert "instead of" in two.decide(then).reason


# Files


def test_a_file_decides_as_what_was_saved(tmp_path: Path) -> None:
    path, gains = tmp_path / "one.safetensors", gains_of(-0.01)
    save_controller(path, ensemble=gains, info={"cells": 3}, gains=GainsConfig(caution=0.25, most=2))
    description = read_description(path)
    assert description.gains == GainsConfig(members=8, width=4, caution=0.25, most=2)
    assert "another step where 8 networks of width 4 are sure of it by 0.25 standard deviations" in card(path, description)
    loaded = load_controller(path)
    expected = lives(lambda: Improved(gains, CONFIG, caution=0.25, most=2))
    assert [decision for _, decision in lives(lambda: loaded)] == [decision for _, decision in expected]
    again = loaded.new_copy()
    again.load_state_dict(loaded.state_dict())
    assert again.state_dict() == loaded.state_dict()
    assert again.policy is None


def test_the_rules_of_the_heuristic_come_with_the_settings(tmp_path: Path) -> None:
    save_controller(tmp_path / "one.safetensors", ensemble=gains_of(0.01))
    config = GrowthConfig(heuristic=HeuristicConfig(grow_at=0.5))
    loaded = load_controller(tmp_path / "one.safetensors", config=config)
    assert isinstance(loaded, Learned)
    assert next(now.epoch for now, decision in lives(lambda: loaded, epochs=16) if decision.probe) == 7
