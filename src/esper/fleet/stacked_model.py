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

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.fleet.device import upload
from esper.fleet.seed_groups import MakeRowOptimizer, SomeSeeds, StackedSeed, act
from esper.fleet.stacked.lowering import At, Recompute, Stacked, lower
from esper.fleet.stacked.rows import Layout, ModuleRows
from esper.fleet.width import Fill, Formation, Formations, WidthKind
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
    """Hosts with width seeds of the same kinds. Seeds are given by numbers of the model's `StackedSeed`s."""

    formation: Formation
    hosts: Sequence[int]  # positions in the stacked model
    index: Tensor | None  # the same on the device; None: all hosts, in order
    wide: Sequence[tuple[int, SomeSeeds]]  # width seeds in the order of their units, one in every host

    @classmethod
    def of(
        cls, formations: Formations, stacked_seeds: Sequence[StackedSeed], wide: Sequence[int], hosts: Sequence[int], *, total: int
    ) -> EqualHosts:
        """Return these hosts out of `total`. `wide` are the numbers of their width seeds."""
        kinds = [kind for number in wide if isinstance(kind := stacked_seeds[number].seed_kind, WidthKind)]
        by_number = dict(_seeds_of(formations, stacked_seeds, hosts))
        return cls(formations.of(kinds), hosts, _index_of(formations, hosts, total), [(number, by_number[number]) for number in wide])


@dataclass(frozen=True)
class HostPart:
    """Hosts of a stacked model that are computed together, as hosts of the leader, the widest formation among them."""

    leader: Formation
    members: Sequence[EqualHosts]
    fills: Sequence[Fill | None]  # of the members; None: their weights are those of the leader
    hosts: Sequence[int]  # of all members, positions in the stacked model
    index: Tensor | None  # the same on the device; None: all hosts, in order
    others: Sequence[tuple[int, SomeSeeds]]  # seeds that are no width seeds

    @classmethod
    def of(cls, formations: Formations, stacked_seeds: Sequence[StackedSeed], members: Sequence[EqualHosts], *, total: int) -> HostPart:
        leader, hosts = members[0].formation, [host for member in members for host in member.hosts]
        others = [
            (number, some) for number, some in _seeds_of(formations, stacked_seeds, hosts) if not stacked_seeds[number].seed_kind.plan
        ]
        fills = [leader.fill_of(member.formation) if member.wide or len(members) > 1 else None for member in members]
        return cls(leader, members, fills, hosts, _index_of(formations, hosts, total), others)


def _seeds_of(formations: Formations, stacked_seeds: Sequence[StackedSeed], hosts: Sequence[int]) -> list[tuple[int, SomeSeeds]]:
    """Return the seeds of these hosts, by the numbers of the stacked seeds that have some of them."""
    found: list[tuple[int, SomeSeeds]] = []
    for number, stacked in enumerate(stacked_seeds):
        # In the order of the hosts, because the weights of width seeds are put beside those of the hosts.
        of_owner = {owner: seed for seed, owner in enumerate(stacked.owners)}
        seeds = [(of_owner[host], place) for place, host in enumerate(hosts) if host in of_owner]
        if seeds:
            numbers, places = [seed for seed, _ in seeds], [place for _, place in seeds]
            found.append((number, SomeSeeds.of(numbers, len(stacked.owners), places, len(hosts), formations.device)))
    return found


def _index_of(formations: Formations, hosts: Sequence[int], total: int) -> Tensor | None:
    return None if list(hosts) == list(range(total)) else upload(hosts, formations.device)


@dataclass(frozen=True)
class Arrangement:
    """The hosts of a stacked model in parts that are computed one after another."""

    formations: Formations
    parts: Sequence[HostPart]
    inverse: Tensor | None  # place of every host in the parts, one behind another; None: they are in order

    @classmethod
    def of(cls, formations: Formations, stacked_seeds: Sequence[StackedSeed], hosts: int, *, is_padded: bool = True) -> Arrangement | None:
        """Return the arrangement of `hosts` hosts with these seeds; None if none of them is a width seed.

        Without `is_padded`, only hosts of the same formation are in one part.
        """
        if not any(stacked.seed_kind.plan for stacked in stacked_seeds):
            return None
        # Width seeds of every host as (order, number of the stacked seed).
        owned: list[list[tuple[int, int]]] = [[] for _ in range(hosts)]
        for number, stacked in enumerate(stacked_seeds):
            if stacked.seed_kind.plan:
                for owner, order in zip(stacked.owners, stacked.orders, strict=True):
                    owned[owner].append((order, number))
        grouped: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for host, seeds in enumerate(owned):
            grouped[tuple(number for _, number in sorted(seeds))].append(host)
        equal = [EqualHosts.of(formations, stacked_seeds, wide, some, total=hosts) for wide, some in grouped.items()]
        parts = [
            HostPart.of(formations, stacked_seeds, members, total=hosts)
            for members in (_together(formations, equal) if is_padded else [[one] for one in equal])
        ]
        places = {host: place for place, host in enumerate(host for part in parts for host in part.hosts)}
        inverse = [places[host] for host in range(hosts)]
        return cls(formations, parts, None if inverse == list(range(hosts)) else upload(inverse, formations.device))


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
        weights = self.arrangement.formations.layout.flatten(self.tensors)
        found = [self._losses_of_part(part, weights, inputs, targets, training, watch) for part in self.arrangement.parts]
        losses, inverse = found[0] if len(found) == 1 else torch.cat(found, dim=1), self.arrangement.inverse
        return losses if inverse is None else losses.index_select(1, inverse)

    def _losses_of_part(
        self, part: HostPart, weights: Tensor, inputs: Tensor, targets: Tensor, training: bool, watch: Watch | None
    ) -> Tensor:
        """Return the loss of every sample of the hosts of a part. `weights` [N, P] are those of all hosts."""
        assert self.arrangement is not None
        buffers = {name: self.tensors[name] for name in self.arrangement.formations.buffers}
        if part.index is not None:
            inputs, targets = inputs.index_select(1, part.index), targets.index_select(1, part.index)
        flat: list[Tensor] = []
        joined: list[dict[str, Tensor]] = []
        for member, fill in zip(part.members, part.fills, strict=True):
            seeds = [self.stacked_seeds[number].part(some).as_wide() for number, some in member.wide]
            own = {name: _chosen(buffer, member.index) for name, buffer in buffers.items()}
            of_hosts = _chosen(weights, member.index)
            flat.append(of_hosts if fill is None else member.formation.flat(of_hosts, seeds, fill))
            joined.append(member.formation.joined(own, seeds, part.leader))
        states = joined[0] if len(joined) == 1 else {name: torch.cat([one[name] for one in joined]) for name in buffers}
        tensors = {**states, **part.leader.parameters(torch.cat(flat) if len(flat) > 1 else flat[0])}
        others = [self.stacked_seeds[number].part(some) for number, some in part.others]
        at = _at_slots(others, self._places, watch, part.hosts)
        losses = self._losses(part.leader.stacked, tensors, inputs, targets, training, at)
        if training:
            self._put_back(part, states)
        return losses

    @torch.no_grad()
    def _put_back(self, part: HostPart, states: Mapping[str, Tensor]) -> None:
        """Write the running statistics of a pass of some hosts to those of the stacked model and its seeds."""
        assert self.arrangement is not None
        start = 0
        for member in part.members:
            for name in self.arrangement.formations.buffers:
                # In a wide host, the statistics of the seeds come behind those of the host, and padding behind them.
                targets = [(self.tensors[name], member.index)]
                for place, own_name in member.formation.statistics.get(name, ()):
                    number, some = member.wide[place]
                    targets.append((self.stacked_seeds[number].buffers[own_name], some.chosen))
                # A part of one kind of hosts may have the buffers themselves, which need no copy.
                values = states[name] if len(part.members) == 1 else states[name][start : start + len(member.hosts)]
                column = 0
                for target, index in targets:
                    value = values
                    if name in part.leader.statistics:
                        value = values.narrow(1, column, target.shape[1])
                        column += target.shape[1]
                    if index is not None:
                        target.index_copy_(0, index, value)
                    elif target is not value:
                        target.copy_(value)
            start += len(member.hosts)

    def _losses(self, host: Stacked, tensors: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, training: bool, at: At) -> Tensor:
        """Return the loss of every sample, computed by one stacked network."""
        device = inputs.device.type
        with torch.autocast(device, dtype=self.precision, enabled=self.precision is not None):
            logits = host(tensors, inputs, training=training, at=at, recompute=self.recompute)
        if self.precision is not None:
            logits = logits.float()
        each = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
        return each.view(len(inputs), inputs.shape[1], -1).mean(dim=2)


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


def _chosen(tensor: Tensor, index: Tensor | None) -> Tensor:
    """Return the rows of a tensor at these places; None: all."""
    return tensor if index is None else tensor.index_select(0, index)
