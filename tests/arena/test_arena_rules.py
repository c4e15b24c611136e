"""The rule book agrees with the simulation, because it is made from the same tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.arena_rules import AFTER_TICKS, PHASES, rules_text
from esper.arena.config import ArenaConfig, ArenaRewardConfig
from esper.arena.observe import STATE_BATTLE, STATE_UNIT, observation_width, parts, state_width, width
from esper.arena.specs import CLASSES, MATERIALS, PHYSICS, WEAPONS, MaterialSpec, Physics, UnitClass, Weapon
from esper.config import describe, field_comments

COMMITTED = Path(__file__).parents[2] / "docs" / "arena_rules.md"


@pytest.fixture(scope="module")
def text():
    return rules_text()


def rows(text):
    """The cells of every line of every table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def section(text, title):
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_rule_book_is_up_to_date(text):
    assert COMMITTED.read_text(encoding="utf-8") == text, "renew it: python docs/arena_rules.py > docs/arena_rules.md"


def test_the_rule_book_is_the_same_every_time(text):
    assert rules_text() == text


def test_every_line_of_a_table_has_as_many_cells_as_its_head(text):
    cells = None
    for line in text.splitlines():
        if not line.startswith("|"):
            cells = None
            continue
        cells = cells or line.count("|")
        assert line.count("|") == cells, line


def test_the_rule_book_lists_the_phases_in_order(text):
    numbered = [row[1] for row in rows(text) if row[0].isdigit() and len(row) == 3]
    assert numbered == [name for name, _ in (*PHASES, *AFTER_TICKS)]


@pytest.mark.parametrize("kind", [Physics, Weapon, UnitClass, MaterialSpec, ArenaRewardConfig, ArenaConfig])
def test_every_entry_of_the_rule_book_has_a_meaning(kind):
    said = field_comments(kind)
    assert [name for name in kind.__struct_fields__ if not said.get(name) and name != "reward"] == []


def test_every_constant_and_weight_has_a_row_with_its_value(text):
    constants = {row[0]: row[1] for row in rows(section(text, "Constants"))}
    for name in Physics.__struct_fields__:
        assert float(constants[f"`{name}`"]) == getattr(PHYSICS, name)
    weights = {row[0]: row[1] for row in rows(section(text, "Rewards"))}
    for name, value, _ in describe(ArenaRewardConfig()):
        shown = weights[f"`{name}`"]
        assert (shown == str(value).lower()) if isinstance(value, bool) else (float(shown) == value)


def test_weapons_classes_and_materials_have_a_column_each(text):
    heads = [row for row in rows(text) if row[0] == "" and row[-1] == "meaning"]
    assert [head[1:-1] for head in heads] == [[material.name.lower() for material in MATERIALS], list(CLASSES), list(WEAPONS)]
    ranges = next(row for row in rows(text) if row[0] == "range (m)")
    assert [float(cell) for cell in ranges[1:-1]] == [weapon.range_m for weapon in WEAPONS.values()]


def test_the_parts_of_an_observation_fill_it(text):
    names = [part.name for part in parts(ArenaConfig())]
    found = [row[1].split(":") for row in rows(text) if row[0] in names and ":" in row[1]]
    assert [int(start) for start, _ in found] == [0, *(int(stop) for _, stop in found[:-1])]
    assert int(found[-1][1]) == observation_width(ArenaConfig())


@pytest.mark.parametrize(
    ("title", "said"),
    [
        ("A battle", "a radius of 4 to 11 m, drawn for each map, and never more than a sixth of its side"),
        ("Ground", "takes 5 points of the legs for every m/s above that: 19 off 5 m"),
        ("Ground", "only one that hits the ground in its column wears it"),
        ("Ground", "a unit among trees higher than its eyes (1.6 m) neither sees nor is seen, not even from 1 m away"),
        ("Units", "its stability is full from then on"),
        (
            "Units",
            "A dead unit stays where it comes to rest. It is no obstacle, stops no shots and takes no damage; its projectiles fly on",
        ),
        ("Weapons", "Height counts in the range and not in the arc, which is horizontal"),
        ("Weapons", "it passes units, and also a wall or smoke behind which the target has gone in the meantime"),
        ("Weapons", "flies for at most 62.4 m (missile), 24 m (gauss), 15 m (autocannon) and 24.8 m (smoke)"),
        ("Weapons", "The legs take as much in addition, and stability falls by the same share"),
        ("Weapons", "Walls do not stop splash, and splash does not wear them"),
        (
            "Observation",
            "headings, velocities, legs, stability, fuel, venting, loading of weapons, suppression, paint, smoke, projectiles and",
        ),
    ],
)
def test_the_rule_book_states_what_situations_show(text, title, said):
    assert said in section(text, title), "test_rules_by_situation.py has the situations"


def test_the_view_of_the_whole_battle_lists_the_fields_of_units_and_of_the_battle(text):
    shown = section(text, "Observation").split("\n### The whole battle\n")[1]
    assert f"vector of {state_width(ArenaConfig())} numbers" in shown
    fields = [row for row in rows(shown) if row[0].startswith("`")]
    assert [row[0].strip("`") for row in fields] == [field.name for field in (*STATE_UNIT, *STATE_BATTLE)]
    ends = [int(fields[place][1].split(":")[-1]) + (":" not in fields[place][1]) for place in (len(STATE_UNIT) - 1, -1)]
    assert ends == [width(STATE_UNIT), width(STATE_BATTLE)]
