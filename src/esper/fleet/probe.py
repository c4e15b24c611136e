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
from esper.growth.blueprints import build_branch, cost_of, get_blueprint
from esper.growth.config import GrowthConfig
from esper.growth.garden import Garden
from esper.growth.place import CPU
from esper.growth.plot import Plot
from esper.growth.promise import STEPS_ALONG, Key, Promises, clip_scale, flops_of_asking, portions, signal_scale


def probes_of(banks: Banks, plots: Mapping[int, Plot[RowBed]], steps: int) -> list[RowProbe]:
    """For the hosts that ask: position among those that train -> plot. `steps` are those until the next decision.

    A probe looks at the last of them, or at the first in the first epoch of a host, as it does in a `Grower`, which cannot know how long
    that will be.
    """
    groups: dict[range, dict[int, tuple[Key, ...]]] = defaultdict(dict)
    for position, plot in plots.items():
        length = plot.chronicle.length
        costs = {key: cost_of(get_blueprint(key[1]), banks[key[0]].place) for key in _candidates(plot.garden)}
        plan = portions(costs, plot.garden.host, probe_steps=plot.config.probe_steps, length=length)
        first = 0 if length is None else max(steps - sum(portion.steps for portion in plan), 0)
        for portion in plan:
            if window := range(first, min(first + portion.steps, steps)):
                groups[window][position] = portion.candidates
            first += portion.steps
    gardens = {position: plot.garden for position, plot in plots.items()}
    return [RowProbe(banks, gardens, asked, window=window) for window, asked in groups.items()]


def _candidates(garden: Garden[RowBed]) -> Iterator[Key]:
    """Slot and blueprint of all that may grow now."""
    for slot in garden.beds:
        for candidate in garden.view(slot, {}).candidates:
            yield slot, candidate.blueprint


class RowProbe:
    """Looks in the steps of its `window`: `catch` in the forward pass, `ask` with the gradients of what was `caught`, `close` at its end.

    `asked` are the candidates of every host, built at the first step.
    """

    def __init__(self, banks: Banks, gardens: Mapping[int, Garden[RowBed]], asked: Mapping[int, Sequence[Key]], *, window: range) -> None:
        self.window = window
        self.flops: dict[int, int] = defaultdict(int)  # position -> FLOPs per sample of a step in the window
        self._banks, self._gardens = banks, gardens
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

    def __init__(self, slot: str, bank: SeedBank, blueprint: str, positions: list[int], configs: Sequence[GrowthConfig]) -> None:
        self.slot, self.species, self.positions = slot, bank.species[blueprint], positions
        self._bank, self._max_norm = bank, configs[0].seed_optimizer.max_grad_norm
        self._index = upload(positions, bank.place.device)
        self._weights = _weights(self.species, [config.seed for config in configs])
        self._live = {name: self._weights[name].requires_grad_() for name in self.species.live}  # [R, ...]
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
        moved = self._bank.make(expected[:, :0]).moves(expected * clip.to(expected.dtype).unsqueeze(1), STEPS_ALONG)
        return (moved.double() * expected.double()).sum(1)


@torch.no_grad()
def _weights(species: Species, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Branches of these random seeds, name -> [R, ...]; hosts with the same one have the same branch."""
    blueprint, place = get_blueprint(species.blueprint), replace(species.place, device=CPU)
    branches = {seed: dict(build_branch(blueprint, place, seed=seed).named_parameters()) for seed in set(seeds)}
    stacked = {name: torch.stack([branches[seed][name] for seed in seeds]) for name in species.branch_layout.shapes}
    flat = upload(species.branch_layout.flatten(stacked), species.place.device)
    return {name: tensor.clone() for name, tensor in species.branch_layout.unflatten(flat).items()}
