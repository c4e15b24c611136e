"""Standings of a league: ratings and results of its players, as a text table and as records."""

from __future__ import annotations

import msgspec

from esper.league.league import EntryKind, League
from esper.league.ratings import HOW_TO_INSTALL, Rating
from esper.league.record import WinRecord
from esper.text_table import aligned


class PlayerStanding(msgspec.Struct, frozen=True, kw_only=True):
    """One player in the standings."""

    name: str
    kind: EntryKind
    step: int | None
    rating: Rating | None  # None in a league without ratings
    games: int
    opponents: int  # players that it has met; a rating that rests on one of them says little
    against: dict[str, WinRecord]  # its record against each anchor that it has met
    learner_score: float | None  # recent score of the learner against it


def standing_rows(league: League, *, with_retired: bool = False) -> list[PlayerStanding]:
    """Return the players, strongest first. Without ratings: anchors first, then the others, newest first."""
    rows = [
        PlayerStanding(
            name=entry.name,
            kind=entry.kind,
            step=entry.step,
            rating=league.rating(entry.name),
            games=league.table.total(entry.name).battles,
            opponents=sum(league.table.between(entry.name, other).battles > 0 for other in league.table.players if other != entry.name),
            against={anchor: record for anchor in league.anchors if (record := league.table.between(entry.name, anchor)).battles},
            learner_score=league.learner_score(entry.name),
        )
        for entry in league.entries
        if with_retired or entry.kind != "retired"
    ]
    if league.is_rated:
        return sorted(rows, key=lambda row: -row.rating.ordinal if row.rating else 0.0)
    anchors = [row for row in rows if row.kind == "anchor"]
    return anchors + [row for row in reversed(rows) if row.kind != "anchor"]


def standings(league: League, *, with_retired: bool = False) -> str:
    """Return the standings as a text table. Scores are in percent, a draw counts half, with their 95 % intervals."""
    rows = standing_rows(league, with_retired=with_retired)
    header = ["name", "kind", "step", "rating", "games", "opponents", *(f"vs {anchor}" for anchor in league.anchors), "learner scores"]
    lines = [header, *(_line(row, league) for row in rows)]
    retired = sum(entry.kind == "retired" for entry in league.entries)
    notes = []
    if retired and not with_retired:
        notes.append(f"and {retired} that {'has' if retired == 1 else 'have'} left the league")
    if league.is_rated:
        notes.append("rating: mean ± deviation by openskill; sorted by mean − 3 deviations, because few games are no proof")
        if any(row.opponents == 1 for row in rows):
            notes.append("*: this rating rests on games against one opponent and cannot be compared with the others")
    else:
        notes.append(f"this league began without ratings; for the next one, {HOW_TO_INSTALL}")
    notes.append("vs: score against a bot, draws half, with its 95 % interval; learner scores: those of the player in training against it")
    return "\n".join([aligned(lines, numbers=True), *notes])


def _line(row: PlayerStanding, league: League) -> list[str]:
    score = "-" if row.learner_score is None else f"{100 * row.learner_score:.1f} %"
    against = [str(row.against.get(anchor, WinRecord())) for anchor in league.anchors]
    kind = "best" if row.name == league.best else row.kind
    rating = "-" if row.rating is None else f"{row.rating}{'*' if row.opponents == 1 else ''}"
    step = "-" if row.step is None else f"{row.step:,}"
    return [row.name, kind, step, rating, f"{row.games:,}", str(row.opponents), *against, score]
