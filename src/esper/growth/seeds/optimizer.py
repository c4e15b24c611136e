"""Train seeds: every seed has its own optimiser, with its own gradient clipping, which follows the user's optimiser.

A seed's optimiser is of the same class as the host's and has the settings of one of its parameter groups. Seeds are not added to the host's
optimiser, because new parameters break schedules such as OneCycleLR. Every seed starts with a new optimiser, so momentum never passes from
one seed to another. Its learning rate rises from near 0: a new Adam makes full steps in all weights at once, and the host's loss would jump
(docs/log.md).

`OptimizerFollower` makes seeds do what the host does. They step whenever the user's optimiser steps. Their gradients are cleared whenever
the host's are: by `zero_grad` of the optimiser or the model, or by setting `.grad` of all trained parameters to None. So skipped batches,
gradient accumulation, closures, several optimisers and SAM need no extra code. Gradients that the user zeroes in place are not noticed.

With a GradScaler, a seed's gradients are unscaled here before they are measured, clipped and used. If the scaler skips the host's step, the
seeds skip theirs. An overflow in a seed's gradient alone skips only that seed's step. On the CPU and with fused optimisers the step is
really skipped; elsewhere the test would wait for the device, so the gradient is set to zero. Both are counted. An overflow in a seed does
not lower the loss scale, which belongs to the host.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from esper.devices import reading_waits
from esper.gradients import gradient_norm, unscaled
from esper.growth.config import GrowthError, SeedOptimizerConfig
from esper.growth.host.causality import tensors_in
from esper.growth.host.forward_patch import ZeroGradPatch
from esper.growth.lifecycle.stages import GradientStats
from esper.parallel import ALONE, Group

MakeOptimizer = Callable[[list[nn.Parameter], float], Optimizer]


class SeedLearner:
    """Optimiser of one seed.

    `group` is the index of the host optimiser's parameter group whose learning rate the seed follows; an index, because `load_state_dict`
    of an optimiser replaces its groups. `warmup` is the number of training steps over which the learning rate rises; `tick` counts them.
    """

    def __init__(
        self, seed: nn.Module, host: Optimizer, group: int, config: SeedOptimizerConfig, make: MakeOptimizer | None, *, warmup: int = 0
    ) -> None:
        self._warmup, self._steps = warmup, 0
        self.parameters = [parameter for parameter in seed.parameters() if parameter.requires_grad]
        self.config = config
        self._host, self._group = host, group
        self.optimizer = make(self.parameters, self.rate) if make is not None else _like(innermost(host), group, self.parameters)
        _check_steps_alone(self.optimizer)
        self._norms: list[Tensor] = []  # gradient norms of the steps since the last report, on the device
        self._skipped: Tensor | int = 0  # steps since the last report that were skipped because of the host's gradient
        self.loss_unit = 1.0  # see LossRange: clipping and health are relative to it

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def step(self, *, scale: Tensor | None = None, found_inf: Tensor | None = None, group: Group = ALONE) -> None:
        """Make one step by the gradients that are there, which were multiplied by `scale`. They are unscaled and clipped in place.

        `found_inf` is above 0 if the host's own step is skipped on the device. A gradient that is not finite is not used on the CPU and
        under a loss scale; elsewhere the governor notices its effect.
        """
        if group.world_size > 1:
            _average(self.parameters, group)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not gradients:
            return
        if scale is not None:
            for gradient in gradients:
                gradient.copy_(unscaled(gradient, scale))
        # If reading does not wait for the device, skip the step here: when the host skips its step, or when this gradient is not finite.
        norm = gradient_norm(self.parameters)
        may_read = not reading_waits(norm)
        if may_read and found_inf is not None and float(found_inf) > 0:
            self._skipped = self._skipped + 1
            return
        self._norms.append(norm)
        if may_read and not torch.isfinite(norm):
            return
        for own in self.optimizer.param_groups:
            own["lr"] = self.rate * min((self._steps + 1) / (self._warmup + 1), 1.0)
        if may_read or scale is None:
            self._clip(norm)
            self.optimizer.step()
            return
        # Under a loss scale on a device, decide there: set a bad gradient to zero, and let a fused optimiser skip the step.
        is_bad = ~torch.isfinite(norm) if found_inf is None else ~torch.isfinite(norm) | (found_inf.to(norm.device) > 0)
        self._skipped = self._skipped + (is_bad & torch.isfinite(norm))
        for gradient in gradients:
            gradient.masked_fill_(is_bad, 0.0)
        self._clip(norm.masked_fill(is_bad, 0.0))
        with _skipped_where(is_bad, self.optimizer):
            self.optimizer.step()

    def _clip(self, norm: Tensor) -> None:
        if self.config.max_grad_norm is not None:
            clip_grads_with_norm_(self.parameters, self.config.max_grad_norm * self.loss_unit, norm)

    def tick(self, *, is_skipped: Tensor | bool = False) -> None:
        """Count a training step. `is_skipped` says that neither the host nor the seed has stepped."""
        self._steps += 1
        self._skipped = self._skipped + is_skipped

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def rate(self) -> float:
        """Learning rate of the seed after the warm-up."""
        return float(self._host.param_groups[self._group]["lr"]) * self.config.learning_rate_factor

    def report(self) -> GradientStats:
        """Return statistics of the gradients since the last report. Reads from the device once."""
        *norms, skipped = torch.cat((self._gathered(), self._counted())).tolist()
        self._norms, self._skipped = [], 0
        return GradientStats.of(norms, skipped=int(skipped), unit=self.loss_unit)

    def _gathered(self) -> Tensor:
        """Return the gradient norms as one tensor [steps] on the seed's device."""
        device = self.parameters[0].device
        return torch.stack([norm.float() for norm in self._norms]) if self._norms else torch.empty(0, device=device)

    def _counted(self) -> Tensor:
        """Return the skipped steps as a tensor [1] on the seed's device."""
        return torch.as_tensor(self._skipped, dtype=torch.float32, device=self.parameters[0].device).reshape(1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "norms": self._gathered(),
            "skipped": self._counted(),
            "steps": self._steps,
            "warmup": self._warmup,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._norms = list(state["norms"].to(self.parameters[0].device).unbind())
        skipped = state.get("skipped")  # missing in files of earlier versions
        self._skipped = 0 if skipped is None else skipped[0].to(self.parameters[0].device)
        self._steps, self._warmup = state["steps"], state["warmup"]
        self.zero_grad()


@contextmanager
def _skipped_where(is_bad: Tensor, optimizer: Optimizer) -> Iterator[None]:
    """Let a fused optimiser skip its step if `is_bad`, which it reads on the device. Has no effect on other optimisers."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        yield
        return
    optimizer.grad_scale, optimizer.found_inf = None, is_bad.float()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


class OptimizerFollower:
    """Hooks on the user's optimiser and model that report its steps, and when the host's gradients are cleared.

    `before_step()` is called before each step, `step()` after each step that had a gradient, and `zero_grad(set_to_none)` when the host's
    gradients are cleared. `is_pending()` returns whether seeds have gradients to clear. `models` are the module that the user calls and the
    module inside its wrappers. Copies of optimiser and model are not followed. `stop` removes all hooks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        models: Sequence[nn.Module],
        *,
        before_step: Callable[[], None],
        step: Callable[[], None],
        zero_grad: Callable[[bool], None],
        is_pending: Callable[[], bool],
    ) -> None:
        self._outer, self.optimizer = optimizer, innermost(optimizer)
        self._before, self._step, self._zero_grad, self._is_pending = before_step, step, zero_grad, is_pending
        self.is_active = True
        self._depth = 0  # nested calls of `step` under way: a `step` that calls that of its base class runs all hooks twice
        self._has_gradient = True  # the host had a gradient when the current step began
        self._backward = -1  # id of the last backward pass that was seen
        self._hooks = [self.optimizer.register_step_pre_hook(self._before_step), self.optimizer.register_step_post_hook(self._after_step)]
        owners: list[nn.Module | Optimizer] = [*nested(optimizer), *dict.fromkeys(models)]
        self._wrappers = [ZeroGradPatch(owner, self._after_zero_grad) for owner in owners]

    def stop(self) -> None:
        """Remove all hooks and patches from optimiser and model."""
        self.is_active = False
        for hook in self._hooks:
            hook.remove()
        for wrapper in reversed(self._wrappers):
            wrapper.detach()

    def forget_failed_steps(self) -> None:
        """Reset the depth of nested steps; call it between two steps. A step that raised an error has not run its post hook."""
        self._depth = 0

    def watch_backward(self, output: Any) -> None:
        """Check, when the backward pass of this output begins, whether the user has set the host's gradients to None by hand.

        The forward pass would be too early: many loops clear the gradients between the two passes.
        """
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, gradient: Tensor) -> None:
        # Check only once per backward pass: later in it, seeds may have got gradients and the host none yet.
        number = torch._C._current_graph_task_id()
        if number != self._backward:
            self._backward = number
            self._drop_if_host_has_none()

    # Keep these hooks out of a compiled optimiser step: traced, they would be recompiled in every step. The decorator is the one that
    # torch's optimisers use; the public one imports the compiler at once.

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1 and self.is_active:
            self._before()
            has_closure = named.get("closure") is not None or (len(arguments) > 1 and arguments[1] is not None)
            self._has_gradient = has_closure or self._drop_if_host_has_none()

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _after_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth == 0 and self.is_active and self._has_gradient:
            self._step()

    def _after_zero_grad(self, set_to_none: bool) -> None:
        if self.is_active:
            self._zero_grad(set_to_none)

    def _drop_if_host_has_none(self) -> bool:
        """Return whether a trained parameter has a gradient; True if all are frozen. If none has, clear the seeds' gradients too."""
        trained = (parameter for group in self._outer.param_groups for parameter in group["params"] if parameter.requires_grad)
        parameter = next(trained, None)
        if parameter is None or parameter.grad is not None or any(other.grad is not None for other in trained):
            return True
        if self.is_active and self._is_pending():
            self._zero_grad(True)
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Leave everything out: a copy, as some optimisers make with their hooks, follows nothing."""
        return {"is_active": False, "_depth": 0, "_has_gradient": False, "_backward": -1, "_hooks": [], "_wrappers": []}


def nested(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimiser and those that it wraps, outermost first; accelerate, Lightning and SAM wrap optimisers."""
    found = [optimizer]
    while len(inner := [value for value in vars(found[-1]).values() if isinstance(value, Optimizer)]) == 1 and inner[0] not in found:
        found.append(inner[0])
    return found


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the wrapped optimiser that changes the weights."""
    return nested(optimizer)[-1]


def _average(parameters: list[nn.Parameter], group: Group) -> None:
    """Average the gradients over all ranks in one transfer, because DistributedDataParallel does not know these parameters.

    A rank without a gradient contributes zeros.
    """
    with torch.no_grad():
        own = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
        flat = group.sum_(torch.cat([gradient.reshape(-1) for gradient in own])) / group.world_size
        for parameter, part in zip(parameters, flat.split_with_sizes([gradient.numel() for gradient in own]), strict=True):
            parameter.grad = part.view_as(parameter).clone()


def _like(host: Optimizer, group: int, parameters: list[nn.Parameter]) -> Optimizer:
    """Make an optimiser of the host's class with the settings of one of its groups."""
    kind, settings = type(host), host.param_groups[group]
    accepted = inspect.signature(kind).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    try:
        return kind(parameters, **{name: settings[name] for name in host.defaults if name in settings and (takes_all or name in accepted)})
    except Exception as error:
        raise GrowthError(f"an optimiser for seeds cannot be made like the host's ({kind.__name__}): {error}; {_OWN}") from error


def _check_steps_alone(optimizer: Optimizer) -> None:
    """Raise a GrowthError if the optimiser's `step` requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise GrowthError(f"{type(optimizer).__name__} computes the loss itself in every step, which seeds cannot do; {_OWN}")


_OWN = "pass another one as seed_optimizer=lambda parameters, learning_rate: torch.optim.AdamW(parameters, lr=learning_rate)"


def group_of(optimizer: Optimizer, module: nn.Module, host: nn.Module) -> int:
    """Return the index of the group that holds a parameter of the submodule; if none does, of any group with parameters of the host."""

    def find(parameters: Iterable[nn.Parameter]) -> int | None:
        wanted = {id(parameter) for parameter in parameters}
        found = (index for index, group in enumerate(optimizer.param_groups) if any(id(one) in wanted for one in group["params"]))
        return next(found, None)

    own = find(module.parameters())
    anywhere = find(host.parameters()) if own is None else own
    return 0 if anywhere is None else anywhere
