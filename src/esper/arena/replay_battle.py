"""Load a recorded battle so that it can be computed again: check that everything is there, in the right shape and within its limits.

`esper.arena.replay` computes it and compares.

Shapes: K = keyframes, F = frames, A = F - 1 decisions, U = units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import esper
from esper.arena.config import ArenaConfig
from esper.arena.orders import wrong_values
from esper.arena.specs import RULES_VERSION, WEAPONS, Material
from esper.arena.start import fresh, make_atlas
from esper.arena.state import BattleStatus, Clouds, Senses, Shells, State, Units, World, named_tensors
from esper.arena.tables import make_tables
from esper.config import from_mapping
from esper.replay_file import ACTIONS, KEYFRAMES, Origin, ReplayError, ReplayInfo, read_replay
from esper.vecenv import Actions

# Type of each group of tensors, by the names of `SAVED_GROUPS`.
_GROUPS: dict[str, Any] = {"world": World, "units": Units, "shells": Shells, "clouds": Clouds, "contest": BattleStatus, "senses": Senses}
_MOST_EPISODES = 2**40  # limit of the number of earlier battles at one index


@dataclass(frozen=True)
class Battle:
    """A recorded battle that can be computed again."""

    info: ReplayInfo
    config: ArenaConfig
    origin: Origin
    start: State  # [1, ...] made from the seed, without senses
    keyframes: State  # [K, ...]
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
            f"{path} is a battle of rules version {info.rules_version}, recorded by esper {info.esper_version}; esper {esper.__version__} "
            f"has version {RULES_VERSION}: it can be watched here, but computed again only with the version that recorded it"
        )
    if info.origin is None:
        raise ReplayError(f"{path} does not hold the start of the battle; it can be watched, but not computed again: record it again")
    try:
        config = _config(info, info.origin)
        at = _places_of_keyframes(tensors[f"{KEYFRAMES}at"], replay.frames)
        start = _start(config, info.origin, seed=info.seed, which=_map(tensors, config))
        keyframes = _keyframes(tensors, start)
        actions = _actions(tensors, config)
    except ValueError as error:
        raise ReplayError(f"{path} cannot be computed again: {error}; it was changed or damaged: record the battle again") from error
    frames, terrain = (_under(prefix, tensors) for prefix in ("frames/", "terrain/"))
    return Battle(info, config, info.origin, start, keyframes, at, actions, tensors[f"{ACTIONS}target"], frames, terrain)


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
    numbers = tensors.get(f"{KEYFRAMES}contest/map")
    if numbers is None or numbers.dim() != 1 or numbers.dtype != torch.int64 or not 0 <= int(numbers[0]) < config.maps:
        raise ValueError(f"{KEYFRAMES}contest/map does not name one of its {config.maps} maps")
    return int(numbers[0])


def _start(config: ArenaConfig, origin: Origin, *, seed: int, which: int) -> State:
    """Make the first state from the seed. Only the map `which` is made, and stands for all maps; `find_broken` compares its index."""
    device = torch.device("cpu")
    tables = make_tables(config, device)
    atlas = make_atlas(config, tables, seed=seed, device=device, only=which)
    worlds = World(*(part.expand(config.maps, *part.shape[1:]) for part in atlas.worlds))
    place, episode, largest = (torch.tensor(number) for number in ([origin.place], [origin.episode], origin.largest_team))
    return fresh(place, episode, config, tables, atlas._replace(worlds=worlds), seed=seed, largest_team=largest)


def _keyframes(tensors: Mapping[str, Tensor], start: State) -> State:
    """Return the keyframes [K, ...], after checking that they have the shapes and types of `start` and that no index is out of range."""
    units = start.units.heat.shape[1]
    limits = {"senses/contacts": units, "shells/target": units, "shells/weapon": len(WEAPONS), "world/material": len(Material)}
    for name, like in named_tensors(start):
        tensor = tensors.get(f"{KEYFRAMES}{name}")
        if tensor is None:
            raise ValueError(f"{KEYFRAMES}{name} is missing")
        if tensor.shape[1:] != like.shape[1:] or tensor.dtype != like.dtype:
            shapes = [f"{part.dtype} [K{''.join(f', {size}' for size in part.shape[1:])}]" for part in (tensor, like)]
            raise ValueError(f"{KEYFRAMES}{name} is {shapes[0]}, not {shapes[1]}")
        if name in limits and not bool(((tensor >= 0) & (tensor < limits[name])).all()):
            raise ValueError(f"{KEYFRAMES}{name} is not everywhere from 0 to {limits[name] - 1}")
        if name.startswith(("units/", "shells/", "clouds/")) and not bool(tensor.isfinite().all()):
            raise ValueError(f"{KEYFRAMES}{name} is not everywhere a number")
    groups: list[Any] = [kind(*(tensors[f"{KEYFRAMES}{group}/{name}"] for name in kind._fields)) for group, kind in _GROUPS.items()]
    return State(*groups)


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
