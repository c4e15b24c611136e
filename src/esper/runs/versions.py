"""Versions of saved states, and the migrations that bring a state of an earlier version to the present one. Imports no torch.

    def name_the_seed(state):                                  # version 1 had one unnamed random seed
        return {"model": state["model"], "seeds": {"data": state["seed"]}}

    LEARNER = Versions("ppo", {1: name_the_seed})              # a new state has version 2

Every kind of file that a later esper must read has one such table: checkpoints of growth and of learners, policies, leagues, controllers
and players. A change of what is saved adds a row, and the version counts the rows. Nothing else in esper knows an earlier form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Migration = Callable[[Any], Any]


class VersionError(ValueError):
    """A state has a version that cannot be read. The message completes a sentence that begins with the name of the file."""


@dataclass(frozen=True, slots=True)
class Versions:
    """All versions of one kind of state. `migrations[v]` turns a state of version v into one of version v + 1."""

    kind: str  # stored in the file
    migrations: dict[int, Migration] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if sorted(self.migrations) != list(range(1, self.present)):
            found = sorted(self.migrations)
            raise ValueError(f"the migrations of {self.kind!r} start from the versions {found}; they must begin with 1 and leave out none")

    @property
    def present(self) -> int:
        """Version of the states that are written now."""
        return len(self.migrations) + 1

    def check(self, version: object, *, writer: str = "") -> int:
        """Return the version, which a file claims. Raise VersionError if there is no such version. `writer` is the esper that wrote it."""
        if type(version) is not int or version < 1:
            raise VersionError(f"is damaged: the version of its state is {version!r}, and versions are numbers from 1")
        if version > self.present:
            raise VersionError(
                f"was written by a newer esper{f' ({writer})' if writer else ''}: the version of its state is {version}, this one reads up "
                f"to {self.present}; update esper"
            )
        return version

    def migrated(self, state: Any, version: object, *, writer: str = "") -> Any:
        """Return a state of this version in its present form. Raise VersionError if that is not possible."""
        for number in range(self.check(version, writer=writer), self.present):
            try:
                state = self.migrations[number](state)
            except Exception as error:  # a migration may raise anything on a damaged state
                raise VersionError(
                    f"is too old: its state cannot be brought from version {number} to {number + 1} ({type(error).__name__}: {error})"
                ) from error
        return state
