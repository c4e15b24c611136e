"""Units that can be widened: which modules they go through, which layers follow one another, and the places that hold them.

Units are the channels or features that a layer makes. To widen them is to add rows to the layers that make them and columns to all layers
that read them; `find_units` finds them. Modules on the way play one of these parts:

    layer      linear or convolution; makes units, or reads them
    own        has weights, statistics or random numbers for each unit: batch norm, group norm, grouped convolution, PReLU, dropout; new
               units get their own
    passed     has none: activations, pools, dropout, flatten; new units go through it with the others
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from esper.growth.host.discover import Discovery
from esper.growth.host.layout import LayerSize, Refusal, Units
from esper.growth.seeds.seed import Seed
from esper.torch_internals import DropoutBase, WeightNorm

Part = Literal["layer", "own", "passed"]
Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
WEIGHT_NORM = "parametrizations.weight"  # the submodule that holds the tensors of a weight norm
OWN = (*BATCH_NORMS, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.PReLU)


def leaves_of(host: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules without children, apart from baked seeds and parametrizations."""
    inside = {part for module in host.modules() if isinstance(module, Seed) for part in module.modules()}
    for name, module in host.named_modules():
        children = [child for own, child in module.named_children() if own != "parametrizations" and not isinstance(child, Seed)]
        if name and module not in inside and not children and "parametrizations" not in name.split("."):
            yield name, module


def part_of(module: nn.Module) -> Part | None:
    """Return the part that a leaf module plays for units that go through it; None if new units cannot go through it."""
    if isinstance(module, LAYERS):
        return "own" if getattr(module, "groups", 1) > 1 else "layer"
    if isinstance(module, DropoutBase):
        return "own"
    if isinstance(module, OWN) and not (isinstance(module, nn.PReLU) and module.num_parameters == 1):
        return "own"
    return (
        "passed"
        if isinstance(module, nn.PReLU) or (next(module.parameters(), None) is None and next(module.buffers(), None) is None)
        else None
    )


def layer_of(module: nn.Module) -> Layer:
    """Return the module, which is known to be a layer."""
    assert isinstance(module, LAYERS)
    return module


def axis_of(module: nn.Module) -> int:
    """Return the feature dimension of a module's input and output."""
    return -1 if isinstance(module, nn.Linear) else 1


def has_weight_norm(module: nn.Module) -> bool:
    """Return whether the rows of a layer's weight are made by torch's weight norm, from a direction and a length for each row."""
    if not is_parametrized(module) or not isinstance(module, LAYERS):
        return False
    made = dict(module.get_submodule("parametrizations").named_children())
    steps = list(made.get("weight", nn.Module()).children())
    return len(made) == 1 and len(steps) == 1 and isinstance(steps[0], WeightNorm) and steps[0].dim == 0


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module without children, by name; of a weight norm, the tensors it makes the weight from."""
    found = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    if has_weight_norm(module):
        found |= {f"{WEIGHT_NORM}.{name}": tensor for name, tensor in module.get_submodule(WEIGHT_NORM).named_parameters()}
    return found


def reason_against_layer(module: nn.Module, does: str) -> str:
    """Return why a layer cannot get new rows or columns, whatever the host does with them; "" if it can."""
    kind = type(module).__name__
    plain = next(base for base in LAYERS if isinstance(module, base))
    if type(module).forward is not plain.forward:
        return f"cannot be widened: {kind} computes its output in its own way"
    is_own = has_weight_norm(module) and does == "makes its units"  # every row is made from its own direction and length
    if (is_parametrized(module) and not is_own) or any(hasattr(hook, "name") for hook in module._forward_pre_hooks.values()):
        return "cannot be widened: a parametrization, such as spectral or weight norm, makes its weight from all of its rows or columns"
    if "weight" not in tensors_of(module) and not has_weight_norm(module):
        return "cannot be widened: its weight is not a parameter; something else, such as pruning, makes it for every pass"
    if getattr(module, "groups", 1) > 1 and does == "makes its units":
        return "are made by a grouped convolution, which gets new groups when the layer before it is widened"
    return ""


def reason_against_uses(module: nn.Module, uses: Mapping[int, int]) -> str:
    """Return why the weights of a module cannot change their shape; "" if only the module itself reads them."""
    if any(uses.get(id(weight), 0) > 1 for weight in tensors_of(module).values()):
        return "cannot be widened: the host also uses its weights outside of the module"
    return ""


def why_not_through(name: str, module: nn.Module) -> str:
    """Return in words that new units cannot go through a module."""
    kind = type(module).__name__
    if hasattr(module, "normalized_shape") or kind.endswith(("LayerNorm", "RMSNorm")):
        return f"go through {name!r}, a {kind}, which normalises over all of them"
    return f"go through {name!r}, a {kind}, which cannot be widened"


def size_of(layer: Layer, shape: torch.Size) -> LayerSize:
    """Return the sizes of a layer whose output has this shape."""
    outputs, inputs = layer.weight.shape[:2]
    positions = math.prod(shape) // max(shape[0] * outputs, 1)
    per_output = (layer.bias is not None) + has_weight_norm(layer)
    return LayerSize(inputs, outputs, math.prod(layer.weight.shape[2:]), per_output, positions)


def cost_of_own(modules: Sequence[tuple[nn.Module, torch.Size]]) -> tuple[int, int]:
    """Return the parameters and FLOPs of modules with weights for each unit. Torch counts only matrix products, so norms are free."""
    parameters = sum(parameter.numel() for module, _ in modules for parameter in module.parameters())
    sizes = [(layer_of(module), shape) for module, shape in modules if isinstance(module, LAYERS)]
    flops = sum(2 * layer.weight.numel() * math.prod(shape) // max(shape[0] * layer.weight.shape[0], 1) for layer, shape in sizes)
    return parameters, flops


def is_wider(before: torch.Size | None, after: torch.Size) -> bool:
    """Return whether a shape has grown in one dimension."""
    if before is None or len(before) != len(after):
        return False
    return sum(now != then for now, then in zip(after, before, strict=True)) == 1


def random_units(like: Tensor, axis: int, count: int) -> Tensor:
    """Return `count` random units beside those of a tensor."""
    shape = list(like.shape)
    shape[axis] = count
    return torch.randn(shape, dtype=torch.float32).to(device=like.device, dtype=like.dtype)


def chains(units: Sequence[Units]) -> list[tuple[Units, ...]]:
    """Return the longest chains of units in which a layer that reads one is the only producer of the next.

    >>> from esper.growth.host.layout import Reader
    >>> a = Units(("a",), (), (Reader("b", 1),), 4, 1)
    >>> b = Units(("b",), (), (Reader("c", 1),), 8, 1)
    >>> [[one.name for one in chain] for chain in chains([a, b])]
    [['a', 'b']]
    """
    by_producer = {one.producers: one for one in units}
    following = {one.name: by_producer.get((one.readers[0].name,)) if len(one.readers) == 1 else None for one in units}
    followed = {one.name for one in following.values() if one is not None}
    found = []
    for one in units:
        if one.name in followed:
            continue
        chain, last = [one], following[one.name]
        while last is not None and last not in chain:
            chain.append(last)
            last = following[last.name]
        if len(chain) > 1:
            found.append(tuple(chain))
    return found


def modules_of(units: Units) -> tuple[str, ...]:
    """Return all modules that get weights for new units."""
    return (*units.producers, *units.own, *(reader.name for reader in units.readers))


def around_all(names: Sequence[str]) -> str:
    """Return the name of the smallest module that contains all these; "" is the host.

    >>> around_all(["blocks.1.attention.query", "blocks.1.attention.out"])
    'blocks.1.attention'
    """
    paths = [name.split(".")[:-1] for name in names]
    return ".".join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


def with_units(discovery: Discovery, units: Sequence[Units], refusals: Sequence[Refusal]) -> Discovery:
    """Return the discovery with the units at every place, or the reason why they cannot be widened.

    A place may hold units that another layer makes: the output of a pool holds those of the convolution before it. If the output of a block
    cannot be wider, as that of a residual block, the place has the units inside the block.
    """
    rows = {one.name: chain[index:] for chain in chains(units) for index, one in enumerate(chain)}
    at = {carrier: one for one in units for carrier in one.carriers}
    reasons = {refusal.name: f"its units {refusal.reason}" for refusal in refusals}
    places = {}
    for name, place in discovery.places.items():
        inside = tuple(one for one in units if one.name.startswith(f"{name}."))
        if name in at:
            places[name] = replace(place, chain=rows.get(at[name].name, (at[name],)))
        elif inside:
            places[name] = replace(place, chain=inside)
        else:
            places[name] = replace(place, why_not_wider=reasons.get(name, "no layer makes its units alone"))
    return replace(discovery, places=places)
