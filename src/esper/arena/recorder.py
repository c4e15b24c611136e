"""Record one battle of an arena as a replay that can be watched and computed again.

    recorder = Recorder(arena, battle=3, teams=("learner", "strong"))
    arena.reset()
    recorder.begin()
    while not recorder.is_over:
        actions = ...
        recorder.add(actions, arena.step(actions))
    recorder.write("runs/arena/replays/won.safetensors")

An arena replaces an ended battle within the same decision, so the recorder computes the last frame again from the one before it. All other
frames are read from the arena.

Shapes: B = battles, U = units, K = saved battles, S = side of the map.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from esper.arena.arena import Arena, StepResult
from esper.arena.config import DECISION_S, ArenaConfig
from esper.arena.feed import FeedWriter
from esper.arena.native import layout as at
from esper.arena.native.simulation import DECIDE_ONLY, Saved, Simulation, state_hash
from esper.arena.specs import CLASSES, PHYSICS, RULES_VERSION, WEAPONS
from esper.replay_file import ACTIONS, KEYFRAMES, UNIT_COLUMNS, FeedItem, Origin, ReplayError, ReplayInfo, StateHash, write_replay
from esper.vecenv import Actions


class Recorder:
    """Records the battle at one index of an arena from beginning to end.

    `teams` are the names of the players, first team first; `keyframe_every` is in decisions.
    """

    def __init__(self, arena: Arena, battle: int, *, teams: tuple[str, str] = ("red", "blue"), keyframe_every: int = 40) -> None:
        if not 0 <= battle < arena.config.battles:
            raise ValueError(f"there is no battle {battle} to record; the arena has battles 0 to {arena.config.battles - 1}")
        self.arena, self.battle, self.teams, self.keyframe_every = arena, battle, teams, keyframe_every
        self.feed_writer = FeedWriter(arena.config, teams)
        self.is_over = False
        self.winner: int | None = None  # None: a draw, or not over yet
        self._frames: list[dict[str, Tensor]] = []
        self._actions: list[dict[str, Tensor]] = []
        self._keyframes: dict[int, Saved] = {}
        self._changes: list[Tensor] = []
        self._feed_items: dict[int, list[FeedItem]] = {}
        self._end: FeedItem | None = None
        self._hashes: list[StateHash] = []
        self._origin: Origin | None = None

    def begin(self) -> None:
        """Record the first frame. Call it after the reset and before the first decision."""
        if self._frames:
            raise ValueError("this recorder has begun already; make a new one for another battle")
        self._now = self.arena.simulation.saved([self.battle])
        status = self._now["status"][0]
        if status[at.DECISION]:
            raise ValueError(
                f"battle {self.battle} has had {status[at.DECISION]} decisions already; call begin() at the beginning of a battle"
            )
        self._map = int(status[at.MAP])
        if self.arena.makes_maps:  # else the seed does not lead to the battle
            self._origin = Origin(
                config=msgspec.to_builtins(self.arena.config),
                place=self.battle,
                episode=int(status[at.EPISODE]),
                largest_team=int(status[at.TEAM_LIMIT]),
            )
        self._keep(self._now, torch.full((self.arena.config.units, 2), -1, dtype=torch.int8), is_last=False)

    def add(self, actions: Actions, result: StepResult) -> None:
        """Record one decision, given the actions of all battles and their result. Does nothing after the end of the battle."""
        if not self._frames:
            raise ValueError("call begin() at the beginning of the battle, and add() after each decision")
        if self.is_over:
            return
        assert not result.is_first, "this is the result of a reset"
        config, before = self.arena.config, self._now
        rows = slice(self.battle * config.units, (self.battle + 1) * config.units)
        own = {name: value[rows].to("cpu", copy=True) for name, value in actions.items()}
        self.is_over = bool(result.ended[self.battle])
        simulation, index = self._again(before, own) if self.is_over else (self.arena.simulation, self.battle)
        after = simulation.saved([index])

        self._actions.append(_written(own, before))
        self._keep(after, shots(simulation)[index], is_last=self.is_over)
        frame = len(self._actions)
        self._feed_items[frame] = self.feed_writer.decision(frame, before, after, simulation.state["taken"][:, index].cpu())
        if self.is_over:
            winner = int(result.winner[self.battle])
            self.winner = None if winner < 0 else winner
            is_by_time = bool(result.by_time[self.battle])
            self._end = self.feed_writer.end(frame, after["unit"][0, at.HIT_POINTS] > 0, self.winner, is_by_time=is_by_time)
        self._now = after

    def write(self, path: Path | str) -> Path:
        """Write the replay of the battle, which must be over."""
        if not self.is_over:
            raise ReplayError(f"battle {self.battle} has not ended; add its decisions up to the end before writing the replay")
        return write_replay(path, self._tensors(), self._info())

    # Frames, keyframes and hashes

    def _again(self, before: Saved, actions: Actions) -> tuple[Simulation, int]:
        """Compute the last decision of the battle again, because the arena has replaced the battle."""
        arena = self.arena
        alone = Simulation(arena.config, arena.grids, battles=1, device=arena.device)
        alone.load(before)
        for name, value in actions.items():
            alone.actions[name].copy_(value)
        alone.run(DECIDE_ONLY)
        return alone, 0

    def _keep(self, state: Saved, fired: Tensor, *, is_last: bool) -> None:
        """Keep a frame: the state, `fired` [U, 2], the columns destroyed since the frame before, and keyframe and hash if due."""
        frame = len(self._frames)
        if frame:
            gone = destroyed(self._now["worn"][0], state["worn"][0])
            self._changes.append(torch.cat((torch.full_like(gone[:, :1], frame), gone), 1))
        self._frames.append({name: value[0].clone() for name, value in pictures(state, fired.unsqueeze(0).cpu()).items()})
        is_key = frame % self.keyframe_every == 0
        if is_key:
            self._keyframes[frame] = state
        if is_key or is_last:
            self._hashes.append(StateHash(frame=frame, sha256=state_hash(state, 0)))

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the replay by their names in the file."""
        keys = list(self._keyframes)
        tensors = {
            "terrain/height": self.arena.grids.height[self._map].clone(),
            "terrain/material": self.arena.grids.material[self._map].clone(),
            "terrain/changes": torch.cat(self._changes).int(),
            f"{KEYFRAMES}at": torch.tensor(keys),
        }
        tensors |= {f"frames/{name}": torch.stack([frame[name] for frame in self._frames]) for name in self._frames[0]}
        tensors |= {f"{ACTIONS}{name}": torch.stack([chosen[name] for chosen in self._actions]) for name in self._actions[0]}
        tensors |= {f"{KEYFRAMES}{name}": torch.cat([self._keyframes[key][name] for key in keys]) for name in self._keyframes[0]}
        return tensors

    def _info(self) -> ReplayInfo:
        assert self._end is not None
        holders = [int(frame["holder"]) for frame in self._frames]
        return ReplayInfo(
            rules_version=RULES_VERSION,
            seed=self.arena.seed,
            device=device_kind(self.arena.device),
            zone_radius=float(self.arena.grids.zone_radius[self._map]),
            teams=self.teams,
            feed=self.feed_writer.whole(self._feed_items, holders, self._end),
            winner=self.winner,
            hashes=self._hashes,
            origin=self._origin,
            **known_info(self.arena.config),
        )


def known_info(config: ArenaConfig) -> dict[str, Any]:
    """Return the fields of a replay's info that follow from the rules and the config."""
    return {
        "decision_s": DECISION_S,
        "seconds": config.seconds,
        "size": config.size,
        "unit_classes": list(config.unit_classes),
        "class_table": {name: _class_row(name) for name in CLASSES},
        "weapons": list(WEAPONS),
        "unit_columns": UNIT_COLUMNS,
        "score_to_win": config.seconds * PHYSICS.win_share,
        "cloud_radius": PHYSICS.cloud_m,
    }


def destroyed(before: Tensor, after: Tensor) -> Tensor:
    """Return the columns [N, 2] of a map that are destroyed in `after` [S·S] and not in `before`."""
    side = round(len(after) ** 0.5)
    return ((after == at.DESTROYED) & (before != at.DESTROYED)).view(side, side).nonzero()


def shots(simulation: Simulation) -> Tensor:
    """Return the shots of the last decision [B, U, 2] int8: weapon and target, -1 where a unit did not fire."""
    number = simulation.number
    chosen = torch.stack((number[at.WEAPON], number[at.TARGET]), -1)
    return torch.where((number[at.FIRED_ONCE] != 0).unsqueeze(-1), chosen, -1).to(torch.int8)


def pictures(saved: Saved, fired: Tensor) -> dict[str, Tensor]:
    """Return the tensors of one frame of saved battles [K, ...], by their names in the file."""
    unit, number, status = saved["unit"], saved["number"], saved["status"]
    heading = torch.atan2(unit[:, at.SIN].double(), unit[:, at.COS].double()).float()  # the same on all machines
    figures = (unit[:, field] for field in (at.HIT_POINTS, at.LEGS, at.HEAT, at.STABILITY, at.FUEL))
    flags = (number[:, field] > 0 for field in (at.FALLEN, at.IS_SHUT_DOWN, at.IS_VENTING, at.PAINTED))
    place = (unit[:, field] for field in (at.X, at.Y, at.Z))
    drawn = torch.stack((*place, heading, *figures, *(flag.float() for flag in flags)), -1)  # in the order of UNIT_COLUMNS
    flies, weapon = (saved["shell_count"][:, field] for field in (at.SHELL_LIFE, at.SHELL_WEAPON))
    position = saved["shell"][:, : at.SHELL_Z + 1].movedim(1, -1)
    projectiles = torch.cat(((flies > 0).float().unsqueeze(-1), weapon.float().unsqueeze(-1), position), -1)
    left = saved["cloud_left"].float() * PHYSICS.tick_s
    return {
        "units": drawn,
        "projectiles": projectiles.flatten(1, 2),
        "clouds": torch.cat((saved["cloud"].movedim(1, -1), left.unsqueeze(-1)), -1).flatten(1, 2),
        "shots": fired,
        "sensed": _table(number[:, at.SENSED]) + _table(number[:, at.SEEN]),
        "score": status[:, at.HELD : at.HELD_2 + 1].float() * PHYSICS.tick_s,
        "holder": status[:, at.HOLDER].to(torch.int8),
    }


def _table(bits: Tensor) -> Tensor:
    """Return enemies as bits [K, U] as a table of observer and enemy [K, U, U] uint8."""
    saved, units = bits.shape
    team = units // 2
    enemies = ((bits.unsqueeze(-1) >> torch.arange(team)) & 1).to(torch.uint8)  # [K, U, T]
    table = torch.zeros(saved, units, units, dtype=torch.uint8)
    table[:, :team, team:], table[:, team:, :team] = enemies[:, :team], enemies[:, team:]
    return table


def device_kind(device: torch.device | str) -> str:
    """Return the kind of a device, or raise if the arena cannot run there. Devices of the same kind compute the same bits."""
    device = torch.device(device)
    if device.type == "cuda":
        from esper.arena.native.cuda import require_cuda

        require_cuda()
        return f"{torch.cuda.get_device_name(device)}, numba-cuda {version('numba-cuda')}"
    return f"{device.type} {platform.machine()}, numba {version('numba')}"


def targets(actions: Actions, contacts: Tensor) -> Tensor:
    """Return the unit that each action [K·U] aims at, [K, U] int8; -1 if it fires nothing, or if its contact slot is empty.

    `contacts` are those of the state before, [K, C, U].
    """
    fire, slot = (actions[name].view(len(contacts), -1) for name in ("fire", "target"))
    chosen = contacts.gather(1, slot.unsqueeze(1)).squeeze(1)
    return torch.where(fire > 0, chosen, -1).to(torch.int8)


def _written(actions: Actions, before: Saved) -> dict[str, Tensor]:
    """Return the actions of a decision [U, ...] as they are saved: `contact` is the chosen contact slot, `target` the unit in it."""
    return {
        "motion": actions["motion"],
        "fire": actions["fire"].to(torch.int8),
        "vent": actions["vent"].to(torch.int8),
        "target": targets(actions, before["contact"])[0],
        "contact": actions["target"].to(torch.int16),
    }


def _class_row(name: str) -> dict[str, float]:
    kind = CLASSES[name]
    return {
        "hit_points": kind.hit_points,
        "legs": kind.leg_points,
        "heat_cap": kind.heat_cap,
        "tons": kind.tons,
        "stability": PHYSICS.stability,
        "fuel": PHYSICS.fuel_s if kind.jets_mps2 else 0.0,
    }
