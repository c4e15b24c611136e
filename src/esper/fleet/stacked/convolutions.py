"""Convolutions of N hosts at once, in three ways.

    tiled       Triton kernels of `esper.fleet.kernels.convolution`: fastest on GPUs, for the layers they support
    grouped     one grouped convolution over [B, N·C, S...]: for all other layers on GPUs
    unfolded    all windows copied side by side, then one batched product [N, O, C·K] × [N, C·K, S...·B]: fastest on CPUs

The unfolded convolution keeps the samples innermost in memory (its output is a permuted view of [N, O, S..., B]). So a window is copied in
runs of B numbers, and the norm, activation and pooling after it read contiguous memory. benchmarks/fleet/layers.py measures the grouped and
the unfolded one.

Shapes: B = samples, N = hosts, C = channels, O = output channels, S... = one or two dimensions of space, K = positions of the kernel.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.fleet.stacked.layers import Convolution, Scope, lowers
from esper.torch_internals import ConvBase

Conv = nn.Conv1d | nn.Conv2d | ConvBase  # always one of the first two; for mypy, the layer of a `ConvBlock` is a ConvBase
_WIDEST_TILED = 64  # most channels of a layer that the tiled kernels are chosen for
_AT_ALL = (slice(None), slice(None))  # index of all hosts and channels


def choose_convolution(device: torch.device, dtype: torch.dtype, channels: int) -> Convolution:
    """Return the fastest way, as measured: unfolded on a CPU; tiled on a GPU, in half precision and for narrow layers; else grouped.

    Milliseconds of a training step of 32 hosts on two cores of a Neoverse-N1, grouped and unfolded: digits 4-8-16 at 64 samples 53 and 26,
    digits 16-32-64 292 and 83, series 2-4-8 at 100 samples 29 and 14. Trained one by one, these hosts took 178, 369 and 171. On an NVIDIA
    H200, 64 hosts of 8-16-32 channels at 512 images of 32 × 32 in bfloat16, grouped and tiled: 23.7 and 8.0.
    """
    if device.type == "cpu":
        return "unfolded"
    is_half_and_narrow = dtype in (torch.bfloat16, torch.float16) and channels <= _WIDEST_TILED
    return "tiled" if is_half_and_narrow and has_triton() else "grouped"


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def tiled_shape(layer: Conv, scope: Scope, x: Tensor) -> Any:
    """Return the shape of a convolution for the tiled kernels; None where they do not compute this layer on this input."""
    if _way(layer, scope, x) != "tiled" or layer.groups > 1 or layer.padding_mode != "zeros" or set(layer.stride) != {1}:
        return None
    from esper.fleet.kernels import convolution as tiled

    windows = Windows.of(layer)
    if any(before != after for before, after in windows.padding):
        return None
    pads = tuple(before for before, _ in windows.padding)
    # A series is an image of one row: put a size of 1, or a padding of 0, in front of its settings.
    one, zero = ((1,), (0,)) if windows.spatial == 1 else ((), ())
    height, width = one + tuple(x.shape[3:])
    kernel, padding, dilation = one + windows.kernel, zero + pads, one + windows.dilation
    shape = tiled.Shape(x.shape[2], height, width, layer.out_channels, *kernel, *padding, *dilation)
    return shape if tiled.fits(shape) else None


@lowers(nn.Conv1d, nn.Conv2d, fits=lambda layer, training: layer.padding_mode == "zeros")
def convolution(layer: Conv, scope: Scope, x: Tensor) -> Tensor:
    weight, bias = scope.tensor("weight"), scope.get("bias")
    shape = tiled_shape(layer, scope, x)
    if shape is not None:
        outputs = convolve(shape, weight, bias, x)
        return outputs if x.ndim == 5 else outputs.squeeze(-2)
    return (_unfolded if _way(layer, scope, x) == "unfolded" else _grouped)(layer, weight, bias, x)


def _way(layer: Conv, scope: Scope, x: Tensor) -> Convolution:
    """Return the way to compute a convolution: that of the scope, or else the fastest."""
    return scope.convolution or choose_convolution(x.device, _working_dtype(x), max(layer.in_channels, layer.out_channels))


def convolve(shape: Any, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Convolve x by the tiled kernels. Return images [B, N, O, H, W]."""
    from esper.fleet.kernels import convolution as tiled

    return tiled.convolve(*_as_images(x, weight), bias, shape)


def convolve_and_describe(shape: Any, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve x by the tiled kernels, without a bias. Return images, and the mean and variance of every channel [N, O]."""
    from esper.fleet.kernels import convolution as tiled

    return tiled.convolve_and_describe(*_as_images(x, weight), shape)


def _as_images(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [B, N, C, H, W] in working precision, and kernels [N, O, C, kh, kw]; a series becomes an image of one row."""
    x = _in_working_precision(x)
    return (x, weight) if x.ndim == 5 else (x.unsqueeze(-2), weight.unsqueeze(-2))


def _grouped(layer: Conv, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    hosts = x.shape[1]
    convolve: Any = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
    flat_bias = None if bias is None else bias.flatten()
    groups = hosts * layer.groups
    outputs: Tensor = convolve(x.flatten(1, 2), weight.flatten(0, 1), flat_bias, layer.stride, layer.padding, layer.dilation, groups)
    return outputs.view(len(x), hosts, -1, *outputs.shape[2:])


def _unfolded(layer: Conv, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    hosts, groups = x.shape[1], x.shape[1] * layer.groups
    windows = Windows.of(layer)
    x, weight = _in_working_precision(x), _in_working_precision(weight)
    columns = windows.unfold(x.movedim(0, -1))  # [N, C, K..., S..., B]
    size = columns.shape[-1 - windows.spatial :]
    columns = columns.reshape(groups, -1, size.numel())  # [N·groups, C/groups·K, S...·B]
    kernels = weight.reshape(groups, -1, columns.shape[1])  # [N·groups, O/groups, C/groups·K]
    outputs: Tensor = _Product.apply(kernels, columns)  # type: ignore[no-untyped-call]
    if bias is not None:
        outputs = outputs + bias.reshape(groups, -1, 1).to(outputs.dtype)
    return outputs.view(hosts, -1, *size).movedim(-1, 0)


def _in_working_precision(tensor: Tensor) -> Tensor:
    return tensor.to(_working_dtype(tensor))


def _working_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to which autocast converts the inputs of a convolution."""
    device = tensor.device.type
    is_cast = torch.is_autocast_enabled(device) and tensor.dtype == torch.float32
    return torch.get_autocast_dtype(device) if is_cast else tensor.dtype


class Windows(NamedTuple):
    """The windows of a convolution: the inputs of every output. Each field has an entry per dimension of space."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after

    @classmethod
    def of(cls, layer: Conv) -> Windows:
        if layer.padding == "valid":
            padding = [(0, 0)] * len(layer.kernel_size)
        elif layer.padding == "same":
            totals = [step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
            padding = [(total // 2, total - total // 2) for total in totals]
        else:
            padding = [(int(both), int(both)) for both in layer.padding]
        return cls(tuple(layer.kernel_size), tuple(layer.stride), tuple(layer.dilation), tuple(padding))

    @property
    def spatial(self) -> int:
        return len(self.kernel)

    @property
    def is_pointwise(self) -> bool:
        return set(self.kernel + self.stride) == {1} and not any(map(sum, self.padding))

    def unfold(self, x: Tensor) -> Tensor:
        """Return the windows [N, C, K..., S..., B] of x [N, C, S..., B]."""
        if self.is_pointwise:
            return x.reshape(*x.shape[:2], *self.kernel, *x.shape[2:])
        unfolded: Tensor = _Unfold.apply(x, self)  # type: ignore[no-untyped-call]
        return unfolded

    def padded(self, x: Tensor) -> Tensor:
        return F.pad(x, [0, 0, *(width for both in reversed(self.padding) for width in both)])

    def interior(self, padded: Tensor) -> Tensor:
        """Return the part without padding: the inverse of `padded`."""
        sizes = padded.shape[2:-1]
        return padded[:, :, *(slice(before, size - after) for (before, after), size in zip(self.padding, sizes, strict=True))]

    def seen(self, padded: Tensor) -> Tensor:
        """Return all windows as a view [N, C, K..., S..., B] of a padded input [N, C, S..., B]. Overlapping windows share memory."""
        settings = zip(padded.shape[2:-1], self.kernel, self.stride, self.dilation, strict=True)
        sizes = [(size - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, dilation in settings]
        first, second, *steps, last = padded.stride()
        within = [step * dilation for step, dilation in zip(steps, self.dilation, strict=True)]
        between = [step * stride for step, stride in zip(steps, self.stride, strict=True)]
        shape = (*padded.shape[:2], *self.kernel, *sizes, padded.shape[-1])
        return padded.as_strided(shape, (first, second, *within, *between, last))


class _Unfold(torch.autograd.Function):
    """Copies windows; backward adds their gradients up. Autograd's own backward of such a view takes several times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: Windows) -> Tensor:
        padded = windows.padded(x)
        ctx.windows, ctx.shape = windows, padded.shape
        return windows.seen(padded).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        padded = gradient.new_zeros(ctx.shape)
        seen = ctx.windows.seen(padded)
        # Add up one position of the kernel at a time: at one position, the windows do not overlap.
        for tap in product(*map(range, ctx.windows.kernel)):
            seen[_AT_ALL + tap] += gradient[_AT_ALL + tap]
        return ctx.windows.interior(padded), None


class _Product(torch.autograd.Function):
    """A batched product [.., O, K] × [.., K, M] with K and O small and M large.

    The gradient of the kernels is gradient × columnsᵀ, but BLAS is slow with such a transposed factor. So backward computes
    (columns × gradientᵀ)ᵀ instead, and makes gradientᵀ contiguous where M is small enough for the copy to pay.
    """

    @staticmethod
    def forward(ctx: Any, kernels: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(kernels, columns)
        return torch.bmm(kernels, columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (gradient,), (kernels, columns) = gradients, ctx.saved_tensors
        kernel_gradient = column_gradient = None
        if ctx.needs_input_grad[0]:
            transposed = gradient.mT.contiguous() if gradient.shape[2] <= 512 else gradient.mT
            kernel_gradient = torch.bmm(columns, transposed).mT
        if ctx.needs_input_grad[1]:
            column_gradient = torch.bmm(kernels.mT, gradient)
        return kernel_gradient, column_gradient
