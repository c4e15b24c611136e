"""Analysis of the seeds of runs: what became of every blueprint, from events, and the results of `esper analyse`. Imports no torch.

    rows = blueprint_rows([open_run("runs/digits")])         # growth and controller runs; one row per blueprint
    found = read_analysis("runs/digits")                     # Shapley values and interactions; None if there are none

Blueprints. A cell is a growth run, or a task and host of a controller run. The mean gain is the mean over cells, and its interval is over
cells, because the seeds of one host are not independent. The gain of a seed is the cost of removing it as measured last.

Seeds. `esper analyse` writes `analysis.json` into the folder of a growth run. It holds for the loss and each metric the Shapley value of
every seed and the interaction of every pair, with intervals over validation samples, or batches where the losses of samples are unknown.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

import msgspec

from esper.display import Card, Displayed
from esper.files import MAX_CONFIG_BYTES, UNREADABLE, parse_json, read_in_run, with_digest, without_digest, write_in_run
from esper.intervals import Interval, student_interval
from esper.runs.catalog import Run
from esper.runs.events import event_type_of
from esper.runs.folder import RunError
from esper.runs.index import EventIndex
from esper.runs.page import folded, note, section, table
from esper.text_table import NONE, figure, with_interval, without_numbers

ANALYSIS = "analysis.json"
VERSION = 1  # of analysis.json


# Blueprints, from events


class BlueprintRow(msgspec.Struct, frozen=True):
    """What became of the seeds of one blueprint in some runs."""

    blueprint: str
    tried: int
    kept: int
    pruned: int
    rolled_back: int
    living: int
    reasons: dict[str, int]  # why seeds were pruned or rolled back, without numbers -> times, the most frequent first
    refused: dict[str, int]  # action and reason of the gates that refused, without numbers -> times
    measured: int  # seeds with a measured gain
    cells: int  # runs, or tasks and hosts of controller runs, with a measured gain
    gain: float | None  # cost of removing a seed, mean over cells; None if none was measured
    gain_low: float | None  # ends of the 95 % interval over cells; None below two cells
    gain_high: float | None
    parameters: float | None  # of a seed, mean over seeds; None if unknown
    flops: float | None  # of a seed's forward pass for one sample, mean over seeds; None if unknown

    @property
    def gain_per_thousand(self) -> float | None:
        """Gain per 1,000 parameters."""
        return self.gain / self.parameters * 1000 if self.gain is not None and self.parameters else None


class _Count:
    """Sums over the seeds of one blueprint in one cell."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.gains: list[tuple[float, int]] = []  # mean gain of some seeds, and their number
        self.parameters: list[tuple[float, int]] = []  # sum over some seeds, and their number
        self.flops: list[tuple[float, int]] = []

    @property
    def tried(self) -> int:
        return sum(self.outcomes.values())


def blueprint_rows(runs: Iterable[Run]) -> list[BlueprintRow]:
    """Return one row per blueprint that was tried in these growth and controller runs, the one tried most often first."""
    cells: dict[tuple[str, ...], dict[str, _Count]] = {}
    for run in runs:
        if run.kind == "growth":
            _count_growth(run.index, cells.setdefault((str(run.folder),), {}))
        elif run.kind == "controller":
            for event in run.index.events("round_ended"):
                _count_round(event, cells.setdefault((str(run.folder), event["task"], event["host"]), {}))
    names = dict.fromkeys(name for cell in cells.values() for name in cell)
    rows = [_row(name, [cell[name] for cell in cells.values() if name in cell]) for name in names]
    return sorted((row for row in rows if row.tried), key=lambda row: -row.tried)


def _count_growth(index: EventIndex, cell: dict[str, _Count]) -> None:
    ledger = ledger_of(index)
    for seed in ledger.seeds:
        count = cell.setdefault(seed.blueprint, _Count())
        count.outcomes[seed.outcome] += 1
        if not seed.is_present:
            count.reasons[without_numbers(seed.why)] += 1
        if seed.gain is not None and math.isfinite(seed.gain):
            count.gains.append((seed.gain, 1))
        count.parameters.append((seed.parameters, 1))
        count.flops.append((seed.flops, 1))
    for refused in ledger.refused:
        if refused.blueprint:
            reason = f"{refused.action}: {without_numbers(refused.reason)}"
            cell.setdefault(refused.blueprint, _Count()).refused[reason] += 1


def _count_round(event: dict[str, Any], cell: dict[str, _Count]) -> None:
    for name, counted in event.get("blueprints", {}).items():
        count = cell.setdefault(name, _Count())
        rolled_back = counted.get("rolled_back", 0)
        living = counted["tried"] - counted["kept"] - counted["pruned"]
        count.outcomes.update(
            {"kept": counted["kept"], "pruned": counted["pruned"] - rolled_back, "rolled back": rolled_back, "living": living}
        )
        count.reasons.update(counted.get("reasons", {}))
        count.refused.update(counted.get("refused", {}))
        if counted.get("gain") is not None:
            count.gains.append((counted["gain"], counted.get("measured") or 1))
        count.parameters.append((counted["parameters"], counted["tried"]))
        if counted.get("flops") is not None:
            count.flops.append((counted["flops"], counted["tried"]))


def _row(name: str, counts: Sequence[_Count]) -> BlueprintRow:
    """Add up the cells of one blueprint."""
    outcomes: Counter[str] = sum((count.outcomes for count in counts), Counter())
    reasons: Counter[str] = sum((count.reasons for count in counts), Counter())
    refused: Counter[str] = sum((count.refused for count in counts), Counter())
    means = [sum(gain * times for gain, times in count.gains) / sum(times for _, times in count.gains) for count in counts if count.gains]
    interval = student_interval(means) if len(means) > 1 else None

    def mean(sums: Iterable[tuple[float, int]]) -> float | None:
        pairs = list(sums)
        times = sum(number for _, number in pairs)
        return sum(value for value, _ in pairs) / times if times else None

    return BlueprintRow(
        blueprint=name,
        tried=sum(outcomes.values()),
        kept=outcomes["kept"],
        pruned=outcomes["pruned"],
        rolled_back=outcomes["rolled back"],
        living=outcomes["living"],
        reasons=dict(reasons.most_common()),
        refused=dict(refused.most_common()),
        measured=sum(times for count in counts for _, times in count.gains),
        cells=len(means),
        gain=sum(means) / len(means) if means else None,
        gain_low=None if interval is None else interval.low,
        gain_high=None if interval is None else interval.high,
        parameters=mean(pair for count in counts for pair in count.parameters),
        flops=mean(pair for count in counts for pair in count.flops),
    )


def slots_in_order(first: Sequence[str], seen: Iterable[str]) -> list[str]:
    """Return the slots of a host in the order in which they run: the first ones, and those that opened again at the same places.

    >>> slots_in_order(["a", "b"], ["a", "a#2", "a#3", "b"])
    ['a', 'a#2', 'a#3', 'b']
    """
    ordered = list(first)
    for name in seen:
        if name not in ordered:
            place = name.rpartition("#")[0]
            numbers = [index for index, other in enumerate(ordered) if other == place or other.rpartition("#")[0] == place]
            ordered.insert(max(numbers, default=len(ordered) - 1) + 1, name)
    return ordered


# Kinds of events that tell about seeds.
_OF_SEEDS = ("stage_entered", "measured", "epoch_ended", "rolled_back", "best_restored", "action_refused")


def ledger_of(events: EventIndex | Iterable[dict[str, Any]]) -> Any:
    """Return the `Ledger` of a growing host, folded from its events in the order in which they were written.

    Events that do not fit their kind are left out.
    """
    # The ledger belongs to the library above this one, which declares its events and what is folded from them.
    ledger = importlib.import_module("esper.growth.lifecycle.ledger").Ledger()
    for event in events.in_order(_OF_SEEDS) if isinstance(events, EventIndex) else events:
        kind = event_type_of(str(event.get("kind")))
        with contextlib.suppress(msgspec.ValidationError):
            if kind is not None:
                ledger.take(msgspec.convert(event, kind, strict=False))
    return ledger


# Results of `esper analyse`


class Estimate(msgspec.Struct, frozen=True):
    """A number with its 95 % interval, which is symmetric; the ends are None if there is no interval, for example with one batch."""

    estimate: float | None  # None: a loss was not finite
    low: float | None
    high: float | None

    @classmethod
    def of(cls, interval: Interval) -> Estimate:
        return cls(*(value if math.isfinite(value) else None for value in (interval.estimate, interval.low, interval.high)))

    def __str__(self) -> str:
        if self.estimate is None:
            return "not finite"
        return with_interval(self.estimate, self.low, self.high, sign="+", is_short=True)


class AnalysedSeed(msgspec.Struct, frozen=True):
    """A seed of the analysed model."""

    name: str  # of the slot; of the seed itself where several follow one module
    blueprint: str
    outcome: str  # "kept" or "living"
    alpha: float
    parameters: int
    flops: int | None  # of a forward pass for one sample; None if unknown


class Interaction(msgspec.Struct, frozen=True):
    """Interaction of two seeds: positive if they help each other, negative if they do the same work."""

    first: str
    second: str
    value: Estimate


class MeasureResult(msgspec.Struct, frozen=True):
    """The seeds judged by the loss or by one metric. Gains are positive where the seed improves it."""

    name: str
    is_better_low: bool
    without: float | None  # with all seeds off
    with_all: float | None
    shapley: dict[str, Estimate]  # by seed; they sum to the gain of all seeds
    removal: dict[str, Estimate]  # cost of removing one seed now
    alone: dict[str, Estimate]  # gain of one seed if all others are off
    pairs: list[Interaction]
    unit: Literal["samples", "batches"] = "batches"  # the intervals rest on the differences of these

    @property
    def gain(self) -> float | None:
        """Gain of all seeds together."""
        if self.without is None or self.with_all is None:
            return None
        return self.without - self.with_all if self.is_better_low else self.with_all - self.without


class Analysis(msgspec.Struct, Displayed, frozen=True):
    """Shapley values and interactions of the seeds of a model, measured on the same validation batches."""

    seeds: list[AnalysedSeed]
    measures: list[MeasureResult]  # the loss first
    batches: int
    samples: int
    coalitions: int  # sets of seeds that were evaluated
    orders: int  # sampled; 0: all coalitions were evaluated
    epoch: int | None = None  # epochs of training before the measurement, if known
    version: int = VERSION

    def card(self) -> Card:
        """Return the analysis for notebooks and terminals, by the loss."""
        return Card(
            title=f"{len(self.seeds)} {'seed' if len(self.seeds) == 1 else 'seeds'}, analysed on {self.batches} validation batches",
            figures=[(f"{measure.name} without and with all seeds", _from_to(measure)) for measure in self.measures],
            heading=SEED_HEADING,
            rows=seed_rows(self, self.measures[0]) if self.measures else [],
        )


def write_analysis(folder: Path | str, found: Analysis) -> Path:
    """Write an analysis into the folder of a run, over an older one, and return its path."""
    path = Path(folder) / ANALYSIS
    write_in_run(path, msgspec.json.format(msgspec.json.encode(with_digest(msgspec.to_builtins(found)))) + b"\n")
    return path


def read_analysis(folder: Path | str) -> Analysis | None:
    """Return the analysis in the folder of a run; None if there is none. Raise RunError if it cannot be read."""
    path = Path(folder) / ANALYSIS
    try:
        found = msgspec.convert(without_digest(parse_json(read_in_run(path, max_bytes=64 * MAX_CONFIG_BYTES))), Analysis)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise RunError(f"{path} cannot be read ({error}); write it again with: esper analyse {folder}") from error
    if found.version != VERSION:
        raise RunError(f"{path} was written by another version of esper; write it again with: esper analyse {folder}")
    return found


# Tables and sections of pages

BLUEPRINT_HEADING = (
    "blueprint", "tried", "kept", "pruned", "rolled back", "refused", "cost of removal", "cells", "parameters", "FLOPs",
    "cost per 1,000 parameters",
)  # fmt: skip
SEED_HEADING = ("seed", "blueprint", "outcome", "Shapley value", "cost of removal", "alone", "parameters", "value per 1,000 parameters")

ABOUT_BLUEPRINTS = (
    "Cost of removal: rise of the validation loss if the seed were removed, as measured last; mean over cells with its 95 % interval. "
    "A cell is a run, or a task and host of a controller's training. Refused: actions that a gate refused. Parameters and FLOPs are means "
    "of one seed."
)
ABOUT_SHAPLEY = (
    "The Shapley value of a seed is its mean gain over all orders in which the seeds could be added; the values sum to the gain of all "
    "seeds. Intervals are over validation batches. For a metric, gain means its "
    "increase."
)
ABOUT_PAIRS = "Interaction of two seeds: + if they help each other, - if they do the same work. A star marks intervals without 0."


def blueprint_cells(rows: Iterable[BlueprintRow]) -> list[tuple[str, ...]]:
    """Return one line of texts per blueprint, with the columns of BLUEPRINT_HEADING."""
    return [
        (
            row.blueprint,
            f"{row.tried:,}",
            f"{row.kept:,}",
            f"{row.pruned:,}",
            f"{row.rolled_back:,}",
            f"{sum(row.refused.values()):,}",
            with_interval(row.gain, row.gain_low, row.gain_high, is_short=True),
            f"{row.cells:,}",
            NONE if row.parameters is None else f"{row.parameters:,.0f}",
            NONE if row.flops is None else f"{row.flops:,.0f}",
            figure(row.gain_per_thousand),
        )
        for row in rows
    ]


def reason_cells(rows: Iterable[BlueprintRow]) -> list[tuple[str, ...]]:
    """Return one line per blueprint and reason: blueprint, what happened, times, reason."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        lines += [(row.blueprint, "removed", f"{times:,}", reason) for reason, times in row.reasons.items()]
        for refused, times in row.refused.items():
            action, _, reason = refused.partition(": ")
            lines.append((row.blueprint, f"refused to {action}", f"{times:,}", reason))
    return lines


def seed_rows(found: Analysis, measure: MeasureResult) -> list[tuple[str, ...]]:
    """Return one line of texts per seed, with the columns of SEED_HEADING."""
    lines: list[tuple[str, ...]] = []
    for seed in found.seeds:
        value = measure.shapley[seed.name]
        per_thousand = NONE if value.estimate is None or not seed.parameters else figure(1000 * value.estimate / seed.parameters, sign="+")
        removal = measure.removal[seed.name]
        cost = with_interval(removal.estimate, removal.low, removal.high, is_short=True)
        gains = (str(value), cost, str(measure.alone[seed.name]))
        lines.append((seed.name, seed.blueprint, seed.outcome, *gains, f"{seed.parameters:,}", per_thousand))
    return lines


def pair_matrix(found: Analysis, measure: MeasureResult) -> list[tuple[str, ...]]:
    """Return the interactions as a matrix of texts, without its heading. A star marks an interval without 0."""
    texts = {}
    for pair in measure.pairs:
        value = pair.value
        is_sure = value.low is not None and value.high is not None and (value.low > 0 or value.high < 0)
        text = "not finite" if value.estimate is None else figure(value.estimate, sign="+") + ("*" if is_sure else "")
        texts[pair.first, pair.second] = texts[pair.second, pair.first] = text
    return [(one.name, *(texts.get((one.name, other.name), "") for other in found.seeds)) for one in found.seeds]


def pair_rows(measure: MeasureResult, most: int) -> list[tuple[str, ...]]:
    """Return the strongest interactions, at most `most` of them: first seed, second seed, interaction."""
    strongest = sorted(measure.pairs, key=lambda pair: -abs(pair.value.estimate or 0.0))
    return [(pair.first, pair.second, str(pair.value)) for pair in strongest[:most]]


def how_measured(found: Analysis) -> str:
    """Return how an analysis was made, in words."""
    when = "" if found.epoch is None else f" after epoch {found.epoch}"
    how = f"{found.coalitions:,} sets of seeds" + (f" from {found.orders:,} sampled orders" if found.orders else ", which are all")
    units = " and ".join(f"of {measure.name} on {measure.unit}" for measure in found.measures)
    return f"Measured{when} on {found.samples:,} samples in {found.batches:,} validation batches, with {how}. Intervals {units}."


def sections_about_seeds(run: Run, *, is_folded: bool = False) -> list[str]:
    """Return the sections of a report about blueprints and, if `esper analyse` was run, about the Shapley values of the seeds."""
    sections = [blueprint_section(blueprint_rows([run]), is_folded=is_folded)]
    try:
        found = read_analysis(run.folder)
    except RunError as error:
        return [*filter(None, sections), note(str(error))]
    return list(filter(None, [*sections, analysis_section(found) if found is not None else ""]))


def blueprint_section(rows: Sequence[BlueprintRow], *, is_folded: bool = False) -> str:
    """Return the section of a page about blueprints; nothing if none was tried."""
    if not rows:
        return ""
    parts = [table(BLUEPRINT_HEADING, blueprint_cells(rows), numbers=range(1, len(BLUEPRINT_HEADING))), note(ABOUT_BLUEPRINTS)]
    if lines := reason_cells(rows):
        parts.append(table(("blueprint", "what", "times", "why"), lines, numbers=(2,)))
    return (folded if is_folded else section)("Blueprints", *parts)


def analysis_section(found: Analysis) -> str:
    """Return the section of a page about the Shapley values and interactions of the seeds."""
    parts = []
    for measure in found.measures:
        parts += [
            f"<h3>{escape(measure.name)}: {escape(_from_to(measure))}</h3>",
            shapley_drawing(found, measure),
            table(SEED_HEADING, seed_rows(found, measure), numbers=range(3, len(SEED_HEADING))),
        ]
        if measure.pairs:
            names = [seed.name for seed in found.seeds]
            parts.append(note(f"Interaction of pairs, {measure.name}:"))
            parts.append(table(("interaction", *names), pair_matrix(found, measure), numbers=range(1, len(names) + 1)))
    parts += [note(text) for text in (ABOUT_SHAPLEY, *([ABOUT_PAIRS] if len(found.seeds) > 1 else []), how_measured(found))]
    return section("Shapley values of the seeds", *parts)


def shapley_drawing(found: Analysis, measure: MeasureResult) -> str:
    """Draw the Shapley values as horizontal bars with their intervals."""
    width, left, row = 720, 190, 30
    ends = [end for value in measure.shapley.values() for end in (0.0, value.estimate, value.low, value.high) if end is not None]
    low, high = min(ends), max(ends)
    scale = (width - left - 20) / ((high - low) or 1.0)
    zero = left - low * scale
    parts = [f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="4" y2="{row * len(found.seeds) + 4}" stroke="var(--soft)"/>']
    for number, seed in enumerate(found.seeds):
        value, y = measure.shapley[seed.name], 8 + row * number
        name = seed.name if len(seed.name) <= 26 else f"…{seed.name[-25:]}"
        parts.append(f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        if value.estimate is None:
            continue
        at, colour = zero + value.estimate * scale, "validation" if value.estimate >= 0 else "pruned"
        bar = f'<rect x="{min(zero, at):.1f}" y="{y + 2}" width="{abs(at - zero):.1f}" height="16" fill="var(--{colour})" opacity="0.7"/>'
        parts.append(f"<g><title>{escape(f'{seed.name}, {seed.blueprint}: {value}')}</title>{bar}")
        if value.low is not None and value.high is not None:
            ends_at = [zero + end * scale for end in (value.low, value.high)]
            parts.append(
                f'<line x1="{ends_at[0]:.1f}" x2="{ends_at[1]:.1f}" y1="{y + 10}" y2="{y + 10}" stroke="var(--ink)" stroke-width="2"/>'
            )
        parts.append("</g>")
    label = escape(f"Shapley values of the seeds, {measure.name}")
    return (
        f'<figure><svg viewBox="0 0 {width} {row * len(found.seeds) + 12}" role="img" aria-label="{label}">{"".join(parts)}</svg></figure>'
    )


def _from_to(measure: MeasureResult) -> str:
    if measure.without is None or measure.with_all is None or measure.gain is None:
        return "not finite"
    return f"{figure(measure.without)} → {figure(measure.with_all)}, gain {figure(measure.gain, sign='+')}"
