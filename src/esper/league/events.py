"""What self-play reports."""

from __future__ import annotations

from esper.events import Event


class RoundFought(Event, tag="round_fought"):
    """The battles that ended during one rollout, by opponent: won, drawn and lost. "self": both sides learn, and one is counted. Of past
    selves only battles that they fought from the beginning."""

    update: int
    results: dict[str, tuple[int, int, int]]
    opponents: list[str]  # past selves that sat in the seats
    team: int  # largest team in battles that begin now
    overflow: int  # shots since the last round for which no projectile slot was free


class LeagueChanged(Event, tag="league_changed"):
    """The learner sent itself to the league."""

    update: int
    name: str
    is_promoted: bool
    reason: str
    retired: list[str]
    against: dict[str, tuple[int, int, int]]  # opponent -> won, drawn, lost
