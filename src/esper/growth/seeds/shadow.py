"""Train seeds in the shadow of the host: a second forward pass uses them, and only they get its gradient. The host does not change.

The part of the host before the first of these slots is not computed again if its output was recorded in the user's forward pass and the
closure calls the model with the same tensors. The host's optimiser has stepped since then, so the second pass applies the new weights
behind the slot to outputs of the old weights before it. With a width seed in the shadow, the second pass is computed as a whole: its units
begin inside a layer, whose output would be partly old and partly new. A compiled model runs eagerly and as a whole in the second pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from esper.growth.config import GrowthError
from esper.growth.host.isolation import Isolation
from esper.growth.host.prefix_cache import PrefixCache, PrefixCacheMismatch
from esper.growth.host.slots import Slot
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.backend import ModuleBackend
from esper.growth.lifecycle.stages import Cost
from esper.growth.seeds.width import WidthSeed
from esper.parallel import Group

Closure = Callable[[], Tensor]  # computes the loss of the last batch again


class Shadow:
    """The second forward pass, for all seeds of one model in stage TRAINING. They are connected, with `alpha`, only inside it."""

    def __init__(self, slotted: Slotted, *, alpha: float = 1.0) -> None:
        self.slotted, self.alpha = slotted, alpha
        self._isolation = Isolation(slotted.model)
        self._replay: PrefixCache | None = None  # of the part of the host before `_replayed_slot`
        self._replayed_slot = ""  # the first module that a seed in the shadow changes
        self._can_replay = True  # False once a closure has called the model in another way than the training step did
        self._is_due = False  # the next forward pass is to be recorded
        self._recorded_beside: list[WidthSeed] = []  # width seeds that were connected in the recorded pass

    def prepare(self, backends: Sequence[ModuleBackend]) -> None:
        """Record the user's next forward pass if there are seeds in the shadow."""
        first = self._first(backends)
        has_wide = any(backend.slot.seed is not None and backend.slot.seed.spec.wide for backend in backends)
        self._is_due = first is not None and self._can_replay and not has_wide
        if first is not None and self._replayed_slot != first.begins_at:
            self._replayed_slot = first.begins_at
            self._replay = PrefixCache(self.slotted.model, self.slotted.discovery.calls, first.begins_at)
        elif self._replay is not None:
            self._replay.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record a forward pass of the user in the `with` block. Afterwards the model has no patches, so it can be copied and saved."""
        if not self._is_due or self._replay is None or not torch.is_grad_enabled():
            yield
            return
        self._is_due = False  # forward passes inside this one are a part of it
        self._recorded_beside = self.slotted.wide_seeds()
        try:
            with self._replay.recording(keep_last=True):
                yield
        finally:
            self._is_due = True

    def rest(self) -> None:
        """Stop recording, and delete the recording."""
        self._is_due = False
        if self._replay is not None:
            self._replay.clear()

    def step(self, backends: Sequence[ModuleBackend], closure: Closure, *, scale: Tensor | None, group: Group) -> None:
        """Train these seeds by one step on the last batch. Their loss is multiplied by `scale`, for half precision."""
        self._is_due = False
        # Compute the gradients of the seeds' parameters in an isolated pass in which the seeds are connected.
        parameters = [parameter for backend in backends if backend.learner is not None for parameter in backend.learner.parameters]
        seeds = [backend.slot.seed for backend in backends if backend.slot.seed is not None]
        connected = [slot.seed for slot in self.slotted.slots.values() if slot.is_connected and slot.seed is not None]
        with ExitStack() as stack:
            stack.enter_context(self._isolation.guard(apart_from=seeds, and_of=connected))
            stack.enter_context(torch.enable_grad())
            # The recording holds the units of the seeds that were connected then; with others, the whole pass is computed.
            can_replay = self._recorded_beside == self.slotted.wide_seeds()
            for backend in backends:
                stack.enter_context(backend.slot.held_at(self.alpha))
            loss = self._loss(closure, can_replay=can_replay)
            scaled = loss if scale is None else loss * scale.to(loss.device, non_blocking=True)
            gradients = torch.autograd.grad(scaled, parameters, allow_unused=True)
        # Step each seed's own optimiser.
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for backend in backends:
            if backend.learner is not None:
                backend.learner.step(scale=scale, group=group)
                backend.learner.zero_grad()

    def _loss(self, closure: Closure, *, can_replay: bool) -> Tensor:
        """Return the loss of the second pass, replayed if possible. Raise GrowthError unless it is one number with a gradient."""
        loss = self._replayed_loss(closure) if can_replay else None
        loss = closure() if loss is None else loss
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            raise GrowthError(
                "the closure of after_step returned no loss with a gradient; it must compute the loss of the batch again "
                "by calling the slotted model with gradients on: lambda: loss_fn(slotted(x), y)"
            )
        return loss

    def _replayed_loss(self, closure: Closure) -> Tensor | None:
        """Return the loss by a replayed pass; None if the whole pass has to be computed."""
        if self._replay is None or not self._can_replay or not self._replay.nbytes:
            return None
        try:
            with self._replay.replaying(same_tensors=True):
                return closure()
        except PrefixCacheMismatch:  # the closure calls the model in another way than the training step did
            self._can_replay = False
            return None

    def flops(self, backends: Sequence[ModuleBackend], costs: Sequence[Cost]) -> int:
        """Return the FLOPs per sample of the second pass: both directions behind the first slot, and forward before it unless replayed."""
        first = self._first(backends)
        if first is None:
            return 0
        behind = self.slotted.discovery.places[first.begins_at].flops_behind
        is_replayed = self._replay is not None and self._can_replay and self._replay.nbytes > 0
        before = 0 if is_replayed else self.slotted.discovery.host.flops - behind
        return before + 2 * behind + 3 * sum(cost.flops for cost in costs)

    def _first(self, backends: Sequence[ModuleBackend]) -> Slot | None:
        """Return the slot whose seed acts first in a forward pass; None if there are no backends."""
        ends = {call.name: call.end for call in self.slotted.discovery.calls}
        return min((backend.slot for backend in backends), key=lambda slot: ends[slot.begins_at], default=None)

    def state_dict(self) -> dict[str, Any]:
        return {"can_replay": self._can_replay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._can_replay = state["can_replay"]
