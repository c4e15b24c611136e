"""The stages of a slot or its seed, and the legal moves between them."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """Stage of a slot or its seed. Checkpoints and observations hold the numbers, so they must not change."""

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
    Stage.FOSSILIZED: frozenset({Stage.PRUNED}),  # only by `Shrink`
    Stage.PRUNED: frozenset({Stage.EMBARGOED}),
    Stage.EMBARGOED: frozenset({Stage.DORMANT}),
}

LIVING = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING})  # may still be pruned
OCCUPIED = LIVING | {Stage.FOSSILIZED}  # the slot holds a seed
