"""The numbers of an event, under the names that plotting tools show."""

from __future__ import annotations

import math
from collections.abc import Iterator

from esper.events.event import Event

WHERE = ("step", "env")  # fields that say where an event belongs, and are nothing to plot


def scalars(event: Event) -> dict[str, float]:
    """Every finite number of an event, as `kind/field`, and as `kind/field/name` where the field is a dictionary.

    >>> class Measured(Event, tag="doctest_measured"):
    ...     step: int
    ...     loss: float
    ...     entropy: dict[str, float]
    >>> scalars(Measured(step=3, loss=0.5, entropy={"op": 0.25, "slot": math.nan}))
    {'doctest_measured/loss': 0.5, 'doctest_measured/entropy/op': 0.25}
    """
    fields = {field: getattr(event, field) for field in event.__struct_fields__ if field not in WHERE}
    return dict(_numbers(event.kind, fields))


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield name, value
