"""Events of self-play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from esper.rl.events import TRAINING_RETURN
from esper.runs import Event
from esper.runs.events import Figure, RunDeclared, battle_numbers

WIN_RATE = Figure("win rate", "checkpoint_evaluated/mean_return", "evaluated/mean_return", unit="share", better="up")
DECLARED = RunDeclared(run_kind="arena", figures=[WIN_RATE, TRAINING_RETURN])

Count = Annotated[int, msgspec.Meta(ge=0)]


class RoundFought(Event, tag="round_fought"):
    """Results of the battles that ended during one rollout.

    Battles of the learner against itself ("self") are counted for one side. Battles against past selves count only if the past self
    fought them from the beginning.
    """

    update: int
    results: dict[str, tuple[Count, Count, Count]]  # opponent -> won, drawn, lost
    opponents: list[str]  # past selves in the opponent slots
    team: int  # largest team size of battles that begin now
    overflow: int  # shots since the last event that were lost because no projectile slot was free
    agent_steps: int = 0  # decisions of living units of the learner in the rollout
    reward: dict[str, float] = {}  # parts of the reward, summed over the decisions of the rollout, mean over the learning units

    def shown(self) -> Mapping[str, Any]:
        return {**super().shown(), **battle_numbers(self.results)}


class LeagueChanged(Event, tag="league_changed"):
    """A copy of the learner entered the league as a candidate, and was promoted or removed."""

    update: int
    name: str
    is_promoted: bool
    reason: str
    retired: list[str]
    against: dict[str, tuple[Count, Count, Count]]  # opponent -> won, drawn, lost
    ratings: dict[str, tuple[float, float]] = {}  # player -> mean and standard deviation of its strength; empty without ratings
    anchors: list[str] = []  # bots of the league, which do not change

    def shown(self) -> Mapping[str, Any]:
        rating = {player: mean for player, (mean, _) in self.ratings.items()}
        return {"is_promoted": int(self.is_promoted), **battle_numbers(self.against), "rating": rating}
