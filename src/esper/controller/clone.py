"""Cloning: a policy learns to take the steps of another controller, from its lives.

    fit(policy, lives, seed=0)          # lives: lists of what was seen, and the step that was taken
    agreement(policy, held_out)         # recall and precision of every operation, and how often target and blueprint are the same

Steps are learned with the memory that a life has led to: all steps of a life are one sequence.

Shapes: M = packed steps of several lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.controller.policy import Sizes, batch, sizes_for
from esper.controller.tokens import Observation
from esper.controller.turn import OPS
from esper.rl.distributions import Choice
from esper.rl.policy import Policy
from esper.rng import Streams
from esper.vecenv import Masks


class Taken(NamedTuple):
    """A step in a life: what was seen, and the numbers of operation, target and blueprint."""

    seen: Observation
    numbers: tuple[int, int, int]


Life = Sequence[Taken]


def sizes_of(lives: Sequence[Life]) -> Sizes:
    """Return the largest numbers of targets and options in some lives."""
    shapes = [step.seen.which.shape for life in lives for step in life]
    return Sizes(max(shape[0] for shape in shapes), max(shape[1] for shape in shapes))


def fit(
    policy: Policy, lives: Sequence[Life], *, seed: int, passes: int = 12, lives_at_once: int = 24, learning_rate: float = 2e-3
) -> list[float]:
    """Fit a policy to the steps of some lives. Return the mean negative log-likelihood of a step in every pass."""
    rng, losses = Streams(seed).numpy("lives"), list[float]()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.01)
    batches = -(-len(lives) // lives_at_once)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=passes * batches)
    policy.train()
    for _ in range(passes):
        order, total, steps = rng.permutation(len(lives)), 0.0, 0
        for start in range(0, len(lives), lives_at_once):
            some = [lives[index] for index in order[start : start + lives_at_once]]
            parameters, masks, choice = _run(policy, some)
            log_prob = policy.distribution.evaluate(parameters, choice, masks).log_prob * policy.distribution.relevance(choice)
            loss = -log_prob.sum(1).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total, steps = total + float(loss.detach()) * len(choice.picked), steps + len(choice.picked)
        losses.append(total / steps)
    policy.eval()
    return losses


def _run(policy: Policy, lives: Sequence[Life]) -> tuple[Tensor, Masks, Choice]:
    """Return the logits [M, ...] of a policy at all steps of some lives, with masks and choices. All first steps come first."""
    longest_first = sorted(lives, key=len, reverse=True)
    sizes = [sum(len(life) > step for life in longest_first) for step in range(len(longest_first[0]))]
    packed = [life[step] for step, count in enumerate(sizes) for life in longest_first[:count]]
    obs, masks = batch([taken.seen for taken in packed], sizes_for(policy))
    features = policy.encode(obs)
    output = policy.core.sequence(features, policy.initial_state(len(lives)), sizes)
    picked = torch.tensor([taken.numbers for taken in packed])
    return policy.decide(output), masks, Choice(picked, torch.empty(len(picked), 0))


class Agreement(NamedTuple):
    """How far a policy takes the steps of another controller, for every step given those before."""

    recall: dict[str, float]  # of every operation
    precision: dict[str, float]
    chosen: dict[str, int]  # how often the other controller chose it
    target: float  # share of the same targets, where both let something germinate
    blueprint: float  # share of the same targets and blueprints there


@torch.no_grad()
def agreement(policy: Policy, lives: Sequence[Life], *, lives_at_once: int = 24) -> Agreement:
    """Compare the likeliest steps of a policy with those that were taken."""
    chosen, taken = list[np.ndarray[tuple[int, int], np.dtype[np.int64]]](), list[np.ndarray[tuple[int, int], np.dtype[np.int64]]]()
    for start in range(0, len(lives), lives_at_once):
        parameters, masks, choice = _run(policy, lives[start : start + lives_at_once])
        chosen.append(policy.distribution.choose(parameters, masks, None).picked.numpy())
        taken.append(choice.picked.numpy())
    ours, theirs = np.concatenate(chosen), np.concatenate(taken)
    both = (ours[:, 0] == theirs[:, 0]) & (theirs[:, 0] == OPS.index("germinate"))
    same_target = ours[both, 1] == theirs[both, 1]
    same = same_target & (ours[both, 2] == theirs[both, 2])
    hits, said, count = (
        {str(op): int((which == number).sum()) for number, op in enumerate(OPS)}
        for which in (np.where(ours[:, 0] == theirs[:, 0], ours[:, 0], -1), ours[:, 0], theirs[:, 0])
    )
    return Agreement(
        {op: hits[op] / max(count[op], 1) for op in hits},
        {op: hits[op] / max(said[op], 1) for op in hits},
        count,
        float(same_target.mean()) if both.any() else float("nan"),
        float(same.mean()) if both.any() else float("nan"),
    )
