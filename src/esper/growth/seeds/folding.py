"""Fold width seeds into the host: their blocks become rows and columns of its own layers, and nothing else is left of them.

The parameters of the host stay the same objects. What its optimisers hold for them grows with them, by the rule in
`esper.growth.seeds.optimizer_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.config import GrowthError
from esper.growth.host.units import WEIGHT_NORM, Layer, has_weight_norm, layer_of, part_of, tensors_of
from esper.growth.seeds.optimizer_state import Block, States
from esper.growth.seeds.seed import Seed, WidePlan
from esper.growth.seeds.width import WidePart, WidthSeed

_SIZES = (
    "in_features",
    "out_features",
    "in_channels",
    "out_channels",
    "groups",
    "num_features",
    "num_channels",
    "num_groups",
    "num_parameters",
)
Grown = tuple[WidthSeed, WidePlan, WidePart]  # a seed, and its plan and weights for one module


def fold(
    modules: Mapping[str, nn.Module],
    seeds: Sequence[WidthSeed],
    optimizers: Mapping[Seed, Iterable[Optimizer]] | None = None,
    into: Sequence[Optimizer] = (),
) -> Callable[[], None]:
    """Make the new units part of the host's own layers. The parameters stay the same objects, with more rows and columns.

    `seeds` must be in the order of their units, and disconnected now. `optimizers` are those of the seeds, `into` those of the host, whose
    states grow with the parameters. Blocks between the units of two seeds that do not read each other are new and zero. Return a function
    that undoes the fold. An error leaves everything as it was.
    """
    names = list(dict.fromkeys(plan.module for seed in seeds for plan in seed.spec.wide))
    host, of_seeds = States(into), States(one for some in (optimizers or {}).values() for one in some)
    before = [(modules[name], sizes_of(modules[name]), tensors_of(modules[name]).values()) for name in names]
    values = [(tensor, tensor.data, tensor.grad) for _, _, tensors in before for tensor in tensors]
    restore_states = host.saved(tensor for tensor, _, _ in values)

    def undo() -> None:
        for module, sizes, _ in before:
            vars(module).update(sizes)
        for tensor, data, gradient in values:
            if tensor.shape != data.shape:
                set_data(tensor, data)
                tensor.grad = gradient
        restore_states()

    try:
        for name in names:
            grown = [
                (seed, plan, part) for seed in seeds for plan, part in zip(seed.spec.wide, seed.parts, strict=True) if plan.module == name
            ]
            if part_of(modules[name]) == "own" or has_weight_norm(modules[name]):
                _fold_own(name, modules[name], [part.own or part.new for _, _, part in grown], host, of_seeds)
            else:
                _fold_layer(name, layer_of(modules[name]), grown, host, of_seeds)
    except BaseException:
        undo()
        raise
    host.warn()
    return undo


def check_trained(modules: Mapping[str, nn.Module], names: Iterable[str], optimizers: Sequence[Optimizer]) -> None:
    """Raise a GrowthError if a parameter that is about to grow, or may grow, is trained by none of the optimisers."""
    held = {id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
    for name in dict.fromkeys(names):
        for own, tensor in tensors_of(modules[name]).items():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and id(tensor) not in held:
                raise GrowthError(
                    f"{name}.{own} can get new rows or columns, and none of the optimisers has it; pass all optimisers of the model in a "
                    "list, [muon, adamw], or freeze it by requires_grad_(False) if it is not trained"
                )


def sizes_of(module: nn.Module) -> dict[str, int]:
    return {name: vars(module)[name] for name in _SIZES if name in vars(module)}


def widen_to(modules: Mapping[str, nn.Module], shapes: Mapping[str, Sequence[int]]) -> None:
    """Widen the layers of a host, with zeros, to the shapes of a folded model. `shapes` are those of its state dict, by name.

    Only layers, and modules with weights for each unit, can be wider. Others stay as they are, and so do those whose shapes fit.
    """
    for name, module in modules.items():
        prefix, own = f"{name}." if name else "", tensors_of(module)
        key = next(
            (key for key in ("weight", f"{WEIGHT_NORM}.original1", "running_mean") if key in own and f"{prefix}{key}" in shapes), None
        )
        if key is None or tuple(shapes[f"{prefix}{key}"]) == tuple(own[key].shape) or part_of(module) in (None, "passed"):
            continue
        wanted, now = shapes[f"{prefix}{key}"], own[key].shape
        is_layer = part_of(module) == "layer"
        if len(wanted) != len(now) or any(
            new < old or (new > old and axis > (1 if is_layer else 0)) for axis, (new, old) in enumerate(zip(wanted, now, strict=True))
        ):
            continue
        for key, tensor in own.items():
            if tensor.ndim and f"{prefix}{key}" in shapes:
                _widen(key, tensor, tuple(shapes[f"{prefix}{key}"]), [], States(()), States(()))
        sizes = sizes_of(module)
        if is_layer:
            outputs, inputs = wanted[:2]
            names = ("out_features", "in_features") if isinstance(module, nn.Linear) else ("out_channels", "in_channels")
            vars(module).update(zip(names, (outputs, inputs), strict=True))
        else:
            vars(module).update({key: size * wanted[0] // now[0] for key, size in sizes.items()})


def _fold_layer(name: str, module: Layer, grown: Sequence[Grown], host: States, of_seeds: States) -> None:
    """Add rows and columns to the weight of a layer, and rows to its bias."""
    outputs, inputs = module.weight.shape[:2]
    blocks: list[Block] = []
    biases: list[Block] = []
    row, column = outputs, inputs
    for seed, plan, part in grown:
        rows, columns = slice(row, row + plan.outputs), slice(column, column + plan.inputs)
        if part.new is not None:
            blocks.append(Block(part.new.weight, 1.0, (rows, slice(0, inputs + plan.seen_inputs))))
            if part.new.bias is not None:
                biases.append(Block(part.new.bias, 1.0, (rows,)))
        if part.back is not None:
            blocks.append(Block(part.back.weight, seed.alpha, (slice(0, outputs + plan.seen_outputs), columns)))
        if part.inner is not None:
            blocks.append(Block(part.inner.weight, 1.0, (rows, columns)))
        row, column = row + plan.outputs, column + plan.inputs
    _widen(f"{name}.weight", module.weight, (row, column, *module.weight.shape[2:]), blocks, host, of_seeds)
    if module.bias is not None and row > outputs:
        _widen(f"{name}.bias", module.bias, (row,), biases, host, of_seeds)
    if isinstance(module, nn.Linear):
        module.in_features, module.out_features = column, row
    else:
        module.in_channels, module.out_channels = column, row


def _fold_own(name: str, module: nn.Module, copies: Sequence[Any], host: States, of_seeds: States) -> None:
    """Put the copies of a module for new units behind its own weights and statistics. Those of a layer with a weight norm are rows."""
    tensors = [tensors_of(copied) for copied in copies]
    for key, tensor in tensors_of(module).items():
        if tensor.ndim == 0:
            continue
        start, blocks = tensor.shape[0], list[Block]()
        for part in (own[key] for own in tensors):
            blocks.append(Block(part, 1.0, (slice(start, start + part.shape[0]),)))
            start += part.shape[0]
        _widen(f"{name}.{key}", tensor, (start, *tensor.shape[1:]), blocks, host, of_seeds)
    for key, size in sizes_of(module).items():
        if part_of(module) == "own" or key.startswith("out_"):
            vars(module)[key] = size + sum(getattr(copied, key) for copied in copies)


def _widen(name: str, tensor: Tensor, shape: Sequence[int], blocks: Sequence[Block], host: States, of_seeds: States) -> None:
    """Give a tensor a larger shape in place: its own values in the first corner, the blocks where they belong, and zeros elsewhere."""
    own = tuple(slice(0, size) for size in tensor.shape)
    wide = tensor.new_zeros(shape)
    if tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        wide = wide.to(memory_format=torch.channels_last)
    wide[own] = tensor.detach()
    for block in blocks:
        wide[block.where] = block.source.detach() * block.factor
    host.widen(name, tensor, shape, blocks, of_seeds)
    set_data(tensor, wide)


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Replace the values of a tensor in place. The new ones may have another shape.

    Autograd may still hold the object that adds up gradients of the former shape. It drops this object when the dtype changes, so the dtype
    is changed for a moment.
    """
    tensor.grad = None
    if tensor.is_floating_point():
        tensor.data = data.to(torch.float32 if data.dtype == torch.float64 else torch.float64)
    tensor.data = data
