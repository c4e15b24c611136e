"""Actions: masks, orders read from actions, and refused actions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from esper.arena.arena import Arena, no_actions
from esper.arena.native import layout as at
from esper.arena.native.simulation import DECIDE_ONLY
from esper.arena.orders import FIRE, MOTION, MOTION_CHOICES, _motion_values, action_spec, as_motion
from esper.arena.specs import CLASSES, WEAPONS, Material
from tests.arena.views import masks
from tests.arena.worlds import WEAPON, assert_identical, build, flat_arena, make_actions, make_duel, place, put, saved, small_config, tick


@pytest.fixture
def duel() -> Arena:
    """Return a medium unit of each team, 6 m apart on open ground: all its weapons reach."""
    return make_duel(metres=6.0, y=0.5, heading=0.0)


def may_fire(arena: Arena, unit: int = 0) -> set[str]:
    """Return the weapons that a unit of the first battle may choose."""
    allowed = masks(arena)["fire"][unit]
    assert allowed[0], "not to fire is always allowed"
    return {name for name, is_allowed in zip(FIRE[1:], allowed[1:].tolist(), strict=True) if is_allowed}


def may_aim_at(arena: Arena, weapon: str, unit: int = 0) -> list[int]:
    """Return the contact slots that a weapon of a unit of the first battle may be aimed at."""
    slots: list[int] = torch.nonzero(masks(arena)["target"][unit, 1 + WEAPON[weapon]]).flatten().tolist()
    return slots


def fired(arena: Arena, orders: dict[int, dict[str, Any]]) -> list[int]:
    """Return the units of the first battle that fire in one tick with these orders."""
    tick(arena, orders)
    units: list[int] = torch.nonzero(arena.simulation.number[at.FIRED_ONCE, 0]).flatten().tolist()
    return units


# Masks


def test_the_weapons_of_the_class_may_be_fired_and_no_others(duel: Arena) -> None:
    assert may_fire(duel) == set(CLASSES["medium"].weapons)


def test_without_a_contact_nothing_may_be_fired(duel: Arena) -> None:
    put(duel, 1, hit_points=0.0)
    assert may_fire(duel) == set()
    assert may_aim_at(duel, "laser") == [0]  # one choice of an irrelevant head is allowed


@pytest.mark.parametrize(
    ("metres", "painted", "weapons"),
    [
        (7.9, 0, {"laser", "autocannon", "missile"}),
        (8.1, 0, {"autocannon", "missile"}),
        (11.9, 0, {"autocannon", "missile"}),
        (12.1, 0, set()),
        (12.1, 50, {"missile"}),  # paint lets missiles reach further
        (7.9, 50, {"laser", "autocannon", "missile"}),
    ],
)
def test_weapons_may_be_fired_up_to_their_range(duel: Arena, metres: float, painted: int, weapons: set[str]) -> None:
    place(duel, 1, metres - 3.0, 0.5)
    put(duel, 1, painted=painted)
    assert may_fire(duel) == weapons


def test_a_direct_weapon_is_masked_without_a_seen_target(duel: Arena) -> None:
    build(duel, (0, 1), (-3, 4), Material.REINFORCED, height=8.0)
    assert may_fire(duel) == {"autocannon", "missile"}  # on radar
    assert may_fire(duel, unit=1) == {"autocannon", "missile"}


@pytest.mark.parametrize("state", [{"is_shut_down": True}, {"fallen": 10}, {"hit_points": 0.0}])
def test_a_unit_that_cannot_act_may_fire_nothing(duel: Arena, state: dict[str, Any]) -> None:
    put(duel, 0, **state)
    assert may_fire(duel) == set()
    assert may_fire(duel, unit=1) == (set() if "hit_points" in state else set(CLASSES["medium"].weapons))


def test_a_weapon_that_loads_may_be_chosen(duel: Arena) -> None:
    """It may be loaded before the decision is over."""
    put(duel, 0, cooldown={"laser": 3})
    assert "laser" in may_fire(duel)


def test_targets_are_allowed_by_weapon() -> None:
    arena = flat_arena("medium", "medium", contacts=3, size=32)
    for unit, x in ((0, -6.0), (1, -6.0), (2, 4.0), (3, -2.0)):
        place(arena, unit, x, 0.5 if unit != 1 else 8.0)
    assert may_aim_at(arena, "laser") == [0]  # the nearer one
    assert may_aim_at(arena, "missile") == [0, 1]
    assert masks(arena)["target"][0, 0].tolist() == [True, False, False]  # without fire


def test_a_seen_target_behind_a_hidden_one_is_allowed() -> None:
    arena = flat_arena("medium", "medium", contacts=3, size=32)
    for unit, (x, y) in enumerate(((-6.0, 0.5), (-6.0, 9.0), (-2.0, 0.5), (-6.0, 7.5))):
        place(arena, unit, x, y)
    build(arena, (-4, -3), (0, 1), Material.REINFORCED, height=8.0)
    assert may_aim_at(arena, "laser") == [1]
    assert may_aim_at(arena, "autocannon") == [0, 1]


@pytest.mark.parametrize("settings", [{}, {"battles": 2, "contacts": 1}, {"smallest_team": 1, "contacts": 4}])
def test_every_row_of_a_mask_allows_something(settings: dict[str, Any]) -> None:
    arena = flat_arena("scout", "heavy", size=48, **settings)
    put(arena, 1, hit_points=0.0)
    assert all(mask.any(-1).all() for mask in masks(arena).values())


def test_masks_have_a_row_for_each_unit_of_each_battle() -> None:
    arena = flat_arena("medium", "scout", battles=3, contacts=2)
    assert {name: (tuple(mask.shape), mask.dtype) for name, mask in masks(arena).items()} == {
        "fire": ((12, len(FIRE)), torch.bool),
        "target": ((12, len(FIRE), 2), torch.bool),
        "vent": ((12, 2), torch.bool),
    }


@pytest.mark.parametrize(
    ("state", "may_vent"),
    [({}, False), ({"heat": 1.0}, True), ({"heat": 1.0, "hit_points": 0.0}, False), ({"heat": 1.0, "is_shut_down": True}, False)],
)
def test_only_living_warm_units_may_vent(duel: Arena, state: dict[str, Any], may_vent: bool) -> None:
    put(duel, 0, **state)
    assert masks(duel)["vent"].tolist() == [[True, may_vent], [True, False]]


# Orders


def test_orders_are_the_choices_of_the_actions(duel: Arena) -> None:
    tick(
        duel,
        {0: {"forward": 0.5, "strafe": -0.25, "yaw": 1.0, "jets": -1.0, "fire": "laser", "target": 1, "vent": True}},
        times=0,
    )
    unit, number = duel.simulation.unit, duel.simulation.number
    assert unit[at.FORWARD : at.JETS + 1, 0].T.tolist() == [[0.5, -0.25, 1.0, -1.0], [0.0] * 4]
    assert number[[at.WEAPON, at.TARGET, at.VENT_ORDER], 0, 0].tolist() == [WEAPON["laser"], 1, 1]
    assert number[[at.TARGET, at.VENT_ORDER], 0, 1].tolist() == [-1, 0]


@pytest.mark.parametrize("weapon", WEAPONS)
def test_a_unit_fires_only_weapons_of_its_class(duel: Arena, weapon: str) -> None:
    place(duel, 1, 1.0, 0.5)  # where all weapons reach
    assert fired(duel, {0: {"fire": weapon, "target": 1}}) == ([0] if weapon in CLASSES["medium"].weapons else [])


def test_an_empty_slot_is_not_fired_at(duel: Arena) -> None:
    actions = make_actions(duel, {0: {"fire": "missile", "target": 1}})
    for slot, fires in ((1, 0), (0, 1)):  # there is one enemy, and it is in slot 0
        actions["target"][0] = slot
        duel._order(actions)
        duel.simulation.run(DECIDE_ONLY)
        assert duel.simulation.number[at.FIRED_ONCE, 0].tolist() == [fires, 0]


def test_dead_units_give_no_orders(duel: Arena) -> None:
    actions = make_actions(duel, {0: {"fire": "laser", "target": 1, "vent": True, "forward": 1.0}})
    put(duel, 0, hit_points=0.0, heat=50.0)
    duel.look()
    before = duel.simulation.unit[at.X : at.Z + 1, 0, 0].tolist()
    duel._order(actions)
    duel.simulation.run(DECIDE_ONLY)
    assert duel.simulation.number[[at.FIRED_ONCE, at.VENT_ORDER, at.IS_VENTING], 0, 0].tolist() == [0, 0, 0]
    assert duel.simulation.unit[at.X : at.Z + 1, 0, 0].tolist() == before


@pytest.mark.parametrize(("weapon", "fires"), [("laser", False), ("missile", True), ("autocannon", True)])
def test_only_a_laser_is_not_fired_at_a_target_behind_a_wall(duel: Arena, weapon: str, fires: bool) -> None:
    build(duel, (0, 1), (-3, 4), Material.REINFORCED, height=8.0)
    assert fired(duel, {0: {"fire": weapon, "target": 1}}) == ([0] if fires else [])


@pytest.mark.parametrize("weapon", CLASSES["medium"].weapons)
def test_allowed_actions_are_carried_out(duel: Arena, weapon: str) -> None:
    assert weapon in may_fire(duel)
    assert fired(duel, {0: {"fire": weapon, "target": 1}}) == [0]


def test_units_of_the_second_team_aim_at_their_own_contacts() -> None:
    arena = flat_arena("medium", "medium")
    for unit, x in enumerate((-6.0, -3.0, 3.0, 8.0)):
        place(arena, unit, x, 0.5, heading=0.0 if unit < 2 else torch.pi)
    tick(arena, {2: {"fire": "laser", "target": 1}, 1: {"fire": "laser", "target": 2}}, times=0)
    assert arena.simulation.number[at.TARGET, 0].tolist() == [-1, 2, 1, -1]


def test_a_target_matters_only_when_a_unit_fires() -> None:
    rule = action_spec(small_config()).relevance[0]
    assert (rule.head, rule.given) == ("target", "fire")
    assert [FIRE[choice] for choice in rule.choices] == list(WEAPONS)


# Motion in a few choices


def test_discrete_heads_of_motion_have_a_choice_for_each_value() -> None:
    heads = {head.name: head.size for head in action_spec(small_config(), is_categorical=True).discrete}
    assert {name: heads[name] for name in MOTION} == {name: len(values) for name, values in MOTION_CHOICES.items()}
    assert list(MOTION_CHOICES) == list(MOTION)
    assert [head.name for head in action_spec(small_config(), is_categorical=True).heads] == ["fire", "target", "vent", *MOTION]


def test_choices_of_motion_are_translated_into_their_values_and_other_heads_are_kept() -> None:
    rows = max(map(len, MOTION_CHOICES.values()))
    chosen = {name: torch.arange(rows) % len(values) for name, values in MOTION_CHOICES.items()}
    fire = torch.arange(rows)
    actions = as_motion({"fire": fire, **chosen})
    assert actions.keys() == {"fire", "motion"}
    assert torch.equal(actions["fire"], fire)
    assert actions["motion"].dtype == torch.float32
    expected = [[values[row % len(values)] for values in MOTION_CHOICES.values()] for row in range(rows)]
    assert actions["motion"].tolist() == [pytest.approx(row) for row in expected]
    assert actions["motion"].abs().max() == 1.0
    assert as_motion(actions) is actions  # motion is already there


def test_a_first_translation_in_inference_mode_leaves_values_that_can_be_used_outside_of_it() -> None:
    _motion_values.cache_clear()
    chosen = {name: torch.zeros(3, dtype=torch.int64) for name in MOTION}
    with torch.inference_mode():
        as_motion(chosen)
    assert as_motion(chosen)["motion"].add_(1.0).tolist() == [[0.0] * 4] * 3
    assert not _motion_values(torch.device("cpu")).is_inference()


@pytest.mark.parametrize(("name", "choice", "value"), [("forward", 0, -1.0), ("forward", 2, 1.0), ("yaw", 1, -0.3), ("jets", 1, 1.0)])
def test_a_translated_choice_is_the_order_of_the_unit(duel: Arena, name: str, choice: int, value: float) -> None:
    still = {"forward": 1, "strafe": 1, "yaw": 2, "jets": 0}
    chosen = {head: torch.tensor([still[head], choice if head == name else still[head]]) for head in MOTION}
    nothing = {head: order for head, order in no_actions(duel.config).items() if head != "motion"}
    duel.step(as_motion({**nothing, **chosen}))
    orders = duel.simulation.unit[at.FORWARD : at.JETS + 1, 0].T.tolist()
    expected = [0.0, 0.0, 0.0, -1.0]
    assert orders[0] == expected
    expected[MOTION.index(name)] = value
    assert orders[1] == pytest.approx(expected)


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
def test_a_wrong_action_is_refused_and_changes_nothing(change: dict[str, Tensor], message: str) -> None:
    arena = flat_arena("medium", battles=2)
    before, orders = saved(arena), {name: value.clone() for name, value in arena.simulation.actions.items()}
    with pytest.raises(ValueError, match=message):
        arena.step({**no_actions(arena.config), **change})
    assert_identical(saved(arena), before)
    assert_identical(arena.simulation.actions, orders)


def test_a_missing_head_is_named() -> None:
    arena = flat_arena("medium")
    actions = no_actions(arena.config)
    del actions["vent"]
    with pytest.raises(ValueError, match=r"has the heads .*'vent'.*; got \['fire', 'motion', 'target'\]"):
        arena.step(actions)


def test_the_ends_of_the_motion_range_are_allowed() -> None:
    arena = flat_arena("medium")
    arena.step({**no_actions(arena.config), "motion": torch.tensor([[1.0] * len(MOTION), [-1.0] * len(MOTION)])})
    assert arena.simulation.unit[at.FORWARD : at.JETS + 1, 0].T.tolist() == [[1.0] * 4, [-1.0] * 4]
