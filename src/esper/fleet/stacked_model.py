"""Hosts of a fleet as tensors: their storage, the group that trains, and the stacked model that computes them as one network.

- `HostStorage`: weights, buffers, optimiser moments and loss scales of all hosts, one row per host.
- `HostGroup`: compact copies of the rows of the hosts that train now.
- `StackedModel`: some hosts with the seeds in them as one network. Training, the second pass of seeds in the shadow, validation, and
  validation without a seed all use it.

Shapes: B = samples, N = hosts of the fleet or of the stacked model, A = hosts that train, P = weights of a host; activations are
[B, N, ...].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.fleet.device import upload
from esper.fleet.seed_groups import MakeRowOptimizer, StackedSeed, act
from esper.fleet.stacked.lowering import Recompute, Stacked, lower
from esper.fleet.stacked.rows import Layout, ModuleRows
from esper.gradients import LossScales, NoLossScales


class HostStorage:
    """Tensors of all hosts of a fleet, one row per host.

    `template` is any host of the architecture, `slots` are the names of its submodules after which seeds may grow. With `scales`, every
    host has a loss scale.
    """

    def __init__(
        self,
        template: nn.Module,
        slots: Sequence[str],
        *,
        hosts: int,
        make: MakeRowOptimizer,
        device: torch.device,
        dtype: torch.dtype,
        scales: bool = False,
    ) -> None:
        self.slots, self.make = tuple(slots), make
        self.stacked: Stacked = lower(template, slots=self.slots)
        self.rows = ModuleRows(template.to(dtype), hosts, device=device)
        self._moments = make(self.rows.parameters.flat).state
        self.scales = LossScales.fresh(hosts, device) if scales else NoLossScales(torch.zeros(hosts, dtype=torch.int64, device=device))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All state of the hosts, name -> [N, ...]."""
        parts = {"weights": self.rows.parameters.flat.detach()}
        parts |= {f"constants {rows.layout.dtype}": rows.flat for rows in self.rows.constants}
        return parts | {f"moments {name}": tensor for name, tensor in self._moments.items()} | self.scales.tensors

    def load(self, rows: Sequence[int], modules: Sequence[nn.Module]) -> None:
        """Replace the hosts in these rows by new ones, with fresh moments and loss scales."""
        places = upload(rows, self.rows.parameters.flat.device)
        self.rows.load(places, modules)
        for moment in self._moments.values():
            moment.index_fill_(0, places, 0)
        self.scales.reset_(places)

    def group(self, rows: Sequence[int], rates: Tensor) -> HostGroup:
        """Return the hosts of these rows, ready to train at these learning rates [A]."""
        return HostGroup(self, rows, rates)


class HostGroup:
    """Hosts that train together, in compact copies of their rows. Call `put_back()` last."""

    def __init__(self, storage: HostStorage, rows: Sequence[int], rates: Tensor) -> None:
        self.storage, self.stacked = storage, storage.stacked
        self._index = upload(rows, rates.device)
        self._layout: Layout = storage.rows.parameters.layout
        self.flat = storage.rows.parameters.read(self._index).requires_grad_()  # [A, P]
        self._constants = [part.read(self._index) for part in storage.rows.constants]
        # Views of the copied buffers by name: layers update running statistics in place, and `put_back` writes the copies.
        self._views = {
            name: view
            for part, copy in zip(storage.rows.constants, self._constants, strict=True)
            for name, view in part.layout.unflatten(copy).items()
        }
        self._optimizer = storage.make(self.flat)
        self._optimizer.lr.copy_(rates)
        for name, tensor in self._optimizer.state.items():
            tensor.copy_(storage._moments[name].index_select(0, self._index))
        self.scales = storage.scales.of(self._index)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, [A, ...]; gradients of the parameters flow to `flat`."""
        return self._layout.unflatten(self.flat) | self._views

    def learn(self, gradient: Tensor, *, active: Tensor | None = None) -> None:
        """Take one optimiser step along the gradient [A, P] for the hosts that are `active` [A]; None: for all."""
        self._optimizer.step(gradient, active=active)

    def put_back(self) -> None:
        """Write weights, buffers, moments and loss scales back to the storage."""
        self.storage.rows.write(self._index, [self.flat.detach(), *self._constants])
        for name, tensor in self._optimizer.state.items():
            self.storage._moments[name].index_copy_(0, self._index, tensor)
        for name, tensor in self.scales.tensors.items():
            self.storage.scales.tensors[name].index_copy_(0, self._index, tensor)


Watch = Callable[[str, Tensor], Tensor]  # called with a slot and its activations before any seed; returns those to continue with


@dataclass(frozen=True)
class StackedModel:
    """Some hosts with their seeds as one network."""

    host: Stacked
    tensors: Mapping[str, Tensor]  # parameters and buffers of the hosts by name, [N, ...]
    stacked_seeds: Sequence[StackedSeed]
    precision: torch.dtype | None = None  # of activations under autocast; None: that of the weights
    recompute: Recompute | None = None  # runs the blocks whose activations are recomputed in the backward pass; None: keep all

    def losses(self, inputs: Tensor, targets: Tensor, *, training: bool, watch: Watch | None = None) -> Tensor:
        """Return the mean loss of every host [N] on its samples: inputs [B, N, ...], targets [B, N, ...]."""
        return self.losses_of_samples(inputs, targets, training=training, watch=watch).mean(0)

    def losses_of_samples(self, inputs: Tensor, targets: Tensor, *, training: bool, watch: Watch | None = None) -> Tensor:
        """Return the loss of every sample [B, N]; that of a sequence is the mean over its tokens."""
        device = inputs.device.type
        with torch.autocast(device, dtype=self.precision, enabled=self.precision is not None):
            logits = self.host(self.tensors, inputs, training=training, at=self._at_slots(watch), recompute=self.recompute)
        if self.precision is not None:
            logits = logits.float()
        each = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
        return each.view(len(inputs), inputs.shape[1], -1).mean(dim=2)

    def _at_slots(self, watch: Watch | None) -> Watch:
        """Return the function that the host calls after each slot: it shows the activations to `watch` and adds the seeds."""
        by_slot: dict[str, list[StackedSeed]] = defaultdict(list)
        for stacked in self.stacked_seeds:
            by_slot[stacked.slot].append(stacked)

        def at(slot: str, h: Tensor) -> Tensor:
            if watch is not None:
                h = watch(slot, h)
            return act(by_slot[slot], h) if slot in by_slot else h

        return at
