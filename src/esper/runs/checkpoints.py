"""One checkpoint folder: `tensors.safetensors`, `state.json` and, written last, the `manifest.json` with the digests of all three.

Weights that load into a module whether it, or the one that saved them, is compiled, wrapped for data parallelism, or neither.

The checkpoints of a run: the last few and the best, in one folder.

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
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from torch import Tensor, nn

import esper
from esper.files import (
    MAX_JSON_BYTES,
    TEMPORARY,
    FileError,
    make_folder,
    parse_json,
    read_file,
    remove,
    remove_temporaries,
    rename,
    with_digest,
    without_digest,
    write_file,
)
from esper.runs.tensors import Tree, join, split

FORMAT = 2  # of the folder; a higher one is refused
WITHOUT_DIGEST = 1  # the format whose manifest did not vouch for itself
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
MISFITS = (ValueError, KeyError, AttributeError, TypeError, RecursionError)  # what decoding and `join` raise on content that is not ours


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, with the reason in one sentence."""


class FileDigest(msgspec.Struct, frozen=True):
    sha256: str
    size: int  # bytes


class _Format(msgspec.Struct):
    """The one field of a manifest that every later format will have too."""

    format: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    kind: str  # whose state it is
    schema: int  # version of that state
    step: int
    sequence: int  # counts the saves of a store: steps go back when a run is resumed from an earlier one, this does not
    esper: str  # version
    note: Any  # the caller's, a tree without tensors; in the file as the structure that `split` makes of it
    is_best: bool = False  # when it was saved
    files: dict[str, FileDigest] = {}


def write_folder(folder: Path, manifest: Manifest, state: Tree) -> None:
    """Fill a new folder, and return when it is on the disk. The state is checked before anything is written."""
    from safetensors.torch import save

    structure, tensors = split(state)
    _, note_tensors = split(manifest.note)
    if note_tensors:
        raise TypeError(f"the note has tensors at {sorted(note_tensors)}; they belong into the state")
    contents = {STATE: to_json(structure), TENSORS: save(tensors)}
    make_folder(folder)
    for name, content in contents.items():
        write_file(folder / name, content)
    write_manifest(folder, msgspec.structs.replace(manifest, files={name: digest(content) for name, content in contents.items()}))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a checkpoint; its other files stay as they are."""
    note, _ = split(manifest.note)
    finished = msgspec.structs.replace(manifest, note=note, format=FORMAT)
    write_file(folder / MANIFEST, to_json(with_digest(msgspec.to_builtins(finished)), indent=2))


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    # The standard library's: in msgspec a NaN becomes null, and integers beyond 64 bits (states of random generators) do not come back.
    return json.dumps(value, allow_nan=False, indent=indent).encode()


def read_manifest(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is missing")
    content = _read(folder, MANIFEST, max_bytes=MAX_JSON_BYTES)
    try:
        raw = parse_json(content)
        found = msgspec.convert(raw, _Format).format
        if found <= FORMAT:
            manifest = msgspec.convert(without_digest(raw, is_required=found != WITHOUT_DIGEST), Manifest)
            return msgspec.structs.replace(manifest, note=join(manifest.note, {}))
    except MISFITS as error:  # no JSON, no text, no manifest, or no note
        raise CheckpointError(f"{folder} is corrupt: {MANIFEST} cannot be understood ({error})") from error
    raise CheckpointError(f"{folder} was written by a newer esper: its format is {found}, this one reads up to {FORMAT}")


def read_state(folder: Path, manifest: Manifest) -> Tree:
    """The state as it was saved, in memory: the files may be replaced afterwards."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    contents = {name: _read_checked(folder, name, manifest) for name in (TENSORS, STATE)}
    try:
        # Cloned into memory that torch allocated: aligned and resizable, as a tensor that was never saved.
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
        return read_file(folder / name, max_bytes=max_bytes)
    except FileError as error:
        raise CheckpointError(f"{folder} is corrupt: {error}") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is incomplete: {name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{folder} is damaged: {name} cannot be read ({error})") from error


def digest(content: bytes) -> FileDigest:
    return FileDigest(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


Value = TypeVar("Value")

_COMPILED = "_orig_mod"  # torch.compile puts it wherever a compiled module stands
_PARALLEL = "module."  # DistributedDataParallel puts it before every name


def plain_names(state_dict: Mapping[str, Value]) -> dict[str, Value]:
    """The same entries under the names of the unwrapped module.

    `module.` is taken for a wrapper's only where all names begin with it; a child that happens to be called `module` keeps its name.

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
    """Return the name that a parameter or module has where nothing is compiled.

    >>> plain_name("encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def load_module(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Copies weights into `module`, strictly: all that is missing, unexpected or wrongly shaped is named before anything is changed."""
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
        return [f"{name} is a {type(value).__name__} where a tensor belongs"]
    if value.shape != expected.shape:
        return [f"{name} has the shape {tuple(value.shape)} where {tuple(expected.shape)} belongs"]
    return []


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
