"""The bots of `esper.arena.bots` for one unit: a random one, scripted ones in three strengths, and the expert.

A bot knows what its unit observes, and remembers nothing. It writes the same kind of actions as a policy. Its coins are hashes of the
battle's seed, the decision and the unit, so a battle can be repeated.
"""

from __future__ import annotations

import math

from esper.arena.config import MOST_DECISIONS
from esper.arena.native import layout as at
from esper.arena.native.battle import (
    FROM_24_BITS,
    STREAM_COIN,
    STREAM_FIRE,
    STREAM_MOTION,
    STREAM_TARGET,
    STREAM_VENT,
    draw,
)  # fmt: skip
from esper.arena.native.compiling import const, f32, floor, for_battles, scalar
from esper.arena.native.layout import Battles, Bytes, Choices, Ints, Longs, Maps, RuleBook, Rules, Tables, Views
from esper.arena.native.ticks import can_act, column_at, floor_at, material_at, score_of
from esper.arena.native.views import FAR, is_helpless, is_seen, living_allies, next_nearest, reaches
from esper.arena.observe import CELL_M
from esper.arena.routes import ARRIVED
from esper.arena.specs import CLASSES, Material

ZERO, ONE, TWO, HALF, SMALL = const(0.0), const(1.0), const(2.0), const(0.5), const(1e-3)
TURN_GAIN = const(3.0)  # yaw order per radian of error
THIRD_TANGENT = const(math.tan(1 / 3))  # tangent of the error from which on the yaw order is full
ARC_3, ARC_5, ARC_7, ARC_9, ARC_11 = (const((-1) ** (n // 2) / n) for n in (3, 5, 7, 9, 11))  # series of the arc tangent
TOUGHEST = const(max(unit.hit_points for unit in CLASSES.values()))
FARTHER = const(0.01)  # smaller value of every next contact
APPROACH, HURT_SHARE, HOT_SHARE, GAP_M, CLOSE_M = const(0.7), const(0.35), const(0.7), const(3.0), const(16.0)
SWAY_DECISIONS = 4  # decisions between two random changes of the sideways direction
READY_WITHIN = 4  # ticks
ROAM_DECISIONS = 4  # decisions for which a unit roams
STREAM_ROAM, STREAM_SIDE = 16, 17  # streams of random numbers, after those of `battle`
LAVA = int(Material.LAVA)
NEAR_M = const(10.0)  # distance at which an ally counts as near a contact
FIGHT_M = const(12.0)  # distance within which units count for the comparison of forces
CLUMP_M, APART_M = const(2.5), const(4.0)  # distances to an ally below which it goes away from it, and above which it may go to it
LINE_M = const(0.9)  # distance of an ally to the line of a shot below which the shot is not fired
GUIDED_CHANCE = const(0.8)  # chance of a hit by projectiles that home or lead their target
OUT_OF_ARC = const(0.3)  # factor on the value of a shot for which the unit must turn first
SEEN_BONUS = const(0.5)  # additional preference for an opponent that is seen
OPPONENT_M = const(10.0)  # distance that outweighs a preference of 1 for an opponent
CELL = const(CELL_M)  # distance between observed cells of the terrain
FALL_MPS = const(4.5)  # falling speed above which the jets brake


@scalar
def yaw_towards(x: float, y: float, cos: float, sin: float) -> float:
    """Return the yaw order that turns a heading towards a direction: three times the angle, at most 1; 0 without a direction."""
    ahead, left = x * cos + y * sin, y * cos - x * sin
    if ahead <= ZERO or abs(left) >= THIRD_TANGENT * ahead:
        return ONE if left > ZERO else (-ONE if left < ZERO else (ONE if ahead < ZERO else ZERO))
    tangent = left / ahead
    square = tangent * tangent
    angle = tangent * (ONE + square * (ARC_3 + square * (ARC_5 + square * (ARC_7 + square * (ARC_9 + square * ARC_11)))))
    return min(max(angle * TURN_GAIN, -ONE), ONE)


@scalar
def period(s: Battles, b: int, decisions: int) -> int:
    """Return a number that changes with every battle of a place, and after every `decisions` decisions."""
    return int(s.status[at.EPISODE, b]) * MOST_DECISIONS + int(s.status[at.DECISION, b]) // decisions


@scalar
def coin(s: Battles, b: int, u: int, salt: int) -> float:
    """Return 1 or -1, drawn again every second: the direction of the sideways motion that makes a unit hard to hit."""
    word = draw(s.seed[b] + salt, period(s, b, SWAY_DECISIONS), u, STREAM_COIN)
    return ONE if word & 1 == 0 else -ONE


@scalar
def order_direction(s: Battles, actions: Choices, x: float, y: float, b: int, u: int) -> None:
    """Order a motion in a direction, cut to what orders can be, ahead and aside each."""
    cos, sin = s.unit[at.COS, b, u], s.unit[at.SIN, b, u]
    row = b * s.unit.shape[2] + u
    actions.motion[row, 0] = min(max(x * cos + y * sin, -ONE), ONE)
    actions.motion[row, 1] = min(max(x * sin - y * cos, -ONE), ONE)


@scalar
def act_scripted(
    s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, bot: int, flip: float, b: int, u: int
) -> None:  # fmt: skip
    """Write the actions of a scripted bot. `flip` is 1 or -1, the side to which it sways."""
    skill = tables.skill
    has_tactics, picks = skill[bot, at.HAS_TACTICS] > ZERO, skill[bot, at.PICKS_WEAPON] > ZERO
    cap = tables.unit[at.HEAT_CAP, u]
    heat = s.unit[at.HEAT, b, u]

    # The best pair of a weapon and a contact; the value of a pair that cannot be used is 0.
    best, best_weapon, best_slot = ZERO, 0, 0
    for weapon in range(at.WEAPON_KINDS):
        if tables.has_weapon[weapon, u] == 0:
            continue
        if has_tactics and heat + tables.weapon[at.W_HEAT, weapon] > skill[bot, at.CAUTION] * cap:
            continue
        if picks and (weapon == at.SMOKE or s.cooldown[weapon, b, u] > READY_WITHIN):
            continue
        for slot in range(rules.contacts):
            if not reaches(s, tables, rules, b, u, weapon, slot):
                continue
            other = s.contact[slot, b, u]
            value = tables.weapon[at.W_WORTH, weapon] if picks else ONE / (ONE + f32(weapon))
            if picks and weapon == at.PAINTER:
                value = ZERO if s.number[at.PAINTED, b, other] > 0 else skill[bot, at.PAINT]
            if has_tactics:
                value = value * (ONE + skill[bot, at.FOCUS] * (ONE - s.unit[at.HIT_POINTS, b, other] / TOUGHEST))
            else:
                value = value * (ONE - FARTHER * f32(slot))
            if value > best:
                best, best_weapon, best_slot = value, weapon, slot
    has_target = best > ZERO
    watched = s.contact[best_slot, b, u]  # the target, else the nearest contact
    has_contact = watched >= 0

    x, y = s.unit[at.X, b, u], s.unit[at.Y, b, u]
    line_x = line_y = ZERO
    if has_contact:
        line_x, line_y = s.unit[at.X, b, watched] - x, s.unit[at.Y, b, watched] - y
    distance = max(math.sqrt(line_x * line_x + line_y * line_y), SMALL)
    to_x, to_y = line_x / distance, line_y / distance
    way = maps.way[s.status[at.MAP, b], column_at(x, y, rules)]
    wanted_x, wanted_y = tables.direction[0, way], tables.direction[1, way]  # to the zone
    if has_tactics:
        if has_contact and distance < CLOSE_M:
            is_hurt = s.unit[at.HIT_POINTS, b, u] < HURT_SHARE * tables.unit[at.FULL_HIT_POINTS, u]
            wanted_m = skill[bot, at.LIKED_SCOUT_M + tables.unit_count[at.KIND, u]] * skill[bot, at.SPACING]
            if is_hurt or heat > HOT_SHARE * cap:
                wanted_m = wanted_m + skill[bot, at.RETREAT_M]
            gap = min(max(distance - wanted_m, -GAP_M), GAP_M) / GAP_M
            sway = skill[bot, at.SWAY] * flip
            wanted_x = to_x * gap - to_y * sway + skill[bot, at.PULL] * wanted_x
            wanted_y = to_y * gap + to_x * sway + skill[bot, at.PULL] * wanted_y
    elif has_target:
        slower = HALF if skill[bot, at.KEEPS_MOVING] > ZERO else ZERO
        wanted_x, wanted_y = wanted_x * slower, wanted_y * slower
    elif has_contact:  # approach contacts that cannot be shot at yet
        wanted_x, wanted_y = wanted_x + APPROACH * to_x, wanted_y + APPROACH * to_y

    cos, sin = s.unit[at.COS, b, u], s.unit[at.SIN, b, u]
    yaw = yaw_towards(line_x, line_y, cos, sin) if has_contact else yaw_towards(wanted_x, wanted_y, cos, sin)
    vents_at = skill[bot, at.VENTS_AT] if has_contact or not has_tactics else skill[bot, at.IDLE_VENTS_AT]
    vents = heat > vents_at * cap and can_act(s, b, u)
    row = b * s.unit.shape[2] + u
    actions.fire[row] = best_weapon + 1 if has_target and not vents else 0
    actions.target[row] = best_slot
    actions.vent[row] = 1 if vents else 0
    order_direction(s, actions, wanted_x, wanted_y, b, u)
    actions.motion[row, 2] = yaw
    actions.motion[row, 3] = -ONE


@scalar
def roam(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, chance: float, salt: int, b: int, u: int) -> None:
    """Change the direction in which a unit with contacts goes, in a share of the seconds: to the zone, in the zone to any side."""
    word = draw(s.seed[b] + salt, period(s, b, ROAM_DECISIONS), u, STREAM_ROAM)
    if f32(word >> 8) * FROM_24_BITS >= chance or s.contact[0, b, u] < 0:
        return
    way = int(maps.way[s.status[at.MAP, b], column_at(s.unit[at.X, b, u], s.unit[at.Y, b, u], rules)])
    if way == ARRIVED:
        way = word & 7
    order_direction(s, actions, tables.direction[0, way], tables.direction[1, way], b, u)


# The expert


@scalar
def is_open(s: Battles, maps: Maps, rules: Rules, b: int, u: int, x: float, y: float) -> bool:
    """Return whether a unit can walk in a direction (a unit vector), as far as the nearest observed cell shows: no wall, no lava."""
    cos, sin = s.unit[at.COS, b, u], s.unit[at.SIN, b, u]
    # The observed cells are turned with the unit. The direction is rounded to one of its eight neighbours.
    ahead = f32(floor(x * cos + y * sin + HALF)) * CELL
    left = f32(floor(y * cos - x * sin + HALF)) * CELL
    column = column_at(s.unit[at.X, b, u] + ahead * cos - left * sin, s.unit[at.Y, b, u] + ahead * sin + left * cos, rules)
    return bool(floor_at(s, maps, b, column) <= s.unit[at.Z, b, u] + rules.climb and material_at(s, maps, b, column) != LAVA)


@scalar
def distance_to(s: Battles, b: int, u: int, other: int) -> float:
    """Return the distance of two units, seen from above."""
    x, y = s.unit[at.X, b, other] - s.unit[at.X, b, u], s.unit[at.Y, b, other] - s.unit[at.Y, b, u]
    return max(math.sqrt(x * x + y * y), SMALL)


@scalar
def find_allies(s: Battles, rules: Rules, b: int, u: int) -> int:
    """Return the allies that a unit observes, the nearest ones, as bits; bit e is the e-th unit of its team."""
    first = 0 if u < rules.team else rules.team
    living = living_allies(s, rules, b, u)
    observed, last, last_square = 0, -1, -ONE
    for _ in range(rules.allies):
        last, last_square = next_nearest(s, b, u, first, rules.team, living, last, last_square)
        if last < 0:
            return observed
        observed |= 1 << (last - first)
    return observed


@scalar
def is_between(s: Battles, b: int, u: int, target: int, ally: int) -> bool:
    """Return whether an ally is near the line of a shot, seen from above, and nearer than the target."""
    line_x, line_y = s.unit[at.X, b, target] - s.unit[at.X, b, u], s.unit[at.Y, b, target] - s.unit[at.Y, b, u]
    off_x, off_y = s.unit[at.X, b, ally] - s.unit[at.X, b, u], s.unit[at.Y, b, ally] - s.unit[at.Y, b, u]
    square = line_x * line_x + line_y * line_y
    along, across = off_x * line_x + off_y * line_y, off_x * line_y - off_y * line_x
    return bool(along > ZERO and along < square and across * across < LINE_M * LINE_M * square)


@scalar
def preference(s: Battles, tables: Tables, rules: Rules, bot: int, allies: int, b: int, u: int, other: int) -> float:
    """Return the preference for a contact: 1, and more if it is nearly dead, helpless or near allies."""
    skill = tables.skill
    first = 0 if u < rules.team else rules.team
    value: float = ONE + skill[bot, at.EXPERT.focus] * (ONE - s.unit[at.HIT_POINTS, b, other] / TOUGHEST)
    if is_helpless(s, b, other):
        value += skill[bot, at.EXPERT.helpless]
    for member in range(rules.team):
        if (allies >> member) & 1 and distance_to(s, b, first + member, other) < NEAR_M:
            value += skill[bot, at.EXPERT.team_focus]
    return value


@scalar
def hit_chance(
    s: Battles, tables: Tables, rules: Rules, bot: int, allies: int, b: int, u: int, weapon: int, other: int
) -> float:  # fmt: skip
    """Return the chance of a hit. Weapons that hit at once do so; a projectile misses more often the farther its target moves meanwhile."""
    speed = tables.weapon[at.W_SPEED, weapon]
    if speed <= ZERO:
        return ONE
    distance = distance_to(s, b, u, other)
    splash = tables.weapon[at.W_SPLASH, weapon]
    if distance < splash:
        return ZERO
    chance = GUIDED_CHANCE
    if tables.weapon_count[at.W_IS_HOMING, weapon] == 0 and tables.weapon_count[at.W_IS_BALLISTIC, weapon] == 0:
        line_x, line_y = s.unit[at.X, b, other] - s.unit[at.X, b, u], s.unit[at.Y, b, other] - s.unit[at.Y, b, u]
        across = (s.unit[at.VELOCITY_X, b, other] * line_y - s.unit[at.VELOCITY_Y, b, other] * line_x) / distance
        chance = min(rules.radius / max(abs(across) * distance / speed, SMALL), ONE)
    if not is_seen(s, rules, b, u, other):
        chance = chance * tables.skill[bot, at.EXPERT.unseen]
    first = 0 if u < rules.team else rules.team
    for member in range(rules.team):
        if (allies >> member) & 1:
            if is_between(s, b, u, other, first + member):
                return ZERO
            if distance_to(s, b, other, first + member) < splash:
                chance = chance * HALF
    return chance


@scalar
def value_of_shot(
    s: Battles, tables: Tables, rules: Rules, bot: int, allies: int, b: int, u: int, weapon: int, other: int
) -> float:  # fmt: skip
    """Return the damage that a weapon is expected to do to a contact in this decision, plus what its heat does to both."""
    skill = tables.skill
    if weapon == at.PAINTER:
        paint: float = skill[bot, at.EXPERT.paint]
        return paint if s.number[at.PAINTED, b, other] == 0 else ZERO
    shots = max(f32(rules.ticks) / f32(tables.weapon_count[at.W_COOLDOWN, weapon]), ONE)
    damage = tables.weapon[at.W_DAMAGE, weapon]
    if not is_helpless(s, b, other):
        nearer_to_cap = HALF + s.unit[at.HEAT, b, other] / tables.unit[at.HEAT_CAP, other]
        damage = damage + skill[bot, at.EXPERT.heating] * tables.weapon[at.W_TARGET_HEAT, weapon] * nearer_to_cap
    chance = hit_chance(s, tables, rules, bot, allies, b, u, weapon, other)
    line_x, line_y = s.unit[at.X, b, other] - s.unit[at.X, b, u], s.unit[at.Y, b, other] - s.unit[at.Y, b, u]
    ahead = line_x * s.unit[at.COS, b, u] + line_y * s.unit[at.SIN, b, u]
    if ahead < tables.weapon[at.W_ARC_COS, weapon] * distance_to(s, b, u, other):
        chance = chance * OUT_OF_ARC
    price: float = skill[bot, at.EXPERT.heat_price] * s.unit[at.HEAT, b, u] / tables.unit[at.HEAT_CAP, u]
    wanted = preference(s, tables, rules, bot, allies, b, u, other)
    value: float = shots * (damage * chance * wanted - price * tables.weapon[at.W_HEAT, weapon])
    return value


@scalar
def find_shot(s: Battles, tables: Tables, rules: Rules, bot: int, allies: int, b: int, u: int) -> tuple[int, int]:
    """Return the weapon and the contact slot of the best shot in this decision; -1 and 0 if there is none."""
    most = tables.skill[bot, at.EXPERT.caution] * tables.unit[at.HEAT_CAP, u] - s.unit[at.HEAT, b, u]
    best, best_weapon, best_slot = ZERO, -1, 0
    for weapon in range(at.WEAPON_KINDS):
        if tables.has_weapon[weapon, u] == 0 or weapon == at.SMOKE or s.cooldown[weapon, b, u] > READY_WITHIN:
            continue
        if tables.weapon[at.W_HEAT, weapon] > most:
            continue
        for slot in range(rules.contacts):
            if reaches(s, tables, rules, b, u, weapon, slot):
                value = value_of_shot(s, tables, rules, bot, allies, b, u, weapon, s.contact[slot, b, u])
                if value > best:
                    best, best_weapon, best_slot = value, weapon, slot
    return best_weapon, best_slot


@scalar
def find_opponent(s: Battles, tables: Tables, rules: Rules, bot: int, allies: int, b: int, u: int) -> int:
    """Return the slot of the contact that a unit moves around: a near one that is seen and preferred as a target; -1 without contacts."""
    best, best_slot = -FAR, -1
    for slot in range(rules.contacts):
        other = s.contact[slot, b, u]
        if other >= 0:
            value = preference(s, tables, rules, bot, allies, b, u, other) - distance_to(s, b, u, other) / OPPONENT_M
            if is_seen(s, rules, b, u, other):
                value = value + SEEN_BONUS
            if value > best:
                best, best_slot = value, slot
    return best_slot


@scalar
def is_outnumbered(s: Battles, tables: Tables, rules: Rules, bot: int, allies: int, b: int, u: int) -> bool:
    """Return whether near contacts have many more hit points than the unit and its near allies."""
    first = 0 if u < rules.team else rules.team
    enemies, own = ZERO, s.unit[at.HIT_POINTS, b, u]
    for slot in range(rules.contacts):
        other = s.contact[slot, b, u]
        if other >= 0 and distance_to(s, b, u, other) < FIGHT_M:
            enemies += s.unit[at.HIT_POINTS, b, other]
    for member in range(rules.team):
        if (allies >> member) & 1 and distance_to(s, b, u, first + member) < FIGHT_M:
            own += s.unit[at.HIT_POINTS, b, first + member]
    return bool(enemies > tables.skill[bot, at.EXPERT.outnumbered] * own)


@scalar
def way_by_allies(s: Battles, tables: Tables, rules: Rules, bot: int, allies: int, comes: bool, b: int, u: int) -> tuple[float, float]:
    """Return a direction away from allies that are too close; with `comes`, also towards the nearest of the others."""
    first = 0 if u < rules.team else rules.team
    away_x = away_y = near_x = near_y = ZERO
    nearest = FAR
    for member in range(rules.team):
        if (allies >> member) & 1 == 0:
            continue
        distance = distance_to(s, b, u, first + member)
        to_x = (s.unit[at.X, b, first + member] - s.unit[at.X, b, u]) / distance
        to_y = (s.unit[at.Y, b, first + member] - s.unit[at.Y, b, u]) / distance
        if distance < CLUMP_M:
            away_x, away_y = away_x - to_x, away_y - to_y
        if comes and distance > APART_M and distance < nearest:
            nearest, near_x, near_y = distance, to_x, to_y
    spread, regroup = tables.skill[bot, at.EXPERT.spread], tables.skill[bot, at.EXPERT.regroup]
    return spread * away_x + regroup * near_x, spread * away_y + regroup * near_y


@scalar
def is_far_ahead(s: Battles, tables: Tables, rules: Rules, bot: int, allies: int, b: int, u: int) -> bool:
    """Return whether a unit is much nearer to the zone than the last of its allies, while the other team is not about to win."""
    other_score = score_of(s, rules, b, at.HELD_2 if u < rules.team else at.HELD)
    if other_score > HALF * rules.win_score:
        return False
    first = 0 if u < rules.team else rules.team
    x, y = s.unit[at.X, b, u], s.unit[at.Y, b, u]
    own_m = math.sqrt(x * x + y * y)
    for member in range(rules.team):
        if (allies >> member) & 1:
            x, y = s.unit[at.X, b, first + member], s.unit[at.Y, b, first + member]
            if math.sqrt(x * x + y * y) - own_m > tables.skill[bot, at.EXPERT.lead_m]:
                return True
    return False


@scalar
def find_side(
    s: Battles, maps: Maps, tables: Tables, rules: Rules, bot: int, salt: int, to_x: float, to_y: float, b: int, u: int
) -> float:  # fmt: skip
    """Return the side to which a unit goes around its opponent, 1 left or -1 right, drawn again every few seconds; not into a wall."""
    drawn = draw(s.seed[b] + salt, period(s, b, int(tables.skill[bot, at.EXPERT.flip_decisions])), u, STREAM_SIDE)
    side = ONE if drawn & 1 == 0 else -ONE
    if is_open(s, maps, rules, b, u, -to_y * side, to_x * side):
        return side
    return -side if is_open(s, maps, rules, b, u, to_y * side, -to_x * side) else ZERO


@scalar
def wants_smoke(s: Battles, tables: Tables, rules: Rules, bot: int, slot: int, b: int, u: int) -> bool:
    """Return whether a unit with few hit points left can hide behind smoke from the contact in a slot."""
    if tables.has_weapon[at.SMOKE, u] == 0 or s.cooldown[at.SMOKE, b, u] > READY_WITHIN:
        return False
    if s.unit[at.HIT_POINTS, b, u] >= tables.skill[bot, at.EXPERT.smoke_at] * tables.unit[at.FULL_HIT_POINTS, u]:
        return False
    hottest = tables.skill[bot, at.EXPERT.caution] * tables.unit[at.HEAT_CAP, u]
    is_cool = s.unit[at.HEAT, b, u] + tables.weapon[at.W_HEAT, at.SMOKE] <= hottest
    return bool(is_cool and is_seen(s, rules, b, u, s.contact[slot, b, u]) and reaches(s, tables, rules, b, u, at.SMOKE, slot))


@scalar
def order_motion(s: Battles, rules: Rules, actions: Choices, x: float, y: float, b: int, u: int) -> None:
    """Order a velocity, as a share of the full speed, exactly in its direction. It is slower where the unit cannot go as fast."""
    cos, sin = s.unit[at.COS, b, u], s.unit[at.SIN, b, u]
    ahead, left = x * cos + y * sin, y * cos - x * sin
    scale = ONE / max(math.sqrt(ahead * ahead + left * left), ONE)
    scale = min(scale, rules.sideways / max(abs(left), SMALL))
    if ahead < ZERO:
        scale = min(scale, rules.sideways / max(-ahead, SMALL))
        ahead = ahead / rules.sideways
    row = b * s.unit.shape[2] + u
    actions.motion[row, 0] = min(max(ahead * scale, -ONE), ONE)
    actions.motion[row, 1] = min(max(-left * scale / rules.sideways, -ONE), ONE)


@scalar
def act_expert(
    s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, bot: int, salt: int, b: int, u: int
) -> None:  # fmt: skip
    """Write the actions of the expert."""
    skill, row = tables.skill, b * s.unit.shape[2] + u
    kind = tables.unit_count[at.KIND, u]
    cap, heat = tables.unit[at.HEAT_CAP, u], s.unit[at.HEAT, b, u]
    has_jets = tables.unit[at.JET_THRUST, u] > ZERO
    x, y = s.unit[at.X, b, u], s.unit[at.Y, b, u]
    allies = find_allies(s, rules, b, u)
    weapon, target_slot = find_shot(s, tables, rules, bot, allies, b, u)
    slot = find_opponent(s, tables, rules, bot, allies, b, u)
    opponent = s.contact[max(slot, 0), b, u]
    distance = distance_to(s, b, u, opponent) if slot >= 0 else FAR
    way = int(maps.way[s.status[at.MAP, b], column_at(x, y, rules)])
    wanted_x, wanted_y = tables.direction[0, way], tables.direction[1, way]  # to the zone
    look_x, look_y = wanted_x, wanted_y
    jets = -ONE
    if distance < CLOSE_M:
        # Keep the preferred distance and go around the opponent, as far as walls, the zone and allies allow.
        to_x, to_y = (s.unit[at.X, b, opponent] - x) / distance, (s.unit[at.Y, b, opponent] - y) / distance
        is_weaker = is_outnumbered(s, tables, rules, bot, allies, b, u)
        is_hurt = s.unit[at.HIT_POINTS, b, u] < skill[bot, at.EXPERT.hurt_share] * tables.unit[at.FULL_HIT_POINTS, u]
        wanted_m = skill[bot, at.EXPERT.liked_scout_m + kind]
        if is_hurt or is_weaker or heat > skill[bot, at.EXPERT.hot_share] * cap:
            wanted_m = wanted_m + skill[bot, at.EXPERT.retreat_m]
        gap = min(max(distance - wanted_m, -GAP_M), GAP_M) / GAP_M
        side = find_side(s, maps, tables, rules, bot, salt, to_x, to_y, b, u)
        sway, pull = skill[bot, at.EXPERT.sway] * side, skill[bot, at.EXPERT.pull]
        by_allies_x, by_allies_y = way_by_allies(s, tables, rules, bot, allies, is_weaker, b, u)
        wanted_x = to_x * gap - to_y * sway + pull * wanted_x + by_allies_x
        wanted_y = to_y * gap + to_x * sway + pull * wanted_y + by_allies_y
        # Turn from the target to the side to which it goes, because a unit is faster forwards than sideways.
        aim = s.contact[target_slot, b, u] if weapon >= 0 else opponent
        slant = skill[bot, at.EXPERT.slant_scout + kind] * side
        aim_x, aim_y = s.unit[at.X, b, aim] - x, s.unit[at.Y, b, aim] - y
        look_x, look_y = aim_x - aim_y * slant, aim_y + aim_x * slant
        if wants_smoke(s, tables, rules, bot, slot, b, u):
            weapon, target_slot = at.SMOKE, slot
        # Fly over a wall on the way to the opponent, and near it.
        is_stopped = skill[bot, at.EXPERT.crosses] > ZERO and gap > ZERO and not is_open(s, maps, rules, b, u, to_x, to_y)
        has_fuel = s.unit[at.FUEL, b, u] > HALF * rules.fuel or s.number[at.IS_GROUNDED, b, u] == 0
        if has_jets and has_fuel and heat < HOT_SHARE * cap and (is_stopped or distance < skill[bot, at.EXPERT.fly_m]):
            jets = ONE
    elif is_far_ahead(s, tables, rules, bot, allies, b, u):
        wanted_x = wanted_y = ZERO
    if has_jets and s.unit[at.VELOCITY_Z, b, u] < -FALL_MPS:  # a hard landing would damage the legs
        jets = ONE

    # Venting costs no shot in decisions without one.
    vents_at = skill[bot, at.EXPERT.vents_at] if weapon >= 0 else skill[bot, at.EXPERT.free_vents_at]
    if slot < 0:
        vents_at = skill[bot, at.EXPERT.idle_vents_at]
    vents = heat > vents_at * cap and can_act(s, b, u)
    actions.fire[row] = weapon + 1 if not vents else 0
    actions.target[row] = target_slot
    actions.vent[row] = 1 if vents else 0
    order_motion(s, rules, actions, wanted_x, wanted_y, b, u)
    actions.motion[row, 2] = yaw_towards(look_x, look_y, s.unit[at.COS, b, u], s.unit[at.SIN, b, u])
    actions.motion[row, 3] = jets


# The random bot


@scalar
def nth_allowed(allowed: Bytes, word: int) -> int:
    """Return one of the allowed choices, each with the same chance."""
    count = 0
    for choice in range(allowed.shape[0]):
        count += int(allowed[choice])
    left = word % max(count, 1)
    for choice in range(allowed.shape[0]):
        if allowed[choice] != 0:
            if left == 0:
                return choice
            left -= 1
    return 0


@scalar
def act_random(s: Battles, views: Views, actions: Choices, salt: int, b: int, u: int) -> None:
    """Write uniformly random allowed actions."""
    row = b * s.unit.shape[2] + u
    seed, moment = s.seed[b] + salt, period(s, b, 1)
    fire = nth_allowed(views.fire[row], draw(seed, moment, u, STREAM_FIRE))
    actions.fire[row] = fire
    actions.target[row] = nth_allowed(views.target[row, fire], draw(seed, moment, u, STREAM_TARGET))
    actions.vent[row] = nth_allowed(views.vent[row], draw(seed, moment, u, STREAM_VENT))
    for index in range(4):
        actions.motion[row, index] = f32(draw(seed, moment, u, STREAM_MOTION + index) >> 8) * FROM_24_BITS * TWO - ONE


@scalar
def act_unit(
    s: Battles, maps: Maps, tables: Tables, rule_book: RuleBook, views: Views, actions: Choices, bots: Ints, salts: Longs, b: int, u: int
) -> None:  # fmt: skip
    """Write the actions of the bot of a unit."""
    rules, salt = rule_book[0], salts[0]
    bot = bots[0 if u < rules.team else 1, b]
    if bot == at.RANDOM_BOT:
        act_random(s, views, actions, salt, b, u)
    elif bot >= 0 and tables.skill[bot, at.IS_EXPERT] > ZERO:
        act_expert(s, maps, tables, rules, actions, bot, salt, b, u)
    elif bot >= 0:
        act_scripted(s, maps, tables, rules, actions, bot, coin(s, b, u, salt), b, u)
        if tables.skill[bot, at.ROAMS] > ZERO:
            roam(s, maps, tables, rules, actions, tables.skill[bot, at.ROAMS], salt, b, u)
    row = b * s.unit.shape[2] + u
    if bot >= 0 and views.fire[row, actions.fire[row]] == 0:  # bots obey the masks, as policies do
        actions.fire[row] = 0


@for_battles
def act_bots(
    first: int, last: int, s: Battles, maps: Maps, tables: Tables, rule_book: RuleBook, views: Views, actions: Choices, bots: Ints,
    salts: Longs,
) -> None:  # fmt: skip
    """Write the actions of bots. `bots` [2, B] are their indices by team and battle; -1 leaves the actions of a team as they are.

    `salts` [1] is added to the seeds of their random numbers.
    """
    for b in range(first, last):
        for u in range(s.unit.shape[2]):
            act_unit(s, maps, tables, rule_book, views, actions, bots, salts, b, u)
