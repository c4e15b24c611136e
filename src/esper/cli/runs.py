"""`esper runs`, `esper compare` and `esper query`: list, show, compare, label, export and delete runs. None of them imports torch.

Modules that need numpy are imported where they are used, so that `--help` is shown at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro
from rich.console import Console

from esper.cli.command import CommandError, CommandResult, how_to_resume
from esper.cli.parse import parse
from esper.cli.run_text import STATE_STYLES, age, sparkline
from esper.cli.table import LongTable
from esper.config import Config
from esper.runs.folder import GROW, TWIN, RunError, State, has_twin
from esper.runs.foreign import clean, quoted
from esper.text_table import aligned, figure

if TYPE_CHECKING:
    from esper.runs.catalog import Run, Summary
    from esper.runs.events import RunDeclared

ROOT = Path("runs")  # folder of runs unless another one is named
WIDE = 110  # columns of a terminal that shows everything about a run on one line
BAR = 8  # characters of a bar
_Flag = tyro.conf.FlagCreatePairsOff[bool]
_Run = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
_Runs = Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(required)")]
_ALL = tyro.conf.arg(help_behavior_hint="(default: all)")
_NONE = tyro.conf.arg(help_behavior_hint="(default: none)")


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    try:
        yield
    except RunError as error:
        raise CommandError(str(error)) from error


# esper runs ls


LS_DESCRIPTION = """Lists the runs in a folder and in the folders inside it: those that train at the moment first, then the newest.

A run is dead if it did not end and its process gives no sign of life any more. Progress is the share of the training that is done; the
figure is the one that this kind of run is judged by, with its last and its best value and its curve."""


class LsArguments(Config):
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="[FOLDER]")] = ROOT
    """folder with runs"""
    kind: Annotated[tuple[str, ...], _ALL] = ()
    """only runs of these kinds, such as growth, ppo, controller or arena"""
    state: Annotated[tuple[State, ...], _ALL] = ()
    """only runs in these states"""
    tag: Annotated[tuple[str, ...], _NONE] = ()
    """only runs with all of these tags"""


def run_ls(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(LsArguments, argv, prog, description=LS_DESCRIPTION)
    from esper.files import user_cache
    from esper.runs.catalog import list_runs

    if not arguments.folder.is_dir():
        raise CommandError(
            f"there is no folder {arguments.folder}; name one with runs: {prog} FOLDER, or start a run: esper grow --task digits"
        )
    found = list_runs(arguments.folder, cache=user_cache())
    shown = sorted((summary for summary in found if _is_wanted(summary, arguments)), key=_live_then_newest)
    if shown:
        _print_runs(shown, arguments.folder, time.time())
    elif found:
        print(f"none of the {len(found)} runs in {arguments.folder} is like this; leave out a filter")
    else:
        print(f"there are no runs in {arguments.folder}; start one with: esper grow --task digits --run {arguments.folder / 'first'}")
    return CommandResult({"runs": shown})


def _is_wanted(summary: Summary, arguments: LsArguments) -> bool:
    is_kind, is_state = not arguments.kind or summary.kind in arguments.kind, not arguments.state or summary.state in arguments.state
    return is_kind and is_state and set(arguments.tag) <= set(summary.tags)


def _live_then_newest(summary: Summary) -> tuple[bool, float]:
    return summary.state != "running", -(summary.started or summary.touched)


def _print_runs(summaries: Sequence[Summary], root: Path, now: float) -> None:
    from esper.runs.compare import written

    console = Console(highlight=False)
    is_wide = console.width >= WIDE
    heading = ["run", "kind", "state", "progress", *(["figure"] if is_wide else []), "last", "best", *(["curve"] if is_wide else [])]
    heading += ["seen", "tags"]
    rows = []
    for summary in summaries:
        numbers = [written(summary.last), written(summary.best)]
        rows.append(
            [
                clean(os.path.relpath(summary.folder, root)) if Path(summary.folder) != root else summary.name,
                summary.kind,
                summary.state,
                progress_bar(summary.progress, console.encoding) if is_wide else _percent(summary.progress),
                *([summary.figure, *numbers, _curve(summary.spark, console.encoding, 16)] if is_wide else numbers),
                age(now - summary.touched) if summary.touched else "-",
                " ".join(summary.tags),
            ]
        )
    styles: dict[tuple[int, int | None], str] = {
        (number, heading.index("state")): STATE_STYLES[summary.state] for number, summary in enumerate(summaries)
    }
    right = {heading.index(name) for name in ("last", "best", "seen")}
    console.print(LongTable(heading, rows, right=right, styles=styles), crop=False, soft_wrap=True)


def _curve(values: Sequence[float], encoding: str, width: int) -> str:
    """Draw a curve in one line of text; empty where the terminal has no such characters."""
    return sparkline([value for value in values if math.isfinite(value)], width) if encoding.lower().startswith("utf") else ""


def progress_bar(share: float | None, encoding: str = "utf-8") -> str:
    """Draw progress as a bar with its per cent.

    >>> progress_bar(0.5), progress_bar(None), progress_bar(1.0, "ascii")
    ('████░░░░  50%', '-', '######## 100%')
    """
    if share is None:
        return "-"
    full, empty = ("█", "░") if encoding.lower().startswith("utf") else ("#", ".")
    filled = int(share * BAR)
    return f"{full * filled}{empty * (BAR - filled)} {_percent(share):>4}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{int(100 * share)}%"


# esper runs show


SHOW_DESCRIPTION = "Shows a run: its state, its figures, the seeds of a growth run, its settings, and what to do next."


class ShowArguments(Config):
    run: _Run
    """folder of the run"""
    settings: _Flag = False
    """also list every setting"""


class SeedLife(msgspec.Struct):
    """One seed of a growth run, as its events tell."""

    number: int
    slot: str
    blueprint: str
    born: int  # epochs that were over when it germinated
    stage: str
    ended: int | None
    outcome: str  # kept, pruned, rolled back or living
    cost_of_removal: float | None  # rise of the loss if it were removed, as measured last
    rent: float | None
    why: str


def run_show(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(ShowArguments, argv, prog, description=SHOW_DESCRIPTION)
    from esper.runs.catalog import open_run, settings_of
    from esper.runs.compare import final_figures, settings_read, written

    with _user_errors():
        run = open_run(arguments.run)
        config = settings_read(run)
    twin = open_run(arguments.run / TWIN) if has_twin(arguments.run) else None
    summary, figures, settings = run.summary(), final_figures(run), settings_of(config)
    of_twin = {} if twin is None else final_figures(twin)
    seeds, next_steps = seeds_of(run) if run.kind == "growth" else [], what_next(run, summary)
    _print_head(summary, run.declared())
    if figures:
        units = {figure.name: figure.unit for figure in run.declared().figures if figure.unit != "share"}
        names = {name: f"{name}, {units[name]}" if units.get(name) else name for name in figures}
        rows = [[names[name], written(value), *([written(of_twin.get(name))] if twin else [])] for name, value in figures.items()]
        print("\n" + aligned([["figure", "last", *(["its twin"] if twin else [])], *rows], numbers=True))
    if seeds:
        print()
        _print_seeds(seeds)
    if arguments.settings:
        print("\n" + aligned([["setting", "value"], *([name, _setting(value)] for name, value in settings.items())]))
    print("\n" + "\n".join(next_steps))
    if not arguments.settings:
        print(f"its {len(settings)} settings: {prog} {quoted(arguments.run)} --settings")
    result = {"run": summary, "figures": figures, "twin": of_twin or None, "seeds": seeds, "settings": config, "next": next_steps}
    return CommandResult(result)


def _setting(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _print_head(summary: Summary, declared: RunDeclared) -> None:
    from esper.runs.compare import written

    now = time.time()
    rows = [
        ["run", clean(summary.folder)],
        ["kind", summary.kind],
        ["state", f"{summary.state}, last sign of life {age(now - summary.touched)}"],
    ]
    if summary.state == "empty":
        rows[-1] = ["state", "empty: no event was written"]
    encoding = sys.stdout.encoding or "ascii"
    rows.append(["progress", f"{progress_bar(summary.progress, encoding)}  {summary.step:,} {declared.unit}"])
    if summary.started is not None:
        rows.append(["started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.started))])
    if summary.last is not None:
        curve = _curve(summary.spark, encoding, 40)
        rows.append([summary.figure, f"{written(summary.last)}, best {written(summary.best)}  {curve}"])
    rows += [["tags", ", ".join(summary.tags)]] if summary.tags else []
    rows += [["note", " ".join(summary.note.split())]] if summary.note else []
    print(aligned(rows))


def seeds_of(run: Run) -> list[SeedLife]:
    """Return the seeds of a growth run in the order in which they germinated."""
    from esper.runs.analysis import ledger_of

    return [
        SeedLife(
            number=seed.number,
            slot=seed.slot,
            blueprint=seed.blueprint,
            born=seed.born,
            stage=seed.stage.name,
            ended=seed.ended,
            outcome=seed.outcome,
            cost_of_removal=seed.gain,
            rent=seed.rent,
            why=seed.why,
        )
        for seed in ledger_of(run.index).seeds
    ]


def _print_seeds(seeds: Sequence[SeedLife]) -> None:
    rows = [
        [
            str(seed.number),
            seed.slot,
            seed.blueprint,
            f"{seed.born}–{'' if seed.ended is None else seed.ended}",
            seed.outcome if seed.ended is not None else seed.stage.lower(),
            "-" if seed.cost_of_removal is None else figure(float(seed.cost_of_removal)),
            "-" if seed.rent is None else figure(float(seed.rent)),
        ]
        for seed in seeds
    ]
    print(aligned([["seed", "slot", "blueprint", "epochs", "outcome", "cost of removal", "rent"], *rows]))
    for seed in seeds:
        print(f"  {seed.number}: {seed.why}")


def what_next(run: Run, summary: Summary) -> list[str]:
    """Return sentences with the commands that make sense for a run in its state."""
    from esper.cli.main import COMMANDS

    folder = quoted(run.folder)
    watch = [f"watch it with: esper watch {folder}"] if "watch" in COMMANDS else []
    if summary.state == "running":
        return watch or [f"it is training; see how far it is with: esper runs show {folder}"]
    command = {"growth": "grow", "ppo": "ppo train", "controller": "controller train", "arena": "arena train"}.get(run.kind)
    if command is None:
        return [f"write its report with: esper report {folder}", *watch]
    if run.kind == "growth" and not (run.folder / GROW).is_file():
        resume = f"go on with it in Python: esper.grow(..., run={str(run.folder)!r}, resume=True)"
    else:
        resume = how_to_resume(command, run.folder)
    if summary.state != "finished":
        return [resume]
    use = {
        "growth": f"write its report with: esper report {folder}",
        "ppo": f"play fresh episodes with: esper ppo eval {folder}",
        "controller": f"grow with it: esper grow --task digits --controller {quoted(run.folder / 'controller.safetensors')}",
        "arena": f"fight battles with: esper arena eval {folder}",
    }[run.kind]
    return [use, *watch]


# esper runs diff


DIFF_DESCRIPTION = "Shows the settings in which two runs differ, and their figures side by side."


class DiffArguments(Config):
    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A")]
    """folder of a run"""
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B")]
    """folder of another run"""


def run_diff(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(DiffArguments, argv, prog, description=DIFF_DESCRIPTION)
    from esper.runs.catalog import differing_settings, open_run
    from esper.runs.compare import final_figures, settings_read, shown_setting, written

    with _user_errors():
        one, other = open_run(arguments.a), open_run(arguments.b)
        settings = differing_settings({"a": settings_read(one), "b": settings_read(other)})
    ours, theirs = final_figures(one), final_figures(other)
    names = list(dict.fromkeys([*ours, *theirs]))
    heading = [clean(arguments.a), clean(arguments.b)]
    if settings:
        print(
            aligned([["setting", *heading], *([name, shown_setting(row["a"]), shown_setting(row["b"])] for name, row in settings.items())])
        )
    else:
        print("the settings are the same")
    rows = []
    for name in names:
        difference = theirs[name] - ours[name] if name in ours and name in theirs else None
        rows.append([name, written(ours.get(name)), written(theirs.get(name)), written(difference, sign="+")])
    if rows:
        print("\n" + aligned([["figure", *heading, "difference"], *rows], numbers=True))
    print(f"\n{clean(arguments.a)} is {one.state()}, {clean(arguments.b)} is {other.state()}")
    figures = {name: {"a": ours.get(name), "b": theirs.get(name)} for name in names}
    return CommandResult({"a": str(arguments.a), "b": str(arguments.b), "settings": settings, "figures": figures})


# esper runs tag


TAG_DESCRIPTION = """Adds and removes tags of a run, and sets its note; without any, shows them. They are kept in labels.json
in the run's folder.

  esper runs tag runs/first good baseline --note "first that learns"
  esper runs tag runs/first --remove baseline"""


class TagArguments(Config):
    run: _Run
    """folder of the run"""
    add: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[TAG ...]", help_behavior_hint="(default: none)")] = ()
    """tags to add"""
    remove: Annotated[tuple[str, ...], _NONE] = ()
    """tags to remove"""
    note: str | None = None
    """a note about the run, in place of the one before; "" for none"""


def run_tag(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(TagArguments, argv, prog, description=TAG_DESCRIPTION)
    from esper.runs.catalog import label, open_run

    with _user_errors():
        if arguments.add or arguments.remove or arguments.note is not None:
            before = open_run(arguments.run).labels().tags
            if unknown := [tag for tag in arguments.remove if tag not in before]:
                raise RunError(f"{arguments.run} has no tag {unknown[0]!r}; it has {', '.join(before) or 'none'}")
            labels = label(arguments.run, add=arguments.add, remove=arguments.remove, note=arguments.note)
        else:
            labels = open_run(arguments.run).labels()
    print(aligned([["tags", clean(", ".join(labels.tags)) or "-"], ["note", clean(labels.note) or "-"]]))
    return CommandResult({"run": str(arguments.run), "tags": labels.tags, "note": labels.note})


# esper runs rm


RM_DESCRIPTION = "Deletes runs with everything in their folders. Asks before it does; refuses if one of them is still training."


class RmArguments(Config):
    runs: _Runs
    """folders of the runs"""
    yes: _Flag = False
    """do not ask"""


def run_rm(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(RmArguments, argv, prog, description=RM_DESCRIPTION)
    from esper.runs.catalog import remove_run
    from esper.runs.seeds import discard_without_runs

    if not arguments.runs:
        raise CommandError(f"name the runs to delete: {prog} RUN...")
    folders = list(dict.fromkeys(arguments.runs))
    with _user_errors():
        for folder in folders:
            _check_removable(folder)
        total = sum(_bytes_in(folder) for folder in folders)
        what = str(folders[0]) if len(folders) == 1 else f"{len(folders)} runs ({', '.join(map(str, folders))})"
        if not arguments.yes and not _confirmed(f"delete {what} with {_size(total)} of files? [y/N] "):
            print("nothing was deleted")
            return CommandResult({"removed": []})
        for folder in folders:
            remove_run(folder)
            discard_without_runs(folder.parent)
    print(f"deleted {clean(what)}")
    return CommandResult({"removed": [str(folder) for folder in folders]})


def _check_removable(folder: Path) -> None:
    """Raise RunError unless the folder is a run that no process trains in."""
    from esper.runs.catalog import find_runs, open_run

    inside = [run.folder for run in find_runs(folder)]
    if inside and inside != [folder]:
        raise RunError(f"{folder} is no run but holds {len(inside)}; name the ones to delete, such as {inside[0]}")
    if folder.is_symlink():
        raise RunError(f"{folder} is a link; name the folder that it points to")
    for each in (open_run(folder), *([open_run(folder / TWIN)] if has_twin(folder) else [])):
        if each.state() == "running":
            raise RunError(f"{folder} is still training; stop it first, or wait for it")


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise CommandError("there is nobody to ask whether to delete; give --yes")
    print(clean(question), end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _size(count: float) -> str:
    """Format a number of bytes.

    >>> _size(900), _size(1_500_000)
    ('900 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


# esper runs export


EXPORT_DESCRIPTION = """Writes what happened in runs into a .csv or .parquet file for other programs.

Without --events, each row is one number: run, name, step, time and value, with the names of TensorBoard. With --events, each row is one
event of that kind, with a column for each field. Parquet needs pyarrow or duckdb."""


class ExportArguments(Config):
    runs: _Runs
    """runs, or folders with runs"""
    to: Path
    """the file: .csv or .parquet"""
    events: str | None = None
    """only events of this kind, such as epoch_ended or update"""


def run_export(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(ExportArguments, argv, prog, description=EXPORT_DESCRIPTION)
    from esper.runs.tables import events_table, numbers_table, write_table

    if not arguments.runs:
        raise CommandError(f"name the runs to export: {prog} RUN... --to FILE")
    with _user_errors():
        if arguments.to.suffix.lower() not in (".csv", ".parquet"):
            raise RunError(f"{arguments.to} is neither a .csv nor a .parquet file; name one of them")
        table = numbers_table(arguments.runs) if arguments.events is None else events_table(arguments.runs, arguments.events)
        write_table(table, arguments.to)
    print(f"{len(table.rows):,} rows of {', '.join(table.columns)}\n{clean(arguments.to)}")
    return CommandResult({"file": str(arguments.to), "rows": len(table.rows), "columns": list(table.columns)})


# esper compare


COMPARE_DESCRIPTION = """Compares runs: final figures, settings that differ, and differences with intervals over seeds.

  esper compare runs/a runs/b runs/c --plot comparison.svg
  esper compare runs/small runs/large --figure "test accuracy"     folders with runs of several seeds

Runs whose settings differ only in the seed form a group. Groups are compared with the first one by pairs of runs of equal seeds, and grown
runs with their twins; the interval is Student's, with one sample per seed. Runs that have not ended are compared at a step that all have
reached."""


class CompareArguments(Config):
    runs: _Runs
    """runs, or folders with runs"""
    figure: str | None = None
    """the number to compare: a final figure such as "test accuracy", or a number of events such as update/total_kl"""
    plot: Path | None = None
    """also draw curves and final figures into this .png, .svg or .pdf file"""


def run_compare(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(CompareArguments, argv, prog, description=COMPARE_DESCRIPTION)
    from esper.runs.compare import compare_runs

    if not arguments.runs:
        raise CommandError(f"name the runs to compare: {prog} A B")
    with _user_errors():
        comparison = compare_runs(arguments.runs, figure=arguments.figure)
        print(comparison)
        if arguments.plot is not None:
            comparison.plot(arguments.plot)
            print(f"\nplot  {arguments.plot}")
    plot = None if arguments.plot is None else str(arguments.plot)
    return CommandResult({**comparison.as_dict(), "plot": plot})


# esper query


QUERY_DESCRIPTION = """Answers one select statement about runs, with DuckDB.

  esper query "select run, state, best from runs order by best"
  esper query "select run, min(val_loss) from epoch_ended group by run" runs
  esper query "show tables"

The tables are runs, events (all events, each as JSON), and one for each kind of event with its fields as columns. The column `run` is the
same in all of them. Nothing is changed, and no other file is read."""


class QueryArguments(Config):
    sql: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SQL")]
    """one select statement"""
    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[RUN ...]")] = (ROOT,)
    """runs, or folders with runs"""


def run_query(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(QueryArguments, argv, prog, description=QUERY_DESCRIPTION)
    from esper.runs.tables import query

    with _user_errors():
        table = query(arguments.sql, arguments.runs)
    if table.rows:
        print(aligned([list(table.columns), *([_cell(value) for value in row] for row in table.rows)]))
    else:
        print("no row")
    return CommandResult({"columns": list(table.columns), "rows": table.rows})


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else clean(" ".join(str(value).split()))
