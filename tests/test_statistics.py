"""Statistics: moments of a stream equal those of all its rows, and intervals and tests agree with the textbooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from esper.statistics import (
    Ema,
    ExponentialMoments,
    Interval,
    Moments,
    RunningMoments,
    bootstrap_interval,
    clustered_interval,
    combine,
    crossed_interval,
    crossed_p_value,
    explained_variance,
    holm,
    paired_interval,
    student_interval,
    student_p_value,
    student_quantile,
    sums_of,
    wilson_interval,
)

SHAPES = [(), (3,), (2, 2)]


def rows(count: int, shape: tuple[int, ...] = (3,), *, seed: int = 0, offset: float = 0.0) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset


def assert_moments(moments: Moments, expected: Tensor) -> None:
    torch.testing.assert_close(moments.mean, expected.mean(0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(moments.var, expected.var(0, correction=0), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(moments.std, moments.var.sqrt())


# Moments


@pytest.mark.slow
@given(
    shape=st.sampled_from(SHAPES),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 99),
    offset=st.sampled_from([0.0, 1e5]),
)
def test_rows_in_any_split_give_the_moments_of_one_batch(shape: tuple[int, ...], sizes: list[int], seed: int, offset: float) -> None:
    everything = rows(sum(sizes), shape, seed=seed, offset=offset)
    moments = RunningMoments(shape)
    for batch in everything.split(sizes):
        moments.update(batch)
    assert_moments(moments, everything)
    assert moments.count == sum(sizes)


@pytest.mark.slow
@given(mask=st.lists(st.booleans(), min_size=1, max_size=12), shape=st.sampled_from(SHAPES), seed=st.integers(0, 99))
@pytest.mark.parametrize("kind", [RunningMoments, ExponentialMoments])
def test_a_mask_equals_filtering(kind: type[Moments], mask: list[bool], shape: tuple[int, ...], seed: int) -> None:
    valid = torch.tensor(mask)
    batch = rows(len(mask), shape, seed=seed)
    filtered = batch[valid]
    batch[~valid] = math.nan
    first, second = kind(shape), kind(shape)
    for moments, masked in ((first, True), (second, False)):
        moments.update(rows(4, shape, seed=seed + 1))
        moments.update(batch, valid) if masked else moments.update(filtered)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [RunningMoments, ExponentialMoments])
def test_a_batch_without_rows_changes_nothing(kind: type[Moments]) -> None:
    moments = kind((3,))
    for _ in range(2):
        before = {name: value.clone() for name, value in moments.state_dict().items()}
        moments.update(torch.zeros(0, 3))
        moments.update(torch.full((4, 3), math.nan), torch.zeros(4, dtype=torch.bool))
        torch.testing.assert_close(moments.state_dict(), before, rtol=0, atol=0)
        moments.update(rows(5))


@pytest.mark.parametrize("kind", [RunningMoments, ExponentialMoments])
def test_before_any_row_normalising_changes_nothing(kind: type[Moments]) -> None:
    assert kind((2,)).mean.tolist() == [0, 0]
    assert kind((2,)).var.tolist() == [1, 1]


def test_all_leading_dimensions_are_rows() -> None:
    moments = RunningMoments((3,))
    batch = rows(20).reshape(4, 5, 3)
    valid = torch.arange(20).reshape(4, 5) % 3 > 0
    moments.update(batch, valid)
    assert_moments(moments, batch[valid])


def test_float32_rows_far_from_zero_keep_their_variance() -> None:
    batch = rows(10_000, (), offset=3000.0).float()
    moments = RunningMoments(())
    for part in batch.split(100):
        moments.update(part)
    assert_moments(moments, batch.double())


@pytest.mark.parametrize("kind", [RunningMoments, ExponentialMoments])
def test_an_update_reads_nothing_back_from_the_device(kind: type[Moments]) -> None:
    moments = kind((3,), "meta")  # a device without values: reading one fails
    moments.update(torch.zeros(4, 3, device="meta"), torch.ones(4, dtype=torch.bool, device="meta"))
    assert moments.std.device.type == "meta"


@pytest.mark.parametrize("kind", [RunningMoments, ExponentialMoments])
def test_saved_moments_continue_exactly_and_do_not_move(kind: type[Moments]) -> None:
    moments, loaded = kind((3,)), kind((3,))
    moments.update(rows(5))
    saved = moments.state_dict()
    moments.update(rows(6, seed=1))
    loaded.load_state_dict(saved)
    loaded.update(rows(6, seed=1))
    torch.testing.assert_close(loaded.state_dict(), moments.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"shape \(3,\), but these have \(2,\)"):
        kind((2,)).load_state_dict(saved)


def test_exponential_moments_are_the_weighted_moments_of_their_batches() -> None:
    momentum, batches = 0.7, [rows(count, (), seed=count) for count in (3, 1, 8, 2)]
    moments = ExponentialMoments((), momentum=momentum)
    for batch in batches:
        moments.update(batch)
    weights = torch.cat([torch.full_like(batch, momentum ** (3 - age) / len(batch)) for age, batch in enumerate(batches)])
    weights /= weights.sum()
    everything = torch.cat(batches)
    mean = (weights * everything).sum()
    torch.testing.assert_close(moments.mean, mean)
    torch.testing.assert_close(moments.var, (weights * (everything - mean).square()).sum())


def test_exponential_moments_of_one_batch_are_that_batch() -> None:
    moments = ExponentialMoments((3,), momentum=0.99)
    moments.update(rows(5))
    assert_moments(moments, rows(5))


def test_exponential_moments_follow_a_shift_that_running_ones_average() -> None:
    running, exponential = RunningMoments(()), ExponentialMoments((), momentum=0.5)
    for level in (0.0,) * 50 + (1.0,) * 50:
        running.update(torch.full((4,), level))
        exponential.update(torch.full((4,), level))
    assert running.mean.item() == pytest.approx(0.5)
    assert exponential.mean.item() == pytest.approx(1.0)


def test_sums_of_two_ranks_combine_to_those_of_the_whole_batch() -> None:
    whole = rows(9)
    together = combine(sums_of(whole[:4], (3,)), sums_of(whole[4:], (3,)))
    torch.testing.assert_close(tuple(together), tuple(sums_of(whole, (3,))))


def test_a_batch_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"end with that of its moments, \(3,\)"):
        RunningMoments((3,)).update(torch.zeros(5, 2))
    with pytest.raises(ValueError, match="one entry per row"):
        RunningMoments((3,)).update(torch.zeros(5, 3), torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"below 1; got 1\.0"):
        ExponentialMoments((), momentum=1.0)


def test_an_ema_is_the_weighted_mean_and_continues_after_loading() -> None:
    ema, loaded = Ema(momentum=0.8), Ema(momentum=0.8)
    assert math.isnan(ema.value)
    loaded.load_state_dict(ema.state_dict())
    assert math.isnan(loaded.value)
    numbers = [3.0, -1.0, 4.0, 1.0]
    for number in numbers:
        ema.update(number)
    weights = [0.8**age for age in (3, 2, 1, 0)]
    assert ema.value == pytest.approx(np.average(numbers, weights=weights))
    loaded.load_state_dict(ema.state_dict())
    assert loaded.update(2.0) == ema.update(2.0)


def test_explained_variance_knows_perfect_useless_and_harmful_predictions() -> None:
    targets = rows(1000, ())
    assert explained_variance(targets, targets) == 1
    assert explained_variance(targets + 5, targets) == pytest.approx(1)  # a constant error is no variance
    assert explained_variance(torch.zeros_like(targets), targets) == pytest.approx(0)
    assert explained_variance(-targets, targets) == pytest.approx(-3)


def test_explained_variance_of_constant_targets_is_zero() -> None:
    targets = torch.full((1000,), 0.1)
    assert explained_variance(targets, targets) == 0
    assert explained_variance(rows(1000, ()).float(), targets) == 0
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0


def test_explained_variance_ignores_invalid_rows() -> None:
    targets, valid = rows(10, ()), torch.arange(10) < 6
    predictions = targets * 0.5
    expected = explained_variance(predictions[valid], targets[valid])
    predictions[~valid] = math.nan
    torch.testing.assert_close(explained_variance(predictions, targets, valid), expected)
    with pytest.raises(ValueError, match="one prediction per target"):
        explained_variance(targets[:, None], targets)


# Intervals


def test_student_quantiles_are_those_of_the_tables() -> None:
    table = {
        (0.975, 1): 12.706205, (0.975, 2): 4.302653, (0.975, 4): 2.776445, (0.975, 9): 2.262157, (0.975, 30): 2.042272,
        (0.95, 5): 2.015048, (0.995, 10): 3.169273, (0.9995, 1): 636.619249, (0.975, 120): 1.979930, (0.75, 3): 0.764892,
    }  # fmt: skip
    for (probability, freedom), expected in table.items():
        assert student_quantile(probability, freedom) == pytest.approx(expected, rel=1e-6)
        assert student_quantile(1 - probability, freedom) == pytest.approx(-expected, rel=1e-6)
    assert student_quantile(0.5, 3) == 0
    assert student_quantile(0.975, 100_000) == pytest.approx(1.959988, rel=1e-6)
    assert student_quantile(0.975, 10**9) == pytest.approx(1.959964, rel=1e-6)


def bounds(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high


def test_a_student_interval_by_hand() -> None:
    interval = student_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    reach = 2.776445 * math.sqrt(2.5 / 5)
    assert (interval.low, interval.estimate, interval.high) == pytest.approx((3 - reach, 3, 3 + reach), rel=1e-6)


def coverage(interval_of: Callable[..., Interval], draw: Callable[..., np.ndarray], truth: float, *, trials: int = 300) -> float:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(trials):
        interval = interval_of(draw(rng), rng)
        assert interval.low <= interval.estimate <= interval.high
        hits += interval.low <= truth <= interval.high
    return hits / trials


@pytest.mark.slow
def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    def bootstrapped(sample: np.ndarray, rng: np.random.Generator) -> Interval:
        return bootstrap_interval(sample, resamples=500, confidence=0.9, rng=rng)

    assert 0.84 < coverage(bootstrapped, lambda rng: rng.normal(3, 2, size=30), 3) < 0.95
    assert 0.82 < coverage(bootstrapped, lambda rng: rng.exponential(1, size=40), 1) < 0.95
    assert 0.85 < coverage(lambda sample, _: student_interval(sample, confidence=0.9), lambda rng: rng.normal(size=5), 0) < 0.95


def test_a_paired_interval_ignores_shared_variation() -> None:
    rng = np.random.default_rng(0)
    luck = rng.normal(0, 100, size=40)
    interval = paired_interval(luck + rng.normal(1, 0.1, size=40), luck, rng=rng)
    assert 0.9 < interval.low < interval.estimate < interval.high < 1.1


def test_a_bootstrap_is_the_same_for_the_same_stream_and_leans_with_the_skew() -> None:
    sample = np.random.default_rng(0).exponential(size=25)
    first, second = (bootstrap_interval(sample, rng=np.random.default_rng(3)) for _ in range(2))
    assert first == second
    assert first.high - first.estimate > first.estimate - first.low


def test_values_that_do_not_vary_have_an_interval_without_width() -> None:
    interval = bootstrap_interval([2.0, 2.0, 2.0], rng=np.random.default_rng(0))
    assert (interval.low, interval.high) == (2, 2)
    assert str(interval) == "2 [2, 2]"


def test_a_bootstrap_of_many_values_agrees_with_the_normal_interval() -> None:
    sample = np.random.default_rng(0).normal(size=5000)  # more numbers than are drawn in one go
    interval = bootstrap_interval(sample, resamples=1000, rng=np.random.default_rng(1))
    reach = 1.96 * sample.std() / math.sqrt(len(sample))
    assert interval.low == pytest.approx(sample.mean() - reach, abs=0.1 * reach)
    assert interval.high == pytest.approx(sample.mean() + reach, abs=0.1 * reach)


def test_wilson_intervals_by_hand() -> None:
    half = wilson_interval(5, 10)
    assert (half.low, half.estimate, half.high) == pytest.approx((0.236593, 0.5, 0.763407), abs=1e-6)
    none = wilson_interval(0, 10)
    assert (none.low, none.estimate, none.high) == pytest.approx((0, 0, 0.277533), abs=1e-6)
    every = wilson_interval(10, 10)
    assert (every.low, every.high) == pytest.approx((1 - 0.277533, 1), abs=1e-6)


def test_half_a_success_lies_between_its_neighbours() -> None:
    fewer, between, more = wilson_interval(7, 10), wilson_interval(7.5, 10), wilson_interval(8, 10)
    assert between.estimate == 0.75
    assert fewer.low < between.low < more.low
    assert fewer.high < between.high < more.high


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 2)])
def test_impossible_success_rates_are_refused(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match=f"got {successes} of {trials}"):
        wilson_interval(successes, trials)


def test_impossible_intervals_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="at least two finite numbers"):
        student_interval([1.0])
    with pytest.raises(ValueError, match="at least two finite numbers"):
        bootstrap_interval([1.0, math.nan], rng=rng)
    with pytest.raises(ValueError, match="same length"):
        paired_interval([1.0, 2.0], [1.0], rng=rng)
    with pytest.raises(ValueError, match="got 95"):
        student_interval([1.0, 2.0], confidence=95)


# Cells and trainings


def test_a_crossed_interval_of_one_training_is_students_over_cells() -> None:
    values = np.random.default_rng(0).normal(size=9)
    assert bounds(crossed_interval(values[:, None])) == pytest.approx(bounds(student_interval(values)))
    assert crossed_p_value(values[:, None] + 2, 2.0) == pytest.approx(student_p_value(values))


def test_a_crossed_interval_by_hand() -> None:
    # The means of cells are 1 and 3, those of our trainings 1 and 3 and those of theirs 0 and 0: variances of 2 / 2, 2 / 2 and 0 / 2.
    interval = crossed_interval([[0.0, 2.0], [2.0, 4.0]], [[-1.0, 1.0], [1.0, -1.0]])
    reach = 4.302653 * math.sqrt(1 + 1)  # Student's quantile for (1 + 1)² / (1² / 1 + 1² / 1) degrees of freedom
    assert bounds(interval) == pytest.approx((2 - reach, 2 + reach), rel=1e-6)
    assert crossed_p_value([[0.0, 2.0], [2.0, 4.0]]) == pytest.approx(1 - math.sqrt(0.5), rel=1e-6)  # t = √2 with two degrees of freedom


def test_crossed_values_that_do_not_vary_have_an_interval_without_width() -> None:
    assert bounds(crossed_interval(np.full((3, 2), 0.5), np.full((3, 4), 0.25))) == (0.25, 0.25)
    assert (crossed_p_value(np.ones((3, 2))), crossed_p_value(np.ones((3, 2)), 1.0)) == (0.0, 1.0)


@pytest.mark.parametrize(("of_cells", "of_trainings", "of_both"), [(1.0, 0.0, 0.3), (1.0, 0.3, 1.0), (1.0, 1.0, 1.0), (0.3, 1.0, 0.3)])
def test_crossed_intervals_cover_the_mean_whether_cells_or_trainings_vary(of_cells: float, of_trainings: float, of_both: float) -> None:
    rng = np.random.default_rng(0)
    draws, cells, trainings = 400, 16, 5
    ours = of_trainings * rng.normal(size=(draws, 1, trainings)) + of_both * rng.normal(size=(draws, cells, trainings))
    ours += of_cells * rng.normal(size=(draws, cells, 1))
    covers = [low <= 0 <= high for low, high in map(bounds, map(crossed_interval, ours))]
    assert np.mean(covers) >= 0.92
    if of_trainings == 1.0:  # an interval over cells only is far too narrow
        assert np.mean([low <= 0 <= high for low, high in (bounds(student_interval(study.mean(axis=1))) for study in ours)]) < 0.8


@pytest.mark.parametrize(
    ("ours", "theirs"), [([1.0, 2.0], 0.0), ([[1.0, 2.0]], 0.0), ([[1.0], [2.0]], [[1.0]]), ([[1.0], [math.nan]], 0.0)]
)
def test_crossed_values_without_an_interval_are_refused(ours: Any, theirs: Any) -> None:
    with pytest.raises(ValueError, match="finite numbers for at least two cells, the same in both"):
        crossed_interval(ours, theirs)


# Tests


def test_holm_by_hand() -> None:
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.6, 0.9]), [1, 1])
    assert holm([]).tolist() == []
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        holm([0.5, 1.5])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_shrinks_a_p_value_and_keeps_their_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert (adjusted >= np.array(p_values)).all()
    assert (np.diff(adjusted[np.argsort(p_values, kind="stable")]) >= 0).all()


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_the_clustered_interval_covers_the_rate_however_alike_the_trials_of_a_cluster_are(rate: float, correlation: float) -> None:
    rng = np.random.default_rng(0)
    draws, clusters = 400, 32
    first, again = rng.random((2, draws, clusters)) < rate
    second = np.where(rng.random((draws, clusters)) < correlation, first, again)
    rates = (first + second.astype(float)) / 2
    intervals = [clustered_interval(row, size=2) for row in rates]
    assert np.mean([interval.low <= rate <= interval.high for interval in intervals]) > 0.93
    if correlation == 1.0 and rate == 0.5:
        plain = [wilson_interval(float(2 * row.sum()), 2 * clusters) for row in rates]
        assert np.mean([interval.low <= rate <= interval.high for interval in plain]) < 0.88


def test_a_clustered_interval_of_one_cluster_covers_all_rates() -> None:
    assert clustered_interval([1.0], size=2) == Interval(1.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="rates from 0 to 1"):
        clustered_interval([1.5, 0.0], size=2)
    with pytest.raises(ValueError, match="rates from 0 to 1"):
        clustered_interval([], size=2)
