"""Optimisers of many hosts at once, one row per host.

`SGD`, `Adam` and `AdamW` do to the rows of one tensor [N, P] what torch.optim does to N models one after another. Every row has its own
learning rate, moments and step count. So a host that starts late, or is left out of a step, has the weights it would have if it were
trained alone.

Shapes: N = rows (hosts or seeds), P = weights of a row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from esper.devices import upload

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


class RowOptimizer(ABC):
    """An optimiser of `flat` [N, P], in place. `lr` [N] may be written to between steps. Every tensor of `state` is [N] or [N, P]."""

    moments: ClassVar[tuple[str, ...]]  # names of the state tensors that are [N, P]

    def __init__(self, flat: Tensor, *, lr: float | Tensor, weight_decay: float = 0.0) -> None:
        self.flat = flat
        self.lr = torch.empty(len(flat), dtype=flat.dtype, device=flat.device)
        if isinstance(lr, Tensor):
            self.lr.copy_(lr)
        else:
            self.lr.fill_(lr)  # torch.tensor(lr, device=...) would wait for the device
        self.weight_decay = weight_decay
        self.state = {name: torch.zeros_like(flat, requires_grad=False) for name in self.moments}
        self.state["steps"] = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)

    @torch.no_grad()
    def step(self, gradient: Tensor, *, active: Tensor | None = None) -> None:
        """Take one step along `gradient` [N, P], which is not changed. Rows outside `active` [N] stay bit-identical."""
        changed = [self.flat, *self.state.values()]
        before = None if active is None else [tensor.clone() for tensor in changed]
        self.state["steps"] += 1
        self._advance(gradient)
        if active is not None and before is not None:
            for tensor, old in zip(changed, before, strict=True):
                torch.where(active.view(-1, *[1] * (tensor.ndim - 1)), tensor, old, out=tensor)

    @abstractmethod
    def _advance(self, gradient: Tensor) -> None:
        """Update weights and moments of all rows. The step is already counted."""

    @abstractmethod
    def moves(self, gradient: Tensor, steps: int) -> Tensor:
        """Return the amount that a fresh optimiser subtracts from the weights in the last of `steps` steps along the same gradient [N, P].

        The learning rate is 1 and there is no weight decay. Changes nothing.
        """


class SGD(RowOptimizer):
    """torch.optim.SGD for rows: the weight decay is added to the gradient."""

    moments = ("momentum",)

    def __init__(self, flat: Tensor, *, lr: float | Tensor, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(flat, lr=lr, weight_decay=weight_decay)
        self.momentum = momentum

    def _advance(self, gradient: Tensor) -> None:
        direction = gradient.add(self.flat, alpha=self.weight_decay) if self.weight_decay else gradient
        if self.momentum:
            direction = self.state["momentum"].mul_(self.momentum).add_(direction)
        self.flat.addcmul_(direction, self.lr.unsqueeze(1), value=-1)

    def moves(self, gradient: Tensor, steps: int) -> Tensor:
        return gradient * sum(self.momentum**step for step in range(steps))  # without momentum this is 0 ** 0 = 1


class Adam(RowOptimizer):
    """torch.optim.Adam for rows: the weight decay is added to the gradient."""

    moments = ("mean", "square")

    def __init__(
        self,
        flat: Tensor,
        *,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(flat, lr=lr, weight_decay=weight_decay)
        self.betas, self.eps = betas, eps
        logarithms = [[math.log(beta) if beta else -math.inf] for beta in betas]
        self._logarithms = upload(logarithms, flat.device, flat.dtype)  # of the betas [2, 1]

    def _advance(self, gradient: Tensor) -> None:
        self._step_along(gradient.add(self.flat, alpha=self.weight_decay) if self.weight_decay else gradient)

    def _step_along(self, gradient: Tensor) -> None:
        """Update the moments with the gradient, and the weights with the bias-corrected moments."""
        # 1 - beta^steps [N, 1] of both betas, computed without the cancellation that would cost float32 half of its digits.
        mean_correction, square_correction = torch.expm1(self.state["steps"] * self._logarithms).neg_().unsqueeze(2)
        mean = self.state["mean"].lerp_(gradient, 1 - self.betas[0])
        square = self.state["square"].mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        denominator = square.sqrt().div_(square_correction.sqrt()).add_(self.eps)
        self.flat.addcdiv_(mean * (self.lr.unsqueeze(1) / mean_correction), denominator, value=-1)

    def moves(self, gradient: Tensor, steps: int) -> Tensor:
        return gradient / (gradient.abs() + self.eps)  # the bias-corrected moments of a constant gradient are g and g²


class AdamW(Adam):
    """torch.optim.AdamW for rows: weights shrink by the learning rate times the weight decay, apart from the gradient."""

    def __init__(
        self,
        flat: Tensor,
        *,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(flat, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _advance(self, gradient: Tensor) -> None:
        if self.weight_decay:
            self.flat.addcmul_(self.flat, self.lr.unsqueeze(1), value=-self.weight_decay)
        self._step_along(gradient)


@torch.no_grad()
def clip_rows_(gradient: Tensor, max_norm: float | Tensor) -> Tensor:
    """Scale every row of `gradient` [N, P] whose norm exceeds `max_norm` down to it, in place. Return the norms [N] before clipping.

    `max_norm` is one number or a tensor [N]. A row whose norm is not finite is not usable afterwards: leave it out of the step by
    `active=norms < math.inf`.
    """
    norms: Tensor = torch.linalg.vector_norm(gradient, dim=1)
    gradient.mul_((max_norm / (norms + _CLIP_EPSILON)).clamp(max=1.0).unsqueeze(1))
    return norms
