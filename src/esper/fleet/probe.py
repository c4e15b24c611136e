"""The first-order probe of a fleet: what every candidate would do for its host, from the host's own training steps.

What is asked, and how an answer becomes a promise, is written in `esper.growth.promise`. Here all hosts that ask about one blueprint in one
slot are answered at once.

Shapes: A = hosts that train, R = those of them that ask about one blueprint in one slot, L = weights of its zeroed layer, B = samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from esper.fleet.formation import Banks
from esper.fleet.members import of_hosts
from esper.fleet.row_bed import RowBed
from esper.fleet.seeds import SeedBank, Species
from esper.fleet.upload import upload
from esper.growth.blueprints import build_branch, cost_of, get_blueprint, live_parameters
from esper.growth.config import GrowthConfig
from esper.growth.garden import Garden
from esper.growth.place import CPU
from esper.growth.plot import Plot
from esper.growth.promise import STEPS_ALONG, Promises, clip_scale, signal_scale


def probes_of(banks: Banks, plots: Mapping[int, Plot[RowBed]], steps: int) -> list[RowProbe]:
    """For the hosts that ask: position among those that train -> plot. `steps` are those until the next decision.

    A probe looks at the last of them, or at the first in the first epoch of a host, as it does in a `Grower`, which cannot know how long
    that will be.
    """
    groups: dict[range, dict[int, Garden[RowBed]]] = defaultdict(dict)
    for position, plot in plots.items():
        count, is_first_epoch = plot.config.probe_steps, plot.chronicle.length is None
        first = 0 if is_first_epoch else max(steps - count, 0)
        groups[range(first, min(first + count, steps))][position] = plot.garden
    return [RowProbe(banks, gardens, window=window) for window, gardens in groups.items() if any(_candidates(gardens))]


def _candidates(gardens: Mapping[int, Garden[RowBed]]) -> Iterator[tuple[int, str, str]]:
    """Position, slot and blueprint of all that may grow now."""
    for position, garden in gardens.items():
        for slot in garden.beds:
            for candidate in garden.view(slot, {}).candidates:
                yield position, slot, candidate.blueprint


class RowProbe:
    """Looks in the steps of its `window`: `catch` in the forward pass, `ask` with the gradients of what was `caught`."""

    def __init__(self, banks: Banks, gardens: Mapping[int, Garden[RowBed]], *, window: range) -> None:
        self.window = window
        self.flops: dict[int, int] = defaultdict(int)  # position -> FLOPs per sample of a step in the window
        asking: dict[tuple[str, str], list[int]] = defaultdict(list)
        for position, slot, blueprint in _candidates(gardens):
            asking[slot, blueprint].append(position)
            self.flops[position] += 2 * cost_of(get_blueprint(blueprint), banks[slot].place).flops
        self._trials = [
            _Trial(slot, banks[slot], blueprint, positions, [gardens[position].config for position in positions])
            for (slot, blueprint), positions in asking.items()
        ]
        self._slots = {slot for slot, _ in asking}
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
        by_slot = dict(zip(self._caught, gradients, strict=True))
        for trial in self._trials:
            trial.answer(self._caught[trial.slot].detach(), by_slot[trial.slot])
        self._caught.clear()

    def promises(self) -> Tensor:
        """Those of all candidates, at a learning rate of 1: on the device, for `by_position`."""
        return torch.cat([trial.promises() for trial in self._trials])

    def by_position(self, promises: Sequence[float]) -> dict[int, Promises]:
        """What was read of `promises()`, by host. A candidate that has answered less than twice has none."""
        found: dict[int, Promises] = {position: {} for position in self.flops}
        keys = [(position, trial.slot, trial.species.blueprint) for trial in self._trials for position in trial.positions]
        for (position, slot, blueprint), promise in zip(keys, promises, strict=True):
            if not math.isnan(promise):
                found[position][slot, blueprint] = promise
        return found


class _Trial:
    """One blueprint in one slot, for all hosts that ask about it. Their branches are as different as their random seeds.

    `live` are the weights of its zeroed layer, which alone have a gradient; L numbers in each host.
    """

    def __init__(self, slot: str, bank: SeedBank, blueprint: str, positions: list[int], configs: Sequence[GrowthConfig]) -> None:
        self.slot, self.species, self.positions = slot, bank.species[blueprint], positions
        self._bank, self._max_norm = bank, configs[0].seed_optimizer.max_grad_norm
        self._index = upload(positions, bank.place.device)
        self._weights, names = _weights(self.species, [config.seed for config in configs])
        self._live = {name: self._weights[name].requires_grad_() for name in names}  # [R, ...]
        first = next(iter(self._live.values()))
        self._sums = first.new_zeros(len(positions), sum(weight[0].numel() for weight in self._live.values()))  # [R, L]
        self._squares = torch.zeros(len(positions), dtype=torch.float64, device=first.device)
        self._steps = torch.zeros_like(self._squares)  # that counted: one whose gradient overflowed does not

    def answer(self, h: Tensor, g: Tensor) -> None:
        """h and the gradient of the loss there [B, A, ...]."""
        own, pull = (of_hosts(tensor, self._index).to(self._sums.dtype) for tensor in (h, g))
        output = self.species.branch(self._weights, own)
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
        moved = self._bank.make(torch.zeros_like(expected)).moves(expected * clip.to(expected.dtype).unsqueeze(1), STEPS_ALONG)
        return (moved.double() * expected.double()).sum(1)


@torch.no_grad()
def _weights(species: Species, seeds: Sequence[int]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Branches of these random seeds, name -> [R, ...], and the names of what has a gradient at birth.

    Hosts with the same random seed have the same branch.
    """
    blueprint, place = get_blueprint(species.blueprint), replace(species.place, device=CPU)
    branches = {seed: build_branch(blueprint, place, seed=seed) for seed in set(seeds)}
    tensors = {seed: dict(branch.named_parameters()) for seed, branch in branches.items()}
    stacked = {name: torch.stack([tensors[seed][name] for seed in seeds]) for name in species.branch_layout.shapes}
    flat = upload(species.branch_layout.flatten(stacked), species.place.device)
    weights = {name: tensor.clone() for name, tensor in species.branch_layout.unflatten(flat).items()}
    return weights, live_parameters(blueprint, place, branches[seeds[0]])
