"""A table as lines of text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """The cells of a column below one another: to the left, or all but the first column to the right, where they are numbers.

    >>> print(aligned([("name", "count"), ("a", "10"), ("longer", "7")], numbers=True))
    name    count
    a          10
    longer      7
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) if numbers else cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()

    return "\n".join(map(line, rows))
