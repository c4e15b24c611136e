"""Lower a module: turn it into a function that computes for N hosts, each with its own weights, what the module computes for one.

    stacked = lower(host, slots=["blocks.0", "blocks.1"])
    rows = ModuleRows.of(hosts)
    logits = stacked(rows.tensors(), images, training=True, at=seeds)       # [B, N, classes] of images [B, N, C, H, W]

Modules with a lowering compute all hosts in one kernel. The others run through torch.func.vmap, which is slower and just as correct. The
gradient of the sum of the hosts' losses is, for every host, the gradient that it has alone.

The file has four parts:
- lowerings of modules that are made of others. They call their children by name, so that seeds can act after any of them. Those of single
  layers are in `esper.fleet.stacked.layers` and `esper.fleet.stacked.convolutions`, and are registered when this file imports them;
- `run_vmapped`, for modules without a lowering;
- `recomputed` and `blocks_of`: the activations inside a block of a host can be recomputed in the backward pass instead of kept. A block is
  computed twice from the same input, the second time with copies of its buffers, so that running statistics move once. A module is a block
  only if all its parts have lowerings. Those draw no random numbers: in a recorded step, the random state of a GPU could not be put back. A
  lowering of your own must not draw any either;
- `lower` and `Stacked`, which put these together.

Shapes: B = samples of each host, N = hosts, C = channels, S... = space, T = tokens of a sequence, D = features. Activations are
[B, N, ...], weights and buffers [N, ...].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from esper.fleet.config import FleetError
from esper.fleet.stacked.convolutions import convolve, convolve_and_describe, tiled_shape
from esper.fleet.stacked.layers import Convolution, Scope, lowering_of, lowers, mean_over_space, track, without_gradient_of_padding
from esper.fleet.stacked.rows import aliases
from esper.growth.seeds.branches import Attention, SqueezeExcite
from esper.tasks.gpt_host import CausalAttention, GPTBlock, GPTHost
from esper.tasks.hosts import ConvBlock, ConvHost, MLPHost, ResidualBlock, ResidualHost
from esper.torch_internals import version_of

# Lowerings of modules that are made of others


@lowers(nn.Sequential)
def sequential(module: nn.Sequential, scope: Scope, x: Tensor) -> Tensor:
    for name in module._modules:  # named_children would leave out a module that occurs a second time
        x = scope.child(name, x)
    return x


@lowers(ConvBlock)
def conv_block(block: ConvBlock, scope: Scope, x: Tensor) -> Tensor:
    shape = tiled_shape(block.conv, scope, x)
    # The fused kernels do not support a slot inside the block, a pool over a series or over an image of odd size, and gradients in
    # evaluation.
    has_fused_pool = isinstance(block.pool, nn.Identity) or (x.ndim == 5 and not any(size % 2 for size in x.shape[3:]))
    if shape is not None and has_fused_pool and not scope.has_slots_inside() and (scope.training or not torch.is_grad_enabled()):
        return _fused(block, shape, scope, x)
    for name in ("conv", "norm", "relu", "pool"):
        x = scope.child(name, x)
    return x


def _fused(block: ConvBlock, shape: Any, scope: Scope, x: Tensor) -> Tensor:
    """Compute the block in two passes over memory: the convolution, then norm, ReLU and pool together."""
    from esper.fleet.kernels.norm_pool import norm_relu_pool

    norm, weight = scope.inside("norm"), scope.inside("conv").tensor("weight")
    if scope.training:
        outputs, mean, variance = convolve_and_describe(shape, weight, x)
        # Running variances are unbiased, as in torch.
        count = len(outputs) * outputs.shape[3] * outputs.shape[4]
        track(block.norm, norm, mean, variance * (count / max(count - 1, 1)))
    else:
        outputs = convolve(shape, weight, None, x)
        mean, variance = norm.tensor("running_mean"), norm.tensor("running_var")
    pools = not isinstance(block.pool, nn.Identity)
    result = norm_relu_pool(outputs, mean, variance, norm.tensor("weight"), norm.tensor("bias"), eps=block.norm.eps, pools=pools)
    return result if x.ndim == 5 else result.squeeze(-2)


@lowers(ConvHost, ResidualHost)
def conv_host(host: ConvHost | ResidualHost, scope: Scope, x: Tensor) -> Tensor:
    features = scope.child("blocks", x)  # [B, N, C, S...]
    return scope.child("head", mean_over_space(features))


@lowers(ResidualBlock)
def residual_block(block: ResidualBlock, scope: Scope, x: Tensor) -> Tensor:
    return scope.child("relu", x + scope.child("norm", scope.child("conv", scope.child("inner", x))))


@lowers(MLPHost)
def mlp_host(host: MLPHost, scope: Scope, x: Tensor) -> Tensor:
    return scope.child("head", scope.child("blocks", x.flatten(2)))


@lowers(SqueezeExcite)
def squeeze_excite(module: SqueezeExcite, scope: Scope, h: Tensor) -> Tensor:
    squeezed = F.silu(scope.child("squeeze", mean_over_space(h)))
    gate = torch.tanh(scope.child("excite", squeezed))  # [B, N, C]
    return h * gate.reshape(*gate.shape, *(1 for _ in module.space))


@lowers(Attention)
def attention(module: Attention, scope: Scope, h: Tensor) -> Tensor:
    queries_keys_values = scope.child("qkv", scope.child("norm", h))
    return scope.child("out", _attend(queries_keys_values, heads=module.heads, is_causal=module.is_causal))


@lowers(CausalAttention)
def causal_attention(module: CausalAttention, scope: Scope, x: Tensor) -> Tensor:
    return scope.child("out", _attend(scope.child("query_key_value", x), heads=module.heads, is_causal=True))


def _attend(queries_keys_values: Tensor, *, heads: int, is_causal: bool) -> Tensor:
    """Return the attention [B, N, T, D] of queries, keys and values [B, N, T, 3·D]. Samples and hosts are merged into one batch."""
    samples, hosts, length, _ = queries_keys_values.shape
    split = queries_keys_values.reshape(samples * hosts, length, 3, heads, -1).permute(2, 0, 3, 1, 4)  # [3, B·N, heads, T, D / heads]
    mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=is_causal)
    return mixed.transpose(1, 2).reshape(samples, hosts, length, -1)


@lowers(GPTBlock)
def gpt_block(block: GPTBlock, scope: Scope, x: Tensor) -> Tensor:
    attended = x + scope.child("attention", scope.child("attention_norm", x))
    return attended + scope.child("mlp", scope.child("mlp_norm", attended))


@lowers(GPTHost)
def gpt_host(host: GPTHost, scope: Scope, ids: Tensor) -> Tensor:
    hosts, length = ids.shape[1:]
    if length > host.sequence_length:
        raise ValueError(f"this host reads sequences of up to {host.sequence_length} tokens; got {length}")
    places = torch.arange(length, device=ids.device).expand(1, hosts, length)
    states = scope.child("tokens", ids) + scope.child("positions", places)  # [B, N, T, D]
    for index in range(len(host.blocks)):
        states = scope.child(f"blocks.{index}", states)
    return scope.child("head", scope.child("norm", states))


# Modules without a lowering


At = Callable[[str, Tensor], Tensor]  # name of a slot, its output -> the output to continue with


def run_vmapped(module: nn.Module, scope: Scope, x: Tensor, *, at: At | None = None, slots: Iterable[str] = ()) -> Tensor:
    """Run a module on x [B, N, ...] through vmap, with the tensors of the scope instead of its own.

    `slots` are full names of submodules inside this one; `at` is called after each of them. Dropout layers draw from torch's global random
    state, different numbers for every host.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    given = {name: scope.tensor(name) for name, _ in named}
    # vmap writes in-place updates of buffers to a reshaped tensor. It shares memory with the buffer only where that is contiguous, so pass
    # contiguous tensors and copy the updates back.
    tensors = {name: tensor.contiguous() for name, tensor in given.items()}

    def of_one_host(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(module, tensors, (x,))
        return outputs

    # vmap would call the fused attention of the CPU for one host after another, so avoid it there.
    attention: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH) if x.device.type == "cpu" else nullcontext()
    with _hooked(module, scope, at, slots), attention:
        outputs: Tensor = vmap(of_one_host, in_dims=(0, 1), out_dims=1, randomness="different")(tensors, x)
    if scope.training:
        with torch.no_grad():
            for name, _ in module.named_buffers():
                if tensors[name] is not given[name]:
                    given[name].copy_(tensors[name])
    return outputs


@contextmanager
def _hooked(module: nn.Module, scope: Scope, at: At | None, slots: Iterable[str]) -> Iterator[None]:
    """Add forward hooks for one pass: `at` after each slot, and no gradient for the padding of embeddings, which vmap would compute."""
    prefix = scope.full_name("")
    inside = [slot for slot in slots if at is not None and slot.startswith(prefix)]
    embeddings = [embedding for embedding in module.modules() if isinstance(embedding, nn.Embedding)]
    with ExitStack() as handles:
        for embedding in embeddings:
            handles.enter_context(embedding.register_forward_hook(_forget_padding))
        for slot in inside:
            assert at is not None
            handles.enter_context(module.get_submodule(slot.removeprefix(prefix)).register_forward_hook(_hook(at, slot)))
        yield


def _forget_padding(layer: nn.Embedding, given: tuple[Tensor], output: Tensor) -> Tensor:
    return without_gradient_of_padding(layer, given[0], output)


def _hook(at: At, slot: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        replaced: Tensor = _OutsideVmap.apply(output, at, slot)  # type: ignore[no-untyped-call]
        return replaced

    return hook


class _OutsideVmap(torch.autograd.Function):
    """Calls `at` outside vmap: the vmap rule gets the tensor of all hosts, and autograd records its computation as usual."""

    @staticmethod
    def forward(output: Tensor, at: At, slot: str) -> Tensor:
        raise AssertionError("called outside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        raise AssertionError("called outside vmap")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], output: Tensor, at: At, slot: str) -> tuple[Tensor, int]:
        host_dim = in_dims[0]
        if host_dim is None:  # the output depends neither on a weight nor on the input, so it is the same for all hosts
            return at(slot, output.unsqueeze(1).repeat_interleave(info.batch_size, dim=1)), 1
        return at(slot, output.movedim(host_dim, 1)), 1


# Recomputed blocks


Compute = Callable[[Tensor], Tensor]
Recompute = Callable[[Compute, Compute, Tensor], Tensor]  # first computation, recomputation, input -> output


def recomputed(first: Compute, again: Compute, x: Tensor) -> Tensor:
    """Return `first(x)`, keeping only x for the backward pass, which calls `again(x)` to recompute the activations."""
    passes, version = iter((first, again)), version_of(x)
    outputs: Tensor = checkpoint(lambda x: next(passes)(x), x, use_reentrant=False, preserve_rng_state=False)
    if version_of(x) != version:
        raise FleetError(
            "a block of the host changes its input in place, so its activations cannot be recomputed from that input; "
            "build its first layer with inplace=False, or leave `checkpoint` off"
        )
    return outputs


def blocks_of(module: nn.Module, slots: Collection[str]) -> frozenset[str]:
    """Return the names of the largest submodules that can be recomputed: all parts have lowerings, and no slot is inside.

    The host itself is not a block, nor is a chain of blocks: recomputing the blocks one at a time needs less memory.
    """
    return frozenset(_blocks_inside("", module, slots))


def _blocks_inside(name: str, module: nn.Module, slots: Collection[str]) -> Iterator[str]:
    """Yield the full names of the blocks inside a submodule of this full name."""
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if not any(True for _ in child.children()):
            continue  # a single layer keeps little more than its input
        has_slots = any(slot.startswith(f"{full}.") for slot in slots)
        is_chain_of_blocks = type(child) is nn.Sequential and any(True for part in child.children() for _ in part.children())
        is_lowered = all(lowering_of(part, training=True) is not None for part in child.modules())
        if is_lowered and not has_slots and not is_chain_of_blocks:
            yield full
        else:
            yield from _blocks_inside(full, child, slots)


# Lowered modules


def lower(module: nn.Module, *, slots: Iterable[str] = (), convolution: Convolution | None = None) -> Stacked:
    """Return the module as a function of N hosts. `slots` are names of submodules whose outputs the caller may replace.

    `convolution` is the way convolutions are computed; None leaves it to `esper.fleet.stacked.convolutions.choose_convolution`.
    """
    return Stacked(module, slots=slots, convolution=convolution)


class Stacked:
    """A lowered module. Call it with the tensors of N hosts and their inputs.

    It has no weights of its own. Running statistics are updated in the given tensors.
    """

    def __init__(self, module: nn.Module, *, slots: Iterable[str] = (), convolution: Convolution | None = None) -> None:
        self.slots = frozenset(slots)
        self._module = copy.deepcopy(module).train()  # a copy, because its mode is switched and vmap adds hooks to it
        self.submodules = dict(self._module.named_modules(remove_duplicate=False))
        self._aliases = aliases(self._module)
        self.convolution = convolution
        unknown = sorted(self.slots - set(self.submodules))
        if unknown:
            raise ValueError(f"no submodule named {unknown[0]!r} for a slot; this module has {sorted(filter(None, self.submodules))}")
        _check_embeddings(self.submodules)

    @cached_property
    def blocks(self) -> frozenset[str]:
        """Names of the submodules whose activations can be recomputed."""
        return blocks_of(self._module, self.slots)

    def __call__(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, training: bool, at: At | None = None, recompute: Recompute | None = None
    ) -> Tensor:
        """Return the outputs [B, N, ...] for inputs x [B, N, ...]. `at(name, output)` is called after every slot; it returns a new output.

        `training` holds for all submodules, whatever mode they were in when the module was lowered. In training with gradients, `recompute`
        runs the blocks.
        """
        hosts = {len(tensor) for tensor in tensors.values()}
        if hosts and hosts != {x.shape[1]}:
            raise ValueError(f"the input must be [samples, hosts, ...]; got {list(x.shape)} with tensors of {sorted(hosts)} hosts")
        if self._module.training != training:
            self._module.train(training)
        by_every_name = {**tensors, **{name: tensors[first] for name, first in self._aliases.items()}}
        recompute = recompute if training and torch.is_grad_enabled() else None
        return _Pass(self, by_every_name, training, at, recompute).run("", x)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass through a module. It is not a closure, which would be a reference cycle that holds the weights until garbage collection."""

    stacked: Stacked
    tensors: Mapping[str, Tensor]
    training: bool
    at: At | None
    recompute: Recompute | None

    def run(self, name: str, x: Tensor) -> Tensor:
        """Return the output of the submodule of this full name for x, as replaced by `at` where it has a slot."""
        if self.recompute is not None and name in self.stacked.blocks:
            outputs = self.recompute(partial(self._compute, name), partial(self._with_copied_buffers(name)._compute, name), x)
        else:
            outputs = self._compute(name, x)
        return self.at(name, outputs) if self.at is not None and name in self.stacked.slots else outputs

    def _with_copied_buffers(self, name: str) -> _Pass:
        """Return the same pass with copies of this submodule's buffers, so that a second computation does not change the host's."""
        full = [f"{name}.{buffer}" for buffer, _ in self.stacked.submodules[name].named_buffers(remove_duplicate=False)]
        return replace(self, tensors={**self.tensors, **{buffer: self.tensors[buffer].clone() for buffer in full}})

    def _compute(self, name: str, x: Tensor) -> Tensor:
        """Return the output of the submodule of this full name for x, by its lowering or through vmap."""
        module, slots = self.stacked.submodules[name], self.stacked.slots
        scope = Scope(name, self.tensors, self.training, self.stacked.convolution, self.run, slots)
        lowering = lowering_of(module, training=self.training)
        if lowering is None:
            inside = [slot for slot in slots if slot != name]
            return run_vmapped(module, scope, x, at=self.at, slots=inside)
        return lowering(module, scope, x)


def _check_embeddings(submodules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for an embedding with settings that neither its lowering nor vmap supports."""
    for name, layer in submodules.items():
        if isinstance(layer, nn.Embedding):
            settings = {"max_norm": layer.max_norm is not None, "scale_grad_by_freq": layer.scale_grad_by_freq, "sparse": layer.sparse}
            asked = [setting for setting, is_asked in settings.items() if is_asked]
            if asked:
                raise ValueError(f"embedding {name!r} asks for {', '.join(asked)}, which hosts of a fleet cannot have; build it without")
