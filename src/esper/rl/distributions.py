"""Action distributions: from the outputs of a policy to actions, log-probabilities and entropies, head by head.

A policy returns one row of parameters per decision: first the logits of every discrete head, then the means of every continuous head, then
their log standard deviations. A discrete head may have separate logits for every choice of its parent head; then the row of the parent's
choice is used. The result is kept as a `Choice`: indices for the discrete heads, and for the continuous heads the Gaussian sample *before*
tanh, from which log-probabilities are exact even for saturated actions. A continuous head without bounds has no tanh: its action is the
Gaussian sample.

Shapes: B = any leading dimensions (environments, or packed steps), J = heads, K = choices of one head, P = parameters,
D = discrete heads, C = continuous numbers over all continuous heads.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper.vecenv import Actions, ActionSpec, Masks

LOG_STD_RANGE = (-5.0, 2.0)  # log standard deviations are clamped to this
_QUADRATURE_NODES = 16  # points at which the entropy of a squashed Gaussian is computed
_UNIT_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)  # of a Gaussian with a standard deviation of 1


class Choice(NamedTuple):
    """An action before tanh: `picked` [B, D] int64 for the discrete heads, `latent` [B, C] for the continuous heads."""

    picked: Tensor
    latent: Tensor


class Noise(NamedTuple):
    """The random numbers of a choice: `gumbel` [B, ΣK] for the discrete heads, `normal` [B, C] for the continuous heads."""

    gumbel: Tensor
    normal: Tensor


class ActionEvaluation(NamedTuple):
    """Log-probability [B, J] of a choice and normalised entropy [B, J], per head.

    An entropy of 1 is that of a uniform choice: among the allowed choices of a discrete head, or in [-1, 1] for a bounded continuous head.
    For a head without bounds it is that of a standard Gaussian.
    """

    log_prob: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class _Head:
    """The places of a head's numbers."""

    name: str
    parameters: slice  # logits or means among the parameters of the policy
    own: slice  # discrete: its numbers in Noise.gumbel; continuous: its numbers in Noise.normal and Choice.latent
    column: int | None = None  # discrete: column in Choice.picked; continuous: None
    parent: int | None = None  # column of the discrete head on whose choice the mask depends
    has_own_logits: bool = False  # whether there are separate logits for every choice of the parent
    is_bounded: bool = True  # continuous: whether it has a tanh


def masked_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Return logits in which forbidden choices are so low that their probability is 0, yet finite in the precision of the logits."""
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min / 4)


def log_prob_of_gaussian(latent: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the elementwise log density of a Gaussian."""
    return -0.5 * ((latent - mean) * torch.exp(-log_std)).square() - log_std - 0.5 * math.log(2 * math.pi)


def log_derivative_of_tanh(latent: Tensor) -> Tensor:
    """Return log(1 - tanh²(latent)), exact for latents of any size."""
    return 2.0 * (math.log(2.0) - latent - F.softplus(-2.0 * latent))


def latent_of_action(action: Tensor) -> Tensor:
    """Return the latent whose tanh is `action`; at ±1, that of the nearest number inside the range, so that it is finite."""
    limit = 1.0 - torch.finfo(action.dtype).eps
    return torch.atanh(action.clamp(-limit, limit))


def entropy_of_squashed_gaussian(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the elementwise entropy of tanh(Gaussian), by Gauss-Hermite quadrature of the part that tanh adds."""
    points, share = _quadrature(mean.dtype, mean.device)
    squashed = log_derivative_of_tanh(mean.unsqueeze(-1) + torch.exp(log_std).unsqueeze(-1) * points)
    return 0.5 * math.log(2 * math.pi * math.e) + log_std + (squashed * share).sum(-1)


@functools.cache
def _quadrature(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return nodes and weights [nodes] of a mean over a standard Gaussian."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
    with torch.inference_mode(False):  # the first caller may be in inference mode, but later ones need gradients
        points, share = (torch.as_tensor(numbers, dtype=dtype, device=device) for numbers in (nodes, weights / weights.sum()))
    return points, share


class ActionDistribution:
    """The distribution over factored actions of one specification."""

    def __init__(self, spec: ActionSpec) -> None:
        self.spec = spec
        self.head_names = tuple(head.name for head in spec.heads)
        self.num_choices = sum(head.size for head in spec.discrete)  # ΣK
        self.num_logits = sum(math.prod(spec.logits_shape(head)) for head in spec.discrete)
        self.num_continuous = sum(head.size for head in spec.continuous)  # C
        self.num_outputs = self.num_logits + self.num_continuous  # outputs of an actor: logits and means
        self.num_parameters = self.num_outputs + self.num_continuous  # P
        self._heads = _lay_out(spec)
        self.output_slices = {head.name: head.parameters for head in self._heads}  # the logits or means of each head
        self._rules = [_Rule.of(spec, self.head_names, name) for name in self.head_names]
        self.always_relevant = not spec.relevance

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Noise:
        """Draw the random numbers of choices of this leading shape."""
        device = generator.device
        exponential = torch.empty(*shape, self.num_choices, device=device).exponential_(generator=generator)
        normal = torch.randn(*shape, self.num_continuous, device=device, generator=generator)
        return Noise(gumbel=exponential.log_().neg_(), normal=normal)

    def choose(self, parameters: Tensor, masks: Masks, noise: Noise | None) -> Choice:
        """Return a random choice, or without noise the most likely one. A masked choice is never returned."""
        # Choose the discrete heads in order, because a mask or logits may depend on the choice of an earlier head. The argmax of logits
        # plus Gumbel noise is a sample of the softmax.
        columns: list[Tensor] = []
        for head in self._heads:
            if head.column is None:
                break
            scores = _logits(head, parameters, columns)
            if noise is not None:
                scores = scores + noise.gumbel[..., head.own]
            mask = self._mask(head, masks, columns)
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            columns.append(scores.argmax(-1))
        picked = _stack_columns(columns, parameters)
        if not self.num_continuous:
            return Choice(picked, parameters[..., :0])
        mean, log_std = self._gaussian(parameters)
        return Choice(picked, mean if noise is None else torch.addcmul(mean, log_std.exp(), noise.normal))

    def evaluate(self, parameters: Tensor, choice: Choice, masks: Masks) -> ActionEvaluation:
        """Return log-probabilities and entropies of a choice under parameters [B, P], in float32 at least."""
        parameters = parameters.float() if parameters.dtype in (torch.bfloat16, torch.float16) else parameters
        columns = list(choice.picked.unbind(-1))
        log_probs: dict[str, Tensor] = {}
        entropies: dict[str, Tensor] = {}
        for head in self._heads:
            if head.column is not None:
                logits, mask = _logits(head, parameters, columns), self._mask(head, masks, columns)
                log_probs[head.name], entropies[head.name] = _evaluate_discrete(logits, columns[head.column], mask)
        if self.num_continuous:
            mean, log_std = self._gaussian(parameters)
            density = log_prob_of_gaussian(choice.latent, mean, log_std)
            for head in self._heads:
                if head.column is None:
                    own = head.own
                    if head.is_bounded:
                        log_probs[head.name] = (density[..., own] - log_derivative_of_tanh(choice.latent[..., own])).sum(-1)
                        # A uniform distribution over [-1, 1] has the entropy log 2.
                        entropy = entropy_of_squashed_gaussian(mean[..., own], log_std[..., own]) / math.log(2.0)
                    else:
                        log_probs[head.name] = density[..., own].sum(-1)
                        entropy = 1.0 + log_std[..., own] / _UNIT_ENTROPY
                    entropies[head.name] = entropy.mean(-1)
        return ActionEvaluation(*(torch.stack([part[name] for name in self.head_names], dim=-1) for part in (log_probs, entropies)))

    def relevance(self, choice: Choice) -> Tensor:
        """Return which heads mattered, given the choice: [B, J] bool."""
        everywhere = torch.ones(choice.picked.shape[:-1], dtype=torch.bool, device=choice.picked.device)
        matters: list[Tensor] = []
        for rule in self._rules:
            if rule is None:
                matters.append(everywhere)
            else:
                table = torch.tensor(rule.matters_for, device=choice.picked.device)
                matters.append(matters[rule.given_head] & table[choice.picked[..., rule.given_column]])
        return torch.stack(matters, dim=-1)

    def empty_rows(self, masks: Masks, choice: Choice) -> Tensor:
        """Return which heads mattered but had no allowed choice: [B, J] bool."""
        columns = list(choice.picked.unbind(-1))
        empty = torch.zeros(*choice.picked.shape[:-1], len(self.head_names), dtype=torch.bool, device=choice.picked.device)
        for head in self._heads:
            if head.name in masks:
                mask = self._mask(head, masks, columns)
                assert mask is not None
                empty[..., self.head_names.index(head.name)] = ~mask.any(-1)
        return empty if self.always_relevant else empty & self.relevance(choice)

    def actions(self, choice: Choice) -> Actions:
        """Return the choice as actions for an environment."""
        result: Actions = {}
        for head in self._heads:
            if head.column is not None:
                result[head.name] = choice.picked[..., head.column]
            else:
                latent = choice.latent[..., head.own]
                result[head.name] = torch.tanh(latent) if head.is_bounded else latent
        return result

    def choice(self, actions: Actions) -> Choice:
        """Return the choice that gives these actions: the inverse of `actions`, finite even at ±1."""
        discrete = [actions[head.name] for head in self.spec.discrete]
        latent = [latent_of_action(actions[head.name]) if head.is_bounded else actions[head.name] for head in self.spec.continuous]
        if not discrete:
            return Choice(torch.empty(*latent[0].shape[:-1], 0, dtype=torch.int64, device=latent[0].device), torch.cat(latent, dim=-1))
        empty = torch.empty(*discrete[0].shape, 0, device=discrete[0].device)
        return Choice(torch.stack(discrete, dim=-1), torch.cat(latent, dim=-1) if latent else empty)

    def _mask(self, head: _Head, masks: Masks, columns: list[Tensor]) -> Tensor | None:
        """Return the mask of a head [B, K], given the choice of its parent; None if it has none."""
        mask = masks.get(head.name)
        if mask is None or head.parent is None:
            return mask
        return _row(mask, columns[head.parent])

    def _gaussian(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and log standard deviations of all continuous numbers [B, C]."""
        mean = parameters[..., self.num_logits : self.num_outputs]
        return mean, parameters[..., self.num_outputs :].clamp(*LOG_STD_RANGE)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A row of the relevance table by position: the head matters if head `given_head` does and its choice is true in `matters_for`."""

    given_head: int
    given_column: int
    matters_for: list[bool]

    @staticmethod
    def of(spec: ActionSpec, names: tuple[str, ...], name: str) -> _Rule | None:
        """Return the rule of the head `name`; None if it always matters."""
        row = next((row for row in spec.relevance if row.head == name), None)
        if row is None:
            return None
        discrete = [head.name for head in spec.discrete]
        column = discrete.index(row.given)
        return _Rule(names.index(row.given), column, [choice in row.choices for choice in range(spec.discrete[column].size)])


def _lay_out(spec: ActionSpec) -> list[_Head]:
    """Return the places of all heads: discrete heads first, in their order, then the continuous ones."""
    columns = {head.name: column for column, head in enumerate(spec.discrete)}
    heads: list[_Head] = []
    start = offset = 0
    for head in spec.discrete:
        parent = None if head.parent is None else columns[head.parent]
        width = math.prod(spec.logits_shape(head))
        own, parameters = slice(offset, offset + head.size), slice(start, start + width)
        heads.append(_Head(head.name, parameters, own, columns[head.name], parent, head.has_own_logits))
        start, offset = parameters.stop, own.stop
    offset = 0
    for continuous in spec.continuous:
        own = slice(offset, offset + continuous.size)
        parameters = slice(start + own.start, start + own.stop)
        heads.append(_Head(continuous.name, parameters, own, is_bounded=continuous.is_bounded))
        offset = own.stop
    return heads


def _logits(head: _Head, parameters: Tensor, columns: list[Tensor]) -> Tensor:
    """Return the logits of a head [B, K], given the choice of its parent."""
    logits = parameters[..., head.parameters]
    if not head.has_own_logits:
        return logits
    assert head.parent is not None
    return _row(logits.reshape(*logits.shape[:-1], -1, head.own.stop - head.own.start), columns[head.parent])


def _row(table: Tensor, index: Tensor) -> Tensor:
    """Return row `index` [B] of a table [B, rows, K], as [B, K]."""
    rows = index[..., None, None].expand(*table.shape[:-2], 1, table.shape[-1])
    return table.gather(-2, rows).squeeze(-2)


def _stack_columns(columns: list[Tensor], like: Tensor) -> Tensor:
    if not columns:
        return torch.empty(*like.shape[:-1], 0, dtype=torch.int64, device=like.device)
    return columns[0].unsqueeze(-1) if len(columns) == 1 else torch.stack(columns, dim=-1)


def _evaluate_discrete(logits: Tensor, chosen: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the choice, and the entropy relative to that of a uniform choice among the allowed ones."""
    if mask is not None:
        logits = masked_logits(logits, mask)
    log_probs = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    if mask is None:
        most = math.log(logits.shape[-1]) or 1.0
        normalised = entropy / most
    else:
        allowed = mask.sum(-1)
        # A single allowed choice has entropy 0; the minimum of 2 only avoids a division by zero there.
        normalised = torch.where(allowed > 1, entropy / allowed.clamp_min(2).to(logits.dtype).log(), 0.0)
    return log_probs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), normalised
