"""Replays: the file of one recorded battle, with everything needed to draw it and to compute it again.

A replay is a safetensors file with `ReplayInfo` as JSON in its metadata, so reading it executes no code. The metadata also hold a sha256 of
everything; replays of early versions have none and are read without the check. `LAYOUT` lists the required tensors. A file may hold more:
further actions under `actions/`, and the fields of the battle's state under `keyframes/`.

Shapes: F = frames (frame 0 is the start, frame f the state after decision f), A = F - 1 decisions, U = units (team 0 is the first half),
P = projectile slots, Q = cloud slots, S = side of the map, C = columns of `info.unit_columns`, N = destroyed terrain columns,
K = keyframes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

import esper
from esper.files import FileError, parse_json, reason_of
from esper.runs import read_tensors, write_tensors

FORMAT_VERSION = 1  # format of the file; others are refused
SUFFIX = ".safetensors"
INFO = "info"  # key of the `ReplayInfo` in the metadata
KEYFRAMES = "keyframes/"
ACTIONS = "actions/"

# Angles are counter-clockwise from +x. The columns from `fallen` on are 0 or 1. A unit with 0 hit points is dead.
UNIT_COLUMNS = (
    *("x", "y", "z", "heading", "hit_points", "legs", "heat", "stability", "fuel"),
    *("fallen", "shut_down", "venting", "painted"),
)

Dimensions = tuple[str | int, ...]
LAYOUT: dict[str, tuple[Dimensions, torch.dtype]] = {
    "terrain/height": (("S", "S"), torch.float32),
    "terrain/material": (("S", "S"), torch.int8),
    "terrain/changes": (("N", 3), torch.int32),  # frame, i, j: from this frame on, the column (i, j) is open ground of height 0
    "frames/units": (("F", "U", "C"), torch.float32),
    # is alive (0 or 1), kind (index into `info.weapons`), x, y, z; every unit has P / U slots, in the order of the units
    "frames/projectiles": (("F", "P", 5), torch.float32),
    "frames/clouds": (("F", "Q", 4), torch.float32),  # smoke: x, y, z, seconds left (0: no cloud)
    "frames/shots": (("F", "U", 2), torch.int8),  # fired in the decision before the frame: weapon or -1, target unit or -1
    "frames/sensed": (("F", "U", "U"), torch.uint8),  # [f, u, v]: how unit u perceives unit v: 0 not, 1 sensed, 2 seen (line of sight)
    "frames/score": (("F", 2), torch.float32),  # seconds that each team has held the zone
    "frames/holder": (("F",), torch.int8),  # team that holds the zone, or -1
    "actions/motion": (("A", "U", 4), torch.float32),  # forward, strafe (to the right), yaw (to the left), jets; in [-1, 1]
    "actions/fire": (("A", "U"), torch.int8),  # 0 none, otherwise 1 + index into `info.weapons`
    "actions/target": (("A", "U"), torch.int8),  # unit or -1
    "actions/vent": (("A", "U"), torch.int8),  # 0 or 1
    "keyframes/at": (("K",), torch.int64),  # the frame of each keyframe
}

# Tensors that a player on a web page reads; the others are needed only to compute the battle again.
DRAWN = tuple(name for name in LAYOUT if not name.startswith(KEYFRAMES))


class ReplayError(ValueError):
    """A replay cannot be written or read. The message names the file, says what is wrong and what to do."""


class FeedItem(msgspec.Struct, frozen=True, kw_only=True):
    """A notable moment of the battle, shown as a line of text."""

    frame: int
    kind: Literal["kill", "fall", "shutdown", "zone", "end"]
    text: str
    by: int | None = None  # unit that caused it
    unit: int | None = None  # unit that it happened to


class StateHash(msgspec.Struct, frozen=True, kw_only=True):
    """Digest of the battle's state at one frame, to check a battle that is computed again."""

    frame: int
    sha256: str


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The start of the battle. Together with the seed, it determines the first state."""

    config: dict[str, Any]  # config of the arena
    place: int  # index of the battle in its batch
    episode: int  # battles fought at this index before
    largest_team: int  # limit of the team size in this battle


class ReplayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a recorded battle except its tensors."""

    rules_version: int
    seed: int
    device: str  # kind of device that computed the battle, such as "cpu"
    decision_s: float  # seconds between two decisions
    seconds: float  # time limit of the battle
    zone_radius: float
    teams: tuple[str, str]  # names of the players
    size: int  # side of the map
    unit_classes: list[str]  # class of every unit
    class_table: dict[str, dict[str, float]]  # class -> hit_points, legs, heat_cap, tons and possibly more
    weapons: list[str]
    feed: list[FeedItem]
    winner: int | None  # team; None: a draw
    hashes: list[StateHash] = []
    origin: Origin | None = None  # without it, the battle can be watched but not computed again
    unit_columns: tuple[str, ...] = UNIT_COLUMNS
    score_to_win: float | None = None  # seconds in the zone
    cloud_radius: float = 4.0
    format_version: int = FORMAT_VERSION
    esper_version: str = esper.__version__

    @property
    def units(self) -> int:
        return len(self.unit_classes)


class _Versions(msgspec.Struct):
    """The fields of the info that all formats share."""

    format_version: int
    esper_version: str = "unknown"


@dataclass(frozen=True, slots=True)
class ReplayFile:
    """A replay in memory."""

    info: ReplayInfo
    tensors: dict[str, Tensor]

    @property
    def frames(self) -> int:
        return len(self.tensors["frames/units"])


def write_replay(path: Path | str, tensors: Mapping[str, Tensor], info: ReplayInfo) -> Path:
    """Write a replay atomically, replacing an older file, and return its path. Everything is checked before anything is written."""
    path = Path(path)
    problems = _problems(tensors, info)
    if problems:
        raise ReplayError(f"{path} cannot be written: {'; '.join(problems)}; give the tensors that esper.replay_file.LAYOUT lists")
    write_tensors(path, tensors, {INFO: msgspec.json.encode(info).decode()})
    return path


def read_replay(path: Path | str) -> ReplayFile:
    """Read a replay, with tensors on the CPU. The result has all tensors of `LAYOUT`, in the right shapes."""
    path = Path(path)
    try:
        tensors, metadata = read_tensors(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        target = f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "does not exist"
        what = "is a folder" if isinstance(error, IsADirectoryError) else target
        raise ReplayError(f"{path} {what}; give the file of a replay, as esper arena writes it") from error
    except FileError as error:
        raise ReplayError(f"{error}; give a replay that esper arena wrote, and copy it whole") from error
    except OSError as error:
        raise ReplayError(f"the replay cannot be read: {reason_of(error)}") from error
    info = _read_info(path, metadata)
    problems = _problems(tensors, info)
    if problems:
        raise ReplayError(f"{path} is not a complete replay: {'; '.join(problems)}; record the battle again")
    return ReplayFile(info, tensors)


def find_replays(folder: Path | str) -> list[Path]:
    """Return the replays of a run, newest first. The list may contain unreadable files and broken links."""
    found = [path for path in (Path(folder) / "replays").glob(f"*{SUFFIX}") if not path.name.startswith(".")]
    return sorted(found, key=lambda path: (_time_of(path), path.name), reverse=True)


def _time_of(path: Path) -> int:
    """Return the time of a file's last change; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read_info(path: Path, metadata: Mapping[str, str]) -> ReplayInfo:
    if INFO not in metadata:
        raise ReplayError(f"{path} is not a replay but another safetensors file; give a file that esper arena wrote")
    try:
        raw = parse_json(metadata[INFO])
        versions = msgspec.convert(raw, _Versions)
        if versions.format_version == FORMAT_VERSION:
            return msgspec.convert(raw, ReplayInfo)
    except (ValueError, RecursionError) as error:
        raise ReplayError(f"{path} is not a replay: its description cannot be understood ({error}); record the battle again") from error
    raise ReplayError(
        f"{path} is a replay of format {versions.format_version}, written by esper {versions.esper_version}; this is esper "
        f"{esper.__version__}, which reads format {FORMAT_VERSION}: watch it with that version, or record the battle again with this one"
    )


def _problems(tensors: Mapping[str, Tensor], info: ReplayInfo) -> list[str]:
    """Return everything that is missing, has a wrong type, or has a shape that does not agree with the others."""
    found = [f"{name} is missing" for name in LAYOUT if name not in tensors]
    missing = [name for name in UNIT_COLUMNS if name not in info.unit_columns]
    if missing:
        found.append(f"unit_columns lacks {', '.join(missing)}")
    unknown = sorted({name for name in info.unit_classes if name not in info.class_table})
    if unknown:
        found.append(f"class_table lacks {', '.join(unknown)}")
    if info.units < 2 or info.units % 2:
        found.append(f"there are {info.units} units, which are not two teams of the same size")
    if found:
        return found
    frames = len(tensors["frames/units"]) if tensors["frames/units"].ndim else 0
    sizes = {"F": frames, "A": frames - 1, "U": info.units, "S": info.size, "C": len(info.unit_columns)}
    for name, (dimensions, dtype) in LAYOUT.items():
        found += _misfit(name, tensors[name], dimensions, dtype, sizes)
    for name, tensor in tensors.items():
        if name.startswith(ACTIONS) and name not in LAYOUT and tuple(tensor.shape[:2]) != (frames - 1, info.units):
            found.append(f"{name} has the shape {_text(tensor.shape)}, not [{frames - 1}, {info.units}, ...]")
        if name.startswith(KEYFRAMES) and name not in LAYOUT and tuple(tensor.shape[:1]) != (sizes.get("K"),):
            found.append(f"{name} has the shape {_text(tensor.shape)}, not [{sizes.get('K')}, ...]")
    return found or [
        f"the feed item {item.kind!r} is at frame {item.frame}, but there are {frames} frames"
        for item in info.feed
        if not 0 <= item.frame < frames
    ]


def _misfit(name: str, tensor: Tensor, dimensions: Dimensions, dtype: torch.dtype, sizes: dict[str, int]) -> list[str]:
    """Return what is wrong with one tensor. The first tensor with a free dimension (N, P, Q, K) sets its size in `sizes`."""
    if tensor.ndim == len(dimensions):
        for dimension, size in zip(dimensions, tensor.shape, strict=True):
            if isinstance(dimension, str):
                sizes.setdefault(dimension, size)
    wanted = [dimension if isinstance(dimension, int) else sizes.get(dimension) for dimension in dimensions]  # None: not known yet
    found = []
    if list(tensor.shape) != wanted or (dimensions[0] == "F" and not len(tensor)):
        named = ", ".join(str(dimension) if size is None else str(size) for dimension, size in zip(dimensions, wanted, strict=True))
        found.append(f"{name} has the shape {_text(tensor.shape)}, not [{named}] ({', '.join(map(str, dimensions))})")
    if tensor.dtype != dtype:
        found.append(f"{name} is of {tensor.dtype}, not {dtype}")
    return found


def _text(shape: Sequence[int]) -> str:
    return str(list(shape))
