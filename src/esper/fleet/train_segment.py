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
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from esper.devices import upload
from esper.fleet.data import FleetData
from esper.fleet.measure import RowProbe
from esper.fleet.seed_groups import SeedBatch, SeedGroup, SomeSeeds, StackedSeed
from esper.fleet.stacked.lowering import Recompute
from esper.fleet.stacked_model import Arrangement, HostGroup, HostStorage, StackedModel, States, Watch
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
    def may_pad(self) -> bool:
        """Whether hosts may be computed with units of zero. With seeds in the shadow, both passes need activations of the same size."""
        return not len(self.in_shadow)

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
        stacked_seeds = plan.connected.stacked_seeds(self._now, hosts=len(plan.rows))
        self._arrangement = Arrangement.of(host.formations, stacked_seeds, len(plan.rows), is_padded=plan.may_pad)
        # Running statistics of the wide hosts, taken apart after the last step.
        self._states = None if self._arrangement is None else self._arrangement.states(self._group.tensors(), stacked_seeds)
        self._second_passes: dict[RowProbe, _SecondPass] = {}  # for the width candidates of probes

    def run(self, batches: Tensor) -> Tensor:
        """Train on the samples of `batches` [T, B, A], given by number. Return the losses [T, A], on the device."""
        losses = torch.zeros(len(batches), len(self.plan.rows), device=batches.device, dtype=self._group.flat.dtype)
        # Divide the steps into runs with the same active probes, and the same hosts whose second pass is computed as a whole: every step of
        # a run is the same program.
        active = [
            ([probe for probe in self.plan.probes if step in probe.window], self._computed_as_a_whole(step)) for step in range(len(batches))
        ]
        done = 0
        for (probes, whole), run in groupby(active):
            steps = len(list(run))
            self._repeat(partial(self._step, batches, losses, probes, whole), steps)
            done += steps
            for probe in probes:
                if probe.window.stop <= done:
                    probe.close()
        if self._arrangement is not None and self._states is not None:
            of_hosts, of_seeds = self._arrangement.apart(self._states)
            self._group.write(of_hosts)
            self.plan.connected.write_statistics(of_seeds)
        if self._shadow is not None:
            self._shadow.write_statistics()
        for learner in (self.plan.connected, self.plan.in_shadow, self._group):
            learner.put_back()
        return losses

    def _computed_as_a_whole(self, step: int) -> frozenset[int]:
        """Return the hosts whose second pass does not replay a part of the first: their width candidates have changed in between."""
        if self._shadow is None:
            return frozenset()
        return frozenset(host for probe in self.plan.probes if step == probe.window.stop - 1 for host in probe.changing)

    def _step(self, batches: Tensor, all_losses: Tensor, probes: Sequence[RowProbe], whole: frozenset[int]) -> None:
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
            stepping = self._shadow.step(self._group, parts, self._now, self._config, stepping, whole)
        scales.update_(stepping)

        all_losses.index_copy_(0, self._now, losses.unsqueeze(0))
        self._now += 1

    def _pass(self, inputs: Tensor, targets: Tensor, probes: Sequence[RowProbe]) -> list[Tensor]:
        """Return the losses [A], the gradient of the hosts [A, P], and that of the connected seeds [Q, P] where there are any.

        The gradients are still multiplied by the loss scales. The probes get the activations and their gradients.
        """
        seeds = self.plan.connected
        stacked_seeds = seeds.stacked_seeds(self._now, hosts=len(self.plan.rows))
        stacked_model = StackedModel(
            self._group.stacked,
            self._group.tensors(),
            stacked_seeds,
            self.plan.precision,
            self.plan.recompute,
            self._arrangement,
            self._states,
        )
        losses = stacked_model.losses(inputs, targets, training=True, watch=self._watch(probes))
        learning = [self._group.flat, *([seeds.flat] if len(seeds) else [])]
        caught = [h for probe in probes for h in probe.caught]  # activations that the probes need the gradient of
        gradients = torch.autograd.grad(self._group.scales.scaled(losses).sum(), [*learning, *caught])
        # Give every probe the gradients of the activations it caught, and those of its width candidates.
        remaining = gradients[len(learning) :]
        for probe in probes:
            count = len(probe.caught)
            probe.ask(remaining[:count], self._group.scales)
            remaining = remaining[count:]
            if probe.wide_hosts:
                self._ask_width(probe, inputs, targets)
        return [losses.detach(), *gradients[: len(learning)]]

    def _ask_width(self, probe: RowProbe, inputs: Tensor, targets: Tensor) -> None:
        """Compute the hosts of a probe again with its width candidates, and give the probe their gradients."""
        if probe not in self._second_passes:  # only in the first step of a probe, which is not recorded
            self._second_passes[probe] = _SecondPass(self.plan, probe.wide_hosts)
        second, candidates = self._second_passes[probe], probe.wide_candidates()
        losses = second.losses(self._group, candidates, inputs, targets, self._now)
        scaled = self._group.scales.scaled(losses, second.index)
        probe.ask_width(torch.autograd.grad(scaled.sum(), [stacked.rows for stacked in candidates]), self._group.scales)

    def _watch(self, probes: Sequence[RowProbe]) -> Watch | None:
        """Return one function that passes the activations to the shadow's recorder and to all probes; None where there are none."""
        watchers = [*([self._shadow.record] if self._shadow else []), *(probe.catch for probe in probes)]
        if not watchers:
            return None

        def watch(slot: str, h: Tensor, hosts: Sequence[int] | None) -> Tensor:
            for watcher in watchers:
                h = watcher(slot, h, hosts)
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


class _SecondPass:
    """A second pass of some hosts, given as positions in `plan.rows`. Hosts and connected seeds do not change; other seeds may learn.

    "Places" are places in the list of these hosts.
    """

    def __init__(self, plan: Plan, hosts: Sequence[int]) -> None:
        self.plan, self.hosts = plan, hosts
        self._device = plan.rates.device
        self.index = upload(hosts, self._device)
        self._places = {host: place for place, host in enumerate(hosts)}
        self._connected = [self.seeds_of(group) for group in plan.connected.groups]
        self._arrangement: Arrangement | None = None
        self._states: States | None = None
        self._is_arranged = False

    def seeds_of(self, group: SeedGroup) -> SomeSeeds:
        """Return the seeds of a group that belong to these hosts."""
        numbers = [number for number, host in enumerate(group.hosts) if host in self._places]
        places = [self._places[group.hosts[number]] for number in numbers]
        return SomeSeeds.of(numbers, len(group.hosts), places, len(self.hosts), self._device)

    def losses(
        self, host: HostGroup, learning: Sequence[StackedSeed], inputs: Tensor, targets: Tensor, now: Tensor, watch: Watch | None = None
    ) -> Tensor:
        """Return the losses of these hosts with their connected seeds and those that are `learning`; only the latter have a gradient."""
        stacked_seeds, own = [*self._connected_seeds(now), *learning], host.copies(self.index)
        if not self._is_arranged:  # in the first step, which is not recorded
            formations = host.storage.formations
            self._arrangement = Arrangement.of(formations, stacked_seeds, len(self.hosts), is_padded=self.plan.may_pad)
            self._states = None if self._arrangement is None else self._arrangement.states(own, stacked_seeds)
            self._is_arranged = True
        stacked_model = StackedModel(
            host.stacked, own, stacked_seeds, self.plan.precision, self.plan.recompute, self._arrangement, self._states
        )
        inputs, targets = (tensor.index_select(1, self.index) for tensor in (inputs, targets))
        return stacked_model.losses(inputs, targets, training=True, watch=watch)

    def statistics(self, kinds: int) -> list[Tensor]:
        """Return the running statistics of width seeds: those of the last `kinds` kinds, which are the ones that learn in this pass."""
        rows = self._arrangement.apart(self._states)[1] if self._arrangement is not None and self._states is not None else []
        return rows[len(rows) - kinds :]

    def _connected_seeds(self, now: Tensor) -> Iterator[StackedSeed]:
        """Yield the connected seeds of these hosts with their present weights, detached."""
        if not any(some.numbers for some in self._connected):
            return
        stacked_seeds = self.plan.connected.stacked_seeds(now, hosts=len(self.plan.rows))
        for stacked, some in zip(stacked_seeds, self._connected, strict=True):
            if some.numbers:
                part = stacked.part(some)
                yield replace(part, rows=part.rows.detach())


class _Shadow:
    """The second pass of the hosts with seeds in the shadow. Only those seeds learn from it.

    At the first such slot of each host, the activations of the first pass replace those of the second, as in a `Grower`. The host has taken
    its step in between, so the layers after that slot compute with the new weights. A host with a width seed in the shadow is computed as a
    whole, because new units begin inside a block.
    """

    def __init__(self, plan: Plan, slots: Sequence[str]) -> None:
        self.plan = plan
        # slot -> positions of hosts in the first pass (None: all) -> their activations, one tensor per part
        self._recorded: dict[str, dict[tuple[int, ...] | None, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        groups = plan.in_shadow.groups
        # Hosts of the second pass, as positions in `plan.rows`; "places" below are places in this list.
        self._hosts = sorted({host for group in groups for host in group.hosts})
        self._device = plan.rates.device
        self._second = _SecondPass(plan, self._hosts)
        self._learning = [self._second.seeds_of(group) for group in groups]

        # Slot -> hosts whose first slot in the shadow it is, as positions in the first pass.
        whole = {host for group in groups if group.seed_kind.plan for host in group.hosts}
        modules = [(slots.index(group.storage.place.module), group.hosts) for group in groups]
        first = {host: min(number for number, hosts in modules if host in hosts) for host in self._hosts if host not in whole}
        self._starts = {
            slot: {host for host, number in first.items() if slots[number] == slot} for slot in slots if slots.index(slot) in first.values()
        }
        self._whole: frozenset[int] = frozenset()  # hosts that replay nothing in this step
        self._sources: dict[Any, _Source] = {}  # cache of `_source`

    def record(self, slot: str, h: Tensor, hosts: Sequence[int] | None) -> Tensor:
        """Keep a copy of the first pass's activations h [B, hosts, ...] where the second pass needs them. Return h."""
        if slot in self._starts and (hosts is None or not self._starts[slot].isdisjoint(hosts)):
            # A copy, because the next layer may work in place.
            self._recorded[slot][None if hosts is None else tuple(hosts)].append(h.detach().clone())
        return h

    def _replay(self, part: int, slot: str, h: Tensor, places: Sequence[int] | None) -> Tensor:
        """Replace the activations of the hosts whose first shadow seed is in this slot by the recorded ones."""
        if slot not in self._starts:
            return h
        recorded = self._recorded[slot]
        key = slot, None if places is None else tuple(places), tuple(recorded), self._whole
        if key not in self._sources:  # only in the first step with these recordings, which is not captured by a graph
            self._sources[key] = self._source(slot, range(len(self._hosts)) if places is None else places, recorded)
        source = self._sources[key]
        if not source.pieces:
            return h
        values = [recorded[hosts][part].index_select(1, index) for hosts, index in source.pieces]
        return h.index_copy(1, source.targets, values[0] if len(values) == 1 else torch.cat(values, dim=1))

    def _source(self, slot: str, places: Sequence[int], recorded: Iterable[tuple[int, ...] | None]) -> _Source:
        """Return where the hosts of these places find their recorded activations."""
        targets: list[int] = []
        pieces: list[tuple[tuple[int, ...] | None, Tensor]] = []
        first_here = self._starts[slot] - self._whole
        starting = {self._hosts[place]: number for number, place in enumerate(places) if self._hosts[place] in first_here}
        for hosts in recorded:
            found = [host for host in starting if hosts is None or host in hosts]
            if found:
                targets += [starting[host] for host in found]
                pieces.append((hosts, upload([host if hosts is None else hosts.index(host) for host in found], self._device)))
        return _Source(pieces, upload(targets, self._device, torch.int64))

    def step(
        self,
        host: HostGroup,
        parts: Parts,
        now: Tensor,
        config: SeedOptimizerConfig,
        stepping: Tensor | None,
        whole: frozenset[int],
    ) -> Tensor | None:
        """Train the seeds of the hosts that are `stepping` [A]. Return `stepping` without the hosts whose gradients overflowed here.

        The hosts in `whole` replay nothing.
        """
        seeds, self._whole = self.plan.in_shadow, whole
        (gradient,) = _means(self._pass(host, number, inputs, targets, now) for number, (inputs, targets) in enumerate(parts))
        stepping = host.scales.unscale_([(gradient, seeds.hosts)], stepping)
        seeds.learn(gradient, now, self.plan.rates, config, active=stepping)
        self._recorded.clear()
        return stepping

    def write_statistics(self) -> None:
        """Write the running statistics of the seeds."""
        seeds = self.plan.in_shadow
        seeds.write_statistics(self._second.statistics(sum(bool(group.seed_kind.plan) for group in seeds.groups)))

    def _pass(self, host: HostGroup, part: int, inputs: Tensor, targets: Tensor, now: Tensor) -> list[Tensor]:
        """Return the gradient of the shadow seeds [Q, P], multiplied by the loss scales, on one part of the batch."""
        second, replay = self._second, partial(self._replay, part)
        losses = second.losses(host, list(self._shadow_seeds(now)), inputs, targets, now, watch=replay)
        return list(torch.autograd.grad(host.scales.scaled(losses, second.index).sum(), [self.plan.in_shadow.flat]))

    def _shadow_seeds(self, now: Tensor) -> Iterator[StackedSeed]:
        """Yield the seeds that learn, with the alpha that they would blend to."""
        stacked_seeds = self.plan.in_shadow.stacked_seeds(now, hosts=len(self.plan.rows))
        for stacked, some in zip(stacked_seeds, self._learning, strict=True):
            yield replace(stacked.part(some), alpha=torch.full_like(stacked.alpha, self.plan.shadow_alpha))


@dataclass(frozen=True)
class _Source:
    """Where hosts of the second pass find their recorded activations."""

    pieces: Sequence[tuple[tuple[int, ...] | None, Tensor]]  # a recording, and the places of these hosts in it
    targets: Tensor  # places of the same hosts in the activations of the second pass
