"""The seeds of a fleet: where their weights are stored, how they compute, and how they learn, for many hosts at once.

- `SeedKind`: one blueprint in one slot. It computes the delta of many seeds of that kind in one call.
- `SeedStorage`: one per slot. It stores the weights and optimiser moments of the slot's seeds, one row per host.
- `StackedSeed`: seeds of one kind as part of a `StackedModel`. `act` adds the deltas of all seeds of a slot to the activations.
- `SeedGroup`: the seeds of one kind that learn together. They compute as one stacked seed.
- `SeedBatch`: all groups that learn from one backward pass. Their weights are rows of one tensor, so the cost of an optimiser step does not
  depend on the number of groups.

`seed_kinds_for`, `seed_batches_of` and `stacked_seeds_of` at the end of the file build these from the lifecycles of the hosts.

Shapes: B = samples, N = hosts of the stacked model, A = hosts that train, R = seeds of one kind, Q = seeds of a batch of seeds,
P = weights of the widest of those seeds, T = training steps. Activations h are [B, hosts, ...].
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
from esper.growth.config import GrowthConfig, SeedOptimizerConfig
from esper.growth.host.layout import CPU, Place
from esper.growth.lifecycle.backend import SeedPlan
from esper.growth.lifecycle.slots import SlotLifecycles, options_for
from esper.growth.lifecycle.stages import Stage
from esper.growth.seeds.blueprints import get_blueprint, live_parameters
from esper.growth.seeds.seed import Blending, Seed

MakeRowOptimizer = Callable[[Tensor], RowOptimizer]  # weights [N, P] -> an optimiser of these rows


class SeedKind:
    """One blueprint in one slot: the layout of a seed's weights in a row, and the computation of many such seeds at once."""

    def __init__(self, place: Place, blueprint: str, blending: Blending) -> None:
        self.place, self.blueprint, self.blending = place, blueprint, blending
        if place.batch_axis != 0:
            raise FleetError(
                f"the output of {place.name!r} is [T, B, D], but hosts of a fleet need the batch dimension first; use batch_first=True"
            )
        template = Seed(place, blueprint, random_seed=0, blending=blending)
        if next(template.branch.buffers(), None) is not None:
            raise FleetError(f"blueprint {blueprint!r} holds buffers, which seeds of a fleet cannot have; leave it out of `blueprints`")
        self.layout = Layout.of(template)  # of branch and gate
        self.branch_layout = Layout.of(template.branch)  # of the branch alone
        self.live = live_parameters(get_blueprint(blueprint), place, template.branch)  # names of the parameters with a gradient at birth
        self._branch = lower(template.branch)
        self._gate = None if template.gate is None else lower(template.gate)

    def delta(self, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
        """Return the change of h [B, R, ...] by the seeds, before alpha: `Seed.delta` for all rows at once."""
        branch = self.branch(_without_prefix("branch.", weights), h)
        if self.blending == "multiply":
            return h * branch.tanh()
        if self._gate is not None:
            # The gate sees h averaged over space (the dimensions after [B, R, C] of a conv) or over the sequence (those between [B, R] and
            # the features), and gives one number per sample.
            averaged = range(3, h.ndim) if self.place.kind == "conv" else range(2, h.ndim - 1)
            pooled = h if self.place.kind == "dense" else h.mean(dim=tuple(averaged))
            opening = self._gate(_without_prefix("gate.", weights), pooled, training=True).sigmoid()  # [B, R, 1]
            return opening.reshape(*h.shape[:2], *([1] * (h.ndim - 2))) * branch
        return branch

    def branch(self, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
        """Return the output of the branches for h [B, R, ...], without gate or blending. `weights` are named as in `branch_layout`."""
        return self._branch(weights, h, training=True)


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with the prefix, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class SeedStorage:
    """The seeds of one slot, one row per host, one seed per row. Rows are as wide as the largest of the slot's kinds of seeds.

    The end of a row that its seed does not need, and a row without a seed, hold arbitrary values.
    """

    def __init__(self, place: Place, seed_kinds: Mapping[str, SeedKind], *, hosts: int, make: MakeRowOptimizer) -> None:
        self.place, self.seed_kinds, self.make = place, seed_kinds, make  # `seed_kinds` maps a blueprint to its kind
        weights = torch.zeros(hosts, max(kind.layout.width for kind in seed_kinds.values()), dtype=place.dtype, device=place.device)
        self.tensors: dict[str, Tensor] = {
            "weights": weights,
            "warmup": torch.zeros(hosts, dtype=torch.int64, device=place.device),  # steps over which the learning rate of a seed rises
            **make(weights).state,
        }

    def plant(self, row: int, plan: SeedPlan) -> None:
        """Put a new seed into the row of a host. Does not wait for the device: the seed is built on the CPU and sent in one piece."""
        layout, weights = self.seed_kinds[plan.blueprint].layout, self.tensors["weights"]
        seed = Seed(replace(self.place, device=CPU), plan.blueprint, random_seed=plan.random_seed, blending=plan.blending)
        fresh = torch.zeros(1, weights.shape[1], dtype=weights.dtype)
        with torch.no_grad():
            fresh[:, : layout.width] = layout.flatten({name: parameter.unsqueeze(0) for name, parameter in seed.named_parameters()})
        # Clear the whole row first, so that the moments of the seed before do not stay.
        index = upload([row], weights.device)
        for tensor in self.tensors.values():
            tensor.index_fill_(0, index, 0)
        weights.index_copy_(0, index, upload(fresh, weights.device))
        self.tensors["warmup"].index_fill_(0, index, plan.warmup)


@dataclass(frozen=True)
class StackedSeed:
    """Seeds of one kind in a stacked model, at most one per host."""

    slot: str
    seed_kind: SeedKind
    weights: Mapping[str, Tensor]  # [R, ...]
    alpha: Tensor  # [R]
    index: Tensor | None  # positions of their hosts in the stacked model [R]; None: all hosts, in order
    owners: Sequence[int] = ()  # the same positions as Python numbers, where they are needed without reading the device

    def delta(self, own: Tensor) -> Tensor:
        """Return the deltas [B, R, ...] of the seeds, before alpha, for the activations `own` [B, R, ...] of their hosts."""
        # Autocast computes norms in float32, which must not change the precision of the host.
        return self.seed_kind.delta(self.weights, own).to(own.dtype)


def act(stacked_seeds: Sequence[StackedSeed], h: Tensor) -> Tensor:
    """Return h [B, N, ...] plus alpha times the deltas of these seeds. All belong to one slot, and a host has one of them at most."""
    if len(stacked_seeds) == 1 and stacked_seeds[0].index is None:
        return h + _times(stacked_seeds[0].alpha, stacked_seeds[0].delta(h), host_dim=1)
    indices = [stacked.index for stacked in stacked_seeds if stacked.index is not None]
    assert len(indices) == len(stacked_seeds)  # one without an index has every host, so it is the only one
    # Gather the hosts of all kinds of seeds at once, compute the deltas kind by kind, and scatter-add them at once.
    index, alpha = torch.cat(indices), torch.cat([stacked.alpha for stacked in stacked_seeds])
    parts = of_hosts(h, index).split_with_sizes([len(stacked.alpha) for stacked in stacked_seeds], dim=1)
    return _blended(h, index, alpha, [stacked.delta(own) for stacked, own in zip(stacked_seeds, parts, strict=True)])


def of_hosts(h: Tensor, index: Tensor) -> Tensor:
    """Return the activations of the hosts in `index` [R]: [B, N, ...] becomes [B, R, ...].

    The memory format of h is kept. A kernel that left samples or channels innermost did so because the layers after it are faster that way.
    """
    order, inverse = _order_in_memory(h)
    in_order = h.permute(order)
    own: Tensor = _row_kernels().gather(in_order, index) if _has_row_kernels(h, order) else in_order.index_select(order.index(1), index)
    return own.permute(inverse)


def _blended(h: Tensor, index: Tensor, alpha: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    """Return h with alpha [R] times the deltas added to the hosts in `index` [R]. Concatenated, the deltas are [B, R, ...]."""
    order, inverse = _order_in_memory(h)
    in_order, host_dim = h.permute(order), order.index(1)
    delta = torch.cat([part.permute(order) for part in deltas], dim=host_dim)
    blended: Tensor = (
        _row_kernels().blend(in_order, index, alpha, delta)
        if _has_row_kernels(h, order)
        else in_order.index_add(host_dim, index, _times(alpha, delta, host_dim=host_dim))
    )
    return blended.permute(inverse)


def _times(alpha: Tensor, delta: Tensor, *, host_dim: int) -> Tensor:
    """Return alpha [R] times delta, in the precision of delta. `host_dim` is the dimension of delta that has R entries."""
    return (alpha.view(*[1] * host_dim, -1, *[1] * (delta.ndim - host_dim - 1)) * delta).to(delta.dtype)


def _has_row_kernels(h: Tensor, order: Sequence[int]) -> bool:
    """Return whether the Triton kernels gather and blend: on a GPU, where a host's part of a sample is contiguous."""
    return h.is_cuda and has_triton() and order[:2] == [0, 1]


def _row_kernels() -> Any:
    from esper.fleet.kernels import host_rows  # needs Triton

    return host_rows


def _order_in_memory(h: Tensor) -> tuple[list[int], list[int]]:
    """Return the dimensions of h from the outermost to the innermost in memory, and the inverse permutation."""
    order = sorted(range(h.ndim), key=h.stride, reverse=True)
    return order, sorted(range(h.ndim), key=order.__getitem__)


@dataclass(frozen=True)
class SeedGroup:
    """Seeds of one kind, with their rows in the storage. `hosts` are positions in the list of hosts that compute together."""

    slot: str
    storage: SeedStorage
    blueprint: str
    hosts: Sequence[int]
    index: Tensor  # `hosts` on the device [R]
    rows: Tensor  # rows of the storage [R]
    alphas: Tensor  # alpha of every seed in every step [T, R]

    @classmethod
    def of(cls, slot: str, storage: SeedStorage, blueprint: str, rows: Sequence[int], hosts: Sequence[int], alphas: Tensor) -> SeedGroup:
        device = storage.place.device
        return cls(slot, storage, blueprint, hosts, upload(hosts, device), upload(rows, device), alphas)

    @property
    def seed_kind(self) -> SeedKind:
        return self.storage.seed_kinds[self.blueprint]

    def read(self, name: str) -> Tensor:
        """Return a copy of these seeds' rows of a storage tensor, [R] or [R, width of the kind]."""
        rows = self.storage.tensors[name].index_select(0, self.rows)
        return rows if rows.ndim == 1 else rows[:, : self.seed_kind.layout.width]

    def write(self, name: str, rows: Tensor) -> None:
        """Write rows back to a storage tensor. They may be wider than those of `read`; the rest is ignored."""
        whole, width = self.storage.tensors[name], self.seed_kind.layout.width
        (whole if whole.ndim == 1 else whole[:, :width]).index_copy_(0, self.rows, rows if rows.ndim == 1 else rows[:, :width])

    def stacked(self, weights: Mapping[str, Tensor], alpha: Tensor, *, hosts: int) -> StackedSeed:
        """Return the group as part of a stacked model of `hosts` hosts."""
        index = None if list(self.hosts) == list(range(hosts)) else self.index
        return StackedSeed(self.slot, self.seed_kind, weights, alpha, index, self.hosts)


class SeedBatch:
    """Seeds trained by one backward pass; may be empty. Training changes a copy of their rows: call `put_back()` last."""

    def __init__(self, groups: Sequence[SeedGroup]) -> None:
        self.groups = groups
        if not groups:
            return  # an empty batch has no tensors
        self._counts = [len(group.hosts) for group in groups]  # R of each group
        self.hosts = torch.cat([group.index for group in groups])  # [Q]
        self._alphas = torch.cat([group.alphas for group in groups], dim=1)  # [T, Q]
        self.norms = torch.zeros_like(self._alphas)  # gradient norm of every seed in every step [T, Q]
        # Steps that a seed did not take although its own gradient was finite, because its host did not step [Q].
        self.skipped = torch.zeros(len(self.hosts), dtype=torch.int64, device=self.hosts.device)
        self.flat = self._read("weights").requires_grad_()  # [Q, P]
        self._warmup = self._read("warmup")
        self._optimizer = groups[0].storage.make(self.flat)
        for name, tensor in self._optimizer.state.items():
            tensor.copy_(self._read(name))

    def __len__(self) -> int:
        """Return the number of groups; 0 for an empty batch."""
        return len(self.groups)

    def weights(self) -> list[dict[str, Tensor]]:
        """Return the weights of every group, name -> [R, ...]. They are views of `flat`."""
        parts = self.flat.split_with_sizes(self._counts)
        layouts = [group.seed_kind.layout for group in self.groups]
        return [layout.unflatten(part[:, : layout.width]) for layout, part in zip(layouts, parts, strict=True)]

    def alphas(self, now: Tensor) -> Sequence[Tensor]:
        """Return the alphas of every group [R] in step `now`. The step number [1] is on the device."""
        return self._alphas.index_select(0, now)[0].split_with_sizes(self._counts)

    def stacked_seeds(self, now: Tensor, *, hosts: int) -> list[StackedSeed]:
        """Return all groups as parts of a stacked model of `hosts` hosts, in step `now`."""
        if not self.groups:
            return []
        parts = zip(self.groups, self.weights(), self.alphas(now), strict=True)
        return [group.stacked(weights, alpha, hosts=hosts) for group, weights, alpha in parts]

    def learn(self, gradient: Tensor, now: Tensor, rates: Tensor, config: SeedOptimizerConfig, *, active: Tensor | None = None) -> None:
        """Take one optimiser step along the gradient [Q, P]; a seed whose gradient is not finite does not step.

        `rates` [A] are the learning rates of all hosts that train. Only seeds of hosts that are `active` [A] step; None: of all hosts.
        """
        norms = clip_rows_(gradient, math.inf if config.max_grad_norm is None else config.max_grad_norm)
        self.norms.index_copy_(0, now, norms.unsqueeze(0))

        # The learning rate follows that of the host and rises linearly during the warm-up of the seed.
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
        """Write weights and optimiser state back to the storage."""
        if not self.groups:
            return
        for name, rows in {"weights": self.flat, **self._optimizer.state}.items():
            for group, own in zip(self.groups, rows.split_with_sizes(self._counts), strict=True):
                group.write(name, own)

    def by_seed(self, norms: Tensor, skipped: Tensor) -> list[tuple[str, int, list[float], int]]:
        """Return (slot, host, norms, skipped steps) of each seed, given `self.norms` and `self.skipped` as read from the device."""
        seeds = [(group.slot, host) for group in self.groups for host in group.hosts]
        return [(*seed, own, int(count)) for seed, own, count in zip(seeds, norms.T.tolist(), skipped.tolist(), strict=True)]

    def _read(self, name: str) -> Tensor:
        """Return the rows of all groups, padded with zeros to the widest: [Q] or [Q, P]."""
        rows = [group.read(name) for group in self.groups]
        width = max(own.shape[-1] for own in rows)
        return torch.cat(rows if rows[0].ndim == 1 else [F.pad(own, (0, width - own.shape[1])) for own in rows])


SeedStorages = Mapping[str, SeedStorage]  # slot -> storage, in the order in which the slots run
# (row in the fleet, lifecycles) of the hosts that compute together; the position of a host is its index in this sequence
AllLifecycles = Sequence[tuple[int, SlotLifecycles[RowBackend]]]
Placed = tuple[int, int, list[float]]  # a seed: row and position of its host, and its alpha in every step
SeedKinds = Mapping[str, Mapping[str, SeedKind]]  # slot -> blueprint -> kind of seed


def seed_kinds_for(places: Mapping[str, Place], growth: GrowthConfig) -> dict[str, dict[str, SeedKind]]:
    """Return the kinds of seeds that may grow in every slot; slots where nothing fits are left out."""
    blending = growth.lifecycle.blending
    seed_kinds = {
        name: {blueprint.name: SeedKind(place, blueprint.name, blending) for blueprint in options_for(place, growth)}
        for name, place in places.items()
    }
    if not any(seed_kinds.values()):
        raise FleetError(
            f"none of the blueprints {growth.blueprints} fits any of the slots {', '.join(places)} with {blending!r} blending; "
            "leave `blueprints` out to allow all that fit"
        )
    return {name: kinds for name, kinds in seed_kinds.items() if kinds}


def seed_batches_of(seed_storages: SeedStorages, all_lifecycles: AllLifecycles, steps: int) -> tuple[SeedBatch, SeedBatch]:
    """Return the seeds that learn in the next `steps` steps: the connected ones, and the ones in the shadow.

    Advances the blending of the lifecycles by these steps.
    """
    placed: dict[tuple[str, str, bool], list[Placed]] = defaultdict(list)
    for position, (row, lifecycles) in enumerate(all_lifecycles):
        for slot, blueprint, is_connected, alphas in _alphas(lifecycles, steps):
            placed[slot, blueprint, is_connected].append((row, position, alphas))
    # One group per slot, blueprint and way of learning, in the order in which the slots run.
    groups: dict[bool, list[SeedGroup]] = {True: [], False: []}
    order = list(seed_storages)
    for (slot, blueprint, is_connected), seeds in sorted(placed.items(), key=lambda item: (order.index(item[0][0]), item[0])):
        groups[is_connected].append(_group(slot, seed_storages[slot], blueprint, seeds))
    return SeedBatch(groups[True]), SeedBatch(groups[False])


def stacked_seeds_of(seed_storages: SeedStorages, all_lifecycles: AllLifecycles, *, only_kept: bool) -> list[StackedSeed]:
    """Return the connected seeds with their present weights and alphas; `only_kept` leaves out those that are not fossilized."""
    placed: dict[tuple[str, str], list[Placed]] = defaultdict(list)
    for position, (row, lifecycles) in enumerate(all_lifecycles):
        for slot, backend in lifecycles.occupied():
            if backend.is_connected and (not only_kept or backend.life.stage is Stage.FOSSILIZED):
                placed[slot, str(backend.life.blueprint)].append((row, position, [backend.alpha]))
    groups = [_group(slot, seed_storages[slot], blueprint, seeds) for (slot, blueprint), seeds in placed.items()]
    weights = [group.seed_kind.layout.unflatten(group.read("weights")) for group in groups]
    return [group.stacked(own, group.alphas[0], hosts=len(all_lifecycles)) for group, own in zip(groups, weights, strict=True)]


def _group(slot: str, storage: SeedStorage, blueprint: str, seeds: Sequence[Placed]) -> SeedGroup:
    """Return the group of these seeds of one kind."""
    alphas = upload([alphas for _, _, alphas in seeds], storage.place.device, storage.place.dtype).T.contiguous()  # [T, R]
    return SeedGroup.of(slot, storage, blueprint, [row for row, _, _ in seeds], [position for _, position, _ in seeds], alphas)


def _alphas(lifecycles: SlotLifecycles[RowBackend], steps: int) -> Iterable[tuple[str, str, bool, list[float]]]:
    """Return (slot, blueprint, whether it is connected, its alpha in each of the coming steps) of every seed of a host.

    Advances the blending by these steps.
    """
    backends = dict(lifecycles.occupied())
    alphas = {name: [backend.alpha] * steps for name, backend in backends.items()}
    # If a seed is blending, advance all alphas step by step, and note the value before every step.
    if any(backend.life.ramp is not None for backend in backends.values()):
        for step in range(steps):
            for name, backend in backends.items():
                alphas[name][step] = backend.alpha
                backend.advance_alpha(lifecycles.config.lifecycle.alpha_curve)
    return [(name, str(backend.life.blueprint), backend.is_connected, alphas[name]) for name, backend in backends.items()]
