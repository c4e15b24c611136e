"""Copy states of the tensor version into native battles, and compare the two.

States are dictionaries of arrays [B, ...] by the names of `esper.arena.state.named_tensors`, with `worn` [B, S, S], the damage to columns,
instead of the map.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from esper.arena.native import layout as at
from esper.arena.native.battle import DECIDE_ONLY, LOOK, begin_status, begin_unit, mend_columns, step_battles
from esper.arena.native.compiling import for_battles
from esper.arena.native.layout import Battles, Choices, Ints, Maps, RuleBook, Tables, Views
from esper.arena.specs import PHYSICS

TOLERANCES = {"position": 1e-5}  # of parts of the state; 1e-3 for all others
Arrays = dict[str, npt.NDArray[Any]]
UNIT_NAMES = {
    at.HIT_POINTS: "hit_points", at.LEGS: "legs", at.HEAT: "heat", at.STABILITY: "stability", at.FUEL: "fuel",
}  # fmt: skip
COUNT_NAMES = {
    at.FALLEN: "fallen", at.SUPPRESSED: "suppressed", at.PAINTED: "painted", at.IS_SHUT_DOWN: "is_shut_down",
    at.IS_VENTING: "is_venting", at.IS_GROUNDED: "is_grounded", at.IS_PRESENT: "present",
}  # fmt: skip
STATUS_NAMES = {at.HOLDER: "holder", at.DECISION: "decision", at.EPISODE: "episode", at.MAP: "map", at.OVERFLOW: "overflow"}


@for_battles
def begin_given(first: int, last: int, s: Battles, tables: Tables, rule_book: RuleBook, which: Ints, team_size: Ints) -> None:
    """Begin the next battle where one has ended."""
    for b in range(first, last):
        if s.status[at.HAS_ENDED, b] != 0:
            s.status[at.EPISODE, b] += 1
            begin_status(s, b, which[b])
            for u in range(s.unit.shape[2]):
                begin_unit(s, tables, rule_book[0], b, u, team_size[b])
                mend_columns(s, b, u)


def step_given(
    s: Battles, maps: Maps, tables: Tables, rule_book: RuleBook, actions: Choices, views: Views, which: Ints, team_size: Ints
) -> None:  # fmt: skip
    """Run a decision. Where a battle ends, the next one begins on the map `which` [B] with teams of `team_size` [B] units."""
    step_battles(s, maps, tables, rule_book, actions, views, DECIDE_ONLY)
    begin_given(s, tables, rule_book, which, team_size)
    step_battles(s, maps, tables, rule_book, actions, views, LOOK)


def load_state(battles: Battles, maps: Maps, state: Arrays) -> None:
    """Overwrite native battles by a state of the tensor version."""
    unit, number, status = battles.unit, battles.number, battles.status
    for axis in range(3):
        unit[at.X + axis] = state["units/position"][..., axis]
        unit[at.VELOCITY_X + axis] = state["units/velocity"][..., axis]
        battles.shell[axis] = state["shells/position"][..., axis]
        battles.shell[3 + axis] = state["shells/velocity"][..., axis]
        battles.cloud[axis] = state["clouds/position"][..., axis]
    heading = state["units/heading"].astype(np.float64)
    unit[at.COS], unit[at.SIN] = np.cos(heading), np.sin(heading)
    for field, name in UNIT_NAMES.items():
        unit[field] = state[f"units/{name}"]
    for field, name in COUNT_NAMES.items():
        number[field] = state[f"units/{name}"]
    battles.cooldown[:] = state["units/cooldown"].transpose(2, 0, 1)
    battles.harm[:] = state["units/harm"].transpose(1, 0, 2)
    for field, name in ((at.SHELL_WEAPON, "weapon"), (at.SHELL_TARGET, "target"), (at.SHELL_LIFE, "life")):
        battles.shell_count[field] = state[f"shells/{name}"]
    battles.cloud_left[:] = state["clouds/left"]
    battles.contact[:] = np.where(state["senses/is_contact"], state["senses/contacts"], -1).transpose(2, 0, 1)
    number[at.SEEN], number[at.SENSED] = (enemy_bits(state[f"senses/{name}"]) for name in ("seen", "sensed"))
    status[at.HELD : at.HELD + 2] = np.round(state["contest/score"] / PHYSICS.tick_s).T
    for field, name in STATUS_NAMES.items():
        status[field] = state[f"contest/{name}"]
    worn = state["worn"].reshape(len(state["worn"]), -1)
    full = maps.column[status[at.MAP], :, at.C_HIT_POINTS]
    battles.worn[:] = np.where((full > 0) & (worn >= full), at.DESTROYED, worn)


def enemy_bits(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a table of enemies [B, U, U] bool as bits [B, U]."""
    half = table.shape[1] // 2
    enemies = np.concatenate((table[:, :half, half:], table[:, half:, :half]), 1)
    return (enemies * (1 << np.arange(half))).sum(2)


def state_errors(battles: Battles, maps: Maps, state: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Return the largest difference of each unit [B, U] between native battles and a state, by name."""
    unit, number = battles.unit, battles.number

    def largest(differences: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.abs(differences).reshape(*differences.shape[:2], -1).max(-1)

    errors = {
        "position": largest(unit[at.X : at.Z + 1].transpose(1, 2, 0) - state["units/position"]),
        "velocity": largest(unit[at.VELOCITY_X : at.VELOCITY_Z + 1].transpose(1, 2, 0) - state["units/velocity"]),
        "heading": largest(
            np.stack((unit[at.COS] - np.cos(state["units/heading"]), unit[at.SIN] - np.sin(state["units/heading"])), -1)
        ),
        "cooldown": largest(battles.cooldown.transpose(1, 2, 0) - state["units/cooldown"]),
        "harm": largest(battles.harm.transpose(1, 2, 0) - state["units/harm"].transpose(0, 2, 1)),
        "shell life": largest(battles.shell_count[at.SHELL_LIFE] - state["shells/life"]),
        "cloud left": largest(battles.cloud_left - state["clouds/left"]),
        "contacts": largest(
            battles.contact.transpose(1, 2, 0) - np.where(state["senses/is_contact"], state["senses/contacts"], -1)
        ),
        "seen": largest(number[at.SEEN] - enemy_bits(state["senses/seen"])),
        "sensed": largest(number[at.SENSED] - enemy_bits(state["senses/sensed"])),
    }  # fmt: skip
    errors |= {name: largest(unit[field] - state[f"units/{name}"]) for field, name in UNIT_NAMES.items()}
    errors |= {name: largest(number[field] - state[f"units/{name}"].astype(int)) for field, name in COUNT_NAMES.items()}
    flies = (state["shells/life"] > 0)[..., None]
    shell = battles.shell.transpose(1, 2, 3, 0)
    errors["shell position"] = largest((shell[..., :3] - state["shells/position"]) * flies)
    errors["shell velocity"] = largest((shell[..., 3:] - state["shells/velocity"]) * flies)
    is_there = (state["clouds/left"] > 0)[..., None]
    errors["cloud position"] = largest((battles.cloud.transpose(1, 2, 3, 0) - state["clouds/position"]) * is_there)
    score = battles.status[at.HELD : at.HELD + 2].T * np.float32(PHYSICS.tick_s) - state["contest/score"]
    worn = state["worn"].reshape(len(state["worn"]), -1)
    full = maps.column[state["contest/map"], :, at.C_HIT_POINTS]
    expected = np.where((full > 0) & (worn >= full), at.DESTROYED, worn)
    for name, of_battle in (
        ("score", np.abs(score).max(1)),
        ("holder", battles.status[at.HOLDER] - state["contest/holder"]),
        ("decision", battles.status[at.DECISION] - state["contest/decision"]),
        ("overflow", battles.status[at.OVERFLOW] - state["contest/overflow"]),
        ("map", battles.status[at.MAP] - state["contest/map"]),
        ("worn", (battles.worn != expected).sum(1)),
    ):
        errors[name] = np.repeat(np.abs(of_battle)[:, None], unit.shape[2], 1)
    return errors
