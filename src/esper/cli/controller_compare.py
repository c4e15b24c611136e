"""`esper controller compare` compares controllers on the same hosts, seed by seed, with a table for each level of rent."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from esper.cli.command import CommandError, CommandResult
from esper.cli.parse import gather_option, parse, take_option
from esper.config import ConfigError, load
from esper.controller.config import BUILTIN_CONTROLLERS, CompareConfig, ControllerConfig, DomainConfig
from esper.experiment.config import is_file_name
from esper.text_table import did_you_mean

if TYPE_CHECKING:
    from esper.tasks import Task


class CompareArguments(CompareConfig):
    config: Path | None = None
    """TOML file with values for any of these options"""

    def settings(self) -> CompareConfig:
        return CompareConfig(**{name: getattr(self, name) for name in CompareConfig.__struct_fields__})


def compare_words(argv: list[str]) -> list[str]:
    """Replace short options: `--task` and `--host`, once for each, and `--controllers` as one word with commas.

    >>> compare_words(["--controllers", "never,a.safetensors", "--task", "digits", "--host=4-8-16", "--host", "5-10-20"])
    ['--controllers', 'never', 'a.safetensors', '--tasks', 'digits', '--hosts', '4-8-16', '5-10-20']
    """
    words: list[str] = []
    for word in argv:
        name, sign, values = word.partition("=")
        if name == "--controllers" and sign:
            words += [name, *values.split(",")]
        else:
            words += word.split(",") if words[-1:] == ["--controllers"] else [word]
    return gather_option(gather_option(words, "--task", "--tasks"), "--host", "--hosts")


def compare_defaults(argv: list[str]) -> CompareArguments:
    """Return the values that the options start from: a TOML file, or the defaults."""
    path = take_option(list(argv), "--config")
    base = CompareConfig() if path is None else load(CompareConfig, path)
    return CompareArguments(**{name: getattr(base, name) for name in CompareConfig.__struct_fields__})


DESCRIPTION = """Compares controllers on the same networks with the same data orders, seed by seed, and counts every FLOP.

  esper controller compare --controllers never,random,schedule,heuristic,runs/first/controller.safetensors --task digits --seeds 20

The first file is compared with all others, with paired 95 % intervals and p values after Holm. The hosts' seeds were never trained
on. Utility is the nats of test loss gained over the host that never grows, less the rent; there is a table for each level of rent. Small
hosts trained longer and the final size from the start, both at the same FLOPs, take part too; --sweep 2-4-8 4-8-16 ... adds static sizes.
--task and --host may be given several times. With --json, the last line holds all runs."""


def run(argv: list[str], prog: str) -> CommandResult:
    words = compare_words(argv)
    config = parse(CompareArguments, words, prog, default=compare_defaults(words), description=DESCRIPTION).settings()
    with _user_errors():
        load_task = _checked(config)
        from esper.controller.compare import compare

        with CompareProgress(sys.stdout) as progress:
            comparison = compare(config, load_task, on_progress=progress.add)
    print(f"\n{comparison.tables()}")
    return CommandResult(comparison.to_builtins())


def _checked(config: CompareConfig) -> Callable[[str], Task]:
    """Check files, tasks and hosts before anything is trained; return the function that loads the tasks."""
    if config.seeds * len(config.tasks) * len(config.hosts) < 2:
        raise CommandError("one pair has no interval; ask for 2 --seeds at least, better for 20")
    try:  # the horizon must fit the rule for training a controller
        ControllerConfig(growth=config.growth, domain=DomainConfig(horizon=(config.horizon, config.horizon)))
    except ConfigError as error:
        raise CommandError(f"--horizon: expected {error.expected}, got {config.horizon}") from error
    from esper.controller.learned import load_controller
    from esper.controller.training import load_task_from

    for name in config.files:
        if not is_file_name(name):
            hint = did_you_mean(
                name, BUILTIN_CONTROLLERS, otherwise=f"there are {', '.join(BUILTIN_CONTROLLERS)}, and paths of controller files"
            )
            raise CommandError(f"no controller is named {name!r}; {hint}")
        load_controller(name)
    load_task = functools.cache(functools.partial(load_task_from, config.data_dir))
    for task in map(load_task, config.tasks):
        for host in (*config.hosts, *config.sweep):
            task.make_host(host, seed=0)
    return load_task


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Turn mistakes of the user into a CommandError of one line."""
    from esper.controller.learned import ControllerError
    from esper.fleet.config import FleetError
    from esper.growth.config import GrowthError
    from esper.runs.folder import RunError
    from esper.tasks import TaskError

    try:
        yield
    except (ControllerError, FleetError, GrowthError, RunError, TaskError) as error:
        raise CommandError(str(error)) from error


class CompareProgress:
    """Shows what is being trained and how fast: a line that changes on a terminal, elsewhere a line per setting."""

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
