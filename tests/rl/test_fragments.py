"""Cutting rollouts: every valid step is in exactly one minibatch, and invalid steps are in none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esper.rl import PPO
from esper.rl.batch import minibatches, pack, place, prepare, split
from tests.rl.counting import Counting
from tests.rl.test_learning import config

STEPS, ENVS = 12, 5


def starts_and_valid(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Episodes that end at random, and steps after some of them that are not real; the step after one of those starts an episode."""
    rng = np.random.default_rng(seed)
    valid = rng.random((STEPS, ENVS)) > 0.3
    starts = rng.random((STEPS, ENVS)) < 0.2
    starts[1:] |= ~valid[:-1]
    starts |= ~valid
    return starts, valid


@pytest.mark.parametrize("length", [1, 4, 12])
@pytest.mark.parametrize("seed", range(3))
def test_every_valid_step_is_in_exactly_one_minibatch(length, seed):
    starts, valid = starts_and_valid(seed)
    dealt = list(minibatches(starts, length=length, parts=3, rng=np.random.default_rng(0), valid=valid))
    rows = np.concatenate([fragments.rows for fragments in dealt])
    assert sorted(rows) == list(np.flatnonzero(valid))
    for fragments in dealt:
        assert sum(fragments.sizes) == len(fragments.rows)
        assert len(fragments.states) == fragments.sizes[0]


@pytest.mark.parametrize("length", [1, 4])
def test_a_minibatch_without_a_valid_step_is_not_empty(length):
    nothing = np.zeros((4, 2), dtype=bool)
    fragments = pack(~nothing, np.arange(2), length=length, valid=nothing)
    assert fragments.sizes == [1]
    assert len(fragments.rows) == len(fragments.states) == 1


def test_leaving_out_invalid_steps_does_not_change_the_gradient():
    ppo = PPO(Counting(num_envs=6, length=5), config())
    rollout = ppo.collect()
    ghost = rollout.starts & (torch.arange(16)[:, None] > 0)
    rollout.valid[ghost] = False
    rollout.starts[1:] |= ghost[:-1]
    batch = prepare(rollout, ppo.policy, ppo.config, None)
    assert batch.valid is not None
    gradients = []
    for valid in (None, batch.valid):
        fragments = pack(batch.starts, np.arange(6), length=16, valid=valid)
        placed = place([[fragments]], ppo.device)
        ppo.learner._backward(batch, placed[0], batch.counts(placed)[0], ppo.learner._coefficients(batch, 0.0))
        gradients.append(ppo.learner.gradient.clone())
    assert gradients[0].abs().max() > 0
    assert torch.allclose(*gradients, atol=1e-7)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))])
def test_placed_pieces_are_those_of_the_minibatches(device: str) -> None:
    starts = np.random.default_rng(1).random((8, 5)) < 0.2
    dealt = [split(part, 2) for part in minibatches(starts, length=4, parts=3, rng=np.random.default_rng(0))]
    placed = place(dealt, torch.device(device))
    assert [len(pieces) for pieces in placed] == [len(pieces) for pieces in dealt] == [2, 2, 2]
    for pieces, expected in zip(placed, dealt, strict=True):
        for piece, fragments in zip(pieces, expected, strict=True):
            assert piece.rows.device.type == piece.states.device.type == device
            assert (piece.rows.tolist(), piece.sizes, piece.states.tolist()) == (
                fragments.rows.tolist(), fragments.sizes, fragments.states.tolist()
            )  # fmt: skip
