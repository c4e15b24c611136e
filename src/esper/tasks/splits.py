"""Divide samples into parts such as train and validation. The division never changes.

It comes from a hash and not from a random generator, because the draws of a generator may change with the version of its library. A
network must not be tested on samples that it was trained on with another version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.integer]
Indices = NDArray[np.int64]


def stratified_parts(labels: Labels, sizes: Sequence[int], *, seed: int) -> list[Indices]:
    """Return the indices of disjoint parts of exactly these sizes, each sorted. Every part has about the same share of each class."""
    assert sum(sizes) == len(labels)
    order = _stratified_order(labels, seed)
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def _stratified_order(labels: Labels, seed: int) -> Indices:
    """Return all samples in an order that spreads each class evenly, so that every contiguous part of it is stratified."""
    keys = np.array([_hash(seed, index) for index in range(len(labels))], dtype=np.uint64)
    # Give the shuffled samples of each class equally spaced places in (0, 1), then sort all samples by place.
    place = np.empty(len(labels))
    for label in np.unique(labels):
        samples = np.flatnonzero(labels == label)
        shuffled = samples[np.argsort(keys[samples])]
        place[shuffled] = (np.arange(len(samples)) + 0.5) / len(samples)
    return np.lexsort((keys, place)).astype(np.int64)


def _hash(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little")
