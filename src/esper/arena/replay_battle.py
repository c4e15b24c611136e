"""Load a recorded battle so that it can be computed again: check that everything is there, in the right shape and within its limits.

`esper.arena.replay` computes it and compares.

Shapes: K = keyframes, F = frames, A = F - 1 decisions, U = units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.native import layout as at
from esper.arena.native.simulation import Saved, Simulation, check_ranges
from esper.arena.orders import wrong_values
from esper.arena.specs import RULES_VERSION
from esper.arena.start import Grids, make_grids
from esper.config import from_mapping
from esper.replay_file import ACTIONS, KEYFRAMES, Origin, ReplayError, ReplayInfo, read_replay
from esper.vecenv import Actions

_MOST_EPISODES = 2**31  # limit of the number of earlier battles at one index


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
