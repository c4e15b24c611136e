"""Settings of an arena. Imports no torch, so that the command line starts quickly."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from esper.arena.specs import CLASSES, PACK, PHYSICS, WEAPONS, Weapon
from esper.config import Config, ConfigError, Count, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Width
from esper.text_table import did_you_mean

Landscape = Literal["city", "forest", "river", "ridges", "ruins"]
# Bots are stored by their place in this list, so new ones go to its end.
BotName = Literal["random", "weak", "middle", "strong", "strong-v1", "expert", "middle-v1", "expert-v1"]
BOTS: tuple[str, ...] = get_args(BotName)
SMALLEST, LARGEST = 16, 128  # columns on a side of a map
WIDEST_CORNER = 10  # largest number of columns on a side of the square in which a team starts
APART_M = 2.0  # distance between units at the start
MapSize = Annotated[int, Meta(ge=SMALLEST, le=LARGEST, multiple_of=2)]
TeamSize = Annotated[int, Meta(ge=1, le=16)]
MOST_DECISIONS = 4096  # of a battle; random numbers of bots would repeat after them
FEWEST_PROJECTILES = 48  # smallest number of projectile slots in one battle


class ArenaRewardConfig(Config):
    """Weights of the parts of a unit's reward."""

    zone: NonNegativeFloat = 0.05  # for each second that the own team holds the zone
    damage: NonNegativeFloat = 1.0  # for damage equal to the victim's full hit points
    hurt: NonNegativeFloat = 0.2  # cost of damage by weapons equal to the own full hit points, whoever fired
    friendly_fire: NonNegativeFloat = 1.0  # cost of damage equal to the full hit points of a unit of the own team, oneself included
    kill: NonNegativeFloat = 0.5  # for the unit that did the most damage in the decision in which the victim died
    assist: NonNegativeFloat = 0.2  # for every other unit that damaged the victim shortly before
    death: NonNegativeFloat = 0.2  # cost of the own death
    outcome: NonNegativeFloat = 2.0  # for a battle that the team wins, and the cost of one that it loses; a draw pays nothing
    approach: NonNegativeFloat = 0.5  # difference of potential between standing in the zone and being a whole map away from it
    team_share: Fraction = 0.3  # share of the rewards for damage, kills and assists that is divided among the team
    zero_sum: Fraction = 1.0  # share of the other team's mean reward, without the outcome, that is subtracted; 1: even trades pay nothing
    pays_dead: bool = True  # the dead get what their team gets until the battle ends; false: a unit's episode ends with its death
    gamma: Fraction = 0.997  # discount of the learner; approach pays gamma times the new potential minus the old one


class ArenaConfig(Config):
    """A batch of battles between two teams."""

    battles: Count = 64  # battles fought at the same time
    team_size: TeamSize = 5  # units on each side
    smallest_team: TeamSize | None = None  # draw the team size of each battle from this to `team_size`; None: always `team_size`
    pack: tuple[str, ...] = PACK  # classes of a team's units in order, repeated if the team is larger
    size: MapSize = 64  # columns on a side of the map
    maps: Count = 1024  # number of different maps
    battles_per_map: PositiveInt | None = None  # this many neighbouring battles share a map; None: each battle draws a map
    landscapes: tuple[Landscape, ...] = ("city", "forest", "river", "ridges", "ruins")  # landscapes that maps are drawn from
    seconds: PositiveFloat = 125.0  # time limit of a battle
    contacts: Width = 5  # number of nearest sensed enemies that a unit observes and can aim at
    allies: NonNegativeInt = 4  # number of nearest units of the own team that it observes
    state_view: bool = False  # add a summary of the whole battle to the observations, for a centralised critic
    reward: ArenaRewardConfig = ArenaRewardConfig()

    def check(self) -> None:
        for name in self.pack:
            if name not in CLASSES:
                hint = did_you_mean(name, CLASSES)
                problem = f"no unit class is named {name!r}; there are {', '.join(CLASSES)}{hint and f'; {hint}'}"
                raise ConfigError("pack", expected="", got=name, problem=problem)
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
        if self.decisions > MOST_DECISIONS:
            raise ConfigError("seconds", expected=f"at most {MOST_DECISIONS * DECISION_S:g}", got=self.seconds)

    @property
    def units(self) -> int:
        """Number of units of both teams."""
        return 2 * self.team_size

    @property
    def unit_classes(self) -> tuple[str, ...]:
        """Class names of all units, first team first."""
        team = tuple(self.pack[index % len(self.pack)] for index in range(self.team_size))
        return team + team

    @property
    def decisions(self) -> int:
        """Number of decisions in a battle that lasts until the time limit."""
        return round(self.seconds / DECISION_S)

    @property
    def projectiles(self) -> int:
        """Projectile slots of one unit. They are enough for everything that its weapons can have in the air at the same time."""
        most = max(sum(in_flight(WEAPONS[name]) for name in CLASSES[unit].weapons) for unit in self.unit_classes)
        return max(most, -(-FEWEST_PROJECTILES // self.units))


DECISION_S = PHYSICS.tick_s * PHYSICS.ticks_per_decision


def corner_side(size: int) -> int:
    """Return the number of columns on a side of the flat square in which a team starts."""
    return min(WIDEST_CORNER, 2 * ((size + 2) // 6))


def units_per_row(size: int) -> int:
    """Return how many units start side by side in a corner. A corner has as many rows as units in a row."""
    return int(corner_side(size) / APART_M)


def room_for_team(size: int) -> int:
    """Return how many units have room in the corner of a map."""
    return units_per_row(size) ** 2


def no_room(team: int, size: int) -> str:
    """Return the error message for a team that is too large for a map."""
    larger = [other for other in range(SMALLEST, LARGEST + 1, 2) if room_for_team(other) >= team]
    fix = f"use a size of at least {larger[0]}, or smaller teams" if larger else f"no map has room for more than {room_for_team(LARGEST)}"
    return f"a corner of a map of size {size} has room for {room_for_team(size)} units, not for a team of {team}; {fix}"


def ticks(seconds: float) -> int:
    """Return a time in ticks, rounded."""
    return round(seconds / PHYSICS.tick_s)


def life_ticks(weapon: Weapon) -> int:
    """Return the longest flight of a projectile in ticks: 1.25 times the flight over its range."""
    reach = max(weapon.range_m, weapon.painted_range_m)
    return ticks(1.25 * reach / weapon.flight_mps) if weapon.flight_mps else 0


def in_flight(weapon: Weapon) -> int:
    """Return how many projectiles of one weapon can be in the air at the same time."""
    return -(-life_ticks(weapon) // ticks(weapon.cooldown_s))
