"""Compare runs: final figures, differing settings, and paired differences with intervals over seeds. Imports no torch.

    comparison = compare_runs(["runs/small", "runs/large"])     # runs, or folders with runs
    print(comparison)
    comparison.plot("comparison.svg")

Runs whose settings differ only in the seed form a group. Two groups are compared by the differences between runs of equal seeds, and a
grown group is compared with its twins in the same way. One training counts as one sample: intervals are Student's, over seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from esper.files import user_cache
from esper.intervals import Interval, student_interval
from esper.runs.catalog import Run, at_steps, differing_settings, find_runs, open_run, settings_of
from esper.runs.events import Figure
from esper.runs.folder import EVENTS, GROW, TWIN, RunError, State, kind_of
from esper.runs.foreign import clean
from esper.runs.index import Series
from esper.runs.seeds import SEED_FOLDER
from esper.text_table import aligned, did_you_mean

SEED_SETTINGS = ("seed", "ppo.seed")  # the first that a run has is its seed
NOT_COMPARED = frozenset({*SEED_SETTINGS, "twin", "tensorboard", "wandb"})  # settings that may differ within a group
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # told apart by colour-blind people too
NONE = "-"


class ComparedRun(msgspec.Struct, frozen=True):
    """One run of a comparison."""

    name: str  # as short as it can be among the runs
    folder: Path
    kind: str
    state: State
    seed: int | None
    value: float | None  # of the figure that is compared
    figures: dict[str, float]  # final figures by name
    curve: Series  # of the figure that is compared
    twin_value: float | None = None  # of the twin of a growth run
    unit: str = "steps"  # what its steps count


class RunGroup(msgspec.Struct, frozen=True):
    """Runs whose settings differ only in the seed."""

    name: str
    runs: list[ComparedRun]
    mean: Interval | None  # of the figure, over seeds; None below two values

    def by_seed(self) -> dict[int | str, float]:
        """Return the figure of each seed; the mean of runs with the same seed, which are one sample. Runs of unknown seeds have names."""
        found: dict[int | str, list[float]] = {}
        for run in self.runs:
            if run.value is not None:
                found.setdefault(run.name if run.seed is None else run.seed, []).append(run.value)
        return {seed: float(np.mean(values)) for seed, values in found.items()}


class PairedDifference(msgspec.Struct, frozen=True):
    """The mean difference `ours - theirs` over pairs of equal seeds."""

    ours: str
    theirs: str
    seeds: list[int | str]
    differences: list[float]  # of each seed
    estimate: float
    interval: Interval | None  # 95 %, over seeds; None for one pair

    def verdict(self, *, better: Literal["up", "down", ""]) -> str:
        """Return whether chance can explain the difference, in words."""
        if self.interval is None:
            return "one pair, no interval"
        if self.interval.low <= 0 <= self.interval.high:
            return "may be chance"
        if not better:
            return "higher" if self.estimate > 0 else "lower"
        return "better" if (self.estimate > 0) == (better == "up") else "worse"


class Comparison(msgspec.Struct, frozen=True):
    """Runs beside each other. `print` shows it as tables."""

    figure: Figure
    groups: list[RunGroup]
    differing: dict[str, dict[str, Any]]  # setting -> group -> value, without seeds
    paired: list[PairedDifference]  # every other group against the first
    twins: list[PairedDifference]  # grown runs against their twins, by group
    notes: list[str]

    @property
    def runs(self) -> list[ComparedRun]:
        return [run for group in self.groups for run in group.runs]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison without its curves, as plain values."""
        runs = [
            {"name": run.name, "folder": str(run.folder), "kind": run.kind, "state": run.state, "seed": run.seed, "group": group.name}
            | {"value": run.value, "twin": run.twin_value, "figures": run.figures}
            for group in self.groups
            for run in group.runs
        ]
        return {
            "figure": self.figure.name,
            "runs": runs,
            "groups": [{"name": group.name, "mean": _ends(group.mean)} for group in self.groups],
            "settings": self.differing,
            "paired": [_as_dict(pair, self.figure) for pair in self.paired],
            "twins": [_as_dict(pair, self.figure) for pair in self.twins],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        parts = [_runs_text(self), _settings_text(self), _groups_text(self), _pairs_text(self), "\n".join(self.notes)]
        return "\n\n".join(part for part in parts if part)

    def plot(self, path: Path | str) -> None:
        """Draw the curves of all runs and the final figures of the groups into a .png, .svg or .pdf file."""
        draw(self, Path(path))


# Finding and reading


def expand(places: Iterable[Path | str]) -> list[Path]:
    """Return the folders of runs: each place is a run, or a folder with runs. Raise RunError if one holds none."""
    found: dict[Path, Path] = {}
    for place in map(Path, places):
        folders = [place] if kind_of(place) is not None else [run.folder for run in find_runs(place)]
        if not folders:
            what = "there is no such folder" if not place.exists() else "it holds no run"
            raise RunError(f"{place}: {what}; name the folder of a run, or a folder with runs")
        for folder in folders:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of paths, as many as it takes to tell all of them apart.

    >>> short_names([Path("runs/a/seed-0"), Path("runs/b/seed-0")])
    ['a/seed-0', 'b/seed-0']
    """
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max((len(part) for part in parts), default=1)):
        names = [clean("/".join(part[-count:])) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [clean(folder) for folder in folders]


def settings_read(run: Run) -> dict[str, Any]:
    """Return the settings of a run, by section. Raise RunError if their file is damaged."""
    try:
        return run.config()
    except (OSError, ValueError) as error:
        raise RunError(f"the settings of {run.folder} cannot be read: {error}") from error


def seed_of(config: Mapping[str, Any]) -> int | None:
    """Return the seed in the settings of a run; None if they have none."""
    settings = settings_of(config)
    return next((settings[name] for name in SEED_SETTINGS if isinstance(settings.get(name), int)), None)


def final_figures(run: Run) -> dict[str, float]:
    """Return the figures that a run has ended with, or has so far, by name."""
    values = ((figure.name, final_value(run, figure)) for figure in run.declared().figures)
    return {name: value for name, value in values if value is not None}


def final_value(run: Run, figure: Figure) -> float | None:
    """Return the last value of a figure: the one that the run has ended with, if it has ended."""
    if figure.final and run.state() in ("finished", "stopped"):
        ended = run.index.series(figure.final).values
        if len(ended):
            return float(ended[-1])
    values = run.index.series(figure.series).values
    return float(values[-1]) if len(values) else None


def find_figure(runs: Sequence[Run], name: str | None) -> Figure:
    """Return the figure of this name, or the series of this name; without a name, the first one that all runs have."""
    kinds = list(dict.fromkeys(run.kind for run in runs))
    if name is None:
        if len(kinds) > 1:
            raise RunError(
                f"these are runs of several kinds ({', '.join(kinds)}); name runs of one kind, or a figure that all of them have"
            )
        choices = runs[0].declared().figures or [Figure("figure")]
        return next((figure for figure in choices if all(final_value(run, figure) is not None for run in runs)), choices[0])
    known = {figure.name: figure for run in runs for figure in run.declared().figures}
    if name in known:
        return known[name]
    series = list(dict.fromkeys(series for run in runs for series in run.index.names()))
    if name in series:
        return Figure(name, name)
    example = f", such as {series[-1]}" if series else ""
    hint = did_you_mean(name, [*known, *series], otherwise=f"there are {', '.join(known)}, and all numbers of events{example}")
    raise RunError(f"no run has the figure {name!r}; {hint}")


# Comparing


def compare_runs(places: Iterable[Path | str], *, figure: str | None = None, cache: Path | None = None) -> Comparison:
    """Compare runs by one figure: the one that their kind is judged by, or the one that is named.

    A place is a run, or a folder with runs. `figure` is the name of a final figure or of a series, such as update/total_kl. If not all runs
    have ended, they are compared at the last step that all have reached. `cache` is the folder for indices of large runs.
    """
    return compare_opened([open_run(folder, cache=cache or user_cache()) for folder in expand(places)], figure=figure, cache=cache)


def compare_opened(runs: Sequence[Run], *, figure: str | None = None, cache: Path | None = None) -> Comparison:
    """Compare runs whose events have been read; see `compare_runs`."""
    if not runs:
        raise RunError("name the runs to compare")
    chosen, names = find_figure(runs, figure), short_names([run.folder for run in runs])
    step = _common_step(runs, chosen)
    configs = {name: settings_read(run) for name, run in zip(names, runs, strict=True)}
    compared = {name: _compared(name, run, chosen, step, seed_of(configs[name]), cache) for name, run in zip(names, runs, strict=True)}
    members: dict[bytes, list[str]] = {}
    for name, run in zip(names, runs, strict=True):
        kept = {setting: value for setting, value in settings_of(configs[name]).items() if setting not in NOT_COMPARED}
        members.setdefault(msgspec.json.encode([run.kind, sorted(kept.items())], enc_hook=str), []).append(name)
    parts = [own for part in members.values() for own in _separated(part, compared)]
    differing = differing_settings({part[0]: configs[part[0]] for part in parts})
    differing = {setting: row for setting, row in differing.items() if setting not in NOT_COMPARED}
    labels = _labels([[compared[name] for name in part] for part in parts])
    groups = [_group(label, [compared[name] for name in part]) for label, part in zip(labels, parts, strict=True)]
    renamed = {part[0]: label for label, part in zip(labels, parts, strict=True)}
    return Comparison(
        figure=chosen,
        groups=groups,
        differing={setting: {renamed[name]: value for name, value in row.items()} for setting, row in differing.items()},
        paired=[pair for group in groups[1:] if (pair := _paired(group, groups[0])) is not None],
        twins=[pair for group in groups if (pair := _against_twins(group)) is not None],
        notes=_notes(groups, chosen, step),
    )


def _common_step(runs: Sequence[Run], figure: Figure) -> int | None:
    """Return the last step that all runs have reached if some have not ended; None if all have, or if one has no curve."""
    if all(run.state() == "finished" for run in runs) or not figure.series:
        return None
    steps = [run.index.series(figure.series).steps for run in runs]
    return min(int(each[-1]) for each in steps) if all(len(each) for each in steps) else None


def _compared(name: str, run: Run, figure: Figure, step: int | None, seed: int | None, cache: Path | None) -> ComparedRun:
    twin = None
    if run.kind == "growth" and (run.folder / TWIN / EVENTS).is_file():
        twin = open_run(run.folder / TWIN, cache=cache or user_cache())
    return ComparedRun(
        name=name,
        folder=run.folder,
        kind=run.kind,
        state=run.state(),
        seed=seed,
        value=_value(run, figure, step),
        figures=final_figures(run),
        curve=run.index.series(figure.series or figure.final),
        unit=run.declared().unit,
        twin_value=None if twin is None or (step is None and twin.state() != "finished") else _value(twin, figure, step),
    )


def _value(run: Run, figure: Figure, step: int | None) -> float | None:
    if step is None:
        value = final_value(run, figure)
    else:
        series = run.index.series(figure.series)
        value = float(at_steps(series, np.array([step]))[0]) if len(series.values) and series.steps[-1] >= step else None
    return value if value is not None and math.isfinite(value) else None


def _separated(names: list[str], runs: Mapping[str, ComparedRun]) -> list[list[str]]:
    """Return the groups among runs with equal settings: one, except for growth runs of Python.

    Their settings do not name the model, so those with equal seeds may have different ones: then each is a group of its own.
    """
    members = [runs[name] for name in names]
    seeds = [run.seed for run in members]
    is_from_python = any(run.kind == "growth" and not (run.folder / GROW).is_file() for run in members)
    return [[name] for name in names] if is_from_python and len(set(seeds)) < len(seeds) else [names]


def _labels(parts: list[list[ComparedRun]]) -> list[str]:
    """Return a name for each group: that of its only run, of the folder that `--seeds` has made for it, or of its first run."""
    labels = []
    for part in parts:
        parents = {run.folder.resolve().parent for run in part}
        is_made = len(parents) == 1 and all(run.folder.resolve().name.startswith(SEED_FOLDER) for run in part)
        others = f" and {len(part) - 1} more" if len(part) > 1 else ""
        labels.append(parents.pop().name if is_made and len(part) > 1 else part[0].name + others)
    is_unique = len(set(labels)) == len(labels)
    return labels if is_unique else [f"{label} ({number})" for number, label in enumerate(labels, start=1)]


def _group(name: str, runs: list[ComparedRun]) -> RunGroup:
    runs = sorted(runs, key=lambda run: (run.seed is None, run.seed or 0))
    values = list(RunGroup(name, runs, None).by_seed().values())
    return RunGroup(name, runs, student_interval(values) if len(values) > 1 else None)


def _difference(ours: str, theirs: str, pairs: Mapping[int | str, tuple[float, float]]) -> PairedDifference | None:
    differences = [one - other for one, other in pairs.values()]
    if not differences:
        return None
    interval = student_interval(differences) if len(differences) > 1 else None
    return PairedDifference(ours, theirs, list(pairs), differences, float(np.mean(differences)), interval)


def _paired(group: RunGroup, base: RunGroup) -> PairedDifference | None:
    """Return the difference between two groups over the seeds that both have; a run without a known seed has no partner."""
    ours, theirs = group.by_seed(), base.by_seed()
    pairs: dict[int | str, tuple[float, float]] = {
        seed: (ours[seed], theirs[seed]) for seed in ours if isinstance(seed, int) and seed in theirs
    }
    return _difference(group.name, base.name, pairs)


def _against_twins(group: RunGroup) -> PairedDifference | None:
    paired = [run for run in group.runs if run.value is not None and run.twin_value is not None]
    ours = RunGroup(group.name, paired, None).by_seed()
    theirs = RunGroup(group.name, [msgspec.structs.replace(run, value=run.twin_value) for run in paired], None).by_seed()
    pairs = {seed: (ours[seed], theirs[seed]) for seed in ours}
    return _difference(group.name, "its twin" if len(pairs) == 1 else "its twins", pairs)


def _notes(groups: list[RunGroup], figure: Figure, step: int | None) -> list[str]:
    runs = [run for group in groups for run in group.runs]
    notes = []
    if unfinished := [f"{run.name} is {run.state}" for run in runs if run.state != "finished"]:
        where = "the last values are compared" if step is None else f"all are compared at step {step:,}, which all have reached"
        notes.append(f"Not all runs have finished ({', '.join(unfinished)}): {where}.")
    if missing := [run.name for run in runs if run.value is None]:
        notes.append(f"These have no value of the {figure.name} yet: {', '.join(missing)}.")
    if len(groups) > 1 and not any(len(group.runs) > 1 for group in groups):
        notes.append(
            "One run of each setting: another seed gives other figures. Train each setting with several seeds before you rely on this."
        )
    return notes


# As text


def written(value: float | None, *, sign: str = "") -> str:
    """Format a figure of unknown size with four significant digits, whole numbers with all of them.

    >>> written(0.123456), written(8_230_016.0), written(-0.5, sign="+"), written(None)
    ('0.1235', '8,230,016', '-0.5', '-')
    """
    if value is None:
        return NONE
    return (
        f"{value:{sign},.0f}" if value == int(value) and abs(value) >= 1 else f"{value:{sign}.4g}" if math.isfinite(value) else str(value)
    )


def _runs_text(comparison: Comparison) -> str:
    runs = comparison.runs
    figures = list(dict.fromkeys([comparison.figure.name, *(name for run in runs for name in run.figures)]))
    has_twins = any(run.twin_value is not None for run in runs)
    heading = ["run", "seed", comparison.figure.name, *(["of its twin"] if has_twins else []), *figures[1:]]
    rows = [
        [run.name, NONE if run.seed is None else str(run.seed), written(run.value)]
        + ([written(run.twin_value)] if has_twins else [])
        + [written(run.figures.get(name)) for name in figures[1:]]
        for run in runs
    ]
    return aligned([heading, *rows], numbers=True)


def _settings_text(comparison: Comparison) -> str:
    if len(comparison.groups) < 2:
        return ""
    names = [group.name for group in comparison.groups]
    rows = [[setting, *(shown_setting(row.get(name)) for name in names)] for setting, row in comparison.differing.items()]
    return aligned([["setting", *names], *rows]) if rows else "The settings are the same."


def shown_setting(value: object) -> str:
    """Format a setting for a table; long ones are cut."""
    text = NONE if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _groups_text(comparison: Comparison) -> str:
    groups = [group for group in comparison.groups if group.mean is not None]
    rows = [[group.name, str(len(group.by_seed())), written_interval(group.mean)] for group in groups]
    return aligned([[f"mean {comparison.figure.name}", "seeds", "95 % interval over seeds"], *rows]) if rows else ""


def written_interval(interval: Interval | None, *, sign: str = "") -> str:
    """Format an interval as `mean [low, high]`."""
    return NONE if interval is None else f"{interval.estimate:{sign}.4g} [{interval.low:{sign}.4g}, {interval.high:{sign}.4g}]"


def _pairs_text(comparison: Comparison) -> str:
    rows = []
    for pair in (*comparison.twins, *comparison.paired):
        shown = written(pair.estimate, sign="+") if pair.interval is None else written_interval(pair.interval, sign="+")
        verdict = pair.verdict(better=comparison.figure.better)
        rows.append([f"{pair.ours} − {pair.theirs}", str(len(pair.differences)), shown, verdict])
    return aligned([[f"difference of the {comparison.figure.name}", "pairs", "95 % interval over pairs", ""], *rows]) if rows else ""


def _ends(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else {"estimate": interval.estimate, "low": interval.low, "high": interval.high}


def _as_dict(pair: PairedDifference, figure: Figure) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(pair, name) for name in ("ours", "theirs", "seeds", "differences", "estimate")}
    return plain | {"interval": _ends(pair.interval), "verdict": pair.verdict(better=figure.better)}


# As a picture


def draw(comparison: Comparison, path: Path) -> None:
    """Draw curves on the left, one colour per group, and final figures with their intervals on the right."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise RunError(f"{path} is no picture that can be written; name a .png, .svg or .pdf file")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunError("a plot needs matplotlib; install it with: pip install 'esper-grow[plot]'") from error

    groups = comparison.groups
    canvas = Figure(figsize=(10, 4.2), layout="constrained")
    curves, finals = canvas.subplots(1, 2, width_ratios=(3, 1))
    for number, group in enumerate(groups):
        colour = COLOURS[number % len(COLOURS)]
        # Every run is a thin line. Runs that are seeds of one setting also have their mean as a thick line, as far as all of them go.
        lines = [run.curve for run in group.runs if len(run.curve.values)]
        for index, line in enumerate(lines):
            is_alone = len(lines) == 1
            label = group.name if is_alone and index == 0 else None
            curves.plot(line.steps, line.values, color=colour, lw=1.8 if is_alone else 0.7, alpha=1 if is_alone else 0.45, label=label)
        if len(lines) > 1:
            steps = np.unique(np.concatenate([line.steps for line in lines]))
            steps = steps[(steps >= max(line.steps[0] for line in lines)) & (steps <= min(line.steps[-1] for line in lines))]
            mean = np.mean([at_steps(line, steps) for line in lines], axis=0)
            curves.plot(steps, mean, color=colour, lw=2.2, label=f"{group.name}, mean of {len(lines)}")
        values = list(group.by_seed().values())
        finals.plot([number] * len(values), values, "o", color=colour, alpha=0.6, ms=5)
        if group.mean is not None:
            reach = group.mean.high - group.mean.estimate
            finals.errorbar(number, group.mean.estimate, yerr=reach, color=colour, capsize=6, fmt="_", ms=14, lw=2)
    curves.set(xlabel=comparison.runs[0].unit, ylabel=comparison.figure.name)
    finals.set_xlim(-0.6, len(groups) - 0.4)
    finals.set_title("at the end, 95 % over seeds" if any(group.mean for group in groups) else "at the end", fontsize=9)
    finals.set_xticks(range(len(groups)), [group.name for group in groups], rotation=20 if len(groups) > 2 else 0, ha="center")
    for axes in (curves, finals):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if any(len(run.curve.values) for run in comparison.runs):
        curves.legend(frameon=False, fontsize=9)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        canvas.savefig(temporary, dpi=150)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
