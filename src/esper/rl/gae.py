"""Advantages and returns of one rollout.

Shapes: T = steps in the rollout, N = parallel environments.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, next_values: Tensor, ended: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates [T, N].

    `next_values` is the value of what followed each step: 0 only where an episode truly terminated, that of the final observation
    where it was cut. `ended` cuts the recursion in both cases.
    """
    surprise = rewards + gamma * next_values - values
    return backward_sum(surprise, gamma * lam * (~ended).to(values.dtype))


def discounted_sums(rewards: Tensor, ended: Tensor, start: Tensor, *, gamma: float) -> Tensor:
    """Forward discounted sums [T, N] of each episode so far, going on from `start` [N]."""
    carry = torch.cat((torch.ones_like(ended[:1]), ~ended[:-1])).to(rewards.dtype) * gamma
    first = rewards[:1] + carry[:1] * start
    return backward_sum(torch.cat((first, rewards[1:])).flip(0), carry.flip(0)).flip(0)


def backward_sum(terms: Tensor, carry: Tensor) -> Tensor:
    """x[t] = terms[t] + carry[t] · x[t + 1], in log2(T) passes over whole tensors instead of T steps.

    Each pass doubles the stretch that a sum covers: x covers `reach` steps, `carry` what is left of the weight after them.
    """
    total, reach = terms.clone(), 1
    while reach < len(terms):
        total[:-reach] += carry[:-reach] * total[reach:].clone()
        carry = torch.cat((carry[:-reach] * carry[reach:], torch.zeros_like(carry[-reach:])))
        reach *= 2
    return total
