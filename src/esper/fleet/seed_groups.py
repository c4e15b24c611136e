"""The seeds of a fleet: where their weights are stored, how they compute, and how they learn, for many hosts at once.

- `SeedKind`: one blueprint in one slot. It computes the delta of many seeds of that kind in one call. Seeds that widen layers have a
  `WidthKind` instead, and are no part of the activations: `esper.fleet.width` makes them a part of the host's weights.
- `SeedStorage`: one per slot. It stores weights, statistics and optimiser moments of the slot's seeds, one row per host.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.devices import upload
from esper.fleet.config import FleetError
from esper.fleet.hosts import RowBackend
from esper.fleet.optimizers import RowOptimizer, clip_rows_
from esper.fleet.stacked.convolutions import has_triton
from esper.fleet.stacked.lowering import lower
from esper.fleet.stacked.rows import Layout
from esper.fleet.width import WidthKind
from esper.growth.config import GrowthConfig, SeedOptimizerConfig
from esper.growth.host.layout import CPU, Place
from esper.growth.lifecycle.backend import SeedPlan
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.stages import Stage
from esper.growth.seeds.blueprints import get_blueprint, live_parameters, options_for
from esper.growth.seeds.seed import Blending, Seed, WidePlan
from esper.growth.seeds.width import plan_in

ABSENT = -1  # owner of a width seed whose host is not in the stacked model
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
        self.plan: tuple[WidePlan, ...] = ()  # it widens nothing
        self.layout = Layout.of(template)  # of branch and gate
        self.buffers = Layout({}, place.dtype)
        self.branch_layout = Layout.of(template.branch)  # of the branch alone
        self.live = live_parameters(get_blueprint(blueprint), place, template.branch)  # names of the parameters with a gradient at birth
        self._branch = lower(template.branch)
        self._gate = None if template.gate is None else lower(template.gate)

    def build(self, *, random_seed: int) -> Seed:
        """Return a new seed on the CPU."""
        return Seed(replace(self.place, device=CPU), self.blueprint, random_seed=random_seed, blending=self.blending)

    def delta(self, rows: Tensor, h: Tensor) -> Tensor:
        """Return the change of h [B, R, ...] by seeds with these rows of weights [R, ...], before alpha: `Seed.delta` for all at once."""
        weights = self.layout.unflatten(rows)
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


AnyKind = SeedKind | WidthKind


def least_width(seed_kinds: Mapping[str, AnyKind]) -> int:
    """Return the number of weights in a row of a new storage: those of the largest seed in depth. Room for width seeds is made later."""
    return max((kind.layout.width for kind in seed_kinds.values() if not kind.plan), default=0)


class SeedStorage:
    """The seeds of one slot, one row per host, one seed per row. Rows become wider when a larger seed is planted.

    The end of a row that its seed does not need, and a row without a seed, hold arbitrary values. `seed_kinds` maps a blueprint to its kind
    in a host without kept width seeds. `modules` are those of a host on the CPU.
    """

    def __init__(
        self, place: Place, seed_kinds: Mapping[str, AnyKind], modules: Mapping[str, nn.Module], *, hosts: int, make: MakeRowOptimizer
    ) -> None:
        self.place, self.seed_kinds, self.modules, self.make = place, seed_kinds, modules, make
        self._wide: dict[tuple[str, tuple[WidePlan, ...]], WidthKind] = {}
        self.forget_kinds()
        self._least = least_width(seed_kinds)
        weights = torch.zeros(hosts, self._least, dtype=place.dtype, device=place.device)
        self.tensors: dict[str, Tensor] = {
            "weights": weights,
            "warmup": torch.zeros(hosts, dtype=torch.int64, device=place.device),  # steps over which the learning rate of a seed rises
            **make(weights).state,
        }

    def kind(self, blueprint: str, plan: tuple[WidePlan, ...] = ()) -> AnyKind:
        """Return the kind of a seed; `plan` are the parts of a width seed."""
        if not plan:
            return self.seed_kinds[blueprint]
        if (blueprint, plan) not in self._wide:
            self._wide[blueprint, plan] = WidthKind(self.place, blueprint, plan, self.modules)
        return self._wide[blueprint, plan]

    def forget_kinds(self) -> None:
        """Forget the kinds of width seeds beside other kept ones. They are built again when they are needed."""
        self._wide = {(kind.blueprint, kind.plan): kind for kind in self.seed_kinds.values() if isinstance(kind, WidthKind)}

    def make_room(self, weights: int, buffers: int) -> None:
        """Make the rows at least so wide."""
        if buffers and "buffers" not in self.tensors:
            self.tensors["buffers"] = self.tensors["weights"].new_zeros(len(self.tensors["weights"]), 0)
        for name, tensor in self.tensors.items():
            missing = (buffers if name == "buffers" else weights) - tensor.shape[-1]
            if tensor.ndim > 1 and missing > 0:
                self.tensors[name] = F.pad(tensor, (0, missing))

    def shapes_for(self, slot: str, saved: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Return the shapes of all tensors that a saved state of this slot must have.

        Its rows may be wider than those of a new storage, but not narrower. It has buffers only if a width seed has grown.
        """
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items() if name != "buffers"}
        for name, shape in shapes.items():
            if len(shape) > 1 and f"{slot} {name}" in saved:
                shapes[name] = [shape[0], max(saved[f"{slot} {name}"].shape[-1], self._least)]
        if f"{slot} buffers" in saved:
            shapes["buffers"] = [len(self.tensors["weights"]), saved[f"{slot} buffers"].shape[-1]]
        return shapes

    @torch.no_grad()
    def plant(self, row: int, plan: SeedPlan, wide: tuple[WidePlan, ...]) -> None:
        """Put a new seed into the row of a host; `wide` are the parts of a width seed.

        Does not wait for the device: the seed is built on the CPU and sent in one piece.
        """
        seed_kind = self.kind(plan.blueprint, wide)
        self.make_room(seed_kind.layout.width, seed_kind.buffers.width)
        seed = seed_kind.build(random_seed=plan.random_seed)
        # Clear the whole row first, so that the moments of the seed before do not stay.
        index = upload([row], self.place.device)
        for tensor in self.tensors.values():
            tensor.index_fill_(0, index, 0)
        tensors = {**dict(seed.named_parameters()), **dict(seed.named_buffers())}
        for name, layout in (("weights", seed_kind.layout), ("buffers", seed_kind.buffers)):
            if layout.width:
                fresh = layout.flatten({key: tensors[key].unsqueeze(0) for key in layout.shapes})
                self.tensors[name][:, : layout.width].index_copy_(0, index, upload(fresh, self.place.device))
        self.tensors["warmup"].index_fill_(0, index, plan.warmup)


@dataclass(frozen=True)
class StackedSeed:
    """Seeds of one kind in a stacked model, at most one per host."""

    place: Place  # of their slot
    seed_kind: AnyKind
    rows: Tensor  # weights [R, ...]; the rows may be longer than those of the kind
    alpha: Tensor  # [R]
    index: Tensor | None  # positions of their hosts in the stacked model [R]; None: all hosts, in order
    owners: Sequence[int]  # the same positions as Python numbers, which are needed without reading the device; ABSENT: not in the model
    orders: Sequence[int]  # of width seeds: in a host, the units of one with a smaller order come first
    buffers: Tensor  # [R, ...], statistics of width seeds

    @property
    def slot(self) -> str:
        return self.place.name

    def part(self, seeds: SomeSeeds) -> StackedSeed:
        """Return some of the seeds, with new positions of their hosts."""
        if self.seed_kind.plan:  # the rows of width seeds are chosen when they are put together with those of the hosts
            owners = dict(zip(seeds.numbers, seeds.owners, strict=True))
            return replace(self, owners=[owners.get(number, ABSENT) for number in range(len(self.owners))])
        chosen = seeds.chosen
        if chosen is None:
            return replace(self, index=seeds.index, owners=seeds.owners)
        rows, alpha, buffers = (tensor.index_select(0, chosen) for tensor in (self.rows, self.alpha, self.buffers))
        orders = [self.orders[number] for number in seeds.numbers]
        return StackedSeed(self.place, self.seed_kind, rows, alpha, seeds.index, seeds.owners, orders, buffers)

    def delta(self, own: Tensor) -> Tensor:
        """Return the deltas [B, R, ...] of the seeds, before alpha, for the activations `own` [B, R, ...] of their hosts."""
        assert isinstance(self.seed_kind, SeedKind)
        # Autocast computes norms in float32, which must not change the precision of the host.
        return self.seed_kind.delta(self.rows, own).to(own.dtype)


@dataclass(frozen=True)
class SomeSeeds:
    """Some of the seeds of a `StackedSeed`, and positions of their hosts in another stacked model."""

    numbers: Sequence[int]
    chosen: Tensor | None  # the same on the device; None: all seeds, in order
    owners: Sequence[int]
    index: Tensor | None  # the same on the device; None: all hosts, in order

    @classmethod
    def of(cls, numbers: Sequence[int], count: int, owners: Sequence[int], hosts: int, device: torch.device) -> SomeSeeds:
        """Return these out of `count` seeds; `hosts` is the number of hosts of the other model."""
        chosen = None if list(numbers) == list(range(count)) else upload(numbers, device)
        return cls(numbers, chosen, owners, None if list(owners) == list(range(hosts)) else upload(owners, device))


def act(stacked_seeds: Sequence[StackedSeed], h: Tensor) -> Tensor:
    """Return h [B, N, ...] plus alpha times the deltas of these seeds. All belong to one slot, and a host has one of them at most.

    If width seeds have widened h, only the host's own units go through the seeds.
    """
    place = stacked_seeds[0].seed_kind.place
    axis = feature_axis(place, h)
    if h.shape[axis] > place.width:
        own, new = h.split_with_sizes([place.width, h.shape[axis] - place.width], axis)
        order, inverse = _order_in_memory(h)
        changed = act(stacked_seeds, own.clone(memory_format=torch.preserve_format))
        return torch.cat([changed.permute(order), new.permute(order)], dim=order.index(axis)).permute(inverse)
    if len(stacked_seeds) == 1 and stacked_seeds[0].index is None:
        return h + _times(stacked_seeds[0].alpha, stacked_seeds[0].delta(h), host_dim=1)
    indices = [stacked.index for stacked in stacked_seeds if stacked.index is not None]
    assert len(indices) == len(stacked_seeds)  # one without an index has every host, so it is the only one
    # Gather the hosts of all kinds of seeds at once, compute the deltas kind by kind, and scatter-add them at once.
    index, alpha = torch.cat(indices), torch.cat([stacked.alpha for stacked in stacked_seeds])
    parts = of_hosts(h, index).split_with_sizes([len(stacked.alpha) for stacked in stacked_seeds], dim=1)
    return _blended(h, index, alpha, [stacked.delta(own) for stacked, own in zip(stacked_seeds, parts, strict=True)])


def feature_axis(place: Place, h: Tensor) -> int:
    """Return the dimension of the features in activations h [B, N, ...] of a place."""
    return 2 if place.kind == "conv" else h.ndim - 1


def own_units(place: Place, h: Tensor) -> Tensor:
    """Return the host's own units of activations h [B, N, ...], without those of width seeds."""
    axis = feature_axis(place, h)
    return h if h.shape[axis] == place.width else h.narrow(axis, 0, place.width)


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
    seed_kind: AnyKind
    hosts: Sequence[int]
    orders: Sequence[int]  # of width seeds, see `StackedSeed`
    index: Tensor  # `hosts` on the device [R]
    rows: Tensor  # rows of the storage [R]
    alphas: Tensor  # alpha of every seed in every step [T, R]

    @classmethod
    def of(cls, slot: str, storage: SeedStorage, seed_kind: AnyKind, seeds: Sequence[Placed]) -> SeedGroup:
        """Return the group of these seeds."""
        device = storage.place.device
        hosts = [seed.position for seed in seeds]
        alphas = upload([seed.alphas for seed in seeds], device, storage.place.dtype).T.contiguous()  # [T, R]
        rows = upload([seed.row for seed in seeds], device)
        return cls(slot, storage, seed_kind, hosts, [seed.order for seed in seeds], upload(hosts, device), rows, alphas)

    def read(self, name: str) -> Tensor:
        """Return a copy of these seeds' rows of a storage tensor, [R] or [R, width of the kind]."""
        if name == "buffers" and name not in self.storage.tensors:  # no kind of this slot has statistics
            return self.alphas.new_zeros(len(self.hosts), 0)
        rows = self.storage.tensors[name].index_select(0, self.rows)
        return rows if rows.ndim == 1 else rows[:, : self._width(name)]

    def write(self, name: str, rows: Tensor) -> None:
        """Write rows back to a storage tensor. They may be wider than those of `read`; the rest is ignored."""
        width = self._width(name)
        if rows.ndim == 1:
            self.storage.tensors[name].index_copy_(0, self.rows, rows)
        elif width:
            self.storage.tensors[name][:, :width].index_copy_(0, self.rows, rows[:, :width])

    def _width(self, name: str) -> int:
        return self.seed_kind.buffers.width if name == "buffers" else self.seed_kind.layout.width

    def stacked(self, rows: Tensor, buffers: Tensor, alpha: Tensor, *, hosts: int) -> StackedSeed:
        """Return the group as part of a stacked model of `hosts` hosts, with these rows of weights and buffers."""
        index = None if list(self.hosts) == list(range(hosts)) else self.index
        return StackedSeed(self.storage.place, self.seed_kind, rows, alpha, index, self.hosts, self.orders, buffers)


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
        self._buffers = self._read("buffers")  # [Q, ...], changed in place by training passes
        self._warmup = (self._read("warmup") + 1).to(self.flat.dtype)  # steps at which the learning rate has risen
        self._optimizer = groups[0].storage.make(self.flat)
        for name, tensor in self._optimizer.state.items():
            tensor.copy_(self._read(name))

    def __len__(self) -> int:
        """Return the number of groups; 0 for an empty batch."""
        return len(self.groups)

    def alphas(self, now: Tensor) -> Sequence[Tensor]:
        """Return the alphas of every group [R] in step `now`. The step number [1] is on the device."""
        return self._alphas.index_select(0, now)[0].split_with_sizes(self._counts)

    def stacked_seeds(self, now: Tensor, *, hosts: int) -> list[StackedSeed]:
        """Return all groups as parts of a stacked model of `hosts` hosts, in step `now`. Their tensors are views of those of the batch."""
        if not self.groups:
            return []
        rows, buffers = self.flat.split_with_sizes(self._counts), self._buffers.split_with_sizes(self._counts)
        parts = zip(self.groups, rows, buffers, self.alphas(now), strict=True)
        return [group.stacked(own, statistics, alpha, hosts=hosts) for group, own, statistics, alpha in parts]

    def learn(self, gradient: Tensor, now: Tensor, rates: Tensor, config: SeedOptimizerConfig, *, active: Tensor | None = None) -> None:
        """Take one optimiser step along the gradient [Q, P]; a seed whose gradient is not finite does not step.

        `rates` [A] are the learning rates of all hosts that train. Only seeds of hosts that are `active` [A] step; None: of all hosts.
        """
        norms = clip_rows_(gradient, math.inf if config.max_grad_norm is None else config.max_grad_norm)
        self.norms.index_copy_(0, now, norms.unsqueeze(0))

        # The learning rate follows that of the host and rises linearly during the warm-up of the seed.
        warm = (self._optimizer.state["steps"] + 1) / self._warmup
        self._optimizer.lr.copy_(rates.index_select(0, self.hosts) * config.learning_rate_factor * warm.clamp(max=1.0))

        may_step = norms < math.inf  # false for nan; `isfinite` would be four kernels
        if active is not None:
            host_steps = active.index_select(0, self.hosts)
            self.skipped.add_(may_step & ~host_steps)
            may_step = may_step & host_steps
        self._optimizer.step(gradient, active=may_step)

    def write_statistics(self, rows: Sequence[Tensor]) -> None:
        """Write the statistics of every group of width seeds, [R, ...] each."""
        wide = (own for group, own in zip(self.groups, self._buffers.split_with_sizes(self._counts), strict=True) if group.seed_kind.plan)
        for own, values in zip(wide, rows, strict=True):
            own.copy_(values)

    @torch.no_grad()
    def put_back(self) -> None:
        """Write weights, buffers and optimiser state back to the storage."""
        if not self.groups:
            return
        for name, rows in {"weights": self.flat, "buffers": self._buffers, **self._optimizer.state}.items():
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
AllLifecycles = Sequence[tuple[int, Lifecycles[RowBackend]]]
SeedKinds = Mapping[str, Mapping[str, AnyKind]]  # slot -> blueprint -> kind of seed


class Placed(NamedTuple):
    """A seed of a host."""

    row: int  # of its host in the fleet
    position: int  # of its host among those that compute together
    order: int  # of a width seed
    alphas: list[float]  # in every step


def seed_kinds_for(places: Mapping[str, Place], growth: GrowthConfig, modules: Mapping[str, nn.Module]) -> dict[str, dict[str, AnyKind]]:
    """Return the kinds of seeds that may grow in every slot of a new host; slots where nothing fits are left out.

    `modules` are those of a host on the CPU.
    """
    blending = growth.lifecycle.blending

    def kind_of(place: Place, blueprint: str) -> AnyKind:
        plan = plan_in(place, blueprint, {})
        return WidthKind(place, blueprint, plan, modules) if plan else SeedKind(place, blueprint, blending)

    seed_kinds = {
        name: {blueprint.name: kind_of(place, blueprint.name) for blueprint in options_for(place, growth)} for name, place in places.items()
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
    placed: dict[tuple[str, AnyKind, bool], list[Placed]] = defaultdict(list)
    for position, (row, lifecycles) in enumerate(all_lifecycles):
        for slot, backend, alphas in _alphas(lifecycles, steps):
            kind = seed_storages[slot].kind(str(backend.blueprint), backend.wide)
            placed[slot, kind, backend.is_connected].append(Placed(row, position, backend.order, alphas))
    # One group per slot, kind and way of learning, in the order in which the slots run.
    groups: dict[bool, list[SeedGroup]] = {True: [], False: []}
    order = list(seed_storages)
    for (slot, kind, is_connected), seeds in sorted(placed.items(), key=lambda item: (order.index(item[0][0]), item[0][1].blueprint)):
        groups[is_connected].append(SeedGroup.of(slot, seed_storages[slot], kind, seeds))
    return SeedBatch(groups[True]), SeedBatch(groups[False])


def stacked_seeds_of(seed_storages: SeedStorages, all_lifecycles: AllLifecycles, *, only_kept: bool) -> list[StackedSeed]:
    """Return the connected seeds with their present weights and alphas; `only_kept` leaves out those that are not fossilized."""
    placed: dict[tuple[str, AnyKind], list[Placed]] = defaultdict(list)
    for position, (row, lifecycles) in enumerate(all_lifecycles):
        for slot, backend in lifecycles.occupied():
            if backend.is_connected and (not only_kept or backend.stage is Stage.FOSSILIZED):
                kind = seed_storages[slot].kind(str(backend.blueprint), backend.wide)
                placed[slot, kind].append(Placed(row, position, backend.order, [backend.alpha]))
    groups = [SeedGroup.of(slot, seed_storages[slot], kind, seeds) for (slot, kind), seeds in placed.items()]
    return [group.stacked(group.read("weights"), group.read("buffers"), group.alphas[0], hosts=len(all_lifecycles)) for group in groups]


def _alphas(lifecycles: Lifecycles[RowBackend], steps: int) -> Iterable[tuple[str, RowBackend, list[float]]]:
    """Return (slot, backend, alpha in each of the coming steps) of every seed of a host.

    Advances the blending by these steps.
    """
    backends = dict(lifecycles.occupied())
    alphas = {name: [backend.alpha] * steps for name, backend in backends.items()}
    # If a seed is blending, advance all alphas step by step, and note the value before every step.
    if any(backend.record.ramp is not None for backend in backends.values()):
        for step in range(steps):
            for name, backend in backends.items():
                alphas[name][step] = backend.alpha
                backend.advance_alpha()
    return [(name, backend, alphas[name]) for name, backend in backends.items()]
