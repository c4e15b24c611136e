"""Verify replays: compute a recorded battle again and compare.

    verified = verify("runs/arena/replays/won.safetensors")
    print(verified.message)            # all 431 frames and 12 hashes are what this device computes from seed and actions

Loading checks that everything is there, in the right shape and within its limits. Contradictions within the file, with the seed or with the
rules are then found on any device, without computing the battle. Finally the segments between keyframes are computed: every segment begins
with the recorded state and must lead, with the recorded actions and through the recorded frames, to the next keyframe, bit for bit. Another
kind of device rounds differently: it can play a replay, but not verify it.

Shapes: K = keyframes, F = frames, A = F - 1 decisions, U = units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.feed import FeedWriter
from esper.arena.native import layout as at
from esper.arena.native.simulation import DECIDE_ONLY, Saved, Simulation, check_ranges, state_hash
from esper.arena.orders import wrong_values
from esper.arena.recorder import Recorder, destroyed, device_kind, known_info, pictures, shots, targets
from esper.arena.specs import PHYSICS, RULES_VERSION
from esper.arena.start import Grids, make_grids
from esper.config import from_mapping
from esper.replay_file import ACTIONS, KEYFRAMES, UNIT_COLUMNS, FeedItem, Origin, ReplayError, ReplayInfo, read_replay
from esper.vecenv import Actions

__all__ = ["Battle", "Recorder", "VerifyResult", "device_kind", "load_battle", "verify"]

_MOST_EPISODES = 2**31  # limit of the number of earlier battles at one index


@dataclass(frozen=True)
class VerifyResult:
    """Result of `verify`. If `ok` is false and the device is of another kind, the replay may still be correct."""

    ok: bool  # the computed battle equals the recorded one, bit for bit
    checked: int  # number of frames; 0 if the file contradicts itself
    first_wrong_frame: int | None
    device_matches: bool
    message: str


def verify(path: Path | str, device: torch.device | str = "cpu") -> VerifyResult:
    """Compute a recorded battle again and compare it with the replay. Raise ReplayError for a replay of other rules."""
    battle, device = load_battle(path), torch.device(device)
    kind = device_kind(device)
    matches = kind == battle.info.device
    broken = _first_contradiction(battle)
    if broken is not None:
        return _changed(*broken, device_matches=matches)
    found = _compute(battle, device)
    broken = None if found.wrong else _wrong_feed(battle, found.feed_items)
    return _result(battle, found, kind) if broken is None else _changed(*broken, device_matches=matches)


# Load


@dataclass(frozen=True)
class Battle:
    """A recorded battle that can be computed again."""

    info: ReplayInfo
    config: ArenaConfig
    origin: Origin
    grids: Grids  # the maps of the seed, of which only that of the battle is made
    start: Saved  # [1, ...] made from the seed
    keyframes: Saved  # [K, ...]
    at: list[int]  # frame of each keyframe
    actions: dict[str, Tensor]  # [A, U, ...] actions of all decisions, as the arena takes them
    targets: Tensor  # [A, U] unit that each action aims at
    frames: dict[str, Tensor]  # [F, ...] tensors under "frames/"
    terrain: dict[str, Tensor]  # tensors under "terrain/": height and material at the start, and changes

    @property
    def decisions(self) -> int:
        return len(self.actions["motion"])

    @cached_property
    def hashes(self) -> dict[int, str]:
        """Frame -> hash."""
        return {entry.frame: entry.sha256 for entry in self.info.hashes}

    def changes_at(self, frame: int) -> Tensor:
        """Return the columns [N, 2] that were destroyed in the decision before a frame, according to the file."""
        changes = self.terrain["changes"]
        return changes[changes[:, 0] == frame, 1:]


def load_battle(path: Path | str) -> Battle:
    """Load a battle of the current rules, on the CPU. Raise ReplayError if it cannot be computed again."""
    replay = read_replay(path)
    info, tensors = replay.info, replay.tensors
    if info.rules_version != RULES_VERSION:
        raise ReplayError(
            f"{path} is a battle of rules version {info.rules_version}, recorded by esper {info.esper_version}; this esper has rules "
            f"version {RULES_VERSION}: it can be watched here, but computed again only with the version that recorded it"
        )
    if info.origin is None:
        raise ReplayError(f"{path} does not hold the start of the battle; it can be watched, but not computed again: record it again")
    try:
        config = _config(info, info.origin)
        places = _places_of_keyframes(tensors[f"{KEYFRAMES}at"], replay.frames)
        grids = make_grids(config, seed=info.seed, only=_map(tensors, config))
        start = _start(config, info.origin, grids, seed=info.seed)
        keyframes = _keyframes(tensors, start, config)
        actions = _actions(tensors, config)
    except ValueError as error:
        raise ReplayError(f"{path} cannot be computed again: {error}; it was changed or damaged: record the battle again") from error
    frames, terrain = (_under(prefix, tensors) for prefix in ("frames/", "terrain/"))
    return Battle(info, config, info.origin, grids, start, keyframes, places, actions, tensors[f"{ACTIONS}target"], frames, terrain)


def _config(info: ReplayInfo, origin: Origin) -> ArenaConfig:
    """Return the config of the arena, after checking it and the place of the battle in it."""
    config = from_mapping(ArenaConfig, origin.config)
    if config.units != info.units:
        raise ValueError(f"it has {info.units} units, but its config has {config.units}")
    for name, value, first, end in (
        ("place", origin.place, 0, config.battles),
        ("episode", origin.episode, 0, _MOST_EPISODES),
        ("largest_team", origin.largest_team, 1, config.team_size + 1),
    ):
        if not first <= value < end:
            raise ValueError(f"its {name} at the start is {value}, but must be from {first} to {end - 1}")
    return config


def _places_of_keyframes(at: Tensor, frames: int) -> list[int]:
    """Return the frame of each keyframe, after checking them."""
    places = [int(frame) for frame in at]
    if not places or places != sorted(set(places)) or places[0] < 0 or places[-1] >= frames:
        raise ValueError(f"its keyframes are at frames {places}, which must rise from 0 to {frames - 1} at most")
    return places


def _map(tensors: Mapping[str, Tensor], config: ArenaConfig) -> int:
    """Return the index of the map on which the battle was fought, according to the file."""
    status = tensors.get(f"{KEYFRAMES}status")
    is_whole = status is not None and status.dim() == 2 and status.dtype == torch.int32 and status.shape[1] > at.MAP
    if status is None or not is_whole or not 0 <= int(status[0, at.MAP]) < config.maps:
        raise ValueError(f"{KEYFRAMES}status does not name one of its {config.maps} maps")
    return int(status[0, at.MAP])


def _start(config: ArenaConfig, origin: Origin, grids: Grids, *, seed: int) -> Saved:
    """Make the first state from the seed."""
    simulation = Simulation(config, grids, battles=1, device=torch.device("cpu"))
    simulation.begin(seed=seed, largest_team=origin.largest_team, places=[origin.place], episode=origin.episode)
    return simulation.saved([0])


def _keyframes(tensors: Mapping[str, Tensor], start: Saved, config: ArenaConfig) -> Saved:
    """Return the keyframes [K, ...], after checking that they have the shapes and types of `start` and no impossible values."""
    keyframes = Saved()
    for name, like in start.items():
        tensor = tensors.get(f"{KEYFRAMES}{name}")
        if tensor is None:
            raise ValueError(f"{KEYFRAMES}{name} is missing")
        if tensor.shape[1:] != like.shape[1:] or tensor.dtype != like.dtype:
            shapes = [f"{part.dtype} [K{''.join(f', {size}' for size in part.shape[1:])}]" for part in (tensor, like)]
            raise ValueError(f"{KEYFRAMES}{name} is {shapes[0]}, not {shapes[1]}")
        keyframes[name] = tensor
    check_ranges(lambda name, row: keyframes[name] if row is None else keyframes[name][:, row], config)
    return keyframes


def _actions(tensors: Mapping[str, Tensor], config: ArenaConfig) -> Actions:
    """Return the actions [A, U, ...] as the arena takes them: `target` is the contact slot, not the unit."""
    fire, contact = tensors[f"{ACTIONS}fire"], tensors.get(f"{ACTIONS}contact")
    if contact is None or contact.shape != fire.shape or contact.is_floating_point():
        raise ValueError(f"{ACTIONS}contact is missing, or not one whole number for every unit and decision")
    chosen = {"fire": fire, "target": contact, "vent": tensors[f"{ACTIONS}vent"]}
    actions = {**{name: value.long() for name, value in chosen.items()}, "motion": tensors[f"{ACTIONS}motion"]}
    if bool(wrong_values({name: value.flatten(0, 1) for name, value in actions.items()}, config).any()):
        raise ValueError("it holds actions with impossible values")
    return actions


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# Find contradictions within the file, with the seed or with the rules

_Wrong = tuple[int, str] | None  # frame, and what is wrong there


def _first_contradiction(battle: Battle) -> _Wrong:
    """Return the first contradiction that a check finds, or None."""
    for check in (_wrong_info, _wrong_hashes, _wrong_start, _wrong_terrain, _wrong_pictures, _wrong_end):
        found = check(battle)
        if found is not None:
            return found
    return None


def _wrong_info(battle: Battle) -> _Wrong:
    """Compare the info with the config, the rules and the first keyframe."""
    info = battle.info
    for name, value in known_info(battle.config).items():
        if getattr(info, name) != value:
            return 0, f"{name} is not that of the battle's config and rules"
    radius = float(battle.grids.zone_radius[int(battle.keyframes["status"][0, at.MAP])])
    if info.zone_radius != radius:
        return 0, f"zone_radius is {info.zone_radius}, and that of the map {radius}"
    return None


def _wrong_hashes(battle: Battle) -> _Wrong:
    """Check that every keyframe and the last frame has a hash, and that those of the keyframes are right."""
    if battle.at[0] != 0 or battle.decisions not in battle.hashes:
        return 0, "the first keyframe or the last hash is missing"
    expected = sorted({*battle.at, battle.decisions})
    if [entry.frame for entry in battle.info.hashes] != expected:
        return 0, f"the hashes are not those of the keyframes and the last frame, which are {expected}"
    for index, frame in enumerate(battle.at):
        if battle.hashes[frame] != state_hash(battle.keyframes, index):
            return frame, f"the keyframe at frame {frame} does not have its recorded hash"
    return None


def _wrong_start(battle: Battle) -> _Wrong:
    """Compare the first keyframe with the start that the seed gives."""
    for name, tensor in battle.keyframes.items():
        given, made = tensor[0], battle.start[name][0]
        if name == "number":  # a device rounds what units sense in its own way; `_wrong_senses` checks it
            given, made = given[: at.SEEN], made[: at.SEEN]
        if name != "contact" and not torch.equal(given, made):
            return 0, f"the battle does not begin as seed {battle.info.seed} makes it: {name} differs"
    return None


def _wrong_terrain(battle: Battle) -> _Wrong:
    """Compare the drawn terrain with the map at the start, and its destroyed columns with every keyframe."""
    terrain, which, side = battle.terrain, int(battle.start["status"][0, at.MAP]), battle.config.size
    for name, drawn, first in (
        ("height", terrain["height"], battle.grids.height),
        ("material", terrain["material"], battle.grids.material),
    ):
        if not torch.equal(drawn, first[which]):
            return 0, f"terrain/{name} is not that of the map that the battle began on"
    frame, *column = terrain["changes"].long().unbind(1)
    is_there = (frame >= 1) & (frame <= battle.decisions)
    for axis in column:
        is_there &= (axis >= 0) & (axis < side)
    if not bool(is_there.all()):
        return 0, "terrain/changes names frames or columns that are not there"
    for index, keyframe in enumerate(battle.at):
        is_gone, by_changes = battle.keyframes["worn"][index] == at.DESTROYED, torch.zeros(side * side, dtype=torch.bool)
        by_changes[(column[0] * side + column[1])[frame <= keyframe]] = True
        if not torch.equal(is_gone, by_changes):
            return keyframe, f"terrain/changes does not lead to the terrain of the keyframe at frame {keyframe}"
    return None


def _wrong_pictures(battle: Battle) -> _Wrong:
    """Compare the drawn frames at the keyframes with the keyframes."""
    fired = torch.full((len(battle.at), battle.config.units, 2), -1, dtype=torch.int8)
    for name, drawn in pictures(battle.keyframes, fired).items():
        for index, frame in enumerate(battle.at):
            is_known = name != "shots" or frame == 0  # a keyframe does not hold the shots of the decision before it
            if is_known and not torch.equal(drawn[index], battle.frames[name][frame]):
                return frame, f"frames/{name} is not that of the keyframe at frame {frame}"
    return None


def _wrong_end(battle: Battle) -> _Wrong:
    """Check that the battle ends at the last frame and not before, with the recorded winner."""
    ending, last = _ending(battle), battle.decisions
    over = [int(frame) for frame in ending.ended.nonzero().flatten()]
    if not over:
        return last, "the battle is not over at its last frame"
    if over[0] < last:
        return over[0], f"the battle is over at frame {over[0]} already"
    winner = int(ending.winner[last])
    if battle.info.winner != (None if winner < 0 else winner):
        return last, f"the winner is not {battle.info.winner}, but {'nobody' if winner < 0 else winner}"
    return None


class _Ending(NamedTuple):
    """Whether and how a battle was over at every frame [F]."""

    ended: Tensor  # bool
    winner: Tensor  # team; -1: a draw
    by_time: Tensor  # bool


def _ending(battle: Battle) -> _Ending:
    """Return whether and how the battle was over at every frame, as `esper.arena.native.battle.find_end` decides it."""
    score = battle.frames["score"]  # [F, 2]
    lives = (battle.frames["units"][..., UNIT_COLUMNS.index("hit_points")] > 0).view(len(score), 2, -1).any(2)  # [F, 2]
    wins = (score >= battle.config.seconds * PHYSICS.win_share - 1e-4) | (lives & ~lives.flip(1))
    is_decided = wins.any(1) | ~lives.any(1)
    wins = torch.where(is_decided.unsqueeze(1), wins, score > score.flip(1) + 1e-4)
    is_over = torch.arange(len(score)) >= battle.config.decisions
    winner = torch.where(wins[:, 0] == wins[:, 1], -1, torch.where(wins[:, 0], 0, 1))
    return _Ending(is_decided | is_over, winner, is_over & ~is_decided)


# Compute and compare


@dataclass(frozen=True)
class _Findings:
    """Differences between the computed and the recorded battle."""

    wrong: dict[int, list[str]] = field(default_factory=dict)  # frame -> names of the tensors that differ
    feed_items: dict[int, list[FeedItem]] = field(default_factory=dict)  # frame -> feed items of the decision before it, as computed
    apart_m: float = 0.0  # largest distance of a unit from its recorded position


def _compute(battle: Battle, device: torch.device) -> _Findings:
    """Compute all segments between keyframes at once, as battles of a simulation, and compare."""
    segments, feed_writer = range(len(battle.at)), FeedWriter(battle.config, battle.info.teams)
    ends = [*battle.at[1:], battle.decisions]
    simulation = Simulation(battle.config, battle.grids, battles=len(battle.at), device=device)
    simulation.load(battle.keyframes)
    state = simulation.saved(segments)
    wrong, feed_items, apart = _wrong_senses(battle, state), dict[int, list[FeedItem]](), 0.0
    first = torch.tensor(battle.at)
    for step in range(max(end - begin for begin, end in zip(battle.at, ends, strict=True))):
        decision = (first + step).clamp_max(battle.decisions - 1)  # shorter segments continue, but are not compared
        actions: Actions = {name: value[decision].flatten(0, 1) for name, value in battle.actions.items()}
        for name, value in actions.items():
            simulation.actions[name].copy_(value)
        simulation.run(DECIDE_ONLY)
        before, state = state, simulation.saved(segments)
        drawn, aims = pictures(state, shots(simulation).cpu()), targets(actions, before["contact"])
        taken = simulation.state["taken"].movedim(1, 0).cpu()
        for row, (begin, end) in enumerate(zip(battle.at, ends, strict=True)):
            frame = begin + step + 1
            if frame > end:
                continue
            feed_items[frame] = feed_writer.decision(frame, _one(before, row), _one(state, row), taken[row])
            names = [f"frames/{name}" for name, value in drawn.items() if not torch.equal(value[row], battle.frames[name][frame])]
            if not torch.equal(aims[row], battle.targets[frame - 1]):
                names.append("actions/target")
            gone = destroyed(before["worn"][row], state["worn"][row]).int()
            if not torch.equal(gone, battle.changes_at(frame)):
                names.append("terrain/changes")
            if frame == end and state_hash(state, row) != battle.hashes.get(frame):
                names.append("the hash")
            if names:
                wrong[frame] = names
                apart = max(apart, float((drawn["units"][row] - battle.frames["units"][frame])[:, :3].abs().max()))
    return _Findings(wrong, feed_items, apart)


def _wrong_senses(battle: Battle, state: Saved) -> dict[int, list[str]]:
    """Return the keyframes whose senses are not what their state gives. For the first keyframe, this is the only check of the senses."""
    pairs = [(state[name], battle.keyframes[name]) for name in ("number", "contact")]
    return {
        frame: ["keyframes/senses"]
        for row, frame in enumerate(battle.at)
        if not all(torch.equal(one[row], other[row]) for one, other in pairs)
    }


def _one(saved: Saved, row: int) -> Saved:
    return {name: tensor[row : row + 1] for name, tensor in saved.items()}


def _wrong_feed(battle: Battle, feed_items: Mapping[int, Sequence[FeedItem]]) -> _Wrong:
    """Compare the feed of the replay with `feed_items`, the feed items by frame as computed again."""
    feed_writer, ending = FeedWriter(battle.config, battle.info.teams), _ending(battle)
    alive = battle.frames["units"][-1, :, UNIT_COLUMNS.index("hit_points")] > 0
    end = feed_writer.end(battle.decisions, alive, battle.info.winner, is_by_time=bool(ending.by_time[-1]))
    expected, given = feed_writer.whole(feed_items, [int(holder) for holder in battle.frames["holder"]], end), battle.info.feed
    if given == expected:
        return None
    first = next((index for index, pair in enumerate(zip(given, expected, strict=False)) if pair[0] != pair[1]), None)
    item = (given[len(expected) :] or expected[len(given) :])[0] if first is None else expected[first]
    return item.frame, f"the feed is wrong at frame {item.frame}"


def _result(battle: Battle, found: _Findings, kind: str) -> VerifyResult:
    """Return the result with its message."""
    frames, matches = battle.decisions + 1, kind == battle.info.device
    first = min(found.wrong, default=None)
    if first is None:
        where = "" if matches else f", although it was recorded on another kind ({battle.info.device})"
        message = f"all {frames} frames and {len(battle.hashes)} hashes are what this device computes from seed and actions{where}"
    elif matches:
        what = ", ".join(found.wrong[first])
        message = f"frame {first} is not what seed and actions lead to ({what}); the file or the rules were changed"
    else:
        message = (
            f"it was recorded on {battle.info.device} and this is {kind}, which rounds otherwise: it can be played here, and verified only "
            f"there. Computed here from keyframe to keyframe, no unit is further than {found.apart_m:.3g} m from its recorded position"
        )
    return VerifyResult(first is None, frames, first, matches, message)


def _changed(frame: int, what: str, *, device_matches: bool) -> VerifyResult:
    """Return the result for a file that contradicts itself."""
    return VerifyResult(False, 0, frame, device_matches, f"{what}; the file was changed or damaged after it was recorded")
