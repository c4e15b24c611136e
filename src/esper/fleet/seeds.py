"""Seeds of a fleet. A slot has one bank, with a row for every host, as wide as its largest blueprint: a slot holds one seed at a time.

While hosts train, the seeds of one blueprint in one slot form a crew: compact copies of their rows, which compute and learn as one.

Shapes: N = hosts, R = hosts of a crew, P = weights of a seed, B = samples, T = steps; h and what is added to it are [B, hosts, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.fleet.errors import FleetError
from esper.fleet.lowering import lower
from esper.fleet.optimizers import RowOptimizer, clip_rows_
from esper.fleet.rows import Layout
from esper.fleet.upload import upload
from esper.growth.bed import SeedPlan
from esper.growth.config import SeedOptimizer
from esper.growth.place import Place
from esper.growth.seed import Blending, Seed

MakeRowOptimizer = Callable[[Tensor], RowOptimizer]  # for weights [N, P]


class Species:
    """One blueprint in one slot: where the weights of its seeds lie in a row, and what they add to what flows by."""

    def __init__(self, place: Place, blueprint: str, blending: Blending) -> None:
        self.place, self.blueprint, self.blending = place, blueprint, blending
        template = Seed(place, blueprint, random_seed=0, blending=blending)
        if next(template.branch.buffers(), None) is not None:
            raise FleetError(f"blueprint {blueprint!r} holds buffers, which seeds of a fleet cannot have; leave it out of `blueprints`")
        self.layout = Layout.of(template)
        self.branch_layout = Layout.of(template.branch)  # the same without a gate
        self._branch = lower(template.branch)
        self._gate = None if template.gate is None else lower(template.gate)

    def delta(self, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
        """What the seeds add to h: `Seed.delta` for all rows at once."""
        branch = self.branch(_inside("branch.", weights), h)
        if self.blending == "multiply":
            return h * branch.tanh()
        if self._gate is not None:
            pooled = h if self.place.kind == "dense" else h.mean(dim=self._pooled(h))
            opening = self._gate(_inside("gate.", weights), pooled, training=True).sigmoid()  # [B, R, 1]
            return opening.reshape(*h.shape[:2], *([1] * (h.ndim - 2))) * branch
        return branch

    def branch(self, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
        """What the branches make of h, whatever becomes of it; the names of the weights are those of `branch_layout`."""
        return self._branch(weights, h, training=True)

    def _pooled(self, h: Tensor) -> tuple[int, ...]:
        return tuple(range(3, h.ndim)) if self.place.kind == "conv" else (2,)


def _inside(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class SeedBank:
    """The seeds of one slot, of these species. What a row holds beyond the weights of its seed, or without one, means nothing."""

    def __init__(self, place: Place, species: Mapping[str, Species], *, hosts: int, make: MakeRowOptimizer) -> None:
        self.place, self.species, self.make = place, species, make
        weights = torch.zeros(hosts, max(one.layout.width for one in species.values()), dtype=place.dtype, device=place.device)
        self.tensors: dict[str, Tensor] = {
            "weights": weights,
            "warmup": torch.zeros(hosts, dtype=torch.int64, device=place.device),  # steps in which the learning rate rises
            **make(weights).state,
        }

    def plant(self, row: int, plan: SeedPlan) -> None:
        layout = self.species[plan.blueprint].layout
        seed = Seed(self.place, plan.blueprint, random_seed=plan.random_seed, blending=plan.blending)
        for tensor in self.tensors.values():
            tensor[row] = 0
        with torch.no_grad():
            weights = layout.flatten({name: parameter.unsqueeze(0) for name, parameter in seed.named_parameters()})
        self.tensors["weights"][row, : layout.width] = weights[0]
        self.tensors["warmup"][row] = plan.warmup


@dataclass(frozen=True)
class Member:
    """Seeds of one blueprint in one slot, of some of the hosts."""

    slot: str
    species: Species
    weights: Mapping[str, Tensor]  # [R, ...]
    alpha: Tensor  # [R]
    index: Tensor | None  # which of the ensemble's hosts they belong to [R]; None: all of them, in order
    owners: Sequence[int] = ()  # the index as numbers, where somebody will ask without waiting for the device

    def act(self, h: Tensor) -> Tensor:
        own = h if self.index is None else of_hosts(h, self.index)
        delta = self.species.delta(self.weights, own)
        # Autocast computes norms in float32, which must not change the precision of the host.
        added = (self.alpha.view(1, -1, *[1] * (h.ndim - 2)) * delta).to(h.dtype)
        return h + added if self.index is None else _added_to_hosts(h, self.index, added)


def of_hosts(h: Tensor, index: Tensor) -> Tensor:
    """What flows in some hosts, [B, N, ...] to [B, R, ...].

    Where samples lie innermost in memory, as they do behind an unfolded convolution, they stay there: seeds are twice as fast for it.
    """
    if h.stride(0) == 1:
        return h.movedim(0, -1).index_select(0, index).movedim(-1, 0)
    return h.index_select(1, index)


def _added_to_hosts(h: Tensor, index: Tensor, added: Tensor) -> Tensor:
    if h.stride(0) == 1:
        return h.movedim(0, -1).index_add(0, index, added.movedim(0, -1)).movedim(-1, 0)
    return h.index_add(1, index, added)


class Crew:
    """Seeds of one blueprint in one slot, while their hosts train. `put_back` when they are done."""

    def __init__(self, bank: SeedBank, blueprint: str, rows: Sequence[int], positions: Sequence[int], alphas: Tensor) -> None:
        self.bank, self.species = bank, bank.species[blueprint]
        self.rows = list(positions)  # among the hosts that train
        self.index = upload(self.rows, bank.place.device)
        self._of_fleet = upload(rows, bank.place.device)
        self.alphas = alphas  # [T, R], that hold in each step
        self.norms: list[Tensor] = []  # [R] of every step
        self.flat = self._of_bank("weights").requires_grad_()
        self._warmup = self._of_bank("warmup")
        self._optimizer = bank.make(self.flat)
        for name, tensor in self._optimizer.state.items():
            tensor.copy_(self._of_bank(name))

    def weights(self) -> dict[str, Tensor]:
        return self.species.layout.unflatten(self.flat)

    def as_member(self, slot: str, *, step: int, hosts: int) -> Member:
        """Its part in an ensemble of so many hosts."""
        index = None if self.rows == list(range(hosts)) else self.index
        return Member(slot, self.species, self.weights(), self.alphas[step], index, self.rows)

    def learn(self, gradient: Tensor, rates: Tensor, config: SeedOptimizer) -> None:
        """One step by the gradient [R, P]. `rates` are those of all hosts that train. What is not finite is not stepped on."""
        norms = clip_rows_(gradient, math.inf if config.max_grad_norm is None else config.max_grad_norm)
        self.norms.append(norms)
        warm = (self._optimizer.state["steps"] + 1).to(rates.dtype) / (self._warmup + 1)
        self._optimizer.lr.copy_(rates.index_select(0, self.index) * config.learning_rate_factor * warm.clamp(max=1.0))
        self._optimizer.step(gradient, active=norms.isfinite())

    @torch.no_grad()
    def put_back(self) -> None:
        for name, rows in {"weights": self.flat, **self._optimizer.state}.items():
            whole = self.bank.tensors[name]
            (whole if whole.ndim == 1 else whole[:, : rows.shape[1]]).index_copy_(0, self._of_fleet, rows)

    def _of_bank(self, name: str) -> Tensor:
        rows = self.bank.tensors[name].index_select(0, self._of_fleet)
        return rows if rows.ndim == 1 else rows[:, : self.species.layout.width].contiguous()
