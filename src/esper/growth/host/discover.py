"""Discovery of a host: find by forward passes on an example where seeds could grow, in which order submodules run, and what they cost.

A submodule is a place for a seed if it runs once per forward pass and gives one floating-point tensor whose batch and feature dimensions
are known. All other submodules are refused, with a reason. Further passes with a changed example find out which places are causal.

Shapes: B = batch, C = channels, H, W, L = positions in space, T = positions in a sequence, D = features.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from esper.growth.config import GrowthError
from esper.growth.host.causality import Nudge, Outputs, batch_axes, causal_places, doubled, hides, without_samples
from esper.growth.host.isolation import isolated
from esper.growth.host.layout import Call, FeatureAxes, Kind, Place, Refusal
from esper.growth.host.slots import Forward, forward_replaced, keep_running, own_forward, tensors_in
from esper.growth.lifecycle.stages import Cost
from esper.growth.seeds.blueprints import flop_counter
from esper.growth.seeds.seed import Seed

_FITTING = "[B, C, H, W], [B, C, L], [B, T, D], [T, B, D], [B, H, W, D] and [B, D]"
_WIDTHS = ("out_channels", "num_features", "num_channels", "out_features", "embedding_dim")  # attributes for the width of a layer's output


@dataclass(frozen=True, slots=True)
class Discovery:
    """The result of `discover`: all places and refusals of a host, and its cost."""

    places: dict[str, Place]  # in the order in which they run
    refusals: tuple[Refusal, ...]
    calls: tuple[Call, ...]
    host: Cost
    same_output: dict[str, int]  # places whose outputs are the same tensor have the same number; 0 is the output of the host itself
    behind: dict[str, str]  # place -> the place without weights (a pool, say) that is the only user of its output
    last: frozenset[str]  # places with nothing behind them that could use a seed's output
    load: float  # sum over layers that see samples of (trained weights / positions that share them): how much each sample must teach


class Weights(NamedTuple):
    """Data type and device for the weights of a seed."""

    dtype: torch.dtype
    device: torch.device


SAY_EVERY = 5.0  # seconds


class Announcer:
    """Say on stderr every few seconds what `add_slots` is doing. Models whose passes take no seconds are done before."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._passes = 0

    def __call__(self, doing: str) -> None:
        """Say that another pass of the model begins, and what it is for."""
        now = time.monotonic()
        if self._passes == 1:
            self._last = now  # the first pass may import parts of torch
        elif now - self._last >= SAY_EVERY and sys.stderr is not None:
            self._last = now
            text = f"esper: looking where the model can grow; {self._passes} passes over the example in {now - self._begun:.0f} s; {doing}"
            print(text, file=sys.stderr, flush=True)
        self._passes += 1


def discover(model: nn.Module, example_input: Any, say: Callable[[str], None] = lambda doing: None) -> Discovery:
    """Run the model on the example in eval mode, with no side effects, and return what was found. `say` is called before passes."""
    batch = batch_size_of(example_input)
    _check_weights(model)
    say("counting FLOPs")
    log = _run(model, example_input, batch=batch)

    def run(changed_example: Any, nudge: Nudge | None = None) -> Outputs | None:
        say("changing the example, to see which outputs that reaches")
        return _tensors_of(model, changed_example, nudge)

    before = run(example_input) or {}
    twice = run(doubled(example_input, batch))
    batches = batch_axes(example_input, before, twice, batch, run)
    # Sort every submodule, in the order in which they finish, into places and refusals.
    places, refusals, kept = dict[str, Place](), list[Refusal](), _kept_seeds(model)
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
    # Mark the places where a seed must not look ahead, or must treat every position alone.
    causal = causal_places(places, example_input, before, run)
    places = {name: replace(place, is_causal=name in causal) for name, place in places.items()}
    mask = _mask_of(model, log) or ("padding" if hides(places, example_input, run) else "")
    places = _alone(places, mask, _cache_of(model))
    # Mark the places that a fused kernel skips in evaluation, and refuse those that it skips even if they have a hook.
    fused = _skipped_in_eval(model, example_input, places) | {name for name in places if _is_in_encoder_layer(model, name)}
    lost = _skipped_in_eval(model, example_input, places, hooked=fused) if fused else set[str]()
    refusals += [Refusal(name, "does not run in evaluation, where a module around it computes it in another way") for name in lost]
    places = {name: replace(place, is_fused=name in fused) for name, place in places.items() if name not in lost}
    # Add up the costs.
    parameters = sum(parameter.numel() for parameter in model.parameters())
    last = {name for name, place in places.items() if place.flops_behind == 0 and log.layers_done[name] == log.layers}
    host = Cost(parameters, log.total_flops // batch)
    blind = without_samples(before, twice)
    load = sum(part for name, part in log.loads.items() if name not in blind)
    refusals.sort(key=lambda refusal: log.last_end(refusal.name))
    return Discovery(
        places, tuple(refusals), tuple(log.calls), host, _same_outputs(log, places), _behind(model, places, log), frozenset(last), load
    )


def call(model: Any, example_input: Any) -> Any:
    """Call the model: a tensor is the only argument, a tuple or list holds the arguments, a mapping the keyword arguments."""
    if isinstance(example_input, Mapping):
        return model(**example_input)
    if isinstance(example_input, tuple | list):
        return model(*example_input)
    return model(example_input)


def batch_size_of(batch: Any) -> int:
    """Return the leading size of the first tensor that is not empty. Raise a GrowthError if there is none."""
    for tensor in tensors_in(batch):
        if tensor.ndim > 0 and len(tensor) > 0:
            return len(tensor)
    raise GrowthError(f"the example input holds no batch: {_describe(batch)}; pass a batch as the model gets it in training, such as x[:2]")


def _check_weights(model: nn.Module) -> None:
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise GrowthError(f"the weight {lazy!r} of a lazy layer has no size yet; run the model once on a batch, then add slots")


@dataclass
class _Log:
    """Record of one forward pass. The keys of its dicts are names of submodules; `ticks` counts their starts and ends."""

    outputs: dict[str, list[Any]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    starts: dict[str, list[int]] = field(default_factory=dict)  # ticks of the calls that have not ended
    flops: dict[str, int] = field(default_factory=dict)  # of the forward pass until the submodule ended
    feature_axes: dict[str, int | None] = field(default_factory=dict)
    layers_done: dict[str, int] = field(default_factory=dict)  # value of `layers` when the submodule ended
    is_autocast: dict[str, bool] = field(default_factory=dict)
    layers: int = 0  # number of layers with weights that have run so far
    loads: dict[str, float] = field(default_factory=dict)  # part of a layer in the load of the host, see Discovery
    ticks: int = 0
    output: Any = None  # of the whole model
    total_flops: int = 0
    batch: int = 0
    uses: Counter[int] = field(default_factory=Counter)  # number of a tensor (see FeatureAxes) -> operations that use it
    numbers: dict[str, int | None] = field(default_factory=dict)  # number of the output tensor
    origins: dict[str, list[int]] = field(default_factory=dict)  # numbers of the input tensor and of the tensors it was made from
    masks: list[str] = field(default_factory=list)  # arguments that hide positions of some samples

    def last_end(self, name: str) -> tuple[int, str]:
        """Return a sort key: the tick at which the submodule's last call ended, then its name."""
        ends = [call.end for call in self.calls if call.name == name]
        return (max(ends) if ends else self.ticks + 1, name)

    def tensors(self) -> Outputs:
        """Return the output of every submodule that ran once and gave one tensor."""
        return {name: outputs[0] for name, outputs in self.outputs.items() if len(outputs) == 1 and isinstance(outputs[0], Tensor)}

    def enter(self, name: str, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Record that a submodule starts."""
        if self.batch:
            self.masks += [
                f"{argument} of {name}" for argument, value in _named(module, arguments, named) if _hides(argument, value, self.batch)
            ]
        self.starts.setdefault(name, []).append(self.ticks)
        self.ticks += 1

    def leave(self, name: str, module: nn.Module, output: Any, flops: int) -> None:
        """Record that a submodule ends; `flops` are those of the forward pass so far."""
        self.calls.append(Call(name, self.starts[name].pop(), self.ticks))
        self.ticks += 1
        self.outputs.setdefault(name, []).append(output)
        self.flops[name] = flops
        if not list(module.children()) and list(module.parameters(recurse=False)):
            self.layers += 1
            trained = sum(parameter.numel() for parameter in module.parameters(recurse=False) if parameter.requires_grad)
            self.loads[name] = self.loads.get(name, 0.0) + trained / _positions(module, output)
        self.layers_done[name] = self.layers
        self.is_autocast[name] = isinstance(output, Tensor) and torch.is_autocast_enabled(output.device.type)


def _positions(layer: nn.Module, output: Any) -> int:
    """Return how often a layer's weights are used for one sample: the number of positions in its output."""
    if not isinstance(output, Tensor) or output.ndim < 2:
        return 1
    return max(output.numel() // max(len(output), 1) // (_width(layer) or output.shape[-1] or 1), 1)


def _run(model: nn.Module, example_input: Any, *, batch: int = 0, nudge: Nudge | None = None) -> _Log:
    """Run the model on the example, with hooks on all submodules, and return the record.

    FLOPs, feature axes and masks are recorded only if `batch`, the batch size, is given. `nudge` is (submodule, axis, index): that
    part x of the submodule's output is replaced by 1 - x.
    """
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

    # Switch fused kernels off: they call no submodules, and pass on nested tensors without a regular shape.
    with isolated(model), torch.no_grad(), fused_attention(enabled=False):
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
def fused_attention(*, enabled: bool) -> Iterator[None]:
    """Allow or forbid torch to compute its transformer layers by one kernel each."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _skipped_in_eval(model: nn.Module, example_input: Any, names: Collection[str], *, hooked: Collection[str] = ()) -> set[str]:
    """Return the submodules that do not run in eval mode, because a module around them computes them by its own fused kernel.

    Most such modules do not use their kernel if a submodule has a hook; the submodules in `hooked` get one.
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
    """Return the output tensors of all submodules, or None if the model cannot run the changed example, which may be invalid."""
    try:
        return _run(model, changed_example, nudge=nudge).tensors()
    except GrowthError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        return None


def _kept_seeds(model: nn.Module) -> set[str]:
    """Return the names of all modules inside seeds that were baked into the model earlier; they are no layers of the host."""
    seeds = {name: module for name, module in model.named_modules() if isinstance(module, Seed)}
    return {part for name, seed in seeds.items() for part, _ in seed.named_modules(prefix=name)}


def _classify(model: nn.Module, name: str, log: _Log, batch_axis: int | str) -> Place | Refusal:
    """Return the place after a submodule, or the reason why there is none. `batch_axis` is a text if it is unknown, and says why."""
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
    """Return why no seed can grow after a submodule with these outputs, one per call; None if nothing speaks against it."""
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
        return "would run a seed as one of its own parts; choose a part of it"
    if output.ndim not in (2, 3, 4):
        return f"gives {_shape(output)}, and seeds fit {_FITTING}"
    return None


def _kind_of(output: Tensor, batch_axis: int, feature_axis: int | None) -> Kind | None:
    """Return the kind of place by the positions of the batch and feature dimensions; None if seeds do not fit."""
    if output.ndim == 2 and batch_axis == 0:
        return "dense"
    if feature_axis == output.ndim - 1 and (batch_axis == 0 or (batch_axis == 1 and output.ndim == 3)):
        return "token"
    return "conv" if (batch_axis, feature_axis) == (0, 1) else None


def _width(layer: nn.Module | None) -> int | None:
    """Return the number of channels or features of a layer's output, by its attributes; None if unknown."""
    shape = getattr(layer, "normalized_shape", None)
    return int(shape[-1]) if shape else next((int(getattr(layer, name)) for name in _WIDTHS if hasattr(layer, name)), None)


def _is_in_encoder_layer(model: nn.Module, name: str) -> bool:
    """Return whether a submodule is in a TransformerEncoderLayer, which torch may compute by one kernel in eval mode.

    A trial run does not always show it: torch does not use that kernel under autocast, for example.
    """
    parts = name.split(".")
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts)))
    return any(isinstance(module, nn.TransformerEncoderLayer) for module in around)


def weights_of(model: nn.Module, module: nn.Module) -> Weights:
    """Return dtype and device of a submodule's weights, or of the model's if it has none. Under autocast its output has another dtype."""
    weights = (parameter for part in (module, model) for parameter in part.parameters() if parameter.is_floating_point())
    first = next(weights, None)
    return Weights(torch.float32, torch.device("cpu")) if first is None else Weights(first.dtype, first.device)


# Masks and caches. A seed that looks at other positions would see positions that a mask hides, and would miss those that are only in a
# cache. Both are recognised by words in the names of arguments, attributes and buffers.

_MASKS = {"mask", "masks", "padding", "pad", "pads", "length", "lengths", "lens", "seqlen", "seqlens"}
_CACHES = {"past", "cache", "caches", "kv", "incremental", "mems"}
_CACHE_NAMES = {"start_pos", "input_pos", "inference_params"}  # whole names
_STATES = {"state", "states", "hidden", "hiddens", "hx"}  # only in arguments of the host: layers have such arguments anyway
_NO_CACHES = {"cos", "sin", "rope", "rotary", "freq", "freqs"}  # caches of position encodings, which hold no activations


def _alone(places: Mapping[str, Place], mask: str, cache: str) -> dict[str, Place]:
    """Return the places with `alone` set for sequences: the reason why a seed there must treat every position alone."""
    because_of_mask = f"the host takes {mask}, and a seed would see positions that it hides" if mask else ""
    because_of_cache = f"the host takes {cache}, and a seed would miss positions that only it holds" if cache else ""
    return {
        name: replace(place, alone=(because_of_cache if place.is_causal else "") or because_of_mask)
        if place.kind == "token" or place.spatial == 1
        else place
        for name, place in places.items()
    }


def _mask_of(model: nn.Module, log: _Log) -> str:
    """Return the name of something that hides positions of some samples; "" if there is nothing."""
    own = [name for name, default in _arguments_of(model) if not isinstance(default, int | float | str) and _words(name) & _MASKS]
    if own or log.masks:
        return repr((own or log.masks)[0])
    padded = [name for name, module in model.named_modules() if getattr(module, "padding_idx", None) is not None]
    return f"padding (padding_idx of {padded[0]!r})" if padded else ""


def _cache_of(model: nn.Module) -> str:
    """Return the name of an argument, attribute or buffer that holds positions computed earlier; "" if there seems to be none."""
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
    """Return names and defaults of the arguments of the module's forward method."""
    try:
        parameters = inspect.signature(own_forward(module)).parameters.values()
    except (TypeError, ValueError):  # the method is not written in Python
        return []
    return [
        (parameter.name, parameter.default)
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


def _named(module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every argument of a call."""
    yield from zip((name for name, _ in _arguments_of(module)), arguments, strict=False)
    yield from named.items()


def _hides(name: str, value: Any, batch: int) -> bool:
    """Return whether an argument is a mask per sample, such as a padding mask; a causal mask is the same for all samples."""
    if not batch or not isinstance(value, Tensor) or not value.ndim or len(value) % batch:
        return False
    if _words(name) & _MASKS or (value.dtype == torch.bool and value.ndim > 1):
        return not _is_causal_mask(value)
    return False


def _is_causal_mask(mask: Tensor) -> bool:
    """Return whether a mask is [..., T, T] with one value above the diagonal and another value everywhere else."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    ahead = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    above, below = mask[..., ahead].flatten(), mask[..., ~ahead].flatten()
    return len(above) > 0 and bool((above == above[0]).all() and (below == below[0]).all() and above[0] != below[0])


def _behind(model: nn.Module, places: Mapping[str, Place], log: _Log) -> dict[str, str]:
    """Return place -> the place without weights that is the only user of its output, directly or after activations."""
    found = {}
    for name in places:
        if next(model.get_submodule(name).parameters(), None) is not None:
            continue
        # Go back from the input of `name`, through activations, as long as nothing else uses the tensors.
        for origin in log.origins[name]:
            if log.uses[origin] != 1:
                break
            owners = [other for other in places if log.numbers[other] == origin and other != name]
            found.update(dict.fromkeys(owners, name))
            if owners:
                break
    return found


def _same_outputs(log: _Log, places: Mapping[str, Place]) -> dict[str, int]:
    """Number the output tensors of the places, so that places with the same tensor have the same number; see `Discovery.same_output`."""
    numbers = {id(tensor): 0 for tensor in tensors_in(log.output)}
    return {name: numbers.setdefault(id(log.outputs[name][0]), len(numbers) + 1) for name in places}


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _describe(value: Any) -> str:
    shapes = ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(value))
    return shapes or f"a {type(value).__name__} without a tensor"
