"""`esper grow report`: the report of a run that left none, or an older one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from esper.cli.outcome import FAILED, CommandError, Outcome
from esper.cli.parse import parse
from esper.config import Config

DESCRIPTION = "Writes report.html into the folder of a run, from what happened in it so far."


class ReportArguments(Config):
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of the run"""


def run(argv: list[str], prog: str) -> Outcome:
    arguments = parse(ReportArguments, argv, prog, description=DESCRIPTION)
    from esper.growth.report.html import write_report
    from esper.runs import EventError
    from esper.runs.folder import RunError, check_holds_a_run

    try:
        check_holds_a_run(arguments.run, "growth")
        path = write_report(arguments.run)
    except RunError as error:
        raise CommandError(str(error)) from error
    except EventError as error:
        raise CommandError(f"no report can be made of {arguments.run}: {error}", exit_code=FAILED) from error
    print(path)
    return Outcome({"report": str(path)})
