"""Format numbers, durations, tables and hints as text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


def figure(value: float, decimals: int = 4, *, sign: str = "") -> str:
    """Format a number with `decimals` decimals, or with two significant digits if it is too small for them. `sign="+"` writes a plus.

    >>> figure(0.0731), figure(-0.0731, 3, sign="+"), figure(0.0000264), figure(0.0)
    ('0.0731', '-0.073', '2.6e-05', '0.0000')
    """
    is_small = 0 < abs(value) < 10.0 ** (1 - decimals)
    return f"{value:{sign}.2g}" if is_small else f"{value:{sign}.{decimals}f}"


def aligned(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Return rows as lines with aligned columns. With `numbers`, all columns but the first are right-aligned.

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


def duration(seconds: float) -> str:
    """Format seconds as "59 s", "1:15" or "1:02:05"; "?" if they are not known.

    >>> duration(59.4), duration(75), duration(3725), duration(float("nan"))
    ('59 s', '1:15', '1:02:05', '?')
    """
    if seconds != seconds or seconds == float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def without_numbers(text: str) -> str:
    """Replace numbers in a text, so that equal reasons with different numbers can be counted together.

    >>> without_numbers("removing it would raise the loss by 0.25 [-4.9e-05, 1,200], after conv1.2")
    'removing it would raise the loss by … […, …], after conv1.2'
    """
    return re.sub(r"(?<![\w.])[-+]?(?:\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|inf|nan)(?!\w)", "…", text)


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "", before: str = "", cutoff: float = 0.6) -> str:
    """Return a question that suggests the known name nearest to a wrong one, or `otherwise` if none is near. `before` precedes the name.

    >>> did_you_mean("heuristc", ["never", "heuristic"]), did_you_mean("x", ["never"], otherwise="there is never")
    ("did you mean 'heuristic'?", 'there is never')
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {before + near[0]!r}?" if near else otherwise
