"""The ledger: what was tried, when, why, what removing it would cost and its rent. One entry for a seed, and the sum over blueprints.

The tables are made here alone: of a ledger, and of the seeds that a run's events tell about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from esper.growth.lifecycle.stages import Stage
from esper.text_table import aligned, figure

Outcome = Literal["living", "kept", "pruned", "rolled back"]
Row = tuple[str, ...]
NONE = "–"

LEDGER_HEADING = ("#", "slot", "blueprint", "born", "outcome", "cost of removal", "rent", "parameters", "why it ended so")
ANALYTICS_HEADING = ("blueprint", "tried", "kept", "pruned", "rolled back", "mean cost of removal", "mean parameters")


class Step(msgspec.Struct, frozen=True):
    """A seed entered a stage."""

    epoch: int
    stage: Stage
    reason: str


class Entry(msgspec.Struct):
    """The life of one seed."""

    number: int
    slot: str
    blueprint: str
    raise_mode: str
    born: int  # epochs that were over
    reason: str
    parameters: int
    flops: int  # of a forward pass for one sample
    steps: list[Step] = []
    outcome: Outcome = "living"
    gain: float | None = None  # what removing it would cost, in the unit of the loss, as last measured
    gain_low: float | None = None
    gain_high: float | None = None
    rent: float = 0.0
    ended: int | None = None

    @property
    def why(self) -> str:
        """It is where it is now."""
        reasons = [self.reason, *(step.reason for step in self.steps)]
        is_gentle = self.outcome == "pruned" and was_withdrawn([step.stage for step in self.steps])
        return reasons[-2] if is_gentle else reasons[-1]


class Refused(msgspec.Struct, frozen=True):
    """Something that a controller wanted and a gate did not let pass."""

    epoch: int
    slot: str
    action: str
    reason: str


class Rollback(msgspec.Struct, frozen=True):
    """The governor went back to the state after an earlier epoch."""

    epoch: int
    to_epoch: int
    reason: str


class Ledger(msgspec.Struct):
    entries: list[Entry] = []
    refused: list[Refused] = []
    rollbacks: list[Rollback] = []

    def count(self, outcome: Outcome) -> int:
        return sum(entry.outcome == outcome for entry in self.entries)

    def table(self) -> str:
        """For a person: one line for a seed."""
        return aligned([LEDGER_HEADING, *ledger_rows(self.entries)]) if self.entries else "no seed was tried"

    def analytics(self) -> str:
        """For a person: which blueprints were tried, kept and pruned, what removing them would cost, and their size."""
        return aligned([ANALYTICS_HEADING, *analytics_rows(self.entries)]) if self.entries else "no blueprint was tried"


# Tables


class Life(Protocol):
    """What a table says about a seed."""

    @property
    def number(self) -> int: ...
    @property
    def slot(self) -> str: ...
    @property
    def blueprint(self) -> str: ...
    @property
    def born(self) -> int: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def gain(self) -> float | None: ...
    @property
    def gain_low(self) -> float | None: ...
    @property
    def gain_high(self) -> float | None: ...
    @property
    def rent(self) -> float: ...
    @property
    def parameters(self) -> int: ...
    @property
    def why(self) -> str: ...


def ledger_rows(lives: Iterable[Life], *, is_short: bool = False) -> list[Row]:
    """One row for a seed, below LEDGER_HEADING."""
    return [
        (
            str(life.number),
            life.slot,
            life.blueprint,
            f"epoch {life.born}",
            life.outcome,
            gain_in_words(life.gain, life.gain_low, life.gain_high, is_short=is_short),
            figure(life.rent),
            f"{life.parameters:,}",
            life.why,
        )
        for life in lives
    ]


def analytics_rows(lives: Sequence[Life]) -> list[Row]:
    """One row for a blueprint, below ANALYTICS_HEADING."""
    rows: list[Row] = []
    for name in dict.fromkeys(life.blueprint for life in lives):
        some = [life for life in lives if life.blueprint == name]
        gains = [life.gain for life in some if life.outcome == "kept" and life.gain is not None]
        counts = [str(sum(life.outcome == outcome for life in some)) for outcome in ("kept", "pruned", "rolled back")]
        mean_gain = figure(sum(gains) / len(gains), sign="+") if gains else NONE
        rows.append((name, str(len(some)), *counts, mean_gain, f"{sum(life.parameters for life in some) / len(some):,.0f}"))
    return rows


def gain_in_words(gain: float | None, low: float | None, high: float | None, *, is_short: bool = False) -> str:
    """What removing a seed would cost, with its interval.

    >>> gain_in_words(0.1, 0.05, 0.15), gain_in_words(0.1, 0.05, 0.15, is_short=True)
    ('+0.1000 [+0.0500, +0.1500]', '+0.1000 ±0.0500')
    """
    if gain is None or low is None or high is None:
        return "not measured"
    if not math.isfinite(high - low):
        return f"{figure(gain, sign='+')}, interval unknown"
    middle = figure(gain, sign="+")
    return f"{middle} ±{figure((high - low) / 2)}" if is_short else f"{middle} [{figure(low, sign='+')}, {figure(high, sign='+')}]"


def was_withdrawn(stages: Sequence[Stage]) -> bool:
    """Alpha fell before the seed was taken out, and the reason was given when that began."""
    return tuple(stages[-3:]) == (Stage.HOLDING, Stage.BLENDING, Stage.PRUNED)
