"""Remove units of a model that do not pay their rent, by the evidence by which seeds are kept: paired losses on the validation batches.

    removed = esper.shrink(model, evaluate, example_input=x[:2])   # `model` in place; prints well: print(removed)

It works on any model whose units `add_slots(...).describe()` lists as such that can be widened: one that was baked, so that its seeds are
rows and columns of its own layers, or one that never grew. The units with the smallest weights are tried first, a share of a layer at a
time. They are removed if the whole interval of the loss that this costs is below the rent that it saves. Parameters stay the same objects;
an optimiser that is passed keeps the state of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.display import Card, Displayed
from esper.growth.config import GrowthError, RentConfig
from esper.growth.events import Shrunk
from esper.growth.host.discover import discover
from esper.growth.host.find_units import find_units
from esper.growth.host.isolation import is_compiled, unwrap
from esper.growth.host.layout import Units
from esper.growth.host.slotted import check_has_no_slots
from esper.growth.host.units import layer_of, part_of, tensors_of
from esper.growth.lifecycle.stages import Cost
from esper.growth.measure.contribution import Evaluate, gain_of, losses_of, rent_of
from esper.growth.seeds.blueprints import widening_cost
from esper.growth.seeds.folding import set_data, sizes_of
from esper.growth.seeds.optimizer_state import States
from esper.statistics import Interval
from esper.text_table import aligned, figure, with_interval

HEADING = ("layer", "units", "costs", "saves")


@dataclass(frozen=True)
class Removed(Displayed):
    """The result of `shrink`: one event for every group of units that was removed, and the size of the model before and after."""

    events: tuple[Shrunk, ...]
    before: Cost
    after: Cost

    def card(self) -> Card:
        figures = [("parameters", f"{self.before.parameters:,} → {self.after.parameters:,}")]
        figures.append(("FLOPs per sample", f"{self.before.flops:,} → {self.after.flops:,}"))
        return Card(f"{sum(event.units for event in self.events)} units removed", figures, HEADING, self._rows())

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for event in self.events:
            cost = with_interval(event.gain, event.gain_low, event.gain_high)
            rows.append((event.what, str(event.units), cost, figure(event.rent)))
        return rows

    def __str__(self) -> str:
        if not self.events:
            return "No units were removed: all of them pay their rent."
        return aligned([HEADING, *self._rows()])


def shrink(
    model: nn.Module,
    evaluate: Evaluate,
    *,
    example_input: Any,
    rent: RentConfig | None = None,
    original: Cost | None = None,
    loss_unit: float = 1.0,
    share: float = 0.125,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    on_event: Callable[[Shrunk], None] | None = None,
) -> Removed:
    """Remove units that do not pay their rent, in place.

    `evaluate` returns the loss of every validation batch, as for `Grower.after_epoch`. `original` is the cost of the host before it grew,
    against which the rent is charged; None: that of the model as it is. `loss_unit` is `LossRange.unit`: 1 for ten classes. `share` is the
    share of a layer that is tried at once.
    """
    host, rent = unwrap(model), rent or RentConfig()
    check_has_no_slots(host)
    if not 0 < share <= 0.5:
        raise GrowthError(f"share must be above 0 and at most 0.5, not {share}")
    before = now = discover(host, example_input).host
    states = States([optimizer] if isinstance(optimizer, Optimizer) else optimizer)
    base, events, done = original or before, list[Shrunk](), set[str]()
    while units := next((one for one in find_units(host, example_input)[0] if one.name not in done), None):
        group = _smallest(host, units, share)
        cost = widening_cost((units,), [len(group)])
        saved = loss_unit * (rent_of(_less(now, base), base, rent) - rent_of(_less(_less(now, cost), base), base, rent))
        gain = None if len(group) >= units.width else _gain(host, units, group, evaluate)
        if gain is None or not gain.high < saved:
            done.add(units.name)
            continue
        _remove(host, units, group, states)
        now = _less(now, cost)
        events.append(Shrunk.of(units.name, gain, parameters=cost.parameters, flops=cost.flops, rent=saved, units=len(group)))
        if on_event is not None:
            on_event(events[-1])
    states.warn()
    if events and is_compiled(model):
        torch.compiler.reset()
    return Removed(tuple(events), before, now)


def _less(cost: Cost, removed: Cost) -> Cost:
    return Cost(cost.parameters - removed.parameters, cost.flops - removed.flops)


def _smallest(host: nn.Module, units: Units, share: float) -> list[int]:
    """Return the numbers of the units with the smallest weights, in whole groups: at least one group, at most a share of the layer."""
    squares = [layer_of(host.get_submodule(name)).weight.detach().flatten(1).square().sum(1) for name in units.producers]  # [outputs]
    rows = torch.stack([square.reshape(units.width, -1).sum(1) for square in squares]).sum(0)
    columns = torch.zeros_like(rows)
    for reader in units.readers:
        square = layer_of(host.get_submodule(reader.name)).weight.detach().square().transpose(0, 1).flatten(1).sum(1)  # [inputs]
        columns += square.reshape(units.width, -1).sum(1).to(columns)
    size = (rows * columns).reshape(-1, units.step).sum(1)  # of each group
    count = max(math.floor(share * units.width / units.step), 1)
    chosen = size.argsort()[:count].tolist()
    return sorted(group * units.step + number for group in chosen for number in range(units.step))


def _features_of(group: Sequence[int], features: int) -> list[int]:
    """Return the features of a layer that belong to these units, if it has `features` for each."""
    return [unit * features + feature for unit in group for feature in range(features)]


@contextmanager
def _silenced(host: nn.Module, units: Units, group: Sequence[int]) -> Iterator[None]:
    """Let nothing read these units inside the `with` block."""
    weights = {reader: layer_of(host.get_submodule(reader.name)).weight for reader in units.readers}
    kept = {reader: weight.data for reader, weight in weights.items()}
    try:
        for reader, weight in weights.items():
            weight.data = weight.data.index_fill(1, torch.tensor(_features_of(group, reader.features), device=weight.device), 0.0)
        yield
    finally:
        for reader, weight in weights.items():
            weight.data = kept[reader]


def _gain(host: nn.Module, units: Units, group: Sequence[int], evaluate: Evaluate) -> Interval:
    """Return what the loss would rise by without these units, with its interval over the same validation batches."""
    with_all = losses_of(evaluate)
    with _silenced(host, units, group):
        without = losses_of(evaluate)
    return gain_of(without, with_all)


def _remove(host: nn.Module, units: Units, group: Sequence[int], states: States) -> None:
    """Cut the rows of the producers, the weights of the modules between, and the columns of the readers."""
    left = [unit for unit in range(units.width) if unit not in set(group)]
    for name in units.producers:
        layer = layer_of(host.get_submodule(name))
        for tensor in tensors_of(layer).values():
            _select(name, tensor, 0, _features_of(left, units.features_of(name)), states)
        layer.__dict__.update({key: layer.weight.shape[0] for key in sizes_of(layer) if key.startswith("out_")})
    for name in units.own:
        _cut_own(name, host.get_submodule(name), units, left, states)
    for reader in units.readers:
        layer = layer_of(host.get_submodule(reader.name))
        _select(reader.name, layer.weight, 1, _features_of(left, reader.features), states)
        layer.__dict__.update({key: layer.weight.shape[1] for key in sizes_of(layer) if key.startswith("in_")})


def _cut_own(name: str, module: nn.Module, units: Units, left: Sequence[int], states: States) -> None:
    """Cut a module with weights for each unit, such as a batch norm or a grouped convolution."""
    assert part_of(module) == "own"
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.ndim:
            _select(name, tensor, 0, _features_of(left, tensor.shape[0] // units.width), states)
    vars(module).update({key: size * len(left) // units.width for key, size in sizes_of(module).items()})


def _select(name: str, tensor: Tensor, axis: int, numbers: Sequence[int], states: States) -> None:
    """Keep these rows or columns of a tensor of this module, and of its state in the optimisers, in place."""
    index = torch.tensor(list(numbers), device=tensor.device)
    states.cut(name, tensor, lambda value: value.index_select(axis, index.to(value.device)))
    set_data(tensor, tensor.data.index_select(axis, index))
