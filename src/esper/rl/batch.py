"""How a rollout is cut into minibatches of packed fragments.

A rollout [T, N] is cut into units: `length` consecutive steps of one environment. Units are shuffled and dealt to minibatches. Within its
unit, an environment's steps are cut again wherever an episode starts; the pieces are the fragments that a recurrent core sees, sorted by
length and packed time-major (see `esper.rl.recurrent`). Steps that were not real teach nothing, and each is a piece of its own, because
the step after it starts an episode: such pieces are left out.

This runs on the host with NumPy: it is integer bookkeeping, and the sizes must be known there anyway.

Shapes: T = steps, N = environments, U = units of a minibatch, L = steps in a unit, F = fragments, M = packed steps, at most U·L.

One rollout: what was seen, chosen and paid, in tensors allocated once.

Shapes: T = steps, N = environments, L = steps that gradients flow through, S = state width, H = core width, P = distribution parameters,
D = discrete heads, C = continuous numbers.

A rollout turned into what the update reads: advantages, targets and old log-probabilities, flattened and ready to be gathered.

Shapes: T = steps, N = environments, M = T·N, J = heads (1 for advantages under a joint ratio).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.parallel import ALONE, Group
from esper.rl.config import PPOConfig
from esper.rl.distributions import Choice
from esper.rl.gae import gae
from esper.rl.loss import Counts, Samples, normalize_advantages
from esper.rl.normalize import RewardNormalizer
from esper.rl.policy import Policy
from esper.statistics import explained_variance
from esper.vecenv import Masks, Obs

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


class Fragments(NamedTuple):
    """One minibatch."""

    rows: Integers  # [M] into the rollout flattened to [T·N], in packed order
    sizes: list[int]  # fragments that have a step 0, 1, 2, …
    states: Integers  # [F] into the stored states flattened to [T/L·N]; one past the end for a fragment that starts an episode


def minibatches(
    starts: Booleans, *, length: int, parts: int, rng: np.random.Generator, valid: Booleans | None = None
) -> Iterator[Fragments]:
    """One pass over a rollout in random order. `starts` [T, N] is true where a step is the first of an episode, `valid` where it was real
    (None: everywhere)."""
    num_steps, num_envs = starts.shape
    units = rng.permutation(num_steps // length * num_envs)
    for part in np.array_split(units, parts):
        yield pack(starts, part, length=length, valid=valid)


def pack(starts: Booleans, units: Integers, *, length: int, valid: Booleans | None = None) -> Fragments:
    """The fragments of some units; unit `u` is chunk `u // N` of environment `u % N`."""
    num_steps, num_envs = starts.shape
    chunk, env = np.divmod(units, num_envs)
    rows = (chunk * length)[:, None] * num_envs + env[:, None] + np.arange(length) * num_envs  # [U, L] into [T·N]
    if length == 1:
        kept = _real(valid, rows[:, 0])
        rows, units = rows[kept], units[kept]
        return Fragments(rows[:, 0], [len(units)], np.where(starts.ravel()[rows[:, 0]], num_steps * num_envs, units))

    is_start = starts.ravel()[rows]  # [U, L]
    is_cut = is_start.copy()
    is_cut[:, 0] = True
    first = np.flatnonzero(is_cut)  # [F] positions in [U·L]
    lengths = np.diff(first, append=len(units) * length)
    kept = _real(valid, rows.ravel()[first])
    first, lengths = first[kept], lengths[kept]
    order = np.argsort(-lengths, kind="stable")
    first, lengths = first[order], lengths[order]

    sizes = np.searchsorted(-lengths, -np.arange(lengths[0]), side="left")  # how many fragments are longer than t
    steps = np.arange(lengths[0])[:, None]
    packed = (first + steps)[steps < lengths]  # row-major over time: packed order
    zero_state = num_steps // length * num_envs
    states = np.where(is_start.ravel()[first], zero_state, units[first // length])
    return Fragments(rows.ravel()[packed], sizes.tolist(), states)


def _real(valid: Booleans | None, rows: Integers) -> Integers:
    """Which of some steps were real, as indices; the first one where none was, because a minibatch cannot be empty."""
    if valid is None:
        return np.arange(len(rows))
    kept = np.flatnonzero(valid.ravel()[rows])
    return kept if len(kept) else np.zeros(1, dtype=np.int64)


def split(fragments: Fragments, parts: int) -> list[Fragments]:
    """Pieces of a minibatch for gradient accumulation. Fragments are dealt out in turn, so that every piece has its share of long ones."""
    if parts == 1:
        return [fragments]
    offsets = np.concatenate(([0], np.cumsum(fragments.sizes)))
    pieces = []
    for part in range(min(parts, len(fragments.states))):
        steps = [np.arange(start + part, stop, parts) for start, stop in itertools.pairwise(offsets)]
        steps = [step for step in steps if len(step)]
        pieces.append(Fragments(fragments.rows[np.concatenate(steps)], [len(step) for step in steps], fragments.states[part::parts]))
    return pieces


@dataclass
class Rollout:
    """Filled step by step by the collector, read by the learner. All but `states` is [T, N, ...]."""

    obs: Obs  # as the environment gave them
    masks: Masks  # of the heads that were ever masked
    choice: Choice
    parameters: Tensor  # [T, N, P] of the distribution that was acted from
    features: Tensor  # [T, N, H] what the heads saw
    states: Tensor  # [T/L, N, S] at the first step of each unit
    starts: Tensor  # bool: this step is the first of an episode
    rewards: Tensor  # 0 where they were not finite
    bad_rewards: Tensor  # bool: the reward was not finite, so the step teaches nothing and no advantage goes past it
    terminated: Tensor
    truncated: Tensor
    valid: Tensor  # bool: the step was real
    values: Tensor  # in units of the reward
    next_values: Tensor  # value of what followed the step; 0 where the episode terminated

    @classmethod
    def allocate(cls, policy: Policy, *, num_steps: int, num_envs: int, length: int) -> Rollout:
        device = policy.device
        shape = (num_steps, num_envs)

        def zeros(*tail: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, *tail, dtype=dtype, device=device)

        distribution = policy.distribution
        index = zeros(len(distribution.spec.discrete), dtype=torch.int64)
        return cls(
            obs={name: zeros(*part.shape, dtype=part.torch_dtype) for name, part in policy.observation_spec.items()},
            masks={},
            choice=Choice(index, zeros(distribution.num_continuous)),
            parameters=zeros(distribution.num_parameters),
            features=zeros(policy.core.output_size),
            states=torch.zeros(num_steps // length, num_envs, policy.core.state_size, device=device),
            starts=zeros(dtype=torch.bool),
            rewards=zeros(),
            bad_rewards=zeros(dtype=torch.bool),
            terminated=zeros(dtype=torch.bool),
            truncated=zeros(dtype=torch.bool),
            valid=torch.ones(shape, dtype=torch.bool, device=device),
            values=zeros(),
            next_values=zeros(),
        )

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


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
