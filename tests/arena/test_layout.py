"""The table of the fields of an observation."""

from __future__ import annotations

import pytest

from esper.arena.arena import Arena
from esper.arena.config import ArenaConfig
from esper.arena.observe import ALLY, CONTACT, OWN, STATE_UNIT, TERRAIN, VIEW, observation_width, parts, slices, state_width, width
from esper.arena.specs import MATERIALS, PHYSICS, WEAPONS, Material
from tests.arena.worlds import small_config

TABLES = {"own": OWN, "contact": CONTACT, "ally": ALLY, "terrain": TERRAIN, "state": STATE_UNIT}


@pytest.mark.parametrize("name", TABLES)
def test_slices_follow_one_another_without_a_gap(name):
    fields = TABLES[name]
    found = list(slices(fields).values())
    assert len(found) == len(fields)  # no two of one name
    assert [piece.start for piece in found] == [0, *(piece.stop for piece in found[:-1])]
    assert found[-1].stop == width(fields)


@pytest.mark.parametrize("name", TABLES)
def test_every_field_of_the_layout_has_a_meaning(name):
    assert all(field.meaning and field.width > 0 for field in TABLES[name])


@pytest.mark.parametrize("settings", [{}, {"team_size": 3, "contacts": 7, "allies": 0}, {"contacts": 1, "allies": 4}])
def test_observations_are_as_wide_as_the_table(settings):
    config = small_config(state_view=True, **settings)
    result = Arena(config).reset()
    assert result.observation.shape == (1, config.units, observation_width(config))
    assert result.whole.shape == (1, config.units, state_width(config))
    assert sum(part.width for part in parts(config)) == observation_width(config)


def test_a_unit_sees_at_least_eleven_cells_each_way():
    assert VIEW >= 11
    assert next(part for part in parts(ArenaConfig()) if part.name == "terrain").times == VIEW * VIEW


def test_the_numbers_in_the_meanings_are_those_of_the_specifications():
    meaning = {field.name: field.meaning for field in OWN}
    assert f"{PHYSICS.fallen_s:g} s" in meaning["fallen"]
    assert f"{PHYSICS.stability:g}" in meaning["stability"]
    assert f"{WEAPONS['autocannon'].suppresses_s:g} s" in meaning["suppressed"]
    assert f"{WEAPONS['painter'].paints_s:g} s" in meaning["painted"]
    lava, water = MATERIALS[Material.LAVA].heat_per_s, MATERIALS[Material.WATER].heat_per_s
    assert f"{water / lava:g} water" in TERRAIN[-1].meaning
