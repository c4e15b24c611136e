"""From a rollout to minibatches.

1. `Rollout`: the tensors of T steps in N environments, allocated once and filled by the collector.
2. `prepare` turns it into a `Batch`: advantages, targets and old log-probabilities, flattened to [T·N].
3. `minibatches` divides the steps into `Fragments`, `place` moves them to the device, and `Batch.gather` collects their tensors into a
   `Minibatch`.

A rollout [T, N] is cut into units of `length` consecutive steps of one environment. Units are shuffled and dealt to minibatches. Within a
unit, the steps are cut again wherever an episode starts. A recurrent core sees the resulting fragments, sorted by length and packed
time-major (see `esper.rl.recurrent`). A step that was not real (see `Timestep.valid`) teaches nothing and is left out. It is always a
fragment of its own: it starts an episode, and so does the step after it. All of this is integer bookkeeping in NumPy, because the core
needs the sizes on the host.

Shapes: T = steps, N = environments, U = units of a minibatch, L = steps in a unit, F = fragments, M = flattened steps: T·N in a batch,
packed steps (at most U·L) in a minibatch, S = state width, H = core output width, P = distribution parameters, D = discrete heads,
C = continuous numbers, J = heads (1 for advantages under a joint ratio).
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

from esper.devices import upload
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
BINS = 8  # of the critic's calibration
LOOKS = 4  # steps of a rollout after which the size of the memory is noted
MOST_SEEN, LEAST_SEEN = 2048, 64  # about as many steps of a rollout give the statistics of the inputs; fewer where a step has many numbers
MOST_NUMBERS = 2**18  # in these steps, as far as LEAST_SEEN allows


@dataclass
class Rollout:
    """The steps of one rollout. The collector fills it, the learner reads it. All tensors but `states` and
    `hidden_squares` are [T, N, ...]."""

    obs: Obs  # raw, as the environment returned them
    masks: Masks  # of the heads that were ever masked
    choice: Choice
    parameters: Tensor  # [T, N, P] of the distribution that the actions were drawn from
    features: Tensor  # [T, N, H] input of actor and critic
    states: Tensor  # [T/L, N, S] of the core before the first step of each unit
    starts: Tensor  # bool: the step is the first of an episode
    rewards: Tensor  # 0 where the reward was not finite
    bad_rewards: Tensor  # bool: the reward was not finite, so the step teaches nothing and no advantage passes it
    terminated: Tensor
    truncated: Tensor
    valid: Tensor  # bool: the step was real
    acts: Tensor  # bool: the action had an effect; otherwise the step teaches values only
    values: Tensor  # in units of the reward
    next_values: Tensor  # value of the state after the step; 0 where the episode terminated
    hidden_squares: Tensor  # [LOOKS, N] mean square of the memory after some of the steps; nan without a memory

    @classmethod
    def allocate(cls, policy: Policy, *, num_steps: int, num_envs: int, length: int) -> Rollout:
        """Return a rollout of zeros on the device of the policy."""
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
            acts=torch.ones(shape, dtype=torch.bool, device=device),
            values=zeros(),
            next_values=zeros(),
            hidden_squares=torch.zeros(LOOKS, num_envs, device=device),
        )

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


@dataclass
class Batch:
    """A whole rollout, flattened to [M, ...]."""

    obs: Obs  # normalised as when they were acted on
    masks: Masks
    choice: Choice
    states: Tensor  # [units + 1, S]; the last row is zero, the state at the start of an episode
    samples: Tensor  # the columns of `Samples` side by side, so that one gather fetches them all
    widths: list[int]  # number of columns of each field of `Samples`
    starts: Booleans  # [T, N] on the host
    valid: Booleans | None  # [T, N] on the host; None where all steps were real
    # The following are over all ranks.
    mattered: Tensor  # [J] bool: the head mattered in some step
    entropy: Tensor  # [J] mean of each head where it mattered
    explained_variance: Tensor  # []
    value_spread: Tensor  # []
    return_spread: Tensor  # []
    # Those of this rank, for diagnostics.
    calibration: Tensor  # [BINS, 4], see `calibration`
    hidden_state: Tensor  # [] root mean square of the memory after the step where it is largest; nan without a memory
    inputs: dict[str, tuple[Tensor, Tensor]]  # name of a floating-point observation, normalised if all are -> size and spread, [] each

    def counts(self, minibatches: Sequence[Sequence[Indices]], group: Group = ALONE) -> list[Counts]:
        """Return for each minibatch, given in pieces, the number of real steps, and of those where each head mattered, over all ranks."""
        counted = self.samples[:, sum(self.widths[:2]) : sum(self.widths[:4])]  # weight, valid
        rows = [torch.cat([piece.rows for piece in pieces]) if len(pieces) > 1 else pieces[0].rows for pieces in minibatches]
        totals = group.sum_(torch.stack([counted.index_select(0, some).sum(0) for some in rows]))  # [minibatches, J + 1]
        return [Counts(valid=total[-1], weight=total[:-1]) for total in totals]

    def gather(self, indices: Indices) -> Minibatch:
        """Return the tensors of a minibatch or of a piece of one."""
        rows, sizes, states = indices
        samples = self.samples.index_select(0, rows).split_with_sizes(self.widths, dim=1)
        squeezed = (part.squeeze(1) if index >= 3 else part for index, part in enumerate(samples))  # from `valid` on, fields are [M]
        return Minibatch(
            obs={name: value.index_select(0, rows) for name, value in self.obs.items()},
            masks={head: mask.index_select(0, rows) for head, mask in self.masks.items()},
            choice=Choice(*(part.index_select(0, rows) for part in self.choice)),
            states=self.states.index_select(0, states),
            sizes=sizes,
            samples=Samples(*squeezed),
        )


@torch.no_grad()
def prepare(rollout: Rollout, policy: Policy, config: PPOConfig, reward_normalizer: RewardNormalizer | None, group: Group = ALONE) -> Batch:
    """Return the batch of a rollout. Also update all normalisers, which change nowhere else, with the rollouts of all ranks."""
    ended, valid = rollout.ended, rollout.valid & ~rollout.bad_rewards
    broken = ended | rollout.bad_rewards  # the discounted sum of rewards starts again after a step without a reward
    rewards = rollout.rewards if reward_normalizer is None else reward_normalizer(rollout.rewards, broken, valid, group)
    # The step before one without a reward bootstraps from the value that follows it and uses no later reward.
    cut = ended.clone()
    cut[:-1] |= rollout.bad_rewards[1:]
    advantages = gae(rewards, rollout.values, rollout.next_values, cut, gamma=config.gamma, lam=config.gae_lambda)
    returns = advantages + rollout.values
    targets, old_values = _in_critic_units(policy, returns, rollout.values, valid, group)

    # Log-probabilities under the policy that acted, and advantages per head, counted only where the head mattered.
    flat_choice = Choice(*(part.flatten(0, 1) for part in rollout.choice))
    flat_masks = {head: mask.flatten(0, 1) for head, mask in rollout.masks.items()}
    old = policy.distribution.evaluate(rollout.parameters.flatten(0, 1), flat_choice, flat_masks)
    real = valid.flatten().to(advantages.dtype)  # [M]
    acted = (valid & rollout.acts).flatten().to(advantages.dtype)  # [M]
    weight = policy.distribution.relevance(flat_choice).to(real.dtype) * acted.unsqueeze(1)  # [M, J]
    counted = acted.unsqueeze(1) if config.ratio == "joint" else weight
    flat_advantages = advantages.flatten()
    per_head = (
        normalize_advantages(flat_advantages, counted, acted, group)
        if config.normalize_advantages
        else flat_advantages.unsqueeze(1) * counted
    )
    # The fields of `Samples`, in its order, as columns.
    columns = [per_head, old.log_prob, weight, *(part.reshape(-1, 1) for part in (real, targets, old_values))]

    # Normalise the observations as when they were acted on; only then update the normaliser.
    obs = {name: value.flatten(0, 1) for name, value in policy.normalize(rollout.obs).items()}
    if policy.normalizer is not None:
        policy.normalizer.update(rollout.obs, rollout.valid, group)
    states = rollout.states.flatten(0, 1)
    # A step without a reward stays in its fragment, because the memory went through it.
    starts, was_real = np.asarray(torch.stack((rollout.starts, rollout.valid)).cpu())
    entropy, head_counts = group.sum_(torch.stack(((old.entropy * weight).sum(0), weight.sum(0)))).unbind(0)  # [J] each
    # Put the values, returns and flags of all ranks side by side, [T, ranks·N] each.
    by_rank = group.gather((rollout.values, returns, valid.to(rollout.values.dtype)))
    all_values, all_returns, all_valid = (torch.cat(parts, dim=1) for parts in zip(*by_rank, strict=True))
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
        explained_variance=explained_variance(all_values, all_returns, all_valid.bool()),
        value_spread=all_values.std(correction=0),
        return_spread=all_returns.std(correction=0),
        calibration=calibration(rollout, rewards, gamma=config.gamma),
        hidden_state=rollout.hidden_squares.mean(1).amax().sqrt(),
        inputs={name: _size_and_spread(value) for name, value in obs.items() if value.is_floating_point()},
    )


def calibration(rollout: Rollout, rewards: Tensor, *, gamma: float) -> Tensor:
    """Compare the critic with the returns that followed, in `BINS` bins of equal size by the predicted value.

    `rewards` [T, N] are in the units of the values. Return [BINS, 4]: mean predicted value, mean return, the standard error of that mean,
    and the number of steps. A step counts if its episode ended within the rollout, so that its return is known: the discounted sum of the
    rewards, and of the predicted value where the episode was cut. Steps of one environment are not independent, so the standard error is
    that of the sums over environments. Nothing is read from the device.
    """
    counted = (rollout.ended.flip(0).cumsum(0).flip(0) > 0) & rollout.valid  # [T, N]
    counted &= rollout.bad_rewards.flip(0).cumsum(0).flip(0) == 0  # no reward is missing after it
    rest = torch.where(rollout.truncated, rollout.next_values, torch.zeros_like(rollout.next_values))
    returns = gae(rewards, torch.zeros_like(rest), rest, rollout.ended, gamma=gamma, lam=1.0)
    # Give every step its bin: its rank among the counted steps, as a share of their number. Others go into a bin that is dropped.
    predicted, flat = rollout.values.flatten(), counted.flatten()
    ranks = torch.where(flat, predicted, torch.full_like(predicted, torch.inf)).argsort(stable=True).argsort()
    bins = torch.where(flat, (ranks * BINS) // flat.sum().clamp_min(1), torch.full_like(ranks, BINS))

    def sums(values: Tensor, groups: Tensor, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, groups, values.double())

    steps = sums(flat, bins, BINS + 1)
    mean_predicted, mean_return = (sums(values, bins, BINS + 1) / steps.clamp_min(1) for values in (predicted, returns.flatten()))
    envs = torch.arange(rollout.values.shape[1], device=bins.device).expand_as(rollout.values).flatten()
    errors = sums(returns.flatten() - mean_return[bins], bins * rollout.values.shape[1] + envs, (BINS + 1) * rollout.values.shape[1])
    standard_error = errors.view(BINS + 1, -1).square().sum(1).sqrt() / steps.clamp_min(1)
    return torch.stack((mean_predicted, mean_return, standard_error, steps), dim=1)[:BINS].float()


def _size_and_spread(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root mean square of inputs [M, ...], and the spread of each over the steps, averaged. Looks at some steps."""
    wanted = max(LEAST_SEEN, min(MOST_SEEN, MOST_NUMBERS * len(inputs) // max(1, inputs.numel())))
    seen = inputs[:: max(1, len(inputs) // wanted)].float()
    mean = seen.mean(0)
    variance = (seen - mean).square().mean(0)  # two passes; torch.var_mean takes twice as long on a CPU
    return (variance + mean.square()).mean().sqrt(), variance.sqrt().mean()


def _in_critic_units(policy: Policy, returns: Tensor, values: Tensor, valid: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Update the value normaliser with the returns. Return returns and values in the new units of the critic."""
    normalizer = policy.value_normalizer
    if normalizer is None:
        return returns, values
    normalizer.update(returns, valid, policy.last_critic_layer, group)
    return normalizer.normalize(returns), normalizer.normalize(values)


@dataclass
class Minibatch:
    """Some steps of the rollout in packed order, [M, ...]."""

    obs: Obs
    masks: Masks
    choice: Choice
    states: Tensor  # [F, S]
    sizes: list[int]
    samples: Samples


class Fragments(NamedTuple):
    """The fragments of one minibatch, as indices into the rollout."""

    rows: Integers  # [M] indices into the rollout flattened to [T·N], in packed order
    sizes: list[int]  # number of fragments that have a step 0, 1, 2, …
    states: Integers  # [F] indices into the stored states flattened to [T/L·N]; one past the end for a fragment that starts an episode


class Indices(NamedTuple):
    """`Fragments` on the device."""

    rows: Tensor
    sizes: list[int]
    states: Tensor


def place(minibatches: Sequence[Sequence[Fragments]], device: torch.device) -> list[list[Indices]]:
    """Move the pieces of all minibatches of a pass to the device in one transfer, which does not wait for it."""
    arrays = [array for pieces in minibatches for piece in pieces for array in (piece.rows, piece.states)]
    moved = iter(upload(torch.from_numpy(np.concatenate(arrays)), device).split_with_sizes([len(array) for array in arrays]))
    return [[Indices(next(moved), piece.sizes, next(moved)) for piece in pieces] for pieces in minibatches]


def minibatches(
    starts: Booleans, *, length: int, parts: int, rng: np.random.Generator, valid: Booleans | None = None
) -> Iterator[Fragments]:
    """Yield the minibatches of one pass over a rollout, in random order.

    `starts` [T, N] is true where a step is the first of an episode, `valid` [T, N] where it was real (None: everywhere).
    """
    num_steps, num_envs = starts.shape
    units = rng.permutation(num_steps // length * num_envs)
    for part in np.array_split(units, parts):
        yield pack(starts, part, length=length, valid=valid)


def pack(starts: Booleans, units: Integers, *, length: int, valid: Booleans | None = None) -> Fragments:
    """Return the fragments of some units. Unit `u` is chunk `u // N` of environment `u % N`."""
    num_steps, num_envs = starts.shape
    chunk, env = np.divmod(units, num_envs)
    rows = (chunk * length)[:, None] * num_envs + env[:, None] + np.arange(length) * num_envs  # [U, L] into [T·N]
    if length == 1:  # without memory; every step is a fragment
        kept = _real(valid, rows[:, 0])
        rows, units = rows[kept], units[kept]
        return Fragments(rows[:, 0], [len(units)], np.where(starts.ravel()[rows[:, 0]], num_steps * num_envs, units))

    # Cut the units where an episode starts, leave out fragments that were not real, and sort the others by length.
    is_start = starts.ravel()[rows]  # [U, L]
    is_cut = is_start.copy()
    is_cut[:, 0] = True
    first = np.flatnonzero(is_cut)  # [F] positions in [U·L]
    lengths = np.diff(first, append=len(units) * length)
    kept = _real(valid, rows.ravel()[first])
    first, lengths = first[kept], lengths[kept]
    order = np.argsort(-lengths, kind="stable")
    first, lengths = first[order], lengths[order]

    # Pack them time-major: all first steps, then all second steps, and so on.
    sizes = np.searchsorted(-lengths, -np.arange(lengths[0]), side="left")  # for every t, the number of fragments longer than t
    steps = np.arange(lengths[0])[:, None]
    packed = (first + steps)[steps < lengths]  # boolean indexing goes row by row, and a row is a time
    zero_state = num_steps // length * num_envs
    states = np.where(is_start.ravel()[first], zero_state, units[first // length])
    return Fragments(rows.ravel()[packed], sizes.tolist(), states)


def _real(valid: Booleans | None, rows: Integers) -> Integers:
    """Return the positions in `rows` of the steps that were real. If none was, return the first one: a minibatch cannot be empty."""
    if valid is None:
        return np.arange(len(rows))
    kept = np.flatnonzero(valid.ravel()[rows])
    return kept if len(kept) else np.zeros(1, dtype=np.int64)


def split(fragments: Fragments, parts: int) -> list[Fragments]:
    """Split a minibatch into pieces for gradient accumulation. Fragments are dealt in turn, so that each piece has long and short ones."""
    if parts == 1:
        return [fragments]
    offsets = np.concatenate(([0], np.cumsum(fragments.sizes)))
    pieces = []
    for part in range(min(parts, len(fragments.states))):
        steps = [np.arange(start + part, stop, parts) for start, stop in itertools.pairwise(offsets)]
        steps = [step for step in steps if len(step)]
        pieces.append(Fragments(fragments.rows[np.concatenate(steps)], [len(step) for step in steps], fragments.states[part::parts]))
    return pieces
