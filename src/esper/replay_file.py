"""The file of one recorded battle: what a page draws, frame by frame, and what it takes to compute the battle again.

It is a safetensors file; `ReplayInfo` lies as JSON in its metadata, so nothing in it is executed when it is read. A sha256 over everything
lies there too; replays from before there was one are read without it. `LAYOUT` is the table of what must be in the file. Beside that there
may be more heads under `actions/` and the fields of the battle's state under `keyframes/`.

Shapes: F = frames (frame 0 is the start, frame f the state after decision f), A = F - 1 decisions, U = units (team 0 is the first half),
P = places for projectiles, Q = places for clouds, S = side of the map, C = columns of `info.unit_columns`, N = columns of terrain that
were destroyed, K = keyframes.
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

FORMAT_VERSION = 1  # of the file; others are refused
SUFFIX = ".safetensors"
INFO = "info"  # its key in the metadata
KEYFRAMES = "keyframes/"
ACTIONS = "actions/"

# Angles are counter-clockwise from +x; `fallen` and what follows is 0 or 1; a unit without hit points is dead.
UNIT_COLUMNS = (
    *("x", "y", "z", "heading", "hit_points", "legs", "heat", "stability", "fuel"),
    *("fallen", "shut_down", "venting", "painted"),
)

Dimensions = tuple[str | int, ...]
LAYOUT: dict[str, tuple[Dimensions, torch.dtype]] = {
    "terrain/height": (("S", "S"), torch.float32),
    "terrain/material": (("S", "S"), torch.int8),
    "terrain/changes": (("N", 3), torch.int32),  # frame, i, j: from that frame on the column is open ground of height 0
    "frames/units": (("F", "U", "C"), torch.float32),
    # is alive (0 or 1), kind (index into `info.weapons`), x, y, z; every unit has as many places as the others, the first unit the first
    "frames/projectiles": (("F", "P", 5), torch.float32),
    "frames/clouds": (("F", "Q", 4), torch.float32),  # smoke: x, y, z, seconds left (0: there is none)
    "frames/shots": (("F", "U", 2), torch.int8),  # fired in the decision before the frame: weapon or -1, target unit or -1
    "frames/sensed": (("F", "U", "U"), torch.uint8),  # by the unit of the row: 0 not, 1 sensed, 2 seen (line of sight)
    "frames/score": (("F", 2), torch.float32),  # seconds for which each team held the zone
    "frames/holder": (("F",), torch.int8),  # team that holds the zone, or -1
    "actions/motion": (("A", "U", 4), torch.float32),  # forward, strafe (to the right), yaw (to the left), jets; in [-1, 1]
    "actions/fire": (("A", "U"), torch.int8),  # 0 none, otherwise 1 + index into `info.weapons`
    "actions/target": (("A", "U"), torch.int8),  # unit or -1
    "actions/vent": (("A", "U"), torch.int8),  # 0 or 1
    "keyframes/at": (("K",), torch.int64),  # the frame of each keyframe
}


# What a page reads; the rest is for who computes the battle again.
DRAWN = tuple(name for name in LAYOUT if not name.startswith(KEYFRAMES))


class ReplayError(ValueError):
    """A replay that cannot be written or read; the message names the file, what is wrong and what to do."""


class FeedItem(msgspec.Struct, frozen=True, kw_only=True):
    """Something worth telling to who watches."""

    frame: int
    kind: Literal["kill", "fall", "shutdown", "zone", "end"]
    text: str
    by: int | None = None  # unit that did it
    unit: int | None = None  # unit that it happened to


class StateHash(msgspec.Struct, frozen=True, kw_only=True):
    frame: int
    sha256: str


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What the battle began as, beside the seed."""

    config: dict[str, Any]  # of the arena
    place: int  # in its batch
    episode: int  # battles that were fought there before
    largest_team: int  # that it could have


class ReplayInfo(msgspec.Struct, frozen=True, kw_only=True):
    rules_version: int
    seed: int
    device: str  # of the kind of device that computed it, e.g. "cpu"
    decision_s: float
    seconds: float  # after which the battle ends
    zone_radius: float
    teams: tuple[str, str]  # names of the players
    size: int  # side of the map
    unit_classes: list[str]  # of every unit
    class_table: dict[str, dict[str, float]]  # class -> hit_points, legs, heat_cap, tons, and more where there is more
    weapons: list[str]
    feed: list[FeedItem]
    winner: int | None  # team; None is a draw
    hashes: list[StateHash] = []
    origin: Origin | None = None  # without it the battle can be watched, and not computed again
    unit_columns: tuple[str, ...] = UNIT_COLUMNS
    score_to_win: float | None = None  # seconds in the zone
    cloud_radius: float = 4.0
    format_version: int = FORMAT_VERSION
    esper_version: str = esper.__version__

    @property
    def units(self) -> int:
        return len(self.unit_classes)


class _Versions(msgspec.Struct):
    """What every format's info has."""

    format_version: int
    esper_version: str = "unknown"


@dataclass(frozen=True, slots=True)
class ReplayFile:
    info: ReplayInfo
    tensors: dict[str, Tensor]

    @property
    def frames(self) -> int:
        return len(self.tensors["frames/units"])


def write_replay(path: Path | str, tensors: Mapping[str, Tensor], info: ReplayInfo) -> Path:
    """Writes the file whole or not at all, in place of an older one. Everything is checked before anything is written."""
    path = Path(path)
    problems = _problems(tensors, info)
    if problems:
        raise ReplayError(f"{path} cannot be written: {'; '.join(problems)}; give what the table in esper.replay_file asks for")
    write_tensors(path, tensors, {INFO: msgspec.json.encode(info).decode()})
    return path


def read_replay(path: Path | str) -> ReplayFile:
    """The replay in memory, on the CPU. What is returned has everything that `LAYOUT` names, in its shape."""
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
        raise ReplayError(f"no replay can be read: {reason_of(error)}") from error
    info = _read_info(path, metadata)
    problems = _problems(tensors, info)
    if problems:
        raise ReplayError(f"{path} is no whole replay: {'; '.join(problems)}; record the battle again")
    return ReplayFile(info, tensors)


def find_replays(folder: Path | str) -> list[Path]:
    """Return the replays of a run, newest first; files that cannot be read, and links that lead nowhere, are among them."""
    found = [path for path in (Path(folder) / "replays").glob(f"*{SUFFIX}") if not path.name.startswith(".")]
    return sorted(found, key=lambda path: (_time_of(path), path.name), reverse=True)


def _time_of(path: Path) -> int:
    """Return when a file was changed, 0 where there is none any more."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read_info(path: Path, metadata: Mapping[str, str]) -> ReplayInfo:
    if INFO not in metadata:
        raise ReplayError(f"{path} is no replay: it is a safetensors file of something else; give a file that esper arena wrote")
    try:
        raw = parse_json(metadata[INFO])
        versions = msgspec.convert(raw, _Versions)
        if versions.format_version == FORMAT_VERSION:
            return msgspec.convert(raw, ReplayInfo)
    except (ValueError, RecursionError) as error:
        raise ReplayError(f"{path} is no replay: its description cannot be understood ({error}); record the battle again") from error
    raise ReplayError(
        f"{path} is a replay of format {versions.format_version}, written by esper {versions.esper_version}; this is esper "
        f"{esper.__version__}, which reads format {FORMAT_VERSION}: watch it with that version, or record the battle again with this one"
    )


def _problems(tensors: Mapping[str, Tensor], info: ReplayInfo) -> list[str]:
    """Everything that is missing, of another type, or of another shape than the rest."""
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
    return found or [f"{item.kind} is told of frame {item.frame}, of {frames}" for item in info.feed if not 0 <= item.frame < frames]


def _misfit(name: str, tensor: Tensor, dimensions: Dimensions, dtype: torch.dtype, sizes: dict[str, int]) -> list[str]:
    """The sizes that nothing else says (N, P, Q, K) are taken from the first tensor that has them."""
    if tensor.ndim == len(dimensions):
        for dimension, size in zip(dimensions, tensor.shape, strict=True):
            if isinstance(dimension, str):
                sizes.setdefault(dimension, size)
    wanted = [dimension if isinstance(dimension, int) else sizes.get(dimension) for dimension in dimensions]
    found = []
    if list(tensor.shape) != wanted or (dimensions[0] == "F" and not len(tensor)):
        named = ", ".join(str(dimension) if size is None else str(size) for dimension, size in zip(dimensions, wanted, strict=True))
        found.append(f"{name} has the shape {_text(tensor.shape)}, not [{named}] ({', '.join(map(str, dimensions))})")
    if tensor.dtype != dtype:
        found.append(f"{name} is of {tensor.dtype}, not {dtype}")
    return found


def _text(shape: Sequence[int]) -> str:
    return str(list(shape))
