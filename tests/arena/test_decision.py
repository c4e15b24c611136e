"""Whole decisions of five ticks: effects of several phases together, fairness, and independence of battles."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from esper.arena.arena import Arena
from esper.arena.config import BOTS
from esper.arena.native import layout as at
from esper.arena.native.simulation import DECIDE_ONLY, Saved
from esper.arena.specs import CLASSES, PHYSICS, WEAPONS, Material
from tests.arena.worlds import (
    assert_identical,
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
    saved,
    score,
    select_battles,
    small_config,
    tick,
    unit_field,
)

DECISION_TICKS = PHYSICS.ticks_per_decision


def run(arena: Arena, orders: dict[int, dict[str, Any]] | None = None, times: int = 1) -> None:
    """Run decisions. A battle that ends is kept as it is."""
    for _ in range(times):
        tick(arena, orders, times=DECISION_TICKS)


def is_seen(arena: Arena) -> bool:
    """Return whether unit 0 sees the first enemy now."""
    contacts(arena, 0)
    return bool(arena.simulation.number[at.SEEN, 0, 0] & 1)


def test_a_decision_is_a_quarter_of_a_second() -> None:
    arena = flat_arena()
    place(arena, 0, -4, 0)
    put(arena, 0, velocity=[5.5, 0.0, 0.0])
    result = decide(arena, {0: {"forward": 1.0}})
    assert unit_field(arena, "position", 0)[0] == pytest.approx(-4 + 5.5 * 0.25, abs=1e-4)
    assert result.last[0].tolist() == pytest.approx([1, 0.25, 0, 1, 1])  # unit 0 is in the zone from the first tick on
    assert score(arena) == [5, 0]


# Heat and fire


def test_a_laser_fired_for_a_second_and_a_quarter_strikes_three_times() -> None:
    arena = make_duel()
    for _ in range(5):
        put(arena, 0, heat=0.0)
        run(arena, {0: {"fire": "laser", "target": 1}})
    assert unit_field(arena, "hit_points", 1) == 150 - 3 * 14


def test_an_autocannon_fires_in_the_first_and_the_fifth_tick() -> None:
    arena = make_duel(metres=9.0)
    run(arena, {0: {"fire": "autocannon", "target": 1}})
    assert unit_field(arena, "heat", 0) == pytest.approx(2 * 6 - 11 * 0.25, abs=1e-3)


def test_a_shot_heats_both_units_and_cooling_follows_in_the_same_tick() -> None:
    arena = make_duel()
    run(arena, {0: {"fire": "laser", "target": 1}})
    assert [has_fired(arena, unit) for unit in (0, 1)] == [True, False]
    assert damage_by(arena, 0) == pytest.approx([0, 14 / 150])
    assert unit_field(arena, "heat", 0) == pytest.approx(22 - 11 * 0.25, abs=1e-3)
    assert unit_field(arena, "heat", 1) == pytest.approx(6 - 11 * 0.25, abs=1e-3)


def test_two_units_can_kill_each_other_in_one_tick() -> None:
    arena = make_duel()
    for unit in (0, 1):
        put(arena, unit, hit_points=10.0)
    result = tick(arena, {0: {"fire": "laser", "target": 1}, 1: {"fire": "laser", "target": 0}})
    assert not arena.is_alive.any()
    assert arena.simulation.number[at.KILLER, 0].tolist() == [1, 0]
    assert (result.ended.tolist(), result.winner.tolist()) == ([True], [-1])


def test_a_unit_that_dies_in_a_tick_does_nothing_in_the_next() -> None:
    arena = make_duel()
    put(arena, 1, hit_points=10.0)
    orders = {0: {"fire": "laser", "target": 1}, 1: {"fire": "autocannon", "target": 0, "forward": 1.0}}
    tick(arena, orders, times=20)
    assert unit_field(arena, "hit_points", 1) == 0
    # It fired in the first tick only, although its weapon was loaded again after 4 ticks, and it came to a stop.
    assert unit_field(arena, "hit_points", 0) == 150 - 8
    assert unit_field(arena, "cooldown", 1)["autocannon"] == 0
    assert unit_field(arena, "velocity", 1) == pytest.approx([0, 0, 0], abs=1e-6)
    assert unit_field(arena, "position", 1)[0] == pytest.approx(2.5 - 0.05 * 0.55, abs=1e-4)


def test_venting_locks_weapons_in_the_tick_in_which_it_begins() -> None:
    arena = make_duel()
    run(arena, {0: {"fire": "laser", "target": 1, "vent": True}})
    assert not has_fired(arena, 0)
    run(arena, {0: {"fire": "laser", "target": 1}})
    assert has_fired(arena, 0)


def test_too_much_fire_shuts_a_unit_down_until_it_has_cooled_to_half() -> None:
    arena = make_duel("heavy", metres=6.0)
    put(arena, 0, heat=120.0)
    run(arena, {0: {"fire": "missile", "target": 1, "forward": 1.0}})
    assert unit_field(arena, "is_shut_down", 0)
    put(arena, 0, heat=65.0 + 6.0, velocity=[0.0, 0.0, 0.0])
    x = unit_field(arena, "position", 0)[0]
    for _ in range(2):  # it loses 10 heat in a second, because it does not vent
        run(arena, {0: {"fire": "laser", "target": 1, "forward": 1.0, "vent": True}})
        assert unit_field(arena, "is_shut_down", 0)
        assert not has_fired(arena, 0)
    assert unit_field(arena, "position", 0)[0] == x
    run(arena)
    assert not unit_field(arena, "is_shut_down", 0)
    run(arena, {0: {"fire": "laser", "target": 1}})
    assert has_fired(arena, 0)


# Hits


def test_a_gauss_hit_makes_a_shaken_unit_fall_and_it_lies_until_it_gets_up() -> None:
    arena = make_duel("heavy", metres=8.0)
    put(arena, 1, stability=55.0)
    run(arena, {0: {"fire": "gauss", "target": 1}}, times=2)
    assert 60 - 10 <= unit_field(arena, "fallen", 1) <= 60
    x = unit_field(arena, "position", 1)[0]
    put(arena, 1, fallen=11)
    for is_lying in (True, True, False):
        run(arena, {1: {"forward": -1.0}})
        assert (unit_field(arena, "fallen", 1) > 0) == is_lying
        assert (unit_field(arena, "position", 1)[0] == x) == is_lying


def test_autocannon_fire_suppresses_the_unit_that_it_hits() -> None:
    arena = make_duel(metres=6.0)
    run(arena, {0: {"fire": "autocannon", "target": 1}}, times=2)
    assert 20 <= unit_field(arena, "suppressed", 1) <= 24


def test_a_painted_target_far_away_is_hit_by_a_missile() -> None:
    arena = make_duel(metres=30.0, size=64)
    put(arena, 1, painted=100)
    run(arena, {0: {"fire": "missile", "target": 1}})
    assert has_fired(arena, 0)
    run(arena, times=10)
    assert unit_field(arena, "hit_points", 1) == 150 - 40


def test_a_gauss_shot_leads_a_target_that_runs_across() -> None:
    arena = make_duel("heavy", metres=16.0)
    place(arena, 1, 8, -2, heading=math.pi / 2)
    put(arena, 1, velocity=[0.0, 2.5, 0.0])
    run(arena, {0: {"fire": "gauss", "target": 1}, 1: {"forward": 1.0}})
    run(arena, {1: {"forward": 1.0}}, times=2)
    assert unit_field(arena, "hit_points", 1) == 200 - 50


def test_a_friend_in_the_line_of_fire_is_hit() -> None:
    arena = flat_arena("medium", "medium")
    place(arena, 0, -4, 0)
    place(arena, 1, 0, 0, heading=math.pi)
    place(arena, 2, 4, 0)
    place(arena, 3, 10, 10)
    run(arena, {0: {"fire": "autocannon", "target": 2}})
    assert damage_by(arena, 0) == pytest.approx([0, 8 / 150, 0, 0])


def test_smoke_hides_units_and_thins_out_after_ten_seconds() -> None:
    arena = make_duel("scout", metres=16.0, size=32)
    left = arena.simulation.state["cloud_left"]
    assert is_seen(arena)
    run(arena, {0: {"fire": "smoke", "target": 1}})
    run(arena, times=5)
    assert 150 < int(left.max()) <= 200
    assert not is_seen(arena)
    left[left > 0] = 6
    run(arena)
    assert not is_seen(arena)
    run(arena)
    assert is_seen(arena)


@pytest.mark.parametrize(("before", "after"), [(0, 16), (83, 99), (84, at.DESTROYED), (95, at.DESTROYED)])
def test_a_wall_is_destroyed_after_the_ticks_of_a_decision(before: int, after: int) -> None:
    arena = make_duel(metres=8.0)
    build(arena, (0, 1), (-12, 12), Material.SOLID, height=3.0)
    worn = arena.simulation.state["worn"].view(1, 24, 24)
    worn[0, 12] = before
    for slot, x in enumerate((-1.0, -3.0)):  # the second shot comes later in the same decision, so the wall stops it too
        put_shell(arena, 0, "autocannon", [x, 0.5, 1.2], [25.0, 0.0, 0.0], slot=slot)
    run(arena)
    assert set(worn[0, 12].tolist()) == {before, after}
    assert unit_field(arena, "hit_points", 1) == 150
    put_shell(arena, 0, "autocannon", [-1.0, 0.5, 1.2], [25.0, 0.0, 0.0])
    run(arena)
    assert unit_field(arena, "hit_points", 1) == (150 - 8 if after == at.DESTROYED else 150)


@pytest.mark.parametrize("name", WEAPONS)
def test_every_weapon_can_be_fired_by_a_class_that_owns_it(name: str) -> None:
    owner = next(unit for unit, spec in CLASSES.items() if name in spec.weapons)
    arena = make_duel(owner, metres=4.0)
    run(arena, {0: {"fire": name, "target": 1}})
    assert has_fired(arena, 0)
    run(arena, times=2)
    assert (unit_field(arena, "hit_points", 1) < CLASSES[owner].hit_points) == (WEAPONS[name].damage > 0)
    assert (unit_field(arena, "painted", 1) > 0) == (name == "painter")
    assert bool(arena.simulation.state["cloud_left"].any()) == (name == "smoke")
    assert arena.overflow.tolist() == [0]


def test_units_that_are_absent_take_no_part() -> None:
    arena = flat_arena("medium", "medium")
    place(arena, 0, -2, 0)
    place(arena, 1, 0, 0)
    place(arena, 2, 2, 0, heading=math.pi)
    place(arena, 3, 0, 0.2)
    for unit in (1, 3):
        put(arena, unit, hit_points=0.0, present=False)
    assert contacts(arena, 0) == [2]
    assert contacts(arena, 1) == []
    run(arena, {0: {"fire": "laser", "target": 2}, 1: {"forward": 1.0}, 3: {"forward": 1.0}})
    assert [has_fired(arena, unit) for unit in range(4)] == [True, False, False, False]
    assert [unit_field(arena, "position", unit) for unit in (1, 3)] == [[0, 0, 0], [0, pytest.approx(0.2), 0]]
    assert score(arena) == [0, 0]
    assert damage_by(arena, 0) == pytest.approx([0, 0, 14 / 150, 0])


# Fairness and independence

# Rows of each field that change their sign when the world is turned by half a turn.
SIGNS = {
    "unit": (at.X, at.Y, at.VELOCITY_X, at.VELOCITY_Y, at.COS, at.SIN, at.PUSH_X, at.PUSH_Y),
    "shell": (at.SHELL_X, at.SHELL_Y, at.SHELL_VX, at.SHELL_VY),
    "cloud": (0, 1),
}
# Dimensions of units, and rows with the index of a unit.
UNITS = {
    "unit": (2,), "number": (2,), "cooldown": (2,), "harm": (1, 2), "shell": (2,), "shell_count": (2,), "cloud": (2,), "cloud_left": (1,),
    "contact": (2,),
}  # fmt: skip
INDICES = {"number": slice(at.TARGET, at.TARGET + 1), "shell_count": slice(at.SHELL_TARGET, at.SHELL_TARGET + 1), "contact": slice(None)}


def half_turned(state: Saved, team: int) -> Saved:
    """Return a state after half a turn of the world, with the teams in each other's place."""
    turned = {name: tensor.clone() for name, tensor in state.items()}
    for name, rows in SIGNS.items():
        turned[name][:, rows] *= -1
    for name, indices in INDICES.items():
        index = turned[name][:, indices]
        turned[name][:, indices] = torch.where(index < 0, index, (index + team) % (2 * team))
    for name, dimensions in UNITS.items():
        turned[name] = turned[name].roll([team] * len(dimensions), dimensions)
    turned["worn"] = turned["worn"].flip(1)
    status = turned["status"]
    for first, second in ((at.HELD, at.HELD_2), (at.OLD_HELD, at.OLD_HELD_2)):
        status[:, [first, second]] = status[:, [second, first]]
    holder = status[:, at.HOLDER]
    status[:, at.HOLDER] = torch.where(holder < 0, holder, 1 - holder)
    return turned


def differs(state: Saved, expected: Saved) -> Tensor:
    """Return the battles [B] bool that differ by more than rounding. Free projectile slots do not matter."""
    flies = (expected["shell_count"][:, at.SHELL_LIFE] > 0).unsqueeze(1)
    found = torch.zeros(len(flies), dtype=torch.bool)
    for name, tensor in state.items():
        error = (tensor.double() - expected[name].double()).abs() * (flies if name.startswith("shell") else 1)
        found |= error.flatten(1).amax(1) > 1e-4 if error.dim() > 1 else error > 0
    return found


def melee(battles: int, *, decisions: int, maps: int = 2) -> Arena:
    """Battles in which bots of different strength have met, so that the teams differ."""
    arena = Arena(small_config(battles=battles, team_size=4, pack=tuple(CLASSES), contacts=3, allies=3, maps=maps, size=32), seed=3)
    for _ in range(decisions):
        act(arena)
        arena.simulation.run(DECIDE_ONLY)
    return arena


def act(arena: Arena) -> None:
    """Let bots choose the actions of all units."""
    names = torch.tensor([[BOTS.index("strong")], [BOTS.index("middle")]], dtype=torch.int32)
    arena.simulation.act(names.repeat(1, arena.config.battles))


@pytest.mark.slow
def test_neither_side_is_favoured() -> None:
    """Everything that happens in a turned world with swapped teams is turned and swapped too."""
    arena = melee(16, decisions=16)
    team, shape = arena.config.team_size, (arena.config.battles, arena.config.units)
    other = Arena(arena.config, grids=arena.grids)
    assert differs(saved(arena), half_turned(saved(arena), team)).all()
    unequal, damage = 0, 0.0
    for _ in range(12):
        # Begin with equal states in every decision: bodies that touch magnify rounding.
        other.simulation.load(half_turned(saved(arena), team))
        act(arena)
        for name, values in arena.simulation.actions.items():
            swapped = values.view(*shape, *values.shape[1:]).roll(team, 1)
            other.simulation.actions[name].copy_(swapped.reshape(values.shape))
        for each in (arena, other):
            each.simulation.run(DECIDE_ONLY)
        rewards = [each.simulation.state["reward"].movedim(1, 0) for each in (arena, other)]
        is_paid_otherwise = ((rewards[0] - rewards[1].roll(team, 2)).abs() > 1e-4).flatten(1).any(1)
        unequal += int((differs(saved(other), half_turned(saved(arena), team)) | is_paid_otherwise).sum())
        damage += float(arena.simulation.state["taken"].sum())
    # A unit within a micrometre of the edge of a column may be rounded to either side.
    assert unequal <= 1
    assert damage > 5, "few units were hit, so little was shown"


@pytest.mark.slow
def test_a_battle_depends_neither_on_its_place_nor_on_the_others() -> None:
    arena = melee(5, decisions=14)
    order = torch.tensor([3, 1, 0])
    other = Arena(msgspec.structs.replace(arena.config, battles=3), grids=arena.grids)
    other.simulation.load(select_battles(saved(arena), order))
    for _ in range(8):
        for each in (arena, other):
            act(each)
            each.simulation.run(DECIDE_ONLY)
        assert_identical(saved(other), select_battles(saved(arena), order))
    assert arena.simulation.state["harm"].any()
