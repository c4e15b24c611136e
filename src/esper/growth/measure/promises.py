"""What a probe estimates: how fast the loss would fall by every candidate."""

from __future__ import annotations

import math

Key = tuple[str, str]  # slot, blueprint
Promises = dict[Key, float]  # estimated fall of the loss per step


def capped(promises: Promises, *, loss: float | None, steps: int) -> Promises:
    """Reduce estimates so that the fall over `steps` steps never exceeds `loss`. The order of the candidates stays the same.

    The model is an exponential decay: the fall per step is proportional to the loss that is left. `loss` is how far the loss can fall; if
    it is unknown (None), the estimates stay as they are.
    """
    if loss is None or not 0 < loss < math.inf or steps < 1:
        return promises
    return {key: -math.expm1(-promise * steps / loss) * loss / steps for key, promise in promises.items()}
