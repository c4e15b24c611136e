"""`esper watch`: show runs while they train and afterwards, in the browser or in the terminal. Imports no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
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
WIDE = 110  # columns of a terminal that has room for curves in the table of runs
MOST_ROWS = 12  # of a table of hosts, cells or candidates; the page in the browser has all of them
_LEARNER = [
    ("return", "update/mean_return"),
    ("explained variance", "update/explained_variance"),
    ("KL divergence", "update/total_kl"),
    ("entropy of ", "update/entropy/"),
    ("KL of ", "update/kl/"),
    ("samples per second", "update/steps_per_second"),
    ("wait for environments, s", "update/env_seconds"),
    ("", "update/resources/"),
]
# Kind of run -> (label, series) of the curves in the terminal. A series that ends in / stands for all that begin so.
CURVES: dict[str, list[tuple[str, str]]] = {
    "growth": [
        ("training loss", "epoch_ended/train_loss"),
        ("", "epoch_ended/metrics/"),
        ("parameters", "epoch_ended/parameters"),
        ("FLOPs of a forward pass", "epoch_ended/flops"),
        ("samples per second", "epoch_ended/samples_per_second"),
        ("seconds per step", "epoch_ended/step_seconds"),
        ("wait for data, s", "epoch_ended/data_wait_seconds"),
        ("", "epoch_ended/resources/"),
    ],
    "ppo": _LEARNER,
    "arena": [("win rate, ", "round_fought/win_rate/"), ("reward, ", "round_fought/reward/"), *_LEARNER],
    "controller": [("gain", "round_ended/gain"), ("rent", "round_ended/rent"), ("chose to ", "round_ended/decisions/"), *_LEARNER[1:]],
}
LIGHT_STYLES = {"green": "green", "yellow": "yellow", "red": "bold red"}


class WatchArguments(Config):
    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_FOLDER")] = Path("runs")
    """a run, or a folder with runs"""
    terminal: bool = False
    """show the runs in this terminal; print them once if the output is no terminal"""
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

    console = Console()

    def view() -> RenderableType:
        watcher.refresh()
        page = None if name is None else watcher.page(name)
        if name is None or page is None:
            is_gone = name is not None or not path.is_dir()
            return (
                Text(f"{path} was moved or removed", style="bold red") if is_gone else runs_table(watcher.overview(), width=console.width)
            )
        if page.get("controller") and page["controller"]["rounds"]:
            page["controller"]["hosts"] = watcher.hosts(name, page["controller"]["rounds"][-1])
        return run_view(page, _curves(watcher, name, page))

    if not sys.stdout.isatty():
        console.print(view())
    else:
        with Live(view(), console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(EVERY_S)
                live.update(view(), refresh=True)
    return CommandResult({"runs": len(watcher.overview()["runs"])})


def _curves(watcher: Any, name: str, page: dict[str, Any]) -> dict[str, list[float]]:
    """Return the series that the terminal shows, by label: the curves of the kind of run, those of a twin, and the use of the machine."""
    wanted = {
        f"{label}{other[len(series) :] if series.endswith('/') else ''}": other
        for label, series in CURVES[page["summary"]["kind"]]
        for other in page["series"]
        if other == series or (series.endswith("/") and other.startswith(series))
    }
    found = watcher.series(name, wanted.values(), {}, None)["series"]
    curves = {label: [value for value in found[series]["values"] if value is not None] for label, series in wanted.items()}
    shared = [series for series in page.get("twin", []) if series == "epoch_ended/val_loss" or series.startswith("epoch_ended/metrics/")]
    twin = watcher.series(name, shared, {}, None, twin=True)["series"] if shared else {}
    of_twin = {f"twin: {series.split('/')[-1]}": [value for value in twin[series]["values"] if value is not None] for series in shared}
    return of_twin | curves


def runs_table(overview: dict[str, Any], *, width: int = 80) -> RenderableType:
    """Return a table of runs, live ones first. A wide terminal also has their curves."""
    if not overview["runs"]:
        return Text(f"There are no runs in {overview['root']} yet. Start one: esper grow --task digits")
    is_wide, has_tags = width >= WIDE, any(row["tags"] for row in overview["runs"])
    headings = [
        "run",
        "kind",
        "state",
        "done",
        "last",
        "best",
        *(["figure", "curve"] if is_wide else []),
        "sign of life",
        *(["tags"] if has_tags else []),
    ]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("done", "last", "best") else "left", no_wrap=True)
    for row in overview["runs"]:
        done = "" if row["progress"] is None else f"{row['progress']:.0%}"
        cells = [Text(row["name"]), row["kind"], Text(row["state"], style=STATE_STYLES[row["state"]]), done]
        cells += [_number(row["last"]), _number(row["best"])]
        cells += [row["figure"], Text(sparkline(row["spark"], 20), style="cyan")] if is_wide else []
        life = f"{duration(max(overview['now'] - row['touched'], 0))} ago" if row["touched"] else "–"
        cells += [life, *([Text(", ".join(row["tags"]))] if has_tags else [])]
        table.add_row(*cells)
    return table


def run_view(page: dict[str, Any], curves: Mapping[str, list[float]]) -> RenderableType:
    """Return the page of one run as text: figures, curves, and what its kind of run has, as in the browser. `curves` are series by name."""
    summary = page["summary"]
    state = Text(summary["state"], style=STATE_STYLES[summary["state"]])
    done = "" if summary["progress"] is None else f" · {summary['progress']:.0%}"
    head = Text.assemble((summary["name"], "bold"), f" · {summary['kind']} · ", state, done, *(f" · {tag}" for tag in summary["tags"]))
    parts: list[RenderableType | None] = [head, _notes(page)]
    parts += [_curves_table(summary, curves)]
    if growth := page.get("growth"):
        parts += _growth_parts(growth)
    if controller := page.get("controller"):
        parts += _controller_parts(controller)
    parts += [_blueprints_table(page.get("blueprints") or []), _calibration_table(page.get("calibration"))]
    lights = _table()
    for light in page.get("health", []):
        name, advice = Text(light["name"]), Text(light["advice"], style="dim")
        lights.add_row(Text("●", style=LIGHT_STYLES[light["colour"]]), name, _number(light["value"]), advice)
    parts.append(lights)
    if page.get("opponents"):
        opponents = _table("opponent", "won", "drawn", "lost", "win rate", "rating", left=1)
        for row in page["opponents"][:12]:
            rate = "–" if row["rate"] is None else f"{row['rate']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"
            rating = "–" if row["rating"] is None else f"{row['rating']:.1f} ± {row['spread']:.1f}"
            opponents.add_row(Text(row["name"]), *(str(row[name]) for name in ("won", "drawn", "lost")), rate, rating)
        parts.append(opponents)
    if page.get("league"):
        last = page["league"][-1]
        parts.append(Text(f"league: {last['name']} {'entered' if last['is_promoted'] else 'did not enter'}: {last['reason']}", style="dim"))
    for problem in page["problems"][:3]:
        if "words" in problem:
            parts.append(Text(f"step {problem['step']:,}: {problem['words']}", style="yellow"))
            continue
        said = {
            name: value for name, value in problem.items() if name not in ("kind", "time", "step") and isinstance(value, str | int | float)
        }
        words = " · ".join(f"{name.replace('_', ' ')} {value}" for name, value in said.items() if value != "")
        parts.append(Text(f"{problem['kind'].replace('_', ' ')}: {words}", style="yellow"))
    shown = [part for part in parts if part is not None and not (isinstance(part, Table) and not part.row_count)]
    return Group(*(item for part in shown for item in (part, "") if item is not None))


def _table(*headings: str, left: int = 0) -> Table:
    """Return an empty table whose columns after the first `left` ones hold numbers. Without headings it shows none."""
    table = Table(box=None, pad_edge=False, header_style="dim", show_header=bool(headings))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right")
    return table


def _notes(page: dict[str, Any]) -> Text | None:
    """Return what is wrong or unusual about the whole run."""
    notes = [page["summary"]["note"]] if page["summary"]["note"] else []
    if page["summary"]["state"] == "dead":
        notes.append("its process gave no sign of life; give its command the option --resume to continue it")
    if page["summary"]["state"] == "empty":
        notes.append("it has written no events yet; if this stays so, look into the terminal where it was started")
    if page["skipped"]:
        notes.append(f"{page['skipped']} damaged lines of its log are left out")
    if page.get("growth") and page["growth"]["started"]["note"]:
        notes.append(page["growth"]["started"]["note"])
    return Text("\n".join(notes), style="yellow") if notes else None


def _curves_table(summary: dict[str, Any], curves: Mapping[str, list[float]]) -> Table:
    table = _table("", "", "last", "best", left=2)
    table.add_row(
        Text(summary["figure"]), Text(sparkline(summary["spark"], 40), style="cyan"), _number(summary["last"]), _number(summary["best"])
    )
    for label, values in curves.items():
        if values:
            table.add_row(Text(label), Text(sparkline(values, 40), style="cyan"), _number(values[-1]), "")
    return table


def _growth_parts(growth: dict[str, Any]) -> list[RenderableType | None]:
    parts: list[RenderableType | None] = []
    if (compared := growth["compared"]) is not None:
        words = f"accuracy against the twin {100 * compared['accuracy_difference']:+.1f} points "
        parts.append(Text(words + f"[{100 * compared['low']:+.1f}, {100 * compared['high']:+.1f}]"))
    slots = _table("slot", "stage", "blueprint", "alpha", "age", "costs if removed", "weights", left=3)
    for slot in growth["slots"]:
        alpha, age = (f"{slot['alpha']:.2f}", str(slot.get("age", ""))) if slot["blueprint"] else ("–", "–")
        cost = _interval(slot.get("gain"), slot.get("gain_low"), slot.get("gain_high"))
        slots.add_row(
            Text(slot["slot"]), slot["stage"].lower(), Text(slot["blueprint"] or "–"), alpha, age, cost, f"{slot.get('parameters') or 0:,}"
        )
    seeds = _table("seed", "slot", "blueprint", "epochs", "outcome", "reason", left=6)
    for seed in growth["seeds"]:
        epochs = f"{seed['born']}–{'' if seed['ended'] is None else seed['ended']}"
        seeds.add_row(str(seed["number"]), Text(seed["slot"]), Text(seed["blueprint"]), epochs, seed["outcome"], Text(seed["why"]))
    parts += [slots, seeds]
    if growth["decisions"]:
        last = growth["decisions"][-1]
        parts.append(Text(f"epoch {last['epoch']}: {last['text']}", style="dim"))
    if growth["probes"]:
        parts.append(_probe_table(growth["probes"][-1]))
    for back in growth["rollbacks"]:
        cost = "" if back.get("steps_lost") is None else f" and lost {back['steps_lost']:,} steps"
        cost += "" if back.get("seconds_lost") is None else f" and {duration(back['seconds_lost'])}"
        parts.append(
            Text(f"epoch {back['epoch']}: the governor went back to epoch {back['to_epoch']}{cost}: {back['reason']}", style="red")
        )
    return parts


def _probe_table(probe: dict[str, Any]) -> Table:
    """Return the candidates with the best estimates of a probe, and why they were passed over."""
    table = _table(f"probe of epoch {probe['epoch']}", "candidate", "fall per step", "passed over because", left=2)
    table.columns[3].justify = "left"
    rows = [(value, slot, name) for slot, row in probe["estimates"].items() for name, value in row.items() if value is not None]
    for value, slot, name in sorted(rows, reverse=True)[:MOST_ROWS]:
        table.add_row(Text(slot), Text(name), _number(value), Text(probe["reasons"].get(slot, {}).get(name, ""), style="dim"))
    return table


def _controller_parts(controller: dict[str, Any]) -> list[RenderableType | None]:
    rents = _table("rent", "utility per round", "last round", left=2)
    for line in controller["utility"]["rent"]:
        last = _interval(line["values"][-1], line["low"][-1], line["high"][-1])
        rents.add_row(line["label"], Text(sparkline(line["values"], 30), style="cyan"), last)
    cells = _table("task and host", "hosts", "utility", "gain", "rent", "grown", "kept", left=1)
    for row in controller["cells"][:MOST_ROWS]:
        means = [_number(row[name]) for name in ("gain", "rent", "grown", "kept")]
        cells.add_row(Text(row["cell"]), str(row["hosts"]), _interval(row["utility"], row["low"], row["high"]), *means)
    return [rents, cells, _hosts_table(controller.get("hosts", []))]


def _hosts_table(hosts: list[dict[str, Any]]) -> Table:
    """Return the hosts of the newest round: their losses, those of their twins, and their seeds."""
    table = _table("host", "rent", "loss", "twin", "utility", "seeds", left=4)
    table.columns[5].justify = "left"
    for life in hosts[:MOST_ROWS]:
        own, twin = (sparkline([value for value in life[name] if value is not None], 12) for name in ("val_losses", "twin_losses"))
        seeds = ", ".join(f"{seed['blueprint']} after {seed['slot']} {seed['outcome']}" for seed in life["seeds"])
        row = (Text(f"{life['env']} {life['task']} {life['host']}"), life["rent_level"], Text(own, style="cyan"), Text(twin, style="dim"))
        table.add_row(*row, _number(life["utility"]), Text(seeds, overflow="ellipsis", no_wrap=True))
    return table


def _blueprints_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("blueprint", "tried", "kept", "pruned", "gain", "weights", left=1)
    for row in rows:
        counts = [f"{row[name]:g}" for name in ("tried", "kept", "pruned")]
        table.add_row(Text(row["blueprint"]), *counts, _number(row["gain"]), f"{row['parameters']:,.0f}")
    return table


def _calibration_table(calibration: dict[str, Any] | None) -> Table | None:
    if calibration is None:
        return None
    table = _table("the critic predicts", "achieved", "steps")
    for point in calibration["points"]:
        table.add_row(_number(point["predicted"]), _interval(point["achieved"], point["low"], point["high"]), f"{point['steps']:,}")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else figure(value)


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    return _number(value) if low is None or high is None else f"{_number(value)} [{_number(low)}, {_number(high)}]"


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
