"""Standing around a method of one object: how slots, recordings and replays get between a module and those who call it.

`forward` is set on the instance, where `module(...)` finds it. Torch's forward hooks would do for a slot as well, but as soon as a module
has one it takes a slower path through every call: 7 µs for a hook that does nothing, where this costs a tenth (docs/log.md).
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
    """A forward pre-hook that does nothing. A module that computes its submodules by a fused kernel does not do so if one has a hook."""


class ForwardPatch:
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

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `inner` where it is the module's own method: pickle would look it up by its name, and find what stands there now."""
        return {name: value for name, value in self.__dict__.items() if name != "inner" or self._was_replaced}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "module" in state and "inner" not in state:
            self.inner = types.MethodType(type(self.module).forward, self.module)


class ModelPatch(ForwardPatch):
    """Stands around the forward of a whole model, and lets `run` call it: run(forward, arguments, named).

    It takes the place of `forward` itself, without a bound method, because libraries read the signature of a model's forward to decide
    which inputs it takes. A copy of the model calls its own forward and nothing else.
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
    """Takes the place of `zero_grad` of a model or an optimiser, for which torch has no hook, and calls `after(set_to_none)` behind it.

    A copy of the owner calls its own `zero_grad` and nothing else.
    """

    def __init__(self, owner: nn.Module | Optimizer, after: Callable[[bool], None]) -> None:
        self.owner = owner
        self.after: Callable[[bool], None] | None = after
        drop_copied_zero_grad(owner)
        self._before = vars(owner).get("zero_grad")  # where the user has replaced it on this instance
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
        """The owner is as it was before, unless another has taken the place since: then this stays and does nothing of its own."""
        self.after = None
        if vars(self.owner).get("zero_grad") is self:
            if self._before is None:
                del vars(self.owner)["zero_grad"]
            else:
                vars(self.owner)["zero_grad"] = self._before


def drop_copied_zero_grad(owner: nn.Module | Optimizer) -> None:
    """Takes out what a copy of a model has of the original's."""
    found = vars(owner).get("zero_grad")
    if isinstance(found, ZeroGradPatch) and found.after is None:
        found.detach()


def around(module: nn.Module) -> ForwardPatch | None:
    """What stands around the module's forward, if something does."""
    forward = vars(module).get("forward")
    owner = getattr(forward, "__self__", forward)
    return owner if isinstance(owner, ForwardPatch) else None


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
