"""`esper report` writes the report of a run of any kind. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from esper.cli.command import FAILED, CommandError, CommandResult
from esper.cli.parse import parse
from esper.config import Config

DESCRIPTION = """Writes report.html into the folder of a run, from what happened in it so far: main figures, curves, health, evaluation,
settings; for a growth run also the network, the lives of its seeds, and the difference to its twin. The page needs no internet."""


class ReportArguments(Config):
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of the run"""


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(ReportArguments, argv, prog, description=DESCRIPTION)
    from esper.growth.report.html import write_report
    from esper.runs.catalog import open_run
    from esper.runs.events import EventError
    from esper.runs.folder import RunError
    from esper.runs.report import write_run_report

    if not arguments.run.is_dir():
        raise CommandError(f"there is no folder {arguments.run}; give the folder of a run")
    try:
        kind = open_run(arguments.run).kind
        path = write_report(arguments.run) if kind == "growth" else write_run_report(arguments.run)
    except RunError as error:
        raise CommandError(str(error)) from error
    except EventError as error:
        raise CommandError(f"no report can be made of {arguments.run}: {error}", exit_code=FAILED) from error
    print(path)
    return CommandResult({"report": str(path)})
