"""Width seeds of a fleet: hosts with more units compute as the wider hosts that they are.

A host with width seeds is the host that `esper.growth.seeds.width.fold` would make of it. Its wide weights are put together in every step
from the weights of the host and of its seeds, and the wide host is computed by the same kernels as any other. Gradients go the same way
back, so hosts and seeds learn apart, each by its own optimiser. Running statistics are put together once for all steps up to the next
decision, and taken apart behind them.

- `WidthKind`: width seeds with the same parts, and the layout of their weights and statistics in a row.
- `Formation`: hosts with the same parts of seeds. It has the wide host as a stacked module, and says where its numbers come from.
- `Formations`: all formations of a fleet that were needed so far.
- `Assembly`: gathers the tensors of all wide hosts from the rows of hosts and seeds, and such rows from these tensors.

Small hosts of different widths are computed together, as hosts of the widest among them, whose other units and weights are zero. A kernel
takes about as long for few numbers as for many.

Shapes: N = hosts, P = numbers of a host, W = numbers of a wide host, G = numbers of all wide hosts, S = numbers of all hosts and seeds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from esper.devices import upload
from esper.fleet.stacked.lowering import Stacked, lower
from esper.fleet.stacked.rows import Layout
from esper.growth.host.layout import CPU, Place
from esper.growth.seeds.folding import fold
from esper.growth.seeds.seed import WidePlan
from esper.growth.seeds.width import WidthSeed
from esper.torch_internals import BatchNormBase, ConvBase, NormBase

_WORK_OF_A_PART = {"cpu": 5e7, "cuda": 5e9}  # FLOPs in the time that the kernels of a small part take to start, by device; estimates
_ALIGNMENT = 16  # bytes that a kernel may read at once: cuDNN reads the gain of a norm in such steps
What = Literal["weights", "statistics"]
WHATS: tuple[What, ...] = ("weights", "statistics")


class WidthKind:
    """Width seeds of one blueprint in one slot with the same parts. `modules` are those of a host on the CPU, by name."""

    def __init__(self, place: Place, blueprint: str, plan: tuple[WidePlan, ...], modules: Mapping[str, nn.Module]) -> None:
        self.place, self.blueprint, self.plan, self._modules = place, blueprint, plan, modules
        seed = self.build(random_seed=0)
        self.layout = Layout.of(seed)
        self.buffers = Layout.of_tensors(statistics_of(seed), place.dtype)
        # `is_back` marks the weights of a seed by which the host reads new units, and `back` lists their positions in its row.
        is_back = torch.cat([torch.full((shape.numel(),), ".back." in name) for name, shape in self.layout.shapes.items()])
        self.is_back, self.back = is_back, upload(is_back.nonzero().squeeze(1), place.device)

    def build(self, *, random_seed: int) -> WidthSeed:
        """Return a new seed on the CPU."""
        return WidthSeed(replace(self.place, device=CPU), self.blueprint, self._modules, self.plan, random_seed=random_seed)


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of all norms inside a module, by name. A training pass changes them, but does not depend on them."""
    found = {name: (module.get_submodule(name.rpartition(".")[0]), buffer) for name, buffer in module.named_buffers()}
    return {name: buffer for name, (owner, buffer) in found.items() if isinstance(owner, NormBase) and buffer.ndim}


def _tensors_of(module: nn.Module, what: What) -> dict[str, Tensor]:
    return dict(module.named_parameters()) if what == "weights" else statistics_of(module)


class Fill(NamedTuple):
    """Says of each number in the row of a wide host where it comes from. Pieces are 0: constants, 1: the host, 2: its first seed, ..."""

    piece: Tensor  # [W]
    column: Tensor  # [W], place in the row of the piece
    alpha: Tensor  # [W], the piece whose alpha multiplies it; 0: none


_PADDED = (nn.Linear, ConvBase, BatchNormBase)  # whose units may be zero without changing any other unit


class Formation:
    """Hosts with width seeds of the same `kinds`, in the order of their units. `template` is a host on the CPU."""

    def __init__(self, template: nn.Module, slots: Sequence[str], kinds: Sequence[WidthKind], device: torch.device) -> None:
        # Number all weights and statistics, and fold the numbers: the wide host then says of each of its own which one it is; 0 is none.
        wide = copy.deepcopy(template).to(CPU, torch.float64)
        modules = dict(wide.named_modules())
        seeds = [kind.build(random_seed=0).double() for kind in kinds]
        self._sizes: dict[What, list[int]] = {}  # of every piece but the first
        for what in WHATS:
            sizes = self._sizes[what] = []
            for module in (wide, *seeds):
                start = sum(sizes)
                sizes.append(0)
                for tensor in _tensors_of(module, what).values():
                    first = start + sizes[-1] + 1
                    tensor.data = torch.arange(first, first + tensor.numel(), dtype=torch.float64).view(tensor.shape)
                    sizes[-1] += tensor.numel()
        for seed in seeds:
            seed.alpha.fill_(1.0)
        fold(modules, seeds)

        self._device, self._kinds = device, kinds
        tensors = {what: _tensors_of(wide, what) for what in WHATS}
        self._numbers = {what: {name: tensor.detach().long() for name, tensor in some.items()} for what, some in tensors.items()}
        self.layouts = {what: Layout.of_tensors(some, torch.float64) for what, some in tensors.items()}  # of the rows of a wide host
        self.weights = self.layouts["weights"].width  # W
        self._fills: dict[tuple[Formation, What], Fill] = {}
        self._modules = {name: module for name, module in wide.named_modules() if list(module.parameters(recurse=False))}
        self.stacked: Stacked = lower(wide.to(next(template.parameters()).dtype), slots=slots)

    def holds(self, other: Formation) -> bool:
        """Return whether a host of this formation computes what one of the other does if some of its units and weights are zero."""
        for name, module in self._modules.items():
            its = other._modules[name]
            pairs = [(one.shape, its.get_parameter(own).shape) for own, one in module.named_parameters(recurse=False)]
            if all(one == two for one, two in pairs):
                continue
            is_larger = all(large >= small for one, two in pairs for large, small in zip(one, two, strict=True))
            if not is_larger or not isinstance(module, _PADDED) or getattr(module, "groups", 1) != 1:
                return False
        return True

    def fill_of(self, other: Formation, what: What) -> Fill:
        """Return how the numbers of hosts of another formation are filled into those of this one, which holds it."""
        if (other, what) not in self._fills:
            parts, ones = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]  # there may be no statistics
            for name, numbers in self._numbers[what].items():
                padded, its = torch.zeros_like(numbers), other._numbers[what][name]
                padded[tuple(slice(size) for size in its.shape)] = its
                parts.append(padded.flatten())
                ones.append(torch.full_like(parts[-1], name.endswith("running_var")))  # the variance of a unit of zeros is one, as at birth
            self._fills[other, what] = other._fill(torch.cat(parts), torch.cat(ones), what)
        return self._fills[other, what]

    def _fill(self, numbers: Tensor, constants: Tensor, what: What) -> Fill:
        """Return where the numbers [W] come from. A number of 0 comes from a constant, 0 or 1, as given in `constants` [W]."""
        ends = torch.tensor(list(accumulate(self._sizes[what])))
        piece = torch.bucketize(numbers, ends) + 1
        column = numbers - 1 - torch.cat([ends.new_zeros(2), ends])[piece]
        piece, column = torch.where(numbers > 0, piece, 0), torch.where(numbers > 0, column, constants)
        is_scaled = torch.zeros(1 + sum(self._sizes[what]), dtype=torch.bool)
        if what == "weights":
            is_scaled[1 + self._sizes[what][0] :] = torch.cat([is_scaled[:0], *(kind.is_back for kind in self._kinds)])
        alpha = torch.where(is_scaled[numbers], piece, 0)
        return Fill(*(upload(tensor, self._device) for tensor in (piece, column, alpha)))


@dataclass(frozen=True)
class PartRows:
    """Says where the numbers of some wide hosts come from, which are computed together."""

    hosts: Sequence[int]  # numbers of the hosts
    seeds: Sequence[Sequence[tuple[int, int]]]  # of each host, in the order of their units: a kind of seeds, and a seed of that kind
    fills: Sequence[Fill]
    fill_of_host: Sequence[int]  # which of the fills each host has
    layout: Layout  # of the rows


class Assembly:
    """Gathers the tensors of all wide hosts of a stacked model from the rows of hosts and seeds, and the rows from the tensors.

    The tensors come from one source: the rows of all hosts, those of every kind of width seeds, and the constants 0 and 1, one behind
    another. Every tensor is contiguous for all hosts of a part together, so that layers need no copies of it. `shapes` are those of the
    rows of the hosts and of every kind of seeds, `like` is a tensor of their dtype and device.
    """

    def __init__(self, parts: Sequence[PartRows], shapes: Sequence[torch.Size], like: Tensor) -> None:
        self._shapes, device = shapes, like.device
        self._names = [[(name, (len(part.hosts), *shape)) for name, shape in part.layout.shapes.items()] for part in parts]
        unit = _ALIGNMENT // like.dtype.itemsize
        self._zeros, self._constants = like.new_zeros(unit), upload([0.0, 1.0], device, like.dtype)
        starts = list(accumulate((shape.numel() for shape in shapes), initial=0))
        alphas = list(accumulate((shape[0] for shape in shapes[1:]), initial=len(self._constants)))  # they come behind the constants
        # Places in the source of the numbers of all tensors, each filled up with zeros to the next address that a kernel may start to read
        # at; and of the alphas that they are multiplied by, which is the constant 1 for numbers without one.
        zero, one = upload([starts[-1]] * unit, device), upload([1] * unit, device)
        indices, scales = list[Tensor](), list[Tensor]()
        self._sizes: list[int] = []  # of every tensor, and of the zeros behind it
        for part in parts:
            most = max(map(len, part.seeds))
            rows, factors = [], []
            for host, seeds in zip(part.hosts, part.seeds, strict=True):
                rows.append([starts[-1], host * shapes[0][1], *(starts[1 + kind] + seed * shapes[1 + kind][1] for kind, seed in seeds)])
                factors.append([1, 1, *(alphas[kind] + seed for kind, seed in seeds)])
            places, factor_places = (upload([row + [0] * (2 + most - len(row)) for row in some], device) for some in (rows, factors))
            which = upload(part.fill_of_host, device)
            piece, column, alpha = (torch.stack(some).index_select(0, which) for some in zip(*part.fills, strict=True))  # [hosts, W]
            found = (places.gather(1, piece) + column, factor_places.gather(1, alpha))
            for index, scale in zip(*(each.split_with_sizes(part.layout.sizes, dim=1) for each in found), strict=True):
                missing = -index.numel() % unit
                self._sizes += [index.numel(), missing]
                indices += [index.flatten(), zero[:missing]]
                scales += [scale.flatten(), one[:missing]]
        index, scale = torch.cat([*indices, zero]), torch.cat([*scales, one])  # [G], with zeros at the end in any case
        inverse = torch.full((starts[-1] + len(self._constants),), len(index) - 1, device=device)
        inverse.index_copy_(0, index, torch.arange(len(index), device=device))
        # Half of the memory, as long as that is enough for a place.
        dtype = torch.int32 if max(len(index), len(inverse)) < 2**31 else torch.int64
        self._index, self._scale, self._inverse = index.to(dtype), scale.to(dtype), inverse.to(dtype)

    def joined(self, rows: Sequence[Tensor], alphas: Sequence[Tensor] = ()) -> list[dict[str, Tensor]]:
        """Return the tensors of the wide hosts of every part by name, given the rows of all hosts and of every kind of seeds.

        The numbers by which hosts read new units are multiplied by the `alphas` of the kinds, if these are given.
        """
        factors = torch.cat([self._constants, *alphas]).index_select(0, self._scale) if alphas else None
        tensors = iter(_Joined.apply(self, factors, *rows))  # type: ignore[no-untyped-call]
        return [{name: next(tensors).view(shape) for name, shape in names} for names in self._names]

    def apart(self, parts: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Return the rows of all hosts and of every kind of seeds, given the tensors of the wide hosts of every part by name."""
        return self._taken_apart(self._flat([part[name] for part, names in zip(parts, self._names, strict=True) for name, _ in names]))

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors and the zeros behind them, one behind another [G]."""
        pieces = zip(tensors, self._sizes[1::2], strict=True)
        return torch.cat([*(piece for tensor, missing in pieces for piece in (tensor.flatten(), self._zeros[:missing])), self._zeros])

    def _taken_apart(self, flat: Tensor) -> list[Tensor]:
        *rows, _ = flat.index_select(0, self._inverse).split_with_sizes([*(shape.numel() for shape in self._shapes), len(self._constants)])
        return [some.view(shape) for some, shape in zip(rows, self._shapes, strict=True)]


class _Joined(torch.autograd.Function):
    """Gathers numbers from rows and constants. Each number of a row is gathered once, so that its gradient is found by another gather.

    Constants may be gathered often. They need no gradient.
    """

    @staticmethod
    def forward(ctx: Any, assembly: Assembly, factors: Tensor | None, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.assembly, ctx.factors = assembly, factors
        flat = torch.cat([*(some.flatten() for some in rows), assembly._constants]).index_select(0, assembly._index)
        if factors is not None:
            flat.mul_(factors)
        return flat.split_with_sizes([*assembly._sizes, len(assembly._zeros)])[:-1:2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = ctx.assembly._flat(gradients)
        if ctx.factors is not None:
            flat.mul_(ctx.factors)
        return None, None, *ctx.assembly._taken_apart(flat)


class Formations:
    """The formations of a fleet, built when they are first needed. `template` is a host of the architecture.

    `work_per_weight` are the FLOPs of a training step of one host for each of its weights, about.
    """

    def __init__(self, template: nn.Module, slots: Sequence[str], device: torch.device, *, work_per_weight: float) -> None:
        self.work_per_weight = work_per_weight
        self.template = copy.deepcopy(template).to(CPU)
        self.modules = dict(self.template.named_modules())
        dtype = next(template.parameters()).dtype
        # Of the rows of a host; and the names of all other buffers.
        self.layouts = {what: Layout.of_tensors(_tensors_of(template, what), dtype) for what in WHATS}
        self.buffers = [name for name, _ in template.named_buffers() if name not in self.layouts["statistics"].shapes]
        self.device, self._slots = device, slots
        self._known: dict[tuple[tuple[WidePlan, ...], ...], Formation] = {}

    def of(self, kinds: Sequence[WidthKind]) -> Formation:
        """Return the formation of hosts with width seeds of these kinds, in the order of their units."""
        key = tuple(kind.plan for kind in kinds)
        if key not in self._known:
            self._known[key] = Formation(self.template, self._slots, kinds, self.device)
        return self._known[key]

    @property
    def weights(self) -> int:
        """Number of weights of all formations in memory, each counted for one host."""
        return sum(formation.weights for formation in self._known.values())

    def forget(self) -> None:
        """Forget all formations. They are built again when they are needed."""
        for formation in self._known.values():
            formation._fills.clear()  # which refer to one another, so that they would stay until the next garbage collection
        self._known.clear()

    def is_worth_padding(self, weights: int) -> bool:
        """Return whether to compute this many weights of zero in a step, rather than a further part with kernels of its own."""
        return weights * self.work_per_weight <= _WORK_OF_A_PART.get(self.device.type, 0.0)
