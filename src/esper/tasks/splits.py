"""Which sample belongs to which part of the data, fixed once and for all.

The order comes from a hash and not from a random generator, whose draws may change with the version of its library: a network must not
meet samples in its test part that it was trained on under another version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.integer]
Indices = NDArray[np.int64]


def stratified_parts(labels: Labels, sizes: Sequence[int], *, seed: int) -> list[Indices]:
    """Disjoint parts of exactly these sizes, ascending, in each of which every class has its share to within about one sample."""
    assert sum(sizes) == len(labels)
    order = _stratified_order(labels, seed)
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def _stratified_order(labels: Labels, seed: int) -> Indices:
    """All samples in an order of which every stretch is stratified: each class is spread evenly over the whole of it."""
    keys = np.array([_hash(seed, index) for index in range(len(labels))], dtype=np.uint64)
    place = np.empty(len(labels))  # in (0, 1)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        shuffled = members[np.argsort(keys[members])]
        place[shuffled] = (np.arange(len(members)) + 0.5) / len(members)
    return np.lexsort((keys, place)).astype(np.int64)


def _hash(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little")
