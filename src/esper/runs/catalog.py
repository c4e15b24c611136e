"""Runs in a folder: what they are, how far they are, and whether they live. Imports no torch, and changes no run but its labels.

    for run in find_runs("runs"):
        print(run.name, run.summary().state)

A run is alive as long as its process writes: the log of events is touched every few seconds, even if nothing happens. A run whose log has
not been touched for `DEAD_AFTER_S`, and which did not say that it ended, is dead: its process was killed, or hangs.

Tags and a note of the user are in `labels.json` in the run's folder. A run that ends leaves its line of a list in `summary.json`, so that a
list need not read its events.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

import esper
from esper.files import (
    MAX_CONFIG_BYTES,
    MAX_JSON_BYTES,
    UNREADABLE,
    open_in_run,
    parse_json,
    parse_toml,
    read_file,
    read_in_run,
    user_cache,
    with_digest,
    without_digest,
    write_file,
    write_in_run,
)
from esper.jit import no_garbage_collection
from esper.runs.events import EventError, Figure, RunDeclared, kind_of as event_kind, library_declaration
from esper.runs.folder import CONFIG, EVENTS, GROW, TWIN, UNKNOWN, RunError, State, has_twin, kind_of, locked
from esper.runs.foreign import clean, clean_values
from esper.runs.index import EventIndex, Series, thinned

LABELS = "labels.json"
SUMMARY = "summary.json"
DEAD_AFTER_S = 30.0
ENDED: tuple[State, ...] = ("finished", "stopped")
SPARK = 40  # points of the small curve in a table
MOST_FIGURES = 20  # of a run that declares none
# Series that say nothing about the training of a run, and those of single ranks and environments.
_NOT_OWN = re.compile(r"(header|resumed|run_ended|sink_dropped|anomaly|rank\d+|env\d+)/")


class Labels(msgspec.Struct, forbid_unknown_fields=True):
    """What the user says about a run."""

    tags: list[str] = []
    note: str = ""


class Summary(msgspec.Struct, frozen=True):
    """A run on one line of a table."""

    name: str
    folder: str
    kind: str
    state: State
    progress: float | None  # share of the training that is done; None if unknown
    step: int
    started: float | None  # unix seconds
    touched: float  # unix seconds; when its process last gave a sign of life
    figure: str  # name of the number that it is judged by
    last: float | None
    best: float | None  # None also if the number is neither better high nor low
    spark: list[float]
    tags: list[str]
    note: str


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A summary, and the sizes and times of the files that it was made from: as long as they are the same, so is the summary."""

    stamp: tuple[int, ...]
    summary: Summary


class Run:
    """One run folder, read as far as its process has written."""

    def __init__(self, folder: Path, kind: str, *, cache: Path | None = None) -> None:
        self.folder, self.kind = folder, kind
        self.index = EventIndex(folder / EVENTS, cache=cache)
        self.twin: Run | None = None  # of a growth run, once it has one
        self.problem = ""  # why its log cannot be read; empty if it can, or if there is none yet
        self.kept: Kept | None = None
        self._cache = cache
        self._has_twin_to_come: bool | None = None  # by its settings; None: not read yet
        self._declared: tuple[tuple[int, int], RunDeclared] | None = None  # how far the log was read, and the declaration

    @property
    def name(self) -> str:
        return clean(self.folder.name)

    def refresh(self, on_progress: Callable[[float], None] = lambda share: None) -> int:
        """Read new events of the run and of its twin; see `EventIndex.refresh`. A run that has not written any has none."""
        if self.kind == "growth":
            if self.twin is None and has_twin(self.folder):
                self.twin = Run(self.folder / TWIN, "growth", cache=self._cache)
            if self.twin is not None:
                self.twin.refresh()
        try:
            count, self.problem = self.index.refresh(on_progress), ""
        except EventError as error:
            count, self.problem = 0, str(error) if os.path.lexists(self.folder / EVENTS) else ""
        if count:
            self.kind = self.declared().run_kind or UNKNOWN  # it may not have been declared before
        return count

    def config(self) -> dict[str, Any]:
        """Return the settings, by section."""
        path = self.folder / (GROW if (self.folder / GROW).is_file() else CONFIG)
        found: dict[str, Any] = clean_values(parse_toml(read_in_run(path, max_bytes=MAX_CONFIG_BYTES)))
        return found

    def labels(self) -> Labels:
        """Return tags and note; empty ones if there are none. Raise RunError if the file is damaged."""
        path = self.folder / LABELS
        try:
            return msgspec.convert(without_digest(parse_json(read_in_run(path, max_bytes=MAX_CONFIG_BYTES))), Labels)
        except FileNotFoundError:
            return Labels()
        except (OSError, *UNREADABLE) as error:
            raise RunError(f"the tags and the note of the run cannot be read ({path}: {error}); mend the file, or remove it") from error

    def shown_labels(self) -> Labels:
        """Return tags and note for a page or a table; empty ones if the file is damaged, so that one run does not hide the others."""
        try:
            labels = self.labels()
            return Labels([clean(tag) for tag in labels.tags], clean(labels.note))
        except RunError:
            return Labels()

    def own_series(self) -> list[str]:
        """Return the names of all series of the run as a whole that its own events tell."""
        return [name for name in self.index.names() if not _NOT_OWN.match(name)]

    def declared(self) -> RunDeclared:
        """Return the declaration of the run. A log without one has that of its library, or else every series as a figure."""
        mark = self.index.generation, self.index.offset
        if self._declared is None or self._declared[0] != mark:
            found = self.index.events(event_kind(RunDeclared), start=-1)
            self._declared = mark, msgspec.convert(found[0], RunDeclared) if found else self._undeclared()
        return self._declared[1]

    def _undeclared(self) -> RunDeclared:
        known = library_declaration(self.kind)
        if known is None:
            return RunDeclared(run_kind=self.kind, figures=[Figure(name, name) for name in self.own_series()[:MOST_FIGURES]])
        began = self.index.events("growth_started" if self.kind == "growth" else "run_started", start=-1)
        return msgspec.structs.replace(known, total=began[0].get("epochs", began[0].get("total_steps")) if began else None)

    def figure(self) -> tuple[Figure, Series]:
        """Return the number that the run is judged by, and its series."""
        choices = [figure for figure in self.declared().figures if figure.series] or [Figure("")]
        chosen = next((figure for figure in choices if len(self.index.series(figure.series).values)), choices[0])
        return chosen, self.index.series(chosen.series)

    def step(self) -> int:
        """Return how far the training is: the latest step of its figures."""
        kinds = {figure.series.partition("/")[0] for figure in self.declared().figures if figure.series}
        return max(map(self.index.last_step, kinds), default=0)

    def progress(self) -> float | None:
        """Return the share of the training that is done; None if its length is unknown."""
        whole = self.declared().total
        if not whole:
            return None
        share: float = min(self.step() / whole, 1.0)
        if self.twin is None and not self._waits_for_twin():
            return share
        return (share + (0.0 if self.twin is None else self.twin.progress() or 0.0)) / 2

    def state(self, now: float | None = None) -> State:
        """Return whether the run lives, has ended, or was killed. A growth run lives until its twin has ended too."""
        if not len(self.index):
            return "empty"
        resumed, ended = self.index.events("resumed", start=-1), self.index.events(self.declared().end, start=-1)
        # An end counts unless the run was resumed after it.
        if ended and (not resumed or ended[0]["time"] >= resumed[0]["time"]):
            if ended[0].get("why", ended[0].get("status")) == "stopped":
                return "stopped"
            if self.twin is not None and len(self.twin.index):
                return self.twin.state(now)
            if not self._waits_for_twin():
                return "finished"
        return "running" if (time.time() if now is None else now) - self.touched() < DEAD_AFTER_S else "dead"

    def _waits_for_twin(self) -> bool:
        """Return whether a finished growth run is to have a twin, by its settings, and has none yet."""
        if self._has_twin_to_come is None:
            try:
                self._has_twin_to_come = (self.folder / GROW).is_file() and bool(self.config().get("twin"))
            except (OSError, ValueError):
                self._has_twin_to_come = False
        return self.twin is None and self._has_twin_to_come

    def started(self) -> float | None:
        """Return when its first session began, in unix seconds; None if it has not written any event."""
        header = self.index.events("header")[:1]
        return float(header[0]["time"]) if header else None

    def touched(self) -> float:
        """Return when its process, or that of its twin, last gave a sign of life, in unix seconds."""
        try:
            own = os.stat(self.folder / EVENTS).st_mtime_ns / 1e9
        except OSError:
            return 0.0
        return own if self.twin is None else max(own, self.twin.touched())

    def brief(self, now: float | None = None) -> Summary:
        """Return the summary, the kept one if no file has changed since it was made.

        Otherwise the events are read. Unless the run is under way, they are forgotten again: there may be thousands of runs.
        """
        stamp, now = stamp_of(self.folder), time.time() if now is None else now
        if self.kept is None or self.kept.stamp != stamp:
            self.kept = left_summary(self.folder)
        if self.kept is None:
            is_open = self.index.offset > 0
            self.refresh()
            self.kept = Kept(stamp, self.summary(now))
            if not is_open and self.kept.summary.state != "running":
                self.index.wait()  # a page that is opened next takes the kept index of a large log
                self.index, self.twin, self._has_twin_to_come = EventIndex(self.folder / EVENTS, cache=self._cache), None, None
        summary = self.kept.summary
        if summary.state not in ("running", "dead"):
            return summary
        state: State = "running" if now - summary.touched < DEAD_AFTER_S else "dead"
        return summary if state == summary.state else msgspec.structs.replace(summary, state=state)

    def leave_summary(self) -> None:
        """Write the summary of a run that has ended into its folder, for `left_summary`."""
        summary = msgspec.structs.replace(self.summary(), name="", folder="", tags=[], note="")
        values = msgspec.to_builtins(summary)
        has_json = msgspec.json.decode(msgspec.json.encode(values)) == values  # which knows no infinity
        if summary.state in ENDED and has_json:
            content = msgspec.json.encode(with_digest({"sizes": stamp_of(self.folder)[:-2:2], "summary": values}))
            write_in_run(self.folder / SUMMARY, msgspec.json.format(content) + b"\n")

    def summary(self, now: float | None = None) -> Summary:
        """Return the run as one line of a table."""
        figure, series = self.figure()
        labels = self.shown_labels()
        values = series.values
        best = float(values.min() if figure.better == "down" else values.max()) if len(values) and figure.better else None
        return Summary(
            name=self.name,
            folder=str(self.folder),
            kind=self.kind,
            state=self.state(now),
            progress=self.progress(),
            step=self.step(),
            started=self.started(),
            touched=self.touched(),
            figure=figure.name,
            last=float(values[-1]) if len(values) else None,
            best=best,
            spark=[float(value) for value in thinned(series, SPARK).values],
            tags=labels.tags,
            note=labels.note,
        )


def stamp_of(folder: Path) -> tuple[int, ...]:
    """Return sizes and times of the files that the summary of a run is made from; those of its labels are the last two."""
    found: list[int] = []
    for name in (CONFIG, GROW, EVENTS, f"{TWIN}/{EVENTS}", LABELS):
        try:
            status = os.lstat(f"{folder}/{name}")
            found += (status.st_size, status.st_mtime_ns)
        except OSError:
            found += (-1, -1)
    return tuple(found)


def left_summary(folder: Path) -> Kept | None:
    """Return the summary that a run left in its folder when it ended; None if there is none, or its files were written since.

    A copy of a run may have other times than the run itself, but has the sizes of its files, and is not written either.
    """
    stamp = stamp_of(folder)
    sizes, times = stamp[:-2:2], stamp[1:-2:2]
    try:
        with open_in_run(folder / SUMMARY) as file:
            written = os.fstat(file.fileno()).st_mtime_ns
            found = without_digest(msgspec.json.decode(file.read(MAX_CONFIG_BYTES)))
        summary = msgspec.convert(clean_values(found["summary"]), Summary)
        is_valid = found["sizes"] == list(sizes) and max(times) <= written and summary.state in ENDED and 0 <= (summary.progress or 0) <= 1
    except (OSError, msgspec.MsgspecError, *UNREADABLE):
        return None
    if not is_valid:
        return None
    run = Run(folder, summary.kind)
    labels, touched = run.shown_labels(), max(times[-2:]) / 1e9  # of the logs
    return Kept(
        stamp,
        msgspec.structs.replace(summary, name=run.name, folder=str(folder), touched=touched, tags=labels.tags, note=labels.note),
    )


def find_runs(root: Path | str, *, cache: Path | None = None, known: Mapping[Path, Run] = MappingProxyType({})) -> list[Run]:
    """Return the run in a folder, or the runs in it and in the folders inside, at most three levels down. Twins belong to their runs.

    Runs that are `known`, by folder, are returned as they are, without reading their settings again.
    """
    found, kept = [], kept_summaries(Path(root), cache) if cache is not None else {}
    for folder in _folders(Path(root), levels=3):
        run, before = known.get(folder), kept.get(os.fsdecode(folder))
        if run is None and before is not None:
            run = Run(folder, before.summary.kind, cache=cache)
            # The settings may have been replaced by those of another run.
            run.kept = before if stamp_of(folder)[:2] == before.stamp[:2] else None
        if run is None and (left := left_summary(folder)) is not None:
            run = Run(folder, left.summary.kind, cache=cache)
            run.kept = left
        if (run is None or run.kept is None) and (kind := kind_of(folder)) is not None:
            run = Run(folder, kind, cache=cache)
        if run is not None:
            found.append(run)
    return found


# Summaries kept between processes

_LIST_FORMAT = f"esper runs 1 {esper.__version__}".encode()


def kept_summaries(root: Path, cache: Path) -> dict[str, Kept]:
    """Return the summaries that `keep_summaries` has kept of the runs under a folder, by folder; none if the file is damaged."""
    try:
        head, _, body = read_file(_list_file(root, cache), max_bytes=MAX_JSON_BYTES).partition(b"\n")
        if head != _LIST_FORMAT + hashlib.blake2b(body).hexdigest().encode():
            return {}
        return msgspec.msgpack.decode(body, type=dict[str, Kept])
    except (OSError, ValueError, msgspec.MsgspecError):
        return {}


def keep_summaries(root: Path, cache: Path, runs: Iterable[Run]) -> None:
    """Keep the summaries of the runs under a folder in the user's cache. A folder that cannot be written is no error."""
    kept = {str(run.folder): run.kept for run in runs if run.kept is not None}
    with contextlib.suppress(OSError, UnicodeEncodeError):
        body = msgspec.msgpack.encode(kept)
        write_file(_list_file(root, cache), _LIST_FORMAT + hashlib.blake2b(body).hexdigest().encode() + b"\n", body)


def _list_file(root: Path, cache: Path) -> Path:
    return cache / f"list-{hashlib.blake2b(os.fsencode(root.absolute()), digest_size=16).hexdigest()}"


def list_runs(*roots: Path | str, cache: Path) -> list[Summary]:
    """Return the summaries of all runs in some folders. Only runs that have changed since the last time are read."""
    now = time.time()
    found: list[Summary] = []
    for root in map(Path, roots):
        runs = find_runs(root, cache=cache)
        before = [run.kept for run in runs]
        with no_garbage_collection():
            found += [run.brief(now) for run in runs]
        if any(run.kept is not kept for run, kept in zip(runs, before, strict=True)):
            keep_summaries(root, cache, runs)
    return found


def _folders(folder: Path, *, levels: int) -> Iterator[Path]:
    """Yield the folders of runs, without those inside runs. Links are not followed."""
    if (folder / CONFIG).is_file():
        yield folder
        return
    if levels:
        try:
            inside = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for path in inside:
            yield from _folders(Path(path), levels=levels - 1)


def open_run(folder: Path | str, *, cache: Path | None = None) -> Run:
    """Return the run in a folder, with its events read. Raise RunError if there is none."""
    folder = Path(folder)
    kind = kind_of(folder)
    if kind is None:
        raise RunError(f"there is no run in {folder}; list the runs with: esper runs ls {folder}")
    run = Run(folder, kind, cache=user_cache() if cache is None else cache)
    run.refresh()
    return run


def label(folder: Path, *, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None) -> Labels:
    """Change the tags and the note of a run, and return them."""
    run = open_run(folder)
    before, dropped = run.labels(), set(remove)
    tags = [tag for tag in dict.fromkeys([*before.tags, *add]) if tag not in dropped]
    if wrong := next((tag for tag in tags if not tag.strip() or "," in tag or any(mark in tag for mark in "\n\r\t")), None):
        raise RunError(f"{wrong!r} cannot be a tag; use a word without commas")
    after = Labels(tags, before.note if note is None else note)
    write_in_run(folder / LABELS, msgspec.json.format(msgspec.json.encode(with_digest(msgspec.to_builtins(after)))) + b"\n")
    return after


def remove_run(folder: Path) -> None:
    """Delete a run folder with everything in it. Raise RunError if it holds no run, or if a process trains in it."""
    open_run(folder)
    with locked(folder), locked(folder / TWIN) if has_twin(folder) else contextlib.nullcontext():
        shutil.rmtree(folder)


def settings_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by their full names.

    >>> settings_of({"env": "cue", "ppo": {"gamma": 0.9}})
    {'env': 'cue', 'ppo.gamma': 0.9}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= settings_of(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def differing_settings(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings that are not the same in all configs: setting -> run -> value, None where a run lacks it.

    >>> differing_settings({"a": {"seed": 1, "steps": 9}, "b": {"seed": 2, "steps": 9}})
    {'seed': {'a': 1, 'b': 2}}
    """
    flat = {name: settings_of(config) for name, config in runs.items()}
    names = dict.fromkeys(name for settings in flat.values() for name in settings)
    rows = {name: {run: settings.get(name) for run, settings in flat.items()} for name in names}
    return {name: row for name, row in rows.items() if any(value != next(iter(row.values())) for value in row.values())}


def at_steps(series: Series, steps: np.ndarray) -> np.ndarray:
    """Return the latest value of a series at each of these steps; NaN before its first."""
    places = np.searchsorted(series.steps, steps, side="right") - 1
    return np.where(places >= 0, series.values[np.maximum(places, 0)], np.nan)
