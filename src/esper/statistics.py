"""Statistics: running moments of streams of tensors (torch), and confidence intervals and tests for comparing runs (numpy).

Shapes: ... = any leading dimensions, each entry is a row; *S = shape of one row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Floats = NDArray[np.float64]
EXACT_PAIRS = 12  # up to this many pairs, all sign flips are enumerated instead of sampled
LEAST_COUNT = 1.5  # effective number of values below which an interval is infinite
RESAMPLED_AT_ONCE = 1 << 20  # numbers that a bootstrap or permutation test draws at once; bounds its memory


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


# Intervals


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.4g} [{self.low:.4g}, {self.high:.4g}]"


def bootstrap_interval(values: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, rng: np.random.Generator) -> Interval:
    """Return the BCa bootstrap interval of the mean: it assumes no distribution and corrects for bias and skew.

    Like every bootstrap it is too narrow for a handful of values; use `student_interval` for those.
    """
    sample = _sample(values)
    estimate = float(sample.mean())
    if np.ptp(sample) == 0:
        return Interval(estimate, estimate, estimate)
    means = _in_chunks(lambda rows: rng.choice(sample, size=(rows, len(sample))).mean(axis=1), resamples, width=len(sample))
    normal = NormalDist()
    # BCa: shift the percentiles of the resampled means by the bias and the skew of the sample.
    below = (np.count_nonzero(means < estimate) + 0.5 * np.count_nonzero(means == estimate)) / resamples
    bias = normal.inv_cdf(min(max(below, 1 / resamples), 1 - 1 / resamples))
    deviation = sample - estimate
    skew = float((deviation**3).sum() / (6 * (deviation**2).sum() ** 1.5))  # acceleration of the jackknife, in closed form for a mean
    ends = []
    for tail in ((1 - _confidence(confidence)) / 2, (1 + confidence) / 2):
        shifted = bias + normal.inv_cdf(tail)
        ends.append(normal.cdf(bias + shifted / max(1 - skew * shifted, 1e-9)))
    low, high = np.quantile(means, ends)
    return Interval(estimate, float(low), float(high))


def student_interval(values: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Return Student's t interval of the mean. It is exact for normal values, and the one to use for a handful of seeds."""
    sample = _sample(values)
    estimate, error = float(sample.mean()), float(sample.std(ddof=1)) / math.sqrt(len(sample))
    reach = student_quantile((1 + _confidence(confidence)) / 2, len(sample) - 1) * error
    return Interval(estimate, estimate - reach, estimate + reach)


def weighted_interval(values: ArrayLike, weights: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Return the interval of a weighted mean, for example of means over batches of different sizes.

    It is Student's interval for the effective number of values, (Σw)² / Σw². If that is hardly more than one, the interval is infinite.

    >>> print(weighted_interval([1.0, 2.0, 4.0], [8, 8, 8]), "=", student_interval([1.0, 2.0, 4.0]))
    2.333 [-1.461, 6.128] = 2.333 [-1.461, 6.128]
    >>> print(weighted_interval([1.0, 2.0], [160, 1]))
    1.006 [-inf, inf]
    """
    sample, weight = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if sample.ndim != 1 or not len(sample) or sample.shape != weight.shape or not (np.isfinite(sample).all() and (weight > 0).all()):
        raise ValueError(f"an interval needs finite numbers and a weight above 0 for each; got {values!r} with {weights!r}")
    share = weight / weight.sum()
    estimate, count = float(share @ sample), effective_count(weights)
    if count < LEAST_COUNT:
        return Interval(estimate, -math.inf, math.inf)
    error = math.sqrt(float(share @ (sample - estimate) ** 2) / (count - 1))
    reach = student_quantile((1 + _confidence(confidence)) / 2, count - 1) * error
    return Interval(estimate, estimate - reach, estimate + reach)


def effective_count(weights: ArrayLike) -> float:
    """Return the number of equally weighted values that are as informative as values with these weights.

    >>> effective_count([3, 3, 3]), round(effective_count([160, 1]), 3)
    (3.0, 1.012)
    """
    weight = np.asarray(weights, dtype=np.float64)
    return float(weight.sum() ** 2 / (weight @ weight))


def paired_interval(
    ours: ArrayLike, theirs: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, rng: np.random.Generator
) -> Interval:
    """Return the bootstrap interval of the mean of the paired differences `ours - theirs`."""
    return bootstrap_interval(_differences(ours, theirs), confidence=confidence, resamples=resamples, rng=rng)


def wilson_interval(successes: float, trials: float, *, confidence: float = 0.95) -> Interval:
    """Return Wilson's interval of a success rate. It stays inside [0, 1] and is valid even at rates of 0 and 1.

    A trial may count as half a success, such as a draw. Such trials vary less, so the interval is then a little too wide.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"a success rate needs at least one trial and 0 <= successes <= trials; got {successes} of {trials}")
    z, rate = NormalDist().inv_cdf((1 + _confidence(confidence)) / 2), successes / trials
    center = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    reach = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return Interval(rate, min(max(center - reach, 0.0), rate), max(min(center + reach, 1.0), rate))


def clustered_interval(rates: ArrayLike, *, size: int, confidence: float = 0.95) -> Interval:
    """Return the interval of a success rate whose trials come in clusters of `size`, such as battles on one map.

    `rates` are the success rates of the clusters. The result is Wilson's interval for the effective number of independent trials, estimated
    from the spread of the clusters: at most all trials, and fewer if the trials of a cluster are alike. With few clusters their spread is
    uncertain, so that number is reduced by the squared ratio of the normal to Student's quantile (Korn and Graubard). One cluster gives
    [0, 1].

    >>> print(clustered_interval([1.0, 0.0] * 16, size=2), "is wider than", wilson_interval(32, 64))
    0.5 [0.328, 0.672] is wider than 0.5 [0.381, 0.619]
    """
    sample = np.asarray(rates, dtype=np.float64)
    if sample.ndim != 1 or not len(sample) or not ((sample >= 0) & (sample <= 1)).all():
        raise ValueError(f"an interval over clusters needs a list of rates from 0 to 1; got {rates!r}")
    rate, clusters = float(sample.mean()), len(sample)
    if clusters < 2:
        return Interval(rate, 0.0, 1.0)
    tail, variance = (1 + _confidence(confidence)) / 2, float(sample.var(ddof=1)) / clusters
    # If all trials succeeded or all failed, the spread does not show whether the trials of a cluster are alike: count each cluster as one.
    trials = rate * (1 - rate) / variance if variance > 0 else clusters * (size if 0 < rate < 1 else 1)
    trials = min(trials, clusters * size) * (NormalDist().inv_cdf(tail) / student_quantile(tail, clusters - 1)) ** 2
    return wilson_interval(rate * trials, trials, confidence=confidence)


@lru_cache(maxsize=1024)  # callers ask for the same few values again and again
def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution with `freedom` degrees of freedom."""
    normal = NormalDist().inv_cdf(probability)
    if freedom > 1_000_000 or normal == 0:
        return normal
    if normal < 0:
        return -student_quantile(1 - probability, freedom)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    nodes, weights = np.polynomial.legendre.leggauss(64)
    # With t = √freedom · tan(angle), the density becomes scale · cos(angle)^(freedom - 1), which 64 Gauss-Legendre nodes integrate. The
    # normal quantile is below the wanted one and the distribution is concave from there on, so Newton's method approaches it from below.
    quantile = normal
    for _ in range(200):
        angle = math.atan(quantile / math.sqrt(freedom))
        reached = 0.5 + scale * float(weights @ np.cos(angle * (nodes + 1) / 2) ** (freedom - 1)) * angle / 2
        density = scale / math.sqrt(freedom) * math.cos(angle) ** (freedom + 1)
        step = (probability - reached) / density
        quantile += step
        if abs(step) <= 1e-12 * quantile:
            break
    return quantile


# Tests


def paired_p_value(ours: ArrayLike, theirs: ArrayLike, *, resamples: int = 10_000, rng: np.random.Generator) -> float:
    """Return the two-sided p-value of the hypothesis "neither is better", by a sign-flip permutation test.

    It is the share of sign flips of the differences that give a mean at least as far from 0. Up to 12 pairs all flips are counted, so it is
    exact and at least 2 / 2ⁿ (five pairs cannot get below 0.0625). Above, flips are sampled.
    """
    differences = _differences(ours, theirs)
    pairs = len(differences)

    def totals(flips: NDArray[Any]) -> Floats:  # [rows, pairs] of 0 and 1
        found: Floats = np.abs((1 - 2 * flips) @ differences)
        return found

    at_least = abs(differences.sum()) - 1e-12 * np.abs(differences).sum()  # tolerance for the rounding of sums in another order
    if pairs <= EXACT_PAIRS:
        every = np.arange(2**pairs)[:, None] >> np.arange(pairs) & 1
        return float((totals(every) >= at_least).mean())
    sampled = _in_chunks(lambda rows: totals(rng.integers(2, size=(rows, pairs))), resamples, width=pairs)
    return float((1 + np.count_nonzero(sampled >= at_least)) / (1 + resamples))


def holm(p_values: ArrayLike) -> Floats:
    """Return Holm's adjusted p-values, in the given order. Rejecting those below a level keeps the family-wise error rate below it."""
    given = np.asarray(p_values, dtype=np.float64)
    if given.ndim != 1 or not ((given >= 0) & (given <= 1)).all():
        raise ValueError(f"p-values are a list of numbers in [0, 1]; got {p_values!r}")
    order = np.argsort(given, kind="stable")
    adjusted = np.empty_like(given)
    adjusted[order] = np.minimum(np.maximum.accumulate(given[order] * np.arange(len(given), 0, -1)), 1)
    return adjusted


def _sample(values: ArrayLike) -> Floats:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or len(sample) < 2 or not np.isfinite(sample).all():
        raise ValueError(f"an interval needs a list of at least two finite numbers; got {values!r}")
    return sample


def _differences(ours: ArrayLike, theirs: ArrayLike) -> Floats:
    first, second = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if first.shape != second.shape:
        raise ValueError(f"pairs need two lists of the same length; got shapes {first.shape} and {second.shape}")
    return _sample(first - second)


def _confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence must be between 0 and 1, such as 0.95; got {confidence}")
    return confidence


def _in_chunks(draw: Callable[[int], Floats], count: int, *, width: int) -> Floats:
    """Return `count` results of `draw(rows)`, which draws `width` numbers per row. One call draws at most RESAMPLED_AT_ONCE numbers."""
    if count < 1:
        raise ValueError(f"at least one resample is needed; got {count}")
    rows = max(1, RESAMPLED_AT_ONCE // width)
    return np.concatenate([draw(min(rows, count - done)) for done in range(0, count, rows)])
