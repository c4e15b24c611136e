"""The ledger of a run: one record per seed, from its birth on; refused actions; rollbacks.

`Ledger.take` is the only function that turns events into records. A training folds every event that it emits into its own ledger at once,
so this ledger and one that is folded from the log of the run are the same. Checkpoints, reports, pages, cards and queries hold or read
these records. Numbers of seeds are given at birth and stand in every event, so nothing is guessed.

All tables of seeds are made here: one row per seed, or one row per blueprint. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec

from esper.display import Card, Displayed
from esper.growth.events import (
    ActionRefused,
    BestRestored,
    EpochEnded,
    Measured,
    Outcome,
    RolledBack,
    SeedBack,
    SlotView,
    StageEntered,
    Unit,
)
from esper.growth.lifecycle.legal_moves import Stage
from esper.runs import Event
from esper.text_table import NONE, aligned, figure, with_interval

Row = tuple[str, ...]

LEDGER_HEADING = ("#", "slot", "blueprint", "born", "outcome", "cost of removal", "rent", "parameters", "why")
ANALYTICS_HEADING = ("blueprint", "tried", "kept", "pruned", "rolled back", "mean cost of removal", "mean parameters")


class Step(msgspec.Struct, frozen=True):
    """Entry of a seed into a stage."""

    epoch: int
    stage: Stage
    reason: str


class Gain(msgspec.Struct, frozen=True):
    """Cost of removing a seed, in the unit of the loss, as measured at the end of an epoch."""

    epoch: int
    gain: float
    gain_low: float
    gain_high: float
    rent: float
    unit: Unit = "batches"  # the interval rests on the paired losses of these
    count: int = 0  # number of them; 0: unknown


class SeedRecord(msgspec.Struct):
    """One seed, from its birth to its end or to the present."""

    number: int  # from 1, in the order of birth
    slot: str
    blueprint: str
    raise_mode: str
    born: int  # epochs finished when it germinated
    reason: str  # why it germinated
    parameters: int
    flops: int  # per forward pass of one sample
    after: int | None = None  # number of the kept seed at the same place behind which it grew
    stages: list[Step] = []
    contributions: list[Gain] = []  # without those that were measured in a state that a rollback undid
    outcome: Outcome = "living"
    ended: int | None = None  # epochs finished when it was kept, pruned or rolled back
    brought_back: int = 0  # rollbacks that undid its removal
    rent: float = 0.0  # in the unit of the loss; of a kept seed: when it was kept, or when it was measured since
    # As of the last end of an epoch in which it was in the model. Fleets do not tell these.
    alpha: float | None = None
    age: int = 0  # epochs of training, without those that a rollback undid
    health: float | None = None  # of its gradients, in [0, 1]
    skipped: int = 0  # steps so far that it skipped because its gradient, or that of its host, was not finite

    @property
    def stage(self) -> Stage:
        """The last stage that it entered."""
        return self.stages[-1].stage

    @property
    def why(self) -> str:
        """Reason for its present state."""
        return self.stages[-1].reason if self.stages else self.reason

    @property
    def gain(self) -> float | None:
        """Cost of removing it, as measured last."""
        return self.contributions[-1].gain if self.contributions else None

    @property
    def gain_low(self) -> float | None:
        return self.contributions[-1].gain_low if self.contributions else None

    @property
    def gain_high(self) -> float | None:
        return self.contributions[-1].gain_high if self.contributions else None

    @property
    def is_present(self) -> bool:
        """Whether the model has it."""
        return self.outcome in ("living", "kept")

    def enter(self, epoch: int, stage: Stage, reason: str, outcome: Outcome) -> None:
        """Note the entry into a stage, and the outcome that the seed has in it."""
        self.stages.append(Step(epoch, stage, reason))
        self.outcome, self.ended = outcome, None if outcome == "living" else epoch

    def copy(self) -> SeedRecord:
        """Return a copy, which stays as it is when the training goes on."""
        return msgspec.structs.replace(self, stages=list(self.stages), contributions=list(self.contributions))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for pages and tables: the fields, with stages by name, and the present stage and its reason."""
        stages = [{"epoch": step.epoch, "stage": step.stage.name, "reason": step.reason} for step in self.stages]
        return {**msgspec.to_builtins(self), "stages": stages, "stage": self.stage.name, "why": self.why}


class Rollback(msgspec.Struct, frozen=True):
    """A rollback by the governor to the state after an earlier epoch."""

    epoch: int
    to_epoch: int
    reason: str


class Ledger(msgspec.Struct, Displayed):
    """All seeds of one run in the order of their birth, with the refused actions and the rollbacks."""

    seeds: list[SeedRecord] = []
    refused: list[ActionRefused] = []
    rollbacks: list[Rollback] = []

    @classmethod
    def of(cls, events: Iterable[Event]) -> Ledger:
        """Return the ledger of these events."""
        ledger = cls()
        for event in events:
            ledger.take(event)
        return ledger

    def seed(self, number: int) -> SeedRecord | None:
        """Return the seed with this number; None if there is none."""
        if 0 < number <= len(self.seeds) and self.seeds[number - 1].number == number:
            return self.seeds[number - 1]
        return next((seed for seed in self.seeds if seed.number == number), None)  # of a log whose beginning is missing

    # Events

    def take(self, event: Event) -> None:
        """Fold an event into the records. Events about other things change nothing."""
        match event:
            case StageEntered(number=int()):
                self._take_stage(event)
            case Measured():
                seed = self.seed(event.number)
                if seed is not None:
                    seed.contributions.append(
                        Gain(event.epoch, event.gain, event.gain_low, event.gain_high, event.rent, event.unit, event.count)
                    )
                    seed.rent = event.rent
            case EpochEnded():
                for view in event.slots:
                    self._take_view(view, event.epoch)
            case RolledBack():
                self._take_rollback(event)
            case BestRestored():
                for one in event.back:
                    self._bring_back(one, event.last_epoch, f"the state after epoch {event.epoch} was restored")
            case ActionRefused():
                self.refused.append(event)

    def _take_stage(self, event: StageEntered) -> None:
        assert event.number is not None
        stage, seed = Stage[event.stage], self.seed(event.number)
        if stage is Stage.GERMINATED:
            # A seed that already has the number was lost, because the training went on from an earlier checkpoint.
            self.seeds, seed = [other for other in self.seeds if other.number < event.number], None
        if seed is None:
            birth = event.birth
            seed = SeedRecord(
                number=event.number,
                slot=event.slot,
                blueprint=event.blueprint,
                raise_mode="" if birth is None else birth.raise_mode,
                born=event.epoch,
                reason=event.reason,
                parameters=0 if birth is None else birth.parameters,
                flops=0 if birth is None else birth.flops,
                after=None if birth is None else birth.after,
            )
            self._add(seed)
        outcomes: dict[Stage, Outcome] = {Stage.FOSSILIZED: "kept", Stage.PRUNED: "pruned"}
        seed.enter(event.epoch, stage, event.reason, outcomes.get(stage, "living"))

    def _add(self, seed: SeedRecord) -> None:
        self.seeds = sorted([*self.seeds, seed], key=lambda one: one.number)

    def _take_view(self, view: SlotView, epoch: int) -> None:
        """Note how a seed is at the end of an epoch."""
        if view.number is None:
            return
        seed = self.seed(view.number)
        if seed is None:  # it was born before the first of these events
            seed = SeedRecord(view.number, view.slot, view.blueprint or "", "", epoch - view.age, "", view.parameters, view.flops or 0)
            seed.enter(epoch, Stage[view.stage], "", "kept" if view.stage == Stage.FOSSILIZED.name else "living")
            self._add(seed)
        seed.alpha, seed.age, seed.health = view.alpha, view.age, view.health
        seed.skipped += view.skipped
        if seed.ended is None or seed.ended == epoch:  # a kept seed keeps the rent with which it was kept
            seed.rent = view.rent

    def _take_rollback(self, event: RolledBack) -> None:
        self.rollbacks.append(Rollback(event.epoch, event.to_epoch, event.reason))
        why = f"the governor went back: {event.reason}"
        for number in event.gone:
            seed = self.seed(number)
            if seed is not None:
                seed.enter(event.epoch, Stage.PRUNED, why, "rolled back")
        for one in event.back:
            self._bring_back(one, event.epoch, why)
        # The model is as it was before later measurements.
        for seed in self.seeds:
            if seed.is_present:
                seed.contributions = [gain for gain in seed.contributions if gain.epoch <= event.to_epoch]

    def _bring_back(self, back: SeedBack, epoch: int, why: str) -> None:
        seed = self.seed(back.number)
        if seed is not None:
            seed.enter(epoch, Stage[back.stage], f"it is back: {why}", back.outcome)
            seed.brought_back += back.is_protected

    # Tables

    def count(self, outcome: Outcome) -> int:
        return sum(seed.outcome == outcome for seed in self.seeds)

    def card(self) -> Card:
        """Return all seeds for notebooks."""
        outcomes = [(outcome, str(self.count(outcome))) for outcome in get_args(Outcome)]
        others = [("refused actions", str(len(self.refused))), ("rollbacks", str(len(self.rollbacks)))]
        return Card(f"Ledger of {len(self.seeds):,} seeds", [*outcomes, *others], LEDGER_HEADING, ledger_rows(self.seeds, is_short=True))

    def table(self) -> str:
        """Return a text table with one line per seed."""
        return aligned([LEDGER_HEADING, *ledger_rows(self.seeds)]) if self.seeds else "no seed was tried"

    def analytics(self) -> str:
        """Return a text table with one line per blueprint: tried, kept, pruned, rolled back, mean cost of removal, mean size."""
        return aligned([ANALYTICS_HEADING, *analytics_rows(self.seeds)]) if self.seeds else "no blueprint was tried"


def ledger_rows(seeds: Iterable[SeedRecord], *, is_short: bool = False) -> list[Row]:
    """Return one row per seed, with the columns of LEDGER_HEADING. With `is_short`, intervals are written as ±."""
    return [
        (
            str(seed.number),
            seed.slot,
            seed.blueprint,
            f"epoch {seed.born}",
            seed.outcome,
            with_interval(seed.gain, seed.gain_low, seed.gain_high, is_short=is_short),
            figure(seed.rent),
            f"{seed.parameters:,}",
            seed.why,
        )
        for seed in seeds
    ]


def analytics_rows(seeds: Sequence[SeedRecord]) -> list[Row]:
    """Return one row per blueprint, with the columns of ANALYTICS_HEADING."""
    rows: list[Row] = []
    for name in dict.fromkeys(seed.blueprint for seed in seeds):
        some = [seed for seed in seeds if seed.blueprint == name]
        gains = [seed.gain for seed in some if seed.outcome == "kept" and seed.gain is not None]
        counts = [str(sum(seed.outcome == outcome for seed in some)) for outcome in ("kept", "pruned", "rolled back")]
        mean_gain = figure(sum(gains) / len(gains)) if gains else NONE
        rows.append((name, str(len(some)), *counts, mean_gain, f"{sum(seed.parameters for seed in some) / len(some):,.0f}"))
    return rows
