"""Batches of battles: fairness, reproducibility, independence, and refused settings and actions."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from esper.arena.arena import Arena, no_actions
from esper.arena.bots import Bot
from esper.arena.config import ArenaConfig, Landscape
from esper.arena.native import layout as at
from esper.arena.native.simulation import DECIDE_ONLY, Saved, Simulation
from esper.arena.specs import CLASSES, PHYSICS
from esper.arena.terrain import LANDSCAPES
from esper.config import ConfigError
from esper.devices import threads
from esper.vecenv import Actions
from tests.arena.worlds import (
    WEAPON,
    assert_identical,
    decide,
    flat_arena,
    floors_of_maps,
    hash_of,
    place,
    put,
    random_actions,
    saved,
    select_battles,
    small_config,
)

ALL = tuple(CLASSES)


def floors(arena: Arena) -> Tensor:
    """Return the height of the ground below every unit [B, U]."""
    unit, status, size = arena.simulation.unit, arena.simulation.status, arena.config.size
    i, j = ((unit[axis] + size / 2).floor().long().clamp(0, size - 1) for axis in (at.X, at.Y))
    maps, column = status[at.MAP].long().unsqueeze(1), i * size + j
    is_gone = arena.simulation.state["worn"].gather(1, column) == at.DESTROYED
    return torch.where(is_gone, 0.0, floors_of_maps(arena)[maps, column])


def scatter_units(arena: Arena, generator: torch.Generator) -> None:
    """Scatter all units in the middle of the map, so that they have targets."""
    unit = arena.simulation.unit
    shape = unit.shape[1:]
    for axis in (at.X, at.Y):
        unit[axis] = (torch.rand(shape, generator=generator) - 0.5) * 0.7 * arena.config.size
    unit[at.Z] = floors(arena)
    heading = (torch.rand(shape, generator=generator) - 0.5) * 2 * math.pi
    unit[at.COS], unit[at.SIN] = heading.cos(), heading.sin()
    arena.look()


def attacking_actions(arena: Arena, generator: torch.Generator) -> Actions:
    """Random, but forward, and firing whatever can be fired."""
    actions = random_actions(arena, generator)
    actions["motion"][:, 0] = actions["motion"][:, 0].abs()
    can_fire = arena.simulation.views["fire"].float()
    can_fire[:, 0] = 0.1
    actions["fire"] = torch.multinomial(can_fire, 1, generator=generator)[:, 0]
    actions["target"] = actions["target"] * 0
    actions["vent"] = actions["vent"] * (torch.rand(len(can_fire), generator=generator) < 0.1)
    return actions


def half_turned(state: Saved, config: ArenaConfig) -> Saved:
    """Return battles after half a turn of the world, with the teams in one another's place. Maps are the same after half a turn."""
    team, units, size = config.team_size, config.units, config.size
    turned = {name: tensor.roll(team, -1) for name, tensor in state.items() if name in ("unit", "number", "cooldown", "harm", "contact")}
    turned |= {name: state[name].roll(team, 2) for name in ("shell", "shell_count", "cloud")}
    turned["harm"] = turned["harm"].roll(team, 1)
    turned["cloud_left"] = state["cloud_left"].roll(team, 1)
    turned["worn"] = state["worn"].view(-1, size, size).flip(1, 2).flatten(1)
    turned["status"], turned["seed"] = state["status"].clone(), state["seed"]
    turned["unit"][:, [at.X, at.Y, at.VELOCITY_X, at.VELOCITY_Y, at.COS, at.SIN, at.PUSH_X, at.PUSH_Y]] *= -1
    turned["shell"][:, [at.SHELL_X, at.SHELL_Y, at.SHELL_VX, at.SHELL_VY]] *= -1
    turned["cloud"][:, :2] *= -1

    def other(unit: Tensor) -> Tensor:
        return torch.where(unit >= 0, (unit + team) % units, unit)

    turned["contact"] = other(turned["contact"])
    turned["number"][:, at.TARGET] = other(turned["number"][:, at.TARGET])
    turned["shell_count"][:, at.SHELL_TARGET] = other(turned["shell_count"][:, at.SHELL_TARGET])
    status = turned["status"]
    for first in (at.HELD, at.OLD_HELD):
        status[:, [first, first + 1]] = status[:, [first + 1, first]]
    status[:, at.HOLDER] = torch.where(status[:, at.HOLDER] >= 0, 1 - status[:, at.HOLDER], -1)
    return turned


def assert_fair(config: ArenaConfig, seed: int, decisions: int) -> None:
    """The world turned by half a turn and the teams swapped: everything that happens is turned and swapped too.

    Sums over units are rounded in another order then, and a tie at a threshold may fall otherwise, so one unit in 500 may differ.
    """
    generator = torch.Generator().manual_seed(seed)
    arena = Arena(config, seed=seed)
    scatter_units(arena, generator)
    other = Simulation(config, arena.grids, battles=config.battles, device=arena.device)
    compared = wrong = 0
    hurt = False
    for _ in range(decisions):
        before = saved(arena)
        actions = attacking_actions(arena, generator)
        other.load(half_turned(before, config))
        for name, value in actions.items():
            rows = value.view(config.battles, config.units, *value.shape[1:]).roll(config.team_size, 1)
            other.actions[name].copy_(rows.reshape(value.shape))
            arena.simulation.actions[name].copy_(value)
        arena.simulation.run(DECIDE_ONLY)
        other.run(DECIDE_ONLY)
        expected, found = half_turned(saved(arena), config), other.saved(range(config.battles))
        for name, dimension in (("unit", 1), ("number", 1), ("contact", 1)):
            given, due = (state[name].double().movedim(dimension, -1) for state in (found, expected))
            if name == "unit":
                given, due = given[..., : at.FORWARD], due[..., : at.FORWARD]
            is_off = ((given - due).abs() > 1e-3 * (1 + due.abs())).any(-1)
            compared, wrong = compared + is_off.numel(), wrong + int(is_off.sum())
        paid = arena.simulation.state["reward"].roll(config.team_size, 2) - other.state["reward"]
        compared, wrong = compared + paid[0].numel(), wrong + int((paid.abs() > 1e-3).any(0).sum())
        hurt = hurt or bool((arena.simulation.unit[at.HIT_POINTS] < 0.9 * arena.simulation.tables.unit[at.FULL_HIT_POINTS]).any())
    assert wrong <= compared / 500, f"{wrong} of {compared} differ"
    assert hurt, "nobody was hurt, so little was shown"


@pytest.mark.slow
def test_neither_side_is_favoured() -> None:
    config = small_config(battles=10, team_size=4, pack=ALL, maps=10, contacts=3)
    assert len(set(Arena(config, seed=1).simulation.status[at.MAP].tolist())) >= 5
    assert_fair(config, seed=1, decisions=24)


@pytest.mark.slow
@pytest.mark.parametrize("landscape", LANDSCAPES)
def test_neither_side_is_favoured_in_any_landscape(landscape: Landscape) -> None:
    config = ArenaConfig(battles=8, team_size=5, size=32, maps=8, landscapes=(landscape,))
    assert_fair(config, seed=2, decisions=48)


def rows_of(value: Tensor, battles: Tensor, units: int) -> Tensor:
    """Return the rows of these battles, given those of all."""
    return value.view(-1, units, *value.shape[1:])[battles].flatten(0, 1)


@pytest.mark.slow
def test_a_battle_depends_neither_on_its_place_nor_on_the_size_of_the_batch() -> None:
    config = small_config(battles=8, team_size=2, pack=("medium", "scout"), maps=4)
    generator = torch.Generator().manual_seed(0)
    arena = Arena(config)
    scatter_units(arena, generator)
    order = torch.tensor([6, 1, 3])
    few = Simulation(config, arena.grids, battles=3, device=arena.device)
    few.load(select_battles(saved(arena), order))
    for _ in range(12):
        actions = attacking_actions(arena, generator)
        arena.step(actions)
        for name, value in actions.items():
            few.actions[name].copy_(rows_of(value, order, 4))
        few.run(DECIDE_ONLY)
    assert_identical(few.saved(range(3)), select_battles(saved(arena), order))


@pytest.mark.slow
def test_the_same_battles_are_fought_in_a_larger_arena_of_the_same_seed() -> None:
    settings = {"team_size": 2, "pack": ("medium", "scout"), "maps": 3, "seconds": 1.0}
    many, few = Arena(small_config(battles=5, **settings), seed=5), Arena(small_config(battles=2, **settings), seed=5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):  # past the end of the first battles
        actions = attacking_actions(many, generator)
        many.step(actions)
        few.step({name: value[:8] for name, value in actions.items()})
    assert few.simulation.status[at.EPISODE].tolist() == [1, 1]
    assert_identical(saved(few), select_battles(saved(many), torch.arange(2)))


@pytest.mark.slow
def test_the_number_of_threads_does_not_matter() -> None:
    hashes = []
    for count in (1, 2, 3):
        with threads(count):
            arena = Arena(small_config(battles=7, team_size=2, pack=("medium", "light"), maps=3), seed=1)
            bot = Bot("strong", arena)
            for _ in range(12):
                arena.step(bot.act())
            hashes.append([hash_of(arena, battle) for battle in range(7)])
    assert hashes[0] == hashes[1] == hashes[2]


@pytest.mark.slow
def test_the_same_seed_and_actions_lead_to_the_same_battles_bit_for_bit() -> None:
    config = small_config(battles=2, team_size=2, pack=("medium", "light"), maps=3, seconds=1.0)
    hashes = []
    for seed in (7, 7, 8):
        arena, generator = Arena(config, seed=seed), torch.Generator().manual_seed(0)
        for _ in range(6):  # past the end of the first battles
            arena.step(random_actions(arena, generator))
        assert arena.simulation.status[at.EPISODE].tolist() == [1, 1]
        hashes.append([hash_of(arena, battle) for battle in range(2)])
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]
    assert hashes[0][0] != hashes[0][1]


def test_the_state_hash_changes_with_every_field() -> None:
    arena = flat_arena()
    before = hash_of(arena)
    put(arena, 1, heat=1e-6)
    assert hash_of(arena) != before


@pytest.mark.slow
def test_a_battle_saved_in_the_middle_continues_in_the_same_way() -> None:
    config = small_config(battles=2, team_size=2, pack=("medium", "light"), maps=3, seconds=2.0)
    arena, generator = Arena(config, seed=1), torch.Generator().manual_seed(0)
    for _ in range(4):
        arena.step(attacking_actions(arena, generator))
    kept = arena.state_dict()
    later = [attacking_actions(arena, generator) for _ in range(6)]
    for actions in later:
        arena.step(actions)
    other = Arena(config, seed=99)
    other.load_state_dict(kept)
    for actions in later:
        other.step(actions)
    assert other.seed == 1
    assert_identical(saved(other), saved(arena))
    assert arena.simulation.status[at.EPISODE].tolist() == [1, 1]


@pytest.mark.slow
def test_a_reset_begins_the_same_battles_again_and_another_seed_others() -> None:
    arena = Arena(small_config(battles=2, maps=4), seed=1)
    start, grids = saved(arena), arena.grids
    arena.step(no_actions(arena.config))
    arena.reset()
    assert_identical(saved(arena), start)
    arena.reset(seed=2)
    assert not torch.equal(arena.grids.height, grids.height)
    arena.reset(seed=1)
    assert torch.equal(arena.grids.height, grids.height)
    assert_identical(saved(arena), start)


@pytest.mark.slow
def test_a_battle_that_ends_begins_anew_in_its_place_and_the_others_go_on() -> None:
    config = small_config(battles=4, maps=4, team_size=2, pack=("medium", "light"))
    arena, other = Arena(config, seed=1), Arena(config, seed=1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        actions = random_actions(arena, generator)
        arena.step(actions)
        other.step(actions)
    arena.simulation.unit[at.HIT_POINTS, 2, :2] = 0.0
    actions = random_actions(arena, generator)
    result = arena.step(actions)
    other.step(actions)

    assert result.ended.tolist() == [False, False, True, False]
    assert int(result.winner[2]) == 1
    assert not result.by_time.any()
    assert result.last[2].tolist()[3:] == [0, 2]
    next_battle = Simulation(config, arena.grids, battles=1, device=arena.device)
    next_battle.begin(seed=1, largest_team=2, places=[2], episode=1)
    assert_identical(select_battles(saved(arena), torch.tensor([2])), next_battle.saved([0]))
    rest = torch.tensor([0, 1, 3])
    assert_identical(select_battles(saved(arena), rest), select_battles(saved(other), rest))


def test_destroyed_terrain_stays_destroyed_in_that_battle_only() -> None:
    arena = Arena(small_config(battles=2, landscapes=("city",)))
    solid = int(arena.simulation.maps.column[0, :, at.C_HIT_POINTS].nonzero()[0])
    arena.simulation.state["worn"][0, solid] = at.DESTROYED
    arena.step(no_actions(arena.config))
    assert arena.simulation.state["worn"][:, solid].tolist() == [at.DESTROYED, 0]
    arena.reset()
    assert not arena.simulation.state["worn"].any()


@pytest.mark.slow
def test_a_battle_without_actions_ends_by_time_as_a_draw() -> None:
    arena = Arena(small_config(seconds=2.0))
    for decision in range(1, 9):
        result = arena.step(no_actions(arena.config))
        assert bool(result.ended[0]) == (decision == 8)
    assert result.by_time[0]
    assert int(result.winner[0]) == -1
    assert arena.simulation.status[at.EPISODE].tolist() == [1]
    assert arena.simulation.status[at.DECISION].tolist() == [0]


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
    result = decide(arena, {0: {"fire": "laser", "target": 1}, 1: {"fire": "laser", "target": 0}})
    assert result.ended[0]
    assert int(result.winner[0]) == -1
    assert result.died[0].tolist() == [True, True]


@pytest.mark.slow
def test_absent_units_stay_absent_and_end_no_battle() -> None:
    arena = Arena(small_config(battles=6, team_size=2, pack=("medium", "scout"), smallest_team=1, seconds=2.0, maps=2), seed=2)
    generator = torch.Generator().manual_seed(0)
    present = arena.simulation.number[at.IS_PRESENT]
    assert not present.all()
    for decision in range(1, 9):
        is_absent = present == 0
        result = arena.step(random_actions(arena, generator))
        assert not (result.was_alive & is_absent).any()
        assert not result.reward[is_absent].any()
        assert bool(result.ended.all()) == (decision == 8)


@pytest.mark.slow
def test_the_largest_team_can_be_changed_for_battles_to_come() -> None:
    arena = Arena(small_config(battles=2, team_size=2, pack=("medium", "scout"), seconds=0.5, maps=2))
    present = arena.simulation.number[at.IS_PRESENT]
    arena.set_largest_team(1)
    assert present.all()
    for _ in range(2):
        arena.step(no_actions(arena.config))
    assert present.tolist() == [[1, 0, 1, 0]] * 2
    with pytest.raises(ValueError, match="1 to 2 units; got 3"):
        arena.set_largest_team(3)


def assert_in_range(arena: Arena) -> None:
    simulation, table = arena.simulation, arena.simulation.tables.unit
    unit, number = simulation.unit, simulation.number
    for name in ("unit", "shell", "cloud"):
        assert torch.isfinite(simulation.state[name]).all(), name

    def within(values: Tensor, low: Tensor | float, high: Tensor | float, name: str) -> None:
        assert (values >= low).all(), f"{name} fell to {values.min()}"
        assert (values <= high).all(), f"{name} rose to {values.max()}"

    edge = arena.config.size / 2
    within(unit[at.HEAT], 0.0, table[at.HEAT_CAP] * PHYSICS.heat_limit_share, "heat")
    within(unit[at.STABILITY], 0.0, PHYSICS.stability, "stability")
    within(unit[at.HIT_POINTS], 0.0, table[at.FULL_HIT_POINTS], "hit points")
    within(unit[at.LEGS], 0.0, table[at.FULL_LEGS], "legs")
    within(unit[at.FUEL], 0.0, PHYSICS.fuel_s, "fuel")
    within(unit[at.COS].square() + unit[at.SIN].square(), 1 - 1e-4, 1 + 1e-4, "length of the heading")
    for axis in (at.X, at.Y):
        within(unit[axis], -edge + PHYSICS.radius_m, edge - PHYSICS.radius_m, "position")
    within(unit[at.Z], 0.0, PHYSICS.ceiling_m, "height")
    within(unit[at.Z] - floors(arena), -1e-4, PHYSICS.ceiling_m, "height above the ground")
    within(unit[at.VELOCITY_X].hypot(unit[at.VELOCITY_Y]), 0.0, table[at.MAX_SPEED] * 1.001, "speed")
    within(simulation.state["cooldown"], 0, simulation.tables.weapon_count[at.W_COOLDOWN].view(-1, 1, 1), "cooldown")
    within(simulation.state["harm"], 0, 200, "harm")
    within(simulation.status[at.HELD : at.HELD_2 + 1] * PHYSICS.tick_s, 0.0, arena.config.seconds, "score")
    assert not arena.overflow.any()
    assert not ((number[at.IS_SHUT_DOWN] != 0) & ~arena.is_alive).any()


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
    simulation, start, kits = arena.simulation, arena.simulation.unit.clone(), [CLASSES[name].weapons for name in arena.config.unit_classes]
    fired = 0
    for _ in range(80):
        simulation.unit.copy_(start)
        for field in (at.FALLEN, at.SUPPRESSED, at.IS_SHUT_DOWN, at.IS_VENTING):
            simulation.number[field] = 0
        cooldown = simulation.state["cooldown"][:, 0]
        ready = [[name for name in kit if int(cooldown[WEAPON[name], row]) < 5] for row, kit in enumerate(kits)]
        decide(arena, {row: {"fire": names[-1], "target": (row + 5) % 10} for row, names in enumerate(ready) if names})
        fired += int(simulation.number[at.FIRED_ONCE].sum())
        assert not arena.overflow.any()
    assert fired > 200


def wrong(arena: Arena, **heads: Tensor) -> Actions:
    return {**no_actions(arena.config), **heads}


def refused(arena: Arena, actions: Actions) -> str:
    before = saved(arena)
    with pytest.raises(ValueError) as error:
        arena.step(actions)
    assert_identical(saved(arena), before)
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


def test_wrong_values_that_are_reported_later_are_replaced_by_valid_ones() -> None:
    arena = flat_arena("medium", "scout")
    arena._checks_later = True  # as on a GPU
    row = torch.tensor([-3.0, float("nan"), float("inf"), 0.5])
    actions = wrong(arena, motion=torch.stack([torch.zeros(4), torch.zeros(4), row, row]), fire=torch.tensor([0, 0, 99, -1]))
    given = {name: value.clone() for name, value in actions.items()}
    arena.step(actions)
    arena.step(wrong(arena, vent=torch.tensor([5, 0, 0, 0])))  # it is not the first one
    torch.testing.assert_close(actions, given, rtol=0.0, atol=0.0, equal_nan=True)
    with pytest.raises(ValueError, match=r"unit 2 .*: motion is \[-3.0, nan, inf, 0.5\]"):
        arena.check()
    arena.reset()
    arena.check()
    arena.step(actions)
    simulation = arena.simulation
    assert simulation.actions["motion"][2].tolist() == [-1.0, 0.0, 0.0, 0.5]
    assert simulation.actions["fire"].tolist() == [0, 0, 7, 0]


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
        ({"seconds": 1025.0}, "at most 1024"),
    ],
)
def test_impossible_arena_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(message)):
        small_config(**settings)


def test_a_state_of_other_battles_is_refused() -> None:
    arena = flat_arena()
    before, kept = saved(arena), flat_arena("medium", "scout").state_dict()
    with pytest.raises(ValueError, match="should be"):
        arena.load_state_dict(kept)
    kept["state"].pop("unit")
    with pytest.raises(ValueError, match=r"missing: \['unit'\], unknown: \[\]"):
        arena.load_state_dict(kept)
    assert_identical(saved(arena), before)


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("status", at.MAP, 2, "status is not everywhere from 0 to 1"),
        ("status", at.LARGEST_TEAM, 2, r"the largest team should be from 1 to 1; got \[2\]"),
        ("contact", 0, 2, "contact is not everywhere from -1 to 1"),
        ("number", at.WEAPON, -1, "number is not everywhere from 0 to 6"),
        ("unit", at.X, math.nan, "unit is not everywhere a number"),
        ("unit", at.COS, 3e38, "unit is not everywhere a number"),
    ],
)
def test_a_state_with_impossible_values_is_refused(name: str, row: int, value: float, message: str) -> None:
    arena = flat_arena(maps=2)
    before, kept = saved(arena), arena.state_dict()
    kept["state"][name][row] = value
    with pytest.raises(ValueError, match=message):
        arena.load_state_dict(kept)
    assert_identical(saved(arena), before)


def test_maps_of_another_size_or_number_are_refused() -> None:
    grids = flat_arena(size=16, maps=2).grids
    with pytest.raises(ValueError, match=r"height of the maps should be \(2, 24, 24\), by maps and size of the config; got \(2, 16, 16\)"):
        Arena(small_config(maps=2), grids=grids)
    with pytest.raises(ValueError, match=r"height of the maps should be \(3, 16, 16\)"):
        Arena(small_config(maps=3, size=16), grids=grids)
    with pytest.raises(ValueError, match=r"zone_radius of the maps should be \(2,\)"):
        Arena(small_config(maps=2, size=16), grids=grids._replace(zone_radius=torch.ones(1)))
