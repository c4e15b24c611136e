"""The arrays of battles: state, maps, tables of the rules, and the names of their fields.

Compiled functions take these named tuples as arguments and allocate nothing. All numbers with a fraction are float32.

Shapes: B = battles, U = units, T = units of a team, K = projectile slots of one unit, C = contacts, W = kinds of weapons, M = maps,
S = columns on a side of a map. A column's index in a flattened map is i·S + j.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, get_type_hints

import numpy as np
from numpy.typing import NDArray

from esper.arena.config import BOTS, ArenaConfig, life_ticks, ticks
from esper.arena.observe import CELL_M, MATERIAL_SIGNALS, VIEW, observation_width, state_width
from esper.arena.routes import STEPS
from esper.arena.skills import SKILLS, Expertise, Tactics
from esper.arena.specs import CLASSES, CLIMB_M, CLOUDS, MATERIALS, PHYSICS, ROLES, WEAPONS, Material

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]
Longs = NDArray[np.int64]
# Fields of Battles.unit
(
    X, Y, Z, VELOCITY_X, VELOCITY_Y, VELOCITY_Z,
    COS, SIN,  # of the heading
    HIT_POINTS, LEGS, HEAT, STABILITY, FUEL,
    FORWARD, STRAFE, YAW, JETS,  # orders
    AIM_M,  # range of the ordered weapon against the ordered target
    PUSH_X, PUSH_Y,  # how far other units push it in this tick
    OLD_NEARNESS,  # potential of its position before the decision
    UNIT_FIELDS,
) = range(22)  # fmt: skip

# Fields of Battles.number. The last ones, from HAS_FIRED on, are about the last decision; a battle that begins keeps them.
(
    FALLEN, SUPPRESSED, PAINTED,  # timers in ticks
    IS_SHUT_DOWN, IS_VENTING, IS_GROUNDED, IS_PRESENT,
    SEEN, SENSED,  # enemies as bits; bit e is the e-th unit of the other team
    WEAPON, TARGET, VENT_ORDER,  # orders; the target is -1 if it does not fire
    HAS_FIRED,  # in this tick
    FIRED_ONCE,
    BURSTS,  # its projectiles that burst in this tick
    SCARS,  # columns that its projectiles hit
    WAS_ALIVE, WAS_PRESENT,  # before the decision
    HAS_DIED, KILLER,  # the killer is -1 if the unit did not die by an enemy's weapon
    NUMBER_FIELDS,
) = range(21)  # fmt: skip

SHELL_X, SHELL_Y, SHELL_Z, SHELL_VX, SHELL_VY, SHELL_VZ, SHELL_FIELDS = range(7)  # of Battles.shell
SHELL_WEAPON, SHELL_TARGET, SHELL_LIFE, SHELL_IMPACT, SHELL_COUNTS = range(5)  # of Battles.shell_count
NO_IMPACT, TERRAIN_IMPACT = -2, -1  # values of SHELL_IMPACT; others are the unit that was hit
DESTROYED = 255  # value of Battles.worn for a destroyed column

# Fields of Battles.status. Ticks held are the score; the second team's follow the first's. The last ones, from LARGEST_TEAM on, are about
# the next battle or about what came before; a battle that begins keeps them.
(
    HELD, HELD_2, HOLDER, DECISION, EPISODE, MAP, OLD_HELD, OLD_HELD_2,
    PLACE,  # index of the battle in the arena
    TEAM_LIMIT,  # LARGEST_TEAM when the battle began
    LARGEST_TEAM,  # limit of the team size of the next battle
    OVERFLOW,  # shots that found no free projectile slot
    HAS_ENDED, WINNER, IS_BY_TIME,  # of the last decision; the winner is -1 for a draw
    LAST_DECISION, LAST_HELD, LAST_HELD_2, LAST_LIVING, LAST_LIVING_2,  # after the last decision, before the next battle began
    STATUS_FIELDS,
) = range(21)  # fmt: skip

# Fields of Battles.reward: the parts of esper.arena.arena.Rewards in order, and what a unit is paid in all
(
    PAID_ZONE, PAID_DAMAGE, PAID_HURT, PAID_KILL, PAID_ASSIST, PAID_DEATH, PAID_OUTCOME, PAID_APPROACH, PAID, REWARD_FIELDS,
) = range(10)  # fmt: skip

# Fields of Tables
MAX_SPEED, YAW_RATE, JET_THRUST, FULL_HIT_POINTS, FULL_LEGS, HEAT_CAP, COOLING, TONS, RADAR = range(9)  # of unit
KIND, ROLE = range(2)  # of unit_count
W_DAMAGE, W_RANGE, W_PAINTED_RANGE, W_HEAT, W_ARC_COS, W_STABILITY, W_SPEED, W_SPLASH, W_TARGET_HEAT, W_LEG_SHARE, W_WORTH = range(11)
W_COOLDOWN, W_LIFE, W_IS_INSTANT, W_IS_HOMING, W_IS_BALLISTIC, W_SUPPRESSES, W_PAINTS, W_SMOKES = range(8)  # of weapon_count
C_FLOOR, C_TOP, C_MATERIAL, C_HIT_POINTS, COLUMN_FIELDS = range(5)  # of Maps.column; the hit points are 0 if it cannot be destroyed
HEIGHT_STEP = 1 / 16  # metres; unit of C_FLOOR, the height that carries units and stops shots, and of C_TOP, the height that blocks sight
M_HEAT, M_DAMAGE, M_SPEED, M_SIGNAL = range(4)  # of material
PAINTER, SMOKE = list(WEAPONS).index("painter"), list(WEAPONS).index("smoke")
WEAPON_KINDS, CLASS_KINDS, ROLE_KINDS = len(WEAPONS), len(CLASSES), len(ROLES)


class Battles(NamedTuple):
    """The state of all battles, and what the last decision gave."""

    unit: Floats  # [UNIT_FIELDS, B, U]
    number: Ints  # [NUMBER_FIELDS, B, U]
    cooldown: Ints  # [W, B, U] ticks
    harm: Ints  # [U, B, U] ticks; attacker, battle, victim
    blow: Floats  # [U, B, U] damage of this tick; attacker, battle, victim
    taken: Floats  # [U, B, U] damage of this decision as a share of the victim's full hit points; attacker, battle, victim
    shell: Floats  # [SHELL_FIELDS, B, U, K]
    shell_count: Ints  # [SHELL_COUNTS, B, U, K]
    cloud: Floats  # [3, B, U, CLOUDS] x, y, z
    cloud_left: Ints  # [B, U, CLOUDS] ticks
    contact: Ints  # [C, B, U] sensed enemies, nearest first; -1: none
    scar: Ints  # [2, B, U, K + ticks of a decision] columns that projectiles hit in this decision, and the damage
    worn: Bytes  # [B, S·S] damage that columns have taken; DESTROYED: it is open ground now
    status: Ints  # [STATUS_FIELDS, B]
    seed: Longs  # [B]
    reward: Floats  # [REWARD_FIELDS, B, U]


class Maps(NamedTuple):
    """All maps. Battles index them and never change them."""

    column: Bytes  # [M, S·S, COLUMN_FIELDS]; the bytes of a column are together, because observing 121 of them waits for memory
    way: Bytes  # [M, S·S] direction of the next step to the zone, 0 .. 8
    route_m: Floats  # [M, S·S]
    zone_radius: Floats  # [M]


class Tables(NamedTuple):
    """Properties of units, weapons, materials and bots."""

    unit: Floats  # [fields, U]
    unit_count: Ints  # [fields, U]
    has_weapon: Bytes  # [W, U]
    weapon: Floats  # [fields, W]
    weapon_count: Ints  # [fields, W]
    material: Floats  # [fields, materials]
    direction: Floats  # [2, 9] unit vectors of the steps of a route, and no step
    spawn: Floats  # [2, U]
    cell: Floats  # [2, cells of the observed terrain] how far ahead and how far left
    reward: Floats  # [weights of ArenaRewardConfig, in order]
    skill: Floats  # [bots, fields]


class Rules(Protocol):
    """Constants of the rules and of the config."""

    side: int  # columns; the name must not be one of the attributes of a NumPy record
    last: float  # index of the last column of a side
    half_m: float  # half a side of a map
    team: int  # T
    decisions: int  # of a whole battle
    win_held: float  # score that wins, in seconds
    win_score: float  # the same, for observations
    smallest_team: int
    battles_per_map: int  # 0: each battle draws a map
    map_groups: int  # groups of battles that share a map
    contacts: int
    allies: int
    tick: float
    ticks: int
    gravity: float
    radius: float
    tall: float
    eye: float
    muzzle: float
    speed_up: float  # share of the top speed that a unit gains in a tick
    air_control: float
    sideways: float
    climb: float
    ceiling: float
    fuel: float
    refuel: float
    jets_heat: float  # per tick
    landing: float
    landing_damage: float
    broken_legs: float
    suppressed: float
    venting: float
    vent_cooling: float
    restart: float
    heat_limit: float
    stability: float
    steadying: float  # per tick
    fallen: int
    rear_factor: float
    rear_cos: float
    steering: float  # per tick
    splash: float
    sight: float
    radar: float
    hot_share: float
    hot: float
    cloud: float
    assist: int
    longest_suppression: int
    longest_paint: int


RuleBook = np.recarray[Any, Any]  # [1], a record with the fields of Rules


class Choices(NamedTuple):
    """The actions of all units, [B·U] each; motion is [B·U, 4]."""

    fire: Longs
    target: Longs
    vent: Longs
    motion: Floats


class Views(NamedTuple):
    """Observations and masks of all units."""

    observation: Floats  # [B, U, width]
    whole: Floats  # [B, U, state width] the whole battle, for a centralised critic; the width is 0 if the config does not ask for it
    fire: Bytes  # [B·U, 1 + W]
    target: Bytes  # [B·U, 1 + W, C]
    vent: Bytes  # [B·U, 2]


def make_battles(config: ArenaConfig, battles: int) -> Battles:
    """Return battles of zeros."""
    units, slots = config.units, config.projectiles

    def floats(*shape: int) -> Floats:
        return np.zeros(shape, np.float32)

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, np.int32)

    return Battles(
        unit=floats(UNIT_FIELDS, battles, units),
        number=ints(NUMBER_FIELDS, battles, units),
        cooldown=ints(WEAPON_KINDS, battles, units),
        harm=ints(units, battles, units),
        blow=floats(units, battles, units),
        taken=floats(units, battles, units),
        shell=floats(SHELL_FIELDS, battles, units, slots),
        shell_count=ints(SHELL_COUNTS, battles, units, slots),
        cloud=floats(3, battles, units, CLOUDS),
        cloud_left=ints(battles, units, CLOUDS),
        contact=ints(config.contacts, battles, units),
        scar=ints(2, battles, units, slots + PHYSICS.ticks_per_decision),
        worn=np.zeros((battles, config.size**2), np.uint8),
        status=ints(STATUS_FIELDS, battles),
        seed=np.zeros(battles, np.int64),
        reward=floats(REWARD_FIELDS, battles, units),
    )


def make_actions(config: ArenaConfig, battles: int) -> Choices:
    """Return actions with which all units stand still and do nothing."""
    rows = battles * config.units
    fire, target, vent = (np.zeros(rows, np.int64) for _ in range(3))
    return Choices(fire, target, vent, motion=np.zeros((rows, 4), np.float32))


def make_views(config: ArenaConfig, battles: int) -> Views:
    """Return empty observations and masks."""
    rows = battles * config.units
    return Views(
        observation=np.zeros((battles, config.units, observation_width(config)), np.float32),
        whole=np.zeros((battles, config.units, state_width(config) if config.state_view else 0), np.float32),
        fire=np.zeros((rows, 1 + WEAPON_KINDS), np.uint8),
        target=np.zeros((rows, 1 + WEAPON_KINDS, config.contacts), np.uint8),
        vent=np.zeros((rows, 2), np.uint8),
    )


def make_maps(height: Floats, material: NDArray[np.int8], way: NDArray[np.int8], route_m: Floats, zone_radius: Floats) -> Maps:
    """Return maps from grids [M, S, S]."""
    specs = [MATERIALS[kind] for kind in Material]
    count = len(height)
    kinds = material.reshape(count, -1).astype(np.uint8)
    exact = height.reshape(count, -1) / HEIGHT_STEP
    steps = np.clip(exact, 0, 255).astype(np.uint8)
    if (steps != exact).any():
        raise ValueError(
            f"heights of maps must be multiples of {HEIGHT_STEP} m from 0 to {255 * HEIGHT_STEP} m, got {height.max()} m at most"
        )

    def by_kind(values: list[Any]) -> NDArray[Any]:
        return np.array(values)[kinds]

    column = np.zeros((*kinds.shape, COLUMN_FIELDS), np.uint8)
    column[..., C_FLOOR] = np.where(by_kind([spec.is_walked_through for spec in specs]), 0, steps)
    column[..., C_TOP] = np.where(by_kind([spec.is_seen_through for spec in specs]), 0, steps)
    column[..., C_MATERIAL] = kinds
    column[..., C_HIT_POINTS] = by_kind([spec.hit_points for spec in specs])
    return Maps(
        column=column,
        way=way.reshape(count, -1).astype(np.uint8),
        route_m=route_m.reshape(count, -1).astype(np.float32),
        zone_radius=zone_radius.astype(np.float32),
    )


def make_tables(config: ArenaConfig, spawns: Floats) -> Tables:
    """Return the tables of the units of this config, and of all weapons, materials and bots. `spawns` is [U, 2]."""
    units = [CLASSES[name] for name in config.unit_classes]
    weapons = list(WEAPONS.values())
    names = list(CLASSES)
    # Damage per tick; bots count one shot in a decision.
    worth = [one.damage / max(ticks(one.cooldown_s), PHYSICS.ticks_per_decision) for one in weapons]
    unit_rows = [
        [one.max_speed_mps, one.yaw_radps, one.jets_mps2, one.hit_points, one.leg_points, one.heat_cap, one.cooling_per_s, one.tons,
         one.radar_quality]
        for one in units
    ]  # fmt: skip
    weapon_rows = [
        [one.damage, one.range_m, one.painted_range_m or one.range_m, one.heat, math.cos(math.radians(one.arc_deg / 2)),
         one.stability_damage, one.flight_mps, one.splash_m, one.target_heat, one.leg_share, value]
        for one, value in zip(weapons, worth, strict=True)
    ]  # fmt: skip
    weapon_counts = [
        [ticks(one.cooldown_s), life_ticks(one), one.flight_mps == 0, one.is_homing, one.is_ballistic, ticks(one.suppresses_s),
         ticks(one.paints_s), ticks(one.smoke_s)]
        for one in weapons
    ]  # fmt: skip
    materials = [(MATERIALS[kind], MATERIAL_SIGNALS[kind]) for kind in Material]
    material_rows = [[one.heat_per_s, one.damage_per_s, one.speed_factor, signal] for one, signal in materials]
    steps = np.array([*STEPS, (0, 0)], np.float32)
    lengths = np.maximum(np.sqrt((steps * steps).sum(1, keepdims=True)), np.float32(1e-12))
    weights = config.reward
    return Tables(
        unit=np.array(unit_rows, np.float32).T.copy(),
        unit_count=np.array([[names.index(name) for name in config.unit_classes], [ROLES.index(one.role) for one in units]], np.int32),
        has_weapon=np.array([[name in one.weapons for one in units] for name in WEAPONS], np.uint8),
        weapon=np.array(weapon_rows, np.float32).T.copy(),
        weapon_count=np.array(weapon_counts, np.int32).T.copy(),
        material=np.array(material_rows, np.float32).T.copy(),
        direction=(steps / lengths).T.copy(),
        spawn=np.ascontiguousarray(spawns.T, np.float32),
        cell=_cells(),
        reward=np.array([getattr(weights, name) for name in weights.__struct_fields__], np.float32),
        skill=_skills(),
    )


def _cells() -> Floats:
    """Return the positions [2, cells] of the observed terrain's cells: rows from behind to ahead, each row from right to left."""
    steps = (np.arange(VIEW) - (VIEW - 1) // 2).astype(np.float32) * np.float32(CELL_M)
    return np.stack((np.repeat(steps, VIEW), np.tile(steps, VIEW)))


# Fields of Tables.skill: those of Skill, Tactics and Expertise
(
    KEEPS_MOVING, PICKS_WEAPON, VENTS_AT, PAINT, ROAMS, HAS_TACTICS, FOCUS, CAUTION, IDLE_VENTS_AT, SPACING,
    LIKED_SCOUT_M, LIKED_LIGHT_M, LIKED_MEDIUM_M, LIKED_HEAVY_M, RETREAT_M, SWAY, PULL, IS_EXPERT, SKILL_FIELDS,
) = range(19)  # fmt: skip
EXPERT: Any = Expertise(*range(SKILL_FIELDS, SKILL_FIELDS + len(Expertise._fields)))  # EXPERT.focus is the index of that setting
RANDOM_BOT = BOTS.index("random")


def _skills() -> Floats:
    rows = np.zeros((len(BOTS), SKILL_FIELDS + len(EXPERT)), np.float32)
    for index, name in enumerate(BOTS):
        skill = SKILLS.get(name)
        if skill is not None:
            has_tactics, is_expert = skill.tactics is not None, skill.expertise is not None
            own = (skill.keeps_moving, skill.picks_weapon, skill.vents_at, skill.paint, skill.roams)
            rows[index] = (*own, has_tactics, *(skill.tactics or Tactics()), is_expert, *(skill.expertise or Expertise()))
    return rows


# Fields of Tables.reward, in the order of ArenaRewardConfig
(
    R_ZONE, R_DAMAGE, R_HURT, R_FRIENDLY, R_KILL, R_ASSIST, R_DEATH, R_OUTCOME, R_APPROACH, R_SHARE, R_ZERO_SUM, R_PAYS_DEAD, R_GAMMA,
) = range(13)  # fmt: skip


def make_rules(config: ArenaConfig) -> RuleBook:
    """Return the constants of the rules as an array with one record, which is passed as one pointer and compiles faster than a tuple."""
    physics = PHYSICS
    values: dict[str, float] = {
        "side": config.size,
        "last": config.size - 1,
        "half_m": config.size / 2,
        "team": config.team_size,
        "decisions": config.decisions,
        "win_held": config.seconds * physics.win_share - 1e-4,
        "win_score": config.seconds * physics.win_share,
        "smallest_team": config.smallest_team or config.team_size,
        "battles_per_map": config.battles_per_map or 0,
        "map_groups": -(-config.battles // (config.battles_per_map or 1)),
        "contacts": config.contacts,
        "allies": config.allies,
        "tick": physics.tick_s,
        "ticks": physics.ticks_per_decision,
        "gravity": physics.gravity_mps2,
        "radius": physics.radius_m,
        "tall": physics.tall_m,
        "eye": physics.eye_m,
        "muzzle": physics.muzzle_m,
        "speed_up": physics.tick_s / physics.acceleration_s,
        "air_control": physics.air_control,
        "sideways": physics.sideways_factor,
        "climb": CLIMB_M,
        "ceiling": physics.ceiling_m,
        "fuel": physics.fuel_s,
        "refuel": physics.refuel_per_s,
        "jets_heat": physics.jets_heat_per_s * physics.tick_s,
        "landing": physics.landing_mps,
        "landing_damage": physics.landing_damage,
        "broken_legs": physics.broken_legs_factor,
        "suppressed": physics.suppressed_factor,
        "venting": physics.venting_factor,
        "vent_cooling": physics.vent_cooling,
        "restart": physics.restart_share,
        "heat_limit": physics.heat_limit_share,
        "stability": physics.stability,
        "steadying": physics.steadying_per_s * physics.tick_s,
        "fallen": ticks(physics.fallen_s),
        "rear_factor": physics.rear_factor,
        "rear_cos": math.cos(math.radians(physics.rear_deg)),
        "steering": physics.steering_per_s * physics.tick_s,
        "splash": physics.splash_share,
        "sight": physics.sight_m,
        "radar": physics.radar_m,
        "hot_share": physics.hot_share,
        "hot": physics.hot_m,
        "cloud": physics.cloud_m,
        "assist": ticks(physics.assist_s),
        "longest_suppression": max(ticks(one.suppresses_s) for one in WEAPONS.values()),
        "longest_paint": max(ticks(one.paints_s) for one in WEAPONS.values()),
    }
    kinds = [(name, np.int64 if kind is int else np.float32) for name, kind in get_type_hints(Rules).items()]
    return np.array([tuple(values[name] for name, _ in kinds)], dtype=np.dtype(kinds, align=True)).view(np.recarray)
