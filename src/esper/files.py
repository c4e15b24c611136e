"""Write files whole or not at all, and notice files that were changed since.

Every file that esper writes goes through `write_file`; only the event log, which grows line by line, has its own code. The content and the
file's name are on the disk when `write_file` returns, and a reader finds the old file or the new one. Folders are made, renamed and removed
by the functions below it, in the same way. All of them call `os`, so a test injects faults in one place: `esper.files.os`.

Every file that esper loads may come from elsewhere. `read_file`, `parse_json` and `parse_toml` refuse what would fill the memory or the
stack, or never end: pipes, devices, absurd sizes and deep nesting.

A sha256 lies in every file that esper loads again, or beside it, in a file with a sha256 of its own:

    run configs (TOML)             a comment with the sha256 of the values               `esper.config`
    manifest.json, league.json     the key "sha256" with that of all other keys          `with_digest`, `without_digest`
    tensors and state of a         in the manifest                                       `esper.runs`
    checkpoint
    model, controller, league      in the metadata of the safetensors file, over         `write_tensors`, `read_tensors`
    members, replays, policies     names, types, shapes, values and metadata
    and learners

Older files have no digest. They are accepted where the digest is missing and the file's format is older than digests too; so a digest that
was lost to damage is noticed. The lines of `events.jsonl` have no digest: they are read for display, and checked for structure alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".tmp-"  # how the names of unfinished files and folders begin
DIGEST = "sha256"  # the key of a digest among the values that it is made of
MAX_DEPTH = 100  # lists and tables within one another; code that follows them by recursion then stays far below Python's limit
MAX_CONFIG_BYTES = 2**20
MAX_NAME_BYTES = 255  # of a file or folder, on nearly every file system
MAX_JSON_BYTES = 2**28  # of a file whose size nothing else tells

_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
# A dotted key of more than MAX_DEPTH parts, found before tomllib sees it: its time grows with the square of their number.
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_DEPTH},}}")


class FileError(ValueError):
    """A file that does not hold what it should, with the reason in one sentence."""


def write_file(path: Path | str, *parts: bytes | memoryview) -> None:
    """Write a file in one step, made of all parts, and return when it is on the disk. Missing folders are made.

    A file that is replaced hands on its mode; a link stays, and the file that it leads to is replaced.
    """
    target = Path(os.path.realpath(path))
    mode = _mode_of(target)
    make_folder(target.parent)
    temporary = target.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        _write_new(temporary, parts, mode)
        os.replace(temporary, target)
        sync(target.parent)
    except OSError as error:
        _forget(temporary)
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file, and nobody knows the temporary one
    except BaseException:
        _forget(temporary)
        raise


def _mode_of(target: Path) -> int | None:
    """Return the mode of a file that is to be replaced, None where there is none."""
    try:
        found = target.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(found):
        return stat.S_IMODE(found)
    number = errno.EISDIR if stat.S_ISDIR(found) else errno.EINVAL
    raise OSError(number, "it is a folder" if number == errno.EISDIR else "it is not a regular file", str(target))


def _write_new(path: Path, parts: tuple[bytes | memoryview, ...], mode: int | None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less what the user's umask takes away
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(descriptor, rest) :]  # which writes 2 GB at most
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _forget(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and the missing ones above it, on the disk. Return those that this call made, innermost first.

    A folder that another process makes at the same time is not among them.
    """
    if folder.is_dir():
        return []
    made = make_folder(folder.parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        return made
    sync(folder.parent)
    return [folder, *made]


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name in the same folder, on the disk."""
    os.replace(source, target)
    sync(target.parent)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with everything in it. A path that does not exist is no error."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            for name in os.listdir(path):
                remove(path / name)
            os.rmdir(path)
        else:
            os.unlink(path)


def remove_temporaries(folder: Path) -> None:
    """Remove the unfinished files and folders that a crash left behind. No other process may write there at that time."""
    for path in folder.glob(f"{TEMPORARY}*"):
        remove(path)


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path | str) -> BinaryIO:
    """Open a regular file for reading. Raise FileError for a pipe or a device, without waiting for it, and OSError as usual."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileError(f"{path} is a device or a pipe, and not a file")
    return file


def read_file(path: Path | str, *, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raise FileError where there is more than `max_bytes`, and OSError as usual."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise FileError(f"{path} has {size:,} bytes, and at most {max_bytes:,} are read of it")
        return file.read(size)


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text. Raise FileError where it is nested too deep, and ValueError where it is no JSON."""
    try:
        # The standard library's parser: with msgspec, integers beyond 64 bits (states of random generators) do not come back.
        value = json.loads(content)
    except RecursionError:
        raise FileError(_TOO_DEEP) from None
    _check_depth(value)
    return value


def parse_toml(content: bytes) -> dict[str, Any]:
    """Return the tables of a TOML text. Raise FileError where it is nested too deep, and ValueError where it is no TOML."""
    text = content.decode()
    if _LONG_KEY.search(text):
        raise FileError(_TOO_DEEP)
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise FileError(_TOO_DEEP) from None
    _check_depth(table)
    return table


def _check_depth(value: Any) -> None:
    """Go down level by level, because a recursion is what a deep tree would break."""
    level, depth = [value], 0
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise FileError(_TOO_DEEP)
        level = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]


def reason_of(error: OSError) -> str:
    """Return what the system refused, in words that say what to look at.

    >>> reason_of(OSError(errno.ENOSPC, "No space left on device", "runs/a/events.jsonl"))
    'the disk is full (runs/a/events.jsonl)'
    """
    name = "" if error.filename is None else printable(os.fsdecode(error.filename))
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"the disk is full ({name})" if name else "the disk is full"
        case errno.ENAMETOOLONG if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in name.split("/")):
            longest = max(name.split("/"), key=len)
            return f"the name {longest[:20]}… is too long: file systems take {MAX_NAME_BYTES} bytes at most; choose a shorter one"
        case errno.EACCES | errno.EPERM:
            return f"there is no permission for {name}"
        case errno.EROFS:
            return f"{name} is on a file system that cannot be written to"
        case errno.ENOENT:
            return f"{name} does not exist"
        case errno.ENOTDIR:
            return f"a part of the path {name} is a file and not a folder"
        case errno.EISDIR:
            return f"{name} is a folder and not a file"
    text = error.strerror or str(error) or type(error).__name__
    return f"{text} ({name})" if name else text


def printable(path: Path | str) -> str:
    """Return a text in which bytes of a file name that are not UTF-8 are written out; neither a terminal nor JSON could take them.

    >>> printable(os.fsdecode(b"run-\\xff"))
    'run-\\\\udcff'
    """
    return str(path).encode("utf-8", "backslashreplace").decode()


def digest_of(values: Any) -> str:
    """Return the sha256 of JSON or TOML values. The layout of the text that they were read from does not matter.

    >>> digest_of({"step": 1})[:8]
    '8565a568'
    """
    return hashlib.sha256(json.dumps(values, separators=(",", ":"), default=str).encode()).hexdigest()


def with_digest(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with their digest as the last one."""
    return {**values, DIGEST: digest_of(values)}


def without_digest(values: dict[str, Any], *, is_required: bool) -> dict[str, Any]:
    """Return the values less their digest, after checking it. Raise FileError where it does not fit, or is required and missing."""
    rest = {name: value for name, value in values.items() if name != DIGEST}
    if DIGEST not in values:
        if is_required:
            raise FileError(f"its {DIGEST} is missing")
        return rest
    if values[DIGEST] != digest_of(rest):
        raise FileError(f"its {DIGEST} is not that of its content")
    return rest
