"""The report of a run: one self-contained page `report.html`, made from the events in the run's folder.

The first half draws the charts as SVG. Their colours are CSS variables of the page, so that they suit light and dark themes. The second
half writes the page. Equal stories give equal text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from esper.config import load_saved
from esper.files import printable, write_file
from esper.growth.config import RentConfig, TrainingConfig
from esper.growth.lifecycle.ledger import ANALYTICS_HEADING, LEDGER_HEADING, Row, analytics_rows, ledger_rows
from esper.growth.lifecycle.stages import Stage
from esper.growth.report import summary
from esper.growth.report.story import Remark, Story, read_story
from esper.runs.folder import CONFIG, EVENTS, TWIN, RunError
from esper.text_table import figure

# Names of the CSS variables. matplotlib draws with placeholder colours, which are replaced by the variables in its output.
_VARIABLES = (
    "ink",
    "grid",
    "train",
    "validation",
    "twin",
    "germinated",
    "training",
    "blending",
    "holding",
    "fossilized",
    "pruned",
    "trouble",
)
_PLACEHOLDERS = {name: f"#0a0b{index:02x}" for index, name in enumerate(_VARIABLES)}

_WIDTH = 9.0  # inches of 72 points
_MARKS = {"germinated": "^", "fossilized": "o", "pruned": "X", "trouble": "v"}
_MARK_LABELS = {"germinated": "germinated", "fossilized": "kept", "pruned": "pruned", "trouble": "rolled back"}


def loss_plot(story: Story, twin: Story | None = None) -> str:
    """Draw training and validation loss by epoch, with marks where seeds germinated and ended."""
    with _drawing(3.6) as (chart, finish):
        axes = chart.subplots()
        epochs = [epoch.epoch for epoch in story.epochs]
        axes.plot(epochs, [epoch.train_loss for epoch in story.epochs], color=_PLACEHOLDERS["train"], label="training")
        axes.plot(epochs, [epoch.val_loss for epoch in story.epochs], color=_PLACEHOLDERS["validation"], label="validation", linewidth=2)
        if twin is not None:
            losses = [epoch.val_loss for epoch in twin.epochs]
            twin_epochs = [epoch.epoch for epoch in twin.epochs]
            axes.plot(twin_epochs, losses, color=_PLACEHOLDERS["twin"], label="validation, never grown", linestyle="--")
        _use_log_scale(axes, story)
        _mark_events(axes, story)
        axes.set_ylabel("loss")
        _finish_epochs(axes, story)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=_PLACEHOLDERS["ink"])
        return finish()


def lives_plot(story: Story) -> str:
    """Draw a horizontal bar for every seed, coloured by its stages."""
    with _drawing(0.9 + 0.32 * max(len(story.seeds), 1)) as (chart, finish):
        axes = chart.subplots()
        end = story.epochs[-1].epoch if story.epochs else 0
        used = set()
        for row, seed in enumerate(story.seeds):
            for (start, stage), (stop, _) in zip(seed.stages, [*seed.stages[1:], (end, "")], strict=True):
                last = end if stage == Stage.FOSSILIZED.name else stop
                if stage == Stage.PRUNED.name:
                    marker = "trouble" if seed.outcome == "rolled back" else "pruned"
                    axes.plot([start], [row], _MARKS[marker], color=_PLACEHOLDERS[marker], markersize=7, clip_on=False, zorder=3)
                elif last > start:
                    label = "" if stage in used else stage.lower()
                    axes.barh(row, last - start, left=start, height=0.55, color=_PLACEHOLDERS[stage.lower()], label=label)
                    used.add(stage)
        axes.set_yticks(range(len(story.seeds)), [f"{seed.number}  {seed.blueprint} after {seed.slot}" for seed in story.seeds])
        axes.set_ylim(len(story.seeds) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        _finish_epochs(axes, story)
        if used:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=_PLACEHOLDERS["ink"])
        return finish()


def parameters_plot(story: Story) -> str:
    """Draw the parameters of host and seeds by epoch, with a line for the host alone."""
    with _drawing(2.4) as (chart, finish):
        axes = chart.subplots()
        host = story.began.parameters if story.began is not None else 0
        epochs = [0, *(epoch.epoch for epoch in story.epochs)]
        counts = [host, *(epoch.parameters for epoch in story.epochs)]
        axes.step(epochs, counts, where="post", color=_PLACEHOLDERS["validation"], linewidth=2, label="with seeds")
        axes.axhline(host, color=_PLACEHOLDERS["twin"], linestyle="--", label="host")
        axes.set_ylim(0, 1.1 * max(counts))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylabel("parameters")
        _finish_epochs(axes, story)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=_PLACEHOLDERS["ink"])
        return finish()


def _use_log_scale(axes: Any, story: Story) -> None:
    """Use a logarithmic axis if the losses differ by more than a factor of 5; on a linear one the end would look flat."""
    from matplotlib.ticker import LogLocator, NullLocator

    losses = [loss for epoch in story.epochs for loss in (epoch.train_loss, epoch.val_loss) if loss > 0]
    if losses and max(losses) > 5 * min(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())


def _mark_events(axes: Any, story: Story) -> None:
    """Mark the epochs in which seeds germinated, were kept or pruned, and of rollbacks."""
    events: dict[str, list[int | None]] = {
        "germinated": [seed.born for seed in story.seeds],
        "fossilized": [seed.ended for seed in story.seeds if seed.outcome == "kept"],
        "pruned": [seed.ended for seed in story.seeds if seed.outcome == "pruned"],
        "trouble": [rollback.epoch for rollback in story.rollbacks],
    }
    for level, (name, epochs) in enumerate(events.items()):
        for epoch in sorted({epoch for epoch in epochs if epoch is not None}):
            axes.axvline(epoch, color=_PLACEHOLDERS[name], linewidth=0.8, linestyle=":")
        if epochs:
            # One row above the curves per kind of mark, so that marks of one epoch do not overlap.
            height = [1.03 + 0.05 * level] * len(epochs)
            axes.plot(epochs, height, _MARKS[name], color=_PLACEHOLDERS[name], label=_MARK_LABELS[name],
                      transform=axes.get_xaxis_transform(), clip_on=False, markersize=6)  # fmt: skip


def _finish_epochs(axes: Any, story: Story) -> None:
    """Set up the axis of epochs, up to the planned end."""
    from matplotlib.ticker import MaxNLocator

    planned = story.started.epochs if story.started is not None else None
    axes.set_xlim(0, max(planned or 0, story.epochs[-1].epoch if story.epochs else 0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epochs")


@contextmanager
def _drawing(height: float) -> Iterator[tuple[Any, Callable[[], str]]]:
    """Yield an empty matplotlib figure with placeholder colours, and a function that returns it as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    ink, grid = _PLACEHOLDERS["ink"], _PLACEHOLDERS["grid"]
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "esper",
        "text.parse_math": False,  # a slot may have any name
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": grid,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "xtick.color": ink,
        "ytick.color": ink,
        "ytick.minor.size": 0,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's own settings
        matplotlib.rcParams.update(style)
        chart = Figure(figsize=(_WIDTH, height), layout="constrained")
        yield chart, lambda: _svg_of(chart)


def _svg_of(chart: Any) -> str:
    """Return a chart as SVG to embed in the page, without metadata and with CSS variables as colours."""
    text = io.StringIO()
    chart.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")  # not needed inside an HTML page
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # they would repeat in every chart, and nothing refers to them
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    for name, colour in _PLACEHOLDERS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg.strip()


REPORT = "report.html"
CONFIGS = ("grow.toml", CONFIG)  # the first existing one is shown as the configuration

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #22262b; --soft: #5d6570; --grid: #dfe3e8; --train: #9aa5b1; --validation: #1f6feb; --twin: #b08800;
  --germinated: #8250df; --training: #bf87f7; --blending: #e3a008; --holding: #54a0ff; --fossilized: #1a7f37; --pruned: #9a6700;
  --trouble: #cf222e; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171c; --ink: #dde3ea; --soft: #98a2ae; --grid: #2c333b; --train: #768390; --validation: #58a6ff; --twin: #d4a72c;
  --germinated: #bc8cff; --training: #8957e5; --blending: #d29922; --holding: #388bfd; --fossilized: #3fb950; --pruned: #d29922;
  --trouble: #ff7b72; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem;
  padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 0.6rem; }
p.summary { font-size: 1.05rem; margin-top: 0; } p.note, caption { color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--grid); padding: 0.3rem 0.9rem 0.3rem 0; text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; } .number { text-align: right; white-space: nowrap; }
td.kept { color: var(--fossilized); } td.trouble { color: var(--trouble); }
svg { display: block; height: auto; min-width: 36rem; width: 100%; } pre { overflow-x: auto; font-size: 0.85rem; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def write_report(run_folder: Path | str) -> Path:
    """Write the report of a run, finished or not, into its folder, and return its path. An older report is replaced."""
    folder = Path(run_folder)
    story = read_story(folder)
    if story.began is None:
        raise RunError(f"there is nothing to report about {folder}: the training has not begun; try again later")
    twin = read_story(folder / TWIN) if (folder / TWIN / EVENTS).is_file() else None
    config = next((text for name in CONFIGS if (text := _text(folder / name))), "")
    page = render(story, twin, title=printable(folder.name), config=config, rent=_rent(folder))
    path = folder / REPORT
    write_file(path, page.encode())
    return path


def render(story: Story, twin: Story | None, *, title: str, config: str, rent: RentConfig) -> str:
    """Return the page as HTML. `rent` is the rent of the run, for the notes about it."""
    sections = [f'<p class="summary">{escape(summary.headline(story, twin))}</p>', _circumstances(story)]
    heading, rows = summary.comparison(story, twin)
    if rows:
        sections.append(_section("Before, after, cost", _table(heading, rows, numbers=range(1, len(heading)))))
        sections += _notes([*summary.about_chance(twin), *summary.about_rent(story, rent)])
    if story.epochs:
        sections.append(_section("Loss", loss_plot(story, twin)))
        if story.seeds:
            sections.append(_section("Lives of the seeds", lives_plot(story)))
        sections.append(_section("Parameters", parameters_plot(story)))
    if story.seeds:
        sections.append(_section("Ledger", _table(LEDGER_HEADING, ledger_rows(story.seeds), numbers=(0, 3, 5, 6, 7))))
        sections += _notes([summary.ABOUT_REMOVAL, *summary.about_skipped(story)])
        sections.append(_section("Blueprints", _table(ANALYTICS_HEADING, analytics_rows(story.seeds), numbers=range(1, 7))))
    if story.probes:
        sections.append(_section("Results of the probe", _table(summary.PROBE_HEADING, summary.probe_rows(story), numbers=(0, 3))))
        sections += _notes(["Estimated initial fall of the loss per step with a candidate in the slot; the best few of every slot."])
    sections.append(_section("Decisions", _remarks(story.remarks)))
    if config:
        sections.append(_section("Configuration", f"<pre>{escape(config)}</pre>"))
    return _PAGE.format(title=escape(title), style=STYLE, body="\n".join(sections))


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


def _notes(sentences: Sequence[str]) -> list[str]:
    return [f'<p class="note">{escape(sentence)}</p>' for sentence in sentences]


def _section(name: str, content: str) -> str:
    return f'<section>\n<h2>{escape(name)}</h2>\n<div class="wide">{content}</div>\n</section>'


def _table(heading: Row, rows: Sequence[Row], *, numbers: Sequence[int] = (), classes: Sequence[str] = ()) -> str:
    """Return an HTML table. Columns in `numbers` are right-aligned; `classes` are CSS classes of the rows."""
    lines = ["<table>", _heading(heading, numbers)]
    for index, row in enumerate(rows):
        own = classes[index] if classes else ""
        cells = [
            f'<td class="{" ".join(filter(None, ["number" if column in numbers else "", own or _class_of(cell)]))}">{escape(cell)}</td>'
            for column, cell in enumerate(row)
        ]
        lines.append("<tr>" + "".join(cells).replace(' class=""', "") + "</tr>")
    return "\n".join([*lines, "</table>"])


def _heading(cells: Row, numbers: Sequence[int]) -> str:
    opening = ['<th class="number">' if column in numbers else "<th>" for column in range(len(cells))]
    return "<tr>" + "".join(f"{tag}{escape(cell)}</th>" for tag, cell in zip(opening, cells, strict=True)) + "</tr>"


def _class_of(cell: str) -> str:
    """Return the CSS class of an outcome; empty for other cells."""
    return {"kept": "kept", "rolled back": "trouble"}.get(cell, "")


def _remarks(remarks: Sequence[Remark]) -> str:
    if not remarks:
        return "<p>Nothing was decided.</p>"
    rows = [(str(item.first) if item.first == item.last else f"{item.first}–{item.last}", item.text) for item in remarks]
    return _table(("epoch", "what and why"), rows, numbers=(0,), classes=["trouble" if item.is_trouble else "" for item in remarks])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _rent(folder: Path) -> RentConfig:
    """Return the rent in the saved configuration of a run, or the default."""
    return load_saved(TrainingConfig, folder / CONFIG).rent if (folder / CONFIG).is_file() else RentConfig()
