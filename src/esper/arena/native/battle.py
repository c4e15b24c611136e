"""One decision of a battle from orders to rewards, and the start of the next battle.

The lists of phases say what happens in which order. `step_battles` runs them for all battles on all threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from esper.arena.native import layout as at
from esper.arena.native.compiling import const, for_battles, inlined, scalar
from esper.arena.native.layout import Battles, Choices, Maps, RuleBook, Rules, Tables, Views
from esper.arena.native.ticks import (
    column_at,
    cool_and_balance,
    count_down,
    drive,
    find_push,
    fire,
    fly,
    hold_zone,
    is_alive,
    is_wreck,
    living_of,
    move,
    move_shells,
    score_of,
    strike,
    turn,
    wear_terrain,
)
from esper.arena.native.views import is_seen, look, look_back, mask, observe, observe_whole, sense

ZERO, HALF, ONE, TWO = const(0.0), const(0.5), const(1.0), const(2.0)
AHEAD = const(1e-4)  # a team is ahead by more than this many seconds
DIAGONAL = const(math.sqrt(0.5))

# Tasks of `step_battles`: begin the battles of their episodes; run a decision and replace ended battles by the next ones; run a decision
# only; do nothing. All of them write views.
BEGIN, DECIDE, DECIDE_ONLY, LOOK = range(4)

# Random numbers. A word has 32 bits; products of a word and a factor below 2^31 fit into a signed 64-bit number.
WORD = 0xFFFFFFFF
FACTORS = (0x6A09E667, 0x3C6EF373, 0x510E527F)  # odd
FIRST_FACTOR, SECOND_FACTOR, THIRD_FACTOR = FACTORS
STREAM_MAP, STREAM_TEAM, STREAM_COIN, STREAM_FIRE, STREAM_TARGET, STREAM_VENT, STREAM_MOTION = range(7)  # motion takes four streams
FROM_24_BITS = const(2.0**-24)


@scalar
def scramble(word: int) -> int:
    """Return 32 bits of which each depends on all bits of a 32-bit word."""
    word = ((word ^ (word >> 16)) * FIRST_FACTOR) & WORD
    word = ((word ^ (word >> 15)) * SECOND_FACTOR) & WORD
    word = ((word ^ (word >> 13)) * THIRD_FACTOR) & WORD
    return word ^ (word >> 16)


@scalar
def draw(seed: int, decision: int, unit: int, stream: int) -> int:
    """Return a random 32-bit word. It depends on nothing but the arguments, so neither on the batch nor on the device."""
    seed, decision = int(seed), int(decision)  # interpreted, a word does not fit into numbers of NumPy
    word = scramble((seed & WORD) ^ 0x1F83D9AB)
    word = scramble(word ^ ((seed >> 32) & WORD))
    word = scramble(word ^ (decision & WORD))
    return scramble(word ^ ((unit * 64 + stream) & WORD))


# Orders


@scalar
def read_orders(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, b: int, u: int) -> None:
    """Store the orders of a unit, and what its rewards compare with. Impossible orders are dropped."""
    row = b * s.unit.shape[2] + u
    choice, slot = actions.fire[row], actions.target[row]
    target, weapon = -1, max(choice - 1, 0)
    if choice > 0 and tables.has_weapon[weapon, u] != 0:
        target = s.contact[slot, b, u]
        if target >= 0 and tables.weapon_count[at.W_IS_INSTANT, weapon] != 0 and not is_seen(s, rules, b, u, target):
            target = -1
    s.number[at.WEAPON, b, u] = weapon
    s.number[at.TARGET, b, u] = target
    if target >= 0:
        field = at.W_PAINTED_RANGE if s.number[at.PAINTED, b, target] > 0 else at.W_RANGE
        s.unit[at.AIM_M, b, u] = tables.weapon[field, weapon]
    lives = is_alive(s, b, u)
    s.number[at.VENT_ORDER, b, u] = 1 if actions.vent[row] == 1 and lives else 0
    for index in range(4):
        s.unit[at.FORWARD + index, b, u] = actions.motion[row, index]
    s.number[at.WAS_ALIVE, b, u] = 1 if lives else 0
    s.number[at.WAS_PRESENT, b, u] = s.number[at.IS_PRESENT, b, u]
    s.number[at.FIRED_ONCE, b, u] = 0
    s.number[at.SCARS, b, u] = 0
    s.unit[at.OLD_NEARNESS, b, u] = nearness(s, maps, rules, b, u)
    for attacker in range(s.taken.shape[0]):
        s.taken[attacker, b, u] = ZERO


@scalar
def nearness(s: Battles, maps: Maps, rules: Rules, b: int, u: int) -> float:
    """Return the potential of a position: 0 in the zone, -1 at a route of one map side away from it; 0 for dead units."""
    if not is_alive(s, b, u):
        return ZERO
    column = column_at(s.unit[at.X, b, u], s.unit[at.Y, b, u], rules)
    route_m: float = maps.route_m[s.status[at.MAP, b], column]
    return -min(route_m / (TWO * rules.half_m), TWO)


# The end of a battle


@scalar
def find_end(s: Battles, rules: Rules, b: int) -> None:
    """Decide whether a battle has ended, and who won: by score, by elimination, or by the higher score when the time is up."""
    score, score_2 = score_of(s, rules, b, at.HELD), score_of(s, rules, b, at.HELD_2)
    living, living_2 = living_of(s, b, 0, rules.team), living_of(s, b, rules.team, rules.team)
    lives, lives_2 = living > 0, living_2 > 0
    wins = score >= rules.win_held or (lives and not lives_2)
    wins_2 = score_2 >= rules.win_held or (lives_2 and not lives)
    is_decided = wins or wins_2 or not (lives or lives_2)
    is_over = s.status[at.DECISION, b] >= rules.decisions
    if not is_decided:
        wins, wins_2 = score > score_2 + AHEAD, score_2 > score + AHEAD
    winner = -1
    if wins and not wins_2:
        winner = 0
    if wins_2 and not wins:
        winner = 1
    s.status[at.HAS_ENDED, b] = 1 if is_decided or is_over else 0
    s.status[at.WINNER, b] = winner
    s.status[at.IS_BY_TIME, b] = 1 if is_over and not is_decided else 0
    s.status[at.LAST_DECISION, b] = s.status[at.DECISION, b]
    s.status[at.LAST_HELD, b], s.status[at.LAST_HELD_2, b] = s.status[at.HELD, b], s.status[at.HELD_2, b]
    s.status[at.LAST_LIVING, b], s.status[at.LAST_LIVING_2, b] = living, living_2


# Rewards


@scalar
def find_killer(s: Battles, rules: Rules, b: int, u: int) -> None:
    """Store whether a unit died in this decision, and the enemy that then did the most damage to it."""
    killer = -1
    has_died = s.number[at.WAS_ALIVE, b, u] != 0 and not is_alive(s, b, u)
    s.number[at.HAS_DIED, b, u] = 1 if has_died else 0
    if has_died:
        most = ZERO
        first = rules.team if u < rules.team else 0
        for enemy in range(first, first + rules.team):
            if s.taken[enemy, b, u] > most:
                most, killer = s.taken[enemy, b, u], enemy
    s.number[at.KILLER, b, u] = killer


@scalar
def pay(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Store the weighted parts of a unit's reward. A unit that was dead before the decision gets those of its team only, if any."""
    weights, reward, team = tables.reward, s.reward, rules.team
    for part in range(at.REWARD_FIELDS):
        reward[part, b, u] = ZERO
    if not is_paid(s, tables, b, u):
        return
    own = 0 if u < team else 1
    has_ended = s.status[at.HAS_ENDED, b] != 0
    reward[at.PAID_ZONE, b, u] = weights[at.R_ZONE] * (score_of(s, rules, b, at.HELD + own) - score_of(s, rules, b, at.OLD_HELD + own))
    winner = s.status[at.WINNER, b]
    if has_ended and winner >= 0:
        reward[at.PAID_OUTCOME, b, u] = weights[at.R_OUTCOME] if winner == own else -weights[at.R_OUTCOME]
    if s.number[at.WAS_ALIVE, b, u] == 0:
        return
    dealt = suffered = kills = helped = ZERO
    for other in range(s.unit.shape[2]):
        suffered += s.taken[other, b, u]
        is_enemy = (other < team) != (u < team)
        dealt += s.taken[u, b, other] * (weights[at.R_DAMAGE] if is_enemy else -weights[at.R_FRIENDLY])
        if is_enemy and s.number[at.HAS_DIED, b, other] != 0:
            if s.number[at.KILLER, b, other] == u:
                kills += ONE
            elif s.harm[u, b, other] > 0:
                helped += ONE
    reward[at.PAID_DAMAGE, b, u] = dealt
    reward[at.PAID_HURT, b, u] = -weights[at.R_HURT] * suffered
    reward[at.PAID_KILL, b, u] = weights[at.R_KILL] * kills
    reward[at.PAID_ASSIST, b, u] = weights[at.R_ASSIST] * helped
    reward[at.PAID_DEATH, b, u] = ZERO if is_alive(s, b, u) else -weights[at.R_DEATH]
    new = ZERO if has_ended else nearness(s, maps, rules, b, u)
    reward[at.PAID_APPROACH, b, u] = weights[at.R_APPROACH] * (weights[at.R_GAMMA] * new - s.unit[at.OLD_NEARNESS, b, u])


@scalar
def is_paid(s: Battles, tables: Tables, b: int, u: int) -> bool:
    """Return whether a unit gets rewards: it was alive before the decision, or it was dead and the dead are paid."""
    field = at.WAS_PRESENT if tables.reward[at.R_PAYS_DEAD] > ZERO else at.WAS_ALIVE
    return bool(s.number[field, b, u] != 0)


@scalar
def shared(s: Battles, b: int, u: int) -> float:
    """Return the rewards of a unit of which a share is divided among its team."""
    paid: float = s.reward[at.PAID_DAMAGE, b, u] + s.reward[at.PAID_KILL, b, u] + s.reward[at.PAID_ASSIST, b, u]
    return paid


@scalar
def unshared(s: Battles, b: int, u: int) -> float:
    """Return the other rewards of a unit, without the outcome."""
    paid: float = s.reward[at.PAID_ZONE, b, u] + s.reward[at.PAID_HURT, b, u] + s.reward[at.PAID_DEATH, b, u]
    paid += s.reward[at.PAID_APPROACH, b, u]
    return paid


@scalar
def share_rewards(
    s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int
) -> None:  # fmt: skip
    """Store what a unit is paid: its rewards after those that its team shares, less the mean of the other team's, plus the outcome."""
    if not is_paid(s, tables, b, u):
        return
    own_total = own_count = enemy_total = enemy_count = ZERO
    for other in range(s.unit.shape[2]):
        if not is_paid(s, tables, b, other):
            continue
        if (other < rules.team) == (u < rules.team):
            own_total += shared(s, b, other)
            own_count += ONE
        else:
            enemy_total += shared(s, b, other) + unshared(s, b, other)
            enemy_count += ONE
    share, zero_sum = tables.reward[at.R_SHARE], tables.reward[at.R_ZERO_SUM]
    paid = shared(s, b, u) * (ONE - share) + own_total / own_count * share + unshared(s, b, u)
    paid -= zero_sum * enemy_total / max(enemy_count, ONE)
    s.reward[at.PAID, b, u] = paid + s.reward[at.PAID_OUTCOME, b, u]


# The start of a battle


@scalar
def begin_unit(s: Battles, tables: Tables, rules: Rules, b: int, u: int, team_size: int) -> None:
    """Put a unit on its starting position. Units beyond the team size do not take part."""
    for field in range(at.UNIT_FIELDS):
        s.unit[field, b, u] = ZERO
    for field in range(at.HAS_FIRED):
        s.number[field, b, u] = 0
    is_first = u < rules.team
    is_present = (u if is_first else u - rules.team) < team_size
    s.unit[at.X, b, u] = tables.spawn[0, u]
    s.unit[at.Y, b, u] = tables.spawn[1, u]
    s.unit[at.COS, b, u] = DIAGONAL if is_first else -DIAGONAL
    s.unit[at.SIN, b, u] = DIAGONAL if is_first else -DIAGONAL
    if is_present:
        s.unit[at.HIT_POINTS, b, u] = tables.unit[at.FULL_HIT_POINTS, u]
        s.unit[at.LEGS, b, u] = tables.unit[at.FULL_LEGS, u]
        s.number[at.IS_PRESENT, b, u] = 1
    s.unit[at.STABILITY, b, u] = rules.stability
    s.unit[at.FUEL, b, u] = rules.fuel
    s.number[at.IS_GROUNDED, b, u] = 1
    s.number[at.TARGET, b, u] = -1
    for weapon in range(at.WEAPON_KINDS):
        s.cooldown[weapon, b, u] = 0
    for attacker in range(s.harm.shape[0]):
        s.harm[attacker, b, u] = 0
    for k in range(s.shell.shape[3]):
        for field in range(at.SHELL_FIELDS):
            s.shell[field, b, u, k] = ZERO
        for field in range(at.SHELL_COUNTS):
            s.shell_count[field, b, u, k] = 0
    for index in range(s.cloud_left.shape[2]):
        s.cloud_left[b, u, index] = 0
        for axis in range(3):
            s.cloud[axis, b, u, index] = ZERO


@scalar
def begin_status(s: Battles, b: int, which: int) -> None:
    """Begin a battle on a map. What the last decision gave, such as rewards and the winner, stays."""
    for field in (at.HELD, at.HELD_2, at.DECISION, at.OLD_HELD, at.OLD_HELD_2):
        s.status[field, b] = 0
    s.status[at.HOLDER, b] = -1
    s.status[at.MAP, b] = which
    s.status[at.TEAM_LIMIT, b] = s.status[at.LARGEST_TEAM, b]


@scalar
def mend_columns(s: Battles, b: int, u: int) -> None:
    """Remove the damage of every U-th column, beginning with column `u`."""
    for column in range(u, s.worn.shape[1], s.unit.shape[2]):
        s.worn[b, column] = 0


@scalar
def draw_map(s: Battles, maps: Maps, rules: Rules, b: int) -> int:
    """Return the map of a place's episode, drawn by its seed."""
    episode, count = s.status[at.EPISODE, b], maps.column.shape[0]
    if rules.battles_per_map > 0:
        return int((s.status[at.PLACE, b] // rules.battles_per_map + episode * rules.map_groups) % count)
    return int(draw(s.seed[b], episode, 0, STREAM_MAP) % count)


@scalar
def draw_team_size(s: Battles, rules: Rules, b: int) -> int:
    """Return the team size of a place's episode, drawn by its seed."""
    largest = int(s.status[at.LARGEST_TEAM, b])
    smallest = min(largest, int(rules.smallest_team))
    return smallest + draw(s.seed[b], s.status[at.EPISODE, b], 0, STREAM_TEAM) % (largest - smallest + 1)


# The phases of a decision. They all have the arguments of a `PhaseFunction`.

PhaseFunction = Callable[[Battles, Maps, Tables, Rules, Choices, Views, int, int, int], None]


class Phase(NamedTuple):
    """A part of a decision. All units of a battle must finish it before the next phase begins; their order does not matter."""

    run: PhaseFunction  # of state, maps, tables, rules, actions, views, task, battle and unit
    is_of_battle: bool = False  # run once for a battle, with unit 0


@scalar
def order(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Store the orders of a unit."""
    if u == 0:
        s.status[at.OLD_HELD, b] = s.status[at.HELD, b]
        s.status[at.OLD_HELD_2, b] = s.status[at.HELD_2, b]
    read_orders(s, maps, tables, rules, actions, b, u)


@scalar
def steer_unit(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Count down the timers of a unit, change its velocity, and find out how far others push it."""
    count_down(s, b, u)
    if not is_wreck(s, b, u):
        turn(s, tables, rules, b, u)
        drive(s, maps, tables, rules, b, u)
        fly(s, tables, rules, b, u)
        find_push(s, rules, b, u)


@scalar
def move_unit(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Move a unit."""
    if not is_wreck(s, b, u):
        move(s, maps, tables, rules, b, u)


@scalar
def shoot(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Fire the weapon of a unit and move its projectiles."""
    fire(s, tables, rules, b, u)
    move_shells(s, maps, tables, rules, b, u)


@scalar
def suffer(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Apply the hits on a unit, then its cooling and balance."""
    if is_alive(s, b, u):
        strike(s, tables, rules, b, u)
        cool_and_balance(s, tables, rules, b, u)


@scalar
def hold(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Let a team hold the zone."""
    hold_zone(s, maps, tables, rules, b)


@scalar
def finish(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Find out whether the battle has ended and who killed a unit."""
    if u == 0:
        s.status[at.DECISION, b] += 1
        wear_terrain(s, maps, b)
        find_end(s, rules, b)
    find_killer(s, rules, b, u)


@scalar
def begins(s: Battles, task: int, b: int) -> bool:
    """Return whether a new battle begins."""
    return bool(task == BEGIN or (task == DECIDE and s.status[at.HAS_ENDED, b] != 0))


@scalar
def begin(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Begin a new battle on its map."""
    if begins(s, task, b):
        s.status[at.EPISODE, b] += 1 if task == DECIDE else 0
        begin_status(s, b, draw_map(s, maps, rules, b))


@scalar
def place(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Put a unit on its starting position, and mend its share of the columns."""
    if begins(s, task, b):
        begin_unit(s, tables, rules, b, u, draw_team_size(s, rules, b))
        mend_columns(s, b, u)


@scalar
def see(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Find the lines of sight of a unit."""
    look(s, maps, rules, b, u)


@scalar
def view(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int) -> None:
    """Let a unit sense and observe, and write its masks."""
    look_back(s, rules, b, u)
    sense(s, tables, rules, b, u)
    mask(s, tables, rules, views, b, u)
    observe(s, maps, tables, rules, views, b, u)
    if views.whole.shape[2] > 0:
        observe_whole(s, maps, tables, rules, views, b, u)


ORDER_PHASES = (Phase(order),)
TICK_PHASES = (Phase(steer_unit), Phase(move_unit), Phase(shoot), Phase(suffer), Phase(hold, is_of_battle=True))
RESULT_PHASES = (Phase(finish), Phase(pay), Phase(share_rewards))
BEGIN_PHASES = (Phase(begin, is_of_battle=True), Phase(place))
VIEW_PHASES = (Phase(see), Phase(view))


# A whole decision


def in_turn(phases: Sequence[Phase]) -> PhaseFunction:
    """Return a function of one battle that runs phases one after the other, each for all units. Its last argument means nothing."""
    (run, is_of_battle), others = phases[0], phases[1:]

    @scalar
    def run_phase(
        s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int
    ) -> None:  # fmt: skip
        for unit in range(1 if is_of_battle else s.unit.shape[2]):
            run(s, maps, tables, rules, actions, views, task, b, unit)

    if not others:
        return run_phase
    run_others = in_turn(others)

    @inlined
    def run_all(
        s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, task: int, b: int, u: int
    ) -> None:  # fmt: skip
        run_phase(s, maps, tables, rules, actions, views, task, b, u)
        run_others(s, maps, tables, rules, actions, views, task, b, u)

    return run_all


order_battle, tick_battle, end_decision, begin_battle, view_battle = map(
    in_turn, (ORDER_PHASES, TICK_PHASES, RESULT_PHASES, BEGIN_PHASES, VIEW_PHASES)
)


@inlined
def decide_battle(s: Battles, maps: Maps, tables: Tables, rules: Rules, actions: Choices, views: Views, b: int) -> None:
    """Run one decision of a battle: orders, ticks, terrain, end and rewards."""
    order_battle(s, maps, tables, rules, actions, views, DECIDE, b, 0)
    for _ in range(rules.ticks):
        tick_battle(s, maps, tables, rules, actions, views, DECIDE, b, 0)
    end_decision(s, maps, tables, rules, actions, views, DECIDE, b, 0)


@inlined
def step_battle(
    s: Battles, maps: Maps, tables: Tables, rule_book: RuleBook, actions: Choices, views: Views, task: int, b: int
) -> None:  # fmt: skip
    """Do a task with a battle, and write the views of what it is then."""
    rules = rule_book[0]
    if task == DECIDE or task == DECIDE_ONLY:  # noqa: SIM109 (a tuple takes longer to compile)
        decide_battle(s, maps, tables, rules, actions, views, b)
    begin_battle(s, maps, tables, rules, actions, views, task, b, 0)
    view_battle(s, maps, tables, rules, actions, views, task, b, 0)


@for_battles
def step_battles(
    first: int, last: int, s: Battles, maps: Maps, tables: Tables, rule_book: RuleBook, actions: Choices, views: Views, task: int
) -> None:  # fmt: skip
    """Do a task with all battles."""
    for b in range(first, last):
        step_battle(s, maps, tables, rule_book, actions, views, task, b)
