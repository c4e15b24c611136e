"""Width seeds of a fleet: hosts with more units compute as the wider hosts that they are.

A host with width seeds is the host that `esper.growth.seeds.width.fold` would make of it. Its wide weights are put together in every step
from the weights of the host and of its seeds, and the wide host is computed by the same kernels as any other. Gradients go the same way
back, so hosts and seeds learn apart, each by its own optimiser. Running statistics are put together in front of a pass and taken apart
behind it.

- `WidthKind`: width seeds with the same parts, and the layout of their weights and statistics in a row.
- `Formation`: hosts with the same parts of seeds. It has the wide host as a stacked module, and puts its tensors together.
- `Formations`: all formations of a fleet that were needed so far.

Shapes: N = hosts, P = weights of a host, S = weights of a host and its seeds, W = weights of the wide host.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from esper.fleet.device import upload
from esper.fleet.stacked.lowering import Stacked, lower
from esper.fleet.stacked.rows import Layout
from esper.growth.host.layout import CPU, Place
from esper.growth.seeds.seed import WidePlan
from esper.growth.seeds.width import WidthSeed, fold

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

        numbers = torch.cat([parameter.detach().flatten() for parameter in wide.parameters()]).long()  # [W]
        is_used, inverse = numbers > 0, torch.zeros(count + 1, dtype=torch.int64)
        inverse[numbers[is_used] - 1] = torch.arange(len(numbers))[is_used]
        self._index = upload(torch.where(is_used, numbers - 1, count), device)  # [W], places in the S weights and a zero behind them
        self._inverse = upload(inverse, device)  # [S + 1]
        self._layout = Layout.of_tensors(dict(wide.named_parameters()), torch.float64)
        self.stacked: Stacked = lower(wide.to(next(template.parameters()).dtype), slots=slots)
        # Buffer of the host -> (number of a seed, its buffer) for the statistics that come behind those of the host, in order.
        self.statistics: dict[str, list[tuple[int, str]]] = {}
        for number, kind in enumerate(kinds):
            for name in kind.buffers.shapes:
                part, _, own = name.removeprefix("parts.").partition(".own.")
                self.statistics.setdefault(f"{kind.plan[int(part)].module}.{own}", []).append((number, name))

    def tensors(self, weights: Tensor, buffers: Mapping[str, Tensor], seeds: Sequence[WideSeeds]) -> dict[str, Tensor]:
        """Return parameters and buffers of the wide hosts, name -> [N, ...].

        `weights` [N, P] are those of the hosts, in the order of `Formations.layout`, and `buffers` their buffers by name.
        """
        source = torch.cat([weights, *(some.scaled() for some in seeds), weights.new_zeros(len(weights), 1)], dim=1)  # [N, S + 1]
        flat: Tensor = _Arranged.apply(source, self._index, self._inverse)  # type: ignore[no-untyped-call]
        statistics = {
            name: torch.cat([buffers[name], *(seeds[number].buffers[own_name] for number, own_name in parts)], dim=1)
            for name, parts in self.statistics.items()
        }
        return {**buffers, **self._layout.unflatten(flat), **statistics}


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
    """The formations of a fleet, built when they are first needed. `template` is a host of the architecture."""

    def __init__(self, template: nn.Module, slots: Sequence[str], device: torch.device) -> None:
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
