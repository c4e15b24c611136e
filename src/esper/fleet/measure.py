"""Measure all hosts of a fleet at once: validation losses, contributions of seeds, finite weights, and the first-order probe.

A contribution takes one pass with all seeds connected, and one pass for each slot without its seed. The probe estimates the gain of each
candidate (a blueprint in a slot); `esper.growth.measure.probe` explains the estimate. All hosts that ask about one candidate are probed
together.

Shapes: A = hosts that are measured, R = those of them with a seed on trial in one slot, or that are probed for one candidate,
V = validation batches, L = weights of a candidate's zeroed layer, B = samples of a batch, M = all samples of a split.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.fleet.device import upload
from esper.fleet.hosts import RowBackend
from esper.fleet.seed_groups import SeedKind, SeedStorage, SeedStorages, StackedSeed, of_hosts
from esper.fleet.stacked_model import StackedModel
from esper.growth.host.layout import CPU
from esper.growth.lifecycle.host_growth import HostGrowth
from esper.growth.lifecycle.slots import SlotLifecycles
from esper.growth.measure.probe import STEPS_ALONG, Key, Promises, clip_scale, flops_of_asking, portions, signal_scale
from esper.growth.seeds.blueprints import build_branch, cost_of, get_blueprint


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


@torch.inference_mode()
def losses_of(stacked_model: StackedModel, samples: Samples) -> Tensor:
    """Return the mean loss of every host on every batch [V, A]. All hosts see the same samples."""
    found: list[Tensor] = []
    hosts = len(next(iter(stacked_model.tensors.values())))
    for inputs, targets in samples.passes():
        shared = (tensor.unsqueeze(1).expand(-1, hosts, *tensor.shape[1:]) for tensor in (inputs, targets))
        each = stacked_model.losses_of_samples(*shared, training=False)
        found += [batch.mean(0) for batch in torch.split(each, samples.batch_size)]
    return torch.stack(found)


def losses_without(stacked_model: StackedModel, samples: Samples, trials: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return for each slot the losses [V, R] of the hosts with a seed on trial there, without that seed.

    `trials` maps a slot to the positions of these hosts.
    """
    return {slot: losses_of(part_of(stacked_model, hosts, without=slot), samples) for slot, hosts in trials.items()}


def mean_losses(stacked_model: StackedModel, samples: Samples) -> Tensor:
    """Return the mean loss of every host on all samples [A], on the CPU."""
    return _mean_over_samples(losses_of(stacked_model, samples), samples)


def contributions(stacked_model: StackedModel, samples: Samples, seeds: Mapping[str, Sequence[int]]) -> Tensor:
    """Return the sum of the contributions of these seeds for every host [A], on the CPU. `seeds` maps a slot to positions of their hosts.

    Each contribution is measured alone: the loss without that seed minus the loss with all.
    """
    whole = mean_losses(stacked_model, samples)
    total = torch.zeros_like(whole)
    for slot, losses in losses_without(stacked_model, samples, seeds).items():
        total[seeds[slot]] += _mean_over_samples(losses, samples) - whole[seeds[slot]]
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
    stacked_seeds = [
        part for stacked in stacked_model.stacked_seeds if stacked.slot != without and (part := _part_of_seeds(stacked, places)) is not None
    ]
    return StackedModel(stacked_model.host, tensors, stacked_seeds, stacked_model.precision)


def _part_of_seeds(stacked: StackedSeed, places: Mapping[int, int]) -> StackedSeed | None:
    """Return the seeds whose hosts are in `places` (old position -> new position); None where there are none."""
    owners = range(len(stacked.alpha)) if stacked.index is None else stacked.owners
    staying = [(number, places[owner]) for number, owner in enumerate(owners) if owner in places]
    if not staying:
        return None
    chosen = upload([number for number, _ in staying], stacked.alpha.device)
    weights = {name: tensor.index_select(0, chosen) for name, tensor in stacked.weights.items()}
    remaining = [place for _, place in staying]
    index = upload(remaining, stacked.alpha.device)
    return StackedSeed(stacked.slot, stacked.seed_kind, weights, stacked.alpha.index_select(0, chosen), index, remaining)


@torch.inference_mode()
def are_finite(stacked_model: StackedModel, trained: Iterable[str], hosts: int) -> Tensor:
    """Return whether all weights of a host and of its seeds are finite [hosts]. `trained` are the names of the host's trained weights."""
    found = torch.stack([stacked_model.tensors[name].flatten(1).isfinite().all(1) for name in trained]).all(0)
    for stacked in stacked_model.stacked_seeds:
        own = torch.stack([weight.flatten(1).isfinite().all(1) for weight in stacked.weights.values()]).all(0)
        index = torch.arange(hosts, device=own.device) if stacked.index is None else stacked.index
        found = found.index_copy(0, index, found.index_select(0, index) & own)
    return found


def probes_of(seed_storages: SeedStorages, asking: Mapping[int, HostGrowth[RowBackend]], steps: int) -> list[RowProbe]:
    """Return the probes of the hosts that ask for one, within the `steps` steps until the next decision.

    `asking` maps the position of a host among those that train to its growth. Candidates are divided into portions, one after another, that
    fit the memory and FLOPs of the host. The portions take the last of the steps. In the first epoch of a host they take the first steps,
    as in a `Grower`, which does not know yet how long an epoch is.
    """
    # Hosts whose portions fall into the same steps share a probe.
    groups: dict[range, dict[int, tuple[Key, ...]]] = defaultdict(dict)
    for position, host_growth in asking.items():
        length = host_growth.history.length
        costs = {key: cost_of(get_blueprint(key[1]), seed_storages[key[0]].place) for key in _candidates(host_growth.lifecycles)}
        plan = portions(costs, host_growth.lifecycles.host, probe_steps=host_growth.config.probe_steps, length=length)
        first = 0 if length is None else max(steps - sum(portion.steps for portion in plan), 0)
        for portion in plan:
            if window := range(first, min(first + portion.steps, steps)):
                groups[window][position] = portion.candidates
            first += portion.steps
    all_lifecycles = {position: host_growth.lifecycles for position, host_growth in asking.items()}
    return [RowProbe(seed_storages, all_lifecycles, asked, window=window) for window, asked in groups.items()]


def _candidates(lifecycles: SlotLifecycles[RowBackend]) -> Iterator[Key]:
    """Yield slot and blueprint of every candidate that may germinate now."""
    for slot in lifecycles.backends:
        for candidate in lifecycles.view(slot, {}).candidates:
            yield slot, candidate.blueprint


class RowProbe:
    """A probe of some candidates of some hosts, in the steps of its `window`.

    In every step call `catch` in the forward pass, then `ask` with the gradients of the tensors in `caught`. Call `close` after the last
    step. `asked` maps the position of a host to its candidates. Their branches are built at the first step.
    """

    def __init__(
        self,
        seed_storages: SeedStorages,
        all_lifecycles: Mapping[int, SlotLifecycles[RowBackend]],
        asked: Mapping[int, Sequence[Key]],
        *,
        window: range,
    ) -> None:
        self.window = window
        self.flops: dict[int, int] = defaultdict(int)  # position -> FLOPs per sample of a step in the window
        self._seed_storages, self._lifecycles = seed_storages, all_lifecycles
        self._positions: dict[Key, list[int]] = defaultdict(list)
        for position, keys in asked.items():
            for slot, blueprint in keys:
                self._positions[slot, blueprint].append(position)
                self.flops[position] += flops_of_asking(cost_of(get_blueprint(blueprint), seed_storages[slot].place).flops)
        self._slots = {slot for slot, _ in self._positions}
        self._trials: list[_Trial] = []
        self._found: Tensor | None = None  # the estimates, after `close`
        self._caught: dict[str, Tensor] = {}

    def catch(self, slot: str, h: Tensor) -> Tensor:
        """Keep the activations h [B, A, ...] of a probed slot. Return the activations that the host continues with.

        They are a copy, because the next layer may work in place.
        """
        if slot not in self._slots:
            return h
        if not h.requires_grad:  # everything before the slot is frozen, but its gradient is needed here
            h = h.detach().requires_grad_()
        self._caught[slot] = h
        return h.clone()

    @property
    def caught(self) -> list[Tensor]:
        """The caught activations. `ask` needs the gradient of the loss by each of them."""
        return list(self._caught.values())

    def ask(self, gradients: Sequence[Tensor]) -> None:
        """Add this step to the estimate of every candidate. `gradients` are those of `caught`, in order."""
        if not self._trials:
            self._trials = [
                _Trial(slot, self._seed_storages[slot], blueprint, positions, [self._lifecycles[position] for position in positions])
                for (slot, blueprint), positions in self._positions.items()
            ]
        by_slot = dict(zip(self._caught, gradients, strict=True))
        for trial in self._trials:
            trial.add_step(self._caught[trial.slot].detach(), by_slot[trial.slot])
        self._caught.clear()

    def close(self) -> None:
        """Compute the estimates of all candidates and free their branches."""
        self._found = torch.cat([trial.promises() for trial in self._trials])
        self._trials = []

    def promises(self) -> Tensor:
        """Return the estimates of all candidates at a learning rate of 1, on the device. Give them to `by_position` once read."""
        assert self._found is not None
        return self._found

    def by_position(self, promises: Sequence[float]) -> dict[int, Promises]:
        """Return the estimates, as read from the device, by host. A candidate with fewer than two usable steps has none."""
        found: dict[int, Promises] = {position: {} for position in self.flops}
        keys = [(position, key) for key, positions in self._positions.items() for position in positions]
        for (position, key), promise in zip(keys, promises, strict=True):
            if not math.isnan(promise):
                found[position][key] = promise
        return found


class _Trial:
    """One candidate for all hosts that ask about it. Each host has a branch of its own, drawn from its random seed.

    Only the weights of the branch's zeroed last layer (`_live`, L numbers per host) have a gradient.
    """

    def __init__(
        self, slot: str, storage: SeedStorage, blueprint: str, positions: list[int], lifecycles: Sequence[SlotLifecycles[RowBackend]]
    ) -> None:
        self.slot, self.seed_kind, self.positions = slot, storage.seed_kinds[blueprint], positions
        # All hosts have the same limit, and the same task, so the same unit of the loss.
        self._storage, self._max_norm, self._unit = storage, lifecycles[0].config.seed_optimizer.max_grad_norm, lifecycles[0].unit
        self._index = upload(positions, storage.place.device)
        self._weights = _draw_weights(self.seed_kind, [one.config.seed for one in lifecycles])
        self._live = {name: self._weights[name].requires_grad_() for name in self.seed_kind.live}  # [R, ...]
        first = next(iter(self._live.values()))
        # Sum of the gradients [R, L], sum of their squared norms [R], and number of steps [R] over the steps with a finite gradient.
        self._sums = first.new_zeros(len(positions), sum(weight[0].numel() for weight in self._live.values()))
        self._squares = torch.zeros(len(positions), dtype=torch.float64, device=first.device)
        self._steps = torch.zeros_like(self._squares)

    def add_step(self, h: Tensor, g: Tensor) -> None:
        """Add one step, given the activations h [B, A, ...] of the slot and the gradient g of the loss by them."""
        own, own_gradient = (of_hosts(tensor, self._index).to(self._sums.dtype) for tensor in (h, g))
        output = self.seed_kind.branch(self._weights, own)
        parts = torch.autograd.grad(output, list(self._live.values()), own_gradient)
        gradient = torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)  # [R, L]
        square = gradient.double().square().sum(1)
        counts = square.isfinite()
        self._sums += torch.where(counts.unsqueeze(1), gradient, 0)
        self._squares += torch.where(counts, square, 0)
        self._steps += counts

    def promises(self) -> Tensor:
        """Return the estimates [R] at a learning rate of 1: the optimiser's move times the expected gradient."""
        sum_square = self._sums.double().square().sum(1)
        expected = self._sums * signal_scale(sum_square, self._squares, self._steps).to(self._sums.dtype).unsqueeze(1)
        # Clip as in training, and ask the optimiser for its move along that gradient.
        clip = clip_scale(self._squares, self._steps, self._max_norm, unit=self._unit)
        moved = self._storage.make(expected[:, :0]).moves(expected * clip.to(expected.dtype).unsqueeze(1), STEPS_ALONG)
        return (moved.double() * expected.double()).sum(1)


@torch.no_grad()
def _draw_weights(seed_kind: SeedKind, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Return the weights of branches drawn from these random seeds, name -> [R, ...]. Equal seeds give equal branches."""
    blueprint, place = get_blueprint(seed_kind.blueprint), replace(seed_kind.place, device=CPU)
    branches = {seed: dict(build_branch(blueprint, place, seed=seed).named_parameters()) for seed in set(seeds)}
    stacked = {name: torch.stack([branches[seed][name] for seed in seeds]) for name in seed_kind.branch_layout.shapes}
    flat = upload(seed_kind.branch_layout.flatten(stacked), seed_kind.place.device)
    return {name: tensor.clone() for name, tensor in seed_kind.branch_layout.unflatten(flat).items()}
