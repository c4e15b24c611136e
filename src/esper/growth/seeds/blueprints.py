"""Blueprints: the registry of networks that a seed can consist of, the places each fits, and its cost.

A blueprint is a function that builds a branch for a place. The branch must keep the shape of its input, be exactly zero at birth, and have
a gradient from the first step. So its last layer starts at zero, with no ReLU behind it. Register your own like this:

    @register_blueprint("conv5x5", kinds=["conv"], description="Neighbours mixed, further away.")
    def conv5x5(place: Place) -> nn.Module:
        layer = nn.Conv2d(place.width, place.width, 5, padding=2)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.host.layout import CPU, Kind, Place, Units
from esper.growth.lifecycle.stages import Cost
from esper.growth.seeds import branches
from esper.text_table import did_you_mean

Build = Callable[[Place], nn.Module]
KINDS: tuple[Kind, ...] = get_args(Kind)
WIDENINGS = (25, 50, 100, 300, 700, 1500, 2300)  # new units of the built-in width blueprints, in percent of the present ones


def _anywhere(place: Place) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A registered kind of network that a seed can consist of."""

    name: str
    kinds: frozenset[Kind]
    build: Build  # builds a branch on the current default device, in float32
    description: str  # one line for the user
    fits: Callable[[Place], bool] = _anywhere  # called only with places of its kinds
    share: float | None = None  # of a width blueprint: new units as a share of the present ones; it has no branch
    is_chain: bool = False  # a width blueprint that also widens the units in a row behind the place


AHEAD = "it would look ahead, but a position there depends only on those before it"
REGISTRY: dict[str, Blueprint] = {}


def register_blueprint(
    name: str, *, kinds: Iterable[Kind], description: str = "", fits: Callable[[Place], bool] = _anywhere, replace: bool = False
) -> Callable[[Build], Build]:
    """Make the decorated function a blueprint. The default description is the first line of the function's docstring.

    `fits` may refuse places of these kinds. With `replace`, a blueprint of the same name is replaced, as when a notebook cell runs again.
    """
    chosen = frozenset(kinds)
    if not name.isidentifier():
        raise GrowthError(f"a blueprint's name must be one word of letters, digits and underscores, not {name!r}")
    if not chosen or not chosen <= set(KINDS):
        raise GrowthError(f"kinds of blueprint {name!r} must be a list of some of {list(KINDS)}, not {sorted(chosen)}")

    def register(build: Build) -> Build:
        if name in REGISTRY and not replace:
            raise GrowthError(f"a blueprint named {name!r} already exists; choose another name, or pass replace=True")
        first_line = (build.__doc__ or "").strip().partition("\n")[0]
        REGISTRY[name] = Blueprint(name, chosen, build, description or first_line, fits)
        return build

    return register


def _no_branch(place: Place) -> nn.Module:
    raise AssertionError("a width seed has no branch")


def widened_by(blueprint: Blueprint, place: Place) -> tuple[Units, ...]:
    """Return the units that a width blueprint widens in a place.

    A blueprint without a chain widens the first units. In a transformer block these are the ones of the feed-forward network, although the
    attention heads come before them: a slot after the attention itself widens heads alone.
    """
    if blueprint.is_chain:
        return place.chain
    return tuple(units for units in place.chain if not units.made)[:1] or place.chain[:1]


def get_blueprint(name: str) -> Blueprint:
    """Return the blueprint of this name. Raise a GrowthError that lists all blueprints if there is none."""
    if name not in REGISTRY:
        hint = did_you_mean(name, REGISTRY, cutoff=0.5)
        raise GrowthError(f"no blueprint named {name!r}; {hint and f'{hint} '}the blueprints are {', '.join(REGISTRY)}")
    return REGISTRY[name]


def blueprints_for(place: Place, names: Sequence[str] | None = None) -> tuple[Blueprint, ...]:
    """Return the blueprints that fit the place, in the order of registration; if `names` is given, only those among them."""
    wanted = None if names is None else {get_blueprint(name).name for name in names}
    return tuple(
        blueprint
        for blueprint in REGISTRY.values()
        if (wanted is None or blueprint.name in wanted) and reason_against(blueprint, place) is None
    )


def blueprints_of(kind: Kind) -> tuple[Blueprint, ...]:
    """Return the blueprints for places of this kind, including those that do not fit every such place."""
    return tuple(blueprint for blueprint in REGISTRY.values() if kind in blueprint.kinds)


def is_built_in(blueprint: Blueprint) -> bool:
    """Return whether it is one of Esper's own blueprints, which need no `check_branch`, and not a replacement of one."""
    return blueprint.share is not None or blueprint.build.__module__ == branches.__name__


def reason_against(blueprint: Blueprint, place: Place) -> str | None:
    """Return why the blueprint cannot grow in the place, or None if it can."""
    if blueprint.share is not None:
        if not place.chain:
            return place.why_not_wider or "its units were not looked at"
        return "there are no layers in a row" if blueprint.is_chain and len(place.chain) < 2 else None
    if place.only_wider:
        return place.only_wider
    if place.kind not in blueprint.kinds:
        return f"it is made for {' and '.join(sorted(blueprint.kinds))} outputs"
    # Ask again without the place's restrictions to find the one that is the reason.
    if not blueprint.fits(place):
        if place.alone and blueprint.fits(dataclasses.replace(place, alone="")):
            return place.alone
        return (
            AHEAD
            if place.is_causal and blueprint.fits(dataclasses.replace(place, alone="", is_causal=False))
            else "it has no use for this shape"
        )
    # The `fits` of a user's blueprint may ignore the restrictions, so try out which positions its branch looks at.
    if is_built_in(blueprint) or not (place.alone or place.is_causal):
        return None
    looks_back, looks_ahead = _looks(blueprint, _cache_key(place))
    if place.alone and (looks_back or looks_ahead):
        return place.alone
    return AHEAD if place.is_causal and looks_ahead else None


def build_branch(blueprint: Blueprint, place: Place, seed: int) -> nn.Module:
    """Build a branch for the place. Its weights depend only on `seed`, not on the device; the global random generators are not used."""
    reason = reason_against(blueprint, place)
    if reason is not None:
        fitting = ", ".join(other.name for other in blueprints_for(place))
        raise GrowthError(
            f"blueprint {blueprint.name!r} does not fit {_described(place)} of {place.name!r}: {reason}; "
            f"blueprints that fit: {fitting or 'none'}"
        )
    with _apart(CPU, seed):
        branch = blueprint.build(dataclasses.replace(place, batch_axis=0))
    branch = branches.BatchSecond(branch) if place.batch_axis == 1 else branch
    return branch.to(device=place.device, dtype=place.dtype).requires_grad_()


# Cost


def cost_of(blueprint: Blueprint, place: Place) -> Cost:
    """Count the parameters, and the FLOPs of a forward pass for one sample. Torch counts only matrix products, so norms are free."""
    if blueprint.share is not None:
        chain = widened_by(blueprint, place)
        return widening_cost(chain, [units.added(blueprint.share) for units in chain])
    return _cost(blueprint, _cache_key(place))


def widening_cost(chain: Sequence[Units], added: Sequence[int]) -> Cost:
    """Return the cost of `added[i]` new units for `chain[i]`, with the blocks from new units to new units."""
    parts: list[tuple[int, int]] = []  # parameters and FLOPs
    read: dict[str, int] = {}  # layer -> new inputs that it reads so far
    for units, count in zip(chain, added, strict=True):
        sizes = dict(units.sizes)
        for name in units.producers:
            size, outputs = sizes[name], count * units.features_of(name)
            parts += [size.cost(size.inputs + read.get(name, 0), outputs), (outputs * size.per_output, 0)]
        parameters, flops = units.own_cost
        parts.append((count * parameters // units.width, count * flops // units.width))
        for reader in units.readers:
            read[reader.name] = count * reader.features
            parts.append(sizes[reader.name].cost(read[reader.name], sizes[reader.name].outputs))
    return Cost(*map(sum, zip(*parts, strict=True)))


@cache
def _cost(blueprint: Blueprint, place: Place) -> Cost:
    try:
        return _count(blueprint, place, torch.device("meta"))
    except Exception:  # the branch may need real numbers; if it is broken, the CPU shows the error
        return _count(blueprint, place, CPU)


def _count(blueprint: Blueprint, place: Place, device: torch.device) -> Cost:
    # Compute attention by plain matrix products, which the counter sees.
    with _apart(device), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        branch = blueprint.build(place)
        with flop_counter() as counter:
            branch(torch.zeros(1, *place.shape))
    return Cost(sum(parameter.numel() for parameter in branch.parameters()), counter.get_total_flops())


def flop_counter() -> FlopCounterMode:
    """Return torch's FLOP counter with support for recurrent layers, fused attention on CPUs, and grouped queries (torch 2.11 lacks it)."""
    aten = torch.ops.aten
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
            aten._scaled_dot_product_flash_attention: _attention_flops,
            aten._scaled_dot_product_efficient_attention: _attention_flops,
            aten._scaled_dot_product_cudnn_attention: _attention_flops,
            aten._native_multi_head_attention: _multi_head_attention_flops,
            aten._transformer_encoder_layer_fwd: _encoder_layer_flops,
            aten.mkldnn_rnn_layer: _mkldnn_rnn_flops,
            aten._cudnn_rnn: _rnn_flops,
            aten.miopen_rnn: _rnn_flops,
        },
    )
    counter.mod_tracker = _NoTracker()
    return counter


class _NoTracker(ModuleTracker):
    """Tracker that does nothing. Torch's own fails under no_grad if a module gets a view of a parameter, such as learned queries."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


# FLOP formulas. The counter passes the shapes of an operation's tensors in place of the tensors.
Shape = Sequence[int]


def _attention_flops(query: Shape, key: Shape, value: Shape, *others: Any, out_shape: Any = None, **named: Any) -> int:
    """Count the products of queries with keys and of scores with values, all [B, heads, T, D]. Query heads may share a key head."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _multi_head_attention_flops(
    query: Shape, key: Shape, value: Shape, width: int, heads: int, *others: Any, out_shape: Any = None, **named: Any
) -> int:
    """Count the four projections and the attention itself; `query`, `key` and `value` are [B, T, D]."""
    (batch, queries, _), keys = query, key[1]
    projections = 2 * batch * width * width * (2 * queries + 2 * keys)
    return projections + _attention_flops(*([batch, heads, length, width // heads] for length in (queries, keys, keys)))


def _encoder_layer_flops(
    source: Shape, width: int, heads: int, in_weight: Shape, in_bias: Shape, out_weight: Shape, *others: Any, out_shape: Any = None
) -> int:
    """Count attention and the two layers of the feed-forward network, whose first weight [hidden, D] is the first matrix in `others`."""
    feedforward = next(shape for shape in others if isinstance(shape, Sequence) and len(shape) == 2)
    batch, length, _ = source
    both = 2 * 2 * batch * length * width * int(feedforward[0])
    return both + _multi_head_attention_flops(source, source, source, width, heads)


def _mkldnn_rnn_flops(inputs: Shape, of_inputs: Shape, of_states: Shape, *others: Any, out_shape: Any = None, **named: Any) -> int:
    return _rnn_flops(inputs, [of_inputs, of_states])


def _rnn_flops(inputs: Shape, weights: Sequence[Shape], *others: Any, out_shape: Any = None, **named: Any) -> int:
    """Count one product per weight matrix and position. `inputs` are [T, B, D], or [T·B, D] if the sequences are packed."""
    return 2 * math.prod(inputs[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) == 2)


# Trial runs of branches


def check_branch(blueprint: Blueprint, place: Place) -> None:
    """Raise a GrowthError unless the blueprint's branch is zero at birth and has a gradient. The result is cached."""
    _check(blueprint, _cache_key(place))


@cache
def _check(blueprint: Blueprint, place: Place) -> None:
    """Build two branches and try one of them; see `check_branch`."""
    with _apart(CPU):
        branch = blueprint.build(place)
        fault = _fault_of_layers(branch, blueprint.build(place)) or _fault_at_birth(branch, torch.randn(2, *place.shape))
    if fault:
        raise GrowthError(f"blueprint {blueprint.name!r} for {_described(place)}: {fault}")


def _fault_of_layers(branch: object, second: nn.Module) -> str | None:
    """Return what is wrong with the layers of a branch, or None. `second` is a second branch of the same blueprint."""
    if not isinstance(branch, nn.Module):
        return f"its function returned a {type(branch).__name__}; return an nn.Module"
    if any(is_lazy(tensor) or not tensor.numel() for tensor in (*branch.parameters(), *branch.buffers())):
        return "it holds lazy or empty tensors; give its layers their sizes, from place.width and place.shape"
    if set(branch.parameters()) & set(second.parameters()):
        return "its function returned the same parameters twice, so that seeds would share them; make new layers in every call"
    return None


def _fault_at_birth(branch: nn.Module, h: Tensor) -> str | None:
    """Return what is wrong with the output or gradient of a new branch for the input h, or None."""
    given = h.clone()
    output = branch.requires_grad_()(given)
    if not isinstance(output, Tensor) or output.shape != h.shape or output.dtype != h.dtype:
        made = f"{list(output.shape)} in {output.dtype}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        return f"it turns {list(h.shape)} in {h.dtype} into {made}; return a tensor of the same shape and dtype"
    if not torch.equal(given, h):
        return "it changes its input; use no in-place layer, such as nn.ReLU(inplace=True), at its start"
    if output.any():  # true for NaN as well
        return f"it is not zero at birth, but up to {output.abs().max():.3g}; set weight and bias of its last layer to zero"
    if not _has_live_gradient(branch, output):
        return "it has no gradient at birth, so it would never learn; set only its last layer to zero, and put no norm or ReLU behind it"
    return None


def _has_live_gradient(branch: nn.Module, output: Tensor) -> bool:
    parameters = list(branch.parameters())
    if not parameters or not output.requires_grad:
        return False
    gradients = torch.autograd.grad(output, parameters, grad_outputs=torch.randn_like(output), allow_unused=True)
    return any(gradient is not None and bool(gradient.isfinite().all() and gradient.any()) for gradient in gradients)


_live: dict[tuple[Blueprint, Place], tuple[str, ...]] = {}  # cache of live_parameters


def live_parameters(blueprint: Blueprint, place: Place, branch: nn.Module) -> tuple[str, ...]:
    """Return the names of a branch's parameters that have a gradient at birth: those of its zeroed layer."""
    key = blueprint, _cache_key(place)
    if key not in _live:
        named = dict(branch.named_parameters())
        with _apart(CPU):
            h, g = torch.randn(2, 2, *place.shape).to(device=place.device, dtype=place.dtype)
            gradients = torch.autograd.grad(branch(h), list(named.values()), g, allow_unused=True)
        live = tuple(name for name, gradient in zip(named, gradients, strict=True) if gradient is not None and bool(gradient.any()))
        _live[key] = live or tuple(named)
    return _live[key]


@cache
def _looks(blueprint: Blueprint, place: Place) -> tuple[bool, bool]:
    """Return whether an output position of a branch depends on input positions before it, and on positions after it, by trying it out."""
    line = 1 if place.kind == "token" else 2  # dimension of the positions in [B, T, D] or [B, C, L]
    if place.kind == "dense" or place.positions < 2:
        return False, False
    try:
        with _apart(CPU), torch.no_grad():
            branch, h = blueprint.build(place), torch.randn(2, *place.shape)
            for parameter in branch.parameters():
                parameter.normal_(std=0.3)  # a new branch gives zero everywhere
            changed = h.clone()
            changed.select(line, middle := h.shape[line] // 2).neg_()
            is_changed = (branch(h) != branch(changed)).movedim(line, 0).flatten(1).any(1)
            return bool(is_changed[middle + 1 :].any()), bool(is_changed[:middle].any())
    except Exception:  # `check_branch` reports what is wrong with the branch
        return False, False


# Helpers


def _cache_key(place: Place) -> Place:
    """Return the place with only the fields that a branch depends on, so that equal places share cached results."""
    return Place("", place.kind, place.shape, batch_axis=place.batch_axis, is_causal=place.is_causal, alone=place.alone)


def _described(place: Place) -> str:
    return f"the {place.kind} output {'×'.join(map(str, place.shape))}"


@contextmanager
def _apart(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Isolate the block from the caller's random generator, default device, autocast, gradient and inference modes, and vice versa."""
    with torch.random.fork_rng(devices=[]), device, torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices' generators too
        yield


class Option(NamedTuple):
    """A blueprint that may grow in a place, and the names of the units that it widens there."""

    name: str
    widened: tuple[str, ...]


def options_for(place: Place, config: GrowthConfig) -> tuple[Option, ...]:
    """Return what may grow in a place.

    There are none in a causal place, or where a seed must treat every position alone, if seeds blend by a gate: a gate reads all positions.
    Units can be added only by the blending "add": otherwise they would not become a part of the layers.
    """
    is_closed = (place.is_causal or bool(place.alone)) and config.lifecycle.blending == "gate"
    fitting = () if is_closed else blueprints_for(place, config.blueprints)
    options = []
    for blueprint in fitting:
        if blueprint.share is None:
            options.append(Option(blueprint.name, ()))
        elif config.lifecycle.blending == "add":
            options.append(Option(blueprint.name, tuple(units.name for units in widened_by(blueprint, place))))
    return tuple(options)


def _register_built_in() -> None:
    conv: list[Kind] = ["conv"]
    features: list[Kind] = ["token", "dense"]
    register_blueprint("norm", kinds=KINDS, fits=branches.can_normalise)(branches.norm)
    register_blueprint("squeeze_excite", kinds=conv, fits=branches.can_pool)(branches.squeeze_excite)
    register_blueprint("conv1x1", kinds=conv)(branches.conv1x1)
    register_blueprint("conv3x3", kinds=conv, fits=branches.can_convolve)(branches.conv3x3)
    register_blueprint("double_conv3x3", kinds=conv, fits=branches.can_convolve)(branches.double_conv3x3)
    register_blueprint("wide_conv3x3", kinds=conv, fits=branches.can_convolve)(branches.wide_conv3x3)
    register_blueprint("bottleneck", kinds=conv, fits=branches.can_convolve)(branches.bottleneck)
    register_blueprint("depthwise", kinds=conv, fits=branches.can_convolve)(branches.depthwise)
    register_blueprint("low_rank", kinds=features)(branches.low_rank)
    register_blueprint("mlp", kinds=features)(branches.mlp)
    register_blueprint("attention", kinds=["token"], fits=branches.can_attend)(branches.attention)
    for percent in WIDENINGS:
        for suffix, is_chain, where in (("", False, "here"), ("_chain", True, "here and in all layers in a row behind")):
            name, description = f"widen_{percent}{suffix}", f"{percent} % more units {where}."
            REGISTRY[name] = Blueprint(name, frozenset(KINDS), _no_branch, description, share=percent / 100, is_chain=is_chain)


_register_built_in()
