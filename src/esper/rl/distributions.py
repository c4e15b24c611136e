"""From the numbers a policy puts out to actions, log-probabilities and entropies, head by head.

A policy puts out one row of parameters per decision: first the logits of every discrete head, then the means of every continuous head,
then their log standard deviations. A head with logits of its own for every choice of its parent has them row by row, and the row of what
the parent chose is the one that holds. What was chosen is kept as a `Choice`: indices for the discrete heads, and for the continuous ones
the Gaussian sample *before* tanh, from which log-probabilities are exact however saturated the action is. A continuous head without bounds
has no tanh: its action is the Gaussian sample.

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

LOG_STD_RANGE = (-5.0, 2.0)
_QUADRATURE_NODES = 16
_UNIT_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)  # of a Gaussian with a spread of 1


class Choice(NamedTuple):
    """What was chosen: `picked` [B, D] int64 for the discrete heads, `latent` [B, C] for the continuous ones, before tanh."""

    picked: Tensor
    latent: Tensor


class Noise(NamedTuple):
    """What makes a choice random: `gumbel` [B, ΣK] for the discrete heads, `normal` [B, C] for the continuous ones."""

    gumbel: Tensor
    normal: Tensor


class Evaluation(NamedTuple):
    """Per head: log-probability [B, J] of a choice, and normalised entropy [B, J].

    An entropy of 1 is that of a uniform choice among what is allowed; of a Gaussian with a spread of 1 for a head without bounds.
    """

    log_prob: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class _Head:
    """Where a head's numbers lie."""

    name: str
    parameters: slice
    own: slice  # a discrete head's noise among all noise of its kind; a continuous head's numbers in Choice.latent
    column: int | None = None  # of a discrete head in Choice.picked
    parent: int | None = None  # column of the discrete head on whose choice the mask depends
    has_own_logits: bool = False  # for every choice of that head
    is_bounded: bool = True  # a continuous head with tanh


def masked_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits with what is not allowed at a value so low that its probability is 0, yet finite in the logits' own precision."""
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min / 4)


def log_prob_of_gaussian(latent: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Elementwise log density of a Gaussian."""
    return -0.5 * ((latent - mean) * torch.exp(-log_std)).square() - log_std - 0.5 * math.log(2 * math.pi)


def log_derivative_of_tanh(latent: Tensor) -> Tensor:
    """log(1 - tanh²(latent)), exact however large the latent is."""
    return 2.0 * (math.log(2.0) - latent - F.softplus(-2.0 * latent))


def latent_of_action(action: Tensor) -> Tensor:
    """The latent whose tanh is `action`. At exactly ±1 it is that of the nearest smaller number, hence finite."""
    limit = 1.0 - torch.finfo(action.dtype).eps
    return torch.atanh(action.clamp(-limit, limit))


def entropy_of_squashed_gaussian(mean: Tensor, log_std: Tensor) -> Tensor:
    """Elementwise entropy of tanh(Gaussian), by Gauss-Hermite quadrature of the part that tanh adds."""
    points, share = _quadrature(mean.dtype, mean.device)
    squashed = log_derivative_of_tanh(mean.unsqueeze(-1) + torch.exp(log_std).unsqueeze(-1) * points)
    return 0.5 * math.log(2 * math.pi * math.e) + log_std + (squashed * share).sum(-1)


@functools.cache
def _quadrature(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights [nodes] of a mean over a standard Gaussian."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
    with torch.inference_mode(False):  # whoever asks first may be in inference mode, and later ones need gradients
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
        self.num_outputs = self.num_logits + self.num_continuous  # of an actor: logits and means
        self.num_parameters = self.num_outputs + self.num_continuous  # P
        self._heads = _lay_out(spec)
        self.output_slices = {head.name: head.parameters for head in self._heads}  # where each head's logits or means lie
        self._rules = [_Rule.of(spec, self.head_names, name) for name in self.head_names]
        self.always_relevant = not spec.relevance

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Noise:
        device = generator.device
        exponential = torch.empty(*shape, self.num_choices, device=device).exponential_(generator=generator)
        normal = torch.randn(*shape, self.num_continuous, device=device, generator=generator)
        return Noise(gumbel=exponential.log_().neg_(), normal=normal)

    def choose(self, parameters: Tensor, masks: Masks, noise: Noise | None) -> Choice:
        """A random choice, or the most likely one where there is no noise. Never one that is masked."""
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

    def evaluate(self, parameters: Tensor, choice: Choice, masks: Masks) -> Evaluation:
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
                        spread = entropy_of_squashed_gaussian(mean[..., own], log_std[..., own]) / math.log(2.0)
                    else:
                        log_probs[head.name] = density[..., own].sum(-1)
                        spread = 1.0 + log_std[..., own] / _UNIT_ENTROPY
                    entropies[head.name] = spread.mean(-1)
        return Evaluation(*(torch.stack([part[name] for name in self.head_names], dim=-1) for part in (log_probs, entropies)))

    def relevance(self, choice: Choice) -> Tensor:
        """[B, J] bool: which heads mattered, given what was chosen."""
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
        """[B, J] bool: heads that mattered, yet had nothing allowed."""
        columns = list(choice.picked.unbind(-1))
        empty = torch.zeros(*choice.picked.shape[:-1], len(self.head_names), dtype=torch.bool, device=choice.picked.device)
        for head in self._heads:
            if head.name in masks:
                mask = self._mask(head, masks, columns)
                assert mask is not None
                empty[..., self.head_names.index(head.name)] = ~mask.any(-1)
        return empty if self.always_relevant else empty & self.relevance(choice)

    def actions(self, choice: Choice) -> Actions:
        """The choice in the form environments take."""
        result: Actions = {}
        for head in self._heads:
            if head.column is not None:
                result[head.name] = choice.picked[..., head.column]
            else:
                latent = choice.latent[..., head.own]
                result[head.name] = torch.tanh(latent) if head.is_bounded else latent
        return result

    def choice(self, actions: Actions) -> Choice:
        """The choice that gives these actions; the inverse of `actions`, finite at exactly ±1."""
        some = next(iter(actions.values()))
        discrete = [actions[head.name] for head in self.spec.discrete]
        latent = [latent_of_action(actions[head.name]) if head.is_bounded else actions[head.name] for head in self.spec.continuous]
        batch = some.shape if discrete and some is discrete[0] else some.shape[:-1]
        index = torch.stack(discrete, dim=-1) if discrete else torch.empty(*batch, 0, dtype=torch.int64, device=some.device)
        return Choice(index, torch.cat(latent, dim=-1) if latent else torch.empty(*batch, 0, device=some.device))

    def _mask(self, head: _Head, masks: Masks, columns: list[Tensor]) -> Tensor | None:
        """The mask that holds for this head [B, K], given what its parent chose."""
        mask = masks.get(head.name)
        if mask is None or head.parent is None:
            return mask
        return _row(mask, columns[head.parent])

    def _gaussian(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        mean = parameters[..., self.num_logits : self.num_outputs]
        return mean, parameters[..., self.num_outputs :].clamp(*LOG_STD_RANGE)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A row of the relevance table by position: matters if head `given_head` does and its choice is marked in `matters_for`."""

    given_head: int
    given_column: int
    matters_for: list[bool]

    @staticmethod
    def of(spec: ActionSpec, names: tuple[str, ...], name: str) -> _Rule | None:
        row = next((row for row in spec.relevance if row.head == name), None)
        if row is None:
            return None
        discrete = [head.name for head in spec.discrete]
        column = discrete.index(row.given)
        return _Rule(names.index(row.given), column, [choice in row.choices for choice in range(spec.discrete[column].size)])


def _lay_out(spec: ActionSpec) -> list[_Head]:
    """Discrete heads first, in their order, then the continuous ones."""
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
    """The logits that hold for this head [B, K], given what its parent chose."""
    logits = parameters[..., head.parameters]
    if not head.has_own_logits:
        return logits
    assert head.parent is not None
    return _row(logits.reshape(*logits.shape[:-1], -1, head.own.stop - head.own.start), columns[head.parent])


def _row(table: Tensor, index: Tensor) -> Tensor:
    """Row `index` [B] of a table [B, rows, K]."""
    rows = index[..., None, None].expand(*table.shape[:-2], 1, table.shape[-1])
    return table.gather(-2, rows).squeeze(-2)


def _stack_columns(columns: list[Tensor], like: Tensor) -> Tensor:
    if not columns:
        return torch.empty(*like.shape[:-1], 0, dtype=torch.int64, device=like.device)
    return columns[0].unsqueeze(-1) if len(columns) == 1 else torch.stack(columns, dim=-1)


def _evaluate_discrete(logits: Tensor, chosen: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probability of what was chosen, and entropy relative to that of a uniform choice among what is allowed."""
    if mask is not None:
        logits = masked_logits(logits, mask)
    log_probs = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    if mask is None:
        most = math.log(logits.shape[-1]) or 1.0
        normalised = entropy / most
    else:
        allowed = mask.sum(-1)
        # One allowed choice has entropy 0; the 2 only keeps the division defined there.
        normalised = torch.where(allowed > 1, entropy / allowed.clamp_min(2).to(logits.dtype).log(), 0.0)
    return log_probs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), normalised
