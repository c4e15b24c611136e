"""The one error of this package for what a user can put right."""

from __future__ import annotations


class TaskError(ValueError):
    """A task that cannot be loaded or used as asked; the message says what is wrong and what to do."""
