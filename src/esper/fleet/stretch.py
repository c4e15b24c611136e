"""A stretch of training between two decisions: some hosts and all their seeds, every step one tensor program.

Weights, buffers and moments of these hosts are copied into compact tensors, trained there, and put back. In between nothing is asked of
the device: losses and norms stay there until the stretch is over.

Shapes: A = hosts that train, R = seeds of one crew, T = steps, B = samples; what flows is [B, A, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.fleet.data import FleetData
from esper.fleet.ensemble import Ensemble, Watch
from esper.fleet.host_bank import HostBank
from esper.fleet.lowering import Stacked
from esper.fleet.probe import RowProbe
from esper.fleet.seeds import Crew, Member
from esper.fleet.upload import upload
from esper.growth.config import SeedOptimizer


@dataclass(frozen=True)
class Plan:
    """What a stretch needs to know beside the tensors. Rows of crews are positions among `rows`."""

    rows: Sequence[int]  # of the fleet
    rates: Tensor  # [A] learning rates of the hosts
    connected: Sequence[tuple[str, Crew]]  # slot, seeds that the host sees
    in_shadow: Sequence[tuple[str, Crew]]  # seeds that learn in a second pass
    shadow_alpha: float
    precision: torch.dtype | None
    probes: Sequence[RowProbe] = ()


class Stretch:
    def __init__(self, host: HostBank, data: FleetData, plan: Plan, config: SeedOptimizer) -> None:
        self.plan, self._data, self._config = plan, data, config
        self._crew = host.crew(plan.rows, plan.rates)
        self._rows = upload(plan.rows, plan.rates.device)
        self._shadow = _Shadow(plan, host.slots) if plan.in_shadow else None

    def run(self, batches: Tensor) -> Tensor:
        """Trains on the samples [T, B, A], step by step. Gives the losses [T, A]."""
        losses = [self._step(step, index) for step, index in enumerate(batches)]
        for _, crew in (*self.plan.connected, *self.plan.in_shadow):
            crew.put_back()
        self._crew.put_back()
        return torch.stack(losses)

    def _step(self, step: int, index: Tensor) -> Tensor:
        inputs, targets = self._data.batch(index, self._rows)
        crews = [crew for _, crew in self.plan.connected]
        members = [crew.as_member(slot, step=step, hosts=len(self.plan.rows)) for slot, crew in self.plan.connected]
        probes = [probe for probe in self.plan.probes if step in probe.window]
        ensemble = Ensemble(self._crew.stacked, self._crew.tensors(), members, self.plan.precision)
        losses = ensemble.losses(inputs, targets, training=True, watch=self._watch(probes))
        learning = [self._crew.flat, *(crew.flat for crew in crews)]
        caught = [h for probe in probes for h in probe.caught]
        gradients = torch.autograd.grad(losses.sum(), [*learning, *caught])
        self._crew.learn(gradients[0])
        for crew, gradient in zip(crews, gradients[1 : len(learning)], strict=True):
            crew.learn(gradient, self.plan.rates, self._config)
        _answer(probes, gradients[len(learning) :])
        if self._shadow is not None:
            self._shadow.step(self._crew.stacked, self._crew.tensors(), inputs, targets, step, self._config)
        return losses.detach()

    def _watch(self, probes: Sequence[RowProbe]) -> Watch | None:
        looking = [*([self._shadow.record] if self._shadow else []), *(probe.catch for probe in probes)]
        if not looking:
            return None

        def watch(slot: str, h: Tensor) -> Tensor:
            for look in looking:
                h = look(slot, h)
            return h

        return watch


def _answer(probes: Sequence[RowProbe], gradients: Sequence[Tensor]) -> None:
    """The gradients are those of what all probes have caught, in order."""
    for probe in probes:
        count = len(probe.caught)
        probe.ask(gradients[:count])
        gradients = gradients[count:]


class _Shadow:
    """The second pass of the hosts that raise seeds in the shadow: only those seeds learn from it.

    Up to the first such slot of a host nothing is computed again: what flowed there in the first pass does, as in a `Grower`. The host has
    stepped since, so behind that slot its new weights are at work.
    """

    def __init__(self, plan: Plan, slots: Sequence[str]) -> None:
        self.plan = plan
        self._recorded: dict[str, Tensor] = {}
        self._hosts = sorted({row for _, crew in plan.in_shadow for row in crew.rows})  # positions among the hosts that train
        first = {host: min(slots.index(slot) for slot, crew in plan.in_shadow if host in crew.rows) for host in self._hosts}
        self._device = plan.rates.device
        self._index = upload(self._hosts, self._device)
        self._begins = {
            slot: (upload(here, self._device), upload([self._hosts[place] for place in here], self._device))
            for number, slot in enumerate(slots)
            if (here := [place for place, host in enumerate(self._hosts) if first[host] == number])
        }
        self._places = {id(crew): self._placed(crew) for _, crew in (*plan.connected, *plan.in_shadow)}

    def record(self, slot: str, h: Tensor) -> Tensor:
        if slot in self._begins:
            self._recorded[slot] = h.detach().clone()  # the next layer may work in place
        return h

    def _replay(self, slot: str, h: Tensor) -> Tensor:
        if slot not in self._begins:
            return h
        here, there = self._begins[slot]
        return h.index_copy(1, here, self._recorded[slot].index_select(1, there))

    def step(self, host: Stacked, tensors: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, step: int, config: SeedOptimizer) -> None:
        crews = [crew for _, crew in self.plan.in_shadow]
        members = [member for slot, crew in self.plan.connected if (member := self._connected(slot, crew, step)) is not None]
        members += [self._learning(slot, crew) for slot, crew in self.plan.in_shadow]
        own = {name: tensor.detach().index_select(0, self._index) for name, tensor in tensors.items()}
        ensemble = Ensemble(host, own, members, self.plan.precision)
        losses = ensemble.losses(
            inputs.index_select(1, self._index), targets.index_select(1, self._index), training=True, watch=self._replay
        )
        gradients = torch.autograd.grad(losses.sum(), [crew.flat for crew in crews])
        for crew, gradient in zip(crews, gradients, strict=True):
            crew.learn(gradient, self.plan.rates, config)
        self._recorded.clear()

    def _connected(self, slot: str, crew: Crew, step: int) -> Member | None:
        """Those of a crew that take part, as they are now, without gradients of their own."""
        chosen, places = self._places[id(crew)]
        if not len(chosen):
            return None
        weights = {name: tensor.detach().index_select(0, chosen) for name, tensor in crew.weights().items()}
        return Member(slot, crew.species, weights, crew.alphas[step].index_select(0, chosen), places)

    def _learning(self, slot: str, crew: Crew) -> Member:
        alpha = torch.full_like(crew.alphas[0], self.plan.shadow_alpha)
        return Member(slot, crew.species, crew.weights(), alpha, self._places[id(crew)][1])

    def _placed(self, crew: Crew) -> tuple[Tensor, Tensor]:
        """Which seeds of a crew take part, and the places of their hosts among those that do."""
        taking_part = [number for number, row in enumerate(crew.rows) if row in self._hosts]
        places = [self._hosts.index(crew.rows[number]) for number in taking_part]
        return upload(taking_part, self._device, torch.int64), upload(places, self._device, torch.int64)
