"""The report of a run: one self-contained page `report.html`, made from the events in the run's folder. Imports no torch.

The page begins with what matters most: the verdict, the curves beside those of the twin, the network, and the lives of its seeds.
Decisions, sizes, probe, blueprints, machine and settings are folded below. Charts and tables are those of `esper.runs.page`; the network,
the lives and the widths are drawn here. Equal stories give equal text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from esper.config import load_saved
from esper.files import printable, write_in_run
from esper.growth.config import RentConfig, TrainingConfig
from esper.growth.events import SlotView
from esper.growth.lifecycle.ledger import LEDGER_HEADING, SeedRecord, ledger_rows
from esper.growth.lifecycle.stages import OCCUPIED, Stage
from esper.growth.report import summary
from esper.growth.report.story import Remark, Story, is_share, read_story
from esper.runs import page
from esper.runs.analysis import sections_about_seeds, slots_in_order
from esper.runs.catalog import Run
from esper.runs.folder import CONFIG, TWIN, RunError, has_twin
from esper.runs.page import Line, Mark, chart, folded, note, section, table, ticks, tiles
from esper.runs.sections import (
    CHARTS,
    SMALL,
    drawn_charts,
    in_grid,
    problem_section,
    remarks_on,
    settings_section,
    system_section,
)
from esper.runs.stages import STAGES
from esper.text_table import compact, counted, figure, shortened, with_interval

REPORT = "report.html"
MAX_EMPTY = 3  # empty slots in a row that are all shown; of more, only the number
NAME_WIDTH = 48  # characters of a slot's name in a drawing


def write_report(run_folder: Path | str) -> Path:
    """Write the report of a run, finished or not, into its folder, and return its path. An older report is replaced."""
    folder = Path(run_folder)
    story = read_story(folder)
    if story.began is None:
        raise RunError(f"there is nothing to report about {folder}: the training has not begun; try again later")
    twin = read_story(folder / TWIN) if has_twin(folder) else None
    run = Run(folder, "growth")
    run.refresh()
    rent = load_saved(TrainingConfig, folder / CONFIG).rent if (folder / CONFIG).is_file() else RentConfig()
    path = folder / REPORT
    write_in_run(path, render(story, twin, title=printable(folder.name), rent=rent, run=run).encode())
    return path


def render(story: Story, twin: Story | None, *, title: str, rent: RentConfig, run: Run | None = None) -> str:
    """Return the page as HTML. `rent` is the rent of the run, for the notes about it.

    Sections about blueprints, Shapley values, the machine and the settings come from `run`, and are left out without it.
    """
    # The verdict: what came of it, against the twin.
    parts = [f'<p class="summary">{escape(summary.headline(story, twin))}</p>', tiles(summary.tiles(story, twin)), _circumstances(story)]
    parts += [*(remarks_on(run) if run is not None else []), *map(note, summary.about_twin(story, twin))]
    heading, rows = summary.comparison(story, twin)
    if rows:
        name = "Before and after" if twin is None else "Against the twin"
        parts.append(
            section(name, table(heading, rows, numbers=range(1, len(heading)), optional=(4,)), *map(note, summary.about_chance(twin)))
        )
    # The curves, the network and the lives of its seeds.
    if story.epochs:
        metrics = dict.fromkeys(name for epoch in story.epochs for name in epoch.metrics)
        curves = [loss_chart(story, twin), *(metric_chart(name, story, twin) for name in metrics)]
        parts.append(section("Curves", in_grid(curves)))
        parts.append(section("The network now", network_drawing(story)))
    if story.seeds and story.epochs:
        ledger = table(
            LEDGER_HEADING[:-1], [row[:-1] for row in ledger_rows(story.seeds, is_short=True)], numbers=(0, 5, 6, 7), optional=(1, 3, 4)
        )
        parts.append(section("Lives of the seeds", lives_drawing(story), ledger, *map(note, summary.about_skipped(story))))
    if story.rollbacks:
        lost = table(summary.ROLLBACK_HEADING, summary.rollback_rows(story), numbers=(0, 2, 3))
        parts.append(section("Governor", f"<p>{escape(summary.about_rollbacks(story))}</p>", lost))
    parts.append(problem_section(run) if run is not None else "")
    # Folded: the details.
    if story.remarks:
        parts.append(folded("Decisions and their reasons", _remarks(story.remarks)))
    if story.seeds:
        about = [note(summary.ABOUT_REMOVAL), *map(note, summary.about_rent(story, rent))]
        parts.append(folded("Every stage and every measurement of the seeds", _every_stage(story), *about))
    if story.epochs:
        sizes = [parameters_chart(story), *(drawn_charts(run, CHARTS["growth"][3:]) if run is not None else [])]
        gains = [*gain_charts(story, twin), note(_about_gain(twin))] if story.seeds else []
        parts.append(folded("Size and learning rate", width_drawing(story), in_grid(sizes), *gains))
    if story.probes:
        parts.append(_probe_section(story))
    if run is not None:
        parts += [*(sections_about_seeds(run, is_folded=True) if story.seeds else []), system_section(run), settings_section(run)]
    return page.render(title, parts)


# Charts


def loss_chart(story: Story, twin: Story | None = None) -> str:
    """Draw training and validation loss by epoch, the twin's beside them, with marks where seeds germinated and ended."""
    epochs = [epoch.epoch for epoch in story.epochs]
    lines = [
        Line("training", epochs, [epoch.train_loss for epoch in story.epochs], "train"),
        Line("validation", epochs, [epoch.val_loss for epoch in story.epochs], "validation"),
    ]
    if twin is not None and twin.epochs:
        losses = [epoch.val_loss for epoch in twin.epochs]
        lines.append(Line("validation, twin", [epoch.epoch for epoch in twin.epochs], losses, "twin", is_dashed=True))
    width, height = SMALL
    return chart(lines, x="epochs", y="Loss", marks=_marks(story), x_max=_planned(story), width=width, height=height)


def metric_chart(name: str, story: Story, twin: Story | None = None) -> str:
    """Draw a metric on the validation data by epoch, with that of the twin."""
    stories = [("grown", "validation", story), *([("twin", "twin", twin)] if twin is not None else [])]
    lines = []
    for label, colour, one in stories:
        known = [epoch for epoch in one.epochs if name in epoch.metrics]
        values = [epoch.metrics[name] for epoch in known]
        lines.append(Line(label, [epoch.epoch for epoch in known], values, colour, is_dashed=one is twin))
    return chart(
        lines,
        x="epochs",
        y=f"Validation {name}",
        marks=_marks(story),
        x_max=_planned(story),
        is_percent=is_share(name),
        width=SMALL[0],
        height=SMALL[1],
    )


def parameters_chart(story: Story) -> str:
    """Draw the parameters of host and seeds by epoch, with a line for the host alone."""
    host = story.began.parameters if story.began is not None else 0
    epochs = [0, *(epoch.epoch for epoch in story.epochs)]
    counts = [host, *(epoch.parameters for epoch in story.epochs)]
    lines = [
        Line("with seeds", epochs, counts, "validation", is_step=True),
        Line("host", epochs, [host] * len(epochs), "twin", is_dashed=True),
    ]
    width, height = SMALL
    return chart(lines, x="epochs", y="Parameters", x_max=_planned(story), from_zero=True, width=width, height=height)


def gain_charts(story: Story, twin: Story | None) -> list[str]:
    """Draw by how much the network is better, epoch by epoch, against its parameters and against its FLOPs."""
    of_twin = {epoch.epoch: epoch.val_loss for epoch in twin.epochs} if twin is not None else {}
    first = story.epochs[0].val_loss
    rows = [
        (epoch.parameters, epoch.flops, (first if twin is None else of_twin[epoch.epoch]) - epoch.val_loss)
        for epoch in story.epochs
        if twin is None or epoch.epoch in of_twin
    ]
    if not rows:
        return [note("The twin has not begun yet.")]
    parameters, flops, gains = zip(*rows, strict=True)
    width, height = SMALL
    return [
        in_grid(
            chart(
                [Line("gain", sizes, gains, is_dots=True)], x=name, y=f"Gain against {name}", may_be_log=False, width=width, height=height
            )
            for name, sizes in (("parameters", parameters), ("FLOPs", flops))
        )
    ]


def _about_gain(twin: Story | None) -> str:
    if twin is not None:
        return "Validation loss of the twin minus that of the network; a dot for each epoch."
    return (
        "Fall of the validation loss since the first epoch; a dot for each epoch. With --twin it is compared with a network that never "
        "grows."
    )


def _marks(story: Story) -> list[Mark]:
    """Return the births and ends of the seeds, the rollbacks, and the epoch whose state was kept."""
    marks = [Mark(seed.born, f"germinated: {seed.blueprint} after {seed.slot}", "germinated", "germinated") for seed in story.seeds]
    colours = {"kept": "fossilized", "pruned": "pruned"}
    marks += [
        Mark(seed.ended, f"{seed.outcome}: {seed.blueprint} after {seed.slot}", seed.outcome, colours[seed.outcome])
        for seed in story.seeds
        if seed.ended is not None and seed.outcome in colours
    ]
    marks += [
        Mark(back.epoch, f"rolled back to epoch {back.to_epoch}: {back.reason}", "rolled back", "trouble") for back in story.rollbacks
    ]
    best = None if story.finished is None else story.finished.best_epoch
    return marks if best is None else [*marks, Mark(best, f"best state, after epoch {best}", "best state", "ink")]


def _planned(story: Story) -> float:
    """Return the larger of the planned and the finished number of epochs, at least 1."""
    planned = story.started.epochs if story.started is not None else None
    return max(planned or 0, story.epochs[-1].epoch if story.epochs else 0, 1)


# Drawings: rows of HTML, which are as wide as the page


def _bar(left: float, right: float, colour: str, *, title: str = "", thin: bool = False) -> str:
    """Return the part of a bar from one share of its row's width to another."""
    left, right = (min(max(share, 0.0), 1.0) for share in (left, right))
    about = f' title="{escape(title)}"' if title else ""
    place = f"left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%;background:var(--{colour})"
    return f'<i{" class=thin" if thin else ""} style="{place}"{about}></i>'


def lives_drawing(story: Story) -> str:
    """Draw a bar for every seed, coloured by its stages. Each piece tells its stage, epochs and reason under the pointer."""
    whole, end = _planned(story), story.epochs[-1].epoch
    rows, used = [], dict[str, None]()
    for seed in story.seeds:
        pieces = []
        for step, stop in zip(seed.stages, [*(step.epoch for step in seed.stages[1:]), end], strict=True):
            stage = step.stage.name
            if step.stage is Stage.PRUNED:
                colour = "trouble" if seed.outcome == "rolled back" else "pruned"
                pieces.append(_bar(step.epoch / whole - 0.004, step.epoch / whole + 0.004, colour, title=step.reason))
            elif stop > step.epoch:
                used[stage] = None
                about = f"{STAGES[stage].word}, epochs {step.epoch} to {stop}: {step.reason}"
                pieces.append(_bar(step.epoch / whole, stop / whole, stage.lower(), title=about))
        name = f"{seed.number}  {seed.blueprint} after {shortened(seed.slot, NAME_WIDTH)}, {seed.outcome}"
        rows.append(f'<li><span>{escape(name)}</span><div class="track">{"".join(pieces)}</div></li>')
    marks = "".join(
        f'<small style="left:{100 * value / whole:.2f}%;transform:translateX(-{100 * value / whole:.0f}%)">{value:g}</small>'
        for value in ticks(0, whole, 5)
    )
    legend = "".join(f'<span class="mark" style="--of:var(--{stage.lower()})">{STAGES[stage].word}</span>' for stage in used)
    axis = f'<li><span></span><div class="axis" aria-label="epochs">{marks}</div></li>'
    return f'<div class="legend">{legend}</div><ol class="lives" aria-label="lives of the seeds, by epochs">{"".join(rows)}{axis}</ol>'


ABOUT_NETWORK = (
    "Bar: the cost of removal, which is the rise of the validation loss if the seed were switched off now; line: its interval; red: its "
    "rent."
)


def network_drawing(story: Story) -> str:
    """Draw the slots in order with stage, blueprint, alpha, age, and the cost of removing the seed with its interval."""
    views = {view.slot: view for view in story.epochs[-1].slots}
    names = slots_in_order([] if story.started is None else story.started.slots, views)
    if names and not views:
        return note("The log has no details of slots. Train with --telemetry normal to see them.")
    # Long rows of slots that were never used are only counted.
    rows, empty = list[str](), list[str]()
    known = [seed.gain_high if seed.gain_high is not None and seed.gain_high < 1e9 else seed.gain for seed in story.seeds]
    reach = max([value for value in known if value is not None and value > 0], default=1.0)

    def flush() -> None:
        rows.extend(empty if len(empty) <= MAX_EMPTY else [_slot_row("empty", "", f"<span>{counted(len(empty), 'empty slot')}</span>")])
        empty.clear()

    for name in names:
        view = views.get(name)
        seed = story.seed_in(name) if view is None or view.number is None else story.ledger.seed(view.number)
        is_kept = view is not None and view.stage == Stage.FOSSILIZED.name and (seed is None or seed.outcome == "kept")
        # At the end of a run, seeds are removed that are not fossilized, or not in the best state.
        if view is None or Stage[view.stage] not in OCCUPIED or (story.is_over and not is_kept):
            is_embargoed = view is not None and view.stage == Stage.EMBARGOED.name and not story.is_over
            why = "under embargo" if is_embargoed else "empty, opened behind the kept seed" if "#" in name else "empty"
            why += "" if seed is None else f", last: {seed.blueprint}, {seed.outcome}"
            row = _slot_row("empty", name, f"<span>{escape(why)}</span>")
            if seed is None:
                empty.append(row)
                continue
        else:
            row = _seed_row(view, seed, reach)
        flush()
        rows.append(row)
    flush()
    inside = "".join(['<li class="end"><span>input</span></li>', *rows, '<li class="end"><span>output</span></li>'])
    about = note(ABOUT_NETWORK) if any("track" in row for row in rows) else ""
    return f'<ol class="network" aria-label="the network and its slots">{inside}</ol>{about}'


def _slot_row(look: str, name: str, content: str) -> str:
    bold = f"<strong>{escape(shortened(name, NAME_WIDTH))}</strong> " if name else ""
    return f'<li class="{look}">{bold}{content}</li>'


def _seed_row(view: SlotView, seed: SeedRecord | None, reach: float) -> str:
    """Return the line of a slot with a seed. `reach` is the largest cost of removal, the scale of all bars."""
    stage, alpha = view.stage, f"alpha {view.alpha:.2f}, " if view.alpha != 1.0 else ""
    words = f"{view.blueprint}, {STAGES[stage].word}, {alpha}{counted(view.age, 'epoch')} old, {counted(view.parameters, 'parameter')}"
    gain, low, high = (view.gain, view.gain_low, view.gain_high) if seed is None else (seed.gain, seed.gain_low, seed.gain_high)
    content = f"<span>{escape(words)}</span>"
    if gain is not None and low is not None and high is not None:
        zero = -min(low, 0.0) / (reach - min(low, 0.0))  # place of 0 on the bar
        at = [zero + value / reach * (1 - zero) for value in (gain, low, high, view.rent)]
        cost = f"cost of removal {with_interval(gain, low, high, is_short=True)}, rent {figure(view.rent)}"
        bars = _bar(min(zero, at[0]), max(zero, at[0]), stage.lower()) + _bar(at[1], at[2], "ink", thin=True)
        bars += _bar(at[3] - 0.002, at[3] + 0.002, "trouble")
        content += f'<span class="cost">{escape(cost)}</span><div class="track">{bars}</div>'
    return f'<li style="--of:var(--{stage.lower()})"><strong>{escape(shortened(view.slot, NAME_WIDTH))}</strong> {content}</li>'


def width_drawing(story: Story) -> str:
    """Draw a bar for every layer that got new units: those at first, and behind them those of each seed that is still there."""
    layers: dict[str, list[tuple[int, str, str]]] = {}  # layer -> (units, colour, words)
    for event in story.widened:
        seed = story.ledger.seed(event.number)
        if seed is not None and not seed.is_present:
            continue
        colour = "fossilized" if seed is not None and seed.outcome == "kept" else "holding"
        for layer, units in event.units.items():
            first = event.before.get(layer, 0)
            bars = layers.setdefault(layer, [(first, "soft", f"{counted(first, 'unit')} at first")])
            bars.append((units, colour, f"{counted(units, 'unit')} by {event.blueprint} after epoch {event.epoch}"))
    if not layers:
        return ""
    most, rows = max(sum(units for units, _, _ in bars) for bars in layers.values()) or 1, []
    for layer, bars in layers.items():
        numbers, done, pieces = " + ".join(compact(units) for units, _, _ in bars), 0, list[str]()
        for units, colour, words in bars:
            pieces.append(_bar(done / most, (done + units) / most - 0.003, colour, title=words))
            done += units
        name = f"{shortened(layer, NAME_WIDTH)}: {numbers} units"
        rows.append(f'<li><span>{escape(name)}</span><div class="track">{"".join(pieces)}</div></li>')
    about = note("Layers that became wider. Grey: the units at first; then those of seeds, in the colour of their stage.")
    return f'<ol class="lives" aria-label="layers that became wider">{"".join(rows)}</ol>{about}'


# Text


def _circumstances(story: Story) -> str:
    """Return a paragraph with controller, optimiser, device and slots of the run."""
    started = story.started
    assert started is not None
    parts = [
        f"controller {started.controller}",
        f"seeds raised in mode {started.raise_mode}",
        started.optimizer,
        f"on {started.device}",
        counted(len(started.slots), "slot"),
        "" if started.uninformed_loss is None else f"loss of a constant predictor {figure(started.uninformed_loss)}",
    ]
    return note(" · ".join(filter(None, parts)))


def _every_stage(story: Story) -> str:
    """Return a table of every stage of every seed with its reason, and every measured cost of removal."""
    rows: list[tuple[str, ...]] = []
    for seed in story.seeds:
        name = f"{seed.number}: {seed.blueprint} after {seed.slot}"
        own = [(step.epoch, STAGES[step.stage.name].word, step.reason) for step in seed.stages]
        for row in seed.contributions:
            cost = with_interval(row.gain, row.gain_low, row.gain_high)
            own.append((row.epoch, "measured", f"cost of removal {cost}, rent {figure(row.rent)}"))
        rows += [(name, str(epoch), what, why) for epoch, what, why in sorted(own, key=lambda entry: entry[0])]
    return table(("seed", "epoch", "stage", "why"), rows, numbers=(1,))


def _probe_section(story: Story) -> str:
    """Return the best candidates of every slot, and a list of all candidates that opens."""
    about = (
        "Estimated fall of the loss per step, at first, with a candidate in the slot; the best few of every slot. The fastest at first "
        "need not be worth most at the end, and may not fit; the verdict names the rule that decided."
    )
    best, every = (table(summary.PROBE_HEADING, summary.probe_rows(story, is_complete=each), numbers=(0, 3)) for each in (False, True))
    opens = f"<details><summary>all candidates, the newest probe first</summary>{every}</details>"
    return folded("Results of the probe", best, note(about), opens)


def _remarks(remarks: Iterable[Remark]) -> str:
    rows = [(str(item.first) if item.first == item.last else f"{item.first}–{item.last}", item.text) for item in remarks]
    classes: Sequence[str] = ["trouble" if item.is_trouble else "" for item in remarks]
    return table(("epoch", "what and why"), rows, numbers=(0,), classes=classes)
