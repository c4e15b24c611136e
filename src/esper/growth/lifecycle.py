"""The life of a seed: its stages, the moves between them, and the gates that a move must pass.

| stage      | raised jointly                              | raised in the shadow                                              |
|------------|---------------------------------------------|-------------------------------------------------------------------|
| DORMANT    | the slot is empty                           | the same                                                          |
| GERMINATED | born as the identity, alpha 1               | born as the identity, outside the host                            |
| TRAINING   | –                                           | learns in a second forward pass that uses it; the host is as if   |
|            |                                             | it were not there, to the last bit                                |
| BLENDING   | only when alpha is moved:                   | alpha rises from 0 to its target; host and seed learn together    |
|            | on the way out it falls to 0                |                                                                   |
| HOLDING    | learns with the host, on probation          | the same                                                          |
| FOSSILIZED | part of the host for good                   | the same                                                          |
| PRUNED     | taken out, the host is as before            | the same                                                          |
| EMBARGOED  | the slot must wait before anything may grow | the same                                                          |
"""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """In the order of life; the numbers are what checkpoints and observations hold."""

    DORMANT = 0
    GERMINATED = 1
    TRAINING = 2
    BLENDING = 3
    HOLDING = 4
    FOSSILIZED = 5
    PRUNED = 6
    EMBARGOED = 7


MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.DORMANT: frozenset({Stage.GERMINATED}),
    Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.HOLDING, Stage.PRUNED}),
    Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
    Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
    Stage.HOLDING: frozenset({Stage.BLENDING, Stage.FOSSILIZED, Stage.PRUNED}),
    Stage.FOSSILIZED: frozenset(),
    Stage.PRUNED: frozenset({Stage.EMBARGOED}),
    Stage.EMBARGOED: frozenset({Stage.DORMANT}),
}

LIVING = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING})  # may still be pruned
OCCUPIED = LIVING | {Stage.FOSSILIZED}  # there is a seed in the slot
