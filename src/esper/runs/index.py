"""The events of a run as columns of numbers, for pages, tables and comparisons. Imports no torch.

    index = EventIndex(folder / "events.jsonl")
    index.refresh()                                     # reads what was appended since the last call
    losses = index.series("epoch_ended/val_loss")       # steps, times and values as arrays
    index.events("stage_entered")                       # all fields of the events of one kind, as dicts

Numbers are named as in TensorBoard: kind/field, kind/field/key for dictionaries, and kind/field/name/key for lists of records, where the
name is the first text of a record. Events of other ranks and of single hosts have the prefixes `rank1/` and `env3/`.

An index of a large file is kept in the user's cache folder, with a digest. It is used if the file begins with the bytes that were indexed,
and only the rest is read. A run that is resumed cuts its file: then everything is read again.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from esper.files import FileError, open_in_run, write_file
from esper.jit import no_garbage_collection
from esper.runs.events import MAX_LINE_BYTES, MAX_STEP, MAX_TIME, EventError, battle_numbers, fields_of
from esper.runs.foreign import clean_line

CHUNK = 4 * 2**20  # bytes read at a time
ROWS = 2**16  # in a block
BULK = 32  # lines of one kind in a row that are worth a reader
NEWLINE = 10
_KIND = re.compile(rb'\{"kind":"(\w+)"')
CACHED_FROM = 4 * 2**20  # bytes of a file whose index is worth keeping
CHECKED = 10_000  # events of a kind that are all checked
MARK = 4096  # bytes before the end of the indexed part, by which it is recognised
_FORMAT = 2  # of a kept index
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # as `events.encode` writes them
_STAMP = frozenset({"kind", "time", "run", "rank", "env", "step", "number"})  # not plotted; `number` says which seed an event is about


class Series(NamedTuple):
    """One number over the events of a run, [n] each."""

    steps: np.ndarray  # step of the run; -1 where an event has none
    times: np.ndarray  # unix seconds
    values: np.ndarray


class _Group:
    """The events of one kind and place: blocks of rows with the same numbers, in order. The first two numbers are step and time."""

    def __init__(self) -> None:
        self.blocks: list[tuple[tuple[str, ...], np.ndarray]] = []  # names [k], rows [n, 2 + k]
        self._names: tuple[str, ...] = ()
        self._rows: list[tuple[Any, ...]] = []  # not in a block yet
        self._computed: dict[str, Series] = {}  # series that were asked for since the last block

    def add(self, names: tuple[str, ...], row: tuple[Any, ...]) -> None:
        if names != self._names or len(self._rows) >= ROWS:
            self.close()
            self._names = names
        self._rows.append(row)

    def close(self) -> None:
        """Turn the rows so far into a block."""
        if self._rows:
            block, self._rows = _as_array(self._rows), []
            self.add_block(self._names, block)

    def add_block(self, names: tuple[str, ...], block: np.ndarray) -> None:
        """Add rows. Small blocks before them become a part of their block, so that a live run does not have thousands."""
        self.close()
        while self.blocks and self.blocks[-1][0] == names and len(self.blocks[-1][1]) <= min(2 * len(block), ROWS):
            block = np.concatenate((self.blocks.pop()[1], block))
        self.blocks.append((names, block))
        self._computed = {}

    def names(self) -> list[str]:
        self.close()
        return list(dict.fromkeys(name for names, _ in self.blocks for name in names))

    def series(self, name: str) -> Series:
        self.close()
        if name not in self._computed:
            parts = [rows[:, (0, 1, 2 + names.index(name))] for names, rows in self.blocks if name in names]
            table = np.concatenate(parts) if parts else np.empty((0, 3))
            table = table[~np.isnan(table[:, 2])]
            self._computed[name] = Series(_as_steps(table[:, 0]), table[:, 1], table[:, 2])
        return self._computed[name]


class EventIndex:
    """The events of one log, read as far as it has been written. Nothing in the run's folder is changed.

    `skipped` counts lines that could not be read, or were asked for by `events` and do not fit their kind. `cache` is the folder for kept
    indices; None keeps none.
    """

    def __init__(self, path: Path | str, *, cache: Path | None = None) -> None:
        self.path = Path(path)
        self._cache_folder = cache
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
        self.generation = 0  # how often everything was read anew, because the log was cut
        self._forget()
        self._was_loaded = False

    def _forget(self) -> None:
        self.offset = 0  # bytes indexed so far, all of them whole lines
        self._unreadable = 0  # lines
        self._misfits: set[int] = set()  # offsets of lines that do not fit their kind, as far as they were asked for
        self.last_time: float | None = None  # of the newest event
        self._writer: threading.Thread | None = None  # writes the index into the cache folder
        self._mark = b""
        self._groups: dict[str, _Group] = {}
        self._lines: dict[str, array[int]] = {}  # kind -> offset of each line
        self._readers: dict[bytes, _Reader | None] = {}  # by kind; None if its events cannot be read together
        # Kind -> fields of the event that its reader was made for, and the names of the numbers inside them.
        self._shapes: dict[str, tuple[tuple[str, ...], set[tuple[str, str]]]] = {}

    @property
    def skipped(self) -> int:
        return self._unreadable + len(self._misfits)

    def count_skipped(self) -> int:
        """Return `skipped` after a look at all lines, but those of kinds with very many events, which only have numbers."""
        for kind, offsets in self._lines.items():
            if len(offsets) <= CHECKED:
                self.events(kind)
        return self.skipped

    def refresh(self, on_progress: Callable[[float], None] = lambda share: None) -> int:
        """Read the lines that were appended since the last call. Return their number; -1 if everything was read anew.

        `on_progress` is called with the share of the file that has been read. Raise EventError if the file cannot be read.
        """
        try:
            with open_in_run(self.path) as file:
                return self._read(file, os.fstat(file.fileno()).st_size, on_progress)
        except FileError as error:
            raise EventError(str(error)) from error
        except OSError as error:
            raise EventError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _read(self, file: Any, size: int, on_progress: Callable[[float], None]) -> int:
        if not self._was_loaded:
            self._was_loaded = True
            self._load_cache(file, size)
        is_anew = self.offset > 0 and not self._is_prefix(file, size)
        if is_anew:
            self._forget()
            self.generation += 1
        count, start = 0, self.offset
        with no_garbage_collection():
            file.seek(self.offset)
            rest = b""
            while chunk := file.read(CHUNK):
                whole, newline, rest = (rest + chunk).rpartition(b"\n")
                if newline:
                    count += self._take(whole + newline)
                    on_progress(self.offset / max(size, 1))
                elif len(rest) > MAX_LINE_BYTES:
                    break
        if count:
            file.seek(max(self.offset - MARK, 0))
            self._mark = file.read(min(MARK, self.offset))
        if start == 0 and self.offset >= CACHED_FROM:
            self.keep()
        return -1 if is_anew else count

    def _is_prefix(self, file: Any, size: int) -> bool:
        """Return whether the file still begins with the indexed lines, judged by the bytes before their end."""
        if size < self.offset:
            return False
        file.seek(self.offset - len(self._mark))
        return bool(file.read(len(self._mark)) == self._mark)

    def _take(self, lines: bytes) -> int:
        """Index whole lines. Return how many events they hold."""
        ends = (np.flatnonzero(np.frombuffer(lines, np.uint8) == NEWLINE) + 1).tolist()
        starts = [0, *ends[:-1]]
        before = self._unreadable
        # Take the events of each kind together. Often there is only one.
        first = _KIND.match(lines)
        if first is not None and lines.count(b"\n" + first[0]) == len(starts) - 1:
            self._take_alike(first[1], lines, starts, ends)
        else:
            by_kind: dict[bytes, tuple[list[int], list[int]]] = {}
            for start, end in zip(starts, ends, strict=True):
                match = _KIND.match(lines, start)
                own = by_kind.setdefault(match[1] if match else b"", ([], []))
                own[0].append(start)
                own[1].append(end)
            for kind, (own_starts, own_ends) in by_kind.items():
                self._take_alike(kind, lines, own_starts, own_ends)
        self.offset += len(lines)
        return len(starts) - (self._unreadable - before)

    def _take_alike(self, kind: bytes, lines: bytes, starts: list[int], ends: list[int]) -> None:
        """Index lines of one kind: all at once if they have the same fields, else in smaller and smaller parts."""
        if len(starts) >= BULK and kind not in self._readers:
            self._take_line(lines[starts[0] : ends[0]], self.offset + starts[0])
            starts, ends = starts[1:], ends[1:]
        reader = self._readers.get(kind)
        if len(starts) < BULK or reader is None:
            for start, end in zip(starts, ends, strict=True):
                self._take_line(lines[start:end], self.offset + start)
            return
        try:
            is_whole = sum(ends) - sum(starts) == ends[-1] - starts[0]  # no other lines are between them
            rows = reader.read(lines[starts[0] : ends[-1]] if is_whole else b"".join(map(lines.__getitem__, map(slice, starts, ends))))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            middle = len(starts) // 2
            self._take_alike(kind, lines, starts[:middle], ends[:middle])
            self._take_alike(kind, lines, starts[middle:], ends[middle:])
            return
        self._lines[reader.kind].frombytes((np.array(starts, np.int64) + self.offset).tobytes())
        self._group(reader.kind).add_block(reader.names, rows)
        self.last_time = max(self.last_time or 0.0, float(rows[-1, 1]))

    def _take_line(self, line: bytes, offset: int) -> None:
        """Index one line, and note how to read others with the same fields."""
        try:
            event = self._decoder.decode(clean_line(line))
            kind, at = str(event["kind"]), float(event["time"])
            rank, env, step = event.get("rank"), event.get("env"), event.get("step")
            if not (0 <= at <= MAX_TIME and isinstance(rank or 0, int) and isinstance(env or 0, int)):
                raise ValueError("no line of a log")
            numbers = dict(_numbers(SHOWN[kind](event) if kind in SHOWN else event))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, IndexError, TypeError, ValueError, AttributeError):
            self._unreadable += 1
            return
        self._lines.setdefault(kind, array("q")).append(offset)
        place = (f"rank{rank}/" if rank else "") + ("" if env is None else f"env{env}/") + kind
        self.last_time = max(self.last_time or 0.0, at)
        self._group(place).add(tuple(numbers), (step, at, *numbers.values()))
        # A reader takes events that lack some of its inner numbers, so one for events with fewer does not replace it.
        fields = tuple(event)
        inner = {(name, key) for name, value in event.items() if isinstance(value, dict) for key in value}
        known = self._shapes.get(kind)
        if place == kind and (known is None or known[0] != fields or not inner <= known[1]):
            self._shapes[kind] = fields, inner
            self._readers[kind.encode()] = _reader_of(kind, event)

    def _group(self, place: str) -> _Group:
        group = self._groups.get(place)
        if group is None:
            group = self._groups[place] = _Group()
        return group

    # Looking up

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def kinds(self) -> dict[str, int]:
        """Number of events of each kind."""
        return {kind: len(offsets) for kind, offsets in self._lines.items()}

    def names(self) -> list[str]:
        """Return the names of all series, in the order in which they first occurred."""
        return [f"{place}/{name}" for place, group in self._groups.items() for name in group.names()]

    def series(self, name: str) -> Series:
        """Return one series. Events that lack the number are left out; an unknown name gives an empty series."""
        for place, group in self._groups.items():
            if name.startswith(f"{place}/") and name[len(place) + 1 :] in group.names():
                return group.series(name[len(place) + 1 :])
        return Series(np.empty(0, np.int64), np.empty(0), np.empty(0))

    def last_step(self, kind: str) -> int:
        """Return the step of the newest event of a kind; without steps, the number of these events."""
        group = self._groups.get(kind)
        if group is None:
            return 0
        group.close()
        step = int(_as_steps(group.blocks[-1][1][-1:, 0])[0])
        return step if step >= 0 else len(self._lines[kind])

    def events(self, kind: str, *, start: int = 0) -> list[dict[str, Any]]:
        """Return the events of one kind from number `start` on, with all of their fields. Reads their lines from the file.

        A negative `start` counts from the end. Fields have the types of the kind; lines that do not fit it are left out and counted as
        `skipped`.
        There are none any more if the file was removed, or cut by a resume since the last `refresh`.
        """
        return self._at(self._lines.get(kind, array("q"))[start:], {kind})

    def in_order(self, kinds: Collection[str]) -> list[dict[str, Any]]:
        """Return the events of several kinds as `events` does, in the order in which they were written."""
        return self._at(sorted(offset for kind in kinds for offset in self._lines.get(kind, ())), kinds)

    def _at(self, offsets: Sequence[int], kinds: Collection[str]) -> list[dict[str, Any]]:
        """Return the events of the lines that begin at these offsets, if they fit and are of one of these kinds."""
        if not offsets:
            return []
        found = []
        try:
            with open_in_run(self.path) as file:
                for offset in offsets:
                    file.seek(offset)
                    event = fields_of(file.readline(MAX_LINE_BYTES))
                    if event is None or event["kind"] not in kinds:
                        self._misfits.add(offset)
                    else:
                        found.append(event)
        except (OSError, FileError):
            return []
        return found

    # The kept index

    def keep(self) -> None:
        """Write the index into the cache folder, over an older one, in a thread. A folder that cannot be written is no error."""
        if self._cache_folder is None:
            return
        arrays: list[np.ndarray] = [np.array(offsets, np.int64) for offsets in self._lines.values()]
        blocks = []
        for place, group in self._groups.items():
            group.close()
            for names, rows in group.blocks:
                blocks.append([place, names, len(rows)])
                arrays.append(rows)
        header: dict[str, Any] = {"format": _FORMAT, "offset": self.offset, "skipped": self._unreadable, "last_time": self.last_time}
        header |= {"mark": hashlib.blake2b(self._mark).hexdigest(), "blocks": blocks}
        header |= {"lines": [[kind, len(offsets)] for kind, offsets in self._lines.items()]}
        # These arrays never change: later events go into new ones.
        kept_at = self._kept_at(self._cache_folder)
        self._writer = threading.Thread(target=_write_index, args=(kept_at, msgspec.json.encode(header), arrays), name="index")
        self._writer.start()

    def _kept_at(self, cache: Path) -> Path:
        return cache / hashlib.blake2b(os.fsencode(os.path.realpath(self.path)), digest_size=16).hexdigest()

    def wait(self) -> None:
        """Wait until the index is written, if it is being written."""
        if self._writer is not None:
            self._writer.join()

    def _load_cache(self, file: Any, size: int) -> None:
        """Take over a kept index if it fits the file; otherwise start from nothing."""
        if self._cache_folder is None or size < CACHED_FROM:
            return
        try:
            digest, _, content = self._kept_at(self._cache_folder).read_bytes().partition(b"\n")
            if digest != hashlib.blake2b(content).hexdigest().encode():
                return
            head, _, body = content.partition(b"\n")
            header = msgspec.json.decode(head)
            offset = int(header["offset"])
            file.seek(max(offset - MARK, 0))
            mark = file.read(min(MARK, offset))
            if header["format"] != _FORMAT or size < offset or hashlib.blake2b(mark).hexdigest() != header["mark"]:
                return
            self._restore(header, body)
            self.offset, self._mark = offset, mark
        except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
            self._forget()

    def _restore(self, header: dict[str, Any], body: bytes) -> None:
        position = 0

        def take(count: int, dtype: type) -> np.ndarray:
            nonlocal position
            part: np.ndarray = np.frombuffer(body, dtype, count, position)  # raises ValueError if the file was cut
            position += 8 * count
            return part

        for kind, count in header["lines"]:
            self._lines[kind] = array("q", take(count, np.int64).tobytes())
        for place, names, count in header["blocks"]:
            rows = take(count * (2 + len(names)), np.float64).reshape(count, 2 + len(names))
            self._groups.setdefault(place, _Group()).blocks.append((tuple(names), rows))
        self._unreadable, self.last_time = header["skipped"], header["last_time"]


def _write_index(path: Path, header: bytes, arrays: list[np.ndarray]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = header + b"\n" + b"".join(part.tobytes() for part in arrays)
        write_file(path, hashlib.blake2b(content).hexdigest().encode() + b"\n", content)
    except OSError:
        return


class _Reader(NamedTuple):
    """Reads many events of one kind with the same fields at once, three times as fast as one by one."""

    kind: str
    names: tuple[str, ...]  # of the numbers
    decoder: msgspec.json.Decoder[Any]
    getter: Callable[[Any], tuple[Any, ...]]

    def read(self, lines: bytes) -> np.ndarray:
        """Return step, time and numbers of every line, [n, 2 + k]. Raise a MsgspecError if a line has other fields."""
        return _as_array(list(map(self.getter, self.decoder.decode_lines(lines))))


def _reader_of(kind: str, event: dict[str, Any]) -> _Reader | None:
    """Return a reader for events with the fields of this one, whose inner numbers may be missing.

    Return None if it has numbers inside lists or deeper, or shows others. Events with the same fields share a reader: making one takes as
    long as reading a small log, and there may be thousands of logs.
    """
    if kind in SHOWN:
        return None
    fields = kind, *((name, _shape_of(value)) for name, value in event.items())
    if fields not in _readers:
        if len(_readers) >= MAX_READERS:
            _readers.clear()
        try:
            _readers[fields] = _made_reader(kind, event)
        except (TypeError, ValueError):  # msgspec takes no names with quotes or control characters
            _readers[fields] = None
    return _readers[fields]


MAX_READERS = 1000
_readers: dict[tuple[Any, ...], _Reader | None] = {}  # by the kind and the fields of an event


def _shape_of(value: Any) -> str | tuple[tuple[str, str], ...]:
    """Return what decides how a field is read: whether it is a number, records in a list, or numbers by name."""
    if isinstance(value, dict):
        return tuple((key, "number" if (kind := _type_of(item)) is _NUMBER else str(kind)) for key, item in value.items())
    if isinstance(value, list):
        return "records" if any(isinstance(item, dict) for item in value) else "list"
    return "number" if (kind := _type_of(value)) is _NUMBER else str(kind)


def _made_reader(kind: str, event: dict[str, Any]) -> _Reader | None:
    fields: list[tuple[str, Any]] = []
    names, paths = [], ["step", "time"]
    for number, (name, value) in enumerate(event.items()):
        own = f"f{number}"  # a name of the user may not be one of Python
        if name in ("step", "time", "rank", "env"):
            fields.append((name, {"step": int | None, "time": float, "rank": Literal[0], "env": None}[name]))
        elif isinstance(value, dict):
            if not all(_type_of(item) for item in value.values()):
                return None
            inner = {f"f{place}": key for place, key in enumerate(value)}
            struct = msgspec.defstruct(
                "Inner",
                [(short, _type_of(value[key]) | None, None) for short, key in inner.items()],
                rename=inner,
                forbid_unknown_fields=True,
                gc=False,
            )
            fields.append((own, struct))
            names += [f"{name}/{key}" for key in value]
            paths += [f"{own}.{short}" for short in inner]
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            return None
        elif name not in _STAMP and (number_type := _type_of(value)):
            fields.append((own, number_type))
            names.append(name)
            paths.append(own)
        else:
            fields.append((own, msgspec.Raw))
    renamed = {f"f{number}": name for number, name in enumerate(event)}
    struct = msgspec.defstruct("Line", fields, rename=renamed, forbid_unknown_fields=True, gc=False)
    return _Reader(kind, tuple(names), msgspec.json.Decoder(struct), attrgetter(*paths))


_NUMBER = float | Literal["nan", "inf", "-inf"] | None


def _type_of(value: Any) -> Any:
    """Return the type of a number in an event; None for anything else."""
    if isinstance(value, bool):
        return bool
    is_number = value is None or isinstance(value, int | float) or (isinstance(value, str) and value in _NOT_FINITE)
    return _NUMBER if is_number else None


def _without_texts(event: dict[str, Any]) -> dict[str, Any]:
    """Return a round of a controller without the numbers that are counted by reasons."""
    blueprints = event.get("blueprints", {})
    shown = {name: {key: value for key, value in count.items() if not isinstance(value, dict)} for name, count in blueprints.items()}
    return {**event, "blueprints": shown}


# Kinds of events whose numbers have other names than their fields: the same as `Event.shown` gives to TensorBoard.
SHOWN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "run_declared": lambda event: {},
    "stage_entered": lambda event: {},
    "rolled_back": lambda event: {name: event.get(name) for name in ("epoch", "to_epoch", "steps_lost", "seconds_lost")},
    "best_restored": lambda event: {name: value for name, value in event.items() if name != "back"},
    "measured": lambda event: {event["slot"]: {name: value for name, value in event.items() if name not in _STAMP}},
    "round_fought": lambda event: {**event, **battle_numbers(event["results"])},
    "league_changed": lambda event: {
        "is_promoted": int(event["is_promoted"]),
        **battle_numbers(event["against"]),
        "rating": {player: mean for player, (mean, _) in event.get("ratings", {}).items()},
    },
    "round_ended": _without_texts,
}


def _numbers(event: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield all numbers of an event with their names."""
    for name, value in event.items():
        if name not in _STAMP:
            yield from _inside(name, value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, str):
        if value in _NOT_FINITE:
            yield name, _NOT_FINITE[value]
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _inside(f"{name}/{key}", item)
    elif isinstance(value, list):
        # Records in a list are told apart by their first text: slots/conv1/alpha.
        for record in value:
            own = next((text for text in record.values() if isinstance(text, str)), None) if isinstance(record, dict) else None
            if own is not None:
                numbers = {key: item for key, item in record.items() if not isinstance(item, str) and key not in _STAMP}
                yield from _inside(f"{name}/{own}", numbers)


def _as_steps(column: np.ndarray) -> np.ndarray:
    """Return the steps of events as integers; -1 where an event has none, or one that no run can reach."""
    return np.where(np.abs(column) < MAX_STEP, column, -1).astype(np.int64)  # comparisons with NaN are false


def _as_array(rows: list[tuple[Any, ...]]) -> np.ndarray:
    """Return rows as numbers [n, k]; None and anything that is not a number become NaN."""
    try:
        return np.fromiter(itertools.chain.from_iterable(rows), np.float64, len(rows) * len(rows[0])).reshape(len(rows), -1)
    except (TypeError, ValueError, OverflowError):
        return np.array([[_number(value) for value in row] for row in rows], dtype=np.float64)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def thinned(series: Series, most: int = 2000) -> Series:
    """Return at most `most` points of a series: the smallest and the largest value of equal parts, so that no spike is lost, and the last.

    >>> long = Series(np.arange(10_000), np.arange(10_000.0), np.sin(np.arange(10_000)))
    >>> len(thinned(long, 100).values) <= 100, float(thinned(long, 100).values.max()) == float(long.values.max())
    (True, True)
    """
    chosen = chosen_points(series.values, most)
    return Series(*(column[chosen] for column in series))


def chosen_points(values: np.ndarray, most: int) -> np.ndarray:
    """Return the places of the points that `thinned` keeps."""
    assert most >= 3
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count - 1, (most - 1) // 2 + 1).astype(int)
    chosen: list[int] = []
    for start, end in itertools.pairwise(edges):
        part = values[start:end]
        chosen += sorted({start + int(np.argmin(part)), start + int(np.argmax(part))})
    return np.array([*chosen, count - 1])


def without_stamp(event: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an event without its kind, run, rank, host and time."""
    return {name: value for name, value in event.items() if name not in _STAMP or name == "step"}
