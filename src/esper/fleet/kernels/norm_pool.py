"""Batch norm, ReLU and max-pool by 2 of N hosts in one kernel, for GPUs, in Triton.

Computed one by one, these three read and write the largest tensors of a step seven times in the forward pass alone. Together they read the
output of the convolution once and write only the pooled result. The backward pass reads it twice, because the gradient of a norm needs two
sums over a whole channel before it can be written. Only the output of the convolution is kept for it: the largest pixel of each window is
found again.

Activations are [B, N, C, H, W] with the channels innermost in memory, as `esper.fleet.kernels.convolution` writes them.

Shapes: B = samples, N = hosts, C = channels, H × W = space, R = output pixels per program, S = parts of the samples that are summed apart.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.fleet.kernels.convolution import with_channels_innermost

_BLOCK = 2048  # numbers per program
_SPLITS = 64  # most parts of the samples


def norm_relu_pool(y: Tensor, mean: Tensor, variance: Tensor, gain: Tensor, bias: Tensor, *, eps: float, pools: bool) -> Tensor:
    """Normalise y [B, N, C, H, W], apply ReLU and, with `pools`, a max-pool that halves H and W, which must be even.

    The gradient assumes that mean and variance [N, C] are those of y itself. Do not ask for gradients where they are not, as in evaluation.
    """
    outputs: Tensor = _NormReluPool.apply(y, mean, variance, gain, bias, eps, pools)  # type: ignore[no-untyped-call]
    return outputs


class _NormReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, mean: Tensor, variance: Tensor, gain: Tensor, bias: Tensor, eps: float, pools: bool) -> Tensor:
        y = with_channels_innermost(y)
        samples, hosts, channels, height, width = y.shape
        inverse = torch.rsqrt(variance + eps)
        scale = gain * inverse
        settings = torch.stack([scale, bias - mean * scale, mean, inverse])  # [4, N, C]; the second is the shift
        outputs = y.new_empty(samples, hosts, *((height // 2, width // 2) if pools else (height, width)), channels)
        count, sizes = outputs.numel() // channels, _sizes(y, pools)
        _forward[(triton.cdiv(count, sizes["R"]),)](y, settings, outputs, count, hosts, **sizes, num_warps=4)
        ctx.save_for_backward(y, settings)
        ctx.pools = pools
        return outputs.movedim(-1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, settings = ctx.saved_tensors
        samples, hosts, channels, height, width = y.shape
        gradient, sizes = with_channels_innermost(gradients[0]), _sizes(y, ctx.pools)
        each = triton.cdiv(samples, _SPLITS)
        splits = triton.cdiv(samples, each)
        # First kernel: the two sums over each channel, which are also the gradients of bias and gain. Second kernel: the gradient of y.
        parts = y.new_empty(2, hosts, splits, channels, dtype=torch.float32)
        _sum_gradients[(hosts, splits)](y, settings, gradient, parts, samples, each, **sizes, num_warps=4)
        of_bias, of_gain = sums = parts.sum(2)  # [2, N, C]
        means = sums / (samples * height * width)
        of_y = torch.empty_like(y)
        count = gradient.numel() // channels
        _backward[(triton.cdiv(count, sizes["R"]),)](y, settings, means, gradient, of_y, count, hosts, **sizes, num_warps=4)
        return of_y, None, None, of_gain, of_bias, None, None


def _sizes(y: Tensor, pools: bool) -> dict[str, int]:
    """Return the constants of the kernels, by their names there."""
    block = int(triton.next_power_of_2(y.shape[2]))
    return {"C": y.shape[2], "CP": block, "H": y.shape[3], "W": y.shape[4], "POOLS": pools, "R": max(_BLOCK // block, 1)}


# Kernels. A row is an output pixel with all its channels. With a pool it comes from a window of four input pixels.


@triton.jit
def _corner(inside, W: tl.constexpr, POOLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of the input pixel, or of the first pixel of the window, that an output pixel of this number comes from."""
    if POOLS:
        return (inside // (W // 2)) * (2 * W) + (inside % (W // 2)) * 2
    return inside


@triton.jit
def _greater(a, b):  # type: ignore[no-untyped-def]
    """Return whether a replaces b as the maximum. As in torch, the first of equal values wins, and NaN wins over numbers."""
    return (a > b) | (a != a)


@triton.jit
def _load(places, mask):  # type: ignore[no-untyped-def]
    return tl.load(places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    y, settings, outputs, count, hosts, C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, W: tl.constexpr, POOLS: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Write R output pixels."""
    size: tl.constexpr = (H // 2) * (W // 2) if POOLS else H * W
    # A plane is one host's image of one sample. r counts from the start of the plane of the first row and may run into the next planes.
    first = tl.program_id(0).to(tl.int64) * R
    plane, r, c = first // size, (first % size).to(tl.int32) + tl.arange(0, R), tl.arange(0, CP)
    mask = (first + tl.arange(0, R) < count)[:, None] & (c < C)[None, :]
    host = ((plane % hosts).to(tl.int32) + r // size) % hosts
    setting = settings + host[:, None] * C + c[None, :]
    scale, shift = _load(setting, mask), _load(setting + hosts * C, mask)
    places = y + plane * (H * W * C) + (((r // size) * (H * W) + _corner(r % size, W, POOLS)) * C)[:, None] + c[None, :]
    largest = _load(places, mask) * scale + shift
    if POOLS:
        second = _load(places + C, mask) * scale + shift
        largest = tl.where(_greater(second, largest), second, largest)
        third = _load(places + W * C, mask) * scale + shift
        largest = tl.where(_greater(third, largest), third, largest)
        fourth = _load(places + (W * C + C), mask) * scale + shift
        largest = tl.where(_greater(fourth, largest), fourth, largest)
    results = outputs + first * C + (tl.arange(0, R) * C)[:, None] + c[None, :]
    tl.store(results, tl.where(largest <= 0, 0.0, largest).to(outputs.dtype.element_ty), mask=mask)


@triton.jit
def _sum_gradients(  # type: ignore[no-untyped-def]
    y, settings, gradient, parts, samples, each, C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    POOLS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of the norm's output over some samples of one host, for every channel: alone, and times the normalised pixel.

    Only the largest pixel of each window, if it is positive, gets a gradient.
    """
    host, split, hosts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    size: tl.constexpr = (H // 2) * (W // 2) if POOLS else H * W
    c = tl.arange(0, CP)
    setting, is_channel = settings + host * C + c, c < C
    scale, shift = _load(setting, is_channel)[None, :], _load(setting + hosts * C, is_channel)[None, :]
    mean, inverse = _load(setting + 2 * hosts * C, is_channel)[None, :], _load(setting + 3 * hosts * C, is_channel)[None, :]
    last = tl.minimum((split + 1) * each, samples) * size
    plain = tl.zeros((R, CP), dtype=tl.float32)
    weighed = tl.zeros((R, CP), dtype=tl.float32)
    for start in range(split * each * size, last, R):
        r = start + tl.arange(0, R)
        mask = (r < last)[:, None] & is_channel[None, :]
        plane = (r // size).to(tl.int64) * hosts + host
        out_gradient = _load(gradient + ((plane * size + r % size) * C)[:, None] + c[None, :], mask)
        places = y + ((plane * (H * W) + _corner(r % size, W, POOLS)) * C)[:, None] + c[None, :]
        pixel = _load(places, mask)
        if POOLS:
            second = _load(places + C, mask)
            pixel = tl.where(_greater(second * scale + shift, pixel * scale + shift), second, pixel)
            third = _load(places + W * C, mask)
            pixel = tl.where(_greater(third * scale + shift, pixel * scale + shift), third, pixel)
            fourth = _load(places + (W * C + C), mask)
            pixel = tl.where(_greater(fourth * scale + shift, pixel * scale + shift), fourth, pixel)
        out_gradient = tl.where(pixel * scale + shift <= 0, 0.0, out_gradient)
        plain += out_gradient
        weighed += out_gradient * ((pixel - mean) * inverse)
    place = parts + (host * tl.num_programs(1) + split) * C + c
    tl.store(place, tl.sum(plain, 0), mask=is_channel)
    tl.store(place + hosts * tl.num_programs(1) * C, tl.sum(weighed, 0), mask=is_channel)


@triton.jit
def _back(pixel, out_gradient, scale, mean, inverse, plain, weighed):  # type: ignore[no-untyped-def]
    """Return the gradient of a norm's input at one pixel, given the gradient of its output and the means of the two sums of its channel."""
    return scale * (out_gradient - plain - (pixel - mean) * inverse * weighed)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    y, settings, means, gradient, of_y, count, hosts, C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    POOLS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the gradient of y for R output pixels: one pixel each, or with a pool all four of the window."""
    size: tl.constexpr = (H // 2) * (W // 2) if POOLS else H * W
    first = tl.program_id(0).to(tl.int64) * R
    plane, r, c = first // size, (first % size).to(tl.int32) + tl.arange(0, R), tl.arange(0, CP)
    mask = (first + tl.arange(0, R) < count)[:, None] & (c < C)[None, :]
    channel = (((plane % hosts).to(tl.int32) + r // size) % hosts)[:, None] * C + c[None, :]
    width = hosts * C
    scale, shift = _load(settings + channel, mask), _load(settings + width + channel, mask)
    mean, inverse = _load(settings + 2 * width + channel, mask), _load(settings + 3 * width + channel, mask)
    plain, weighed = _load(means + channel, mask), _load(means + width + channel, mask)
    out_gradient = _load(gradient + first * C + (tl.arange(0, R) * C)[:, None] + c[None, :], mask)
    place = plane * (H * W * C) + (((r // size) * (H * W) + _corner(r % size, W, POOLS)) * C)[:, None] + c[None, :]
    kind = of_y.dtype.element_ty
    a = _load(y + place, mask)
    largest = a * scale + shift
    if POOLS:
        b, d, e = _load(y + place + C, mask), _load(y + place + W * C, mask), _load(y + place + (W * C + C), mask)
        # `chosen` is the number of the largest of the four pixels a, b, d, e; it alone gets the gradient of the output.
        chosen = tl.where(_greater(b * scale + shift, largest), 1, 0)
        largest = tl.where(chosen == 1, b * scale + shift, largest)
        chosen = tl.where(_greater(d * scale + shift, largest), 2, chosen)
        largest = tl.where(chosen == 2, d * scale + shift, largest)
        chosen = tl.where(_greater(e * scale + shift, largest), 3, chosen)
        largest = tl.where(chosen == 3, e * scale + shift, largest)
        out_gradient = tl.where(largest <= 0, 0.0, out_gradient)
        tl.store(of_y + place, _back(a, tl.where(chosen == 0, out_gradient, 0.0), scale, mean, inverse, plain, weighed).to(kind), mask=mask)
        tl.store(
            of_y + place + C, _back(b, tl.where(chosen == 1, out_gradient, 0.0), scale, mean, inverse, plain, weighed).to(kind), mask=mask
        )
        low = of_y + place + W * C
        tl.store(low, _back(d, tl.where(chosen == 2, out_gradient, 0.0), scale, mean, inverse, plain, weighed).to(kind), mask=mask)
        tl.store(low + C, _back(e, tl.where(chosen == 3, out_gradient, 0.0), scale, mean, inverse, plain, weighed).to(kind), mask=mask)
    else:
        out_gradient = tl.where(largest <= 0, 0.0, out_gradient)
        tl.store(of_y + place, _back(a, out_gradient, scale, mean, inverse, plain, weighed).to(kind), mask=mask)
