"""Gather the activations of some hosts, and add deltas to them, for GPUs, as Triton kernels.

Only some hosts have a seed. Torch's kernels for an index in a middle dimension go number by number, and its `index_add` uses atomic
operations although no host occurs twice. These kernels move a host's part of a sample in one piece, and multiply by alpha on the way.

Shapes: B = samples, N = hosts, R = some of them, D = numbers of one host in one sample. All tensors are dense in memory, [B, hosts, D].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # numbers per program


def gather(h: Tensor, index: Tensor) -> Tensor:
    """Return the hosts of `index` [R]: h [B, N, ...] becomes [B, R, ...]. No host may occur twice."""
    own: Tensor = _Gather.apply(h, index)  # type: ignore[no-untyped-call]
    return own


def blend(h: Tensor, index: Tensor, alpha: Tensor, delta: Tensor) -> Tensor:
    """Return h [B, N, ...] with alpha [R] times delta [B, R, ...] added to the hosts of `index` [R]. Alpha gets no gradient.

    The sum is computed in float32 at least.
    """
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
    """Return the hosts of `index` [R] of h [B, N, ...] in `dtype`, times alpha [R] if given."""
    own = h.new_empty(len(h), len(index), *h.shape[2:], dtype=dtype)
    settings = {"SCALES": alpha is not None, "BLOCK": _BLOCK, "num_warps": 4}
    _take[_grid(own)](h, index, index if alpha is None else alpha, own, h.shape[1], own[0, 0].numel(), **settings)
    return own


def _grid(own: Tensor) -> tuple[int, int, int]:
    return len(own), own.shape[1], triton.cdiv(own[0, 0].numel(), _BLOCK)


# Kernels. A program computes one block of the numbers of one chosen host in one sample.


@triton.jit
def _places(index, hosts, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets of the block among the chosen hosts and among all hosts, and a mask of the numbers that exist."""
    sample, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    host = tl.load(index + place)
    return (sample * tl.num_programs(1) + place) * size + d, (sample * hosts + host) * size + d, d < size


@triton.jit
def _take(h, index, alpha, own, hosts, size, SCALES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a block of all hosts' `h` to the chosen hosts' `own`, times alpha with SCALES."""
    in_own, in_all, mask = _places(index, hosts, size, BLOCK)
    values = tl.load(h + in_all, mask=mask)
    if SCALES:
        values = values * tl.load(alpha + tl.program_id(1))
    tl.store(own + in_own, values.to(own.dtype.element_ty), mask=mask)


@triton.jit
def _put(own, index, whole, hosts, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a block of the chosen hosts' `own` to all hosts' `whole`."""
    in_own, in_all, mask = _places(index, hosts, size, BLOCK)
    tl.store(whole + in_all, tl.load(own + in_own, mask=mask), mask=mask)


@triton.jit
def _add(delta, index, alpha, whole, hosts, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add alpha times a block of the chosen hosts' `delta` to all hosts' `whole`."""
    in_own, in_all, mask = _places(index, hosts, size, BLOCK)
    share = tl.load(delta + in_own, mask=mask) * tl.load(alpha + tl.program_id(1))  # in alpha's precision
    total = tl.load(whole + in_all, mask=mask) + share
    tl.store(whole + in_all, total.to(whole.dtype.element_ty), mask=mask)
