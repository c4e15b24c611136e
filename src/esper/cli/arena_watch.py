"""`esper arena watch`: a page in the browser that plays replays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from esper.cli.arena_players import mistakes
from esper.cli.outcome import CommandError, Outcome
from esper.cli.parse import parse
from esper.config import Config, NonNegativeInt
from esper.files import reason_of

DESCRIPTION = """Plays a replay, or those of a run, in the browser: terrain in 3D, units, shots, the zone, scores and what happened.

The page is on 127.0.0.1, which only this machine can reach, and loads nothing from the internet. Ctrl-C ends it. Replays are written by
--replay of esper arena eval and esper arena match. Needs the extra dashboard."""


class WatchArguments(Config):
    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE_OR_RUN")]
    """a replay, or the folder of a run with replays"""
    port: NonNegativeInt = 0
    """of the page; 0: any that is free"""
    show: bool = True
    """open the page in the browser"""


def run(argv: list[str], prog: str) -> Outcome:
    arguments = parse(WatchArguments, argv, prog, description=DESCRIPTION)
    if not arguments.path.exists():
        raise CommandError(f"there is no {arguments.path}; give a replay, or the folder of a run")
    from esper.dashboard.watch import list_replays, serve

    addresses: list[str] = []

    def announce(address: str) -> None:
        addresses.append(address)
        count = len(list_replays(arguments.path))
        what = f"{count} {'replay' if count == 1 else 'replays'} of {arguments.path}" if arguments.path.is_dir() else str(arguments.path)
        print(f"{address} plays {what}; Ctrl-C ends it", flush=True)

    with mistakes():
        try:
            serve(arguments.path, port=arguments.port, show=arguments.show, announce=announce)
        except ImportError as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(reason_of(error)) from error
    return Outcome({"address": addresses[0]})
