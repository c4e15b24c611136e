"""Text about runs that several commands print: ages, small curves, colours of states. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {"running": "bold cyan", "finished": "green", "stopped": "yellow", "dead": "bold red", "empty": "dim"}
TWIN_OF = "/twin"  # after the name of a run: its twin


def age(seconds: float) -> str:
    """Format the time since something happened.

    >>> age(5), age(200), age(4 * 3600), age(3 * 86400)
    ('5 s ago', '3 min ago', '4 h ago', '3 d ago')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def sparkline(values: Sequence[float], width: int, *, ends: tuple[float, float] | None = None) -> str:
    """Return a curve of block characters, at most `width` wide, from its lowest to its highest value or between `ends`.

    >>> sparkline([0.0, 1.0, 2.0, 7.0], 4), sparkline([0.0, 1.0], 4, ends=(0.0, 7.0))
    ('▁▂▃█', '▁▂')
    """
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    chosen = [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]
    low, high = ends or (min(chosen), max(chosen))
    return "".join(BLOCKS[round((value - low) / ((high - low) or 1.0) * (len(BLOCKS) - 1))] for value in chosen)
