"""The table of lowerings, and the lowerings of torch's own layers.

A lowering computes for N hosts what a module's `forward` computes for one. It is a function of the module (its settings, not its weights),
a scope and the input. Register one for a module of your own in the same way:

    @lowers(Doubled)
    def doubled(module: Doubled, scope: Scope, x: Tensor) -> Tensor:
        return 2 * scope.child("layer", x)

A layer takes its input in any memory format. Where samples are innermost in memory, as after an unfolded convolution, they stay innermost.

Shapes: B = samples of each host, N = hosts, C = channels, S... = space, D = features. Activations are [B, N, ...], weights and buffers
[N, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.torch_internals import BatchNormBase

Convolution = Literal["grouped", "unfolded", "tiled"]


@dataclass(frozen=True, slots=True)
class Scope:
    """One submodule in one pass: its tensors and its children."""

    name: str  # full name in the host; empty for the host itself
    tensors: Mapping[str, Tensor]  # of the whole host, by full name
    training: bool
    convolution: Convolution | None  # the way to convolve; None: chosen by device and size
    run: Callable[[str, Tensor], Tensor]  # runs the submodule of this full name
    slots: frozenset[str] = frozenset()  # full names of the submodules whose outputs may be replaced

    def full_name(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def tensor(self, name: str) -> Tensor:
        """Return a tensor [N, ...] by its name in this submodule."""
        return self.tensors[self.full_name(name)]

    def get(self, name: str) -> Tensor | None:
        """Return a tensor by its name in this submodule; None where there is none, as in a layer without bias."""
        return self.tensors.get(self.full_name(name))

    def child(self, name: str, x: Tensor) -> Tensor:
        """Return the output of a child for x, with the seeds that grow after it."""
        return self.run(self.full_name(name), x)

    def inside(self, name: str) -> Scope:
        """Return the scope of a child, for lowerings that compute several children in one kernel."""
        return replace(self, name=self.full_name(name))

    def has_slots_inside(self) -> bool:
        """Return whether a descendant of this submodule has a slot."""
        return any(slot.startswith(self.full_name("")) for slot in self.slots)


Lowering = Callable[[Any, Scope, Tensor], Tensor]  # module, scope, input -> output
Fits = Callable[[Any, bool], bool]  # module, training -> whether a lowering supports it


def _always(module: nn.Module, training: bool) -> bool:
    return True


_lowerings: dict[type[nn.Module], tuple[Lowering, Fits]] = {}


def lowers(*kinds: type[nn.Module], fits: Fits = _always) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as the lowering of these classes. Subclasses are not included: they may compute something else.

    `fits(module, training)` returns whether the lowering supports the settings of a module. A module that it refuses runs through vmap.
    """

    def register(lowering: Lowering) -> Lowering:
        _lowerings.update(dict.fromkeys(kinds, (lowering, fits)))
        return lowering

    return register


def lowering_of(module: nn.Module, *, training: bool) -> Lowering | None:
    """Return the lowering of a module; None where there is none, or where it would bypass hooks of the module."""
    lowering, fits = _lowerings.get(type(module), (None, _always))
    has_hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return lowering if not has_hooks and fits(module, training) else None


@lowers(nn.Linear)
def linear(layer: nn.Linear, scope: Scope, x: Tensor) -> Tensor:
    weight, bias = scope.tensor("weight"), scope.get("bias")  # [N, out, D], [N, out]
    if x.ndim == 3 and _has_samples_innermost(x):
        columns = x.permute(1, 2, 0)  # [N, D, B]
        outputs = torch.bmm(weight, columns) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, columns)
        return outputs.permute(2, 0, 1)
    rows = x.transpose(0, 1)  # [N, B, ..., D]
    # Copy the weights, which are small: on a CPU a product with a transposed view takes up to ten times as long.
    flat, kernel = rows.flatten(1, -2), weight.mT.contiguous()
    outputs = torch.bmm(flat, kernel) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, kernel)
    return outputs.view(*rows.shape[:-1], -1).transpose(0, 1)


@lowers(nn.Embedding)
def embedding(layer: nn.Embedding, scope: Scope, x: Tensor) -> Tensor:
    weight = scope.tensor("weight")  # [N, entries, D]
    # Look up in one table of all hosts' entries. `first` [N] is the number of each host's first entry in it.
    first = torch.arange(len(weight), device=x.device) * layer.num_embeddings
    outputs = F.embedding(x + first.view(-1, *[1] * (x.ndim - 2)), weight.flatten(0, 1))
    return without_gradient_of_padding(layer, x, outputs)


def without_gradient_of_padding(layer: nn.Embedding, x: Tensor, outputs: Tensor) -> Tensor:
    """Return the outputs of an embedding, detached where the input is padding: the entry for padding does not learn."""
    return outputs if layer.padding_idx is None else torch.where((x == layer.padding_idx).unsqueeze(-1), outputs.detach(), outputs)


@lowers(nn.BatchNorm1d, nn.BatchNorm2d)
def batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, scope: Scope, x: Tensor) -> Tensor:
    """Normalise every host by its own statistics: to the kernel, N hosts of C channels are N·C channels."""
    gain, bias = _flat(scope.get("weight")), _flat(scope.get("bias"))
    mean, variance = scope.get("running_mean"), scope.get("running_var")
    uses_batch = scope.training or mean is None
    if scope.training and mean is not None and variance is not None:
        # With a momentum of 1 the kernel writes the batch statistics here. It cannot update the rows: they need not be contiguous.
        mean, variance = mean.new_zeros(mean.numel()), variance.new_zeros(variance.numel())
    else:
        mean, variance = _flat(mean), _flat(variance)

    def norm(merged: Tensor) -> Tensor:
        return F.batch_norm(merged, mean, variance, gain, bias, uses_batch, momentum=1.0, eps=layer.eps)

    outputs = _on_channels(x, norm)
    if scope.training and mean is not None and variance is not None:
        track(layer, scope, mean, variance)
    return outputs


@torch.no_grad()
def track(layer: BatchNormBase, scope: Scope, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics towards these batch statistics: by the momentum or, without one, to the mean of all batches so far."""
    count = scope.tensor("num_batches_tracked").add_(1)  # [N]
    share = 1 / count.to(mean.dtype).unsqueeze(1) if layer.momentum is None else layer.momentum
    for name, new in (("running_mean", mean), ("running_var", variance)):
        running = scope.tensor(name)  # [N, C]
        running.lerp_(new.view_as(running), share)


def _flat(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor [N, C] as [N·C]; for a single host as a copy.

    cuDNN reads a gain in steps of 16 bytes, and the row of a single host may start at any address.
    """
    return None if tensor is None else tensor.flatten() if len(tensor) > 1 else tensor.flatten().clone()


def _on_channels(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Run `compute` on x as [B, N·C, S...] or, where samples are innermost, as [1, N·C, S...·B]."""
    if x.ndim > 3 and _has_samples_innermost(x):
        last = x.movedim(0, -1)  # [N, C, S..., B]
        return compute(last.reshape(1, last.shape[0] * last.shape[1], -1)).view(last.shape).movedim(-1, 0)
    return compute(x.flatten(1, 2)).view(x.shape)


@lowers(nn.GroupNorm)
def group_norm(layer: nn.GroupNorm, scope: Scope, x: Tensor) -> Tensor:
    gain, bias = _flat(scope.get("weight")), _flat(scope.get("bias"))
    return F.group_norm(x.flatten(1, 2), x.shape[1] * layer.num_groups, gain, bias, layer.eps).view(x.shape)


@lowers(nn.LayerNorm)
def layer_norm(layer: nn.LayerNorm, scope: Scope, x: Tensor) -> Tensor:
    normed = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    shape = (x.shape[1], *[1] * (x.ndim - 2 - len(layer.normalized_shape)), *layer.normalized_shape)
    gain, bias = scope.get("weight"), scope.get("bias")
    outputs = normed if gain is None else normed * gain.view(shape)
    return (outputs if bias is None else outputs + bias.view(shape)).to(normed.dtype)


def _pool_each_channel(x: Tensor, pool: Callable[[Tensor], Tensor], spatial: int) -> Tensor:
    """Run `pool` on x as images [B, N·C, H, W] or, where samples are innermost, as [N·C, B, H, W], which is channels-last for torch."""
    images = x if spatial == 2 else x.unsqueeze(-2)
    if _has_samples_innermost(x):
        by_channel = pool(images.permute(1, 2, 0, 3, 4).flatten(0, 1))
        pooled = by_channel.view(*x.shape[1:3], *by_channel.shape[1:]).permute(2, 0, 1, 3, 4)
    else:
        merged = pool(images.flatten(1, 2))
        pooled = merged.view(*x.shape[:3], *merged.shape[2:])
    return pooled if spatial == 2 else pooled.squeeze(-2)


def _pair(value: Any, spatial: int, *, row: int) -> tuple[int, int]:
    """Return a setting as (height, width). A series (one spatial dimension) is an image of one row; `row` is the setting of its height."""
    sizes = tuple(value) if isinstance(value, tuple | list) else (value,) * spatial
    return (row, sizes[0]) if spatial == 1 else (sizes[0], sizes[1])


@lowers(nn.MaxPool1d, nn.MaxPool2d, fits=lambda layer, training: not layer.return_indices)
def max_pool(layer: nn.MaxPool1d | nn.MaxPool2d, scope: Scope, x: Tensor) -> Tensor:
    spatial = x.ndim - 3
    kernel, stride = _pair(layer.kernel_size, spatial, row=1), _pair(layer.stride, spatial, row=1)
    padding, dilation = _pair(layer.padding, spatial, row=0), _pair(layer.dilation, spatial, row=1)

    def pool(images: Tensor) -> Tensor:
        return F.max_pool2d(images, kernel, stride, padding, dilation, layer.ceil_mode)

    return _pool_each_channel(x, pool, spatial)


@lowers(nn.AvgPool1d, nn.AvgPool2d)
def average_pool(layer: nn.AvgPool1d | nn.AvgPool2d, scope: Scope, x: Tensor) -> Tensor:
    spatial = x.ndim - 3
    kernel, stride = _pair(layer.kernel_size, spatial, row=1), _pair(layer.stride, spatial, row=1)
    padding, divisor = _pair(layer.padding, spatial, row=0), getattr(layer, "divisor_override", None)

    def pool(images: Tensor) -> Tensor:
        return F.avg_pool2d(images, kernel, stride, padding, layer.ceil_mode, layer.count_include_pad, divisor)

    return _pool_each_channel(x, pool, spatial)


@lowers(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
def adaptive_average_pool(layer: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d, scope: Scope, x: Tensor) -> Tensor:
    spatial = x.ndim - 3
    size: Any = _pair(layer.output_size, spatial, row=1)  # a size of None stays as it is
    return _pool_each_channel(x, lambda images: F.adaptive_avg_pool2d(images, size), spatial)


@lowers(nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)
def elementwise(layer: nn.Module, scope: Scope, x: Tensor) -> Tensor:
    outputs: Tensor = layer(x)
    return outputs


@lowers(nn.Dropout, nn.Dropout1d, nn.Dropout2d, fits=lambda layer, training: layer.p == 0 or not training)
def no_dropout(layer: nn.Module, scope: Scope, x: Tensor) -> Tensor:
    return x


@lowers(nn.Flatten, fits=lambda layer, training: layer.start_dim > 0)
def flatten(layer: nn.Flatten, scope: Scope, x: Tensor) -> Tensor:
    """Flatten. The layer's dimensions are those of one host's [B, ...], so with the host dimension they are one higher."""
    return x.flatten(layer.start_dim + 1, layer.end_dim + 1 if layer.end_dim > 0 else layer.end_dim)


def mean_over_space(x: Tensor) -> Tensor:
    """Return the mean [B, N, C] of x [B, N, C, S...] over space."""
    if _has_samples_innermost(x):
        return x.movedim(0, -1).flatten(2, -2).mean(dim=2).movedim(-1, 0)
    return x.flatten(3).mean(dim=3)


def _has_samples_innermost(x: Tensor) -> bool:
    return x.stride(0) == 1
