"""The policy over steps: its network, how it begins as its advisor, and how it decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.controller.branches import Improved
from esper.controller.config import StepNetworkConfig
from esper.controller.features import Observation, observe
from esper.controller.policy import Sizes, StepActor, StepController, batch, make_policy, sizes_for
from esper.controller.turn import OPS, Step, Turn, steps_of
from esper.growth.config import GrowthConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.lifecycle.stages import CompleteController, Decision, GrowthState
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy
from tests.controller.hosts import drawn_state, state
from tests.controller.policies import MEMORY, new_policy, perturbed_policy, trained_policy
from tests.controller.test_branches import gains_of, germinated, lives

CONFIG = GrowthConfig()
SMALL = Sizes(12, 20)


def heuristic() -> CompleteController:
    return Heuristic(CONFIG)


def eager() -> CompleteController:
    """An advisor that grows something else than the heuristic after every probe."""
    return Improved(gains_of(-0.01), CONFIG, caution=1.0, most=2)


def turns_of(advisor: Callable[[], CompleteController], epochs: int) -> list[Turn]:
    """Return all turns with a choice in the life of a small host under an advisor."""
    found, looked_at = list[Turn](), None
    for now, decision in lives(advisor, epochs=epochs):
        turn = Turn(now, steps_of(decision, now), looked_at)
        while not turn.is_over:
            found.append(turn)
            turn = turn.after(turn.advised)
        looked_at = now.epoch if turn.looks else looked_at
    return [turn for turn in found if len(turn.legal()) > 1]


def log_probs(policy: Policy, seen: Sequence[Observation], steps: Sequence[Step]) -> Tensor:
    """Return the log-probability of every head [N, 3] of steps that each begin a life; 0 for heads that do not matter."""
    obs, masks = batch(seen, sizes_for(policy))
    numbers = torch.tensor([one.numbers_of(step) for one, step in zip(seen, steps, strict=True)])
    with torch.no_grad():
        features, _ = policy.step(obs, policy.initial_state(len(seen)))
        choice = policy.distribution.choose(policy.decide(features), masks, None)._replace(picked=numbers)
        return policy.distribution.evaluate(policy.decide(features), choice, masks).log_prob * policy.distribution.relevance(choice)


def assert_same_decisions(some: Sequence[tuple[GrowthState, Decision]], others: Sequence[tuple[GrowthState, Decision]]) -> None:
    """Check that two lives were decided alike, and so went alike."""
    for (_, one), (_, other) in zip(some, others, strict=True):
        assert one.actions == other.actions
        assert (one.probe, one.reason, one.passed_over, one.measure_kept) == (
            other.probe,
            other.reason,
            other.passed_over,
            other.measure_kept,
        )
    assert [now.val_losses for now, _ in some] == [now.val_losses for now, _ in others]


# Steps and sizes


def test_only_legal_steps_are_drawn() -> None:
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    policy = new_policy(trust=0.5, sizes=Sizes(8, 20))
    turns = [Turn(drawn_state(rng, slots=1 + number % 4)) for number in range(40)]
    seen = [observe(turn) for turn in turns]
    obs, masks = batch(seen, sizes_for(policy))
    drawn = set()
    for _ in range(10):
        actions, _ = policy.act(obs, masks=masks, generator=generator)
        for row, turn in enumerate(turns):
            step = seen[row].step_of(*(int(actions[head][row]) for head in ("op", "target", "blueprint")))
            assert step in turn.legal()
            drawn.add(step.op)
    assert drawn >= {"wait", "look", "germinate", "prune"}


def test_room_for_more_targets_and_options_changes_no_probability() -> None:
    rng = np.random.default_rng(1)
    small, large = trained_policy(sizes=Sizes(8, 12)), new_policy(sizes=Sizes(9, 15), seed=1)
    large.load_state_dict(small.state_dict())
    turns = [Turn(drawn_state(rng, slots=3)) for _ in range(20)]
    seen, steps = [observe(turn) for turn in turns], [turn.legal()[-1] for turn in turns]
    found = [log_probs(policy, seen, steps) for policy in (small, large)]
    torch.testing.assert_close(*found)


def test_a_policy_is_small() -> None:
    policy = make_policy(StepNetworkConfig(), NetworkConfig(hidden_size=64), Sizes(4, 4), generator=torch.Generator())
    assert sum(weight.numel() for weight in policy.parameters()) < 300_000


def test_building_a_policy_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    one, other = new_policy(sizes=SMALL), new_policy(sizes=SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())


def test_an_empty_host_has_an_observation() -> None:
    obs, masks = batch([observe(Turn(state()))], Sizes(3, 3))
    assert masks["op"].tolist() == [[op == "wait" for op in OPS]]
    assert all(part.isfinite().all() for part in obs.values())


# It begins as its advisor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("advisor", "memory"),
    [(heuristic, MEMORY), (eager, MEMORY), (heuristic, NetworkConfig(core="none")), (eager, NetworkConfig(core="gru", hidden_size=12))],
    ids=["heuristic-lstm", "eager-lstm", "heuristic-none", "eager-gru"],
)
def test_a_new_policy_decides_as_its_advisor_in_whole_lives(advisor: Callable[[], CompleteController], memory: NetworkConfig) -> None:
    expected = lives(advisor)
    controller = StepController(new_policy(memory=memory), advisor())
    assert_same_decisions(lives(lambda: controller), expected)
    assert controller.others == []
    assert any(germinated(decision) for _, decision in expected)


@pytest.mark.slow
@pytest.mark.parametrize("trust", [0.0, 1.0, 4.0])
def test_the_advised_choice_of_every_head_is_ahead_of_each_other_one_by_the_trust(trust: float) -> None:
    turns = [*turns_of(heuristic, 12), *turns_of(eager, 12)]
    seen, steps = [observe(turn) for turn in turns], [turn.advised for turn in turns]
    assert {step.op for step in steps} >= {"wait", "look", "germinate"}
    found = log_probs(new_policy(trust=trust), seen, steps).exp()
    for one, step, (op, target, blueprint) in zip(seen, steps, found.tolist(), strict=True):
        number, place, option = one.numbers_of(step)
        heads = [(op, one.may.sum())]
        if step.target:
            heads.append((target, one.where[number].sum()))
        if step.blueprint:
            heads.append((blueprint, one.which[place].sum()))
            assert one.which[place, option]
        for probability, count in heads:
            assert probability == pytest.approx(math.exp(trust) / (math.exp(trust) + count - 1), abs=0.03)


@pytest.mark.slow
def test_the_trust_is_learned_as_all_other_weights_are() -> None:
    turns = [turn for turn in turns_of(heuristic, 12) if turn.advised.op == "germinate"]
    policy, seen = new_policy(), [observe(turn) for turn in turns]
    obs, masks = batch(seen, sizes_for(policy))
    features, _ = policy.step(obs, policy.initial_state(len(seen)))
    numbers = torch.tensor([one.numbers_of(turn.advised) for one, turn in zip(seen, turns, strict=True)])
    parameters = policy.decide(features)
    choice = policy.distribution.choose(parameters, masks, None)._replace(picked=numbers)
    policy.distribution.evaluate(parameters, choice, masks).log_prob.sum().backward()
    assert isinstance(policy.actor, StepActor)
    assert policy.actor.trust.grad is not None
    assert (policy.actor.trust.grad > 0).all(), "more trust makes all three parts of the advised step likelier"
    assert [name for name, weight in policy.actor.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_layers_that_serve_one_head_only_are_named_so_that_they_may_rest_where_it_does_not_matter() -> None:
    policy, turns = new_policy(sizes=SMALL), [Turn(drawn_state(np.random.default_rng(number), slots=5)) for number in range(40)]
    seen = [observe(turn) for turn in turns]
    obs, masks = batch(seen, sizes_for(policy))
    for op, resting in (("wait", {("target",), ("blueprint",)}), ("prune", {("blueprint",)})):
        rows = [row for row, turn in enumerate(turns) if op == "wait" or sum(step.op == op for step in turn.legal()) > 1]
        steps = [next(step for step in turns[row].legal() if step.op == op) for row in rows]
        numbers = torch.tensor([seen[row].numbers_of(step) for row, step in zip(rows, steps, strict=True)])
        features, _ = policy.step({name: part[rows] for name, part in obs.items()}, policy.initial_state(len(rows)))
        parameters, allowed = policy.decide(features), {name: mask[rows] for name, mask in masks.items()}
        choice = policy.distribution.choose(parameters, allowed, None)._replace(picked=numbers)
        policy.zero_grad()
        found = policy.distribution.evaluate(parameters, choice, allowed).log_prob * policy.distribution.relevance(choice)
        found.sum().backward()
        assert isinstance(policy.actor, StepActor)
        layers = {name: [weight.grad for weight in part.parameters()] for name, part in policy.actor.named_children()}
        still = {name for name, gradients in layers.items() if not any(part is not None and part.any() for part in gradients)}
        assert still == {name for name, heads in policy.actor.heads_of_layers.items() if heads in resting}


@pytest.mark.slow
def test_a_policy_without_trust_in_its_advisor_decides_otherwise_and_says_so() -> None:
    controller = StepController(new_policy(trust=0.0), Heuristic(CONFIG), seed=0)
    found = lives(lambda: controller)
    said = [decision.reason for _, decision in found if "instead of" in decision.reason]
    assert sum(reason.count(" instead of ") for reason in said) == len(controller.others) > 0
    assert any(germinated(decision) for _, decision in found)
    assert all(" instead of " in other for other in controller.others)


# Deciding


@pytest.mark.slow
def test_a_step_is_only_asked_for_where_there_is_a_choice() -> None:
    controller = StepController(new_policy(trust=0.5), Heuristic(CONFIG), seed=1, records=200)
    found = lives(lambda: controller)
    assert all(sum(taken.seen.where.any(1)) + taken.seen.may[1] > 0 for taken in controller.life)
    assert not any(decision.actions for now, decision in found if len(Turn(now).legal()) == 1)
    assert 0 < len(controller.life) < 3 * len(found)


@pytest.mark.slow
def test_a_controller_that_records_nothing_builds_its_policy_again_for_larger_hosts_with_the_same_weights() -> None:
    small, large = (perturbed_policy(new_policy(trust=0.0, sizes=sizes)) for sizes in (Sizes(1, 1), SMALL))
    controller, expected = (StepController(policy, Heuristic(CONFIG)) for policy in (small, large))
    assert_same_decisions(lives(lambda: controller), lives(lambda: expected))
    assert controller.others == expected.others != []
    assert controller.policy is not small
    assert sizes_for(controller.policy) > sizes_for(small)
    assert all(torch.equal(weight, small.state_dict()[name]) for name, weight in controller.policy.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [Sizes(1, 20), Sizes(24, 1)])
def test_a_host_that_is_too_large_is_decided_as_advised_while_its_life_is_recorded(sizes: Sizes) -> None:
    policy = new_policy(trust=0.0, sizes=sizes)
    controller = StepController(policy, Heuristic(CONFIG), seed=0, records=100)
    found, plain = lives(lambda: controller), lives(heuristic)
    assert controller.policy is policy, "the policy that learns stays the same one"
    assert all(
        targets <= sizes.targets and options <= sizes.options for targets, options in (one.seen.which.shape for one in controller.life)
    )
    first = next(number for number, (now, _) in enumerate(found) if len(Turn(now).legal()) > 1)
    seen = observe(Turn(found[first][0])).which.shape
    assert seen > (1, 1), "the host is too large from its first choice on"
    assert_same_decisions(found, plain)
    assert controller.others == controller.life == []


@pytest.mark.slow
def test_a_life_records_no_more_than_its_first_steps_and_goes_on_as_advised() -> None:
    policy = new_policy(trust=0.0)
    short, long = (StepController(policy, Heuristic(CONFIG), seed=5, records=records) for records in (3, 100))
    found, whole = lives(lambda: short), lives(lambda: long)
    assert len(short.life) == 3 < len(long.life)
    for one, other in zip(short.life, long.life, strict=False):
        assert one.numbers == other.numbers
        np.testing.assert_array_equal(one.seen.targets, other.seen.targets)
    assert len(short.others) <= 3
    last = max(number for number, (_, decision) in enumerate(found) if "instead of" in decision.reason)
    assert last < max(number for number, (_, decision) in enumerate(whole) if "instead of" in decision.reason)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("advisor", [heuristic, eager])
def test_a_restored_controller_goes_on_as_the_first_one(seed: int | None, advisor: Callable[[], CompleteController]) -> None:
    def controller() -> StepController:
        return StepController(perturbed_policy(new_policy(trust=1.0)), advisor(), seed=seed)

    first, half_way, second = controller(), controller(), controller()
    found = lives(lambda: first)
    half = len(found) // 2
    assert [half_way.decide(now) for now, _ in found[:half]] == [decision for _, decision in found[:half]]
    second.load_state_dict(half_way.state_dict())
    assert [second.decide(now) for now, _ in found[half:]] == [decision for _, decision in found[half:]]


def test_a_memory_of_another_width_is_refused() -> None:
    controller = StepController(new_policy(), Heuristic(CONFIG))
    controller.decide(drawn_state(np.random.default_rng(0)))
    with pytest.raises(ValueError, match=r"got \(1, 5\)"):
        controller.load_state_dict(controller.state_dict() | {"memory": torch.zeros(1, 5)})
