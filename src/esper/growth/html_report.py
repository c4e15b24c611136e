"""`report.html`: the story of a run as one page that needs nothing else, a fold over the events in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from esper.config import load_saved
from esper.files import printable, write_file
from esper.growth import plots, summary
from esper.growth.config import Rent, TrainingConfig
from esper.growth.ledger import ANALYTICS_HEADING, LEDGER_HEADING, Row, analytics_rows, ledger_rows
from esper.growth.story import Remark, Story, read_story
from esper.run_folder import CONFIG, EVENTS, RunError
from esper.text_table import figure

REPORT = "report.html"
TWIN = "twin"  # folder in the run's own, with the same training without growth
CONFIGS = ("grow.toml", CONFIG)  # the first that is there says what was asked for

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
    """Writes the report of a run, finished or not, into its folder, in place of an older one. Gives its path."""
    folder = Path(run_folder)
    story = read_story(folder)
    if story.began is None:
        raise RunError(f"there is nothing to report about {folder}: the training has not begun")
    twin = read_story(folder / TWIN) if (folder / TWIN / EVENTS).is_file() else None
    config = next((text for name in CONFIGS if (text := _text(folder / name))), "")
    page = render(story, twin, title=printable(folder.name), config=config, rent=_rent(folder))
    path = folder / REPORT
    write_file(path, page.encode())
    return path


def render(story: Story, twin: Story | None, *, title: str, config: str, rent: Rent) -> str:
    """The page. Equal stories give equal pages."""
    sections = [f'<p class="summary">{escape(summary.headline(story, twin))}</p>', _circumstances(story)]
    heading, rows = summary.comparison(story, twin)
    if rows:
        sections.append(_section("Before, after, cost", _table(heading, rows, numbers=range(1, len(heading)))))
        sections += _notes([*summary.about_chance(twin), *summary.about_rent(story, rent)])
    if story.epochs:
        sections.append(_section("Loss", plots.loss_plot(story, twin)))
        if story.seeds:
            sections.append(_section("Lives of the seeds", plots.lives_plot(story)))
        sections.append(_section("Parameters", plots.parameters_plot(story)))
    if story.seeds:
        sections.append(_section("Ledger", _table(LEDGER_HEADING, ledger_rows(story.seeds), numbers=(0, 3, 5, 6, 7))))
        sections += _notes([summary.ABOUT_REMOVAL, *summary.about_skipped(story)])
        sections.append(_section("Blueprints", _table(ANALYTICS_HEADING, analytics_rows(story.seeds), numbers=range(1, 7))))
    if story.probes:
        sections.append(_section("What the probe saw", _table(summary.PROBE_HEADING, summary.probe_rows(story), numbers=(0, 3))))
        sections += _notes(["How fast the loss would fall at first with a candidate in the slot; the best few of every slot."])
    sections.append(_section("Decisions", _remarks(story.remarks)))
    if config:
        sections.append(_section("Configuration", f"<pre>{escape(config)}</pre>"))
    return _PAGE.format(title=escape(title), style=STYLE, body="\n".join(sections))


def _circumstances(story: Story) -> str:
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
    """`numbers` are columns that stand at the right, `classes` those of rows, for their colour."""
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
    return {"kept": "kept", "rolled back": "trouble"}.get(cell, "")


def _remarks(remarks: Sequence[Remark]) -> str:
    if not remarks:
        return "<p>Nothing was decided.</p>"
    rows = [(str(item.first) if item.first == item.last else f"{item.first}–{item.last}", item.text) for item in remarks]
    return _table(("epoch", "what and why"), rows, numbers=(0,), classes=["trouble" if item.is_trouble else "" for item in remarks])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _rent(folder: Path) -> Rent:
    return load_saved(TrainingConfig, folder / CONFIG).rent if (folder / CONFIG).is_file() else Rent()
