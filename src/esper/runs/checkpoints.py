"""Checkpoints of a run: save and load them, keep the last few and the best.

    checkpoints/
      step-000000001024/      tensors.safetensors, state.json, and manifest.json, which is written last and holds the digests of all three
      latest, best            files with the name of such a folder and the sha256 of that name
      .tmp-*                  unfinished or half deleted folders; removed by the next save
      .replaced-step-*        an older checkpoint of the same step, until the newer one is in place

A folder gets its final name only when its content is on disk, and a pointer (`latest`, `best`) only ever names such a folder. So there is
always a complete checkpoint that `latest` points to. One process saves; others may load at the same time. Damaged checkpoints and pointers
are skipped; the order of saves and the best checkpoint are then read from the manifests. So are checkpoints that were copied from another
run: a manifest names the run that wrote it.

The file has three parts: one checkpoint folder (`write_folder`, `read_manifest`, `read_state`), weights that load into a module whether it
is compiled, wrapped for data parallelism, or neither (`plain_names`, `load_module`), and the store of all checkpoints (`CheckpointStore`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec
from torch import Tensor, nn

import esper
from esper.files import (
    MAX_JSON_BYTES,
    TEMPORARY,
    FileError,
    check_in_run,
    make_folder,
    parse_json,
    read_in_run,
    remove,
    remove_temporaries,
    rename,
    with_digest,
    without_digest,
    write_in_run,
)
from esper.runs.events import name_of_run, why_foreign
from esper.runs.folder import CHECKPOINTS
from esper.runs.tensors import Tree, join, split
from esper.runs.versions import VersionError, Versions
from esper.torch_internals import COMPILED_MODULE

FORMAT = 1  # format of the folder; higher ones are refused
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
MISFITS = (ValueError, KeyError, AttributeError, TypeError, RecursionError)  # errors that decoding and `join` raise on foreign content

Content = TypeVar("Content")


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded. The message gives the reason in one sentence."""


# One checkpoint folder


class FileDigest(msgspec.Struct, frozen=True):
    """Digest and size of a file."""

    sha256: str
    size: int  # bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a checkpoint, saved as `manifest.json`."""

    format: int
    kind: str  # kind of state, such as "ppo"
    schema: int  # version of that kind of state
    step: int
    sequence: int  # number of the save; it always grows, while steps go back when a run is resumed from an earlier checkpoint
    esper: str  # version of esper that wrote it
    note: Any  # note of the caller, a tree without tensors; saved as `split` encodes it
    is_best: bool = False  # whether it was the best checkpoint when it was saved
    run: str | None = None  # name of the run that wrote it; see `name_of_run`
    files: dict[str, FileDigest] = {}


def write_folder(folder: Path, manifest: Manifest, state: Tree) -> None:
    """Write a checkpoint into a new folder and return when it is on disk. The state is checked before anything is written."""
    from safetensors.torch import save

    structure, tensors = split(state)
    _, note_tensors = split(manifest.note)
    if note_tensors:
        raise TypeError(f"the note has tensors at {sorted(note_tensors)}; they belong into the state")
    contents = {STATE: to_json(structure), TENSORS: save(tensors)}
    make_folder(folder)
    for name, content in contents.items():
        write_in_run(folder / name, content)
    write_manifest(folder, msgspec.structs.replace(manifest, files={name: digest(content) for name, content in contents.items()}))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a checkpoint; its other files stay as they are."""
    note, _ = split(manifest.note)
    finished = msgspec.structs.replace(manifest, note=note, format=FORMAT)
    write_in_run(folder / MANIFEST, to_json(with_digest(msgspec.to_builtins(finished)), indent=2))


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    # msgspec would write NaN as null, and could not read back integers beyond 64 bits, which states of random generators have.
    return json.dumps(value, allow_nan=False, indent=indent).encode()


class _Format(msgspec.Struct):
    """The one field of a manifest or `league.json` that all formats share, later ones included."""

    format: int


def format_of(values: Any) -> int:
    """Return the format of the values of a manifest or `league.json`. Raise ValueError if they have none."""
    return msgspec.convert(values, _Format).format


def without_checked_digest(values: Any, content: type[Content]) -> Content:
    """Check the digest of the values of a manifest or `league.json` and return them as `content`. Raise ValueError if they do not fit."""
    return msgspec.convert(without_digest(values), content)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder. Raise CheckpointError if it is missing, damaged or too new."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is missing")
    content = _read(folder, MANIFEST, max_bytes=MAX_JSON_BYTES)
    try:
        raw = parse_json(content)
        found = format_of(raw)
        if found <= FORMAT:
            manifest = without_checked_digest(raw, Manifest)
            return msgspec.structs.replace(manifest, note=join(manifest.note, {}))
    except MISFITS as error:  # not text, not JSON, not a manifest, or not a note
        raise CheckpointError(f"{folder} is corrupt: {MANIFEST} cannot be understood ({error})") from error
    raise CheckpointError(f"{folder} was written by a newer esper: its format is {found}, this one reads up to {FORMAT}; update esper")


def read_state(folder: Path, manifest: Manifest) -> Tree:
    """Return the saved state, wholly in memory, so that the files may be replaced afterwards."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    contents = {name: _read_checked(folder, name, manifest) for name in (TENSORS, STATE)}
    try:
        # Clone into memory allocated by torch, which is aligned and resizable like that of any other tensor.
        tensors = {name: tensor.clone() for name, tensor in load(contents[TENSORS]).items()}
        return join(parse_json(contents[STATE]), tensors)
    except (SafetensorError, *MISFITS) as error:
        raise CheckpointError(f"{folder} is corrupt: {STATE} and {TENSORS} do not make a state ({error!r})") from error


def _read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    expected = manifest.files.get(name)
    if expected is None:
        raise CheckpointError(f"{folder} is corrupt: {MANIFEST} does not list {name}")
    content = _read(folder, name, max_bytes=expected.size)
    if len(content) < expected.size:
        raise CheckpointError(f"{folder} is truncated: {name} has {len(content)} of {expected.size} bytes")
    if digest(content) != expected:
        raise CheckpointError(f"{folder} is corrupt: the sha256 of {name} is not the one in {MANIFEST}")
    return content


def _read(folder: Path, name: str, *, max_bytes: int) -> bytes:
    try:
        return read_in_run(folder / name, max_bytes=max_bytes)
    except FileError as error:
        raise CheckpointError(f"{folder} is corrupt: {error}") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is incomplete: {name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{folder} is damaged: {name} cannot be read ({error})") from error


def digest(content: bytes) -> FileDigest:
    return FileDigest(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


# Weights of wrapped modules

Value = TypeVar("Value")

_PARALLEL = "module."  # prefix that DistributedDataParallel adds to every name


def plain_names(state_dict: Mapping[str, Value]) -> dict[str, Value]:
    """Return the entries under the names that they have in the unwrapped module.

    The prefix `module.` is removed only if all names have it, so a child that happens to be called `module` keeps its name.

    >>> plain_names({"module._orig_mod.encoder._orig_mod.weight": 1})
    {'encoder.weight': 1}
    """
    names = {name: plain_name(name) for name in state_dict}
    if all(plain.startswith(_PARALLEL) for plain in names.values()):
        names = {name: plain.removeprefix(_PARALLEL) for name, plain in names.items()}
    result: dict[str, Value] = {}
    origin: dict[str, str] = {}
    for name, plain in names.items():
        if plain in origin:
            raise ValueError(f"{origin[plain]!r} and {name!r} are both called {plain!r} without their wrappers; remove one of them")
        origin[plain] = name
        result[plain] = state_dict[name]
    return result


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the parts that torch.compile adds.

    >>> plain_name("encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != COMPILED_MODULE)


def load_module(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Copy weights into `module`. Raise ValueError that names all missing, unexpected or wrongly shaped entries, before any change."""
    own = module.state_dict()
    own_names = plain_names({name: name for name in own})
    given = plain_names(state_dict)
    problems = [f"{name} is missing" for name in own_names if name not in given]
    problems += [f"{name} is unexpected" for name in given if name not in own_names]
    for plain, name in own_names.items():
        if plain in given and isinstance(own[name], Tensor):
            problems += _misfit(plain, expected=own[name], value=given[plain])
    if problems:
        raise ValueError(f"the weights do not fit this {type(module).__name__}, nothing was loaded: " + "; ".join(problems))
    module.load_state_dict({name: given[plain] for plain, name in own_names.items()}, strict=True)


def _misfit(name: str, *, expected: Tensor, value: object) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"{name} is a {type(value).__name__} instead of a tensor"]
    if value.shape != expected.shape:
        return [f"{name} has the shape {tuple(value.shape)} instead of {tuple(expected.shape)}"]
    return []


# All checkpoints of a run

Pointer = Literal["latest", "best"]

_FOLDER = re.compile(r"step-\d{12,}")
_REPLACED = ".replaced-"
_MAX_POINTER_BYTES = 1024
_READS = 5  # attempts to load a checkpoint of a run that is training


@dataclass(frozen=True, slots=True)
class Refused:
    """A checkpoint that was skipped because it cannot be loaded."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint. `skipped` lists the newer ones that could not be loaded, newest first."""

    step: int
    state: Tree
    path: Path
    note: dict[str, Any] | None
    skipped: tuple[Refused, ...] = ()


class CheckpointStore:
    """A folder of checkpoints, all with the same kind of state: `Versions`, or the name of a kind that has only one version."""

    def __init__(self, root: Path | str, *, kind: Versions | str, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}, because the latest checkpoint always stays")
        self.root = Path(root)
        self.versions = Versions(kind) if isinstance(kind, str) else kind
        self.keep = keep
        self.run: Path | None = None  # folder of the run whose checkpoints these are; None outside of a run

    @classmethod
    def of_run(cls, folder: Path | str, *, kind: Versions | str, keep: int = 3) -> Self:
        """Return the checkpoints of the run in a folder. Those of other runs are skipped; only one of the same step takes their place."""
        store = cls(Path(folder) / CHECKPOINTS, kind=kind, keep=keep)
        store.run = Path(folder)
        return store

    def save(self, step: int, state: Tree, *, is_best: bool = False, note: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint, make it the latest one (with `is_best`, also the best), and remove all but the last `keep` and the best.

        `note` is a small tree without tensors, kept in the manifest. A checkpoint of the same step is replaced.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, but is {step}")
        self._check_is_no_link()
        make_folder(self.root)
        self._clean()
        folder = self.root / f"step-{step:012d}"
        temporary = self.root / f"{TEMPORARY}{folder.name}"
        sequence = 1 + max(map(_sequence, self._folders().values()), default=0)
        manifest = Manifest(
            format=FORMAT,
            kind=self.versions.kind,
            schema=self.versions.present,
            step=step,
            sequence=sequence,
            esper=esper.__version__,
            note=note,
            is_best=is_best,
            run=None if self.run is None else name_of_run(self.run),
        )
        # Write under a temporary name, then rename. An older checkpoint of this step is renamed first, and removed after the pointers have
        # moved.
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
        """Replace the note of a checkpoint; with `is_best`, also make it the best one. A second call changes nothing."""
        folder = self.root / f"step-{step:012d}"
        self._check_is_no_link()
        manifest = read_manifest(folder)
        write_manifest(folder, msgspec.structs.replace(manifest, note=note, is_best=manifest.is_best or is_best))
        if is_best:
            self._point("best", folder)
            self._prune()

    def load(self, which: Pointer | Path = "latest") -> Checkpoint:
        """Load the latest or best checkpoint, or the one at a path.

        If the latest one cannot be loaded, the newest one that can be loaded is returned. The best one and a path have no such fallback.
        Raises CheckpointError.
        """
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
        """Return the folders of all checkpoints in the order of their saves, also of those that cannot be loaded."""
        return tuple(sorted(self._folders().values(), key=lambda folder: (_sequence(folder), folder.name)))

    def has_any(self) -> bool:
        return bool(self._folders())

    def _load_latest(self) -> Checkpoint:
        for _ in range(_READS):
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
            if latest == self._pointed("latest"):
                break  # else another process has saved a new one meanwhile, and removed the one that was the only one
        if not skipped:
            raise CheckpointError(f"there is no checkpoint in {self.root}")
        raise CheckpointError(f"no checkpoint in {self.root} can be loaded: " + "; ".join(refused.reason for refused in skipped))

    def _load(self, folder: Path, skipped: tuple[Refused, ...] = ()) -> Checkpoint:
        manifest = read_manifest(folder)
        if manifest.kind != self.versions.kind:
            raise CheckpointError(f"{folder} is of another kind: it holds the state of {manifest.kind!r}, not of {self.versions.kind!r}")
        foreign = self._why_foreign(manifest)
        if foreign is not None:
            raise CheckpointError(f"{folder} {foreign}; it is not used")
        try:
            self.versions.check(manifest.schema, writer=manifest.esper)  # before the state is read, which may be large
            state = self.versions.migrated(read_state(folder, manifest), manifest.schema)
        except VersionError as error:
            raise CheckpointError(f"{folder} {error}") from error
        return Checkpoint(step=manifest.step, state=state, path=folder, note=manifest.note, skipped=skipped)

    def _folders(self) -> dict[str, Path]:
        """Return the checkpoints by name. A replaced one (`.replaced-*`) counts only while its successor is not in place."""
        self._check_is_no_link()
        found: dict[str, Path] = {}
        for path in self.root.iterdir() if self.root.is_dir() else ():
            name = path.name.removeprefix(_REPLACED)
            if _FOLDER.fullmatch(name) and path.is_dir() and not path.is_symlink() and (name == path.name or name not in found):
                found[name] = path
        return found

    def _check_is_no_link(self) -> None:
        try:
            check_in_run(self.root)
        except FileError as error:
            raise CheckpointError(str(error)) from error

    def _best(self) -> Path | None:
        """Return the best checkpoint; if the pointer is missing, damaged or of another run, the last one that was saved as the best."""
        pointed = self._pointed("best")
        if pointed is not None and not self._is_foreign(pointed):
            return pointed
        return next((folder for folder in reversed(self.list()) if _was_best(folder) and not self._is_foreign(folder)), None)

    def _why_foreign(self, manifest: Manifest) -> str | None:
        return None if self.run is None else why_foreign(manifest.run, self.run)

    def _is_foreign(self, folder: Path) -> bool:
        try:
            return self._why_foreign(read_manifest(folder)) is not None
        except CheckpointError:
            return False  # it cannot be loaded in any run

    def _pointed(self, pointer: Pointer) -> Path | None:
        """Return the folder that a pointer names, which may not exist; None if the pointer is missing or damaged."""
        try:
            content = read_in_run(self.root / pointer, max_bytes=_MAX_POINTER_BYTES, run=self.root.parent)
        except (OSError, FileError):
            return None
        name = content.partition(b"\n")[0].decode("ascii", errors="replace")
        if not _FOLDER.fullmatch(name) or content != _pointer_to(name):
            return None
        found = self._folders().get(name, self.root / name)
        return None if found.is_symlink() else found

    def _point(self, pointer: Pointer, folder: Path) -> None:
        write_in_run(self.root / pointer, _pointer_to(folder.name))

    def _clean(self) -> None:
        """Remove what a crash left behind. First put back a replaced checkpoint whose successor was never written."""
        for path in self.root.glob(f"{_REPLACED}*"):
            successor = self.root / path.name.removeprefix(_REPLACED)
            if successor.exists():
                self._discard(path)
            else:
                rename(path, successor)
        remove_temporaries(self.root)

    def _prune(self) -> None:
        best = self._best()
        for folder in [folder for folder in self.list() if not self._is_foreign(folder)][: -self.keep]:
            if folder != best:
                self._discard(folder)

    def _discard(self, folder: Path) -> None:
        # Rename it first, so that a crash during the removal leaves nothing that looks like a checkpoint.
        removed = self.root / f"{TEMPORARY}removed-{folder.name}"
        rename(folder, removed)
        remove(removed)


def _sequence(folder: Path) -> int:
    try:
        return read_manifest(folder).sequence
    except CheckpointError:
        return 0  # it cannot be loaded, so it sorts first and is removed first


def _was_best(folder: Path) -> bool:
    try:
        return read_manifest(folder).is_best
    except CheckpointError:
        return False


def _pointer_to(name: str) -> bytes:
    return f"{name}\nsha256 {hashlib.sha256(name.encode()).hexdigest()}\n".encode()
