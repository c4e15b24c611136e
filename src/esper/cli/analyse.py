"""`esper analyse` shows what seeds are worth. torch is imported only to measure the seeds of a growth run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from esper.cli.command import FAILED, CommandError, CommandResult
from esper.cli.parse import parse
from esper.config import Config, NonNegativeInt, PositiveInt
from esper.runs.folder import RunError
from esper.text_table import counted, figure

if TYPE_CHECKING:
    from esper.runs.analysis import Analysis, BlueprintRow
    from esper.runs.catalog import Run

_Flag = tyro.conf.FlagCreatePairsOff[bool]
WIDE = 110  # columns of a terminal that shows all columns
STRONGEST = 10  # pairs that are shown if the matrix of all does not fit
# Columns that a narrow terminal does not show.
HIDDEN = ("rolled back", "refused", "cells", "FLOPs", "alone", "outcome", "cost per 1,000 parameters", "value per 1,000 parameters")

DESCRIPTION = """Shows what became of every blueprint in growth runs and controller runs: tried, kept, pruned and why, refused by gates,
cost of removal with an interval over cells, parameters and FLOPs. A cell is a run, or a task and host of a controller's training.

For one growth run it also measures the seeds of the model: the validation loss with every set of seeds switched off gives the Shapley value
of each seed, which is its share of the whole gain, and the interaction of each pair. The result is written into the run's folder as
analysis.json, and the report and the dashboard show it. With k seeds there are 2^k sets; above 8 seeds, orders are sampled."""


class AnalyseArguments(Config):
    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(required)")]
    """growth or controller runs, or folders with runs"""
    batches: PositiveInt | None = None
    """measure the seeds on this many validation batches only"""
    exact_up_to: NonNegativeInt = 8
    """evaluate all sets of seeds up to this many seeds"""
    groups: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """groups of sampled orders with more seeds, from 2 on; more groups give narrower intervals"""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """device to measure on; by default that of the run"""
    blueprints_only: _Flag = False
    """show the blueprints, and measure nothing"""
    dry_run: _Flag = False
    """say what would be measured, and touch nothing"""


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(AnalyseArguments, argv, prog, description=DESCRIPTION)
    if not arguments.runs:
        raise CommandError(f"name a run, several runs or a folder with runs: {prog} RUN")
    if arguments.groups < 2:
        raise CommandError(f"--groups {arguments.groups}: an interval needs at least 2 groups")
    from esper.runs.analysis import blueprint_rows

    runs = _runs(arguments.runs)
    rows = blueprint_rows(runs)
    _print_blueprints(rows, len(runs))
    result: dict[str, Any] = {"runs": [str(run.folder) for run in runs], "blueprints": rows}
    growth = [run for run in runs if run.kind == "growth"]
    if arguments.blueprints_only:
        return CommandResult(result)
    if len(runs) > 1:
        if growth:
            print("\nname one growth run to measure its seeds")
        return CommandResult(result)
    if not growth:
        return CommandResult(result)
    return CommandResult(result | _measure(growth[0].folder, arguments))


def _runs(paths: Sequence[Path]) -> list[Run]:
    """Return the growth and controller runs in these folders, with their events read."""
    from esper.files import user_cache
    from esper.runs.catalog import find_runs

    found: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            raise CommandError(f"there is no folder {path}; give the folder of a run, or a folder with runs")
        inside = find_runs(path, cache=user_cache())
        if not inside:
            raise CommandError(f"there is no run in {path}; list the runs with: esper runs ls FOLDER")
        found |= {run.folder.resolve(): run for run in inside}
    wanted = [run for run in found.values() if run.kind in ("growth", "controller")]
    if not wanted:
        run = next(iter(found.values()))
        raise CommandError(
            f"{run.folder} is {'an' if run.kind == 'arena' else 'a'} {run.kind} run, which has no seeds; esper analyse is about seeds: "
            "give a growth run or a controller run"
        )
    for run in wanted:
        run.refresh()
    return wanted


def _measure(folder: Path, arguments: AnalyseArguments) -> dict[str, Any]:
    """Measure the seeds of a growth run, print and return them."""
    from esper.experiment.analysis import analyse_run, evaluations, opened_seeds
    from esper.experiment.user_code import UserCodeError
    from esper.growth.config import GrowthError
    from esper.runs import CheckpointError
    from esper.runs.analysis import ANALYSIS
    from esper.tasks import TaskError

    options: dict[str, Any] = {"batches": arguments.batches, "exact_up_to": arguments.exact_up_to, "groups": arguments.groups}
    no_seeds = "\nthe model has no seeds, so there is nothing to measure"
    try:
        if arguments.dry_run:
            with opened_seeds(folder, device=arguments.device) as seeds:
                if not seeds.names:
                    print(no_seeds)
                    return {"plan": {"seeds": []}}
                coalitions, batches = evaluations(seeds, **options)
            where = "the validation batches" if batches is None else f"{batches:,} validation batches"
            print(f"\nwould measure {counted(len(seeds.names), 'seed')} ({', '.join(seeds.names)}) with {coalitions:,} sets of them on")
            print(f"{where}, and write {folder / ANALYSIS}")
            return {"plan": {"seeds": seeds.names, "coalitions": coalitions, "batches": batches}}
        with _progress() as on_progress:
            found = analyse_run(folder, device=arguments.device, on_progress=on_progress, **options)
    except (RunError, GrowthError, TaskError) as error:
        raise CommandError(str(error)) from error
    except CheckpointError as error:
        raise CommandError(str(error), exit_code=FAILED) from error
    except UserCodeError as error:
        raise CommandError(f"the model or data of the run cannot be made again: {error}") from error
    if found is None:
        print(no_seeds)
        return {"analysis": None}
    console = Console(highlight=False)
    console.print(*analysis_parts(found, console.width), sep="\n")
    print(f"\nwritten to {folder / ANALYSIS}")
    return {"analysis": found}


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar on stderr while seeds are measured, if that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# Output


def _print_blueprints(rows: Sequence[BlueprintRow], runs: int) -> None:
    where = "this run" if runs == 1 else f"these {runs} runs"
    if not rows:
        print(f"no seed was tried in {where}")
        return
    print(f"blueprints in {'one run' if runs == 1 else f'{runs} runs'}")
    console = Console(highlight=False)
    console.print(*blueprint_parts(rows, console.width), sep="\n")


def blueprint_parts(rows: Sequence[BlueprintRow], width: int) -> list[RenderableType]:
    """Return what became of every blueprint, and why seeds were removed or actions refused."""
    from esper.runs.analysis import BLUEPRINT_HEADING, blueprint_cells, reason_cells

    parts: list[RenderableType] = [cells_table(BLUEPRINT_HEADING, blueprint_cells(rows), numbers=range(1, 11), width=width)]
    if lines := reason_cells(rows):
        parts += ["", Text("removed seeds and refused actions")]
        parts.append(cells_table(("blueprint", "what", "times", "why"), lines, numbers=(2,), width=width))
    return parts


def analysis_parts(found: Analysis, width: int) -> list[RenderableType]:
    """Return the Shapley values of the seeds and the interaction of pairs, by the loss and by every metric."""
    from esper.runs.analysis import SEED_HEADING, how_measured, pair_matrix, pair_rows, seed_rows

    parts: list[RenderableType] = []
    for measure in found.measures:
        title = measure.name
        if measure.without is not None and measure.with_all is not None and measure.gain is not None:
            title += (
                f": {figure(measure.without)} without seeds, {figure(measure.with_all)} with all, gain {figure(measure.gain, sign='+')}"
            )
        parts += ["", Text(title), cells_table(SEED_HEADING, seed_rows(found, measure), numbers=range(3, len(SEED_HEADING)), width=width)]
        names = [seed.name for seed in found.seeds]
        if measure.pairs and sum(max(len(name), 9) + 2 for name in ("", *names)) <= width:
            parts += ["", Text("interaction of pairs: + they help each other, - they do the same work; * the interval is without 0")]
            parts.append(cells_table(("", *names), pair_matrix(found, measure), numbers=range(1, len(names) + 1), width=WIDE))
        elif measure.pairs:
            count = len(measure.pairs)
            parts += ["", Text(f"the strongest interactions of the {count} pairs: + they help each other, - they do the same work")]
            parts.append(cells_table(("seed", "and seed", "interaction"), pair_rows(measure, STRONGEST), numbers=(2,), width=width))
    return [*parts, "", Text(how_measured(found))]


def cells_table(heading: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int], width: int) -> Table:
    """Return a table of finished texts. A narrow terminal does not show the columns in HIDDEN."""
    shown = [place for place, name in enumerate(heading) if width >= WIDE or name not in HIDDEN]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for place in shown:
        table.add_column(heading[place], justify="right" if place in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[place]) for place in shown))
    return table
