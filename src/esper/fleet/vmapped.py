"""Modules that have no lowering, for N hosts at once: torch.func.vmap over the module as it is. Slower, and just as correct.

Shapes: B = samples, N = hosts. Activations are [B, N, ...], tensors of the state [N, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from esper.fleet.layers import without_gradient_of_padding
from esper.fleet.scope import Scope

At = Callable[[str, Tensor], Tensor]


def run_vmapped(module: nn.Module, scope: Scope, x: Tensor, *, at: At | None = None, slots: Iterable[str] = ()) -> Tensor:
    """`slots` are full names of submodules inside this one, behind which `at` acts. The module's own weights are not used.

    Random numbers, of a dropout layer for instance, are torch's global ones, different ones for every host.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    given = {name: scope.tensor(name) for name, _ in named}
    # What is updated in place is written to a reshaped tensor, which shares its storage only where it is contiguous.
    tensors = {name: tensor.contiguous() for name, tensor in given.items()}

    def of_one_host(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(module, tensors, (x,))
        return outputs

    with _hooked(module, scope, at, slots), _attention_of(x.device):
        outputs: Tensor = vmap(of_one_host, in_dims=(0, 1), out_dims=1, randomness="different")(tensors, x)
    if scope.training:
        with torch.no_grad():
            for name, _ in module.named_buffers():
                if tensors[name] is not given[name]:
                    given[name].copy_(tensors[name])
    return outputs


@contextmanager
def _hooked(module: nn.Module, scope: Scope, at: At | None, slots: Iterable[str]) -> Iterator[None]:
    """Forward hooks for the time of one pass: what acts behind slots, and what vmap forgets about embeddings, their padding."""
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


def _attention_of(device: torch.device) -> AbstractContextManager[None]:
    """vmap would call the fused attention of the CPU for one host after another."""
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
    return context


def _forget_padding(layer: nn.Embedding, given: tuple[Tensor], output: Tensor) -> Tensor:
    return without_gradient_of_padding(layer, given[0], output)


def _hook(at: At, slot: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        replaced: Tensor = _OutsideVmap.apply(output, at, slot)  # type: ignore[no-untyped-call]
        return replaced

    return hook


class _OutsideVmap(torch.autograd.Function):
    """Steps out of vmap: its rule gets the whole tensor of all hosts, and what it computes there is recorded by autograd as usual."""

    @staticmethod
    def forward(output: Tensor, at: At, slot: str) -> Tensor:
        raise AssertionError("called outside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        raise AssertionError("called outside vmap")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], output: Tensor, at: At, slot: str) -> tuple[Tensor, int]:
        hosts_at = in_dims[0]
        if hosts_at is None:  # it depends neither on a weight nor on the input
            return at(slot, output.unsqueeze(1).repeat_interleave(info.batch_size, dim=1)), 1
        return at(slot, output.movedim(hosts_at, 1)), 1
