"""Curves of every kind of run, and the sections that all reports have: curves, use of the machine, problems, settings. Imports no torch.

    charts = drawn_charts(run, CHARTS["ppo"])

`CHARTS` and `SYSTEM` are the series that the page of a run draws. The report draws them too, and the terminal shows them as small curves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from esper.files import MAX_CONFIG_BYTES, FileError, read_in_run
from esper.runs.catalog import Run
from esper.runs.folder import CONFIG, GROW
from esper.runs.health import problem_in_words, problems
from esper.runs.index import Series, thinned
from esper.runs.page import WIDTH, Line, chart, folded, note, section, table, tiles
from esper.text_table import figure

POINTS = 500  # of a curve in a report, at most
MOST_CHARTS = 40  # of a run of another kind
SMALL = (440, 220)  # width and height of a chart beside another one
MIB = 2**20


class Curves(NamedTuple):
    """One chart: its title, and its series by label. A series that ends in / stands for all that begin so, with the rest as label."""

    title: str
    series: dict[str, str]
    may_be_log: bool = False
    is_percent: bool = False


_LEARNER = (
    Curves("losses", {"policy": "update/policy_loss", "value": "update/value_loss"}, may_be_log=True),
    Curves("entropy by head", {"": "update/entropy/"}),
    Curves("KL divergence", {"total": "update/total_kl", "": "update/kl/"}, may_be_log=True),
    Curves("explained variance", {"explained variance": "update/explained_variance"}),
    Curves("clipped share", {"clipped share": "update/clip_fraction"}),
    Curves("gradient norm", {"gradient norm": "update/grad_norm"}, may_be_log=True),
    Curves("learning rate", {"learning rate": "update/learning_rate"}),
)
CHARTS: dict[str, tuple[Curves, ...]] = {
    "growth": (
        Curves("loss", {"training": "epoch_ended/train_loss", "validation": "epoch_ended/val_loss"}, may_be_log=True),
        Curves("metrics", {"": "epoch_ended/metrics/"}),
        Curves("parameters", {"parameters": "epoch_ended/parameters"}),
        Curves("FLOPs of a forward pass", {"FLOPs": "epoch_ended/flops"}),
        Curves("learning rate", {"learning rate": "epoch_ended/learning_rate"}, may_be_log=True),
    ),
    "ppo": (
        Curves("return", {"training, last 100 episodes": "update/mean_return", "checkpoints": "checkpoint_evaluated/mean_return"}),
        Curves("episode length", {"episode length": "update/mean_length"}),
        *_LEARNER,
    ),
    "arena": (
        Curves("win rate", {"": "round_fought/win_rate/"}, is_percent=True),
        Curves("checkpoints: score against the anchor", {"score": "checkpoint_evaluated/mean_return"}, is_percent=True),
        Curves("ratings of the league", {"": "league_changed/rating/"}),
        Curves("parts of the reward", {"": "round_fought/reward/"}),
        Curves("return in training", {"last 100 episodes": "update/mean_return"}),
        *_LEARNER,
    ),
    "controller": (
        Curves("utility of a fleet", {"utility": "round_ended/utility"}),
        Curves("gain and rent", {"gain": "round_ended/gain", "rent": "round_ended/rent"}),
        Curves("share of lives decided as advised", {"as advised": "round_ended/alike"}, is_percent=True),
        Curves("operations that the policy chose", {"": "round_ended/decisions/"}),
        Curves("seeds grown and kept", {"grown": "round_ended/grown", "kept": "round_ended/kept"}),
        Curves("rollbacks", {"rollbacks": "round_ended/rollbacks"}),
        Curves("parts of the reward", {"": "round_ended/reward/"}),
        *_LEARNER,
    ),
}


def _use_of(kind: str) -> tuple[Curves, ...]:
    place = f"{kind}/resources"
    memory = {"in use": f"{place}/device_memory_bytes", "most": f"{place}/device_peak_bytes", "of the GPU": f"{place}/device_total_bytes"}
    return (
        Curves("cores in use by the training", {"cores": f"{place}/cpu_cores"}),
        Curves("memory of the training, bytes", {"memory": f"{place}/memory_bytes"}),
        Curves("GPU memory, bytes", memory),
        Curves("share of the time in which the GPU computes", {"GPU": f"{place}/device_use"}, is_percent=True),
    )


_SAMPLES = Curves("samples per second", {"samples per second": "update/steps_per_second"})
_LEARNER_SYSTEM = (
    Curves(
        "seconds of an update",
        {
            "collecting": "update/collect_seconds",
            "learning": "update/update_seconds",
            "environments": "update/env_seconds",
            "other": "update/other_seconds",
        },
    ),
    *_use_of("update"),
)
SYSTEM: dict[str, tuple[Curves, ...]] = {
    "growth": (
        Curves("samples per second", {"samples per second": "epoch_ended/samples_per_second"}),
        Curves("seconds per step", {"seconds": "epoch_ended/step_seconds"}),
        Curves("wait for data, seconds per epoch", {"wait": "epoch_ended/data_wait_seconds"}),
        *_use_of("epoch_ended"),
    ),
    "ppo": (_SAMPLES, *_LEARNER_SYSTEM),
    "arena": (_SAMPLES, *_LEARNER_SYSTEM),
    "controller": (
        Curves("lives per second", {"lives per second": "update/steps_per_second"}),
        *_LEARNER_SYSTEM,
        Curves("memory per host, bytes", {"memory": "round_ended/memory_per_host"}),
    ),
}


def charts_of(run: Run) -> tuple[Curves, ...]:
    """Return the charts of a run: those of its kind, or else its figures and then all other numbers of its events."""
    if run.kind in CHARTS:
        return CHARTS[run.kind]
    found = [
        Curves(f"{each.name}, {each.unit}" if each.unit else each.name, {each.name: each.series}, is_percent=each.unit == "share")
        for each in run.declared().figures
        if each.series
    ]
    drawn = {series for curves in found for series in curves.series.values()}
    # Numbers of one table of an event are in one chart.
    others = [name if name.count("/") < 2 else f"{name.rpartition('/')[0]}/" for name in run.own_series() if name not in drawn]
    found += [Curves(place.rstrip("/"), {"" if place.endswith("/") else place: place}) for place in dict.fromkeys(others)]
    return tuple(found[:MOST_CHARTS])


def series_of(names: Sequence[str], curves: Curves) -> dict[str, str]:
    """Return the series of a chart that are among `names`, by label. A single head is left out beside the total, which it equals.

    >>> divergence = Curves("KL", {"total": "update/total_kl", "": "update/kl/"})
    >>> series_of(["update/kl/op", "update/kl/slot", "update/total_kl"], divergence)
    {'total': 'update/total_kl', 'op': 'update/kl/op', 'slot': 'update/kl/slot'}
    >>> series_of(["update/kl/op", "update/total_kl"], divergence)
    {'total': 'update/total_kl'}
    """
    found: dict[str, str] = {}
    for label, wanted in curves.series.items():
        if not wanted.endswith("/"):
            found |= {label: wanted} if wanted in names else {}
            continue
        inside = [name for name in names if name.startswith(wanted)]
        if len(inside) > 1 or not found:
            found |= {name.removeprefix(wanted) if name.removeprefix(wanted) not in found else name: name for name in inside}
    return found


# Charts


def curve(series: Series, label: str, colour: str = "") -> Line:
    """Return a series as a line over the steps of the run."""
    series = thinned(series, POINTS)
    steps = series.steps.tolist()
    if steps and max(steps) < 0:  # an old file, whose lines have no step: number the events
        steps = list(range(1, len(steps) + 1))
    return Line(label, steps, series.values.tolist(), colour)


def drawn_charts(run: Run, wanted: Iterable[Curves], *, is_small: bool = True) -> list[str]:
    """Return the charts of `wanted` of which the run has at least one series."""
    width, height = SMALL if is_small else (WIDTH, 250)
    names, drawn = run.index.names(), []
    for curves in wanted:
        lines, axis = [], run.declared().unit
        for label, name in series_of(names, curves).items():
            line = curve(run.index.series(name), label)
            if name.startswith("round_ended/"):  # fleets of one update end at the same step, so they are numbered instead
                series = run.index.series(name)
                numbered = series._replace(steps=series.steps * 0 + range(1, len(series.steps) + 1))
                line, axis = curve(numbered, label), "fleets that have ended"
            if len(line.x):
                lines.append(line)
        if lines:
            options: dict[str, Any] = {"is_percent": curves.is_percent, "may_be_log": curves.may_be_log}
            drawn.append(chart(lines, x=axis, y=curves.title[0].upper() + curves.title[1:], width=width, height=height, **options))
    return drawn


def in_grid(charts: Iterable[str]) -> str:
    """Return charts beside each other, as many as the page is wide."""
    inside = "".join(charts)
    return f'<div class="grid">{inside}</div>' if inside else ""


# The machine


def _mib(value: float) -> str:
    return f"{value / MIB:,.0f} MiB"


def system_figures(run: Run) -> list[tuple[str, str]]:
    """Return the newest figures of the machine as (value, name), in units for people."""
    is_growth = run.kind == "growth"
    speed = "lives per second" if run.kind == "controller" else "samples per second"
    kind = "epoch_ended" if is_growth else "update"
    wanted: list[tuple[str, str, Callable[[float], str]]] = [
        (speed, "samples_per_second" if is_growth else "steps_per_second", figure),
        ("per step", "step_seconds", lambda value: f"{figure(1000 * value, 2)} ms"),
        ("wait for data", "data_wait_seconds", lambda value: f"{figure(value, 2)} s"),
        ("collecting", "collect_seconds", lambda value: f"{figure(value, 2)} s"),
        ("learning", "update_seconds", lambda value: f"{figure(value, 2)} s"),
        ("wait for environments", "env_seconds", lambda value: f"{figure(value, 2)} s"),
        ("cores in use", "resources/cpu_cores", lambda value: figure(value, 2)),
        ("memory", "resources/memory_bytes", _mib),
        ("GPU memory", "resources/device_memory_bytes", _mib),
        ("GPU in use", "resources/device_use", lambda value: f"{value:.0%}"),
    ]
    found = [(words(float(values[-1])), name) for name, key, words in wanted if len(values := run.index.series(f"{kind}/{key}").values)]
    hosts = run.index.series("round_ended/memory_per_host").values
    return [*found, *([(_mib(float(hosts[-1])), "memory per host")] if len(hosts) and hosts[-1] else [])]


def system_section(run: Run) -> str:
    """Return the section about the use of the machine; nothing if the run does not tell it."""
    charts = drawn_charts(run, SYSTEM.get(run.kind, ()))
    if not charts:
        return ""
    when = "last epoch" if run.kind == "growth" else "last update"
    return folded("System", tiles(system_figures(run)), in_grid(charts), note(f"The figures are those of the {when}."))


# Problems, labels, settings


def problem_section(run: Run) -> str:
    """Return the section about what went wrong, newest first, without anomalies and rollbacks, which a report tells in other places."""
    found = [problem for problem in problems(run.index) if problem["kind"] not in ("anomaly", "rolled_back")]
    rows = [(problem["kind"].replace("_", " "), problem_in_words(problem)) for problem in found]
    return section("Warnings", table(("", "newest first"), rows)) if rows else ""


def settings_section(run: Run) -> str:
    """Return the section with the settings file of a run; nothing if it cannot be read."""
    text = ""
    for name in (CONFIG, GROW):  # the settings of `esper grow` hold more than those of the training in it
        try:
            text = read_in_run(run.folder / name, max_bytes=MAX_CONFIG_BYTES).decode(errors="replace")
        except (OSError, FileError):
            continue
    return folded("Settings", f"<pre>{escape(text)}</pre>" if text else "")


def remarks_on(run: Run) -> Iterator[str]:
    """Yield paragraphs about what is unusual with a run as a whole: a killed process, damaged lines, its note and tags."""
    labels = run.shown_labels()
    if labels.note or labels.tags:
        yield note(" · ".join(filter(None, [labels.note, *labels.tags])))
    if run.state() == "dead":
        yield note(
            "Its process gave no sign of life any more: it was killed, or hangs. Give its command the option --resume to continue it."
        )
    if skipped := run.index.count_skipped():
        yield note(f"{skipped:,} damaged lines of its log are left out, as after a full disk or a crash.")
