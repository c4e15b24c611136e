"""The data of the dashboard: what its pages show, computed from run folders alone. Imports no torch, and changes no run.

A request is held until the log grows. Series are sent once, thinned to `POINTS` points; afterwards only the points that are new.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from esper.dashboard.series import CHANGING, config_of, series_columns, win_rate_ends
from esper.files import printable, user_cache
from esper.runs.analysis import ANALYSIS, blueprint_rows, how_measured, ledger_of, read_analysis, slots_in_order
from esper.runs.catalog import LABELS, Run, differing_settings, find_runs, keep_summaries, settings_of
from esper.runs.compare import NOT_COMPARED, compare_opened, seed_of
from esper.runs.controller_story import ControllerStory, joined_calibration
from esper.runs.folder import CONFIG, EVENTS, TWIN, RunError
from esper.runs.health import lights, problems
from esper.runs.index import chosen_points, without_stamp
from esper.runs.opponents import opponent_rows, replay_rows, replays_of
from esper.runs.sections import SYSTEM, Curves, charts_of, series_of
from esper.runs.stages import STAGES

POINTS = 2000  # of one series, at most
SEARCH_EVERY_S = 0.4  # for new run folders
SEARCH_PAUSE = 30  # or, where there are many, this many times as long as searching took
MARKED = ("GERMINATED", "FOSSILIZED", "PRUNED")  # stages that are marked in charts
MOST_COMPARED = 8  # series that a comparison shows, at most


class Watcher:
    """All runs under some folders, or those in them, kept up to date. Safe to use from several threads."""

    def __init__(self, *roots: Path | str, cache: Path | None = None) -> None:
        self.roots = [Path(root) for root in roots]
        self._cache = user_cache() if cache is None else cache
        self._runs: dict[str, Run] = {}  # by their names in addresses
        self._stories: dict[Path, tuple[list[tuple[int, int]], dict[str, Any]]] = {}  # by folder: how far the logs were read, and the story
        self._controllers: dict[Path, ControllerStory] = {}  # by folder
        self._settings: dict[Path, tuple[int, bytes, int | None]] = {}  # by folder: time of the file, settings without the seed, seed
        self._sent: dict[str, tuple[str, tuple[int, ...]]] = {}  # by name in addresses: mark of the last page, and stamp of its files
        self._analyses: dict[Path, tuple[list[tuple[int, int]], dict[str, Any]]] = {}  # by folder: what it was made from, and the analysis
        self._lock = threading.RLock()
        self._searched, self._search_took = -math.inf, 0.0
        self.loading = 1.0  # share of the logs that has been read

    def refresh(self) -> None:
        """Look for new runs. Events of a run are read when its page is asked for, or when a table needs its figures."""
        with self._lock:
            self._search_now_and_then()

    def _search_now_and_then(self) -> None:
        if time.monotonic() - self._searched >= max(SEARCH_EVERY_S, SEARCH_PAUSE * self._search_took):
            self._search()

    def _search(self) -> None:
        began = time.monotonic()
        names = {run.folder: name for name, run in self._runs.items()}
        known = {run.folder: run for run in self._runs.values()}
        found = [run for root in self.roots for run in find_runs(root, cache=self._cache, known=known)]
        self._runs = {names.get(run.folder) or name_in_address(run.folder): run for run in found}
        self._searched = time.monotonic()
        self._search_took = self._searched - began
        for kept in (self._stories, self._controllers, self._settings, self._analyses):
            for folder in kept.keys() - {run.folder for run in self._runs.values()}:
                kept.pop(folder)

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self._runs)

    def run(self, name: str) -> Run | None:
        """Return the run of this name in addresses, with its newest events; None if there is none (any more)."""
        with self._lock:
            run = self._runs.get(name)
            if run is None or not run.folder.is_dir():  # it may have begun a moment ago, or be gone
                self._search()
                run = self._runs.get(name)
            if run is not None:
                run.refresh(self._note_share)
                self.loading = 1.0
            return run

    def _note_share(self, share: float) -> None:
        self.loading = share

    # Pages

    def overview(self) -> dict[str, Any]:
        """Return all runs, live ones first, then the newest."""
        with self._lock:
            mark, now, rows, is_new = self.overview_mark(), time.time(), [], False
            for number, (name, run) in enumerate(self._runs.items()):
                kept = run.kept
                rows.append({"id": name, **msgspec.to_builtins(summary := run.brief(now))})
                is_new |= run.kept is not kept and summary.state != "running"
                self.loading = (number + 1) / len(self._runs)
            if is_new:  # the next process need not read these runs
                for root in self.roots:
                    keep_summaries(root, self._cache, (run for run in self._runs.values() if run.folder.is_relative_to(root)))
        rows.sort(key=lambda row: (row["state"] != "running", -row["touched"]))
        return {"root": printable(", ".join(map(str, self.roots))), "runs": [_clean(row) for row in rows], "mark": mark, "now": time.time()}

    def overview_mark(self) -> str:
        """Return a text that changes when a run begins, writes or is removed."""
        with self._lock:
            self._search_now_and_then()
            stamps = [[name, self.stamp(name)] for name in self._runs]
        return hashlib.blake2b(msgspec.json.encode(stamps), digest_size=12).hexdigest()

    def stamp(self, name: str) -> tuple[int, ...]:
        """Return sizes and times of the files that the page of a run is made from: the same stamp, the same page, but for its age."""
        run = self._runs.get(name)
        if run is None:
            return ()
        places = (run.folder / EVENTS, run.folder / LABELS, run.folder / ANALYSIS, run.folder / "replays", run.folder / TWIN / EVENTS)
        found: list[int] = []
        for place in places:
            try:
                status = os.stat(place)
                found += [status.st_size, 0 if place.name == EVENTS else status.st_mtime_ns]  # a log is touched to show that its run lives
            except OSError:
                found += [-1, -1]
        return tuple(found)

    def has_seen(self, name: str, mark: str, stamp: tuple[int, ...]) -> bool:
        """Return whether the page with this mark was made from the files as they are now."""
        return self._sent.get(name) == (mark, stamp)

    def page(self, name: str, mark: str = "") -> dict[str, Any] | None:
        """Return everything about one run except its series; None if there is no such run (any more).

        `mark` is that of the page which the browser has. Return only the mark if nothing has changed since.
        """
        with self._lock:
            run = self.run(name)
            if run is None:
                return None
            stamp = self.stamp(name)
            run.refresh()
            new_mark = self._mark(run)
            self._sent[name] = new_mark, stamp
            if mark == new_mark:
                return {"mark": mark}
            page: dict[str, Any] = {
                "id": name,
                "mark": new_mark,
                "seeds": self._seeds_of_setting(name),
                "summary": msgspec.to_builtins(run.summary()),
                "config": config_of(run),
                "kinds": run.index.kinds,
                "series": run.index.names(),
                "charts": _chosen_charts(charts_of(run), run.index.names()),
                "system": _chosen_charts(SYSTEM.get(run.kind, ()), run.index.names()),
                "computed": [],
                "generation": run.index.generation,
                "unread": run.problem,
                "missing": missing_telemetry(run),
                "problems": problems(run.index),
                "now": time.time(),
            }
            if run.kind == "growth":
                page["growth"] = self._story(run)
                page["twin"] = [] if run.twin is None else run.twin.index.names()
                page["computed"] = ["@gain/twin" if "epoch_ended/val_loss" in page["twin"] else "@gain/first"]
            else:
                page["health"] = [light._asdict() for light in lights(run.index)]
                page["calibration"] = joined_calibration(run)
                page["computed"] = [] if page["calibration"] is None else ["@calibration"]
            if run.kind == "controller":
                page["controller"] = self._controller_page(run)
                page["computed"] += [
                    f"@utility/{by}/{line['label']}" for by, lines in page["controller"]["utility"].items() for line in lines
                ]
            if run.kind in ("growth", "controller"):
                page |= self._analysis(run)
            if run.kind == "arena":
                page["replays"] = replay_rows(replays_of(run.folder), f"/replays/{name}")
                page["opponents"] = [row._asdict() for row in opponent_rows(run.index)]
                page["league"] = [without_stamp(event) for event in run.index.events("league_changed")][-50:]
            page["skipped"] = run.index.skipped  # lines that do not fit are counted when they are asked for
        cleaned: dict[str, Any] = _clean(page)
        return cleaned

    def series(
        self, name: str, wanted: Iterable[str], seen: dict[str, int], generation: int | None, *, twin: bool = False
    ) -> dict[str, Any]:
        """Return the points of some series: those after the first `seen` ones, or at most `POINTS` of all if the log was cut since.

        The answer for a series is {"start": number of points before these, "total": ..., "steps": [...], "times": [...], "values": [...]}
        and, where it has them, "low" and "high" (ends of its 95 % interval) and places on axes of its own. Where `start` is less than
        `seen`, the last points are sent again, because they have changed.
        """
        with self._lock:
            run = self.run(name)
            if run is not None and twin:
                run = run.twin
            if run is None:
                return {"generation": 0, "series": {}}
            # A twin that was resumed changes the gain over it.
            present = run.index.generation + (0 if run.twin is None else run.twin.index.generation)
            answer = {}
            for label in wanted:
                columns = series_columns(run, label, utility=self._controller_page(run)["utility"] if run.kind == "controller" else {})
                total = len(columns["values"])
                start = min(seen.get(label, 0), total) if generation == present else 0
                if label.startswith(CHANGING):  # sent again: the newest round, or all of it
                    start = max(start - 1, 0) if label.startswith("@utility/") else 0
                chosen = chosen_points(columns["values"][start:], POINTS)
                part = {name: column[start:][chosen] for name, column in columns.items()}
                if "trials" in part:
                    part |= win_rate_ends(part["values"], part.pop("trials"))
                answer[label] = {"start": start, "total": total, **{name: _clean(column.tolist()) for name, column in part.items()}}
        return {"generation": present, "series": answer}

    def hosts(self, name: str, number: int) -> list[dict[str, Any]]:
        """Return the lives of the hosts of a round of a controller's training; none if there is no such run or round."""
        with self._lock:
            run = self.run(name)
            lives: list[dict[str, Any]] = [] if run is None or run.kind != "controller" else _clean(self._controller(run).lives(number))
            return lives

    def _controller(self, run: Run) -> ControllerStory:
        story = self._controllers.setdefault(run.folder, ControllerStory())
        story.refresh(run.index)
        return story

    def _controller_page(self, run: Run) -> dict[str, Any]:
        """Return the controller's part of the page; the one of before if its log has not grown since."""
        mark = [(run.index.generation, run.index.offset)]
        before = self._stories.get(run.folder)
        if before is None or before[0] != mark:
            before = self._stories[run.folder] = mark, self._controller(run).page(run)
        return before[1]

    def _mark(self, run: Run) -> str:
        """Return a text that changes with everything that the page of a run shows, except series and the last sign of life."""
        labels = run.folder / LABELS
        parts: list[Any] = [each.index.generation for each in (run, run.twin) if each is not None]
        parts += [each.index.offset for each in (run, run.twin) if each is not None]
        parts += [run.state(), labels.stat().st_mtime_ns if labels.is_file() else 0, self._seeds_of_setting(name_in_address(run.folder))]
        if run.kind in ("growth", "controller"):
            parts.append(self._analysis_changed(run))
        if run.kind == "arena":
            parts.append([path.name for path in replays_of(run.folder)][:50])
        return hashlib.blake2b(msgspec.json.encode(parts), digest_size=12).hexdigest()

    def _seeds_of_setting(self, name: str) -> list[dict[str, Any]]:
        """Return the runs that differ from this one in nothing but their seed, by seed, with this one; none if it is the only one."""
        own, _ = self._setting(self._runs[name])
        found = {id_: self._setting(run) for id_, run in self._runs.items() if run.kind == self._runs[name].kind}
        same = {id_: seed for id_, (setting, seed) in found.items() if setting == own and seed is not None}
        if own == b"" or len(same) < 2 or len(set(same.values())) < len(same):
            return []
        ordered = sorted(same, key=lambda id_: same[id_] or 0)
        runs = [(id_, self._runs[id_]) for id_ in ordered]
        for _, run in runs:
            run.refresh()
        twins = {id_: None if run.twin is None else run.twin.started() for id_, run in runs}
        return [{"id": id_, "name": run.name, "seed": same[id_], "started": run.started(), "twin_started": twins[id_]} for id_, run in runs]

    def _setting(self, run: Run) -> tuple[bytes, int | None]:
        """Return the settings of a run without its seed, as one text, and the seed. The text is empty if the settings cannot be read."""
        try:
            changed = (run.folder / CONFIG).stat().st_mtime_ns
        except OSError:
            return b"", None
        known = self._settings.get(run.folder)
        if known is None or known[0] != changed:
            config = config_of(run)
            kept = sorted((name, value) for name, value in settings_of(config).items() if name not in NOT_COMPARED)
            known = self._settings[run.folder] = changed, msgspec.json.encode([run.kind, kept], enc_hook=str), seed_of(config)
        return known[1], known[2]

    def _story(self, run: Run) -> dict[str, Any]:
        """Return the story of a growth run; the one of before if neither its log nor that of its twin has grown since."""
        mark = [(each.index.generation, each.index.offset) for each in (run, run.twin) if each is not None]
        before = self._stories.get(run.folder)
        if before is None or before[0] != mark:
            before = self._stories[run.folder] = mark, growth_story(run, run.twin)
        return before[1]

    def _analysis(self, run: Run) -> dict[str, Any]:
        """Return what became of the blueprints, and the results of `esper analyse` if there are any; those of before if nothing is new."""
        mark = [(run.index.generation, run.index.offset), (self._analysis_changed(run), 0)]
        before = self._analyses.get(run.folder)
        if before is None or before[0] != mark:
            rows = [msgspec.to_builtins(row) | {"per_thousand": row.gain_per_thousand} for row in blueprint_rows([run])]
            found: dict[str, Any] = {"blueprints": rows}
            try:
                analysis = read_analysis(run.folder)
                found["analysis"] = None if analysis is None else msgspec.to_builtins(analysis) | {"about": how_measured(analysis)}
            except RunError as error:
                found["analysis"] = {"problem": str(error)}
            before = self._analyses[run.folder] = mark, found
        return before[1]

    def _analysis_changed(self, run: Run) -> int:
        """Return when the results of `esper analyse` were written; 0 if there are none."""
        try:
            return (run.folder / ANALYSIS).stat().st_mtime_ns
        except OSError:
            return 0

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
                    "runs": [{"id": name, **msgspec.to_builtins(run.summary()), **_twin_of(run)} for name, run in runs.items()],
                    "settings": differing_settings({name: config_of(run) for name, run in runs.items()}),
                    "series": [label for label in order if all(label in names for names in shared)],
                    "main": _main_series(list(runs.values()), shared),
                }
            )
            return found


def _chosen_charts(wanted: Iterable[Curves], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the charts that have at least one of the series `names`: title, (label, series) of each line, and whether it may be log."""
    found = [(curves, list(series_of(names, curves).items())) for curves in wanted]
    return [{"title": curves.title, "lines": lines, "may_be_log": curves.may_be_log} for curves, lines in found if lines]


def _main_series(runs: Sequence[Run], shared: Sequence[Collection[str]]) -> list[str]:
    """Return the series that a comparison shows: the first two of each chart of the first run that all runs have."""
    wanted = (
        [series for curves in charts_of(runs[0]) for series in list(series_of(runs[0].index.names(), curves).values())[:2]] if runs else []
    )
    return [series for series in wanted if all(series in names for names in shared)][:MOST_COMPARED]


def name_in_address(folder: Path) -> str:
    """Return the name of a run in addresses: a digest of its path, so that no address can name another folder."""
    return hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=6).hexdigest()


def _twin_of(run: Run) -> dict[str, Any]:
    """Return the names of the series of a run's twin, and when it started; no names if it has none."""
    return {"twin": [] if run.twin is None else run.twin.index.names(), "twin_started": None if run.twin is None else run.twin.started()}


def missing_telemetry(run: Run) -> str:
    """Return why parts of the page of a run are empty, and what to do; empty if the run writes all that the page shows.

    A run whose settings do not tell the level of its telemetry is judged by what it has written.
    """
    level = config_of(run).get("telemetry")
    if level is None and run.kind == "growth" and run.index.kinds.get("epoch_ended"):
        started = run.index.events("growth_started")[-1:]
        has_slots = any(name.startswith("epoch_ended/slots/") for name in run.index.names())
        level = "minimal" if started and started[0].get("slots") and not has_slots else None
    details = {
        "growth": "alpha, cost of removal, age and parameters of the slots, the probe's readings, and candidates that were passed over",
        "ppo": "entropy and KL of the heads, gradient norms, and the calibration of the critic",
    }
    details |= {"arena": details["ppo"], "controller": f"{details['ppo']}, and the lives of the hosts"}
    if level == "off":
        return (
            "Its telemetry is off, so it writes neither curves nor events. Start a run with --telemetry normal, the default, to see them."
        )
    if level == "minimal" and run.kind in details:
        return (
            f"Its telemetry is minimal and leaves out: {details[run.kind]}. Start a run with --telemetry normal, the default, to see them."
        )
    return ""


# Growth


def growth_story(run: Run, twin: Run | None = None) -> dict[str, Any]:
    """Return the life of every seed, the slots as they are now, the marks for charts, and what the controller and the governor did."""
    index = run.index
    started = (index.events("growth_started") or [{}])[-1]
    epochs = index.events("epoch_ended")
    seeds = [seed.as_dict() for seed in ledger_of(index).seeds]
    last = {view["slot"]: view for view in epochs[-1]["slots"]} if epochs else {}
    empty = {"stage": "DORMANT", "blueprint": None, "alpha": 0.0}
    if not last:  # at the level minimal, only the stages are known
        for event in index.events("stage_entered"):
            has_seed = event["stage"] not in ("PRUNED", "EMBARGOED", "DORMANT")
            alpha = 1.0 if event["stage"] == "FOSSILIZED" else None
            last[event["slot"]] = {**without_stamp(event), "alpha": alpha} if has_seed else {**empty, "stage": event["stage"]}
    if any(event["why"] != "stopped" for event in index.events("growth_finished")[-1:]):  # the model has only the kept seeds
        kept = {seed["slot"] for seed in seeds if seed["outcome"] == "kept"}
        last = {slot: view if slot in kept else {"slot": slot, **empty} for slot, view in last.items()}
    slots = [{"slot": slot, **last.get(slot, empty)} for slot in slots_in_order(started.get("slots", []), last)]
    wider = {(event["slot"], event["blueprint"]) for event in index.events("widened")}
    slots = [{**slot, "kind": "width" if (slot["slot"], slot["blueprint"]) in wider else "depth"} for slot in slots]
    marks = [
        {
            **{name: event[name] for name in ("epoch", "slot", "blueprint")},
            "what": STAGES[event["stage"]].word,
            "stage": event["stage"].lower(),
        }
        for event in index.events("stage_entered")
        if event["stage"] in MARKED
    ]
    rollbacks = [without_stamp(event) for event in index.events("rolled_back")]
    marks += [{"epoch": event["epoch"], "what": "rolled back", "stage": "red", "slot": "", "blueprint": ""} for event in rollbacks]
    probes, left_out = index.events("probed"), index.events("passed_over")
    ended, of_twin = _last(run, "growth_finished"), None if twin is None else _last(twin, "growth_finished")
    return {
        "started": {
            name: started.get(name) for name in ("controller", "raise_mode", "epochs", "parameters", "flops", "device", "optimizer", "note")
        },
        "slots": slots,
        "parameters": (index.events("growth_finished")[-1:] or epochs[-1:] or [started])[0].get("parameters"),
        "seeds": seeds,
        "marks": marks,
        "rollbacks": rollbacks,
        "refused": [without_stamp(event) for event in index.events("action_refused")][-50:],
        "probes": [
            {
                "epoch": probe["epoch"],
                "estimates": probe["promises"],
                "reasons": next((event["reasons"] for event in left_out if event["epoch"] == probe["epoch"]), {}),
                "decision": next((event["decision"] for event in epochs if event["epoch"] == probe["epoch"]), ""),
            }
            for probe in probes[-20:]
        ],
        "decisions": [{"epoch": event["epoch"], "text": event["decision"]} for event in epochs if event["decision"]][-100:],
        "tested": _last(run, "final_test"),
        "twin_started": None if twin is None else twin.started(),
        "compared": None if twin is None else _last(twin, "twin_compared"),
        "difference": None if ended is None or of_twin is None else ended["val_loss"] - of_twin["val_loss"],
        "finished": ended,
    }


def _last(run: Run, kind: str) -> dict[str, Any] | None:
    found = run.index.events(kind)
    return without_stamp(found[-1]) if found else None


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
