"""Write files atomically, read untrusted files safely, and detect files that were changed.

Every file that esper writes whole goes through `write_file`. When it returns, the content and the name of the file are on disk; at any
moment a reader finds either the old file or the new one. A link is replaced, never followed. `make_folder`, `rename` and `remove` do the
same for folders. All of them call `os`, so tests can inject faults in one place: `esper.files.os`.

Files that esper reads may come from anywhere. `read_file`, `parse_json` and `parse_toml` refuse pipes, devices, huge files and deep
nesting, which would fill the memory or the stack, or never end.

The folder of a run may come from a stranger, so nothing inside of it may lead out of it. Files of a run are opened by two functions only:
`open_in_run`, for reading, appending and locks, and `write_in_run`. They refuse a link, and a folder below that of the run that is a link;
the folder of the run itself may be one. Files that a user names, such as a model or a config, are opened by `open_file`, which follows
links. Tests fail where a file of a run is opened in another way (`tests/conftest.py`).

Every file that esper reads back has a sha256, in itself or in another file that has one:

    run configs (TOML)             a comment with the sha256 of the values               `esper.config`
    manifest.json, league.json,    the key "sha256", over all other keys                 `with_digest`, `without_digest`
    labels.json, analysis.json
    tensors and state of a         in the manifest                                       `esper.runs`
    checkpoint
    models, controllers, players,  in the metadata of the safetensors file, over         `write_tensors`, `read_tensors`
    league members, replays,       names, types, shapes, values and metadata
    policies and learners

Only safetensors files of other programs have none. The lines of `events.jsonl` have no digest: they are only displayed, and only their
structure is checked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

TEMPORARY = ".tmp-"  # prefix of the names of unfinished files and folders
DIGEST = "sha256"  # key of the digest in a table
MAX_DEPTH = 100  # nesting of lists and tables; recursive code then stays far below Python's limit
MAX_CONFIG_BYTES = 2**20
MAX_NAME_BYTES = 255  # length of a file name on nearly every file system
MAX_JSON_BYTES = 2**28  # size of a JSON file whose size is in no manifest

_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
# Matches a dotted key of more than MAX_DEPTH parts. Such keys are refused before tomllib parses them in quadratic time.
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_DEPTH},}}")


class FileError(ValueError):
    """A file does not hold what it should. The message gives the reason in one sentence."""


def write_file(path: Path | str, *parts: bytes | memoryview) -> None:
    """Write a file from its parts, atomically, and return when it is on disk. Missing folders are made.

    The new file keeps the mode of the one it replaces. If `path` is a symbolic link, the link is replaced and its target stays as it is.
    """
    target = Path(path)
    mode = _mode_of(target)
    make_folder(target.parent)
    temporary = target.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        _write_new(temporary, parts, mode)
        os.replace(temporary, target)
        sync(target.parent)
    except OSError as error:
        _remove_temporary(temporary)
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # name the file that the caller knows, not the temporary one
    except BaseException:
        _remove_temporary(temporary)
        raise


def _mode_of(target: Path) -> int | None:
    """Return the mode of the file that is to be replaced; None if there is none or a link. Raise OSError if it is not a regular file."""
    try:
        found = target.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found):
        return None
    if stat.S_ISREG(found):
        return stat.S_IMODE(found)
    number = errno.EISDIR if stat.S_ISDIR(found) else errno.EINVAL
    raise OSError(number, "it is a folder" if number == errno.EISDIR else "it is not a regular file", str(target))


def _write_new(path: Path, parts: tuple[bytes | memoryview, ...], mode: int | None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # the user's umask applies
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(descriptor, rest) :]  # one call writes at most 2 GB
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_temporary(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)


def user_cache() -> Path:
    """Return the folder for files of esper that can be made again: $XDG_CACHE_HOME/esper, or ~/.cache/esper."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "esper"


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its missing parents, on disk. Return the folders that this call made, innermost first.

    Folders that another process made at the same time are not returned.
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
    """Rename a file or folder within its folder, and return when the new name is on disk."""
    os.replace(source, target)
    sync(target.parent)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with everything in it. Do nothing if the path does not exist."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            for name in os.listdir(path):
                remove(path / name)
            os.rmdir(path)
        else:
            os.unlink(path)


def remove_temporaries(folder: Path) -> None:
    """Remove the unfinished files and folders that a crash left in a folder, but not those that another process is writing just now."""
    for path in folder.glob(f"{TEMPORARY}*"):
        writer = path.name.removeprefix(TEMPORARY).partition("-")[0]
        if not writer.isdecimal() or int(writer) == os.getpid() or not _is_running(int(writer)):
            remove(path)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user, or no number of a process
        return True
    return True


def sync(folder: Path) -> None:
    """Wait until a folder's list of names is on disk. An error names the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error  # os.fsync's error names no file
    finally:
        os.close(descriptor)


def open_file(path: Path | str) -> BinaryIO:
    """Open a regular file that a user named for reading; links are followed.

    Raise FileError for a pipe or a device, without blocking on it, and OSError as `open` does.
    """
    return _opened(path, "rb")


def read_file(path: Path | str, *, max_bytes: int) -> bytes:
    """Return the content of a regular file that a user named; see `open_file`. Raise FileError if it has more than `max_bytes`."""
    with open_file(path) as file:
        return _read_all(file, path, max_bytes)


RunMode = Literal["rb", "r+b", "ab"]
_FLAGS: dict[RunMode, int] = {"rb": os.O_RDONLY, "r+b": os.O_RDWR, "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND}


def open_in_run(path: Path, mode: RunMode = "rb", *, run: Path | None = None) -> BinaryIO:
    """Open a regular file of a run, for reading or for changes in place: "ab" makes a missing file and appends to it.

    `run` is the folder of the run, by default that of the file. Raise FileError for a link, a pipe or a device, without blocking on it, and
    OSError as `open` does.
    """
    check_in_run(path, run=run)
    try:
        return _opened(path, mode, os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it became a link a moment ago
            raise FileError(_IS_LINK.format(path)) from error
        raise


def read_in_run(path: Path, *, max_bytes: int, run: Path | None = None) -> bytes:
    """Return the content of a file of a run; see `open_in_run`. Raise FileError if it has more than `max_bytes`."""
    with open_in_run(path, run=run) as file:
        return _read_all(file, path, max_bytes)


def write_in_run(path: Path, *parts: bytes | memoryview, run: Path | None = None) -> None:
    """Write a file of a run; see `write_file`. `run` is the folder of the run, by default that of the file."""
    check_in_run(path.parent, run=run or path.parent)
    write_file(path, *parts)


_IS_LINK = "{} is a link, and links in the folder of a run are not followed; put the file or folder itself there"


def check_in_run(path: Path, *, run: Path | None = None) -> None:
    """Raise FileError if a file or folder of a run is a link, or a folder on the way to it from that of the run."""
    place, top = path, path.parent if run is None else run
    while place != top:
        assert place.parent != place, f"{path} is not in {top}"
        if place.is_symlink():
            raise FileError(_IS_LINK.format(place))
        place = place.parent


def _opened(path: Path | str, mode: RunMode, flags: int = 0) -> BinaryIO:
    """Open a regular file. Without O_NONBLOCK, opening a pipe would wait for its other end."""
    try:
        descriptor = os.open(path, _FLAGS[mode] | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EOPNOTSUPP):  # a pipe that nobody reads, or a socket
            raise FileError(_NOT_REGULAR.format(path)) from error
        raise
    try:
        found = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(found):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found):
            raise FileError(_NOT_REGULAR.format(path))
        return open(descriptor, mode)  # the caller closes it
    except BaseException:
        os.close(descriptor)
        raise


_NOT_REGULAR = "{} is a device or a pipe, not a regular file"


def _read_all(file: BinaryIO, path: Path | str, max_bytes: int) -> bytes:
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise FileError(f"{path} has {size:,} bytes, but at most {max_bytes:,} are allowed")
    return file.read(size)


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text. Raise FileError if it is nested too deeply, and ValueError if it is not JSON."""
    try:
        # msgspec cannot read integers beyond 64 bits, which states of random generators have.
        value = json.loads(content)
    except RecursionError:
        raise FileError(_TOO_DEEP) from None
    _check_depth(value)
    return value


def parse_toml(content: bytes) -> dict[str, Any]:
    """Return the tables of a TOML text. Raise FileError if it is nested too deeply, and ValueError if it is not TOML."""
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
    """Raise FileError if lists and tables are nested too deeply. Goes level by level, because recursion could overflow the stack."""
    level, depth = [value], 0
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise FileError(_TOO_DEEP)
        level = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]


def reason_of(error: OSError) -> str:
    """Return the reason of an OSError in plain words, with the name of the file.

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
    """Return a text in which bytes that are not UTF-8 are escaped, because neither a terminal nor JSON can hold them.

    >>> printable(os.fsdecode(b"run-\\xff"))
    'run-\\\\udcff'
    """
    return str(path).encode("utf-8", "backslashreplace").decode()


def digest_of(values: Any) -> str:
    """Return the sha256 of JSON or TOML values. It does not depend on the layout of the text they were read from.

    >>> digest_of({"step": 1})[:8]
    '8565a568'
    """
    return hashlib.sha256(json.dumps(values, separators=(",", ":"), default=str).encode()).hexdigest()


def with_digest(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with their digest as the last entry."""
    return {**values, DIGEST: digest_of(values)}


def without_digest(values: dict[str, Any]) -> dict[str, Any]:
    """Check the digest and return the other values. Raise FileError if it does not match or is missing."""
    rest = {name: value for name, value in values.items() if name != DIGEST}
    if DIGEST not in values:
        raise FileError(f"its {DIGEST} is missing")
    if values[DIGEST] != digest_of(rest):
        raise FileError(f"its {DIGEST} is not that of its content")
    return rest


# Safetensors files: 8 bytes with the length of the header, the header as JSON, and the bytes of the tensors. Read here without torch.

TENSORS_FORMAT_KEY, TENSORS_FORMAT = "esper", 2  # version of the digest's rules; higher ones are refused
MAX_FILE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # memory of this machine
MAX_DIMENSIONS = 32
MAX_ELEMENTS = 2**48  # of one tensor; a dimension of size 0 counts as 1, so the shapes of empty tensors are limited too
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)  # raised by damaged content
_METADATA = "__metadata__"  # key of the metadata in the header, as safetensors defines it
_LENGTH = 8


class NotTensorsError(FileError):
    """The file is not a safetensors file."""


def split_safetensors(content: bytes) -> tuple[dict[str, Any], dict[str, str], memoryview]:
    """Return the entries of the tensors in the header, the metadata, and the bytes after the header. Checks nothing else."""
    length = int.from_bytes(content[:_LENGTH], "little")
    if length > len(content) - _LENGTH:
        raise ValueError(f"it has {len(content)} bytes, but its header alone should have {length}")
    header: dict[str, Any] = parse_json(content[_LENGTH : _LENGTH + length])
    if not isinstance(header, dict):
        raise TypeError("its header is not a table")
    return header, header.pop(_METADATA, {}), memoryview(content)[_LENGTH + length :]


def safetensors_header(header: dict[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the data of a safetensors file."""
    encoded = _to_json({_METADATA: metadata, **header})
    encoded += b" " * (-len(encoded) % _LENGTH)  # pad, so that the data start at a multiple of 8 bytes
    return len(encoded).to_bytes(_LENGTH, "little") + encoded


def check_safetensors(content: bytes, source: Path | str) -> tuple[dict[str, Any], dict[str, str], memoryview]:
    """Split a safetensors file, and check its shapes and its digest. Raise FileError if it is damaged; `source` names it in errors."""
    try:
        header, metadata, data = split_safetensors(content)
        problem = _absurd_shape(header) or _wrong_digest(header, metadata, data)
    except UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise NotTensorsError(f"{source} cannot be read as a safetensors file ({reason})") from error
    if problem is not None:
        raise FileError(f"{source} {problem}")
    return header, metadata, data


def _wrong_digest(header: dict[str, Any], metadata: dict[str, str], data: memoryview) -> str | None:
    """Check the digest. Return what is wrong with the file; None if nothing is."""
    if TENSORS_FORMAT_KEY not in metadata and DIGEST not in metadata:
        return None  # written by another program
    if TENSORS_FORMAT_KEY not in metadata or DIGEST not in metadata:
        return "is damaged: a part of its metadata is missing"
    found = metadata[TENSORS_FORMAT_KEY]
    if found.isdecimal() and int(found) > TENSORS_FORMAT:
        return f"was written by a newer esper: its format is {found}, this one reads up to {TENSORS_FORMAT}; update esper"
    entries = {name: value for name, value in metadata.items() if name != DIGEST}
    return None if metadata[DIGEST] == digest_of_tensors(header, entries, data) else f"is damaged: its {DIGEST} is not that of its content"


def _absurd_shape(header: dict[str, Any]) -> str | None:
    """Return what is wrong with the first shape that is too large to be real; None if there is none."""
    for name, entry in header.items():
        shape = entry["shape"]
        if len(shape) > MAX_DIMENSIONS:
            return f"is damaged: {name} has {len(shape)} dimensions, but at most {MAX_DIMENSIONS} are possible"
        if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
            return f"is damaged: {name} has the shape {shape}, but at most {MAX_ELEMENTS:,} elements are possible"
    return None


def digest_of_tensors(header: dict[str, Any], metadata: Mapping[str, str], data: memoryview) -> str:
    """Return the sha256 of metadata, names, types, shapes and bytes. It does not depend on the order of tensors in the file."""
    digest = hashlib.sha256(_to_json(sorted(metadata.items())))
    for name in sorted(header):
        start, end = header[name]["data_offsets"]
        digest.update(_to_json([name, header[name]["dtype"], header[name]["shape"], end - start]))
        digest.update(data[start:end])
    return digest.hexdigest()


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
