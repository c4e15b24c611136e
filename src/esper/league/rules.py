"""Rules of a league as pure functions: promotion of candidates, retirement of members, and the draw of opponents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from esper.league.ratings import Rating
from esper.league.record import WinRecord

NEWCOMER = Rating().ordinal  # stands in for a missing rating


def is_promoted(against_best: WinRecord | None, *, promote_at: float) -> bool:
    """Return whether a candidate becomes a member: if the lower end of the 95 % interval of its score against the best member is at least
    `promote_at`, or if there is no member yet (None)."""
    return against_best is None or against_best.interval().low >= promote_at


def least_useful(members: Sequence[str], *, learner_scores: Mapping[str, float], ordinals: Mapping[str, float], beaten_at: float) -> str:
    """Return the member that teaches the learner least. `members` are ordered by promotion, oldest first.

    It is the lowest rated of those against whom the learner scores at least `beaten_at`; among equals the oldest. If there are none, it is
    the oldest member. The newest member is the best one and is never returned.
    """
    if len(members) < 2:
        raise ValueError(f"the best member never leaves, and there are only {list(members)}")
    older = members[:-1]
    beaten = [name for name in older if learner_scores.get(name, 0.0) >= beaten_at]
    return min(beaten, key=lambda name: ordinals.get(name, NEWCOMER)) if beaten else older[0]


def retirements(
    members: Sequence[str], *, size: int, learner_scores: Mapping[str, float], ordinals: Mapping[str, float], beaten_at: float
) -> list[str]:
    """Return the members that retire, in order, so that at most `size` stay."""
    staying, leaving = list(members), list[str]()
    while len(staying) > size:
        leaving.append(least_useful(staying, learner_scores=learner_scores, ordinals=ordinals, beaten_at=beaten_at))
        staying.remove(leaving[-1])
    return leaving


def opponent_weights(scores: Mapping[str, float | None], *, power: float, floor: float) -> dict[str, float]:
    """Return the probability of each opponent to be drawn, by how hard it is for the learner: prioritised fictitious self-play.

    `scores` are the learner's scores; an opponent that it has not met (None) counts as even (0.5). The result sums to 1.

    >>> opponent_weights({"easy": 1.0, "even": 0.5, "new": None}, power=1.0, floor=0.25)
    {'easy': 0.2, 'even': 0.4, 'new': 0.4}
    """
    weights = {name: max((1 - (0.5 if score is None else score)) ** power, floor) for name, score in scores.items()}
    total = sum(weights.values())
    if total == 0:  # the learner beats all of them always, and the floor is 0
        return dict.fromkeys(weights, 1 / len(weights)) if weights else {}
    return {name: weight / total for name, weight in weights.items()}
