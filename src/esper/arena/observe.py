"""Observations of units: tables of the names, widths and meanings of their numbers.

Directions are in the unit's own frame: ahead is x, left is y. Positions in the world frame are turned by half a turn for the second team,
so that both sides observe the same. Widths, slices and the tables of docs/arena_rules.md come from here; `esper.arena.native.views` writes
the numbers in this order.
"""

from __future__ import annotations

from typing import NamedTuple

from esper.arena.config import ArenaConfig
from esper.arena.specs import CLASSES, ROLES, WEAPONS, Material

VIEW = 11  # cells on a side of the terrain that a unit observes around itself
CELL_M = 1.5  # distance between those cells

MATERIAL_SIGNALS = {
    Material.OPEN: 0.0,
    Material.SOLID: 0.5,
    Material.REINFORCED: 0.75,
    Material.GLASS: 0.25,
    Material.WATER: -0.75,
    Material.LAVA: 1.0,
    Material.FOLIAGE: -0.25,
}  # one number for each material; those that matter most for walking are far apart


class Field(NamedTuple):
    """A named group of numbers in an observation."""

    name: str
    width: int
    meaning: str


def width(fields: tuple[Field, ...]) -> int:
    """Return how many numbers all fields have together."""
    return sum(field.width for field in fields)


def slices(fields: tuple[Field, ...]) -> dict[str, slice]:
    """Return the slice of each field in its part."""
    found, start = {}, 0
    for field in fields:
        found[field.name] = slice(start, start + field.width)
        start += field.width
    return found


OWN = (
    Field("class", len(CLASSES), "one-hot: " + ", ".join(CLASSES)),
    Field("role", len(ROLES), "one-hot: " + ", ".join(ROLES)),
    Field("hit_points", 1, "share of the class's"),
    Field("legs", 1, "share of the class's"),
    Field("heat", 1, "share of the class's cap; above 1 it is shut down"),
    Field("stability", 1, "share of 100"),
    Field("fuel", 1, "share of the tank; 0 without jets"),
    Field("heading", 2, "cosine and sine, in the team's world frame"),
    Field("position", 2, "x and y in half map sides, in the team's world frame"),
    Field("height", 2, "height of the feet above the lowest ground, and above the ground below, in 10 m"),
    Field("velocity", 3, "ahead, left and up, in 10 m/s"),
    Field("is_grounded", 1, "0 or 1"),
    Field("is_shut_down", 1, "0 or 1"),
    Field("is_venting", 1, "0 or 1"),
    Field("fallen", 1, "share of the 3 s that are left"),
    Field("suppressed", 1, "share of the 1.2 s that are left"),
    Field("painted", 1, "share of the 5 s that are left"),
    Field("has_weapon", len(WEAPONS), "0 or 1: " + ", ".join(WEAPONS)),
    Field("loading", len(WEAPONS), "share of the cooldown that is left"),
    Field("zone", 4, "its centre ahead and left, and the distance to its edge, in half map sides; 1 inside, else 0"),
    Field("route", 3, "next step of the route to the zone, ahead and left, and the length of the route in map sides"),
    Field("zone_radius", 1, "in 10 m"),
    Field("zone_holder", 2, "0 or 1: held by the own team, by the other"),
    Field("score", 2, "of the own team and of the other, as a share of the score that wins"),
    Field("clock", 1, "share of the battle's time that is left"),
    Field("living", 2, "share of living units in the own team and in the other"),
)
_IS_THERE = Field("is_there", 1, "0 or 1; all else is 0 where it is 0")
_PLACE = (
    Field("place", 3, "ahead, left and up, in 20 m"),
    Field("nearness", 1, "1 / (1 + distance / 5 m)"),
)
_CONDITION = (
    Field("class", len(CLASSES), "one-hot"),
    Field("hit_points", 1, "share of the class's"),
    Field("heat", 1, "share of the class's cap"),
    Field("heading", 2, "cosine and sine of the difference to one's own"),
)
ALLY = (
    _IS_THERE,
    *_PLACE,
    *_CONDITION,
)
CONTACT = (
    _IS_THERE,
    Field("is_seen", 1, "1 with a clear line of sight, 0 if only sensed"),
    *_PLACE,
    Field("bearing", 2, "cosine and sine"),
    Field("velocity", 2, "ahead and left, in 10 m/s"),
    *_CONDITION,
    Field("is_helpless", 1, "0 or 1: fallen or shut down"),
    Field("is_painted", 1, "0 or 1"),
)
TERRAIN = (
    Field("rise", 1, "height that carries units, above the feet, in 4 m, from -1 to 1"),
    Field("cover", 1, "height that blocks sight, above the feet, in 4 m, from 0 to 1"),
    Field("material", 1, ", ".join(f"{signal:g} {material.name.lower()}" for material, signal in MATERIAL_SIGNALS.items())),
)
STATE_UNIT = (
    Field("is_alive", 1, "0 or 1"),
    Field("position", 3, "in the team's world frame, half map sides; z in 10 m"),
    Field("hit_points", 1, "share of the class's"),
    Field("heat", 1, "share of the class's cap"),
    Field("is_helpless", 1, "0 or 1: fallen or shut down"),
)
# The view of the whole battle is not its whole state: these are not part of it.
STATE_LACKS = (
    "headings", "velocities", "legs", "stability", "fuel", "venting", "loading of weapons", "suppression", "paint", "smoke", "projectiles",
    "terrain",
)  # fmt: skip
STATE_BATTLE = tuple(field for field in OWN if field.name in ("zone_radius", "zone_holder", "score", "clock"))


class Part(NamedTuple):
    """A part of the observation vector: the same fields, repeated `times` times."""

    name: str
    fields: tuple[Field, ...]
    times: int

    @property
    def width(self) -> int:
        return self.times * width(self.fields)


def parts(config: ArenaConfig) -> tuple[Part, ...]:
    """Return the parts of the observation vector, in order."""
    return (
        Part("own", OWN, 1),
        Part("contacts", CONTACT, config.contacts),
        Part("allies", ALLY, config.allies),
        Part("terrain", TERRAIN, VIEW * VIEW),
    )


def observation_width(config: ArenaConfig) -> int:
    return sum(part.width for part in parts(config))


def state_width(config: ArenaConfig) -> int:
    """Return the width of the view of the whole battle of a centralised critic: every unit, own team first; zone, scores and clock."""
    return config.units * width(STATE_UNIT) + width(STATE_BATTLE)
