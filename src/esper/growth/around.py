"""Standing around a module's forward: how slots, recordings and replays get between a module and those who call it.

`forward` is set on the instance, where `module(...)` finds it. Torch's forward hooks would do for a slot as well, but as soon as a module
has one it takes a slower path through every call: 7 µs for a hook that does nothing, where this costs a tenth (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class Around:
    """Takes the place of a module's forward and calls `inner`, which was there before.

    Its `forward` is a bound method, because a copy of the module then gets a copy of what stands around it.
    """

    module: nn.Module
    inner: Forward

    def attach(self, module: nn.Module) -> None:
        self.module, self.inner = module, module.forward
        self._was_replaced = "forward" in vars(module)  # by the user, on this instance
        vars(module)["forward"] = self.forward

    def detach(self) -> None:
        """The module is as it was before."""
        if self._was_replaced:
            vars(self.module)["forward"] = self.inner
        else:
            del vars(self.module)["forward"]

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.inner(*arguments, **named)


def around(module: nn.Module) -> Around | None:
    """What stands around the module's forward, if something does."""
    owner = getattr(vars(module).get("forward"), "__self__", None)
    return owner if isinstance(owner, Around) else None


def own_forward(module: nn.Module) -> Forward:
    """What the module itself computes, without what stands around it."""
    wrapper = around(module)
    return module.forward if wrapper is None else wrapper.inner


@contextmanager
def forward_replaced(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Calls of the module run `forward` instead of its own. Its hooks run as ever, and so does what stands around it."""
    wrapper = around(module)
    if wrapper is not None:
        own = wrapper.inner
        wrapper.inner = forward
        try:
            yield
        finally:
            wrapper.inner = own
        return
    attributes = vars(module)
    before = attributes.get("forward")  # where the user had replaced it on this instance already
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
