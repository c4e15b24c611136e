"""The seeds of a model, which learn whenever the user's optimiser steps.

`OptimizerFollower` reports what the user's optimisers do: their steps, and when the host's gradients are cleared, by `zero_grad` of the
optimiser or the model, or by setting `.grad` of all trained parameters to None. So skipped batches, gradient accumulation, closures,
several optimisers and SAM need no extra code. Gradients that the user zeroes in place are not noticed.

`SeedSteps` follows them. After a step of the host it steps the connected seeds and evaluates the probe; with the host's gradients it clears
theirs. Seeds in the shadow learn in a second forward pass. Before every forward pass it attaches the probe and the recording that this pass
needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.growth.host.isolation import unwrap
from esper.growth.host.slots import ZeroGradPatch, tensors_in
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.backend import ModuleBackend
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.recovery import Recovery
from esper.growth.lifecycle.stages import Stage
from esper.growth.measure.probe import ProbeRunner
from esper.growth.measure.promises import Promises
from esper.growth.seeds.learner import MakeOptimizer, innermost, nested
from esper.growth.seeds.shadow import Closure, Shadow
from esper.parallel import Group
from esper.torch_internals import backward_number, outside_compiled_code


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


class SeedSteps:
    """Steps the seeds of one model with the optimisers of the host, of which the first one counts the steps.

    `on_first_step` is called before the first step of an epoch. Another `SeedSteps` that was made earlier for the same slots stops.
    """

    def __init__(
        self,
        slotted: Slotted,
        optimizers: Sequence[Optimizer],
        lifecycles: Lifecycles[ModuleBackend],
        recovery: Recovery,
        *,
        scaler: GradScaler | None,
        seed_optimizer: MakeOptimizer | None,
        group: Group,
        on_first_step: Callable[[], None],
    ) -> None:
        self._slotted, self._optimizers, self._lifecycles, self._recovery = slotted, optimizers, lifecycles, recovery
        self._scaler, self._group, self._on_first_step = scaler, group, on_first_step
        self.prober = ProbeRunner(slotted, lifecycles, optimizers, seed_optimizer)
        self.shadow = Shadow(slotted, alpha=lifecycles.config.lifecycle.alpha_target)
        self.has_stepped = False  # the host's optimiser has stepped since the last after_step
        self.has_stepped_in_epoch = False  # the host's optimiser has stepped since the last after_epoch
        self.steps = 0  # of the host's optimiser in this epoch, so far
        self.steps_before: int | None = None  # the same number in the last epoch; None before the end of the first
        self.forward_flops = 0  # per sample, of the host and its connected seeds
        self._shadow_seeds: list[ModuleBackend] = []  # slots whose seeds learn in the shadow
        self._has_warned = False  # about unknown sample counts
        self._one = torch.ones((), device=next(slotted.model.parameters()).device)
        # The GradScaler's loss scale after the last step. `get_scale` waits for the device, which costs nothing before the training.
        self._last_loss_scale: Tensor | float = scaler.get_scale() if scaler is not None else 1.0
        if slotted.calls.follower is not None:
            slotted.calls.follower.stop()
        self.follower = slotted.calls.follower = OptimizerFollower(
            optimizers,
            [slotted.model, unwrap(slotted.model)],
            before_step=self._before_step,
            step=self._step_seeds,
            zero_grad=self._clear_gradients,
            is_pending=self._has_gradients,
        )
        self.follower.on_stop = recovery.forget  # at once, because the grower itself lives until Python collects its cycles
        self.note_seeds()
        self.prepare()

    # Preparation of the next step

    def note_seeds(self) -> None:
        """Note the FLOPs of a forward pass and the seeds in the shadow. Call it after every change of the slots."""
        self.forward_flops = self._slotted.discovery.host.flops + self._lifecycles.connected().flops
        learning = [backend for backend in self._lifecycles.slots.values() if backend.stage is Stage.TRAINING]
        if self._shadow_seeds and not learning:
            self.shadow.rest()
        self._shadow_seeds = learning

    def prepare(self) -> None:
        """Attach the probe and the recording for the next forward pass, and start to count its samples."""
        calls = self._slotted.calls
        calls.samples, calls.recording = 0, None
        if (scale := self._loss_scale()) is not None:
            self._last_loss_scale = scale
        if self.prober.probe is not None:
            self.prober.get_ready(self.steps, self.steps_before)
        if self._shadow_seeds:
            self.shadow.prepare(self._shadow_seeds)
            calls.recording = self.shadow.recording

    def stop_watching(self, *, discard: bool = False) -> None:
        """Remove the probe and the recording from the model. With `discard`, drop the probe and its results."""
        if self.prober.probe is not None:
            (self.prober.discard if discard else self.prober.rest)()
        if self._shadow_seeds:
            self.shadow.rest()

    def _loss_scale(self) -> Tensor | None:
        """Return the GradScaler's loss scale as a tensor, because `get_scale` would wait for the device; None without a GradScaler."""
        return self._scaler.scale(self._one) if self._scaler is not None and self._scaler.is_enabled() else None

    def recording(self) -> AbstractContextManager[None]:
        """Record the forward pass inside the `with` block, so that seeds in the shadow need not compute all of it again."""
        return self.shadow.recording() if self._shadow_seeds else nullcontext()

    def stop(self) -> None:
        """Remove all hooks from the model and its optimisers."""
        self.stop_watching(discard=True)
        self.follower.stop()
        if self._slotted.calls.follower is self.follower:
            self._slotted.calls.recording = self._slotted.calls.follower = None

    # Called by the follower of the user's optimisers

    def _before_step(self) -> None:
        self._recovery.hold_new()
        if self.steps == 0:
            self._on_first_step()

    def _step_seeds(self, optimizer: Optimizer) -> None:
        """Step the connected seeds, as far as they follow this optimiser of the host, which has stepped. The first one evaluates the probe.

        Gradients come from the user's backward passes.
        """
        # A fused optimiser under a GradScaler skips its step on the device. It has `found_inf` while it steps.
        scale, found_inf = self._loss_scale(), getattr(innermost(optimizer), "found_inf", None)
        if found_inf is not None and optimizer is self._optimizers[0]:
            self._lifecycles.history.skipped = self._lifecycles.history.skipped + (found_inf.reshape(()) > 0)
        for backend in self._lifecycles.slots.values():
            if backend.learner is not None and backend.slot.is_connected:
                backend.learner.step(with_=optimizer, scale=scale, found_inf=found_inf, group=self._group)
        if optimizer is self._optimizers[0]:
            self.steps += 1
            if self.prober.probe is not None:
                self.prober.ask(scale=scale)
        self.has_stepped = self.has_stepped_in_epoch = True

    def _clear_gradients(self, set_to_none: bool, optimizer: Optimizer | None) -> None:
        """Clear the gradients of the seeds and of the probe, because the host's were cleared: those of an optimiser, or all."""
        for backend in self._lifecycles.slots.values():
            if backend.learner is not None:
                backend.learner.zero_grad(set_to_none=set_to_none, with_=optimizer)
        if self.prober.probe is not None and optimizer in (None, self._optimizers[0]):
            self.prober.drop()

    def _has_gradients(self) -> bool:
        """Return whether a seed or the probe holds gradients of backward passes that no step has used."""
        if self.prober.probe is not None and self.prober.probe.has_caught:
            return True
        return any(backend.learner is not None and backend.learner.has_gradients for backend in self._lifecycles.slots.values())

    # After a step, and at the end of an epoch

    def step_shadow_seeds(self, closure: Closure | None) -> None:
        """Train the seeds in the shadow by one step, if the host has stepped since the last call."""
        if self._shadow_seeds and closure is not None and self.has_stepped:
            with self.prober.paused():
                self.shadow.step(self._shadow_seeds, closure, scale=self._loss_scale(), group=self._group)

    def tick(self, is_skipped: Tensor | bool) -> None:
        """Advance the warm-up of the seeds' learning rates, and the alphas that move, by one step; the host may have skipped it."""
        for backend in self._lifecycles.slots.values():
            if backend.learner is not None:
                backend.learner.tick(is_skipped=is_skipped)
            if backend.record.ramp is not None:
                backend.advance_alpha()

    def has_overflowed(self) -> Tensor | bool:
        """Return whether the GradScaler skipped the host's step: then its loss scale is lower than before.

        The result is a tensor if losses are scaled, because reading it would wait for the device.
        """
        scale = self._loss_scale()
        return False if scale is None or self.has_stepped else scale < self._last_loss_scale

    def flops(self) -> int:
        """Return the FLOPs per sample of one training step: 3 forward passes' worth, and the second pass of seeds in the shadow."""
        second = 0
        if self._shadow_seeds and self.has_stepped:
            costs = [self._lifecycles.cost(backend.place.name) for backend in self._shadow_seeds]
            second = self.shadow.flops(self._shadow_seeds, costs)
        return 3 * self.forward_flops + second

    def end_epoch(self) -> Promises | None:
        """Start to count the steps from 0. End this epoch's probe and return its results; None if no probe ran."""
        self.has_stepped_in_epoch = False
        self.steps_before, self.steps = self.steps, 0
        reported = self._lifecycles.history.steps
        return None if self.prober.probe is None else self.prober.end_epoch(steps=self.steps_before, reported=reported)

    def check_epoch(self) -> None:
        """Warn if the samples of the epoch that ends were not counted (once), or if there are seeds and the optimiser has not stepped."""
        if not self._lifecycles.history.samples_so_far and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the number of samples of this epoch is unknown, because no call of the model was seen (it may have been compiled after "
                "add_slots), so FLOPs are not counted and the heuristic will not grow; call slotted(x), or pass "
                "after_step(loss, samples=len(x))",
                RuntimeWarning,
                stacklevel=3,
            )
        may_skip = self._scaler is not None and self._scaler.is_enabled()  # the first loss scale may overflow in all steps of an epoch
        has_seeds = any(backend.learner is not None for backend in self._lifecycles.slots.values())
        if has_seeds and not self.has_stepped_in_epoch and not may_skip:
            warnings.warn(
                "the optimiser passed to this Grower has not stepped in this epoch, so no seed has learned; pass the optimiser whose "
                "step() the training loop calls",
                RuntimeWarning,
                stacklevel=3,
            )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of steps, the probe and the shadow. The seeds and their optimisers belong to the slots."""
        return {
            "steps": self.steps,
            "steps_before": self.steps_before,
            "has_stepped": self.has_stepped_in_epoch,
            "probe": self.prober.state_dict(),
            "shadow": self.shadow.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; call `note_seeds` and `prepare` after it."""
        self.shadow.load_state_dict(state["shadow"])
        self.prober.load_state_dict(state["probe"])
        self.steps, self.steps_before = state["steps"], state["steps_before"]
        self.has_stepped, self.has_stepped_in_epoch = False, state["has_stepped"]
