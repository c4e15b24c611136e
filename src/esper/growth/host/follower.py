"""Follow the user's optimisers: seeds step when the host does, and their gradients are cleared when the host's are.

`OptimizerFollower` makes seeds do what the host does. They step whenever the user's optimiser steps. Their gradients are cleared whenever
the host's are: by `zero_grad` of the optimiser or the model, or by setting `.grad` of all trained parameters to None. So skipped batches,
gradient accumulation, closures, several optimisers and SAM need no extra code. Gradients that the user zeroes in place are not noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.host.slots import tensors_in
from esper.growth.seeds.learner import innermost, nested
from esper.torch_internals import backward_number, outside_compiled_code


class ZeroGradPatch:
    """Patch of a model's or optimiser's `zero_grad`, which calls `after(set_to_none)` afterwards; torch has no hook for it.

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
        """Restore the original `zero_grad`. If someone else has patched over this patch, it stays and only calls the original."""
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


class _Followed:
    """State of one followed optimiser: `outer` is the user's, the key of the table the one inside that changes the weights."""

    def __init__(self, outer: Optimizer) -> None:
        self.outer = outer
        self.depth = 0  # nested calls of `step` under way: a `step` that calls that of its base class runs all hooks twice
        self.has_gradient = True  # the host had a gradient when the current step began


class OptimizerFollower:
    """Hooks on the user's optimisers and model that report the optimisers' steps, and when the host's gradients are cleared.

    `before_step()` is called before each step, `step(optimizer)` after each step that had a gradient, and `zero_grad(set_to_none,
    optimizer)` when the host's gradients are cleared; the optimiser is None if those of the whole model are. `is_pending()` returns whether
    seeds have gradients to clear. `models` are the module that the user calls and the module inside its wrappers. Copies of optimiser and
    model are not followed. `stop` removes all hooks.
    """

    on_stop: Callable[[], None] | None = None

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        models: Sequence[nn.Module],
        *,
        before_step: Callable[[], None],
        step: Callable[[Optimizer], None],
        zero_grad: Callable[[bool, Optimizer | None], None],
        is_pending: Callable[[], bool],
    ) -> None:
        self._before, self._step, self._zero_grad, self._is_pending = before_step, step, zero_grad, is_pending
        self.is_active = True
        self._backward = -1  # id of the last backward pass that was seen
        self._followed = {innermost(outer): _Followed(outer) for outer in optimizers}
        self._hooks = [
            *(inner.register_step_pre_hook(self._before_step) for inner in self._followed),
            *(inner.register_step_post_hook(self._after_step) for inner in self._followed),
        ]
        self._patches = [
            *(ZeroGradPatch(one, partial(self._after_zero_grad, outer)) for outer in optimizers for one in nested(outer)),
            *(ZeroGradPatch(model, partial(self._after_zero_grad, None)) for model in dict.fromkeys(models)),
        ]

    def stop(self) -> None:
        """Remove all hooks and patches from optimisers and model."""
        self.is_active = False
        if self.on_stop is not None:
            self.on_stop()
        for hook in self._hooks:
            hook.remove()
        for patch in reversed(self._patches):
            patch.detach()

    def forget_failed_steps(self) -> None:
        """Reset the depth of nested steps; call it between two steps. A step that raised an error has not run its post hook."""
        for followed in self._followed.values():
            followed.depth = 0

    def watch_backward(self, output: Any) -> None:
        """Check, when the backward pass of this output begins, whether the user has set the host's gradients to None by hand.

        The forward pass would be too early: many loops clear the gradients between the two passes.
        """
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, gradient: Tensor) -> None:
        # Check only once per backward pass: later in the same pass, seeds may already have gradients that the host does not have yet.
        number = backward_number()
        if number != self._backward:
            self._backward = number
            self._clear_unless_host_has_gradient(None)

    # Keep these hooks out of a compiled optimiser step: traced, they would be recompiled in every step.

    @outside_compiled_code
    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self.is_active:
            return
        followed = self._followed[optimizer]
        followed.depth += 1
        if followed.depth == 1:
            self._before()
            has_closure = named.get("closure") is not None or (len(arguments) > 1 and arguments[1] is not None)
            followed.has_gradient = has_closure or self._clear_unless_host_has_gradient(followed.outer)

    @outside_compiled_code
    def _after_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self.is_active:
            return
        followed = self._followed[optimizer]
        followed.depth -= 1
        if followed.depth == 0 and followed.has_gradient:
            self._step(followed.outer)

    def _after_zero_grad(self, optimizer: Optimizer | None, set_to_none: bool) -> None:
        if self.is_active:
            self._zero_grad(set_to_none, optimizer)

    def _clear_unless_host_has_gradient(self, optimizer: Optimizer | None) -> bool:
        """Return whether a parameter that this optimiser (None: any) trains has a gradient; True if all are frozen.

        If none has, clear the gradients of the seeds that follow it.
        """
        chosen = [followed.outer for followed in self._followed.values()] if optimizer is None else [optimizer]
        trained = (one for outer in chosen for group in outer.param_groups for one in group["params"] if one.requires_grad)
        parameter = next(trained, None)
        if parameter is None or parameter.grad is not None or any(other.grad is not None for other in trained):
            return True
        if self.is_active and self._is_pending():
            self._zero_grad(True, optimizer)
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Leave everything out: some optimisers are copied with their hooks, and a copy of the follower must do nothing."""
        return {"is_active": False, "_backward": -1, "_hooks": [], "_patches": []}
