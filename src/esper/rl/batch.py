"""A rollout turned into what the update reads: advantages, targets and old log-probabilities, flattened and ready to be gathered.

Shapes: T = steps, N = environments, M = T·N, J = heads (1 for advantages under a joint ratio).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    entropy: Tensor  # [J] mean of each head where it mattered
    explained_variance: Tensor  # []
    value_spread: Tensor  # []
    return_spread: Tensor  # []

    def counts(self, fragments: Fragments | None) -> Counts:
        """How many steps of a minibatch (None: of the rollout) were real, and in how many each head mattered."""
        samples = (
            self.samples if fragments is None else self.samples.index_select(0, torch.from_numpy(fragments.rows).to(self.samples.device))
        )
        totals = samples.sum(0).split_with_sizes(self.widths)
        return Counts(valid=totals[3].squeeze(0), weight=totals[2])

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
def prepare(rollout: Rollout, policy: Policy, config: PPOConfig, reward_normalizer: RewardNormalizer | None) -> Batch:
    """Also takes the rollout into the normalisers: this is the one place where they change."""
    ended, valid = rollout.ended, rollout.valid
    rewards = rollout.rewards if reward_normalizer is None else reward_normalizer(rollout.rewards, ended, valid)
    advantages = gae(rewards, rollout.values, rollout.next_values, ended, gamma=config.gamma, lam=config.gae_lambda)
    returns = advantages + rollout.values
    targets, old_values = _in_critic_units(policy, returns, rollout.values, valid)

    flat_choice = Choice(*(part.flatten(0, 1) for part in rollout.choice))
    flat_masks = {head: mask.flatten(0, 1) for head, mask in rollout.masks.items()}
    old = policy.distribution.evaluate(rollout.parameters.flatten(0, 1), flat_choice, flat_masks)
    real = valid.flatten().to(advantages.dtype)  # [M]
    weight = policy.distribution.relevance(flat_choice).to(real.dtype) * real.unsqueeze(1)  # [M, J]
    counted = real.unsqueeze(1) if config.ratio == "joint" else weight
    flat_advantages = advantages.flatten()
    per_head = (
        normalize_advantages(flat_advantages, counted, real) if config.normalize_advantages else flat_advantages.unsqueeze(1) * counted
    )
    columns = [per_head, old.log_prob, weight, *(part.reshape(-1, 1) for part in (real, targets, old_values))]

    obs = {name: value.flatten(0, 1) for name, value in policy.normalize(rollout.obs).items()}
    if policy.normalizer is not None:
        policy.normalizer.update(rollout.obs, valid)
    states = rollout.states.flatten(0, 1)
    return Batch(
        obs=obs,
        masks=flat_masks,
        choice=flat_choice,
        states=torch.cat((states, torch.zeros_like(states[:1]))),
        samples=torch.cat(columns, dim=1),
        widths=[part.shape[1] for part in columns],
        starts=np.asarray(rollout.starts.cpu()),
        entropy=(old.entropy * weight).sum(0) / weight.sum(0).clamp_min(1),
        explained_variance=explained_variance(rollout.values, returns, valid),
        value_spread=rollout.values.std(correction=0),
        return_spread=returns.std(correction=0),
    )


def _in_critic_units(policy: Policy, returns: Tensor, values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    normalizer = policy.value_normalizer
    if normalizer is None:
        return returns, values
    normalizer.update(returns, valid, policy.last_critic_layer)
    return normalizer.normalize(returns), normalizer.normalize(values)
