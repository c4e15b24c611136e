"""Loss scales and optimisers of many hosts at once, one row per host.

Optimisers: `SGD`, `Adam` and `AdamW` do to the rows of one tensor [N, P] what torch.optim does to N models one after another. Every row has
its own learning rate, moments and step count. So a host that starts late, or is left out of a step, is where it would be if it had been
trained alone.

Loss scales are for float16, whose gradients vanish below 6e-8 and overflow above 65504. The loss of each host is multiplied by a scale, as
large as its gradients allow, and its gradients are divided by it before they are used. A host skips the step and halves its scale when its
own gradients or those of one of its seeds overflow. Other hosts are not affected. The numbers are those of torch.amp.GradScaler. All of
this happens on the device, in tensors that stay in place, so that steps can be recorded.

Shapes: N = rows (hosts or seeds), A = hosts that train, R = some of those, P = weights of a row, B = samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

_START, _SMALLEST, _LARGEST = 2.0**16, 2.0**-32, 2.0**32
_GROWTH_INTERVAL = 2000  # good steps in a row after which the scale is doubled


class NoLossScales:
    """The interface of loss scales, and an implementation that scales nothing, for precisions with the range of float32."""

    def __init__(self, skipped: Tensor) -> None:
        self.skipped = skipped  # [N], number of steps that each host has skipped

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state, name -> [N]."""
        return {}

    def scaled(self, losses: Tensor, hosts: Tensor | None = None) -> Tensor:
        """Return the losses [R] of these hosts [R] times their scales; None: of all hosts, in order."""
        return losses

    def unscaled(self, gradient: Tensor) -> Tensor:
        """Return the gradient of activations [B, A, ...] of all hosts divided by their scales."""
        return gradient

    def unscale_(self, gradients: Sequence[tuple[Tensor, Tensor | None]], stepping: Tensor | None = None) -> Tensor | None:
        """Divide gradients in place and return which hosts may step by them [A]; None: all hosts, even where a gradient is not finite.

        `gradients` are pairs of a gradient [R, P] and its hosts [R] (None: all, in order). A host may step if it is in `stepping` [A]
        (None: all) and all its gradients are finite.
        """
        return None

    def update_(self, stepping: Tensor | None) -> None:
        """Adapt the scales after a step that only the hosts of `stepping` [A] took."""

    def reset_(self, rows: Tensor) -> None:
        """Set the scales of these rows back to the start."""

    def of(self, rows: Tensor) -> NoLossScales:
        """Return a copy of these rows."""
        return self


class LossScales(NoLossScales):
    """One loss scale per host."""

    def __init__(self, scale: Tensor, good_steps: Tensor, skipped: Tensor) -> None:
        super().__init__(skipped)
        self.scale = scale  # [N]
        self.good_steps = good_steps  # [N], steps in a row without an overflow since the scale last changed

    @classmethod
    def fresh(cls, hosts: int, device: torch.device | str) -> LossScales:
        good_steps, skipped = (torch.zeros(hosts, dtype=torch.int64, device=device) for _ in range(2))
        return cls(torch.full((hosts,), _START, device=device), good_steps, skipped)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good steps": self.good_steps, "skipped steps": self.skipped}

    def scaled(self, losses: Tensor, hosts: Tensor | None = None) -> Tensor:
        return losses * self._of(hosts)

    def unscaled(self, gradient: Tensor) -> Tensor:
        return gradient.to(self.scale.dtype) / self.scale.view(1, -1, *[1] * (gradient.ndim - 2))

    def unscale_(self, gradients: Sequence[tuple[Tensor, Tensor | None]], stepping: Tensor | None = None) -> Tensor:
        every = torch.arange(len(self.scale), device=self.scale.device)
        overflows = torch.zeros_like(self.scale)  # [A], number of gradients of each host that overflowed
        for gradient, hosts in gradients:
            gradient.div_(self._of(hosts).unsqueeze(1))
            overflows.index_add_(0, every if hosts is None else hosts, (~gradient.isfinite().all(1)).to(overflows.dtype))
        return overflows == 0 if stepping is None else stepping & (overflows == 0)

    def update_(self, stepping: Tensor | None) -> None:
        assert stepping is not None
        # Double the scale after enough good steps in a row, halve it after an overflow.
        self.skipped.add_(~stepping)
        self.good_steps.add_(1).mul_(stepping)
        is_due = self.good_steps >= _GROWTH_INTERVAL
        self.scale.mul_(torch.where(stepping, 1.0 + is_due, 0.5)).clamp_(_SMALLEST, _LARGEST)
        self.good_steps.mul_(~is_due)

    def reset_(self, rows: Tensor) -> None:
        self.scale.index_fill_(0, rows, _START)
        self.good_steps.index_fill_(0, rows, 0)
        self.skipped.index_fill_(0, rows, 0)

    def of(self, rows: Tensor) -> LossScales:
        return LossScales(*(tensor.index_select(0, rows) for tensor in (self.scale, self.good_steps, self.skipped)))

    def _of(self, hosts: Tensor | None) -> Tensor:
        return self.scale if hosts is None else self.scale.index_select(0, hosts)


_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


class RowOptimizer(ABC):
    """An optimiser of `flat` [N, P], in place. `lr` [N] may be written to between steps. Every tensor of `state` is [N] or [N, P]."""

    moments: ClassVar[tuple[str, ...]]

    def __init__(self, flat: Tensor, *, lr: float | Tensor, weight_decay: float = 0.0) -> None:
        self.flat = flat
        self.lr = torch.empty(len(flat), dtype=flat.dtype, device=flat.device)
        if isinstance(lr, Tensor):
            self.lr.copy_(lr)
        else:
            self.lr.fill_(lr)  # torch.tensor(lr) would be a copy to the device that waits for it
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

    def _advance(self, gradient: Tensor) -> None:
        self._step_along(gradient.add(self.flat, alpha=self.weight_decay) if self.weight_decay else gradient)

    def _step_along(self, gradient: Tensor) -> None:
        mean_correction, square_correction = (self._correction(beta) for beta in self.betas)
        mean = self.state["mean"].lerp_(gradient, 1 - self.betas[0])
        square = self.state["square"].mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        spread = square.sqrt().div_(square_correction.sqrt()).add_(self.eps)
        self.flat.addcdiv_(mean * (self.lr.unsqueeze(1) / mean_correction), spread, value=-1)

    def moves(self, gradient: Tensor, steps: int) -> Tensor:
        return gradient / (gradient.abs() + self.eps)  # the bias-corrected moments of a constant gradient are g and g²

    def _correction(self, beta: float) -> Tensor:
        """Return 1 - beta^steps [N, 1], computed without the cancellation that would cost float32 half of its digits."""
        if beta == 0:
            return torch.ones_like(self.lr).unsqueeze(1)
        return -torch.expm1(self.state["steps"].to(self.flat.dtype) * math.log(beta)).unsqueeze(1)


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
            self.flat.mul_(1 - self.lr.unsqueeze(1) * self.weight_decay)
        self._step_along(gradient)


@torch.no_grad()
def clip_rows_(gradient: Tensor, max_norm: float | Tensor) -> Tensor:
    """Scale every row of `gradient` [N, P] whose norm exceeds `max_norm` down to it, in place. Return the norms [N] before clipping.

    `max_norm` is one number or a tensor [N]. A row whose norm is not finite is not usable afterwards: leave it out of the step by
    `active=norms.isfinite()`.
    """
    norms: Tensor = torch.linalg.vector_norm(gradient, dim=1)
    gradient.mul_((max_norm / (norms + _CLIP_EPSILON)).clamp(max=1.0).unsqueeze(1))
    return norms
