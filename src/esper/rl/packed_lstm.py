"""The LSTM recurrence over packed fragments on the CPU.

A recurrence is many tiny operations in a row, and at the sizes of reinforcement learning the cost of *calling* an operation is most of
its time. So the steps are NumPy calls on the tensors' own memory (measured: 2 µs a call where torch takes 4, and a tanh that is 2.6 times
as fast), and whatever does not depend on the step before is taken out of the loop: the input product and the weight gradients are one
matrix product each, and the local derivatives of all steps are computed at once.

All gates go through one tanh, because σ(x) = ½ + ½·tanh(½x).

Shapes: M = packed steps, F = fragments, b = fragments alive at a step, I = input width, H = hidden width.
Gates are ordered output, input, forget, candidate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

# Products up to this many multiplications go to NumPy, whose BLAS keeps them on the calling thread; larger ones to torch, which obeys
# `torch.set_num_threads`.
_SMALL_PRODUCT = 1 << 18


class PackedLSTM(torch.autograd.Function):
    """`apply(inputs [M, I], hidden [F, H], cell [F, H], weight_ih [I, 4H], weight_hh [H, 4H], bias [4H], sizes) -> hidden [M, H]`."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, inputs: Tensor, hidden: Tensor, cell: Tensor, *weights_and_sizes: Any) -> Tensor:
        weight_ih, weight_hh, bias, sizes = weights_and_sizes
        halves = _half_for_sigmoids(bias)  # [4H]
        gates = torch.addmm(bias * halves, inputs, weight_ih * halves)  # [M, 4H], becomes the activations
        output, cells, tanh_cells = (gates.new_empty(len(inputs), weight_hh.shape[0]) for _ in range(3))
        _run_forward(gates, output, cells, tanh_cells, (hidden, cell), weight_hh * halves, sizes)
        ctx.save_for_backward(inputs, hidden, cell, weight_ih, weight_hh, gates, output, cells, tanh_cells)
        ctx.sizes = sizes
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, hidden, cell, weight_ih, weight_hh, gates, output, cells, tanh_cells = ctx.saved_tensors
        before = _previous(output, hidden, ctx.sizes)
        local = _local_derivatives(gates, _previous(cells, cell, ctx.sizes), tanh_cells)
        grad_gates, grad_cell = _run_backward(grad_output.clone(), gates, local, weight_hh.t().contiguous(), ctx.sizes)
        grad_inputs = grad_gates @ weight_ih.t() if ctx.needs_input_grad[0] else None
        grad_hidden = grad_gates[: len(hidden)] @ weight_hh.t() if ctx.needs_input_grad[1] else None
        return grad_inputs, grad_hidden, grad_cell, inputs.t() @ grad_gates, before.t() @ grad_gates, grad_gates.sum(0), None


def _half_for_sigmoids(bias: Tensor) -> Tensor:
    """½ for the three gates that are sigmoids, 1 for the candidate."""
    halves = torch.full_like(bias, 0.5)
    halves[3 * len(bias) // 4 :] = 1.0
    return halves


def _run_forward(
    gates: Tensor, output: Tensor, cells: Tensor, tanh_cells: Tensor, initial: tuple[Tensor, Tensor], recurrent: Tensor, sizes: list[int]
) -> None:
    """Fills `output`, `cells` and `tanh_cells` [M, H] and turns `gates` [M, 4H] into its activations."""
    width = output.shape[1]
    product = _Product(recurrent, sizes[0])
    all_gates, all_output, all_cells, all_tanh = (tensor.numpy() for tensor in (gates, output, cells, tanh_cells))
    hidden, cell = (tensor.numpy() for tensor in initial)
    scratch = np.empty_like(all_output[: sizes[0]])
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        first += size
        gate, out, new_cell, tanh_cell = all_gates[rows], all_output[rows], all_cells[rows], all_tanh[rows]
        product.add_to(gate, hidden[:size])
        np.tanh(gate, out=gate)
        sigmoids = gate[:, : 3 * width]
        sigmoids *= 0.5
        sigmoids += 0.5
        np.multiply(gate[:, 2 * width : 3 * width], cell[:size], out=new_cell)
        new_cell += np.multiply(gate[:, width : 2 * width], gate[:, 3 * width :], out=scratch[:size])
        np.tanh(new_cell, out=tanh_cell)
        np.multiply(gate[:, :width], tanh_cell, out=out)
        hidden, cell = out, new_cell


def _run_backward(
    grad_hidden: Tensor, gates: Tensor, local: tuple[Tensor, Tensor, Tensor], recurrent: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """The gradients of the gates before their activations [M, 4H] and of the initial cell [F, H]. Uses up `grad_hidden` [M, H]."""
    width = recurrent.shape[1]
    product = _Product(recurrent, sizes[0])
    grad_gates = torch.empty_like(gates)
    grad_cell = gates.new_zeros(sizes[0], width)
    all_hidden, all_gates, all_grads, cell = (tensor.numpy() for tensor in (grad_hidden, gates, grad_gates, grad_cell))
    by_hidden, by_cell, carry = (tensor.numpy() for tensor in local)
    scratch = np.empty_like(cell)
    first = len(all_hidden)
    later: Array | None = None  # the gate gradients one step later
    for size in reversed(sizes):
        first -= size
        rows = slice(first, first + size)
        hidden, grads, alive = all_hidden[rows], all_grads[rows], cell[:size]
        if later is not None:
            product.add_to(hidden[: len(later)], later)
        alive += np.multiply(hidden, carry[rows], out=scratch[:size])
        np.multiply(hidden, by_hidden[rows], out=grads[:, :width])
        np.multiply(alive[:, None], by_cell[rows], out=grads[:, width:].reshape(size, 3, width))
        alive *= all_gates[rows, 2 * width : 3 * width]
        later = grads
    return grad_gates, grad_cell


class _Product:
    """`target += rows @ matrix` for the rows of one step, by whichever library is quicker at that size."""

    def __init__(self, matrix: Tensor, max_rows: int) -> None:
        self.matrix, self.array = matrix, matrix.numpy()
        self.scratch = np.empty((max_rows, matrix.shape[1]), dtype=self.array.dtype)

    def add_to(self, target: Array, rows: Array) -> None:
        if len(rows) * self.array.size <= _SMALL_PRODUCT:
            target += np.dot(rows, self.array, out=self.scratch[: len(rows)])
        else:
            torch.from_numpy(target).addmm_(torch.from_numpy(rows), self.matrix)


def _previous(packed: Tensor, initial: Tensor, sizes: list[int]) -> Tensor:
    """What each packed step found: the packed value one step earlier, or the initial one."""
    counts = np.array(sizes, dtype=np.int64)
    earlier = np.arange(sizes[0], len(packed)) - np.repeat(counts[:-1], counts[1:])
    return torch.cat((initial, packed.index_select(0, torch.from_numpy(earlier))))


def _local_derivatives(gates: Tensor, cell_before: Tensor, tanh_cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per step: d(output gate)/dh [M, H], d(input, forget, candidate)/dc [M, 3, H], and dc/dh [M, H]."""
    width = tanh_cell.shape[1]
    out, inp, _, candidate = gates.chunk(4, dim=1)
    sigmoids = gates[:, : 3 * width]
    slopes = torch.addcmul(sigmoids, sigmoids, sigmoids, value=-1.0)  # σ' = σ - σ²
    by_hidden = slopes[:, :width] * tanh_cell
    by_cell = gates.new_empty(len(gates), 3, width)
    torch.mul(slopes[:, width : 2 * width], candidate, out=by_cell[:, 0])
    torch.mul(slopes[:, 2 * width :], cell_before, out=by_cell[:, 1])
    torch.addcmul(inp, inp * candidate, candidate, value=-1.0, out=by_cell[:, 2])
    carry = torch.addcmul(out, out * tanh_cell, tanh_cell, value=-1.0)
    return by_hidden, by_cell, carry
