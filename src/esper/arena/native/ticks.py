"""The phases of a tick: upkeep, motion, fire, projectiles, damage and the zone.

Every function takes one battle `b`, most of them also one unit `u`. A function reads values of other units that no unit writes in the same
phase, and writes its own unit only; damage is gathered by its victim. So the units of a phase may run in any order or at the same time.
`esper.arena.native.battle` lists the phases.

The names of fields are in `layout`, imported as `at`.
"""

from __future__ import annotations

import math

from esper.arena.native import layout as at
from esper.arena.native.compiling import const, f32, scalar
from esper.arena.native.layout import Battles, Maps, Rules, Tables

ZERO, HALF, ONE, TWO = const(0.0), const(0.5), const(1.0), const(2.0)
REST_MPS = const(1e-3)  # speed below which a dead unit stays where it is
SIXTH, TWENTY_FOURTH, FIFTH_FACTORIAL = const(1 / 6), const(1 / 24), const(1 / 120)
NORMALISE = const(1.5)
TINY, SMALL, THIN = const(1e-6), const(1e-3), const(1e-9)
HEIGHT_STEP = const(at.HEIGHT_STEP)
INTO_COLUMN = const(0.1)  # share of a tick for which a burst goes on, into the column that it hit


@scalar
def column_at(x: float, y: float, rules: Rules) -> int:
    """Return the index of the column at a position. Positions outside belong to the outermost columns."""
    i = int(min(max(x + rules.half_m, ZERO), rules.last))
    j = int(min(max(y + rules.half_m, ZERO), rules.last))
    return i * rules.side + j


@scalar
def floor_at(s: Battles, maps: Maps, b: int, column: int) -> float:
    """Return the height that carries units and stops shots."""
    if s.worn[b, column] == at.DESTROYED:
        return ZERO
    return f32(maps.column[s.status[at.MAP, b], column, at.C_FLOOR]) * HEIGHT_STEP


@scalar
def material_at(s: Battles, maps: Maps, b: int, column: int) -> int:
    """Return the material of a column. A destroyed column is open ground."""
    if s.worn[b, column] == at.DESTROYED:
        return 0
    return int(maps.column[s.status[at.MAP, b], column, at.C_MATERIAL])


@scalar
def is_alive(s: Battles, b: int, u: int) -> bool:
    return bool(s.unit[at.HIT_POINTS, b, u] > ZERO)


@scalar
def can_act(s: Battles, b: int, u: int) -> bool:
    """Return whether a unit is alive, on its feet and not shut down."""
    return is_alive(s, b, u) and bool(s.number[at.FALLEN, b, u] == 0 and s.number[at.IS_SHUT_DOWN, b, u] == 0)


@scalar
def living_of(s: Battles, b: int, first: int, team: int) -> int:
    """Return the number of living units of a team."""
    living = 0
    for member in range(team):
        living += 1 if is_alive(s, b, first + member) else 0
    return living


@scalar
def is_wreck(s: Battles, b: int, u: int) -> bool:
    """Return whether a unit is dead and has come to rest on the ground, where it stays. Units that do not take part are wrecks too."""
    is_at_rest = abs(s.unit[at.VELOCITY_X, b, u]) + abs(s.unit[at.VELOCITY_Y, b, u]) < REST_MPS
    return not is_alive(s, b, u) and is_at_rest and bool(s.number[at.IS_GROUNDED, b, u] != 0)


# Upkeep before motion


@scalar
def count_down(s: Battles, b: int, u: int) -> None:
    """Reduce every timer of a unit by a tick, and set venting as ordered."""
    for field in (at.FALLEN, at.SUPPRESSED, at.PAINTED):
        s.number[field, b, u] = max(s.number[field, b, u] - 1, 0)
    for weapon in range(at.WEAPON_KINDS):
        s.cooldown[weapon, b, u] = max(s.cooldown[weapon, b, u] - 1, 0)
    for attacker in range(s.harm.shape[0]):
        s.harm[attacker, b, u] = max(s.harm[attacker, b, u] - 1, 0)
    for index in range(s.cloud_left.shape[2]):
        s.cloud_left[b, u, index] = max(s.cloud_left[b, u, index] - 1, 0)
    vents = s.number[at.VENT_ORDER, b, u] != 0 and is_alive(s, b, u) and s.number[at.IS_SHUT_DOWN, b, u] == 0
    s.number[at.IS_VENTING, b, u] = 1 if vents else 0


# Motion


@scalar
def turn(s: Battles, tables: Tables, rules: Rules, b: int, u: int) -> None:
    """Turn the heading as ordered. The angle of one tick is so small that a short series is exact."""
    if not can_act(s, b, u):
        return
    angle = s.unit[at.YAW, b, u] * tables.unit[at.YAW_RATE, u] * rules.tick
    square = angle * angle
    sine = angle * (ONE - square * (SIXTH - square * FIFTH_FACTORIAL))
    cosine = ONE - square * (HALF - square * TWENTY_FOURTH)
    old_cos, old_sin = s.unit[at.COS, b, u], s.unit[at.SIN, b, u]
    new_cos, new_sin = old_cos * cosine - old_sin * sine, old_sin * cosine + old_cos * sine
    # One Newton step keeps the length at 1.
    scale = NORMALISE - HALF * (new_cos * new_cos + new_sin * new_sin)
    s.unit[at.COS, b, u] = new_cos * scale
    s.unit[at.SIN, b, u] = new_sin * scale


@scalar
def drive(s: Battles, maps: Maps, tables: Tables, rules: Rules, b: int, u: int) -> None:
    """Change the horizontal velocity towards the ordered one, limited by the acceleration of the class; less in the air."""
    is_grounded = s.number[at.IS_GROUNDED, b, u] != 0
    full = tables.unit[at.MAX_SPEED, u]
    factor = ZERO
    if can_act(s, b, u):
        factor = ONE
        if is_grounded:
            column = column_at(s.unit[at.X, b, u], s.unit[at.Y, b, u], rules)
            factor = tables.material[at.M_SPEED, material_at(s, maps, b, column)]
            if s.unit[at.LEGS, b, u] <= ZERO:
                factor = factor * rules.broken_legs
        if s.number[at.SUPPRESSED, b, u] > 0:
            factor = factor * rules.suppressed
        if s.number[at.IS_VENTING, b, u] != 0:
            factor = factor * rules.venting
    speed = full * factor
    forward, strafe = s.unit[at.FORWARD, b, u], s.unit[at.STRAFE, b, u] * rules.sideways
    if forward < ZERO:
        forward = forward * rules.sideways
    # Orders longer than 1 are shortened, so that a unit is not faster diagonally.
    length = max(math.sqrt(forward * forward + strafe * strafe), ONE)
    cos, sin = s.unit[at.COS, b, u], s.unit[at.SIN, b, u]
    change_x = (forward * cos + strafe * sin) * speed / length - s.unit[at.VELOCITY_X, b, u]
    change_y = (forward * sin - strafe * cos) * speed / length - s.unit[at.VELOCITY_Y, b, u]
    most = full * (ONE if is_grounded else rules.air_control) * rules.speed_up
    share = min(most / max(math.sqrt(change_x * change_x + change_y * change_y), TINY), ONE)
    s.unit[at.VELOCITY_X, b, u] += change_x * share
    s.unit[at.VELOCITY_Y, b, u] += change_y * share


@scalar
def fly(s: Battles, tables: Tables, rules: Rules, b: int, u: int) -> None:
    """Apply jets and gravity to the vertical velocity. Jets use fuel and add heat; fuel is regained on the ground."""
    throttle = ZERO
    thrust = tables.unit[at.JET_THRUST, u]
    if can_act(s, b, u) and s.unit[at.FUEL, b, u] > ZERO and thrust > ZERO:
        throttle = max(s.unit[at.JETS, b, u], ZERO)
    lift = throttle * thrust - rules.gravity
    is_grounded = s.number[at.IS_GROUNDED, b, u] != 0
    if not is_grounded or lift > ZERO:
        s.unit[at.VELOCITY_Z, b, u] += lift * rules.tick
    else:
        s.unit[at.VELOCITY_Z, b, u] = ZERO
    refuelled = rules.refuel if is_grounded and throttle <= ZERO else ZERO
    s.unit[at.FUEL, b, u] = min(max(s.unit[at.FUEL, b, u] + (refuelled - throttle) * rules.tick, ZERO), rules.fuel)
    s.unit[at.HEAT, b, u] += throttle * rules.jets_heat


@scalar
def find_push(s: Battles, rules: Rules, b: int, u: int) -> None:
    """Store how far other units push this one: half of each overlap."""
    push_x = push_y = ZERO
    if is_alive(s, b, u):
        x, y, z = s.unit[at.X, b, u], s.unit[at.Y, b, u], s.unit[at.Z, b, u]
        for other in range(s.unit.shape[2]):
            apart_x, apart_y = x - s.unit[at.X, b, other], y - s.unit[at.Y, b, other]
            square = apart_x * apart_x + apart_y * apart_y
            if square >= TWO * TWO * rules.radius * rules.radius or other == u or not is_alive(s, b, other):
                continue
            if abs(z - s.unit[at.Z, b, other]) < rules.tall:
                distance = math.sqrt(square)
                share = max(TWO * rules.radius - distance, ZERO) * (HALF / max(distance, SMALL))
                push_x += apart_x * share
                push_y += apart_y * share
    s.unit[at.PUSH_X, b, u] = push_x
    s.unit[at.PUSH_Y, b, u] = push_y


@scalar
def ahead_by(step: float, radius: float) -> float:
    """Return the radius with the sign of the step."""
    if step > ZERO:
        return radius
    if step < ZERO:
        return -radius
    return ZERO


@scalar
def move(s: Battles, maps: Maps, tables: Tables, rules: Rules, b: int, u: int) -> None:
    """Move a unit by its velocity and push, until terrain stops it; then let the ground and a hard landing take effect."""
    limit = rules.half_m - rules.radius
    x, y, z = s.unit[at.X, b, u], s.unit[at.Y, b, u], s.unit[at.Z, b, u]
    step_x = s.unit[at.VELOCITY_X, b, u] * rules.tick + s.unit[at.PUSH_X, b, u]
    step_y = s.unit[at.VELOCITY_Y, b, u] * rules.tick + s.unit[at.PUSH_Y, b, u]
    speed_z = s.unit[at.VELOCITY_Z, b, u]
    highest = z + rules.climb  # ground that the unit can step onto
    was_grounded = s.number[at.IS_GROUNDED, b, u] != 0

    is_free_x = floor_at(s, maps, b, column_at(x + step_x + ahead_by(step_x, rules.radius), y, rules)) <= highest
    if is_free_x:
        x = min(max(x + step_x, -limit), limit)
    is_free_y = floor_at(s, maps, b, column_at(x, y + step_y + ahead_by(step_y, rules.radius), rules)) <= highest
    if is_free_y:
        y = min(max(y + step_y, -limit), limit)

    column = column_at(x, y, rules)
    ground = floor_at(s, maps, b, column)
    follows_ground = was_grounded and speed_z <= ZERO and z - ground <= rules.climb
    z = min(ground if follows_ground else z + speed_z * rules.tick, rules.ceiling)
    is_grounded = z <= ground
    hard = max(-speed_z - rules.landing, ZERO) if is_grounded and not was_grounded else ZERO
    if is_grounded or (z >= rules.ceiling and speed_z > ZERO):
        s.unit[at.VELOCITY_Z, b, u] = ZERO
    if not is_free_x or abs(x) >= limit:
        s.unit[at.VELOCITY_X, b, u] = ZERO
    if not is_free_y or abs(y) >= limit:
        s.unit[at.VELOCITY_Y, b, u] = ZERO
    s.unit[at.X, b, u] = x
    s.unit[at.Y, b, u] = y
    s.unit[at.Z, b, u] = max(z, ground)
    s.number[at.IS_GROUNDED, b, u] = 1 if is_grounded else 0

    burn = ZERO
    if is_grounded and is_alive(s, b, u):
        material = material_at(s, maps, b, column)
        burn = tables.material[at.M_DAMAGE, material] * rules.tick
        s.unit[at.HEAT, b, u] += tables.material[at.M_HEAT, material] * rules.tick
    s.unit[at.HIT_POINTS, b, u] = max(s.unit[at.HIT_POINTS, b, u] - burn, ZERO)
    s.unit[at.LEGS, b, u] = max(s.unit[at.LEGS, b, u] - burn - hard * rules.landing_damage, ZERO)


# Fire


@scalar
def fire(s: Battles, tables: Tables, rules: Rules, b: int, u: int) -> None:
    """Fire the ordered weapon if it is loaded and its living target is in range and in its arc, and launch its projectile."""
    s.number[at.HAS_FIRED, b, u] = 0
    target = s.number[at.TARGET, b, u]
    if target < 0 or not can_act(s, b, u) or s.number[at.IS_VENTING, b, u] != 0 or not is_alive(s, b, target):
        return
    weapon = s.number[at.WEAPON, b, u]
    if s.cooldown[weapon, b, u] != 0:
        return
    line_x = s.unit[at.X, b, target] - s.unit[at.X, b, u]
    line_y = s.unit[at.Y, b, target] - s.unit[at.Y, b, u]
    line_z = s.unit[at.Z, b, target] - s.unit[at.Z, b, u]
    flat_square = line_x * line_x + line_y * line_y
    distance = math.sqrt(flat_square + line_z * line_z)
    ahead = line_x * s.unit[at.COS, b, u] + line_y * s.unit[at.SIN, b, u]
    if distance > s.unit[at.AIM_M, b, u] or ahead < tables.weapon[at.W_ARC_COS, weapon] * math.sqrt(flat_square) - TINY:
        return
    s.number[at.HAS_FIRED, b, u] = 1
    s.number[at.FIRED_ONCE, b, u] = 1
    s.unit[at.HEAT, b, u] += tables.weapon[at.W_HEAT, weapon]
    s.cooldown[weapon, b, u] = tables.weapon_count[at.W_COOLDOWN, weapon]
    if tables.weapon_count[at.W_IS_INSTANT, weapon] == 0:
        launch(s, tables, rules, b, u, weapon, target, line_x, line_y, line_z, distance)


@scalar
def launch(
    s: Battles, tables: Tables, rules: Rules, b: int, u: int, weapon: int, target: int, line_x: float, line_y: float, line_z: float,
    distance: float,
) -> None:  # fmt: skip
    """Launch a projectile from the muzzle in the first free slot. A ballistic one leads its target and flies in an arc."""
    slot = -1
    for index in range(s.shell.shape[3]):
        if s.shell_count[at.SHELL_LIFE, b, u, index] == 0:
            slot = index
            break
    if slot < 0:
        s.number[at.HAS_FIRED, b, u] = 2  # counted as lost at the end of the tick
        return
    speed = max(tables.weapon[at.W_SPEED, weapon], ONE)
    is_ballistic = tables.weapon_count[at.W_IS_BALLISTIC, weapon] != 0
    if is_ballistic:
        line_x = line_x + s.unit[at.VELOCITY_X, b, target] * (distance / speed)
        line_y = line_y + s.unit[at.VELOCITY_Y, b, target] * (distance / speed)
    flight_s = max(math.sqrt(line_x * line_x + line_y * line_y + line_z * line_z), SMALL) / speed
    # Upward speed that lets a ballistic projectile come down at the height of its target.
    lob = HALF * rules.gravity * flight_s if is_ballistic else ZERO
    s.shell[at.SHELL_X, b, u, slot] = s.unit[at.X, b, u]
    s.shell[at.SHELL_Y, b, u, slot] = s.unit[at.Y, b, u]
    s.shell[at.SHELL_Z, b, u, slot] = s.unit[at.Z, b, u] + rules.muzzle
    s.shell[at.SHELL_VX, b, u, slot] = line_x / flight_s
    s.shell[at.SHELL_VY, b, u, slot] = line_y / flight_s
    s.shell[at.SHELL_VZ, b, u, slot] = line_z / flight_s + lob
    s.shell_count[at.SHELL_WEAPON, b, u, slot] = weapon
    s.shell_count[at.SHELL_TARGET, b, u, slot] = target
    s.shell_count[at.SHELL_LIFE, b, u, slot] = tables.weapon_count[at.W_LIFE, weapon]


# Projectiles


@scalar
def steer(s: Battles, tables: Tables, rules: Rules, b: int, u: int, k: int) -> None:
    """Turn a homing projectile towards its living target at the same speed, and let a ballistic one fall."""
    weapon, target = s.shell_count[at.SHELL_WEAPON, b, u, k], s.shell_count[at.SHELL_TARGET, b, u, k]
    if tables.weapon_count[at.W_IS_HOMING, weapon] != 0 and is_alive(s, b, target):
        line_x = s.unit[at.X, b, target] - s.shell[at.SHELL_X, b, u, k]
        line_y = s.unit[at.Y, b, target] - s.shell[at.SHELL_Y, b, u, k]
        line_z = s.unit[at.Z, b, target] + rules.muzzle - s.shell[at.SHELL_Z, b, u, k]
        speed = tables.weapon[at.W_SPEED, weapon]
        scale = speed / max(math.sqrt(line_x * line_x + line_y * line_y + line_z * line_z), TINY)
        x, y, z = s.shell[at.SHELL_VX, b, u, k], s.shell[at.SHELL_VY, b, u, k], s.shell[at.SHELL_VZ, b, u, k]
        x = x + (line_x * scale - x) * rules.steering
        y = y + (line_y * scale - y) * rules.steering
        z = z + (line_z * scale - z) * rules.steering
        scale = speed / max(math.sqrt(x * x + y * y + z * z), TINY)
        s.shell[at.SHELL_VX, b, u, k] = x * scale
        s.shell[at.SHELL_VY, b, u, k] = y * scale
        s.shell[at.SHELL_VZ, b, u, k] = z * scale
    elif tables.weapon_count[at.W_IS_BALLISTIC, weapon] != 0:
        s.shell[at.SHELL_VZ, b, u, k] -= rules.gravity * rules.tick


@scalar
def is_under_terrain(s: Battles, maps: Maps, rules: Rules, b: int, x: float, y: float, z: float) -> bool:
    """Return whether a point is under the terrain or outside of the map."""
    if abs(x) > rules.half_m or abs(y) > rules.half_m:
        return True
    return z < floor_at(s, maps, b, column_at(x, y, rules))


@scalar
def advance(s: Battles, maps: Maps, tables: Tables, rules: Rules, b: int, u: int, k: int) -> None:
    """Move a projectile for one tick, or until it hits a unit other than its own, the terrain, or the edge of the map."""
    x, y, z = s.shell[at.SHELL_X, b, u, k], s.shell[at.SHELL_Y, b, u, k], s.shell[at.SHELL_Z, b, u, k]
    step_x, step_y = s.shell[at.SHELL_VX, b, u, k] * rules.tick, s.shell[at.SHELL_VY, b, u, k] * rules.tick
    step_z = s.shell[at.SHELL_VZ, b, u, k] * rules.tick

    # The first unit whose body the flight meets: at its nearest point, seen from above, it is within the body's radius and height.
    when, victim = TWO, -1
    length_square = max(step_x * step_x + step_y * step_y, THIN)
    for other in range(s.unit.shape[2]):
        if other == u or not is_alive(s, b, other):
            continue
        apart_x, apart_y = s.unit[at.X, b, other] - x, s.unit[at.Y, b, other] - y
        nearest = min(max((apart_x * step_x + apart_y * step_y) / length_square, ZERO), ONE)
        off_x, off_y = apart_x - nearest * step_x, apart_y - nearest * step_y
        if off_x * off_x + off_y * off_y > rules.radius * rules.radius or nearest >= when:
            continue
        if abs(z - (s.unit[at.Z, b, other] + HALF * rules.tall) + nearest * step_z) <= HALF * rules.tall:
            when, victim = nearest, other

    # The terrain is checked at half the tick and at its end.
    wall = TWO
    if is_under_terrain(s, maps, rules, b, x + step_x * HALF, y + step_y * HALF, z + step_z * HALF):
        wall = HALF
    elif is_under_terrain(s, maps, rules, b, x + step_x, y + step_y, z + step_z):
        wall = ONE

    is_direct = when <= wall and when <= ONE
    burst = is_direct or wall <= ONE
    share = min(when, wall) if burst else ONE
    x, y, z = x + step_x * share, y + step_y * share, z + step_z * share
    s.shell[at.SHELL_X, b, u, k] = x
    s.shell[at.SHELL_Y, b, u, k] = y
    s.shell[at.SHELL_Z, b, u, k] = z
    life = s.shell_count[at.SHELL_LIFE, b, u, k] - 1
    has_ended = burst or life == 0
    s.shell_count[at.SHELL_LIFE, b, u, k] = 0 if has_ended else life
    weapon = s.shell_count[at.SHELL_WEAPON, b, u, k]
    if burst:
        s.number[at.BURSTS, b, u] += 1
        s.shell_count[at.SHELL_IMPACT, b, u, k] = victim if is_direct else at.TERRAIN_IMPACT
    if burst and not is_direct and abs(x) < rules.half_m and abs(y) < rules.half_m:
        index = s.number[at.SCARS, b, u]
        s.scar[0, b, u, index] = column_at(x + step_x * INTO_COLUMN, y + step_y * INTO_COLUMN, rules)
        s.scar[1, b, u, index] = int(tables.weapon[at.W_DAMAGE, weapon])
        s.number[at.SCARS, b, u] = index + 1
    if has_ended and tables.weapon_count[at.W_SMOKES, weapon] > 0:
        # The cloud replaces the unit's cloud with the least time left.
        index = 0
        for other in range(1, s.cloud_left.shape[2]):
            if s.cloud_left[b, u, other] < s.cloud_left[b, u, index]:
                index = other
        s.cloud[0, b, u, index] = x
        s.cloud[1, b, u, index] = y
        s.cloud[2, b, u, index] = z
        s.cloud_left[b, u, index] = tables.weapon_count[at.W_SMOKES, weapon]


@scalar
def move_shells(s: Battles, maps: Maps, tables: Tables, rules: Rules, b: int, u: int) -> None:
    """Steer and move all projectiles of a unit."""
    s.number[at.BURSTS, b, u] = 0
    for k in range(s.shell.shape[3]):
        s.shell_count[at.SHELL_IMPACT, b, u, k] = at.NO_IMPACT
        if s.shell_count[at.SHELL_LIFE, b, u, k] > 0:
            steer(s, tables, rules, b, u, k)
            advance(s, maps, tables, rules, b, u, k)


# Damage


@scalar
def rear_factor(s: Battles, rules: Rules, b: int, u: int, line_x: float, line_y: float) -> float:
    """Return the factor on the damage of a hit that came along a line: more from behind."""
    flat = max(math.sqrt(line_x * line_x + line_y * line_y), TINY)
    facing = -(line_x * s.unit[at.COS, b, u] + line_y * s.unit[at.SIN, b, u]) / flat
    return rules.rear_factor if facing < rules.rear_cos else ONE


@scalar
def strike(s: Battles, tables: Tables, rules: Rules, b: int, u: int) -> None:
    """Gather all hits of this tick on a unit, and apply them."""
    total = legs = shaken = heated = ZERO
    stuns = paint = 0
    for attacker in range(s.unit.shape[2]):
        has_struck = s.number[at.HAS_FIRED, b, attacker] != 0 and s.number[at.TARGET, b, attacker] == u
        bursts = s.number[at.BURSTS, b, attacker]
        if not has_struck and bursts == 0:
            s.blow[attacker, b, u] = ZERO
            continue
        blow = ZERO
        weapon = s.number[at.WEAPON, b, attacker]
        if has_struck and tables.weapon_count[at.W_IS_INSTANT, weapon] != 0:
            line_x = s.unit[at.X, b, u] - s.unit[at.X, b, attacker]
            line_y = s.unit[at.Y, b, u] - s.unit[at.Y, b, attacker]
            blow = tables.weapon[at.W_DAMAGE, weapon] * rear_factor(s, rules, b, u, line_x, line_y)
            legs += blow * tables.weapon[at.W_LEG_SHARE, weapon]
            heated += tables.weapon[at.W_TARGET_HEAT, weapon]
            paint = max(paint, tables.weapon_count[at.W_PAINTS, weapon])
        for k in range(s.shell.shape[3] if bursts > 0 else 0):
            impact = s.shell_count[at.SHELL_IMPACT, b, attacker, k]
            if impact == at.NO_IMPACT:
                continue
            weapon = s.shell_count[at.SHELL_WEAPON, b, attacker, k]
            damage = tables.weapon[at.W_DAMAGE, weapon]
            if impact == u:
                line_x, line_y = s.shell[at.SHELL_VX, b, attacker, k], s.shell[at.SHELL_VY, b, attacker, k]
                direct = damage * rear_factor(s, rules, b, u, line_x, line_y)
                blow += direct
                legs += direct * tables.weapon[at.W_LEG_SHARE, weapon]
                shaken += tables.weapon[at.W_STABILITY, weapon]
                stuns += tables.weapon_count[at.W_SUPPRESSES, weapon]
                continue
            reach = tables.weapon[at.W_SPLASH, weapon]
            apart_x = s.unit[at.X, b, u] - s.shell[at.SHELL_X, b, attacker, k]
            apart_y = s.unit[at.Y, b, u] - s.shell[at.SHELL_Y, b, attacker, k]
            apart_z = s.unit[at.Z, b, u] + HALF * rules.tall - s.shell[at.SHELL_Z, b, attacker, k]
            square = apart_x * apart_x + apart_y * apart_y + apart_z * apart_z
            if square < reach * reach:
                near = max(ONE - math.sqrt(square) / reach, ZERO)
                blow += damage * rules.splash * near
                legs += damage * rules.splash * near
                shaken += tables.weapon[at.W_STABILITY, weapon] * rules.splash * near
        s.blow[attacker, b, u] = blow
        total += blow

    if total > ZERO:
        taken = min(total, s.unit[at.HIT_POINTS, b, u])
        share = taken / max(total, TINY) / tables.unit[at.FULL_HIT_POINTS, u]
        for attacker in range(s.unit.shape[2]):
            by_whom = s.blow[attacker, b, u] * share
            if by_whom > ZERO:
                s.taken[attacker, b, u] += by_whom
                s.harm[attacker, b, u] = rules.assist
        s.unit[at.HIT_POINTS, b, u] -= taken
    s.unit[at.LEGS, b, u] = max(s.unit[at.LEGS, b, u] - legs, ZERO)
    s.unit[at.STABILITY, b, u] = max(s.unit[at.STABILITY, b, u] - shaken, ZERO)
    s.unit[at.HEAT, b, u] += heated
    # Several hits suppress no longer than one hit.
    s.number[at.SUPPRESSED, b, u] = max(s.number[at.SUPPRESSED, b, u], min(stuns, rules.longest_suppression))
    s.number[at.PAINTED, b, u] = max(s.number[at.PAINTED, b, u], paint)


@scalar
def cool_and_balance(s: Battles, tables: Tables, rules: Rules, b: int, u: int) -> None:
    """Cool a unit, shut it down above its heat cap, start it again at half of it, and let it fall or regain stability."""
    rate = tables.unit[at.COOLING, u]
    if s.number[at.IS_VENTING, b, u] != 0:
        rate = rate * rules.vent_cooling
    cap = tables.unit[at.HEAT_CAP, u]
    heat = min(max(s.unit[at.HEAT, b, u] - rate * rules.tick, ZERO), cap * rules.heat_limit)
    stays_down = s.number[at.IS_SHUT_DOWN, b, u] != 0 and heat > cap * rules.restart
    lives = is_alive(s, b, u)
    s.unit[at.HEAT, b, u] = heat
    s.number[at.IS_SHUT_DOWN, b, u] = 1 if (heat > cap or stays_down) and lives else 0

    if s.number[at.FALLEN, b, u] > 0:
        s.unit[at.STABILITY, b, u] = rules.stability
    elif s.unit[at.STABILITY, b, u] <= ZERO and lives:
        s.number[at.FALLEN, b, u] = rules.fallen
        s.unit[at.STABILITY, b, u] = rules.stability
    else:
        s.unit[at.STABILITY, b, u] = min(s.unit[at.STABILITY, b, u] + rules.steadying, rules.stability)


@scalar
def hold_zone(s: Battles, maps: Maps, tables: Tables, rules: Rules, b: int) -> None:
    """Let the team with more tons in the zone hold it for this tick, and count lost shots."""
    radius = maps.zone_radius[s.status[at.MAP, b]]
    lead = ZERO
    for u in range(s.unit.shape[2]):
        x, y = s.unit[at.X, b, u], s.unit[at.Y, b, u]
        if is_alive(s, b, u) and math.sqrt(x * x + y * y) <= radius:
            lead = lead + (tables.unit[at.TONS, u] if u < rules.team else -tables.unit[at.TONS, u])
        if s.number[at.HAS_FIRED, b, u] == 2:
            s.status[at.OVERFLOW, b] += 1
    s.status[at.HOLDER, b] = -1
    if lead > ZERO:
        s.status[at.HELD, b] += 1
        s.status[at.HOLDER, b] = 0
    if lead < ZERO:
        s.status[at.HELD_2, b] += 1
        s.status[at.HOLDER, b] = 1


@scalar
def wear_terrain(s: Battles, maps: Maps, b: int) -> None:
    """Apply the damage of a decision to the columns. Columns without hit points left become open ground."""
    for u in range(s.unit.shape[2]):
        for index in range(s.number[at.SCARS, b, u]):
            column = s.scar[0, b, u, index]
            full = maps.column[s.status[at.MAP, b], column, at.C_HIT_POINTS]
            worn = s.worn[b, column]
            if full > 0 and worn != at.DESTROYED:
                sum_of_damage = int(worn) + s.scar[1, b, u, index]
                s.worn[b, column] = at.DESTROYED if sum_of_damage >= full else sum_of_damage
        s.number[at.SCARS, b, u] = 0


@scalar
def score_of(s: Battles, rules: Rules, b: int, field: int) -> float:
    """Return the seconds that a team has held the zone."""
    return f32(s.status[field, b]) * rules.tick
