"""PPO's loss as pure functions of tensors.

Every term of the loss is a sum over steps divided by given counts, so that the terms of the pieces of a minibatch add up to those of the
whole.

Shapes: M = steps in the minibatch (or a piece of it), J = heads, or 1 where the ratio is that of the whole action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.parallel import ALONE, Group
from esper.rl.distributions import ActionEvaluation

LOG_RATIO_LIMIT = 20.0  # far beyond any clip; without a limit exp and its gradient overflow


class Samples(NamedTuple):
    """Data of the rollout for each step of a minibatch."""

    advantages: Tensor  # [M, J], 0 where a head did not matter
    old_log_prob: Tensor  # [M, J]
    weight: Tensor  # [M, J] 1 where the step was real, its action had an effect and the head mattered, else 0
    valid: Tensor  # [M] 1 where the step was real, else 0
    target: Tensor  # [M] return in the critic's units
    old_value: Tensor  # [M] in the critic's units


class Counts(NamedTuple):
    """The divisors of the sums: counts of the whole minibatch, over all ranks."""

    valid: Tensor  # [] real steps
    weight: Tensor  # [J] real steps in which each head mattered


class Terms(NamedTuple):
    """The loss, its parts and diagnostics. All but `ratio_max` add up over the pieces of a minibatch."""

    loss: Tensor  # []
    policy_loss: Tensor  # []
    value_loss: Tensor  # []
    entropy: Tensor  # [J] mean where the head mattered
    kl: Tensor  # [J] mean where the head mattered
    total_kl: Tensor  # [] of the whole action
    clip_fraction: Tensor  # [] share of ratios outside the clip range, among heads that mattered
    ratio_max: Tensor  # []


def add_up(pieces: list[Terms]) -> Terms:
    """Return the terms of a minibatch from those of its pieces."""
    if len(pieces) == 1:
        return pieces[0]
    sums = Terms(*(torch.stack(parts).sum(0) for parts in zip(*pieces, strict=True)))
    return sums._replace(ratio_max=torch.stack([piece.ratio_max for piece in pieces]).max())


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The weights and limits of the loss."""

    clip: float  # of the probability ratio
    value: float  # weight of the value loss
    value_clip: float | None
    entropy: Tensor  # [J] weight of each head's entropy
    joint_ratio: bool  # clip the ratio of the whole action instead of that of each head


def ppo_loss(new: ActionEvaluation, predicted: Tensor, samples: Samples, counts: Counts, coef: Coefficients) -> Terms:
    """Return the loss: the clipped surrogate over heads, plus the value loss, minus the weighted entropy; and its diagnostics.

    policy: Σ over real steps and heads that mattered of -min(r·A, clip(r)·A), divided by the number of real steps
    value: ½·(prediction - return)², mean over real steps
    entropy: Σ over real steps and heads that mattered of the weighted normalised entropy, divided by the number of real steps, so that the
        bonus of a step does not depend on how often its head matters; `Terms.entropy` is the mean where the head mattered
    """
    valid_count, head_counts = counts.valid.clamp_min(1), counts.weight.clamp_min(1)
    log_ratio = (new.log_prob - samples.old_log_prob) * samples.weight  # [M, J]
    drift = torch.expm1(log_ratio) - log_ratio  # [M, J] (ratio - 1) - log ratio: an estimate of the KL that is never negative
    if coef.joint_ratio:
        log_ratio = log_ratio.sum(-1, keepdim=True)  # [M, 1]
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped = ratio.clamp(1 - coef.clip, 1 + coef.clip)
    policy_loss = -(torch.minimum(ratio * samples.advantages, clipped * samples.advantages)).sum() / valid_count
    value_loss = _value_loss(predicted, samples, coef.value_clip) / valid_count
    entropy_sums = (new.entropy * samples.weight).sum(0)  # [J]
    entropy = entropy_sums / head_counts
    loss = policy_loss + coef.value * value_loss - (coef.entropy * entropy_sums).sum() / valid_count
    with torch.no_grad():
        head_drift = (drift * samples.weight).sum(0)
        outside = ((ratio - 1).abs() > coef.clip).to(ratio.dtype).sum()
        num_ratios = valid_count if coef.joint_ratio else head_counts.sum()
        kl, total_kl = head_drift / head_counts, head_drift.sum() / valid_count
        diagnostics = kl, total_kl, outside / num_ratios, ratio.max()
    return Terms(loss, policy_loss.detach(), value_loss.detach(), entropy.detach(), *diagnostics)


def _value_loss(predicted: Tensor, samples: Samples, clip: float | None) -> Tensor:
    """Return the sum of ½·error² over real steps; with a clip, the larger of the error and that of the clipped prediction."""
    error = (predicted - samples.target).square()
    if clip is not None:
        near = samples.old_value + (predicted - samples.old_value).clamp(-clip, clip)
        error = torch.maximum(error, (near - samples.target).square())
    return 0.5 * (error * samples.valid).sum()


def normalize_advantages(advantages: Tensor, weight: Tensor, valid: Tensor, group: Group = ALONE) -> Tensor:
    """Return advantages [M] per head [M, J], centred over the steps where the head mattered, and divided by the spread over `valid` steps.

    Mean and spread are over all ranks. Centring per head is a baseline that knows whether the head mattered: the choice of a slot is not
    blamed for the decision to use one. A head that mattered in one step only gets 0 there.
    """
    counted = torch.cat((valid.unsqueeze(1), weight), dim=1)  # [M, 1 + J]
    counts, sums = group.sum_(torch.stack((counted.sum(0), (advantages.unsqueeze(1) * counted).sum(0)))).unbind(0)
    means = sums / counts.clamp_min(1)
    mean, head_mean = means[0], means[1:]
    spread = (group.sum_(((advantages - mean) * valid).square().sum()) / counts[0].clamp_min(1)).sqrt()
    return (advantages.unsqueeze(-1) - head_mean) * weight / (spread + 1e-8)
