"""Modules made of others, for N hosts at once. Children are called by name, so that seeds can act behind any of them.

Shapes: B = samples, N = hosts, C = channels, S... = space, T = tokens of a sequence, D = features. Activations are [B, N, ...].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.fleet.convolutions import convolve, convolve_and_describe, tiled_shape
from esper.fleet.layers import mean_over_space, track
from esper.fleet.scope import Scope, lowers
from esper.growth.branches import Attention, SqueezeExcite
from esper.tasks.conv_host import ConvBlock, ConvHost
from esper.tasks.gpt_host import CausalAttention, GPTBlock, GPTHost


@lowers(nn.Sequential)
def sequential(module: nn.Sequential, scope: Scope, x: Tensor) -> Tensor:
    for name in module._modules:  # named_children leaves out a module that comes a second time
        x = scope.child(name, x)
    return x


@lowers(ConvBlock)
def conv_block(block: ConvBlock, scope: Scope, x: Tensor) -> Tensor:
    shape = tiled_shape(block.conv, scope, x)
    if shape is not None and _is_fusible(block, scope, x):
        return _fused(block, shape, scope, x)
    for name in ("conv", "norm", "relu", "pool"):
        x = scope.child(name, x)
    return x


def _is_fusible(block: ConvBlock, scope: Scope, x: Tensor) -> bool:
    """Not where something grows inside, where the pool leaves pixels out, or where a norm that does not look at its batch has to learn."""
    is_whole = isinstance(block.pool, nn.Identity) or (x.ndim == 5 and not any(size % 2 for size in x.shape[3:]))
    return is_whole and not scope.has_slots_inside() and (scope.training or not torch.is_grad_enabled())


def _fused(block: ConvBlock, shape: Any, scope: Scope, x: Tensor) -> Tensor:
    """The block in a pass over memory for the convolution and one for all the rest."""
    from esper.fleet.norm_pool import norm_relu_pool

    norm, weight = scope.inside("norm"), scope.inside("conv").tensor("weight")
    if scope.training:
        outputs, mean, variance = convolve_and_describe(shape, weight, x)
        count = len(outputs) * outputs.shape[3] * outputs.shape[4]
        track(block.norm, norm, mean, variance * (count / max(count - 1, 1)))
    else:
        outputs = convolve(shape, weight, None, x)
        mean, variance = norm.tensor("running_mean"), norm.tensor("running_var")
    pools = not isinstance(block.pool, nn.Identity)
    result = norm_relu_pool(outputs, mean, variance, norm.tensor("weight"), norm.tensor("bias"), eps=block.norm.eps, pools=pools)
    return result if x.ndim == 5 else result.squeeze(-2)


@lowers(ConvHost)
def conv_host(host: ConvHost, scope: Scope, x: Tensor) -> Tensor:
    features = scope.child("blocks", x)  # [B, N, C, S...]
    return scope.child("head", mean_over_space(features))


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
    """[B, N, T, 3·D] to [B, N, T, D]. Positions look at those of their own sample and host, so these are one dimension here."""
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
