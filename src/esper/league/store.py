"""A league as a folder in the run's folder, for people and programs to look at while the run goes on.

    league/
      league.json                          who is there, all results, which file holds whose weights, and its own sha256
      members/step-1000.safetensors        weights of a candidate or member
      .tmp-*, members/.tmp-*               something unfinished; removed at the next save

Every file is whole on the disk before it gets its name, weights before the `league.json` that names them, and files that are no longer
named are removed last. So a crash at any moment leaves the previous league or the new one. One process saves; others may load at the
same time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import esper
from esper.files import (
    MAX_JSON_BYTES,
    FileError,
    make_folder,
    parse_json,
    read_file,
    reason_of,
    remove,
    remove_temporaries,
    with_digest,
    without_digest,
    write_file,
)
from esper.league.league import League, LeagueError, Weights
from esper.runs.checkpoints import FileDigest, digest, to_json
from esper.runs.tensors import decode_tensors, encode_tensors, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

FOLDER, LEAGUE, MEMBERS = "league", "league.json", "members"  # the first lies in the run's folder
FORMAT = 2  # of the folder; a higher one is refused
WITHOUT_DIGEST = 1  # the format whose `league.json` has no sha256 of itself
_SUFFIX = ".safetensors"
_READS = 5  # of a folder that changes while it is read


class WeightsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str  # its name in `members`
    digest: FileDigest


class _Format(msgspec.Struct):
    """The one field that every later format will have too."""

    format: int


class LeagueFile(msgspec.Struct, frozen=True):
    """What `league.json` holds."""

    format: int
    esper: str  # version
    league: dict[str, object]
    weights: dict[str, WeightsFile]


class LeagueStore:
    """Saves a league to a folder, and loads it. Weights are written once."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.members = self.folder / MEMBERS

    def save(self, league: League) -> None:
        """Returns when the league is on the disk."""
        make_folder(self.members)
        files = {name: self._save_weights(name, weights) for name, weights in league.weights.items()}
        content = LeagueFile(format=FORMAT, esper=esper.__version__, league=league.to_state(), weights=files)
        write_file(self.folder / LEAGUE, to_json(with_digest(msgspec.to_builtins(content)), indent=1))
        self._remove_all_but({entry.file for entry in files.values()})

    def load(self, *, with_weights: bool = True) -> League:
        """The league as it was saved last; without weights it can be looked at, but has no one to play with."""
        for _ in range(_READS):
            content = self._read_json()
            try:
                return _decoded(content, self.folder / LEAGUE, self.members if with_weights else None)
            except LeagueError:
                if content == self._read_json():  # else another process saved in between, and may have removed what was to be read
                    raise
        raise LeagueError(f"{self.folder} is saved again and again while it is read; try again later")

    def exists(self) -> bool:
        return (self.folder / LEAGUE).is_file()

    def _read_json(self) -> bytes:
        try:
            return read_file(self.folder / LEAGUE, max_bytes=MAX_JSON_BYTES)
        except FileNotFoundError as error:
            raise LeagueError(f"there is no league in {self.folder}: it has no {LEAGUE}") from error
        except OSError as error:
            raise LeagueError(f"the league cannot be read: {reason_of(error)}") from error
        except FileError as error:
            raise LeagueError(f"{error}; restore it, or resume the run to have it written") from error

    def _save_weights(self, name: str, weights: Weights) -> WeightsFile:
        content = _encoded(name, weights)
        # A resumed run may enter other weights under a name that the folder knows from before: that file must stay as it is until no
        # league.json names it.
        file, count = f"{name}{_SUFFIX}", 1
        while (self.members / file).exists() and (self.members / file).read_bytes() != content:
            count += 1
            file = f"{name}~{count}{_SUFFIX}"
        if not (self.members / file).exists():
            write_file(self.members / file, content)
        return WeightsFile(file, digest(content))

    def _remove_all_but(self, named: set[str]) -> None:
        for path in self.members.glob(f"*{_SUFFIX}"):
            if path.name not in named:
                remove(path)
        remove_temporaries(self.members)
        remove_temporaries(self.folder)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of a player from a file as a league keeps them, of which nothing else is known."""
    place = f"a run keeps those of its league in RUN/{FOLDER}/{MEMBERS}/NAME{_SUFFIX}"
    try:
        return read_tensors(path)[0]
    except FileNotFoundError as error:
        raise LeagueError(f"there are no weights at {path}; {place}") from error
    except FileError as error:
        raise LeagueError(f"{error}; give a file of weights that a league has written") from error
    except OSError as error:
        raise LeagueError(f"no weights can be read: {reason_of(error)}; {place}") from error


def _encoded(name: str, weights: Weights) -> bytes:
    try:
        return b"".join(encode_tensors(weights))
    except ValueError as error:
        raise LeagueError(f"the weights of {name!r} cannot be saved: {error}") from error


def _decoded(content: bytes, path: Path, members: Path | None) -> League:
    try:
        raw = parse_json(content)
        found = msgspec.convert(raw, _Format).format
        told = None
        if found <= FORMAT:
            told = msgspec.convert(without_digest(raw, is_required=found != WITHOUT_DIGEST), LeagueFile)
    except (ValueError, RecursionError) as error:
        raise LeagueError(
            f"{path} is corrupt: it is not the file of a league ({error}); restore it, or resume the run to have it written"
        ) from error
    if told is None:
        raise LeagueError(f"{path} was written by a newer esper: its format is {found}, this one reads up to {FORMAT}")
    try:
        weights = None if members is None else {name: _member_weights(members, name, file) for name, file in told.weights.items()}
        return League.from_state(told.league, weights)
    except LeagueError as error:
        raise LeagueError(f"{path}: {error}") from error


def _member_weights(members: Path, name: str, file: WeightsFile) -> Weights:
    path = members / file.file
    fix = "restore it, or resume the run to have it written again"
    if Path(file.file).name != file.file:
        raise LeagueError(f"the weights of {name!r} are said to lie at {file.file!r}, outside of {members}; {fix}")
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise LeagueError(f"the weights of {name!r} are missing: there is no {path}; {fix}") from error
    except OSError as error:
        raise LeagueError(f"the weights of {name!r} cannot be read: {reason_of(error)}") from error
    if digest(content) != file.digest:
        raise LeagueError(f"the weights of {name!r} in {path} are not those that were saved: their sha256 differs; {fix}")
    return decode_tensors(content, path)[0]
