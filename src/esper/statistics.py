"""Statistics: running moments of streams of tensors. Intervals and tests, which need no torch, are in `esper.intervals`, offered here too.

Shapes: ... = any leading dimensions, each entry is a row; *S = shape of one row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.intervals import (
    LEAST_COUNT as LEAST_COUNT,
    Interval as Interval,
    bootstrap_interval as bootstrap_interval,
    clustered_interval as clustered_interval,
    crossed_interval as crossed_interval,
    crossed_p_value as crossed_p_value,
    effective_count as effective_count,
    holm as holm,
    paired_interval as paired_interval,
    student_interval as student_interval,
    student_p_value as student_p_value,
    student_quantile as student_quantile,
    weighted_interval as weighted_interval,
    wilson_interval as wilson_interval,
)

# Moments


class Sums(NamedTuple):
    """Sufficient statistics of some rows."""

    weight: Tensor  # [] total weight
    mean: Tensor  # [*S]
    m2: Tensor  # [*S] weighted sum of squared distances to the mean


def sums_of(batch: Tensor, shape: Sequence[int], *, valid: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Sums:
    """Return the sums of a batch [..., *S]. Rows where `valid` [...] is false are ignored, even if they hold NaN."""
    leading = batch.shape[: batch.ndim - len(shape)]
    if batch.shape != (*leading, *shape):
        raise ValueError(f"the shape of a batch must end with that of its moments, {tuple(shape)}; got {tuple(batch.shape)}")
    if valid is not None and (valid.shape != leading or valid.dtype != torch.bool):
        raise ValueError(
            f"valid must be bool with one entry per row, {tuple(leading)}; got {valid.dtype} with the shape {tuple(valid.shape)}"
        )
    rows = batch.detach().to(dtype).reshape(-1, *shape)
    kept = torch.ones(len(rows), dtype=torch.bool, device=batch.device) if valid is None else valid.reshape(-1)
    weight = kept.sum().to(dtype)
    kept = kept.reshape(-1, *(1 for _ in shape))
    mean = rows.where(kept, 0).sum(0) / weight.clamp(min=1)
    m2 = (rows - mean).square().where(kept, 0).sum(0)
    return Sums(weight, mean, m2)


def combine(first: Sums, second: Sums) -> Sums:
    """Return the sums of both together, by the parallel formula of Chan et al., which avoids the cancellation of sums of squares."""
    weight = first.weight + second.weight
    share = torch.where(weight > 0, second.weight / weight, 0)  # share of the second in the total weight
    delta = second.mean - first.mean
    return Sums(weight, first.mean + delta * share, first.m2 + second.m2 + delta.square() * first.weight * share)


class Moments(ABC):
    """Mean and variance of a stream of rows. Updates never wait for the device, and never change tensors returned before.

    Before the first row, the mean is 0 and the variance 1, so normalising changes nothing. `absorb` takes sums that were computed
    elsewhere, such as those of all ranks together. Not thread-safe.
    """

    def __init__(self, shape: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.shape = tuple(shape)
        zeros = torch.zeros(self.shape, dtype=torch.float64, device=device)
        self.sums = Sums(zeros.new_zeros(()), zeros, zeros.clone())

    def update(self, batch: Tensor, valid: Tensor | None = None) -> None:
        """Add the rows of a batch [..., *S], or only those where `valid` [...] is true. An empty batch changes nothing."""
        self.absorb(sums_of(batch, self.shape, valid=valid, dtype=self.sums.mean.dtype))

    @abstractmethod
    def absorb(self, batch: Sums) -> None:
        """Add the sums of one batch, whose weight is its number of rows."""

    @property
    def mean(self) -> Tensor:
        return self.sums.mean  # [*S]

    @property
    def var(self) -> Tensor:
        """Population variance [*S]: m2 / weight, without Bessel's correction."""
        return torch.where(self.sums.weight > 0, self.sums.m2 / self.sums.weight, 1)

    @property
    def std(self) -> Tensor:
        return self.var.sqrt()  # [*S]

    def state_dict(self) -> dict[str, Tensor]:
        return self.sums._asdict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if tuple(state["mean"].shape) != self.shape:
            raise ValueError(f"the saved moments have the shape {tuple(state['mean'].shape)}, but these have {self.shape}")
        like = self.sums.mean
        self.sums = Sums(*(state[name].detach().to(like, copy=True) for name in Sums._fields))


class RunningMoments(Moments):
    """Moments in which all rows ever seen have the same weight.

    >>> moments = RunningMoments(shape=(2,))
    >>> moments.update(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    >>> moments.mean.tolist(), moments.var.tolist()
    ([2.0, 0.0], [1.0, 0.0])
    """

    @property
    def count(self) -> Tensor:
        return self.sums.weight  # []

    def absorb(self, batch: Sums) -> None:
        self.sums = combine(self.sums, batch)


class ExponentialMoments(Moments):
    """Exponential moving moments: each batch has the weight 1 - `momentum`, and multiplies the weight of all earlier ones by `momentum`.

    So about the last 1 / (1 - momentum) batches count, each with the same weight whatever its number of rows; empty batches do not count.
    Weights are divided by their sum, which corrects the start: after one batch, these are the moments of that batch.
    """

    def __init__(self, shape: Sequence[int], device: torch.device | str = "cpu", *, momentum: float = 0.99) -> None:
        super().__init__(shape, device)
        self.momentum = _checked_momentum(momentum)

    def absorb(self, batch: Sums) -> None:
        has_rows = batch.weight > 0
        keep = torch.where(has_rows, self.momentum, 1.0).to(batch.weight.dtype)
        scale = torch.where(has_rows, (1 - self.momentum) / batch.weight, 0)
        old = Sums(self.sums.weight * keep, self.sums.mean, self.sums.m2 * keep)
        self.sums = combine(old, Sums(batch.weight * scale, batch.mean, batch.m2 * scale))


class Ema:
    """Exponential moving average of numbers, with bias correction at the start; nan before the first number. Not thread-safe.

    >>> ema = Ema(momentum=0.9)
    >>> ema.update(2.0), ema.update(2.0)
    (2.0, 2.0)
    """

    def __init__(self, momentum: float = 0.99) -> None:
        self.momentum = _checked_momentum(momentum)
        self._weight = 0.0
        self._mean = math.nan

    @property
    def value(self) -> float:
        return self._mean

    def update(self, number: float) -> float:
        """Add a number and return the new mean. A number that is not finite makes the mean not finite from then on."""
        self._weight = self._weight * self.momentum + 1 - self.momentum
        share = (1 - self.momentum) / self._weight  # 1 for the first number
        self._mean = number if share == 1 else self._mean + share * (number - self._mean)
        return self._mean

    def state_dict(self) -> dict[str, float | None]:
        return {"weight": self._weight, "mean": self._mean if self._weight else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weight = float(state["weight"])
        self._mean = math.nan if state["mean"] is None else float(state["mean"])


def _checked_momentum(momentum: float) -> float:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is the share of the past that is kept and must be at least 0 and below 1; got {momentum}")
    return momentum


def explained_variance(predictions: Tensor, targets: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the share of the targets' variance that the predictions explain, at most 1, as float64 [] on the device.

    It is 0 if the targets do not vary or there are none, because a NaN would spoil averages over updates.
    """
    if predictions.shape != targets.shape:
        raise ValueError(f"give one prediction per target; got {tuple(predictions.shape)} for {tuple(targets.shape)}")
    target, residual = sums_of(targets, (), valid=valid), sums_of(targets - predictions, (), valid=valid)
    # Equal targets still differ from their mean by rounding errors; treat a variance of that size as 0.
    rounding = target.weight * (torch.finfo(targets.dtype).eps * target.mean).square()
    return torch.where(target.m2 > rounding, 1 - residual.m2 / target.m2, 0)
