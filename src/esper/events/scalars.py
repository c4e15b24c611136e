"""The numbers of an event, under the names that plotting tools show."""

from __future__ import annotations

import math
from collections.abc import Iterator

from esper.events.event import Event, Record


def scalars(event: Event) -> dict[str, float]:
    """Every finite number that an event shows, as `kind/field`, and as `kind/field/name` where the field is a dictionary.

    >>> class Measured(Event, tag="doctest_measured"):
    ...     step: int
    ...     loss: float
    ...     entropy: dict[str, float]
    >>> scalars(Measured(step=3, loss=0.5, entropy={"op": 0.25, "slot": math.nan}))
    {'doctest_measured/loss': 0.5, 'doctest_measured/entropy/op': 0.25}
    """
    return dict(_numbers(event.kind, event.shown()))


def scalars_of(record: Record) -> dict[str, float]:
    """The scalars of a record's event. Those of other ranks than 0 begin with `rank1/`, those of one environment or host with `env3/`."""
    place = f"rank{record.rank}/" if record.rank else ""
    place += "" if record.env is None else f"env{record.env}/"
    return {place + name: value for name, value in scalars(record.event).items()}


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield name, value
