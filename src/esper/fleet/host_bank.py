"""The hosts of a fleet: weights, buffers, moments and loss scales, a row for each.

Shapes: N = hosts, A = those of them that train, P = weights of a host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.fleet.loss_scale import LossScales, NoLossScales
from esper.fleet.lowering import Stacked, lower
from esper.fleet.rows import Layout, ModuleRows
from esper.fleet.seeds import MakeRowOptimizer
from esper.fleet.upload import upload


class HostBank:
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

    def crew(self, rows: Sequence[int], rates: Tensor) -> HostCrew:
        return HostCrew(self, rows, rates)


class HostCrew:
    """Hosts that train together for a while, in compact copies of their rows."""

    def __init__(self, bank: HostBank, rows: Sequence[int], rates: Tensor) -> None:
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
