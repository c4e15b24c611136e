"""The training of a controller as pages show it: utility of its hosts by rent and by cell, their lives, and the critic.

All of it comes from the events `host_ended`, `round_ended` and `calibration`. Imports no torch.

A cell here is a task and a family of architectures. Hosts of one seed share data, order and twin, so an interval is over the means of
such groups. The twin is the same host, decided for by what the policy sees as advice: the heuristic, or an ensemble.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np

from esper.intervals import student_interval
from esper.runs.catalog import Run
from esper.runs.index import EventIndex

RENT_LEVELS = ("low", "middle", "high")
MOST_LINES = 8  # cells in the chart; all of them are in the table
MOST_HOSTS = 64  # of one round on the page
RECENT = 10  # updates whose calibration is joined
BINS = 8  # of the joined calibration


class ShownStage(TypedDict):
    epoch: int
    stage: Literal["GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED", "EMBARGOED", "DORMANT"]
    reason: str


class ShownGain(TypedDict):
    epoch: int
    gain: float
    gain_low: float
    gain_high: float
    rent: float


class ShownSeed(TypedDict):
    """A seed of a host, as its event tells it and pages show it."""

    number: int
    slot: str
    blueprint: str
    outcome: str
    ended: int | None
    stages: list[ShownStage]
    contributions: list[ShownGain]


class ControllerStory:
    """The ended hosts of one run, read as far as its log has been written."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._hosts: list[dict[str, Any]] = []

    def refresh(self, index: EventIndex) -> None:
        """Read the hosts that have ended since the last call."""
        if self._generation != index.generation:
            self._generation, self._hosts = index.generation, []
        self._hosts += index.events("host_ended", start=len(self._hosts))

    def page(self, run: Run) -> dict[str, Any]:
        """Return the lines of utility per round, the table of cells, and the rounds whose hosts can be shown."""
        cells = sorted({_cell(host) for host in self._hosts}, key=lambda cell: -sum(_cell(host) == cell for host in self._hosts))
        return {
            "utility": {
                "rent": self._lines(run, RENT_LEVELS, lambda host: str(host["rent_level"])),
                "cell": self._lines(run, cells[:MOST_LINES], _cell),
            },
            "cells": [self._row(cell) for cell in cells],
            "rounds": sorted({int(host["round"]) for host in self._hosts})[-200:],
        }

    def _lines(self, run: Run, labels: Iterable[str], label_of: Callable[[Mapping[str, Any]], str]) -> list[dict[str, Any]]:
        """Return a line for each label that hosts have: the mean utility of every round with its interval.

        Its places on the axes are the number of the round, the time when its last host ended, and the samples and GFLOPs used until then.
        """
        lines = []
        used = {axis: run.index.series(name) for axis, name in (("samples", "round_ended/samples"), ("flops", "round_ended/gflops"))}
        for label in labels:
            rounds: dict[int, list[dict[str, Any]]] = {}
            for host in self._hosts:
                if label_of(host) == label:
                    rounds.setdefault(host["round"], []).append(host)
            points = [(number, max(host["time"] for host in hosts), *_utility(hosts)) for number, hosts in sorted(rounds.items())]
            if not points:
                continue
            line = dict(zip(("steps", "times", "values", "low", "high"), map(list, zip(*points, strict=True)), strict=True))
            until = {axis: np.searchsorted(series.times, np.array(line["times"]) + 1.0) for axis, series in used.items()}
            sums = {axis: np.concatenate(([0.0], np.cumsum(series.values))) for axis, series in used.items()}
            places = {axis: sums[axis][until[axis]].tolist() for axis in used if len(used[axis].values)}
            lines.append({"label": label, "places": places, **line})
        return lines

    def _row(self, cell: str) -> dict[str, Any]:
        hosts = [host for host in self._hosts if _cell(host) == cell]
        mean, low, high = _utility(hosts)
        means = {name: fmean(host[name] for host in hosts) for name in ("gain", "rent", "grown", "kept")}
        return {"cell": cell, "hosts": len(hosts), "utility": mean, "low": low, "high": high, **means}

    def lives(self, number: int) -> list[dict[str, Any]]:
        """Return the hosts of a round with their losses, those of their twins, and everything that their seeds went through."""
        return [_life(host) for host in self._hosts if host["round"] == number][:MOST_HOSTS]


def _cell(host: Mapping[str, Any]) -> str:
    family, _, size = str(host["host"]).partition("-")
    return f"{host['task']} · {family if 'x' in size else host['host']}"  # "conv-4x3", or "4-8-16" in earlier runs


def _utility(hosts: list[dict[str, Any]]) -> tuple[float, float | None, float | None]:
    """Return the mean utility of hosts and its 95 % interval over groups of hosts that share a twin; None if there is only one group."""
    groups: dict[int, list[float]] = {}
    for host in hosts:
        groups.setdefault(host["seed"], []).append(float(host["utility"]))
    means = [fmean(values) for values in groups.values()]
    if len(means) < 2 or not all(map(math.isfinite, means)):
        return fmean(means), None, None
    interval = student_interval(means)
    return interval.estimate, interval.low, interval.high


def _life(host: Mapping[str, Any]) -> dict[str, Any]:
    """Return what pages show of a host; without its seeds if the log does not tell them as expected."""
    shown = {name: value for name, value in host.items() if name not in ("kind", "run", "time", "step", "seeds")}
    with contextlib.suppress(msgspec.ValidationError):
        return {**shown, "seeds": msgspec.convert(host["seeds"], list[ShownSeed], strict=False)}
    return {**shown, "seeds": []}


def others_in_words(life: Mapping[str, Any]) -> str:
    """Return the steps of a life that were not the advised ones.

    >>> others_in_words({"others": ["wait instead of look", "wait instead of look"]}), others_in_words({"others": []})
    ('Not as advised: wait instead of look (2 times)', 'Decided as advised')
    """
    times = Counter(map(str, life["others"]))
    told = (f"{step} ({count} times)" if count > 1 else step for step, count in times.items())
    return f"Not as advised: {'; '.join(told)}" if times else "Decided as advised"


def joined_calibration(run: Run) -> dict[str, Any] | None:
    """Return the critic's calibration over the last `RECENT` updates, in bins of about equal size; None if there is none."""
    known = run.index.kinds.get("calibration", 0)
    events = run.index.events("calibration", start=max(known - RECENT, 0))
    rows = sorted(
        (predicted, achieved, (high - low) / 2, steps)
        for event in events
        for predicted, achieved, low, high, steps in zip(
            *(event[name] for name in ("predicted", "achieved", "low", "high", "steps")), strict=True
        )
        if all(isinstance(value, int | float) and math.isfinite(value) for value in (predicted, achieved, low, high))
    )
    total = sum(row[3] for row in rows)
    if not total:
        return None
    bins: list[list[tuple[float, float, float, int]]] = [[] for _ in range(BINS)]
    before = 0
    for row in rows:
        bins[min((before + row[3] // 2) * BINS // total, BINS - 1)].append(row)
        before += row[3]
    points = []
    for rows_of_bin in filter(None, bins):
        steps = sum(row[3] for row in rows_of_bin)
        predicted, achieved = (sum(row[column] * row[3] for row in rows_of_bin) / steps for column in (0, 1))
        half = math.hypot(*(row[2] * row[3] for row in rows_of_bin)) / steps  # updates are independent samples
        point = {"predicted": predicted, "achieved": achieved, "low": achieved - half, "high": achieved + half}
        if all(map(math.isfinite, point.values())):  # numbers of a damaged log may be too large to be added
            points.append({**point, "steps": steps})
    return {"updates": len(events), "points": points} if points else None
