"""Shapley values and interactions against enumerations that share no code with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from esper.growth.measure.shapley import OrderPlan, Solution, latin_square, plan_orders, solve
from esper.intervals import student_interval

Gain = Callable[[frozenset[str]], np.ndarray]


def names(count: int) -> list[str]:
    return [f"s{number}" for number in range(count)]


def random_game(count: int, *, batches: int = 6, seed: int = 0) -> Gain:
    """Return a game without any structure: an own random number for every coalition and batch."""
    rng = np.random.default_rng(seed)
    table = {frozenset(some): rng.normal(size=batches) for size in range(count + 1) for some in itertools.combinations(names(count), size)}
    return table.__getitem__


def smooth_game(count: int, *, batches: int = 6, seed: int = 0) -> Gain:
    """Return a game of single gains and of gains of pairs."""
    rng = np.random.default_rng(seed)
    single = {name: rng.normal(size=batches) + 1 for name in names(count)}
    pair = {both: 0.3 * rng.normal(size=batches) for both in itertools.combinations(names(count), 2)}

    def gain(on: frozenset[str]) -> np.ndarray:
        return sum((single[name] for name in on), np.zeros(batches)) + sum(
            (pair[both] for both in pair if set(both) <= on), np.zeros(batches)
        )

    return gain


def solved(plan: OrderPlan, gain: Gain, weights: list[float] | None = None) -> Solution:
    return solve(plan, {on: gain(on) for on in plan.coalitions}, weights or [1.0] * len(gain(frozenset())))


def by_permutations(count: int, gain: Gain) -> dict[str, np.ndarray]:
    """Return the values by the definition: the mean gain of a player over all orders."""
    found = {name: [] for name in names(count)}
    for order in itertools.permutations(names(count)):
        for place, name in enumerate(order):
            found[name].append(gain(frozenset(order[: place + 1])) - gain(frozenset(order[:place])))
    return {name: np.mean(gains, axis=0) for name, gains in found.items()}


def interaction_by_permutations(count: int, one: str, other: str, gain: Gain) -> np.ndarray:
    """Return the interaction by the definition: the pair joins as one player, in all orders of that and the other players."""
    rest = [name for name in names(count) if name not in (one, other)]
    found = []
    for order in itertools.permutations([*rest, "pair"]):
        before = frozenset(order[: order.index("pair")])
        found.append(gain(before | {one, other}) - gain(before | {one}) - gain(before | {other}) + gain(before))
    return np.mean(found, axis=0)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_exact_values_equal_the_mean_over_all_permutations(count: int) -> None:
    gain = random_game(count)
    found = solved(plan_orders(names(count)), gain)
    for name, by_batch in by_permutations(count, gain).items():
        wanted = student_interval(by_batch)
        assert (found.values[name].estimate, found.values[name].low, found.values[name].high) == pytest.approx(
            (wanted.estimate, wanted.low, wanted.high), abs=1e-12
        )


def test_exact_interactions_equal_the_mean_over_all_permutations_of_the_merged_pair() -> None:
    gain = random_game(5)
    found = solved(plan_orders(names(5)), gain)
    assert len(found.pairs) == 10
    for (one, other), interval in found.pairs.items():
        assert interval.estimate == pytest.approx(float(interaction_by_permutations(5, one, other, gain).mean()), abs=1e-12)


@pytest.mark.parametrize("count", [4, 11, 12])
def test_values_sum_to_the_gain_of_all_players_exact_and_sampled(count: int) -> None:
    gain = smooth_game(count, seed=count)
    plan = plan_orders(names(count), exact_up_to=4, groups=2)
    assert plan.is_exact == (count == 4)
    weights = [3.0, 1.0, 1.0, 2.0, 5.0, 1.0]
    found = solved(plan, gain, weights)
    whole = np.average(gain(frozenset(names(count))) - gain(frozenset()), weights=weights)
    assert sum(value.estimate for value in found.values.values()) == pytest.approx(float(whole), abs=1e-12)


@pytest.mark.parametrize("count", [5, 10, 11])
def test_an_additive_game_gives_each_player_its_own_gain_and_no_interaction(count: int) -> None:
    own = dict(zip(names(count), [0.5, -1.0, 2.0, 0.0, 3.0, 1.0, 4.0, -2.0, 0.25, 7.0, 1.5], strict=False))
    found = solved(plan_orders(names(count), exact_up_to=5, groups=2), lambda on: np.full(4, sum(own[name] for name in on)))
    assert {name: value.estimate for name, value in found.values.items()} == pytest.approx({name: own[name] for name in names(count)})
    assert all(abs(pair.estimate) < 1e-12 for pair in found.pairs.values())
    assert {name: value.estimate for name, value in found.removal.items()} == pytest.approx({name: own[name] for name in names(count)})
    assert {name: value.estimate for name, value in found.alone.items()} == pytest.approx({name: own[name] for name in names(count)})


def test_two_players_that_do_the_same_work_share_its_gain_and_interact_negatively() -> None:
    found = solved(plan_orders(names(2)), lambda on: np.full(3, 1.0 if on else 0.0))
    assert [value.estimate for value in found.values.values()] == [0.5, 0.5]
    assert [value.estimate for value in found.removal.values()] == [0.0, 0.0]  # a contribution beside the other one sees nothing
    assert found.pairs["s0", "s1"].estimate == -1.0


@pytest.mark.parametrize("count", [4, 5, 8, 11])
def test_a_group_of_orders_is_balanced_and_holds_the_reverse_of_every_order(count: int) -> None:
    square = latin_square(count)
    rows = {tuple(row) for row in square.tolist()}
    assert all(tuple(reversed(row)) in rows for row in rows)
    for place in range(count):
        assert np.bincount(square[:, place], minlength=count).tolist() == [len(square) // count] * count
    adjacent = {frozenset(pair): 0 for pair in itertools.combinations(range(count), 2)}
    for row in square.tolist():
        for pair in itertools.pairwise(row):
            adjacent[frozenset(pair)] += 1
    assert set(adjacent.values()) == {2 * len(square) // count}


@pytest.mark.slow
def test_sampled_values_and_interactions_are_unbiased_and_their_intervals_hold_the_exact_ones() -> None:
    count, gain = 10, random_game(10, batches=40, seed=3)
    exact = solved(plan_orders(names(count), exact_up_to=10), gain)
    assert len(plan_orders(names(count), exact_up_to=10).coalitions) == 1024
    errors, inside, pair_errors = [], 0, []
    for seed in range(24):
        plan = plan_orders(names(count), exact_up_to=2, groups=2, seed=seed)
        assert not plan.is_exact
        found = solved(plan, gain)
        errors.append([found.values[name].estimate - exact.values[name].estimate for name in names(count)])
        pair_errors.append([found.pairs[pair].estimate - exact.pairs[pair].estimate for pair in exact.pairs])
        inside += sum(found.values[name].low <= exact.values[name].estimate <= found.values[name].high for name in names(count))
    for some in (np.array(errors), np.array(pair_errors)):
        spread = some.std(axis=0, ddof=1) / math.sqrt(len(some))
        assert (np.abs(some.mean(axis=0)) < 4.5 * spread).all()
    assert inside >= 0.95 * 24 * count


def test_orders_are_sampled_only_where_that_needs_fewer_evaluations() -> None:
    assert plan_orders(names(8)).is_exact
    assert plan_orders(names(9)).is_exact  # orders would need most of the 512 coalitions
    plan = plan_orders(names(12), seed=1)
    assert not plan.is_exact
    assert plan.orders == 8 * 12
    assert len(plan.coalitions) == len(set(plan.coalitions)) < 2**12
    assert plan.coalitions == plan_orders(names(12), seed=1).coalitions != plan_orders(names(12), seed=2).coalitions


def test_one_batch_gives_no_interval_and_a_loss_that_is_not_finite_gives_none_either() -> None:
    one = solved(plan_orders(["a"]), lambda on: np.array([1.0 if on else 0.0]))
    assert (one.values["a"].low, one.values["a"].high) == (-math.inf, math.inf)
    broken = solved(plan_orders(["a"]), lambda on: np.array([math.inf if on else 0.0, 0.0]))
    assert broken.values["a"].estimate == broken.values["a"].low == math.inf


def test_wrong_players_and_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one player"):
        plan_orders([])
    with pytest.raises(ValueError, match="a name of its own"):
        plan_orders(["a", "a"])
    with pytest.raises(ValueError, match="at least 2 of them, not 1"):
        plan_orders(names(3), groups=1)
