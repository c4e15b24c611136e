"""The governor accepts noisy, bumpy and overfitting runs, and finds disasters."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import pytest
from hypothesis import given, strategies as st

from esper.growth.config import GovernorConfig
from esper.growth.lifecycle.governor import Governor, LossRange, Verdict, spike_limit, spread

CHECKS = 8  # per epoch
HEALTHY = Verdict(is_healthy=True, is_disaster=False)

Noise = Callable[[random.Random], float]
NOISES: dict[str, Noise] = {
    "none": lambda generator: 1.0,
    "5 %": lambda generator: math.exp(0.05 * generator.gauss(0, 1)),
    "uniform 50 %": lambda generator: generator.uniform(0.5, 1.5),
    "log-normal 50 %": lambda generator: math.exp(0.5 * generator.gauss(0, 1)),
}


def falling(check: int, *, half_life: float = 20.0, end: float = 0.001) -> float:
    return end + 2.3 * 0.5 ** (check / half_life)


def epochs(losses: Iterable[float], checks: int = CHECKS) -> Iterator[list[float]]:
    iterator = iter(losses)
    while chunk := list(islice(iterator, checks)):
        yield chunk


def first_disaster(losses: Iterable[float], config: GovernorConfig | None = None) -> int | None:
    """Epoch of the first disaster, from 0."""
    governor = Governor(config or GovernorConfig())
    return next((number for number, chunk in enumerate(epochs(losses)) if governor.judge(chunk, None).is_disaster), None)


def settled(level: float = 1.0, config: GovernorConfig | None = None) -> Governor:
    governor = Governor(config or GovernorConfig())
    for _ in range(10):
        assert governor.judge([level] * CHECKS, level) == HEALTHY
    return governor


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("half_life", [3.0, 20.0, 100.0])
def test_a_noisy_run_that_converges_never_rolls_back(noise: str, half_life: float) -> None:
    for seed in range(15):
        generator = random.Random(seed)
        losses = (falling(check, half_life=half_life) * NOISES[noise](generator) for check in range(800))
        assert first_disaster(losses) is None, seed


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("end", [0.001, 0.3])
@pytest.mark.parametrize("ramp", [1, 40])
def test_a_bump_of_a_schedule_never_rolls_back(noise: str, end: float, ramp: int) -> None:
    """The loss rises by half, at once or slowly, as under the peak of a one-cycle learning rate, and falls again."""
    for seed in range(10):
        generator = random.Random(seed)
        bumps = [1 + 0.5 * min(max(check - 300, 0) / ramp, 1) * (check < 500) for check in range(800)]
        losses = (falling(check, end=end) * bump * NOISES[noise](generator) for check, bump in enumerate(bumps))
        assert first_disaster(losses) is None, seed


@pytest.mark.parametrize("factor", [1e-4, 1 / 3, 1_000.0])
@pytest.mark.parametrize("end", [0.0001, 0.3])
def test_no_verdict_depends_on_the_unit_of_the_loss(factor: float, end: float) -> None:
    one, other = Governor(GovernorConfig(), LossRange.of(2.3)), Governor(GovernorConfig(), LossRange.of(2.3 * factor))
    generator = random.Random(0)
    verdicts = []
    for epoch in range(60):
        jump = {20: 1.5, 30: 12.0, 31: 12.0, 45: 2.0}.get(epoch, 1.0)
        chunk = [falling(CHECKS * epoch + check, end=end) * jump * NOISES["5 %"](generator) for check in range(CHECKS)]
        here = one.judge(chunk, chunk[-1])
        there = other.judge([factor * loss for loss in chunk], factor * chunk[-1])
        assert (here.is_healthy, here.is_disaster) == (there.is_healthy, there.is_disaster), epoch
        verdicts.append(here.is_disaster)
    assert any(verdicts)
    assert not all(verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["none", "5 %"])
@pytest.mark.parametrize("at_epoch", [1, 2, 5, 30, 90])
@pytest.mark.parametrize("end", [0.001, 0.3])
def test_a_jump_to_ten_times_the_loss_that_stays_is_found_in_its_epoch(noise: str, at_epoch: int, end: float) -> None:
    start = at_epoch * CHECKS + CHECKS - 3  # as late in the epoch as three checks fit
    for seed in range(10):
        generator = random.Random(seed)
        levels = (falling(check, end=end) if check < start else 10 * falling(start, end=end) for check in range(start + 3))
        assert first_disaster(level * NOISES[noise](generator) for level in levels) == at_epoch, seed


def test_a_slow_explosion_is_found_before_the_loss_is_ten_times_higher() -> None:
    epoch = first_disaster(1.0 if check < 80 else 1.1 ** (check - 80) for check in range(200))
    assert epoch is not None
    assert 80 < epoch * CHECKS + CHECKS <= 80 + math.log(10) / math.log(1.1)


def test_one_spike_followed_by_a_normal_loss_is_fine() -> None:
    assert settled().judge([1.0, 1.0, 50.0, 1.0], 1.0) == HEALTHY


def test_a_spike_at_the_end_of_an_epoch_is_not_worth_a_snapshot_and_no_disaster() -> None:
    governor = settled()
    verdict = governor.judge([1.0, 1.0, 1.0, 50.0], None)
    assert not verdict.is_healthy
    assert not verdict.is_disaster
    assert verdict.reason == "the training loss is above 1.9 for 1 of 3 checks"
    assert governor.judge([1.0] * 4, None) == HEALTHY


def test_spikes_in_a_row_are_counted_across_epochs() -> None:
    governor = settled()
    assert not governor.judge([1.0, 50.0, 50.0], None).is_disaster
    verdict = governor.judge([50.0, 50.0], None)
    assert verdict.is_disaster
    assert verdict.reason.startswith("the training loss 50 was above ")
    assert not verdict.is_healthy


def test_a_run_that_stays_noisier_becomes_healthy_again() -> None:
    governor = settled()
    verdicts = [governor.judge([1.0, 3.0], None) for _ in range(20)]
    assert not verdicts[0].is_healthy
    assert not any(verdict.is_disaster for verdict in verdicts)
    assert verdicts[-1] == HEALTHY


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_a_disaster_even_in_the_first_epoch(value: float) -> None:
    verdict = Governor(GovernorConfig()).judge([1.0, value], 1.0)
    assert verdict == Verdict(is_healthy=False, is_disaster=True, reason=f"the training loss of check 2 of 2 is {value}")
    verdict = Governor(GovernorConfig()).judge([1.0], value)
    assert verdict == Verdict(is_healthy=False, is_disaster=True, reason=f"the validation loss is {value}")


def test_a_loss_that_is_not_finite_is_not_remembered() -> None:
    governor = settled()
    before = governor.state_dict()
    governor.judge([1.0, math.nan], 1.0)
    assert governor.state_dict() == before


def test_a_finite_loss_is_healthy_until_there_are_enough_losses() -> None:
    governor = Governor(GovernorConfig())
    assert governor.judge([1.0, 100.0, 1e6, 1e30, 1e38], 1.0) == HEALTHY


def test_a_bad_first_loss_does_not_hide_a_spike_later() -> None:
    assert first_disaster([1e4, *[2.0] * 12, *[20.0] * 3]) == 1


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_window_smaller_than_the_losses_otherwise_asked_for_still_finds_spikes(window: int) -> None:
    assert first_disaster([1.0] * 8 + [100.0, 1000.0, 10_000.0], GovernorConfig(window=window)) == 1


def test_an_epoch_without_a_loss_changes_nothing() -> None:
    governor = settled()
    before = governor.state_dict()
    assert governor.judge([], None) == HEALTHY
    assert governor.state_dict() == before


@pytest.mark.parametrize("level", [0.0, 1e-9, 1.0, -3.0, 1e12])
def test_constant_losses_are_healthy_at_every_level(level: float) -> None:
    settled(level)


def test_a_validation_loss_that_jumps_alone_must_stay_to_be_a_disaster() -> None:
    governor = settled()
    verdicts = [governor.judge([1.0] * CHECKS, 30.0) for _ in range(3)]
    assert [verdict.is_disaster for verdict in verdicts] == [False, False, True]
    assert not any(verdict.is_healthy for verdict in verdicts)
    assert verdicts[0].reason == "the validation loss is above 1.9 for 1 of 3 epochs"
    assert verdicts[2].reason.startswith("the validation loss 30 was above ")


def test_a_validation_loss_that_jumps_with_the_training_loss_is_a_disaster_at_once() -> None:
    verdict = settled().judge([*[1.0] * 7, 30.0], 30.0)
    assert verdict.is_disaster
    assert verdict.reason == "the validation loss 30 is above 1.9, and the training loss above 1.9"


def test_a_validation_loss_that_jumped_once_is_forgiven_with_the_next_one() -> None:
    governor = settled()
    assert not governor.judge([1.0] * CHECKS, 30.0).is_healthy
    assert not governor.judge([1.0] * CHECKS, None).is_healthy  # nothing has been validated since
    assert not governor.judge([1.0] * CHECKS, 30.0).is_healthy
    assert governor.judge([1.0] * CHECKS, 1.0) == HEALTHY
    assert not governor.judge([1.0] * CHECKS, 30.0).is_disaster


def test_overfitting_is_not_a_disaster() -> None:
    governor = Governor(GovernorConfig())
    for epoch in range(60):
        train = [falling(epoch * CHECKS + check) for check in range(CHECKS)]
        assert governor.judge(train, 0.5 * 1.1**epoch) == HEALTHY


UNINFORMED = math.log(10)


def test_a_loss_that_returns_to_the_uninformed_loss_is_a_disaster() -> None:
    """From 75 % of the uninformed loss: too little of a jump for a spike."""
    config = GovernorConfig(uninformed_loss=UNINFORMED)
    governor = settled(0.75 * UNINFORMED, config)
    verdict = governor.judge([*[0.75 * UNINFORMED] * 6, UNINFORMED, UNINFORMED], None)
    assert verdict.reason == "the training loss is that of a model that knows nothing for 2 of 3 checks"
    assert not verdict.is_healthy
    assert not verdict.is_disaster
    verdict = governor.judge([UNINFORMED] * CHECKS, None)
    assert verdict.is_disaster
    assert verdict.reason == (
        "the training loss fell back to that of a model that knows nothing: at least 97% of 2.3 for 10 checks in a row"
    )


@pytest.mark.parametrize("window", [1, 3, 20])
def test_a_collapse_that_is_a_spike_too_is_named_a_collapse_with_any_window(window: int) -> None:
    governor = settled(0.1, GovernorConfig(uninformed_loss=UNINFORMED, window=window))
    assert governor.judge([UNINFORMED] * CHECKS, None).reason.startswith(
        "the training loss fell back to that of a model that knows nothing"
    )


def test_a_slow_return_to_the_uninformed_loss_is_a_disaster() -> None:
    config = GovernorConfig(uninformed_loss=UNINFORMED)
    shares = [0.7 + 0.3 * min(max(check - 80, 0) / 200, 1) for check in range(400)]
    assert first_disaster([share * UNINFORMED for share in shares]) is None
    assert first_disaster([share * UNINFORMED for share in shares], config) is not None


def test_an_epoch_that_touches_the_uninformed_loss_and_ends_below_it_is_healthy() -> None:
    governor = settled(0.75 * UNINFORMED, GovernorConfig(uninformed_loss=UNINFORMED))
    assert governor.judge([UNINFORMED] * 3 + [0.75 * UNINFORMED], None) == HEALTHY


def test_a_run_that_never_learned_is_not_a_disaster() -> None:
    losses = [UNINFORMED * (1 + 0.01 * (-1) ** check) for check in range(400)]
    assert first_disaster(losses, GovernorConfig(uninformed_loss=UNINFORMED)) is None
    settled(UNINFORMED, GovernorConfig(uninformed_loss=UNINFORMED))


def test_after_a_rollback_the_losses_after_the_snapshot_are_forgotten() -> None:
    governor = settled(config=GovernorConfig(uninformed_loss=20.0))
    snapshot = governor.state_dict()
    assert governor.judge([50.0] * CHECKS, 50.0).is_disaster
    governor.load_state_dict(snapshot)
    assert governor.judge([1.0] * CHECKS, 1.0) == HEALTHY
    assert governor.judge([50.0] * CHECKS, None).is_disaster


def test_a_governor_that_forgives_forgets_all_losses() -> None:
    governor = settled(config=GovernorConfig(uninformed_loss=20.0))
    governor.forgive()
    assert governor.judge([50.0] * CHECKS, 50.0) == HEALTHY
    assert governor.judge([500.0] * CHECKS, 50.0).is_disaster


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=60), st.lists(st.floats(0.01, 10), min_size=1, max_size=60))
def test_a_saved_governor_resumes_exactly(before: list[float], after: list[float]) -> None:
    config = GovernorConfig(uninformed_loss=2.0)
    one, other = Governor(config), Governor(config)
    for chunk in epochs(before, 4):
        one.judge(chunk, chunk[-1])
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.judge([], None) == other.judge([], None)
    for chunk in epochs(after, 4):
        assert one.judge(chunk, chunk[-1]) == other.judge(chunk, chunk[-1])


def test_a_saved_state_does_not_change_with_the_governor() -> None:
    governor = settled()
    state = governor.state_dict()
    written = json.dumps(state)
    governor.judge([2.0] * CHECKS, 2.0)
    assert json.dumps(state) == written


def test_the_spread_is_that_of_the_noise_whatever_the_trend() -> None:
    generator = random.Random(0)
    spreads = [
        spread([10 - slope * check + 0.1 * generator.gauss(0, 1) for check in range(20)]) for slope in (0.0, 0.5) for _ in range(500)
    ]
    assert sum(spreads) / len(spreads) == pytest.approx(0.1, rel=0.1)
    assert min(spreads) > 0.03


@given(st.lists(st.floats(0.0, 10), min_size=5, max_size=20), st.floats(1e-6, 1e6))
def test_the_limit_scales_with_the_unit_of_the_losses(losses: list[float], factor: float) -> None:
    limit = spike_limit(losses, sigmas=6.0, may_drift=False, scale=LossRange.of(2.3))
    assert limit >= 1.9 * min(losses) * (1 - 1e-12)  # up to rounding
    there = spike_limit([loss * factor for loss in losses], sigmas=6.0, may_drift=False, scale=LossRange.of(2.3 * factor))
    assert there == pytest.approx(limit * factor)
