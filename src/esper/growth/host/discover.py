"""A survey of a host: one forward pass that finds out where seeds could grow, in which order its parts run, and what it costs.

Shapes: B = batch, C = channels, H, W, L = positions in space, T = positions in a sequence, D = features.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from esper.growth.config import GrowthError
from esper.growth.host.causality import Nudge, Outputs, batch_axes, causal_places, hides, tensors_in
from esper.growth.host.forward_patch import Forward, forward_replaced, keep_running, own_forward
from esper.growth.host.isolation import isolated
from esper.growth.host.layout import Call, FeatureAxes, Kind, Place, Refusal
from esper.growth.lifecycle.stages import Cost
from esper.growth.seeds.blueprints import flop_counter
from esper.growth.seeds.seed import Seed

_FITTING = "[B, C, H, W], [B, C, L], [B, T, D], [T, B, D], [B, H, W, D] and [B, D]"
_WIDTHS = ("out_channels", "num_features", "num_channels", "out_features", "embedding_dim")  # what layers call their output's


@dataclass(frozen=True, slots=True)
class Discovery:
    places: dict[str, Place]  # in the order in which they run
    refusals: tuple[Refusal, ...]
    calls: tuple[Call, ...]
    host: Cost
    same_output: dict[str, int]  # places whose outputs are one tensor have the same number; what the host itself gives has number 0
    behind: dict[str, str]  # place -> the one behind it that is all that uses its output, and has no weights: a pool, say
    last: frozenset[str]  # places with nothing behind them that could use what grows there
    load: float  # Σ over layers of weights / positions that share them: what a sample has to teach the host


class Weights(NamedTuple):
    """What a seed's weights are to be like."""

    dtype: torch.dtype
    device: torch.device


def discover(model: nn.Module, example_input: Any) -> Discovery:
    """Runs the model on the example, in eval mode and without a trace."""
    batch = batch_size_of(example_input)
    _check_weights(model)
    log, run = _run(model, example_input, batch=batch), partial(_tensors_of, model)
    places, refusals, kept = dict[str, Place](), list[Refusal](), _kept_seeds(model)
    before = run(example_input) or {}
    batches = batch_axes(example_input, before, batch, run)
    for name in sorted((name for name, _ in model.named_modules() if name), key=log.last_end):
        found = (
            Refusal(name, "belongs to a seed that was kept")
            if name in kept
            else _classify(model, name, log, batches.get(name, "does not run as it did before"))
        )
        if isinstance(found, Refusal):
            refusals.append(found)
        else:
            places[name] = found
    causal, more = causal_places(places, example_input, before, run), list[Refusal]()
    places = {name: replace(place, is_causal=name in causal) for name, place in places.items()}
    mask = _mask_of(model, log) or ("padding" if hides(places, example_input, run) else "")
    places = _alone(places, mask, _cache_of(model))
    fused = _passed_by(model, example_input, places) | {name for name in places if _is_in_encoder_layer(model, name)}
    lost = _passed_by(model, example_input, places, hooked=fused) if fused else set[str]()
    more += [Refusal(name, "does not run in evaluation, where a module around it computes it in another way") for name in lost]
    places = {name: replace(place, is_fused=name in fused) for name, place in places.items() if name not in lost}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    last = {name for name, place in places.items() if place.flops_behind == 0 and log.layers_done[name] == log.layers}
    host = Cost(parameters, log.total_flops // batch)
    refusals = sorted([*refusals, *more], key=lambda refusal: log.last_end(refusal.name))
    return Discovery(
        places, tuple(refusals), tuple(log.calls), host, _numbers(log, places), _behind(model, places, log), frozenset(last), log.load
    )


def call(model: Any, example_input: Any) -> Any:
    """A tensor is the one argument, a tuple or list the arguments, a mapping the keyword arguments."""
    if isinstance(example_input, Mapping):
        return model(**example_input)
    if isinstance(example_input, tuple | list):
        return model(*example_input)
    return model(example_input)


def batch_size_of(batch: Any) -> int:
    """The leading size of the first tensor in it."""
    for tensor in tensors_in(batch):
        if tensor.ndim > 0 and len(tensor) > 0:
            return len(tensor)
    raise GrowthError(
        f"there is no batch in the example input: {_describe(batch)}; pass a batch as the model gets it in training, such as x[:2]"
    )


def samples_in(arguments: Any) -> int:
    """The leading size of the first tensor that has one; 0 where there is none, which is no mistake in a call of a model."""
    return next((tensor.size(0) for tensor in tensors_in(arguments) if tensor.ndim > 0), 0)


def _check_weights(model: nn.Module) -> None:
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise GrowthError(f"the weight {lazy!r} of a lazy layer has no size yet; run the model once on a batch, then add slots")


@dataclass
class _Log:
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    starts: dict[str, list[int]] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)  # of the forward pass until the submodule was done
    feature_axes: dict[str, int | None] = field(default_factory=dict)
    layers_done: dict[str, int] = field(default_factory=dict)  # how many with weights of their own until then
    is_autocast: dict[str, bool] = field(default_factory=dict)
    layers: int = 0  # with weights of their own, until now
    load: float = 0.0
    ticks: int = 0
    output: Any = None
    total_flops: int = 0
    batch: int = 0
    uses: Counter[int] = field(default_factory=Counter)  # see FeatureAxes: what uses a tensor, by its number
    numbers: dict[str, int | None] = field(default_factory=dict)  # of what submodules gave
    origins: dict[str, list[int]] = field(default_factory=dict)  # of what they were given
    masks: list[str] = field(default_factory=list)  # arguments of submodules that hide positions of some samples

    def last_end(self, name: str) -> tuple[int, str]:
        ends = [call.end for call in self.calls if call.name == name]
        return (max(ends) if ends else self.ticks + 1, name)

    def tensors(self) -> Outputs:
        """The outputs that are one tensor."""
        return {name: outputs[0] for name, outputs in self.outputs.items() if len(outputs) == 1 and isinstance(outputs[0], Tensor)}

    def enter(self, name: str, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self.batch:
            self.masks += [
                f"{argument} of {name}" for argument, value in _named(module, arguments, named) if _hides(argument, value, self.batch)
            ]
        self.starts.setdefault(name, []).append(self.ticks)
        self.ticks += 1

    def leave(self, name: str, module: nn.Module, output: Any, flops: int) -> None:
        self.calls.append(Call(name, self.starts[name].pop(), self.ticks))
        self.ticks += 1
        self.outputs.setdefault(name, []).append(output)
        self.flops[name] = flops
        if not list(module.children()) and list(module.parameters(recurse=False)):
            self.layers += 1
            self.load += sum(parameter.numel() for parameter in module.parameters(recurse=False)) / _positions(module, output)
        self.layers_done[name] = self.layers
        self.is_autocast[name] = isinstance(output, Tensor) and torch.is_autocast_enabled(output.device.type)


def _positions(layer: nn.Module, output: Any) -> int:
    """How often a layer's weights are used for one sample."""
    if not isinstance(output, Tensor) or output.ndim < 2:
        return 1
    return max(output.numel() // max(len(output), 1) // (_width(layer) or output.shape[-1] or 1), 1)


def _run(model: nn.Module, example_input: Any, *, batch: int = 0, nudge: Nudge | None = None) -> _Log:
    """With a size of the batch, FLOPs are counted and arguments are looked at. What flows at `nudge` is moved."""
    log, counter, axes, handles = _Log(batch=batch), flop_counter(), FeatureAxes(), []

    def enter(name: str) -> Any:
        def enter_it(module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            log.origins[name] = axes.origins_of(arguments[0]) if arguments else []
            log.enter(name, module, arguments, named)

        return enter_it

    def leave(name: str) -> Any:
        def leave_it(module: nn.Module, arguments: Any, output: Any) -> Any:
            if nudge is not None and nudge[0] == name:
                output = output.clone()
                part = output.select(nudge[1], nudge[2])
                part.copy_(1 - part)
            if batch and isinstance(output, Tensor):
                log.feature_axes[name], log.numbers[name] = axes.axis_of(output, module), axes.number_of(output)
            log.leave(name, module, output, counter.get_total_flops() if batch else 0)
            return output

        return leave_it

    # By the modules themselves: a fused kernel calls none of them, and passes tensors on that have no shape.
    with isolated(model), torch.no_grad(), _fused_attention(enabled=False):
        model.eval()
        try:
            kept = _kept_seeds(model)
            for name, module in model.named_modules():
                if name and name not in kept and not isinstance(module, torch.jit.ScriptModule):
                    handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
                    handles.append(module.register_forward_hook(leave(name)))
            with counter if batch else nullcontext(), axes if batch else nullcontext():
                log.output = call(model, example_input)
        except Exception as error:
            raise GrowthError(
                f"the model cannot run the example input ({_describe(example_input)}): {type(error).__name__}: {error}; "
                "pass a batch as the model gets it in training: a tensor, a tuple of arguments or a dict of keyword arguments"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
    log.total_flops, log.uses = counter.get_total_flops(), axes.uses
    return log


@contextmanager
def _fused_attention(*, enabled: bool) -> Iterator[None]:
    """Whether torch's own layers of transformers are computed by one kernel each where that is possible."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _passed_by(model: nn.Module, example_input: Any, names: Collection[str], *, hooked: Collection[str] = ()) -> set[str]:
    """Those of the submodules that do not run in evaluation, where a module around them computes them by a kernel of its own.

    Such modules mostly refrain from it where a submodule has a hook; `hooked` have one.
    """
    ran = set[str]()

    def watched(name: str, forward: Forward) -> Forward:
        def run(*arguments: Any, **named: Any) -> Any:
            ran.add(name)
            return forward(*arguments, **named)

        return run

    with ExitStack() as stack:
        stack.enter_context(isolated(model))
        stack.enter_context(torch.no_grad())
        model.eval()
        for name in names:
            module = model.get_submodule(name)
            stack.enter_context(forward_replaced(module, watched(name, own_forward(module))))
            if name in hooked:
                stack.callback(module.register_forward_pre_hook(keep_running).remove)
        call(model, example_input)
    return set(names) - ran


def _tensors_of(model: nn.Module, changed_example: Any, nudge: Nudge | None = None) -> Outputs | None:
    """None where the host cannot run an example in which something was changed, which may make no sense any more."""
    try:
        return _run(model, changed_example, nudge=nudge).tensors()
    except GrowthError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        return None


def _kept_seeds(model: nn.Module) -> set[str]:
    """Names of what grew in the host earlier, with all its parts: it tells nothing about the layers of the host."""
    seeds = {name: module for name, module in model.named_modules() if isinstance(module, Seed)}
    return {part for name, seed in seeds.items() for part, _ in seed.named_modules(prefix=name)}


def _classify(model: nn.Module, name: str, log: _Log, batch_axis: int | str) -> Place | Refusal:
    module, outputs = model.get_submodule(name), log.outputs.get(name, [])
    reason = _reason_against(module, name, outputs)
    if reason is not None:
        return Refusal(name, reason)
    (output,) = outputs
    if isinstance(batch_axis, str):
        return Refusal(name, batch_axis)
    kind = _kind_of(output, batch_axis, log.feature_axes[name])
    if kind is None:
        found = f"the batch is dimension {batch_axis}, the features are {log.feature_axes[name] or 'not certain'}"
        return Refusal(name, f"gives {_shape(output)} ({found}), and seeds fit {_FITTING}; choose a layer inside it or after it")
    return Place(
        name=name,
        kind=kind,
        shape=tuple(size for axis, size in enumerate(output.shape) if axis != batch_axis),
        dtype=weights_of(model, module).dtype if log.is_autocast[name] else output.dtype,
        device=output.device,
        batch_axis=batch_axis,
        depth=log.flops[name] / max(log.total_flops, 1),
        flops_behind=(log.total_flops - log.flops[name]) // log.batch,
    )


def _reason_against(module: nn.Module, name: str, outputs: list[Any]) -> str | None:
    if "parametrizations" in name.split("."):
        return "makes a weight, not an output"
    if not outputs:
        return "is compiled by TorchScript" if isinstance(module, torch.jit.ScriptModule) else "does not run as a module of its own"
    if len(outputs) > 1:
        return f"runs {len(outputs)} times in a forward pass, and a seed would act each time"
    (output,) = outputs
    if not isinstance(output, Tensor):
        return f"gives a {type(output).__name__}, not one tensor"
    if not output.is_floating_point():
        return f"gives {output.dtype}, not floating-point numbers"
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return "would run a seed in it as one of its own parts; choose a part of it"
    if output.ndim not in (2, 3, 4):
        return f"gives {_shape(output)}, and seeds fit {_FITTING}"
    return None


def _kind_of(output: Tensor, batch_axis: int, feature_axis: int | None) -> Kind | None:
    if output.ndim == 2 and batch_axis == 0:
        return "dense"
    if feature_axis == output.ndim - 1 and (batch_axis == 0 or (batch_axis == 1 and output.ndim == 3)):
        return "token"
    return "conv" if (batch_axis, feature_axis) == (0, 1) else None


def _width(layer: nn.Module | None) -> int | None:
    """Channels or features of what a layer gives."""
    shape = getattr(layer, "normalized_shape", None)
    return int(shape[-1]) if shape else next((int(getattr(layer, name)) for name in _WIDTHS if hasattr(layer, name)), None)


def _is_in_encoder_layer(model: nn.Module, name: str) -> bool:
    """Torch computes such a layer by one kernel in evaluation, although not under autocast, say, in which this may run."""
    parts = name.split(".")
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts)))
    return any(isinstance(module, nn.TransformerEncoderLayer) for module in around)


def weights_of(model: nn.Module, module: nn.Module) -> Weights:
    """Those of a submodule, or of the model where it has none. Under autocast, outputs have another precision than the weights."""
    weights = (parameter for part in (module, model) for parameter in part.parameters() if parameter.is_floating_point())
    first = next(weights, None)
    return Weights(torch.float32, torch.device("cpu")) if first is None else Weights(first.dtype, first.device)


# Masks and caches: a seed that looks at other positions would see what a mask hides, and miss what only a cache knows


_MASKS = {"mask", "masks", "padding", "pad", "pads", "length", "lengths", "lens", "seqlen", "seqlens"}  # words in names of arguments
_CACHES = {"past", "cache", "caches", "kv", "incremental", "mems"}
_CACHE_NAMES = {"start_pos", "input_pos", "inference_params"}
_STATES = {"state", "states", "hidden", "hiddens", "hx"}  # of the host alone: layers have them wherever they are
_NO_CACHES = {"cos", "sin", "rope", "rotary", "freq", "freqs"}  # of positions, not of what was seen there


def _alone(places: Mapping[str, Place], mask: str, cache: str) -> dict[str, Place]:
    """Tells places of sequences why seeds there must treat every position alone."""
    because_of_mask = f"the host takes {mask}, and it would see what that hides" if mask else ""
    because_of_cache = f"the host takes {cache}, and it would not see what only that holds" if cache else ""
    return {
        name: replace(place, alone=(because_of_cache if place.is_causal else "") or because_of_mask)
        if place.kind == "token" or place.spatial == 1
        else place
        for name, place in places.items()
    }


def _mask_of(model: nn.Module, log: _Log) -> str:
    """What hides positions of some samples, by its name; empty where nothing is named so."""
    own = [name for name, default in _arguments_of(model) if not isinstance(default, int | float | str) and _words(name) & _MASKS]
    if own or log.masks:
        return repr((own or log.masks)[0])
    padded = [name for name, module in model.named_modules() if getattr(module, "padding_idx", None) is not None]
    return f"padding (padding_idx of {padded[0]!r})" if padded else ""


def _cache_of(model: nn.Module) -> str:
    """What knows of positions that were computed earlier; empty where nothing seems to."""
    for path, module in model.named_modules():
        of_path = f" of {path!r}" if path else ""
        for name, default in _arguments_of(module):
            is_state = not path and default is None and bool(_words(name) & _STATES) and "encoder" not in _words(name)
            if _words(name) & _CACHES or name in _CACHE_NAMES or is_state:
                return f"{name!r}{of_path}"
        for name in (*vars(module), *module._buffers, *set(dir(type(module))) - set(dir(nn.Module))):
            if _words(name) & _CACHES and not _words(name) & _NO_CACHES:
                return f"a cache ({name!r}{of_path})"
    return ""


def _arguments_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Names and defaults."""
    try:
        parameters = inspect.signature(own_forward(module)).parameters.values()
    except (TypeError, ValueError):  # it is not written in Python
        return []
    return [
        (parameter.name, parameter.default)
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


def _named(module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a call with their names."""
    yield from zip((name for name, _ in _arguments_of(module)), arguments, strict=False)
    yield from named.items()


def _hides(name: str, value: Any, batch: int) -> bool:
    """Whether an argument of a submodule hides positions of some samples, as padding is hidden, and not of all, as the future is."""
    if not batch or not isinstance(value, Tensor) or not value.ndim or len(value) % batch:
        return False
    if _words(name) & _MASKS or (value.dtype == torch.bool and value.ndim > 1):
        return not _is_of_the_future(value)
    return False


def _is_of_the_future(mask: Tensor) -> bool:
    """[..., T, T] with one number above the diagonal and another one on it and below."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    ahead = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    above, below = mask[..., ahead].flatten(), mask[..., ~ahead].flatten()
    return len(above) > 0 and bool((above == above[0]).all() and (below == below[0]).all() and above[0] != below[0])


def _behind(model: nn.Module, places: Mapping[str, Place], log: _Log) -> dict[str, str]:
    """Which places are all that uses another one's output, be it through an activation, and have no weights."""
    found = {}
    for name in places:
        for origin in () if next(model.get_submodule(name).parameters(), None) is not None else log.origins[name]:
            if log.uses[origin] != 1:
                break
            owners = [other for other in places if log.numbers[other] == origin and other != name]
            found.update(dict.fromkeys(owners, name))
            if owners:
                break
    return found


def _numbers(log: _Log, places: Mapping[str, Place]) -> dict[str, int]:
    numbers = {id(tensor): 0 for tensor in tensors_in(log.output)}
    return {name: numbers.setdefault(id(log.outputs[name][0]), len(numbers) + 1) for name in places}


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _describe(value: Any) -> str:
    shapes = ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(value))
    return shapes or f"a {type(value).__name__} without a tensor"
