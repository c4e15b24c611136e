"""The story of a growing run, folded from its events. The terminal, the final table and the report show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from esper.growth.events import (
    ActionRefused,
    BestRestored,
    EpochEnded,
    FinalTest,
    GrowthFinished,
    GrowthStarted,
    PassedOver,
    Probed,
    RolledBack,
    StageEntered,
    TwinCompared,
    Widened,
)
from esper.growth.lifecycle.ledger import Ledger, SeedRecord
from esper.runs import Event, read
from esper.runs.anomalies import Anomaly
from esper.runs.folder import EVENTS, RunError
from esper.text_table import figure


@dataclass
class Remark:
    """A decision or event with its reason, repeated after every epoch from `first` to `last`."""

    first: int
    last: int
    text: str
    is_trouble: bool = False


@dataclass
class Story:
    """A run as far as its events go."""

    began: GrowthStarted | None = None  # first start
    started: GrowthStarted | None = None  # last start, after a resume
    epochs: list[EpochEnded] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    rollbacks: list[RolledBack] = field(default_factory=list)
    probes: list[Probed] = field(default_factory=list)
    passed_over: list[PassedOver] = field(default_factory=list)
    widened: list[Widened] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)  # equal ones in a row are one
    finished: GrowthFinished | None = None
    tested: FinalTest | None = None
    compared: TwinCompared | None = None  # only in the story of a twin

    def take(self, event: Event) -> None:
        """Add an event to the story."""
        self.ledger.take(event)
        match event:
            case GrowthStarted():
                self.began, self.started = self.began or event, event
                self.finished = self.tested = self.compared = None  # a resumed run is not finished any more
                if event.note:
                    self._remark(event.epoch, event.note)
            case StageEntered(stage="GERMINATED", epoch=0):  # no EpochEnded event holds the decision before the first epoch
                self._remark(0, f"germinate {event.slot}: {event.reason}")
            case StageEntered(stage="PRUNED"):
                self._remark(event.epoch, f"pruned {event.slot}: {event.reason}")
            case EpochEnded():
                self.epochs.append(event)
                self._remark(event.epoch, event.decision)
            case RolledBack():
                self.rollbacks.append(event)
                self._remark(event.epoch, f"went back to epoch {event.to_epoch}: {event.reason}", is_trouble=True)
            case BestRestored():
                self._remark(event.last_epoch, restored_in_words(event))
            case ActionRefused():
                self._remark(event.epoch, f"refused to {event.action} {event.slot}: {event.reason}")
            case Probed():
                self.probes.append(event)
            case PassedOver():
                self.passed_over.append(event)
            case Widened():
                self.widened.append(event)
            case Anomaly():
                self._remark(event.step, event.in_words(), is_trouble=not event.has_ended)
            case GrowthFinished():
                self.finished = event
            case FinalTest():
                self.tested = event
            case TwinCompared():
                self.compared = event

    @property
    def seeds(self) -> list[SeedRecord]:
        return self.ledger.seeds

    @property
    def seconds(self) -> float:
        """Seconds of all epochs, including decisions and measurements, over all sessions of the run."""
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and cannot be resumed."""
        return self.finished is not None and self.finished.why != "stopped"

    def seed_in(self, slot: str) -> SeedRecord | None:
        """Return the last seed that grew in a slot."""
        return next((seed for seed in reversed(self.seeds) if seed.slot == slot), None)

    def kept(self) -> list[SeedRecord]:
        return [seed for seed in self.seeds if seed.outcome == "kept"]

    def _remark(self, epoch: int, text: str, *, is_trouble: bool = False) -> None:
        """Add a remark, or extend the last one if it has the same text."""
        last = self.remarks[-1] if self.remarks else None
        if last is not None and last.text == text:
            last.last = epoch
        elif text:
            self.remarks.append(Remark(epoch, epoch, text, is_trouble))


def is_share(name: str) -> bool:
    """Return whether a metric is shown in percent: those that are called an accuracy.

    >>> is_share("accuracy"), is_share("top-5 accuracy"), is_share("perplexity")
    (True, True, False)
    """
    return "accuracy" in name.lower()


def metric_in_words(name: str, value: float) -> str:
    """Return the value of a metric as text.

    >>> metric_in_words("accuracy", 0.925), metric_in_words("perplexity", 3.25)
    ('92.50%', '3.250')
    """
    return f"{value:.2%}" if is_share(name) else figure(value, 3)


def restored_in_words(event: BestRestored) -> str:
    """Return a line about the epoch whose state is the result."""
    what, best, last = "loss", figure(event.val_loss), figure(event.last_val_loss)
    if event.value is not None and event.last_value is not None:
        what, best, last = event.by, metric_in_words(event.by, event.value), metric_in_words(event.by, event.last_value)
    left_out = f"; taken out: {', '.join(event.left_out)}" if event.left_out else ""
    return f"the result is the state after epoch {event.epoch}: validation {what} {best}, against {last} at the end{left_out}"


def read_story(folder: Path | str) -> Story:
    """Return the story of the run in a folder, finished or not."""
    path = Path(folder) / EVENTS
    if not path.is_file():
        raise RunError(f"there is no run in {folder}: it has no {EVENTS}; give the folder of a run")
    story = Story()
    for record in read(path):
        story.take(record.event)
    return story
