"""Actions: masks, orders read from actions, and refused actions."""

from __future__ import annotations

import pytest
import torch

from esper.arena.arena import Arena, no_actions
from esper.arena.orders import FIRE, MOTION, action_spec, read_orders
from esper.arena.specs import CLASSES, WEAPONS, Material
from esper.arena.state import state_hash
from tests.arena.views import look
from tests.arena.worlds import WEAPON, build, flat_arena, make_actions, make_duel, place, put, small_config


@pytest.fixture
def duel() -> Arena:
    """A medium unit of each team, 6 m apart on open ground: all its weapons reach."""
    return make_duel(metres=6.0, y=0.5, heading=0.0)


def may_fire(arena, unit=0):
    """The weapons that a unit of the first battle may choose."""
    allowed = look(arena).masks["fire"][unit]
    assert allowed[0], "not to fire is always allowed"
    return {name for name, is_allowed in zip(FIRE[1:], allowed[1:].tolist(), strict=True) if is_allowed}


def may_aim_at(arena, weapon, unit=0):
    """The contact slots that a weapon of a unit of the first battle may be aimed at."""
    return torch.nonzero(look(arena).masks["target"][unit, 1 + WEAPON[weapon]]).flatten().tolist()


def orders_from_actions(arena, orders):
    """Orders as the phases get them."""
    look(arena)
    return read_orders(make_actions(arena, orders), arena.state.senses, arena.state.units, arena.tables, battles=arena.config.battles)


# Masks


def test_the_weapons_of_the_class_may_be_fired_and_no_others(duel):
    assert may_fire(duel) == set(CLASSES["medium"].weapons)


def test_without_a_contact_nothing_may_be_fired(duel):
    put(duel, 1, hit_points=0.0)
    assert may_fire(duel) == set()
    assert may_aim_at(duel, "laser") == [0]  # does not matter, and still something is allowed


def test_a_weapon_out_of_range_is_masked(duel):
    place(duel, 1, 6.5, 0.5)  # 9.5 m away: the laser reaches 8
    assert may_fire(duel) == {"autocannon", "missile"}
    place(duel, 1, 9.5, 0.5)
    assert may_fire(duel) == set()


def test_paint_lets_missiles_reach_further(duel):
    place(duel, 1, 10.5, 0.5)
    put(duel, 1, painted=50)
    assert may_fire(duel) == {"missile"}


def test_a_direct_weapon_is_masked_without_a_seen_target(duel):
    build(duel, (0, 1), (-3, 4), Material.REINFORCED, height=8.0)
    assert not look(duel).masks["fire"][0, 1 + WEAPON["laser"]]
    assert may_fire(duel) == {"autocannon", "missile"}  # on radar


@pytest.mark.parametrize("state", [{"is_shut_down": True}, {"fallen": 10}, {"hit_points": 0.0}])
def test_a_unit_that_cannot_act_may_fire_nothing(duel, state):
    put(duel, 0, **state)
    assert may_fire(duel) == set()
    assert may_fire(duel, unit=1) == (set() if "hit_points" in state else set(CLASSES["medium"].weapons))


def test_targets_are_allowed_by_weapon():
    arena = flat_arena("medium", "medium", contacts=3, size=32)
    for unit, x in ((0, -6.0), (1, -6.0), (2, 4.0), (3, -2.0)):
        place(arena, unit, x, 0.5 if unit != 1 else 8.0)
    assert may_aim_at(arena, "laser") == [0]  # the nearer one
    assert may_aim_at(arena, "missile") == [0, 1]


def test_every_row_of_a_mask_allows_something(duel):
    for masks in (look(duel).masks, look(flat_arena("scout", "heavy", size=48)).masks):
        assert all(mask.any(-1).all() for mask in masks.values())


def test_only_living_warm_units_may_vent(duel):
    assert look(duel).masks["vent"].tolist() == [[True, False], [True, False]]
    put(duel, 0, heat=1.0)
    assert look(duel).masks["vent"].tolist() == [[True, True], [True, False]]
    put(duel, 0, hit_points=0.0)
    assert look(duel).masks["vent"].tolist() == [[True, False], [True, False]]


# Orders


def test_orders_are_what_was_chosen(duel):
    orders = orders_from_actions(
        duel, {0: {"forward": 0.5, "strafe": -0.25, "yaw": 1.0, "jets": -1.0, "fire": "laser", "target": 1, "vent": True}}
    )
    assert orders.motion[0, 0].tolist() == [0.5, -0.25, 1.0, -1.0]
    assert (int(orders.weapon[0, 0]), int(orders.target[0, 0])) == (WEAPON["laser"], 1)
    assert orders.is_firing[0].tolist() == [True, False]
    assert orders.is_venting[0].tolist() == [True, False]


def test_a_unit_without_the_weapon_fires_nothing(duel):
    assert not orders_from_actions(duel, {0: {"fire": "gauss", "target": 1}}).is_firing.any()


def test_an_empty_slot_is_not_fired_at(duel):
    look(duel)
    actions = make_actions(duel, {0: {"fire": "missile", "target": 1}})
    actions["target"][0] = 1  # there is one enemy, and it is in slot 0
    orders = read_orders(actions, duel.state.senses, duel.state.units, duel.tables, battles=1)
    assert not orders.is_firing.any()


def test_dead_units_give_no_orders(duel):
    look(duel)
    actions = make_actions(duel, {0: {"fire": "laser", "target": 1, "vent": True, "forward": 1.0}})
    put(duel, 0, hit_points=0.0)
    look(duel)
    orders = read_orders(actions, duel.state.senses, duel.state.units, duel.tables, battles=1)
    assert not orders.is_firing.any()
    assert not orders.is_venting.any()


def test_a_laser_through_a_wall_is_not_fired(duel):
    build(duel, (0, 1), (-3, 4), Material.REINFORCED, height=8.0)
    assert not orders_from_actions(duel, {0: {"fire": "laser", "target": 1}}).is_firing.any()
    assert orders_from_actions(duel, {0: {"fire": "missile", "target": 1}}).is_firing[0, 0]


def test_allowed_actions_are_carried_out(duel):
    for weapon in may_fire(duel):
        assert orders_from_actions(duel, {0: {"fire": weapon, "target": 1}}).is_firing[0, 0]


def test_a_target_matters_only_when_a_unit_fires():
    rule = action_spec(small_config()).relevance[0]
    assert (rule.head, rule.given) == ("target", "fire")
    assert [FIRE[choice] for choice in rule.choices] == list(WEAPONS)


# Wrong actions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fire": torch.zeros(3, dtype=torch.int64)}, r"'fire' should have shape \(4,\).*2 units in 2 battles; got \(3,\)"),
        ({"motion": torch.zeros(4, 3)}, r"'motion' should have shape \(4, 4\)"),
        ({"motion": torch.zeros(4, 4, dtype=torch.float64)}, r"'motion' should be of type torch.float32; got torch.float64: convert"),
        ({"vent": torch.zeros(4)}, r"'vent' should be of type torch.int64"),
        ({"jump": torch.zeros(4)}, r"has the heads \['fire', 'motion', 'target', 'vent'\]; got .*'jump'"),
        ({"fire": torch.tensor([0, 0, 0, 8])}, r"battle 1, unit 1 \(medium of team 1\): fire is 8, but must be from 0 to 7"),
        ({"target": torch.tensor([0, -1, 0, 0])}, r"battle 0, unit 1 \(medium of team 1\): target is -1"),
        ({"vent": torch.tensor([0, 0, 2, 0])}, r"battle 1, unit 0 \(medium of team 0\): vent is 2"),
        ({"motion": torch.full((4, 4), torch.nan)}, r"battle 0, unit 0 \(medium of team 0\): motion is .nan.*from -1 to 1"),
        ({"motion": torch.full((4, 4), 1.01)}, r"battle 0, unit 0 .*clamp it"),
    ],
)
def test_a_wrong_action_is_refused_and_changes_nothing(change, message):
    arena = flat_arena("medium", battles=2)
    before = [state_hash(arena.state, battle) for battle in range(2)]
    with pytest.raises(ValueError, match=message):
        arena.step({**no_actions(arena.config), **change})
    assert [state_hash(arena.state, battle) for battle in range(2)] == before


def test_a_missing_head_is_named():
    arena = flat_arena("medium")
    actions = no_actions(arena.config)
    del actions["vent"]
    with pytest.raises(ValueError, match=r"has the heads .*'vent'.*; got \['fire', 'motion', 'target'\]"):
        arena.step(actions)


def test_the_ends_of_the_motion_range_are_allowed():
    arena = flat_arena("medium")
    arena.step({**no_actions(arena.config), "motion": torch.tensor([[1.0] * len(MOTION), [-1.0] * len(MOTION)])})
