"""Events of self-play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esper.runs import Event


class RoundFought(Event, tag="round_fought"):
    """Results of the battles that ended during one rollout.

    Battles of the learner against itself ("self") are counted for one side. Battles against past selves count only if the past self
    fought them from the beginning.
    """

    update: int
    results: dict[str, tuple[int, int, int]]  # opponent -> won, drawn, lost
    opponents: list[str]  # past selves in the opponent slots
    team: int  # largest team size of battles that begin now
    overflow: int  # shots since the last event that were lost because no projectile slot was free
    reward: dict[str, float] = {}  # parts of the reward, summed over the decisions of the rollout, mean over the learning units

    def shown(self) -> Mapping[str, Any]:
        return {**super().shown(), **_battles(self.results)}


class LeagueChanged(Event, tag="league_changed"):
    """A copy of the learner entered the league as a candidate, and was promoted or removed."""

    update: int
    name: str
    is_promoted: bool
    reason: str
    retired: list[str]
    against: dict[str, tuple[int, int, int]]  # opponent -> won, drawn, lost

    def shown(self) -> Mapping[str, Any]:
        return {"is_promoted": int(self.is_promoted), **_battles(self.against)}


def _battles(results: Mapping[str, tuple[int, int, int]]) -> dict[str, dict[str, float]]:
    """Return battles and win rates by opponent; a draw counts as half a win. Opponents without a battle are left out."""
    counts = {name: sum(result) for name, result in results.items() if sum(result)}
    return {
        "battles": dict(counts),
        "win_rate": {name: (results[name][0] + results[name][1] / 2) / count for name, count in counts.items()},
    }
