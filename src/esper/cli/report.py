"""`esper report` writes the report of a run of any kind. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from esper.cli.command import FAILED, CommandError, CommandResult
from esper.cli.parse import parse
from esper.config import Config

DESCRIPTION = """Writes report.html into the folder of a run, from what happened in it so far. It tells the same story as the run's page in
esper watch: main figures, curves, health, use of the machine, settings. The report of a growth run also has the difference to its twin, the
network, the lives of its seeds, the governor and the probe; that of a controller its utility by rent and cell, and its hosts; that of a
player its win rates and ratings. The page is one file and needs no internet."""


class ReportArguments(Config):
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of the run"""


def run(argv: list[str], prog: str) -> CommandResult:
    return write(parse(ReportArguments, argv, prog, description=DESCRIPTION).run)


def write(folder: Path, *, only: str | None = None) -> CommandResult:
    """Write the report of a run and print its path. With `only`, a run of another kind is an error."""
    from esper.growth.report.html import write_report
    from esper.runs.catalog import open_run
    from esper.runs.events import EventError
    from esper.runs.folder import RunError, check_holds_a_run
    from esper.runs.foreign import clean
    from esper.runs.report import write_run_report

    if only is None and not folder.is_dir():
        raise CommandError(f"there is no folder {folder}; give the folder of a run")
    try:
        if only is not None:
            check_holds_a_run(folder, only)
        kind = only or open_run(folder).kind
        path = write_report(folder) if kind == "growth" else write_run_report(folder)
    except RunError as error:
        raise CommandError(str(error)) from error
    except EventError as error:
        raise CommandError(f"no report can be made of {folder}: {error}", exit_code=FAILED) from error
    print(clean(path))
    return CommandResult({"report": str(path)})
