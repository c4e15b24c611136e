"""Events of a run: their base class, the lines of a log that hold them, the numbers that plotting tools show, and how a log is read.

A line is a JSON object with `kind`, `time` (unix seconds), `run`, `rank`, `env`, `step`, and the fields of the event. The unit of `step`
depends on the run: environment steps of a learner, or epochs of a growing host. JSON has no NaN or infinity, so such a float is written as
the string "nan", "inf" or "-inf". It is read back as a float unless the type of the field allows a string (`float | str`).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, dataclass_transform

import msgspec

from esper.files import FileError, open_in_run, printable
from esper.runs.folder import EVENTS
from esper.runs.foreign import clean, clean_line

SCHEMA = 1  # version of the lines; files with a higher one are refused
MAX_LINE_BYTES = 64 * 1024
MAX_TIME = 1e11  # unix seconds; a thousand years from now
MAX_STEP = 2**53  # what a float holds exactly
WHERE = ("env", "step", "epoch", "number")  # fields that say where an event happened, and to which seed; they are not plotted
STAMP = ("kind", "time", "run", "rank")  # keys of a line besides the fields of the event

_kinds: dict[str, type[Event]] = {}  # kind -> event class


class EventError(ValueError):
    """An event that cannot be written, or a log that cannot be read."""


# Subclasses inherit `frozen` in msgspec; type checkers must be told.
@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class EventMeta(msgspec.StructMeta):
    """Registers every event class under its tag when it is defined.

    It is a metaclass because `__init_subclass__` runs before msgspec has finished the struct.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any) -> None:
        super().__init__(name, bases, namespace)
        if bases != (msgspec.Struct,):
            _register(cls)  # type: ignore[arg-type]


class Event(msgspec.Struct, metaclass=EventMeta, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all events. A subclass is a small frozen record; its tag is the `kind` in the log.

    >>> class LampLit(Event, tag="doctest_lamp_lit"):
    ...     step: int
    ...     brightness: float
    >>> LampLit(step=3, brightness=0.5, env=7)
    LampLit(step=3, brightness=0.5, env=7)
    """

    # Index of the environment, or of the host in a fleet; None if the event concerns all.
    env: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)] | None = None

    @property
    def kind(self) -> str:
        return kind_of(type(self))

    def shown(self) -> Mapping[str, Any]:
        """Return the values that plotting tools show, by name: by default all fields except those in WHERE."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in WHERE}


def kind_of(event_type: type[Event]) -> str:
    return str(event_type.__struct_config__.tag)


# Modules with the events of esper. They import no torch. Listed by name, because packages above this one define them.
_MODULES = (
    *("esper.growth.events", "esper.rl.events", "esper.controller.events", "esper.league.events"),
    *("esper.runs.anomalies", "esper.runs.telemetry"),
)


@functools.cache
def _import_all() -> None:
    for name in _MODULES:
        importlib.import_module(name)


def library_declaration(run_kind: str) -> RunDeclared | None:
    """Return the declaration of a kind of run of esper, which its older runs lack; None for other kinds."""
    found = (getattr(importlib.import_module(name), "DECLARED", None) for name in _MODULES)
    return next((declared for declared in found if declared is not None and declared.run_kind == run_kind), None)


def fields_of(line: bytes) -> dict[str, Any] | None:
    """Return a line as a table whose fields have the types of its kind, and their defaults where they are missing.

    Return None if the line does not fit its kind. A kind that is not one of esper has whatever fields the line has.
    """
    _import_all()
    line = clean_line(line)
    try:
        stamp = decode_stamp(line)
        event_type = event_type_of(stamp.kind)
        if event_type is None:
            unknown: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
            return unknown
        record = decode(line, stamp, event_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    # The step is a part of the stamp, unless the event has a field of this name, which was checked with its type.
    if record.step is None and stamp.step is not None and "step" not in event_type.__struct_encode_fields__:
        return None
    where: dict[str, Any] = {"kind": stamp.kind, "time": record.time, "run": record.run, "rank": record.rank, "step": record.step}
    return {**where, **msgspec.to_builtins(record.event)}


def event_type_of(kind: str) -> type[Event] | None:
    """Return the class registered for `kind`; None if the package that defines it is not imported or no longer exists."""
    return _kinds.get(kind)


def _register(event_type: type[Event]) -> None:
    kind = kind_of(event_type)
    reserved = sorted(set(STAMP) & set(event_type.__struct_encode_fields__))
    if reserved:
        raise EventError(f"{event_type.__qualname__} has fields named {reserved}, which every line of a log has already; rename them")
    known = _kinds.get(kind)
    # The same class may be defined again when its module is reloaded.
    if known is not None and (known.__module__, known.__qualname__) != (event_type.__module__, event_type.__qualname__):
        raise EventError(
            f"{event_type.__module__}.{event_type.__qualname__} and {known.__module__}.{known.__qualname__} "
            f"both have the tag {kind!r}; give one of them another tag"
        )
    _kinds[kind] = event_type


class EventRecord(msgspec.Struct, frozen=True):
    """An event with the time, run, rank and step at which it happened."""

    time: float  # unix seconds, wall clock
    run: str
    rank: int
    event: Event
    step: int | None = None  # step of the run; None in an event that was made without one

    @property
    def kind(self) -> str:
        return self.event.kind

    @property
    def env(self) -> int | None:
        return self.event.env


class Header(Event, tag="header"):
    """The first line of every log. Its time is the start of the run."""

    schema: int
    esper: str  # version of esper

    def shown(self) -> Mapping[str, Any]:
        return {}


class Resumed(Event, tag="resumed"):
    """The run was resumed from a checkpoint, and the lines after `offset` were cut."""

    offset: int
    esper: str  # version of esper

    def shown(self) -> Mapping[str, Any]:
        return {}


class Figure(msgspec.Struct, frozen=True):
    """A number that a run has. Series are named kind/field, as in tables and TensorBoard."""

    name: str  # for people
    series: str = ""  # of the number during the training; "": it is only known at the end
    final: str = ""  # series of the number that is written once, when the run ends
    unit: str = ""  # "share": a number between 0 and 1, shown in per cent
    better: Literal["up", "down", ""] = ""  # direction in which the number is better; "": neither


class RunDeclared(Event, tag="run_declared"):
    """The kind of the run and its figures, the main one first. Every session of a run begins with this event.

    Lists, pages, tables and comparisons show a run by this event alone, so a run of any kind can be shown. A run is judged by the first
    figure that has values, and has come as far as the latest step of its figures.
    """

    run_kind: str
    figures: list[Figure]
    total: int | None = None  # step at which the training ends; None: not known
    unit: str = "steps"  # what the steps of the run count
    end: str = "run_ended"  # kind of the event that ends a session, whose `status` or `why` is "stopped" if it is to be continued

    def shown(self) -> Mapping[str, Any]:
        return {}


class RunEnded(Event, tag="run_ended"):
    """The process has ended the training, or stopped it for now. A run that was killed has no such event."""

    step: int
    status: str  # "finished" or "stopped"
    seconds: float  # of the training, over all sessions


class CheckpointRefused(Event, tag="checkpoint_refused"):
    """A checkpoint could not be loaded, so the run was resumed from an older one."""

    checkpoint: str
    reason: str


class SinkFailed(Event, tag="sink_failed"):
    """A sink raised an error and was switched off."""

    sink: str
    error: str


class SinkDropped(Event, tag="sink_dropped"):
    """Number of records that a sink dropped in this session because it was too slow."""

    sink: str
    dropped: int


def encode(record: EventRecord) -> bytes:
    """Return the line for a record, newline included. Raise EventError if `decode` could not read it back."""
    event = record.event
    try:
        fields = _for_json(msgspec.to_builtins(event))
        msgspec.convert(fields, type(event), strict=False)
    except (TypeError, msgspec.ValidationError) as error:
        raise EventError(f"{event!r} cannot be written: {error}; give each field the plain Python value its type says") from error
    where = {"run": record.run, "rank": record.rank, "env": event.env, "step": record.step}
    line = {"kind": event.kind, "time": record.time} | where | fields
    encoded = msgspec.json.encode(line) + b"\n"
    if len(encoded) > MAX_LINE_BYTES:
        raise EventError(
            f"an event of kind {event.kind!r} takes {len(encoded)} bytes, a line at most {MAX_LINE_BYTES}; save large data in a separate "
            "file"
        )
    return encoded


def _for_json(value: Any) -> Any:
    """Return the value with floats that are not finite as strings, and strings that are valid UTF-8."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if value.isascii() else printable(value)
    if isinstance(value, dict):
        return {key: _for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(item) for item in value]
    return value


class Stamp(msgspec.Struct):
    """The part of a line that does not depend on its kind."""

    kind: str
    time: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME)]
    run: str
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]
    step: Any = None  # a user's event may have a field of this name that is not a number


_stamp_decoder = msgspec.json.Decoder(Stamp)
_event_decoders: dict[type[Event], msgspec.json.Decoder[Event]] = {}


def decode_stamp(line: bytes) -> Stamp:
    """Return the stamp of a line. Raise `msgspec.DecodeError` if it is not JSON, `msgspec.ValidationError` if it has no stamp."""
    return _stamp_decoder.decode(line)


def decode(line: bytes, stamp: Stamp, event_type: type[Event]) -> EventRecord:
    """Return the record of a line. Unknown fields are ignored, missing ones get their defaults."""
    decoder = _event_decoders.get(event_type)
    if decoder is None:
        decoder = _event_decoders[event_type] = msgspec.json.Decoder(event_type, strict=False)
    step = stamp.step if isinstance(stamp.step, int) else None
    if step is not None and abs(step) >= MAX_STEP:
        raise msgspec.ValidationError(f"no run reaches step {step}")
    return EventRecord(time=stamp.time, run=stamp.run, rank=stamp.rank, event=decoder.decode(line), step=step)


def check_header(line: bytes, source: object) -> EventRecord:
    """Return the header of a log, given its first line. Raise EventError if this version cannot read the log `source`."""
    try:
        stamp = decode_stamp(line)
        found = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventError(f"{source} does not begin with the header of an event log: {error}") from error
    schema = found.get("schema")
    if stamp.kind != kind_of(Header) or not isinstance(schema, int):
        raise EventError(f"{source} begins with a line of kind {stamp.kind!r} and not with the header of an event log")
    if schema > SCHEMA:
        raise EventError(f"{source} was written by a newer esper: its schema is {schema}, this one reads up to {SCHEMA}; upgrade esper")
    try:
        return decode(line, stamp, Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EventError(f"the header of {source} cannot be read: {error}") from error


def name_of_run(folder: Path) -> str | None:
    """Return the name by which checkpoints, models and leagues tell the run in a folder from all others; None if it has no log.

    It is the name that the folder had at first and the time of the header, so it stays when the folder is copied, moved or resumed.
    """
    try:
        with open_in_run(folder / EVENTS) as file:
            header = check_header(file.readline(MAX_LINE_BYTES), file.name)
    except (OSError, FileError, EventError):
        return None
    return f"{clean(header.run)} begun {datetime.fromtimestamp(header.time, UTC):%Y-%m-%d %H:%M:%S.%f}"


def why_foreign(written_by: str | None, folder: Path) -> str | None:
    """Return why a file in the folder of a run, which names the run that wrote it, is not one of its own; None if it is."""
    own = name_of_run(folder)
    if own is None or written_by == own:
        return None
    return f"belongs to another run, {clean(written_by) if written_by else 'which it does not name'}, and not to {own}"


def scalars(event: Event) -> dict[str, float]:
    """Return every finite number of `event.shown()`, named `kind/field`, or `kind/field/key` if the field is a dictionary.

    >>> class Measured(Event, tag="doctest_measured"):
    ...     step: int
    ...     loss: float
    ...     entropy: dict[str, float]
    >>> scalars(Measured(step=3, loss=0.5, entropy={"op": 0.25, "slot": math.nan}))
    {'doctest_measured/loss': 0.5, 'doctest_measured/entropy/op': 0.25}
    """
    return dict(_numbers(event.kind, event.shown()))


def scalars_of(record: EventRecord) -> dict[str, float]:
    """Return the scalars of a record. Names start with `rank1/` for ranks other than 0, and with `env3/` for one environment or host."""
    place = f"rank{record.rank}/" if record.rank else ""
    place += "" if record.env is None else f"env{record.env}/"
    return {place + name: value for name, value in scalars(record.event).items()}


def battle_numbers(results: Mapping[str, Sequence[int]]) -> dict[str, dict[str, float]]:
    """Return battles and win rates by opponent, from won, drawn and lost; a draw is half a win. Leave out opponents without battles.

    >>> battle_numbers({"strong": (2, 1, 1), "weak": (0, 0, 0)})
    {'battles': {'strong': 4}, 'win_rate': {'strong': 0.625}}
    """
    counts = {name: sum(result) for name, result in results.items() if sum(result)}
    rates = {name: (results[name][0] + results[name][1] / 2) / count for name, count in counts.items()}
    return {"battles": dict(counts), "win_rate": rates}


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield name, value


def read(path: Path | str, *, start: int = 0, on_skip: Callable[[str], None] | None = None) -> Iterator[EventRecord]:
    """Yield the records of a log in order, header first. An unfinished last line is ignored, because the run may still be writing.

    `start` is an offset at which a line begins; records between the header and it are left out. Events of a kind that no imported package
    defines are skipped, and so are lines that do not fit their kind; `on_skip` is called with the kind of each.
    """
    with _opened(path) as file:
        header = file.readline(MAX_LINE_BYTES)
        if not header.endswith(b"\n"):
            raise EventError(f"{path} has no header: it is not an event log, or its first line is unfinished")
        yield check_header(header, path)
        file.seek(max(start, len(header)))
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=2):
            if not line.endswith(b"\n"):
                if len(line) < MAX_LINE_BYTES:
                    return
                raise EventError(f"line {number} of {path} is broken: it has more than {MAX_LINE_BYTES:,} bytes; no line after it was read")
            kind, record = "", None
            shown = clean_line(line)
            try:
                kind = (stamp := decode_stamp(shown)).kind
                event_type = event_type_of(kind)
                record = None if event_type is None else decode(shown, stamp, event_type)
            except msgspec.ValidationError:
                pass  # it was changed, or written by another version
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                # A power cut may leave garbage as the last line, even with a newline at its end.
                if not file.read(1):
                    return
                raise EventError(f"line {number} of {path} is broken: {error}; no line after it was read") from error
            if record is not None:
                yield record
            elif on_skip is not None:
                on_skip(kind)


def _opened(path: Path | str) -> BinaryIO:
    try:
        return open_in_run(Path(path))
    except FileError as error:
        raise EventError(str(error)) from error


class Reader:
    """An event log to iterate over. `skipped` counts, by kind, the events that the latest iteration skipped."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[EventRecord]:
        self.skipped.clear()
        return read(self.path, on_skip=lambda kind: self.skipped.update([kind]))
