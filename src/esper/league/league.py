"""A league: fixed players to measure against, and past selves of the learner to play against.

    league = League(anchors=["weak", "strong"])
    league.enter("step-1000", step=1000, weights=policy.state_dict())
    league.record("step-1000", "strong", Record(wins=100, draws=4, losses=152))
    league.settle("step-1000")                                                  # it becomes a member, or leaves
    league.record(LEARNER, "step-1000", Record(wins=20, losses=12))             # in training
    league.opponents()                                                          # {'step-1000': 1.0}

Anchors never leave. A past self enters as a candidate, plays, and is settled: one that beats the best member becomes a member, which is
then the best, and may cost another its place. The learner itself is another player after every update: its battles say how hard the
others are for it now, and go into neither table nor ratings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from esper.league import ratings, rules
from esper.league.config import LeagueConfig
from esper.league.ratings import Rating
from esper.league.record import Record, TableRow, WinTable, check_pair, in_order

if TYPE_CHECKING:
    from torch import Tensor

Weights = Mapping[str, "Tensor"]
EntryKind = Literal["anchor", "candidate", "member", "retired"]

LEARNER = "learner"
VERSION = 2  # of the state; a higher one is refused. In version 1 no record told of maps
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # it becomes a file's name


class LeagueError(ValueError):
    """A league that cannot be asked this, or cannot be read, with the reason and what to do."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One player."""

    name: str
    kind: EntryKind
    step: int | None = None  # of the learner, as events count it, when it entered; anchors have none


class Recent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The learner's battles against one opponent; old ones count for less and less."""

    points: float = 0.0
    battles: float = 0.0

    def then(self, record: Record, *, memory: int) -> Recent:
        """With more battles, scaled so that no more than `memory` count."""
        points, battles = self.points + record.points, self.battles + record.battles
        scale = min(1.0, memory / battles)
        return Recent(points * scale, battles * scale)

    @property
    def score(self) -> float:
        return self.points / self.battles


class Settled(msgspec.Struct, frozen=True):
    """What became of a candidate, and who left for it."""

    is_promoted: bool
    reason: str
    retired: tuple[str, ...] = ()


class LeagueState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a league but the weights, as it is stored."""

    version: int
    config: LeagueConfig
    is_rated: bool
    entries: list[Entry]
    table: list[TableRow]
    ratings: dict[str, Rating]
    recent: dict[str, Recent]


class League:
    """Not thread-safe: one owner changes it. `is_rated` is decided once, by default by whether openskill is installed: it has a say in who
    leaves, so that a league that began with ratings goes on with them or not at all."""

    def __init__(self, anchors: Sequence[str] = (), config: LeagueConfig | None = None, *, is_rated: bool | None = None) -> None:
        self.config = config or LeagueConfig()
        self.is_rated = ratings.is_available() if is_rated is None else is_rated
        if self.is_rated and not ratings.is_available():
            raise ImportError(f"a league with ratings needs openskill; {ratings.HOW_TO_INSTALL}")
        self.table = WinTable()
        self._entries: dict[str, Entry] = {}  # anchors, then past selves; members in the order of their promotion
        self._weights: dict[str, dict[str, Tensor]] = {}  # of candidates and members
        self._ratings: dict[str, Rating] = {}
        self._recent: dict[str, Recent] = {}
        for name in anchors:
            self._check_is_free(name)
            self._entries[name] = Entry(name, "anchor")

    # Who is there

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    @property
    def anchors(self) -> tuple[str, ...]:
        return self._names("anchor")

    @property
    def members(self) -> tuple[str, ...]:
        """Past selves that are opponents, oldest promotion first."""
        return self._names("member")

    @property
    def best(self) -> str | None:
        """The member that was promoted last: it beat the best one before it."""
        return self.members[-1] if self.members else None

    @property
    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Of all candidates and members, on the CPU. They are never changed: who wants to, copies them."""
        return dict(self._weights)

    def entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise LeagueError(f"there is no player {name!r} in the league; it has {sorted(self._entries)}")
        return self._entries[name]

    def rating(self, name: str) -> Rating | None:
        """None in a league without ratings; that of a new player where none was earned yet."""
        self.entry(name)
        return self._ratings.get(name, Rating()) if self.is_rated else None

    def learner_score(self, name: str) -> float | None:
        """How the learner scores against a player these days; None where they have not met."""
        self.entry(name)
        return self._recent[name].score if name in self._recent else None

    def opponents(self, names: Iterable[str] | None = None) -> dict[str, float]:
        """How likely each of these players, all members by default, is drawn as the learner's opponent; sums to 1."""
        scores = {name: self.learner_score(name) for name in (self.members if names is None else names)}
        return rules.opponent_weights(scores, power=self.config.hardness_power, floor=self.config.hardness_floor)

    # What happens

    def enter(self, name: str, step: int, weights: Weights) -> None:
        """A past self becomes a candidate. The weights are copied."""
        self._check_is_free(name)
        if step < 0:
            raise LeagueError(f"the step of {name!r} is {step}; steps are counted from 0")
        if not weights:
            raise LeagueError(f"{name!r} has no weights; give its state_dict()")
        self._weights[name] = {key: tensor.detach().cpu().clone() for key, tensor in weights.items()}
        self._entries[name] = Entry(name, "candidate", step)

    def record(self, player: str, opponent: str, record: Record) -> None:
        """Battles between any two who are there, or between one of them and `LEARNER`, told from the side of the first."""
        check_pair(player, opponent)
        for name in {player, opponent} - {LEARNER}:
            if self.entry(name).kind == "retired":
                raise LeagueError(f"{name!r} has left the league and plays no more battles")
        if not record.battles:
            return
        if LEARNER in (player, opponent):
            other, learners = (opponent, record) if player == LEARNER else (player, record.reversed())
            self._recent[other] = self._recent.get(other, Recent()).then(learners, memory=self.config.memory)
            return
        first, second, told = in_order(player, opponent, record)
        if self.is_rated:
            self._rate(first, second, told)
        self.table.add(first, second, told)

    def _rate(self, first: str, second: str, record: Record) -> None:
        """A candidate does not move those whom it is measured against: that waits until it is a member, and else never happens."""
        after = ratings.rated(self._ratings.get(first, Rating()), self._ratings.get(second, Rating()), record)
        candidates = [name for name in (first, second) if self.entry(name).kind == "candidate"]
        for name, rating in zip((first, second), after, strict=True):
            if not candidates or name in candidates:
                self._ratings[name] = rating

    def _rate_opponents(self, name: str) -> None:
        """What the trial of a new member says of those whom it met."""
        own = self._ratings.get(name, Rating())
        for other in (entry.name for entry in self.entries if entry.kind in ("anchor", "member") and entry.name != name):
            record = self.table.between(name, other)
            if record.battles:
                self._ratings[other] = ratings.rated(own, self._ratings.get(other, Rating()), record)[1]

    def settle(self, name: str) -> Settled:
        """A candidate becomes a member, and the least useful one leaves where the league is full; or the candidate is forgotten."""
        entry = self.entry(name)
        if entry.kind != "candidate":
            raise LeagueError(f"{name!r} is {_with_article(entry.kind)}; only candidates are settled")
        best, at = self.best, self.config.promote_at
        against = self.table.between(name, best) if best else None
        if against is not None and not against.battles:
            raise LeagueError(f"{name!r} has not met the best member, {best!r}; let them play and record it first")
        reason = "it is the first" if against is None else f"{against} against {best}, needed from {100 * at:.1f} % on"
        if not rules.is_promoted(against, promote_at=at):
            self._forget(name)
            return Settled(False, reason)
        del self._entries[name]  # and to the end, where the newest stand
        self._entries[name] = Entry(name, "member", entry.step)
        if self.is_rated:
            self._rate_opponents(name)
        leaving = rules.retirements(
            self.members,
            size=self.config.size,
            learner_scores={member: recent.score for member, recent in self._recent.items()},
            ordinals={member: rating.ordinal for member, rating in self._ratings.items()},
            beaten_at=self.config.beaten_at,
        )
        for member in leaving:
            self._retire(member)
        return Settled(True, reason, tuple(leaving))

    # State

    def to_state(self) -> dict[str, Any]:
        """All of it but the weights, as dicts, lists, strings and numbers; `from_state` makes an equal league of it."""
        state = LeagueState(
            version=VERSION,
            config=self.config,
            is_rated=self.is_rated,
            entries=list(self.entries),
            table=[TableRow(*row) for row in self.table],
            ratings=dict(self._ratings),
            recent=dict(self._recent),
        )
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(state))  # tuples as lists, as they come back
        return plain

    @classmethod
    def from_state(cls, state: Any, weights: Mapping[str, Weights] | None = None, *, config: LeagueConfig | None = None) -> League:
        """The league of a state, with the weights that `league.weights` had; None makes one that can be looked at, not played.

        `config` replaces the one it had. A league with ratings can be read without openskill; only more battles need it.
        """
        found = state.get("version") if isinstance(state, dict) else None
        if found not in range(1, VERSION + 1):
            raise LeagueError(
                f"the state of this league has version {found!r}, and this esper reads up to {VERSION}; use the one that wrote it"
            )
        try:
            told = msgspec.convert(state, LeagueState)
            table = WinTable.from_rows(told.table)
        except (msgspec.ValidationError, ValueError) as error:
            raise LeagueError(f"this is not the state of a league: {error}") from error
        league = cls(config=config or told.config, is_rated=False)
        league.is_rated, league.table = told.is_rated, table
        league._entries = {entry.name: entry for entry in told.entries}
        league._ratings, league._recent = dict(told.ratings), dict(told.recent)
        if weights is not None:
            league._weights = {entry.name: _weights_of(entry.name, weights) for entry in told.entries if _is_playing(entry)}
        return league

    def _names(self, kind: EntryKind) -> tuple[str, ...]:
        return tuple(entry.name for entry in self._entries.values() if entry.kind == kind)

    def _check_is_free(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise LeagueError(f"{name!r} cannot be a player's name; use up to 100 letters, digits, '.', '_' and '-', the first no sign")
        if name == LEARNER or name in self._entries:
            raise LeagueError(f"{name!r} is taken by {'the learner' if name == LEARNER else _with_article(self._entries[name].kind)}")

    def _retire(self, name: str) -> None:
        """Its results stay, for people to look at."""
        self._entries[name] = Entry(name, "retired", self._entries[name].step)
        del self._weights[name]
        self._recent.pop(name, None)

    def _forget(self, name: str) -> None:
        self.table.remove(name)
        del self._entries[name], self._weights[name]
        self._ratings.pop(name, None)
        self._recent.pop(name, None)


def _is_playing(entry: Entry) -> bool:
    return entry.kind in ("candidate", "member")


def _weights_of(name: str, weights: Mapping[str, Weights]) -> dict[str, Tensor]:
    if name not in weights:
        raise LeagueError(f"the weights of {name!r} are missing; there are those of {sorted(weights)}")
    return dict(weights[name])


def _with_article(kind: EntryKind) -> str:
    return {"anchor": "an anchor", "candidate": "a candidate", "member": "a member", "retired": "a past self that has left"}[kind]
