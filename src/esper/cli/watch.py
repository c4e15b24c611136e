"""`esper watch`: show runs while they train and afterwards, in the browser or in the terminal. Imports no torch."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from esper.cli.command import CommandError, CommandResult
from esper.cli.parse import parse
from esper.config import Config, NonNegativeInt
from esper.files import reason_of
from esper.runs.folder import RunError, kind_of
from esper.text_table import duration, figure

DESCRIPTION = """Shows runs in the browser: a table of all runs in a folder, and a page for each: curves, seeds, decisions, health.

The page is on 127.0.0.1, which only this machine can reach, loads nothing from the internet, and changes no run. It follows runs while they
train. Ctrl-C ends it. Needs the extra dashboard; --terminal shows the same in this terminal and needs no extra."""

EVERY_S = 1.0
BLOCKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {"running": "bold cyan", "finished": "green", "stopped": "yellow", "dead": "bold red", "empty": "dim"}
LIGHT_STYLES = {"green": "green", "yellow": "yellow", "red": "bold red"}


class WatchArguments(Config):
    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_FOLDER")] = Path("runs")
    """a run, or a folder with runs"""
    terminal: bool = False
    """show them in this terminal; once, if the output is no terminal"""
    port: NonNegativeInt = 0
    """port of the page; 0: any free one"""
    show: bool = True
    """open the page in the browser"""


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(WatchArguments, argv, prog, description=DESCRIPTION)
    path = arguments.path
    if not path.is_dir():
        hint = "start a run, or give the folder of yours" if path == Path("runs") else "give a run, or a folder with runs"
        raise CommandError(f"there is no folder {path}; {hint}")
    if arguments.terminal:
        return _show_in_terminal(path)
    from esper.dashboard.watch import serve_runs

    addresses: list[str] = []

    def announce(address: str) -> None:
        addresses.append(address)
        print(f"{address} shows the runs in {path}; Ctrl-C ends it", flush=True)

    try:
        serve_runs(path, port=arguments.port, show=arguments.show, announce=announce)
    except (ImportError, RunError) as error:
        raise CommandError(f"{error}, or use --terminal" if isinstance(error, ImportError) else str(error)) from error
    except OSError as error:
        raise CommandError(reason_of(error)) from error
    return CommandResult({"address": addresses[0]})


# The terminal


def _show_in_terminal(path: Path) -> CommandResult:
    """Show a table of the runs, or the page of one run, again every second until Ctrl-C."""
    from esper.dashboard.data import Watcher, name_in_address

    watcher, name = Watcher(path), name_in_address(path) if kind_of(path) is not None else None

    def view() -> RenderableType:
        watcher.refresh()
        page = None if name is None else watcher.page(name)
        return runs_table(watcher.overview()) if page is None else run_view(page)

    console = Console()
    if not sys.stdout.isatty():
        console.print(view())
    else:
        with Live(view(), console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(EVERY_S)
                live.update(view(), refresh=True)
    return CommandResult({"runs": len(watcher.overview()["runs"])})


def runs_table(overview: dict[str, Any]) -> RenderableType:
    """Return a table of runs, live ones first."""
    if not overview["runs"]:
        return Text(f"There are no runs in {overview['root']} yet. Start one: esper grow --task digits")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("run", "kind", "state", "done", "last", "best", "", "sign of life", "tags"):
        table.add_column(heading, justify="right" if heading in ("done", "last", "best") else "left", no_wrap=heading in ("run", "state"))
    for row in overview["runs"]:
        table.add_row(
            Text(row["name"]),
            row["kind"],
            Text(row["state"], style=STATE_STYLES[row["state"]]),
            "" if row["progress"] is None else f"{row['progress']:.0%}",
            _number(row["last"]),
            f"{_number(row['best'])} {row['figure']}",
            Text(sparkline(row["spark"], 20), style="cyan"),
            f"{duration(max(overview['now'] - row['touched'], 0))} ago",
            Text(", ".join(row["tags"])),
        )
    return table


def run_view(page: dict[str, Any]) -> RenderableType:
    """Return the page of one run: its figures and curve, and the seeds of a growth run or the health of a learner."""
    summary = page["summary"]
    state = Text(summary["state"], style=STATE_STYLES[summary["state"]])
    done = "" if summary["progress"] is None else f" · {summary['progress']:.0%}"
    head = Text.assemble((summary["name"], "bold"), f" · {summary['kind']} · ", state, done)
    curve = Text.assemble(
        f"{summary['figure']} {_number(summary['last'])}, best {_number(summary['best'])}  ", (sparkline(summary["spark"], 40), "cyan")
    )
    parts: list[RenderableType] = [head, curve]
    if growth := page.get("growth"):
        parts += ["", _slots_table(growth["slots"])]
        if growth["seeds"]:
            parts += ["", _seeds_table(growth["seeds"])]
        if growth["decisions"]:
            last = growth["decisions"][-1]
            parts += ["", Text(f"epoch {last['epoch']}: {last['text']}", style="dim")]
    lights = Table(box=None, pad_edge=False, show_header=False)
    for light in page.get("health", []):
        lights.add_row(
            Text("●", style=LIGHT_STYLES[light["colour"]]), light["name"], _number(light["value"]), Text(light["advice"], style="dim")
        )
    if lights.row_count:
        parts += ["", lights]
    return Group(*parts)


def _slots_table(slots: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("slot", "stage", "blueprint", "alpha", "costs if removed", "weights"):
        table.add_column(heading, justify="left" if heading in ("slot", "stage", "blueprint") else "right")
    for slot in slots:
        table.add_row(
            Text(slot["slot"]),
            slot["stage"].lower(),
            Text(slot["blueprint"] or "–"),
            f"{slot['alpha']:.2f}" if slot["blueprint"] else "–",
            _interval(slot.get("gain"), slot.get("gain_low"), slot.get("gain_high")),
            f"{slot.get('parameters') or 0:,}",
        )
    return table


def _seeds_table(seeds: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("seed", "slot", "blueprint", "born", "outcome", "reason"):
        table.add_column(heading)
    for seed in seeds:
        reason = seed["stages"][-1]["reason"] if seed["stages"] else ""
        table.add_row(str(seed["number"]), Text(seed["slot"]), Text(seed["blueprint"]), str(seed["born"]), seed["outcome"], Text(reason))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else figure(value)


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    return "–" if value is None else f"{figure(value)} [{_number(low)}, {_number(high)}]"


def sparkline(values: list[float], width: int) -> str:
    """Return a curve of block characters, at most `width` wide.

    >>> sparkline([0.0, 1.0, 2.0, 7.0], 4)
    '▁▂▃█'
    """
    if len(values) < 2:
        return ""
    chosen = [values[round(place * (len(values) - 1) / (min(width, len(values)) - 1))] for place in range(min(width, len(values)))]
    low, span = min(chosen), max(chosen) - min(chosen) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in chosen)
