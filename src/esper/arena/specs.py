"""What an arena is made of: materials, weapons, unit classes and the constants of its physics, as typed tables.

Everything that the simulation multiplies by comes from here, and so do the tables of docs/arena_rules.md. Distances are metres (one
column of terrain is one metre wide), times are seconds, angles as they are named. Imports no torch, so that a command line can show it.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

CLIMB_M = 1.0  # how high a step between two columns a unit walks up


class Material(IntEnum):
    """What a column of terrain is made of."""

    OPEN = 0
    SOLID = 1
    REINFORCED = 2
    GLASS = 3
    WATER = 4
    LAVA = 5
    FOLIAGE = 6


class MaterialSpec(msgspec.Struct, frozen=True):
    """What a material does to those who stand on it, look at it or shoot at it."""

    hit_points: int = 0  # of one column; 0: it cannot be destroyed
    is_seen_through: bool = False  # its height does not hide
    is_walked_through: bool = False  # its height hides, and neither carries nor stops shots
    heat_per_s: float = 0.0  # to who stands in it
    damage_per_s: float = 0.0  # likewise, to body and legs
    speed_factor: float = 1.0  # of who walks in it


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
    """One kind of weapon. Without `flight_mps` it hits at once whom it is aimed at, who must then be seen and not only sensed."""

    damage: float  # of a direct hit
    range_m: float  # of the target when it is fired
    heat: float  # to who fires it
    cooldown_s: float  # from one shot to the next
    arc_deg: float  # of the whole cone ahead in which it fires
    stability_damage: float = 0.0  # of a direct hit
    flight_mps: float = 0.0  # 0: it hits at once
    is_homing: bool = False  # turns after its target
    is_ballistic: bool = False  # flies in an arc, and leads its target
    splash_m: float = 0.0  # how far around it hurts everybody
    painted_range_m: float = 0.0  # against a painted target; 0: no other than the plain one
    target_heat: float = 0.0  # to who is hit
    leg_share: float = 0.0  # of a direct hit's damage that the legs take besides
    suppresses_s: float = 0.0  # slows who is hit for so long
    paints_s: float = 0.0  # marks who is hit for so long
    smoke_s: float = 0.0  # leaves a cloud that hides for so long


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
    yaw_radps: float  # how fast it turns
    jets_mps2: float  # upward thrust; 0: it has none
    hit_points: float  # without them it is dead
    leg_points: float  # without them it limps
    heat_cap: float  # above which it shuts down
    cooling_per_s: float  # heat that leaves
    tons: float  # what counts in the zone
    radar_quality: float  # times the radar's reach
    role: str  # what it is meant for
    weapons: tuple[str, ...]  # of which it fires one at a time


ROLES = ("scout", "striker", "line", "anchor")

CLASSES: dict[str, UnitClass] = {
    "scout": UnitClass(7.0, 1.8, 18, 60, 30, 75, 13, 20, 1.5, "scout", ("laser", "painter", "smoke")),
    "light": UnitClass(6.8, 1.5, 16, 80, 40, 80, 12, 35, 1.2, "striker", ("laser", "flamer", "smoke")),
    "medium": UnitClass(5.5, 1.0, 0, 150, 75, 100, 11, 55, 1.0, "line", ("autocannon", "missile", "laser")),
    "heavy": UnitClass(2.5, 0.6, 0, 200, 100, 130, 10, 85, 0.8, "anchor", ("gauss", "missile", "laser")),
}

PACK = ("medium", "light", "heavy", "scout", "medium")  # a team takes them in this order, and begins again after the fifth


class Physics(msgspec.Struct, frozen=True):
    """The constants of the rules."""

    tick_s: float = 0.05  # one step of the physics
    ticks_per_decision: int = 5  # in which an action holds
    gravity_mps2: float = 9.81  # pulls units in the air and ballistic projectiles
    radius_m: float = 0.6  # of every unit
    tall_m: float = 2.0  # is every unit
    eye_m: float = 1.6  # above the feet
    muzzle_m: float = 1.2  # above the feet; what is aimed at, too
    acceleration_s: float = 0.5  # from rest to full speed
    air_control: float = 0.3  # of the acceleration on the ground, in the air
    sideways_factor: float = 0.6  # of the full speed, sideways and backwards
    ceiling_m: float = 12.0  # above the lowest ground; feet never rise higher
    fuel_s: float = 2.0  # of full jets
    refuel_per_s: float = 0.25  # on the ground
    jets_heat_per_s: float = 15.0  # to who flies at full throttle
    landing_mps: float = 6.0  # a faster fall hurts the legs
    landing_damage: float = 5.0  # for every m/s above
    broken_legs_factor: float = 0.4  # of the full speed, on legs without points
    suppressed_factor: float = 0.7  # likewise, while suppressed
    venting_factor: float = 0.5  # likewise, while venting
    vent_cooling: float = 3.0  # times the class's cooling, while venting
    restart_share: float = 0.5  # of the heat cap, under which a unit that was shut down starts again
    heat_limit_share: float = 1.5  # of the heat cap, above which heat does not rise
    stability: float = 100.0  # of every unit; at 0 it falls
    steadying_per_s: float = 20.0  # how fast stability comes back
    fallen_s: float = 3.0  # how long a unit lies
    rear_factor: float = 1.5  # times the damage, from behind
    rear_deg: float = 120.0  # a hit from further than this off the nose is one from behind
    steering_per_s: float = 5.0  # how quickly a homing projectile turns towards its target
    splash_share: float = 0.5  # of a direct hit's damage, in the middle of the splash; less further out, nothing at its edge
    sight_m: float = 30.0  # how far units see
    radar_m: float = 14.0  # how far radar of quality 1 reaches, through everything
    hot_share: float = 0.8  # of the heat cap, above which a unit is sensed by its heat, as is one that vents
    hot_m: float = 25.0  # from how far away
    cloud_m: float = 4.0  # radius of smoke
    assist_s: float = 10.0  # how long having hurt somebody counts for an assist
    win_share: float = 0.5  # of the battle's seconds that a team must hold the zone


PHYSICS = Physics()
RULES_VERSION = 1  # of everything above and of the phases that use it; a replay of another version cannot be verified
