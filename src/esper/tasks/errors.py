"""The error of this package for mistakes that a user can correct."""

from __future__ import annotations


class TaskError(ValueError):
    """A task cannot be loaded or used as asked. The message says what is wrong and what to do."""
