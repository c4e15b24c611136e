"""The error of a fleet: something that was asked for cannot be done, with what to do instead."""

from __future__ import annotations


class FleetError(ValueError):
    pass
