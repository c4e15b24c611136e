"""A loss scale for every host, for float16, whose gradients vanish below 6e-8 and overflow above 65504.

The loss of a host is multiplied by as large a scale as its gradients bear, and they are divided by it again before they are used. A host
whose gradients overflow, or those of one of its seeds, does not take the step and halves its scale; no other host notices. The numbers are
those of torch.amp.GradScaler. All of this happens on the device, in tensors that stay where they are.

Shapes: N = hosts, A = those of them that train, R = some of those, P = weights of one.

Optimisers over flat rows: what torch.optim does to N hosts one after another, done to all of them at once.

Every row has a learning rate, moments and a count of its steps, so a host that starts late, or is left out of a step, is where it would be
had it been trained alone.

Shapes: N = rows, P = parameters of one host.
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
    """What precisions with the range of float32 need: nothing."""

    def __init__(self, skipped: Tensor) -> None:
        self.skipped = skipped  # [N], steps of each host

    @property
    def tensors(self) -> dict[str, Tensor]:
        """A row for each host."""
        return {}

    def scaled(self, losses: Tensor, hosts: Tensor | None = None) -> Tensor:
        """Losses [R] of these hosts [R]; None: of all, in order."""
        return losses

    def unscaled(self, gradient: Tensor) -> Tensor:
        """Of what flows in all hosts, [B, A, ...]."""
        return gradient

    def unscale_(self, gradients: Sequence[tuple[Tensor, Tensor | None]], stepping: Tensor | None = None) -> Tensor | None:
        """Divides gradients [R, P] of these hosts [R]. Gives who may step by them [A]: those of `stepping` for whom all are finite.

        None: everybody, whatever the gradients.
        """
        return None

    def update_(self, stepping: Tensor | None) -> None:
        """Learns from one step."""

    def reset_(self, rows: Tensor) -> None:
        """These hosts begin anew."""

    def of(self, rows: Tensor) -> NoLossScales:
        """A copy of these rows."""
        return self


class LossScales(NoLossScales):
    def __init__(self, scale: Tensor, good_steps: Tensor, skipped: Tensor) -> None:
        super().__init__(skipped)
        self.scale = scale  # [N]
        self.good_steps = good_steps  # [N], since the scale last changed

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
        overflows = torch.zeros_like(self.scale)  # how many of each host
        for gradient, hosts in gradients:
            gradient.div_(self._of(hosts).unsqueeze(1))
            overflows.index_add_(0, every if hosts is None else hosts, (~gradient.isfinite().all(1)).to(overflows.dtype))
        return overflows == 0 if stepping is None else stepping & (overflows == 0)

    def update_(self, stepping: Tensor | None) -> None:
        assert stepping is not None
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
