"""Convolutions of N hosts at once for GPUs, as Triton kernels over tiles of pixels.

cuDNN's grouped kernels are made for many channels per group. Hosts have 8 to 64, and their convolutions are bound by memory. Here a program
takes one host and a tile of pixels, gathers the windows of these pixels through the cache into a matrix [M, K] that is never written to
memory, and multiplies it by the host's own kernel. The number of hosts only changes the number of programs, so little is compiled again
when it changes.

Activations are [B, N, C, H, W] with the channels innermost in memory, as these kernels write them: the channels of a pixel are then one
access. Inputs in another memory format work too, but are slower. The kernels support stride 1 and one group, in one or two dimensions of
space. The gradient of the input is then itself such a convolution, with the kernel flipped. `convolve_and_describe` also returns the mean
and variance of every channel, for the norm that follows: they are computed while the outputs are still in registers.

Shapes: B = samples, N = hosts, C = channels, O = output channels, H × W = space (a series has H = 1), M = pixels of a tile, T = tiles,
K = positions of the kernel × channels, these rounded up to a power of two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128  # pixels per program
_STEP = 64  # pixels per step of the sum in the gradient of a kernel
_SPLITS = 32  # programs per host that divide that sum over pixels between them
_WARPS = 4


class Shape(NamedTuple):
    """The sizes of a convolution. They are constants when the kernels are compiled."""

    channels: int
    height: int
    width: int
    outputs: int
    kernel_height: int
    kernel_width: int
    pad_height: int
    pad_width: int
    dilation_height: int
    dilation_width: int

    @property
    def out_height(self) -> int:
        return self.height + 2 * self.pad_height - self.dilation_height * (self.kernel_height - 1)

    @property
    def out_width(self) -> int:
        return self.width + 2 * self.pad_width - self.dilation_width * (self.kernel_width - 1)

    @property
    def block(self) -> int:
        """Channels, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.channels))

    @property
    def depth(self) -> int:
        """K, the columns of the matrix of windows."""
        return self.block * self.kernel_height * self.kernel_width

    def turned(self) -> Shape:
        """Return the shape of the convolution that computes the gradient of the input."""
        return Shape(
            self.outputs,
            self.out_height,
            self.out_width,
            self.channels,
            self.kernel_height,
            self.kernel_width,
            self.dilation_height * (self.kernel_height - 1) - self.pad_height,
            self.dilation_width * (self.kernel_width - 1) - self.pad_width,
            self.dilation_height,
            self.dilation_width,
        )

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the kernels, by their names there."""
        return {
            "C": self.channels,
            "CP": self.block,
            "H": self.height,
            "W": self.width,
            "OUT": self.outputs,
            "OH": self.out_height,
            "OW": self.out_width,
            "KH": self.kernel_height,
            "KW": self.kernel_width,
            "PH": self.pad_height,
            "PW": self.pad_width,
            "DH": self.dilation_height,
            "DW": self.dilation_width,
        }


def fits(shape: Shape) -> bool:
    """Return whether the kernels support a shape: its padding must be narrower than the kernel.

    With a wider one, the convolution that computes the gradient of the input would need a negative padding.
    """
    turned = shape.turned()
    return min(turned.pad_height, turned.pad_width) >= 0


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """Convolve x [B, N, C, H, W] with kernels [N, O, C, kh, kw]. Return [B, N, O, H, W] in the precision of x."""
    outputs: Tensor = _Convolution.apply(x, weight, bias, shape)  # type: ignore[no-untyped-call]
    return outputs


def convolve_and_describe(x: Tensor, weight: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve without a bias. Return the outputs, and the mean and variance of every channel [N, O] in float32, without gradients."""
    outputs, mean, variance = _DescribedConvolution.apply(x, weight, shape)  # type: ignore[no-untyped-call]
    return outputs, mean, variance


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.has_bias = shape, bias is not None
        return _outputs(x, weight, bias, shape)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = _gradients(ctx, gradients[0])
        return of_x, of_weight, of_bias if ctx.has_bias else None, None


class _DescribedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        outputs, sums, spreads = _outputs(x, weight, None, shape, describes=True)
        mean, variance = _merged(sums, spreads, total=len(x) * shape.out_height * shape.out_width)
        ctx.mark_non_differentiable(mean, variance)
        return outputs, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, gradients[0])[:2], None)


def _merged(sums: Tensor, spreads: Tensor, *, total: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance [N, O], given for every tile [N, T, O] the sum and the sum of squared distances from the tile's own mean."""
    counts = torch.full((sums.shape[1], 1), float(_TILE), device=sums.device)
    counts[-1] -= sums.shape[1] * _TILE - total  # the last tile may not be full
    mean = sums.sum(1) / total
    apart = (sums / counts - mean.unsqueeze(1)).square_().mul_(counts)
    return mean, (spreads + apart).sum(1) / total


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the input, of the kernels and of the bias; None where they are not needed."""
    x, weight = ctx.saved_tensors
    shape: Shape = ctx.shape
    gradient = with_channels_innermost(gradient)
    of_x = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = _outputs(gradient, weight.transpose(1, 2).flip(-2, -1), None, shape.turned())[0]
    if any(ctx.needs_input_grad[1:3]):  # one kernel computes both
        of_weight, of_bias = (part.to(weight.dtype) for part in _weight_gradients(x, gradient, shape))
    return of_x, of_weight, of_bias


def with_channels_innermost(x: Tensor) -> Tensor:
    """Return x [B, N, C, H, W] dense, with the channels innermost in memory."""
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


def _block(size: int, most: int) -> int:
    """Return the size rounded up to a power of two, at most `most`, and at least 16, which tensor cores need."""
    return max(min(int(triton.next_power_of_2(size)), most), 16)


def _columns_at_once(shape: Shape) -> int:
    """Return how many columns of the matrix of windows are multiplied at once: 64 if there are no more, else the size that wastes least."""
    return 64 if shape.depth <= 64 else 16 if shape.block <= 16 else 32


def _matrices(weight: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return kernels [N, O, C, kh, kw] as matrices [N, kh, kw, C rounded up, O], that is [N, K, O], with zeros for the added channels."""
    is_padded = shape.block > shape.channels
    make = weight.new_zeros if is_padded else weight.new_empty
    matrices = make(len(weight), shape.kernel_height, shape.kernel_width, shape.block, shape.outputs, dtype=dtype)
    (matrices[:, :, :, : shape.channels] if is_padded else matrices).copy_(weight.permute(0, 3, 4, 2, 1))
    return matrices


def _strides(x: Tensor) -> dict[str, int]:
    """Return the strides within a sample. As compile-time constants they tell the compiler which accesses are contiguous."""
    return {"STRIDE_C": x.stride(2), "STRIDE_H": x.stride(3), "STRIDE_W": x.stride(4)}


def _outputs(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, *, describes: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `_convolve`. Return the outputs [B, N, O, H, W] and, if it `describes`, the sums and spreads of every tile [N, T, O]."""
    samples, hosts = x.shape[:2]
    outputs = x.new_empty(samples, hosts, shape.out_height, shape.out_width, shape.outputs)
    block = _block(shape.outputs, 64)
    tiles = triton.cdiv(samples * shape.out_height * shape.out_width, _TILE)
    described = [x.new_empty(hosts, tiles if describes else 0, shape.outputs, dtype=torch.float32) for _ in range(2)]
    _convolve[(tiles, hosts, triton.cdiv(shape.outputs, block))](
        x,
        _matrices(weight, shape, x.dtype),
        outputs if bias is None else bias,
        outputs,
        *described,
        samples,
        *x.stride()[:2],
        0 if bias is None else bias.stride(0),
        **shape.constants,
        **_strides(x),
        HAS_BIAS=bias is not None,
        DESCRIBES=describes,
        BLOCK_O=block,
        BLOCK_M=_TILE,
        BLOCK_K=_columns_at_once(shape),
        num_warps=_WARPS,
    )
    return outputs.movedim(-1, 2), described[0], described[1]


def _weight_gradients(x: Tensor, gradient: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return the gradients of the kernels [N, O, C, kh, kw] and of a bias [N, O], in float32. The channels of `gradient` are innermost."""
    samples, hosts = x.shape[:2]
    block_o, block_k = _block(shape.outputs, 64), _block(shape.depth, 128)
    pixels = samples * shape.out_height * shape.out_width
    each = triton.cdiv(triton.cdiv(pixels, _SPLITS), _STEP) * _STEP
    splits = triton.cdiv(pixels, each)
    parts = x.new_empty(splits, hosts, shape.depth + 1, shape.outputs, dtype=torch.float32)  # the last row is for the bias
    blocks_k = triton.cdiv(shape.depth, block_k)
    _sum_weight_gradients[(splits, hosts, triton.cdiv(shape.outputs, block_o) * blocks_k)](
        x,
        gradient,
        parts,
        samples,
        each,
        *x.stride()[:2],
        **shape.constants,
        **_strides(x),
        BLOCKS_K=blocks_k,
        BLOCK_O=block_o,
        BLOCK_M=_STEP,
        BLOCK_K=block_k,
        num_warps=_WARPS,
    )
    whole = parts.sum(0)
    kernels = whole[:, :-1].view(hosts, shape.kernel_height, shape.kernel_width, shape.block, shape.outputs)
    return kernels[:, :, :, : shape.channels].permute(0, 4, 3, 1, 2), whole[:, -1]


# Kernels. The offset of a sample has 64 bits; within a sample 32 are enough.


@triton.jit
def _is_inside(row, column, H: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether a pixel is inside the image. As unsigned numbers, negative coordinates are larger than any size."""
    return (row.to(tl.uint32, bitcast=True) < H) & (column.to(tl.uint32, bitcast=True) < W)


@triton.jit
def _windows(  # type: ignore[no-untyped-def]
    x, sample, pixel, k, samples, stride_b, C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    STRIDE_C: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
):  # fmt: skip
    """Load the columns k of the matrix of windows for some output pixels, [M, K]. `x` points to the input of one host."""
    row, column = pixel // OW - PH, pixel % OW - PW
    channel, tap = k % CP, k // CP
    down, right = (tap // KW) * DH, (tap % KW) * DW
    is_inside = _is_inside(row[:, None] + down[None, :], column[:, None] + right[None, :], H, W)
    is_inside &= (tap < KH * KW)[None, :] & (sample < samples)[:, None]
    if C != CP:
        is_inside &= (channel < C)[None, :]
    first = sample.to(tl.int64) * stride_b + (row * STRIDE_H + column * STRIDE_W)
    return tl.load(x + first[:, None] + (channel * STRIDE_C + down * STRIDE_H + right * STRIDE_W)[None, :], mask=is_inside, other=0.0)


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    x,
    matrices,
    bias,
    outputs,
    sums,
    spreads,
    samples,
    stride_b,
    stride_n,
    bias_stride,
    C: tl.constexpr,
    CP: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OUT: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    STRIDE_C: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DESCRIBES: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a tile of pixels of one host, for a block of output channels; with DESCRIBES, its sums and spreads too."""
    tile, host, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    depth: tl.constexpr = CP * KH * KW
    pixels: tl.constexpr = OH * OW
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o = block * BLOCK_O + tl.arange(0, BLOCK_O)
    sample, pixel = m // pixels, m % pixels
    is_pixel, is_output = sample < samples, o < OUT
    own = x + host.to(tl.int64) * stride_n
    matrix = matrices + host.to(tl.int64) * (depth * OUT)
    # Multiply the windows [M, K] by the host's kernel [K, O], BLOCK_K columns at a time.
    total = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        windows = _windows(own, sample, pixel, k, samples, stride_b, C, CP, H, W, OW, KH, KW, PH, PW, DH, DW, STRIDE_C, STRIDE_H, STRIDE_W)
        kernel = tl.load(matrix + k[:, None] * OUT + o[None, :], mask=(k < depth)[:, None] & is_output[None, :], other=0.0)
        total = tl.dot(windows, kernel, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + host * bias_stride + o, mask=is_output, other=0.0).to(tl.float32)[None, :]
    rounded = total.to(outputs.dtype.element_ty)
    places = ((sample.to(tl.int64) * tl.num_programs(1) + host) * pixels + pixel) * OUT
    tl.store(outputs + places[:, None] + o[None, :], rounded, mask=is_pixel[:, None] & is_output[None, :])
    if DESCRIBES:
        # Describe the outputs as they are stored, after rounding.
        found = tl.where(is_pixel[:, None], rounded.to(tl.float32), 0.0)
        count = tl.minimum(samples * pixels - tile * BLOCK_M, BLOCK_M)
        sum_of = tl.sum(found, 0)
        apart = tl.where(is_pixel[:, None], found - (sum_of / count)[None, :], 0.0)
        place = (host * tl.num_programs(0) + tile) * OUT + o
        tl.store(sums + place, sum_of, mask=is_output)
        tl.store(spreads + place, tl.sum(apart * apart, 0), mask=is_output)


@triton.jit
def _sum_weight_gradients(  # type: ignore[no-untyped-def]
    x,
    gradient,
    parts,
    samples,
    each,
    stride_b,
    stride_n,
    C: tl.constexpr,
    CP: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OUT: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    STRIDE_C: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    BLOCKS_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum windows times output gradients over one split of the pixels of one host, for a block of [K, O]; and the gradient of the bias."""
    split, host, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    depth: tl.constexpr = CP * KH * KW
    pixels: tl.constexpr = OH * OW
    o = (block // BLOCKS_K) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = (block % BLOCKS_K) * BLOCK_K + tl.arange(0, BLOCK_K)
    own, hosts = x + host.to(tl.int64) * stride_n, tl.num_programs(1)
    total = tl.zeros((BLOCK_K, BLOCK_O), dtype=tl.float32)
    bias_total = tl.zeros((BLOCK_O,), dtype=tl.float32)
    for start in range(split * each, (split + 1) * each, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        sample, pixel = m // pixels, m % pixels
        windows = _windows(own, sample, pixel, k, samples, stride_b, C, CP, H, W, OW, KH, KW, PH, PW, DH, DW, STRIDE_C, STRIDE_H, STRIDE_W)
        places = ((sample.to(tl.int64) * hosts + host) * pixels + pixel) * OUT
        out_gradient = tl.load(gradient + places[:, None] + o[None, :], mask=(sample < samples)[:, None] & (o < OUT)[None, :], other=0.0)
        total = tl.dot(tl.trans(windows), out_gradient, total, input_precision="ieee")
        bias_total += tl.sum(out_gradient.to(tl.float32), 0)
    place = parts + (split * hosts + host).to(tl.int64) * ((depth + 1) * OUT)
    tl.store(place + k[:, None] * OUT + o[None, :], total, mask=(k < depth)[:, None] & (o < OUT)[None, :])
    if block % BLOCKS_K == 0:  # the bias has no K: one of the blocks stores it
        tl.store(place + depth * OUT + o, bias_total, mask=o < OUT)
