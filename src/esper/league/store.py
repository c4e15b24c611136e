"""Save a league as a folder in the run's folder, and load it.

    league/
      league.json                          players, results, the file of each player's weights, and its own sha256
      members/step-1000.safetensors        weights of a candidate or member
      .tmp-*, members/.tmp-*               unfinished files; removed by the next save

A save is atomic: every file is complete on disk before it gets its name, weights are written before the `league.json` that refers to them,
and unused files are removed last. So a crash at any moment leaves either the previous league or the new one. One process saves; others may
load at the same time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import esper
from esper.files import (
    MAX_FILE_BYTES,
    MAX_JSON_BYTES,
    FileError,
    check_in_run,
    make_folder,
    parse_json,
    read_in_run,
    reason_of,
    remove,
    remove_temporaries,
    with_digest,
    write_in_run,
)
from esper.league.league import League, LeagueError, Weights
from esper.league.player_file import HEADER as PLAYER_HEADER
from esper.runs.checkpoints import FileDigest, digest, format_of, to_json, without_checked_digest
from esper.runs.events import name_of_run, why_foreign
from esper.runs.tensors import decode_tensors, encode_tensors, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

FOLDER, LEAGUE, MEMBERS = "league", "league.json", "members"  # FOLDER is in the run's folder
FORMAT = 1  # format of the folder; higher ones are refused
_SUFFIX = ".safetensors"
_READS = 5  # attempts to read a folder that another process is changing


class WeightsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file with the weights of one player."""

    file: str  # file name in `members`
    digest: FileDigest


class LeagueFile(msgspec.Struct, frozen=True):
    """Content of `league.json`."""

    format: int
    esper: str  # version of esper that wrote it
    league: dict[str, object]
    weights: dict[str, WeightsFile]
    run: str | None = None  # name of the run that wrote it; see `name_of_run`


class LeagueStore:
    """A folder that holds a league. The weights of a player are written only once."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.members = self.folder / MEMBERS

    def save(self, league: League) -> None:
        """Write the league. It is safely on disk when this returns."""
        check_in_run(self.members, run=self.folder.parent)
        make_folder(self.members)
        files = {name: self._save_weights(name, weights) for name, weights in league.weights.items()}
        run = name_of_run(self.folder.parent)
        content = LeagueFile(format=FORMAT, esper=esper.__version__, league=league.to_state(), weights=files, run=run)
        write_in_run(self.folder / LEAGUE, to_json(with_digest(msgspec.to_builtins(content)), indent=1), run=self.folder.parent)
        self._remove_all_but({entry.file for entry in files.values()})

    def load(self, *, with_weights: bool = True) -> League:
        """Return the league that was saved last. Without weights it can be inspected, but its players cannot play."""
        for _ in range(_READS):
            content = self._read_json()
            try:
                return _decoded(content, self.folder / LEAGUE, self.members if with_weights else None)
            except LeagueError:
                # If league.json has changed, another process saved in between and may have removed the files: try again.
                if content == self._read_json():
                    raise
        raise LeagueError(f"{self.folder} changed {_READS} times while it was read; try again later")

    def exists(self) -> bool:
        return (self.folder / LEAGUE).is_file()

    def _read_json(self) -> bytes:
        try:
            return read_in_run(self.folder / LEAGUE, max_bytes=MAX_JSON_BYTES, run=self.folder.parent)
        except FileNotFoundError as error:
            raise LeagueError(f"there is no league in {self.folder}: it has no {LEAGUE}") from error
        except OSError as error:
            raise LeagueError(f"the league cannot be read: {reason_of(error)}") from error
        except FileError as error:
            raise LeagueError(f"{error}; restore it, or resume the run, which writes it again") from error

    def _save_weights(self, name: str, weights: Weights) -> WeightsFile:
        content = _encoded(name, weights)
        # A resumed run may enter other weights under a name that is already in use here. The old file must stay unchanged until the new
        # league.json is written, so the new weights get another file name ("NAME~2").
        file, count = f"{name}{_SUFFIX}", 1
        while (found := self._content_of(file)) not in (None, content):
            count += 1
            file = f"{name}~{count}{_SUFFIX}"
        if found is None:
            write_in_run(self.members / file, content, run=self.folder.parent)
        return WeightsFile(file, digest(content))

    def _content_of(self, file: str) -> bytes | None:
        """Return the content of a file of weights; None if there is none, or something that is no file of ours and will be replaced."""
        try:
            return read_in_run(self.members / file, max_bytes=MAX_FILE_BYTES, run=self.folder.parent)
        except (FileNotFoundError, FileError):
            return None

    def _remove_all_but(self, named: set[str]) -> None:
        for path in self.members.glob(f"*{_SUFFIX}"):
            if path.name not in named:
                remove(path)
        remove_temporaries(self.members)
        remove_temporaries(self.folder)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of a player from a file in `league/members` of a run, or from a copy of such a file."""
    place = f"a run keeps the weights of its league in RUN/{FOLDER}/{MEMBERS}/NAME{_SUFFIX}"
    try:
        weights, metadata = read_tensors(path)
        if PLAYER_HEADER in metadata:
            raise LeagueError(f"{path} is a player file, which has no critic to go on learning with; {place}")
        return weights
    except FileNotFoundError as error:
        raise LeagueError(f"there are no weights at {path}; {place}") from error
    except FileError as error:
        raise LeagueError(f"{error}; give a file of weights that a league has written") from error
    except OSError as error:
        raise LeagueError(f"the weights cannot be read: {reason_of(error)}; {place}") from error


def _encoded(name: str, weights: Weights) -> bytes:
    try:
        return b"".join(encode_tensors(weights))
    except ValueError as error:
        raise LeagueError(f"the weights of {name!r} cannot be saved: {error}") from error


def _decoded(content: bytes, path: Path, members: Path | None) -> League:
    try:
        raw = parse_json(content)
        found = format_of(raw)
        file = without_checked_digest(raw, LeagueFile) if found <= FORMAT else None
    except (ValueError, RecursionError) as error:
        raise LeagueError(
            f"{path} is corrupt: it is not the file of a league ({error}); restore it, or resume the run, which writes it again"
        ) from error
    if file is None:
        raise LeagueError(f"{path} was written by a newer esper: its format is {found}, this one reads up to {FORMAT}; update esper")
    if foreign := why_foreign(file.run, path.parent.parent):
        raise LeagueError(f"{path} {foreign}; restore it, or resume the run, which writes it again")
    try:
        weights = None if members is None else {name: _member_weights(members, name, entry) for name, entry in file.weights.items()}
        return League.from_state(file.league, weights)
    except LeagueError as error:
        raise LeagueError(f"{path}: {error}") from error


def _member_weights(members: Path, name: str, file: WeightsFile) -> Weights:
    path = members / file.file
    fix = "restore it, or resume the run, which writes it again"
    if Path(file.file).name != file.file:
        raise LeagueError(f"the file of the weights of {name!r}, {file.file!r}, is outside of {members}; {fix}")
    try:
        content = read_in_run(path, max_bytes=MAX_FILE_BYTES, run=members.parent.parent)
    except FileNotFoundError as error:
        raise LeagueError(f"the weights of {name!r} are missing: there is no {path}; {fix}") from error
    except OSError as error:
        raise LeagueError(f"the weights of {name!r} cannot be read: {reason_of(error)}") from error
    except FileError as error:
        raise LeagueError(f"the weights of {name!r} cannot be read: {error}; {fix}") from error
    if digest(content) != file.digest:
        raise LeagueError(f"the weights of {name!r} in {path} are not those that were saved: their sha256 differs; {fix}")
    return decode_tensors(content, path)[0]
