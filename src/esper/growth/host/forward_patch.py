"""Patch a method of one object: the `forward` of a module, for slots and recordings, or the `zero_grad` of a model or optimiser.

`forward` is set on the instance, where `module(...)` finds it. A forward hook of torch would work too, but a module with a hook takes a
slower path in every call: 7 µs for a hook that does nothing; this patch costs a tenth of it (docs/log.md).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

Forward = Callable[..., Any]


def keep_running(module: nn.Module, arguments: Any) -> None:
    """Do nothing. As a forward pre-hook of a submodule, it keeps the modules around it from computing the submodule by a fused kernel."""


class ForwardPatch:
    """Replacement of a module's forward, which calls the original one as `inner`.

    Its `forward` is a bound method, so that a copy of the module gets a copy of the patch.
    """

    module: nn.Module
    inner: Forward

    def attach(self, module: nn.Module) -> None:
        self.module, self.inner = module, module.forward
        self._was_replaced = "forward" in vars(module)  # by the user, on this instance
        vars(module)["forward"] = self.forward

    def detach(self) -> None:
        """Restore the module's original forward."""
        if self._was_replaced:
            vars(self.module)["forward"] = self.inner
        else:
            del vars(self.module)["forward"]

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.inner(*arguments, **named)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `inner` if it is the module's own method: pickle would look it up by name, and find the patch."""
        return {name: value for name, value in self.__dict__.items() if name != "inner" or self._was_replaced}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "module" in state and "inner" not in state:
            self.inner = types.MethodType(type(self.module).forward, self.module)


class ModelPatch(ForwardPatch):
    """Patch of the forward of a whole model, whose calls go through `run(forward, arguments, named)`.

    The patch object itself is set as `forward`, with the signature of the original: libraries read the signature of a model's forward to
    decide which inputs it takes. In a copy of the model, `run` is None and the original forward is called.
    """

    run: Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any] | None = None

    def attach(self, module: nn.Module) -> None:
        super().attach(module)
        vars(module)["forward"] = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.run is None:
            return self.inner(*arguments, **named)
        return self.run(self.forward, arguments, named)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "run": None}


class ZeroGradPatch:
    """Patch of `zero_grad` of a model or optimiser, which calls `after(set_to_none)` afterwards; torch has no hook for it.

    In a copy of the owner, `after` is None and only the original `zero_grad` is called.
    """

    def __init__(self, owner: nn.Module | Optimizer, after: Callable[[bool], None]) -> None:
        self.owner = owner
        self.after: Callable[[bool], None] | None = after
        drop_copied_zero_grad(owner)
        self._before = vars(owner).get("zero_grad")  # None unless the user has replaced it on this instance
        vars(owner)["zero_grad"] = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = self._inner(*arguments, **named)
        if self.after is not None:
            self.after(bool(named.get("set_to_none", arguments[0] if arguments else True)))
        return result

    @property
    def _inner(self) -> Callable[..., Any]:
        inner: Callable[..., Any] = type(self.owner).zero_grad.__get__(self.owner) if self._before is None else self._before
        return inner

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._inner)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "after": None}

    def detach(self) -> None:
        """Restore the original `zero_grad`. If another patch was put over this one, this one stays and does nothing."""
        self.after = None
        if vars(self.owner).get("zero_grad") is self:
            if self._before is None:
                del vars(self.owner)["zero_grad"]
            else:
                vars(self.owner)["zero_grad"] = self._before


def drop_copied_zero_grad(owner: nn.Module | Optimizer) -> None:
    """Remove a patch that was copied with the owner and does nothing."""
    found = vars(owner).get("zero_grad")
    if isinstance(found, ZeroGradPatch) and found.after is None:
        found.detach()


def around(module: nn.Module) -> ForwardPatch | None:
    """Return the patch of a module's forward, or None."""
    forward = vars(module).get("forward")
    owner = getattr(forward, "__self__", forward)
    return owner if isinstance(owner, ForwardPatch) else None


def own_forward(module: nn.Module) -> Forward:
    """Return the module's forward without a patch."""
    wrapper = around(module)
    return module.forward if wrapper is None else wrapper.inner


@contextmanager
def forward_replaced(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Replace the module's own forward inside the `with` block. Its hooks and its patch, such as a slot, still run."""
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
    before = attributes.get("forward")  # None unless the user has replaced it on this instance
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
