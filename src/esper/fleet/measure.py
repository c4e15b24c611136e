"""Measure all hosts of a fleet at once: validation losses, contributions of seeds, finite weights, and the first-order probe.

A contribution takes one pass with all seeds connected, and one pass for each slot without its seed. The probe estimates the gain of each
candidate (a blueprint in a slot); `esper.growth.measure.probe` explains the estimate. All hosts that ask about one candidate are probed
together. Width candidates are probed in a pass of their own, so that the training stays the same to the last bit.

Shapes: A = hosts that are measured, R = those of them with a seed on trial in one slot, or that are probed for one candidate,
V = validation batches, L = weights of a candidate's zeroed layer, B = samples of a batch, M = all samples of a split.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.devices import upload
from esper.fleet.hosts import Host, RowBackend
from esper.fleet.seed_groups import AnyKind, SeedKind, SeedStorage, SeedStorages, SomeSeeds, StackedSeed, of_hosts, own_units
from esper.fleet.stacked_model import Arrangement, StackedModel
from esper.fleet.width import WidthKind, statistics_of
from esper.gradients import NoLossScales
from esper.growth.host.layout import CPU
from esper.growth.lifecycle.decisions import slot_states
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.stages import Cost
from esper.growth.measure.probe import STEPS_ALONG, clip_scale, evaluated, flops_of_asking, portions, signal_scale
from esper.growth.measure.promises import Key, Promises
from esper.growth.seeds.blueprints import build_branch, cost_of, get_blueprint
from esper.growth.seeds.width import CANDIDATE


@dataclass(frozen=True)
class Samples:
    """Samples to measure on, in batches of a fixed order."""

    inputs: Tensor  # [M, ...]
    targets: Tensor  # [M, ...]
    batch_size: int
    at_once: int  # samples of a forward pass, a multiple of batch_size

    @property
    def sizes(self) -> list[int]:
        """Number of samples of every batch."""
        return [len(part) for part in torch.split(self.targets, self.batch_size)]

    def passes(self) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and targets of every forward pass."""
        return list(zip(torch.split(self.inputs, self.at_once), torch.split(self.targets, self.at_once), strict=True))

    def __len__(self) -> int:
        return len(self.targets)


class HostLosses(NamedTuple):
    """Validation losses of hosts, all of which see the same samples."""

    of_batches: Tensor  # [V, A] means
    of_samples: Tensor  # [M, R] of the hosts that were asked for


@torch.inference_mode()
def losses_of(stacked_model: StackedModel, samples: Samples, *, by_sample: Sequence[int] = ()) -> HostLosses:
    """Return the mean loss of every host on every batch, and the losses of all samples of the hosts at the positions `by_sample`."""
    of_batches, of_samples = list[Tensor](), list[Tensor]()
    weights = next(iter(stacked_model.tensors.values()))
    hosts, index = len(weights), upload(list(by_sample), weights.device, torch.long)
    for inputs, targets in samples.passes():
        shared = (tensor.unsqueeze(1).expand(-1, hosts, *tensor.shape[1:]) for tensor in (inputs, targets))
        each = stacked_model.losses_of_samples(*shared, training=False)
        of_batches += [batch.mean(0) for batch in torch.split(each, samples.batch_size)]
        of_samples.append(each.index_select(1, index))
    return HostLosses(torch.stack(of_batches), torch.cat(of_samples))


def losses_without(stacked_model: StackedModel, samples: Samples, trials: Mapping[str, Sequence[int]]) -> dict[str, HostLosses]:
    """Return for each slot the losses of the hosts with a seed on trial there, without that seed.

    `trials` maps a slot to the positions of these hosts.
    """
    return {
        slot: losses_of(part_of(stacked_model, hosts, without=slot), samples, by_sample=range(len(hosts))) for slot, hosts in trials.items()
    }


def mean_losses(stacked_model: StackedModel, samples: Samples) -> Tensor:
    """Return the mean loss of every host on all samples [A], on the CPU."""
    return _mean_over_samples(losses_of(stacked_model, samples).of_batches, samples)


def contributions(stacked_model: StackedModel, samples: Samples, seeds: Mapping[str, Sequence[int]]) -> Tensor:
    """Return the sum of the contributions of these seeds for every host [A], on the CPU. `seeds` maps a slot to positions of their hosts.

    Each contribution is measured alone: the loss without that seed minus the loss with all.
    """
    whole = mean_losses(stacked_model, samples)
    total = torch.zeros_like(whole)
    for slot, losses in losses_without(stacked_model, samples, seeds).items():
        total[seeds[slot]] += _mean_over_samples(losses.of_batches, samples) - whole[seeds[slot]]
    return total


def _mean_over_samples(losses: Tensor, samples: Samples) -> Tensor:
    """Return the mean over all samples [hosts] of losses that are means of batches [V, hosts]."""
    weights = torch.tensor(samples.sizes, dtype=torch.float64)
    return (losses.double().cpu() * weights.unsqueeze(1)).sum(0) / weights.sum()


def part_of(stacked_model: StackedModel, hosts: Sequence[int], *, without: str | None = None) -> StackedModel:
    """Return the stacked model of some hosts, given by position, without their seeds in the slot `without`."""
    device = next(iter(stacked_model.tensors.values())).device
    index = upload(hosts, device)
    tensors = {name: tensor.index_select(0, index) for name, tensor in stacked_model.tensors.items()}
    places = {host: place for place, host in enumerate(hosts)}
    parts = ((_part_of_seeds(stacked, places), stacked.slot == without) for stacked in stacked_model.stacked_seeds)
    # A width seed is switched off by its alpha, as in a single model: other seeds still read its units.
    stacked_seeds = [
        replace(part, alpha=torch.zeros_like(part.alpha)) if is_off else part
        for part, is_off in parts
        if part is not None and not (is_off and not part.seed_kind.plan)
    ]
    arrangement = stacked_model.arrangement and Arrangement.of(stacked_model.arrangement.formations, stacked_seeds, len(hosts))
    return StackedModel(stacked_model.host, tensors, stacked_seeds, stacked_model.precision, arrangement=arrangement)


def _part_of_seeds(stacked: StackedSeed, places: Mapping[int, int]) -> StackedSeed | None:
    """Return the seeds whose hosts are in `places` (old position -> new position); None where there are none."""
    staying = [number for number, owner in enumerate(stacked.owners) if owner in places]
    if not staying:
        return None
    remaining = [places[stacked.owners[number]] for number in staying]
    return stacked.part(SomeSeeds.of(staying, len(stacked.owners), remaining, len(places), stacked.alpha.device))


@torch.inference_mode()
def are_finite(stacked_model: StackedModel, trained: Iterable[str], hosts: int) -> Tensor:
    """Return whether all weights of a host and of its seeds are finite [hosts]. `trained` are the names of the host's trained weights."""
    found = torch.stack([stacked_model.tensors[name].flatten(1).isfinite().all(1) for name in trained]).all(0)
    for stacked in stacked_model.stacked_seeds:
        own = stacked.rows.isfinite().all(1)
        index = torch.arange(hosts, device=own.device) if stacked.index is None else stacked.index
        found = found.index_copy(0, index, found.index_select(0, index) & own)
    return found


def probes_of(seed_storages: SeedStorages, asking: Mapping[int, Host], steps: int) -> list[RowProbe]:
    """Return the probes of the hosts that ask for one, within the `steps` steps until the next decision.

    `asking` maps the position of a host among those that train to the host. Candidates are divided into portions, one after another, that
    fit the memory and FLOPs of the host. The portions take the last of the steps. In the first epoch of a host they take the first steps,
    as in a `Grower`, which does not know yet how long an epoch is.
    """
    # Hosts whose portions fall into the same steps share a probe.
    groups: dict[range, dict[int, tuple[Key, ...]]] = defaultdict(dict)
    changing: dict[range, set[int]] = defaultdict(set)
    for position, host in asking.items():
        lifecycles = host.lifecycles
        length = lifecycles.history.length
        keys = [key for key in _candidates(lifecycles) if key not in host.not_probed]
        costs = evaluated({key: _cost(lifecycles, *key) for key in keys}, lifecycles.host)
        plan = portions(costs, lifecycles.host, probe_steps=lifecycles.config.probe_steps, length=length)
        first = 0 if length is None else max(steps - sum(portion.steps for portion in plan), 0)
        for number, portion in enumerate(plan):
            if window := range(first, min(first + portion.steps, steps)):
                groups[window][position] = portion.candidates
                following = plan[number + 1].candidates if number + 1 < len(plan) else ()
                has_wide = any(get_blueprint(blueprint).share is not None for _, blueprint in (*portion.candidates, *following))
                if has_wide and len(window) == portion.steps:
                    changing[window].add(position)
            first += portion.steps
    all_lifecycles = {position: host.lifecycles for position, host in asking.items()}
    return [RowProbe(seed_storages, all_lifecycles, asked, changing[window], window=window) for window, asked in groups.items()]


def _candidates(lifecycles: Lifecycles[RowBackend]) -> Iterator[Key]:
    """Yield slot and blueprint of every candidate that may germinate now."""
    states = {state.place.name: state for state in slot_states(lifecycles)}
    for slot in lifecycles.options:  # in the order in which a model alone asks
        for candidate in states[slot].candidates:
            yield slot, candidate.blueprint


def _cost(lifecycles: Lifecycles[RowBackend], slot: str, blueprint: str) -> Cost:
    """Return the cost of a candidate, without a gate: that does not take part in a probe."""
    return cost_of(get_blueprint(blueprint), lifecycles.slots[slot].place_now())


class RowProbe:
    """A probe of some candidates of some hosts, in the steps of its `window`.

    In every step call `catch` in the forward pass, then `ask` with the gradients of the tensors in `caught`. Where there are `wide_hosts`,
    run a second pass of these hosts with `wide_candidates()`, and call `ask_width` with the gradients of the candidates' weights. Call
    `close` after the last step. `asked` maps the position of a host to its candidates. Their weights are drawn at the first step.
    `changing` are the hosts that would have other width candidates in their layers after the last step than in it, if they were alone.
    """

    def __init__(
        self,
        seed_storages: SeedStorages,
        all_lifecycles: Mapping[int, Lifecycles[RowBackend]],
        asked: Mapping[int, Sequence[Key]],
        changing: Collection[int],
        *,
        window: range,
    ) -> None:
        self.window, self.changing = window, changing
        self.flops: dict[int, int] = defaultdict(int)  # position -> FLOPs per sample of a step in the window
        self._seed_storages, self._lifecycles = seed_storages, all_lifecycles
        # Hosts that ask for a candidate, by position. Beside other kept seeds, a width candidate is of another kind.
        self._positions: dict[tuple[Key, AnyKind], list[int]] = defaultdict(list)
        for position, keys in asked.items():
            lifecycles = all_lifecycles[position]
            for slot, blueprint in keys:
                kind = seed_storages[slot].kind(blueprint, lifecycles.slots[slot].plan(blueprint))
                self._positions[(slot, blueprint), kind].append(position)
                self.flops[position] += flops_of_asking(_cost(lifecycles, slot, blueprint).flops)
        self._hosts: dict[str, set[int]] = defaultdict(set)  # slot -> hosts whose activations are caught
        self.wide_hosts: list[int] = []  # hosts with width candidates
        for ((slot, _), kind), positions in self._positions.items():
            if kind.plan:
                self.wide_hosts = sorted({*self.wide_hosts, *positions})
            else:
                self._hosts[slot].update(positions)
        self._trials: list[_Trial] = []
        self._found: Tensor | None = None  # the estimates, after `close`
        self._caught: dict[str, list[tuple[Sequence[int] | None, Tensor]]] = defaultdict(list)  # slot -> hosts (None: all) and activations

    def _begin(self) -> None:
        """Build the trials of all candidates at the first step."""
        if self._trials:
            return
        for number, (((slot, _), kind), positions) in enumerate(self._positions.items()):
            storage, lifecycles = self._seed_storages[slot], [self._lifecycles[position] for position in positions]
            if isinstance(kind, SeedKind):
                self._trials.append(_BranchTrial(slot, kind, storage, positions, lifecycles))
            else:
                places = [self.wide_hosts.index(position) for position in positions]
                self._trials.append(_WideTrial(slot, kind, storage, positions, lifecycles, places, order=CANDIDATE + number))

    def wide_candidates(self) -> list[StackedSeed]:
        """Return the width candidates, as seeds of `wide_hosts`. These read the new units by weights that are zero."""
        self._begin()
        return [trial.stacked for trial in self._trials if isinstance(trial, _WideTrial)]

    def catch(self, slot: str, h: Tensor, hosts: Sequence[int] | None) -> Tensor:
        """Keep the activations h [B, hosts, ...] of a probed slot. Return the activations that the host continues with.

        They are a copy, because the next layer may work in place.
        """
        if slot not in self._hosts or (hosts is not None and self._hosts[slot].isdisjoint(hosts)):
            return h
        if not h.requires_grad:  # everything before the slot is frozen, but its gradient is needed here
            h = h.detach().requires_grad_()
        self._caught[slot].append((hosts, h))
        return h.clone()

    @property
    def caught(self) -> list[Tensor]:
        """The caught activations. `ask` needs the gradient of the loss by each of them."""
        return [h for pieces in self._caught.values() for _, h in pieces]

    def ask(self, gradients: Sequence[Tensor], scales: NoLossScales) -> None:
        """Add this step to the estimate of every candidate in depth. `gradients` are those of `caught`, in order, times the loss scales."""
        self._begin()
        remaining = iter(gradients)
        activations: dict[str, tuple[tuple[int, ...] | None, Tensor, Tensor]] = {}
        for slot, pieces in self._caught.items():
            place = self._seed_storages[slot].place
            h = [own_units(place, piece.detach()) for _, piece in pieces]
            g = [own_units(place, next(remaining)) for _ in pieces]
            hosts = None if pieces[0][0] is None else tuple(host for some, _ in pieces for host in some or ())
            activations[slot] = (hosts, h[0], g[0]) if len(h) == 1 else (hosts, torch.cat(h, dim=1), torch.cat(g, dim=1))
        for trial in self._trials:
            if isinstance(trial, _BranchTrial):
                trial.add_step(*activations[trial.slot], scales)
        self._caught.clear()

    def ask_width(self, gradients: Sequence[Tensor], scales: NoLossScales) -> None:
        """Add this step to the estimate of every width candidate. `gradients` are those of their weights, times the loss scales."""
        remaining = iter(gradients)
        for trial in self._trials:
            if isinstance(trial, _WideTrial):
                trial.add_step(next(remaining), scales)

    def close(self) -> None:
        """Compute the estimates of all candidates and free their weights."""
        self._found = torch.cat([trial.promises() for trial in self._trials])
        self._trials = []

    def promises(self) -> Tensor:
        """Return the estimates of all candidates at a learning rate of 1, on the device. Give them to `by_position` once read."""
        assert self._found is not None
        return self._found

    def by_position(self, promises: Sequence[float]) -> dict[int, Promises]:
        """Return the estimates, as read from the device, by host. A candidate with fewer than two usable steps has none."""
        found: dict[int, Promises] = {position: {} for position in self.flops}
        keys = [(position, key) for (key, _), positions in self._positions.items() for position in positions]
        for (position, key), promise in zip(keys, promises, strict=True):
            if not math.isnan(promise):
                found[position][key] = promise
        return found


class _Trial:
    """One candidate for all hosts that ask about it. Each host has weights of its own, drawn from its random seed.

    Only the zeroed weights of a candidate (L numbers per host) have a gradient.
    """

    def __init__(
        self, slot: str, storage: SeedStorage, positions: list[int], lifecycles: Sequence[Lifecycles[RowBackend]], live: int
    ) -> None:
        self.slot, self.positions = slot, positions
        # All hosts have the same limit, and the same task, so the same unit of the loss.
        self._storage, self._max_norm, self._unit = storage, lifecycles[0].config.seed_optimizer.max_grad_norm, lifecycles[0].unit
        self._rows = upload(positions, storage.place.device)
        # Sum of the gradients [R, L], sum of their squared norms [R], and number of steps [R] over the steps with a finite gradient.
        self._sums = torch.zeros(len(positions), live, dtype=storage.place.dtype, device=storage.place.device)
        self._squares = torch.zeros(len(positions), dtype=torch.float64, device=storage.place.device)
        self._steps = torch.zeros_like(self._squares)

    def _add(self, gradient: Tensor) -> None:
        """Add the gradient [R, L] of one step. Changes it."""
        square = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64).square()
        counts = square < math.inf  # false for nan; `isfinite` would be four kernels
        is_left_out = ~counts
        self._sums += gradient.masked_fill_(is_left_out.unsqueeze(1), 0)
        self._squares += square.masked_fill_(is_left_out, 0)
        self._steps += counts

    def promises(self) -> Tensor:
        """Return the estimates [R] at a learning rate of 1: the optimiser's move times the expected gradient."""
        sum_square = self._sums.double().square().sum(1)
        expected = self._sums * signal_scale(sum_square, self._squares, self._steps).to(self._sums.dtype).unsqueeze(1)
        # Clip as in training, and ask the optimiser for its move along that gradient.
        clip = clip_scale(self._squares, self._steps, self._max_norm, unit=self._unit)
        moved = self._storage.make(expected[:, :0]).moves(expected * clip.to(expected.dtype).unsqueeze(1), STEPS_ALONG)
        return (moved.double() * expected.double()).sum(1)


class _BranchTrial(_Trial):
    """A candidate in depth: its gradient follows from the activations at the slot."""

    def __init__(
        self,
        slot: str,
        seed_kind: SeedKind,
        storage: SeedStorage,
        positions: list[int],
        lifecycles: Sequence[Lifecycles[RowBackend]],
    ) -> None:
        self._seed_kind = seed_kind
        self._weights = _draw_weights(seed_kind, [one.config.seed for one in lifecycles])
        self._live = {name: self._weights[name].requires_grad_() for name in seed_kind.live}  # [R, ...]
        super().__init__(slot, storage, positions, lifecycles, sum(weight[0].numel() for weight in self._live.values()))
        self._indices: dict[tuple[int, ...] | None, Tensor] = {None: self._rows}  # hosts of the activations -> places of its own among them

    def add_step(self, hosts: tuple[int, ...] | None, h: Tensor, g: Tensor, scales: NoLossScales) -> None:
        """Add one step, given activations h [B, hosts, ...] of these hosts (None: all) and the scaled gradient g of the loss by them."""
        if hosts is not None and hosts not in self._indices:  # only in the first step with these hosts, which is not recorded
            self._indices[hosts] = upload([hosts.index(position) for position in self.positions], self._rows.device)
        own, own_gradient = (of_hosts(tensor, self._indices[hosts]) for tensor in (h, g))
        output = self._seed_kind.branch(self._weights, own.to(self._sums.dtype))
        own_gradient = scales.unscaled(own_gradient, self._rows).to(self._sums.dtype)
        parts = torch.autograd.grad(output, list(self._live.values()), own_gradient)
        self._add(torch.cat([part.reshape(len(part), -1) for part in parts], dim=1))


class _WideTrial(_Trial):
    """A width candidate: it takes part in a second pass of its hosts as a seed that changes nothing, and gets its gradient there.

    `places` are those of its hosts in that pass.
    """

    def __init__(
        self,
        slot: str,
        kind: WidthKind,
        storage: SeedStorage,
        positions: list[int],
        lifecycles: Sequence[Lifecycles[RowBackend]],
        places: list[int],
        *,
        order: int,
    ) -> None:
        super().__init__(slot, storage, positions, lifecycles, len(kind.back))
        self._live = kind.back
        drawn = {one.config.seed: kind.build(random_seed=one.config.seed) for one in lifecycles}
        seeds, device = [drawn[one.config.seed] for one in lifecycles], storage.place.device
        with torch.no_grad():
            rows = torch.stack([nn.utils.parameters_to_vector(seed.parameters()) for seed in seeds])
            statistics = [[buffer.flatten() for buffer in statistics_of(seed).values()] for seed in seeds]
            buffers = torch.stack([torch.cat([rows.new_zeros(0), *own]) for own in statistics])
        weights = upload(rows, device).requires_grad_()
        alpha, orders = torch.ones(len(positions), dtype=rows.dtype, device=device), [order] * len(positions)
        self.stacked = StackedSeed(storage.place, kind, weights, alpha, upload(places, device), places, orders, upload(buffers, device))

    def add_step(self, gradient: Tensor, scales: NoLossScales) -> None:
        """Add one step, given the scaled gradient [R, ...] of all weights of the candidate."""
        live = gradient.index_select(1, self._live)
        scales.divide_(live, self._rows)
        self._add(live)


@torch.no_grad()
def _draw_weights(seed_kind: SeedKind, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Return the weights of branches drawn from these random seeds, name -> [R, ...]. Equal seeds give equal branches."""
    blueprint, place = get_blueprint(seed_kind.blueprint), replace(seed_kind.place, device=CPU)
    branches = {seed: dict(build_branch(blueprint, place, seed=seed).named_parameters()) for seed in set(seeds)}
    stacked = {name: torch.stack([branches[seed][name] for seed in seeds]) for name in seed_kind.branch_layout.shapes}
    flat = upload(seed_kind.branch_layout.flatten(stacked), seed_kind.place.device)
    return {name: tensor.clone() for name, tensor in seed_kind.branch_layout.unflatten(flat).items()}
