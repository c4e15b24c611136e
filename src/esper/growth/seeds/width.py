"""Width seeds: new units beside those of the host, with the blocks of weights that connect them.

A layer that reads k new inputs and makes k' new outputs beside its own is the wider layer, block by block:

    host outputs   W·x_host  +  alpha · back·x_new          `back` is zero at birth, so a new seed changes nothing
    new outputs    new·x_host  +  inner·x_new               `inner` exists if the seed widens two or more sets of units in a row

A seed treats the units of seeds that were kept before it as those of the host: it reads them, and they read it.

Modules between layers with weights or statistics for each unit, such as batch norms, get a copy for the new units. All of them are in
`WidePart`s, one for each module of the host that a seed touches. `WidePatch` is the forward of such a module: it takes the wide tensor
apart, and puts the wide result together. So everything that the host computes between its layers is computed for the new units by the
host's own code. Tensors are [host's units, units of the first seed, units of the second, ...].

A kept seed is joined: it is computed together with its layers, as one layer with all weights. This is faster, and rounds differently.

`esper.growth.seeds.folding` turns the blocks into rows and columns of the host's own weights.

Shapes: k = new units of one seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    alpha_dropout,
    batch_norm,
    dropout,
    dropout1d,
    dropout2d,
    dropout3d,
    feature_alpha_dropout,
    linear,
    pad,
)
from torch.nn.utils.parametrizations import weight_norm

from esper.growth.host.layout import Place, Through, Units
from esper.growth.host.own_draws import OwnDraws, mark
from esper.growth.host.slots import WidePatch
from esper.growth.host.units import LAYERS, Layer, axis_of, has_weight_norm, layer_of, part_of, tensors_of
from esper.growth.lifecycle.stages import Cost
from esper.growth.seeds.blueprints import get_blueprint, widened_by
from esper.growth.seeds.seed import Blending, Seed, SeedSpec, WidePlan
from esper.torch_internals import DropoutBase

# Added to the orders of seeds that take part in some forward passes only, so that their units come behind those of all others.
IN_SHADOW, CANDIDATE = 2**19, 2**20
Kept = Mapping[str, tuple[int, int]]  # module -> inputs and outputs that kept seeds have added to it


def make_seed(
    place: Place,
    blueprint: str,
    modules: Mapping[str, nn.Module],
    kept: Kept,
    *,
    random_seed: int,
    blending: Blending = "add",
    order: int = 0,
) -> Seed:
    """Build a seed of any blueprint for a place. `modules` are those of the host, by name; only a width seed needs them."""
    plan = plan_in(place, blueprint, kept)
    if not plan:
        return Seed(place, blueprint, random_seed=random_seed, blending=blending)
    return WidthSeed(place, blueprint, modules, plan, random_seed=random_seed, blending=blending, order=order)


def plan_in(place: Place, blueprint: str, kept: Kept) -> tuple[WidePlan, ...]:
    """Return the parts of a seed of a blueprint in a place, whose units are those beside the kept seeds; () for no width seed."""
    share = get_blueprint(blueprint).share
    if share is None:
        return ()
    chain = widened_by(get_blueprint(blueprint), place)
    return plan_of(chain, [units.added(share) for units in chain], kept)


def plan_of(chain: Sequence[Units], added: Sequence[int], kept: Kept | None = None) -> tuple[WidePlan, ...]:
    """Return the parts of a seed that adds `added[i]` units to `chain[i]`. Neighbours share a layer, which reads one and makes the next."""
    inputs, outputs, axes = dict[str, int](), dict[str, int](), dict[str, int | None]()
    for units, count in zip(chain, added, strict=True):
        outputs |= {name: count * units.features_of(name) for name in units.producers}
        inputs |= {reader.name: reader.features * count for reader in units.readers}
        for name in units.own:
            how = dict(units.through).get(name, Through())
            inputs[name] = outputs[name] = count * how.features
            axes[name] = how.axis
    order = list(
        dict.fromkeys(name for units in chain for name in (*units.producers, *units.own, *(reader.name for reader in units.readers)))
    )
    seen = kept or {}
    return tuple(WidePlan(name, inputs.get(name, 0), outputs.get(name, 0), *seen.get(name, (0, 0)), axes.get(name)) for name in order)


def kept_units(seeds: Iterable[tuple[Sequence[WidePlan], bool]]) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs that kept width seeds have added to modules: of those before the first that is not kept.

    `seeds` are the parts of the connected seeds, in the order of their units, and whether each is kept.
    """
    found: dict[str, tuple[int, int]] = {}
    closed: set[str] = set()
    for plans, is_kept in seeds:
        if not is_kept:
            closed |= {plan.module for plan in plans}
        for plan in plans:
            if plan.module not in closed:
                inputs, outputs = found.get(plan.module, (0, 0))
                found[plan.module] = inputs + plan.inputs, outputs + plan.outputs
    return found


def cost_between(seeds: Sequence[tuple[Sequence[WidePlan], Sequence[Units]]]) -> Cost:
    """Return the cost of the weights between units of kept seeds that do not read each other: folding makes them, with zeros.

    Each seed is given by its parts and the units that can be widened at its place.
    """
    sizes = {name: size for _, chain in seeds for units in chain for name, size in units.sizes}
    made, read = dict[str, list[int]](), dict[str, int]()  # layer -> new inputs and outputs of all seeds; pairs of them that have a weight
    for plans, _ in seeds:
        for plan in plans:
            inputs, outputs = made.get(plan.module, (0, 0))
            made[plan.module] = [inputs + plan.inputs, outputs + plan.outputs]
            pairs = plan.outputs * (plan.seen_inputs + plan.inputs) + plan.seen_outputs * plan.inputs
            read[plan.module] = read.get(plan.module, 0) + pairs
    parts = [sizes[name].cost(inputs * outputs - read[name], 1) for name, (inputs, outputs) in made.items() if name in sizes]
    return Cost(*map(sum, zip((0, 0), *parts, strict=True)))


def next_order(orders: Iterable[int]) -> int:
    """Return the order of a new width seed, whose units come behind those of all that are connected. `orders` are those of all seeds."""
    return 1 + max((order for order in orders if order < IN_SHADOW), default=0)


def why_not_removed(name: str, seeds: Mapping[str, tuple[int, Sequence[WidePlan]]]) -> str:
    """Return why the seed in a slot cannot be removed yet: another seed reads its units. Return "" if none does.

    `seeds` maps every slot to the order and the parts of its seed; a seed that is no width seed has no parts.
    """
    order, plans = seeds[name]
    modules = {plan.module for plan in plans}
    for other, (its_order, its_plans) in seeds.items():
        reads = any(plan.module in modules and (plan.seen_inputs or plan.seen_outputs) for plan in its_plans)
        if its_order > order and reads:
            return f"the seed in {other!r} reads its units; remove that one first"
    return ""


class WidePart(nn.Module):
    """The weights of a width seed in one module of the host.

    A layer has `new` if the seed makes units there, `back` if the host's outputs read the seed's units, and `inner` if both. Another module
    has `own`: a copy of it for the new units.
    """

    def __init__(self, module: nn.Module, plan: WidePlan) -> None:
        super().__init__()
        self.axis = plan.axis or axis_of(module)  # of the units, in the module's input and output
        self.new: Layer | None = None
        self.back: Layer | None = None
        self.inner: Layer | None = None
        self.own: nn.Module | None = None
        if part_of(module) == "own":
            self.own = _own(module, plan.inputs)
            return
        layer = layer_of(module)
        outputs, inputs = layer.weight.shape[0] + plan.seen_outputs, layer.weight.shape[1] + plan.seen_inputs
        if plan.outputs:
            self.new = _layer(layer, inputs, plan.outputs, bias=layer.bias is not None, fan=inputs + plan.inputs)
            if has_weight_norm(layer):
                weight_norm(self.new)  # a new unit has a direction and a length of its own
        if plan.inputs:
            self.back = _layer(layer, plan.inputs, outputs, bias=False, fan=0)
        if plan.inputs and plan.outputs:
            self.inner = _layer(layer, plan.inputs, plan.outputs, bias=False, fan=inputs + plan.inputs)


def _layer(like: Layer, inputs: int, outputs: int, *, bias: bool, fan: int) -> Layer:
    """Return a layer of the same kind with other sizes. Its weights are drawn as torch draws them for `fan` inputs, or zero."""
    options: dict[str, Any] = {"bias": bias, "device": like.weight.device, "dtype": like.weight.dtype}
    if isinstance(like, nn.Linear):
        layer: Layer = nn.Linear(inputs, outputs, **options)
    else:
        geometry = {name: getattr(like, name) for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
        layer = _CONVOLUTIONS[like.weight.ndim - 2](inputs, outputs, **geometry, **options)
    bound = 1 / math.sqrt(fan * math.prod(like.weight.shape[2:])) if fan else 0.0
    for parameter in layer.parameters():
        values = torch.empty(parameter.shape, dtype=torch.float64).uniform_(-bound, bound) if fan else torch.zeros(parameter.shape)
        parameter.data.copy_(values)
    return layer


_CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def _own(like: nn.Module, units: int) -> nn.Module:
    """Return a new module of the same kind for other units, with the weights that such a module has at birth."""
    weight: Tensor = next((tensor for tensor in (*like.parameters(), *like.buffers()) if tensor.is_floating_point()), torch.empty(0))
    options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    if isinstance(like, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        geometry = {name: getattr(like, name) for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
        groups, outputs = units * like.groups // like.in_channels, units * like.out_channels // like.in_channels
        module: nn.Module = _CONVOLUTIONS[like.weight.ndim - 2](
            units, outputs, **geometry, groups=groups, bias=like.bias is not None, **options
        )
    elif isinstance(like, nn.GroupNorm):
        module = nn.GroupNorm(units * like.num_groups // like.num_channels, units, eps=like.eps, affine=like.affine, **options)
    elif isinstance(like, nn.PReLU):
        module = nn.PReLU(units, **options)
    elif isinstance(like, DropoutBase):
        module = type(like)(like.p, like.inplace)
    else:
        norm: Any = like
        has_statistics = norm.running_mean is not None  # also if the user has switched the tracking off since
        module = type(norm)(units, eps=norm.eps, momentum=norm.momentum, affine=norm.affine, track_running_stats=has_statistics, **options)
        module.track_running_stats = norm.track_running_stats
    return module


class WidthSeed(Seed):
    """New units for one or several sets of units in a row. `modules` are the modules of the host that it touches, by name."""

    def __init__(
        self,
        place: Place,
        blueprint: str,
        modules: Mapping[str, nn.Module],
        plan: Sequence[WidePlan],
        *,
        random_seed: int,
        blending: Blending = "add",
        order: int = 0,
    ) -> None:
        if blending != "add":
            raise ValueError(f"new units cannot be blended by {blending!r}: they would not become a part of the layers; use blending 'add'")
        nn.Module.__init__(self)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random_seed)
            parts = [WidePart(modules[one.module], one) for one in plan]
        self.parts: Sequence[WidePart] = nn.ModuleList(parts)  # type: ignore[assignment]
        self.blending, self.baked_as = blending, ""
        self.is_candidate = False  # of a probe, connected for a few steps to get its gradient
        self.register_buffer("alpha", torch.zeros((), dtype=place.dtype, device=place.device))
        self.spec = SeedSpec(
            blueprint, place.kind, place.shape, place.is_causal, blending, batch_axis=place.batch_axis, wide=tuple(plan), order=order
        )

    def become(self, modules: Mapping[str, nn.Module]) -> dict[nn.Parameter, Tensor]:
        found = dict[nn.Parameter, Tensor]()
        for plan, part in zip(self.spec.wide, self.parts, strict=True):
            of_host = tensors_of(modules[plan.module])
            for module in part.children():
                found |= {parameter: of_host[name] for name, parameter in module.named_parameters() if name in of_host}
        return found

    def forward(self, h: Tensor) -> Tensor:
        return h  # the patches of the host's modules apply the seed

    @staticmethod
    def pass_through(patch: WidePatch, given: Tensor) -> Tensor:
        """Return the wide output of a module, given its wide input, for all seeds that are connected there."""
        if given.is_nested:  # sequences without padding, which torch's transformer encoder passes on in eval mode
            return torch.nested.as_nested_tensor([patch.forward(sequence.unsqueeze(0)).squeeze(0) for sequence in given.unbind()])
        axis = patch.seeds[0][2].axis
        joined, seeds = split_joined(patch, given)
        sizes = [plan.inputs for _, plan, _ in seeds]
        host, *parts = torch.split(given, [given.shape[axis] - sum(sizes), *sizes], axis)  # `host`: with the units of joined seeds
        # A copy in the layout of the host's own tensors, so that the layer computes the same bits as without new units.
        host = host.clone(memory_format=torch.preserve_format) if sum(sizes) else given
        if OwnDraws.active:
            for given_part in (host, *parts):
                mark(given_part, [], axis)
        own = host.shape[axis] - sum(plan.inputs for _, plan, _ in joined)
        output: Tensor = compute_joined(patch.module, joined, host) if joined else patch.inner(host)
        made: list[Tensor] = []
        for (seed, plan, part), x_new in zip(seeds, parts, strict=True):
            if seed.training != patch.module.training and not torch.compiler.is_compiling():
                seed.train(patch.module.training)
            if part.own is not None:
                made.append(_compute_own(part.own, x_new, is_training=patch.module.training))
                continue
            if part.back is not None:
                read = (seed.alpha * part.back(x_new)).to(output.dtype)
                unread = output.shape[axis] - read.shape[axis]  # units of joined seeds that do not read this one, if positive
                if unread > 0:
                    read = pad(read.movedim(axis, -1), (0, unread)).movedim(-1, axis)
                elif unread < 0:
                    leading = _leading([new.shape[axis] for new in made], -unread)
                    read, *others = read.split([output.shape[axis], *leading], axis)
                    made[: len(others)] = [new + other for new, other in zip(made, others, strict=False)]
                output = output + read
            if part.new is not None:
                reads_host = own + plan.seen_inputs == host.shape[axis]
                new = part.new(host if reads_host else given.narrow(axis, 0, own + plan.seen_inputs))
                made.append(new if part.inner is None else new + part.inner(x_new))
        if not made:
            return mark(output, [], axis) if OwnDraws.active else output
        is_compiling = torch.compiler.is_compiling()  # compiled code has an order of its own
        wide = torch.cat([output if is_compiling else _WithDenseGradient.apply(output), *made], axis)  # type: ignore[no-untyped-call]
        return mark(wide, [new.shape[axis] for new in made], axis) if OwnDraws.active else wide

    def connect(self, patches: Mapping[str, Any], is_connected: bool) -> None:
        """Put the new units into the host's tensors, or take them out. `patches` are `WidePatch`es by the name of their module."""
        for plan, part in zip(self.spec.wide, self.parts, strict=True):
            patch: WidePatch = patches[plan.module]
            others = [entry for entry in patch.seeds if entry[0] is not self]
            patch.set_seeds([*others, (self, plan, part)] if is_connected else others)


# Joined seeds


Entry = tuple["WidthSeed", WidePlan, WidePart]  # of `WidePatch.seeds`
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def split_joined(patch: WidePatch, given: Tensor) -> tuple[list[Entry], list[Entry]]:
    """Return the seeds of a module that are computed together with it for this input, as one wide module, and the others.

    Only torch's own layers and batch norms can be computed so. It pays where the input is larger than the weights, as in convolutions.
    """
    joined = list(itertools.takewhile(lambda entry: entry[0].spec.is_joined, patch.seeds))
    if not joined:
        return [], patch.seeds
    kinds = _BATCH_NORMS if isinstance(patch.module, _BATCH_NORMS) else LAYERS
    modules = [patch.module, *(module for _, _, part in joined for module in part.children())]
    is_known = all(type(module) in kinds and getattr(module, "groups", 1) == 1 for module in modules) and not patch.is_replaced
    if not is_known:
        return [], patch.seeds
    # Count the inputs without those of other seeds, so that a new seed does not change how the ones before it are computed.
    axis, others = joined[0][2].axis, patch.seeds[len(joined) :]
    inputs = given.shape[axis] - sum(plan.inputs for _, plan, _ in others)
    weights = sum(parameter.numel() for module in modules for parameter in module.parameters())
    pays = given.numel() // given.shape[axis] * inputs > weights
    return (joined, others) if pays else ([], patch.seeds)


def compute_joined(module: Any, seeds: Sequence[Entry], given: Tensor) -> Tensor:
    """Compute a module and its seeds as one wide module, whose weights are put together for every pass.

    `pass_through` copies parts of the wide input and output, which are much larger than the weights. The sums are rounded differently here,
    so this is for kept seeds: a host with a new seed must equal the host without it bit for bit.
    """
    if isinstance(module, _BATCH_NORMS):
        return _joined_norm([module, *(part.own for _, _, part in seeds)], given, is_training=module.training)
    weight, bias = _joined_weight(module, seeds)
    if isinstance(module, nn.Linear):
        return linear(given, weight, bias)
    output: Tensor = module._conv_forward(given, weight, bias)
    return output


def _joined_weight(module: Layer, seeds: Sequence[Entry]) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of the layer that `fold` would make."""
    outputs, inputs = module.weight.shape[:2]
    backs = {seed: seed.alpha * part.back.weight for seed, _, part in seeds if part.back is not None}
    rows = [torch.cat([module.weight, *(back[:outputs] for back in backs.values())], 1)]
    biases = [module.bias, *(part.new.bias for _, _, part in seeds if part.new is not None)]
    for number, (_, plan, part) in enumerate(seeds):
        if part.new is not None:
            new = part.new.weight
            unread = [new.new_zeros(len(new), inputs - new.shape[1], *new.shape[2:])] if new.shape[1] < inputs else []
            inner = [] if part.inner is None else [part.inner.weight]
            later = [_rows(backs[after], outputs, plan.outputs) for after, _, _ in seeds[number + 1 :] if after in backs]
            rows.append(torch.cat([new, *unread, *inner, *later], 1))
            outputs += plan.outputs
        inputs += plan.inputs
    return torch.cat(rows), None if module.bias is None else torch.cat([bias for bias in biases if bias is not None])


def _rows(weight: Tensor, start: int, count: int) -> Tensor:
    """Return rows of a block of weights; those that it does not have are zero."""
    return weight[start : start + count] if start < len(weight) else weight.new_zeros(count, *weight.shape[1:])


def _joined_norm(norms: Sequence[Any], given: Tensor, *, is_training: bool) -> Tensor:
    """Compute batch norms of the same kind, one for each part of the units, as one, in this mode."""
    first = norms[0]
    weight, bias = (torch.cat([getattr(norm, name) for norm in norms]) if first.affine else None for name in ("weight", "bias"))
    if first.running_mean is None or (is_training and not first.track_running_stats):
        return batch_norm(given, None, None, weight, bias, training=True, eps=first.eps)
    mean, variance = (torch.cat([getattr(norm, name) for norm in norms]) for name in ("running_mean", "running_var"))
    output = batch_norm(given, mean, variance, weight, bias, is_training, first.momentum, first.eps)
    if is_training:
        sizes = [norm.num_features for norm in norms]
        for norm, its_mean, its_variance in zip(norms, torch.split(mean, sizes), torch.split(variance, sizes), strict=True):
            norm.running_mean.copy_(its_mean)
            norm.running_var.copy_(its_variance)
            norm.num_batches_tracked.add_(1)
    return output


def _compute_own(own: nn.Module, x: Tensor, *, is_training: bool) -> Tensor:
    """Compute the copy of a module for new units, in the mode of the host's module.

    Compiled code must not change the mode of the copy, so there batch norms and dropouts are computed by torch's functions.
    """
    if torch.compiler.is_compiling() and own.training != is_training:
        if isinstance(own, _BATCH_NORMS):
            return _joined_norm([own], x, is_training=is_training)
        if isinstance(own, DropoutBase):
            return x if not is_training else _DROPOUTS[type(own)](x, own.p, training=True)
    with _own_random_numbers(own, x):
        output: Tensor = own(x)
    return output


_DROPOUTS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Dropout: dropout,
    nn.Dropout1d: dropout1d,
    nn.Dropout2d: dropout2d,
    nn.Dropout3d: dropout3d,
    nn.AlphaDropout: alpha_dropout,
    nn.FeatureAlphaDropout: feature_alpha_dropout,
}


def _own_random_numbers(module: nn.Module, x: Tensor) -> AbstractContextManager[None]:
    """Return a context in which a dropout draws without using up random numbers of the host, whose own draws stay the same."""
    if not isinstance(module, DropoutBase) or not module.training or torch.compiler.is_compiling():
        return nullcontext()
    return torch.random.fork_rng([x.device] if x.is_cuda else [])


def _leading(sizes: Sequence[int], total: int) -> list[int]:
    """Return the first of some sizes, which add up to `total`.

    >>> _leading([2, 3, 4], 5)
    [2, 3]
    """
    count = next(count for count in range(len(sizes) + 1) if sum(sizes[:count]) == total)
    return list(sizes[:count])


class _WithDenseGradient(torch.autograd.Function):
    """Identity, whose gradient is dense, in the order of its strides. A slice of a wider gradient would be summed in another order."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone(memory_format=torch.preserve_format)
