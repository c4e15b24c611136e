"""Batches of battles: fairness, reproducibility, independence, and refused settings and actions."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from esper.arena.arena import Arena, no_actions
from esper.arena.config import ArenaConfig, Landscape
from esper.arena.decision import decide
from esper.arena.map_columns import columns, read
from esper.arena.orders import action_masks, read_orders
from esper.arena.rewards import Rewards, pay
from esper.arena.specs import CLASSES, PHYSICS
from esper.arena.start import fresh
from esper.arena.state import State, cloned, named_tensors, state_hash
from esper.arena.terrain import LANDSCAPES
from esper.arena.zone import find_ended
from esper.config import ConfigError
from esper.vecenv import Actions
from tests.arena.worlds import (
    WEAPON,
    assert_identical,
    flat_arena,
    half_turned,
    make_actions,
    place,
    put,
    random_actions,
    select_battles,
    small_config,
    tables_in_double,
    to_double,
)

ALL = tuple(CLASSES)


def scatter_units(arena: Arena, generator: torch.Generator) -> None:
    """Scatter all units in the middle of the map, so that they have targets."""
    units, size = arena.state.units, arena.config.size
    place_of = (torch.rand(*units.heat.shape, 2, generator=generator) - 0.5) * 0.7 * size
    z = read(arena.state.world.floor, columns(place_of[..., 0], place_of[..., 1], size))
    heading = (torch.rand(units.heat.shape, generator=generator) - 0.5) * 2 * math.pi
    units = units._replace(position=torch.cat((place_of, z.unsqueeze(-1)), -1), heading=heading)
    arena.state = arena._sensed(arena.state._replace(units=units))


def attacking_actions(arena: Arena, generator: torch.Generator) -> Actions:
    """Random, but forward, and firing whatever can be fired."""
    actions = random_actions(arena, generator)
    actions["motion"][:, 0] = actions["motion"][:, 0].abs()
    can_fire = action_masks(arena.state.senses, arena.state.units, arena.tables)["fire"].float()
    can_fire[:, 0] = 0.1
    actions["fire"] = torch.multinomial(can_fire, 1, generator=generator)[:, 0]
    actions["target"] = actions["target"] * 0
    actions["vent"] = actions["vent"] * (torch.rand(len(can_fire), generator=generator) < 0.1)
    return actions


def with_teams_swapped(actions: Actions, config: ArenaConfig) -> Actions:
    shape = (config.battles, config.units)
    return {name: value.view(*shape, *value.shape[1:]).roll(config.team_size, 1).reshape(value.shape) for name, value in actions.items()}


def assert_near(state: State, expected: State, *, tolerance: float) -> None:
    """Compare up to rounding, without free slots."""
    wanted = dict(named_tensors(expected))
    flies = state.shells.life > 0
    for name, tensor in named_tensors(state):
        given, due = tensor.double(), wanted[name].double()
        if name == "units/heading":
            given, due = torch.sin((given - due) / 2), torch.zeros_like(due)
        if name.startswith("shells/"):
            matters = flies.view(*flies.shape, *(1,) * (due.dim() - 3))
            given, due = given * matters, due * matters
        if name == "senses/contacts":
            given, due = given * state.senses.is_contact, due * state.senses.is_contact
        assert torch.allclose(given, due, atol=tolerance, rtol=tolerance), f"{name} is off by {(given - due).abs().max()}"


def assert_fair(config: ArenaConfig, seed: int, decisions: int) -> None:
    """The world turned by half a turn and the teams swapped: everything that happens is turned and swapped too.

    Bodies that touch magnify rounding; with twice the digits it stays far below what an unfair rule would do.
    """
    generator = torch.Generator().manual_seed(seed)
    arena = Arena(config, seed=seed)
    scatter_units(arena, generator)
    arena.tables, arena.state = tables_in_double(arena.tables), to_double(arena.state)

    def decided(state: State, actions: Actions) -> tuple[State, Rewards]:
        orders = read_orders(actions, state.senses, state.units, arena.tables, battles=config.battles)
        after, step_events = decide(state, orders, arena.tables)
        parts = pay(state, after, step_events, find_ended(after.status, after.units, config), arena.tables, config)
        return arena._sensed(after), parts

    other = half_turned(arena.state)
    for _ in range(decisions):
        actions = attacking_actions(arena, generator)
        actions["motion"] = actions["motion"].double()
        arena.state, paid = decided(arena.state, actions)
        other, paid_other = decided(other, with_teams_swapped(actions, config))
        assert_near(other, half_turned(arena.state), tolerance=1e-8)
        for name, part in paid._asdict().items():
            assert torch.allclose(getattr(paid_other, name).roll(config.team_size, 1), part, atol=1e-8), name
    units = arena.state.units
    assert (units.hit_points < 0.9 * arena.tables.units.hit_points).any(), "nobody was hurt, so little was shown"


@pytest.mark.slow
def test_neither_side_is_favoured() -> None:
    config = small_config(battles=10, team_size=4, pack=ALL, maps=10, contacts=3)
    assert len(set(Arena(config, seed=1).state.status.map.tolist())) >= 5
    assert_fair(config, seed=1, decisions=12)


@pytest.mark.slow
@pytest.mark.parametrize("landscape", LANDSCAPES)
def test_neither_side_is_favoured_in_any_landscape(landscape: Landscape) -> None:
    config = ArenaConfig(battles=8, team_size=5, size=32, maps=8, landscapes=(landscape,))
    assert_fair(config, seed=2, decisions=24)


@pytest.mark.slow
def test_a_battle_does_not_depend_on_the_others_in_its_batch() -> None:
    config = small_config(battles=8, team_size=2, pack=("medium", "scout"), maps=4)
    generator = torch.Generator().manual_seed(0)
    arena, mixed = Arena(config), Arena(config)
    scatter_units(arena, generator)
    order = torch.randperm(8, generator=generator)
    mixed.state = select_battles(arena.state, order)
    for _ in range(6):
        actions = attacking_actions(arena, generator)
        arena.step(actions)
        mixed.step({name: value.view(8, 4, *value.shape[1:])[order].reshape(value.shape) for name, value in actions.items()})
    assert_identical(mixed.state, select_battles(arena.state, order))


@pytest.mark.slow
def test_a_battle_alone_is_fought_as_in_a_batch() -> None:
    settings = {"team_size": 2, "pack": ("medium", "scout"), "maps": 3}
    many, alone = Arena(small_config(battles=4, **settings), seed=5), Arena(small_config(battles=1, **settings), seed=5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        actions = attacking_actions(many, generator)
        many.step(actions)
        alone.step({name: value[:4] for name, value in actions.items()})
    assert_near(alone.state, select_battles(many.state, torch.tensor([0])), tolerance=1e-4)


@pytest.mark.slow
def test_the_same_seed_and_actions_lead_to_the_same_battles_bit_for_bit() -> None:
    config = small_config(battles=2, team_size=2, pack=("medium", "light"), maps=3, seconds=1.0)
    hashes = []
    for seed in (7, 7, 8):
        arena, generator = Arena(config, seed=seed), torch.Generator().manual_seed(0)
        for _ in range(6):  # past the end of the first battles
            arena.step(random_actions(arena, generator))
        assert arena.state.status.episode.tolist() == [1, 1]
        hashes.append([state_hash(arena.state, battle) for battle in range(2)])
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]
    assert hashes[0][0] != hashes[0][1]


def test_the_state_hash_changes_with_every_field() -> None:
    arena = flat_arena()
    before = state_hash(arena.state, 0)
    put(arena, 1, heat=1e-6)
    assert state_hash(arena.state, 0) != before


@pytest.mark.slow
def test_a_battle_saved_in_the_middle_continues_in_the_same_way() -> None:
    config = small_config(battles=2, team_size=2, pack=("medium", "light"), maps=3, seconds=2.0)
    arena, generator = Arena(config, seed=1), torch.Generator().manual_seed(0)
    for _ in range(4):
        arena.step(attacking_actions(arena, generator))
    saved = arena.state_dict()
    later = [attacking_actions(arena, generator) for _ in range(6)]
    for actions in later:
        arena.step(actions)
    other = Arena(config, seed=99)
    other.load_state_dict(saved)
    for actions in later:
        other.step(actions)
    assert other.seed == 1
    assert_identical(other.state, arena.state)
    assert arena.state.status.episode.tolist() == [1, 1]


@pytest.mark.slow
def test_a_reset_begins_the_same_battles_again_and_another_seed_others() -> None:
    arena = Arena(small_config(battles=2, maps=4), seed=1)
    start = arena.state
    arena.step(no_actions(arena.config))
    arena.reset()
    assert_identical(arena.state, start)
    arena.reset(seed=2)
    assert not torch.equal(arena.state.world.height, start.world.height)
    arena.reset(seed=1)
    assert_identical(arena.state, start)


@pytest.mark.slow
def test_a_battle_that_ends_begins_anew_in_its_place_and_the_others_go_on() -> None:
    config = small_config(battles=4, maps=4, team_size=2, pack=("medium", "light"))
    arena, other = Arena(config, seed=1), Arena(config, seed=1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        actions = random_actions(arena, generator)
        arena.step(actions)
        other.step(actions)
    hit_points = arena.state.units.hit_points.clone()
    hit_points[2, :2] = 0.0
    arena.state = arena.state._replace(units=arena.state.units._replace(hit_points=hit_points))
    actions = random_actions(arena, generator)
    result = arena.step(actions)
    other.step(actions)

    assert result.ended.tolist() == [False, False, True, False]
    assert int(result.winner[2]) == 1
    assert not result.by_time.any()
    assert result.last[2].tolist()[3:] == [0, 2]
    next_battle = fresh(torch.tensor([2]), torch.tensor([1]), config, arena.tables, arena.atlas, seed=1, largest_team=arena.largest_team)
    assert_identical(select_battles(arena.state, torch.tensor([2])), arena._sensed(next_battle))
    rest = torch.tensor([0, 1, 3])
    assert_identical(select_battles(arena.state, rest), select_battles(other.state, rest))
    for part, maps in zip(arena.state.world, arena.atlas.worlds, strict=True):
        assert torch.equal(part[2], maps[arena.state.status.map[2]])


def test_destroyed_terrain_stays_destroyed_in_that_battle_only() -> None:
    arena = Arena(small_config(battles=2, landscapes=("city",)))
    original = arena.atlas.worlds.hit_points.clone()
    world = arena.state.world
    arena.state = arena.state._replace(world=world._replace(hit_points=world.hit_points.clamp_max(1)))
    arena.step(no_actions(arena.config))
    assert torch.equal(arena.atlas.worlds.hit_points, original)
    assert arena.state.world.hit_points.max() == 1
    arena.reset()
    assert torch.equal(arena.state.world.hit_points[0], original[0])


@pytest.mark.slow
def test_a_battle_without_actions_ends_by_time_as_a_draw() -> None:
    arena = Arena(small_config(seconds=2.0))
    for decision in range(1, 9):
        result = arena.step(no_actions(arena.config))
        assert bool(result.ended[0]) == (decision == 8)
    assert result.by_time[0]
    assert int(result.winner[0]) == -1
    assert arena.state.status.episode.tolist() == [1]
    assert arena.state.status.decision.tolist() == [0]


@pytest.mark.slow
def test_a_team_alone_in_the_zone_wins_after_half_of_the_seconds() -> None:
    arena = flat_arena(seconds=4.0)
    place(arena, 1, 0, 0)
    for decision in range(1, 9):
        result = arena.step(no_actions(arena.config))
        assert bool(result.ended[0]) == (decision == 8)
    assert int(result.winner[0]) == 1
    assert not result.by_time[0]
    assert result.last[0].tolist() == pytest.approx([8, 0, 2.0, 1, 1])


def test_two_units_that_kill_each_other_draw() -> None:
    arena = flat_arena()
    place(arena, 0, -2, 0)
    place(arena, 1, 2, 0, heading=math.pi)
    for unit in (0, 1):
        put(arena, unit, hit_points=5.0)
    arena.state = arena._sensed(arena.state)
    result = arena.step(make_actions(arena, {0: {"fire": "laser", "target": 1}, 1: {"fire": "laser", "target": 0}}))
    assert result.ended[0]
    assert int(result.winner[0]) == -1
    assert result.died[0].tolist() == [True, True]


@pytest.mark.slow
def test_absent_units_stay_absent_and_end_no_battle() -> None:
    arena = Arena(small_config(battles=6, team_size=2, pack=("medium", "scout"), smallest_team=1, seconds=2.0, maps=2), seed=2)
    generator = torch.Generator().manual_seed(0)
    assert not arena.state.units.present.all()
    for decision in range(1, 9):
        present = arena.state.units.present.clone()
        result = arena.step(random_actions(arena, generator))
        assert not (result.was_alive & ~present).any()
        assert not result.reward[~present].any()
        assert bool(result.ended.all()) == (decision == 8)


@pytest.mark.slow
def test_the_largest_team_can_be_changed_for_battles_to_come() -> None:
    arena = Arena(small_config(battles=2, team_size=2, pack=("medium", "scout"), seconds=0.5, maps=2))
    arena.set_largest_team(1)
    assert arena.state.units.present.all()
    for _ in range(2):
        arena.step(no_actions(arena.config))
    assert arena.state.units.present.int().tolist() == [[1, 0, 1, 0]] * 2
    with pytest.raises(ValueError, match="1 to 2 units; got 3"):
        arena.set_largest_team(3)


def assert_in_range(arena: Arena) -> None:
    units, world, table = arena.state.units, arena.state.world, arena.tables.units
    for name, tensor in named_tensors(arena.state):
        if tensor.dtype == torch.float32 and name != "world/route_m":
            assert torch.isfinite(tensor).all(), name

    def within(values: Tensor, low: Tensor | float, high: Tensor | float, name: str) -> None:
        assert (values >= low).all(), f"{name} fell to {values.min()}"
        assert (values <= high).all(), f"{name} rose to {values.max()}"

    edge = arena.config.size / 2
    within(units.heat, 0.0, table.heat_cap * PHYSICS.heat_limit_share, "heat")
    within(units.stability, 0.0, PHYSICS.stability, "stability")
    within(units.hit_points, 0.0, table.hit_points, "hit points")
    within(units.legs, 0.0, table.legs, "legs")
    within(units.fuel, 0.0, PHYSICS.fuel_s, "fuel")
    within(units.heading, -math.pi - 1e-6, math.pi + 1e-6, "heading")
    within(units.position[..., :2], -edge + PHYSICS.radius_m, edge - PHYSICS.radius_m, "position")
    within(units.position[..., 2], 0.0, PHYSICS.ceiling_m, "height")
    ground = read(world.floor, columns(units.position[..., 0], units.position[..., 1], arena.config.size))
    within(units.position[..., 2] - ground, -1e-4, PHYSICS.ceiling_m, "height above the ground")
    within(torch.linalg.vector_norm(units.velocity[..., :2], dim=-1), 0.0, table.max_speed * 1.001, "speed")
    within(units.cooldown, 0, arena.tables.weapons.cooldown, "cooldown")
    within(units.harm, 0, 200, "harm")
    within(world.hit_points, 0, 100, "hit points of columns")
    within(arena.state.status.score, 0.0, arena.config.seconds, "score")
    assert not arena.state.status.overflow.any()
    assert not (units.is_shut_down & ~units.is_alive).any()


def play_at_random(arena: Arena, agent_steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scatter_units(arena, generator)
    done = ended = 0
    while done < agent_steps:
        actions = random_actions(arena, generator)
        if ended % 2 == 0:
            actions["target"] = actions["target"] % 2  # where contacts are more often than not
        result = arena.step(actions)
        done += int(result.was_alive.sum())
        ended += int(result.ended.sum())
        assert torch.isfinite(result.reward).all()
        assert torch.isfinite(result.observation).all()
        assert result.last[:, 0].max() <= arena.config.decisions
        assert_in_range(arena)
    assert ended > 0


@pytest.mark.slow
def test_everything_stays_in_its_range_in_random_play() -> None:
    play_at_random(Arena(small_config(battles=128, team_size=4, pack=ALL, maps=8, contacts=3, seconds=2.0)), agent_steps=20_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_stays_in_its_range_in_many_random_agent_steps() -> None:
    play_at_random(Arena(ArenaConfig(battles=24, team_size=5, maps=24, size=32, seconds=25.0)), agent_steps=25_000)


@pytest.mark.slow
def test_no_shot_is_lost_when_everybody_fires_for_twenty_seconds() -> None:
    """Two lines that face each other; nobody overheats, dies, falls or leaves. Whatever is loaded goes off.

    The longest flight takes five seconds, and so does the longest cooldown.
    """
    arena = flat_arena(*ALL, "medium", contacts=5, seconds=200.0)
    for unit in range(10):
        side = -1 if unit < 5 else 1
        place(arena, unit, 2.0 * side, 2.4 * (unit % 5 - 2), heading=0.0 if unit < 5 else math.pi)
    start, kits = arena.state.units, [CLASSES[name].weapons for name in arena.config.unit_classes]
    fired = 0
    for _ in range(80):
        now = arena.state.units
        arena.state = arena._sensed(arena.state._replace(units=start._replace(cooldown=now.cooldown, painted=now.painted)))
        ready = [[name for name in kit if int(now.cooldown[0, row, WEAPON[name]]) < 5] for row, kit in enumerate(kits)]
        loaded = {row: {"fire": names[-1], "target": (row + 5) % 10} for row, names in enumerate(ready) if names}
        orders = read_orders(make_actions(arena, loaded), arena.state.senses, arena.state.units, arena.tables, battles=1)
        arena.state, step_events = decide(arena.state, orders, arena.tables)
        fired += int(step_events.fired.sum())
        assert not arena.state.status.overflow.any()
    assert fired > 200


def wrong(arena: Arena, **heads: Tensor) -> Actions:
    return {**no_actions(arena.config), **heads}


def refused(arena: Arena, actions: Actions) -> str:
    before, copy = arena.state, cloned(arena.state)
    with pytest.raises(ValueError) as error:
        arena.step(actions)
    assert arena.state is before
    assert_identical(arena.state, copy)
    return str(error.value)


def test_actions_of_a_wrong_shape_or_type_are_refused_and_change_nothing() -> None:
    arena = flat_arena("medium", "scout", battles=3)
    rows = 3 * 4
    assert "'motion' should have shape (12, 4), one row for each of 4 units in 3 battles; got (12, 3)" in refused(
        arena, wrong(arena, motion=torch.zeros(rows, 3))
    )
    assert "'fire' should have shape (12,)" in refused(arena, wrong(arena, fire=torch.zeros(4, dtype=torch.int64)))
    assert "convert it with .to(torch.int64)" in refused(arena, wrong(arena, target=torch.zeros(rows)))
    assert "'motion' should be of type torch.float32; got torch.float64" in refused(
        arena, wrong(arena, motion=torch.zeros(rows, 4, dtype=torch.float64))
    )
    actions = no_actions(arena.config)
    del actions["vent"]
    assert "vent" in refused(arena, actions)
    assert "jump" in refused(arena, {**no_actions(arena.config), "jump": torch.zeros(rows)})


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.01, -1.01])
def test_an_impossible_motion_is_refused_with_battle_and_unit(value: float) -> None:
    arena = flat_arena("medium", "scout", battles=3)
    motion = torch.zeros(12, 4)
    motion[2 * 4 + 3, 1] = value
    message = refused(arena, wrong(arena, motion=motion))
    assert message.startswith("battle 2, unit 3 (scout of team 1): motion is")
    assert "clamp it" in message


@pytest.mark.parametrize(("head", "value", "highest"), [("fire", 8, 7), ("fire", -1, 7), ("target", 2, 1), ("vent", 2, 1)])
def test_a_choice_that_does_not_exist_is_refused_with_battle_and_unit(head: str, value: int, highest: int) -> None:
    arena = flat_arena("medium", "scout", battles=3)
    choice = torch.zeros(12, dtype=torch.int64)
    choice[4 + 2] = value
    message = refused(arena, wrong(arena, **{head: choice}))
    assert message == f"battle 1, unit 2 (medium of team 1): {head} is {value}, but must be from 0 to {highest}"


@pytest.mark.slow
def test_the_ends_of_the_ranges_are_accepted() -> None:
    arena = flat_arena("medium", "scout")
    ones = torch.ones(4, 4)
    arena.step(wrong(arena, motion=ones, fire=torch.full((4,), 7), target=torch.ones(4, dtype=torch.int64)))
    arena.step(wrong(arena, motion=-ones))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pack": ("medium", "scot")}, "no unit class is named 'scot'.*did you mean 'scout'"),
        ({"pack": ()}, "at least one unit class"),
        ({"landscapes": ()}, "at least one landscape"),
        ({"team_size": 2, "smallest_team": 3}, "at most team_size"),
        ({"size": 14}, "size"),
        ({"size": 33}, "size"),
        ({"team_size": 17}, "team_size"),
        ({"seconds": 0.1}, "at least one decision"),
    ],
)
def test_impossible_arena_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(message)):
        small_config(**settings)


def test_a_state_of_other_battles_is_refused() -> None:
    arena = flat_arena()
    saved = flat_arena("medium", "scout").state_dict()
    before = arena.state
    with pytest.raises(ValueError, match="should be"):
        arena.load_state_dict(saved)
    assert arena.state is before
    saved["state"].pop("units/heat")
    with pytest.raises(ValueError, match="missing: \\['units/heat'\\], unknown: \\[\\]"):
        arena.load_state_dict(saved)
