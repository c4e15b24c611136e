"""Texts that strangers may have chosen, such as names, tags, notes and texts of events, made safe for a terminal. Imports no torch.

Control characters could clear a screen, set its title or overwrite a line, so they are shown as escapes where a text enters a record, a
line or a cell.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import msgspec

_SPACES = re.compile(r"[\n\t\r\x0b\x0c\x85\u2028\u2029]+")
# Control characters of both kinds, marks that change the direction of writing, and bytes that are not UTF-8.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_USUAL = bytes(byte for byte in range(0x20, 0x100) if byte not in b"\\\x7f\xc2\xe2")
_IN_JSON = re.compile(rb"\\[ubfnrt]|[\x00-\x08\x0b-\x1f\x7f\xc2\xe2]")  # bytes without which a line of JSON has no such character


def clean(text: Path | str) -> str:
    """Return a text on one line, with escapes in place of characters that steer a terminal.

    >>> clean("a\\x1b[2J\\nb")
    'a\\\\x1b[2J b'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), _SPACES.sub(" ", str(text)))


def quoted(path: Path | str) -> str:
    """Return a path as a word of a shell's command, to be shown."""
    return clean(shlex.quote(str(path)))


def clean_values(value: Any) -> Any:
    """Return nested tables and lists in which all texts and names are clean."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(name)): clean_values(item) for name, item in value.items()}
    if isinstance(value, list):
        return [clean_values(item) for item in value]
    return value


def clean_line(line: bytes) -> bytes:
    """Return a line of JSON in which all texts and names are clean; the line itself if it is no JSON."""
    line_end = b"\n" if line.endswith(b"\n") else b""
    unusual = line.translate(None, _USUAL)  # ten times as fast as the search
    if unusual in (b"", line_end) or not _IN_JSON.search(line.removesuffix(line_end)):
        return line
    try:
        return msgspec.json.encode(clean_values(msgspec.json.decode(line))) + b"\n"
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return line
