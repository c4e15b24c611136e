"""Stop a run by Ctrl-C or SIGTERM: the first signal asks it to stop after the current step, the second stops it at once."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

INTERRUPTED, TERMINATED = 130, 143  # exit codes: 128 + the signal's number


class StoppedAtOnce(KeyboardInterrupt):
    """Raised when the second signal arrives, at whatever line the program is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = _exit_code(number)


class StopSignals:
    """A context in which the first Ctrl-C or SIGTERM makes `was_asked()` true, and the second raises StoppedAtOnce."""

    def __init__(self, unit: str = "step") -> None:
        self._unit = unit  # the unit of work that is finished first, for the message
        self._received: int | None = None
        self._before: dict[int, Any] = {}  # signal -> handler outside of this context

    def was_asked(self) -> bool:
        return self._received is not None

    @property
    def exit_code(self) -> int:
        return _exit_code(self._received)

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            raise StoppedAtOnce(number)
        self._received = number
        print(f"stopping after this {self._unit}; once more to stop at once", file=sys.stderr, flush=True)


def _exit_code(number: int | None) -> int:
    return TERMINATED if number == signal.SIGTERM else INTERRUPTED
