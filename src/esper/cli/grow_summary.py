"""The summary of a run of `esper grow` that is over: on the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.cli.command import how_to_resume
from esper.cli.grow_progress import WIDE
from esper.experiment.config import GrowTaskConfig
from esper.experiment.training import ExperimentResult
from esper.growth.lifecycle.ledger import LEDGER_HEADING, Row, ledger_rows
from esper.growth.report import summary
from esper.growth.report.story import Story
from esper.growth.run import MODEL


def print_summary(result: ExperimentResult, config: GrowTaskConfig) -> None:
    console = Console(highlight=False)
    if result.status == "had finished":
        console.print(Text(f"{result.folder} had already finished its {config.epochs} epochs; ask for more with --epochs"))
    console.print()
    console.print(Text(summary.headline(result.story, result.twin), style="bold"))
    heading, rows = summary.comparison(result.story, result.twin)
    if rows:
        console.print()
        console.print(_table(heading, rows, right=range(1, len(heading))))
        for sentence in summary.about_chance(result.twin):
            console.print(Text(sentence))
    if result.story.seeds:
        console.print()
        _print_ledger(console, result.story)
    for sentence in summary.about_rent(result.story, config.rent):
        console.print()
        console.print(Text(sentence))
    console.print()
    if result.status != "stopped":
        _print_place(console, "model", result.folder / MODEL)
    _print_place(console, "report", result.report)
    if result.status == "stopped":
        console.print(Text(f"a checkpoint is saved; {how_to_resume('grow', result.folder)}"), soft_wrap=True)


def _print_place(console: Console, name: str, path: Path) -> None:
    console.print(Text(f"{name:<8}{path}"), soft_wrap=True)  # on one line, so that it can be copied


def _print_ledger(console: Console, story: Story) -> None:
    """Print the ledger, and the reasons below it, where they have room."""
    rows = ledger_rows(story.seeds, is_short=console.width < WIDE)
    console.print(_table(LEDGER_HEADING[:-1], [row[:-1] for row in rows], right=(0, 5, 6, 7)))
    for row in rows:
        console.print(Text(f"  {row[0]}: {row[-1]}", style="dim"))
    console.print(Text(summary.ABOUT_REMOVAL, style="dim"))


def _table(heading: Row, rows: Sequence[Row], *, right: Sequence[int]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for column, name in enumerate(heading):
        table.add_column(name, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def as_json(result: ExperimentResult) -> dict[str, Any]:
    figures = {"status": result.status, **_figures(result.story), "run": str(result.folder), "report": str(result.report)}
    model = result.folder / MODEL
    figures["model"] = str(model) if model.exists() else None
    if result.twin is not None:
        figures["twin"] = _figures(result.twin)
        figures["accuracy_difference"] = _difference(result.twin)
    return figures


def _difference(twin: Story) -> dict[str, Any] | None:
    """Return the difference in test accuracy, grown minus twin, with its 95 % interval."""
    compared = twin.compared
    if compared is None:
        return None
    return {"estimate": compared.accuracy_difference, "low": compared.low, "high": compared.high, "samples": compared.samples}


def _figures(story: Story) -> dict[str, Any]:
    finished, tested = story.finished, story.tested
    return {
        "epochs": finished.epoch if finished is not None else len(story.epochs),
        "best_epoch": None if finished is None else finished.best_epoch,
        "test_accuracy": None if tested is None else tested.accuracy,
        "test_loss": None if tested is None else tested.loss,
        "val_loss": None if finished is None else finished.val_loss,
        "metrics": {} if finished is None else finished.metrics,
        "val_loss_before": None if finished is None else finished.val_loss_before,
        "params": None if finished is None else finished.parameters,
        "params_added": None if finished is None else finished.parameters_added,
        "flops": None if finished is None else finished.flops,
        "train_gflops": None if finished is None else finished.total_gflops,
        "seeds": len(story.kept()),
        "tried": len(story.seeds),
        "rollbacks": len(story.rollbacks),
        "seconds": round(story.seconds, 3),
    }
