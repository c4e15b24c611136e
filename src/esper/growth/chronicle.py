"""The chronicle of a growing run: losses, samples, FLOPs and seconds, gathered on the device and read once an epoch."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from esper.growth.errors import GrowthError


class Chronicle:
    def __init__(self, checks_per_epoch: int) -> None:
        self.train_losses: list[float] = []  # mean per epoch
        self.val_losses: list[float] = []
        self.flops = 0  # spent so far, where the numbers of samples were told
        self.length: int | None = None  # steps in an epoch, once that is known
        self._checks = checks_per_epoch
        self._losses: list[Tensor] = []  # of this epoch, on the device
        self._samples = 0
        self._began = time.perf_counter()

    @property
    def steps(self) -> int:
        """Of this epoch, so far."""
        return len(self._losses)

    def note_step(self, loss: Tensor, *, samples: int | None, flops_per_sample: int) -> None:
        self._losses.append(loss)
        if samples is not None:
            self._samples += samples
            self.flops += samples * flops_per_sample

    def chunks(self) -> list[float]:
        """Means of the epoch's training losses, chunk by chunk."""
        if not self._losses:
            raise GrowthError(
                "an epoch is over without a single after_step: the training loader yields nothing, or after_step is not called"
            )
        losses = torch.stack([loss.float() for loss in self._losses]).cpu()
        return [float(part.mean()) for part in losses.tensor_split(min(len(losses), self._checks))]

    def end_epoch(self, chunks: list[float], val_loss: float) -> None:
        self.train_losses.append(sum(chunks) / len(chunks))
        self.val_losses.append(val_loss)
        self.length = len(self._losses)
        self._losses = []

    def lap(self) -> tuple[float, int]:
        """Seconds and samples since the last lap."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        samples, self._samples = self._samples, 0
        return seconds, samples

    def state_dict(self) -> dict[str, Any]:
        return {
            "train_losses": list(self.train_losses),
            "val_losses": list(self.val_losses),
            "flops": self.flops,
            "length": self.length,
            "losses": [float(loss) for loss in self._losses],
            "samples": self._samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.train_losses, self.val_losses = list(state["train_losses"]), list(state["val_losses"])
        self.flops, self.length, self._samples = state["flops"], state["length"], state["samples"]
        self._losses = [torch.tensor(loss) for loss in state["losses"]]
