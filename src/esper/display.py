"""Short views of results for notebooks and terminals. Imports no torch.

A class with a method `card` gets `_repr_html_`, which Jupyter shows, and `__rich__`, which `rich.print` shows. The HTML has no background
and no colours of its own but translucent lines, so it suits light and dark pages. All texts are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_ROWS = 12  # of a table; the rest is counted
_WIDTH, _HEIGHT = 240, 36  # of the curve, in pixels


@dataclass(frozen=True, slots=True)
class Card:
    """A title, figures by name, and optionally a table and a curve."""

    title: str
    figures: Sequence[tuple[str, str]] = ()
    heading: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)
    curve: Sequence[float] = ()
    curve_name: str = ""


class Displayed:
    """Base of results that notebooks show."""

    __slots__ = ()

    def card(self) -> Card:
        """Return what is shown."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return card_html(self.card())

    def __rich__(self) -> RenderableType:
        return card_for_terminal(self.card())


def card_html(card: Card) -> str:
    """Return a card as HTML."""
    line = "border-bottom:1px solid rgba(128,128,128,.35);padding:2px 14px 2px 0;text-align:left;vertical-align:top;background:none"
    parts = [f"<strong>{escape(card.title)}</strong>"]
    if card.figures:
        parts.append(_html_table([], [(name, value) for name, value in card.figures], line))
    if any(map(math.isfinite, card.curve)):
        parts.append(f'<div style="opacity:.75">{escape(card.curve_name)}</div>{_curve(card.curve)}')
    if card.rows:
        parts.append(_html_table(card.heading, card.rows[:MAX_ROWS], line))
        if len(card.rows) > MAX_ROWS:
            parts.append(f'<div style="opacity:.75">and {len(card.rows) - MAX_ROWS:,} more</div>')
    return f'<div class="esper-card" style="color:inherit;overflow-x:auto">{"".join(parts)}</div>'


def _html_table(heading: Sequence[str], rows: Sequence[Sequence[str]], style: str) -> str:
    head = "<tr>" + "".join(f'<th style="{style};opacity:.75">{escape(cell)}</th>' for cell in heading) + "</tr>" if heading else ""
    body = "".join("<tr>" + "".join(f'<td style="{style}">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows)
    return f'<table style="border-collapse:collapse;margin:6px 0;color:inherit">{head}{body}</table>'


def _curve(values: Sequence[float]) -> str:
    """Return a small curve as SVG; values that are not finite are left out."""
    finite = [(place, value) for place, value in enumerate(values) if math.isfinite(value)]
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    x, y = _WIDTH / max(len(values) - 1, 1), (_HEIGHT - 4) / ((high - low) or 1.0)
    points = " ".join(f"{place * x:.1f},{_HEIGHT - 2 - (value - low) * y:.1f}" for place, value in finite)
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{line}</svg>'


def card_for_terminal(card: Card) -> RenderableType:
    """Return a card for a console of rich."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    figures = Table.grid(padding=(0, 2, 0, 0))
    for name, value in card.figures:
        figures.add_row(Text(name, style="dim"), Text(value))
    parts: list[Any] = [Text(card.title, style="bold"), figures]
    if card.rows:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for name in card.heading:
            table.add_column(name, overflow="fold")
        for row in card.rows[:MAX_ROWS]:
            table.add_row(*map(Text, row))
        parts += [Text(), table]
        if len(card.rows) > MAX_ROWS:
            parts.append(Text(f"and {len(card.rows) - MAX_ROWS:,} more", style="dim"))
    return Group(*parts)
