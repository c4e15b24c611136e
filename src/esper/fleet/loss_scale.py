"""A loss scale for every host, for float16, whose gradients vanish below 6e-8 and overflow above 65504.

The loss of a host is multiplied by as large a scale as its gradients bear, and they are divided by it again before they are used. A host
whose gradients overflow, or those of one of its seeds, does not take the step and halves its scale; no other host notices. The numbers are
those of torch.amp.GradScaler. All of this happens on the device, in tensors that stay where they are.

Shapes: N = hosts, A = those of them that train, R = some of those, P = weights of one.
"""

from __future__ import annotations

from collections.abc import Sequence

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
