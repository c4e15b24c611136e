"""The checkpoints of a run: the last few and the best, in one folder.

    checkpoints/
      step-000000001024/      tensors.safetensors, state.json, manifest.json
      latest, best            files that hold the name of such a folder, and its sha256
      .tmp-*                  something unfinished or half deleted; removed at the next save
      .replaced-step-*        the older one of two with the same step, while the newer takes its place

A folder gets its final name only when its content is on the disk, and pointers move only to folders that have it. So at every moment
there is a whole checkpoint that `latest` leads to. One process saves; others may load at the same time.

A checkpoint or pointer that was damaged on the disk is passed over: what a pointer said is also known from the manifests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

import esper
from esper.checkpoint.files import FORMAT, CheckpointError, Manifest, read_manifest, read_state, write_folder, write_manifest
from esper.checkpoint.tree import Tree
from esper.files import TEMPORARY, make_folder, remove, remove_temporaries, rename, write_file

Migration = Callable[[Tree], Tree]
Pointer = Literal["latest", "best"]

_FOLDER = re.compile(r"step-\d{12,}")
_REPLACED = ".replaced-"


@dataclass(frozen=True, slots=True)
class Refused:
    """A checkpoint that was passed over."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded state. `skipped` names the newer ones that could not be loaded, newest first."""

    step: int
    state: Tree
    path: Path
    note: dict[str, Any] | None
    skipped: tuple[Refused, ...] = ()


class CheckpointStore:
    """Saves and loads states of one kind.

    `schema_version` is that of the states the program writes now. `migrations[v]` turns a state of version v into one of version v + 1:

        def name_the_seed(state):                                       # version 1 had one unnamed random seed
            return {"model": state["model"], "seeds": {"data": state["seed"]}}

        CheckpointStore(folder, kind="ppo", schema_version=2, migrations={1: name_the_seed})
    """

    def __init__(
        self, root: Path | str, *, kind: str, keep: int = 3, schema_version: int = 1, migrations: Mapping[int, Migration] | None = None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}: the latest checkpoint always stays")
        self.root = Path(root)
        self.kind = kind
        self.keep = keep
        self.schema_version = schema_version
        self.migrations = dict(migrations or {})
        useless = sorted(version for version in self.migrations if version >= schema_version)
        if useless:
            raise ValueError(f"migrations from versions {useless} lead beyond schema_version {schema_version}; raise it")

    def save(self, step: int, state: Tree, *, is_best: bool = False, note: dict[str, Any] | None = None) -> Path:
        """Writes a checkpoint, makes it the latest (and the best), and removes those that are neither the last `keep` nor the best.

        `note` is a small tree without tensors, kept in the manifest. Saving a step again replaces it.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, and is {step}")
        make_folder(self.root)
        self._clean()
        folder = self.root / f"step-{step:012d}"
        temporary = self.root / f"{TEMPORARY}{folder.name}"
        sequence = 1 + max(map(_sequence, self._folders().values()), default=0)
        manifest = Manifest(
            format=FORMAT,
            kind=self.kind,
            schema=self.schema_version,
            step=step,
            sequence=sequence,
            esper=esper.__version__,
            note=note,
            is_best=is_best,
        )
        write_folder(temporary, manifest, state)
        if folder.exists():
            rename(folder, self.root / f"{_REPLACED}{folder.name}")
        rename(temporary, folder)
        if is_best:
            self._point("best", folder)
        self._point("latest", folder)
        self._clean()
        self._prune()
        return folder

    def annotate(self, step: int, note: dict[str, Any], *, is_best: bool) -> None:
        """Give the checkpoint of a step another note, and make it the best where `is_best`. Doing it twice changes nothing."""
        folder = self.root / f"step-{step:012d}"
        manifest = read_manifest(folder)
        write_manifest(folder, msgspec.structs.replace(manifest, note=note, is_best=manifest.is_best or is_best))
        if is_best:
            self._point("best", folder)
            self._prune()

    def load(self, which: Pointer | Path = "latest") -> Checkpoint:
        """`latest` falls back to the newest one that can be loaded; `best` and a path load that one or raise CheckpointError."""
        if isinstance(which, Path):
            return self._load(which)
        if which == "best":
            best = self._best()
            if best is None:
                raise CheckpointError(f"no checkpoint in {self.root} is marked as the best")
            return self._load(best)
        if which == "latest":
            return self._load_latest()
        raise ValueError(f"which must be 'latest', 'best' or a Path, not {which!r}")

    def list(self) -> tuple[Path, ...]:
        """The folders of all checkpoints, in the order in which they were saved, whether or not they can be loaded."""
        return tuple(sorted(self._folders().values(), key=lambda folder: (_sequence(folder), folder.name)))

    def has_any(self) -> bool:
        return bool(self._folders())

    def _load_latest(self) -> Checkpoint:
        candidates = list(reversed(self.list()))
        latest = self._pointed("latest")
        if latest is not None:
            candidates = [latest, *(folder for folder in candidates if folder != latest)]
        skipped: list[Refused] = []
        for folder in candidates:
            try:
                return self._load(folder, tuple(skipped))
            except CheckpointError as error:
                skipped.append(Refused(folder, str(error)))
        if not skipped:
            raise CheckpointError(f"there is no checkpoint in {self.root}")
        raise CheckpointError(f"no checkpoint in {self.root} can be loaded: " + "; ".join(refused.reason for refused in skipped))

    def _load(self, folder: Path, skipped: tuple[Refused, ...] = ()) -> Checkpoint:
        manifest = read_manifest(folder)
        if manifest.kind != self.kind:
            raise CheckpointError(f"{folder} is of another kind: it holds the state of {manifest.kind!r}, not of {self.kind!r}")
        if manifest.schema > self.schema_version:
            raise CheckpointError(
                f"{folder} was written by a newer esper ({manifest.esper}): the version of its state is {manifest.schema}, "
                f"this one reads up to {self.schema_version}"
            )
        missing = [version for version in range(manifest.schema, self.schema_version) if version not in self.migrations]
        if missing:
            raise CheckpointError(
                f"{folder} is too old: its state has version {manifest.schema}, and there is no migration from version {missing[0]} "
                f"to {missing[0] + 1}"
            )
        state = read_state(folder, manifest)
        for version in range(manifest.schema, self.schema_version):
            try:
                state = self.migrations[version](state)
            except Exception as error:  # whatever the content of an old state makes it raise
                raise CheckpointError(
                    f"{folder} is too old: its state cannot be brought from version {version} to {version + 1} "
                    f"({type(error).__name__}: {error})"
                ) from error
        return Checkpoint(step=manifest.step, state=state, path=folder, note=manifest.note, skipped=skipped)

    def _folders(self) -> dict[str, Path]:
        """Checkpoints by name. One that is just being replaced counts as long as its successor is not in its place."""
        found: dict[str, Path] = {}
        for path in self.root.iterdir() if self.root.is_dir() else ():
            name = path.name.removeprefix(_REPLACED)
            if _FOLDER.fullmatch(name) and path.is_dir() and (name == path.name or name not in found):
                found[name] = path
        return found

    def _best(self) -> Path | None:
        """Return the best checkpoint; where the pointer is lost or damaged, the last one that was saved as the best."""
        pointed = self._pointed("best")
        return pointed or next((folder for folder in reversed(self.list()) if _was_best(folder)), None)

    def _pointed(self, pointer: Pointer) -> Path | None:
        """Return where a pointer leads, which may be nowhere; None where it is missing or damaged.

        One of an earlier esper is the name alone, in a line.
        """
        try:
            content = (self.root / pointer).read_bytes()
        except OSError:
            return None
        name = content.partition(b"\n")[0].decode("ascii", errors="replace")
        if not _FOLDER.fullmatch(name) or content not in (_pointer_to(name), f"{name}\n".encode()):
            return None
        return self._folders().get(name, self.root / name)

    def _point(self, pointer: Pointer, folder: Path) -> None:
        write_file(self.root / pointer, _pointer_to(folder.name))

    def _clean(self) -> None:
        """Removes what a crash left behind, after putting back a checkpoint whose successor never came."""
        for path in self.root.glob(f"{_REPLACED}*"):
            successor = self.root / path.name.removeprefix(_REPLACED)
            if successor.exists():
                self._discard(path)
            else:
                rename(path, successor)
        remove_temporaries(self.root)

    def _prune(self) -> None:
        best = self._best()
        for folder in self.list()[: -self.keep]:
            if folder != best:
                self._discard(folder)

    def _discard(self, folder: Path) -> None:
        # Renamed first, so that a crash during the removal leaves nothing that looks like a checkpoint.
        doomed = self.root / f"{TEMPORARY}removed-{folder.name}"
        rename(folder, doomed)
        remove(doomed)


def _sequence(folder: Path) -> int:
    try:
        return read_manifest(folder).sequence
    except CheckpointError:
        return 0  # it cannot be loaded, so it is the first to go


def _was_best(folder: Path) -> bool:
    try:
        return read_manifest(folder).is_best
    except CheckpointError:
        return False


def _pointer_to(name: str) -> bytes:
    return f"{name}\nsha256 {hashlib.sha256(name.encode()).hexdigest()}\n".encode()
