"""Seeds of a fleet, at rest. A slot has one bank, with a row for every host, as wide as its largest blueprint: it holds one seed at a time.

Shapes: N = hosts, R = some of them, P = weights of a seed, B = samples; h and what is added to it are [B, hosts, ...].

Seeds at work in an ensemble of hosts: taken out are the hosts that have them, and what they add is put back.

Shapes: B = samples, N = hosts of the ensemble, R = those of them with a seed of one blueprint in one slot; h is [B, N, ...].

Seeds while their hosts train. Those of one blueprint in one slot are a crew; all that learn by one backward pass are a cohort.

A crew computes as one. A cohort learns as one: its weights are rows of one tensor, and a step costs the same however many crews there are.

Shapes: A = hosts that train, R = seeds of a crew, Q = seeds of a cohort, P = weights of the widest of them, T = steps.

Seeds, gathered by slot and blueprint: what may grow, crews that learn, and members of an ensemble that is measured.

Shapes: R = seeds of one blueprint in one slot, T = steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.fleet.config import FleetError
from esper.fleet.device import upload
from esper.fleet.hosts import RowBackend
from esper.fleet.optimizers import RowOptimizer, clip_rows_
from esper.fleet.stacked.convolutions import has_triton
from esper.fleet.stacked.lowering import lower
from esper.fleet.stacked.rows import Layout
from esper.growth.config import GrowthConfig, SeedOptimizer
from esper.growth.host.layout import CPU, Place
from esper.growth.lifecycle.backend import SeedPlan
from esper.growth.lifecycle.slots import SlotLifecycles, options_for
from esper.growth.lifecycle.stages import Stage
from esper.growth.seeds.blueprints import get_blueprint, live_parameters
from esper.growth.seeds.seed import Blending, Seed

MakeRowOptimizer = Callable[[Tensor], RowOptimizer]  # for weights [N, P]


class SeedKind:
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


class SeedStorage:
    """The seeds of one slot, of these species. What a row holds beyond the weights of its seed, or without one, means nothing."""

    def __init__(self, place: Place, seed_kind: Mapping[str, SeedKind], *, hosts: int, make: MakeRowOptimizer) -> None:
        self.place, self.seed_kind, self.make = place, seed_kind, make
        weights = torch.zeros(hosts, max(one.layout.width for one in seed_kind.values()), dtype=place.dtype, device=place.device)
        self.tensors: dict[str, Tensor] = {
            "weights": weights,
            "warmup": torch.zeros(hosts, dtype=torch.int64, device=place.device),  # steps in which the learning rate rises
            **make(weights).state,
        }

    def plant(self, row: int, plan: SeedPlan) -> None:
        """Made on the CPU and sent in one piece, without waiting for the device."""
        layout, weights = self.seed_kind[plan.blueprint].layout, self.tensors["weights"]
        seed = Seed(replace(self.place, device=CPU), plan.blueprint, random_seed=plan.random_seed, blending=plan.blending)
        fresh = torch.zeros(1, weights.shape[1], dtype=weights.dtype)
        with torch.no_grad():
            fresh[:, : layout.width] = layout.flatten({name: parameter.unsqueeze(0) for name, parameter in seed.named_parameters()})
        place = upload([row], weights.device)
        for tensor in self.tensors.values():
            tensor.index_fill_(0, place, 0)
        weights.index_copy_(0, place, upload(fresh, weights.device))
        self.tensors["warmup"].index_fill_(0, place, plan.warmup)


@dataclass(frozen=True)
class StackedSeed:
    """Seeds of one blueprint in one slot, of some of the hosts."""

    slot: str
    seed_kind: SeedKind
    weights: Mapping[str, Tensor]  # [R, ...]
    alpha: Tensor  # [R]
    index: Tensor | None  # which of the ensemble's hosts they belong to [R]; None: all of them, in order
    owners: Sequence[int] = ()  # the index as numbers, where somebody will ask without waiting for the device

    def delta(self, own: Tensor) -> Tensor:
        """What they have to add to what flows in their hosts, [B, R, ...], before alpha."""
        # Autocast computes norms in float32, which must not change the precision of the host.
        return self.seed_kind.delta(self.weights, own).to(own.dtype)


def act(stacked_seeds: Sequence[StackedSeed], h: Tensor) -> Tensor:
    """h with what these seeds add to it, all of one slot and no two of one host. Hosts are gathered once for all of them."""
    if len(stacked_seeds) == 1 and stacked_seeds[0].index is None:
        return h + _times(stacked_seeds[0].alpha, stacked_seeds[0].delta(h), hosts=1)
    indices = [stacked.index for stacked in stacked_seeds if stacked.index is not None]
    assert len(indices) == len(stacked_seeds)  # who has all hosts is alone
    index, alpha = torch.cat(indices), torch.cat([stacked.alpha for stacked in stacked_seeds])
    parts = of_hosts(h, index).split_with_sizes([len(stacked.alpha) for stacked in stacked_seeds], dim=1)
    return _blended(h, index, alpha, [stacked.delta(own) for stacked, own in zip(stacked_seeds, parts, strict=True)])


def of_hosts(h: Tensor, index: Tensor) -> Tensor:
    """What flows in some hosts, [B, N, ...] to [B, R, ...], in the order in which h lies in memory.

    A kernel that left samples or channels innermost did so because what comes after it is faster that way.
    """
    order, back = _order_in_memory(h)
    lying = h.permute(order)
    own: Tensor = _rows().gather(lying, index) if _has_rows(h, order) else lying.index_select(order.index(1), index)
    return own.permute(back)


def _blended(h: Tensor, index: Tensor, alpha: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    """h with alpha [R] times the deltas added in the hosts of the index [R]; together the deltas are [B, R, ...]."""
    order, back = _order_in_memory(h)
    lying, hosts = h.permute(order), order.index(1)
    delta = torch.cat([part.permute(order) for part in deltas], dim=hosts)
    blended: Tensor = (
        _rows().blend(lying, index, alpha, delta)
        if _has_rows(h, order)
        else lying.index_add(hosts, index, _times(alpha, delta, hosts=hosts))
    )
    return blended.permute(back)


def _times(alpha: Tensor, delta: Tensor, *, hosts: int) -> Tensor:
    """Alpha [R] times delta, whose dimension `hosts` is that of the hosts, in delta's precision."""
    return (alpha.view(*[1] * hosts, -1, *[1] * (delta.ndim - hosts - 1)) * delta).to(delta.dtype)


def _has_rows(h: Tensor, order: Sequence[int]) -> bool:
    """Whether our own kernels move the hosts: on a GPU, where a host's part of a sample lies in one piece."""
    return h.is_cuda and has_triton() and order[:2] == [0, 1]


def _rows() -> Any:
    from esper.fleet.kernels import host_rows

    return host_rows


def _order_in_memory(h: Tensor) -> tuple[list[int], list[int]]:
    """Its dimensions from the outermost to the innermost, and the way back."""
    order = sorted(range(h.ndim), key=h.stride, reverse=True)
    return order, sorted(range(h.ndim), key=order.__getitem__)


@dataclass(frozen=True)
class SeedGroup:
    """Seeds of one blueprint in one slot, of some of the hosts at hand."""

    slot: str
    bank: SeedStorage
    blueprint: str
    hosts: Sequence[int]  # places among the hosts at hand
    index: Tensor  # the same, on the device [R]
    rows: Tensor  # of the bank [R]
    alphas: Tensor  # [T, R], that hold in each step

    @classmethod
    def of(cls, slot: str, bank: SeedStorage, blueprint: str, rows: Sequence[int], hosts: Sequence[int], alphas: Tensor) -> SeedGroup:
        device = bank.place.device
        return cls(slot, bank, blueprint, hosts, upload(hosts, device), upload(rows, device), alphas)

    @property
    def seed_kind(self) -> SeedKind:
        return self.bank.seed_kind[self.blueprint]

    def read(self, name: str) -> Tensor:
        """A copy of what the bank holds of its seeds, [R, ...]."""
        rows = self.bank.tensors[name].index_select(0, self.rows)
        return rows if rows.ndim == 1 else rows[:, : self.seed_kind.layout.width]

    def write(self, name: str, rows: Tensor) -> None:
        """Puts back rows that are as wide as those of `read`, or wider."""
        whole, width = self.bank.tensors[name], self.seed_kind.layout.width
        (whole if whole.ndim == 1 else whole[:, :width]).index_copy_(0, self.rows, rows if rows.ndim == 1 else rows[:, :width])

    def stacked(self, weights: Mapping[str, Tensor], alpha: Tensor, *, hosts: int) -> StackedSeed:
        """Its part in an ensemble of so many hosts."""
        index = None if list(self.hosts) == list(range(hosts)) else self.index
        return StackedSeed(self.slot, self.seed_kind, weights, alpha, index, self.hosts)


class SeedBatch:
    """`put_back` when they are done. There may be none."""

    def __init__(self, groups: Sequence[SeedGroup]) -> None:
        self.groups = groups
        if not groups:
            return
        self._counts = [len(group.hosts) for group in groups]
        self.hosts = torch.cat([group.index for group in groups])  # [Q]
        self._alphas = torch.cat([group.alphas for group in groups], dim=1)  # [T, Q]
        self.norms = torch.zeros_like(self._alphas)  # of the gradients of each step
        self.skipped = torch.zeros(len(self.hosts), dtype=torch.int64, device=self.hosts.device)  # [Q], steps that the host alone prevented
        self.flat = self._read("weights").requires_grad_()  # [Q, P]
        self._warmup = self._read("warmup")
        self._optimizer = groups[0].bank.make(self.flat)
        for name, tensor in self._optimizer.state.items():
            tensor.copy_(self._read(name))

    def __len__(self) -> int:
        """Crews."""
        return len(self.groups)

    def weights(self) -> list[dict[str, Tensor]]:
        """Of every crew, by name."""
        parts = self.flat.split_with_sizes(self._counts)
        layouts = [group.seed_kind.layout for group in self.groups]
        return [layout.unflatten(part[:, : layout.width]) for layout, part in zip(layouts, parts, strict=True)]

    def alphas(self, now: Tensor) -> Sequence[Tensor]:
        """Of every crew [R], in the step whose number [1] is on the device."""
        return self._alphas.index_select(0, now)[0].split_with_sizes(self._counts)

    def stacked_seeds(self, now: Tensor, *, hosts: int) -> list[StackedSeed]:
        """All crews as parts of an ensemble of so many hosts."""
        if not self.groups:
            return []
        parts = zip(self.groups, self.weights(), self.alphas(now), strict=True)
        return [group.stacked(weights, alpha, hosts=hosts) for group, weights, alpha in parts]

    def learn(self, gradient: Tensor, now: Tensor, rates: Tensor, config: SeedOptimizer, *, active: Tensor | None = None) -> None:
        """One step by the gradient [Q, P]. `rates` [A] are those of all hosts that train, `active` [A] those whose seeds may step.

        What is not finite is not stepped on.
        """
        norms = clip_rows_(gradient, math.inf if config.max_grad_norm is None else config.max_grad_norm)
        self.norms.index_copy_(0, now, norms.unsqueeze(0))
        warm = (self._optimizer.state["steps"] + 1).to(rates.dtype) / (self._warmup + 1)
        self._optimizer.lr.copy_(rates.index_select(0, self.hosts) * config.learning_rate_factor * warm.clamp(max=1.0))
        may_step = norms.isfinite()
        if active is not None:
            host_steps = active.index_select(0, self.hosts)
            self.skipped.add_(may_step & ~host_steps)
            may_step = may_step & host_steps
        self._optimizer.step(gradient, active=may_step)

    @torch.no_grad()
    def put_back(self) -> None:
        for name, rows in {"weights": self.flat, **self._optimizer.state}.items() if self.groups else ():
            for group, own in zip(self.groups, rows.split_with_sizes(self._counts), strict=True):
                group.write(name, own)

    def by_seed(self, norms: Tensor, skipped: Tensor) -> list[tuple[str, int, list[float], int]]:
        """Return slot, host, norms and skipped steps of each seed, given `self.norms` and `self.skipped` as read from the device."""
        seeds = [(group.slot, host) for group in self.groups for host in group.hosts]
        return [(*seed, own, int(count)) for seed, own, count in zip(seeds, norms.T.tolist(), skipped.tolist(), strict=True)]

    def _read(self, name: str) -> Tensor:
        """Of all crews, as wide as the widest."""
        rows = [group.read(name) for group in self.groups]
        width = max(own.shape[-1] for own in rows)
        return torch.cat(rows if rows[0].ndim == 1 else [F.pad(own, (0, width - own.shape[1])) for own in rows])


Banks = Mapping[str, SeedStorage]  # by slot, in the order in which they run
AllLifecycles = Sequence[tuple[int, SlotLifecycles[RowBackend]]]  # row of the fleet, and its lifecycles; positions are places in this list
Placed = tuple[int, int, list[float]]  # a seed: the row of its host, its position, and its alphas
SeedKinds = Mapping[str, Mapping[str, SeedKind]]  # slot -> blueprint -> kind of seed


def seed_kinds_for(places: Mapping[str, Place], growth: GrowthConfig) -> dict[str, dict[str, SeedKind]]:
    """What may grow in every slot; slots where nothing may are left out."""
    blending = growth.lifecycle.blending
    seed_kind = {
        name: {blueprint.name: SeedKind(place, blueprint.name, blending) for blueprint in options_for(place, growth)}
        for name, place in places.items()
    }
    if not any(seed_kind.values()):
        raise FleetError(
            f"none of the blueprints {growth.blueprints} fits any of the slots {', '.join(places)} with {blending!r} blending; "
            "leave `blueprints` out to allow all that fit"
        )
    return {name: some for name, some in seed_kind.items() if some}


def seed_batches_of(banks: Banks, all_lifecycles: AllLifecycles, steps: int) -> tuple[SeedBatch, SeedBatch]:
    """Seeds that learn in the next steps: those that the hosts see, and those in the shadow. Alphas move on the way."""
    placed: dict[tuple[str, str, bool], list[Placed]] = defaultdict(list)
    for position, (row, lifecycles) in enumerate(all_lifecycles):
        for slot, blueprint, is_connected, alphas in _alphas(lifecycles, steps):
            placed[slot, blueprint, is_connected].append((row, position, alphas))
    groups: dict[bool, list[SeedGroup]] = {True: [], False: []}
    order = list(banks)
    for (slot, blueprint, is_connected), some in sorted(placed.items(), key=lambda item: (order.index(item[0][0]), item[0])):
        groups[is_connected].append(_group(slot, banks[slot], blueprint, some))
    return SeedBatch(groups[True]), SeedBatch(groups[False])


def stacked_seeds_of(banks: Banks, all_lifecycles: AllLifecycles, *, only_kept: bool) -> list[StackedSeed]:
    """Seeds as they are now, of the hosts that see them."""
    placed: dict[tuple[str, str], list[Placed]] = defaultdict(list)
    for position, (row, lifecycles) in enumerate(all_lifecycles):
        for slot, backend in lifecycles.occupied():
            if backend.is_connected and (not only_kept or backend.life.stage is Stage.FOSSILIZED):
                placed[slot, str(backend.life.blueprint)].append((row, position, [backend.alpha]))
    groups = [_group(slot, banks[slot], blueprint, some) for (slot, blueprint), some in placed.items()]
    weights = [group.seed_kind.layout.unflatten(group.read("weights")) for group in groups]
    return [group.stacked(own, group.alphas[0], hosts=len(all_lifecycles)) for group, own in zip(groups, weights, strict=True)]


def _group(slot: str, bank: SeedStorage, blueprint: str, some: Sequence[Placed]) -> SeedGroup:
    alphas = upload([alphas for _, _, alphas in some], bank.place.device, bank.place.dtype).T.contiguous()
    return SeedGroup.of(slot, bank, blueprint, [row for row, _, _ in some], [position for _, position, _ in some], alphas)


def _alphas(lifecycles: SlotLifecycles[RowBackend], steps: int) -> Iterable[tuple[str, str, bool, list[float]]]:
    """Of every seed of a host that learns: slot, blueprint, whether the host sees it, and its alpha in each of the steps to come."""
    backends = dict(lifecycles.occupied())
    moving = [backend for backend in backends.values() if backend.life.ramp is not None]
    alphas = {name: [backend.alpha] * steps for name, backend in backends.items()}
    if moving:
        for step in range(steps):
            for name, backend in backends.items():
                alphas[name][step] = backend.alpha
            lifecycles.tick()
    return [(name, str(backend.life.blueprint), backend.is_connected, alphas[name]) for name, backend in backends.items()]
