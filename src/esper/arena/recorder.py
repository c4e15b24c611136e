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

Shapes: B = battles, U = units, K = projectile slots of one unit, S = side of the map.
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
    """Records the battle at one index of an arena from beginning to end.

    `teams` are the names of the players, first team first; `keyframe_every` is in decisions.
    """

    def __init__(self, arena: Arena, battle: int, *, teams: tuple[str, str] = ("red", "blue"), keyframe_every: int = 40) -> None:
        if not 0 <= battle < arena.config.battles:
            raise ValueError(f"there is no battle {battle} to record; the arena has battles 0 to {arena.config.battles - 1}")
        if arena.is_compiled:
            raise ValueError("a compiled arena rounds differently, so its replay could not be verified; record in an arena without compile")
        self.arena, self.battle, self.teams, self.keyframe_every = arena, battle, teams, keyframe_every
        self.feed_writer = FeedWriter(arena.config, teams)
        self.is_over = False
        self.winner: int | None = None  # None: a draw, or not over yet
        self._frames: list[dict[str, Tensor]] = []
        self._actions: list[dict[str, Tensor]] = []
        self._keyframes: dict[int, dict[str, Tensor]] = {}
        self._changes: list[Tensor] = []
        self._feed_items: dict[int, list[FeedItem]] = {}
        self._end: FeedItem | None = None
        self._hashes: list[StateHash] = []
        self._origin: Origin | None = None

    def begin(self) -> None:
        """Record the first frame. Call it after the reset and before the first decision."""
        if self._frames:
            raise ValueError("this recorder has begun already; make a new one for another battle")
        self._now = self._here()
        decision = int(self._now.status.decision)
        if decision:
            raise ValueError(f"battle {self.battle} has had {decision} decisions already; call begin() at the beginning of a battle")
        self._origin = Origin(
            config=msgspec.to_builtins(self.arena.config),
            place=self.battle,
            episode=int(self._now.status.episode),
            largest_team=int(self.arena.largest_team),
        )
        units = self._now.units.heat.shape[1]
        self._keep(self._now, torch.full((1, units, 2), -1, dtype=torch.int8), is_last=False)

    def add(self, actions: Actions, result: StepResult) -> None:
        """Record one decision, given the actions of all battles and their result. Does nothing after the end of the battle."""
        if not self._frames:
            raise ValueError("call begin() at the beginning of the battle, and add() after each decision")
        if self.is_over:
            return
        assert result.step_events is not None, "this is the result of a reset"
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
        self._feed_items[frame] = self.feed_writer.decision(frame, before.units, after.units, step_events)
        if self.is_over:
            winner = int(result.winner[self.battle])
            self.winner = None if winner < 0 else winner
            is_by_time = bool(result.by_time[self.battle])
            self._end = self.feed_writer.end(frame, after.units.is_alive[0], self.winner, is_by_time=is_by_time)
        self._now = after

    def write(self, path: Path | str) -> Path:
        """Write the replay of the battle, which must be over."""
        if not self.is_over:
            raise ReplayError(f"battle {self.battle} has not ended; add its decisions up to the end before writing the replay")
        return write_replay(path, self._tensors(), self._info())

    # Frames, keyframes and hashes

    def _here(self) -> State:
        """Return a copy of the battle as it is now, on the CPU."""
        return each(self.arena.state, lambda tensor: tensor[self.battle : self.battle + 1].to("cpu", copy=True))

    def _last(self, before: State, actions: Actions) -> State:
        """Compute the final state of the battle again, because the arena has replaced it.

        A batch of the same size, with copies of the battle at every index, gives the same bits: they may depend on shape and index.
        """
        arena, battles = self.arena, self.arena.config.battles
        copies = each(before, lambda tensor: tensor.to(arena.device).expand(battles, *tensor.shape[1:]).contiguous())
        again = {name: torch.cat([value.to(arena.device)] * battles) for name, value in actions.items()}
        after, _, _ = advanced(copies, again, arena.tables, arena.config)
        return each(after, lambda tensor: tensor[self.battle : self.battle + 1].to("cpu", copy=True))

    def _keep(self, state: State, fired: Tensor, *, is_last: bool) -> None:
        """Keep a frame: the state, `fired` [1, U, 2], the columns destroyed since the frame before, and keyframe and hash if due."""
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
        """Return all tensors of the replay by their names in the file."""
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


def advanced(before: State, actions: Actions, tables: Tables, config: ArenaConfig) -> tuple[State, Orders, StepEvents]:
    """Compute one decision of battles [B], without deciding winners or starting new battles, and sense the result."""
    orders = read_orders(actions, before.senses, before.units, tables, battles=len(before.units.heat))
    after, step_events = decide(before, orders, tables)
    senses = sense(after.units, after.world, after.clouds, tables, contacts=config.contacts)
    return after._replace(senses=senses), orders, step_events


def destroyed(before: Tensor, after: Tensor) -> Tensor:
    """Return the columns [N, 2] of a map whose material [S, S] has changed."""
    return (after != before).nonzero()


def shots(orders: Orders, step_events: StepEvents) -> Tensor:
    """Return the shots of a decision [B, U, 2] int8: weapon and target, -1 where a unit did not fire."""
    chosen = torch.stack((orders.weapon, orders.target), -1)
    return torch.where(step_events.fired.unsqueeze(-1), chosen, -1).to(torch.int8)


def pictures(state: State, fired: Tensor) -> dict[str, Tensor]:
    """Return the tensors of one frame of battles [B, ...], by their names in the file."""
    units, shells, clouds = state.units, state.shells, state.clouds
    numbers = (units.heading, units.hit_points, units.legs, units.heat, units.stability, units.fuel)
    flags = (units.fallen > 0, units.is_shut_down, units.is_venting, units.painted > 0)
    drawn = torch.stack((*units.position.unbind(-1), *numbers, *(flag.float() for flag in flags)), -1)  # in the order of UNIT_COLUMNS
    flies = (shells.life > 0).float()
    projectiles = torch.cat((flies.unsqueeze(-1), shells.weapon.float().unsqueeze(-1), shells.position), -1)
    smoke = torch.cat((clouds.position, (clouds.left.float() * PHYSICS.tick_s).unsqueeze(-1)), -1)
    return {
        "units": drawn,
        "projectiles": projectiles.flatten(1, 2),
        "clouds": smoke.flatten(1, 2),
        "shots": fired,
        "sensed": state.senses.sensed.to(torch.uint8) + state.senses.seen.to(torch.uint8),
        "score": state.status.score,
        "holder": state.status.holder.to(torch.int8),
    }


def device_kind(device: torch.device | str) -> str:
    """Return the kind of a device. Devices of the same kind compute the same bits."""
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{name}, torch {torch.__version__}"


def targets(actions: Actions, senses: Senses) -> Tensor:
    """Return the unit that each action [B·U] aims at, [B, U] int8; -1 if it fires nothing, or if its contact slot is empty."""
    battles = len(senses.contacts)
    fire, slot = actions["fire"].view(battles, -1), actions["target"].view(battles, -1, 1)
    contacts, is_contact = (part.gather(2, slot).squeeze(2) for part in (senses.contacts, senses.is_contact))
    return torch.where(is_contact & (fire > 0), contacts, -1).to(torch.int8)


def _written(actions: Actions, before: State) -> dict[str, Tensor]:
    """Return the actions of a decision [U, ...] as they are saved: `contact` is the chosen contact slot, `target` the unit in it."""
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
    """Return the state with `change` applied to every tensor."""
    groups: list[Any] = [type(group)(*map(change, group)) for group in state]
    return State(*groups)
