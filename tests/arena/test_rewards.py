"""Rewards: their parts, their weights, and behaviour that must never pay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from esper.arena.arena import Arena, StepResult
from esper.arena.bots import Bot
from esper.arena.config import ArenaRewardConfig
from esper.arena.native import layout as at
from esper.arena.specs import CLASSES, Material
from tests.arena.views import set_status
from tests.arena.worlds import build, decide, flat_arena, make_duel, place, put, put_shell, score, small_config, unit_field

HIT = 8.0  # damage of a projectile of an autocannon from the front
MEDIUM, LIGHT = CLASSES["medium"].hit_points, CLASSES["light"].hit_points


def make_pairs(**weights: Any) -> Arena:
    """Return two against two: medium 0 and light 1 against medium 2 and light 3. They see each other and stand outside of the zone."""
    arena = flat_arena("medium", "light", seconds=10.0, reward=ArenaRewardConfig(**weights))
    for unit, (x, y) in enumerate(((-9.5, -6.5), (-9.5, 6.5), (9.5, -6.5), (9.5, 6.5))):
        place(arena, unit, x, y, heading=0.0 if unit < 2 else math.pi)
    return arena


def hit(arena: Arena, attacker: int, victim: int, *, times: int = 1) -> None:
    """Let projectiles of an autocannon hit a unit from the front, in the first tick of the next decision."""
    x, y, z = unit_field(arena, "position", victim)
    heading = unit_field(arena, "heading", victim)
    life = arena.simulation.state["shell_count"][at.SHELL_LIFE, 0, attacker]
    for _ in range(times):
        slot = int((life == 0).int().argmax())
        start = [x + 0.5 * math.cos(heading), y + 0.5 * math.sin(heading), z + 1.0]
        put_shell(arena, attacker, "autocannon", start, [-10 * math.cos(heading), -10 * math.sin(heading), 0.0], slot=slot)


def burst(arena: Arena, attacker: int, x: float, y: float) -> None:
    """Let a projectile of a gauss burst on the ground, in the first tick of the next decision."""
    put_shell(arena, attacker, "gauss", [x, y, 0.1], [0.0, 0.0, -10.0])


def lava_under(arena: Arena, unit: int) -> None:
    x, y = (math.floor(value) for value in unit_field(arena, "position", unit)[:2])
    build(arena, (x, x + 1), (y, y + 1), Material.LAVA)


def part(result: StepResult, name: str) -> list[float]:
    """Return a part of the rewards of all units of the first battle."""
    values: list[float] = getattr(result.parts, name)[0].tolist()
    return values


def potential(arena: Arena, unit: int) -> float:
    """Return the potential of a unit's place: the length of its route in map sides, negative."""
    size = arena.config.size
    i, j = (math.floor(value) + size // 2 for value in unit_field(arena, "position", unit)[:2])
    return -float(arena.grids.route_m[int(arena.simulation.status[at.MAP, 0]), i, j]) / size


def close(values: list[float], expected: list[float]) -> None:
    assert values == pytest.approx(expected, abs=1e-6)


# The zone


@pytest.mark.parametrize(("unit", "paid"), [(0, [0.25, 0.25, 0.0, 0.0]), (3, [0.0, 0.0, 0.25, 0.25])])
def test_the_zone_pays_its_seconds_to_the_team_that_holds_it_and_costs_the_other(unit: int, paid: list[float]) -> None:
    arena = make_pairs(zone=1.0, approach=0.0)
    place(arena, unit, 0.5, 0.5)
    result = decide(arena)
    close(part(result, "zone"), paid)
    close(result.reward[0].tolist(), [2 * value - 0.25 for value in paid])


def test_both_teams_are_paid_if_both_held_the_zone_in_one_decision() -> None:
    arena = make_pairs(zone=1.0, approach=0.0)
    place(arena, 3, 0.5, 0.5)  # a light one
    place(arena, 0, 3.0, 0.5)
    put(arena, 0, velocity=[12.0, 0.0, 0.0])  # inside for one tick; it is heavier
    result = decide(arena)
    assert result.last[0, 1:3].tolist() == pytest.approx([0.05, 0.2])
    close(part(result, "zone"), [0.05, 0.05, 0.2, 0.2])
    close(result.reward[0].tolist(), [-0.15, -0.15, 0.15, 0.15])


# Damage


def test_damage_pays_for_enemies_and_costs_for_friends_and_oneself() -> None:
    arena = make_pairs(damage=0.5, friendly_fire=2.0, hurt=0.3)
    for attacker, victim in ((0, 2), (0, 3), (1, 0)):
        hit(arena, attacker, victim)
    burst(arena, 2, *unit_field(arena, "position", 2)[:2])
    result = decide(arena)
    own = (MEDIUM - HIT - unit_field(arena, "hit_points", 2)) / MEDIUM
    assert own > 0.01
    close(part(result, "damage"), [0.5 * (HIT / MEDIUM + HIT / LIGHT), -2.0 * HIT / MEDIUM, -2.0 * own, 0.0])
    close(part(result, "hurt"), [-0.3 * HIT / MEDIUM, 0.0, -0.3 * (HIT / MEDIUM + own), -0.3 * HIT / LIGHT])


def test_damage_by_terrain_costs_nothing() -> None:
    arena = make_pairs()
    lava_under(arena, 0)
    result = decide(arena)
    assert unit_field(arena, "hit_points", 0) < MEDIUM
    assert part(result, "hurt") == part(result, "damage") == [0.0] * 4


def test_no_more_damage_is_paid_than_hit_points_are_left() -> None:
    arena = make_pairs(damage=1.0)
    put(arena, 2, hit_points=6.0)
    hit(arena, 0, 2, times=3)
    hit(arena, 1, 2)
    close(part(decide(arena), "damage"), [0.75 * 6.0 / MEDIUM, 0.25 * 6.0 / MEDIUM, 0.0, 0.0])


# Kills, assists and deaths


@pytest.mark.parametrize(
    ("hits", "hit_points", "killer", "helper"),
    [
        ({0: 1, 1: 2, 3: 3}, 30.0, 1, 0),  # the most damage of an enemy; a friend did more
        ({0: 2, 1: 1}, 20.0, 0, 1),
        ({0: 1}, 5.0, 0, None),
        ({3: 2}, 10.0, None, None),  # a friend is no killer
        ({}, 1e-4, None, None),  # nor is the ground
        ({0: 2}, 30.0, None, None),  # it lives
    ],
)
def test_a_kill_is_paid_to_the_enemy_that_did_the_most_damage(
    hits: dict[int, int], hit_points: float, killer: int | None, helper: int | None
) -> None:
    arena = make_pairs(kill=1.0, assist=0.25, death=0.5)
    if not hits:
        lava_under(arena, 2)
    put(arena, 2, hit_points=hit_points)
    for attacker, times in hits.items():
        hit(arena, attacker, 2, times=times)
    result = decide(arena)
    has_died = unit_field(arena, "hit_points", 2) == 0
    assert has_died == (hits != {0: 2})
    assert result.died[0].tolist() == [False, False, has_died, False]
    assert part(result, "kill") == [float(unit == killer) for unit in range(4)]
    assert part(result, "assist") == [0.25 * (unit == helper) for unit in range(4)]
    assert part(result, "death") == [0.0, 0.0, -0.5 * has_died, 0.0]


def test_every_kill_of_a_decision_is_paid() -> None:
    arena = make_pairs(kill=1.0)
    for victim in (2, 3):
        put(arena, victim, hit_points=5.0)
        hit(arena, 0, victim)
    assert part(decide(arena), "kill") == [2.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("ticks", "is_paid"), [(200, True), (6, True), (5, False), (0, False)])
def test_an_assist_is_paid_for_damage_shortly_before_a_death(ticks: int, is_paid: bool) -> None:
    arena = make_pairs(assist=0.25)
    harm = arena.simulation.state["harm"][:, 0]  # attacker, victim
    harm[0, 2], harm[1, 2], harm[3, 2], harm[0, 3] = ticks, 200, 30, 50  # by the killer, by a friend, and to a living enemy
    put(arena, 2, hit_points=5.0)
    hit(arena, 1, 2)
    assert part(decide(arena), "assist") == [0.25 * is_paid, 0.0, 0.0, 0.0]


def test_an_assist_is_paid_for_a_death_by_terrain() -> None:
    arena = make_pairs(assist=0.25)
    arena.simulation.state["harm"][1, 0, 2] = 50
    put(arena, 2, hit_points=1e-4)
    lava_under(arena, 2)
    assert part(decide(arena), "assist") == [0.0, 0.25, 0.0, 0.0]


def test_dying_is_noticed_once() -> None:
    arena = make_pairs()
    put(arena, 1, hit_points=1e-4)
    lava_under(arena, 1)
    assert decide(arena).died[0].tolist() == [False, True, False, False]
    result = decide(arena)
    assert not result.died.any()
    assert result.was_alive[0].tolist() == [True, False, True, True]
    assert not any(part(result, "death"))


# Outcome


@pytest.mark.parametrize(
    ("held", "winner", "paid"),
    [([9, 3], 0, [1.0, 1.0, -1.0, -1.0]), ([3, 9], 1, [-1.0, -1.0, 1.0, 1.0]), ([3, 3], -1, [0.0, 0.0, 0.0, 0.0])],
)
@pytest.mark.parametrize("pays_dead", [True, False])
def test_the_outcome_is_paid_to_the_winner_and_costs_the_loser(held: list[int], winner: int, paid: list[float], pays_dead: bool) -> None:
    """A unit that died before gets it too, if the dead are paid."""
    arena = make_pairs(outcome=1.0, pays_dead=pays_dead)
    put(arena, 1, hit_points=0.0)
    if not pays_dead:
        paid = [paid[0], 0.0, *paid[2:]]
    for field, ticks in zip((at.HELD, at.HELD_2), held, strict=True):
        set_status(arena, field, ticks)
    set_status(arena, at.DECISION, arena.config.decisions - 2)
    result = decide(arena)
    assert not result.ended.any()
    assert not any(part(result, "outcome"))
    result = decide(arena)
    assert (bool(result.ended[0]), int(result.winner[0])) == (True, winner)
    assert part(result, "outcome") == paid


@pytest.mark.parametrize("pays_dead", [True, False])
@pytest.mark.parametrize("winner", [0, 1])
def test_a_unit_that_dies_at_the_end_gets_the_outcome_of_its_team(winner: int, pays_dead: bool) -> None:
    arena = make_pairs(outcome=1.0, pays_dead=pays_dead)
    put(arena, 1, hit_points=1e-4)
    lava_under(arena, 1)
    set_status(arena, at.HELD + winner, 9)
    set_status(arena, at.DECISION, arena.config.decisions - 1)
    result = decide(arena)
    assert result.died[0].tolist() == [False, True, False, False]
    assert part(result, "outcome") == ([1.0, 1.0, -1.0, -1.0] if winner == 0 else [-1.0, -1.0, 1.0, 1.0])


# Approach


@pytest.mark.parametrize(("x", "metres"), [(0.5, 0.0), (5.5, 3.0), (-10.5, 8.0)])
def test_the_potential_is_the_route_to_the_zone_in_map_sides(x: float, metres: float) -> None:
    """The part of a unit that stands still, without discount of the new potential, is the old potential with its sign changed."""
    arena = make_pairs(approach=1.0, gamma=0.0)
    place(arena, 0, x, 0.5)
    place(arena, 1, x, 0.5)
    put(arena, 1, hit_points=0.0)
    paid = part(decide(arena), "approach")
    close(paid[:2], [metres / 24, 0.0])


def test_the_potential_is_limited_where_no_route_leads_to_the_zone() -> None:
    arena = make_pairs(approach=1.0, gamma=0.0)
    arena.grids.route_m.fill_(math.inf)
    arena.simulation.set_maps(arena.grids)
    assert part(decide(arena), "approach") == [2.0] * 4


@pytest.mark.parametrize("ends", [False, True])
def test_approach_is_gamma_times_the_new_potential_less_the_old(ends: bool) -> None:
    """A battle that has ended has no new potential."""
    arena = make_pairs(approach=0.7, gamma=0.9)
    place(arena, 0, -9.2, 0.5)
    old = potential(arena, 0)
    if ends:
        set_status(arena, at.DECISION, arena.config.decisions - 1)
        paid = part(decide(arena, {0: {"forward": 1.0}}), "approach")
        close(paid[:1], [-0.7 * old])
    else:
        paid = part(decide(arena, {0: {"forward": 1.0}}), "approach")
        new = potential(arena, 0)
        assert new > old
        close(paid[:1], [0.7 * (0.9 * new - old)])


def test_standing_still_earns_no_approach_reward() -> None:
    """With a discount of 1. Below 1, the interest of the potential is paid, which leaves the best policy as it is."""
    assert part(decide(make_pairs(gamma=1.0)), "approach") == [0.0] * 4


@pytest.mark.slow
def test_the_discounted_approach_rewards_of_a_unit_sum_to_minus_its_initial_potential() -> None:
    """Whatever the unit does, and whether it dies."""
    config = small_config(team_size=2, pack=("medium", "scout"), seconds=2.5, size=16)
    arena = Arena(config)
    bot = Bot("middle", arena)
    owed = torch.tensor([[-config.reward.approach * potential(arena, unit) for unit in range(4)]])
    assert (owed > 0.01).all()
    put(arena, 3, hit_points=0.0)  # nothing is owed to the dead
    owed[0, 3] = 0.0
    total, discount, has_died = torch.zeros(1, 4), 1.0, False
    for decision in range(config.decisions):
        if decision == 5:
            put(arena, 1, hit_points=1e-4)
            build(arena, (-8, 8), (-8, 8), Material.LAVA)  # of which it dies
        result = arena.step(bot.act())
        assert result.parts is not None
        total += discount * result.parts.approach
        discount *= config.reward.gamma
        has_died |= bool(result.died[0, 1])
    assert has_died
    assert bool(result.ended[0])
    torch.testing.assert_close(total, owed, atol=1e-5, rtol=0)


# All parts together


def test_parts_are_weighted_by_the_config() -> None:
    weights: dict[str, float] = {
        "zone": 0.1, "damage": 2.0, "hurt": 0.3, "kill": 0.6, "assist": 0.11, "death": 0.13, "outcome": 5.0,
        "approach": 0.4, "team_share": 0.0, "zero_sum": 0.7,
    }  # fmt: skip
    arena = make_pairs(**weights)
    place(arena, 1, 0.5, 0.5)
    set_status(arena, at.HELD, 96)  # 100 ticks win
    put(arena, 2, hit_points=5.0)
    hit(arena, 0, 2)
    arena.simulation.state["harm"][1, 0, 2] = 100
    expected = {
        "zone": [0.1 * 0.25] * 2 + [0.0] * 2,
        "damage": [2.0 * 5 / MEDIUM, 0.0, 0.0, 0.0],
        "hurt": [0.0, 0.0, -0.3 * 5 / MEDIUM, 0.0],
        "kill": [0.6, 0.0, 0.0, 0.0],
        "assist": [0.0, 0.11, 0.0, 0.0],
        "death": [0.0, 0.0, -0.13, 0.0],
        "outcome": [5.0, 5.0, -5.0, -5.0],
        "approach": [-0.4 * potential(arena, unit) for unit in range(4)],
    }
    result = decide(arena)
    assert (bool(result.ended[0]), int(result.winner[0])) == (True, 0)
    assert result.parts is not None
    assert set(expected) == set(result.parts._fields)
    for name, paid in expected.items():
        assert part(result, name) == pytest.approx(paid, abs=1e-6), name
    own = [sum(parts) - outcome for *parts, outcome in zip(*expected.values(), expected["outcome"], strict=True)]  # without the outcome
    means = [(own[2] + own[3]) / 2] * 2 + [(own[0] + own[1]) / 2] * 2  # of the other team
    paid = [mine - 0.7 * theirs + outcome for mine, theirs, outcome in zip(own, means, expected["outcome"], strict=True)]
    close(result.reward[0].tolist(), paid)


def test_dead_units_are_paid_nothing_if_the_dead_are_not_paid() -> None:
    arena = make_pairs(pays_dead=False)
    put(arena, 0, hit_points=0.0)
    put(arena, 2, hit_points=5.0)
    place(arena, 1, 0.5, 0.5)
    set_status(arena, at.HELD, 96)
    hit(arena, 0, 2)  # its projectiles are still in the air
    hit(arena, 0, 1)
    result = decide(arena)
    assert result.ended[0]
    assert result.died[0].tolist() == [False, False, True, False]
    assert result.parts is not None
    assert all(values[0, 0] == 0 for values in result.parts)
    assert result.reward[0, 0] == 0
    assert (result.reward[0, 1:] != 0).all()


def test_dead_units_get_the_zone_the_outcome_the_share_and_the_subtraction_of_their_team() -> None:
    arena = make_pairs(zone=1.0, outcome=3.0, team_share=0.4, damage=1.0, hurt=0.2, kill=0.5, death=0.4, approach=0.3)
    put(arena, 0, hit_points=0.0)
    put(arena, 2, hit_points=5.0)
    place(arena, 1, 0.5, 0.5)
    set_status(arena, at.HELD, 96)
    hit(arena, 0, 2)  # its projectiles are still in the air, but it is paid neither for damage nor for the kill
    hit(arena, 1, 3)
    old = [potential(arena, unit) for unit in range(4)]
    result = decide(arena)
    assert (bool(result.ended[0]), int(result.winner[0])) == (True, 0)
    assert result.died[0].tolist() == [False, False, True, False]
    assert result.parts is not None
    assert {name: values[0] for name in result.parts._fields if (values := part(result, name))[0]} == {"zone": 0.25, "outcome": 3.0}
    share = 0.4 * (HIT / LIGHT) / 2
    other_team = (-0.2 * 5 / MEDIUM - 0.4 - 0.3 * old[2] - 0.2 * HIT / LIGHT - 0.3 * old[3]) / 2
    close(result.reward[0, :1].tolist(), [0.25 + share - other_team + 3.0])


def test_absent_units_are_paid_nothing_and_do_not_count_in_shares_and_means() -> None:
    arena = make_pairs(approach=0.0, zone=1.0, team_share=0.5, damage=1.0, hurt=0.2)
    for unit in (1, 3):
        put(arena, unit, present=False, hit_points=0.0)
    place(arena, 0, 0.5, 0.5)
    hit(arena, 0, 2)
    won = 0.25 + HIT / MEDIUM + 0.2 * HIT / MEDIUM
    close(decide(arena).reward[0].tolist(), [won, 0.0, -won, 0.0])


@pytest.mark.parametrize("dead", [(), (1,), (0, 3)])
@pytest.mark.parametrize("ends", [False, True])
def test_with_zero_sum_the_rewards_of_a_battle_sum_to_zero(dead: tuple[int, ...], ends: bool) -> None:
    """With the default weights, the outcome and the dead included: they are paid, so both teams always count the same."""
    arena = make_pairs()
    for unit in dead:
        put(arena, unit, hit_points=0.0)
    place(arena, 1, 0.5, 0.5)
    put(arena, 2, hit_points=MEDIUM if 3 in dead else 5.0)  # it dies if that does not end the battle
    set_status(arena, at.HELD, 40)
    if ends:
        set_status(arena, at.DECISION, arena.config.decisions - 1)
    for attacker, victim in ((0, 2), (0, 1), (2, 0), (3, 1), (1, 2)):
        hit(arena, attacker, victim)
    result = decide(arena, {0: {"forward": 1.0}, 3: {"forward": 0.5}})
    assert result.parts is not None
    assert any(part(result, "damage"))
    assert bool(result.died[0, 2]) == (3 not in dead)
    assert bool(result.ended[0]) == any(part(result, "outcome")) == ends
    assert result.reward.abs().max() > 0.01
    assert float(torch.stack(list(result.parts)).sum().abs()) > 0.01  # the parts themselves do not sum to zero
    assert float(result.reward.sum()) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("zero_sum", [0.0, 0.5, 1.0])
def test_an_even_trade_pays_what_zero_sum_leaves_of_it(zero_sum: float) -> None:
    arena = make_pairs(approach=0.0, zero_sum=zero_sum, damage=1.0, hurt=0.2, team_share=0.0)
    hit(arena, 0, 2)
    hit(arena, 2, 0)
    gain = 0.8 * HIT / MEDIUM
    close(decide(arena).reward[0].tolist(), [gain - zero_sum * gain / 2, -zero_sum * gain / 2] * 2)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_sharing_divides_rewards_for_damage_kills_and_assists_and_keeps_their_sum(share: float) -> None:
    arena = make_pairs(approach=0.0, team_share=share, zero_sum=0.0, damage=1.0, hurt=0.2, kill=0.5, assist=0.25, death=0.4)
    put(arena, 2, hit_points=24.0)
    hit(arena, 0, 2, times=2)
    hit(arena, 1, 2)
    first, second = 16 / MEDIUM + 0.5, 8 / MEDIUM + 0.25
    mean, lost = (first + second) / 2, -0.2 * 24 / MEDIUM - 0.4
    paid = decide(arena).reward[0].tolist()
    close(paid, [first * (1 - share) + mean * share, second * (1 - share) + mean * share, lost, 0.0])
    close([sum(paid)], [first + second + lost])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("pays_dead", [True, False])
def test_the_dead_get_their_share_only_if_they_are_paid(share: float, pays_dead: bool) -> None:
    arena = make_pairs(approach=0.0, team_share=share, zero_sum=0.0, damage=1.0, pays_dead=pays_dead)
    put(arena, 1, hit_points=0.0)
    hit(arena, 0, 3)
    paid, whole = decide(arena).reward[0].tolist(), HIT / LIGHT
    close(paid[:2], [(1 - share / 2) * whole, share / 2 * whole] if pays_dead else [whole, 0.0])


@pytest.mark.slow
def test_without_zero_sum_rewards_are_the_sum_of_their_parts_in_play() -> None:
    config = small_config(team_size=2, pack=("medium", "light"), size=16, battles=2, maps=2, reward=ArenaRewardConfig(zero_sum=0.0))
    arena = Arena(config)
    bot = Bot("weak", arena)
    for unit, (x, y) in enumerate(((-3.0, -2.0), (-3.0, 2.0), (3.0, 2.0), (3.0, -2.0))):
        place(arena, unit, x, y)
    arena.look()
    has_hurt = False
    for _ in range(10):
        result = arena.step(bot.act())
        assert result.parts is not None
        everything = torch.stack(list(result.parts)).sum((0, 2))
        torch.testing.assert_close(result.reward.sum(1), everything, atol=1e-5, rtol=0)
        has_hurt |= bool(result.parts.damage.any())
    assert has_hurt


# Shots in a duel


@pytest.mark.parametrize("hit_points", [MEDIUM, 7.5])
def test_a_shot_is_paid_by_its_damage_and_the_last_one_by_kill_and_outcome_too(hit_points: float) -> None:
    arena = make_duel(metres=6.0, y=0.5, reward=ArenaRewardConfig(approach=0.0, zone=0.0))
    put(arena, 1, hit_points=hit_points)
    result = decide(arena, {0: {"fire": "laser", "target": 1}})
    weights, share = arena.config.reward, min(hit_points, 14.0) / MEDIUM
    paid, cost = weights.damage * share, weights.hurt * share
    if hit_points == MEDIUM:
        assert not result.ended[0]
    else:
        assert (bool(result.ended[0]), int(result.winner[0])) == (True, 0)
        paid, cost = paid + weights.kill, cost + weights.death
    outcome = weights.outcome if result.ended[0] else 0.0
    close(result.reward[0].tolist(), [paid + cost + outcome, -cost - paid - outcome])


# Behaviour that never pays


def test_friendly_fire_never_pays() -> None:
    """Shots into the back of a friend who stands before the target."""
    arena = flat_arena("medium", "medium", reward=ArenaRewardConfig(approach=0.0, zone=0.0))
    for unit, (x, y) in enumerate(((-6.0, 0.5), (-3.0, 0.5), (3.0, 0.5), (10.0, 10.0))):
        place(arena, unit, x, y)
    put(arena, 1, hit_points=1.0)
    result = decide(arena, {0: {"fire": "autocannon", "target": 2}})
    assert result.died[0].tolist() == [False, True, False, False]
    assert float(arena.simulation.state["taken"][0, 0, 1]) > 0
    assert part(result, "damage")[0] < 0
    assert part(result, "kill") == part(result, "assist") == [0.0] * 4
    assert result.reward[0, 0] < 0
    assert not any(values[0, 2:].any() for values in result.parts or ())  # enemies are paid for it only what the team has lost
    lost = result.parts is not None and sum(float(values[0, :2].sum()) for values in result.parts)
    close(result.reward[0, 2:].tolist(), [-lost / 2] * 2)


def test_killing_oneself_never_pays() -> None:
    """At a death, the reward for the approach only returns what was deducted earlier. All other rewards of it are costs."""
    arena = flat_arena("medium", reward=ArenaRewardConfig(zero_sum=0.0))
    place(arena, 0, -11.0, -11.0)
    put(arena, 0, hit_points=0.1)
    build(arena, (-12, -10), (-12, -10), Material.LAVA)
    weights, owed = arena.config.reward, -potential(arena, 0)
    result = decide(arena)
    assert bool(result.died[0, 0])
    close(part(result, "approach")[:1], [weights.approach * owed])
    close(result.reward[0, :1].tolist(), [weights.approach * owed - weights.death - weights.outcome])
    assert part(result, "outcome")[0] == -weights.outcome


def test_dying_does_not_avoid_the_cost_of_a_lost_zone() -> None:
    """With the default weights, the dead pay for each second that the other team holds the zone, as the living do."""
    arena = flat_arena("medium", "medium", reward=ArenaRewardConfig(approach=0.0))
    for unit, (x, y) in enumerate(((-11.0, -11.0), (-11.0, 11.0), (0.5, 0.5), (11.0, 11.0))):
        place(arena, unit, x, y)
    second = arena.config.reward.zone * 0.25
    for _ in range(8):
        close(decide(arena).reward[0, :2].tolist(), [-second, -second])
    assert score(arena) == [0, 40]
    put(arena, 0, hit_points=1e-4)
    build(arena, (-12, -10), (-12, -10), Material.LAVA)
    close(decide(arena).reward[0, :2].tolist(), [-second - arena.config.reward.death, -second])
    close(decide(arena).reward[0, :2].tolist(), [-second, -second])


@pytest.mark.parametrize("zero_sum", [0.0, 1.0])
def test_a_burst_at_ones_own_feet_never_pays_where_it_hurts_an_enemy_as_much(zero_sum: float) -> None:
    """It costs, unless the cost of the enemy is subtracted: then it is an even trade."""
    weights = ArenaRewardConfig(approach=0.0, zone=0.0, zero_sum=zero_sum)
    arena = make_duel(metres=1.4, y=5.5, reward=weights)
    burst(arena, 0, 0.0, 5.5)
    result = decide(arena)
    taken: Any = arena.simulation.state["taken"][0, 0]
    assert taken[0] > 0.01
    assert taken[0] == pytest.approx(float(taken[1]))
    close(result.reward[0, :1].tolist(), [-(1 - zero_sum) * weights.hurt * float(taken[0])])
