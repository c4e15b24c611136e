"""A linear layer, with or without tanh behind it, that is quick at the sizes of reinforcement learning on the CPU.

Two things are slow there in plain torch (measured on Arm). `torch.nn.functional.linear` multiplies by a transposed weight, and torch hands
such products to a library that prepares itself anew for every call, at up to ten times the cost of the product when it is small; here the
weight is transposed first, which costs next to nothing, and the product is a plain one, forward and backward. And NumPy's tanh takes
less than half the time of torch's, and the one of our Numba kernels (`esper.jit`) less than half of NumPy's. On other devices, under
autocast and when compiled, the layer is torch's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.jit import has_numba

# Arrays of at least this size, such as those of a minibatch, take the kernel's tanh. Smaller ones take NumPy's, so that acting in the
# environments does not wait for Numba's import.
_KERNEL_SIZE = 1 << 14


class Dense(nn.Linear):
    """`torch.nn.Linear` for rows [B, inputs], followed by tanh if so asked; parameters and results are torch's."""

    def __init__(self, inputs: int, outputs: int, *, has_tanh: bool = False) -> None:
        super().__init__(inputs, outputs)
        self.has_tanh = has_tanh

    def forward(self, rows: Tensor) -> Tensor:
        # NumPy's tanh would be missing in what is recorded.
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
            grad = torch.addcmul(grad, grad * outputs[0], outputs[0], value=-1.0)  # through tanh: 1 - tanh²
        grad_rows = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_rows, grad.t() @ rows, grad.sum(0), None
