"""What the lowering of a module sees in one pass, and the table of lowerings.

A lowering computes for N hosts what a module's `forward` computes for one. It is a function of the module (its settings, not its weights),
a scope and the input; one for modules of your own is registered in the same way as ours:

    @lowers(Doubled)
    def doubled(module: Doubled, scope: Scope, x: Tensor) -> Tensor:
        return 2 * scope.child("layer", x)

Shapes: B = samples of each host, N = hosts. Activations are [B, N, ...], weights and buffers [N, ...].

Torch's own layers for N hosts at once.

A layer takes its input in any memory layout. Where samples lie innermost, as behind an unfolded convolution, they stay there.

Shapes: B = samples, N = hosts, C = channels, S... = space, D = features. Activations are [B, N, ...], tensors of the state [N, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

Convolution = Literal["grouped", "unfolded", "tiled"]


@dataclass(frozen=True, slots=True)
class Scope:
    """One submodule in one pass."""

    name: str  # in the host; of the host itself it is empty
    tensors: Mapping[str, Tensor]  # of the whole host
    training: bool
    convolution: Convolution | None  # how to convolve; None: as suits device and size
    run: Callable[[str, Tensor], Tensor]  # the submodule of this full name
    slots: frozenset[str] = frozenset()  # full names of the submodules whose outputs somebody wants to see

    def full_name(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def tensor(self, name: str) -> Tensor:
        """[N, ...] by the name that it has in this submodule."""
        return self.tensors[self.full_name(name)]

    def get(self, name: str) -> Tensor | None:
        """None where the submodule has no such tensor, such as a layer without bias."""
        return self.tensors.get(self.full_name(name))

    def child(self, name: str, x: Tensor) -> Tensor:
        """What the submodule of this name makes of x, with what grows behind it."""
        return self.run(self.full_name(name), x)

    def inside(self, name: str) -> Scope:
        """That of a submodule, for who computes several of them as one."""
        return replace(self, name=self.full_name(name))

    def has_slots_inside(self) -> bool:
        return any(slot.startswith(self.full_name("")) for slot in self.slots)


Lowering = Callable[[Any, Scope, Tensor], Tensor]
Fits = Callable[[Any, bool], bool]


def _always(module: nn.Module, training: bool) -> bool:
    return True


_lowerings: dict[type[nn.Module], tuple[Lowering, Fits]] = {}


def lowers(*kinds: type[nn.Module], fits: Fits = _always) -> Callable[[Lowering], Lowering]:
    """Makes the decorated function the lowering of these classes, not of those derived from them, which may compute something else.

    `fits(module, training)` may refuse settings that the lowering cannot honour; such modules run through vmap.
    """

    def register(lowering: Lowering) -> Lowering:
        _lowerings.update(dict.fromkeys(kinds, (lowering, fits)))
        return lowering

    return register


def lowering_of(module: nn.Module, *, training: bool) -> Lowering | None:
    """None for a module that has none, or whose hooks a lowering would pass by."""
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
    flat, kernel = rows.flatten(1, -2), weight.mT.contiguous()  # small, and a transposed one takes up to ten times as long on a CPU
    outputs = torch.bmm(flat, kernel) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, kernel)
    return outputs.view(*rows.shape[:-1], -1).transpose(0, 1)


@lowers(nn.Embedding)
def embedding(layer: nn.Embedding, scope: Scope, x: Tensor) -> Tensor:
    weight = scope.tensor("weight")  # [N, entries, D]
    first = torch.arange(len(weight), device=x.device) * layer.num_embeddings  # [N], where a host's entries begin
    outputs = F.embedding(x + first.view(-1, *[1] * (x.ndim - 2)), weight.flatten(0, 1))
    return without_gradient_of_padding(layer, x, outputs)


def without_gradient_of_padding(layer: nn.Embedding, x: Tensor, outputs: Tensor) -> Tensor:
    """The entry that stands for padding does not learn."""
    return outputs if layer.padding_idx is None else torch.where((x == layer.padding_idx).unsqueeze(-1), outputs.detach(), outputs)


@lowers(nn.BatchNorm1d, nn.BatchNorm2d)
def batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, scope: Scope, x: Tensor) -> Tensor:
    """Statistics are each host's own: to the kernel, N hosts of C channels are N·C channels."""
    gain, bias = _flat(scope.get("weight")), _flat(scope.get("bias"))
    mean, variance = _flat(scope.get("running_mean")), _flat(scope.get("running_var"))
    is_of_batch = scope.training or mean is None
    if scope.training and mean is not None and variance is not None:
        # The kernel fills these by a momentum of 1. It could not update the rows themselves, which are not contiguous.
        mean, variance = torch.zeros_like(mean), torch.zeros_like(variance)

    def norm(merged: Tensor) -> Tensor:
        return F.batch_norm(merged, mean, variance, gain, bias, is_of_batch, momentum=1.0, eps=layer.eps)

    outputs = _on_channels(x, norm)
    if scope.training and mean is not None and variance is not None:
        track(layer, scope, mean, variance)
    return outputs


@torch.no_grad()
def track(layer: _BatchNorm, scope: Scope, mean: Tensor, variance: Tensor) -> None:
    """Moves the running statistics towards these of a batch, by the momentum or, without one, to the mean over all batches so far."""
    count = scope.tensor("num_batches_tracked").add_(1)  # [N]
    share = 1 / count.to(mean.dtype).unsqueeze(1) if layer.momentum is None else layer.momentum
    for name, new in (("running_mean", mean), ("running_var", variance)):
        running = scope.tensor(name)  # [N, C]
        running.mul_(1 - share).add_(new.view_as(running) * share)


def _flat(tensor: Tensor | None) -> Tensor | None:
    """[N·C], of its own: cuDNN reads a gain in steps of 16 bytes, and a row of a single host may begin anywhere."""
    return None if tensor is None else tensor.flatten() if len(tensor) > 1 else tensor.flatten().clone()


def _on_channels(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Runs `compute` on [B, N·C, S...] or, where samples lie innermost, on [1, N·C, S...·B]."""
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
    """Runs `pool` on images [B, N·C, H, W] or, where samples lie innermost, on [N·C, B, H, W], then in torch's channels-last format."""
    images = x if spatial == 2 else x.unsqueeze(-2)
    if _has_samples_innermost(x):
        by_channel = pool(images.permute(1, 2, 0, 3, 4).flatten(0, 1))
        pooled = by_channel.view(*x.shape[1:3], *by_channel.shape[1:]).permute(2, 0, 1, 3, 4)
    else:
        merged = pool(images.flatten(1, 2))
        pooled = merged.view(*x.shape[:3], *merged.shape[2:])
    return pooled if spatial == 2 else pooled.squeeze(-2)


def _pair(value: Any, spatial: int, *, row: int) -> tuple[int, int]:
    """A setting for height and width; a series is an image of one row, for which `row` is the setting."""
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
    size: Any = _pair(layer.output_size, spatial, row=1)  # None keeps a size
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
    """Its dimensions are those of one host's [B, ...]; the hosts are one more."""
    return x.flatten(layer.start_dim + 1, layer.end_dim + 1 if layer.end_dim > 0 else layer.end_dim)


def mean_over_space(x: Tensor) -> Tensor:
    """[B, N, C, S...] to [B, N, C]."""
    if _has_samples_innermost(x):
        return x.movedim(0, -1).flatten(2, -2).mean(dim=2).movedim(-1, 0)
    return x.flatten(3).mean(dim=3)


def _has_samples_innermost(x: Tensor) -> bool:
    return x.stride(0) == 1
