"""What flows in some of the hosts, taken out and put back, for GPUs, as Triton kernels.

Seeds belong to some hosts only. Torch's kernels for an index in the middle of a tensor go number by number, and its `index_add` adds by
atomic operations though no host is named twice; these move a host's part of a sample at once, and add the seeds' share on the way.

Shapes: B = samples, N = hosts, R = some of them, D = numbers of one host in one sample. Everything here is dense in memory, [B, hosts, D].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # numbers at once


def gather(h: Tensor, index: Tensor) -> Tensor:
    """[B, N, ...] to [B, R, ...]; `index` [R] names no host twice."""
    own: Tensor = _Gather.apply(h, index)  # type: ignore[no-untyped-call]
    return own


def blend(h: Tensor, index: Tensor, alpha: Tensor, delta: Tensor) -> Tensor:
    """h with alpha [R] times delta [B, R, ...] added in some hosts, summed in float32 at least. Alpha has no gradient."""
    blended: Tensor = _Blend.apply(h, index, alpha, delta)  # type: ignore[no-untyped-call]
    return blended


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.hosts = h.shape[1]
        return _taken(h.contiguous(), index, None, h.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,), gradient = ctx.saved_tensors, gradients[0].contiguous()
        whole = gradient.new_zeros(len(gradient), ctx.hosts, *gradient.shape[2:])
        size = gradient[0, 0].numel()
        _put[_grid(gradient)](gradient, index, whole, ctx.hosts, size, BLOCK=_BLOCK, num_warps=4)
        return whole, None


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, index: Tensor, alpha: Tensor, delta: Tensor) -> Tensor:
        ctx.save_for_backward(index, alpha)
        ctx.dtype, delta = delta.dtype, delta.contiguous()
        blended = h.clone(memory_format=torch.contiguous_format)
        _add[_grid(delta)](delta, index, alpha, blended, h.shape[1], delta[0, 0].numel(), BLOCK=_BLOCK, num_warps=4)
        return blended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, Tensor]:
        index, alpha = ctx.saved_tensors
        (gradient,) = gradients
        return gradient, None, None, _taken(gradient.contiguous(), index, alpha, ctx.dtype)


def _taken(h: Tensor, index: Tensor, alpha: Tensor | None, dtype: torch.dtype) -> Tensor:
    own = h.new_empty(len(h), len(index), *h.shape[2:], dtype=dtype)
    settings = {"SCALES": alpha is not None, "BLOCK": _BLOCK, "num_warps": 4}
    _take[_grid(own)](h, index, index if alpha is None else alpha, own, h.shape[1], own[0, 0].numel(), **settings)
    return own


def _grid(own: Tensor) -> tuple[int, int, int]:
    return len(own), own.shape[1], triton.cdiv(own[0, 0].numel(), _BLOCK)


# Kernels: a program for a sample, one of the hosts and a part of its numbers.


@triton.jit
def _places(index, hosts, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the part lies among the chosen hosts and among all, and which of its numbers there are."""
    sample, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    host = tl.load(index + place)
    return (sample * tl.num_programs(1) + place) * size + d, (sample * hosts + host) * size + d, d < size


@triton.jit
def _take(h, index, alpha, own, hosts, size, SCALES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    there, here, mask = _places(index, hosts, size, BLOCK)
    values = tl.load(h + here, mask=mask)
    if SCALES:
        values = values * tl.load(alpha + tl.program_id(1))
    tl.store(own + there, values.to(own.dtype.element_ty), mask=mask)


@triton.jit
def _put(own, index, whole, hosts, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    there, here, mask = _places(index, hosts, size, BLOCK)
    tl.store(whole + here, tl.load(own + there, mask=mask), mask=mask)


@triton.jit
def _add(delta, index, alpha, whole, hosts, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    there, here, mask = _places(index, hosts, size, BLOCK)
    share = tl.load(delta + there, mask=mask) * tl.load(alpha + tl.program_id(1))  # in alpha's precision
    total = tl.load(whole + here, mask=mask) + share
    tl.store(whole + here, total.to(whole.dtype.element_ty), mask=mask)
