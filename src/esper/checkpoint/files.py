"""One checkpoint folder: `tensors.safetensors`, `state.json` and, written last, the `manifest.json` with the digests of all three."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from esper.checkpoint.tree import Tree, join, split
from esper.files import MAX_JSON_BYTES, FileError, make_folder, parse_json, read_file, with_digest, without_digest, write_file

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
