"""Replays: the file of one recorded battle, with everything needed to draw it and to compute it again.

A replay is a safetensors file with `ReplayInfo` as JSON in its metadata, so reading it executes no code. The metadata also hold a sha256 of
everything. `LAYOUT` lists the required tensors. A file may hold more: further actions under `actions/`, and the fields of the battle's
state under `keyframes/`.

Only `write_replay` and `read_replay` import torch. Pages that list and play replays use `read_head` and `drawn_part`.

Shapes: F = frames (frame 0 is the start, frame f the state after decision f), A = F - 1 decisions, U = units (team 0 is the first half),
P = projectile slots, Q = cloud slots, S = side of the map, C = columns of `info.unit_columns`, N = destroyed terrain columns,
K = keyframes.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import esper
from esper.files import (
    MAX_FILE_BYTES,
    UNREADABLE,
    FileError,
    check_safetensors,
    open_file,
    parse_json,
    read_file,
    reason_of,
    safetensors_header,
    split_safetensors,
)

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1  # format of the file; others are refused
SUFFIX = ".safetensors"
INFO = "info"  # key of the `ReplayInfo` in the metadata
FOLDER = "replays"  # of a run
MAX_HEADER_BYTES = 2**24  # of a file whose header is read alone
KEYFRAMES = "keyframes/"
ACTIONS = "actions/"

# Angles are counter-clockwise from +x. The columns from `fallen` on are 0 or 1. A unit with 0 hit points is dead.
UNIT_COLUMNS = (
    *("x", "y", "z", "heading", "hit_points", "legs", "heat", "stability", "fuel"),
    *("fallen", "shut_down", "venting", "painted"),
)

Dimensions = tuple[str | int, ...]
LAYOUT: dict[str, tuple[Dimensions, str]] = {
    "terrain/height": (("S", "S"), "float32"),
    "terrain/material": (("S", "S"), "int8"),
    "terrain/changes": (("N", 3), "int32"),  # frame, i, j: from this frame on, the column (i, j) is open ground of height 0
    "frames/units": (("F", "U", "C"), "float32"),
    # is alive (0 or 1), kind (index into `info.weapons`), x, y, z; every unit has P / U slots, in the order of the units
    "frames/projectiles": (("F", "P", 5), "float32"),
    "frames/clouds": (("F", "Q", 4), "float32"),  # smoke: x, y, z, seconds left (0: no cloud)
    "frames/shots": (("F", "U", 2), "int8"),  # fired in the decision before the frame: weapon or -1, target unit or -1
    "frames/sensed": (("F", "U", "U"), "uint8"),  # [f, u, v]: how unit u perceives unit v: 0 not, 1 sensed, 2 seen (line of sight)
    "frames/score": (("F", 2), "float32"),  # seconds that each team has held the zone
    "frames/holder": (("F",), "int8"),  # team that holds the zone, or -1
    "actions/motion": (("A", "U", 4), "float32"),  # forward, strafe (to the right), yaw (to the left), jets; in [-1, 1]
    "actions/fire": (("A", "U"), "int8"),  # 0 none, otherwise 1 + index into `info.weapons`
    "actions/target": (("A", "U"), "int8"),  # unit or -1
    "actions/vent": (("A", "U"), "int8"),  # 0 or 1
    "keyframes/at": (("K",), "int64"),  # the frame of each keyframe
}

_TYPES = {"F32": "float32", "I8": "int8", "I32": "int32", "U8": "uint8", "I64": "int64"}  # name in a safetensors file -> in torch
Shaped = tuple[tuple[int, ...], str]  # shape and type of a tensor

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


class ReplayHead(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a battle that a list of replays shows."""

    teams: tuple[str, str]
    winner: int | None  # team; None: a draw
    seconds: float  # length of the battle


def write_replay(path: Path | str, tensors: Mapping[str, Tensor], info: ReplayInfo) -> Path:
    """Write a replay atomically, replacing an older file, and return its path. Everything is checked before anything is written."""
    from esper.runs import write_tensors

    path = Path(path)
    problems = _problems(_shapes(tensors), info)
    if problems:
        raise ReplayError(f"{path} cannot be written: {'; '.join(problems)}; give the tensors that esper.replay_file.LAYOUT lists")
    write_tensors(path, tensors, {INFO: msgspec.json.encode(info).decode()})
    return path


def read_replay(path: Path | str) -> ReplayFile:
    """Read a replay, with tensors on the CPU. The result has all tensors of `LAYOUT`, in the right shapes."""
    from esper.runs import read_tensors

    path = Path(path)
    with _read_errors(path):
        tensors, metadata = read_tensors(path)
    info = _read_info(path, metadata)
    _check_complete(path, _shapes(tensors), info)
    return ReplayFile(info, tensors)


def read_head(path: Path | str) -> ReplayHead:
    """Read who fought, who won and how long it took. Reads the header of the file alone, so damage of the tensors is not found."""
    path = Path(path)
    with _read_errors(path), open_file(path) as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if size > MAX_HEADER_BYTES:
            raise FileError(f"{path} cannot be read as a safetensors file (its header should have {size:,} bytes)")
        try:
            header, metadata, _ = split_safetensors(length + file.read(size))
            info, frames = _read_info(path, metadata), int(header["frames/units"]["shape"][0])
        except ReplayError:
            raise
        except UNREADABLE as error:
            raise FileError(f"{path} cannot be read as a safetensors file ({type(error).__name__}: {error})") from error
    return ReplayHead(teams=info.teams, winner=info.winner, seconds=max(frames - 1, 0) * info.decision_s)


def drawn_part(path: Path | str) -> bytes:
    """Read and check a replay, and return a file in the same format with only the tensors that are drawn."""
    path = Path(path)
    with _read_errors(path):
        found, metadata, content = check_safetensors(read_file(path, max_bytes=MAX_FILE_BYTES), path)
    info = _read_info(path, metadata)
    shapes = {name: (tuple(entry["shape"]), _TYPES.get(entry["dtype"], entry["dtype"])) for name, entry in found.items()}
    _check_complete(path, shapes, info)
    header, data, end = {}, [], 0
    width = {name: int(found[name]["dtype"][1:]) // 8 for name in DRAWN}  # bytes of one number
    for name in sorted(DRAWN, key=lambda name: -width[name]):  # wider numbers first, so that all begin at multiples of their size
        first, last = found[name]["data_offsets"]
        part = content[first:last]
        if len(part) != width[name] * math.prod(found[name]["shape"]):
            raise ReplayError(f"{path} is damaged: {name} has {len(part)} bytes; copy it whole, or record the battle again")
        start, end = end, end + len(part)
        header[name] = {**found[name], "data_offsets": [start, end]}
        data.append(part)
    return b"".join((safetensors_header(header, {INFO: msgspec.json.encode(info).decode()}), *data))


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into a ReplayError that says what to do."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        target = f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "does not exist"
        what = "is a folder" if isinstance(error, IsADirectoryError) else target
        raise ReplayError(f"{path} {what}; give the file of a replay, as esper arena writes it") from error
    except FileError as error:
        raise ReplayError(f"{error}; give a replay that esper arena wrote, and copy it whole") from error
    except OSError as error:
        raise ReplayError(f"the replay cannot be read: {reason_of(error)}") from error


def find_replays(folder: Path | str) -> list[Path]:
    """Return the replays of a run, newest first. The list may contain unreadable files, but no links, which may lead out of the run."""
    place = Path(folder) / FOLDER
    if place.is_symlink():
        return []
    found = [path for path in place.glob(f"*{SUFFIX}") if not path.name.startswith(".")]
    return sorted(
        (path for path in found if path.is_file() and not path.is_symlink()), key=lambda path: (_time_of(path), path.name), reverse=True
    )


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


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shaped]:
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def _check_complete(path: Path, shapes: Mapping[str, Shaped], info: ReplayInfo) -> None:
    problems = _problems(shapes, info)
    if problems:
        raise ReplayError(f"{path} is not a complete replay: {'; '.join(problems)}; record the battle again")


def _problems(tensors: Mapping[str, Shaped], info: ReplayInfo) -> list[str]:
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
    frames = (tensors["frames/units"][0] or (0,))[0]
    sizes = {"F": frames, "A": frames - 1, "U": info.units, "S": info.size, "C": len(info.unit_columns)}
    for name, (dimensions, dtype) in LAYOUT.items():
        found += _misfit(name, tensors[name], dimensions, dtype, sizes)
    for name, (shape, _) in tensors.items():
        if name.startswith(ACTIONS) and name not in LAYOUT and shape[:2] != (frames - 1, info.units):
            found.append(f"{name} has the shape {list(shape)}, not [{frames - 1}, {info.units}, ...]")
        if name.startswith(KEYFRAMES) and name not in LAYOUT and shape[:1] != (sizes.get("K"),):
            found.append(f"{name} has the shape {list(shape)}, not [{sizes.get('K')}, ...]")
    return found or [
        f"the feed item {item.kind!r} is at frame {item.frame}, but there are {frames} frames"
        for item in info.feed
        if not 0 <= item.frame < frames
    ]


def _misfit(name: str, tensor: Shaped, dimensions: Dimensions, wanted_type: str, sizes: dict[str, int]) -> list[str]:
    """Return what is wrong with one tensor. The first tensor with a free dimension (N, P, Q, K) sets its size in `sizes`."""
    shape, dtype = tensor
    if len(shape) == len(dimensions):
        for dimension, size in zip(dimensions, shape, strict=True):
            if isinstance(dimension, str):
                sizes.setdefault(dimension, size)
    wanted = [dimension if isinstance(dimension, int) else sizes.get(dimension) for dimension in dimensions]  # None: not known yet
    found = []
    if list(shape) != wanted or (dimensions[0] == "F" and not shape[0]):
        named = ", ".join(str(dimension) if size is None else str(size) for dimension, size in zip(dimensions, wanted, strict=True))
        found.append(f"{name} has the shape {list(shape)}, not [{named}] ({', '.join(map(str, dimensions))})")
    if dtype != wanted_type:
        found.append(f"{name} is of {dtype}, not {wanted_type}")
    return found
