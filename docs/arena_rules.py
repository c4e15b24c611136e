"""Write docs/arena_rules.md, the rules of the arena, from the tables that the simulation uses.

python docs/arena_rules.py > docs/arena_rules.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from esper.arena.config import DECISION_S, LARGEST, SMALLEST, ArenaConfig, ArenaRewardConfig, in_flight, life_ticks
from esper.arena.maps import LARGEST_ZONE_M, SMALLEST_ZONE_M
from esper.arena.observe import (
    CELL_M,
    STATE_BATTLE,
    STATE_LACKS,
    STATE_UNIT,
    VIEW,
    Field,
    Part,
    observation_width,
    parts,
    slices,
    state_width,
    width,
)
from esper.arena.orders import FIRE, MOTION, action_spec
from esper.arena.specs import CLASSES, CLIMB_M, CLOUDS, MATERIALS, PHYSICS, RULES_VERSION, WEAPONS, MaterialSpec, Physics, UnitClass, Weapon
from esper.arena.terrain import LANDSCAPES
from esper.config import describe, field_comments
from esper.vecenv import Discrete

PHASES = (
    ("count down", "timers of units and smoke lose a tick, venting begins or ends as ordered"),
    ("turn", "headings follow the yaw orders"),
    ("drive", "velocities over ground follow the orders, as fast as legs, ground, suppression and venting allow"),
    ("fly", "jets lift, gravity pulls, fuel is spent or regained"),
    ("move", "units move until terrain, edges or other units stop them; falls end"),
    ("endure", "the ground burns or cools, hard landings damage legs"),
    ("fire", "weapons that are ready, in reach and in arc go off; lasers, flamers and painters strike at once"),
    ("shells", "projectiles steer, fly and burst; smoke spreads"),
    ("strike", "everything that hit in this tick takes effect at once, so two units can kill each other"),
    ("cool", "units lose heat; overheated units shut down, cooled units start again"),
    ("balance", "units without stability fall; others regain stability"),
    ("zone", "the team with more tons in the zone scores"),
)
AFTER_TICKS = (
    ("terrain", "destroyed columns become open ground"),
    ("end", "battles end by score, elimination or time, and rewards are paid"),
    ("reset", "ended battles are replaced by new ones, on a map drawn from all maps"),
    ("sense", "units sense their enemies; what they know holds until the end of the next decision"),
)

# Suffix of a name -> unit; longer suffixes first.
_UNITS = {
    "_mps2": "m/s²", "_radps": "rad/s", "_per_s": "per s", "_mps": "m/s", "_deg": "°", "_m": "m", "_s": "s",
}  # fmt: skip


def rules_text() -> str:
    """Return the content of docs/arena_rules.md."""
    sections = (
        _battle(), _phases(), _ground(), _units(), _weapons(), _physics(), _sensing(), _actions(), _observation(), _rewards(), _ends(),
        _determinism(),
    )  # fmt: skip
    head = [
        "# The rules of the arena",
        "",
        f"Rules version {RULES_VERSION}. `python docs/arena_rules.py` makes this file from the tables of the simulation; edit those.",
    ]
    return "\n".join([*head, *(line for section in sections for line in ("", *section))]) + "\n"


def _battle() -> list[str]:
    config = ArenaConfig()
    return [
        "## A battle",
        "",
        f"Two teams of {config.team_size} units each (`team_size`) start in opposite corners of a square map and fight over the zone, a "
        f"disc around its centre with a radius of {SMALLEST_ZONE_M:g} to {LARGEST_ZONE_M:g} m, drawn for each map, and never more than a "
        "sixth of its side. The team with more tons in the zone holds it; living units count on the ground and in the air. A team wins by "
        f"holding the zone for {_share(PHYSICS.win_share)} of the battle's {config.seconds:g} s, or by being the only one with living "
        "units.",
        "",
        f"The units of a team have these classes (`pack`), repeated in larger teams: {', '.join(config.pack)}.",
        "",
        f"Maps have {SMALLEST} to {LARGEST} columns on a side (`size`, by default {config.size}), each 1 m wide, and one of these "
        f"landscapes: {', '.join(LANDSCAPES)}. A map is the same after half a turn, so it favours neither side, and from both corners "
        "units can walk to the zone.",
        "",
        f"Time advances in ticks of {PHYSICS.tick_s:g} s. Every unit decides every {DECISION_S:g} s; its decision holds for "
        f"{PHYSICS.ticks_per_decision} ticks.",
    ]


def _phases() -> list[str]:
    numbered = [(str(number), name, does) for number, (name, does) in enumerate(PHASES, 1)]
    after = [(str(number), name, does) for number, (name, does) in enumerate(AFTER_TICKS, 1)]
    return [
        "## Phases",
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
        f"Every column has a height, a material and hit points. Units walk up and down steps of up to {CLIMB_M:g} m; higher steps up stop "
        f"them, and off higher ones they fall. A landing faster than {PHYSICS.landing_mps:g} m/s, off more than {_harmless_m():.1f} m, "
        f"takes {PHYSICS.landing_damage:g} points of the legs for every m/s above that: {_landing_damage(5.0):.0f} off 5 m.",
        "",
        "A column stops projectiles below its top, and blocks the sight of what is behind it. It becomes open ground of height 0 when "
        "projectiles that hit it have done as much damage as it has hit points. A burst wears only the column that it hits, by the "
        "damage of a direct hit. Foliage stops no projectile, so only one that hits the ground in its column wears it. It blocks "
        f"sight also from within: a unit among trees higher than its eyes ({PHYSICS.eye_m:g} m) neither sees nor is seen, not even from "
        "1 m away.",
        "",
        *_spec_table({material.name.lower(): spec for material, spec in MATERIALS.items()}, MaterialSpec),
    ]


def _units() -> list[str]:
    return [
        "## Units",
        "",
        "A unit hotter than its cap shuts down: it neither moves nor fires until it has cooled to "
        f"{_share(PHYSICS.restart_share)} of the cap. A unit without stability falls and lies for {PHYSICS.fallen_s:g} s; "
        "its stability is full from then on, so that hits meanwhile make it lie no longer, and it gets up with all of it. "
        f"A venting unit cools {PHYSICS.vent_cooling:g} times as fast, but cannot fire, moves at {_share(PHYSICS.venting_factor)} of its "
        f"speed, and is sensed by all enemies within {PHYSICS.hot_m:g} m. Direct hits from behind, more than "
        f"{PHYSICS.rear_deg:g}° off the nose, do {PHYSICS.rear_factor:g} times the damage.",
        "",
        "A dead unit stays where it comes to rest. It is no obstacle, stops no shots and takes no damage; its projectiles fly on, and its "
        "smoke stays.",
        "",
        *_spec_table(CLASSES, UnitClass),
    ]


def _weapons() -> list[str]:
    config = ArenaConfig()
    flying = _listed(f"{name} {in_flight(weapon)}" for name, weapon in WEAPONS.items() if weapon.flight_mps)
    flown = _listed(
        f"{life_ticks(weapon) * PHYSICS.tick_s * weapon.flight_mps:.3g} m ({name})" for name, weapon in WEAPONS.items() if weapon.flight_mps
    )
    return [
        "## Weapons",
        "",
        "A weapon fires in every tick of a decision in which it is loaded, its target is alive, in range and in the arc ahead, and its "
        "unit is neither fallen nor shut down nor venting. Height counts in the range and not in the arc, which is horizontal.",
        "",
        "A weapon that hits at once needs a target that is seen when the unit decides. Until the next decision it strikes that target "
        "and nothing else: it passes units, and also a wall or smoke behind which the target has gone in the meantime.",
        "",
        "A weapon with projectiles needs a target that is sensed. A projectile hits whatever is in its way: terrain, friends or enemies. "
        f"One that hits nothing flies for at most {flown}, and then ends without a burst. A homing one whose target "
        "is dead flies straight on.",
        "",
        "A burst of a weapon with splash damages all units around it, also friends and the one that fired, but for the unit that it hits "
        f"directly: {_share(PHYSICS.splash_share)} of a direct hit's damage in the middle, less with the distance to the middle of a body, "
        "and 0 at the edge. The legs take as much in addition, and stability falls by the same share of the loss by a direct hit. Walls "
        "do not stop splash, and splash does not wear them. The back of a unit is not special to it.",
        "",
        f"A cloud of smoke stands where its shell ends. A unit has at most {CLOUDS} at the same time; the next one replaces the oldest.",
        "",
        *_spec_table(WEAPONS, Weapon),
        "",
        f"Every unit has slots for its projectiles, {config.projectiles} in teams of {config.team_size}. They are enough for the largest "
        f"number of projectiles that its weapons can have in the air: {flying}.",
    ]


def _harmless_m() -> float:
    """Return the height of the highest drop that damages no legs."""
    return PHYSICS.landing_mps**2 / (2 * PHYSICS.gravity_mps2)


def _landing_damage(height_m: float) -> float:
    """Return the damage to the legs by a drop, which gains speed tick by tick."""
    speed = height = 0.0
    while height < height_m:
        speed += PHYSICS.gravity_mps2 * PHYSICS.tick_s
        height += speed * PHYSICS.tick_s
    return max(speed - PHYSICS.landing_mps, 0.0) * PHYSICS.landing_damage


def _physics() -> list[str]:
    meaning = field_comments(Physics)
    rows = [(f"`{name}`", _value(getattr(PHYSICS, name)), meaning.get(name, "")) for name in Physics.__struct_fields__]
    return ["## Constants", "", *_table(("constant", "value", "meaning"), rows)]


def _sensing() -> list[str]:
    rows = [
        ("sight", f"{PHYSICS.sight_m:g}", "no column and no smoke is on the line from eye to eye"),
        ("radar", f"{PHYSICS.radar_m:g} times its quality", "always, through everything"),
        (
            "heat",
            f"{PHYSICS.hot_m:g}",
            f"the enemy is hotter than {_share(PHYSICS.hot_share)} of its cap, or vents; through everything",
        ),
        ("paint", "everywhere", "a unit of the team has painted the enemy"),
    ]
    return [
        "## Sensing",
        "",
        "Units sense their enemies once per decision, at its end, in any of these ways. Only an enemy in sight is seen. Units of the same "
        "team always know each other's position.",
        "",
        *_table(("way", "within (m)", "when"), rows),
    ]


def _actions() -> list[str]:
    config = ArenaConfig()
    may = {
        "fire": "none: always; a weapon: if the class has it, it reaches a contact, and the unit is neither fallen nor shut down",
        "target": "the contacts that the chosen weapon reaches, only seen ones if it hits at once; relevant only if a weapon is fired",
        "vent": "no: always; yes: if the unit is alive, running and has heat",
        "motion": "everything",
    }
    choices = {
        "fire": ", ".join(FIRE),
        "target": f"contact 0 to {config.contacts - 1}, nearest first",
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
        *_table(("head", "kind", "choices", "allowed by the mask"), rows),
        "",
        "Forward and right are positive; a positive yaw turns to the left; jets below 0 are off. Sideways and backwards a unit reaches "
        f"{_share(PHYSICS.sideways_factor)} of its speed. The mask of `target` has a row for each choice of `fire`. Orders that a unit "
        "cannot carry out are ignored; a choice that does not exist, or a number outside of -1 to 1, is an error.",
    ]


def _observation() -> list[str]:
    config = ArenaConfig()
    lines = [
        "## Observation",
        "",
        f"A vector of {observation_width(config)} numbers for each unit, with {config.contacts} contacts (`contacts`) and "
        f"{config.allies} allies (`allies`), both nearest first. Ahead and left are relative to the unit. The world frame is that of the "
        "team: for the second team it is turned by half a turn, so that both sides observe the same. Slices of fields are relative to the "
        "start of their part.",
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
        f"With `state_view` there is a second vector of {state_width(config)} numbers for a centralised critic. It is a summary: "
        f"{_listed(STATE_LACKS)} are not part of it. It begins with these "
        "fields of every unit, own team first, whether sensed or not:",
        "",
        *_fields_table(STATE_UNIT),
        "",
        "It ends with these fields of the battle:",
        "",
        *_fields_table(STATE_BATTLE),
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
    rows = [
        (f"`{name}`", str(value).lower() if isinstance(value, bool) else f"{value:g}", meaning)
        for name, value, meaning in describe(ArenaRewardConfig())
    ]
    return [
        "## Rewards",
        "",
        "The reward of a unit for a decision is the sum of these parts, each with its weight. `zone` and `outcome` are paid to every unit "
        "of a team. A part of the rewards for damage, kills and assists is divided equally among the units of the team (`team_share`). "
        "Then the other team's mean reward, without the outcome, is subtracted (`zero_sum`): with a share of 1 and teams of equal size, "
        "the rewards of all units of a battle sum to 0.",
        "",
        "A unit that was dead before the decision gets what its team gets: zone, outcome, its part of what the team shares, and the "
        "subtraction. If the dead are not paid (`pays_dead`), it gets nothing, and only units that were alive share and count in the "
        "means. Damage to the own team always costs; damage by terrain counts for no unit. `approach` is potential-based: its discounted "
        "sum over a battle does not depend on the unit's actions, so it guides learning without changing the best policy.",
        "",
        *_table(("setting", "default", "meaning"), rows),
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
        "If both teams meet one of the first two conditions at once, or the scores are equal at the end, the battle is a draw. Units "
        "observe the clock and the scores, so an end by time terminates the episode and does not truncate it. The next battle begins in "
        "the same step in which the old one ends.",
        "",
        "A unit's episode ends with its battle. A dead unit cannot act, but is paid until the end, so its row teaches values only (`acts` "
        "is false). If the dead are not paid (`pays_dead`), the episode ends with the unit's death, and its row is not valid until the "
        "next battle begins.",
    ]


def _determinism() -> list[str]:
    return [
        "## Determinism",
        "",
        "There are no random events during a battle. Its map and the size of its teams follow from the seed, its index in the batch, and "
        "the number of battles fought there before. The same seed and actions give the same battle, bit for bit, on the same kind of "
        "device; maps are the same on every device.",
        "",
        "A replay holds seed, actions, device, version and the state at keyframes. Any device can play it; the same kind of device can "
        f"verify it, by computing the battle again and comparing hashes of the state. A replay of other rules than version {RULES_VERSION} "
        "can be played, but not verified.",
    ]


def _spec_table(specs: Mapping[str, msgspec.Struct], kind: type[msgspec.Struct]) -> list[str]:
    """Return a table with a row for every field, a column for every specification, and the meaning of the field."""
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
    """Return the lines of a Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    return [line(head), line(["---"] * len(head)), *(line(row) for row in rows)]


def _heading(name: str) -> str:
    """Return the heading of a field: `range_m` -> "range (m)", `is_homing` -> "homing"."""
    for end, unit in _UNITS.items():
        if name.endswith(end):
            return f"{name.removesuffix(end).replace('_', ' ')} ({unit})"
    return name.removeprefix("is_").replace("_", " ")


def _value(value: object) -> str:
    """Return a value as text; False and 0 become a dash."""
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
