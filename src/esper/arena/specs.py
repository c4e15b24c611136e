"""Materials, weapons, unit classes and physical constants of the arena, as typed tables.

All constants of the simulation come from here, and so do the tables of docs/arena_rules.md. Distances are metres (one column of terrain
is one metre wide), times are seconds, the unit of an angle is in its name. Imports no torch, so that the command line starts quickly.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

CLIMB_M = 1.0  # highest step between two columns that a unit walks up
CLOUDS = 2  # smoke clouds that one unit can have at the same time; a new one replaces its oldest


class Material(IntEnum):
    """Material of a column of terrain."""

    OPEN = 0
    SOLID = 1
    REINFORCED = 2
    GLASS = 3
    WATER = 4
    LAVA = 5
    FOLIAGE = 6


class MaterialSpec(msgspec.Struct, frozen=True):
    """Properties of a material."""

    hit_points: int = 0  # hit points of one column; 0: it cannot be destroyed
    is_seen_through: bool = False  # its height does not block sight
    is_walked_through: bool = False  # its height blocks sight, but neither carries units nor stops projectiles
    heat_per_s: float = 0.0  # heat added to units that stand in it
    damage_per_s: float = 0.0  # damage to body and legs of units that stand in it
    speed_factor: float = 1.0  # factor on the speed of units that walk in it


MATERIALS: dict[Material, MaterialSpec] = {
    Material.OPEN: MaterialSpec(),
    Material.SOLID: MaterialSpec(hit_points=100),
    Material.REINFORCED: MaterialSpec(),
    Material.GLASS: MaterialSpec(hit_points=10, is_seen_through=True),
    Material.WATER: MaterialSpec(heat_per_s=-30.0, speed_factor=0.6),
    Material.LAVA: MaterialSpec(heat_per_s=40.0, damage_per_s=5.0),
    Material.FOLIAGE: MaterialSpec(hit_points=20, is_walked_through=True),
}


class Weapon(msgspec.Struct, frozen=True):
    """One kind of weapon. Without `flight_mps` it hits its target at once, and the target must be seen, not only sensed."""

    damage: float  # damage of a direct hit
    range_m: float  # largest distance to the target when it is fired
    heat: float  # heat added to the unit that fires it
    cooldown_s: float  # time from one shot to the next
    arc_deg: float  # angle of the cone ahead in which it fires
    stability_damage: float = 0.0  # loss of stability by a direct hit
    flight_mps: float = 0.0  # speed of the projectile; 0: it hits at once
    is_homing: bool = False  # turns towards its target in flight
    is_ballistic: bool = False  # flies in an arc, and leads its target
    splash_m: float = 0.0  # radius in which it damages all units
    painted_range_m: float = 0.0  # range against a painted target; 0: the same as the plain range
    target_heat: float = 0.0  # heat added to the unit that is hit
    leg_share: float = 0.0  # share of a direct hit's damage that the legs take in addition
    suppresses_s: float = 0.0  # time for which it slows the unit that is hit
    paints_s: float = 0.0  # time for which it marks the unit that is hit
    smoke_s: float = 0.0  # time for which its cloud of smoke blocks sight


WEAPONS: dict[str, Weapon] = {
    "laser": Weapon(damage=14, range_m=8, heat=22, cooldown_s=0.6, arc_deg=120, target_heat=6),
    "flamer": Weapon(damage=4, range_m=4.5, heat=10, cooldown_s=0.15, arc_deg=90, target_heat=15, leg_share=0.5),
    "missile": Weapon(
        damage=40, range_m=12, painted_range_m=50, heat=45, cooldown_s=3.0, arc_deg=180,
        stability_damage=15, flight_mps=12, is_homing=True, splash_m=2.5,
    ),
    "gauss": Weapon(
        damage=50, range_m=20, heat=15, cooldown_s=4.0, arc_deg=60,
        stability_damage=60, flight_mps=40, is_ballistic=True, splash_m=1.5, leg_share=0.25,
    ),
    "autocannon": Weapon(
        damage=8, range_m=12, heat=6, cooldown_s=0.2, arc_deg=90, stability_damage=5, flight_mps=25, leg_share=0.25, suppresses_s=1.2
    ),
    "painter": Weapon(damage=0, range_m=10, heat=5, cooldown_s=1.0, arc_deg=60, paints_s=5.0),
    "smoke": Weapon(damage=0, range_m=20, heat=10, cooldown_s=5.0, arc_deg=180, flight_mps=15, smoke_s=10.0),
}  # fmt: skip


class UnitClass(msgspec.Struct, frozen=True):
    """One class of unit."""

    max_speed_mps: float  # straight ahead
    yaw_radps: float  # turning rate
    jets_mps2: float  # upward thrust; 0: no jets
    hit_points: float  # at 0 it is dead
    leg_points: float  # at 0 it limps
    heat_cap: float  # above this heat it shuts down
    cooling_per_s: float  # heat lost per second
    tons: float  # weight that counts in the zone
    radar_quality: float  # factor on the range of the radar
    role: str  # intended use
    weapons: tuple[str, ...]  # it fires one of them at a time


ROLES = ("scout", "striker", "line", "anchor")

# Speed, yaw, jets, hit points, leg points, heat cap, cooling, tons, radar quality, role and weapons.
CLASSES: dict[str, UnitClass] = {
    "scout": UnitClass(7.0, 1.8, 18, 60, 30, 75, 13, 20, 1.5, "scout", ("laser", "painter", "smoke")),
    "light": UnitClass(6.8, 1.5, 16, 80, 40, 80, 12, 35, 1.2, "striker", ("laser", "flamer", "smoke")),
    "medium": UnitClass(5.5, 1.0, 0, 150, 75, 100, 11, 55, 1.0, "line", ("autocannon", "missile", "laser")),
    "heavy": UnitClass(2.5, 0.6, 0, 200, 100, 130, 10, 85, 0.8, "anchor", ("gauss", "missile", "laser")),
}

PACK = ("medium", "light", "heavy", "scout", "medium")  # classes of a team's units in order; repeated after the fifth


class Physics(msgspec.Struct, frozen=True):
    """The constants of the rules."""

    tick_s: float = 0.05  # time step of the physics
    ticks_per_decision: int = 5  # ticks for which an action holds
    gravity_mps2: float = 9.81  # acts on units in the air and on ballistic projectiles
    radius_m: float = 0.6  # radius of every unit
    tall_m: float = 2.0  # height of every unit
    eye_m: float = 1.6  # height of the eye above the feet
    muzzle_m: float = 1.2  # height above the feet from which shots start and at which they are aimed
    acceleration_s: float = 0.5  # time from rest to full speed
    air_control: float = 0.3  # acceleration in the air as a share of that on the ground
    sideways_factor: float = 0.6  # factor on the full speed, sideways and backwards
    ceiling_m: float = 12.0  # largest height of the feet above the lowest ground
    fuel_s: float = 2.0  # time of full jets with a full tank
    refuel_per_s: float = 0.25  # fuel regained per second on the ground
    jets_heat_per_s: float = 15.0  # heat added per second at full throttle
    landing_mps: float = 6.0  # a faster landing damages the legs
    landing_damage: float = 5.0  # damage to the legs for every m/s above that
    broken_legs_factor: float = 0.4  # factor on the full speed on the ground, with legs at 0
    suppressed_factor: float = 0.7  # factor on the full speed, while suppressed
    venting_factor: float = 0.5  # factor on the full speed, while venting
    vent_cooling: float = 3.0  # factor on the cooling of the class, while venting
    restart_share: float = 0.5  # share of the heat cap below which a unit that was shut down starts again
    heat_limit_share: float = 1.5  # share of the heat cap above which heat does not rise
    stability: float = 100.0  # stability of every unit; at 0 it falls
    steadying_per_s: float = 20.0  # stability regained per second
    fallen_s: float = 3.0  # time that a fallen unit lies
    rear_factor: float = 1.5  # factor on the damage of a hit from behind
    rear_deg: float = 120.0  # a hit at more than this angle from the nose is from behind
    steering_per_s: float = 5.0  # rate at which a homing projectile turns towards its target
    splash_share: float = 0.5  # share of a direct hit's damage, and of its loss of stability, in the middle of the splash; 0 at the edge
    sight_m: float = 30.0  # range of sight
    radar_m: float = 14.0  # range of radar of quality 1, through everything
    hot_share: float = 0.8  # share of the heat cap above which a unit is sensed by its heat; a venting unit always is
    hot_m: float = 25.0  # range of sensing by heat
    cloud_m: float = 4.0  # radius of a cloud of smoke
    assist_s: float = 10.0  # time for which damage to a unit counts as an assist to its death
    win_share: float = 0.5  # share of the battle's time for which a team must hold the zone to win


PHYSICS = Physics()
RULES_VERSION = 2  # version of these tables and of the phases; a replay of another version cannot be verified
