"""Time on a device that works on its own: what is measured has happened."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

Timed = tuple[str, type, str]  # a part, and the class and method that it is made of


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Parts:
    """Seconds by part: while a method of a part runs, time is that part's alone, unless it calls into another one.

    It waits for the device whenever the part changes, so what is measured so is slower than what is not.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device, self._stack, self._mark = device, ["else"], 0.0

    @contextmanager
    def watching(self, timed: Iterable[Timed]) -> Iterator[None]:
        with ExitStack() as stack:
            for part, owner, name in timed:
                stack.enter_context(patch.object(owner, name, self._timed(part, getattr(owner, name))))
            self._mark = now(self._device)
            yield
            self._turn()

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._stack.append(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._turn()
                self._stack.pop()

        return timed

    def _turn(self) -> None:
        """What has passed since the last turn belongs to who was at work."""
        time_now = now(self._device)
        self.seconds[self._stack[-1]] += time_now - self._mark
        self._mark = time_now
