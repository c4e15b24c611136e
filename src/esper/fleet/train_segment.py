"""A stretch of training between two decisions: some hosts and all their seeds, every step one tensor program.

Weights, buffers and moments of these hosts are copied into compact tensors, trained there, and put back. In between nothing is asked of
the device: losses and norms stay there until the stretch is over, and so does the number of the step, so that a step is the same thing
every time and can be recorded.

The batch of a step may be cut into parts, one after another: no more activations are there at once than those of one part.

Shapes: A = hosts that train, R = seeds of one crew, T = steps, B = samples; what flows is [B, A, ...].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from esper.fleet.data import FleetData
from esper.fleet.device import upload
from esper.fleet.measure import RowProbe
from esper.fleet.seed_groups import SeedBatch, SeedGroup, StackedSeed
from esper.fleet.stacked.lowering import Recompute
from esper.fleet.stacked_model import HostGroup, HostStorage, StackedModel, Watch
from esper.growth.config import SeedOptimizer


@dataclass(frozen=True)
class Plan:
    """What a stretch needs to know beside the tensors. Rows of crews are positions among `rows`."""

    rows: Sequence[int]  # of the fleet
    rates: Tensor  # [A] learning rates of the hosts
    connected: SeedBatch  # seeds that the host sees
    in_shadow: SeedBatch  # seeds that learn in a second pass
    shadow_alpha: float
    precision: torch.dtype | None
    probes: Sequence[RowProbe] = ()
    parts: int = 1  # of a batch
    recompute: Recompute | None = None  # how blocks are computed whose activations are not kept

    @property
    def seed_batches(self) -> dict[str, SeedBatch]:
        """Those that are not empty."""
        return {name: seeds for name, seeds in (("connected", self.connected), ("in shadow", self.in_shadow)) if len(seeds)}


Parts = Sequence[tuple[Tensor, Tensor]]  # inputs and targets of every part of a batch, [B / parts, A, ...]
Repeat = Callable[[Callable[[], None], int], None]  # does something so many times


class TrainSegment:
    def __init__(self, host: HostStorage, data: FleetData, plan: Plan, config: SeedOptimizer, repeat: Repeat) -> None:
        self.plan, self._data, self._config, self._repeat = plan, data, config, repeat
        self._group = host.group(plan.rows, plan.rates)
        self._rows = upload(plan.rows, plan.rates.device)
        self._shadow = _Shadow(plan, host.slots) if len(plan.in_shadow) else None
        self._now = torch.zeros(1, dtype=torch.int64, device=plan.rates.device)  # the number of the step

    def run(self, batches: Tensor) -> Tensor:
        """Trains on the samples [T, B, A], step by step. Gives the losses [T, A]."""
        losses = torch.zeros(len(batches), len(self.plan.rows), device=batches.device, dtype=self._group.flat.dtype)
        done = 0
        for probes, steps in self._sections(len(batches)):
            self._repeat(partial(self._step, batches, losses, probes), steps)
            done += steps
            for probe in probes:
                if probe.window.stop <= done:
                    probe.close()
        for learner in (self.plan.connected, self.plan.in_shadow, self._group):
            learner.put_back()
        return losses

    def _sections(self, steps: int) -> list[tuple[list[RowProbe], int]]:
        """Runs of steps in which the same probes look: they, and how many steps."""
        looking = [[probe for probe in self.plan.probes if step in probe.window] for step in range(steps)]
        return [(probes, len(list(some))) for probes, some in groupby(looking)]

    def _step(self, batches: Tensor, all_losses: Tensor, probes: Sequence[RowProbe]) -> None:
        index = batches.index_select(0, self._now)[0]
        parts = [self._data.batch(part, self._rows) for part in index.chunk(self.plan.parts)]
        seeds, scales = self.plan.connected, self._group.scales
        losses, gradient, *of_seeds = _means(self._pass(inputs, targets, probes) for inputs, targets in parts)
        stepping = scales.unscale_([(gradient, None), *((own, seeds.hosts) for own in of_seeds)])
        self._group.learn(gradient, active=stepping)
        for own in of_seeds:
            seeds.learn(own, self._now, self.plan.rates, self._config, active=stepping)
        if self._shadow is not None:
            stepping = self._shadow.step(self._group, parts, self._now, self._config, stepping)
        scales.update_(stepping)
        all_losses.index_copy_(0, self._now, losses.unsqueeze(0))
        self._now += 1

    def _pass(self, inputs: Tensor, targets: Tensor, probes: Sequence[RowProbe]) -> list[Tensor]:
        """Losses [A], and their gradients for the hosts and, where there are any, for the connected seeds, times the loss scales."""
        seeds = self.plan.connected
        stacked_seeds = seeds.stacked_seeds(self._now, hosts=len(self.plan.rows))
        stacked_model = StackedModel(self._group.stacked, self._group.tensors(), stacked_seeds, self.plan.precision, self.plan.recompute)
        losses = stacked_model.losses(inputs, targets, training=True, watch=self._watch(probes))
        learning = [self._group.flat, *([seeds.flat] if len(seeds) else [])]
        caught = [h for probe in probes for h in probe.caught]
        gradients = torch.autograd.grad(self._group.scales.scaled(losses).sum(), [*learning, *caught])
        _answer(probes, [self._group.scales.unscaled(gradient) for gradient in gradients[len(learning) :]])
        return [losses.detach(), *gradients[: len(learning)]]

    def _watch(self, probes: Sequence[RowProbe]) -> Watch | None:
        looking = [*([self._shadow.record] if self._shadow else []), *(probe.catch for probe in probes)]
        if not looking:
            return None

        def watch(slot: str, h: Tensor) -> Tensor:
            for look in looking:
                h = look(slot, h)
            return h

        return watch


def _means(parts: Iterable[list[Tensor]]) -> list[Tensor]:
    """Over the parts of a batch, tensor by tensor, in those of the first part."""
    remaining, count = iter(parts), 1
    total = next(remaining)
    for part in remaining:
        count += 1
        for tensor, own in zip(total, part, strict=True):
            tensor += own
    return total if count == 1 else [tensor.div_(count) for tensor in total]


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
        self._recorded: dict[str, list[Tensor]] = defaultdict(list)  # of every part
        raised = plan.in_shadow.groups
        self._hosts = sorted({host for group in raised for host in group.hosts})  # positions among the hosts that train
        first = {host: min(slots.index(group.slot) for group in raised if host in group.hosts) for host in self._hosts}
        self._device = plan.rates.device
        self._index = upload(self._hosts, self._device)
        self._begins = {
            slot: (upload(here, self._device), upload([self._hosts[place] for place in here], self._device))
            for number, slot in enumerate(slots)
            if (here := [place for place, host in enumerate(self._hosts) if first[host] == number])
        }
        self._beside = [self._placed(group) for group in plan.connected.groups]
        self._raised = [self._placed(group) for group in raised]

    def record(self, slot: str, h: Tensor) -> Tensor:
        if slot in self._begins:
            self._recorded[slot].append(h.detach().clone())  # the next layer may work in place
        return h

    def _replay(self, part: int, slot: str, h: Tensor) -> Tensor:
        if slot not in self._begins:
            return h
        here, there = self._begins[slot]
        return h.index_copy(1, here, self._recorded[slot][part].index_select(1, there))

    def step(self, host: HostGroup, parts: Parts, now: Tensor, config: SeedOptimizer, stepping: Tensor | None) -> Tensor | None:
        """Seeds of the hosts that are `stepping` learn. Gives those of them for whom nothing has overflowed here either."""
        seeds = self.plan.in_shadow
        (gradient,) = _means(self._pass(host, number, inputs, targets, now) for number, (inputs, targets) in enumerate(parts))
        stepping = host.scales.unscale_([(gradient, seeds.hosts)], stepping)
        seeds.learn(gradient, now, self.plan.rates, config, active=stepping)
        self._recorded.clear()
        return stepping

    def _pass(self, host: HostGroup, part: int, inputs: Tensor, targets: Tensor, now: Tensor) -> list[Tensor]:
        """The gradient of the seeds, times the loss scales."""
        stacked_seeds = [*self._connected(now), *self._learning()]
        own = {name: tensor.detach().index_select(0, self._index) for name, tensor in host.tensors().items()}
        stacked_model = StackedModel(host.stacked, own, stacked_seeds, self.plan.precision, self.plan.recompute)
        inputs, targets = (tensor.index_select(1, self._index) for tensor in (inputs, targets))
        losses = stacked_model.losses(inputs, targets, training=True, watch=partial(self._replay, part))
        return list(torch.autograd.grad(host.scales.scaled(losses, self._index).sum(), [self.plan.in_shadow.flat]))

    def _connected(self, now: Tensor) -> Iterator[StackedSeed]:
        """The connected seeds of these hosts, as they are now, without gradients of their own."""
        seeds = self.plan.connected
        if not any(len(chosen) for chosen, _ in self._beside):
            return
        for group, weights, alpha, (chosen, places) in zip(seeds.groups, seeds.weights(), seeds.alphas(now), self._beside, strict=True):
            if len(chosen):
                own = {name: tensor.detach().index_select(0, chosen) for name, tensor in weights.items()}
                yield StackedSeed(group.slot, group.seed_kind, own, alpha.index_select(0, chosen), places)

    def _learning(self) -> Iterator[StackedSeed]:
        seeds = self.plan.in_shadow
        for group, weights, (_, places) in zip(seeds.groups, seeds.weights(), self._raised, strict=True):
            yield StackedSeed(group.slot, group.seed_kind, weights, torch.full_like(group.alphas[0], self.plan.shadow_alpha), places)

    def _placed(self, group: SeedGroup) -> tuple[Tensor, Tensor]:
        """Which seeds of a crew take part, and the places of their hosts among those that do."""
        taking_part = [number for number, host in enumerate(group.hosts) if host in self._hosts]
        places = [self._hosts.index(group.hosts[number]) for number in taking_part]
        return upload(taking_part, self._device, torch.int64), upload(places, self._device, torch.int64)
