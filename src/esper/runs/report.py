"""The report of a ppo, controller or arena run: one self-contained page `report.html` in its folder. Imports no torch.

    write_run_report("runs/cue-0")

The page is made from the events so far, also of a run that is under way or was killed: main figures, curves, health, evaluation, and the
settings. Growth runs have a report of their own, `esper.growth.report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from esper.files import MAX_CONFIG_BYTES, printable, read_file, write_file
from esper.runs.analysis import sections_about_seeds
from esper.runs.catalog import Run, Summary, open_run
from esper.runs.folder import CONFIG, RunError
from esper.runs.health import lights
from esper.runs.index import Series, thinned
from esper.runs.opponents import RECENT, opponent_rows
from esper.runs.page import WIDTH, Line, chart, note, render, section, table, tiles
from esper.text_table import duration, figure

REPORT = "report.html"
POINTS = 500  # of a curve at most
_MAY_BE_LOG = ("KL divergence per update", "Gradient norm", "Losses")
_TITLES = {"ppo": "policy", "controller": "controller", "arena": "player"}
_STATES = {
    "running": "is training",
    "finished": "has finished",
    "stopped": "was stopped",
    "dead": "was killed, or hangs,",
    "empty": "has not begun",
}
_COLOURS = {"green": "good", "yellow": "fair", "red": "trouble"}


def write_run_report(folder: Path | str) -> Path:
    """Write the report of a run, finished or not, into its folder, and return its path. An older report is replaced."""
    run = open_run(folder)
    if run.kind == "growth":
        raise RunError(f"{folder} is a growth run, which has a report of its own: esper report {folder}")
    if not run.index.kinds.get("run_started"):
        raise RunError(f"there is nothing to report about {folder}: the training has not begun; try again later")
    path = Path(folder) / REPORT
    write_file(path, report_of(run).encode())
    return path


def report_of(run: Run) -> str:
    """Return the page as HTML."""
    summary = run.summary()
    parts = [f'<p class="summary">{escape(_headline(run, summary))}</p>', tiles(_tiles(run, summary)), note(_circumstances(run))]
    if run.kind == "controller":
        parts += _controller_sections(run)
    if run.kind == "arena":
        parts += _arena_sections(run)
    if charts := list(filter(None, _return_charts(run))):
        parts.append(section("Return", *charts))
    parts.append(section("Learner", '<div class="grid">', *_learner_charts(run), "</div>"))
    parts.append(section("Health", _health_table(run), note("Means of the last ten updates.")))
    if rows := _evaluation_rows(run):
        heading = ("", "step", "episodes", "win rate" if run.kind == "arena" else "mean return", "mean length", "cut")
        parts.append(section("Evaluation", table(heading, rows, numbers=range(1, 6))))
    if rows := _anomaly_rows(run):
        names = ("anomaly", "of", "times", "first at step", "last at step", "last value", "what to do")
        parts.append(section("Anomalies", table(names, rows, numbers=range(2, 6))))
    try:
        config = read_file(run.folder / CONFIG, max_bytes=MAX_CONFIG_BYTES)
    except OSError:
        config = b""
    if config:
        parts.append(section("Settings", f"<pre>{escape(config.decode(errors='replace'))}</pre>"))
    return render(printable(run.name), parts)


# The first lines


def _headline(run: Run, summary: Summary) -> str:
    share = "" if summary.progress is None or summary.state == "finished" else f", {summary.progress:.0%} of the training"
    value = "" if summary.best is None else f"{summary.best:.1%}" if summary.figure == "win rate" else figure(summary.best, 3)
    best = "" if summary.best is None else f" · best {summary.figure} {value}"
    return f"The {_TITLES[run.kind]} {_STATES[summary.state]} after {summary.step:,} steps{share}{best}"


def _tiles(run: Run, summary: Summary) -> list[tuple[str, str]]:
    """Return the main figures as (value, name): the result that counts comes first."""
    found: list[tuple[str, str]] = []
    name = "win rate" if run.kind == "arena" else "return"
    evaluated = run.index.events("evaluated")[-1:]
    if run.kind == "controller" and summary.last is not None:
        rounds = run.index.series("round_ended/utility").values
        if len(rounds):
            found.append(
                (figure(float(rounds[-LAST_ROUNDS:].mean()), sign="+"), f"utility, mean of the last {min(len(rounds), LAST_ROUNDS)} rounds")
            )
    if evaluated:
        value = float(evaluated[0]["mean_return"])  # raw events hold "nan" as a text
        shown = f"{value:.1%}" if run.kind == "arena" else figure(value, 3)
        found.append(
            (
                shown,
                f"{name} of the best checkpoint in {evaluated[0]['episodes']:,} fresh {'battles' if run.kind == 'arena' else 'episodes'}",
            )
        )
    returns = run.index.series("update/mean_return").values
    if len(returns):
        found.append((figure(float(returns[-1]), 3), "return in training, last 100 episodes"))
    found.append((f"{summary.step:,}", "steps"))
    speed = run.index.series("update/steps_per_second").values
    if len(speed):
        found.append((f"{float(speed[-LAST_ROUNDS:].mean()):,.0f}", "steps per second"))
    if ended := run.index.events("run_ended")[-1:]:
        found.append((duration(ended[0]["seconds"]), "of training"))
    return found


LAST_ROUNDS = 10  # values whose mean is the figure of now


def _circumstances(run: Run) -> str:
    started, header = run.index.events("run_started")[-1], run.index.events("header")[:1]
    parts = [
        str(started.get("env_id", "")),
        f"{started['num_envs']:,} environments",
        f"{started['parameters']:,} parameters",
        f"on {started['device']}",
        f"esper {header[0]['esper']}" if header else "",
        f"{run.index.kinds.get('resumed', 0)} times resumed" if run.index.kinds.get("resumed") else "",
    ]
    return " · ".join(filter(None, parts))


# Curves


def _line(run: Run, name: str, label: str, colour: str = "", *, is_dashed: bool = False) -> Line:
    series = thinned(run.index.series(name), POINTS)
    steps = series.steps.tolist()
    if steps and max(steps) < 0:  # an old file, whose lines have no step: number the events
        steps = list(range(1, len(steps) + 1))
    return Line(label, steps, series.values.tolist(), colour, is_dashed)


def _drawn(title: str, lines: Sequence[Line], *, is_percent: bool = False, is_small: bool = False, may_be_log: bool = False) -> str:
    """Return a chart, or nothing if no line has a point."""
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return ""
    width, height = (440, 220) if is_small else (WIDTH, 250)
    return chart(lines, x="steps", y=title, is_percent=is_percent, may_be_log=may_be_log, width=width, height=height)


def _all_of(run: Run, prefix: str) -> list[Line]:
    """Return the lines of all keys of a dictionary in events, such as the heads of an entropy."""
    return [_line(run, name, name.removeprefix(prefix)) for name in run.index.names() if name.startswith(prefix)]


def _return_charts(run: Run) -> list[str]:
    evaluated = _line(run, "checkpoint_evaluated/mean_return", "evaluation of checkpoints", "b")
    lines = [_line(run, "update/mean_return", "training, last 100 episodes", "a")]
    if run.kind != "arena":
        return [_drawn("", [*lines, evaluated])]
    return [_drawn("", lines)]


def _learner_charts(run: Run) -> list[str]:
    heads = _all_of(run, "update/kl/")
    shown = {
        "Entropy as a share of its maximum": _all_of(run, "update/entropy/"),
        "KL divergence per update": [_line(run, "update/total_kl", "total"), *(heads if len(heads) > 1 else [])],
        "Explained variance": [_line(run, "update/explained_variance", "explained variance")],
        "Losses": [_line(run, "update/policy_loss", "policy"), _line(run, "update/value_loss", "value")],
        "Gradient norm": [_line(run, "update/grad_norm", "gradient norm")],
        "Clipped share": [_line(run, "update/clip_fraction", "clipped share")],
        "Learning rate": [_line(run, "update/learning_rate", "learning rate")],
        "Steps per second": [_line(run, "update/steps_per_second", "steps per second")],
        "Length of episodes": [_line(run, "update/mean_length", "length")],
    }
    return [_drawn(title, lines, is_small=True, may_be_log=title in _MAY_BE_LOG) for title, lines in shown.items()]


def _health_table(run: Run) -> str:
    found = lights(run.index)
    if not found:
        return "<p>There was no update yet.</p>"
    rows = [
        (light.name, figure(light.value, 3), {"green": "good", "yellow": "watch it", "red": "bad"}[light.colour], light.advice)
        for light in found
    ]
    return table(("diagnostic", "value", "", "what to do"), rows, numbers=(1,), classes=[_COLOURS[light.colour] for light in found])


def _evaluation_rows(run: Run) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for kind, name in (("checkpoint_evaluated", "checkpoint"), ("evaluated", "best checkpoint, at the end")):
        for event in run.index.events(kind)[-20:]:
            mean = float(event["mean_return"])
            value = f"{mean:.1%}" if run.kind == "arena" else figure(mean, 3)
            rows.append(
                (name, f"{event['step']:,}", f"{event['episodes']:,}", value, f"{event['mean_length']:.1f}", str(event.get("cut", 0)))
            )
    return rows


def _anomaly_rows(run: Run) -> list[tuple[str, ...]]:
    """Return the anomalies, those of one kind and subject together."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in run.index.events("anomaly"):
        if not event["has_ended"]:
            found.setdefault((event["what"], event["subject"]), []).append(event)
    for event in run.index.events("warned"):  # in old files
        found.setdefault((event["diagnostic"], event["subject"]), []).append(event)
    return [
        (
            what.replace("_", " "),
            subject,
            str(len(some)),
            f"{some[0]['step']:,}",
            f"{some[-1]['step']:,}",
            figure(float(some[-1]["value"]), 3),
            some[-1].get("advice", ""),
        )
        for (what, subject), some in found.items()
    ]


# Controller


def _controller_sections(run: Run) -> list[str]:
    """Return utility by cell of the domain, its parts, and what became of the blueprints."""
    rounds = run.index.events("round_ended")
    if not rounds:
        return [note("No round has ended yet.")]
    lines = [_line(run, "round_ended/utility", "all rounds", "a")]
    cells = dict.fromkeys((event["task"], event["host"]) for event in rounds)
    if 1 < len(cells) <= 5:
        for task, host in cells:
            own = [event for event in rounds if (event["task"], event["host"]) == (task, host)]
            lines.append(Line(f"{task}, {host}", [event["step"] for event in own], [event["utility"] for event in own]))
    parts = [
        _drawn("Utility of a round: gain over the twin minus rent", lines),
        '<div class="grid">',
        _drawn("Gain and rent", [_line(run, "round_ended/gain", "gain"), _line(run, "round_ended/rent", "rent")], is_small=True),
        _drawn("Seeds of all hosts", [_line(run, "round_ended/grown", "grown"), _line(run, "round_ended/kept", "kept")], is_small=True),
        _drawn("Rollbacks", [_line(run, "round_ended/rollbacks", "rollbacks")], is_small=True),
        _drawn("Parts of the reward", _all_of(run, "round_ended/reward/"), is_small=True),
        "</div>",
    ]
    sections = [section("Rounds", *parts)]
    rows: list[tuple[str, ...]] = [
        (task, host, str(len(own)), figure(sum(event["utility"] for event in own) / len(own), sign="+"),
         figure(sum(event["gain"] for event in own) / len(own), sign="+"), figure(sum(event["rent"] for event in own) / len(own)))
        for task, host in cells
        if (own := [event for event in rounds if (event["task"], event["host"]) == (task, host)][-LAST_ROUNDS:])
    ]  # fmt: skip
    heading = ("task", "host", "rounds", "mean utility", "mean gain", "mean rent")
    sections.append(
        section("Cells of the domain", table(heading, rows, numbers=range(2, 6)), note(f"Means of the last {LAST_ROUNDS} rounds."))
    )
    sections += sections_about_seeds(run)
    return sections


# Arena


def _arena_sections(run: Run) -> list[str]:
    """Return win rates by opponent, the parts of the reward, and the changes of the league."""
    counts = "round_fought/battles/"
    battles = {name.removeprefix(counts): run.index.series(name).values.sum() for name in run.index.names() if name.startswith(counts)}
    most = sorted(battles, key=lambda name: -battles[name])[:5]
    lines = [_line(run, f"round_fought/win_rate/{name}", name) for name in most]
    checkpoints: Series = run.index.series("checkpoint_evaluated/mean_return")
    evaluation = Line("checkpoints, in evaluation", checkpoints.steps.tolist(), checkpoints.values.tolist(), "f")
    parts = [_drawn("Win rate by opponent; a draw is half a win", [*lines, evaluation], is_percent=True)]
    rows = [
        (
            row.name,
            "anchor" if row.is_anchor else "",
            *map(str, (row.won, row.drawn, row.lost)),
            "–" if row.rate is None or row.low is None or row.high is None else f"{row.rate:.1%} [{row.low:.1%}, {row.high:.1%}]",
            "–" if row.rating is None else f"{row.rating:.1f} ± {row.spread:.1f}",
        )
        for row in opponent_rows(run.index)
    ]
    if rows:
        parts.append(table(("opponent", "", "won", "drawn", "lost", "win rate", "rating"), rows[:20], numbers=range(2, 7)))
        parts.append(note(f"Battles of the learner in the last {RECENT} rounds, with 95 % intervals over battles."))
    sections = [section("Win rates", *parts)]
    if reward := _drawn("Parts of the reward", _all_of(run, "round_fought/reward/")):
        sections.append(section("Reward", reward))
    changes = run.index.events("league_changed")[-20:]
    if changes:
        rows = [
            (f"{event['step']:,}", event["name"], "promoted" if event["is_promoted"] else "removed", event["reason"]) for event in changes
        ]
        sections.append(section("League", table(("step", "player", "", "why"), rows, numbers=(0,))))
    return sections
