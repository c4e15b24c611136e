"""Weapons: when they fire, what they do to the unit that fires and to the unit that is hit, and whose damage it is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from esper.arena.arena import Arena, no_actions
from esper.arena.native import layout as at
from esper.arena.orders import FIRE
from esper.arena.specs import CLASSES, PHYSICS, WEAPONS, Material
from tests.arena.worlds import (
    WEAPON,
    build,
    contacts,
    damage_by,
    decide,
    flat_arena,
    has_fired,
    make_duel,
    place,
    put,
    put_shell,
    tick,
    unit_field,
)

TICK = PHYSICS.tick_s
OWNER = {name: next(unit for unit, spec in CLASSES.items() if name in spec.weapons) for name in WEAPONS}
PROJECTILES = [name for name, weapon in WEAPONS.items() if weapon.flight_mps]
INSTANT = [name for name, weapon in WEAPONS.items() if not weapon.flight_mps]
X = -28.0  # of the unit that fires


def make_pair(name: str, metres: float, *, bearing_deg: float = 0.0) -> Arena:
    """Unit 0 owns the weapon and looks along x. Unit 1 looks at it from so far away, so many degrees to its left."""
    arena = flat_arena(OWNER[name], size=64)
    angle = math.radians(bearing_deg)
    place(arena, 0, X, 0)
    place(arena, 1, X + metres * math.cos(angle), metres * math.sin(angle), heading=angle - math.pi)
    return arena


def fires(arena: Arena, name: str, *, vent: bool = False) -> bool:
    """Run a tick in which unit 0 should fire at unit 1."""
    tick(arena, {0: {"fire": name, "target": 1, "vent": vent}})
    return has_fired(arena, 0)


def cooling(name: str) -> float:
    """Return the heat that a unit of a class loses in a tick."""
    return CLASSES[name].cooling_per_s * TICK


# When a weapon fires


@pytest.mark.parametrize(
    ("name", "every"), [("laser", 12), ("flamer", 3), ("missile", 60), ("gauss", 80), ("autocannon", 4), ("painter", 20), ("smoke", 100)]
)
def test_a_weapon_fires_again_exactly_after_its_cooldown(name: str, every: int) -> None:
    arena = make_pair(name, 4)
    for _ in range(2):
        put(arena, 0, heat=0.0)
        assert fires(arena, name)
        assert unit_field(arena, "cooldown", 0)[name] == every
        tick(arena, {0: {"fire": name, "target": 1}}, times=every - 1)
        assert not has_fired(arena, 0)


def test_a_loading_weapon_does_not_keep_the_others_from_firing() -> None:
    arena = make_pair("missile", 4)
    assert fires(arena, "missile")
    assert not fires(arena, "missile")
    assert fires(arena, "laser")


@pytest.mark.parametrize("name", WEAPONS)
def test_a_weapon_fires_as_far_as_its_range(name: str) -> None:
    reach = WEAPONS[name].range_m
    assert fires(make_pair(name, reach - 0.01), name)
    assert not fires(make_pair(name, reach + 0.01), name)


@pytest.mark.parametrize(("z", "does_fire"), [(5.0, True), (6.0, False)])  # 7.8 m and 8.5 m
def test_height_counts_in_the_distance(z: float, does_fire: bool) -> None:
    arena = make_pair("laser", 6)
    place(arena, 1, X + 6, 0, z)
    assert fires(arena, "laser") == does_fire


@pytest.mark.parametrize("name", WEAPONS)
@pytest.mark.parametrize("side", [-1, 1])
def test_a_weapon_fires_only_within_its_arc(name: str, side: int) -> None:
    half = WEAPONS[name].arc_deg / 2
    assert fires(make_pair(name, 4, bearing_deg=side * (half - 0.5)), name)
    assert not fires(make_pair(name, 4, bearing_deg=side * (half + 0.5)), name)


@pytest.mark.parametrize(("metres", "painted", "does_fire"), [(12.1, 0, False), (12.1, 1, True), (49.9, 1, True), (50.1, 1, False)])
def test_a_missile_reaches_a_painted_target_much_further(metres: float, painted: int, does_fire: bool) -> None:
    arena = make_pair("missile", metres)
    put(arena, 1, painted=painted)
    assert fires(arena, "missile") == does_fire


@pytest.mark.parametrize("name", [name for name, weapon in WEAPONS.items() if not weapon.painted_range_m])
def test_paint_extends_the_range_of_no_other_weapon(name: str) -> None:
    arena = make_pair(name, WEAPONS[name].range_m + 0.1)
    put(arena, 1, painted=100)
    assert not fires(arena, name)


@pytest.mark.parametrize(
    ("values", "vent", "does_fire"),
    [
        ({}, False, True),
        ({"fallen": 2}, False, False),
        ({"fallen": 1}, False, True),  # it gets up in this tick
        ({"is_shut_down": True}, False, False),
        ({}, True, False),
    ],
)
def test_a_unit_that_lies_is_shut_down_or_vents_does_not_fire(values: dict[str, Any], vent: bool, does_fire: bool) -> None:
    arena = make_pair("laser", 4)
    put(arena, 0, **values)
    assert fires(arena, "laser", vent=vent) == does_fire


@pytest.mark.parametrize("dead", [0, 1])
def test_dead_units_neither_fire_nor_are_fired_at(dead: int) -> None:
    arena = make_pair("laser", 4)
    put(arena, dead, hit_points=1e-4)
    x = int(unit_field(arena, "position", dead)[0])
    build(arena, (x - 1, x + 1), (-1, 1), Material.LAVA)  # kills it at the start of the tick
    assert not fires(arena, "laser")
    assert unit_field(arena, "hit_points", dead) == 0


def test_a_target_that_dies_within_a_decision_is_not_fired_at_again() -> None:
    arena = make_pair("flamer", 4)
    put(arena, 1, hit_points=4.0)
    tick(arena, {0: {"fire": "flamer", "target": 1}}, times=5)  # it would fire in the first and in the fourth tick
    assert unit_field(arena, "hit_points", 1) == 0
    assert unit_field(arena, "heat", 0) == pytest.approx(10 - 5 * cooling("light"), rel=1e-4)


def test_direct_weapons_need_a_seen_target_and_projectiles_a_sensed_one() -> None:
    arena = make_pair("missile", 6)
    build(arena, (-26, -25), (-10, 10), Material.REINFORCED, height=6.0)
    assert contacts(arena, 0) == [1]  # by radar
    for name, does_fire in (("laser", False), ("missile", True), ("autocannon", True)):
        decide(arena, {0: {"fire": name, "target": 1}})
        assert has_fired(arena, 0) == does_fire, name


def test_units_do_not_fire_at_targets_they_do_not_sense() -> None:
    arena = make_pair("gauss", 15)
    build(arena, (-26, -25), (-10, 10), Material.REINFORCED, height=6.0)  # and the radar of a heavy does not reach that far
    assert contacts(arena, 0) == []
    actions = no_actions(arena.config)
    actions["fire"][0] = FIRE.index("gauss")
    arena.step(actions)
    assert not has_fired(arena, 0)


def test_a_unit_fires_nothing_that_it_does_not_own() -> None:
    arena = make_pair("gauss", 4)
    assert not fires(arena, "autocannon")
    assert fires(arena, "laser")
    assert not has_fired(arena, 1)


# What a shot does


@pytest.mark.parametrize("name", WEAPONS)
def test_a_shot_heats_the_unit_that_fires_and_a_loading_weapon_does_not(name: str) -> None:
    arena = make_pair(name, 4)
    heat = WEAPONS[name].heat - cooling(OWNER[name])
    tick(arena, {0: {"fire": name, "target": 1}})
    assert unit_field(arena, "heat", 0) == pytest.approx(heat)
    tick(arena, {0: {"fire": name, "target": 1}})  # it still loads
    assert unit_field(arena, "heat", 0) == pytest.approx(heat - cooling(OWNER[name]))


@pytest.mark.parametrize(("name", "legs", "painted"), [("laser", 0.0, 0), ("flamer", 2.0, 0), ("painter", 0.0, 100)])
def test_a_direct_weapon_strikes_only_its_target(name: str, legs: float, painted: int) -> None:
    unit, weapon = CLASSES[OWNER[name]], WEAPONS[name]
    arena = flat_arena(OWNER[name], OWNER[name])
    for index, y in ((0, 0.0), (1, 2.0), (2, 0.0), (3, 2.0)):
        place(arena, index, 0.0 if index < 2 else 4.0, y, heading=math.pi if index > 1 else 0.0)
        put(arena, index, heat=30.0, stability=50.0)
    tick(arena, {0: {"fire": name, "target": 2}})
    assert damage_by(arena, 0) == pytest.approx([0, 0, weapon.damage / unit.hit_points, 0])
    for index in range(4):
        is_hit = index == 2
        gained = weapon.heat if index == 0 else weapon.target_heat * is_hit
        assert unit_field(arena, "hit_points", index) == unit.hit_points - weapon.damage * is_hit
        assert unit_field(arena, "legs", index) == unit.leg_points - legs * is_hit
        assert unit_field(arena, "heat", index) == pytest.approx(30 + gained - cooling(OWNER[name]))
        assert unit_field(arena, "painted", index) == painted * is_hit
        assert unit_field(arena, "stability", index) == pytest.approx(51)  # it regains 1 in a tick
        assert unit_field(arena, "suppressed", index) == 0


@pytest.mark.parametrize("name", PROJECTILES)
def test_a_projectile_strikes_nothing_in_the_tick_in_which_it_is_fired(name: str) -> None:
    arena = make_pair(name, 4)
    put(arena, 1, stability=50.0)
    assert fires(arena, name)
    unit = CLASSES[OWNER[name]]
    fields = ("hit_points", "legs", "heat", "stability", "painted", "suppressed")
    assert [unit_field(arena, field, 1) for field in fields] == [unit.hit_points, unit.leg_points, 0, 51, 0, 0]


@pytest.mark.parametrize(("off_the_nose", "factor"), [(0, 1.0), (90, 1.0), (119, 1.0), (121, 1.5), (180, 1.5), (-119, 1.0), (-121, 1.5)])
@pytest.mark.parametrize("z", [0.0, 6.0])
def test_a_hit_from_behind_does_half_as_much_damage_again(off_the_nose: float, factor: float, z: float) -> None:
    arena = make_pair("laser", 2)
    place(arena, 0, X, 0, z)
    put(arena, 1, heading=math.pi - math.radians(off_the_nose))
    assert fires(arena, "laser")
    assert unit_field(arena, "hit_points", 1) == 60 - 14 * factor


# Launched projectiles


def shells(arena: Arena, unit: int = 0) -> list[tuple[list[float], list[float]]]:
    """Return position and velocity of the projectiles of a unit in the air."""
    shell, life = arena.simulation.state["shell"], arena.simulation.state["shell_count"][at.SHELL_LIFE, 0, unit]
    flying = [shell[:, 0, unit, slot].tolist() for slot in range(len(life)) if life[slot] > 0]
    return [(numbers[:3], numbers[3:]) for numbers in flying]


@pytest.mark.parametrize("name", PROJECTILES)
def test_a_projectile_leaves_the_muzzle_at_its_speed(name: str) -> None:
    arena = make_pair(name, 8)
    assert fires(arena, name)
    ((position, velocity),) = shells(arena)
    speed = WEAPONS[name].flight_mps
    # A ballistic projectile starts with half of the speed that gravity takes in its flight. It has flown for one tick.
    up = PHYSICS.gravity_mps2 * (0.5 * 8 / speed - TICK) if WEAPONS[name].is_ballistic else 0.0
    assert velocity == pytest.approx([speed, 0, up], abs=1e-4)
    assert position == pytest.approx([X + speed * TICK, 0, PHYSICS.muzzle_m + up * TICK], abs=1e-4)


@pytest.mark.parametrize("name", ["gauss", "autocannon", "smoke"])
@pytest.mark.parametrize("heading", [math.pi / 2, math.pi / 4, -2.0])
def test_only_ballistic_weapons_lead_a_moving_target(name: str, heading: float) -> None:
    arena = make_pair(name, 10)
    place(arena, 1, X + 10, 0, heading=heading)
    along = [2 * math.cos(heading), 2 * math.sin(heading)]
    put(arena, 1, velocity=[*along, 0.0])
    tick(arena, {0: {"fire": name, "target": 1}, 1: {"forward": 2 / CLASSES[OWNER[name]].max_speed_mps}})
    ((_, velocity),) = shells(arena)
    line = [10 + along[0] * TICK, along[1] * TICK]  # the target moves before the shot
    seconds = math.hypot(*line) / WEAPONS[name].flight_mps if name == "gauss" else 0.0
    aimed_at = [line[0] + along[0] * seconds, line[1] + along[1] * seconds]
    assert velocity[1] / velocity[0] == pytest.approx(aimed_at[1] / aimed_at[0], rel=1e-4)
    assert math.hypot(*velocity[:2]) == pytest.approx(WEAPONS[name].flight_mps, rel=1e-4)


@pytest.mark.slow
def test_every_unit_has_a_slot_for_each_projectile_it_can_have_in_the_air() -> None:
    """All units fire their projectiles as fast as they load, without heat. The projectiles hit nothing, so they fly for all their life."""
    arena = flat_arena(*CLASSES, size=64, contacts=4)
    for unit in range(4):
        place(arena, unit, -20, 6 * unit - 9)
        place(arena, 4 + unit, -11, 6 * unit - 9)
    kits = [sorted(set(spec.weapons) & set(PROJECTILES), key=lambda name: -WEAPONS[name].cooldown_s) for spec in CLASSES.values()]
    most = [0] * 4
    for _ in range(130):
        orders = {}
        for unit, kit in enumerate(kits):
            put(arena, unit, heat=0.0)
            ready = [name for name in kit if unit_field(arena, "cooldown", unit)[name] <= 1]
            if ready:
                orders[unit] = {"fire": ready[0], "target": 4 + unit}
        tick(arena, orders)
        assert all(has_fired(arena, unit) for unit in orders)
        most = [max(before, len(shells(arena, unit))) for unit, before in enumerate(most)]
        arena.simulation.state["shell"][at.SHELL_X : at.SHELL_Z + 1] = 11.0  # far from all units
    in_flight = {"missile": 2, "gauss": 1, "autocannon": 3, "smoke": 1}
    assert most == [sum(in_flight[name] for name in kit) for kit in kits]
    assert arena.overflow.tolist() == [0]


def test_a_shot_without_a_free_slot_is_lost_and_counted() -> None:
    arena = make_pair("missile", 4)
    for slot in range(arena.config.projectiles):
        put_shell(arena, 0, "autocannon", [20.0, 20.0, 8.0], [0.0, 0.0, 0.0], slot=slot, life=9)
    assert fires(arena, "missile")
    assert arena.overflow.tolist() == [1]
    assert set(arena.simulation.state["shell_count"][at.SHELL_LIFE, 0, 0].tolist()) == {8}
    assert not fires(arena, "missile")
    assert arena.overflow.tolist() == [1]


def test_weapons_are_numbered_in_the_order_of_the_table() -> None:
    assert [WEAPON[name] for name in WEAPONS] == list(range(len(WEAPONS)))


# Damage, and whose it is


def harm(arena: Arena) -> list[list[int]]:
    """Return for how many ticks damage counts as an assist, by attacker and victim."""
    found: list[list[int]] = arena.simulation.state["harm"][:, 0].tolist()
    return found


def hit(arena: Arena, attacker: int, victim: int, *weapons: str) -> None:
    """Let projectiles hit a unit from its front in the next tick. It looks along x."""
    x, y, z = unit_field(arena, "position", victim)
    for slot, name in enumerate(weapons):
        put_shell(arena, attacker, name, [x + 1.0, y, z + 1.2], [-WEAPONS[name].flight_mps, 0.0, 0.0], target=victim, slot=slot)


def test_damage_is_reported_as_a_share_of_the_full_hit_points_and_remembered_for_ten_seconds() -> None:
    arena = make_duel()
    put(arena, 1, hit_points=75.0)
    tick(arena, {0: {"fire": "laser", "target": 1}})
    assert unit_field(arena, "hit_points", 1) == 75 - 14
    assert [damage_by(arena, unit) for unit in (0, 1)] == [pytest.approx([0, 14 / 150]), [0, 0]]
    assert harm(arena) == [[0, 200], [0, 0]]
    tick(arena, times=199)
    assert harm(arena) == [[0, 1], [0, 0]]
    tick(arena, times=2)
    assert harm(arena) == [[0, 0], [0, 0]]
    assert damage_by(arena, 0) == [0, 0]


def test_damage_is_limited_to_the_hit_points_left_and_shared_among_attackers() -> None:
    arena = flat_arena("medium", "medium")
    place(arena, 2, 0, 0)
    put(arena, 2, hit_points=15.0)
    hit(arena, 0, 2, "autocannon", "autocannon")
    hit(arena, 1, 2, "autocannon")
    tick(arena)
    assert unit_field(arena, "hit_points", 2) == 0
    assert [damage_by(arena, unit)[2] for unit in range(4)] == pytest.approx([0.1 * 2 / 3, 0.1 / 3, 0, 0])


def test_hits_of_one_tick_add_up() -> None:
    arena = make_duel()
    place(arena, 1, 2.5, 0)
    place(arena, 0, 8.5, 0, heading=math.pi)
    put(arena, 1, stability=50.0)
    hit(arena, 0, 1, "autocannon", "autocannon", "missile")
    tick(arena, {0: {"fire": "laser", "target": 1}})
    assert damage_by(arena, 0) == pytest.approx([0, (14 + 8 + 8 + 40) / 150])
    assert unit_field(arena, "legs", 1) == 75 - 2 - 2
    assert unit_field(arena, "stability", 1) == pytest.approx(50 - 5 - 5 - 15 + 1)
    assert unit_field(arena, "heat", 1) == pytest.approx(6 - cooling("medium"))
    assert unit_field(arena, "suppressed", 1) == 24  # not twice as long


@pytest.mark.parametrize(("before", "after"), [(0, 24), (10, 24), (25, 24), (31, 30)])
def test_the_longer_of_two_suppressions_counts(before: int, after: int) -> None:
    arena = make_duel()
    place(arena, 1, 2.5, 0)
    put(arena, 1, suppressed=before)
    hit(arena, 0, 1, "autocannon")
    tick(arena)
    assert unit_field(arena, "suppressed", 1) == after


@pytest.mark.parametrize(("before", "after"), [(0, 100), (60, 100), (151, 150)])
def test_the_longer_of_two_paints_counts(before: int, after: int) -> None:
    arena = make_duel("scout")
    put(arena, 1, painted=before)
    tick(arena, {0: {"fire": "painter", "target": 1}})
    assert unit_field(arena, "painted", 1) == after


def test_legs_break_and_do_not_go_below_zero() -> None:
    arena = make_duel("heavy")
    place(arena, 1, 2.5, 0)
    put(arena, 1, legs=15.0)
    for left in (2.5, 0.0):
        hit(arena, 0, 1, "gauss")
        tick(arena)
        assert unit_field(arena, "legs", 1) == left
    assert unit_field(arena, "hit_points", 1) == 200 - 2 * 50


def test_dead_units_take_no_damage() -> None:
    arena = flat_arena("medium", "medium")
    for unit, hit_points in ((1, 0.0), (2, 150.0)):
        place(arena, unit, 0, 1.3 * unit)
        put(arena, unit, hit_points=hit_points, stability=50.0)
    hit(arena, 0, 2, "missile")  # its splash would shake the dead unit
    tick(arena)
    assert damage_by(arena, 0) == pytest.approx([0, 0, 40 / 150, 0])
    assert unit_field(arena, "stability", 1) == 50
    assert unit_field(arena, "stability", 2) == 36
    assert harm(arena)[0] == [0, 0, 200, 0]
