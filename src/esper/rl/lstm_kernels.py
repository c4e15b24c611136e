"""The LSTM recurrence over packed fragments as Numba kernels. Import it only where `esper.jit.has_numba()`.

One call runs all steps of all memories. Two things make it fast. First, products are sums over the last axis of both factors, four rows by
four columns at a time: sixteen sums stay in registers and nothing is stored until they are complete. At the sizes of reinforcement learning
this is faster than a call of BLAS (Arm, 16 rows × 128 by 128 × 512: 69 µs against 80). Second, the operations after a product run while it
is in the first-level cache. Loops are short and store to one array each, so that they vectorise.

Shapes: M = packed steps, F = fragments, G = memories, H = hidden width, T = steps of the longest fragment.
Gates are ordered output, input, forget, candidate. A state holds [h | c] of every memory: [F, 2G, H].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from esper import jit

Array = NDArray[Any]

kernel = jit.compiler([__file__, jit.__file__])


@kernel
def run_forward(gates: Array, output: Array, cells: Array, tanh_cells: Array, state: Array, recurrent: Array, sizes: Array) -> None:
    """Fill `output`, `cells` and `tanh_cells` [M, G, H] and turn `gates` [M, G, 4H] into activations.

    `gates` are given as the products with the inputs. `state` is [F, 2G, H], `recurrent` [G, 4H, H], and `sizes` [T] is the number of
    fragments that have each step.
    """
    width = output.shape[2]
    first = before = 0  # first packed row of this step and of the step before
    for step in range(len(sizes)):
        size = sizes[step]
        for memory in range(output.shape[1]):
            source, of = (state, 2 * memory) if step == 0 else (output, memory)
            _add_products(gates, first, memory, source, before, of, recurrent[memory], size)
            for row in range(size):
                gate, cell = gates[first + row, memory], cells[first + row, memory]
                tanh_cell, out = tanh_cells[first + row, memory], output[first + row, memory]
                earlier = state[row, 2 * memory + 1] if step == 0 else cells[before + row, memory]
                for unit in range(3 * width):
                    gate[unit] = _sigmoid(gate[unit])
                for unit in range(3 * width, 4 * width):
                    gate[unit] = _tanh(gate[unit])
                for unit in range(width):
                    cell[unit] = gate[2 * width + unit] * earlier[unit] + gate[width + unit] * gate[3 * width + unit]
                for unit in range(width):
                    tanh_cell[unit] = _tanh(cell[unit])
                for unit in range(width):
                    out[unit] = gate[unit] * tanh_cell[unit]
        before, first = first, first + size


@kernel
def run_backward(
    grad_output: Array,
    gates: Array,
    cells: Array,
    tanh_cells: Array,
    state: Array,
    weight: Array,
    grad_gates: Array,
    grad_state: Array,
    sizes: Array,
) -> None:
    """Fill `grad_gates` [M, G, 4H], the gradients before the activations, and the gradients of the initial cells in `grad_state`.

    `grad_state` [F, 2G, H] must be zeros. Its rows for the initial hidden states are used as scratch and hold no gradients afterwards.
    `weight` is [G, H, 4H].
    """
    width, one = cells.shape[2], cells.dtype.type(1)  # the literal 1 would turn float32 into float64
    first = len(cells)
    later, later_size = 0, 0  # first packed row of the step after, and the number of fragments that have it
    for step in range(len(sizes) - 1, -1, -1):
        size = sizes[step]
        first -= size
        for memory in range(cells.shape[1]):
            for row in range(size):
                hidden, grad = grad_state[row, 2 * memory], grad_output[first + row, memory]
                for unit in range(width):
                    hidden[unit] = grad[unit]
            _add_products(grad_state, 0, 2 * memory, grad_gates, later, memory, weight[memory], later_size)
            for row in range(size):
                hidden, carried = grad_state[row, 2 * memory], grad_state[row, 2 * memory + 1]
                gate, tanh_cell = gates[first + row, memory], tanh_cells[first + row, memory]
                earlier = state[row, 2 * memory + 1] if step == 0 else cells[first - sizes[step - 1] + row, memory]
                grads = grad_gates[first + row, memory]
                for unit in range(width):
                    carried[unit] += hidden[unit] * gate[unit] * (one - tanh_cell[unit] * tanh_cell[unit])
                for unit in range(width):
                    grads[unit] = hidden[unit] * tanh_cell[unit] * (gate[unit] * (one - gate[unit]))
                for unit in range(width):
                    inp = gate[width + unit]
                    grads[width + unit] = carried[unit] * gate[3 * width + unit] * (inp * (one - inp))
                for unit in range(width):
                    forget = gate[2 * width + unit]
                    grads[2 * width + unit] = carried[unit] * earlier[unit] * (forget * (one - forget))
                for unit in range(width):
                    candidate = gate[3 * width + unit]
                    grads[3 * width + unit] = carried[unit] * gate[width + unit] * (one - candidate * candidate)
                for unit in range(width):
                    carried[unit] *= gate[2 * width + unit]
        later, later_size = first, size


@kernel
def tanh_in_place(numbers: Array) -> None:
    """Replace numbers [any] by their tanh."""
    for index in range(len(numbers)):
        numbers[index] = _tanh(numbers[index])


@kernel
def _add_products(target: Array, to: int, column: int, source: Array, start: int, of: int, matrix: Array, size: int) -> None:
    """Compute `target[to:to + size, column] += source[start:start + size, of] @ matrix.T`, with `matrix` [outputs, inputs].

    Four outputs at a time; for these four rows at a time, then two, then one. Names: rows a to d, outputs 0 to 3.
    """
    outputs, inputs = matrix.shape
    zero = matrix.dtype.type(0)
    for j in range(0, outputs - 3, 4):
        m0, m1, m2, m3 = matrix[j], matrix[j + 1], matrix[j + 2], matrix[j + 3]
        row = 0
        while row + 4 <= size:
            a, b, c, d = source[start + row, of], source[start + row + 1, of], source[start + row + 2, of], source[start + row + 3, of]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = zero
            for k in range(inputs):
                k0, k1, k2, k3 = m0[k], m1[k], m2[k], m3[k]
                a0, a1, a2, a3 = a0 + a[k] * k0, a1 + a[k] * k1, a2 + a[k] * k2, a3 + a[k] * k3
                b0, b1, b2, b3 = b0 + b[k] * k0, b1 + b[k] * k1, b2 + b[k] * k2, b3 + b[k] * k3
                c0, c1, c2, c3 = c0 + c[k] * k0, c1 + c[k] * k1, c2 + c[k] * k2, c3 + c[k] * k3
                d0, d1, d2, d3 = d0 + d[k] * k0, d1 + d[k] * k1, d2 + d[k] * k2, d3 + d[k] * k3
            _add_four(target[to + row, column], j, a0, a1, a2, a3)
            _add_four(target[to + row + 1, column], j, b0, b1, b2, b3)
            _add_four(target[to + row + 2, column], j, c0, c1, c2, c3)
            _add_four(target[to + row + 3, column], j, d0, d1, d2, d3)
            row += 4
        while row + 2 <= size:
            a, b = source[start + row, of], source[start + row + 1, of]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
            for k in range(inputs):
                k0, k1, k2, k3 = m0[k], m1[k], m2[k], m3[k]
                a0, a1, a2, a3 = a0 + a[k] * k0, a1 + a[k] * k1, a2 + a[k] * k2, a3 + a[k] * k3
                b0, b1, b2, b3 = b0 + b[k] * k0, b1 + b[k] * k1, b2 + b[k] * k2, b3 + b[k] * k3
            _add_four(target[to + row, column], j, a0, a1, a2, a3)
            _add_four(target[to + row + 1, column], j, b0, b1, b2, b3)
            row += 2
        if row < size:
            a = source[start + row, of]
            a0 = a1 = a2 = a3 = zero
            for k in range(inputs):
                a0, a1, a2, a3 = a0 + a[k] * m0[k], a1 + a[k] * m1[k], a2 + a[k] * m2[k], a3 + a[k] * m3[k]
            _add_four(target[to + row, column], j, a0, a1, a2, a3)
    for j in range(outputs - outputs % 4, outputs):  # the rest of a width that four does not divide, in the backward pass only
        m0 = matrix[j]
        for row in range(size):
            a = source[start + row, of]
            a0 = zero
            for k in range(inputs):
                a0 += a[k] * m0[k]
            target[to + row, column, j] += a0


@kernel
def _add_four(target: Array, j: int, a0: float, a1: float, a2: float, a3: float) -> None:
    target[j] += a0
    target[j + 1] += a1
    target[j + 2] += a2
    target[j + 3] += a3


@kernel
def _sigmoid(x: Any) -> Any:
    half = type(x)(0.5)
    return half + half * _tanh(half * x)


def _tanh(x: Any) -> Any:
    """Return the tanh of a number in its own precision. In kernels, float32 uses a formula that vectorises. NaN stays NaN."""
    return math.tanh(x)


_ODD = tuple(np.float32(c) for c in (4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08,
                                     -8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16))  # fmt: skip
_EVEN = tuple(np.float32(c) for c in (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06))
_FLAT = np.float32(7.90531110763549805)  # above it tanh is 1 up to rounding


@overload(_tanh)
def _tanh_of_type(x: Any) -> Any:
    """Return the implementation of `_tanh` for a Numba type."""

    def exact(x: Any) -> Any:
        return math.tanh(x)

    def rational(x: Any) -> Any:
        """Return the rational approximation of Eigen, which is within 3 units in the last place."""
        x = _FLAT if x > _FLAT else x  # comparisons, not min and max, so that NaN stays NaN
        x = -_FLAT if x < -_FLAT else x
        square = x * x
        odd = _ODD[5] + square * _ODD[6]
        odd = _ODD[4] + square * odd
        odd = _ODD[3] + square * odd
        odd = _ODD[2] + square * odd
        odd = _ODD[1] + square * odd
        odd = _ODD[0] + square * odd
        even = _EVEN[2] + square * _EVEN[3]
        even = _EVEN[1] + square * even
        even = _EVEN[0] + square * even
        return x * odd / even

    return rational if x == types.float32 else exact
