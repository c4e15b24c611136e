"""A loss scale for float16, whose gradients vanish below 6e-8 and overflow above 65504.

The loss is multiplied by as large a scale as the gradients bear, and the gradients divided by it again before they are used. A step whose
gradients overflow is not taken, and the scale halved. All of this happens on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

START, LARGEST = 2.0**16, 2.0**32
PATIENCE = 2000  # steps without overflow before the scale is doubled


class NoLossScale:
    """What precisions with the range of float32 need: nothing."""

    def __init__(self, device: torch.device) -> None:
        self._never = torch.zeros((), dtype=torch.bool, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, gradient: Tensor) -> None:
        """Divides a gradient of the scaled loss by the scale."""

    def overflowed(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether the gradient is not finite because of the scale: [] bool."""
        return self._never

    def update(self, overflowed: Tensor, taken: Tensor) -> None:
        """Learns from one step."""

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        pass


class LossScale(NoLossScale):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.scale = torch.full((), START, device=device)
        self.good_steps = torch.zeros((), device=device)  # taken since the scale last changed

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def unscale_(self, gradient: Tensor) -> None:
        gradient.div_(self.scale)

    def overflowed(self, loss: Tensor, norm: Tensor) -> Tensor:
        """A scale of 1 is nobody's fault: what is not finite then never will be."""
        return torch.isfinite(loss) & ~torch.isfinite(norm) & (self.scale > 1)

    def update(self, overflowed: Tensor, taken: Tensor) -> None:
        good_steps = self.good_steps + taken
        has_patience = good_steps < PATIENCE
        grown = torch.where(has_patience, self.scale, (self.scale * 2).clamp_max(LARGEST))
        self.scale = torch.where(overflowed, self.scale / 2, grown)
        self.good_steps = good_steps * (has_patience & ~overflowed)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:  # a learner of another precision saved none
            self.scale.copy_(state["scale"])
            self.good_steps.copy_(state["good_steps"])
