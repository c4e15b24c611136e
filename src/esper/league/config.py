"""Everything about a league that can be set. Imports no torch, so that a command line can show it at once."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from esper.config import Config, Fraction, NonNegativeFloat, PositiveInt

PairedBattles = Annotated[int, Meta(ge=2, le=2**20, multiple_of=2)]  # of a match: two on every map, one from each side
EvenCount = Annotated[int, Meta(ge=0, le=2**20, multiple_of=2)]  # likewise, or none


class LeagueConfig(Config):
    """Who stays in the league, and who is drawn as an opponent."""

    size: PositiveInt = 8  # past selves that are members at the same time
    promote_at: Fraction = 0.5  # least lower end of the 95 % interval of a candidate's score against the best member; 0: all are promoted
    beaten_at: Fraction = 0.9  # score of the learner from which a member is beaten nearly always, and goes first
    hardness_power: NonNegativeFloat = 2.0  # opponents are drawn by (1 - score) to this power; 0: all alike
    hardness_floor: Fraction = 0.05  # least weight, so that no one is forgotten; an even opponent has 0.5 to the power
    memory: PositiveInt = 256  # battles of the learner against one opponent that its score is made of; it learns, so old ones fade
