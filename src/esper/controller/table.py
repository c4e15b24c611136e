"""Tables of features: one row per observed number, with its unit, its range and its scaling to about [-1, 1].

Widths, columns and the scaling of whole arrays are derived from the table. An unknown value is NaN before scaling and 0 after it.

Shapes: F = features of the table, the last dimension of an observation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
View = TypeVar("View")


class Scale(Enum):
    """Scaling of a number between `low` and `high`; numbers outside are clipped. The texts are part of the layout version."""

    AS_IS = "as it is"
    LOG = "its logarithm, from -1 at low to 1 at high"
    SIGNED_LOG = "proportional up to about ±low, its logarithm beyond, ±1 at ±high"


@dataclass(frozen=True, slots=True)
class Feature(Generic[View]):
    """One observed number, computed from a view of type `View`."""

    name: str
    unit: str
    scale: Scale
    low: float
    high: float
    value: Callable[[View], float | None]  # in its unit; None: unknown


def flag(name: str, value: Callable[[View], bool]) -> Feature[View]:
    """Return a feature that is 0 or 1."""
    return Feature(name, "1 if so", Scale.AS_IS, 0.0, 1.0, value)


def share(name: str, unit: str, value: Callable[[View], float | None]) -> Feature[View]:
    """Return a feature between 0 and 1, which is not scaled."""
    return Feature(name, unit, Scale.AS_IS, 0.0, 1.0, value)


def log(name: str, unit: str, low: float, high: float, value: Callable[[View], float | None]) -> Feature[View]:
    """Return a positive feature, scaled by its logarithm."""
    return Feature(name, unit, Scale.LOG, low, high, value)


def signed_log(name: str, unit: str, low: float, high: float, value: Callable[[View], float | None]) -> Feature[View]:
    """Return a feature of any sign, scaled linearly near 0 and by its logarithm beyond `low`."""
    return Feature(name, unit, Scale.SIGNED_LOG, low, high, value)


@dataclass(frozen=True)
class FeatureTable(Generic[View]):
    """The features of one kind of object: a host, a slot or a candidate."""

    features: Sequence[Feature[View]]

    def __post_init__(self) -> None:
        assert len({feature.name for feature in self.features}) == len(self.features), "two features have the same name"

    @property
    def width(self) -> int:
        return len(self.features)

    def column(self, name: str) -> int:
        """Return the index of the feature of this name."""
        return next(column for column, feature in enumerate(self.features) if feature.name == name)

    def nothing(self, *shape: int) -> Floats:
        """Return an array [*shape, F] of unknown values."""
        return np.full((*shape, self.width), np.nan)

    def values(self, view: View) -> list[float | None]:
        """Return the values [F] in their units. Unknown ones are None, which becomes NaN in an array of floats."""
        return [feature.value(view) for feature in self.features]

    @cached_property
    def _ranges(self) -> tuple[Floats, Floats]:
        return np.array([feature.low for feature in self.features]), np.array([feature.high for feature in self.features])

    def _columns(self, scale: Scale) -> list[int]:
        return [column for column, feature in enumerate(self.features) if feature.scale is scale]

    def scaled(self, values: Floats) -> NDArray[np.float32]:
        """Scale values [..., F] from their units to about [-1, 1]; unknown ones to 0."""
        lows, highs = self._ranges
        result = np.empty(values.shape, dtype=np.float32)
        for scale in Scale:
            columns = self._columns(scale)
            low, high, some = lows[columns], highs[columns], values[..., columns]
            if scale is Scale.AS_IS:
                result[..., columns] = np.clip(some, low, high)
            elif scale is Scale.LOG:
                result[..., columns] = 2 * np.log(np.clip(some, low, high) / low) / np.log(high / low) - 1
            else:
                result[..., columns] = np.arcsinh(np.clip(some, -high, high) / low) / np.arcsinh(high / low)
        result[np.isnan(result)] = 0.0
        return result

    def description(self) -> str:
        """Return one line per feature with name, unit, range and scaling. The layout version is a hash of it."""
        return "\n".join(
            f"{feature.name}: {feature.unit}, {feature.low:g} to {feature.high:g}, {feature.scale.value}" for feature in self.features
        )
