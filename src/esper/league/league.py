"""A league: fixed players to measure against, and past selves of the learner to play against.

    league = League(anchors=["weak", "strong"])
    league.enter("step-1000", step=1000, weights=policy.state_dict())
    league.record("step-1000", "strong", WinRecord(wins=100, draws=4, losses=152))
    league.settle("step-1000")                                                  # it becomes a member or is removed
    league.record(LEARNER, "step-1000", WinRecord(wins=20, losses=12))          # battles of the training itself
    league.opponents()                                                          # {'step-1000': 1.0}

Anchors never leave. A past self enters as a candidate and plays a trial. A candidate that beats the best member becomes a member and is
the best one from then on; if the league is then too large, the least useful member retires. The learner changes with every update, so its
own battles only tell how hard each opponent is for it now. They count neither in the table nor in the ratings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from esper.league import ratings
from esper.league.config import LeagueConfig
from esper.league.ratings import Rating
from esper.league.record import TableRow, WinRecord, WinTable, check_pair, in_order
from esper.runs.versions import VersionError, Versions

if TYPE_CHECKING:
    from torch import Tensor

Weights = Mapping[str, "Tensor"]
EntryKind = Literal["anchor", "candidate", "member", "retired"]

LEARNER = "learner"
VERSIONS = Versions("league")  # of the states that `League.to_state` returns
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # names become file names
_NEWCOMER = Rating().ordinal  # stands in for a missing rating


class LeagueError(ValueError):
    """A request that a league refuses, or a saved league that cannot be read. The message says why and what to do."""


class LeagueEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One player of the league."""

    name: str
    kind: EntryKind
    step: int | None = None  # step of the learner when the player entered, counted as in events; None for anchors


class RecentScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The learner's score against one opponent. Older battles count less."""

    points: float = 0.0
    battles: float = 0.0

    def then(self, record: WinRecord, *, memory: int) -> RecentScore:
        """Return the score after more battles, scaled down so that at most `memory` battles count."""
        points, battles = self.points + record.points, self.battles + record.battles
        scale = min(1.0, memory / battles)
        return RecentScore(points * scale, battles * scale)

    @property
    def score(self) -> float:
        return self.points / self.battles


class TrialResult(msgspec.Struct, frozen=True):
    """Result of a candidate's trial: whether it was promoted, and which members retired."""

    is_promoted: bool
    reason: str
    retired: tuple[str, ...] = ()


class LeagueState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that is saved of a league, except the weights."""

    version: int
    config: LeagueConfig
    is_rated: bool
    entries: list[LeagueEntry]
    table: list[TableRow]
    ratings: dict[str, Rating]
    recent: dict[str, RecentScore]


class League:
    """Anchors, candidates and members, with their results, ratings and weights. Not thread-safe.

    `is_rated` is fixed when the league is made; by default, a league is rated if openskill is installed. Ratings help to choose the members
    that retire, so a rated league cannot continue without openskill.
    """

    def __init__(self, anchors: Sequence[str] = (), config: LeagueConfig | None = None, *, is_rated: bool | None = None) -> None:
        self.config = config or LeagueConfig()
        self.is_rated = ratings.is_available() if is_rated is None else is_rated
        if self.is_rated and not ratings.is_available():
            raise ImportError(f"a league with ratings needs openskill; {ratings.HOW_TO_INSTALL}")
        self.table = WinTable()
        self._entries: dict[str, LeagueEntry] = {}  # anchors first, then past selves; members in the order of their promotion
        self._weights: dict[str, dict[str, Tensor]] = {}  # weights of candidates and members
        self._ratings: dict[str, Rating] = {}
        self._recent: dict[str, RecentScore] = {}
        for name in anchors:
            self._check_is_free(name)
            self._entries[name] = LeagueEntry(name, "anchor")

    # Queries

    @property
    def entries(self) -> tuple[LeagueEntry, ...]:
        return tuple(self._entries.values())

    @property
    def anchors(self) -> tuple[str, ...]:
        return self._names("anchor")

    @property
    def members(self) -> tuple[str, ...]:
        """Past selves that the learner may meet, oldest promotion first."""
        return self._names("member")

    @property
    def best(self) -> str | None:
        """The member promoted last, because it beat the best member before it. None while there are no members."""
        return self.members[-1] if self.members else None

    @property
    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Weights of all candidates and members, on the CPU. Do not change them in place."""
        return dict(self._weights)

    def entry(self, name: str) -> LeagueEntry:
        if name not in self._entries:
            raise LeagueError(f"there is no player {name!r} in the league; it has {sorted(self._entries)}")
        return self._entries[name]

    def rating(self, name: str) -> Rating | None:
        """Return a player's rating: that of a new player before its first match, None in a league without ratings."""
        self.entry(name)
        return self._ratings.get(name, Rating()) if self.is_rated else None

    def learner_score(self, name: str) -> float | None:
        """Return the learner's recent score against a player; None if they have not met."""
        self.entry(name)
        return self._recent[name].score if name in self._recent else None

    def opponents(self, names: Iterable[str] | None = None) -> dict[str, float]:
        """Return the probability of each of `names`, by default all members, to be drawn as the learner's opponent."""
        scores = {name: self.learner_score(name) for name in (self.members if names is None else names)}
        return opponent_weights(scores, power=self.config.hardness_power, floor=self.config.hardness_floor)

    def _names(self, kind: EntryKind) -> tuple[str, ...]:
        return tuple(entry.name for entry in self._entries.values() if entry.kind == kind)

    # Changes

    def enter(self, name: str, step: int, weights: Weights) -> None:
        """Add a past self as a candidate. The weights are copied."""
        self._check_is_free(name)
        if step < 0:
            raise LeagueError(f"the step of {name!r} is {step}; give a step of 0 or more")
        if not weights:
            raise LeagueError(f"{name!r} has no weights; give its state_dict()")
        self._weights[name] = {key: tensor.detach().cpu().clone() for key, tensor in weights.items()}
        self._entries[name] = LeagueEntry(name, "candidate", step)

    def _check_is_free(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise LeagueError(
                f"{name!r} cannot be a player's name; use up to 100 letters, digits, '.', '_' and '-', starting with a letter or digit"
            )
        if name == LEARNER or name in self._entries:
            owner = "the learner" if name == LEARNER else _with_article(self._entries[name].kind)
            raise LeagueError(f"{name!r} is taken by {owner}; choose another name")

    def record(self, player: str, opponent: str, record: WinRecord) -> None:
        """Add battles between two players, counted from the side of `player`. One of them may be `LEARNER`."""
        check_pair(player, opponent)
        for name in {player, opponent} - {LEARNER}:
            if self.entry(name).kind == "retired":
                raise LeagueError(f"{name!r} has left the league, so no more battles of it can be recorded")
        if not record.battles:
            return
        if LEARNER in (player, opponent):
            other, from_learner = (opponent, record) if player == LEARNER else (player, record.reversed())
            self._recent[other] = self._recent.get(other, RecentScore()).then(from_learner, memory=self.config.memory)
            return
        first, second, ordered = in_order(player, opponent, record)
        if self.is_rated:
            self._update_ratings(first, second, ordered)
        self.table.add(first, second, ordered)

    def _update_ratings(self, first: str, second: str, record: WinRecord) -> None:
        """Update the ratings of both players; only the candidate's if one of them is a candidate.

        The opponents of a candidate are rated when it becomes a member (`_rate_opponents`), so a rejected candidate leaves no trace.
        """
        after = ratings.rate_match(self._ratings.get(first, Rating()), self._ratings.get(second, Rating()), record)
        candidates = [name for name in (first, second) if self.entry(name).kind == "candidate"]
        for name, rating in zip((first, second), after, strict=True):
            if not candidates or name in candidates:
                self._ratings[name] = rating

    def settle(self, name: str) -> TrialResult:
        """Decide on a candidate after its trial: promote it to member, or remove it.

        Promotion retires the least useful members while the league is larger than `config.size`. Raises LeagueError if the candidate has
        not met the best member.
        """
        entry = self.entry(name)
        if entry.kind != "candidate":
            raise LeagueError(f"{name!r} is {_with_article(entry.kind)}; only candidates are settled")
        best, at = self.best, self.config.promote_at
        against = self.table.between(name, best) if best else None
        if against is not None and not against.battles:
            raise LeagueError(f"{name!r} has not met the best member, {best!r}; let them play and record it first")
        reason = "it is the first" if against is None else f"{against} against {best}, needed from {100 * at:.1f} % on"
        if not is_promoted(against, promote_at=at):
            self._remove_candidate(name)
            return TrialResult(False, reason)
        # Delete and insert again, so that the new member comes last: `best` relies on that order.
        del self._entries[name]
        self._entries[name] = LeagueEntry(name, "member", entry.step)
        if self.is_rated:
            self._rate_opponents(name)
        leaving = retirements(
            self.members,
            size=self.config.size,
            learner_scores={member: recent.score for member, recent in self._recent.items()},
            ordinals={member: rating.ordinal for member, rating in self._ratings.items()},
            beaten_at=self.config.beaten_at,
        )
        for member in leaving:
            self._retire(member)
        return TrialResult(True, reason, tuple(leaving))

    def _rate_opponents(self, name: str) -> None:
        """Update the ratings of all players that a new member met in its trial."""
        own = self._ratings.get(name, Rating())
        for other in (entry.name for entry in self.entries if entry.kind in ("anchor", "member") and entry.name != name):
            record = self.table.between(name, other)
            if record.battles:
                self._ratings[other] = ratings.rate_match(own, self._ratings.get(other, Rating()), record)[1]

    def _retire(self, name: str) -> None:
        """Remove a member's weights. Its results stay in the table."""
        self._entries[name] = LeagueEntry(name, "retired", self._entries[name].step)
        del self._weights[name]
        self._recent.pop(name, None)

    def _remove_candidate(self, name: str) -> None:
        """Remove a candidate and all its results."""
        self.table.remove(name)
        del self._entries[name], self._weights[name]
        self._ratings.pop(name, None)
        self._recent.pop(name, None)

    # State

    def to_state(self) -> dict[str, Any]:
        """Return everything except the weights as dicts, lists, strings and numbers. `from_state` restores an equal league."""
        state = LeagueState(
            version=VERSIONS.present,
            config=self.config,
            is_rated=self.is_rated,
            entries=list(self.entries),
            table=[TableRow(*row) for row in self.table],
            ratings=dict(self._ratings),
            recent=dict(self._recent),
        )
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(state))  # tuples become lists, as in a file that is read back
        return plain

    @classmethod
    def from_state(cls, state: Any, weights: Mapping[str, Weights] | None = None, *, config: LeagueConfig | None = None) -> League:
        """Restore a league from `to_state()` and the value of `league.weights`.

        Without `weights` the league can be inspected, but its players cannot play. `config` replaces the saved config. A rated league can
        be read without openskill; only recording battles needs it.
        """
        try:
            state = VERSIONS.migrated(state, state.get("version") if isinstance(state, dict) else None)
        except VersionError as error:
            raise LeagueError(f"the saved league {error}") from error
        try:
            saved = msgspec.convert({**state, "version": VERSIONS.present}, LeagueState)
            table = WinTable.from_rows(saved.table)
        except (msgspec.ValidationError, ValueError) as error:
            raise LeagueError(f"this is not the state of a league: {error}") from error
        # `is_rated` is set afterwards: the constructor would refuse a rated league where openskill is missing.
        league = cls(config=config or saved.config, is_rated=False)
        league.is_rated, league.table = saved.is_rated, table
        league._entries = {entry.name: entry for entry in saved.entries}
        league._ratings, league._recent = dict(saved.ratings), dict(saved.recent)
        if weights is not None:
            playing = [entry.name for entry in saved.entries if entry.kind in ("candidate", "member")]
            missing = [name for name in playing if name not in weights]
            if missing:
                raise LeagueError(f"the weights of {missing[0]!r} are missing; only those of {sorted(weights)} are given")
            league._weights = {name: dict(weights[name]) for name in playing}
        return league


# Rules of the league, as pure functions


def is_promoted(against_best: WinRecord | None, *, promote_at: float) -> bool:
    """Return whether a candidate becomes a member, given its record against the best member; None if there is no member yet.

    The first candidate always does. Later ones do if the lower end of the 95 % interval of their score is at least `promote_at`.
    """
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
    return min(beaten, key=lambda name: ordinals.get(name, _NEWCOMER)) if beaten else older[0]


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


def _with_article(kind: EntryKind) -> str:
    return {"anchor": "an anchor", "candidate": "a candidate", "member": "a member", "retired": "a past self that has left"}[kind]
