"""The ledger of a run: one entry per seed with its stages, reasons, cost of removal and rent; refused actions; rollbacks.

All tables of seeds are made here, from a ledger or from the events of a run: one row per seed, or one row per blueprint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, get_args

import msgspec

from esper.display import Card, Displayed
from esper.growth.lifecycle.stages import Stage
from esper.text_table import aligned, figure

Outcome = Literal["living", "kept", "pruned", "rolled back"]
Row = tuple[str, ...]
NONE = "–"

LEDGER_HEADING = ("#", "slot", "blueprint", "born", "outcome", "cost of removal", "rent", "parameters", "why it ended so")
ANALYTICS_HEADING = ("blueprint", "tried", "kept", "pruned", "rolled back", "mean cost of removal", "mean parameters")


class Step(msgspec.Struct, frozen=True):
    """Entry of a seed into a stage."""

    epoch: int
    stage: Stage
    reason: str


class Entry(msgspec.Struct):
    """The life of one seed."""

    number: int
    slot: str
    blueprint: str
    raise_mode: str
    born: int  # epochs finished when it germinated
    reason: str
    parameters: int
    flops: int  # per forward pass of one sample
    steps: list[Step] = []
    outcome: Outcome = "living"
    gain: float | None = None  # cost of removing it, in the unit of the loss, as measured last
    gain_low: float | None = None
    gain_high: float | None = None
    rent: float = 0.0
    ended: int | None = None  # epochs finished when it was kept, pruned or rolled back
    brought_back: int = 0  # rollbacks that undid its removal
    after: int | None = None  # number of the kept seed at the same place behind which it grew

    @property
    def why(self) -> str:
        """Reason for its present state."""
        return self.steps[-1].reason if self.steps else self.reason


class Refused(msgspec.Struct, frozen=True):
    """An action of a controller that a gate refused."""

    epoch: int
    slot: str
    action: str
    reason: str
    blueprint: str = ""  # of the seed in the slot, or of the one that was to germinate


class Rollback(msgspec.Struct, frozen=True):
    """A rollback by the governor to the state after an earlier epoch."""

    epoch: int
    to_epoch: int
    reason: str


class Ledger(msgspec.Struct, Displayed):
    """All seeds of one run in the order of their birth, with the refused actions and the rollbacks."""

    entries: list[Entry] = []
    refused: list[Refused] = []
    rollbacks: list[Rollback] = []

    def count(self, outcome: Outcome) -> int:
        return sum(entry.outcome == outcome for entry in self.entries)

    def card(self) -> Card:
        """Return all seeds for notebooks."""
        outcomes = [(outcome, str(self.count(outcome))) for outcome in get_args(Outcome)]
        others = [("refused actions", str(len(self.refused))), ("rollbacks", str(len(self.rollbacks)))]
        return Card(
            f"Ledger of {len(self.entries):,} seeds", [*outcomes, *others], LEDGER_HEADING, ledger_rows(self.entries, is_short=True)
        )

    def table(self) -> str:
        """Return a text table with one line per seed."""
        return aligned([LEDGER_HEADING, *ledger_rows(self.entries)]) if self.entries else "no seed was tried"

    def analytics(self) -> str:
        """Return a text table with one line per blueprint: tried, kept, pruned, rolled back, mean cost of removal, mean size."""
        return aligned([ANALYTICS_HEADING, *analytics_rows(self.entries)]) if self.entries else "no blueprint was tried"


# Tables


class SeedLife(Protocol):
    """A seed as the tables show it."""

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


def ledger_rows(lives: Iterable[SeedLife], *, is_short: bool = False) -> list[Row]:
    """Return one row per seed, with the columns of LEDGER_HEADING. With `is_short`, intervals are written as ±."""
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


def analytics_rows(lives: Sequence[SeedLife]) -> list[Row]:
    """Return one row per blueprint, with the columns of ANALYTICS_HEADING."""
    rows: list[Row] = []
    for name in dict.fromkeys(life.blueprint for life in lives):
        some = [life for life in lives if life.blueprint == name]
        gains = [life.gain for life in some if life.outcome == "kept" and life.gain is not None]
        counts = [str(sum(life.outcome == outcome for life in some)) for outcome in ("kept", "pruned", "rolled back")]
        mean_gain = figure(sum(gains) / len(gains), sign="+") if gains else NONE
        rows.append((name, str(len(some)), *counts, mean_gain, f"{sum(life.parameters for life in some) / len(some):,.0f}"))
    return rows


def gain_in_words(gain: float | None, low: float | None, high: float | None, *, is_short: bool = False) -> str:
    """Return the cost of removing a seed as text, with its interval.

    >>> gain_in_words(0.1, 0.05, 0.15), gain_in_words(0.1, 0.05, 0.15, is_short=True)
    ('+0.1000 [+0.0500, +0.1500]', '+0.1000 ±0.0500')
    """
    if gain is None or low is None or high is None:
        return "not measured"
    if not math.isfinite(high - low):
        return f"{figure(gain, sign='+')}, interval unknown"
    middle = figure(gain, sign="+")
    return f"{middle} ±{figure((high - low) / 2)}" if is_short else f"{middle} [{figure(low, sign='+')}, {figure(high, sign='+')}]"
