"""`esper watch`: show runs while they train and afterwards, in the browser or in the terminal. Imports no torch.

The texts of the terminal are made in `esper.cli.watch_views`; here are the command, the keys, and the window that scrolls.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from esper.cli.command import CommandError, CommandResult
from esper.cli.parse import parse
from esper.cli.run_text import TWIN_OF
from esper.config import Config, NonNegativeInt
from esper.files import reason_of
from esper.runs.folder import RunError, kind_of

if TYPE_CHECKING:
    from esper.cli.watch_views import Curve
    from esper.dashboard.data import Watcher
    from esper.runs.sections import Curves

ROOT = Path("runs")  # folder of runs unless another one is named
DESCRIPTION = """Shows runs in the browser: a table of all runs in a folder, and a page for each: curves, seeds, decisions, health.

  esper watch                                all runs in runs/
  esper watch runs/first                     one run
  esper watch --terminal runs/a runs/b       compare two runs, in this terminal

The page is on 127.0.0.1, which only this machine can reach, loads nothing from the internet, and changes no run. It follows runs while they
train. Ctrl-C ends it. Needs the extra dashboard; --terminal shows the same in this terminal and needs no extra.

Keys in the terminal: arrows or j and k move, Space and b turn pages, Enter opens a run, x chooses runs and c compares them, o opens the
lives of seeds and hosts, all lists and the settings, < and > change the round of a controller's hosts, r shows all runs, q ends."""

EVERY_S = 1.0
AGES_EVERY_S = 5.0  # a run that writes nothing is looked at anew this often, since it may have died
OF_TWINS = ("epoch_ended/val_loss", "epoch_ended/metrics/")  # series of twins that are shown beside those of their runs
COMPARED = 8  # series that a comparison shows, at most


class WatchArguments(Config):
    paths: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[RUN_OR_FOLDER ...]")] = (ROOT,)
    """runs, or folders with runs; several runs are compared"""
    terminal: bool = False
    """show the runs in this terminal; print them once if the output is no terminal"""
    port: NonNegativeInt = 0
    """port of the page; 0: any free one"""
    show: bool = True
    """open the page in the browser"""


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(WatchArguments, argv, prog, description=DESCRIPTION)
    paths = list(dict.fromkeys(arguments.paths)) or [ROOT]
    for path in paths:
        if not path.is_dir():
            hint = "start a run, or give the folder of yours" if path == ROOT else "give a run, or a folder with runs"
            raise CommandError(f"there is no folder {path}; {hint}")
    if arguments.terminal:
        return _show_in_terminal(paths)
    from esper.dashboard.watch import serve_runs

    addresses: list[str] = []

    def announce(address: str) -> None:
        addresses.append(address)
        print(f"{address} shows the runs in {', '.join(map(str, paths))}; Ctrl-C ends it", flush=True)

    try:
        serve_runs(*paths, port=arguments.port, show=arguments.show, announce=announce)
    except (ImportError, RunError) as error:
        raise CommandError(f"{error}, or use --terminal" if isinstance(error, ImportError) else str(error)) from error
    except OSError as error:
        raise CommandError(reason_of(error)) from error
    return CommandResult({"address": addresses[0]})


# The terminal


def _show_in_terminal(paths: Sequence[Path]) -> CommandResult:
    """Show the table of the runs, one run or a comparison, again every second until q or Ctrl-C."""
    from esper.dashboard.data import Watcher

    watcher, console = Watcher(*paths), Console()
    screen = Screen(watcher, paths, has_keys=sys.stdout.isatty())
    if not sys.stdout.isatty():
        console.print(screen.view(console.width))
        return CommandResult({"runs": len(watcher)})
    with console.status("reading the runs"):
        first = screen.view(console.width)
    with _keys() as wait_for_keys, Live(Window(screen, first), console=console, auto_refresh=False, screen=True) as live:
        shown, size = first, console.size
        while not screen.is_over:
            keys = wait_for_keys(EVERY_S)
            for key in keys:
                screen.press(key, page=max(console.height - 2, 1))
            view = screen.view(console.width)
            if keys or view is not shown or console.size != size:
                live.update(Window(screen, view), refresh=True)
            shown, size = view, console.size
    return CommandResult({"runs": len(watcher)})


class Screen:
    """What the terminal shows: the table of runs, one run, or a comparison; and how keys change that."""

    def __init__(self, watcher: Watcher, paths: Sequence[Path], *, has_keys: bool) -> None:
        from esper.dashboard.data import name_in_address

        self.watcher, self.paths, self.has_keys = watcher, paths, has_keys
        names = [name_in_address(path) for path in paths if kind_of(path) is not None]
        is_all = len(names) == len(paths)
        self.run_name: str | None = names[0] if is_all and len(names) == 1 else None  # of the run that is shown
        self.compared: list[str] = names if is_all and len(names) > 1 else []  # names of the runs that are compared
        self.chosen: list[str] = []  # names of the runs that are chosen for a comparison
        self.rows: list[str] = []  # names of the runs in the table, from its first line
        self.here: str | None = None  # name of the run under the cursor
        self.is_open = not has_keys  # whether long lists are whole; what is printed once is whole
        self.back = 0  # rounds before the newest whose hosts are shown
        self.has_rounds = False  # whether the shown run has several of them
        self.top = 0  # first line of the window
        self.is_over = False
        self._kept: tuple[tuple[Any, ...], RenderableType] | None = None  # what the view of a run was made from, and the view

    def press(self, key: str, *, page: int) -> None:
        """React to a key. `page` is the number of lines of the window."""
        is_table = self.run_name is None and not self.compared
        steps = {"down": 1, "j": 1, "up": -1, "k": -1, "space": page, "pagedown": page, "b": -page, "pageup": -page}
        steps |= {"home": -(10**9), "g": -(10**9), "end": 10**9, "G": 10**9}
        if key == "q":
            self.is_over = True
        elif key in steps and is_table and self.rows:
            place = self.rows.index(self.here) if self.here in self.rows else 0
            self.here = self.rows[min(max(place + steps[key], 0), len(self.rows) - 1)]
        elif key in steps:
            self.top += steps[key]
        elif key == "o":
            self.is_open = not self.is_open
        elif key in ("<", ">"):
            self.back = max(self.back + (1 if key == "<" else -1), 0)
        elif key == "x" and is_table and self.here:
            self.chosen = [name for name in self.chosen if name != self.here] + ([self.here] if self.here not in self.chosen else [])
        elif key == "enter" and is_table and self.here:
            self.run_name, self.top, self.back = self.here, 0, 0
        elif key == "c" and len(self.chosen) > 1:
            self.run_name, self.compared, self.top = None, list(self.chosen), 0
        elif key in ("r", "escape") and not is_table:
            self.run_name, self.compared, self.top = None, [], 0

    def footer(self) -> str:
        """Return the keys that do something now."""
        if self.compared:
            return "↑ ↓ scroll · r all runs · q end"
        if self.run_name is not None:
            rounds = " · < > round" if self.has_rounds else ""
            return f"↑ ↓ scroll · o {'close' if self.is_open else 'open'} details{rounds} · r all runs · q end"
        chosen = f" · c compare {len(self.chosen)}" if len(self.chosen) > 1 else ""
        return f"↑ ↓ move · Enter open · x choose{chosen} · q end"

    def view(self, width: int) -> RenderableType:
        """Return what is shown now, with the newest events. The view of a run is the same object until something has changed."""
        if self.run_name is None:
            return self._new_view(width)
        files = self.watcher.stamp(self.run_name)
        made_from = (self.run_name, width, self.is_open, self.back, files, int(time.monotonic() / AGES_EVERY_S))
        if self._kept is None or self._kept[0] != made_from or not files:
            self._kept = made_from, self._new_view(width)
        return self._kept[1]

    def _new_view(self, width: int) -> RenderableType:
        from esper.cli.watch_views import comparison_view, run_view, runs_table
        from esper.runs.sections import SYSTEM, charts_of, system_figures

        self.watcher.refresh()
        if self.compared:
            found = self.watcher.compare(self.compared)
            return comparison_view(found, self._compared_curves(found), width=width)
        page = None if self.run_name is None else self.watcher.page(self.run_name)
        if self.run_name is not None and page is None:
            return Text(f"{', '.join(map(str, self.paths))} was moved or removed", style="bold red")
        if self.run_name is None or page is None:
            if not any(path.is_dir() for path in self.paths):
                return Text(f"{', '.join(map(str, self.paths))} was moved or removed", style="bold red")
            overview = self.watcher.overview()
            self.rows = [row["id"] for row in overview["runs"]]
            if self.has_keys and self.here not in self.rows:
                self.here = self.rows[0] if self.rows else None
            return runs_table(overview, width=width, here=self.here, chosen=self.chosen)
        rounds = page["controller"]["rounds"] if "controller" in page else []
        self.has_rounds = len(rounds) > 1
        if rounds:
            self.back = min(self.back, len(rounds) - 1)
            page["controller"]["hosts"] = self.watcher.hosts(self.run_name, rounds[-1 - self.back])
        run = self.watcher.run(self.run_name)
        wanted = ((), ()) if run is None else (charts_of(run), SYSTEM.get(run.kind, ()))
        curves, system = (self._curves(page, charts) for charts in wanted)
        return run_view(page, curves, system, system_figures(run) if run is not None else [], width=width, is_open=self.is_open)

    def _curves(self, page: dict[str, Any], wanted: Sequence[Curves]) -> list[Curve]:
        """Return the series of these charts, and beside them the validation loss and metrics of a twin."""
        from esper.cli.watch_views import Curve
        from esper.runs.sections import series_of

        assert self.run_name is not None
        names = [
            (curves.title, label if len(curves.series) > 1 or "" in curves.series else "", series)
            for curves in wanted
            for label, series in series_of(page["series"], curves).items()
        ]
        found = self.watcher.series(self.run_name, [series for *_, series in names], {}, None)["series"]
        shared = [series for *_, series in names if series in page.get("twin", ()) and series.startswith(OF_TWINS)]
        of_twin = self.watcher.series(self.run_name, shared, {}, None, twin=True)["series"] if shared else {}
        shown = []
        for title, label, series in names:
            shown.append(Curve(title, label, _known(found[series])))
            if series in of_twin:
                shown.append(Curve(title, f"twin: {label}", _known(of_twin[series])))
        if (losses := found.get(OF_TWINS[0])) is not None and page["growth"]["seeds"]:
            twin = of_twin.get(OF_TWINS[0])
            before = dict(zip(twin["steps"], twin["values"], strict=True)) if twin else dict.fromkeys(losses["steps"], losses["values"][0])
            pairs = [(before.get(step), loss) for step, loss in zip(losses["steps"], losses["values"], strict=True)]
            gains = [other - loss for other, loss in pairs if other is not None and loss is not None]
            shown.append(Curve("gain", "over the twin" if twin else "since the first epoch", gains))
        return shown

    def _compared_curves(self, found: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
        """Return the main series that all compared runs have: name -> run -> values."""
        from esper.runs.sections import charts_of, series_of

        first = self.watcher.run(found["runs"][0]["id"]) if found["runs"] else None
        charts = () if first is None else charts_of(first)
        wanted = [series for curves in charts for series in list(series_of(found["series"], curves).values())[:2]]
        curves: dict[str, dict[str, list[float]]] = {series: {} for series in wanted[:COMPARED]}
        for run in found["runs"]:
            own = self.watcher.series(run["id"], curves, {}, None)["series"]
            shared = [series for series in curves if series.startswith(OF_TWINS)]
            of_twin = self.watcher.series(run["id"], shared, {}, None, twin=True)["series"]
            for series, of_runs in curves.items():
                of_runs[run["id"]] = _known(own[series])
                if series in of_twin and (values := _known(of_twin[series])):
                    of_runs[run["id"] + TWIN_OF] = values
        return curves


def _known(series: dict[str, Any]) -> list[float]:
    return [value for value in series["values"] if value is not None]


class Window:
    """The lines of a view that fit into the terminal, and a line with the keys. A view that is longer can be scrolled."""

    def __init__(self, screen: Screen, view: RenderableType) -> None:
        self.screen, self.view = screen, view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.view, options.update(height=None), pad=False)
        room, screen = max((options.height or console.height) - 1, 1), self.screen
        if screen.here is not None and screen.run_name is None and not screen.compared and screen.here in screen.rows:
            cursor = screen.rows.index(screen.here) + 1  # below the heading
            screen.top = max(min(screen.top, cursor - 1), cursor - room + 1)
        screen.top = min(max(screen.top, 0), max(len(lines) - room, 0))
        shown = lines[screen.top : screen.top + room]
        for line in [*shown, *([[]] * (room - len(shown)))]:
            yield from line
            yield Segment.line()
        place = f"{screen.top + 1} to {screen.top + len(shown)} of {len(lines)} lines · " if len(lines) > room else ""
        yield Text(f"{place}{screen.footer()}", style="dim", no_wrap=True, overflow="ellipsis")


_KEY = re.compile(r"\x1b\[[0-9;]*[~A-Za-z]|\x1bO[A-Za-z]|.", re.DOTALL)
_NAMES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x1b[5~": "pageup", "\x1b[6~": "pagedown", "\x1b[H": "home",
    "\x1b[F": "end", "\x1b[1~": "home", "\x1b[4~": "end", "\x1b": "escape", "\n": "enter", "\r": "enter", " ": "space",
}  # fmt: skip


def keys_in(text: str) -> list[str]:
    """Return the names of the keys that a terminal has sent.

    >>> keys_in("j\\x1b[B \\n")
    ['j', 'down', 'space', 'enter']
    """
    return [_NAMES.get(key, key) for key in _KEY.findall(text)]


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """Yield a function that waits for keys, at most some seconds, and returns them. Without a keyboard it only waits."""

    def only_wait(seconds: float) -> list[str]:
        time.sleep(seconds)
        return []

    try:
        import select
        import termios
        import tty

        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (ImportError, AttributeError, OSError, ValueError, termios.error):  # not a terminal, or one of Windows
        yield only_wait
        return

    def wait(seconds: float) -> list[str]:
        if not select.select([keyboard], [], [], seconds)[0]:
            return []
        sent = os.read(keyboard, 1024)
        return keys_in(sent.decode(errors="replace")) if sent else only_wait(seconds)

    try:
        tty.setcbreak(keyboard)  # Ctrl-C still ends the command
        yield wait
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
