"""History of a growing run: losses, samples, FLOPs and seconds. Losses stay on the device and are read once per epoch."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from esper.devices import Stopwatch
from esper.growth.config import GrowthError


class History:
    """Losses, counts and times of one run. `checks_per_epoch` is the number of chunks into which the losses of an epoch are split."""

    def __init__(self, checks_per_epoch: int) -> None:
        self.train_losses: list[float] = []  # mean per epoch
        self.val_losses: list[float] = []
        self.flops = 0  # spent so far, over the steps whose number of samples is known
        self.length: int | None = None  # steps in the last epoch; None before the end of the first
        self.samples: int | None = None  # samples in the last epoch; None if unknown
        self.steps = 0  # of this epoch, so far
        self._checks = checks_per_epoch
        self._losses: list[Tensor] = []  # losses of this epoch, on the device
        self._loaded = torch.empty(0)  # losses of this epoch from before the run was resumed
        self._samples = 0  # of this epoch, so far
        self._lap_samples = 0  # since the last call of `lap`
        self._began = time.perf_counter()
        self.data_wait: float | None = None  # seconds spent waiting for data in this epoch; None: not measured
        self.skipped = 0  # steps that the host's optimiser skipped since the last report of an epoch
        self._watch: Stopwatch | None = None  # measures the training steps of this epoch
        self._watched_steps = 0

    def watch(self, device: torch.device) -> None:
        """Start to measure the training steps of an epoch, or the rest of it after a resume."""
        # Count down by the steps that were taken before; `watched` adds all steps of the epoch.
        self._watch, self._watched_steps, self.data_wait = Stopwatch(device), -self.steps, 0.0
        self._watch.mark()

    def watched(self) -> None:
        """Stop the measurement: the last training step of the epoch was launched."""
        if self._watch is not None:
            self._watch.mark()
            self._watched_steps += self.steps

    def step_seconds(self) -> float | None:
        """Return the mean seconds per measured step; None without a measurement. Waits until the device has finished the last step."""
        if self._watch is None or self._watched_steps < 1:
            return None
        return sum(self._watch.seconds()) / self._watched_steps

    def note_step(self, loss: Tensor, *, samples: int | None, flops_per_sample: int) -> None:
        """Note one training step. `loss` is not read before the end of the epoch."""
        self.steps += 1
        self._losses.append(loss)
        if samples is not None:
            self._samples += samples
            self._lap_samples += samples
            self.flops += samples * flops_per_sample

    def note_steps(self, steps: int, *, samples: int, flops: int) -> None:
        """Note several steps at once, whose losses are kept elsewhere."""
        self.steps += steps
        self._samples += samples
        self._lap_samples += samples
        self.flops += flops

    def forget_losses(self) -> None:
        """Drop the losses of this epoch. After a rollback, they say nothing about the restored state."""
        self._losses, self._loaded = [], torch.empty(0)

    def chunks(self) -> list[float]:
        """Return the mean training losses of the chunks of this epoch; empty if all losses were dropped."""
        if not self.steps:
            raise GrowthError(
                "an epoch is over without a single after_step: the training loader yields nothing, or after_step is not called"
            )
        losses = self._read()
        means: list[float] = chunk_means(losses, self._checks).tolist() if len(losses) else []
        return means

    def _read(self) -> Tensor:
        """Return the losses of this epoch [steps] on the CPU."""
        if not self._losses:
            return self._loaded
        # Keep float64 losses exact, because the scale of all losses is derived from them.
        losses = torch.stack([loss if loss.dtype == torch.float64 else loss.float() for loss in self._losses])
        return torch.cat([self._loaded.double(), losses.cpu().double()])

    def end_epoch(self, chunks: list[float], val_loss: float) -> None:
        """Append the losses of an epoch and start the next. Without chunks, the previous training loss is repeated."""
        self.train_losses.append(sum(chunks) / len(chunks) if chunks else (self.train_losses or [val_loss])[-1])
        self.val_losses.append(val_loss)
        self.length, self.steps = self.steps, 0
        self.samples, self._samples = self._samples or None, 0
        self.forget_losses()

    def take_skipped(self) -> int:
        """Return the number of skipped steps and reset it."""
        taken, self.skipped = self.skipped, 0
        return taken

    def lap(self) -> tuple[float, int]:
        """Return the seconds and samples since the last call."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        samples, self._lap_samples = self._lap_samples, 0
        return seconds, samples

    def state_dict(self) -> dict[str, Any]:
        return {
            "train_losses": list(self.train_losses),
            "val_losses": list(self.val_losses),
            "flops": self.flops,
            "length": self.length,
            "samples_per_epoch": self.samples,
            "steps": self.steps,
            "losses": self._read(),
            "samples": self._samples,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.train_losses, self.val_losses = list(state["train_losses"]), list(state["val_losses"])
        self.flops, self.length, self.steps, self._samples = state["flops"], state["length"], state["steps"], state["samples"]
        self.samples = state["samples_per_epoch"]
        self.skipped = state.get("skipped", 0)  # missing in files of earlier versions
        self._losses, self._loaded = [], state["losses"].cpu()
        self._began = time.perf_counter()


def chunk_means(losses: Tensor, checks: int) -> Tensor:
    """Split losses [T, ...] into `checks` consecutive parts and return their means [min(checks, T), ...].

    >>> chunk_means(torch.tensor([1.0, 2.0, 3.0, 5.0]), 2).tolist()
    [1.5, 4.0]
    """
    return torch.stack([part.mean(dim=0) for part in losses.tensor_split(min(len(losses), checks))])
