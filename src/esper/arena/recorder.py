"""Writes down one battle of an arena, decision by decision, as a replay that anyone can watch and compute again.

    recorder = Recorder(arena, battle=3, teams=("learner", "strong"))
    arena.reset()
    recorder.begin()
    while not recorder.is_over:
        actions = ...
        recorder.add(actions, arena.step(actions))
    recorder.write("runs/arena/replays/won.safetensors")

A battle that ends is replaced by the next within the decision, so its last frame is computed again from the one before. Everything else is
read from the arena as it is.

Shapes: B = battles, U = units, K = projectile slots of one unit.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from esper.arena.arena import Arena, StepResult
from esper.arena.config import DECISION_S, ArenaConfig
from esper.arena.decision import StepEvents, decide
from esper.arena.feed import FeedWriter
from esper.arena.orders import Orders, read_orders
from esper.arena.sensing import sense
from esper.arena.specs import CLASSES, PHYSICS, RULES_VERSION, WEAPONS
from esper.arena.state import Senses, State, named_tensors, state_hash
from esper.arena.tables import Tables
from esper.replay_file import ACTIONS, KEYFRAMES, UNIT_COLUMNS, FeedItem, Origin, ReplayError, ReplayInfo, StateHash, write_replay
from esper.vecenv import Actions


class Recorder:
    """Of the battle in one place of an arena, from its beginning to its end. `teams` are the names of who plays, first team first;
    `keyframe_every` is in decisions."""

    def __init__(self, arena: Arena, battle: int, *, teams: tuple[str, str] = ("red", "blue"), keyframe_every: int = 40) -> None:
        if not 0 <= battle < arena.config.battles:
            raise ValueError(f"there is no battle {battle} to record; the arena has battles 0 to {arena.config.battles - 1}")
        if arena.is_compiled:
            raise ValueError("a compiled arena rounds otherwise than a plain one, so nobody could verify its replay; record in a plain one")
        self.arena, self.battle, self.teams, self.keyframe_every = arena, battle, teams, keyframe_every
        self.feed_writer = FeedWriter(arena.config, teams)
        self.is_over = False
        self.winner: int | None = None  # None: nobody, or not yet
        self._frames: list[dict[str, Tensor]] = []
        self._actions: list[dict[str, Tensor]] = []
        self._keyframes: dict[int, dict[str, Tensor]] = {}
        self._changes: list[Tensor] = []
        self._told: dict[int, list[FeedItem]] = {}
        self._end: FeedItem | None = None
        self._hashes: list[StateHash] = []
        self._origin: Origin | None = None

    def begin(self) -> None:
        """Call it after the reset, before the first decision."""
        if self._frames:
            raise ValueError("this recorder has begun; make a new one for another battle")
        self._now = self._here()
        decision = int(self._now.contest.decision)
        if decision:
            raise ValueError(f"battle {self.battle} has gone on for {decision} decisions; begin to record where a battle begins")
        self._origin = Origin(
            config=msgspec.to_builtins(self.arena.config),
            place=self.battle,
            episode=int(self._now.contest.episode),
            largest_team=int(self.arena.largest_team),
        )
        units = self._now.units.heat.shape[1]
        self._keep(self._now, torch.full((1, units, 2), -1, dtype=torch.int8), is_last=False)

    def add(self, actions: Actions, result: StepResult) -> None:
        """What was done in all battles, and what it led to. After the end of the battle nothing more is recorded."""
        if not self._frames:
            raise ValueError("call begin() where the battle begins, and add() after each of its decisions")
        if self.is_over:
            return
        assert result.step_events is not None, "this scene is of a reset"
        config, before = self.arena.config, self._now
        rows = slice(self.battle * config.units, (self.battle + 1) * config.units)
        own = {name: value[rows].cpu() for name, value in actions.items()}
        step_events = StepEvents(*(part[self.battle : self.battle + 1].cpu() for part in result.step_events))
        self.is_over = bool(result.ended[self.battle])
        after = self._last(before, own) if self.is_over else self._here()

        orders = read_orders(own, before.senses, before.units, self.feed_writer.tables, battles=1)
        self._actions.append(_written(own, before))
        self._keep(after, shots(orders, step_events), is_last=self.is_over)
        frame = len(self._actions)
        self._told[frame] = self.feed_writer.decision(frame, before.units, after.units, step_events)
        if self.is_over:
            winner = int(result.winner[self.battle])
            self.winner = None if winner < 0 else winner
            is_by_time = bool(result.by_time[self.battle])
            self._end = self.feed_writer.end(frame, after.units.is_alive[0], self.winner, is_by_time=is_by_time)
        self._now = after

    def write(self, path: Path | str) -> Path:
        """The replay of a battle that is over."""
        if not self.is_over:
            raise ReplayError(f"battle {self.battle} has not ended; a replay is of a whole battle")
        return write_replay(path, self._tensors(), self._info())

    # What is kept

    def _here(self) -> State:
        """The battle as it is now, in memory of its own on the CPU."""
        return each(self.arena.state, lambda tensor: tensor[self.battle : self.battle + 1].to("cpu", copy=True))

    def _last(self, before: State, actions: Actions) -> State:
        """How it ended: computed in every place of a batch as large, because what a device computes may depend on shape and place."""
        arena, battles = self.arena, self.arena.config.battles
        copies = each(before, lambda tensor: tensor.to(arena.device).expand(battles, *tensor.shape[1:]).contiguous())
        again = {name: torch.cat([value.to(arena.device)] * battles) for name, value in actions.items()}
        after, _, _ = advanced(copies, again, arena.tables, arena.config)
        return each(after, lambda tensor: tensor[self.battle : self.battle + 1].to("cpu", copy=True))

    def _keep(self, state: State, fired: Tensor, *, is_last: bool) -> None:
        frame = len(self._frames)
        if frame:
            gone = destroyed(self._now.world.material[0], state.world.material[0])
            self._changes.append(torch.cat((torch.full_like(gone[:, :1], frame), gone), 1))
        self._frames.append({name: value[0].clone() for name, value in pictures(state, fired).items()})
        is_key = frame % self.keyframe_every == 0
        if is_key:
            self._keyframes[frame] = {name: value[0].clone() for name, value in named_tensors(state)}
        if is_key or is_last:
            self._hashes.append(StateHash(frame=frame, sha256=state_hash(state, 0)))

    def _tensors(self) -> dict[str, Tensor]:
        first, keys = self._keyframes[0], list(self._keyframes)
        tensors = {
            "terrain/height": first["world/height"],
            "terrain/material": first["world/material"],
            "terrain/changes": torch.cat(self._changes).int(),
            f"{KEYFRAMES}at": torch.tensor(keys),
        }
        tensors |= {f"frames/{name}": torch.stack([frame[name] for frame in self._frames]) for name in self._frames[0]}
        tensors |= {f"{ACTIONS}{name}": torch.stack([chosen[name] for chosen in self._actions]) for name in self._actions[0]}
        tensors |= {f"{KEYFRAMES}{name}": torch.stack([self._keyframes[key][name] for key in keys]) for name in first}
        return tensors

    def _info(self) -> ReplayInfo:
        assert self._end is not None
        holders = [int(frame["holder"]) for frame in self._frames]
        return ReplayInfo(
            rules_version=RULES_VERSION,
            seed=self.arena.seed,
            device=device_kind(self.arena.device),
            zone_radius=float(self._keyframes[0]["world/zone_radius"]),
            teams=self.teams,
            feed=self.feed_writer.whole(self._told, holders, self._end),
            winner=self.winner,
            hashes=self._hashes,
            origin=self._origin,
            **known_info(self.arena.config),
        )


def known_info(config: ArenaConfig) -> dict[str, Any]:
    """What the info of a replay says that follows from rules and config alone."""
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


def advanced(before: State, actions: Actions, tables: Tables, config: ArenaConfig) -> tuple[State, Orders, StepEvents]:
    """One decision of battles [B] that are neither judged nor begun anew, and are sensed as they are."""
    orders = read_orders(actions, before.senses, before.units, tables, battles=len(before.units.heat))
    after, step_events = decide(before, orders, tables)
    senses = sense(after.units, after.world, after.clouds, tables, contacts=config.contacts)
    return after._replace(senses=senses), orders, step_events


def destroyed(before: Tensor, after: Tensor) -> Tensor:
    """The columns [N, 2] of a map that are of another material [S, S] than before."""
    return (after != before).nonzero()


def shots(orders: Orders, step_events: StepEvents) -> Tensor:
    """What was fired in a decision [B, U, 2] int8: weapon and target, -1 where nothing was."""
    chosen = torch.stack((orders.weapon, orders.target), -1)
    return torch.where(step_events.fired.unsqueeze(-1), chosen, -1).to(torch.int8)


def pictures(state: State, fired: Tensor) -> dict[str, Tensor]:
    """What a page draws of battles [B, ...], by its name in the file."""
    units, shells, clouds = state.units, state.shells, state.clouds
    numbers = (units.heading, units.hit_points, units.legs, units.heat, units.stability, units.fuel)
    flags = (units.fallen > 0, units.is_shut_down, units.is_venting, units.painted > 0)
    drawn = torch.stack((*units.position.unbind(-1), *numbers, *(flag.float() for flag in flags)), -1)  # as UNIT_COLUMNS
    flies = (shells.life > 0).float()
    projectiles = torch.cat((flies.unsqueeze(-1), shells.weapon.float().unsqueeze(-1), shells.position), -1)
    smoke = torch.cat((clouds.position, (clouds.left.float() * PHYSICS.tick_s).unsqueeze(-1)), -1)
    return {
        "units": drawn,
        "projectiles": projectiles.flatten(1, 2),
        "clouds": smoke.flatten(1, 2),
        "shots": fired,
        "sensed": state.senses.sensed.to(torch.uint8) + state.senses.seen.to(torch.uint8),
        "score": state.contest.score,
        "holder": state.contest.holder.to(torch.int8),
    }


def device_kind(device: torch.device | str) -> str:
    """Devices of one kind compute the same bits."""
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{name}, torch {torch.__version__}"


def targets(actions: Actions, senses: Senses) -> Tensor:
    """The units that actions of battles [B·U] aim at [B, U] int8: -1 where nothing is to be fired, or nobody is in that place among the
    contacts."""
    battles = len(senses.contacts)
    fire, slot = actions["fire"].view(battles, -1), actions["target"].view(battles, -1, 1)
    contacts, is_contact = (part.gather(2, slot).squeeze(2) for part in (senses.contacts, senses.is_contact))
    return torch.where(is_contact & (fire > 0), contacts, -1).to(torch.int8)


def _written(actions: Actions, before: State) -> dict[str, Tensor]:
    """A decision's choices [U, ...] as they lie in the file: `contact` is what was chosen, the place among the contacts, and `target` the
    unit that stood there."""
    return {
        "motion": actions["motion"],
        "fire": actions["fire"].to(torch.int8),
        "vent": actions["vent"].to(torch.int8),
        "target": targets(actions, before.senses)[0],
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


def each(state: State, change: Callable[[Tensor], Tensor]) -> State:
    """The state with every tensor of it changed."""
    groups: list[Any] = [type(group)(*map(change, group)) for group in state]
    return State(*groups)
