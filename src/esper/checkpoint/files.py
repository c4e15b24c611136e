"""One checkpoint folder: `tensors.safetensors`, `state.json` and, written last, the `manifest.json` that vouches for them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from esper.checkpoint.tree import Tree, join, split
from esper.files import MAX_JSON_BYTES, FileError, parse_json, read_file

FORMAT = 1  # of the folder; a higher one is refused
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
MISFITS = (ValueError, KeyError, AttributeError, TypeError)  # what decoding and `join` raise on content that is not ours


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
    files: dict[str, FileDigest] = {}


def write_folder(folder: Path, manifest: Manifest, state: Tree) -> None:
    """Fills a new folder, and returns when it is on the disk. The state is checked before anything is written."""
    from safetensors.torch import save_file

    structure, tensors = split(state)
    note, note_tensors = split(manifest.note)
    if note_tensors:
        raise TypeError(f"the note has tensors at {sorted(note_tensors)}; they belong into the state")
    encoded = to_json(structure)
    folder.mkdir()
    save_file(tensors, folder / TENSORS)
    sync(folder / TENSORS)
    write_synced(folder / STATE, encoded)
    digests = {name: _digest_of_file(folder / name) for name in (TENSORS, STATE)}
    finished = msgspec.structs.replace(manifest, note=note, files=digests)
    write_synced(folder / MANIFEST, to_json(msgspec.to_builtins(finished), indent=2))
    sync(folder)


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
            manifest = msgspec.convert(raw, Manifest)
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
    if _digest(content) != expected:
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


def _digest(content: bytes) -> FileDigest:
    return FileDigest(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


def _digest_of_file(path: Path) -> FileDigest:
    with open(path, "rb") as file:
        return FileDigest(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=path.stat().st_size)


def write_synced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Returns when a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
