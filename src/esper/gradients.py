"""Gradients: a measure of their health, statistics over training steps, and loss scales for float16.

Loss scales. Gradients in float16 vanish below 6e-8 and overflow above 65504. So a loss is multiplied by a scale, as large as its gradients
allow, and its gradients are divided by it before they are used. A step whose gradients overflow is not taken, and the scale is halved. The
numbers are those of torch.amp.GradScaler. All of this happens on the device, in tensors that stay in place, so that steps can be recorded.

Shapes: N = rows, models that are trained side by side; R = some of those, P = weights of a row, B = samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VANISHING = 1e-7  # gradient norm
EXPLODING = 100.0  # gradient norm
_DECADES = 2.0  # width of the range over which health falls, in powers of ten


def gradient_health(norm: float) -> float:
    """Return the health of a gradient norm: 1 if it is healthy, ½ if it vanishes, 0 if it explodes.

    It is 1 from 100·VANISHING to EXPLODING. Below, it falls linearly in log(norm) to ½ at VANISHING; above, it falls to 0 at 100·EXPLODING.
    Vanishing counts as less harmful: it only stops learning, while an exploding gradient destroys the weights.

    >>> [gradient_health(norm) for norm in (0.0, 1e-6, 0.5, 1e3, math.inf)]
    [0.5, 0.75, 1.0, 0.5, 0.0]
    """
    if not math.isfinite(norm):
        return 0.0
    decade = math.log10(norm) if norm > 0 else -math.inf
    above_vanishing = min(max((decade - math.log10(VANISHING)) / _DECADES, 0.0), 1.0)
    below_exploding = min(max((math.log10(EXPLODING) + _DECADES - decade) / _DECADES, 0.0), 1.0)
    return below_exploding * (0.5 + 0.5 * above_vanishing)


def unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """Return the gradient of the loss, given the gradient of loss · `scale`.

    Half-precision gradients become float32 first, because half precision cannot hold a large scale.
    """
    if scale is None:
        return gradient
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    return wide / scale.to(gradient.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Statistics of a seed's gradients since the last epoch. Norms are global L2 norms, without loss scaling, before clipping."""

    steps: int
    mean_norm: float
    max_norm: float
    health: float  # in [0, 1]; mean of `gradient_health` over the steps
    skipped: int  # steps not taken because a gradient of the seed or of its host was not finite

    @classmethod
    def of(cls, norms: Sequence[float], *, skipped: int = 0, unit: float = 1.0) -> GradientStats:
        """Build the statistics from the norms of all steps. A norm that is not finite counts as a skipped step.

        `skipped` counts the further steps that were skipped although the seed's own gradient was finite. `unit` is the unit of the loss,
        see LossRange.

        >>> GradientStats.of([0.5, 1.5]).mean_norm
        1.0
        """
        finite = [norm for norm in norms if math.isfinite(norm)]
        mean = sum(finite) / len(finite) if finite else 0.0
        health = sum(gradient_health(norm / unit) for norm in finite) / len(norms) if norms else 0.0
        return cls(len(norms), mean, max(finite, default=0.0), health, skipped + len(norms) - len(finite))


# Loss scales

START, SMALLEST, LARGEST = 2.0**16, 2.0**-32, 2.0**32  # values of a scale
GROWTH_INTERVAL = 2000  # good steps in a row after which a scale is doubled


class NoLossScales:
    """The interface of loss scales, and an implementation that scales nothing, for precisions with the range of float32.

    There is one scale per row, [N]; a row is a host of a fleet. A single model has a scale of shape [].
    """

    def __init__(self, skipped: Tensor) -> None:
        self.skipped = skipped  # [N], number of steps that each row has skipped because of an overflow
        self._never = torch.zeros_like(skipped, dtype=torch.bool)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state, name -> [N]."""
        return {}

    def scaled(self, losses: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the losses [R] of these rows [R] times their scales; None: of all rows, in order."""
        return losses

    def unscaled(self, gradient: Tensor, rows: Tensor) -> Tensor:
        """Return the gradient of activations [B, R, ...] of these rows [R] divided by their scales."""
        return gradient

    def divide_(self, gradient: Tensor, rows: Tensor | None = None) -> None:
        """Divide the gradient [R, P] of these rows [R] (None: of all, in order) by their scales, in place."""

    def unscale_(self, gradients: Sequence[tuple[Tensor, Tensor | None]], stepping: Tensor | None = None) -> Tensor | None:
        """Divide gradients in place and return which rows may step by them [N]; None: all rows, even where a gradient is not finite.

        `gradients` are pairs of a gradient [R, P] and its rows [R] (None: all, in order). A row may step if it is in `stepping` [N]
        (None: all) and all its gradients are finite.
        """
        return None

    def overflowed(self, losses: Tensor, norms: Tensor) -> Tensor:
        """Return which gradients of these norms [N] are not finite because of the scale [N]."""
        return self._never

    def update_(self, taken: Tensor | None, overflowed: Tensor | None = None) -> None:
        """Adapt the scales after a step that was `taken` [N] by some rows and `overflowed` [N] in others (None: in all others)."""

    def reset_(self, rows: Tensor) -> None:
        """Set the scales of these rows back to the start."""

    def of(self, rows: Tensor) -> NoLossScales:
        """Return a copy of these rows."""
        return self

    def state_dict(self) -> dict[str, Any] | None:
        """Return a copy of the scales for a checkpoint, without the number of skipped steps."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        pass


class LossScales(NoLossScales):
    """Loss scales that are halved after an overflow and doubled after `GROWTH_INTERVAL` good steps in a row."""

    def __init__(self, scale: Tensor, good_steps: Tensor, skipped: Tensor) -> None:
        super().__init__(skipped)
        self.scale = scale  # [N]
        self.good_steps = good_steps  # [N], steps taken without an overflow in between since the scale last changed

    @classmethod
    def fresh(cls, rows: int | None, device: torch.device | str) -> LossScales:
        """Return new scales of this number of rows; None: of a single model."""
        shape = () if rows is None else (rows,)
        good_steps, skipped = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        return cls(torch.full(shape, START, device=device), good_steps, skipped)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good steps": self.good_steps, "skipped steps": self.skipped}

    def scaled(self, losses: Tensor, rows: Tensor | None = None) -> Tensor:
        return losses * self._of(rows)

    def unscaled(self, gradient: Tensor, rows: Tensor) -> Tensor:
        return gradient.to(self.scale.dtype) / self._of(rows).view(1, -1, *[1] * (gradient.ndim - 2))

    def divide_(self, gradient: Tensor, rows: Tensor | None = None) -> None:
        gradient.div_(self._of(rows).unsqueeze(-1))

    def unscale_(self, gradients: Sequence[tuple[Tensor, Tensor | None]], stepping: Tensor | None = None) -> Tensor:
        every = torch.arange(len(self.scale), device=self.scale.device)
        overflows = torch.zeros_like(self.scale)  # [N], number of gradients of each row that overflowed
        for gradient, rows in gradients:
            self.divide_(gradient, rows)
            overflows.index_add_(0, every if rows is None else rows, (~gradient.isfinite().all(1)).to(overflows.dtype))
        return overflows == 0 if stepping is None else stepping & (overflows == 0)

    def overflowed(self, losses: Tensor, norms: Tensor) -> Tensor:
        # At a scale of 1 the scale is not the cause: a smaller one would not help.
        return torch.isfinite(losses) & ~torch.isfinite(norms) & (self.scale > 1)

    def update_(self, taken: Tensor | None, overflowed: Tensor | None = None) -> None:
        assert taken is not None
        overflowed = ~taken if overflowed is None else overflowed
        self.skipped.add_(overflowed)
        # A step that was not taken for another reason changes neither the scale nor the count.
        self.good_steps.add_(taken).mul_(~overflowed)
        is_due = self.good_steps >= GROWTH_INTERVAL
        grown = torch.where(is_due, (self.scale * 2).clamp_max(LARGEST), self.scale)
        self.scale.copy_(torch.where(overflowed, (self.scale / 2).clamp_min(SMALLEST), grown))
        self.good_steps.mul_(~is_due)

    def reset_(self, rows: Tensor) -> None:
        self.scale.index_fill_(0, rows, START)
        self.good_steps.index_fill_(0, rows, 0)
        self.skipped.index_fill_(0, rows, 0)

    def of(self, rows: Tensor) -> LossScales:
        return LossScales(*(tensor.index_select(0, rows) for tensor in (self.scale, self.good_steps, self.skipped)))

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale.clone(), "good_steps": self.good_steps.float()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:  # a learner of another precision has saved none
            self.scale.copy_(state["scale"])
            self.good_steps.copy_(state["good_steps"])

    def _of(self, rows: Tensor | None) -> Tensor:
        return self.scale if rows is None else self.scale.index_select(0, rows)
