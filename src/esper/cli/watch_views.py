"""Runs as text: the table of runs, the page of one run and a comparison, with the same parts as in the browser. Imports no torch.

All of them are made from the data of `esper.dashboard.data`. A narrow terminal has fewer columns, never fewer parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from esper.cli.analyse import WIDE, analysis_parts, blueprint_parts, cells_table
from esper.cli.run_text import STATE_STYLES, TWIN_OF, age, sparkline
from esper.cli.table import LongTable
from esper.runs.analysis import ABOUT_BLUEPRINTS, Analysis, BlueprintRow
from esper.runs.catalog import settings_of
from esper.runs.compare import shown_setting
from esper.runs.controller_story import others_in_words
from esper.runs.foreign import quoted
from esper.runs.health import problem_in_words
from esper.runs.opponents import clock, result_of
from esper.runs.stages import STAGES
from esper.text_table import counted, figure, points, shortened, with_interval

FEW = 12  # rows of a long list until it is opened
LIGHT_STYLES = {"green": "green", "yellow": "yellow", "red": "bold red"}


class Curve(NamedTuple):
    """A series as the terminal shows it: the chart that it belongs to, its label there, and its values."""

    title: str
    label: str
    values: list[float]


Part = RenderableType | None


def _titled(title: str, *parts: Part) -> list[Part]:
    """Return parts below their title; nothing if all of them are empty."""
    shown = [part for part in parts if part is not None and not (isinstance(part, Table) and not part.row_count)]
    return [Group(Text(title, style="bold"), *shown)] if shown else []


def _together(parts: Iterable[Part]) -> RenderableType:
    shown = [part for part in parts if part is not None and not (isinstance(part, Table) and not part.row_count)]
    return Group(*(item for part in shown for item in (part, "")))


def _table(*headings: str, left: int = 0) -> Table:
    """Return an empty table whose columns after the first `left` ones hold numbers. Without headings it shows none."""
    table = Table(box=None, pad_edge=False, header_style="dim", show_header=bool(headings))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", overflow="fold")
    return table


# The table of runs


def runs_table(overview: dict[str, Any], *, width: int = 80, here: str | None = None, chosen: Sequence[str] = ()) -> RenderableType:
    """Return a table of runs, live ones first. A wide terminal also has their curves. `here` and `chosen` are names in addresses."""
    if not overview["runs"]:
        return Text(f"There are no runs in {overview['root']} yet. Start one: esper grow --task digits")
    is_wide, has_tags = width >= WIDE, any(row["tags"] for row in overview["runs"])
    headings = ["run", "kind", "state", "done", "last", "best", *(["figure", "curve"] if is_wide else []), "sign of life"]
    marks = ["", ""] if here is not None else []
    heading = [*marks, *headings, *(["tags"] if has_tags else [])]
    styles: dict[tuple[int, int | None], str] = {}
    rows, state = [], heading.index("state")
    for place, row in enumerate(overview["runs"]):
        cells = [">" if row["id"] == here else " ", "×" if row["id"] in chosen else " "] if here is not None else []
        cells += [shortened(row["name"], max(width // 3, 12)), row["kind"], row["state"]]
        cells += ["" if row["progress"] is None else f"{row['progress']:.0%}", figure(row["last"]), figure(row["best"])]
        cells += [row["figure"], sparkline(row["spark"], 20)] if is_wide else []
        cells += [age(overview["now"] - row["touched"]) if row["touched"] else "–", *([", ".join(row["tags"])] if has_tags else [])]
        rows.append(cells)
        styles[place, state] = STATE_STYLES[row["state"]]
        if is_wide:
            styles[place, heading.index("curve")] = "cyan"
        if row["id"] == here:
            styles[place, None] = "reverse"
    right = {heading.index(name) for name in ("done", "last", "best")}
    return LongTable(heading, rows, right=right, styles=styles)


# The page of one run


def run_view(
    page: dict[str, Any],
    curves: Sequence[Curve],
    system: Sequence[Curve],
    machine: Sequence[tuple[str, str]],
    *,
    width: int = 80,
    is_open: bool = True,
) -> RenderableType:
    """Return the page of one run as text. Long lists are cut unless `is_open`, and single lives are told only if it is.

    `machine` are the newest figures of the machine as (value, name), `system` their curves.
    """
    parts: list[Part] = [*_head(page), _notes(page)]
    drawn = _titled("curves", curves_table(curves, width))
    if growth := page.get("growth"):
        parts += drawn
        parts += _network(growth, width, page["config"].get("telemetry", ""))
        parts += _lives(growth["seeds"], max(page["summary"]["step"], 1), width, "epoch", is_open=is_open)
    if page.get("health"):
        parts += _health(page["health"])
    if "replays" in page:
        parts += _replays(page, is_open=is_open)
    if controller := page.get("controller"):
        parts += _utility(controller, width)
    parts += [] if growth else drawn
    parts += _calibration(page.get("calibration"))
    if controller:
        parts += [*_hosts(controller, width, is_open=is_open), *_cells(controller)]
    if growth:
        parts += [*_ledger(growth["seeds"], width), *_probe(growth, is_open=is_open), *_decisions(growth, is_open=is_open)]
        parts += _governor(growth["rollbacks"])
    if page.get("blueprints"):
        rows = msgspec.convert(page["blueprints"], list[BlueprintRow])
        parts += _titled("blueprints", *blueprint_parts(rows, width), Text(ABOUT_BLUEPRINTS, style="dim"))
        parts += _analysis(page, width)
    parts += [*_opponents(page), *_league(page.get("league") or [], is_open=is_open)]
    parts += (
        _titled("system", Text(" · ".join(f"{name} {value}" for value, name in machine)), curves_table(system, width)) if machine else []
    )
    parts += _problems(page["problems"], is_open=is_open)
    return _together([*parts, *(_settings(page["config"], width) if is_open else [])])


def _head(page: dict[str, Any]) -> list[Part]:
    """Return the first lines: name, kind, state and progress, then the main figures."""
    summary = page["summary"]
    state = Text(summary["state"], style=STATE_STYLES[summary["state"]])
    done = "" if summary["progress"] is None else f" · {summary['progress']:.0%}"
    head = Text.assemble((summary["name"], "bold"), f" · {summary['kind']} · ", state, done, *(f" · {tag}" for tag in summary["tags"]))
    figures = [f"{summary['figure']} {figure(summary['last'])}, best {figure(summary['best'])}"]
    if growth := page.get("growth"):
        if (compared := growth["compared"]) is not None:
            difference = points(compared["accuracy_difference"], compared["low"], compared["high"])
            figures.append(f"test accuracy against the twin {difference}")
        if growth["difference"] is not None:
            figures.insert(0, f"validation loss against the twin {figure(growth['difference'], sign='+')}")
        figures.append(f"{sum(seed['outcome'] == 'kept' for seed in growth['seeds'])} of {counted(len(growth['seeds']), 'seed')} kept")
        host = growth["started"]["parameters"] or 0
        added = sum(slot.get("parameters") or 0 for slot in growth["slots"] if slot["blueprint"])
        figures.append(f"{host + added:,} parameters, host {host:,}")
    return [Group(head, Text(" · ".join(figures)))]


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


def curves_table(curves: Iterable[Curve], width: int) -> Table:
    """Return one line per series: a small curve as wide as there is room, its last value, and the lowest and highest one."""
    rows: list[tuple[str, list[float], list[str]]] = []
    before = ""
    for curve in curves:
        known = [value for value in curve.values if math.isfinite(value)]
        if known:
            name = f"{curve.title}: {curve.label}" if curve.label else curve.title
            label = f"  {curve.label}" if curve.title == before else name
            rows.append((label, known, [figure(value) for value in (known[-1], min(known), max(known))]))
            before = curve.title
    table = _table("", "", "last", "from", "to", left=2)
    if rows:
        numbers = sum(max(4, *(len(values[column]) for *_, values in rows)) for column in range(3))
        most = max(width - numbers - 18, 16)  # of a label, with room for gaps and a short curve
        room = max(8, min(width - numbers - 8 - min(most, max(len(label) for label, *_ in rows)), 80))
        for label, known, values in rows:
            name = label if len(label) <= most else f"{label[: most - 1]}…"
            table.add_row(Text(name), Text(sparkline(known, room), style="cyan"), *values)
    return table


# Growth


def _network(growth: dict[str, Any], width: int, telemetry: str) -> list[Part]:
    """Return the slots from the input to the output, each with its stage, seed, alpha, age and cost of removal."""
    if telemetry in ("off", "minimal") and not any("age" in slot for slot in growth["slots"]):
        return _titled("network", Text("The log has no details of slots. Train with --telemetry normal to see them.", style="dim"))
    table = _table("", "slot", "stage", "seed", "alpha", "age", "cost of removal", "parameters", left=4)
    table.add_row("┬", Text("input", style="dim"))
    for slot in growth["slots"]:
        look = STAGES.get(slot["stage"], STAGES["DORMANT"])
        name = Text(shortened(slot["slot"], max(width // 5, 12)))
        if not slot["blueprint"]:
            table.add_row("│", name, Text(look.word, style=look.style))
            continue
        alpha = float(slot["alpha"] or 0.0)
        bar = f"{'█' * round(5 * alpha):░<5} " if width >= WIDE else ""
        cost = with_interval(slot.get("gain"), slot.get("gain_low"), slot.get("gain_high"), is_short=True)
        cells = (Text(f"{bar}{alpha:.2f}", style=look.style), str(slot.get("age", "–")), cost, f"{slot.get('parameters') or 0:,}")
        table.add_row(Text("├●", style=look.style), name, Text(look.word, style=look.style), Text(slot["blueprint"]), *cells)
    table.add_row("┴", Text("output", style="dim"))
    return _titled("network", table)


def _lives(seeds: Sequence[dict[str, Any]], end: int, width: int, unit: str, *, is_open: bool) -> list[Part]:
    """Return a timeline of every seed, a letter per moment, and, if opened, each of its stages with the reason."""
    if not seeds:
        return []
    most = max(width // 3, 16)
    room = max(min(width - most - 22, 100), 16)
    table, used = _table("", "seed", f"{unit} 0 to {end}", "", left=4), dict[str, None]()
    for seed in seeds:
        bar = Text()
        for place in range(room):
            moment = (place + 0.5) * end / room
            stage = next((entry["stage"] for entry in reversed(seed["stages"]) if entry["epoch"] <= moment), "DORMANT")
            is_over = seed["ended"] is not None and moment >= seed["ended"] and seed["outcome"] != "kept"
            look = STAGES["DORMANT" if is_over else stage]
            used |= {} if is_over else {stage: None}
            bar.append(look.letter, style=look.style)
        name = Text(shortened(f"{seed['blueprint']} · {seed['slot']}", most))
        table.add_row(str(seed["number"]), name, bar, seed["outcome"])
    looks = [STAGES[stage] for stage in used if stage != "DORMANT"]
    legend = Text("  ").join(Text(f"{look.letter} {look.word}", style=look.style) for look in looks)
    return _titled("lives of the seeds", table, legend, *(_stages(seeds, unit) if is_open else []))


def _stages(seeds: Iterable[dict[str, Any]], unit: str) -> list[Part]:
    """Return every stage and the last measurements of some seeds in their order, a line each."""
    lines: list[Part] = []
    for seed in seeds:
        told = [(entry["epoch"], f"{STAGES[entry['stage']].word}: {entry['reason']}") for entry in seed["stages"]]
        for row in seed["contributions"][-3:]:
            cost = with_interval(row["gain"], row["gain_low"], row["gain_high"])
            told.append((row["epoch"], f"cost of removal {cost}, rent {figure(row['rent'])}"))
        lines.append(Text(f"{seed['number']} {seed['blueprint']} after {seed['slot']}"))
        lines += [Text(f"  {unit} {epoch}: {words}", style="dim") for epoch, words in sorted(told, key=lambda entry: entry[0])]
    return lines


def _ledger(seeds: Sequence[dict[str, Any]], width: int) -> list[Part]:
    """Return one line per seed, and below the reason for its state."""
    table = _table("#", "slot", "blueprint", "born", "outcome", "cost of removal", "rent", "parameters", left=5)
    for seed in seeds:
        last = seed["contributions"][-1] if seed["contributions"] else {}
        cost = with_interval(last.get("gain"), last.get("gain_low"), last.get("gain_high"), is_short=width < WIDE)
        slot = Text(shortened(seed["slot"], max(width // 6, 10)))
        cells = (cost, figure(seed.get("rent")), f"{seed.get('parameters') or 0:,}")
        table.add_row(str(seed["number"]), slot, Text(seed["blueprint"]), str(seed["born"]), seed["outcome"], *cells)
    return _titled("ledger", table, *(Text(f"{seed['number']}: {seed['why']}", style="dim") for seed in seeds if seed["why"]))


def _probe(growth: dict[str, Any], *, is_open: bool) -> list[Part]:
    """Return the candidates of the newest probe, the best first, and why they were passed over; if opened, those of all probes."""
    parts: list[Part] = []
    for probe in reversed(growth["probes"]) if is_open else growth["probes"][-1:]:
        table = _table("slot", "blueprint", "fall per step", "verdict", left=2)
        table.columns[3].justify = "left"
        rows = [(value, slot, name) for slot, row in probe["estimates"].items() for name, value in row.items() if value is not None]
        rows.sort(key=lambda row: -row[0])
        grown = {(seed["slot"], seed["blueprint"]) for seed in growth["seeds"] if seed["born"] == probe["epoch"]}
        for value, slot, name in rows if is_open else rows[:FEW]:
            reason = probe["reasons"].get(slot, {}).get(name, "")
            verdict = f"passed over: {reason}" if reason else "grows" if (slot, name) in grown else ""
            table.add_row(Text(shortened(slot, 30)), Text(name), figure(value), Text(verdict, style="dim"))
        more = Text(f"and {len(rows) - FEW} more", style="dim") if len(rows) > FEW and not is_open else None
        decision = Text(probe["decision"]) if probe["decision"] else None
        parts += _titled(f"probe after epoch {probe['epoch']}", decision, table, more)
    return parts


def _decisions(growth: dict[str, Any], *, is_open: bool) -> list[Part]:
    """Return the decisions, newest first; the same one after several epochs is one line."""
    lines = []
    for text, rows in groupby(reversed(growth["decisions"]), key=lambda row: row["text"]):
        epochs = [row["epoch"] for row in rows]
        lines.append(f"epoch {epochs[0]}: {text}" if len(epochs) == 1 else f"epochs {epochs[-1]} to {epochs[0]}: {text}")
    return _titled("decisions", *map(Text, lines if is_open else lines[:3]))


def _governor(rollbacks: Sequence[dict[str, Any]]) -> list[Part]:
    """Return every rollback with its cost, and the cost of all."""
    lines: list[Part] = []
    for back in rollbacks:
        embargo = f"; under embargo: {', '.join(back['embargoed'])}" if back["embargoed"] else ""
        cost = _cost(back.get("steps_lost"), back.get("seconds_lost"))
        words = f"epoch {back['epoch']}: went back to epoch {back['to_epoch']}{cost and ' and lost ' + cost}: {back['reason']}{embargo}"
        lines.append(Text(words, style="red"))
    known = [back for back in rollbacks if back.get("steps_lost") is not None]
    cost = _cost(sum(back["steps_lost"] for back in known), sum(back.get("seconds_lost") or 0.0 for back in known)) if known else ""
    count = "one rollback" if len(rollbacks) == 1 else f"{len(rollbacks)} rollbacks"
    return _titled("governor", *lines, Text(f"{count}{cost and ', which cost ' + cost}")) if lines else []


def _cost(steps: int | None, seconds: float | None) -> str:
    if steps is None:
        return ""
    return counted(steps, "step") + (f" and {figure(seconds, 1)} s" if seconds else "")


def _analysis(page: dict[str, Any], width: int) -> list[Part]:
    if "growth" not in page:
        return []
    found = page.get("analysis")
    if not found:
        how = f"Measure them with: esper analyse {quoted(page['summary']['folder'])}"
        return _titled("worth of the seeds", Text(f"Shapley values and the interaction of seeds are not measured yet. {how}", style="dim"))
    if "problem" in found:
        return _titled("worth of the seeds", Text(found["problem"], style="yellow"))
    return _titled("worth of the seeds", *analysis_parts(msgspec.convert(found, Analysis), width)[1:])


# Controller


def _utility(controller: dict[str, Any], width: int) -> list[Part]:
    """Return the utility per round by rent and by cell, each as a small curve with the interval of the last round."""
    parts: list[Part] = []
    for by, lines in controller["utility"].items():
        table = _table(by, "utility per round", "last round", left=2)
        for line in lines:
            curve = Text(sparkline([value for value in line["values"] if value is not None], max(16, min(width - 70, 60))), style="cyan")
            table.add_row(Text(line["label"]), curve, with_interval(line["values"][-1], line["low"][-1], line["high"][-1]))
        parts += _titled(f"utility per round, by {by}", table)
    return parts


def _cells(controller: dict[str, Any]) -> list[Part]:
    table = _table("task and host", "hosts", "utility", "gain", "rent", "grown", "kept", left=1)
    for row in controller["cells"]:
        means = [figure(row["gain"]), figure(row["rent"]), f"{row['grown']:.2f}", f"{row['kept']:.2f}"]
        table.add_row(Text(row["cell"]), str(row["hosts"]), with_interval(row["utility"], row["low"], row["high"]), *means)
    return _titled("cells", table)


def _hosts(controller: dict[str, Any], width: int, *, is_open: bool) -> list[Part]:
    """Return the hosts of a round: losses beside those of their twins, which are decided for as the policy is advised; utility and seeds.

    If opened, also their whole lives, and the steps that were not as advised.
    """
    hosts = controller.get("hosts", [])
    if not hosts:
        waits = "The first round is under way. Its hosts appear here when they have reached their horizon."
        return _titled("hosts", Text(waits, style="dim"))
    table = _table("host", "rent", "loss", "its twin", "utility", "gain", "rent", "kept", left=4)
    shown = hosts if is_open else hosts[:FEW]
    for life in shown:
        curves = [[value for value in life[name] if value is not None] for name in ("val_losses", "twin_losses")]
        both = [value for values in curves for value in values]
        ends = (min(both), max(both)) if both else None  # one scale, so that they can be compared
        own, twin = (sparkline(values, 12, ends=ends) for values in curves)
        name = f"{life['env']} {life['task']} {life['host']}"
        numbers = [figure(life[key]) for key in ("utility", "gain", "rent")]
        row = (Text(shortened(name, max(width // 4, 18))), life["rent_level"], Text(own, style="cyan"), Text(twin, style="dim"))
        table.add_row(*row, *numbers, f"{life['kept']}/{life['grown']}")
    parts: list[Part] = [table]
    if len(hosts) > len(shown):
        parts.append(Text(f"and {len(hosts) - len(shown)} more", style="dim"))
    for life in shown if is_open else ():
        if life["seeds"]:
            parts += [Text(""), *_lives(life["seeds"], max(life["horizon"], 1), width, "segment", is_open=True)]
            inside = parts.pop()
            parts += [Text(f"host {life['env']}, {life['task']}, {life['host']}, {life['rent_level']} rent"), inside]
        else:
            why = "the log has no stages of its seeds" if life["grown"] else "the controller grew nothing in this host"
            parts += [Text(""), Text(f"host {life['env']}: {why}", style="dim")]
        parts.append(Text(others_in_words(life), style="dim"))
    return _titled(f"hosts of round {hosts[0]['round']}", *parts)


# Learners


def _health(lights: Iterable[dict[str, Any]]) -> list[Part]:
    table = _table()
    for light in lights:
        name, advice = Text(light["name"]), Text(light["advice"], style="dim")
        table.add_row(Text("●", style=LIGHT_STYLES[light["colour"]]), name, figure(light["value"]), advice)
    return _titled("health of the learner", table)


def _calibration(calibration: dict[str, Any] | None) -> list[Part]:
    if calibration is None:
        return []
    table = _table("the critic predicts", "achieved", "steps")
    for point in calibration["points"]:
        table.add_row(figure(point["predicted"]), with_interval(point["achieved"], point["low"], point["high"]), f"{point['steps']:,}")
    return _titled(f"calibration of the critic, last {calibration['updates']} updates", table)


def _opponents(page: dict[str, Any]) -> list[Part]:
    table = _table("opponent", "won", "drawn", "lost", "win rate", "rating", left=1)
    for row in page.get("opponents") or []:
        rate = "–" if row["rate"] is None else f"{row['rate']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"
        rating = "–" if row["rating"] is None else f"{row['rating']:.1f} ± {row['spread']:.1f}"
        name = Text.assemble(row["name"], (" anchor" if row["is_anchor"] else "", "dim"))
        table.add_row(name, *(str(row[name]) for name in ("won", "drawn", "lost")), rate, rating)
    return _titled("opponents, in the last rounds", table)


def _league(changes: Sequence[dict[str, Any]], *, is_open: bool) -> list[Part]:
    rows = list(reversed(changes))[: None if is_open else 3]
    words = (f"{row['name']} {'entered the league' if row['is_promoted'] else 'did not enter'}: {row['reason']}" for row in rows)
    return _titled("league", *map(Text, words))


def _replays(page: dict[str, Any], *, is_open: bool) -> list[Part]:
    """Return the recorded battles, newest first, and how to play them."""
    rows, folder = page["replays"], page["summary"]["folder"]
    if not rows:
        is_training = page["summary"]["state"] == "running"
        how = "The next evaluation records one, unless eval_replays or eval_battles is 0." if is_training else ""
        how = how or f"Record one: esper arena eval {quoted(folder)} --replay {quoted(folder)}"
        return _titled("battles", Text(f"No battle is recorded. {how}", style="dim"))
    table = _table("battle", "players", "result", "length", "recorded", left=3)
    for row in rows if is_open else rows[:3]:
        players = Text(row["problem"], style="yellow") if row["problem"] else Text(" against ".join(row["players"]))
        table.add_row(Text(row["name"]), players, Text(result_of(row)), clock(row["seconds"]), age(page["now"] - row["time"]))
    more = "" if is_open or len(rows) <= 3 else f"{len(rows) - 3} more are recorded. "
    return _titled("battles", table, Text(f"{more}Play them with: esper arena watch {quoted(folder)}", style="dim"))


# Problems and settings


def _problems(problems: Sequence[dict[str, Any]], *, is_open: bool) -> list[Part]:
    shown = problems if is_open else problems[:3]
    lines: list[Part] = [Text(f"{problem['kind'].replace('_', ' ')}: {problem_in_words(problem)}", style="yellow") for problem in shown]
    more = [Text(f"and {len(problems) - 3} more", style="dim")] if len(problems) > len(shown) else []
    return _titled("warnings", *lines, *more)


def _settings(config: Mapping[str, Any], width: int) -> list[Part]:
    """Return all settings, in as many columns as fit."""
    rows = [(name, shown_setting(value)) for name, value in settings_of(config).items()]
    if not rows:
        return []
    columns = max(1, width // (max(len(name) + len(value) for name, value in rows) + 6))
    height = -(-len(rows) // columns)
    table = _table()
    for line in zip_longest(*(rows[start : start + height] for start in range(0, len(rows), height)), fillvalue=("", "")):
        table.add_row(*(cell for name, value in line for cell in (Text(name, style="dim"), Text(f"{value}  "))))
    return _titled("settings", table)


# Comparison


def comparison_view(found: dict[str, Any], curves: Mapping[str, Mapping[str, list[float]]], *, width: int = 80) -> RenderableType:
    """Return several runs beside each other.

    `curves` are the series that all have: name of a series -> run -> values. The name of a twin is that of its run and TWIN_OF.
    """
    if len(found["runs"]) < 2:
        left = f"only {found['runs'][0]['name']} is left" if found["runs"] else "none of these runs exists any more"
        return Text(f"{left}; choose at least two runs")
    names = {run["id"]: shortened(run["name"], max(width // 5, 12)) for run in found["runs"]}
    parts: list[Part] = [Text(" and ".join(run["name"] for run in found["runs"]), style="bold")]
    table = _table("run", "kind", "state", "figure", "last", "best", left=4)
    for run in found["runs"]:
        state = Text(run["state"], style=STATE_STYLES[run["state"]])
        table.add_row(Text(names[run["id"]]), run["kind"], state, run["figure"], figure(run["last"]), figure(run["best"]))
    parts.append(table)
    # All curves of a series have one scale, so that they can be compared like lines in one chart.
    for series, of_runs in curves.items():
        known = [value for values in of_runs.values() for value in values if math.isfinite(value)]
        table = _table("run", "curve, on one scale", "last", left=2)
        for id_, values in of_runs.items():
            finite = [value for value in values if math.isfinite(value)]
            curve = sparkline(finite, max(16, min(width - 45, 80)), ends=(min(known), max(known))) if known else ""
            name = f"twin of {names[id_.removesuffix(TWIN_OF)]}" if id_.endswith(TWIN_OF) else names[id_]
            table.add_row(Text(name), Text(curve, style="dim" if id_.endswith(TWIN_OF) else "cyan"), figure(finite[-1] if finite else None))
        parts += _titled(f"{series}, {figure(min(known))} to {figure(max(known))}" if known else series, table)
    parts += _differences(found["over_seeds"])
    rows = [(setting, *(shown_setting(row[id_]) for id_ in names)) for setting, row in found["settings"].items()]
    heading = ("setting", *names.values())
    same = Text("All settings are the same.", style="dim")
    parts += _titled("settings that differ", cells_table(heading, rows, numbers=(), width=WIDE) if rows else same)
    return _together(parts)


def _differences(over_seeds: dict[str, Any] | None) -> list[Part]:
    """Return the means over seeds and the paired differences, with their intervals."""
    if over_seeds is None:
        return [Text("These are runs of several kinds, which are not judged by the same figure.", style="dim")]
    means = _table(f"mean {over_seeds['figure']}", "95 % interval over seeds", left=2)
    for group in over_seeds["groups"]:
        if group["mean"] is not None:
            means.add_row(Text(group["name"]), with_interval(*(group["mean"][name] for name in ("estimate", "low", "high"))))
    pairs = _table("difference", "mean over pairs of equal seeds, 95 % interval", "pairs", "", left=2)
    pairs.columns[3].justify = "left"
    for pair in (*over_seeds["twins"], *over_seeds["paired"]):
        ends = [(pair["interval"] or {}).get(name) for name in ("low", "high")]
        cells = (with_interval(pair["estimate"], *ends), str(len(pair["seeds"])), pair["verdict"])
        pairs.add_row(Text(f"{pair['ours']} − {pair['theirs']}"), *cells)
    notes = [Text(text, style="yellow") for text in over_seeds["notes"]]
    return _titled(f"differences over seeds: {over_seeds['figure']}", means, pairs, *notes)
