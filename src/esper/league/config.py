"""Settings of a league. Imports no torch, so that the command line starts quickly."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from esper.config import Config, Fraction, NonNegativeFloat, PositiveInt

PairedBattles = Annotated[int, Meta(ge=2, le=2**20, multiple_of=2)]  # battles of a match: two on every map, one from each side
EvenCount = Annotated[int, Meta(ge=0, le=2**20, multiple_of=2)]  # the same, or 0 for no match


class LeagueConfig(Config):
    """Rules of a league: promotion and retirement of past selves, and the draw of opponents."""

    size: PositiveInt = 8  # largest number of members
    promote_at: Fraction = 0.5  # promote if the lower end of the 95 % interval of the score against the best member reaches this; 0: always
    beaten_at: Fraction = 0.9  # members against whom the learner scores at least this retire first
    hardness_power: NonNegativeFloat = 2.0  # draw opponents with weight (1 - score) ** hardness_power; 0: all equally often
    hardness_floor: Fraction = 0.05  # smallest weight of an opponent, so that none is forgotten; an even opponent has 0.5 ** hardness_power
    memory: PositiveInt = 256  # recent battles that the learner's score against an opponent is made of; older ones fade
