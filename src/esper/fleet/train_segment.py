"""A training segment: the steps between two decisions, for some hosts and all their seeds, each step one tensor program.

`TrainSegment` copies weights, buffers and moments of these hosts into compact tensors, trains those, and writes them back. It reads nothing
from the device. Losses, norms and the step number stay there, so every step launches the same kernels and can be recorded as a CUDA graph.

One step:
1. forward and backward pass of the hosts with their connected seeds (`_pass`), in parts where the batch is accumulated;
2. optimiser step of the hosts and of the connected seeds;
3. second pass for the seeds in the shadow, which learn without being seen by the host (`_Shadow`);
4. update of the loss scales (float16).

Shapes: A = hosts that train, R = seeds of one group, Q = seeds of a batch of seeds, P = weights of a host or of the widest of those seeds,
T = steps, B = samples. Activations are [B, A, ...].
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
from esper.growth.config import SeedOptimizerConfig


@dataclass(frozen=True)
class Plan:
    """The hosts of a segment, the seeds that learn in it, and how. The hosts of seed groups are positions in `rows`."""

    rows: Sequence[int]  # rows of the fleet
    rates: Tensor  # [A] learning rates of the hosts
    connected: SeedBatch  # seeds that the host sees
    in_shadow: SeedBatch  # seeds that learn in a second pass
    shadow_alpha: float  # alpha of the seeds in the second pass
    precision: torch.dtype | None  # of activations; None: that of the weights
    probes: Sequence[RowProbe] = ()
    parts: int = 1  # number of parts that each batch is cut into; only the activations of one part are in memory at a time
    recompute: Recompute | None = None  # runs the blocks whose activations are recomputed in the backward pass; None: keep all

    @property
    def seed_batches(self) -> dict[str, SeedBatch]:
        """The batches of seeds that are not empty, by name."""
        return {name: seeds for name, seeds in (("connected", self.connected), ("in shadow", self.in_shadow)) if len(seeds)}


Parts = Sequence[tuple[Tensor, Tensor]]  # inputs and targets of every part of a batch, [B / parts, A, ...]
Repeat = Callable[[Callable[[], None], int], None]  # calls a function a number of times, or records it once and replays it


class TrainSegment:
    """The training of a plan's hosts and seeds up to the next decision. `run` may be called once."""

    def __init__(self, host: HostStorage, data: FleetData, plan: Plan, config: SeedOptimizerConfig, repeat: Repeat) -> None:
        self.plan, self._data, self._config, self._repeat = plan, data, config, repeat
        self._group = host.group(plan.rows, plan.rates)
        self._rows = upload(plan.rows, plan.rates.device)
        self._shadow = _Shadow(plan, host.slots) if len(plan.in_shadow) else None
        self._now = torch.zeros(1, dtype=torch.int64, device=plan.rates.device)  # the step number

    def run(self, batches: Tensor) -> Tensor:
        """Train on the samples of `batches` [T, B, A], given by number. Return the losses [T, A], on the device."""
        losses = torch.zeros(len(batches), len(self.plan.rows), device=batches.device, dtype=self._group.flat.dtype)
        # Divide the steps into runs with the same active probes: every step of a run is the same program.
        active = [[probe for probe in self.plan.probes if step in probe.window] for step in range(len(batches))]
        done = 0
        for probes, run in groupby(active):
            steps = len(list(run))
            self._repeat(partial(self._step, batches, losses, probes), steps)
            done += steps
            for probe in probes:
                if probe.window.stop <= done:
                    probe.close()
        for learner in (self.plan.connected, self.plan.in_shadow, self._group):
            learner.put_back()
        return losses

    def _step(self, batches: Tensor, all_losses: Tensor, probes: Sequence[RowProbe]) -> None:
        """Take one training step. All its inputs and results are tensors that stay in place, so that it can be replayed."""
        index = batches.index_select(0, self._now)[0]  # [B, A]
        parts = [self._data.batch(part, self._rows) for part in index.chunk(self.plan.parts)]
        seeds, scales = self.plan.connected, self._group.scales

        # `seed_gradients` has one element [Q, P], or none where no seed is connected.
        losses, gradient, *seed_gradients = _means(self._pass(inputs, targets, probes) for inputs, targets in parts)
        # A host steps only where its own gradient and those of its seeds are finite (`stepping` [A]; None: all step).
        stepping = scales.unscale_([(gradient, None), *((own, seeds.hosts) for own in seed_gradients)])
        self._group.learn(gradient, active=stepping)
        for own in seed_gradients:
            seeds.learn(own, self._now, self.plan.rates, self._config, active=stepping)

        # The second pass comes after the step of the hosts, as in a `Grower`.
        if self._shadow is not None:
            stepping = self._shadow.step(self._group, parts, self._now, self._config, stepping)
        scales.update_(stepping)

        all_losses.index_copy_(0, self._now, losses.unsqueeze(0))
        self._now += 1

    def _pass(self, inputs: Tensor, targets: Tensor, probes: Sequence[RowProbe]) -> list[Tensor]:
        """Return the losses [A], the gradient of the hosts [A, P], and that of the connected seeds [Q, P] where there are any.

        The gradients are still multiplied by the loss scales. The probes get the activations and their gradients.
        """
        seeds = self.plan.connected
        stacked_seeds = seeds.stacked_seeds(self._now, hosts=len(self.plan.rows))
        stacked_model = StackedModel(self._group.stacked, self._group.tensors(), stacked_seeds, self.plan.precision, self.plan.recompute)
        losses = stacked_model.losses(inputs, targets, training=True, watch=self._watch(probes))
        learning = [self._group.flat, *([seeds.flat] if len(seeds) else [])]
        caught = [h for probe in probes for h in probe.caught]  # activations that the probes need the gradient of
        gradients = torch.autograd.grad(self._group.scales.scaled(losses).sum(), [*learning, *caught])
        # Give every probe the gradients of the activations it caught.
        remaining = [self._group.scales.unscaled(gradient) for gradient in gradients[len(learning) :]]
        for probe in probes:
            count = len(probe.caught)
            probe.ask(remaining[:count])
            remaining = remaining[count:]
        return [losses.detach(), *gradients[: len(learning)]]

    def _watch(self, probes: Sequence[RowProbe]) -> Watch | None:
        """Return one function that passes the activations to the shadow's recorder and to all probes; None where there are none."""
        watchers = [*([self._shadow.record] if self._shadow else []), *(probe.catch for probe in probes)]
        if not watchers:
            return None

        def watch(slot: str, h: Tensor) -> Tensor:
            for watcher in watchers:
                h = watcher(slot, h)
            return h

        return watch


def _means(parts: Iterable[list[Tensor]]) -> list[Tensor]:
    """Return the mean of each tensor over the parts of a batch. Adds up in place, in the tensors of the first part."""
    remaining, count = iter(parts), 1
    total = next(remaining)
    for part in remaining:
        count += 1
        for tensor, own in zip(total, part, strict=True):
            tensor += own
    return total if count == 1 else [tensor.div_(count) for tensor in total]


class _Shadow:
    """The second pass of the hosts with seeds in the shadow. Only those seeds learn from it.

    At the first such slot of each host, the activations of the first pass replace those of the second, as in a `Grower`. The host has taken
    its step in between, so the layers after that slot compute with the new weights.
    """

    def __init__(self, plan: Plan, slots: Sequence[str]) -> None:
        self.plan = plan
        self._recorded: dict[str, list[Tensor]] = defaultdict(list)  # slot -> activations in the first pass, one tensor per part
        groups = plan.in_shadow.groups
        # Hosts of the second pass, as positions in `plan.rows`; "places" below are places in this list.
        self._hosts = sorted({host for group in groups for host in group.hosts})
        self._device = plan.rates.device
        self._index = upload(self._hosts, self._device)

        # For every slot that is the first of some hosts: their places in the second pass, and their positions in the first.
        first = {host: min(slots.index(group.slot) for group in groups if host in group.hosts) for host in self._hosts}
        self._starts = {
            slot: (upload(places, self._device), upload([self._hosts[place] for place in places], self._device))
            for number, slot in enumerate(slots)
            if (places := [place for place, host in enumerate(self._hosts) if first[host] == number])
        }
        self._connected_places = [self._placed(group) for group in plan.connected.groups]
        self._shadow_places = [self._placed(group) for group in groups]

    def record(self, slot: str, h: Tensor) -> Tensor:
        """Keep a copy of the first pass's activations h [B, A, ...] where the second pass needs them. Return h."""
        if slot in self._starts:
            self._recorded[slot].append(h.detach().clone())  # a copy, because the next layer may work in place
        return h

    def _replay(self, part: int, slot: str, h: Tensor) -> Tensor:
        """Replace the activations of the hosts whose first shadow seed is in this slot by the recorded ones."""
        if slot not in self._starts:
            return h
        places, positions = self._starts[slot]
        return h.index_copy(1, places, self._recorded[slot][part].index_select(1, positions))

    def step(self, host: HostGroup, parts: Parts, now: Tensor, config: SeedOptimizerConfig, stepping: Tensor | None) -> Tensor | None:
        """Train the seeds of the hosts that are `stepping` [A]. Return `stepping` without the hosts whose gradients overflowed here."""
        seeds = self.plan.in_shadow
        (gradient,) = _means(self._pass(host, number, inputs, targets, now) for number, (inputs, targets) in enumerate(parts))
        stepping = host.scales.unscale_([(gradient, seeds.hosts)], stepping)
        seeds.learn(gradient, now, self.plan.rates, config, active=stepping)
        self._recorded.clear()
        return stepping

    def _pass(self, host: HostGroup, part: int, inputs: Tensor, targets: Tensor, now: Tensor) -> list[Tensor]:
        """Return the gradient of the shadow seeds [Q, P], multiplied by the loss scales, on one part of the batch."""
        stacked_seeds = [*self._connected_seeds(now), *self._shadow_seeds()]
        own = {name: tensor.detach().index_select(0, self._index) for name, tensor in host.tensors().items()}
        stacked_model = StackedModel(host.stacked, own, stacked_seeds, self.plan.precision, self.plan.recompute)
        inputs, targets = (tensor.index_select(1, self._index) for tensor in (inputs, targets))
        losses = stacked_model.losses(inputs, targets, training=True, watch=partial(self._replay, part))
        return list(torch.autograd.grad(host.scales.scaled(losses, self._index).sum(), [self.plan.in_shadow.flat]))

    def _connected_seeds(self, now: Tensor) -> Iterator[StackedSeed]:
        """Yield the connected seeds of these hosts with their present weights, detached."""
        seeds = self.plan.connected
        if not any(len(chosen) for chosen, _ in self._connected_places):
            return
        parts = zip(seeds.groups, seeds.weights(), seeds.alphas(now), self._connected_places, strict=True)
        for group, weights, alpha, (chosen, places) in parts:
            if len(chosen):
                own = {name: tensor.detach().index_select(0, chosen) for name, tensor in weights.items()}
                yield StackedSeed(group.slot, group.seed_kind, own, alpha.index_select(0, chosen), places)

    def _shadow_seeds(self) -> Iterator[StackedSeed]:
        """Yield the seeds that learn, with the alpha that they would blend to."""
        seeds = self.plan.in_shadow
        for group, weights, (_, places) in zip(seeds.groups, seeds.weights(), self._shadow_places, strict=True):
            yield StackedSeed(group.slot, group.seed_kind, weights, torch.full_like(group.alphas[0], self.plan.shadow_alpha), places)

    def _placed(self, group: SeedGroup) -> tuple[Tensor, Tensor]:
        """Return which seeds of a group belong to hosts of the second pass, and the places of those hosts."""
        taking_part = [number for number, host in enumerate(group.hosts) if host in self._hosts]
        places = [self._hosts.index(group.hosts[number]) for number in taking_part]
        return upload(taking_part, self._device, torch.int64), upload(places, self._device, torch.int64)
