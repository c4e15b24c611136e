"""Replay golden trajectories with native battles, the state copied before each decision.

    python tests/arena/native_golden.py                                            # compiled, all files
    NUMBA_DISABLE_JIT=1 python tests/arena/native_golden.py ladder_2v2 --decisions 2   # interpreted

Prints, for each file, one line of JSON: the decisions of living units, and the number of those that differ by more than the tolerance, by
name. The files in `data` were made by an earlier version of the rules, which computed all battles as tensors: the state before and after
decisions of bots and random players, their actions, observations, masks and rewards. That version paid only the living, subtracted nothing
for the other team, and paid the outcome to living units alone: all of it for a win, half of it for a draw.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from native_state import TOLERANCES, load_state, state_errors, step_given

from esper.arena.config import ArenaConfig, ArenaRewardConfig
from esper.arena.maps import spawn_points
from esper.arena.native import layout as at
from esper.config import from_mapping

DATA = Path(__file__).parent / "data"


def replay(name: str, *, decisions: int | None = None) -> dict[str, Any]:
    """Return how many units differ from the file of a case, by name; names without a difference are left out."""
    data = dict(np.load(DATA / f"{name}.npz"))
    config = read_config(data["config"].tobytes())
    battles, actions, views = (make(config, config.battles) for make in (at.make_battles, at.make_actions, at.make_views))
    maps = at.make_maps(*(data[f"map/{field}"] for field in ("height", "material", "way", "route_m", "zone_radius")))
    tables = at.make_native_tables(config, spawn_points(config.team_size, size=config.size).flatten(0, 1).numpy())
    rules = at.make_rules(config)
    state = {field.removeprefix("state/"): array for field, array in data.items() if field.startswith("state/")}
    shape = config.battles, config.units
    living, above = 0, dict[str, int]()

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
        compare("observation", np.abs(views.observation - data["observation"][moment]).max(-1) * alive, 1e-3)
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
    return {"case": name, "living": living, "above": {what: number for what, number in above.items() if number}}


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
    parser.add_argument("cases", nargs="*", default=sorted(path.stem for path in DATA.glob("*.npz")))
    parser.add_argument("--decisions", type=int, default=None, help="first decisions of each file; all by default")
    options = parser.parse_args()
    for name in options.cases:
        print(json.dumps(replay(name, decisions=options.decisions)), flush=True)


if __name__ == "__main__":
    main()
