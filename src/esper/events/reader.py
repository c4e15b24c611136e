"""Reads an event log back, typed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from esper.events.event import MAX_LINE_BYTES, EventError, Record, check_header, decode, decode_stamp, event_type_of
from esper.files import FileError, open_file


def read(path: Path | str, *, on_skip: Callable[[str], None] | None = None) -> Iterator[Record]:
    """The records of a log in order, header first, as far as whole lines go: the log may still be growing or have been torn.

    Kinds that no imported package defines are skipped, and `on_skip` is told each time.
    """
    with _opened(path) as file:
        header = file.readline(MAX_LINE_BYTES)
        if not header.endswith(b"\n"):
            raise EventError(f"{path} has no header: it is no event log, or its first line was never finished")
        yield check_header(header, path)
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=2):
            if not line.endswith(b"\n"):
                if len(line) < MAX_LINE_BYTES:
                    return
                raise EventError(f"line {number} of {path} is broken: it has more than {MAX_LINE_BYTES:,} bytes; no line after it was read")
            try:
                stamp = decode_stamp(line)
                event_type = event_type_of(stamp.kind)
                record = None if event_type is None else decode(line, stamp, event_type)
            except msgspec.ValidationError as error:
                raise EventError(f"line {number} of {path} does not fit its kind: {error}") from error
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                # A power cut may leave a block of noise at the very end, newline and all.
                if not file.read(1):
                    return
                raise EventError(f"line {number} of {path} is broken: {error}; no line after it was read") from error
            if record is not None:
                yield record
            elif on_skip is not None:
                on_skip(stamp.kind)


def _opened(path: Path | str) -> BinaryIO:
    try:
        return open_file(path)
    except FileError as error:
        raise EventError(str(error)) from error


class Reader:
    """A log to iterate over, that remembers what it could not understand.

    `skipped` counts, per unknown kind, the records passed over by the latest iteration.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Record]:
        self.skipped.clear()
        return read(self.path, on_skip=self._skip)

    def _skip(self, kind: str) -> None:
        self.skipped[kind] += 1
