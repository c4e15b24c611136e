"""Ratings with openskill: the strength of each player and its uncertainty.

The model is Bradley and Terry's: the probability to win a battle grows with the difference of strengths, and a draw is half a win, as in
the scores. (Plackett and Luce's model extends it to more than two sides; with two sides they are the same.)

Two limits keep ratings from becoming too certain. A match counts as at most `MATCH_BATTLES` battles in the same proportions, because more
battles of the same two players say nothing about how they do against others. Sigma never falls below `LEAST_SIGMA`, so ratings keep moving
as other players join. Past selves do not change, so openskill's own drift (tau) is off.

openskill is imported on first use: without it, everything except `rate_match` works.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Literal

import msgspec

from esper.league.record import WinRecord

if TYPE_CHECKING:
    from openskill.models import BradleyTerryFull

MATCH_BATTLES = 32  # battles that a match counts as, at most
LEAST_SIGMA = 1.0  # lower limit of a rating's sigma
HOW_TO_INSTALL = "install openskill with: pip install 'esper-grow[league]'"

Outcome = Literal["win", "draw", "loss"]
_RANKS: dict[Outcome, list[float]] = {"win": [0, 1], "draw": [0, 0], "loss": [1, 0]}  # lower is better


class Rating(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Strength of a player as a normal distribution. New players start at openskill's default, 25 ± 25/3.

    >>> print(Rating(), Rating(mu=30.0, sigma=1.5).ordinal)
    25.0 ± 8.3 25.5
    """

    mu: float = 25.0
    sigma: float = 25.0 / 3

    def __str__(self) -> str:
        return f"{self.mu:.1f} ± {self.sigma:.1f}"

    @property
    def ordinal(self) -> float:
        """A strength that the player very likely exceeds. Standings are sorted by it."""
        return self.mu - 3 * self.sigma


def is_available() -> bool:
    return importlib.util.find_spec("openskill") is not None


def rate_match(player: Rating, opponent: Rating, record: WinRecord) -> tuple[Rating, Rating]:
    """Return both ratings after a match. `record` is from the side of `player`. The same match always gives the same ratings."""
    model = _model()
    ours, theirs = (model.create_rating([rating.mu, rating.sigma]) for rating in (player, opponent))
    for outcome in spread_outcomes(shrink_record(record, MATCH_BATTLES)):
        [[ours], [theirs]] = model.rate([[ours], [theirs]], ranks=_RANKS[outcome])
        ours.sigma, theirs.sigma = max(ours.sigma, LEAST_SIGMA), max(theirs.sigma, LEAST_SIGMA)
    return Rating(ours.mu, ours.sigma), Rating(theirs.mu, theirs.sigma)


def shrink_record(record: WinRecord, battles: int) -> WinRecord:
    """Scale a record down to at most `battles` battles, rounding by largest remainders.

    >>> shrink_record(WinRecord(wins=300, draws=100, losses=112), 32)
    WinRecord(wins=19, draws=6, losses=7)
    """
    if record.battles <= battles:
        return record
    exact = [count * battles for count in (record.wins, record.draws, record.losses)]  # in units of 1 / record.battles
    counts = [part // record.battles for part in exact]
    by_fraction = sorted(range(3), key=lambda index: exact[index] % record.battles, reverse=True)
    for index in by_fraction[: battles - sum(counts)]:
        counts[index] += 1
    wins, draws, losses = counts
    return WinRecord(wins, draws, losses)


def spread_outcomes(record: WinRecord) -> list[Outcome]:
    """Return the battles one by one, with each outcome spread evenly over the match.

    Later battles weigh more in a rating, and a record does not say in which order the battles were fought.

    >>> spread_outcomes(WinRecord(wins=3, draws=1, losses=1))
    ['win', 'draw', 'loss', 'win', 'win']
    """
    counts: tuple[tuple[Outcome, int], ...] = (("draw", record.draws), ("loss", record.losses), ("win", record.wins))
    places = [((index + 0.5) / count, outcome) for outcome, count in counts for index in range(count)]
    return [outcome for _, outcome in sorted(places)]


@functools.cache
def _model() -> BradleyTerryFull:
    try:
        from openskill.models import BradleyTerryFull
    except ImportError as error:
        raise ImportError(f"ratings need openskill ({error}); {HOW_TO_INSTALL}") from error
    return BradleyTerryFull(tau=0.0)
