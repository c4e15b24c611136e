"""The ledger: what was tried, when, why, what it gave and what it cost. One entry for a seed, and the sum over blueprints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from esper.growth.lifecycle import Stage

Outcome = Literal["living", "kept", "pruned", "rolled back"]
Row = tuple[str, ...]


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
    gain: float | None = None  # nats, as last measured
    gain_low: float | None = None
    gain_high: float | None = None
    rent: float = 0.0
    ended: int | None = None


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
        rows: list[Row] = [("#", "slot", "blueprint", "born", "outcome", "gain in nats", "rent", "parameters", "why it ended so")]
        for entry in self.entries:
            why = entry.steps[-1].reason if entry.steps else entry.reason
            born = f"epoch {entry.born}"
            rent, parameters = f"{entry.rent:.4f}", f"{entry.parameters:,}"
            rows.append((str(entry.number), entry.slot, entry.blueprint, born, entry.outcome, _gain(entry), rent, parameters, why))
        return _aligned(rows) if len(rows) > 1 else "no seed was tried"

    def analytics(self) -> str:
        """For a person: which blueprints were tried, kept and pruned, at what gain and cost."""
        rows: list[Row] = [("blueprint", "tried", "kept", "pruned", "rolled back", "mean gain of kept", "mean parameters")]
        for name in dict.fromkeys(entry.blueprint for entry in self.entries):
            some = [entry for entry in self.entries if entry.blueprint == name]
            kept = [entry.gain for entry in some if entry.outcome == "kept" and entry.gain is not None]
            counts = [str(sum(entry.outcome == outcome for entry in some)) for outcome in ("kept", "pruned", "rolled back")]
            gain = f"{_mean(kept):.4f}" if kept else "–"
            rows.append((name, str(len(some)), *counts, gain, f"{_mean([entry.parameters for entry in some]):,.0f}"))
        return _aligned(rows) if len(rows) > 1 else "no blueprint was tried"


def _gain(entry: Entry) -> str:
    if entry.gain is None:
        return "not measured"
    return f"{entry.gain:+.4f} [{entry.gain_low:+.4f}, {entry.gain_high:+.4f}]"


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _aligned(rows: list[Row]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
