"""A rollout turned into what the update reads: advantages, targets and old log-probabilities, flattened and ready to be gathered.

Shapes: T = steps, N = environments, M = T·N, J = heads (1 for advantages under a joint ratio).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.parallel import ALONE, Group
from esper.rl.config import PPOConfig
from esper.rl.distributions import Choice
from esper.rl.fragments import Booleans, Fragments
from esper.rl.gae import gae
from esper.rl.loss import Counts, Samples, normalize_advantages
from esper.rl.normalize import RewardNormalizer
from esper.rl.policy import Policy
from esper.rl.rollout import Rollout
from esper.statistics import explained_variance
from esper.vecenv import Masks, Obs


@dataclass
class Minibatch:
    """Some steps of the rollout in packed order."""

    obs: Obs
    masks: Masks
    choice: Choice
    states: Tensor  # [F, S]
    sizes: list[int]
    samples: Samples


@dataclass
class Batch:
    """A whole rollout, flattened to [M, ...]."""

    obs: Obs  # normalised as they were acted on
    masks: Masks
    choice: Choice
    states: Tensor  # [units + 1, S]; the last row is the zero state of an episode's start
    samples: Tensor  # the columns of `Samples` side by side, so that one gather fetches them
    widths: list[int]  # of those columns
    starts: Booleans  # [T, N] on the host
    valid: Booleans | None  # [T, N] on the host; None where all steps were real
    mattered: Tensor  # [J] bool: in some step of some rank
    entropy: Tensor  # [J] mean of each head where it mattered; this and what follows are of all ranks
    explained_variance: Tensor  # []
    value_spread: Tensor  # []
    return_spread: Tensor  # []

    def counts(self, minibatches: Sequence[Fragments], group: Group = ALONE) -> list[Counts]:
        """How many steps of each minibatch were real, and in how many each head mattered, on all ranks together."""
        counted = self.samples[:, sum(self.widths[:2]) : sum(self.widths[:4])]  # weight, valid
        rows = [torch.from_numpy(fragments.rows).to(counted.device) for fragments in minibatches]
        totals = group.sum_(torch.stack([counted.index_select(0, some).sum(0) for some in rows]))  # [minibatches, J + 1]
        return [Counts(valid=total[-1], weight=total[:-1]) for total in totals]

    def gather(self, fragments: Fragments) -> Minibatch:
        device = self.samples.device
        rows, states = torch.from_numpy(fragments.rows).to(device), torch.from_numpy(fragments.states).to(device)
        samples = self.samples.index_select(0, rows).split_with_sizes(self.widths, dim=1)
        squeezed = (part.squeeze(1) if index >= 3 else part for index, part in enumerate(samples))
        return Minibatch(
            obs={name: value.index_select(0, rows) for name, value in self.obs.items()},
            masks={head: mask.index_select(0, rows) for head, mask in self.masks.items()},
            choice=Choice(*(part.index_select(0, rows) for part in self.choice)),
            states=self.states.index_select(0, states),
            sizes=fragments.sizes,
            samples=Samples(*squeezed),
        )


@torch.no_grad()
def prepare(rollout: Rollout, policy: Policy, config: PPOConfig, reward_normalizer: RewardNormalizer | None, group: Group = ALONE) -> Batch:
    """Also takes the rollouts of all ranks into the normalisers: this is the one place where they change."""
    ended, valid = rollout.ended, rollout.valid & ~rollout.bad_rewards
    broken = ended | rollout.bad_rewards  # a sum of rewards starts anew behind a step without one
    rewards = rollout.rewards if reward_normalizer is None else reward_normalizer(rollout.rewards, broken, valid, group)
    cut = ended.clone()
    cut[:-1] |= rollout.bad_rewards[1:]  # the step before learns from the value that follows it, and from no reward behind that
    advantages = gae(rewards, rollout.values, rollout.next_values, cut, gamma=config.gamma, lam=config.gae_lambda)
    returns = advantages + rollout.values
    targets, old_values = _in_critic_units(policy, returns, rollout.values, valid, group)

    flat_choice = Choice(*(part.flatten(0, 1) for part in rollout.choice))
    flat_masks = {head: mask.flatten(0, 1) for head, mask in rollout.masks.items()}
    old = policy.distribution.evaluate(rollout.parameters.flatten(0, 1), flat_choice, flat_masks)
    real = valid.flatten().to(advantages.dtype)  # [M]
    weight = policy.distribution.relevance(flat_choice).to(real.dtype) * real.unsqueeze(1)  # [M, J]
    counted = real.unsqueeze(1) if config.ratio == "joint" else weight
    flat_advantages = advantages.flatten()
    per_head = (
        normalize_advantages(flat_advantages, counted, real, group)
        if config.normalize_advantages
        else flat_advantages.unsqueeze(1) * counted
    )
    columns = [per_head, old.log_prob, weight, *(part.reshape(-1, 1) for part in (real, targets, old_values))]

    obs = {name: value.flatten(0, 1) for name, value in policy.normalize(rollout.obs).items()}
    if policy.normalizer is not None:
        policy.normalizer.update(rollout.obs, rollout.valid, group)
    states = rollout.states.flatten(0, 1)
    # A step without a reward stays in its sequence: the memory goes on through it.
    starts, was_real = np.asarray(torch.stack((rollout.starts, rollout.valid)).cpu())
    entropy, head_counts = group.sum_(torch.stack(((old.entropy * weight).sum(0), weight.sum(0)))).unbind(0)  # [J] each
    all_values, all_returns, all_valid = _of_all_ranks(group, rollout.values, returns, valid)
    return Batch(
        obs=obs,
        masks=flat_masks,
        choice=flat_choice,
        states=torch.cat((states, torch.zeros_like(states[:1]))),
        samples=torch.cat(columns, dim=1),
        widths=[part.shape[1] for part in columns],
        starts=starts,
        valid=None if was_real.all() else was_real,
        mattered=head_counts > 0,
        entropy=entropy / head_counts.clamp_min(1),
        explained_variance=explained_variance(all_values, all_returns, all_valid),
        value_spread=all_values.std(correction=0),
        return_spread=all_returns.std(correction=0),
    )


def _of_all_ranks(group: Group, values: Tensor, returns: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What they are on each rank [T, N], side by side [T, ranks·N]."""
    by_rank = group.gather((values, returns, valid.to(values.dtype)))
    all_values, all_returns, all_valid = (torch.cat(parts, dim=1) for parts in zip(*by_rank, strict=True))
    return all_values, all_returns, all_valid.bool()


def _in_critic_units(policy: Policy, returns: Tensor, values: Tensor, valid: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    normalizer = policy.value_normalizer
    if normalizer is None:
        return returns, values
    normalizer.update(returns, valid, policy.last_critic_layer, group)
    return normalizer.normalize(returns), normalizer.normalize(values)
