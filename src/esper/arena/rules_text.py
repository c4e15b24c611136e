"""The rule book of the arena, made from the tables that the simulation itself reads.

python -m esper.arena.rules_text > docs/arena_rules.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from esper.arena.config import DECISION_S, LARGEST, SMALLEST, ArenaConfig, RewardConfig, in_flight
from esper.arena.decision import AFTER_TICKS, PHASES
from esper.arena.layout import CELL_M, STATE_UNIT, VIEW, Field, Part, observation_width, parts, slices, state_width, width
from esper.arena.orders import FIRE, MOTION, action_spec
from esper.arena.specs import CLASSES, CLIMB_M, MATERIALS, PHYSICS, RULES_VERSION, WEAPONS, MaterialSpec, Physics, UnitClass, Weapon
from esper.arena.state import CLOUDS
from esper.arena.terrain import LANDSCAPES
from esper.config import describe, field_comments
from esper.vecenv import Discrete

# How the end of a name tells its unit; longer ends first.
_UNITS = {
    "_mps2": "m/s²", "_radps": "rad/s", "_per_s": "per s", "_mps": "m/s", "_deg": "°", "_m": "m", "_s": "s",
}  # fmt: skip


def rules_text() -> str:
    """The whole of docs/arena_rules.md."""
    sections = (
        _battle(), _phases(), _ground(), _units(), _weapons(), _physics(), _sensing(), _actions(), _observation(), _rewards(), _ends(),
        _determinism(),
    )  # fmt: skip
    head = [
        "# The rules of the arena",
        "",
        f"Rules version {RULES_VERSION}. Made from the tables of the simulation by `python -m esper.arena.rules_text`; change those.",
    ]
    return "\n".join([*head, *(line for section in sections for line in ("", *section))]) + "\n"


def _battle() -> list[str]:
    config = ArenaConfig()
    return [
        "## A battle",
        "",
        f"Two teams, of {config.team_size} units each unless told (`team_size`), start in opposite corners of a square map and fight over "
        "the "
        "zone, a disc around its centre. The team with more tons in the zone holds it, whether they stand there or fly above it. Who holds "
        f"it for {_share(PHYSICS.win_share)} of the battle's {config.seconds:g} s wins, and so does the team that alone has living units.",
        "",
        f"A team takes its units in this order (`pack`), and begins again where it is larger: {', '.join(config.pack)}.",
        "",
        f"Maps have from {SMALLEST} to {LARGEST} columns on a side (`size`, {config.size} unless told), each 1 m wide, and are of one of "
        f"these landscapes: {', '.join(LANDSCAPES)}. A map looks the same after half a turn, so neither side has the better ground, and "
        "from both corners there is a way to the zone on foot.",
        "",
        f"Time goes in ticks of {PHYSICS.tick_s:g} s. Every {DECISION_S:g} s each unit decides; what it decided holds for "
        f"{PHYSICS.ticks_per_decision} ticks.",
    ]


def _phases() -> list[str]:
    numbered = [(str(number), name, does) for number, (name, does) in enumerate(PHASES, 1)]
    after = [(str(number), name, does) for number, (name, does) in enumerate(AFTER_TICKS, 1)]
    return [
        "## The order of things",
        "",
        "In every tick, for all battles and units at once:",
        "",
        *_table(("", "phase", "what happens"), numbered),
        "",
        f"After the {PHYSICS.ticks_per_decision} ticks of a decision:",
        "",
        *_table(("", "phase", "what happens"), after),
    ]


def _ground() -> list[str]:
    return [
        "## Ground",
        "",
        f"Every column has a height, a material and hit points. Units walk up and down steps of {CLIMB_M:g} m; what is higher stops them. "
        "A column stops shots that fly lower than its top, and hides what is behind it. Shot to pieces, it becomes open ground.",
        "",
        *_spec_table({material.name.lower(): spec for material, spec in MATERIALS.items()}, MaterialSpec),
    ]


def _units() -> list[str]:
    return [
        "## Units",
        "",
        "A unit hotter than its cap shuts down: it neither moves nor fires until it has cooled to "
        f"{_share(PHYSICS.restart_share)} of the cap. One that has lost all stability falls, and lies for {PHYSICS.fallen_s:g} s. "
        f"Venting cools {PHYSICS.vent_cooling:g} times as fast, and costs: weapons are locked, speed is "
        f"{_share(PHYSICS.venting_factor)} of what it was, and everybody within {PHYSICS.hot_m:g} m senses it. From behind, more than "
        f"{PHYSICS.rear_deg:g}° off the nose, direct hits hurt {PHYSICS.rear_factor:g} times as much.",
        "",
        *_spec_table(CLASSES, UnitClass),
    ]


def _weapons() -> list[str]:
    config = ArenaConfig()
    flying = _listed(f"{name} {in_flight(weapon)}" for name, weapon in WEAPONS.items() if weapon.flight_mps)
    return [
        "## Weapons",
        "",
        "A weapon fires in every tick of a decision in which it is loaded, its target lives, is in reach and in the arc ahead, and its "
        "unit stands, runs and does not vent. What hits at once needs a target that is seen when the unit decides; what flies needs one "
        "that is sensed, and meets whatever is in its way: terrain, friends, enemies. A burst hurts all around it, whoever they are, the "
        f"unit that fired it too. A unit has at most {CLOUDS} clouds of smoke at a time.",
        "",
        *_spec_table(WEAPONS, Weapon),
        "",
        f"Every unit has slots for its projectiles, {config.projectiles} of them in teams of {config.team_size}. They are enough for all "
        "that "
        f"it can have in the air at once, so none is ever missing: {flying}.",
    ]


def _physics() -> list[str]:
    meaning = field_comments(Physics)
    rows = [(f"`{name}`", _value(getattr(PHYSICS, name)), meaning.get(name, "")) for name in Physics.__struct_fields__]
    return ["## Constants", "", *_table(("constant", "value", "meaning"), rows)]


def _sensing() -> list[str]:
    rows = [
        ("sight", f"{PHYSICS.sight_m:g}", "from eye to eye nothing stands or smokes in between"),
        ("radar", f"{PHYSICS.radar_m:g} times its quality", "through everything"),
        (
            "heat",
            f"{PHYSICS.hot_m:g}",
            f"through everything, of who is hotter than {_share(PHYSICS.hot_share)} of its cap, or vents",
        ),
        ("paint", "everywhere", "the whole team senses whom one of it has painted"),
    ]
    return [
        "## Sensing",
        "",
        "What a unit knows of its enemies is settled once, at the end of a decision. It senses an enemy in any of these ways; sight alone "
        "makes it seen. Units of the own team always know of one another.",
        "",
        *_table(("way", "within (m)", "when"), rows),
    ]


def _actions() -> list[str]:
    config = ArenaConfig()
    may = {
        "fire": "none always; a weapon that the class has and that reaches a contact, for who stands and runs",
        "target": "the contacts that the chosen weapon reaches, seen ones if it hits at once; matters only to who fires",
        "vent": "always not; to vent, who lives and has heat",
        "motion": "everything",
    }
    choices = {
        "fire": ", ".join(FIRE),
        "target": f"contact 0 to {config.contacts - 1}, from near to far",
        "vent": "no, yes",
        "motion": ", ".join(MOTION),
    }
    rows = [
        (
            f"`{head.name}`",
            f"one of {head.size}" if isinstance(head, Discrete) else f"{head.size} numbers from -1 to 1",
            choices[head.name],
            may[head.name],
        )
        for head in action_spec(config).heads
    ]
    return [
        "## Actions",
        "",
        *_table(("head", "kind", "choices", "what the mask allows"), rows),
        "",
        "Forward and right are positive; a positive yaw turns to the left; jets below 0 are off. Sideways and backwards a unit reaches "
        f"{_share(PHYSICS.sideways_factor)} of its speed. The mask of `target` depends on `fire`: it has a row for each of its choices. "
        "What cannot be done is not done, whatever the action says; what is no choice, or no number from -1 to 1, is an error.",
    ]


def _observation() -> list[str]:
    config = ArenaConfig()
    lines = [
        "## Observation",
        "",
        f"A vector of {observation_width(config)} numbers for each unit, with {config.contacts} contacts (`contacts`) and "
        f"{config.allies} allies (`allies`), both from near to far. Ahead and left are those of the unit. The world's frame is that of the "
        "team: the second team's is turned by half a turn, so that both sides see the same. Slices of fields count from where their part "
        "begins.",
        "",
    ]
    start, rows = 0, []
    for part in parts(config):
        rows.append((part.name, f"{start}:{start + part.width}", str(part.times), str(width(part.fields))))
        start += part.width
    lines += _table(("part", "slice", "times", "numbers each"), rows)
    for part in parts(config):
        lines += ["", f"### {part.name.capitalize()}", "", *_part_text(part), *_fields_table(part.fields)]
    return [
        *lines,
        "",
        "### The whole battle",
        "",
        f"With `state_view` there is a second vector of {state_width(config)} numbers for a centralised critic: these fields of every "
        "unit, the own team's first, whatever is sensed.",
        "",
        *_fields_table(STATE_UNIT),
    ]


def _part_text(part: Part) -> list[str]:
    if part.name != "terrain":
        return []
    return [
        f"{VIEW} × {VIEW} cells, {CELL_M:g} m apart, around the unit and turned with it: rows from behind to ahead, in each row from right "
        "to left.",
        "",
    ]


def _rewards() -> list[str]:
    rows = [(f"`{name}`", f"{value:g}", meaning) for name, value, meaning in describe(RewardConfig())]
    return [
        "## Rewards",
        "",
        "What a unit is paid for a decision is the sum of these, each with its weight. Who was dead before the decision is paid nothing. "
        "Damage to one's own side only ever costs, and what the ground does is nobody's doing. `approach` is potential-based: its "
        "discounted sum over a unit's life is the same whatever the unit does, so it shows the way without changing what is best.",
        "",
        *_table(("setting", "default", "for what"), rows),
    ]


def _ends() -> list[str]:
    config = ArenaConfig()
    return [
        "## Ends",
        "",
        f"- By score: a team has held the zone for {_share(PHYSICS.win_share)} of the battle's seconds "
        f"({config.seconds * PHYSICS.win_share:g} of {config.seconds:g}).",
        "- By elimination: only one team has living units.",
        f"- By time: after {config.decisions} decisions ({config.seconds:g} s, `seconds`) the higher score wins.",
        "",
        "Where both teams reach one of the first two at once, or scores are equal at the end, the battle is a draw. Clock and scores are "
        "observed, so the end by time is a real end and no cut. A unit's own episode ends with its death; its row is not valid until the "
        "next battle begins in its place, in the same step in which the old one ends.",
    ]


def _determinism() -> list[str]:
    return [
        "## The same again",
        "",
        "Nothing is drawn at random while a battle is fought. Its map and the size of its teams follow from the seed, its place in the "
        "batch, and how many battles were fought there before. The same seed and actions give the same battle, bit for bit, on one kind "
        "of device; maps are the same on every device.",
        "",
        "A replay holds seed, actions, device, version and the state at keyframes. Anyone can play it; the same kind of device fights it "
        f"again and compares hashes of the state. A replay of other rules than version {RULES_VERSION} can be played and not verified.",
    ]


def _spec_table(specs: Mapping[str, msgspec.Struct], kind: type[msgspec.Struct]) -> list[str]:
    """A row for every field of the specifications, a column for each of them, and what the field means."""
    meaning = field_comments(kind)
    rows = [
        (_heading(name), *(_value(getattr(spec, name)) for spec in specs.values()), meaning.get(name, ""))
        for name in kind.__struct_fields__
    ]
    return _table(("", *specs, "meaning"), rows)


def _fields_table(fields: tuple[Field, ...]) -> list[str]:
    rows = [(f"`{field.name}`", _numbers(slices(fields)[field.name]), field.meaning) for field in fields]
    return _table(("field", "numbers", "meaning"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    return [line(head), line(["---"] * len(head)), *(line(row) for row in rows)]


def _heading(name: str) -> str:
    """`range_m` -> "range (m)", `is_homing` -> "homing"."""
    for end, unit in _UNITS.items():
        if name.endswith(end):
            return f"{name.removesuffix(end).replace('_', ' ')} ({unit})"
    return name.removeprefix("is_").replace("_", " ")


def _value(value: object) -> str:
    """Nothing is a dash."""
    if isinstance(value, bool):
        return "yes" if value else "–"
    if isinstance(value, float | int):
        return f"{value:g}" if value else "–"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _numbers(where: slice) -> str:
    return f"{where.start}" if where.stop - where.start == 1 else f"{where.start}:{where.stop}"


def _share(share: float) -> str:
    return "half" if share == 0.5 else f"{100 * share:g} %"


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


if __name__ == "__main__":
    print(rules_text(), end="")
