"""What units know after a decision: line of sight, sensing, contacts, masks and observations.

An observation has the parts and fields of `esper.arena.observe`, in the same order.
"""

from __future__ import annotations

import math

from esper.arena.native import layout as at
from esper.arena.native.compiling import ceiling, const, f32, floor, i32, scalar
from esper.arena.native.layout import Battles, Floats, Maps, Rules, Tables, Views
from esper.arena.native.ticks import HEIGHT_STEP, can_act, column_at, floor_at, is_alive, living_of, score_of
from esper.arena.observe import ALLY, CONTACT, VIEW, width

ZERO, HALF, ONE, FOUR, FIVE, TEN, TWENTY = const(0.0), const(0.5), const(1.0), const(4.0), const(5.0), const(10.0), const(20.0)
TINY, THIN, SHORTEST, FAR = const(1e-6), const(1e-9), const(1e-30), const(1e30)
TOLERANCE = const(2.0**-14)  # m; lines that pass a plane this closely are exactly on it
CELLS = VIEW * VIEW
CONTACT_WIDTH, ALLY_WIDTH = width(CONTACT), width(ALLY)


@scalar
def is_blocking(s: Battles, maps: Maps, b: int, column: int, z: float) -> bool:
    """Return whether a column reaches above a height."""
    top = f32(maps.column[s.status[at.MAP, b], column, at.C_TOP]) * HEIGHT_STEP
    return bool(top - z > ZERO and s.worn[b, column] != at.DESTROYED)


@scalar
def line_is_clear(s: Battles, maps: Maps, rules: Rules, b: int, one: int, other: int) -> bool:
    """Return whether no column blocks the line between the eyes of two units.

    The line is followed in a frame in which it never falls: `along` is the axis on which it is longer, oriented so that height does not
    fall as it grows, and `across` grows with it. A slab is the strip of columns between two neighbouring grid planes across the
    longer axis. Within a slab, the line meets at most two columns, and it is lowest in a column where it enters it.

    Ties: a line is blocked if it passes through the inside of the union of all columns. Touching a top, a face or a corner does not block.
    A line exactly along the edge between two columns is blocked by the lower one, a vertical line in a corner by the lowest of four, and a
    line along the map's border by the column inside. The result is the same, bit for bit, from either end and after a half turn of the map.
    """
    eye_x, eye_y, eye_z = s.unit[at.X, b, one], s.unit[at.Y, b, one], s.unit[at.Z, b, one] + rules.eye
    aim_x, aim_y, aim_z = s.unit[at.X, b, other], s.unit[at.Y, b, other], s.unit[at.Z, b, other] + rules.eye
    size, half = rules.side, rules.side // 2
    is_along_x = abs(aim_x - eye_x) >= abs(aim_y - eye_y)
    if is_along_x:
        eye_along, eye_across, aim_along, aim_across, stride_along, stride_across = eye_x, eye_y, aim_x, aim_y, size, 1
    else:
        eye_along, eye_across, aim_along, aim_across, stride_along, stride_across = eye_y, eye_x, aim_y, aim_x, 1, size
    step_along, step_across, step_z = abs(aim_along - eye_along), abs(aim_across - eye_across), abs(aim_z - eye_z)
    toward = aim_along - eye_along
    falls = toward * (aim_z - eye_z) < ZERO
    is_mirrored = falls != (toward * (aim_across - eye_across) < ZERO)
    # Slab 0 and row 0 begin at the middle planes; mirrored, they are the columns on the other side of them.
    column = half * (stride_along + stride_across)
    if falls:
        column -= stride_along
        stride_along = -stride_along
        eye_along, aim_along = -eye_along, -aim_along
    if is_mirrored:
        column -= stride_across
        stride_across = -stride_across
        eye_across, aim_across = -eye_across, -aim_across
    low, high = min(eye_along, aim_along), max(eye_along, aim_along)
    low_across, low_z = min(eye_across, aim_across), min(eye_z, aim_z) + TOLERANCE
    middle, middle_across = (low + high) * HALF, (eye_across + aim_across) * HALF
    span = max(step_along, SHORTEST)
    lean, rise, climb = step_across / span, step_z / span, step_z / max(step_across, SHORTEST)
    begin, end = floor(low), ceiling(high) - 1
    first, last = max(min(begin, end), -half), min(max(begin, end), half - 1)
    is_straight = lean < TOLERANCE + TOLERANCE
    is_vertical = step_along == ZERO
    blocked_slabs = 0
    for slab in range(first, last + 1):
        enters, leaves = max(f32(slab), low), min(f32(slab + 1), high)
        row_in = floor(middle_across + TOLERANCE + (enters - middle) * lean)
        row_out = ceiling(middle_across - TOLERANCE + (leaves - middle) * lean) - 1
        row_in, row_out = min(max(row_in, -half), half - 1), min(max(row_out, -half), half - 1)
        z_in = low_z + (enters - low) * rise
        slab_column = column + slab * stride_along
        blocks_in = is_blocking(s, maps, b, slab_column + row_in * stride_across, z_in)
        if blocks_in and not is_straight:
            return False
        if row_out != row_in:
            z_out = max(low_z + (f32(row_out) - low_across) * climb, z_in)
            blocks_out = is_blocking(s, maps, b, slab_column + row_out * stride_across, z_out)
        else:
            blocks_out = blocks_in
        # A line on the plane between two rows is blocked only where both columns are above it.
        if is_straight:
            if blocks_in and blocks_out:
                blocked_slabs += 1
                if not is_vertical:
                    return False
        elif blocks_out:
            return False
    # A vertical line has a second slab only on the plane between two, and both must block it.
    return blocked_slabs == 0 or blocked_slabs < last + 1 - first


@scalar
def is_smoked(s: Battles, rules: Rules, b: int, one: int, other: int) -> bool:
    """Return whether the line between the eyes of two units passes through a cloud of smoke."""
    x, y, z = s.unit[at.X, b, one], s.unit[at.Y, b, one], s.unit[at.Z, b, one] + rules.eye
    line_x, line_y, line_z = s.unit[at.X, b, other] - x, s.unit[at.Y, b, other] - y, s.unit[at.Z, b, other] + rules.eye - z
    square = max(line_x * line_x + line_y * line_y + line_z * line_z, THIN)
    for u in range(s.unit.shape[2]):
        for index in range(s.cloud_left.shape[2]):
            if s.cloud_left[b, u, index] <= 0:
                continue
            off_x, off_y, off_z = s.cloud[0, b, u, index] - x, s.cloud[1, b, u, index] - y, s.cloud[2, b, u, index] - z
            share = min(max((off_x * line_x + off_y * line_y + off_z * line_z) / square, ZERO), ONE)
            miss_x, miss_y, miss_z = off_x - share * line_x, off_y - share * line_y, off_z - share * line_z
            if miss_x * miss_x + miss_y * miss_y + miss_z * miss_z < rules.cloud * rules.cloud:
                return True
    return False


@scalar
def square_between(s: Battles, b: int, one: int, other: int) -> float:
    """Return the squared distance of two units."""
    x: float = s.unit[at.X, b, one] - s.unit[at.X, b, other]
    y: float = s.unit[at.Y, b, one] - s.unit[at.Y, b, other]
    z: float = s.unit[at.Z, b, one] - s.unit[at.Z, b, other]
    return x * x + y * y + z * z


@scalar
def look(s: Battles, maps: Maps, rules: Rules, b: int, u: int) -> None:
    """Store which enemies a unit of the first team sees. Enemies see each other, so a line is computed once for both directions."""
    if u >= rules.team:
        return
    seen = 0
    if is_alive(s, b, u):
        for enemy in range(rules.team):
            other = rules.team + enemy
            if not is_alive(s, b, other) or square_between(s, b, u, other) > rules.sight * rules.sight:
                continue
            if line_is_clear(s, maps, rules, b, u, other) and not is_smoked(s, rules, b, u, other):
                seen |= 1 << enemy
    s.number[at.SEEN, b, u] = seen


@scalar
def look_back(s: Battles, rules: Rules, b: int, u: int) -> None:
    """Store which enemies a unit of the second team sees: those that see it."""
    if u < rules.team:
        return
    seen = 0
    for enemy in range(rules.team):
        seen |= ((s.number[at.SEEN, b, enemy] >> (u - rules.team)) & 1) << enemy
    s.number[at.SEEN, b, u] = seen


@scalar
def is_seen(s: Battles, rules: Rules, b: int, u: int, other: int) -> bool:
    """Return whether a unit sees an enemy."""
    enemy = other - rules.team if u < rules.team else other
    return bool((s.number[at.SEEN, b, u] >> enemy) & 1 != 0)


@scalar
def is_helpless(s: Battles, b: int, u: int) -> bool:
    """Return whether a unit has fallen or is shut down."""
    return bool(s.number[at.FALLEN, b, u] > 0 or s.number[at.IS_SHUT_DOWN, b, u] != 0)


@scalar
def sense(s: Battles, tables: Tables, rules: Rules, b: int, u: int) -> None:
    """Store which enemies a unit senses: by sight, radar, heat and paint. Order them by distance as its contacts."""
    team = rules.team
    first = team if u < team else 0
    sensed = 0
    if is_alive(s, b, u):
        for enemy in range(team):
            other = first + enemy
            if not is_alive(s, b, other):
                continue
            distance = math.sqrt(square_between(s, b, u, other))
            is_hot = s.unit[at.HEAT, b, other] > rules.hot_share * tables.unit[at.HEAT_CAP, other] or s.number[at.IS_VENTING, b, other] != 0
            is_sensed = distance <= rules.radar * tables.unit[at.RADAR, u] or (is_hot and distance <= rules.hot)
            if is_sensed or s.number[at.PAINTED, b, other] > 0 or (s.number[at.SEEN, b, u] >> enemy) & 1:
                sensed |= 1 << enemy
    s.number[at.SENSED, b, u] = sensed
    last_square, last = -ONE, -1
    for slot in range(rules.contacts):
        last, last_square = next_nearest(s, b, u, first, team, sensed, last, last_square)
        s.contact[slot, b, u] = last
        if last < 0:
            last_square = FAR


@scalar
def next_nearest(s: Battles, b: int, u: int, first: int, team: int, among: int, last: int, last_square: float) -> tuple[int, float]:
    """Return the nearest unit of a team after the last one, and its squared distance; -1 if there is none. `among` are bits of members."""
    found, found_square = -1, FAR
    for member in range(team):
        other = first + member
        if (among >> member) & 1 == 0:
            continue
        square = square_between(s, b, u, other)
        if (square > last_square or (square == last_square and other > last)) and square < found_square:
            found, found_square = other, square
    return found, found_square


@scalar
def living_allies(s: Battles, rules: Rules, b: int, u: int) -> int:
    """Return the living units of a unit's team without itself, as bits; bit e is the e-th unit of its team."""
    first = 0 if u < rules.team else rules.team
    living = 0
    for member in range(rules.team):
        if first + member != u and is_alive(s, b, first + member):
            living |= 1 << member
    return living


# Masks


@scalar
def reaches(s: Battles, tables: Tables, rules: Rules, b: int, u: int, weapon: int, slot: int) -> bool:
    """Return whether a kind of weapon reaches a contact: it is in range, and seen if the weapon hits at once."""
    other = s.contact[slot, b, u]
    if other < 0:
        return False
    if tables.weapon_count[at.W_IS_INSTANT, weapon] != 0 and not is_seen(s, rules, b, u, other):
        return False
    field = at.W_PAINTED_RANGE if s.number[at.PAINTED, b, other] > 0 else at.W_RANGE
    return bool(math.sqrt(square_between(s, b, u, other)) <= tables.weapon[field, weapon])


@scalar
def mask(s: Battles, tables: Tables, rules: Rules, views: Views, b: int, u: int) -> None:
    """Write the allowed choices of a unit. An irrelevant head has one allowed choice too."""
    row = b * s.unit.shape[2] + u
    is_ready = can_act(s, b, u)
    can_vent = is_alive(s, b, u) and s.number[at.IS_SHUT_DOWN, b, u] == 0 and s.unit[at.HEAT, b, u] > ZERO
    views.fire[row, 0] = 1
    for slot in range(rules.contacts):
        views.target[row, 0, slot] = 1 if slot == 0 else 0
    for weapon in range(at.WEAPON_KINDS):
        can_reach = False
        for slot in range(rules.contacts):
            is_reached = reaches(s, tables, rules, b, u, weapon, slot)
            views.target[row, 1 + weapon, slot] = 1 if is_reached else 0
            can_reach = can_reach or is_reached
        if not can_reach:
            views.target[row, 1 + weapon, 0] = 1
        views.fire[row, 1 + weapon] = 1 if can_reach and is_ready and tables.has_weapon[weapon, u] != 0 else 0
    views.vent[row, 0] = 1
    views.vent[row, 1] = 1 if can_vent else 0


# Observations


@scalar
def put(row: Floats, place: int, value: float) -> int:
    """Write one number of an observation and return the place of the next."""
    row[place] = value
    return place + 1


@scalar
def put_turned(row: Floats, place: int, cos: float, sin: float, x: float, y: float, scale: float) -> int:
    """Write a vector, ahead and left of a heading with this cosine and sine, divided by `scale`."""
    row[place] = (x * cos + y * sin) / scale
    row[place + 1] = (y * cos - x * sin) / scale
    return place + 2


@scalar
def put_one_hot(row: Floats, place: int, choice: int, kinds: int) -> int:
    """Write 1 at the choice and 0 elsewhere."""
    for index in range(kinds):
        row[place + index] = ONE if index == choice else ZERO
    return place + kinds


@scalar
def put_own(s: Battles, maps: Maps, tables: Tables, rules: Rules, row: Floats, b: int, u: int, place: int) -> int:
    """Write what a unit observes of itself and of its battle."""
    unit, number, team = s.unit, s.number, rules.team
    which = s.status[at.MAP, b]
    x, y, z = unit[at.X, b, u], unit[at.Y, b, u], unit[at.Z, b, u]
    cos, sin = unit[at.COS, b, u], unit[at.SIN, b, u]
    side = ONE if u < team else -ONE
    column = column_at(x, y, rules)
    edge = math.sqrt(x * x + y * y) - maps.zone_radius[which]
    place = put_one_hot(row, place, tables.unit_count[at.KIND, u], at.CLASS_KINDS)
    place = put_one_hot(row, place, tables.unit_count[at.ROLE, u], at.ROLE_KINDS)
    place = put(row, place, unit[at.HIT_POINTS, b, u] / tables.unit[at.FULL_HIT_POINTS, u])
    place = put(row, place, unit[at.LEGS, b, u] / tables.unit[at.FULL_LEGS, u])
    place = put(row, place, unit[at.HEAT, b, u] / tables.unit[at.HEAT_CAP, u])
    place = put(row, place, unit[at.STABILITY, b, u] / rules.stability)
    place = put(row, place, unit[at.FUEL, b, u] / rules.fuel if tables.unit[at.JET_THRUST, u] > ZERO else ZERO)
    place = put(row, place, cos * side)
    place = put(row, place, sin * side)
    place = put(row, place, x * side / rules.half_m)
    place = put(row, place, y * side / rules.half_m)
    place = put(row, place, z / TEN)
    place = put(row, place, (z - floor_at(s, maps, b, column)) / TEN)
    place = put_turned(row, place, cos, sin, unit[at.VELOCITY_X, b, u], unit[at.VELOCITY_Y, b, u], TEN)
    place = put(row, place, unit[at.VELOCITY_Z, b, u] / TEN)
    place = put(row, place, f32(number[at.IS_GROUNDED, b, u]))
    place = put(row, place, f32(number[at.IS_SHUT_DOWN, b, u]))
    place = put(row, place, f32(number[at.IS_VENTING, b, u]))
    place = put(row, place, f32(number[at.FALLEN, b, u]) / f32(rules.fallen))
    place = put(row, place, f32(number[at.SUPPRESSED, b, u]) / f32(rules.longest_suppression))
    place = put(row, place, f32(number[at.PAINTED, b, u]) / f32(rules.longest_paint))
    for weapon in range(at.WEAPON_KINDS):
        place = put(row, place, f32(tables.has_weapon[weapon, u]))
    for weapon in range(at.WEAPON_KINDS):
        place = put(row, place, f32(s.cooldown[weapon, b, u]) / f32(tables.weapon_count[at.W_COOLDOWN, weapon]))
    place = put_turned(row, place, cos, sin, -x, -y, rules.half_m)
    place = put(row, place, edge / rules.half_m)
    place = put(row, place, ONE if edge <= ZERO else ZERO)
    way = maps.way[which, column]
    place = put_turned(row, place, cos, sin, tables.direction[0, way], tables.direction[1, way], ONE)
    place = put(row, place, min(maps.route_m[which, column], FOUR * f32(rules.side)) / f32(rules.side))
    own = 0 if u < team else 1
    place = put_battle(s, maps, rules, row, b, own, place)
    place = put(row, place, f32(living_of(s, b, own * team, team)) / f32(team))
    return put(row, place, f32(living_of(s, b, (1 - own) * team, team)) / f32(team))


@scalar
def put_battle(s: Battles, maps: Maps, rules: Rules, row: Floats, b: int, own: int, place: int) -> int:
    """Write the zone, the scores and the clock of a battle, for a team."""
    place = put(row, place, maps.zone_radius[s.status[at.MAP, b]] / TEN)
    holder = s.status[at.HOLDER, b]
    place = put(row, place, ONE if holder == own else ZERO)
    place = put(row, place, ONE if holder == 1 - own else ZERO)
    place = put(row, place, score_of(s, rules, b, at.HELD + own) / rules.win_score)
    place = put(row, place, score_of(s, rules, b, at.HELD + 1 - own) / rules.win_score)
    return put(row, place, ONE - f32(s.status[at.DECISION, b]) / f32(rules.decisions))


@scalar
def put_place(s: Battles, row: Floats, b: int, u: int, other: int, place: int) -> int:
    """Write where another unit is: ahead, left, up, and its nearness."""
    cos, sin = s.unit[at.COS, b, u], s.unit[at.SIN, b, u]
    x, y = s.unit[at.X, b, other] - s.unit[at.X, b, u], s.unit[at.Y, b, other] - s.unit[at.Y, b, u]
    place = put_turned(row, place, cos, sin, x, y, TWENTY)
    place = put(row, place, (s.unit[at.Z, b, other] - s.unit[at.Z, b, u]) / TWENTY)
    return put(row, place, ONE / (ONE + math.sqrt(square_between(s, b, u, other)) / FIVE))


@scalar
def put_condition(s: Battles, tables: Tables, row: Floats, b: int, u: int, other: int, place: int) -> int:
    """Write the class, hit points, heat and relative heading of another unit."""
    cos, sin = s.unit[at.COS, b, u], s.unit[at.SIN, b, u]
    place = put_one_hot(row, place, tables.unit_count[at.KIND, other], at.CLASS_KINDS)
    place = put(row, place, s.unit[at.HIT_POINTS, b, other] / tables.unit[at.FULL_HIT_POINTS, other])
    place = put(row, place, s.unit[at.HEAT, b, other] / tables.unit[at.HEAT_CAP, other])
    return put_turned(row, place, cos, sin, s.unit[at.COS, b, other], s.unit[at.SIN, b, other], ONE)


@scalar
def put_nothing(row: Floats, place: int, numbers: int) -> int:
    for index in range(numbers):
        row[place + index] = ZERO
    return place + numbers


@scalar
def put_contacts(s: Battles, tables: Tables, rules: Rules, row: Floats, b: int, u: int, place: int) -> int:
    """Write the contacts of a unit; zeros in empty slots."""
    cos, sin = s.unit[at.COS, b, u], s.unit[at.SIN, b, u]
    for slot in range(rules.contacts):
        other = s.contact[slot, b, u]
        if other < 0:
            place = put_nothing(row, place, CONTACT_WIDTH)
            continue
        place = put(row, place, ONE)
        place = put(row, place, ONE if is_seen(s, rules, b, u, other) else ZERO)
        place = put_place(s, row, b, u, other, place)
        x, y = s.unit[at.X, b, other] - s.unit[at.X, b, u], s.unit[at.Y, b, other] - s.unit[at.Y, b, u]
        place = put_turned(row, place, cos, sin, x, y, max(math.sqrt(x * x + y * y), TWENTY * TINY))
        place = put_turned(row, place, cos, sin, s.unit[at.VELOCITY_X, b, other], s.unit[at.VELOCITY_Y, b, other], TEN)
        place = put_condition(s, tables, row, b, u, other, place)
        place = put(row, place, ONE if is_helpless(s, b, other) else ZERO)
        place = put(row, place, ONE if s.number[at.PAINTED, b, other] > 0 else ZERO)
    return place


@scalar
def put_allies(s: Battles, tables: Tables, rules: Rules, row: Floats, b: int, u: int, place: int) -> int:
    """Write the living units of the own team, nearest first; zeros in empty slots."""
    first = 0 if u < rules.team else rules.team
    among = living_allies(s, rules, b, u)
    last, last_square = -1, -ONE
    for _ in range(rules.allies):
        last, last_square = next_nearest(s, b, u, first, rules.team, among, last, last_square)
        if last < 0:
            last_square = FAR
            place = put_nothing(row, place, ALLY_WIDTH)
            continue
        place = put(row, place, ONE)
        place = put_place(s, row, b, u, last, place)
        place = put_condition(s, tables, row, b, u, last, place)
    return place


@scalar
def put_terrain(s: Battles, maps: Maps, tables: Tables, rules: Rules, row: Floats, b: int, u: int, place: int) -> None:
    """Write the terrain around a unit: rows of cells from behind to ahead, each row from right to left."""
    x, y, z = s.unit[at.X, b, u], s.unit[at.Y, b, u], s.unit[at.Z, b, u]
    cos, sin = s.unit[at.COS, b, u], s.unit[at.SIN, b, u]
    half, last, which = rules.half_m, rules.last, s.status[at.MAP, b]
    for cell in range(CELLS):
        ahead, left = tables.cell[0, cell], tables.cell[1, cell]
        i = i32(min(max(x + ahead * cos - left * sin + half, ZERO), last))
        j = i32(min(max(y + ahead * sin + left * cos + half, ZERO), last))
        column = i * rules.side + j
        ground = top = signal = ZERO  # of a destroyed column
        if s.worn[b, column] != at.DESTROYED:
            ground = f32(maps.column[which, column, at.C_FLOOR]) * HEIGHT_STEP
            top = f32(maps.column[which, column, at.C_TOP]) * HEIGHT_STEP
            signal = tables.material[at.M_SIGNAL, maps.column[which, column, at.C_MATERIAL]]
        row[place + 3 * cell] = min(max((ground - z) / FOUR, -ONE), ONE)
        row[place + 3 * cell + 1] = min(max((top - z) / FOUR, ZERO), ONE)
        row[place + 3 * cell + 2] = signal


@scalar
def observe(s: Battles, maps: Maps, tables: Tables, rules: Rules, views: Views, b: int, u: int) -> None:
    """Write the observation of a unit. Dead units observe zeros."""
    row = views.observation[b, u]
    if not is_alive(s, b, u):
        put_nothing(row, 0, row.shape[0])
        return
    place = put_own(s, maps, tables, rules, row, b, u, 0)
    place = put_contacts(s, tables, rules, row, b, u, place)
    place = put_allies(s, tables, rules, row, b, u, place)
    put_terrain(s, maps, tables, rules, row, b, u, place)


@scalar
def observe_whole(s: Battles, maps: Maps, tables: Tables, rules: Rules, views: Views, b: int, u: int) -> None:
    """Write the view of the whole battle for a critic: every unit, own team first, in the own team's world frame; zone, scores, clock."""
    row = views.whole[b, u]
    side, team, place = ONE if u < rules.team else -ONE, rules.team, 0
    for index in range(2 * team):
        other = index if u < team else (index + team) % (2 * team)
        place = put(row, place, ONE if is_alive(s, b, other) else ZERO)
        place = put(row, place, s.unit[at.X, b, other] * side / rules.half_m)
        place = put(row, place, s.unit[at.Y, b, other] * side / rules.half_m)
        place = put(row, place, s.unit[at.Z, b, other] / TEN)
        place = put(row, place, s.unit[at.HIT_POINTS, b, other] / tables.unit[at.FULL_HIT_POINTS, other])
        place = put(row, place, s.unit[at.HEAT, b, other] / tables.unit[at.HEAT_CAP, other])
        place = put(row, place, ONE if is_helpless(s, b, other) else ZERO)
    put_battle(s, maps, rules, row, b, 0 if u < team else 1, place)
