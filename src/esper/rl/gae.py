"""Generalised advantage estimation, and discounted sums of rewards.

Shapes: T = steps in the rollout, N = parallel environments.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, next_values: Tensor, ended: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Return the advantages [T, N] of one rollout.

    `next_values` are the values of the states after each step: 0 only where an episode terminated, that of the final observation where it
    was truncated. `ended` cuts the recursion in both cases.
    """
    delta = rewards + gamma * next_values - values
    return backward_sum(delta, gamma * lam * (~ended).to(values.dtype))


def discounted_sums(rewards: Tensor, ended: Tensor, start: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted sums [T, N] of each episode's rewards up to each step. `start` [N] are the sums before the first step."""
    carry = torch.cat((torch.ones_like(ended[:1]), ~ended[:-1])).to(rewards.dtype) * gamma
    first = rewards[:1] + carry[:1] * start
    return backward_sum(torch.cat((first, rewards[1:])).flip(0), carry.flip(0)).flip(0)


def backward_sum(terms: Tensor, carry: Tensor) -> Tensor:
    """Return x with x[t] = terms[t] + carry[t] · x[t + 1], in log2(T) passes over whole tensors instead of T steps.

    Each pass doubles the number of steps that a sum covers: after a pass, x[t] covers `reach` steps, and carry[t] is the product of their
    weights.
    """
    total, reach = terms.clone(), 1
    while reach < len(terms):
        total[:-reach] += carry[:-reach] * total[reach:].clone()
        carry = torch.cat((carry[:-reach] * carry[reach:], torch.zeros_like(carry[-reach:])))
        reach *= 2
    return total
