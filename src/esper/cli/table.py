"""Tables of thousands of lines for the terminal: columns as wide as their widest cell, styled cells, one pass over the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

GAP = "  "


class LongTable:
    """Rows of texts below a dim heading. `rich.table.Table` takes milliseconds for a row, this one microseconds.

    `right` are the places of the columns that are aligned to the right, `styles` the style of a row or of one of its cells, by place.
    """

    def __init__(
        self,
        heading: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        right: Set[int] = frozenset(),
        styles: Mapping[tuple[int, int | None], str] = MappingProxyType({}),
    ) -> None:
        self.heading, self.rows, self.right, self.styles = heading, rows, right, styles

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [max(map(cell_len, column)) for column in zip(self.heading, *self.rows, strict=True)]
        parsed = {style: Style.parse(style) for style in {"dim", *self.styles.values()}}
        yield from self._line(self.heading, widths, {}, parsed["dim"])
        for number, row in enumerate(self.rows):
            of_row = self.styles.get((number, None))
            of_cells = {column: parsed[style] for column in range(len(row)) if (style := self.styles.get((number, column)))}
            yield from self._line(row, widths, of_cells, parsed[of_row] if of_row else None)

    def _line(self, row: Sequence[str], widths: Sequence[int], styles: dict[int, Style], of_row: Style | None) -> RenderResult:
        text = ""
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            padded = space + cell if column in self.right else cell + space
            if column in styles:
                yield Segment(text, of_row)
                yield Segment(padded, styles[column] if of_row is None else of_row + styles[column])
                text = GAP
            else:
                text += padded + GAP
        yield Segment(text.rstrip(), of_row)
        yield Segment.line()
