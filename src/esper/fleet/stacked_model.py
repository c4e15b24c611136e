"""The hosts of a fleet: weights, buffers, moments and loss scales, a row for each.

Shapes: N = hosts, A = those of them that train, P = weights of a host.

Some hosts of a fleet with the seeds in them, as one network.

The same code serves training (weights with gradients), the second pass of seeds in the shadow, validation, and validation without a seed.

Shapes: B = samples, N = the hosts of this ensemble, R = those of them with a seed of one crew; what flows is [B, N, ...].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.fleet.device import upload
from esper.fleet.optimizers import LossScales, NoLossScales
from esper.fleet.seed_groups import MakeRowOptimizer, StackedSeed, act
from esper.fleet.stacked.lowering import Recompute, Stacked, lower
from esper.fleet.stacked.rows import Layout, ModuleRows


class HostStorage:
    """`template` is any host of the architecture, `slots` are the names of its submodules after which seeds may grow.

    With `scales`, every host has a loss scale.
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
        """Everything that a host is made of, by name, a row for each host."""
        parts = {"weights": self.rows.parameters.flat.detach()}
        parts |= {f"constants {rows.layout.dtype}": rows.flat for rows in self.rows.constants}
        return parts | {f"moments {name}": tensor for name, tensor in self._moments.items()} | self.scales.tensors

    def load(self, rows: Sequence[int], modules: Sequence[nn.Module]) -> None:
        """New hosts in these rows, with nothing of those before."""
        places = upload(rows, self.rows.parameters.flat.device)
        self.rows.load(places, modules)
        for moment in self._moments.values():
            moment.index_fill_(0, places, 0)
        self.scales.reset_(places)

    def group(self, rows: Sequence[int], rates: Tensor) -> HostGroup:
        return HostGroup(self, rows, rates)


class HostGroup:
    """Hosts that train together for a while, in compact copies of their rows."""

    def __init__(self, bank: HostStorage, rows: Sequence[int], rates: Tensor) -> None:
        self.bank, self.stacked = bank, bank.stacked
        self._index = upload(rows, rates.device)
        self._layout: Layout = bank.rows.parameters.layout
        self.flat = bank.rows.parameters.read(self._index).requires_grad_()
        self._constants = [part.read(self._index) for part in bank.rows.constants]
        self._views = {
            name: view
            for part, copy in zip(bank.rows.constants, self._constants, strict=True)
            for name, view in part.layout.unflatten(copy).items()
        }
        self._optimizer = bank.make(self.flat)
        self._optimizer.lr.copy_(rates)
        for name, tensor in self._optimizer.state.items():
            tensor.copy_(bank._moments[name].index_select(0, self._index))
        self.scales = bank.scales.of(self._index)

    def tensors(self) -> dict[str, Tensor]:
        return self._layout.unflatten(self.flat) | self._views

    def learn(self, gradient: Tensor, *, active: Tensor | None = None) -> None:
        """One step by the gradient [A, P], of the hosts that are `active` [A]; None: of all."""
        self._optimizer.step(gradient, active=active)

    def put_back(self) -> None:
        self.bank.rows.write(self._index, [self.flat.detach(), *self._constants])
        for name, tensor in self._optimizer.state.items():
            self.bank._moments[name].index_copy_(0, self._index, tensor)
        for name, tensor in self.scales.tensors.items():
            self.bank.scales.tensors[name].index_copy_(0, self._index, tensor)


Watch = Callable[[str, Tensor], Tensor]  # slot, what flows there before any seed -> what flows on


@dataclass(frozen=True)
class StackedModel:
    host: Stacked
    tensors: Mapping[str, Tensor]  # of the hosts: parameters and buffers by name, [N, ...]
    stacked_seeds: Sequence[StackedSeed]
    precision: torch.dtype | None = None  # of activations, where they are not the weights'
    recompute: Recompute | None = None  # how blocks are computed in training whose activations are not kept

    def losses(self, inputs: Tensor, targets: Tensor, *, training: bool, watch: Watch | None = None) -> Tensor:
        """Mean loss of every host [N] on its samples: inputs [B, N, ...], targets [B, N, ...]."""
        return self.losses_of_samples(inputs, targets, training=training, watch=watch).mean(0)

    def losses_of_samples(self, inputs: Tensor, targets: Tensor, *, training: bool, watch: Watch | None = None) -> Tensor:
        """[B, N]."""
        device = inputs.device.type
        with torch.autocast(device, dtype=self.precision, enabled=self.precision is not None):
            logits = self.host(self.tensors, inputs, training=training, at=self._at(watch), recompute=self.recompute)
        if self.precision is not None:
            logits = logits.float()
        each = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
        return each.view(len(inputs), inputs.shape[1], -1).mean(dim=2)

    def _at(self, watch: Watch | None) -> Watch:
        by_slot: dict[str, list[StackedSeed]] = defaultdict(list)
        for stacked in self.stacked_seeds:
            by_slot[stacked.slot].append(stacked)

        def at(slot: str, h: Tensor) -> Tensor:
            if watch is not None:
                h = watch(slot, h)
            return act(by_slot[slot], h) if slot in by_slot else h

        return at
