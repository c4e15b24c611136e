"""`esper controller compare` compares controllers in many cells and on the same hosts, with a table for each price of rent."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from esper.cli.command import CommandError, CommandResult
from esper.cli.parse import parse, take_option
from esper.config import load
from esper.controller.config import CompareConfig

if TYPE_CHECKING:
    from esper.tasks import Task


class CompareArguments(CompareConfig):
    config: Path | None = None
    """TOML file with values for any of these options"""

    def settings(self) -> CompareConfig:
        return CompareConfig(**{name: getattr(self, name) for name in CompareConfig.__struct_fields__})


def compare_defaults(argv: list[str]) -> CompareArguments:
    """Return the values that the options start from: a TOML file, or the defaults."""
    path = take_option(list(argv), "--config")
    base = CompareConfig() if path is None else load(CompareConfig, path)
    return CompareArguments(**{name: getattr(base, name) for name in CompareConfig.__struct_fields__})


DESCRIPTION = """Compares controllers in cells (kinds of data, host and training) that are drawn at random, at several prices of rent.

  esper controller compare --controllers runs/first/controller.safetensors --cells 12 --hosts 3 --sources digits-1d --families conv mlp

All controllers decide for the same hosts. The result of a host is its gain in test loss over the host that never grows, in units of the
loss scale, minus the price times its size. The first file is compared with plans, rules, random moves and the heuristic, and with controls
at the same FLOPs; without a file, the heuristic is. Files that differ in a number only, such as value_1.safetensors and value_2.safetensors
or training_1/controller.safetensors and so on, are trainings of one kind and are compared together. Intervals are over cells, and over
trainings if there are several. With --json, the last line holds the records of all hosts."""


def run(argv: list[str], prog: str) -> CommandResult:
    config = parse(CompareArguments, argv, prog, default=compare_defaults(argv), description=DESCRIPTION).settings()
    with _user_errors():
        load_task = _checked(config)
        from esper.controller.compare import compare
        from esper.controller.compare_tables import tables

        with CompareProgress(sys.stdout) as progress:
            comparison = compare(config, load_task, on_progress=progress.add)
    print(f"\n{tables(comparison)}")
    return CommandResult(comparison.to_builtins())


def _checked(config: CompareConfig) -> Callable[[str], Task]:
    """Check files, tasks and hosts before anything is trained; return the function that loads the tasks."""
    from esper.controller.compare import cells_of, training_cells_of
    from esper.controller.learned import load_controller
    from esper.controller.trained import file_of
    from esper.controller.training import load_task_from

    for name in config.controllers:
        load_controller(file_of(name))
    load_task = functools.cache(functools.partial(load_task_from, config.data_dir))
    hosts = {(cell.source, cell.host): cell for cell in (*cells_of(config), *training_cells_of(config))}
    for cell in hosts.values():
        cell.task(load_task).make_host(cell.host, seed=0)
    return load_task


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Turn mistakes of the user into a CommandError of one line."""
    from esper.controller.description import ControllerError
    from esper.fleet.config import FleetError
    from esper.growth.config import GrowthError
    from esper.runs.folder import RunError
    from esper.tasks import TaskError

    try:
        yield
    except (ControllerError, FleetError, GrowthError, RunError, TaskError) as error:
        raise CommandError(str(error)) from error


class CompareProgress:
    """Shows what is being trained and how fast: a line that changes on a terminal, elsewhere a line per part."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._stream = stream
        self._live = Live(console=Console(file=stream), auto_refresh=False) if stream.isatty() else None
        self._what, self._decisions, self._began = "", 0, time.monotonic()

    def __enter__(self) -> CompareProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._what:
            self._print()

    def add(self, what: str, decisions: int) -> None:
        if self._live is None and self._what not in ("", what):
            self._print()
        self._what = what
        self._decisions += decisions
        if self._live is not None:
            from rich.text import Text

            self._live.start()
            self._live.update(Text(self._line(), no_wrap=True, overflow="ellipsis"), refresh=True)

    def _print(self) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {self._line()}", file=self._stream, flush=True)

    def _line(self) -> str:
        from esper.text_table import duration

        seconds = time.monotonic() - self._began
        return f"{self._what}  {self._decisions:,} decisions  {self._decisions / max(seconds, 1e-9):,.0f}/s  {duration(seconds)}"
