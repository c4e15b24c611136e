"""The report of a run that is no growth run: one self-contained page `report.html` in its folder. Imports no torch.

    write_run_report("runs/cue-0")

The page is made from the events so far, also of a run that is under way or was killed, and has the same parts as the page of the run in
the dashboard. Growth runs have a report of their own, `esper.growth.report`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from esper.files import printable, write_in_run
from esper.runs.analysis import sections_about_seeds
from esper.runs.catalog import Run, Summary, open_run
from esper.runs.compare import final_figures, written
from esper.runs.controller_story import ControllerStory, joined_calibration, others_in_words
from esper.runs.folder import RunError
from esper.runs.health import lights
from esper.runs.opponents import LEAST_BATTLES, RECENT, clock, opponent_rows, replay_rows, replays_of, result_of, win_rates
from esper.runs.page import Line, Scale, chart, note, render, section, table, tiles
from esper.runs.sections import (
    CHARTS,
    charts_of,
    curve,
    drawn_charts,
    in_grid,
    problem_section,
    remarks_on,
    settings_section,
    system_section,
)
from esper.text_table import duration, figure, with_interval

REPORT = "report.html"
LAST_ROUNDS = 10  # values whose mean is the figure of now
MOST_OPPONENTS = 20  # in the table of opponents
# Number of charts at the beginning of CHARTS that are about the task; the others are about the learner.
OWN_CHARTS: dict[str, int] = {"ppo": 2, "arena": 5, "controller": 7}
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
    if not run.index.kinds.get("run_started" if run.kind in _TITLES else "header"):
        raise RunError(f"there is nothing to report about {folder}: the training has not begun; try again later")
    path = Path(folder) / REPORT
    write_in_run(path, report_of(run).encode())
    return path


def report_of(run: Run) -> str:
    """Return the page as HTML."""
    summary = run.summary()
    parts = [f'<p class="summary">{escape(_headline(run, summary))}</p>', tiles(_tiles(run, summary)), note(_circumstances(run))]
    parts += remarks_on(run)
    charts = charts_of(run)
    count = OWN_CHARTS.get(run.kind, len(charts))
    if run.kind == "controller":
        parts += _controller_sections(run)
    elif run.kind == "arena":
        parts += _arena_sections(run)
    elif run.kind not in _TITLES:
        parts.append(section("Curves", in_grid(drawn_charts(run, charts))))
    elif own := drawn_charts(run, charts[:count], is_small=False):
        parts.append(section("Return", *own))
    parts += [section("Health", *health)] if (health := _health(run)) else []
    parts += [section("Learner", in_grid(drawn_charts(run, charts[count:])))] if charts[count:] else []
    parts.append(_calibration_section(run))
    if rows := _evaluation_rows(run):
        heading = ("", "step", "episodes", "win rate" if run.kind == "arena" else "mean return", "mean length", "cut")
        parts.append(section("Evaluation", table(heading, rows, numbers=range(1, 6))))
    if rows := _anomaly_rows(run):
        names = ("anomaly", "of", "times", "first at step", "last at step", "last value", "what to do")
        parts.append(section("Anomalies", table(names, rows, numbers=range(2, 6))))
    parts += [system_section(run), problem_section(run), settings_section(run)]
    return render(printable(run.name), parts)


# The first lines


def _headline(run: Run, summary: Summary) -> str:
    share = "" if summary.progress is None or summary.state == "finished" else f", {summary.progress:.0%} of the training"
    value = "" if summary.best is None else f"{summary.best:.1%}" if run.figure()[0].unit == "share" else figure(summary.best, 3)
    best = "" if summary.best is None else f" · best {summary.figure} {value}"
    return f"The {_TITLES.get(run.kind, 'run')} {_STATES[summary.state]} after {summary.step:,} {run.declared().unit}{share}{best}"


def _tiles(run: Run, summary: Summary) -> list[tuple[str, str]]:
    """Return the main figures as (value, name): the result that counts comes first."""
    unit = run.declared().unit
    if run.kind not in _TITLES:
        return [*((written(value), name) for name, value in final_figures(run).items()), (f"{summary.step:,}", unit)]
    found: list[tuple[str, str]] = []
    name = "win rate" if run.kind == "arena" else "return"
    evaluated = run.index.events("evaluated")[-1:]
    if run.kind == "controller" and summary.last is not None:
        rounds = run.index.series("round_ended/utility").values
        if len(rounds):
            found.append(
                (figure(float(rounds[-LAST_ROUNDS:].mean()), sign="+"), f"utility, mean of the last {min(len(rounds), LAST_ROUNDS)} fleets")
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
        found.append((figure(float(returns[-1]), 3), f"return in training, last 100 {'lives' if run.kind == 'controller' else 'episodes'}"))
    found.append((f"{summary.step:,}", unit))
    speed = run.index.series("update/steps_per_second").values
    if len(speed):
        found.append((figure(float(speed[-LAST_ROUNDS:].mean())), f"{unit} per second"))
    if ended := run.index.events("run_ended")[-1:]:
        found.append((duration(ended[0]["seconds"]), "of training"))
    return found


def _circumstances(run: Run) -> str:
    header = run.index.events("header")[:1]
    parts = [
        *(
            part
            for started in run.index.events("run_started")[-1:]
            for part in (
                started["env_id"],
                f"{started['num_envs']:,} {'lives in a round' if run.kind == 'controller' else 'environments'}",
                f"{started['parameters']:,} parameters",
                f"on {started['device']}",
            )
        ),
        f"esper {header[0]['esper']}" if header else "",
        f"{run.index.kinds.get('resumed', 0)} times resumed" if run.index.kinds.get("resumed") else "",
    ]
    return " · ".join(filter(None, parts))


# Health and evaluation


def _health(run: Run) -> list[str]:
    """Return the diagnostics of the learner as a table; a sentence if there are none yet, nothing for a run without a learner."""
    found = lights(run.index)
    if not found:
        return ["<p>There was no update yet.</p>"] if run.kind in _TITLES else []
    rows = [
        (light.name, figure(light.value, 3), {"green": "good", "yellow": "watch it", "red": "bad"}[light.colour], light.advice)
        for light in found
    ]
    classes = [_COLOURS[light.colour] for light in found]
    shown = table(("diagnostic", "value", "", "what to do"), rows, numbers=(1,), classes=classes)
    return [shown, note("Means of the last ten updates.")]


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


def _calibration_section(run: Run) -> str:
    """Return the section about the critic: the returns that followed its predictions; nothing if the run has no such events."""
    found = joined_calibration(run)
    if found is None:
        return ""
    points = found["points"]
    predicted = [point["predicted"] for point in points]
    columns = {name: [point[name] for point in points] for name in ("achieved", "low", "high")}
    ends = [min(predicted), max(predicted)]
    lines = [
        Line("achieved", predicted, columns["achieved"], "a", low=columns["low"], high=columns["high"]),
        Line("as predicted", ends, ends, "f", is_dashed=True),
    ]
    rows = [
        (figure(point["predicted"]), with_interval(point["achieved"], point["low"], point["high"]), f"{point['steps']:,}")
        for point in points
    ]
    about = (
        f"Returns that followed the critic's predictions in the last {found['updates']} updates, in bins of about equal size, with 95 % "
        "intervals. A critic that is right lies on the dashed line."
    )
    drawing = chart(lines, x="predicted return", y="Achieved return", may_be_log=False, height=250)
    return section("Calibration of the critic", drawing, table(("predicted", "achieved", "steps"), rows, numbers=range(3)), note(about))


# Controller


def _controller_sections(run: Run) -> list[str]:
    """Return utility by rent and by cell with intervals, the cells, the hosts of the newest round with their lives, and the blueprints."""
    if not run.index.kinds.get("round_ended"):
        return [note("No round has ended yet.")]
    story = ControllerStory()
    story.refresh(run.index)
    found = story.page(run)
    utility = [
        chart(
            [Line(str(line["label"]), line["steps"], line["values"], low=_ends(line["low"]), high=_ends(line["high"])) for line in lines],
            x="round",
            y=f"Utility per round, by {by}",
            may_be_log=False,
            height=250,
        )
        for by, lines in found["utility"].items()
        if lines
    ]
    rows = [
        (row["cell"], f"{row['hosts']:,}", with_interval(row["utility"], row["low"], row["high"], sign="+"), figure(row["gain"], sign="+"),
         figure(row["rent"], sign="+"), f"{row['grown']:.2f}", f"{row['kept']:.2f}")
        for row in found["cells"]
    ]  # fmt: skip
    heading = ("task and host", "hosts", "utility", "gain", "rent", "grown", "kept")
    sections = [section("Utility", *utility, note(ABOUT_UTILITY))] if utility else []
    sections.append(section("Rounds", in_grid(drawn_charts(run, CHARTS["controller"][: OWN_CHARTS["controller"]]))))
    if rows:
        about = note("Means over all hosts of the run so far, in nats; grown and kept are seeds per host.")
        sections.append(section("Cells", table(heading, rows, numbers=range(1, 7)), about))
    if found["rounds"]:
        number = found["rounds"][-1]
        lives = [_life(life) for life in story.lives(number)]
        sections.append(
            section(f"Hosts of round {number}, the newest", note(ABOUT_HOSTS), HOST_LEGEND, '<div class="hosts">', *lives, "</div>")
        )
    return sections + sections_about_seeds(run)


def _ends(values: Sequence[float | None]) -> list[float]:
    """Return the ends of intervals for a band; NaN where there is none."""
    return [math.nan if value is None else value for value in values]


def _life(life: Mapping[str, Any]) -> str:
    """Return one host: its losses beside those of its twin, small, and everything that its seeds went through when it is opened."""
    shown = round(life["utility"], 4)  # hosts that are decided alike may differ by their last bits
    colour = "good" if shown > 0 else "trouble" if shown < 0 else ""
    utility, gain, rent = (figure(life[name], sign="+") for name in ("utility", "gain", "rent"))
    head = f"{life['rent_level']} rent · {life['kept']}/{life['grown']} kept"
    lines = [
        (str(entry["epoch"]), f"seed {seed['number']}: {seed['blueprint']} after {seed['slot']}", entry["stage"].lower(),
         str(entry["reason"]))
        for seed in life["seeds"]
        for entry in seed["stages"]
    ]  # fmt: skip
    words = (
        f"Host {life['env']}: {life['task']}, {life['host']}, price of parameters {figure(life['rent_parameters'])}. Utility {utility} = "
        f"gain {gain} − rent {rent}, both in comparison with the twin; {life['rollbacks']} rollbacks. {others_in_words(life)}."
    )
    nothing = "The log has no stages of its seeds." if life["grown"] else "The controller grew nothing in this host."
    inside = table(("segment", "seed", "stage", "why"), lines, numbers=(0,)) if lines else f"<p>{nothing}</p>"
    return (
        f'<details><summary>{_life_drawing(life)}<small>{escape(head)}</small> <b class="{colour}">{figure(shown, 3, sign="+")}'
        f'</b></summary><p>{escape(words)}</p><div class="wide">{inside}</div></details>'
    )


def _life_drawing(life: Mapping[str, Any]) -> str:
    """Draw the validation losses of a host and of its twin, with a dot where a seed germinated, was kept or was pruned."""
    losses = {name: [(at, float(value)) for at, value in enumerate(life[name], start=1) if _is_finite(value)] for name in _LOSSES}
    values = [value for points in losses.values() for _, value in points]
    if not values:
        return ""
    width, height = 150, 56
    across = Scale(0, max(len(life[name]) for name in _LOSSES), 4, width - 4)
    up = Scale(min(values), max(values), height - 6, 10)
    parts = [
        f'<polyline points="{" ".join(f"{across(at)},{up(value)}" for at, value in losses[name])}" fill="none" stroke="var(--{colour})" '
        f'stroke-width="1.5"{dash}/>'
        for name, (colour, dash) in _LOSSES.items()
    ]
    parts += [
        f'<circle cx="{across(entry["epoch"])}" cy="4" r="3" fill="var(--{entry["stage"].lower()})"/>'
        for seed in life["seeds"]
        for entry in seed["stages"]
        if entry["stage"] in ("GERMINATED", "FOSSILIZED", "PRUNED")
    ]
    label = f"validation loss of host {life['env']} and of its twin"
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


_LOSSES = {"twin_losses": ("twin", ' stroke-dasharray="4 3"'), "val_losses": ("validation", "")}
ABOUT_UTILITY = (
    "Gain over the twin minus the rent that is paid beyond the twin's, in nats: mean over hosts, with the 95 % interval over groups of "
    "hosts that share a twin. The twin is the same host, decided for as the policy is advised. The cells are those with the most hosts."
)
ABOUT_HOSTS = (
    "Validation loss of each host (solid) beside its twin, the same host decided for as the policy is advised (dashed). Dots tell when a "
    "seed germinated, was kept or was pruned. Open a host to see its life."
)
HOST_LEGEND = '<div class="legend">' + "".join(
    f'<span class="mark" style="--of:var(--{colour})">{word}</span>'
    for colour, word in (("germinated", "germinated"), ("fossilized", "kept"), ("pruned", "pruned"))
) + "</div>"  # fmt: skip


# Arena


def _arena_sections(run: Run) -> list[str]:
    """Return win rates and ratings with intervals, the parts of the reward, the changes of the league, and the recorded battles."""
    lines = [
        Line(found.name, found.steps, found.rates, low=found.low, high=found.high)
        for found in win_rates(run.index, most_players=5, most_points=40)
    ]
    evaluation = curve(run.index.series("checkpoint_evaluated/mean_return"), "checkpoints, in evaluation", "f")
    lines += [evaluation] if len(evaluation.x) else []
    parts = [chart(lines, x="steps", y="Win rate by opponent, with 95 % intervals", is_percent=True)] if lines else []
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
        parts.append(table(("opponent", "", "won", "drawn", "lost", "win rate", "rating"), rows[:MOST_OPPONENTS], numbers=range(2, 7)))
        left = f" {len(rows) - MOST_OPPONENTS} more are not shown." if len(rows) > MOST_OPPONENTS else ""
        parts.append(
            note(
                f"Table: battles of the learner in the last {RECENT} rounds. A draw is half a win. Intervals are over battles; in the "
                f"chart, rounds are joined until a point has at least {LEAST_BATTLES} of them. Ratings are given with their spread.{left}"
            )
        )
    sections = [section("Win rates", *parts)] if parts else [note("No battle has ended yet.")]
    # The win rates and the checkpoints are in the chart above.
    sections.append(section("League and reward", in_grid(drawn_charts(run, CHARTS["arena"][2 : OWN_CHARTS["arena"]]))))
    changes = run.index.events("league_changed")[-20:]
    if changes:
        rows = [
            (
                "–" if event["step"] is None else f"{event['step']:,}",
                event["name"],
                "entered" if event["is_promoted"] else "did not enter",
                event["reason"],
            )
            for event in reversed(changes)
        ]
        sections.append(section("Changes of the league", table(("step", "player", "", "why"), rows, numbers=(0,))))
    if battles := replay_rows(replays_of(run.folder), ""):
        rows = [(row["name"], row["problem"] or " against ".join(row["players"]), result_of(row), clock(row["seconds"])) for row in battles]
        how = note(f"Play them with: esper arena watch {printable(str(run.folder))}")
        sections.append(section("Recorded battles", table(("battle", "players", "result", "length"), rows, numbers=(3,)), how))
    return sections
