"""Building blocks of reports: self-contained HTML pages with charts as SVG. Imports no torch, and pages load nothing from elsewhere.

    page = render("first", [section("Loss", chart([Line("validation", epochs, losses)], x="epochs"))])

Colours are CSS variables of the page, so that charts suit light and dark themes. A chart keeps its numbers in an attribute; a short script
shows those under the pointer, and the arrow keys move along a chart that has the focus. Without scripts the page is complete but for that.
Equal input gives equal text. All names are escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from esper.runs.stages import stage_variables
from esper.text_table import compact

Row = Sequence[str]

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #22262b; --soft: #5d6570; --grid: #dfe3e8; --panel: #f5f7f9; --train: #9aa5b1; --validation: #1f6feb;
  --twin: #b08800; LIGHT --trouble: #cf222e; --a: #1f6feb; --b: #d55e00; --c: #1a7f37; --d: #8250df; --e: #b08800; --f: #57606a; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171c; --ink: #dde3ea; --soft: #98a2ae; --grid: #2c333b; --panel: #1c2128; --train: #768390; --validation: #58a6ff;
  --twin: #d4a72c; DARK --trouble: #ff7b72; --a: #58a6ff; --b: #f0883e; --c: #3fb950; --d: #bc8cff; --e: #d4a72c; --f: #8b949e; } }
* { box-sizing: border-box; }
body { background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 0.9rem auto; max-width: 68rem;
  padding: 0 1.2rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 0.2rem; } h2 { font-size: 1.1rem; margin: 1rem 0 0.3rem; }
p.summary { font-size: 1.05rem; margin: 0; } p.note, caption { color: var(--soft); font-size: 0.9rem; margin: 0.4rem 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 0.7rem; margin: 0.7rem 0; }
.tile { background: var(--panel); border-radius: 8px; flex: 1 1 8.5rem; padding: 0.6rem 0.9rem; }
.tile strong { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; line-height: 1.4; white-space: nowrap; }
.tile span { color: var(--soft); font-size: 0.85rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--grid); padding: 0.18rem 0.9rem 0.18rem 0; text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; } .number { text-align: right; white-space: nowrap; }
td.kept, td.good { color: var(--fossilized); } td.trouble { color: var(--trouble); } td.fair { color: var(--pruned); }
svg { display: block; height: auto; max-width: 54rem; width: 100%; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg text.soft { fill: var(--soft); }
.legend { display: flex; flex-wrap: wrap; font-size: 0.85rem; gap: 0.1rem 1.1rem; }
.legend span::before { background: var(--of); content: ""; display: inline-block; height: 0.2rem; margin-right: 0.4rem;
  vertical-align: middle; width: 1.1rem; }
.legend span.mark::before { border-radius: 50%; height: 0.55rem; width: 0.55rem; }
.legend span.dashed::before { background: repeating-linear-gradient(90deg, var(--of) 0 0.3rem, transparent 0.3rem 0.5rem); }
figure { margin: 0 0 0.8rem; position: relative; } figure:focus-visible { outline: 2px solid var(--validation); outline-offset: 4px; }
figcaption { font-size: 0.9rem; font-weight: 600; }
details.fold { border-top: 1px solid var(--grid); margin-top: 0.3rem; padding-top: 0.3rem; }
details.fold > summary { font-weight: 600; } details.fold[open] > summary { margin-bottom: 0.5rem; }
ol.network, ol.lives { list-style: none; margin: 0; padding: 0; } ol.lives { margin: 0.3rem 0 0.6rem; }
.track { background: var(--panel); border-radius: 3px; flex: 1; height: 0.8rem; position: relative; }
.track i { border-radius: 2px; height: 100%; position: absolute; } .track i.thin { height: 2px; top: calc(50% - 1px); }
ol.lives li { align-items: center; display: flex; gap: 0.8rem; padding: 0.1rem 0; } ol.lives span { flex: 0 0 22rem; }
.axis { flex: 1; height: 1.2rem; position: relative; } .axis small { position: absolute; }
ol.network li { align-items: baseline; border-left: 2px solid var(--soft); display: flex; flex-wrap: wrap; gap: 0 0.7rem;
  margin-left: 0.5rem; padding: 0.12rem 0 0.12rem 1.1rem; position: relative; }
ol.network li::before { background: var(--of, var(--paper)); border: 2px solid var(--of, var(--soft)); border-radius: 50%; content: "";
  height: 0.8rem; left: -0.45rem; position: absolute; top: 0.4rem; width: 0.8rem; box-sizing: border-box; }
ol.network li.end::before { background: var(--soft); } ol.network li.empty, ol.network li.end { color: var(--soft); }
ol.network .track { align-self: center; flex: 1 0 100%; height: 0.6rem; } ol.network .cost { margin-left: auto; }
.grid { display: grid; gap: 0 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.hover { background: var(--panel); border: 1px solid var(--grid); border-radius: 6px; font-size: 0.8rem; padding: 0.3rem 0.6rem;
  pointer-events: none; position: absolute; top: 0; white-space: pre; }
.hosts { display: grid; gap: 0.6rem; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
.hosts details { background: var(--panel); border-radius: 8px; padding: 0.4rem 0.6rem; } .hosts details[open] { grid-column: 1 / -1; }
.hosts svg { max-width: 14rem; } summary { cursor: pointer; } .hosts summary { list-style: none; } small { color: var(--soft); }
b.good { color: var(--fossilized); } b.trouble { color: var(--trouble); }
pre { background: var(--panel); border-radius: 8px; font-size: 0.85rem; overflow-x: auto; padding: 0.8rem; }
@media (max-width: 560px) { svg text { font-size: 19px; } svg.small text { font-size: 13px; }
  body { margin-top: 1rem; padding: 0 0.8rem; } table { font-size: 0.82rem; } td, th { padding-right: 0.45rem; }
  .optional { display: none; }
  td:last-child:not(.number) { min-width: 14rem; }
  ol.lives li { align-items: stretch; flex-direction: column; gap: 0; } ol.lives span { flex: none; } .track { flex: none; } }
@media print { .hover { display: none; } section { break-inside: avoid; } }
""".replace("LIGHT", stage_variables("light")).replace("DARK", stage_variables("dark"))

# Shows the numbers of a chart under the pointer. All texts are set as text, never as HTML.
SCRIPT = """
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const data = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg"), rule = svg.querySelector(".rule");
  const box = document.createElement("div"); box.className = "hover"; box.hidden = true; figure.append(box);
  const xs = [...new Set(data.lines.flatMap(line => line.x))].sort((a, b) => a - b);
  const at = x => data.left + (x - data.low) / (data.high - data.low || 1) * (data.right - data.left);
  const number = y => data.percent ? (100 * y).toFixed(2) + " %" : Math.abs(y) >= 1e5 || (y && Math.abs(y) < 1e-3)
    ? y.toPrecision(3) : String(+y.toPrecision(5));
  let place = -1;
  const show = index => {
    place = Math.max(0, Math.min(xs.length - 1, index));
    const x = xs[place], lines = [data.xName + " " + x.toLocaleString("en")];
    for (const line of data.lines) { const i = line.x.lastIndexOf(x); if (i >= 0) lines.push(line.name + "  " + number(line.y[i])); }
    for (const mark of data.marks) if (mark.x === x) lines.push(mark.name);
    box.textContent = lines.join("\\n"); box.hidden = false;
    rule.setAttribute("x1", at(x)); rule.setAttribute("x2", at(x)); rule.style.display = "inline";
    const area = svg.getBoundingClientRect(), left = at(x) / data.width * area.width;
    box.style.top = area.top - figure.getBoundingClientRect().top + 8 + "px";
    box.style.left = (left > area.width / 2 ? Math.max(0, left - box.offsetWidth - 10) : left + 10) + "px";
  };
  const hide = () => { box.hidden = true; rule.style.display = "none"; };
  svg.addEventListener("pointermove", event => {
    if (!xs.length) return;
    const area = svg.getBoundingClientRect(), x = (event.clientX - area.left) / area.width * data.width;
    let best = 0; xs.forEach((value, i) => { if (Math.abs(at(value) - x) < Math.abs(at(xs[best]) - x)) best = i; });
    show(best);
  });
  svg.addEventListener("pointerleave", hide); figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (step) { show(place + step); event.preventDefault(); } else if (event.key === "Escape") hide();
  });
}
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
<script>{script}</script>
</body>
</html>
"""


def render(title: str, parts: Iterable[str]) -> str:
    """Return a page. The title is escaped; the parts are HTML already."""
    return _PAGE.format(title=escape(title), style=STYLE, body="\n".join(filter(None, parts)), script=SCRIPT)


def section(name: str, *contents: str) -> str:
    return f'<section>\n<h2>{escape(name)}</h2>\n<div class="wide">{"".join(contents)}</div>\n</section>'


def folded(name: str, *contents: str) -> str:
    """Return a section that opens under the pointer; nothing if it has no contents."""
    inside = "".join(contents)
    return f'<details class="fold"><summary>{escape(name)}</summary><div class="wide">{inside}</div></details>' if inside else ""


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Return figures in large type, each with a name below; the most important one first."""
    return '<div class="tiles">' + "".join(f'<div class="tile"><strong>{escape(value)}</strong><span>{escape(name)}</span></div>'
                                           for value, name in figures) + "</div>"  # fmt: skip


def table(
    heading: Row, rows: Sequence[Row], *, numbers: Sequence[int] = (), classes: Sequence[str] = (), optional: Sequence[int] = ()
) -> str:
    """Return an HTML table. Columns in `numbers` are right-aligned, those in `optional` are left out on a narrow screen.

    `classes` are CSS classes of the rows.
    """
    looks = [" ".join(["number"] * (column in numbers) + ["optional"] * (column in optional)) for column in range(len(heading))]
    opening = [f'<th class="{look}">'.replace(' class=""', "") for look in looks]
    lines = ["<table>", "<tr>" + "".join(f"{tag}{escape(cell)}</th>" for tag, cell in zip(opening, heading, strict=True)) + "</tr>"]
    for index, row in enumerate(rows):
        own = classes[index] if classes else ""
        cells = [
            f'<td class="{" ".join(filter(None, [looks[column], own or _class_of(cell)]))}">{escape(cell)}</td>'
            for column, cell in enumerate(row)
        ]
        lines.append("<tr>" + "".join(cells).replace(' class=""', "") + "</tr>")
    return "\n".join([*lines, "</table>"])


def _class_of(cell: str) -> str:
    """Return the CSS class of an outcome; empty for other cells."""
    return {"kept": "kept", "rolled back": "trouble"}.get(cell, "")


# Charts

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 66, 14, 26, 44  # of a chart, in units of its drawing
COLOURS = ("a", "b", "c", "d", "e", "f")  # CSS variables for lines without a meaning of their own


@dataclass(frozen=True, slots=True)
class Line:
    """A curve. Values that are not finite are gaps. `low` and `high` are the ends of intervals, drawn as a band."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = ""  # name of a CSS variable; "": the next of COLOURS
    is_dashed: bool = False
    is_step: bool = False
    is_dots: bool = False  # points without a curve, where several may have the same x
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at `x`. `group` is its name in the legend."""

    x: float
    name: str
    group: str
    colour: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to places. Logarithmic scales have only positive values."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        share = ((math.log(value) if self.is_log else value) - low) / ((high - low) or 1.0)
        return round(self.start + share * (self.end - self.start), 1)


def chart(
    lines: Sequence[Line],
    *,
    x: str,
    y: str = "",
    marks: Sequence[Mark] = (),
    x_max: float | None = None,
    is_percent: bool = False,
    from_zero: bool = False,
    may_be_log: bool = True,
    width: int = WIDTH,
    height: int = 270,
) -> str:
    """Draw curves over a common axis named `x`; `y` is the title. An axis is logarithmic if values differ by more than a factor of 5."""
    lines = [replace(line, is_dashed=True) if index >= len(COLOURS) else line for index, line in enumerate(lines)]
    named = [(line, line.colour or COLOURS[index % len(COLOURS)]) for index, line in enumerate(lines)]
    values = sorted(value for line in lines for value in (*line.y, *line.low, *line.high) if math.isfinite(value))
    places = [value for line in lines for value in line.x] + [mark.x for mark in marks]
    if not values or not places:
        return note(f"{y or 'The chart'}: there are no numbers yet.")
    is_log = may_be_log and not is_percent and not from_zero and values[0] > 0 and values[-1] > 5 * values[0]
    across = Scale(min(places), max([*places, *([] if x_max is None else [x_max])]), LEFT, width - RIGHT)
    low, high = _bounds(values, is_log=is_log, from_zero=from_zero, is_percent=is_percent)
    up = Scale(low, high, height - BOTTOM, TOP, is_log)
    parts = [*_grid(across, up, height, x=x, is_percent=is_percent), *_marks(marks, across, height)]
    parts += [_band(line, colour, across, up) for line, colour in named if line.low]
    parts += [_curve(line, colour, across, up) for line, colour in named]
    parts.append(f'<line class="rule" y1="{TOP}" y2="{height - BOTTOM}" stroke="var(--soft)" stroke-width="1" style="display:none"/>')
    data = {
        "left": LEFT, "right": width - RIGHT, "width": width, "low": across.low, "high": across.high, "percent": is_percent, "xName": x,
        "lines": [{"name": line.name, **_finite(line)} for line in lines], "marks": [{"x": mark.x, "name": mark.name} for mark in marks],
    }  # fmt: skip
    caption = f"<figcaption>{escape(y)}</figcaption>" if y else ""
    small = "" if width == WIDTH else ' class="small"'
    drawing = f'<svg{small} viewBox="0 0 {width} {height}" role="img" aria-label="{escape(y or x)}">{"".join(parts)}</svg>'
    return f'<figure tabindex="0" data-chart="{escape(json.dumps(data))}">{caption}{_legend(named, marks)}{drawing}</figure>'


def _finite(line: Line) -> dict[str, list[float]]:
    pairs = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    return {"x": [x for x, _ in pairs], "y": [float(f"{y:.6g}") for _, y in pairs]}


def _legend(lines: Sequence[tuple[Line, str]], marks: Sequence[Mark]) -> str:
    groups = dict.fromkeys((mark.group, mark.colour) for mark in marks)
    entries = [
        f'<span{" class=dashed" if line.is_dashed else ""} style="--of:var(--{colour})">{escape(line.name)}</span>'
        for line, colour in lines
    ]
    entries += [f'<span class="mark" style="--of:var(--{colour})">{escape(group)}</span>' for group, colour in groups]
    return f'<div class="legend">{"".join(entries)}</div>' if len(entries) > 1 else ""


def _bounds(values: Sequence[float], *, is_log: bool, from_zero: bool, is_percent: bool) -> tuple[float, float]:
    """Return the ends of the vertical axis, with some room around the sorted values."""
    low, high = values[0], values[-1]
    if is_log:
        return low / 1.05, high * 1.05
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = (0.0 if from_zero else low - room), high + room
    return (max(low, 0.0), min(high, 1.0) if values[-1] <= 1 else high) if is_percent and values[0] >= 0 else (low, high)


def _grid(across: Scale, up: Scale, height: int, *, x: str, is_percent: bool) -> list[str]:
    """Return the lines and numbers of both axes, and the name of the horizontal one."""
    parts = []
    for value in log_ticks(up.low, up.high) if up.is_log else ticks(up.low, up.high, 5):
        at = up(value)
        text = f"{100 * value:g}%" if is_percent else compact(value)
        parts.append(f'<line x1="{LEFT}" x2="{across.end}" y1="{at}" y2="{at}" stroke="var(--grid)" stroke-width="1"/>')
        parts.append(f'<text class="soft" x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{escape(text)}</text>')
    parts += [
        f'<text class="soft" x="{across(value)}" y="{height - BOTTOM + 20}" text-anchor="middle">{escape(compact(value))}</text>'
        for value in ticks(across.low, across.high, 5)
    ]
    parts.append(f'<text class="soft" x="{across.end}" y="{height - 6}" text-anchor="end">{escape(x)}</text>')
    return parts


def _marks(marks: Sequence[Mark], across: Scale, height: int) -> list[str]:
    """Return a dotted line and a dot for every mark; dots of different groups have different heights."""
    levels = {group: level for level, group in enumerate(dict.fromkeys(mark.group for mark in marks))}
    parts = []
    for mark in marks:
        at = across(mark.x)
        colour = f"var(--{mark.colour})"
        parts.append(
            f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{height - BOTTOM}" stroke="{colour}" stroke-width="1" stroke-dasharray="2 4"/>'
        )
        dot = f'<circle cx="{at}" cy="{6 + 6 * levels[mark.group]}" r="4" fill="{colour}"><title>{escape(mark.name)}</title></circle>'
        parts.append(dot)
    return parts


def _pieces(line: Line, y: Sequence[float], across: Scale, up: Scale) -> list[list[tuple[float, float]]]:
    """Return the points of a curve, as pieces without gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, value in zip(line.x, y, strict=True):
        if math.isfinite(value):
            pieces[-1].append((across(x), up(value)))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _curve(line: Line, colour: str, across: Scale, up: Scale) -> str:
    style = f'fill="none" stroke="var(--{colour})" stroke-width="2" stroke-linejoin="round"'
    style += ' stroke-dasharray="6 4"' if line.is_dashed else ""
    parts = []
    for piece in _pieces(line, line.y, across, up):
        if len(piece) == 1 or line.is_dots:
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="var(--{colour})"/>' for x, y in piece]
            continue
        if line.is_step:
            piece = [piece[0], *(point for (_, y), after in pairwise(piece) for point in ((after[0], y), after))]
        parts.append(f'<polyline points="{" ".join(f"{x},{y}" for x, y in piece)}" {style}/>')
    return "".join(parts)


def _band(line: Line, colour: str, across: Scale, up: Scale) -> str:
    """Return the intervals of a curve: a band, or an upright line for a point that has no neighbours with an interval."""
    pieces: list[list[tuple[float, float, float]]] = [[]]
    for x, low, high in zip(line.x, line.low, line.high, strict=True):
        if math.isfinite(high - low):
            pieces[-1].append((across(x), up(low), up(high)))
        elif pieces[-1]:
            pieces.append([])
    parts = []
    for piece in filter(None, pieces):
        if len(piece) == 1:
            x, low, high = piece[0]
            parts.append(f'<line x1="{x}" x2="{x}" y1="{low}" y2="{high}" stroke="var(--{colour})" stroke-width="6" opacity="0.3"/>')
            continue
        outline = [*((x, high) for x, _, high in piece), *((x, low) for x, low, _ in reversed(piece))]
        parts.append(f'<polygon points="{" ".join(f"{x},{y}" for x, y in outline)}" fill="var(--{colour})" opacity="0.15"/>')
    return "".join(parts)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers between two values, about `count` of them.

    >>> ticks(0.0, 1.0, 5), ticks(3, 17, 5)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [5.0, 10.0, 15.0])
    """
    span = high - low
    if not span > 0:
        return [low]
    raw = span / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.999)
    return [float(f"{index * step:.10g}") for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two values; only the powers where there would be more than seven.

    >>> log_ticks(0.15, 3.0)
    [0.2, 0.5, 1.0, 2.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5) if low <= float(f"{factor}e{power}") <= high]
    return found if len(found) <= 7 else [value for value in found if f"{value:e}".startswith("1.0")]
