"""Width seeds of a fleet: hosts with more units compute as the wider hosts that they are.

A host with width seeds is the host that `esper.growth.seeds.width.fold` would make of it. Its wide weights are put together in every step
from the weights of the host and of its seeds, and the wide host is computed by the same kernels as any other. Gradients go the same way
back, so hosts and seeds learn apart, each by its own optimiser. Running statistics are put together in front of a pass and taken apart
behind it.

- `WidthKind`: width seeds with the same parts, and the layout of their weights and statistics in a row.
- `Formation`: hosts with the same parts of seeds. It has the wide host as a stacked module, and puts its tensors together.
- `Formations`: all formations of a fleet that were needed so far.

Small hosts of different widths are computed together, as hosts of the widest among them, whose other units and weights are zero. A kernel
takes about as long for few numbers as for many.

Shapes: N = hosts, P = weights of a host, S = weights of a host and its seeds, W = weights of the wide host.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.fleet.device import upload
from esper.fleet.stacked.lowering import Stacked, lower
from esper.fleet.stacked.rows import Layout
from esper.growth.host.layout import CPU, Place
from esper.growth.seeds.seed import WidePlan
from esper.growth.seeds.width import WidthSeed, fold

_WORK_OF_A_PART = {"cpu": 5e7, "cuda": 5e9}  # FLOPs in the time that the kernels of a small part take to start, by device; estimates
ROW = "row"  # name of the weights of a width seed among those of a stacked seed: they are not split into tensors


class WidthKind:
    """Width seeds of one blueprint in one slot with the same parts. `modules` are those of a host on the CPU, by name."""

    def __init__(self, place: Place, blueprint: str, plan: tuple[WidePlan, ...], modules: Mapping[str, nn.Module]) -> None:
        self.place, self.blueprint, self.plan, self._modules = place, blueprint, plan, modules
        seed = self.build(random_seed=0)
        self.layout = Layout.of(seed)
        self.buffers = Layout.of_tensors(statistics_of(seed), place.dtype)
        # `is_back` marks the weights of a seed by which the host reads new units, and `back` lists their positions in its row.
        is_back = torch.cat([torch.full((shape.numel(),), ".back." in name) for name, shape in self.layout.shapes.items()])
        self.is_back, self.back = upload(is_back, place.device), upload(is_back.nonzero().squeeze(1), place.device)

    def build(self, *, random_seed: int) -> WidthSeed:
        """Return a new seed on the CPU."""
        return WidthSeed(replace(self.place, device=CPU), self.blueprint, self._modules, self.plan, random_seed=random_seed)

    def weights_of(self, rows: Tensor) -> dict[str, Tensor]:
        """Return rows of weights [N, ...] as a stacked seed holds them."""
        return {ROW: rows}


def statistics_of(seed: nn.Module) -> dict[str, Tensor]:
    """Return the buffers with a number for each unit, by name."""
    return {name: buffer for name, buffer in seed.named_buffers() if buffer.ndim}


@dataclass(frozen=True)
class WideSeeds:
    """One width seed in each host of a formation."""

    kind: WidthKind
    rows: Tensor  # weights [N, ...]
    alpha: Tensor  # [N]
    buffers: Mapping[str, Tensor]  # [N, ...]

    def scaled(self) -> Tensor:
        """Return the weights, those by which the host reads new units times alpha."""
        return self.rows * torch.where(self.kind.is_back, self.alpha.unsqueeze(1), 1.0)


@dataclass(frozen=True)
class Fill:
    """Says of each weight of a wide host which weight of the host or of its seeds it is, or that it is zero."""

    index: Tensor  # [W], places among the S weights of host and seeds, and a zero behind them
    inverse: Tensor  # [S + 1], places among the W weights

    @classmethod
    def of(cls, numbers: Tensor, count: int, device: torch.device) -> Fill:
        """Return how weights with these numbers [W], from 1 to `count`, are filled; 0 is none."""
        is_used, inverse = numbers > 0, torch.zeros(count + 1, dtype=torch.int64)
        inverse[numbers[is_used] - 1] = torch.arange(len(numbers))[is_used]
        return cls(upload(torch.where(is_used, numbers - 1, count), device), upload(inverse, device))


_PADDED = (nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm)  # whose units may be zero without changing any other unit


class Formation:
    """Hosts with width seeds of the same `kinds`, in the order of their units. `template` is a host on the CPU."""

    def __init__(self, template: nn.Module, slots: Sequence[str], kinds: Sequence[WidthKind], device: torch.device) -> None:
        # Number all weights, and fold the numbers: the wide host then says of each of its weights which one it is; 0 is none.
        wide = copy.deepcopy(template).to(CPU, torch.float64)
        modules = dict(wide.named_modules())
        seeds = [kind.build(random_seed=0).double() for kind in kinds]
        count = 0
        for parameter in (parameter for module in (wide, *seeds) for parameter in module.parameters()):
            parameter.data = torch.arange(count + 1, count + 1 + parameter.numel(), dtype=torch.float64).view(parameter.shape)
            count += parameter.numel()
        for seed in seeds:
            seed.alpha.fill_(1.0)
        fold(modules, seeds)

        self._device, self._count = device, count
        self._numbers = {name: parameter.detach().long() for name, parameter in wide.named_parameters()}
        self.weights = sum(numbers.numel() for numbers in self._numbers.values())  # W
        self.buffers = {name: buffer.shape for name, buffer in wide.named_buffers()}
        self._fills: dict[Formation, Fill] = {}
        self._layout = Layout.of_tensors(dict(wide.named_parameters()), torch.float64)
        self._modules = {name: module for name, module in wide.named_modules() if list(module.parameters(recurse=False))}
        self.stacked: Stacked = lower(wide.to(next(template.parameters()).dtype), slots=slots)
        # Buffer of the host -> (number of a seed, its buffer) for the statistics that come behind those of the host, in order.
        self.statistics: dict[str, list[tuple[int, str]]] = {}
        for number, kind in enumerate(kinds):
            for name in kind.buffers.shapes:
                part, _, own = name.removeprefix("parts.").partition(".own.")
                self.statistics.setdefault(f"{kind.plan[int(part)].module}.{own}", []).append((number, name))

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

    def fill_of(self, other: Formation) -> Fill:
        """Return how the weights of hosts of another formation are filled into those of this one, which holds it."""
        if other not in self._fills:
            parts = []
            for name, numbers in self._numbers.items():
                padded, its = torch.zeros_like(numbers), other._numbers[name]
                padded[tuple(slice(size) for size in its.shape)] = its
                parts.append(padded.flatten())
            self._fills[other] = Fill.of(torch.cat(parts), other._count, self._device)
        return self._fills[other]

    @staticmethod
    def flat(weights: Tensor, seeds: Sequence[WideSeeds], fill: Fill) -> Tensor:
        """Return the weights of wide hosts [N, W]; those of the hosts, `weights` [N, P], are in the order of `Formations.layout`."""
        source = torch.cat([weights, *(some.scaled() for some in seeds), weights.new_zeros(len(weights), 1)], dim=1)  # [N, S + 1]
        flat: Tensor = _Arranged.apply(source, fill.index, fill.inverse)  # type: ignore[no-untyped-call]
        return flat

    def parameters(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters of wide hosts by name, from their weights [N, W]."""
        return self._layout.unflatten(flat)

    def joined(self, buffers: Mapping[str, Tensor], seeds: Sequence[WideSeeds], leader: Formation) -> dict[str, Tensor]:
        """Return the buffers of hosts and seeds, put together and padded to the size that they have in hosts of the leader."""
        found = dict(buffers)
        for name, parts in self.statistics.items():
            found[name] = torch.cat([buffers[name], *(seeds[number].buffers[own_name] for number, own_name in parts)], dim=1)
        for name in leader.statistics:
            missing = leader.buffers[name][0] - found[name].shape[1]
            if missing:
                found[name] = F.pad(found[name], (0, missing), value=float(name.endswith("running_var")))
        return found


class _Arranged(torch.autograd.Function):
    """Picks columns of a tensor [N, S + 1], each once, so its gradient is picked too. The last column is a constant, picked often."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return source.index_select(1, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(1, inverse), None, None


class Formations:
    """The formations of a fleet, built when they are first needed. `template` is a host of the architecture.

    `work_per_weight` are the FLOPs of a training step of one host for each of its weights, about.
    """

    def __init__(self, template: nn.Module, slots: Sequence[str], device: torch.device, *, work_per_weight: float) -> None:
        self.work_per_weight = work_per_weight
        self.template = copy.deepcopy(template).to(CPU)
        self.modules = dict(self.template.named_modules())
        self.layout = Layout.of_tensors(dict(template.named_parameters()), next(template.parameters()).dtype)  # of a host's weights
        self.buffers = [name for name, _ in template.named_buffers()]
        self.device, self._slots = device, slots
        self._known: dict[tuple[tuple[WidePlan, ...], ...], Formation] = {}

    def of(self, kinds: Sequence[WidthKind]) -> Formation:
        """Return the formation of hosts with width seeds of these kinds, in the order of their units."""
        key = tuple(kind.plan for kind in kinds)
        if key not in self._known:
            self._known[key] = Formation(self.template, self._slots, kinds, self.device)
        return self._known[key]

    def is_worth_padding(self, weights: int) -> bool:
        """Return whether to compute this many weights of zero in a step, rather than a further part with kernels of its own."""
        return weights * self.work_per_weight <= _WORK_OF_A_PART.get(self.device.type, 0.0)
