"""Blueprints: what may grow, where it fits, what it costs, and how a branch is made of it.

A blueprint of your own is a function that builds a branch for a place. The branch keeps the shape, is exactly zero at birth and learns from
the first step, so its last layer starts at zero and no ReLU stands behind that layer:

    @register_blueprint("conv5x5", kinds=["conv"], description="Neighbours mixed, further away.")
    def conv5x5(place: Place) -> nn.Module:
        layer = nn.Conv2d(place.width, place.width, 5, padding=2)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from esper.growth import branches
from esper.growth.errors import GrowthError
from esper.growth.place import CPU, Kind, Place
from esper.growth.state import Cost

Build = Callable[[Place], nn.Module]
KINDS: tuple[Kind, ...] = get_args(Kind)


def _anywhere(place: Place) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Blueprint:
    name: str
    kinds: frozenset[Kind]
    build: Build  # on the current default device, in float32
    description: str  # one line for a person
    fits: Callable[[Place], bool] = _anywhere  # asked only for places of its kinds


_registry: dict[str, Blueprint] = {}


def register_blueprint(
    name: str, *, kinds: Iterable[Kind], description: str = "", fits: Callable[[Place], bool] = _anywhere, replace: bool = False
) -> Callable[[Build], Build]:
    """Makes the decorated function a blueprint. Its description is the first line of the function's docstring unless given.

    `fits` may refuse places of these kinds. `replace` is for running a notebook's cell again.
    """
    chosen = frozenset(kinds)
    if not name.isidentifier():
        raise GrowthError(f"a blueprint's name is one word of letters, digits and underscores; got {name!r}")
    if not chosen or not chosen <= set(KINDS):
        raise GrowthError(f"kinds of blueprint {name!r} are a list of some of {list(KINDS)}; got {sorted(chosen)}")

    def register(build: Build) -> Build:
        if name in _registry and not replace:
            raise GrowthError(f"there is a blueprint named {name!r} already; choose another name, or replace it with replace=True")
        first_line = (build.__doc__ or "").strip().partition("\n")[0]
        _registry[name] = Blueprint(name, chosen, build, description or first_line, fits)
        return build

    return register


def get_blueprint(name: str) -> Blueprint:
    if name not in _registry:
        near = get_close_matches(name, _registry, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise GrowthError(f"no blueprint named {name!r}; {hint}there are {', '.join(_registry)}")
    return _registry[name]


def blueprints_for(place: Place, names: Sequence[str] | None = None) -> tuple[Blueprint, ...]:
    """Those that fit the place, in the order of registration; `names` leaves only these."""
    wanted = None if names is None else {get_blueprint(name).name for name in names}
    return tuple(blueprint for blueprint in _registry.values() if (wanted is None or blueprint.name in wanted) and _fits(blueprint, place))


def is_built_in(blueprint: Blueprint) -> bool:
    """Whether it is one of ours, which need no `check_branch`; one that replaced ours is not."""
    return blueprint.build.__module__ == branches.__name__


def build_branch(blueprint: Blueprint, place: Place, seed: int) -> nn.Module:
    """A branch for the place. Its weights depend on the seed alone, on any device, and the global generators stay where they are."""
    if not _fits(blueprint, place):
        fitting = ", ".join(other.name for other in blueprints_for(place))
        raise GrowthError(f"blueprint {blueprint.name!r} does not fit {_described(place)} of {place.name!r}; these do: {fitting or 'none'}")
    with _apart(CPU, seed):
        branch = blueprint.build(place)
    return branch.to(device=place.device, dtype=place.dtype).requires_grad_()


def cost_of(blueprint: Blueprint, place: Place) -> Cost:
    """Parameters, and FLOPs of a forward pass for one sample: counted, not estimated. Torch counts products alone, so norms are free."""
    return _cost(blueprint, _essence(place))


def check_branch(blueprint: Blueprint, place: Place) -> None:
    """Raises ValueError, saying what to do, unless the blueprint's branch is the identity at birth and learns. Asked again, it is quick."""
    _check(blueprint, _essence(place))


def _fits(blueprint: Blueprint, place: Place) -> bool:
    return place.kind in blueprint.kinds and blueprint.fits(place)


def _essence(place: Place) -> Place:
    """What of a place decides about a branch, so that like places share what is computed once."""
    return Place("", place.kind, place.shape, is_causal=place.is_causal)


def _described(place: Place) -> str:
    return f"the {place.kind} output {'×'.join(map(str, place.shape))}"


@contextmanager
def _apart(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Out of reach of the caller's random generator, default device, autocast and inference mode, and they of what happens here."""
    with torch.random.fork_rng(devices=[]), device, torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices' generators too
        yield


@cache
def _cost(blueprint: Blueprint, place: Place) -> Cost:
    try:
        return _count(blueprint, place, torch.device("meta"))
    except Exception:  # a branch may need real numbers; if it is broken, it breaks on the CPU too and says so
        return _count(blueprint, place, CPU)


def _count(blueprint: Blueprint, place: Place, device: torch.device) -> Cost:
    # Attention in plain products: the fused kernel of the CPU goes uncounted.
    with _apart(device), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        branch = blueprint.build(place)
        with FlopCounterMode(display=False) as counter:
            branch(torch.zeros(1, *place.shape))
    return Cost(sum(parameter.numel() for parameter in branch.parameters()), counter.get_total_flops())


@cache
def _check(blueprint: Blueprint, place: Place) -> None:
    with _apart(CPU):
        branch = blueprint.build(place)
        h = torch.randn(2, *place.shape)
        fault = _fault_of_layers(branch, blueprint.build(place)) or _fault_at_birth(branch, h) or _fault_ahead(branch, h, place)
    if fault:
        raise GrowthError(f"blueprint {blueprint.name!r} for {_described(place)}: {fault}")


def _fault_of_layers(branch: object, twin: nn.Module) -> str | None:
    """What is wrong with what the blueprint built, twice."""
    if not isinstance(branch, nn.Module):
        return f"its function returned a {type(branch).__name__}; return an nn.Module"
    if any(is_lazy(tensor) or not tensor.numel() for tensor in (*branch.parameters(), *branch.buffers())):
        return "it holds lazy or empty tensors; give its layers their sizes, from place.width and place.shape"
    if set(branch.parameters()) & set(twin.parameters()):
        return "its function returned the same parameters twice, so that seeds would share them; make new layers in every call"
    return None


def _fault_at_birth(branch: nn.Module, h: Tensor) -> str | None:
    """What is wrong with what the branch does."""
    given = h.clone()
    output = branch.requires_grad_()(given)
    if not isinstance(output, Tensor) or output.shape != h.shape or output.dtype != h.dtype:
        made = f"{list(output.shape)} in {output.dtype}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        return f"it makes {made} of {list(h.shape)} in {h.dtype}; return a tensor of the same shape and dtype"
    if not torch.equal(given, h):
        return "it changes its input; use no in-place layer, such as nn.ReLU(inplace=True), at its start"
    if output.any():  # which nan is as well
        return f"it is not zero at birth, but up to {output.abs().max():.3g}; set weight and bias of its last layer to zero"
    if not _has_live_gradient(branch, output):
        return "it has no gradient at birth, so it would never learn; set its last layer alone to zero, and put no norm or ReLU behind it"
    return None


def _fault_ahead(branch: nn.Module, h: Tensor, place: Place) -> str | None:
    """What is wrong with what the branch sees, once it has learned something."""
    line = 1 if place.kind == "token" else 2
    if not place.is_causal or h.shape[line] < 2:
        return None
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter.normal_(std=0.3)
        changed = h.clone()
        changed.select(line, -1).neg_()
        before, after = (branch(given).narrow(line, 0, h.shape[line] - 1) for given in (h, changed))
    if torch.equal(before, after):
        return None
    return "it looks ahead, and the host sees only what comes before; look back only where place.is_causal, or refuse such places by `fits`"


def _has_live_gradient(branch: nn.Module, output: Tensor) -> bool:
    parameters = list(branch.parameters())
    if not parameters or not output.requires_grad:
        return False
    gradients = torch.autograd.grad(output, parameters, grad_outputs=torch.randn_like(output), allow_unused=True)
    return any(gradient is not None and bool(gradient.isfinite().all() and gradient.any()) for gradient in gradients)


def _register_ours() -> None:
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
    register_blueprint("attention", kinds=["token"])(branches.attention)


_register_ours()
