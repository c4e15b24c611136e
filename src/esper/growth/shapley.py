"""Shapley values: how the gain of several seeds together is to be divided among them.

A seed's contribution is measured beside all others, so two seeds that do the same work contribute nothing each, although one of them is
needed. The Shapley value is the mean of what a seed adds over all orders in which the seeds could have come; together they make up the
whole gain. With k seeds that takes 2^k evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

MOST = 4  # seeds, which is 16 evaluations

Losses = Mapping[frozenset[str], Sequence[float]]  # which seeds are off -> the loss of every batch


def subsets(names: Sequence[str]) -> list[frozenset[str]]:
    """All of them, the empty one first."""
    return [frozenset(some) for size in range(len(names) + 1) for some in combinations(names, size)]


def shapley_values(losses: Losses, names: Sequence[str]) -> dict[str, list[float]]:
    """In the unit of the loss, for every seed and batch.

    >>> shapley_values({frozenset(): [1.0], frozenset("a"): [2.0], frozenset("b"): [1.0], frozenset("ab"): [4.0]}, "ab")
    {'a': [2.0], 'b': [1.0]}
    """
    return {name: _value(losses, name, [other for other in names if other != name]) for name in names}


def _value(losses: Losses, name: str, others: Sequence[str]) -> list[float]:
    count = len(others) + 1
    value = [0.0] * len(losses[frozenset()])
    for off in subsets(others):
        present = len(others) - len(off)  # of the others, when the seed comes
        weight = math.factorial(present) * math.factorial(count - present - 1) / math.factorial(count)
        gains = [without - with_it for without, with_it in zip(losses[off | {name}], losses[off], strict=True)]
        value = [so_far + weight * gain for so_far, gain in zip(value, gains, strict=True)]
    return value
