"""The report of a run: one self-contained page `report.html`, made from the events in the run's folder. Imports no torch.

Charts and tables are those of `esper.runs.page`; the lives of the seeds and the network with its slots are drawn here. Equal stories give
equal text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from esper.config import load_saved
from esper.files import printable, write_in_run
from esper.growth.config import RentConfig, TrainingConfig
from esper.growth.events import SlotView
from esper.growth.lifecycle.ledger import LEDGER_HEADING, gain_in_words, ledger_rows
from esper.growth.lifecycle.stages import OCCUPIED, Stage
from esper.growth.report import summary
from esper.growth.report.story import Remark, Story, is_share, read_story
from esper.runs import page
from esper.runs.analysis import sections_about_seeds, slots_in_order
from esper.runs.catalog import Run
from esper.runs.folder import CONFIG, TWIN, RunError, has_twin
from esper.runs.page import LEFT, RIGHT, WIDTH, Line, Mark, Scale, chart, note, section, table, ticks, tiles
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
from esper.text_table import figure

REPORT = "report.html"
_MAX_EMPTY = 8  # slots that are all shown; of more, empty ones in a row are only counted
ABOUT_WIDTHS = "Grey: the units at first. Green: units of kept seeds. Blue: units of seeds on probation."
_NAME_WIDTH = 36  # characters of a slot's name in a drawing


def write_report(run_folder: Path | str) -> Path:
    """Write the report of a run, finished or not, into its folder, and return its path. An older report is replaced."""
    folder = Path(run_folder)
    story = read_story(folder)
    if story.began is None:
        raise RunError(f"there is nothing to report about {folder}: the training has not begun; try again later")
    twin = read_story(folder / TWIN) if has_twin(folder) else None
    run = Run(folder, "growth")
    run.refresh()
    path = folder / REPORT
    write_in_run(path, render(story, twin, title=printable(folder.name), rent=_rent(folder), run=run).encode())
    return path


def render(story: Story, twin: Story | None, *, title: str, rent: RentConfig, run: Run | None = None) -> str:
    """Return the page as HTML. `rent` is the rent of the run, for the notes about it.

    Sections about blueprints, Shapley values, the machine and the settings come from `run`, and are left out without it.
    """
    parts = [f'<p class="summary">{escape(summary.headline(story, twin))}</p>', tiles(summary.tiles(story, twin)), _circumstances(story)]
    parts += [*(remarks_on(run) if run is not None else []), *map(note, summary.about_twin(story, twin))]
    heading, rows = summary.comparison(story, twin)
    if rows:
        name = "Before, after, cost" if twin is None else "Against the twin, before, after, cost"
        parts.append(section(name, table(heading, rows, numbers=range(1, len(heading)))))
        parts += map(note, [*summary.about_chance(twin), *summary.about_rent(story, rent)])
    if story.epochs:
        parts.append(section("Loss", loss_chart(story, twin)))
        metrics = dict.fromkeys(name for epoch in story.epochs for name in epoch.metrics)
        parts += [section(f"Validation {name}", metric_chart(name, story, twin)) for name in metrics]
        parts.append(section("The network now", network_drawing(story)))
        if story.widened:
            parts.append(section("Layers that became wider", width_drawing(story), note(ABOUT_WIDTHS)))
        if story.seeds:
            parts.append(section("Lives of the seeds", lives_drawing(story), _every_stage(story)))
            parts.append(section("Gain against size", in_grid(gain_charts(story, twin)), note(_about_gain(twin))))
        parts.append(section("Parameters", parameters_chart(story)))
        if run is not None:
            parts.append(section("FLOPs and learning rate", in_grid(drawn_charts(run, CHARTS["growth"][3:]))))
    if story.seeds:
        parts.append(section("Ledger", table(LEDGER_HEADING, ledger_rows(story.seeds), numbers=(0, 3, 5, 6, 7))))
        parts += map(note, [summary.ABOUT_REMOVAL, *summary.about_skipped(story)])
        parts += sections_about_seeds(run) if run is not None else []
    if story.rollbacks:
        lost = table(summary.ROLLBACK_HEADING, summary.rollback_rows(story), numbers=(0, 2, 3))
        parts.append(section("Governor", f"<p>{escape(summary.about_rollbacks(story))}</p>", lost))
    if story.probes:
        parts.append(_probe_section(story))
    parts.append(section("Decisions", _remarks(story.remarks)))
    if run is not None:
        parts += [system_section(run), problem_section(run), settings_section(run)]
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
        lines.append(
            Line("validation of the twin, which never grew", [epoch.epoch for epoch in twin.epochs], losses, "twin", is_dashed=True)
        )
    return chart(lines, x="epochs", marks=_marks(story), x_max=_planned(story))


def metric_chart(name: str, story: Story, twin: Story | None = None) -> str:
    """Draw a metric by epoch, with that of the twin."""
    stories = [("grown", "validation", story), *([("twin, which never grew", "twin", twin)] if twin is not None else [])]
    lines = []
    for label, colour, one in stories:
        known = [epoch for epoch in one.epochs if name in epoch.metrics]
        values = [epoch.metrics[name] for epoch in known]
        lines.append(Line(label, [epoch.epoch for epoch in known], values, colour, is_dashed=one is twin))
    return chart(lines, x="epochs", marks=_marks(story), x_max=_planned(story), is_percent=is_share(name))


def parameters_chart(story: Story) -> str:
    """Draw the parameters of host and seeds by epoch, with a line for the host alone."""
    host = story.began.parameters if story.began is not None else 0
    epochs = [0, *(epoch.epoch for epoch in story.epochs)]
    counts = [host, *(epoch.parameters for epoch in story.epochs)]
    lines = [
        Line("with seeds", epochs, counts, "validation", is_step=True),
        Line("host", epochs, [host] * len(epochs), "twin", is_dashed=True),
    ]
    return chart(lines, x="epochs", x_max=_planned(story), from_zero=True, height=200)


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
        chart([Line("gain", sizes, gains, is_dots=True)], x=name, y=f"Gain against {name}", may_be_log=False, width=width, height=height)
        for name, sizes in (("parameters", parameters), ("FLOPs", flops))
    ]


def _about_gain(twin: Story | None) -> str:
    if twin is not None:
        return "Validation loss of the twin minus that of the network; a dot for each epoch."
    return (
        "Fall of the validation loss since the first epoch; a dot for each epoch. With --twin it is compared with a network that never "
        "grows."
    )


def _marks(story: Story) -> list[Mark]:
    """Return the births and ends of the seeds, and the rollbacks."""
    marks = [Mark(seed.born, f"germinated: {seed.blueprint} after {seed.slot}", "germinated", "germinated") for seed in story.seeds]
    colours = {"kept": "fossilized", "pruned": "pruned"}
    marks += [
        Mark(seed.ended, f"{seed.outcome}: {seed.blueprint} after {seed.slot}", seed.outcome, colours[seed.outcome])
        for seed in story.seeds
        if seed.ended is not None and seed.outcome in colours
    ]
    return marks + [
        Mark(back.epoch, f"rolled back to epoch {back.to_epoch}: {back.reason}", "rolled back", "trouble") for back in story.rollbacks
    ]


def _planned(story: Story) -> float:
    """Return the larger of the planned and the finished number of epochs, at least 1."""
    planned = story.started.epochs if story.started is not None else None
    return max(planned or 0, story.epochs[-1].epoch if story.epochs else 0, 1)


# Drawings


def lives_drawing(story: Story) -> str:
    """Draw a horizontal bar for every seed, coloured by its stages. The bars tell their stage and epochs under the pointer."""
    row, top = 46, 8
    height = top + row * len(story.seeds) + 26
    end = story.epochs[-1].epoch
    across = Scale(0, _planned(story), LEFT / 2, WIDTH - RIGHT)
    parts, used = [], list[str]()
    for index, seed in enumerate(story.seeds):
        y = top + index * row
        name = f"{seed.number}  {seed.blueprint} after {_shortened(seed.slot)}, {seed.outcome}"
        parts.append(f'<text x="{LEFT / 2}" y="{y + 14}">{escape(name)}</text>')
        ends = [*(step.epoch for step in seed.stages[1:]), end]
        for step, stop in zip(seed.stages, ends, strict=True):
            start, stage = step.epoch, step.stage.name
            if step.stage is Stage.PRUNED:
                colour = "trouble" if seed.outcome == "rolled back" else "pruned"
                parts.append(_titled(f'<circle cx="{across(start)}" cy="{y + 28}" r="6" fill="var(--{colour})">', step.reason, "circle"))
            elif stop > start:
                used += [stage] if stage not in used else []
                bar = f'<rect x="{across(start)}" y="{y + 21}" width="{across(stop) - across(start):.1f}" height="14" rx="3" '
                bar += f'fill="var(--{stage.lower()})">'
                parts.append(_titled(bar, f"{stage.lower()}, epochs {start} to {stop}", "rect"))
    parts += [
        f'<text class="soft" x="{across(value)}" y="{height - 6}" text-anchor="middle">{value:g}</text>'
        for value in ticks(0, across.high, 5)
    ]
    legend = "".join(f'<span class="mark" style="--of:var(--{stage.lower()})">{stage.lower()}</span>' for stage in used)
    return f'<figure><div class="legend">{legend}</div>{_svg(height, parts, "lives of the seeds, by epochs")}</figure>'


ABOUT_NETWORK = (
    "From the input at the top to the output at the bottom, one line per slot. The bar is the cost of removing the seed now, with its "
    "interval; the tick is its rent. Age is in epochs."
)


def network_drawing(story: Story) -> str:
    """Draw the slots in order with stage, blueprint, alpha, age, and the cost of removing the seed with its interval."""
    views = {view.slot: view for view in story.epochs[-1].slots}
    names = slots_in_order([] if story.started is None else story.started.slots, views)
    if names and not views:
        return note("The log has no details of slots. Train with --telemetry normal to see them.")
    items: list[SlotView | int] = []  # a number stands for that many empty slots
    for name in names:
        view = views.get(name)
        if view is not None and (len(views) <= _MAX_EMPTY or not _is_empty(view, story)):
            items.append(view)
        elif items and isinstance(items[-1], int):
            items[-1] += 1
        else:
            items.append(1)
    row, spine, reach = 76, 24, _reach(story)
    height = row * len(items) + 64
    gains = Scale(-0.25 * reach, reach, spine + 22, WIDTH - RIGHT)
    parts = [
        f'<line x1="{spine}" x2="{spine}" y1="26" y2="{height - 26}" stroke="var(--soft)" stroke-width="2"/>',
        f'<text class="soft" x="{spine + 22}" y="20">input</text>',
        f'<text class="soft" x="{spine + 22}" y="{height - 10}">output</text>',
        *(f'<circle cx="{spine}" cy="{y}" r="5" fill="var(--soft)"/>' for y in (16, height - 14)),
    ]
    for index, item in enumerate(items):
        parts += _slot_drawing(item, story, 32 + index * row, spine, gains)
    return f"<figure>{_svg(height, parts, 'the network and its slots')}</figure>{note(ABOUT_NETWORK)}"


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
            bars = layers.setdefault(layer, [(first, "soft", f"{summary.counted(first, 'unit')} at first")])
            bars.append((units, colour, f"{summary.counted(units, 'unit')} by {event.blueprint} after epoch {event.epoch}"))
    row, left = 44, 24
    widths = Scale(0, max((sum(units for units, _, _ in bars) for bars in layers.values()), default=1), left, WIDTH - RIGHT)
    parts = []
    for index, (layer, bars) in enumerate(layers.items()):
        y, done = index * row, 0
        numbers = " + ".join(str(units) for units, _, _ in bars)
        parts.append(f'<text x="{left}" y="{y + 16}">{escape(_shortened(layer))}: {numbers} units</text>')
        for units, colour, words in bars:
            start, end = widths(done), widths(done + units)
            bar = f'<rect x="{start + 1:.1f}" y="{y + 22}" width="{max(end - start - 2, 1):.1f}" height="12" fill="var(--{colour})">'
            parts.append(_titled(bar, words, "rect"))
            done += units
    return f"<figure>{_svg(row * len(layers), parts, 'layers that became wider')}</figure>"


def _is_empty(view: SlotView, story: Story) -> bool:
    """Return whether a slot holds no seed. At the end of a run, seeds are removed that are not fossilized, or not in the best state."""
    seed = None if view.number is None else story.ledger.seed(view.number)
    is_kept = view.stage == Stage.FOSSILIZED.name and (seed is None or seed.outcome == "kept")
    return Stage[view.stage] not in OCCUPIED or (story.is_over and not is_kept)


def _slot_drawing(item: SlotView | int, story: Story, y: float, spine: float, gains: Scale) -> list[str]:
    """Return the parts of one line: a dot on the spine, two lines of text, and the bar of the cost of removal."""
    middle = y + 26
    if isinstance(item, int):
        return [f'<text class="soft" x="{spine + 22}" y="{middle + 4}">{summary.counted(item, "empty slot")}</text>']
    seed, stage = story.seed_in(item.slot) if item.number is None else story.ledger.seed(item.number), item.stage
    is_empty = _is_empty(item, story)
    if is_empty:
        why = "" if seed is None else f", last: {seed.blueprint}, {seed.outcome}"
        state = "embargoed" if stage == Stage.EMBARGOED.name and not story.is_over else "empty"
        dot = f'<circle cx="{spine}" cy="{middle}" r="7" fill="var(--paper)" stroke="var(--soft)" stroke-width="2"/>'
        texts = (_shortened(item.slot), f"{state}{why}")
    else:
        dot = f'<circle cx="{spine}" cy="{middle}" r="9" fill="var(--{stage.lower()})" opacity="{0.35 + 0.65 * item.alpha:.2f}"/>'
        texts = (
            _shortened(item.slot),
            f"{item.blueprint}, {stage.lower()}, alpha {item.alpha:.2f}, age {item.age}, {summary.counted(item.parameters, 'parameter')}",
        )
    parts = [
        dot,
        f'<text x="{spine + 22}" y="{y + 18}" font-weight="600">{escape(texts[0])}</text>',
        f'<text class="soft" x="{spine + 22}" y="{y + 41}">{escape(texts[1])}</text>',
    ]
    gain, low, high = (item.gain, item.gain_low, item.gain_high) if seed is None else (seed.gain, seed.gain_low, seed.gain_high)
    if is_empty or gain is None or low is None or high is None:
        return parts
    words = gain_in_words(gain, low, high, is_short=True)
    left, right = (min(max(gains(value), gains.start), gains.end) for value in (low, high))
    zero, at, rent = gains(0), gains(gain), gains(item.rent)
    parts += [
        f'<text x="{gains.end}" y="{y + 18}" text-anchor="end">{escape(words)}</text>',
        f'<line x1="{zero}" x2="{zero}" y1="{y + 48}" y2="{y + 64}" stroke="var(--soft)"/>',
        f'<rect x="{min(zero, at)}" y="{y + 51}" width="{abs(at - zero):.1f}" height="10" fill="var(--{stage.lower()})" opacity="0.6"/>',
        f'<line x1="{left}" x2="{right}" y1="{y + 56}" y2="{y + 56}" stroke="var(--ink)" stroke-width="2"/>',
        f'<line x1="{rent}" x2="{rent}" y1="{y + 48}" y2="{y + 64}" stroke="var(--trouble)" stroke-width="2"/>',
    ]
    return [_titled("<g>", f"costs {words} if removed now; its rent is {figure(item.rent)}", "g", "".join(parts))]


def _reach(story: Story) -> float:
    """Return the largest cost of removal in the drawing, the scale of all bars."""
    known = [seed.gain_high if seed.gain_high is not None and seed.gain_high < 1e9 else seed.gain for seed in story.seeds]
    return max([value for value in known if value is not None and value > 0], default=1.0)


def _titled(opening: str, title: str, tag: str, content: str = "") -> str:
    """Return an element of a drawing that tells its title under the pointer."""
    return f"{opening}<title>{escape(title)}</title>{content}</{tag}>"


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _shortened(name: str) -> str:
    """Cut a long name at its beginning; the end tells it from others."""
    return name if len(name) <= _NAME_WIDTH else f"…{name[-_NAME_WIDTH + 1 :]}"


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
        summary.counted(len(started.slots), "slot"),
        "" if started.uninformed_loss is None else f"uninformed loss {figure(started.uninformed_loss, 3)}",
    ]
    return f'<p class="note">{escape(" · ".join(filter(None, parts)))}</p>'


def _every_stage(story: Story) -> str:
    """Return a list that opens: every stage of every seed with its reason, and every measured contribution."""
    rows: list[tuple[str, ...]] = []
    for seed in story.seeds:
        name = f"{seed.number}: {seed.blueprint} after {seed.slot}"
        own = [(step.epoch, step.stage.name.lower(), step.reason) for step in seed.stages]
        for row in seed.contributions:
            cost = gain_in_words(row.gain, row.gain_low, row.gain_high)
            own.append((row.epoch, "measured", f"costs {cost} if removed; rent {figure(row.rent)}"))
        rows += [(name, str(epoch), what, why) for epoch, what, why in sorted(own, key=lambda entry: entry[0])]
    inside = table(("seed", "epoch", "stage", "why"), rows, numbers=(1,))
    return f'<details><summary>every stage and every measurement</summary><div class="wide">{inside}</div></details>'


def _probe_section(story: Story) -> str:
    """Return the best candidates of every slot, and a list of all candidates that opens."""
    about = "Estimated initial fall of the loss per step with a candidate in the slot; the best few of every slot."
    best, every = (table(summary.PROBE_HEADING, summary.probe_rows(story, is_complete=each), numbers=(0, 3)) for each in (False, True))
    opens = f'<details><summary>all candidates, the newest probe first</summary><div class="wide">{every}</div></details>'
    return section("Results of the probe", best, note(about), opens)


def _remarks(remarks: Sequence[Remark]) -> str:
    if not remarks:
        return "<p>Nothing was decided.</p>"
    rows = [(str(item.first) if item.first == item.last else f"{item.first}–{item.last}", item.text) for item in remarks]
    return table(("epoch", "what and why"), rows, numbers=(0,), classes=["trouble" if item.is_trouble else "" for item in remarks])


def _rent(folder: Path) -> RentConfig:
    """Return the rent in the saved configuration of a run, or the default."""
    return load_saved(TrainingConfig, folder / CONFIG).rent if (folder / CONFIG).is_file() else RentConfig()
