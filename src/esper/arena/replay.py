"""Replays of battles: recorded, read, and computed again to see that they are what happened.

    verified = verify("runs/arena/replays/won.safetensors")
    print(verified.message)            # all 431 frames and 12 hashes are what this device computes from the seed and the actions

A replay says what it began as, so its start is made again from the seed. From there it goes from keyframe to keyframe: every stretch begins
with the recorded state, and must lead to the next with the recorded actions, through the recorded frames, bit for bit. Another kind of
device rounds otherwise, so that there a replay can be played, and not verified.

Shapes: K = keyframes, B = battles that are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import esper
from esper.arena.config import ArenaConfig
from esper.arena.orders import wrong_values
from esper.arena.recorder import Recorder, advanced, device_kind, each, pictures, shots
from esper.arena.specs import RULES_VERSION
from esper.arena.start import fresh, make_atlas
from esper.arena.state import Clouds, Contest, Senses, Shells, State, Units, World, named_tensors, state_hash
from esper.arena.tables import make_tables
from esper.replay_file import KEYFRAMES, Origin, ReplayError, ReplayInfo, read_replay
from esper.vecenv import Actions

__all__ = ["Battle", "Recorder", "Verified", "device_kind", "load_battle", "verify"]

_GROUPS: dict[str, Any] = {"world": World, "units": Units, "shells": Shells, "clouds": Clouds, "contest": Contest, "senses": Senses}


@dataclass(frozen=True)
class Battle:
    """A recorded battle that can be computed again."""

    info: ReplayInfo
    config: ArenaConfig
    origin: Origin
    keyframes: State  # [K, ...]
    at: list[int]  # the frame of each
    actions: dict[str, Tensor]  # [A, U, ...] of all decisions, as the arena takes them
    frames: dict[str, Tensor]  # [F, ...] what a page draws

    @property
    def decisions(self) -> int:
        return len(self.actions["motion"])


@dataclass(frozen=True)
class Verified:
    """`ok`: bit for bit what is recorded. Where it is not and the device is of another kind, that says nothing about the replay."""

    ok: bool
    checked: int  # frames
    first_wrong_frame: int | None
    device_matches: bool
    message: str


def load_battle(path: Path | str) -> Battle:
    """A battle of the rules of today, on the CPU."""
    replay = read_replay(path)
    info, tensors = replay.info, replay.tensors
    if info.rules_version != RULES_VERSION:
        raise ReplayError(
            f"{path} is a battle of rules version {info.rules_version}, recorded by esper {info.esper_version}; esper {esper.__version__} "
            f"plays by version {RULES_VERSION}: it can be watched, and computed again only with the version that recorded it"
        )
    if info.origin is None:
        raise ReplayError(f"{path} does not say what the battle began as; it can be watched, and not computed again: record it anew")
    try:
        config = msgspec.convert(info.origin.config, ArenaConfig)
        groups: list[Any] = [kind(*(tensors[f"{KEYFRAMES}{group}/{name}"] for name in kind._fields)) for group, kind in _GROUPS.items()]
        chosen = {"fire": tensors["actions/fire"], "target": tensors["actions/contact"], "vent": tensors["actions/vent"]}
    except (KeyError, ValueError) as error:
        raise ReplayError(f"{path} cannot be computed again, because of {error}; record the battle anew") from error
    actions = {**{name: value.long() for name, value in chosen.items()}, "motion": tensors["actions/motion"]}
    if bool(wrong_values({name: value.flatten(0, 1) for name, value in actions.items()}, config).any()):
        raise ReplayError(f"{path} holds actions that cannot be; it was changed or damaged: record the battle anew")
    frames = {name.removeprefix("frames/"): tensor for name, tensor in tensors.items() if name.startswith("frames/")}
    return Battle(info, config, info.origin, State(*groups), tensors[f"{KEYFRAMES}at"].tolist(), actions, frames)


def verify(path: Path | str, device: torch.device | str = "cpu") -> Verified:
    """Computes a recorded battle again. A replay of other rules is an error."""
    battle, device = load_battle(path), torch.device(device)
    kind = device_kind(device)
    matches = kind == battle.info.device
    broken = _broken(battle)
    if broken is not None:
        frame, what = broken
        return Verified(False, 0, frame, matches, f"{what}; the file was changed or damaged after it was recorded")
    stretches = range(len(battle.at))
    found = _compute(battle, stretches, dict(enumerate(stretches)), device)
    if found.first_wrong is not None and matches:
        # What a device computes may depend on how many battles it computes at once, and on which of them it is.
        alike = [_compute(battle, [stretch] * battle.config.battles, {battle.origin.place: stretch}, device) for stretch in stretches]
        found = _together(alike)
    return _told(battle, found, kind)


def _broken(battle: Battle) -> tuple[int, str] | None:
    """What is wrong on every device: a keyframe that has not its hash, or a start that is not that of the seed."""
    hashes = {entry.frame: entry.sha256 for entry in battle.info.hashes}
    if not battle.at or battle.at[0] != 0 or battle.decisions not in hashes:
        return 0, "the first keyframe or the last hash is missing"
    for index, frame in enumerate(battle.at):
        if hashes.get(frame) != state_hash(battle.keyframes, index):
            return frame, f"the keyframe at frame {frame} has not the hash that was written down for it"
    started = dict(named_tensors(_start(battle)))
    for name, tensor in named_tensors(battle.keyframes):
        if not name.startswith("senses/") and not torch.equal(tensor[:1], started[name]):  # senses are a device's own
            return 0, f"the battle does not begin as seed {battle.info.seed} has it: {name} differs"
    return None


def _start(battle: Battle) -> State:
    """The first state, made from the seed. All maps but its own are left out: whether it is the right one is seen by its number."""
    config, origin = battle.config, battle.origin
    device = torch.device("cpu")
    tables = make_tables(config, device)
    atlas = make_atlas(config, tables, seed=battle.info.seed, device=device, only=int(battle.keyframes.contest.map[0]))
    worlds = World(*(part.expand(config.maps, *part.shape[1:]) for part in atlas.worlds))
    place, episode, largest = (torch.tensor(number) for number in ([origin.place], [origin.episode], origin.largest_team))
    return fresh(place, episode, config, tables, atlas._replace(worlds=worlds), seed=battle.info.seed, largest_team=largest)


@dataclass(frozen=True)
class _Findings:
    first_wrong: int | None  # frame
    apart_m: float  # how far any unit is from where it was recorded


def _compute(battle: Battle, rows: Sequence[int], looked_at: dict[int, int], device: torch.device) -> _Findings:
    """Computes the stretches `rows` [B] at once, and compares those in the places `looked_at`, place -> stretch."""
    config, tables = battle.config, make_tables(battle.config, device)
    hashes = {entry.frame: entry.sha256 for entry in battle.info.hashes}
    ends = [*battle.at[1:], battle.decisions]
    state = each(battle.keyframes, lambda tensor: tensor[list(rows)].to(device))
    first = torch.tensor([battle.at[stretch] for stretch in rows])
    wrong: list[int] = []
    apart = 0.0
    for step in range(max(ends[stretch] - battle.at[stretch] for stretch in rows)):
        decision = (first + step).clamp_max(battle.decisions - 1)  # shorter stretches go on for nothing
        actions: Actions = {name: value[decision].flatten(0, 1).to(device) for name, value in battle.actions.items()}
        state, orders, deeds = advanced(state, actions, tables, config)
        drawn = {name: value.cpu() for name, value in pictures(state, shots(orders, deeds)).items()}
        for row, stretch in looked_at.items():
            frame = battle.at[stretch] + step + 1
            if frame > ends[stretch]:
                continue
            is_same = all(torch.equal(value[row], battle.frames[name][frame]) for name, value in drawn.items())
            if frame == ends[stretch]:
                is_same = is_same and state_hash(state, row) == hashes.get(frame)
            if not is_same:
                wrong.append(frame)
                apart = max(apart, float((drawn["units"][row] - battle.frames["units"][frame])[:, :3].abs().max()))
    return _Findings(min(wrong, default=None), apart)


def _together(findings: Sequence[_Findings]) -> _Findings:
    wrong = [found.first_wrong for found in findings if found.first_wrong is not None]
    return _Findings(min(wrong, default=None), max(found.apart_m for found in findings))


def _told(battle: Battle, found: _Findings, kind: str) -> Verified:
    frames, matches = battle.decisions + 1, kind == battle.info.device
    if found.first_wrong is None:
        where = "" if matches else f", although it was recorded on another kind ({battle.info.device})"
        message = f"all {frames} frames and {len(battle.info.hashes)} hashes are what this device computes from seed and actions{where}"
    elif matches:
        message = f"frame {found.first_wrong} is not what seed and actions lead to; the file or the rules were changed"
    else:
        message = (
            f"it was recorded on {battle.info.device} and this is {kind}, which rounds otherwise: it can be played here, and verified only "
            f"there. Computed here from keyframe to keyframe, no unit is further than {found.apart_m:.3g} m from where it was"
        )
    return Verified(found.first_wrong is None, frames, found.first_wrong, matches, message)
