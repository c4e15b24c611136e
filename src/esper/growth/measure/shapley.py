"""Shapley values and pairwise interaction in a game of several players, exact or estimated. Imports numpy and no torch.

    plan = plan_orders(["a", "b", "c"])
    values = {on: gain_with(on) for on in plan.coalitions}     # on: the players that take part; an array of one gain per batch
    solution = solve(plan, values, weights)                    # weight of each batch

The Shapley value of a player is its mean gain over all orders in which the players could join. The values of all players sum to the gain of
all players over that of none. The interaction of a pair is the Shapley interaction index: the mean over coalitions S of
v(S + both) - v(S + one) - v(S + other) + v(S). It is positive if the two help each other, negative if they do the same work.

Up to `EXACT_UP_TO` players every coalition is evaluated, and also if sampling needs more than half of them. Otherwise orders are sampled in
groups. The orders of a group are the rows of a Latin square with a random assignment of players: every player is at every place equally
often, every pair is adjacent equally often, and every order comes with its reverse (antithetic sampling). Each order is uniformly
distributed, so the mean over groups is unbiased, and the values of each order sum to the whole gain.

Intervals are over batches, paired, because all coalitions see the same batches. Sampled orders add the variance over groups.

Shapes: B = batches, G = groups of orders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from esper.intervals import LEAST_COUNT, Floats, Interval, effective_count, student_quantile

EXACT_UP_TO = 8  # players, which are 256 coalitions
GROUPS = 8  # groups of orders with more players

Coalition = frozenset[str]
Pair = tuple[str, str]


@dataclass(frozen=True)
class OrderPlan:
    """The coalitions to evaluate, and the orders that they come from."""

    players: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...]  # groups of orders; empty: the solution is exact
    coalitions: tuple[Coalition, ...]  # the empty one first, then that of all players

    @property
    def is_exact(self) -> bool:
        return not self.groups

    @property
    def orders(self) -> int:
        """Number of sampled orders; 0 if the solution is exact."""
        return sum(map(len, self.groups))


@dataclass(frozen=True)
class Solution:
    """Shapley values and interactions with 95 % intervals, in the unit of the gains."""

    values: dict[str, Interval]
    pairs: dict[Pair, Interval]  # every pair once, in the order of the players
    removal: dict[str, Interval]  # loss of gain if one player leaves all others
    alone: dict[str, Interval]  # gain of one player without the others


def plan_orders(players: Sequence[str], *, exact_up_to: int = EXACT_UP_TO, groups: int = GROUPS, seed: int = 0) -> OrderPlan:
    """Return the coalitions to evaluate: all up to `exact_up_to` players, or if orders would need more than half; else those of orders."""
    names = tuple(players)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"Shapley values need at least one player, each with a name of its own; got {list(players)}")
    if groups < 2:
        raise ValueError(f"an interval over groups of orders needs at least 2 of them, not {groups}")
    everyone = frozenset(names)
    if len(names) > max(exact_up_to, 2):  # a group of orders of two players is already all orders
        rng, count = np.random.default_rng(seed), len(names)
        square = latin_square(count)  # [orders, players]
        sampled = tuple(tuple(tuple(names[place] for place in row) for row in rng.permutation(count)[square]) for _ in range(groups))
        needed = dict.fromkeys([frozenset[str](), everyone])
        for order in (order for group in sampled for order in group):
            for place in range(count):
                before = frozenset(order[:place])
                needed |= dict.fromkeys([before | {order[place]}, *([before | {order[place + 1]}] if place + 1 < count else [])])
        if len(needed) <= 2**count / 2:
            return OrderPlan(names, sampled, tuple(needed))
    subsets = [frozenset(some) for size in range(len(names) + 1) for some in combinations(names, size)]
    return OrderPlan(names, (), (subsets[0], *subsets[-1:], *subsets[1:-1]))


def latin_square(count: int) -> np.ndarray:
    """Return orders of `count` players, [orders, count]: all at each place, all pairs adjacent, each equally often; with all reverses.

    Williams' design: an even `count` needs as many orders, an odd one twice as many.

    >>> latin_square(4).tolist()
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    square = (np.arange(count)[:, None] + np.array(zigzag)[None, :]) % count
    return square if count % 2 == 0 else np.concatenate([square, square[:, ::-1]])


def solve(plan: OrderPlan, values: Mapping[Coalition, Floats], weights: Sequence[float] | Floats) -> Solution:
    """Return the Shapley values and interactions of a game from the gains of its coalitions, [B] each, and the weights of the batches.

    >>> game = {frozenset(): [0.0], frozenset("a"): [1.0], frozenset("b"): [2.0], frozenset("ab"): [4.0]}
    >>> found = solve(plan_orders("ab"), {on: np.array(gain) for on, gain in game.items()}, [1.0])
    >>> {name: value.estimate for name, value in found.values.items()}, found.pairs["a", "b"].estimate
    ({'a': 1.5, 'b': 2.5}, 1.0)
    """
    gain = {on: np.asarray(of_batches, dtype=np.float64) for on, of_batches in values.items()}
    shares = np.asarray(weights, dtype=np.float64)
    everyone, nobody = frozenset(plan.players), frozenset[str]()
    singles, pairs = _exact(plan, gain) if plan.is_exact else _sampled(plan, gain)
    return Solution(
        values={name: _interval(found, shares) for name, found in singles.items()},
        pairs={pair: _interval(found, shares) for pair, found in pairs.items()},
        removal={name: _interval((gain[everyone] - gain[everyone - {name}])[None], shares) for name in plan.players},
        alone={name: _interval((gain[frozenset({name})] - gain[nobody])[None], shares) for name in plan.players},
    )


def _exact(plan: OrderPlan, gain: Mapping[Coalition, Floats]) -> tuple[dict[str, Floats], dict[Pair, Floats]]:
    """Return values and interactions of every batch, [1, B] each, as weighted sums over all coalitions."""
    count, whole = len(plan.players), math.factorial(len(plan.players))
    zero = np.zeros_like(gain[frozenset()])[None]
    singles = {name: zero.copy() for name in plan.players}
    pairs = {pair: zero.copy() for pair in combinations(plan.players, 2)}
    for on in plan.coalitions:
        others = [name for name in plan.players if name not in on]
        for name in others:
            # Share of all orders in which exactly the players of the coalition come before this one.
            share = math.factorial(len(on)) * math.factorial(count - len(on) - 1) / whole
            singles[name] += share * (gain[on | {name}] - gain[on])
        for one, other in combinations(others, 2):
            # The same share if the pair joins as one player, so that there are count - 1 players.
            share = math.factorial(len(on)) * math.factorial(count - len(on) - 2) / math.factorial(count - 1)
            pairs[one, other] += share * _second_difference(gain, on, one, other)
    return singles, pairs


def _sampled(plan: OrderPlan, gain: Mapping[Coalition, Floats]) -> tuple[dict[str, Floats], dict[Pair, Floats]]:
    """Return estimates of values and interactions of every group of orders and batch, [G, B] each."""
    batches = len(gain[frozenset()])
    singles = {name: np.zeros((len(plan.groups), batches)) for name in plan.players}
    pairs = {pair: np.zeros((len(plan.groups), batches)) for pair in combinations(plan.players, 2)}
    rank = {name: place for place, name in enumerate(plan.players)}
    for number, group in enumerate(plan.groups):
        adjacent = 2 * len(group) / len(plan.players)  # times that each pair is adjacent in a group
        for order in group:
            before = frozenset[str]()
            for place, name in enumerate(order):
                singles[name][number] += (gain[before | {name}] - gain[before]) / len(group)
                if place + 1 < len(order):
                    one, other = sorted((name, order[place + 1]), key=rank.__getitem__)
                    pairs[one, other][number] += _second_difference(gain, before, one, other) / adjacent
                before |= {name}
    return singles, pairs


def _second_difference(gain: Mapping[Coalition, Floats], on: Coalition, one: str, other: str) -> Floats:
    both: Floats = gain[on | {one, other}] - gain[on | {one}] - gain[on | {other}] + gain[on]
    return both


def _interval(found: Floats, weights: Floats) -> Interval:
    """Return the mean of estimates [G, B], weighted over batches, with its interval. If one is not finite, both ends are the mean.

    The variances over batches and over groups are added, with the degrees of freedom of Welch and Satterthwaite. Each of them contains the
    variance of groups within batches, so the interval is rather too wide than too narrow.
    """
    shares = weights / weights.sum()
    estimate = float((found @ shares).mean())
    if not np.isfinite(found).all():
        return Interval(estimate, estimate, estimate)
    count = effective_count(weights)
    if count < LEAST_COUNT:
        return Interval(estimate, -math.inf, math.inf)
    of_batches = found.mean(axis=0)  # [B]
    parts = [(float(shares @ (of_batches - estimate) ** 2) / (count - 1), count - 1)]
    if len(found) > 1:
        parts.append((float((found @ shares).var(ddof=1)) / len(found), len(found) - 1))
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return Interval(estimate, estimate, estimate)
    freedom = variance**2 / sum(part**2 / own for part, own in parts)
    reach = student_quantile(0.975, freedom) * math.sqrt(variance)
    return Interval(estimate, estimate - reach, estimate + reach)
