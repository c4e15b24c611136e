"""The data of the dashboard: what its pages show, computed from run folders alone. Imports no torch, and changes no run.

A page asks again every half second. Series are sent once, thinned to `POINTS` points; afterwards only the points that are new.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from esper.files import printable, user_cache
from esper.runs.anomalies import Anomaly
from esper.runs.catalog import Run, differing_settings, find_runs
from esper.runs.compare import compare_opened
from esper.runs.folder import TWIN, kind_of
from esper.runs.health import lights
from esper.runs.index import thinned

POINTS = 2000  # of one series, at most
SEARCH_EVERY_S = 2.0  # for new run folders
GROWS = {"GERMINATED": "grows", "FOSSILIZED": "kept", "PRUNED": "pruned"}  # stages that are marked in charts -> their word


class Watcher:
    """All runs under a folder, or the one in it, kept up to date. Safe to use from several threads."""

    def __init__(self, root: Path | str, *, cache: Path | None = None) -> None:
        self.root = Path(root)
        self._cache = user_cache() if cache is None else cache
        self._runs: dict[str, Run] = {}  # by their names in addresses
        self._twins: dict[Path, Run] = {}  # by folder
        self._stories: dict[Path, tuple[list[tuple[int, int]], dict[str, Any]]] = {}  # by folder: how far the logs were read, and the story
        self._lock = threading.RLock()
        self._searched = -math.inf
        self.loading = 1.0  # share of the logs that has been read

    def refresh(self) -> None:
        """Look for new runs, and read new events of all of them."""
        with self._lock:
            if time.monotonic() - self._searched >= SEARCH_EVERY_S:
                self._search()
            for number, run in enumerate(self._runs.values()):
                run.refresh(partial(self._note_progress, number))
            self.loading = 1.0

    def _note_progress(self, number: int, share: float) -> None:
        self.loading = (number + share) / len(self._runs)

    def _search(self) -> None:
        found = {name_in_address(run.folder): run for run in find_runs(self.root, cache=self._cache)}
        self._runs = {name: self._runs.get(name, run) for name, run in found.items()}
        self._searched = time.monotonic()

    def run(self, name: str) -> Run | None:
        """Return the run of this name in addresses, with its newest events; None if there is none (any more)."""
        with self._lock:
            if name not in self._runs and time.monotonic() - self._searched >= SEARCH_EVERY_S:
                self._search()
            run = self._runs.get(name)
            if run is not None:
                run.refresh()
            return run

    # Pages

    def overview(self) -> dict[str, Any]:
        """Return all runs, live ones first, then the newest."""
        with self._lock:
            self.refresh()
            rows = [{"id": name, **msgspec.to_builtins(run.summary())} for name, run in self._runs.items()]
        rows.sort(key=lambda row: (row["state"] != "running", -row["touched"]))
        return {"root": printable(str(self.root)), "runs": [_clean(row) for row in rows], "now": time.time()}

    def page(self, name: str) -> dict[str, Any] | None:
        """Return everything about one run except its series."""
        with self._lock:
            run = self.run(name)
            if run is None:
                return None
            page: dict[str, Any] = {
                "id": name,
                "summary": msgspec.to_builtins(run.summary()),
                "config": _config(run),
                "kinds": run.index.kinds,
                "series": run.index.names(),
                "generation": run.index.generation,
                "skipped": run.index.skipped,
                "problems": problems(run),
                "now": time.time(),
            }
            if run.kind == "growth":
                twin = self._twin(run)
                page["growth"] = self._story(run, twin)
                page["twin"] = None if twin is None else TWIN
            else:
                page["health"] = [light._asdict() for light in lights(run.index)]
            if run.kind == "controller":
                page["blueprints"] = blueprint_counts(run)
            if run.kind == "arena":
                page["replays"] = [printable(path.stem) for path in replays_of(run)][:50]
                page["league"] = [_without_stamp(event) for event in run.index.events("league_changed")][-50:]
        cleaned: dict[str, Any] = _clean(page)
        return cleaned

    def series(
        self, name: str, wanted: Iterable[str], seen: dict[str, int], generation: int | None, *, twin: bool = False
    ) -> dict[str, Any]:
        """Return the points of some series: those after the first `seen` ones, or at most `POINTS` of all if the log was cut since.

        The answer for a series is {"start": number of points before these, "total": ..., "steps": [...], "times": [...], "values": [...]}.
        """
        with self._lock:
            run = self.run(name)
            if run is not None and twin:
                run = self._twin(run)
            if run is None:
                return {"generation": 0, "series": {}}
            is_known = generation == run.index.generation
            answer = {}
            for label in wanted:
                series = run.index.series(label)
                start = min(seen.get(label, 0), len(series.values)) if is_known else 0
                part = thinned(type(series)(*(column[start:] for column in series)), POINTS)
                answer[label] = {
                    "start": start,
                    "total": len(series.values),
                    "steps": part.steps.tolist(),
                    "times": part.times.tolist(),
                    "values": [None if not math.isfinite(value) else value for value in part.values.tolist()],
                }
        return {"generation": run.index.generation, "series": answer}

    def _twin(self, run: Run) -> Run | None:
        """Return the twin of a growth run, kept beside it."""
        folder = run.folder / TWIN
        twin = self._twins.get(folder)
        if twin is None and kind_of(folder) == "growth":
            twin = self._twins[folder] = Run(folder, "growth", cache=self._cache)
        if twin is not None:
            twin.refresh()
        return twin

    def _story(self, run: Run, twin: Run | None) -> dict[str, Any]:
        """Return the story of a growth run; the one of before if neither log has grown since."""
        mark = [(each.index.generation, each.index.offset) for each in (run, twin) if each is not None]
        before = self._stories.get(run.folder)
        if before is None or before[0] != mark:
            before = self._stories[run.folder] = mark, growth_story(run, twin)
        return before[1]

    def compare(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the settings in which runs differ, the series that they share, and the differences over seeds where there are several."""
        with self._lock:
            runs = {name: run for name in names if (run := self.run(name)) is not None}
            shared = [set(run.index.names()) for run in runs.values()]
            order = next(iter(runs.values())).index.names() if runs else []
            kinds = {run.kind for run in runs.values()}
            over_seeds = compare_opened(list(runs.values()), cache=self._cache).as_dict() if len(kinds) == 1 else None
            found: dict[str, Any] = _clean(
                {
                    "over_seeds": over_seeds,
                    "runs": [{"id": name, **msgspec.to_builtins(run.summary())} for name, run in runs.items()],
                    "settings": differing_settings({name: _config(run) for name, run in runs.items()}),
                    "series": [label for label in order if all(label in names for names in shared)],
                }
            )
            return found


def name_in_address(folder: Path) -> str:
    """Return the name of a run in addresses: a digest of its path, so that no address can name another folder."""
    return hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=6).hexdigest()


def replays_of(run: Run) -> list[Path]:
    """Return the replays of a run, newest first. Links are left out, since they may lead out of the folder."""
    found = [path for path in (run.folder / "replays").glob("*.safetensors") if not path.is_symlink() and path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _config(run: Run) -> dict[str, Any]:
    try:
        return run.config()
    except (OSError, ValueError):
        return {}


def problems(run: Run) -> list[dict[str, Any]]:
    """Return what went wrong in a run, newest first."""
    found = []
    for kind in (
        "warned",
        "anomaly",
        "skipped",
        "rewards_not_finite",
        "rolled_back",
        "sink_failed",
        "checkpoint_refused",
        "compile_failed",
    ):
        for event in run.index.events(kind)[-20:]:
            words = {"words": msgspec.convert(event, Anomaly, strict=False).in_words()} if kind == "anomaly" else {}
            found.append({"kind": kind, **_without_stamp(event), **words, "time": event["time"]})
    return sorted(found, key=lambda problem: -problem["time"])[:40]


def _without_stamp(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("kind", "run", "rank", "env", "time")}


# Growth


def growth_story(run: Run, twin: Run | None = None) -> dict[str, Any]:
    """Return the life of every seed, the slots as they are now, the marks for charts, and what the controller and the governor did."""
    index = run.index
    started = (index.events("growth_started") or [{}])[-1]
    epochs = index.events("epoch_ended")
    seeds = _seeds(run, epochs)
    last = {view["slot"]: view for view in epochs[-1]["slots"]} if epochs else {}
    slots = [{"slot": slot, **last.get(slot, {"stage": "DORMANT", "blueprint": None, "alpha": 0.0})} for slot in started.get("slots", [])]
    marks = [
        {"epoch": event["epoch"], "what": GROWS[event["stage"]], "slot": event["slot"], "blueprint": event["blueprint"]}
        for event in index.events("stage_entered")
        if event["stage"] in GROWS
    ]
    rollbacks = [_without_stamp(event) for event in index.events("rolled_back")]
    marks += [{"epoch": event["epoch"], "what": "rolled back", "slot": "", "blueprint": ""} for event in rollbacks]
    probes = index.events("probed")
    return {
        "started": {
            name: started.get(name) for name in ("controller", "raise_mode", "epochs", "parameters", "flops", "device", "optimizer", "note")
        },
        "slots": slots,
        "seeds": seeds,
        "marks": marks,
        "rollbacks": rollbacks,
        "refused": [_without_stamp(event) for event in index.events("action_refused")][-50:],
        "probe": {"epoch": probes[-1]["epoch"], "estimates": probes[-1]["promises"]} if probes else None,
        "decisions": [{"epoch": event["epoch"], "text": event["decision"]} for event in epochs if event["decision"]][-100:],
        "tested": _last(run, "final_test"),
        "compared": None if twin is None else _last(twin, "twin_compared"),
        "finished": _last(run, "growth_finished"),
    }


def _last(run: Run, kind: str) -> dict[str, Any] | None:
    found = run.index.events(kind)
    return _without_stamp(found[-1]) if found else None


def _seeds(run: Run, epochs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every seed with the stages it went through, its outcome, its last measured contribution and the reasons."""
    seeds: list[dict[str, Any]] = []
    current: dict[str, dict[str, Any]] = {}  # the seed in each slot
    lines = [
        *run.index.events("stage_entered"),
        *run.index.events("measured"),
        *epochs,
        *run.index.events("rolled_back"),
    ]
    for event in sorted(lines, key=lambda event: event["time"]):
        match event["kind"]:
            case "stage_entered":
                slot = event["slot"]
                if event["stage"] == "GERMINATED":
                    current[slot] = {
                        "number": len(seeds) + 1,
                        "slot": slot,
                        "blueprint": event["blueprint"],
                        "born": event["epoch"],
                        "outcome": "living",
                        "ended": None,
                        "stages": [],
                        "contributions": [],
                    }
                    seeds.append(current[slot])
                if slot in current:
                    seed = current[slot]
                    seed["stages"].append({"epoch": event["epoch"], "stage": event["stage"], "reason": event["reason"]})
                    if event["stage"] in ("FOSSILIZED", "PRUNED"):
                        seed["outcome"], seed["ended"] = ("kept" if event["stage"] == "FOSSILIZED" else "pruned"), event["epoch"]
                    if event["stage"] in ("PRUNED", "DORMANT"):
                        current.pop(slot)
            case "measured" if event["slot"] in current:
                seed = current[event["slot"]]
                seed["contributions"].append({name: event[name] for name in ("epoch", "gain", "gain_low", "gain_high", "rent")})
            case "epoch_ended":
                for view in event["slots"]:
                    if view["slot"] in current:
                        current[view["slot"]] |= {
                            name: view.get(name) for name in ("alpha", "age", "parameters", "rent", "health", "stage")
                        }
            case "rolled_back":
                for slot in event["embargoed"]:
                    if slot in current:
                        current[slot] |= {"outcome": "rolled back", "ended": event["epoch"]}
                        current.pop(slot)
    return seeds


# Learner runs


def blueprint_counts(run: Run) -> list[dict[str, Any]]:
    """Return for each blueprint how often the controller tried it, what became of it, and what it gained and cost on average."""
    table: dict[str, dict[str, float]] = {}
    for event in run.index.events("round_ended"):
        for name, count in event.get("blueprints", {}).items():
            row = table.setdefault(name, {"tried": 0, "kept": 0, "pruned": 0, "parameters": 0, "gain": 0.0, "measured": 0})
            for field in ("tried", "kept", "pruned", "parameters"):
                row[field] += count[field]
            if count.get("gain") is not None:
                row["gain"] += count["gain"]
                row["measured"] += 1
    return [
        {
            "blueprint": name,
            "tried": row["tried"],
            "kept": row["kept"],
            "pruned": row["pruned"],
            "parameters": row["parameters"] / max(row["tried"], 1),
            "gain": row["gain"] / row["measured"] if row["measured"] else None,
        }
        for name, row in sorted(table.items(), key=lambda item: -item[1]["tried"])
    ]


def _clean(value: Any) -> Any:
    """Return the value with numbers that JSON lacks as None, and texts that can be shown."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(name)): _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
