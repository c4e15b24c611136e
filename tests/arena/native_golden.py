"""Replay golden trajectories with native battles, the state copied before each decision.

    python -m tests.arena.native_golden                                              # compiled, all files
    ESPER_ARENA_NUMBA=0 python -m tests.arena.native_golden ladder_2v2 --decisions 2   # interpreted

Prints, for each file, one line of JSON: the decisions of living units, the ties, and the number of other decisions that differ by more than
the tolerance, by name. A tie is an observed point of the terrain on the edge of two columns, where rounding decides which one is seen.

The files in `data` were made by an earlier version of the rules, which computed all battles as tensors: states before and after decisions
of bots and random players, their actions, observations, masks and rewards. That version paid only the living, subtracted nothing for the
other team, and paid the outcome to living units alone: all of it for a win, half of it for a draw.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from esper.arena.config import ArenaConfig, ArenaRewardConfig
from esper.arena.maps import spawn_points
from esper.arena.native import layout as at
from esper.config import from_mapping
from tests.arena.native_state import TOLERANCES, Arrays, load_state, state_errors, step_given

DATA = Path(__file__).parent / "data"
EDGE_M = TOLERANCES["position"]  # a point that is nearer than this to an edge is on it


def replay(path: Path, *, decisions: int | None = None) -> dict[str, Any]:
    """Return how many units differ from a file of decisions, by name; names without a difference are left out."""
    data = dict(np.load(path))
    config = read_config(data["config"].tobytes())
    battles, actions, views = (make(config, config.battles) for make in (at.make_battles, at.make_actions, at.make_views))
    maps = at.make_maps(*(data[f"map/{field}"] for field in ("height", "material", "way", "route_m", "zone_radius")))
    tables = at.make_tables(config, spawn_points(config.team_size, size=config.size).flatten(0, 1).numpy())
    rules = at.make_rules(config)
    state = {field.removeprefix("state/"): array for field, array in data.items() if field.startswith("state/")}
    shape = config.battles, config.units
    living, ties, above = 0, 0, dict[str, int]()

    def compare(what: str, errors: np.ndarray[Any, Any], tolerance: float) -> None:
        above[what] = above.get(what, 0) + int((errors > tolerance).sum())

    for moment in range(len(data["reward"]) if decisions is None else decisions):
        before, after = ({field: array[side, moment] for field, array in state.items()} for side in (0, 1))
        load_state(battles, maps, before)
        for field in ("fire", "target", "vent", "motion"):
            getattr(actions, field)[:] = data[f"action/{field}"][moment]
        team_size = after["units/present"].sum(1).astype(np.int32) // 2
        step_given(battles, maps, tables, rules, actions, views, after["contest/map"].astype(np.int32), team_size)
        alive = after["units/hit_points"] > 0
        living += int(alive.sum())
        for what, errors in state_errors(battles, maps, after).items():
            compare(what, errors * alive, TOLERANCES.get(what, 1e-3))
        seen = np.abs(views.observation - data["observation"][moment]) * alive[..., None]
        tied = seen * on_edges(after, tables, seen.shape[-1]) > 1e-3
        ties += int(tied.any(-1).sum())
        compare("observation", (seen * ~tied).max(-1), 1e-3)
        for head in ("fire", "target", "vent"):
            wrong = getattr(views, head).astype(bool) != data[f"mask/{head}"][moment]
            compare(f"mask {head}", wrong.reshape(*shape, -1).any(-1) * alive, 0.5)
        paid = battles.reward[at.PAID] - battles.reward[at.PAID_OUTCOME] + old_outcome(battles, config)
        compare("reward", np.abs(paid - data["reward"][moment]), 1e-4)
        compare("taken", np.abs(battles.taken.transpose(1, 0, 2) - data["taken"][moment]).max(1), 1e-4)
        compare("fired", battles.number[at.FIRED_ONCE] != data["fired"][moment], 0.5)
        compare("was_alive", battles.number[at.WAS_ALIVE] != data["was_alive"][moment], 0.5)
        compare("ended", battles.status[at.HAS_ENDED] != data["ended"][moment], 0.5)
        compare("by_time", battles.status[at.IS_BY_TIME] != data["by_time"][moment], 0.5)
        compare("winner", (battles.status[at.WINNER] != data["winner"][moment]) & data["ended"][moment], 0.5)
    return {"case": path.stem, "living": living, "ties": ties, "above": {what: number for what, number in above.items() if number}}


def on_edges(state: Arrays, tables: at.Tables, width: int) -> np.ndarray[Any, Any]:
    """Return which numbers of observations [B, U, width] are about a point on the edge of two columns, up to rounding of its place."""
    heading, ahead, left = state["units/heading"].astype(np.float64)[..., None], *tables.cell.astype(np.float64)
    x, y = (state["units/position"][..., axis, None] for axis in (0, 1))
    points = x + ahead * np.cos(heading) - left * np.sin(heading), y + ahead * np.sin(heading) + left * np.cos(heading)
    cells = np.logical_or(*(np.abs(point - np.round(point)) < EDGE_M for point in points))
    terrain = np.repeat(cells, 3, axis=-1)
    return np.concatenate((np.zeros((*cells.shape[:2], width - terrain.shape[-1]), bool), terrain), -1)


def read_config(text: bytes) -> ArenaConfig:
    """Read the config of a file, with the rewards of the version that made it."""
    config = from_mapping(ArenaConfig, msgspec.json.decode(text))
    assert config.reward == msgspec.structs.replace(ArenaRewardConfig(), gamma=0.99)
    return msgspec.structs.replace(config, reward=msgspec.structs.replace(config.reward, zero_sum=0.0, pays_dead=False))


def old_outcome(battles: at.Battles, config: ArenaConfig) -> np.ndarray[Any, Any]:
    """Return what the earlier version paid for the outcome, [B, U]."""
    ended, winner = (battles.status[field][:, None] for field in (at.HAS_ENDED, at.WINNER))
    team = np.arange(config.units) // config.team_size
    share = np.where(winner == -1, 0.5, winner == team)
    survived = (battles.number[at.WAS_ALIVE] != 0) & (battles.number[at.HAS_DIED] == 0)
    return config.reward.outcome * share * survived * (ended != 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of files; all by default")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the files")
    parser.add_argument("--decisions", type=int, default=None, help="first decisions of each file; all by default")
    options = parser.parse_args()
    for path in [options.data / f"{case}.npz" for case in options.cases] or sorted(options.data.glob("*.npz")):
        print(json.dumps(replay(path, decisions=options.decisions)), flush=True)


if __name__ == "__main__":
    main()
