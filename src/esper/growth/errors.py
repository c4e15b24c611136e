"""Mistakes that a user can mend."""

from __future__ import annotations


class GrowthError(ValueError):
    """What was asked for cannot be done; the message says why and what to do. Nothing has been changed."""
