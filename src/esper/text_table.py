"""Format numbers, durations, tables and hints as text."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence

NONE = "–"  # in the place of a number that is not known


def figure(value: float | None, decimals: int = 4, *, sign: str = "") -> str:
    """Format a number of any size; a dash if it is None. `sign="+"` writes a plus.

    Whole numbers have all their digits. Others have `decimals` decimals, fewer from 10 on, none from 1,000 on, and two significant digits
    if they are too small for that. `figure` in dashboard/watch/figures.js writes the same.

    >>> figure(0.0731), figure(-0.0731, 3, sign="+"), figure(0.0000264), figure(24_058), figure(1.0), figure(None)
    ('0.0731', '-0.073', '2.6e-05', '24,058', '1', '–')
    >>> figure(9.87654), figure(12.34567), figure(404.8478), figure(1934.2)
    ('9.8765', '12.346', '404.85', '1,934')
    """
    if value is None:
        return NONE
    size = abs(value)
    if not math.isfinite(size):
        return f"{value:{sign}}"
    if size >= 1000 or size == int(size):
        return f"{value:{sign},.0f}"
    if size < 10.0 ** (1 - decimals):
        return f"{value:{sign}.2g}"
    return f"{value:{sign}.{max(decimals + 1 - len(str(int(size))), 0)}f}"


def with_interval(value: float | None, low: float | None, high: float | None, *, sign: str = "", is_short: bool = False) -> str:
    """Format a number with the ends of its interval, if it has one; with `is_short`, as ± half its width.

    >>> with_interval(0.1, 0.05, 0.15), with_interval(0.1, 0.05, 0.15, is_short=True), with_interval(0.1, None, None)
    ('0.1000 [0.0500, 0.1500]', '0.1000 ±0.0500', '0.1000')
    """
    if value is None or low is None or high is None:
        return figure(value, sign=sign)
    if not math.isfinite(high - low):
        return f"{figure(value, sign=sign)}, interval unknown"
    ends = f"±{figure((high - low) / 2)}" if is_short else f"[{figure(low, sign=sign)}, {figure(high, sign=sign)}]"
    return f"{figure(value, sign=sign)} {ends}"


def points(difference: float, low: float | None = None, high: float | None = None) -> str:
    """Format a difference of shares, such as accuracies, in percentage points.

    >>> points(0.0075), points(0.0075, -0.0072, 0.0222)
    ('+0.75 points', '+0.75 ±1.47 points')
    """
    reach = "" if low is None or high is None else f" ±{50 * (high - low):.2f}"
    return f"{100 * difference:+.2f}{reach} points"


def compact(value: float) -> str:
    """Format a number for an axis or a narrow column.

    >>> compact(1_500_000), compact(20_000), compact(1192), compact(0.05), compact(0)
    ('1.5M', '20k', '1192', '0.05', '0')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def added(more: float, before: float) -> str:
    """Format how much is added to a size, as a share, or as a factor if the size is more than doubled.

    >>> added(83, 1000), added(22_356, 1_702), added(-5, 100)
    ('+8.3%', '14.1×', '-5.0%')
    """
    share = more / max(before, 1)
    return f"{share:+.1%}" if share <= 1 else f"{1 + share:.1f}×"


def counted(number: int, what: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "seed"), counted(1_289, "seed")
    ('1 seed', '1,289 seeds')
    """
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def shortened(name: str, most: int) -> str:
    """Cut a long name at its beginning; the end tells it from others.

    >>> shortened("encoder.layers.11.attention", 14), shortened("blocks.0", 14)
    ('…11.attention', 'blocks.0')
    """
    if len(name) <= most:
        return name
    end = name[len(name) - most + 1 :]
    return f"…{end[end.find('.') + 1 :] if '.' in end[:-1] else end}"


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
