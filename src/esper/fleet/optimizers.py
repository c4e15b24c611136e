"""Optimisers over flat rows: what torch.optim does to N hosts one after another, done to all of them at once.

Every row has a learning rate, moments and a count of its steps, so a host that starts late, or is left out of a step, is where it would be
had it been trained alone.

Shapes: N = rows, P = parameters of one host.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


class RowOptimizer(ABC):
    """Steps on `flat` [N, P], in place. `lr` [N] may be written to between steps. `state` has the row as its first dimension throughout."""

    moments: ClassVar[tuple[str, ...]]

    def __init__(self, flat: Tensor, *, lr: float | Tensor, weight_decay: float = 0.0) -> None:
        self.flat = flat
        self.lr = torch.empty(len(flat), dtype=flat.dtype, device=flat.device)
        if isinstance(lr, Tensor):
            self.lr.copy_(lr)
        else:
            self.lr.fill_(lr)  # a number as a tensor would be a copy that waits for the device
        self.weight_decay = weight_decay
        self.state = {name: torch.zeros_like(flat, requires_grad=False) for name in self.moments}
        self.state["steps"] = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)

    @torch.no_grad()
    def step(self, gradient: Tensor, *, active: Tensor | None = None) -> None:
        """One step by `gradient` [N, P], which stays as it is. Rows outside `active` [N] stay bit-identical, whatever their gradient."""
        changed = [self.flat, *self.state.values()]
        before = None if active is None else [tensor.clone() for tensor in changed]
        self.state["steps"] += 1
        self._advance(gradient)
        if active is not None and before is not None:
            for tensor, old in zip(changed, before, strict=True):
                torch.where(active.view(-1, *[1] * (tensor.ndim - 1)), tensor, old, out=tensor)

    @abstractmethod
    def _advance(self, gradient: Tensor) -> None:
        """Changes weights and moments of all rows; the steps are counted already."""

    @abstractmethod
    def moves(self, gradient: Tensor, steps: int) -> Tensor:
        """What a fresh optimiser takes from the weights in the last of so many steps along the same gradient, at a learning rate of 1.

        Without weight decay. Changes nothing.
        """


class SGD(RowOptimizer):
    """torch.optim.SGD: the weight decay is part of the gradient."""

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
        return gradient * sum(self.momentum**step for step in range(steps))  # 0 ** 0 is 1


class Adam(RowOptimizer):
    """torch.optim.Adam: the weight decay is part of the gradient."""

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

    def _advance(self, gradient: Tensor) -> None:
        self._step_along(gradient.add(self.flat, alpha=self.weight_decay) if self.weight_decay else gradient)

    def _step_along(self, gradient: Tensor) -> None:
        mean_correction, square_correction = (self._correction(beta) for beta in self.betas)
        mean = self.state["mean"].lerp_(gradient, 1 - self.betas[0])
        square = self.state["square"].mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        spread = square.sqrt().div_(square_correction.sqrt()).add_(self.eps)
        self.flat.addcdiv_(mean * (self.lr.unsqueeze(1) / mean_correction), spread, value=-1)

    def moves(self, gradient: Tensor, steps: int) -> Tensor:
        return gradient / (gradient.abs() + self.eps)  # both moments are those of the gradient itself, once they are corrected

    def _correction(self, beta: float) -> Tensor:
        """1 - beta^steps [N, 1], without the cancellation that would cost float32 half of its digits."""
        if beta == 0:
            return torch.ones_like(self.lr).unsqueeze(1)
        return -torch.expm1(self.state["steps"].to(self.flat.dtype) * math.log(beta)).unsqueeze(1)


class AdamW(Adam):
    """torch.optim.AdamW: weights decay on their own, by the learning rate times the weight decay."""

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
            self.flat.mul_(1 - self.lr.unsqueeze(1) * self.weight_decay)
        self._step_along(gradient)


@torch.no_grad()
def clip_rows_(gradient: Tensor, max_norm: float | Tensor) -> Tensor:
    """Scales every row of [N, P] that is longer than `max_norm` (one, or one for each row) down to it, in place; the norms [N] before.

    A row whose norm is not finite is not usable afterwards: leave it out of the step by `active=norms.isfinite()`.
    """
    norms: Tensor = torch.linalg.vector_norm(gradient, dim=1)
    gradient.mul_((max_norm / (norms + _CLIP_EPSILON)).clamp(max=1.0).unsqueeze(1))
    return norms
