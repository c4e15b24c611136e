"""The networks around the recurrent core: a fast linear layer, MLPs, and encoders of observations.

`Dense` is a linear layer, with or without tanh, that is fast on the CPU at the sizes of reinforcement learning. Two things are slow there
in plain torch (measured on Arm). First, `torch.nn.functional.linear` multiplies by a transposed weight, and torch gives such products to a
library whose preparation for each call costs up to ten times a small product. `Dense` transposes the weight first, which costs next to
nothing, and then uses a plain product, forward and backward. Second, NumPy's tanh takes less than half the time of torch's, and that of the
Numba kernels (`esper.rl.lstm_kernels`) less than half of NumPy's. On other devices, under autocast and when compiled, the layer is
torch's own.

Shapes: B = any leading dimension (environments, or packed steps).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.jit import has_numba
from esper.vecenv import Obs, ObservationSpec

# Arrays of at least this size, such as those of a minibatch, use the kernel's tanh. Smaller ones use NumPy's, so that acting does not wait
# for the import of Numba.
_KERNEL_SIZE = 1 << 14


class Dense(nn.Linear):
    """A `torch.nn.Linear` for rows [B, inputs], followed by tanh if `has_tanh`. Parameters and results are those of torch."""

    def __init__(self, inputs: int, outputs: int, *, has_tanh: bool = False) -> None:
        super().__init__(inputs, outputs)
        self.has_tanh = has_tanh

    def forward(self, rows: Tensor) -> Tensor:
        # A compiled or traced graph would not contain NumPy's tanh.
        is_recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if rows.device.type != "cpu" or rows.dim() != 2 or torch.is_autocast_enabled("cpu") or is_recorded:
            plain = super().forward(rows)
            return plain.tanh() if self.has_tanh else plain
        if not torch.is_grad_enabled():
            return _forward(rows, self.weight, self.bias, self.has_tanh)
        result: Tensor = _Layer.apply(rows, self.weight, self.bias, self.has_tanh)  # type: ignore[no-untyped-call]
        return result


def _forward(rows: Tensor, weight: Tensor, bias: Tensor, has_tanh: bool) -> Tensor:
    output = torch.addmm(bias, rows, weight.t().contiguous())
    if has_tanh:
        _tanh_in_place(output.numpy())
    return output


def _tanh_in_place(array: NDArray[Any]) -> None:
    if array.size >= _KERNEL_SIZE and array.dtype == np.float32 and has_numba():
        from esper.rl.lstm_kernels import tanh_in_place

        tanh_in_place(array.reshape(-1))
    else:
        np.tanh(array, out=array)


class _Layer(torch.autograd.Function):
    """`_forward` with its gradient, which torch cannot derive because the tanh is not torch's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, has_tanh: bool) -> Tensor:
        output = _forward(rows, weight, bias, has_tanh)
        ctx.has_tanh = has_tanh
        ctx.save_for_backward(rows, weight, *((output,) if has_tanh else ()))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, *outputs = ctx.saved_tensors
        if ctx.has_tanh:
            grad = torch.addcmul(grad, grad * outputs[0], outputs[0], value=-1.0)  # times 1 - tanh²
        grad_rows = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_rows, grad.t() @ rows, grad.sum(0), None


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU}
_GAIN = 2.0**0.5  # of the first weights of hidden layers
_SMALLEST_FOR_NATURE = 36  # pixels on a side; the last convolution of "nature" reduces them to one
_SMALLEST_IMAGE = 8  # pixels on a side; smaller arrays are treated as vectors


def mlp(sizes: Sequence[int], activation: str) -> nn.Sequential:
    """Return linear layers of these widths, each followed by the activation."""
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(sizes):
        layers.append(Dense(width_in, width_out, has_tanh=activation == "tanh"))
        if activation != "tanh":
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


def initialize(module: nn.Module, generator: torch.Generator, *, gain: float = _GAIN) -> None:
    """Draw orthogonal weights and set zero biases for every linear layer and convolution inside."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain=gain, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def is_image(shape: tuple[int, ...]) -> bool:
    """Return whether a shape is that of an image: three dimensions, two of them large enough for convolutions, [H, W, C] or [C, H, W]."""
    return len(shape) == 3 and sorted(shape)[1] >= _SMALLEST_IMAGE


def module_names(parts: Iterable[str]) -> dict[str, str]:
    """Return part of an observation -> name in a module of torch, which allows no "." and no names of its own attributes."""
    taken = {*dir(nn.ModuleDict()), *dir(nn.ParameterDict())}
    return {name: f"part {index}" if "." in name or name in taken or not name else name for index, name in enumerate(parts)}


class ImageEncoder(nn.Module):
    """Three strided convolutions for an image, [C, H, W] or [H, W, C] (the channels are the smaller of the two outer dimensions).

    The convolutions of "nature" are those of Mnih et al. (2015), for images of at least 36 pixels on each side: 84 × 84 become 7 × 7, with
    less than half the work of "small". "auto" uses "nature" wherever it fits.
    """

    def __init__(self, shape: tuple[int, ...], kind: str = "small") -> None:
        super().__init__()
        self.channels_last = shape[2] < shape[0]
        channels = shape[2] if self.channels_last else shape[0]
        is_large = sorted(shape)[1] >= _SMALLEST_FOR_NATURE
        if kind == "nature" and not is_large:
            raise ValueError(f"image_encoder = 'nature' needs images of at least {_SMALLEST_FOR_NATURE} pixels on each side; got {shape}")
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 32, 8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3), nn.ReLU(),
            nn.Flatten(),
        ) if is_large and kind != "small" else nn.Sequential(
            nn.Conv2d(channels, 32, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        with torch.no_grad():
            self.output_size = self.convolutions(self._channels_first(torch.zeros(1, *shape))).shape[1]

    def _channels_first(self, images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2) if self.channels_last else images

    def forward(self, images: Tensor) -> Tensor:
        # Convolutions are fastest with the channels innermost in memory, whatever the order of the input.
        scaled = self._channels_first(images).to(torch.get_default_dtype(), memory_format=torch.channels_last)
        if images.dtype == torch.uint8:
            scaled = scaled / 255.0
        features: Tensor = self.convolutions(scaled)
        return features


class Encoder(nn.Module):
    """Turns any observation into one vector: images through convolutions, everything else flattened, then an MLP of these widths."""

    def __init__(self, spec: ObservationSpec, sizes: Sequence[int], activation: str, image_encoder: str = "small") -> None:
        super().__init__()
        self.names = tuple(sorted(spec))
        images = {name: ImageEncoder(spec[name].shape, image_encoder) for name in self.names if is_image(spec[name].shape)}
        names = module_names(self.names)
        self.images = nn.ModuleDict({names[name]: encoder for name, encoder in images.items()})
        self._image_names = {name: names[name] for name in images}
        widths = [images[name].output_size if name in images else math.prod(spec[name].shape) for name in self.names]
        self.layers = mlp([sum(widths), *sizes], activation)
        self.output_size = sizes[-1] if sizes else sum(widths)

    def joined(self, obs: Obs) -> Tensor:
        """Return all parts of an observation as one vector [B, width], before the MLP."""
        inside = self._image_names
        parts = [self.images[inside[name]](obs[name]) if name in inside else _flat(obs[name]) for name in self.names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def forward(self, obs: Obs) -> Tensor:
        features: Tensor = self.layers(self.joined(obs))
        return features


def _flat(values: Tensor) -> Tensor:
    flat = values.reshape(values.shape[0], -1)  # works for single numbers [B] too
    return flat if flat.is_floating_point() else flat.to(torch.float32)
