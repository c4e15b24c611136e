"""Half precision in the update, and overflows in float16."""

import math
from pathlib import Path

import pytest
import torch

from esper.gradients import GROWTH_INTERVAL, LARGEST, START, LossScales
from esper.rl.config import NetworkConfig, PPOConfig
from esper.rl.events import Skipped
from esper.rl.ppo import PPO
from esper.runs import CheckpointStore
from esper.vecenv import make
from tests.rl.counting import Counting, weights

CPU = torch.device("cpu")
YES, NO = torch.tensor(True), torch.tensor(False)


def config(**changes) -> PPOConfig:
    network = NetworkConfig(hidden_size=8, encoder_sizes=(6,))
    return PPOConfig(**{"num_steps": 16, "num_epochs": 4, "num_minibatches": 3, "precision": "float16", "network": network, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("core", ["lstm", "gru", "none"])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_learns_nearly_the_same(precision: str, core: str) -> None:
    moves = []
    for used in ("float32", precision):
        ppo = PPO(Counting(), config(precision=used, network=NetworkConfig(core=core, hidden_size=8, encoder_sizes=(6,))))
        if used == "float16":
            ppo.learner.loss_scale.scale.fill_(2.0**10)  # low enough not to overflow
        before = weights(ppo)
        outcome = ppo.update(ppo.collect())
        assert (outcome.steps_taken, outcome.skipped, outcome.overflows) == (12, 0, 0)
        moves.append(weights(ppo) - before)
    assert torch.nn.functional.cosine_similarity(*moves, dim=0) > 0.9
    assert not torch.equal(*moves)


def test_gradients_are_unscaled_before_they_are_measured_and_clipped() -> None:
    norms = []
    for scale in (1.0, 2.0**10):
        ppo = PPO(Counting(), config(num_epochs=1, num_minibatches=1))
        ppo.learner.loss_scale.scale.fill_(scale)
        norms.append(ppo.update(ppo.collect()).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


@pytest.mark.slow
def test_an_overflow_halves_the_scale_and_does_not_count_as_a_skipped_step() -> None:
    events = []
    ppo = PPO(Counting(), config(max_skips=1), on_event=events.append)
    ppo.learner.loss_scale.scale.fill_(2.0**40)  # far too high
    before = weights(ppo)
    updates = ppo.train(total_steps=10_000)
    update = next(updates)
    assert (update.gradient_steps, update.overflows, update.skipped) == (0, 12, 0)
    assert ppo.learner.loss_scale.scale.item() == 2.0**28
    assert [name for name, value in ppo.learner.optimizer.state[ppo.learner.weights[0]].items() if value.any()] == []
    last = ppo.policy.last_critic_layer  # moves with the units of its normaliser, whatever the optimiser does
    moved = weights(ppo) != before
    assert int(moved.sum()) <= last.weight.numel() + last.bias.numel()
    reached = [next(updates) for _ in range(3)][-1]
    assert reached.gradient_steps == 12
    assert not any(isinstance(event, Skipped) for event in events)


def test_a_loss_that_is_not_finite_skips_the_step_and_keeps_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.rl.batch.gae", lambda rewards, *rest, **settings: torch.full_like(rewards, math.nan))
    ppo = PPO(Counting(), config(normalize_rewards=False, normalize_values=False))
    outcome = ppo.update(ppo.collect())
    assert (outcome.skipped, outcome.skipped_in_a_row, outcome.overflows) == (12, 12, 0)
    assert ppo.learner.loss_scale.scale.item() == START


@pytest.mark.slow
def test_the_scale_grows_with_patience_and_within_bounds() -> None:
    scale = LossScales.fresh(None, CPU)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update_(YES, NO)
    assert scale.scale.item() == START
    scale.update_(NO, NO)  # not taken for another reason
    assert scale.scale.item() == START
    scale.update_(YES, NO)
    assert scale.scale.item() == 2 * START
    scale.update_(NO, YES)
    assert scale.scale.item() == START
    scale.scale.fill_(LARGEST)
    scale.good_steps.fill_(GROWTH_INTERVAL)
    scale.update_(YES, NO)
    assert scale.scale.item() == LARGEST


def test_an_overflow_at_a_scale_of_one_counts_as_a_skipped_step() -> None:
    """Otherwise a gradient that never will be finite would be waited for without end."""
    scale = LossScales.fresh(None, CPU)
    loss, norm = torch.tensor(1.0), torch.tensor(math.inf)
    steps = 0
    while scale.overflowed(loss, norm):
        scale.update_(NO, YES)
        steps += 1
    assert steps == 16
    assert scale.scale.item() == 1.0


@pytest.mark.slow
def test_resuming_goes_on_with_the_scale_bit_for_bit(tmp_path: Path) -> None:
    def trained(ppo: PPO, updates: int) -> PPO:
        for _ in range(updates):
            ppo.update(ppo.collect())
        return ppo

    def fresh() -> PPO:
        ppo = PPO(make("cue", 4, delay=3), config())
        ppo.learner.loss_scale.scale.fill_(2.0**40)  # overflows for more than one update
        return ppo

    whole, first, second = trained(fresh(), 4), trained(fresh(), 1), PPO(make("cue", 4, delay=3), config())
    store = CheckpointStore(tmp_path, kind="ppo")
    store.save(first.step, first.state_dict())
    second.load_state_dict(store.load().state)
    trained(second, 3)
    assert torch.equal(weights(whole), weights(second))
    for name, value in whole.learner.loss_scale.state_dict().items():
        assert torch.equal(value, second.learner.loss_scale.state_dict()[name]), name
    assert whole.learner.loss_scale.good_steps > 0


def test_gradient_norms_are_reported_as_they_were_before_clipping() -> None:
    ppo = PPO(Counting(), config(precision="float32", num_epochs=1, num_minibatches=1, max_grad_norm=1e-3))
    outcome = ppo.update(ppo.collect())
    layers = [norm for name, norm in outcome.gradient_norms.items() if not name.startswith("head ")]
    assert outcome.grad_norm > 0.01
    assert math.hypot(*layers) == pytest.approx(outcome.grad_norm, rel=1e-4)
