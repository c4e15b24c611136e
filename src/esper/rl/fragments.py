"""How a rollout is cut into minibatches of packed fragments.

A rollout [T, N] is cut into units: `length` consecutive steps of one environment. Units are shuffled and dealt to minibatches. Within its
unit, an environment's steps are cut again wherever an episode starts; the pieces are the fragments that a recurrent core sees, sorted by
length and packed time-major (see `esper.rl.recurrent`). Steps that were not real teach nothing, and each is a piece of its own, because
the step after it starts an episode: such pieces are left out.

This runs on the host with NumPy: it is integer bookkeeping, and the sizes must be known there anyway.

Shapes: T = steps, N = environments, U = units of a minibatch, L = steps in a unit, F = fragments, M = packed steps, at most U·L.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


class Fragments(NamedTuple):
    """One minibatch."""

    rows: Integers  # [M] into the rollout flattened to [T·N], in packed order
    sizes: list[int]  # fragments that have a step 0, 1, 2, …
    states: Integers  # [F] into the stored states flattened to [T/L·N]; one past the end for a fragment that starts an episode


def minibatches(
    starts: Booleans, *, length: int, parts: int, rng: np.random.Generator, valid: Booleans | None = None
) -> Iterator[Fragments]:
    """One pass over a rollout in random order. `starts` [T, N] is true where a step is the first of an episode, `valid` where it was real
    (None: everywhere)."""
    num_steps, num_envs = starts.shape
    units = rng.permutation(num_steps // length * num_envs)
    for part in np.array_split(units, parts):
        yield pack(starts, part, length=length, valid=valid)


def pack(starts: Booleans, units: Integers, *, length: int, valid: Booleans | None = None) -> Fragments:
    """The fragments of some units; unit `u` is chunk `u // N` of environment `u % N`."""
    num_steps, num_envs = starts.shape
    chunk, env = np.divmod(units, num_envs)
    rows = (chunk * length)[:, None] * num_envs + env[:, None] + np.arange(length) * num_envs  # [U, L] into [T·N]
    if length == 1:
        kept = _real(valid, rows[:, 0])
        rows, units = rows[kept], units[kept]
        return Fragments(rows[:, 0], [len(units)], np.where(starts.ravel()[rows[:, 0]], num_steps * num_envs, units))

    is_start = starts.ravel()[rows]  # [U, L]
    is_cut = is_start.copy()
    is_cut[:, 0] = True
    first = np.flatnonzero(is_cut)  # [F] positions in [U·L]
    lengths = np.diff(first, append=len(units) * length)
    kept = _real(valid, rows.ravel()[first])
    first, lengths = first[kept], lengths[kept]
    order = np.argsort(-lengths, kind="stable")
    first, lengths = first[order], lengths[order]

    sizes = np.searchsorted(-lengths, -np.arange(lengths[0]), side="left")  # how many fragments are longer than t
    steps = np.arange(lengths[0])[:, None]
    packed = (first + steps)[steps < lengths]  # row-major over time: packed order
    zero_state = num_steps // length * num_envs
    states = np.where(is_start.ravel()[first], zero_state, units[first // length])
    return Fragments(rows.ravel()[packed], sizes.tolist(), states)


def _real(valid: Booleans | None, rows: Integers) -> Integers:
    """Which of some steps were real, as indices; the first one where none was, because a minibatch cannot be empty."""
    if valid is None:
        return np.arange(len(rows))
    kept = np.flatnonzero(valid.ravel()[rows])
    return kept if len(kept) else np.zeros(1, dtype=np.int64)


def split(fragments: Fragments, parts: int) -> list[Fragments]:
    """Pieces of a minibatch for gradient accumulation. Fragments are dealt out in turn, so that every piece has its share of long ones."""
    if parts == 1:
        return [fragments]
    offsets = np.concatenate(([0], np.cumsum(fragments.sizes)))
    pieces = []
    for part in range(min(parts, len(fragments.states))):
        steps = [np.arange(start + part, stop, parts) for start, stop in itertools.pairwise(offsets)]
        steps = [step for step in steps if len(step)]
        pieces.append(Fragments(fragments.rows[np.concatenate(steps)], [len(step) for step in steps], fragments.states[part::parts]))
    return pieces
