"""`--seeds N` of a training: one run after another in one folder, and at the end the figures with intervals over seeds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from esper.cli.command import FAILED, OK, CommandError, CommandResult, how_to_resume
from esper.runs.compare import Comparison, compare_runs, written_interval
from esper.runs.seeds import seed_folder
from esper.runs.signals import StopSignals
from esper.text_table import aligned

TrainOne = Callable[[int, Path], str]  # trains the run of a seed in its folder; returns its status


def train_seeds(
    folder: Path, seeds: Sequence[int], train_one: TrainOne, *, command: str, stop: StopSignals, figures: Sequence[str]
) -> CommandResult:
    """Train the runs of all seeds, as far as they are not trained yet; print and return how they compare.

    A run that fails does not keep the others from training. `figures` are compared besides the one that such runs are judged by.
    """
    statuses: dict[int, str] = {}
    for number, seed in enumerate(seeds, start=1):
        if stop.was_asked():
            break
        print(f"seed {seed} ({number} of {len(seeds)})", flush=True)
        try:
            statuses[seed] = train_one(seed, seed_folder(folder, seed))
        except CommandError as error:
            if error.exit_code != FAILED:
                raise
            print(f"seed {seed}: {error}", file=sys.stderr, flush=True)
            statuses[seed] = "failed"
    done = [seed for seed, status in statuses.items() if status not in ("stopped", "failed")]
    comparisons = _compared([seed_folder(folder, seed) for seed in done], figures)
    if comparisons:
        print(f"\n{comparisons[0]}")
        _print_others(comparisons[1:])
    failed = [seed for seed, status in statuses.items() if status == "failed"]
    print(f"\nruns in {folder}")
    if len(done) < len(seeds):
        print(f"{len(done)} of {len(seeds)} seeds are trained; {how_to_resume(command, folder)}")
    status = "failed" if failed else "finished" if len(done) == len(seeds) else "stopped"
    runs = [{"seed": seed, "run": str(seed_folder(folder, seed)), "status": statuses.get(seed, "not begun")} for seed in seeds]
    result: dict[str, Any] = {"status": status, "run": str(folder), "seeds": runs}
    result["comparisons"] = [comparison.as_dict() for comparison in comparisons]
    return CommandResult(result, stop.exit_code if stop.was_asked() else FAILED if failed else OK)


def _compared(folders: Sequence[Path], figures: Sequence[str]) -> list[Comparison]:
    """Return the comparison by the figure that the runs are judged by, then those by the other figures that all of them have."""
    if not folders:
        return []
    first = compare_runs(folders)
    others = [compare_runs(folders, figure=name) for name in figures if name != first.figure.name]
    return [first, *(other for other in others if all(run.value is not None for run in other.runs))]


def _print_others(comparisons: Sequence[Comparison]) -> None:
    rows = []
    for comparison in comparisons:
        for pair in comparison.twins:
            verdict = pair.verdict(better=comparison.figure.better)
            rows.append([comparison.figure.name, str(len(pair.differences)), written_interval(pair.interval, sign="+"), verdict])
    if rows:
        print("\n" + aligned([["difference to the twin", "pairs", "95 % interval over seeds", ""], *rows]))
