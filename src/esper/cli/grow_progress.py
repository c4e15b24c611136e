"""The progress of a growing model, as the terminal shows it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.cli import progress
from esper.growth.events import ActionRefused, GrowthFinished, SlotView, StageEntered
from esper.growth.lifecycle.stages import OCCUPIED, Stage
from esper.growth.report.story import Remark, metric_in_words
from esper.growth.report.summary import GrowthProgress
from esper.runs import EventRecord
from esper.runs.stages import STAGES
from esper.text_table import added, counted, figure, shortened, with_interval

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 16
_BAR_WIDTH = 20
WIDE = 100  # width in columns from which intervals are shown
_MAX_SLOTS = 12  # rows; further empty slots are only counted
_MAX_REMARKS = 4
_MAX_METRICS = 4


class GrowProgress(GrowthProgress, progress.Progress):
    """`GrowthProgress` with a live view."""

    def take(self, record: EventRecord) -> bool:
        self.is_over |= isinstance(record.event, GrowthFinished)
        return self.take_event(record.event)

    def notice(self, record: EventRecord) -> str | None:
        return self.remark_on(record.event) or super().notice(record)

    def plain_notice(self, record: EventRecord) -> str | None:
        """Return a line for every change in a slot, with its reason."""
        match record.event:
            case StageEntered() as entered if entered.stage not in (Stage.EMBARGOED.name, Stage.DORMANT.name):
                word = STAGES[entered.stage].word
                return f"epoch {entered.epoch}: {entered.blueprint} after {entered.slot} {word}: {entered.reason}"
            case ActionRefused() as refused:
                return f"epoch {refused.epoch}: refused to {refused.action} {refused.slot}: {refused.reason}"
        return None

    def view(self, width: int) -> RenderableType:
        slots, remarks = _slots(self.last.slots, width), _remarks(self.story.remarks)
        return Group(_heading(self, width), _losses(self), Text(), slots, Text(), remarks)


def _heading(progress: GrowProgress, width: int) -> RenderableType:
    last, rollbacks = progress.last, len(progress.story.rollbacks)
    line = Table.grid(padding=(0, 2, 0, 0))
    cells: list[RenderableType] = [
        ProgressBar(
            total=1.0, completed=min(last.epoch / max(progress.planned, 1), 1.0), width=_BAR_WIDTH if width >= WIDE else _BAR_WIDTH // 2
        ),
        Text(f"epoch {last.epoch}/{progress.planned}", style="bold"),
        Text(progress.left),
        Text(progress.speed, style="dim"),
        Text(counted(rollbacks, "rollback"), style="red" if rollbacks else "dim"),
    ]
    for _ in cells:
        line.add_column(no_wrap=True)
    line.add_row(*cells)
    return line


def _losses(progress: GrowProgress) -> RenderableType:
    story, last = progress.story, progress.last
    host = story.began.parameters if story.began is not None else last.parameters
    best = min(story.epochs, key=lambda epoch: epoch.val_loss)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    train, validation = [epoch.train_loss for epoch in story.epochs], [epoch.val_loss for epoch in story.epochs]
    more = added(last.parameters - host, host) if last.parameters != host else "none added"
    grid.add_row("train", figure(last.train_loss), Text(sparkline(train), style="dim"), f"parameters {last.parameters:,}  ({more})")
    best_text = f"best {figure(best.val_loss)} after epoch {best.epoch}"
    grid.add_row("val", Text(figure(last.val_loss), style="bold"), Text(sparkline(validation), style="blue"), best_text)
    for name, value in list(last.metrics.items())[:_MAX_METRICS]:
        curve = sparkline([epoch.metrics.get(name, math.nan) for epoch in story.epochs])
        grid.add_row(Text(shortened(name, 14)), metric_in_words(name, value), Text(curve, style="blue"), "")
    return grid


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Draw the last values as blocks; the highest is a full block.

    >>> sparkline([3.0, 2.0, 1.0, float("nan"), 1.0])
    '█▅▁ ▁'
    """
    recent = values[-width:]
    finite = [value for value in recent if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = (high - low) / (len(_SPARKS) - 1) or 1.0
    return "".join(_SPARKS[round((value - low) / step)] if abs(value) < float("inf") else " " for value in recent)


def _slots(views: Sequence[SlotView], width: int) -> RenderableType:
    """Return a table of the slots. If not all fit, slots with seeds come first."""
    shown = list(views)
    if len(shown) > _MAX_SLOTS:
        shown = sorted(shown, key=lambda view: Stage[view.stage] not in OCCUPIED)[:_MAX_SLOTS]
        shown = [view for view in views if view in shown]
    table = Table(box=None, padding=(0, 2 if width >= WIDE else 1, 0, 0), pad_edge=False, header_style="dim")
    for name in ("slot", "stage", "blueprint"):
        table.add_column(name, no_wrap=True)
    for name in ("alpha", "age", "cost of removal", "rent"):
        table.add_column(name, no_wrap=True, justify="right")
    for view in shown:
        table.add_row(*_slot_cells(view, width))
    left_out = len(views) - len(shown)
    return Group(table, Text(f"and {left_out} more slots", style="dim")) if left_out else table


def _slot_cells(view: SlotView, width: int) -> list[RenderableType]:
    look = STAGES[view.stage]
    stage = Text(look.word, style=look.style)
    slot = Text(shortened(view.slot, 40 if width >= WIDE else 18))
    if Stage[view.stage] not in OCCUPIED:
        return [slot, stage, *[Text("–" if column == 0 else "", style="dim") for column in range(5)]]
    return [
        slot,
        stage,
        Text(shortened(view.blueprint or "", 30 if width >= WIDE else 16)),
        f"{view.alpha:.2f}",
        str(view.age),
        Text(with_interval(view.gain, view.gain_low, view.gain_high, is_short=width < WIDE)),
        figure(view.rent),
    ]


def _remarks(remarks: Sequence[Remark]) -> RenderableType:
    """Show the newest remark in full and older ones on a line each."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, justify="right", style="dim")
    grid.add_column(overflow="fold")
    recent = remarks[-_MAX_REMARKS:]
    for item in recent:
        epochs = str(item.first) if item.first == item.last else f"{item.first}–{item.last}"
        style = "red" if item.is_trouble else ("" if item is recent[-1] else "dim")
        text = Text(item.text, style=style, no_wrap=item is not recent[-1], overflow="fold" if item is recent[-1] else "ellipsis")
        grid.add_row(epochs, text)
    return grid
