"""Seeds of a fleet, at rest. A slot has one bank, with a row for every host, as wide as its largest blueprint: it holds one seed at a time.

Shapes: N = hosts, R = some of them, P = weights of a seed, B = samples; h and what is added to it are [B, hosts, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from esper.fleet.errors import FleetError
from esper.fleet.lowering import lower
from esper.fleet.optimizers import RowOptimizer
from esper.fleet.rows import Layout
from esper.fleet.upload import upload
from esper.growth.bed import SeedPlan
from esper.growth.blueprints import get_blueprint, live_parameters
from esper.growth.place import CPU, Place
from esper.growth.seed import Blending, Seed

MakeRowOptimizer = Callable[[Tensor], RowOptimizer]  # for weights [N, P]


class Species:
    """One blueprint in one slot: where the weights of its seeds lie in a row, and what they add to what flows by."""

    def __init__(self, place: Place, blueprint: str, blending: Blending) -> None:
        self.place, self.blueprint, self.blending = place, blueprint, blending
        if place.batch_axis != 0:
            raise FleetError(f"{place.name!r} gives [T, B, D], and hosts of a fleet have the batch first; use batch_first=True")
        template = Seed(place, blueprint, random_seed=0, blending=blending)
        if next(template.branch.buffers(), None) is not None:
            raise FleetError(f"blueprint {blueprint!r} holds buffers, which seeds of a fleet cannot have; leave it out of `blueprints`")
        self.layout = Layout.of(template)
        self.branch_layout = Layout.of(template.branch)  # the same without a gate
        self.live = live_parameters(get_blueprint(blueprint), place, template.branch)  # names of what has a gradient at birth
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
        return tuple(range(3, h.ndim)) if self.place.kind == "conv" else tuple(range(2, h.ndim - 1))


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
        """Made on the CPU and sent in one piece, without waiting for the device."""
        layout, weights = self.species[plan.blueprint].layout, self.tensors["weights"]
        seed = Seed(replace(self.place, device=CPU), plan.blueprint, random_seed=plan.random_seed, blending=plan.blending)
        fresh = torch.zeros(1, weights.shape[1], dtype=weights.dtype)
        with torch.no_grad():
            fresh[:, : layout.width] = layout.flatten({name: parameter.unsqueeze(0) for name, parameter in seed.named_parameters()})
        place = upload([row], weights.device)
        for tensor in self.tensors.values():
            tensor.index_fill_(0, place, 0)
        weights.index_copy_(0, place, upload(fresh, weights.device))
        self.tensors["warmup"].index_fill_(0, place, plan.warmup)
