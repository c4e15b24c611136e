"""The table of the fields of an observation."""

from __future__ import annotations

from typing import Any

import pytest

from esper.arena.arena import Rewards
from esper.arena.config import ArenaConfig, ArenaRewardConfig
from esper.arena.native import layout as at
from esper.arena.observe import ALLY, CONTACT, OWN, STATE_UNIT, TERRAIN, VIEW, observation_width, parts, slices, state_width, width
from esper.arena.specs import MATERIALS, PHYSICS, WEAPONS, Material
from tests.arena.worlds import flat_arena

TABLES = {"own": OWN, "contact": CONTACT, "ally": ALLY, "terrain": TERRAIN, "state": STATE_UNIT}


@pytest.mark.parametrize("name", TABLES)
def test_slices_follow_one_another_without_a_gap(name: str) -> None:
    fields = TABLES[name]
    found = list(slices(fields).values())
    assert len(found) == len(fields)  # no two of one name
    assert [piece.start for piece in found] == [0, *(piece.stop for piece in found[:-1])]
    assert found[-1].stop == width(fields)


@pytest.mark.parametrize("name", TABLES)
def test_every_field_of_the_layout_has_a_meaning(name: str) -> None:
    assert all(field.meaning and field.width > 0 for field in TABLES[name])


@pytest.mark.parametrize(
    "settings", [{}, {"pack": ("scout", "light", "heavy"), "team_size": 3, "contacts": 7, "allies": 0}, {"contacts": 1, "allies": 4}]
)
def test_observations_are_as_wide_as_the_table(settings: dict[str, Any]) -> None:
    arena = flat_arena(state_view=True, **settings)
    config, result = arena.config, arena.reset()
    assert result.observation.shape == (1, config.units, observation_width(config))
    assert result.whole is not None
    assert result.whole.shape == (1, config.units, state_width(config))
    assert sum(part.width for part in parts(config)) == observation_width(config)


def test_the_view_of_the_whole_battle_is_left_out_unless_the_config_asks_for_it() -> None:
    assert flat_arena().reset().whole is None


def test_a_unit_sees_at_least_eleven_cells_each_way() -> None:
    assert VIEW >= 11
    assert next(part for part in parts(ArenaConfig()) if part.name == "terrain").times == VIEW * VIEW


def test_the_numbers_in_the_meanings_are_those_of_the_specifications() -> None:
    meaning = {field.name: field.meaning for field in OWN}
    assert f"{PHYSICS.fallen_s:g} s" in meaning["fallen"]
    assert f"{PHYSICS.stability:g}" in meaning["stability"]
    assert f"{WEAPONS['autocannon'].suppresses_s:g} s" in meaning["suppressed"]
    assert f"{WEAPONS['painter'].paints_s:g} s" in meaning["painted"]
    lava, water = MATERIALS[Material.LAVA].heat_per_s, MATERIALS[Material.WATER].heat_per_s
    assert f"{water / lava:g} water" in TERRAIN[-1].meaning


def test_rewards_of_the_simulation_are_in_the_order_of_their_names() -> None:
    """The compiled rules have indices for the parts of a reward and for their weights."""
    parts_of = {name.removeprefix("PAID_").lower(): index for name, index in vars(at).items() if name.startswith("PAID_")}
    assert parts_of == {name: index for index, name in enumerate(Rewards._fields)}
    short = {"friendly": "friendly_fire", "share": "team_share"}
    weights = {name.removeprefix("R_").lower(): index for name, index in vars(at).items() if name.startswith("R_")}
    assert {short.get(name, name): index for name, index in weights.items()} == {
        name: index for index, name in enumerate(ArenaRewardConfig.__struct_fields__)
    }
