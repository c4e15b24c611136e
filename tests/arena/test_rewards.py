"""Rewards: their parts, and behaviour that must never pay."""

from __future__ import annotations

import math

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.bots import Bot
from esper.arena.config import ArenaRewardConfig
from esper.arena.decision import StepEvents
from esper.arena.rewards import (
    Rewards,
    approach,
    assists,
    damage_dealt,
    damage_suffered,
    has_died,
    kill_table,
    nearness,
    outcomes,
    pay,
    shared,
    zone_gain,
)
from esper.arena.specs import CLASSES, Material
from esper.arena.zone import Ending
from tests.arena.views import look
from tests.arena.worlds import build, flat_arena, make_actions, place, put, small_config

GOES_ON = Ending(ended=torch.tensor([False]), winner=torch.tensor([-1]), by_time=torch.tensor([False]))


@pytest.fixture
def pairs():
    """Two against two: units 0 and 1 against 2 and 3."""
    return flat_arena("medium", "light")


def damage_table(*step_events):
    """Build a damage table from (attacker, victim, fraction)."""
    table = torch.zeros(1, 4, 4)
    for attacker, victim, share in step_events:
        table[0, attacker, victim] = share
    return StepEvents(taken=table, fired=torch.zeros(1, 4, dtype=torch.bool))


def deaths(*units):
    return torch.tensor([[unit in units for unit in range(4)]])


def ending(winner):
    return Ending(ended=torch.tensor([True]), winner=torch.tensor([winner]), by_time=torch.tensor([False]))


# One function for each reason


def test_the_zone_pays_its_seconds_to_one_side_and_costs_the_other_what_the_config_says(pairs):
    before = pairs.state.status
    after = before._replace(score=torch.tensor([[1.25, 0.5]]))
    config = ArenaRewardConfig(zone=1.0, zone_lost=0.5)
    assert zone_gain(before, after, pairs.tables, config).tolist() == [[1.0, 1.0, -0.125, -0.125]]


def test_damage_pays_for_enemies_and_costs_for_friends_and_oneself(pairs):
    config = ArenaRewardConfig(damage=0.5, friendly_fire=1.0)
    step_events = damage_table((0, 2, 0.4), (0, 3, 0.2), (1, 0, 0.1), (2, 2, 0.3))
    paid = damage_dealt(step_events, pairs.tables, config)[0].tolist()
    assert paid == pytest.approx([0.3, -0.1, -0.3, 0.0])


def test_the_unit_that_did_most_damage_is_paid_for_the_kill(pairs):
    table = kill_table(deaths(2), damage_table((0, 2, 0.1), (1, 2, 0.3), (3, 2, 0.6)), pairs.tables)  # its friend took most
    assert table[0].nonzero().tolist() == [[1, 2]]


def test_no_unit_is_paid_for_a_death_by_ground_or_friend(pairs):
    assert not kill_table(deaths(2), damage_table(), pairs.tables).any()
    assert not kill_table(deaths(2), damage_table((3, 2, 1.0), (2, 2, 0.5)), pairs.tables).any()


def test_no_unit_is_paid_a_kill_for_a_living_enemy(pairs):
    assert not kill_table(deaths(), damage_table((0, 2, 0.9)), pairs.tables).any()


def test_an_assist_is_paid_for_enemies_hurt_recently_and_killed_by_others(pairs):
    harm = torch.zeros(4, 4, dtype=torch.int32)
    harm[0, 2], harm[1, 2], harm[3, 2], harm[0, 3] = 1, 200, 30, 50
    for unit in range(4):
        put(pairs, unit, harm=harm[unit])
    gone = deaths(2)
    killed_by = kill_table(gone, damage_table((1, 2, 0.2)), pairs.tables)
    assert assists(gone, killed_by, pairs.state.units, pairs.tables).tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_dying_is_noticed_once(pairs):
    before = pairs.state.units
    put(pairs, 1, hit_points=0.0)
    after = pairs.state.units
    assert has_died(before, after).tolist() == [[False, True, False, False]]
    assert not has_died(after, after).any()


@pytest.mark.parametrize(("winner", "paid"), [(0, [1.0, 0.0, 0.0, 0.0]), (1, [0.0, 0.0, 1.0, 1.0]), (-1, [0.5, 0.0, 0.5, 0.5])])
def test_the_outcome_is_paid_to_the_living_of_the_winner_or_half_to_all_at_a_draw(pairs, winner, paid):
    put(pairs, 1, hit_points=0.0)
    assert outcomes(ending(winner), pairs.state.units, pairs.tables).tolist() == [paid]
    assert not outcomes(GOES_ON, pairs.state.units, pairs.tables).any()


def test_the_potential_is_greatest_in_the_zone(pairs):
    for unit, x in enumerate((0.5, 5.5, 10.5)):
        place(pairs, unit, x, 0.5)
    place(pairs, 3, 0.5, 10.5)
    put(pairs, 3, hit_points=0.0)
    in_zone, near, far, dead = nearness(pairs.state.units, pairs.state.world)[0].tolist()
    assert in_zone == dead == 0.0
    assert 0.0 > near > far > -1.0


def test_approach_is_gamma_times_the_new_potential_less_the_old(pairs):
    place(pairs, 0, -10.5, 0.5)
    before = pairs.state
    place(pairs, 0, -8.5, 0.5)
    old, new = (float(nearness(state.units, state.world)[0, 0]) for state in (before, pairs.state))
    assert approach(before, pairs.state, GOES_ON, gamma=0.9)[0, 0] == pytest.approx(0.9 * new - old)
    assert approach(before, pairs.state, ending(0), gamma=0.9)[0, 0] == pytest.approx(-old)


def test_standing_still_earns_no_approach_reward(pairs):
    """With a discount of 1. Below 1 the potential's own interest is paid, which is what leaves the best policy as it is."""
    assert not approach(pairs.state, pairs.state, GOES_ON, gamma=1.0).any()


# Together


def test_dead_units_are_paid_nothing(pairs):
    put(pairs, 0, hit_points=0.0)
    before = pairs.state
    put(pairs, 2, hit_points=0.0)
    status = pairs.state.status._replace(score=torch.tensor([[1.0, 0.0]]))
    after = pairs.state._replace(status=status)
    step_events = damage_table((0, 2, 1.0), (0, 1, 0.2))  # by what was still in the air
    parts = pay(before, after, step_events, ending(0), pairs.tables, pairs.config)
    assert all(part[0, 0] == 0 for part in parts)
    assert shared(parts, before.units, pairs.config)[0, 0] == 0


def test_parts_are_weighted_by_the_config(pairs):
    before = pairs.state
    put(pairs, 2, hit_points=0.0)
    status = pairs.state.status._replace(score=torch.tensor([[2.0, 0.0]]))
    after = pairs.state._replace(status=status)
    parts = pay(before, after, damage_table((0, 2, 0.5)), ending(0), pairs.tables, pairs.config)
    weights = pairs.config.reward
    assert parts.zone[0].tolist() == pytest.approx([2 * weights.zone] * 2 + [-2 * weights.zone_lost] * 2)
    assert parts.damage[0].tolist() == pytest.approx([0.5 * weights.damage, 0, 0, 0])
    assert parts.hurt[0].tolist() == pytest.approx([0, 0, -0.5 * weights.hurt, 0])
    assert parts.kill[0].tolist() == pytest.approx([weights.kill, 0, 0, 0])
    assert parts.death[0].tolist() == pytest.approx([0, 0, -weights.death, 0])
    assert parts.outcome[0].tolist() == pytest.approx([weights.outcome, weights.outcome, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_sharing_redistributes_rewards_and_keeps_their_sum(share):
    arena = flat_arena("medium", "light", reward=ArenaRewardConfig(team_share=share))
    ones = torch.ones(1, 4)
    parts = Rewards(*(ones * 0 for _ in Rewards._fields))._replace(damage=torch.tensor([[0.6, 0.2, 0.0, -0.4]]), death=-ones)
    paid = shared(parts, arena.state.units, arena.config)
    team = paid.view(2, 2).sum(1).tolist()
    assert team == pytest.approx([0.8 - 2, -0.4 - 2])
    assert paid[0, 0] == pytest.approx(0.6 * (1 - share) + 0.4 * share - 1)
    put(arena, 1, hit_points=0.0)
    parts = parts._replace(damage=torch.tensor([[0.6, 0.0, 0.0, 0.0]]), death=ones * 0)
    assert shared(parts, arena.state.units, arena.config)[0].tolist() == pytest.approx([0.6, 0, 0, 0])


def test_a_shot_is_paid_by_the_damage_it_does():
    arena = flat_arena("medium", reward=ArenaRewardConfig(approach=0.0, zone=0.0))
    place(arena, 0, -3.0, 0.5)
    place(arena, 1, 3.0, 0.5, heading=math.pi)
    look(arena)
    before = float(arena.state.units.hit_points[0, 1])
    result = arena.step(make_actions(arena, {0: {"fire": "laser", "target": 1}}))
    lost = before - float(arena.state.units.hit_points[0, 1])
    assert lost == 14.0
    weights, share = arena.config.reward, lost / CLASSES["medium"].hit_points
    assert result.reward[0, 0] == pytest.approx(weights.damage * share)
    assert result.reward[0, 1] == pytest.approx(-weights.hurt * share)


def test_the_last_shot_pays_damage_kill_and_outcome():
    arena = flat_arena("medium", reward=ArenaRewardConfig(approach=0.0, zone=0.0))
    place(arena, 0, -3.0, 0.5)
    place(arena, 1, 3.0, 0.5, heading=math.pi)
    put(arena, 1, hit_points=7.5)
    look(arena)
    result = arena.step(make_actions(arena, {0: {"fire": "laser", "target": 1}}))
    assert (bool(result.ended[0]), int(result.winner[0])) == (True, 0)
    weights, share = arena.config.reward, 7.5 / 150
    won = weights.damage * share + weights.kill + weights.outcome
    assert result.reward[0].tolist() == pytest.approx([won, -weights.hurt * share - weights.death])


# Behaviour that never pays


def test_friendly_fire_never_pays():
    """Shots into the back of a friend who stands before the target."""
    arena = flat_arena("medium", "medium", reward=ArenaRewardConfig(approach=0.0, zone=0.0))
    place(arena, 0, -6.0, 0.5)
    place(arena, 1, -3.0, 0.5)  # in the line of fire
    place(arena, 2, 3.0, 0.5)
    place(arena, 3, 10.0, 10.0)
    put(arena, 1, hit_points=1.0)
    look(arena)
    result = arena.step(make_actions(arena, {0: {"fire": "autocannon", "target": 2}}))
    assert result.died[0].tolist() == [False, True, False, False]
    assert float(result.step_events.taken[0, 0, 1]) > 0
    assert result.parts.damage[0, 0] < 0
    assert result.parts.kill[0, 0] == result.parts.assist[0, 0] == 0
    assert result.reward[0, 0] < 0
    assert (result.reward[0, 2:] == 0).all()  # nor are enemies paid for what was not their doing


def test_killing_oneself_never_pays():
    """The approach reward at a death only pays back earlier ones: without it only costs are left, and no unit earns more than by living."""
    arena = flat_arena("medium")
    place(arena, 0, -11.0, -11.0)
    put(arena, 0, hit_points=0.1)
    build(arena, (-12, -10), (-12, -10), Material.LAVA)
    look(arena)
    before = arena.state
    result = arena.step(make_actions(arena))
    assert bool(result.died[0, 0])
    without = result.parts._replace(approach=torch.zeros(1, 2))
    assert shared(without, before.units, arena.config)[0, 0] == pytest.approx(-arena.config.reward.death)
    owed = -arena.config.reward.approach * nearness(before.units, before.world)[0, 0]
    assert result.parts.approach[0, 0] == pytest.approx(float(owed))
    assert not result.parts.outcome[0, 0]


@pytest.mark.slow
def test_dying_does_not_avoid_the_cost_of_a_lost_zone():
    """With the weights as they are, living on while the other side holds the zone costs nothing, and dying does."""
    arena = flat_arena("medium", reward=ArenaRewardConfig(approach=0.0))
    place(arena, 0, -11.0, -11.0)
    place(arena, 1, 0.5, 0.5)
    look(arena)
    paid = [float(arena.step(make_actions(arena)).reward[0, 0]) for _ in range(8)]
    assert arena.state.status.score[0].tolist() == pytest.approx([0.0, 2.0])
    assert paid == [0.0] * 8


def test_a_burst_at_ones_own_feet_costs(pairs):
    """Even where it hurts an enemy as much."""
    burst, weights = damage_table((0, 0, 0.3), (0, 2, 0.3)), pairs.config.reward
    paid = damage_dealt(burst, pairs.tables, weights) - weights.hurt * damage_suffered(burst)
    assert paid[0, 0] < 0


@pytest.mark.slow
def test_the_discounted_approach_rewards_of_a_unit_sum_to_minus_its_initial_potential():
    """Discounted, over a unit's life, it is the potential of the start with its sign changed, whatever the unit does."""
    config = small_config(team_size=2, pack=("medium", "scout"), seconds=2.5, size=16)
    arena = Arena(config)
    bot = Bot("middle", arena)
    arena.reset()
    owed = -config.reward.approach * nearness(arena.state.units, arena.state.world)
    put(arena, 3, hit_points=0.0)  # nothing is owed to the dead
    owed[0, 3] = 0.0
    total, discount, has_died = torch.zeros(1, 4), 1.0, False
    for decision in range(config.decisions):
        if decision == 5:
            put(arena, 1, hit_points=1e-4)
            build(arena, (-8, 8), (-8, 8), Material.LAVA)  # of which it dies
        result = arena.step(bot.act())
        total += discount * result.parts.approach
        discount *= config.reward.gamma
        has_died |= bool(result.died[0, 1])
    assert has_died
    assert bool(result.ended[0])
    torch.testing.assert_close(total, owed, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_rewards_are_the_sum_of_their_parts_in_play():
    config = small_config(team_size=2, pack=("medium", "light"), size=16, battles=2, maps=2)
    arena = Arena(config)
    bot = Bot("weak", arena)
    arena.reset()
    for unit, (x, y) in enumerate(((-3.0, -2.0), (-3.0, 2.0), (3.0, 2.0), (3.0, -2.0))):
        place(arena, unit, x, y)
    look(arena)
    has_hurt = False
    for _ in range(10):
        result = arena.step(bot.act())
        everything = torch.stack(list(result.parts)).sum((0, 2))
        torch.testing.assert_close(result.reward.sum(1), everything, atol=1e-5, rtol=0)
        has_hurt |= bool(result.parts.damage.any())
    assert has_hurt
