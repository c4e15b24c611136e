"""Weapons: when they fire, what they hit at once, and the projectiles they launch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.arena.arena import Arena, no_actions
from esper.arena.damage import Hits
from esper.arena.fire import Shots, hit_at_once, launch, pull_triggers, take_aim
from esper.arena.orders import FIRE
from esper.arena.specs import CLASSES, PHYSICS, WEAPONS, Material
from esper.arena.upkeep import count_down
from tests.arena.worlds import WEAPON, build, flat_arena, make_actions, make_orders, place, put, unit_field

OWNER = {name: next(unit for unit, spec in CLASSES.items() if name in spec.weapons) for name in WEAPONS}


def facing_each_other(name: str, metres: float, *, bearing_deg: float = 0.0) -> Arena:
    """Unit 0 owns the weapon and looks along x; unit 1 stands so far away, so many degrees to its left."""
    arena = flat_arena(OWNER[name], size=128)
    angle = math.radians(bearing_deg)
    place(arena, 0, -30, 0)
    place(arena, 1, -30 + metres * math.cos(angle), metres * math.sin(angle), heading=math.pi)
    return arena


def fire_once(arena: Arena, name: str, **order: Any) -> Shots:
    """One tick's triggers; the state has what firing did to who fired."""
    orders = make_orders(arena, {0: {"fire": name, "target": 1, **order}})
    units, shots = pull_triggers(arena.state.units, take_aim(orders, arena.state.units, arena.tables))
    arena.state = arena.state._replace(units=units)
    return shots


def fires(arena: Arena, name: str, **order: Any) -> bool:
    before = arena.state
    fired = bool(fire_once(arena, name, **order).fired[0, 0])
    arena.state = before
    return fired


def hit_directly(arena: Arena, name: str) -> Hits:
    aim = take_aim(make_orders(arena, {0: {"fire": name, "target": 1}}), arena.state.units, arena.tables)
    units, shots = pull_triggers(arena.state.units, aim)
    return hit_at_once(units, aim, shots)


def launched(arena: Arena, name: str) -> tuple[Tensor, Tensor]:
    """Where the projectile of unit 0 is and how fast, right after it left the muzzle."""
    aim = take_aim(make_orders(arena, {0: {"fire": name, "target": 1}}), arena.state.units, arena.tables)
    units, shots = pull_triggers(arena.state.units, aim)
    shells, overflow = launch(units, arena.state.shells, aim, shots)
    assert not overflow.any()
    assert (shells.life > 0).sum() == 1
    return shells.position[0, 0, 0], shells.velocity[0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "every"), [("laser", 12), ("flamer", 3), ("missile", 60), ("gauss", 80), ("autocannon", 4), ("painter", 20), ("smoke", 100)]
)
def test_a_weapon_fires_again_exactly_after_its_cooldown(name: str, every: int) -> None:
    arena = facing_each_other(name, 4)
    fired = []
    shots = 3 if every <= 20 else 2
    for tick in range((shots - 1) * every + 1):
        put(arena, 0, heat=0.0)
        units = count_down(arena.state.units, make_orders(arena))
        arena.state = arena.state._replace(units=units)
        if bool(fire_once(arena, name).fired[0, 0]):
            fired.append(tick)
    assert fired == [0, every, 2 * every][:shots]


def test_a_loading_weapon_does_not_keep_the_others_from_firing() -> None:
    arena = facing_each_other("missile", 4)
    assert fire_once(arena, "missile").fired[0, 0]
    assert not fires(arena, "missile")
    assert fires(arena, "laser")


@pytest.mark.parametrize("name", WEAPONS)
def test_a_weapon_reaches_as_far_as_its_range(name: str) -> None:
    reach = WEAPONS[name].range_m
    assert fires(facing_each_other(name, reach - 0.01), name)
    assert not fires(facing_each_other(name, reach + 0.01), name)


def test_height_counts_in_the_distance() -> None:
    arena = facing_each_other("laser", 6)
    place(arena, 1, -24, 0, 5.0)
    assert fires(arena, "laser")  # 7.8 m
    place(arena, 1, -24, 0, 6.0)
    assert not fires(arena, "laser")  # 8.5 m


@pytest.mark.parametrize("name", WEAPONS)
@pytest.mark.parametrize("side", [-1, 1])
def test_a_weapon_fires_within_its_arc_alone(name: str, side: int) -> None:
    half = WEAPONS[name].arc_deg / 2
    assert fires(facing_each_other(name, 4, bearing_deg=side * (half - 0.5)), name)
    assert not fires(facing_each_other(name, 4, bearing_deg=side * (half + 0.5)), name)


def test_a_missile_reaches_a_painted_target_much_further() -> None:
    arena = facing_each_other("missile", 49.9)
    assert not fires(arena, "missile")
    put(arena, 1, painted=1)
    assert fires(arena, "missile")
    place(arena, 1, 20.1, 0)
    assert not fires(arena, "missile")


@pytest.mark.parametrize("name", [name for name, weapon in WEAPONS.items() if not weapon.painted_range_m])
def test_paint_makes_no_other_weapon_reach_further(name: str) -> None:
    arena = facing_each_other(name, WEAPONS[name].range_m + 0.1)
    put(arena, 1, painted=100)
    assert not fires(arena, name)


@pytest.mark.parametrize("values", [{"fallen": 1}, {"is_shut_down": True}, {"is_venting": True}, {"hit_points": 0.0}])
def test_a_unit_that_lies_is_shut_down_vents_or_is_dead_does_not_fire(values: dict[str, Any]) -> None:
    arena = facing_each_other("laser", 4)
    assert fires(arena, "laser")
    put(arena, 0, **values)
    assert not fires(arena, "laser")


def test_dead_units_are_not_fired_at() -> None:
    arena = facing_each_other("laser", 4)
    put(arena, 1, hit_points=0.0)
    assert not fires(arena, "laser")


@pytest.mark.parametrize("name", WEAPONS)
def test_a_shot_heats_the_shooter_and_a_loading_weapon_does_not(name: str) -> None:
    arena = facing_each_other(name, 4)
    fire_once(arena, name)
    assert unit_field(arena, "heat", 0) == WEAPONS[name].heat
    fire_once(arena, name)  # it still loads
    assert unit_field(arena, "heat", 0) == WEAPONS[name].heat


@pytest.mark.parametrize(("name", "legs"), [("laser", 0.0), ("flamer", 2.0), ("painter", 0.0)])
def test_a_direct_weapon_hurts_and_heats_only_its_target(name: str, legs: float) -> None:
    arena = facing_each_other(name, 4)
    hits = hit_directly(arena, name)
    weapon = WEAPONS[name]
    assert hits.damage[0].tolist() == [[0, weapon.damage], [0, 0]]
    assert hits.heat[0].tolist() == [0, weapon.target_heat]
    assert hits.legs[0].tolist() == [0, legs]
    assert hits.painted[0].tolist() == [0, 100 if name == "painter" else 0]
    assert hits.stability[0].tolist() == [0, 0]


@pytest.mark.parametrize("name", [name for name, weapon in WEAPONS.items() if weapon.flight_mps])
def test_a_projectile_hits_nothing_in_the_tick_in_which_it_is_fired(name: str) -> None:
    hits = hit_directly(facing_each_other(name, 4), name)
    assert all(not part.any() for part in hits)


@pytest.mark.parametrize(("off_the_nose", "factor"), [(0, 1.0), (90, 1.0), (119, 1.0), (121, 1.5), (180, 1.5), (-119, 1.0), (-121, 1.5)])
def test_a_hit_from_behind_hurts_half_as_much_again(off_the_nose: float, factor: float) -> None:
    arena = facing_each_other("laser", 4)
    put(arena, 1, heading=math.remainder(math.pi - math.radians(off_the_nose), 2 * math.pi))
    assert float(hit_directly(arena, "laser").damage[0, 0, 1]) == pytest.approx(14 * factor)


def test_a_hit_from_behind_and_above_counts_as_one_from_behind() -> None:
    arena = facing_each_other("laser", 2)
    place(arena, 0, -30, 0, 6.0)
    put(arena, 1, heading=0.0)
    assert float(hit_directly(arena, "laser").damage[0, 0, 1]) == pytest.approx(14 * 1.5)


@pytest.mark.parametrize("name", ["missile", "gauss", "autocannon", "smoke"])
def test_a_projectile_leaves_the_muzzle_at_its_speed(name: str) -> None:
    arena = facing_each_other(name, 8)
    position, velocity = launched(arena, name)
    assert position.tolist() == pytest.approx([-30, 0, PHYSICS.muzzle_m])
    assert velocity[:2].tolist() == pytest.approx([WEAPONS[name].flight_mps, 0], abs=1e-4)
    assert (float(velocity[2]) > 0) == WEAPONS[name].is_ballistic


def test_only_ballistic_weapons_lead_a_moving_target() -> None:
    for name in ("gauss", "autocannon"):
        arena = facing_each_other(name, 10)
        put(arena, 1, velocity=[0.0, 2.0, 0.0])
        _, velocity = launched(arena, name)
        assert (float(velocity[1]) > 0) == (name == "gauss")
        flight_s = 10 / WEAPONS[name].flight_mps
        lead = 2.0 * flight_s if name == "gauss" else 0.0
        assert float(velocity[1] / velocity[0]) == pytest.approx(lead / 10, rel=1e-3)


@pytest.mark.slow
def test_direct_weapons_need_a_seen_target_and_projectiles_a_sensed_one() -> None:
    arena = facing_each_other("missile", 6)
    build(arena, (-28, -27), (-10, 10), Material.REINFORCED, height=6.0)
    arena.state = arena._sensed(arena.state)
    senses = arena.state.senses
    assert bool(senses.sensed[0, 0, 1])
    assert not bool(senses.seen[0, 0, 1])
    for name, does_fire in (("laser", False), ("missile", True), ("autocannon", True)):
        result = arena.step(make_actions(arena, {0: {"fire": name, "target": 1}}))
        assert result.step_events is not None
        assert bool(result.step_events.fired[0, 0]) == does_fire, name


def test_units_do_not_fire_at_targets_they_do_not_sense() -> None:
    arena = facing_each_other("gauss", 15)
    build(arena, (-28, -27), (-10, 10), Material.REINFORCED, height=6.0)  # and a heavy's radar does not reach that far
    arena.state = arena._sensed(arena.state)
    assert not arena.state.senses.is_contact.any()
    actions = no_actions(arena.config)
    actions["fire"][0] = FIRE.index("gauss")
    result = arena.step(actions)
    assert result.step_events is not None
    assert not result.step_events.fired.any()


def test_a_unit_fires_nothing_that_it_does_not_own() -> None:
    arena = facing_each_other("gauss", 4)
    arena.state = arena._sensed(arena.state)
    result = arena.step(make_actions(arena, {0: {"fire": "autocannon", "target": 1}}))
    assert result.step_events is not None
    assert not result.step_events.fired.any()
    result = arena.step(make_actions(arena, {0: {"fire": "laser", "target": 1}}))
    assert result.step_events is not None
    assert result.step_events.fired[0].tolist() == [True, False]


@pytest.mark.parametrize("ticks", [130, pytest.param(1200, marks=pytest.mark.slow)])
def test_every_unit_has_a_shell_slot_for_each_shot_it_can_have_in_the_air(ticks: int) -> None:
    """All weapons as fast as they load, without heat, and nothing is ever met: every projectile flies for all of its time."""
    arena = flat_arena(*CLASSES, size=128)
    units, shells, tables = arena.state.units, arena.state.shells, arena.tables
    units = units._replace(position=units.position * 0.01, painted=units.painted + 10_000)
    kits = [spec.weapons for spec in CLASSES.values()]
    choices = [make_orders(arena, {unit: {"fire": kit[which], "target": 4 + unit} for unit, kit in enumerate(kits)}) for which in range(3)]
    aims = [take_aim(orders, units, tables) for orders in choices]
    most = torch.zeros(4)
    for _ in range(ticks):
        units = count_down(units, choices[0])._replace(heat=torch.zeros_like(units.heat))
        for aim in aims:
            units, shots = pull_triggers(units, aim)
            shells, overflow = launch(units, shells, aim, shots)
            assert not overflow.any()
        most = torch.maximum(most, (shells.life[0, :4] > 0).sum(1))
        shells = shells._replace(life=(shells.life - 1).clamp_min(0))
    in_flight = {"missile": 2, "gauss": 1, "autocannon": 3, "smoke": 1}
    assert most.tolist() == [sum(in_flight.get(name, 0) for name in kit) for kit in kits]


def test_a_shot_without_a_free_slot_is_counted() -> None:
    arena = facing_each_other("missile", 4)
    full = arena.state.shells._replace(life=torch.ones_like(arena.state.shells.life))
    aim = take_aim(make_orders(arena, {0: {"fire": "missile", "target": 1}}), arena.state.units, arena.tables)
    units, shots = pull_triggers(arena.state.units, aim)
    shells, overflow = launch(units, full, aim, shots)
    assert overflow[0].tolist() == [True, False]
    assert torch.equal(shells.life, full.life)


def test_the_weapons_are_numbered_as_the_table_lists_them() -> None:
    assert [WEAPON[name] for name in WEAPONS] == list(range(len(WEAPONS)))
