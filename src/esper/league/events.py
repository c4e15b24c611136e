"""What self-play reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esper.runs import Event


class RoundFought(Event, tag="round_fought"):
    """The battles that ended during one rollout, by opponent: won, drawn and lost. "self": both sides learn, and one is counted. Of past
    selves only battles that they fought from the beginning."""

    update: int
    results: dict[str, tuple[int, int, int]]
    opponents: list[str]  # past selves that sat in the seats
    team: int  # largest team in battles that begin now
    overflow: int  # shots since the last round for which no projectile slot was free
    reward: dict[str, float] = {}  # parts of what the rollout paid, summed over its decisions: mean over the units that learn

    def shown(self) -> Mapping[str, Any]:
        return {**super().shown(), **_battles(self.results)}


class LeagueChanged(Event, tag="league_changed"):
    """The learner sent itself to the league."""

    update: int
    name: str
    is_promoted: bool
    reason: str
    retired: list[str]
    against: dict[str, tuple[int, int, int]]  # opponent -> won, drawn, lost

    def shown(self) -> Mapping[str, Any]:
        return {"is_promoted": int(self.is_promoted), **_battles(self.against)}


def _battles(results: Mapping[str, tuple[int, int, int]]) -> dict[str, dict[str, float]]:
    """Battles and win rates by opponent; a draw counts as half a win. Nothing of opponents without a battle."""
    counts = {name: sum(result) for name, result in results.items() if sum(result)}
    return {
        "battles": dict(counts),
        "win_rate": {name: (results[name][0] + results[name][1] / 2) / count for name, count in counts.items()},
    }
