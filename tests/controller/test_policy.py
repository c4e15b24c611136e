"""The policy over steps: its network, how it decides, and how it learns the steps of another controller."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esper.controller.clone import Life, Taken, agreement, fit, sizes_of
from esper.controller.config import StepNetworkConfig
from esper.controller.policy import Sizes, StepController, batch, make_policy, sizes_for
from esper.controller.tokens import observe
from esper.controller.turn import OPS, Turn, steps_of
from esper.growth.config import GrowthConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.rl.config import NetworkConfig
from esper.rl.policy import Policy
from tests.controller.hosts import drawn_state, state
from tests.controller.test_branches import germinated, lives

CONFIG = GrowthConfig()
MEMORY = NetworkConfig(core="lstm", hidden_size=16)


def policy_of(sizes: Sizes = Sizes(10, 12), *, seed: int = 0) -> Policy:  # noqa: B008  # a tuple of numbers
    return make_policy(StepNetworkConfig(width=16), MEMORY, sizes, generator=torch.Generator().manual_seed(seed)).eval()


def heuristic_life(epochs: int) -> Life:
    """The steps of the heuristic in the life of a small host."""
    found, looked_at = list[Taken](), None
    for now, decision in lives(lambda: Heuristic(CONFIG), epochs=epochs):
        turn = Turn(now, steps_of(decision, now), looked_at)
        while not turn.is_over:
            seen, step = observe(turn), turn.advised
            found.append(Taken(seen, seen.numbers_of(step)))
            turn = turn.after(step)
        looked_at = now.epoch if turn.looks else looked_at
    return found


def test_only_legal_steps_are_drawn() -> None:
    rng, policy, generator = np.random.default_rng(0), policy_of(Sizes(8, 20)), torch.Generator().manual_seed(0)
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
    small, large = policy_of(Sizes(8, 12)), policy_of(Sizes(9, 15), seed=1)
    large.load_state_dict(small.state_dict())
    seen = [observe(Turn(drawn_state(rng, slots=3))) for _ in range(20)]
    choice, found = None, []
    for policy in (small, large):
        obs, masks = batch(seen, sizes_for(policy))
        features, _ = policy.step(obs, policy.initial_state(len(seen)))
        parameters = policy.decide(features)
        choice = choice or policy.distribution.choose(parameters, masks, None)
        found.append(policy.distribution.evaluate(parameters, choice, masks).log_prob * policy.distribution.relevance(choice))
    torch.testing.assert_close(found[0], found[1])


def test_a_policy_is_small() -> None:
    policy = make_policy(StepNetworkConfig(), NetworkConfig(hidden_size=64), Sizes(4, 4), generator=torch.Generator())
    assert sum(weight.numel() for weight in policy.parameters()) < 300_000


def test_a_clone_takes_the_steps_of_the_heuristic_and_decides_as_it_does() -> None:
    taught = [heuristic_life(epochs) for epochs in (10, 12, 14)]
    policy = make_policy(StepNetworkConfig(width=16), MEMORY, sizes_of(taught), generator=torch.Generator().manual_seed(0))
    losses = fit(policy, taught, seed=0, passes=60, lives_at_once=3, learning_rate=1e-2)
    assert losses[-1] < 0.1 * losses[0]
    found = agreement(policy, taught)
    chosen = {op for op, count in found.chosen.items() if count}
    assert chosen >= {"wait", "look", "germinate"}
    assert all(found.recall[op] == found.precision[op] == 1 for op in chosen)
    assert found.target == found.blueprint == 1

    plain, cloned = lives(lambda: Heuristic(CONFIG)), lives(lambda: StepController(policy, CONFIG))
    assert [decision.actions for _, decision in cloned] == [decision.actions for _, decision in plain]
    assert [decision.probe for _, decision in cloned] == [decision.probe for _, decision in plain]


def test_a_controller_says_where_it_differs_and_grows_its_policy_to_larger_hosts() -> None:
    controller = StepController(policy_of(Sizes(1, 1)), CONFIG, seed=0)
    found = lives(lambda: controller)
    assert sizes_for(controller.policy).targets > 4
    assert any("instead of" in decision.reason for _, decision in found)
    assert any(germinated(decision) for _, decision in found)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_restored_controller_goes_on_as_the_first_one(seed: int | None) -> None:
    first, second = (StepController(policy_of(Sizes(12, 20)), CONFIG, seed=seed) for _ in range(2))
    found = lives(lambda: first)
    again = StepController(policy_of(Sizes(12, 20)), CONFIG, seed=seed)
    half = len(found) // 2
    assert [again.decide(now) for now, _ in found[:half]] == [decision for _, decision in found[:half]]
    second.load_state_dict(again.state_dict())
    assert [second.decide(now) for now, _ in found[half:]] == [decision for _, decision in found[half:]]


def test_an_empty_host_has_an_observation() -> None:
    obs, masks = batch([observe(Turn(state()))], Sizes(3, 3))
    assert masks["op"].tolist() == [[op == "wait" for op in OPS]]
    assert all(part.isfinite().all() for part in obs.values())
    features, _ = policy_of(Sizes(3, 3)).step(obs, torch.zeros(1, 32))
    assert features.isfinite().all()
