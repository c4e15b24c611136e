"""A survey of a host: one forward pass that finds out where seeds could grow, in which order its parts run, and what it costs.

Shapes: B = batch, C = channels, H, W, L = positions in space, T = positions in a sequence, D = features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.growth.errors import GrowthError
from esper.growth.isolation import isolated
from esper.growth.place import Call, Kind, Place, Refusal
from esper.growth.state import Cost

_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_FEATURES_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)


@dataclass(frozen=True, slots=True)
class Survey:
    places: dict[str, Place]  # in the order in which they run
    refusals: tuple[Refusal, ...]
    calls: tuple[Call, ...]
    host: Cost
    same_output: dict[str, int]  # places whose outputs are one tensor have the same number; the host's own output has number 0


def survey(model: nn.Module, example_input: Any) -> Survey:
    """Runs the model once on the example, in eval mode and without a trace."""
    batch = batch_size_of(example_input)
    log = _run(model, example_input)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    names = [name for name, _ in model.named_modules() if name]
    places, refusals = dict[str, Place](), []
    numbers = {id(log.output): 0}
    same_output = dict[str, int]()
    for name in sorted(names, key=lambda name: log.last_end(name)):
        found = _classify(model, name, log, batch)
        if isinstance(found, Refusal):
            refusals.append(found)
        else:
            places[name] = found
            same_output[name] = numbers.setdefault(id(log.outputs[name][0]), len(numbers))
    places = _with_causality(model, example_input, places, log)
    return Survey(places, tuple(refusals), tuple(log.calls), Cost(parameters, log.total_flops // batch), same_output)


def call(model: Any, example_input: Any) -> Any:
    """A tensor is the one argument, a tuple or list the arguments, a mapping the keyword arguments."""
    if isinstance(example_input, Mapping):
        return model(**example_input)
    if isinstance(example_input, tuple | list):
        return model(*example_input)
    return model(example_input)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def batch_size_of(batch: Any) -> int:
    """The leading size of the first tensor in it."""
    for tensor in tensors_in(batch):
        if tensor.ndim > 0 and len(tensor) > 0:
            return len(tensor)
    raise GrowthError(
        f"there is no batch in the example input: {_describe(batch)}; pass a batch as the model gets it in training, such as x[:2]"
    )


@dataclass
class _Log:
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    flops: dict[str, int] = field(default_factory=dict)  # of the forward pass until the submodule was done
    starts: dict[str, list[int]] = field(default_factory=dict)
    leaves: list[str] = field(default_factory=list)  # submodules with parameters and without children, as they ran
    leaf_before: dict[str, str] = field(default_factory=dict)  # the last of them when a submodule was done
    ticks: int = 0
    output: Any = None
    total_flops: int = 0

    def last_end(self, name: str) -> tuple[int, str]:
        ends = [call.end for call in self.calls if call.name == name]
        return (max(ends) if ends else self.ticks + 1, name)


def _run(model: nn.Module, example_input: Any) -> _Log:
    log = _Log()
    counter = FlopCounterMode(display=False)
    handles = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any) -> None:
            log.starts.setdefault(name, []).append(log.ticks)
            log.ticks += 1

        return hook

    def leave(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            log.calls.append(Call(name, log.starts[name].pop(), log.ticks))
            log.ticks += 1
            log.outputs.setdefault(name, []).append(output)
            log.flops[name] = counter.get_total_flops()
            if not list(module.children()) and list(module.parameters(recurse=False)):
                log.leaves.append(name)
            log.leaf_before[name] = log.leaves[-1] if log.leaves else ""

        return hook

    with isolated(model), torch.no_grad():
        model.eval()
        try:
            for name, module in model.named_modules():
                if name and not isinstance(module, torch.jit.ScriptModule):
                    handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave(name))]
            with counter:
                log.output = call(model, example_input)
        except Exception as error:
            raise GrowthError(
                f"the model cannot run the example input ({_describe(example_input)}): {type(error).__name__}: {error}; "
                "pass a batch as the model gets it in training: a tensor, a tuple of arguments or a dict of keyword arguments"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
    log.total_flops = counter.get_total_flops()
    return log


def _classify(model: nn.Module, name: str, log: _Log, batch: int) -> Place | Refusal:
    module = model.get_submodule(name)
    outputs = log.outputs.get(name, [])
    if not outputs:
        is_script = isinstance(module, torch.jit.ScriptModule)
        return Refusal(name, "is compiled by TorchScript" if is_script else "does not run in the forward pass, or not as a module")
    if len(outputs) > 1:
        return Refusal(name, f"runs {len(outputs)} times in a forward pass, and a seed would act each time")
    (output,) = outputs
    if not isinstance(output, Tensor):
        return Refusal(name, f"gives a {type(output).__name__}, not one tensor")
    if not output.is_floating_point():
        return Refusal(name, f"gives {output.dtype}, not floating-point numbers")
    if output.ndim not in (2, 3, 4):
        return Refusal(name, f"gives {_shape(output)}, and seeds fit [B, C, H, W], [B, C, L], [B, T, D] and [B, D]")
    if len(output) != batch:
        return Refusal(name, f"gives {_shape(output)}, whose first dimension is not the batch of {batch}")
    kind = _kind_of(model, log.leaf_before[name], output)
    if kind is None:
        return Refusal(name, f"gives {_shape(output)} with the features last, and seeds with positions in a plane expect [B, C, H, W]")
    total = max(log.total_flops, 1)
    own = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    return Place(
        name=name,
        kind=kind,
        shape=tuple(output.shape[1:]),
        dtype=output.dtype if own is None else own.dtype,
        device=output.device,
        depth=log.flops[name] / total,
        flops_behind=(log.total_flops - log.flops[name]) // batch,
    )


def _kind_of(model: nn.Module, leaf: str, output: Tensor) -> Kind | None:
    """Channels come first after convolutions, features last after linear layers; the last layer with weights tells which it was."""
    if output.ndim == 2:
        return "dense"
    layer = model.get_submodule(leaf) if leaf else None
    if output.ndim == 4:
        return None if isinstance(layer, _FEATURES_LAST) and output.shape[1] != output.shape[-1] else "conv"
    return "conv" if isinstance(layer, _CHANNELS_FIRST) and output.shape[1] == _channels(layer) else "token"


def _channels(layer: nn.Module) -> int:
    found = [getattr(layer, name) for name in ("out_channels", "num_features", "num_channels") if hasattr(layer, name)]
    return int(found[0])


def _with_causality(model: nn.Module, example_input: Any, places: dict[str, Place], log: _Log) -> dict[str, Place]:
    """Changes the last position of the input: where no earlier position of an output changes, the host is causal."""
    first = next(tensors_in(example_input))
    suspects = [
        name for name, place in places.items() if place.kind == "token" and first.ndim >= 2 and place.shape[0] == first.shape[1] > 1
    ]
    if not suspects:
        return places
    changed = first.clone()
    changed[:, -1] = _something_else(first)
    again = _run(model, _with_first(example_input, changed))
    result = dict(places)
    for name in suspects:
        before, after = log.outputs[name][0], again.outputs[name][0]
        is_causal = torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before, after)
        result[name] = replace(places[name], is_causal=is_causal)
    return result


def _something_else(sequence: Tensor) -> Tensor:
    """A last position that differs from the present one, and that the model can take: a token it knows."""
    first, last = sequence[:, 0], sequence[:, -1]
    return first if not torch.equal(first, last) else (last == 0).to(sequence.dtype)


def _with_first(example_input: Any, tensor: Tensor) -> Any:
    """The example with its first tensor replaced."""
    if isinstance(example_input, Tensor):
        return tensor
    if isinstance(example_input, Mapping):
        key = next(key for key, value in example_input.items() if next(tensors_in(value), None) is not None)
        return {**example_input, key: _with_first(example_input[key], tensor)}
    index = next(index for index, value in enumerate(example_input) if next(tensors_in(value), None) is not None)
    items = list(example_input)
    items[index] = _with_first(items[index], tensor)
    return items


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _describe(value: Any) -> str:
    shapes = ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(value))
    return shapes or f"a {type(value).__name__} without a tensor"
