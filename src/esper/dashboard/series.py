"""The series of the dashboard as columns of numbers: those of the log, and those that are computed from several of them. Imports no torch.

| name | series |
|---|---|
| @samples, @gflops | amount used so far, by step |
| @gain/twin, @gain/first | gain over the twin, or fall of the loss since the first epoch, with parameters and FLOPs as axes |
| @utility/rent/low and so on | utility of a controller's hosts by round, with its interval |
| @calibration | achieved by predicted return, with its interval |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from esper.intervals import wilson_interval
from esper.runs.catalog import Run, at_steps
from esper.runs.controller_story import joined_calibration
from esper.runs.index import Series

CHANGING = ("@utility/", "@calibration")  # computed series whose old points may change
WIN_RATE = "round_fought/win_rate/"


def series_columns(run: Run, name: str, *, utility: Mapping[str, list[dict[str, Any]]]) -> dict[str, np.ndarray]:
    """Return columns of equal length: steps, times and values of a series and, where it has them, others.

    These are "low" and "high", the ends of its interval, "trials", from which `win_rate_ends` computes them, and places on axes of its own.
    `utility` holds the lines of utility of a controller's run, see `ControllerStory.page`.
    """
    if name.startswith("@utility/"):
        lines = (line for by, lines in utility.items() for line in lines if f"@utility/{by}/{line['label']}" == name)
        line: dict[str, Any] = next(lines, {})
        own = {column: line.get(column, []) for column in ("steps", "times", "values", "low", "high")}
        return {column: np.array(values, float) for column, values in {**own, **line.get("places", {})}.items()}
    if name == "@calibration":
        points = (joined_calibration(run) or {"points": []})["points"]
        found = {column: np.array([point[column] for point in points]) for column in ("predicted", "achieved", "low", "high", "steps")}
        return {"times": np.zeros(len(points)), "values": found.pop("achieved"), **found}
    if name.startswith("@gain/"):
        return gain_columns(run, over_twin=name == "@gain/twin")
    columns = (progress_series(run, name) if name.startswith("@") else run.index.series(name))._asdict()
    trials = f"round_fought/battles/{name.removeprefix(WIN_RATE)}" if name.startswith(WIN_RATE) else ""
    if run.kind == "arena" and name == "checkpoint_evaluated/mean_return":  # the score in battles
        trials = "checkpoint_evaluated/episodes"
    counts = run.index.series(trials).values
    if trials and len(counts) == len(columns["values"]) and ((columns["values"] >= 0) & (columns["values"] <= 1) & (counts > 0)).all():
        columns["trials"] = counts
    return columns


def win_rate_ends(rates: np.ndarray, battles: np.ndarray) -> dict[str, np.ndarray]:
    """Return the ends of the 95 % intervals of win rates over battles, where a draw is half a win."""
    ends = [(interval.low, interval.high) for interval in map(wilson_interval, rates * battles, battles)]
    low, high = np.array(ends).reshape(-1, 2).T
    return {"low": low, "high": high}


def config_of(run: Run) -> dict[str, Any]:
    """Return the settings of a run; none if they cannot be read."""
    try:
        return run.config()
    except (OSError, ValueError):
        return {}


def progress_series(run: Run, name: str) -> Series:
    """Return the samples ("@samples") or the GFLOPs ("@gflops") that a run has used so far, by step; empty if it does not tell them.

    A growth run counts the FLOPs of its training, a controller's those of its hosts. Other learners count those of their policy, estimated:
    2 per weight and step to act, and 6 in every epoch of an update. That is too few for a network that uses its weights more than once.
    """
    get = run.index.series
    if run.kind == "growth":
        rates, seconds = get("epoch_ended/samples_per_second"), get("epoch_ended/seconds")
        if name == "@gflops":
            return get("epoch_ended/total_gflops")
        return rates._replace(values=np.cumsum(rates.values * at_steps(seconds, rates.steps)))
    if run.kind == "controller":
        rounds = get("round_ended/gflops" if name == "@gflops" else "round_ended/samples")
        return rounds._replace(values=np.cumsum(rounds.values))
    updates = get("update/update")
    if name == "@samples":
        return updates._replace(values=updates.steps.astype(float))
    started, ppo = run.index.events("run_started")[-1:], config_of(run).get("ppo", {})
    weights = started[0].get("parameters") if started else None
    per_step = (weights or 0) * (2 + 6 * ppo.get("num_epochs", 1)) / 1e9
    return updates._replace(values=updates.steps * per_step) if per_step else get("")


def gain_columns(run: Run, *, over_twin: bool) -> dict[str, np.ndarray]:
    """Return how much better a growing network is, epoch by epoch, with its parameters and FLOPs as further axes.

    The gain is the validation loss of the twin minus its own, or else the fall of the loss since the first epoch.
    """
    get = run.index.series
    losses = get("epoch_ended/val_loss")
    before = losses.values[:1]
    if over_twin:
        twin = get("") if run.twin is None else run.twin.index.series("epoch_ended/val_loss")
        ends = {"left": np.nan, "right": np.nan}
        before = np.interp(losses.steps, twin.steps, twin.values, **ends) if len(twin.values) else np.full(len(losses.values), np.nan)
    gains = before - losses.values
    kept = np.isfinite(gains)
    columns = {**losses._asdict(), "values": gains}
    for name in ("parameters", "flops"):
        sizes = get(f"epoch_ended/{name}")
        columns[f"size/{name}"] = at_steps(sizes, losses.steps) if len(sizes.values) else np.full(len(gains), np.nan)
    return {name: column[kept] for name, column in columns.items()}
