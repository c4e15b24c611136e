"""torch.compile that never stops a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Compiled:
    """A function run through torch.compile. Should that fail, `on_failure` hears of it and the function runs plainly from then on.

    An error of the function's own comes up when it runs plainly, so nothing is hidden.
    """

    def __init__(self, function: Callable[..., Any], on_failure: Callable[[Exception], None], *, backend: Any = "inductor") -> None:
        self.function, self.on_failure = function, on_failure
        self.compiled: Callable[..., Any] | None = torch.compile(function, backend=backend)

    def __call__(self, *arguments: Any) -> Any:
        if self.compiled is not None:
            try:
                return self.compiled(*arguments)
            except Exception as error:
                self.compiled = None
                self.on_failure(error)
        return self.function(*arguments)
