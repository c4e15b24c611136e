"""Losses, samples, FLOPs and seconds of one run. Losses stay on the device and are read once per epoch."""

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
        self.steps = 0  # steps of this epoch, so far
        # The way to the present state, without the steps and the time that rollbacks undid.
        self._way_steps = 0
        self._way_began = time.perf_counter()  # moved forward by the time that a rollback undid
        self._steps_at = {0: 0}  # epoch -> steps on the way to its end
        self._seconds_at = {0: 0.0}  # epoch -> seconds on the way to its end, for the epochs of this session
        self._checks = checks_per_epoch
        self._losses: list[Tensor] = []  # losses of this epoch, on the device
        self._loaded = torch.empty(0)  # losses of this epoch from before the run was resumed
        self.samples_so_far = 0  # samples of this epoch, so far
        self._lap_samples = 0  # samples since the last call of `lap`
        self._lap_began = time.perf_counter()
        self.data_wait: float | None = None  # seconds spent waiting for data in this epoch; None: not measured
        self.skipped: Tensor | int = 0  # steps that the host's optimiser skipped since the last EpochEnded event; may be on the device
        self.step_seconds: float | None = None  # mean seconds per step of the last epoch; None: not measured
        self._watch: Stopwatch | None = None  # of the steps of this epoch; None: they are not timed
        self._untimed_steps = 0  # steps of this epoch before the clock was started, which happens after a resume

    def start_clock(self, device: torch.device) -> None:
        """Start to measure the training steps of an epoch, or the rest of it after a resume. `chunks` ends the measurement.

        It is made by events of the device where it has any, and needs no wait for it.
        """
        self._watch, self._untimed_steps, self.data_wait = Stopwatch(device), self.steps, 0.0
        self._watch.mark()

    def note_step(self, loss: Tensor, *, samples: int | None, flops_per_sample: int) -> None:
        """Note one training step. `loss` is not read before the end of the epoch."""
        self.steps += 1
        self._way_steps += 1
        self._losses.append(loss)
        if samples is not None:
            self.samples_so_far += samples
            self._lap_samples += samples
            self.flops += samples * flops_per_sample

    def note_steps(self, steps: int, *, samples: int, flops: int) -> None:
        """Note several steps at once. The caller keeps their losses."""
        self.steps += steps
        self._way_steps += steps
        self.samples_so_far += samples
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
        # Reading the losses waits until all steps are done, and with them an event that was recorded before. Without events, read the clock
        # after it.
        watch, self._watch = self._watch, None
        if watch is not None and watch.has_events:
            watch.mark()
        losses = self._read()
        if watch is not None:
            if not watch.has_events:
                watch.mark()
            timed_steps = self.steps - self._untimed_steps
            self.step_seconds = watch.seconds()[0] / timed_steps if timed_steps else None
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
        self.samples, self.samples_so_far = self.samples_so_far or None, 0
        self.forget_losses()

    def reach(self, epoch: int) -> None:
        """Note that the host is in the state of the end of this epoch now."""
        self._steps_at[epoch], self._seconds_at[epoch] = self._way_steps, time.perf_counter() - self._way_began

    def go_back(self, epoch: int) -> tuple[int | None, float | None]:
        """Note that the host is back in the state of the end of an epoch. Return the steps and seconds that this undid; None: not known."""
        steps, seconds = self._steps_at.get(epoch), self._seconds_at.get(epoch)
        lost_steps = None if steps is None else self._way_steps - steps
        lost_seconds = None if seconds is None else time.perf_counter() - self._way_began - seconds
        self._way_steps -= lost_steps or 0
        self._way_began += lost_seconds or 0.0
        return lost_steps, lost_seconds

    def take_skipped(self) -> int:
        """Return the number of skipped steps and reset it."""
        taken, self.skipped = int(self.skipped), 0
        return taken

    def lap(self) -> tuple[float, int]:
        """Return the seconds and samples since the last call."""
        now = time.perf_counter()
        seconds, self._lap_began = now - self._lap_began, now
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
            "samples": self.samples_so_far,
            "skipped": int(self.skipped),
            "way_steps": self._way_steps,
            "steps_at": [[epoch, steps] for epoch, steps in self._steps_at.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.train_losses, self.val_losses = list(state["train_losses"]), list(state["val_losses"])
        self.flops, self.length, self.steps, self.samples_so_far = state["flops"], state["length"], state["steps"], state["samples"]
        self.samples = state["samples_per_epoch"]
        self.skipped = state["skipped"]
        self._losses, self._loaded = [], state["losses"].cpu()
        self._lap_began = time.perf_counter()
        self._way_steps = state["way_steps"]
        self._steps_at, self._seconds_at = {epoch: steps for epoch, steps in state["steps_at"]}, {}


def chunk_means(losses: Tensor, checks: int) -> Tensor:
    """Split losses [T, ...] into `checks` consecutive parts and return their means [min(checks, T), ...].

    >>> chunk_means(torch.tensor([1.0, 2.0, 3.0, 5.0]), 2).tolist()
    [1.5, 4.0]
    """
    return torch.stack([part.mean(dim=0) for part in losses.tensor_split(min(len(losses), checks))])
