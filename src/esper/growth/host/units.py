"""Find the units of a host that can be widened, by trial runs on the example.

Units are the channels or features that a layer makes. To widen them is to add rows to the layers that make them and columns to all layers
that read them. A trial adds random units to the output of a layer and runs the host. The tensors behind it are wider, until a layer reads
them: that layer gets only its own part. If the host runs and its outputs are what they were, the new units reach nothing but those layers,
and the units can be widened. Otherwise the trial shows why not: the host adds the units to another tensor, say, or takes a softmax over
them. So units are found by data flow, whatever the modules are called and whatever the host computes between them.

Modules on the way play one of these parts:

    layer      linear or convolution; makes units, or reads them
    own        has weights, statistics or random numbers for each unit: batch norm, group norm, grouped convolution, PReLU, dropout; new
               units get their own
    passed     has none: activations, pools, dropout, flatten; new units go through it with the others

Attention. If the host reshapes the outputs of some layers in a row to heads of a fixed size, `view(B, T, -1, size)`, then a unit is a whole
head: the features of all these layers that belong to it, with the queries of all heads that share its keys and values. If the host fixes
the number of heads instead, more features would make every head larger, and the trial fails.

Shapes: U = units, k = new units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from esper.growth.host.discover import Discovery, call, fused_attention
from esper.growth.host.isolation import isolated, without_tf32
from esper.growth.host.layout import LayerSize, Reader, Refusal, Through, Units
from esper.growth.host.slots import Forward, forward_replaced, own_forward, tensors_in
from esper.growth.seeds.blueprints import flop_counter
from esper.growth.seeds.seed import Seed
from esper.torch_internals import DropoutBase, WeightNorm

Part = Literal["layer", "own", "passed"]
Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
WEIGHT_NORM = "parametrizations.weight"  # the submodule that holds the tensors of a weight norm
OWN = (*BATCH_NORMS, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.PReLU)


class _Impossible(Exception):
    """The trial has shown that units cannot be widened. The text completes the sentence "The units of the layer ..."."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Shapes, calls and outputs of a forward pass without new units."""

    inputs: dict[str, list[tuple[int, torch.Size]]]  # leaf module -> number and shape of its first argument, one per call
    shapes: dict[str, torch.Size]  # submodule -> shape of its output; only submodules that run once and give one tensor
    outputs: list[Tensor]
    uses: dict[int, int]  # id of a parameter -> operations that read it
    blocks: dict[str, tuple[int, ...]]  # layer whose output is reshaped -> sizes of the blocks of its features; all of them may be one
    in_parts: set[str]  # layers whose output is split into several tensors
    flops: int


class _Watch(TorchFunctionMode):
    """Counts the operations that read each parameter, and notes how the outputs of linear layers are split."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[int, int] = {}
        self.made: dict[int, str] = {}  # id of a layer's output -> name of the layer
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.in_parts: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        if isinstance(result, Tensor | tuple | list):  # not a shape or a dtype
            for tensor in tensors_in((arguments, named or {})):
                if isinstance(tensor, nn.Parameter):
                    self.uses[id(tensor)] = self.uses.get(id(tensor), 0) + 1
                elif (name := self.made.get(id(tensor))) is not None:
                    self._note_split(name, tensor, result)
        return result

    def _note_split(self, name: str, output: Tensor, result: Tensor | tuple[Any, ...] | list[Any]) -> None:
        """Note an operation that splits the features of a layer's output [..., D]: into several tensors, or to [..., heads, size]."""
        if not isinstance(result, Tensor):
            if len(result) > 1 and all(isinstance(part, Tensor) and part.ndim == output.ndim for part in result):
                self.in_parts.add(name)
        elif result.ndim > output.ndim and result.numel() == output.numel():
            sizes = [math.prod(result.shape[axis:]) for axis in range(result.ndim - 1, 0, -1)]
            self.blocks[name] = tuple(size for size in sizes if 1 < size <= output.shape[-1] and output.shape[-1] % size == 0)


def find_units(host: nn.Module, example_input: Any) -> tuple[list[Units], list[Refusal]]:
    """Return all units that can be widened, and for every other layer the reason why its units cannot be."""
    leaves = dict(_leaves(host))
    plain = _run(host, leaves, example_input)
    found: dict[str, Units] = {}
    refusals: list[Refusal] = []
    for name, module in leaves.items():
        if not isinstance(module, LAYERS) or any(name in units.producers for units in found.values()):
            continue
        reason = reason_against_layer(module, "makes its units") or _reason_against_calls(name, module, host, plain)
        if reason:
            refusals.append(Refusal(name, reason))
            continue
        try:
            units = _tried_with_partners(host, leaves, example_input, plain, name)
        except _Impossible as error:
            refusals.append(Refusal(name, str(error)))
        else:
            found[name] = units
    return list(found.values()), refusals


def _leaves(host: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules without children, apart from baked seeds and parametrizations."""
    inside = {part for module in host.modules() if isinstance(module, Seed) for part in module.modules()}
    for name, module in host.named_modules():
        children = [child for own, child in module.named_children() if own != "parametrizations" and not isinstance(child, Seed)]
        if name and module not in inside and not children and "parametrizations" not in name.split("."):
            yield name, module


def _run(host: nn.Module, leaves: Mapping[str, nn.Module], example_input: Any) -> _Run:
    """Run the host as it is, and note the first argument of every leaf module."""
    inputs: dict[str, list[tuple[int, torch.Size]]] = {}
    kept: list[Tensor] = []  # so that no two tensors have the same id

    def noted(name: str, forward: Forward) -> Forward:
        def run(*arguments: Any, **named: Any) -> Any:
            given = next(tensors_in((arguments, named)), None)
            if given is not None:
                kept.append(given)
                inputs.setdefault(name, []).append((id(given), given.shape))
            output = forward(*arguments, **named)
            if isinstance(leaves[name], nn.Linear) and isinstance(output, Tensor):
                kept.append(output)
                watch.made[id(output)] = name
            return output

        return run

    with _Watch() as watch, flop_counter() as counter:
        outputs, shapes = _outputs(host, {name: noted(name, own_forward(module)) for name, module in leaves.items()}, example_input)
    return _Run(inputs, shapes, outputs, watch.uses, watch.blocks, watch.in_parts, counter.get_total_flops())


def _outputs(host: nn.Module, forwards: Mapping[str, Forward], example_input: Any) -> tuple[list[Tensor], dict[str, torch.Size]]:
    """Run the host in eval mode, with some forwards replaced and no side effects.

    Return the tensors of its output, and the shape of the output of every submodule that runs once and gives one tensor.
    """
    shapes: dict[str, list[torch.Size | None]] = {}

    def noting(name: str) -> Any:
        def note(module: nn.Module, arguments: Any, output: Any) -> None:
            shapes.setdefault(name, []).append(output.shape if isinstance(output, Tensor) else None)

        return note

    with ExitStack() as stack:
        stack.enter_context(isolated(host))
        stack.enter_context(without_tf32())
        stack.enter_context(torch.no_grad())
        stack.enter_context(fused_attention(enabled=False))  # fused kernels call no submodules
        host.eval()
        for name, forward in forwards.items():
            stack.enter_context(forward_replaced(host.get_submodule(name), forward))
        for name, module in host.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_hook(noting(name)).remove)
        outputs = [tensor.clone() for tensor in tensors_in(call(host, example_input))]
    return outputs, {name: some[0] for name, some in shapes.items() if len(some) == 1 and some[0] is not None}


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


def _reason_against_calls(name: str, module: nn.Module, host: nn.Module, plain: _Run) -> str:
    """Return why the way in which the host uses a layer forbids new rows; "" if nothing does."""
    calls = len(plain.inputs.get(name, ()))
    if calls != 1:
        return "cannot be widened: the layer does not run as a module of its own" if calls == 0 else f"are made {calls} times in a pass"
    shared = tensors_of(module)[f"{WEIGHT_NORM}.original1" if has_weight_norm(module) else "weight"]
    owners = [
        other for other, some in host.named_modules(remove_duplicate=False) for weight in some._parameters.values() if weight is shared
    ]
    if len(owners) > 1:
        return f"cannot be widened: {' and '.join(map(repr, owners[:2]))} share the weight"
    return reason_against_uses(module, plain.uses)


def reason_against_uses(module: nn.Module, uses: Mapping[int, int]) -> str:
    """Return why the weights of a module cannot change their shape; "" if only the module itself reads them."""
    if any(uses.get(id(weight), 0) > 1 for weight in tensors_of(module).values()):
        return "cannot be widened: the host also uses its weights outside of the module"
    return ""


def _tried_with_partners(host: nn.Module, leaves: Mapping[str, nn.Module], example_input: Any, plain: _Run, name: str) -> Units:
    """Try a layer alone. If the host then combines tensors of different widths, try it with layers that read the same tensor.

    If the host splits the output of the layer into blocks, such as attention heads, try whole blocks too.
    """
    if heads := _heads_with(name, host, leaves, plain):
        try:
            return _tried(host, leaves, example_input, plain, heads)
        except _Impossible:
            pass
    try:
        return _tried(host, leaves, example_input, plain, {name: 1})
    except _Impossible as error:
        layer, source = layer_of(leaves[name]), plain.inputs[name][0][0]
        for other, module in leaves.items():
            is_partner = other != name and type(module) is type(layer) and layer_of(module).weight.shape[0] == layer.weight.shape[0]
            if (
                is_partner
                and [number for number, _ in plain.inputs.get(other, ())] == [source]
                and not reason_against_layer(module, "makes its units")
            ):
                try:
                    return _tried(host, leaves, example_input, plain, {key: 1 for key in leaves if key in (name, other)})
                except _Impossible:
                    continue
        sizes = [size for size in plain.blocks.get(name, ()) if size < layer.weight.shape[0]]
        for size in sizes:
            try:
                return _tried(host, leaves, example_input, plain, {name: size})
            except _Impossible:
                continue
        if name in plain.in_parts or len(sizes) > 1:
            raise _Impossible(
                "are split into parts by the host, such as the queries, keys and values of one layer: new rows would go between them"
            ) from error
        if sizes and isinstance(error.__cause__, Exception):
            raise _Impossible(
                "are split into heads, and the host does not run with one head more: if their number is fixed, more units make them larger"
            ) from error
        raise error


def _heads_with(name: str, host: nn.Module, leaves: Mapping[str, nn.Module], plain: _Run) -> dict[str, int]:
    """Return the layers that make heads together with a layer, and the features of each per head; empty if there are none.

    They run one after the other, and the host splits the output of each into heads. Heads of queries may share those of keys and values:
    then the fewest heads count, and a layer with more of them makes several for each.
    """
    order = [key for key in plain.inputs if isinstance(leaves[key], LAYERS)]
    first = last = order.index(name)
    while first > 0 and order[first - 1] in plain.blocks:
        first -= 1
    while last + 1 < len(order) and order[last + 1] in plain.blocks:
        last += 1
    widths = {key: layer_of(leaves[key]).weight.shape[0] for key in order[first : last + 1]}
    if name not in plain.blocks or len(widths) < 2 or not all(plain.blocks[key] for key in widths):
        return {}
    numbers = [width // plain.blocks[key][0] for key, width in widths.items()]
    if max(numbers) == 1:
        return {}  # a reshape that splits nothing
    heads = min(numbers)
    is_refused = any(
        width % heads or reason_against_layer(leaves[key], "makes its units") or _reason_against_calls(key, leaves[key], host, plain)
        for key, width in widths.items()
    )
    return {} if is_refused else {key: width // heads for key, width in widths.items()}


def _tried(
    host: nn.Module, leaves: Mapping[str, nn.Module], example_input: Any, plain: _Run, producers: Mapping[str, int], step: int = 1
) -> Units:
    """Run the host with `step` new random units after the producers. Return the units, or raise _Impossible with the reason.

    `producers` maps the layers that make the units to the number of their features per unit.
    """
    readers: dict[str, int] = {}
    own: dict[str, int] = {}  # module -> multiple that new units must come in, so that its groups are whole
    through: dict[str, Through] = {}
    ran: list[str] = []
    counter = flop_counter()  # only for heads: attention multiplies them, while other units cost nothing between layers

    def widened(name: str, forward: Forward) -> Forward:
        module = leaves[name]

        def run(*arguments: Any, **named: Any) -> Any:
            given = next(tensors_in((arguments, named)), None)
            ran.append(name)
            calls = ran.count(name) - 1
            known = plain.inputs.get(name, [])
            shape = known[calls][1] if calls < len(known) else None
            if given is None or shape is None or given.shape == shape or name in producers:
                output = forward(*arguments, **named)
                if name not in producers:
                    return output
                return torch.cat([output, _random(output, axis_of(module), step * producers[name])], axis_of(module))
            wider = [axis for axis, (now, before) in enumerate(zip(given.shape, shape, strict=False)) if now != before]
            if given.ndim != len(shape) or len(wider) != 1:
                raise _Impossible(f"cannot be widened: {name!r} would get {list(given.shape)} in place of {list(shape)}")
            part, axis, new = part_of(module), wider[0], given.shape[wider[0]] - shape[wider[0]]
            if part == "passed":
                return forward(*arguments, **named)
            is_dropout = isinstance(module, DropoutBase)
            if is_dropout and len(known) > 1:
                return forward(*arguments, **named)  # it draws for other tensors too
            if part is None:  # it may work on other dimensions than that of the units, as a norm over the features of each head
                try:
                    return forward(*arguments, **named)
                except Exception as error:
                    raise _Impossible(_why_not_through(name, module)) from error
            if len(arguments) != 1 or named or not (is_dropout or axis == axis_of(module) % given.ndim):
                raise _Impossible(_why_not_through(name, module))
            if calls > 0:
                raise _Impossible(f"are read by {name!r}, which runs several times in a pass")
            host_part, new_part = torch.split(given, [shape[axis], new], axis)
            if part == "layer":
                if reason := reason_against_layer(module, "reads them") or reason_against_uses(module, plain.uses):
                    raise _Impossible(f"are read by {name!r}, whose units {reason}")
                readers[name] = new
                return forward(host_part.contiguous())
            if reason := reason_against_uses(module, plain.uses):
                raise _Impossible(f"go through {name!r}, which {reason}")
            own[name] = _multiple_of(name, module)
            through[name] = Through(new // step, axis - given.ndim if is_dropout else None)
            output = forward(host_part.contiguous())
            more = new * output.shape[axis] // shape[axis]  # a grouped convolution may make several units of one
            if new % own[name]:
                raise _WrongStep
            shown = new_part if output.shape[2:] == new_part.shape[2:] and more == new else _random(output, axis, more)
            return torch.cat([output, shown], axis)

        return run

    try:
        with torch.random.fork_rng(devices=[]), counter if any(features > 1 for features in producers.values()) else nullcontext():
            torch.manual_seed(0)
            outputs, shapes = _outputs(host, {name: widened(name, own_forward(module)) for name, module in leaves.items()}, example_input)
    except _WrongStep:
        wanted = math.lcm(step, *own.values())
        if wanted == step:
            raise _Impossible("cannot be widened in whole groups") from None
        return _tried(host, leaves, example_input, plain, producers, wanted)
    except _Impossible:
        raise
    except Exception as error:  # the host may raise anything if a tensor is wider than it expects
        raise _Impossible("are combined with others that would not be more: a residual, a gate, heads") from error
    if not readers:
        raise _Impossible("are read by no layer of their own, only by the host's output")
    for before, after in zip(plain.outputs, outputs, strict=True):
        if before.shape != after.shape:
            raise _Impossible("are in the host's output")
        if not torch.equal(before, after) and not torch.allclose(before, after, rtol=1e-4, atol=1e-5 * float(before.abs().max())):
            raise _Impossible("are mixed outside of layers, as by a softmax, a mean or a norm over them")
    order = {name: index for index, name in enumerate(ran)}
    first = min(producers, key=order.__getitem__)
    width = layer_of(leaves[first]).weight.shape[0] // producers[first]
    parameters, flops = _cost_of_own([(leaves[name], plain.shapes[name]) for name in own])
    if counted := counter.get_total_flops():  # the layers have run without new units, so the difference is what the host itself computed
        flops += width * (counted - plain.flops) // (max(plain.shapes[first][0], 1) * step)
    return Units(
        tuple(producers),
        tuple(sorted(own, key=order.__getitem__)),
        tuple(Reader(name, readers[name] // step) for name in sorted(readers, key=order.__getitem__)),
        width,
        step,
        tuple(name for name, shape in shapes.items() if _is_wider(plain.shapes.get(name), shape)),
        tuple((name, _size(layer_of(leaves[name]), plain.shapes[name])) for name in ran if name in (*producers, *readers)),
        (parameters, flops),
        through=tuple((name, how) for name, how in through.items() if how != Through()),
        made=tuple((name, features) for name, features in producers.items() if features > 1),
    )


def _is_wider(before: torch.Size | None, after: torch.Size) -> bool:
    """Return whether a shape has grown in one dimension."""
    if before is None or len(before) != len(after):
        return False
    return sum(now != then for now, then in zip(after, before, strict=True)) == 1


def _size(layer: Layer, shape: torch.Size) -> LayerSize:
    outputs, inputs = layer.weight.shape[:2]
    positions = math.prod(shape) // max(shape[0] * outputs, 1)
    per_output = (layer.bias is not None) + has_weight_norm(layer)
    return LayerSize(inputs, outputs, math.prod(layer.weight.shape[2:]), per_output, positions)


def _cost_of_own(modules: Sequence[tuple[nn.Module, torch.Size]]) -> tuple[int, int]:
    """Return the parameters and FLOPs of modules with weights for each unit. Torch counts only matrix products, so norms are free."""
    parameters = sum(parameter.numel() for module, _ in modules for parameter in module.parameters())
    sizes = [(layer_of(module), shape) for module, shape in modules if isinstance(module, LAYERS)]
    flops = sum(2 * layer.weight.numel() * math.prod(shape) // max(shape[0] * layer.weight.shape[0], 1) for layer, shape in sizes)
    return parameters, flops


class _WrongStep(Exception):
    """New units would not be whole groups of a module."""


def _multiple_of(name: str, module: nn.Module) -> int:
    """Return the number of units in a group of a module with weights for each unit; 1 without groups. Raise _Impossible if none fit."""
    if isinstance(module, BATCH_NORMS):
        if module.momentum is None:
            raise _Impossible(f"go through {name!r}, a batch norm with momentum=None, whose average over all batches new units do not have")
        return 1
    if isinstance(module, nn.GroupNorm):
        return module.num_channels // module.num_groups
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if reason := reason_against_layer(module, "passes them on"):
            raise _Impossible(f"go through {name!r}, whose units {reason}")
        return module.in_channels // module.groups
    return 1


def _why_not_through(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    if hasattr(module, "normalized_shape") or kind.endswith(("LayerNorm", "RMSNorm")):
        return f"go through {name!r}, a {kind}, which normalises over all of them"
    return f"go through {name!r}, a {kind}, which cannot be widened"


def _random(like: Tensor, axis: int, count: int) -> Tensor:
    """Return `count` random units beside those of a tensor."""
    shape = list(like.shape)
    shape[axis] = count
    return torch.randn(shape, dtype=torch.float32).to(device=like.device, dtype=like.dtype)


def chains(units: Sequence[Units]) -> list[tuple[Units, ...]]:
    """Return the longest chains of units in which a layer that reads one is the only producer of the next.

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
