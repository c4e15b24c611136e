"""The seeds of a model, which learn whenever the user's optimiser steps.

`SeedSteps` follows the optimisers of the host. After a step of the host it steps the connected seeds and evaluates the probe; with the
host's gradients it clears theirs. Seeds in the shadow learn in a second forward pass. Before every forward pass it attaches the probe and
the recording that this pass needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.growth.host.follower import OptimizerFollower
from esper.growth.host.isolation import unwrap
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.backend import ModuleBackend
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.recovery import Recovery
from esper.growth.lifecycle.stages import Stage
from esper.growth.measure.probe import ProbeRunner, Promises
from esper.growth.seeds.learner import MakeOptimizer, innermost
from esper.growth.seeds.shadow import Closure, Shadow
from esper.parallel import Group


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
        curve = self._lifecycles.config.lifecycle.alpha_curve
        for backend in self._lifecycles.slots.values():
            if backend.learner is not None:
                backend.learner.tick(is_skipped=is_skipped)
            if backend.record.ramp is not None:
                backend.advance_alpha(curve)

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

    def check_has_stepped(self) -> None:
        """Warn if there are seeds and the optimiser has not stepped in this epoch."""
        may_skip = self._scaler is not None and self._scaler.is_enabled()  # the first loss scale may overflow in all steps of an epoch
        has_seeds = any(backend.learner is not None for backend in self._lifecycles.slots.values())
        if has_seeds and not self.has_stepped_in_epoch and not may_skip:
            warnings.warn(
                "the optimiser passed to this Grower has not stepped in this epoch, so no seed has learned; pass the optimiser whose "
                "step() the training loop calls",
                RuntimeWarning,
                stacklevel=4,
            )
