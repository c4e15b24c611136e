"""Hosts of a fleet as tensors: their storage, the group that trains, and the stacked model that computes them as one network.

- `HostStorage`: weights, buffers, optimiser moments and loss scales of all hosts, one row per host.
- `HostGroup`: compact copies of the rows of the hosts that train now.
- `StackedModel`: some hosts with the seeds in them as one network. Training, the second pass of seeds in the shadow, validation, and
  validation without a seed all use it.
- `Arrangement`: the hosts of a stacked model in parts of equal width. It is needed only where some hosts have width seeds; each part is
  then computed as a network of its own.

Shapes: B = samples, N = hosts of the fleet or of the stacked model, A = hosts that train, P = weights of a host; activations are
[B, N, ...].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.devices import upload
from esper.fleet.seed_groups import ABSENT, MakeRowOptimizer, SomeSeeds, StackedSeed, act
from esper.fleet.stacked.lowering import At, Recompute, Stacked, lower
from esper.fleet.stacked.rows import Layout, ModuleRows
from esper.fleet.width import Assembly, Formation, Formations, PartRows, What, WidthKind
from esper.gradients import LossScales, NoLossScales
from esper.growth.host.layout import Place


class HostStorage:
    """Tensors of all hosts of a fleet, one row per host.

    `template` is any host of the architecture, `slots` are the names of its submodules after which seeds may grow, and `formations` are the
    wider hosts that it may become. With `scales`, every host has a loss scale.
    """

    def __init__(
        self,
        template: nn.Module,
        slots: Sequence[str],
        *,
        hosts: int,
        make: MakeRowOptimizer,
        device: torch.device,
        dtype: torch.dtype,
        formations: Formations,
        scales: bool = False,
    ) -> None:
        self.slots, self.make = tuple(slots), make
        self.stacked: Stacked = lower(template, slots=self.slots)
        self.formations = formations
        self.rows = ModuleRows(template.to(dtype), hosts, device=device)
        self._moments = make(self.rows.parameters.flat).state
        self.scales = LossScales.fresh(hosts, device) if scales else NoLossScales(torch.zeros(hosts, dtype=torch.int64, device=device))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All state of the hosts, name -> [N, ...]."""
        parts = {"weights": self.rows.parameters.flat.detach()}
        parts |= {f"constants {rows.layout.dtype}": rows.flat for rows in self.rows.constants}
        return parts | {f"moments {name}": tensor for name, tensor in self._moments.items()} | self.scales.tensors

    def load(self, rows: Sequence[int], modules: Sequence[nn.Module]) -> None:
        """Replace the hosts in these rows by new ones, with fresh moments and loss scales."""
        places = upload(rows, self.rows.parameters.flat.device)
        self.rows.load(places, modules)
        for moment in self._moments.values():
            moment.index_fill_(0, places, 0)
        self.scales.reset_(places)

    def group(self, rows: Sequence[int], rates: Tensor) -> HostGroup:
        """Return the hosts of these rows, ready to train at these learning rates [A]."""
        return HostGroup(self, rows, rates)


class HostGroup:
    """Hosts that train together, in compact copies of their rows. Call `put_back()` last."""

    def __init__(self, storage: HostStorage, rows: Sequence[int], rates: Tensor) -> None:
        self.storage, self.stacked = storage, storage.stacked
        self._index = upload(rows, rates.device)
        self._layout: Layout = storage.rows.parameters.layout
        self.flat = storage.rows.parameters.read(self._index).requires_grad_()  # [A, P]
        self._constants = [part.read(self._index) for part in storage.rows.constants]
        # Views of the copied buffers by name: layers update running statistics in place, and `put_back` writes the copies.
        self._views = {
            name: view
            for part, copy in zip(storage.rows.constants, self._constants, strict=True)
            for name, view in part.layout.unflatten(copy).items()
        }
        self._optimizer = storage.make(self.flat)
        self._optimizer.lr.copy_(rates)
        for name, tensor in self._optimizer.state.items():
            tensor.copy_(storage._moments[name].index_select(0, self._index))
        self.scales = storage.scales.of(self._index)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, [A, ...]; gradients of the parameters flow to `flat`."""
        return self._layout.unflatten(self.flat) | self._views

    def copies(self, index: Tensor) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers of some hosts by name, without gradients."""
        found = self._layout.unflatten(self.flat.detach().index_select(0, index))
        for part, copy in zip(self.storage.rows.constants, self._constants, strict=True):
            found |= part.layout.unflatten(copy.index_select(0, index))
        return found

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write buffers, given by name, [A, ...]."""
        for name, values in tensors.items():
            self._views[name].copy_(values)

    def learn(self, gradient: Tensor, *, active: Tensor | None = None) -> None:
        """Take one optimiser step along the gradient [A, P] for the hosts that are `active` [A]; None: for all."""
        self._optimizer.step(gradient, active=active)

    def put_back(self) -> None:
        """Write weights, buffers, moments and loss scales back to the storage."""
        self.storage.rows.write(self._index, [self.flat.detach(), *self._constants])
        for name, tensor in self._optimizer.state.items():
            self.storage._moments[name].index_copy_(0, self._index, tensor)
        for name, tensor in self.scales.tensors.items():
            self.storage.scales.tensors[name].index_copy_(0, self._index, tensor)


@dataclass(frozen=True)
class EqualHosts:
    """Hosts with width seeds of the same kinds."""

    formation: Formation
    hosts: Sequence[int]  # positions in the stacked model
    wide: Sequence[int]  # numbers of the model's `StackedSeed`s that are their width seeds, in the order of their units


@dataclass(frozen=True)
class HostPart:
    """Hosts of a stacked model that are computed together, as hosts of the leader, the widest formation among them."""

    leader: Formation
    hosts: Sequence[int]  # positions in the stacked model, in order
    index: Tensor | None  # the same on the device; None: all hosts
    others: Sequence[tuple[int, SomeSeeds]]  # seeds that are no width seeds, by numbers of the model's `StackedSeed`s

    @classmethod
    def of(cls, members: Sequence[EqualHosts], stacked_seeds: Sequence[StackedSeed], total: int, device: torch.device) -> HostPart:
        """Return the part with these members, out of `total` hosts."""
        hosts = sorted(host for member in members for host in member.hosts)
        places = {host: place for place, host in enumerate(hosts)}
        others: list[tuple[int, SomeSeeds]] = []
        for number, stacked in enumerate(stacked_seeds):
            seeds = [seed for seed, owner in enumerate(stacked.owners) if owner in places]
            if seeds and not stacked.seed_kind.plan:
                owners = [places[stacked.owners[seed]] for seed in seeds]
                others.append((number, SomeSeeds.of(seeds, len(stacked.owners), owners, len(hosts), device)))
        return cls(members[0].formation, hosts, None if len(hosts) == total else upload(hosts, device), others)

    def rows(self, members: Sequence[EqualHosts], stacked_seeds: Sequence[StackedSeed], what: What) -> PartRows:
        """Return where the rows of the hosts come from. Kinds of width seeds are numbered among the `StackedSeed`s with such seeds."""
        kinds = [number for number, stacked in enumerate(stacked_seeds) if stacked.seed_kind.plan]
        member_of = {host: place for place, member in enumerate(members) for host in member.hosts}
        seeds = [
            [(kinds.index(number), stacked_seeds[number].owners.index(host)) for number in members[member_of[host]].wide]
            for host in self.hosts
        ]
        fills = [self.leader.fill_of(member.formation, what) for member in members]
        return PartRows(self.hosts, seeds, fills, [member_of[host] for host in self.hosts], self.leader.layouts[what])


States = Sequence[Mapping[str, Tensor]]  # running statistics of the hosts of every part by name, [hosts, ...]


@dataclass(frozen=True)
class Arrangement:
    """The hosts of a stacked model in parts that are computed one after another."""

    formations: Formations
    parts: Sequence[HostPart]
    inverse: Tensor | None  # place of every host in the parts, one behind another; None: they are in order
    weights: Assembly
    statistics: Assembly

    @classmethod
    def of(cls, formations: Formations, stacked_seeds: Sequence[StackedSeed], hosts: int, *, is_padded: bool = True) -> Arrangement | None:
        """Return the arrangement of `hosts` hosts with these seeds; None if none of them is a width seed.

        Without `is_padded`, only hosts of the same formation are in one part.
        """
        wide = [stacked for stacked in stacked_seeds if stacked.seed_kind.plan]
        if not wide:
            return None
        # Width seeds of every host as (order, number of the stacked seed).
        owned: list[list[tuple[int, int]]] = [[] for _ in range(hosts)]
        for number, stacked in enumerate(stacked_seeds):
            if stacked.seed_kind.plan:
                for owner, order in zip(stacked.owners, stacked.orders, strict=True):
                    if owner != ABSENT:
                        owned[owner].append((order, number))
        grouped: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for host, seeds in enumerate(owned):
            grouped[tuple(number for _, number in sorted(seeds))].append(host)
        equal = [
            EqualHosts(formations.of([_wide_kind(stacked_seeds[number]) for number in own]), some, own) for own, some in grouped.items()
        ]
        together = _together(formations, equal) if is_padded else [[one] for one in equal]
        parts = [HostPart.of(members, stacked_seeds, hosts, formations.device) for members in together]
        places = {host: place for place, host in enumerate(host for part in parts for host in part.hosts)}
        inverse = [places[host] for host in range(hosts)]

        def assembly(what: What, rows: Sequence[Tensor]) -> Assembly:
            shapes = [torch.Size((hosts, formations.layouts[what].width)), *(own.shape for own in rows)]
            of_parts = [part.rows(members, stacked_seeds, what) for part, members in zip(parts, together, strict=True)]
            return Assembly(of_parts, shapes, wide[0].alpha)

        weights, statistics = assembly("weights", [one.rows for one in wide]), assembly("statistics", [one.buffers for one in wide])
        return cls(formations, parts, None if len(parts) == 1 else upload(inverse, formations.device), weights, statistics)

    @torch.no_grad()
    def states(self, tensors: Mapping[str, Tensor], stacked_seeds: Sequence[StackedSeed]) -> States:
        """Return copies of the running statistics of hosts, given by name, and of their seeds, put together."""
        layout, rows = self.formations.layouts["statistics"], [stacked.buffers for stacked in stacked_seeds if stacked.seed_kind.plan]
        hosts = sum(len(part.hosts) for part in self.parts)
        return self.statistics.joined([layout.flatten(tensors) if layout.shapes else rows[0].new_zeros(hosts, 0), *rows])

    def apart(self, states: States) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the running statistics of the hosts by name, and those of every kind of width seeds."""
        own, *rows = self.statistics.apart(states)
        return self.formations.layouts["statistics"].unflatten(own), rows


def _wide_kind(stacked: StackedSeed) -> WidthKind:
    assert isinstance(stacked.seed_kind, WidthKind)
    return stacked.seed_kind


def _together(formations: Formations, equal: Sequence[EqualHosts]) -> list[list[EqualHosts]]:
    """Return which hosts are computed together, the widest first.

    Hosts join wider ones that hold them (see `Formation.holds`) where padding them is estimated to cost less than a part of their own.
    """
    parts: list[list[EqualHosts]] = []
    for some in sorted(equal, key=lambda one: one.formation.weights, reverse=True):
        for members in parts:
            leader = members[0].formation
            padding = (leader.weights - some.formation.weights) * len(some.hosts)
            if formations.is_worth_padding(padding) and leader.holds(some.formation):
                members.append(some)
                break
        else:
            parts.append([some])
    return parts


# Called with a slot, its activations before any seed, and the positions of the hosts (None: all); returns the activations to continue with.
Watch = Callable[[str, Tensor, Sequence[int] | None], Tensor]


@dataclass(frozen=True)
class StackedModel:
    """Some hosts with their seeds as one network. Without an `arrangement`, none of the seeds is a width seed."""

    host: Stacked
    tensors: Mapping[str, Tensor]  # parameters and buffers of the hosts by name, [N, ...]
    stacked_seeds: Sequence[StackedSeed]
    precision: torch.dtype | None = None  # of activations under autocast; None: that of the weights
    recompute: Recompute | None = None  # runs the blocks whose activations are recomputed in the backward pass; None: keep all
    arrangement: Arrangement | None = None
    states: States | None = None  # of the arrangement, which training passes change; None: copies of those of hosts and seeds

    @property
    def _places(self) -> list[Place]:
        """Places of all seeds."""
        return [stacked.place for stacked in self.stacked_seeds]

    def losses(self, inputs: Tensor, targets: Tensor, *, training: bool, watch: Watch | None = None) -> Tensor:
        """Return the mean loss of every host [N] on its samples: inputs [B, N, ...], targets [B, N, ...]."""
        return self.losses_of_samples(inputs, targets, training=training, watch=watch).mean(0)

    def losses_of_samples(self, inputs: Tensor, targets: Tensor, *, training: bool, watch: Watch | None = None) -> Tensor:
        """Return the loss of every sample [B, N]; that of a sequence is the mean over its tokens."""
        if self.arrangement is None:
            at = _at_slots(self.stacked_seeds, self._places, watch, None)
            return self._losses(self.host, self.tensors, inputs, targets, training, at)
        parts = zip(self.arrangement.parts, self.wide_tensors, strict=True)
        found = [self._losses_of_part(part, tensors, inputs, targets, training, watch) for part, tensors in parts]
        losses, inverse = found[0] if len(found) == 1 else torch.cat(found, dim=1), self.arrangement.inverse
        return losses if inverse is None else losses.index_select(1, inverse)

    @cached_property
    def wide_tensors(self) -> list[dict[str, Tensor]]:
        """For every part of the arrangement, the parameters and buffers of its hosts: name -> [hosts, ...]."""
        assert self.arrangement is not None
        formations, wide = self.arrangement.formations, [stacked for stacked in self.stacked_seeds if stacked.seed_kind.plan]
        rows = [formations.layouts["weights"].flatten(self.tensors), *(stacked.rows for stacked in wide)]
        weights = self.arrangement.weights.joined(rows, [stacked.alpha for stacked in wide])
        states = self.states or self.arrangement.states(self.tensors, self.stacked_seeds)
        found: list[dict[str, Tensor]] = []
        for part, own_weights, own_states in zip(self.arrangement.parts, weights, states, strict=True):
            others = {name: self.tensors[name] for name in formations.buffers}
            if part.index is not None:
                others = {name: buffer.index_select(0, part.index) for name, buffer in others.items()}
            found.append({**others, **own_states, **own_weights})
        return found

    def _losses_of_part(
        self, part: HostPart, tensors: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, training: bool, watch: Watch | None
    ) -> Tensor:
        """Return the loss of every sample of the hosts of a part, given their parameters and buffers by name."""
        assert self.arrangement is not None
        if part.index is not None:
            inputs, targets = inputs.index_select(1, part.index), targets.index_select(1, part.index)
        in_depth = [self.stacked_seeds[number].part(some) for number, some in part.others]
        at = _at_slots(in_depth, self._places, watch, part.hosts)
        losses = self._losses(part.leader.stacked, tensors, inputs, targets, training, at)
        if training and part.index is not None:
            for name in self.arrangement.formations.buffers:
                self.tensors[name].index_copy_(0, part.index, tensors[name])
        return losses

    def _losses(self, host: Stacked, tensors: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, training: bool, at: At) -> Tensor:
        """Return the loss of every sample, computed by one stacked network."""
        device = inputs.device.type
        with torch.autocast(device, dtype=self.precision, enabled=self.precision is not None):
            logits = host(tensors, inputs, training=training, at=at, recompute=self.recompute)
        if self.precision is not None:
            logits = logits.float()
        each = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
        each = each.view(len(inputs), inputs.shape[1], -1)
        return each.squeeze(2) if each.shape[2] == 1 else each.mean(dim=2)


def _at_slots(stacked_seeds: Sequence[StackedSeed], places: Iterable[Place], watch: Watch | None, hosts: Sequence[int] | None) -> At:
    """Return the function that the hosts call after each module with slots: it shows the activations to `watch` and adds the seeds.

    `stacked_seeds` are those in depth, `places` those of all seeds. A slot that has opened behind a kept seed comes after the slot of that
    seed.
    """
    by_slot: dict[str, list[StackedSeed]] = defaultdict(list)
    for stacked in stacked_seeds:
        by_slot[stacked.slot].append(stacked)
    opened: dict[str, list[str]] = {}  # module -> its slots in order, where there are seeds
    for place in sorted(places, key=lambda place: place.earlier):
        slots = opened.setdefault(place.module, [place.module])
        slots += [name for name in (place.name, place.name_of_next) if name not in slots]

    def at(module: str, h: Tensor) -> Tensor:
        for slot in opened.get(module, [module]):
            if watch is not None:
                h = watch(slot, h, hosts)
            if slot in by_slot:
                h = act(by_slot[slot], h)
        return h

    return at
