"""Measures all hosts of a fleet at once: validation losses, the contribution of each seed on trial, and the first-order probe.

A contribution takes one pass with everything on, and one for each slot without it. The probe estimates what each candidate would do for
its host; `esper.growth.measure.probe` explains the estimate. All hosts that ask about one blueprint in one slot are answered together.

Shapes: A = hosts that are measured, R = hosts with a seed on trial (or a question) in one slot, V = validation batches, L = weights of a
candidate's zeroed layer, B = samples.
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
from esper.fleet.seed_groups import Banks, SeedKind, SeedStorage, StackedSeed, of_hosts
from esper.fleet.stacked_model import StackedModel
from esper.growth.config import GrowthConfig
from esper.growth.host.layout import CPU
from esper.growth.lifecycle.host_growth import HostGrowth
from esper.growth.lifecycle.slots import SlotLifecycles
from esper.growth.measure.probe import STEPS_ALONG, Key, Promises, clip_scale, flops_of_asking, portions, signal_scale
from esper.growth.seeds.blueprints import build_branch, cost_of, get_blueprint


@dataclass(frozen=True)
class Samples:
    """What is measured on, in batches of a fixed order."""

    inputs: Tensor  # [M, ...]
    targets: Tensor
    batch_size: int
    at_once: int  # samples of a pass, whole batches

    @property
    def sizes(self) -> list[int]:
        """Samples of every batch."""
        return [len(part) for part in torch.split(self.targets, self.batch_size)]

    def passes(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(torch.split(self.inputs, self.at_once), torch.split(self.targets, self.at_once), strict=True))

    def __len__(self) -> int:
        return len(self.targets)


@torch.inference_mode()
def losses_of(stacked_model: StackedModel, samples: Samples) -> Tensor:
    """Mean loss of every host on every batch [V, hosts]; all hosts see the same samples."""
    found: list[Tensor] = []
    hosts = len(next(iter(stacked_model.tensors.values())))
    for inputs, targets in samples.passes():
        shared = (tensor.unsqueeze(1).expand(-1, hosts, *tensor.shape[1:]) for tensor in (inputs, targets))
        each = stacked_model.losses_of_samples(*shared, training=False)
        found += [batch.mean(0) for batch in torch.split(each, samples.batch_size)]
    return torch.stack(found)


def losses_without(stacked_model: StackedModel, samples: Samples, trials: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """For every slot with seeds on trial, slot -> positions of their hosts: the losses of those hosts without that seed [V, R]."""
    found = {}
    for slot, hosts in trials.items():
        some = part_of(stacked_model, hosts, without=slot)
        found[slot] = losses_of(some, samples)
    return found


def mean_losses(stacked_model: StackedModel, samples: Samples) -> Tensor:
    """Mean loss of every host on all samples [hosts], on the CPU."""
    return _over_samples(losses_of(stacked_model, samples), samples)


def contributions(stacked_model: StackedModel, samples: Samples, seeds: Mapping[str, Sequence[int]]) -> Tensor:
    """What these seeds, slot -> positions of their hosts, give to each host [hosts], every one against the host without it, on the CPU."""
    whole = mean_losses(stacked_model, samples)
    total = torch.zeros_like(whole)
    for slot, losses in losses_without(stacked_model, samples, seeds).items():
        total[seeds[slot]] += _over_samples(losses, samples) - whole[seeds[slot]]
    return total


def _over_samples(losses: Tensor, samples: Samples) -> Tensor:
    """The mean over all samples of what was measured batch by batch [V, hosts]."""
    weights = torch.tensor(samples.sizes, dtype=torch.float64)
    return (losses.double().cpu() * weights.unsqueeze(1)).sum(0) / weights.sum()


def part_of(stacked_model: StackedModel, hosts: Sequence[int], *, without: str | None = None) -> StackedModel:
    """Some of the hosts, by position; those seeds of theirs that are in the slot `without` are left out."""
    device = next(iter(stacked_model.tensors.values())).device
    index = upload(hosts, device)
    tensors = {name: tensor.index_select(0, index) for name, tensor in stacked_model.tensors.items()}
    places = {host: place for place, host in enumerate(hosts)}
    stacked_seeds = [
        part for stacked in stacked_model.stacked_seeds if stacked.slot != without and (part := _stacked(stacked, places)) is not None
    ]
    return StackedModel(stacked_model.host, tensors, stacked_seeds, stacked_model.precision)


def _stacked(stacked: StackedSeed, places: Mapping[int, int]) -> StackedSeed | None:
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
    """Which hosts have weights that are all finite [hosts], their seeds included; `trained` are the names of those that learn."""
    found = torch.stack([stacked_model.tensors[name].flatten(1).isfinite().all(1) for name in trained]).all(0)
    for stacked in stacked_model.stacked_seeds:
        own = torch.stack([weight.flatten(1).isfinite().all(1) for weight in stacked.weights.values()]).all(0)
        index = torch.arange(hosts, device=own.device) if stacked.index is None else stacked.index
        found = found.index_copy(0, index, found.index_select(0, index) & own)
    return found


def probes_of(banks: Banks, plots: Mapping[int, HostGrowth[RowBackend]], steps: int) -> list[RowProbe]:
    """For the hosts that ask: position among those that train -> plot. `steps` are those until the next decision.

    A probe looks at the last of them, or at the first in the first epoch of a host, as it does in a `Grower`, which cannot know how long
    that will be.
    """
    groups: dict[range, dict[int, tuple[Key, ...]]] = defaultdict(dict)
    for position, host_growth in plots.items():
        length = host_growth.history.length
        costs = {key: cost_of(get_blueprint(key[1]), banks[key[0]].place) for key in _candidates(host_growth.lifecycles)}
        plan = portions(costs, host_growth.lifecycles.host, probe_steps=host_growth.config.probe_steps, length=length)
        first = 0 if length is None else max(steps - sum(portion.steps for portion in plan), 0)
        for portion in plan:
            if window := range(first, min(first + portion.steps, steps)):
                groups[window][position] = portion.candidates
            first += portion.steps
    all_lifecycles = {position: host_growth.lifecycles for position, host_growth in plots.items()}
    return [RowProbe(banks, all_lifecycles, asked, window=window) for window, asked in groups.items()]


def _candidates(lifecycles: SlotLifecycles[RowBackend]) -> Iterator[Key]:
    """Slot and blueprint of all that may grow now."""
    for slot in lifecycles.backends:
        for candidate in lifecycles.view(slot, {}).candidates:
            yield slot, candidate.blueprint


class RowProbe:
    """Looks in the steps of its `window`: `catch` in the forward pass, `ask` with the gradients of what was `caught`, `close` at its end.

    `asked` are the candidates of every host, built at the first step.
    """

    def __init__(
        self, banks: Banks, all_lifecycles: Mapping[int, SlotLifecycles[RowBackend]], asked: Mapping[int, Sequence[Key]], *, window: range
    ) -> None:
        self.window = window
        self.flops: dict[int, int] = defaultdict(int)  # position -> FLOPs per sample of a step in the window
        self._banks, self._gardens = banks, all_lifecycles
        self._positions: dict[Key, list[int]] = defaultdict(list)
        for position, keys in asked.items():
            for slot, blueprint in keys:
                self._positions[slot, blueprint].append(position)
                self.flops[position] += flops_of_asking(cost_of(get_blueprint(blueprint), banks[slot].place).flops)
        self._slots = {slot for slot, _ in self._positions}
        self._trials: list[_Trial] = []
        self._found: Tensor | None = None  # when it is over
        self._caught: dict[str, Tensor] = {}

    def catch(self, slot: str, h: Tensor) -> Tensor:
        """h [B, A, ...], what flows there. Gives what is to flow on: a copy, for the next layer may work in place."""
        if slot not in self._slots:
            return h
        if not h.requires_grad:  # everything before the slot is frozen
            h = h.detach().requires_grad_()
        self._caught[slot] = h
        return h.clone()

    @property
    def caught(self) -> list[Tensor]:
        """What the loss is to be differentiated by."""
        return list(self._caught.values())

    def ask(self, gradients: Sequence[Tensor]) -> None:
        """Lets every candidate answer to this step. `gradients` are those of `caught`."""
        if not self._trials:
            self._trials = [
                _Trial(slot, self._banks[slot], blueprint, positions, [self._gardens[position].config for position in positions])
                for (slot, blueprint), positions in self._positions.items()
            ]
        by_slot = dict(zip(self._caught, gradients, strict=True))
        for trial in self._trials:
            trial.answer(self._caught[trial.slot].detach(), by_slot[trial.slot])
        self._caught.clear()

    def close(self) -> None:
        """Finds out what the candidates promise. Their branches are gone."""
        self._found = torch.cat([trial.promises() for trial in self._trials])
        self._trials = []

    def promises(self) -> Tensor:
        """Those of all candidates, at a learning rate of 1: on the device, for `by_position`."""
        assert self._found is not None
        return self._found

    def by_position(self, promises: Sequence[float]) -> dict[int, Promises]:
        """What was read of `promises()`, by host. A candidate that has answered less than twice has none."""
        found: dict[int, Promises] = {position: {} for position in self.flops}
        keys = [(position, key) for key, positions in self._positions.items() for position in positions]
        for (position, key), promise in zip(keys, promises, strict=True):
            if not math.isnan(promise):
                found[position][key] = promise
        return found


class _Trial:
    """One blueprint in one slot, for all hosts that ask about it. Their branches are as different as their random seeds.

    `live` are the weights of its zeroed layer, which alone have a gradient; L numbers in each host.
    """

    def __init__(self, slot: str, bank: SeedStorage, blueprint: str, positions: list[int], configs: Sequence[GrowthConfig]) -> None:
        self.slot, self.seed_kind, self.positions = slot, bank.seed_kind[blueprint], positions
        self._bank, self._max_norm = bank, configs[0].seed_optimizer.max_grad_norm
        self._index = upload(positions, bank.place.device)
        self._weights = _weights(self.seed_kind, [config.seed for config in configs])
        self._live = {name: self._weights[name].requires_grad_() for name in self.seed_kind.live}  # [R, ...]
        first = next(iter(self._live.values()))
        self._sums = first.new_zeros(len(positions), sum(weight[0].numel() for weight in self._live.values()))  # [R, L]
        self._squares = torch.zeros(len(positions), dtype=torch.float64, device=first.device)
        self._steps = torch.zeros_like(self._squares)  # that counted: one whose gradient overflowed does not

    def answer(self, h: Tensor, g: Tensor) -> None:
        """h and the gradient of the loss there [B, A, ...]."""
        own, pull = (of_hosts(tensor, self._index).to(self._sums.dtype) for tensor in (h, g))
        output = self.seed_kind.branch(self._weights, own)
        parts = torch.autograd.grad(output, list(self._live.values()), pull)
        gradient = torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)
        square = gradient.double().square().sum(1)
        counts = square.isfinite()
        self._sums += torch.where(counts.unsqueeze(1), gradient, 0)
        self._squares += torch.where(counts, square, 0)
        self._steps += counts

    def promises(self) -> Tensor:
        """[R], at a learning rate of 1."""
        together = self._sums.double().square().sum(1)
        expected = self._sums * signal_scale(together, self._squares, self._steps).to(self._sums.dtype).unsqueeze(1)
        clip = clip_scale(self._squares, self._steps, self._max_norm)
        moved = self._bank.make(expected[:, :0]).moves(expected * clip.to(expected.dtype).unsqueeze(1), STEPS_ALONG)
        return (moved.double() * expected.double()).sum(1)


@torch.no_grad()
def _weights(seed_kind: SeedKind, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Branches of these random seeds, name -> [R, ...]; hosts with the same one have the same branch."""
    blueprint, place = get_blueprint(seed_kind.blueprint), replace(seed_kind.place, device=CPU)
    branches = {seed: dict(build_branch(blueprint, place, seed=seed).named_parameters()) for seed in set(seeds)}
    stacked = {name: torch.stack([branches[seed][name] for seed in seeds]) for name in seed_kind.branch_layout.shapes}
    flat = upload(seed_kind.branch_layout.flatten(stacked), seed_kind.place.device)
    return {name: tensor.clone() for name, tensor in seed_kind.branch_layout.unflatten(flat).items()}
