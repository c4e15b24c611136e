"""Ratings by openskill: how strong each player is, on one scale, and how sure that is.

The model is Bradley and Terry's: a battle between two sides is won with a chance that grows with the difference of their strengths, and a
draw is half a win, as in our scores. (Plackett and Luce's generalises it to more sides; with two they are the same.)

Two things keep ratings from becoming surer than they can be. A match counts as at most `MATCH_BATTLES` battles in the same proportion:
further battles of the same two players on the same rules tell more of that pair, but not of how either fares against others. And no
sigma falls below `LEAST_SIGMA`, so that ratings go on moving as the field changes. Players are frozen, so openskill's own drift is off.

openskill is imported where it is used: without it everything but `rated` works.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Literal

import msgspec

from esper.league.record import Record

if TYPE_CHECKING:
    from openskill.models import BradleyTerryFull

MATCH_BATTLES = 32
LEAST_SIGMA = 1.0
HOW_TO_INSTALL = "install openskill with: pip install 'esper-grow[league]'"

Outcome = Literal["win", "draw", "loss"]
_RANKS: dict[Outcome, list[float]] = {"win": [0, 1], "draw": [0, 0], "loss": [1, 0]}  # lower is better


class Rating(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A strength that is normally distributed. New players begin at openskill's usual 25 ± 25/3.

    >>> print(Rating(), Rating(mu=30.0, sigma=1.5).ordinal)
    25.0 ± 8.3 25.5
    """

    mu: float = 25.0
    sigma: float = 25.0 / 3

    def __str__(self) -> str:
        return f"{self.mu:.1f} ± {self.sigma:.1f}"

    @property
    def ordinal(self) -> float:
        """What the strength very likely exceeds; the order of the standings."""
        return self.mu - 3 * self.sigma


def is_available() -> bool:
    return importlib.util.find_spec("openskill") is not None


def rated(player: Rating, opponent: Rating, record: Record) -> tuple[Rating, Rating]:
    """The ratings of both after a match, told from the side of `player`. The same match always gives the same ratings."""
    model = _model()
    ours, theirs = (model.create_rating([rating.mu, rating.sigma]) for rating in (player, opponent))
    for outcome in spread(shrunk(record, MATCH_BATTLES)):
        [[ours], [theirs]] = model.rate([[ours], [theirs]], ranks=_RANKS[outcome])
        ours.sigma, theirs.sigma = max(ours.sigma, LEAST_SIGMA), max(theirs.sigma, LEAST_SIGMA)
    return Rating(ours.mu, ours.sigma), Rating(theirs.mu, theirs.sigma)


def shrunk(record: Record, battles: int) -> Record:
    """At most so many battles, in the proportions of `record`: whole parts first, then what is left to the largest fractions.

    >>> shrunk(Record(wins=300, draws=100, losses=112), 32)
    Record(wins=19, draws=6, losses=7)
    """
    if record.battles <= battles:
        return record
    exact = [count * battles for count in (record.wins, record.draws, record.losses)]  # in units of 1 / record.battles
    counts = [part // record.battles for part in exact]
    by_fraction = sorted(range(3), key=lambda index: exact[index] % record.battles, reverse=True)
    for index in by_fraction[: battles - sum(counts)]:
        counts[index] += 1
    wins, draws, losses = counts
    return Record(wins, draws, losses)


def spread(record: Record) -> list[Outcome]:
    """The battles one by one, each outcome evenly over the match: the last ones weigh most, and which ones those were is not known.

    >>> spread(Record(wins=3, draws=1, losses=1))
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
