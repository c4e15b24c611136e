"""What can be set about an arena. Imports no torch, so that a command line can show it at once."""

from __future__ import annotations

import difflib
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from esper.arena.specs import CLASSES, PACK, PHYSICS, WEAPONS, Weapon
from esper.config import Config, ConfigError, Count, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Width

Landscape = Literal["city", "forest", "river", "ridges", "ruins"]
SMALLEST, LARGEST = 16, 128  # columns on a side of a map
WIDEST_CORNER = 10  # columns on a side of the square in which a team starts
APART_M = 2.0  # between units that start
MapSize = Annotated[int, Meta(ge=SMALLEST, le=LARGEST, multiple_of=2)]
TeamSize = Annotated[int, Meta(ge=1, le=16)]
FEWEST_PROJECTILES = 48  # slots in one battle


class RewardConfig(Config):
    """What a unit is paid for in one decision. Each is a function in `esper.arena.rewards`."""

    zone: NonNegativeFloat = 0.05  # for a second in which the own team holds the zone
    zone_lost: NonNegativeFloat = 0.0  # the cost of a second in which the other does; beside a cheap death it makes dying pay
    damage: NonNegativeFloat = 1.0  # for damage as great as the victim's full hit points
    hurt: NonNegativeFloat = 0.2  # the cost of as much damage to oneself, whoever did it
    friendly_fire: NonNegativeFloat = 1.0  # the cost of as much damage to one's own side, oneself included
    kill: NonNegativeFloat = 0.5  # for who hurt the victim most in the decision in which it fell
    assist: NonNegativeFloat = 0.2  # for everybody else who hurt it shortly before
    death: NonNegativeFloat = 0.2  # the cost of one's own
    outcome: NonNegativeFloat = 2.0  # for a battle won, to those who still live; half of it for a draw
    approach: NonNegativeFloat = 0.5  # potential of standing in the zone over being a whole map away from it
    team_share: Fraction = 0.3  # of what damage, kills and assists pay that is shared out among the living of the team
    gamma: Fraction = 0.99  # of the learner: approach is paid as gamma times the new potential less the old


class ArenaConfig(Config):
    """A batch of battles between two teams."""

    RENAMED: ClassVar = {"teams": "team_size"}

    battles: Count = 64  # fought at once
    team_size: TeamSize = 5  # units on each side
    smallest_team: TeamSize | None = None  # units on each side differ from battle to battle, from this to `team_size`; None: they do not
    pack: tuple[str, ...] = PACK  # classes of a team's units, first to last; begun again where the team is larger
    size: MapSize = 64  # columns on a side of the map
    maps: Count = 128  # different maps that battles are fought on
    battles_per_map: PositiveInt | None = None  # neighbouring battles share a map, and the next ones take the next; None: maps are drawn
    landscapes: tuple[Landscape, ...] = ("city", "forest", "river", "ridges", "ruins")  # that maps are drawn from
    seconds: PositiveFloat = 125.0  # after which a battle ends
    contacts: Width = 5  # nearest sensed enemies that a unit observes and can aim at
    allies: NonNegativeInt = 4  # nearest of the own team that it observes
    state_view: bool = False  # observations hold the whole battle too, for a centralised critic
    reward: RewardConfig = RewardConfig()

    def check(self) -> None:
        for name in self.pack:
            if name not in CLASSES:
                near = difflib.get_close_matches(name, CLASSES, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    "pack", expected="", got=name, problem=f"no unit class is named {name!r}; there are {', '.join(CLASSES)}{hint}"
                )
        if not self.pack:
            raise ConfigError("pack", expected="at least one unit class", got=self.pack)
        if not self.landscapes:
            raise ConfigError("landscapes", expected="at least one landscape", got=self.landscapes)
        if self.smallest_team is not None and self.smallest_team > self.team_size:
            raise ConfigError("smallest_team", expected=f"at most team_size ({self.team_size})", got=self.smallest_team)
        if self.team_size > room_for_team(self.size):
            raise ConfigError("team_size", expected="", got=self.team_size, problem=no_room(self.team_size, self.size))
        if self.decisions < 1:
            raise ConfigError("seconds", expected=f"at least one decision, {DECISION_S} s", got=self.seconds)

    @property
    def units(self) -> int:
        """Of both teams."""
        return 2 * self.team_size

    @property
    def unit_classes(self) -> tuple[str, ...]:
        """Names of the classes of all units, the first team's before the second's."""
        team = tuple(self.pack[index % len(self.pack)] for index in range(self.team_size))
        return team + team

    @property
    def decisions(self) -> int:
        """In a battle that goes on to the end."""
        return round(self.seconds / DECISION_S)

    @property
    def projectiles(self) -> int:
        """Slots of one unit. They are enough for all that its weapons can have in the air at once, so none is ever missing."""
        most = max(sum(in_flight(WEAPONS[name]) for name in CLASSES[unit].weapons) for unit in self.unit_classes)
        return max(most, -(-FEWEST_PROJECTILES // self.units))


DECISION_S = PHYSICS.tick_s * PHYSICS.ticks_per_decision


def corner_side(size: int) -> int:
    """Columns on a side of the flat square in which a team starts."""
    return min(WIDEST_CORNER, 2 * ((size + 2) // 6))


def units_per_row(size: int) -> int:
    """How many units stand side by side in a corner; as many such rows stand behind one another."""
    return int(corner_side(size) / APART_M)


def room_for_team(size: int) -> int:
    return units_per_row(size) ** 2


def no_room(team: int, size: int) -> str:
    """What is wrong with a team that is too large for a map, and what to do."""
    larger = [other for other in range(SMALLEST, LARGEST + 1, 2) if room_for_team(other) >= team]
    fix = f"use a size of at least {larger[0]}, or smaller teams" if larger else f"no map has room for more than {room_for_team(LARGEST)}"
    return f"a corner of a map of size {size} has room for {room_for_team(size)} units, not for a team of {team}; {fix}"


def ticks(seconds: float) -> int:
    """The whole number of ticks nearest to a time."""
    return round(seconds / PHYSICS.tick_s)


def life_ticks(weapon: Weapon) -> int:
    """How long a projectile flies at most: a quarter longer than its range takes."""
    reach = max(weapon.range_m, weapon.painted_range_m)
    return ticks(1.25 * reach / weapon.flight_mps) if weapon.flight_mps else 0


def in_flight(weapon: Weapon) -> int:
    """How many projectiles of one weapon can be in the air at once."""
    return -(-life_ticks(weapon) // ticks(weapon.cooldown_s))
