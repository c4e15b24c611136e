"""Find the units of a host that can be widened, by trial runs on the example.

A trial adds random units to the output of a layer and runs the host. The tensors behind it are wider, until a layer reads them: that layer
gets only its own part. If the host runs and its outputs are what they were, the new units reach nothing but those layers, and the units can
be widened. Otherwise the trial shows why not: the host adds the units to another tensor, say, or takes a softmax over them. So units are
found by data flow, whatever the modules are called and whatever the host computes between them.

Attention. If the host reshapes the outputs of some layers in a row to heads of a fixed size, `view(B, T, -1, size)`, then a unit is a whole
head: the features of all these layers that belong to it, with the queries of all heads that share its keys and values. If the host fixes
the number of heads instead, more features would make every head larger, and the trial fails.

Scopes. One pass tries the layers of many blocks at once, each in a scope of its own: a submodule that has siblings of its class. If the
units stay in it, the output of the scope shows what the output of the host would. It is replaced by that of the pass without new units, so
no trial sees another one. A trial whose units leave the scope is repeated in the next larger one; the largest is the host itself.

Shapes: U = units, k = new units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper.growth.host.discover import call, fused_attention
from esper.growth.host.isolation import isolated, without_tf32
from esper.growth.host.layout import Reader, Refusal, Through, Units
from esper.growth.host.slots import Forward, forward_replaced, own_forward, tensors_in
from esper.growth.host.units import (
    BATCH_NORMS,
    LAYERS,
    WEIGHT_NORM,
    axis_of,
    cost_of_own,
    has_weight_norm,
    is_wider,
    layer_of,
    leaves_of,
    part_of,
    random_units,
    reason_against_layer,
    reason_against_uses,
    size_of,
    tensors_of,
    why_not_through,
)
from esper.growth.seeds.blueprints import flop_counter
from esper.torch_internals import DropoutBase


class _Impossible(Exception):
    """The trial has shown that units cannot be widened. The text completes the sentence "The units of the layer ..."."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """The only call of a submodule in the pass without new units."""

    inputs: list[Tensor]
    output: Any
    flops: int


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
    scopes: dict[str, _Scope]  # by name


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


def find_units(host: nn.Module, example_input: Any, say: Callable[[str], None] = lambda doing: None) -> tuple[list[Units], list[Refusal]]:
    """Return all units that can be widened, and for every other layer the reason why its units cannot be."""
    leaves = dict(leaves_of(host))
    plain = _run(host, leaves, example_input)
    outcomes: dict[str, Units | str] = {}  # layer -> its units, or why they cannot be widened
    # Queue the layers by their smallest scope, so that the layers of one scope are tried one after the other.
    queues: dict[str, list[str]] = {}
    layers = [name for name, module in leaves.items() if isinstance(module, LAYERS)]
    for name in layers:
        reason = reason_against_layer(leaves[name], "makes its units") or _reason_against_calls(name, leaves[name], host, plain)
        if reason:
            outcomes[name] = reason
        else:
            queues.setdefault(_scopes_of([name], plain)[0], []).append(name)
    running: dict[str, tuple[str, _Attempts, _Trial]] = {}  # scope of a queue -> the layer, its attempts, and the next trial
    while queues:
        for key, queue in list(queues.items()):
            made = {name for found in outcomes.values() if isinstance(found, Units) for name in found.producers}
            while key not in running and queue:
                if (name := queue.pop(0)) not in made:
                    attempts = _tried_with_partners(host, leaves, plain, name)
                    running[key] = name, attempts, next(attempts)
            if key not in running:
                del queues[key]
        # Run as many trials in one pass as have scopes of their own, and hand the results to those who wait for them.
        together: dict[str, _Trial] = {}
        for key, (_, _, trial) in running.items():
            if not any(_is_in(one.scope, trial.scope) or _is_in(trial.scope, one.scope) for one in together.values()):
                together[key] = trial
        if together:
            say(f"{len(outcomes)} of {len(layers)} layers are tried out, {len(together)} at once are next")
            _try(host, leaves, example_input, plain, list(together.values()))
        for key, trial in together.items():
            name, attempts, _ = running.pop(key)
            try:
                running[key] = name, attempts, attempts.send(trial)
            except StopIteration as end:
                outcomes[name] = end.value
            except _Impossible as error:
                outcomes[name] = str(error)  # the error itself would keep the frames of its traceback
    # A layer that makes units together with one before it has no units of its own.
    units: list[Units] = []
    refusals: list[Refusal] = []
    for name in layers:
        if (outcome := outcomes.get(name)) is not None and not any(name in found.producers for found in units):
            if isinstance(outcome, Units):
                units.append(outcome)
            else:
                refusals.append(Refusal(name, outcome))
    return units, refusals


def _scopes_of(names: Sequence[str], plain: _Run) -> list[str]:
    """Return the scopes that contain all these submodules, smallest first; the last is "", the host."""
    prefixes = [names[0].rsplit(".", count)[0] for count in range(1, names[0].count(".") + 1)]
    return [*(prefix for prefix in prefixes if prefix in plain.scopes and all(_is_in(name, prefix) for name in names)), ""]


def _is_in(name: str, scope: str) -> bool:
    return not scope or name == scope or name.startswith(f"{scope}.")


def _run(host: nn.Module, leaves: Mapping[str, nn.Module], example_input: Any) -> _Run:
    """Run the host as it is, and note the first argument of every leaf module, and inputs and output of every scope."""
    inputs: dict[str, list[tuple[int, torch.Size]]] = {}
    kept: list[Tensor] = []  # so that no two tensors have the same id
    calls: dict[str, list[_Scope | None]] = {}

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

    def noted_scope(name: str, forward: Forward) -> Forward:
        def run(*arguments: Any, **named: Any) -> Any:
            before = counter.get_total_flops()
            given = [tensor if isinstance(tensor, nn.Parameter) else tensor.clone() for tensor in tensors_in((arguments, named))]
            output = forward(*arguments, **named)
            known = [_Scope(given, _copied(output), counter.get_total_flops() - before)] if _can_copy(output) else [None]
            calls.setdefault(name, []).extend(known)
            return output

        return run

    scopes = {}
    for path, parent in host.named_modules():
        classes = [type(child) for child in parent.children()]
        for own, child in parent.named_children():
            if classes.count(type(child)) > 1 and not isinstance(child, torch.jit.ScriptModule) and list(child.children()):
                scopes[f"{path}.{own}".lstrip(".")] = child
    with _Watch() as watch, flop_counter() as counter:
        forwards = {name: noted_scope(name, own_forward(module)) for name, module in scopes.items() if name not in leaves}
        forwards |= {name: noted(name, own_forward(module)) for name, module in leaves.items()}
        outputs, shapes = _outputs(host, forwards, example_input)
    known = {name: some[0] for name, some in calls.items() if len(some) == 1 and some[0] is not None}
    return _Run(inputs, shapes, outputs, watch.uses, watch.blocks, watch.in_parts, counter.get_total_flops(), known)


def _can_copy(output: Any) -> bool:
    """Return whether an output holds nothing but tensors and constants, in tuples, lists and dicts."""
    if type(output) in (tuple, list, dict):
        return all(map(_can_copy, output.values() if isinstance(output, dict) else output))
    return output is None or isinstance(output, Tensor | int | float | str)


def _copied(output: Any) -> Any:
    """Return an output with copies of its tensors, because the host may write into them."""
    if isinstance(output, dict):
        return {key: _copied(item) for key, item in output.items()}
    if isinstance(output, tuple | list):
        return type(output)(map(_copied, output))
    return output.clone() if isinstance(output, Tensor) else output


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


@dataclass
class _Trial:
    """Random units that are added in a part of one pass, and what became of them."""

    scope: str  # the submodule from whose output the result is seen; "" is the host
    producers: Mapping[str, int]  # layers that make the units -> number of their features per unit
    step: int = 1  # number of new units
    readers: dict[str, int] = field(default_factory=dict)  # layer -> its new input features
    own: dict[str, int] = field(default_factory=dict)  # module -> multiple that new units must come in, so that its groups are whole
    through: dict[str, Through] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    flops: int = 0  # computed in the scope because of the new units
    result: Units | Exception | None = None


_Attempts = Generator["_Trial", "_Trial", Units]


def _attempt(plain: _Run, producers: Mapping[str, int]) -> _Attempts:
    """Yield trials of these producers, and get each back with its result. Return the units, or raise _Impossible with the reason."""
    step, scopes = 1, _scopes_of(list(producers), plain)
    while True:
        trial = yield _Trial(scopes[0], producers, step)
        if isinstance(trial.result, Units):
            return trial.result
        if isinstance(trial.result, _WrongStep):
            wanted = math.lcm(step, *trial.own.values())
            if wanted == step:
                raise _Impossible("cannot be widened in whole groups")
            step = wanted
        elif isinstance(trial.result, _Impossible):
            raise _Impossible(str(trial.result)) from trial.result.__cause__  # a new error, as its traceback holds the trial
        elif isinstance(trial.result, _Unseen):
            del scopes[0]
        else:  # the host may raise anything if a tensor is wider than it expects
            raise _Impossible("are combined with others that would not be more: a residual, a gate, heads") from trial.result


def _tried_with_partners(host: nn.Module, leaves: Mapping[str, nn.Module], plain: _Run, name: str) -> _Attempts:
    """Try a layer alone. If the host then combines tensors of different widths, try it with layers that read the same tensor.

    If the host splits the output of the layer into blocks, such as attention heads, try whole blocks too.
    """
    if heads := _heads_with(name, host, leaves, plain):
        try:
            return (yield from _attempt(plain, heads))
        except _Impossible:
            pass
    try:
        return (yield from _attempt(plain, {name: 1}))
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
                    return (yield from _attempt(plain, {key: 1 for key in leaves if key in (name, other)}))
                except _Impossible:
                    continue
        sizes = [size for size in plain.blocks.get(name, ()) if size < layer.weight.shape[0]]
        for size in sizes:
            try:
                return (yield from _attempt(plain, {name: size}))
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


class _Apart(TorchFunctionMode):
    """Marks the tensors that hold new units of a trial, and notices where those of one trial get into another, as by a shared cache."""

    def __init__(self) -> None:
        super().__init__()
        self.scope: str | None = None  # that is running
        self.has_mixed = False
        self.written: list[Tensor] = []  # tensors into which new units were written, which may be buffers

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        marks = [mark for tensor in tensors_in((arguments, named or {})) if (mark := getattr(tensor, _MARK, None)) is not None]
        self.has_mixed = self.has_mixed or any(mark != self.scope for mark in marks)
        result = function(*arguments, **(named or {}))
        if marks:
            # `cache[:, position] = key` writes into its first argument.
            if result is None:
                self.written += tensors_in(arguments[0])
            for tensor in tensors_in(result if result is not None else arguments[0]):
                setattr(tensor, _MARK, marks[0])
        return result


_MARK = "_esper_scope"  # attribute of a tensor: the scope of the trial


def _try(host: nn.Module, leaves: Mapping[str, nn.Module], example_input: Any, plain: _Run, trials: Sequence[_Trial]) -> None:
    """Run the host with new random units behind the producers of these trials, whose scopes are apart, and set their results."""
    counter = flop_counter()  # only for heads: attention multiplies them, while other units cost nothing between layers
    apart = _Apart()
    unseen: set[str] = {trial.scope for trial in trials}  # scopes whose output has shown nothing
    cut: list[str] = []  # scopes that have ended with an error
    trial_of = {name: trial for name in leaves for trial in trials if _is_in(name, trial.scope)}

    def widened(name: str, forward: Forward) -> Forward:
        module, trial = leaves[name], trial_of.get(name)

        def run(*arguments: Any, **named: Any) -> Any:
            given = next(tensors_in((arguments, named)), None)
            if trial is None:
                if given is not None and given.shape not in [shape for _, shape in plain.inputs.get(name, ())]:
                    apart.has_mixed = True
                return forward(*arguments, **named)
            trial.ran.append(name)
            calls = trial.ran.count(name) - 1
            known = plain.inputs.get(name, [])
            shape = known[calls][1] if calls < len(known) else None
            if given is None or shape is None or given.shape == shape or name in trial.producers:
                output = forward(*arguments, **named)
                if name not in trial.producers:
                    return output
                wide = torch.cat([output, random_units(output, axis_of(module), trial.step * trial.producers[name])], axis_of(module))
                setattr(wide, _MARK, trial.scope)
                return wide
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
                    raise _Impossible(why_not_through(name, module)) from error
            if len(arguments) != 1 or named or not (is_dropout or axis == axis_of(module) % given.ndim):
                raise _Impossible(why_not_through(name, module))
            if calls > 0:
                raise _Impossible(f"are read by {name!r}, which runs several times in a pass")
            host_part, new_part = torch.split(given, [shape[axis], new], axis)
            host_part = host_part.contiguous()
            if part == "layer":
                if reason := reason_against_layer(module, "reads them") or reason_against_uses(module, plain.uses):
                    raise _Impossible(f"are read by {name!r}, whose units {reason}")
                trial.readers[name] = new
                setattr(host_part, _MARK, None)
                return forward(host_part)
            if reason := reason_against_uses(module, plain.uses):
                raise _Impossible(f"go through {name!r}, which {reason}")
            trial.own[name] = _multiple_of(name, module)
            trial.through[name] = Through(new // trial.step, axis - given.ndim if is_dropout else None)
            output = forward(host_part)
            more = new * output.shape[axis] // shape[axis]  # a grouped convolution may make several units of one
            if new % trial.own[name]:
                raise _WrongStep
            shown = new_part if output.shape[2:] == new_part.shape[2:] and more == new else random_units(output, axis, more)
            return torch.cat([output, shown], axis)

        return run

    def judged(trial: _Trial, forward: Forward) -> Forward:
        before = plain.scopes[trial.scope]
        known = list(tensors_in(before.output))

        def run(*arguments: Any, **named: Any) -> Any:
            given, flops = list(tensors_in((arguments, named))), counter.get_total_flops()
            if len(given) != len(before.inputs) or not all(map(torch.equal, given, before.inputs)):
                return forward(*arguments, **named)
            apart.scope = trial.scope
            try:
                output = list(tensors_in(forward(*arguments, **named)))
            except Exception as error:
                trial.result = error.with_traceback(None)  # the frames of a traceback would keep the host in a cycle
                cut.append(trial.scope)
                unseen.discard(trial.scope)
            else:
                if [tensor.shape for tensor in output] == [tensor.shape for tensor in known]:
                    trial.result, trial.flops = (
                        _problem_with(known, output, is_read=bool(trial.readers)),
                        counter.get_total_flops() - flops - before.flops,
                    )
                    unseen.discard(trial.scope)
            apart.scope = None
            return _copied(before.output)

        return run

    # Run the host. What goes wrong outside of all scopes is the result of a trial whose scope is the host, and says nothing about others.
    outside: Exception | None = None
    shapes: dict[str, torch.Size] = {}
    has_heads = any(features > 1 for trial in trials for features in trial.producers.values())
    forwards = {name: widened(name, own_forward(module)) for name, module in leaves.items()}
    forwards |= {trial.scope: judged(trial, own_forward(host.get_submodule(trial.scope))) for trial in trials if trial.scope}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(counter if has_heads else nullcontext())
        if trials[0].scope:
            stack.enter_context(apart)
        torch.manual_seed(0)
        try:
            outputs, shapes = _outputs(host, forwards, example_input)
        except Exception as error:
            outside = error.with_traceback(None)
        else:
            outside = _problem_with(plain.outputs, outputs, is_read=bool(trials[0].scope or trials[0].readers))
    for tensor in apart.written:
        delattr(tensor, _MARK)
    for trial in trials:
        if not trial.scope:
            trial.result, trial.flops = outside, counter.get_total_flops() - plain.flops if has_heads else 0
        elif trial.scope in unseen or outside is not None or apart.has_mixed:
            trial.result = _Unseen()
    # A scope that was cut off by an error has not read all that other trials may have put into a cache, so repeat those without it.
    found = [trial for trial in trials if trial.result is None]
    if found and cut:
        for trial in found:
            trial.readers, trial.own, trial.through, trial.ran = {}, {}, {}, []
        _try(host, leaves, example_input, plain, found)
        return
    for trial in found:
        trial.result = _units_of(trial, leaves, plain, shapes)


def _problem_with(before: Sequence[Tensor], after: Sequence[Tensor], *, is_read: bool) -> _Impossible | None:
    """Compare the outputs of a scope without and with new units; return why they cannot be widened. `is_read`: a layer reads them."""
    if not is_read:
        return _Impossible("are read by no layer of their own, only by the host's output")
    for one, other in zip(before, after, strict=True):
        if one.shape != other.shape:
            return _Impossible("are in the host's output")
        if not torch.equal(one, other) and not torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(one.abs().max())):
            return _Impossible("are mixed outside of layers, as by a softmax, a mean or a norm over them")
    return None


def _units_of(trial: _Trial, leaves: Mapping[str, nn.Module], plain: _Run, shapes: Mapping[str, torch.Size]) -> Units:
    """Return the units that a trial has found. `shapes` are those of the outputs of submodules with new units."""
    producers, readers, own = trial.producers, trial.readers, trial.own
    order = {name: index for index, name in enumerate(trial.ran)}
    first = min(producers, key=order.__getitem__)
    width = layer_of(leaves[first]).weight.shape[0] // producers[first]
    parameters, flops = cost_of_own([(leaves[name], plain.shapes[name]) for name in own])
    if any(features > 1 for features in producers.values()):
        # The layers have run without new units, so the difference is what the host itself computed.
        flops += width * trial.flops // (max(plain.shapes[first][0], 1) * trial.step)
    return Units(
        tuple(producers),
        tuple(sorted(own, key=order.__getitem__)),
        tuple(Reader(name, readers[name] // trial.step) for name in sorted(readers, key=order.__getitem__)),
        width,
        trial.step,
        tuple(name for name, shape in shapes.items() if _is_in(name, trial.scope) and is_wider(plain.shapes.get(name), shape)),
        tuple((name, size_of(layer_of(leaves[name]), plain.shapes[name])) for name in trial.ran if name in (*producers, *readers)),
        (parameters, flops),
        through=tuple((name, how) for name, how in trial.through.items() if how != Through()),
        made=tuple((name, features) for name, features in producers.items() if features > 1),
    )


class _Unseen(Exception):
    """The units leave the scope of the trial, so its output says nothing about them."""


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
